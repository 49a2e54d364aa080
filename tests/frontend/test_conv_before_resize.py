"""A 1x1 convolution goes before the enlarging Resize that feeds it; the numbers are the same, anything else stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.trace import Trace

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
RESIZE = 'Resize<mode="{mode}", coordinate_transformation_mode="{place}", nearest_mode="floor">'


def model(body: str, signature: str, weights: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    m = onnx.parser.parse_model(f"{HEAD} g {signature} {{ {body} }}")
    rng = np.random.default_rng(1)
    for name, shape in weights.items():
        m.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, dtype=np.float32), name))
    for name, data in (("x2", [1.0, 1.0, 2.0, 2.0]), ("x4", [1.0, 1.0, 4.0, 4.0])):
        m.graph.initializer.append(onnx.numpy_helper.from_array(np.array(data, np.float32), name))
    return m


def optimized(m: onnx.ModelProto, tmp_path, *shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Op types after the simplifications alone, once the whole result has agreed with onnxruntime."""
    onnxfuse.optimize(m, verify=False).save(tmp_path / "o.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    reference = ort.InferenceSession(m.SerializeToString(), options)
    rng = np.random.default_rng(0)
    for shape in shapes:
        feeds = {n: rng.standard_normal(s, dtype=np.float32) for n, s in shape.items()}
        for session in (onnxfuse.InferenceSession(tmp_path / "o.onnx"), ort.InferenceSession(tmp_path / "o.onnx")):
            for a, b in zip(reference.run(None, feeds), session.run(None, feeds), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    trace = Trace()
    onnxfuse.optimize(m, verify=False, trace=trace)
    return [n.op.name for n in trace.result("prepare").graph.nodes]


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("place", ["half_pixel", "asymmetric", "align_corners"])
def test_a_pyramid_is_summed_after_it_is_enlarged(mode, place, tmp_path):
    resize = RESIZE.format(mode=mode, place=place)
    m = model(
        f"a = {resize}(p, , x4) b = {resize}(q, , x2) c = Concat<axis=1>(a, b, r, s) y = Conv(c, w, bias)",
        "(float[N,8,3,4] p, float[N,8,6,8] q, float[N,5,12,16] r, float[N,3,12,16] s) => (float[N,6,12,16] y)",
        {"w": (6, 24, 1, 1), "bias": (6,)},
    )
    sizes = [{"p": (n, 8, 3, 4), "q": (n, 8, 6, 8), "r": (n, 5, 12, 16), "s": (n, 3, 12, 16)} for n in (1, 3)]
    ops = optimized(m, tmp_path, *sizes)
    assert sorted(ops) == ["Add", "Add", "Concat", "Conv", "Conv", "Conv", "Resize", "Resize"]
    assert ops.index("Conv") < ops.index("Resize")


def test_a_size_that_names_channels_names_the_new_ones(tmp_path):
    m = model(
        'to = Constant<value_ints=[2,8,12,9]>() a = Resize<mode="linear">(p, , , to) y = Conv(a, w)',
        "(float[2,8,4,3] p) => (float[2,5,12,9] y)",
        {"w": (5, 8, 1, 1)},
    )
    assert optimized(m, tmp_path, {"p": (2, 8, 4, 3)}) == ["Conv", "Resize"]


def test_a_size_with_a_free_batch_becomes_whole_factors(tmp_path):
    m = model(
        """s = Shape<start=0, end=2>(p) hw = Constant<value_ints=[12,9]>() to = Concat<axis=0>(s, hw)
        a = Resize<mode="linear">(p, , , to) y = Conv(a, w)""",
        "(float[N,8,4,3] p) => (float[N,5,12,9] y)",
        {"w": (5, 8, 1, 1)},
    )
    assert optimized(m, tmp_path, {"p": (1, 8, 4, 3)}, {"p": (3, 8, 4, 3)}) == ["Conv", "Resize"]


@pytest.mark.parametrize(
    "body",
    [
        "a = Resize(p, , half) y = Conv(a, w)",  # makes it smaller
        'a = Resize<mode="cubic">(p, , x2) y = Conv(a, w)',  # not ours to judge
        "a = Resize(p, , x2) y = Conv<pads=[1,1,1,1]>(a, w)",  # a border of zeros
        "a = Resize(p, , x2) y = Conv<strides=[2,2]>(a, w)",
        "a = Resize(p, , x2) y = Conv(a, w3)",  # 3 x 3
        "a = Resize(p, , x2) y = Conv(a, many)",  # makes many more channels than it reads
        "a = Resize(p, , x2) b = Conv(a, w) c = ReduceMean(a) y = Add(b, c)",  # somebody else reads it
        "a = Resize(p, , all) y = Conv(a, wide)",  # channels are resized, too
    ],
)
def test_anything_else_stays(body, tmp_path):
    weights = {"w": (5, 8, 1, 1), "w3": (5, 8, 3, 3), "many": (40, 8, 1, 1), "wide": (5, 16, 1, 1)}
    m = model(body, "(float[1,8,6,4] p) => (float[A,B,C,D] y)", weights)
    for name, data in (("half", [1.0, 1.0, 0.5, 0.5]), ("all", [1.0, 2.0, 2.0, 2.0])):
        m.graph.initializer.append(onnx.numpy_helper.from_array(np.array(data, np.float32), name))
    ops = optimized(m, tmp_path, {"p": (1, 8, 6, 4)})
    assert ops.index("Resize") < ops.index("Conv")


def test_the_pass_can_be_left_out():
    m = model("a = Resize(p, , x2) y = Conv(a, w)", "(float[1,8,6,4] p) => (float[1,5,12,8] y)", {"w": (5, 8, 1, 1)})
    trace = Trace()
    onnxfuse.optimize(m, verify=False, trace=trace, skip_optimization={"conv_before_resize"})
    assert [n.op.name for n in trace.result("prepare").graph.nodes] == ["Resize", "Conv"]
