"""A quantised model keeps its bits and its integer kernels; what nobody quantises is fused as ever."""

from __future__ import annotations

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.inspection import inspect
from onnxfuse.pipeline import Bundle

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
ANY = "x86-64-v2"  # the newest processors have instructions for signed bytes, which onnxruntime uses
SCALES = "float s = {0.1}, uint8 z = {128}"


def optimized(text: str) -> Bundle:
    return onnxfuse.optimize(onnx.parser.parse_model(HEAD + text))


def fates(text: str) -> dict[str, str]:
    """Op type -> code of why it was left, or "compiled"."""
    bundle = optimized(text)
    found = inspect(bundle.partition, bundle.plans)
    return {n.op: n.code for n in found.left} | {m.op: "compiled" for g in found.groups for m in g.members}


def test_what_reaches_a_quantiser_stays_what_follows_is_compiled():
    assert fates(f"""g (float[N,4] x) => (float[N,4] y) <{SCALES}> {{
        a = Exp(x)
        q = QuantizeLinear(a, s, z)
        d = DequantizeLinear(q, s, z)
        t = Tanh(d)
        y = Neg(t)
    }}""") == {
        "Exp": "UN_QUANTISED",
        "QuantizeLinear": "UN_QUANTISED",
        "DequantizeLinear": "UN_QUANTISED",
        "Tanh": "UN_QUANTISED",  # reads what was dequantised: may be an integer kernel
        "Neg": "compiled",
    }


def test_a_composite_before_a_quantiser_stays_whole():
    found = fates("""g (float[N,8] x) => (uint8[N,8] y, float s, uint8 z) <float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}> {
        a = LayerNormalization(x, w)
        y, s, z = DynamicQuantizeLinear(a)
    }""")
    assert found == {"LayerNormalization": "UN_QUANTISED", "DynamicQuantizeLinear": "UN_QUANTISED"}


def test_weights_that_are_dequantised_keep_their_product():
    found = fates("""g (float[N,2] x) => (float[N,2] y) <int8[2,2] q = {1, 2, 3, 4}, float s = {0.5}> {
        w = DequantizeLinear(q, s)
        t = Transpose(w)
        p = MatMul(x, t)
        y = Relu(p)
    }""")
    assert found["MatMul"] == "UN_QUANTISED"
    assert found["Relu"] == "compiled"


def test_a_quantiser_in_a_body_counts():
    found = fates(f"""g (bool c, float[4] x) => (uint8[4] y) <{SCALES}> {{
        a = Exp(x)
        y = If (c) <
            then_branch = t () => (uint8[4] u) {{ u = QuantizeLinear(a, s, z) }},
            else_branch = e () => (uint8[4] v) {{ v = QuantizeLinear(a, s, z) }}
        >
    }}""")
    assert found["Exp"] == "UN_QUANTISED"


def test_no_batch_normalisation_goes_into_weights_before_a_quantiser():
    bundle = optimized(f"""g (float[1,1,4,4] x) => (uint8[1,1,4,4] y)
        <{SCALES}, float[1,1,1,1] w = {{0.3}}, float[1] one = {{1.1}}, float[1] b = {{0.7}}> {{
        c = Conv(x, w)
        n = BatchNormalization(c, one, b, b, one)
        y = QuantizeLinear(n, s, z)
    }}""")
    assert [n.op_type for n in bundle.model.graph.node] == ["Conv", "BatchNormalization", "QuantizeLinear"]


@pytest.mark.parametrize("op", ["Erf", "Softmax"])
def test_every_bit_before_the_steps_is_kept(op, tmp_path):
    text = f"""g (float[64,64] x, float[64,64] w) => (uint8[64,64] y, float s, uint8 z) {{
        p = MatMul(x, w)
        a = {op}(p)
        y, s, z = DynamicQuantizeLinear(a)
    }}"""
    model = onnx.parser.parse_model(HEAD + text)
    onnxfuse.optimize(model).save(tmp_path / "o.onnx")
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((64, 64), dtype=np.float32) for n in "xw"}
    for a, b in zip(
        ort.InferenceSession(model.SerializeToString()).run(None, feeds),
        ort.InferenceSession(str(tmp_path / "o.onnx")).run(None, feeds),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


DYNAMIC = """g (float[N,64] x, int8[N,64] a) => (uint8[N,32] y, float t, uint8 z) {{
    p = MatMulInteger(a, w{zeros})
    c = Cast<to = 1>(p)
    m = Mul(c, s)
    b = Add(m, bias)
    y, t, z = DynamicQuantizeLinear(b)
}}"""


def with_weights(text: str, *weights: tuple[str, np.ndarray]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, name) for name, w in weights)
    return model


def same_bits(model: onnx.ModelProto, feeds: dict[str, np.ndarray], tmp_path) -> set[str]:
    """The optimized model gives the original's bits; what its kernels hold."""
    bundle = onnxfuse.optimize(model, target_cpu=ANY)
    tmp_path.mkdir(exist_ok=True)
    bundle.save(tmp_path / "o.onnx")
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    want = ort.InferenceSession(model.SerializeToString(), plain).run(None, feeds)
    for a, b in zip(want, onnxfuse.InferenceSession(str(tmp_path / "o.onnx")).run(None, feeds), strict=True):
        np.testing.assert_array_equal(a, b)
    found = inspect(bundle.partition, bundle.plans)
    return {m.op for g in found.groups for m in g.members}


