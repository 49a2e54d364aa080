"""Moves of the writer: each adds nodes or raises Rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from fuzz_graph import (
    BINARY,
    BOOL,
    DTYPES,
    F16,
    F32,
    F64,
    I32,
    I64,
    REDUCES,
    UNARY,
    Rejected,
    Shape,
    Writer,
    code,
    is_float,
)  # fmt: skip
from onnx import TensorProto, helper

from onnxfuse.ir.op import Op
from onnxfuse.ops.table import OPS, lookup
from tests.ops.samples import samples

SAFE = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Exp", "Floor", "Erf", "Sqrt", "Not", "Identity", "Cast")
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
ATTRS: dict[str, dict[str, tuple[object, ...]]] = {
    "LeakyRelu": {"alpha": (0.3, -1.5, 0.0)},
    "Elu": {"alpha": (0.3, 2.0)},
    "Selu": {"alpha": (2.0,), "gamma": (3.0,)},
    "Celu": {"alpha": (2.0, 0.5)},
    "ThresholdedRelu": {"alpha": (2.0, -1.0, 0.0)},
    "HardSigmoid": {"alpha": (0.5,), "beta": (0.1,)},
    "Shrink": {"bias": (1.5,), "lambd": (1.5,)},
    "Gelu": {"approximate": ("tanh", "none")},
    "Swish": {"alpha": (0.5, 1.702)},
    "IsInf": {"detect_negative": (0, 1), "detect_positive": (0, 1)},
    "Mod": {"fmod": (0, 1)},
    "BitShift": {"direction": ("LEFT", "RIGHT")},
    "ArgMax": {"keepdims": (0, 1), "select_last_index": (0, 1)},
    "ArgMin": {"keepdims": (0, 1), "select_last_index": (0, 1)},
    "CumSum": {"exclusive": (0, 1), "reverse": (0, 1)},
}


def some(w: Writer, op: str) -> dict[str, Any]:
    """Some of an op's attributes."""
    return {k: w.rng.choice(values) for k, values in ATTRS.get(op, {}).items() if w.chance(0.6)}


def unary(w: Writer) -> None:
    op = w.rng.choice(UNARY) if w.chance(0.7) else w.rng.choice(SAFE)
    if op == "Cast":
        return cast_(w)
    w.op(op, [w.pick()], **some(w, op))
    return None


def partner(w: Writer, x: str) -> str:
    """A second operand: another value, the same, or a constant that broadcasts (sometimes making x broadcast)."""
    if w.chance(0.55):
        return w.rng.choice(w.like(x))
    shape = w.shape(x)
    choices: list[Shape] = [
        (), (1,), shape[-1:], shape, tuple(d if w.chance(0.5) else 1 for d in shape), (w.rng.choice((1, 2, 3)), *shape),
        tuple(d if d != 1 else w.rng.choice((1, 3)) for d in shape),
    ]  # fmt: skip
    return w.const(w.data(w.dtype(x), w.rng.choice(choices), plain=w.chance(0.85)))


def binary(w: Writer) -> None:
    op = w.rng.choice(BINARY) if w.chance(0.5) else w.rng.choice(ARITHMETIC)
    x = w.pick()
    y = partner(w, x)
    pair = [x, y] if w.chance(0.6) else [y, x]
    w.op(op, pair, **some(w, op))


def variadic(w: Writer) -> None:
    x = w.pick()
    w.op(w.rng.choice(("Max", "Min", "Sum", "Mean")), [x, *(partner(w, x) for _ in range(w.rng.randint(0, 3)))])


def where(w: Writer) -> None:
    x = w.pick()
    conditions = [v for v in w.pool if w.dtype(v) == BOOL]
    if conditions and w.chance(0.7):
        c = w.rng.choice(conditions)
    elif w.chance(0.5):
        c = w.const(w.data(BOOL, w.rng.choice((w.shape(x), w.shape(x)[-1:], ())), True))
    else:
        c = w.one(w.rng.choice(("Greater", "Less", "Equal")), x, partner(w, x))
    w.op("Where", [c, x, partner(w, x)])


