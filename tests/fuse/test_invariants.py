"""The 19 invariants of FUSION.md 4.G, by number; `INVARIANTS` says where each one is tested.

Here: properties of partitions of random loop graphs (random_loops.py: mixed kinds, skips, several uses, outputs in the
middle, duplicates, dead nodes, dynamic dims), for every mode.
"""

from __future__ import annotations

import importlib

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.kinds import kinds
from onnxfuse.analysis.rows import RowMap, rows
from onnxfuse.analysis.traffic import traffic
from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import fuse, stages_b_and_c
from onnxfuse.fuse.facts import facts
from onnxfuse.fuse.merge import Merger
from onnxfuse.fuse.order import quotient_order
from onnxfuse.fuse.rules import RULES
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, LoopGraph, Opaque, results
from onnxfuse.ir.op import Kind
from onnxfuse.ir.partition import Group, Partition, Verdict
from tests.fuse.brute import crossings
from tests.fuse.dsl import EDGES, FULL, Build, names
from tests.fuse.random_loops import random_loops

INVARIANTS: dict[int, tuple[str, str]] = {  # number -> (module, test)
    1: ("fuse.test_invariants", "test_a_partition_of_the_live_computes_in_executable_order"),
    2: ("fuse.test_invariants", "test_groups_are_convex_and_do_not_need_each_other"),
    3: ("fuse.test_invariants", "test_groups_are_convex_and_do_not_need_each_other"),
    4: ("fuse.test_invariants", "test_groups_are_within_the_caps"),
    5: ("fuse.test_invariants", "test_a_partition_of_the_live_computes_in_executable_order"),
    6: ("fuse.test_invariants", "test_groups_of_stage_a_have_one_exit_and_few_inputs"),
    7: ("fuse.test_invariants", "test_groups_are_within_the_caps"),
    8: ("fuse.test_invariants", "test_every_output_is_written_by_one_group_under_its_name"),
    9: ("fuse.test_group", "test_equal_to_the_literal_algorithm"),
    10: ("fuse.test_invariants", "test_without_rounds_stage_b_changes_nothing"),
    11: ("fuse.test_invariants", "test_same_input_same_partition_and_records"),
    12: ("fuse.test_invariants", "test_fusing_again_changes_nothing"),
    13: ("fuse.test_numeric", "test_full_mode_computes_the_same"),
    14: ("fuse.test_invariants", "test_fusing_never_moves_more_bytes"),
    15: ("fuse.test_evaluate", "test_random_graphs"),
    16: ("fuse.test_group", "test_a_higher_cap_never_cuts_a_chain_more"),
    17: ("analysis.test_spellings", "test_every_spelling_has_the_canonical_form_of_matmul"),
    18: ("analysis.test_maps", "test_reshape_index_is_numpy_reshape"),
    19: ("fuse.test_scaling", "test_twice_the_nodes_are_twice_the_calls"),  # seconds: tools/scaling.py
}

MODES = [FusionConfig(mode=m) for m in FusionMode] + [EDGES, FusionConfig(max_nodes=5, max_outputs=2, max_reduces=2)]
GRAPHS = st.builds(random_loops, st.integers(0, 2**32), st.integers(1, 40))


def bytes_of(p: Partition) -> int:
    return sum(traffic(g.members, g.reads, g.writes, {"N": 3}).bytes for g in p.groups)


def live(loops: LoopGraph) -> set[Compute]:
    wanted, out = set(loops.outputs), set()
    for item in reversed(loops.items):
        if isinstance(item, Opaque) or item.out in wanted:
            wanted.update(item.reads)
            out |= {item} if isinstance(item, Compute) else set()
    return out


