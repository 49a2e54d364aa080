"""Whole way, smallest models: each was once wrong, or is a kind of graph that must go through."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse
from onnxfuse.codegen import generate as codegen_generate
from onnxfuse.errors import CompileError
from onnxfuse.ir.plan import Plans
from onnxfuse.schedule import kernelize as schedule_kernelize
from onnxfuse.schedule import plan as schedule_plan

HEAD = '<ir_version: 8, opset_import: ["" : {opset}]>\n'


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD.format(opset=opset) + text)


def reference(m: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(m.SerializeToString(), options).run(None, feeds)


def agrees(m: onnx.ModelProto, tmp_path: Path, *feeds: dict[str, np.ndarray], tol: float = 1e-5) -> Plans:
    """Optimize, run every feed without and with the library, compare; the plans for further questions."""
    bundle = onnxfuse.optimize(m, verify=False)
    out = tmp_path / "out.onnx"
    bundle.save(out)
    sessions = [ort.InferenceSession(out)]
    if bundle.library is not None:
        sessions.append(onnxfuse.InferenceSession(out))
    for feed in feeds:
        want = reference(m, feed)
        for session in sessions:
            for a, b in zip(want, session.run(None, feed), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_allclose(b, a, rtol=tol, atol=tol)
    return bundle.plans


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_a_shape_computed_from_the_groups_own_value_makes_no_cycle(tmp_path: Path) -> None:
    m = model("""g (float[N,8,H,W] x) => (float[N,8,1,1] p, float[M,8] y) {
        p = GlobalAveragePool(x)
        s = Shape(p)
        zero = Constant<value_ints=[0]>()
        two = Constant<value_ints=[2]>()
        head = Slice(s, zero, two)
        y = Reshape(p, head)
    }""")
    agrees(m, tmp_path, {"x": random(2, 8, 3, 5)}, {"x": random(1, 8, 1, 1)})


def test_a_dimension_that_no_input_has_is_read_from_the_reshape_target(tmp_path: Path) -> None:
    # rows*cols of x do not tell rows and cols apart; the target tensor does.
    m = model("""g (float[A,B] x, float[A,4] y) => (float[P,Q,4] z) {
        s = Shape(x)
        n1 = Constant<value_ints=[-1]>()
        flat = Reshape(x, n1)
        four = Constant<value_ints=[4]>()
        one = Constant<value_ints=[1]>()
        t = Concat<axis=0>(s, one)
        r = Reshape(flat, t)
        e = Exp(r)
        reps = Constant<value_ints=[1,1,4]>()
        z = Tile(e, reps)
    }""")
    agrees(m, tmp_path, {"x": random(3, 5), "y": random(3, 4)}, {"x": random(1, 2), "y": random(1, 4)})


def test_a_window_larger_than_the_input_counts_once(tmp_path: Path) -> None:
    m = model("""g (float[1,2,H,W] x) => (float[1,2,P,Q] y) {
        a = AveragePool<kernel_shape=[3,2], strides=[3,2]>(x)
        y = Relu(a)
    }""")
    agrees(m, tmp_path, {"x": random(1, 2, 2, 8)}, {"x": random(1, 2, 7, 9)})


def test_shape_arithmetic_in_i32_stays_exact(tmp_path: Path) -> None:
    m = model("""g (float[N,1] x, float[A,S] y) => (float[P,Q] z) {
        sh = Shape(y)
        one = Constant<value_ints=[1]>()
        s = Gather(sh, one)
        si = Cast<to=6>(s)
        two = Constant<value = int32[1] {2}>()
        s2 = Mul(si, two)
        sl = Cast<to=7>(s2)
        shape = Concat<axis=0>(one, sl)
        e = Expand(x, shape)
        cat = Concat<axis=1>(y, y)
        t = Add(e, cat)
        z = Relu(t)
    }""")
    agrees(m, tmp_path, {"x": random(3, 1), "y": random(1, 4)}, {"x": random(3, 1), "y": random(3, 4)})


@pytest.mark.parametrize(
    "shapes", [((3, 4), (3, 4)), ((1, 4), (3, 4)), ((3, 1), (3, 4)), ((1, 1), (1, 1)), ((3, 4), (1, 1))]
)
def test_extents_that_broadcast_only_at_run_time(tmp_path: Path, shapes: tuple[tuple[int, ...], ...]) -> None:
    m = model("g (float[A,B] x, float[C,D] y) => (float[P,Q] z) { t = Add(x, y)  u = Exp(t)  z = Mul(u, x) }")
    plans = agrees(m, tmp_path, {"x": random(*shapes[0]), "y": random(*shapes[1])})
    assert plans.plans[0].general is not None


def test_extents_that_cannot_broadcast_are_an_error_not_a_crash(tmp_path: Path) -> None:
    m = model("g (float[A,B] x, float[C,D] y) => (float[P,Q] z) { t = Add(x, y)  z = Exp(t) }")
    bundle = onnxfuse.optimize(m, verify=False)
    bundle.save(tmp_path / "out.onnx")
    session = onnxfuse.InferenceSession(tmp_path / "out.onnx")
    with pytest.raises(Exception, match="broadcast"):
        session.run(None, {"x": random(3, 4), "y": random(2, 4)})


def test_groups_of_equal_structure_share_one_kernel(tmp_path: Path) -> None:
    m = model("""g (float[4,8] x, float[8,8] w1, float[8,8] w2, float[8] b1, float[8] b2) => (float[4,8] y) {
        a = MatMul(x, w1)  c = Add(a, b1)  d = Relu(c)
        e = MatMul(d, w2)  f = Add(e, b2)  y = Relu(f)
    }""")
    rng = np.random.default_rng(1)
    while len(m.graph.input) > 1:
        weight = m.graph.input.pop()
        shape = [d.dim_value for d in weight.type.tensor_type.shape.dim]
        array = rng.standard_normal(shape, dtype=np.float32)
        m.graph.initializer.append(onnx.numpy_helper.from_array(array, weight.name))
    plans = agrees(m, tmp_path, {"x": random(4, 8)})
    assert len(plans.calls) == 2
    assert len(plans.plans) == 1


def test_an_empty_batch_goes_through(tmp_path: Path) -> None:
    m = model("""g (float[N,8] x) => (float[N,8] y) { e = Exp(x)  s = Softmax(e)  y = Relu(s) }""")
    agrees(m, tmp_path, {"x": random(0, 8)}, {"x": random(5, 8)})


def test_a_lone_squeeze_of_a_dimension_not_known_before_stays_with_the_runtime(tmp_path: Path) -> None:
    m = model("""g (float[N,A,4,B] x) => (float[N,4] y, float[N,A,4,B] z) {
        axes = Constant<value_ints=[1,3]>()
        y = Squeeze(x, axes)
        z = Exp(x)
    }""")
    plans = agrees(m, tmp_path, {"x": random(3, 1, 4, 1)})
    assert [why.code for why in plans.refused.values()] == ["NF_FREE_VIEW"]


def test_a_lone_reshape_stays_with_the_runtime(tmp_path: Path) -> None:
    m = model("""g (float[2,3,4] x) => (float[6,4] y) {
        shape = Constant<value_ints=[6,4]>()
        y = Reshape(x, shape)
    }""")
    plans = agrees(m, tmp_path, {"x": random(2, 3, 4)})
    assert [r.code for r in plans.refused.values()] == ["NF_FREE_VIEW"]


def test_one_operator_on_single_numbers_stays_with_the_runtime_and_two_do_not(tmp_path: Path) -> None:
    m = model("""g (int64 rate, float[1] x) => (bool wide, float[1] y) {
        k = Constant<value_int=16000>()
        wide = Equal(rate, k)
        e = Exp(x)
        y = Neg(e)
    }""")
    plans = agrees(m, tmp_path, {"rate": np.array(16000), "x": random(1)}, {"rate": np.array(8000), "x": random(1)})
    assert [r.code for r in plans.refused.values()] == ["NF_TINY"]
    assert len(plans.calls) == 1


CACHED = """g (float[B,2,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,P,8] past_k, float[B,2,P,8] past_v,
    float[B,1,1,T] mask) => (float[B,2,S,8] y, float[B,2,U,8] keys, float[B,2,U,8] values) {
        keys = Concat<axis=2>(past_k, k)
        values = Concat<axis=2>(past_v, v)
        turned = Transpose<perm=[0,1,3,2]>(keys)
        scores = MatMul(q, turned)
        masked = Add(scores, mask)
        p = Softmax<axis=-1>(masked)
        y = MatMul(p, values)
    }"""


def cached(batch: int, new: int, past: int, mask: int) -> dict[str, np.ndarray]:
    fed = {name: random(batch, 2, new, 8) for name in "qkv"} | {"mask": random(batch, 1, 1, mask)}
    return fed | {name: random(batch, 2, past, 8) for name in ("past_k", "past_v")}


def test_attention_over_a_cache_with_a_mask_of_its_own_length_is_one_kernel(tmp_path: Path) -> None:
    """The scores have past + S columns; that the mask's total length is the same follows from the values only."""
    m = model(CACHED)
    cases = [cached(2, 1, 5, 6), cached(1, 1, 1, 2), cached(1, 3, 4, 7), cached(1, 1, 0, 1), cached(2, 2, 3, 1)]
    plans = agrees(m, tmp_path, *cases)
    sizes = sorted(len(g.members) for g in plans.partition.groups)
    assert sizes[:2] == [1, 1]  # the two caches
    assert len(sizes) == 3


