"""Types of every value, and the elements of small integer values (shape arithmetic). Graph -> Typed.

In: a graph whose inputs and constants are typed. Out: the same graph with a type on every value the op table can type;
other values get their *hint* (onnx shape inference: element type, rank, static dimensions; unknown dimensions become
fresh symbols). User value_info is never trusted. Dimensions are expressions over the input symbols, so two values with
equal expressions have equal shapes.

A dimension that is broadcast at run time (scores of `past + 1` keys plus a mask of `total`) is `bdim(past + 1, total)`.
Where a product demands that it equals `past + 1` (the values have as many rows) it is that in the whole graph, and the
addition checks it (ops/lowering.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.ir.expr import Apply, Expr, substitute, sym, walk
from onnxfuse.ir.graph import Graph, Node, Value
from onnxfuse.ir.op import Family
from onnxfuse.ir.simplify import as_dim, dim_expr, same, simplify
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.ops.dsl import Known
from onnxfuse.ops.expansion import infer
from onnxfuse.ops.known import KNOWN_LIMIT, known_constant, known_elements
from onnxfuse.ops.lowering import definitions

Hints = Mapping[str, TensorType | None]


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """A typed graph, the known elements of its values, and why nodes could not be typed."""

    graph: Graph
    facts: Mapping[Value, Known]
    refusals: Mapping[Node, Refusal]


def infer_types(graph: Graph, hints: Hints | None = None, known: Mapping[Value, Known] | None = None) -> Typed:
    """Type every value of `graph` (see the module docstring). `known` are elements of inputs."""
    typed = _typed(graph, hints or {}, known or {}, {})
    agreed = _agreed(typed)
    return _typed(typed.graph, hints or {}, known or {}, agreed) if agreed else typed


def _typed(graph: Graph, hints: Hints, known: Mapping[Value, Known], agreed: Mapping[Expr, Expr]) -> Typed:
    facts = {**known, **_constant_facts(graph)}
    new: dict[Value, Value] = {}
    nodes: list[Node] = []
    refusals: dict[Node, Refusal] = {}
    for node in graph.nodes:
        typed, refusal = _type_node(_remap(node, new), facts, hints, graph.opset, new, agreed)
        nodes.append(typed)
        if refusal is not None:
            refusals[typed] = refusal
    outputs = tuple(new.get(v, v) for v in graph.outputs)
    return Typed(replace(graph, nodes=tuple(nodes), outputs=outputs), facts, refusals)


def _agreed(typed: Typed) -> dict[Expr, Expr]:
    """Broadcast dimensions that products hold equal to one of their two sides."""
    found: dict[Expr, Expr] = {}
    for node in typed.graph.nodes:
        if node.op.family is not Family.CONTRACT or not any(map(_is_broadcast, node.reads)):
            continue
        try:
            needs = [n for d in definitions(node, typed.facts) for n in d.needs]
        except Unsupported:
            continue
        for n in needs:
            for whole, part in (n.args, n.args[::-1]) if isinstance(n, Apply) and n.prim.name == "eq" else ():
                if isinstance(whole, Apply) and whole.prim.name == "bdim" and any(same(part, a) for a in whole.args):
                    found[whole] = part
    return found


def _is_broadcast(v: Value) -> bool:
    dims = () if v.type is None else (d for d in v.type.shape if not isinstance(d, int))
    return any(isinstance(e, Apply) and e.prim.name == "bdim" for e in walk(*map(dim_expr, dims)))


def _constant_facts(graph: Graph) -> dict[Value, Known]:
    facts: dict[Value, Known] = {}
    for value, const in graph.consts.items():
        t = value.type
        if t is None or not t.dtype.computable or not isinstance(t.size, int):
            continue
        # Integers may be shapes, axes, indices; of floats only what a body asks for at compile time is worth it.
        limit = KNOWN_LIMIT if not t.dtype.is_float else 16
        if t.size <= limit:
            facts[value] = known_constant(const.numpy(), t.dtype)
    return facts


def _remap(node: Node, new: Mapping[Value, Value]) -> Node:
    if not any(v in new for v in node.reads):
        return node
    inputs = tuple(None if v is None else new.get(v, v) for v in node.inputs)
    return replace(node, inputs=inputs, captures=tuple(new.get(v, v) for v in node.captures))


def _type_node(
    node: Node,
    facts: dict[Value, Known],
    hints: Hints,
    opset: int,
    new: dict[Value, Value],
    agreed: Mapping[Expr, Expr],
) -> tuple[Node, Refusal | None]:
    refusal = None
    types: list[TensorType | None]
    try:
        types = [_with(t, agreed) for t in infer(node, facts, opset)]
    except Unsupported as error:
        types, refusal = [], error.refusal()
    outputs: list[Value | None] = []
    for k, v in enumerate(node.outputs):
        if v is None:
            outputs.append(None)
            continue
        found = types[k] if k < len(types) else _hint(v, hints)
        typed = v if _equal(v.type, found) else Value(v.name, found)
        if typed is not v:
            new[v] = typed
        outputs.append(typed)
    if any(a is not b for a, b in zip(outputs, node.outputs, strict=True)):
        node = replace(node, outputs=tuple(outputs))
    if refusal is None:
        _record_facts(node, facts)
    return node, refusal


def _with(t: TensorType, agreed: Mapping[Expr, Expr]) -> TensorType:
    if not agreed or all(isinstance(d, int) for d in t.shape):
        return t
    return tensor(t.dtype, [as_dim(simplify(substitute(dim_expr(d), agreed))) for d in t.shape])


def _hint(v: Value, hints: Hints) -> TensorType | None:
    hint = hints.get(v.name, v.type)
    if hint is None:
        return None
    dims: list[Dim] = [d if isinstance(d, int) else sym(f"{v.name}.d{k}") for k, d in enumerate(hint.shape)]
    return tensor(hint.dtype, dims)


def _equal(a: TensorType | None, b: TensorType | None) -> bool:
    return a is b or (a is not None and b is not None and a == b)


def _record_facts(node: Node, facts: dict[Value, Known]) -> None:
    """Elements of small non-float outputs whose inputs are known (and of ops that read shapes only)."""
    shape_only = node.op.family is Family.SHAPE
    if not shape_only and not all(v is None or v in facts for v in node.inputs):
        return
    small = [v for v in node.results if v.type is not None and isinstance(v.type.size, int) and v.type.size <= 64]
    if not small:
        return
    try:
        elements = known_elements(node, facts)
    except Unsupported:
        return
    for v, known in zip(node.outputs, elements, strict=False):
        if v is not None and known is not None:
            facts[v] = known
