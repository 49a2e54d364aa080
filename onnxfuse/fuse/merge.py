"""Clusters: the groups while stages B and C join and split them.

`Merger` holds which cluster every item is in, the quotient graph with its order (order.py), and what was said of every
considered pair. vertical.py joins along edges (stage B), horizontal.py joins siblings (stage C), rowblocks.py and
products.py what runs as several products; settle.py says what became of the pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from onnxfuse.analysis import traffic
from onnxfuse.analysis.footing import Footing
from onnxfuse.analysis.row_forms import RowForms
from onnxfuse.config import FusionConfig
from onnxfuse.errors import Refusal
from onnxfuse.fuse.facts import Facts
from onnxfuse.fuse.group import ANCHOR
from onnxfuse.fuse.order import Order, Through
from onnxfuse.fuse.rules import Cluster, No, Pair
from onnxfuse.ir.expr import Load
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, Opaque
from onnxfuse.ir.partition import Number, Verdict

FUSED = "FUSED"
NF_CYCLE = "NF_CYCLE"
NF_CYCLE_BUDGET = "NF_CYCLE_BUDGET"
Versions = tuple[int, int]


class Said(NamedTuple):
    """A decision, without the names of the two."""

    verdict: Verdict
    code: str
    numbers: tuple[tuple[str, Number], ...] = ()


class Merger:
    """Clusters and their order.

    grown    group of every item after stage A
    home     item -> cluster
    records  what was said of (value, item that reads it), and in sibling_records of two items of groups side by side;
             later words replace earlier ones
    """

    def __init__(
        self,
        known: Facts,
        owner: list[int],
        order: list[int],
        config: FusionConfig,
        consts: Collection[Value] = (),
        grown: list[int] | None = None,
    ) -> None:
        self.known = known
        self.config = config
        self.consts = consts
        self.grown = owner if grown is None else grown
        self.home = list(owner)
        self.order = Order(order, owner, known.succ)
        self.alias: dict[int, int] = {}  # a cluster that joined -> the one it is part of, perhaps joined as well
        self.clusters: dict[int, Cluster] = {}
        self.forms = RowForms(known.forms, self.loads)
        self.bytes: dict[Value, int] = {}
        self.splits = 0
        self.changes = 0
        self.records: dict[tuple[Value, int], Said] = {}
        self.sibling_records: dict[tuple[int, int], Said] = {}
        self.refused: dict[tuple[int, int], tuple[Versions, No]] = {}
        members: dict[int, list[int]] = {o: [] for o in order}
        for i, o in enumerate(owner):
            members[o].append(i)
        for o in order:
            self.clusters[o] = self.cluster(o, members[o])

    def find(self, cluster: int) -> int:
        """Present id of a cluster."""
        while (at := self.alias.get(cluster)) is not None:
            cluster = at
        return cluster

    def cluster(self, o: int, items: list[int]) -> Cluster:
        """These items as a cluster with id `o`."""
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

    def nbytes(self, v: Value) -> int:
        """Bytes of a value."""
        known = self.bytes.get(v)
        if known is None:
            known = self.bytes[v] = traffic.nbytes(v)
        return known

    def loads(self, c: Compute) -> list[Load]:
        """Loads of a Compute."""
        return self.known.loads[c.out]

    def computes(self, items: Iterable[int]) -> list[Compute]:
        """The Computes among items."""
        return [c for i in items if isinstance(c := self.known.items[i], Compute)]

    def leaves(self, v: Value, a: Cluster, b: Cluster) -> bool:
        """`v` is needed outside of both clusters."""
        if v in self.known.needed:
            return True
        home, one, two = self.home, a.id, b.id
        return any((at := home[r]) != one and at != two for r in self.known.readers.get(v, ()))

    def pair(self, a: int, b: int) -> Pair:
        """Two clusters of which the second reads the first."""
        ca, cb = self.clusters[a], self.clusters[b]
        both = ca.exits & cb.reads
        shared = tuple(both) if len(both) < 2 else tuple(sorted(both, key=self.known.producer.__getitem__))
        return Pair(
            ca,
            cb,
            self.config,
            self.computes,
            self.leaves,
            self.nbytes,
            self.loads,
            self.forms,
            shared,
        )

    def beside(self, a: int, b: int) -> Pair:
        """Two clusters neither of which reads the other, in their order."""
        pair = self.pair(a, b)
        pair.span = self.order.span(a, b)
        return pair

    def common(self, a: int, b: int) -> int:
        """Bytes of what both read from outside."""
        one, two = self.clusters[a].reads, self.clusters[b].reads
        return 0 if one.isdisjoint(two) else sum(map(self.nbytes, one & two))

    def versions(self, a: int, b: int) -> Versions:
        """Rises with every change of either."""
        return self.clusters[a].version, self.clusters[b].version

    def settled(self, a: int, b: int) -> bool:
        """Refused before, and neither has changed."""
        known = self.refused.get((a, b))
        return known is not None and known[0] == self.versions(a, b)

    def reach(self, u: int, v: int) -> set[int] | No:
        """Clusters before `v` that `u` reaches, or why joining is not possible."""
        found = self.order.reach(u, v, self.config.cycle_window)
        return self.cyclic(found) if isinstance(found, Through) else found

    def cyclic(self, found: Through) -> No:
        """The refusal because of a path between two clusters."""
        if found.window:
            return No(NF_CYCLE_BUDGET, (("window", found.window), ("most", self.config.cycle_window)))
        return No(NF_CYCLE, (("through", self.known.name(self.clusters[found.group].items[-1])),))

    def join(self, pair: Pair, reached: Collection[int]) -> None:
        """The second cluster (the consumer's) becomes part of the first."""
        a, b = pair.a, pair.b
        siblings = not pair.shared or a.siblings or b.siblings
        how = None if (a.flat and b.flat) or a.anchors or b.anchors or siblings else pair.footing
        self._merge(a, b, reached, set(pair.writes), siblings, how)

    def unite(self, ids: Iterable[int]) -> int:
        """Clusters that nothing outside of them stands between become one; returns its id."""
        rest = set(ids)
        u = min(rest, key=self.order.place.__getitem__)
        rest.discard(u)
        while rest:
            v = min(rest, key=self.order.place.__getitem__)
            rest.discard(v)
            reached = self.reach(u, v)
            assert not isinstance(reached, No), "there is something between"
            a, b = self.clusters[u], self.clusters[v]
            self._merge(a, b, reached, {x for x in (*a.exits, *b.exits) if self.leaves(x, a, b)}, True, None)
        return u

    def split(self, b: Cluster, head: Cluster, tails: list[list[int]]) -> None:
        """Replace cluster `b` by `head` (same id) followed by `tails`, in the graph and in the order."""
        fresh = []
        for items in tails:
            t = len(self.known.items) + self.splits
            self.splits += 1
            fresh.append(self.cluster(t, items))
            for i in items:
                self.home[i] = t
        parts = [head, *fresh]
        edges = []
        for part in parts:
            self.clusters[part.id] = part
            part.version = b.version + 1
            after = {self.home[c] for i in part.items for c in self.known.succ[i]}
            reads = (v for c in self.computes(part.items) for v in (*self.known.reads(c), *c.node.reads))
            made = map(self.known.producer.get, reads)
            edges.append((part.id, {self.home[p] for p in made if p is not None}, after))
        self.order.split(b.id, edges)
        self.changes += 1

    def _merge(
        self,
        a: Cluster,
        b: Cluster,
        reached: Collection[int],
        writes: set[Value],
        siblings: bool,
        how: Footing | Refusal | None,
    ) -> None:
        u, v = a.id, b.id
        self.order.merge(u, v, reached)
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
            None if a.plain is None or b.plain is None else a.plain | b.plain,
            siblings,
            how,
        )
        self.alias[v] = u
        for i in b.items:
            self.home[i] = u
        self.changes += 1
