"""The passes of Winograd convolution around its products: pixels to V, products to lines of pixels and their stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onnxfuse.codegen.build import F32, I32, I64, PTR, VOID, Builder, Function, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr, emit_store, open_kernel
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import acc
from onnxfuse.ir.kernel import Kernel
from onnxfuse.templates.winograd_design import CHANNELS, Design
from onnxfuse.templates.winograd_split import Segment, Split, holds, reach, segments, tiles_of
from onnxfuse.templates.winograd_split import split as split_of
from onnxfuse.templates.winograd_transform import both_ways, data, merge, result, split


def emit_input(build: Builder, kernel: Kernel, d: Design) -> Function:
    """K.input(env, bufs, block, c0, c1, v): V of channels c0 .. c1 of a block.

    Few channels at a time, so that lines of V are complete before they leave the first level of cache; first the rows
    of all of them, then the columns, because tiles do not fit into the registers.
    """
    with build.function("input", VOID, [PTR, PTR, I64, I64, I64, PTR]) as fn:
        fn.linkage = "internal"
        env_ptr, bufs, block, c0, c1, v = fn.args
        env = open_kernel(build, kernel, env_ptr, bufs)
        s = split_of(build, env, d)
        length = d.across.m * d.lanes + d.lanes
        zeros, half = build.alloca(F32, length), build.alloca(F32, CHANNELS * d.points * d.lanes)
        for k in range(0, length, d.lanes):
            build.store(build.splat(build.const(F32, 0.0), d.lanes), build.offset(zeros, k, F32))
        with build.loop(c0, c1, CHANNELS, name="few") as c, segments(build, s, block) as seg:
            count = build.imin(build.sub(c1, c), CHANNELS)
            dst = build.offset(v, build.mul(c, d.row), F32)
            with build.loop(seg.first, seg.last, d.lanes, name="tile") as tile:
                at = build.add(seg.at, build.sub(tile, seg.first))
                there = build.offset(dst, at, F32)
                _read_tiles(build, env, d, seg, tile, (c, count), (half, there), zeros)
                _store_v(build, d, count, half, there)
            _zero_rest(build, d, s, block, seg, count, dst)
    return fn


def _zero_rest(build: Builder, d: Design, s: Split, block: Reg, seg: Segment, count: Index, v: Reg) -> None:
    """Behind the last tiles of a block, up to whole vectors of the products.

    Left as they are, sums nobody wants would be made of whatever lies there: of denormal numbers they take a hundred
    times as long.
    """
    total = tiles_of(build, s, block)
    last = holds(build, "==", build.add(seg.at, build.sub(seg.last, seg.first)), total)
    end = build.mul(build.ceildiv(total, d.wide), d.wide)
    rest = build.loop(reach(build, d, s, block), build.ir.select(last, build.i64(end), build.i64(0)), d.lanes)
    zero = build.splat(build.const(F32, 0.0), d.lanes)
    with rest as at, build.loop(0, count, name="c") as ch, build.loop(0, d.points, name="xi") as xi:
        row = build.add(build.mul(ch, d.row), build.mul(xi, d.v_step))
        build.store(zero, build.offset(v, build.add(row, at), F32))


def _read_tiles(
    build: Builder, env: Env, d: Design, seg: Segment, tile: Index, channels: tuple[Index, Index],
    to: tuple[Reg, Reg], zeros: Reg,
) -> None:  # fmt: skip
    """The rows of `lanes` tiles, transformed, of some channels: without masks if all their pixels are inside.

    to: where they are put, and where in V their columns will be.
    """
    c, b = d.c, build.ir
    start, count = channels
    height, width = (emit_dim(build, env, x) for x in c.size)
    y, x = build.sub(build.mul(seg.y, d.down.m), c.top), build.sub(build.mul(tile, d.across.m), c.left)
    reach = d.across.m * d.lanes + d.across.taps - 1
    plane = build.mul(height, width)
    image = build.mul(build.add(build.mul(seg.n, c.channels), start), plane)
    first = build.add(image, build.add(build.mul(y, width), x))
    base = build.offset(env.buffers[c.source.source].ptr, first, F32)
    inside = b.and_(
        b.and_(holds(build, "<=", 0, y), holds(build, "<=", build.add(y, d.down.points), height)),
        b.and_(holds(build, "<=", 0, x), holds(build, "<=", build.add(x, reach), width)),
    )
    with build.if_else(inside) as (then, other):
        with then, build.loop(0, count, name="c") as ch:
            src = build.offset(base, build.mul(ch, plane), F32)
            for i in range(d.down.points):
                _store_row(build, d, _plain(build, d, build.offset(src, build.mul(width, i), F32)), to, ch, i)
        with other:
            masks = _masks(build, d, x, width)
            valid = [
                b.and_(holds(build, "<=", 0, build.add(y, i)), holds(build, "<", build.add(y, i), height))
                for i in range(d.down.points)
            ]
            with build.loop(0, count, name="c") as ch:
                src = build.offset(base, build.mul(ch, plane), F32)
                for i, ok in enumerate(valid):
                    at = b.select(ok, build.offset(src, build.mul(width, i), F32), zeros)
                    _store_row(build, d, _masked(build, d, at, masks), to, ch, i)


def _masks(build: Builder, d: Design, x: Index, width: Index) -> list[Reg]:
    """Which pixels x, x+1 ... of the m vectors of a line, and of its tail where there is one, are inside."""
    b, lanes, tail = build.ir, d.lanes, d.across.taps - 1
    low = build.splat(b.trunc(build.i64(build.sub(0, x)), I32), lanes)
    high = build.splat(b.trunc(build.i64(build.sub(width, x)), I32), lanes)
    out = []
    for k in range(d.across.m + min(tail, 1)):
        place = b.add(build.iota(lanes, I32), build.splat(build.const(I32, k * lanes), lanes))
        mask = b.and_(b.icmp_signed(">=", place, low), b.icmp_signed("<", place, high))
        out.append(mask if k < d.across.m else b.and_(mask, build.tail_mask(tail, lanes)))
    return out


def _plain(build: Builder, d: Design, at: Reg) -> list[Reg]:
    """The columns of `lanes` tiles of one line of pixels."""
    m, extra = d.across.m, d.across.taps - 1
    pixels = [build.load(build.offset(at, k * d.lanes, F32), F32, d.lanes) for k in range(m)]
    if not extra:
        return split(build, d.across, pixels, None)
    few = build.load(build.offset(at, m * d.lanes, F32), F32, extra)
    tail = build.shuffle(few, few, [*range(extra), *([0] * (d.lanes - extra))])
    return split(build, d.across, pixels, tail)


def _masked(build: Builder, d: Design, at: Reg, masks: Sequence[Reg]) -> list[Reg]:
    values = [build.masked_load(build.offset(at, k * d.lanes, F32), F32, mask) for k, mask in enumerate(masks)]
    return split(build, d.across, values[: d.across.m], values[-1] if len(values) > d.across.m else None)


def _store_row(build: Builder, d: Design, columns: Sequence[Reg], to: tuple[Reg, Reg], channel: Index, i: int) -> None:
    """One transformed row; the lines of V it ends up in are asked for: stores that miss wait for one another.

    Of each vector the line of its last element: that of the first came with the segment before.
    """
    half, v = to
    dst = build.offset(half, build.mul(channel, d.points * d.lanes), F32)
    there = build.offset(v, build.add(build.mul(channel, d.row), d.lanes - 1), F32)
    for j, value in enumerate(data(build, d.across, columns)):
        build.store(value, build.offset(dst, (j * d.down.points + i) * d.lanes, F32))
        build.prefetch(build.offset(there, (i * d.across.points + j) * d.v_step, F32))


def _store_v(build: Builder, d: Design, count: Index, half: Reg, v: Reg) -> None:
    """The columns of some channels, transformed, into V."""
    down, across = d.down.points, d.across.points
    with build.loop(0, count, name="c") as ch:
        src = build.offset(half, build.mul(ch, d.points * d.lanes), F32)
        dst = build.offset(v, build.mul(ch, d.row), F32)
        for j in range(across):
            rows = [build.offset(src, (j * down + i) * d.lanes, F32) for i in range(down)]
            done = data(build, d.down, [build.load(row, F32, d.lanes) for row in rows])
            for i, value in enumerate(done):
                build.store(value, build.offset(dst, (i * across + j) * d.v_step, F32))


# ---- output ----


def emit_output(build: Builder, kernel: Kernel, d: Design) -> Function:
    """K.output(env, bufs, block, f0, f1, m, line): outputs of features f0 .. f1 of a block."""
    c = d.c
    with build.function("output", VOID, [PTR, PTR, I64, I64, I64, PTR, PTR]) as fn:
        fn.linkage = "internal"
        env_ptr, bufs, block, f0, f1, products, line = fn.args
        env = open_kernel(build, kernel, env_ptr, bufs)
        s = split_of(build, env, d)
        with build.loop(f0, f1, name="f") as f, segments(build, s, block) as seg:
            at = build.add(build.mul(build.sub(f, f0), d.row), seg.at)
            src = build.offset(products, at, F32)
            with build.loop(0, build.sub(seg.last, seg.first), d.lanes, name="tile") as tile:
                _back(build, d, build.offset(src, tile, F32), build.offset(line, build.mul(tile, d.across.m), F32))
            named = ((c.n, seg.n), (c.f, f))
            place = env.at({a: build.i64(v) for a, v in named if a is not None})
            _finish(build, place, d, s, seg, line)
    return fn


def _back(build: Builder, d: Design, src: Reg, line: Reg) -> None:
    """The products of `lanes` tiles to m lines of pixels."""
    down, across = d.down.points, d.across.points
    products = [
        [build.load(build.offset(src, (i * across + j) * d.m_step, F32), F32, d.lanes) for j in range(across)]
        for i in range(down)
    ]
    lines = both_ways(partial(result, build, d.across), partial(result, build, d.down), products)
    for i, columns in enumerate(lines):
        for k, pixels in enumerate(merge(build, columns)):
            build.store(pixels, build.offset(line, i * d.line + k * d.lanes, F32))


def _finish(build: Builder, env: Env, d: Design, s: Split, seg: Segment, line: Reg) -> None:
    """Epilogue and stores of the lines of pixels of a segment."""
    y0, x0 = build.mul(seg.y, d.down.m), build.mul(seg.first, d.across.m)
    x1 = build.imin(build.mul(seg.last, d.across.m), s.wide)
    count = build.sub(x1, x0)
    whole = build.mul(build.udiv(count, d.lanes), d.lanes)
    rest = build.sub(count, whole)
    with build.loop(0, build.imin(build.sub(s.high, y0), d.down.m), name="y") as y:
        here = env if d.c.y is None else env.at({d.c.y: build.i64(build.add(y0, y))})
        src = build.offset(line, build.mul(y, d.line), F32)
        with build.loop(0, whole, d.lanes, name="x") as x:
            _vector(build, here, d, build.add(x0, x), build.offset(src, x, F32), None)
        with build.if_then(holds(build, "<", 0, rest)):
            mask = build.tail_mask(rest, d.lanes)
            _vector(build, here, d, build.add(x0, whole), build.offset(src, whole, F32), mask)


def _vector(build: Builder, env: Env, d: Design, x: Index, src: Reg, mask: Reg | None) -> None:
    c = d.c
    here = env.at({c.x: build.i64(x)}).vector(c.x, d.lanes, mask)
    here = here.at(bound={acc(DType.F32): build.load(src, F32, d.lanes)})
    if c.result is not None:
        here = here.at(bound={c.result: build.widen(emit_expr(build, here, c.finish), d.lanes)})
    for store in c.stores:
        emit_store(build, here, store.target, store.index, store.value)
