# ruff: noqa: E501 - a model is read as a line
"""verify/parts.py: a model that runs in parts gives what it gives as a whole, and says where it fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxfuse
from onnxfuse.config import Config, VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort
from onnxfuse.verify.bundle import MismatchError, verify_pair
from onnxfuse.verify.compare import compare, compare_many
from onnxfuse.verify.inputs import Sample
from onnxfuse.verify.parts import Cut
from onnxfuse.verify.running import How, Model, opened

N = 128  # N * N f32 are a large weight
IN_PARTS = VerifyConfig(whole=0, part=1)  # every large weight has a part of its own
AS_A_WHOLE = VerifyConfig()
X = np.random.default_rng(1).standard_normal((2, N)).astype(np.float32)


def model(
    body: str,
    signature: str = f"(float[b,{N}] x) => (float[b,{N}] y)",
    weights: int = 3,
    dtype: object = np.float32,
    ir: int = 8,
    functions: str = "",
) -> onnx.ModelProto:
    text = f'<ir_version: {ir}, opset_import: ["": 18, "f": 1]> g {signature} {{ {body} }} {functions}'
    proto = parser.parse_model(text)
    rng = np.random.default_rng(0)
    for k in range(weights):
        array = (rng.standard_normal((N, N)) / N**0.5).astype(dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, f"w{k}"))
    return proto


def saved(proto: onnx.ModelProto, tmp_path: Path, external: bool = False) -> Path:
    path = tmp_path / "m.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)  # onnx.save moves the data out of the message it is given
    onnx.save(copy, path, save_as_external_data=external, location="m.data", size_threshold=0)
    return path


def in_parts(path: Path, how: How | None = None, config: VerifyConfig = IN_PARTS) -> Cut:
    made = opened(path, how or How(), config)
    assert isinstance(made, Cut)
    return made


def whole(path: Path) -> Model:
    made = opened(path, How(), AS_A_WHOLE)
    assert made.parts == 1
    return made


def steps_of(path: Path, feeds: ort.Feeds) -> list[str]:
    """What is done, for this many parts in the end."""
    said: list[str] = []
    in_parts(path, How(step=said.append)).run(feeds)
    return said


def agrees(proto: onnx.ModelProto, tmp_path: Path, feeds: ort.Feeds, parts: int, external: bool = False) -> None:
    path = saved(proto, tmp_path, external)
    one, many = whole(path), in_parts(path)
    assert many.interface == one.interface
    assert many.parts == parts
    expected, found = one.run(feeds), many.run(feeds)
    assert list(found) == list(expected)
    for name, value in expected.items():
        same(found[name], value)


def same(a: ort.Result, b: ort.Result) -> None:
    if isinstance(b, list):
        assert isinstance(a, list)
        for x, y in zip(a, b, strict=True):
            same(x, y)
        return
    assert np.asarray(a).dtype == np.asarray(b).dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


CHAIN = "a = MatMul(x, w0) b = Tanh(a) c = MatMul(b, w1) d = MatMul(c, w2) y = Add(d, b)"
# name -> (model, further feeds, parts)
CASES: dict[str, tuple[onnx.ModelProto, dict[str, object], int]] = {
    "a value that a later part reads": (model(CHAIN), {}, 3),
    "one weight for two parts": (model("a = MatMul(x, w0) b = MatMul(a, w1) c = MatMul(b, w0) y = MatMul(c, w2)"), {}, 4),
    "weights that are computed": (
        model("t = Transpose(w1) n = Neg(t) a = MatMul(x, w0) b = MatMul(a, n) c = MatMul(b, w2) y = MatMul(c, n)"), {}, 4,
    ),
    "an output that is a weight, one that is an input, one computed from a weight": (
        model(
            "n = Neg(w1) a = MatMul(x, w0) i = Identity(x) b = MatMul(i, w2) y = Add(a, b)",
            f"(float[b,{N}] x) => (float[b,{N}] y, float[{N},{N}] w1, float[b,{N}] x, float[{N},{N}] n)",
        ), {}, 2,
    ),
    "an output in the middle": (
        model(CHAIN, f"(float[b,{N}] x) => (float[b,{N}] b, float[b,{N}] y, float[b,{N}] a)"), {}, 3,
    ),
    "inputs that nobody reads": (model(CHAIN, f"(float[7] u, float[b,{N}] x, int64 v) => (float[b,{N}] y)"), {"u": np.ones(7, np.float32), "v": np.array(3)}, 3),
    "what nobody reads": (model(CHAIN + " z = MatMul(x, w1) s = SequenceConstruct(z, z)"), {}, 4),
    "a branch that captures values and weights": (
        model(
            "a = MatMul(x, w0) b = MatMul(a, w1) y = If(c) <then_branch = t () => (float[b,128] r) { p = MatMul(b, w2) r = Add(p, a) }, else_branch = e () => (float[b,128] s) { s = Sub(b, x) }>",
            f"(float[b,{N}] x, bool c) => (float[b,{N}] y)",
        ), {"c": np.array(True)}, 3,
    ),
    "a loop that captures values and weights": (
        model(
            "a = MatMul(x, w0) b = MatMul(a, w1) y, o = Loop(n, , b) <body = l (int64 k, bool g, float[b,128] h) => (bool g2, float[b,128] h2, float[b,128] q) { g2 = Identity(g) m = MatMul(h, w2) t = Add(m, a) h2 = Tanh(t) q = Neg(x) }>",
            f"(float[b,{N}] x, int64 n) => (float[b,{N}] y, float[k,b,{N}] o)",
        ), {"n": np.array(3)}, 3,
    ),
    "a function": (
        model(CHAIN.replace("Tanh(a)", "f.act(a)"), functions='<domain: "f", opset_import: ["": 18]> act (v) => (r) { s = Sigmoid(v) r = Mul(s, v) }'), {}, 3,
    ),
    "integers and truth values across a cut": (
        model("a = MatMul(x, w0) g = Greater(a, x) i = ArgMax(a) b = MatMul(a, w1) c = Where(g, b, x) j = Cast<to = 1>(i) d = Mul(c, j) y = MatMul(d, w2)"), {}, 3,
    ),
    "a shape across a cut": (
        model("a = MatMul(x, w0) s = Shape(a) b = MatMul(a, w1) c = MatMul(b, w2) y = Reshape(c, s)"), {}, 3,
    ),
    "a sequence of outputs": (
        model("a = MatMul(x, w0) b = MatMul(a, w1) y = MatMul(b, w2) s = SequenceConstruct(y, y)", f"(float[b,{N}] x) => (float[b,{N}] y, seq(float[b,{N}]) s)"), {}, 3,
    ),
    "half precision": (
        model(CHAIN, f"(float16[b,{N}] x) => (float16[b,{N}] y)", dtype=np.float16, weights=3), {"x": X.astype(np.float16)}, 1,
    ),
    "old models, whose weights are inputs": (
        model(CHAIN, f"(float[b,{N}] x, float[{N},{N}] w0, float[{N},{N}] w1, float[{N},{N}] w2) => (float[b,{N}] y)", ir=3), {}, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("external", [False, True], ids=["inside", "beside"])
@pytest.mark.parametrize("name", CASES)
def test_parts_give_what_the_whole_gives(name, external, tmp_path):
    proto, more, parts = CASES[name]
    agrees(proto, tmp_path, {"x": X, **more}, parts, external)


def test_bfloat16_crosses_a_cut(tmp_path):
    text = (
        "a = MatMul(x, w0) h = Cast<to = 16>(a) b = MatMul(a, w1) g = Cast<to = 1>(h) c = Add(b, g) y = MatMul(c, w2)"
    )
    proto = model(text)
    if not ort.takes(np.dtype(ml_dtypes.bfloat16)):
        path = saved(proto, tmp_path)
        assert not any("part 2" in s and "running" in s for s in steps_of(path, {"x": X}))
        return
    agrees(proto, tmp_path, {"x": X}, 3)


@pytest.mark.parametrize(
    "text",
    [
        "a = MatMul(x, w0) s = SequenceConstruct(a, x) b = MatMul(a, w1) i = Constant<value_int = 1>() c = SequenceAt(s, i) d = Add(b, c) y = MatMul(d, w2)",
        "a = MatMul(x, w0) o = Optional(a) b = MatMul(a, w1) c = OptionalGetElement(o) d = Add(b, c) y = MatMul(d, w2)",
    ],
    ids=["sequence", "optional"],
)
def test_a_part_goes_on_where_no_array_could_be_handed_on(text, tmp_path):
    proto = model(text)
    agrees(proto, tmp_path, {"x": X}, 3)
    ran = [s for s in steps_of(tmp_path / "m.onnx", {"x": X}) if s.startswith("running")]
    assert ran == [f"running part {k} of 3 of the model on the inputs (x:2,{N})" for k in (2, 3)]


def test_weights_that_a_caller_may_override(tmp_path):
    signature = f"(float[b,{N}] x, float[{N},{N}] w1) => (float[b,{N}] y)"
    proto = model("n = Neg(w1) a = MatMul(x, w0) b = MatMul(a, w1) c = MatMul(b, w2) y = MatMul(c, n)", signature)
    agrees(proto, tmp_path, {"x": X}, 4)
    agrees(proto, tmp_path, {"x": X, "w1": np.eye(N, dtype=np.float32)}, 4)


def test_values_inside_can_be_had(tmp_path):
    path = saved(model(CHAIN), tmp_path)
    found = in_parts(path).tapped(["d", "a", "w1", "x"]).run({"x": X})
    assert list(found) == ["d", "a", "w1", "x"]
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_allclose(
        found["d"],
        np.tanh(found["a"]) @ found["w1"] @ numpy_helper.to_array(model(CHAIN).graph.initializer[2]),
        rtol=1e-3,
        atol=1e-4,
    )


def test_different_ranks_of_one_value(tmp_path):
    proto = model(CHAIN, "(float x) => (float y)")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    path = saved(proto, tmp_path)
    given = [Sample("two", {"x": X}), Sample("three", {"x": X[None]})]
    two, three = in_parts(path).run_each(given)
    np.testing.assert_array_equal(two["y"], whole(path).run({"x": X})["y"])
    np.testing.assert_array_equal(three["y"], whole(path).run({"x": X[None]})["y"])


def test_small_models_run_as_a_whole(tmp_path):
    path = saved(model(CHAIN), tmp_path)
    weights = 3 * N * N * 4
    assert in_parts(path, config=VerifyConfig(whole=weights - 1, part=2 * N * N * 4 + 1000)).parts == 2
    for external in (False, True):
        path = saved(model(CHAIN), tmp_path, external)
        assert opened(path, How(), VerifyConfig(whole=2 * weights)).parts == 1


def test_what_is_no_valid_model_is_left_to_an_ordinary_session(tmp_path):
    proto = model(CHAIN)
    first = proto.graph.node.pop(0)
    proto.graph.node.append(first)  # behind what reads its result
    assert opened(saved(proto, tmp_path), How(), IN_PARTS).parts == 1
    (tmp_path / "n.onnx").write_bytes(b"no model" * (1 << 14))
    with pytest.raises(UsageError, match="refuses to load"):
        opened(tmp_path / "n.onnx", How(), IN_PARTS)


def test_a_part_that_does_not_load_is_named(tmp_path):
    path = saved(model(CHAIN.replace("MatMul(b, w1)", "NoSuchOp(b, w1)")), tmp_path)
    with pytest.raises(UsageError, match="part 2 of 3 of the model"):
        in_parts(path).run({"x": X})


def test_inputs_that_a_part_refuses(tmp_path):
    text = (
        "a = MatMul(x, w0) b = MatMul(a, w1) s = Constant<value_ints = [3, 128]>() c = Reshape(b, s) y = MatMul(c, w2)"
    )
    path = saved(model(text), tmp_path)
    with pytest.raises(ort.ORT_ERRORS, match="Reshape"):
        in_parts(path).run({"x": X})
    assert in_parts(path).run({"x": np.ones((3, N), np.float32)})["y"].shape == (3, N)


# --- comparing -------------------------------------------------------------------------------------------------------
DEEP = "a = MatMul(x, w0) b = Tanh(a) t = CumSum(b, i) c = MatMul(t, w1) d = Relu(c) u = CumSum(d, i) e = MatMul(u, w2) y = Sigmoid(e)"


def deep() -> onnx.ModelProto:
    proto = model(DEEP)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(1), "i"))
    return proto


def optimized(proto: onnx.ModelProto, tmp_path: Path) -> onnxfuse.Written:
    written = onnxfuse.optimize(proto, verify=False).save(tmp_path / "o.onnx")
    assert written.library is not None
    return written


def test_a_comparison_in_parts_says_the_same_and_how(tmp_path):
    path = saved(deep(), tmp_path)
    written = optimized(deep(), tmp_path)
    both = [None, written.library]
    plain = compare_many(path, written.model, both)
    found = compare_many(path, written.model, both, config=IN_PARTS, lean=True)
    assert [r.runs for r in found] == [r.runs for r in plain]
    assert [r.narrowed for r in found] == [r.narrowed for r in plain]
    assert len(found[0].runs) == 3
    assert [r.parts for r in plain] == [1, 1]
    assert [r.parts for r in found] == [3, 3]
    assert found[1].summary() == "agrees with the library: 3 run(s), 1 output(s), in 3 parts"
    assert found[1].json()["parts"] == 3


def test_a_kernel_of_other_weights_in_the_middle_is_reported(tmp_path):
    """The library is right and the model's weights are not: a part of its own shows it as the whole does."""
    path = saved(deep(), tmp_path)
    written = optimized(deep(), tmp_path)
    wrong = onnx.load(written.model)
    middle = next(t for t in wrong.graph.initializer if t.name == "w1")
    middle.raw_data = (numpy_helper.to_array(middle) * np.float32(1.01)).tobytes()
    onnx.save(wrong, written.model)
    plain = compare(path, written.model, library=written.library)
    found = compare(path, written.model, library=written.library, config=IN_PARTS)
    assert not plain.ok
    assert not found.ok
    assert found.runs == plain.runs
    with pytest.raises(MismatchError, match="outputs y"):
        verify_pair(path, written.model, written.library, Config(verify=IN_PARTS))


