"""What a model file is, without loading its weights: op counts, size, inputs and outputs, our marks in it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir

from onnxfuse.verify.ort import Source


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
    model = _parse(source)
    ops = _counts(model.graph.node)
    function_ops: Counter[str] = Counter()
    for function in model.functions:
        function_ops += _counts(function.node)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    size = _file_bytes(Path(source), model) if isinstance(source, (str, os.PathLike)) else None
    return ModelFacts(dict(ops), dict(function_ops), opset, size)


def _parse(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        return source
    if isinstance(source, bytes):
        return onnx.load_model_from_string(source)
    return onnx.load(os.fspath(source), load_external_data=False)


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


def _file_bytes(path: Path, model: onnx.ModelProto) -> int:
    locations = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    files = [path, *(path.parent / name for name in locations)]
    return sum(f.stat().st_size for f in files if f.is_file())
