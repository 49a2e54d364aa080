"""What is in an optimized model, as plain data: the groups, their members, what was left and why.

`Inspection.json()` is a stable schema that other tools read:

    {"groups": [{name, op_type, kind, anchor, template, members: [{name, op, origin}], reads, writes, bytes,
                 operations, scope}],
     "left":   [{name, op, code, why, scope}],
     "bytes":  {"before": n, "after": n}}

`bytes` of a group is what its kernel reads and writes, weights included, `operations` what it computes (an addition is
one, a product of a contraction two). `before` and `after` are the activations moved between kernels when every node is
one, and when every group is one. Free dimensions count as `traffic.SAMPLE_DIM`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onnxfuse.analysis.traffic import nbytes, traffic
from onnxfuse.errors import Refusal
from onnxfuse.ir.graph import Node, Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Compute
from onnxfuse.ir.partition import Group, Partition
from onnxfuse.ir.plan import Call, Plans


@dataclass(frozen=True, slots=True)
class Member:
    """A node inside a group; `origin` are the user's nodes it comes from."""

    name: str
    op: str
    origin: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group = one custom node. `scope` is the body it is in, "" for the main graph."""

    name: str
    op_type: str
    kind: str
    anchor: str | None
    template: str | None
    members: tuple[Member, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    bytes: int
    operations: int = 0
    scope: str = ""


@dataclass(frozen=True, slots=True)
class LeftNode:
    """A node that stays with onnxruntime, and why."""

    name: str
    op: str
    code: str
    why: str = ""
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Groups in topological order, then what was left."""

    groups: tuple[GroupFacts, ...]
    left: tuple[LeftNode, ...]
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def fused_nodes(self) -> int:
        """The user's nodes that are inside groups, each once."""
        return len({name for g in self.groups for m in g.members for name in m.origin})

    def json(self) -> dict[str, object]:
        """The schema in the module docstring."""
        return {
            "groups": [asdict(g) for g in self.groups],
            "left": [asdict(n) for n in self.left],
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
        }


def from_json(data: Mapping[str, Any]) -> Inspection:
    """The inverse of `Inspection.json`; fields that are missing are empty."""
    groups = tuple(
        GroupFacts(
            str(g["name"]),
            str(g["op_type"]),
            str(g.get("kind", "")),
            g.get("anchor"),
            g.get("template"),
            tuple(Member(str(m["name"]), str(m["op"]), tuple(m["origin"])) for m in g.get("members", ())),
            tuple(g.get("reads", ())),
            tuple(g.get("writes", ())),
            int(g.get("bytes", 0)),
            int(g.get("operations", 0)),
            str(g.get("scope", "")),
        )
        for g in data.get("groups", ())
    )
    left = tuple(
        LeftNode(n["name"], n["op"], n["code"], n.get("why", ""), n.get("scope", "")) for n in data.get("left", ())
    )
    moved = data.get("bytes", {})
    return Inspection(groups, left, int(moved.get("before", 0)), int(moved.get("after", 0)))


def inspect(partition: Partition, plans: Plans | None = None) -> Inspection:
    """Facts about a partition. Without `plans` nothing was planned yet: every group counts as compiled."""
    return _inspect(partition, plans or Plans(partition, ()), "")


def inspect_all(plans: Plans) -> Inspection:
    """Facts about all graphs of a model: the main one, then the bodies of control flow."""
    names = ["", *(p.loops.name for p in plans.bodies)]
    parts = [_inspect(p, plans, name) for p, name in zip(plans.partitions, names, strict=True)]
    return Inspection(
        tuple(g for part in parts for g in part.groups),
        tuple(n for part in parts for n in part.left),
        sum(part.bytes_before for part in parts),
        sum(part.bytes_after for part in parts),
    )


def _inspect(partition: Partition, plans: Plans, scope: str) -> Inspection:
    refused = plans.refused
    templates = {p.kernel: p.schedule.template for p in plans.plans}
    compiled = [g for g in partition.groups if g.id not in refused]
    left = [_left(o.node, o.refusal, scope) for o in partition.left]
    split = [(node, refused[g.id]) for g in partition.groups if g.id in refused for node in _nodes(g.members)]
    left += [_left(node, why, scope) for node, why in split]
    consts = set(partition.loops.consts)
    return Inspection(
        tuple(_facts(g, plans.calls.get(g.id), templates, scope) for g in compiled),
        tuple(left),
        _moved(_by_origin(compiled), consts),
        _moved(((g.reads, g.writes) for g in compiled), consts),
    )


def _nodes(members: Iterable[Compute]) -> list[Node]:
    return list(dict.fromkeys(c.node for c in members))


def _left(node: Node, refusal: Refusal, scope: str) -> LeftNode:
    return LeftNode(node.name, str(node.op), refusal.code, refusal.why, scope)


def _facts(group: Group, call: Call | None, templates: Mapping[Kernel, str], scope: str) -> GroupFacts:
    nodes = _nodes(group.members)
    work = traffic(group.members, group.reads, group.writes)
    op_type = call.kernel.name if call is not None else "fused_" + "_".join(n.op.name.lower() for n in nodes[:4])
    return GroupFacts(
        call.name if call is not None else f"{op_type}_{group.id}",
        op_type,
        str(group.kind),
        group.anchor.node.name if group.anchor is not None else None,
        templates.get(call.kernel) if call is not None else None,
        tuple(Member(n.name, str(n.op), n.origin) for n in nodes),
        tuple(v.name for v in group.reads),
        tuple(v.name for v in group.writes),
        work.bytes,
        work.ops,
        scope,
    )


def _by_origin(groups: Iterable[Group]) -> list[tuple[list[Value], list[Value]]]:
    """(reads, writes) of each of the user's nodes, were it run alone: the Computes of one origin together."""
    parts: dict[tuple[str, ...], list[Compute]] = {}
    outside: set[Value] = set()
    members = [c for g in groups for c in g.members]
    for c in members:
        parts.setdefault(c.origin, []).append(c)
    for g in groups:
        outside.update(g.writes)
    origin_of = {c.out: c.origin for c in members}
    for c in members:
        outside.update(v for v in c.reads if v in origin_of and origin_of[v] != c.origin)
    out: list[tuple[list[Value], list[Value]]] = []
    for origin, computes in parts.items():
        reads = dict.fromkeys(v for c in computes for v in c.reads if origin_of.get(v) != origin)
        out.append((list(reads), [c.out for c in computes if c.out in outside]))
    return out


def _moved(kernels: Iterable[tuple[Iterable[Value], Iterable[Value]]], consts: set[Value]) -> int:
    return sum(nbytes(v) for reads, writes in kernels for v in (*reads, *writes) if v not in consts)
