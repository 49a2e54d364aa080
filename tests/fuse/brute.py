"""Rows by brute force: every read of every point of every member, with small extents."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from onnxfuse.analysis.rows import RowMap
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Sym, Var, children, loads, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute

SYMS = {"N": 3, "M": 2}


def number(e: Expr, point: Mapping[Axis, int]) -> int | None:
    """Value of an index expression; None if it depends on data."""
    known: dict[int, int | None] = {}
    for x in walk(e):
        if isinstance(x, Lit):
            known[id(x)] = int(x.value)
        elif isinstance(x, Var):
            known[id(x)] = point[x.axis]
        elif isinstance(x, Sym):
            known[id(x)] = SYMS[x.name]
        elif isinstance(x, Load):
            known[id(x)] = None
        else:
            assert isinstance(x, Apply)
            args = [known[id(a)] for a in children(x)]
            known[id(x)] = None if None in args else int(x.prim.numpy(*args))
    return known[id(e)]


def extent(a: Axis) -> int:
    n = number(a.extent, {}) if isinstance(a.extent, Expr) else a.extent
    assert n is not None
    return n


def crossings(members: list[Compute], found: RowMap) -> list[str]:
    """Reads that leave the row or run before their stage; [] if the row program is right."""
    made: dict[Value, Compute] = {c.out: c for c in members}
    bad: list[str] = []

    def row_of(c: Compute, point: Mapping[Axis, int]) -> dict[Axis, int]:
        return {found.axis_of[a]: point[a] for a in c.axes if a in found.axis_of}

    def follow(reader: Compute, ld: Load, point: Mapping[Axis, int], row: dict[Axis, int]) -> None:
        source = made.get(ld.source)
        if source is None:
            return
        index = [number(ix, point) for ix in ld.index]
        at = dict(zip(source.axes, index, strict=True))
        if source.out in found.inline:
            if all(v is None or 0 <= v < extent(a) for a, v in at.items()):
                for inner in loads(*source.roots):
                    follow(reader, inner, at, row)  # type: ignore[arg-type]
            return
        if row_of(source, at) != row:  # type: ignore[arg-type]
            bad.append(f"{reader.out.name} at {row} reads {ld} of another row")
        if any(v is None or not 0 <= v < extent(a) for a, v in at.items()):
            bad.append(f"{reader.out.name} reads {ld} out of range")
        if found.level[reader.out] < found.level[source.out] + (source.reduce is not None):
            bad.append(f"{reader.out.name} is not in a later stage than {source.out.name}")

    for c in members:
        if c.out in found.inline:
            continue
        if set(row_of(c, dict.fromkeys(c.axes, 0))) != set(found.outer):
            bad.append(f"{c.out.name} does not have every outer axis")
        over = () if c.reduce is None else c.reduce.axes
        axes = (*c.axes, *over)
        for values in product(*(range(extent(a)) for a in axes)):
            point = dict(zip(axes, values, strict=True))
            for ld in loads(*c.roots):
                follow(c, ld, point, row_of(c, point))
    return bad
