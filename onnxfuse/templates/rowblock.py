"""Row blocks: a matrix product, a row program over its columns while they are in cache, perhaps a second product.

[Note: attention]

    task: a range of units; unit = (batch point, chunk of rows)
      pack the columns of both products once (keys, values; constants were packed at creation)
      for each block of rows:
        first product into the block (rows x columns, a few hundred KiB at most), its pointwise stages as epilogue
        for each row: the stages of the row program, in place (softmax: maximum; exponential and sum; shares)
        last product from the block, stored where the views behind it say

Everything but the tile sizes may be a run-time value. Chunks and blocks depend on dimensions only, so results do not
depend on the number of threads. The products are those of the gemm template (gemm_design, gemm_loops), one block of
rows at a time; the row program is rowwise's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.codegen.build import I8, I64, PTR, VOID, Builder, Function, Index, Reg, mem_type
from onnxfuse.codegen.scalar_expr import Buffer, Env, emit_dim, open_kernel
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Apply, axes_of, i64, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.target import Target
from onnxfuse.templates.estimate import epilogue_cost, expected, points, pointwise_seconds
from onnxfuse.templates.gemm_blocks import MAX_TASKS, SPREAD, TASK_WORK, Split
from onnxfuse.templates.gemm_const import const_base, pack_constants, packed_bytes
from onnxfuse.templates.gemm_design import Access, Design, design
from onnxfuse.templates.gemm_loops import Tiles, emit_tiles, run_unit
from onnxfuse.templates.gemm_operands import Unit, emit_block_b
from onnxfuse.templates.packing import decode
from onnxfuse.templates.rowblock_form import Area, Form, dissect
from onnxfuse.templates.rowwise import RowCode

ROWS = 48  # of a block, at most: enough to use a packed panel often, few enough that the block stays in L2
L2_SHARE = 4  # part of L2 that a block of rows may fill: packed columns and outputs pass through it too
TAIL_ROWS = 96  # of a block in front of constant weights: they are read once a block
TAIL_SHARE = 2  # part of L2 for such a block
TAIL_TILES = 5  # tiles of a chunk in front of constant weights
COLUMNS = 256  # of a packed block
LONG = 64  # rows of a chunk that make packing the columns worth it


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A form with the designs of its products and the code of its rows."""

    form: Form
    designs: tuple[Design, ...]
    rows: RowCode
    block_bytes: int

    @property
    def mr(self) -> int:
        return self.designs[0].tile.mr

    @property
    def packs(self) -> bool:
        """Columns are packed in every unit."""
        return any(d.packs_b for d in self.designs)


