"""A Concat of channels that several 1x1 convolutions read is part of each of their kernels; others are made once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.trace import Trace

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def model(body: str, signature: str, weights: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A model with random weights; those of products keep the size of what goes through them."""
    m = onnx.parser.parse_model(f"{HEAD} g {signature} {{ {body} }}")
    rng = np.random.default_rng(1)
    for name, shape in weights.items():
        values = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(np.prod(shape[1:])))
        m.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return m


def groups(m: onnx.ModelProto, tmp_path, shapes: dict[str, tuple[int, ...]], **options) -> list[list[str]]:
    """Ops of every kernel in the end, once the result has agreed with onnxruntime; both with and without library."""
    trace = Trace()
    onnxfuse.optimize(m, verify=False, trace=trace, **options).save(tmp_path / "o.onnx")
    exact = ort.SessionOptions()
    exact.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    want = ort.InferenceSession(m.SerializeToString(), exact).run(None, feeds)
    for session in (onnxfuse.InferenceSession(tmp_path / "o.onnx"), ort.InferenceSession(tmp_path / "o.onnx")):
        for a, b in zip(want, session.run(None, feeds), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    return sorted([c.node.op.name for c in g.members] for g in trace.result("fuse").groups)


TWO = "(float[N,5,H,7] a, float[N,6,H,7] b) => (float[N,9,H,7] y, float[N,8,H,7] z)"
SHAPES = {"a": (2, 5, 6, 7), "b": (2, 6, 6, 7)}


def test_each_convolution_reads_the_parts(tmp_path) -> None:
    m = model("c = Concat<axis=1>(a, b) y = Conv(c, w) z = Conv(c, v)", TWO, {"w": (9, 11, 1, 1), "v": (8, 11, 1, 1)})
    assert groups(m, tmp_path, SHAPES) == [["Concat", "Conv"]] * 2


def test_with_a_few_steps_in_between(tmp_path) -> None:
    body = "c = Concat<axis=1>(a, b) n = BatchNormalization(c, s, t, t, q) r = Relu(n) y = Conv(r, w) z = Conv(c, v)"
    weights = {"w": (9, 11, 1, 1), "v": (8, 11, 1, 1), "s": (11,), "t": (11,)}
    m = model(body, TWO.replace("9,H", "18,H"), weights | {"w": (18, 11, 1, 1)})
    m.graph.initializer.append(onnx.numpy_helper.from_array(np.full(11, 0.5, np.float32), "q"))
    assert groups(m, tmp_path, SHAPES) == [["Concat", "Conv"], ["Concat", "Mul", "Add", "Relu", "Conv"]]


def dense(layers: int) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """Every layer reads what all layers before it made."""
    body, weights = "x0 = Relu(x)", {}
    for k in range(layers):
        body += f" y{k} = Conv(x{k}, w{k}) x{k + 1} = Concat<axis=1>(x{k}, y{k})"
        weights[f"w{k}"] = (8, 4 + 8 * k, 1, 1)
    weights["last"] = (8, 4 + 8 * layers, 1, 1)
    body += f" y = Conv(x{layers}, last)"
    return model(body, "(float[1,4,6,7] x) => (float[1,8,6,7] y)", weights), {"x": (1, 4, 6, 7)}


def test_a_chain_of_concats_is_read_through(tmp_path) -> None:
    m, shapes = dense(7)
    assert ["Concat"] not in groups(m, tmp_path, shapes)


def test_a_long_chain_is_made_once_in_between(tmp_path) -> None:
    m, shapes = dense(10)
    assert groups(m, tmp_path, shapes).count(["Concat"]) == 1


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("c = Concat<axis=1>(a, b) y = Conv(c, w) z = Softmax<axis=1>(c)", {"w": (9, 11, 1, 1)}),
        ("z = Concat<axis=1>(a, b) y = Conv(z, w)", {"w": (9, 11, 1, 1)}),
        (
            "c = Concat<axis=1>(a, b) y = Conv(c, w) z = Conv<pads=[1,1,1,1]>(c, v)",
            {"w": (9, 11, 1, 1), "v": (8, 11, 3, 3)},
        ),
        ("c = Concat<axis=1>(a, b) y = Conv(c, w) z = Conv(c, v)", {"w": (9, 11, 1, 1), "v": (7, 11, 1, 1)}),
        ("c = Concat<axis=1>(a, b) y = Conv(c, w) z = Conv<group=11>(c, v)", {"w": (9, 11, 1, 1), "v": (11, 1, 1, 1)}),
    ],
    ids=["read as a whole", "an output", "a window", "few features", "groups"],
)
def test_what_another_node_needs_whole_is_made_once(body: str, weights: dict[str, tuple[int, ...]], tmp_path) -> None:
    channels = weights["v"][0] if "v" in weights else 11
    m = model(body, TWO.replace("8,H", f"{channels},H"), weights)
    assert sum("Concat" in g for g in groups(m, tmp_path, SHAPES)) == 1


def test_without_growth_of_groups_and_by_request_it_stays(tmp_path) -> None:
    m = model("c = Concat<axis=1>(a, b) y = Conv(c, w) z = Conv(c, v)", TWO, {"w": (9, 11, 1, 1), "v": (8, 11, 1, 1)})
    for options in ({"fusion_mode": "none"}, {"fusion_mode": "tvm"}, {"skip_optimization": ["concat_by_reader"]}):
        assert groups(m, tmp_path, SHAPES, **options) == [["Concat"], ["Conv"], ["Conv"]]
