"""Composite ops become atomic ones. Typed -> Atomized.

In: any typed graph. Out: no node of family composite, unless its formula refused the node (then it stays as it is:
lower asks for its loops, or records why there are none). Every atomic node is a legal ONNX node in the model's opset,
and keeps the origin of its composite.
Order: after prepare (so that folded constants reach the formulas), before lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.frontend.quantised import quantised
from onnxfuse.frontend.rewrite import taken_names
from onnxfuse.frontend.shapes import Typed
from onnxfuse.ir.graph import ArrayConst, Constant, Graph, Node, Value
from onnxfuse.ir.op import Family
from onnxfuse.ops.dsl import Known
from onnxfuse.ops.expansion import expand
from onnxfuse.ops.known import known_constant, known_elements


@dataclass(frozen=True, slots=True, eq=False)
class Atomized:
    """The atomic graph; `parts` maps an original composite node to its atomic nodes, in order."""

    graph: Graph
    facts: Mapping[Value, Known]
    parts: Mapping[Node, tuple[Node, ...]]
    refusals: Mapping[Node, Refusal]


def atomize(typed: Typed) -> Atomized:
    """Expand every composite (see the module docstring)."""
    graph = typed.graph
    taken = taken_names(graph)
    facts = dict(typed.facts)
    consts: dict[Value, Constant] = dict(graph.consts)
    refusals = {**quantised(graph), **typed.refusals}
    parts: dict[Node, tuple[Node, ...]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op.family is not Family.COMPOSITE or node in refusals:
            nodes.append(node)
            continue
        try:
            atoms = _expand_fully(node, facts, graph.opset, taken, consts)
        except Unsupported as error:
            if node.op.loops is None:
                refusals[node] = error.refusal()
            nodes.append(node)
            continue
        parts[node] = atoms
        nodes.extend(atoms)
    if not parts:
        return Atomized(graph, facts, {}, refusals)
    return Atomized(replace(graph, nodes=tuple(nodes), consts=consts), facts, parts, refusals)


def _expand_fully(
    node: Node, facts: dict[Value, Known], opset: int, taken: set[str], consts: dict[Value, Constant]
) -> tuple[Node, ...]:
    """Expand until only atomic nodes are left. Nothing is recorded in `consts` unless all of it succeeds."""
    made: dict[Value, ArrayConst] = {}
    pending = [node]
    done: list[Node] = []
    while pending:
        head = pending.pop(0)
        if head.op.family is not Family.COMPOSITE:
            _learn(head, facts)
            done.append(head)
            continue
        expansion = expand(head, facts, opset, taken)
        made.update(expansion.consts)
        facts.update(known_constants(expansion.consts))
        finals = tuple(r.value for r in expansion.results)
        pending = [*_rename(expansion.nodes, finals, head), *pending]
    consts.update(made)
    return tuple(done)


def known_constants(consts: Mapping[Value, ArrayConst]) -> dict[Value, Known]:
    """Facts of constants made by a formula (all small)."""
    return {v: known_constant(c.array, v.tensor.dtype) for v, c in consts.items()}


def _learn(node: Node, facts: dict[Value, Known]) -> None:
    if node.op.family is Family.SHAPE or all(v is None or v in facts for v in node.inputs):
        for v, elements in zip(node.outputs, known_elements(node, facts), strict=False):
            if v is not None and elements is not None:
                facts[v] = elements


def _rename(nodes: tuple[Node, ...], finals: tuple[Value, ...], head: Node) -> list[Node]:
    """The composite's own output values take the place of the formula's results."""
    swap = {f: o for f, o in zip(finals, head.outputs, strict=False) if o is not None}
    if len(swap) < len([o for o in head.outputs if o is not None]) or any(
        f not in {v for n in nodes for v in n.results} for f in swap
    ):
        raise Unsupported("UN_FORMULA", f"{head.op} node {head.name!r}: an output is not made by the formula")
    out = []
    for n in nodes:
        inputs = tuple(None if v is None else swap.get(v, v) for v in n.inputs)
        outputs = tuple(None if v is None else swap.get(v, v) for v in n.outputs)
        out.append(replace(n, inputs=inputs, outputs=outputs))
    return _alive(out, {v for v in head.outputs if v is not None})


def _alive(nodes: list[Node], wanted: set[Value]) -> list[Node]:
    """The nodes that `wanted` needs: a formula also makes what an absent output would be."""
    kept: list[Node] = []
    needed = set(wanted)
    for n in reversed(nodes):
        if needed.intersection(n.results):
            needed.update(n.reads)
            kept.append(n)
    return kept[::-1]
