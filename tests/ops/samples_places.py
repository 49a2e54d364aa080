"""Samples of entries that pick, move or collect elements by their places."""

from __future__ import annotations

import numpy as np

from tests.ops.samples import (
    BF16,
    BOOL,
    DTYPES,
    F16,
    F32,
    F64,
    I32,
    I64,
    INTS,
    U8,
    floats,
    ints,
    rand,
    rows,
    sample,
)


@rows("OneHot")
def _onehot(op, opset):
    for axis in (-1, 0, 1):
        yield sample(np.int64([[0, 1], [2, 0]]), np.int64(3), floats(0, 1), const=[1], axis=axis)
        for kind in (I32, I64, F32):  # out of range is off; negative counts from the end
            picks = np.array([0, -1, -4, 3, 2, -3, 7], kind)
            yield sample(picks, np.int64(3), floats(0.5, 2), const=[1], may=kind != I64, axis=min(axis, 0))
    for dtype in (F32, F64, F16, BF16, *INTS, BOOL):
        yield sample(ints(0, 7, 8), np.array([12], I64), np.array([0, 1], dtype), const=[1], may=True)
    for depth in (np.float32(5), np.array([5], I32)):
        yield sample(ints(0, 7, 4), depth, np.array([3, 4], I64), const=[1], may=True)


@rows("CenterCropPad")
def _center_crop_pad(op, opset):
    for shape in ((5, 6, 3), (4, 9, 3)):
        for size in ((5, 6, 3), (3, 3, 3), (10, 7, 3), (4, 13, 4), (1, 1, 1), (0, 2, 2)):
            yield sample(rand(shape), ints(*size), const=[1])
            yield sample(rand(shape), ints(*size[1:]), const=[1], axes=[0, 1])
        yield sample(rand(shape), ints(7, 2), const=[1], axes=[-3, -2])
    for dtype in DTYPES:
        yield sample(rand((3, 8), dtype), ints(5, 5), const=[1], may=True)


@rows("ReverseSequence")
def _reversesequence(op, opset):
    yield sample(rand((4, 3)), ints(1, 2, 3))
    yield sample(rand((4, 3)), ints(1, 4, 0), const=[1])
    for dtype in DTYPES:
        for batch, time in ((0, 1), (1, 0)):
            x, lengths = rand((4, 4, 2), dtype), ints(1, 0, 3, 4)
            yield sample(x, lengths, const=[1], may=dtype not in (F32, I64), batch_axis=batch, time_axis=time)


@rows("GatherND")
def _gathernd(op, opset):
    data = rand((2, 3, 4))
    yield sample(data, np.array([[0, 1], [1, 2]], np.int64))
    yield sample(data, np.array([[[0]], [[1]]], np.int64))
    yield sample(data, np.array([[0, 1, 3]], np.int64))
    if opset >= 12:
        yield sample(data, np.array([[1], [2]], np.int64), batch_dims=1)


@rows("CumSum", "CumProd")
def _running(op, opset):
    for axis in (0, 1, -1):
        for exclusive in (0, 1):
            for reverse in (0, 1):
                x = rand((2, 5), lo=0.5)
                yield sample(x, np.int64(axis), const=[1], exclusive=exclusive, reverse=reverse)
    for dtype in DTYPES:
        x = rand((4, 3, 2), dtype, lo=1)
        yield sample(x, np.array([1], np.int32), const=[1], may=True)
    yield sample(np.array([1, np.inf, -np.inf, np.nan, 2], F32), np.int64(0), const=[1])
    yield sample(rand((3, 70)), np.int64(1), const=[1], may=True)
    for shape in ((2, 0), (0, 3), (1,)):
        yield sample(rand(shape), np.int64(0), const=[1], may=True)


def _updates(shape, dtype=F32):
    return rand(shape, dtype, "updates", 1, 5)


@rows("ScatterElements", "Scatter")
def _scatterelements(op, opset):
    data = rand((3, 4))
    yield sample(data, np.int64([[0, 2]]), _updates((1, 2)))
    yield sample(data, np.int64([[0, 2, 1]]), _updates((1, 3)), const=[1])
    yield sample(data, np.int64([[1, 3, 0], [2, 1, 3]]), _updates((2, 3)), const=[1], axis=1)
    yield sample(data, np.zeros((0, 4), I64), _updates((0, 4)), const=[1])
    if opset >= 11:
        yield sample(data, np.int64([[1, -3], [-1, 0]]), _updates((2, 2)), const=[1], axis=-1)
    for dtype in DTYPES:
        yield sample(rand((3, 3), dtype), np.int32([[2, 0]]), _updates((1, 2), dtype), const=[1], may=dtype != F32)
    if op.name == "Scatter":
        return
    meeting = np.int64([[1, 1], [0, 3], [2, 2]])
    for reduction in ("none", "add", "mul", "max", "min"):
        if reduction == "none" or opset >= (16 if reduction in ("add", "mul") else 18):
            for dtype in (F32, F64, I64, F16, I32, U8):
                x = _updates((3, 4), dtype)
                attrs = {} if reduction == "none" else {"reduction": reduction}
                yield sample(x, meeting, _updates((3, 2), dtype), const=[1], may=dtype != F32, axis=1, **attrs)


