# ruff: noqa: E501 - a model is read as a line
"""Unusual but valid graphs, whole way: the same outputs without and with the library, what is not ours word for word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxfuse

IMPORTS = '"" : {opset}, "com.microsoft" : 1, "f" : 1'


def model(text: str, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f"<ir_version: {ir}, opset_import: [{IMPORTS.format(opset=opset)}]>\n{text}")


def data(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def plain() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return options


def agrees(m: onnx.ModelProto, tmp_path: Path, *feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Optimize, run, compare; and once more from the result, which must not change."""
    bundle = onnxfuse.optimize(m, verify=False)
    bundle.save(tmp_path / "o.onnx")
    sessions = [ort.InferenceSession(tmp_path / "o.onnx", plain())]
    sessions += [onnxfuse.InferenceSession(tmp_path / "o.onnx", plain())] if bundle.library is not None else []
    judge = ort.InferenceSession(m.SerializeToString(), plain())
    for feed in feeds or ({},):
        want = judge.run(None, feed)
        for session in sessions:
            for a, b in zip(want, session.run(None, feed), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    again = onnxfuse.optimize(tmp_path / "o.onnx", verify=False)
    assert again.model.graph == bundle.model.graph
    assert list(again.model.functions) == list(bundle.model.functions)
    # The names hold a hash of what the kernels compute. Messages name the user's nodes, and those that a first run
    # simplified away are not in its result: the library's bytes may differ in that.
    names = [[p.kernel.name for p in b.plans.plans] for b in (bundle, again)]
    assert names[0] == names[1]
    return bundle.model


def ops(m: onnx.ModelProto) -> list[str]:
    return [n.op_type.split("_")[0] if n.domain == "onnxfuse" else n.op_type for n in m.graph.node]


# name -> (graph, feeds)
GRAPHS = {
    "an optional input left out in the middle": (
        """g (float[1,1,4,4] x) => (float[1,1,8,8] y) <float[4] s = {1, 1, 2, 2}> {
            e = Exp(x) r = Resize<mode="nearest">(e, "", s) y = Neg(r) }""",
        {"x": data(1, 1, 4, 4)},
    ),
    "a second output nobody reads": (
        """g (float[1,1,4,4] x) => (float[1,1,3,3] y) {
            e = Exp(x) p, i = MaxPool<kernel_shape=[2,2]>(e) y = Neg(p) }""",
        {"x": data(1, 1, 4, 4)},
    ),
    "a second output that is an output": (
        """g (float[1,1,4,4] x) => (float[1,1,3,3] y, int64[1,1,3,3] i) {
            e = Exp(x) p, i = MaxPool<kernel_shape=[2,2]>(e) y = Neg(p) }""",
        {"x": data(1, 1, 4, 4)},
    ),
    "outputs left out": (
        """g (float[3,2,4] x) => (float[1,2,5] h) {
            e = Tanh(x) "", h = LSTM<hidden_size=5>(e, w, r) }""",
        {"x": data(3, 2, 4)},
    ),
    "an empty tensor in the middle": (
        """g (float[N,4] x) => (float[N,4] y, float[0,4] z) <int64[1] s = {0}, int64[1] e = {0}> {
            p = Slice(x, s, e) q = Exp(p) z = Neg(q) r = Concat<axis=0>(z, x) y = Tanh(r) }""",
        {"x": data(3, 4)},
    ),
    "no rows": ("g (float[N,4] x) => (float[N,4] y) { p = Softmax(x) y = Neg(p) }", {"x": data(0, 4)}),
    "scalars": ("g (float x, float z) => (float y) { p = Mul(x, z) q = Exp(p) y = Add(q, x) }",
                {"x": np.array(2, np.float32), "z": np.array(-1, np.float32)}),
    "one input three times": ("g (float[4] x) => (float[4] y) { p = Sum(x, x, x) y = Where(c, p, p) }", {"x": data(4)}),
    "one value as two outputs": (
        "g (float[4] x) => (float[4] y, float[4] z) { a = Exp(x) y = Identity(a) z = Identity(a) }", {"x": data(4)}),
    "an input and an initializer as outputs": (
        "g (float[4] x) => (float[4] x, float[4] w, float[4] y) { p = Mul(x, w) y = Tanh(p) }", {"x": data(4)}),
    "an initializer of two products": (
        "g (float[2,4] x) => (float[2,4] y) { p = MatMul(x, k) q = Relu(p) t = MatMul(q, k) y = Tanh(t) }", {"x": data(2, 4)}),
    "nodes out of order, without names": (
        "g (float[4] x) => (float[4] y) { y = Neg(b) b = Add(a, x) a = Exp(x) }", {"x": data(4)}),
    "an op of onnxruntime's own domain": (
        "g (float[2,4] x) => (float[2,4] y) { a = Exp(x) b = com.microsoft.BiasGelu(a, w) y = Neg(b) }", {"x": data(2, 4)}),
    "a local function, twice": (
        """g (float[4] x) => (float[4] y) { p = f.twice(x) y = f.twice(p) }
        <domain: "f", opset_import: ["" : 17]> twice (v) => (w) { a = Tanh(v) w = Add(a, a) }""",
        {"x": data(4)},
    ),
}  # fmt: skip
TENSORS = {
    "w": data(4), "k": data(4, 4), "c": np.array([True, False, True, False]),
}  # fmt: skip
LSTM = {"w": data(1, 20, 4), "r": data(1, 20, 5)}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name: str, tmp_path: Path) -> None:
    text, feed = GRAPHS[name]
    m = model(text)
    read = {n for node in m.graph.node for n in node.input} | {o.name for o in m.graph.output}
    tensors = LSTM if "LSTM" in text else TENSORS
    m.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tensors.items() if n in read)
    agrees(m, tmp_path, feed)


