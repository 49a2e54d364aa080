"""Models in parts: several as one, the part of one that computes some outputs, one node alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from onnxfuse.frontend.protos import all_graphs, captured_names


def alone(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """The part of a model that computes these outputs."""
    made = {o: k for k, n in enumerate(model.graph.node) for o in n.output if o}
    needed: set[str] = set()
    keep: set[int] = set()
    pending = list(outputs)
    while pending:
        v = pending.pop()
        if v in needed:
            continue
        needed.add(v)
        if (at := made.get(v, -1)) >= 0 and at not in keep:
            keep.add(at)
            pending += [i for i in model.graph.node[at].input if i]
            pending += captured_names(model.graph.node[at])
    small = onnx.ModelProto()
    small.CopyFrom(model)
    g = small.graph
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for k, n in enumerate(model.graph.node) if k in keep]
    for repeated, kept in (
        (g.node, nodes),
        (g.input, [i for i in model.graph.input if i.name in needed]),
        (g.output, [o for o in model.graph.output if o.name in set(outputs)]),
        (g.initializer, [t for t in model.graph.initializer if t.name in needed]),
        (g.value_info, []),
    ):
        copies = [type(item).FromString(item.SerializeToString()) for item in kept]
        del repeated[:]
        repeated.extend(copies)
    called = {n.op_type for n in nodes if n.domain == "local"}
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in model.functions if f.name in called]
    del small.functions[:]
    small.functions.extend(functions)
    return small


def merged(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Several models of one opset as one; what is in number k is called gk_..."""
    whole = onnx.ModelProto()
    for k, model in enumerate(models):
        part = renamed(model, f"g{k}_")
        whole.graph.name = "batch"
        whole.ir_version = max(whole.ir_version, part.ir_version)
        for entry in part.opset_import:
            if entry.domain not in {e.domain for e in whole.opset_import}:
                whole.opset_import.add(domain=entry.domain, version=entry.version)
        whole.functions.extend(part.functions)
        for name in ("node", "input", "output", "initializer"):
            getattr(whole.graph, name).extend(getattr(part.graph, name))
    return whole


def renamed(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """The same model with all its names behind a prefix."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for f in out.functions:
        f.name = prefix + f.name
    for g in all_graphs(out.graph):
        for info in (*g.input, *g.output, *g.value_info):
            info.name = prefix + info.name
            for d in info.type.tensor_type.shape.dim:
                if d.dim_param:
                    d.dim_param = prefix + d.dim_param
        for t in g.initializer:
            t.name = prefix + t.name
        for n in g.node:
            n.input[:] = [prefix + i if i else "" for i in n.input]
            n.output[:] = [prefix + o if o else "" for o in n.output]
            n.name = prefix + n.name if n.name else ""
            if n.domain == "local":
                n.op_type = prefix + n.op_type
    return out


def single(model: onnx.ModelProto, node: onnx.NodeProto, fed: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """One node of a model as a model."""
    one = onnx.ModelProto()
    one.CopyFrom(model)
    g = one.graph
    for repeated in (g.node, g.input, g.output, g.initializer, g.value_info):
        del repeated[:]
    g.node.add().CopyFrom(node)
    for v, a in fed.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(a.dtype)
        g.input.append(onnx.helper.make_tensor_value_info(v, kind, [None] * a.ndim))
    g.output.extend(onnx.ValueInfoProto(name=o) for o in node.output if o)
    return one