def clip(w: Writer) -> None:
    x = w.pick()
    low, high = sorted(w.rng.sample((-3.0, -1.0, 0.0, 0.5, 1.0, 6.0), 2))
    if w.opset < 11:
        w.op("Clip", [x], min=low, max=high)
        return
    if w.dtype(x).kind in "iu":
        low, high = 1, 5
    bounds = [w.number(b, w.dtype(x)) if w.chance(0.8) else None for b in (low, high)]
    w.op("Clip", [x, *bounds])


def cast_(w: Writer) -> None:
    x = w.pick()
    targets = [code(d) for d, _ in DTYPES] + [code(F32)] * 4 + ([17, 18, 19, 20] if w.opset >= 19 else [])
    if w.opset >= 15 and w.chance(0.15):
        w.op("CastLike", [x, w.pick()])
        return
    w.op("Cast", [x], to=w.rng.choice(targets))


def reduce_(w: Writer) -> None:
    op = w.rng.choice(REDUCES)
    x = w.pick()
    rank = len(w.shape(x))
    axes: list[int] | None = sorted(w.rng.sample(range(rank), w.rng.randint(1, rank))) if rank else None
    if rank and w.chance(0.4):
        axes = [rank - 1]
    if axes is not None and w.chance(0.3):
        axes = [a - rank for a in axes]
    if w.chance(0.1):
        axes = None
    w.op(op, with_axes(w, op, x, axes), keepdims=w.rng.choice((0, 1, 1, None)), **axes_attr(w, op, axes))


def axes_are_input(w: Writer, op: str) -> bool:
    try:
        return "axes" in {i.name for i in onnx.defs.get_schema(op, w.opset).inputs}
    except onnx.defs.SchemaError as error:
        raise Rejected(op) from error


def with_axes(w: Writer, op: str, x: str, axes: Sequence[int] | None) -> list[str]:
    return [x, w.ints(*axes)] if axes_are_input(w, op) and axes is not None else [x]


def axes_attr(w: Writer, op: str, axes: Sequence[int] | None) -> dict[str, Any]:
    return {} if axes_are_input(w, op) or axes is None else {"axes": list(axes)}


def ranked(w: Writer, low: int, high: int = 9) -> str:
    return w.pick(lambda v: low <= len(w.shape(v)) <= high)


def real(w: Writer, low: int = 0, high: int = 9) -> str:
    """A float value."""
    return w.pick(lambda v: is_float(w.dtype(v)) and low <= len(w.shape(v)) <= high)


def softmax(w: Writer) -> None:
    x = real(w, 1)
    rank = len(w.shape(x))
    w.op(w.rng.choice(("Softmax", "Softmax", "LogSoftmax", "Hardmax")), [x], axis=w.rng.choice((-1, 0, rank - 1, None)))


def softmax_by_hand(w: Writer) -> None:
    """The formula, perhaps with a scale and a mask before it."""
    x = real(w, 1)
    axes = [len(w.shape(x)) - 1] if w.chance(0.7) else [w.rng.randrange(len(w.shape(x)))]
    if w.chance(0.5):
        x = w.one("Mul", x, w.number(0.125, w.dtype(x)))
    m = w.op("ReduceMax", with_axes(w, "ReduceMax", x, axes), **axes_attr(w, "ReduceMax", axes))[0]
    e = w.one("Exp", w.one("Sub", x, m))
    s = w.op("ReduceSum", with_axes(w, "ReduceSum", e, axes), **axes_attr(w, "ReduceSum", axes))[0]
    w.one("Div", e, s)


def norm_by_hand(w: Writer) -> None:
    x = real(w, 1)
    axes = [len(w.shape(x)) - 1] if w.chance(0.7) else [0]
    mean = w.op("ReduceMean", with_axes(w, "ReduceMean", x, axes), **axes_attr(w, "ReduceMean", axes))[0]
    d = w.one("Sub", x, mean)
    square = w.one("Mul", d, d) if w.chance(0.5) else w.one("Pow", d, w.number(2, w.dtype(x)))
    var = w.op("ReduceMean", with_axes(w, "ReduceMean", square, axes), **axes_attr(w, "ReduceMean", axes))[0]
    root = w.one("Sqrt", w.one("Add", var, w.number(1e-3, w.dtype(x))))
    y = w.one("Div", d, root) if w.chance(0.6) else w.one("Mul", d, w.one("Reciprocal", root))
    if w.chance(0.6):
        w.one("Mul", y, w.const(w.data(w.dtype(x), w.shape(x)[-1:], True)))