@pytest.mark.parametrize("ir", range(3, onnx.IR_VERSION + 1))
def test_every_ir_version(ir: int, tmp_path: Path) -> None:
    m = model("g (float[4] x) => (float[4] y) { a = Mul(x, w) y = Tanh(a) }", opset=9, ir=ir)
    del m.opset_import[1:]
    m.graph.initializer.append(numpy_helper.from_array(data(4), "w"))
    if ir < 4:  # initializers are inputs too
        m.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    try:
        ort.InferenceSession(m.SerializeToString(), plain())
    except Exception as error:
        pytest.skip(f"onnxruntime: {str(error)[:60]}")
    assert ops(agrees(m, tmp_path, {"x": data(4)})) == ["mul"]


def test_an_overridable_initializer_can_still_be_overridden(tmp_path: Path) -> None:
    m = model("g (float[4] x, float[4] w) => (float[4] y) { a = Mul(x, w) y = Tanh(a) }")
    m.graph.initializer.append(numpy_helper.from_array(data(4), "w"))
    agrees(m, tmp_path, {"x": data(4)}, {"x": data(4), "w": data(4) * 2})


def test_a_sparse_initializer_is_computed_with(tmp_path: Path) -> None:
    m = model("g (float[2,4] x) => (float[2,4] y) { a = Add(x, w) y = Tanh(a) }")
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [3.0, 5.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [2], [1, 3])
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    agrees(m, tmp_path, {"x": data(2, 4)})


def test_training_nodes_stay_word_for_word(tmp_path: Path) -> None:
    m = model("""g (float[2,3,4] x) => (float[2,3,4] y, bool[2,3,4] m) <float r = {0.5}, bool t = {1}> {
        a = Exp(x) b = Neg(a) d, m = Dropout<seed=1>(b, r, t) y = Tanh(d) }""")
    made = onnxfuse.optimize(m, verify=False).model
    (kept,) = [n for n in made.graph.node if n.op_type == "Dropout"]
    before = next(n for n in m.graph.node if n.op_type == "Dropout")
    assert (list(kept.input), list(kept.output), list(kept.attribute)) == (
        list(before.input), list(before.output), list(before.attribute),
    )  # fmt: skip


def test_foreign_nodes_stay_word_for_word() -> None:
    m = model("""g (float[2,4] x) => (float[2,4] y) {
        a = Exp(x) [mine] b = com.microsoft.QuickGelu<alpha=1.5>(a) y = Neg(b) }""")
    made = onnxfuse.optimize(m).model
    (kept,) = [n for n in made.graph.node if n.domain == "com.microsoft"]
    assert kept == m.graph.node[1]
    assert {o.domain: o.version for o in made.opset_import}["com.microsoft"] == 1


def test_types_that_are_no_tensors_go_through(tmp_path: Path) -> None:
    m = model("""g (float[2] x) => (float[2] y, bool h) {
        o = Optional(x) h = OptionalHasElement(o) e = OptionalGetElement(o) p = Exp(e) y = Neg(p) }""")
    agrees(m, tmp_path, {"x": data(2)})