@rows("ScatterND")
def _scatternd(op, opset):
    yield sample(rand((4, 3)), np.int64([[0], [2]]), _updates((2, 3)))
    data = rand((4, 3, 2))
    yield sample(
        data,
        np.int64([[3], [1], [-4]]) if opset >= 13 else np.int64([[3], [1]]),
        _updates((3, 3, 2) if opset >= 13 else (2, 3, 2)),
        const=[1],
    )
    yield sample(data, np.int64([[0, 1], [3, 2]]), _updates((2, 2)), const=[1])
    yield sample(data, np.int64([[0, 1, 1], [3, 2, 0], [0, 0, 0]]), _updates((3,)), const=[1])
    yield sample(data, np.int64([[[0, 1], [1, 2]], [[2, 0], [3, 1]]]), _updates((2, 2, 2)), const=[1])
    yield sample(data, np.zeros((0, 1), I64), _updates((0, 3, 2)), const=[1])
    for dtype in DTYPES:
        yield sample(rand((3, 3), dtype), np.int64([[2], [0]]), _updates((2, 3), dtype), const=[1], may=dtype != F32)
    for reduction in ("add", "mul", "max", "min"):
        if opset >= (16 if reduction in ("add", "mul") else 18):
            for dtype in (F32, F64, I64, F16, I32, U8):
                x = _updates((4, 3), dtype)
                given = _updates((4, 3), dtype)
                picks = np.int64([[1], [3], [1], [1]])
                yield sample(x, picks, given, const=[1], may=dtype != F32, reduction=reduction)


@rows("Col2Im")
def _col2im(op, opset):
    for image, block, attrs in (
        ((5, 5), (1, 5), {}),
        ((5, 5), (3, 3), {"strides": [2, 2]}),
        ((6, 6), (1, 5), {"pads": [1, 2, 0, 1]}),
        ((6, 6), (2, 2), {"dilations": [1, 5], "strides": [2, 1]}),
        ((4, 5, 3), (1, 2, 3), {}),
        ((7,), (3,), {"strides": [2]}),
    ):
        n = len(image)
        stride, dilation = attrs.get("strides", [1] * n), attrs.get("dilations", [1] * n)
        pads = attrs.get("pads", [0] * (2 * n))
        steps = [
            (image[k] + pads[k] + pads[n + k] - dilation[k] * (block[k] - 1) - 1) // stride[k] + 1 for k in range(n)
        ]
        x = rand((2, 3 * int(np.prod(block)), int(np.prod(steps))))
        for dtype in (F32, F64, F16) if n == 2 else (F32,):
            yield sample(x.astype(dtype), ints(*image), ints(*block), const=[1, 2], may=dtype != F32, **attrs)


@rows("Det")
def _det(op, opset):
    for n in (1, 2, 3, 4):
        for lead in ((), (2,), (2, 3)):
            for dtype in (F32, F64, F16):
                yield sample(rand((*lead, n, n), dtype), may=dtype != F32 or opset < 11)


@rows("AffineGrid")
def _affine_grid(op, opset):
    for size in ((2, 3, 5, 6), (2, 3, 1, 4), (2, 1, 4, 5, 6)):
        n = len(size) - 2
        for aligned in (0, 1):
            for dtype in (F32, F64):
                yield sample(
                    rand((2, n, n + 1), dtype), ints(*size), const=[1], may=dtype != F32, align_corners=aligned
                )


@rows("DFT")
def _dft(op, opset):
    def transform(x, length, axis, **attrs):
        size = None if length is None else np.int64(length)
        if opset >= 20:
            return sample(x, size, np.int64(axis), const=[1, 2] if length else [2], **attrs)
        return sample(x, *([] if length is None else [size]), const=[1] if length else [], axis=axis, **attrs)

    for n in (1, 2, 5, 8, 12):
        for parts in (1, 2):
            for axis in (0, 1, -2):
                for length in (None, n + 3, max(n - 2, 1)):
                    x = rand((n, n, 3, parts) if axis != -2 else (3, n, parts))
                    yield transform(x, length, axis)
                    yield transform(x, length, axis, inverse=1)
                    if parts == 1:
                        yield transform(x, length, axis, onesided=1)
    for dtype in (F64, F16):
        yield transform(rand((2, 6, 1), dtype), None, 1, may=dtype != F64)
    for n in (5, 8, 12):  # spectra of real numbers, and halves of spectra that are of none
        whole = np.fft.rfft(rand((2, n)))
        spectrum = np.stack([whole.real, whole.imag], -1).astype(F32)
        for length in (None, n, n + 2):
            yield transform(spectrum, length, 1, may=True, inverse=1, onesided=1)
            yield transform(rand((2, n, 2)), length, 1, may=True, inverse=1, onesided=1)
