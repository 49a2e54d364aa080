"""Whole optimized models against the original, as onnxruntime runs it at ORT_ENABLE_ALL; interleaved, see bench.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxfuse.config import VerifyConfig
from onnxfuse.verify.bench import Contestant, Timing, bench
from onnxfuse.verify.inputs import Sample
from onnxfuse.verify.running import How, opened, samples


@dataclass(frozen=True, slots=True)
class Candidate:
    """An optimized model in files."""

    model: Path
    library: Path | None


def speeds(
    original: Path,
    candidates: Sequence[Candidate],
    sample: Sample,
    *,
    custom_op_libraries: Sequence[Path] = (),
    threads: int = 0,
    seconds: float,
) -> tuple[Timing, ...]:
    """One Timing per candidate; `ratio` above 1: faster than the original. Raises UsageError for inputs refused."""
    contestants = [Contestant("original", original, tuple(custom_op_libraries))]
    contestants += [
        Contestant(c.model.name, c.model, (*custom_op_libraries, *([c.library] if c.library else [])))
        for c in candidates
    ]
    return bench(contestants, sample.feeds, sample.shapes, threads=threads, seconds=seconds).timings[1:]


def first_sample(original: Path, config: VerifyConfig, libraries: Sequence[Path] = (), threads: int = 0) -> Sample:
    """The user's data, or the first random inputs that the original accepts. Raises UsageError when there are none."""
    return next(samples(opened(original, How(libraries, threads=threads), config), config))[0]


__all__ = ["Candidate", "first_sample", "speeds"]
