"""From a command line to an exit code: what is raised becomes one error on standard error."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

import typer

from onnxfuse.cli.app import app
from onnxfuse.errors import OnnxfuseError, UsageError, VerifyError

# Importing them registers their commands, in the order `onnxfuse --help` lists them.
# isort: off
from onnxfuse.cli import optimizing, judging, explaining, tracing, listing  # noqa: F401

# isort: on

# typer's base class of usage errors has no public name of its own, and moved between versions.
_FlagError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the command `onnxfuse`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _terminate)  # a killed run removes its temporary folder
    sys.exit(run_arguments(arguments))


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def run_arguments(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]  # wherever it stands
    try:
        result = app(arguments, prog_name="onnxfuse", standalone_mode=False)
        sys.stdout.flush()
    except _FlagError as exc:
        command = arguments[0] if arguments and not arguments[0].startswith("-") else ""
        message = str(getattr(exc, "message", "") or exc)
        return _fail(UsageError("E_FLAG", message, hint=f"onnxfuse {command} --help".replace("  ", " ")), 1)
    except OnnxfuseError as exc:
        if debug:
            raise
        return _fail(exc, 2 if isinstance(exc, VerifyError) else 1)
    except (KeyboardInterrupt, typer.Abort) as exc:
        print("; ".join(["interrupted", *getattr(exc, "__notes__", ["nothing was written"])]), file=sys.stderr)
        return 130
    except (BrokenPipeError, SystemExit) as exc:
        # `onnxfuse inspect ... | head` has seen enough: typer and rich turn that into SystemExit(1), and nothing else.
        if isinstance(exc, SystemExit) and exc.code != 1:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as exc:
        if debug:
            raise
        return _fail(_system(exc, arguments), 1)
    except Exception as exc:  # the command line's top: a bug becomes a short report instead of a wall of text
        if debug:
            raise
        return _fail(_bug(exc, arguments), 1)
    return result if isinstance(result, int) else 0


# What a machine can run out of, or not allow: no bug of ours.
_MACHINE = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM,
    errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENAMETOOLONG, errno.ESTALE,
})  # fmt: skip


def _system(exc: OSError | MemoryError, arguments: Sequence[str]) -> OnnxfuseError:
    """The machine said no, in a place where nothing better is known than what it said."""
    if isinstance(exc, MemoryError):
        return UsageError("E_SYSTEM", "not enough memory", str(exc), "--no-verify needs less")
    if exc.errno not in _MACHINE:
        return _bug(exc, arguments)
    hint = f"temporary files go to {tempfile.gettempdir()}: TMPDIR=... names another place" if exc.filename else ""
    return UsageError("E_SYSTEM", "the system refused an operation on a file", str(exc), hint)


def _bug(exc: Exception, arguments: Sequence[str]) -> OnnxfuseError:
    command = shlex.join(["onnxfuse", "--debug", *arguments])
    report = OnnxfuseError(
        "E_BUG",
        f"onnxfuse failed: {type(exc).__name__}: {exc}",
        "this is a bug in onnxfuse",
        f"see it whole with: {command}",
    )
    for note in getattr(exc, "__notes__", ()):
        report.add_note(note)
    return report


def _fail(exc: OnnxfuseError, code: int) -> int:
    notes = getattr(exc, "__notes__", ())
    print("\n".join([str(exc), *notes]), file=sys.stderr)
    return code
