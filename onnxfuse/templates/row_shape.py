"""rowwise: what the lanes lie along, and what that costs.

`Spec` is everything the emitter needs to know beside the nest. Costs are counted in vector operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.codegen.scalar_expr import affine, flat_index, in_range
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Load, i64, loads, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import as_dim, simplify
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target
from onnxfuse.templates.estimate import expected
from onnxfuse.templates.nest import Nest, Step, segments, stage_roots, stage_stores, turn_roots

FUNCTION = 12  # cost from which a primitive is a function rather than an instruction
BLOCK = 8192  # elements of the vector axis in one unit, where a point of it is little work ...
NARROW = 64  # ... and where it is a whole column
SUNK = 4  # points that make it worth to compute places once for all of them
NATIVE = ("exp", "decay", "log", "log1p", "tanh", "erf")  # functions that run in f32

# ---- choosing a shape ----


@dataclass(frozen=True, slots=True)
class Tile:
    """Accesses that walk memory along `axis` instead of the vector axis: squares are transposed in registers."""

    axis: Axis
    loads: frozenset[Load]
    stores: frozenset[Store] = frozenset()
    weave: bool = False  # instead: all of the few points of `axis`, whose stores are woven into consecutive vectors


def weave(nest: Nest, vector: Axis, lanes: int) -> Tile | None:
    """A short second axis (two to four channels, innermost) across which vectors along `vector` are stored."""
    if len(nest.stages) != 1:
        return None
    stores = nest.stages[0].stores
    if any(not st.index or st.target.tensor.dtype is DType.BOOL for st in stores):
        return None
    for a in nest.outer:
        if a is vector or not isinstance(a.extent, int) or not 2 <= a.extent <= 4:
            continue
        steps = {(step_along(st.target, st.index, a), step_along(st.target, st.index, vector)) for st in stores}
        if steps == {(1, a.extent)}:
            return Tile(a, frozenset(), weave=True)
    return None


def tile_of(nest: Nest, vector: Axis | None, lanes: int) -> Tile | None:
    """The best second outer axis for the accesses that are not contiguous along the vector axis, if any."""
    if vector is None or any(s.axes or s.reduce for s in nest.stages):
        return None
    return _squares(nest.stages, vector, nest.outer, lanes) or weave(nest, vector, lanes)


def stage_tile(stage: Step, vector: Axis, lanes: int) -> Tile | None:
    """The same for one of a stage's own axes."""
    if stage.reduce is not None:
        return None
    return _squares((stage,), vector, stage.axes, lanes)


def _squares(stages: Sequence[Step], vector: Axis, axes: Sequence[Axis], lanes: int) -> Tile | None:
    """The axis along which most of the accesses are contiguous that are not so along the vector axis."""
    if lanes not in (2, 4, 8, 16):
        return None
    fitting = [a for a in axes if a is not vector and not (isinstance(a.extent, int) and a.extent < lanes)]
    best = max((tile_along(stages, vector, a) for a in fitting), key=_size, default=None)
    return best if best is not None and _size(best) else None


def _size(tile: Tile) -> int:
    return len(tile.loads) + len(tile.stores)


def tile_along(stages: Sequence[Step], vector: Axis, across: Axis) -> Tile:
    """What crosses the vector axis and is contiguous along another."""
    reads = dict.fromkeys(ld for s in stages for ld in loads(*stage_roots(s)))
    lds = [ld for ld in reads if in_range(ld) and _crosses(ld.source, ld.index, vector)]
    sts = [st for s in stages for st in s.stores if st.index and _crosses(st.target, st.index, vector)]
    return Tile(
        across,
        frozenset(ld for ld in lds if step_along(ld.source, ld.index, across) == 1),
        frozenset(st for st in sts if step_along(st.target, st.index, across) == 1),
    )


