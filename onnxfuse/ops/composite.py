"""Formulas over other entries. `frontend/atomize.py` expands them; the formula is the definition.

A body gets graph tensors; calling an entry (`Exp(x)`) or an operator (`x - y`) builds a node in the model's opset.
f16 and bf16 formulas compute in f32 between two Casts, as onnxruntime does for these ops.
"""

from __future__ import annotations

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.simplify import same
from onnxfuse.ops.contract import MatMul
from onnxfuse.ops.dsl import axis_of
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.pointwise import Abs, Cast, Clip_6, Equal, Exp, Log, Max, Min, Sqrt, Where
from onnxfuse.ops.reduce import ReduceL1, ReduceL2, ReduceMax, ReduceMean, ReduceSum
from onnxfuse.ops.table import composite
from onnxfuse.ops.view import Reshape, Shape, Squeeze, Transpose, Unsqueeze


def wide(x: GraphTensor) -> GraphTensor:
    """The tensor in the compute dtype."""
    wide = x.dtype.compute
    return x if wide is x.dtype else Cast(x, to=wide.onnx)


def back(x: GraphTensor, dtype: DType) -> GraphTensor:
    """The tensor in the dtype of the op."""
    return x if x.dtype is dtype else Cast(x, to=dtype.onnx)


# --- softmax family ------------------------------------------------------------------------------------------------
def _softmax(x: GraphTensor, axes: list[int]) -> GraphTensor:
    w = wide(x)
    e = Exp(w - ReduceMax(w, axes=axes, keepdims=1))
    return back(e / ReduceSum(e, axes=axes, keepdims=1), x.dtype)


def log_softmax(x: GraphTensor, axes: list[int]) -> GraphTensor:
    """The same in every opset."""
    w = wide(x)
    shifted = w - ReduceMax(w, axes=axes, keepdims=1)
    return back(shifted - Log(ReduceSum(Exp(shifted), axes=axes, keepdims=1)), x.dtype)


@composite(name="Softmax")
def Softmax_1(x, *, axis=1):
    """Before opset 13: over everything from `axis` on."""
    return _softmax(x, list(range(axis_of(axis, x.rank), x.rank)))


@composite(since=13)
def Softmax(x, *, axis=-1):
    """e**x / sum(e**x) along an axis, shifted by the maximum."""
    return _softmax(x, [axis_of(axis, x.rank)])


@composite(name="LogSoftmax")
def LogSoftmax_1(x, *, axis=1):
    """Before opset 13: over everything from `axis` on."""
    return log_softmax(x, list(range(axis_of(axis, x.rank), x.rank)))


@composite(since=13)
def LogSoftmax(x, *, axis=-1):
    """X - log(sum(e**x)) along an axis, shifted by the maximum."""
    return log_softmax(x, [axis_of(axis, x.rank)])


def _log_sum_exp(x: GraphTensor, axes: GraphTensor | list[int] | None, keepdims: int) -> GraphTensor:
    if isinstance(axes, GraphTensor):
        every: GraphTensor | list[int] = axes
    else:
        every = list(range(x.rank)) if axes is None else sorted(axis_of(a, x.rank) for a in axes)
    if not x.dtype.is_float:
        raise Unsupported("UN_DTYPE", f"ReduceLogSumExp on {x.dtype} is not implemented")
    w = wide(x)
    if every == []:
        return back(Log(Exp(w)), x.dtype)
    top = ReduceMax(w, axes=every, keepdims=1)
    if x.builder.opset < 8 and w.dtype is DType.F64:
        raise Unsupported("UN_DTYPE", "Clip takes no f64 in opset 7, and Min does not broadcast")
    huge = float(np.finfo(w.dtype.numpy).max)  # an infinite maximum must not become inf - inf
    top = Max(Min(top, huge), -huge) if x.builder.opset >= 8 else Clip_6(top, min=-huge, max=huge)
    if isinstance(axes, GraphTensor) and not keepdims:  # no Squeeze of what is known at run time: sums of one element
        return back(Log(ReduceSum(Exp(w - top), axes, keepdims=0)) + ReduceSum(top, axes, keepdims=0), x.dtype)
    total = back(Log(ReduceSum(Exp(w - top), axes=every, keepdims=1)) + top, x.dtype)
    return total if keepdims else Squeeze(total, axes=every)


