"""Packing: writing a factor of a contraction into scratch in the order the micro-kernel reads it.

A `Line` is a range of a flattened list of axes. `pack_block` writes rows of consecutive elements of the inner line:

    dst[r * stride + v] = expr(outer line at r, inner line at v)

vectorised along the innermost axis of the inner line. The usual factor of a convolution, one load under guards that
are affine in that axis, is copied with plain vector loads where all lanes are inside and masked ones at the border;
anything else goes through emit_expr. Every row may be overrun by `lanes - 1` elements: leave that much room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from onnxfuse.codegen.build import I32, I64, Builder, Index, Reg, Type, reg_type
from onnxfuse.codegen.scalar_expr import Env, affine, emit_dim, emit_expr, flat_index, literal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, axes_of, i64, lit, loads, substitute, var
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import simplify
from onnxfuse.templates.packing_steps import fill, steps_run

FEW_CHANNELS = 8  # copied together


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


def pieces(width: int) -> list[tuple[int, int]]:
    """(first element, power of two) of the parts that make up `width` elements."""
    out, at = [], 0
    for bit in range(width.bit_length() - 1, -1, -1):
        if width >> bit & 1:
            out.append((at, 1 << bit))
            at += 1 << bit
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
        _zero_end(build, typ, at, inner, lanes)
        for_segments = _segments(build, row, inner)
        with for_segments as (place, x, x0, length, done):
            _run(build, place, expr, x, x0, length, build.offset(at, done, typ), lanes)


def _zero_end(build: Builder, typ: Type, at: Reg, line: Line, lanes: int) -> None:
    """The last vector of a row that is written in runs, before them: the last one may end before the vector does.

    What lies behind takes part in the products, whether anybody wants them or not.
    """
    if len(line.axes) > 1 and lanes > 1:
        first = build.mul(build.udiv(build.sub(build.imax(line.count, 1), 1), lanes), lanes)
        build.store(build.splat(build.const(typ, 0), lanes), build.offset(at, first, typ))


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
    copy = _as_steps(env, expr, x) if lanes > 1 else None
    if copy is not None and copy.element is None:
        _copy_run(build, env, copy, x, x0, length, dst, lanes)
        return
    if copy is not None:
        _steps_run(build, env, copy, x0, length, dst, lanes)
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


def pack_taps(
    build: Builder, env: Env, expr: Expr, outer: Line, inner: Line, dst: Reg, stride: Index, lanes: int
) -> bool:
    """What pack_block does, for the rows (channel, taps) of a convolution; False (and no code) if it does not apply.

    Which elements lie outside depends on the tap, never on the channel: for each tap and run the bounds are worked out
    once and several channels are copied with them: as many as stay in the first level of cache for all taps. `outer`
    must hold whole channels.
    """
    channel, *taps = outer.axes
    x = inner.axes[-1]
    copy = _as_copy(env, expr, x) if lanes > 1 and build.has("avx") else None
    if copy is None or not (taps or inner.axes[:-1]) or any(not isinstance(t.extent, int) for t in taps):
        return False
    split = affine(copy.base, var(channel))
    if split is None or axes_of(split[1]) & {*outer.axes, *inner.axes}:
        return False
    if any(channel in axes_of(e) for e in (*copy.fixed, *(e for _, e in copy.bounds))):
        return False
    typ = reg_type(expr.dtype)
    count = 1
    for t in taps:
        assert isinstance(t.extent, int)
        count *= t.extent
    first, channels = build.udiv(outer.start, count), build.udiv(outer.count, count)
    plane = emit_expr(build, env.at(), split[1])
    step = build.mul(stride, count)
    few = build.loop(0, channels, FEW_CHANNELS, name="few")
    with few as c0, build.loop(0, count, name="tap") as tap:
        some = build.imin(build.sub(channels, c0), FEW_CHANNELS)
        place = env.at({**decode(build, env, tuple(taps), tap), channel: build.i64(build.add(first, c0))})
        row = build.offset(dst, build.add(build.mul(c0, step), build.mul(tap, stride)), typ)
        with build.loop(0, some, name="ch") as ch:
            _zero_end(build, typ, build.offset(row, build.mul(ch, step), typ), inner, lanes)
        with _segments(build, place, inner) as (here, _, x0, length, done):
            run = _open_run(build, here, copy, x0, length, lanes)
            _copy_channels(
                build, copy, run, (x, length, lanes), (some, plane), build.offset(row, done, typ), step, stride
            )
    return True


def _copy_channels(
    build: Builder,
    copy: _Copy,
    run: _Run,
    line: tuple[Axis, Index, int],
    channels: tuple[Index, Index],
    dst: Reg,
    step: Index,
    stride: Index,
) -> None:
    """A run of every channel: channels are the inner loop, so that what a vector may read is decided once for all."""
    x, length, lanes = line
    count, plane = channels
    typ = reg_type(copy.load.dtype)

    def plain(v: Index) -> None:
        src, out = build.offset(run.src, build.mul(v, copy.step), typ), build.offset(dst, v, typ)
        with build.loop(0, count, name="ch") as ch:
            value = _plain(build, build.offset(src, build.mul(ch, plane), typ), typ, lanes, copy.step)
            build.prefetch(build.offset(out, build.add(build.mul(ch, step), build.add(stride, lanes - 1)), typ))
            build.store(value, build.offset(out, build.mul(ch, step), typ))

    def masked(v: Index) -> None:
        out = build.offset(dst, v, typ)
        with build.loop(0, count, name="ch") as ch:
            src = replace(run, src=build.offset(run.src, build.mul(ch, plane), typ))
            build.prefetch(build.offset(out, build.add(build.mul(ch, step), build.add(stride, lanes - 1)), typ))
            build.store(_masked(build, src, copy, v, lanes), build.offset(out, build.mul(ch, step), typ))

    _choose(build, x, length, lanes, (run.lo, build.sub(run.hi, copy.step - 1)), plain, masked)


# ---- one load under affine guards ----


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """`load` at a constant step along x where `fixed` hold and x lies within `bounds`; `pad` elsewhere.

    element: an expression of the load that is wanted in its place (None: itself)
    """

    load: Load
    base: Expr
    step: int
    fixed: tuple[Expr, ...]
    bounds: tuple[tuple[int, Expr], ...]  # (s, e): s*x + e >= 0
    pad: Lit | None = None
    element: Expr | None = None


def _as_copy(env: Env, expr: Expr, x: Axis) -> _Copy | None:
    """The factor as a guarded copy, or None when it is anything else."""
    copy = _as_steps(env, expr, x)
    return copy if copy is not None and copy.element is None else None


def _as_steps(env: Env, expr: Expr, x: Axis) -> _Copy | None:
    """The same for an expression of one load of small integers."""
    conds: list[Expr] = []
    pad: Lit | None = None
    while isinstance(expr, Apply) and expr.prim.name == "where":
        cond, expr, no = expr.args
        if not isinstance(no, Lit) or (pad is not None and pad is not no):
            return None
        conds += _conjuncts(cond)
        pad = no
    element = None if isinstance(expr, Load) else expr
    read = expr if isinstance(expr, Load) else _alone(expr, x)
    if read is None or read.dtype is DType.BOOL:
        return None
    split = affine(flat_of(env, read), var(x))
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
    return _Copy(read, split[0], int(split[1].value), tuple(fixed), tuple(limits), pad, element)


def _alone(expr: Expr, x: Axis) -> Load | None:
    """The one load of an integer expression that moves along x, if it reads bytes or halves."""
    found = [ld for ld in loads(expr) if x in axes_of(ld)]
    if len(found) != 1 or not found[0].dtype.is_int or found[0].dtype.bytes > 2 or not expr.dtype.is_int:
        return None
    return None if x in axes_of(substitute(expr, {found[0]: lit(0, found[0].dtype)})) else found[0]


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
    return lo, hi


def _holds(build: Builder, env: Env, copy: _Copy) -> Reg | None:
    """The guards that do not depend on x; None when there are none."""
    out: Reg | None = None
    for cond in copy.fixed:
        value = emit_expr(build, env, cond)
        out = value if out is None else build.ir.and_(out, value)
    return out


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
    run = _open_run(build, env, copy, x0, length, lanes, fixed=False)

    def plain(v: Index) -> None:
        at = build.offset(run.src, build.mul(v, copy.step), typ)
        build.store(_plain(build, at, typ, lanes, copy.step), build.offset(dst, v, typ))

    def masked(v: Index) -> None:
        build.store(_masked(build, run, copy, v, lanes), build.offset(dst, v, typ))

    # A step of 2 reads one element more than it keeps: that one must be inside as well.
    inside = (run.lo, build.sub(run.hi, copy.step - 1))
    with _where(build, _holds(build, env, copy), length, ((dst, copy),), lanes):
        _line(build, x, length, lanes, inside, plain, masked)


def _steps_run(build: Builder, env: Env, copy: _Copy, x0: Index, length: Index, dst: Reg, lanes: int) -> None:
    assert copy.element is not None
    run = _open_run(build, env, copy, x0, length, lanes)
    lo = build.imin(run.lo, length)
    inside = (lo, build.imax(run.hi, lo))
    fill(build, copy.pad, inside, length, dst, lanes)
    steps_run(build, env, (copy.load, copy.element), copy.step, run.src, inside, length, dst, lanes)


@contextmanager
def _where(
    build: Builder, holds: Reg | None, length: Index, outs: tuple[tuple[Reg, _Copy], ...], lanes: int
) -> Iterator[None]:
    """The body where `holds`, padding elsewhere."""
    if holds is None:
        yield
        return
    with build.if_else(holds, likely=True) as (then, other):
        with then:
            yield
        with other, build.loop(0, length, lanes, name="v") as v:
            for dst, copy in outs:
                typ = reg_type(copy.load.dtype)
                pad = build.const(typ, 0) if copy.pad is None else literal(build, copy.pad)
                build.store(build.splat(pad, lanes), build.offset(dst, v, typ))


def _line(
    build: Builder,
    x: Axis,
    length: Index,
    lanes: int,
    inside: tuple[Index, Index],
    plain: Callable[[Index], None],
    masked: Callable[[Index], None],
) -> None:
    """Vectors that lie inside plainly, those before and behind masked.

    The first masked vector on each side stands outside of a loop, so that its mask can be hoisted out of the loop over
    lines.
    """
    if isinstance(length, int) and length <= 3 * lanes:
        for v in range(0, length, lanes):
            masked(v)
        return
    lo, hi = inside
    if not (isinstance(x.extent, int) and x.extent < 3 * lanes):
        first = build.imin(build.mul(build.ceildiv(lo, lanes), lanes), length)
        last = build.add(first, build.mul(build.udiv(build.imax(build.sub(hi, first), 0), lanes), lanes))
        if lo != 0:
            with build.if_then(build.ir.icmp_signed(">", build.i64(first), build.i64(0))):
                masked(0)
            with build.loop(lanes, first, lanes, name="v") as v:
                masked(v)
        with build.loop(first, last, lanes, name="v") as v:
            plain(v)
        with build.if_then(build.ir.icmp_signed("<", build.i64(last), build.i64(length))):
            masked(last)
        with build.loop(build.add(last, lanes), length, lanes, name="v") as v:
            masked(v)
        return
    with build.loop(0, length, lanes, name="v") as v:
        masked(v)


def _choose(
    build: Builder,
    x: Axis,
    length: Index,
    lanes: int,
    inside: tuple[Index, Index],
    plain: Callable[[Index], None],
    masked: Callable[[Index], None],
) -> None:
    """Vectors that lie inside plainly, the others masked; short runs all masked, which needs no branch."""
    lo, hi = inside
    short = isinstance(x.extent, int) and x.extent < 3 * lanes
    with build.loop(0, length, lanes, name="v") as v:
        if short:
            masked(v)
        else:
            b = build.ir
            after = b.icmp_signed(">=", v, build.i64(lo))
            before = b.icmp_signed("<=", build.i64(build.add(v, lanes)), build.i64(hi))
            with build.if_else(b.and_(after, before), likely=True) as (then, other):
                with then:
                    plain(v)
                with other:
                    masked(v)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One run of a copy: source of its first element, and which elements lo <= v < hi are read."""

    src: Reg
    lo: Index
    hi: Index
    low: Reg
    high: Reg


