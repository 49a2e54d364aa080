"""What is said of one group is true of every group of its form, in its own names."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.footing import Footing, footing
from onnxfuse.analysis.forms import Forms
from onnxfuse.analysis.inlined import inlined_loads
from onnxfuse.analysis.maps import inline_loads
from onnxfuse.analysis.row_forms import RowForms
from onnxfuse.analysis.rows import RowMap, rows
from onnxfuse.ir.expr import Expr, loads
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from tests.fuse.dsl import Build
from tests.fuse.random_loops import random_loops

SEEDS = st.integers(0, 2**32)


def group(seed: int, n: int, prefix: str) -> list[Compute]:
    """Some Computes next to each other; for a seed always the same, but for the names of values."""
    made = list(random_loops(seed, n).computes())
    values = dict.fromkeys(v for c in made for v in (*c.reads, c.out))
    for v in values:
        object.__setattr__(v, "name", prefix + v.name)
    rng = random.Random(seed)
    start = rng.randrange(len(made))
    return made[start : start + rng.randint(1, 12)]


def exits(members: list[Compute]) -> list[Value]:
    read = {v for c in members for v in c.reads}
    return [c.out for c in members if c.out not in read]


@settings(max_examples=300, deadline=None)
@given(SEEDS, st.integers(3, 20))
def test_a_group_of_a_form_that_was_met_gets_the_answer_rows_would_give(seed: int, n: int) -> None:
    forms = RowForms(Forms(), lambda c: c.loads)
    for prefix in ("a", "other."):
        members = group(seed, n, prefix)
        for c in members:
            forms.forms.meet(c)
        got, want = forms.rows(members, exits(members)), rows(members, exits(members))
        stands = forms.footing(members, exits(members))
        if not isinstance(want, RowMap):
            assert got == want
            assert stands == want
            continue
        assert isinstance(got, RowMap)
        assert (got.outer, got.inline, dict(got.level)) == (want.outer, want.inline, dict(want.level))
        assert (dict(got.axis_of), got.buffers) == (dict(want.axis_of), want.buffers)
        how = footing(want, members)
        assert isinstance(stands, Footing)
        assert (stands.outer, stands.inline, stands.reducing) == (how.outer, how.inline, how.reducing)
        assert dict(stands.axis_of) == dict(how.axis_of)
        assert stands.row_bytes(lambda: ()) == how.row_bytes(lambda: members)  # noqa: B023


def test_what_leaves_a_group_is_part_of_its_form() -> None:
    g = Build()
    a = g.E("a", g.input("x"))
    b = g.E("b", a)
    members = list(g.outputs(b).computes())
    forms = Forms()
    for c in members:
        forms.meet(c)
    assert forms.group(members, {b})[0] != forms.group(members, {a, b})[0]
    assert forms.once("what", members, {b}, lambda: 1) == forms.once("what", members, {b}, lambda: 2) == 1
    assert forms.once("what", members, {a, b}, lambda: 3) == 3


@settings(max_examples=300, deadline=None)
@given(SEEDS, st.integers(3, 20))
def test_loads_after_substitution_are_those_of_the_bodies_written_out(seed: int, n: int) -> None:
    members = group(seed, n, "")
    rng = random.Random(seed)
    inline = {c.out for c in members if c.reduce is None and rng.random() < 0.5}
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    want = {}
    try:
        for c in members:
            roots = tuple(inline_loads(r, bodies) for r in c.roots)
            if any(v in bodies for v in c.reads):
                want[c.out] = loads(*roots)
            if c.out in inline:
                bodies[c.out] = c.axes, roots[0]
    except OverflowError:
        return
    assert inlined_loads(members, inline, lambda c: c.loads) == want
