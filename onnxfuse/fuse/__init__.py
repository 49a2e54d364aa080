"""Fusion: which Computes run together.  LoopGraph -> Partition.

    mode      stage A (group.py)          stages B and C (vertical.py, horizontal.py)
    none      -                           -                              every Compute alone
    tvm       node-kind edges, cap 256    -                              TVM's partition
    canfuse   per-edge kinds, cap 64/65   pairwise vertical growth, views behind a contraction as its order of storing
    full      per-edge kinds, cap 64/65   pairwise vertical growth, then siblings that read the same value,
                                          row blocks (rowblocks.py: attention), products of one value (products.py)

What holds afterwards: every live Compute is in exactly one group; the groups are in a topological order of the
quotient graph (which has no cycle, nodes that stay included); a group holds at most one anchor, except that
a row block may hold two products and products.py several; a value that is a
graph output, captured by a subgraph, or read outside of its group is in the group's `writes`. Dead Computes are in no
group. Every decision is a record with a stable code. Same input order, same result.

Add a condition: one function in rules.py, one place in RULES. Do not put op names here: index maps and kinds only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse.facts import Facts, facts
from onnxfuse.fuse.horizontal import join_siblings
from onnxfuse.fuse.judge import Judge, evaluate
from onnxfuse.fuse.merge import Merger
from onnxfuse.fuse.order import quotient_order
from onnxfuse.fuse.products import join_products
from onnxfuse.fuse.rowblocks import join_row_blocks
from onnxfuse.fuse.settle import settle
from onnxfuse.fuse.stage_a import records, stage_a
from onnxfuse.fuse.vertical import grow, place_views
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, LoopGraph, Opaque
from onnxfuse.ir.op import Kind
from onnxfuse.ir.partition import Decision, Group, Partition, make_group


def fuse(loops: LoopGraph, config: FusionConfig) -> Partition:
    """Group the Computes of `loops`."""
    with no_collector():
        return _fuse(loops, config)


@contextmanager
def no_collector() -> Iterator[None]:
    """Nothing here makes reference cycles; the collector would only walk over the whole model again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _fuse(loops: LoopGraph, config: FusionConfig) -> Partition:
    known = facts(loops, config)
    if config.mode is FusionMode.NONE:
        return partition(loops, known, list(range(len(known.items))), ())
    growth, tree = stage_a(known, config)
    owner = growth.root
    more: tuple[Decision, ...] = ()
    if config.mode is not FusionMode.TVM and config.rounds > 0:
        order = quotient_order(known.succ, owner)
        merger = Merger(known, owner, order, config, loops.consts.keys())
        stages_b_and_c(merger)
        owner, more = merger.home, settle(merger)
    return partition(loops, known, owner, records(known, growth, tree, owner, config) + more)


def stages_b_and_c(m: Merger) -> None:
    """Everything that joins stage A's groups; groups of several products last: nothing before has to know of them."""
    grow(m)
    if m.config.mode is FusionMode.FULL:
        join_siblings(m)
        join_row_blocks(m)
        join_products(m)
    place_views(m)


def partition(loops: LoopGraph, known: Facts, owner: list[int], decisions: tuple[Decision, ...]) -> Partition:
    """The Partition in which items with the same `owner` run together."""
    members: dict[int, list[int]] = {}
    for i, item in enumerate(known.items):
        if isinstance(item, Compute):
            members.setdefault(owner[i], []).append(i)
    live = set(known.needed)
    for v, readers in known.readers.items():
        home = owner[known.producer[v]]
        if any(owner[r] != home for r in readers):
            live.add(v)
    order = quotient_order(known.succ, owner)
    groups = tuple(_group(g, known, members[o], live) for g, o in enumerate(o for o in order if o in members))
    left = tuple(item for item in known.items if isinstance(item, Opaque))
    if len(known.items) < len(loops.items):  # an output of a node with several that nothing reads
        loops = replace(loops, items=known.items)
    return Partition(loops, groups, left, decisions)


def _group(gid: int, known: Facts, items: list[int], live: set[Value]) -> Group:
    members = tuple(c for i in items if isinstance(c := known.items[i], Compute))
    found = [k for i in items if (k := known.node[i]) is not None]
    anchor = next((c for c, k in zip(members, found, strict=True) if k is Kind.ANCHOR), None)
    return make_group(gid, members, max(found, key=lambda k: k.level), anchor, live, known.reads)


__all__ = ["Judge", "evaluate", "facts", "fuse", "no_collector", "partition", "stages_b_and_c"]
