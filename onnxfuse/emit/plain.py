"""A graph as a model in which every node stays with the runtime.  Source + Graph -> Emission."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.emit.model import Emission, Inside, assemble
from onnxfuse.errors import Refusal
from onnxfuse.frontend.atomize import Atomized
from onnxfuse.frontend.read import Source
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.loops import LoopGraph, Opaque
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.plan import Plans


def plain(source: Source, graph: Graph, inside: Inside | None = None) -> Emission:
    """The nodes of `graph` as they are, around the bodies in `inside`; nothing of ours in the metadata."""
    return assemble(source, Atomized(graph, {}, {}, {}), no_plans([graph]), inside)


def no_plans(graphs: Sequence[Graph]) -> Plans:
    """No group anywhere, for the main graph and the bodies."""
    main, *bodies = [_left(g) for g in graphs]
    return Plans(main, (), bodies=tuple(bodies))


def _left(graph: Graph) -> Partition:
    left = tuple(Opaque(n, Refusal("")) for n in graph.nodes)
    return Partition(LoopGraph(graph.name, graph.inputs, left, graph.outputs, graph.consts), (), left, ())
