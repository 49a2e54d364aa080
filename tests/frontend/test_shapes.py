"""frontend/shapes.py: every dimension an expression over the inputs' symbols, shape arithmetic evaluated on the way."""

from __future__ import annotations

import pytest

from onnxfuse.frontend.read import read
from onnxfuse.frontend.shapes import infer_types
from onnxfuse.ir.expr import Expr
from tests.frontend.onnx_text import model


def typed(body: str, signature: str, opset: int = 17):
    source = read(model(body, signature, opset))
    return infer_types(source.graph, source.hints)


def shapes(t) -> dict[str, str]:
    return {v.name: str(v.type) for n in t.graph.nodes for v in n.results}


def one(body: str, signature: str, opset: int = 17) -> str:
    return shapes(typed(body, signature, opset))["y"]


def test_dimensions_are_expressions_over_the_inputs():
    assert one("y = Concat<axis=0>(a, b)", "(float[N,4] a, float[M,4] b) => (float[P,4] y)") == "f32[M + N,4]"
    assert one("y = Flatten(x)", "(float[N,C,3] x) => (float[P,Q] y)") == "f32[N,C * 3]"


def test_shape_arithmetic_gives_the_target_of_a_reshape():
    body = """
        s = Shape(x)  zero = Constant<value = int64[1] {0}>()  one = Constant<value = int64[1] {1}>()
        n = Gather(s, zero)  m = Gather(s, one)  four = Constant<value = int64[1] {4}>()
        minus = Constant<value = int64[1] {-1}>()
        t = Concat<axis=0>(n, m, four, minus)  y = Reshape(x, t)
    """
    assert one(body, "(float[N,M,32] x) => (float[A,B,C,D] y)") == "f32[N,M,4,8]"


@pytest.mark.parametrize(
    ("opset", "unsqueeze"), [(11, "Unsqueeze<axes=[0]>(k)"), (17, "Unsqueeze(k, ax)")], ids=["opset11", "opset17"]
)
def test_scalars_of_shapes_as_torch_exports_them(opset, unsqueeze):
    body = f"""
        ax = Constant<value = int64[1] {{0}}>()  at = Constant<value = int64 {{1}}>()
        two = Constant<value = int64 {{2}}>()
        s = Shape(x)  n = Gather(s, at)  k = Mul(n, two)  u = {unsqueeze}  b = Constant<value = int64[1] {{3}}>()
        t = Concat<axis=0>(u, b)  y = ConstantOfShape(t)
    """
    assert one(body, "(float[N,M] x) => (float[P,Q] y)", opset) == "f32[M * 2,3]"


def test_the_mask_of_a_dynamic_bert():
    """Range of a run-time extent, ConstantOfShape, Equal, Where and Expand on shapes."""
    body = """
        s = Shape(ids)  at = Constant<value = int64 {1}>()  n = Gather(s, at)  z = Constant<value = int64 {0}>()
        i = Constant<value = int64 {1}>()  r = Range(z, n, i)
        ax = Constant<value = int64[1] {0}>()  u = Unsqueeze(n, ax)  minus = Constant<value = int64[1] {-1}>()
        b = Constant<value = int64[1] {1}>()  t = Concat<axis=0>(b, u)  ones = ConstantOfShape<value = int64[1] {1}>(b)
        eq = Equal(t, minus)  two = Constant<value = int64[2] {1, 1}>()  w = Where(eq, two, t)  y = Expand(r, w)
    """
    t = typed(body, "(int64[B,S] ids) => (int64[P,Q] y)")
    assert shapes(t)["r"] == "i64[S]"
    assert shapes(t)["y"] == "i64[1,S]"


def test_a_slice_of_a_table_added_to_a_sequence_keeps_the_sequences_extent():
    body = """
        s = Shape(x)  at = Constant<value = int64[1] {1}>()  n = Gather(s, at)  z = Constant<value = int64[1] {0}>()
        size = Constant<value = int64[3] {1, 512, 1}>()  table = ConstantOfShape(size)
        p = Slice(table, z, n, at)  y = Add(x, p)
    """
    t = typed(body, "(float[B,S,4] x) => (float[B,S,4] y)")
    assert shapes(t)["p"] == "f32[1,min(S, 512),1]"
    assert shapes(t)["y"] == "f32[B,S,4]"


def test_resize_to_the_size_of_another_map():
    body = """
        s = Shape(b)  two = Constant<value = int64[1] {2}>()  four = Constant<value = int64[1] {4}>()
        hw = Slice(s, two, four)
        r = Shape(a)  zero = Constant<value = int64[1] {0}>()  nc = Slice(r, zero, two)  t = Concat<axis=0>(nc, hw)
        y = Resize(a, "", "", t)
    """
    assert one(body, "(float[1,3,H,W] a, float[1,8,P,Q] b) => (float[1,3,R,S] y)") == "f32[1,3,P,Q]"


def test_known_elements_are_expressions():
    t = typed("s = Shape(x)  y = Mul(s, s)", "(float[N,3] x) => (int64[2] y)")
    y = next(v for v in t.graph.outputs)
    first, second = t.facts[y]
    assert isinstance(first, Expr)
    assert (str(first), str(second)) == ("N * N", "9")


def test_shapes_behind_an_op_that_stays_are_still_expressions():
    body = "a = CumSum(x, k)  b = ArgMax<axis=1, keepdims=0>(a)  y = Cast<to=1>(b)"
    t = typed("k = Constant<value = int64 {0}>() " + body, "(float[N,M] x) => (float[P] y)")
    assert shapes(t)["y"] == "f32[N]"


def test_what_the_table_cannot_tell_comes_from_the_hints_with_fresh_symbols():
    t = typed("a = NonZero(x)  y = Cast<to=1>(a)", "(float[N,M] x) => (float[P,Q] y)")
    assert shapes(t)["a"].startswith("i64[2,")
    assert [r.code for r in t.refusals.values()] == ["UN_OPAQUE"]


def test_the_users_value_info_is_not_trusted():
    m = model("a = Relu(x)  y = Neg(a)", "(float[N,4] x) => (float[N,4] y)")
    m.graph.value_info.add().CopyFrom(m.graph.output[0])
    m.graph.value_info[0].name = "a"
    m.graph.value_info[0].type.tensor_type.shape.dim[1].dim_value = 7
    source = read(m)
    assert shapes(infer_types(source.graph, {}))["a"] == "f32[N,4]"


def test_types_are_given_once_and_values_with_them_stay_themselves():
    source = read(model("a = Relu(x)  y = Neg(a)"))
    once = infer_types(source.graph, source.hints)
    twice = infer_types(once.graph, source.hints)
    assert all(a is b for a, b in zip(once.graph.nodes, twice.graph.nodes, strict=True))


def test_a_mismatch_is_a_refusal_and_not_a_crash():
    t = typed("y = Add(a, b)", "(float[N,3] a, float[N,3] b) => (float[N,3] y)")
    assert not t.refusals
    source = read(model("y = Add(a, b)", "(float[N] a, float[M] b) => (float[P] y)"))
    assert str(infer_types(source.graph).graph.outputs[0].type) == "f32[bdim(N, M)]"
