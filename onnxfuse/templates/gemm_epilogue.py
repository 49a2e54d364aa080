"""The epilogue of a contraction: what happens to a finished tile on its way to the outputs."""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.codegen.build import Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_expr, emit_store
from onnxfuse.ir.expr import acc
from onnxfuse.templates.estimate import epilogue_cost
from onnxfuse.templates.gemm_design import Design
from onnxfuse.templates.gemm_operands import Unit
from onnxfuse.templates.packing import pieces

UNROLL_COST = 12  # cost of an epilogue that is still unrolled over the rows of a tile


def short(d: Design) -> bool:
    """The epilogue is worth unrolling over a tile."""
    return epilogue_cost(d.c.finish, d.c.stores) <= UNROLL_COST


def finish_tile(build: Builder, u: Unit, d: Design, i: Index, j: Index, sums: list[Reg]) -> None:
    """Finish and store a full tile from registers."""
    for r in range(d.tile.mr):
        place = row_at(build, u, d, i, r)
        for v in range(d.tile.nv):
            _vector(build, d, place, build.add(j, v * d.tile.lanes), sums[r * d.tile.nv + v], None)


def epilogue(build: Builder, u: Unit, d: Design, i: Index, rows: Index, j: Index, cols: Index, at: Reg) -> None:
    """Finish and store the tile in memory `at`: whole vectors, or masked ones at the right edge."""
    tile = d.tile

    def total(r: Index, v: Index) -> Reg:
        return build.load(build.offset(at, build.add(build.mul(r, tile.nr), v), d.typ), d.typ, tile.lanes)

    def whole_row(r: Index) -> None:
        place = row_at(build, u, d, i, r)
        for v in range(0, tile.nr, tile.lanes):
            _vector(build, d, place, build.add(j, v), total(r, v), None)

    wide = build.ir.icmp_signed("==", build.i64(cols), build.i64(tile.nr))
    with build.if_else(wide, likely=True) as (then, other):
        with then:
            _each_row(build, d, rows, whole_row)
        with other:
            _edge(build, u, d, (i, rows), (j, cols), total)


def _edge(
    build: Builder,
    u: Unit,
    d: Design,
    row: tuple[Index, Index],
    col: tuple[Index, Index],
    total: Callable[[Index, Index], Reg],
) -> None:
    """A tile at the right edge. Of known width, without masked stores: some processors are slow at them."""
    (i, rows), (j, cols) = row, col
    n, lanes = d.c.cols.extent, d.tile.lanes
    if isinstance(n, int) and lanes > 1 and short(d):
        left = n % d.tile.nr
        whole = left // lanes * lanes
        with build.loop(0, rows, name="r") as r:
            place = row_at(build, u, d, i, r)
            for v in range(0, whole, lanes):
                _vector(build, d, place, build.add(j, v), total(r, v), None)
            for first, size in pieces(left - whole):
                value = build.shuffle(last := total(r, whole), last, range(first, first + size))
                value = build.lane(value, 0) if size == 1 else value
                _vector(build, d, place, build.add(j, whole + first), value, None, size)
        return
    with build.loop(0, rows, name="r") as r, build.loop(0, cols, lanes, name="v") as v:
        mask = build.tail_mask(build.sub(cols, v), lanes) if lanes > 1 else None
        _vector(build, d, row_at(build, u, d, i, r), build.add(j, v), total(r, v), mask)


def row_at(build: Builder, u: Unit, d: Design, i: Index, r: Index) -> Env:
    """The env of row r of a tile that begins at row i."""
    rows = d.c.rows.axis
    return u.env.at() if rows is None else u.env.at({rows: build.i64(build.add(i, r))})


def _vector(
    build: Builder, d: Design, row: Env, column: Index, total: Reg, mask: Reg | None, lanes: int | None = None
) -> None:
    """One vector of sums (or a part of `lanes` of them) through the epilogue."""
    c, x, n = d.c, d.c.cols.axis, lanes or d.tile.lanes
    assert x is not None
    here = row.at({x: build.i64(column)})
    here = (here.vector(x, n, mask) if n > 1 else here).at(bound={acc(c.acc): total})
    if c.result is not None:
        here = here.at(bound={c.result: build.widen(emit_expr(build, here, c.finish), n)})
    for s in c.stores:
        emit_store(build, here, s.target, s.index, s.value)


def _each_row(build: Builder, d: Design, rows: Index, emit: Callable[[Index], None]) -> None:
    """All rows of a tile: straight-line code for a full tile if the epilogue is short, else a loop."""
    if not short(d):
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
