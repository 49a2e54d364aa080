"""Stages B and C: pairwise growth of stage A's groups, along edges (CanFuse), then between siblings.

Rounds: list every (producer group, consumer group) that share a value, most traffic saved first; join greedily, every
pair judged anew against the groups as they are; stop when a round joins nothing. Deterministic.

Cycle test without a reachability matrix: the groups stand in an integer topological order. Joining u before v is
illegal iff v can be reached from u other than directly, and such a path lies between them in the order; afterwards
what reaches v stands before the joined group and what u reaches after it.

Peeling: stage A lets a reshape flow into a pointwise group; if the group then does not stand on the producer's rows
(layer norm, then [B,S,C] -> [B*S,C]), the members from that view on are split off and the rest is tried alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from onnxfuse.analysis import traffic
from onnxfuse.analysis.footing import Footing
from onnxfuse.analysis.rows import rows
from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.errors import Refusal
from onnxfuse.fuse.facts import Facts
from onnxfuse.fuse.group import ANCHOR
from onnxfuse.fuse.rules import LAUNCH_BYTES, PLACED, Cluster, No, Pair, first_refusal
from onnxfuse.fuse.siblings import SIBLINGS
from onnxfuse.ir.expr import Load, Var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, Opaque, depends
from onnxfuse.ir.partition import Decision, Number, Relation, Verdict

FUSED = "FUSED"
NF_CYCLE = "NF_CYCLE"
NF_CYCLE_BUDGET = "NF_CYCLE_BUDGET"
# Distance of neighbours in the order, so that the parts of a group that is split find places between.
GAP = 1 << 40
# Refusals that splitting a view off the consumer may cure.
PEELABLE = frozenset({"NF_GROUP_MERGE", "NF_AXES_CONFLICT", "NF_NOT_ROW_LOCAL", "NF_VIEW_LEVEL", "NF_RECOMPUTE"})


class Candidate(NamedTuple):
    """A producer's and a consumer's cluster with a value between them, and what joining the two would save."""

    saved: int
    span: int
    at: int
    a: int
    b: int
    value: Value
    reader: int  # item of b
    versions: tuple[int, int]


class Siblings(NamedTuple):
    """Two clusters that read a common value, and an item of either that does."""

    common: int
    span: int
    at: int
    a: int
    b: int
    first: int
    second: int


class Merger:
    """State of stage B: clusters, their quotient graph and its topological order."""

    def __init__(self, known: Facts, owner: list[int], order: list[int], config: FusionConfig) -> None:
        self.known = known
        self.config = config
        self.grown = owner  # group of every item after stage A
        self.home = list(owner)  # item -> cluster id
        self.alias: dict[int, int] = {}  # a cluster that joined -> the one it is part of, perhaps joined as well
        self.clusters: dict[int, Cluster] = {}
        self.succ: dict[int, set[int]] = {o: set() for o in order}
        self.pred: dict[int, set[int]] = {o: set() for o in order}
        self.place: dict[int, int] = {o: k * GAP for k, o in enumerate(order)}
        self.width: dict[int, int] = {}  # of places that have been divided: how far to the next
        self.bytes: dict[Value, int] = {}
        self.splits = 0
        self.records: dict[tuple[Value, int], Decision] = {}
        self.sibling_records: dict[tuple[int, int], Decision] = {}
        self.refused: dict[tuple[int, int], tuple[int, int]] = {}
        members: dict[int, list[int]] = {o: [] for o in order}
        for i, o in enumerate(owner):
            members[o].append(i)
        for o in order:
            self.clusters[o] = self._cluster(o, members[o])
        for u, out in enumerate(known.succ):
            for v in out:
                if owner[u] != owner[v]:
                    self.succ[owner[u]].add(owner[v])
                    self.pred[owner[v]].add(owner[u])

    def find(self, cluster: int) -> int:
        """Present id of a cluster."""
        while (at := self.alias.get(cluster)) is not None:
            cluster = at
        return cluster

    def grow(self) -> None:
        """Rounds until nothing changes."""
        for _ in range(self.config.rounds):
            self._renumber()
            joined = False
            for c in self._candidates():
                joined = self._try(c) or joined
            if not joined:
                return

    def place_views(self) -> None:
        """Let contractions store where the views behind them would copy to, if nothing else took the views."""
        for v, readers in list(self.known.readers.items()):
            a, b = self.home[self.known.producer[v]], self.home[readers[0]]
            if a == b or self.clusters[a].anchors != 1 or any(self.home[r] != b for r in readers):
                continue
            if self.clusters[b].anchors or self.clusters[b].opaque or self.clusters[b].reduces:
                continue
            pair = self._pair(a, b)
            if first_refusal(pair, PLACED) is not None:
                continue  # the record of stage B says that an anchor has no such consumer
            reached = self.reach(a, b)
            if isinstance(reached, No):
                continue
            c = Candidate(pair.saved, 0, 0, a, b, v, readers[0], self._versions(a, b))
            self._record(c, pair, None)
            self._join(pair, reached)

    def join_siblings(self) -> None:
        """Stage C: groups that read the same value, after all that could join along an edge has; then those again."""
        reading = self._reading()
        for _ in range(self.config.rounds):
            self._renumber()
            joined = False
            for c in self._sibling_candidates(reading):
                joined = self._try_siblings(c) or joined
            if not joined:
                return
            self.grow()

    def _reading(self) -> dict[Value, list[int]]:
        """Readers of every value that is worth not reading twice, made here or not."""
        out: dict[Value, list[int]] = {}
        for i, item in enumerate(self.known.items):
            if isinstance(item, Compute):
                for v in dict.fromkeys(ld.source for ld in self.known.loads[item.out]):
                    out.setdefault(v, []).append(i)
        least = self.config.min_saved_bytes
        return {v: readers for v, readers in out.items() if len(readers) > 1 and self._nbytes(v) >= least}

    def _sibling_candidates(self, reading: dict[Value, list[int]]) -> list[Siblings]:
        """Pairs of groups that read a common value and not each other, the pair with most in common first."""
        found: dict[tuple[int, int], Siblings] = {}
        home, place = self.home, self.place
        for readers in reading.values():
            by: dict[int, int] = {}
            for r in readers:
                by.setdefault(home[r], r)
            if len(by) < 2:
                continue
            near = sorted(by, key=place.__getitem__)
            for k, a in enumerate(near):
                for b in near[k + 1 : k + 1 + self.config.sibling_window]:
                    if (a, b) in found or b in self.succ[a] or self._settled(a, b):
                        continue
                    found[a, b] = Siblings(self._common(a, b), place[b] - place[a], place[a], a, b, by[a], by[b])
        return sorted(found.values(), key=lambda c: (-c.common, c.span, c.at))

    def _settled(self, a: int, b: int) -> bool:
        """Refused before, and neither has changed."""
        return self.refused.get((a, b)) == self._versions(a, b)

    def _try_siblings(self, c: Siblings) -> bool:
        """Judge a horizontal pair and join it if nothing speaks against it."""
        a, b = self.find(c.a), self.find(c.b)
        if a == b:
            return False
        if self.place[a] > self.place[b]:
            a, b = b, a
        if b in self.succ[a] or self._settled(a, b):
            return False
        pair = Pair(
            self.clusters[a],
            self.clusters[b],
            self.config,
            self.computes,
            self._leaves,
            self._nbytes,
            self.loads,
            span=(self.place[b] - self.place[a]) // GAP,
        )
        no = first_refusal(pair, SIBLINGS)
        if no is not None:
            self.refused[a, b] = self._versions(a, b)
            self._record_siblings(c, pair, no)
            return False
        reached = self.reach(a, b)
        if isinstance(reached, No):
            self._record_siblings(c, pair, reached)
            return False
        self._record_siblings(c, pair, None)
        self._join(pair, reached)
        return True

    def _record_siblings(self, c: Siblings, pair: Pair, no: No | None) -> None:
        numbers: tuple[tuple[str, Number], ...] = (("saved", pair.saved),) if no is None else no.numbers
        verdict, code = (Verdict.FUSED, FUSED) if no is None else (Verdict.REFUSED, no.code)
        names = self.known.name(c.first), self.known.name(c.second)
        self.sibling_records[c.first, c.second] = Decision("C", *names, Relation.HORIZONTAL, verdict, code, numbers)

    def _renumber(self) -> None:
        """Places GAP apart, in the same order."""
        for k, o in enumerate(sorted(self.place, key=self.place.__getitem__)):
            self.place[o] = k * GAP
        self.width = {}

    def decisions(self) -> tuple[Decision, ...]:
        """One record per considered (value, reader); a pair that got together by another way counts as fused."""
        pairs = [(self.known.producer[v], reader, d) for (v, reader), d in self.records.items()]
        pairs += [(a, b, d) for (a, b), d in self.sibling_records.items()]
        return tuple(_met(d) if self.home[a] == self.home[b] else d for a, b, d in pairs)

    def _cluster(self, o: int, items: list[int]) -> Cluster:
        reads: set[Value] = set()
        makes: set[Value] = set()
        reduces = anchors = 0
        opaque = False
        for i in items:
            item = self.known.items[i]
            if isinstance(item, Opaque):
                opaque = True
                continue
            reads.update(ld.source for ld in self.known.loads[item.out])
            makes.add(item.out)
            reduces += item.reduce is not None
            anchors += self.known.kind[i] == ANCHOR
        pinned = any(self.known.pinned[i] for i in items)
        flat = all(self.known.flat[i] for i in items)
        inside = set(items)
        needed, readers = self.known.needed, self.known.readers
        exits = {v for v in makes if v in needed or any(r not in inside for r in readers.get(v, ()))}
        return Cluster(o, items, reads - makes, makes, exits, reduces, anchors, opaque, pinned, flat)

    def _nbytes(self, v: Value) -> int:
        known = self.bytes.get(v)
        if known is None:
            known = self.bytes[v] = traffic.nbytes(v)
        return known

    def loads(self, c: Compute) -> list[Load]:
        return self.known.loads[c.out]

    def computes(self, items: list[int]) -> list[Compute]:
        return [c for i in items if isinstance(c := self.known.items[i], Compute)]

    def _leaves(self, v: Value, a: Cluster, b: Cluster) -> bool:
        """`v` is needed outside of both clusters."""
        if v in self.known.needed:
            return True
        home, one, two = self.home, a.id, b.id
        return any((at := home[r]) != one and at != two for r in self.known.readers.get(v, ()))

    def _pair(self, a: int, b: int) -> Pair:
        ca, cb = self.clusters[a], self.clusters[b]
        both = ca.exits & cb.reads
        shared = tuple(both) if len(both) < 2 else tuple(sorted(both, key=self.known.producer.__getitem__))
        return Pair(ca, cb, self.config, self.computes, self._leaves, self._nbytes, self.loads, shared)

    def _versions(self, a: int, b: int) -> tuple[int, int]:
        return self.clusters[a].version, self.clusters[b].version

    def _candidates(self) -> list[Candidate]:
        """Pairs of producer and consumer, the pair that saves most first."""
        home, place, needed = self.home, self.place, self.known.needed
        links: dict[tuple[int, int], int] = {}  # bytes of the values between two clusters that need not be moved
        first: dict[tuple[int, int], tuple[Value, int]] = {}
        for v, readers in self.known.readers.items():
            a = home[self.known.producer[v]]
            others: dict[int, int] = {}
            for r in readers:
                others.setdefault(home[r], r)
            others.pop(a, None)
            if not others or self.clusters[a].opaque:
                continue
            once = v in needed or len(others) > 1
            near = sorted(others, key=place.__getitem__) if len(others) > 1 else others
            for k, b in enumerate(near):
                if self.clusters[b].opaque:
                    continue
                links[a, b] = links.get((a, b), 0) + self._nbytes(v) * (1 if once else 2)
                if k < self.config.candidate_window:
                    first.setdefault((a, b), (v, others[b]))
        found: list[Candidate] = []
        for (a, b), (v, reader) in first.items():
            if self._settled(a, b):
                continue
            saved = LAUNCH_BYTES + links[a, b] + self._common(a, b)
            found.append(Candidate(saved, place[b] - place[a], place[a], a, b, v, reader, self._versions(a, b)))
        found.sort(key=lambda c: (-c.saved, c.span, c.at))
        return found

    def _common(self, a: int, b: int) -> int:
        """Bytes of what both read from outside."""
        one, two = self.clusters[a].reads, self.clusters[b].reads
        return 0 if one.isdisjoint(two) else sum(map(self._nbytes, one & two))

    def _try(self, c: Candidate) -> bool:
        """Judge a pair and join it if nothing speaks against it."""
        a, b = self.find(c.a), self.find(c.b)
        if a == b:
            return False
        if self._settled(a, b):
            return False
        versions = self._versions(a, b)
        pair = self._pair(a, b)
        if not pair.shared:
            return False  # what `b` read of `a` was split off
        if (a, b) == (c.a, c.b) and versions == c.versions:
            pair.saved = c.saved
        no = first_refusal(pair)
        if no is not None and no.code in PEELABLE:
            pair, no = self._peel(pair, no)
        if no is not None:
            self.refused[a, b] = versions
            self._record(c, pair, no)
            return False
        reached = self.reach(a, b)
        if isinstance(reached, No):
            self._record(c, pair, reached)  # not remembered: legal again once what lies between has joined
            return False
        self._record(c, pair, None)
        self._join(pair, reached)
        return True

    def _peel(self, pair: Pair, no: No) -> tuple[Pair, No | None]:
        """Split members that read `b` itself through a view off `b`, if the rest may join; else `pair` and `no`."""
        a, b = pair.a, pair.b
        head, tails = self._views_off(b)
        if not head or not tails:
            return pair, no
        inside = {*a.items, *head}
        first = self._cluster(b.id, head)
        shared = tuple(v for v in pair.shared if v in first.reads)
        if not shared or isinstance(self.reach(a.id, b.id), No) or not all(map(self._runs_alone, tails)):
            return pair, no

        def leaves(v: Value, _a: Cluster, _b: Cluster) -> bool:
            return v in self.known.needed or any(r not in inside for r in self.known.readers.get(v, ()))

        tried = replace(pair, b=first, leaves=leaves, shared=shared)
        if first_refusal(tried) is not None:
            return pair, no
        self._split(b, first, tails)
        return tried, None

    def _runs_alone(self, items: list[int]) -> bool:
        """A part split off is executable: the end of one of stage A's groups, or a row program."""
        if len({self.grown[i] for i in items}) == 1:
            return True
        inside = set(items)
        members = self.computes(items)
        needed = self.known.needed
        writes = [c.out for c in members if c.out in needed or not inside.issuperset(self.known.readers[c.out])]
        return not isinstance(rows(members, writes, self.loads), Refusal)

    def _views_off(self, b: Cluster) -> tuple[list[int], list[list[int]]]:
        """Members of `b` before any bent read of its own values, and the rest in connected parts."""
        tail: dict[int, int] = {}  # item -> part
        for i in b.items:
            c = self.known.items[i]
            assert isinstance(c, Compute)
            own = [ld for ld in self.loads(c) if ld.source in b.makes]
            before = {tail[p] for ld in own if (p := self.known.producer[ld.source]) in tail}
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

    def _split(self, b: Cluster, head: Cluster, tails: list[list[int]]) -> None:
        """Replace cluster `b` by `head` (same id) followed by `tails`, in the graph and in the order."""
        fresh = []
        for items in tails:
            t = len(self.known.items) + self.splits
            self.splits += 1
            fresh.append(self._cluster(t, items))
            for i in items:
                self.home[i] = t
        for w in self.succ.pop(b.id):
            self.pred[w].discard(b.id)
        for w in self.pred.pop(b.id):
            self.succ[w].discard(b.id)
        parts = [head, *fresh]
        for part in parts:
            self.clusters[part.id] = part
            self.succ[part.id], self.pred[part.id] = set(), set()
        for part in parts:
            part.version = b.version + 1
            for i in part.items:
                after = {self.home[c] for c in self.known.succ[i]}
                made = (self.known.producer.get(v) for v in depends(self.known.items[i]))
                before = {self.home[p] for p in made if p is not None}
                for w in after - {part.id}:
                    self.succ[part.id].add(w)
                    self.pred[w].add(part.id)
                for w in before - {part.id}:
                    self.pred[part.id].add(w)
                    self.succ[w].add(part.id)
        self._divide(parts)

    def _divide(self, parts: list[Cluster]) -> None:
        """Places for the parts of what stood where the first one stands."""
        start = self.place[parts[0].id]
        if self.width.get(start, GAP) < len(parts):
            self._renumber()
            start = self.place[parts[0].id]
        step = self.width.get(start, GAP) // len(parts)
        for k, part in enumerate(parts):
            self.place[part.id] = start + k * step
            self.width[start + k * step] = step

    def _record(self, c: Candidate, pair: Pair, no: No | None) -> None:
        v, reader = c.value, c.reader
        if v not in pair.shared:  # the part that read it was split off
            v = pair.shared[0]
            inside = set(pair.b.items)
            reader = next(r for r in self.known.readers[v] if r in inside)
        numbers: tuple[tuple[str, Number], ...] = (("saved", pair.saved),) if no is None else no.numbers
        verdict, code = (Verdict.FUSED, FUSED) if no is None else (Verdict.REFUSED, no.code)
        self.record(v, reader, verdict, code, numbers)

    def record(
        self, v: Value, reader: int, verdict: Verdict, code: str, numbers: tuple[tuple[str, Number], ...]
    ) -> None:
        """The decision about a value and one reader of it; a later one replaces it."""
        name = self.known.name(reader)
        self.records[v, reader] = Decision("B", v.name, name, Relation.VERTICAL, verdict, code, numbers)

    def beside(self, a: int, b: int, verdict: Verdict, code: str, numbers: tuple[tuple[str, Number], ...]) -> None:
        """The decision about two items of groups that stand side by side; it replaces what was said of the groups."""
        one, two = self.clusters[self.home[a]].items, self.clusters[self.home[b]].items
        for pair in [(x, y) for x, y in self.sibling_records if (x in one and y in two) or (x in two and y in one)]:
            del self.sibling_records[pair]
        names = self.known.name(a), self.known.name(b)
        self.sibling_records[a, b] = Decision("C", *names, Relation.HORIZONTAL, verdict, code, numbers)

    def reach(self, u: int, v: int) -> set[int] | No:
        """Clusters before `v` that `u` reaches, or why joining is not possible."""
        end = self.place[v]
        window = (end - self.place[u]) // GAP
        if window > self.config.cycle_window:
            return No(NF_CYCLE_BUDGET, (("window", window), ("most", self.config.cycle_window)))
        seen: set[int] = set()
        stack = [w for w in self.succ[u] if w != v and self.place[w] < end]
        while stack:
            w = stack.pop()
            if w in seen:
                continue
            seen.add(w)
            for x in self.succ[w]:
                if x == v:
                    return No(NF_CYCLE, (("through", self.known.name(self.clusters[w].items[-1])),))
                if self.place[x] < end and x not in seen:
                    stack.append(x)
        return seen

    def _reaching(self, v: int, start: int) -> set[int]:
        """Clusters placed after `start` that reach `v`."""
        seen: set[int] = set()
        stack = [w for w in self.pred[v] if self.place[w] > start]
        while stack:
            w = stack.pop()
            if w not in seen:
                seen.add(w)
                stack.extend(x for x in self.pred[w] if self.place[x] > start)
        return seen

    def _reorder(self, u: int, v: int, reached: set[int]) -> None:
        """Give u, which is about to contain v, a place after all that reaches v and before all that u reaches.

        Only those move, among the places they have: the others are neither before nor after any of them.
        """
        place = self.place
        if reached:
            before = sorted(self._reaching(v, place[u]), key=place.__getitem__)
            after = sorted(reached, key=place.__getitem__)
            free = sorted(place[w] for w in (u, v, *before, *after))
            for w, at in zip((*before, u, *after), free, strict=False):
                place[w] = at
        else:
            place[u] = place[v]
        del place[v]

    def _join(self, pair: Pair, reached: set[int]) -> None:
        """The second cluster (the consumer's) becomes part of the first."""
        a, b = pair.a, pair.b
        siblings = not pair.shared or a.siblings or b.siblings
        how = None if (a.flat and b.flat) or a.anchors or b.anchors or siblings else pair.footing
        self._merge(a, b, reached, set(pair.writes), siblings, how)

    def unite(self, ids: Iterable[int]) -> int:
        """Clusters that nothing outside of them stands between become one; returns its id."""
        rest = set(ids)
        u = min(rest, key=self.place.__getitem__)
        rest.discard(u)
        while rest:
            v = min(rest, key=self.place.__getitem__)
            rest.discard(v)
            reached = self.reach(u, v)
            assert not isinstance(reached, No), "there is something between"
            a, b = self.clusters[u], self.clusters[v]
            self._merge(a, b, reached, {x for x in (*a.exits, *b.exits) if self._leaves(x, a, b)}, True, None)
        return u

    def _merge(
        self,
        a: Cluster,
        b: Cluster,
        reached: set[int],
        writes: set[Value],
        siblings: bool,
        how: Footing | Refusal | None,
    ) -> None:
        u, v = a.id, b.id
        self._reorder(u, v, reached)
        del self.clusters[v]
        makes = a.makes | b.makes
        self.clusters[u] = Cluster(
            u,
            sorted(a.items + b.items),
            (a.reads | b.reads) - makes,
            makes,
            writes,
            a.reduces + b.reduces,
            a.anchors + b.anchors,
            False,
            False,
            a.flat and b.flat and not siblings,
            max(a.version, b.version) + 1,
            siblings,
            how,
        )
        self.alias[v] = u
        for i in b.items:
            self.home[i] = u
        for w in self.succ.pop(v):
            self.pred[w].discard(v)
            self.pred[w].add(u)
            self.succ[u].add(w)
        for w in self.pred.pop(v):
            self.succ[w].discard(v)
            if w != u:
                self.succ[w].add(u)
                self.pred[u].add(w)
        self.succ[u].discard(u)
        self.pred[u].discard(u)


def _met(d: Decision) -> Decision:
    """The record of two that are together, be it by another way."""
    if d.verdict is Verdict.FUSED:
        return d
    return replace(d, verdict=Verdict.FUSED, code=FUSED, numbers=(("via", "another pair"),))


def _bent(ld: Load) -> bool:
    """Reads at anything but bare variables (dimensions of 1 aside)."""
    return any(not isinstance(ix, Var) and d != 1 for ix, d in zip(ld.index, ld.source.tensor.shape, strict=True))


def grow_groups(
    known: Facts,
    owner: list[int],
    order: list[int],
    config: FusionConfig,
    finish: Callable[[Merger], None] | None = None,
) -> tuple[list[int], tuple[Decision, ...]]:
    """Stages B and C on the groups of `owner` (in topological order `order`): new owner of every item, the records.

    finish: what is done in full mode before the groups are read off.
    """
    merger = Merger(known, owner, order, config)
    merger.grow()
    if config.mode is FusionMode.FULL:
        merger.join_siblings()
        if finish is not None:
            finish(merger)
    merger.place_views()
    return merger.home, merger.decisions()
