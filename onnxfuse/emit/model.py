"""The optimized model. Source + Atomized + Plans -> Emission (a ModelProto without weights, and the weights).

Each compiled group is one node of domain `onnxfuse`; everything else is written as it was read. Interface, names, doc
strings and the user's metadata stay. Entries under `onnxfuse.` in the model's metadata tell how it was made; old ones
are replaced. Weights are the objects that were read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import onnx
import onnx_ir

from onnxfuse.emit.functions import (
    DOMAIN,
    Parts,
    cast_node,
    function_proto,
    node_proto,
    spelled_out,
    whole_nodes,
    without,
)
from onnxfuse.errors import IRError
from onnxfuse.frontend.atomize import Atomized
from onnxfuse.frontend.load import copy_fields
from onnxfuse.frontend.protos import ScaledConst, SparseConst, TensorConst, captured_names, raw_bytes
from onnxfuse.frontend.read import Source
from onnxfuse.frontend.rewrite import taken_names
from onnxfuse.frontend.validate import check, skeleton
from onnxfuse.ir.bodies import Formal
from onnxfuse.ir.expr import Sym
from onnxfuse.ir.graph import Constant, Graph, Node, Value, fresh_name, topological
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.partition import Group
from onnxfuse.ir.plan import Call, Library, Plans
from onnxfuse.ir.types import Dim

PREFIX = "onnxfuse."  # of metadata_props
FUNCTIONS_IR = 8  # first IR version with local functions
OLDEST_IR = 9  # newest IR version that onnxruntime 1.17 loads
OLDEST_OPSET = 20  # newest opset it knows
NEWER_TYPES = frozenset(range(21, 64))  # TensorProto.DataType codes that came after IR 9 (4-bit types and later)
Tensors = Mapping[str, onnx_ir.TensorProtocol]


@dataclass(frozen=True, slots=True)
class Emission:
    """A model ready to be written. `tensors` are its initializers, in order; `model` holds none.

    bodies   optimized bodies of control flow as models of their own, beside what they were, for the comparison
    """

    model: onnx.ModelProto
    tensors: Tensors
    bodies: tuple[BodyModel, ...] = ()

    def proto(self) -> onnx.ModelProto:
        """Everything in one ModelProto (in memory: weights are copied; below protobuf's 2 GB only)."""
        whole = onnx.ModelProto()
        whole.CopyFrom(self.model)
        for name, t in self.tensors.items():
            whole.graph.initializer.append(initializer(name, t))
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class BodyModel:
    """A body before and after; both take the formal inputs, then the captured values.

    number, parent   numbers of the scopes: 0 is the main graph
    free             nothing is assumed about the elements of inputs
    """

    name: str
    number: int
    parent: int
    formals: tuple[tuple[str, Formal], ...]
    free: bool
    before: Emission
    after: Emission


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What optimized bodies mean for the graph around them: its nodes that hold them, and their functions."""

    nodes: Mapping[str, onnx.NodeProto] = field(default_factory=dict)
    functions: Mapping[str, onnx.FunctionProto] = field(default_factory=dict)
    models: tuple[BodyModel, ...] = ()


def initializer(name: str, t: onnx_ir.TensorProtocol) -> onnx.TensorProto:
    """One tensor with its data inside; a tensor read from a model is copied field by field."""
    proto = onnx.TensorProto()
    if isinstance(t, onnx_ir.ExternalTensor):
        proto.data_type = int(t.dtype)
        if t.doc_string:
            proto.doc_string = t.doc_string
        proto.dims.extend(t.shape.numpy())
        proto.raw_data = raw_bytes(t)
    else:
        proto.CopyFrom(onnx_ir.serde.serialize_tensor(t))
    proto.name = name
    return proto


def emit(
    source: Source,
    atomized: Atomized,
    plans: Plans,
    library: Library | None = None,
    *,
    mode: str = "",
    target: str = "",
    record: Mapping[str, str] | None = None,
    inside: Inside | None = None,
) -> Emission:
    """Write the model with a custom node for every compiled group (see the module docstring), and check it.

    `record` are further entries for the metadata, by name without the prefix; `inside` are optimized bodies.
    """
    out = assemble(source, atomized, plans, inside)
    _metadata(out.model, plans, library, mode, target, record or {})
    check(skeleton(out.model, out.tensors))
    return out


def assemble(source: Source, atomized: Atomized, plans: Plans, inside: Inside | None = None) -> Emission:
    """The same for a graph that is not a whole model: with the user's metadata, and unchecked."""
    inside = inside or Inside()
    graph, partition = atomized.graph, plans.partition
    groups = {g.id: g for g in partition.groups if g.id in plans.calls and g.id not in plans.refused}
    calls = {gid: plans.calls[gid] for gid in groups}
    left = [o.node for o in partition.left]
    left += [c.node for g in partition.groups if g.id not in groups for c in g.members]
    nodes = tuple(_with_bodies(n, inside) for n in _ordered(graph, calls, left, atomized.parts))
    functions = list({**inside.functions, **_functions(groups, calls, atomized, source)}.values())
    model = onnx.ModelProto()
    copy_fields(source.model, model, skip=("graph", "functions", "opset_import", "metadata_props", "ir_version"))
    model.ir_version = _ir_version(source)
    model.functions.extend([*source.model.functions, *functions])
    model.opset_import.extend(source.model.opset_import)
    if functions and DOMAIN not in source.graph.imports:
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    model.metadata_props.extend(p for p in source.model.metadata_props if not p.key.startswith(PREFIX))
    tensors = _fill_graph(model.graph, source.model.graph, graph, nodes)
    return Emission(model, tensors, inside.models)


def _ir_version(source: Source) -> int:
    """At least what functions need; IR 9 where the model uses nothing newer, so that onnxruntime 1.17 loads it.

    IR 10 and later only added element types, overloads of functions and metadata of nodes, which older readers skip.
    """
    own = int(source.model.ir_version)
    if own <= OLDEST_IR:
        return max(own, FUNCTIONS_IR)
    tensors = {int(t.dtype) for t in source.tensors.values()}
    plain = not source.model.functions and not (tensors | _types_in(source.model.graph)) & NEWER_TYPES
    return OLDEST_IR if plain and source.graph.opset <= OLDEST_OPSET else own


def _types_in(graph: onnx.GraphProto) -> set[int]:
    """Element types that inputs and attributes name, bodies of control flow included (any small integer counts)."""
    found: set[int] = set()
    pending = [graph]
    while pending:
        g = pending.pop()
        found |= {v.type.tensor_type.elem_type for v in (*g.input, *g.output, *g.value_info)}
        found |= {t.data_type for t in g.initializer}
        for attr in (a for n in g.node for a in n.attribute):
            if attr.name in ("to", "dtype", "output_dtype"):
                found.add(attr.i)
            found |= {t.data_type for t in (attr.t, *attr.tensors)}
            pending += [attr.g] if attr.HasField("g") else []
            pending += list(attr.graphs)
    return found


# --- nodes -----------------------------------------------------------------------------------------------------------
def _ordered(graph: Graph, calls: Mapping[int, Call], left: Sequence[Node], parts: Parts) -> tuple[Node, ...]:
    """Custom nodes and the nodes that stay, in an order onnxruntime accepts."""
    custom = [_custom(call) for call in calls.values()]
    left = [*left, *_bridges(calls.values(), left)]
    left = [*left, *_recomputed(graph, custom, left)]
    left = spelled_out(left, taken_names(graph))
    needed = {v for n in custom for v in n.inputs if v is not None} | set(graph.outputs)
    sources = [*graph.inputs, *graph.consts]
    for stay in (whole_nodes(left, parts, needed), tuple(dict.fromkeys(left))):
        place = {v: k for k, n in enumerate(graph.nodes) for v in n.results}
        both = sorted([*custom, *stay], key=lambda n: min((place.get(v, 0) for v in n.results), default=0))
        ordered = topological(_once(both, custom, graph.reserved), sources)
        if ordered is not None:
            return _uniquely_named(ordered)
    raise IRError("IR_EMIT", "the optimized graph has a cycle", f"{len(custom)} groups, {len(left)} nodes beside them")


def _once(nodes: Sequence[Node], custom: Sequence[Node], reserved: frozenset[str]) -> list[Node]:
    """A node that stays for one of its outputs gives the others, which a kernel makes, names nobody reads."""
    ours = {v for n in custom for v in n.results}
    taken = {v.name for n in nodes for v in n.results} | reserved

    def spare(v: Value | None) -> Value | None:
        return Value(fresh_name(f"{v.name}.unused", taken), v.type) if v in ours and v is not None else v

    out = []
    for n in nodes:
        double = n.op.domain != DOMAIN and any(v in ours for v in n.results)
        out.append(replace(n, outputs=tuple(spare(v) for v in n.outputs)) if double else n)
    return out


def _custom(call: Call) -> Node:
    op = Op(call.kernel.name, 1, Family.OPAQUE, domain=DOMAIN)
    return Node(op, call.inputs, call.outputs, {}, call.name, call.kernel.origin)


def _bridges(calls: Collection[Call], left: Sequence[Node]) -> list[Node]:
    """Casts between kernels, which exchange half values in f32, and nodes of groups that became none."""
    wide = {w: v for call in calls for w, v in call.halves.items()}
    made = {v for call in calls for v in call.outputs} | {v for n in left for v in n.results}
    read = {v for call in calls for v in call.inputs} | {v for n in left for v in n.reads}
    pairs = [pair for w, v in wide.items() for pair in ((w, v), (v, w))]
    return [cast_node(a, b) for a, b in pairs if a in made and b in read and b not in made]


def _recomputed(graph: Graph, custom: Sequence[Node], left: Sequence[Node]) -> list[Node]:
    """Nodes inside groups whose results are read outside all the same (a kernel that wants a shape): computed again."""
    makers = graph.producers()
    made = {v for n in (*custom, *left) for v in n.results} | set(graph.inputs) | set(graph.consts)
    pending = [v for n in (*custom, *left) for v in n.reads if v not in made]
    taken = taken_names(graph)
    extra: list[Node] = []
    while pending:
        v = pending.pop()
        if v in made:
            continue
        again = without(makers[v], made, taken)
        made.update(again.results)
        pending.extend(again.reads)
        extra.append(again)
    return extra


def _uniquely_named(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Names of custom nodes stay; whoever clashes with one gets a suffix."""
    listed = list(nodes)
    taken = {n.name for n in listed if n.op.domain == DOMAIN}
    out = []
    for n in listed:
        name = n.name if n.op.domain == DOMAIN else fresh_name(n.name, taken)
        out.append(n if name == n.name else replace(n, name=name))
    return tuple(out)


def _functions(
    groups: Mapping[int, Group], calls: Mapping[int, Call], atomized: Atomized, source: Source
) -> dict[str, onnx.FunctionProto]:
    """One function per kernel, from the first group that runs it: equal kernels compute the same."""
    made: dict[str, onnx.FunctionProto] = {}
    for gid, call in calls.items():
        if call.kernel.name in made:
            continue
        members = [c.node for c in groups[gid].members]
        made[call.kernel.name] = function_proto(call, members, atomized.parts, atomized.graph, source.graph.imports)
    return made


def _with_bodies(node: Node, inside: Inside) -> Node:
    """The node holding the optimized bodies; it captures what they read."""
    proto = inside.nodes.get(node.name)
    if proto is None or not isinstance(node.source, onnx.NodeProto):
        return node
    reads = set(captured_names(proto))
    return replace(node, source=proto, captures=tuple(v for v in node.captures if v.name in reads))


# --- graph -----------------------------------------------------------------------------------------------------------
def _fill_graph(new: onnx.GraphProto, old: onnx.GraphProto, graph: Graph, nodes: Sequence[Node]) -> Tensors:
    skip = ("node", "value_info", "initializer", "sparse_initializer", "quantization_annotation")
    copy_fields(old, new, skip=skip)
    new.name = new.name or "graph"
    new.node.extend(node_proto(n, graph.opset) for n in nodes)
    read = dict.fromkeys(v for n in nodes for v in n.reads)
    read.update(dict.fromkeys(graph.outputs))
    tensors: dict[str, onnx_ir.TensorProtocol] = {}
    constants: list[tuple[Value, Constant]] = [*graph.defaults.items()]
    constants += [(v, c) for v, c in graph.consts.items() if v in read]
    for v, const in constants:
        if isinstance(const, SparseConst):
            sparse = new.sparse_initializer.add()
            sparse.CopyFrom(const.sparse)
            sparse.values.name = v.name
        else:
            tensors[v.name] = _tensor(v, const)
    _value_info(new, nodes, graph)
    names = {*tensors, *(i.name for i in new.input), *(name for n in new.node for name in n.output)}
    new.quantization_annotation.extend(a for a in old.quantization_annotation if a.tensor_name in names)
    return tensors


def _tensor(v: Value, const: Constant) -> onnx_ir.TensorProtocol:
    """What was read as it was read; what is computed when it is written."""
    if isinstance(const, TensorConst):
        return const.tensor
    if isinstance(const, ScaledConst):
        return const.tensor(v.name, [d for d in v.tensor.shape if isinstance(d, int)])
    return onnx_ir.tensor(const.numpy())


def _value_info(new: onnx.GraphProto, nodes: Sequence[Node], graph: Graph) -> None:
    """Types of what our nodes make (no runtime can infer them); only symbols the user named are written.

    Other values are left to the runtime's own inference: a type of ours may say more than it is ready to believe.
    """
    outputs = {o.name for o in new.output}
    symbols = {d.dim_param for i in new.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    for v in dict.fromkeys(v for n in nodes if n.op.domain == DOMAIN for v in n.results):
        if v.type is None or v.name in outputs:
            continue
        shape = [_dim(d, symbols) for d in v.type.shape]
        new.value_info.append(onnx.helper.make_tensor_value_info(v.name, v.type.dtype.onnx, shape))


def _dim(d: Dim, symbols: set[str]) -> int | str | None:
    if isinstance(d, int):
        return d
    return d.name if isinstance(d, Sym) and d.name in symbols else None


# --- metadata --------------------------------------------------------------------------------------------------------
def _metadata(
    model: onnx.ModelProto,
    plans: Plans,
    library: Library | None,
    mode: str,
    target: str,
    record: Mapping[str, str],
) -> None:
    table = [
        {
            "name": plans.calls[group.id].name,
            "op_type": plans.calls[group.id].kernel.name,
            "members": list(dict.fromkeys(c.node.name for c in group.members)),
            "origins": list(dict.fromkeys(name for c in group.members for name in c.origin)),
        }
        for partition in plans.partitions
        for group in partition.groups
        if group.id in plans.calls and group.id not in plans.refused
    ]
    entries = {
        "version": version("onnxfuse"),
        "mode": mode,
        "target": library.target.name if library is not None else target,
        "library_digest": library.digest if library is not None else "",
        "library_sha256": hashlib.sha256(library.image).hexdigest() if library is not None else "",
        "groups": json.dumps(table, separators=(",", ":")),
    }
    for key, text in {**entries, **record}.items():
        if text:
            model.metadata_props.add(key=PREFIX + key, value=text)
