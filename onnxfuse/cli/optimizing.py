"""`onnxfuse optimize`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxfuse.cli.app import app
from onnxfuse.cli.measuring import Remembered
from onnxfuse.cli.options import CustomOps, Json, Judging, ModelArg, Planning, Sampling, Verbose, expanded
from onnxfuse.cli.terminal import Progress, new_trace, print_json
from onnxfuse.config import Config, Precision
from onnxfuse.errors import UsageError
from onnxfuse.files import private_folder

if TYPE_CHECKING:
    from onnxfuse.emit.bundle import Staged, Written
    from onnxfuse.inspection import Inspection
    from onnxfuse.tuning import Tuning
    from onnxfuse.verify.child import Ahead
    from onnxfuse.verify.compare import Report
    from onnxfuse.verify.facts import ModelFacts


@app.command(
    epilog="""Examples:

    onnxfuse optimize model.onnx fused.onnx
    onnxfuse optimize model.onnx fused.onnx --target-cpu x86-64-v3 --test-input-shape image:1,3,640,640
    onnxfuse optimize model.onnx --dry-run -v
""",
)
@expanded
def optimize(
    model: ModelArg,
    output: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Where to write; OUT.so goes beside it.", show_default=False)
    ] = None,
    *,
    planning: Planning,
    sampling: Sampling,
    judging: Judging,
    verify: Annotated[bool, typer.Option(help="Compare with onnxruntime before writing.")] = True,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Time the result beside the original; by default a model below 256 MiB, once per library.",
            show_default=False,
        ),
    ] = None,
    save_as_external_data: Annotated[
        bool, typer.Option("--save-as-external-data", help="Weights in OUT.data; automatic near 2 GB.")
    ] = False,
    custom_op_library: CustomOps = None,
    exact_conv: Annotated[
        bool, typer.Option("--exact-conv", help="No Winograd: convolutions are plain sums of products.")
    ] = False,
    precision: Annotated[
        Precision, typer.Option(help="bf16: weights of products with few rows rounded to bf16 (half the memory read).")
    ] = Precision.F32,
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
    config = replace(
        planning.config(),
        verify=replace(judging.config(sampling), enabled=verify, precision=precision),
        save_as_external_data=save_as_external_data,
        exact_conv=exact_conv,
        precision=precision,
        strict=strict,
        tune=tune,
        custom_op_libraries=tuple(str(lib) for lib in custom_op_library or ()),
        cache=cache,
    )
    # Imported here: onnx, onnxruntime and LLVM take a second to load.
    from onnxfuse.verify.bundle import ahead

    progress = Progress(verbose)
    with progress, contextlib.ExitStack() as stack:
        begun = stack.enter_context(ahead(model, config))
        from onnxfuse import pipeline
        from onnxfuse.emit.bundle import check_output
        from onnxfuse.inspection import inspect_all

        if output is not None:
            check_output(output, model)
        bundle = pipeline.optimize(model, config, new_trace(model, progress), progress.starts)
        found, tuning = inspect_all(bundle.plans), bundle.tuning
        speed = Remembered.of(model, bundle, config, measure)
        scratch = stack.enter_context(private_folder())
        with progress.step("write"):
            where = output if output is not None and not dry_run else scratch / "model.onnx"
            pair = stack.enter_context(bundle.staged(where))
        del bundle  # the weights are on disk: the sessions that follow need the memory
        with progress.step("verify"):
            asked = config if speed is None else speed.asked(config)
            reports = _verify_pair(model, pair, asked, begun) if verify else ()
        reports = reports if speed is None else speed.told(reports)
        result = _result(model, pair, found, tuning)
        written = pair.publish() if output is not None and not dry_run else None
    _print_result(result, written, reports, json)


def _verify_pair(model: Path, pair: Staged, config: Config, begun: Ahead | None) -> tuple[Report, ...]:
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
        return named(verify_pair(model, pair.model, pair.library, config, bodies=pair.bodies, begun=begun))
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
        print_json(
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
        if r.speed is not None:
            print(report.speed(r.speed))
    if written is None:
        print("nothing written (--dry-run)")
        return
    print("wrote " + ", ".join(str(f) for f in (written.model, written.library, written.data) if f is not None))
