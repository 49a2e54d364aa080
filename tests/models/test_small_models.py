"""The committed small models are what their script makes, and hold what models/README.md promises."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import onnx
import pytest

MODELS = Path(__file__).resolve().parents[2] / "models"
NAMES = ["conv_add_relu", "softmax", "tiny_ocr", "tiny_resnet", "tiny_transformer"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_small", MODELS / "make_small.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name: str) -> onnx.ModelProto:
    return onnx.load(MODELS / f"{name}.onnx")


def ops(name: str) -> Counter[str]:
    return Counter(node.op_type for node in load(name).graph.node)


def dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_the_list_of_models_is_complete(script: ModuleType) -> None:
    assert sorted(p.stem for p in MODELS.glob("*.onnx")) == NAMES
    assert sorted(make.__name__ for make in script.MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_committed_file_is_what_the_script_makes(script: ModuleType, name: str) -> None:
    made = getattr(script, name)().SerializeToString(deterministic=True)
    assert (MODELS / f"{name}.onnx").read_bytes() == made


@pytest.mark.parametrize("name", NAMES)
def test_files_stay_small_and_are_named_in_the_readme(name: str) -> None:
    assert (MODELS / f"{name}.onnx").stat().st_size < 300_000
    assert f"`{name}.onnx`" in (MODELS / "README.md").read_text()


def test_conv_add_relu_is_the_graph_of_the_trace_in_the_documentation() -> None:
    graph = load("conv_add_relu").graph
    assert [n.op_type for n in graph.node] == ["Conv", "Add", "Relu"]
    assert [list(n.output) for n in graph.node] == [["conv"], ["out"], ["relu"]]
    assert {t.name: list(t.dims) for t in graph.initializer} == {"weight": [16, 3, 3, 3], "bias": [1, 16, 1, 1]}
    assert dims(graph.input[0]) == [1, 3, 32, 32]
    assert [(a.name, list(a.ints)) for a in graph.node[0].attribute] == [("pads", [1, 1, 1, 1])]


def test_tiny_resnet_has_blocks_norms_pools_and_a_classifier() -> None:
    count = ops("tiny_resnet")
    assert count["Conv"] == count["BatchNormalization"] == 6
    assert count["Add"] == 2
    assert {"MaxPool", "GlobalAveragePool", "Gemm", "Softmax"} <= set(count)


def test_tiny_transformer_keeps_batch_and_sequence_open() -> None:
    graph = load("tiny_transformer").graph
    assert [dims(i) for i in graph.input] == [["batch", "sequence", 32], ["batch", "sequence"]]
    count = ops("tiny_transformer")
    assert count["LayerNormalization"] == 5
    assert count["Erf"] == count["Softmax"] == 2
    assert count["MatMul"] == 2 * (4 + 2 + 2)


def test_tiny_ocr_is_an_opset_11_detector_of_any_size() -> None:
    model = load("tiny_ocr")
    assert model.opset_import[0].version == 11
    assert dims(model.graph.input[0]) == ["batch", 3, "height", "width"]
    assert {"Resize", "ConvTranspose", "HardSigmoid", "Clip", "Div", "GlobalAveragePool", "Sigmoid"} <= set(
        ops("tiny_ocr")
    )
