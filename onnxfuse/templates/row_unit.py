"""rowwise: the code of one unit: vectors along the vector axis, or squares of two axes, transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onnxfuse.codegen.build import Builder, Index, Reg, mem_type
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr
from onnxfuse.templates.nest import Segment, Step, segments
from onnxfuse.templates.row_ahead import written
from onnxfuse.templates.row_columns import column_stages, square
from onnxfuse.templates.row_lines import row_stage
from onnxfuse.templates.row_loops import Body, sweep
from onnxfuse.templates.row_shape import Spec, Tile, flat_offset, may_span, tile_along
from onnxfuse.templates.row_stages import plain_stages
from onnxfuse.templates.row_tasks import outer_axes, tile_width


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
    if not (isinstance(extent, int) and extent <= spec.block):
        low = build.mul(digits[-1], spec.block)
        high = build.imin(build.add(low, spec.block), extent)

    axis = spec.axis

    def body(envs: list[Env], part: int, accs: list[Reg], stages: tuple[Step, ...] = spec.nest.stages) -> list[Reg]:
        if part == 0:
            written(build, here, spec, stages, axis)(envs)
        if spec.width:
            column_stages(build, envs, spec, stages)
        else:
            plain_stages(build, envs, stages)
        return accs

    static = isinstance(low, int) and isinstance(high, int)
    cuts = segments(spec.nest.stages, spec.axis) if static else [Segment(low, high, spec.nest.stages)]
    for cut in cuts:
        work = partial(body, stages=cut.stages)
        if spec.tile is None:
            span = may_span(cut.stages, spec.axis) and not any(s.reduce or s.axes for s in cut.stages)
            sweep(build, here, spec, spec.axis, cut.low, cut.high, spec.unroll, [], work, span, True)
        else:
            _tiles(build, here, spec, spec.tile, cut, work, len(cuts) == 1)


def _tiles(build: Builder, here: Env, spec: Spec, tile: Tile, cut: Segment, body: Body, blocks: bool) -> None:
    """A stretch of the vector axis times the width of a tile, in squares; what is left of it point by point."""
    assert spec.axis is not None
    width, across = tile_width(spec), tile.axis
    left = build.mul(here.axes[across], width)
    right = build.imin(build.add(left, width), emit_dim(build, here, across.extent))
    low, high = cut.low, cut.high
    whole = build.add(low, build.mul(build.udiv(build.sub(high, low), spec.lanes), spec.lanes))
    end = _stop_unless(build, build.sub(right, left), width, low, whole)
    inner = tile_along(cut.stages, spec.axis, across)
    with build.loop(low, end, spec.lanes, "tile") as v:
        if tile.weave:
            _woven(build, here.at({spec.axis: v, across: build.i64(left)}), spec, cut.stages, width)
        for k in range(0, 0 if tile.weave else width, spec.lanes):
            place = here.at({spec.axis: v, across: build.i64(build.add(left, k))})
            square(build, place, cut.stages, inner, spec.axis, spec.lanes)
    with build.loop(left, right, 1, across.name) as w:
        sweep(build, here.at({across: w}), spec, spec.axis, end, high, 1, [], body, blocks=blocks)


def _stop_unless(build: Builder, size: Index, full: int, low: Index, high: Index) -> Index:
    """`high` if size == full, else `low`."""
    if isinstance(size, int):
        return high if size == full else low
    return build.select(build.ir.icmp_signed("==", size, build.i64(full)), build.i64(high), build.i64(low))


def _woven(build: Builder, env: Env, spec: Spec, stages: Sequence[Step], width: int) -> None:
    """Vectors of all points of a short axis, stored as one run of consecutive elements."""
    assert spec.axis is not None
    assert spec.tile is not None
    n, across = spec.lanes, spec.tile.axis
    envs = [env.at({across: build.i64(k)}).vector(spec.axis, n) for k in range(width)]
    for st in stages[0].stores:
        rows = [build.widen(emit_expr(build, e, st.value), n) for e in envs]
        both = [build.shuffle(a, b, range(2 * n)) for a, b in zip(rows[::2], [*rows[1::2], rows[-1]], strict=False)]
        run = both[0] if len(both) == 1 else build.shuffle(both[0], both[1], range(4 * n))
        run = build.shuffle(run, run, [k * n + lane for lane in range(n) for k in range(width)])
        place = emit_expr(build, env, flat_offset(st.target, st.index))
        build.store(run, build.offset(env.buffers[st.target].ptr, place, mem_type(st.target.tensor.dtype)))