@composite(name="ReduceLogSumExp")
def ReduceLogSumExp_1(x, *, axes=None, keepdims=1):
    """log(sum(e**x)), shifted by the maximum; axes as attribute."""
    return _log_sum_exp(x, None if axes is None else list(axes), keepdims)


@composite(since=18)
def ReduceLogSumExp(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """log(sum(e**x)), shifted by the maximum."""
    if axes is not None and axes.known is None and axes.type.size != 0:  # at run time: no Squeeze of what is not known
        return _log_sum_exp(x, axes, keepdims)
    listed = None if axes is None else axes.ints()
    if noop_with_empty_axes and not listed:
        return Log(Exp(x))
    return _log_sum_exp(x, listed or None, keepdims)


@composite
def GlobalAveragePool(x):
    """Mean over all spatial dimensions."""
    return ReduceMean(x, axes=list(range(2, x.rank)), keepdims=1)


@composite
def GlobalMaxPool(x):
    """Maximum over all spatial dimensions."""
    return ReduceMax(x, axes=list(range(2, x.rank)), keepdims=1)


@composite(since=2)
def GlobalLpPool(x, *, p=2):
    """p-norm over all spatial dimensions."""
    if p not in (1, 2):
        raise Unsupported("UN_ATTR", f"GlobalLpPool with p={p} is not implemented")
    axes = list(range(2, x.rank))
    return ReduceL1(x, axes=axes, keepdims=1) if p == 1 else ReduceL2(x, axes=axes, keepdims=1)


# --- matrix products -----------------------------------------------------------------------------------------------
def _gemm(a, b, c, alpha, beta, transA, transB):  # noqa: N803
    if c is not None and beta == 0.0:
        raise Unsupported("UN_ATTR", "Gemm with beta=0 and a C that is not read")
    left = Transpose(a, perm=[1, 0]) if transA else a
    right = Transpose(b, perm=[1, 0]) if transB else b
    y = MatMul(left, right)
    if alpha != 1.0:
        y = y * alpha
    if c is None:
        return y
    return y + (c if beta == 1.0 else c * beta)


@composite(since=7)
def Gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):  # noqa: N803
    """Alpha * A' @ B' + beta * C."""
    if not a.dtype.is_float and (alpha != 1.0 or beta != 1.0):
        raise Unsupported("UN_DTYPE", f"Gemm on {a.dtype} with alpha or beta other than 1")
    return _gemm(a, b, c, alpha, beta, transA, transB)


# --- normalisation -------------------------------------------------------------------------------------------------
def _channels(v: GraphTensor, rank: int) -> GraphTensor:
    """A per-channel vector, aligned with dimension 1 of a rank-`rank` tensor."""
    return v if rank <= 2 else Unsqueeze(v, axes=list(range(1, rank - 1)))


@composite(since=7)
def BatchNormalization(x, scale, b, mean, var, *, epsilon=1e-5, momentum=0.9, spatial=1, training_mode=0, outputs):
    """Inference: (x - mean) / sqrt(var + epsilon) * scale + b per channel."""
    if training_mode or outputs > 1 or not spatial:
        raise Unsupported("UN_ATTR", "BatchNormalization in training mode, with more outputs or spatial=0")
    w = wide(x)
    s, o, m, v = (_channels(wide(t), x.rank) for t in (scale, b, mean, var))
    return back((w - m) / Sqrt(v + epsilon) * s + o, x.dtype)


@composite
def InstanceNormalization(x, scale, b, *, epsilon=1e-5):
    """Normalise every channel of every sample over its spatial dimensions."""
    axes = list(range(2, x.rank))
    w = wide(x)
    centred = w - ReduceMean(w, axes=axes, keepdims=1)
    var = ReduceMean(centred * centred, axes=axes, keepdims=1)
    return back(centred / Sqrt(var + epsilon) * _channels(wide(scale), x.rank) + _channels(wide(b), x.rank), x.dtype)


