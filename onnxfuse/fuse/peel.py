"""Peeling: split a view off the consumer so that the rest may join the producer's rows.

Stage A lets a reshape flow into a pointwise group; if the group then does not stand on the producer's rows (layer
norm, then [B,S,C] -> [B*S,C]), the members from that view on are split off and the rest is tried alone.
"""

from __future__ import annotations

from dataclasses import replace

from onnxfuse.errors import Refusal
from onnxfuse.fuse.merge import Merger
from onnxfuse.fuse.rules import Cluster, No, Pair, first_refusal
from onnxfuse.ir.expr import Load, Var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute

# Refusals that splitting a view off the consumer may cure.
PEELABLE = frozenset({"NF_GROUP_MERGE", "NF_AXES_CONFLICT", "NF_NOT_ROW_LOCAL", "NF_VIEW_LEVEL", "NF_RECOMPUTE"})


def peel(m: Merger, pair: Pair, no: No) -> tuple[Pair, No | None]:
    """Split members that read `b` itself through a view off `b`, if the rest may join; else `pair` and `no`."""
    a, b = pair.a, pair.b
    head, tails = _views_off(m, b)
    if not head or not tails:
        return pair, no
    inside = {*a.items, *head}
    first = m.cluster(b.id, head)
    shared = tuple(v for v in pair.shared if v in first.reads)
    if not shared or isinstance(m.reach(a.id, b.id), No) or not all(_runs_alone(m, t) for t in tails):
        return pair, no

    def leaves(v: Value, _a: Cluster, _b: Cluster) -> bool:
        return v in m.known.needed or any(r not in inside for r in m.known.readers.get(v, ()))

    tried = replace(pair, b=first, leaves=leaves, shared=shared)
    if first_refusal(tried) is not None:
        return pair, no
    m.split(b, first, tails)
    return tried, None


def _runs_alone(m: Merger, items: list[int]) -> bool:
    """A part split off is executable: the end of one of stage A's groups, or a row program."""
    if len({m.grown[i] for i in items}) == 1:
        return True
    inside = set(items)
    members = m.computes(items)
    needed = m.known.needed
    writes = [c.out for c in members if c.out in needed or not inside.issuperset(m.known.readers[c.out])]
    return not isinstance(m.forms.rows(members, writes), Refusal)


def _views_off(m: Merger, b: Cluster) -> tuple[list[int], list[list[int]]]:
    """Members of `b` before any bent read of its own values, and the rest in connected parts."""
    tail: dict[int, int] = {}  # item -> part
    for i in b.items:
        c = m.known.items[i]
        assert isinstance(c, Compute)
        own = [ld for ld in m.loads(c) if ld.source in b.makes]
        before = {tail[p] for ld in own if (p := m.known.producer[ld.source]) in tail}
        if before:
            part = min(before)
            tail = {j: part if q in before else q for j, q in tail.items()}
            tail[i] = part
        elif c.reduce is None and any(_bent(ld) for ld in own):
            tail[i] = i
    parts: dict[int, list[int]] = {}
    for i, part in tail.items():
        parts.setdefault(part, []).append(i)
    return [i for i in b.items if i not in tail], list(parts.values())


def _bent(ld: Load) -> bool:
    """Reads at anything but bare variables (dimensions of 1 aside)."""
    return any(not isinstance(ix, Var) and d != 1 for ix, d in zip(ld.index, ld.source.tensor.shape, strict=True))
