"""Work on compiled kernels in a process of its own. Job -> its result, or an error that says what crashed.

Kernels are machine code we made: one that reads a wrong address ends its process. It shall not end the caller's, and
the caller shall hear at which step it happened. The child imports what it needs to run models and no compiler, so most
of its memory is the model's. In: a pickled job on its standard input. Out, pickled: the name of each step as it begins,
then the result (a tuple) or the UsageError.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError, VerifyError
from onnxfuse.ir.bodies import BodyFiles
from onnxfuse.verify.bodies import BodiesJob, step_of
from onnxfuse.verify.compare import Original, Report, compare_many, original
from onnxfuse.verify.running import large
from onnxfuse.verify.speed import Candidate, first_sample, speeds

T_co = TypeVar("T_co", covariant=True)
_AHEAD_LIMIT = 1 << 30  # bytes of a model that is loaded ahead, at most
_KEPT_LINES = 5  # of what a child that crashed had printed
# Large blocks go back to the system when a session is gone: the next one needs the room (glibc would keep them).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of `compare_many`, for models in files."""

    reference: Path
    candidate: Path
    libraries: tuple[Path | None, ...]
    config: VerifyConfig = field(default_factory=VerifyConfig)
    custom_op_libraries: tuple[Path, ...] = ()
    threads: int = 0

    def run(self, step: Callable[[str], None] | None = None, known: Original | None = None) -> tuple[Report, ...]:
        reports = self._compared(step, known)
        if self.config.speed <= 0 or not all(r.ok for r in reports):
            return reports
        if step is not None:
            step("timing the original model and the optimized one")
        return tuple(self._timed(r, lib, known) for r, lib in zip(reports, self.libraries, strict=True))

    def _timed(self, report: Report, library: Path | None, known: Original | None) -> Report:
        """With the speed, if it is that of the kernels; two sessions live at a time."""
        if library is None:
            return report
        custom, inputs = self.custom_op_libraries, dict(report.runs[0].inputs)
        sample = known.pairs[0][0] if known is not None else None
        if sample is None or sample.shapes != inputs:  # the comparison had to find inputs that fit both models
            sample = first_sample(self.reference, replace(self.config, test_shapes=inputs), custom, self.threads)
        (timing,) = speeds(
            self.reference,
            [Candidate(self.candidate, library)],
            sample,
            custom_op_libraries=custom,
            threads=self.threads,
            seconds=self.config.speed,
        )
        return replace(report, speed=timing)

    def _compared(self, step: Callable[[str], None] | None, known: Original | None) -> tuple[Report, ...]:
        return compare_many(
            self.reference,
            self.candidate,
            self.libraries,
            config=self.config,
            custom_op_libraries=self.custom_op_libraries,
            threads=self.threads,
            step=step,
            lean=True,
            known=known,
        )


@dataclass(frozen=True, slots=True)
class Begin:
    """The part of a Job that needs no candidate, for `Ahead`.

    Not of large models: beside the caller's own copy there may be no room.
    """

    reference: Path
    config: VerifyConfig = field(default_factory=VerifyConfig)
    custom_op_libraries: tuple[Path, ...] = ()

    def run(self, step: Callable[[str], None]) -> Original | None:
        """None where the original does not run: the Job finds that again, and says it."""
        try:
            if large(self.reference, _AHEAD_LIMIT):
                return None
            return original(self.reference, config=self.config, custom_op_libraries=self.custom_op_libraries, step=step)
        except (UsageError, OSError):
            return None


class Work(Protocol[T_co]):
    """Something picklable to do, that says what it is about to do and returns a tuple."""

    def run(self, step: Callable[[str], None], /) -> tuple[T_co, ...]: ...


def apart(job: Work[T_co], ahead: Ahead | None = None) -> tuple[T_co, ...]:
    """Run the job in a child. Raises what it raised, VerifyError E_VERIFY_CRASH if it did not live to say.

    ahead: a child that has begun with the original of this very job.
    """
    return _apart(job, ahead=ahead)


