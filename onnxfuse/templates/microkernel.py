"""The one generator of GEMM micro-kernels: a tile of accumulators held in vector registers over a K loop.

    for k in range(kc):  acc[i][j] += splat(a[i*row + k*step]) * b[k*stride + j*lanes ...]

An `mr` x `nv` tile needs mr*nv + nv + 1 registers. The tile shape comes from the target's register count and
vector width; no instruction set is named here. The function made by `micro_kernel` is

    void K.tile.<mr>x<nv>(ptr a, i64 a_row, i64 a_step, ptr b, i64 b_stride, i64 kc, ptr c, i1 first)

with strides in elements; `c` is a contiguous tile of rows of NR elements (the sums' home between blocks of K): added to
the block's own sums unless `first`, always written. Each block sums from zero, so that rounding grows with the length
of a block and the number of blocks, not with K. Strides known at compile time are baked into the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from onnxfuse.codegen.build import I1, I8, I16, I64, PTR, VOID, Builder, Function, Index, Reg, Type, reg_type, vec
from onnxfuse.codegen.prims import half_to_float
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target

MANY = 1 << 20
LINE = 64  # bytes of a cache line
UNROLL = 4  # steps of k in a turn of the loop
SPLIT = 3  # as many times the turns that fetch are worth a loop of their own: its end is mispredicted
CHAINS = 8  # multiply-adds in flight that keep the units busy
WORTH = 0.95  # share of the time from which another tile than the usual one is taken


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the register tile: `mr` rows of `nv` vectors of `lanes` elements.

    pairs: an element of an operand is two 16-bit integers, whose products are added into one 32-bit sum.
    half: b lies in memory as bf16 and is widened by the loads.
    """

    mr: int
    nv: int
    lanes: int
    dtype: DType
    pairs: bool = False
    half: bool = False

    @property
    def b_typ(self) -> Type:
        """What an element of b is in memory."""
        return I16 if self.half else reg_type(self.dtype)

    @property
    def nr(self) -> int:
        return self.nv * self.lanes

    @property
    def line_ends(self) -> list[int]:
        """The last element of every cache line that a row may touch whose first line is there already."""
        return list(range(self.nr - 1, -1, -(LINE // self.dtype.bytes)))

    @property
    def rows(self) -> tuple[int, ...]:
        """Row counts that have a micro-kernel: the full tile, then those that make up any remainder."""
        return (self.mr, *(r for r in (8, 4, 2, 1) if r < self.mr))


@dataclass(frozen=True, slots=True)
class Strides:
    """Strides of the operands in elements; None = known at run time only."""

    a_row: int | None
    a_step: int | None
    b_stride: int | None


def tile_for(target: Target, dtype: DType, rows: Dim = MANY, cols: Dim = MANY) -> Tile:
    """The tile that keeps most multiply-adds under way: 6x2 with 16 registers, 8x3 or what fits better with 32.

    A product of few rows, known beforehand, is bound by reading b: wider tiles read longer runs of it.
    """
    lanes = target.lanes(dtype.bytes)
    if isinstance(rows, int) and 0 < rows <= 4 and lanes > 1:
        most = (target.vector_regs - 1) // (rows + 1)
        return _within(Tile(rows, min(8, 8 if rows == 1 else most), lanes, dtype), cols)
    shapes = [_within(Tile(mr, nv, lanes, dtype), cols) for mr, nv in _shapes(target.vector_regs, lanes, cols)]
    if len(shapes) == 1 or not (isinstance(rows, int) and isinstance(cols, int) and rows > 0 and cols > 0):
        return shapes[0]
    best = min(shapes, key=lambda t: tile_cost(t, rows, cols))
    return best if tile_cost(best, rows, cols) < WORTH * tile_cost(shapes[0], rows, cols) else shapes[0]


def _shapes(registers: int, lanes: int, cols: Dim) -> list[tuple[int, int]]:
    """(mr, nv) of the tiles that leave LLVM's scheduler registers to load early into, the best for any size first.

    A tile that takes all 32 registers has sums spilled in every step: 14x2 ran at 0.7 of the speed of 8x3.
    """
    if lanes == 1:
        return [(max(1, min(14, registers - 2) // 2 * 2), 1)]
    if registers < 32:
        return [(6, 2)]
    return [(16, 1)] if isinstance(cols, int) and cols <= lanes else [(8, 3), (12, 2), (6, 4)]


def _within(tile: Tile, cols: Dim) -> Tile:
    """No wider than `cols`."""
    return replace(tile, nv=max(1, min(tile.nv, -(-cols // tile.lanes)))) if isinstance(cols, int) else tile


def tile_cost(tile: Tile, rows: int, cols: int) -> float:
    """Cycles per step of k over rows x cols elements, two multiply-adds and two loads starting in each."""
    full, rest = divmod(rows, tile.mr)
    heights = [tile.mr] * full + [r for r in tile.rows if r != tile.mr and rest & r]
    whole, tail = divmod(cols, tile.nr)
    vectors = -(-tail // tile.lanes)

    def step(mr: int, nv: int) -> float:
        return max(mr * nv / 2, (mr + nv) / 2, CHAINS / 2)

    narrow = 0.0 if not tail else 1.0
    return sum(whole * step(r, tile.nv) + narrow * step(r, vectors) for r in heights)


def micro_kernel(
    build: Builder, tile: Tile, mr: int, nv: int, strides: Strides, unroll: int = UNROLL, ahead: int = 0,
    next_a: int | None = None,
) -> Function:  # fmt: skip
    """Define the micro-kernel for `mr` rows and `nv` vectors; rows of `c` are `tile.nr` apart.

    ahead, next_a: see Operands.
    """
    args = (PTR, I64, I64, PTR, I64, I64, PTR, I1)
    with build.function(f"tile.{mr}x{nv}", VOID, args) as fn:
        fn.linkage = "internal"
        fn.attributes.add("noinline")  # inlined, the resting tile would be kept in registers around loops over tiles
        a, a_row, a_step, b, b_stride, kc, c, first = fn.args
        homes = tile_homes(build, tile, c, mr, nv)
        x = Operands(a, a_row, a_step, b, b_stride, ahead, next_a)
        sums = accumulate(build, tile, (mr, nv), strides, x, kc, unroll)
        for total, home in zip(with_kept(build, sums, homes, first, tile), homes, strict=True):
            build.store(total, home)
    return fn


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Lines to ask for in the first `turns` of the loop over k: `share` does it for the turn of a number."""

    turns: Index
    share: Callable[[Index], None]


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """What a tile is computed from; strides in elements.

    ahead, next_a: distances in elements at which rows of b, and packed panels of a, are prefetched (0, None: not).
    later: where packed constants lie that are wanted long after this tile, and bytes of them to fetch in every step.
    read: gives the vectors of b at a step of k, in place of loads.
    fetch: what else is asked for meanwhile.
    """

    a: Reg
    a_row: Index
    a_step: Index
    b: Reg
    b_stride: Index
    ahead: int = 0
    next_a: Index | None = None
    later: tuple[Reg, Index] | None = None
    read: Callable[[Index], list[Reg]] | None = None
    fetch: Fetch | None = None


def accumulate(
    build: Builder,
    tile: Tile,
    shape: tuple[int, int],
    strides: Strides,
    x: Operands,
    kc: Index,
    unroll: int = UNROLL,
) -> list[Reg]:
    """The loop over k: the tile's vectors row by row, in registers. Strides that `strides` knows are baked in."""
    mr, nv = shape
    typ = reg_type(tile.dtype)
    zero = build.const(vec(typ, tile.lanes), 0)
    a_row = x.a_row if strides.a_row is None else strides.a_row
    a_step = x.a_step if strides.a_step is None else strides.a_step
    b_stride = x.b_stride if strides.b_stride is None else strides.b_stride

    def step(k: Index, acc: list[Reg]) -> list[Reg]:
        row = build.offset(x.b, build.mul(k, b_stride), tile.b_typ)
        if x.read is not None:
            bs = x.read(k)
        else:
            bs = [_load_b(build, tile, build.offset(row, j * tile.lanes, tile.b_typ)) for j in range(nv)]
        if x.ahead:
            build.prefetch(build.offset(row, x.ahead, tile.b_typ))
        column = build.offset(x.a, build.mul(k, a_step), typ)
        out = []
        for i in range(mr):
            xs = build.splat(build.load(build.offset(column, build.mul(i, a_row), typ), typ), tile.lanes)
            out += [_multiply_add(build, tile, xs, bs[j], acc[i * nv + j]) for j in range(nv)]
        return out

    sets = _sets(mr * nv, unroll)
    whole = build.mul(build.udiv(kc, unroll), unroll)
    totals = [zero] * (mr * nv * sets)
    for start, stop, fetch in _parts(build, x.fetch, whole, unroll):
        with build.carry(start, stop, unroll, totals, "k") as it:
            acc = [it.values[s : s + mr * nv] for s in range(0, len(it.values), mr * nv)]
            for u in range(unroll):
                acc[u % sets] = step(build.add(it.index, u), acc[u % sets])
            if x.next_a is not None:
                group = build.offset(x.a, build.add(x.next_a, build.mul(it.index, a_step)), typ)
                for line in range(0, unroll * mr, LINE // tile.dtype.bytes):
                    build.prefetch(build.offset(group, line, typ))
            if x.later is not None:
                place, pace = x.later
                far = pace * unroll if isinstance(pace, int) else LINE
                for line in range(0, far, LINE):
                    build.prefetch(build.offset(place, build.add(build.mul(it.index, pace), line), I8), locality=2)
            if fetch is not None:
                fetch(build.udiv(it.index, unroll))
            it.next = [v for part in acc for v in part]
        totals = it.results
    parts = [totals[s : s + mr * nv] for s in range(0, len(totals), mr * nv)]
    if isinstance(kc, int) and kc % unroll == 0:
        last = parts[0]
    else:
        with build.carry(whole, kc, 1, parts[0], "k1") as rest:
            rest.next = step(rest.index, rest.values)
        last = rest.results
    return [_total(build, tile.dtype, [v, *(p[k] for p in parts[1:])]) for k, v in enumerate(last)]


def _parts(
    build: Builder, fetch: Fetch | None, whole: Index, unroll: int
) -> list[tuple[Index, Index, Callable[[Index], None] | None]]:
    """The turns that fetch, then the others, whose loop is free of it: (first k, end, share of a turn)."""
    if fetch is None:
        return [(0, whole, None)]
    end = build.imin(build.mul(fetch.turns, unroll), whole)
    if isinstance(end, int) and isinstance(whole, int) and whole <= SPLIT * end:
        return [(0, whole, fetch.share)]
    return [(0, end, fetch.share), (end, whole, None)]


def thin_kernel(build: Builder, tile: Tile, mr: int, cols: int, strides: Strides) -> Function:
    """A micro-kernel of the same interface for very few columns: the rows of packed panels of a lie in the lanes."""
    assert strides.a_row == 1
    args = (PTR, I64, I64, PTR, I64, I64, PTR, I1)
    with build.function(f"thin.{mr}x{cols}", VOID, args) as fn:
        fn.linkage = "internal"
        fn.attributes.add("noinline")  # inlined, the resting tile would be kept in registers around loops over tiles
        a, _, a_step_arg, b, b_step_arg, kc, c, first = fn.args
        typ, lanes = reg_type(tile.dtype), tile.lanes
        a_step = a_step_arg if strides.a_step is None else strides.a_step
        b_step = b_step_arg if strides.b_stride is None else strides.b_stride
        parts = -(-mr // lanes)
        zero = build.const(vec(typ, lanes), 0)

        def step(k: Index, acc: list[Reg]) -> list[Reg]:
            column = build.offset(a, build.mul(k, a_step), typ)
            xs = [build.load(build.offset(column, p * lanes, typ), typ, lanes) for p in range(parts)]
            row = build.offset(b, build.mul(k, b_step), typ)
            ys = [build.splat(build.load(build.offset(row, j, typ), typ), lanes) for j in range(cols)]
            terms = [(x, y) for x in xs for y in ys]
            return [build.fma(x, y, t) for (x, y), t in zip(terms, acc, strict=True)]

        n = parts * cols
        sets = _sets(n, CHAINS)
        whole = build.mul(build.udiv(kc, sets), sets)
        with build.carry(0, whole, sets, [zero] * (n * sets), "k") as it:
            it.next = [v for u in range(sets) for v in step(build.add(it.index, u), it.values[u * n : u * n + n])]
        with build.carry(whole, kc, 1, it.results[:n], "k1") as rest:
            rest.next = step(rest.index, rest.values)
        sums = [
            _total(build, tile.dtype, [rest.results[q], *(it.results[u * n + q] for u in range(1, sets))])
            for q in range(n)
        ]
        with build.if_then(first):  # the epilogue takes whole vectors
            for i in range(mr):
                build.store(zero, build.offset(c, i * tile.nr, typ))
        for i in range(mr):
            for j in range(cols):
                home = build.offset(c, i * tile.nr + j, typ)
                value = build.lane(sums[i // lanes * cols + j], i % lanes)
                before = build.ir.select(first, build.const(typ, 0), build.load(home, typ))
                build.store(build.ir.fadd(value, before), home)
    return fn


def dot_kernel(build: Builder, tile: Tile) -> Function:
    """A micro-kernel for few rows and a transposed b: k has unit stride in both operands.

    `b_stride` is the distance of columns. Lanes run along k, the lanes of a sum are added at the end. One argument
    more than the others: how many columns there are. What is past them is the last of them once more.
    """
    args = (PTR, I64, I64, PTR, I64, I64, PTR, I1, I64)
    with build.function(f"dot.{tile.mr}x{tile.nr}", VOID, args) as fn:
        fn.linkage = "internal"
        a, a_row, _, b, b_stride, kc, c, first, cols = fn.args
        typ, lanes = reg_type(tile.dtype), tile.lanes
        zero = build.const(vec(typ, lanes), 0)
        a_rows = [build.offset(a, build.mul(i, a_row), typ) for i in range(tile.mr)]
        last = build.sub(cols, 1)
        columns = [build.offset(b, build.mul(build.imin(j, last), b_stride), typ) for j in range(tile.nr)]
        group = max(1, CHAINS // tile.mr)  # columns at a time
        sums: dict[tuple[int, int], Reg] = {}

        def step(places: list[tuple[int, int]], k: Index, acc: list[Reg], mask: Reg | None) -> list[Reg]:
            def get(line: Reg) -> Reg:
                at = build.offset(line, k, typ)
                return build.load(at, typ, lanes) if mask is None else build.masked_load(at, typ, mask)

            xs = {i: get(a_rows[i]) for i in dict.fromkeys(i for i, _ in places)}
            ys = {j: get(columns[j]) for j in dict.fromkeys(j for _, j in places)}
            pairs = [(xs[i], ys[j]) for i, j in places]
            return [_multiply_add(build, tile, x, y, t) for (x, y), t in zip(pairs, acc, strict=True)]

        whole = build.mul(build.udiv(kc, lanes), lanes)
        rest = build.i64(build.sub(kc, whole))
        for j0 in range(0, tile.nr, group):
            places = [(i, j) for i in range(tile.mr) for j in range(j0, min(j0 + group, tile.nr))]
            with build.carry(0, whole, lanes, [zero] * len(places), "k") as it:
                it.next = step(places, it.index, it.values, None)
            before = build.ir.block
            with build.if_then(build.ir.icmp_signed(">", rest, build.i64(0))):
                tail = step(places, whole, it.results, build.tail_mask(rest, lanes))
                inside = build.ir.block
            for place, short, long in zip(places, it.results, tail, strict=True):
                phi = build.ir.phi(zero.type)
                phi.add_incoming(short, before)
                phi.add_incoming(long, inside)
                sums[place] = phi
        for i in range(tile.mr):
            home = build.offset(c, i * tile.nr, typ)
            total = _total(build, tile.dtype, build.transpose([sums[i, j] for j in range(tile.nr)]))
            kept = build.select(build.splat(first, lanes), zero, build.load(home, typ, lanes))
            add = build.ir.fadd if tile.dtype.is_float else build.ir.add
            build.store(add(total, kept), home)
    return fn


def _load_b(build: Builder, tile: Tile, at: Reg) -> Reg:
    value = build.load(at, tile.b_typ, tile.lanes)
    return half_to_float(build, value, DType.BF16) if tile.half else value


def _sets(chains: int, unroll: int) -> int:
    """Independent sums per accumulator: a multiply-add takes 4 cycles and two start in each, so 8 must be under way."""
    sets = 1
    while sets * chains < CHAINS and sets < unroll:
        sets *= 2
    return sets


def _total(build: Builder, dtype: DType, parts: list[Reg]) -> Reg:
    """Sum of the sets, pairwise."""
    add = build.ir.fadd if dtype.is_float else build.ir.add
    while len(parts) > 1:
        parts = [add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _multiply_add(build: Builder, tile: Tile, a: Reg, b: Reg, c: Reg) -> Reg:
    if tile.dtype.is_float:
        return build.fma(a, b, c)
    if tile.pairs:
        return build.ir.add(build.pair_products(a, b), c)
    return build.ir.add(build.ir.mul(a, b), c)


def tile_homes(build: Builder, tile: Tile, at: Reg, mr: int = 0, nv: int = 0) -> list[Reg]:
    """Where the vectors of a tile rest between blocks of K."""
    typ, rows, cols = reg_type(tile.dtype), mr or tile.mr, nv or tile.nv
    return [build.offset(at, i * tile.nr + j * tile.lanes, typ) for i in range(rows) for j in range(cols)]


def with_kept(build: Builder, sums: list[Reg], homes: list[Reg], first: Reg, tile: Tile) -> list[Reg]:
    """The sums of this block of K and those of the blocks before, of which there are none at the first."""
    b = build.ir
    add = b.fadd if tile.dtype.is_float else b.add
    before = b.block
    resume, go = b.append_basic_block("resume"), b.append_basic_block("go")
    b.cbranch(first, go, resume)
    b.position_at_end(resume)
    joined = [add(s, build.load(h, reg_type(tile.dtype), tile.lanes)) for s, h in zip(sums, homes, strict=True)]
    b.branch(go)
    b.position_at_end(go)
    out = []
    for alone, total in zip(sums, joined, strict=True):
        phi = b.phi(total.type)
        phi.add_incoming(alone, before)
        phi.add_incoming(total, resume)
        out.append(phi)
    return out
