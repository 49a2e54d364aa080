"""The loops of a contraction over the blocks of one unit, and the calls of its micro-kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from onnxfuse.codegen.build import I1, I64, PTR, VOID, Builder, Function, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, open_kernel
from onnxfuse.ir.kernel import Kernel
from onnxfuse.templates.gemm_blocks import Split, lifted_area, split
from onnxfuse.templates.gemm_const import const_base, packed_bytes, with_views
from onnxfuse.templates.gemm_design import FEW_ROWS, Access, Design
from onnxfuse.templates.gemm_epilogue import epilogue, finish_tile, short
from onnxfuse.templates.gemm_fetch import both, constants_ahead, panel_lines, tile_lines
from onnxfuse.templates.gemm_joined import fill, tables
from onnxfuse.templates.gemm_lift import with_lifts
from onnxfuse.templates.gemm_operands import Matrix, Unit, a_block, a_tile, b_block, b_panel, pack_panel, panel_reader
from onnxfuse.templates.microkernel import (
    Operands,
    Strides,
    accumulate,
    dot_kernel,
    micro_kernel,
    thin_kernel,
    tile_homes,
    with_kept,
)
from onnxfuse.templates.packing import decode

Tiles = dict[tuple[int, int], Function]  # by rows and columns


def _row_counts(d: Design) -> list[int]:
    """Row counts that can occur: those of the binary remainder, fewer when the number of rows is known."""
    counts = list(d.tile.rows)
    if isinstance(d.c.rows.extent, int) and not d.pieces:
        full, rest = divmod(d.c.rows.extent, d.tile.mr)
        counts = [r for r in counts if (r == d.tile.mr and full) or (r != d.tile.mr and rest & r)]
    return counts


def emit_tiles(build: Builder, d: Design) -> Tiles:
    """Define the micro-kernels of all tile shapes that can occur."""
    if d.b is Access.DOT:
        return {(d.tile.mr, d.tile.nr): dot_kernel(build, d.tile)}
    strides, ahead = _strides(d), _ahead(d)
    return {
        (mr, width): thin_kernel(build, d.tile, mr, width, strides)
        if d.is_thin(width)
        else micro_kernel(build, d.tile, mr, width // d.tile.lanes, strides, ahead=ahead)
        for mr in _row_counts(d)
        for width in d.widths
    }


def _ahead(d: Design) -> int:
    """Read in place, the next panel of b lies beside this one: no hardware prefetcher sees that."""
    return d.tile.nr if d.b is Access.DIRECT and d.tile.mr > FEW_ROWS else 0


def _strides(d: Design) -> Strides:
    if d.a is Access.CONST:
        a_row, a_step = 1, d.tile.mr
    elif d.a is Access.ROWS:
        a_row, a_step = d.a_row, 1
    elif d.a is Access.COLUMNS:
        a_row, a_step = 1, d.a_row
    else:
        a_row, a_step = None, None
    b_stride = {Access.CONST: d.tile.nr, Access.PANEL: d.tile.nr, Access.DIRECT: None}.get(d.b, d.b_row)
    return Strides(a_row, a_step, b_stride)


def emit_run(build: Builder, kernel: Kernel, d: Design, phase: int, tiles: Tiles, block: Function | None) -> None:
    """Write K.run of the main phase."""
    with build.function(f"run.{phase}", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, packed, scratch, task = fn.args
        env = with_views(open_kernel(build, kernel, env_ptr, bufs), d.c)
        s = split(build, env, d)
        lifted = lifted_area(build, s, d, scratch)
        env = with_lifts(build, env, d.c, lifted)
        home = build.alloca(d.typ, d.tile.mr * d.tile.nr) if d.single else None
        joined = tables(build, d)
        first = build.udiv(build.mul(task, s.units), s.tasks)
        last = build.udiv(build.mul(build.add(task, 1), s.units), s.tasks)
        with build.loop(first, last, name="unit") as unit:
            u = _open_unit(build, env, d, s, unit, (env_ptr, bufs, packed, scratch, task), lifted)
            fill(build, u.env, d, joined)
            u = replace(u, tables=joined)
            run_unit(build, u, d, tiles, home, block)


def _open_unit(
    build: Builder, env: Env, d: Design, s: Split, unit: Reg, args: tuple[Reg, Reg, Reg, Reg, Reg], lifted: Reg
) -> Unit:
    env_ptr, bufs, packed, scratch, task = args
    c = d.c
    column = build.udiv(unit, s.mblocks)
    point = build.udiv(column, s.nblocks)
    m0 = build.mul(build.umod(unit, s.mblocks), s.mc)
    n0 = build.mul(build.umod(column, s.nblocks), s.nc)
    place = env.at(decode(build, env, c.batch, point))
    mine = build.offset(scratch, build.mul(task, d.slice_bytes // c.acc.bytes), d.typ)
    sizes = [-(-n // 16) * 16 for n in (d.a_size, d.b_size)]
    packed_b = build.offset(packed, packed_bytes(d, "a") // c.acc.bytes, d.typ)
    return Unit(
        env=place,
        split=s,
        m0=m0,
        m1=build.imin(build.add(m0, s.mc), s.m),
        n0=n0,
        n1=build.imin(build.add(n0, s.nc), s.n),
        packed_a=const_base(build, place, d, "a", packed),
        packed_b=const_base(build, place, d, "b", packed_b),
        scratch_a=mine,
        scratch_b=build.offset(mine, sizes[0], d.typ),
        scratch_c=build.offset(mine, sum(sizes), d.typ),
        point=point,
        env_ptr=env_ptr,
        bufs=bufs,
        lifted=lifted,
    )


def run_unit(build: Builder, u: Unit, d: Design, tiles: Tiles, home: Reg | None, block: Function | None) -> None:
    """All blocks of K, rows and columns of one unit."""
    s = u.split
    with build.loop(0, s.kblocks, name="kb") as kb:
        k0 = 0 if d.single else build.mul(kb, s.kc)
        kc = s.k if d.single else build.imax(build.imin(build.sub(s.k, k0), s.kc), 0)
        block_b = b_block(build, u, d, kb, k0, kc, block)
        with build.loop(u.m0, u.m1, s.ms, name="ms") as s0:
            s1 = build.imin(build.add(s0, s.ms), u.m1)
            block_a = a_block(build, u, d, k0, kc, s0, s1)
            spans = ((u.n0, u.n1, d.tile.nr), (s0, s1, d.tile.mr))
            with _tiles_of(build, spans, d.rows_outer) as (j, i):
                cols, rows = build.imin(build.sub(u.n1, j), d.tile.nr), build.imin(build.sub(s1, i), d.tile.mr)
                first = build.ir.icmp_signed("==", i, build.i64(s0))
                panel = b_panel(build, u, d, block_b, (j, cols), (k0, kc), first)
                tile = a_tile(build, d, block_a, i, s0, k0, s.k)
                at = home if home is not None else _resting(build, u, d, i, j)
                b = build.ir
                start = b.icmp_signed("==", build.i64(kb), build.i64(0))
                done = b.icmp_signed("==", build.i64(build.add(kb, 1)), build.i64(s.kblocks))
                place = _Place(tile, panel, (i, rows), (j, cols), (k0, kc), at, (start, done), first, s0)
                with _in_registers(build, u, d, place):
                    if d.b is Access.PANEL and block is not None:
                        with build.if_then(first):
                            pack_panel(build, u, d, block, (j, cols), (k0, kc))
                    _call_tiles(build, d, tiles, tile, panel, rows, cols, kc, at, start)
                    if short(d):
                        with build.if_then(done):
                            epilogue(build, u, d, i, rows, j, cols, at)
                if not short(d):  # so long that it is there once, for all tiles, and reads them from memory
                    with build.if_then(done):
                        epilogue(build, u, d, i, rows, j, cols, at)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One tile: its operands, its (first, number of) rows, columns and steps of k, and where it rests.

    ends: this is the first, the last block of K. Between blocks the tile rests at `at`.
    first: this is the first tile of its panel; s0: the first row of the sub-block.
    """

    a: Matrix
    b: Matrix
    row: tuple[Index, Index]
    col: tuple[Index, Index]
    depth: tuple[Index, Index]
    at: Reg
    ends: tuple[Reg, Reg]
    first: Reg
    s0: Index


