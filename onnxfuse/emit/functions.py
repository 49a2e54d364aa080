"""FunctionProto bodies: what a group computes, in the user's own nodes.

A body holds the user's original nodes where the group has them whole, and atomic nodes where a composite op was cut
between groups. It is written in the model's opset (onnxruntime reads it so), without attribute references and without
trailing empty names, but those the op's schema counts. Constants that the custom node does not take as inputs become
Constant nodes inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir
from onnx import defs

from onnxfuse.errors import IRError
from onnxfuse.frontend.protos import TensorConst
from onnxfuse.ir.graph import AttrValue, Constant, Foreign, Graph, Node, Value, fresh_name, topological
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.plan import Call

DOMAIN = "onnxfuse"
OTHER_CONSTANTS = 9  # the opset from which Constant nodes hold any type
EXACT_IN_F64 = 1 << 53
Parts = Mapping[Node, tuple[Node, ...]]


def node_proto(node: Node, opset: int) -> onnx.NodeProto:
    """The node as ONNX. Attributes, doc string and metadata are the user's own where the node was read."""
    proto = onnx.NodeProto()
    if isinstance(node.source, onnx.NodeProto):
        proto.CopyFrom(node.source)
    else:
        proto.op_type, proto.domain = node.op.name, node.op.domain
        proto.attribute.extend(_attribute(node, name, value, opset) for name, value in node.attrs.items())
    proto.name = node.name
    proto.input[:] = _names(node.inputs, _least_inputs(node, opset))
    proto.output[:] = _names(node.outputs)
    return proto


def _least_inputs(node: Node, opset: int) -> int:
    """Names a node must have, though they may be empty (a Loop without trips, condition and state has two)."""
    if node.op.domain or not defs.has(node.op.name, opset):
        return 0
    return int(defs.get_schema(node.op.name, opset).min_input)


def spelled_out(nodes: Iterable[Node], taken: set[str]) -> tuple[Node, ...]:
    """The nodes with what they are spelled as in their place; its values and nodes get names that are not taken."""
    out: list[Node] = []
    listed = list(nodes)
    names = {n.name for n in listed if n.spelled is None}
    for n in listed:
        if n.spelled is None:
            out.append(n)
            continue
        new: dict[Value, Value] = {}
        for old, now in zip((*n.spelled.inputs, n.spelled.output), (*n.inputs, n.outputs[0]), strict=True):
            if old is not None and now is not None:
                new[old] = now
        for part in n.spelled.nodes:
            new.update({v: Value(fresh_name(v.name, taken), v.type) for v in part.results if v not in new})
            inputs = tuple(None if v is None else new.get(v, v) for v in part.inputs)
            outputs = tuple(None if v is None else new[v] for v in part.outputs)
            out.append(replace(part, inputs=inputs, outputs=outputs, name=fresh_name(part.name or n.name, names)))
    return tuple(out)


def _names(values: Sequence[Value | None], least: int = 0) -> list[str]:
    names = ["" if v is None else v.name for v in values]
    while names and not names[-1]:
        names.pop()
    return names + [""] * (least - len(names))


def _attribute(node: Node, name: str, value: AttrValue, opset: int) -> onnx.AttributeProto:
    if isinstance(value, Foreign):
        assert isinstance(value.attr, onnx.AttributeProto), name
        return value.attr
    if isinstance(value, np.ndarray):
        return onnx.helper.make_attribute(name, tensor_proto(value, ""))
    kind = _declared_kind(node, name, opset)
    data = list(value) if isinstance(value, tuple) else value
    if kind == onnx.AttributeProto.FLOAT and isinstance(data, (int, float)):
        data = float(data)
    if kind == onnx.AttributeProto.FLOATS and isinstance(data, list):
        data = [float(d) for d in data]  # type: ignore[arg-type]
    return onnx.helper.make_attribute(name, data, attr_type=kind)


def _declared_kind(node: Node, name: str, opset: int) -> int | None:
    """Type of the attribute by the op's schema: an empty list or a whole float does not tell."""
    if node.op.domain or not defs.has(node.op.name, opset):
        return None
    declared = defs.get_schema(node.op.name, opset).attributes.get(name)
    return None if declared is None else int(getattr(declared.type, "value", 0)) or None


