"""The check before anything is written: the bundle, saved to a private folder, against the model it came from."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Protocol

from onnxfuse.config import Config
from onnxfuse.errors import VerifyError
from onnxfuse.verify import ort
from onnxfuse.verify.compare import Report, compare_many


class Saveable(Protocol):
    """A pipeline.Bundle, as far as this file needs it."""

    def save(self, path: str | PathLike[str]) -> object: ...


def verify_bundle(
    model: ort.Source, bundle: Saveable, folder: Path, config: Config, custom_op_libraries: Sequence[Path] = ()
) -> tuple[Report, ...]:
    """Save to `folder` and compare there (see `verify_pair`)."""
    saved = folder / "model.onnx"
    bundle.save(saved)
    library = saved.with_suffix(".so")
    return verify_pair(model, saved, library if library.exists() else None, config, custom_op_libraries)


def verify_pair(
    model: ort.Source, saved: Path, library: Path | None, config: Config, custom_op_libraries: Sequence[Path] = ()
) -> tuple[Report, ...]:
    """Compare without and with the library; all reports when they agree.

    Raises VerifyError E_MISMATCH; its `reports` attribute holds the comparison for printing.
    """
    libraries = [None, library] if library is not None else [None]
    reports = compare_many(
        model, saved, libraries, config=config.verify, custom_op_libraries=custom_op_libraries, threads=0
    )
    narrowed = reports[0].narrowed if not config.overwrite_input_shape and not config.dim_params else ()
    if all(r.ok for r in reports) and not narrowed:
        return reports
    reasons = [r.summary() for r in reports if not r.ok] + [f"fixed dimensions: {n}" for n in narrowed]
    raise MismatchError(ort.describe(model), reasons, reports)


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
