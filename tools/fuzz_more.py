"""Moves with the rarer forms of operators: bounds and axes that a run decides, windows of any kind, every option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fuzz_graph import BOOL, F16, F32, F64, I32, I64, REDUCES, Rejected, Shape, Writer, is_float
from fuzz_moves import axes_are_input, ranked, real, some
from onnx import helper

I8, U8, I16, U16 = (np.dtype(n) for n in ("i1", "u1", "i2", "u2"))


def given(w: Writer, values: Sequence[int], dtype: Any = np.int64, p: float = 0.6) -> str:
    """Integers that steer a node: known, or (the same in every set) an input."""
    array = np.array(values, dtype)
    return w.const(array) if w.chance(p) else steered(w, array)


def steered(w: Writer, array: np.ndarray) -> str:
    """An input that holds the same in every input set."""
    name = w.input(array.dtype, array.shape, array)
    w.arrays[name] = [array] * len(w.sets)
    return name


def any_axes(w: Writer, rank: int, most: int = 9) -> list[int]:
    """Distinct axes in any order, some counted from the end."""
    axes = w.rng.sample(range(rank), w.rng.randint(1, min(most, rank)))
    return [a - rank if w.chance(0.4) else a for a in axes]


# --- views -----------------------------------------------------------------------------------------------------------
def slice_any(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    axes = any_axes(w, len(shape)) if w.chance(0.8) else list(range(w.rng.randint(1, len(shape))))
    wild = (0, 1, 2, -1, -2, 5, -5, 40, -40, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))

    def whole(a: int) -> tuple[int, ...]:
        return (*wild, shape[a] - 1, shape[a] // 2, -shape[a], -shape[a] - 1)

    dtype = w.rng.choice((np.int64, np.int64, np.int32))
    info = np.iinfo(dtype)
    bounds = [[min(max(w.rng.choice(whole(a)), info.min), info.max) for a in axes] for _ in range(2)]
    steps = [w.rng.choice((1, 1, 1, 2, 3, -1, -2, -7, 100)) for _ in axes]
    known = w.rng.choice((1.0, 1.0, 0.0, 0.5))
    inputs: list[str | None] = [x, *(given(w, b, dtype, known) for b in bounds)]
    named = axes != list(range(len(axes))) or w.chance(0.5)
    inputs.append(given(w, axes, dtype, 0.9) if named else None)
    if w.chance(0.6):
        inputs.append(given(w, steps, dtype, known))
    w.op("Slice", inputs)


def squeeze_any(w: Writer) -> None:
    x = w.pick()
    shape = w.shape(x)
    units = [k for k, d in enumerate(shape) if d == 1]
    op = "Squeeze" if units and w.chance(0.5) else "Unsqueeze"
    if op == "Squeeze":
        axes = [a - len(shape) if w.chance(0.5) else a for a in w.rng.sample(units, w.rng.randint(1, len(units)))]
    else:
        rank = len(shape) + w.rng.randint(1, 3)
        axes = [a - rank if w.chance(0.5) else a for a in w.rng.sample(range(rank), rank - len(shape))]
    if w.opset < 13:
        w.op(op, [x], axes=axes)
    else:
        w.op(op, [x, given(w, axes, p=0.9)])


def split_any(w: Writer) -> None:
    x = ranked(w, 1)
    rank = len(w.shape(x))
    axis = w.rng.randrange(-rank, rank)
    n = w.shape(x)[axis]
    count = w.rng.randint(1, 5)
    if w.chance(0.4):
        w.op("Split", [x], count, axis=axis, num_outputs=count if w.opset >= 18 else None)
        return
    cuts = sorted(w.rng.randint(0, n) for _ in range(count - 1))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    if w.opset >= 13:
        w.op("Split", [x, given(w, parts, p=0.8)], count, axis=axis)
    else:
        w.op("Split", [x], count, axis=axis, split=parts)


def reduce_any(w: Writer) -> None:
    """Axes in any order, none, an empty list, axes that a run decides."""
    op = w.rng.choice((*REDUCES, "ReduceLogSumExp"))
    x = w.pick()
    rank = len(w.shape(x))
    axes = any_axes(w, rank) if rank and w.chance(0.8) else []
    keep = w.rng.choice((0, 1, None))
    if not axes_are_input(w, op):
        w.op(op, [x], axes=axes or None, keepdims=keep)
        return
    inputs = [x, given(w, axes, p=0.85)] if axes or w.chance(0.5) else [x]
    w.op(op, inputs, keepdims=keep, noop_with_empty_axes=w.rng.choice((None, 0, 1)))


def pad_any(w: Writer) -> None:
    x = ranked(w, 1)
    rank = len(w.shape(x))
    mode = w.rng.choice(("constant", "constant", "reflect", "edge", "wrap"))
    axes = any_axes(w, rank)
    pads = [w.rng.choice((0, 0, 1, 2, 3, 9, -1, -2)) for _ in range(2 * len(axes))]
    if w.opset < 18:
        full = [0] * (2 * rank)
        for k, a in enumerate(axes):
            full[a % rank], full[a % rank + rank] = pads[k], pads[k + len(axes)]
        if w.opset < 11:
            w.op("Pad", [x], mode=mode, pads=full)
            return
        pads = full
    value = w.const(w.data(w.dtype(x), (), True)) if mode == "constant" and w.chance(0.5) else None
    named = [value, given(w, axes, w.rng.choice((np.int64, np.int32)), 0.9)] if w.opset >= 18 else [value]
    w.op("Pad", [x, given(w, pads, p=0.8), *named], mode=mode)


def gather_any(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    rank = len(shape)
    axis = w.rng.randrange(-rank, rank)
    n = min(max(1, a.shape[axis]) for a in w.arrays[x])
    dtype = w.rng.choice((np.int64, np.int64, np.int32))
    low = -n if w.opset >= 11 else 0
    match w.rng.choice(("Gather", "Gather", "GatherElements", "GatherND", "argmax")):
        case "Gather":
            many = w.rng.choice(((), (1,), (7,), (33,), (2, 3), (2, 1, 2), (0,)))
            at = w.draw.integers(low, n, many).astype(dtype)
            w.op("Gather", [x, w.const(at) if w.chance(0.5) else steered(w, at)], axis=axis)
        case "GatherElements":
            to = [w.rng.randint(1, 5) if k == axis % rank else w.rng.randint(0, d) for k, d in enumerate(shape)]
            at = w.draw.integers(-n, n, to).astype(dtype)
            w.op("GatherElements", [x, w.const(at) if w.chance(0.5) else steered(w, at)], axis=axis)
        case "GatherND":
            batch = w.rng.randint(0, rank - 1) if w.opset >= 12 else 0
            deep = w.rng.randint(1, rank - batch)
            lead = (*shape[:batch], *w.rng.choice(((), (1,), (3,), (2, 2))))
            least = [min(max(1, a.shape[k]) for a in w.arrays[x]) for k in range(rank)]
            cols = [w.draw.integers(-m, m, lead) for m in least[batch : batch + deep]]
            at = np.stack(cols, axis=-1).astype(np.int64)
            w.op("GatherND", [x, w.const(at) if w.chance(0.5) else steered(w, at)], batch_dims=batch or None)
        case _:
            if w.dtype(x) not in (F32, F64, I32):
                raise Rejected("no ArgMax")
            best = w.one(w.rng.choice(("ArgMax", "ArgMin")), x, axis=axis, keepdims=1)
            w.op("GatherElements", [x, best], axis=axis)


def scatter_any(w: Writer) -> None:
    """Places written at most once, unless the reduction has no order."""
    x = ranked(w, 1)
    shape = w.shape(x)
    rank = len(shape)
    if any(a.shape != shape for a in w.arrays[x]) or 0 in shape:
        raise Rejected("sizes vary")
    how = w.rng.choice((None, "none", "add", "mul", "max", "min")) if w.opset >= 18 else None
    if how == "add" and is_float(w.dtype(x)) and w.dtype(x).itemsize == 2:
        raise Rejected("sums of halves")
    if w.chance(0.5):
        axis = w.rng.randrange(-rank, rank)
        n = shape[axis]
        m = w.rng.randint(1, n)
        place = w.rng.sample(range(n), m)
        line = np.array([p - n if w.chance(0.3) else p for p in place], np.int64)
        to = [m if k == axis % rank else w.rng.randint(1, d) for k, d in enumerate(shape)]
        at = np.broadcast_to(line.reshape([-1 if k == axis % rank else 1 for k in range(rank)]), to).copy()
        updates = w.const(w.data(w.dtype(x), tuple(to), True)) if w.chance(0.5) else w.input(w.dtype(x), to)
        w.op(
            "ScatterElements", [x, w.const(at) if w.chance(0.6) else steered(w, at), updates], axis=axis, reduction=how
        )
        return
    deep = w.rng.randint(1, rank)
    cells = int(np.prod(shape[:deep]))
    flat = w.rng.sample(range(cells), w.rng.randint(1, min(cells, 6)))
    at = np.stack(np.unravel_index(flat, shape[:deep]), axis=-1).astype(np.int64)
    rest = (len(flat), *shape[deep:])
    updates = w.const(w.data(w.dtype(x), rest, True)) if w.chance(0.5) else w.input(w.dtype(x), rest)
    w.op(
        "ScatterND",
        [x, w.const(at) if w.chance(0.6) else steered(w, at), updates],
        reduction=how if w.opset >= 16 else None,
    )


def shaped_by_a_run(w: Writer) -> None:
    """Expand, Tile, Reshape, ConstantOfShape, Range to sizes that are inputs."""
    x = w.pick()
    shape = w.shape(x)
    match w.rng.choice(("Expand", "Tile", "Reshape", "ConstantOfShape", "CenterCropPad")):
        case "Expand":
            to = [w.rng.choice((2, 3, 17)) if d == 1 else d for d in shape]
            w.op("Expand", [x, given(w, [w.rng.choice((1, 2)), *to] if w.chance(0.3) else to, p=0.2)])
        case "Tile":
            w.op("Tile", [x, given(w, [w.rng.choice((0, 1, 1, 2, 3)) for _ in shape], p=0.3)])
        case "Reshape":
            to = w.rng.choice(([-1], [*shape], [*shape[::-1]], [1, -1], [*shape[:-1], -1, 1], [0] * len(shape)))
            w.op("Reshape", [x, given(w, to, p=0.3)])
        case "ConstantOfShape":
            w.op(
                "ConstantOfShape",
                [given(w, [w.rng.choice((0, 1, 2, 5, 17)) for _ in range(w.rng.randint(0, 3))], p=0.3)],
            )
        case op:
            axes = any_axes(w, len(shape))
            w.op(op, [x, given(w, [w.rng.choice((1, 2, 5, 8)) for _ in axes], p=0.7)], axes=axes)


def resize_any(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    rank = len(shape)
    how: dict[str, Any] = {
        "mode": w.rng.choice(("nearest", "nearest", "linear", "cubic")),
        "coordinate_transformation_mode": w.rng.choice(
            ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
             *(("half_pixel_symmetric",) if w.opset >= 19 else ()))
        ),
    }  # fmt: skip
    if how["mode"] == "nearest":
        how["nearest_mode"] = w.rng.choice((None, "floor", "ceil", "round_prefer_ceil", "round_prefer_floor"))
    if how["mode"] == "cubic":
        how |= {"cubic_coeff_a": w.rng.choice((None, -0.5)), "exclude_outside": w.rng.choice((None, 0, 1))}
    axes = list(range(rank))
    if w.opset >= 18 and w.chance(0.4):
        axes = any_axes(w, rank)
        how["axes"] = axes
    if w.opset >= 18 and how["mode"] != "nearest" and w.chance(0.2):
        how["antialias"] = 1
    roi = None
    if how["coordinate_transformation_mode"] == "tf_crop_and_resize":
        how["extrapolation_value"] = w.rng.choice((None, 2.5))
        ends = [w.rng.choice((0.0, 0.1, -0.2)) for _ in axes] + [w.rng.choice((1.0, 0.7, 1.2)) for _ in axes]
        roi = w.const(np.array(ends, np.float32))
    elif w.opset < 13:
        roi = w.const(np.zeros(0, np.float32))
    free = [a % rank >= rank - 2 or w.chance(0.15) for a in axes]
    if w.chance(0.5):
        to = [
            w.rng.choice((1, 2, 3, 5, 7, 2 * shape[a], 3 * shape[a])) if f else shape[a]
            for a, f in zip(axes, free, strict=True)
        ]
        if w.opset >= 18 and w.chance(0.3):
            how["keep_aspect_ratio_policy"] = w.rng.choice(("stretch", "not_larger", "not_smaller"))
        empty = w.const(np.zeros(0, np.float32)) if w.opset < 13 else None
        w.op("Resize", [x, roi, empty, given(w, to, p=0.8)], **how)
        return
    scales = [w.rng.choice((1, 2, 3, 0.5, 0.25, 1.5, 0.6, 2.3)) if f else 1 for f in free]
    w.op("Resize", [x, roi, w.const(np.array(scales, np.float32))], **how)


# --- products and windows --------------------------------------------------------------------------------------------
def conv_any(w: Writer) -> None:
    """Weights that are inputs, windows of any size, multipliers of depth, everything a transposed one has."""
    x = w.pick(lambda v: 3 <= len(w.shape(v)) <= 5 and is_float(w.dtype(v)))
    shape, dtype = w.shape(x), w.dtype(x)
    c, space = shape[1], len(shape) - 2
    kernel = [w.rng.choice((1, 1, 2, 3, 3, 4, 5, 7)) for _ in range(space)]
    attrs: dict[str, Any] = {}
    if w.chance(0.5):
        attrs["strides"] = [w.rng.choice((1, 1, 2, 3, 4)) for _ in range(space)]
    if w.chance(0.3):
        attrs["dilations"] = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    if w.chance(0.25):
        attrs["auto_pad"] = w.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"))
    elif w.chance(0.7):
        attrs["pads"] = [w.rng.choice((0, 1, 2, k // 2, k - 1, k)) for k in kernel * 2]
    if w.chance(0.6):
        attrs["kernel_shape"] = kernel
    group = w.rng.choice([g for g in (1, 1, 2, 3, 4, c, c) if g and c % g == 0] or [1])
    out = group * w.rng.choice((1, 1, 2, 3) if group > 1 else w.range.columns)
    if group > 1:
        attrs["group"] = group

    def made(of: Sequence[int]) -> str:
        return w.const(w.data(dtype, tuple(of), True)) if w.chance(0.7) else w.input(dtype, list(of))

    bias = [made([out])] if w.chance(0.6) else []
    if w.chance(0.65):
        y = w.op("Conv", [x, made([out, c // group, *kernel]), *bias], **attrs)[0]
    else:
        if w.chance(0.3):
            attrs["output_padding"] = [w.rng.choice((0, 1)) for _ in range(space)]
        if w.chance(0.15):
            attrs["output_shape"] = [d * s for d, s in zip(shape[2:], attrs.get("strides", [1] * space), strict=True)]
        y = w.op("ConvTranspose", [x, made([c, out // group, *kernel]), *bias], **attrs)[0]
    if w.chance(0.4):
        w.op(w.rng.choice(("Relu", "LeakyRelu", "HardSwish", "Sigmoid", "Tanh")), [y])


def pool_any(w: Writer) -> None:
    x = w.pick(lambda v: 3 <= len(w.shape(v)) <= 5)
    space = len(w.shape(x)) - 2
    op = w.rng.choice(("MaxPool", "AveragePool", "LpPool"))
    kernel = [w.rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(space)]
    attrs: dict[str, Any] = {"kernel_shape": kernel}
    if w.chance(0.7):
        attrs["strides"] = [w.rng.choice((1, 2, 3, 4)) for _ in range(space)]
    if w.chance(0.25):
        attrs["auto_pad"] = w.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif w.chance(0.6):
        attrs["pads"] = [w.rng.randint(0, k - 1) for k in kernel * 2]
    if ((op == "MaxPool" and w.opset >= 10) or w.opset >= 19) and w.chance(0.3):
        attrs["dilations"] = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    if w.opset >= (18 if op == "LpPool" else 10) and w.chance(0.35):
        attrs["ceil_mode"] = 1
    if op == "AveragePool":
        attrs["count_include_pad"] = w.rng.choice((None, 0, 1))
    if op == "MaxPool" and w.opset >= 8:
        attrs["storage_order"] = w.rng.choice((None, None, 0, 1))
    if op == "LpPool":
        attrs["p"] = w.rng.choice((None, 1, 2, 3))
    count = w.rng.choice((1, 1, 2)) if op == "MaxPool" and w.opset >= 8 else 1
    y = w.op(op, [x], count, **attrs)[0]
    if w.chance(0.3):
        w.op("Relu" if is_float(w.dtype(y)) else "Identity", [y])


def matmul_any(w: Writer) -> None:
    """Batches that broadcast either way, long sums, rows and columns, both sides from a run."""
    x = w.pick(lambda v: len(w.shape(v)) >= 1 and w.dtype(v) in (F32, F32, F64, F16, I32, I64))
    shape, dtype = w.shape(x), w.dtype(x)
    if w.chance(0.2):
        x, shape = w.one("Transpose", x, perm=w.rng.sample(range(len(shape)), len(shape))), ()
        shape = w.shape(x)
    batch = [d if w.chance(0.5) else 1 if w.chance(0.7) or d != 1 else 3 for d in shape[:-2]]
    batch = batch[w.rng.randint(0, len(batch)) :] if w.chance(0.3) else batch
    batch = [2, *batch] if w.chance(0.1) else batch
    n = w.rng.choice(w.range.columns)
    right = w.chance(0.7) or len(shape) < 2
    sides = [shape[-1], n] if right else [n, shape[-2]]
    if right and w.chance(0.1):
        batch, sides = [], [shape[-1]]
    of = (*batch, *sides)
    y = w.const(w.data(dtype, of, True)) if w.chance(0.5) else w.input(dtype, [w.dim(d, 0.3) for d in of])
    if len(of) > 1 and w.chance(0.3):
        rank = len(of)
        swap = [*range(rank - 2), rank - 1, rank - 2]
        y = w.one("Transpose", w.input(dtype, [of[k] for k in swap]), perm=swap)
    made = w.one("MatMul", *((x, y) if right else (y, x)))
    if w.chance(0.4):
        w.op(w.rng.choice(("Relu", "Sigmoid", "Neg", "Abs")), [made])


def einsum_any(w: Writer) -> None:
    """One to three operands, diagonals, an ellipsis, results left implicit."""
    size: dict[str, int] = {}
    terms, names = [], []
    dtype = w.rng.choice((F32, F32, F64, I32))
    for _ in range(w.rng.choice((1, 2, 2, 3))):
        letters = "".join(w.rng.choice("abcdijk") for _ in range(w.rng.randint(1, 4)))
        if w.chance(0.75):
            letters = "".join(dict.fromkeys(letters))
        for letter in letters:
            size.setdefault(letter, w.rng.choice((1, 2, 3, 5, 8, 17)))
        if np.prod([*size.values()]) > w.range.largest:
            raise Rejected("onnxruntime would write the products of all pairs")
        extra = w.rng.choice(((2,), (2, 3), (3,), ())) if w.chance(0.15) else None
        terms.append(("..." if extra is not None else "") + letters)
        dims: list[int | str] = [*(extra or ()), *(size[letter] for letter in letters)]
        x = w.input(dtype, [w.dim(int(d), 0.3) for d in dims])
        names.append(w.one("Neg", x) if w.chance(0.3) else x)
    seen = sorted(set("".join(terms)) - {"."})
    out = "".join(w.rng.sample(seen, w.rng.randint(0, min(4, len(seen)))))
    if any("..." in t for t in terms):
        out = "..." + out
    w.op("Einsum", names, equation=",".join(terms) + ("" if w.chance(0.15) else f"->{out}"))


# --- quantised -------------------------------------------------------------------------------------------------------
def steps(w: Writer, dtype: np.dtype, shape: Shape = ()) -> list[str]:
    """A scale and a zero point."""
    scale = w.draw.uniform(0.02, 0.2, shape).astype(np.float32)
    info = np.iinfo(dtype)
    zero = w.draw.integers(max(info.min, -20), min(info.max, 20), shape).astype(dtype)
    if w.chance(0.4):
        zero = np.zeros(shape, dtype)
    return [w.const(scale), w.const(zero)]


def small(w: Writer, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """Any integers of a narrow type."""
    info = np.iinfo(dtype)
    return w.draw.integers(max(info.min, -128), min(info.max, 255) + 1, tuple(shape)).astype(dtype)


def quantize_any(w: Writer) -> None:
    """There and back, by one scale, by the slices of an axis or by blocks of it."""
    x = w.pick(lambda v: w.dtype(v) == F32)
    shape = w.shape(x)
    kinds = (U8, I8) if w.opset < 21 else (U8, I8, U16, I16)
    dtype = w.rng.choice(kinds)
    axis: int | None = None
    by: Shape = ()
    block: int | None = None
    if shape and w.opset >= 13 and w.chance(0.4):
        axis = w.rng.randrange(-len(shape), len(shape))
        by = (shape[axis],)
        if w.opset >= 21 and w.chance(0.4) and shape[axis]:
            block = w.rng.choice((1, 2, 3, 16))
            axis %= len(shape)
            by = tuple(-(-d // block) if k == axis else d for k, d in enumerate(shape))
    p = steps(w, dtype, by)
    how: dict[str, Any] = {"axis": axis, "block_size": block}
    q = w.op("QuantizeLinear", [x, *(p if w.chance(0.8) else p[:1] if dtype == U8 else p)], **how)[0]
    if w.dtype(q) != dtype:
        p = steps(w, w.dtype(q), by)
    y = w.op("DequantizeLinear", [q, *p], **how)[0]
    if w.chance(0.5):
        z = w.op(w.rng.choice(("Relu", "Sigmoid", "Neg", "Tanh")), [y])[0]
        w.op("QuantizeLinear", [z, *steps(w, dtype)])


def quantised_products(w: Writer) -> None:
    a, b = w.rng.choice((U8, U8, I8)), w.rng.choice((I8, U8))
    match w.rng.choice(("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv", "qdq matmul", "qdq conv")):
        case "MatMulInteger" | "QLinearMatMul" as op:
            m, k, n = (w.rng.choice(w.range.columns) for _ in range(3))
            lead: list[int] = w.rng.choice(([], [2], [2, 1]))
            x = w.input(a, [*(w.dim(d) for d in (*lead, m)), k], small(w, a, (*lead, m, k)))
            y = w.const(small(w, b, (k, n))) if w.chance(0.7) else w.input(b, [k, n], small(w, b, (k, n)))
            if op == "MatMulInteger":
                zeros = [w.const(small(w, a, ())), w.const(small(w, b, w.rng.choice(((), (1,), (n,)))))]
                w.op(op, [x, y, *zeros[: w.rng.randint(0, 2)]])
                return
            per = w.rng.choice(((), (), (n,)))
            w.op(op, [x, *steps(w, a), y, *steps(w, b, per), *steps(w, a)])
        case "ConvInteger" | "QLinearConv" as op:
            attrs, x, y, out, _ = _conv_of_steps(w, a, b)
            if op == "ConvInteger":
                zeros = [w.const(small(w, a, ())), w.const(small(w, b, w.rng.choice(((), (out,)))))]
                w.op(op, [x, y, *zeros[: w.rng.randint(0, 2)]], **attrs)
                return
            bias = [w.const(w.draw.integers(-900, 900, out).astype(np.int32))] if w.chance(0.6) else []
            w.op(op, [x, *steps(w, a), y, *steps(w, b, w.rng.choice(((), (out,)))), *steps(w, a), *bias], **attrs)
        case "qdq matmul":
            m, k, n = (w.rng.choice(w.range.columns) for _ in range(3))
            x = w.one("DequantizeLinear", w.input(a, [w.dim(m), k], small(w, a, (m, k))), *steps(w, a))
            y = w.one("DequantizeLinear", w.const(small(w, I8, (k, n))), *steps(w, I8))
            w.one("QuantizeLinear", w.one("MatMul", x, y), *_coarse(w, a))
        case _:
            attrs, x, y, out, _ = _conv_of_steps(w, a, I8)
            x, y = w.one("DequantizeLinear", x, *steps(w, a)), w.one("DequantizeLinear", y, *steps(w, I8))
            z = w.op("Conv", [x, y], **attrs)[0]
            if w.chance(0.5):
                z = w.one("Relu", z)
            w.one("QuantizeLinear", z, *_coarse(w, a))


def _coarse(w: Writer, dtype: np.dtype) -> list[str]:
    return [w.const(np.array(w.rng.choice((0.5, 1.7)), np.float32)), w.const(np.array(3, dtype))]


def _conv_of_steps(w: Writer, a: np.dtype, b: np.dtype) -> tuple[dict[str, Any], str, str, int, int]:
    space = w.rng.choice((1, 2, 2, 2, 3))
    group = w.rng.choice((1, 1, 2, 4))
    c, out = group * w.rng.choice((1, 2, 3, 8)), group * w.rng.choice((1, 2, 5, 8))
    kernel = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    attrs: dict[str, Any] = {"group": group, "strides": [w.rng.choice((1, 1, 2)) for _ in range(space)]}
    if w.chance(0.5):
        attrs["pads"] = [w.rng.choice((0, 1)) for _ in range(2 * space)]
    sizes = [w.rng.choice((4, 5, 7, 9)) for _ in range(space)]
    shape = (w.rng.choice((1, 2)), c, *sizes)
    x = w.input(a, [w.dim(shape[0]), c, *sizes], small(w, a, shape))
    return attrs, x, w.const(small(w, b, (out, c // group, *kernel))), out, c


# --- sequences of states, choices ------------------------------------------------------------------------------------
def recurrent(w: Writer) -> None:
    op = w.rng.choice(("LSTM", "LSTM", "RNN", "GRU"))
    gates = {"LSTM": 4, "RNN": 1, "GRU": 3}[op]
    seq, batch, inner, hidden = (
        w.rng.choice(c) for c in ((1, 2, 5, 9), (1, 1, 2, 3), (1, 3, 8, 17), (1, 2, 8, 17, 32))
    )
    direction = w.rng.choice(("forward", "reverse", "bidirectional"))
    d = 2 if direction == "bidirectional" else 1
    dtype = w.rng.choice((F32, F32, F32, F64))
    layout = w.rng.choice((0, 0, 0, 1)) if w.opset >= 14 else 0

    def weight(*shape: int) -> str:
        array = (w.draw.standard_normal(shape) * 0.4).astype(dtype)
        return w.const(array) if w.chance(0.85) else w.input(dtype, list(shape), array)

    dims = [w.dim(batch, 0.3), w.dim(seq, 0.4)] if layout else [w.dim(seq, 0.4), w.dim(batch, 0.3)]
    x = w.input(dtype, [*dims, inner])
    state = [batch, d, hidden] if layout else [d, batch, hidden]
    inputs: list[str | None] = [x, weight(d, gates * hidden, inner), weight(d, gates * hidden, hidden)]
    inputs.append(weight(d, 2 * gates * hidden) if w.chance(0.6) else None)
    lengths = w.draw.integers(1, seq + 1, batch).astype(np.int32)
    inputs.append(steered(w, lengths) if w.chance(0.25) else None)
    inputs.append(weight(*state) if w.chance(0.4) else None)
    if op == "LSTM":
        inputs.append(weight(*state) if w.chance(0.4) else None)
        inputs.append(weight(d, 3 * hidden) if w.chance(0.2) else None)
    how: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": direction if direction != "forward" or w.chance(0.5) else None,
        "clip": w.rng.choice((None, None, None, 0.7)),
        "layout": layout or None,
    }
    if op == "LSTM":
        how["input_forget"] = w.rng.choice((None, None, None, 1))
    if op == "GRU":
        how["linear_before_reset"] = w.rng.choice((None, 0, 1))
    if w.chance(0.2):
        per = {"LSTM": 3, "RNN": 1, "GRU": 2}[op] * d
        how["activations"] = [w.rng.choice(("Tanh", "Sigmoid", "Relu")) for _ in range(per)]
    out = [w.name("v") for _ in range(3 if op == "LSTM" else 2)]
    kept = [o if w.chance(0.7) else "" for o in out]
    if not any(kept):
        kept[0] = out[0]
    while not kept[-1]:
        kept.pop()
    while inputs and inputs[-1] is None:
        inputs.pop()
    node = helper.make_node(
        op, ["" if v is None else v for v in inputs], kept, **{k: v for k, v in how.items() if v is not None}
    )
    w.commit(node)


def attention_any(w: Writer) -> None:
    if w.opset < 23:
        raise Rejected("none yet")
    dtype = w.rng.choice((F32, F32, F32, F64, F16))
    heads, groups = w.rng.choice(((1, 1), (2, 2), (4, 2), (6, 3), (8, 1), (3, 3)))
    b, s, t = w.rng.choice((1, 2)), w.rng.choice((1, 2, 5, 17, 33)), w.rng.choice((1, 3, 5, 17, 40))
    size, wide = w.rng.choice((1, 4, 8, 16, 20)), w.rng.choice((1, 4, 8, 17))
    deep = w.chance(0.6)
    shapes: list[Shape] = [(b, heads, s, size), (b, groups, t, size), (b, groups, t, wide)]
    if not deep:
        shapes = [(n[0], n[2], n[1] * n[3]) for n in shapes]
    names = [w.input(dtype, [w.dim(d, 0.3) if k in (0, len(n) - 2) else d for k, d in enumerate(n)]) for n in shapes]
    how: dict[str, Any] = {} if deep else {"q_num_heads": heads, "kv_num_heads": groups}
    how["is_causal"] = w.rng.choice((None, 0, 1))
    how["scale"] = w.rng.choice((None, None, 0.3))
    how["softcap"] = w.rng.choice((None, None, 2.0))
    mask = None
    past = w.rng.choice((0, 0, 0, 4))
    if w.chance(0.5):
        of = w.rng.choice(
            ((s, t + past), (1, t + past), (b, 1, s, t + past), (b, heads, s, t + past), (1, 1, s, t + past))
        )
        kind = w.rng.choice((BOOL, dtype))
        first = w.data(kind, of, True)
        if kind == BOOL:
            first[..., 0] = True
        mask = steered(w, first) if w.chance(0.6) else w.const(first)
    inputs: list[str | None] = [*names, mask]
    count = 1
    if past:
        inputs += [w.input(dtype, [b, groups, past, n]) for n in (size, wide)]
        count = 3
    w.op("Attention", inputs, count, **how)


def choice_any(w: Writer) -> None:
    """TopK, ArgMax, CumSum, OneHot, ReverseSequence, Unique, Trilu in all their forms."""
    x = ranked(w, 1)
    shape = w.shape(x)
    rank = len(shape)
    axis = w.rng.randrange(-rank, rank)
    match w.rng.choice(("TopK", "ArgMax", "ArgMin", "CumSum", "OneHot", "ReverseSequence", "Trilu", "Compress")):
        case "TopK":
            if w.opset < 11:
                raise Rejected("sorted, largest")
            k = given(w, [w.rng.randint(0, shape[axis])])
            w.op("TopK", [x, k], 2, axis=axis, largest=w.rng.choice((0, 1)), sorted=1)
        case "ArgMax" | "ArgMin" as op:
            chosen = some(w, op)
            if w.opset < 12:
                chosen.pop("select_last_index", None)
            w.op(op, [x], axis=axis, **chosen)
        case "CumSum":
            w.op("CumSum", [x, given(w, axis, w.rng.choice((np.int64, np.int32)), 0.8)], **some(w, "CumSum"))  # type: ignore[arg-type]
        case "OneHot":
            depth = w.rng.choice((1, 4, 17))
            dtype = w.rng.choice((np.int64, np.int32, np.float32))
            at = w.draw.integers(-depth - 1, depth + 2, w.rng.choice(((), (3,), (2, 5)))).astype(dtype)
            values = w.const(w.data(w.rng.choice((F32, I64)), (2,), True))
            w.op(
                "OneHot",
                [steered(w, at), given(w, [depth], p=0.7), values],
                axis=w.rng.randrange(-at.ndim - 1, at.ndim + 1),
            )
        case "ReverseSequence":
            time, batch = w.rng.choice(((0, 1), (1, 0)))
            if rank < 2:
                raise Rejected("rank")
            lengths = w.draw.integers(1, shape[time] + 1, shape[batch])
            w.op("ReverseSequence", [x, given(w, lengths, p=0.5)], time_axis=time, batch_axis=batch)  # type: ignore[arg-type]
        case "Trilu":
            k = given(w, w.rng.choice((-9, -1, 0, 1, 2, 40)), p=0.5)  # type: ignore[arg-type]
            w.op("Trilu", [x, k], upper=w.rng.choice((0, 1)))
        case _:
            keep = w.draw.integers(0, 2, shape[axis]).astype(np.bool_)
            w.op("Compress", [x, steered(w, keep)], axis=axis)


def integers(w: Writer) -> None:
    """Arithmetic that wraps, on both sides of every width."""
    kind = w.rng.choice(("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"))
    dtype = np.dtype(kind)
    info = np.iinfo(dtype)
    shape = [w.rng.choice(w.range.extents) for _ in range(w.rng.choice((1, 1, 2)))]
    if np.prod(shape) > w.range.largest // 4:
        raise Rejected("large")
    edge = w.draw.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    x = w.input(dtype, [w.dim(d, 0.4) for d in shape], edge)
    for _ in range(w.rng.randint(1, 4)):
        op = w.rng.choice(("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Neg", "Abs", "Sign", "Pow", "BitShift",
                           "BitwiseXor", "BitwiseNot", "Clip", "Cast", "Equal", "Less", "Where"))  # fmt: skip
        y = w.const(
            w.draw.integers(
                info.min, info.max, w.rng.choice((tuple(shape), tuple(shape[-1:]), ())), dtype=dtype, endpoint=True
            )
        )
        match op:
            case "Neg" | "Abs" | "Sign" | "BitwiseNot":
                made = w.op(op, [x])[0]
            case "Clip":
                made = w.op(op, [x, w.number(1, dtype), w.number(100, dtype)])[0]
            case "Pow":
                made = w.op(op, [x, w.number(w.rng.choice((0, 1, 2, 3)), dtype)])[0]
            case "BitShift":
                by = w.draw.integers(0, dtype.itemsize * 8, shape[-1:]).astype(dtype)
                made = w.op(op, [x, w.const(by)], direction=w.rng.choice(("LEFT", "RIGHT")))[0]
            case "Cast":
                made = w.op(op, [x], to=w.rng.choice((1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13)))[0]
                w.op("Cast", [made], to=w.rng.choice((1, 6, 7)))
                continue
            case "Where":
                made = w.op(op, [w.one("Greater", x, y), y, x])[0]
            case _:
                made = w.op(op, [x, y] if w.chance(0.7) else [y, x], **some(w, op))[0]
        if w.dtype(made) == dtype:
            x = made


def softmax_any(w: Writer) -> None:
    x = real(w, 1)
    rank = len(w.shape(x))
    w.op(w.rng.choice(("Softmax", "Softmax", "LogSoftmax", "Hardmax")), [x], axis=w.rng.randrange(-rank, rank))


def normalized(w: Writer) -> None:
    """Layer norms whose axes are counted from the end, scales that a run gives and that broadcast."""
    x = real(w, 1)
    shape, dtype = w.shape(x), w.dtype(x)
    rank = len(shape)
    axis = w.rng.randrange(-rank, rank)
    of = shape[axis:] if axis else shape
    of = tuple(1 if w.chance(0.1) else d for d in of)
    op = w.rng.choice(("LayerNormalization", "RMSNormalization"))

    def row() -> str:
        first = w.data(dtype, of, True)
        return w.const(first) if w.chance(0.6) else w.input(dtype, list(of), first)

    bias = [row()] if op[0] == "L" and w.chance(0.7) else []
    w.op(op, [x, row(), *bias], axis=axis, epsilon=w.rng.choice((None, 1e-3)))


MORE: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (slice_any, 3),
    (squeeze_any, 1),
    (split_any, 1.5),
    (reduce_any, 3),
    (pad_any, 1.5),
    (gather_any, 2),
    (scatter_any, 1.5),
    (shaped_by_a_run, 1.5),
    (resize_any, 1.5),
    (conv_any, 3),
    (pool_any, 2),
    (matmul_any, 3),
    (einsum_any, 1),
    (quantize_any, 1.5),
    (quantised_products, 2),
    (recurrent, 1),
    (attention_any, 1),
    (choice_any, 1.5),
    (integers, 2),
    (softmax_any, 1),
    (normalized, 1),
)