def test_a_mask_that_is_longer_than_the_cache_is_refused_as_by_onnxruntime(tmp_path: Path) -> None:
    m = model(CACHED)
    agrees(m, tmp_path, cached(1, 1, 3, 4))
    session = onnxfuse.InferenceSession(tmp_path / "out.onnx")
    for wrong in (cached(1, 1, 3, 5), cached(1, 1, 0, 3)):
        with pytest.raises(Exception, match=r"INVALID_ARGUMENT|RUNTIME_EXCEPTION|FAIL"):
            reference(m, wrong)
        with pytest.raises(Exception, match="onnxfuse kernel"):
            session.run(None, wrong)


HALF = """g (float16[B,2,S,8] q, float16[B,2,T,8] k, float16[B,2,T,8] v) => (float16[B,S,U] y) {
        q32 = Cast<to=1>(q)
        k32 = Cast<to=1>(k)
        v32 = Cast<to=1>(v)
        turned = Transpose<perm=[0,1,3,2]>(k32)
        scores = MatMul(q32, turned)
        p = Softmax<axis=-1>(scores)
        heads = MatMul(p, v32)
        half = Cast<to=10>(heads)
        rows = Transpose<perm=[0,2,1,3]>(half)
        shape = Constant<value_ints=[0,0,16]>()
        y = Reshape(rows, shape)
    }"""


