"""How far the elements of an index tensor reach: the extents that a kernel compares before it reads by them."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from onnxfuse.codegen.build import I64, Builder, Index, vec
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.given import ALL

CHAINS = 4  # vectors read per step: their maxima do not wait for each other


def emit_reach(
    build: Builder, data: ir.Value, dtype: DType, shape: Sequence[ir.Value], column: int
) -> tuple[ir.Value, ir.Value]:
    """(reach, depth) of all indices, or of one column of index tuples; see `ir/given.py`."""
    typ = ir.IntType(8 * dtype.bytes)
    count: Index = 1
    for n in shape if column == ALL else shape[:-1]:
        count = build.mul(count, n)
    if column == ALL:
        low, high = _ends(build, data, typ, count)
    else:
        low, high = _ends_of_column(build, build.offset(data, column, typ), typ, count, shape[-1])
    b, zero, top = build.ir, build.i64(0), build.i64((1 << 63) - 1)
    if typ != I64:
        low, high = b.sext(low, I64), b.sext(high, I64)
    lowest = b.icmp_signed("==", low, build.i64(-(1 << 63)))  # has no opposite; no extent is as large anyway
    depth = b.select(lowest, top, build.intrinsic("smax", b.sub(zero, low), zero))
    reach = b.select(b.icmp_signed("==", high, top), top, b.add(high, build.i64(1)))
    return reach, depth


def _ends(build: Builder, data: ir.Value, typ: ir.Type, count: Index) -> tuple[ir.Value, ir.Value]:
    """The smallest and the largest of consecutive elements; at most 0 and at least -1."""
    lanes = max(1, build.target.vector_bits // typ.width)
    step = lanes * CHAINS
    whole = build.mul(build.udiv(count, step), step)
    wide = vec(typ, lanes)
    first = [*[build.const(wide, 0)] * CHAINS, *[build.const(wide, -1)] * CHAINS]
    with build.carry(0, whole, step, first) as it:
        read = [build.load(build.offset(data, build.add(it.index, k * lanes), typ), typ, lanes) for k in range(CHAINS)]
        lows, highs = it.values[:CHAINS], it.values[CHAINS:]
        it.next = [build.intrinsic("smin", a, x) for a, x in zip(lows, read, strict=True)]
        it.next += [build.intrinsic("smax", a, x) for a, x in zip(highs, read, strict=True)]
    low = _folded(build, "smin", it.results[:CHAINS])
    high = _folded(build, "smax", it.results[CHAINS:])
    with build.carry(whole, count, 1, (low, high)) as rest:
        x = build.load(build.offset(data, rest.index, typ), typ)
        rest.next = [build.intrinsic("smin", rest.values[0], x), build.intrinsic("smax", rest.values[1], x)]
    return rest.results[0], rest.results[1]


def _folded(build: Builder, name: str, parts: Sequence[ir.Value]) -> ir.Value:
    """One scalar of vectors."""
    total = parts[0]
    for p in parts[1:]:
        total = build.intrinsic(name, total, p)
    if not isinstance(total.type, ir.VectorType):
        return total
    lanes = [build.lane(total, k) for k in range(total.type.count)]
    return _folded(build, name, lanes)


def _ends_of_column(
    build: Builder, data: ir.Value, typ: ir.Type, count: Index, width: ir.Value
) -> tuple[ir.Value, ir.Value]:
    with build.carry(0, count, 1, (build.const(typ, 0), build.const(typ, -1))) as it:
        x = build.load(build.offset(data, build.mul(it.index, width), typ), typ)
        it.next = [build.intrinsic("smin", it.values[0], x), build.intrinsic("smax", it.values[1], x)]
    return it.results[0], it.results[1]
