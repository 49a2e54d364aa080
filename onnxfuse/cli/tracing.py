"""`onnxfuse trace`: how a model becomes kernels, phase by phase or stage by stage."""

from __future__ import annotations

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onnxfuse.cli.app import app
from onnxfuse.cli.options import ModelArg, Planning, expanded, names
from onnxfuse.cli.planned import planned
from onnxfuse.cli.terminal import Progress, print_json, reproduce, require_file
from onnxfuse.config import Config, FusionMode
from onnxfuse.errors import UsageError


class _Form(StrEnum):
    """What `trace --format` takes."""

    DIFF = "diff"
    FULL = "full"
    JSON = "json"


@app.command(
    epilog="""Examples:

    onnxfuse trace model.onnx
    onnxfuse trace model.onnx --phase 2 --only conv_add_relu
    onnxfuse trace model.onnx --print-after fuse
    onnxfuse trace model.onnx --stop-after plan --dump stages/ --diff
    onnxfuse trace model.onnx --export-stage prepare prepared.onnx
""",
)
@expanded
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
    *,
    planning: Planning,
) -> None:
    """Show how the model becomes kernels: what each of four phases changed.

    With --print-after, --dump or --stop-after: what each stage of `optimize` returns, in full; the times come last, on
    standard error. With --export-stage: a model without a library, of the stages read, prepare and atomize without
    custom nodes, of fuse, layout, kernelize and plan with a function for every group.
    """
    require_file(model)
    config = planning.config()
    if export_stage is not None:
        _export(model, config, *export_stage)
    if print_after or stop_after or dump is not None:
        _trace_stages(model, config, print_after, stop_after, dump, diff)
        return
    if export_stage is not None:
        return
    from onnxfuse.phases import stories

    ran = planned(model, config, Progress(False))
    told = stories(ran.originals, ran.plans, only)
    if form is _Form.JSON:
        scopes = [{"scope": name, **s.json(phase)} for name, s in told.items()]
        print_json({"model": model.name, "mode": str(planning.fusion_mode), **scopes[0], "bodies": scopes[1:]})
        return
    cap = config.fusion.max_nodes_tvm if planning.fusion_mode is FusionMode.TVM else config.fusion.max_nodes
    print(f"# onnxfuse trace  model={model.name}  mode={planning.fusion_mode}  cap={cap}")
    for name, s in told.items():
        if name:
            print(f"# body {name}")
        print("\n".join(s.text(str(form), phase)))


def _trace_stages(
    model: Path, config: Config, print_after: list[str] | None, stop_after: str, dump: Path | None, diff: bool
) -> None:
    from onnxfuse import pipeline
    from onnxfuse.trace import Stopped, Trace

    stages = names(print_after)
    unknown = (stages - {"all"} | ({stop_after} if stop_after else set())) - set(pipeline.STAGES)
    if unknown:
        raise UsageError("E_FLAG", f"no stage {min(unknown)!r}", hint=f"stages: {', '.join(pipeline.STAGES)}")
    if not stages and dump is None:
        stages = frozenset({stop_after})
    hook = Trace(print_after=stages, dump=dump, diff=diff, stop_after=stop_after, reproduce=reproduce(model))
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
    ran = planned(model, config, Progress(False), "plan" if stage == "plan" else "kernelize")
    emission = export(stage, ran.scopes, ran.atomized, ran.plans)
    written = write(emission, None, out, external_data=config.save_as_external_data)
    print("wrote " + ", ".join(str(f) for f in (written.model, written.data) if f is not None))
