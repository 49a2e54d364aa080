"""Models whose weights do not fit in one session. Path -> Cut: a row of smaller models that give the same outputs.

A session holds the weights twice for a while, as they lie in the file and in the order its kernels want. So the nodes
of the graph, in their order, are taken in runs whose weights stay below a bound (or single nodes above it); each run
is a model of its own, with one session, gone before the next one is made:

    weights in files   every part refers to those it reads; pages are given back (mapped.py)
    constants          nodes that depend on weights alone are in every part that reads their results
    values             what later parts or the outputs need are outputs of a part; others are dropped. A part's inputs
                       have the types of the values that came, so no type must be known before
    captured values    of the bodies of control flow are read by the node that holds them

A sequence, an optional, a number of four bits cannot be handed on: such a part goes on with the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.frontend.load import copy_fields, load
from onnxfuse.frontend.protos import captured_names, raw_bytes
from onnxfuse.frontend.wire import LARGE
from onnxfuse.verify import ort, steps
from onnxfuse.verify.inputs import Sample, spec
from onnxfuse.verify.mapped import Mapped, Stored, stored_session
from onnxfuse.verify.running import How, Interface, Results, describe

Span = tuple[int, int]  # positions in Cut.order: from, to (exclusive)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph without its dense initializers, and where its values come from and go.

    fixed       names of all initializers
    order       nodes that depend on an input, as they stand in the graph
    constants   the other nodes, by what they make
    last        of every value, the position in `order` of its last reader
    """

    proto: onnx.ModelProto
    tensors: Mapping[str, onnx_ir.TensorProtocol]
    fixed: frozenset[str]
    reads: Sequence[Sequence[str]]  # of each node
    order: Sequence[int]
    constants: Mapping[str, int]
    last: Mapping[str, int]

    @property
    def outputs(self) -> list[str]:
        return [o.name for o in self.proto.graph.output]

    def needs(self, names: Sequence[str]) -> tuple[dict[str, None], dict[int, None]]:
        """Names behind these that are no node's result or an ordinary one's, and the constant nodes between."""
        found: dict[str, None] = {}
        nodes: dict[int, None] = {}
        stack = list(reversed(names))
        while stack:
            name = stack.pop()
            k = self.constants.get(name)
            if k is None:
                found[name] = None
            elif k not in nodes:
                nodes[k] = None
                stack.extend(self.reads[k])
        return found, nodes

    def spans(self, limit: int) -> list[Span]:
        """Runs of nodes whose weights together stay below `limit` bytes, or single ones."""
        out: list[Span] = []
        start, held, size = 0, set[object](), 0
        for at, k in enumerate(self.order):
            names, nodes = self.needs(self.reads[k])
            parts = {k, *nodes, *names}
            more = self._bytes(parts - held)
            if at > start and more >= LARGE and size + more > limit:
                out.append((start, at))
                start, held, size, more = at, set(), 0, self._bytes(parts)
            held |= parts
            size += more
        return [*out, (start, len(self.order))]

    def _bytes(self, things: set[object]) -> int:
        """Of initializers (by name) and nodes (by number)."""
        tensors = sum(int(self.tensors[t].nbytes) for t in things if isinstance(t, str) and t in self.tensors)
        return tensors + sum(int(self.proto.graph.node[k].ByteSize()) for k in things if isinstance(k, int))


def cut(path: Path, how: How, config: VerifyConfig) -> Cut | None:
    """The model in parts; None if it is not that large, or not valid (an ordinary session says so better)."""
    try:
        loaded = load(path)
    except UsageError:
        return None
    if sum(t.nbytes for t in loaded.tensors.values() if t.dtype != onnx_ir.DataType.STRING) <= config.whole:
        return None
    graph, interface = _graph(loaded.proto, loaded.tensors), _interface(loaded.proto, loaded.tensors)
    if graph is None or interface is None:
        return None
    return Cut(path, graph, interface, tuple(graph.spans(config.part)), how)


