"""rowwise: the code of one unit: vectors along the vector axis, or squares of two axes, transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onnxfuse.codegen.build import Builder, Index, Reg, mem_type
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr
from onnxfuse.ir.expr import Expr, loads
from onnxfuse.templates.nest import Segment, Step, segments, stage_roots
from onnxfuse.templates.row_lines import row_stage
from onnxfuse.templates.row_loops import sweep
from onnxfuse.templates.row_shape import Spec, Tile, flat_offset, may_span
from onnxfuse.templates.row_stages import plain_stages
from onnxfuse.templates.row_tasks import BLOCK, outer_axes, tile_width


def run_unit(build: Builder, env: Env, spec: Spec, digits: Sequence[Reg]) -> None:
    """All of one unit; `digits` are the places of the outer axes and the block of the vector axis."""
    axes = dict(zip(outer_axes(spec), digits, strict=False))
    here = env.at(axes)
    if spec.axis is None:
        for stage in spec.nest.stages:
            here = row_stage(build, here, spec, stage) if spec.row else plain_stages(build, [here], [stage])[0]
        return
    extent = emit_dim(build, env, spec.axis.extent)
    low: Index = 0
    high: Index = extent
    if not (isinstance(extent, int) and extent <= BLOCK):
        low = build.mul(digits[-1], BLOCK)
        high = build.imin(build.add(low, BLOCK), extent)

    def body(envs: list[Env], _part: int, accs: list[Reg], stages: tuple[Step, ...] = spec.nest.stages) -> list[Reg]:
        plain_stages(build, envs, stages)
        return accs

    if spec.tile is None:
        static = isinstance(low, int) and isinstance(high, int)
        cuts = segments(spec.nest.stages, spec.axis) if static else [Segment(low, high, spec.nest.stages)]
        for cut in cuts:
            wide = may_span(cut.stages, spec.axis) and not any(s.reduce for s in cut.stages)
            work = partial(body, stages=cut.stages)
            sweep(build, here, spec, spec.axis, cut.low, cut.high, spec.unroll, [], work, wide, True)
        return
    width = tile_width(spec)
    across = spec.tile.axis
    left = build.mul(here.axes[across], width)
    right = build.imin(build.add(left, width), emit_dim(build, env, across.extent))
    whole = build.add(low, build.mul(build.udiv(build.sub(high, low), spec.lanes), spec.lanes))
    square = _stop_unless(build, build.sub(right, left), width, low, whole)
    with build.loop(low, square, spec.lanes, "tile") as v:
        if spec.tile.weave:
            _woven(build, here.at({spec.axis: v, across: build.i64(left)}), spec, width)
        for k in range(0, 0 if spec.tile.weave else width, spec.lanes):
            _transposed(build, here.at({spec.axis: v, across: build.i64(build.add(left, k))}), spec, spec.tile)
    with build.loop(left, right, 1, across.name) as w:
        sweep(build, here.at({across: w}), spec, spec.axis, square, high, 1, [], body)


def _stop_unless(build: Builder, size: Index, full: int, low: Index, high: Index) -> Index:
    """`high` if size == full, else `low`."""
    if isinstance(size, int):
        return high if size == full else low
    return build.select(build.ir.icmp_signed("==", size, build.i64(full)), build.i64(high), build.i64(low))


def _transposed(build: Builder, env: Env, spec: Spec, tile: Tile) -> None:
    """One square: load the crossing loads along the tile's axis, transpose, and evaluate along the vector axis."""
    assert spec.axis is not None
    n = spec.lanes
    v, w = env.axes[spec.axis], env.axes[tile.axis]
    rows = [env.at({spec.axis: build.i64(build.add(v, k))}).vector(tile.axis, n) for k in range(n)]
    bound: list[dict[Expr, Reg]] = [{} for _ in range(n)]
    for ld in (e for s in spec.nest.stages for e in loads(*stage_roots(s)) if e in tile.loads):
        columns = build.transpose([build.widen(emit_expr(build, r, ld), n) for r in rows])
        for known, column in zip(bound, columns, strict=True):
            known[ld] = column
    envs = [
        env.at({tile.axis: build.i64(build.add(w, k))}, bound=known).vector(spec.axis, n)
        for k, known in enumerate(bound)
    ]
    plain_stages(build, envs, spec.nest.stages)


def _woven(build: Builder, env: Env, spec: Spec, width: int) -> None:
    """Vectors of all points of a short axis, stored as one run of consecutive elements."""
    assert spec.axis is not None
    assert spec.tile is not None
    n, across = spec.lanes, spec.tile.axis
    envs = [env.at({across: build.i64(k)}).vector(spec.axis, n) for k in range(width)]
    for st in spec.nest.stages[0].stores:
        rows = [build.widen(emit_expr(build, e, st.value), n) for e in envs]
        both = [build.shuffle(a, b, range(2 * n)) for a, b in zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)]
        run = both[0] if len(both) == 1 else build.shuffle(both[0], both[1], range(4 * n))
        run = build.shuffle(run, run, [k * n + lane for lane in range(n) for k in range(width)])
        place = emit_expr(build, env, flat_offset(st.target, st.index))
        build.store(run, build.offset(env.buffers[st.target].ptr, place, mem_type(st.target.tensor.dtype)))
