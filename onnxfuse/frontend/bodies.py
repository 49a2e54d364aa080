"""Bodies of control flow as models of their own. Scope -> its bodies, each a Source and what the outer graph knows.

A body is read as a graph whose inputs are its formal inputs and the outer values it captures; captured constants are
constants in it. So every stage treats it like a main graph, it can be compared with the original on inputs of its own,
and `splice` puts the result back. Types come from the outer graph, never from what the body declares: of a value that
is carried from one iteration to the next only what every iteration keeps (`_carried`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import onnx_ir

from onnxfuse.frontend.dead_code import dead_code
from onnxfuse.frontend.load import Loaded, copy_fields
from onnxfuse.frontend.prepare import Prepared
from onnxfuse.frontend.protos import captured_names
from onnxfuse.frontend.read import Source, drop_inputs, read_graph
from onnxfuse.frontend.shapes import infer_types
from onnxfuse.frontend.validate import hints, skeleton
from onnxfuse.ir.bodies import Formal, Role
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import sym
from onnxfuse.ir.graph import Constant, Graph, Node, Value
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.ops.control import formals
from onnxfuse.ops.dsl import Known

Types = Mapping[str, TensorType | None]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a body sits: the node (by its unique name), the attribute, and its place among the attribute's graphs."""

    parent: int  # number of the scope, 0 = the main graph
    node: str
    attribute: str
    index: int

    @property
    def step(self) -> str:
        """`node.attribute`, one step of a scope's name."""
        return f"{self.node}.{self.attribute}" + (f"[{self.index}]" if self.index else "")


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """A graph of the model: the main one, or a body.

    name      "" for the main graph, else where it is: `If_3.then_branch`, `Loop_1.body/If_2.else_branch`
    formals   where the formal inputs come from, in order
    captured  names of the outer values it reads (constants included)
    known     elements of inputs that the outer graph knows
    """

    source: Source
    prepared: Prepared
    name: str = ""
    place: Place | None = None
    formals: tuple[Formal, ...] = ()
    captured: frozenset[str] = frozenset()
    known: Mapping[Value, Known] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.prepared.graph


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A body as it was read; `known` are elements that the outer graph knows."""

    source: Source
    name: str
    place: Place
    formals: tuple[Formal, ...]
    captured: frozenset[str]
    known: Mapping[Value, Known] = field(default_factory=dict)

    def scope(self, prepared: Prepared) -> Scope:
        open_ones = {v: k for v, k in self.known.items() if v not in self.source.graph.consts}
        return Scope(self.source, prepared, self.name, self.place, self.formals, self.captured, open_ones)


# --- reading ---------------------------------------------------------------------------------------------------------
def bodies(scope: Scope, number: int) -> Iterator[Body]:
    """The bodies right inside a scope whose formal inputs are understood; `number` is the scope's."""
    graph = scope.graph
    visible: dict[str, Value] = {v.name: v for v in graph.values()}
    for node in graph.nodes:
        if not isinstance(node.source, onnx.NodeProto):
            continue
        for attribute in node.source.attribute:
            graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            for k, body in enumerate(graphs):
                found = formals(node, len(body.input), graph.opset)
                if found is not None:
                    place = Place(number, node.name, attribute.name, k)
                    yield _read(scope, place, body, found, visible)


def _read(
    scope: Scope, place: Place, body: onnx.GraphProto, found: tuple[Formal, ...], visible: Mapping[str, Value]
) -> Body:
    outer, facts = scope.graph, scope.prepared.typed.facts
    name = f"{scope.name}/{place.step}" if scope.name else place.step
    captured = [visible[v] for v in _captured(body)]
    loaded = _as_model(scope.source.model, body, name, [v.name for v in captured])
    formal = [i.name for i in body.input]
    types: dict[str, TensorType | None] = {v.name: v.type for v in captured}
    types |= _formal_types(body, found)
    consts = {v.name: outer.consts[v] for v in captured if v in outer.consts}
    known = {v.name: facts[v] for v in captured if v in facts}
    for n, f in zip(formal, found, strict=True):
        if f.source is not None and f.source in facts and _stays(f, n, body):
            known[n] = facts[f.source]
    types = _carried(scope, loaded, found, types, consts, known)
    source, mine = _source(scope, loaded, types, consts, known)
    drop_inputs(loaded.proto.graph, consts)
    return Body(source, name, place, found, frozenset(v.name for v in captured), mine)


def _captured(body: onnx.GraphProto) -> list[str]:
    holder = onnx.NodeProto()
    holder.attribute.add(name="body").g.CopyFrom(body)
    return captured_names(holder)


def _stays(f: Formal, name: str, body: onnx.GraphProto) -> bool:
    """A carried value that every iteration hands on as it is."""
    return f.role is Role.STATE and body.output[f.after].name == name


def _as_model(whole: onnx.ModelProto, body: onnx.GraphProto, name: str, captured: Sequence[str]) -> Loaded:
    """The body as a model without initializers, captured values as further inputs, and its tensors beside it."""
    proto = onnx.ModelProto()
    copy_fields(whole, proto, skip=("graph", "metadata_props", "doc_string"))
    copy_fields(body, proto.graph, skip=("initializer",))
    proto.graph.name = name
    proto.graph.input.extend(onnx.ValueInfoProto(name=v) for v in captured)
    tensors = {t.name: onnx_ir.serde.TensorProtoTensor(t) for t in body.initializer}
    return Loaded(proto, tensors, None)


