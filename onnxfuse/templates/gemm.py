"""Contractions as blocked matrix products: MatMul, Gemm, Einsum, convolution of any rank, their groups and transposes.

[Note: the loops]

    task: a range of units; unit = (batch point, block of columns, block of rows)
      for each block of K (KC deep):
        pack the block of b      (columns of a convolution are evaluated here; constants were packed at creation)
        for each sub-block of rows (stays in L2 while the columns pass by):
          pack the block of a
          for each panel of NR columns (stays in L1), for each tile of MR rows:
            micro-kernel: tile += a * b
            after the last block of K: epilogue on the tile, stores

Between blocks of K the tiles rest in scratch. How an operand is read is its `Access`; everything but the tile sizes may
be a run-time value. The order of summation depends on K alone, so results do not depend on the split into tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from onnxfuse.analysis.roles import Contraction, affine, roles
from onnxfuse.codegen.build import I64, PTR, VOID, Builder, Function, Index, Reg, Type, reg_type
from onnxfuse.codegen.scalar_expr import Buffer, Env, emit_dim, emit_expr, emit_store, open_kernel
from onnxfuse.codegen.scalar_expr import affine as split_affine
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, acc, axes_of, loads, syms_of, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.target import Target
from onnxfuse.templates.estimate import epilogue_cost, expected, points, pointwise_seconds
from onnxfuse.templates.microkernel import Strides, Tile, micro_kernel, tile_for
from onnxfuse.templates.packing import Line, decode, flat_of, pack_block, pack_taps, pack_transposed

MIN_WORK = 8 * 1024  # products below which plain loops win (FUSION.md 3.4.7)
TASK_WORK = 1 << 19  # products worth a task: about 10 us
MAX_TASKS = 16  # bounds the scratch: each task has its own slice
SPREAD = 8  # units wanted before rows are split for the sake of parallelism
UNROLL_COST = 12  # cost of an epilogue that is still unrolled over the rows of a tile
PACK_SECONDS = 2e-10  # per element: measured, 8 lanes
ACCUMULATORS = frozenset({DType.F32, DType.F64, DType.I32, DType.U32})


class Access(StrEnum):
    """How the micro-kernel comes to an operand.

    CONST      packed into panels at kernel creation
    DIRECT     read in place
    ROWS       a: packed per block, rows of k (k is the vector axis); b: packed per block, rows of columns
    COLUMNS    a: packed per block, rows of m (m is the vector axis)
    TRANSPOSE  b: packed per block by transposing registers (k has unit stride)
    """

    CONST = "const"
    DIRECT = "direct"
    ROWS = "rows"
    COLUMNS = "columns"
    TRANSPOSE = "transpose"


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """Everything decided before emission. Sizes in elements; KC, NC, MC, MS are upper limits."""

    c: Contraction
    tile: Tile
    a: Access
    b: Access
    kc: int
    nc: int
    mc: int
    ms: int
    taps: int = 1  # blocks of K hold whole channels of so many taps
    shared: bool | None = False  # blocks of b are packed once, by phase 0 (None: known at run time)

    @property
    def packs_b(self) -> bool:
        """Blocks of b are packed in every call."""
        return self.b in (Access.ROWS, Access.TRANSPOSE)

    @property
    def block_size(self) -> int:
        """Elements of one packed block of b."""
        return (self.kc + self.tile.lanes) * self.b_row

    @property
    def typ(self) -> Type:
        return reg_type(self.c.acc)

    @property
    def b_row(self) -> int:
        """Row length of a packed block of b: an odd number of cache lines, so that a panel fills all sets of L1."""
        lines = -(-self.nc * self.c.acc.bytes // 64)
        return (lines + 1 + lines % 2) * 64 // self.c.acc.bytes

    @property
    def a_row(self) -> int:
        """Row length of a packed block of a: likewise."""
        lines = -(-(self.kc if self.a is Access.ROWS else self.ms) * self.c.acc.bytes // 64)
        return (lines + 1 + lines % 2) * 64 // self.c.acc.bytes

    @property
    def single(self) -> bool:
        """K is known to fit into one block."""
        depth = self.c.depth
        return isinstance(depth, int) and depth <= self.kc

    @property
    def b_size(self) -> int:
        """Elements of scratch for b: the block, or the last panel of an operand read in place."""
        if self.b is Access.CONST or (self.packs_b and self.shared):
            return 0
        return (self.kc + self.tile.lanes) * self.tile.nr if self.b is Access.DIRECT else self.block_size

    @property
    def a_size(self) -> int:
        """Elements of scratch for a."""
        if self.a is Access.ROWS:
            return self.ms * self.a_row + self.tile.lanes
        return self.kc * self.a_row + self.tile.lanes if self.a is Access.COLUMNS else 0

    @property
    def c_size(self) -> int:
        """Elements of scratch for resting tiles."""
        return 0 if self.single else self.mc * self.nc

    @property
    def slice_bytes(self) -> int:
        """Scratch of one task."""
        total = sum(-(-n // 16) * 16 for n in (self.a_size, self.b_size, self.c_size))
        return -(-total * self.c.acc.bytes // 64) * 64


class Gemm:
    """The template: see the note above."""

    name = "gemm"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule, or why the kernel is not a matrix product worth blocking."""
        c = roles(kernel)
        if isinstance(c, Refusal):
            return c
        refusal = _unfit(c)
        if refusal is not None:
            return refusal
        d = _design(c, kernel, target)
        packed = tuple(n for n, how in (("a", d.a), ("b", d.b)) if how is Access.CONST)
        return [
            Schedule(
                self.name,
                lanes=d.tile.lanes,
                vector="" if c.cols.axis is None else c.cols.axis.name,
                tile=(d.tile.mr, d.tile.nv, d.kc, d.nc),
                pack=packed,
                grain=TASK_WORK,
                cost=_cost(d, target),
            )
        ]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI."""
        c = roles(kernel)
        assert isinstance(c, Contraction), c
        d = _design(c, kernel, target)
        if schedule.tile:
            mr, nv, kc, nc = schedule.tile
            d = replace(d, tile=replace(d.tile, mr=mr, nv=nv), kc=max(1, kc // d.taps) * d.taps, nc=nc)
        d = replace(d, shared=_shares(build, d))
        packs = Access.CONST in (d.a, d.b)
        tiles = _emit_tiles(build, d)
        block = _emit_block_b(build, kernel, d) if d.packs_b else None
        if packs:
            _emit_pack(build, kernel, d)
        main = 0
        if block is not None and d.shared is not False:
            _emit_share(build, kernel, d, block)
            main = 1
        _emit_tasks(build, kernel, d, main)
        _emit_run(build, kernel, d, main, tiles, block)
        return Emitted(phases=main + 1, packs=packs)


GEMM = Gemm()


# ---- decisions ----


def _unfit(c: Contraction) -> Refusal | None:
    if c.acc not in ACCUMULATORS:
        return Refusal("GEMM_DTYPE", f"accumulates in {c.acc}")
    sizes = [c.rows.extent, c.cols.extent, c.depth, *(a.extent for a in c.batch)]
    if all(isinstance(s, int) for s in sizes):
        work = 1
        for s in sizes:
            work *= s if isinstance(s, int) else 1
        if work < MIN_WORK:
            return Refusal("GEMM_SMALL", f"{work} products, {MIN_WORK} are worth a blocked product")
    if isinstance(c.cols.extent, int) and c.cols.extent < 4:
        return Refusal("GEMM_NARROW", f"{c.cols.extent} columns")
    inner = {c.rows.axis, *c.rows.parts, c.cols.axis, *c.cols.parts, *c.k}
    for e in walk(c.a, c.b):
        if isinstance(e, Apply) and e.prim.name == "bcast" and axes_of(e) & inner:
            return Refusal("GEMM_BCAST", f"{e} broadcasts at run time")
    return None


def _design(c: Contraction, kernel: Kernel, target: Target) -> Design:
    tile = tile_for(target, c.acc, c.rows.extent, c.cols.extent)
    a, b = _access_a(c, kernel), _access_b(c, kernel)
    kc = 256 * 4 // c.acc.bytes
    in_place = b in (Access.CONST, Access.DIRECT)
    # A packed element of a is used nc times, one of b mc times; tiles at rest take mc * nc.
    nc = 384 if in_place else 96 if a is Access.CONST else 256
    nc = -(-nc * 4 // c.acc.bytes // tile.nr) * tile.nr
    ms = 96 // tile.mr * tile.mr
    mc = ms * (1 if in_place else 3 if a is Access.CONST else 4)
    taps = _taps(c) if b is Access.ROWS else 1
    kc = max(1, kc // taps) * taps
    if isinstance(c.depth, int):
        blocks = max(1, -(-c.depth // kc))
        kc = max(1, -(-c.depth // taps // blocks)) * taps
    return Design(c, tile, a, b, kc, nc, mc, ms, taps)


def _taps(c: Contraction) -> int:
    """Number of summed products per value of the first k axis, where it is known."""
    inner = [a.extent for a in c.k[1:]]
    total = 1
    for extent in inner:
        total *= extent if isinstance(extent, int) else 0
    return max(1, total)


def _is_const(e: Expr, c: Contraction, kernel: Kernel) -> bool:
    """The factor depends on constants alone, and its axes have known extents."""
    reads = loads(e)
    sources = {c.views[ld.source].source if ld.source in c.views else ld.source for ld in reads}
    static = all(isinstance(a.extent, int) for a in axes_of(e))
    return bool(reads) and sources <= kernel.consts and static and not syms_of(e)


def _plain(e: Expr, c: Contraction, whole: bool) -> Load | None:
    """The factor as a bare load that is affine in its row or column axis and in one k axis."""
    return e if isinstance(e, Load) and whole and len(c.k) == 1 else None


def _unit(e: Load, axis: Axis | None) -> bool:
    """The load is contiguous along `axis`."""
    if axis is None:
        return False
    return affine(e.index[-1], axis) == 1 and all(affine(i, axis) == 0 for i in e.index[:-1])


def _linear(e: Load, *axes: Axis | None) -> bool:
    return all(affine(i, a) is not None for i in e.index for a in axes if a is not None)


def _access_a(c: Contraction, kernel: Kernel) -> Access:
    if _is_const(c.a, c, kernel):
        return Access.CONST
    ld = _plain(c.a, c, c.rows.factor)
    narrow = isinstance(c.cols.extent, int) and c.cols.extent <= 32
    if ld is not None and _linear(ld, c.rows.axis, c.k[0]):
        if narrow or c.rows.axis is None:
            return Access.DIRECT
        return Access.COLUMNS if _unit(ld, c.rows.axis) else Access.ROWS
    reads = loads(c.a)
    m = c.rows.axis
    return Access.COLUMNS if m is not None and any(_unit(r, m) for r in reads) else Access.ROWS


def _access_b(c: Contraction, kernel: Kernel) -> Access:
    if _is_const(c.b, c, kernel):
        return Access.CONST
    ld = _plain(c.b, c, c.cols.factor)
    if ld is None or not _linear(ld, c.cols.axis, c.k[0]):
        return Access.ROWS
    if _unit(ld, c.cols.axis):
        few = isinstance(c.rows.extent, int) and c.rows.extent <= 16
        return Access.DIRECT if few else Access.ROWS
    return Access.TRANSPOSE if _unit(ld, c.k[0]) else Access.ROWS


def _cost(d: Design, target: Target) -> float:
    """Seconds on one core: arithmetic at 80 % of peak, packing and epilogue, or the traffic of the operands."""
    c = d.c
    m, n, k = expected(c.rows.extent), expected(c.cols.extent), expected(c.depth)
    batch = points(c.batch)
    rate = target.peak * 0.8 * (4 / c.acc.bytes if c.acc.is_float else 0.5)
    efficiency = min(1.0, (m + 1) / 4) * min(1.0, n / 16)
    arithmetic = 2 * batch * m * n * k / (rate * efficiency)
    packed = (m * k if d.a in (Access.ROWS, Access.COLUMNS) else 0) + (k * n if d.packs_b else 0)
    epilogue = pointwise_seconds(batch * m * n * epilogue_cost(c.finish, c.stores), target, c.acc.bytes)
    traffic = batch * (m * k + k * n + m * n) * c.acc.bytes
    return max(arithmetic + batch * packed * PACK_SECONDS + epilogue, traffic / (4 * target.bw)) + 2e-6


# ---- the split into blocks, computed at run time from the dimensions ----


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    m: Index
    n: Index
    k: Index
    nc: Index
    mc: Index
    kc: Index
    nblocks: Index
    mblocks: Index
    kblocks: Index
    units: Index
    tasks: Index
    points: Index  # of the batch, times blocks of columns
    shared: bool | Reg


def _split(build: Builder, env: Env, d: Design) -> _Split:
    c = d.c
    m, n, k = (emit_dim(build, env, x) for x in (c.rows.extent, c.cols.extent, c.depth))
    batch: Index = 1
    for axis in c.batch:
        batch = build.mul(batch, emit_dim(build, env, axis.extent))
    nblocks = build.ceildiv(n, d.nc)
    nc = _round_up(build, build.ceildiv(n, build.imax(nblocks, 1)), d.tile.nr)
    work = build.mul(build.mul(batch, build.mul(m, n)), build.imax(k, 1))
    worth = build.add(build.udiv(work, TASK_WORK), 1)
    points = build.mul(batch, nblocks)
    base = build.imax(points, 1)
    wanted = build.imin(build.udiv(SPREAD, base), build.imin(worth, build.ceildiv(m, 2 * d.tile.mr)))
    mc = _round_up(build, build.ceildiv(m, build.imax(wanted, 1)), d.tile.mr)
    mc = build.imax(build.imin(mc, d.mc), d.tile.mr)
    mblocks = build.ceildiv(m, mc)
    kblocks = build.imax(build.ceildiv(k, d.kc), 1)
    kc = build.mul(build.ceildiv(build.udiv(k, d.taps), kblocks), d.taps)
    units = build.mul(points, mblocks)
    tasks = build.imin(units, build.imin(worth, MAX_TASKS))
    shared: bool | Reg
    if isinstance(mblocks, int) and isinstance(points, int):
        shared = mblocks > 1 and points < SPREAD
    else:
        b = build.ir
        shared = b.and_(
            b.icmp_signed(">", build.i64(mblocks), build.i64(1)),
            b.icmp_signed("<", build.i64(points), build.i64(SPREAD)),
        )
    return _Split(m, n, k, nc, mc, kc, nblocks, mblocks, kblocks, units, tasks, points, shared)


def _shares(build: Builder, d: Design) -> bool | None:
    """Whether blocks of b are shared by units; None when it depends on run-time dimensions."""
    if not d.packs_b:
        return False
    extents = [d.c.rows.extent, d.c.cols.extent, d.c.depth, *(a.extent for a in d.c.batch)]
    if not all(isinstance(x, int) for x in extents):
        return None
    shared = _split(build, Env(1, None, {}, {}, {}), d).shared
    assert isinstance(shared, bool)
    return shared


def _round_up(build: Builder, x: Index, to: int) -> Index:
    return build.mul(build.ceildiv(x, to), to)


def _emit_tasks(build: Builder, kernel: Kernel, d: Design, phase: int) -> None:
    with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
        env = open_kernel(build, kernel, fn.args[0], None)
        build.ret(_split(build, env, d).tasks)
    with build.function("scratch", I64, [PTR]) as fn:
        env = open_kernel(build, kernel, fn.args[0], None)
        s = _split(build, env, d)
        own = build.mul(s.tasks, d.slice_bytes)
        build.ret(build.add(own, build.mul(_shared_blocks(build, s), d.block_size * d.c.acc.bytes)))


def _shared_blocks(build: Builder, s: _Split) -> Index:
    """Number of blocks of b that phase 0 packs."""
    count = build.mul(s.points, s.kblocks)
    if isinstance(s.shared, bool):
        return count if s.shared else 0
    return build.ir.select(s.shared, build.i64(count), build.i64(0))


def _shared_area(build: Builder, s: _Split, d: Design, scratch: Reg) -> Reg:
    """The shared blocks lie behind the slices of the tasks."""
    return build.offset(scratch, build.mul(s.tasks, d.slice_bytes // d.c.acc.bytes), d.typ)


def _emit_share(build: Builder, kernel: Kernel, d: Design, block: Function) -> None:
    """Phase 0: pack the blocks of b that several units of phase 1 read."""
    with build.function("tasks.0", I64, [PTR]) as fn:
        env = open_kernel(build, kernel, fn.args[0], None)
        build.ret(build.imin(_shared_blocks(build, _split(build, env, d)), 2 * SPREAD))
    with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, _, scratch, task = fn.args
        s = _split(build, open_kernel(build, kernel, env_ptr, None), d)
        blocks = build.mul(s.points, s.kblocks)
        tasks = build.imax(build.imin(blocks, 2 * SPREAD), 1)
        first = build.udiv(build.mul(task, blocks), tasks)
        last = build.udiv(build.mul(build.add(task, 1), blocks), tasks)
        area = _shared_area(build, s, d, scratch)
        with build.loop(first, last, name="block") as q:
            at = build.udiv(q, s.kblocks)
            n0 = build.mul(build.umod(at, s.nblocks), s.nc)
            n1 = build.imin(build.add(n0, s.nc), s.n)
            k0 = build.mul(build.umod(q, s.kblocks), s.kc)
            kc = build.imax(build.imin(build.sub(s.k, k0), s.kc), 0)
            dst = build.offset(area, build.mul(q, d.block_size), d.typ)
            args = (build.udiv(at, s.nblocks), n0, n1, k0, kc)
            build.ir.call(block, [env_ptr, bufs, *(build.i64(x) for x in args), dst])


def _emit_block_b(build: Builder, kernel: Kernel, d: Design) -> Function:
    """K.block(env, bufs, batch point, n0, n1, k0, kc, dst): evaluate one block of b into rows of columns."""
    c = d.c
    with build.function("block", VOID, [PTR, PTR, I64, I64, I64, I64, I64, PTR]) as fn:
        fn.linkage = "internal"
        env_ptr, bufs, point, n0, n1, k0, kc, dst = fn.args
        env = _with_views(open_kernel(build, kernel, env_ptr, bufs), c)
        place = env.at(decode(build, env, c.batch, point))
        count = build.sub(n1, n0)
        if d.b is Access.TRANSPOSE:
            assert isinstance(c.b, Load)
            m = _in_place(build, place, c.b, c.cols.axis, c.k[0])
            src = _shift(build, d, m, n0, k0)
            pack_transposed(build, src, m.row, count, kc, dst, d.b_row, c.acc, d.tile.lanes)
        else:
            columns = Line(_own(c, "b"), n0, count)
            depth = Line(c.k, k0, kc)
            if not pack_taps(build, place, c.b, depth, columns, dst, d.b_row, d.tile.lanes):
                pack_block(build, place, c.b, depth, columns, dst, d.b_row, d.tile.lanes)
    return fn


# ---- constants ----


def _panel(d: Design, which: str) -> int:
    return d.tile.mr if which == "a" else d.tile.nr


def _const_axes(c: Contraction, which: str) -> tuple[Axis, ...]:
    """Batch axes a constant factor depends on."""
    used = axes_of(c.a if which == "a" else c.b)
    return tuple(x for x in c.batch if x in used)


def _static(axes: Sequence[Axis]) -> int:
    total = 1
    for axis in axes:
        assert isinstance(axis.extent, int)
        total *= axis.extent
    return total


def _packed_elements(d: Design, which: str) -> int:
    """Elements of the packed copy of a constant factor, one batch point."""
    side = d.c.rows if which == "a" else d.c.cols
    extent, depth = side.extent, d.c.depth
    assert isinstance(extent, int)
    assert isinstance(depth, int)
    return -(-extent // _panel(d, which)) * _panel(d, which) * depth


def _packed_bytes(d: Design, which: str) -> int:
    if (d.a if which == "a" else d.b) is not Access.CONST:
        return 0
    total = _static(_const_axes(d.c, which)) * _packed_elements(d, which) * d.c.acc.bytes
    return -(-total // 64) * 64


def _emit_pack(build: Builder, kernel: Kernel, d: Design) -> None:
    with build.function("packed_bytes", I64, []):
        build.ret(_packed_bytes(d, "a") + _packed_bytes(d, "b"))
    with build.function("pack", VOID, [PTR, PTR]) as fn:
        bufs, packed = fn.args
        env = _const_env(build, kernel, d, bufs)
        for which, how in (("a", d.a), ("b", d.b)):
            if how is Access.CONST:
                start = 0 if which == "a" else _packed_bytes(d, "a")
                _pack_const(build, env, d, which, build.offset(packed, start // d.c.acc.bytes, d.typ))


def _const_env(build: Builder, kernel: Kernel, d: Design, bufs: Reg) -> Env:
    buffers: dict[Value, Buffer] = {}
    for i, v in enumerate(kernel.inputs):
        if v not in kernel.consts or not v.tensor.static or not v.tensor.dtype.computable:
            continue
        strides: list[int] = []
        step = 1
        for extent in reversed(v.tensor.shape):
            strides.insert(0, step)
            step *= extent if isinstance(extent, int) else 1
        ptr = build.load(build.offset(bufs, i, PTR), PTR)
        buffers[v] = Buffer(ptr, v.tensor.dtype, tuple(strides))
    return _with_views(Env(1, None, {}, {}, buffers), d.c)


def _pack_const(build: Builder, env: Env, d: Design, which: str, dst: Reg) -> None:
    """Panels of MR rows or NR columns: [batch][panel][k][lane]; lanes past the end repeat the last."""
    c = d.c
    side, expr = (c.rows, c.a) if which == "a" else (c.cols, c.b)
    width, extent = _panel(d, which), side.extent
    assert isinstance(extent, int)
    axes = _const_axes(c, which)
    own = (side.axis,) if side.factor and side.axis is not None else side.parts
    depth = _static(c.k)
    panels = -(-extent // width)
    with build.loop(0, _static(axes), name="batch") as z, build.loop(0, panels, name="panel") as p:
        place = env.at(decode(build, env, axes, z))
        panel = build.mul(build.add(build.mul(z, panels), p), depth * width)
        with build.loop(0, depth, name="k") as k, build.loop(0, width, name="lane") as i:
            at = build.imin(build.add(build.mul(p, width), i), extent - 1)
            here = place.at({**decode(build, env, c.k, k), **decode(build, env, own, at)})
            spot = build.add(panel, build.add(build.mul(k, width), i))
            build.store(emit_expr(build, here, expr), build.offset(dst, spot, d.typ))


def _with_views(env: Env, c: Contraction) -> Env:
    """Buffers for values seen with merged dimensions."""
    extra: dict[Value, Buffer] = {}
    for view, seen in c.views.items():
        source = env.buffers.get(seen.source)
        if source is not None:
            strides = tuple(source.strides[j] for j in seen.kept)
            extra[view] = Buffer(source.ptr, source.dtype, strides, source.invariant)
    return env.at(buffers=extra)


# ---- micro-kernels ----


Tiles = dict[tuple[int, int], Function]


def _row_counts(d: Design) -> list[int]:
    """Row counts that can occur: those of the binary remainder, fewer when the number of rows is known."""
    counts = list(d.tile.rows)
    if isinstance(d.c.rows.extent, int):
        full, rest = divmod(d.c.rows.extent, d.tile.mr)
        counts = [r for r in counts if (r == d.tile.mr and full) or (r != d.tile.mr and rest & r)]
    return counts


def _vector_counts(d: Design) -> list[int]:
    if d.tile.nv == 1:
        return [1]
    if isinstance(d.c.cols.extent, int):
        full, rest = divmod(d.c.cols.extent, d.tile.nr)
        narrow = 0 < rest <= d.tile.lanes
        return [d.tile.nv] * bool(full or rest > d.tile.lanes) + [1] * narrow
    return [d.tile.nv, 1]


def _emit_tiles(build: Builder, d: Design) -> Tiles:
    if d.a is Access.CONST:
        a_row, a_step = 1, d.tile.mr
    elif d.a is Access.ROWS:
        a_row, a_step = d.a_row, 1
    elif d.a is Access.COLUMNS:
        a_row, a_step = 1, d.a_row
    else:
        a_row, a_step = None, None
    b_stride = {Access.CONST: d.tile.nr, Access.DIRECT: None}.get(d.b, d.b_row)
    strides = Strides(a_row, a_step, b_stride)
    return {(mr, nv): micro_kernel(build, d.tile, mr, nv, strides) for mr in _row_counts(d) for nv in _vector_counts(d)}


# ---- the loops ----


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """One unit at run time: where it is and where its operands come from."""

    env: Env
    split: _Split
    m0: Index
    m1: Index
    n0: Index
    n1: Index
    packed_a: Reg
    packed_b: Reg
    scratch_a: Reg
    scratch_b: Reg
    scratch_c: Reg
    shared: Reg
    point: Index
    column: Index  # batch point and block of columns
    env_ptr: Reg
    bufs: Reg


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """An operand for one block: element (i, k) is at base + i*row + k*step."""

    base: Reg
    row: Index
    step: Index


def _emit_run(build: Builder, kernel: Kernel, d: Design, phase: int, tiles: Tiles, block: Function | None) -> None:
    with build.function(f"run.{phase}", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, packed, scratch, task = fn.args
        env = _with_views(open_kernel(build, kernel, env_ptr, bufs), d.c)
        s = _split(build, env, d)
        home = build.alloca(d.typ, d.tile.mr * d.tile.nr) if d.single else None
        first = build.udiv(build.mul(task, s.units), s.tasks)
        last = build.udiv(build.mul(build.add(task, 1), s.units), s.tasks)
        with build.loop(first, last, name="unit") as unit:
            u = _open_unit(build, env, d, s, unit, (env_ptr, bufs, packed, scratch, task))
            _run_unit(build, u, d, tiles, home, block)


def _open_unit(
    build: Builder, env: Env, d: Design, s: _Split, unit: Reg, args: tuple[Reg, Reg, Reg, Reg, Reg]
) -> _Unit:
    env_ptr, bufs, packed, scratch, task = args
    c = d.c
    column = build.udiv(unit, s.mblocks)
    point = build.udiv(column, s.nblocks)
    m0 = build.mul(build.umod(unit, s.mblocks), s.mc)
    n0 = build.mul(build.umod(column, s.nblocks), s.nc)
    place = env.at(decode(build, env, c.batch, point))
    mine = build.offset(scratch, build.mul(task, d.slice_bytes // c.acc.bytes), d.typ)
    sizes = [-(-n // 16) * 16 for n in (d.a_size, d.b_size)]
    packed_b = build.offset(packed, _packed_bytes(d, "a") // c.acc.bytes, d.typ)
    return _Unit(
        env=place,
        split=s,
        m0=m0,
        m1=build.imin(build.add(m0, s.mc), s.m),
        n0=n0,
        n1=build.imin(build.add(n0, s.nc), s.n),
        packed_a=_const_base(build, place, d, "a", packed),
        packed_b=_const_base(build, place, d, "b", packed_b),
        scratch_a=mine,
        scratch_b=build.offset(mine, sizes[0], d.typ),
        scratch_c=build.offset(mine, sum(sizes), d.typ),
        shared=_shared_area(build, s, d, scratch),
        point=point,
        column=column,
        env_ptr=env_ptr,
        bufs=bufs,
    )


def _const_base(build: Builder, env: Env, d: Design, which: str, packed: Reg) -> Reg:
    if (d.a if which == "a" else d.b) is not Access.CONST:
        return packed
    flat: Index = 0
    for axis in _const_axes(d.c, which):
        assert isinstance(axis.extent, int)
        flat = build.add(build.mul(flat, axis.extent), env.axes[axis])
    return build.offset(packed, build.mul(flat, _packed_elements(d, which)), d.typ)


def _run_unit(build: Builder, u: _Unit, d: Design, tiles: Tiles, home: Reg | None, block: Function | None) -> None:
    s = u.split
    with build.loop(0, s.kblocks, name="kb") as kb:
        k0 = build.mul(kb, s.kc)
        kc = build.imax(build.imin(build.sub(s.k, k0), s.kc), 0)
        block_b = _block_b(build, u, d, kb, k0, kc, block)
        with build.loop(u.m0, u.m1, d.ms, name="ms") as s0:
            s1 = build.imin(build.add(s0, d.ms), u.m1)
            block_a = _block_a(build, u, d, k0, kc, s0, s1)
            with build.loop(u.n0, u.n1, d.tile.nr, name="j") as j:
                cols = build.imin(build.sub(u.n1, j), d.tile.nr)
                panel = _panel_b(build, u, d, block_b, j, cols, k0, kc)
                with build.loop(s0, s1, d.tile.mr, name="i") as i:
                    rows = build.imin(build.sub(s1, i), d.tile.mr)
                    tile = _tile_a(build, d, block_a, i, s0, k0, s.k)
                    at = home if home is not None else _resting(build, u, d, i, j)
                    start = build.ir.icmp_signed("==", build.i64(kb), build.i64(0))
                    _call_tiles(build, d, tiles, tile, panel, rows, cols, kc, at, start)
                    done = build.ir.icmp_signed("==", build.i64(build.add(kb, 1)), build.i64(s.kblocks))
                    with build.if_then(done):
                        _epilogue(build, u, d, i, rows, j, cols, at)


def _resting(build: Builder, u: _Unit, d: Design, i: Index, j: Index) -> Reg:
    """Home of the tile at (i, j) between blocks of K."""
    per_column = build.ceildiv(u.split.mc, d.tile.mr)
    column = build.udiv(build.sub(j, u.n0), d.tile.nr)
    number = build.add(build.mul(column, per_column), build.udiv(build.sub(i, u.m0), d.tile.mr))
    return build.offset(u.scratch_c, build.mul(number, d.tile.mr * d.tile.nr), d.typ)


def _in_place(build: Builder, env: Env, e: Load, own: Axis | None, k: Axis) -> _Matrix:
    """A bare load as a strided matrix, base at the origin of its row (or column) and k axes."""
    zero = {a: build.i64(0) for a in (own, k) if a is not None}
    here = env.at(zero)
    flat = flat_of(env, e)
    base = build.offset(env.buffers[e.source].ptr, emit_expr(build, here, flat), reg_type(e.dtype))
    steps: list[Index] = []
    for axis in (own, k):
        split = None if axis is None else split_affine(flat, var(axis))
        step = split[1] if split is not None else None
        steps.append(0 if step is None else int(step.value) if isinstance(step, Lit) else emit_expr(build, here, step))
    return _Matrix(base, steps[0], steps[1])


def _shift(build: Builder, d: Design, m: _Matrix, row: Index, k: Index) -> Reg:
    return build.offset(m.base, build.add(build.mul(row, m.row), build.mul(k, m.step)), d.typ)


def _own(c: Contraction, which: str) -> tuple[Axis, ...]:
    """Axes a factor is written in, on its own side."""
    side = c.rows if which == "a" else c.cols
    if side.axis is None:
        return ()
    return (side.axis,) if side.factor else side.parts


def _block_a(build: Builder, u: _Unit, d: Design, k0: Index, kc: Index, s0: Index, s1: Index) -> _Matrix:
    c = d.c
    if d.a is Access.CONST:
        return _Matrix(u.packed_a, 1, d.tile.mr)
    if d.a is Access.DIRECT:
        assert isinstance(c.a, Load)
        return _in_place(build, u.env, c.a, c.rows.axis, c.k[0])
    rows = Line(_own(c, "a"), s0, build.sub(s1, s0))
    depth = Line(c.k, k0, kc)
    if d.a is Access.ROWS:
        pack_block(build, u.env, c.a, rows, depth, u.scratch_a, d.a_row, d.tile.lanes)
        return _Matrix(u.scratch_a, d.a_row, 1)
    pack_block(build, u.env, c.a, depth, rows, u.scratch_a, d.a_row, d.tile.lanes)
    return _Matrix(u.scratch_a, 1, d.a_row)


def _tile_a(build: Builder, d: Design, a: _Matrix, i: Index, s0: Index, k0: Index, depth: Index) -> _Matrix:
    """The rows of one tile."""
    if d.a is Access.CONST:  # panels of MR rows; i is a multiple of MR
        return replace(a, base=build.offset(a.base, build.add(build.mul(i, depth), build.mul(k0, d.tile.mr)), d.typ))
    if d.a is Access.DIRECT:
        return replace(a, base=_shift(build, d, a, i, k0))
    return replace(a, base=_shift(build, d, a, build.sub(i, s0), 0))


def _block_b(build: Builder, u: _Unit, d: Design, kb: Index, k0: Index, kc: Index, block: Function | None) -> _Matrix:
    c = d.c
    if d.b is Access.CONST:
        return _Matrix(u.packed_b, 1, d.tile.nr)
    if block is None:
        assert isinstance(c.b, Load)
        return _in_place(build, u.env, c.b, c.cols.axis, c.k[0])
    number = build.add(build.mul(u.column, u.split.kblocks), kb)
    there = build.offset(u.shared, build.mul(number, d.block_size), d.typ)
    if d.shared:
        return _Matrix(there, 1, d.b_row)
    args = [u.env_ptr, u.bufs, *(build.i64(x) for x in (u.point, u.n0, u.n1, k0, kc)), u.scratch_b]
    if d.shared is False:
        build.ir.call(block, args)
        return _Matrix(u.scratch_b, 1, d.b_row)
    assert not isinstance(u.split.shared, bool)
    with build.if_then(build.ir.not_(u.split.shared)):
        build.ir.call(block, args)
    return _Matrix(build.ir.select(u.split.shared, there, u.scratch_b), 1, d.b_row)


def _panel_b(build: Builder, u: _Unit, d: Design, b: _Matrix, j: Index, cols: Index, k0: Index, kc: Index) -> _Matrix:
    """The columns of one panel. Read in place, the last panel is copied: no load may pass the end of a tensor."""
    if d.b is Access.CONST:
        at = build.add(build.mul(j, u.split.k), build.mul(k0, d.tile.nr))
        return replace(b, base=build.offset(b.base, at, d.typ))
    if d.b is not Access.DIRECT:
        return replace(b, base=build.offset(b.base, build.sub(j, u.n0), d.typ))
    at = _shift(build, d, b, j, k0)
    if isinstance(d.c.cols.extent, int) and d.c.cols.extent % d.tile.nr == 0:
        return replace(b, base=at)
    partial = build.ir.icmp_signed("<", build.i64(cols), build.i64(d.tile.nr))
    with build.if_then(partial):
        line = Line(_own(d.c, "b"), j, cols)
        pack_block(build, u.env, d.c.b, Line(d.c.k, k0, kc), line, u.scratch_b, d.tile.nr, d.tile.lanes)
    base = build.ir.select(partial, u.scratch_b, at)
    step = build.ir.select(partial, build.i64(d.tile.nr), build.i64(b.step))
    return replace(b, base=base, step=step)


def _call_tiles(
    build: Builder,
    d: Design,
    tiles: Tiles,
    a: _Matrix,
    b: _Matrix,
    rows: Index,
    cols: Index,
    kc: Index,
    at: Reg,
    start: Reg,
) -> None:
    """Run the micro-kernels that cover `rows` x `cols`: the full tile, or one for each bit of the remainder."""
    counts = sorted({mr for mr, _ in tiles}, reverse=True)

    def call(mr: int, first: Index) -> None:
        base = build.offset(a.base, build.mul(first, a.row), d.typ)
        home = build.offset(at, build.mul(first, d.tile.nr), d.typ)
        args = [base, build.i64(a.row), build.i64(a.step), b.base, build.i64(b.step), build.i64(kc), home, start]
        widths = sorted(nv for r, nv in tiles if r == mr)
        if len(widths) == 1:
            build.ir.call(tiles[mr, widths[0]], args)
            return
        narrow = build.ir.icmp_signed("<=", build.i64(cols), build.i64(d.tile.lanes))
        with build.if_else(narrow, likely=False) as (then, other):
            with then:
                build.ir.call(tiles[mr, 1], args)
            with other:
                build.ir.call(tiles[mr, d.tile.nv], args)

    full = counts[0] == d.tile.mr
    if counts == [d.tile.mr]:
        call(d.tile.mr, 0)
        return
    if not full:
        _call_rest(build, call, counts, rows)
        return
    whole = build.ir.icmp_signed("==", build.i64(rows), build.i64(d.tile.mr))
    with build.if_else(whole, likely=True) as (then, other):
        with then:
            call(d.tile.mr, 0)
        with other:
            _call_rest(build, call, counts[1:], rows)


def _call_rest(build: Builder, call: Callable[[int, Index], None], counts: list[int], rows: Index) -> None:
    first: Index = 0
    for mr in counts:
        take = build.ir.icmp_signed("!=", build.ir.and_(build.i64(rows), build.i64(mr)), build.i64(0))
        with build.if_then(take):
            call(mr, first)
        first = build.add(first, build.ir.and_(build.i64(rows), build.i64(mr)))


# ---- epilogue ----


def _epilogue(build: Builder, u: _Unit, d: Design, i: Index, rows: Index, j: Index, cols: Index, at: Reg) -> None:
    """Finish and store a tile: whole vectors, or masked ones at the right edge."""
    c, tile = d.c, d.tile
    x = c.cols.axis
    assert x is not None

    def vector(row: Env, line: Reg, v: Index, mask: Reg | None) -> None:
        here = row.at({x: build.i64(build.add(j, v))}).vector(x, tile.lanes, mask)
        total = build.load(build.offset(line, v, d.typ), d.typ, tile.lanes)
        here = here.at(bound={acc(c.acc): total})
        if c.result is not None:
            here = here.at(bound={c.result: build.widen(emit_expr(build, here, c.finish), tile.lanes)})
        for s in c.stores:
            emit_store(build, here, s.target, s.index, s.value)

    def row(r: Index) -> tuple[Env, Reg]:
        place = u.env.at() if c.rows.axis is None else u.env.at({c.rows.axis: build.i64(build.add(i, r))})
        return place, build.offset(at, build.mul(r, tile.nr), d.typ)

    def whole_row(r: Index) -> None:
        place, line = row(r)
        for v in range(tile.nv):
            vector(place, line, v * tile.lanes, None)

    wide = build.ir.icmp_signed("==", build.i64(cols), build.i64(tile.nr))
    with build.if_else(wide, likely=True) as (then, other):
        with then:
            _each_row(build, d, rows, whole_row)
        with other, build.loop(0, rows, name="r") as r, build.loop(0, cols, tile.lanes, name="v") as v:
            place, line = row(r)
            mask = build.tail_mask(build.sub(cols, v), tile.lanes) if tile.lanes > 1 else None
            vector(place, line, v, mask)


def _each_row(build: Builder, d: Design, rows: Index, emit: Callable[[Index], None]) -> None:
    """All rows of a tile: straight-line code for a full tile if the epilogue is short, else a loop."""
    if epilogue_cost(d.c.finish, d.c.stores) > UNROLL_COST:
        with build.loop(0, rows, name="r") as r:
            emit(r)
        return
    full = build.ir.icmp_signed("==", build.i64(rows), build.i64(d.tile.mr))
    with build.if_else(full, likely=True) as (then, other):
        with then:
            for k in range(d.tile.mr):
                emit(k)
        with other, build.loop(0, rows, name="r") as r:
            emit(r)