def norm(w: Writer) -> None:
    x = real(w, 1)
    dtype, shape = w.dtype(x), w.shape(x)

    def row(n: Sequence[int]) -> str:
        return w.const(np.abs(w.data(dtype, tuple(n), True)) + np.array(0.1, dtype))

    op = w.rng.choice(
        ("LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization",
         "LpNormalization", "MeanVarianceNormalization", "LRN", "ReduceLogSumExp", "LayerNormalization")
    )  # fmt: skip
    eps: dict[str, Any] = {"epsilon": w.rng.choice((1e-5, 0.1))} if w.chance(0.5) else {}
    match op:
        case "LayerNormalization" | "RMSNormalization":
            axis = w.rng.choice((-1, -1, *range(len(shape))))
            extra = [row(shape[axis:])] if op[0] == "L" and w.chance(0.7) else []
            count = w.rng.choice((1, 1, 1, 2, 3)) if op[0] == "L" and w.opset >= 17 else 1
            w.op(op, [x, row(shape[axis:]), *extra], count, axis=axis, **eps)
        case "BatchNormalization":
            w.op(op, [x, *(row(shape[1:2] or (1,)) for _ in range(4))], **eps)
        case "InstanceNormalization":
            w.op(op, [x, row(shape[1:2]), row(shape[1:2])], **eps)
        case "GroupNormalization":
            groups = w.rng.choice([g for g in (1, 2, 4) if shape[1:2] and shape[1] % g == 0] or [1])
            n = [groups] if w.opset < 21 else shape[1:2]
            w.op(op, [x, row(n), row(n)], num_groups=groups, **eps)
        case "LpNormalization":
            w.op(op, [x], p=w.rng.choice((1, 2)), axis=w.rng.randrange(-1, len(shape)))
        case "MeanVarianceNormalization":
            w.op(op, [x], axes=w.rng.choice(([0, 2, 3], [0, 1, 2, 3], [2, 3])))
        case "LRN":
            w.op(op, [x], size=w.rng.choice((1, 3, 5)), alpha=0.5)
        case _:
            axes = [w.rng.randrange(len(shape))]
            w.op(op, with_axes(w, op, x, axes), keepdims=w.rng.choice((0, 1)), **axes_attr(w, op, axes))


def transpose(w: Writer) -> None:
    x = ranked(w, 2) if w.chance(0.9) else w.pick()
    rank = len(w.shape(x))
    w.op("Transpose", [x], perm=w.rng.sample(range(rank), rank) if w.chance(0.9) else None)


