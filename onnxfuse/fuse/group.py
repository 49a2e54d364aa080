"""Stage A: TVM's post-dominator grouping, near-linear.  Integers and lists only; no Computes, no recursion.

A node may join its immediate post-dominator P together with everything between (the region) when

    rule 1  it is an anchor: every edge on the way is elemwise and the region and P are at most broadcast   (phase 0)
    rule 2  it is elemwise or broadcast: no edge is harder than reduce, the region is at most injective and P is not
            opaque; so pointwise code flows into a reduction or an anchor's epilogue          (phases 0 and 1)
    rule 3  it is injective: region and P are at most injective                                            (phase 1)

A reduction never starts; an opaque node never takes part. A group keeps the kind of its last node, except that an
anchor hands its kind on. Every group has one exit, so the groups form a DAG without any cycle test (FUSION.md 1.5).

Against the literal algorithm (tests/fuse/oracle.py) three static facts of the tree save the walks: the longest path
alone may exceed the cap, and a reduce, anchor or opaque node in the region can never become joinable.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onnxfuse.fuse.dominators import PostDominators

ELEMWISE, BROADCAST, INJECTIVE, REDUCE, ANCHOR, OPAQUE = 0, 1, 2, 3, 4, 8
RECOMPUTE = 5  # edge label only (facts.py): fusing over it would repeat expensive work

# Codes of one node's last attempt (stable API); "" = never considered.
FUSED = "FUSED"
NF_A_OPAQUE = "NF_A_OPAQUE"
NF_A_OUTPUT = "NF_A_OUTPUT"
NF_A_NO_POSTDOM = "NF_A_NO_POSTDOM"
NF_A_EDGE_KIND = "NF_A_EDGE_KIND"
NF_A_PATH_KIND = "NF_A_PATH_KIND"
NF_A_SINK_KIND = "NF_A_SINK_KIND"
NF_A_DEPTH = "NF_A_DEPTH"
NF_A_REDUCE_NO_START = "NF_A_REDUCE_NO_START"
NF_A_PHASE = "NF_A_PHASE"
NF_RECOMPUTE = "NF_RECOMPUTE"
NF_IO_CAP = "NF_IO_CAP"


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """Result of stage A. `root[v]` is the last node of v's group; per node the code of its attempt and two facts.

    `fact` depends on the code: the phase (FUSED), the kind met (EDGE_KIND, PATH_KIND, SINK_KIND), the number of
    nodes (DEPTH) or of inputs (IO_CAP). `blocker` is the node with that kind (PATH_KIND), else -1.
    """

    root: list[int]
    code: list[str]
    fact: list[int]
    blocker: list[int]


class Inputs:
    """Values that groups read from outside, while groups grow; a group has one exit, so it writes one value.

    A value made by a node has the number of that node, any other a number of its own beyond all nodes.
    """

    def __init__(self, reads: Sequence[Collection[int]], most: int) -> None:
        self.reads = list(map(frozenset, reads))
        self.makes: list[set[int]] = [{v} for v in range(len(reads))]
        self.most = most

    def join(self, groups: Collection[int], root: int) -> int:
        """Join groups to `root`: 0; or their number of inputs, if it is above the limit and above that of each."""
        if sum(len(self.reads[g]) for g in groups) > self.most:
            made = frozenset().union(*(self.makes[g] for g in groups))
            inputs = len(frozenset().union(*(self.reads[g] for g in groups)) - made)
            if inputs > self.most and inputs > max(len(self.reads[g]) for g in groups):
                return inputs
        large = max(groups, key=lambda g: len(self.makes[g]))
        makes, reads = self.makes[large], self.reads[root]
        for g in groups:
            reads = reads | self.reads[g]
            if g != large:
                makes |= self.makes[g]
        self.makes[root], self.reads[root] = makes, reads - makes
        return 0


def grow(
    kind: Sequence[int],
    succ: Sequence[Sequence[int]],
    extern: Sequence[bool],
    tree: PostDominators,
    cap: int,
    anchor_bonus: int = 0,
    to_the_exit: bool = False,
    inputs: Inputs | None = None,
) -> Growth:
    """Both sweeps.

    Args:
        kind: Level of every node.
        succ: Consumers of every node.
        extern: Nodes whose value must exist.
        tree: Their post-dominators.
        cap: Largest number of nodes of a group.
        anchor_bonus: That many more if an anchor is in it.
        to_the_exit: An anchor may only join a group whose exit is an elemwise image of P (TVM looks at P alone, but
            P may have been swallowed before, with a transpose or an outer sum behind it).
        inputs: What the nodes read, and how many values a group may read; None: any number.
    """
    n = len(kind)
    uf = list(range(n))
    own = list(kind)  # kind of the group record of a node; its root's entry is the group's kind
    count = [1] * n
    anchored = [k == ANCHOR for k in kind]
    stamp = [0] * n
    clock = 0
    code, fact, blocker = [""] * n, [0] * n, [-1] * n
    parent, edge, region, longest = tree.parent, tree.edge, tree.region, tree.longest

    def find(v: int) -> int:
        while uf[v] != v:
            uf[v] = uf[uf[v]]
            v = uf[v]
        return v

    for phase in (0, 1):
        for v in range(n):
            if code[v] == FUSED:
                continue
            k, p = own[v], parent[v]
            if p == n:
                if succ[v]:
                    code[v] = NF_A_OPAQUE if k == OPAQUE else NF_A_OUTPUT if extern[v] else NF_A_NO_POSTDOM
                continue
            if k == OPAQUE or kind[p] == OPAQUE:
                code[v] = NF_A_OPAQUE
                continue
            if k == REDUCE:
                code[v] = NF_A_REDUCE_NO_START
                continue
            if phase == 0 and k == INJECTIVE:
                code[v] = NF_A_PHASE
                continue
            if phase == 1 and k == ANCHOR:
                continue  # its verdict of phase 0 stands
            hardest = edge[v]
            if hardest == RECOMPUTE:
                code[v] = NF_RECOMPUTE
                continue
            if hardest > ELEMWISE if k == ANCHOR else k <= BROADCAST and hardest > REDUCE:
                code[v], fact[v] = NF_A_EDGE_KIND, hardest
                continue
            root = find(p)
            if find(v) == root:
                code[v], fact[v] = FUSED, phase  # swallowed with an earlier region
                continue
            limit = cap + anchor_bonus if k == ANCHOR or anchored[root] else cap
            if longest[v] - longest[p] + 1 > limit:
                code[v], fact[v] = NF_A_DEPTH, longest[v] - longest[p] + 1
                continue
            inner = BROADCAST if k == ANCHOR else INJECTIVE
            if region[v] > INJECTIVE:
                code[v], fact[v], blocker[v] = NF_A_PATH_KIND, region[v], -1
                continue
            if to_the_exit and k == ANCHOR and p != root:
                u = p
                while u != root and edge[u] == ELEMWISE:
                    u = parent[u]
                if u != root:
                    code[v], fact[v], blocker[v] = NF_A_PATH_KIND, edge[u], u
                    continue
            sink = own[root]
            if sink > (ANCHOR if k <= BROADCAST else inner):
                code[v], fact[v] = NF_A_SINK_KIND, sink
                continue

            # Only now walk the region: current kinds and sizes of the groups in it.
            clock += 1
            total = count[root] + count[v]
            between: list[int] = []
            stack = [v]
            refused = total > limit
            while stack and not refused:
                for c in succ[stack.pop()]:
                    if c == p or stamp[c] == clock:
                        continue
                    stamp[c] = clock
                    total += count[c]
                    met = own[find(c)]
                    if total > limit:
                        refused = True
                        break
                    if met > inner:
                        code[v], fact[v], blocker[v] = NF_A_PATH_KIND, met, c
                        refused = True
                        break
                    between.append(c)
                    stack.append(c)
            if refused:
                if total > limit:
                    code[v], fact[v] = NF_A_DEPTH, total
                continue

            between.append(v)
            if inputs is not None:
                many = inputs.join({root, *map(find, between)}, root)
                if many:
                    code[v], fact[v] = NF_IO_CAP, many
                    continue
            for u in between:
                child = find(u)
                if child == root:
                    continue
                uf[child] = root
                count[root] += count[child]
                if anchored[child]:
                    anchored[root] = True
                    own[root] = max(own[root], own[child])
            code[v], fact[v], blocker[v] = FUSED, phase, -1
    return Growth([find(v) for v in range(n)], code, fact, blocker)
