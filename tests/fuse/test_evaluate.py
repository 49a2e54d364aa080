"""Every recorded decision can be judged again, from the final groups alone, and the answer is the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import evaluate, fuse
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.ir.partition import Verdict
from tests.fuse.dsl import FULL
from tests.fuse.graphs import SHAPES
from tests.fuse.random_loops import random_loops

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
