"""What a tile asks memory for while it multiplies: a few lines in every turn of its loop over k.

A core has about a dozen lines on their way from beyond L2 at a time, and what asks for more waits: asked for at once,
the lines of a tile stop it for as long as they would have taken anyway. A share in every turn costs nothing.

    constants_ahead   the packed constants that the loops come to next
    tile_lines        what the epilogue of this tile reads and writes
    panel_lines       what the first tile of the next panel reads of b
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.codegen.build import I8, Builder, Index, Reg, Type, mem_type
from onnxfuse.codegen.scalar_expr import address, affine, emit_expr, runs
from onnxfuse.ir.expr import Expr, Lit, load, loads, var
from onnxfuse.templates.gemm_blocks import Split
from onnxfuse.templates.gemm_design import Access, Design
from onnxfuse.templates.gemm_epilogue import row_at
from onnxfuse.templates.gemm_joined import rows_at
from onnxfuse.templates.gemm_operands import Matrix, Unit
from onnxfuse.templates.microkernel import UNROLL, Fetch
from onnxfuse.templates.packing import flat_of

SHORT = 64  # steps of k that are taken for granted where they are not known


def constants_ahead(
    build: Builder, u: Unit, d: Design, a: Matrix, b: Matrix, tile: tuple[Index, Index], kc: Index
) -> tuple[Reg, Index] | None:
    """The share of this tile in fetching the packed constants that the loops come to next, from memory into L2.

    They are used by all tiles of a row (or column) of tiles: fetched by the first of them alone, they would be late.
    Narrower tiles at the end fetch nothing.
    """
    if not d.asks_ahead:
        return None
    (i, j), s, size = tile, u.split, d.c.acc.bytes
    if d.a is Access.CONST:  # the next sub-block of rows, while the panels of b pass by
        first, width, ahead = u.n0, d.tile.nr, build.mul(s.ms, s.k)
        extent, base, at, step = build.sub(u.n1, u.n0), a.base, j, d.tile.mr
    elif d.b is Access.CONST:  # the next panel, while the rows pass by
        first, width, ahead = u.m0, d.tile.mr, build.mul(d.tile.nr, s.k)
        extent, base, at, step = build.imin(build.sub(u.m1, u.m0), s.ms), b.base, i, d.tile.nr
        size = d.b_bytes
    else:
        return None
    shares = build.imax(build.udiv(extent, width), 1)
    pace = build.ceildiv(step * size, shares)
    number = build.umod(build.udiv(build.sub(at, first), width), shares)
    start = build.add(build.mul(ahead, size), build.mul(build.mul(number, pace), kc))
    return build.offset(base, start, I8), pace


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of a tile in memory: the first one begins at `start`, the next ones `step` elements further each."""

    start: Reg
    step: Index
    typ: Type


