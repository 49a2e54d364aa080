"""rowwise: the general template. Runs every kernel as parallel outer loops around vector loops.

First the loop nest is tidied (nest.py). Then one of two shapes is chosen by the strides of the accesses:

  outer   lanes lie along one outer axis; stages (which have no axes of their own then) run once per vector, with
          reductions as plain loops and one accumulator per lane. Elementwise, column reductions, pools, contractions
  row     lanes lie along the last axis of each stage, or of its reduction: several vector accumulators in a fixed
          order, combined at the end. Row reductions, softmax, layer norm

Work is cut into units (an outer point, and in shape `outer` a block of the vector axis too), units into at most
`MAX_TASKS` tasks; both depend on dimensions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onnxfuse.codegen.build import (
    I1,
    I8,
    I64,
    PTR,
    VOID,
    Builder,
    Index,
    Reg,
    is_vector,
    lanes_of,
    mem_type,
    reg_type,
    vec,
)
from onnxfuse.codegen.prims import lower
from onnxfuse.codegen.scalar_expr import (
    Buffer,
    Env,
    affine,
    contiguous,
    emit_dim,
    emit_expr,
    emit_store,
    flat_index,
    in_range,
    literal,
    open_kernel,
)
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import (
    Apply,
    Expr,
    Load,
    acc,
    i64,
    lit,
    load,
    loads,
    var,
    walk,
)
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.ir.prims import Prim
from onnxfuse.ir.simplify import as_dim, simplify
from onnxfuse.ir.types import Dim, TensorType
from onnxfuse.target import Target
from onnxfuse.templates.estimate import expected
from onnxfuse.templates.nest import Nest, Segment, Step, segments, stage_roots, stage_stores, tidy, turn_roots

MAX_TASKS = 64  # enough to balance any core count we meet
GRAIN = 1 << 19  # bytes moved, or as much arithmetic, worth a task: about 20 us
BLOCK = 8192  # elements of the vector axis in one unit
STACK = 64 * 1024  # bytes of private buffers that may live on the stack
FUNCTION = 12  # cost from which a primitive is a function rather than an instruction
NATIVE = ("exp", "log", "log1p", "tanh", "erf")  # functions that run in f32
ROW = "(row)"  # Schedule.vector of shape `row`: not a name an axis may have


# ---- choosing a shape ----


@dataclass(frozen=True, slots=True)
class Tile:
    """Loads that walk memory along `axis` instead of the vector axis: squares of them are transposed in registers."""

    axis: Axis
    loads: frozenset[Load]
    weave: bool = False  # instead: all of the few points of `axis`, whose stores are woven into consecutive vectors


def _weave(nest: Nest, vector: Axis, lanes: int) -> Tile | None:
    """A short second axis (two to four channels, innermost) across which vectors along `vector` are stored."""
    if len(nest.stages) != 1:
        return None
    stores = nest.stages[0].stores
    if any(not st.index or st.target.tensor.dtype is DType.BOOL for st in stores):
        return None
    for a in nest.outer:
        if a is vector or not isinstance(a.extent, int) or not 2 <= a.extent <= 4:
            continue
        steps = {(_step(st.target, st.index, a), _step(st.target, st.index, vector)) for st in stores}
        if steps == {(1, a.extent)}:
            return Tile(a, frozenset(), weave=True)
    return None


def _tile(nest: Nest, vector: Axis | None, lanes: int) -> Tile | None:
    """The best second axis for the loads that are not contiguous along the vector axis, if any."""
    if vector is None or lanes not in (2, 4, 8, 16) or any(s.axes or s.reduce for s in nest.stages):
        return None
    crossing = []
    for ld in dict.fromkeys(ld for s in nest.stages for ld in loads(*stage_roots(s))):
        split = affine(_flat(ld.source, ld.index), var(vector))
        if split is not None and ld.dtype is not DType.BOOL and in_range(ld) and as_dim(split[1]) not in (0, 1, -1):
            crossing.append(ld)
    best: Tile | None = None
    for a in nest.outer:
        if a is vector or (isinstance(a.extent, int) and a.extent < lanes):
            continue
        along = frozenset(ld for ld in crossing if _step(ld.source, ld.index, a) == 1)
        if along and (best is None or len(along) > len(best.loads)):
            best = Tile(a, along)
    return best or _weave(nest, vector, lanes)


def _flat(source: Value, index: tuple[Expr, ...]) -> Expr:
    """Offset of an access in a contiguous value."""
    strides: list[Expr] = []
    step: Expr = i64(1)
    for d in reversed(source.tensor.shape):
        strides.append(step)
        step = simplify(step * d)
    return flat_index(index, tuple(reversed(strides)))


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything the emitter needs to know beside the nest."""

    kernel: Kernel
    nest: Nest
    axis: Axis | None  # shape `outer`: the vector axis
    row: bool
    lanes: int
    unroll: int
    masked: bool  # tails by masked vectors; else by a scalar loop
    tile: Tile | None = None


