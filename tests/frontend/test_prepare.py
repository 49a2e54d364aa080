"""frontend/prepare.py and its passes: what goes, what must stay, and why (numbers of cases are those of CASES.md)."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxfuse.config import PrepareConfig
from onnxfuse.emit.functions import node_proto
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.protos import ScaledConst
from onnxfuse.frontend.read import read
from onnxfuse.ir.graph import Graph
from tests.frontend.onnx_text import initializer, model, ops, prepared

F32 = TensorProto.FLOAT


def simplified(made: onnx.ModelProto, **config) -> Graph:
    return prepared(read(made), **config).graph


def notes(made: onnx.ModelProto, **config) -> list[str]:
    return [n.code for n in prepared(read(made), **config).notes]


def run(made: onnx.ModelProto, graph: Graph | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The model, or the model with its nodes and constants replaced by those of `graph`, in onnxruntime as written."""
    m = onnx.ModelProto()
    m.CopyFrom(made)
    if graph is not None:
        del m.graph.node[:]
        del m.graph.initializer[:]
        m.graph.node.extend(node_proto(n, graph.opset) for n in graph.nodes)
        m.graph.initializer.extend(initializer(v.name, c.numpy()) for v, c in graph.consts.items())
        m.graph.initializer.extend(initializer(v.name, c.numpy()) for v, c in graph.defaults.items())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(m.SerializeToString(), options).run(None, feeds)


def assert_same(made: onnx.ModelProto, graph: Graph, feeds: dict[str, np.ndarray], exact: bool = True) -> None:
    for a, b in zip(run(made, None, feeds), run(made, graph, feeds), strict=True):
        assert a.dtype == b.dtype
        if exact:
            assert a.tobytes() == b.tobytes()
        else:
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


X4 = {"x": np.array([-0.0, np.nan, np.inf, -1.5], np.float32)}


# --- dead code -------------------------------------------------------------------------------------------------------
def test_nodes_without_readers_go_and_outputs_stay():
    made = model("a = Exp(x) b = Neg(a) y = Relu(x)", "(float[4] x) => (float[4] y, float[4] a)")
    assert ops(simplified(made)) == ["Exp", "Relu"]


def test_constants_without_readers_go():
    made = model("y = Relu(x)")
    made.graph.initializer.append(initializer("w", np.ones(9, np.float32)))
    assert not simplified(made).consts


def test_captures_are_uses():
    """P73: a body reads the value, nobody else does."""
    body = """one = Identity(x) y = If(c) <then_branch = g1 () => (float[4] t) { t = Identity(one) },
                                          else_branch = g2 () => (float[4] e) { e = Neg(one) }>"""
    made = model(body, "(float[4] x, bool c) => (float[4] y)")
    graph = simplified(made)
    assert ops(graph) == ["Identity", "If"]
    assert_same(made, graph, X4 | {"c": np.array(True)})


def test_a_captured_constant_stays_under_its_name():
    body = """y = If(c) <then_branch = g1 () => (float[4] t) { t = Add(x, w) },
      else_branch = g2 () => (float[4] e) { e = Neg(x) }>"""
    made = model(body, "(float[4] x, bool c) => (float[4] y)")
    made.graph.initializer.append(initializer("w", np.ones(4, np.float32)))
    graph = simplified(made)
    assert [v.name for v in graph.consts] == ["w"]


# --- folding ---------------------------------------------------------------------------------------------------------
def test_constants_fold_through_chains():
    made = model("a = Add(w, w) b = Exp(a) c = Mul(b, w) y = Add(x, c)")
    made.graph.initializer.append(initializer("w", np.arange(4, dtype=np.float32)))
    graph = simplified(made)
    assert ops(graph) == ["Add"]
    assert [v.name for v in graph.consts] == ["c"]
    assert_same(made, graph, X4)


def test_shape_arithmetic_of_static_shapes_folds():
    made = model(
        "s = Shape(x) i = Constant<value = int64[1] {0}>() d = Gather(s, i) m = Constant<value = int64[1] {-1}>() "
        "t = Concat<axis = 0>(d, m) y = Reshape(x, t)",
        "(float[2,3,4] x) => (float[2,12] y)",
    )
    graph = simplified(made)
    assert ops(graph) == ["Reshape"]
    assert next(iter(graph.consts.values())).numpy().tolist() == [2, -1]


