"""The quotient graph of the groups, and a topological order of it that stays one while groups join and split.

Cycle test without a reachability matrix: every group has an integer place. Joining u before v is illegal iff v can be
reached from u other than directly, and such a path lies between them in the order; afterwards what reaches v stands
before the joined group and what u reaches after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# Distance of neighbours in the order, so that the parts of a group that is split find places between.
GAP = 1 << 40


@dataclass(frozen=True, slots=True)
class Through:
    """A group on the way from one to the other, or the number of places that would have to be searched."""

    group: int = -1
    window: int = 0


class Order:
    """Successors, predecessors and place of every group, by id."""

    def __init__(self, order: Sequence[int], owner: Sequence[int], succ: Sequence[Sequence[int]]) -> None:
        self.succ: dict[int, set[int]] = {o: set() for o in order}
        self.pred: dict[int, set[int]] = {o: set() for o in order}
        self.place: dict[int, int] = {}
        self.width: dict[int, int] = {}  # of places that have been divided: how far to the next
        self.reset(order)
        for u, out in enumerate(succ):
            for v in out:
                if owner[u] != owner[v]:
                    self.succ[owner[u]].add(owner[v])
                    self.pred[owner[v]].add(owner[u])

    def reset(self, order: Iterable[int]) -> None:
        """Places GAP apart in this order."""
        self.place = {o: k * GAP for k, o in enumerate(order)}
        self.width = {}

    def sorted(self, groups: Iterable[int] | None = None) -> list[int]:
        """These groups (or all) from first to last."""
        return sorted(self.place if groups is None else groups, key=self.place.__getitem__)

    def renumber(self) -> None:
        """Places GAP apart, in the same order."""
        self.reset(self.sorted())

    def span(self, u: int, v: int) -> int:
        """How many groups stand between two, and one."""
        return abs(self.place[v] - self.place[u]) // GAP

    def reach(self, u: int, v: int, most: int) -> set[int] | Through:
        """Groups before `v` that `u` reaches, or why joining the two is not possible."""
        end = self.place[v]
        window = (end - self.place[u]) // GAP
        if window > most:
            return Through(window=window)
        seen: set[int] = set()
        succ, place = self.succ, self.place
        stack = [w for w in succ[u] if w != v and place[w] < end]
        while stack:
            w = stack.pop()
            if w in seen:
                continue
            seen.add(w)
            for x in succ[w]:
                if x == v:
                    return Through(w)
                if place[x] < end and x not in seen:
                    stack.append(x)
        return seen

    def between(self, inside: Collection[int], most: int) -> Through | None:
        """A group on a path that leaves `inside` and comes back; of several the first in the order."""
        end = max(self.place[o] for o in inside)
        window = (end - min(self.place[o] for o in inside)) // GAP
        if window > most:
            return Through(window=window)
        seen: set[int] = set()
        stack = [w for o in inside for w in self.succ[o] if w not in inside and self.place[w] < end]
        while stack:
            w = stack.pop()
            if w not in seen:
                seen.add(w)
                stack.extend(x for x in self.succ[w] if x not in inside and self.place[x] < end)
        back = [w for w in seen if not self.succ[w].isdisjoint(inside)]
        return Through(min(back, key=self.place.__getitem__)) if back else None

    def merge(self, u: int, v: int, reached: Collection[int]) -> None:
        """`v` becomes part of `u`, which stands before it; `reached` is what `reach` found."""
        self._reorder(u, v, reached)
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

    def split(self, b: int, parts: Sequence[tuple[int, set[int], set[int]]]) -> None:
        """Replace `b` by parts in order: (id, groups it reads, groups that read it); the first keeps the id `b`."""
        for w in self.succ.pop(b):
            self.pred[w].discard(b)
        for w in self.pred.pop(b):
            self.succ[w].discard(b)
        for part, _, _ in parts:
            self.succ[part], self.pred[part] = set(), set()
        for part, before, after in parts:
            for w in after - {part}:
                self.succ[part].add(w)
                self.pred[w].add(part)
            for w in before - {part}:
                self.pred[part].add(w)
                self.succ[w].add(part)
        self._divide([part for part, _, _ in parts])

    def _reaching(self, v: int, start: int) -> set[int]:
        """Groups placed after `start` that reach `v`."""
        seen: set[int] = set()
        stack = [w for w in self.pred[v] if self.place[w] > start]
        while stack:
            w = stack.pop()
            if w not in seen:
                seen.add(w)
                stack.extend(x for x in self.pred[w] if self.place[x] > start)
        return seen

    def _reorder(self, u: int, v: int, reached: Collection[int]) -> None:
        """Give u, which is about to contain v, a place after all that reaches v and before all that u reaches.

        Only those move, among the places they have: the others are neither before nor after any of them.
        """
        place = self.place
        if reached:
            before = self.sorted(self._reaching(v, place[u]))
            after = self.sorted(reached)
            free = sorted(place[w] for w in (u, v, *before, *after))
            for w, at in zip((*before, u, *after), free, strict=False):
                place[w] = at
        else:
            place[u] = place[v]
        del place[v]

    def _divide(self, parts: list[int]) -> None:
        """Places for the parts of what stood where the first one stands."""
        start = self.place[parts[0]]
        if self.width.get(start, GAP) < len(parts):
            self.renumber()
            start = self.place[parts[0]]
        step = self.width.get(start, GAP) // len(parts)
        for k, part in enumerate(parts):
            self.place[part] = start + k * step
            self.width[start + k * step] = step


def quotient_order(succ: Sequence[Sequence[int]], owner: Sequence[int]) -> list[int]:
    """Owners in a topological order of the quotient graph; among ready ones the one with the earliest last item."""
    last: dict[int, int] = {}
    for i, o in enumerate(owner):
        last[o] = i
    missing = dict.fromkeys(last, 0)
    after: dict[int, list[int]] = {o: [] for o in last}
    for u, out in enumerate(succ):
        for v in out:
            if owner[u] != owner[v]:
                after[owner[u]].append(owner[v])
                missing[owner[v]] += 1
    ready = [(last[o], o) for o, m in missing.items() if m == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, o = heapq.heappop(ready)
        order.append(o)
        for v in after[o]:
            missing[v] -= 1
            if missing[v] == 0:
                heapq.heappush(ready, (last[v], v))
    assert len(order) == len(last), "the quotient graph has a cycle"
    return order
