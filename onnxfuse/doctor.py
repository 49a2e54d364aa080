"""What a machine needs for onnxfuse to work, checked one by one. -> Findings; raises nothing.

In: nothing. Out: a Finding per check, in order; one that rests on another which failed is skipped. The last check goes
the whole way: a tiny model is fused, compiled, linked, loaded and run by onnxruntime in a process of its own. Imports
stand inside the checks, because a package that does not import is what is looked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from onnxfuse.errors import OnnxfuseError
from onnxfuse.files import private_folder

OLDEST_PYTHON = (3, 11)
# What is needed, oldest version; used when the package is run from a source tree and nobody recorded it.
NEEDS = {
    "llvmlite": "0.44", "ml_dtypes": "0.5", "numpy": "1.26", "onnx": "1.17", "onnx-ir": "0.1.12",
    "onnxruntime": "1.17.3", "platformdirs": "4", "rich": "13", "typer": "0.12", "ziglang": "0.13",
}  # fmt: skip
PATIENCE = 120.0  # seconds for a child


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found, and what to do about it."""

    check: str
    status: Status
    found: str
    hint: str = ""

    def json(self) -> dict[str, str]:
        return {"check": self.check, "status": str(self.status), "found": self.found, "hint": self.hint}


class _Trouble(Exception):  # noqa: N818 - ends a check, never leaves this file
    """A check failed."""

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found)
        self.found, self.hint = found, hint


def examine() -> tuple[Finding, ...]:
    """Run all checks."""
    packages = [_checked(f"package {name}", lambda n=name, v=oldest: _package(n, v)) for name, oldest in needs()]  # type: ignore[misc]
    first = [_checked("python", _python), _checked("system", _system), *packages]
    missing = [f.check for f in packages if f.status is Status.FAILED]
    cpu = _checked("cpu", _cpu, missing)
    linker = _checked("linker", _linker, missing)
    folder = _checked("temporary files", _temporary)
    before = [*missing, *(f.check for f in (cpu, linker, folder) if f.status is not Status.OK)]
    return (*first, cpu, linker, folder, _checked("a kernel", _kernel, before))


def _checked(name: str, check: Callable[[], str], missing: list[str] | None = None) -> Finding:
    if missing:
        return Finding(name, Status.SKIPPED, f"needs {', '.join(missing)}")
    try:
        return Finding(name, Status.OK, check())
    except _Trouble as trouble:
        return Finding(name, Status.FAILED, trouble.found, trouble.hint)
    except OnnxfuseError as error:
        found = f"[{error.code}] {error.what}" + (f": {error.why}" if error.why else "")
        return Finding(name, Status.FAILED, found, error.hint)
    except Exception as error:  # a check that trips over what it finds has found something
        return Finding(name, Status.FAILED, f"{type(error).__name__}: {error}", "")


# --- the checks ------------------------------------------------------------------------------------------------------
def _python() -> str:
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise _Trouble(f"Python {platform.python_version()}", f"onnxfuse needs Python {oldest} or newer")
    return f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"


def _system() -> str:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        hint = "libraries are made for Linux on x86-64; `--target-cpu` names what can be compiled for elsewhere"
        raise _Trouble(found, hint)
    return found


def needs() -> tuple[tuple[str, str], ...]:
    """The packages onnxfuse needs, each with its oldest version."""
    try:
        lines = importlib.metadata.requires("onnxfuse") or []
    except importlib.metadata.PackageNotFoundError:
        return tuple(NEEDS.items())
    parsed = (re.match(r"([A-Za-z0-9_.-]+)\s*(?:>=\s*([0-9.]+))?", line) for line in lines if "extra ==" not in line)
    return tuple((m.group(1), m.group(2) or "0") for m in parsed if m is not None)


def _package(name: str, oldest: str) -> str:
    wanted = f"pip install --upgrade '{name}>={oldest}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise _Trouble("not installed", wanted) from None
    if _numbers(version) < _numbers(oldest):
        raise _Trouble(f"{version} is older than {oldest}", wanted)
    try:
        importlib.import_module(name.replace("-", "_"))
    except Exception as error:  # an extension module may raise anything while it loads
        again = f"pip install --force-reinstall '{name}>={oldest}'"
        raise _Trouble(f"{version} does not import: {type(error).__name__}: {error}", again) from error
    return f"{version} (at least {oldest})"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _cpu() -> str:
    from onnxfuse.codegen.object import host_features, target_machine
    from onnxfuse.target import TARGETS, by_name

    features = host_features()
    target = by_name("native", features)
    target_machine(target)
    wider = [t for t in TARGETS if t.triple == target.triple and t.vector_bits > target.vector_bits]
    lacks = sorted(set(wider[0].features) - features) if wider else []
    more = f"; {wider[0].name} would need {', '.join(lacks)}" if lacks else ""
    return f"target {target.name} ({', '.join(target.features)}){more}"


