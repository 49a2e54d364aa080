"""Fourier transforms of few elements, as products with a matrix of twiddle factors.

onnxruntime's kernel runs element by element, and for lengths that are no power of two it works out longer transforms. A
product with a matrix small enough for the cache is faster for every number of rows.
"""

from __future__ import annotations

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.types import TensorType, tensor
from onnxfuse.ops.contract import MatMul
from onnxfuse.ops.dsl import Tensor, axis_of
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.table import composite
from onnxfuse.ops.view import Reshape, Slice, Transpose

MOST_FACTORS = 1 << 17  # of the matrix: more cost a single row more than onnxruntime's kernel
# Of a transform whose length is no power of two: onnxruntime's error grows with the length (1.2e-4 at 60, where the
# product's is 4e-6, and 1.8e-3 at 400), until the two no longer agree within the tolerance.
MOST_UNEVEN = 64


def _factors(length: int, given: int, parts: int, inverse: bool, onesided: bool) -> np.ndarray:
    """The matrix [given * parts, made * parts of the result]; `length` is that of the transform.

    An inverse onesided transform takes the first half of a spectrum, whose other half mirrors it, to real numbers.
    """
    half, real = length // 2 + 1, inverse and onesided
    made = half if onesided and not inverse else length
    turn = 2 * np.pi * (np.outer(np.arange(given), np.arange(made)) % length) / length
    cos, sin = np.cos(turn), np.sin(turn) if inverse else -np.sin(turn)
    if real:
        twice = np.where((np.arange(given) == 0) | (2 * np.arange(given) == length), 1, 2)[:, None]
        cos, sin = cos * twice, sin * twice
    rows = [np.stack([cos, sin], axis=-1)]  # what a real part adds to (real, imaginary)
    if parts == 2:
        rows.append(np.stack([-sin, cos], axis=-1))
    table = np.stack(rows, axis=1)[..., : 1 if real else 2]
    return table.reshape(given * parts, -1) / (length if inverse else 1)


def _sizes(
    x: Tensor | GraphTensor, k: int, dft_length: Tensor | GraphTensor | None, inverse: bool, onesided: bool
) -> tuple[int, int, int]:
    """Elements taken of the axis, length of the transform, elements made. Raises Unsupported unless they are known."""
    given, parts = x.shape[k], x.shape[-1]
    if k == x.rank - 1 or parts not in (1, 2):
        raise Unsupported("UN_SHAPE_MISMATCH", f"a transform along axis {k} of {x.type}")
    if not isinstance(given, int) or given < 1:
        raise Unsupported("UN_DATA_DEPENDENT", f"a transform of {given} elements")
    whole = 2 * (given - 1) if inverse and onesided else given
    length = whole if dft_length is None else dft_length.ints()[0]
    if length < 1:
        raise Unsupported("UN_SHAPE_MISMATCH", f"a transform of length {length}")
    half = length // 2 + 1
    if inverse and onesided and given != half:
        raise Unsupported("UN_ATTR", f"{given} elements as half the spectrum of {length}")
    return min(given, length), length, half if onesided and not inverse else length


def _transform(x: GraphTensor, dft_length: GraphTensor | None, axis: int, inverse: int, onesided: int) -> GraphTensor:
    k = axis_of(axis, x.rank)
    if x.dtype not in (DType.F32, DType.F64):
        raise Unsupported("UN_DTYPE", f"a transform of {x.dtype} is not implemented")
    used, length, made = _sizes(x, k, dft_length, bool(inverse), bool(onesided))
    parts = x.shape[-1]
    assert isinstance(parts, int)
    if onesided and not inverse and parts == 2:
        raise Unsupported("UN_ATTR", "half the transform of complex numbers")
    if onesided and inverse and parts == 1:
        raise Unsupported("UN_ATTR", "the inverse of half a transform without imaginary parts")
    results = 1 if inverse and onesided else 2
    factors, uneven = used * parts * made * results, length & (length - 1) != 0
    if factors > MOST_FACTORS or (uneven and length > MOST_UNEVEN):
        raise Unsupported("UN_OPAQUE", f"a transform of {length} elements, with {factors} factors")
    if used != x.shape[k]:
        x = Slice(x, starts=[0], ends=[used], axes=[k])
    rest = [n for n in range(x.rank - 1) if n != k]
    order = [*rest, k, x.rank - 1]
    moved = order != list(range(x.rank))
    rows = Reshape(Transpose(x, perm=order) if moved else x, shape=[*[0] * len(rest), used * parts])
    table = x.builder.constant(_factors(length, used, parts, bool(inverse), bool(onesided)), x.dtype)
    y = Reshape(MatMul(rows, table), shape=[*[0] * len(rest), made, results])
    return Transpose(y, perm=[order.index(n) for n in range(x.rank)]) if moved else y


def _made(x: Tensor, dft_length: Tensor | None, axis: int, inverse: int, onesided: int) -> TensorType:
    k = axis_of(axis, x.rank)
    _, _, made = _sizes(x, k, dft_length, bool(inverse), bool(onesided))
    return tensor(x.dtype, [*x.shape[:k], made, *x.shape[k + 1 : -1], 1 if inverse and onesided else 2])


def _types_17(x, dft_length=None, *, axis=1, inverse=0, onesided=0):
    return _made(x, dft_length, axis, inverse, onesided)


def _types(x, dft_length=None, axis=None, *, inverse=0, onesided=0):
    return _made(x, dft_length, -2 if axis is None else axis.ints()[0], inverse, onesided)


@composite(name="DFT", since=17, types=_types_17)
def DFT_17(x, dft_length=None, *, axis=1, inverse=0, onesided=0):
    """Discrete Fourier transform along an axis; real and imaginary parts are the last dimension."""
    return _transform(x, dft_length, axis, inverse, onesided)


@composite(since=20, types=_types)
def DFT(x, dft_length=None, axis=None, *, inverse=0, onesided=0):
    """Discrete Fourier transform along an axis; real and imaginary parts are the last dimension."""
    return _transform(x, dft_length, -2 if axis is None else axis.ints()[0], inverse, onesided)
