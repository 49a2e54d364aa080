"""Public bugs that are no values: sizes, names, documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

import onnxfuse


def model(text: str, ir: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : 17]>\n{text}')


def test_a_folded_weight_does_not_stay_beside_its_image(tmp_path: Path) -> None:
    m = model("g (float[4,256] x) => (float[4,256] y) { t = Transpose<perm=[1,0]>(w) p = MatMul(x, t) y = Relu(p) }")
    m.graph.initializer.append(numpy_helper.from_array(np.ones((256, 256), np.float32), "w"))
    written = onnxfuse.optimize(m, verify=False).save(tmp_path / "o.onnx")
    assert written.model.stat().st_size < len(m.SerializeToString()) + 8192


def test_function_bodies_refer_to_no_attribute() -> None:
    m = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "f" : 1]>
        g (float[4] x) => (float[4] y) { p = f.scale<alpha=2.0>(x) q = f.scale<alpha=3.0>(p) y = Tanh(q) }
        <domain: "f", opset_import: ["" : 17]> scale <alpha> (v) => (w) {
            a = Constant<value_float: float = @alpha>() w = Mul(v, a) }""")
    made = onnxfuse.optimize(m)
    nodes = [n for f in made.model.functions for n in f.node]
    assert nodes
    assert not any(a.ref_attr_name for n in nodes for a in n.attribute)


def test_documents_and_metadata_stay() -> None:
    m = model("g (float[4] x) => (float[4] y, float[4] z) { a = Exp(x) y = Neg(a) z = Identity(x) }", 10)
    m.doc_string, m.graph.doc_string = "the model", "the graph"
    m.producer_name, m.producer_version, m.model_version, m.domain = "someone", "7", 3, "org.example"
    m.graph.input[0].doc_string, m.graph.output[0].doc_string = "what goes in", "what comes out"
    m.metadata_props.add(key="author", value="x")
    m.graph.node[2].doc_string = "a node"
    m.graph.node[2].metadata_props.add(key="namespace", value="a/b/c")
    m.graph.metadata_props.add(key="graph", value="g")
    made = onnxfuse.optimize(m).model
    assert (made.doc_string, made.graph.doc_string) == ("the model", "the graph")
    kept = (made.producer_name, made.producer_version, made.model_version, made.domain)
    assert kept == ("someone", "7", 3, "org.example")
    assert (made.graph.input[0].doc_string, made.graph.output[0].doc_string) == ("what goes in", "what comes out")
    assert ("author", "x") in [(p.key, p.value) for p in made.metadata_props]
    assert [(p.key, p.value) for p in made.graph.metadata_props] == [("graph", "g")]
    (kept_node,) = [n for n in made.graph.node if n.op_type == "Identity"]
    assert kept_node.doc_string == "a node"
    assert [(p.key, p.value) for p in kept_node.metadata_props] == [("namespace", "a/b/c")]


def test_custom_nodes_say_what_they_are_made_of() -> None:
    made = onnxfuse.optimize(model("g (float[4] x) => (float[4] y) { a = Exp(x) y = Neg(a) }")).model
    (node,) = made.graph.node
    assert node.name == "exp_neg"
    groups = next(p.value for p in made.metadata_props if p.key == "onnxfuse.groups")
    assert '"members":["Exp_0","Neg_1"]' in groups
