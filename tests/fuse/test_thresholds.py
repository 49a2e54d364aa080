"""Every threshold of the fusion with a pair just beyond it and just within; every code of stages A to C with a test.

The limit itself is always allowed, or always refused, as the row says; nothing lies between the two columns.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from onnxfuse.analysis.rows import EXPENSIVE
from onnxfuse.codes import CODES
from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import evaluate, fuse
from onnxfuse.fuse.facts import REPEATS
from onnxfuse.fuse.rules import LAUNCH_BYTES, SERIAL_POINTS
from onnxfuse.ir.expr import i64, var
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.ir.partition import Verdict
from onnxfuse.ir.prims import PRIMS
from tests.fuse import test_merge, test_siblings, test_table
from tests.fuse.dsl import Build, at, axes_for, split
from tests.fuse.graphs import chain
from tests.fuse.test_merge import many_inputs, many_outputs, two_softmaxes
from tests.fuse.test_siblings import biases, far_apart, gates, moments

F = FusionConfig


def added(n: int) -> LoopGraph:
    """A sum of n inputs, two at a time."""
    g = Build()
    x = g.input("x0")
    for i in range(1, n):
        x = g.E(f"e{i}", x, g.input(f"x{i}"))
    return g.outputs(x)


def mean_and_root(shape: tuple[int, int] = (4, 8)) -> LoopGraph:
    """Stage A keeps the two apart; one link of shape[0] numbers between them."""
    g = Build(shape)
    return g.outputs(g.E("root", g.R("mean", g.input("x"), mean=True), prim="sqrt"))


def kept_row(n: int) -> LoopGraph:
    """A row of n numbers is needed again after its sum."""
    g = Build((4, n))
    e = g.E("exp", g.input("x"), prim="exp")
    return g.outputs(g.pointwise("div", "div", e, g.R("sum", e)))


def steps_before(rows: int = 64) -> LoopGraph:
    """Two steps on an operand of a product of so many rows."""
    g = Build((rows, 64))
    w = g.E("scale", g.E("neg", g.input("w", (64, 64))), g.input("row", (64, 1)))
    return g.outputs(g.C("mm", g.input("x"), w))


def apart(n: int) -> LoopGraph:
    """The second of n readers can join, the others are stays in between."""
    g = Build((4, 8))
    a = g.R("a", g.input("x"))
    columns = [g.R(f"c{i}", g.E(f"e{i}", a, g.input(f"y{i}")), over=0) for i in range(n)]
    return g.outputs(a, *columns, g.E("last", a, prim="sqrt"))


def one_between(n: int) -> LoopGraph:
    """n nodes that stay stand between the two groups, in the order only."""
    g = Build((4, 8))
    a = g.E("a", g.input("x"))
    side = g.input("y")
    for i in range(n):
        side = g.O(f"o{i}", side)
    return g.outputs(a, g.R("s", a, side))


def one_row(n: int) -> LoopGraph:
    g = Build((1, n))
    e = g.E("e", g.input("x"))
    return g.outputs(e, g.R("s", e))


def repeated(more: int, prim: str = "exp") -> LoopGraph:
    """Two elements alone, `more` evaluations more if they go along."""
    g = Build((more // 2 + 1, 2))
    return g.outputs(g.pointwise("mul", "mul", g.input("x"), g.E("gate", g.input("s", (1, 2)), prim=prim)))


def second_round() -> LoopGraph:
    """What is turned back joins what it was turned from only after the rows of `r` have joined it."""
    g = Build((2, 3, 4))
    turned = g.I("turned", g.input("x"), perm=(1, 0, 2))
    back = g.I("back", turned, perm=(1, 0, 2))
    return g.outputs(turned, g.E("out", g.R("r", g.input("y"), over=1), back))


def two_rows(again: str) -> LoopGraph:
    """Point (i, j) needs the sum of row i, and that of row j or of row i again."""
    g = Build((8, 8))
    r = g.R("sum", g.input("x"))
    axes = axes_for((8, 8))
    rows = {"i": axes[0], "j": axes[1]}
    first, second = (at(r, (var(rows[k]), i64(0))) for k in ("i", again))
    return g.outputs(g.add("both", axes, first + second))


def flattened(*shape: int) -> LoopGraph:
    """Rows of 4, reduced and read again, then in another shape."""
    g = Build((2, 3, 4))
    x = g.input("x")
    return g.outputs(g.reshape("flat", g.E("e", x, g.R("sum", x)), shape))


def both_read(over: int) -> LoopGraph:
    g = Build((4, 8))
    e = g.E("e", g.input("x"))
    return g.outputs(g.R("one", e), g.R("other", e, over=over))


def then(view: bool) -> LoopGraph:
    g = Build((8, 8))
    e = g.E("e", g.input("x"))
    return g.outputs(e, g.I("t", e) if view else g.E("t", e))


# Codes without a number: refused, and the nearest that is not.
AXES: dict[str, tuple[LoopGraph, LoopGraph]] = {
    "NF_AXES_CONFLICT": (two_rows("j"), two_rows("i")),
    "NF_NOT_ROW_LOCAL": (flattened(6, 4), flattened(2, 3, 2, 2)),
    "NF_GROUP_MERGE": (both_read(0), both_read(1)),
    "NF_VIEW_LEVEL": (then(view=True), then(view=False)),
}


@pytest.mark.parametrize("code", AXES)
def test_axes_that_do_not_go_together(code: str) -> None:
    refused, allowed = (fuse(loops, F()) for loops in AXES[code])
    assert code in {d.code for d in refused.decisions if d.stage == "B"}
    assert len(refused.groups) > 1
    assert len(allowed.groups) == 1


SAVED = LAUNCH_BYTES + 2 * 4 * 4  # of mean_and_root: a launch, four numbers written and read
IN_TVM = FusionMode.TVM

# threshold, refused with code, allowed: (graph, configuration) each
LIMITS: list[tuple[str, str, tuple[LoopGraph, F], tuple[LoopGraph, F]]] = [
    ("max_nodes", "NF_A_DEPTH", (chain(5), F(max_nodes=4)), (chain(4), F(max_nodes=4))),
    ("max_nodes", "NF_NODE_CAP", (mean_and_root(), F(max_nodes=1)), (mean_and_root(), F(max_nodes=2))),
    (
        "max_nodes_tvm",
        "NF_A_DEPTH",
        (chain(5), F(mode=IN_TVM, max_nodes_tvm=4)),
        (chain(4), F(mode=IN_TVM, max_nodes_tvm=4)),
    ),
    ("max_inputs", "NF_IO_CAP", (many_inputs(), F(max_inputs=4)), (many_inputs(), F(max_inputs=5))),
    ("max_outputs", "NF_IO_CAP", (many_outputs(), F(max_outputs=3)), (many_outputs(), F(max_outputs=4))),
    ("max_inputs", "NF_IO_CAP", (biases(), F(max_inputs=3)), (biases(), F(max_inputs=4))),
    ("max_outputs", "NF_IO_CAP", (gates(), F(max_outputs=2)), (gates(), F(max_outputs=3))),
    ("max_inputs", "NF_IO_CAP", (added(4), F(max_inputs=3)), (added(3), F(max_inputs=3))),
    ("max_reduces", "NF_TOO_MANY_REDUCES", (two_softmaxes(), F(max_reduces=3)), (two_softmaxes(), F(max_reduces=4))),
    ("max_reduces", "NF_TOO_MANY_REDUCES", (moments(), F(max_reduces=1)), (moments(), F(max_reduces=2))),
    (
        "min_saved_bytes",
        "NF_NO_SHARED_DATA",
        (mean_and_root(), F(min_saved_bytes=SAVED + 1)),
        (mean_and_root(), F(min_saved_bytes=SAVED)),
    ),
    ("local_budget", "NF_LOCAL_BUFFER", (kept_row(8), F(local_budget=35)), (kept_row(8), F(local_budget=36))),
    ("prologue_cost", "NF_PROLOGUE", (steps_before(), F(prologue_cost=1)), (steps_before(), F(prologue_cost=2))),
    ("prologue_rows", "NF_PROLOGUE", (steps_before(16), F()), (steps_before(17), F())),
    ("rounds", "NF_ROUNDS", (second_round(), F(rounds=1)), (second_round(), F(rounds=2))),
    ("max_sibling_nodes", "NF_NODE_CAP", (gates(), F(max_sibling_nodes=2)), (gates(), F(max_sibling_nodes=3))),
    ("span", "NF_SPAN", (far_apart(), F(span=4)), (far_apart(), F(span=5))),
    ("peak_memory", "NF_PEAK_MEMORY", (gates(), F(peak_memory=383)), (gates(), F(peak_memory=384))),
    ("cycle_window", "NF_CYCLE_BUDGET", (one_between(3), F(cycle_window=3)), (one_between(3), F(cycle_window=4))),
    ("fuse.rules:SERIAL_POINTS", "NF_COST", (one_row(SERIAL_POINTS + 1), F()), (one_row(SERIAL_POINTS), F())),
    ("fuse.facts:REPEATS", "NF_RECOMPUTE", (repeated(REPEATS), F()), (repeated(REPEATS - 2), F())),
    ("fuse.facts:EXPENSIVE", "NF_RECOMPUTE", (repeated(REPEATS), F()), (repeated(REPEATS, "neg"), F())),
]
# Windows leave no record: what is outside of them was not considered.
WINDOWS = {"candidate_window", "sibling_window"}
# In test_rowblocks.py and frontend/test_concat_by_reader.py, which build real models.
ELSEWHERE = {"tail_columns", "tail_least", "tail_depth", "join_rows"}


@pytest.mark.parametrize(("name", "code", "beyond", "within"), LIMITS, ids=[f"{x[0]}-{x[1]}" for x in LIMITS])
def test_beyond_the_limit_it_is_refused_and_within_it_is_not(name: str, code: str, beyond, within) -> None:
    made = fuse(*beyond)
    refused = [d for d in made.decisions if d.code == code]
    assert refused
    assert all(d.verdict is Verdict.REFUSED for d in refused)
    assert evaluate(made, beyond[1]) == made.decisions
    assert code not in {d.code for d in fuse(*within).decisions}


def test_no_threshold_is_without_a_limit_test() -> None:
    numbers = {f.name for f in fields(FusionConfig) if isinstance(f.default, int)}
    assert numbers == {x[0] for x in LIMITS if ":" not in x[0]} | WINDOWS | ELSEWHERE


def test_only_neighbours_within_the_window_are_tried() -> None:
    loops = apart(2)
    assert split(loops, F(candidate_window=2, mode=FusionMode.CANFUSE)) == "a | e0+c0 | e1+c1 | last"
    assert "a+last" in split(loops, F(candidate_window=3, mode=FusionMode.CANFUSE))
    assert split(gates(), F(sibling_window=0)) == "i | f | o"
    assert split(gates(), F(sibling_window=1)) == "i+f+o"


def test_the_cost_of_what_may_not_be_repeated() -> None:
    assert PRIMS["exp"].cost >= EXPENSIVE > PRIMS["neg"].cost


def test_every_code_of_the_fusion_is_given_in_a_test() -> None:
    tested = {x[1] for x in LIMITS} | {r[2] for r in test_merge.REFUSED} | {r[2] for r in test_siblings.LIMITS}
    tested |= {r[3] for r in test_table.CODES}
    # One test each, by name: test_rowblocks.py, test_products.py, test_merge.py, test_evaluate.py.
    tested |= {"NF_ROW_BLOCK", "NF_ROW_TAIL", "FUSED_ATTENTION", "FUSED_ROW_TAIL", "FUSED_PRODUCTS"}
    tested |= {"NF_CYCLE", "NF_PEELED", "NF_MODE"}
    tested |= set(AXES)
    # No candidate holds a node that stays; an injective node that waits for the second sweep is judged there.
    unreachable = {"NF_OPAQUE", "NF_A_PHASE"}
    assert {c.code for c in CODES if c.stage in ("A", "B", "C")} - tested == unreachable