class RowBlocks:
    """The template: see the note above."""

    name = "rowblock"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule, or why the kernel is none of row blocks."""
        form = dissect(kernel)
        if isinstance(form, Refusal):
            return form
        inner = {form.row, *(x for c in form.products for x in (c.cols.axis, *c.k))}
        for e in walk(*(x for c in form.products for x in (c.a, c.b))):
            if isinstance(e, Apply) and e.prim.name == "bcast" and axes_of(e) & inner:
                return Refusal("GEMM_BCAST", f"{e} broadcasts at run time")
        w = _work(kernel, form, target)
        d = w.designs[0]
        return [
            Schedule(
                self.name,
                lanes=d.tile.lanes,
                vector="" if d.c.cols.axis is None else d.c.cols.axis.name,
                tile=(d.tile.mr, d.tile.nv, d.mc),
                pack=tuple(f"b{k}" for k, x in enumerate(w.designs, 1) if x.b is Access.CONST),
                grain=TASK_WORK,
                cost=_cost(w, target),
            )
        ]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI."""
        form = dissect(kernel)
        assert isinstance(form, Form), form
        w = _work(kernel, form, target)
        made: list[_Made] = []
        for k, d in enumerate(w.designs, 1):
            with build.part(f"product{k}"):
                made.append(_Made(d, emit_tiles(build, d), emit_block_b(build, kernel, d) if d.packs_b else None))
        consts = any(Access.CONST in (d.a, d.b) for d in w.designs)
        if consts:
            pack_constants(build, kernel, w.designs)
        with build.function("tasks.0", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            build.ret(_sizes(build, env, w).tasks)
        with build.function("scratch", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            z = _sizes(build, env, w)
            build.ret(build.mul(z.tasks, z.slice_bytes))
        _emit_run(build, kernel, w, made)
        return Emitted(phases=1, packs=consts)


ROWBLOCK = RowBlocks()


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A product's design and functions."""

    design: Design
    tiles: Tiles
    block: Function | None


def _work(kernel: Kernel, form: Form, target: Target) -> Work:
    plain = [_in_blocks(design(c, kernel, target)) for c in form.products]
    mr = plain[0].tile.mr
    block = max(1, (ROWS if form.last is not None else TAIL_ROWS) // mr) * mr
    designs = []
    for d in plain:  # blocks are whole tiles of the first product only: another has tiles left over in every block
        rows = -(-block // d.tile.mr) * d.tile.mr
        designs.append(replace(d, mc=rows, ms=rows, shared=d.packs_b, pieces=mr % d.tile.mr != 0))
    share = L2_SHARE if form.last is not None else TAIL_SHARE
    return Work(form, tuple(designs), RowCode.of(kernel, form.nest, target), target.l2 // share)


def _in_blocks(d: Design) -> Design:
    """Columns that a plain product would pack panel by panel are packed as a whole, for all blocks of rows."""
    if d.b is not Access.PANEL:
        return d
    columns, n = COLUMNS, d.c.cols.extent
    if isinstance(n, int):
        columns = min(columns, -(-max(1, n) // d.tile.nr) * d.tile.nr)
    return replace(d, b=Access.ROWS, nc=columns)


def _cost(w: Work, target: Target) -> float:
    """Seconds on one core: both products at 70 % of peak, packing, the row program."""
    m, batch = expected(w.form.first.rows.extent), points(w.form.batch)
    total = 0.0
    for d in w.designs:
        c = d.c
        n, k = expected(c.cols.extent), expected(c.depth)
        rate = target.peak * 0.7 * 4 / c.acc.bytes * min(1.0, (m + 1) / 4) * min(1.0, n / 16)
        total += 2 * batch * m * n * k / rate + (batch * n * k * 2e-10 if d.packs_b else 0.0)
        total += pointwise_seconds(batch * m * n * epilogue_cost(c.finish, c.stores), target, c.acc.bytes)
    rate = target.peak / (4 * target.lanes(4))
    return total + batch * m * w.rows.operations / rate + 2e-6


# ---- sizes at run time ----


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """What the dimensions come to. Bytes of the parts of a task's slice: products, then packed columns, then areas."""

    m: Index
    tiles: Index
    chunks: Index
    units: Index
    tasks: Index
    block: Index  # rows of a block, at most
    splits: tuple[Split, ...]
    packed: tuple[Index, ...]
    areas: tuple[Index, ...]
    slice_bytes: Index


def _sizes(build: Builder, env: Env, w: Work) -> Sizes:
    """The split for the dimensions in `env`; depends on nothing else."""
    form = w.form
    m = emit_dim(build, env, form.first.rows.extent)
    batch: Index = 1
    for axis in form.batch:
        batch = build.mul(batch, emit_dim(build, env, axis.extent))
    work: Index = 0
    for c in form.products:
        work = build.add(
            work, build.mul(emit_dim(build, env, c.cols.extent), build.imax(emit_dim(build, env, c.depth), 1))
        )
    work = build.mul(build.mul(batch, m), work)
    worth = build.add(build.udiv(work, TASK_WORK), 1)
    tiles = build.ceildiv(m, w.mr)
    chunks = build.udiv(SPREAD, build.imax(batch, 1))
    chunks = build.imin(build.imin(chunks, worth), build.udiv(m, LONG if w.packs else TAIL_TILES * w.mr))
    chunks = build.imax(chunks, 1)
    units = build.mul(batch, chunks)
    tasks = build.imin(units, build.imin(worth, MAX_TASKS))
    block = _block_rows(build, env, w)
    splits = tuple(_split(build, env, d, m, block) for d in w.designs)
    packed = tuple(
        build.mul(build.mul(s.nblocks, s.kblocks), d.block_size * d.c.acc.bytes) if d.packs_b else 0
        for s, d in zip(splits, w.designs, strict=True)
    )
    areas = tuple(_area_bytes(build, env, a, block) for a in form.areas)
    total: Index = sum(d.slice_bytes for d in w.designs)
    for n in (*packed, *areas):
        total = build.add(total, n)
    return Sizes(m, tiles, chunks, units, tasks, block, splits, packed, areas, total)


def _block_rows(build: Builder, env: Env, w: Work) -> Index:
    """Rows of a block: as many as its share of L2 holds, whole tiles."""
    each: Index = 0
    for a in w.form.areas:
        if a.whole:
            each = build.add(each, build.mul(emit_dim(build, env, a.stride), a.dtype.bytes))
    fit = build.udiv(w.block_bytes, build.mul(build.imax(each, 1), w.mr))
    return build.mul(build.imax(build.imin(fit, w.designs[0].mc // w.mr), 1), w.mr)


def _area_bytes(build: Builder, env: Env, a: Area, block: Index) -> Index:
    """Bytes of an area; a vector may read past the end of a row."""
    row = build.mul(emit_dim(build, env, a.stride), a.dtype.bytes)
    return build.add(build.mul(row, block if a.whole else 1), 64)


def _split(build: Builder, env: Env, d: Design, m: Index, block: Index) -> Split:
    """The split of one product within a block of rows: one column of blocks after the other."""
    n, k = emit_dim(build, env, d.c.cols.extent), emit_dim(build, env, d.c.depth)
    nblocks = build.imax(build.ceildiv(n, d.nc), 1)
    nc = build.mul(build.ceildiv(build.ceildiv(n, nblocks), d.tile.nr), d.tile.nr)
    nblocks = build.ceildiv(n, build.imax(nc, 1))
    kblocks = build.imax(build.ceildiv(k, d.kc), 1)
    kc = build.ceildiv(k, kblocks)
    return Split(m, n, k, nc, block, block, kc, nblocks, 1, kblocks, 1, 1)


# ---- code ----


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One unit at run time: its batch point, its env, and the memory of its task."""

    env: Env
    env_ptr: Reg
    bufs: Reg
    packed: Reg
    point: Reg
    own: tuple[Reg, ...]  # scratch of each product
    columns: tuple[Reg, ...]  # packed columns of each product
    areas: tuple[Reg, ...]


def _emit_run(build: Builder, kernel: Kernel, w: Work, made: Sequence[_Made]) -> None:
    with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, packed, scratch, task = fn.args
        env = open_kernel(build, kernel, env_ptr, bufs)
        z = _sizes(build, env, w)
        homes = [build.alloca(d.typ, d.tile.mr * d.tile.nr) if d.single else None for d in w.designs]
        first = build.udiv(build.mul(task, z.units), z.tasks)
        last = build.udiv(build.mul(build.add(task, 1), z.units), z.tasks)
        at: Index = build.mul(task, z.slice_bytes)
        starts: list[Reg] = []
        for n in (*(d.slice_bytes for d in w.designs), *z.packed, *z.areas):
            starts.append(build.offset(scratch, at, I8))
            at = build.add(at, n)
        k = len(w.designs)
        memory = (tuple(starts[:k]), tuple(starts[k : 2 * k]), tuple(starts[2 * k :]))
        with build.loop(first, last, name="unit") as unit:
            point = build.i64(build.udiv(unit, z.chunks))
            here = env.at(decode(build, env, w.form.batch, point))
            p = _Place(here, env_ptr, bufs, packed, point, *memory)
            _run_unit(build, w, made, homes, z, p, build.umod(unit, z.chunks))


def _run_unit(
    build: Builder, w: Work, made: Sequence[_Made], homes: Sequence[Reg | None], z: Sizes, p: _Place, chunk: Index
) -> None:
    for k, x in enumerate(made):
        if x.block is not None:
            _pack_columns(build, x.design, x.block, z.splits[k], p, p.columns[k])
    r0 = build.mul(build.udiv(build.mul(chunk, z.tiles), z.chunks), w.mr)
    r1 = build.mul(build.udiv(build.mul(build.add(chunk, 1), z.tiles), z.chunks), w.mr)
    r1 = build.imin(r1, z.m)
    blocks = build.imax(build.ceildiv(build.sub(r1, r0), z.block), 1)
    step = build.mul(build.ceildiv(build.ceildiv(build.sub(r1, r0), blocks), w.mr), w.mr)
    with build.loop(r0, r1, build.imax(step, w.mr), name="rows") as m0:
        m1 = build.imin(build.add(m0, step), r1)
        _product(build, w, made, homes, z, p, 0, m0, m1)
        with build.loop(m0, m1, name="row") as i:
            axes = {} if w.form.row is None else {w.form.row: i}
            w.rows.emit(build, p.env.at(axes, buffers=_row_buffers(build, w.form, p, build.sub(i, m0))))
        if len(made) > 1:
            _product(build, w, made, homes, z, p, 1, m0, m1)


def _pack_columns(build: Builder, d: Design, block: Function, s: Split, p: _Place, dst: Reg) -> None:
    """All blocks of columns of this batch point, in the order in which the loops ask for them."""
    with build.loop(0, s.nblocks, name="nb") as nb, build.loop(0, s.kblocks, name="kb") as kb:
        n0, k0 = build.mul(nb, s.nc), build.mul(kb, s.kc)
        n1, kc = build.imin(build.add(n0, s.nc), s.n), build.imax(build.imin(build.sub(s.k, k0), s.kc), 0)
        number = build.add(build.mul(nb, s.kblocks), kb)
        there = build.offset(dst, build.mul(number, d.block_size), d.typ)
        place = (build.i64(x) for x in (p.point, n0, n1, k0, kc))
        build.ir.call(block, [p.env_ptr, p.bufs, there, *place, there])  # nothing is lifted


def _product(
    build: Builder,
    w: Work,
    made: Sequence[_Made],
    homes: Sequence[Reg | None],
    z: Sizes,
    p: _Place,
    k: int,
    m0: Index,
    m1: Index,
) -> None:
    """Product k for rows m0 .. m1."""
    x, s, own = made[k], z.splits[k], p.own[k]
    d = x.design
    env = p.env.at(buffers=_block_buffers(build, w.form, p, m0))
    before = sum(packed_bytes(y.design, which) for y in made[:k] for which in ("a", "b"))
    consts = build.offset(p.packed, before // d.c.acc.bytes, d.typ)
    consts_b = build.offset(consts, packed_bytes(d, "a") // d.c.acc.bytes, d.typ)
    sizes = [-(-n // 16) * 16 for n in (d.a_size, d.b_size)]
    with build.loop(0, s.nblocks, name="nb") as nb:
        n0 = build.mul(nb, s.nc)
        u = Unit(
            env=env,
            split=s,
            m0=m0,
            m1=m1,
            n0=n0,
            n1=build.imin(build.add(n0, s.nc), s.n),
            packed_a=const_base(build, env, d, "a", consts),
            packed_b=const_base(build, env, d, "b", consts_b),
            scratch_a=own,
            scratch_b=build.offset(own, sizes[0], d.typ),
            scratch_c=build.offset(own, sum(sizes), d.typ),
            shared=p.columns[k],
            point=p.point,
            column=nb,
            env_ptr=p.env_ptr,
            bufs=p.bufs,
            lifted=own,  # nothing is
        )
        run_unit(build, u, d, x.tiles, homes[k], x.block)


def _block_buffers(build: Builder, form: Form, p: _Place, m0: Index) -> Mapping[Value, Buffer]:
    """The block as the products see it: indexed by the row itself."""
    out: dict[Value, Buffer] = {}
    for v, k in form.block.items():
        a = form.areas[k]
        back = build.mul(m0, emit_dim(build, p.env, a.stride)) if form.row is not None else 0
        ptr = build.offset(p.areas[k], build.sub(0, back), mem_type(a.dtype))
        out[v] = Buffer(ptr, a.dtype, (a.stride, i64(1)))
    return out


def _row_buffers(build: Builder, form: Form, p: _Place, r: Index) -> Mapping[Value, Buffer]:
    """The row buffers of row r of the block."""
    out: dict[Value, Buffer] = {}
    for v, k in form.at.items():
        a = form.areas[k]
        shift = build.mul(r, emit_dim(build, p.env, a.stride)) if a.whole else 0
        out[v] = Buffer(build.offset(p.areas[k], shift, mem_type(a.dtype)), a.dtype, (1,))
    return out


__all__ = ["ROWBLOCK", "RowBlocks"]