def _open_run(build: Builder, env: Env, copy: _Copy, x0: Index, length: Index, lanes: int, fixed: bool = True) -> _Run:
    """A run; `fixed`: nothing is read where the guards that do not depend on x fail."""
    typ = reg_type(copy.load.dtype)
    lo, hi = _valid(build, env, copy, x0, length)
    holds = _holds(build, env, copy) if fixed else None
    if holds is not None:
        hi = build.ir.select(holds, build.i64(hi), build.i64(0))
    base = build.add(emit_expr(build, env, copy.base), build.mul(x0, copy.step))
    src = build.offset(env.buffers[copy.load.source].ptr, base, typ)
    low, high = (build.splat(_clamped(build, x), lanes) for x in (lo, hi))
    return _Run(src, lo, hi, low, high)


def pack_pairs(
    build: Builder, env: Env, exprs: tuple[Expr, Expr], rows: Line, cols: Line, dsts: tuple[Reg, Reg], stride: Index,
    lanes: int,
) -> None:  # fmt: skip
    """Two factors that are the even and the odd elements of the same lines: every vector is loaded once.

    `cols` is a single axis from 0. Does what two calls of pack_block would.
    """
    (x,) = cols.axes
    typ = reg_type(exprs[0].dtype)
    with build.loop(0, rows.count, name="row") as r:
        row = env.at(decode(build, env, rows.axes, build.add(rows.start, r)))
        copies = [_as_copy(row, e, x) for e in exprs] if lanes > 1 else [None, None]
        outs = [build.offset(d, build.mul(r, stride), typ) for d in dsts]
        even, odd = copies
        if even is None or odd is None or even.step != 2 or odd.step != 2 or even.fixed != odd.fixed:
            for e, out in zip(exprs, outs, strict=True):
                _run(build, row.at(), e, x, 0, cols.count, out, lanes)
        else:
            _pair_run(build, row, (even, odd), x, cols.count, (outs[0], outs[1]), lanes)


