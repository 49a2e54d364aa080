"""Types of a node's outputs, and composites: a formula over graph values, written out as nodes.

The two need each other: the types of a composite are those of its nodes, and a node is built with its types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import ArrayConst, Attrs, AttrValue, Node, Value, fresh_name
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.simplify import poly
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.ops.dsl import Known
from onnxfuse.ops.known import known_constant, known_elements
from onnxfuse.ops.lowering import Facts, answering, call, definitions, reference
from onnxfuse.ops.table import OPS, lookup, parameters

MOST_AXES = 16  # of a tensor: index arithmetic grows with the square
LARGEST_BYTES = 1 << 60  # of a tensor; kernels refuse more at run time too (codegen/dims.py)


@answering
def infer(node: Node, facts: Facts, opset: int) -> list[TensorType]:
    """Types of a node's outputs. Raises Unsupported when the table cannot tell."""
    if node.op.family is Family.COMPOSITE:
        types = _of_formula(node, facts, opset)
    elif node.op.family is Family.OPAQUE and node.op in OPS.get((node.op.domain, node.op.name), ()):
        types = _told(node, facts, node.op.fn)  # not for an op of another family that a node's attributes made opaque
    else:
        types = [tensor(d.dtype, d.shape) for d in definitions(node, facts)]
    for t in types:
        _refuse_impossible(node, t)
    return types


def _refuse_impossible(node: Node, t: TensorType) -> None:
    """No tensor has negative dimensions, or more bytes than can be addressed."""
    if t.rank > MOST_AXES:
        raise Unsupported(
            "UN_MISFIT", f"{node.op} node {node.name!r} makes a tensor of {t.rank} axes, at most {MOST_AXES}"
        )
    known = [d for d in t.shape if isinstance(d, int)]
    known += [abs(c) for d in t.shape if not isinstance(d, int) for c in poly(d).values()]
    total = t.dtype.bytes if t.dtype.computable else 1
    for d in known:
        total *= max(d, 1)
    if any(d < 0 for d in known) or total > LARGEST_BYTES:
        raise Unsupported("UN_MISFIT", f"{node.op} node {node.name!r} makes {t}, which no memory holds")


def _of_formula(node: Node, facts: Facts, opset: int) -> list[TensorType]:
    """Types of a composite's outputs: its formula's, or what the entry says where the formula declines the node."""
    try:
        return [g.type for g in expand(node, facts, opset).results]
    except Unsupported:
        if node.op.types is None:
            raise
    return _told(node, facts, node.op.types)


def _told(node: Node, facts: Facts, fn: Callable[..., Any] | None) -> list[TensorType]:
    """Types that a function of the entry's signature gives for tensor references."""
    if fn is None:
        raise Unsupported("UN_OPAQUE", f"{node.op} is never fused", node.op.reason)
    made = call(node, fn, [reference(v, facts) for v in node.inputs])
    return list(made) if isinstance(made, list) else [made]


