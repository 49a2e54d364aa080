"""Small models from ONNX text, and the oracle for them."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
from onnx import parser

from onnxfuse.config import PrepareConfig
from onnxfuse.frontend.prepare import Prepared, prepare
from onnxfuse.frontend.read import Source
from onnxfuse.verify.evaluate import evaluate


def model(body: str, signature: str = "(float[4] x) => (float[4] y)", opset: int = 17, more: str = "", ir: int = 8):
    imports = ", ".join(f'"{d}": {v}' for d, v in {"": opset, "f": 1, "foreign": 1}.items())
    return parser.parse_model(f"<ir_version: {ir}, opset_import: [{imports}]> g {signature} {{ {body} }} {more}")


def initializer(name: str, array) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def prepared(source: Source, **config) -> Prepared:
    graph = source.graph
    calculator = partial(evaluate, opset=graph.opset, imports=graph.imports)
    return prepare(graph, PrepareConfig(**config), calculator, source.hints)


def ops(graph) -> list[str]:
    return [n.op.name for n in graph.nodes]
