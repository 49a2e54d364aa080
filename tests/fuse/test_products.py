"""Products of one value run side by side in one group; what keeps them apart is said by code."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.config import FusionMode
from onnxfuse.ir.partition import Relation, Verdict
from tests.templates.attentions import Graph, attention, fused
from tests.templates.test_several import projections


def codes(model: onnx.ModelProto, **thresholds: object) -> list[str]:
    return [d.code for d in fused(model, **thresholds).decisions if d.relation is Relation.HORIZONTAL]


def test_query_key_and_value_are_one_group() -> None:
    p = fused(projections())
    assert len(p.groups) == 1
    found = [d for d in p.decisions if d.relation is Relation.HORIZONTAL]
    assert [(d.stage, d.verdict, d.code) for d in found] == [("C", Verdict.FUSED, "FUSED_PRODUCTS")] * 2


@pytest.mark.parametrize("mode", [FusionMode.NONE, FusionMode.TVM, FusionMode.CANFUSE])
def test_other_modes_keep_them_apart(mode: FusionMode) -> None:
    assert all(
        sum(c.node.op.name == "MatMul" for c in g.members) == 1 for g in fused(projections(), mode).groups if g.anchor
    )


def test_node_cap() -> None:
    model = projections(count=2)  # MatMul, Add; MatMul, Add, Relu
    assert codes(model, max_nodes=4) == ["FUSED_PRODUCTS"]
    assert codes(model, max_nodes=3) == ["NF_NODE_CAP"]


def test_input_and_output_caps() -> None:
    model = projections(count=2)
    assert codes(model, max_inputs=5) == ["FUSED_PRODUCTS"]
    assert codes(model, max_inputs=4) == ["NF_IO_CAP"]
    assert codes(model, max_outputs=2) == ["FUSED_PRODUCTS"]
    assert codes(model, max_outputs=1) == ["NF_IO_CAP"]


def test_span() -> None:
    assert codes(projections(count=2), span=1) == ["FUSED_PRODUCTS"]
    assert codes(projections(count=2), span=0) == ["NF_SPAN"]


def test_left_out_by_code() -> None:
    assert "FUSED_PRODUCTS" not in codes(projections(), skip=frozenset({"FUSED_PRODUCTS"}))
    assert len(fused(projections(), skip=frozenset({"FUSED_PRODUCTS"})).groups) == 3


def chained() -> onnx.ModelProto:
    """The second product needs the first."""
    g, rng = Graph(), np.random.default_rng(0)
    x = g.input("x", ["S", 16])
    w = [g.const(rng.standard_normal((16, 16)).astype(np.float32)) for _ in range(2)]
    a = g.node("MatMul", x, w[0])
    return g.model([g.node("Add", g.node("MatMul", x, w[1]), g.node("ReduceSum", a, keepdims=1))])


def test_products_that_need_each_other_stay_apart() -> None:
    p = fused(chained())
    assert all(sum(c.node.op.name == "MatMul" for c in g.members) <= 1 for g in p.groups)


def test_other_shapes_and_operands_that_are_no_constants_stay_apart() -> None:
    g, rng = Graph(), np.random.default_rng(0)
    x = g.input("x", ["S", 16])
    narrow, wide = (g.const(rng.standard_normal((16, n)).astype(np.float32)) for n in (16, 32))
    variable = g.input("w", [16, 16])
    outs = [g.node("MatMul", x, w) for w in (narrow, wide, variable)]
    assert len(fused(g.model(outs)).groups) == 3


def test_one_layer_of_an_encoder_is_six_kernels() -> None:
    """Projections; attention; output with LayerNorm; GELU; residual; LayerNorm."""
    assert [sum(c.reduce is not None for c in g.members) for g in fused(encoder()).groups] == [3, 4, 3, 1, 1, 2]


def test_a_narrow_layer_keeps_its_norm_apart() -> None:
    assert len(fused(encoder(256)).groups) == 7


def encoder(hidden: int = 512, heads: int = 4) -> onnx.ModelProto:
    """Attention, residual, LayerNorm, GELU, residual, LayerNorm: post-norm, as in BERT."""
    g, rng = Graph(), np.random.default_rng(2)

    def weights(*shape: int) -> str:
        return g.const((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32))

    def dense(x: str, n: int, m: int) -> str:
        return g.node("Add", g.node("MatMul", x, weights(n, m)), weights(m))

    def norm(x: str) -> str:
        return g.node("LayerNormalization", x, weights(hidden), weights(hidden), axis=-1)

    def split(x: str, perm: list[int]) -> str:
        return g.node("Transpose", g.node("Reshape", x, g.const(np.array([0, 0, heads, hidden // heads]))), perm=perm)

    x = g.input("x", ["B", "S", hidden])
    q, k, v = (dense(x, hidden, hidden) for _ in range(3))
    s = g.node("MatMul", split(q, [0, 2, 1, 3]), split(k, [0, 2, 3, 1]))
    s = g.node("Add", g.node("Mul", s, g.const(np.float32(0.35))), g.input("mask", ["B", 1, 1, "S"]))
    y = g.node("MatMul", g.node("Softmax", s, axis=-1), split(v, [0, 2, 1, 3]))
    y = g.node("Reshape", g.node("Transpose", y, perm=[0, 2, 1, 3]), g.const(np.array([0, 0, hidden])))
    y = norm(g.node("Add", dense(y, hidden, hidden), x))
    h = dense(y, hidden, 4 * hidden)
    h = g.node(
        "Mul", h, g.node("Add", g.node("Erf", g.node("Mul", h, g.const(np.float32(0.7071)))), g.const(np.float32(1)))
    )
    return g.model([norm(g.node("Add", dense(h, 4 * hidden, hidden), y))])


def test_attention_is_not_torn_apart_by_its_projections() -> None:
    assert len(fused(attention(flat=True)).groups) == 1


def test_a_window_stays_by_itself() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 8, 12, 12] x) => (float[1, 16, 12, 12] a, float[1, 16, 12, 12] b) {
            a = Conv (x, v)
            b = Conv <pads = [1, 1, 1, 1]> (x, w)
        }""")
    for name, taps in (("v", 1), ("w", 3)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 8, taps, taps), np.float32), name))
    assert len(fused(model).groups) == 2
