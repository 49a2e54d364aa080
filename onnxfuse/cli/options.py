"""Flags that several commands share, and what they become in a configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar, get_type_hints

import typer

from onnxfuse.codes import BY_CODE, OPTIONAL
from onnxfuse.config import PASSES, Config, FusionConfig, FusionMode, PrepareConfig, VerifyConfig
from onnxfuse.errors import UsageError

T = TypeVar("T")

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
        help=f"Simplifications to leave out: {', '.join(PASSES)}.",
    ),
]
SkipFolding = Annotated[bool, typer.Option("--skip-constant-folding")]
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


# ---- groups of flags


@dataclass(frozen=True, slots=True)
class Planning:
    """Flags that decide which kernels there are."""

    fusion_mode: Mode = FusionMode.FULL
    max_fusion_size: MaxSize = None
    target_cpu: TargetCpu = "native"
    overwrite_input_shape: OverwriteShape = None
    dim_param: DimParam = None
    include_subgraph: IncludeSubgraph = False
    skip_optimization: SkipOptimization = None
    skip_constant_folding: SkipFolding = False
    skip_fusion_patterns: SkipFusion = None
    keep: Keep = None

    def config(self) -> Config:
        """The configuration they stand for. Raises UsageError for a flag that cannot be read."""
        skip = names(self.skip_optimization) | (frozenset({"fold"}) if self.skip_constant_folding else frozenset())
        return Config(
            fusion=_fusion(self.fusion_mode, self.max_fusion_size, self.skip_fusion_patterns, self.keep),
            prepare=PrepareConfig(skip=skip),
            target=self.target_cpu,
            overwrite_input_shape=_shapes_with_symbols(self.overwrite_input_shape or ()),
            dim_params=_dim_params(self.dim_param or ()),
            include_subgraph=self.include_subgraph,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Flags that decide on which inputs a model runs."""

    seed: Seed = 0
    input_data: InputData = None
    test_input_shape: TestShape = None
    val_range: ValRange = None

    def config(self) -> VerifyConfig:
        """The configuration they stand for. Raises UsageError for a flag that cannot be read."""
        return VerifyConfig(
            seed=self.seed,
            input_data=tuple(self.input_data) if self.input_data else None,
            test_shapes=_test_shapes(self.test_input_shape or ()),
            val_ranges=_val_ranges(self.val_range or ()),
        )


@dataclass(frozen=True, slots=True)
class Judging:
    """Flags that decide when two results agree."""

    check: Check = 1
    rtol: Rtol = None
    atol: Atol = None
    allow_mismatches: AllowMismatches = None

    def config(self, samples: Sampling) -> VerifyConfig:
        """The configuration of a comparison on these samples. Raises UsageError for a flag that cannot be read."""
        relative, absolute = _per_output("--rtol", self.rtol, float), _per_output("--atol", self.atol, float)
        return replace(
            samples.config(),
            runs=self.check,
            rtol=relative.pop("", None),
            atol=absolute.pop("", None),
            output_rtol=relative,
            output_atol=absolute,
            allow_mismatches={
                k: int(v) for k, v in _per_output("--allow-mismatches", self.allow_mismatches, int).items()
            },
        )


def expanded(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the fields of its groups as flags of its own: typer knows no groups."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}

    def flags() -> Iterator[inspect.Parameter]:
        for name, given in signature.parameters.items():
            inner = inspect.signature(groups[name]).parameters.values() if name in groups else (given,)
            known = get_type_hints(groups[name], include_extras=True) if name in groups else hints
            for p in inner:
                yield p.replace(annotation=known[p.name], kind=p.KEYWORD_ONLY)

    @functools.wraps(command)
    def run(**given: object) -> T:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        return command(**given, **made)

    del run.__wrapped__  # typer would look through it
    shown = list(flags())
    run.__annotations__ = {p.name: p.annotation for p in shown}
    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return run


# ---- what the flags say


def names(texts: Iterable[str] | None) -> frozenset[str]:
    """`a,b` and repeated flags alike."""
    return frozenset(part for text in texts or () for part in text.split(",") if part)


def _fusion(mode: FusionMode, size: int | None, skip: list[str] | None, keep: list[str] | None) -> FusionConfig:
    for code in sorted(names(skip) - OPTIONAL):
        what = f"{code} cannot be left out" if code in BY_CODE else f"no fusion rule {code!r}"
        raise UsageError("E_FLAG", what, hint=f"--skip-fusion-patterns takes: {', '.join(sorted(OPTIONAL))}")
    config = FusionConfig(mode=mode, skip=names(skip), keep=frozenset(keep or ()))
    return config if size is None else replace(config, max_nodes=size, max_nodes_tvm=size)


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


def our_library(model: Path, choice: str) -> Path | None:
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
