"""Reductions over axes. The body maps one element; the family loops, combines and finishes.

Axes are an attribute before opset 13 (ReduceSum) or 18 (the others) and an input after; absent or empty axes reduce
everything unless `noop_with_empty_axes`.
"""

from __future__ import annotations

import math

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr
from onnxfuse.ops.dsl import absolute, log, sqrt
from onnxfuse.ops.table import reduce


def lowest(dtype: DType) -> float | int | bool:
    """Neutral element of max: -inf, the smallest integer, False."""
    if dtype.is_float:
        return -math.inf
    if dtype is DType.BOOL:
        return False
    return -(1 << (dtype.bytes * 8 - 1)) if dtype.is_signed else 0


def highest(dtype: DType) -> float | int | bool:
    """Neutral element of min: inf, the largest integer, True."""
    if dtype.is_float:
        return math.inf
    if dtype is DType.BOOL:
        return True
    return (1 << (dtype.bytes * 8 - 1)) - 1 if dtype.is_signed else (1 << (dtype.bytes * 8)) - 1


def _root(acc: Expr, _count: Expr) -> Expr:
    return sqrt(acc)


def _log(acc: Expr, _count: Expr) -> Expr:
    return log(acc)


def _mean(acc: Expr, count: Expr) -> Expr:
    return acc / count


@reduce("add", 0, name="ReduceSum")
def ReduceSum_1(x, *, axes=None, keepdims=1):
    """Sum, axes as attribute."""
    return x


@reduce("add", 0, since=13)
def ReduceSum(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Sum."""
    return x


@reduce("add", 0, finish=_mean, name="ReduceMean")
def ReduceMean_1(x, *, axes=None, keepdims=1):
    """Mean, axes as attribute."""
    return x


@reduce("add", 0, finish=_mean, since=18)
def ReduceMean(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Mean."""
    return x


@reduce("max", lowest, name="ReduceMax")
def ReduceMax_1(x, *, axes=None, keepdims=1):
    """Maximum, axes as attribute."""
    return x


@reduce("max", lowest, since=18)
def ReduceMax(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Maximum."""
    return x


@reduce("min", highest, name="ReduceMin")
def ReduceMin_1(x, *, axes=None, keepdims=1):
    """Minimum, axes as attribute."""
    return x


@reduce("min", highest, since=18)
def ReduceMin(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Minimum."""
    return x


@reduce("mul", 1, name="ReduceProd")
def ReduceProd_1(x, *, axes=None, keepdims=1):
    """Product, axes as attribute."""
    return x


@reduce("mul", 1, since=18)
def ReduceProd(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Product."""
    return x


@reduce("add", 0, name="ReduceSumSquare")
def ReduceSumSquare_1(x, *, axes=None, keepdims=1):
    """Sum of squares, axes as attribute."""
    return x * x


@reduce("add", 0, since=18)
def ReduceSumSquare(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Sum of squares."""
    return x * x


@reduce("add", 0, name="ReduceL1")
def ReduceL1_1(x, *, axes=None, keepdims=1):
    """Sum of magnitudes, axes as attribute."""
    return absolute(x)


@reduce("add", 0, since=18)
def ReduceL1(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Sum of magnitudes."""
    return absolute(x)


@reduce("add", 0, finish=_root, name="ReduceL2")
def ReduceL2_1(x, *, axes=None, keepdims=1):
    """Euclidean norm, axes as attribute."""
    return x * x


@reduce("add", 0, finish=_root, since=18)
def ReduceL2(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Euclidean norm."""
    return x * x


@reduce("add", 0, finish=_log, name="ReduceLogSum")
def ReduceLogSum_1(x, *, axes=None, keepdims=1):
    """Logarithm of the sum, axes as attribute."""
    return x


@reduce("add", 0, finish=_log, since=18)
def ReduceLogSum(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Logarithm of the sum."""
    return x