@settings(max_examples=120, deadline=None)
@given(GRAPHS, st.sampled_from(MODES))
def test_a_partition_of_the_live_computes_in_executable_order(loops: LoopGraph, config: FusionConfig) -> None:
    p = fuse(loops, config)
    members = [c for g in p.groups for c in g.members]
    assert len(members) == len(set(members))
    assert set(members) == live(loops)
    assert list(p.left) == [i for i in loops.items if isinstance(i, Opaque)]

    # Groups and nodes that stay can be ordered so that everything is made before it is read, groups in given order.
    known = set(loops.inputs)
    todo: list[Group | Opaque] = [*p.groups]
    waiting = list(p.left)
    while todo or waiting:
        ready = [o for o in waiting if all(v in known for v in o.reads)]
        for o in ready:
            known.update(results(o))
        waiting = [o for o in waiting if o not in ready]
        if todo and all(v in known for v in todo[0].reads):
            known.update(todo.pop(0).writes)
        else:
            assert ready, "not executable"
    assert set(loops.outputs) <= known


def test_every_invariant_has_its_test() -> None:
    assert list(INVARIANTS) == list(range(1, 20))
    for module, name in INVARIANTS.values():
        assert callable(getattr(importlib.import_module(f"tests.{module}"), name))


@settings(max_examples=100, deadline=None)
@given(GRAPHS, st.sampled_from(MODES))
def test_groups_are_convex_and_do_not_need_each_other(loops: LoopGraph, config: FusionConfig) -> None:
    p = fuse(loops, config)
    home: dict[Value, int] = {c.out: g.id for g in p.groups for c in g.members}
    home |= {v: -1 - n for n, o in enumerate(p.left) for v in results(o)}
    left: dict[Value, set[int]] = {}  # groups that have been left on any way to a value
    for item in p.loops.items:
        for made in results(item):
            before = {home[v] for v in item.reads if v in home} | {g for v in item.reads for g in left.get(v, ())}
            stayed = {home[made]} if all(home[made] not in left.get(v, ()) for v in item.reads) else set()
            left[made] = before - stayed
            assert home[made] not in left[made], "a path leaves the group and comes back"


@settings(max_examples=100, deadline=None)
@given(GRAPHS, st.sampled_from([EDGES, FusionConfig(mode=FusionMode.TVM), FusionConfig(rounds=0, max_inputs=3)]))
def test_groups_of_stage_a_have_one_exit_and_few_inputs(loops: LoopGraph, config: FusionConfig) -> None:
    for g in fuse(loops, config).groups:
        assert g.writes == (g.members[-1].out,)
        most = max(len({ld.source for ld in c.loads}) for c in g.members)
        assert config.mode is FusionMode.TVM or len(g.reads) <= max(config.max_inputs, most)


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.sampled_from(MODES))
def test_every_output_is_written_by_one_group_under_its_name(loops: LoopGraph, config: FusionConfig) -> None:
    p = fuse(loops, config)
    assert p.loops.outputs == loops.outputs
    written = [v for g in p.groups for v in g.writes] + [v for o in p.left for v in results(o)]
    assert len(written) == len(set(written))
    assert set(loops.outputs) <= set(written) | set(loops.inputs)


@settings(max_examples=100, deadline=None)
@given(GRAPHS, st.sampled_from([FULL, FusionConfig(mode=FusionMode.CANFUSE)]))
def test_fusing_again_changes_nothing(loops: LoopGraph, config: FusionConfig) -> None:
    """Stages B and C, started from the groups they made."""
    first = fuse(loops, config)
    known = facts(loops, config)
    group = {c.out: g.id for g in first.groups for c in g.members}
    owner = [group[item.out] if isinstance(item, Compute) else len(group) + i for i, item in enumerate(known.items)]
    again = Merger(known, owner, quotient_order(known.succ, owner), config, loops.consts.keys())
    stages_b_and_c(again)
    assert again.home == owner


@settings(max_examples=120, deadline=None)
@given(GRAPHS, st.sampled_from(MODES))
def test_groups_are_within_the_caps(loops: LoopGraph, config: FusionConfig) -> None:
    stage_a = {
        g.members for g in fuse(loops, FusionConfig(mode=config.mode, max_nodes=config.max_nodes, rounds=0)).groups
    }
    for g in fuse(loops, config).groups:
        anchors = [c for c in g.members if kinds(c).node is Kind.ANCHOR]
        assert len(anchors) <= 1
        assert g.anchor is (anchors[0] if anchors else None)
        assert g.kind.level == max(kinds(c).node.level for c in g.members)
        if config.mode in (FusionMode.CANFUSE, FusionMode.FULL):
            assert len(g.members) <= config.max_nodes + len(anchors)
        if g.members not in stage_a:
            assert sum(c.reduce is not None for c in g.members) <= max(config.max_reduces, 1)


