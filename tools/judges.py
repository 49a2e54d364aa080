"""Who runs the models of a conformance run: the onnxruntime of this process, or the one of another interpreter."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

Outputs = dict[str, Any]


class Refused(Exception):  # noqa: N818 - the name of what happened, not of an error of ours
    """onnxruntime does not load or run the model; `loaded` tells which."""

    def __init__(self, why: str, loaded: bool) -> None:
        super().__init__(" ".join(why.split())[:500])
        self.loaded = loaded


class Judge(Protocol):
    """Runs models."""

    def results(
        self, model: Path, library: Path | None, feeds: Sequence[Mapping[str, object]], optimized: bool
    ) -> list[Outputs]:
        """Outputs by name, for each feed. Raises Refused.

        `optimized`: at ORT_ENABLE_ALL with two threads, else as plainly as it can.
        """
        ...

    def ran(self, model: Path, library: Path, feed: Mapping[str, object]) -> set[str]:
        """Names of the nodes that ran, by onnxruntime's profile."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """The onnxruntime of this process."""

    def results(
        self, model: Path, library: Path | None, feeds: Sequence[Mapping[str, object]], optimized: bool
    ) -> list[Outputs]:
        """See Judge."""
        from onnxfuse.errors import UsageError
        from onnxfuse.verify import ort

        refusals: tuple[type[Exception], ...] = (
            UsageError,
            *ort.ORT_ERRORS,
            NotImplementedError,
            TypeError,
            ValueError,
        )
        level, threads = (ort.Level.ALL, 2) if optimized else (ort.Level.DISABLE, 1)
        try:
            session = ort.session(model, level=level, threads=threads, libraries=[] if library is None else [library])
        except UsageError as error:
            raise Refused(f"{error.what}: {error.why}", loaded=False) from error
        try:
            return [ort.run(session, feed) for feed in feeds]
        except refusals as error:
            raise Refused(str(error), loaded=True) from error

    def ran(self, model: Path, library: Path, feed: Mapping[str, object]) -> set[str]:
        """See Judge."""
        from onnxfuse.verify import ort

        return {name for name, _ in ort.profile(model, feed, level=ort.Level.ALL, libraries=[library])}


class There:
    """The onnxruntime of another interpreter, in a process that serves until it dies (see tools/ortrun.py)."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.process: subprocess.Popen[bytes] | None = None

    def results(
        self, model: Path, library: Path | None, feeds: Sequence[Mapping[str, object]], optimized: bool
    ) -> list[Outputs]:
        """See Judge."""
        answer = self._ask("run", str(model), None if library is None else str(library), list(feeds), optimized)
        assert isinstance(answer, list)
        return answer

    def ran(self, model: Path, library: Path, feed: Mapping[str, object]) -> set[str]:
        """See Judge."""
        answer = self._ask("profile", str(model), str(library), [feed], True)
        assert isinstance(answer, set)
        return answer

    def _ask(self, *request: object) -> object:
        if self.process is None or self.process.poll() is not None:
            command = [self.python, str(Path(__file__).with_name("ortrun.py")), "--serve"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            send(self.process.stdin, request)
            kind, value = receive(self.process.stdout)
        except (EOFError, BrokenPipeError) as error:
            self.close()
            raise Refused(f"onnxruntime died: exit {self.process.returncode}", loaded=True) from error
        if kind == "done":
            return value
        raise Refused(str(value), loaded=kind == "run")

    def close(self) -> None:
        """End the process."""
        if self.process is None:
            return
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self.process.wait()


def send(pipe: IO[bytes], message: object) -> None:
    """One message: its length, then a pickle (protocol 4: any supported Python reads it)."""
    data = pickle.dumps(message, protocol=4)
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[str, object]:
    """The next message. Raises EOFError at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    kind, value = pickle.loads(pipe.read(int.from_bytes(head, "little")))
    return kind, value


def judge(python: str | None) -> Here | There:
    """This process, or the interpreter named."""
    return Here() if python in (None, sys.executable) else There(str(python))
