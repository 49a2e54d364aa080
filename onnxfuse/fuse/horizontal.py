"""Stage C: groups that read the same value and not each other, after all that could join along an edge has.

The conditions are those of siblings.py.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxfuse.fuse.merge import Merger
from onnxfuse.fuse.rules import No, first_refusal
from onnxfuse.fuse.siblings import SIBLINGS
from onnxfuse.fuse.vertical import grow, said
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute


class Siblings(NamedTuple):
    """Two clusters that read a common value, and an item of either that does."""

    common: int
    span: int
    at: int
    a: int
    b: int
    first: int
    second: int


def join_siblings(m: Merger) -> None:
    """Stage C: groups that read the same value, after all that could join along an edge has; then those again."""
    reading = _reading(m)
    for _ in range(m.config.rounds):
        m.order.renumber()
        joined = False
        for c in _candidates(m, reading):
            joined = _try(m, c) or joined
        if not joined:
            return
        grow(m)


def _reading(m: Merger) -> dict[Value, list[int]]:
    """Readers of every value that is worth not reading twice, made here or not."""
    out: dict[Value, list[int]] = {}
    for i, item in enumerate(m.known.items):
        if isinstance(item, Compute):
            for v in dict.fromkeys(ld.source for ld in m.known.loads[item.out]):
                out.setdefault(v, []).append(i)
    least = m.config.min_saved_bytes
    return {v: readers for v, readers in out.items() if len(readers) > 1 and m.nbytes(v) >= least}


def _candidates(m: Merger, reading: dict[Value, list[int]]) -> list[Siblings]:
    """Pairs of groups that read a common value and not each other, the pair with most in common first."""
    found: dict[tuple[int, int], Siblings] = {}
    home, place = m.home, m.order.place
    for readers in reading.values():
        by: dict[int, int] = {}
        for r in readers:
            by.setdefault(home[r], r)
        if len(by) < 2:
            continue
        near = sorted(by, key=place.__getitem__)
        for k, a in enumerate(near):
            for b in near[k + 1 : k + 1 + m.config.sibling_window]:
                if (a, b) in found or b in m.order.succ[a] or m.settled(a, b):
                    continue
                found[a, b] = Siblings(m.common(a, b), place[b] - place[a], place[a], a, b, by[a], by[b])
    return sorted(found.values(), key=lambda c: (-c.common, c.span, c.at))


def _try(m: Merger, c: Siblings) -> bool:
    """Judge a horizontal pair and join it if nothing speaks against it."""
    a, b = m.find(c.a), m.find(c.b)
    if a == b:
        return False
    if m.order.place[a] > m.order.place[b]:
        a, b = b, a
    if b in m.order.succ[a] or m.settled(a, b):
        return False
    pair = m.beside(a, b)
    no = first_refusal(pair, SIBLINGS)
    if no is not None:
        if no.code != "NF_SPAN":  # what lies between may join
            m.refused[a, b] = m.versions(a, b), no
        m.sibling_records[c.first, c.second] = said(pair, no)
        return False
    reached = m.reach(a, b)
    if isinstance(reached, No):
        m.sibling_records[c.first, c.second] = said(pair, reached)
        return False
    m.sibling_records[c.first, c.second] = said(pair, None)
    m.join(pair, reached)
    return True
