"""The one generator of GEMM micro-kernels: a tile of accumulators held in vector registers over a K loop.

    for k in range(kc):  acc[i][j] += splat(a[i*row + k*step]) * b[k*stride + j*lanes ...]

An `mr` x `nv` tile needs mr*nv + nv + 1 registers. The tile shape comes from the target's register count and
vector width; no instruction set is named here. The function made by `micro_kernel` is

    void K.tile.<mr>x<nv>(ptr a, i64 a_row, i64 a_step, ptr b, i64 b_stride, i64 kc, ptr c, i1 first)

with strides in elements; `c` is a contiguous tile of rows of NR elements (the accumulators' home between blocks of K):
read unless `first`, always written. Strides known at compile time are baked into the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.codegen.build import I1, I64, PTR, VOID, Builder, Function, Index, Reg, reg_type, vec
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target

MANY = 1 << 20
CHAINS = 8  # multiply-adds in flight that keep the units busy


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the register tile: `mr` rows of `nv` vectors of `lanes` elements."""

    mr: int
    nv: int
    lanes: int
    dtype: DType

    @property
    def nr(self) -> int:
        return self.nv * self.lanes

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
    """The tile that fills the vector registers: 6x2 with 16 registers, 14x2 with 32.

    A product of few rows, known beforehand, is bound by reading b: wider tiles read longer runs of it.
    """
    lanes = target.lanes(dtype.bytes)
    nv = 2 if lanes > 1 else 1
    mr = max(1, min(14, (target.vector_regs - nv - 1) // nv // 2 * 2))
    if isinstance(rows, int) and 0 < rows <= 4 and lanes > 1:
        mr, nv = rows, min(8, 8 if rows == 1 else (target.vector_regs - 1) // (rows + 1))
    if isinstance(cols, int):
        nv = max(1, min(nv, -(-cols // lanes)))
    return Tile(mr, nv, lanes, dtype)


def micro_kernel(build: Builder, tile: Tile, mr: int, nv: int, strides: Strides, unroll: int = 4) -> Function:
    """Define the micro-kernel for `mr` rows and `nv` vectors; rows of `c` are `tile.nr` apart."""
    args = (PTR, I64, I64, PTR, I64, I64, PTR, I1)
    with build.function(f"tile.{mr}x{nv}", VOID, args) as fn:
        fn.linkage = "internal"
        a, a_row_arg, a_step_arg, b, b_stride_arg, kc, c, first = fn.args
        a_row: Index = a_row_arg if strides.a_row is None else strides.a_row
        a_step: Index = a_step_arg if strides.a_step is None else strides.a_step
        b_stride: Index = b_stride_arg if strides.b_stride is None else strides.b_stride
        typ = reg_type(tile.dtype)
        wide = vec(typ, tile.lanes)
        zero = build.const(wide, 0)
        homes = [build.offset(c, i * tile.nr + j * tile.lanes, typ) for i in range(mr) for j in range(nv)]
        start = _load_or_zero(build, homes, first, zero, tile)

        def step(k: Index, acc: list[Reg]) -> list[Reg]:
            row = build.offset(b, build.mul(k, b_stride), typ)
            bs = [build.load(build.offset(row, j * tile.lanes, typ), typ, tile.lanes) for j in range(nv)]
            column = build.offset(a, build.mul(k, a_step), typ)
            out = []
            for i in range(mr):
                x = build.load(build.offset(column, build.mul(i, a_row), typ), typ)
                xs = build.splat(x, tile.lanes)
                out += [_multiply_add(build, tile.dtype, xs, bs[j], acc[i * nv + j]) for j in range(nv)]
            return out

        sets = _sets(mr * nv, unroll)
        spare = [zero] * (len(start) * (sets - 1))
        whole = build.mul(build.udiv(kc, unroll), unroll)
        with build.carry(0, whole, unroll, [*start, *spare], "k") as it:
            acc = [it.values[s : s + len(start)] for s in range(0, len(it.values), len(start))]
            for u in range(unroll):
                acc[u % sets] = step(build.add(it.index, u), acc[u % sets])
            it.next = [v for part in acc for v in part]
        parts = [it.results[s : s + len(start)] for s in range(0, len(it.results), len(start))]
        with build.carry(whole, kc, 1, parts[0], "k1") as rest:
            rest.next = step(rest.index, rest.values)
        for k, home in enumerate(homes):
            build.store(_total(build, tile.dtype, [rest.results[k], *(p[k] for p in parts[1:])]), home)
    return fn


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


def _multiply_add(build: Builder, dtype: DType, a: Reg, b: Reg, c: Reg) -> Reg:
    if dtype.is_float:
        return build.fma(a, b, c)
    return build.ir.add(build.ir.mul(a, b), c)


def _load_or_zero(build: Builder, homes: list[Reg], first: Reg, zero: Reg, tile: Tile) -> list[Reg]:
    """The accumulators of the previous block of K, or zero in the first block."""
    b = build.ir
    before = b.block
    resume, go = b.append_basic_block("resume"), b.append_basic_block("go")
    b.cbranch(first, go, resume)
    b.position_at_end(resume)
    kept = [build.load(h, reg_type(tile.dtype), tile.lanes) for h in homes]
    b.branch(go)
    b.position_at_end(go)
    out = []
    for value in kept:
        phi = b.phi(value.type)
        phi.add_incoming(zero, before)
        phi.add_incoming(value, resume)
        out.append(phi)
    return out
