"""Runs of affine steps by constants are one Mul and one Add, with the numbers of onnxruntime; the rest stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.trace import Trace

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
BN = "BatchNormalization<epsilon = 0.01>(x, s, b, m, v)"


def model(body: str, kind: str = "float", shape: str = "N,6,5,W", more: str = "") -> onnx.ModelProto:
    made = onnx.parser.parse_model(f"{HEAD} g ({kind}[{shape}] x{more}) => ({kind}[{shape}] y) {{ {body} }}")
    rng = np.random.default_rng(1)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(made.graph.input[0].type.tensor_type.elem_type)
    shapes = dict.fromkeys("sbmv", (6,)) | {"p": (6, 1, 1), "q": (1, 6, 1, 1), "u": (), "w": (6, 5, 1)}
    for name, dims in shapes.items():
        array = np.asarray(rng.random(dims) + 0.5).astype(dtype)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def simplified(m: onnx.ModelProto, tmp_path, shape: tuple[int, ...] = (2, 6, 5, 7), **config) -> list[str]:
    """Op types after the simplifications, once the whole result has agreed with onnxruntime, with and without us."""
    trace = Trace()
    onnxfuse.optimize(m, verify=False, trace=trace, **config).save(tmp_path / "o.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = ort.InferenceSession(m.SerializeToString(), options)
    dtype = {"tensor(float)": np.float32, "tensor(double)": np.float64}.get(reference.get_inputs()[0].type, np.float16)
    near = 1e-2 if dtype is np.float16 else 1e-5
    feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(dtype)}
    for session in (onnxfuse.InferenceSession(tmp_path / "o.onnx"), ort.InferenceSession(tmp_path / "o.onnx")):
        for a, b in zip(reference.run(None, feeds), session.run(None, feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=near, atol=near)
    return [n.op.name for n in trace.result("prepare").graph.nodes]


RUNS = {
    "normalisation": (f"y = {BN}", ["Mul", "Add"]),
    "with its scale": (f"a = {BN} c = Mul(a, p) d = Add(q, c) y = Relu(d)", ["Mul", "Add", "Relu"]),
    "every step": ("a = Sub(x, p) c = Div(a, u) d = Add(c, q) y = Mul(u, d)", ["Mul", "Add"]),
    "shifts alone": ("a = Add(x, p) y = Sub(a, q)", ["Add"]),
    "factors alone": ("a = Mul(x, p) y = Div(a, q)", ["Mul"]),
}


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_becomes_a_factor_and_a_shift(run, kind, tmp_path):
    body, ops = RUNS[run]
    assert simplified(model(body, kind), tmp_path) == ops


STAYS = {
    "no shorter": "a = Add(x, p) y = Mul(a, q)",
    "another order": "a = Sub(p, x) y = Sub(u, a)",
    "division by x": "a = Div(u, x) y = Div(p, a)",
    "a factor of two": "a = Mul(x, x) y = Mul(a, a)",
}


@pytest.mark.parametrize("kind", STAYS)
def test_other_steps_stay(kind, tmp_path):
    body = STAYS[kind]
    assert simplified(model(body), tmp_path) == [n.op_type for n in model(body).graph.node]


def test_a_step_with_another_reader_ends_the_run(tmp_path):
    m = model(f"a = {BN} c = Mul(a, p) z = Add(c, q) y = Mul(c, u)")
    m.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    assert simplified(m, tmp_path) == ["Mul", "Add", "Add", "Mul"]


def test_a_constant_that_widens_x_is_no_step(tmp_path):
    made = onnx.parser.parse_model(
        f"{HEAD} g (float[1,6,1,1] x) => (float[1,6,1,4] y) {{ a = Mul(x, k) y = Mul(a, k) }}"
    )
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "k"))
    assert simplified(made, tmp_path, (1, 6, 1, 1)) == ["Mul", "Mul"]


def test_half_precision_rounds_after_every_step(tmp_path):
    assert simplified(model(f"a = {BN} c = Mul(a, p) y = Add(c, q)", "float16"), tmp_path)[0] == "BatchNormalization"


def test_a_factor_that_is_not_finite_stays(tmp_path):
    m = model(f"y = {BN}")
    m.graph.initializer[3].CopyFrom(onnx.numpy_helper.from_array(np.full(6, -1, np.float32), "v"))
    assert simplified(m, tmp_path) == ["BatchNormalization"]


def test_it_can_be_skipped(tmp_path):
    assert simplified(model(f"y = {BN}"), tmp_path, skip_optimization={"affine"}) == ["BatchNormalization"]
