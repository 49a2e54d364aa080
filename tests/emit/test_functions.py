"""emit/functions.py: bodies, node by node."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

from onnxfuse.emit.functions import node_proto, whole_nodes
from onnxfuse.emit.model import emit
from onnxfuse.errors import IRError
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.read import read
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import Node, Value
from onnxfuse.ir.types import tensor
from onnxfuse.ops.table import lookup
from tests.emit.pieces import assert_same, planned
from tests.frontend.onnx_text import initializer, model, prepared

X = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
SIGNATURE = "(float[N,8] x) => (float[N,8] y)"


def made_node(name: str, attrs: dict) -> Node:
    op = lookup("", name, 17)
    v = Value("x", tensor(DType.F32, [4]))
    return Node(op, (v, None), (Value("y", None), None), attrs, "n", ("n",))


def test_nodes_we_make_have_the_attribute_types_of_the_schema():
    proto = node_proto(made_node("Elu", {"alpha": 1}), 17)
    assert proto.attribute[0].type == onnx.AttributeProto.FLOAT
    assert (list(proto.input), list(proto.output)) == (["x"], ["y"])
    proto = node_proto(made_node("Transpose", {"perm": ()}), 17)
    assert proto.attribute[0].type == onnx.AttributeProto.INTS
    proto = node_proto(made_node("ConstantOfShape", {"value": np.array([2.5], np.float32)}), 17)
    assert proto.attribute[0].t.raw_data == np.float32(2.5).tobytes()


def test_a_renamed_node_keeps_the_users_attributes_and_documents():
    made = model("y = Elu<alpha = 0.25>(x)", SIGNATURE)
    made.graph.node[0].doc_string = "why"
    node = read(made).graph.nodes[0]
    proto = node_proto(replace(node, name="other", outputs=(Value("z", None),)), 17)
    assert (proto.name, list(proto.output), proto.doc_string, proto.attribute[0].f) == ("other", ["z"], "why", 0.25)


def atoms_of(text: str):
    atomized = atomize(prepared(read(model(text, SIGNATURE))).typed)
    (original, atoms), *_ = atomized.parts.items()
    return atomized, original, atoms


def test_a_composite_that_is_complete_is_written_as_it_was():
    atomized, original, atoms = atoms_of("y = Softmax(x)")
    assert len(atoms) > 1
    assert whole_nodes(atoms, atomized.parts, original.results) == (original,)


def test_a_composite_that_is_cut_stays_in_parts():
    atomized, _, atoms = atoms_of("y = Softmax(x)")
    assert whole_nodes(atoms[:-1], atomized.parts, ()) == atoms[:-1]


def test_a_composite_whose_inner_value_is_wanted_stays_in_parts():
    atomized, _, atoms = atoms_of("y = Softmax(x)")
    assert whole_nodes(atoms, atomized.parts, atoms[0].results) == atoms


def test_a_composite_whose_inner_value_has_another_reader_stays_in_parts():
    atomized, _, atoms = atoms_of("y = Softmax(x)")
    spy = replace(atoms[0], inputs=atoms[0].results[:1], outputs=(Value("spy", None),), name="spy")
    assert whole_nodes((*atoms, spy), atomized.parts, ()) == (*atoms, spy)


def test_a_value_the_kernel_wants_although_it_makes_it_is_computed_outside_too():
    """A kernel may ask for a value of its own group, for the shape; the model stays valid."""
    made = model("a = Exp(x) y = Neg(a)", SIGNATURE)
    source, atomized, plans = planned(made)
    (gid, call), *_ = plans.calls.items()
    inner = atomized.graph.nodes[0].results[0]
    wanting = replace(call, inputs=(*call.inputs, inner))
    out = emit(source, atomized, replace(plans, calls={gid: wanting})).model
    assert [n.op_type for n in out.graph.node if n.domain == ""] == ["Exp"]
    onnx.checker.check_model(out)
    assert_same(made, out, X)


def test_a_member_that_reads_what_the_kernel_does_not_get_is_our_bug():
    made = model("a = Add(x, z) y = Neg(a)", "(float[N,8] x, float[N,8] z) => (float[N,8] y)")
    source, atomized, plans = planned(made)
    (gid, call), *_ = plans.calls.items()
    with pytest.raises(IRError) as caught:
        emit(source, atomized, replace(plans, calls={gid: replace(call, inputs=call.inputs[:1])}))
    assert caught.value.code == "IR_BODY"


def test_defaults_are_written_out_where_the_runtime_would_lose_them():
    """onnxruntime fails on a MeanVarianceNormalization without axes inside a function."""
    made = model("y = MeanVarianceNormalization(x)", "(float[2,3,4,4] x) => (float[2,3,4,4] y)")
    source, atomized, plans = planned(made)
    out = emit(source, atomized, plans).model
    for function in out.functions:
        for n in function.node:
            if n.op_type == "MeanVarianceNormalization":
                assert [a.name for a in n.attribute] == ["axes"]
    assert_same(
        made, out, {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)}, exact=False
    )


def test_external_and_stored_constants_of_a_body_are_embedded(tmp_path):
    made = model("r = Reshape(x, s) y = Exp(r)", "(float[N,8] x) => (float[M,4] y)")
    made.graph.initializer.append(initializer("s", np.array([-1, 4])))
    path, moved = tmp_path / "m.onnx", onnx.ModelProto.FromString(made.SerializeToString())
    onnx.save(moved, path, save_as_external_data=True, location="m.data", size_threshold=0)
    source, atomized, plans = planned(path)
    out = emit(source, atomized, plans).proto()
    assert_same(made, out, X)


def test_a_composite_with_an_input_that_no_part_reads_stays_in_parts():
    """One step of an RNN from zeros does not need the weights of its state: the kernel does not read them."""
    signature = "(float[1,3,2] x, float[1,4,2] w, float[1,4,4] r) => (float[1,3,4] y)"
    atomized = atomize(prepared(read(model(", y = RNN<hidden_size=4>(x, w, r)", signature))).typed)
    ((original, atoms),) = atomized.parts.items()
    x, w, r = original.inputs[:3]
    assert whole_nodes(atoms, atomized.parts, original.results, {x, w, *atomized.graph.consts}) == atoms
    assert whole_nodes(atoms, atomized.parts, original.results, {x, w, r}) == (original,)