def test_symbolic_dimensions_are_not_baked_in():
    """P42."""
    made = model(
        "s = Shape(x) o = ConstantOfShape<value = float[1] {1.0}>(s) y = Add(x, o)", "(float[N,3] x) => (float[N,3] y)"
    )
    graph = simplified(made)
    assert "Shape" in ops(graph)
    for n in (1, 7):
        assert_same(made, graph, {"x": np.ones((n, 3), np.float32)})


def generator_model(kind: str) -> onnx.ModelProto:
    text, weights = {
        "ConstantOfShape": ("g = ConstantOfShape(a)", {"a": np.array([30000, 30000])}),
        "Expand": ("g = Expand(f, a)", {"f": np.ones(1, np.float32), "a": np.array([30000, 30000])}),
        "Tile": ("g = Tile(f, a)", {"f": np.ones(1, np.float32), "a": np.array([900000000])}),
        "Range": ("r = Range(a, b, c) g = Cast<to = 1>(r)", {"a": np.array(0), "b": np.array(10**9), "c": np.array(1)}),
        "OneHot": (
            "g = OneHot(a, b, f)",
            {"a": np.arange(1000), "b": np.array(10**6), "f": np.array([0, 1], np.float32)},
        ),
        "EyeLike": ("t = ConstantOfShape(a) g = EyeLike(t)", {"a": np.array([30000, 30000])}),
        "Pad": ("g = Pad(f, a)", {"f": np.ones(1, np.float32), "a": np.array([0, 900000000])}),
        "Resize": (
            'g = Resize(f, "", a)',
            {"f": np.ones((1, 1), np.float32), "a": np.array([30000, 30000], np.float32)},
        ),
    }[kind]
    made = model(f"{text} m = ReduceMax<keepdims = 0>(g) y = Add(x, m)")
    made.graph.initializer.extend(initializer(k, v) for k, v in weights.items())
    return made


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Expand", "Tile", "Range", "OneHot", "EyeLike", "Pad", "Resize"])
def test_huge_results_are_never_evaluated(kind):
    """P87: gigabytes out of nothing; the calculator must not even be asked."""
    source = read(generator_model(kind))
    asked = []

    def calculator(node, arrays):
        asked.append(node.op.name)

    found = prepare(source.graph, PrepareConfig(), calculator, source.hints)
    assert kind not in asked
    assert any(n.code in ("FOLD_GROWTH", "FOLD_SIZE") for n in found.notes)


def test_growth_is_measured_against_what_is_freed():
    made = model("t = Transpose(w) y = MatMul(x, t)", "(float[4,600] x) => (float[4,500] y)")
    made.graph.initializer.append(initializer("w", np.ones((500, 600), np.float32)))
    assert ops(simplified(made)) == ["MatMul"]  # P70: the file does not grow
    made.graph.node.append(helper.make_node("Identity", ["w"], ["z"]))
    made.graph.output.append(helper.make_tensor_value_info("z", F32, [500, 600]))
    assert "FOLD_GROWTH" in notes(made)
    assert "FOLD_GROWTH" not in notes(made, fold_growth=1 << 21)


def test_many_small_growths_are_limited_together():
    """Outer products of two rows: each within the limit, all of them a thousand times the file."""
    text = " ".join(f"p{k} = MatMul(a, b{k}) y{k} = Add(x, p{k})" for k in range(8))
    made = model(text, "(float[1] x) => (" + ", ".join(f"float[M,N] y{k}" for k in range(8)) + ")")
    made.graph.initializer.append(initializer("a", np.ones((256, 1), np.float32)))
    made.graph.initializer.extend(initializer(f"b{k}", np.full((1, 256), k, np.float32)) for k in range(8))
    assert "FOLD_GROWTH" not in notes(made)
    found = simplified(made, fold_total=1 << 20)
    assert [n.op.name for n in found.nodes].count("MatMul") == 4


