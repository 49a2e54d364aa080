"""Quantised numbers: steps of a scale around a zero point, and sums of products of them.

Everything here has the bits of onnxruntime's CPU kernels: integer sums are exact in any order, floats are rounded where
onnxruntime rounds them. onnxruntime's own sums of u8 x s8 products saturate on x86 processors without dot product
instructions (vpmaddubsw); the sums here are those of the standard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, cast, i64, lit, where
from onnxfuse.ir.op import EXACT
from onnxfuse.ir.simplify import same
from onnxfuse.ir.types import Dim
from onnxfuse.ops.contract import Element, convolution, matrix_product
from onnxfuse.ops.dsl import Loops, Tensor, axis_of, broadcast_index, declined, equal_extents, rint
from onnxfuse.ops.table import contract, view

_SMALL = (DType.U8, DType.I8)
_STEPS = (DType.U8, DType.I8, DType.U16, DType.I16)
_WIDE = DType.I32


def _to_steps(x: Expr, zero: Expr, dtype: DType) -> Expr:
    """The nearest step (halves to even), saturated. `x` counts steps from the zero point; NaN is the lowest."""
    low, high = (lit(end, DType.F32) - cast(zero, DType.F32) for end in dtype.limits)
    held = where(low < x, x, low)
    held = where(held < high, held, high)
    return cast(cast(rint(held), _WIDE) + cast(zero, _WIDE), dtype)


# --- one value ------------------------------------------------------------------------------------------------------
def _parameter(p: Tensor, x: Tensor, axis: int, block: int) -> Callable[[Sequence[Expr]], Expr]:
    """Element of a scale or zero point for an element of `x`: one for all, per slice of an axis, or per block of it."""
    if p.rank == 0:
        return lambda _: p[()]
    if block:
        k = axis_of(axis, x.rank)
        return lambda i: p[tuple(e // block if d == k else e for d, e in enumerate(i))]
    if p.rank != 1:
        raise Unsupported("UN_SHAPE_MISMATCH", f"scales of shape {p.type} without blocks")
    if p.shape[0] == 1:
        return lambda _: p[0]
    k = axis_of(axis, x.rank)
    return lambda i: p[i[k]]


def _needs(x: Tensor, scale: Tensor, zero: Tensor | None, axis: int, block: int) -> tuple[Expr, ...]:
    """Comparisons of extents: scales as many as the axis is long, zero points as many as scales."""
    pairs = [] if zero is None else list(zip(scale.shape, zero.shape, strict=True))
    if scale.rank == 1 and not block and not same(scale.shape[0], 1):
        pairs.append((scale.shape[0], x.shape[axis_of(axis, x.rank)]))
    if block:
        k = axis_of(axis, x.rank)
        extent = x.shape[k]
        if not isinstance(extent, int):
            raise Unsupported("UN_DATA_DEPENDENT", f"blocks of {block} along a run-time dimension of {x.type}")
        wanted: list[Dim] = [-(-extent // block) if d == k else n for d, n in enumerate(x.shape)]
        pairs += list(zip(scale.shape, wanted, strict=True))
    return equal_extents(*pairs)


@view(since=10)
def QuantizeLinear(x, y_scale, y_zero_point=None, *, axis=1, saturate=1, block_size=0, output_dtype=0, precision=0):
    """To integers: x / scale + zero point, rounded to even and saturated."""
    dtype = DType.from_onnx(output_dtype) if output_dtype else None
    if dtype is None:
        dtype = DType.U8 if y_zero_point is None else y_zero_point.dtype
    if x.dtype is not DType.F32 or y_scale.dtype is not DType.F32 or dtype not in _STEPS:
        return declined(x.shape, dtype, "UN_DTYPE", f"QuantizeLinear of {x.dtype} to {dtype} is not implemented")
    scale = _parameter(y_scale, x, axis, block_size)
    zero = None if y_zero_point is None else _parameter(y_zero_point, x, axis, block_size)

    def body(*i: Expr) -> Expr:
        return _to_steps(x[i] / scale(i), lit(0, dtype) if zero is None else zero(i), dtype)

    return Loops(x.shape, body, dtype, needs=_needs(x, y_scale, y_zero_point, axis, block_size))


@view(since=10)
def DequantizeLinear(x, x_scale, x_zero_point=None, *, axis=1, block_size=0, output_dtype=0):
    """From integers: (x - zero point) * scale."""
    dtype = DType.from_onnx(output_dtype) if output_dtype else x_scale.dtype
    if dtype is None:
        raise Unsupported("UN_DTYPE", f"element type {output_dtype}")
    if dtype is not DType.F32 or x_scale.dtype is not DType.F32 or x.dtype not in (*_STEPS, _WIDE):
        return declined(x.shape, dtype, "UN_DTYPE", f"DequantizeLinear of {x.dtype} to {dtype} is not implemented")
    scale = _parameter(x_scale, x, axis, block_size)
    zero = None if x_zero_point is None else _parameter(x_zero_point, x, axis, block_size)

    def body(*i: Expr) -> Expr:
        steps = cast(x[i], _WIDE) if zero is None else cast(x[i], _WIDE) - cast(zero(i), _WIDE)
        return cast(steps, DType.F32) * scale(i)

    return Loops(x.shape, body, dtype, needs=_needs(x, x_scale, x_zero_point, axis, block_size))


# --- sums of products -----------------------------------------------------------------------------------------------
def _each(p: Tensor | None, x: Tensor, axis: int) -> Element:
    """Elements of `x` less a zero point: one for all, one per slice of an axis (a vector), or one that broadcasts."""

    def steps(e: Expr, index: Sequence[Expr]) -> Expr:
        if p is None:
            return cast(e, _WIDE)
        return cast(e, _WIDE) - cast(_slice(p, x, axis, index), _WIDE)

    return steps


def _alone(p: Tensor) -> bool:
    """A tensor of one element."""
    return all(isinstance(d, int) and d == 1 for d in p.shape)


def _slice(p: Tensor, x: Tensor, axis: int, index: Sequence[Expr]) -> Expr:
    """Element of a parameter for an element of `x`."""
    if _alone(p):
        return p[(0,) * p.rank]
    return p[index[axis]] if p.rank == 1 else p[broadcast_index(p.shape, index, x.shape)]


def _fitting(p: Tensor | None, x: Tensor, axis: int) -> list[tuple[Dim, Dim]]:
    """Extents that must be equal for `_slice`."""
    if p is None or _alone(p):
        return []
    if p.rank == 1:
        return [(p.shape[0], x.shape[axis])]
    if p.rank != x.rank:
        raise Unsupported("UN_SHAPE_MISMATCH", f"{p.type} for slices of {x.type}")
    return [(d, e) for d, e in zip(p.shape, x.shape, strict=True) if not (isinstance(d, int) and d == 1)]


def _of_small(name: str, made: Loops, dtype: DType, *parts: Tensor) -> Loops:
    """The sums in i32, for factors of 8 bits; others are declined, with their shape."""
    bad = next((p.dtype for p in parts if p.dtype not in _SMALL), None)
    if bad is not None or dtype not in (*_SMALL, _WIDE):
        return declined(made.shape, dtype, "UN_DTYPE", f"{name} of {bad or parts[0].dtype} to {dtype}")
    return replace(made, dtype=dtype, acc=_WIDE)


def _multiplied(name: str, a: Tensor, b: Tensor, zeros: tuple[Tensor | None, Tensor | None], dtype: DType) -> Loops:
    left, right = zeros
    made = matrix_product(a, b, _each(left, a, -2), _each(right, b, -1))
    needs = equal_extents(*_fitting(left, a, -2), *_fitting(right, b, -1))
    return _of_small(name, replace(made, needs=(*made.needs, *needs)), dtype, a, b)


@contract(since=10, tol=EXACT)
def MatMulInteger(a, b, a_zero_point=None, b_zero_point=None):
    """Matrix product of 8-bit integers, less their zero points, in i32."""
    return _multiplied("MatMulInteger", a, b, (a_zero_point, b_zero_point), DType.I32)


@contract(since=10, tol=EXACT)
def QLinearMatMul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    """Matrix product of quantised numbers, quantised again."""
    made = _multiplied("QLinearMatMul", a, b, (a_zero_point, b_zero_point), y_zero_point.dtype)
    if not (_alone(a_scale) and _alone(y_scale) and _alone(y_zero_point)) or a_scale.dtype is not DType.F32:
        return declined(made.shape, made.dtype, "UN_DTYPE", f"scales {a_scale.type}, {y_scale.type}")

    def finish(total: Expr, *i: Expr) -> Expr:
        column = (*(i64(0) for _ in b.shape[:-1]), i[-1])
        scale = _only(a_scale) * _slice(b_scale, b, -1, column) / _only(y_scale)
        zero = _only(y_zero_point)
        return _to_steps(cast(total, DType.F32) * scale, zero, made.dtype)

    return replace(made, finish=finish, needs=(*made.needs, *equal_extents(*_fitting(b_scale, b, -1))))


def _only(p: Tensor) -> Expr:
    return p[(0,) * p.rank]


@contract(since=10, tol=EXACT)
def ConvInteger(
    x,
    w,
    x_zero_point=None,
    w_zero_point=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    """Convolution of 8-bit integers, less their zero points, in i32."""
    over = {
        "auto_pad": auto_pad,
        "dilations": dilations,
        "group": group,
        "kernel_shape": kernel_shape,
        "pads": pads,
        "strides": strides,
    }
    return _convolved("ConvInteger", x, w, (x_zero_point, w_zero_point), DType.I32, over)


def _convolved(
    name: str, x: Tensor, w: Tensor, zeros: tuple[Tensor | None, Tensor | None], dtype: DType, over: Mapping[str, Any]
) -> Loops:
    data, weights = zeros
    if data is not None and not _alone(data):
        raise Unsupported("UN_SHAPE_MISMATCH", f"zero point {data.type} of the data of a convolution")
    made = convolution(x, w, _each(data, x, 1), _each(weights, w, 0), **over)
    needs = equal_extents(*_fitting(weights, w, 0))
    return _of_small(name, replace(made, needs=(*made.needs, *needs)), dtype, x, w)


@contract(since=10, tol=EXACT)
def QLinearConv(
    x,
    x_scale,
    x_zero_point,
    w,
    w_scale,
    w_zero_point,
    y_scale,
    y_zero_point,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    """Convolution of quantised numbers, with a bias in i32, quantised again."""
    over = {
        "auto_pad": auto_pad,
        "dilations": dilations,
        "group": group,
        "kernel_shape": kernel_shape,
        "pads": pads,
        "strides": strides,
    }
    made = _convolved("QLinearConv", x, w, (x_zero_point, w_zero_point), y_zero_point.dtype, over)

    def finish(total: Expr, *i: Expr) -> Expr:
        feature = (i[1], *(i64(0) for _ in w.shape[1:]))
        scale = _only(x_scale) * _slice(w_scale, w, 0, feature) / _only(y_scale)
        biased = total if b is None else total + b[i[1]]
        return _to_steps(cast(biased, DType.F32) * scale, _only(y_zero_point), made.dtype)

    extents = [*_fitting(w_scale, w, 0), *([] if b is None else [(b.shape[0], w.shape[0])])]
    return replace(made, finish=finish, needs=(*made.needs, *equal_extents(*extents)))
