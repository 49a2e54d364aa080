"""Attention and rotary embedding as formulas over other entries (see ops/composite.py for what a formula may say).

Half precision computes in f32. The mask is made of positions, so it costs no memory where it stays in a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.simplify import same
from onnxfuse.ir.types import Dim
from onnxfuse.ops.composite import Softmax, back, wide
from onnxfuse.ops.contract import MatMul
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.gather import Gather
from onnxfuse.ops.known import KNOWN_LIMIT
from onnxfuse.ops.pointwise import And, Cast, Equal, GreaterOrEqual, LessOrEqual, Tanh, Where
from onnxfuse.ops.reduce import ReduceMax
from onnxfuse.ops.table import composite
from onnxfuse.ops.view import Concat, Expand, Identity, Range, Reshape, Shape, Slice, Squeeze, Transpose, Unsqueeze

_MINUS = -math.inf


@dataclass(frozen=True, slots=True)
class _Scores:
    """Attributes of Attention that shape the scores."""

    causal: bool
    mode: int  # what the fourth output holds
    scale: float | None
    softcap: float
    left: int = -1  # window; -1 = unbounded
    right: int = -1

    @property
    def moving(self) -> bool:
        """Which keys are seen hangs on the place of the query."""
        return self.causal or self.left >= 0 or self.right >= 0


@composite(since=23, name="Attention")
def Attention_23(
    q,
    k,
    v,
    attn_mask=None,
    past_key=None,
    past_value=None,
    *,
    is_causal=0,
    kv_num_heads=None,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    outputs,
):
    """Scaled dot product attention."""
    how = _Scores(bool(is_causal), qk_matmul_output_mode, scale, softcap)
    _precise(q, softmax_precision)
    return _attention(q, k, v, attn_mask, past_key, past_value, None, how, (q_num_heads, kv_num_heads), outputs)


@composite(since=24, name="Attention")
def Attention_24(
    q,
    k,
    v,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    kv_num_heads=None,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    outputs,
):
    """Scaled dot product attention; keys from `nonpad_kv_seqlen` on are padding."""
    how = _Scores(bool(is_causal), qk_matmul_output_mode, scale, softcap)
    _precise(q, softmax_precision)
    heads = (q_num_heads, kv_num_heads)
    return _attention(q, k, v, attn_mask, past_key, past_value, nonpad_kv_seqlen, how, heads, outputs)


@composite(since=25)
def Attention(
    q,
    k,
    v,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    kv_num_heads=None,
    left_window_size=-1,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    right_window_size=-1,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    outputs,
):
    """Scaled dot product attention; keys may be limited to a window around the query."""
    how = _Scores(bool(is_causal), qk_matmul_output_mode, scale, softcap, left_window_size, right_window_size)
    _precise(q, softmax_precision)
    heads = (q_num_heads, kv_num_heads)
    return _attention(q, k, v, attn_mask, past_key, past_value, nonpad_kv_seqlen, how, heads, outputs)


def _precise(q: GraphTensor, precision: int | None) -> None:
    """The softmax is computed in f32. Of f64 onnxruntime does that too, in part: declined."""
    if DType.F64 in (q.dtype, DType.from_onnx(precision or 0)):
        raise Unsupported("UN_DTYPE", f"Attention on {q.dtype} or with a softmax in f64 is not implemented")


def _attention(
    q: GraphTensor,
    k: GraphTensor,
    v: GraphTensor,
    mask: GraphTensor | None,
    past_key: GraphTensor | None,
    past_value: GraphTensor | None,
    valid: GraphTensor | None,
    how: _Scores,
    heads: tuple[int | None, int | None],
    outputs: int,
) -> tuple[GraphTensor, ...]:
    kind, flat = q.dtype, q.rank == 3
    forbids = how.moving or valid is not None or (mask is not None and mask.dtype is DType.BOOL)
    if outputs > 3 and how.mode == 2 and forbids:
        why = "onnxruntime shows the lowest number for a forbidden key, not minus infinity"
        raise Unsupported("UN_ATTR", "Attention with its masked scores as an output is not implemented", why)
    if flat:
        q, k, v = _headed(q, heads[0]), _headed(k, heads[1]), _headed(v, heads[1])
    keys = k if past_key is None else Concat(past_key, k, axis=2)
    values = v if past_value is None else Concat(past_value, v, axis=2)
    depth = q.shape[3]
    if not isinstance(depth, int):
        raise Unsupported("UN_DATA_DEPENDENT", f"Attention over a run-time head size {depth}")
    scale = 1 / math.sqrt(depth) if how.scale is None else how.scale
    each_key, each_value = (_shared(wide(t), q.shape[1]) for t in (keys, values))
    raw = MatMul(wide(q) * scale, Transpose(each_key, perm=[0, 1, 3, 2]))
    capped = Tanh(raw / how.softcap) * how.softcap if how.softcap else raw
    bias = _bias(q, keys, mask, past_key, valid, how, raw.dtype)
    scores = capped if bias is None else capped + bias
    weights = Softmax(scores, axis=-1)
    if bias is not None and _may_be_empty(mask, valid, how):
        # A query that may attend to nothing gives 0. Its softmax is a NaN, so its bias is asked instead.
        weights = Where(Equal(ReduceMax(bias, axes=[-1], keepdims=1), _MINUS), 0.0, weights)
    y = back(MatMul(weights, each_value), kind)
    if flat:
        y = Reshape(Transpose(y, perm=[0, 2, 1, 3]), shape=[0, 0, _static(v.shape[3]) * _static(q.shape[1])])
    shown = {0: raw, 1: capped, 2: scores, 3: weights}[how.mode]
    more = (keys, values, shown)[: outputs - 1]  # an output needs a node of its own
    return y, *(Identity(m) if m.dtype is kind else back(m, kind) for m in more)


def _static(d: Dim) -> int:
    if not isinstance(d, int):
        raise Unsupported("UN_DATA_DEPENDENT", f"Attention with a run-time number of heads or head size {d}")
    return d


def _headed(x: GraphTensor, heads: int | None) -> GraphTensor:
    """[batch, sequence, heads * size] as [batch, heads, sequence, size]."""
    if not heads:
        raise Unsupported("UN_ATTR", f"attention on {x.type} without its number of heads")
    return Transpose(Reshape(x, shape=[0, 0, heads, _static(x.shape[2]) // heads]), perm=[0, 2, 1, 3])


def _shared(x: GraphTensor, heads: Dim) -> GraphTensor:
    """Every head of keys or values as often as queries share it."""
    if same(x.shape[1], heads):
        return x
    mine, wanted = _static(x.shape[1]), _static(heads)
    repeated = Expand(Unsqueeze(x, axes=[2]), shape=[1, 1, wanted // mine, 1, 1])
    return Reshape(repeated, shape=[0, wanted, -1, _static(x.shape[3])])


def _positions(x: GraphTensor, axis: int) -> GraphTensor:
    """0, 1, ... along an axis of `x`, as i64[n]."""
    zero, one = x.builder.constant(0, DType.I64), x.builder.constant(1, DType.I64)
    end = Squeeze(Shape(x, start=axis, end=axis + 1), axes=[0])
    return Range(zero, end, one)


def _bias(
    q: GraphTensor,
    keys: GraphTensor,
    mask: GraphTensor | None,
    past: GraphTensor | None,
    valid: GraphTensor | None,
    how: _Scores,
    kind: DType,
) -> GraphTensor | None:
    """What is added to the scores: the mask, and minus infinity where a query may not look."""
    total: GraphTensor | None = None
    if mask is not None:
        if not same(mask.shape[-1], keys.shape[2]):
            raise Unsupported("UN_ATTR", f"Attention with a mask {mask.type} for {keys.shape[2]} keys")
        total = Where(mask, 0.0, _full(q, _MINUS, kind)) if mask.dtype is DType.BOOL else wide(mask)
    limit = _fixed(q, keys, past, valid, how, kind)
    if limit is None:
        limit = _limit(q, keys, past, valid, how, kind)
    if total is None or limit is None:
        return limit if total is None else total
    return total + limit


def _fixed(
    q: GraphTensor, keys: GraphTensor, past: GraphTensor | None, valid: GraphTensor | None, how: _Scores, kind: DType
) -> GraphTensor | None:
    """A small limit of static extents, as a constant: the runtime would work it out anew in every run."""
    rows, columns, before = q.shape[2], keys.shape[2], 0 if past is None else past.shape[2]
    if valid is not None or not (isinstance(rows, int) and isinstance(columns, int) and isinstance(before, int)):
        return None
    if not how.moving or rows * columns > KNOWN_LIMIT:
        return None
    distance = np.arange(columns)[None, :] - (np.arange(rows)[:, None] + before)
    forbidden = (distance > 0) & how.causal
    forbidden |= (distance < -how.left) & (how.left >= 0)
    forbidden |= (distance > how.right) & (how.right >= 0)
    return q.builder.constant(np.where(forbidden, _MINUS, 0.0), kind)


def _limit(
    q: GraphTensor,
    keys: GraphTensor,
    past: GraphTensor | None,
    valid: GraphTensor | None,
    how: _Scores,
    kind: DType,
) -> GraphTensor | None:
    """Minus infinity where padding, the causal order or the window forbids a key; None when nothing does."""
    if valid is None and not how.moving:
        return None
    column = _positions(keys, 2)
    allowed: list[GraphTensor] = []
    padding = None if valid is None else Unsqueeze(Cast(valid, to=DType.I64.onnx), axes=[1, 2, 3])
    if padding is not None:
        allowed.append(LessOrEqual(column + 1, padding))
    if how.moving:
        place = Unsqueeze(_positions(q, 2), axes=[1])
        if past is not None:
            place = place + Squeeze(Shape(past, start=2, end=3), axes=[0])
        elif padding is not None:
            place = place + (padding - Squeeze(Shape(q, start=2, end=3), axes=[0]))
        if how.causal:
            allowed.append(LessOrEqual(column, place))
        if how.left >= 0:
            allowed.append(GreaterOrEqual(column, place - how.left))
        if how.right >= 0:
            allowed.append(LessOrEqual(column, place + how.right))
    seen = allowed[0]
    for more in allowed[1:]:
        seen = And(seen, more)
    return Where(seen, 0.0, _full(q, _MINUS, kind))


def _full(x: GraphTensor, value: float, kind: DType) -> GraphTensor:
    return x.builder.constant(value, kind)


def _may_be_empty(mask: GraphTensor | None, valid: GraphTensor | None, how: _Scores) -> bool:
    """A query may have no key at all: a causal one always has itself, or what came before."""
    return mask is not None or valid is not None or how.left >= 0 or how.right >= 0


@composite(since=23)
def RotaryEmbedding(x, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0):
    """Rotation of pairs of elements by position; the runtime gathers the rows of run-time positions."""
    if position_ids is not None:
        cos_cache, sin_cache = (Gather(c, position_ids, axis=0) for c in (cos_cache, sin_cache))
    flat = x.rank == 3
    w = wide(_headed(x, num_heads) if flat else x)
    size = _static(w.shape[3])
    turned = rotary_embedding_dim or size
    cos, sin = (Unsqueeze(wide(c), axes=[1]) for c in (cos_cache, sin_cache))
    step, half = (2, turned) if interleaved else (1, turned // 2)
    first = Slice(w, starts=[0], ends=[half], axes=[3], steps=[step])
    second = Slice(w, starts=[1 if interleaved else half], ends=[turned], axes=[3], steps=[step])
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    if interleaved:
        pairs = Concat(Unsqueeze(real, axes=[4]), Unsqueeze(imaginary, axes=[4]), axis=4)
        parts = [Reshape(pairs, shape=[0, 0, 0, turned])]
    else:
        parts = [real, imaginary]
    if turned != size:
        parts.append(Slice(w, starts=[turned], ends=[size], axes=[3]))
    y = parts[0] if len(parts) == 1 else Concat(*parts, axis=3)
    y = back(y, x.dtype)
    return Reshape(Transpose(y, perm=[0, 2, 1, 3]), shape=[0, 0, num_heads * size]) if flat else y
