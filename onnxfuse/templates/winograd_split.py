"""How the tiles of a Winograd convolution are divided into blocks, units and tasks, from the dimensions at run time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from onnxfuse.codegen.build import F32, I64, PTR, Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_dim, open_kernel
from onnxfuse.ir.kernel import Kernel
from onnxfuse.templates.winograd_design import MAX_TASKS, PART, SPREAD, TASK_WORK, Design, cut, slabs


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """How the work is divided; everything follows from the dimensions alone."""

    high: Index  # outputs down and across
    wide: Index
    down: Index  # tiles down and across
    across: Index
    tiles: Index
    block: Index  # tiles of a block
    blocks: Index
    part: Index  # panels of a part of the features, whole groups
    parts: Index
    units: Index
    tasks: Index
    shared: Index  # 1 when phase 0 makes V for all parts, else 0


def split(build: Builder, env: Env, d: Design) -> Split:
    """The division for the dimensions in `env`; depends on nothing else."""
    c = d.c
    n: Index = 1 if c.n is None else emit_dim(build, env, c.n.extent)
    high: Index = 1 if c.y is None else emit_dim(build, env, c.y.extent)
    wide = emit_dim(build, env, c.x.extent)
    down, across = build.ceildiv(high, d.down.m), build.ceildiv(wide, d.across.m)
    tiles = build.mul(n, build.mul(down, across))
    block: Index
    part: Index
    if isinstance(tiles, int) and isinstance(across, int) and tiles:
        block, part = cut(d, tiles, across)
    else:
        count = build.ceildiv(tiles, d.block)
        even = build.ceildiv(tiles, build.imax(count, 1))
        block = build.imax(build.mul(build.ceildiv(even, d.wide), d.wide), d.wide)
        most = max(1, d.c.features // PART)
        wanted = build.imin(build.ceildiv(SPREAD, build.imax(build.ceildiv(tiles, block), 1)), most)
        part = build.mul(build.ceildiv(build.ceildiv(d.panels, build.imax(wanted, 1)), d.group_panels), d.group_panels)
    blocks = build.ceildiv(tiles, block)
    parts = build.ceildiv(d.panels, part)
    units = build.mul(blocks, parts)
    work = build.mul(tiles, d.points * c.channels * c.features)
    worth = build.add(build.udiv(work, TASK_WORK), 1)
    tasks = build.imin(units, build.imin(worth, MAX_TASKS))
    shared = build.imin(build.sub(parts, 1), 1)
    return Split(high, wide, down, across, tiles, block, blocks, part, parts, units, tasks, shared)


def _shares(build: Builder, d: Design, s: Split) -> Index:
    """Tasks of phase 0: parts of the channels of each block."""
    return build.mul(s.shared, build.mul(s.blocks, slabs(d)))


def slice_size(build: Builder, d: Design, s: Split) -> Index:
    """Scratch of one task."""
    return build.add(d.own_size, build.mul(build.sub(1, s.shared), d.v_size))


def emit_sizes(build: Builder, kernel: Kernel, d: Design) -> None:
    """Write K.tasks of both phases and K.scratch."""
    for phase in range(2):
        with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
            s = split(build, open_kernel(build, kernel, fn.args[0], None), d)
            build.ret(_shares(build, d, s) if phase == 0 else s.tasks)
    with build.function("scratch", I64, [PTR]) as fn:
        s = split(build, open_kernel(build, kernel, fn.args[0], None), d)
        shared = build.mul(build.mul(s.shared, s.blocks), d.v_size)
        build.ret(build.mul(build.add(build.mul(s.tasks, slice_size(build, d, s)), shared), 4))


def shared_v(build: Builder, d: Design, s: Split, scratch: Reg, block: Index) -> Reg:
    """V of a block, behind the slices of the tasks."""
    at = build.add(build.mul(s.tasks, slice_size(build, d, s)), build.mul(block, d.v_size))
    return build.offset(scratch, at, F32)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tiles first .. last of line `y` (in tiles) of image n; `at`: tiles of the block before them."""

    n: Index
    y: Index
    first: Index
    last: Index
    at: Index


@contextmanager
def segments(build: Builder, s: Split, block: Index) -> Iterator[Segment]:
    """The lines of a block of tiles."""
    t0 = build.mul(block, s.block)
    t1 = build.imin(build.add(t0, s.block), s.tiles)
    across, down = build.imax(s.across, 1), build.imax(s.down, 1)
    with build.loop(build.udiv(t0, across), build.ceildiv(t1, across), name="line") as line:
        start = build.mul(line, across)
        first = build.imax(build.sub(t0, start), 0)
        last = build.imin(build.sub(t1, start), across)
        at = build.sub(build.add(start, first), t0)
        yield Segment(build.udiv(line, down), build.umod(line, down), first, last, at)


def tiles_of(build: Builder, s: Split, block: Index) -> Index:
    """Tiles of a block."""
    t0 = build.mul(block, s.block)
    return build.sub(build.imin(build.add(t0, s.block), s.tiles), t0)


def reach(build: Builder, d: Design, s: Split, block: Index) -> Index:
    """Where the last vector of the transforms ends, in tiles of the block: `lanes` tiles of the last line."""
    count = tiles_of(build, s, block)
    end = build.add(build.mul(block, s.block), count)
    line = build.imin(build.add(build.umod(build.sub(end, 1), build.imax(s.across, 1)), 1), count)
    return build.add(build.sub(count, line), build.mul(build.ceildiv(line, d.lanes), d.lanes))


def holds(build: Builder, what: str, a: Index, b: Index) -> Reg:
    """Compare two indices."""
    return build.ir.icmp_signed(what, build.i64(a), build.i64(b))
