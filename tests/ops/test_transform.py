"""Fourier transforms: which lengths become products, and how near these are to the exact sums."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.ir.loops import Opaque
from tests.frontend.onnx_text import model
from tests.ops.test_given import compiled, loops


@pytest.mark.parametrize("n", [10, 60, 64, 256])
def test_a_transform_is_as_near_to_the_exact_one_as_sums_of_floats_are(n):
    x = np.random.default_rng(n).standard_normal((3, n, 1)).astype(np.float32)
    y = compiled(model("y = DFT<axis = 1, onesided = 1>(x)", f"(float[b,{n},1] x) => (float[b,m,2] y)"), {"x": x})
    exact = np.fft.rfft(x[..., 0].astype(np.float64))
    np.testing.assert_allclose(y[..., 0] + 1j * y[..., 1], exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("n", "why"), [(66, "a transform of 66 elements"), (512, "with 524288 factors"), ("n", "a transform of n elements")]
)
def test_longer_transforms_stay_with_the_runtime(n, why):
    (item,) = loops("y = DFT(x, , a)", f"(float[b,{n},1] x) => (float[b,m,2] y) <int64 a = {{1}}>").items
    assert isinstance(item, Opaque)
    assert why in str(item.refusal)
