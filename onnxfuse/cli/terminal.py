"""What the user sees meanwhile and afterwards."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.errors import UsageError

if TYPE_CHECKING:
    from onnxfuse.trace import Trace


def require_file(path: Path) -> None:
    """Raises UsageError E_NO_FILE when there is none."""
    if path.is_file():
        return
    problem = "is a folder" if path.is_dir() else "does not exist"
    raise UsageError(
        "E_NO_FILE", f"{str(path)!r} {problem}", f"looked in {Path.cwd()}", "give the path of an .onnx file"
    )


class Progress:
    """Stages on standard error: a line each with -v, one line that changes on a terminal, nothing elsewhere."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.live = sys.stderr.isatty() and not verbose
        self.begin = time.perf_counter()

    def __enter__(self) -> None:
        """Nothing to show yet."""

    def __exit__(self, *_: object) -> None:
        """Leave a clean line to whatever is printed next, errors included."""
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def starts(self, stage: str) -> None:
        if self.live:
            passed = time.perf_counter() - self.begin
            print(f"\r\x1b[K{stage} ({passed:.0f} s)", end="", file=sys.stderr, flush=True)

    def ends(self, stage: str, seconds: float) -> None:
        if self.verbose:
            print(f"{stage:<10} {seconds:8.3f} s", file=sys.stderr)

    @contextlib.contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """A stage that the pipeline does not know."""
        self.starts(stage)
        start = time.perf_counter()
        yield
        self.ends(stage, time.perf_counter() - start)


def new_trace(model: Path, progress: Progress) -> Trace:
    """A trace that reports the stages' times, and knows the command that shows more."""
    from onnxfuse.trace import Trace

    return Trace(progress=progress.ends, reproduce=reproduce(model))


def reproduce(model: Path) -> str:
    """The command that shows the stages of this run."""
    return f"onnxfuse trace {shlex.quote(str(model))}"


def print_json(data: object) -> None:
    """Data for machines, on standard output."""
    print(json.dumps(data, indent=2))