def test_a_candidate_whose_part_does_not_load_is_said_not_to_load(tmp_path):
    path = saved(deep(), tmp_path)
    other = tmp_path / "other.onnx"
    wrong = deep()
    wrong.graph.node[3].op_type = "NoSuchOp"
    onnx.save(wrong, other)
    report = compare(path, other, config=IN_PARTS)
    assert not report.loaded
    assert "part 2 of 3 of the optimized model without its library" in report.error


def test_other_inputs_and_refused_ones_are_reported(tmp_path):
    path = saved(deep(), tmp_path)
    other = tmp_path / "other.onnx"
    onnx.save(model(CHAIN.replace("x", "z"), f"(float[b,{N}] z) => (float[b,{N}] y)"), other)
    assert "the inputs differ" in compare(path, other, config=IN_PARTS).error
    fixed = deep()
    fixed.graph.node.insert(4, parser.parse_node("s = Constant<value_ints = [1, 128]>()"))
    fixed.graph.node.insert(5, parser.parse_node("cc = Reshape(c, s)"))
    next(n for n in fixed.graph.node if n.op_type == "Relu").input[0] = "cc"
    onnx.save(fixed, other)
    errors = [r.error for r in compare(path, other, config=IN_PARTS).runs]
    assert [bool(e) for e in errors] == [False, True, True]
    assert "Reshape" in errors[1]


