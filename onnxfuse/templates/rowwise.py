"""rowwise: the general template. Runs every kernel as parallel outer loops around vector loops.

First the loop nest is tidied (nest.py). Then one of two shapes is chosen by the strides of the accesses:

  outer   lanes lie along one outer axis; stages (which have no axes of their own then) run once per vector, with
          reductions as plain loops and one accumulator per lane. Elementwise, column reductions, pools, contractions
  row     lanes lie along the last axis of each stage, or of its reduction: several vector accumulators in a fixed
          order, combined at the end. Row reductions, softmax, layer norm

Work is cut into units (an outer point, and in shape `outer` a block of the vector axis too), units into at most
`MAX_TASKS` tasks; both depend on dimensions only.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from onnxfuse.codegen.build import I8, I64, PTR, VOID, Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Buffer, Env, contiguous, emit_dim, open_kernel
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import loads
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.ir.types import TensorType
from onnxfuse.target import Target
from onnxfuse.templates.nest import Nest, in_place, spread, stage_roots, stage_stores, tidy
from onnxfuse.templates.row_lines import row_stage
from onnxfuse.templates.row_shape import (
    SUNK,
    Spec,
    block_of,
    candidates,
    cycles,
    element_bytes,
    kernel_bytes,
    maskable,
    sunk,
    tile_of,
    unroll_of,
)
from onnxfuse.templates.row_tasks import run_units, split_work
from onnxfuse.templates.row_unit import run_unit

GRAIN = 1 << 19  # bytes moved, or as much arithmetic, worth a task: about 20 us
STACK = 64 * 1024  # bytes of private buffers that may live on the stack
ROW = "(row)"  # Schedule.vector of shape `row`: not a name an axis may have


class Rowwise:
    """The general template; takes every kernel."""

    name = "rowwise"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule per possible vector axis, cheapest first."""
        nest = tidy(kernel)
        lanes = target.lanes(element_bytes(nest))
        rate = target.peak / (4 * target.lanes(4))  # one vector operation per cycle, peak = 2 fma
        floor = kernel_bytes(kernel) / target.bw
        out = []
        for axis, row in candidates(nest):
            cost = max(floor, cycles(nest, axis, row, lanes) / rate)
            name = ROW if row else axis.name if axis is not None else ""
            width = lanes if row or axis is not None else 1
            steps = [unroll_of([s]) for s in nest.stages] if row else [_abreast(nest)]
            out.append(Schedule(self.name, width, name, unroll=max(steps), grain=GRAIN, cost=cost))
        return sorted(out, key=lambda s: s.cost)

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write K.tasks.0, K.run.0 and K.scratch."""
        nest = tidy(kernel)
        row = schedule.vector == ROW
        axis = None if row else next((a for a in reversed(nest.outer) if a.name == schedule.vector), None)
        lanes = schedule.lanes if row or axis is not None else 1
        spec = _spec(kernel, nest, axis, row, lanes, schedule.unroll, target)
        with build.function("tasks.0", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            build.ret(split_work(build, env, spec, schedule.grain).tasks)
        with build.function("scratch", I64, [PTR]) as fn:
            env = open_kernel(build, kernel, fn.args[0], None)
            each = _local_bytes(build, env, spec)
            tasks = 0 if each == 0 else split_work(build, env, spec, schedule.grain).tasks
            build.ret(build.mul(tasks, each))
        with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
            env = open_kernel(build, kernel, fn.args[0], fn.args[1])
            env = _with_locals(build, env, spec, fn.args[3], fn.args[4])
            env = env.at(buffers=_views(build, env, spec.nest))
            run_units(build, env, spec, schedule.grain, fn.args[4], partial(run_unit, build, env, spec))
        return Emitted(phases=1)


ROWWISE = Rowwise()


def _abreast(nest: Nest) -> int:
    """Vectors per iteration along an outer axis: twice as many down columns, where every line is its own stretch."""
    count = unroll_of(nest.stages)
    return 2 * count if count > 1 and any(s.axes or s.reduce for s in nest.stages) else count


def _spec(kernel: Kernel, nest: Nest, axis: Axis | None, row: bool, lanes: int, unroll: int, target: Target) -> Spec:
    given, nest = nest, nest if row else sunk(nest, axis)
    if nest is not given:
        unroll = max(unroll, SUNK)  # whole cache lines: the next loop jumps from plane to plane
    spec = Spec(kernel, nest, axis, row, lanes, unroll, maskable(nest, target), tile_of(nest, axis, lanes))
    spec = replace(spec, block=block_of(nest, axis, lanes, unroll))
    locals_ = {v.value for v in kernel.locals}
    if row or not any(s.axes or s.reduce for s in nest.stages):
        spec = replace(spec, ahead=_vast(kernel, target))
    if row and _long(kernel, target):
        nest = in_place(nest, locals_)
        return replace(spec, nest=nest, private=_used(nest, locals_))
    # A stage may have lost its axes to a reduction that stores on its way: its buffer still holds a row for each lane.
    private = _used(nest, locals_)
    if axis is None or not (any(s.axes for s in nest.stages) or any(v.tensor.rank for v in private)):
        return replace(spec, private=private)
    nest = spread(nest, axis, locals_)
    columns = tuple(v for v, home in nest.views.items() if home in locals_ and v.tensor.shape[-1:] == (axis.extent,))
    return replace(spec, nest=nest, private=_used(nest, locals_), columns=columns, width=lanes * unroll)


def _long(kernel: Kernel, target: Target) -> bool:
    """The private rows would push what they are made of and what becomes of them out of the first cache."""
    total = 0
    for v in kernel.locals:
        if not isinstance(v.type.size, int):
            return True  # unknown: no scratch to ask for at least
        total += v.type.size * v.type.dtype.bytes
    return 3 * total > target.l1


def _vast(kernel: Kernel, target: Target) -> bool:
    """What the kernel reads and writes is known to be more than a core's caches hold."""
    moved = [v.tensor for v in (*kernel.inputs, *kernel.outputs)]
    return all(t.static for t in moved) and kernel_bytes(kernel) > 2 * target.l2


