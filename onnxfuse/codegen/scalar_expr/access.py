"""Loads and stores by the form of their offset."""

from __future__ import annotations

from llvmlite import ir

from onnxfuse.codegen.build import F64, I8, NOWHERE, Builder, Index, is_vector, lanes_of, mem_type, vec
from onnxfuse.codegen.scalar_expr.env import Buffer, Env, Path, Scope
from onnxfuse.codegen.scalar_expr.offsets import constant_step, in_range, path_of_load
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Load


def store_at(
    build: Builder, env: Env, buffer: Buffer, path: Path, rest: ir.Value, stride: ir.Value | None, reg: ir.Value
) -> None:
    """Write a register; `stride`: the step of the path where it is neither 0 nor 1."""
    typ = mem_type(buffer.dtype)
    if buffer.dtype is DType.BOOL:
        reg = build.ir.zext(reg, vec(I8, lanes_of(reg)))
    if path.step is None:
        _scatter(build, env, build.widen(reg, env.lanes), buffer.ptr, rest, typ)
        return
    if stride is not None:
        _scatter(build, env, build.widen(reg, env.lanes), buffer.ptr, _lane_offsets(build, env, rest, stride), typ)
        return
    if constant_step(path.step) == 0:
        build.store(build.lane(reg, 0), build.offset(buffer.ptr, rest, typ))
        return
    at = build.offset(buffer.ptr, lane0(build, env, rest, 1), typ)
    if env.mask is not None:
        build.masked_store(build.widen(reg, env.lanes), at, env.mask)
        return
    build.store(build.widen(reg, env.lanes), at)


