"""A model that can be run, whole or in parts. A source -> Model.

`opened` makes one session, or, where the weights of a model in files do not fit in one (VerifyConfig.whole), a row of
smaller models that run one after another (parts.py). Who compares need not know which.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import onnxruntime

from onnxfuse.config import VerifyConfig
from onnxfuse.verify import ort, steps
from onnxfuse.verify.inputs import InputSpec, Sample, samples_of, specs
from onnxfuse.verify.mapped import Mapped, mapped_session

if TYPE_CHECKING:
    from onnxfuse.verify.parts import Cut

Names = list[tuple[str, str]]  # (name, type)
Results = dict[str, ort.Result]
Step = Callable[[str], None]

_EXTERNAL = b"\n\x08location"  # how a tensor in another file is written: key 1 of its first entry
_SMALL = 1 << 16  # bytes of a file that is looked through without taking it apart


@dataclass(frozen=True, slots=True)
class Interface:
    """What callers of a model see."""

    specs: tuple[InputSpec, ...]
    outputs: Names
    overridable: Names

    @property
    def inputs(self) -> Names:
        return [(s.name, s.type) for s in self.specs]


class Model(Protocol):
    """Something that computes outputs from inputs as onnxruntime does, and refuses them with what onnxruntime raises.

    parts     sessions, one after another, that a run takes
    """

    @property
    def interface(self) -> Interface: ...

    @property
    def parts(self) -> int: ...

    def run(self, feeds: ort.Feeds, /) -> Results: ...

    def run_each(self, samples: Sequence[Sample], /) -> Iterator[Results | Exception]:
        """The outputs for each sample, or how it was refused. UsageError where a part does not load."""
        ...

    def node_by_node(
        self, feeds: ort.Feeds, library: str | os.PathLike[str], libraries: ort.Libraries, /
    ) -> list[steps.NodeResult]:
        """Every node of ours on the original's values (steps.py); none where the model is not judged so."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class How:
    """The way a model is run. `called` is its name in the steps, which `step` hears as they begin."""

    libraries: ort.Libraries = ()
    level: ort.Level = ort.Level.DISABLE
    threads: int = 0
    called: str = "the model"
    step: Step = lambda _: None

    def options(self) -> onnxruntime.SessionOptions:
        return ort.options(level=self.level, threads=self.threads, libraries=self.libraries)


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A model in one session."""

    session: onnxruntime.InferenceSession
    source: ort.Source
    how: How
    mapped: Mapped | None = None

    @property
    def interface(self) -> Interface:
        sess = self.session
        overridable = sorted((v.name, v.type) for v in sess.get_overridable_initializers())
        return Interface(specs(sess), [(v.name, v.type) for v in sess.get_outputs()], overridable)

    @property
    def parts(self) -> int:
        return 1

    def run(self, feeds: ort.Feeds) -> Results:
        return ort.run(self.session, feeds)

    def run_each(self, samples: Sequence[Sample]) -> Iterator[Results | Exception]:
        for sample in samples:
            self.how.step(f"running {self.how.called} on {describe(sample)}")
            try:
                yield self.run(sample.feeds)
            except ort.ORT_ERRORS as exc:
                yield exc

    def node_by_node(
        self, feeds: ort.Feeds, library: str | os.PathLike[str], libraries: ort.Libraries
    ) -> list[steps.NodeResult]:
        model = steps.load(self.source)
        return steps.node_by_node(model, feeds, library, libraries) if steps.stepped(model) else []


def opened(source: ort.Source, how: How, config: VerifyConfig, *, lean: bool = False) -> Model:
    """The model, loaded if it runs whole. `lean` leaves weights in the file where it can (mapped.py).

    Raises UsageError where onnxruntime refuses the model or a library.
    """
    parts = in_parts(source, how, config)
    if parts is not None:
        return parts
    how.step(f"loading {how.called}")
    given = {"level": how.level, "threads": how.threads, "libraries": how.libraries}
    mapped = mapped_session(source, **given) if lean and isinstance(source, Path) else None  # type: ignore[arg-type]
    return Whole(mapped.session if mapped is not None else ort.session(source, **given), source, how, mapped)  # type: ignore[arg-type]


def in_parts(source: ort.Source, how: How, config: VerifyConfig) -> Cut | None:
    """The model, if it is one in a file whose weights do not fit in one session."""
    if not isinstance(source, str | os.PathLike) or not os.path.isfile(source) or not large(Path(source), config.whole):
        return None
    from onnxfuse.verify.parts import cut  # here: most processes that compare do without onnx

    return cut(Path(source), how, config)


def samples(
    model: Model, config: VerifyConfig, wanted: Sequence[InputSpec] | None = None
) -> Iterator[tuple[Sample, Results]]:
    """Inputs that `config` asks for and the model accepts, and its outputs (inputs.py)."""
    defaults = [name for name, _ in model.interface.overridable]
    return samples_of(model.run, config, wanted or model.interface.specs, defaults)


def describe(sample: Sample) -> str:
    """How steps call inputs."""
    shapes = ", ".join(f"{name}:{','.join(map(str, dims))}" for name, dims in sample.shapes.items())
    return f"{sample.label} ({shapes})" if shapes else sample.label


def large(path: Path, limit: int) -> bool:
    """More than `limit` bytes, or with weights in other files, whose size is not known."""
    size = path.stat().st_size
    if not 0 < size <= limit:
        return True
    if size > _SMALL:
        from onnxfuse.frontend.wire import scan  # here as well

        scanned = scan(path)
        if scanned is not None:
            return _EXTERNAL in scanned[0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(_EXTERNAL) >= 0
