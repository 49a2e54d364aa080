"""Partition: which Computes run together, and a record of every decision that led there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from onnxfuse.errors import Refusal
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, LoopGraph, Opaque
from onnxfuse.ir.op import Kind


class Verdict(StrEnum):
    """Outcome of a decision."""

    FUSED = "fused"
    REFUSED = "refused"


class Relation(StrEnum):
    """How the two sides of a decision stand to each other: producer and consumer, or siblings."""

    VERTICAL = "vertical"
    HORIZONTAL = "horizontal"


Number = int | float | str


@dataclass(frozen=True, slots=True)
class Decision:
    """One considered pair: `a` (producer or earlier) and `b`, by value name; `code` is stable API."""

    stage: str  # "A", "B", "C", "D"
    a: str
    b: str
    relation: Relation
    verdict: Verdict
    code: str
    numbers: tuple[tuple[str, Number], ...] = ()

    def __str__(self) -> str:
        facts = " ".join(f"{k}={v}" for k, v in self.numbers)
        return f"{self.stage} {self.a}->{self.b} {self.verdict.upper()} {self.code} {facts}".rstrip()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Computes that become one kernel, in topological order.

    reads   values from outside (constants included), in order of first use
    writes  values that leave the group, in topological order
    """

    id: int
    members: tuple[Compute, ...]
    kind: Kind
    anchor: Compute | None
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Groups in a topological order of the quotient graph; `left` are nodes that stay with onnxruntime."""

    loops: LoopGraph
    groups: tuple[Group, ...]
    left: tuple[Opaque, ...]
    decisions: tuple[Decision, ...]
    layouts: Mapping[Value, str] = field(default_factory=dict)  # memory order other than the model's

    def __str__(self) -> str:
        from onnxfuse.ir.text import show  # text imports this module

        return show(self)

    def __repr__(self) -> str:
        return f"<Partition {self.loops.name}>"


def make_group(
    gid: int,
    members: tuple[Compute, ...],
    kind: Kind,
    anchor: Compute | None,
    live: set[Value],
    reads_of: Callable[[Compute], Iterable[Value]] = lambda c: c.reads,
) -> Group:
    """A Group with its reads and writes worked out; `live` = values used outside the group or graph outputs.

    reads_of: what a member reads, for callers that know.
    """
    inside = {c.out for c in members}
    reads = tuple(dict.fromkeys(v for c in members for v in reads_of(c) if v not in inside))
    writes = tuple(c.out for c in members if c.out in live)
    return Group(gid, members, kind, anchor, reads, writes)


__all__ = ["Decision", "Group", "Partition", "Refusal", "Relation", "Verdict", "make_group"]
