"""onnxfuse behind onnx.backend.base: models, nodes, devices, and a sample of ONNX's own backend tests."""

import unittest
import warnings

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt, Runner

import onnxfuse.backend as backend
from onnxfuse.errors import UsageError

X = np.asarray([[-1, 2, 3]], np.float32)
# One or two cases of every kind of operator and of value, and a network; tools/backend_tests.py runs all.
SAMPLE = (
    "test_add_cpu", "test_add_bcast_cpu", "test_cast_FLOAT_to_FLOAT16_cpu", "test_gemm_all_attributes_cpu",
    "test_softmax_axis_1_cpu", "test_conv_with_strides_padding_cpu", "test_transpose_default_cpu",
    "test_reduce_mean_keepdims_random_cpu", "test_where_example_cpu", "test_sequence_insert_at_back_cpu",
    "test_optional_get_element_sequence_cpu", "test_string_concat_cpu", "test_if_cpu", "test_lstm_defaults_cpu",
    "test_layer_normalization_2d_axis0_expanded_cpu", "test_adam_cpu",
)  # fmt: skip


def relu() -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 3]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_prepared_model_runs_our_kernel_on_lists_and_names() -> None:
    rep = backend.prepare(relu(), "CPU", fusion_mode="none")
    assert rep.session.get_session_options() is not None
    for inputs in ([X], X, {"x": X}):
        (y,) = rep.run(inputs)
        np.testing.assert_array_equal(y, np.maximum(X, 0))


def test_run_model_and_run_node() -> None:
    (y,) = backend.run_model(relu(), [X])
    np.testing.assert_array_equal(y, np.maximum(X, 0))
    node = helper.make_node("Add", ["a", "b"], ["c"])
    (c,) = backend.run_node(node, [X, X[0, :1]], opset_version=14)
    np.testing.assert_array_equal(c, X + X[0, 0])
    split = helper.make_node("Split", ["a"], ["b", "c", "d"], axis=1, num_outputs=3)
    assert [v.tolist() for v in backend.run_node(split, [X], opset_version=18)] == [[[-1]], [[2]], [[3]]]


def test_only_the_cpu() -> None:
    assert backend.supports_device("CPU")
    assert not backend.supports_device("CUDA:0")
    with pytest.raises(UsageError, match="CUDA"):
        backend.prepare(relu(), "CUDA")


def test_what_onnxruntime_does_not_have_is_nobodys_failure() -> None:
    model = relu()
    model.graph.node[0].op_type = "Einsum"
    with pytest.raises(onnx.checker.ValidationError):
        backend.prepare(model)
    model = relu()
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    assert not backend.is_compatible(model)
    with pytest.raises(BackendIsNotSupposedToImplementIt):
        backend.prepare(model)


def test_a_sample_of_the_backend_tests_of_onnx() -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the cases overflow on purpose
        runner = Runner(backend.OnnxfuseBackend, __name__)
        for name in SAMPLE:
            runner.include(f"^{name}$")
        suite = unittest.TestSuite(t for t in runner.test_suite if t.id().rpartition(".")[2] in SAMPLE)
        result = unittest.TestResult()
        suite.run(result)
    assert result.testsRun == len(SAMPLE)
    assert not result.failures + result.errors
    assert [t.id().rpartition(".")[2] for t, _ in result.skipped] == []