def _linker() -> str:
    from onnxfuse.codegen.object import linker

    command = linker()
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        text = (done.stderr or done.stdout).strip()[:200]
        raise _Trouble(
            f"{command[0]} ended with code {done.returncode}: {text}", "pip install --force-reinstall ziglang"
        )
    return f"{done.stdout.strip().splitlines()[0]}, {command[0]}"


def _temporary() -> str:
    place = tempfile.gettempdir()
    try:
        with private_folder() as folder:
            (folder / "probe").write_bytes(bytes(1 << 20))
    except OSError as error:
        raise _Trouble(f"{place}: {error.strerror}", "TMPDIR=... names another place") from error
    return place


def _kernel() -> str:
    from onnxfuse.api import optimize

    begin = time.perf_counter()
    with private_folder() as folder:
        written = optimize(_MODEL, verify=False).save(folder / "probe.onnx")
        if written.library is None:
            raise _Trouble("the model was left as it was", "this is a bug in onnxfuse")
        size = written.library.stat().st_size
        ran = _run_apart(written.model)
    return f"built ({size} bytes), loaded and run in {time.perf_counter() - begin:.1f} s: {ran}"


_HINTS = {
    "failed to map segment": "temporary files lie where programs may not run (noexec): TMPDIR=... names another place",
}
# The child imports what its parent imported: the same sys.path, whatever made it so.
_START = "import sys; sys.path[:] = sys.argv[2:]; from onnxfuse.doctor import run_probe; run_probe(sys.argv[1])"


def _run_apart(model: Path) -> str:
    """Load and run the probe in a child: a kernel this CPU does not know would end the process."""
    command = [sys.executable, "-c", _START, str(model), *(str(Path(p).absolute()) for p in sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [""])[-1][:300]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        hint = next((h for text, h in _HINTS.items() if text in done.stderr), "")
        raise _Trouble(f"running it ended with {how}: {said}", hint)
    return done.stdout.strip()


def run_probe(path: str) -> None:
    """The child's side: run the probe with its library, and say which kernel onnxruntime ran."""
    import numpy as np

    from onnxfuse.runtime.session import InferenceSession, library_path
    from onnxfuse.verify import ort

    x = np.linspace(-3, 3, 35, dtype=np.float32).reshape(7, 5)
    (y,) = InferenceSession(path).run(None, {"x": x})
    if not np.allclose(y, np.maximum(np.exp(x) - x, 0), rtol=1e-5):
        raise SystemExit(f"wrong numbers: {y!r}")
    ran = [op for _, op in ort.profile(path, {"x": x}, libraries=[library_path(path)])]
    if len(ran) != 1:
        raise SystemExit(f"onnxruntime did not run the kernel, but {', '.join(ran)}")
    print(ran[0])


def _field(number: int, content: bytes | str) -> bytes:
    """A length-delimited field of a protobuf message (short ones)."""
    raw = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2, len(raw)]) + raw


def _node(op: str, inputs: str, output: str) -> bytes:
    return _field(1, b"".join(_field(1, name) for name in inputs) + _field(2, output) + _field(4, op))


def _value(number: int, name: str) -> bytes:
    """A float tensor of two dimensions that are open."""
    shape = _field(1, _field(2, "N")) + _field(1, _field(2, "M"))
    return _field(number, _field(1, name) + _field(2, _field(1, b"\x08\x01" + _field(2, shape))))


# y = Relu(Exp(x) - x), written out: this file does not import onnx, which may be what is broken.
_NODES = _node("Exp", "x", "e") + _node("Sub", "ex", "s") + _node("Relu", "s", "y")
_GRAPH = _NODES + _field(2, "probe") + _value(11, "x") + _value(12, "y")
_MODEL = b"\x08\x08" + _field(7, _GRAPH) + _field(8, b"\x10\x11")