def test_dimensions_that_the_candidate_fixes_are_respected(tmp_path):
    path = saved(deep(), tmp_path)
    other = tmp_path / "other.onnx"
    fixed = deep()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    onnx.save(fixed, other)
    report = compare(path, other, config=IN_PARTS)
    assert report.ok
    assert [r.inputs["x"] for r in report.runs] == [(5, N)]
    assert len(report.narrowed) == 1


def test_bodies_are_compared_on_values_that_parts_make(tmp_path):
    proto, _, _ = CASES["a branch that captures values and weights"]
    path = saved(proto, tmp_path)
    config = Config(verify=IN_PARTS, include_subgraph=True)
    reports = []
    for verify in (AS_A_WHOLE, IN_PARTS):
        with onnxfuse.optimize(path, include_subgraph=True, verify=False).staged(tmp_path / "o.onnx") as pair:
            assert len(pair.bodies) == 2
            made = verify_pair(path, pair.model, pair.library, replace(config, verify=verify), bodies=pair.bodies)
        reports.append([(r.reference, [run.label for run in r.runs], r.ok, r.skipped) for r in made])
    assert reports[0] == reports[1]
    assert ["values of the model around it"] in [labels for _, labels, _, _ in reports[1]]


def test_steps_of_a_comparison_name_the_part(tmp_path):
    path = saved(deep(), tmp_path)
    said: list[str] = []
    compare_many(path, path, [None], config=VerifyConfig(whole=0, part=1, shapes=1), step=said.append)
    assert said[:3] == [
        "running the original model",
        "loading part 1 of 3 of the original model",
        f"running part 1 of 3 of the original model on the inputs (x:1,{N})",
    ]
    assert said[-1] == f"running part 3 of 3 of the optimized model without its library on random seed 0, b=1 (x:1,{N})"


