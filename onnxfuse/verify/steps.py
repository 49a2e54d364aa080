"""Models whose products of dequantised numbers run in integers: every node on the original's own values.

A sum of integers is exact and the float sum it stands for is not, so a kernel's result may lie on the next step of its
quantiser. From there on the two models compute with different numbers, and layers of quantisers make of one step what
they like: the end says nothing about any kernel. So every node of ours is run on the values the original has there:

    a node with such products   at most one step, in at most one element of a hundred (or one alone); where the step is
                                quantised again in the same node, as many of the second quantiser's as it spans, and one
    any other node              as every output: by the tolerance of its type

and the end, for floats and bytes, may be off by a tenth of its size (root mean square). Reasons and numbers:
docs/decisions/qdq.md. In: the candidate, which without its library has the original's nodes, and inputs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

from onnxfuse.verify import ort

if TYPE_CHECKING:
    import onnx

Loaded = tuple[onnxruntime.InferenceSession, object]  # a session, and what must live as long
Make = Callable[["onnx.ModelProto", int, ort.Libraries], Loaded]  # of a model, threads, libraries

DOMAIN = "onnxfuse"
SHARE = 100  # one element of so many may be a step off
END = 0.1  # of the root mean square of an output
_PRODUCTS = frozenset({"Conv", "MatMul"})
_ROUNDING = 1e-5
_CHECKED = "/checked"


@dataclass(frozen=True, slots=True)
class NodeResult:
    """An output of a node: its values in the original and here, and by how much they may be off (0: not stepped)."""

    node: str
    reference: np.ndarray
    candidate: np.ndarray
    most: float

    def off(self) -> np.ndarray:
        """Differences, of bytes in steps."""
        with np.errstate(all="ignore"):
            return np.asarray(np.abs(self.reference.astype(np.float64) - self.candidate.astype(np.float64)))

    @property
    def moved(self) -> int:
        """Elements that are off by more than floats are rounded."""
        size = float(np.max(np.abs(self.reference.astype(np.float64)), initial=0.0))
        return int((self.off() > _ROUNDING * size).sum())

    def problem(self) -> str:
        """What is wrong with a result that may be a step off; "" when nothing is."""
        if self.reference.shape != self.candidate.shape or self.reference.dtype != self.candidate.dtype:
            return f"node {self.node}: {self.candidate.dtype}{list(self.candidate.shape)}"
        off = self.off()
        largest = float(np.max(off, initial=0.0))
        if not largest <= self.most * (1 + _ROUNDING):
            return f"node {self.node}: off by {largest:.3g}, at most {self.most:.3g}"
        count = self.moved
        if count > max(1, off.size // SHARE):
            return f"node {self.node}: {count} of {off.size} elements are a step off"
        return ""


def load(source: ort.Source) -> onnx.ModelProto:
    """The model with its weights."""
    import onnx
    import onnx_ir

    if isinstance(source, onnx.ModelProto):
        return source
    if isinstance(source, onnx_ir.Model):
        return onnx_ir.to_proto(source)
    if isinstance(source, bytes | bytearray):
        return onnx.load_from_string(bytes(source))
    return onnx.load(os.fspath(source))


def stepped(model: onnx.ModelProto) -> frozenset[str]:
    """Functions of ours that hold a product of dequantised numbers with a quantiser behind it."""
    found = set()
    for f in model.functions:
        names = {n.op_type for n in f.node}
        if f.domain == DOMAIN and {"DequantizeLinear", "QuantizeLinear"} <= names and names & _PRODUCTS:
            found.add(f.name)
    return frozenset(found)


def node_by_node(
    model: onnx.ModelProto,
    feeds: ort.Feeds,
    library: str | os.PathLike[str],
    libraries: ort.Libraries = (),
    threads: int = 0,
    make: Make | None = None,
) -> list[NodeResult]:
    """Every node of ours on the original's values. `libraries` are the user's own. Raises what onnxruntime raises.

    `make` loads models with initializers of `model`, if they are not in it.
    """
    make = make or _loaded
    nodes = [n for n in model.graph.node if n.domain == DOMAIN]
    weights = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    given = {i.name for i in model.graph.input} - weights
    read = dict.fromkeys(v for n in nodes for v in n.input if v and v not in weights)
    made = dict.fromkeys(v for n in nodes for v in n.output if v)
    inner = [v for v in dict.fromkeys((*read, *made)) if v not in given]
    values = _values(model, feeds, inner, lambda tapped: make(tapped, threads, libraries))
    values |= {v: np.asarray(feeds[v]) for v in read if v in given}
    sess, _held = make(_checks(model, nodes, {v: values[v] for v in read}), threads, [library])
    taken = {i.name for i in sess.get_inputs()}
    results = ort.run(sess, {v: values[v] for v in read if v in taken})
    steps = stepped(model)
    out = []
    for n in nodes:
        scales = _scales(model, n) if n.op_type in steps else []
        for v in filter(None, n.output):
            mine = np.asarray(results[v + _CHECKED])
            out.append(NodeResult(n.name, values[v], mine, _most(scales, values[v].dtype)))
    return out


def _loaded(model: onnx.ModelProto, threads: int, libraries: ort.Libraries) -> Loaded:
    return ort.session(model, threads=threads, libraries=libraries), None


def _values(
    model: onnx.ModelProto, feeds: ort.Feeds, names: Sequence[str], make: Callable[[onnx.ModelProto], Loaded]
) -> dict[str, np.ndarray]:
    """Values inside the model without our library: the original's."""
    import onnx

    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    del tapped.graph.output[:]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    sess, _held = make(tapped)
    return {k: np.asarray(v) for k, v in ort.run(sess, feeds).items()}


