"""Known and never fused: name and reason, and for many the types of the results (`@shaped`)."""

from __future__ import annotations

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.ops.dsl import Tensor, axis_of, broadcast_shape
from onnxfuse.ops.table import opaque, shaped

_DATA = "the output shape or order depends on data"
_CONTROL = "control flow; what its bodies hold is optimized with --include-subgraph only"
_MAPPED = "control flow; the body is kept as it is"
_RANDOM = "random; must not be moved or merged"
_CONTAINER = "not a dense tensor"
_STRING = "strings stay with the runtime"
_SCATTER = "writes through run-time indices"
_SIGNAL = "transforms stay with the runtime"
_TODO = "no loop definition yet"

_ROWS: tuple[tuple[str, str], ...] = (
    *((n, _DATA) for n in ("NonZero", "Unique", "Compress", "NonMaxSuppression", "Multinomial")),
    *((n, _CONTROL) for n in ("If", "Loop", "Scan")),
    ("SequenceMap", _MAPPED),
    *((n, _RANDOM) for n in ("RandomNormal", "RandomUniform")),
    *((n, _CONTAINER) for n in (
        "SequenceConstruct", "SequenceAt", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceLength",
        "SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement",
    )),
    *((n, _STRING) for n in (
        "StringNormalizer", "TfIdfVectorizer", "RegexFullMatch", "StringConcat", "StringSplit",
    )),
    *((n, _SCATTER) for n in ("TensorScatter", "MaxUnpool")),
    *((n, _SIGNAL) for n in (
        "STFT", "MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow", "ImageDecoder",
    )),
    *((n, _TODO) for n in (
        "MaxRoiPool", "DeformConv",
    )),
)  # fmt: skip

for _name, _reason in _ROWS:
    opaque(_name, _reason)


# --- results whose types are known -----------------------------------------------------------------------------------
def _as(x: Tensor, dtype: int | None = None) -> TensorType:
    """The input's shape, of its own element type or of an ONNX code."""
    kind = x.dtype if not dtype else DType.from_onnx(dtype)
    if kind is None:
        raise Unsupported("UN_DTYPE", f"element type {dtype}")
    return tensor(kind, x.shape)


def _reduced(x: Tensor, axis: int, keepdims: int) -> list[Dim]:
    k = axis_of(axis, x.rank)
    return [*x.shape[:k], *([1] if keepdims else []), *x.shape[k + 1 :]]


_OLD_EQUAL = "before opset 11 its formula would need Equal on floats"


@shaped(_OLD_EQUAL, name="ArgMax")
def ArgMax_1(x, *, axis=0, keepdims=1):
    """Where the largest element stands."""
    return tensor(DType.I64, _reduced(x, axis, keepdims))


@shaped(_OLD_EQUAL, name="ArgMin")
def ArgMin_1(x, *, axis=0, keepdims=1):
    """Where the smallest element stands."""
    return tensor(DType.I64, _reduced(x, axis, keepdims))


@shaped("before opset 13 it is over everything from the axis on", name="Hardmax")
def Hardmax_1(x, *, axis=1):
    """One at the first largest element, else zero."""
    return _as(x)


@shaped(_DATA, since=10)
def TopK(x, k, *, axis=-1, largest=1, sorted=1):
    """The k largest elements and where they stand; the shape is known when k is."""
    at = axis_of(axis, x.rank)
    shape = [*x.shape[:at], k.dims()[0], *x.shape[at + 1 :]]
    return [tensor(x.dtype, shape), tensor(DType.I64, shape)]


@shaped(_TODO, since=10)
def RoiAlign(
    x,
    rois,
    batch_indices,
    *,
    coordinate_transformation_mode="half_pixel",
    mode="avg",
    output_height=1,
    output_width=1,
    sampling_ratio=0,
    spatial_scale=1.0,
):
    """Pooling of regions to one size."""
    return tensor(x.dtype, [rois.shape[0], x.shape[1], output_height, output_width])


@shaped(_RANDOM, since=15)
def Bernoulli(x, *, dtype=None, seed=None):
    """Random bits with given probabilities."""
    return _as(x, dtype)


@shaped(_RANDOM)
def RandomNormalLike(x, *, dtype=None, mean=0.0, scale=1.0, seed=None):
    """Normal noise."""
    return _as(x, dtype)


@shaped(_RANDOM)
def RandomUniformLike(x, *, dtype=None, high=1.0, low=0.0, seed=None):
    """Uniform noise."""
    return _as(x, dtype)


# --- quantised -------------------------------------------------------------------------------------------------------
@shaped("no faster in a kernel; what NaN does to the range depends on the order of reading", since=11)
def DynamicQuantizeLinear(x):
    """To u8 by the range of the data."""
    return [tensor(DType.U8, x.shape), tensor(DType.F32, []), tensor(DType.U8, [])]


# --- quantised, of onnxruntime's own domain --------------------------------------------------------------------------
_QUANT = "onnxruntime's rounding differs between processors"
_MS = "com.microsoft"


def _broadcast(a: Tensor, b: Tensor) -> TensorType:
    return tensor(a.dtype, broadcast_shape(a.shape, b.shape))


@shaped(_QUANT, domain=_MS)
def QLinearAdd(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point=None):
    """Sum of quantised numbers."""
    return _broadcast(a, b)


@shaped(_QUANT, domain=_MS)
def QLinearMul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point=None):
    """Product of quantised numbers, element by element."""
    return _broadcast(a, b)


@shaped(_QUANT, domain=_MS)
def QLinearSigmoid(x, x_scale, x_zero_point, y_scale, y_zero_point=None):
    """Sigmoid by a table."""
    return _as(x)


@shaped(_QUANT, domain=_MS)
def QLinearLeakyRelu(x, x_scale, x_zero_point, y_scale, y_zero_point=None, *, alpha=0.01):
    """LeakyRelu by a table."""
    return _as(x)


@shaped(_QUANT, domain=_MS)
def QLinearGlobalAveragePool(x, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0):
    """Mean over all spatial dimensions."""
    ones = [1] * (x.rank - 2)
    shape = [x.shape[0], *ones, x.shape[-1]] if channels_last else [x.shape[0], x.shape[1], *ones]
    return tensor(x.dtype, shape)


@shaped(_QUANT, domain=_MS)
def QGemm(
    a, a_scale, a_zero_point, b, b_scale, b_zero_point, c=None, y_scale=None, y_zero_point=None, *,
    alpha=1.0, transA=0, transB=0,  # noqa: N803
):  # fmt: skip
    """Matrix product of quantised numbers; to floats without a scale of the result."""
    dtype = DType.F32 if y_scale is None else a.dtype if y_zero_point is None else y_zero_point.dtype
    return tensor(dtype, [a.shape[1] if transA else a.shape[0], b.shape[0] if transB else b.shape[1]])
