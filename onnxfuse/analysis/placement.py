"""Placement: a view behind a computation as another order of its loops, so that it stores where the view would copy to.

The view reads the value at an index made of digits (analysis/maps.py): dimension k of the value at the sum of
scale * ((axis // low) mod extent) over axes of the view. If the digits of every dimension count through it, and the
digits of every axis through the axis, the two are the same points in another order. One loop per digit then serves
both: transposes, splits and joins of dimensions (heads, lines of an image), and any sequence of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.analysis.kinds import same_extent
from onnxfuse.analysis.maps import Digit, digits
from onnxfuse.ir.expr import Expr, i64, var
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import as_dim, dim_expr, simplify
from onnxfuse.ir.types import Dim


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Loops over the digits: `at` is what every axis of the value is there, `index` where the view stores."""

    loops: tuple[Axis, ...]
    at: Mapping[Expr, Expr]
    index: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One digit: it counts `extent` in steps of `scale` in dimension `dim`, in steps of `low` in `axis`."""

    axis: Axis
    dim: int
    low: int
    scale: int
    extent: Dim


def placement(index: Sequence[Expr], view: Sequence[Axis], value: Sequence[Axis]) -> Placement | None:
    """The placement of a view over `view` that reads a value over `value` at `index`; None if it has none."""
    parts: list[_Part] = []
    for dim, (ix, axis) in enumerate(zip(index, value, strict=True)):
        if axis.extent == 1:
            continue
        form = digits(ix)
        if form is None or form[0] != 0:
            return None
        for d in form[1]:
            part = _part(d, dim)
            if part is None:
                return None
            parts.append(part)
    for dim, axis in enumerate(value):
        if axis.extent != 1 and not _counts([(p.scale, p.extent) for p in parts if p.dim == dim], axis.extent):
            return None
    for axis in view:
        if axis.extent != 1 and not _counts([(p.low, p.extent) for p in parts if p.axis is axis], axis.extent):
            return None
    return _loops(parts, view, value)


def _part(d: Digit, dim: int) -> _Part | None:
    if not isinstance(d.scale, int):
        return None
    if d.extent:
        return _Part(d.axis, dim, d.low, d.scale, d.extent)
    whole = d.axis.extent
    if d.low == 1:
        return _Part(d.axis, dim, 1, d.scale, whole)
    if not isinstance(whole, int) or whole % d.low:
        return None
    return _Part(d.axis, dim, d.low, d.scale, whole // d.low)


def _counts(steps: list[tuple[int, Dim]], total: Dim) -> bool:
    """Digits with these steps and extents count from 0 to `total` without a gap."""
    reached: Dim = 1
    for step, extent in sorted(steps, key=lambda s: s[0]):
        if step != reached:
            return False
        reached = as_dim(dim_expr(reached) * dim_expr(extent))
    return bool(steps) and same_extent(reached, total)


def _loops(parts: list[_Part], view: Sequence[Axis], value: Sequence[Axis]) -> Placement:
    of_dim = [[p for p in parts if p.dim == dim] for dim in range(len(value))]
    loop: dict[_Part, Axis] = {}
    order: list[Axis] = []
    index: list[Expr] = []
    for axis in view:
        mine = sorted((p for p in parts if p.axis is axis), key=lambda p: -p.low)
        total: Expr = i64(0)
        for k, p in enumerate(mine):
            whole = value[p.dim] if len(of_dim[p.dim]) == 1 else axis if len(mine) == 1 else None
            loop[p] = whole if whole is not None else Axis(f"{axis.name}{k}", p.extent)
            order.append(loop[p])
            total = total + var(loop[p]) * p.low
        index.append(simplify(total))
    at: dict[Expr, Expr] = {}
    for dim, axis in enumerate(value):
        there: Expr = i64(0)
        for p in of_dim[dim]:
            there = there + var(loop[p]) * p.scale
        at[var(axis)] = simplify(there)
    return Placement(tuple(order), at, tuple(index))
