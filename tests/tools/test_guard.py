"""tools/guard.py: the kernels of whole models stay inside their tensors."""

from pathlib import Path

import guard
import numpy as np
import pytest
from suites import cases as suites_cases

MODELS = Path(__file__).resolve().parents[2] / "models"


def checked(*names: str) -> list[guard.Found]:
    return guard.guard([MODELS / f"{name}.onnx" for name in names])


def test_small_models():
    conv, softmax = checked("conv_add_relu", "softmax")
    assert (conv.model, conv.kernels, conv.templates, conv.findings) == ("conv_add_relu", 1, ("gemm",), ())
    assert (softmax.model, softmax.kernels, softmax.runs, softmax.findings) == ("softmax", 1, 2, ())


def test_cases_of_operators_run_on_their_own_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "cases", lambda suites: [c for c in suites_cases(suites) if c.name == "test_gather_0"])
    models = guard.node_models(tmp_path, 1)
    assert [m.parent.name for m in models] == ["test_gather_0"]
    assert sorted(np.load(models[0].with_suffix(".npz"))) == ["data", "indices"]
    (found,) = guard.guard(models)
    assert (found.model, found.findings) == ("test_gather_0", ())
    assert found.runs


@pytest.mark.slow
def test_every_committed_model():
    found = checked("tiny_ocr", "tiny_resnet", "tiny_transformer")
    assert all(f.kernels > 5 for f in found)
    assert not [x for f in found for x in f.findings]


def test_a_model_nobody_takes_ends_nothing(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"no model")
    broken, softmax = guard.guard([tmp_path / "model.onnx", MODELS / "softmax.onnx"])
    assert (broken.model, broken.kernels) == (tmp_path.name, 0)
    assert softmax.runs == 2


def test_what_a_child_says_before_it_crashes_is_the_finding():
    log = guard._Log(MODELS / "softmax.onnx")
    for word, rest in (("at", "k1 (plan)"), ("ran", "rowwise"), ("at", "k2 (plan)"), ("wrong", "y: 3 elements differ")):
        log.hear(word, rest)
    assert log.found() == guard.Found("softmax", 2, 1, ("rowwise",), ("k2 (plan): y: 3 elements differ",))