def _source(
    scope: Scope, loaded: Loaded, types: Types, consts: Mapping[str, Constant], known: Mapping[str, Known]
) -> tuple[Source, dict[Value, Known]]:
    """Source and known elements of a body whose inputs have these types."""
    for info in loaded.proto.graph.input:
        _write_type(info, types[info.name])
    graph = read_graph(loaded, scope.graph.imports, types)
    reserved = scope.graph.reserved
    constants = {v: consts[v.name] for v in graph.inputs if v.name in consts}
    inputs = tuple(v for v in graph.inputs if v not in constants)
    graph = replace(graph, inputs=inputs, consts={**constants, **graph.consts}, reserved=reserved)
    found = hints(skeleton(loaded.proto, loaded.tensors))
    mine = {v: known[v.name] for v in graph.inputs if v.name in known}
    return Source(graph, loaded.proto, loaded.tensors, None, found), mine


def _write_type(info: onnx.ValueInfoProto, t: TensorType | None) -> None:
    """What shape inference, and whoever makes inputs for the body alone, is told: equal dimensions by one name."""
    if t is None:
        kind = info.type.tensor_type.elem_type if info.type.HasField("tensor_type") else 0
        if kind:
            info.type.Clear()
            info.type.tensor_type.elem_type = kind
        return
    shape = [d if isinstance(d, int) else str(d) for d in t.shape]
    info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, t.dtype.onnx, shape, info.doc_string))


# --- types of formal inputs ------------------------------------------------------------------------------------------
def _formal_types(body: onnx.GraphProto, found: Sequence[Formal]) -> dict[str, TensorType | None]:
    out: dict[str, TensorType | None] = {}
    for info, f in zip(body.input, found, strict=True):
        t = f.source.type if f.source is not None else None
        match f.role:
            case Role.COUNTER:
                t = tensor(DType.I64, _one_or_none(info))
            case Role.GOES_ON:
                t = tensor(DType.BOOL, _one_or_none(info))
            case Role.SLICE if t is not None:
                axis = f.axis + t.rank if f.axis < 0 else f.axis
                t = tensor(t.dtype, [d for k, d in enumerate(t.shape) if k != axis])
        out[info.name] = t
    return out


def _one_or_none(info: onnx.ValueInfoProto) -> list[Dim]:
    """Shape of the counter and the condition: the runtime makes them as they are declared, a scalar or one element."""
    return [1] if len(info.type.tensor_type.shape.dim) == 1 else []


def _carried(
    scope: Scope,
    loaded: Loaded,
    found: Sequence[Formal],
    types: dict[str, TensorType | None],
    consts: Mapping[str, Constant],
    known: Mapping[str, Known],
) -> dict[str, TensorType | None]:
    """Types that hold in every iteration: start from the first one's, give up what the body's outputs do not keep.

    A dimension is given up at most once and a type at most once, so this ends.
    """
    graph = loaded.proto.graph
    states = [(i.name, f) for i, f in zip(graph.input, found, strict=False) if f.role is Role.STATE]
    if not states:
        return types
    while True:
        source, mine = _source(scope, loaded, types, consts, known)
        typed = infer_types(source.graph, source.hints, mine).graph
        new = {name: _kept(name, types[name], typed.outputs[f.after].type) for name, f in states}
        if all(new[name] == types[name] for name, _ in states):
            return types
        types = {**types, **new}


def _kept(name: str, before: TensorType | None, after: TensorType | None) -> TensorType | None:
    """What two iterations agree on."""
    if before is None or after is None or before.dtype is not after.dtype or before.rank != after.rank:
        return None
    dims: list[Dim] = []
    for k, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)):
        dims.append(a if a == b else sym(f"{name}.d{k}"))
    return tensor(before.dtype, dims)


# --- captures --------------------------------------------------------------------------------------------------------
def tightened(scopes: Sequence[Scope]) -> tuple[Scope, ...]:
    """Scopes whose nodes capture what their bodies still read, inner ones first: the rest need not exist any more."""
    out = list(scopes)
    held: dict[tuple[int, str], dict[tuple[str, int], frozenset[str]]] = {}
    for number in reversed(range(len(out))):
        own = {name: per for (parent, name), per in held.items() if parent == number}
        if own:
            out[number] = replace(out[number], prepared=_recaptured(out[number], own))
        scope = out[number]
        if scope.place is not None:
            place, graph = scope.place, scope.graph
            reads = {v.name for n in graph.nodes for v in n.reads} | {v.name for v in graph.outputs}
            found = held.setdefault((place.parent, place.node), {})
            found[place.attribute, place.index] = scope.captured & reads
    return tuple(out)


def _recaptured(scope: Scope, held: Mapping[str, Mapping[tuple[str, int], frozenset[str]]]) -> Prepared:
    typed = scope.prepared.typed
    swap: dict[Node, Node] = {}
    for node in typed.graph.nodes:
        per = held.get(node.name)
        if per is None or not isinstance(node.source, onnx.NodeProto):
            continue
        names = set().union(*per.values())
        for attribute in node.source.attribute:
            graphs = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            for k, body in enumerate(graphs):
                if (attribute.name, k) not in per:
                    names.update(_captured(body))
        swap[node] = replace(node, captures=tuple(v for v in node.captures if v.name in names))
    nodes = tuple(swap.get(n, n) for n in typed.graph.nodes)
    refusals = {swap.get(n, n): why for n, why in typed.refusals.items()}
    graph = dead_code(replace(typed.graph, nodes=nodes))
    return replace(scope.prepared, typed=replace(typed, graph=graph, refusals=refusals))


__all__ = ["Body", "Place", "Scope", "bodies", "tightened"]
