"""Sampling at given coordinates: GridSample, and the AffineGrid that makes its coordinates.

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
from onnxfuse.ops.dsl import (
    Loops,
    Tensor,
    between,
    compute,
    declined,
    equal_extents,
    floor,
    maximum,
    minimum,
    rint,
    trunc,
)
from onnxfuse.ops.resize import cubic_weights
from onnxfuse.ops.table import contract, view

_KINDS = (DType.F32, DType.F64)


@view(name="GridSample", since=16, tol=SUM)
def GridSample_16(x, grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    """Sampling of planes at given coordinates."""
    plain = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return _sampled(x, grid, bool(align_corners), plain, padding_mode)


@view(since=20, tol=SUM)
def GridSample(x, grid, *, align_corners=0, mode="linear", padding_mode="zeros"):
    """Sampling at given coordinates, by nearest element, linear or cubic interpolation."""
    return _sampled(x, grid, bool(align_corners), mode, padding_mode)


@contract(since=20)
def AffineGrid(theta, size, *, align_corners=0):
    """Coordinates -1..1 of every place of an image of that size, moved by the matrix of its batch."""
    if not theta.dtype.is_float:
        raise Unsupported("UN_DTYPE", f"AffineGrid on {theta.dtype} is not implemented")
    (batch, _, *spatial), checks = size.sizes()
    work = theta.dtype.compute
    n = len(spatial)

    def place(i: Expr, extent: Dim) -> Expr:
        length = cast(dim_expr(extent), work)
        if not align_corners:
            return (cast(i, work) * 2 + 1) / length - 1
        alone = eq(length, lit(1, work))  # onnxruntime puts a single place at the end
        return where(alone, lit(1, work), cast(i, work) * 2 / (length - 1) - 1)

    def body(*i: Expr) -> Expr:
        row = i[-1]
        total = compute(theta[i[0], row, n])
        for k, (e, d) in enumerate(zip(reversed(i[1:-1]), reversed(spatial), strict=True)):
            total = total + compute(theta[i[0], row, k]) * place(e, d)
        return total

    needs = checks + equal_extents((theta.shape[1], n), (theta.shape[2], n + 1), (batch, theta.shape[0]))
    return Loops([theta.shape[0], *spatial, n], body, theta.dtype, needs=needs)


def _sampled(x: Tensor, grid: Tensor, aligned: bool, mode: str, padding: str) -> Loops:
    shape = [x.shape[0], x.shape[1], *grid.shape[1:-1]]
    if mode not in ("linear", "nearest", "cubic") or padding not in ("zeros", "border", "reflection"):
        return declined(shape, x.dtype, "UN_ATTR", f"GridSample mode={mode}, padding {padding} is not implemented")
    if x.dtype not in _KINDS or grid.dtype is not x.dtype:
        return declined(shape, x.dtype, "UN_DTYPE", f"GridSample of {x.dtype} at {grid.dtype} is not implemented")
    n = x.rank - 2
    if mode == "cubic" and n != 2:
        return declined(shape, x.dtype, "UN_ATTR", f"GridSample mode=cubic over {n} dimensions is not implemented")
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
        weigh = _linear if mode == "linear" else _cubic
        weights = [weigh(p, j) for p, j in zip(places, low, strict=True)]
        first = 0 if mode == "linear" else -1
        return _blend(weights, lambda corner: element(i, [p + (c + first) for p, c in zip(low, corner, strict=True)]))

    needs = [*equal_extents((grid.shape[0], x.shape[0]), (grid.shape[-1], n)), *_some(x.shape[2:])]
    return Loops(shape, body, x.dtype, needs=needs)


def _some(shape: Sequence[Dim]) -> list[Expr]:
    """There is an element to clamp to."""
    if 0 in shape:
        raise Unsupported("UN_SHAPE_MISMATCH", "GridSample of an empty plane")
    return [apply("lt", i64(0), dim_expr(d)) for d in shape if not isinstance(d, int)]


def _blend(weights: Sequence[Sequence[Expr]], corner: Callable[[tuple[int, ...]], Expr]) -> Expr:
    """The weighed elements around a place, the last dimension first."""
    n, taps = len(weights), range(len(weights[0]))
    values = {c: corner(c) for c in itertools.product(taps, repeat=n)}
    for k in reversed(range(n)):
        values = {
            c: reduce(lambda a, b: a + b, [w * values[*c, t] for t, w in enumerate(weights[k])])
            for c in itertools.product(taps, repeat=k)
        }
    return values[()]


def _linear(place: Expr, low: Expr) -> list[Expr]:
    return [low + 1 - place, place - low]


def _cubic(place: Expr, low: Expr) -> list[Expr]:
    return cubic_weights(place - low, -0.75)


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
