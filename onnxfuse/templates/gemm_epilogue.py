"""The epilogue of a contraction: what happens to a finished tile on its way to the outputs."""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.codegen.build import Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_expr, emit_store
from onnxfuse.ir.expr import acc
from onnxfuse.templates.estimate import epilogue_cost
from onnxfuse.templates.gemm_design import Design
from onnxfuse.templates.gemm_operands import Unit

UNROLL_COST = 12  # cost of an epilogue that is still unrolled over the rows of a tile


def epilogue(build: Builder, u: Unit, d: Design, i: Index, rows: Index, j: Index, cols: Index, at: Reg) -> None:
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
