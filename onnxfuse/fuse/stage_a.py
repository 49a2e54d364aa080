"""Stage A of a loop graph, and the record of every attempt."""

from __future__ import annotations

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse.dominators import PostDominators, post_dominators
from onnxfuse.fuse.facts import Facts
from onnxfuse.fuse.group import (
    FUSED,
    NF_A_DEPTH,
    NF_A_EDGE_KIND,
    NF_A_PATH_KIND,
    NF_A_SINK_KIND,
    NF_IO_CAP,
    Growth,
    Inputs,
    grow,
)
from onnxfuse.ir.op import Kind
from onnxfuse.ir.partition import Decision, Number, Relation, Verdict

# Stage A joined the pair, stage B split it again so that the producer's side could join its rows.
NF_PEELED = "NF_PEELED"
KIND_OF_LEVEL = {k.level: k for k in Kind}


def stage_a(known: Facts, config: FusionConfig) -> tuple[Growth, PostDominators]:
    """Post-dominator grouping: `Growth.root` is the group of every item (an id shared by its members)."""
    tree = post_dominators(known.kind, known.succ, known.label, known.extern)
    cap, bonus = _cap(config)
    if NF_A_DEPTH in config.skip:
        cap = len(known.items) + 1
    ours = config.mode is not FusionMode.TVM
    inputs = Inputs(known.inputs, config.max_inputs) if ours and NF_IO_CAP not in config.skip else None
    return grow(known.kind, known.succ, known.extern, tree, cap, bonus, ours, inputs), tree


def _cap(config: FusionConfig) -> tuple[int, int]:
    """Largest number of nodes in a group, and how many more if there is an anchor."""
    return (config.max_nodes_tvm, 0) if config.mode is FusionMode.TVM else (config.max_nodes, 1)


def records(
    known: Facts, growth: Growth, tree: PostDominators, owner: list[int], config: FusionConfig
) -> tuple[Decision, ...]:
    """What became of stage A's attempt to join every node with its post-dominator."""
    considered = (v for v in range(len(known.items)) if growth.code[v])
    return tuple(_record(known, growth, tree.parent[v], v, owner, config) for v in considered)


def _record(known: Facts, growth: Growth, parent: int, v: int, owner: list[int], config: FusionConfig) -> Decision:
    """The attempt of v (at its first consumer, if it has no post-dominator)."""
    code, fact = growth.code[v], growth.fact[v]
    target = parent if parent < len(known.items) else known.succ[v][0]
    numbers: tuple[tuple[str, Number], ...] = ()
    if code == FUSED and owner[v] != owner[target]:
        code, numbers = NF_PEELED, (("phase", fact),)
    elif code == FUSED:
        numbers = (("phase", fact),)
    elif code == NF_A_DEPTH:
        numbers = (("nodes", fact), ("cap", _cap(config)[0]))
    elif code == NF_IO_CAP:
        numbers = (("inputs", fact), ("cap", config.max_inputs))
    elif code in (NF_A_EDGE_KIND, NF_A_SINK_KIND, NF_A_PATH_KIND):
        numbers = (("kind", str(KIND_OF_LEVEL[fact])),)
        if growth.blocker[v] >= 0:
            numbers = (*numbers, ("node", known.name(growth.blocker[v])))
    verdict = Verdict.FUSED if code == FUSED else Verdict.REFUSED
    return Decision("A", known.name(v), known.name(target), Relation.VERTICAL, verdict, code, numbers)
