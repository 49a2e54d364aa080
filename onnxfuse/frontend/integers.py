"""Products of dequantised numbers become products of integers. Graph -> Graph.

    Q(Conv(DQ(x), DQ(w), DQ(b)))    becomes QLinearConv(x, w, b)
    Q(MatMul(DQ(a), DQ(b)))         becomes QLinearMatMul(a, b)

for signed bytes with constant scales, also with a Relu or a Clip before the quantiser (then a Clip of bytes follows:
quantising is monotone). It is what onnxruntime's default level makes of them. The integer sum is exact, the one in
floats is not, so a result differs where a rounding falls the other way: by one step (docs/decisions/qdq.md).

The new node is spelled as the user's own ones: they are what is written, in a function's body or where it stays. Where
something was rewritten, every reader gets a dequantiser of its own, so that it may run with its reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxfuse.frontend.rewrite import Note, renamed, taken_names
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import ArrayConst, Constant, Graph, Node, Spelling, Value, fresh_name
from onnxfuse.ir.types import tensor
from onnxfuse.ops.table import lookup

DQ_KEPT = "DQ_KEPT"
_FORMS = {"Conv": "QLinearConv", "MatMul": "QLinearMatMul"}
_BYTE_CLIP = 12  # first opset in which Clip takes bytes


def integers(graph: Graph) -> tuple[Graph, list[Note]]:
    """Rewrite every such product (see the module docstring). Refusals leave a note."""
    work = _Work(graph)
    for q in graph.nodes:
        if _is(q, "QuantizeLinear"):
            work.visit(q)
    if not work.new:
        return graph, work.notes
    nodes = [m for n in graph.nodes if n not in work.gone for m in work.new.get(n, (n,))]
    own = _each_its_own(nodes, graph.escapes(), work.taken)
    return replace(graph, nodes=tuple(own), consts=work.consts), work.notes


def _is(node: Node | None, name: str) -> bool:
    return node is not None and node.op.name == name and not node.op.domain


class _NoError(Exception):
    """Why a product stays as it is; never leaves this file."""


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """A quantiser or dequantiser: its node, scales, zero points (None: 0), and the integers on its other side."""

    node: Node
    values: Value
    scale: Value
    zero: Value | None


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A product, what dequantises its operands (the bias last), what comes before the quantiser, and that."""

    product: Node
    operands: tuple[_Steps, ...]
    steps: tuple[Node, ...]
    result: _Steps