Span = tuple[Index, Index, int]


@contextmanager
def _tiles_of(build: Builder, spans: tuple[Span, Span], rows_outer: bool) -> Iterator[tuple[Reg, Reg]]:
    """(column, row) of each tile; the first tile of every panel is the first one in memory, in either order."""
    cols, rows = spans
    if rows_outer:
        with build.loop(*rows, name="i") as i, build.loop(*cols, name="j") as j:
            yield j, i
    else:
        with build.loop(*cols, name="j") as j, build.loop(*rows, name="i") as i:
            yield j, i


@contextmanager
def _in_registers(build: Builder, u: Unit, d: Design, p: _Place) -> Iterator[None]:
    """Full tiles are summed in registers and fetch what comes later; other tiles: the body.

    After the last block of K they go through a short epilogue and to their stores; before a longer one they rest.
    """
    if d.b is Access.DOT or d.tile.mr not in _row_counts(d) or d.tile.nr not in d.widths:
        yield
        return
    (i, rows), (j, cols), (k0, kc), (start, done) = p.row, p.col, p.depth, p.ends
    whole = build.const(I1, 1)
    for x, y in ((rows, d.tile.mr), (cols, d.tile.nr)):
        whole = build.ir.and_(whole, build.ir.icmp_signed("==", build.i64(x), build.i64(y)))
    with build.if_else(whole, likely=True) as (then, other):
        with then:
            next_a = build.mul(u.split.k, d.tile.mr) if d.a is Access.CONST else None
            later = constants_ahead(build, u, d, p.a, p.b, (i, j), kc)
            lines = tile_lines(build, u, d, (i, j), None if d.single else done, p.a.base)
            at_first, at_others = panel_lines(build, u, d, (i, j), (k0, kc), p.s0)
            x = Operands(p.a.base, p.a.row, p.a.step, p.b.base, p.b.step, _ahead(d), next_a, later)
            homes = tile_homes(build, d.tile, p.at)
            x = replace(x, fetch=both(build, lines, at_others))
            reading = None
            if d.b is Access.PANEL:
                reading = replace(x, read=panel_reader(build, u, d, j, k0), fetch=both(build, lines, at_first))
            sums = _sums(build, d, x, kc, p.first, reading)
            sums = sums if d.single else with_kept(build, sums, homes, start, d.tile)
            if not short(d):
                _rest(build, homes, sums)
            elif d.single:
                finish_tile(build, u, d, i, j, sums)
            else:
                with build.if_else(done) as (last, between):
                    with last:
                        finish_tile(build, u, d, i, j, sums)
                    with between:
                        _rest(build, homes, sums)
        with other:
            yield


