"""verify/mapped.py: weights stay in the file where only our kernels read them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxfuse
from onnxfuse.config import VerifyConfig
from onnxfuse.verify import ort
from onnxfuse.verify.compare import compare_many
from onnxfuse.verify.mapped import mapped_session

N = 256  # N * N f32 are enough to be left in the file
RNG = np.random.default_rng(0)


def source(body, signature=f"(float[2,{N}] x) => (float[2,{N}] y)", names=("w",), dtype=np.float32):
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {signature} {{ {body} }}')
    for name in names:
        array = (RNG.random((N, N)) / N).astype(dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def optimized(proto, tmp_path):
    written = onnxfuse.optimize(proto, verify=False).save(tmp_path / "o.onnx")
    assert written.library is not None
    return written


def mapped(written):
    return mapped_session(written.model, level=ort.Level.DISABLE, threads=1, libraries=[written.library])


def check(proto, written, weights):
    made = mapped(written)
    assert made is not None
    assert len(made.weights) == weights
    dtype = np.float16 if "float16" in str(made.session.get_inputs()[0].type) else np.float32
    x = RNG.random((2, N)).astype(dtype)
    (expected,) = ort.session(proto).run(None, {"x": x})
    (found,) = made.session.run(None, {"x": x})
    assert np.allclose(found, expected, rtol=1e-2 if dtype is np.float16 else 1e-4)


def test_weights_of_kernels_stay_in_the_file(tmp_path):
    proto = source("a = MatMul(x, w) \n y = Relu(a)")
    check(proto, optimized(proto, tmp_path), weights=1)


@pytest.mark.parametrize("pad", range(4))
def test_what_others_read_is_copied_out_of_the_file(tmp_path, pad):
    proto = source("y = MatMul(x, w)")
    proto.doc_string = "d" * (pad + 1)  # moves all that follows
    onnx.save(proto, tmp_path / "m.onnx")
    made = mapped_session(tmp_path / "m.onnx", level=ort.Level.DISABLE, threads=1, libraries=[])
    assert made is not None
    assert (len(made.weights), len(made.copies)) == (0, 1)
    x = RNG.random((2, N)).astype(np.float32)
    (expected,) = ort.session(proto).run(None, {"x": x})
    assert np.array_equal(made.session.run(None, {"x": x})[0], expected)


def test_an_initializer_that_a_caller_may_override_stays_in_the_message(tmp_path):
    proto = source("y = MatMul(x, w)", f"(float[2,{N}] x, float[{N},{N}] w) => (float[2,{N}] y)")
    onnx.save(proto, tmp_path / "m.onnx")
    made = mapped_session(tmp_path / "m.onnx", level=ort.Level.DISABLE, threads=1, libraries=[])
    assert made is not None
    assert (made.weights, made.copies) == ((), ())
    x, w = RNG.random((2, N)).astype(np.float32), np.ones((N, N), np.float32)
    assert np.allclose(made.session.run(None, {"x": x, "w": w})[0], x @ w, rtol=1e-4)


@pytest.mark.parametrize("pad", range(4))
def test_the_place_in_the_file_does_not_matter(tmp_path, pad):
    proto = source("a = MatMul(x, w) \n b = Add(a, a) \n c = MatMul(b, v) \n y = Relu(c)", names=("w", "v"))
    proto.doc_string = "d" * (pad + 1)  # moves all that follows
    check(proto, optimized(proto, tmp_path), weights=2)


def test_a_branch_counts_as_another_reader(tmp_path):
    body = "a = MatMul(x, w) \n y = Relu(a)"
    proto = source(body, f"(float[2,{N}] x, bool c) => (float[2,{N}] y, float[{N},{N}] z)")
    then, other = (parser.parse_graph(f"g () => (float[{N},{N}] r) {{ r = {op}(w) }}") for op in ("Neg", "Abs"))
    node = onnx.helper.make_node("If", ["c"], ["z"], then_branch=then, else_branch=other)
    proto.graph.node.append(node)
    written = optimized(proto, tmp_path)
    made = mapped(written)
    assert made is not None
    assert made.weights == ()
    x = RNG.random((2, N)).astype(np.float32)
    feeds = {"x": x, "c": np.array(True)}
    for found, expected in zip(made.session.run(None, feeds), ort.session(proto).run(None, feeds), strict=True):
        assert np.allclose(found, expected, rtol=1e-4)


def test_half_precision_weights(tmp_path):
    n = f"float16[2,{N}]"
    proto = source("a = MatMul(x, w) \n y = Relu(a)", f"({n} x) => ({n} y)", dtype=np.float16)
    check(proto, optimized(proto, tmp_path), weights=1)


def test_small_models_and_refused_ones_take_the_ordinary_way(tmp_path):
    small = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Exp(x) }')
    onnx.save(small, tmp_path / "s.onnx")
    options = {"level": ort.Level.DISABLE, "threads": 1, "libraries": ()}
    assert mapped_session(tmp_path / "s.onnx", **options) is None
    proto = source("a = MatMul(x, w) \n y = NoSuchOp(a)")
    onnx.save(proto, tmp_path / "r.onnx")
    assert mapped_session(tmp_path / "r.onnx", **options) is None


def test_a_lean_comparison_says_the_same(tmp_path):
    proto = source("a = MatMul(x, w) \n y = Relu(a)")
    written = optimized(proto, tmp_path)
    both = [None, written.library]
    plain = compare_many(proto, written.model, both, config=VerifyConfig())
    assert compare_many(proto, written.model, both, config=VerifyConfig(), lean=True) == plain
