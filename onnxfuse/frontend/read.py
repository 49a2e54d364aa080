"""A model -> Source: the Graph, and what is needed to write the model again.

In: a path, bytes, a ModelProto or an onnx_ir.Model; never changed. Out: single assignment, topological order, every
node with a unique name. Types are given to inputs and constants; other values get hints from onnx's shape inference
(user value_info is not trusted). Local functions are inlined, `Constant` nodes become constants.

Initializers that are also graph inputs can be overridden by the caller from IR version 4 on (`Graph.defaults`); before
that onnxruntime treats them as constants and refuses to be fed, so they are constants here and no longer inputs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from onnxfuse.errors import UsageError
from onnxfuse.frontend.inline import inline_functions
from onnxfuse.frontend.load import Loaded, ModelLike, load, opset_of
from onnxfuse.frontend.names import name_nodes, unique_names
from onnxfuse.frontend.noop import in_training
from onnxfuse.frontend.protos import SparseConst, TensorConst, captured_names, domain_of, dtype_of
from onnxfuse.frontend.resize import Shape, override_shapes
from onnxfuse.frontend.validate import check, hints, refuse_unknown_ops, refuse_unsound_names, skeleton, type_of
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import ArrayConst, AttrValue, Constant, Foreign, Graph, Node, Value, topological
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.types import TensorType, tensor
from onnxfuse.ops.table import lookup

OLDEST_OPSET = 7  # older meanings are not in the op table


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was read.

    graph    what the stages work on
    model    the user's model without dense initializers, functions inlined; templates for writing; never changed
    tensors  the main graph's initializers by name, as objects
    path     the file it came from
    hints    types that shape inference found, by value name
    """

    graph: Graph
    model: onnx.ModelProto
    tensors: Mapping[str, onnx_ir.TensorProtocol]
    path: Path | None
    hints: Mapping[str, TensorType | None] = field(default_factory=dict)


def read(
    model: ModelLike,
    *,
    overwrite_input_shape: Mapping[str, Shape] | None = None,
    dim_params: Mapping[str, int] | None = None,
    include_subgraph: bool = False,
) -> Source:
    """Read a model (see the module docstring). Raises UsageError for anything that is not a valid model."""
    loaded = load(model)
    proto = loaded.proto
    inline_functions(proto)
    imports = opset_of(proto)
    name_nodes(proto.graph)
    refuse_unknown_ops(proto, imports)
    refuse_unsound_names(proto, loaded.tensors)
    if proto.ir_version < 4:
        drop_inputs(proto.graph, loaded.tensors)
    override_shapes(proto, loaded.tensors, overwrite_input_shape or {}, dim_params or {})
    reserved = unique_names(proto, loaded.tensors) if include_subgraph else frozenset()
    graph = replace(read_graph(loaded, imports), reserved=reserved)
    small = skeleton(proto, loaded.tensors)
    check(small)
    return Source(graph, proto, loaded.tensors, loaded.path, hints(small))


def read_graph(
    loaded: Loaded, imports: Mapping[str, int], types: Mapping[str, TensorType | None] | None = None
) -> Graph:
    """The graph of a loaded model, whose nodes are put in its order. `types`, if given, hold for the inputs."""
    graph = _Reader(loaded, imports, types).graph()
    _reorder(loaded.proto.graph, graph.nodes)
    return graph


def drop_inputs(graph: onnx.GraphProto, names: Container[str]) -> None:
    """The graph without the inputs of these names, which are constants."""
    kept = [onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in graph.input if i.name not in names]
    del graph.input[:]
    graph.input.extend(kept)


def _reorder(graph: onnx.GraphProto, nodes: tuple[Node, ...]) -> None:
    """The proto's nodes in the order of the graph; `Constant` nodes first, they read nothing."""
    place = {node.name: k for k, node in enumerate(nodes)}
    order = sorted(range(len(graph.node)), key=lambda k: (place.get(graph.node[k].name, -1), k))
    if order == list(range(len(order))):
        return
    copies = [onnx.NodeProto.FromString(graph.node[k].SerializeToString()) for k in order]
    del graph.node[:]
    graph.node.extend(copies)


