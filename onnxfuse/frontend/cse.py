"""Common subexpressions. Graph -> Graph: no two mergeable nodes with the same op, inputs and attributes.

Small constants count as equal when their contents are, so that nodes fed by copies of one constant merge; constants
themselves are not merged. Never merged: random ops, foreign domains, nodes with subgraphs or attributes we do not look
into. Graph outputs keep their names: of two equal outputs both nodes stay.
Order: after constant folding (folded constants then compare equal).
"""

from __future__ import annotations

import struct
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from onnxfuse.frontend.rewrite import renamed, resolve, with_origin
from onnxfuse.ir.graph import AttrValue, Foreign, Graph, Node, Value

RANDOM = frozenset({
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout",
})  # fmt: skip
SMALL = 1024  # bytes of a constant that is compared by content


def cse(graph: Graph) -> Graph:
    """Merge equal nodes into the first of them (see the module docstring)."""
    escapes = graph.escapes()
    content = {v: _content(v, c.numpy()) for v, c in graph.consts.items() if v.type is not None and c.nbytes <= SMALL}
    first: dict[Hashable, Node] = {}
    subst: dict[Value, Value] = {}
    origins: dict[Node, tuple[str, ...]] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        key = _key(node, subst, content)
        twin = None if key is None else first.setdefault(key, node)
        if twin is None or twin is node or not _merge(node, twin, escapes, subst):
            kept.append(node)
            continue
        origins[twin] = origins.get(twin, ()) + node.origin
    if not subst:
        return graph
    return replace(graph, nodes=tuple(renamed(with_origin(n, origins.get(n, ())), subst) for n in kept))


def _merge(node: Node, twin: Node, escapes: set[Value], subst: dict[Value, Value]) -> bool:
    """Record that the results of `node` are those of `twin`; names that escape win."""
    pairs = [
        (y, resolve(x, subst))
        for x, y in zip(twin.outputs, node.outputs, strict=True)
        if x is not None and y is not None
    ]
    if any(x in escapes and y in escapes for y, x in pairs):
        return False
    for y, x in pairs:
        if y in escapes:
            subst[x] = y
        else:
            subst[y] = x
    return True


def _content(v: Value, array: np.ndarray) -> Hashable:
    return (v.type, array.tobytes()) if array.dtype != object else v


def _key(node: Node, subst: dict[Value, Value], content: dict[Value, Hashable]) -> Hashable | None:
    if node.op.domain or node.captures or node.op.name in RANDOM or not node.inputs:
        return None
    attrs = [(k, _frozen(a)) for k, a in sorted(node.attrs.items())]
    if any(a is None for _, a in attrs):
        return None
    inputs = tuple(None if v is None else content.get(v, resolve(v, subst)) for v in node.inputs)
    present = tuple(v is not None for v in node.outputs)
    return (node.op.name, node.op.since, node.op.family, inputs, tuple(attrs), present)


def _frozen(value: AttrValue) -> Hashable | None:
    """A key by bit pattern (0.0 is not -0.0, nan is nan); None for what cannot be compared."""
    match value:
        case Foreign():
            return None
        case float():
            return ("f", struct.pack("<d", value))
        case np.ndarray():
            return ("t", str(value.dtype), value.shape, value.tobytes())
        case tuple():
            return tuple(_frozen(v) for v in value)
        case _:
            return (type(value).__name__, value)