def _element_bytes(nest: Nest) -> int:
    """Widest element the lanes must hold; i64 index arithmetic does not count."""
    wide = 1
    for s in nest.stages:
        for e in walk(*stage_roots(s)):
            if isinstance(e, Load) or (isinstance(e, Apply) and e.dtype is not DType.I64):
                wide = max(wide, e.dtype.compute.bytes)
        wide = max([wide, *(st.target.tensor.dtype.compute.bytes for st in stage_stores(s))])
        if s.reduce is not None:
            wide = max(wide, s.reduce.acc.bytes)
    return wide


def _maskable(nest: Nest, target: Target) -> bool:
    """Masked loads and stores of every accessed type are instructions."""
    if "avx512bw" in target.features:
        return True
    if "avx2" not in target.features:
        return False
    dtypes = {e.dtype for s in nest.stages for e in walk(*stage_roots(s)) if isinstance(e, Load)}
    dtypes |= {st.target.tensor.dtype for s in nest.stages for st in stage_stores(s)}
    return all(d.bytes >= 4 for d in dtypes)


def _step(source: Value, index: tuple[Expr, ...], axis: Axis) -> int | None:
    """Stride in elements along `axis`; None when it is not a constant."""
    split = affine(_flat(source, index), var(axis))
    if split is None:
        return None
    known = as_dim(split[1])
    return known if isinstance(known, int) else None


def _access_cost(source: Value, index: tuple[Expr, ...], axis: Axis | None, lanes: int) -> float:
    """Cost of one access per element, in units of one vector operation per lane."""
    if axis is None or lanes == 1:
        return 1.0
    step = _step(source, index, axis)
    if step == 0:
        return 0.5 / lanes
    if step in (1, -1):
        return 1.0 / lanes
    return 1.5 / lanes if step == 2 else 1.5


def _body_cost(exprs: Sequence[Expr], axis: Axis | None, lanes: int, tile: Tile | None = None) -> float:
    """Cost of evaluating `exprs` once per element."""
    total = 0.0
    for e in walk(*exprs):
        if isinstance(e, Load) and tile is not None and e in tile.loads:
            total += 5.0 / lanes
        elif isinstance(e, Load):
            total += _access_cost(e.source, e.index, axis, lanes)
        elif isinstance(e, Apply):
            total += e.prim.cost / lanes
    return total


def _extent(d: Dim) -> int:
    return int(expected(d))


def _points(axes: Sequence[Axis]) -> float:
    return float(math.prod(_extent(a.extent) for a in axes))


def _fill(axis: Axis | None, lanes: int) -> float:
    """Lanes paid for over lanes used."""
    if axis is None or not isinstance(axis.extent, int) or axis.extent == 0:
        return 1.0
    return math.ceil(axis.extent / lanes) * lanes / axis.extent


def _reduce_axis(stage: Step, lanes: int) -> tuple[Axis, ...]:
    """Reduce axes with the one to vectorise last: the best strides win, then the later axis."""
    assert stage.reduce is not None
    body = turn_roots(stage)
    axes = stage.reduce.axes
    best = min(axes, key=lambda a: (_body_cost(body, a, lanes) * _fill(a, lanes), -axes.index(a)))
    return (*(a for a in axes if a is not best), best)


def _inner_axis(stage: Step, lanes: int) -> Axis | None:
    """Shape `row`: the axis the lanes of a stage lie along; one of its own axes (the last) or of its reduction."""
    own = stage.axes[-1] if stage.axes else None
    if stage.reduce is None or not stage.reduce.axes:
        return own
    along = _reduce_axis(stage, lanes)[-1]
    if own is None:
        return along
    body = turn_roots(stage)
    own_cost = _body_cost(body, own, lanes) * _fill(own, lanes)
    return own if own_cost <= 1.2 * _body_cost(body, along, lanes) * _fill(along, lanes) else along


