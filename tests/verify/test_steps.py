"""A model whose products run in integers is judged node by node: one step is allowed, a fault is found."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import onnxfuse
from onnxfuse.config import VerifyConfig
from onnxfuse.verify import ort, steps
from onnxfuse.verify.compare import compare

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
RNG = np.random.default_rng(3)


def result(reference: list[int], candidate: list[int], most: float = 1.0, repeat: int = 1) -> steps.NodeResult:
    x, y = (np.asarray(v * repeat, np.int8) for v in (reference, candidate))
    return steps.NodeResult("conv", x, y, most)


def test_one_element_may_be_a_step_off():
    assert not result([1, 2, 3], [1, 3, 3]).problem()


def test_two_steps_are_a_fault():
    assert result([1, 2, 3], [1, 4, 3]).problem() == "node conv: off by 2, at most 1"
    assert not result([1, 2, 3], [1, 4, 3], most=2.0).problem()


def test_too_many_elements_a_step_off_are_a_fault():
    assert result([1, 2, 3], [2, 3, 3]).problem() == "node conv: 2 of 3 elements are a step off"
    assert not result([1] + 99 * [0], [2] + 99 * [0], repeat=8).problem()


def test_a_number_that_is_none_is_a_fault():
    x = np.zeros(4, np.float32)
    y = np.asarray([0, np.nan, 0, 0], np.float32)
    assert steps.NodeResult("conv", x, y, 1.0).problem()


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        ([10.0, -9.9, 10.1], ""),
        ([10.0, -10.0, 15.0], "off by 2.89, of 10 (root mean square)"),
        ([10.0, -10.0, np.inf], "infinities or NaN differ"),
    ],
)
def test_the_end_may_be_off_by_a_tenth_of_its_size(candidate, says):
    assert steps.end_problem(np.asarray([10, -10, 10], np.float32), np.asarray(candidate, np.float32)) == says


def test_integers_at_the_end_are_not_excused():
    assert steps.end_problem(np.asarray([3]), np.asarray([4]))


def deep(layers: int) -> onnx.ModelProto:
    """Convolution after convolution, each of whose steps is many steps of the next: what is off grows."""
    lines = ["q0 = QuantizeLinear(x, s, z)"]
    for k in range(layers):
        lines += [
            f"d{k} = DequantizeLinear(q{k}, s, z)",
            f"e{k} = DequantizeLinear(w{k}, t, z)",
            f"c{k} = Conv<pads = [1,1,1,1]>(d{k}, e{k})",
            f"q{k + 1} = QuantizeLinear(c{k}, s, z)",
        ]
    text = f"""g (float[1,32,24,24] x) => (float[1,32,24,24] y)
    <int8 z = {{0}}, float s = {{0.03}}, float t = {{0.001}}> {{
        {"  ".join(lines)}
        y = DequantizeLinear(q{layers}, s, z)
    }}"""
    made = onnx.parser.parse_model(HEAD + text)
    weights = [RNG.integers(-127, 128, (32, 32, 3, 3)).astype(np.int8) for _ in range(layers)]
    made.graph.initializer.extend(onnx.numpy_helper.from_array(w, f"w{k}") for k, w in enumerate(weights))
    return made


def test_a_deep_model_is_accepted_and_says_how(tmp_path):
    made = deep(6)
    written = onnxfuse.optimize(made, target_cpu="x86-64-v2", verify=False).save(tmp_path / "o.onnx")
    # A floor of nothing: the bits of the end alone would not do.
    strict = VerifyConfig(rtol=0.0, atol=0.0)
    assert compare(made, tmp_path / "o.onnx", config=strict).ok
    report = compare(made, tmp_path / "o.onnx", library=written.library, config=strict)
    assert report.ok
    if report.runs[0].nodes:  # no element happened to lie between two steps
        assert "a step off" in report.summary()


def test_a_kernel_of_other_weights_is_found(tmp_path):
    """The function says one thing and the kernel does another: the node is named."""
    made = deep(2)
    onnxfuse.optimize(made, target_cpu="x86-64-v2", verify=False).save(tmp_path / "o.onnx")
    wrong = onnx.load(tmp_path / "o.onnx")
    for f in wrong.functions:  # the body now takes steps twice as large as the kernel
        at, quantiser = next((k, n) for k, n in enumerate(f.node) if n.op_type == "QuantizeLinear")
        scale = quantiser.input[1]
        quantiser.input[1] = "twice"
        f.node.insert(at, onnx.helper.make_node("Add", [scale, scale], ["twice"]))
    nodes = steps.node_by_node(wrong, {"x": feed()}, tmp_path / "o.so")
    assert any(r.problem().startswith("node qlinearconv") for r in nodes)


def test_nodes_are_run_on_the_original_values(tmp_path):
    """The second node gets what the original's first one makes, not what ours makes."""
    made = deep(2)
    onnxfuse.optimize(made, target_cpu="x86-64-v2", verify=False).save(tmp_path / "o.onnx")
    saved = onnx.load(tmp_path / "o.onnx")
    inner = {r.node: r for r in steps.node_by_node(saved, {"x": feed()}, tmp_path / "o.so")}
    tapped = onnx.ModelProto()
    tapped.CopyFrom(made)
    tapped.graph.output.append(onnx.ValueInfoProto(name="q1"))
    expected = ort.run(ort.session(tapped), {"x": feed()})
    first = next(r for r in inner.values() if r.reference.dtype == np.int8)
    np.testing.assert_array_equal(first.reference, expected["q1"])


def feed() -> np.ndarray:
    return np.random.default_rng(5).standard_normal((1, 32, 24, 24)).astype(np.float32)