def test_attention_in_f32_between_halves_is_one_kernel_that_stores_halves(tmp_path: Path) -> None:
    feeds = [{"q": random(2, 2, s, 8), "k": random(2, 2, t, 8), "v": random(2, 2, t, 8)} for s, t in ((5, 9), (1, 3))]
    halves = [{name: x.astype(np.float16) for name, x in feed.items()} for feed in feeds]
    plans = agrees(model(HALF), tmp_path, *halves, tol=1e-3)
    assert len(plans.calls) == 1


def test_a_result_that_is_rounded_and_widened_again_keeps_its_rounding(tmp_path: Path) -> None:
    twice = HALF.replace("float16[B,S,U] y", "float[B,S,U] y").replace("(half)", "(wide)")
    m = model(twice.replace("rows =", "wide = Cast<to=1>(half)  rows ="))
    feed = {"q": random(1, 2, 4, 8), "k": random(1, 2, 6, 8), "v": random(1, 2, 6, 8)}
    agrees(m, tmp_path, {name: x.astype(np.float16) for name, x in feed.items()}, tol=1e-3)
    (y,) = onnxfuse.InferenceSession(tmp_path / "out.onnx").run(
        None, {name: x.astype(np.float16) for name, x in feed.items()}
    )
    assert (y == y.astype(np.float16)).all()


