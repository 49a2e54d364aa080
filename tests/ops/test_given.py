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
    arrays = dict(feeds)
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
    ],
    ids=["step 0", "no such axis", "an axis twice", "mirrored twice", "nothing left", "less than nothing", "sum", "-1"],
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
