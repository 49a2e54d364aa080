"""rowwise, shape `outer`: stages with axes of their own, and squares of two axes transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.codegen.build import Builder, Reg, mem_type
from onnxfuse.codegen.scalar_expr import Buffer, Env, emit_dim, emit_expr, emit_store
from onnxfuse.ir.expr import Expr, load
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import dim_expr, simplify
from onnxfuse.templates.nest import Step
from onnxfuse.templates.row_shape import Spec, Tile, stage_tile
from onnxfuse.templates.row_stages import nested, plain_stages


def column_stages(build: Builder, envs: list[Env], spec: Spec, stages: Sequence[Step]) -> None:
    """Stages in turn, their own axes as loops around all vectors; private buffers have one column a lane."""
    assert spec.axis is not None
    first = envs[0].axes[spec.axis]
    private = {v: _columns(build, envs[0], v, first, spec) for v in spec.columns}
    envs = [e.at(buffers=private) for e in envs]
    for stage in stages:
        if stage.axes:
            _column_stage(build, envs, spec, stage)
        else:
            envs = plain_stages(build, envs, [stage])


def _columns(build: Builder, env: Env, v: Value, first: Reg, spec: Spec) -> Buffer:
    """The memory of a private buffer, with lane `first` of the vector axis in its first column."""
    home = env.buffers[v]
    strides = []
    step: Expr = dim_expr(spec.width)
    for d in reversed(v.tensor.shape[:-1]):
        strides.append(step)
        step = simplify(step * d)
    at = build.offset(home.ptr, build.ir.neg(first), mem_type(home.dtype))
    return replace(home, ptr=at, strides=(*reversed(strides), 1))


def _column_stage(build: Builder, envs: list[Env], spec: Spec, stage: Step) -> None:
    assert spec.axis is not None
    inner = replace(stage, axes=())
    tile = stage_tile(stage, spec.axis, spec.lanes)

    def one(es: list[Env], accs: list[Reg]) -> list[Reg]:
        plain_stages(build, es, [inner])
        return accs

    if tile is None or any(e.lanes != spec.lanes or e.mask is not None for e in envs):
        nested(build, envs, stage.axes, [], one)
        return
    across, axis, n = tile.axis, spec.axis, spec.lanes

    def line(es: list[Env], accs: list[Reg]) -> list[Reg]:
        extent = emit_dim(build, es[0], across.extent)
        whole = build.mul(build.udiv(extent, n), n)
        with build.loop(0, whole, n, across.name) as w:
            for e in es:
                square(build, e.at({across: w}), [inner], tile, axis, n)
        with build.loop(whole, extent, 1, f"{across.name}.rest") as w:
            one([e.at({across: w}) for e in es], [])
        return accs

    nested(build, envs, [a for a in stage.axes if a is not across], [], line)


def square(build: Builder, env: Env, stages: Sequence[Step], tile: Tile, axis: Axis, n: int) -> None:
    """N x n points of the vector axis and the tile's own.

    What is contiguous along the tile's axis is loaded and stored along it, and transposed; all else, and the
    arithmetic, goes along the vector axis. Stages have no axes and no reductions.
    """
    v, w = env.axes[axis], env.axes[tile.axis]
    rows = [env.at({axis: build.i64(build.add(v, k))}).vector(tile.axis, n) for k in range(n)]
    bound: list[dict[Expr, Reg]] = [{} for _ in range(n)]
    for ld in sorted(tile.loads, key=str):
        columns = build.transpose([build.widen(emit_expr(build, r, ld), n) for r in rows])
        for known, column in zip(bound, columns, strict=True):
            known[ld] = column
    envs = [
        env.at({tile.axis: build.i64(build.add(w, k))}, bound=known).vector(axis, n) for k, known in enumerate(bound)
    ]
    for stage in stages:
        envs = _store_square(build, envs, rows, stage, tile, n)


def _store_square(build: Builder, envs: list[Env], rows: list[Env], stage: Step, tile: Tile, n: int) -> list[Env]:
    """Evaluate all values, then store them, those of the tile by rows; a rank-0 local becomes a bound expression."""
    values = [[emit_expr(build, e, s.value) for s in stage.stores] for e in envs]
    bound: list[dict[Expr, Reg]] = [{} for _ in envs]
    for s, columns in zip(stage.stores, zip(*values, strict=True), strict=True):
        if s in tile.stores:
            for row, part in zip(rows, build.transpose([build.widen(c, n) for c in columns]), strict=True):
                emit_store(build, row, s.target, s.index, part)
            continue
        for e, known, value in zip(envs, bound, columns, strict=True):
            if not s.index and s.target not in e.buffers:
                known[load(s.target, (), s.value.dtype)] = value
            else:
                emit_store(build, e, s.target, s.index, value)
    return [e.at(bound=known) if known else e for e, known in zip(envs, bound, strict=True)]
