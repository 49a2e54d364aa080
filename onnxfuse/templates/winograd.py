"""3 x 3 convolutions of stride 1 by Winograd's algorithm: F(4x4, 3x3), or F(2x2, 3x3) for small images.

[Note: the passes]

Tiles of m x m outputs are numbered through batch, lines and columns; a block is a range of them.

    task: a range of units; unit = (block of tiles, part of the features)
      input:   for each line of the block, for `lanes` neighbouring tiles, for each channel:
               V[xi][c][tile] = B^T d B                   (d: (m+2) x (m+2) pixels, zero outside the image)
      for each block of features, small enough for its products to stay in L2:
        products:  for each xi: M[xi][f][tile] = U[xi] V[xi]         (U: transformed weights, packed at creation)
        output:    for each feature, for each line of the block:
                   A^T M A as lines of pixels, then the epilogue and the stores on contiguous vectors

When there are fewer blocks than threads want, features are split as well: then phase 0 makes V once for all of them.
Vectors of tiles at the end of a line overrun into those of the next line, which are written later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from onnxfuse.analysis.roles import Parts, pieces, unit_axis
from onnxfuse.codegen.build import F32, F64, I32, I64, PTR, VOID, Builder, Function, Index, Reg
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr, emit_store, open_kernel
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import FALSE, Apply, Expr, Lit, Load, acc, i64, var
from onnxfuse.ir.kernel import Kernel, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.ir.simplify import dim_expr, poly, simplify
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target
from onnxfuse.templates.estimate import epilogue_cost, expected, pointwise_seconds
from onnxfuse.templates.microkernel import Operands, Strides, Tile, accumulate, micro_kernel
from onnxfuse.templates.winograd_transform import (
    DATA,
    RESULT,
    TAPS,
    both_ways,
    filter_transform,
    merge,
    split,
)

MAX_PAD = 2
MAX_PACKED = 64 << 20  # bytes: they are four times the weights, and live beside them
MAX_TASKS = 8  # every task has a slice of scratch of its own: more of them would not fit into the caches
TASK_WORK = 1 << 20  # products worth a task: about 25 us
SPREAD = 4  # units wanted before features are split for the sake of parallelism
PART = 32  # features a unit should have at least
FEW, MANY = 96, 256  # numbers of channels at which the best size of a block changes: measured
DEPTH = 256  # channels per call of the micro-kernel
CHANNELS = 4  # channels whose tiles are transformed together
CALL_DEPTH = 8  # products that a call of the micro-kernel costs for each of its accumulators: measured
STEP_SECONDS = 1.8e-9  # one step of a full column of products through a panel: measured, 4 x 3
NARROW = 0.5, 0.7  # what columns of one and of two vectors cost of a full one
WEIGHT_SECONDS = 5e-11  # per byte of the stream of weights, as far as the products do not hide it
NEAR, NEAR_SECONDS, FAR_SECONDS = (
    320 << 10,
    5e-12,
    2.5e-11,
)  # bytes of V that stay near a core; per byte, there and back
TASK_SECONDS = 3e-6  # handing a task to a thread
VECTOR_SECONDS = 2.8e-9  # one vector of one point through a transform: measured, 8 lanes


@dataclass(frozen=True, slots=True, eq=False)
class Conv:
    """out[n, f, y, x] = sum over c, ky, kx of source[n, c, y + ky - top, x + kx - left] * weight[f, c, ky, kx].

    n, f and c are None where they have extent 1.
    """

    n: Axis | None
    f: Axis | None
    y: Axis
    x: Axis
    source: Load
    weight: Load
    top: int
    left: int
    finish: Expr
    result: Load | None
    stores: tuple[Store, ...]

    @property
    def channels(self) -> int:
        found = self.weight.source.tensor.shape[1]
        assert isinstance(found, int)
        return found

    @property
    def features(self) -> int:
        found = self.weight.source.tensor.shape[0]
        assert isinstance(found, int)
        return found

    @property
    def size(self) -> tuple[Dim, Dim]:
        """Height and width of the source."""
        height, width = self.source.source.tensor.shape[2:]
        return height, width


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """Everything decided before emission. Sizes in elements.

    m          outputs of a tile in each direction
    mr, nv     micro-kernel: features times vectors of tiles
    block      tiles of a block, at most
    group      features whose products are kept at a time
    cores      to keep busy
    """

    c: Conv
    lanes: int
    m: int
    mr: int
    nv: int
    block: int
    group: int
    cores: int = 8

    @property
    def alpha(self) -> int:
        return self.m + TAPS - 1

    @property
    def points(self) -> int:
        return self.alpha * self.alpha

    @property
    def panels(self) -> int:
        """Panels of mr features."""
        return -(-self.c.features // self.mr)

    @property
    def row(self) -> int:
        """Row length of V and M: an odd number of cache lines, with room for the overrun of a vector."""
        lines = -(-(self.block + self.lanes) // 16)
        return (lines + 1 - lines % 2) * 16

    @property
    def v_step(self) -> int:
        """From one point to the next in V: off the powers of two."""
        return self.c.channels * self.row + 16

    @property
    def m_step(self) -> int:
        return self.group * self.row + 16

    @property
    def v_size(self) -> int:
        return self.points * self.v_step

    @property
    def m_size(self) -> int:
        return self.points * self.m_step

    @property
    def line(self) -> int:
        """Length of a line of pixels between the output transform and the epilogue."""
        return self.m * (self.block + self.lanes)

    @property
    def group_panels(self) -> int:
        return self.group // self.mr

    @property
    def depth(self) -> int:
        """Channels of one call of the micro-kernel."""
        return -(-self.c.channels // -(-self.c.channels // DEPTH))

    @property
    def u_size(self) -> int:
        """Transformed weights of one point."""
        return self.panels * self.mr * self.c.channels

    @property
    def packed_bytes(self) -> int:
        return self.points * self.u_size * 4

    @property
    def own_size(self) -> int:
        """Scratch of a task besides V."""
        return -(-(self.m_size + self.m * self.line) // 16) * 16


class Winograd:
    """The template: see the note above."""

    name = "winograd"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule for each tile size, the cheaper one first, or why this is no such convolution."""
        c = conv(kernel)
        if isinstance(c, Refusal):
            return c
        lanes = target.lanes(4)
        if lanes < 4:
            return Refusal("WINOGRAD_LANES", f"vectors of {lanes}")
        found = []
        for d in (_design(c, m, target) for m in (4, 2)):
            if d.packed_bytes > MAX_PACKED:
                continue
            found.append(
                Schedule(
                    self.name,
                    lanes=lanes,
                    vector=c.x.name,
                    tile=(d.m, d.mr, d.nv, d.block, d.group),
                    pack=("weight",),
                    grain=TASK_WORK,
                    cost=_cost(d, target),
                )
            )
        if not found:
            return Refusal("WINOGRAD_MEMORY", f"transformed weights take more than {MAX_PACKED >> 20} MiB")
        return sorted(found, key=lambda s: s.cost)

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI."""
        c = conv(kernel)
        assert isinstance(c, Conv), c
        m, mr, nv, block, group = schedule.tile
        d = Design(c, schedule.lanes, m, mr, nv, block, group, target.cores)
        _emit_pack(build, kernel, d)
        _emit_sizes(build, kernel, d)
        tiles = _emit_tiles(build, d)
        reader = _emit_input(build, kernel, d)
        writer = _emit_output(build, kernel, d)
        _emit_share(build, kernel, d, reader)
        _emit_run(build, kernel, d, tiles, reader, writer)
        return Emitted(phases=2, packs=True)


WINOGRAD = Winograd()


# ---- recognition ----


def conv(kernel: Kernel) -> Conv | Refusal:
    """The convolution of a kernel, or why it is none that this template takes."""
    parts = pieces(kernel)
    if isinstance(parts, Refusal):
        return parts
    if parts.combine.name != "add" or parts.init.value != 0 or parts.acc is not DType.F32:
        return Refusal("WINOGRAD_FORM", f"accumulates with {parts.combine} in {parts.acc}")
    guards, factors = _product(parts.body)
    if factors is None:
        return Refusal("WINOGRAD_FORM", "the summed expression is not a product of two bare loads")
    x = unit_axis(parts.stores[0])
    if x is None:
        return Refusal("WINOGRAD_FORM", "the output has no unit stride axis")
    for source, weight in (factors, factors[::-1]):
        if weight.source in kernel.consts and source.source not in kernel.consts:
            return _assign(parts, source, weight, guards, x)
    return Refusal("WINOGRAD_WEIGHT", "the weights are no constant")


def _product(body: Expr) -> tuple[list[Expr], tuple[Load, Load] | None]:
    """Conditions and factors of a product of loads; outside of the conditions it is zero."""
    conds: list[Expr] = []
    body = _peeled(body, conds)
    if not (isinstance(body, Apply) and body.prim.name == "mul"):
        return conds, None
    a, b = (_peeled(e, conds) for e in body.args)
    return conds, (a, b) if isinstance(a, Load) and isinstance(b, Load) else None


def _peeled(e: Expr, conds: list[Expr]) -> Expr:
    """`e` without its guards, which go to `conds`, conjunctions taken apart."""
    while isinstance(e, Apply) and e.prim.name == "where" and isinstance(e.args[2], Lit) and e.args[2].value == 0:
        todo = [e.args[0]]
        while todo:
            cond = todo.pop()
            if isinstance(cond, Apply) and cond.prim.name == "and":
                todo.extend(cond.args)
            else:
                conds.append(cond)
        e = e.args[1]
    return e


def _assign(parts: Parts, source: Load, weight: Load, guards: list[Expr], x: Axis) -> Conv | Refusal:
    form = Refusal("WINOGRAD_FORM", "not a plain two-dimensional convolution of one group")
    if len(source.index) != 4 or len(weight.index) != 4 or source.dtype is not DType.F32:
        return form
    taps = [_axis(i) for i in weight.index]
    f, c, ky, kx = taps
    shape = weight.source.tensor.shape
    if not all(isinstance(d, int) for d in shape) or shape[2:] != (TAPS, TAPS) or ky is None or kx is None:
        return Refusal("WINOGRAD_WINDOW", f"weights {list(shape)}")
    if not all(t is not None or d == 1 for t, d in zip(taps, shape, strict=True)):
        return form
    if set(parts.k) != {a for a in (c, ky, kx) if a is not None} or f in parts.k or (f is None and shape[0] != 1):
        return form
    n = _axis(source.index[0])
    if n is not None and (n is f or n not in parts.outer):
        return form
    if not _is(source.index[0], n) or not _is(source.index[1], c) or (n is None and source.source.tensor.shape[0] != 1):
        return form
    if source.source.tensor.shape[1] != shape[1]:
        return form
    rest = [a for a in parts.outer if a not in (n, f, x)]
    if len(rest) != 1:
        return Refusal("WINOGRAD_FORM", "the output has no two axes that slide")
    (y,) = rest
    top, left = _pad(source.index[2], y, ky), _pad(source.index[3], x, kx)
    if top is None or left is None:
        return Refusal("WINOGRAD_STEPS", "strides or dilations are not 1, or the padding is more than two")
    if not _exact(guards, source):
        return Refusal("WINOGRAD_GUARD", "the guard is not the extent of the source")
    return Conv(n, f, y, x, source, weight, top, left, parts.finish, parts.result, parts.stores)


def _axis(e: Expr) -> Axis | None:
    """The axis an index is the variable of."""
    return getattr(e, "axis", None)


def _is(e: Expr, axis: Axis | None) -> bool:
    return (isinstance(e, Lit) and e.value == 0) if axis is None else e is var(axis)


def _pad(e: Expr, out: Axis, tap: Axis) -> int | None:
    """The padding: p where the index is out + tap - p."""
    rest = dict(poly(simplify(e)))
    if rest.pop((var(out),), 0) != 1 or rest.pop((var(tap),), 0) != 1:
        return None
    pad = -rest.pop((), 0)
    return pad if not rest and 0 <= pad <= MAX_PAD else None


def _exact(guards: Sequence[Expr], source: Load) -> bool:
    """Every condition is a bound of the source's extent on one of its sliding indices."""
    allowed: set[Expr] = set()
    for e, d in list(zip(source.index, source.source.tensor.shape, strict=True))[2:]:
        allowed |= {simplify(i64(0) <= e), simplify(e < dim_expr(d)), i64(0) <= e, e < dim_expr(d)}
    return FALSE not in guards and all(g in allowed for g in guards)