def tile_lines(
    build: Builder, u: Unit, d: Design, tile: tuple[Index, Index], wanted: Reg | None, idle: Reg
) -> Fetch | None:
    """The lines that the epilogue of a full tile reads and writes; where `wanted` is off, `idle` instead.

    Of the elements of a row the last of every line is asked for: the line of the first one came with the tile to the
    left.
    """
    streams = _streams(build, u, d, tile)
    if not streams:
        return None
    if wanted is not None:
        b = build.ir
        streams = [
            _Rows(b.select(wanted, s.start, idle), b.select(wanted, build.i64(s.step), build.i64(0)), s.typ)
            for s in streams
        ]
    total = len(streams) * d.tile.mr
    turns = max(1, (d.kc if isinstance(d.c.depth, int) else SHORT) // UNROLL)
    per = -(-total // turns)

    def share(turn: Index) -> None:
        for v in range(per):
            number = build.imin(build.add(build.mul(turn, per), v), total - 1)
            row, which = build.udiv(number, len(streams)), build.umod(number, len(streams))
            at = _chosen(build, streams, row, which)
            for last in d.tile.line_ends:
                build.prefetch(build.offset(at, last, streams[0].typ))

    return Fetch(-(-total // per), share)


def _chosen(build: Builder, streams: list[_Rows], row: Index, which: Index) -> Reg:
    """Where the row of the chosen stream begins."""
    at = build.offset(streams[0].start, build.mul(row, streams[0].step), streams[0].typ)
    for k, s in enumerate(streams[1:], 1):
        here = build.ir.icmp_signed("==", build.i64(which), build.i64(k))
        at = build.ir.select(here, build.offset(s.start, build.mul(row, s.step), s.typ), at)
    return at


def _streams(build: Builder, u: Unit, d: Design, tile: tuple[Index, Index]) -> list[_Rows]:
    """What the epilogue reads and writes with unit stride along the columns."""
    c, (i, j) = d.c, tile
    x, y = c.cols.axis, c.rows.axis
    if x is None:
        return []
    out = []
    place = row_at(build, u, d, i, 0).at({x: build.i64(j)})
    targets = [load(s.target, s.index, s.target.tensor.dtype) for s in c.stores]
    for e in dict.fromkeys((*loads(c.finish, *(s.value for s in c.stores)), *targets)):
        if e.source not in u.env.buffers:
            continue
        flat = flat_of(u.env, e)
        across = affine(flat, var(x))
        down = (flat, None) if y is None else affine(flat, var(y))
        if across is None or down is None or not isinstance(across[1], Lit) or across[1].value != 1:
            continue
        typ = mem_type(e.dtype)
        start = build.offset(u.env.buffers[e.source].ptr, emit_expr(build, place, flat), typ)
        out.append(_Rows(start, _step(build, u, down[1]), typ))
    return out


def _step(build: Builder, u: Unit, step: Expr | None) -> Index:
    if step is None:
        return 0
    return int(step.value) if isinstance(step, Lit) else emit_expr(build, u.env.at(), step)


def panel_lines(
    build: Builder, u: Unit, d: Design, tile: tuple[Index, Index], depth: tuple[Index, Index], s0: Index
) -> tuple[Fetch | None, Fetch | None]:
    """The lines that the first tile of the next panel reads: what the first tile of this panel and the others ask for.

    All take a share where they are known to be at least as many as the steps of k in a turn; else the first one asks
    for all, which is also so where the first row of tiles reads all panels.
    """
    if d.b is not Access.PANEL:
        return None, None
    (i, j), (k0, kc) = tile, depth
    more = build.ir.icmp_signed("<", build.i64(build.add(j, d.tile.nr)), build.i64(u.n1))
    column = build.ir.select(more, build.i64(build.add(j, d.tile.nr)), build.i64(j))
    last = build.sub(kc, 1)

    def row(k: Index) -> None:
        _panel_row(build, u, d, column, build.add(k0, build.imin(k, last)))

    def all_rows(turn: Index) -> None:
        for v in range(UNROLL):
            row(build.add(build.mul(turn, UNROLL), v))

    tiles = _tiles_below(u.split, d)
    if d.kept or tiles is None or tiles < UNROLL:
        return Fetch(build.ceildiv(kc, UNROLL), all_rows), None
    share = build.ceildiv(kc, tiles)
    first = build.mul(build.udiv(build.sub(i, s0), d.tile.mr), share)

    def shared(turn: Index) -> None:
        row(build.add(first, build.imin(turn, build.sub(share, 1))))

    fetch = Fetch(share, shared)
    return fetch, fetch


def both(build: Builder, a: Fetch | None, b: Fetch | None) -> Fetch | None:
    """Shares of both in every turn; the one that has fewer repeats its last."""
    if a is None or b is None:
        return a or b

    def share(turn: Index) -> None:
        a.share(turn)
        b.share(turn)

    return Fetch(build.imax(a.turns, b.turns), share)


def _tiles_below(s: Split, d: Design) -> int | None:
    """Tiles that read a panel, if that is known."""
    if not isinstance(s.ms, int) or not isinstance(s.m, int):
        return None
    return -(-min(s.ms, s.m) // d.tile.mr)


def _panel_row(build: Builder, u: Unit, d: Design, column: Index, k: Index) -> None:
    """Ask for row k of the panel that begins at a column."""
    c = d.c
    x = c.cols.axis
    assert x is not None
    env = u.env.at({c.k[0]: build.i64(k)})
    joined = rows_at(build, u.tables, k, column)
    for last in d.tile.line_ends:
        there = env.at({x: build.i64(build.add(column, last))}).vector(x, d.tile.lanes)
        for e in runs(there, c.b):
            at = build.offset(joined[e], last, mem_type(e.dtype)) if e in joined else address(build, there, e)
            build.prefetch(at, locality=2)