def test_products_of_signed_bytes_before_a_quantiser_are_compiled_with_what_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    weights = [("w", rng.integers(-128, 128, (64, 32), np.int8)), ("s", np.float32(0.013)),
               ("bias", rng.standard_normal(32, np.float32))]  # fmt: skip
    feeds = {"a": rng.integers(-128, 128, (50, 64), np.int8), "x": np.zeros((50, 64), np.float32)}
    model = with_weights(DYNAMIC.format(zeros=""), *weights)
    assert same_bits(model, feeds, tmp_path) == {"MatMulInteger", "Cast", "Mul", "Add"}
    model = with_weights(DYNAMIC.format(zeros=", za, zb"), *weights, ("za", np.array(-7, np.int8)),
                         ("zb", rng.integers(-9, 9, 32, np.int8)))  # fmt: skip
    assert same_bits(model, feeds, tmp_path) == {"MatMulInteger", "Cast", "Mul", "Add"}


def test_products_of_the_same_bytes_run_in_one_kernel(tmp_path):
    rng = np.random.default_rng(2)
    lines = [f"p{k} = MatMulInteger(a, w{k})  c{k} = Cast<to = 1>(p{k})  y{k} = Mul(c{k}, s)" for k in range(3)]
    outputs = ", ".join(f"float[B,N,64] y{k}" for k in range(3))
    text = f"g (int8[B,N,96] a) => ({outputs}) {{ {' '.join(lines)} }}"
    weights = [(f"w{k}", rng.integers(-128, 128, (96, 64), np.int8)) for k in range(3)]
    model = with_weights(text, ("s", np.float32(0.01)), *weights)
    assert len(onnxfuse.optimize(model, target_cpu=ANY).plans.plans) == 1
    for shape in ((2, 37), (1, 1), (3, 128)):
        feeds = {"a": rng.integers(-128, 128, (*shape, 96), np.int8)}
        assert same_bits(model, feeds, tmp_path) == {"MatMulInteger", "Cast", "Mul"}


def test_products_of_unsigned_bytes_stay():
    found = fates("""g (uint8[N,64] a, uint8[64,32] w) => (float[N,32] y) {
        p = MatMulInteger(a, w)
        c = Cast<to = 1>(p)
        y = Exp(c)
    }""")
    assert found == {"MatMulInteger": "UN_QUANTISED", "Cast": "compiled", "Exp": "compiled"}


@pytest.mark.parametrize("channels", [8, 9])
def test_convolutions_of_signed_bytes_have_onnxruntimes_bits(channels, tmp_path):
    rng = np.random.default_rng(1)
    parts = [
        ("w", rng.integers(-128, 128, (24, channels, 3, 3), np.int8)),
        ("v", rng.integers(-128, 128, (16, 24, 1, 1), np.int8)),
        ("sw", rng.uniform(0.001, 0.01, 24).astype(np.float32)),
        ("zw", np.zeros(24, np.int8)),
        ("b", rng.integers(-5000, 5000, 24, np.int32)),
        ("s", np.float32(0.05)),
        ("z", np.array(3, np.int8)),
        ("nil", np.array(0, np.int8)),
    ]
    model = with_weights(
        f"""g (int8[N,{channels},13,11] x) => (int8[N,16,13,11] y) {{
            h = QLinearConv<pads = [1, 1, 1, 1]>(x, s, z, w, sw, zw, s, z, b)
            y = QLinearConv(h, s, z, v, s, nil, s, nil)
        }}""",
        *parts,
    )
    feeds = {"x": rng.integers(-128, 128, (2, channels, 13, 11), np.int8)}
    assert same_bits(model, feeds, tmp_path) == {"QLinearConv"}


def test_a_depthwise_convolution_of_bytes_is_compiled():
    found = fates("""g (int8[1,16,9,9] x, int8[16,1,3,3] w) => (float[1,16,7,7] y) {
        p = ConvInteger<group = 16>(x, w)
        y = Cast<to = 1>(p)
    }""")
    assert found == {"ConvInteger": "compiled", "Cast": "compiled"}


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_a_quantiser_that_stands_alone_is_compiled_with_onnxruntimes_bits(dtype, tmp_path):
    rng = np.random.default_rng(0)
    x = (rng.integers(-3000, 3000, (9, 40)) * np.float32(0.125)).astype(np.float32)  # half of them between two steps
    x[0, :6] = np.nan, np.inf, -np.inf, 1e30, -1e30, -0.0
    parts = [("s", np.float32(0.25)), ("z", np.array(3, dtype)), ("t", rng.uniform(0.1, 1, 40).astype(np.float32)),
             ("u", rng.integers(0, 9, 40).astype(dtype))]  # fmt: skip
    for scale, zero in (("s", "z"), ("t", "u")):
        text = f"(float[N,40] x) => ({dtype}[N,40] y) {{ y = QuantizeLinear(x, {scale}, {zero}) }}"
        model = with_weights("g " + text, *parts)
        model.opset_import[0].version = 21
        assert same_bits(model, {"x": x}, tmp_path / scale) == {"QuantizeLinear"}
        text = f"({dtype}[N,40] x) => (float[N,40] y) {{ y = DequantizeLinear(x, {scale}, {zero}) }}"
        model = with_weights("g " + text, *parts)
        model.opset_import[0].version = 21
        steps = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (9, 40)).astype(dtype)
        assert same_bits(model, {"x": steps}, tmp_path / zero) == {"DequantizeLinear"}


def test_a_model_without_quantisers_is_not_looked_at():
    assert fates("g (float[N] x) => (float[N] y) { a = Exp(x)  y = Neg(a) }") == {"Exp": "compiled", "Neg": "compiled"}
