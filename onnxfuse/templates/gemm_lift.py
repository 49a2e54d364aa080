"""Lifted factors of a contraction: small integers brought to 16 bits and written in pairs, once per call.

The phase before all others writes them to scratch; the product then reads them as a matrix of 32-bit elements
(analysis/pairs.py). A source lies as [outer][dim][inner], its pairs as [outer][ceil(dim / 2)][inner].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxfuse.analysis.roles import Contraction, Lift
from onnxfuse.codegen.build import I16, I32, I64, PTR, VOID, Builder, Index, Reg, mem_type, vec
from onnxfuse.codegen.scalar_expr import Buffer, Env, contiguous, emit_dim, emit_expr, open_kernel
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.types import Dim
from onnxfuse.templates.gemm_const import with_views

TASK_PAIRS = 1 << 15  # worth a task: about 10 us
MOST_TASKS = 16
SLACK = 64  # bytes behind a buffer: a vector may read past its end
_LANES = Axis("lane", 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Extents of a lifted factor around its halved dimension."""

    outer: Index
    dim: Index
    inner: Index

    def pairs(self, build: Builder) -> Index:
        return build.ceildiv(self.dim, 2)

    def lines(self, build: Builder) -> Index:
        """Lines that are written in one go: along the pairs where these lie side by side, else across them."""
        alone = isinstance(self.inner, int) and self.inner == 1
        return self.outer if alone else build.mul(self.outer, self.pairs(build))

    def total(self, build: Builder) -> Index:
        return build.mul(build.mul(self.outer, self.pairs(build)), self.inner)


def _sizes(build: Builder, env: Env, lift: Lift) -> _Sizes:
    shape = lift.read.source.tensor.shape

    def product(dims: tuple[Dim, ...]) -> Index:
        total: Index = 1
        for d in dims:
            total = build.mul(total, emit_dim(build, env, d))
        return total

    d = lift.dim
    return _Sizes(product(shape[:d]), emit_dim(build, env, shape[d]), product(shape[d + 1 :]))


def _bytes(build: Builder, env: Env, lift: Lift) -> Index:
    lines = build.ceildiv(build.add(build.mul(_sizes(build, env, lift).total(build), 4), SLACK), 64)
    return build.mul(lines, 64)


def lifted_bytes(build: Builder, env: Env, c: Contraction) -> Index:
    """Scratch for all lifted factors."""
    total: Index = 0
    for lift in c.pairs or ():
        total = build.add(total, _bytes(build, env, lift))
    return total


def with_lifts(build: Builder, env: Env, c: Contraction, area: Reg) -> Env:
    """Buffers for the lifted factors, which lie one behind the other from `area` on."""
    extra = {}
    at: Index = 0
    for lift in c.pairs or ():
        ptr = build.offset(area, build.udiv(at, 4), I32)
        extra[lift.value] = Buffer(ptr, lift.value.tensor.dtype, contiguous(build, list(lift.value.tensor.shape)))
        at = build.add(at, _bytes(build, env, lift))
    return env.at(buffers=extra)


