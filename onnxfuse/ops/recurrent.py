"""Recurrences over a few steps, written out: recurrent nets, linear attention; and the convolution that keeps a state.

Each step waits for the one before, so a long sequence gains nothing in kernels of its own: from `MOST_STEPS` on, and
where the length is only known at run time, the node stays with onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.types import TensorType, tensor
from onnxfuse.ops.composite import back, wide
from onnxfuse.ops.contract import Conv, MatMul
from onnxfuse.ops.dsl import Tensor
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.pointwise import Exp, Sigmoid, Tanh
from onnxfuse.ops.table import composite, shaped
from onnxfuse.ops.view import Concat, Pad, Reshape, Slice, Squeeze, Transpose, Unsqueeze

MOST_STEPS = 1  # of a recurrent net; onnxruntime's kernels are faster at more
MOST_TOKENS = 8  # of linear attention, which onnxruntime runs as a loop over nodes
_END = (1 << 62) - 1
State = GraphTensor | None  # None: zeros


def _steps(x: GraphTensor, axis: int, most: int) -> int:
    n = x.shape[axis]
    if not isinstance(n, int) or not 0 < n <= most:
        raise Unsupported("UN_OPAQUE", f"every step waits for the one before: {n} steps (at most {most})")
    return n


def _part(x: GraphTensor, axis: int, start: int, end: int) -> GraphTensor:
    return Slice(x, starts=[start], ends=[end], axes=[axis])


def _plus(x: GraphTensor, y: GraphTensor | None) -> GraphTensor:
    return x if y is None else x + y


# --- recurrent nets ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """One direction of a net: X of its one step, W, R, B and P as the node has them, the states it starts from.

    Every use of a weight cuts it anew: a view with one reader is packed when the kernel is created.
    """

    d: int
    gates: int
    size: int
    x: GraphTensor
    w: GraphTensor
    r: GraphTensor
    b: State
    p: State
    h: State
    c: State

    def given(self, start: int, end: int) -> GraphTensor:
        """X @ W + Wb, of the gates start..end."""
        product = MatMul(self.x, self._matrix(self.w, start, end))
        return _plus(product, self._vector(self.b, start, end))

    def recurred(self, h: State, start: int, end: int) -> State:
        """H @ R + Rb, of the gates start..end."""
        bias = self._vector(self.b, self.gates + start, self.gates + end)
        return bias if h is None else _plus(MatMul(h, self._matrix(self.r, start, end)), bias)

    def peephole(self, k: int) -> State:
        return self._vector(self.p, k, k + 1)

    def gate(self, x: GraphTensor, k: int) -> GraphTensor:
        return _part(x, 1, k * self.size, (k + 1) * self.size)

    def _matrix(self, m: GraphTensor, start: int, end: int) -> GraphTensor:
        rows = _part(_row(m, self.d), 0, start * self.size, end * self.size)
        return Transpose(rows, perm=[1, 0])

    def _vector(self, v: State, start: int, end: int) -> State:
        return None if v is None else _part(_row(v, self.d), 0, start * self.size, end * self.size)


def _row(v: GraphTensor, d: int) -> GraphTensor:
    """The part of a direction, in the compute dtype."""
    return Squeeze(_part(wide(v), 0, d, d + 1), axes=[0])


Step = Callable[[_Way], tuple[GraphTensor, State]]


def _net(
    step: Step,
    gates: int,
    x: GraphTensor,
    w: GraphTensor,
    r: GraphTensor,
    b: State,
    h: State,
    c: State,
    p: State,
    direction: str,
    outputs: int,
) -> tuple[GraphTensor, ...]:
    """Y, Y_h and Y_c (as many as are asked for) of a single step."""
    _steps(x, 0, MOST_STEPS)
    size = r.shape[2]
    if not isinstance(size, int):
        raise Unsupported("UN_DATA_DEPENDENT", f"a recurrent net of {size} run-time states")
    if not x.dtype.is_float or x.dtype is DType.BF16:
        raise Unsupported("UN_DTYPE", f"a recurrent net on {x.dtype} is not implemented")
    made: list[tuple[GraphTensor, State]] = []
    for d in range(2 if direction == "bidirectional" else 1):
        before = [None if s is None else _row(s, d) for s in (h, c)]
        made.append(step(_Way(d, gates, size, Squeeze(wide(x), axes=[0]), w, r, b, p, *before)))
    ends = [
        back(_joined([Unsqueeze(s, axes=[0]) for s in states if s is not None], 0), x.dtype)
        for states in zip(*made, strict=True)
        if states[0] is not None
    ]
    return (Unsqueeze(ends[0], axes=[0]), *ends)[:outputs]


def _joined(parts: Sequence[GraphTensor], axis: int) -> GraphTensor:
    return parts[0] if len(parts) == 1 else Concat(*parts, axis=axis)


def _plain_only(
    name: str, x: GraphTensor, lengths: State, clip: float | None, layout: int, activations, wanted: Sequence[str]
) -> None:
    whole = lengths is None or (lengths.known is not None and all(n == x.shape[0] for n in lengths.ints()))
    if not whole:
        raise Unsupported("UN_DATA_DEPENDENT", f"{name} with sequence lengths")
    given = list(activations or wanted)
    repeated = [a.lower() for a in wanted] * (len(given) // len(wanted) or 1)
    if clip is not None or layout or [a.lower() for a in given] != repeated:
        raise Unsupported("UN_ATTR", f"{name} with clip, layout={layout} or activations {given}")


def _rnn_step(way: _Way) -> tuple[GraphTensor, State]:
    return Tanh(_plus(way.given(0, 1), way.recurred(way.h, 0, 1))), None


def _lstm_step(way: _Way) -> tuple[GraphTensor, State]:
    gates = _plus(way.given(0, 4), way.recurred(way.h, 0, 4))

    def sigmoid(k: int, hole: int, cell: State) -> GraphTensor:
        x, weight = way.gate(gates, k), way.peephole(hole)
        return Sigmoid(x if weight is None or cell is None else x + weight * cell)

    new = sigmoid(0, 0, way.c) * Tanh(way.gate(gates, 3))
    cell = new if way.c is None else sigmoid(2, 2, way.c) * way.c + new
    return sigmoid(1, 1, cell) * Tanh(cell), cell


def _states(
    x: Tensor, w: Tensor, r: Tensor, *_rest: object, direction: str = "forward", layout: int = 0, **_attrs: object
) -> list[TensorType]:
    hidden, ways = r.shape[-1], 2 if direction == "bidirectional" else 1
    batch, length = x.shape[:2] if layout else x.shape[1::-1]
    last = tensor(x.dtype, [batch, ways, hidden] if layout else [ways, batch, hidden])
    return [tensor(x.dtype, [batch, length, ways, hidden] if layout else [length, ways, batch, hidden]), last, last]


@composite(types=_states)
def RNN(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=("Tanh", "Tanh"),
    clip=None,
    direction="forward",
    hidden_size=None,
    layout=0,
    outputs,
):
    """Plain recurrent net of a single step."""
    _plain_only("RNN", x, sequence_lens, clip, layout, activations, ["Tanh"])
    return _net(_rnn_step, 1, x, w, r, b, initial_h, None, None, direction, outputs)


@shaped("onnxruntime's kernel is faster than three products after each other")
def GRU(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    linear_before_reset=0,
    layout=0,
):
    """Gated recurrent unit."""
    return _states(x, w, r, direction=direction, layout=layout)[:2]


@composite(types=_states)
def LSTM(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    initial_c=None,
    p=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=None,
    clip=None,
    direction="forward",
    hidden_size=None,
    input_forget=0,
    layout=0,
    outputs,
):
    """Long short-term memory of a single step."""
    _plain_only("LSTM", x, sequence_lens, clip, layout, activations, ["Sigmoid", "Tanh", "Tanh"])
    if input_forget:
        raise Unsupported("UN_ATTR", "LSTM with input_forget=1")
    return _net(_lstm_step, 4, x, w, r, b, initial_h, initial_c, p, direction, outputs)


# --- states of language models -------------------------------------------------------------------------------------
@composite(since=27)
def LinearAttention(
    query,
    key,
    value,
    past_state=None,
    decay=None,
    beta=None,
    *,
    chunk_size=64,
    kv_num_heads,
    q_num_heads,
    scale=0.0,
    update_rule="gated_delta",
    outputs,
):
    """Attention through a state of keys and values, token by token; half precision computes in f32."""
    heads, tokens, group = kv_num_heads, _steps(query, 1, MOST_TOKENS), q_num_heads // kv_num_heads
    depth = _width(query) // q_num_heads
    breadth = _width(value) // heads
    factor = scale or 1.0 / math.sqrt(depth)
    state = None if past_state is None else wide(past_state)

    def token(x: GraphTensor, t: int, *shape: int) -> GraphTensor:
        return wide(Reshape(_part(x, 1, t, t + 1), shape=[0, *shape]))

    made: list[GraphTensor] = []
    for t in range(tokens):
        column = token(key, t, heads, depth, 1)
        written = token(value, t, heads, 1, breadth)
        if decay is not None and state is not None:
            state = state * Exp(token(decay, t, heads, 1 if _width(decay) == heads else depth, 1))
        if beta is not None:
            known = written if state is None else written - MatMul(token(key, t, heads, 1, depth), state)
            written = token(beta, t, _width(beta), 1, 1) * known
        state = column * written if state is None else state + column * written
        read = MatMul(token(query, t, heads, group, depth), state) * factor
        made.append(Reshape(read, shape=[0, 1, q_num_heads * breadth]))
    y = back(_joined(made, 1), query.dtype)
    assert state is not None
    return y if outputs == 1 else (y, back(state, query.dtype if past_state is None else past_state.dtype))


def _width(x: GraphTensor) -> int:
    d = x.shape[-1]
    if not isinstance(d, int):
        raise Unsupported("UN_DATA_DEPENDENT", f"heads of run-time size in {x.type}")
    return d


@composite(since=27)
def CausalConvWithState(x, weight, bias=None, past_state=None, *, activation="none", outputs):
    """Convolution over what came before, channel by channel, with the last elements as a state."""
    width, channels = weight.shape[2], weight.shape[0]
    if not isinstance(width, int) or not isinstance(channels, int):
        raise Unsupported("UN_DATA_DEPENDENT", f"a causal convolution with a kernel of {weight.type}")
    padded = Pad(x, pads=[0, 0, width - 1, 0, 0, 0]) if past_state is None else Concat(past_state, x, axis=2)
    y = Conv(padded, weight, bias, group=channels, kernel_shape=[width])
    if activation in ("silu", "swish"):
        w = wide(y)
        y = back(w * Sigmoid(w), x.dtype)
    elif activation != "none":
        raise Unsupported("UN_ATTR", f"CausalConvWithState with activation={activation}")
    if outputs == 1:
        return y
    return y, Slice(padded, starts=[1 - width if width > 1 else _END], ends=[_END], axes=[2])
