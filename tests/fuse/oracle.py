"""TVM's grouping as written in FUSION.md 1.3 and 1.4: slow, literal, recursive-free only where Python needs it."""

from __future__ import annotations

from collections.abc import Sequence

E, B, I, R, C, O = 0, 1, 2, 3, 4, 8  # noqa: E741


class Record:
    def __init__(self, kind: int) -> None:
        self.parent: Record | None = None
        self.kind = kind
        self.anchor = kind == C
        self.num_nodes = 1

    def root(self) -> Record:
        at = self
        while at.parent is not None:
            at = at.parent
        return at


def merge(child: Record, target: Record) -> None:
    child, target = child.root(), target.root()
    if child is target:
        return
    target.num_nodes += child.num_nodes
    child.parent = target
    if child.anchor:
        assert not target.anchor
        assert child.kind <= B or target.kind <= B
        target.anchor = True
        target.kind = max(target.kind, child.kind)


def tree(
    kind: Sequence[int], succ: Sequence[Sequence[int]], label: Sequence[Sequence[int]], extern: Sequence[bool]
) -> tuple[list[int | None], list[int]]:
    n = len(kind)
    parent: list[int | None] = [None] * n
    depth = [1] * n
    edge = [O] * n

    def lca(a: int | None, b: int | None, hard: int) -> tuple[int | None, int]:
        while a != b:
            if a is None or b is None:
                return None, hard
            if depth[a] < depth[b]:
                hard = max(hard, edge[b])
                b = parent[b]
            elif depth[b] < depth[a]:
                hard = max(hard, edge[a])
                a = parent[a]
            else:
                hard = max(hard, edge[a], edge[b])
                a, b = parent[a], parent[b]
        return a, hard

    for v in reversed(range(n)):
        if extern[v] or not succ[v]:
            continue
        hard = 0
        at: int | None = succ[v][0]
        for c, k in zip(succ[v], label[v], strict=True):
            hard = max(hard, k)
            at, hard = lca(at, c, hard)
        parent[v], edge[v] = at, hard
        depth[v] = 1 if at is None else depth[at] + 1
    return parent, edge


def oracle(
    kind: Sequence[int],
    succ: Sequence[Sequence[int]],
    label: Sequence[Sequence[int]],
    extern: Sequence[bool],
    cap: int,
    anchor_bonus: int = 0,
) -> list[int]:
    """For every node the smallest node of its group."""
    n = len(kind)
    parent, edge = tree(kind, succ, label, extern)
    groups = [Record(k) for k in kind]

    def region(src: int, sink: int) -> list[int]:
        seen: list[int] = []
        stack = [src]
        while stack:
            u = stack.pop()
            for c in succ[u]:
                if c != sink and c not in seen:
                    seen.append(c)
                    stack.append(c)
        return seen

    def check(src: int, sink: int, inner: int, at_sink: int) -> bool:
        return groups[sink].root().kind <= at_sink and all(groups[u].root().kind <= inner for u in region(src, sink))

    def commit(src: int, sink: int) -> None:
        for u in [src, *region(src, sink)]:
            merge(groups[u], groups[sink])

    for phase in (0, 1):
        for v in range(n):
            g, p = groups[v], parent[v]
            if g.kind == O or p is None:
                continue
            limit = cap + (anchor_bonus if g.kind == C or groups[p].root().anchor else 0)
            if groups[p].root().num_nodes + sum(groups[u].num_nodes for u in [v, *region(v, p)]) > limit:
                continue
            if g.root() is groups[p].root():
                continue
            if g.kind == C:
                if phase == 0 and edge[v] == E and check(v, p, B, B):
                    commit(v, p)
            elif g.kind <= B:
                if edge[v] <= R and check(v, p, I, C):
                    commit(v, p)
            elif g.kind == I and phase == 1 and check(v, p, I, I):
                commit(v, p)
    first: dict[int, int] = {}
    return [first.setdefault(id(groups[v].root()), v) for v in range(n)]
