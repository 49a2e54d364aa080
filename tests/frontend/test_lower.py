"""frontend/lower.py: one Compute per value of a covered node, an Opaque with a code for every other node."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.read import read
from onnxfuse.frontend.shapes import infer_types
from onnxfuse.ir.check import check
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.interp import run_loops
from onnxfuse.ir.loops import Compute, Opaque
from tests.frontend.onnx_text import initializer, model


def lowered(body: str, signature: str = "(float[4] x) => (float[4] y)", opset: int = 17, consts=()):
    m = model(body, signature, opset)
    m.graph.initializer.extend(consts)
    source = read(m)
    loops = lower(atomize(infer_types(source.graph, source.hints)))
    check(loops)
    return loops


def only(loops):
    (item,) = loops.items
    return item


def code(body: str, signature: str = "(float[4] x) => (float[4] y)", opset: int = 17) -> str:
    item = lowered(body, signature, opset).items[-1]
    return item.refusal.code if isinstance(item, Opaque) else "compiled"


def test_a_pointwise_node_is_its_body_over_the_broadcast_shape():
    item = only(lowered("y = Sub(x, z)", "(float[N,3] x, float[3] z) => (float[N,3] y)"))
    assert [str(a.extent) for a in item.axes] == ["N", "3"]
    assert str(item.body) == "%x[i, j] - %z[j]"


def test_a_reduction_has_its_own_axes_and_finish():
    item = only(lowered("y = ReduceMean<axes=[1], keepdims=0>(x)", "(float[N,8] x) => (float[N] y)"))
    assert isinstance(item, Compute)
    assert item.reduce is not None
    assert [str(a.extent) for a in item.reduce.axes] == ["8"]
    assert item.reduce.finish is not None


def test_f16_computes_in_f32_and_rounds_once_per_node():
    item = only(lowered("y = Add(x, x)", "(float16[4] x) => (float16[4] y)"))
    (rounded,) = item.roots
    assert rounded.dtype is DType.F16
    assert rounded.prim.name == "cast"
    assert rounded.args[0].dtype is DType.F32


def test_every_output_gets_its_own_compute():
    loops = lowered("y, z = Split<axis=0>(x)", "(float[4] x) => (float[2] y, float[2] z)")
    assert [i.out.name for i in loops.items] == ["y", "z"]
    assert loops.items[0].node is loops.items[1].node


@pytest.mark.parametrize(
    ("body", "signature", "expected"),
    [
        ("y = NonZero(x)", "(float[4] x) => (int64[1,N] y)", "UN_OPAQUE"),
        ("y = Shape(x)", "(float[N] x) => (int64[1] y)", "UN_SHAPE"),
        ("s = Shape(x)  y = Mul(s, s)", "(float[N] x) => (int64[1] y)", "UN_SHAPE"),
        ("y = StringConcat(x, x)", "(string[4] x) => (string[4] y)", "UN_OPAQUE"),
        ("y = Identity(x)", "(string[4] x) => (string[4] y)", "UN_DTYPE"),
        ("y, i = MaxPool<kernel_shape=[2]>(x)", "(float[1,1,4] x) => (float[1,1,3] y, int64[1,1,3] i)", "UN_ARITY"),
        ("y = Gather(x, i)", "(float[4] x, int64[2] i) => (float[2] y)", "compiled"),
        ("y = MatMul(x, z)", "(float[N,K] x, float[M,P] z) => (float[N,P] y)", "compiled"),
        ("y = MatMul(x, z)", "(float[N,K] x, float[K,P] z) => (float[N,P] y)", "compiled"),
        ("y = Concat<axis=0>(x, z)", "(float[N,A] x, float[M,B] z) => (float[P,A] y)", "compiled"),
    ],
)
def test_codes(body, signature, expected):
    assert code(body, signature, 20 if "String" in body else 17) == expected


@pytest.mark.parametrize(
    ("body", "x", "consts"),
    [
        ("y = Reshape(x, s)", "float[N]", {"s": [2, 3]}),
        ("y = Reshape(x, s)", "float[N,M]", {"s": [-1, 4]}),
        ("y = Squeeze(x, s)", "float[N,M]", {"s": [0]}),
        ("y, z = Split(x, s)", "float[N,M]", {"s": [1, 2]}),
        ("y = DepthToSpace<blocksize=2>(x)", "float[1,C,2,2]", {}),
        ("y = SpaceToDepth<blocksize=2>(x)", "float[1,4,H,2]", {}),
        ('y = Pad<mode="reflect">(x, s)', "float[N,M]", {"s": [0, 1, 0, 1]}),
    ],
)
def test_extents_that_must_agree_are_checked_by_the_kernel_or_left_to_the_runtime(body, x, consts):
    """A kernel would read past an end for inputs that onnxruntime reports."""
    given = [initializer(name, value) for name, value in consts.items()]
    loops = lowered(body, f"({x} x) => (float[P,Q] y)", consts=given)
    for item in loops.items:
        if isinstance(item, Opaque):
            assert item.refusal.code == "UN_DATA_DEPENDENT"
            assert item.node.outputs[0].type is not None, "the shape is known all the same"
        else:
            assert item.needs


def test_the_same_with_extents_that_fit():
    assert isinstance(
        only(lowered("y = Reshape(x, s)", "(float[N,12] x) => (float[N,3,4] y)", consts=[initializer("s", [0, 3, 4])])),
        Compute,
    )
    assert isinstance(
        only(lowered("y = Reshape(x, s)", "(float[N,M,8] x) => (float[P,8] y)", consts=[initializer("s", [-1, 8])])),
        Compute,
    )


def test_space_to_depth_crd_is_the_inverse_of_depth_to_space():
    body = 'a = DepthToSpace<blocksize=2, mode="CRD">(x)  y = SpaceToDepth<blocksize=2, mode="CRD">(a)'
    loops = lowered(body, "(float[1,8,2,3] x) => (float[1,8,2,3] y)", 28)
    x = np.arange(48, dtype=np.float32).reshape(1, 8, 2, 3)
    assert np.array_equal(run_loops(loops, {"x": x})["y"], x)
