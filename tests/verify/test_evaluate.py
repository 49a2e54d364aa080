"""verify/evaluate.py: answers for constant folding, and None instead of a crash."""

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from onnxfuse.ir.graph import Foreign, Node, Value
from onnxfuse.ir.op import Family, Op
from onnxfuse.verify.evaluate import evaluate

F32 = np.float32


def node(name, arity, outputs=1, attrs=None, source=None, domain="", captures=()):
    ins = tuple(Value(f"x{i}", None) for i in range(arity))
    outs = tuple(Value(f"y{i}", None) for i in range(outputs))
    op = Op(name, 1, Family.OPAQUE, domain=domain)
    return Node(op, ins, outs, attrs or {}, "n", (), captures=captures, source=source)


def test_attributes_of_every_kind_reach_onnxruntime():
    x = F32([[1, 2, 3]])
    assert evaluate(node("Transpose", 1, attrs={"perm": (1, 0)}), [x], 17)[0].shape == (3, 1)
    assert evaluate(node("LeakyRelu", 1, attrs={"alpha": 0.5}), [-x], 17)[0].tolist() == [[-0.5, -1, -1.5]]
    fill = node("ConstantOfShape", 1, attrs={"value": F32([7])})
    assert evaluate(fill, [np.int64([2])], 17)[0].tolist() == [7, 7]
    assert evaluate(node("DepthToSpace", 1, attrs={"blocksize": 1, "mode": "CRD"}), [F32([[[[1]]]])], 17)[0].shape == (
        1,
        1,
        1,
        1,
    )


def test_attributes_of_a_node_as_read_are_taken_verbatim():
    proto = helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0])
    assert evaluate(node("Transpose", 1, source=proto), [F32([[1, 2, 3]])], 17)[0].shape == (3, 1)


def test_the_meaning_is_that_of_the_models_opset():
    x = np.zeros((2, 3, 4), F32)
    assert evaluate(node("Softmax", 1), [x], 11)[0].flat[0] == pytest.approx(1 / 12)
    assert evaluate(node("Softmax", 1), [x], 13)[0].flat[0] == pytest.approx(1 / 4)


def test_absent_inputs_and_several_outputs():
    low = evaluate(node("Clip", 3), [F32([-1, 5]), None, np.array(2, F32)], 17)
    assert low[0].tolist() == [-1, 2]
    top = evaluate(node("TopK", 2, 2), [F32([1, 3, 2]), np.int64([2])], 17)
    assert [t.tolist() for t in top] == [[3, 2], [1, 2]]


def test_types_numpy_does_not_know():
    x = np.array([1.5], ml_dtypes.bfloat16)
    assert evaluate(node("Cast", 1, attrs={"to": 1}), [x], 17)[0].dtype == F32
    assert evaluate(node("Cast", 1, attrs={"to": 16}), [F32([1.5])], 17)[0].dtype == ml_dtypes.bfloat16
    assert evaluate(node("Identity", 1), [np.array(["a"], object)], 17)[0].tolist() == ["a"]


@pytest.mark.parametrize("name", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integer_division_that_would_trap_is_declined(name, dtype):
    low = np.iinfo(dtype).min
    assert evaluate(node(name, 2), [np.array([8, 7], dtype), np.array([2, 0], dtype)], 17) is None
    assert evaluate(node(name, 2), [np.array([low], dtype), np.array([-1], dtype)], 17) is None
    assert evaluate(node(name, 2), [np.array([8], dtype), np.array([2], dtype)], 17) is not None


def test_float_division_by_zero_is_computed():
    assert evaluate(node("Div", 2), [F32([1]), F32([0])], 17)[0].tolist() == [np.inf]


def test_what_onnxruntime_refuses_is_declined():
    x = F32([1])
    assert evaluate(node("NoSuchOp", 1), [x], 17) is None
    assert evaluate(node("Foo", 1, domain="my.domain"), [x], 17) is None
    assert evaluate(node("Gather", 2), [x, np.int64([5])], 17) is None
    assert evaluate(node("Relu", 1), [np.array(["a"], object)], 17) is None


def test_what_is_not_one_node_on_arrays_is_declined():
    x = F32([1])
    assert evaluate(node("If", 1, attrs={"then_branch": Foreign(None)}), [np.bool_(True)], 17) is None
    assert evaluate(node("Relu", 1, captures=(Value("c", None),)), [x], 17) is None
    assert evaluate(node("SequenceConstruct", 1), [x], 17) is None
