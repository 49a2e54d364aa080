"""Which axes are common outer loops: facts about single situations (stage B's tests use whole graphs)."""

from __future__ import annotations

from onnxfuse.analysis.rows import RowMap, rows
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute
from tests.fuse.brute import crossings
from tests.fuse.dsl import Build


def solve(g: Build, writes: tuple[Value, ...] | None = None) -> RowMap | Refusal:
    return rows([c for c in g.items if isinstance(c, Compute)], writes)


def accepted(g: Build, writes: tuple[Value, ...] | None = None) -> RowMap:
    found = solve(g, writes)
    assert isinstance(found, RowMap), found
    assert crossings([c for c in g.items if isinstance(c, Compute)], found) == []
    return found


def refused(g: Build, writes: tuple[Value, ...] | None = None) -> str:
    found = solve(g, writes)
    assert isinstance(found, Refusal), found
    return found.code


def test_a_weight_prepared_inside_is_inlined_not_put_on_rows() -> None:
    g = Build((4, 8))
    w = g.E("w2", g.reshape("w1", g.input("w", (8, 1)), (8,)))
    s = g.R("s", g.input("x"))
    g.E("y", s, w)
    found = accepted(g)
    assert {v.name for v in found.inline} == {"w1", "w2"}


def test_an_expensive_weight_is_not_repeated_per_row() -> None:
    g = Build((4, 8))
    w = g.E("w2", g.input("w", (8,)), prim="exp")
    g.E("y", g.R("s", g.input("x")), w)
    assert refused(g) == "NF_RECOMPUTE"


def test_a_scalar_may_be_repeated_per_row() -> None:
    g = Build((4, 8))
    eps = g.E("eps", g.input("e", (1,)), prim="exp")
    g.E("y", g.R("s", g.input("x")), eps)
    assert {v.name for v in accepted(g).inline} == {"eps"}


def test_a_written_value_without_the_outer_axis_is_refused() -> None:
    g = Build((4, 8))
    w = g.E("w2", g.input("w", (8,)))
    y = g.E("y", g.R("s", g.input("x")), w)
    assert refused(g, (w, y)) == "NF_NOT_ROW_LOCAL"


def test_axes_are_identified_through_reads_never_by_extent() -> None:
    g = Build((4, 4))
    e = g.E("e", g.input("x"))
    s = g.R("s", e)
    g.E("y", g.I("t", e), s)
    assert refused(g, (e, g.items[-1].out)) in ("NF_AXES_CONFLICT", "NF_NOT_ROW_LOCAL")  # type: ignore[union-attr]


def test_permuted_reads_are_the_same_rows() -> None:
    g = Build((2, 3, 4))
    x = g.input("x")
    g.E("y", g.I("t", x, perm=(1, 0, 2)), g.R("s", g.I("u", x, perm=(1, 0, 2))))
    assert [a.extent for a in accepted(g).outer] == [3, 2]


def test_reductions_over_other_axes_do_not_mix() -> None:
    g = Build((4, 8))
    e = g.E("e", g.input("x"))
    g.E("y", g.R("a", e), g.R("b", e, over=0))
    assert refused(g) == "NF_GROUP_MERGE"


def test_a_reduction_of_row_results_is_refused() -> None:
    g = Build((4, 8))
    g.R("all", g.R("each", g.input("x")), over=0)
    assert refused(g) == "NF_GROUP_MERGE"


def test_axes_of_one_element_are_private() -> None:
    g = Build((1, 4, 8))
    g.E("y", g.input("x"), g.R("s", g.input("x2")))
    found = accepted(g)
    assert [a.extent for a in found.outer] == [4]


def test_symbolic_rows_and_symbolic_buffers() -> None:
    n, m = sym("N"), sym("M")
    g = Build((n, m))
    e = g.E("e", g.input("x"), prim="exp")
    g.pointwise("y", "div", e, g.R("s", e))
    found = accepted(g)
    assert [a.extent for a in found.outer] == [n]
    (value, size), (total, scalar) = found.buffers
    assert value is e
    assert str(size) == "M * 4"
    assert (total.name, scalar) == ("s", 4)


def test_cheap_values_are_not_buffered() -> None:
    g = Build((4, 8))
    e = g.E("e", g.input("x"))
    g.pointwise("y", "div", e, g.R("s", e))
    assert [(v.name, n) for v, n in accepted(g).buffers] == [("s", 4)]


def test_stages_are_numbered_by_reductions_before() -> None:
    g = Build((4, 8))
    x = g.input("x")
    e = g.E("exp", g.pointwise("sub", "sub", x, g.R("max", x, op="max")), prim="exp")
    g.pointwise("div", "div", e, g.R("sum", e))
    level = {v.name: k for v, k in accepted(g).level.items()}
    assert level == {"max": 0, "sub": 1, "exp": 1, "sum": 1, "div": 2}


def test_pointwise_outputs_must_agree_in_axes_and_order() -> None:
    g = Build((4, 8))
    e = g.E("e", g.input("x"))
    f = g.E("f", e)
    assert [a.extent for a in accepted(g, (e, f)).outer] == [4, 8]
    t = g.I("t", e)
    assert refused(g, (e, f, t)) == "NF_VIEW_LEVEL"
    g = Build((4, 8))
    b = g.E("b", g.input("x", (8,)))
    wide = g.B("wide", b)
    assert refused(g, (b, wide)) == "NF_GROUP_MERGE"


def test_an_outer_axis_read_twice_in_one_load_is_refused() -> None:
    g = Build((8, 8))
    e = g.E("e", g.R("s", g.input("x"), over=0), g.input("y"))
    y = g.E("both", e, g.I("t", e))
    assert isinstance(solve(g, (e, y)), Refusal)
