"""What keeps two values apart, worked out from a finished partition alone.

The records of a partition are about the pairs that were considered on the way; `evaluate` judges those again. Asked of
any other pair (a second value between two groups, two that share nothing, a mode without the stage that would look at
them), `Judge.pair` gives the decision the same rules come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse.facts import Facts, facts
from onnxfuse.fuse.merge import FUSED, Merger, Said
from onnxfuse.fuse.order import quotient_order
from onnxfuse.fuse.rules import No
from onnxfuse.fuse.settle import settle, why_apart, why_beside
from onnxfuse.fuse.stage_a import records, stage_a
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute
from onnxfuse.ir.partition import Decision, Partition, Relation, Verdict

NF_MODE = "NF_MODE"
TOGETHER = Said(Verdict.FUSED, FUSED)


@dataclass(frozen=True, slots=True)
class Border:
    """A value that goes from one group to another, the first member there that reads it, and why it does."""

    value: Value
    reader: str
    nbytes: int
    decision: Decision


class Judge:
    """Judges any two values of `made`, which `fuse` returned for `config`."""

    def __init__(self, made: Partition, config: FusionConfig) -> None:
        known = facts(made.loops, config)
        group = {c.out: g.id for g in made.groups for c in g.members}
        outs = [item.out if isinstance(item, Compute) else None for item in known.items]
        owner = [len(made.groups) + i if v is None else group[v] for i, v in enumerate(outs)]
        growth, tree = stage_a(known, config)
        self.config = config
        self.known: Facts = known
        self.first: tuple[Decision, ...] = ()  # of stage A
        if config.mode is not FusionMode.NONE:
            self.first = records(known, growth, tree, owner, config)
        self.said_in_a = {d.a: d for d in self.first}
        order = quotient_order(known.succ, owner)
        self.merger = Merger(known, owner, order, config, made.loops.consts.keys(), growth.root)
        self.item = {known.name(i): i for i in range(len(known.items))}
        self.recorded = made.decisions

    @property
    def grows(self) -> bool:
        """Stage B runs in this mode."""
        return self.config.mode not in (FusionMode.NONE, FusionMode.TVM) and self.config.rounds > 0

    def again(self) -> tuple[Decision, ...]:
        """Every recorded decision."""
        if not self.grows:
            return self.first
        value = {v.name: v for v in self.known.producer}
        for d in self.recorded:
            if d.stage == "B":
                self.merger.records[value[d.a], self.item[d.b]] = Said(d.verdict, d.code, d.numbers)
            elif d.stage == "C":
                self.merger.sibling_records[self.item[d.a], self.item[d.b]] = Said(d.verdict, d.code, d.numbers)
        return self.first + settle(self.merger)

    def pair(self, a: str, b: str) -> Decision | None:
        """The decision about two values (or nodes that stay, by `Facts.name`); None if one of them is not computed."""
        x, y = self.item.get(a), self.item.get(b)
        if x is None or y is None:
            return None
        m = self.merger
        if x in self.known.succ[y] or (m.home[x] in m.order.succ[m.home[y]] and y not in self.known.succ[x]):
            x, y = y, x
        vertical = m.home[y] in m.order.succ[m.home[x]] or y in self.known.succ[x]
        return self._vertical(x, y) if vertical else self._beside(*sorted((x, y)))

    def borders(self) -> Iterator[Border]:
        """Every value that leaves one kernel for another, once for each."""
        m, known = self.merger, self.known
        for v, readers in known.readers.items():
            p = known.producer[v]
            if known.node[p] is None:
                continue
            first: dict[int, int] = {}
            for r in readers:
                if known.node[r] is not None and m.home[r] != m.home[p]:
                    first.setdefault(m.home[r], r)
            for r in first.values():
                said = self._vertical(p, r)
                if said.code == "NF_KIND":  # an anchor's epilogue is stage A's to take
                    said = self._refusal_in_a(p) or said
                yield Border(v, known.name(r), m.nbytes(v), said)

    def _vertical(self, x: int, y: int) -> Decision:
        m = self.merger
        if not self.grows and m.home[x] != m.home[y] and self.config.mode is not FusionMode.NONE:
            return self._stage_a(x, y)
        if m.home[x] == m.home[y]:
            told = TOGETHER
        elif not self.grows:
            told = self._mode()
        else:
            told = _refused(why_apart(m, m.home[x], m.home[y]))
        return self._decision("B", x, y, Relation.VERTICAL, told)

    def _stage_a(self, x: int, y: int) -> Decision:
        """Stage A looks at a value and its post-dominator: what it said of the producer holds for all its readers."""
        return self._refusal_in_a(x) or self._decision("A", x, y, Relation.VERTICAL, self._mode())

    def _refusal_in_a(self, x: int) -> Decision | None:
        said = self.said_in_a.get(self.known.name(x))
        return said if said is not None and said.verdict is Verdict.REFUSED else None

    def _beside(self, x: int, y: int) -> Decision:
        m = self.merger
        a, b = sorted((m.home[x], m.home[y]), key=m.order.place.__getitem__)
        if a == b:
            told = TOGETHER
        elif m.clusters[a].opaque or m.clusters[b].opaque:
            told = _refused(No("NF_OPAQUE"))
        elif self.grows and self.config.mode is FusionMode.FULL:
            told = _refused(why_beside(m, a, b))
        else:
            told = self._mode()
        return self._decision("C", x, y, Relation.HORIZONTAL, told)

    def _mode(self) -> Said:
        return _refused(No(NF_MODE, (("mode", str(self.config.mode)),)))

    def _decision(self, stage: str, x: int, y: int, relation: Relation, told: Said) -> Decision:
        return Decision(stage, self.known.name(x), self.known.name(y), relation, *told)


def _refused(no: No) -> Said:
    return Said(Verdict.REFUSED, no.code, no.numbers)


def evaluate(made: Partition, config: FusionConfig) -> tuple[Decision, ...]:
    """Every record of `made`, judged again from its loops and its groups alone, without the way that led there."""
    return Judge(made, config).again()
