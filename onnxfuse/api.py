"""The Python face of `onnxfuse optimize`: keyword arguments named like the flags. The argument is never mutated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath

from onnxfuse.config import Config, FusionConfig, FusionMode, Precision, PrepareConfig, VerifyConfig
from onnxfuse.files import private_folder
from onnxfuse.frontend.load import ModelLike
from onnxfuse.pipeline import Bundle
from onnxfuse.pipeline import optimize as run
from onnxfuse.trace import Trace
from onnxfuse.verify.bundle import ahead, verify_bundle


def optimize(
    model: ModelLike,
    *,
    fusion_mode: FusionMode | str = FusionMode.FULL,
    max_fusion_size: int | None = None,
    target_cpu: str = "native",
    verify: bool = True,
    check: int = 1,
    seed: int = 0,
    rtol: float | Mapping[str, float] | None = None,
    atol: float | Mapping[str, float] | None = None,
    allow_mismatches: int | Mapping[str, int] = 0,
    input_data: str | Sequence[str] | None = None,
    test_input_shape: Mapping[str, tuple[int, ...]] | None = None,
    val_range: Mapping[str, tuple[float, float]] | None = None,
    overwrite_input_shape: Mapping[str, tuple[int | str, ...]] | None = None,
    dim_param: Mapping[str, int] | None = None,
    include_subgraph: bool = False,
    save_as_external_data: bool = False,
    skip_optimization: frozenset[str] | set[str] = frozenset(),
    skip_fusion_patterns: frozenset[str] | set[str] = frozenset(),
    keep: frozenset[str] | set[str] = frozenset(),
    custom_op_library: Sequence[str | PathLike[str]] = (),
    exact_conv: bool = False,
    precision: str = "f32",
    strict: bool = False,
    tune: bool = False,
    cache: bool = True,
    trace: Trace | None = None,
    progress: Callable[[str], None] | None = None,
) -> Bundle:
    """Fuse a model and, by default, compare the result with onnxruntime on the original.

    Args:
        model: path, bytes, onnx.ModelProto or onnx_ir.Model.
        fusion_mode: none, tvm, canfuse or full.
        max_fusion_size: atomic nodes per group (default 64).
        target_cpu: "native", or a name of TARGETS.
        verify: compare with onnxruntime at ORT_DISABLE_ALL, with and without the library.
        check: random input sets per sampled shape.
        seed: of the random inputs.
        rtol: relative tolerance, for all outputs or by output name; None = by element type.
        atol: absolute tolerance, for all outputs or by output name; None = by element type.
        allow_mismatches: elements of an output that may differ, for all outputs or by output name.
        input_data: .npz, directory or test_data_set_* to check with instead of random inputs; name:file.npy, several.
        test_input_shape: shapes of the check's inputs, by name.
        val_range: ranges of the check's random inputs, by name.
        overwrite_input_shape: fix input shapes, by name.
        dim_param: fix symbolic dimensions, by name.
        include_subgraph: optimize the bodies of If, Loop and Scan too.
        save_as_external_data: weights beside the model even below 2 GB.
        skip_optimization: names of passes to leave out.
        skip_fusion_patterns: rule codes to switch off.
        keep: names of nodes that stay alone.
        custom_op_library: libraries of the custom ops the model itself uses, for the check.
        exact_conv: no Winograd, convolutions are plain sums of products.
        precision: "bf16" rounds weights that products of few rows are bound by reading to bf16; sums stay in f32.
        strict: fail where something cannot be compiled.
        tune: measure every kernel on this machine and give those that onnxruntime beats back to it; `Bundle.tuning`
            holds the numbers.
        cache: take kernels compiled before from the disk, and keep new ones there.
        trace: hook that sees the result of every stage.
        progress: called with the name of every stage as it starts.

    Returns:
        A Bundle: `.save(path)` writes path and the library beside it; `.model`, `.library`, `.partition`, `.plans`.

    Raises:
        UsageError: the model cannot be read. VerifyError: the numbers do not agree.
    """
    fusion = FusionConfig(
        mode=FusionMode(fusion_mode),
        max_nodes=FusionConfig().max_nodes if max_fusion_size is None else max_fusion_size,
        max_nodes_tvm=FusionConfig().max_nodes_tvm if max_fusion_size is None else max_fusion_size,
        skip=frozenset(skip_fusion_patterns),
        keep=frozenset(keep),
    )
    checks = VerifyConfig(
        enabled=verify,
        runs=check,
        seed=seed,
        rtol=None if isinstance(rtol, Mapping) else rtol,
        atol=None if isinstance(atol, Mapping) else atol,
        output_rtol=dict(rtol) if isinstance(rtol, Mapping) else {},
        output_atol=dict(atol) if isinstance(atol, Mapping) else {},
        allow_mismatches=dict(allow_mismatches) if isinstance(allow_mismatches, Mapping) else {"": allow_mismatches},
        input_data=input_data if isinstance(input_data, str | None) else tuple(input_data),
        test_shapes=dict(test_input_shape or {}),
        val_ranges=dict(val_range or {}),
        precision=Precision(precision),
    )
    config = Config(
        fusion=fusion,
        prepare=PrepareConfig(skip=frozenset(skip_optimization)),
        verify=checks,
        target=target_cpu,
        overwrite_input_shape=dict(overwrite_input_shape or {}),
        dim_params=dict(dim_param or {}),
        include_subgraph=include_subgraph,
        save_as_external_data=save_as_external_data,
        exact_conv=exact_conv,
        precision=Precision(precision),
        strict=strict,
        tune=tune,
        custom_op_libraries=tuple(fspath(lib) for lib in custom_op_library),
        cache=cache,
    )
    with ahead(model, config) as begun:
        bundle = run(model, config, trace, progress)
        if verify:
            with private_folder() as folder:
                verify_bundle(model, bundle, folder, config, begun)
    return bundle