def _graph(proto: onnx.ModelProto, tensors: Mapping[str, onnx_ir.TensorProtocol]) -> Graph | None:
    """None for nodes that stand before what they read."""
    reads = [[*filter(None, n.input), *captured_names(n)] for n in proto.graph.node]
    fixed = frozenset({*tensors, *(t.values.name for t in proto.graph.sparse_initializer)})
    known = set(fixed) | {i.name for i in proto.graph.input}
    constants: dict[str, int] = {}
    order: list[int] = []
    last: dict[str, int] = {}
    for k, node in enumerate(proto.graph.node):
        if not known.issuperset(reads[k]):
            return None
        known.update(node.output)
        if all(name in fixed or name in constants for name in reads[k]):
            constants.update((name, k) for name in node.output if name)
        else:
            last.update((name, len(order)) for name in reads[k])
            order.append(k)
    return Graph(proto, tensors, fixed, reads, order, constants, last)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A large model in parts; `spans` are where it is cut, as far as is known before a value has come."""

    path: Path
    graph: Graph
    interface: Interface
    spans: tuple[Span, ...]
    how: How

    @property
    def parts(self) -> int:
        return len(self.spans)

    def run(self, feeds: ort.Feeds) -> Results:
        (found,) = self.run_each([Sample("the inputs", feeds)])
        if isinstance(found, Exception):
            raise found
        return found

    def run_each(self, samples: Sequence[Sample]) -> Iterator[Results | Exception]:
        runs = [_Run(s, {}, {}) for s in samples]
        for _ in self._passed(runs):
            pass
        names = self.graph.outputs
        for run in runs:
            yield {n: run.results[n] for n in names} if run.error is None else run.error

    def tapped(self, names: Sequence[str]) -> Cut:
        """The same with values inside as its outputs."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.graph.proto)
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
        return replace(self, graph=replace(self.graph, proto=proto))

    def node_by_node(
        self, feeds: ort.Feeds, library: str | os.PathLike[str], libraries: ort.Libraries
    ) -> list[steps.NodeResult]:
        if not steps.stepped(self.graph.proto):
            return []
        found: list[steps.NodeResult] = []
        called = "the optimized model without its library"
        plain = How(libraries, threads=self.how.threads, called=called, step=self.how.step)
        original = Cut(self.path, self.graph, self.interface, self.spans, plain)
        for part, given in original._passed([_Run(Sample("the inputs", feeds), {}, {})]):
            if any(n.domain == steps.DOMAIN for n in part.proto.graph.node):
                found += steps.node_by_node(part.proto, given, library, libraries, make=part.session)
        return found

    def _passed(self, runs: Sequence[_Run]) -> Iterator[tuple[Part, ort.Feeds]]:
        """Every part after all runs have passed it, with what the first one fed it."""
        start = 0
        for number, (_, stop) in enumerate(self.spans, start=1):
            alive = [r for r in runs if r.error is None]
            if not alive:
                return
            part = _part(self, start, stop, [r.values for r in alive])
            fed = alive[0].feeds(part)
            if self._pass(part, alive, f"part {number} of {len(self.spans)} of {self.how.called}"):
                start = stop
                yield part, fed

    def _pass(self, part: Part, runs: Sequence[_Run], name: str) -> bool:
        """Take the runs through a part; False if that is not possible without the next one. Its session ends here."""
        if not part.proto.graph.output:
            return False
        self.how.step(f"loading {name}")
        try:
            opened = part.opened(part.proto, self.how.options())
        except ort.ORT_ERRORS as exc:
            what, why = f"onnxruntime refuses to load {name} ({self.path})", " ".join(str(exc).split())
            raise UsageError("E_ORT_LOAD", what, why) from exc
        if not _handed_on(opened.session, part):
            return False
        for run in runs:
            self.how.step(f"running {name} on {describe(run.sample)}")
            run.through(opened.session, part)
        return True


