"""Packing: writing a factor of a contraction into scratch in the order the micro-kernel reads it.

A `Line` is a range of a flattened list of axes. `pack_block` writes rows of consecutive elements of the inner line:

    dst[r * stride + v] = expr(outer line at r, inner line at v)

vectorised along the innermost axis of the inner line. The usual factor of a convolution, one load under guards that
are affine in that axis, is copied with plain vector loads where all lanes are inside and masked ones at the border;
anything else goes through emit_expr. Every row may be overrun by `lanes - 1` elements: leave that much room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from onnxfuse.codegen.build import I32, I64, Builder, Index, Reg, Type, reg_type
from onnxfuse.codegen.scalar_expr import Env, affine, emit_dim, emit_expr, flat_index, literal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, axes_of, i64, var
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import simplify


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Elements `start .. start+count` of the axes flattened in order (outermost first)."""

    axes: tuple[Axis, ...]
    start: Index
    count: Index


def flat_of(env: Env, e: Load) -> Expr:
    """Offset of a load in elements; buffers of kernels have symbolic strides."""
    strides = env.buffers[e.source].strides
    return flat_index(e.index, tuple(s if isinstance(s, Expr) else i64(s) for s in strides))


def decode(build: Builder, env: Env, axes: tuple[Axis, ...], flat: Index) -> dict[Axis, Reg]:
    """Loop variables of flattened axes at position `flat`."""
    env = env.at()  # what is emitted here need not dominate later uses of the env
    out: dict[Axis, Reg] = {}
    for axis in reversed(axes[1:]):
        extent = emit_dim(build, env, axis.extent)
        safe = extent if isinstance(extent, int) else build.imax(extent, 1)
        out[axis] = build.i64(build.umod(flat, safe))
        flat = build.udiv(flat, safe)
    if axes:
        out[axes[0]] = build.i64(flat)
    return out


def pack_block(
    build: Builder,
    env: Env,
    expr: Expr,
    outer: Line,
    inner: Line,
    dst: Reg,
    stride: Index,
    lanes: int,
) -> None:
    """Write `expr` over outer x inner to dst, rows of `stride` elements."""
    typ = reg_type(expr.dtype)
    with build.loop(0, outer.count, name="row") as r:
        row = env.at(decode(build, env, outer.axes, build.add(outer.start, r)))
        at = build.offset(dst, build.mul(r, stride), typ)
        for_segments = _segments(build, row, inner)
        with for_segments as (place, x, x0, length, done):
            _run(build, place, expr, x, x0, length, build.offset(at, done, typ), lanes)


@contextmanager
def _segments(build: Builder, env: Env, line: Line) -> Iterator[tuple[Env, Axis, Index, Index, Index]]:
    """Runs of the innermost axis within a line: env, axis, first index, length, elements of the line before it."""
    env = env.at()
    *above, x = line.axes
    if not above:
        yield env, x, line.start, line.count, 0
        return
    extent = emit_dim(build, env, x.extent)
    safe = extent if isinstance(extent, int) else build.imax(extent, 1)
    stop = build.add(line.start, line.count)
    with build.loop(build.udiv(line.start, safe), build.ceildiv(stop, safe), name="seg") as o:
        base = build.mul(o, extent)
        x0 = build.imax(build.sub(line.start, base), 0)
        x1 = build.imin(extent, build.sub(stop, base))
        place = env.at(decode(build, env, tuple(above), o))
        yield place, x, x0, build.sub(x1, x0), build.sub(build.add(base, x0), line.start)


def _run(build: Builder, env: Env, expr: Expr, x: Axis, x0: Index, length: Index, dst: Reg, lanes: int) -> None:
    """dst[v] = expr at x = x0 + v."""
    copy = _as_copy(env, expr, x) if lanes > 1 else None
    if copy is not None:
        _copy_run(build, env, copy, x, x0, length, dst, lanes)
        return
    typ = reg_type(expr.dtype)
    whole = build.mul(build.udiv(length, lanes), lanes)
    with build.loop(0, whole, lanes, name="v") as v:
        here = env.at({x: build.i64(build.add(x0, v))}).vector(x, lanes)
        build.store(build.widen(emit_expr(build, here, expr), lanes), build.offset(dst, v, typ))
    if lanes == 1:
        return
    rest = build.i64(build.sub(length, whole))
    with build.if_then(build.ir.icmp_signed(">", rest, build.i64(0))):
        mask = build.tail_mask(rest, lanes)
        here = env.at({x: build.i64(build.add(x0, whole))}).vector(x, lanes, mask)
        build.store(build.widen(emit_expr(build, here, expr), lanes), build.offset(dst, whole, typ))


