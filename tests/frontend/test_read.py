"""frontend/read.py and what it stands on: every way a model comes in, and every way it is refused."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper

from onnxfuse.config import Config
from onnxfuse.errors import UsageError
from onnxfuse.frontend.read import read
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import sym
from onnxfuse.ir.graph import Foreign
from onnxfuse.ir.op import Family
from onnxfuse.pipeline import optimize
from onnxfuse.verify import ort
from tests.frontend.onnx_text import initializer, model, ops

F32 = TensorProto.FLOAT
ADD = "y = Add(x, w)"


def add_model(weight=None, ir: int = 8, listed: bool = False) -> onnx.ModelProto:
    signature = "(float[N,2] x, float[2] w) => (float[N,2] y)" if listed else "(float[N,2] x) => (float[N,2] y)"
    made = model(ADD, signature, ir=ir)
    made.graph.initializer.append(initializer("w", np.array([1, 2], np.float32) if weight is None else weight))
    return made


def external_model(directory: Path, location: str = "w.bin", size: int = 8, **entries) -> Path:
    made = add_model()
    t = made.graph.initializer[0]
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        t.external_data.add(key=key, value=str(value))
    (directory / "w.bin").write_bytes(np.array([1, 2], np.float32).tobytes()[:size])
    path = directory / "m.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def refusal(given, **options) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(given, **options)
    return caught.value


# --- ways in ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["path", "str", "bytes", "proto", "ir"])
def test_every_kind_of_model_reads_the_same_and_is_not_changed(kind, tmp_path):
    made = add_model()
    before = made.SerializeToString()
    path = tmp_path / "a model ü.onnx"
    path.write_bytes(before)
    given = {"path": path, "str": str(path), "bytes": before, "proto": made, "ir": onnx_ir.from_proto(made)}[kind]
    graph = read(given).graph
    assert ops(graph) == ["Add"]
    assert [str(v.type) for v in graph.inputs] == ["f32[N,2]"]
    assert [c.numpy().tolist() for c in graph.consts.values()] == [[1, 2]]
    assert made.SerializeToString() == before
    if kind == "ir":
        assert (
            onnx_ir.to_proto(given).SerializeToString()
            == onnx_ir.to_proto(onnx_ir.from_proto(made)).SerializeToString()
        )


def test_initializers_are_the_objects_that_came_in():
    given = onnx_ir.from_proto(add_model())
    assert read(given).tensors["w"] is given.graph.initializers["w"].const_value


def test_external_data_is_mapped_and_not_loaded(tmp_path):
    source = read(external_model(tmp_path))
    const = next(iter(source.graph.consts.values()))
    assert isinstance(source.tensors["w"], onnx_ir.ExternalTensor)
    assert const.nbytes == 8
    assert const.numpy().tolist() == [1, 2]


def test_a_sparse_file_of_three_gigabytes_is_read_without_its_data(tmp_path):
    count = 3 << 28  # f32
    weight = TensorProto(name="w", data_type=F32, dims=[count], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    made = model(ADD, f"(float[{count}] x) => (float[{count}] y)")
    made.graph.initializer.append(weight)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with (tmp_path / "w.bin").open("wb") as f:
        f.truncate(count * 4)
    source = read(tmp_path / "m.onnx")
    assert next(iter(source.graph.consts.values())).nbytes == 3 << 30


def test_a_cache_of_symlinks_is_fine(tmp_path):
    """The layout of a hub cache: model and data are links into one folder of blobs."""
    blobs, shown = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    shown.mkdir()
    path = external_model(blobs)
    (shown / "m.onnx").symlink_to(path)
    (shown / "w.bin").symlink_to(blobs / "w.bin")
    assert next(iter(read(shown / "m.onnx").graph.consts.values())).numpy().tolist() == [1, 2]


def test_a_bare_file_name_works(tmp_path, monkeypatch):
    external_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert ops(read("m.onnx").graph) == ["Add"]


def test_external_data_in_a_constant_moves_into_the_model(tmp_path):
    made = model("y = Relu(x)")
    value = TensorProto(data_type=F32, dims=[2], data_location=TensorProto.EXTERNAL)
    value.external_data.add(key="location", value="w.bin")
    made.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=value))
    (tmp_path / "w.bin").write_bytes(np.array([1, 2], np.float32).tobytes())
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    graph = read(tmp_path / "m.onnx").graph
    assert [c.numpy().tolist() for c in graph.consts.values()] == [[1, 2]]


# --- what a graph looks like -----------------------------------------------------------------------------------------
def test_initializers_among_the_inputs_can_be_overridden_from_ir_4_on():
    graph = read(add_model(ir=8, listed=True)).graph
    assert [v.name for v in graph.inputs] == ["x", "w"]
    assert [v.name for v in graph.defaults] == ["w"]
    assert not graph.consts


def test_before_ir_4_they_are_constants_as_onnxruntime_has_it():
    source = read(add_model(ir=3, listed=True))
    assert [v.name for v in source.graph.inputs] == ["x"]
    assert [v.name for v in source.graph.consts] == ["w"]
    assert [i.name for i in source.model.graph.input] == ["x"]


def test_constant_nodes_become_constants():
    body = """a = Constant<value = float[2] {1.0, 2.0}>() b = Constant<value_float: float = 3.5>()
    c = Constant<value_ints: ints = [4, 5]>() d = Constant<value_int: int = 6>()
    e = Constant<value_floats: floats = [7.0]>()
    s = Constant<value_string: string = "text">() y = Relu(x)"""
    graph = read(model(body)).graph
    found = {v.name: (v.type, c.numpy().tolist()) for v, c in graph.consts.items()}
    assert {k: str(t) for k, (t, _) in found.items()} == {
        "a": "f32[2]",
        "b": "f32[]",
        "c": "i64[2]",
        "d": "i64[]",
        "e": "f32[1]",
    }
    assert [found[k][1] for k in "abcde"] == [[1, 2], 3.5, [4, 5], 6, [7]]
    assert ops(graph) == ["Constant", "Relu"]


def test_unsorted_nodes_are_sorted():
    source = read(model("y = Exp(b) b = Neg(a) a = Relu(x)"))
    assert ops(source.graph) == ["Relu", "Neg", "Exp"]
    assert [n.op_type for n in source.model.graph.node] == ["Relu", "Neg", "Exp"]


def test_nodes_get_unique_names():
    graph = read(model("[n] a = Relu(x) [n] b = Neg(a) y = Exp(b)")).graph
    assert [n.name for n in graph.nodes] == ["n", "n.1", "Exp_2"]
    assert [n.origin for n in graph.nodes] == [("n",), ("n.1",), ("Exp_2",)]


def test_absent_inputs_are_none_and_trailing_ones_are_dropped():
    made = model('y = Clip(x, "", hi)', "(float[4] x, float hi) => (float[4] y)")
    made.graph.node.append(helper.make_node("Clip", ["x", "", ""], ["z"]))
    first, second = read(made).graph.nodes
    assert [None if v is None else v.name for v in first.inputs] == ["x", None, "hi"]
    assert [v.name for v in second.inputs] == ["x"]


def test_outputs_may_be_inputs_initializers_and_repeated():
    made = add_model()
    made.graph.output.append(helper.make_tensor_value_info("x", F32, ["N", 2]))
    made.graph.output.append(helper.make_tensor_value_info("w", F32, [2]))
    graph = read(made).graph
    assert [v.name for v in graph.outputs] == ["y", "x", "w"]
    assert graph.outputs[1] is graph.inputs[0]
    assert graph.outputs[2] in graph.consts


def test_a_graph_without_nodes():
    made = helper.make_model(
        helper.make_graph(
            [], "g", [helper.make_tensor_value_info("x", F32, [1])], [helper.make_tensor_value_info("x", F32, [1])]
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    graph = read(made).graph
    assert graph.outputs == graph.inputs


def test_dimensions_are_symbols_and_unnamed_ones_differ():
    made = model("y = Relu(x)", "(float[N, 3] x) => (float[N, 3] y)")
    made.graph.input.append(helper.make_tensor_value_info("a", F32, [None, "a_d0", None, 2]))
    made.graph.input.append(helper.make_tensor_value_info("b", F32, None))
    x, a, b = read(made).graph.inputs
    assert x.tensor.shape == (sym("N"), 3)
    assert [str(d) for d in a.tensor.shape] == ["a_d0.1", "a_d0", "a_d2", "2"]
    assert b.type is None


def test_captures_reach_through_nested_bodies():
    inner = helper.make_graph(
        [helper.make_node("Add", ["t", "x"], ["i"])], "inner", [], [helper.make_tensor_value_info("i", F32, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["t"], ["o"])], "other", [], [helper.make_tensor_value_info("o", F32, None)]
    )
    then = helper.make_graph(
        [helper.make_node("Relu", ["a"], ["t"]),
         helper.make_node("If", ["c"], ["r"], then_branch=inner, else_branch=other)],
        "then", [], [helper.make_tensor_value_info("r", F32, None)],
    )  # fmt: skip
    passing = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["p"])], "else", [], [helper.make_tensor_value_info("p", F32, None)]
    )
    made = model("a = Exp(x)", "(float[4] x, bool c) => (float[4] y)")
    made.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=passing))
    node = read(made).graph.nodes[-1]
    assert node.op.family is Family.OPAQUE
    assert sorted(v.name for v in node.captures) == ["a", "c", "x"]
    assert isinstance(node.attrs["then_branch"], Foreign)


def test_values_that_are_no_tensors_pass_through():
    made = model("s = SequenceConstruct(x, x) i = Constant<value_int: int = 0>() y = SequenceAt(s, i)")
    nodes = read(made).graph.nodes
    assert all(n.op.family is Family.OPAQUE for n in nodes)


def test_foreign_domains_pass_through_and_keep_their_word():
    made = model('a = foreign.Foo<k: ints = [], t: string = "s">(x) y = Relu(a)')
    node = read(made).graph.nodes[0]
    assert node.op.reason == "foreign domain foreign"
    assert node.attrs == {"k": (), "t": "s"}
    assert node.source.SerializeToString() == b"".join([made.graph.node[0].SerializeToString(), b"\x1a\x05Foo_0"]) or (
        node.source.attribute[0] == made.graph.node[0].attribute[0]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("y, m, v = BatchNormalization<training_mode: int = 1>(x, s, s, s, s)", "training mode"),
        ("y = Dropout(x, s, t)", "training"),
    ],
)
def test_training_is_opaque(text, reason):
    made = model(text, "(float[2,4] x, float[4] s, bool t) => (float[2,4] y)")
    op = read(made).graph.nodes[0].op
    assert op.family is Family.OPAQUE
    assert reason in op.reason or op.name == "Dropout"


@pytest.mark.parametrize(
    ("text", "opset"),
    [("y = Relu(x)", 1), ("y = Add(x, x)", 6), ("y = Softmax(x)", 6)],
)
def test_old_opsets_pass_through(text, opset):
    op = read(model(text, opset=opset, ir=4)).graph.nodes[0].op
    assert op.reason == f"opset {opset} is older than 7"


@pytest.mark.parametrize(
    ("text", "signature", "opset"),
    [
        ("y = Not(x)", "(bool[2,4] x) => (bool[2,4] y)", 1),
        ("y = Neg(x)", "(float[2,4] x) => (float[2,4] y)", 6),
        ("y = Transpose(x)", "(float[2,4] x) => (float[4,2] y)", 6),
        ("y = ReduceSum <axes = [0], keepdims = 1> (x)", "(float[2,4] x) => (float[1,4] y)", 6),
        ("y = Pad <pads = [0, 1, 0, 1]> (x)", "(float[2,4] x) => (float[2,6] y)", 6),
    ],
)
def test_what_has_not_changed_since_an_old_opset_is_compiled_there(tmp_path, text, signature, opset):
    made = model(text, signature, opset=opset)
    written = optimize(made, Config()).save(tmp_path / "out.onnx")
    x = np.array([[0, 1, 1, 0], [1, 0, 0, 0]], bool if opset == 1 else np.float32)
    want = ort.run(ort.session(made, threads=1), {"x": x})["y"]
    for libraries in ([], [written.library]):
        got = ort.run(ort.session(written.model, libraries=libraries), {"x": x})["y"]
        np.testing.assert_array_equal(got, want)


def test_an_opset_of_the_future_passes_through():
    graph = read(model("y = Brand_New(x)", opset=999)).graph
    assert graph.nodes[0].op.family is Family.OPAQUE


def test_what_onnxruntime_has_in_the_default_domain_passes():
    graph = read(model("y = LayerNormalization(x, x)", opset=11)).graph
    assert ops(graph) == ["LayerNormalization"]


def test_hints_tell_what_shape_inference_knows():
    made = model("v, i = TopK(x, k) y = foreign.Foo(i)", "(float[N, 8] x, int64[1] k) => (float[4] y)")
    hints = read(made).hints
    assert hints["i"].dtype is DType.I64
    assert hints["i"].rank == 2


def test_sparse_initializers_are_constants_that_stay_sparse():
    made = model("y = Add(x, w)")
    values = helper.make_tensor("w", F32, [2], [5.0, 7.0])
    made.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, helper.make_tensor("i", TensorProto.INT64, [2], [1, 3]), [4])
    )
    const = next(iter(read(made).graph.consts.values()))
    assert const.numpy().tolist() == [0, 5, 0, 7]


def test_four_bit_and_string_initializers_read():
    made = model("y = Relu(x)")
    made.graph.initializer.append(helper.make_tensor("q", TensorProto.INT4, [3], [1, -2, 3]))
    made.graph.initializer.append(helper.make_tensor("s", TensorProto.STRING, [2], [b"a", b"bc"]))
    found = {v.name: (str(v.type), c.nbytes) for v, c in read(made).graph.consts.items()}
    assert found == {"q": ("i4[3]", 2), "s": ("string[2]", 3)}


# --- local functions -------------------------------------------------------------------------------------------------
def test_local_functions_are_inlined_with_attributes_and_defaults():
    body = """<domain: "f", opset_import: ["": 17]> scale <alpha: float = 3.0> (a) => (b) {
      c = Constant<value_float: float = @alpha>() b = Mul(a, c) }"""
    source = read(model("[one] t = f.scale<alpha: float = 2.0>(x) [two] y = f.scale(t)", more=body))
    assert ops(source.graph) == ["Mul", "Mul"]
    assert sorted(float(c.numpy()) for c in source.graph.consts.values()) == [2.0, 3.0]
    assert [n.name for n in source.graph.nodes] == ["one/Mul", "two/Mul"]
    assert not source.model.functions
    assert "f" not in {i.domain for i in source.model.opset_import}


def test_nested_functions_and_handed_through_inputs():
    more = """<domain: "f", opset_import: ["": 17, "f": 1]> outer (a) => (a, b) { b = f.inner(a) }
    <domain: "f", opset_import: ["": 17]> inner (a) => (c) { t = Relu(a) c = Neg(t) }"""
    source = read(model("y, z = f.outer(x)", "(float[4] x) => (float[4] y, float[4] z)", more=more))
    assert sorted(ops(source.graph)) == ["Identity", "Neg", "Relu"]
    onnx.checker.check_model(source.model)


def test_functions_with_bodies_in_them_get_fresh_names():
    more = """<domain: "f", opset_import: ["": 17]> pick (c, a) => (b) {
      b = If(c) <then_branch = g1 () => (float[4] t) { t = Relu(a) },
      else_branch = g2 () => (float[4] e) { e = Neg(a) }> }"""
    source = read(model("t = f.pick(c, x) y = f.pick(c, t)", "(float[4] x, bool c) => (float[4] y)", more=more))
    first, second = source.graph.nodes
    assert {v.name for v in second.captures} == {first.outputs[0].name}
    onnx.checker.check_model(source.model)


def test_calls_inside_bodies_are_inlined_too():
    more = '<domain: "f", opset_import: ["": 17]> neg (a) => (b) { b = Neg(a) }'
    body = """y = If(c) <then_branch = g1 () => (float[4] t) { t = f.neg(x) },
                         else_branch = g2 () => (float[4] e) { e = Relu(x) }>"""
    source = read(model(body, "(float[4] x, bool c) => (float[4] y)", more=more))
    branch = source.model.graph.node[0].attribute[0].g
    assert [n.op_type for n in branch.node] == ["Neg"]


def test_a_function_of_another_opset_stays_a_call():
    more = '<domain: "f", opset_import: ["": 11]> soft (a) => (b) { b = Softmax(a) }'
    source = read(model("y = f.soft(x)", more=more))
    assert source.graph.nodes[0].op.reason == "a local function of another opset"
    assert len(source.model.functions) == 1


def test_functions_that_call_each_other_in_a_circle_are_refused():
    more = """<domain: "f", opset_import: ["": 17, "f": 1]> a (x) => (y) { y = f.b(x) }
    <domain: "f", opset_import: ["": 17, "f": 1]> b (x) => (y) { y = f.a(x) }"""
    error = refusal(model("y = f.a(x)", more=more))
    assert error.code == "E_CYCLE"
    assert "f::a, f::b" in str(error)


def test_a_function_that_calls_itself_in_a_branch_is_refused():
    more = """<domain: "f", opset_import: ["": 17, "f": 1]> outer (x, c) => (y) { y = f.a(x, c) }
    <domain: "f", opset_import: ["": 17, "f": 1]> a (x, c) => (y) {
        y = If (c) <then_branch = g1 () => (t) { t = f.a(x, c) }, else_branch = g2 () => (e) { e = Relu(x) }> }"""
    error = refusal(model("y = f.outer(x, c)", "(float[4] x, bool c) => (float[4] y)", more=more))
    assert error.code == "E_CYCLE"
    assert "among f::a\n" in str(error)


def test_functions_nested_deeper_than_a_file_can_be_stay_calls():
    heads = [f'<domain: "f", opset_import: ["": 17, "f": 1]> f{k} (x, c) => (y)' for k in range(41)]
    bodies = [
        f"{{ y = If (c) <then_branch = g1 () => (t) {{ t = f.f{k + 1}(x, c) }}, "
        "else_branch = g2 () => (e) { e = Relu(x) }> }"
        for k in range(40)
    ]
    more = "\n".join(map(" ".join, zip(heads, [*bodies, "{ y = Exp(x) }"], strict=True)))
    source = read(model("y = f.f0(x, c)", "(float[4] x, bool c) => (float[4] y)", more=more))
    assert source.graph.nodes[0].op.name == "f0"
    onnx.ModelProto.FromString(source.model.SerializeToString())


# --- sizes given by the user -----------------------------------------------------------------------------------------
def shaped(**options):
    signature = "(float[N,C,8] x, float[N] z) => (float[N,C,8] y)"
    return read(model("y = Relu(x)", signature), **options)


def test_overwriting_a_named_dimension_sets_it_everywhere():
    source = shaped(overwrite_input_shape={"x": (2, "C", 8)})
    assert [str(v.type) for v in source.graph.inputs] == ["f32[2,C,8]", "f32[2]"]
    assert [d.dim_value for d in source.model.graph.output[0].type.tensor_type.shape.dim] == [2, 0, 8]


def test_a_dim_param_sets_its_dimension():
    assert [str(v.type) for v in shaped(dim_params={"C": 4}).graph.inputs] == ["f32[N,4,8]", "f32[N]"]


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        ({"overwrite_input_shape": {"q": (1,)}}, "E_INPUT_NAME", "inputs: x, z"),
        ({"overwrite_input_shape": {"x": (1, 2)}}, "E_INPUT_SHAPE", "it has 3 dimensions, 2 were given"),
        ({"overwrite_input_shape": {"x": (0, 2, 8)}}, "E_INPUT_SHAPE", "--overwrite-input-shape x:0,2,8"),
        ({"overwrite_input_shape": {"x": (1, -2, 8)}}, "E_INPUT_SHAPE", "got -2"),
        ({"overwrite_input_shape": {"x": (1, 2, 9)}}, "E_INPUT_SHAPE", "it is 8, 9 was given"),
        ({"overwrite_input_shape": {"x": (1, 2, 8), "z": (3,)}}, "E_INPUT_SHAPE", "1 and 3"),
        ({"dim_params": {"M": 1}}, "E_DIM_PARAM", "symbolic dimensions of the inputs: C, N"),
        ({"dim_params": {"N": 0}}, "E_DIM_PARAM", "at least 1"),
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(options, code, part):
    with pytest.raises(UsageError) as caught:
        shaped(**options)
    assert caught.value.code == code
    assert part in str(caught.value)


# --- refusals --------------------------------------------------------------------------------------------------------
def test_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(refusal("no.onnx")) == f"error[E_NO_FILE] no.onnx does not exist\n  why:  current directory: {tmp_path}"


def test_a_directory(tmp_path):
    assert refusal(tmp_path).code == "E_IS_DIRECTORY"


def test_an_empty_file(tmp_path):
    (tmp_path / "m.onnx").touch()
    assert refusal(tmp_path / "m.onnx").code == "E_EMPTY"


def test_a_pipe_is_no_model(tmp_path):
    os.mkfifo(tmp_path / "m.onnx")
    assert refusal(tmp_path / "m.onnx").code == "E_NO_FILE"


def test_a_truncated_file():
    whole = add_model().SerializeToString()
    error = refusal(whole[: len(whole) - 5])
    assert error.code == "E_PARSE"
    assert f"{len(whole) - 5} bytes" in error.why


def test_every_truncation_is_an_error_and_never_a_traceback():
    whole = add_model().SerializeToString()
    shortest_valid = len(whole) - 2 * len(onnx.OperatorSetIdProto(domain="foreign", version=1).SerializeToString())
    for size in range(shortest_valid - 20):
        refusal(whole[:size])


@pytest.mark.parametrize(
    "data", [b"hello world, this is text", b"\x89PNG\r\n\x1a\n" + bytes(64), b"PK\x03\x04" + bytes(30)]
)
def test_other_files_are_no_models(data):
    assert refusal(data).code in ("E_PARSE", "E_NOT_MODEL")


def test_another_protobuf_message_is_no_model():
    assert refusal(initializer("w", np.ones(3, np.float32)).SerializeToString()).code in ("E_NOT_MODEL", "E_PARSE")


def test_an_op_that_does_not_exist():
    error = refusal(model("[n7] y = Reluu(x)"))
    assert error.code == "E_UNKNOWN_OP"
    assert "Reluu (node 'n7')" in error.what
    assert error.why == "the model imports opset 17"


def test_an_op_that_is_newer_than_the_opset_says_when_it_came():
    assert "new in opset 20" in refusal(model("y = Gelu(x)")).what


def test_all_unknown_ops_are_listed():
    what = refusal(model("a = Foo(x) y = Bar(a)")).what
    assert "Foo" in what
    assert "Bar" in what


def test_an_unknown_op_inside_a_body():
    body = """y = If(c) <then_branch = g1 () => (float[4] t) { t = Foo(x) },
      else_branch = g2 () => (float[4] e) { e = Relu(x) }>"""
    assert refusal(model(body, "(float[4] x, bool c) => (float[4] y)")).code == "E_UNKNOWN_OP"


def test_a_domain_that_is_not_imported():
    made = model("y = Relu(x)")
    made.graph.node[0].domain = "elsewhere"
    error = refusal(made)
    assert error.code == "E_OPSET_IMPORT"
    assert "'elsewhere'" in error.what


def test_no_default_domain():
    made = model("y = Relu(x)")
    del made.opset_import[:]
    assert refusal(made).code == "E_OPSET_IMPORT"


def test_two_versions_of_one_domain():
    made = model("y = Relu(x)")
    made.opset_import.add(domain="ai.onnx", version=11)
    assert refusal(made).why == "versions 17 and 11"


def test_a_cycle_is_shown():
    error = refusal(model("[p] a = Add(x, c) [q] b = Neg(a) [r] c = Exp(b) [s] y = Relu(c)"))
    assert error.code == "E_CYCLE"
    assert error.why == "3 nodes: r -> p -> q -> r" or sorted(error.why[9:].split(" -> ")[:3]) == ["p", "q", "r"]


def test_an_undefined_value():
    error = refusal(model("[n] y = Add(x, ghost)"))
    assert (
        str(error)
        == "error[E_UNDEFINED_VALUE] node 'n' (Add) reads 'ghost', which nothing defines\n  why:  input 1 of 2\n"
        "  hint: a node, an initializer or a graph input of this name is missing"
    )


def test_an_undefined_value_inside_a_body():
    body = """y = If(c) <then_branch = g1 () => (float[4] t) { t = Relu(ghost) },
      else_branch = g2 () => (float[4] e) { e = Relu(x) }>"""
    assert "ghost" in refusal(model(body, "(float[4] x, bool c) => (float[4] y)")).what


def test_an_output_nobody_makes():
    assert refusal(model("z = Relu(x)")).what == "graph output 'y' is not made by any node"


def test_a_value_defined_twice():
    error = refusal(model("y = Relu(x) [again] y = Neg(x)"))
    assert error.code == "E_DUPLICATE_VALUE"
    assert error.why == "by node 'Relu_0' (Relu) and by node 'again' (Neg)"


def test_a_node_that_makes_an_initializer():
    made = add_model()
    made.graph.node.append(helper.make_node("Neg", ["x"], ["w"]))
    assert refusal(made).code == "E_DUPLICATE_VALUE"


def test_two_initializers_of_one_name():
    made = add_model()
    made.graph.initializer.append(made.graph.initializer[0])
    assert refusal(made).code == "E_DUPLICATE_VALUE"


def test_a_wrong_number_of_inputs_is_the_checkers_word():
    error = refusal(model("y = Relu(x, x)"))
    assert error.code == "E_INVALID_MODEL"
    assert "input size 2 not in range" in error.why


def test_a_tensor_with_too_little_data():
    made = add_model()
    made.graph.initializer[0].raw_data = b"\0" * 7
    error = refusal(made)
    assert error.code == "E_TENSOR"
    assert error.why == "dims [2] FLOAT need 8 bytes, found 7"


def test_a_tensor_without_a_type():
    made = add_model()
    made.graph.initializer[0].data_type = 0
    assert refusal(made).code == "E_TENSOR"


def test_missing_external_data(tmp_path):
    path = external_model(tmp_path)
    (tmp_path / "w.bin").unlink()
    error = refusal(path)
    assert error.code == "E_EXTERNAL_MISSING"
    assert str(tmp_path / "w.bin") in error.why


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", ""])
def test_external_data_must_not_leave_the_directory(tmp_path, location):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(8))
    assert refusal(external_model(inner, location)).code == "E_EXTERNAL_PATH"


def test_a_link_out_of_the_directory_is_refused(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(8))
    (inner / "link.bin").symlink_to(tmp_path / "secret.bin")
    assert refusal(external_model(inner, "link.bin")).code == "E_EXTERNAL_PATH"


@pytest.mark.parametrize("entries", [{"offset": 4}, {"length": 12}, {"offset": -1}, {"offset": "x"}])
def test_external_data_must_fit_its_file(tmp_path, entries):
    assert refusal(external_model(tmp_path, **entries)).code == "E_EXTERNAL_SIZE"


def test_truncated_external_data(tmp_path):
    error = refusal(external_model(tmp_path, size=5))
    assert "offset 0 + 8 bytes of 5" in error.why


def test_bytes_with_external_data_have_no_place_to_look(tmp_path):
    data = external_model(tmp_path).read_bytes()
    assert refusal(data).code == "E_EXTERNAL_MISSING"


def test_damaged_files_are_errors_and_never_tracebacks():
    """Bytes changed, lost and added at random places: a model is read, or refused with a code."""
    rng = np.random.default_rng(7)
    more = '<domain: "f", opset_import: ["": 17]> twice (a) => (b) { t = Exp(a) b = Neg(t) }'
    whole = model(
        "[n] t = f.twice(x) w = Constant<value = float[1] {1.0}>() y = Add(t, w)", more=more
    ).SerializeToString()
    codes = set()
    for _ in range(400):
        data = bytearray(whole)
        at = int(rng.integers(len(data)))
        match int(rng.integers(3)):
            case 0:
                data[at] = int(rng.integers(256))
            case 1:
                del data[at : at + int(rng.integers(1, 5))]
            case _:
                data[at:at] = bytes([int(rng.integers(256))])
        try:
            read(bytes(data))
        except UsageError as error:
            codes.add(error.code)
    assert {"E_PARSE", "E_UNDEFINED_VALUE"} <= codes


def test_text_that_is_not_utf8():
    data = model("name_a = Relu(x) y = Neg(name_a)").SerializeToString().replace(b"name_a", b"name_\xff")
    assert refusal(data).what == "the model has text that is not UTF-8: NodeProto.input" or (
        "NodeProto.output" in refusal(data).what
    )


def test_windows_and_products_of_an_old_opset_are_compiled(tmp_path):
    conv = "c = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (x, w)"
    text = f"{conv} r = Relu(c) y = MaxPool <kernel_shape = [2, 2]> (r)"
    made = model(text, "(float[1,2,6,5] x, float[3,2,3,3] w) => (float[1,3,5,4] y)", opset=6)
    written = optimize(made, Config()).save(tmp_path / "out.onnx")
    assert written.library is not None
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (1, 2, 6, 5)), ("w", (3, 2, 3, 3)))}
    want = ort.run(ort.session(made, threads=1), feeds)["y"]
    for libraries in ([], [written.library]):
        got = ort.run(ort.session(written.model, libraries=libraries), feeds)["y"]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
