"""What a model file is, without loading its weights: op counts, size, inputs and outputs, our marks in it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir

from onnxfuse.frontend.load import Loaded, load
from onnxfuse.verify.ort import Source

_DOMAIN = "onnxfuse"  # of custom nodes
_PREFIX = "onnxfuse."  # of our metadata


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Counted over the main graph and its subgraphs; bodies of local functions count apart."""

    ops: dict[str, int]
    function_ops: dict[str, int]
    opset: int
    bytes: int | None  # of the file and its external data; None when the model is not a file

    @property
    def nodes(self) -> int:
        return sum(self.ops.values())


def facts(source: Source) -> ModelFacts:
    """Facts about a model in any form."""
    if isinstance(source, onnx_ir.Model):
        bodies = (node for function in source.functions.values() for node in function.all_nodes())
        counts, inner = (
            Counter(_op(n.domain, n.op_type) for n in nodes) for nodes in (source.graph.all_nodes(), bodies)
        )
        return ModelFacts(dict(counts), dict(inner), source.opset_imports.get("", 0), None)
    loaded = load(source)
    model = loaded.proto
    ops = _counts(model.graph.node)
    function_ops: Counter[str] = Counter()
    for function in model.functions:
        function_ops += _counts(function.node)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    size = _file_bytes(loaded) if loaded.path is not None else None
    return ModelFacts(dict(ops), dict(function_ops), opset, size)


def _op(domain: str, op_type: str) -> str:
    return op_type if domain in ("", "ai.onnx") else f"{domain}::{op_type}"


def _counts(nodes: object) -> Counter[str]:
    out: Counter[str] = Counter()
    stack = [nodes]
    while stack:
        for node in stack.pop():  # type: ignore[attr-defined]  # protobuf's repeated fields have no useful type
            out[_op(node.domain, node.op_type)] += 1
            for attr in node.attribute:
                stack.extend(g.node for g in (attr.g, *attr.graphs) if g.node)
    return out


def _file_bytes(loaded: Loaded) -> int:
    """The model file and the data files beside it."""
    data = (Path(t.path) for t in loaded.tensors.values() if isinstance(t, onnx_ir.ExternalTensor))
    files = {p.resolve() for p in (loaded.path, *data) if p is not None}
    return sum(f.stat().st_size for f in files)


def recorded(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What an optimized model says about itself, in the schema of `inspection`; None for any other model.

    The record in the metadata is taken as it is; without one the custom nodes and their function bodies are read.
    """
    model = load(path).proto
    meta = {p.key.removeprefix(_PREFIX): p.value for p in model.metadata_props if p.key.startswith(_PREFIX)}
    if "inspection" in meta:
        return dict(json.loads(meta["inspection"]))
    custom = [n for n in model.graph.node if n.domain == _DOMAIN]
    if not custom and not meta:
        return None
    rows = {row["name"]: row for row in json.loads(meta.get("groups", "[]"))}
    bodies = {f.name: f for f in model.functions if f.domain == _DOMAIN}
    return {"groups": [_from_node(n, rows.get(n.name, {}), bodies.get(n.op_type)) for n in custom], "left": []}


def _from_node(node: onnx.NodeProto, row: Mapping[str, Any], body: onnx.FunctionProto | None) -> dict[str, Any]:
    """One group as far as the file tells; `origin` of a member is the group's."""
    origin = list(row.get("origins", ()))
    members = [{"name": n.name, "op": n.op_type, "origin": origin} for n in (body.node if body is not None else ())]
    name, op = node.name, node.op_type
    return {"name": name, "op_type": op, "members": members, "reads": list(node.input), "writes": list(node.output)}
