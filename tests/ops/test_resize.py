"""What linear Resize makes of infinities: onnxruntime weighs neighbours with 0, and so do kernels."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.verify import ort
from tests.frontend.onnx_text import initializer, model
from tests.ops.test_given import compiled


@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((4, 4), (1, 2)), ((4, 4), (2, 1)), ((4, 4, 4), (1, 1, 2)), ((1, 2, 4, 4), (1, 1, 2, 1)),
        ((1, 2, 4, 4), (1, 1, 2, 2)), ((1, 4, 4, 2), (1, 2, 1, 1)), ((1, 4, 4, 2), (1, 2, 2, 1)),
        ((1, 1, 3, 3, 3), (1, 1, 1, 2, 1)),
    ],
)  # fmt: skip
def test_infinities_spread_as_in_onnxruntime(shape, scales, at):
    dims = ",".join(map(str, shape))
    m = model(
        'y = Resize<mode="linear">(x, , s)', f"(float[{dims}] x) => (float[{','.join('abcde'[: len(shape)])}] y)", 18
    )
    m.graph.initializer.append(initializer("s", np.array(scales, np.float32)))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    x[tuple(min(at, n - 1) for n in shape)] = np.inf
    want = ort.run(ort.session(m, threads=1), {"x": x})["y"]
    np.testing.assert_allclose(compiled(m, {"x": x}), want, rtol=1e-6)
