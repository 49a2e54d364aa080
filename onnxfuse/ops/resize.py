"""Resampling to another size: nearest, linear and cubic. Every output element weighs a few inputs per dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, apply, cast, eq, lit, where
from onnxfuse.ir.op import SUM
from onnxfuse.ir.simplify import as_dim, dim_expr, same
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import Loops, Tensor, axis_of, between, declined, floor, maximum, minimum
from onnxfuse.ops.table import view

F32 = DType.F32
CROP = "tf_crop_and_resize"
_COORDINATES = ("asymmetric", "half_pixel", "pytorch_half_pixel", "align_corners", "half_pixel_symmetric", CROP)
_ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a Resize samples. `roi`: the crop of every dimension (start, end), for its own coordinates only."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float = -0.75
    exclude_outside: bool = False
    extrapolation: float = 0.0
    roi: tuple[tuple[Expr, Expr], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Dimension:
    """One dimension that changes: sizes before and after, the scale (f32), the crop."""

    length: Dim
    out: Dim
    scale: Expr
    crop: tuple[Expr, Expr]  # f32
    weighs_nothing: bool = True  # where nothing changes, the neighbour is weighed with 0, which shows if it is infinite

    def position(self, i: Expr, coordinates: str) -> Expr:
        """Source coordinate (f32) of output index i."""
        x = cast(i, F32)
        length, out = cast(dim_expr(self.length), F32), cast(dim_expr(self.out), F32)
        match coordinates:
            case "asymmetric":
                return x / self.scale
            case "half_pixel":
                return (x + 0.5) / self.scale - 0.5
            case "pytorch_half_pixel":
                moved = (x + 0.5) / self.scale - 0.5
                return where(out > 1.0, moved, lit(0, F32))
            case "align_corners":
                return where(apply("eq", out, lit(1, F32)), lit(0, F32), x * (length - 1.0) / (out - 1.0))
            case "half_pixel_symmetric":
                adjustment = out / (self.scale * length)
                center = length / 2.0
                return center * (lit(1, F32) - adjustment) + (x + 0.5) / self.scale - 0.5
            case "tf_crop_and_resize":
                start, end = self.crop
                spread = start * (length - 1.0) + x * (end - start) * (length - 1.0) / (out - 1.0)
                crop = where(out > 1.0, spread, (start + end) * 0.5 * (length - 1.0))
                return where(apply("eq", self.scale, lit(1, F32)), x, crop)  # onnxruntime crops nothing of that size
        raise AssertionError(coordinates)

    def beyond(self, i: Expr) -> Expr:
        """The coordinate of a crop lies outside of the tensor: there the extrapolation value stands."""
        x = self.position(i, CROP)
        return (x < 0.0) | (x > cast(dim_expr(self.length) - 1, F32))


_WHOLE = (lit(0, F32), lit(1, F32))  # the crop that crops nothing
Taps = list[tuple[Expr, Expr | None]]  # (index, weight); no weight: the one element


def _nearest(x: Expr, mode: str, scale: Expr) -> Expr:
    match mode:
        case "round_prefer_floor":
            return apply("ceil", x - 0.5)
        case "round_prefer_ceil":
            return apply("floor", x + 0.5)
        case "floor":
            return apply("floor", x)
        case "ceil":
            return apply("ceil", x)
        case "simple":  # before opset 11: up rounds down, down rounds up
            return where(scale < 1.0, apply("ceil", x), apply("floor", x))
    raise AssertionError(mode)


def _integral(scale: float, how: Sampling) -> int | None:
    """The factor of an up-sampling whose source index is exactly i // factor."""
    exact = (how.coordinates == "asymmetric" and how.nearest in ("floor", "simple")) or (
        how.coordinates in ("half_pixel", "pytorch_half_pixel") and how.nearest == "round_prefer_floor"
    )
    return int(scale) if exact and scale >= 1 and float(scale).is_integer() else None


