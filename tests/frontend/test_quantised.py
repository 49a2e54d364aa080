"""A quantised model keeps its bits and its integer kernels; what nobody quantises is fused as ever."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.inspection import inspect
from onnxfuse.pipeline import Bundle

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
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


def test_a_model_without_quantisers_is_not_looked_at():
    assert fates("g (float[N] x) => (float[N] y) { a = Exp(x)  y = Neg(a) }") == {"Exp": "compiled", "Neg": "compiled"}
