"""Running sums and products. Each element is a reduction of its own: no order between elements, but more work.

The work grows with the square of the length, so long axes (and those of run-time length) stay with onnxruntime.
"""

from __future__ import annotations

from onnxfuse.ir.expr import Expr, i64, lit, where
from onnxfuse.ir.simplify import as_dim, dim_expr
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import Loops, Tensor, axis_of, chosen, compute, declined, named_axes
from onnxfuse.ops.table import contract

MOST = 8  # elements of the axis; onnxruntime is faster beyond


def _running(x: Tensor, axis: Tensor, combine: str, start: int, exclusive: int, reverse: int) -> Loops:
    if axis.known is None:
        return _running_given(x, axis, combine, start, exclusive, reverse)
    k = axis_of(axis.ints()[0], x.rank)
    extent = x.shape[k]
    if not _is_short(extent):
        return _too_long(x, extent)

    def body(*i: Expr) -> Expr:
        at, r = i[k], i[-1]
        taken = _taken(at, r, exclusive, reverse)
        return where(taken, compute(x[(*i[:k], r, *i[k + 1 : -1])]), lit(start, x.dtype.compute))

    return Loops(x.shape, body, x.dtype, [extent], combine, start)


def _running_given(x: Tensor, axis: Tensor, combine: str, start: int, exclusive: int, reverse: int) -> Loops:
    """The axis is known when the kernel runs: any of them, all short."""
    if long := [d for d in x.shape if not _is_short(d)]:
        return _too_long(x, long[0])
    hits, needs = named_axes(axis.given()[:1], x.rank)
    along = [h for (h,) in hits]
    extent = as_dim(chosen([(h, dim_expr(d)) for h, d in zip(along, x.shape, strict=True)], i64(0)))

    def body(*i: Expr) -> Expr:
        outer, r = i[:-1], i[-1]
        at = chosen(list(zip(along, outer, strict=True)), i64(0))
        taken = _taken(at, r, exclusive, reverse)
        place = tuple(where(h, r, e) for h, e in zip(along, outer, strict=True))
        return where(taken, compute(x[place]), lit(start, x.dtype.compute))

    return Loops(x.shape, body, x.dtype, [extent], combine, start, needs=needs)


def _taken(at: Expr, r: Expr, exclusive: int, reverse: int) -> Expr:
    low, high = (at, r) if reverse else (r, at)
    return low < high if exclusive else low <= high


def _is_short(extent: Dim) -> bool:
    return isinstance(extent, int) and extent <= MOST


def _too_long(x: Tensor, extent: Dim) -> Loops:
    why = f"every element depends on the one before, along an axis of {extent} elements (at most {MOST})"
    return declined(x.shape, x.dtype, "UN_OPAQUE", why)


@contract(since=11)
def CumSum(x, axis, *, exclusive=0, reverse=0):
    """Running sum along a short axis."""
    return _running(x, axis, "add", 0, exclusive, reverse)


@contract(since=26)
def CumProd(x, axis, *, exclusive=0, reverse=0):
    """Running product along a short axis."""
    return _running(x, axis, "mul", 1, exclusive, reverse)