def _checks(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, np.ndarray]
) -> onnx.ModelProto:
    """The nodes side by side, none reading another."""
    import onnx

    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    graph = alone.graph
    for field in ("node", "input", "output", "value_info", "initializer", "quantization_annotation"):
        graph.ClearField(field)
    read = {v for n in nodes for v in n.input}
    graph.initializer.extend(t for t in model.graph.initializer if t.name in read)
    for v, array in inputs.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        graph.input.append(onnx.helper.make_tensor_value_info(v, kind, array.shape))
    for n in nodes:
        copy = graph.node.add()
        copy.CopyFrom(n)
        copy.output[:] = [v and v + _CHECKED for v in n.output]
        graph.output.extend(onnx.ValueInfoProto(name=v) for v in copy.output if v)
    return alone


def _most(scales: Sequence[float], dtype: np.dtype) -> float:
    """How far an output may be off, for the scales of the node's quantisers."""
    if not scales or dtype.kind == "f":
        return max(scales, default=0.0)
    return 1.0 if len(scales) == 1 else math.floor(max(scales) / min(scales)) + 1.0


def _scales(model: onnx.ModelProto, node: onnx.NodeProto) -> list[float]:
    """The largest scale of every quantiser in the node's function."""
    import onnx

    function = next(f for f in model.functions if f.domain == DOMAIN and f.name == node.op_type)
    outer = dict(zip(function.input, node.input, strict=False))
    weights = {t.name: t for t in model.graph.initializer}
    inner = {n.output[0]: n.attribute[0].t for n in function.node if n.op_type == "Constant"}
    found = (n.input[1] for n in function.node if n.op_type == "QuantizeLinear")
    tensors = [inner.get(v) or weights.get(outer.get(v, "")) for v in found]
    return [float(np.max(onnx.numpy_helper.to_array(t))) for t in tensors if t is not None]


def end_problem(reference: np.ndarray, candidate: np.ndarray) -> str:
    """What is wrong with an output of the whole model that is reached by other steps; "" when nothing is."""
    if reference.dtype.kind not in "f" and reference.dtype.itemsize > 1:
        return "integers that hang on quantised numbers differ"
    x, y = reference.astype(np.float64), candidate.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if not bool(np.isfinite(x[~same]).all() and np.isfinite(y[~same]).all()):
        return "infinities or NaN differ"
    off, size = (float(np.sqrt(np.mean(np.square(v, where=np.isfinite(v), out=np.zeros_like(v))))) for v in (x - y, x))
    return "" if off <= END * size else f"off by {off:.3g}, of {size:.3g} (root mean square)"
