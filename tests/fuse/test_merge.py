"""Stage B: normalisations become one row program, and every rule has a graph on each side of its limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxfuse.analysis.rows import RowMap, rows
from onnxfuse.analysis.traffic import traffic
from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import fuse
from onnxfuse.ir.expr import sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.ir.partition import Verdict
from onnxfuse.ir.types import Dim
from tests.fuse.brute import crossings
from tests.fuse.dsl import EDGES, FULL, Build, names, split

Shape = tuple[Dim, ...]
SHAPES: list[Shape] = [(8, 16), (2, 3, 8), (sym("N"), 4), (3, sym("N")), (sym("N"), sym("M"))]


def softmax(g: Build, x: Value, over: int = -1) -> Value:
    e = g.E("exp", g.pointwise("sub", "sub", x, g.R("max", x, op="max", over=over)), prim="exp")
    return g.pointwise("div", "div", e, g.R("sum", e, over=over))


def log_softmax(g: Build, x: Value) -> Value:
    d = g.pointwise("sub", "sub", x, g.R("max", x, op="max"))
    s = g.E("log", g.R("sum", g.E("exp", d, prim="exp")), prim="log")
    return g.pointwise("out", "sub", d, s)


def layer_norm(g: Build, x: Value, over: int | tuple[int, ...] = -1) -> Value:
    last = x.tensor.shape[-1:]
    d = g.pointwise("center", "sub", x, g.R("mean", x, over=over, mean=True))
    v = g.R("var", g.pointwise("sq", "mul", d, d), over=over, mean=True)
    r = g.E("std", g.E("eps", v, g.input("epsilon", ())), prim="sqrt")
    y = g.pointwise("norm", "div", d, r)
    return g.E("shift", g.pointwise("scale", "mul", y, g.input("gamma", last)), g.input("beta", last))


def rms_norm(g: Build, x: Value) -> Value:
    r = g.E("std", g.R("ms", g.pointwise("sq", "mul", x, x), mean=True), prim="sqrt")
    return g.pointwise("scale", "mul", g.pointwise("norm", "div", x, r), g.input("gamma", x.tensor.shape[-1:]))


def l2_norm(g: Build, x: Value) -> Value:
    return g.pointwise("norm", "div", x, g.E("root", g.R("ss", g.pointwise("sq", "mul", x, x)), prim="sqrt"))


def wrap(body: Callable[[Build, Value], Value], shape: Shape) -> LoopGraph:
    g = Build(shape)
    return g.outputs(g.E("post", body(g, g.E("pre", g.input("x"), g.input("y")))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("body", [softmax, log_softmax, layer_norm, rms_norm, l2_norm])
@pytest.mark.parametrize("mode", [FusionMode.CANFUSE, FusionMode.FULL])
def test_a_normalisation_and_its_neighbours_are_one_row_program(body, shape: Shape, mode: FusionMode) -> None:
    loops = wrap(body, shape)
    p = fuse(loops, FusionConfig(mode=mode))
    assert len(p.groups) == 1, names(p)
    assert [v.name for v in p.groups[0].writes] == ["post"]
    found = rows(p.groups[0].members, p.groups[0].writes)
    assert isinstance(found, RowMap)
    assert tuple(a.extent for a in found.outer) == shape[:-1]
    assert crossings(list(p.groups[0].members), found) == []


def test_softmax_over_another_axis_keeps_the_others_outer() -> None:
    g = Build((2, 3, 4))
    p = fuse(g.outputs(softmax(g, g.input("x"), over=1)), FULL)
    found = rows(p.groups[0].members)
    assert isinstance(found, RowMap)
    assert [a.extent for a in found.outer] == [2, 4]
    assert crossings(list(p.groups[0].members), found) == []


def test_normalisation_over_the_leading_axis() -> None:
    g = Build((5, 4))
    p = fuse(g.outputs(softmax(g, g.E("pre", g.input("x")), over=0)), FULL)
    assert names(p) == "pre+max+sub+exp+sum+div"
    found = rows(p.groups[0].members)
    assert isinstance(found, RowMap)
    assert [a.extent for a in found.outer] == [4]
    assert crossings(list(p.groups[0].members), found) == []


def test_instance_norm_over_two_axes() -> None:
    g = Build((2, 3, 4, 5))
    p = fuse(g.outputs(layer_norm(g, g.input("x"), over=(2, 3))), FULL)
    assert len(p.groups) == 1
    found = rows(p.groups[0].members)
    assert isinstance(found, RowMap)
    assert [a.extent for a in found.outer] == [2, 3]


def test_a_residual_that_is_used_again_is_written_too() -> None:
    g = Build((4, 8))
    e = g.E("e", g.input("x"), g.input("y"))
    p = fuse(g.outputs(g.C("mm", layer_norm(g, e)), e), FULL)
    assert [[v.name for v in group.writes] for group in p.groups] == [["e", "shift"], ["mm"]]


def test_a_mean_and_what_is_done_with_it() -> None:
    g = Build((4, 8))
    r = g.E("root", g.R("mean", g.input("x"), mean=True), prim="sqrt")
    assert split(g.outputs(r), FULL) == "mean+root"
    assert split(g.outputs(r), EDGES) == "mean | root"


def test_two_reductions_of_one_value_share_a_kernel() -> None:
    g = Build((4, 8))
    e = g.E("e", g.input("x"), prim="exp")
    assert split(g.outputs(g.R("s1", e), g.R("s2", e, op="max")), FULL) == "e+s1+s2"


def test_traffic_of_row_softmax_falls_from_32_to_8_mib() -> None:
    """The worked sum of FUSION.md 4.F, without the row vectors."""
    g = Build((1024, 1024))
    loops = g.outputs(softmax(g, g.E("s0", g.input("x"))))

    def mib(config: FusionConfig) -> int:
        total = 0
        for group in fuse(loops, config).groups:
            total += traffic(group.members, group.reads, group.writes).bytes
        return total >> 20

    assert mib(EDGES) == 32
    assert mib(FULL) == 8


def test_a_reshape_behind_a_row_program_is_peeled_off() -> None:
    g = Build((2, 3, 8))
    flat = g.reshape("flat", layer_norm(g, g.input("x")), (6, 8))
    p = fuse(g.outputs(g.C("mm", flat)), FULL)
    assert [g.members[0].out.name for g in p.groups] == ["mean", "flat", "mm"]
    assert [d.code for d in p.decisions if d.b == "flat" and d.stage == "A"] == ["NF_PEELED"]


def test_a_reshape_of_the_row_stays_in() -> None:
    g = Build((2, 3, 8))
    heads = g.I("tr", g.reshape("heads", layer_norm(g, g.input("x")), (2, 3, 2, 4)), perm=(0, 2, 1, 3))
    assert len(fuse(g.outputs(heads), FULL).groups) == 1


# One row per code: a graph that is refused, the configuration, and the code.
def two_softmaxes() -> LoopGraph:
    g = Build((4, 8))
    x = softmax(g, g.input("x"))
    e = g.E("exp2", g.pointwise("sub2", "sub", x, g.R("max2", x, op="max")), prim="exp")
    return g.outputs(g.pointwise("div2", "div", e, g.R("sum2", e)))


def many_inputs() -> LoopGraph:
    g = Build((4, 8))
    e = g.E("e", g.input("x"), g.input("y0"), g.input("y1"))
    return g.outputs(e, g.R("s", e, g.input("y2"), g.input("y3")))


def many_outputs() -> LoopGraph:
    g = Build((4, 8))
    e = g.E("e", g.input("x"))
    return g.outputs(*(g.E(f"o{i}", e) for i in range(4)))


def rows_and_columns() -> LoopGraph:
    g = Build((4, 8))
    e = g.E("e", g.input("x"))
    return g.outputs(g.R("rows", e), g.R("columns", e, over=0))


def transposed_after() -> LoopGraph:
    g = Build((8, 8))
    e = g.E("e", g.input("x"))
    return g.outputs(e, g.I("t", e))


def prologue() -> LoopGraph:
    g = Build()
    return g.outputs(g.C("mm", g.E("relu", g.input("x"))))


def row_after_anchor() -> LoopGraph:
    g = Build()
    return g.outputs(g.R("sum", g.C("mm", g.input("x"))))


def anchor_after_anchor() -> LoopGraph:
    g = Build()
    return g.outputs(g.C("mm2", g.C("mm1", g.input("x"))))


def one_row() -> LoopGraph:
    g = Build((1, 100_000))
    e = g.E("e", g.input("x"))
    return g.outputs(e, g.R("s", e))


REFUSED = [
    (two_softmaxes, FusionConfig(max_nodes=8), "NF_NODE_CAP"),
    (two_softmaxes, FusionConfig(max_reduces=3), "NF_TOO_MANY_REDUCES"),
    (two_softmaxes, FusionConfig(local_budget=16), "NF_LOCAL_BUFFER"),
    (many_inputs, FusionConfig(max_inputs=4), "NF_IO_CAP"),
    (many_outputs, FusionConfig(max_outputs=3), "NF_IO_CAP"),
    (two_softmaxes, FusionConfig(min_saved_bytes=1 << 40), "NF_NO_SHARED_DATA"),
    (two_softmaxes, FusionConfig(keep=frozenset({"n_exp2"})), "NF_PINNED"),
    (rows_and_columns, FULL, "NF_GROUP_MERGE"),
    (transposed_after, FULL, "NF_VIEW_LEVEL"),
    (prologue, FULL, "NF_PROLOGUE"),
    (row_after_anchor, FULL, "NF_KIND"),
    (anchor_after_anchor, FULL, "NF_TWO_ANCHORS"),
    (one_row, FULL, "NF_COST"),
]


@pytest.mark.parametrize(("build", "config", "code"), REFUSED, ids=[r[2] for r in REFUSED])
def test_a_rule_refuses_with_its_code(build, config: FusionConfig, code: str) -> None:
    refused = [d.code for d in fuse(build(), config).decisions if d.stage == "B" and d.verdict is Verdict.REFUSED]
    assert code in refused
    if code in ("NF_NODE_CAP", "NF_TOO_MANY_REDUCES", "NF_LOCAL_BUFFER", "NF_NO_SHARED_DATA"):
        assert len(fuse(build(), config).groups) > 1


LIMITS = [
    (two_softmaxes, FusionConfig(max_nodes=10, max_reduces=4, min_saved_bytes=0), 1),
    (many_inputs, FusionConfig(max_inputs=5), 1),
    (many_outputs, FusionConfig(max_outputs=4), 1),
    (two_softmaxes, FusionConfig(max_nodes=8, skip=frozenset({"NF_NODE_CAP"})), 1),
    (two_softmaxes, FusionConfig(local_budget=16, skip=frozenset({"NF_LOCAL_BUFFER"})), 1),
    (one_row, FusionConfig(skip=frozenset({"NF_COST"})), 1),
]


@pytest.mark.parametrize(("build", "config", "groups"), LIMITS)
def test_just_below_the_limit_or_switched_off_it_fuses(build, config: FusionConfig, groups: int) -> None:
    assert len(fuse(build(), config).groups) == groups


def test_a_transposed_operand_is_read_by_the_contraction_itself() -> None:
    g = Build((8, 8))
    loops = g.outputs(g.E("relu", g.C("mm", g.I("ta", g.input("a")), g.I("tb", g.input("b")))))
    p = fuse(loops, FULL)
    assert names(p) == "ta+tb+mm+relu"
    assert p.groups[0].anchor is not None
    assert [v.name for v in p.groups[0].reads] == ["a", "b"]
    assert split(loops, EDGES) == "ta | tb | mm+relu"


def test_a_few_steps_on_an_operand_run_as_it_is_read() -> None:
    g = Build((64, 64))
    loops = g.outputs(g.C("mm", g.input("x"), g.E("scale", g.E("neg", g.input("w")), g.input("row", (64, 1)))))
    p = fuse(loops, FULL)
    assert names(p) == "neg+scale+mm"
    assert split(loops, EDGES) == "neg+scale | mm"
    assert len(fuse(loops, FusionConfig(prologue_cost=1)).groups) == 2


def prologues() -> list[tuple[LoopGraph, str]]:
    out = []
    g = Build((64, 64))
    out.append((g.outputs(g.C("mm", g.R("sum", g.input("x")))), "not a view"))
    g = Build((64, 64))
    rows = g.outputs(g.C("mm", g.E("relu", g.input("x"))))
    out.append((rows, "not a view, and not along the columns of the product"))
    g = Build((64, 64))
    out.append((g.outputs(g.C("mm", g.input("x"), g.E("erf", g.input("w"), prim="erf"))), "not a view, nor cheap"))
    g = Build((8, 64))
    few = g.outputs(g.C("mm", g.input("x"), g.E("relu", g.input("w", (64, 64)))))
    out.append((few, "not a view, for few rows of the product"))
    g = Build()
    t = g.I("t", g.input("x"))
    out.append((g.outputs(g.C("mm", t), t), "used elsewhere"))
    g = Build()
    out.append((g.outputs(g.E("add", g.C("mm", g.input("y")), g.I("t", g.input("x")))), "read by the epilogue"))
    g = Build()
    out.append((g.outputs(g.pool("pool", g.I("t", g.input("x")))), "not a plain contraction"))
    g = Build()
    out.append(
        (g.outputs(g.C("mm", g.reshape("r", g.input("x", (4, 16)), (8, 8)))), "the composed index is not affine")
    )
    return out


@pytest.mark.parametrize(("loops", "why"), prologues(), ids=[w for _, w in prologues()])
def test_no_other_prologue_is_taken(loops: LoopGraph, why: str) -> None:
    p = fuse(loops, FULL)
    assert len(p.groups) == 2
    assert [(d.code, d.numbers) for d in p.decisions if d.stage == "B"] == [("NF_PROLOGUE", (("why", why),))]


def test_a_cycle_through_a_node_that_stays_is_refused() -> None:
    g = Build((4, 8))
    a = g.E("a", g.input("x"))
    p = fuse(g.outputs(g.E("b", a, g.O("stay", a))), FULL)
    assert names(p) == "a | b"
    assert [(d.code, d.numbers) for d in p.decisions if d.stage == "B"] == [("NF_CYCLE", (("through", "stay"),))]


def test_a_cycle_is_legal_once_what_lies_between_has_joined() -> None:
    g = Build((4, 8))
    loops = g.outputs(softmax(g, g.E("s0", g.input("x"))))
    assert len(fuse(loops, FULL).groups) == 1


def test_a_window_too_large_for_the_cycle_test_is_refused() -> None:
    g = Build((4, 8))
    a = g.E("a", g.input("x"))
    side = g.input("y")
    for i in range(6):
        side = g.O(f"o{i}", side)
    p = fuse(g.outputs(a, g.R("s", a, side)), FusionConfig(cycle_window=2))
    assert "NF_CYCLE_BUDGET" in [d.code for d in p.decisions]