# ---- decisions ----


def _design(c: Conv, m: int, target: Target) -> Design:
    """Sizes for this machine; measured, the optimum is flat."""
    lanes = target.lanes(4)
    mr, nv = (8, 3) if target.vector_regs >= 32 else (4, 3)
    # V is to stay in the second level of cache; many channels do not fit there, then fewer passes over U count.
    middle = FEW < c.channels <= MANY
    block = (96 if middle else 48) if lanes > 8 else (72 if middle else 40)
    group = 64 if c.channels >= MANY else 32
    # Few features are still to make a part for each of two cores.
    group = max(mr, min(group, -(-c.features // 2 // mr) * mr)) if target.cores > 1 else group
    return Design(c, lanes, m, mr, nv, block, group, target.cores)


def _cost(d: Design, target: Target) -> float:
    """Seconds on one core: products at 80 % of peak, transforms, the stream of weights, and the epilogue.

    A single vector of tiles keeps too few sums under way. Half of the stream of weights hides behind the products.
    """
    c = d.c
    images = 1.0 if c.n is None else expected(c.n.extent)
    high, wide = expected(c.y.extent), expected(c.x.extent)
    lines, across = images * -(-high // d.m), -(-wide // d.m)
    columns = -(-lines * across // d.lanes) * d.lanes
    depth = c.channels + CALL_DEPTH
    rate = target.peak * (0.8 if columns > d.lanes else 0.4)
    products = 2 * d.points * d.panels * d.mr * depth * columns / rate
    vectors = lines * -(-across // d.lanes) * (c.channels + c.features) * d.points
    transforms = vectors * VECTOR_SECONDS
    outputs = images * c.features * high * wide
    epilogue = pointwise_seconds(outputs * epilogue_cost(c.finish, c.stores), target, 4)
    weights = 4 * d.points * c.features * c.channels / (2 * target.bw)
    traffic = 4 * (images * c.channels * high * wide + outputs) / (4 * target.bw)
    return max(products + transforms + weights + epilogue, traffic) + 2e-6


# ---- sizes at run time ----


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """How the work is divided; everything follows from the dimensions alone."""

    high: Index  # outputs down and across
    wide: Index
    down: Index  # tiles down and across
    across: Index
    tiles: Index
    block: Index  # tiles of a block
    blocks: Index
    part: Index  # panels of a part of the features, whole groups
    parts: Index
    units: Index
    tasks: Index
    shared: Index  # 1 when phase 0 makes V for all parts, else 0


def _split(build: Builder, env: Env, d: Design) -> _Split:
    c = d.c
    n: Index = 1 if c.n is None else emit_dim(build, env, c.n.extent)
    high, wide = (emit_dim(build, env, a.extent) for a in (c.y, c.x))
    down, across = build.ceildiv(high, d.m), build.ceildiv(wide, d.m)
    tiles = build.mul(n, build.mul(down, across))
    block: Index
    part: Index
    if isinstance(tiles, int) and isinstance(across, int) and tiles:
        block, part = _cut(d, tiles, across)
    else:
        count = build.ceildiv(tiles, d.block)
        even = build.ceildiv(tiles, build.imax(count, 1))
        block = build.imax(build.mul(build.ceildiv(even, d.lanes), d.lanes), d.lanes)
        most = max(1, d.c.features // PART)
        wanted = build.imin(build.ceildiv(SPREAD, build.imax(build.ceildiv(tiles, block), 1)), most)
        part = build.mul(build.ceildiv(build.ceildiv(d.panels, build.imax(wanted, 1)), d.group_panels), d.group_panels)
    blocks = build.ceildiv(tiles, block)
    parts = build.ceildiv(d.panels, part)
    units = build.mul(blocks, parts)
    work = build.mul(tiles, d.points * c.channels * c.features)
    worth = build.add(build.udiv(work, TASK_WORK), 1)
    tasks = build.imin(units, build.imin(worth, MAX_TASKS))
    shared = build.imin(build.sub(parts, 1), 1)
    return _Split(high, wide, down, across, tiles, block, blocks, part, parts, units, tasks, shared)


def _cut(d: Design, tiles: int, across: int) -> tuple[int, int]:
    """Tiles of a block and panels of a part for a known number of tiles: those that are done first on all cores."""
    groups = -(-d.panels // d.group_panels)
    parts = sorted({-(-groups // n) * d.group_panels for n in range(1, groups + 1)}, reverse=True)
    blocks = range(min(d.block, -(-tiles // d.lanes) * d.lanes), 0, -d.lanes)
    _, block, part = min(
        ((_makespan(d, tiles, across, block, part), block, part) for part in parts for block in blocks),
        key=lambda c: c[0],
    )
    return block, part


def _makespan(d: Design, tiles: int, across: int, block: int, part: int) -> float:
    """Seconds until the last core is done, cores taking one task after another."""
    c = d.c
    spans = [(t, min(t + block, tiles)) for t in range(0, tiles, block)]
    panels = [min(part, d.panels - p) for p in range(0, d.panels, part)]
    own = 1 if len(panels) == 1 else 0
    kept = (min(block, tiles) if own else tiles) * c.channels * d.points * 4  # bytes of V at a time
    rate = NEAR_SECONDS if kept <= NEAR else FAR_SECONDS
    vectors = [_vectors(d, across, *span) for span in spans]
    sizes = [(b - a) * c.channels * d.points * 4 for a, b in spans]
    read = [v * c.channels * d.points * VECTOR_SECONDS + n * rate for v, n in zip(vectors, sizes, strict=True)]
    passes = -(-part // d.group_panels) * rate
    each = list(zip(spans, read, sizes, vectors, strict=True))
    units = [own * r + n * passes + _unit_seconds(d, b - a, v, p) for (a, b), r, n, v in each for p in panels]
    tasks = min(len(units), tiles * d.points * c.channels * c.features // TASK_WORK + 1, MAX_TASKS)
    loads = [sum(units[t * len(units) // tasks : (t + 1) * len(units) // tasks]) for t in range(tasks)]
    before = 0.0 if own else sum(read) / min(d.cores, len(spans) * _slabs(d)) + TASK_SECONDS
    if tasks == 1:
        return before + sum(loads)
    busy = [0.0] * d.cores
    for load in loads:
        heapq.heapreplace(busy, busy[0] + load + TASK_SECONDS)
    return before + max(busy) + TASK_SECONDS


def _vectors(d: Design, across: int, first: int, last: int) -> int:
    """Vectors of tiles first .. last: they do not go past the end of a line."""
    total, at = 0, first
    while at < last:
        end = min(last, at - at % across + across)
        total += -(-(end - at) // d.lanes)
        at = end
    return total


def _unit_seconds(d: Design, tiles: int, vectors: int, panels: int) -> float:
    """Products and output transforms of a block of tiles for a part of the features; the stream of weights."""
    c = d.c
    full, rest = divmod(-(-tiles // d.lanes), d.nv)
    columns = full + (0.0, NARROW[0], NARROW[1])[min(rest, 2)]
    if rest == 1 and full:  # four are two and two
        columns += 2 * NARROW[1] - NARROW[0] - 1
    steps = columns * d.points * panels * (c.channels + CALL_DEPTH)
    weights = d.points * panels * d.mr * c.channels * 4 * WEIGHT_SECONDS
    return steps * STEP_SECONDS + weights + vectors * panels * d.mr * d.points * VECTOR_SECONDS


def _shares(build: Builder, d: Design, s: _Split) -> Index:
    """Tasks of phase 0: parts of the channels of each block."""
    return build.mul(s.shared, build.mul(s.blocks, _slabs(d)))


def _slabs(d: Design) -> int:
    """Parts of the channels in phase 0."""
    return max(1, min(4, d.c.channels // 32))


def _slice(build: Builder, d: Design, s: _Split) -> Index:
    """Scratch of one task."""
    return build.add(d.own_size, build.mul(build.sub(1, s.shared), d.v_size))


def _emit_sizes(build: Builder, kernel: Kernel, d: Design) -> None:
    for phase in range(2):
        with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
            s = _split(build, open_kernel(build, kernel, fn.args[0], None), d)
            build.ret(_shares(build, d, s) if phase == 0 else s.tasks)
    with build.function("scratch", I64, [PTR]) as fn:
        s = _split(build, open_kernel(build, kernel, fn.args[0], None), d)
        shared = build.mul(build.mul(s.shared, s.blocks), d.v_size)
        build.ret(build.mul(build.add(build.mul(s.tasks, _slice(build, d, s)), shared), 4))


def _shared_v(build: Builder, d: Design, s: _Split, scratch: Reg, block: Index) -> Reg:
    """V of a block, behind the slices of the tasks."""
    at = build.add(build.mul(s.tasks, _slice(build, d, s)), build.mul(block, d.v_size))
    return build.offset(scratch, at, F32)


# ---- weights ----


def _emit_pack(build: Builder, kernel: Kernel, d: Design) -> None:
    """The weights, transformed in f64, in the order in which they are read; features past the end are zero.

    U[group][xi][block of channels][panel][c][feature]: one long run, because with few tiles its stream is the limit.
    """
    c = d.c
    with build.function("packed_bytes", I64, []):
        build.ret(d.packed_bytes)
    with build.function("pack", VOID, [PTR, PTR]) as fn:
        bufs, packed = fn.args
        at = kernel.inputs.index(c.weight.source)
        weights = build.load(build.offset(bufs, at, PTR), PTR)
        panels = build.loop(0, d.panels, name="panel")
        with panels as p, build.loop(0, c.channels, name="c") as ch, build.loop(0, d.mr, name="lane") as lane:
            f = build.add(build.mul(p, d.mr), lane)
            real = build.imin(f, c.features - 1)
            src = build.offset(weights, build.mul(build.add(build.mul(real, c.channels), ch), TAPS * TAPS), F32)
            inside = build.ir.icmp_signed("<", build.i64(f), build.i64(c.features))
            taps = [[_tap(build, src, TAPS * i + j, inside) for j in range(TAPS)] for i in range(TAPS)]
            g0 = build.mul(build.udiv(p, d.group_panels), d.group_panels)
            count = build.imin(build.sub(d.panels, g0), d.group_panels)
            k0 = build.mul(build.udiv(ch, d.depth), d.depth)
            depth = build.imin(build.sub(c.channels, k0), d.depth)
            row = build.add(build.add(build.mul(build.sub(p, g0), depth), build.sub(ch, k0)), build.mul(k0, count))
            spot = build.add(build.mul(build.add(row, build.mul(g0, d.points * c.channels)), d.mr), lane)
            u = [v for row in filter_transform(build, d.m, taps) for v in row]
            for xi, value in enumerate(u):
                at = build.add(spot, build.mul(count, xi * c.channels * d.mr))
                build.store(build.ir.fptrunc(value, F32), build.offset(packed, at, F32))


def _tap(build: Builder, src: Reg, k: int, inside: Reg) -> Reg:
    value = build.ir.fpext(build.load(build.offset(src, k, F32), F32), F64)
    return build.ir.select(inside, value, build.const(F64, 0.0))


# ---- lines of a block ----


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Tiles first .. last of line `y` (in tiles) of image n; `at`: tiles of the block before them."""

    n: Index
    y: Index
    first: Index
    last: Index
    at: Index


@contextmanager
def _segments(build: Builder, s: _Split, block: Index) -> Iterator[_Segment]:
    """The lines of a block of tiles."""
    t0 = build.mul(block, s.block)
    t1 = build.imin(build.add(t0, s.block), s.tiles)
    across, down = build.imax(s.across, 1), build.imax(s.down, 1)
    with build.loop(build.udiv(t0, across), build.ceildiv(t1, across), name="line") as line:
        start = build.mul(line, across)
        first = build.imax(build.sub(t0, start), 0)
        last = build.imin(build.sub(t1, start), across)
        at = build.sub(build.add(start, first), t0)
        yield _Segment(build.udiv(line, down), build.umod(line, down), first, last, at)


def _count(build: Builder, s: _Split, block: Index) -> Index:
    """Tiles of a block."""
    t0 = build.mul(block, s.block)
    return build.sub(build.imin(build.add(t0, s.block), s.tiles), t0)


# ---- input ----


def _emit_input(build: Builder, kernel: Kernel, d: Design) -> Function:
    """K.input(env, bufs, block, c0, c1, v): V of channels c0 .. c1 of a block.

    Few channels at a time, so that lines of V are complete before they leave the first level of cache; first the rows
    of all of them, then the columns, because tiles do not fit into the registers.
    """
    with build.function("input", VOID, [PTR, PTR, I64, I64, I64, PTR]) as fn:
        fn.linkage = "internal"
        env_ptr, bufs, block, c0, c1, v = fn.args
        env = open_kernel(build, kernel, env_ptr, bufs)
        s = _split(build, env, d)
        length = d.m * d.lanes + d.lanes
        zeros, half = build.alloca(F32, length), build.alloca(F32, CHANNELS * d.points * d.lanes)
        for k in range(0, length, d.lanes):
            build.store(build.splat(build.const(F32, 0.0), d.lanes), build.offset(zeros, k, F32))
        with build.loop(c0, c1, CHANNELS, name="few") as c, _segments(build, s, block) as seg:
            count = build.imin(build.sub(c1, c), CHANNELS)
            dst = build.offset(v, build.mul(c, d.row), F32)
            with build.loop(seg.first, seg.last, d.lanes, name="tile") as tile:
                at = build.add(seg.at, build.sub(tile, seg.first))
                _read_tiles(build, env, d, seg, tile, (c, count), half, zeros)
                _store_v(build, d, count, half, build.offset(dst, at, F32))
    return fn


def _read_tiles(
    build: Builder, env: Env, d: Design, seg: _Segment, tile: Index, channels: tuple[Index, Index], half: Reg,
    zeros: Reg,
) -> None:  # fmt: skip
    """The rows of `lanes` tiles, transformed, of some channels: without masks if all their pixels are inside."""
    c, b = d.c, build.ir
    start, count = channels
    height, width = (emit_dim(build, env, x) for x in c.size)
    y, x = build.sub(build.mul(seg.y, d.m), c.top), build.sub(build.mul(tile, d.m), c.left)
    reach = d.m * d.lanes + TAPS - 1
    plane = build.mul(height, width)
    image = build.mul(build.add(build.mul(seg.n, c.channels), start), plane)
    first = build.add(image, build.add(build.mul(y, width), x))
    base = build.offset(env.buffers[c.source.source].ptr, first, F32)
    inside = b.and_(
        b.and_(_holds(build, "<=", 0, y), _holds(build, "<=", build.add(y, d.alpha), height)),
        b.and_(_holds(build, "<=", 0, x), _holds(build, "<=", build.add(x, reach), width)),
    )
    with build.if_else(inside) as (then, other):
        with then, build.loop(0, count, name="c") as ch:
            src = build.offset(base, build.mul(ch, plane), F32)
            for i in range(d.alpha):
                _store_row(build, d, _plain(build, d, build.offset(src, build.mul(width, i), F32)), half, ch, i)
        with other:
            masks = _masks(build, d, x, width)
            valid = [
                b.and_(_holds(build, "<=", 0, build.add(y, i)), _holds(build, "<", build.add(y, i), height))
                for i in range(d.alpha)
            ]
            with build.loop(0, count, name="c") as ch:
                src = build.offset(base, build.mul(ch, plane), F32)
                for i, ok in enumerate(valid):
                    at = b.select(ok, build.offset(src, build.mul(width, i), F32), zeros)
                    _store_row(build, d, _masked(build, d, at, masks), half, ch, i)


def _holds(build: Builder, what: str, a: Index, b: Index) -> Reg:
    return build.ir.icmp_signed(what, build.i64(a), build.i64(b))


def _masks(build: Builder, d: Design, x: Index, width: Index) -> list[Reg]:
    """Which pixels x, x+1 ... of the m vectors of a line and of its tail are inside."""
    b, lanes = build.ir, d.lanes
    low = build.splat(b.trunc(build.i64(build.sub(0, x)), I32), lanes)
    high = build.splat(b.trunc(build.i64(build.sub(width, x)), I32), lanes)
    out = []
    for k in range(d.m + 1):
        place = b.add(build.iota(lanes, I32), build.splat(build.const(I32, k * lanes), lanes))
        mask = b.and_(b.icmp_signed(">=", place, low), b.icmp_signed("<", place, high))
        out.append(mask if k < d.m else b.and_(mask, build.tail_mask(TAPS - 1, lanes)))
    return out


def _plain(build: Builder, d: Design, at: Reg) -> list[Reg]:
    """The columns of `lanes` tiles of one line of pixels."""
    pixels = [build.load(build.offset(at, k * d.lanes, F32), F32, d.lanes) for k in range(d.m)]
    pair = build.load(build.offset(at, d.m * d.lanes, F32), F32, TAPS - 1)
    tail = build.shuffle(pair, pair, [0, 1, *([0] * (d.lanes - 2))])
    return split(build, pixels, tail)


def _masked(build: Builder, d: Design, at: Reg, masks: Sequence[Reg]) -> list[Reg]:
    values = [build.masked_load(build.offset(at, k * d.lanes, F32), F32, mask) for k, mask in enumerate(masks)]
    return split(build, values[:-1], values[-1])


def _store_row(build: Builder, d: Design, columns: Sequence[Reg], half: Reg, channel: Index, i: int) -> None:
    dst = build.offset(half, build.mul(channel, d.points * d.lanes), F32)
    for j, value in enumerate(DATA[d.m](build, columns)):
        build.store(value, build.offset(dst, (j * d.alpha + i) * d.lanes, F32))


def _store_v(build: Builder, d: Design, count: Index, half: Reg, v: Reg) -> None:
    """The columns of some channels, transformed, into V."""
    with build.loop(0, count, name="c") as ch:
        src = build.offset(half, build.mul(ch, d.points * d.lanes), F32)
        dst = build.offset(v, build.mul(ch, d.row), F32)
        for j in range(d.alpha):
            rows = [build.offset(src, (j * d.alpha + i) * d.lanes, F32) for i in range(d.alpha)]
            done = DATA[d.m](build, [build.load(row, F32, d.lanes) for row in rows])
            for i, value in enumerate(done):
                build.store(value, build.offset(dst, (i * d.alpha + j) * d.v_step, F32))


# ---- output ----


def _emit_output(build: Builder, kernel: Kernel, d: Design) -> Function:
    """K.output(env, bufs, block, f0, f1, m, line): outputs of features f0 .. f1 of a block."""
    c = d.c
    with build.function("output", VOID, [PTR, PTR, I64, I64, I64, PTR, PTR]) as fn:
        fn.linkage = "internal"
        env_ptr, bufs, block, f0, f1, products, line = fn.args
        env = open_kernel(build, kernel, env_ptr, bufs)
        s = _split(build, env, d)
        with build.loop(f0, f1, name="f") as f, _segments(build, s, block) as seg:
            at = build.add(build.mul(build.sub(f, f0), d.row), seg.at)
            src = build.offset(products, at, F32)
            with build.loop(0, build.sub(seg.last, seg.first), d.lanes, name="tile") as tile:
                _back(build, d, build.offset(src, tile, F32), build.offset(line, build.mul(tile, d.m), F32))
            named = ((c.n, seg.n), (c.f, f))
            place = env.at({a: build.i64(v) for a, v in named if a is not None})
            _finish(build, place, d, s, seg, line)
    return fn


def _back(build: Builder, d: Design, src: Reg, line: Reg) -> None:
    """The products of `lanes` tiles to m lines of pixels."""
    products = [
        [build.load(build.offset(src, (i * d.alpha + j) * d.m_step, F32), F32, d.lanes) for j in range(d.alpha)]
        for i in range(d.alpha)
    ]
    for i, columns in enumerate(both_ways(build, RESULT[d.m], products)):
        for k, pixels in enumerate(merge(build, columns)):
            build.store(pixels, build.offset(line, i * d.line + k * d.lanes, F32))


def _finish(build: Builder, env: Env, d: Design, s: _Split, seg: _Segment, line: Reg) -> None:
    """Epilogue and stores of the lines of pixels of a segment."""
    y0, x0 = build.mul(seg.y, d.m), build.mul(seg.first, d.m)
    x1 = build.imin(build.mul(seg.last, d.m), s.wide)
    count = build.sub(x1, x0)
    whole = build.mul(build.udiv(count, d.lanes), d.lanes)
    rest = build.sub(count, whole)
    with build.loop(0, build.imin(build.sub(s.high, y0), d.m), name="y") as y:
        here = env.at({d.c.y: build.i64(build.add(y0, y))})
        src = build.offset(line, build.mul(y, d.line), F32)
        with build.loop(0, whole, d.lanes, name="x") as x:
            _vector(build, here, d, build.add(x0, x), build.offset(src, x, F32), None)
        with build.if_then(_holds(build, "<", 0, rest)):
            mask = build.tail_mask(rest, d.lanes)
            _vector(build, here, d, build.add(x0, whole), build.offset(src, whole, F32), mask)


def _vector(build: Builder, env: Env, d: Design, x: Index, src: Reg, mask: Reg | None) -> None:
    c = d.c
    here = env.at({c.x: build.i64(x)}).vector(c.x, d.lanes, mask)
    here = here.at(bound={acc(DType.F32): build.load(src, F32, d.lanes)})
    if c.result is not None:
        here = here.at(bound={c.result: build.widen(emit_expr(build, here, c.finish), d.lanes)})
    for store in c.stores:
        emit_store(build, here, store.target, store.index, store.value)


# ---- products ----


def _emit_tiles(build: Builder, d: Design) -> list[Function]:
    """K.column.<nv>(u, v, m, panels) for 1 .. nv vectors of tiles: all panels times one column of V."""
    home = Tile(d.mr, d.row // d.lanes, d.lanes, DType.F32)  # rows of products are `row` apart
    strides = Strides(1, d.mr, d.row)
    single = d.depth == d.c.channels
    out = []
    for nv in range(1, d.nv + 1):
        tile = None if single else micro_kernel(build, home, d.mr, nv, strides)
        with build.function(f"column.{nv}", VOID, [PTR, PTR, PTR, I64]) as fn:
            fn.linkage = "internal"
            u, v, m, panels = fn.args
            if tile is not None:
                _deep_column(build, d, tile, u, v, m, panels)
            else:
                with build.loop(0, panels, name="i") as i:
                    a = build.offset(u, build.mul(i, d.c.channels * d.mr), F32)
                    x = Operands(a, 1, d.mr, v, d.row)
                    sums = accumulate(build, home, (d.mr, nv), strides, x, d.c.channels)
                    row = build.offset(m, build.mul(i, d.mr * d.row), F32)
                    for k, total in enumerate(sums):
                        build.store(total, build.offset(row, k // nv * d.row + k % nv * d.lanes, F32))
        out.append(fn)
    return out


def _deep_column(build: Builder, d: Design, tile: Function, u: Reg, v: Reg, m: Reg, panels: Index) -> None:
    """Many channels: in blocks whose part of V stays in the first level of cache."""
    channels = d.c.channels
    with build.loop(0, channels, d.depth, name="k") as k:
        count = build.imin(build.sub(channels, k), d.depth)
        first = _holds(build, "==", k, 0)
        b = build.offset(v, build.mul(k, d.row), F32)
        with build.loop(0, panels, name="i") as i:
            row = build.add(build.mul(k, panels), build.mul(i, count))
            a = build.offset(u, build.mul(row, d.mr), F32)
            fixed = [build.i64(1), build.i64(d.mr), b, build.i64(d.row), build.i64(count)]
            home = build.offset(m, build.mul(i, d.mr * d.row), F32)
            build.ir.call(tile, [a, *fixed, home, first])


def _products(
    build: Builder, d: Design, tiles: Sequence[Function], count: Index, panels: Index, u: Reg, v: Reg, m: Reg
) -> None:
    """M[xi] = U[xi] V[xi] for the panels of a group of features and `count` tiles."""
    vectors = build.ceildiv(count, d.lanes)
    with build.loop(0, d.points, name="xi") as xi:
        us = build.offset(u, build.mul(build.mul(xi, panels), d.c.channels * d.mr), F32)
        vs, ms = build.offset(v, build.mul(xi, d.v_step), F32), build.offset(m, build.mul(xi, d.m_step), F32)
        with build.carry(0, build.ceildiv(vectors, d.nv), 1, [build.i64(0)], name="j") as it:
            (done,) = it.values
            left = build.sub(vectors, done)
            # Four vectors are two and two: one alone would keep too few sums under way.
            four = _holds(build, "==", left, d.nv + 1)
            width = build.ir.select(four, build.i64(d.nv - 1), build.i64(build.imin(left, d.nv)))
            at = build.mul(done, d.lanes)
            for nv, tile in enumerate(tiles, 1):
                with build.if_then(_holds(build, "==", width, nv)):
                    build.ir.call(tile, [us, build.offset(vs, at, F32), build.offset(ms, at, F32), build.i64(panels)])
            it.next = [build.i64(build.add(done, width))]


# ---- tasks ----


def _emit_share(build: Builder, kernel: Kernel, d: Design, reader: Function) -> None:
    """Phase 0: V of blocks that several units use."""
    with build.function("run.0", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, _, scratch, task = fn.args
        s = _split(build, open_kernel(build, kernel, env_ptr, None), d)
        block, slab = build.udiv(task, _slabs(d)), build.umod(task, _slabs(d))
        c0, c1 = (build.udiv(build.mul(build.add(slab, k), d.c.channels), _slabs(d)) for k in range(2))
        v = _shared_v(build, d, s, scratch, block)
        build.ir.call(reader, [env_ptr, bufs, *(build.i64(x) for x in (block, c0, c1)), v])


def _emit_run(
    build: Builder, kernel: Kernel, d: Design, tiles: Sequence[Function], reader: Function, writer: Function
) -> None:
    with build.function("run.1", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env_ptr, bufs, packed, scratch, task = fn.args
        s = _split(build, open_kernel(build, kernel, env_ptr, None), d)
        mine = build.offset(scratch, build.mul(task, _slice(build, d, s)), F32)
        line = build.offset(mine, d.m_size, F32)
        first = build.udiv(build.mul(task, s.units), s.tasks)
        last = build.udiv(build.mul(build.add(task, 1), s.units), s.tasks)
        own = _holds(build, "==", s.shared, 0)
        with build.loop(first, last, name="unit") as unit:
            block, part = build.udiv(unit, s.parts), build.umod(unit, s.parts)
            private = build.offset(mine, d.own_size, F32)
            v = build.ir.select(own, private, _shared_v(build, d, s, scratch, block))
            with build.if_then(own):
                args = [build.i64(x) for x in (block, 0, d.c.channels)]
                build.ir.call(reader, [env_ptr, bufs, *args, v])
            p0 = build.mul(part, s.part)
            p1 = build.imin(build.add(p0, s.part), d.panels)
            with build.loop(p0, p1, d.group_panels, name="group") as g0:
                panels = build.imin(build.sub(p1, g0), d.group_panels)
                u = build.offset(packed, build.mul(g0, d.points * d.c.channels * d.mr), F32)
                _products(build, d, tiles, _count(build, s, block), panels, u, v, mine)
                f0 = build.mul(g0, d.mr)
                f1 = build.imin(build.add(f0, build.mul(panels, d.mr)), d.c.features)
                build.ir.call(writer, [env_ptr, bufs, *(build.i64(x) for x in (block, f0, f1)), mine, line])
