"""Stage B: pairwise growth of stage A's groups along edges (CanFuse).

Rounds: list every (producer group, consumer group) that share a value, most traffic saved first; join greedily, every
pair judged anew against the groups as they are; stop when a round joins nothing. Deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxfuse.fuse.merge import FUSED, Merger, Said, Versions
from onnxfuse.fuse.peel import PEELABLE, peel
from onnxfuse.fuse.rules import LAUNCH_BYTES, PLACED, No, Pair, first_refusal
from onnxfuse.ir.graph import Value
from onnxfuse.ir.partition import Verdict


class Candidate(NamedTuple):
    """A producer's and a consumer's cluster with a value between them, and what joining the two would save."""

    saved: int
    span: int
    at: int
    a: int
    b: int
    value: Value
    reader: int  # item of b
    versions: Versions


def grow(m: Merger) -> None:
    """Rounds until nothing changes."""
    for _ in range(m.config.rounds):
        m.order.renumber()
        joined = False
        for c in _candidates(m):
            joined = _try(m, c) or joined
        if not joined:
            return


def place_views(m: Merger) -> None:
    """Let contractions store where the views behind them would copy to, if nothing else took the views."""
    for v, readers in list(m.known.readers.items()):
        a, b = m.home[m.known.producer[v]], m.home[readers[0]]
        if a == b or m.clusters[a].anchors != 1 or any(m.home[r] != b for r in readers):
            continue
        if m.clusters[b].anchors or m.clusters[b].opaque or m.clusters[b].reduces:
            continue
        pair = m.pair(a, b)
        if first_refusal(pair, PLACED) is not None:
            continue  # the record of stage B says that an anchor has no such consumer
        reached = m.reach(a, b)
        if isinstance(reached, No):
            continue
        c = Candidate(pair.saved, 0, 0, a, b, v, readers[0], m.versions(a, b))
        _record(m, c, pair, None)
        m.join(pair, reached)


def _candidates(m: Merger) -> list[Candidate]:
    """Pairs of producer and consumer, the pair that saves most first."""
    home, place, needed, window = m.home, m.order.place, m.known.needed, m.config.candidate_window
    links: dict[tuple[int, int], int] = {}  # bytes of the values between two clusters that need not be moved
    first: dict[tuple[int, int], tuple[Value, int]] = {}
    for v, readers in m.known.readers.items():
        a = home[m.known.producer[v]]
        others: dict[int, int] = {}
        for r in readers:
            others.setdefault(home[r], r)
        others.pop(a, None)
        if not others or m.clusters[a].opaque:
            continue
        size = m.nbytes(v) * (1 if v in needed or len(others) > 1 else 2)
        near = sorted(others, key=place.__getitem__) if len(others) > 1 else others
        for k, b in enumerate(near):
            if m.clusters[b].opaque:
                continue
            pair = a, b
            links[pair] = links.get(pair, 0) + size
            if k < window and pair not in first:
                first[pair] = v, others[b]
    found: list[Candidate] = []
    for (a, b), (v, reader) in first.items():
        if m.settled(a, b):
            continue
        saved = LAUNCH_BYTES + links[a, b] + m.common(a, b)
        found.append(Candidate(saved, place[b] - place[a], place[a], a, b, v, reader, m.versions(a, b)))
    found.sort(key=lambda c: (-c.saved, c.span, c.at))
    return found


def _try(m: Merger, c: Candidate) -> bool:
    """Judge a pair and join it if nothing speaks against it."""
    a, b = m.find(c.a), m.find(c.b)
    if a == b:
        return False
    if m.settled(a, b):
        return False
    versions = m.versions(a, b)
    pair = m.pair(a, b)
    if not pair.shared:
        return False  # what `b` read of `a` was split off
    if (a, b) == (c.a, c.b) and versions == c.versions:
        pair.saved = c.saved
    no = first_refusal(pair)
    if no is not None and no.code in PEELABLE:
        pair, no = peel(m, pair, no)
    if no is not None:
        m.refused[a, b] = (versions, no)
        _record(m, c, pair, no)
        return False
    reached = m.reach(a, b)
    if isinstance(reached, No):
        _record(m, c, pair, reached)  # not remembered: legal again once what lies between has joined
        return False
    _record(m, c, pair, None)
    m.join(pair, reached)
    return True


def _record(m: Merger, c: Candidate, pair: Pair, no: No | None) -> None:
    v, reader = c.value, c.reader
    if v not in pair.shared:  # the part that read it was split off
        v = pair.shared[0]
        inside = set(pair.b.items)
        reader = next(r for r in m.known.readers[v] if r in inside)
    m.records[v, reader] = said(pair, no)


def said(pair: Pair, no: No | None) -> Said:
    """The words for a pair that was judged."""
    if no is None:
        return Said(Verdict.FUSED, FUSED, (("saved", pair.saved),))
    return Said(Verdict.REFUSED, no.code, no.numbers)
