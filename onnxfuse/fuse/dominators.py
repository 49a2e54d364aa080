"""Post-dominator tree of a DAG, with path maxima.  Integers and lists only, no recursion, O((N + E) log N).

Nodes are 0 .. n-1 in topological order; node n is a super-sink above all exits, so `parent[v] == n` means that no
node post-dominates v (it is an output, it is dead, or its consumers end in different outputs).

Ancestor jumps are skew-binary (one jump per node instead of log N): a node jumps to its parent, or over two equal
jumps of its ancestors. Beside each jump stands the maximum over the nodes jumped over, which makes "the hardest edge
on any path from here to there" a query of O(log N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class PostDominators:
    """For every node v with parent p (its immediate post-dominator).

    edge     hardest edge label on any path from v to p
    region   hardest node kind strictly between v and p, on any path
    longest  number of edges of the longest path from v to an exit
    """

    parent: list[int]
    depth: list[int]
    edge: list[int]
    region: list[int]
    longest: list[int]


def post_dominators(
    kind: Sequence[int], succ: Sequence[Sequence[int]], label: Sequence[Sequence[int]], extern: Sequence[bool]
) -> PostDominators:
    """One reverse pass. `label[v][i]` belongs to the edge v -> succ[v][i]; `extern` nodes are exits."""
    n = len(kind)
    parent, depth, jump = [n] * (n + 1), [0] * (n + 1), [n] * (n + 1)
    edge, region, longest = [0] * (n + 1), [0] * (n + 1), [0] * (n + 1)
    jump_edge, jump_kind = [0] * (n + 1), [0] * (n + 1)  # maxima over [v, jump[v])
    weight = [0] * (n + 1)  # max(kind, region)

    for v in range(n - 1, -1, -1):
        out = succ[v]
        far = hardest = inner = 0
        p = n
        if out:
            hardest = max(label[v])
            far = 1 + max([longest[c] for c in out])
            if not extern[v]:
                p = out[0]
                for c in out:
                    if c != p:
                        p = _lca(p, c, parent, depth, jump)
                        if p == n:
                            break
                if p != n:
                    level = depth[p]
                    for c in out:
                        while c != p:
                            up = jump[c]
                            if depth[up] >= level:
                                hardest = max(hardest, jump_edge[c])
                                inner = max(inner, jump_kind[c])
                                c = up
                            else:
                                hardest = max(hardest, edge[c])
                                inner = max(inner, weight[c])
                                c = parent[c]
        parent[v], depth[v], longest[v], region[v], edge[v] = p, depth[p] + 1, far, inner, hardest
        w = weight[v] = max(kind[v], inner)
        first = jump[p]
        second = jump[first]
        if depth[p] - depth[first] == depth[first] - depth[second]:
            jump[v] = second
            jump_edge[v] = max(hardest, jump_edge[p], jump_edge[first])
            jump_kind[v] = max(w, jump_kind[p], jump_kind[first])
        else:
            jump[v], jump_edge[v], jump_kind[v] = p, hardest, w
    return PostDominators(parent[:n], depth[:n], edge[:n], region[:n], longest[:n])


def _lca(a: int, b: int, parent: list[int], depth: list[int], jump: list[int]) -> int:
    """Lowest common ancestor: lift the deeper node, then both together (equal depths have equal jump lengths)."""
    if depth[a] < depth[b]:
        a, b = b, a
    level = depth[b]
    while depth[a] > level:
        a = jump[a] if depth[jump[a]] >= level else parent[a]
    while a != b:
        if jump[a] != jump[b]:
            a, b = jump[a], jump[b]
        else:
            a, b = parent[a], parent[b]
    return a