@pytest.mark.parametrize(
    ("op", "a", "b"),
    [
        ("Div", [8, -8, 7, 0], [2, 0, 0, 0]),
        ("Mod", [8, -8, 7, 0], [2, 0, 0, 0]),
        ("Div", [np.iinfo(np.int32).min], [-1]),
    ],
)
def test_integer_division_that_traps_is_left_alone(op, a, b):
    """P18."""
    made = model(f"y = {op}(a, b)", "() => (int32[N] y)")
    made.graph.initializer.extend([initializer("a", np.array(a, np.int32)), initializer("b", np.array(b, np.int32))])
    found = prepared(read(made))
    assert ops(found.graph) == [op]
    assert [n.code for n in found.notes] == ["FOLD_DIVISOR"]


def test_the_folder_and_the_runtime_agree_on_mod():
    """P20."""
    made = model("y = Mod(a, b) z = Mod<fmod = 1>(c, d)", "() => (int64[1] y, float[1] z)")
    values = {
        "a": np.array([-5]),
        "b": np.array([3]),
        "c": np.array([-5.5], np.float32),
        "d": np.array([3], np.float32),
    }
    made.graph.initializer.extend(initializer(k, v) for k, v in values.items())
    graph = simplified(made)
    assert not graph.nodes
    assert {v.name: c.numpy().tolist() for v, c in graph.consts.items()} == {"y": [1], "z": [-2.5]}


@pytest.mark.parametrize(
    "text",
    [
        "r = RandomNormal<shape = [4]>() y = Add(x, r)",
        "r = RandomNormalLike(w) y = Add(x, r)",
        "r = Bernoulli(w) y = Add(x, r)",
    ],
)
def test_random_ops_are_never_folded(text):
    """P104."""
    made = model(text)
    made.graph.initializer.append(initializer("w", np.full(4, 0.5, np.float32)))
    assert len(simplified(made).nodes) == 2


def test_range_folds():
    made = model("r = Range(a, b, c) y = Add(x, r)")
    made.graph.initializer.extend(initializer(k, np.array(v, np.float32)) for k, v in {"a": 0, "b": 4, "c": 1}.items())
    assert ops(simplified(made)) == ["Add"]


def test_overridable_initializers_are_never_folded():
    made = model("a = Exp(w) y = Add(x, a)", "(float[4] x, float[4] w) => (float[4] y)")
    made.graph.initializer.append(initializer("w", np.ones(4, np.float32)))
    graph = simplified(made)
    assert ops(graph) == ["Exp", "Add"]
    assert_same(made, graph, X4 | {"w": np.zeros(4, np.float32)})


def test_foreign_ops_and_bodies_are_not_folded():
    made = model("a = foreign.Foo(w) y = Add(x, a)")
    made.graph.initializer.append(initializer("w", np.ones(4, np.float32)))
    assert ops(simplified(made)) == ["Foo", "Add"]


def test_quantised_weights_stay_quantised():
    """onnxruntime finds its integer kernels by the pattern."""
    made = model("f = DequantizeLinear(w, s) y = Add(x, f)")
    made.graph.initializer.extend([initializer("w", np.ones(4, np.int8)), initializer("s", np.array(0.5, np.float32))])
    assert ops(simplified(made)) == ["DequantizeLinear", "Add"]


def test_a_calculator_that_declines_leaves_a_note():
    source = read(generator_model("Range"))
    made = model("a = Exp(w) y = Add(x, a)")
    made.graph.initializer.append(initializer("w", np.ones(4, np.float32)))
    source = read(made)
    found = prepare(source.graph, PrepareConfig(), lambda node, arrays: None, source.hints)
    assert [str(n) for n in found.notes] == ["Exp_0: FOLD_EVALUATE (Exp: onnxruntime did not compute it)"]