def tensor_proto(array: np.ndarray, name: str) -> onnx.TensorProto:
    """An array as a TensorProto."""
    return onnx_ir.serde.serialize_tensor(onnx_ir.tensor(np.asarray(array), name=name))


def constant_proto(value: Value, const: Constant) -> onnx.NodeProto:
    """A Constant node that makes `value`."""
    if isinstance(const, TensorConst) and not isinstance(const.tensor, onnx_ir.ExternalTensor):
        data = onnx.TensorProto()
        data.CopyFrom(onnx_ir.serde.serialize_tensor(const.tensor))
    else:
        data = tensor_proto(const.numpy(), "")
    data.ClearField("name")
    return onnx.NodeProto(
        op_type="Constant",
        output=[value.name],
        name=f"{value.name}.const",
        attribute=[onnx.helper.make_attribute("value", data)],
    )


def constant_nodes(value: Value, const: Constant, opset: int) -> list[onnx.NodeProto]:
    """Nodes that make a constant. Before opset 9 `Constant` holds floats only: other types are cast from f64."""
    array = const.numpy() if opset < OTHER_CONSTANTS else None
    if array is None or array.dtype in (np.float16, np.float32, np.float64) or array.dtype.kind not in "biu":
        return [constant_proto(value, const)]
    to = int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
    if array.size == 0 or max(abs(int(array.max())), abs(int(array.min()))) <= EXACT_IN_F64:
        return _cast_constant(value.name, array, to)
    high, low, base = (f"{value.name}.{part}" for part in ("high", "low", "base"))
    rows = ((high, array >> 32), (low, array & 0xFFFFFFFF), (base, np.array(1 << 32, array.dtype)))
    parts = [n for name, part in rows for n in _cast_constant(name, part, to)]
    product = onnx.helper.make_node("Mul", [high, base], [f"{value.name}.scaled"])
    return [*parts, product, onnx.helper.make_node("Add", [f"{value.name}.scaled", low], [value.name])]


def _cast_constant(name: str, array: np.ndarray, to: int) -> list[onnx.NodeProto]:
    data = tensor_proto(array.astype(np.float64), "")
    wide = onnx.helper.make_node("Constant", [], [f"{name}.f64"], f"{name}.const", value=data)
    return [wide, onnx.helper.make_node("Cast", [f"{name}.f64"], [name], f"{name}.cast", to=to)]


def whole_nodes(
    nodes: Iterable[Node], parts: Parts, needed: Collection[Value], given: Collection[Value] | None = None
) -> tuple[Node, ...]:
    """The nodes with every composite that is there completely put back in place of its parts.

    `needed` are the values used outside: a composite whose inner values are among them stays in parts. `given` are the
    values there are (None: all): so does a composite with an input that is not among them, because no part reads it.
    """
    members = dict.fromkeys(nodes)
    owner = {atom: original for original, atoms in parts.items() for atom in atoms if atom in members}
    readers: dict[Value, list[Node]] = {}
    for n in members:
        for v in n.reads:
            readers.setdefault(v, []).append(n)
    there = None if given is None else {*given, *(v for n in members for v in n.results)}
    whole: dict[Node, bool] = {}
    for original in dict.fromkeys(owner.values()):
        atoms = set(parts[original])
        inner = {v for a in atoms for v in a.results} - set(original.results)
        leaks = any(v in needed or any(r not in atoms for r in readers.get(v, ())) for v in inner)
        blind = there is not None and not there.issuperset(original.reads)
        whole[original] = atoms <= members.keys() and not leaks and not blind
    out: dict[Node, None] = {}
    for n in members:
        original = owner.get(n, n)
        out[original if whole.get(original, False) else n] = None
    return tuple(out)


