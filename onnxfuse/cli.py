"""The command line: thin adapters from flags to the functions that do the work. The only place that imports typer.

Exit codes: 0 done; 1 the input, a flag or the machine is at fault (one `error[CODE]` on standard error); 2 the
optimized model does not agree with the original (nothing is written), or `doctor` found something missing. Heavy
modules are imported inside the commands, so that `onnxfuse --help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import json as jsonlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from onnxfuse.codes import BY_CODE, OPTIONAL
from onnxfuse.config import Config, FusionConfig, FusionMode, PrepareConfig, VerifyConfig
from onnxfuse.errors import OnnxfuseError, UsageError, VerifyError
from onnxfuse.files import private_folder

if TYPE_CHECKING:
    from onnxfuse.emit.bundle import Staged, Written
    from onnxfuse.explain import Explanation, Summary
    from onnxfuse.frontend.atomize import Atomized
    from onnxfuse.frontend.bodies import Scope
    from onnxfuse.frontend.rewrite import Note
    from onnxfuse.inspection import Inspection
    from onnxfuse.ir.graph import Graph
    from onnxfuse.ir.partition import Partition
    from onnxfuse.ir.plan import Plans
    from onnxfuse.trace import Trace
    from onnxfuse.tuning import Tuning
    from onnxfuse.verify.compare import Report
    from onnxfuse.verify.facts import ModelFacts

T = TypeVar("T")

# typer's base class of usage errors has no public name of its own, and moved between versions.
_FlagError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="onnxfuse",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Fuse an ONNX model for the CPU.

`onnxfuse optimize in.onnx out.onnx` writes out.onnx and, beside it, out.so: an onnxruntime custom-op library with a
compiled kernel for every group of operators. Any ONNX runtime loads out.onnx; with out.so registered, onnxruntime runs
the kernels.

Start with:

    onnxfuse optimize model.onnx fused.onnx      # verified against onnxruntime before anything is written
    onnxfuse compare model.onnx fused.onnx       # numbers, both in onnxruntime
    onnxfuse bench model.onnx fused.onnx         # speed, interleaved
    onnxfuse inspect fused.onnx                  # the groups, and why the rest was left
    onnxfuse explain model.onnx                  # every decision, by code; one node; one edge
    onnxfuse trace model.onnx                    # what each phase changed
    onnxfuse doctor                              # whether this machine has what is needed
""",
)


class _Form(StrEnum):
    """What `trace --format` takes."""

    DIFF = "diff"
    FULL = "full"
    JSON = "json"


# ---- options that several commands share