def test_question_marks_are_no_symbol(tmp_path: Path) -> None:
    m = model("g (float[1,3,H,W] x) => (float[1,3,P,Q] y) { e = Exp(x)  y = Relu(e) }")
    for dim in m.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "?"
    agrees(m, tmp_path, {"x": random(1, 3, 4, 7)})


def test_what_dimensions_must_satisfy_is_checked_by_the_kernel(tmp_path: Path) -> None:
    m = model("""g (float[N,S,4] x, float[N,P,4] y) => (float[N,4] z, float[N,T,4] c) {
        two = Constant<value_int=2>()
        row = Gather<axis=1>(x, two)
        z = Exp(row)
        j = Concat<axis=1>(x, y)
        c = Relu(j)
    }""")
    plans = agrees(m, tmp_path, {"x": random(2, 3, 4), "y": random(2, 1, 4)})
    assert not plans.refused
    session = onnxfuse.InferenceSession(tmp_path / "out.onnx")
    with pytest.raises(Exception, match="needs 2 < d"):
        session.run(None, {"x": random(2, 2, 4), "y": random(2, 1, 4)})


def test_equal_names_of_dimensions_may_be_refused_but_never_read_past_an_end(tmp_path: Path) -> None:
    m = model("g (float[A,3] x, float[B,3] y) => (float[A,6] c) { j = Concat<axis=1>(x, y)  c = Relu(j) }")
    agrees(m, tmp_path, {"x": random(2, 3), "y": random(2, 3)})
    session = onnxfuse.InferenceSession(tmp_path / "out.onnx")
    with pytest.raises(Exception, match="needs d"):
        session.run(None, {"x": random(2, 3), "y": random(1, 3)})


def test_a_node_that_stays_for_one_output_leaves_the_others_to_kernels(tmp_path: Path) -> None:
    m = model("""g (float[2,3] x) => (float[2,3] y, bool[2,3] mask) { y, mask = Dropout(x) }""")
    agrees(m, tmp_path, {"x": random(2, 3)})


def test_the_condition_of_a_branch_stays_a_run_time_value(tmp_path: Path) -> None:
    # Size is constant for us, not for onnxruntime; a constant condition would make it inline the invalid branch.
    m = model("""g (int64[4] size) => (int64[P] y) {
        rank = Size(size)
        four = Constant<value_int=4>()
        flat = Equal(rank, four)
        zero = Constant<value_int=0>()
        one = Constant<value_int=1>()
        n = If (flat) <
            then_branch = t () => (int64[1] a) { a = Constant<value_ints=[3]>() },
            else_branch = e () => (int64 b) { b = Constant<value_int=3>() }>
        r = Range(zero, n, one)
        y = Neg(r)
    }""")
    agrees(m, tmp_path, {"size": np.arange(4)})