@dataclass(slots=True)
class _Run:
    """One set of inputs on its way: the values that parts to come will read, and the outputs so far."""

    sample: Sample
    values: dict[str, object]
    results: Results
    error: Exception | None = None

    def feeds(self, part: Part) -> ort.Feeds:
        return {n: v for n, v in {**self.sample.feeds, **self.values}.items() if n in part.inputs}

    def through(self, sess: onnxruntime.InferenceSession, part: Part) -> None:
        """Past one part. What nobody will read any more is dropped."""
        try:
            made = ort.run(sess, self.feeds(part))
        except ort.ORT_ERRORS as exc:
            self.error = exc
            return
        self.results |= {n: v for n, v in made.items() if n in part.results}
        self.values = {n: v for n, v in (self.values | made).items() if n in part.later}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A run of nodes as a model. Initializers of `proto` without data are the `weights`, which lie in files.

    results   outputs of the whole model that are made here
    later     names of what parts behind this one read
    """

    proto: onnx.ModelProto
    weights: tuple[Stored, ...]
    folder: Path
    inputs: frozenset[str]
    results: frozenset[str]
    later: frozenset[str]

    def opened(self, proto: onnx.ModelProto, options: onnxruntime.SessionOptions) -> Mapped:
        """A session of `proto`: this part, or another model with initializers of this part."""
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        held = {t.name for t in copy.graph.initializer}
        return stored_session(copy, [w for w in self.weights if w.header.name in held], self.folder, options)

    def session(self, proto: onnx.ModelProto, threads: int, libraries: ort.Libraries) -> steps.Loaded:
        """The same for steps.node_by_node: the session, and what must live as long."""
        opened = self.opened(proto, ort.options(threads=threads, libraries=libraries))
        return opened.session, opened


def _part(whole: Cut, start: int, stop: int, values: Sequence[Mapping[str, object]]) -> Part:
    """The nodes of a span as a model, for inputs like `values`; the last also makes what depends on no input."""
    g = whole.graph
    graph = g.proto.graph
    made = {name for at in range(start, stop) for name in graph.node[g.order[at]].output if name}
    elsewhere = {name for k in g.order for name in graph.node[k].output} - made if stop == len(g.order) else None
    results = [o for o in graph.output if o.name in made or (elsewhere is not None and o.name not in elsewhere)]
    read = [name for at in range(start, stop) for name in g.reads[g.order[at]] if name not in made]
    names, nodes = g.needs([*read, *(o.name for o in results if o.name not in made)])
    later = {name for name, at in g.last.items() if at >= stop}
    proto = onnx.ModelProto()
    copy_fields(g.proto, proto, skip=("graph",))
    proto.graph.name = graph.name
    proto.graph.node.extend(graph.node[k] for k in sorted(nodes))
    proto.graph.node.extend(graph.node[g.order[at]] for at in range(start, stop))
    weights = [_tensor(proto.graph, name, g.tensors[name]) for name in names if name in g.tensors]
    proto.graph.sparse_initializer.extend(t for t in graph.sparse_initializer if t.values.name in names)
    inputs = {i.name: i for i in graph.input}
    given = [n for n in names if n in inputs or n not in g.fixed]  # an initializer may be an input as well
    proto.graph.input.extend(inputs[n] if n in inputs else _like(n, values) for n in given)
    proto.graph.output.extend(results)
    kept = {o.name for o in results}
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in sorted((made & later) - kept))
    proto.graph.value_info.extend(v for v in graph.value_info if v.name in made - kept)
    folder = whole.path.resolve().parent
    return Part(proto, tuple(filter(None, weights)), folder, frozenset(given), frozenset(kept), frozenset(later))


def _tensor(graph: onnx.GraphProto, name: str, tensor: onnx_ir.TensorProtocol) -> Stored | None:
    """Put an initializer into a graph; of a large one without the data, but with the place where they lie."""
    if not isinstance(tensor, onnx_ir.ExternalTensor):
        graph.initializer.append(onnx_ir.serde.serialize_tensor(tensor))
        return None
    header = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=[int(d) for d in tensor.shape.numpy()])
    graph.initializer.append(header)
    if tensor.nbytes < LARGE:
        graph.initializer[-1].raw_data = raw_bytes(tensor)
        return None
    return Stored(header, Path(tensor.path), tensor.offset or 0, tensor.nbytes)


def _like(name: str, values: Sequence[Mapping[str, object]]) -> onnx.ValueInfoProto:
    """An input of the type of these values; of their rank, if they have the same."""
    arrays = [np.asarray(v[name]) for v in values]
    ranks = {a.ndim for a in arrays}
    shape = [None] * ranks.pop() if len(ranks) == 1 else None
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(arrays[0].dtype), shape)


def _handed_on(sess: onnxruntime.InferenceSession, part: Part) -> bool:
    """What later parts read are arrays."""
    types = [ort.numpy_dtype(o.type) for o in sess.get_outputs() if o.name in part.later]
    return all(t is not None and ort.takes(t) for t in types)


# --- what callers see ------------------------------------------------------------------------------------------------
def _interface(proto: onnx.ModelProto, tensors: Mapping[str, object]) -> Interface | None:
    """As onnxruntime would tell it; None for inputs or outputs without a type."""
    given = [i for i in proto.graph.input if i.name not in tensors]
    overridable = [i for i in proto.graph.input if i.name in tensors] if proto.ir_version >= 4 else []
    if not all(_type_name(v.type) for v in (*given, *overridable, *proto.graph.output)):
        return None
    specs = tuple(spec(i.name, _type_name(i.type), _dims(i.type)) for i in given)
    outputs, defaults = ([(v.name, _type_name(v.type)) for v in side] for side in (proto.graph.output, overridable))
    return Interface(specs, outputs, sorted(defaults))


def _type_name(t: onnx.TypeProto) -> str:
    """The name of a type in onnxruntime; "" if it is not complete."""
    kind = t.WhichOneof("value")
    match kind:
        case "tensor_type" | "sparse_tensor_type":
            code = getattr(t, kind).elem_type
            prefix = kind.removesuffix("_type")
            return f"{prefix}({onnx.TensorProto.DataType.Name(code).lower()})" if code else ""
        case "sequence_type":
            inner = _type_name(t.sequence_type.elem_type)
            return f"seq({inner})" if inner else ""
        case "optional_type":
            inner = _type_name(t.optional_type.elem_type)
            return f"optional({inner})" if inner else ""
        case "map_type":
            inner = _type_name(t.map_type.value_type)
            key = onnx.TensorProto.DataType.Name(t.map_type.key_type).lower()
            return f"map({key},{inner})" if inner else ""
    return ""


def _dims(t: onnx.TypeProto) -> list[object]:
    dims = t.tensor_type.shape.dim if t.HasField("tensor_type") else []
    return [d.dim_param if d.HasField("dim_param") else d.dim_value if d.HasField("dim_value") else None for d in dims]
