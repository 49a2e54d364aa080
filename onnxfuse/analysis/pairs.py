"""Integer products two at a time: neighbours in k become the two halves of one 32-bit element.

In: a contraction that sums products of small integers (both factors fit into 16 bits, zero points taken off) in i32.
Out: the same contraction with one axis of k halved, its factors packed in pairs

    a'[m, j] = a[m, 2j] | a[m, 2j+1] << 16        sum over k of a*b = sum over j of a'.lo*b'.lo + a'.hi*b'.hi

The processor multiplies both halves and adds them in one instruction; no sum can overflow where the plain one does not,
so the result is the exact one (modulo 2**32, as ever) in any order. A constant factor is packed so at kernel creation;
any other is `lifted`: written once per call to a buffer of pairs that lies like its source with one dimension halved,
and read from there as if it were a matrix of 32-bit numbers. An element missing at the end of an odd extent is 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce

from onnxfuse.analysis.roles import Contraction, Lift
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import (
    Apply,
    Expr,
    Lit,
    apply,
    axes_of,
    children,
    lit,
    load,
    loads,
    substitute,
    var,
    walk,
    where,
)
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import as_dim, dim_expr, from_poly, known, poly, simplify
from onnxfuse.ir.types import TensorType

Interval = tuple[int, int]
_ZERO = lit(0, DType.I32)


def in_pairs(c: Contraction, consts: Collection[Value]) -> Contraction | None:
    """The contraction over pairs; None when the factors are not small integers or cannot be paired along any axis."""
    if c.acc is not DType.I32 or not (fits_half(c.a) and fits_half(c.b)):
        return None
    for k in c.k:
        half = Axis(k.name, as_dim((dim_expr(k.extent) + 1) // 2))
        a, b = (_factor(e, c, _Halving(k, half), consts) for e in (c.a, c.b))
        if a is not None and b is not None:
            lifts = tuple(x for x in (a[1], b[1]) if x is not None)
            return replace(c, a=a[0], b=b[0], k=tuple(half if x is k else x for x in c.k), pairs=lifts)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Halving:
    """The axis of k that is halved, and what takes its place."""

    k: Axis
    half: Axis

    def at(self, e: Expr, offset: int) -> Expr:
        """The expression at element 2j + offset."""
        return simplify(substitute(e, {var(self.k): var(self.half) * 2 + offset}))


def _factor(e: Expr, c: Contraction, h: _Halving, consts: Collection[Value]) -> tuple[Expr, Lift | None] | None:
    """The factor in pairs along an axis, and what has to be lifted for it."""
    sources = {c.views[ld.source].source if ld.source in c.views else ld.source for ld in loads(e)}
    if sources <= set(consts):
        return _packed(e, h), None
    conds: list[Expr] = []
    while isinstance(e, Apply) and e.prim.name == "where" and e.args[2] is _ZERO:
        conds.append(e.args[0])
        e = e.args[1]
    found = _lift(e, h)
    if found is None or any(h.k in axes_of(cond) for cond in conds):
        return None
    value, lifted = found
    return reduce(lambda inner, cond: where(cond, inner, _ZERO), reversed(conds), value), lifted


def _packed(e: Expr, h: _Halving) -> Expr:
    """Both halves in one element, as an expression."""
    high = h.at(e, 1)
    inside = simplify(var(h.half) * 2 + 1 < dim_expr(h.k.extent))
    if known(inside) is not True:
        high = where(inside, high, _ZERO)
    return (h.at(e, 0) & 0xFFFF) | apply("shl", high, lit(16, DType.I32))


def _lift(e: Expr, h: _Halving) -> tuple[Expr, Lift] | None:
    """An expression of one element of a tensor as a load of pairs."""
    reads = [ld for ld in loads(e) if axes_of(ld)]
    if len(reads) != 1 or reads[0].dtype is DType.BOOL:
        return None
    (read,) = reads
    if axes_of(substitute(e, {read: lit(0, read.dtype)})):
        return None
    dims = [d for d, i in enumerate(read.index) if h.k in axes_of(i)]
    if len(dims) != 1:
        return None
    (dim,) = dims
    rest = dict(poly(simplify(read.index[dim])))
    if rest.pop((var(h.k),), 0) != 1 or any(step % 2 for step in rest.values()):
        return None  # pairs of one row of the product must be pairs of all others
    if any(h.k in axes_of(atom) for mono in rest for atom in mono):
        return None
    shape = list(read.source.tensor.shape)
    shape[dim] = as_dim((dim_expr(shape[dim]) + 1) // 2)
    value = Value(f"{read.source.name}.pairs", TensorType(DType.I32, tuple(shape)))
    place = simplify(from_poly({mono: step // 2 for mono, step in rest.items()}) + var(h.half))
    index = (*read.index[:dim], place, *read.index[dim + 1 :])
    return load(value, index, DType.I32), Lift(value, read, e, dim)


# ---- ranges of integer expressions ----


def fits_half(e: Expr) -> bool:
    """Every value of the expression fits into 16 bits."""
    found = _interval(e)
    return _within(found, DType.I16.limits)


def _interval(e: Expr) -> Interval | None:
    """Bounds of an integer expression; None when they are those of its type, or unknown."""
    known_: dict[Expr, Interval | None] = {}
    for x in walk(e):
        known_[x] = _of_type(x.dtype) if not isinstance(x, (Lit, Apply)) else _step(x, known_)
    return known_[e]


def _of_type(dtype: DType) -> Interval | None:
    return dtype.limits if dtype.is_int and dtype.bytes <= 2 else None


def _step(e: Expr, below: dict[Expr, Interval | None]) -> Interval | None:
    if isinstance(e, Lit):
        return (int(e.value), int(e.value)) if e.dtype.is_int else None
    assert isinstance(e, Apply)
    if e.prim.name == "where":
        return _hull(below[e.args[1]], below[e.args[2]])
    parts = [below[x] for x in children(e)]
    if e.prim.name == "cast":
        own = _of_type(e.dtype)
        return parts[0] if e.args[0].dtype.is_int and (own is None or _within(parts[0], own)) else own
    if any(p is None for p in parts) or e.dtype is not DType.I32:
        return _of_type(e.dtype)
    (a, b), *more = [p for p in parts if p is not None]
    match e.prim.name, more:
        case "add", [(c, d)]:
            return a + c, b + d
        case "sub", [(c, d)]:
            return a - d, b - c
        case "neg", []:
            return -b, -a
        case "min", [(c, d)]:
            return min(a, c), min(b, d)
        case "max", [(c, d)]:
            return max(a, c), max(b, d)
    return None


def _hull(x: Interval | None, y: Interval | None) -> Interval | None:
    return None if x is None or y is None else (min(x[0], y[0]), max(x[1], y[1]))


def _within(x: Interval | None, y: Interval) -> bool:
    return x is not None and y[0] <= x[0] and x[1] <= y[1]