# --- Graph -----------------------------------------------------------------------------------------------------------
class _Reader:
    """Builds one Graph; holds the table of values while doing so."""

    def __init__(
        self, loaded: Loaded, imports: Mapping[str, int], types: Mapping[str, TensorType | None] | None
    ) -> None:
        self.proto = loaded.proto
        self.tensors = loaded.tensors
        self.imports = imports
        self.types = types
        self.opset = imports.get("", 0)
        self.functions = {(f.domain, f.name) for f in loaded.proto.functions}
        self.values: dict[str, Value] = {}
        self.consts: dict[Value, Constant] = {}
        self.defaults: dict[Value, Constant] = {}

    def graph(self) -> Graph:
        proto = self.proto.graph
        inputs = self._inputs()
        self._initializers()
        protos = [n for n in proto.node if not self._constant_node(n)]
        for node in protos:
            for name in node.output:
                if name:
                    self.values[name] = Value(name, None)
        nodes = tuple(self._node(n) for n in protos)
        ordered = topological(nodes, [*inputs, *self.consts])
        if ordered is None:
            _refuse_cycle(nodes)
        assert ordered is not None
        outputs = tuple(self.values[o.name] for o in proto.output)
        return Graph(
            proto.name or "graph", inputs, ordered, outputs, self.consts, self.opset, self.imports, self.defaults
        )

    def _inputs(self) -> tuple[Value, ...]:
        symbols = {d.dim_param for i in self.proto.graph.input for d in i.type.tensor_type.shape.dim}
        for info in self.proto.graph.input:
            value = Value(info.name, type_of(info, symbols) if self.types is None else self.types[info.name])
            self.values[info.name] = value
            if info.name in self.tensors:
                self.defaults[value] = TensorConst(self.tensors[info.name])
        return tuple(self.values.values())

    def _initializers(self) -> None:
        for name, t in self.tensors.items():
            if name not in self.values:
                self._add_const(name, TensorConst(t), _tensor_type(t))
        for sparse in self.proto.graph.sparse_initializer:
            dtype = dtype_of(sparse.values.data_type)
            known = None if dtype is None else tensor(dtype, [int(d) for d in sparse.dims])
            self._add_const(sparse.values.name, SparseConst(sparse), known)

    def _add_const(self, name: str, const: Constant, known: TensorType | None) -> None:
        value = Value(name, known)
        self.values[name] = value
        self.consts[value] = const

    def _constant_node(self, node: onnx.NodeProto) -> bool:
        """Take a `Constant` node over as a constant; False for what stays a node (strings, sparse tensors)."""
        if node.op_type != "Constant" or domain_of(node.domain) != "" or len(node.attribute) != 1:
            return False
        const = _constant_value(node.attribute[0])
        if const is None:
            return False
        if isinstance(const, TensorConst):
            known = _tensor_type(const.tensor)
        else:
            known = tensor(_dtype_of_array(const.array), const.array.shape)
        self._add_const(node.output[0], const, known)
        return True

    def _node(self, node: onnx.NodeProto) -> Node:
        inputs = [self.values[name] if name else None for name in node.input]
        while inputs and inputs[-1] is None:
            inputs.pop()
        outputs = [self.values[name] if name else None for name in node.output]
        while len(outputs) > 1 and outputs[-1] is None:
            outputs.pop()
        attrs = {a.name: attr_value(a) for a in node.attribute}
        captures = tuple(self.values[name] for name in captured_names(node))
        out = Node(self._op(node), tuple(inputs), tuple(outputs), attrs, node.name, (node.name,), captures, source=node)
        return _training_is_opaque(out, self.consts)

    def _op(self, node: onnx.NodeProto) -> Op:
        domain = domain_of(node.domain)
        version = self.imports[domain]
        name = node.op_type
        if (node.domain, name) in self.functions:
            return _opaque(name, domain, version, "a local function of another opset")
        if domain == "" and self.opset < OLDEST_OPSET:
            found = lookup("", name, OLDEST_OPSET)
            if found is not None and found.family in _LOOPS and _unchanged(name, self.opset):
                return found
            return _opaque(name, domain, version, f"opset {self.opset} is older than {OLDEST_OPSET}")
        found = lookup(domain, name, version)
        if found is not None:
            return found
        return _opaque(name, domain, version, "not in the op table" if domain == "" else f"foreign domain {domain}")