# --- nodes that change nothing ---------------------------------------------------------------------------------------
NOTHING = [
    ("t = Identity(x)", "float[4]"),
    ("t = Cast<to = 1>(x)", "float[4]"),
    ("t = Transpose<perm = [0, 1]>(x)", "float[2,3]"),
    ("t = Transpose(x)", "float[4]"),
    ("s = Constant<value = int64[2] {0, -1}>() t = Reshape(x, s)", "float[2,3]"),
    ("s = Constant<value = int64[2] {-1, 3}>() t = Reshape(x, s)", "float[N,3]"),
    ("t = Concat<axis = 0>(x)", "float[4]"),
    ("t = Sum(x)", "float[4]"),
    ("p = Constant<value = int64[2] {0, 0}>() t = Pad(x, p)", "float[4]"),
    ("s = Constant<value = int64[1] {1}>() t = Expand(x, s)", "float[4]"),
    ("s = Constant<value = int64[1] {1}>() t = Tile(x, s)", "float[4]"),
    ("i = Constant<value = int64[1] {0}>() j = Constant<value = int64[1] {99}>() t = Slice(x, i, j)", "float[4]"),
    ("t = Dropout(x)", "float[4]"),
    ("f = Constant<value = bool {0}>() r = Constant<value = float {0.5}>() t = Dropout(x, r, f)", "float[4]"),
]
SOMETHING = [
    ("z = Constant<value = float {0.0}>() t = Add(x, z)", "float[4]"),  # -0.0 + 0.0 = 0.0 (P68)
    ("t = Clip(x)", "float[4]"),
    ("t = Cast<to = 11>(x)", "float[4]"),
    ("t = Transpose<perm = [1, 0]>(x)", "float[3,3]"),
    ("s = Constant<value = int64[2] {1, 2}>() t = Expand(x, s)", "float[2,1]"),
    ("p = Constant<value = int64[2] {1, -1}>() t = Pad(x, p)", "float[4]"),
    ("a = Constant<value = int64[1] {-1}>() b = Constant<value = int64[1] {-9}>() i = Constant<value = int64[1] {0}>() "
     "t = Slice(x, a, b, i, a)", "float[4]"),
    ("s = Constant<value = int64[2] {0, -1}>() t = Reshape(x, s)", "float[2,3,2]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), NOTHING)
def test_what_changes_nothing_goes(text, kind):
    made = model(
        f"a = Neg(x) {text.replace('(x', '(a')} y = Exp(t)", f"({kind} x) => (float[?] y)".replace("[?]", "[A]")
    )
    graph = simplified(made)
    assert ops(graph) == ["Neg", "Exp"]
    assert len(graph.nodes[0].origin) == 2  # the node that went is remembered


@pytest.mark.parametrize(("text", "kind"), SOMETHING)
def test_what_changes_something_stays(text, kind):
    made = model(f"{text} y = Neg(t)", f"({kind} x) => (float[A] y)")
    assert len(simplified(made).nodes) == 2


def test_a_dropout_whose_mask_is_used_stays():
    made = model("t, m = Dropout(x) y = Neg(t)", "(float[4] x) => (float[4] y, bool[4] m)")
    assert ops(simplified(made)) == ["Dropout", "Neg"]


@pytest.mark.parametrize(
    ("text", "signature", "expected"),
    [
        ("y = Identity(x)", "(float[4] x) => (float[4] y)", ["Identity"]),
        ("a = Identity(x) y = Transpose<perm = [0]>(a)", "(float[4] x) => (float[4] y)", ["Transpose"]),  # P49
        ("a = Neg(x) y = Identity(a)", "(float[4] x) => (float[4] y)", ["Neg"]),
        ("a = Neg(x) y = Identity(a) z = Identity(a)", "(float[4] x) => (float[4] y, float[4] z)", ["Neg", "Identity"]),
        ("a = Neg(x) y = Identity(a)", "(float[4] x) => (float[4] y, float[4] a)", ["Neg", "Identity"]),
        ("a = Neg(x) b = Exp(a) y = Identity(a)", "(float[4] x) => (float[4] y, float[4] b)", ["Neg", "Exp"]),
    ],
)
def test_outputs_keep_their_names(text, signature, expected):
    made = model(text, signature)
    graph = simplified(made)
    assert ops(graph) == expected
    assert [v.name for v in graph.outputs] == [o.name for o in made.graph.output]
    assert_same(made, graph, X4)


def test_outputs_that_are_inputs_or_initializers_stay():
    """P51."""
    made = model("a = Neg(x)", "(float[4] x) => (float[4] x, float[2] w)")
    made.graph.initializer.append(initializer("w", np.ones(2, np.float32)))
    graph = simplified(made)
    assert not graph.nodes
    assert [v.name for v in graph.consts] == ["w"]


# --- common subexpressions -------------------------------------------------------------------------------------------
def test_equal_nodes_merge_and_remember_both():
    made = model("[p] a = Exp(x) [q] b = Exp(x) y = Mul(a, b)")
    graph = simplified(made)
    assert ops(graph) == ["Exp", "Mul"]
    assert graph.nodes[0].origin == ("p", "q")
    assert_same(made, graph, X4)


def test_equal_outputs_keep_both_names():
    """P51 (microsoft/onnxruntime#7312)."""
    made = model(
        "a = Add(x, z) b = Add(x, z) u = Identity(a) v = Identity(b)",
        "(int64[4,4] x, int64[4,4] z) => (int64[4,4] u, int64[4,4] v)",
    )
    graph = simplified(made)
    assert [v.name for v in graph.outputs] == ["u", "v"]
    feeds = {"x": np.ones((4, 4), np.int64), "z": np.ones((4, 4), np.int64)}
    assert_same(made, graph, feeds)


def test_an_output_gives_its_name_to_its_twin():
    made = model("a = Exp(x) y = Exp(x) z = Neg(a)", "(float[4] x) => (float[4] y, float[4] z)")
    graph = simplified(made)
    assert ops(graph) == ["Exp", "Neg"]
    assert_same(made, graph, X4)


@pytest.mark.parametrize(
    "text",
    [
        "a = Elu<alpha = 0.0>(x) b = Elu<alpha = -0.0>(x)",
        "a = Cast<to = 1>(n) b = Cast<to = 11>(n)",
        "a = foreign.Foo(x) b = foreign.Foo(x)",
        "a = RandomNormalLike(x) b = RandomNormalLike(x)",
        "a = RandomNormal<shape = [4]>() b = RandomNormal<shape = [4]>()",
    ],
)
def test_nodes_that_differ_or_draw_are_not_merged(text):
    made = model(text, "(float[4] x, int64[4] n) => (float[4] a, float[4] b)".replace("float[4] a", "float[A] a"))
    made.graph.node.extend([helper.make_node("Neg", ["a"], ["a2"]), helper.make_node("Neg", ["b"], ["b2"])])
    made.graph.output[0].name, made.graph.output[1].name = "a2", "b2"
    assert len(simplified(made).nodes) == 4


def test_equal_constants_make_equal_nodes_and_stay_apart():
    """P71."""
    made = model("a = Add(x, v) b = Add(x, w) y = Mul(a, b)")
    made.graph.initializer.extend(initializer(k, np.ones(4, np.float32)) for k in "vw")
    assert ops(simplified(made)) == ["Add", "Mul"]
    assert ops(simplified(made, skip=frozenset({"cse"}))) == ["Add", "Add", "Mul"]


# --- BatchNormalization ----------------------------------------------------------------------------------------------
def bn_model(
    layer: str, shape: tuple[int, ...], channels: int, weights: dict[str, np.ndarray], rank: int = 4, more: str = ""
):
    dims = ",".join(map(str, shape))
    out = ",".join("ABCDE"[:rank])
    made = model(
        f"c = {layer} y = BatchNormalization<epsilon = 0.001>(c, s, b, m, v) {more}",
        f"(float[{dims}] x) => (float[{out}] y)",
    )
    rng = np.random.default_rng(1)
    stats = {k: rng.uniform(0.5, 2, channels).astype(np.float32) for k in "sbmv"}
    made.graph.initializer.extend(initializer(k, a) for k, a in {**stats, **weights}.items())
    return made


def weights(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


LAYERS = {
    "conv": ("Conv(x, w)", (2, 3, 5, 5), 4, {"w": weights(4, 3, 3, 3)}, 4),
    "conv with bias": ("Conv(x, w, k)", (2, 3, 5, 5), 4, {"w": weights(4, 3, 3, 3), "k": weights(4)}, 4),
    "grouped conv": ("Conv<group = 2>(x, w)", (2, 4, 5, 5), 6, {"w": weights(6, 2, 3, 3)}, 4),
    "1-d conv": ("Conv(x, w)", (2, 3, 9), 4, {"w": weights(4, 3, 3)}, 3),
    "transposed conv": ("ConvTranspose(x, w)", (2, 3, 5, 5), 4, {"w": weights(3, 4, 3, 3)}, 4),
    "grouped transposed conv": (
        "ConvTranspose<group = 2>(x, w, k)", (2, 6, 5, 5), 8, {"w": weights(6, 4, 3, 3), "k": weights(8)}, 4,
    ),
    "gemm": ("Gemm<alpha = 0.5>(x, w)", (2, 3), 4, {"w": weights(3, 4)}, 2),
    "gemm with beta": ("Gemm<beta = 0.5, transB = 1>(x, w, k)", (2, 3), 4, {"w": weights(4, 3), "k": weights(4)}, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_normalisation_folds_into_the_weights(kind):
    layer, shape, channels, arrays, rank = LAYERS[kind]
    made = bn_model(layer, shape, channels, arrays, rank)
    graph = simplified(made)
    assert ops(graph) == [layer.split("(")[0].split("<")[0]]
    assert graph.nodes[0].origin == (made.graph.node[0].name or f"{ops(graph)[0]}_0", "BatchNormalization_1")
    assert "BatchNormalization" in ops(simplified(made, skip=frozenset({"bn_into_conv", "affine"})))
    assert_same(made, graph, {"x": weights(*shape)}, exact=False)


def test_scaled_weights_are_computed_in_parts_and_when_read(monkeypatch):
    made = bn_model("Conv(x, w)", (1, 3, 9, 9), 70, {"w": weights(70, 3, 3, 3)})
    graph = simplified(made)
    value = graph.nodes[0].inputs[1]
    assert value is not None
    scaled = graph.consts[value]
    assert isinstance(scaled, ScaledConst)
    whole = scaled.numpy()
    expected = (scaled.base.numpy().astype(np.float64) * scaled.factor).astype(np.float32)
    assert whole.tobytes() == expected.tobytes()
    monkeypatch.setattr("onnxfuse.frontend.protos._AT_ONCE", 100)
    assert scaled.numpy().tobytes() == expected.tobytes()
    assert scaled.tensor("t", whole.shape).tobytes() == expected.tobytes()


def test_shared_weights_are_copied():
    """P65."""
    made = bn_model(
        "Conv(x, w)",
        (1, 3, 4, 4),
        4,
        {"w": weights(4, 3, 1, 1)},
        more="d = Conv(x, w) z = BatchNormalization(d, b, s, v, m)",
    )
    made.graph.output.append(helper.make_tensor_value_info("z", F32, None))
    graph = simplified(made)
    assert ops(graph) == ["Conv", "Conv"]
    assert len({n.inputs[1] for n in graph.nodes}) == 2
    assert "w" not in {v.name for v in graph.consts}
    assert_same(made, graph, {"x": weights(1, 3, 4, 4)}, exact=False)


def test_a_result_with_another_reader_is_not_folded():
    made = bn_model("Conv(x, w)", (1, 3, 4, 4), 4, {"w": weights(4, 3, 1, 1)}, more="z = Neg(c)")
    made.graph.output.append(helper.make_tensor_value_info("z", F32, None))
    found = prepared(read(made))
    assert ops(found.graph) == ["Conv", "Mul", "Add", "Neg"]
    assert found.notes[0].code == "BN_KEPT"


def test_overridable_weights_are_not_folded():
    made = bn_model("Conv(x, w)", (1, 3, 4, 4), 4, {"w": weights(4, 3, 1, 1)})
    made.graph.input.append(helper.make_tensor_value_info("w", F32, [4, 3, 1, 1]))
    found = prepared(read(made))
    assert ops(found.graph) == ["Conv", "Mul", "Add"]
    assert found.notes[0].why == "'w' is not a constant"


@pytest.mark.parametrize("variance", [-1.0, np.nan, 0.0])
def test_weights_that_would_overflow_are_not_folded(variance):
    made = bn_model("Conv(x, w)", (1, 3, 4, 4), 4, {"w": np.full((4, 3, 1, 1), 3e38, np.float32)})
    for t in made.graph.initializer:
        if t.name == "v":
            t.CopyFrom(initializer("v", np.full(4, variance, np.float32)))
    assert ops(simplified(made, skip=frozenset({"affine"}))) == ["Conv", "BatchNormalization"]


def test_training_is_not_folded():
    """P34."""
    made = bn_model("Conv(x, w)", (1, 3, 4, 4), 4, {"w": weights(4, 3, 1, 1)})
    made.graph.node[1].attribute.append(helper.make_attribute("training_mode", 1))
    made.graph.node[1].output.extend(["rm", "rv"])
    graph = simplified(made)
    assert ops(graph) == ["Conv", "BatchNormalization"]
    assert [v.name for v in graph.nodes[1].outputs] == ["y", "rm", "rv"]


# --- all of it -------------------------------------------------------------------------------------------------------
def test_nothing_to_do_leaves_the_nodes_as_they_are():
    source = read(model("y = Relu(x)"))
    typed = prepared(source).graph
    assert prepare(typed, PrepareConfig(), lambda node, arrays: None, source.hints).graph.nodes == typed.nodes


def test_every_pass_can_be_skipped():
    made = model("a = Exp(w) b = Identity(a) d = Neg(x) y = Add(x, b)")
    made.graph.initializer.append(initializer("w", np.ones(4, np.float32)))
    everything = frozenset({"fold", "cse", "identity", "pad_into_conv", "bn_into_conv", "dead_code"})
    assert ops(simplified(made, skip=everything)) == ["Exp", "Identity", "Neg", "Add"]


@pytest.mark.parametrize("skip", ["fold", "cse", "identity", "pad_into_conv", "bn_into_conv", "dead_code"])
def test_no_pass_needs_another(skip):
    made = bn_model(
        "Conv(x, w)",
        (1, 3, 4, 4),
        4,
        {"w": weights(4, 3, 1, 1)},
        more="a = Identity(y) z = Exp(a) u = Exp(y) q = Mul(z, u)",
    )
    made.graph.output.append(helper.make_tensor_value_info("q", F32, None))
    assert_same(made, simplified(made, skip=frozenset({skip})), {"x": weights(1, 3, 4, 4)}, exact=False)


def test_a_long_chain_goes_through():
    """P93, in small: a pass that is quadratic would be felt here."""
    nodes = [helper.make_node("Relu" if k % 2 else "Identity", [f"v{k}"], [f"v{k + 1}"]) for k in range(2000)]
    info = [helper.make_tensor_value_info(n, F32, [4]) for n in ("v0", "v2000")]
    made = helper.make_model(
        helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)]
    )
    assert len(simplified(made).nodes) == 1000


# --- padding ---------------------------------------------------------------------------------------------------------
PADDED = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,2,H,W] x) => (float[1,3,P,Q] y) {{
    w = Constant<value = float[3,2,1,1] {{1,2,3,4,5,6}}>()
    pads = Constant<value_ints=[{pads}]>()
    p = Pad{mode}(x, pads{value})
    y = Conv<kernel_shape=[1,1], pads=[0,1,0,0]>(p, w)
}}"""


@pytest.mark.parametrize(
    ("pads", "mode", "value", "goes"),
    [
        ("0,0,1,2,0,0,3,4", "", "", True),
        ("0,0,1,2,0,0,3,4", '<mode="reflect">', "", False),  # not zeros
        ("0,0,-1,0,0,0,0,0", "", "", False),  # crops
        ("0,1,0,0,0,0,0,0", "", "", False),  # a channel more
    ],
)
def test_zero_padding_becomes_the_pads_of_the_convolution(pads, mode, value, goes):
    made = onnx.parser.parse_model(PADDED.format(pads=pads, mode=mode, value=value))
    if pads.startswith("0,1"):
        made.graph.node[0].attribute[0].t.dims[1] = 3
        made.graph.node[0].attribute[0].t.float_data.extend([7, 8, 9])
    graph = simplified(made)
    assert ops(graph) == (["Conv"] if goes else ["Pad", "Conv"])
    if goes:
        assert graph.nodes[0].attrs["pads"] == (1, 3, 3, 4)
    assert_same(made, graph, {"x": weights(1, 2, 5, 6)})
