"""Two groups joined by the reads between them stand as all their members together do."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.footing import Footing, Link, bent, footing, joined
from onnxfuse.analysis.rows import RowMap, rows
from onnxfuse.ir.loops import Compute
from tests.fuse.dsl import Build
from tests.fuse.random_loops import random_loops


def alone(members: list[Compute], others: list[Compute], needed: set[str]) -> Footing | None:
    inside = {c.out for c in members}
    read = {v for c in others for v in c.reads}
    inner = {v for c in members for v in c.reads}
    exits = [v for v in inside if v in read or v.name in needed or v not in inner]
    found = rows(members, exits)
    return footing(found, members) if isinstance(found, RowMap) else None


def both(a: list[Compute], b: list[Compute]) -> tuple[Footing | None, RowMap | None]:
    """By the links, and by all members."""
    one, two = alone(a, b, set()), alone(b, [], set())
    made = {c.out: c for c in a}
    links = [Link(c, ld, made[ld.source]) for c in b for ld in c.loads if ld.source in made]
    how = joined(one, two, links) if one and two and links and not any(map(bent, links)) else None
    members = a + b
    read = {v for c in members for v in c.reads}
    found = rows(members, [c.out for c in members if c.out not in read])
    return how, found if isinstance(found, RowMap) else None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 14), st.integers(1, 13))
def test_what_the_links_accept_the_members_accept(seed: int, n: int, cut: int) -> None:
    members = list(random_loops(seed, n).computes())
    start = random.Random(seed).randrange(len(members))
    members = members[start:]
    cut = min(cut, len(members) - 1)
    if cut < 1:
        return
    how, found = both(members[:cut], members[cut:])
    if how is None:
        return
    assert found is not None
    on_rows = [c for c in members if c.out not in found.inline]
    classes: dict[object, set[object]] = {}
    for c in on_rows:
        for axis in c.axes:
            classes.setdefault(found.axis_of.get(axis), set()).add(how.axis_of.get(axis))
    # Same axes are outer, and equal ones are equal.
    assert all(len(images) == 1 for images in classes.values())
    assert len(how.outer) == len(found.outer)


def test_a_softmax_grows_by_links_alone() -> None:
    g = Build((4, 8))
    x = g.input("x")
    e = g.E("e", g.pointwise("d", "sub", x, g.R("m", x, op="max")), prim="exp")
    g.pointwise("y", "div", e, g.R("s", e))
    members = list(g.outputs().computes())
    for cut in range(1, len(members)):
        how, found = both(members[:cut], members[cut:])
        assert found is not None
        assert how is not None or cut == 1
        assert how is None or [a.extent for a in how.outer] == [4]
