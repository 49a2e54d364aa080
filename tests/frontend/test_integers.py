"""Products of dequantised bytes run as products of integers: the same steps, or the neighbouring one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.inspection import inspect
from onnxfuse.pipeline import Bundle

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
ANY = "x86-64-v2"  # the newest processors have instructions for signed bytes, which onnxruntime uses
RNG = np.random.default_rng(0)
Weights = dict[str, np.ndarray]


def model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    made = onnx.parser.parse_model(HEAD + text)
    made.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items())
    return made


def bytes_(*shape: int) -> np.ndarray:
    return RNG.integers(-127, 128, shape).astype(np.int8)


def scale(*shape: int) -> np.ndarray:
    return (RNG.random(shape) * 0.02 + 0.001).astype(np.float32)


def ops(bundle: Bundle) -> tuple[Counter[str], Counter[str]]:
    """Names of what was compiled, and of what was left."""
    found = inspect(bundle.partition, bundle.plans)
    return Counter(m.op for g in found.groups for m in g.members), Counter(n.op for n in found.left)


def run(source: bytes | str, feeds: dict[str, np.ndarray], library: str = "") -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        options.register_custom_ops_library(library)
    return ort.InferenceSession(source, options).run(None, feeds)


def check(made: onnx.ModelProto, folder: Path, feeds: dict[str, np.ndarray], steps: int = 1) -> Bundle:
    """Without its library the model has the original's bits, with it every byte is at most some steps away."""
    bundle = onnxfuse.optimize(made, target_cpu=ANY, verify=False)
    written = bundle.save(folder / "o.onnx")
    assert written.library is not None
    path, library = str(folder / "o.onnx"), str(written.library)
    expected = run(made.SerializeToString(), feeds)
    for a, b, c in zip(expected, run(path, feeds), run(path, feeds, library), strict=True):
        np.testing.assert_array_equal(a, b)
        off = np.abs(a.astype(np.int32) - c.astype(np.int32))
        assert off.max(initial=0) <= steps
        assert (off > 0).mean() < 0.01
    return bundle


CONV = """g (int8[N,16,H,W] x) => (int8[N,24,P,Q] y)
    <int8 zx = {-3}, int8 zy = {%(zero)s}, float sx = {0.02}, float sy = {%(step)s}> {
    d = DequantizeLinear(x, sx, zx)
    e = DequantizeLinear<axis = 0>(w, sw, zw)
    b = DequantizeLinear<axis = 0>(q, sb)
    c = Conv<%(attrs)s>(d, e, b)
    %(between)s
    y = QuantizeLinear(r, sy, zy)
}"""


def conv(weights: np.ndarray, attrs: str = "pads = [1,1,1,1]", zero: int = 5, step: float = 0.4, between: str = ""):
    sw = scale(len(weights))
    between = between or "r = Identity(c)"
    text = CONV % {"attrs": attrs, "zero": zero, "step": step, "between": between}
    zw, q = np.zeros(len(weights), np.int8), RNG.integers(-5000, 5000, len(weights)).astype(np.int32)
    return model(text, w=weights, sw=sw, zw=zw, q=q, sb=(np.float32(0.02) * sw).astype(np.float32))


@pytest.mark.parametrize(
    ("zero", "between"),
    [
        (5, ""),
        (-128, "r = Relu(c)"),
        (0, "r = Relu(c)"),
        (-20, "lo = Constant<value_float = 0.0>() hi = Constant<value_float = 6.0>() r = Clip(c, lo, hi)"),
    ],
)
def test_a_convolution_with_what_comes_before_its_quantiser(zero, between, tmp_path):
    made = conv(bytes_(24, 16, 3, 3), zero=zero, between=between)
    compiled, left = ops(check(made, tmp_path, {"x": bytes_(2, 16, 9, 11)}))
    assert compiled["QLinearConv"] == 1
    assert not left
    assert compiled["Clip"] == (bool(between) and zero != -128)  # saturating is a Relu where 0 is the lowest byte