# ---- one load under affine guards ----


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """`load` at a constant step along x where `fixed` hold and x lies within `bounds`; `pad` elsewhere."""

    load: Load
    base: Expr
    step: int
    fixed: tuple[Expr, ...]
    bounds: tuple[tuple[int, Expr], ...]  # (s, e): s*x + e >= 0
    pad: Lit | None = None


def _as_copy(env: Env, expr: Expr, x: Axis) -> _Copy | None:
    """The factor as a guarded copy, or None when it is anything else."""
    conds: list[Expr] = []
    pad: Lit | None = None
    while isinstance(expr, Apply) and expr.prim.name == "where":
        cond, expr, no = expr.args
        if not isinstance(no, Lit) or (pad is not None and pad is not no):
            return None
        conds += _conjuncts(cond)
        pad = no
    if not isinstance(expr, Load) or expr.dtype is DType.BOOL:
        return None
    split = affine(flat_of(env, expr), var(x))
    if split is None or not isinstance(split[1], Lit) or split[1].value not in (1, 2):
        return None
    fixed: list[Expr] = []
    limits: list[tuple[int, Expr]] = []
    for cond in conds:
        if x not in axes_of(cond):
            fixed.append(cond)
            continue
        limit = _limit(cond, x)
        if limit is None:
            return None
        limits.append(limit)
    return _Copy(expr, split[0], int(split[1].value), tuple(fixed), tuple(limits), pad)


def _conjuncts(cond: Expr) -> list[Expr]:
    out, stack = [], [cond]
    while stack:
        c = stack.pop()
        if isinstance(c, Apply) and c.prim.name == "and":
            stack.extend(reversed(c.args))
        else:
            out.append(c)
    return out


def _limit(cond: Expr, x: Axis) -> tuple[int, Expr] | None:
    """A comparison as s*x + e >= 0 with a constant s."""
    if not isinstance(cond, Apply) or cond.prim.name not in ("lt", "le") or cond.args[0].dtype is not DType.I64:
        return None
    gap = cond.args[1] - cond.args[0] - (1 if cond.prim.name == "lt" else 0)
    split = affine(simplify(gap), var(x))
    if split is None or not isinstance(split[1], Lit) or split[1].value == 0:
        return None
    return int(split[1].value), split[0]


def _valid(build: Builder, env: Env, copy: _Copy, x0: Index, length: Index) -> tuple[Index, Index]:
    """Range of v (relative to x0) that is inside all guards: lo <= v < hi, within [0, length]."""
    lo: Index = 0
    hi: Index = length
    for s, e in copy.bounds:
        rest = emit_expr(build, env, e)
        if s > 0:  # x >= ceil(-e / s)
            first = build.sub(0, _floor(build, rest, s))
            lo = build.imax(lo, build.sub(first, x0))
        else:  # x <= floor(e / -s)
            last = _floor(build, rest, -s)
            hi = build.imin(hi, build.sub(build.add(last, 1), x0))
    for cond in copy.fixed:
        hi = build.ir.select(emit_expr(build, env, cond), build.i64(hi), build.i64(0))
    return lo, hi


def _floor(build: Builder, value: Reg, by: int) -> Index:
    """floor(value / by), by > 0; value may be negative."""
    if by == 1:
        return value
    b = build.ir
    q = b.sdiv(value, build.i64(by))
    r = b.srem(value, build.i64(by))
    return b.add(q, b.sext(b.icmp_signed("<", r, build.i64(0)), I64))


def _copy_run(build: Builder, env: Env, copy: _Copy, x: Axis, x0: Index, length: Index, dst: Reg, lanes: int) -> None:
    typ = reg_type(copy.load.dtype)
    lo, hi = _valid(build, env, copy, x0, length)
    base = build.add(emit_expr(build, env, copy.base), build.mul(x0, copy.step))
    src = build.offset(env.buffers[copy.load.source].ptr, base, typ)
    if copy.bounds or copy.fixed:
        _masked_loop(build, src, dst, typ, lanes, copy, (0, length), (lo, hi))
        return
    # A step of 2 reads one element more than it keeps: the last vector is left to the masked side.
    spare = 0 if copy.step == 1 else 1
    whole = build.mul(build.udiv(build.imax(build.sub(length, spare), 0), lanes), lanes)
    with build.loop(0, whole, lanes, name="v") as v:
        at = build.offset(src, build.mul(v, copy.step), typ)
        build.store(_plain(build, at, typ, lanes, copy.step), build.offset(dst, v, typ))
    _masked_loop(build, src, dst, typ, lanes, copy, (whole, length), (lo, hi))


