"""What the prepare passes share: renaming of values, notes about refusals, what a node is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import Constant, Graph, Node, Value


@dataclass(frozen=True, slots=True)
class Note:
    """Why a pass left a node as it is: stable code, numbers as text."""

    node: str
    code: str
    why: str

    def __str__(self) -> str:
        return f"{self.node}: {self.code} ({self.why})"


def resolve(v: Value, subst: Mapping[Value, Value]) -> Value:
    """Follow a chain of replacements to its end."""
    while v in subst:
        v = subst[v]
    return v


def renamed(node: Node, subst: Mapping[Value, Value]) -> Node:
    """The node reading, and making, the replacement of every replaced value; the same object if nothing changes."""
    if not any(v in subst for v in (*node.reads, *node.results)):
        return node
    return replace(
        node,
        inputs=tuple(None if v is None else resolve(v, subst) for v in node.inputs),
        outputs=tuple(None if v is None else resolve(v, subst) for v in node.outputs),
        captures=tuple(resolve(v, subst) for v in node.captures),
    )


def with_origin(node: Node, more: Iterable[str]) -> Node:
    """The node with further origin names."""
    merged = tuple(dict.fromkeys((*node.origin, *more)))
    return node if merged == node.origin else replace(node, origin=merged)


def taken_names(graph: Graph) -> set[str]:
    """Names of all values and nodes, and those that other graphs of the model use."""
    return {v.name for v in graph.values()} | {n.name for n in graph.nodes} | graph.reserved


def pointwise_conv(conv: Node, consts: Mapping[Value, Constant]) -> bool:
    """A convolution of one group that reads one place per result, with constant weights and typed values."""
    if conv.op.name != "Conv" or conv.op.domain or len(conv.inputs) < 2:
        return False
    x, weight, out = conv.inputs[0], conv.inputs[1], conv.outputs[0]
    if x is None or weight is None or out is None or x.type is None or out.type is None or weight not in consts:
        return False
    if weight.type is None or weight.type.dtype not in (DType.F32, DType.F64) or x.type.rank < 3:
        return False
    if any(d != 1 for d in weight.type.shape[2:]) or conv.attrs.get("group", 1) != 1:
        return False
    steps = conv.attrs.get("strides") or (1,)
    pads = conv.attrs.get("pads") or (0,)
    return isinstance(steps, tuple) and isinstance(pads, tuple) and set(steps) == {1} and set(pads) == {0}