@dataclass(slots=True, eq=False)
class _Work:
    """What has been found. `new`: quantiser -> what takes its place; `gone`: nodes that nobody needs any more."""

    graph: Graph
    new: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    gone: set[Node] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
    consts: dict[Value, Constant] = field(init=False)
    taken: set[str] = field(init=False)
    makers: Mapping[Value, Node] = field(init=False)
    alone: set[Value] = field(init=False)  # values with one reader, that are no output

    def __post_init__(self) -> None:
        graph = self.graph
        self.consts = dict(graph.consts)
        self.taken = taken_names(graph)
        self.makers = graph.producers()
        self.alone = {v for v, readers in graph.uses().items() if len(readers) == 1} - graph.escapes()

    def visit(self, q: Node) -> None:
        found = self._match(q)
        if found is None:
            return
        try:
            self.new[q] = self._rewritten(found)
        except _NoError as no:
            self.notes.append(Note(found.product.name, DQ_KEPT, str(no)))
        else:
            self.gone.update((found.product, *found.steps))

    def _match(self, q: Node) -> _Found | None:
        """The product of signed bytes before a quantiser to signed bytes; None where there is none."""
        result = _steps(q, q.outputs[0])
        at = q.inputs[0]
        steps: list[Node] = []
        while at in self.alone and (maker := self.makers.get(at)) is not None and at is not None:
            if maker.op.domain or maker.op.name not in ("Relu", "Clip"):
                break
            steps.insert(0, maker)
            at = maker.inputs[0]
        product = self.makers.get(at) if at is not None and at in self.alone else None
        if result is None or product is None or product.op.domain or product.op.name not in _FORMS:
            return None
        makers = [None if v is None else self.makers.get(v) for v in product.inputs]
        operands = [_steps(m, m.inputs[0]) if m is not None and _is(m, "DequantizeLinear") else None for m in makers]
        signed = [s for s in (result, *operands[:2]) if s is not None and _dtype(s.values) is DType.I8]
        if len(signed) != 3:
            return None
        return _Found(product, tuple(s for s in operands if s is not None), tuple(steps), result)

    def _array(self, v: Value | None, what: str) -> np.ndarray:
        if v is None:
            return np.zeros((), np.int8)
        if v not in self.graph.consts:
            raise _NoError(f"{what} {v.name!r} is not a constant")
        return np.asarray(self.graph.consts[v].numpy())

    def _one(self, v: Value | None, what: str) -> float:
        array = self._array(v, what)
        if array.size != 1:
            raise _NoError(f"{array.size} {what}s for one tensor")
        return float(array.reshape(-1)[0])

    def _scales(self, s: _Steps) -> np.ndarray:
        scales = self._array(s.scale, "scale")
        if scales.dtype != np.float32 or not bool(np.all(np.isfinite(scales) & (scales > 0))):
            raise _NoError(f"scales {s.scale.name!r} are not positive f32")
        return scales

    def _rewritten(self, f: _Found) -> tuple[Node, ...]:
        if len(f.operands) != sum(v is not None for v in f.product.inputs):
            raise _NoError("an operand is not dequantised")
        x, w, *_ = f.operands
        for s in (x, f.result):
            self._one(s.scale, "scale")
            self._one(s.zero, "zero point")
        for s in (x, w, f.result):
            self._scales(s)
        self._weights(f.product, w)
        bias = f.operands[2] if len(f.operands) > 2 else None
        if f.product.op.name == "Conv":
            self._fits(f, bias)
        low, high = self._bounds(f)
        made = self._form(f, bias)
        if (low, high) == DType.I8.limits:
            return (made,)
        return self._clipped(made, f, low, high)

    def _weights(self, product: Node, w: _Steps) -> None:
        """Scales of weights: one, or one per result column."""
        scales = self._scales(w)
        if scales.size == 1 and w.scale.tensor.rank <= 1:
            return
        rank = w.values.tensor.rank
        axis = int(w.node.attrs.get("axis", 1)) % rank  # type: ignore[arg-type]
        column = 0 if product.op.name == "Conv" else rank - 1
        if scales.ndim != 1 or axis != column or w.node.attrs.get("block_size", 0):
            raise _NoError(f"scales of shape {list(scales.shape)} along axis {axis} of the weights")
        if product.op.name == "MatMul" and rank != 2:
            raise _NoError("scales per column of a batch of matrices")

    def _fits(self, f: _Found, bias: _Steps | None) -> None:
        """No sum of a convolution, with its bias, may leave i32, and the bias counts in steps of the products."""
        x, w = f.operands[:2]
        weights = self._array(w.values, "weight").astype(np.int64)
        zeros = self._array(w.zero, "zero point").astype(np.int64).reshape(-1, *[1] * (weights.ndim - 1))
        low, high = DType.I8.limits
        zero = int(self._one(x.zero, "zero point"))
        sums = np.abs(weights - zeros).reshape(len(weights), -1).sum(axis=1) * max(high - zero, zero - low)
        if bias is None:
            largest = np.zeros((), np.int64)
        else:
            if _dtype(bias.values) is not DType.I32 or np.any(self._array(bias.zero, "zero point")):
                raise _NoError("the bias is not i32 around 0")
            product = (self._scales(x).reshape(()) * self._scales(w)).astype(np.float32)
            if not bool(np.all(self._scales(bias) == product)):
                raise _NoError("the scale of the bias is not that of the products")
            largest = np.abs(self._array(bias.values, "bias").astype(np.int64))
        if np.any(sums + largest > DType.I32.limits[1]):
            raise _NoError("the sums may leave i32")

    def _bounds(self, f: _Found) -> tuple[int, int]:
        """Between which bytes the result lies after Relu and Clip."""
        scale, zero = self._one(f.result.scale, "scale"), int(self._one(f.result.zero, "zero point"))
        low, high = DType.I8.limits
        for n in f.steps:
            ends = _ends(n, lambda v: self._one(v, "bound"))
            first, last = (_step(e, scale, zero) for e in ends)
            low, high = (min(max(v, first), last) for v in (low, high))
        return low, high

    def _form(self, f: _Found, bias: _Steps | None) -> Node:
        x, w = f.operands[:2]
        rows = [
            x.values,
            x.scale,
            self._zero(x),
            w.values,
            w.scale,
            self._zero(w),
            f.result.scale,
            self._zero(f.result),
        ]
        inputs = (*rows, *([] if bias is None else [bias.values]))
        op = lookup("", _FORMS[f.product.op.name], self.graph.opset)
        assert op is not None
        origin = [o for n in (*(s.node for s in f.operands), f.product, *f.steps, f.result.node) for o in n.origin]
        out = f.result.values
        return Node(
            op, inputs, (out,), f.product.attrs, f.product.name, tuple(dict.fromkeys(origin)),
            spelled=Spelling(tuple(self._spelled(f, bias)), inputs, out),
        )  # fmt: skip

    def _zero(self, s: _Steps) -> Value:
        """The zero point, which the integer forms ask for."""
        if s.zero is not None:
            return s.zero
        value = Value(fresh_name(f"{s.scale.name}.zero", self.taken), tensor(DType.I8, s.scale.tensor.shape))
        shape = [d for d in s.scale.tensor.shape if isinstance(d, int)]
        self.consts[value] = ArrayConst(np.zeros(shape, np.int8))
        return value

    def _spelled(self, f: _Found, bias: _Steps | None) -> Iterator[Node]:
        """The user's nodes without Relu and Clip; the scale of the bias is worked out, so that bodies can be shared."""
        for s in f.operands:
            if s is not bias:
                yield s.node
        if bias is not None:
            scale = Value("bias_scale", bias.scale.type)
            x, w = f.operands[:2]
            mul = lookup("", "Mul", self.graph.opset)
            assert mul is not None
            yield Node(mul, (x.scale, w.scale), (scale,), {}, f"{bias.node.name}.scale", ())
            attrs = {k: v for k, v in bias.node.attrs.items() if k == "axis"}
            yield replace(bias.node, inputs=(bias.values, scale), attrs=attrs, source=None)
        yield f.product
        yield replace(f.result.node, inputs=(f.product.outputs[0], *f.result.node.inputs[1:]))

    def _clipped(self, made: Node, f: _Found, low: int, high: int) -> tuple[Node, ...]:
        clip = lookup("", "Clip", self.graph.opset)
        if clip is None or self.graph.opset < _BYTE_CLIP:
            raise _NoError(f"opset {self.graph.opset} cannot clip bytes")
        out = f.result.values
        ends = []
        for name, end in (("low", low), ("high", high)):
            value = Value(fresh_name(f"{out.name}.{name}", self.taken), tensor(DType.I8, ()))
            self.consts[value] = ArrayConst(np.asarray(end, np.int8))
            ends.append(value)
        raw = Value(fresh_name(f"{out.name}.raw", self.taken), out.type)
        name = fresh_name(f"{f.steps[-1].name or out.name}.bytes", self.taken)
        return replace(made, outputs=(raw,)), Node(clip, (raw, *ends), (out,), {}, name, f.steps[-1].origin)


