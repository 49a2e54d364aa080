"""Views that lead back. Graph -> Graph: a view of a view of ... x that is x itself, in every element, is x.

Transpose and Reshape there and, somewhere later, Transpose and Reshape back: exporters do that between layers that
want tokens and layers that want images. What lies between stays for who else reads it. The index maps of the op table
decide, so that every spelling counts, with dynamic dimensions too. A graph output keeps its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.errors import Unsupported
from onnxfuse.frontend.rewrite import renamed, resolve, with_origin
from onnxfuse.ir.expr import Expr, Load, substitute, var
from onnxfuse.ir.graph import Graph, Node, Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.op import Family
from onnxfuse.ir.simplify import same, simplify
from onnxfuse.ops.dsl import Known
from onnxfuse.ops.lowering import lower_node

LONGEST = 8  # views on a way back that are looked at


@dataclass(frozen=True, slots=True)
class _From:
    """A value as a view of an earlier one: element `axes` of it is element `index` of `source`."""

    source: Value
    axes: tuple[Axis, ...]
    index: tuple[Expr, ...]


def view_chains(graph: Graph, facts: Mapping[Value, Known]) -> Graph:
    """Read what is there already instead of a view that leads back to it (see the module docstring)."""
    views = {n.outputs[0]: n for n in graph.nodes if n.op.family is Family.VIEW and len(n.results) == 1}
    escapes = graph.escapes()
    subst: dict[Value, Value] = {}
    known: dict[Value, tuple[_From, ...]] = {}
    origins: dict[Value, tuple[str, ...]] = {}
    for y, node in views.items():
        x = node.inputs[0] if node.inputs else None
        if y is None or x is None or resolve(x, subst) not in views:
            continue
        found = _sources(node, subst, views, facts, known)
        back = next((f.source for f in found if _is_identity(f, y)), None)
        if back is not None and y not in escapes:
            subst[y] = back
            origins[back] = (*origins.get(back, ()), *node.origin)
    if not subst:
        return graph
    kept = (n for n in graph.nodes if not (n.outputs and n.outputs[0] in subst))
    nodes = (with_origin(n, origins.get(n.outputs[0], ()) if n.outputs and n.outputs[0] else ()) for n in kept)
    return replace(graph, nodes=tuple(renamed(n, subst) for n in nodes))


def _sources(
    node: Node,
    subst: Mapping[Value, Value],
    views: Mapping[Value | None, Node],
    facts: Mapping[Value, Known],
    known: dict[Value, tuple[_From, ...]],
) -> tuple[_From, ...]:
    """What the result of a view is a view of, the nearest first."""
    (y,) = node.results
    if y in known:
        return known[y]
    way = [node]
    while len(way) < LONGEST:
        x = way[-1].inputs[0]
        before = None if x is None else views.get(resolve(x, subst))
        if before is None:
            break
        way.append(before)
    for at in reversed(way):
        (out,) = at.results
        if out not in known:
            step = _one(at, facts)
            before_ = () if step is None else known.get(resolve(step.source, subst), ())
            known[out] = () if step is None else (step, *(_through(f, step) for f in before_))[:LONGEST]
    return known[y]


def _one(node: Node, facts: Mapping[Value, Known]) -> _From | None:
    """A single view by the op table; None if it is no plain read of its first input."""
    try:
        (c,) = lower_node(node, facts)
    except (Unsupported, ValueError):
        return None
    if not isinstance(c.body, Load) or c.body.source is not node.inputs[0] or c.reduce is not None:
        return None
    return _From(c.body.source, c.axes, c.body.index)


def _through(before: _From, step: _From) -> _From:
    """A view of what is a view itself."""
    at: dict[Expr, Expr] = {var(a): ix for a, ix in zip(before.axes, step.index, strict=True)}
    return _From(before.source, step.axes, tuple(simplify(substitute(ix, at)) for ix in before.index))


def _is_identity(f: _From, y: Value) -> bool:
    a, b = f.source.type, y.type
    if a is None or b is None or a.dtype is not b.dtype or a.rank != b.rank:
        return False
    if not all(p is q or p == q or same(p, q) for p, q in zip(a.shape, b.shape, strict=True)):
        return False
    return all(ix is var(x) or x.extent == 1 for ix, x in zip(f.index, f.axes, strict=True))
