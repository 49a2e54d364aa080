"""Moves that write what models of the day are made of, node by node as exporters do: the templates' own ground."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from fuzz_graph import F16, F32, F64, Rejected, Writer, is_float
from fuzz_moves import axes_attr, real, with_axes


def _weight(w: Writer, dtype: np.dtype, *shape: int) -> str:
    array = (w.draw.standard_normal(shape) / max(1.0, float(shape[0]) ** 0.5)).astype(dtype)
    return w.const(array)


def _reduced(w: Writer, op: str, x: str, axes: list[int]) -> str:
    return w.op(op, with_axes(w, op, x, axes), **axes_attr(w, op, axes))[0]


def _kind(w: Writer) -> np.dtype:
    chosen: np.dtype = w.rng.choice((F32, F32, F32, F32, F64, F16))
    return chosen


def attention(w: Writer) -> None:
    """Queries, keys and values projected or given, scores scaled, masked, softmax, product, heads joined."""
    dtype = _kind(w)
    b, h = w.rng.choice((1, 1, 2)), w.rng.choice((1, 2, 3, 4))
    s, t = w.rng.choice((1, 2, 7, 16, 17, 33, 64)), w.rng.choice((1, 5, 16, 17, 33, 65))
    d, e = w.rng.choice((1, 4, 8, 16, 24, 32)), w.rng.choice((1, 4, 8, 16, 33))
    q = w.input(dtype, [w.dim(b, 0.3), h, w.dim(s, 0.4), d])
    turned = w.chance(0.5)
    k = w.input(dtype, [b, h, *((d, w.dim(t, 0.4)) if turned else (w.dim(t, 0.4), d))])
    v = w.input(dtype, [b, h, t if w.dims[k][3 if turned else 2] == t else w.dims[k][3 if turned else 2], e])
    if not turned:
        k = w.one("Transpose", k, perm=[0, 1, 3, 2])
    if w.chance(0.3):
        q = w.one("Mul", q, w.number(0.3, dtype))
    scores = w.one("MatMul", q, k)
    match w.rng.choice(("", "Mul", "Div", "both")):
        case "Mul" | "both":
            scores = w.one("Mul", scores, w.number(0.25, dtype))
        case "Div":
            scores = w.one("Div", scores, w.number(2.5, dtype))
    shape = w.shape(scores)
    if w.chance(0.5):
        of = w.rng.choice((shape, shape[-2:], shape[-1:], (shape[0], 1, 1, shape[3]), (1, 1, *shape[-2:])))
        fixed = all(a.shape == shape for a in w.arrays[scores])
        mask = w.data(dtype, of if fixed else (1,), True)
        if w.chance(0.5):
            scores = w.one("Add", scores, w.const(mask) if w.chance(0.5) else w.input(dtype, list(mask.shape), mask))
        else:
            scores = w.one("Where", w.const(mask > -0.8), scores, w.number(w.rng.choice((-1e4, -3.0)), dtype))
    p = w.one("Softmax", scores, axis=w.rng.choice((3, -1)))
    y = w.one("MatMul", p, v)
    if w.chance(0.6):
        y = w.one("Transpose", y, perm=[0, 2, 1, 3])
        w.one("Reshape", y, w.ints(0, 0, w.shape(y)[2] * w.shape(y)[3]))


def projections(w: Writer) -> None:
    """Several products of the same rows, split into heads."""
    x = w.pick(lambda v: w.dtype(v) in (F32, F64, F16) and 2 <= len(w.shape(v)) <= 3)
    k, dtype = w.shape(x)[-1], w.dtype(x)
    heads, size = w.rng.choice((1, 2, 4)), w.rng.choice((1, 4, 8, 16))
    for _ in range(w.rng.choice((2, 3))):
        n = heads * size if w.chance(0.8) else w.rng.choice(w.range.columns)
        y = w.one("MatMul", x, _weight(w, dtype, k, n))
        if w.chance(0.7):
            y = w.one("Add", *((y, _weight(w, dtype, n)) if w.chance(0.5) else (_weight(w, dtype, n), y)))
        if len(w.shape(y)) == 3 and n == heads * size and w.chance(0.7):
            y = w.one("Reshape", y, w.ints(0, 0, heads, size))
            w.one("Transpose", y, perm=w.rng.choice(([0, 2, 1, 3], [0, 2, 3, 1])))


def feed_forward(w: Writer) -> None:
    """Product, bias, an activation written out, product, the rest added, a norm."""
    x = w.pick(lambda v: w.dtype(v) in (F32, F64) and 2 <= len(w.shape(v)) <= 4)
    dtype, k = w.dtype(x), w.shape(x)[-1]
    n = w.rng.choice(w.range.columns)
    y = w.one("Add", w.one("MatMul", x, _weight(w, dtype, k, n)), _weight(w, dtype, n))
    y = activation_of(w, y)
    y = w.one("Add", w.one("MatMul", y, _weight(w, dtype, n, k)), _weight(w, dtype, k))
    y = w.one("Add", x, y)
    if w.chance(0.5):
        layer_norm_of(w, y)


def activation_of(w: Writer, x: str) -> str:
    """One of the activations that exporters write in several nodes."""
    dtype = w.dtype(x)

    def c(value: float) -> str:
        return w.number(value, dtype)

    match w.rng.choice(("gelu", "gelu2", "tanh gelu", "silu", "hard swish", "mish", "relu6", "glu", "quick")):
        case "gelu":
            e = w.one("Add", w.one("Erf", w.one("Div", x, c(2**0.5))), c(1))
            return w.one("Mul", w.one("Mul", x, e), c(0.5))
        case "gelu2":
            e = w.one("Add", w.one("Erf", w.one("Mul", x, c(0.5**0.5))), c(1))
            return w.one("Mul", w.one("Mul", x, c(0.5)), e)
        case "tanh gelu":
            cube = w.one("Pow", x, c(3)) if w.chance(0.5) else w.one("Mul", x, w.one("Mul", x, x))
            inner = w.one("Mul", w.one("Add", x, w.one("Mul", cube, c(0.044715))), c(0.7978845608))
            return w.one("Mul", w.one("Mul", x, c(0.5)), w.one("Add", w.one("Tanh", inner), c(1)))
        case "silu":
            return w.one("Mul", x, w.one("Sigmoid", x))
        case "hard swish":
            y = _clipped(w, w.one("Add", x, c(3)), 6.0)
            return w.one("Div", w.one("Mul", x, y), c(6)) if w.chance(0.5) else w.one("Mul", x, w.one("Div", y, c(6)))
        case "mish":
            return w.one("Mul", x, w.one("Tanh", w.one("Softplus", x)))
        case "relu6":
            return _clipped(w, x, 6.0)
        case "glu":
            if w.shape(x)[-1] % 2 or not w.shape(x)[-1]:
                raise Rejected("odd")
            a, b = w.op(
                "Split",
                [x],
                2,
                axis=-1 if w.opset >= 11 else len(w.shape(x)) - 1,
                num_outputs=2 if w.opset >= 18 else None,
            )
            return w.one("Mul", a, w.one("Sigmoid", b))
        case _:
            return w.one("Mul", x, w.one("Sigmoid", w.one("Mul", x, c(1.702))))


def _clipped(w: Writer, x: str, top: float) -> str:
    if w.opset < 11:
        return w.op("Clip", [x], min=0.0, max=top)[0]
    return w.one("Clip", x, w.number(0, w.dtype(x)), w.number(top, w.dtype(x)))


def activation(w: Writer) -> None:
    activation_of(w, real(w))


def layer_norm_of(w: Writer, x: str) -> str:
    """As exporters of before opset 17 write it; the root mean square alone with some chance."""
    dtype, shape = w.dtype(x), w.shape(x)
    centred = x
    if w.chance(0.7):
        centred = w.one("Sub", x, _reduced(w, "ReduceMean", x, [-1]))
    square = w.one("Pow", centred, w.number(2, dtype)) if w.chance(0.6) else w.one("Mul", centred, centred)
    root = w.one("Sqrt", w.one("Add", _reduced(w, "ReduceMean", square, [-1]), w.number(1e-3, dtype)))
    y = w.one("Div", centred, root) if w.chance(0.6) else w.one("Mul", centred, w.one("Reciprocal", root))
    y = w.one("Mul", y, _weight(w, dtype, *shape[-1:]))
    return w.one("Add", y, _weight(w, dtype, *shape[-1:])) if w.chance(0.6) else y


def layer_norm(w: Writer) -> None:
    x = real(w, 1)
    other = w.rng.choice([v for v in w.like(x) if w.shape(v) == w.shape(x)])
    layer_norm_of(w, w.one("Add", x, other) if w.chance(0.6) else x)


def rotary(w: Writer) -> None:
    """Halves swapped, one of them negated; times cosine and sine."""
    x = w.pick(
        lambda v: is_float(w.dtype(v)) and len(w.shape(v)) >= 2 and w.shape(v)[-1] >= 2 and w.shape(v)[-1] % 2 == 0
    )
    shape, dtype = w.shape(x), w.dtype(x)
    half, last = shape[-1] // 2, len(shape) - 1
    if w.opset < 10:
        raise Rejected("Slice with attributes")
    a = w.op("Slice", [x, w.ints(0), w.ints(half), w.ints(last)])[0]
    b = w.op("Slice", [x, w.ints(half), w.ints(2**63 - 1), w.ints(w.rng.choice((last, -1)))])[0]
    turned = w.op("Concat", [w.one("Neg", b), a], axis=w.rng.choice((-1, last)))[0]
    cos, sin = (w.const(w.data(dtype, shape[-1:], True)) for _ in range(2))
    w.one("Add", w.one("Mul", x, cos), w.one("Mul", turned, sin))


def block(w: Writer) -> None:
    """Convolutions as networks have them: normalised, activated, added, gated, joined, shuffled."""
    dtype = w.rng.choice((F32, F32, F32, F32, F16, F64))
    space = w.rng.choice((2, 2, 2, 1))
    c = w.rng.choice((1, 3, 4, 8, 16, 17, 32, 48))
    sizes = [w.rng.choice((1, 5, 7, 8, 13, 14, 16, 17, 28, 33)) for _ in range(space)]
    n = w.rng.choice((1, 1, 2))
    x = w.input(dtype, [w.dim(n, 0.4), c, *(w.dim(d, 0.25) for d in sizes)])
    y = _conv(w, x, w.rng.choice((c, c, *w.range.columns)), w.rng.choice((1, 3, 3, 5)), 1)
    match w.rng.choice(("residual", "gate", "join", "shuffle", "depthwise", "pool", "upsample", "flat")):
        case "residual":
            z = _conv(w, y, c, 3, 1)
            w.one("Relu", w.one("Add", z, x) if w.chance(0.5) else w.one("Add", x, z))
        case "gate":
            f = w.shape(y)[1]
            g = (
                w.one("GlobalAveragePool", y)
                if w.chance(0.6)
                else _reduced(w, "ReduceMean", y, list(range(2, 2 + space)))
            )
            g = w.one("Relu", w.op("Conv", [g, _weight(w, dtype, max(1, f // 4), f, *[1] * space)])[0])
            g = w.op("Conv", [g, _weight(w, dtype, f, max(1, f // 4), *[1] * space)])[0]
            w.one("Mul", y, w.op(w.rng.choice(("Sigmoid", "HardSigmoid")), [g])[0])
        case "join":
            parts = [
                _conv(w, x, w.rng.choice((1, 3, 8, 16)), w.rng.choice((1, 3, 5)), 1)
                for _ in range(w.rng.choice((1, 2)))
            ]
            pads = [1] * (2 * space)
            pooled = w.op("MaxPool", [x], kernel_shape=[3] * space, pads=pads, strides=[1] * space)[0]
            joined = w.op("Concat", [y, *parts, pooled], axis=1)[0]
            if w.chance(0.5):
                _conv(w, joined, w.rng.choice(w.range.columns), 1, 1)
        case "shuffle":
            channels = w.shape(y)[1]
            groups = next((g for g in (4, 2, 3) if channels % g == 0), 1)
            tail: list[int] = list(w.shape(y)[2:])
            if any(a.shape[2:] != w.shape(y)[2:] for a in w.arrays[y]):
                tail = [-1, *tail[1:]] if space == 1 else [-1, tail[1]]
            r = w.one("Reshape", y, w.ints(0, groups, channels // groups, *tail))
            r = w.one("Transpose", r, perm=[0, 2, 1, *range(3, 3 + space)])
            w.one("Reshape", r, w.ints(0, channels, *tail))
        case "depthwise":
            f = w.shape(y)[1]
            z = _conv(w, y, f, w.rng.choice((3, 5, 7)), f)
            _conv(w, z, c, 1, 1)
        case "pool":
            kernel = [w.rng.choice((2, 3))] * space
            z = w.op(w.rng.choice(("MaxPool", "AveragePool")), [y], kernel_shape=kernel, strides=[2] * space)[0]
            _conv(w, z, w.rng.choice(w.range.columns), 3, 1)
        case "upsample":
            scales = w.const(np.array([1, 1, *[2] * space], np.float32))
            if w.opset < 11:
                raise Rejected("Upsample")
            roi = w.const(np.zeros(0, np.float32)) if w.opset < 13 else None
            how: dict[str, Any] = w.rng.choice(({"mode": "nearest"}, {"mode": "linear"}))
            z = w.op("Resize", [y, roi, scales], **how)[0]
            _conv(w, z, c, w.rng.choice((1, 3)), 1)
        case _:
            z = w.one("Flatten", w.one("GlobalAveragePool", y), axis=1)
            w.op("Gemm", [z, _weight(w, dtype, 10, w.shape(y)[1]), _weight(w, dtype, 10)], transB=1)


def _conv(w: Writer, x: str, out: int, taps: int, group: int) -> str:
    """A convolution that keeps the size (its stride may halve it), perhaps normalised, mostly activated."""
    dtype, shape = w.dtype(x), w.shape(x)
    space = len(shape) - 2
    kernel = [taps] * space if w.chance(0.85) else [w.rng.choice((1, taps)) for _ in range(space)]
    how: dict[str, Any] = {"kernel_shape": kernel, "pads": [k // 2 for k in kernel] * 2, "group": group}
    if w.chance(0.15):
        how["strides"] = [2] * space
    weight = (w.draw.standard_normal((out, shape[1] // group, *kernel)) * 0.3).astype(dtype)
    bias = [_weight(w, dtype, out)] if w.chance(0.5) else []
    y = w.op("Conv", [x, w.const(weight), *bias], **how)[0]
    if w.chance(0.3):
        v = [w.const(np.abs(w.data(dtype, (out,), True)) + np.array(0.1, dtype)) for _ in range(4)]
        y = w.one("BatchNormalization", y, *v)
    if w.chance(0.7):
        y = (
            w.one(w.rng.choice(("Relu", "Relu", "Sigmoid", "LeakyRelu", "Tanh")), y)
            if w.chance(0.7)
            else activation_of(w, y)
        )
    return y


def embedding(w: Writer) -> None:
    """Rows of a table by identifiers, positions added, a norm."""
    rows, width = w.rng.choice((5, 30)), w.rng.choice(w.range.columns)
    dtype = _kind(w)
    b, s = w.rng.choice((1, 2)), w.rng.choice((1, 4, 9, 17))
    at = w.draw.integers(0, rows, (b, s)).astype(w.rng.choice((np.int64, np.int32)))
    ids = w.input(at.dtype, [w.dim(b, 0.5), s], at)
    w.arrays[ids] = [w.draw.integers(0, rows, a.shape).astype(at.dtype) for a in w.arrays[ids]]
    y = w.one("Gather", _weight(w, dtype, rows, width), ids, axis=0)
    y = w.one("Add", y, _weight(w, dtype, s, width))
    if w.chance(0.5):
        layer_norm_of(w, y)


PATTERNS: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (attention, 2),
    (projections, 1.5),
    (feed_forward, 2),
    (activation, 2),
    (layer_norm, 1.5),
    (rotary, 1),
    (block, 4),
    (embedding, 1),
)
