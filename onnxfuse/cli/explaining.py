"""`onnxfuse inspect` and `explain`: the groups, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxfuse.cli.app import app
from onnxfuse.cli.options import Json, ModelArg, Planning, Verbose, expanded
from onnxfuse.cli.planned import planned
from onnxfuse.cli.terminal import Progress, new_trace, print_json, require_file
from onnxfuse.config import Config
from onnxfuse.errors import UsageError

if TYPE_CHECKING:
    from onnxfuse.explain import Explanation, Summary
    from onnxfuse.inspection import Inspection
    from onnxfuse.ir.plan import Plans


@app.command(
    epilog="""Examples:

    onnxfuse inspect fused.onnx
    onnxfuse inspect model.onnx --fusion-mode tvm --json
""",
)
@expanded
def inspect(
    model: ModelArg,
    planning: Planning,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Generate the kernels too: finds what cannot be compiled.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the groups: of an optimized model as it is, of any other as `optimize` would make them."""
    require_file(model)
    from onnxfuse.inspection import from_json
    from onnxfuse.verify.facts import recorded

    record = recorded(model)
    found = from_json(record) if record is not None else None
    if found is None:
        config = planning.config()
        found = _inspect_input(model, config, compile_, Progress(verbose))
    if json:
        print_json(found.json())
        return
    from onnxfuse import report

    report.show(report.groups(found))


def _inspect_input(model: Path, config: Config, compile_: bool, progress: Progress) -> Inspection:
    from onnxfuse import pipeline
    from onnxfuse.inspection import inspect_all
    from onnxfuse.trace import Stopped

    trace = new_trace(model, progress)
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

    onnxfuse explain model.onnx
    onnxfuse explain model.onnx --node /encoder/layer.0/Softmax
    onnxfuse explain model.onnx --edge conv,relu --fusion-mode tvm --json
""",
)
@expanded
def explain(
    model: ModelArg,
    edge: Annotated[
        str, typer.Option("--edge", metavar="A,B", help="Two nodes, by name of node, value or operator.")
    ] = "",
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="One node, value, or operator.")] = "",
    *,
    planning: Planning,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say why nodes were fused or not: one node, one edge, or every decision by code.

    Runs the stages up to the plan; no code is generated. `onnxfuse rules` lists the codes.
    """
    require_file(model)
    if edge and node:
        raise UsageError("E_FLAG", "--edge and --node together", hint="give one of them")
    config = planning.config()
    from onnxfuse.explain import answers

    ran = planned(model, config, Progress(verbose))
    found = answers(ran.originals, ran.whole, ran.plans, config.fusion, ran.notes)
    if not edge and not node:
        said: Explanation | Summary = found.summary()
    else:
        said = found.node(node) if node else found.edge(*_edge(edge, found.aliases))
    if json:
        print_json(said.json())
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
