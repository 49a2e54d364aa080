"""Parameters that are inputs of the model: axes, starts, pads, sizes ... are read when the kernel runs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.config import Config, FusionConfig
from onnxfuse.errors import UsageError
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.read import read
from onnxfuse.fuse import fuse
from onnxfuse.ir.interp import run_kernel
from onnxfuse.ir.loops import Compute, LoopGraph, Opaque
from onnxfuse.pipeline import optimize
from onnxfuse.runtime.jit import jit
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.target import by_name
from onnxfuse.verify import ort
from tests.frontend.onnx_text import model, prepared

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
IMAGE = X.reshape(1, 3, 4, 5)


def cube(names: str, n: int, out: str = "a,b,c") -> str:
    """A signature: x, and i64 vectors of n elements."""
    vectors = ", ".join(f"int64[{n}] {name}" for name in names.split())
    return f"(float[3,4,5] x, {vectors}) => (float[{out}] y)"


def loops(body: str, signature: str) -> LoopGraph:
    return lower(atomize(prepared(read(model(body, signature, opset=22))).typed))


def ours(body: str, signature: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What the kernels compute."""
    return compiled(model(body, signature, opset=22), feeds)


def compiled(m: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What the model's kernels compute, in the interpreter; there must be nothing but kernels."""
    partition = fuse(lower(atomize(prepared(read(m)).typed)), FusionConfig())
    made = kernelize(partition)
    assert not partition.left
    assert not made.refused
    arrays = {v.name: c.numpy() for v, c in partition.loops.consts.items()} | feeds
    for call in made.calls.values():
        outs = run_kernel(call.kernel, [arrays[v.name] for v in call.inputs])
        arrays |= {v.name: a for v, a in zip(call.outputs, outs, strict=True)}
    return arrays["y"]


def theirs(body: str, signature: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return ort.run(ort.session(model(body, signature, opset=22), threads=1), feeds)["y"]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES = [
    ("y = Slice(x, s, e)", cube("s e", 2), [
        {"s": ints(1, 0), "e": ints(3, 2)}, {"s": ints(-2, -9), "e": ints(9, -1)},
        {"s": ints(LOWEST, 2), "e": ints(HIGHEST, 1)},
    ]),
    ("y = Slice(x, s, e, a, p)", cube("s e a p", 2), [
        {"s": ints(1, 4), "e": ints(9, LOWEST), "a": ints(1, -1), "p": ints(2, -1)},
        {"s": ints(-1, 0), "e": ints(-9, 2), "a": ints(2, 0), "p": ints(-3, 1)},
        {"s": ints(0, 0), "e": ints(HIGHEST, HIGHEST), "a": ints(0, 2), "p": ints(HIGHEST, 3)},
    ]),
    ("y = ReduceSum(x, a)", cube("a", 1), [{"a": ints(k)} for k in (0, 1, 2, -1)]),
    ("y = ReduceMean<keepdims=0>(x, a)", cube("a", 2, "a"), [{"a": ints(0, 2)}, {"a": ints(-1, 1)}, {"a": ints(2, 0)}]),
    ("y = ReduceMax<keepdims=0>(x, a)", cube("a", 1, "a,b"), [{"a": ints(k)} for k in (0, 1, -1)]),
    ("y = ReduceLogSumExp(x, a)", cube("a", 1), [{"a": ints(1)}, {"a": ints(-3)}]),
    ("y = ReduceLogSumExp<keepdims=0>(x, a)", cube("a", 1, "a,b"), [{"a": ints(1)}, {"a": ints(-1)}]),
    *((f"y = Pad<mode=\"{mode}\">(x, p)", cube("p", 6), [
        {"p": ints(1, 0, 2, 2, 1, 3)}, {"p": ints(-1, 0, 1, 1, -2, 0)}, {"p": ints(0, 0, 0, 0, 0, 0)},
    ]) for mode in ("constant", "edge", "reflect", "wrap")),
    ("y = Pad<mode=\"edge\">(x, p, , a)", "(float[3,4,5] x, int64[4] p, int64[2] a) => (float[a,b,c] y)", [
        {"p": ints(1, 0, 2, 7), "a": ints(2, 0)}, {"p": ints(1, -1, 2, 1), "a": ints(-2, -1)},
    ]),
    ("y, z = Split<axis=1>(x, s)", "(float[3,4,5] x, int64[2] s) => (float[a,b,c] y, float[d,e,f] z)", [
        {"s": ints(1, 3)}, {"s": ints(0, 4)},
    ]),
    ("y = Tile(x, r)", cube("r", 3), [{"r": ints(1, 2, 3)}, {"r": ints(1, 0, 1)}]),
    ("y = Expand(x, s)", "(float[3,1,5] x, int64[3] s) => (float[a,b,c] y)", [
        {"s": ints(3, 2, 1)}, {"s": ints(1, 1, 5)},
    ]),
    ("y = CenterCropPad<axes=[0,2]>(x, s)", cube("s", 2), [{"s": ints(2, 7)}, {"s": ints(6, 1)}]),
    ("y = CumSum(x, a)", "(float[3,4,5] x, int64 a) => (float[3,4,5] y)", [{"a": np.array(k)} for k in (0, 1, -1)]),
    *((f"y = Gather<axis={axis}>(x, i)", "(float[3,4,5] x, int64[n] i) => (float[a,b,c] y)", [
        {"i": ints(0, 2, -1, -3)}, {"i": ints()}, {"i": ints(*[1, -2, 2] * 30)},
    ]) for axis in (0, 1, -1)),
    ("y = Gather(x, i)", "(float[3,4,5] x, int32[2,3] i) => (float[a,b,c,d] y)", [
        {"i": np.int32([[0, 2, -1], [-3, 1, 1]])},
    ]),
    *((f"y = GatherElements<axis={axis}>(x, i)", "(float[3,4,5] x, int64[a,b,c] i) => (float[a,b,c] y)", [
        {"i": ints(0, 2, -1, -3, 1, 1, 2, 0).reshape(2, 2, 2)}, {"i": ints(*range(-2, 3)).reshape(1, 1, 5)},
    ]) for axis in (0, 1, 2)),
    ("y = GatherND(x, i)", "(float[3,4,5] x, int64[n,2] i) => (float[n,5] y)", [
        {"i": ints(0, 3, -1, -4, 2, 0).reshape(3, 2)}, {"i": ints().reshape(0, 2)},
    ]),
    ("y = GatherND<batch_dims=1>(x, i)", "(float[3,4,5] x, int64[3,2,1] i) => (float[3,2,5] y)", [
        {"i": ints(0, 3, -1, -4, 2, 0).reshape(3, 2, 1)},
    ]),
    ("y = ReverseSequence(x, n)", "(float[3,4,5] x, int64[4] n) => (float[3,4,5] y)", [{"n": ints(0, 1, 2, 3)}]),
    ("y = ScatterElements<axis=1>(x, i, u)", "(float[3,4,5] x, int64[2,3,m] i, float[2,3,m] u) => (float[3,4,5] y)", [
        {"i": ints(*[0, 3, -1, -4, 0, 1] * 2).reshape(2, 3, 2), "u": -X[:2, :3, :2]},
    ]),
    *((f"y = ScatterElements<axis=-1, reduction=\"{how}\">(x, i, u)",
       "(float[3,4,5] x, int64[3,m,2] i, float[3,m,2] u) => (float[3,4,5] y)", [
        {"i": ints(*[0, 0, 3, -5, 4, 4] * 4).reshape(3, 4, 2), "u": X[:, :, 1:3] * 2},
        {"i": ints().reshape(3, 0, 2), "u": X[:, :0, :2]},
    ]) for how in ("none", "add", "mul", "max", "min")),
    *((f"y = ScatterND<reduction=\"{how}\">(x, i, u)",
       "(float[3,4,5] x, int64[3,2] i, float[3,5] u) => (float[3,4,5] y)", [
        {"i": ints(0, 3, -1, -4, 0, -1).reshape(3, 2), "u": X[0, :3] * 2},
    ]) for how in ("none", "add", "mul", "max", "min")),
    ("y = ScatterND(x, i, u)", "(float[n,m,k] x, int64[2,1,3] i, float[2,1] u) => (float[n,m,k] y)", [
        {"i": ints(0, 3, 4, -3, -1, -1).reshape(2, 1, 3), "u": X[0, :2, :1]},
    ]),
    ("y = ScatterND(x, i, u)", "(float[3,4,5] x, int64[4,1] i, float[4,4,5] u) => (float[3,4,5] y)", [
        {"i": ints(1, 0, 1, -1).reshape(4, 1), "u": np.concatenate([X, X[:1]]) * 2},
    ]),
    ("y = OneHot<axis=1>(i, d, v)", "(int64[3] i, float d, float[2] v) => (float[a,b] y)", [
        {"i": ints(0, -1, 5), "d": np.array(4, np.float32), "v": np.array([0, 2], np.float32)},
    ]),
    ("y = Resize<mode=\"linear\">(x, , s)", "(float[1,3,4,5] x, float[4] s) => (float[a,b,c,d] y)", [
        {"s": np.array(s, np.float32)} for s in ([1, 1, 2, 1.7], [1, 1, 0.6, 0.4])
    ]),
    ("y = Resize<mode=\"nearest\", keep_aspect_ratio_policy=\"not_larger\", axes=[2,3]>(x, , , s)",
     "(float[1,3,4,5] x, int64[2] s) => (float[a,b,c,d] y)", [{"s": ints(8, 7)}, {"s": ints(3, 9)}]),
    ("y = Resize<mode=\"linear\", coordinate_transformation_mode=\"tf_crop_and_resize\">(x, r, , s)",
     "(float[1,3,4,5] x, float[8] r, int64[4] s) => (float[a,b,c,d] y)", [
         {"r": np.array([0, 0, 0.2, 0.4, 1, 1, 0.8, 1.3], np.float32), "s": ints(1, 3, 3, 6)},
     ]),
    ("y = Col2Im(x, s, b)", "(float[1,12,6] x, int64[2] s, int64[2] b) => (float[a,b,c,d] y)", [
        {"x": np.arange(72, dtype=np.float32).reshape(1, 12, 6), "s": ints(3, 4), "b": ints(2, 2)},
        {"x": np.arange(72, dtype=np.float32).reshape(1, 12, 6), "s": ints(6, 3), "b": ints(1, 3)},
    ]),
    ("y = AffineGrid(t, s)", "(float[2,2,3] t, int64[4] s) => (float[a,b,c,2] y)", [
        {"t": X.reshape(-1)[:12].reshape(2, 2, 3), "s": ints(2, 1, 3, 4)},
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "signature", "given"), CASES, ids=lambda v: v if isinstance(v, str) and "=" in v else ""
)
def test_parameters_given_at_run_time(body, signature, given):
    for feeds in given:
        x = IMAGE if "[1,3,4,5] x" in signature else X[:, :1] if "[3,1,5] x" in signature else X
        fed = {**({"x": x} if " x" in signature else {}), **feeds}
        want = theirs(body, signature, fed)
        np.testing.assert_allclose(ours(body, signature, fed), want, rtol=1e-5, atol=1e-6, strict=True)


@pytest.mark.parametrize(
    ("body", "signature", "feeds"),
    [
        ("y = Slice(x, s, s, s, p)", cube("s p", 1), {"s": ints(1), "p": ints(0)}),
        ("y = ReduceSum(x, a)", cube("a", 1), {"a": ints(3)}),
        ("y = ReduceSum<keepdims=0>(x, a)", cube("a", 2, "a"), {"a": ints(1, -2)}),
        ('y = Pad<mode="reflect">(x, p)', cube("p", 6), {"p": ints(0, 0, 0, 3, 0, 0)}),
        ('y = Pad<mode="edge">(x, p)', cube("p", 6), {"p": ints(-2, 0, 0, -1, 0, 0)}),
        ("y = Pad(x, p)", cube("p", 6), {"p": ints(-2, 0, 0, -2, 0, 0)}),
        ("y, z = Split(x, s)", "(float[3,4,5] x, int64[2] s) => (float[a,b,c] y, float[d,e,f] z)", {"s": ints(1, 1)}),
        ("y = Tile(x, r)", cube("r", 3), {"r": ints(1, -1, 1)}),
        *(("y = Gather(x, i)", cube("i", 2), {"i": ints(0, i)}) for i in (3, -4, LOWEST, HIGHEST)),
        (
            "y = GatherElements(x, i)",
            "(float[3,4,5] x, int64[1,1,2] i) => (float[1,1,2] y)",
            {"i": ints(0, 3)[None, None]},
        ),
        (
            "y = GatherND(x, i)",
            "(float[3,4,5] x, int64[2,2] i) => (float[2,5] y)",
            {"i": ints(3, 3, 0, 0).reshape(2, 2)},
        ),
        ("y = ReverseSequence(x, n)", "(float[3,4,5] x, int64[4] n) => (float[3,4,5] y)", {"n": ints(0, 1, 2, 4)}),
        ("y = ReverseSequence(x, n)", "(float[3,4,5] x, int64[4] n) => (float[3,4,5] y)", {"n": ints(0, 1, 2, -1)}),
        (
            "y = ScatterElements(x, i, x)",
            "(float[3,4,5] x, int64[3,4,5] i) => (float[3,4,5] y)",
            {"i": np.full((3, 4, 5), 3)},
        ),
        (
            "y = ScatterND(x, i, x)",
            "(float[3,4,5] x, int64[3,1] i) => (float[3,4,5] y)",
            {"i": ints(0, 1, 3).reshape(3, 1)},
        ),
    ],
    ids=[
        "step 0",
        "no such axis",
        "an axis twice",
        "mirrored twice",
        "nothing left",
        "less than nothing",
        "sum",
        "-1",
        "end",
        "before the start",
        "lowest",
        "highest",
        "elements",
        "tuple",
        "long",
        "negative",
        "scatter",
        "slices",
    ],
)
def test_what_onnxruntime_refuses_a_kernel_refuses(body, signature, feeds):
    with pytest.raises(UsageError):
        ours(body, signature, {"x": X, **feeds})


@pytest.mark.parametrize("target", ["Reshape", "Squeeze", "Unsqueeze"])
def test_another_name_for_the_same_memory_costs_nothing_in_the_runtime(target):
    (item,) = loops(f"y = {target}(x, s)", "(float[3,1,5] x, int64[1] s) => (float[a,b] y)").items
    assert isinstance(item, Opaque)
    assert item.refusal.code == "NF_FREE_VIEW"


def test_what_a_kernel_reads_as_dimensions_is_made_by_the_runtime():
    items = loops("s = Cast<to=7>(f) t = Neg(x) y = Slice(t, s, e)",
                  "(float[3,4,5] x, float[1] f, int64[1] e) => (float[a,b,c] y)").items  # fmt: skip
    made = {i.node.op.name: i for i in items}
    assert isinstance(made["Cast"], Opaque)
    assert made["Cast"].refusal.code == "UN_SHAPE"
    assert isinstance(made["Neg"], Compute)
    assert isinstance(made["Slice"], Compute)


def test_a_dimension_of_the_users_is_no_element():
    m = model("y = Slice(x, s, e)", "(float[n] x, int64[1] s, int64[1] e) => (float[k] y)")
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "s[plus 0]"
    made = kernelize(fuse(lower(atomize(prepared(read(m)).typed)), FusionConfig()))
    (call,) = made.calls.values()
    (y,) = run_kernel(call.kernel, [X[0, 0], ints(1), ints(4)])
    np.testing.assert_array_equal(y, X[0, 0, 1:4])


@pytest.mark.parametrize(("start", "end"), [(0, 3), (-2, HIGHEST), (LOWEST, -1), (3, 1), (HIGHEST, LOWEST)])
def test_the_compiled_kernel_reads_elements_of_any_sign(start, end):
    bundle = optimize(model("y = Slice(x, s, e)", "(float[n] x, int64[1] s, int64[1] e) => (float[k] y)"), Config())
    (plan,) = bundle.plans.plans
    (y,) = jit(plan, by_name("host", host_features()))([X[0, 0], ints(start), ints(end)])
    np.testing.assert_array_equal(y, X[0, 0, start:end])


INDICES = ints(*range(-7, 7), *range(-7, 7), 6, -7, 0)


@pytest.mark.parametrize("at", range(len(INDICES)))
@pytest.mark.parametrize("wrong", [7, -8, LOWEST, HIGHEST])
def test_the_compiled_kernel_sees_an_index_out_of_range_wherever_it_stands(gather, at, wrong):
    x = np.arange(7, dtype=np.float32)
    np.testing.assert_array_equal(gather([x, INDICES])[0], x[INDICES])
    bad = INDICES.copy()
    bad[at] = wrong
    with pytest.raises(UsageError, match="input 1: an index is out of range: the extent is 7"):
        gather([x, bad])


@pytest.fixture(scope="module")
def gather():
    bundle = optimize(model("y = Gather(x, i)", "(float[n] x, int64[k] i) => (float[k] y)"), Config())
    (plan,) = bundle.plans.plans
    return jit(plan, by_name("host", host_features()))


def test_indices_that_a_kernel_makes_are_left_to_the_runtime():
    items = loops("j = Neg(i) y = Gather(x, j) z = Gather(y, j) w = Gather(z, i)",
                  "(float[n] x, int64[k] i) => (float[k] w)").items  # fmt: skip
    made = {out.name: i for i in items for out in (i.node.outputs if isinstance(i, Opaque) else [i.out])}
    assert {v: i.refusal.code for v, i in made.items() if isinstance(i, Opaque)} == {
        "y": "UN_DATA_DEPENDENT", "z": "UN_DATA_DEPENDENT",
    }  # fmt: skip
    assert isinstance(made["w"], Compute)


def test_more_updates_than_are_worth_looking_at_stay_with_the_runtime():
    (item,) = loops("y = ScatterElements(x, i, u)",
                    "(float[9,4] x, int64[5,4] i, float[5,4] u) => (float[9,4] y)").items  # fmt: skip
    assert isinstance(item, Opaque)
    assert item.refusal.code == "UN_OPAQUE"
    assert "5 updates (at most 4)" in str(item.refusal)
