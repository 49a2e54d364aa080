"""Seeded random ONNX models of atomic operators, for comparing what two fusion engines make of them.

Unary and binary operators with all kinds of broadcasting, transposes, reshapes, slices, concatenations, reductions,
matrix products, convolutions and pools, some softmax and layer norms; values used several times, skips over many nodes,
several outputs. Shapes are static. Same seed, same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]
OPSET = 17

UNARY = ("Relu", "Sigmoid", "Tanh", "Exp", "Neg", "Abs", "Sqrt", "Erf", "Floor", "Reciprocal", "Cos")
BINARY = ("Add", "Sub", "Mul", "Div")
EXTREME = ("Max", "Min")
REDUCE = ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd")
LARGEST = 4096  # elements of a value


class Writer:
    """The graph so far; `shapes` of all values, `pool` of the values made, in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.draw = np.random.default_rng(seed)
        self.shapes: dict[str, Shape] = {}
        self.pool: list[str] = []
        self.inputs: list[str] = []
        self.nodes: list[onnx.NodeProto] = []
        self.consts: list[onnx.TensorProto] = []

    def input(self, shape: Shape) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(name)
        self.shapes[name] = shape
        self.pool.append(name)
        return name

    def weight(self, shape: Shape) -> str:
        return self._const(self.draw.standard_normal(shape).astype(np.float32))

    def integers(self, values: Shape) -> str:
        return self._const(np.array(values, np.int64))

    def _const(self, array: np.ndarray) -> str:
        name = f"c{len(self.consts)}"
        self.consts.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, inputs: list[str], shape: Shape, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], f"n{len(self.nodes)}", **attributes))
        self.shapes[name] = shape
        self.pool.append(name)
        return name

    def pick(self) -> str:
        """Mostly one of the last values, so that chains come about; sometimes any."""
        near = self.rng.choice((1, 2, 4, 8, len(self.pool)))
        return self.rng.choice(self.pool[-near:])

    def shape(self, name: str) -> Shape:
        return self.shapes[name]


def pointwise_model(seed: int, nodes: int) -> onnx.ModelProto:
    """Unary and binary operators on one shape only: groups grow to whatever cap there is."""
    w = Writer(seed)
    w.input((4, 6))
    while len(w.nodes) < nodes:
        if w.rng.random() < 0.75:
            unary(w, w.pool[-1])
        else:
            w.node(w.rng.choice(BINARY), [w.pool[-1], w.rng.choice(w.pool[-8:])], (4, 6))
    return _model(w, seed, middle=0.0)


def random_model(seed: int, nodes: int | None = None) -> onnx.ModelProto:
    """A model of about `nodes` nodes (drawn from the seed if not given)."""
    w = Writer(seed)
    wanted = nodes or w.rng.randint(6, 40)
    for _ in range(w.rng.randint(1, 3)):
        w.input(w.rng.choice(((2, 8, 6, 6), (1, 4, 8, 8), (4, 6), (2, 5, 8), (6, 6))))
    weights = [weight for _, weight in MOVES]
    makers = [maker for maker, _ in MOVES]
    misses = 0
    while len(w.nodes) < wanted and misses < 1000:
        maker = w.rng.choices(makers, weights)[0]
        before = len(w.nodes)
        maker(w, w.pick())
        misses += len(w.nodes) == before
    return _model(w, seed)


def _model(w: Writer, seed: int, middle: float = 0.05) -> onnx.ModelProto:
    """Outputs are what nothing reads, and of the rest that share."""
    used = {i for n in w.nodes for i in n.input}
    made = [o for n in w.nodes for o in n.output]
    outs = [v for v in made if v not in used or w.rng.random() < middle]
    graph = helper.make_graph(
        w.nodes,
        f"random_{seed}",
        [helper.make_tensor_value_info(i, TensorProto.FLOAT, w.shape(i)) for i in w.inputs],
        [helper.make_tensor_value_info(o, TensorProto.FLOAT, w.shape(o)) for o in outs],
        w.consts,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)


# --- Moves: each adds one node that reads x, or none if x does not fit ------------------------------------------------


