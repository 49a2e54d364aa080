"""Bytes and operations."""

from __future__ import annotations

from onnxfuse.analysis.traffic import alone, dearest, nbytes, ops, point_cost, sample, size, traffic
from onnxfuse.ir.expr import apply, load, sym, var
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import tensor
from tests.fuse.dsl import F32, Build, val


def compute(g: Build) -> Compute:
    c = g.items[-1]
    assert isinstance(c, Compute)
    return c


def test_a_static_pointwise_kernel_is_exact() -> None:
    g = Build((4, 8))
    g.E("y", g.input("a"), g.input("b", (8,)))
    t = alone(compute(g))
    assert (t.read, t.written, t.ops) == (4 * 8 * 4 + 8 * 4, 4 * 8 * 4, 32)
    assert t.bytes == t.read + t.written


def test_a_reduction_counts_body_combine_and_finish() -> None:
    g = Build((4, 8))
    g.R("y", g.input("a"), mean=True)
    assert ops(compute(g)) == 4 * 8 * 1 + 4 * 8


def test_index_arithmetic_is_not_work() -> None:
    g = Build((4, 8))
    g.reshape("y", g.input("a"), (16, 2))
    assert ops(compute(g)) == 0
    g.E("z", g.input("b"), prim="exp")
    assert dearest(compute(g).body) == point_cost(compute(g).body) == 12


def test_a_guard_is_no_work_but_its_choice_is() -> None:
    i = var(Axis("i", 4))
    inside = apply("and", apply("le", 1, i), apply("lt", i, 3))
    assert point_cost(apply("where", inside, load(val("a", (4,)), (i,), F32), 0.0)) == PRIMS["where"].cost


def test_run_time_dimensions_take_the_sample_or_64() -> None:
    n = sym("N")
    v = val("v", (n, 8))
    assert size(v) == 64 * 8
    assert size(v, {"N": 3}) == 24
    assert nbytes(v, {"N": 3}) == 96
    assert sample(apply("bdim", n, sym("M")) * 2 + 1, {"N": 1, "M": 7}) == 15
    assert tensor(F32, (n,)).size is n


def test_traffic_of_a_group_counts_each_value_once() -> None:
    g = Build((4, 8))
    x = g.input("x")
    a = g.E("a", x)
    g.E("b", a, x)
    t = traffic([c for c in g.items if isinstance(c, Compute)], (x,), (a,))
    assert (t.read, t.written, t.ops) == (128, 128, 64)
    assert (t + t).bytes == 512