def _used(nest: Nest, locals_: Set[Value]) -> tuple[Value, ...]:
    """Private buffers that are still accessed."""
    touched = [ld.source for s in nest.stages for ld in loads(*stage_roots(s))]
    touched += [st.target for s in nest.stages for st in stage_stores(s)]
    return tuple(v for v in dict.fromkeys(nest.views.get(t, t) for t in touched) if v in locals_)


# ---- rows inside of another template ----


@dataclass(frozen=True, slots=True)
class RowCode:
    """The stages of one row, for a template that runs rows itself: it gives the buffers, and the axes outside."""

    spec: Spec

    @classmethod
    def of(cls, kernel: Kernel, nest: Nest, target: Target) -> RowCode:
        """`nest` is what `tidy` made of the stages (and has no outer axes)."""
        unroll = max((unroll_of([s]) for s in nest.stages), default=1)
        lanes = target.lanes(element_bytes(nest))
        return cls(Spec(kernel, nest, None, True, lanes, unroll, maskable(nest, target)))

    @property
    def operations(self) -> float:
        """Predicted vector operations for one row."""
        return cycles(self.spec.nest, None, True, self.spec.lanes)

    def emit(self, build: Builder, env: Env) -> None:
        """All stages at the place of `env`."""
        here = env.at(buffers=_views(build, env, self.spec.nest))
        for stage in self.spec.nest.stages:
            here = row_stage(build, here, self.spec, stage)


# ---- buffers ----


def _columns(spec: Spec) -> int:
    """Elements for each element of a private buffer."""
    return max(spec.width, 1)


def _on_stack(spec: Spec) -> bool:
    sizes = [v.tensor for v in spec.private]
    return all(t.static for t in sizes) and sum(_static_bytes(t, spec) for t in sizes) <= STACK


def _static_bytes(t: TensorType, spec: Spec) -> int:
    size = t.size
    assert isinstance(size, int)
    return -(-size * _columns(spec) * t.dtype.bytes // 64) * 64


def _local_bytes(build: Builder, env: Env, spec: Spec) -> Index:
    """Scratch bytes of one task; 0 when the private buffers are on the stack."""
    if _on_stack(spec):
        return 0
    total: Index = 0
    for v in spec.private:
        if v.tensor.rank:
            total = build.add(total, _padded(build, env, v.tensor, spec))
    return total


def _padded(build: Builder, env: Env, t: TensorType, spec: Spec) -> Index:
    """Bytes of a buffer, rounded up to 64."""
    size = build.mul(emit_dim(build, env, t.size), t.dtype.bytes * _columns(spec))
    return build.mul(build.udiv(build.add(size, 63), 64), 64)


def _with_locals(build: Builder, env: Env, spec: Spec, scratch: Reg, task: Reg) -> Env:
    buffers: dict[Value, Buffer] = {}
    stack = _on_stack(spec)
    at: Index = 0 if stack else build.mul(task, _local_bytes(build, env, spec))
    for v in spec.private:
        if not v.tensor.rank:
            continue
        if stack:
            ptr = build.alloca(I8, max(64, _static_bytes(v.tensor, spec)))
        else:
            ptr = build.offset(scratch, at, I8)
            at = build.add(at, _padded(build, env, v.tensor, spec))
        buffers[v] = Buffer(ptr, v.tensor.dtype, contiguous(build, list(v.tensor.shape)))
    return env.at(buffers=buffers)


def _views(build: Builder, env: Env, nest: Nest) -> dict[Value, Buffer]:
    out: dict[Value, Buffer] = {}
    for stand_in, source in nest.views.items():
        if source in env.buffers:
            base = env.buffers[source]
            strides = contiguous(build, list(stand_in.tensor.shape))
            out[stand_in] = Buffer(base.ptr, base.dtype, strides, base.invariant)
    return out