# What is lowered as it stands: nothing in an opset older than the op table's is made of other operators.
_LOOPS = frozenset({Family.POINTWISE, Family.REDUCE, Family.VIEW, Family.CONTRACT, Family.WINDOW})


def _unchanged(name: str, opset: int) -> bool:
    """The operator meant in an older opset what it means in the oldest that the op table knows."""
    return len({onnx.defs.get_schema(name, n).since_version for n in (opset, OLDEST_OPSET)}) == 1


def _opaque(name: str, domain: str, version: int, reason: str) -> Op:
    return Op(name, version, Family.OPAQUE, domain=domain, reason=reason)


def _training_is_opaque(node: Node, consts: Mapping[Value, Constant]) -> Node:
    """Training behaviour is never touched."""
    if node.op.family is Family.OPAQUE or node.op.domain or not in_training(node, consts):
        return node
    return replace(node, op=replace(node.op, family=Family.OPAQUE, reason="training mode"))


def _refuse_cycle(nodes: tuple[Node, ...]) -> None:
    """Name the nodes of one cycle: from any node that cannot be ordered, walk back along unordered inputs."""
    producers = {v: n for n in nodes for v in n.results}
    waiting = dict.fromkeys(nodes)
    while ready := [n for n in waiting if not any(producers.get(v) in waiting for v in n.reads)]:
        for n in ready:
            del waiting[n]
    trail: list[Node] = []
    node = next(iter(waiting))
    while node not in trail:
        trail.append(node)
        node = next(producers[v] for v in node.reads if producers.get(v) in waiting)
    cycle = [n.name for n in reversed(trail[trail.index(node) :])]
    shown = " -> ".join([*cycle[:8], *(["..."] if len(cycle) > 8 else []), cycle[0]])
    hint = "no node may need its own result"
    raise UsageError("E_CYCLE", "the graph has a cycle", f"{len(cycle)} nodes: {shown}", hint)


# --- attributes and constants ----------------------------------------------------------------------------------------
def attr_value(attr: onnx.AttributeProto) -> AttrValue:
    """An attribute as Python data; what we never look into stays as it is."""
    kind = onnx.AttributeProto
    match attr.type:
        case kind.FLOAT:
            return float(attr.f)
        case kind.INT:
            return int(attr.i)
        case kind.STRING:
            text = _text(attr.s)
            return text if isinstance(text, str) else Foreign(attr)
        case kind.FLOATS:
            return tuple(float(f) for f in attr.floats)
        case kind.INTS:
            return tuple(int(i) for i in attr.ints)
        case kind.STRINGS:
            texts = [_text(s) for s in attr.strings]
            return tuple(t for t in texts if isinstance(t, str)) if _all_text(texts) else Foreign(attr)
        case kind.TENSOR if attr.HasField("t") and attr.t.data_type != onnx.TensorProto.STRING:
            return onnx_ir.serde.TensorProtoTensor(attr.t).numpy()
        case _:
            return Foreign(attr)


def _all_text(items: list[str | bytes]) -> bool:
    return all(isinstance(t, str) for t in items)


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _constant_value(attr: onnx.AttributeProto) -> TensorConst | ArrayConst | None:
    match attr.name:
        case "value" if attr.type == onnx.AttributeProto.TENSOR and attr.t.data_type not in (
            onnx.TensorProto.STRING,
            onnx.TensorProto.UNDEFINED,
        ):
            return TensorConst(onnx_ir.serde.TensorProtoTensor(attr.t))
        case "value_float":
            return ArrayConst(np.array(attr.f, np.float32))
        case "value_floats":
            return ArrayConst(np.array(attr.floats, np.float32))
        case "value_int":
            return ArrayConst(np.array(attr.i, np.int64))
        case "value_ints":
            return ArrayConst(np.array(attr.ints, np.int64))
    return None


def _tensor_type(t: onnx_ir.TensorProtocol) -> TensorType | None:
    dtype = dtype_of(int(t.dtype))
    return None if dtype is None else tensor(dtype, t.shape.numpy())


def _dtype_of_array(array: np.ndarray) -> DType:
    found = DType.from_numpy(array.dtype)
    assert found is not None
    return found
