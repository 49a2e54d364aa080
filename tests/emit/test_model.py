"""emit/model.py: what the new model says, and that it says the same as the old one."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.frontend.read import read
from tests.emit.pieces import assert_same, emptied, fused, planned, run
from tests.frontend.onnx_text import initializer, model

F32 = TensorProto.FLOAT
X = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
SIGNATURE = "(float[N,8] x) => (float[N,8] y)"
CHAIN = "[p] a = Exp(x) [q] b = Neg(a) [r] y = Softmax(b)"


def ops(m: onnx.ModelProto) -> list[str]:
    return [n.op_type if n.domain != "onnxfuse" else "*" for n in m.graph.node]


# --- the empty pipeline (P67) ----------------------------------------------------------------------------------------
def odd_model() -> onnx.ModelProto:
    """All kinds of attributes and initializers that a round trip could spoil."""
    body = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["t"])], "b", [], [helper.make_tensor_value_info("t", F32, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["e"])], "o", [], [helper.make_tensor_value_info("e", F32, None)]
    )
    values = helper.make_tensor("v", F32, [1], [2.0])
    foreign = helper.make_node(
        "Odd", ["x", "", "w", ""], ["f", "", "f2"], domain="foreign", doc_string="a doc",
        nan=float("nan"), inf=float("-inf"), zero=-0.0, empty=helper.make_tensor("t", F32, [0], []),
        ints=[1, -2], floats=[0.5, float("nan")], texts=["a", "b"], raw=b"\xff\xfe",
        graph=body, sparse=helper.make_sparse_tensor(values, helper.make_tensor("i", 7, [1], [1]), [3]),
        tp=helper.make_tensor_type_proto(F32, ["N", 2]),
    )  # fmt: skip
    nodes = [foreign, helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=other)]
    inputs = [
        helper.make_tensor_value_info("x", F32, ["N", 4]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(
        nodes, "odd", inputs, [helper.make_tensor_value_info(n, F32, None) for n in ("y", "f", "f2")]
    )
    graph.initializer.append(initializer("w", np.array([1, -0.0, np.nan, np.inf], np.float32)))
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("foreign", 3)], ir_version=9
    )
    made.graph.initializer.append(helper.make_tensor("unused", F32, [1], [1.0]))
    return made


def test_nodes_come_back_byte_for_byte():
    made = odd_model()
    out = emptied(made).model
    for before, after in zip(made.graph.node, out.graph.node, strict=True):
        assert [a.SerializeToString(deterministic=True) for a in before.attribute] == [
            a.SerializeToString(deterministic=True) for a in after.attribute
        ]
        assert (before.op_type, before.domain, before.doc_string) == (after.op_type, after.domain, after.doc_string)
        assert list(after.output) == list(before.output)
    assert list(out.graph.node[0].input) == ["x", "", "w"]  # never a trailing empty name


def test_unused_initializers_go_and_used_ones_are_the_same_objects():
    made = odd_model()
    source = read(made)
    emission = emptied(made)
    assert list(emission.tensors) == ["w"]
    assert emission.proto().graph.initializer[0] == made.graph.initializer[0]
    assert source.tensors["w"].raw is made.graph.initializer[0] or source.tensors["w"].raw == made.graph.initializer[0]


def test_initializers_of_all_types_survive_in_raw_data_and_in_fields():
    made = model("y = Identity(x)", "(float[N] x) => (float[N] y)", opset=21, ir=10)
    rows = [("bool", 9, [1, 0]), ("f16", 10, [1.5, -0.0]), ("bf16", 16, [1.5, 2.0]), ("i4", 22, [1, -2]),
            ("u8", 2, [3, 255]), ("f64", 11, [1.0, 2.0]), ("f8", 17, [1.0, 2.0]), ("s", 8, [b"a", b"bc"]),
            ("c64", 14, [1 + 2j, 3j])]  # fmt: skip
    for name, kind, values in rows:
        made.graph.initializer.append(helper.make_tensor(name, kind, [2], values))
        made.graph.output.append(helper.make_tensor_value_info(name, kind, [2]))
    raw = onnx.numpy_helper.from_array(np.array([7.0, 8.0], np.float32), "raw")
    made.graph.initializer.append(raw)
    made.graph.output.append(helper.make_tensor_value_info("raw", F32, [2]))
    out = emptied(made).proto()
    assert {t.name: t.SerializeToString() for t in out.graph.initializer} == {
        t.name: t.SerializeToString() for t in made.graph.initializer
    }


def test_sparse_initializers_stay_sparse():
    made = model("y = Add(x, w)", "(float[4] x) => (float[4] y)")
    values = helper.make_tensor("w", F32, [2], [5.0, 7.0])
    made.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, helper.make_tensor("i", 7, [2], [1, 3]), [4])
    )
    out = emptied(made).proto()
    assert len(out.graph.sparse_initializer) == 1
    assert_same(made, out, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("made", [
    model("s = SequenceConstruct(x, x) i = Constant<value_int: int = 1>() y = SequenceAt(s, i)", SIGNATURE),
    model("k = Constant<value = int64[1] {3}>() y, z = TopK(x, k)", "(float[N,8] x) => (float[N,3] y, int64[N,3] z)"),
    model('t = Constant<value_string: string = "a">() y = Identity(t) z = Neg(x)',
          "(float[N,8] x) => (string y, float[N,8] z)"),
    model("o = Optional(x) h = OptionalHasElement(o) y = Cast<to = 1>(h)", "(float[N,8] x) => (float y)"),
    model("y = Identity(x)", "(float[N,8] x) => (float[N,8] x, float[N,8] y)"),
])  # fmt: skip
def test_the_empty_pipeline_changes_no_number(made):
    assert_same(made, emptied(made).proto(), X)


def test_outputs_that_are_inputs_and_initializers():
    made = model("y = Neg(x)", "(float[N,8] x) => (float[N,8] y, float[N,8] x, float[2] w)")
    made.graph.initializer.append(initializer("w", np.ones(2, np.float32)))
    assert_same(made, fused(made).proto(), X)


# --- the optimized model ---------------------------------------------------------------------------------------------
def test_a_group_is_one_node_with_the_users_nodes_in_its_body():
    made = model(CHAIN, SIGNATURE)
    out = fused(made).model
    assert ops(out) == ["*"]
    node, function = out.graph.node[0], out.functions[0]
    assert (node.domain, node.op_type) == ("onnxfuse", function.name)
    assert list(node.input) == list(function.input) == ["x"]
    assert list(node.output) == list(function.output) == ["y"]
    assert [n.op_type for n in function.node] == ["Exp", "Neg", "Softmax"]
    assert [n.name for n in function.node] == ["p", "q", "r"]
    assert_same(made, out, X)


def test_imports_and_versions():
    out = fused(model(CHAIN, SIGNATURE, ir=4)).model
    assert out.ir_version == 8
    assert {i.domain: i.version for i in out.opset_import}["onnxfuse"] == 1
    assert [(i.domain, i.version) for i in out.functions[0].opset_import] == [("", 17)]
    assert fused(model(CHAIN, SIGNATURE, ir=9)).model.ir_version == 9
    assert fused(model(CHAIN, SIGNATURE, ir=10)).model.ir_version == 9


def test_a_model_without_groups_has_no_domain_of_ours():
    out = fused(model("y = foreign.Foo(x)", SIGNATURE)).model
    assert not out.functions
    assert "onnxfuse" not in {i.domain for i in out.opset_import}


def test_interface_documents_and_metadata_stay():
    """P49, P94, P95."""
    made = model(CHAIN, SIGNATURE)
    made.doc_string, made.producer_name, made.producer_version, made.domain, made.model_version = "m", "p", "1", "d", 7
    made.graph.doc_string = "g"
    made.graph.input[0].doc_string, made.graph.output[0].doc_string = "in", "out"
    made.metadata_props.add(key="author", value="x")
    out = fused(made, mode="full", target="t").model
    assert list(out.graph.input) == list(made.graph.input)
    assert list(out.graph.output) == list(made.graph.output)
    assert (out.doc_string, out.producer_name, out.producer_version, out.domain, out.model_version) == (
        "m",
        "p",
        "1",
        "d",
        7,
    )
    assert (out.graph.doc_string, out.graph.name) == ("g", "g")
    found = {p.key: p.value for p in out.metadata_props}
    assert found["author"] == "x"
    assert found["onnxfuse.mode"] == "full"
    table = json.loads(found["onnxfuse.groups"])
    assert table[0]["name"] == out.graph.node[0].name
    assert table[0]["origins"] == ["p", "q", "r"]


def test_shared_functions_run_with_the_constants_of_each_group():
    made = model("a = Add(x, v) b = Exp(a) c, i = TopK(b, k) d = Add(c, w) y = Exp(d)", SIGNATURE)
    made.graph.initializer.extend([
        initializer("v", np.arange(8, dtype=np.float32)), initializer("w", -np.arange(8, dtype=np.float32)),
        initializer("k", np.array([8])),
    ])  # fmt: skip
    out = fused(made).proto()
    assert ops(out) == ["*", "TopK", "*"]
    assert_same(made, out, X)


def test_refused_groups_are_written_as_they_were():
    made = model(CHAIN, SIGNATURE)
    out = fused(made, refuse=1).model
    assert ops(out) == ["Exp", "Neg", "Softmax"]
    assert_same(made, out, X)


@pytest.mark.parametrize(("refused", "casts"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_groups_exchange_half_values_in_f32_whichever_of_them_are_refused(refused, casts):
    m = model("a = Mul(x, x) b = Neg(a) c = Sqrt(a) y = Sub(b, c)", "(float16[4,6] x) => (float16[4,6] y)")
    x = np.random.default_rng(1).uniform(0.1, 3, (4, 6)).astype(np.float16)
    out = fused(m, FusionConfig(mode=FusionMode.NONE), refuse=refused).proto()
    between = {v.name: v.type.tensor_type.elem_type for v in out.graph.value_info}
    assert set(between.values()) <= {TensorProto.FLOAT}
    assert ops(out).count("Cast") == casts
    assert_same(m, out, {"x": x})


def test_value_info_tells_what_is_known_and_nothing_else():
    """P84, P42."""
    made = model(
        "a = Exp(x) k = Constant<value = int64[1] {2}>() s, i = TopK(a, k) q = SequenceConstruct(s, s) "
        "z = Constant<value_int: int = 0>() y = SequenceAt(q, z)",
        SIGNATURE,
    )
    out = fused(made).model
    known = {v.name: v for v in out.graph.value_info}
    assert [d.dim_param or d.dim_value for d in known["a"].type.tensor_type.shape.dim] == ["N", 8]
    assert "q" not in known
    assert all(v.type.tensor_type.elem_type for v in known.values())


def test_constants_that_are_no_inputs_are_in_the_body():
    made = model(
        "s = Constant<value = int64[2] {-1, 4}>() a = Reshape(x, s) y = Exp(a)", "(float[N,8] x) => (float[M,4] y)"
    )
    out = fused(made).model
    assert all(n.input[-1] for n in out.graph.node)
    assert_same(made, fused(made).proto(), X)
    assert not [a for f in out.functions for n in f.node for a in n.attribute if a.ref_attr_name]


def test_bodies_have_no_trailing_empty_names():
    made = model('y = LayerNormalization(x, g, "")', SIGNATURE)
    made.graph.initializer.append(initializer("g", np.ones(8, np.float32)))
    out = fused(made)
    nodes = [*out.model.graph.node, *(n for f in out.model.functions for n in f.node)]
    assert all(n.input[-1] for n in nodes if n.input)
    assert_same(made, out.proto(), X, exact=False)


def test_a_composite_that_is_cut_is_written_in_parts():
    from onnxfuse.config import FusionConfig

    made = model("a = Exp(x) y = Softmax(a)", SIGNATURE)
    out = fused(made, FusionConfig(max_nodes=2)).proto()
    assert_same(made, out, X, exact=False)


def test_captured_values_keep_their_names():
    body = """a = Exp(x) b = Neg(a) y = If(c) <then_branch = g1 () => (float[N,8] t) { t = Add(a, b) },
      else_branch = g2 () => (float[N,8] e) { e = Sub(b, w) }>"""
    made = model(body, "(float[N,8] x, bool c) => (float[N,8] y)")
    made.graph.initializer.append(initializer("w", np.ones(8, np.float32)))
    out = fused(made).proto()
    assert ops(out)[-1] == "If"
    for flag in (True, False):
        assert_same(made, out, X | {"c": np.array(flag)})


def test_overridable_initializers_can_still_be_overridden():
    made = model("a = Add(x, w) y = Exp(a)", "(float[N,8] x, float[8] w) => (float[N,8] y)")
    made.graph.initializer.append(initializer("w", np.zeros(8, np.float32)))
    out = fused(made).proto()
    assert_same(made, out, X)
    assert_same(made, out, X | {"w": np.ones(8, np.float32)})


def test_initializers_of_old_models_are_no_inputs_any_more():
    made = model("a = Add(x, w) y = Exp(a)", "(float[N,8] x, float[8] w) => (float[N,8] y)", ir=3)
    made.graph.initializer.append(initializer("w", np.zeros(8, np.float32)))
    out = fused(made).proto()
    assert [i.name for i in out.graph.input] == ["x"]
    assert_same(made, out, X)


def test_node_names_are_unique():
    made = model("[n] a = Exp(x) [n] b, i = TopK(a, k) [n] y = Neg(b)", SIGNATURE)
    made.graph.initializer.append(initializer("k", np.array([8])))
    names = [n.name for n in fused(made).model.graph.node]
    assert len(set(names)) == len(names)
    assert all(names)


# --- again -----------------------------------------------------------------------------------------------------------
def test_running_twice_gives_the_same_bytes():
    """P97."""
    made = model(CHAIN, SIGNATURE)
    assert fused(made).proto().SerializeToString(deterministic=True) == fused(made).proto().SerializeToString(
        deterministic=True
    )


def test_an_optimized_model_can_be_optimized_again():
    """Functions of ours are inlined and grouped anew; metadata is replaced and does not pile up."""
    made = model(
        CHAIN + " k = Constant<value = int64[1] {8}>() z, i = TopK(b, k)",
        "(float[N,8] x) => (float[N,8] y, float[N,8] z)",
    )
    once = fused(made).proto()
    twice = fused(once).proto()
    assert ops(twice) == ops(once)
    assert [(n.input, n.output) for n in twice.graph.node if n.domain != "onnxfuse"] == [
        (n.input, n.output) for n in once.graph.node if n.domain != "onnxfuse"
    ]
    assert sorted(p.key for p in twice.metadata_props) == sorted(p.key for p in once.metadata_props)
    assert {i.domain for i in twice.opset_import} == {i.domain for i in once.opset_import}
    assert_same(made, twice, X)


def test_a_model_with_local_functions_runs():
    more = '<domain: "f", opset_import: ["": 17]> twice (a) => (b) { t = Exp(a) b = Neg(t) }'
    made = model("t = f.twice(x) y = f.twice(t)", SIGNATURE, more=more)
    assert_same(made, fused(made).proto(), X)


def test_a_function_of_another_opset_is_kept():
    more = '<domain: "f", opset_import: ["": 11]> soft (a) => (b) { b = Relu(a) }'
    made = model("t = f.soft(x) y = Exp(t)", SIGNATURE, more=more)
    out = fused(made).model
    assert [f.domain for f in out.functions] == ["f", "onnxfuse"]
    assert_same(made, out, X)


def test_a_thousand_groups_share_their_functions():
    """P81, in small."""
    nodes, name = [], "x"
    for k in range(40):
        nodes += [helper.make_node("Exp", [name], [f"e{k}"]), helper.make_node("Neg", [f"e{k}"], [f"n{k}"])]
        nodes += [helper.make_node("TopK", [f"n{k}", "k"], [f"t{k}", f"i{k}"])]
        name = f"t{k}"
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", F32, [2, 8])], [helper.make_tensor_value_info(name, F32, None)]
    )
    graph.initializer.append(initializer("k", np.array([8])))
    out = fused(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)).model
    assert sum(n.domain == "onnxfuse" for n in out.graph.node) == 40
    assert len(out.functions) <= 2  # the first and last groups see other shapes, if at all


def test_every_group_reads_and_writes_what_its_call_says():
    source, atomized, plans = planned(model(CHAIN, SIGNATURE))
    call = next(iter(plans.calls.values()))
    assert [v.name for v in call.inputs] == ["x"]
    assert source.graph.opset == atomized.graph.opset == 17


def test_zero_sized_and_scalar_inputs_run():
    made = model("a = Exp(x) y = Neg(a)", SIGNATURE)
    out = fused(made).proto()
    assert run(out, {"x": np.zeros((0, 8), np.float32)})[0].shape == (0, 8)
