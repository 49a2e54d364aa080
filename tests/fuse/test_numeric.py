"""Fused kernels compute what the loops mean: random graphs, every mode, kernel by kernel in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.config import FusionConfig, FusionMode
from tests.fuse.dsl import FULL
from tests.fuse.numeric import expected, feeds, run_partition
from tests.fuse.random_loops import random_loops


def check(seed: int, n: int, config: FusionConfig) -> None:
    loops = random_loops(seed, n)
    given_ = feeds(loops, seed % 1000)
    with np.errstate(all="ignore"):
        want = expected(loops, given_)
        got, split = run_partition(loops, config, given_)
    assert split == [], "kernelize had to split a group the fusion formed"
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-4, equal_nan=True, err_msg=name)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_full_mode_computes_the_same(seed: int, n: int) -> None:
    check(seed, n, FULL)


@pytest.mark.parametrize("mode", [FusionMode.NONE, FusionMode.TVM, FusionMode.CANFUSE])
def test_every_mode_computes_the_same(mode: FusionMode) -> None:
    for seed in range(12):
        check(seed, 5 + 2 * seed, FusionConfig(mode=mode))


@pytest.mark.slow
def test_many_graphs_compute_the_same() -> None:
    for seed in range(3000):
        check(seed, 1 + seed % 40, FULL)
