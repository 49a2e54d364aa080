"""Constant folding. Graph -> Graph: nodes whose results are known become constants.

Known are (a) integer and bool elements that type inference has worked out (shape arithmetic; `facts`), and (b)
whatever `evaluate` computes from constant inputs. Never folded: random ops, foreign domains, subgraphs, training mode,
overridable initializers, quantisation. A result may exceed the constants it frees by `fold_growth` bytes, all results
together by `fold_total`; the size is worked out before anything is evaluated; a node whose size cannot be told is left
alone. Every refusal leaves a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxfuse.frontend.cse import RANDOM
from onnxfuse.frontend.noop import in_training
from onnxfuse.frontend.rewrite import Note
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Lit
from onnxfuse.ir.graph import ArrayConst, Constant, Foreign, Graph, Node, Value
from onnxfuse.ir.types import TensorType, tensor

# The runtime's integer kernels are found by these nodes around an op: folding one would make the model slower.
QUANTISED = frozenset({"QuantizeLinear", "DequantizeLinear"})
GENERATED = 64 * 1024  # bytes: what an op that only spreads or repeats its input may add; inside a kernel it is free

Evaluate = Callable[[Node, Sequence[np.ndarray | None]], list[np.ndarray] | None]
Facts = Mapping[Value, np.ndarray]


def fold(graph: Graph, facts: Facts, growth: int, evaluate: Evaluate, left: int = 1 << 62) -> tuple[Graph, list[Note]]:
    """Fold what is known, in one pass in topological order. `left`: what the growth of all nodes may come to."""
    consts: dict[Value, Constant] = dict(graph.consts)
    uses = {v: len(readers) for v, readers in graph.uses().items()}
    outputs = set(graph.outputs)
    steering = _steering(graph)
    swap: dict[Value, Value] = {}
    kept: list[Node] = []
    notes: list[Note] = []
    for node in graph.nodes:
        node = _reading(node, swap)
        inputs = None if steering & set(node.results) else _constant_inputs(node, consts)
        if inputs is not None and _traps(node, inputs, consts):
            notes.append(Note(node.name, "FOLD_DIVISOR", f"{node.op}: integer division by zero, or MIN / -1"))
            kept.append(node)
            continue
        made = None if steering & set(node.results) else _from_facts(node, facts)
        if made is None:
            if inputs is None:
                kept.append(node)
                continue
            freed = sum(consts[v].nbytes for v in dict.fromkeys(node.reads) if uses.get(v) == 1 and v not in outputs)
            made = _computed(node, inputs, consts, freed + max(0, min(growth, left)), evaluate, notes)
            left -= max(0, sum(a.nbytes for a in made or ()) - freed)
        if made is None:
            kept.append(node)
            continue
        for old, array in zip(node.results, made, strict=True):
            new = _typed(old, array)
            consts[new] = ArrayConst(array)
            uses[new] = uses.get(old, 0)
            if new is not old:
                swap[old] = new
    if len(kept) == len(graph.nodes):
        return graph, notes
    final = tuple(swap.get(v, v) for v in graph.outputs)
    return replace(graph, nodes=tuple(kept), consts=consts, outputs=final), notes


def _steering(graph: Graph) -> set[Value]:
    """Conditions of nodes with bodies, and everything they are computed from.

    A condition that becomes constant makes the runtime inline the branch it takes, and refuse the model where types
    that were never looked at do not fit. What the original leaves to run time stays there.
    """
    bodies = (n for n in graph.nodes if any(isinstance(a, Foreign) for a in n.attrs.values()))
    found = {v for n in bodies for v in n.inputs if v is not None and (v.type is None or v.type.dtype is DType.BOOL)}
    for node in reversed(graph.nodes):
        if found & set(node.results):
            found.update(node.reads)
    return found


def _reading(node: Node, swap: Mapping[Value, Value]) -> Node:
    if not any(v in swap for v in node.reads):
        return node
    inputs = tuple(None if v is None else swap.get(v, v) for v in node.inputs)
    return replace(node, inputs=inputs, captures=tuple(swap.get(v, v) for v in node.captures))


def _typed(value: Value, array: np.ndarray) -> Value:
    dtype = DType.from_numpy(array.dtype)
    found = value.type if dtype is None else tensor(dtype, array.shape)
    return value if found == value.type else Value(value.name, found)


def _from_facts(node: Node, facts: Facts) -> list[np.ndarray] | None:
    """Results that inference knows element by element; integers and bools only (they are exact)."""
    out: list[np.ndarray] = []
    for v in node.results:
        known, t = facts.get(v), v.type
        if known is None or t is None or t.dtype.is_float or not t.dtype.computable:
            return None
        if not all(isinstance(e, Lit) for e in known.flat):
            return None
        out.append(np.array([e.value for e in known.flat], dtype=t.dtype.numpy).reshape(known.shape))
    return out or None


def _constant_inputs(node: Node, consts: Mapping[Value, Constant]) -> list[Value | None] | None:
    """The inputs when all of them are constants and the op is a function of them."""
    never = node.op.name in QUANTISED or node.op.name in RANDOM - {"Dropout"}
    foldable = not node.op.domain and not node.captures and not never
    if not foldable or not node.results or any(isinstance(a, Foreign) for a in node.attrs.values()):
        return None
    if in_training(node, consts) or any(v is not None and v not in consts for v in node.inputs):
        return None
    return list(node.inputs)


def _computed(
    node: Node,
    inputs: Sequence[Value | None],
    consts: Mapping[Value, Constant],
    allowed: int,
    evaluate: Evaluate,
    notes: list[Note],
) -> list[np.ndarray] | None:
    size = _result_bytes(node, consts)
    if size is None:
        notes.append(Note(node.name, "FOLD_SIZE", f"{node.op}: the size of the result is not known"))
        return None
    if node.op.name in SIZES:
        allowed = min(allowed, GENERATED)
    if size > allowed:
        notes.append(Note(node.name, "FOLD_GROWTH", f"{node.op}: result {size} bytes > {allowed} allowed"))
        return None
    arrays = [None if v is None else consts[v].numpy() for v in inputs]
    made = evaluate(node, arrays)
    if made is None or len(made) != len(node.results):
        notes.append(Note(node.name, "FOLD_EVALUATE", f"{node.op}: onnxruntime did not compute it"))
        return None
    real = sum(a.nbytes for a in made)
    if real > allowed:
        notes.append(Note(node.name, "FOLD_GROWTH", f"{node.op}: result {real} bytes > {allowed} allowed"))
        return None
    return made


def _traps(node: Node, inputs: Sequence[Value | None], consts: Mapping[Value, Constant]) -> bool:
    """Integer division the machine traps on, or whose result the standard leaves open."""
    if node.op.name not in ("Div", "Mod") or len(inputs) != 2 or inputs[0] is None or inputs[1] is None:
        return False
    divisor = inputs[1].type
    if divisor is not None and divisor.dtype.is_float:
        return False
    a, b = consts[inputs[0]].numpy(), consts[inputs[1]].numpy()
    if b.dtype.kind not in "iu":
        return False
    smallest = a.dtype.kind == "i" and bool((a == np.iinfo(a.dtype).min).any())
    return bool((b == 0).any()) or (smallest and bool((b == -1).any()))


# --- how large would it be? ------------------------------------------------------------------------------------------
def _result_bytes(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    known = [_static_bytes(v.type) for v in node.results]
    if all(k is not None for k in known):
        return sum(k for k in known if k is not None)
    count = SIZES[node.op.name](node, consts) if node.op.name in SIZES else _bound(node)
    return None if count is None else count * 8 * len(node.results)


def _static_bytes(t: TensorType | None) -> int | None:
    if t is None or not t.static or not t.dtype.computable:
        return None
    return math.prod(int(d) for d in t.shape if isinstance(d, int)) * t.dtype.bytes


def _bound(node: Node) -> int | None:
    """Any other op makes at most the product of its inputs' sizes (an outer product)."""
    total = 1
    for v in node.inputs:
        if v is None:
            continue
        if v.type is None or not isinstance(v.type.size, int):
            return None
        total *= max(1, v.type.size)
    return total


