"""The check before anything is written: the bundle, saved to a private folder, against the model it came from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Protocol

from onnxfuse.config import Config
from onnxfuse.errors import VerifyError
from onnxfuse.ir.bodies import BodyFiles
from onnxfuse.verify import ort
from onnxfuse.verify.bodies import BodiesJob
from onnxfuse.verify.child import Ahead, Begin, Job, apart, bodies_apart
from onnxfuse.verify.compare import Report


class Pair(Protocol):
    """The files of a bundle: an emit.bundle.Staged, as far as this file needs it."""

    @property
    def model(self) -> Path: ...

    @property
    def library(self) -> Path | None: ...

    @property
    def bodies(self) -> tuple[BodyFiles, ...]: ...


class Bundle(Protocol):
    """A pipeline.Bundle, as far as this file needs it."""

    def staged(self, path: str | PathLike[str]) -> AbstractContextManager[Pair]: ...


def ahead(model: object, config: Config) -> AbstractContextManager[Ahead | None]:
    """Begin with what `verify_pair` needs of a model in a file, while the rest is made; see `Ahead`."""
    if not config.verify.enabled or config.tune or not isinstance(model, str | PathLike):
        return nullcontext()
    return Ahead(Begin(Path(model), config.verify, _custom(config)))


def _custom(config: Config) -> tuple[Path, ...]:
    """Libraries of the custom ops the model itself uses."""
    return tuple(Path(lib) for lib in config.custom_op_libraries)


def verify_bundle(
    model: ort.Source, bundle: Bundle, folder: Path, config: Config, begun: Ahead | None = None
) -> tuple[Report, ...]:
    """Write to `folder` and compare there (see `verify_pair`)."""
    original = ort.in_file(model, folder / "original.onnx")
    with bundle.staged(folder / "model.onnx") as pair:
        called = ort.describe(model)
        return verify_pair(original, pair.model, pair.library, config, called=called, bodies=pair.bodies, begun=begun)


def verify_pair(
    model: Path,
    saved: Path,
    library: Path | None,
    config: Config,
    *,
    called: str = "",
    bodies: Sequence[BodyFiles] = (),
    begun: Ahead | None = None,
) -> tuple[Report, ...]:
    """Compare without and with the library, in a process of its own; all reports when they agree, bodies' last.

    Raises VerifyError: E_MISMATCH, whose `reports` attribute holds the comparison for printing, or E_VERIFY_CRASH.
    `called` is how reports and messages name the original, when not by its path; `begun` is a child that has begun
    with this model and config.
    """
    called = called or ort.describe(model)
    libraries = (None, library) if library is not None else (None,)
    job = Job(model, saved, libraries, config.verify, _custom(config))
    reports = tuple(replace(r, reference=called.strip("'")) for r in apart(job, begun))
    if bodies and all(r.ok for r in reports):
        inner = BodiesJob(model, tuple(bodies), libraries, config.verify, _custom(config))
        reports += bodies_apart(inner)
    narrowed = reports[0].narrowed if not config.overwrite_input_shape and not config.dim_params else ()
    if all(r.ok for r in reports) and not narrowed:
        return reports
    reasons = [r.summary() for r in reports if not r.ok] + [f"fixed dimensions: {n}" for n in narrowed]
    raise MismatchError(called, reasons, reports)


class MismatchError(VerifyError):
    """E_MISMATCH, with the reports that show it."""

    def __init__(self, model: str, reasons: Sequence[str], reports: tuple[Report, ...]) -> None:
        super().__init__(
            "E_MISMATCH",
            f"the optimized {model} does not agree with the original; nothing was written",
            "; ".join(reasons),
            "this is a bug in onnxfuse, or tolerances too tight for this model: see --rtol, --atol, --allow-mismatches",
        )
        self.reports = reports
