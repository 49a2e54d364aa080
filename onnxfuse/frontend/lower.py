"""Nodes become loops. Atomized -> LoopGraph.

In: an atomic typed graph. Out: one Compute per value the op table covers, an Opaque with a code for every other node.
Shape arithmetic (integer values whose elements are known as expressions over dimensions) stays on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.frontend.atomize import Atomized
from onnxfuse.ir.expr import syms_of
from onnxfuse.ir.given import symbols
from onnxfuse.ir.graph import Node, Value
from onnxfuse.ir.loops import Compute, Item, LoopGraph, Opaque, symbols_of
from onnxfuse.ir.op import Family
from onnxfuse.ops.dsl import Known
from onnxfuse.ops.lowering import lower_node


def lower(atomized: Atomized) -> LoopGraph:
    """Call the table entry of every node with symbolic indices (see the module docstring)."""
    graph = atomized.graph
    items: list[Item] = []
    for node in graph.nodes:
        items.extend(_lower(node, atomized.facts, atomized.refusals.get(node)))
    items = _checking(_steering(items))
    inputs = tuple(dict.fromkeys((*graph.inputs, *graph.defaults)))
    return LoopGraph(graph.name, inputs, tuple(items), graph.outputs, graph.consts, atomized.facts)


def _lower(node: Node, facts: Mapping[Value, Known], refusal: Refusal | None) -> list[Item]:
    if refusal is not None:
        return [Opaque(node, refusal)]
    if node.op.family is Family.OPAQUE:
        return [Opaque(node, Refusal("UN_OPAQUE", node.op.reason or f"{node.op} is not in the op table"))]
    if node.op.family is Family.SHAPE:
        return [Opaque(node, Refusal("UN_SHAPE", "reads dimensions only; costs nothing in the runtime"))]
    if all(v in facts for v in node.results):
        return [Opaque(node, Refusal("UN_SHAPE", "shape arithmetic stays on the host"))]
    if node.op.family is Family.COMPOSITE and node.op.loops is None:
        return [Opaque(node, Refusal("UN_FORMULA", f"{node.op} could not be decomposed"))]
    try:
        computes = lower_node(node, facts)
    except Unsupported as error:
        return [Opaque(node, error.refusal())]
    if len(computes) != len(node.results):
        return [Opaque(node, Refusal("UN_ARITY", f"{node.op} has outputs the entry does not make"))]
    bad = [c.out for c in computes if not c.out.tensor.dtype.computable]
    return [Opaque(node, Refusal("UN_DTYPE", f"{bad[0]}"))] if bad else list(computes)


def _checking(items: list[Item]) -> list[Item]:
    """Kernels check run-time indices before they run: indices that a kernel makes are left to the runtime's check.

    As the runtime checks those anyway, their node stays there.
    """
    made: set[Value] = set()
    out: list[Item] = []
    late: dict[Node, Opaque] = {}
    why = Refusal("UN_DATA_DEPENDENT", "indices that a kernel makes are checked by the runtime")
    for item in items:
        if isinstance(item, Compute) and _checked(item) & made:
            late[item.node] = Opaque(item.node, why)
        if isinstance(item, Compute) and item.node not in late:
            made.add(item.out)
        out.append(item)
    return list(dict.fromkeys(late.get(i.node, i) for i in out))


def _checked(c: Compute) -> set[Value]:
    """The indices whose reach a Compute's needs are about."""
    used = syms_of(*c.needs)
    reads = {v for v in c.node.reads if v.type is not None}
    return {v for v in reads for _, part, s in symbols(v) if part.of_all and s in used} if used else set()


def _steering(items: list[Item]) -> list[Item]:
    """What kernels read as dimensions is there before they run: the nodes that make it stay with the runtime."""
    computes = [i for i in items if isinstance(i, Compute)]
    used = symbols_of(computes)
    if not used:
        return items
    steers = {c.out for c in computes if any(s in used and not part.of_all for _, part, s in symbols(c.out))}
    nodes = {c.node for c in computes if c.out in steers}
    why = Refusal("UN_SHAPE", "what it makes is a shape, axes or the like of another node; stays on the host")
    opaque = {n: Opaque(n, why) for n in nodes}
    return list(dict.fromkeys(opaque.get(i.node, i) for i in items))
