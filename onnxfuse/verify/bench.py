"""Speed of models against each other, in onnxruntime, interleaved: every round runs each contestant once in turn.

A round gives one ratio per contestant (time of the first / its own time: above 1 is faster), and the median over the
rounds is reported. What slows the machine down for a while slows a whole round, and the ratio stays.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from onnxfuse.errors import UsageError
from onnxfuse.verify import ort

Call = Callable[[], object]

_CLEAR = 1.5  # upper quartile of the ratios over the lower one, at most, for a result that means something
_SLICE = 0.02  # seconds one contestant runs per round, so that the clock's grain does not show


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model and how it is run."""

    name: str
    model: ort.Source
    libraries: tuple[str | os.PathLike[str], ...] = ()
    level: ort.Level = ort.Level.ALL


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one run; `ratio` = time of the first contestant / own time, with quartiles over the rounds."""

    name: str
    median_ms: float
    best_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    load_ms: float

    @property
    def clear(self) -> bool:
        """The rounds agree well enough to say which is faster: on a busy machine they do not."""
        return self.ratio_low > 1.0 or self.ratio_high <= _CLEAR * self.ratio_low


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All contestants on one set of inputs."""

    inputs: Mapping[str, tuple[int, ...]]
    threads: int
    rounds: int
    timings: tuple[Timing, ...] = field(default=())

    def json(self) -> dict[str, object]:
        return asdict(self)


def bench(
    contestants: Sequence[Contestant],
    feeds: ort.Feeds,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    threads: int = 1,
    seconds: float = 5.0,
    rounds: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchReport:
    """Time the contestants in turn for about `seconds` altogether, or exactly `rounds` rounds."""
    calls: list[Call] = []
    loads: list[float] = []
    for c in contestants:
        start = clock()
        sess = ort.session(c.model, level=c.level, threads=threads, libraries=c.libraries)
        loads.append(clock() - start)
        calls.append(ort.prepared(sess, feeds))
    repeats = [_repeats(call, clock) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    begin, done = clock(), 0
    while done < (rounds or 3) or (rounds is None and clock() - begin < seconds):
        # Forth and back: whoever comes first in a round is not always the same.
        for i in range(len(calls)) if done % 2 == 0 else reversed(range(len(calls))):
            times[i].append(_time(calls[i], repeats[i], clock))
        done += 1
    timings = tuple(
        _timing(c.name, own, times[0], load) for c, own, load in zip(contestants, times, loads, strict=True)
    )
    return BenchReport(shapes, threads, done, timings)


def _repeats(call: Call, clock: Callable[[], float]) -> int:
    """Warm up and find how many runs fill a slice."""
    try:
        call()
    except ort.ORT_ERRORS as exc:
        raise UsageError("E_INPUT_REFUSED", "a model refuses these inputs", " ".join(str(exc).split())) from exc
    start = clock()
    call()
    call()
    once = max((clock() - start) / 2, 1e-6)
    return max(1, min(1000, int(_SLICE / once)))


def _time(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _timing(name: str, own: Sequence[float], first: Sequence[float], load: float) -> Timing:
    ratios = [a / b for a, b in zip(first, own, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Timing(
        name,
        statistics.median(own) * 1e3,
        min(own) * 1e3,
        statistics.median(ratios),
        quartiles[0],
        quartiles[2],
        load * 1e3,
    )