@settings(max_examples=200, deadline=None)
@given(GRAPHS)
def test_what_stage_b_forms_is_a_row_program(loops: LoopGraph) -> None:
    stage_a = {g.members for g in fuse(loops, EDGES).groups}
    for g in fuse(loops, FULL).groups:
        if g.members in stage_a or len(g.members) == 1 or g.anchor is not None:
            continue
        found = rows(g.members, g.writes)
        if not isinstance(found, RowMap):
            assert any(set(g.members) <= set(a) for a in stage_a), (found, g.members)  # a peeled part of a group
            continue
        assert not found.inline & set(g.writes)
        assert crossings(list(g.members), found) == []


@settings(max_examples=80, deadline=None)
@given(GRAPHS)
def test_fusing_never_moves_more_bytes(loops: LoopGraph) -> None:
    none = bytes_of(fuse(loops, FusionConfig(mode=FusionMode.NONE)))
    assert bytes_of(fuse(loops, FULL)) <= none
    assert bytes_of(fuse(loops, EDGES)) <= none


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.sampled_from(MODES))
def test_same_input_same_partition_and_records(loops: LoopGraph, config: FusionConfig) -> None:
    first, second = fuse(loops, config), fuse(loops, config)
    assert names(first) == names(second)
    assert first.decisions == second.decisions


@settings(max_examples=60, deadline=None)
@given(GRAPHS)
def test_without_rounds_stage_b_changes_nothing(loops: LoopGraph) -> None:
    full, canfuse = FusionConfig(rounds=0), FusionConfig(mode=FusionMode.CANFUSE, rounds=0)
    assert names(fuse(loops, full)) == names(fuse(loops, canfuse))
    impossible = FusionConfig(min_saved_bytes=1 << 60)
    assert names(fuse(loops, impossible)) == names(fuse(loops, full))


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.sampled_from(MODES))
def test_a_pair_has_one_record_per_stage_and_it_is_true(loops: LoopGraph, config: FusionConfig) -> None:
    p = fuse(loops, config)
    home = {c.out.name: g.id for g in p.groups for c in g.members}
    keys = [(d.stage, d.a, d.b) for d in p.decisions]
    assert len(keys) == len(set(keys))
    for d in p.decisions:
        together = d.a in home and d.b in home and home[d.a] == home[d.b]
        if d.verdict is Verdict.FUSED:
            assert together, d
        elif d.stage == "B":
            assert not together, d


def test_rule_codes_are_documented_and_a_switched_off_cap_is_off() -> None:
    assert all(rule.codes and rule.check.__doc__ for rule in RULES)
    g = Build()
    x = g.input("x")
    for i in range(8):
        x = g.E(f"e{i}", x)
    loops = g.outputs(x)
    capped = FusionConfig(max_nodes=4, skip=frozenset({"NF_A_DEPTH"}))
    assert names(fuse(loops, capped)) == "+".join(f"e{i}" for i in range(8))


def test_captured_values_and_values_read_by_nodes_that_stay_are_written() -> None:
    g = Build()
    a = g.E("a", g.input("x"))
    b = g.E("b", a)
    c = g.E("c", b)
    stay = g.O("stay", a, captures=(b,))
    p = fuse(g.outputs(c, stay), FULL)
    assert {v.name for group in p.groups for v in group.writes} >= {"a", "b", "c"}


def test_a_dead_compute_is_in_no_group() -> None:
    g = Build()
    a = g.E("a", g.input("x"))
    g.E("dead", a)
    p = fuse(g.outputs(g.E("b", a)), FULL)
    assert names(p) == "a+b"
