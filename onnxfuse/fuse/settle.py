"""What became of every considered pair: one record each, true of the groups as they are in the end.

A refusal is given while the groups still grow. Here every refused pair whose groups have changed since is judged
again, so that the record says what keeps the two groups apart now; `fuse.evaluate` does the same from the groups alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onnxfuse.config import FusionMode
from onnxfuse.fuse import products, rowblocks
from onnxfuse.fuse.merge import FUSED, Merger
from onnxfuse.fuse.order import quotient_order
from onnxfuse.fuse.rules import No, first_refusal
from onnxfuse.fuse.siblings import SIBLINGS
from onnxfuse.ir.partition import Decision, Verdict

NF_ROUNDS = "NF_ROUNDS"


def settle(m: Merger) -> tuple[Decision, ...]:
    """The records of `m`, which has done all it does."""
    m.order.reset(quotient_order(m.known.succ, m.home))
    return (*_vertical(m), *_horizontal(m))


def _vertical(m: Merger) -> Iterator[Decision]:
    verdicts: dict[tuple[int, int], No] = {}
    for (v, reader), d in m.records.items():
        a, b = m.home[m.known.producer[v]], m.home[reader]
        if a != b and (a, b) not in verdicts:
            verdicts[a, b] = why_apart(m, a, b)
        yield _met(d) if a == b else _apart(d, verdicts[a, b])


def _horizontal(m: Merger) -> Iterator[Decision]:
    """Joins, and every two groups that stayed apart once; they were judged by other members before."""
    said: set[tuple[int, int]] = set()
    for (x, y), d in m.sibling_records.items():
        a, b = sorted((m.home[x], m.home[y]), key=m.order.place.__getitem__)
        if a == b:
            if d.verdict is Verdict.FUSED:
                yield d
        elif (a, b) not in said and b not in m.order.succ[a]:  # if one came to read the other: see the value between
            said.add((a, b))
            yield _apart(d, why_beside(m, a, b))


def why_apart(m: Merger, a: int, b: int) -> No:
    """Why two clusters of which `b` reads `a` are not one."""
    known = m.refused.get((a, b)) if m.settled(a, b) else None
    no = first_refusal(m.pair(a, b)) if known is None else known[1]
    if no is not None and m.config.mode is FusionMode.FULL:
        no = rowblocks.why_not(m, m.clusters[a], m.clusters[b]) or no
    return no or _cyclic(m, a, b) or No(NF_ROUNDS, (("rounds", m.config.rounds),))


def why_beside(m: Merger, a: int, b: int) -> No:
    """Why two clusters that read the same value, `a` before `b`, are not one."""
    known = m.refused.get((a, b)) if m.settled(a, b) else None
    no = first_refusal(m.beside(a, b), SIBLINGS) if known is None else known[1]
    if no is not None:
        no = products.why_not(m, m.clusters[a], m.clusters[b]) or no
    return no or _cyclic(m, a, b) or No(NF_ROUNDS, (("rounds", m.config.rounds),))


def _cyclic(m: Merger, a: int, b: int) -> No | None:
    found = m.order.between((a, b), m.config.cycle_window)
    return None if found is None else m.cyclic(found)


def _met(d: Decision) -> Decision:
    """The record of two that are together, be it by another way."""
    if d.verdict is Verdict.FUSED:
        return d
    return replace(d, verdict=Verdict.FUSED, code=FUSED, numbers=(("via", "another pair"),))


def _apart(d: Decision, no: No) -> Decision:
    if d.verdict is Verdict.REFUSED and d.code == no.code and d.numbers == no.numbers:
        return d
    return replace(d, verdict=Verdict.REFUSED, code=no.code, numbers=no.numbers)
