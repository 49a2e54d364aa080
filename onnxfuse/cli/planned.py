"""The stages of `optimize` before any code, for the commands that explain them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from onnxfuse.cli.terminal import Progress, new_trace
from onnxfuse.config import Config

if TYPE_CHECKING:
    from onnxfuse.frontend.atomize import Atomized
    from onnxfuse.frontend.bodies import Scope
    from onnxfuse.frontend.rewrite import Note
    from onnxfuse.ir.graph import Graph
    from onnxfuse.ir.partition import Partition
    from onnxfuse.ir.plan import Plans

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planned:
    """Results of the stages up to the plan."""

    scopes: tuple[Scope, ...]
    atomized: tuple[Atomized, ...]
    whole: tuple[Partition, ...]  # before kernelize
    plans: Plans

    @property
    def originals(self) -> tuple[Graph, ...]:
        return tuple(s.source.graph for s in self.scopes)

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(dict.fromkeys(n for s in self.scopes for n in s.prepared.notes))


def planned(model: Path, config: Config, progress: Progress, last: str = "plan") -> Planned:
    """Run the stages up to `plan`, or to `kernelize` (then nothing is planned yet)."""
    from onnxfuse import pipeline
    from onnxfuse.frontend.atomize import Atomized
    from onnxfuse.frontend.bodies import Scope
    from onnxfuse.ir.partition import Partition
    from onnxfuse.ir.plan import Kernels, Plans
    from onnxfuse.trace import Stopped

    hook = new_trace(model, progress)
    hook.stop_after = last
    with progress, contextlib.suppress(Stopped):
        pipeline.optimize(model, config, hook, progress.starts)
    last_result = hook.result(last)
    if isinstance(last_result, Kernels):
        made = last_result
        last_result = Plans(made.partition, (), made.calls, made.refused, made.bodies)
    return Planned(
        _all_of(Scope, hook.result("bodies")),
        _all_of(Atomized, hook.results("atomize")),
        _all_of(Partition, hook.results("layout")),
        _typed(Plans, last_result),
    )


def _all_of(kind: type[T], values: object) -> tuple[T, ...]:
    assert isinstance(values, tuple), values
    return tuple(_typed(kind, v) for v in values)


def _typed(kind: type[T], value: object) -> T:
    assert isinstance(value, kind), value
    return value
