"""The small models, optimized in every mode, agree with onnxruntime at many shapes, with the library and without it."""

import functools
from collections.abc import Callable
from pathlib import Path

import check_models
import modelzoo
import onnx
import pytest
from fused import fused_nodes, library_of

from onnxfuse.config import Config, FusionConfig, FusionMode, VerifyConfig
from onnxfuse.ir.plan import Plans
from onnxfuse.pipeline import optimize
from onnxfuse.trace import Stopped, Trace
from onnxfuse.verify import ort
from onnxfuse.verify.values import compare_results

SMALL = {p.stem: p for p in modelzoo.small_models()}
INPUTS = {"mask": {"low": 0, "high": 2}}


# The modes between none and full differ in the grouping alone (tests/fuse): two models are enough for their results.
PAIRS = [
    (name, mode)
    for name in sorted(SMALL)
    for mode in FusionMode
    if mode in (FusionMode.NONE, FusionMode.FULL) or name in ("softmax", "tiny_ocr")
]
Build = Callable[[str, FusionMode], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The path of an optimized model; each is made once."""

    @functools.cache
    def make(name: str, mode: FusionMode) -> Path:
        bundle = optimize(SMALL[name], Config(fusion=FusionConfig(mode=mode)))
        return bundle.save(tmp_path_factory.mktemp(name) / f"{name}.onnx").model

    return make


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_results_agree_at_every_shape(build: Build, name: str, mode: FusionMode) -> None:
    path = build(name, mode)
    library = library_of(path)
    assert library is not None
    reference = ort.session(SMALL[name])
    contenders = [ort.session(path, libraries=[library]), ort.session(path)]
    dtypes = modelzoo.input_dtypes(SMALL[name])
    for case in check_models.SMALL_CASES[name]:
        fed = modelzoo.feeds(modelzoo.Model(name, "", {}, (), {}, INPUTS), case, dtypes)
        expected = ort.run(reference, fed)
        for session in contenders:
            bad = [o for o in compare_results(expected, ort.run(session, fed), VerifyConfig()) if not o.ok]
            assert not bad, case


@pytest.mark.parametrize("name", sorted(SMALL))
def test_everything_on_activations_is_compiled_and_runs_our_kernels(build: Build, name: str) -> None:
    path = build(name, FusionMode.FULL)
    result = onnx.load(path)
    onnx.checker.check_model(result, full_check=True)
    family = "transformer" if name == "tiny_transformer" else "cnn"
    assert [n.name for n in check_models.violations(result, family)] == []
    library = library_of(path)
    assert library is not None
    case = check_models.SMALL_CASES[name][0]
    fed = modelzoo.feeds(modelzoo.Model(name, "", {}, (), {}, INPUTS), case, modelzoo.input_dtypes(SMALL[name]))
    ran = set(ort.profile(path, fed, level=ort.Level.ALL, libraries=[library]))
    assert set(fused_nodes(result).items()) <= ran


def kernels(name: str, mode: FusionMode) -> int:
    """How many kernels a model gets in this mode; nothing is compiled."""
    trace = Trace()
    trace.stop_after = "plan"
    with pytest.raises(Stopped) as stopped:
        optimize(SMALL[name], Config(fusion=FusionConfig(mode=mode)), trace)
    plans = stopped.value.result
    assert isinstance(plans, Plans)
    return len(plans.calls)


def test_a_better_mode_makes_fewer_kernels() -> None:
    none, tvm, canfuse, full = (kernels("tiny_transformer", mode) for mode in FusionMode)
    assert none > tvm
    assert none > canfuse >= full