def quantised() -> onnx.ModelProto:
    """Products of dequantised numbers, one after another."""
    lines = ["q0 = QuantizeLinear(x, s, z)"]
    for k in range(3):
        lines += [
            f"d{k} = DequantizeLinear(q{k}, s, z) e{k} = DequantizeLinear(v{k}, t, z)",
            f"c{k} = MatMul(d{k}, e{k}) q{k + 1} = QuantizeLinear(c{k}, s, z)",
        ]
    text = " ".join(lines) + " y = DequantizeLinear(q3, s, z)"
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[2,512] x) => (float[2,512] y) <int8 z = {{0}}, float s = {{0.03}}, float t = {{0.001}}> {{ {text} }}'
    )
    rng = np.random.default_rng(0)
    for k in range(3):
        weight = rng.integers(-127, 128, (512, 512)).astype(np.int8)
        proto.graph.initializer.append(numpy_helper.from_array(weight, f"v{k}"))
    return proto


def test_node_by_node_in_parts_finds_what_it_finds_in_the_whole(tmp_path):
    path = saved(quantised(), tmp_path)
    written = onnxfuse.optimize(path, target_cpu="x86-64-v2", verify=False).save(tmp_path / "o.onnx")
    assert written.library is not None
    feeds = {"x": np.random.default_rng(2).standard_normal((2, 512)).astype(np.float32)}
    how = How([written.library], called="the optimized model with its library")
    cut = in_parts(written.model, how)
    assert cut.parts > 2
    one = opened(written.model, how, AS_A_WHOLE).node_by_node(feeds, written.library, ())
    many = cut.node_by_node(feeds, written.library, ())
    assert one
    assert [(r.node, r.most) for r in many] == [(r.node, r.most) for r in one]
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a.reference, b.reference)
        np.testing.assert_array_equal(a.candidate, b.candidate)
    assert compare(path, written.model, library=written.library, config=IN_PARTS).ok
