"""What a family demands: activations compiled, masks and shapes exempt; the profile must show our kernels."""

from pathlib import Path

import check_models
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def graph(nodes: list[onnx.NodeProto], inputs: dict[str, int], tensors: dict[str, np.ndarray]) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in inputs.items()]
    weights = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    outs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    return helper.make_model(helper.make_graph(nodes, "g", infos, outs, weights))


def ours(name: str, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
    return helper.make_node("Fused_1", inputs, outputs, name=name, domain="onnxfuse")


def left(model: onnx.ModelProto, family: str) -> list[str]:
    return [n.op_type for n in check_models.violations(model, family)]


def test_a_left_convolution_of_a_cnn_is_reported() -> None:
    nodes = [ours("f", ["x"], ["y"]), helper.make_node("Conv", ["y", "w"], ["z"])]
    model = graph(nodes, {"x": TensorProto.FLOAT}, {"w": np.ones((1, 1, 1, 1), np.float32)})
    assert left(model, "cnn") == ["Conv"]
    assert left(model, "transformer") == ["Conv"]
    assert left(model, "mixed") == []


def test_shape_arithmetic_on_an_activation_is_exempt() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Mul", ["s", "two"], ["t"]),
        ours("f", ["x", "t"], ["y"]),
    ]
    model = graph(nodes, {"x": TensorProto.FLOAT}, {"two": np.asarray([2], np.int64)})
    assert left(model, "cnn") == left(model, "transformer") == []


def test_a_transformer_may_keep_lookups_and_masks_only() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("Cast", ["mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("Where", ["mask", "m", "m"], ["bias"]),
        helper.make_node("Transpose", ["e"], ["t"]),
        ours("f", ["t", "bias"], ["y"]),
    ]
    model = graph(nodes, {"ids": TensorProto.INT64, "mask": TensorProto.INT64}, {"table": np.ones((8, 4), np.float32)})
    assert left(model, "transformer") == ["Transpose"]
    assert left(model, "cnn") == []


def test_a_node_whose_body_was_inlined_is_reported(tmp_path: Path) -> None:
    model = graph([ours("f", ["x"], ["y"]), ours("g", ["y"], ["z"])], {"x": TensorProto.FLOAT}, {})
    onnx.save(model, tmp_path / "m.onnx")
    ran = [("f", "Fused_1"), ("g_inlined", "Add")]
    (problem,) = check_models._not_ours(tmp_path / "m.onnx", ran)
    assert "1 of 2 nodes" in problem
    assert "g (Fused_1)" in problem
    assert check_models._not_ours(tmp_path / "m.onnx", [("f", "Fused_1"), ("g", "Fused_1")]) == []


def test_the_report_holds_results_and_what_was_left() -> None:
    good = check_models.Outcome("net", size=100_000_000, peak_rss=250_000_000, groups=3, left={"LSTM UN_OP": 2})
    bad = check_models.Outcome("other", failures=["run: exit -11"], notes=["old refuses the original: IR"])
    text = check_models.report([good, bad])
    assert "LSTM UN_OP x2" in text
    assert "1 failed" in text
    assert "2.5" in text
    assert "old refuses the original" in text


def test_every_small_model_has_cases() -> None:
    assert sorted(check_models.SMALL_CASES) == sorted(p.stem for p in check_models.small_models())