def _values(node: Node, consts: Mapping[Value, Constant], k: int) -> np.ndarray | None:
    v = node.inputs[k] if k < len(node.inputs) else None
    return None if v is None or v not in consts else consts[v].numpy()


def _shape(node: Node, k: int) -> tuple[int, ...] | None:
    v = node.inputs[k] if k < len(node.inputs) else None
    if v is None or v.type is None or not v.type.static:
        return None
    return tuple(int(d) for d in v.type.shape if isinstance(d, int))


def _product(numbers: np.ndarray | Sequence[int]) -> int:
    return math.prod(max(0, int(n)) for n in np.asarray(numbers).reshape(-1).tolist())


def _of_shape(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    shape = _values(node, consts, 0)
    return None if shape is None else _product(shape)


def _expand(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    shape, own = _values(node, consts, 1), _shape(node, 0)
    return None if shape is None or own is None else _product(shape) * math.prod(own)


def _tile(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    repeats, own = _values(node, consts, 1), _shape(node, 0)
    return None if repeats is None or own is None else _product(repeats) * math.prod(own)


def _range(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    start, limit, step = (_values(node, consts, k) for k in range(3))
    if start is None or limit is None or step is None or float(step) == 0:
        return None
    count = (float(limit) - float(start)) / float(step)
    return max(0, math.ceil(count)) if math.isfinite(count) else None


def _one_hot(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    own, depth = _shape(node, 0), _values(node, consts, 1)
    return None if own is None or depth is None else math.prod(own) * max(0, int(depth.reshape(-1)[0]))


def _pad(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    own, pads = _shape(node, 0), node.attrs.get("pads", _values(node, consts, 1))
    if own is None or pads is None:
        return None
    grown = int(np.abs(np.asarray(pads, dtype=np.int64)).sum())
    return math.prod(d + grown for d in own)


def _resize(node: Node, consts: Mapping[Value, Constant]) -> int | None:
    own = _shape(node, 0)
    sizes = _values(node, consts, 3)
    if sizes is not None and sizes.size:
        return None if own is None else _product(sizes) * math.prod(own)
    scales = node.attrs.get("scales", _values(node, consts, 2 if len(node.inputs) > 2 else 1))
    if own is None or scales is None:
        return None
    return math.prod(math.ceil(d * max(1.0, float(s))) for d, s in zip(own, np.asarray(scales).tolist(), strict=False))


def _unknown(_node: Node, _consts: Mapping[Value, Constant]) -> int | None:
    return None


# Ops whose result can be larger than the product of their inputs. Upper bounds, in elements.
SIZES: Mapping[str, Callable[[Node, Mapping[Value, Constant]], int | None]] = {
    "ConstantOfShape": _of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "OneHot": _one_hot,
    "EyeLike": lambda node, _consts: None if _shape(node, 0) is None else math.prod(_shape(node, 0) or ()),
    "Pad": _pad,
    "Resize": _resize,
    "Upsample": _resize,
    "Conv": _unknown,
    "MaxPool": _unknown,
    "AveragePool": _unknown,
    "LpPool": _unknown,
    "ConvTranspose": _unknown,
    "MaxUnpool": _unknown,
    "Col2Im": _unknown,
    "CenterCropPad": _unknown,
    "GridSample": _unknown,
    "AffineGrid": _unknown,
    "HannWindow": _unknown,
    "HammingWindow": _unknown,
    "BlackmanWindow": _unknown,
    "MelWeightMatrix": _unknown,
    "DFT": _unknown,
    "STFT": _unknown,
    "ImageDecoder": _unknown,
    "RoiAlign": _unknown,
    "MaxRoiPool": _unknown,
}
