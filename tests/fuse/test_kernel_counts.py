"""How many kernels the usual blocks of networks become. Small replicas; tools/kernel_counts.py counts real models."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.ir.partition import Partition
from tests.fuse.dsl import FULL
from tests.fuse.numeric import expected, feeds, run_partition
from tests.templates.attentions import fused


def model(inputs: str, outputs: str, body: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A graph with seeded random weights; integers are shapes of Reshape."""
    made = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g ({inputs}) => ({outputs}) {{ {body} }}""")
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        if name.startswith("to"):
            array = np.array(shape)
        else:
            array = (rng.standard_normal(shape) / max(1, np.prod(shape[1:])) ** 0.5).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def kernels(p: Partition) -> list[str]:
    return ["+".join(c.node.op.name for c in g.members) for g in p.groups]


SOFTMAX = model("float[N, 16] x", "float[N, 16] y", "y = Softmax <axis = -1> (x)")
LAYER_NORM = model("float[N, 16] x", "float[N, 16] y", "y = LayerNormalization <axis = -1> (x, s, b)", s=(16,), b=(16,))
GELU = model(
    "float[N, 16] x",
    "float[N, 32] y",
    """m = MatMul (x, w) h = Add (m, b) r = Constant <value = float {1.4142135}> () d = Div (h, r) e = Erf (d)
    one = Constant <value = float {1}> () a = Add (e, one) p = Mul (h, a)
    half = Constant <value = float {0.5}> () y = Mul (p, half)""",
    w=(16, 32),
    b=(32,),
)
HARD_SWISH = model(
    "float[1, 8, 6, 6] x",
    "float[1, 8, 6, 6] y",
    "c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = HardSwish (c)",
    w=(8, 8, 3, 3),
    b=(8,),
)
BOTTLENECK = model(
    "float[1, 16, 6, 6] x",
    "float[1, 16, 6, 6] y",
    """a = Conv (x, w1, b1) r = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (r, w2, b1) s = Relu (c)
    d = Conv (s, w3, b3) t = Add (d, x) y = Relu (t)""",
    w1=(4, 16, 1, 1),
    w2=(4, 4, 3, 3),
    w3=(16, 4, 1, 1),
    b1=(4,),
    b3=(16,),
)
CONVNEXT = model(
    "float[1, 8, 5, 5] x",
    "float[1, 8, 5, 5] y",
    """c = Conv <group = 8, pads = [3, 3, 3, 3]> (x, w1, b1) t = Transpose <perm = [0, 2, 3, 1]> (c)
    n = LayerNormalization <axis = -1> (t, g, b1) m = MatMul (n, w2) h = Add (m, b2) r = Relu (h) o = MatMul (r, w3)
    p = Add (o, b1) q = Mul (p, g) u = Transpose <perm = [0, 3, 1, 2]> (q) y = Add (u, x)""",
    w1=(8, 1, 7, 7),
    b1=(8,),
    g=(8,),
    w2=(8, 32),
    b2=(32,),
    w3=(32, 8),
)
# The end of a stage of SegFormer: its tokens are an image for the next stage, and tokens for the head.
SEGFORMER = model(
    "float[1, 16, 8] x",
    "float[1, 12, 2, 2] y, float[1, 16, 4] z",
    """n = LayerNormalization <axis = -1> (x, g, b) i = Reshape (n, to_image) t = Transpose <perm = [0, 3, 1, 2]> (i)
    y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (t, w1, b1) f = Reshape (t, to_flat)
    k = Transpose <perm = [0, 2, 1]> (f) m = MatMul (k, w2) z = Add (m, b2)""",
    to_image=(1, 4, 4, 8),
    to_flat=(1, 8, 16),
    g=(8,),
    b=(8,),
    w1=(12, 8, 3, 3),
    b1=(12,),
    w2=(8, 4),
    b2=(4,),
)

BLOCKS = {
    "softmax": (SOFTMAX, 1),
    "layer norm": (LAYER_NORM, 1),
    "erf-GELU behind a product": (GELU, 1),
    "hard-swish behind a convolution": (HARD_SWISH, 1),
    "a bottleneck of ResNet": (BOTTLENECK, 3),
    "a block of ConvNeXt": (CONVNEXT, 5),
    "the end of a stage of SegFormer": (SEGFORMER, 3),
}
VIEWS = {"Transpose", "Reshape"}


@pytest.mark.parametrize("name", BLOCKS)
def test_kernels_of_a_block(name: str) -> None:
    made, most = BLOCKS[name]
    found = kernels(fused(made))
    assert len(found) <= most, found
    assert not [k for k in found if set(k.split("+")) <= VIEWS], "a kernel that only copies"


@pytest.mark.parametrize("name", [n for n in BLOCKS if "norm" not in n and "softmax" not in n])
def test_the_kernels_compute_the_block(name: str) -> None:
    loops = fused(BLOCKS[name][0]).loops
    given = feeds(loops, 1)
    got, split = run_partition(loops, FULL, given)
    assert split == []
    for out, array in expected(loops, given).items():
        np.testing.assert_allclose(got[out], array, rtol=1e-4, atol=1e-4)


def test_only_strided_windows_of_several_features_read_another_order() -> None:
    """Others have kernels that read planes: Winograd, depthwise."""
    for attributes, weights, views in (
        ("pads = [1, 1, 1, 1], strides = [2, 2]", (12, 8, 3, 3), 0),
        ("pads = [1, 1, 1, 1]", (12, 8, 3, 3), 1),
        ("pads = [1, 1, 1, 1], strides = [2, 2], group = 8", (8, 1, 3, 3), 1),
    ):
        made = model(
            "float[1, 4, 4, 8] x",
            f"float[1, {weights[0]}, {2 if 'strides' in attributes else 4}, {2 if 'strides' in attributes else 4}] y",
            f"t = Transpose <perm = [0, 3, 1, 2]> (x) y = Conv <{attributes}> (t, w)",
            w=weights,
        )
        assert sum(k == "Transpose" for k in kernels(fused(made))) == views
