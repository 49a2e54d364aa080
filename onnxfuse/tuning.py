"""--tune: give back to onnxruntime the groups whose kernels it beats on this machine. Finished -> Finished, Tuning.

    1. every distinct kernel is timed against onnxruntime on the same nodes and values (verify/tune.py)
    2. the groups of those that lose are refused (NF_MEASURED_SLOWER) and the model is written anew
    3. both models are timed whole against the original; the faster one stays. When neither is faster than the original,
       every group is given back: the result is then the simplified model.

In step 3 a difference within NOISE keeps the model that fuses more: what one machine cannot tell apart is no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from onnxfuse.config import Config
from onnxfuse.emit.bundle import Staged, staged
from onnxfuse.emit.model import Emission
from onnxfuse.errors import Refusal
from onnxfuse.files import private_folder
from onnxfuse.frontend.load import ModelLike
from onnxfuse.ir.plan import Library, Plans
from onnxfuse.verify import ort
from onnxfuse.verify.tune import Candidate, KernelsJob, Measured, ModelsJob, measure_kernels, measure_models

NF_MEASURED_SLOWER = "NF_MEASURED_SLOWER"
NOISE = 0.02  # of the ratio of whole models


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """The last stages' results for one set of plans."""

    plans: Plans
    library: Library | None
    emission: Emission


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured. `ratio` = time of the original / time of what is kept; `rolled_back`: groups given back."""

    kernels: tuple[Measured, ...]
    ratio: float
    rolled_back: int

    def json(self) -> dict[str, object]:
        return {
            "ratio": self.ratio,
            "rolled_back": self.rolled_back,
            "kernels": [k.json() for k in self.kernels],
        }


def tune(
    model: ModelLike,
    first: Finished,
    finish: Callable[[Plans], Finished],
    config: Config,
) -> tuple[Finished, Tuning]:
    """See the module docstring. Raises UsageError when no input is found that the model accepts."""
    if first.library is None:
        return first, Tuning((), 1.0, 0)
    with private_folder() as folder:
        original = ort.in_file(model, folder / "original.onnx")
        custom = tuple(Path(lib) for lib in config.custom_op_libraries)
        with _files(first, folder / "first.onnx", config) as a:
            kernels = measure_kernels(KernelsJob(original, (Candidate(a.model, a.library),), config.verify, custom))
            tried = [first]
            lost = slower(first.plans, {k.op_type: k for k in kernels if k.loses})
            if lost:
                tried.append(finish(without(first.plans, lost)))
            with _files(tried[-1], folder / "last.onnx", config) as b:
                files = [Candidate(s.model, s.library) for s in (a, b)][: len(tried)]
                ratios = measure_models(ModelsJob(original, tuple(files), config.verify, custom))
    return _choose(tried, ratios, kernels, finish)


def _files(made: Finished, path: Path, config: Config) -> AbstractContextManager[Staged]:
    image = made.library.image if made.library is not None else None
    return staged(made.emission, image, path, external_data=config.save_as_external_data)


def slower(plans: Plans, losers: Mapping[str, Measured]) -> dict[int, Refusal]:
    """The groups that call these kernels, each with its numbers."""
    return {
        gid: _refusal(losers[call.kernel.name].ratio, "the same nodes")
        for gid, call in plans.calls.items()
        if call.kernel.name in losers
    }


def without(plans: Plans, refused: Mapping[int, Refusal]) -> Plans:
    """These plans less the groups refused, and less the kernels nobody calls any more."""
    calls = {gid: call for gid, call in plans.calls.items() if gid not in refused}
    called = {call.kernel for call in calls.values()}
    kept = tuple(p for p in plans.plans if p.kernel in called)
    return replace(plans, plans=kept, calls=calls, refused={**plans.refused, **refused})


def _refusal(ratio: float, what: str) -> Refusal:
    return Refusal(NF_MEASURED_SLOWER, f"onnxruntime runs {what} in {ratio:.2f} of the time")


def _choose(
    tried: Sequence[Finished],
    ratios: Sequence[float],
    kernels: tuple[Measured, ...],
    finish: Callable[[Plans], Finished],
) -> tuple[Finished, Tuning]:
    best = max(range(len(tried)), key=lambda k: ratios[k] - (NOISE if k else 0.0))
    made, ratio = tried[best], ratios[best]
    if ratio < 1.0 - NOISE:
        plans = tried[0].plans
        made, ratio = finish(without(plans, dict.fromkeys(plans.calls, _refusal(ratio, "the model")))), 1.0
    given = len(made.plans.refused) - len(tried[0].plans.refused)
    return made, Tuning(kernels, ratio, given)


__all__ = ["NF_MEASURED_SLOWER", "Finished", "Tuning", "slower", "tune", "without"]