@pytest.mark.parametrize(
    ("group", "attrs"),
    [
        (1, "pads = [0,2,1,0], strides = [2,1]"),
        (1, "pads = [2,2,2,2], dilations = [2,2]"),
        (2, "pads = [1,1,1,1], group = 2"),
    ],
)
def test_windows_of_all_kinds(group, attrs, tmp_path):
    check(conv(bytes_(24, 16 // group, 3, 3), attrs), tmp_path, {"x": bytes_(1, 16, 10, 13)})


DEPTHWISE = """g (int8[N,12,%(height)d,%(width)d] x) => (int8[N,12,P,Q] y) <int8 z = {-7}, float s = {0.05}> {
    d = DequantizeLinear(x, s, z)
    e = DequantizeLinear(w, s)
    c = Conv<group = 12, %(attrs)s>(d, e)
    y = QuantizeLinear(c, t, z)
}"""


@pytest.mark.parametrize("width", [3, 7, 15, 40])
@pytest.mark.parametrize(
    "attrs", ["pads = [1,1,1,1]", "pads = [1,0,0,1], strides = [2,2]", "pads = [2,2,2,2], dilations = [2,2]"]
)
def test_one_channel_per_group(width, attrs, tmp_path):
    text = DEPTHWISE % {"height": 9, "width": width, "attrs": attrs}
    made = model(text, w=bytes_(12, 1, 3, 3), t=np.float32(0.9))
    bundle = check(made, tmp_path, {"x": bytes_(2, 12, 9, width)})
    assert ops(bundle)[0]["QLinearConv"] == 1


def test_a_depthwise_product_of_full_range(tmp_path):
    """The largest differences of a byte and its zero point do not fit into a byte."""
    text = DEPTHWISE % {"height": 8, "width": 20, "attrs": "pads = [1,1,1,1]"}
    made = model(text.replace("-7", "127"), w=np.full((12, 1, 3, 3), -128, np.int8), t=np.float32(8))
    check(made, tmp_path, {"x": np.full((1, 12, 8, 20), -128, np.int8)})


def test_a_product_of_matrices_by_column(tmp_path):
    text = """g (int8[B,M,96] x) => (int8[B,M,40] y) <int8 z = {4}, float s = {0.03}> {
        a = DequantizeLinear(x, s, z)
        b = DequantizeLinear<axis = 1>(w, sw)
        p = MatMul(a, b)
        y = QuantizeLinear(p, t, z)
    }"""
    made = model(text, w=bytes_(96, 40), sw=scale(40), t=np.float32(0.5))
    bundle = check(made, tmp_path, {"x": bytes_(2, 17, 96)})
    assert ops(bundle)[0]["QLinearMatMul"] == 1


BLOCK = """g (int8[1,16,12,12] x) => (int8[1,16,12,12] y) <int8 z = {0}, float s = {0.05}> {
    d = DequantizeLinear(x, s, z)
    e = DequantizeLinear(w, sw, z)
    c = Conv<pads = [1,1,1,1]>(d, e)
    q = QuantizeLinear(c, s, z)
    h = DequantizeLinear(q, s, z)
    r = Relu(h)
    c2 = Conv<pads = [1,1,1,1]>(h, e)
    q2 = QuantizeLinear(c2, s, z)
    h2 = DequantizeLinear(q2, s, z)
    a = Add(r, h2)
    y = QuantizeLinear(a, s, z)
}"""


def test_between_kernels_there_are_bytes(tmp_path):
    """Every reader has its own dequantiser, in its own kernel."""
    made = model(BLOCK, w=bytes_(16, 16, 3, 3), sw=np.float32(0.002))
    bundle = check(made, tmp_path, {"x": bytes_(1, 16, 12, 12)}, steps=2)
    types = {v.name: v.type.tensor_type.elem_type for v in bundle.model.graph.value_info}
    assert set(types.values()) == {onnx.TensorProto.INT8}
    assert not ops(bundle)[1]


def test_what_stays_is_written_as_it_was():
    """Too small for a kernel: the user's own nodes are there again."""
    text = """g (int8[1,65] x) => (int8[1,5] y) <int8 z = {0}, float s = {0.05}> {
        a = DequantizeLinear(x, s, z)
        b = DequantizeLinear(w, s, z)
        p = MatMul(a, b)
        y = QuantizeLinear(p, s, z)
    }"""
    bundle = onnxfuse.optimize(model(text, w=bytes_(65, 5)), target_cpu=ANY, verify=False)
    assert sorted(n.op_type for n in bundle.model.graph.node) == [
        "DequantizeLinear", "DequantizeLinear", "MatMul", "QuantizeLinear",
    ]  # fmt: skip


def kept(made: onnx.ModelProto) -> str:
    bundle = onnxfuse.optimize(made, target_cpu=ANY, verify=False)
    assert "QLinearConv" not in ops(bundle)[0]
    return " ".join(n.why for n in bundle.notes if n.code == "DQ_KEPT")


def test_a_bias_of_other_steps_keeps_the_product():
    made = conv(bytes_(24, 16, 3, 3))
    (scales,) = [t for t in made.graph.initializer if t.name == "sb"]
    scales.CopyFrom(onnx.numpy_helper.from_array(scale(24), "sb"))
    assert kept(made) == "the scale of the bias is not that of the products"


def test_sums_that_would_not_fit_keep_the_product():
    made = conv(bytes_(24, 16, 3, 3))
    (bias,) = [t for t in made.graph.initializer if t.name == "q"]
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(24, 2**31 - 1, np.int32), "q"))
    assert kept(made) == "the sums may leave i32"


def test_a_bias_in_floats_keeps_the_product():
    made = conv(bytes_(24, 16, 3, 3))
    (node,) = [n for n in made.graph.node if n.op_type == "Conv"]
    node.input[2] = "sw"
    assert kept(made) == "an operand is not dequantised"


def test_a_scale_that_is_no_constant_keeps_the_product():
    text = """g (int8[1,16,8,8] x, float s) => (int8[1,16,8,8] y) <int8 z = {0}, float t = {0.05}> {
        d = DequantizeLinear(x, s, z)
        e = DequantizeLinear(w, t, z)
        c = Conv(d, e)
        y = QuantizeLinear(c, t, z)
    }"""
    assert kept(model(text, w=bytes_(16, 16, 1, 1))) == "scale 's' is not a constant"


def test_the_float_result_that_is_read_keeps_the_product():
    text = """g (int8[1,16,8,8] x) => (int8[1,16,8,8] y, float[1,16,8,8] c) <int8 z = {0}, float t = {0.05}> {
        d = DequantizeLinear(x, t, z)
        e = DequantizeLinear(w, t, z)
        c = Conv(d, e)
        y = QuantizeLinear(c, t, z)
    }"""
    bundle = onnxfuse.optimize(model(text, w=bytes_(16, 16, 1, 1)), target_cpu=ANY, verify=False)
    assert "Conv" in ops(bundle)[1]


def test_unsigned_bytes_stay_with_the_runtime():
    text = """g (uint8[1,16,8,8] x) => (uint8[1,16,8,8] y) <uint8 z = {128}, int8 zw = {0}, float t = {0.05}> {
        d = DequantizeLinear(x, t, z)
        e = DequantizeLinear(w, t, zw)
        c = Conv(d, e)
        y = QuantizeLinear(c, t, z)
    }"""
    bundle = onnxfuse.optimize(model(text, w=bytes_(16, 16, 1, 1)), target_cpu=ANY, verify=False)
    assert [n.op_type for n in bundle.model.graph.node].count("Conv") == 1
