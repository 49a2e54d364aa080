"""frontend/atomize.py: composites become atomic nodes that are legal in the model's opset."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.read import read
from onnxfuse.frontend.shapes import infer_types
from onnxfuse.ir.op import Family
from onnxfuse.ops.table import parameters
from tests.frontend.onnx_text import model, ops


def atomized(body: str, signature: str = "(float[2,3,4] x) => (float[2,3,4] y)", opset: int = 17):
    source = read(model(body, signature, opset))
    return atomize(infer_types(source.graph, source.hints))


def test_softmax_by_the_opset_of_the_model():
    new = atomized("y = Softmax(x)", opset=13)
    old = atomized("y = Softmax(x)", opset=11)
    assert ops(new.graph) == ops(old.graph) == ["ReduceMax", "Sub", "Exp", "ReduceSum", "Div"]
    assert new.graph.nodes[0].attrs["axes"] == (2,)
    assert old.graph.nodes[0].attrs["axes"] == (1, 2)


def test_the_output_keeps_its_value_and_the_parts_their_origin():
    made = atomized("a = Relu(x)  y = LogSoftmax(a)")
    assert made.graph.nodes[-1].outputs == made.graph.outputs
    (composite,) = made.parts
    assert made.parts[composite] == made.graph.nodes[1:]
    assert {n.origin for n in made.parts[composite]} == {composite.origin}
    assert len({v.name for v in made.graph.values()}) == len(list(made.graph.values()))


@pytest.mark.parametrize("opset", [7, 9, 11, 12, 13, 17, 18, 21, 24])
@pytest.mark.parametrize(
    "body",
    ["y = Softmax(x)", "y = LogSoftmax(x)", "y = ReduceLogSumExp<keepdims=0>(x)", "y = LpNormalization(x)",
     "y = GlobalAveragePool(x)", "s = Constant<value = float[3] {1,2,3}>() y = InstanceNormalization(x, s, s)",
     "s = Constant<value = float[3] {1,2,3}>() y = BatchNormalization(x, s, s, s, s)",
     "s = Constant<value = float[4] {1,2,3,4}>() y = LayerNormalization(x, s)",
     "s = Constant<value = float[3] {1,2,3}>() y = GroupNormalization<num_groups=3>(x, s, s)"],
    ids=lambda b: b.rpartition("y = ")[2].partition("(")[0].partition("<")[0],
)  # fmt: skip
def test_atomic_nodes_are_legal_in_the_models_opset(body, opset):
    name = body.rpartition("y = ")[2].partition("(")[0].partition("<")[0]
    if not onnx.defs.has(name, opset) or onnx.defs.get_schema(name, opset).deprecated:
        pytest.skip("not in this opset")
    for node in atomized(body, opset=opset).graph.nodes:
        if node.op.family is Family.COMPOSITE:  # the formula declined the opset; lower says why
            continue
        schema = onnx.defs.get_schema(node.op.name, opset)
        assert set(node.attrs) <= set(schema.attributes), node
        assert schema.min_input <= len(node.inputs) <= schema.max_input, node
        assert len(node.inputs) <= len(parameters(node.op)[0]) or schema.max_input > 8


def test_layer_normalization_gives_its_further_outputs():
    body = "s = Constant<value = float[4] {1,2,3,4}>()  y, m, d = LayerNormalization(x, s)"
    made = atomized(body, "(float[2,3,4] x) => (float[2,3,4] y, float[2,3,1] m, float[2,3,1] d)")
    assert not made.refusals
    assert {v.name for n in made.graph.nodes for v in n.results} >= {"y", "m", "d"}


def test_a_declined_formula_leaves_the_node_whole_and_no_constants_behind():
    body = "s = Constant<value = float[3] {1,2,3}>()  y, a, b = BatchNormalization<training_mode=1>(x, s, s, s, s)"
    made = atomized(body, "(float[2,3,4] x) => (float[2,3,4] y, float[3] a, float[3] b)")
    assert ops(made.graph) == ["BatchNormalization"]
    assert len(made.graph.consts) == 1
    assert not made.parts


def test_a_graph_without_composites_is_itself():
    source = read(model("y = Relu(x)"))
    typed = infer_types(source.graph, source.hints)
    assert atomize(typed).graph is typed.graph


def test_nothing_is_made_for_an_absent_output():
    """Attention without its keys and values as outputs, but with its scores."""
    made = atomized("y, , , z = Attention(x, x, x)", "(float[2,3,4,8] x) => (float[2,3,4,8] y, float[2,3,4,4] z)", 23)
    read_ = {v for n in made.graph.nodes for v in n.reads} | set(made.graph.outputs)
    assert all(read_.intersection(n.results) for n in made.graph.nodes)
    assert ops(made.graph).count("Identity") == 1  # the scores
