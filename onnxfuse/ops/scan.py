"""Running sums and products. Each element is a reduction of its own: no order between elements, but more work.

The work grows with the square of the length, so long axes (and those of run-time length) stay with onnxruntime.
"""

from __future__ import annotations

from onnxfuse.ir.expr import Expr, lit, where
from onnxfuse.ops.dsl import Loops, Tensor, axis_of, compute, declined
from onnxfuse.ops.table import contract

MOST = 8  # elements of the axis; onnxruntime is faster beyond


def _running(x: Tensor, axis: Tensor, combine: str, start: int, exclusive: int, reverse: int) -> Loops:
    k = axis_of(axis.ints()[0], x.rank)
    extent = x.shape[k]
    if not isinstance(extent, int) or extent > MOST:
        why = f"every element depends on the one before, along an axis of {extent} elements (at most {MOST})"
        return declined(x.shape, x.dtype, "UN_OPAQUE", why)

    def body(*i: Expr) -> Expr:
        at, r = i[k], i[-1]
        low, high = (at, r) if reverse else (r, at)
        taken = low < high if exclusive else low <= high
        return where(taken, compute(x[(*i[:k], r, *i[k + 1 : -1])]), lit(start, x.dtype.compute))

    return Loops(x.shape, body, x.dtype, [extent], combine, start)


@contract(since=11)
def CumSum(x, axis, *, exclusive=0, reverse=0):
    """Running sum along a short axis."""
    return _running(x, axis, "add", 0, exclusive, reverse)


@contract(since=26)
def CumProd(x, axis, *, exclusive=0, reverse=0):
    """Running product along a short axis."""
    return _running(x, axis, "mul", 1, exclusive, reverse)