def reshape(w: Writer) -> None:
    x = w.pick()
    shape = w.shape(x)
    at = w.rng.randrange(len(shape)) if shape else 0
    options: list[list[int]] = [[-1], [0] * at + [-1], list(shape), [*shape, 1], [1, -1]]
    if len(shape) > 1:
        j = min(at, len(shape) - 2)
        options += [[*shape[:j], shape[j] * shape[j + 1], *shape[j + 2 :]], [0] * j + [-1, *shape[j + 2 :]]]
        options.append(list(shape[::-1]))
    if shape and shape[at] and shape[at] % 2 == 0:
        options += [[*shape[:at], 2, shape[at] // 2, *shape[at + 1 :]], [0] * at + [-1, 2, *shape[at + 1 :]]]
    if w.chance(0.2):
        reshape_to_like(w, x)
        return
    w.op("Reshape", [x, w.ints(*w.rng.choice(options))], allowzero=w.rng.choice((0, None)) if w.opset >= 14 else None)


def reshape_to_like(w: Writer, x: str) -> None:
    """To a shape that is computed: Shape, Slice or Gather, Concat."""
    s = w.one("Shape", x)
    rank = len(w.shape(x))
    if w.chance(0.5) and rank:
        picked = w.one("Gather", s, w.ints(*w.rng.sample(range(rank), w.rng.randint(1, rank))))
    else:
        picked = s
    parts = [picked, w.ints(-1)] if w.chance(0.6) else [picked]
    to = w.one("Concat", *parts, axis=0)
    if w.chance(0.5):
        w.one("Reshape", x, to)
    elif w.opset >= 9 and w.chance(0.5):
        w.one("ConstantOfShape", s, value=np.array([1.5], np.float32) if w.chance(0.5) else None)
    else:
        y = w.pick(lambda v: len(w.shape(v)) <= rank)
        w.one("Expand", y, s)


def flatten(w: Writer) -> None:
    x = w.pick()
    w.op("Flatten", [x], axis=w.rng.randint(0, len(w.shape(x))))


def squeeze(w: Writer) -> None:
    x = w.pick()
    units = [k for k, d in enumerate(w.shape(x)) if d == 1]
    if units and w.chance(0.6):
        axes: list[int] | None = w.rng.sample(units, w.rng.randint(1, len(units))) if w.chance(0.9) else None
        w.op("Squeeze", with_axes(w, "Squeeze", x, axes), **axes_attr(w, "Squeeze", axes))
        return
    axes = [w.rng.randint(0, len(w.shape(x)))]
    w.op("Unsqueeze", with_axes(w, "Unsqueeze", x, axes), **axes_attr(w, "Unsqueeze", axes))


def slice_(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    axes = sorted(w.rng.sample(range(len(shape)), w.rng.randint(1, min(2, len(shape)))))
    rows = [_bounds(w, shape[a]) for a in axes]
    starts, ends, steps = ([r[k] for r in rows] for k in range(3))
    if w.opset < 10:
        w.op("Slice", [x], axes=axes, starts=starts, ends=ends)
        return
    inputs = [x, w.ints(*starts), w.ints(*ends), w.ints(*axes)]
    w.op("Slice", inputs + ([w.ints(*steps)] if any(s != 1 for s in steps) else []))


def _bounds(w: Writer, n: int) -> tuple[int, int, int]:
    step = w.rng.choice((1, 1, 1, 2, 3, -1, -2))
    if step < 0:
        return w.rng.choice((-1, n - 1, 2**31 - 1)), w.rng.choice((-(2**31), 0, -n - 1)), step
    return w.rng.choice((0, 1, -2, n // 2)), w.rng.choice((n, n - 1, -1, 2**31 - 1, 2**63 - 1)), step


def concat(w: Writer) -> None:
    x = ranked(w, 1)
    rank = len(w.shape(x))
    fits = [v for v in w.like(x) if len(w.shape(v)) == rank]
    parts = [w.rng.choice(fits) for _ in range(w.rng.choice((1, 2, 3)))]
    w.op("Concat", [x, *parts], axis=w.rng.randrange(-rank, rank) if w.opset >= 11 else w.rng.randrange(rank))


def split(w: Writer) -> None:
    x = ranked(w, 1)
    axis = w.rng.randrange(len(w.shape(x)))
    n = w.shape(x)[axis]
    if w.chance(0.5) or n < 2:
        w.op("Split", [x], 2, axis=axis, num_outputs=2 if w.opset >= 18 else None)
    else:
        parts = [1, n - 1] if w.chance(0.5) else [n // 2, n - n // 2]
        if w.opset >= 13:
            w.op("Split", [x, w.ints(*parts)], 2, axis=axis)
        else:
            w.op("Split", [x], 2, axis=axis, split=parts)


def expand(w: Writer) -> None:
    x = w.pick()
    shape = w.shape(x)
    to = [w.rng.choice((d, 1, 3)) if d == 1 else w.rng.choice((d, 1)) for d in shape]
    if w.chance(0.3):
        to = [w.rng.choice((1, 2)), *to]
    if w.chance(0.3):
        w.op("Tile", [x, w.ints(*(w.rng.choice((1, 1, 2, 3)) for _ in shape))])
    else:
        w.op("Expand", [x, w.ints(*to)])


def gather(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    axis = w.rng.randrange(len(shape))
    n = max(1, shape[axis])
    if w.opset >= 11 and w.chance(0.3):
        at = w.draw.integers(-n, n, tuple(max(1, d - 1) if k != axis else 2 for k, d in enumerate(shape)))
        w.op("GatherElements", [x, w.const(at.astype(np.int64))], axis=axis)
        return
    low = -n if w.opset >= 11 else 0
    at = w.draw.integers(low, n, w.rng.choice(((), (1,), (2,), (2, 2), (3,)))).astype(
        w.rng.choice((np.int64, np.int32))
    )
    index = w.const(at) if w.chance(0.7) else w.input(at.dtype, at.shape, at)
    w.op("Gather", [x, index], axis=axis)


def pad(w: Writer) -> None:
    x = ranked(w, 1)
    rank = len(w.shape(x))
    pads = [w.rng.choice((0, 0, 1, 2, -1)) for _ in range(2 * rank)]
    mode = w.rng.choice(("constant", "constant", "reflect", "edge", "wrap"))
    if w.opset < 11:
        w.op("Pad", [x], mode=mode, pads=pads, value=w.rng.choice((0.0, 1.5)))
        return
    value = [w.number(w.rng.choice((0, 1, 2.5)), w.dtype(x))] if mode == "constant" and w.chance(0.5) else []
    w.op("Pad", [x, w.ints(*pads), *value], mode=mode)


def rearrange(w: Writer) -> None:
    """Rarer views."""
    x = w.pick()
    match w.rng.choice(("DepthToSpace", "SpaceToDepth", "Trilu", "Identity", "Dropout", "EyeLike", "Resize", "Shape")):
        case "DepthToSpace":
            w.op("DepthToSpace", [x], blocksize=2, mode=w.rng.choice(("DCR", "CRD")) if w.opset >= 11 else None)
        case "SpaceToDepth":
            w.op("SpaceToDepth", [x], blocksize=w.rng.choice((1, 2, 3)))
        case "Trilu":
            extra = [w.const(np.array(w.rng.choice((-1, 0, 1, 3)), np.int64))] if w.chance(0.5) else []
            w.op("Trilu", [x, *extra], upper=w.rng.choice((0, 1)))
        case "Dropout":
            w.op("Dropout", [x], w.rng.choice((1, 1, 2)))
        case "EyeLike":
            w.op("EyeLike", [x], k=w.rng.choice((0, 1, -1)), dtype=w.rng.choice((None, 1, 7)))
        case "Resize":
            resize(w, x)
        case op:
            w.op(op, [x])


def resize(w: Writer, x: str) -> None:
    rank = len(w.shape(x))
    scales = np.array([w.rng.choice((1, 1, 2, 0.5, 1.5)) for _ in range(rank)], np.float32)
    scales[: max(0, rank - 2)] = 1
    mode = w.rng.choice(("nearest", "linear", "cubic"))
    if w.opset < 10:
        w.op(
            "Upsample",
            [x, w.const(scales)] if w.opset == 9 else [x],
            mode=mode,
            scales=None if w.opset == 9 else scales.tolist(),
        )
    elif w.opset == 10:
        w.op("Resize", [x, w.const(scales)], mode=mode)
    else:
        how = w.rng.choice(("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"))
        rounding = w.rng.choice((None, "floor", "ceil", "round_prefer_ceil")) if mode == "nearest" else None
        roi = w.const(np.zeros(0, np.float32)) if w.opset < 13 else None
        w.op(
            "Resize", [x, roi, w.const(scales)], mode=mode, coordinate_transformation_mode=how, nearest_mode=rounding
        )  # fmt: skip


def matmul(w: Writer) -> None:
    x = w.pick(lambda v: len(w.shape(v)) >= 1 and w.dtype(v) in (F32, F32, F64, F16, I32, I64))
    shape = w.shape(x)
    n = w.rng.choice(w.range.columns)
    if w.chance(0.3):
        y = w.rng.choice([v for v in w.like(x) if w.shape(v)])
        if len(w.shape(y)) > 1 and w.chance(0.6):
            rank = len(w.shape(y))
            y = w.one("Transpose", y, perm=[*range(rank - 2), rank - 1, rank - 2])
        w.op("MatMul", [x, y])
        return
    weight = w.rng.choice([(shape[-1], n), (shape[-1], n), (shape[-1],), (*shape[:-2], shape[-1], n)])
    y = w.const(w.data(w.dtype(x), weight, True))
    made = w.one("MatMul", x, y)
    if w.chance(0.5):
        w.one("Add", made, w.const(w.data(w.dtype(x), w.shape(made)[-1:], True)))


def gemm(w: Writer) -> None:
    x = real(w, 2, 2)
    m, k = w.shape(x)
    n = w.rng.choice(w.range.columns)
    ta, tb = w.rng.choice((0, 0, 1)), w.rng.choice((0, 1))
    rows, inner = (k, m) if ta else (m, k)
    y = w.const(w.data(w.dtype(x), (n, inner) if tb else (inner, n), True))
    bias = [w.const(w.data(w.dtype(x), w.rng.choice(((n,), (1, n), (rows, n), (rows, 1), (), (1,))), True))]
    inputs = [x, y, *bias] if w.opset < 11 or w.chance(0.7) else [x, y]
    scale: dict[str, Any] = (
        {"alpha": w.rng.choice((0.5, -2.0)), "beta": w.rng.choice((0.5, 0.0))} if w.chance(0.4) else {}
    )
    w.op("Gemm", inputs, transA=ta, transB=tb, **scale)


def einsum(w: Writer) -> None:
    x = w.pick(lambda v: w.dtype(v) in (F32, F64, I32, I64) and 1 <= len(w.shape(v)) <= 4)
    letters = "abcd"[: len(w.shape(x))]
    y = w.rng.choice(w.like(x))
    other = "".join(w.rng.choice("abcdef") for _ in w.shape(y))
    seen = sorted(set(letters + other))
    out = "".join(w.rng.sample(seen, w.rng.randint(0, min(4, len(seen)))))
    w.op("Einsum", [x, y], equation=f"{letters},{other}->{out}")


def conv(w: Writer) -> None:
    x = w.pick(lambda v: 3 <= len(w.shape(v)) <= 5 and is_float(w.dtype(v)))
    shape = w.shape(x)
    c, space = shape[1], len(shape) - 2
    kernel = [w.rng.choice(w.range.taps) for _ in range(space)]
    if w.chance(0.4):
        kernel = [3] * space
    attrs: dict[str, Any] = {}
    if w.chance(0.4):
        attrs["strides"] = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    if w.chance(0.2):
        attrs["dilations"] = [w.rng.choice((1, 2)) for _ in range(space)]
    if w.chance(0.2):
        attrs["auto_pad"] = w.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif w.chance(0.6):
        attrs["pads"] = [w.rng.choice((0, 1, 1, 2)) for _ in range(2 * space)]
    if w.chance(0.7):
        attrs["kernel_shape"] = kernel
    out = w.rng.choice(w.range.columns)
    group = w.rng.choice([g for g in (1, 1, 1, 2, c) if g and c % g == 0] or [1])
    if group > 1:
        out, attrs["group"] = group * w.rng.choice((1, 2)), group
    dtype = w.dtype(x)
    if w.chance(0.15):
        weight = w.data(dtype, (c, max(1, out // group), *kernel), True)
        w.op("ConvTranspose", [x, w.const(weight)], **attrs)
        return
    weight = w.data(dtype, (out, c // max(group, 1), *kernel), True)
    bias = [w.const(w.data(dtype, (out,), True))] if w.chance(0.5) else []
    made = w.op("Conv", [x, w.const(weight), *bias], **attrs)[0]
    if w.chance(0.4):
        v = [w.const(np.abs(w.data(dtype, (w.shape(made)[1],), True)) + np.array(0.1, dtype)) for _ in range(4)]
        w.one("BatchNormalization", made, *v)


def pool(w: Writer) -> None:
    x = w.pick(lambda v: 3 <= len(w.shape(v)) <= 5)
    space = len(w.shape(x)) - 2
    op = w.rng.choice(("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool", "Global"))
    if op == "Global":
        w.op(w.rng.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")), [x])
        return
    attrs: dict[str, Any] = {"kernel_shape": [w.rng.choice((1, 2, 3)) for _ in range(space)]}
    if w.chance(0.6):
        attrs["strides"] = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    if w.chance(0.2):
        attrs["auto_pad"] = w.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif w.chance(0.5):
        attrs["pads"] = [w.rng.choice((0, 1)) for _ in range(2 * space)]
    if w.chance(0.25) and w.opset >= 10:
        attrs["ceil_mode"] = 1
    if w.chance(0.2) and ((op == "MaxPool" and w.opset >= 10) or w.opset >= 19):
        attrs["dilations"] = [w.rng.choice((1, 2)) for _ in range(space)]
    if op == "AveragePool" and w.chance(0.5):
        attrs["count_include_pad"] = 1
    if op == "LpPool" and w.chance(0.5):
        attrs["p"] = w.rng.choice((1, 3))
    w.op(op, [x], w.rng.choice((1, 1, 1, 2)) if op == "MaxPool" and w.opset >= 8 else 1, **attrs)


def barrier(w: Writer) -> None:
    """Ops that stay with onnxruntime, between the others."""
    x = ranked(w, 1)
    axis = w.rng.randrange(len(w.shape(x)))
    match w.rng.choice(("ArgMax", "ArgMin", "CumSum", "TopK", "NonZero", "OneHot", "Quantize", "Scatter", "Range")):
        case "ArgMax" | "ArgMin" as op:
            chosen = some(w, op)
            if w.opset < 12:
                chosen.pop("select_last_index", None)
            w.op(op, [x], axis=axis, **chosen)
        case "CumSum":
            w.op("CumSum", [x, w.const(np.array(axis, np.int64))], **some(w, "CumSum"))
        case "TopK" if w.opset >= 10:
            w.op("TopK", [x, w.ints(min(2, w.shape(x)[axis]))], 2, axis=axis)
        case "Quantize" if w.opset >= 10:
            scale, zero = w.number(0.1, F32), w.const(np.array(3, np.uint8))
            q = w.one("QuantizeLinear", x, scale, zero)
            w.one("DequantizeLinear", q, scale, zero)
        case "Scatter" if w.opset >= 11:
            at = np.zeros(w.shape(x), np.int64)
            w.op("ScatterElements", [x, w.const(at), w.rng.choice(w.like(x))], axis=axis)
        case "Range" if w.opset >= 11:
            n = w.one("Gather", w.one("Shape", x), w.const(np.array(axis, np.int64)))
            zero, one = (w.const(np.array(v, np.int64)) for v in (0, 1))
            w.one("Range", zero, n, one)
        case _:
            w.op("NonZero", [x])


def branch(w: Writer) -> None:
    """An If on a computed or given condition; the branches capture a value."""
    x = w.pick(lambda v: v not in w.consts)
    scalars = [v for v in w.pool if w.dtype(v) == BOOL and w.shape(v) in ((), (1,))]
    condition = w.rng.choice(scalars) if scalars else w.input(BOOL, [])
    out = w.name("v")
    graphs = [_body(w, x, f"{out}_{k}") for k in range(2)]
    node = helper.make_node("If", [condition], [out], then_branch=graphs[0], else_branch=graphs[1])
    w.commit(node, captures=[x])


def _body(w: Writer, x: str, prefix: str) -> onnx.GraphProto:
    """A chain of up to three pointwise nodes on a captured value."""
    nodes, last = [], x
    ops = ("Relu", "Neg", "Abs", "Exp", "Sigmoid") if is_float(w.dtype(x)) else ("Identity",)
    for k in range(w.rng.randint(1, 3)):
        nodes.append(helper.make_node(w.rng.choice(ops), [last], [f"{prefix}_{k}"]))
        last = f"{prefix}_{k}"
    info = helper.make_tensor_value_info(last, code(w.dtype(x)), [None] * len(w.shape(x)))
    return helper.make_graph(nodes, f"{prefix}_g", [], [info])


def loop(w: Writer) -> None:
    """A Loop that carries one value and reads another from outside."""
    x = real(w)
    out = w.name("v")
    rank = [None] * len(w.shape(x))
    kind = code(w.dtype(x))
    made = [f"{out}_{k}" for k in range(4)]
    nodes = [
        helper.make_node("Identity", ["cond_" + out], [made[0]]),
        helper.make_node("Mul", ["in_" + out, x], [made[1]]),
        helper.make_node("Tanh", [made[1]], [made[2]]),
    ]
    body = helper.make_graph(
        nodes,
        f"{out}_g",
        [
            helper.make_tensor_value_info("i_" + out, TensorProto.INT64, []),
            helper.make_tensor_value_info("cond_" + out, TensorProto.BOOL, []),
            helper.make_tensor_value_info("in_" + out, kind, rank),
        ],
        [
            helper.make_tensor_value_info(made[0], TensorProto.BOOL, []),
            helper.make_tensor_value_info(made[2], kind, rank),
        ],
    )
    trips = w.const(np.array(w.rng.choice((0, 1, 3)), np.int64))
    w.commit(helper.make_node("Loop", [trips, "", x], [out], body=body), captures=[x])


def local_function(w: Writer) -> None:
    """A call of a function of the model's own."""
    x = real(w)
    name = w.name("f")
    ops = w.rng.sample(("Relu", "Neg", "Abs", "Sigmoid", "Tanh", "Exp"), w.rng.randint(1, 3))
    nodes, last = [], "a"
    for k, op in enumerate(ops):
        nodes.append(helper.make_node(op, [last], [f"t{k}"]))
        last = f"t{k}"
    nodes.append(helper.make_node("Add", [last, "b"], ["y"]))
    made = helper.make_function("local", name, ["a", "b"], ["y"], nodes, [helper.make_opsetid("", w.opset)])
    w.functions.append(made)
    try:
        w.op(name, [x, partner(w, x)], domain="local")
    except Rejected:
        w.functions.pop()
        raise


def graft(w: Writer) -> None:
    """A sample of any entry of the op table, on new inputs, with pointwise nodes around it."""
    op = w.rng.choice(_applicable(w.opset))
    try:
        found = samples(op, w.opset)
    except KeyError:
        raise Rejected("no samples") from None
    s = w.rng.choice(found)
    if any(a is not None and a.size > w.range.largest for a in s.inputs):
        raise Rejected("large")
    names: list[str | None] = []
    for k, array in enumerate(s.inputs):
        if array is None:
            names.append(None)
        elif k in s.const or w.chance(0.15):
            names.append(w.const(array))
        else:
            names.append(w.input(array.dtype, [w.dim(n, 0.5) for n in array.shape], array))
            if w.chance(0.35):
                ways = ("Neg", "Abs", "Relu", "Identity") if is_float(array) else ("Identity", "Abs")
                names[-1] = w.one(w.rng.choice(ways), names[-1])
    attrs: dict[str, Any] = dict(s.attrs)
    made = w.op(op.name, names, s.outputs, **attrs)
    if w.chance(0.5):
        w.op(w.rng.choice(("Relu", "Neg", "Sigmoid", "Identity", "Abs", "Sign")), [w.rng.choice(made)])


_table: dict[int, list[Op]] = {}


def _applicable(opset: int) -> list[Op]:
    """Entries that a model of this opset uses and that have a definition."""
    if opset not in _table:
        every = [o for rows in OPS.values() for o in rows if not o.domain]
        _table[opset] = [
            o
            for o in sorted(every, key=lambda o: (o.name, o.since))
            if o.since <= opset
            and lookup("", o.name, opset) is o
            and onnx.defs.has(o.name, opset)
            and "Random" not in o.name
            and o.name not in ("Bernoulli", "Multinomial")
        ]
    return _table[opset]


MOVES: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (unary, 12),
    (binary, 10),
    (variadic, 1.5),
    (where, 1.5),
    (clip, 1.2),
    (cast_, 2),
    (reduce_, 4),
    (softmax, 1.5),
    (softmax_by_hand, 0.8),
    (norm, 2.5),
    (norm_by_hand, 0.8),
    (transpose, 3),
    (reshape, 3),
    (flatten, 0.5),
    (squeeze, 1.5),
    (slice_, 2.5),
    (concat, 2),
    (split, 1.2),
    (expand, 1.5),
    (gather, 1.5),
    (pad, 1.5),
    (rearrange, 1.5),
    (matmul, 2.5),
    (gemm, 2),
    (einsum, 0.7),
    (conv, 2.5),
    (pool, 2),
    (barrier, 1),
    (branch, 0.3),
    (loop, 0.2),
    (local_function, 0.4),
    (graft, 4),
)
