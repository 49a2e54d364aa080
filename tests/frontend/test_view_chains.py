"""A way through views that ends where it began is not gone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.config import PrepareConfig
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.read import read
from onnxfuse.ir.graph import Graph
from onnxfuse.verify.evaluate import evaluate


def model(shape: str, body: str, **consts: list[int]) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[{shape}] x) => (float[] y, float[] z) {{ t = Relu (x) {body} }}""".replace("[?]", "[]")
    )
    for out in made.graph.output:
        out.type.tensor_type.ClearField("shape")
    for name, value in consts.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    return made


def ops(made: onnx.ModelProto, skip: frozenset[str] = frozenset()) -> list[str]:
    source = read(made)
    graph: Graph = source.graph
    done = prepare(
        graph, PrepareConfig(skip=skip), lambda n, a: evaluate(n, a, graph.opset, graph.imports), source.hints
    )
    return [n.op.name for n in done.graph.nodes]


THERE_AND_BACK = """
    a = Reshape (t, to) b = Transpose <perm = [0, 3, 1, 2]> (a)
    y = Exp (b)
    c = Reshape (b, flat) d = Transpose <perm = [0, 2, 1]> (c)
    z = Neg (d)"""
SHAPES = {"to": [2, 3, 4, 8], "flat": [2, 8, 12]}


def test_tokens_to_an_image_and_back() -> None:
    """As between the stages of SegFormer: the image is still needed, the tokens are not made again."""
    made = model("2, 12, 8", THERE_AND_BACK, **SHAPES)
    assert ops(made) == ["Relu", "Reshape", "Transpose", "Exp", "Neg"]
    assert "Neg" in ops(made, frozenset({"view_chains"}))
    assert len(ops(made, frozenset({"view_chains"}))) == 7


def test_with_a_dynamic_batch() -> None:
    shapes = {"to": [0, 3, 4, 8], "flat": [0, 8, 12]}
    assert ops(model("N, 12, 8", THERE_AND_BACK, **shapes)) == ["Relu", "Reshape", "Transpose", "Exp", "Neg"]


@pytest.mark.parametrize("perm", [[0, 1, 2], [2, 0, 1]])
def test_another_order_is_another_value(perm: list[int]) -> None:
    other = THERE_AND_BACK.replace("[0, 2, 1]", str(perm))
    assert len(ops(model("2, 12, 8", other, **SHAPES))) >= 6


def test_another_split_of_the_same_shape_is_another_value() -> None:
    """Rows and columns of the image are mixed up on the way."""
    body = """
        a = Reshape (t, to) b = Transpose <perm = [1, 0]> (a) y = Exp (b)
        c = Reshape (b, back) z = Neg (c)"""
    assert len(ops(model("4, 6", body, to=[2, 12], back=[4, 6]))) == 6


def test_a_graph_output_keeps_its_node() -> None:
    body = "a = Transpose <perm = [1, 0]> (t) y = Exp (a) z = Transpose <perm = [1, 0]> (a)"
    assert ops(model("4, 6", body)) == ["Relu", "Transpose", "Exp", "Transpose"]


def test_there_and_back_twice() -> None:
    body = """
        a = Transpose <perm = [1, 0]> (t) b = Transpose <perm = [1, 0]> (a)
        c = Transpose <perm = [1, 0]> (b) d = Transpose <perm = [1, 0]> (c) y = Exp (d) z = Neg (c)"""
    assert ops(model("4, 6", body)) == ["Relu", "Transpose", "Exp", "Neg"]
