"""Sliding windows over planes: depthwise convolution, max and average pooling, vectorised along the output line.

[Note: bands]

    task: a range of units; unit = (plane, band of output lines)
      copy the source lines the band needs into scratch, padding included: one part per phase of the stride, so that
      every tap is a contiguous vector load and no guard is left
      for R output lines at a time, for each vector along x:
        acc[r] = combine over taps of weight * line[r, tap]     (a loaded vector serves all lines that use it)
        epilogue, stores (masked at the right edge)

A band is small enough to stay in L1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxfuse.analysis.pairs import fits_half
from onnxfuse.analysis.windows import Slide, Window, window
from onnxfuse.codegen.build import I1, I64, PTR, VOID, Builder, Index, Reg, Type, reg_type
from onnxfuse.codegen.prims import lower
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr, emit_store, literal, open_kernel
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, acc, i64, load, substitute, sym, var, where
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.ir.simplify import dim_expr, simplify
from onnxfuse.target import Target
from onnxfuse.templates.estimate import epilogue_cost, points, pointwise_seconds
from onnxfuse.templates.packing import Line, decode, pack_block, pack_pairs, pieces

MAX_TAPS = 64  # taps are unrolled
LINES = 4  # output lines computed together: a loaded line serves up to that many
LONG_EPILOGUE = 24  # cost from which fewer lines are computed together, for the sake of code size
TASK_WORK = 1 << 17  # products worth a task: about 5 us
MAX_TASKS = 32
CHEAP_EPILOGUE = 8  # cost up to which a short line's epilogue is repeated for parts of it
STACK = 24 * 1024  # bytes of a band up to which it lives on the stack
COPY_SECONDS = 1.2e-10  # per element of the source: measured, 8 lanes


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """Sizes at run time. Lengths in elements; a source line is `phases` parts of `part` elements."""

    width: Index
    height: Index
    part: Index
    line: Index
    lines: Index  # output lines of a band
    bands: Index
    slice: Index  # scratch elements of one task
    units: Index
    tasks: Index


class Windowed:
    """The template: see the note above."""

    name = "window"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule, or why the kernel is no window over planes."""
        w = window(kernel)
        if isinstance(w, Refusal):
            return w
        if w.acc not in (DType.F32, DType.F64) and not _of_halves(w):
            return Refusal("WINDOW_DTYPE", f"accumulates in {w.acc}")
        if w.taps > MAX_TAPS:
            return Refusal("WINDOW_TAPS", f"{w.taps} taps, at most {MAX_TAPS} are unrolled")
        assert w.x.out is not None
        width = w.x.out.extent
        lanes = target.lanes_along(w.acc.bytes, width)
        if isinstance(width, int) and width < max(2, lanes // 4):
            return Refusal("WINDOW_NARROW", f"output lines of {width}, vectors of {lanes}")
        lines = 1 if w.y.out is None else LINES if epilogue_cost(w.finish, w.stores) < LONG_EPILOGUE else LINES // 2
        return [
            Schedule(
                self.name,
                lanes=lanes,
                vector=w.x.out.name,
                unroll=lines,
                grain=TASK_WORK,
                cost=_cost(w, target),
            )
        ]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI."""
        w = window(kernel)
        assert isinstance(w, Window), w
        budget = target.l1 // 2 // w.acc.bytes
        with build.function("tasks.0", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            build.ret(_shape(build, env, w, schedule, budget).tasks)
        with build.function("scratch", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            s = _shape(build, env, w, schedule, budget)
            build.ret(build.mul(build.mul(s.tasks, _choose(build, _on_stack(build, s, w), 0, s.slice)), w.acc.bytes))
        with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
            env_ptr, bufs, _, scratch, task = fn.args
            env = open_kernel(build, kernel, env_ptr, bufs)
            s = _shape(build, env, w, schedule, budget)
            mine = _band(build, s, w, scratch, task)
            first = build.udiv(build.mul(task, s.units), s.tasks)
            last = build.udiv(build.mul(build.add(task, 1), s.units), s.tasks)
            with build.loop(first, last, name="unit") as unit:
                plane = env.at(decode(build, env, w.planes, build.udiv(unit, s.bands)))
                start = build.mul(build.umod(unit, s.bands), s.lines)
                _run_unit(build, plane, w, s, schedule, start, mine)
        return Emitted()


WINDOW = Windowed()


def _of_halves(w: Window) -> bool:
    """Sums of products of integers that fit into 16 bits (one zero point taken off a byte, say)."""
    if w.acc is not DType.I32 or w.weight is None or w.combine.name != "add":
        return False
    return fits_half(w.weight) and fits_half(w.value)


def _cost(w: Window, target: Target) -> float:
    """Seconds on one core: taps at a third of peak, the copy of the source and the epilogue, or the traffic."""
    outputs = points((*w.planes, w.x.out, w.y.out))
    inputs = outputs * w.x.stride * w.y.stride
    scale = w.acc.bytes / 4
    taps = 2 * w.taps * outputs * scale / (target.peak * 0.3)
    copy = inputs * scale * COPY_SECONDS
    pointwise = outputs * epilogue_cost(w.finish, w.stores) + inputs * epilogue_cost(w.value, ())
    epilogue = pointwise_seconds(pointwise, target, w.acc.bytes)
    return max(taps + copy + epilogue, (inputs + outputs) * w.acc.bytes / (4 * target.bw)) + 2e-6


# ---- sizes ----


def _extent(build: Builder, env: Env, axis: Axis | None) -> Index:
    return 1 if axis is None else emit_dim(build, env, axis.extent)


def _tail_reach(x: Slide) -> int:
    """Elements a part needs beyond the output width."""
    return (x.reach - 1) // x.stride


def _shape(build: Builder, env: Env, w: Window, schedule: Schedule, budget: int) -> _Shape:
    lanes, group = schedule.lanes, schedule.unroll
    width, height = _extent(build, env, w.x.out), _extent(build, env, w.y.out)
    slack = -(-_tail_reach(w.x) // lanes) * lanes
    part = build.add(build.mul(build.ceildiv(width, lanes), lanes), slack)
    line = build.mul(part, w.x.stride)
    fitting = build.imax(build.sub(build.udiv(budget, build.imax(line, 1)), w.y.reach), 0)
    most = build.imax(build.mul(build.udiv(build.udiv(fitting, w.y.stride), group), group), group)
    bands = build.ceildiv(height, most)
    lines = build.mul(build.ceildiv(build.ceildiv(height, build.imax(bands, 1)), group), group)
    rows = build.add(build.mul(lines, w.y.stride), w.y.reach)
    size = build.mul(build.ceildiv(build.add(build.mul(rows, line), lanes), 64), 64)
    planes: Index = 1
    for axis in w.planes:
        planes = build.mul(planes, emit_dim(build, env, axis.extent))
    # An empty line has no work at all, whatever the other extents are.
    units = build.mul(build.mul(planes, bands), build.imin(width, 1))
    work = build.mul(build.mul(planes, build.mul(width, height)), w.taps)
    tasks = build.imin(units, build.imin(build.add(build.udiv(work, TASK_WORK), 1), MAX_TASKS))
    return _Shape(width, height, part, line, lines, bands, size, units, tasks)


# ---- one unit ----


def _on_stack(build: Builder, s: _Shape, w: Window) -> Index:
    """The band fits on the stack (1 or 0)."""
    most = STACK // w.acc.bytes
    if isinstance(s.slice, int):
        return int(s.slice <= most)
    return build.ir.zext(build.ir.icmp_signed("<=", s.slice, build.i64(most)), I64)


def _choose(build: Builder, yes: Index, a: Index, b: Index) -> Index:
    if isinstance(yes, int):
        return a if yes else b
    return build.ir.select(build.ir.trunc(yes, I1), build.i64(a), build.i64(b))


def _band(build: Builder, s: _Shape, w: Window, scratch: Reg, task: Reg) -> Reg:
    """Where the task keeps its band: on the stack, which is in L1 already, or in its slice of scratch."""
    typ, stack = reg_type(w.acc), _on_stack(build, s, w)
    if stack == 0:
        return build.offset(scratch, build.mul(task, s.slice), typ)
    size = s.slice if isinstance(s.slice, int) else STACK // w.acc.bytes
    home = build.alloca(typ, size)
    if stack == 1:
        return home
    other = build.offset(scratch, build.mul(task, s.slice), typ)
    return build.ir.select(build.ir.trunc(stack, I1), home, other)


def _run_unit(build: Builder, plane: Env, w: Window, s: _Shape, schedule: Schedule, start: Index, mine: Reg) -> None:
    stop = build.imin(build.add(start, s.lines), s.height)
    _copy_lines(build, plane, w, s, schedule.lanes, start, stop, mine)
    weights = _weights(build, plane, w)
    group = schedule.unroll
    whole = build.add(start, build.mul(build.udiv(build.sub(stop, start), group), group))
    spans = [(start, whole, group)] + ([(whole, stop, 1)] if group > 1 else [])
    for first, last, count in spans:
        with build.loop(first, last, count, name="y") as y:
            base = build.mul(build.mul(build.sub(y, start), w.y.stride), s.line)
            here = build.offset(mine, base, reg_type(w.acc))
            _lines(build, plane, w, s, schedule.lanes, weights, y, count, here)


def _copy_lines(
    build: Builder, plane: Env, w: Window, s: _Shape, lanes: int, start: Index, stop: Index, mine: Reg
) -> None:
    """Source lines of output lines start..stop, each as `stride` parts, padding written out."""
    endless = sym("window.any")  # these axes have no bound that could prove a guard away
    row, col = Axis("row", endless), Axis("col", endless)
    rows = build.add(build.mul(build.sub(build.sub(stop, start), 1), w.y.stride), w.y.reach)
    # Lanes without an output compute as well: padding there, since leftovers might be denormal, which takes Intel's
    # cores a hundred cycles an operation.
    count = build.add(build.imax(s.width, lanes), _tail_reach(w.x))
    place = plane if w.y.out is None else plane.at({w.y.out: build.i64(start)})
    exprs = [_source(w, row, col, phase) for phase in range(w.x.stride)]
    dsts = [build.offset(mine, build.mul(s.part, phase), reg_type(w.acc)) for phase in range(w.x.stride)]
    outer, inner = Line((row,), 0, rows), Line((col,), 0, count)
    if w.x.stride == 2:
        pack_pairs(build, place, (exprs[0], exprs[1]), outer, inner, (dsts[0], dsts[1]), s.line, lanes)
        return
    for value, dst in zip(exprs, dsts, strict=True):
        pack_block(build, place, value, outer, inner, dst, s.line, lanes)


def _source(w: Window, row: Axis, col: Axis, phase: int) -> Expr:
    """Element `stride * col + phase` of source line `row` (counted from the first one of the band), or padding."""
    index = list(w.source.index)
    index[-1] = simplify(var(col) * w.x.stride + (phase + w.x.offset))
    guard: Expr = (index[-1] >= 0) & (index[-1] < dim_expr(w.x.size))
    if w.y.out is not None or w.y.tap is not None:
        above: Expr = i64(0) if w.y.out is None else var(w.y.out) * w.y.stride
        index[-2] = simplify(above + var(row) + w.y.offset)
        guard = guard & (index[-2] >= 0) & (index[-2] < dim_expr(w.y.size))
    element = load(w.source.source, tuple(index), w.source.dtype)
    return where(simplify(guard), substitute(w.value, {w.source: element}), w.pad)


def _weights(build: Builder, plane: Env, w: Window) -> dict[tuple[int, int], Reg]:
    """The weight of each tap of this plane, as scalars."""
    out: dict[tuple[int, int], Reg] = {}
    if w.weight is None:
        return out
    for ky in range(w.y.taps):
        for kx in range(w.x.taps):
            at = {a: build.i64(k) for a, k in ((w.y.tap, ky), (w.x.tap, kx)) if a is not None}
            value = emit_expr(build, plane.at(at), w.weight)
            # The other half is 0: whatever the sign of an element puts there is not added.
            out[ky, kx] = value if w.acc.is_float else build.ir.and_(value, build.like(value, 0xFFFF))
    return out


def _lines(
    build: Builder,
    plane: Env,
    w: Window,
    s: _Shape,
    lanes: int,
    weights: dict[tuple[int, int], Reg],
    y: Reg,
    count: int,
    base: Reg,
) -> None:
    """`count` output lines from y on."""
    whole = build.mul(build.udiv(s.width, lanes), lanes)
    with build.loop(0, whole, lanes, name="x") as x:
        _vectors(build, plane, w, s, lanes, weights, y, count, base, x)
    if isinstance(whole, int) and whole == s.width:
        return
    if isinstance(s.width, int):
        _last_vector(build, plane, w, s, lanes, weights, y, count, base)
        return
    rest = build.sub(s.width, whole)
    with build.if_then(build.ir.icmp_signed(">", build.i64(rest), build.i64(0))):
        enough = build.ir.icmp_signed(">=", build.i64(s.width), build.i64(lanes))
        with build.if_else(enough, likely=True) as (then, other):
            with then:
                _vectors(build, plane, w, s, lanes, weights, y, count, base, build.i64(build.sub(s.width, lanes)))
            with other:
                mask = build.tail_mask(rest, lanes)
                _vectors(build, plane, w, s, lanes, weights, y, count, base, build.i64(whole), mask)


def _last_vector(
    build: Builder,
    plane: Env,
    w: Window,
    s: _Shape,
    lanes: int,
    weights: dict[tuple[int, int], Reg],
    y: Reg,
    count: int,
    base: Reg,
) -> None:
    """The end of a line of static width without masked stores, which some processors execute slowly.

    The last vector is shifted back over elements that are computed already; lines shorter than a vector are stored in
    pieces if the epilogue is cheap.
    """
    assert isinstance(s.width, int)
    if s.width >= lanes:
        _vectors(build, plane, w, s, lanes, weights, y, count, base, build.i64(s.width - lanes))
    elif epilogue_cost(w.finish, w.stores) > CHEAP_EPILOGUE:
        mask = build.tail_mask(s.width, lanes)
        _vectors(build, plane, w, s, lanes, weights, y, count, base, build.i64(0), mask)
    else:
        _vectors(build, plane, w, s, lanes, weights, y, count, base, build.i64(0), parts=pieces(s.width))


def _vectors(
    build: Builder,
    plane: Env,
    w: Window,
    s: _Shape,
    lanes: int,
    weights: dict[tuple[int, int], Reg],
    y: Reg,
    count: int,
    base: Reg,
    x: Reg,
    mask: Reg | None = None,
    parts: list[tuple[int, int]] | None = None,
) -> None:
    """One vector of each of `count` lines: taps, epilogue, store; the epilogue for `parts` of it where given."""
    typ = reg_type(w.acc)
    at = build.offset(base, x, typ)
    loaded: dict[tuple[int, int], Reg] = {}
    sums: list[Reg] = [build.splat(literal(build, w.init), lanes) for _ in range(count)]

    def tap(r: int, ky: int, kx: int) -> Reg:
        place = (r * w.y.stride + ky * w.y.dilation, kx * w.x.dilation)
        return _tap(build, w, s, typ, lanes, loaded, at, place)

    if w.weight is None and w.combine.name in ("max", "min"):
        _extremes(build, w, lanes, tap, sums)
    else:
        for ky, kx, r in itertools.product(range(w.y.taps), range(w.x.taps), range(count)):
            sums[r] = _combine(build, w, sums[r], tap(r, ky, kx), weights.get((ky, kx)), lanes)
    for r, total in enumerate(sums):
        axes = {} if w.y.out is None else {w.y.out: build.i64(build.add(y, r))}
        for first, size in parts or [(0, lanes)]:
            part = total if size == lanes else build.shuffle(total, total, range(first, first + size))
            part = build.lane(part, 0) if size == 1 else part
            here = plane.at({**axes, _line(w): build.i64(build.add(x, first))})
            _finish(build, here.vector(_line(w), size, mask) if size > 1 else here, w, part, size)


def _extremes(build: Builder, w: Window, lanes: int, tap: Callable[[int, int, int], Reg], sums: list[Reg]) -> None:
    """Extremes, first along source lines, which the output lines share; the result is the same to the bit."""
    lines: dict[int, Reg] = {}
    for ky, r in itertools.product(range(w.y.taps), range(len(sums))):
        row = r * w.y.stride + ky * w.y.dilation
        if row not in lines:
            lines[row] = tap(r, ky, 0)
            for kx in range(1, w.x.taps):
                lines[row] = _combine(build, w, lines[row], tap(r, ky, kx), None, lanes)
        sums[r] = _combine(build, w, sums[r], lines[row], None, lanes)


def _line(w: Window) -> Axis:
    assert w.x.out is not None
    return w.x.out


def _finish(build: Builder, here: Env, w: Window, total: Reg, lanes: int) -> None:
    """The epilogue of one vector."""
    here = here.at(bound={acc(w.acc): total})
    if w.result is not None:
        here = here.at(bound={w.result: build.widen(emit_expr(build, here, w.finish), lanes)})
    for store in w.stores:
        emit_store(build, here, store.target, store.index, store.value)


def _tap(
    build: Builder,
    w: Window,
    s: _Shape,
    typ: Type,
    lanes: int,
    loaded: dict[tuple[int, int], Reg],
    at: Reg,
    place: tuple[int, int],
) -> Reg:
    """Source vector `place` = (lines, elements) from the first one of this output vector."""
    found = loaded.get(place)
    if found is None:
        row, step = place
        phase, q = step % w.x.stride, step // w.x.stride
        offset = build.add(build.add(build.mul(s.line, row), build.mul(s.part, phase)), q)
        found = build.load(build.offset(at, offset, typ), typ, lanes)
        loaded[place] = found
    return found


def _combine(build: Builder, w: Window, total: Reg, value: Reg, weight: Reg | None, lanes: int) -> Reg:
    if weight is None:
        return lower(build, w.combine.name, [total, value], w.acc, w.acc)
    if w.acc.is_float:
        return build.fma(build.splat(weight, lanes), value, total)
    return build.ir.add(build.pair_products(build.splat(weight, lanes), value), total)
