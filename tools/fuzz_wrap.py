"""The same computation written otherwise: in the branches of an If, in a Loop, in functions; what inputs declare."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx
from fuzz_graph import BOOL, Made, code
from onnx import TensorProto, helper

from onnxfuse.frontend.protos import captured_names


def wrapped(made: Made, rng: random.Random) -> Made | None:
    """The graph with a part of it moved, or otherwise declared; None when nothing fits."""
    model = onnx.ModelProto()
    model.CopyFrom(made.model)
    out = Made(made.seed, model, [dict(f) for f in made.feeds], list(made.ops))
    return out if rng.choice(WAYS)(out, rng) else None


def _reads(node: onnx.NodeProto) -> set[str]:
    return {i for i in node.input if i} | set(captured_names(node))


def _tail(made: Made, rng: random.Random) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]] | None:
    """Nodes from somewhere to the end, and the outputs they make. The nodes are in order or there is no tail."""
    nodes = list(made.model.graph.node)
    seen = {i.name for i in made.model.graph.input} | {t.name for t in made.model.graph.initializer}
    for n in nodes:
        if not _reads(n) <= seen:
            return None
        seen |= set(n.output)
    tail = nodes[rng.randrange(len(nodes)) :]
    inside = {o for n in tail for o in n.output if o}
    outs = [o for o in made.model.graph.output if o.name in inside]
    return (tail, outs) if outs else None


def _renamed(nodes: Sequence[onnx.NodeProto], prefix: str) -> tuple[list[onnx.NodeProto], dict[str, str]]:
    """Copies whose results have other names."""
    names = {o: f"{prefix}{o}" for n in nodes for o in n.output if o}
    copies = []
    for n in nodes:
        copy = onnx.NodeProto.FromString(n.SerializeToString())
        _rename(copy, names)
        copies.append(copy)
    return copies, names


def _rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    node.input[:] = [names.get(i, i) for i in node.input]
    node.output[:] = [names.get(o, o) for o in node.output]
    for a in node.attribute:
        if a.HasField("g"):
            for inner in a.g.node:
                _rename(inner, names)
            for info in a.g.output:
                info.name = names.get(info.name, info.name)


def _without(made: Made, nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    gone = {n.SerializeToString() for n in nodes}
    return [
        onnx.NodeProto.FromString(n.SerializeToString())
        for n in made.model.graph.node
        if n.SerializeToString() not in gone
    ]


def _put(made: Made, nodes: Sequence[onnx.NodeProto]) -> None:
    del made.model.graph.node[:]
    made.model.graph.node.extend(nodes)


def _typed(o: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    """A value of the same type and any shape."""
    rank = len(o.type.tensor_type.shape.dim)
    return helper.make_tensor_value_info(name, o.type.tensor_type.elem_type, [None] * rank)


def into_if(made: Made, rng: random.Random) -> bool:
    """The tail in both branches of an If; one of them may do a little more."""
    found = _tail(made, rng)
    if found is None:
        return False
    tail, outs = found
    branches = []
    for k, side in enumerate(("then_", "else_")):
        copies, names = _renamed(tail, side)
        ends = []
        for o in outs:
            end = names[o.name]
            if k and o.type.tensor_type.elem_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
                copies.append(helper.make_node("Neg", [end], [f"{end}_n"]))
                end = f"{end}_n"
            ends.append(_typed(o, end))
        branches.append(helper.make_graph(copies, f"{side}g", [], ends))
    name = "which"
    if any(i.name == name for i in made.model.graph.input):
        return False
    made.model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.BOOL, []))
    for k, feeds in enumerate(made.feeds):
        feeds[name] = np.array(k != 1, BOOL)
    node = helper.make_node("If", [name], [o.name for o in outs], then_branch=branches[0], else_branch=branches[1])
    _put(made, [*_without(made, tail), node])
    made.ops.append("If")
    return True


def into_loop(made: Made, rng: random.Random) -> bool:
    """The tail as a body that runs a few times: its outputs get an axis more."""
    found = _tail(made, rng)
    if found is None:
        return False
    tail, outs = found
    copies, names = _renamed(tail, "body_")
    body = helper.make_graph(
        [helper.make_node("Identity", ["body_cond"], ["body_again"]), *copies],
        "body_g",
        [
            helper.make_tensor_value_info("body_i", TensorProto.INT64, []),
            helper.make_tensor_value_info("body_cond", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("body_again", TensorProto.BOOL, []),
            *(_typed(o, names[o.name]) for o in outs),
        ],
    )
    trips = helper.make_tensor("trips", TensorProto.INT64, [], [rng.choice((1, 2, 3))])
    made.model.graph.initializer.append(trips)
    node = helper.make_node("Loop", ["trips", ""], [o.name for o in outs], body=body)
    _put(made, [*_without(made, tail), node])
    for o in outs:
        rank = len(o.type.tensor_type.shape.dim) + 1
        o.CopyFrom(
            helper.make_tensor_value_info(o.name, o.type.tensor_type.elem_type, [f"{o.name}_l{k}" for k in range(rank)])
        )
    made.ops.append("Loop")
    return True


def into_function(made: Made, rng: random.Random) -> bool:
    """Some nodes in a row as a function; an attribute of one of them is given by the call."""
    nodes = list(made.model.graph.node)
    at = rng.randrange(len(nodes))
    part = nodes[at : at + rng.randint(1, 5)]
    if any(n.domain or any(a.HasField("g") for a in n.attribute) for n in part):
        return False
    inside = {o for n in part for o in n.output if o}
    if len({o for n in part for o in n.output}) < sum(len(n.output) for n in part):
        return False  # an output left out twice
    reads = [i for i in dict.fromkeys(i for n in part for i in n.input if i) if i not in inside]
    after = {i for n in nodes[at + len(part) :] for i in _reads(n)} | {o.name for o in made.model.graph.output}
    gives = [o for n in part for o in n.output if o in after]
    if not gives:
        return False
    body = [onnx.NodeProto.FromString(n.SerializeToString()) for n in part]
    passed: list[onnx.AttributeProto] = []
    for n in body:
        for a in n.attribute:
            if n.op_type != "Constant" and rng.random() < 0.4:
                given = onnx.AttributeProto.FromString(a.SerializeToString())
                given.name = f"p{len(passed)}"
                passed.append(given)
                kind = a.type
                a.CopyFrom(onnx.AttributeProto(name=a.name, type=kind, ref_attr_name=given.name))
    domain = "local"
    opset = next(e.version for e in made.model.opset_import if e.domain == "")
    function = helper.make_function(
        domain, f"part{at}", reads, gives, body, [helper.make_opsetid("", opset)], [a.name for a in passed]
    )
    if not any(e.domain == domain for e in made.model.opset_import):
        made.model.opset_import.append(helper.make_opsetid(domain, 1))
    made.model.functions.append(function)
    call = helper.make_node(f"part{at}", reads, gives, domain=domain)
    call.attribute.extend(passed)
    _put(made, [*nodes[:at], call, *nodes[at + len(part) :]])
    made.ops.append("local function")
    return True


def nameless_dims(made: Made, rng: random.Random) -> bool:
    """Dimensions that nobody named, or that the model knows less of than it could."""
    for i in made.model.graph.input:
        for d in i.type.tensor_type.shape.dim:
            if rng.random() < 0.5:
                d.Clear()
    return True


def defaults(made: Made, rng: random.Random) -> bool:
    """Initializers that are inputs too: what a run does not feed has a default."""
    chosen = [t for t in made.model.graph.initializer if t.data_type != TensorProto.BFLOAT16 and rng.random() < 0.5]
    if not chosen:
        return False
    for t in chosen:
        made.model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
        array = onnx.numpy_helper.to_array(t)
        if array.dtype.kind == "f" and rng.random() < 0.5:
            for feeds in made.feeds[1:]:
                feeds[t.name] = np.asarray(array[..., ::-1] if array.ndim else array + 1, array.dtype)
    return True


def outputs_between(made: Made, rng: random.Random) -> bool:
    """Values in the middle are results as well."""
    graph = made.model.graph
    there = {o.name for o in graph.output}
    inferred = onnx.shape_inference.infer_shapes(made.model).graph.value_info
    kinds = {i.name: i for i in inferred if i.type.HasField("tensor_type") and i.type.tensor_type.elem_type}
    inner = [o for n in graph.node for o in n.output if o in kinds and o not in there and rng.random() < 0.4]
    for v in inner:
        kind = kinds[v].type.tensor_type
        if kind.HasField("shape"):
            graph.output.append(
                helper.make_tensor_value_info(v, kind.elem_type, [f"{v}_{k}" for k in range(len(kind.shape.dim))])
            )
    return bool(inner)


_ = code
WAYS: tuple[Callable[[Made, random.Random], bool], ...] = (
    into_if, into_if, into_loop, into_function, into_function, nameless_dims, defaults, outputs_between,
)  # fmt: skip