def _steps(node: Node, values: Value | None) -> _Steps | None:
    if values is None or len(node.inputs) < 2 or node.inputs[1] is None or values.type is None:
        return None
    if node.inputs[1].type is None or set(node.attrs) & {"precision", "output_dtype"}:
        return None
    return _Steps(node, values, node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None)


def _dtype(v: Value) -> DType | None:
    return None if v.type is None else v.type.dtype


def _ends(node: Node, number: Callable[[Value], float]) -> tuple[float, float]:
    """Between which numbers a Relu or Clip keeps its input."""
    if node.op.name == "Relu":
        return 0.0, math.inf
    ends = [-math.inf, math.inf]
    for k, name in enumerate(("min", "max")):
        given = node.inputs[k + 1] if k + 1 < len(node.inputs) else None
        attr = node.attrs.get(name)
        if given is not None:
            ends[k] = number(given)
        elif isinstance(attr, int | float):
            ends[k] = float(attr)
    if math.isnan(ends[0]) or math.isnan(ends[1]):
        raise _NoError("a bound is no number")
    return ends[0], ends[1]


def _step(x: float, scale: float, zero: int) -> int:
    """The byte that a float is quantised to."""
    low, high = DType.I8.limits
    with np.errstate(over="ignore"):
        steps = np.rint(np.float32(x) / np.float32(scale))
    return int(min(max(steps + zero, low), high))


def _each_its_own(nodes: list[Node], escapes: set[Value], taken: set[str]) -> Iterator[Node]:
    """Dequantisers of bytes that change, once per reader."""
    readers: dict[Value, list[Node]] = {}
    made = {v for n in nodes for v in n.results}
    for n in nodes:
        for v in dict.fromkeys(n.reads):
            readers.setdefault(v, []).append(n)
    swap: dict[Node, dict[Value, Value]] = {}
    for n in nodes:
        yield renamed(n, swap[n]) if n in swap else n
        x, y = n.inputs[0] if n.inputs else None, n.outputs[0]
        if not _is(n, "DequantizeLinear") or x not in made or y is None or _dtype(x) is not DType.I8:
            continue
        others = readers.get(y, [])[0 if y in escapes else 1 :]
        for reader in (r for r in others if not r.captures):
            copy = Value(fresh_name(y.name, taken), y.type)
            yield replace(n, outputs=(copy,), name=fresh_name(n.name, taken))
            swap.setdefault(reader, {})[y] = copy