def _pair_run(
    build: Builder, env: Env, copies: tuple[_Copy, _Copy], x: Axis, length: Index, outs: tuple[Reg, Reg], lanes: int
) -> None:
    typ = reg_type(copies[0].load.dtype)
    runs = [_open_run(build, env, c, 0, length, lanes, fixed=False) for c in copies]

    def plain(v: Index) -> None:
        at = build.offset(runs[0].src, build.mul(v, 2), typ)
        low, high = build.load(at, typ, lanes), build.load(build.offset(at, lanes, typ), typ, lanes)
        for half, out in enumerate(outs):
            value = build.shuffle(low, high, [2 * k + half for k in range(lanes)])
            build.store(value, build.offset(out, v, typ))

    def masked(v: Index) -> None:
        for c, run, out in zip(copies, runs, outs, strict=True):
            build.store(_masked(build, run, c, v, lanes), build.offset(out, v, typ))

    inside = (build.imax(runs[0].lo, runs[1].lo), build.imin(runs[0].hi, runs[1].hi))
    # Even and odd elements of a line have the same guards of the line.
    with _where(build, _holds(build, env, copies[0]), length, tuple(zip(outs, copies, strict=True)), lanes):
        _line(build, x, length, lanes, inside, plain, masked)


def _clamped(build: Builder, x: Index) -> Reg:
    """As i32; runs are far shorter than 2**30 elements."""
    return build.ir.trunc(build.i64(build.imax(build.imin(x, 1 << 30), -(1 << 30))), I32)