def both(build: Builder, a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    """Conjunction of two guards, widened when only one of them varies."""
    if a is None or b is None:
        return b if a is None else a
    n = max(lanes_of(a), lanes_of(b))
    return build.ir.and_(build.widen(a, n), build.widen(b, n)) if n > 1 else build.ir.and_(a, b)


def load_at(build: Builder, env: Env, e: Load, scope: Scope) -> ir.Value:
    """Read what a Load names, as a register (bool is i1)."""
    raw = _load_memory(build, env, e, scope)
    if e.dtype is not DType.BOOL:
        return raw
    return build.ir.icmp_unsigned("!=", raw, build.like(raw, 0))


def _load_memory(build: Builder, env: Env, e: Load, scope: Scope) -> ir.Value:
    buffer = env.buffers[e.source]
    typ = mem_type(buffer.dtype)
    path = path_of_load(env, e)
    guard = None if scope.cond is None or in_range(e) else scope.cond
    rest = scope.find(path.rest)
    assert rest is not None
    if path.step is None:
        return _gather(build, env, buffer, rest, typ, guard)
    if path.every > 1:
        return _load_repeated(build, env, buffer, rest, typ, guard, path.every)
    step = constant_step(path.step)
    if step == 0:
        return _load_uniform(build, env, buffer, rest, typ, guard)
    if step is not None and abs(step) == 1:
        return _load_run(build, env, buffer, rest, typ, guard, step)
    mask = both(build, guard, env.mask)
    stride = scope.find(path.step)
    assert stride is not None
    if mask is not None:
        return _gather(build, env, buffer, _lane_offsets(build, env, rest, stride), typ, guard)
    if step == 2 and env.lanes % 2 == 0:
        return _load_even(build, env, buffer, rest, typ)
    base = lane0(build, env, rest, stride if step is None else step)
    known = stride if step is None else step
    at = [build.add(base, build.mul(known, k)) for k in range(env.lanes)]
    loads = [build.load(build.offset(buffer.ptr, x, typ), typ, invariant=buffer.invariant) for x in at]
    return build.gather_lanes(loads)


def _load_uniform(
    build: Builder, env: Env, buffer: Buffer, offset: ir.Value, typ: ir.Type, guard: ir.Value | None
) -> ir.Value:
    at = build.offset(buffer.ptr, offset, typ)
    if guard is None:
        return build.load(at, typ, invariant=buffer.invariant)
    if is_vector(guard):
        on = both(build, guard, env.mask)
        assert on is not None
        guard = build.any_lane(on)
    return build.load(build.ir.select(guard, at, build.nowhere()), typ)


def _load_run(
    build: Builder, env: Env, buffer: Buffer, rest: ir.Value, typ: ir.Type, guard: ir.Value | None, step: int
) -> ir.Value:
    """Consecutive elements, forwards or backwards."""
    first = lane0(build, env, rest, step)
    at = build.offset(buffer.ptr, first if step == 1 else build.sub(first, env.lanes - 1), typ)
    return load_lanes(build, env, at, typ, guard, step, buffer.invariant)


def load_lanes(
    build: Builder, env: Env, at: ir.Value, typ: ir.Type, guard: ir.Value | None, step: int, invariant: bool
) -> ir.Value:
    """The lanes from `at` on, in reverse order where the step is -1."""
    if guard is not None and not is_vector(guard) and env.mask is None and env.lanes * _width(typ) <= NOWHERE:
        # All lanes or none: cheaper than a mask.
        out = build.load(build.ir.select(guard, at, build.nowhere()), typ, env.lanes)
        return out if step == 1 else build.reverse(out)
    mask = both(build, guard, env.mask)
    if mask is None:
        out = build.load(at, typ, env.lanes, invariant=invariant)
        return out if step == 1 else build.reverse(out)
    mask = build.widen(mask, env.lanes)
    if step == 1:
        return build.masked_load(at, typ, mask)
    return build.reverse(build.masked_load(at, typ, build.reverse(mask)))


def _load_repeated(
    build: Builder, env: Env, buffer: Buffer, rest: ir.Value, typ: ir.Type, guard: ir.Value | None, every: int
) -> ir.Value:
    """Each of a few consecutive elements in `every` lanes."""
    assert env.vector_axis is not None
    few = env.lanes // every
    first = build.add(rest, build.udiv(env.axes[env.vector_axis], every))
    at = build.offset(buffer.ptr, first, typ)
    mask = both(build, guard, env.mask)
    if mask is None:
        out = build.load(at, typ, few, invariant=buffer.invariant)
    else:
        mask = build.widen(mask, env.lanes)
        wanted = [build.shuffle(mask, mask, range(k, env.lanes, every)) for k in range(every)]
        on = wanted[0]
        for other in wanted[1:]:
            on = build.ir.or_(on, other)
        out = build.masked_load(at, typ, on)
    return build.shuffle(out, out, [k // every for k in range(env.lanes)])


def _width(typ: ir.Type) -> int:
    """Bytes of an element."""
    return int(typ.width) // 8 if isinstance(typ, ir.IntType) else 8 if typ == F64 else 4


def _load_even(build: Builder, env: Env, buffer: Buffer, rest: ir.Value, typ: ir.Type) -> ir.Value:
    """Every second element, from two vectors that overlap by one so that nothing past the last is read."""
    n = env.lanes
    base = lane0(build, env, rest, 2)
    low = build.load(build.offset(buffer.ptr, base, typ), typ, n, invariant=buffer.invariant)
    high = build.load(build.offset(buffer.ptr, build.add(base, n - 1), typ), typ, n, invariant=buffer.invariant)
    return build.shuffle(low, high, [2 * k if 2 * k < n else n + 2 * k - (n - 1) for k in range(n)])


def _gather(
    build: Builder, env: Env, buffer: Buffer, offsets: ir.Value, typ: ir.Type, guard: ir.Value | None
) -> ir.Value:
    mask = both(build, guard, env.mask)
    if mask is not None:
        return build.gather(buffer.ptr, build.widen(offsets, env.lanes), typ, build.widen(mask, env.lanes))
    at = [build.lane(offsets, k) for k in range(env.lanes)]
    loads = [build.load(build.offset(buffer.ptr, x, typ), typ, invariant=buffer.invariant) for x in at]
    return build.gather_lanes(loads)


def _scatter(build: Builder, env: Env, value: ir.Value, ptr: ir.Value, offsets: ir.Value, typ: ir.Type) -> None:
    """Store lane by lane; lanes that are off are skipped."""
    if env.mask is not None:
        build.scatter(value, ptr, build.widen(offsets, env.lanes), typ, env.mask)
        return
    for k in range(env.lanes):
        build.store(build.lane(value, k), build.offset(ptr, build.lane(offsets, k), typ))


def lane0(build: Builder, env: Env, rest: ir.Value, step: Index) -> ir.Value:
    """Offset of lane 0."""
    assert env.vector_axis is not None
    return build.i64(build.add(rest, build.mul(env.axes[env.vector_axis], step)))


def _lane_offsets(build: Builder, env: Env, rest: ir.Value, step: ir.Value) -> ir.Value:
    """Offsets of all lanes of an affine access."""
    base = lane0(build, env, rest, step)
    n = env.lanes
    lanes = build.ir.mul(build.iota(n), build.splat(step, n))
    return build.ir.add(build.splat(base, n), lanes)
