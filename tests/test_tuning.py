"""--tune gives back what loses, keeps what wins, and says what it measured. Times are invented, but for one run."""

from __future__ import annotations

import onnx.parser
import pytest

from onnxfuse import pipeline, tuning
from onnxfuse.config import Config
from onnxfuse.inspection import inspect
from onnxfuse.tuning import NF_MEASURED_SLOWER
from onnxfuse.verify.tune import Candidate, KernelsJob, Measured, measure_kernels

MODEL = onnx.parser.parse_model(
    """
<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 64] x, float[M, 7] m) => (float[M] z, float[N, 16] c) <float[64, 16] w = {0}> {
    a = Exp(x)
    b = Neg(a)
    z = ReduceMax <axes = [1], keepdims = 0> (m)
    c = MatMul(b, w)
}
""".replace("<float[64, 16] w = {0}>", "<float[64, 16] w = {" + ", ".join(["0.5"] * 1024) + "}>")
)


def measured(name: str, low: float, high: float) -> Measured:
    return Measured(name, (low + high) / 2, low, high, 1.0, 1)


@pytest.fixture
def times(monkeypatch):
    """Invent the measurements: kernels by a part of their name, whole models in order."""

    def invent(kernels: dict[str, tuple[float, float]], models: list[float]) -> None:
        names = [p.kernel.name for p in pipeline.optimize(MODEL, Config()).plans.plans]
        rows = tuple(measured(n, *next((v for k, v in kernels.items() if k in n), (2.0, 2.1))) for n in names)
        monkeypatch.setattr(tuning, "measure_kernels", lambda job: rows)
        monkeypatch.setattr(tuning, "measure_models", lambda job: tuple(models[: len(job.candidates)]))

    return invent


def tuned() -> pipeline.Bundle:
    return pipeline.optimize(MODEL, Config(tune=True))


def given_back(bundle: pipeline.Bundle) -> set[str]:
    return {n.op for n in inspect(bundle.partition, bundle.plans).left if n.code == NF_MEASURED_SLOWER}


def test_a_kernel_that_loses_is_given_back_with_its_number(times):
    times({"reducemax": (0.5, 0.7)}, [1.5, 1.6])
    bundle = tuned()
    assert given_back(bundle) == {"ReduceMax"}
    (left,) = inspect(bundle.partition, bundle.plans).left
    assert "0.60 of the time" in left.why
    assert "ReduceMax" in [n.op_type for n in bundle.model.graph.node]
    assert bundle.tuning is not None
    assert (bundle.tuning.ratio, bundle.tuning.rolled_back) == (1.6, 1)


def test_a_close_call_stays(times):
    times({"reducemax": (0.8, 1.0)}, [1.5])
    assert given_back(tuned()) == set()


def test_the_whole_model_has_the_last_word(times):
    times({"reducemax": (0.5, 0.7)}, [1.5, 1.5 + tuning.NOISE / 2])
    assert given_back(tuned()) == set()


def test_a_model_that_loses_as_a_whole_is_left_as_it_is(times):
    times({"reducemax": (0.5, 0.7)}, [0.7, 0.9])
    bundle = tuned()
    assert bundle.library is None
    assert {n.domain for n in bundle.model.graph.node} == {""}
    assert bundle.tuning is not None
    assert bundle.tuning.ratio == 1.0


def test_within_the_noise_is_no_loss(times):
    times({}, [1.0 - tuning.NOISE / 2])
    assert given_back(tuned()) == set()


def test_nobody_calls_a_kernel_that_is_not_in_the_library(times):
    times({"reducemax": (0.5, 0.7)}, [1.5, 1.6])
    plans = tuned().plans
    assert {c.kernel for c in plans.calls.values()} == {p.kernel for p in plans.plans}


def test_every_kernel_is_measured_on_what_reaches_it(tmp_path):
    original = tmp_path / "original.onnx"
    original.write_bytes(MODEL.SerializeToString())
    written = pipeline.optimize(MODEL, Config()).save(tmp_path / "out.onnx")
    found = measure_kernels(KernelsJob(original, (Candidate(written.model, written.library),)))
    assert {m.op_type for m in found} == {n.op_type for n in onnx.load(written.model).graph.node}
    assert all(m.ratio_low <= m.ratio <= m.ratio_high for m in found)
