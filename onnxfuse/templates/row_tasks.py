"""rowwise: work is cut into units (an outer point and a block of the vector axis), units into tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxfuse.codegen.build import I64, Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_dim
from onnxfuse.ir.expr import Apply, Expr, Load, walk
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.prims import Prim
from onnxfuse.templates.nest import turn_roots
from onnxfuse.templates.row_shape import FUNCTION, NATIVE, Spec, element_bytes

MAX_TASKS = 64  # enough to balance any core count we meet

# ---- tasks ----


@dataclass(frozen=True, slots=True)
class Split:
    """How the work is cut."""

    digits: tuple[Index, ...]  # extents of the odometer: outer axes, then blocks of the vector axis
    units: Index
    per_task: Index
    tasks: Index


def tile_width(spec: Spec) -> int:
    """Extent of a tile along its own axis: a cache line, so that every line is read once."""
    if spec.tile is not None and spec.tile.weave:
        assert isinstance(spec.tile.axis.extent, int)
        return spec.tile.axis.extent
    return spec.lanes * max(1, 64 // (spec.lanes * element_bytes(spec.nest)))


def outer_axes(spec: Spec) -> tuple[Axis, ...]:
    """The axes of units."""
    return tuple(a for a in spec.nest.outer if a is not spec.axis)


def split_work(build: Builder, env: Env, spec: Spec, grain: int) -> Split:
    """Cut the work into tasks; depends on dimensions only."""
    digits = [emit_dim(build, env, a.extent) for a in outer_axes(spec)]
    unit: Index = 1  # points of one unit
    if spec.tile is not None:
        width = tile_width(spec)
        k = outer_axes(spec).index(spec.tile.axis)
        unit = build.imin(digits[k], width)
        digits[k] = build.ceildiv(digits[k], width)
    if spec.axis is not None:
        extent = emit_dim(build, env, spec.axis.extent)
        digits.append(build.ceildiv(extent, spec.block))
        unit = build.mul(unit, build.imin(extent, spec.block))
    units: Index = 1
    for d in digits:
        units = build.mul(units, d)
    weight = build.mul(_weight(build, env, spec), unit)
    least = (
        build.add(build.udiv(build.i64(grain), build.imax(weight, 1)), 1)
        if not isinstance(weight, int)
        else (grain // max(weight, 1) + 1)
    )
    per = build.imax(build.udiv(build.add(units, MAX_TASKS - 1), MAX_TASKS), least)
    return Split(tuple(digits), units, per, build.udiv(build.add(units, build.sub(per, 1)), per))


def _weight(build: Builder, env: Env, spec: Spec) -> Index:
    """Work of one outer point, in bytes touched or the like."""
    total: Index = 0
    for s in spec.nest.stages:
        one = 4 * len(s.stores) + _effort([st.value for st in s.stores])
        points: Index = 1
        for a in s.axes:
            points = build.mul(points, emit_dim(build, env, a.extent))
        inner: Index = one
        if s.reduce is not None and s.reduce_body is not None:
            steps: Index = _effort(turn_roots(s)) + 4 * len(s.side) + 1
            for a in s.reduce.axes:
                steps = build.mul(steps, emit_dim(build, env, a.extent))
            inner = build.add(inner, steps)
        total = build.add(total, build.mul(points, inner))
    return total


def _effort(exprs: Sequence[Expr]) -> int:
    nodes = list(walk(*exprs))
    loads = sum(e.dtype.bytes for e in nodes if isinstance(e, Load))
    return loads + sum(_price(e.prim) for e in nodes if isinstance(e, Apply)) // 2


def _price(prim: Prim) -> int:
    """Cost of a primitive; functions that run in f64 take several times as long as their operations."""
    return 4 * prim.cost if prim.cost >= FUNCTION and prim.name not in NATIVE else prim.cost


def run_units(build: Builder, env: Env, spec: Spec, grain: int, task: Reg, unit: Callable[[list[Reg]], None]) -> None:
    """The units of one task: an odometer over the outer axes (and blocks of the vector axis)."""
    split = split_work(build, env, spec, grain)
    first = build.mul(task, split.per_task)
    last = build.imin(build.add(first, split.per_task), split.units)
    start: list[Reg] = []
    rest: Index = first
    for d in reversed(split.digits):
        start.append(build.i64(build.umod(rest, d)))
        rest = build.udiv(rest, d)
    start.reverse()
    with build.carry(first, last, 1, start, "unit") as it:
        unit(it.values)
        it.next = _advance(build, it.values, split.digits)


def _advance(build: Builder, digits: Sequence[Reg], extents: Sequence[Index]) -> list[Reg]:
    b = build.ir
    out: list[Reg] = []
    bump: Reg = build.i64(1)
    for k in range(len(digits) - 1, -1, -1):
        up = b.add(digits[k], bump)
        if k == 0:
            out.append(up)
            break
        wrap = b.icmp_signed("==", up, build.i64(extents[k]))
        out.append(b.select(wrap, build.i64(0), up))
        bump = b.zext(wrap, I64)
    out.reverse()
    return out