def _cycles(nest: Nest, axis: Axis | None, row: bool, lanes: int) -> float:
    """Predicted vector operations of the whole kernel."""
    total = 0.0
    tile = None if row else _tile(nest, axis, lanes)
    for s in nest.stages:
        along = _inner_axis(s, lanes) if row else axis
        points = _points(nest.outer) * _points(s.axes)
        width = lanes if along is not None else 1
        stores = [st.value for st in s.stores]
        own = along if s.reduce is None or along not in s.reduce.axes else None
        cost = _body_cost(stores, own, width if own is not None else 1, tile)
        woven = tile is not None and tile.weave
        cost += sum(2.0 / lanes if woven else _access_cost(st.target, st.index, own, width) for st in s.stores)
        total += points * cost * (_fill(own, width) if own is not None else 1.0)
        if s.reduce is not None and s.reduce_body is not None:
            body = _body_cost(turn_roots(s), along, width) + (2.0 + len(s.side)) / width
            total += points * _points(s.reduce.axes) * body * _fill(along, width)
            total += points * 8 if own is None and along is not None else 0
    return total


def _bytes(kernel: Kernel) -> float:
    used = {ld.source for ld in kernel.loads} | set(kernel.outputs)
    values = [v for v in (*kernel.inputs, *kernel.outputs) if v in used and v.type is not None]
    return float(sum(math.prod(_extent(d) for d in v.tensor.shape) * v.tensor.dtype.bytes for v in values))


def _candidates(kernel: Kernel, nest: Nest) -> list[tuple[Axis | None, bool]]:
    """(vector axis, row?) worth a look; the last entry is scalar code."""
    private = {v.value for v in kernel.locals}
    buffers = any(
        nest.views.get(st.target, st.target) in private and st.index for s in nest.stages for st in stage_stores(s)
    )
    flat = not buffers and not any(s.axes for s in nest.stages)
    out: list[tuple[Axis | None, bool]] = []
    if flat:
        out += [(a, False) for a in reversed(nest.outer)]
    if any(s.axes or (s.reduce and s.reduce.axes) for s in nest.stages):
        out.append((None, True))
    return out or [(None, False)]


def _unroll(stages: Sequence[Step]) -> int:
    """Vectors per iteration: more for light bodies."""
    costs = [e.prim.cost for s in stages for e in walk(*stage_roots(s)) if isinstance(e, Apply)]
    ops = sum(costs)
    if max(costs, default=0) >= FUNCTION:  # its constants fill the registers
        native = all(_narrow(r) for s in stages for r in stage_roots(s))
        return 4 if native and ops <= 40 else 2 if ops <= 24 else 1
    return 4 if ops <= 16 else 2 if ops <= 48 else 1


def _narrow(root: Expr) -> bool:
    """Nothing but f32 arithmetic: in vectors of several registers it costs no more than in one."""
    stack = [root]
    while stack:
        e = stack.pop()
        if isinstance(e, Load):  # its index is no arithmetic of the lanes
            if e.dtype is not DType.F32 or not in_range(e):
                return False
        elif isinstance(e, Apply):
            if e.prim.name in ("lt", "le", "eq") and e.args[0].dtype is DType.F32:
                pass
            elif e.dtype is not DType.F32 or (e.prim.cost >= FUNCTION and e.prim.name not in NATIVE):
                return False
            stack.extend(e.args)
    return True


def _wide(stages: Sequence[Step], axis: Axis) -> bool:
    """Let one vector span several registers: the operations of a function then take turns, which hides their latency.

    The processor cannot do that by itself: the chain of one vector fills its window.
    """
    roots = [r for s in stages for r in stage_roots(s)]
    if not any(isinstance(e, Apply) and e.prim.name in NATIVE for e in walk(*roots)):
        return False
    if not all(_narrow(r) for r in roots):
        return False
    reads = ((ld.source, ld.index) for ld in loads(*roots))
    writes = ((st.target, st.index) for s in stages for st in stage_stores(s))
    return all(_step(source, index, axis) in (0, 1) for source, index in (*reads, *writes))