def _rest(build: Builder, homes: list[Reg], sums: list[Reg]) -> None:
    for total, home in zip(sums, homes, strict=True):
        build.store(total, home)


def _sums(
    build: Builder,
    d: Design,
    x: Operands,
    kc: Index,
    first: Reg,
    reading: Operands | None,
) -> list[Reg]:
    """The sums of a full tile; with `reading`, those of the first tile of a panel are made so."""
    shape, strides = (d.tile.mr, d.tile.nv), _strides(d)
    if reading is None:
        return accumulate(build, d.tile, shape, strides, x, kc)
    ends = []
    with build.if_else(first, likely=False) as branches:
        for branch, operands in zip(branches, (reading, x), strict=True):
            with branch:
                ends.append((accumulate(build, d.tile, shape, strides, operands, kc), build.ir.block))
    out = []
    for k, value in enumerate(ends[0][0]):
        phi = build.ir.phi(value.type)
        for sums, block in ends:
            phi.add_incoming(sums[k], block)
        out.append(phi)
    return out


def _resting(build: Builder, u: Unit, d: Design, i: Index, j: Index) -> Reg:
    """Home of the tile at (i, j) between blocks of K."""
    per_column = build.ceildiv(u.split.mc, d.tile.mr)
    column = build.udiv(build.sub(j, u.n0), d.tile.nr)
    number = build.add(build.mul(column, per_column), build.udiv(build.sub(i, u.m0), d.tile.mr))
    return build.offset(u.scratch_c, build.mul(number, d.tile.mr * d.tile.nr), d.typ)


def _call_tiles(
    build: Builder,
    d: Design,
    tiles: Tiles,
    a: Matrix,
    b: Matrix,
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
        b_stride = b.row if d.b is Access.DOT else b.step
        args = [base, build.i64(a.row), build.i64(a.step), b.base, build.i64(b_stride), build.i64(kc), home, start]
        args += [build.i64(cols)] if d.b is Access.DOT else []
        widths = sorted(width for r, width in tiles if r == mr)
        _narrowest(build, widths, cols, lambda width: build.ir.call(tiles[mr, width], args))

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


def _narrowest(build: Builder, widths: list[int], cols: Index, call: Callable[[int], object]) -> None:
    """Call the first of the ascending `widths` that holds `cols` columns; the last one is the likely one."""
    if len(widths) == 1:
        call(widths[0])
        return
    fits = build.ir.icmp_signed("<=", build.i64(cols), build.i64(widths[-2]))
    with build.if_else(fits, likely=False) as (then, other):
        with then:
            _narrowest(build, widths[:-1], cols, call)
        with other:
            call(widths[-1])


def _call_rest(build: Builder, call: Callable[[int, Index], None], counts: list[int], rows: Index) -> None:
    first: Index = 0
    for mr in counts:
        take = build.ir.icmp_signed("!=", build.ir.and_(build.i64(rows), build.i64(mr)), build.i64(0))
        with build.if_then(take):
            call(mr, first)
        first = build.add(first, build.ir.and_(build.i64(rows), build.i64(mr)))
