"""Sampling at given coordinates: GridSample by nearest element or linear interpolation.

Coordinates are data, so every index is clamped or guarded: whatever they hold, nothing outside of the tensor is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import reduce

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, cast, eq, i64, lit, where
from onnxfuse.ir.op import SUM
from onnxfuse.ir.simplify import dim_expr
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import Loops, Tensor, between, declined, equal_extents, floor, maximum, minimum, rint, trunc
from onnxfuse.ops.table import view

_KINDS = (DType.F32, DType.F64)


@view(name="GridSample", since=16, tol=SUM)
def GridSample_16(x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    """Sampling of planes at given coordinates."""
    return _sampled(x, grid, bool(align_corners), {"bilinear": "linear"}.get(mode, mode), padding_mode)


@view(since=20, tol=SUM)
def GridSample(x, grid, *, align_corners=0, mode="linear", padding_mode="zeros"):
    """Sampling at given coordinates, by nearest element or linear interpolation."""
    return _sampled(x, grid, bool(align_corners), mode, padding_mode)


def _sampled(x: Tensor, grid: Tensor, aligned: bool, mode: str, padding: str) -> Loops:
    shape = [x.shape[0], x.shape[1], *grid.shape[1:-1]]
    if mode not in ("linear", "nearest") or padding not in ("zeros", "border", "reflection"):
        return declined(shape, x.dtype, "UN_ATTR", f"GridSample mode={mode}, padding {padding} is not implemented")
    if x.dtype not in _KINDS or grid.dtype is not x.dtype:
        return declined(shape, x.dtype, "UN_DTYPE", f"GridSample of {x.dtype} at {grid.dtype} is not implemented")
    n = x.rank - 2
    if n < 1:
        raise Unsupported("UN_SHAPE_MISMATCH", f"GridSample of {x.type}")
    ends = [_ends(d, aligned, x.dtype) for d in x.shape[2:]]

    def element(index: Sequence[Expr], places: Sequence[Expr]) -> Expr:
        """The element at whole coordinates (floats), by the padding where they lie outside."""
        if padding == "reflection":
            places = [trunc(_reflected(p, *e)) for p, e in zip(places, ends, strict=True)]
        at = [cast(p, DType.I64) for p in places]
        near = [minimum(maximum(j, 0), dim_expr(d) - 1) for j, d in zip(at, x.shape[2:], strict=True)]
        value = x[(index[0], index[1], *near)]
        if padding != "zeros":
            return value
        inside = [between(0, j, dim_expr(d)) for j, d in zip(at, x.shape[2:], strict=True)]
        return where(reduce(lambda a, b: a & b, inside), value, lit(0, x.dtype))

    def body(*i: Expr) -> Expr:
        places = [_denormal(grid[(i[0], *i[2:], n - 1 - k)], x.shape[2 + k], aligned) for k in range(n)]
        if mode == "nearest":
            places = [rint(p) for p in places]
        if padding == "reflection":  # at a border only elements are held back, not weights, as onnxruntime does it
            places = [_reflected(p, *e) for p, e in zip(places, ends, strict=True)]
        if mode == "nearest":
            return element(i, places)
        low = [floor(p) for p in places]
        return _blend(places, low, lambda corner: element(i, [p + c for p, c in zip(low, corner, strict=True)]))

    needs = [*equal_extents((grid.shape[0], x.shape[0]), (grid.shape[-1], n)), *_some(x.shape[2:])]
    return Loops(shape, body, x.dtype, needs=needs)


def _some(shape: Sequence[Dim]) -> list[Expr]:
    """There is an element to clamp to."""
    if 0 in shape:
        raise Unsupported("UN_SHAPE_MISMATCH", "GridSample of an empty plane")
    return [apply("lt", i64(0), dim_expr(d)) for d in shape if not isinstance(d, int)]


def _blend(places: Sequence[Expr], low: Sequence[Expr], corner: Callable[[tuple[int, ...]], Expr]) -> Expr:
    """Linear interpolation between the corners around a place, the last dimension first."""
    n = len(places)
    values = {c: corner(c) for c in itertools.product((0, 1), repeat=n)}
    for k in reversed(range(n)):
        up, down = places[k] - low[k], low[k] + 1 - places[k]
        values = {c: down * values[*c, 0] + up * values[*c, 1] for c in itertools.product((0, 1), repeat=k)}
    return values[()]


def _denormal(v: Expr, extent: Dim, aligned: bool) -> Expr:
    """-1..1 as a coordinate in elements."""
    length = cast(dim_expr(extent), v.dtype)
    return (v + 1) / 2 * (length - 1) if aligned else ((v + 1) * length - 1) / 2


def _ends(extent: Dim, aligned: bool, kind: DType) -> tuple[Expr, Expr]:
    """Between which coordinates the tensor lies: centres of the outer elements (aligned), or their edges."""
    length = cast(dim_expr(extent), kind)
    return (lit(0, kind), length - 1) if aligned else (lit(-0.5, kind), length - 0.5)


def _reflected(p: Expr, low: Expr, high: Expr) -> Expr:
    """A coordinate thrown back at both ends until it lies between them."""
    span = high - low
    below = p < low
    over = where(below, low - p, p - high)
    times = trunc(over / span)
    rest = over - times * span
    odd = eq(apply("fmod", times, lit(2, p.dtype)), lit(1, p.dtype))
    back = where(below, where(odd, high - rest, low + rest), where(odd, low + rest, high - rest))
    return where(below | (p > high), back, p)
