"""Light models get sane weights: by role, positive variances, no ConstantOfShape left, the same for the same seed."""

import light_weights
import numpy as np
import onnx
import pytest
from fetch_models import light_dir
from onnx import numpy_helper


@pytest.fixture(scope="module")
def shufflenet() -> onnx.ModelProto:
    return onnx.load(light_dir() / "light_shufflenet.onnx")


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def test_no_weight_is_left_to_constant_of_shape(shufflenet: onnx.ModelProto) -> None:
    full = light_weights.with_weights(shufflenet)
    assert all(n.op_type != "ConstantOfShape" for n in full.graph.node)
    onnx.checker.check_model(full, full_check=True)
    assert {i.name for i in full.graph.input} - set(weights(full)) == {"gpu_0/data_0"}


def test_the_seed_decides_the_weights(shufflenet: onnx.ModelProto) -> None:
    first, again, other = (light_weights.with_weights(shufflenet, seed) for seed in (0, 0, 1))
    assert first == again
    name = "gpu_0/conv3_0_w_0"
    assert not np.array_equal(weights(first)[name], weights(other)[name])


def test_weights_fit_their_role(shufflenet: onnx.ModelProto) -> None:
    model = light_weights.with_weights(shufflenet)
    arrays = weights(model)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            assert arrays[node.input[4]].min() > 0.5
            assert arrays[node.input[1]].min() > 0
        if node.op_type == "Conv":
            kernel = arrays[node.input[1]]
            if kernel.size > 1000:
                assert kernel.std() == pytest.approx(np.sqrt(2 / kernel[0].size), rel=0.2)