def _crosses(source: Value, index: tuple[Expr, ...], vector: Axis) -> bool:
    """The access jumps from lane to lane."""
    split = affine(flat_offset(source, index), var(vector))
    return split is not None and source.tensor.dtype is not DType.BOOL and as_dim(split[1]) not in (0, 1, -1)


def flat_offset(source: Value, index: tuple[Expr, ...]) -> Expr:
    """Offset of an access in a contiguous value."""
    strides: list[Expr] = []
    step: Expr = i64(1)
    for d in reversed(source.tensor.shape):
        strides.append(step)
        step = simplify(step * d)
    return flat_index(index, tuple(reversed(strides)))


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything the emitter needs to know beside the nest."""

    kernel: Kernel
    nest: Nest
    axis: Axis | None  # shape `outer`: the vector axis
    row: bool
    lanes: int
    unroll: int
    masked: bool  # tails by masked vectors; else by a scalar loop
    tile: Tile | None = None
    block: int = BLOCK  # elements of the vector axis in one unit: a multiple of every vector width
    private: tuple[Value, ...] = ()  # buffers of one outer point; rank 0: in registers
    width: int = 0  # shape `outer` where stages have axes: private buffers have so many columns ...
    columns: tuple[Value, ...] = ()  # ... under these names
    ahead: bool = False  # more is moved than caches hold: lines are asked for before their turn (row_ahead)


def element_bytes(nest: Nest) -> int:
    """Widest element the lanes must hold; i64 index arithmetic does not count."""
    wide = 1
    for s in nest.stages:
        for e in walk(*stage_roots(s)):
            if isinstance(e, Load) or (isinstance(e, Apply) and e.dtype is not DType.I64):
                wide = max(wide, e.dtype.compute.bytes)
        wide = max([wide, *(st.target.tensor.dtype.compute.bytes for st in stage_stores(s))])
        if s.reduce is not None:
            wide = max(wide, s.reduce.acc.bytes)
    return wide


def maskable(nest: Nest, target: Target) -> bool:
    """Masked loads and stores of every accessed type are instructions."""
    if "avx512bw" in target.features:
        return True
    if "avx2" not in target.features:
        return False
    dtypes = {e.dtype for s in nest.stages for e in walk(*stage_roots(s)) if isinstance(e, Load)}
    dtypes |= {st.target.tensor.dtype for s in nest.stages for st in stage_stores(s)}
    return all(d.bytes >= 4 for d in dtypes)


def step_along(source: Value, index: tuple[Expr, ...], axis: Axis) -> int | None:
    """Stride in elements along `axis`; None when it is not a constant."""
    split = affine(flat_offset(source, index), var(axis))
    if split is None:
        return None
    known = as_dim(split[1])
    return known if isinstance(known, int) else None


def access_cost(source: Value, index: tuple[Expr, ...], axis: Axis | None, lanes: int) -> float:
    """Cost of one access per element, in units of one vector operation per lane."""
    if axis is None or lanes == 1:
        return 1.0
    step = step_along(source, index, axis)
    if step == 0:
        return 0.5 / lanes
    if step in (1, -1):
        return 1.0 / lanes
    return 1.5 / lanes if step == 2 else 1.5


def body_cost(exprs: Sequence[Expr], axis: Axis | None, lanes: int, tile: Tile | None = None) -> float:
    """Cost of evaluating `exprs` once per element."""
    total = 0.0
    for e in walk(*exprs):
        if isinstance(e, Load) and tile is not None and e in tile.loads:
            total += 5.0 / lanes
        elif isinstance(e, Load):
            total += access_cost(e.source, e.index, axis, lanes)
        elif isinstance(e, Apply):
            total += e.prim.cost / lanes
    return total


def _extent(d: Dim) -> int:
    return int(expected(d))


def _points(axes: Sequence[Axis]) -> float:
    return float(math.prod(_extent(a.extent) for a in axes))


def fill(axis: Axis | None, lanes: int) -> float:
    """Lanes paid for over lanes used."""
    if axis is None or not isinstance(axis.extent, int) or axis.extent == 0:
        return 1.0
    return math.ceil(axis.extent / lanes) * lanes / axis.extent


def reduce_axis(stage: Step, lanes: int) -> tuple[Axis, ...]:
    """Reduce axes with the one to vectorise last: the best strides win, then the later axis."""
    assert stage.reduce is not None
    body = turn_roots(stage)
    axes = stage.reduce.axes
    best = min(axes, key=lambda a: (body_cost(body, a, lanes) * fill(a, lanes), -axes.index(a)))
    return (*(a for a in axes if a is not best), best)


def inner_axis(stage: Step, lanes: int) -> Axis | None:
    """Shape `row`: the axis the lanes of a stage lie along; one of its own axes (the last) or of its reduction."""
    own = stage.axes[-1] if stage.axes else None
    if stage.reduce is None or not stage.reduce.axes:
        return own
    along = reduce_axis(stage, lanes)[-1]
    if own is None:
        return along
    body = turn_roots(stage)
    own_cost = body_cost(body, own, lanes) * fill(own, lanes)
    return own if own_cost <= 1.2 * body_cost(body, along, lanes) * fill(along, lanes) else along


def cycles(nest: Nest, axis: Axis | None, row: bool, lanes: int) -> float:
    """Predicted vector operations of the whole kernel."""
    total = 0.0
    tile = None if row else tile_of(nest, axis, lanes)
    for s in nest.stages:
        if s.axes:
            tile = None if row or axis is None else stage_tile(s, axis, lanes)
        along = inner_axis(s, lanes) if row else axis
        points = _points(nest.outer) * _points(s.axes)
        width = lanes if along is not None else 1
        stores = [st.value for st in s.stores]
        own = along if s.reduce is None or along not in s.reduce.axes else None
        cost = body_cost(stores, own, width if own is not None else 1, tile)
        woven = tile is not None and tile.weave
        for st in s.stores:
            square = tile is not None and st in tile.stores
            cost += 2.0 / lanes if woven else 5.0 / lanes if square else access_cost(st.target, st.index, own, width)
        total += points * cost * (fill(own, width) if own is not None else 1.0)
        if s.reduce is not None and s.reduce_body is not None:
            body = body_cost(turn_roots(s), along, width) + (2.0 + len(s.side)) / width
            total += points * _points(s.reduce.axes) * body * fill(along, width)
            total += points * 8 if own is None and along is not None else 0
    return total


def kernel_bytes(kernel: Kernel) -> float:
    """Bytes of everything the kernel reads or writes, once."""
    used = {ld.source for ld in kernel.loads} | set(kernel.outputs)
    values = [v for v in (*kernel.inputs, *kernel.outputs) if v in used and v.type is not None]
    return float(sum(math.prod(_extent(d) for d in v.tensor.shape) * v.tensor.dtype.bytes for v in values))


def candidates(nest: Nest) -> list[tuple[Axis | None, bool]]:
    """(vector axis, row?) worth a look."""
    out: list[tuple[Axis | None, bool]] = []
    if not any(s.axes for s in nest.stages):
        out += [(a, False) for a in reversed(nest.outer)]
    else:
        out += [(a, False) for a in reversed(nest.outer) if _walked(nest, a)]
    if any(s.axes or (s.reduce and s.reduce.axes) for s in nest.stages):
        out.append((None, True))
    return out or [(None, False)]


def sunk(nest: Nest, axis: Axis | None) -> Nest:
    """Computed places (a Resize) are found once for all points of another axis, whose loop then goes innermost."""
    if axis is None or len(nest.stages) != 1 or nest.stages[0].axes or nest.stages[0].reduce is not None:
        return nest
    (stage,) = nest.stages
    roots = stage_roots(stage)
    flats = [flat_offset(ld.source, ld.index) for ld in loads(*roots)]
    computed = [f for f in flats if affine(f, var(axis)) is None and _from_float(f, axis)]
    best, most = None, 0
    for a in nest.outer if computed else ():
        steps = [affine(f, var(a)) for f in computed]
        if a is axis or (isinstance(a.extent, int) and a.extent < SUNK) or None in steps:
            continue
        saved = sum(e.prim.cost for e in walk(*computed) if isinstance(e, Apply) and not _needs(e, a))
        if all(step is not None and not _needs(step[0], a) for step in steps) and saved > most:
            best, most = a, saved
    if best is None:
        return nest
    outer = tuple(a for a in nest.outer if a is not best)
    return Nest(outer, (replace(stage, axes=(best,)),), nest.views)


def _from_float(e: Expr, axis: Axis) -> bool:
    """Rounded from a float, lane by lane (few processors convert vectors to i64)."""
    return any(isinstance(x, Apply) and x.args[0].dtype.is_float and _needs(x, axis) for x in walk(e))


def _needs(e: Expr, axis: Axis) -> bool:
    return any(x is var(axis) for x in walk(e))


def _walked(nest: Nest, axis: Axis) -> bool:
    """Some access in a loop of a stage is contiguous along the axis."""
    stages = [s for s in nest.stages if s.axes or s.reduce]
    reads = ((ld.source, ld.index) for s in stages for ld in loads(*stage_roots(s)))
    writes = ((st.target, st.index) for s in stages for st in stage_stores(s))
    return any(step_along(source, index, axis) == 1 for source, index in (*reads, *writes))


def block_of(nest: Nest, axis: Axis | None, lanes: int, unroll: int) -> int:
    """Elements of the vector axis in one unit."""
    if axis is None or not any(s.axes or s.reduce for s in nest.stages):
        return BLOCK
    static = isinstance(axis.extent, int) and axis.extent <= BLOCK
    if static and len(segments(nest.stages, axis)) > 1:
        return BLOCK  # the joints are cut inside of a unit
    return max(NARROW, lanes * unroll)


def unroll_of(stages: Sequence[Step]) -> int:
    """Vectors per iteration: more for light bodies."""
    costs = [e.prim.cost for s in stages for e in walk(*stage_roots(s)) if isinstance(e, Apply)]
    ops = sum(costs)
    if max(costs, default=0) >= FUNCTION:  # its constants fill the registers
        native = all(_narrow(r) for s in stages for r in stage_roots(s))
        return 4 if native and ops <= 40 else 2 if ops <= 24 else 1
    return 4 if ops <= 16 else 2 if ops <= 48 else 1


def _narrow(root: Expr) -> bool:
    """Nothing but f32 arithmetic: in vectors of several registers it costs no more than in one."""
    stack = [root]
    while stack:
        e = stack.pop()
        if isinstance(e, Load):  # its index is no arithmetic of the lanes
            if e.dtype is not DType.F32 or not in_range(e):
                return False
        elif isinstance(e, Apply):
            if e.prim.name in ("lt", "le", "eq") and e.args[0].dtype is DType.F32:
                pass
            elif e.dtype is not DType.F32 or (e.prim.cost >= FUNCTION and e.prim.name not in NATIVE):
                return False
            stack.extend(e.args)
    return True


def may_span(stages: Sequence[Step], axis: Axis) -> bool:
    """Let one vector span several registers: the operations of a function then take turns, which hides their latency.

    The processor cannot do that by itself: the chain of one vector fills its window.
    """
    roots = [r for s in stages for r in stage_roots(s)]
    if not any(isinstance(e, Apply) and e.prim.name in NATIVE for e in walk(*roots)):
        return False
    if not all(_narrow(r) for r in roots):
        return False
    reads = ((ld.source, ld.index) for ld in loads(*roots))
    writes = ((st.target, st.index) for s in stages for st in stage_stores(s))
    return all(step_along(source, index, axis) in (0, 1) for source, index in (*reads, *writes))