class Ahead:
    """A child that loads and runs the original while the caller still makes the candidate; a context."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._log: BinaryIO | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Ahead:
        try:
            self._log = tempfile.TemporaryFile()
            self._process = _start(self._log)
            assert self._process.stdin is not None
            pickle.dump(self._begin, self._process.stdin)
            self._process.stdin.flush()
        except OSError:  # no new process to be had, or it is gone again: `apart` will say what is wrong
            self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        process, log = self.take()
        if process is not None:
            _end(process)
        if log is not None:
            log.close()

    def take(self) -> tuple[subprocess.Popen[bytes] | None, BinaryIO | None]:
        """The child and what it prints to; they are the caller's from now on."""
        found = self._process, self._log
        self._process = self._log = None
        return found


def bodies_apart(job: BodiesJob) -> tuple[Report, ...]:
    """The same for bodies; where an original ends the child (a branch may rely on its condition), without that one."""
    while True:
        try:
            return _apart(job, partial(_ended_by, job))
        except _EndedBy as ended:
            job = replace(job, skip=job.skip | {ended.number})


class _EndedBy(Exception):  # noqa: N818 - never leaves this file
    """The original of body `number` ended the child."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _ended_by(job: BodiesJob, step: str) -> None:
    found: BodyFiles | None = next((b for b in job.bodies if step.startswith(f"{step_of(b)}:")), None)
    if found is not None and "original" in step.removeprefix(step_of(found)):
        raise _EndedBy(found.number)


def _apart(
    job: Work[T_co], crashed: Callable[[str], None] | None = None, ahead: Ahead | None = None
) -> tuple[T_co, ...]:
    begun, printed = ahead.take() if ahead is not None else (None, None)
    with printed or tempfile.TemporaryFile() as log:
        try:
            process = begun or _start(log)
        except OSError:  # no new process to be had
            return job.run(lambda _: None)
        try:
            result = _talk(process, job)
        except _Gone as gone:
            if crashed is not None:
                crashed(gone.step)
            raise _crash(process.wait(), gone.step, _text(log)) from None
        finally:
            _end(process)
        print(_text(log), end="", file=sys.stderr)
        return result


# The child imports what its parent imported: the same sys.path, whatever made it so.
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from onnxfuse.verify.child import child_main; "
    "child_main()"
)


def _start(log: BinaryIO) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _START, json.dumps([p or os.getcwd() for p in sys.path])]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env={**_MALLOC, **os.environ}
    )


class _Gone(Exception):  # noqa: N818 - the end of a conversation, never leaves this file
    """The child ended without an answer; `step` is what it was at."""

    def __init__(self, step: str) -> None:
        super().__init__(step)
        self.step = step


def _talk(process: subprocess.Popen[bytes], job: Work[T_co]) -> tuple[T_co, ...]:
    assert process.stdin is not None
    assert process.stdout is not None
    step = "starting"
    try:
        pickle.dump(job, process.stdin)
        process.stdin.close()
        while isinstance(message := pickle.load(process.stdout), str):
            step = message
    except (OSError, EOFError, pickle.UnpicklingError):
        raise _Gone(step) from None
    if isinstance(message, UsageError):
        raise message
    assert isinstance(message, tuple)
    return message


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            with suppress(BrokenPipeError):  # what was meant for the child is lost with it
                stream.close()


def _text(log: BinaryIO) -> str:
    log.seek(0)
    return log.read().decode("utf-8", "replace")


def _crash(code: int, step: str, printed: str) -> VerifyError:
    if code < 0:
        what = f"onnxruntime was ended by {_signal_name(-code)} while {step}"
    else:
        what = f"the comparison ended with exit code {code} while {step}"
    if -code == signal.SIGKILL:
        hint = "the system ends processes like this when memory runs out; --no-verify leaves the comparison out"
    elif "original" in step:
        hint = "the original model does not run; --no-verify leaves the comparison out"
    else:
        hint = "this is a bug in onnxfuse"
    tail = "; ".join(line.strip() for line in printed.strip().splitlines()[-_KEPT_LINES:])
    return VerifyError("E_VERIFY_CRASH", f"{what}; nothing was written", tail, hint)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def child_main() -> None:
    """The child's side."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches both; the parent speaks
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not get between the messages

    def say(message: object) -> None:
        pickle.dump(message, sink)
        sink.flush()

    job = pickle.load(sys.stdin.buffer)
    try:
        result = job.run(say)
        if isinstance(job, Begin):  # `result` is what is known of the original
            result = pickle.load(sys.stdin.buffer).run(say, result)
    except EOFError:  # the caller has nothing to compare
        return
    except UsageError as error:
        say(error)
        return
    say(result)