class GraphTensor:
    """A graph value inside a composite body. Operators build nodes; Python numbers become constants."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: Builder, value: Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def type(self) -> TensorType:
        return self.value.tensor

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def known(self) -> Known | None:
        return self.builder.facts.get(self.value)

    def ints(self) -> list[int]:
        """Known constant integers (axes ...)."""
        ref = reference(self.value, self.builder.facts)
        assert ref is not None
        return ref.ints()

    def _bin(self, name: str, other: Any, swap: bool = False) -> GraphTensor:
        rhs = other if isinstance(other, GraphTensor) else self.builder.constant(other, self.dtype)
        made = self.builder.call(name, (rhs, self) if swap else (self, rhs), {})
        assert isinstance(made, GraphTensor)
        return made

    def __add__(self, other: Any) -> GraphTensor:
        return self._bin("Add", other)

    def __radd__(self, other: Any) -> GraphTensor:
        return self._bin("Add", other, swap=True)

    def __sub__(self, other: Any) -> GraphTensor:
        return self._bin("Sub", other)

    def __rsub__(self, other: Any) -> GraphTensor:
        return self._bin("Sub", other, swap=True)

    def __mul__(self, other: Any) -> GraphTensor:
        return self._bin("Mul", other)

    def __rmul__(self, other: Any) -> GraphTensor:
        return self._bin("Mul", other, swap=True)

    def __truediv__(self, other: Any) -> GraphTensor:
        return self._bin("Div", other)

    def __rtruediv__(self, other: Any) -> GraphTensor:
        return self._bin("Div", other, swap=True)


@dataclass(slots=True, eq=False)
class Builder:
    """Collects the nodes a composite expands to. `prefix` names the new values."""

    opset: int
    prefix: str
    origin: tuple[str, ...]
    facts: dict[Value, Known]
    taken: set[str]
    nodes: list[Node] = field(default_factory=list)
    consts: dict[Value, ArrayConst] = field(default_factory=dict)
    _interned: dict[tuple[object, ...], GraphTensor] = field(default_factory=dict)

    def constant(self, data: Any, dtype: DType, rank: int | None = None) -> GraphTensor:
        """A constant tensor (scalars are rank 0)."""
        array = np.asarray(data, dtype=dtype.numpy)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._interned:
            value = Value(fresh_name(f"{self.prefix}.const", self.taken), tensor(dtype, array.shape))
            self.consts[value] = ArrayConst(array)
            self.facts[value] = known_constant(array, dtype)
            self._interned[key] = GraphTensor(self, value)
        return self._interned[key]

    def call(self, name: str, args: Sequence[Any], attrs: Mapping[str, Any]) -> GraphTensor | tuple[GraphTensor, ...]:
        """Build a node of op `name` in the spelling of the model's opset; keyword values go where its schema wants."""
        op = lookup("", name, self.opset)
        if op is None or op.fn is None:
            raise Unsupported("UN_OPSET", f"{name} does not exist at opset {self.opset}")
        names = [p.name for p in parameters(op)[0]]
        inputs = [self._operand(a, args) for a in args]
        rest: dict[str, AttrValue] = {}
        for key, value in attrs.items():
            if value is None:
                continue
            if key in names:
                while len(inputs) < names.index(key):
                    inputs.append(None)
                inputs.append(value if isinstance(value, GraphTensor) else self.constant(value, DType.I64))
            else:
                rest[key] = tuple(value) if isinstance(value, list) else value
        return self.node(op, inputs, rest)

    def _operand(self, a: Any, args: Sequence[Any]) -> GraphTensor | None:
        if a is None or isinstance(a, GraphTensor):
            return a
        like = next(x for x in reversed(args) if isinstance(x, GraphTensor))  # the last: of Where not the condition
        return self.constant(a, like.dtype)

    def node(
        self, op: Op, inputs: Sequence[GraphTensor | None], attrs: Attrs, outputs: int = 1
    ) -> GraphTensor | tuple[GraphTensor, ...]:
        """Append a node and infer its outputs' types."""
        label = fresh_name(f"{self.prefix}.{op.name}", self.taken)
        values = tuple(x.value if x is not None else None for x in inputs)
        draft = Node(op, values, tuple(Value(f"{label}.{k}", None) for k in range(outputs)), attrs, label, self.origin)
        types = infer(draft, self.facts, self.opset)
        made = tuple(Value(label if k == 0 else f"{label}.{k}", t) for k, t in enumerate(types[:outputs]))
        node = Node(op, values, made, attrs, label, self.origin)
        self.nodes.append(node)
        if op.family is Family.SHAPE or all(v is None or v in self.facts for v in values):
            for v, elements in zip(made, known_elements(node, self.facts), strict=False):
                if elements is not None:
                    self.facts[v] = elements
        out = tuple(GraphTensor(self, v) for v in made)
        return out[0] if outputs == 1 else out


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """Atomic nodes of one composite, with its outputs as graph tensors in order."""

    nodes: tuple[Node, ...]
    consts: Mapping[Value, ArrayConst]
    results: tuple[GraphTensor, ...]


@answering
def expand(node: Node, facts: Facts, opset: int, taken: set[str] | None = None) -> Expansion:
    """One level of a composite's formula. Raises Unsupported when the entry does not cover the node."""
    op = node.op
    assert op.fn is not None, op.name
    base = node.name or op.name
    b = Builder(opset, base, node.origin, dict(facts), set() if taken is None else taken)
    for v in node.inputs:
        reference(v, facts)  # raises for a value that is no tensor to compute with
    made = call(node, op.fn, [None if v is None else GraphTensor(b, v) for v in node.inputs])
    results = made if isinstance(made, tuple) else (made,)
    return Expansion(tuple(b.nodes), b.consts, results)