def _masked_loop(
    build: Builder,
    src: Reg,
    dst: Reg,
    typ: Type,
    lanes: int,
    copy: _Copy,
    span: tuple[Index, Index],
    valid: tuple[Index, Index],
) -> None:
    """Without branches: a mask per vector costs less than a mispredicted border."""
    low, high = (build.splat(_clamped(build, x), lanes) for x in valid)
    with build.loop(*span, lanes, name="v") as v:
        at = build.offset(src, build.mul(v, copy.step), typ)
        place = build.splat(build.ir.trunc(v, I32), lanes)
        value = _masked(build, at, typ, lanes, copy.step, place, low, high)
        if copy.pad is not None and (copy.pad.value != 0 or str(copy.pad.value) == "-0.0"):
            keep = _within(build, list(range(lanes)), place, low, high)
            value = build.select(keep, value, build.splat(literal(build, copy.pad), lanes))
        build.store(value, build.offset(dst, v, typ))


def _clamped(build: Builder, x: Index) -> Reg:
    """As i32; runs are far shorter than 2**30 elements."""
    return build.ir.trunc(build.i64(build.imax(build.imin(x, 1 << 30), -(1 << 30))), I32)


def _plain(build: Builder, at: Reg, typ: Type, lanes: int, step: int) -> Reg:
    low = build.load(at, typ, lanes)
    if step == 1:
        return low
    high = build.load(build.offset(at, lanes, typ), typ, lanes)
    return build.shuffle(low, high, [2 * k for k in range(lanes)])


def _masked(build: Builder, at: Reg, typ: Type, lanes: int, step: int, place: Reg, low: Reg, high: Reg) -> Reg:
    """Lanes k with low <= place + k < high; element k is `step * k` after `at`."""
    if step == 1:
        return build.masked_load(at, typ, _within(build, list(range(lanes)), place, low, high))
    none = 1 << 30  # elements between: never wanted
    parts = []
    for half in range(step):
        first = half * lanes
        wanted = [(first + k) // step if (first + k) % step == 0 else none for k in range(lanes)]
        parts.append(build.masked_load(build.offset(at, first, typ), typ, _within(build, wanted, place, low, high)))
    return build.shuffle(parts[0], parts[1], [2 * k for k in range(lanes)])


def _within(build: Builder, positions: list[int], place: Reg, low: Reg, high: Reg) -> Reg:
    b = build.ir
    at = b.add(place, build.gather_lanes([build.const(I32, p) for p in positions]))
    return b.and_(b.icmp_signed(">=", at, low), b.icmp_signed("<", at, high))


# ---- transposing ----


def pack_transposed(
    build: Builder,
    src: Reg,
    src_stride: Index,
    rows: Index,
    cols: Index,
    dst: Reg,
    dst_stride: Index,
    dtype: DType,
    lanes: int,
) -> None:
    """dst[c * dst_stride + r] = src[r * src_stride + c]; writes whole lanes x lanes blocks: leave room."""
    typ = reg_type(dtype)
    last = build.sub(rows, 1)
    with build.loop(0, rows, lanes, name="r") as r, build.loop(0, cols, lanes, name="c") as c:
        left = build.sub(cols, c)
        full = build.ir.icmp_signed(">=", build.i64(left), build.i64(lanes))
        # Rows past the end repeat the last one: their lanes are never used.
        ats = [
            build.offset(src, build.add(build.mul(build.imin(build.add(r, i), last), src_stride), c), typ)
            for i in range(lanes)
        ]
        out = build.offset(dst, build.add(build.mul(c, dst_stride), r), typ)
        with build.if_else(full, likely=True) as (then, other):
            with then:
                _store_transposed(build, [build.load(at, typ, lanes) for at in ats], out, dst_stride, typ)
            with other:
                mask = build.tail_mask(left, lanes)
                loaded = [build.masked_load(at, typ, mask) if lanes > 1 else build.load(at, typ) for at in ats]
                _store_transposed(build, loaded, out, dst_stride, typ)


def _store_transposed(build: Builder, rows: list[Reg], out: Reg, stride: Index, typ: Type) -> None:
    for i, value in enumerate(transpose(build, rows)):
        build.store(value, build.offset(out, build.mul(i, stride), typ))


def transpose(build: Builder, rows: list[Reg]) -> list[Reg]:
    """Transpose n vectors of n lanes (n a power of two) by exchanging ever larger blocks."""
    n = len(rows)
    step = 1
    while step < n:
        out = list(rows)
        for i in range(n):
            if i & step:
                continue
            a, b = rows[i], rows[i + step]
            out[i] = build.shuffle(a, b, [k if not k & step else n + k - step for k in range(n)])
            out[i + step] = build.shuffle(a, b, [k + step if not k & step else n + k for k in range(n)])
        rows = out
        step *= 2
    return rows