def _plain(build: Builder, at: Reg, typ: Type, lanes: int, step: int) -> Reg:
    low = build.load(at, typ, lanes)
    if step == 1:
        return low
    high = build.load(build.offset(at, lanes, typ), typ, lanes)
    return build.shuffle(low, high, [2 * k for k in range(lanes)])


def _masked(build: Builder, run: _Run, copy: _Copy, v: Index, lanes: int) -> Reg:
    """Elements v .. v+lanes of a run, padding where they are outside."""
    typ = reg_type(copy.load.dtype)
    at = build.offset(run.src, build.mul(v, copy.step), typ)
    place = build.splat(build.ir.trunc(build.i64(v), I32), lanes)
    inside = _within(build, list(range(lanes)), place, run.low, run.high)
    if copy.step == 1:
        value = build.masked_load(at, typ, inside)
    else:
        none = 1 << 30  # elements between: never wanted
        parts = []
        for half in range(2):
            first = half * lanes
            wanted = [(first + k) // 2 if (first + k) % 2 == 0 else none for k in range(lanes)]
            mask = _within(build, wanted, place, run.low, run.high)
            parts.append(build.masked_load(build.offset(at, first, typ), typ, mask))
        value = build.shuffle(parts[0], parts[1], [2 * k for k in range(lanes)])
    if copy.pad is None or (copy.pad.value == 0 and str(copy.pad.value) != "-0.0"):
        return value
    return build.select(inside, value, build.splat(literal(build, copy.pad), lanes))


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