ModelArg = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]
InputData = Annotated[
    list[str] | None,
    typer.Option(
        "--input-data",
        metavar="DATA",
        help="Inputs: x.npz, name:x.npy (repeatable), or a folder with test_data_set_*, input_0.pb, .npy, .npz.",
    ),
]
TestShape = Annotated[
    list[str] | None,
    typer.Option("--test-input-shape", metavar="NAME:DIMS", help="Shape of a random input, e.g. x:1,3,320,320."),
]
ValRange = Annotated[
    list[str] | None,
    typer.Option("--val-range", metavar="[NAME:]LO,HI", help="Range of random values; integers include both ends."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the random inputs.")]
Check = Annotated[int, typer.Option("--check", min=1, metavar="N", help="Random input sets per shape.")]
Rtol = Annotated[
    list[str] | None,
    typer.Option("--rtol", metavar="[OUT:]X", help="Relative tolerance, for all outputs or one. Default: by dtype."),
]
Atol = Annotated[
    list[str] | None,
    typer.Option("--atol", metavar="[OUT:]X", help="Absolute tolerance, for all outputs or one. Default: by dtype."),
]
AllowMismatches = Annotated[
    list[str] | None,
    typer.Option("--allow-mismatches", metavar="[OUT:]N", help="Elements of an output that may differ."),
]
CustomOps = Annotated[
    list[Path] | None,
    typer.Option("--custom-op-library", metavar="LIB", help="Library of the custom ops the model itself uses."),
]
Mode = Annotated[FusionMode, typer.Option("--fusion-mode", help="How far to fuse.")]
MaxSize = Annotated[
    int | None,
    typer.Option("--max-fusion-size", min=1, metavar="N", help="Atomic nodes per group.", show_default="64"),
]
TargetCpu = Annotated[str, typer.Option("--target-cpu", metavar="NAME", help="See `onnxfuse targets`.")]
OverwriteShape = Annotated[
    list[str] | None,
    typer.Option(
        "--overwrite-input-shape", metavar="NAME:DIMS", help="Fix an input's shape in the output, e.g. x:1,3,224,224."
    ),
]
DimParam = Annotated[
    list[str] | None, typer.Option("--dim-param", metavar="SYM=N", help="Fix a symbolic dimension, e.g. batch=1.")
]
SkipOptimization = Annotated[
    list[str] | None,
    typer.Option(
        "--skip-optimization",
        metavar="NAMES",
        help="Simplifications to leave out: fold, cse, identity, pad_into_conv, bn_into_conv, conv_before_resize, "
        "dead_code.",
    ),
]
SkipFusion = Annotated[
    list[str] | None,
    typer.Option("--skip-fusion-patterns", metavar="CODES", help="Fusion rules to leave out, by code."),
]
IncludeSubgraph = Annotated[
    bool, typer.Option("--include-subgraph", help="Optimize the bodies of If, Loop and Scan too.")
]
Keep = Annotated[list[str] | None, typer.Option("--keep", metavar="NODE", help="A node that stays alone (repeatable).")]
Json = Annotated[bool, typer.Option("--json", help="Print data instead of tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Stages and times on standard error.")]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Intra-op threads; 0 = onnxruntime's choice.")]
Library = Annotated[
    str,
    typer.Option("--library", metavar="LIB", help="Our library: a path, `auto` (beside the model) or `none`."),
]


# ---- commands


@app.command(
    epilog="""Examples:

    onnxfuse optimize model.onnx fused.onnx
    onnxfuse optimize model.onnx fused.onnx --target-cpu x86-64-v3 --test-input-shape image:1,3,640,640
    onnxfuse optimize model.onnx --dry-run -v
""",
)
def optimize(
    model: ModelArg,
    output: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Where to write; OUT.so goes beside it.", show_default=False)
    ] = None,
    fusion_mode: Mode = FusionMode.FULL,
    max_fusion_size: MaxSize = None,
    target_cpu: TargetCpu = "native",
    verify: Annotated[bool, typer.Option(help="Compare with onnxruntime before writing.")] = True,
    check: Check = 1,
    seed: Seed = 0,
    rtol: Rtol = None,
    atol: Atol = None,
    allow_mismatches: AllowMismatches = None,
    input_data: InputData = None,
    test_input_shape: TestShape = None,
    val_range: ValRange = None,
    overwrite_input_shape: OverwriteShape = None,
    dim_param: DimParam = None,
    include_subgraph: IncludeSubgraph = False,
    save_as_external_data: Annotated[
        bool, typer.Option("--save-as-external-data", help="Weights in OUT.data; automatic near 2 GB.")
    ] = False,
    skip_optimization: SkipOptimization = None,
    skip_constant_folding: Annotated[bool, typer.Option("--skip-constant-folding")] = False,
    skip_fusion_patterns: SkipFusion = None,
    keep: Keep = None,
    custom_op_library: CustomOps = None,
    exact_conv: Annotated[
        bool, typer.Option("--exact-conv", help="No Winograd: convolutions are plain sums of products.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where something cannot be compiled.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure the kernels here; onnxruntime gets back those it runs faster.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take kernels compiled before from the disk, and keep new ones.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything, write nothing.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Fuse MODEL and write OUT with its library.

    The result is compared with onnxruntime on the original, with and without the library, before anything is written;
    on a mismatch nothing is written and the exit code is 2.
    """
    if output is None and not dry_run:
        raise UsageError("E_NO_OUTPUT", "no output file given", hint="onnxfuse optimize MODEL OUT, or --dry-run")
    config = Config(
        fusion=_fusion(fusion_mode, max_fusion_size, skip_fusion_patterns, keep),
        prepare=_prepare(skip_optimization, skip_constant_folding),
        verify=_verify(check, seed, rtol, atol, allow_mismatches, input_data, test_input_shape, val_range, verify),
        target=target_cpu,
        overwrite_input_shape=_shapes_with_symbols(overwrite_input_shape or ()),
        dim_params=_dim_params(dim_param or ()),
        include_subgraph=include_subgraph,
        save_as_external_data=save_as_external_data,
        exact_conv=exact_conv,
        strict=strict,
        tune=tune,
        custom_op_libraries=tuple(str(lib) for lib in custom_op_library or ()),
        cache=cache,
    )
    # Imported here: onnx, onnxruntime and LLVM take a second to load.
    from onnxfuse import pipeline
    from onnxfuse.emit.bundle import check_output

    if output is not None:
        check_output(output, model)
    progress = _Progress(verbose)
    from onnxfuse.inspection import inspect_all

    with progress, contextlib.ExitStack() as stack:
        bundle = pipeline.optimize(model, config, _trace(model, progress), progress.starts)
        found, tuning = inspect_all(bundle.plans), bundle.tuning
        scratch = stack.enter_context(private_folder())
        with progress.step("write"):
            where = output if output is not None and not dry_run else scratch / "model.onnx"
            pair = stack.enter_context(bundle.staged(where))
        del bundle  # the weights are on disk: the sessions that follow need the memory
        with progress.step("verify"):
            reports = _verify_pair(model, pair, config, custom_op_library or ()) if verify else ()
        result = _result(model, pair, found, tuning)
        written = pair.publish() if output is not None and not dry_run else None
    _print_result(result, written, reports, json)


def _verify_pair(model: Path, pair: Staged, config: Config, custom_op_libraries: Sequence[Path]) -> tuple[Report, ...]:
    """Compare before it is published; a mismatch is shown before it is raised."""
    from onnxfuse.verify.bundle import MismatchError, verify_pair

    def named(reports: Iterable[Report]) -> tuple[Report, ...]:
        """The names people gave, in place of the hidden folder's."""
        library = str(pair.target.with_suffix(".so"))
        shown = {str(pair.model): str(pair.target)}
        return tuple(
            replace(r, candidate=shown.get(r.candidate, r.candidate), libraries=tuple(library for _ in r.libraries))
            for r in reports
        )

    try:
        return named(verify_pair(model, pair.model, pair.library, config, custom_op_libraries, bodies=pair.bodies))
    except MismatchError as exc:
        from onnxfuse import report

        report.show(*(report.comparison(r) for r in named(exc.reports) if not r.ok), stderr=True)
        raise


@dataclass(frozen=True, slots=True)
class _Result:
    """What there is to say about an `optimize`."""

    model: Path
    before: ModelFacts
    after: ModelFacts
    library: int | None  # bytes
    found: Inspection
    tuning: Tuning | None


def _result(model: Path, pair: Staged, found: Inspection, tuning: Tuning | None) -> _Result:
    from onnxfuse.verify.facts import facts

    library = pair.library.stat().st_size if pair.library is not None else None
    return _Result(model, facts(model), facts(pair.model), library, found, tuning)


def _print_result(result: _Result, written: Written | None, reports: tuple[Report, ...], json: bool) -> None:
    before, after = result.before, result.after
    if json:
        _print_json(
            {
                "model": str(result.model),
                "output": str(written.model) if written is not None else None,
                "ops": {"before": before.ops, "after": after.ops},
                "bytes_on_disk": {"before": before.bytes, "after": after.bytes, "library": result.library},
                "verified": [r.json() for r in reports],
                **({"tuning": result.tuning.json()} if result.tuning is not None else {}),
                **result.found.json(),
            }
        )
        return
    from onnxfuse import report

    sizes = report.Sizes(before.bytes, after.bytes, result.library)
    report.show(report.summary(before.ops, after.ops, result.found, sizes))
    if result.tuning is not None:
        report.show(report.tuning(result.tuning))
    for r in reports:
        print(f"{r.reference}: {r.summary()}" if r.reference.startswith("body ") else r.summary())
    if written is None:
        print("nothing written (--dry-run)")
        return
    print("wrote " + ", ".join(str(f) for f in (written.model, written.library, written.data) if f is not None))


@app.command(
    epilog="""Examples:

    onnxfuse compare model.onnx fused.onnx
    onnxfuse compare model.onnx fused.onnx --library none --input-data test_data_set_0
    onnxfuse compare model.onnx fused.onnx --rtol 1e-3 --rtol logits:1e-5 --check 10
""",
)
def compare(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="The original model.", show_default=False)],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="The model to judge.", show_default=False)],
    library: Library = "auto",
    check: Check = 1,
    seed: Seed = 0,
    rtol: Rtol = None,
    atol: Atol = None,
    allow_mismatches: AllowMismatches = None,
    input_data: InputData = None,
    test_input_shape: TestShape = None,
    val_range: ValRange = None,
    custom_op_library: CustomOps = None,
    threads: Threads = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run both models in onnxruntime on the same inputs and compare every output.

    The reference runs at ORT_DISABLE_ALL. A candidate with our library beside it is compared without and with it.
    """
    _require_file(reference)
    _require_file(candidate)
    config = _verify(check, seed, rtol, atol, allow_mismatches, input_data, test_input_shape, val_range)
    ours = _library(candidate, library)
    libraries = [ours] if ours is None or library != "auto" else [None, ours]
    from onnxfuse.verify.compare import compare_many

    reports = compare_many(
        reference, candidate, libraries, config=config, custom_op_libraries=custom_op_library or (), threads=threads
    )
    if json:
        _print_json({"ok": all(r.ok for r in reports), "reports": [r.json() for r in reports]})
    else:
        from onnxfuse import report

        report.show(*(report.comparison(r, every_run=verbose) for r in reports))
    if not all(r.loaded for r in reports):
        raise typer.Exit(1)
    if not all(r.ok for r in reports):
        raise typer.Exit(2)


@app.command(
    epilog="""Examples:

    onnxfuse bench model.onnx fused.onnx
    onnxfuse bench model.onnx fused.onnx --threads 4 --test-input-shape x:1,3,640,640
    onnxfuse bench fused.onnx
""",
)
def bench(
    model: ModelArg,
    candidate: Annotated[
        Path | None, typer.Argument(metavar="[CANDIDATE]", help="The optimized model.", show_default=False)
    ] = None,
    library: Library = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Intra-op threads; 0 = onnxruntime's choice.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="How long, for all contestants together.")] = 5.0,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Exactly this many rounds instead.")] = None,
    fallback: Annotated[bool, typer.Option("--fallback", help="Also the candidate without its library.")] = False,
    seed: Seed = 0,
    input_data: InputData = None,
    test_input_shape: TestShape = None,
    val_range: ValRange = None,
    custom_op_library: CustomOps = None,
    json: Json = False,
) -> None:
    """Time MODEL against CANDIDATE in onnxruntime at ORT_ENABLE_ALL, interleaved in one process."""
    _require_file(model)
    if candidate is not None:
        _require_file(candidate)
    config = _verify(1, seed, None, None, None, input_data, test_input_shape, val_range)
    from onnxfuse.verify import ort
    from onnxfuse.verify.bench import Contestant
    from onnxfuse.verify.bench import bench as run_bench
    from onnxfuse.verify.inputs import samples, specs

    theirs = tuple(custom_op_library or ())
    contestants = []
    for path in dict.fromkeys((model, candidate or model)):
        ours = _library(path, library) if path != model or candidate is None else _library(path, "auto")
        if ours is not None and fallback:
            contestants.append(Contestant(f"{path} without library", path, theirs))
        contestants.append(Contestant(f"{path}", path, (*theirs, *([ours] if ours is not None else []))))
    narrow = specs(ort.session(candidate, libraries=contestants[-1].libraries)) if candidate is not None else None
    sample, _ = next(iter(samples(ort.session(model, libraries=contestants[0].libraries), config, narrow)))
    result = run_bench(contestants, sample.feeds, sample.shapes, threads=threads, seconds=seconds, rounds=rounds)
    if json:
        _print_json(result.json())
        return
    from onnxfuse import report

    report.show(report.timings(result))


@app.command(
    epilog="""Examples:

    onnxfuse inspect fused.onnx
    onnxfuse inspect model.onnx --fusion-mode tvm --json
""",
)
def inspect(
    model: ModelArg,
    fusion_mode: Mode = FusionMode.FULL,
    max_fusion_size: MaxSize = None,
    target_cpu: TargetCpu = "native",
    overwrite_input_shape: OverwriteShape = None,
    dim_param: DimParam = None,
    include_subgraph: IncludeSubgraph = False,
    skip_optimization: SkipOptimization = None,
    skip_constant_folding: Annotated[bool, typer.Option("--skip-constant-folding")] = False,
    skip_fusion_patterns: SkipFusion = None,
    keep: Keep = None,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Generate the kernels too: finds what cannot be compiled.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the groups: of an optimized model as it is, of any other as `optimize` would make them."""
    _require_file(model)
    from onnxfuse.inspection import from_json
    from onnxfuse.verify.facts import recorded

    record = recorded(model)
    found = from_json(record) if record is not None else None
    if found is None:
        config = Config(
            fusion=_fusion(fusion_mode, max_fusion_size, skip_fusion_patterns, keep),
            prepare=_prepare(skip_optimization, skip_constant_folding),
            target=target_cpu,
            overwrite_input_shape=_shapes_with_symbols(overwrite_input_shape or ()),
            dim_params=_dim_params(dim_param or ()),
            include_subgraph=include_subgraph,
        )
        found = _inspect_input(model, config, compile_, _Progress(verbose))
    if json:
        _print_json(found.json())
        return
    from onnxfuse import report

    report.show(report.groups(found))


def _inspect_input(model: Path, config: Config, compile_: bool, progress: _Progress) -> Inspection:
    from onnxfuse import pipeline
    from onnxfuse.inspection import inspect_all
    from onnxfuse.trace import Stopped

    trace = _trace(model, progress)
    if not compile_:
        trace.stop_after = "plan"
    with progress:
        try:
            plans = pipeline.optimize(model, config, trace, progress.starts).plans
        except Stopped as stopped:
            plans = _plans(stopped.result)
    return inspect_all(plans)


def _plans(result: object) -> Plans:
    from onnxfuse.ir.plan import Plans

    assert isinstance(result, Plans)
    return result


@app.command(
    epilog="""Examples:

    onnxfuse run fused.onnx --input-data x.npz --save-outputs y.npz
    onnxfuse run fused.onnx --library none --seed 3
""",
)
def run(
    model: ModelArg,
    library: Library = "auto",
    save_outputs: Annotated[
        Path | None, typer.Option("--save-outputs", "-o", metavar="NPZ", help="Write the outputs here.")
    ] = None,
    save_inputs: Annotated[
        Path | None, typer.Option("--save-inputs", metavar="NPZ", help="Write the inputs that were used.")
    ] = None,
    seed: Seed = 0,
    input_data: InputData = None,
    test_input_shape: TestShape = None,
    val_range: ValRange = None,
    custom_op_library: CustomOps = None,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Run a model once in onnxruntime on given or random inputs; print what comes out, or save it."""
    _require_file(model)
    config = _verify(1, seed, None, None, None, input_data, test_input_shape, val_range)
    from onnxfuse.verify import ort
    from onnxfuse.verify.inputs import samples, save_npz

    ours = _library(model, library)
    libraries = [*(custom_op_library or ()), *([ours] if ours is not None else [])]
    sess = ort.session(model, level=ort.Level.ALL, threads=threads, libraries=libraries)
    sample, results = next(iter(samples(sess, config)))
    if save_inputs is not None:
        save_npz(save_inputs, sample.feeds)
    if save_outputs is not None:
        save_npz(save_outputs, results)
    rows = _result_rows(results)
    if json:
        _print_json(
            {name: {"type": kind, "min": low, "max": high, "mean": mean} for name, kind, low, high, mean in rows}
        )
        return
    from onnxfuse import report

    report.show(report.listing(("output", "type", "min", "max", "mean"), rows))


def _result_rows(results: Mapping[str, object]) -> list[tuple[str, str, str, str, str]]:
    import numpy as np

    rows = []
    for name, value in results.items():
        array = np.asarray(value)
        kind = f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
        stats = ["", "", ""]
        if array.size and (array.dtype.kind in "fiub" or "float" in array.dtype.name):
            numbers = array.astype(np.float64)
            stats = [f"{x:.6g}" for x in (numbers.min(), numbers.max(), numbers.mean())]
        rows.append((name, kind, stats[0], stats[1], stats[2]))
    return rows


@app.command(
    epilog="""Examples:

    onnxfuse explain model.onnx
    onnxfuse explain model.onnx --node /encoder/layer.0/Softmax
    onnxfuse explain model.onnx --edge conv,relu --fusion-mode tvm --json
""",
)
def explain(
    model: ModelArg,
    edge: Annotated[
        str, typer.Option("--edge", metavar="A,B", help="Two nodes, by name of node, value or operator.")
    ] = "",
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="One node, value, or operator.")] = "",
    fusion_mode: Mode = FusionMode.FULL,
    max_fusion_size: MaxSize = None,
    target_cpu: TargetCpu = "native",
    overwrite_input_shape: OverwriteShape = None,
    dim_param: DimParam = None,
    include_subgraph: IncludeSubgraph = False,
    skip_optimization: SkipOptimization = None,
    skip_constant_folding: Annotated[bool, typer.Option("--skip-constant-folding")] = False,
    skip_fusion_patterns: SkipFusion = None,
    keep: Keep = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say why nodes were fused or not: one node, one edge, or every decision by code.

    Runs the stages up to the plan; no code is generated. `onnxfuse rules` lists the codes.
    """
    _require_file(model)
    if edge and node:
        raise UsageError("E_FLAG", "--edge and --node together", hint="give one of them")
    config = Config(
        fusion=_fusion(fusion_mode, max_fusion_size, skip_fusion_patterns, keep),
        prepare=_prepare(skip_optimization, skip_constant_folding),
        target=target_cpu,
        overwrite_input_shape=_shapes_with_symbols(overwrite_input_shape or ()),
        dim_params=_dim_params(dim_param or ()),
        include_subgraph=include_subgraph,
    )
    from onnxfuse.explain import answers

    ran = _planned(model, config, _Progress(verbose))
    found = answers(ran.originals, ran.whole, ran.plans, ran.notes)
    if not edge and not node:
        said: Explanation | Summary = found.summary()
    else:
        said = found.node(node) if node else found.edge(*_edge(edge, found.aliases))
    if json:
        _print_json(said.json())
        return
    from onnxfuse import report

    report.show(report.explanation(said))


def _edge(text: str, names: Mapping[str, object]) -> tuple[str, str]:
    """`A,B`; names may hold commas, so a split into two known names wins."""
    parts = text.split(",")
    splits = [(",".join(parts[:k]), ",".join(parts[k:])) for k in range(1, len(parts))]
    if not splits:
        raise UsageError("E_FLAG", f"cannot read --edge {text!r}", hint="write --edge producer,consumer")
    return next((s for s in splits if s[0] in names and s[1] in names), splits[0])


@app.command(
    epilog="""Examples:

    onnxfuse trace model.onnx
    onnxfuse trace model.onnx --phase 2 --only conv_add_relu
    onnxfuse trace model.onnx --print-after fuse
    onnxfuse trace model.onnx --stop-after plan --dump stages/ --diff
    onnxfuse trace model.onnx --export-stage prepare prepared.onnx
""",
)
def trace(
    model: ModelArg,
    phase: Annotated[
        int, typer.Option("--phase", min=0, max=4, help="1 legalize, 2 group, 3 merge, 4 schedule; 0 = all.")
    ] = 0,
    form: Annotated[_Form, typer.Option("--format", help="What changed, everything, or data.")] = _Form.DIFF,
    only: Annotated[
        str, typer.Option("--only", metavar="GROUP", help="One group: its name, or a node or value in it.")
    ] = "",
    print_after: Annotated[
        list[str] | None, typer.Option("--print-after", metavar="STAGES", help="Stages to print, or `all`.")
    ] = None,
    stop_after: Annotated[str, typer.Option("--stop-after", metavar="STAGE", help="Go no further.")] = "",
    dump: Annotated[Path | None, typer.Option("--dump", metavar="DIR", help="One file per stage.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="With --dump: what each stage changed.")] = False,
    export_stage: Annotated[
        tuple[str, Path] | None,
        typer.Option("--export-stage", metavar="STAGE OUT", help="Write this stage as a model that runs everywhere."),
    ] = None,
    fusion_mode: Mode = FusionMode.FULL,
    max_fusion_size: MaxSize = None,
    target_cpu: TargetCpu = "native",
    overwrite_input_shape: OverwriteShape = None,
    dim_param: DimParam = None,
    include_subgraph: IncludeSubgraph = False,
    skip_optimization: SkipOptimization = None,
    skip_constant_folding: Annotated[bool, typer.Option("--skip-constant-folding")] = False,
    skip_fusion_patterns: SkipFusion = None,
    keep: Keep = None,
) -> None:
    """Show how the model becomes kernels: what each of four phases changed.

    With --print-after, --dump or --stop-after: what each stage of `optimize` returns, in full; the times come last, on
    standard error. With --export-stage: a model without a library, of the stages read, prepare and atomize without
    custom nodes, of fuse, layout, kernelize and plan with a function for every group.
    """
    _require_file(model)
    config = Config(
        fusion=_fusion(fusion_mode, max_fusion_size, skip_fusion_patterns, keep),
        prepare=_prepare(skip_optimization, skip_constant_folding),
        target=target_cpu,
        overwrite_input_shape=_shapes_with_symbols(overwrite_input_shape or ()),
        dim_params=_dim_params(dim_param or ()),
        include_subgraph=include_subgraph,
    )
    if export_stage is not None:
        _export(model, config, *export_stage)
    if print_after or stop_after or dump is not None:
        _trace_stages(model, config, print_after, stop_after, dump, diff)
        return
    if export_stage is not None:
        return
    from onnxfuse.phases import stories

    ran = _planned(model, config, _Progress(False))
    told = stories(ran.originals, ran.plans, only)
    if form is _Form.JSON:
        scopes = [{"scope": name, **s.json(phase)} for name, s in told.items()]
        _print_json({"model": model.name, "mode": str(fusion_mode), **scopes[0], "bodies": scopes[1:]})
        return
    cap = config.fusion.max_nodes_tvm if fusion_mode is FusionMode.TVM else config.fusion.max_nodes
    print(f"# onnxfuse trace  model={model.name}  mode={fusion_mode}  cap={cap}")
    for name, s in told.items():
        if name:
            print(f"# body {name}")
        print("\n".join(s.text(str(form), phase)))


def _trace_stages(
    model: Path, config: Config, print_after: list[str] | None, stop_after: str, dump: Path | None, diff: bool
) -> None:
    from onnxfuse import pipeline
    from onnxfuse.trace import Stopped, Trace

    stages = _names(print_after)
    unknown = (stages - {"all"} | ({stop_after} if stop_after else set())) - set(pipeline.STAGES)
    if unknown:
        raise UsageError("E_FLAG", f"no stage {min(unknown)!r}", hint=f"stages: {', '.join(pipeline.STAGES)}")
    if not stages and dump is None:
        stages = frozenset({stop_after})
    hook = Trace(print_after=stages, dump=dump, diff=diff, stop_after=stop_after, reproduce=_reproduce(model))
    with contextlib.suppress(Stopped):
        pipeline.optimize(model, config, hook)
    print(hook.table(), file=sys.stderr)


def _export(model: Path, config: Config, stage: str, out: Path) -> None:
    """Write one stage as an ONNX model."""
    from onnxfuse.emit.bundle import check_output, write
    from onnxfuse.emit.stage import EXPORTS, export

    if stage not in EXPORTS:
        hint = f"stages: {', '.join(EXPORTS)}"
        raise UsageError("E_STAGE", f"stage {stage!r} cannot be written as an ONNX model", hint=hint)
    check_output(out, model)
    ran = _planned(model, config, _Progress(False), "plan" if stage == "plan" else "kernelize")
    emission = export(stage, ran.scopes, ran.atomized, ran.plans)
    written = write(emission, None, out, external_data=config.save_as_external_data)
    print("wrote " + ", ".join(str(f) for f in (written.model, written.data) if f is not None))


@dataclass(frozen=True, slots=True)
class _Planned:
    """Results of the stages up to the plan."""

    scopes: tuple[Scope, ...]
    atomized: tuple[Atomized, ...]
    whole: tuple[Partition, ...]  # before kernelize
    plans: Plans

    @property
    def originals(self) -> tuple[Graph, ...]:
        return tuple(s.source.graph for s in self.scopes)

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(dict.fromkeys(n for s in self.scopes for n in s.prepared.notes))


def _planned(model: Path, config: Config, progress: _Progress, last: str = "plan") -> _Planned:
    """Run the stages up to `plan`, or to `kernelize` (then nothing is planned yet)."""
    from onnxfuse import pipeline
    from onnxfuse.frontend.atomize import Atomized
    from onnxfuse.frontend.bodies import Scope
    from onnxfuse.ir.partition import Partition
    from onnxfuse.ir.plan import Kernels, Plans
    from onnxfuse.trace import Stopped

    hook = _trace(model, progress)
    hook.stop_after = last
    with progress, contextlib.suppress(Stopped):
        pipeline.optimize(model, config, hook, progress.starts)
    last_result = hook.result(last)
    if isinstance(last_result, Kernels):
        made = last_result
        last_result = Plans(made.partition, (), made.calls, made.refused, made.bodies)
    return _Planned(
        _all_of(Scope, hook.result("bodies")),
        _all_of(Atomized, hook.results("atomize")),
        _all_of(Partition, hook.results("layout")),
        _typed(Plans, last_result),
    )


def _all_of(kind: type[T], values: object) -> tuple[T, ...]:
    assert isinstance(values, tuple), values
    return tuple(_typed(kind, v) for v in values)


def _typed(kind: type[T], value: object) -> T:
    assert isinstance(value, kind), value
    return value


@app.command(
    epilog="""Examples:

    onnxfuse rules
    onnxfuse rules NF_A_
    onnxfuse rules NF_NODE_CAP --json
""",
)
def rules(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="Only this code, or codes that begin so.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List every code: who gives it, what it means, the threshold behind it, where the rule comes from."""
    from onnxfuse.codes import CODES, default

    found = [c for c in CODES if code is None or c.code == code] or [c for c in CODES if c.code.startswith(str(code))]
    if not found:
        near = get_close_matches(str(code), [c.code for c in CODES])
        hint = f"did you mean: {', '.join(near)}" if near else "onnxfuse rules lists all"
        raise UsageError("E_NO_CODE", f"there is no code {code!r}", hint=hint)
    if json:
        _print_json(
            [
                {
                    "code": c.code,
                    "stage": c.stage,
                    "meaning": c.meaning,
                    "threshold": c.threshold or None,
                    "default": default(c),
                    "origin": c.origin,
                    "optional": c.optional,
                }
                for c in found
            ]
        )
        return
    from onnxfuse import report

    rows = [(c.code + "*" * c.optional, c.stage, c.meaning, c.threshold, _text(default(c)), c.origin) for c in found]
    report.show(report.listing(("code", "stage", "meaning", "threshold", "default", "origin"), rows, ("code", "stage")))
    print("* can be left out with --skip-fusion-patterns")


@app.command()
def ops(
    name: Annotated[str | None, typer.Argument(metavar="[OP]", help="Only this operator.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the operators the op table knows, since which opset, and what becomes of them."""
    from onnxfuse.ops import entries

    found = [op for op in entries() if name is None or op.name == name]
    if not found:
        why = "operators that are not in the table stay with onnxruntime, unchanged"
        raise UsageError("E_NO_OP", f"the op table has no {name!r}", why)
    rows = [(str(op), str(op.since), str(op.family), op.reason or op.doc.partition("\n")[0]) for op in found]
    columns = ("op", "since", "family", "meaning")
    if json:
        _print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from onnxfuse import report

    report.show(report.listing(columns, rows))


def _text(number: object) -> str:
    return "" if number is None else str(number)


@app.command()
def targets(json: Json = False) -> None:
    """List the CPUs code can be generated for; `native` is the widest this machine has."""
    from onnxfuse.codegen.object import host_features
    from onnxfuse.target import TARGETS, by_name

    native = by_name("native", host_features()).name
    rows = [
        (t.name, t.triple, str(t.vector_bits), " ".join(t.features), "native" if t.name == native else "")
        for t in TARGETS
    ]
    columns = ("name", "triple", "vector bits", "features", "")
    if json:
        _print_json(
            [dict(zip(("name", "triple", "vector_bits", "features", "native"), row, strict=True)) for row in rows]
        )
        return
    from onnxfuse import report

    report.show(report.listing(columns, rows))


@app.command(
    epilog="""Examples:

    onnxfuse doctor
    onnxfuse doctor --json > report.json
""",
)
def doctor(json: Json = False) -> int:
    """Check that this machine has what onnxfuse needs, up to a kernel that is built, loaded and run.

    Exit code 2 when something is missing, with a hint for each.
    """
    from onnxfuse.doctor import Status, examine

    findings = examine()
    if json:
        _print_json([f.json() for f in findings])
    else:
        from onnxfuse import report

        report.show(report.doctor(findings))
    return 0 if all(f.status is Status.OK for f in findings) else 2


def _print_version(value: bool) -> None:
    if not value:
        return
    packages = ("onnxfuse", "onnx", "onnx-ir", "onnxruntime", "llvmlite", "ziglang", "numpy")
    print("\n".join(f"{name} {_version(name)}" for name in packages))
    raise typer.Exit(0)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print versions and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options before the command."""


# ---- flags to configuration


def _names(texts: Iterable[str] | None) -> frozenset[str]:
    """`a,b` and repeated flags alike."""
    return frozenset(part for text in texts or () for part in text.split(",") if part)


def _fusion(mode: FusionMode, size: int | None, skip: list[str] | None, keep: list[str] | None) -> FusionConfig:
    for code in sorted(_names(skip) - OPTIONAL):
        what = f"{code} cannot be left out" if code in BY_CODE else f"no fusion rule {code!r}"
        raise UsageError("E_FLAG", what, hint=f"--skip-fusion-patterns takes: {', '.join(sorted(OPTIONAL))}")
    config = FusionConfig(mode=mode, skip=_names(skip), keep=frozenset(keep or ()))
    return config if size is None else replace(config, max_nodes=size, max_nodes_tvm=size)


def _prepare(skip: list[str] | None, no_folding: bool) -> PrepareConfig:
    known = frozenset({"fold", "cse", "identity", "pad_into_conv", "bn_into_conv", "conv_before_resize", "dead_code"})
    names = _names(skip) | (frozenset({"fold"}) if no_folding else frozenset())
    if names - known:
        wrong = min(names - known)
        raise UsageError("E_FLAG", f"no simplification {wrong!r}", hint=f"one of: {', '.join(sorted(known))}")
    return PrepareConfig(skip=names)


def _verify(
    runs: int,
    seed: int,
    rtol: list[str] | None,
    atol: list[str] | None,
    allow: list[str] | None,
    input_data: list[str] | None,
    test_shapes: list[str] | None,
    ranges: list[str] | None,
    enabled: bool = True,
) -> VerifyConfig:
    relative, absolute = _per_output("--rtol", rtol, float), _per_output("--atol", atol, float)
    return VerifyConfig(
        enabled=enabled,
        runs=runs,
        seed=seed,
        rtol=relative.pop("", None),
        atol=absolute.pop("", None),
        output_rtol=relative,
        output_atol=absolute,
        allow_mismatches={k: int(v) for k, v in _per_output("--allow-mismatches", allow, int).items()},
        input_data=tuple(input_data) if input_data else None,
        test_shapes=_test_shapes(test_shapes or ()),
        val_ranges=_val_ranges(ranges or ()),
    )


def _test_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    if not texts:
        return {}
    from onnxfuse.verify.inputs import parse_shapes

    return parse_shapes(texts)


def _val_ranges(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    if not texts:
        return {}
    from onnxfuse.verify.inputs import parse_ranges

    return parse_ranges(texts)


def _per_output(flag: str, texts: Iterable[str] | None, read: Callable[[str], float]) -> dict[str, float]:
    """`1e-4` (key "") and `out:1e-4`."""
    out: dict[str, float] = {}
    for text in texts or ():
        name, _, number = text.rpartition(":")
        try:
            out[name] = read(number)
        except ValueError:
            raise UsageError(
                "E_FLAG", f"cannot read {flag} {text!r}", hint=f"{flag} 1e-4 or {flag} output:1e-4"
            ) from None
        if not out[name] >= 0:
            raise UsageError("E_FLAG", f"{flag} {text!r} is negative")
    return out


def _shapes_with_symbols(texts: Iterable[str]) -> dict[str, tuple[int | str, ...]]:
    out: dict[str, tuple[int | str, ...]] = {}
    for text in texts:
        name, colon, dims = text.rpartition(":")
        parts = [d.strip() for d in dims.split(",")] if dims else []
        if not colon or not name or not all(parts) or any(d.startswith("-") for d in parts):
            what = f"cannot read --overwrite-input-shape {text!r}"
            raise UsageError(
                "E_FLAG", what, hint="write name:1,3,224,224; a dimension may be a symbol: name:N,3,224,224"
            )
        out[name] = tuple(int(d) if d.isdecimal() else d for d in parts)
    return out


def _dim_params(texts: Iterable[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for text in texts:
        name, equals, size = text.rpartition("=")
        if not equals or not name or not size.isdecimal():
            raise UsageError("E_FLAG", f"cannot read --dim-param {text!r}", hint="write --dim-param batch=1")
        out[name] = int(size)
    return out


def _library(model: Path, choice: str) -> Path | None:
    """Our library for a model: beside it, none, or where the flag says."""
    if choice == "none":
        return None
    if choice == "auto":
        from onnxfuse.runtime.session import check_pair, library_path

        beside = library_path(model)
        if not beside.is_file():
            return None
        check_pair(model, beside)
        return beside
    if not Path(choice).is_file():
        raise UsageError("E_NO_FILE", f"no library {choice!r}", hint="--library takes a path, auto or none")
    return Path(choice)


def _require_file(path: Path) -> None:
    if path.is_file():
        return
    problem = "is a folder" if path.is_dir() else "does not exist"
    raise UsageError(
        "E_NO_FILE", f"{str(path)!r} {problem}", f"looked in {Path.cwd()}", "give the path of an .onnx file"
    )


# ---- what the user sees meanwhile and afterwards


class _Progress:
    """Stages on standard error: a line each with -v, one line that changes on a terminal, nothing elsewhere."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.live = sys.stderr.isatty() and not verbose
        self.begin = time.perf_counter()

    def __enter__(self) -> None:
        """Nothing to show yet."""

    def __exit__(self, *_: object) -> None:
        """Leave a clean line to whatever is printed next, errors included."""
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def starts(self, stage: str) -> None:
        if self.live:
            passed = time.perf_counter() - self.begin
            print(f"\r\x1b[K{stage} ({passed:.0f} s)", end="", file=sys.stderr, flush=True)

    def ends(self, stage: str, seconds: float) -> None:
        if self.verbose:
            print(f"{stage:<10} {seconds:8.3f} s", file=sys.stderr)

    @contextlib.contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """A stage that the pipeline does not know."""
        self.starts(stage)
        start = time.perf_counter()
        yield
        self.ends(stage, time.perf_counter() - start)


def _trace(model: Path, progress: _Progress) -> Trace:
    from onnxfuse.trace import Trace

    return Trace(progress=progress.ends, reproduce=_reproduce(model))


def _reproduce(model: Path) -> str:
    return f"onnxfuse trace {shlex.quote(str(model))}"


def _print_json(data: object) -> None:
    print(jsonlib.dumps(data, indent=2))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the command `onnxfuse`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _terminate)  # a killed run removes its temporary folder
    sys.exit(run_arguments(arguments))


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def run_arguments(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]  # wherever it stands
    try:
        result = app(arguments, prog_name="onnxfuse", standalone_mode=False)
        sys.stdout.flush()
    except _FlagError as exc:
        command = arguments[0] if arguments and not arguments[0].startswith("-") else ""
        message = str(getattr(exc, "message", "") or exc)
        return _fail(UsageError("E_FLAG", message, hint=f"onnxfuse {command} --help".replace("  ", " ")), 1)
    except OnnxfuseError as exc:
        if debug:
            raise
        return _fail(exc, 2 if isinstance(exc, VerifyError) else 1)
    except (KeyboardInterrupt, typer.Abort) as exc:
        print("; ".join(["interrupted", *getattr(exc, "__notes__", ["nothing was written"])]), file=sys.stderr)
        return 130
    except (BrokenPipeError, SystemExit) as exc:
        # `onnxfuse inspect ... | head` has seen enough: typer and rich turn that into SystemExit(1), and nothing else.
        if isinstance(exc, SystemExit) and exc.code != 1:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as exc:
        if debug:
            raise
        return _fail(_system(exc, arguments), 1)
    except Exception as exc:  # the command line's top: a bug becomes a short report instead of a wall of text
        if debug:
            raise
        return _fail(_bug(exc, arguments), 1)
    return result if isinstance(result, int) else 0


# What a machine can run out of, or not allow: no bug of ours.
_MACHINE = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM,
    errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENAMETOOLONG, errno.ESTALE,
})  # fmt: skip


def _system(exc: OSError | MemoryError, arguments: Sequence[str]) -> OnnxfuseError:
    """The machine said no, in a place where nothing better is known than what it said."""
    if isinstance(exc, MemoryError):
        return UsageError("E_SYSTEM", "not enough memory", str(exc), "--no-verify needs less")
    if exc.errno not in _MACHINE:
        return _bug(exc, arguments)
    hint = f"temporary files go to {tempfile.gettempdir()}: TMPDIR=... names another place" if exc.filename else ""
    return UsageError("E_SYSTEM", "the system refused an operation on a file", str(exc), hint)


def _bug(exc: Exception, arguments: Sequence[str]) -> OnnxfuseError:
    command = shlex.join(["onnxfuse", "--debug", *arguments])
    report = OnnxfuseError(
        "E_BUG",
        f"onnxfuse failed: {type(exc).__name__}: {exc}",
        "this is a bug in onnxfuse",
        f"see it whole with: {command}",
    )
    for note in getattr(exc, "__notes__", ()):
        report.add_note(note)
    return report


def _fail(exc: OnnxfuseError, code: int) -> int:
    notes = getattr(exc, "__notes__", ())
    print("\n".join([str(exc), *notes]), file=sys.stderr)
    return code
