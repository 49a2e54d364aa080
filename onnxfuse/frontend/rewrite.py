"""What the prepare passes share: renaming of values, notes about refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onnxfuse.ir.graph import Graph, Node, Value


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