def test_folded_weights_are_still_read_from_the_input_and_it_cannot_be_the_output(tmp_path):
    rng = np.random.default_rng(0)
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,64,4,4] x) => (float[1,64,2,2] y)
              { c = Conv(x, w) y = BatchNormalization(c, s, s, s, s) }"""
    proto = onnx.parser.parse_model(text)
    for name, shape in (("w", (64, 64, 3, 3)), ("s", (64,))):
        array = rng.uniform(0.5, 1, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    bundle = onnxfuse.optimize(path)
    with pytest.raises(onnxfuse.UsageError, match="E_SAME_FILE"):
        bundle.save(path)
    bundle.save(tmp_path / "o.onnx")
    path.write_bytes(b"")
    with pytest.raises(onnxfuse.UsageError, match="E_EXTERNAL_SIZE"):
        bundle.save(tmp_path / "p.onnx")
    assert not (tmp_path / "p.onnx").exists()


def test_question_marks_can_be_fixed_to_different_sizes() -> None:
    m = model("g (float[1,3,H,W] x) => (float[1,3,P,Q] y) { y = Exp(x) }")
    for dim in m.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "?"
    bundle = onnxfuse.optimize(m, verify=False, overwrite_input_shape={"x": (1, 3, 4, 7)})
    shape = bundle.model.graph.input[0].type.tensor_type.shape
    assert [d.dim_value for d in shape.dim] == [1, 3, 4, 7]


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [
        ("Transpose", {"x": [2, 3]}, {"perm": [0, 5]}),
        ("MaxPool", {"x": [1, 1, 4, 4]}, {"kernel_shape": [2]}),
        ("Conv", {"x": [1, 1, 4, 4], "w": [1, 1, 3, 3]}, {"strides": [1]}),
        ("Concat", {"x": [2, 3], "w": [2]}, {"axis": 0}),
        ("LRN", {"x": [1, 3]}, {"size": 0}),
    ],
)
def test_a_node_that_does_not_fit_its_operator_is_left_to_the_runtime(
    op: str, inputs: dict[str, list[int]], attrs: dict[str, int | list[int]]
) -> None:
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    node = helper.make_node(op, list(inputs), ["y"], **attrs)
    given = [helper.make_tensor_value_info(name, float32, shape) for name, shape in inputs.items()]
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", float32, None)])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    bundle = onnxfuse.optimize(made, verify=False)
    assert [item.refusal.code for item in bundle.partition.left] == ["UN_MISFIT"]


def test_a_reshape_behind_a_group_is_the_shape_of_its_output(tmp_path: Path) -> None:
    m = model("""g (float[N,6,4] x) => (float[N,3,8] y, float[N,6,4] z) {
        e = Exp(x)
        s = Softmax(e)
        shape = Constant<value_ints=[-1,3,8]>()
        y = Reshape(s, shape)
        z = Mul(e, x)
    }""")
    plans = agrees(m, tmp_path, {"x": random(2, 6, 4)}, {"x": random(0, 6, 4)})
    assert not plans.refused
    assert [str(t) for k in plans.plans for t in k.kernel.renamed if t is not None] == ["f32[d0,3,8]"]


def test_a_reshaped_value_that_others_read_is_not_renamed(tmp_path: Path) -> None:
    m = model("""g (float[2,6] x) => (float[3,4] y, float[2,6] s) {
        s = Softmax(x)
        shape = Constant<value_ints=[3,4]>()
        y = Reshape(s, shape)
    }""")
    plans = agrees(m, tmp_path, {"x": random(2, 6)})
    assert [r.code for r in plans.refused.values()] == ["NF_FREE_VIEW"]


SIBLINGS = """
agraph (TYPE[B, 3, W] x, TYPE[W] b)
    => (TYPE[B, 3, 1] s, TYPE[B, 3, 1] q, TYPE[B, 3, 1] m, TYPE[B, 3, W] e, TYPE[B, 3, W] y) {
    s = ReduceMean <axes = [2]> (x)
    x2 = Mul (x, x)
    q = ReduceMean <axes = [2]> (x2)
    m = ReduceMax <axes = [2]> (x)
    e = Tanh (x)
    y = Add (x, b)
}
"""


@pytest.mark.parametrize("dtype", ["float", "float16", "double"])
@pytest.mark.parametrize("width", [1, 5, 64, 301])
def test_readers_of_one_value_share_a_kernel_with_several_outputs(tmp_path: Path, dtype: str, width: int) -> None:
    m = model(SIBLINGS.replace("TYPE", dtype))
    numpy = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    feeds = [{"x": random(b, 3, width).astype(numpy), "b": random(width).astype(numpy)} for b in (1, 4)]
    plans = agrees(m, tmp_path, *feeds, tol=max(1e-5, 2 * float(np.finfo(numpy).eps)))
    assert [len(p.kernel.outputs) for p in plans.plans] == [5]


@pytest.mark.parametrize("place", ["kernelize", "plan", "generate"])
def test_a_bug_of_ours_costs_one_kernel_and_not_the_model(place: str, tmp_path: Path, monkeypatch) -> None:
    m = model("""g (float[N] x, float[M,4] a) => (float[N] y, float[M] z) {
        y = Exp(x)
        z = ReduceMax<axes=[1], keepdims=0>(a)
    }""")
    trip_over_reductions(place, monkeypatch)
    plans = agrees(m, tmp_path, {"x": random(5), "a": random(3, 4)})
    assert len(plans.calls) == 1
    (why,) = plans.refused.values()
    assert why.code == ("UN_COMPILE" if place == "generate" else "UN_INTERNAL")
    assert "KeyError" in why.why
    with pytest.raises(CompileError, match="KeyError"):
        onnxfuse.optimize(m, strict=True, cache=False)


def trip_over_reductions(place: str, monkeypatch) -> None:
    """Make one stage raise what a slip raises, for reductions only."""
    owner, name = {
        "kernelize": (schedule_kernelize, "program"),
        "plan": (schedule_plan, "equal_extents"),
        "generate": (codegen_generate, "emit_module"),
    }[place]
    real = getattr(owner, name)

    def stumble(given, *more):
        if "reduce" in str(given).lower():
            raise KeyError("i1")
        return real(given, *more)

    monkeypatch.setattr(owner, name, stumble)


PLACED = {
    "transpose": ("float[B, 20, 24] x, float[24, 36] w", "float[B, 36, 20] y", "y = Transpose<perm = [0, 2, 1]>(d)"),
    "image": (
        "float[B, 20, 24] x, float[24, 36] w",
        "float[B, 36, 4, 5] y",
        "t = Transpose<perm = [0, 2, 1]>(d) s = Constant<value_ints = [-1, 36, 4, 5]>() y = Reshape(t, s)",
    ),
    "heads apart": (
        "float[B, 20, 24] x, float[24, 36] w",
        "float[B, 4, 20, 9] y",
        "s = Constant<value_ints = [-1, 20, 4, 9]>() t = Reshape(d, s) y = Transpose<perm = [0, 2, 1, 3]>(t)",
    ),
    "heads together": (
        "float[B, 4, 20, 24] x, float[B, 4, 24, 9] w",
        "float[B, 20, 36] y",
        "t = Transpose<perm = [0, 2, 1, 3]>(d) s = Constant<value_ints = [-1, 20, 36]>() y = Reshape(t, s)",
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_a_product_stores_where_the_views_behind_it_would_copy_to(tmp_path: Path, case: str) -> None:
    inputs, output, views = PLACED[case]
    m = model(f"agraph ({inputs}) => ({output}) {{ p = MatMul(x, w) d = Tanh(p) {views} }}")
    heads = case == "heads together"
    feeds = []
    for b in (1, 3):
        shapes = ((b, 4, 20, 24), (b, 4, 24, 9)) if heads else ((b, 20, 24), (24, 36))
        feeds.append({"x": random(*shapes[0]), "w": random(*shapes[1])})
    plans = agrees(m, tmp_path, *feeds)
    assert [p.schedule.template for p in plans.plans] == ["gemm"]


def test_a_view_that_others_read_or_that_leaves_something_out_stays_behind_the_product(tmp_path: Path) -> None:
    shared = "d = MatMul(x, w) y = Transpose<perm = [1, 0]>(d)"
    part = """p = MatMul(z, w) a = Constant<value_ints = [0]>() e = Constant<value_ints = [18]>()
        o = Constant<value_ints = [1]>() c = Slice(p, a, e, o) h = Transpose<perm = [1, 0]>(c)"""
    head = "agraph (float[20, 24] x, float[20, 24] z, float[24, 36] w)"
    m = model(f"{head} => (float[36, 20] y, float[20, 36] d, float[18, 20] h) {{ {shared} {part} }}")
    plans = agrees(m, tmp_path, {"x": random(20, 24), "z": random(20, 24) + 1, "w": random(24, 36)})
    assert sorted(p.schedule.template for p in plans.plans) == ["gemm", "rowwise", "rowwise"]


@pytest.mark.parametrize("width", [4, 26, 33])
@pytest.mark.parametrize("rows", [1, 8, 35])
def test_lanes_along_rows_keep_what_a_reduction_stores_on_its_way(width: int, rows: int, tmp_path: Path) -> None:
    m = model(f"""g (float[R,{width}] x) => (float[R,{width}] s, float[R,1] n, int64[R,1] i) {{
        axis = Constant<value_ints=[1]>()
        s = Softmax(x)
        top = ReduceMax<axes=[1]>(s)
        hit = Equal(s, top)
        one = Cast<to=1>(hit)
        n = ReduceSum(one, axis)
        i = ArgMax<axis=1>(s)
    }}""")
    agrees(m, tmp_path, {"x": random(rows, width)})


def test_integers_of_tensors_wrap_around_and_nothing_is_concluded_from_sums_of_them(tmp_path: Path) -> None:
    m = model("""g (int64[N] x) => (int64[N] a, bool[N] b, int64[N] c) {
        six = Constant<value = int64 {6}>()
        three = Constant<value = int64 {3}>()
        more = Add(x, six)
        a = Max(more, x)
        b = Less(x, more)
        triple = Mul(x, three)
        c = Mod(triple, three)
    }""")
    top = np.iinfo(np.int64).max
    agrees(m, tmp_path, {"x": np.array([0, 5, -7, top, top - 3, -top - 1, top // 2], np.int64)})


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("rows", ["8", "H"])
def test_a_resize_on_its_own_is_compiled(mode: str, rows: str, tmp_path: Path) -> None:
    m = model(f"""g (float[1,64,{rows},8] x) => (float[1,64,A,64] y) {{
        s = Constant<value_floats=[1.0, 1.0, 8.0, 8.0]>()
        y = Resize<mode="{mode}">(x, , s)
    }}""")
    plans = agrees(m, tmp_path, {"x": random(1, 64, 8, 8)})
    assert not plans.refused


@pytest.mark.parametrize("sizes", [(1, 6, 5), (3, 7, 9)])
@pytest.mark.parametrize("features", [24, 40])
def test_steps_on_the_input_of_a_1x1_convolution_run_as_it_is_read(sizes, features: int, tmp_path: Path) -> None:
    constants = f"float[{features},300,1,1] w, float[300] s, float[300] t"
    m = model(f"""g (float[N,300,H,W] x, {constants}) => (float[N,{features},H,W] y) {{
        n = BatchNormalization(x, s, t, t, s)
        r = Relu(n)
        c = Conv(r, w)
        y = Sigmoid(c)
    }}""")
    del m.graph.input[1:]
    rng = np.random.default_rng(0)
    for name, shape in (("w", (features, 300, 1, 1)), ("s", (300,)), ("t", (300,))):
        array = (rng.random(shape, np.float32) + 0.1) / (17 if name == "w" else 1)
        m.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    plans = agrees(m, tmp_path, {"x": random(sizes[0], 300, *sizes[1:])})
    assert [p.schedule.template for p in plans.plans] == ["gemm"]


def test_steps_that_another_node_wants_as_well_run_once(tmp_path: Path) -> None:
    m = model("""g (float[1,8,6,6] x, float[24,8,1,1] w) => (float[1,24,6,6] y, float[1,8,6,6] r) {
        r = Relu(x)
        y = Conv(r, w)
    }""")
    plans = agrees(m, tmp_path, {"x": random(1, 8, 6, 6), "w": random(24, 8, 1, 1)})
    assert len(plans.plans) == 2