def emit_lift(build: Builder, kernel: Kernel, c: Contraction, phase: int, area: Callable[[Env, Reg], Reg]) -> None:
    """The phase that writes the lifted factors: one list of tasks, those of each factor in turn.

    area: where in scratch they lie.
    """
    lifts = c.pairs or ()
    with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
        env = with_views(open_kernel(build, kernel, fn.args[0], None), c)
        total: Index = 0
        for lift in lifts:
            total = build.add(total, _tasks(build, _sizes(build, env, lift)))
        build.ret(total)
    with build.function(f"run.{phase}", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, _, scratch, task = fn.args
        env = with_views(open_kernel(build, kernel, env_ptr, bufs), c)
        env = with_lifts(build, env, c, area(env, scratch))
        first: Index = 0
        for lift in lifts:
            size = _sizes(build, env, lift)
            tasks = _tasks(build, size)
            mine = build.sub(task, first)
            low = build.ir.icmp_signed(">=", build.i64(mine), build.i64(0))
            high = build.ir.icmp_signed("<", build.i64(mine), build.i64(tasks))
            with build.if_then(build.ir.and_(low, high)):
                lines = size.lines(build)
                start = build.udiv(build.mul(mine, lines), build.imax(tasks, 1))
                stop = build.udiv(build.mul(build.add(mine, 1), lines), build.imax(tasks, 1))
                with build.loop(start, stop, name="line") as line:
                    _line(build, env.at(), lift, size, line)
            first = build.add(first, tasks)


def _tasks(build: Builder, size: _Sizes) -> Index:
    worth = build.add(build.udiv(size.total(build), TASK_PAIRS), 1)
    return build.imin(size.lines(build), build.imin(worth, MOST_TASKS))


def _line(build: Builder, env: Env, lift: Lift, size: _Sizes, line: Reg) -> None:
    source, out = env.buffers[lift.read.source].ptr, env.buffers[lift.value].ptr
    typ = mem_type(lift.read.dtype)
    if isinstance(size.inner, int) and size.inner == 1:
        src = build.offset(source, build.mul(line, size.dim), typ)
        _neighbours(build, env, lift, src, size.dim, build.offset(out, build.mul(line, size.pairs(build)), I32))
        return
    pairs = size.pairs(build)
    place, pair = build.udiv(line, pairs), build.umod(line, pairs)
    row = build.add(build.mul(place, size.dim), build.mul(pair, 2))
    low = build.offset(source, build.mul(row, size.inner), typ)
    dst = build.offset(out, build.mul(line, size.inner), I32)
    high = build.offset(low, size.inner, typ)
    if isinstance(size.dim, int) and size.dim % 2 == 0:
        _rows(build, env, lift, (low, high), size.inner, dst)
        return
    last = build.ir.icmp_signed("==", build.i64(build.add(build.mul(pair, 2), 1)), build.i64(size.dim))
    with build.if_else(last, likely=False) as (then, other):
        with then:
            _rows(build, env, lift, (low, None), size.inner, dst)
        with other:
            _rows(build, env, lift, (low, high), size.inner, dst)


def _rows(build: Builder, env: Env, lift: Lift, rows: tuple[Reg, Reg | None], count: Index, dst: Reg) -> None:
    """Pairs of the elements of two rows (the second one may be missing)."""
    typ, lanes = mem_type(lift.read.dtype), 2 * build.target.lanes(4)

    def some(v: Index, n: int) -> None:
        low, high = (
            None if r is None else _element(build, env, lift, build.load(build.offset(r, v, typ), typ, n), n)
            for r in rows
        )
        assert low is not None
        pair = build.ir.and_(low, build.like(low, 0xFFFF))
        if high is not None:
            pair = build.ir.or_(pair, build.ir.shl(high, build.like(high, 16)))
        build.store(pair, build.offset(dst, v, I32))

    _vectors(build, count, lanes, some)


def _neighbours(build: Builder, env: Env, lift: Lift, src: Reg, count: Index, dst: Reg) -> None:
    """Pairs of neighbours in memory."""
    typ, lanes = mem_type(lift.read.dtype), build.target.lanes(4)

    def some(v: Index, n: int) -> None:
        at = build.offset(src, build.mul(v, 2), typ)
        value = build.ir.trunc(_element(build, env, lift, build.load(at, typ, 2 * n), 2 * n), vec(I16, 2 * n))
        build.store(build.ir.bitcast(value, vec(I32, n)), build.offset(dst, v, I32))

    whole = build.udiv(count, 2)
    _vectors(build, whole, lanes, some)
    if isinstance(count, int) and count % 2 == 0:
        return
    odd = build.ir.icmp_signed("<", build.i64(build.mul(whole, 2)), build.i64(count))
    with build.if_then(odd):
        value = _element(build, env, lift, build.load(build.offset(src, build.mul(whole, 2), typ), typ), 1)
        build.store(build.ir.and_(value, build.like(value, 0xFFFF)), build.offset(dst, whole, I32))


def _element(build: Builder, env: Env, lift: Lift, value: Reg, lanes: int) -> Reg:
    """The element for a value (or vector) that was read."""
    here = env.at(bound={lift.read: value})
    return build.widen(emit_expr(build, here.vector(_LANES, lanes), lift.element), lanes)


def _vectors(build: Builder, count: Index, lanes: int, some: Callable[[Index, int], None]) -> None:
    """Elements 0 .. count: whole vectors, then one by one."""
    whole = build.mul(build.udiv(count, lanes), lanes)
    with build.loop(0, whole, lanes, name="v") as v:
        some(v, lanes)
    with build.loop(whole, count, name="v1") as v:
        some(v, 1)
