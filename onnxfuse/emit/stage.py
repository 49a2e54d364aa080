"""One stage before code generation as a model that runs everywhere, without a library.  Stage results -> Emission.

read, prepare, atomize   the stage's nodes; nothing of domain `onnxfuse`, no metadata of ours
fuse .. plan             a custom node with its function body for every group (what kernelize could not build stays)
"""

from __future__ import annotations

from onnxfuse.emit.model import PREFIX, Emission, emit
from onnxfuse.errors import Refusal
from onnxfuse.frontend.atomize import Atomized
from onnxfuse.frontend.prepare import Prepared
from onnxfuse.frontend.read import Source
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.loops import LoopGraph, Opaque
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.plan import Plans

EXPORTS = ("read", "prepare", "atomize", "fuse", "layout", "kernelize", "plan")


def export(stage: str, source: Source, prepared: Prepared, atomized: Atomized, plans: Plans) -> Emission:
    """The model after `stage`, one of EXPORTS; `plans` as they are after it (fuse and layout: after kernelize)."""
    graphs = {"read": source.graph, "prepare": prepared.graph, "atomize": atomized.graph}
    if stage in graphs:
        return plain(source, graphs[stage])
    return emit(source, atomized, plans, None, record={"stage": stage})


def plain(source: Source, graph: Graph) -> Emission:
    """The nodes of `graph` as they are: every one stays with the runtime."""
    left = tuple(Opaque(n, Refusal("")) for n in graph.nodes)
    loops = LoopGraph(graph.name, graph.inputs, left, graph.outputs, graph.consts)
    emission = emit(source, Atomized(graph, {}, {}, {}), Plans(Partition(loops, (), left, ()), ()))
    kept = [p for p in emission.model.metadata_props if not p.key.startswith(PREFIX)]
    del emission.model.metadata_props[:]
    emission.model.metadata_props.extend(kept)
    return emission
