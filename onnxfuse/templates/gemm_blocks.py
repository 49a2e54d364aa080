"""The split of a contraction into blocks, units and tasks, computed at run time from the dimensions.

A phase before the main one, where there is one, writes lifted factors (gemm_lift.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.codegen.build import I64, PTR, Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_dim, open_kernel
from onnxfuse.ir.kernel import Kernel
from onnxfuse.templates.gemm_cut import Product, cut, tasks_of
from onnxfuse.templates.gemm_design import Access, Design
from onnxfuse.templates.gemm_lift import lifted_bytes

TASK_WORK = 1 << 19  # products worth a task: about 10 us
MAX_TASKS = 16  # bounds the scratch: each task has its own slice
NARROW = 96  # columns that are not split for the sake of parallelism
SPREAD = 8  # units that are enough for the sake of parallelism
# By access of b: what the first tile of a panel costs more, and packing it; in steps of k of a tile, measured.
FETCH = {Access.PANEL: (1.2, 0.0), Access.ROWS: (0.7, 4.0), Access.CONST: (0.5, 0.0)}
UNIT_WORK = 1 << 22  # products a unit should have at least where splitting costs: about 80 us


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Sizes of one call. mc, ms, nc, kc: what the blocks are, evened out below the limits of the design."""

    m: Index
    n: Index
    k: Index
    nc: Index
    mc: Index
    ms: Index
    kc: Index
    nblocks: Index
    mblocks: Index
    kblocks: Index
    units: Index
    tasks: Index


def split(build: Builder, env: Env, d: Design) -> Split:
    """The split for the dimensions in `env`; depends on nothing else."""
    c = d.c
    m, n, k = (emit_dim(build, env, x) for x in (c.rows.extent, c.cols.extent, c.depth))
    batch: Index = 1
    for axis in c.batch:
        batch = build.mul(batch, emit_dim(build, env, axis.extent))
    work = build.mul(build.mul(batch, build.mul(m, n)), build.imax(k, 1))
    worth = build.add(build.udiv(work, TASK_WORK), 1)
    if isinstance(batch, int) and isinstance(m, int) and isinstance(n, int) and isinstance(k, int) and d.cuts:
        fetch, pack = FETCH.get(d.b, (0.0, 0.0))
        most = min(MAX_TASKS, batch * m * n * k // TASK_WORK + 1)
        nc, mc = cut(Product(batch, m, n, k, d.tile, d.nc, d.mc, fetch, pack, d.cores, most))
    else:
        nc, mc = _blocks(build, d, (batch, m, n), work)
    nblocks, mblocks = build.ceildiv(n, build.imax(nc, 1)), build.ceildiv(m, mc)
    points = build.mul(batch, nblocks)
    parts = build.ceildiv(mc, d.ms)
    ms = _round_up(build, build.ceildiv(mc, build.imax(parts, 1)), d.tile.mr)
    kblocks = build.imax(build.ceildiv(k, d.kc), 1)
    kc = build.mul(build.ceildiv(build.udiv(k, d.taps), kblocks), d.taps)
    units = build.mul(points, mblocks)
    if isinstance(units, int) and isinstance(worth, int):
        tasks: Index = tasks_of(units, min(worth, MAX_TASKS), d.cores)
    else:
        tasks = build.imin(units, build.imin(worth, MAX_TASKS))
    return Split(m, n, k, nc, mc, ms, kc, nblocks, mblocks, kblocks, units, tasks)


def _blocks(build: Builder, d: Design, sizes: tuple[Index, Index, Index], work: Index) -> tuple[Index, Index]:
    """Columns and rows of a block, for sizes known at run time only."""
    batch, m, n = sizes
    worth = build.add(build.udiv(work, TASK_WORK), 1)
    nblocks = build.ceildiv(n, d.nc)
    if d.b is Access.PANEL:
        large = build.imin(build.udiv(work, 2 * d.cores * UNIT_WORK), 1)
        wanted = build.imin(build.mul(build.add(large, 1), d.cores), worth)
        wanted = build.ceildiv(wanted, build.imax(batch, 1))
        nblocks = build.imax(nblocks, _square(build, 2 * d.cores, wanted, m, n))
    elif d.a not in (Access.ROWS, Access.COLUMNS):  # another block of columns costs nothing but reading a again
        wanted = build.imin(build.udiv(SPREAD, build.imax(batch, 1)), build.imin(worth, build.udiv(n, NARROW)))
        nblocks = build.imax(nblocks, wanted)
    nc = _round_up(build, build.ceildiv(n, build.imax(nblocks, 1)), d.tile.nr)
    nblocks = build.ceildiv(n, build.imax(nc, 1))
    if d.b is Access.PANEL:
        wanted = build.ceildiv(wanted, build.imax(nblocks, 1))
    else:
        base = build.imax(build.mul(batch, nblocks), 1)
        spread = d.cores if d.packs_b else SPREAD  # every block of rows packs b for itself
        wanted = build.imin(build.udiv(spread, base), build.imin(worth, build.ceildiv(m, 2 * d.tile.mr)))
    mc = _round_up(build, build.ceildiv(m, build.imax(wanted, 1)), d.tile.mr)
    return nc, build.imax(build.imin(mc, d.mc), d.tile.mr)


def _square(build: Builder, most: int, wanted: Index, m: Index, n: Index) -> Index:
    """Blocks of columns, a power of two, that make `wanted` blocks of the product about as wide as they are high.

    Every block of columns reads a again and every block of rows b: both cost the less the larger the block.
    """
    count: Index = 1
    t = 2
    while t <= most:  # t blocks where wanted * n / m is nearer to t * t than to a quarter of that
        enough = build.udiv(build.mul(build.mul(wanted, n), 2), build.imax(build.mul(m, t * t), 1))
        count = build.mul(count, build.add(build.imin(enough, 1), 1))
        t *= 2
    return build.imin(count, wanted)


def _round_up(build: Builder, x: Index, to: int) -> Index:
    return build.mul(build.ceildiv(x, to), to)


def lifted_area(build: Builder, s: Split, d: Design, scratch: Reg) -> Reg:
    """The lifted factors lie behind the slices of the tasks."""
    return build.offset(scratch, build.mul(s.tasks, d.slice_bytes // d.c.acc.bytes), d.typ)


def emit_tasks(build: Builder, kernel: Kernel, d: Design, phase: int) -> None:
    """Write K.tasks of the main phase and K.scratch."""
    with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
        env = open_kernel(build, kernel, fn.args[0], None)
        build.ret(split(build, env, d).tasks)
    with build.function("scratch", I64, [PTR]) as fn:
        env = open_kernel(build, kernel, fn.args[0], None)
        s = split(build, env, d)
        own = build.mul(s.tasks, d.slice_bytes)
        build.ret(build.add(own, lifted_bytes(build, env, d.c)))
