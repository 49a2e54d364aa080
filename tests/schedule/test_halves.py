"""Half-precision values inside a kernel are rounded where onnxruntime rounds, and where the model says so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.read import read
from onnxfuse.fuse import fuse
from onnxfuse.ir.interp import run_kernel
from onnxfuse.ir.text import show
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.verify import ort
from tests.frontend.onnx_text import initializer, model, prepared

HALF = "(float16[4,6] x) => (float16[4,6] y)"
TURNED = "(float16[4,6] x) => (float16[6,4] y)"


def run(m: onnx.ModelProto, x: np.ndarray) -> tuple[np.ndarray, str]:
    """What the model's one kernel computes, in the interpreter, and the kernel's text."""
    made = kernelize(fuse(lower(atomize(prepared(read(m)).typed)), FusionConfig()))
    (call,) = made.calls.values()
    (y,) = run_kernel(call.kernel, [x])
    return y, show(call.kernel)


def sample() -> np.ndarray:
    return np.random.default_rng(0).uniform(0.1, 3, (4, 6)).astype(np.float16)


@pytest.mark.parametrize(
    ("body", "signature", "roundings"),
    [
        pytest.param("a = Mul(x, x) b = Sqrt(a) y = Add(b, x)", HALF, 1, id="a chain, at its end"),
        pytest.param("a = Mul(x, x) b = Transpose(a) y = Sqrt(b)", TURNED, 1, id="through a view"),
        pytest.param("a = Mul(x, x) b = Cast<to=1>(a) c = Sqrt(b) y = Cast<to=10>(c)", HALF, 1, id="up and down again"),
        pytest.param("a = MatMul(x, x) y = Sqrt(a)", "(float16[4,4] x) => (float16[4,4] y)", 1, id="MatMul"),
        pytest.param("y = Softmax(x)", HALF, 1, id="softmax"),
    ],
)
def test_a_kernel_rounds_once_as_onnxruntime_does(body, signature, roundings):
    m = model(body, signature)
    shape = [d.dim_value for d in m.graph.input[0].type.tensor_type.shape.dim]
    x = np.resize(sample(), shape)
    y, text = run(m, x)
    expected = ort.run(ort.session(m, threads=1), {"x": x})["y"]
    assert text.count("f16(") == roundings
    if "Softmax" not in body:  # exp is only as good as its stated error
        np.testing.assert_array_equal(y, expected)


def test_a_cast_of_the_model_rounds():
    m = model("a = Exp(x) b = Cast<to=10>(a) c = Cast<to=1>(b) y = Neg(c)", "(float[4,6] x) => (float[4,6] y)")
    x = sample().astype(np.float32)
    y, _ = run(m, x)
    np.testing.assert_array_equal(y, y.astype(np.float16).astype(np.float32))


def test_a_value_that_leaves_the_kernel_is_what_its_readers_inside_see():
    m = model("a = Mul(x, x) y = Sqrt(a)", "(float16[4,6] x) => (float16[4,6] a, float16[4,6] y)")
    made = kernelize(fuse(lower(atomize(prepared(read(m)).typed)), FusionConfig()))
    arrays = {"x": sample()}
    for call in made.calls.values():
        outs = run_kernel(call.kernel, [arrays[v.name] for v in call.inputs])
        arrays.update({v.name: out for v, out in zip(call.outputs, outs, strict=True)})
    np.testing.assert_array_equal(arrays["y"], np.sqrt(arrays["a"].astype(np.float32)).astype(np.float16))


def test_a_view_of_what_the_kernel_reads_stays_in_half_precision():
    _, text = run(
        model("a = Transpose(x) b = Concat<axis=0>(a, a) y = Neg(b)", "(float16[4,6] x) => (float16[12,4] y)"), sample()
    )
    assert "local" not in text


def kernels_of(body: str, signature: str, x: np.ndarray) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """With a kernel for every node: the model, its results in the interpreter, and what crosses between kernels."""
    m = model(body, signature)
    graph = atomize(prepared(read(m)).typed)
    made = kernelize(fuse(lower(graph), FusionConfig(mode=FusionMode.NONE)))
    arrays = {"x": x}
    for call in made.calls.values():
        outs = run_kernel(call.kernel, [arrays[v.name] for v in call.inputs])
        arrays.update({v.name: out for v, out in zip(call.outputs, outs, strict=True)})
    crossing = [str(v.tensor.dtype) for call in made.calls.values() for v in call.outputs if v.name != "y"]
    return m, arrays, crossing


@pytest.mark.parametrize(
    ("body", "signature", "between"),
    [
        pytest.param("a = Mul(x, x) b = Sqrt(a) y = Add(b, x)", HALF, ["f32", "f32"], id="a chain"),
        pytest.param("a = Mul(x, x) b = Transpose(a) y = Sqrt(b)", TURNED, ["f32", "f32"], id="through a view"),
        pytest.param("a = Mul(x, x) y = Transpose(a)", TURNED, ["f16"], id="nothing behind the view"),
        pytest.param("a = Mul(x, x) b = Cast<to=1>(a) y = Sqrt(b)", "(float16[4,6] x) => (float[4,6] y)",
                     ["f32", "f32"], id="up"),
    ],
)  # fmt: skip
def test_what_only_kernels_read_crosses_between_them_unrounded(body, signature, between):
    m, arrays, crossing = kernels_of(body, signature, sample())
    assert crossing == between
    expected = ort.run(ort.session(m, threads=1), {"x": sample()})["y"]
    np.testing.assert_array_equal(arrays["y"], expected)


def test_a_cast_of_the_model_rounds_between_kernels():
    body = "a = Exp(x) b = Cast<to=10>(a) c = Cast<to=1>(b) y = Neg(c)"
    _, arrays, crossing = kernels_of(body, "(float[4,6] x) => (float[4,6] y)", sample().astype(np.float32))
    assert crossing == ["f32", "f16", "f32"]
    np.testing.assert_array_equal(arrays["y"], arrays["y"].astype(np.float16).astype(np.float32))


def test_a_reshape_that_stays_with_the_runtime_reads_and_makes_half_values():
    m = model(
        "a = Mul(x, x) b = Reshape(a, s) c = Sqrt(b) y = Add(a, x)",
        "(float16[4,6] x) => (float16[24] c, float16[4,6] y)",
    )
    m.graph.initializer.append(initializer("s", np.array([24])))
    made = kernelize(fuse(lower(atomize(prepared(read(m)).typed)), FusionConfig(mode=FusionMode.NONE)))
    assert {str(v.tensor.dtype) for call in made.calls.values() for v in (*call.inputs, *call.outputs)} == {"f16"}
