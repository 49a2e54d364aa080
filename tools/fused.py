"""What the tools share: calling onnxfuse, the library of a model, which nodes are ours, plain tables."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

DOMAIN = "onnxfuse"
CLI = [sys.executable, "-m", "onnxfuse"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished child process."""

    code: int
    output: str
    seconds: float
    peak_rss: int  # bytes; of the child or of one of its own children, whichever held more


def run_child(command: Sequence[str], timeout: float = 600.0) -> Finished:
    """Run a child to its end; stdout and stderr together."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        timer = _Killer(child, timeout)
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        timer.cancel()
    return Finished(child.returncode, output, time.perf_counter() - start, usage.ru_maxrss * 1024)


class _Killer:
    """Kills a child that outlives its time."""

    def __init__(self, child: subprocess.Popen[str], timeout: float) -> None:
        import threading

        self._timer = threading.Timer(timeout, child.kill)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()


def optimize_cli(source: Path, target: Path, flags: Sequence[str] = ()) -> Finished:
    """`onnxfuse optimize source target`."""
    return run_child([*CLI, "optimize", str(source), str(target), *flags])


def library_of(model: Path) -> Path | None:
    """The library beside an optimized model; None when nothing was compiled."""
    path = model.with_suffix(".so")
    return path if path.exists() else None


def own_peak_rss() -> int:
    """Peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fused_nodes(model: onnx.ModelProto) -> dict[str, str]:
    """Our nodes of the main graph: name -> op type."""
    return {n.name: n.op_type for n in model.graph.node if n.domain == DOMAIN}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain text table: first column to the left, the others to the right."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(_pad(c, w, i) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def _pad(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same as a markdown table."""
    lines = [list(header), ["---", *(["--:"] * (len(header) - 1))], *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