def unary(w: Writer, x: str) -> None:
    w.node(w.rng.choice(UNARY), [x], w.shape(x))


def binary(w: Writer, x: str) -> None:
    """With another value whose shape broadcasts."""
    fits = [x, *(y for y in w.pool[-12:] if broadcast(w.shape(x), w.shape(y)) is not None)]
    y = w.rng.choice(fits)
    shape = broadcast(w.shape(x), w.shape(y))
    if shape is None or prod(shape) > LARGEST:
        return
    pair = [x, y] if w.rng.random() < 0.5 else [y, x]
    w.node(w.rng.choice(BINARY), pair, shape)


def binary_constant(w: Writer, x: str) -> None:
    """With a constant: a scalar, of the last axis, of the channels, or of the same shape."""
    shape = w.shape(x)
    choices: list[Shape] = [(), shape[-1:], shape, tuple(d if w.rng.random() < 0.5 else 1 for d in shape)]
    w.node(w.rng.choice(BINARY), [x, w.weight(w.rng.choice(choices))], shape)


def transpose(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if len(shape) < 2:
        return
    perm = w.rng.sample(range(len(shape)), len(shape))
    w.node("Transpose", [x], tuple(shape[p] for p in perm), perm=perm)


def reshape(w: Writer, x: str) -> None:
    """Merge two neighbouring axes, split one, or flatten."""
    shape = w.shape(x)
    at = w.rng.randrange(len(shape)) if shape else 0
    if len(shape) > 1 and w.rng.random() < 0.6:
        at = min(at, len(shape) - 2)
        to = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    elif shape and len(shape) < 4 and shape[at] % 2 == 0:
        to = (*shape[:at], 2, shape[at] // 2, *shape[at + 1 :])
    else:
        return
    w.node("Reshape", [x, w.integers(to)], to)


def unsqueeze(w: Writer, x: str) -> None:
    shape = w.shape(x)
    units = [k for k, d in enumerate(shape) if d == 1]
    if units and len(shape) > 1:
        at = w.rng.choice(units)
        w.node("Squeeze", [x, w.integers((at,))], (*shape[:at], *shape[at + 1 :]))
    elif len(shape) < 4:
        at = w.rng.randint(0, len(shape))
        w.node("Unsqueeze", [x, w.integers((at,))], (*shape[:at], 1, *shape[at:]))


def slice_(w: Writer, x: str) -> None:
    shape = w.shape(x)
    wide = [k for k, d in enumerate(shape) if d > 1]
    if not wide:
        return
    at = w.rng.choice(wide)
    start = w.rng.randrange(shape[at] - 1)
    stop = w.rng.randint(start + 1, shape[at])
    bounds = [w.integers((v,)) for v in (start, stop, at)]
    w.node("Slice", [x, *bounds], (*shape[:at], stop - start, *shape[at + 1 :]))


def concat(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if not shape or prod(shape) * 2 > LARGEST:
        return
    at = w.rng.randrange(len(shape))

    def rest(s: Shape) -> Shape:
        return (*s[:at], 0, *s[at + 1 :])

    fits = [y for y in w.pool if len(w.shape(y)) == len(shape) and rest(w.shape(y)) == rest(shape)]
    y = w.rng.choice(fits)
    w.node("Concat", [x, y], (*shape[:at], shape[at] + w.shape(y)[at], *shape[at + 1 :]), axis=at)


def expand(w: Writer, x: str) -> None:
    shape = w.shape(x)
    to = tuple(4 if d == 1 else d for d in shape)
    if to == shape or prod(to) > LARGEST:
        return
    w.node("Expand", [x, w.integers(to)], to)


def reduce(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if not shape:
        return
    count = w.rng.randint(1, min(2, len(shape)))
    axes = sorted(w.rng.sample(range(len(shape)), count))
    keep = w.rng.random() < 0.7 or count == len(shape)
    out = tuple(1 if k in axes else d for k, d in enumerate(shape) if keep or k not in axes)
    op = w.rng.choice(REDUCE)
    if op == "ReduceSum":
        w.node(op, [x, w.integers(tuple(axes))], out, keepdims=int(keep))
    else:
        w.node(op, [x], out, axes=axes, keepdims=int(keep))


def matmul(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if len(shape) < 2:
        return
    n = w.rng.choice((4, 6, 8))
    w.node("MatMul", [x, w.weight((shape[-1], n))], (*shape[:-1], n))


def matmul_values(w: Writer, x: str) -> None:
    a = w.shape(x)
    fits = [
        y for y in w.pool if len(a) == len(w.shape(y)) > 1 and w.shape(y)[:-2] == a[:-2] and w.shape(y)[-2] == a[-1]
    ]
    if fits:
        y = w.rng.choice(fits)
        w.node("MatMul", [x, y], (*a[:-1], w.shape(y)[-1]))


def conv(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if len(shape) != 4 or min(shape[2:]) < 3 or shape[1] > 16:
        return
    n, c, h, wd = shape
    if w.rng.random() < 0.1:
        w.node("Conv", [x, w.weight((4, c, 1, 1)), w.weight((4,))], (n, 4, h, wd))
        return
    depthwise = w.rng.random() < 0.25
    k = w.rng.choice((1, 3))
    out = c if depthwise else w.rng.choice((4, 8))
    inputs = [x, w.weight((out, 1 if depthwise else c, k, k))]
    w.node("Conv", inputs, (n, out, h, wd), kernel_shape=[k, k], pads=[k // 2] * 4, group=c if depthwise else 1)


def pool(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if len(shape) != 4 or min(shape[2:]) < 4:
        return
    op = w.rng.choice(("MaxPool", "AveragePool"))
    out = (*shape[:2], shape[2] // 2, shape[3] // 2)
    w.node(op, [x], out, kernel_shape=[2, 2], strides=[2, 2])


def global_pool(w: Writer, x: str) -> None:
    shape = w.shape(x)
    if len(shape) == 4 and min(shape[2:]) > 1:
        w.node("GlobalAveragePool", [x], (*shape[:2], 1, 1))


def extreme(w: Writer, x: str) -> None:
    w.node(w.rng.choice(EXTREME), [x, w.weight(w.shape(x)[-1:])], w.shape(x))


def softmax(w: Writer, x: str) -> None:
    if w.shape(x):
        w.node("Softmax", [x], w.shape(x), axis=-1)


def layer_norm(w: Writer, x: str) -> None:
    if w.shape(x):
        row = w.shape(x)[-1:]
        w.node("LayerNormalization", [x, w.weight(row), w.weight(row)], w.shape(x), axis=-1)


def gather(w: Writer, x: str) -> None:
    """Two rows."""
    shape = w.shape(x)
    if shape and shape[0] > 1:
        w.node("Gather", [x, w.integers((0, shape[0] - 1))], (2, *shape[1:]), axis=0)


def split(w: Writer, x: str) -> None:
    """Into two; both halves go on."""
    shape = w.shape(x)
    if not shape or shape[-1] % 2:
        return
    half = (*shape[:-1], shape[-1] // 2)
    first = w.node("Split", [x], half, axis=-1)
    second = f"{first}b"
    w.nodes[-1].output.append(second)
    w.shapes[second] = half
    w.pool.append(second)


MOVES: tuple[tuple[Callable[[Writer, str], None], float], ...] = (
    (unary, 8),
    (binary, 6),
    (binary_constant, 4),
    (transpose, 2),
    (reshape, 1.5),
    (unsqueeze, 1),
    (slice_, 1),
    (concat, 1),
    (expand, 1),
    (reduce, 2.5),
    (matmul, 1),
    (matmul_values, 1),
    (conv, 2.5),
    (pool, 0.7),
    (global_pool, 0.3),
    (softmax, 0.5),
    (layer_norm, 0.4),
    (gather, 0.2),
    (split, 0.2),
    (extreme, 0.2),
)


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """NumPy's broadcast shape, None if there is none."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    out = []
    for p, q in pairs:
        if p != q and 1 not in (p, q):
            return None
        out.append(q if p == 1 else p)
    return tuple(out)
