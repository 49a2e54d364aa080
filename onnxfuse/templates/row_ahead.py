"""rowwise: lines of memory are asked for before their turn.

Shape `row`: those of the next row, while the busiest stage runs over this one. All stages but the first work in the
first level of cache; without this, memory is idle meanwhile and the first stage waits for it.

Single vectors: those that are written soon. Stores end one after the other, and each waits for its line.

It costs an instruction for each line, so only kernels that move more than a core caches do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxfuse.codegen.build import Builder, Index, Reg, mem_type
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr
from onnxfuse.ir.expr import Expr, load, loads, substitute, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import same
from onnxfuse.templates.nest import Step, stage_roots, stage_stores, turn_roots
from onnxfuse.templates.row_shape import Spec, body_cost, flat_offset, step_along

LINE = 64  # bytes
SOON = 2048  # bytes between a store and the lines that are asked for: measured, flat
FIRST_CACHE, SECOND_CACHE = 3, 2  # where to, in the terms of Builder.prefetch

Ask = Callable[[list[Env]], None]


@dataclass(frozen=True, slots=True)
class _Stream:
    """A row that lies in memory as a whole, the next one behind it."""

    base: Reg
    offset: Expr
    value: Value


def next_row(build: Builder, env: Env, spec: Spec, stage: Step, axis: Axis) -> Ask:
    """What to call in each turn of the loop of `stage` over `axis`, with the envs of its vectors."""
    streams = _streams(env, spec, axis) if spec.ahead and stage is _busiest(spec) else []
    near = FIRST_CACHE if _fits(build, streams) else SECOND_CACHE

    def ask(envs: list[Env]) -> None:
        count = sum(e.lanes for e in envs)
        for s in streams:
            dtype = s.value.tensor.dtype
            here = emit_expr(build, env.at({axis: envs[0].axes[axis]}), s.offset)
            start = build.add(here, emit_dim(build, env, axis.extent))
            for k in range(0, count, LINE // dtype.bytes):
                place: Index = build.add(start, k)
                build.prefetch(build.offset(s.base, place, mem_type(dtype)), near)

    return ask


def written(build: Builder, env: Env, spec: Spec, stages: Sequence[Step], axis: Axis) -> Ask:
    """What to call in each turn of a loop over `axis` that stores single vectors, with their envs."""
    stores = [st for stage in stages for st in stage_stores(stage)] if spec.ahead else []
    stores = [st for st in stores if st.target.tensor.shape and step_along(st.target, st.index, axis) == 1]

    def ask(envs: list[Env]) -> None:
        count = sum(e.lanes for e in envs)
        for st in stores:
            if st.target not in env.buffers:
                continue
            size, typ = st.target.tensor.dtype.bytes, mem_type(st.target.tensor.dtype)
            place = emit_expr(build, env.at({axis: envs[0].axes[axis]}), flat_offset(st.target, st.index))
            start = build.add(place, SOON // size)
            for k in range(0, count, LINE // size):
                build.prefetch(build.offset(env.buffers[st.target].ptr, build.add(start, k), typ))

    return ask


def _fits(build: Builder, streams: list[_Stream]) -> bool:
    """This row and the next one of every stream have room in the first cache."""
    sizes = [s.value.tensor.shape[-1] * s.value.tensor.dtype.bytes for s in streams]
    return 2 * sum(n for n in sizes if isinstance(n, int)) <= build.target.l1


def _busiest(spec: Spec) -> Step:
    """The reduction that computes most in a turn: requests for memory are spread over the longest time."""
    loops = [s for s in spec.nest.stages if s.reduce is not None and not s.axes]
    return max(loops, key=lambda s: body_cost(turn_roots(s), None, 1), default=spec.nest.stages[0])


def _streams(env: Env, spec: Spec, axis: Axis) -> list[_Stream]:
    """The rows that the first stage reads and those that the last one writes."""
    first, last = spec.nest.stages[0], spec.nest.stages[-1]
    along = [*last.axes[-1:], *(first.reduce.axes[-1:] if first.reduce is not None else first.axes[-1:])]
    turn: dict[Expr, Expr] = {var(a): var(axis) for a in along}
    written = [load(st.target, st.index, st.target.tensor.dtype) for st in stage_stores(last)]
    out: dict[Value, _Stream] = {}
    for e in (*loads(*stage_roots(first)), *written):
        index = tuple(substitute(i, turn) for i in e.index)
        shape = e.source.tensor.shape
        if e.source not in env.buffers or not shape or not same(shape[-1], axis.extent):
            continue
        if step_along(e.source, index, axis) == 1 and len(shape) > 1:
            out[e.source] = _Stream(env.buffers[e.source].ptr, flat_offset(e.source, index), e.source)
    return list(out.values())