def function_proto(
    call: Call, members: Iterable[Node], parts: Parts, graph: Graph, imports: Mapping[str, int]
) -> onnx.FunctionProto:
    """The function behind a custom node: `call.outputs` from `call.inputs`."""
    inside = replace(  # the body computes on the graph's own half values
        call,
        inputs=tuple(call.halves.get(v, v) for v in call.inputs),
        outputs=tuple(call.halves.get(v, v) for v in call.outputs),
    )
    nodes = whole_nodes(members, parts, inside.outputs, {*inside.inputs, *graph.consts})
    ordered, constants = _closed(inside, nodes, graph)
    if ordered is None:  # putting a composite back closed a circle: use the parts
        ordered, constants = _closed(inside, tuple(dict.fromkeys(members)), graph)
    if ordered is None:
        raise IRError("IR_BODY", f"group {call.name}: its nodes have no order")
    made = {v for n in ordered for v in n.results}
    lost = [v for v in inside.outputs if v not in made]
    if lost:
        raise IRError("IR_BODY", f"group {call.name}: no member makes output {lost[0].name!r}")
    function = onnx.FunctionProto(
        domain=DOMAIN, name=call.kernel.name, input=_distinct(call.inputs), output=[v.name for v in call.outputs]
    )
    function.node.extend(n for v in constants for n in constant_nodes(v, graph.consts[v], graph.opset))
    narrowed = [cast_node(w, v) for w, v in zip(call.inputs, inside.inputs, strict=True) if w is not v]
    widened = [cast_node(v, w) for w, v in zip(call.outputs, inside.outputs, strict=True) if w is not v]
    ordered = (*narrowed, *ordered, *widened)
    function.node.extend(_explicit(node_proto(n, graph.opset), graph.opset) for n in ordered)
    used = {"", *(n.op.domain for n in ordered)}
    function.opset_import.extend(
        onnx.helper.make_opsetid(d, v) for d, v in sorted(imports.items()) if d in used and d != DOMAIN
    )
    return function


def cast_node(value: Value, result: Value) -> Node:
    """A Cast from one to the other."""
    op = Op("Cast", 1, Family.OPAQUE)
    return Node(op, (value,), (result,), {"to": result.tensor.dtype.onnx}, f"{result.name}.cast", ())


def _explicit(proto: onnx.NodeProto, opset: int) -> onnx.NodeProto:
    """Write defaults out where ONNX defines the op as a function: onnxruntime's inference loses them inside another."""
    if proto.domain or not defs.has(proto.op_type, opset):
        return proto
    schema = defs.get_schema(proto.op_type, opset)
    if not schema.has_function:  # type: ignore[attr-defined]
        return proto
    given = {a.name for a in proto.attribute}
    missing = [a.default_value for name, a in sorted(schema.attributes.items()) if name not in given]
    proto.attribute.extend(d for d in missing if d.name)
    return proto


def _closed(call: Call, nodes: tuple[Node, ...], graph: Graph) -> tuple[tuple[Node, ...] | None, list[Value]]:
    """The nodes in order, and the constants they read that are not inputs of the custom node."""
    given = set(call.inputs)
    taken = {v.name for n in nodes for v in (*n.reads, *n.results)}
    nodes = spelled_out(nodes, taken)
    nodes = tuple(without(n, given, taken) for n in nodes)
    made = {v for n in nodes for v in n.results}
    outside = dict.fromkeys(v for n in nodes for v in n.reads if v not in made and v not in given)
    unknown = [v for v in outside if v not in graph.consts]
    if unknown:
        raise IRError(
            "IR_BODY", f"group {call.name}: a member reads {unknown[0].name!r}, which is no input of the custom node"
        )
    return topological(nodes, [*given, *outside]), list(outside)


def without(node: Node, known: Collection[Value], taken: set[str]) -> Node:
    """The node with other names for the results in `known`, which are defined elsewhere."""
    if not any(v in known for v in node.results):
        return node
    outputs = [v if v is None or v not in known else Value(fresh_name(v.name, taken), v.type) for v in node.outputs]
    return replace(node, outputs=tuple(outputs))


def _distinct(values: Sequence[Value]) -> list[str]:
    taken: set[str] = set()
    return [fresh_name(v.name, taken) for v in values]
