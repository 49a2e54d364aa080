"""Sliding windows: pools and local response normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, cast, eq, i64, lit, where
from onnxfuse.ir.op import EXACT
from onnxfuse.ir.simplify import as_dim, dim_expr, simplify
from onnxfuse.ops.contract import Windows, _inside, refuse_impossible, windows
from onnxfuse.ops.dsl import (
    Loops,
    Tensor,
    absolute,
    between,
    compute,
    declined,
    equal_extents,
    flatten,
    guarded,
    maximum,
    minimum,
    power,
    product,
    sqrt,
)
from onnxfuse.ops.reduce import lowest
from onnxfuse.ops.table import window

# What onnxruntime makes of the maximum of no element, where it is not the neutral one.
NOTHING_INSIDE = {t: -float(np.finfo(t.numpy).max) for t in (DType.F32, DType.F64)}


def _places(i: Sequence[Expr], over: Windows) -> list[Expr]:
    n = len(over.kernel)
    pos, taps = i[2 : 2 + n], i[2 + n :]
    return [simplify(pos[k] * over.stride[k] + taps[k] * over.dilation[k] - over.begin[k]) for k in range(n)]


def _may_miss(x: Tensor, over: Windows) -> bool:
    """A window may have no tap inside: it steps over an input that is shorter than a step."""
    sizes = zip(x.shape[2:], over.dilation, over.begin, strict=True)
    return any(b > 0 and d > 1 and not (isinstance(size, int) and size >= d) for size, d, b in sizes)


@window(tol=EXACT)
def MaxPool(
    x,
    *,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    kernel_shape,
    pads=None,
    storage_order=0,
    strides=None,
    outputs,
):
    """Maximum over a window; padding never wins."""
    over = windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode, pool=True)
    init = lowest(x.dtype)
    least = NOTHING_INSIDE.get(x.dtype, init)

    def body(*i: Expr) -> Expr:
        at = _places(i, over)
        return guarded(_inside(at, x.shape[2:]), lambda: compute(x[(i[0], i[1], *at)]), init)

    def finish(acc: Expr, *i: Expr) -> Expr:
        missed = eq(_taps_inside(x, over, i[2:]), i64(0))
        return where(missed, lit(least, acc.dtype), acc)

    shape = [*x.shape[:2], *over.counts]
    if outputs > 1:
        why = "MaxPool with the Indices output is not implemented"
        return [declined(shape, kind, "UN_ARITY", why) for kind in (x.dtype, DType.I64)]
    last = finish if least != init and _may_miss(x, over) else None
    return Loops(shape, body, x.dtype, over.kernel, "max", init, finish=last, refusal=over.refusal)


@window(name="AveragePool", since=7)
def AveragePool_7(
    x, *, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, kernel_shape, pads=None, strides=None
):
    """Mean over a window, over the elements inside (or over all its taps: count_include_pad)."""
    over = windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode, pool=True)
    # Beyond padding as well, which a window only reaches that is larger than its padded input.
    if count_include_pad and not ceil_mode:
        return _average(x, over, lambda pos: lit(math.prod(over.kernel), DType.I64))
    return _average(x, over, lambda pos: _taps_inside(x, over, pos, count_include_pad))


@window(since=19)
def AveragePool(
    x, *, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, kernel_shape, pads=None, strides=None
):
    """Mean over a window, over the elements inside (or over padding too: count_include_pad)."""
    over = windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode, pool=True)
    return _average(x, over, lambda pos: _taps_inside(x, over, pos, count_include_pad))


def _average(x: Tensor, over: Windows, count: Callable[[Sequence[Expr]], Expr]) -> Loops:
    if not x.dtype.is_float:
        raise Unsupported("UN_DTYPE", f"AveragePool on {x.dtype}")
    work = x.dtype.compute

    def body(*i: Expr) -> Expr:
        at = _places(i, over)
        return guarded(_inside(at, x.shape[2:]), lambda: compute(x[(i[0], i[1], *at)]), 0)

    def finish(acc: Expr, *i: Expr) -> Expr:
        taps = maximum(count(i[2:]), 1) if _may_miss(x, over) else count(i[2:])
        return acc / (lit(taps.value, work) if isinstance(taps, Lit) else cast(taps, work))

    return Loops([*x.shape[:2], *over.counts], body, x.dtype, over.kernel, finish=finish, refusal=over.refusal)


def _taps_inside(x: Tensor, over: Windows, pos: Sequence[Expr], padded: bool = False) -> Expr:
    """How many taps of a window lie in the input, or in the padded input: a last window may reach beyond both."""
    total: Expr = lit(1, DType.I64)
    for k in range(x.rank - 2):
        first = pos[k] * over.stride[k] - over.begin[k]
        size = dim_expr(x.shape[2 + k])
        low, high = (-over.begin[k], size + over.end[k]) if padded else (0, size)
        d = over.dilation[k]
        skipped = maximum((low - first + (d - 1)) // d, 0)
        reached = minimum((high - first + (d - 1)) // d, over.kernel[k])
        total = total * simplify(reached - skipped)
    return simplify(total)


@window
def LpPool(x, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, p=2, pads=None, strides=None):
    """p-norm over a window."""
    if not x.dtype.is_float:
        raise Unsupported("UN_DTYPE", f"LpPool on {x.dtype}")
    over = windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode, pool=True)

    def body(*i: Expr) -> Expr:
        at = _places(i, over)
        return guarded(_inside(at, x.shape[2:]), lambda: raised(compute(x[(i[0], i[1], *at)])), 0)

    def raised(value: Expr) -> Expr:
        return absolute(value) if p == 1 else value * value if p == 2 else power(absolute(value), lit(p, value.dtype))

    def finish(acc: Expr, *_i: Expr) -> Expr:
        return acc if p == 1 else sqrt(acc) if p == 2 else power(acc, lit(1 / p, acc.dtype))

    shape = [*x.shape[:2], *over.counts]
    return Loops(shape, body, x.dtype, over.kernel, finish=None if p == 1 else finish, refusal=over.refusal)


@window(since=18)
def Col2Im(x, image_shape, block_shape, *, dilations=None, pads=None, strides=None):
    """Blocks of an image, one per column, added where they overlap."""
    (image, some), (block, more) = image_shape.sizes(), block_shape.sizes()
    n = len(block)
    stride, dilation = list(strides or [1] * n), list(dilations or [1] * n)
    refuse_impossible(strides=stride, dilations=dilation)
    begin, end = (list(pads[:n]), list(pads[n:])) if pads else ([0] * n, [0] * n)
    taps = dim_expr(product(block))
    counts = [
        as_dim((dim_expr(image[k]) + (begin[k] + end[k] - 1) - (dim_expr(block[k]) - 1) * dilation[k]) // stride[k] + 1)
        for k in range(n)
    ]

    def body(*i: Expr) -> Expr:
        pos, tap = i[2 : 2 + n], i[2 + n :]
        from_start = [simplify(pos[k] + begin[k] - tap[k] * dilation[k]) for k in range(n)]
        at = [simplify(e // s) for e, s in zip(from_start, stride, strict=True)]
        inside = _inside(at, counts)
        for e, s in zip(from_start, stride, strict=True):
            inside = inside & eq(simplify(e % s), i64(0)) if s != 1 else inside
        channel = simplify(i[1] * taps + flatten(tap, block))
        return guarded(simplify(inside), lambda: compute(x[i[0], channel, flatten(at, counts)]), 0)

    channels = as_dim(dim_expr(x.shape[1]) // taps)
    whole = equal_extents((as_dim(dim_expr(channels) * taps), x.shape[1]), (product(counts), x.shape[2]))
    needs = (*some, *more, *whole)
    return Loops([x.shape[0], channels, *image], body, x.dtype, block, needs=needs)


@window
def LRN(x, *, alpha=0.0001, beta=0.75, bias=1.0, size):
    """Local response normalisation across channels."""
    half = (size - 1) // 2
    channels = dim_expr(x.shape[1])

    def body(*i: Expr) -> Expr:
        j = simplify(i[1] + i[-1] - half)
        return guarded(between(0, j, channels), lambda: squared(compute(x[(i[0], j, *i[2:-1])])), 0)

    def squared(value: Expr) -> Expr:
        return value * value

    def finish(acc: Expr, *i: Expr) -> Expr:
        scale = acc * (alpha / size) + bias
        return compute(x[i]) * power(scale, lit(-beta, scale.dtype))

    return Loops(x.shape, body, x.dtype, [size], finish=finish)
