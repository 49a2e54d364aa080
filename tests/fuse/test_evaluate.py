"""Every recorded decision can be judged again, from the final groups alone, and the answer is the same."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import Judge, evaluate, fuse
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.ir.partition import Verdict
from tests.fuse.dsl import FULL
from tests.fuse.graphs import SHAPES
from tests.fuse.random_loops import random_loops
from tests.fuse.test_products import encoder
from tests.fuse.test_rowblocks import tail
from tests.templates.attentions import attention, fused
from tests.templates.test_several import projections

TIGHT = FusionConfig(max_nodes=4, max_outputs=2, max_inputs=3, max_reduces=1, max_sibling_nodes=3, span=2)
SMALL = FusionConfig(min_saved_bytes=1 << 15, local_budget=16, cycle_window=3, peak_memory=64, rounds=1)
CONFIGS = [*(FusionConfig(mode=m) for m in FusionMode), TIGHT, SMALL]
GRAPHS = st.builds(random_loops, st.integers(0, 2**32), st.integers(1, 60))


def differences(loops: LoopGraph, config: FusionConfig) -> list[str]:
    made = fuse(loops, config)
    again = {(d.stage, d.a, d.b): d for d in evaluate(made, config)}
    assert again.keys() == {(d.stage, d.a, d.b) for d in made.decisions}
    return [f"{d}  <>  {e}" for d in made.decisions if d != (e := again[d.stage, d.a, d.b])]


@settings(max_examples=150, deadline=None)
@given(GRAPHS, st.sampled_from(CONFIGS))
def test_random_graphs(loops: LoopGraph, config: FusionConfig) -> None:
    assert differences(loops, config) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_large_shapes(shape: str) -> None:
    assert differences(SHAPES[shape](200), FULL) == []


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.sampled_from(CONFIGS), st.randoms(use_true_random=False))
def test_any_two_values_have_exactly_one_answer(loops: LoopGraph, config: FusionConfig, random: Random) -> None:
    """A pair without a record is judged by the same rules: together, or apart for one reason."""
    made = fuse(loops, config)
    judge = Judge(made, config)
    home = {c.out.name: g.id for g in made.groups for c in g.members}
    recorded = {(d.a, d.b): d for d in made.decisions if d.stage == "B"}
    for _ in range(30):
        a, b = random.choices(list(judge.item), k=2)
        said = judge.pair(a, b)
        together = a == b or (a in home and home[a] == home.get(b))
        assert said.verdict is (Verdict.FUSED if together else Verdict.REFUSED), said
    for (a, b), d in recorded.items():
        if d.verdict is Verdict.REFUSED:
            assert judge.pair(a, b) == d


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.sampled_from(CONFIGS))
def test_every_value_between_two_groups_has_the_reason_why(loops: LoopGraph, config: FusionConfig) -> None:
    made = fuse(loops, config)
    home = {v: g.id for g in made.groups for v in g.writes}
    expected = {(v.name, g.id) for g in made.groups for v in g.reads if v in home}
    inside = {c.out.name: g.id for g in made.groups for c in g.members}
    found = list(Judge(made, config).borders())
    assert {(b.value.name, inside[b.reader]) for b in found} == expected
    assert len(found) == len(expected)
    assert all(b.decision.verdict is Verdict.REFUSED for b in found)
    if config.mode is FusionMode.NONE:
        assert {b.decision.code for b in found} <= {"NF_MODE"}


MODELS = {
    "encoder": encoder(),
    "narrow encoder": encoder(128),
    "projections": projections(),
    "attention": attention(flat=True, mask=["S", "S"]),
    "weights of attention needed": attention(weights_too=True),
    "row tail": tail(),
    "long row tail": tail(2048),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_products(name: str) -> None:
    """Row blocks and sibling products join after the rounds; what was refused before is judged again."""
    for config in (FULL, TIGHT):
        assert differences(fused(MODELS[name]).loops, config) == []


@settings(max_examples=100, deadline=None)
@given(GRAPHS)
def test_the_last_round_left_nothing_that_could_join(loops: LoopGraph) -> None:
    assert "NF_ROUNDS" not in {d.code for d in fuse(loops, FULL).decisions}
