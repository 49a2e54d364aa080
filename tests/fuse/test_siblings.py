"""Stage C: groups that read the same value and not each other share a kernel."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import fuse
from onnxfuse.ir.expr import sym, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.ir.partition import Decision, Relation, Verdict
from tests.fuse.dsl import FULL, Build, at, axes_for, names, split
from tests.fuse.numeric import expected, feeds, run_partition

CANFUSE = FusionConfig(mode=FusionMode.CANFUSE)


def moments(over: int = -1, shape: tuple[int, ...] = (4, 8)) -> LoopGraph:
    g = Build(shape)
    x = g.input("x")
    return g.outputs(g.R("sum", x, over=over), g.R("squares", g.pointwise("sq", "mul", x, x), over=over))


def range_of_rows() -> LoopGraph:
    g = Build((4, 8))
    x = g.input("x")
    high, low = g.R("max", x, op="max"), g.R("min", x, op="min")
    return g.outputs(high, low)


def gates() -> LoopGraph:
    g = Build((4, 8))
    x = g.input("x")
    return g.outputs(*(g.E(n, x, prim=p) for n, p in (("i", "exp"), ("f", "neg"), ("o", "tanh"))))


def biases() -> LoopGraph:
    """Q, K and V: one value, three biases."""
    g = Build((4, 8))
    x = g.input("x")
    return g.outputs(*(g.E(n, x, g.input(f"b{n}", (8,))) for n in "qkv"))


def point_and_row() -> LoopGraph:
    g = Build((4, 8))
    x = g.input("x")
    return g.outputs(g.E("y", x, prim="exp"), g.R("s", x))


TOGETHER = [
    (moments(), "sum+sq+squares"),
    (moments(over=0), "sum+sq+squares"),
    (moments(shape=(2, 3, 4)), "sum+sq+squares"),
    (range_of_rows(), "max+min"),
    (gates(), "i+f+o"),
    (biases(), "q+k+v"),
    (point_and_row(), "y+s"),
]


@pytest.mark.parametrize(("loops", "groups"), TOGETHER, ids=[g for _, g in TOGETHER])
def test_siblings_are_one_kernel_in_full_mode_only(loops: LoopGraph, groups: str) -> None:
    assert split(loops, FULL) == groups
    assert "|" in split(loops, CANFUSE)


@pytest.mark.parametrize(("loops", "groups"), TOGETHER, ids=[g for _, g in TOGETHER])
def test_the_joint_kernel_computes_the_same(loops: LoopGraph, groups: str) -> None:
    given = feeds(loops, 3)
    got, split_again = run_partition(loops, FULL, given)
    assert split_again == []
    for name, array in expected(loops, given).items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6)


def test_siblings_of_dynamic_size() -> None:
    g = Build((sym("N"), sym("M")))
    x = g.input("x")
    assert split(g.outputs(g.R("a", x), g.R("b", x, op="max")), FULL) == "a+b"


def test_equal_extents_are_not_equal_axes() -> None:
    g = Build((8, 8))
    loops = g.outputs(g.R("rows", g.input("x")), g.R("others", g.input("y")))
    assert split(loops, FULL) == "rows | others"
    assert fuse(loops, FULL).decisions == ()


def test_one_group_may_not_wait_for_the_other() -> None:
    g = Build((4, 8))
    x = g.input("x")
    a = g.R("a", x)
    loops = g.outputs(a, g.R("b", x, g.O("stay", a)))
    assert codes(loops)["a", "b"].code == "NF_CYCLE"


def codes(loops: LoopGraph, config: FusionConfig = FULL) -> dict[tuple[str, str], Decision]:
    return {(d.a, d.b): d for d in fuse(loops, config).decisions if d.stage == "C"}


def half(g: Build, x: Value) -> Value:
    axes = axes_for((4, 8))
    return g.add("half", axes, at(x, (var(axes[0]) + 4, var(axes[1]))))


def read_in_part() -> LoopGraph:
    g = Build((8, 8))
    x = g.input("x")
    return g.outputs(g.E("e", x), half(g, x))


def contraction() -> LoopGraph:
    g = Build()
    x = g.input("x")
    return g.outputs(g.C("mm", x), g.E("e", x))


def far_apart() -> LoopGraph:
    g = Build((4, 8))
    x, y = g.input("x"), g.input("y")
    a = g.R("a", x)
    between = [g.O(f"o{i}", y) for i in range(4)]
    return g.outputs(a, *between, g.R("b", x, op="max"))


def rows_and_columns() -> LoopGraph:
    g = Build((4, 8))
    x = g.input("x")
    return g.outputs(g.R("rows", x), g.R("columns", x, over=0))


def transposed() -> LoopGraph:
    g = Build((8, 8))
    x = g.input("x")
    return g.outputs(g.E("e", x), g.I("t", x))


def large() -> LoopGraph:
    g = Build((1, 100_000))
    x = g.input("x")
    return g.outputs(g.E("e", x), g.R("s", x))


# Graph, configuration that refuses, its code, and one just on the other side (None: no threshold).
LIMITS = [
    (gates, FusionConfig(max_sibling_nodes=1), "NF_NODE_CAP", FusionConfig(max_sibling_nodes=3)),
    (gates, FusionConfig(max_outputs=2), "NF_IO_CAP", FusionConfig(max_outputs=3)),
    (biases, FusionConfig(max_inputs=2), "NF_IO_CAP", FusionConfig(max_inputs=4)),
    (moments, FusionConfig(max_reduces=1), "NF_TOO_MANY_REDUCES", FusionConfig(max_reduces=2)),
    (far_apart, FusionConfig(span=4), "NF_SPAN", FusionConfig(span=5)),
    (gates, FusionConfig(peak_memory=255), "NF_PEAK_MEMORY", FusionConfig(peak_memory=384)),
    (gates, FusionConfig(keep=frozenset({"n_f"})), "NF_PINNED", None),
    (read_in_part, FULL, "NF_INDEX_MISMATCH", None),
    (contraction, FULL, "NF_KIND", None),
    (rows_and_columns, FULL, "NF_GROUP_MERGE", None),
    (transposed, FULL, "NF_VIEW_LEVEL", None),
    (large, FULL, "NF_COST", FusionConfig(skip=frozenset({"NF_COST"}))),
]


@pytest.mark.parametrize(("build", "config", "code", "beyond"), LIMITS, ids=[r[2] for r in LIMITS])
def test_a_rule_refuses_on_one_side_of_its_limit_only(build, config: FusionConfig, code: str, beyond) -> None:
    loops = build()
    refused = [d for d in codes(loops, config).values() if d.verdict is Verdict.REFUSED]
    assert {d.code for d in refused} == {code}
    assert all(d.relation is Relation.HORIZONTAL for d in refused)
    if beyond is not None:
        live = [g for g in fuse(loops, beyond).groups if len(g.members) > 1]
        assert len(live) == 1, names(fuse(loops, beyond))
        assert {d.verdict for d in codes(loops, beyond).values()} == {Verdict.FUSED}


@pytest.mark.parametrize("code", ["NF_NODE_CAP", "NF_IO_CAP", "NF_SPAN", "NF_PEAK_MEMORY", "NF_TOO_MANY_REDUCES"])
def test_every_limit_can_be_switched_off(code: str) -> None:
    tight = FusionConfig(max_sibling_nodes=1, max_outputs=1, span=0, peak_memory=0, max_reduces=1)
    rest = {"NF_NODE_CAP", "NF_IO_CAP", "NF_SPAN", "NF_PEAK_MEMORY", "NF_TOO_MANY_REDUCES"}
    loops = moments()
    met = {d.code for d in codes(loops, tight).values()}
    assert met <= rest
    open_ = FusionConfig(
        max_sibling_nodes=1, max_outputs=1, span=0, peak_memory=0, max_reduces=1, skip=frozenset(rest - {code})
    )
    assert {d.code for d in codes(loops, open_).values()} == {code}
    assert split(loops, FusionConfig(max_reduces=1, span=0, skip=frozenset(rest))) == "sum+sq+squares"
