"""What is decided about a Winograd convolution before any code is emitted: tiles, blocks, what a schedule costs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from onnxfuse.target import Target
from onnxfuse.templates.estimate import epilogue_cost, expected, pointwise_seconds
from onnxfuse.templates.winograd_form import Conv
from onnxfuse.templates.winograd_transform import Side

MAX_TASKS = 8  # every task has a slice of scratch of its own: more of them would not fit into the caches
TASK_WORK = 1 << 20  # products worth a task: about 25 us
SPREAD = 4  # units wanted before features are split for the sake of parallelism
PART = 32  # features a unit should have at least
FEW, MANY = 96, 256  # numbers of channels at which the best size of a block changes: measured
DEPTH = 256  # channels per call of the micro-kernel
LINE = 2  # how much larger blocks of tiles are that slide in one direction only
CHANNELS = 4  # channels whose tiles are transformed together
CALL_DEPTH = 8  # products that a call of the micro-kernel costs for each of its accumulators: measured
STEP_SECONDS = 1.8e-9  # one step of a full column of products through a panel: measured, 4 x 3
NARROW = 0.5, 0.7  # what columns of one and of two vectors cost of a full one
WEIGHT_SECONDS = 5e-11  # per byte of the stream of weights, as far as the products do not hide it
NEAR = 320 << 10  # bytes of V that stay near a core
NEAR_SECONDS, FAR_SECONDS = 5e-12, 2.5e-11  # per byte, there and back
EVENED = 0.96  # share of the time from which groups of another size are worth it
TASK_SECONDS = 3e-6  # handing a task to a thread
VECTOR_SECONDS = 2.8e-9  # one vector of one point through a transform: measured, 8 lanes


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """Everything decided before emission. Sizes in elements.

    down       outputs and taps of a tile down
    across     the same along a line
    mr, nv     micro-kernel: features times vectors of tiles
    block      tiles of a block, at most
    group      features whose products are kept at a time
    lanes      tiles of a vector in the transforms: of one line of tiles
    wide       tiles of a vector in the products
    cores      to keep busy
    """

    c: Conv
    lanes: int
    wide: int
    down: Side
    across: Side
    mr: int
    nv: int
    block: int
    group: int
    cores: int = 8

    @property
    def points(self) -> int:
        return self.down.points * self.across.points

    @property
    def panels(self) -> int:
        """Panels of mr features."""
        return -(-self.c.features // self.mr)

    @property
    def row(self) -> int:
        """Row length of V and M: an odd number of cache lines, with room for the overrun of a vector."""
        lines = -(-(self.block + self.wide) // 16)
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
        return self.across.m * (self.block + self.lanes)

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
        return -(-(self.m_size + self.down.m * self.line) // 16) * 16


def sizes(c: Conv) -> list[tuple[Side, Side]]:
    """Tiles worth trying, larger ones first: 8 points along a line at most, 36 in a square."""
    one = Side(1, 1)
    down, across = c.taps
    if min(c.taps) > 1:
        ms = (4, 2) if down == 3 else (2,)
        return [(Side(m, down), Side(m, across)) for m in ms]
    return [(one if down == 1 else Side(m, down), one if across == 1 else Side(m, across)) for m in (4, 2)]


def design(c: Conv, sides: tuple[Side, Side], target: Target) -> Design:
    """Sizes for this machine; measured, the optimum is flat."""
    wide = target.lanes(4)
    mr, nv = (8, 3) if target.vector_regs >= 32 else (4, 3)
    # V is to stay in the second level of cache; many channels do not fit there, then fewer passes over U count.
    middle = FEW < c.channels <= MANY
    block = (96 if middle else 48) if wide > 8 else (72 if middle else 40)
    if 1 in c.taps:  # few points
        block *= LINE
    group = 64 if c.channels >= MANY else 32
    # Few features are still to make a part for each of two cores.
    group = max(mr, min(group, -(-c.features // 2 // mr) * mr)) if target.cores > 1 else group
    width, m = c.x.extent, sides[1].m
    lanes = target.lanes_along(4, -(-width // m) if isinstance(width, int) else width)  # tiles of one line
    return _evened(Design(c, lanes, wide, *sides, mr, nv, block, group, target.cores))


def _evened(d: Design) -> Design:
    """Parts of the features are whole groups: as many of about this size as share out best among the cores."""
    high, wide, images = (1 if a is None else a.extent for a in (d.c.y, d.c.x, d.c.n))
    if d.cores == 1 or not (isinstance(high, int) and isinstance(wide, int) and isinstance(images, int)):
        return d
    across = -(-wide // d.across.m)
    tiles = images * -(-high // d.down.m) * across
    if tiles == 0:
        return d
    count = -(-d.panels // d.group_panels)
    groups = {-(-d.panels // n) * d.mr for n in range(max(1, count - 1), count + 3)}
    near = sorted(n for n in groups if 2 * d.group <= 3 * n and 2 * n <= 3 * d.group)
    spans = [(_makespan(x, tiles, across, *cut(x, tiles, across)), x) for x in (replace(d, group=n) for n in near)]
    span, best = min(spans, key=lambda s: s[0])
    return best if span < EVENED * _makespan(d, tiles, across, *cut(d, tiles, across)) else d


def cost(d: Design, target: Target) -> float:
    """Seconds on one core: products at 80 % of peak, transforms, the stream of weights, and the epilogue.

    A single vector of tiles keeps too few sums under way. Half of the stream of weights hides behind the products.
    """
    c = d.c
    images = 1.0 if c.n is None else expected(c.n.extent)
    high, wide = 1.0 if c.y is None else expected(c.y.extent), expected(c.x.extent)
    lines, across = images * -(-high // d.down.m), -(-wide // d.across.m)
    columns = -(-lines * across // d.wide) * d.wide
    depth = c.channels + CALL_DEPTH
    rate = target.peak * (0.8 if columns > d.wide else 0.4)
    products = 2 * d.points * d.panels * d.mr * depth * columns / rate
    vectors = lines * -(-across // d.lanes) * (c.channels + c.features) * d.points
    transforms = vectors * VECTOR_SECONDS
    outputs = images * c.features * high * wide
    epilogue = pointwise_seconds(outputs * epilogue_cost(c.finish, c.stores), target, 4)
    weights = 4 * d.points * c.features * c.channels / (2 * target.bw)
    traffic = 4 * (images * c.channels * high * wide + outputs) / (4 * target.bw)
    return max(products + transforms + weights + epilogue, traffic) + 2e-6


def cut(d: Design, tiles: int, across: int) -> tuple[int, int]:
    """Tiles of a block and panels of a part for a known number of tiles: those that are done first on all cores."""
    groups = -(-d.panels // d.group_panels)
    parts = sorted({-(-groups // n) * d.group_panels for n in range(1, groups + 1)}, reverse=True)
    blocks = range(min(d.block, -(-tiles // d.wide) * d.wide), 0, -d.wide)
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
    before = 0.0 if own else sum(read) / min(d.cores, len(spans) * slabs(d)) + TASK_SECONDS
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
    full, rest = divmod(-(-tiles // d.wide), d.nv)
    columns = full + (0.0, NARROW[0], NARROW[1])[min(rest, 2)]
    if rest == 1 and full:  # four are two and two
        columns += 2 * NARROW[1] - NARROW[0] - 1
    steps = columns * d.points * panels * (c.channels + CALL_DEPTH)
    weights = d.points * panels * d.mr * c.channels * 4 * WEIGHT_SECONDS
    return steps * STEP_SECONDS + weights + vectors * panels * d.mr * d.points * VECTOR_SECONDS


def slabs(d: Design) -> int:
    """Parts of the channels in phase 0: enough for some cores even where there is a single block."""
    return max(1, min(4, d.c.channels // (2 * CHANNELS)))
