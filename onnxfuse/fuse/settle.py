"""What became of every considered pair: one record each, true of the groups as they are in the end.

A refusal is given while the groups still grow. Here every refused pair whose groups have changed since is judged
again, so that the record says what keeps the two groups apart now; `fuse.evaluate` does the same from the groups alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxfuse.config import FusionMode
from onnxfuse.fuse import products, rowblocks
from onnxfuse.fuse.merge import FUSED, Merger, Said
from onnxfuse.fuse.order import quotient_order
from onnxfuse.fuse.rules import No, first_refusal
from onnxfuse.fuse.siblings import SIBLINGS
from onnxfuse.ir.partition import Decision, Relation, Verdict

NF_ROUNDS = "NF_ROUNDS"
MET = Said(Verdict.FUSED, FUSED, (("via", "another pair"),))  # together by another way


def settle(m: Merger) -> tuple[Decision, ...]:
    """The records of `m`, which has done all it does."""
    m.order.reset(quotient_order(m.known.succ, m.home))
    return (*_vertical(m), *_horizontal(m))


def _vertical(m: Merger) -> Iterator[Decision]:
    verdicts: dict[tuple[int, int], Said] = {}
    name = m.known.name
    for (v, reader), told in m.records.items():
        a, b = m.home[m.known.producer[v]], m.home[reader]
        if a == b:
            told = told if told.verdict is Verdict.FUSED else MET
        elif (a, b) in verdicts:
            told = verdicts[a, b]
        else:
            no = why_apart(m, a, b)
            told = verdicts[a, b] = Said(Verdict.REFUSED, no.code, no.numbers)
        yield Decision("B", v.name, name(reader), Relation.VERTICAL, *told)


def _horizontal(m: Merger) -> Iterator[Decision]:
    """Joins, and every two groups that stayed apart once; they were judged by other members before."""
    met: set[tuple[int, int]] = set()
    name = m.known.name
    for (x, y), told in m.sibling_records.items():
        a, b = sorted((m.home[x], m.home[y]), key=m.order.place.__getitem__)
        if a == b:
            if told.verdict is not Verdict.FUSED:
                continue
        elif (a, b) in met or b in m.order.succ[a]:  # one came to read the other: see the value between
            continue
        else:
            met.add((a, b))
            no = why_beside(m, a, b)
            told = Said(Verdict.REFUSED, no.code, no.numbers)
        yield Decision("C", name(x), name(y), Relation.HORIZONTAL, *told)


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