def _one(d: _Dimension, i: Expr, how: Sampling) -> Taps:
    factor = _integral(float(d.scale.value), how) if isinstance(d.scale, Lit) else None
    if factor is not None:
        return [(i // factor, None)]
    at = cast(_nearest(d.position(i, how.coordinates), how.nearest, d.scale), DType.I64)
    return [(minimum(maximum(at, 0), dim_expr(d.length) - 1), None)]


def _two(d: _Dimension, i: Expr, how: Sampling) -> Taps:
    last = dim_expr(d.length) - 1
    pos = minimum(maximum(d.position(i, how.coordinates), 0.0), cast(last, F32))
    low = cast(pos, DType.I64)
    part = pos - cast(low, F32)
    alone = low >= last  # the last element is both neighbours, half of each, as in onnxruntime: inf * 0 would be NaN
    if not d.weighs_nothing:
        alone = alone | eq(d.scale, lit(1, F32))
    below, above = where(alone, lit(0.5, F32), lit(1, F32) - part), where(alone, lit(0.5, F32), part)
    return [(low, below), (where(alone, low, low + 1), above)]


def _together(moving: Sequence[bool]) -> tuple[int, ...]:
    """The axes that onnxruntime interpolates along in one go, also where one of them does not change."""
    rank = len(moving)
    if rank == 4:
        return (1, 2) if moving[1] and not moving[3] else (2, 3)
    return tuple(range(rank)) if rank < 4 else tuple(range(rank - 3, rank))


def cubic_weights(s: Expr, a: float) -> list[Expr]:
    """Weights of the four elements around a place that is `s` behind the second one (cubic convolution)."""
    r = lit(1, s.dtype) - s
    return [
        (((s + 1) * a - 5 * a) * (s + 1) + 8 * a) * (s + 1) - 4 * a,
        (s * (a + 2) - (a + 3)) * s * s + 1,
        (r * (a + 2) - (a + 3)) * r * r + 1,
        (((r + 1) * a - 5 * a) * (r + 1) + 8 * a) * (r + 1) - 4 * a,
    ]


def _four(d: _Dimension, i: Expr, how: Sampling) -> Taps:
    pos = d.position(i, how.coordinates)
    whole = floor(pos)
    low, weights = cast(whole, DType.I64), cubic_weights(pos - whole, how.cubic_a)
    size = dim_expr(d.length)
    if how.exclude_outside:
        weights = [where(between(0, low + k, size), w, lit(0, F32)) for k, w in enumerate(weights, -1)]
        total = reduce(lambda x, y: x + y, weights)
        weights = [w / total for w in weights]
    return [(minimum(maximum(low + k, 0), size - 1), w) for k, w in enumerate(weights, -1)]


_TAPS: dict[str, Callable[[_Dimension, Expr, Sampling], Taps]] = {"nearest": _one, "linear": _two, "cubic": _four}


def resized(x: Tensor, out: Sequence[Dim], scales: Sequence[Expr], how: Sampling) -> Loops:
    """The resampled tensor; `scales` are f32 expressions, one per dimension."""
    crops = how.roi or (_WHOLE,) * x.rank
    dims = [_Dimension(*d) for d in zip(x.shape, out, scales, crops, strict=True)]
    moving = [not (same(d.out, d.length) and isinstance(d.scale, Lit) and d.scale.value == 1.0) for d in dims]
    if how.mode == "linear" and any(moving):
        together = _together(moving)
        moving = [moves or k in together for k, moves in enumerate(moving)]
        dims = [replace(d, weighs_nothing=k in together) for k, d in enumerate(dims)]

    def body(*i: Expr) -> Expr:
        grid: list[tuple[tuple[Expr, ...], Expr | None]] = [((), None)]
        for d, moves, e in zip(dims, moving, i, strict=True):
            taps: Taps = _TAPS[how.mode](d, e, how) if moves else [(e, None)]
            grid = [((*index, j), w if v is None else v if w is None else w * v) for index, w in grid for j, v in taps]
        value = _weighed(x, grid)
        if how.coordinates != CROP:
            return value
        out_of = [d.beyond(e) for d, moves, e in zip(dims, moving, i, strict=True) if moves]
        return where(reduce(lambda a, b: a | b, out_of), lit(how.extrapolation, x.dtype), value) if out_of else value

    return Loops(list(out), body, x.dtype)


def _weighed(x: Tensor, grid: Sequence[tuple[tuple[Expr, ...], Expr | None]]) -> Expr:
    if len(grid) == 1 and grid[0][1] is None:
        return x[grid[0][0]]
    total: Expr | None = None
    for index, w in grid:
        assert w is not None
        term = cast(x[index], F32) * w
        total = term if total is None else total + term
    assert total is not None
    return cast(total, x.dtype)


# --- sizes ---------------------------------------------------------------------------------------------------------
def _scaled_dim(d: Dim, scale: Expr) -> Dim:
    if isinstance(scale, Lit):
        if float(scale.value).is_integer():
            return as_dim(dim_expr(d) * int(scale.value))
        if isinstance(d, int):
            return math.floor(np.float32(d) * np.float32(scale.value))
    return as_dim(cast(apply("floor", cast(dim_expr(d), F32) * scale), DType.I64))


def _ratio(out: Dim, d: Dim) -> Expr:
    if same(out, d):
        return lit(1, F32)
    if isinstance(out, int) and isinstance(d, int):
        return lit(out / d if d else 1, F32)
    return cast(dim_expr(out), F32) / cast(dim_expr(d), F32)


def _whole(x: Tensor, given: Sequence[Any], axes: Sequence[int] | None, rest: Sequence[Any]) -> list[Any]:
    """Values listed for some axes (in their order), `rest` for the others."""
    if axes is None:
        return list(given)
    full = list(rest)
    for a, v in zip(axes, given, strict=True):
        full[axis_of(a, x.rank)] = v
    return full


def _in_ratio(x: Tensor, sizes: Sequence[Dim], axes: Sequence[int] | None, policy: str) -> tuple[list[Dim], list[Expr]]:
    """Sizes and scales where one scale, the smallest or the largest that is asked for, goes for all axes."""
    chosen = [axis_of(a, x.rank) for a in axes] if axes is not None else list(range(x.rank))
    if policy not in ("not_larger", "not_smaller") or any(x.shape[k] == 0 for k in chosen):
        raise Unsupported("UN_ATTR", f"Resize with keep_aspect_ratio_policy={policy} on {x.type}")
    pick = minimum if policy == "not_larger" else maximum
    scale = reduce(pick, [cast(dim_expr(sizes[k]), F32) / cast(dim_expr(x.shape[k]), F32) for k in chosen])
    out = list(x.shape)
    scales: list[Expr] = [lit(1, F32)] * x.rank
    for k in chosen:
        out[k] = as_dim(cast(apply("floor", cast(dim_expr(x.shape[k]), F32) * scale + 0.5), DType.I64))
        scales[k] = scale
    return out, scales


def _crops(x: Tensor, roi: Tensor | None, axes: Sequence[int] | None) -> tuple[tuple[Expr, Expr], ...]:
    if roi is None or not isinstance(roi.type.size, int):
        raise Unsupported("UN_ARITY", f"Resize with {CROP} has no roi")
    bounds = [cast(roi[k] if roi.known is None else roi.known[k], F32) for k in range(roi.type.size)]
    half = len(bounds) // 2
    return tuple(_whole(x, list(zip(bounds[:half], bounds[half:], strict=True)), axes, [_WHOLE] * x.rank))


# --- entries -------------------------------------------------------------------------------------------------------
def _resize(
    x: Tensor,
    scales: Tensor | None,
    sizes: Tensor | None,
    how: Sampling,
    axes: Sequence[int] | None = None,
    policy: str = "stretch",
) -> Loops:
    factors: list[Expr]
    needs: tuple[Expr, ...] = ()
    if sizes is not None and sizes.shape != (0,):
        wanted, needs = sizes.sizes()
        out = _whole(x, wanted, axes, x.shape)
        factors = [_ratio(o, d) for o, d in zip(out, x.shape, strict=True)]
        if policy != "stretch":
            out, factors = _in_ratio(x, out, axes, policy)
    elif scales is None:
        raise Unsupported("UN_ARITY", "Resize has neither scales nor sizes")
    else:
        factors = _whole(x, [cast(s, F32) for s in scales.given()], axes, [lit(1, F32)] * x.rank)
        out = [_scaled_dim(d, s) for d, s in zip(x.shape, factors, strict=True)]
    if how.mode not in _TAPS or how.coordinates not in _COORDINATES or how.nearest not in _ROUNDINGS:
        why = f"Resize mode={how.mode}, coordinates {how.coordinates} is not implemented"
        return declined(out, x.dtype, "UN_ATTR", why)
    if how.mode != "nearest" and x.dtype not in (F32, DType.F16):
        return declined(out, x.dtype, "UN_DTYPE", f"Resize mode={how.mode} on {x.dtype} is not implemented")
    return replace(resized(x, out, factors, how), needs=needs)


@view(name="Upsample", since=9, tol=SUM)
def Upsample(x, scales, *, mode="nearest"):
    """Resize with asymmetric coordinates; nearest rounds down."""
    return _resize(x, scales, None, Sampling(mode, "asymmetric", "simple"))


@view(name="Upsample", since=7, tol=SUM)
def Upsample_7(x, *, mode="nearest", scales):
    """Resize with scales as attribute."""
    factors = [lit(s, F32) for s in scales]
    out = [_scaled_dim(d, s) for d, s in zip(x.shape, factors, strict=True)]
    return resized(x, out, factors, Sampling(mode, "asymmetric", "simple"))


@view(name="Resize", since=10, tol=SUM)
def Resize_10(x, scales, *, mode="nearest"):
    """Resize of opset 10: asymmetric coordinates; nearest rounds down when growing, up when shrinking."""
    return _resize(x, scales, None, Sampling(mode, "asymmetric", "simple"))


@view(since=11, tol=SUM)
def Resize(
    x,
    roi=None,
    scales=None,
    sizes=None,
    *,
    coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    mode="nearest",
    nearest_mode="round_prefer_floor",
    antialias=0,
    axes=None,
    keep_aspect_ratio_policy="stretch",
):
    """Resampling by nearest element, linearly or by cubics; with antialias only the shape is known."""
    used = None if scales is None or scales.shape == (0,) else scales
    how = Sampling(
        mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), extrapolation_value
    )
    if how.coordinates == CROP:
        how = replace(how, roi=_crops(x, roi, axes))
    made = _resize(x, used, sizes, how, axes, keep_aspect_ratio_policy)
    return declined(made.shape, x.dtype, "UN_ATTR", "Resize with antialias is not implemented") if antialias else made
