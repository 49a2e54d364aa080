"""Where the largest or smallest element stands, and what is picked by class, as formulas over other entries.

Nothing is read at a computed index: positions are compared, which vectorises and cannot leave the tensor.
"""

from __future__ import annotations

import math

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ops.composite import log_softmax, wide
from onnxfuse.ops.dsl import axis_of
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.pointwise import Cast, Equal, IsNaN, Less, Neg, Where
from onnxfuse.ops.reduce import ReduceMax, ReduceMean, ReduceMin, ReduceSum
from onnxfuse.ops.table import composite
from onnxfuse.ops.view import Range, Shape, Slice, Squeeze, Unsqueeze


def _extent(x: GraphTensor, axis: int) -> GraphTensor:
    """The size of an axis, as a scalar."""
    extent = x.shape[axis]
    if isinstance(extent, int):
        return x.builder.constant(extent, DType.I64)
    return Squeeze(Slice(Shape(x), starts=[axis], ends=[axis + 1], axes=[0]), axes=[0])


def _positions(x: GraphTensor, axis: int) -> GraphTensor:
    """0, 1, ... along an axis of `x`, as i64 that broadcasts against it."""
    zero, one = x.builder.constant(0, DType.I64), x.builder.constant(1, DType.I64)
    behind = x.rank - 1 - axis
    at = Range(zero, _extent(x, axis), one)
    return Unsqueeze(at, axes=list(range(1, behind + 1))) if behind else at


def _extreme(
    x: GraphTensor, axis: int, keepdims: int, last: int = 0, largest: bool = True, nan: int = 0
) -> GraphTensor:
    """Position of the first (or last) extreme along an axis.

    A NaN is never better than what came before it, so it is the answer (`nan`) where it stands first and nowhere else.
    """
    k = axis_of(axis, x.rank)
    if x.shape[k] == 0:
        raise Unsupported("UN_SHAPE_MISMATCH", f"the largest of nothing: {x.type}")
    w = wide(x)
    if x.builder.opset < 12 and w.dtype in (DType.I8, DType.U8):
        w = Cast(w, to=DType.I32.onnx)  # ReduceMax and ReduceMin take bytes from opset 12 on
    worst = -math.inf if largest else math.inf
    compared = Where(IsNaN(w), worst, w) if w.dtype.is_float else w
    best = (ReduceMax if largest else ReduceMin)(compared, axes=[k], keepdims=1)
    at = _positions(x, k)
    # The original is compared: a NaN that stands for the worst is no candidate.
    if last:
        found = ReduceMax(Where(Equal(w, best), at, -1), axes=[k], keepdims=1)
    else:
        found = ReduceMin(Where(Equal(w, best), at, (1 << 62)), axes=[k], keepdims=1)
    if w.dtype.is_float:
        found = Where(IsNaN(Slice(w, starts=[0], ends=[1], axes=[k])), nan, found)
    return found if keepdims else Squeeze(found, axes=[k])


@composite(since=11)
def ArgMax(x, *, axis=0, keepdims=1, select_last_index=0):
    """Where the largest element stands."""
    return _extreme(x, axis, keepdims, select_last_index)


@composite(since=11)
def ArgMin(x, *, axis=0, keepdims=1, select_last_index=0):
    """Where the smallest element stands."""
    return _extreme(x, axis, keepdims, select_last_index, largest=False)


@composite(since=13)
def Hardmax(x, *, axis=-1):
    """One at the first largest element, else zero."""
    k = axis_of(axis, x.rank)
    one, zero = (x.builder.constant(v, x.dtype) for v in (1, 0))
    return Where(Equal(_positions(x, k), _extreme(x, k, 1, nan=-1)), one, zero)


# --- losses --------------------------------------------------------------------------------------------------------
def _loss(
    log_prob: GraphTensor,
    target: GraphTensor,
    weight: GraphTensor | None,
    ignored: int | None,
    reduction: str,
) -> GraphTensor:
    """Minus the log-probability of the target class, times its weight; a target that is ignored counts nothing.

    A negative target counts from the last class, as onnxruntime reads it.
    """
    if log_prob.rank < 2:
        raise Unsupported("UN_SHAPE_MISMATCH", f"a loss over classes of {log_prob.type}")
    given = target if target.dtype is DType.I64 else Cast(target, to=DType.I64.onnx)
    chosen = Unsqueeze(Where(Less(given, 0), given + _extent(log_prob, 1), given), axes=[1])
    hit = Equal(_positions(log_prob, 1), chosen)
    picked = ReduceSum(Where(hit, log_prob, 0.0), axes=[1], keepdims=0)
    share = skip = None
    if weight is not None:
        behind = log_prob.rank - 2
        each = Unsqueeze(weight, axes=list(range(1, behind + 1))) if behind else weight
        share = ReduceSum(Where(hit, each, 0.0), axes=[1], keepdims=0)
    if ignored is not None:
        skip = Equal(given, ignored)
        share = Where(skip, 0.0, log_prob.builder.constant(1, log_prob.dtype) if share is None else share)
    loss = Neg(picked) if share is None else Neg(picked) * share
    if skip is not None:
        loss = Where(skip, 0.0, loss)  # also where what is not counted is infinite
    if reduction == "none":
        return loss
    if reduction == "sum":
        return ReduceSum(loss, keepdims=0)
    if share is None:
        return ReduceMean(loss, keepdims=0)
    return ReduceSum(loss, keepdims=0) / ReduceSum(share, keepdims=0)


@composite(since=12)
def NegativeLogLikelihoodLoss(x, target, weight=None, *, ignore_index=None, reduction="mean"):
    """Minus the input at the target class."""
    if x.dtype is DType.F16:
        raise Unsupported("UN_DTYPE", "NegativeLogLikelihoodLoss on f16 is not implemented")
    return _loss(x, target, weight, ignore_index, reduction)


@composite(since=12)
def SoftmaxCrossEntropyLoss(scores, labels, weights=None, *, ignore_index=None, reduction="mean", outputs):
    """Minus the log-softmax over classes at the label."""
    if scores.dtype is DType.F16:
        raise Unsupported("UN_DTYPE", "SoftmaxCrossEntropyLoss on f16 is not implemented")
    log_prob = log_softmax(scores, [1])
    loss = _loss(log_prob, labels, weights, ignore_index, reduction)
    return loss if outputs == 1 else (loss, log_prob)