class Rowwise:
    """The general template; takes every kernel."""

    name = "rowwise"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule per possible vector axis, cheapest first."""
        nest = tidy(kernel)
        lanes = target.lanes(_element_bytes(nest))
        rate = target.peak / (4 * target.lanes(4))  # one vector operation per cycle, peak = 2 fma
        floor = _bytes(kernel) / target.bw
        out = []
        for axis, row in _candidates(kernel, nest):
            cost = max(floor, _cycles(nest, axis, row, lanes) / rate)
            name = ROW if row else axis.name if axis is not None else ""
            width = lanes if row or axis is not None else 1
            steps = [_unroll([s]) for s in nest.stages] if row else [_unroll(nest.stages)]
            out.append(Schedule(self.name, width, name, unroll=max(steps), grain=GRAIN, cost=cost))
        return sorted(out, key=lambda s: s.cost)

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write K.tasks.0, K.run.0 and K.scratch."""
        nest = tidy(kernel)
        row = schedule.vector == ROW
        axis = None if row else next((a for a in reversed(nest.outer) if a.name == schedule.vector), None)
        lanes = schedule.lanes if row or axis is not None else 1
        tile = _tile(nest, axis, lanes)
        spec = _Spec(kernel, nest, axis, row, lanes, schedule.unroll, _maskable(nest, target), tile)
        with build.function("tasks.0", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            build.ret(_split(build, env, spec, schedule.grain).tasks)
        with build.function("scratch", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            each = _local_bytes(build, env, kernel)
            tasks = 0 if each == 0 else _split(build, env, spec, schedule.grain).tasks
            build.ret(build.mul(tasks, each))
        with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
            env = open_kernel(build, kernel, fn.args[0], fn.args[1])
            env = _with_locals(build, env, spec, fn.args[3], fn.args[4])
            env = env.at(buffers=_views(build, env, nest))
            _run(build, env, spec, schedule.grain, fn.args[4])
        return Emitted(phases=1)


ROWWISE = Rowwise()


# ---- buffers ----


def _on_stack(kernel: Kernel) -> bool:
    sizes = [v.value.tensor for v in kernel.locals]
    return all(t.static for t in sizes) and sum(_static_bytes(t) for t in sizes) <= STACK


def _static_bytes(t: TensorType) -> int:
    size = t.size
    assert isinstance(size, int)
    return -(-size * t.dtype.bytes // 64) * 64


def _local_bytes(build: Builder, env: Env, kernel: Kernel) -> Index:
    """Scratch bytes of one task; 0 when the private buffers are on the stack."""
    if _on_stack(kernel):
        return 0
    total: Index = 0
    for v in kernel.locals:
        if v.type.rank:
            total = build.add(total, _padded(build, env, v.type))
    return total


def _padded(build: Builder, env: Env, t: TensorType) -> Index:
    """Bytes of a buffer, rounded up to 64."""
    size = build.mul(emit_dim(build, env, t.size), t.dtype.bytes)
    return build.mul(build.udiv(build.add(size, 63), 64), 64)


def _with_locals(build: Builder, env: Env, spec: _Spec, scratch: Reg, task: Reg) -> Env:
    kernel = spec.kernel
    buffers: dict[Value, Buffer] = {}
    stack = _on_stack(kernel)
    at: Index = 0 if stack else build.mul(task, _local_bytes(build, env, kernel))
    for v in kernel.locals:
        if not v.type.rank:
            continue
        if stack:
            ptr = build.alloca(I8, max(64, _static_bytes(v.type)))
        else:
            ptr = build.offset(scratch, at, I8)
            at = build.add(at, _padded(build, env, v.type))
        buffers[v.value] = Buffer(ptr, v.type.dtype, contiguous(build, list(v.type.shape)))
    return env.at(buffers=buffers)


def _views(build: Builder, env: Env, nest: Nest) -> dict[Value, Buffer]:
    out: dict[Value, Buffer] = {}
    for stand_in, source in nest.views.items():
        if source in env.buffers:
            base = env.buffers[source]
            strides = contiguous(build, list(stand_in.tensor.shape))
            out[stand_in] = Buffer(base.ptr, base.dtype, strides, base.invariant)
    return out


# ---- tasks ----


@dataclass(frozen=True, slots=True)
class _Split:
    digits: tuple[Index, ...]  # extents of the odometer: outer axes, then blocks of the vector axis
    units: Index
    per_task: Index
    tasks: Index


def _tile_width(spec: _Spec) -> int:
    """Extent of a tile along its own axis: a cache line, so that every line is read once."""
    if spec.tile is not None and spec.tile.weave:
        assert isinstance(spec.tile.axis.extent, int)
        return spec.tile.axis.extent
    return spec.lanes * max(1, 64 // (spec.lanes * _element_bytes(spec.nest)))


def _outer_axes(spec: _Spec) -> tuple[Axis, ...]:
    return tuple(a for a in spec.nest.outer if a is not spec.axis)


def _split(build: Builder, env: Env, spec: _Spec, grain: int) -> _Split:
    """Cut the work into tasks; depends on dimensions only."""
    digits = [emit_dim(build, env, a.extent) for a in _outer_axes(spec)]
    unit: Index = 1  # points of one unit
    if spec.tile is not None:
        width = _tile_width(spec)
        k = _outer_axes(spec).index(spec.tile.axis)
        unit = build.imin(digits[k], width)
        digits[k] = build.ceildiv(digits[k], width)
    if spec.axis is not None:
        extent = emit_dim(build, env, spec.axis.extent)
        digits.append(build.ceildiv(extent, BLOCK))
        unit = build.mul(unit, build.imin(extent, BLOCK))
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
    return _Split(tuple(digits), units, per, build.udiv(build.add(units, build.sub(per, 1)), per))


def _weight(build: Builder, env: Env, spec: _Spec) -> Index:
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


def _run(build: Builder, env: Env, spec: _Spec, grain: int, task: Reg) -> None:
    """The units of one task: an odometer over the outer axes (and blocks of the vector axis)."""
    split = _split(build, env, spec, grain)
    first = build.mul(task, split.per_task)
    last = build.imin(build.add(first, split.per_task), split.units)
    start: list[Reg] = []
    rest: Index = first
    for d in reversed(split.digits):
        start.append(build.i64(build.umod(rest, d)))
        rest = build.udiv(rest, d)
    start.reverse()
    with build.carry(first, last, 1, start, "unit") as it:
        _unit(build, env, spec, it.values)
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


def _unit(build: Builder, env: Env, spec: _Spec, digits: Sequence[Reg]) -> None:
    axes = dict(zip(_outer_axes(spec), digits, strict=False))
    here = env.at(axes)
    if spec.axis is None:
        for stage in spec.nest.stages:
            here = _row_stage(build, here, spec, stage) if spec.row else _plain_stages(build, [here], [stage])[0]
        return
    extent = emit_dim(build, env, spec.axis.extent)
    low: Index = 0
    high: Index = extent
    if not (isinstance(extent, int) and extent <= BLOCK):
        low = build.mul(digits[-1], BLOCK)
        high = build.imin(build.add(low, BLOCK), extent)

    def body(envs: list[Env], _part: int, accs: list[Reg], stages: tuple[Step, ...] = spec.nest.stages) -> list[Reg]:
        _plain_stages(build, envs, stages)
        return accs

    if spec.tile is None:
        static = isinstance(low, int) and isinstance(high, int)
        cuts = segments(spec.nest.stages, spec.axis) if static else [Segment(low, high, spec.nest.stages)]
        for cut in cuts:
            wide = _wide(cut.stages, spec.axis) and not any(s.reduce for s in cut.stages)
            work = partial(body, stages=cut.stages)
            _sweep(build, here, spec, spec.axis, cut.low, cut.high, spec.unroll, [], work, wide, True)
        return
    width = _tile_width(spec)
    across = spec.tile.axis
    left = build.mul(here.axes[across], width)
    right = build.imin(build.add(left, width), emit_dim(build, env, across.extent))
    whole = build.add(low, build.mul(build.udiv(build.sub(high, low), spec.lanes), spec.lanes))
    square = _stop_unless(build, build.sub(right, left), width, low, whole)
    with build.loop(low, square, spec.lanes, "tile") as v:
        if spec.tile.weave:
            _woven(build, here.at({spec.axis: v, across: build.i64(left)}), spec, width)
        for k in range(0, 0 if spec.tile.weave else width, spec.lanes):
            _transposed(build, here.at({spec.axis: v, across: build.i64(build.add(left, k))}), spec, spec.tile)
    with build.loop(left, right, 1, across.name) as w:
        _sweep(build, here.at({across: w}), spec, spec.axis, square, high, 1, [], body)


def _stop_unless(build: Builder, size: Index, full: int, low: Index, high: Index) -> Index:
    """`high` if size == full, else `low`."""
    if isinstance(size, int):
        return high if size == full else low
    return build.select(build.ir.icmp_signed("==", size, build.i64(full)), build.i64(high), build.i64(low))


def _transposed(build: Builder, env: Env, spec: _Spec, tile: Tile) -> None:
    """One square: load the crossing loads along the tile's axis, transpose, and evaluate along the vector axis."""
    assert spec.axis is not None
    n = spec.lanes
    v, w = env.axes[spec.axis], env.axes[tile.axis]
    rows = [env.at({spec.axis: build.i64(build.add(v, k))}).vector(tile.axis, n) for k in range(n)]
    bound: list[dict[Expr, Reg]] = [{} for _ in range(n)]
    for ld in (e for s in spec.nest.stages for e in loads(*stage_roots(s)) if e in tile.loads):
        columns = build.transpose([build.widen(emit_expr(build, r, ld), n) for r in rows])
        for known, column in zip(bound, columns, strict=True):
            known[ld] = column
    envs = [
        env.at({tile.axis: build.i64(build.add(w, k))}, bound=known).vector(spec.axis, n)
        for k, known in enumerate(bound)
    ]
    _plain_stages(build, envs, spec.nest.stages)


def _woven(build: Builder, env: Env, spec: _Spec, width: int) -> None:
    """Vectors of all points of a short axis, stored as one run of consecutive elements."""
    assert spec.axis is not None
    assert spec.tile is not None
    n, across = spec.lanes, spec.tile.axis
    envs = [env.at({across: build.i64(k)}).vector(spec.axis, n) for k in range(width)]
    for st in spec.nest.stages[0].stores:
        rows = [build.widen(emit_expr(build, e, st.value), n) for e in envs]
        both = [build.shuffle(a, b, range(2 * n)) for a, b in zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)]
        run = both[0] if len(both) == 1 else build.shuffle(both[0], both[1], range(4 * n))
        run = build.shuffle(run, run, [k * n + lane for lane in range(n) for k in range(width)])
        place = emit_expr(build, env, _flat(st.target, st.index))
        build.store(run, build.offset(env.buffers[st.target].ptr, place, mem_type(st.target.tensor.dtype)))


# ---- vector loops ----

# body(envs, part, accs): one env per vector; part 0 = the unrolled loop, 1 = single vectors and masked tail,
# 2 = scalar tail. Returns the new carried values.
Body = Callable[[list[Env], int, list[Reg]], list[Reg]]


def _sweep(
    build: Builder,
    env: Env,
    spec: _Spec,
    axis: Axis,
    low: Index,
    high: Index,
    unroll: int,
    init: list[Reg],
    body: Body,
    wide: bool = False,
    blocks: bool = False,
) -> list[Reg]:
    """Run `axis` from low to high by vectors, `unroll` of them a turn (`wide`: as one); returns the carried values.

    `blocks`: low is a multiple of every vector width.
    """
    n, u = spec.lanes, unroll
    size = build.sub(high, low)
    # Blocks are multiples of every vector width.
    known = size if isinstance(size, int) else axis.extent
    whole = isinstance(known, int) and known % n == 0
    accs = init
    at: Index = low

    def aligned(lanes: int) -> bool:
        return low % lanes == 0 if isinstance(low, int) else blocks

    def part(stop: Index, step: int, count: int, lanes: int, which: int) -> None:
        nonlocal at, accs
        if isinstance(at, int) and isinstance(stop, int) and at >= stop:
            return
        with build.carry(at, stop, step, accs, axis.name) as it:
            places = [build.i64(build.add(it.index, k * lanes)) for k in range(count)]
            envs = [env.at({axis: place}).vector(axis, lanes, aligned=aligned(lanes)) for place in places]
            it.next = body(envs, which, it.values)
        accs = it.results
        at = stop

    if u > 1 and n > 1:
        stop = build.add(low, build.mul(build.udiv(size, u * n), u * n))
        part(stop, u * n, *((1, u * n) if wide else (u, n)), 0)
    part(build.add(low, build.mul(build.udiv(size, n), n)), n, 1, n, 1)
    if whole or n == 1:
        return accs
    if not spec.masked:
        part(high, 1, 1, 1, 2)
        return accs
    if isinstance(at, int) and isinstance(high, int) and at >= high:
        return accs
    with build.carry(at, high, n, accs, f"{axis.name}.tail") as it:  # at most one turn
        mask = build.tail_mask(build.sub(high, it.index), n)
        it.next = body([env.at({axis: it.index}).vector(axis, n, mask, aligned(n))], 1, it.values)
    return it.results


# ---- stages ----


def _plain_stages(build: Builder, envs: list[Env], stages: Sequence[Step]) -> list[Env]:
    """Stages without axes, for several vectors (or scalars) at once; reductions are loops around all of them."""
    for stage in stages:
        assert not stage.axes
        if stage.reduce is not None:
            accs = _plain_reduce(build, envs, stage, stage.reduce)
            name = acc(stage.reduce.acc)
            envs = [e.at(bound={name: a}) for e, a in zip(envs, accs, strict=True)]
        envs = _store_all(build, envs, stage)
    return envs


def _store_all(build: Builder, envs: list[Env], stage: Step) -> list[Env]:
    """Evaluate all values, then store them; a rank-0 local becomes a bound expression."""
    values = [[emit_expr(build, e, s.value) for s in stage.stores] for e in envs]
    out = []
    for e, row in zip(envs, values, strict=True):
        bound: dict[Expr, Reg] = {}
        for s, v in zip(stage.stores, row, strict=True):
            if not s.index and s.target not in e.buffers:
                bound[load(s.target, (), s.value.dtype)] = v
            else:
                emit_store(build, e, s.target, s.index, v)
        out.append(e.at(bound=bound) if bound else e)
    return out


def _plain_reduce(build: Builder, envs: list[Env], stage: Step, reduce: Reduce) -> list[Reg]:
    """One accumulator per lane and env; plain loops over the reduce axes."""
    typ = reg_type(reduce.acc)
    init = [build.splat(literal(build, reduce.init), e.lanes) for e in envs]
    assert all(v.type == vec(typ, e.lanes) for v, e in zip(init, envs, strict=True))
    return _loops(build, envs, reduce.axes, init, lambda es, accs: _accumulate(build, es, stage, reduce, accs))


def _loops(
    build: Builder,
    envs: list[Env],
    axes: Sequence[Axis],
    accs: list[Reg],
    body: Callable[[list[Env], list[Reg]], list[Reg]],
) -> list[Reg]:
    """Nested scalar loops with carried values around `body`."""
    if not axes:
        return body(envs, accs)
    extent = emit_dim(build, envs[0], axes[0].extent)
    with build.carry(0, extent, 1, accs, axes[0].name) as it:
        inner = [e.at({axes[0]: it.index}) for e in envs]
        it.next = _loops(build, inner, axes[1:], it.values, body)
    return it.results


def _accumulate(build: Builder, envs: list[Env], stage: Step, reduce: Reduce, accs: list[Reg]) -> list[Reg]:
    """Combine body into the accumulator, for each env; lanes that are off keep their value."""
    out = []
    for e, a in zip(envs, accs, strict=True):
        new = lower(build, reduce.combine.name, [a, _summand(build, e, stage, reduce)], reduce.acc, reduce.acc)
        out.append(new if e.mask is None else build.select(e.mask, new, a))
    return out


def _summand(build: Builder, env: Env, stage: Step, reduce: Reduce) -> Reg:
    """What one turn of a reduction combines; stores on the side are made."""
    assert stage.reduce_body is not None
    v = emit_expr(build, env, stage.reduce_body)
    for st in stage.side:
        emit_store(build, env, st.target, st.index, st.value)
    if stage.reduce_body.dtype is not reduce.acc:
        v = lower(build, "cast", [v], stage.reduce_body.dtype, reduce.acc)
    return build.widen(v, env.lanes)


def _row_stage(build: Builder, env: Env, spec: _Spec, stage: Step) -> Env:
    """A stage of shape `row`. Returns the env with what it bound."""
    axis = _inner_axis(stage, spec.lanes)
    if axis is None:
        return _plain_stages(build, [env], [stage])[0]
    reduce = stage.reduce
    if reduce is not None and axis in reduce.axes:
        if not stage.axes:
            return _reduce_row(build, env, spec, stage, reduce)

        def point(envs: list[Env], accs: list[Reg]) -> list[Reg]:
            _reduce_row(build, envs[0], spec, replace(stage, axes=()), reduce)
            return accs

        _loops(build, [env], stage.axes, [], point)
        return env

    def body(envs: list[Env], _part: int, accs: list[Reg]) -> list[Reg]:
        _plain_stages(build, envs, [replace(stage, axes=())])
        return accs

    def line(envs: list[Env], accs: list[Reg]) -> list[Reg]:
        extent = emit_dim(build, envs[0], axis.extent)
        unroll = min(spec.unroll, _unroll([stage]))
        _sweep(build, envs[0], spec, axis, 0, extent, unroll, [], body, _wide([stage], axis))
        return accs

    _loops(build, [env], [a for a in stage.axes if a is not axis], [], line)
    return env


def _reduce_row(build: Builder, env: Env, spec: _Spec, stage: Step, reduce: Reduce) -> Env:
    """Reduce with lanes along the last reduce axis, then store (one scalar)."""
    axes = _reduce_axis(stage, spec.lanes)
    last = axes[-1]
    start = literal(build, lit(identity(reduce.combine.name, reduce.acc), reduce.acc))
    extent = emit_dim(build, env, last.extent)
    whole = isinstance(extent, int) and extent % spec.lanes == 0
    scalar_tail = not whole and not spec.masked and spec.lanes > 1
    unroll = min(spec.unroll, _unroll([stage]))
    wide = unroll > 1 and spec.lanes > 1 and _wide([replace(stage, stores=())], last)
    sizes = [unroll * spec.lanes, spec.lanes] if wide else [spec.lanes] * (unroll if spec.lanes > 1 else 1)
    sizes += [1] if scalar_tail else []
    init = [build.splat(start, n) for n in sizes]
    loose = reduce.combine.name in ("min", "max") and reduce.acc in (DType.F32, DType.F64)
    flags = [build.const(vec(I1, n), 0) for n in sizes] if loose else []

    def body(envs: list[Env], part: int, carried: list[Reg]) -> list[Reg]:
        out = list(carried)
        first = len(sizes) - 1 if part == 2 else 1 if wide and part == 1 else 0
        for k, e in enumerate(envs, first):
            v = _summand(build, e, stage, reduce)
            new = _join(build, reduce, loose, carried[k], v)
            out[k] = new if e.mask is None else build.select(e.mask, new, carried[k])
            if loose:  # comparisons lose NaN: note apart from them that there was one
                bad = lower(build, "isnan", [v], reduce.acc, DType.BOOL)
                bad = bad if e.mask is None else build.ir.and_(bad, e.mask)
                out[k + len(sizes)] = build.ir.or_(carried[k + len(sizes)], bad)
        return out

    def line(envs: list[Env], carried: list[Reg]) -> list[Reg]:
        return _sweep(build, envs[0], spec, last, 0, extent, unroll, carried, body, wide)

    carried = _loops(build, [env], axes[:-1], [*init, *flags], line)
    total = _combine_all(build, carried[: len(sizes)], partial(_join, build, reduce, loose))
    if loose:
        bad = _combine_all(build, carried[len(sizes) :], build.ir.or_)
        total = build.select(bad, build.like(total, math.nan), total)
    if reduce.init.value != identity(reduce.combine.name, reduce.acc):
        total = _join(build, reduce, False, literal(build, reduce.init), total)
    return _store_all(build, [env.at(bound={acc(reduce.acc): total})], stage)[0]


Join = Callable[[Reg, Reg], Reg]


def _join(build: Builder, reduce: Reduce, loose: bool, a: Reg, b: Reg) -> Reg:
    """Combine two partial results; `loose`: a minimum or maximum that need not keep NaN."""
    if not loose:
        return lower(build, reduce.combine.name, [a, b], reduce.acc, reduce.acc)
    before = build.ir.fcmp_ordered("<" if reduce.combine.name == "min" else ">", a, b)
    return build.ir.select(before, a, b)


def _combine_all(build: Builder, accs: list[Reg], join: Join) -> Reg:
    """Pairwise: vectors with vectors of the same width, then halves of the last vector, then the scalar accumulator."""
    vectors = [a for a in accs if is_vector(a)]
    scalars = [a for a in accs if not is_vector(a)]
    least = min(map(lanes_of, vectors), default=1)
    vectors = [_folded(build, join, v, least) for v in vectors]
    while len(vectors) > 1:
        pairs = [join(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + (vectors[-1:] if len(vectors) % 2 else [])
    scalars += [build.lane(_folded(build, join, v, 1), 0) for v in vectors]
    total = scalars[-1]
    for s in scalars[:-1]:
        total = join(total, s)
    return total


def _folded(build: Builder, join: Join, v: Reg, lanes: int) -> Reg:
    """The halves of a vector joined until so many lanes are left."""
    while (n := lanes_of(v)) > lanes:
        v = join(build.shuffle(v, v, range(n // 2)), build.shuffle(v, v, range(n // 2, n)))
    return v


def identity(combine: str, dtype: DType) -> int | float | bool:
    """The neutral element of a reduction."""
    match combine:
        case "add" | "bitor" | "bitxor" | "or" | "xor":
            return 0
        case "mul" | "and":
            return 1
        case "bitand":
            return -1
        case "max":
            return -math.inf if dtype.is_float else _int_range(dtype)[0]
        case "min":
            return math.inf if dtype.is_float else _int_range(dtype)[1]
    raise KeyError(combine)


def _int_range(dtype: DType) -> tuple[int, int]:
    bits = dtype.bytes * 8
    if dtype is DType.BOOL:
        return 0, 1
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.is_signed else (0, (1 << bits) - 1)


__all__ = ["ROWWISE", "Rowwise"]
