"""Convolutions of stride 1 by Winograd's algorithm: windows of 3 or 5, down, across or both.

F(4, 3) and F(2, 3), also squared; F(4, 5) and F(2, 5) along one direction, F(2, 5) squared.

[Note: the passes]

Tiles of m x m (or 1 x m, m x 1) outputs are numbered through batch, lines and columns; a block is a range of them.

    task: a range of units; unit = (block of tiles, part of the features)
      input:   for each line of the block, for `lanes` neighbouring tiles, for each channel:
               V[xi][c][tile] = B^T d B                   (d: the pixels of a tile, zero outside the image)
      for each block of features, small enough for its products to stay in L2:
        products:  for each xi: M[xi][f][tile] = U[xi] V[xi]         (U: transformed weights, packed at creation)
        output:    for each feature, for each line of the block:
                   A^T M A as lines of pixels, then the epilogue and the stores on contiguous vectors

When there are fewer blocks than threads want, features are split as well: then phase 0 makes V once for all of them.
Vectors of tiles at the end of a line overrun into those of the next line, which are written later.

Files: winograd_form (recognition), winograd_design (decisions, costs), winograd_split (sizes at run time),
winograd_transform, winograd_passes (input and output). Reasons and numbers: docs/decisions/winograd.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.codegen.build import F32, F64, I64, PTR, VOID, Builder, Function, Index, Reg, vec
from onnxfuse.codegen.scalar_expr import open_kernel
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.target import Target
from onnxfuse.templates.microkernel import Operands, Strides, Tile, accumulate, micro_kernel
from onnxfuse.templates.winograd_design import TASK_WORK, Design, cost, design, sizes, slabs
from onnxfuse.templates.winograd_form import Conv, conv
from onnxfuse.templates.winograd_passes import emit_input, emit_output
from onnxfuse.templates.winograd_split import emit_sizes, holds, reach, shared_v, slice_size, split, tiles_of
from onnxfuse.templates.winograd_transform import Side, filter_transform

AHEAD = 512  # elements of the stream of weights that are fetched before they are used: measured
MAX_PACKED = 64 << 20  # bytes: they are four times the weights, and live beside them


class Winograd:
    """The template: see the note above."""

    name = "winograd"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule for each tile size, the cheaper one first, or why this is no such convolution."""
        c = conv(kernel)
        if isinstance(c, Refusal):
            return c
        if target.lanes(4) < 4:
            return Refusal("WINOGRAD_LANES", f"vectors of {target.lanes(4)}")
        found = []
        for d in (design(c, sides, target) for sides in sizes(c)):
            if d.packed_bytes > MAX_PACKED:
                continue
            found.append(
                Schedule(
                    self.name,
                    lanes=d.lanes,
                    vector=c.x.name,
                    tile=(d.down.m, d.across.m, d.wide, d.mr, d.nv, d.block, d.group),
                    pack=("weight",),
                    grain=TASK_WORK,
                    cost=cost(d, target),
                )
            )
        if not found:
            return Refusal("WINOGRAD_MEMORY", f"transformed weights take more than {MAX_PACKED >> 20} MiB")
        return sorted(found, key=lambda s: s.cost)

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI."""
        c = conv(kernel)
        assert isinstance(c, Conv), c
        down, across, wide, mr, nv, block, group = schedule.tile
        sides = Side(down, c.taps[0]), Side(across, c.taps[1])
        d = Design(c, schedule.lanes, wide, *sides, mr, nv, block, group, target.cores)
        _emit_pack(build, kernel, d)
        emit_sizes(build, kernel, d)
        tiles = _emit_tiles(build, d)
        reader = emit_input(build, kernel, d)
        writer = emit_output(build, kernel, d)
        _emit_share(build, kernel, d, reader)
        _emit_run(build, kernel, d, tiles, reader, writer)
        return Emitted(phases=2, packs=True)


WINOGRAD = Winograd()


# ---- weights ----


def _emit_pack(build: Builder, kernel: Kernel, d: Design) -> None:
    """The weights, transformed in f64, in the order in which they are read; features past the end are zero.

    U[group][xi][block of channels][panel][c][feature]: one long run, because with few tiles its stream is the limit.
    """
    c = d.c
    with build.function("packed_bytes", I64, []):
        build.ret(d.packed_bytes)
    with build.function("pack", VOID, [PTR, PTR]) as fn:
        bufs, packed = fn.args
        at = kernel.inputs.index(c.weight.source)
        weights = build.load(build.offset(bufs, at, PTR), PTR)
        panels = build.loop(0, d.panels, name="panel")
        with panels as p, build.loop(0, c.channels, name="c") as ch:
            high, wide = c.taps
            rows = []
            for lane in range(d.mr):
                f = build.imin(build.add(build.mul(p, d.mr), lane), c.features - 1)
                start = build.mul(build.add(build.mul(f, c.channels), ch), high * wide)
                rows.append(build.offset(weights, start, F32))
            inside = build.tail_mask(build.sub(c.features, build.mul(p, d.mr)), d.mr)
            taps = [[_tap(build, rows, wide * i + j, inside) for j in range(wide)] for i in range(high)]
            g0 = build.mul(build.udiv(p, d.group_panels), d.group_panels)
            count = build.imin(build.sub(d.panels, g0), d.group_panels)
            k0 = build.mul(build.udiv(ch, d.depth), d.depth)
            depth = build.imin(build.sub(c.channels, k0), d.depth)
            row = build.add(build.add(build.mul(build.sub(p, g0), depth), build.sub(ch, k0)), build.mul(k0, count))
            spot = build.mul(build.add(row, build.mul(g0, d.points * c.channels)), d.mr)
            u = [v for row in filter_transform(build, d.down, d.across, taps) for v in row]
            for xi, value in enumerate(u):
                at = build.add(spot, build.mul(count, xi * c.channels * d.mr))
                build.store(build.ir.fptrunc(value, vec(F32, d.mr)), build.offset(packed, at, F32))


def _tap(build: Builder, rows: Sequence[Reg], k: int, inside: Reg) -> Reg:
    """Tap k of some features, as a vector."""
    taps = build.gather_lanes([build.load(build.offset(row, k, F32), F32) for row in rows])
    value = build.ir.fpext(taps, vec(F64, len(rows)))
    return build.ir.select(inside, value, build.const(value.type, 0.0))


# ---- products ----


def _emit_tiles(build: Builder, d: Design) -> list[Function]:
    """K.column.<nv>(u, v, m, panels) for 1 .. nv vectors of tiles: all panels times one column of V."""
    home = Tile(d.mr, d.row // d.wide, d.wide, DType.F32)  # rows of products are `row` apart
    strides = Strides(1, d.mr, d.row)
    single = d.depth == d.c.channels
    out = []
    for nv in range(1, d.nv + 1):
        tile = None if single else micro_kernel(build, home, d.mr, nv, strides, next_a=AHEAD)
        with build.function(f"column.{nv}", VOID, [PTR, PTR, PTR, I64]) as fn:
            fn.linkage = "internal"
            u, v, m, panels = fn.args
            if tile is not None:
                _deep_column(build, d, tile, u, v, m, panels)
            else:
                with build.loop(0, panels, name="i") as i:
                    a = build.offset(u, build.mul(i, d.c.channels * d.mr), F32)
                    x = Operands(a, 1, d.mr, v, d.row, next_a=AHEAD)
                    sums = accumulate(build, home, (d.mr, nv), strides, x, d.c.channels)
                    row = build.offset(m, build.mul(i, d.mr * d.row), F32)
                    for k, total in enumerate(sums):
                        build.store(total, build.offset(row, k // nv * d.row + k % nv * d.wide, F32))
        out.append(fn)
    return out


def _deep_column(build: Builder, d: Design, tile: Function, u: Reg, v: Reg, m: Reg, panels: Index) -> None:
    """Many channels: in blocks whose part of V stays in the first level of cache."""
    channels = d.c.channels
    with build.loop(0, channels, d.depth, name="k") as k:
        count = build.imin(build.sub(channels, k), d.depth)
        first = holds(build, "==", k, 0)
        b = build.offset(v, build.mul(k, d.row), F32)
        with build.loop(0, panels, name="i") as i:
            row = build.add(build.mul(k, panels), build.mul(i, count))
            a = build.offset(u, build.mul(row, d.mr), F32)
            fixed = [build.i64(1), build.i64(d.mr), b, build.i64(d.row), build.i64(count)]
            home = build.offset(m, build.mul(i, d.mr * d.row), F32)
            build.ir.call(tile, [a, *fixed, home, first])


def _products(
    build: Builder, d: Design, tiles: Sequence[Function], count: Index, last: Index, panels: Index,
    u: Reg, v: Reg, m: Reg,
) -> None:  # fmt: skip
    """M[xi] = U[xi] V[xi] for the panels of a group of features and `count` tiles.

    last: where the vectors end that the output transform reads. Behind the products zeros are put for it.
    """
    vectors = build.ceildiv(count, d.wide)
    end = build.mul(vectors, d.wide)
    behind = build.ir.select(holds(build, "<", end, last), build.i64(build.mul(panels, d.mr)), build.i64(0))
    zero = build.splat(build.const(F32, 0.0), d.lanes)
    with build.loop(0, d.points, name="xi") as xi:
        us = build.offset(u, build.mul(build.mul(xi, panels), d.c.channels * d.mr), F32)
        vs, ms = build.offset(v, build.mul(xi, d.v_step), F32), build.offset(m, build.mul(xi, d.m_step), F32)
        with build.carry(0, build.ceildiv(vectors, d.nv), 1, [build.i64(0)], name="j") as it:
            (done,) = it.values
            left = build.sub(vectors, done)
            # Four vectors are two and two: one alone would keep too few sums under way.
            four = holds(build, "==", left, d.nv + 1)
            width = build.ir.select(four, build.i64(d.nv - 1), build.i64(build.imin(left, d.nv)))
            at = build.mul(done, d.wide)
            for nv, tile in enumerate(tiles, 1):
                with build.if_then(holds(build, "==", width, nv)):
                    build.ir.call(tile, [us, build.offset(vs, at, F32), build.offset(ms, at, F32), build.i64(panels)])
            it.next = [build.i64(build.add(done, width))]
        with build.loop(0, behind, name="f") as f:
            build.store(zero, build.offset(ms, build.add(build.mul(f, d.row), end), F32))


# ---- tasks ----


def _emit_share(build: Builder, kernel: Kernel, d: Design, reader: Function) -> None:
    """Phase 0: V of blocks that several units use."""
    with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, _, scratch, task = fn.args
        s = split(build, open_kernel(build, kernel, env_ptr, None), d)
        block, slab = build.udiv(task, slabs(d)), build.umod(task, slabs(d))
        c0, c1 = (build.udiv(build.mul(build.add(slab, k), d.c.channels), slabs(d)) for k in range(2))
        v = shared_v(build, d, s, scratch, block)
        build.ir.call(reader, [env_ptr, bufs, *(build.i64(x) for x in (block, c0, c1)), v])


def _emit_run(
    build: Builder, kernel: Kernel, d: Design, tiles: Sequence[Function], reader: Function, writer: Function
) -> None:
    with build.function("run.1", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, packed, scratch, task = fn.args
        s = split(build, open_kernel(build, kernel, env_ptr, None), d)
        mine = build.offset(scratch, build.mul(task, slice_size(build, d, s)), F32)
        line = build.offset(mine, d.m_size, F32)
        first = build.udiv(build.mul(task, s.units), s.tasks)
        last = build.udiv(build.mul(build.add(task, 1), s.units), s.tasks)
        own = holds(build, "==", s.shared, 0)
        with build.loop(first, last, name="unit") as unit:
            block, part = build.udiv(unit, s.parts), build.umod(unit, s.parts)
            private = build.offset(mine, d.own_size, F32)
            v = build.ir.select(own, private, shared_v(build, d, s, scratch, block))
            with build.if_then(own):
                args = [build.i64(x) for x in (block, 0, d.c.channels)]
                build.ir.call(reader, [env_ptr, bufs, *args, v])
            p0 = build.mul(part, s.part)
            p1 = build.imin(build.add(p0, s.part), d.panels)
            with build.loop(p0, p1, d.group_panels, name="group") as g0:
                panels = build.imin(build.sub(p1, g0), d.group_panels)
                u = build.offset(packed, build.mul(g0, d.points * d.c.channels * d.mr), F32)
                count, last_tile = tiles_of(build, s, block), reach(build, d, s, block)
                _products(build, d, tiles, count, last_tile, panels, u, v, mine)
                f0 = build.mul(g0, d.mr)
                f1 = build.imin(build.add(f0, build.mul(panels, d.mr)), d.c.features)
                build.ir.call(writer, [env_ptr, bufs, *(build.i64(x) for x in (block, f0, f1)), mine, line])
