"""Public bugs that are wrong values or crashes: onnxruntime at ORT_DISABLE_ALL is the judge of all variants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import onnxfuse

from .models import CASES, Case


def plain() -> ort.SessionOptions:
    """onnxruntime's optimised levels refuse or change some of these models themselves."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return options


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_value_is_onnxruntimes(case: Case, tmp_path: Path) -> None:
    model = case.model()
    bundle = onnxfuse.optimize(model, verify=False, include_subgraph=case.subgraphs)
    bundle.save(tmp_path / "out.onnx")
    assert [(o.name, o.type) for o in bundle.model.graph.output] == [(o.name, o.type) for o in model.graph.output]
    judge = ort.InferenceSession(model.SerializeToString(), plain())
    sessions = [ort.InferenceSession(tmp_path / "out.onnx", plain())]
    sessions += [onnxfuse.InferenceSession(tmp_path / "out.onnx", plain())] if bundle.library is not None else []
    for feed in case.feeds:
        expected = judge.run(None, dict(feed))
        for session in sessions:
            for a, b in zip(expected, session.run(None, dict(feed)), strict=True):
                same(case, np.asarray(a), np.asarray(b))


def same(case: Case, a: np.ndarray, b: np.ndarray) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if a.dtype.kind != "f":
        assert np.array_equal(a, b)
        return
    if case.bits:
        assert a.tobytes() == b.tobytes()
        return
    eps = float(np.finfo(a.dtype).eps)
    limit = 8 * eps if a.dtype == np.float16 else 64 * eps
    scale = np.nanmax(np.abs(a), initial=0.0, where=np.isfinite(a)) if a.size else 0.0
    np.testing.assert_allclose(b, a, rtol=limit, atol=limit * float(scale), equal_nan=True)
