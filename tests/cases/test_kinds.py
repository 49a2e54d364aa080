"""Public bugs that are no values: sizes, names, documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
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


def test_a_result_below_the_normal_numbers_is_no_zero_while_a_library_is_loaded(tmp_path: Path) -> None:
    """P08: a library that switches the process to flush to zero would change the judge as well."""
    m = model("g (float[1] x) => (float[1] y) { n = Neg(x) y = Mul(n, s) }")
    m.graph.initializer.append(numpy_helper.from_array(np.array(2.0**-124, np.float32), "s"))
    onnxfuse.optimize(m, verify=False).save(tmp_path / "out.onnx")
    fused = onnxfuse.InferenceSession(tmp_path / "out.onnx")
    feed = {"x": np.array([0.1875], np.float32)}
    want = np.array([-0.1875 * 2.0**-124], np.float32)
    assert want[0] < 0
    for session in (fused, ort.InferenceSession(m.SerializeToString()), fused):
        assert session.run(None, feed)[0].tobytes() == want.tobytes()


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("count", [2, 17, 33])
def test_where_a_nan_stands_decides_nothing(op: str, count: int, tmp_path: Path) -> None:
    """P01: onnxruntime keeps a NaN that comes first and loses any other; docs/ops.md says what holds here."""
    onnxfuse.optimize(
        model(f"g (float[R,N] x) => (float[R] y) {{ e = Abs(x) y = {op}<axes = [1], keepdims = 0>(e) }}"), verify=False
    ).save(tmp_path / "out.onnx")
    x = np.ones((count, count), np.float32)
    np.fill_diagonal(x, np.nan)
    (y,) = onnxfuse.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})
    assert np.isnan(y).all()


@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_a_kernel_divides_integers_by_zero_without_a_trap(op: str, dtype: str, tmp_path: Path) -> None:
    """P18, P21: onnxruntime's own kernels trap, so only the quotients that are defined are looked at."""
    m = model(f"g ({dtype}[N] a, {dtype}[N] b) => ({dtype}[N] y) {{ q = {op}(a, b) y = Add(q, a) }}")
    onnxfuse.optimize(m, verify=False).save(tmp_path / "out.onnx")
    least = np.iinfo(dtype).min
    a = np.array([8, 7, 0, least, least, 9] * 7, dtype)
    b = np.array([2, 0, 0, 0, np.array(-1).astype(dtype), 4] * 7, dtype)
    (y,) = onnxfuse.InferenceSession(tmp_path / "out.onnx").run(None, {"a": a, "b": b})
    quotient = np.array([4, 2] if op == "Div" else [0, 1], dtype)
    assert (y[0::6] == quotient[0] + a[0::6]).all()
    assert (y[5::6] == quotient[1] + a[5::6]).all()


def test_reducing_a_scalar_over_an_axis_it_does_not_have_is_no_crash() -> None:
    """P40."""
    m = parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        g (double x) => (double y) <int64[1] axes = {0}> { y = ReduceLogSumExp<keepdims = 1>(x, axes) }""")
    try:
        made = onnxfuse.optimize(m, verify=False)
    except onnxfuse.UsageError:
        return
    assert [n.op_type for n in made.model.graph.node] == ["ReduceLogSumExp"]