@composite(since=17)
def LayerNormalization(x, scale, b=None, *, axis=-1, epsilon=1e-5, stash_type=1, outputs):
    """Normalise over everything from `axis` on; statistics in f32."""
    if outputs > 1 and (x.dtype is DType.F64 or stash_type != 1):
        raise Unsupported("UN_ARITY", f"LayerNormalization on {x.dtype} with the Mean or InvStdDev output")
    axes = list(range(axis_of(axis, x.rank), x.rank))
    w = wide(x)
    mean = ReduceMean(w, axes=axes, keepdims=1)
    centred = w - mean
    deviation = Sqrt(ReduceMean(centred * centred, axes=axes, keepdims=1) + epsilon)
    y = centred / deviation * wide(scale)
    y = back(y if b is None else y + wide(b), x.dtype)
    return y if outputs == 1 else (y, mean) if outputs == 2 else (y, mean, 1.0 / deviation)


def _grouped(x: GraphTensor, groups: int, epsilon: float) -> GraphTensor:
    """[N, groups, rest] in the compute dtype, each row normalised."""
    w = Reshape(wide(x), shape=[0, groups, -1])
    centred = w - ReduceMean(w, axes=[2], keepdims=1)
    return centred / Sqrt(ReduceMean(centred * centred, axes=[2], keepdims=1) + epsilon)


def _reshape_like(y: GraphTensor, x: GraphTensor) -> GraphTensor:
    """`y` in the shape of `x`, by constants where they can say it: a Shape node would part the formula."""
    kept = [k < y.rank and same(d, y.shape[k]) for k, d in enumerate(x.shape)]
    wanted = [0 if k else d if isinstance(d, int) else -1 for k, d in zip(kept, x.shape, strict=True)]
    sayable = wanted.count(-1) <= 1 and 0 not in x.shape
    return Reshape(y, shape=wanted) if sayable else Reshape(y, Shape(x))


@composite(since=18, name="GroupNormalization")
def GroupNormalization_18(x, scale, bias, *, epsilon=1e-5, num_groups):
    """Normalise over groups of channels; scale and bias per group."""
    y = _grouped(x, num_groups, epsilon) * _channels(wide(scale), 3) + _channels(wide(bias), 3)
    return back(_reshape_like(y, x), x.dtype)


@composite(since=21)
def GroupNormalization(x, scale, bias, *, epsilon=1e-5, num_groups, stash_type=1):
    """Normalise over groups of channels; scale and bias per channel."""
    y = _reshape_like(_grouped(x, num_groups, epsilon), x)
    return back(y * _channels(wide(scale), x.rank) + _channels(wide(bias), x.rank), x.dtype)


@composite(since=23)
def RMSNormalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """X / sqrt(mean(x**2) + epsilon) * scale."""
    axes = list(range(axis_of(axis, x.rank), x.rank))
    w = wide(x)
    return back(w / Sqrt(ReduceMean(w * w, axes=axes, keepdims=1) + epsilon) * wide(scale), x.dtype)


@composite
def LpNormalization(x, *, axis=-1, p=2):
    """X divided by its p-norm along an axis."""
    axes = [axis_of(axis, x.rank)]
    w = wide(x)
    norm = ReduceSum(Abs(w), axes=axes, keepdims=1) if p == 1 else Sqrt(ReduceSum(w * w, axes=axes, keepdims=1))
    if x.builder.opset < 11:
        raise Unsupported("UN_OPSET", "LpNormalization before opset 11: its zero norm needs Equal on floats")
    return back(Where(Equal(norm, 0.0), 0.0, w / norm), x.dtype)


@composite(since=9)
def MeanVarianceNormalization(x, *, axes=(0, 2, 3)):
    """(x - mean) / (standard deviation + 1e-9)."""
    every = sorted(axis_of(a, x.rank) for a in axes)
    centred = x - ReduceMean(x, axes=every, keepdims=1)
    deviation = Sqrt(ReduceMean(x * x, axes=every, keepdims=1) - _squared(ReduceMean(x, axes=every, keepdims=1)))
    return centred / (deviation + 1e-9)


def _squared(x: GraphTensor) -> GraphTensor:
    return x * x
