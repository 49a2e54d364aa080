"""The work of the fusion grows with the graph and no faster: counted calls and bytes, never seconds."""

from __future__ import annotations

import cProfile
import tracemalloc

import pytest

from onnxfuse.analysis.maps import MOST_NODES
from onnxfuse.config import FusionConfig
from onnxfuse.fuse import fuse
from onnxfuse.ir.expr import walk
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.schedule.kernelize import kernelize
from tests.fuse.dsl import FULL, Build
from tests.fuse.graphs import SHAPES


def calls(loops: LoopGraph, config: FusionConfig = FULL) -> int:
    """Function calls of one fusion."""
    watch = cProfile.Profile()
    watch.enable()
    fuse(loops, config)
    watch.disable()
    return sum(entry.callcount for entry in watch.getstats())


def peak(loops: LoopGraph) -> int:
    tracemalloc.start()
    fuse(loops, FULL)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


# Calls a node may cost. Views behind row programs are tried in many combinations, siblings with eight neighbours.
MOST = dict.fromkeys(SHAPES, 700) | {"views": 7000, "fan": 1500}


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_nodes_are_twice_the_calls(shape: str) -> None:
    n = 100 if shape == "views" else 1000
    small, large = SHAPES[shape](n), SHAPES[shape](2 * n)
    grown = len(large.items) / len(small.items)
    count = calls(large)
    assert count < 1.5 * grown * calls(small)
    assert count < MOST[shape] * len(large.items)


@pytest.mark.parametrize("shape", ["chain", "skips", "mixed"])
def test_twice_the_nodes_take_twice_the_memory(shape: str) -> None:
    small, large = SHAPES[shape](1000), SHAPES[shape](2000)
    grown = len(large.items) / len(small.items)
    assert peak(large) < 1.25 * grown * peak(small)


@pytest.mark.parametrize("shape", ["chain", "skips"])
def test_ten_thousand_nodes_need_no_recursion(shape: str) -> None:
    loops = SHAPES[shape](10_000)
    p = fuse(loops, FULL)
    assert sum(len(g.members) for g in p.groups) == len(loops.items)


def test_a_value_joined_to_itself_again_and_again_is_not_written_out() -> None:
    g = Build((2,))
    v = g.E("v", g.input("x"))
    for k in range(24):
        v = g.concat(f"v{k}", v, g.E(f"w{k}", v))
    made = kernelize(fuse(g.outputs(v), FULL))
    said = [d for d in made.partition.decisions if d.code in ("NF_RECOMPUTE", "NF_ONE_KERNEL")]
    assert any("written out" in str(d) or "too large" in str(d) for d in said)
    assert not made.refused
    for kernel in made.kernels:
        assert sum(1 for _ in walk(*(r for s in kernel.stages for r in s.roots))) < MOST_NODES
