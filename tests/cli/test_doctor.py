"""`onnxfuse doctor`: says what is there, what is missing and what to do; the rest goes on or is skipped."""

import importlib
import json
import tempfile
import tomllib
from pathlib import Path

import pytest

from onnxfuse import doctor
from onnxfuse.codegen import object as obj
from onnxfuse.doctor import NEEDS, Status, examine

ROOT = Path(__file__).resolve().parents[2]


def statuses(findings) -> dict[str, Status]:
    return {f.check: f.status for f in findings}


def failed(findings, check: str):
    (found,) = [f for f in findings if f.check == check]
    assert found.status is Status.FAILED
    return found


@pytest.fixture
def shallow(monkeypatch):
    """Leave out the part that builds a kernel."""
    monkeypatch.setattr(doctor, "_kernel", lambda: "not tried here")


def test_this_machine_is_in_order(onnxfuse):
    result = onnxfuse("doctor")
    assert result.code == 0, result.out
    assert "failed" not in result.out
    assert "exp_sub_relu_" in result.out  # the kernel onnxruntime ran


def test_the_data(onnxfuse, shallow):
    found = json.loads(onnxfuse("doctor", "--json").out)
    assert all(set(f) == {"check", "status", "found", "hint"} for f in found)
    names = [f["check"] for f in found]
    assert names[:2] == ["python", "system"]
    assert names[-4:] == ["cpu", "linker", "temporary files", "a kernel"]
    assert {n.removeprefix("package ") for n in names[2:-4]} >= {"onnxruntime", "llvmlite", "ziglang"}


def test_what_is_asked_for_is_what_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(f"{name}>={oldest}" for name, oldest in NEEDS.items()) == sorted(project["dependencies"])


def test_a_missing_package(onnxfuse, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "ziglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = onnxfuse("doctor")
    assert result.code == 2
    assert "hint: pip install --upgrade 'ziglang>=0.13'" in result.out
    found = examine()
    assert failed(found, "package ziglang").found == "not installed"
    assert statuses(found)["a kernel"] is Status.SKIPPED


def test_an_old_package(monkeypatch, shallow):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9.2" if name == "onnxruntime" else "99.0")
    found = failed(examine(), "package onnxruntime")
    assert found.found == "1.9.2 is older than 1.17.3"
    assert found.hint == "pip install --upgrade 'onnxruntime>=1.17.3'"


def test_a_package_that_does_not_import(monkeypatch, shallow):
    real = importlib.import_module

    def import_module(name):
        if name == "llvmlite":
            raise OSError("libllvmlite.so: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    found = failed(examine(), "package llvmlite")
    assert "does not import: OSError: libllvmlite.so" in found.found


def test_a_cpu_without_a_target(monkeypatch, shallow):
    monkeypatch.setattr(obj, "host_features", frozenset)
    found = failed(examine(), "cpu")
    assert found.found == "[E_TARGET] this CPU is older than x86-64-v2"
    assert "--target-cpu" in found.hint


def test_a_cpu_that_could_do_more_says_what_it_lacks(monkeypatch, shallow):
    monkeypatch.setattr(obj, "host_features", lambda: frozenset({"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "avx"}))
    (found,) = [f for f in examine() if f.check == "cpu"]
    assert found.status is Status.OK
    assert found.found.startswith("target x86-64-v2 (sse3, ssse3")
    assert "x86-64-v3 would need avx2, bmi, bmi2, f16c, fma" in found.found


def test_a_linker_that_does_not_run(monkeypatch, shallow, tmp_path):
    broken = tmp_path / "zig"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(obj, "linker", lambda: [str(broken), "ld.lld"])
    found = failed(examine(), "linker")
    assert found.found == f"{broken} ended with code 3: broken"
    assert found.hint == "pip install --force-reinstall ziglang"


def test_no_place_for_temporary_files(monkeypatch, shallow, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    found = failed(examine(), "temporary files")
    assert found.found == f"{tmp_path / 'none'}: No such file or directory"
    assert found.hint == "TMPDIR=... names another place"


@pytest.mark.parametrize(
    ("code", "found", "hint"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "running it ended with signal 4: ", ""),
        ("raise SystemExit('wrong numbers: 3')", "running it ended with code 1: wrong numbers: 3", ""),
        (
            "raise SystemExit('probe.so: failed to map segment from shared object')",
            "running it ended with code 1: probe.so: failed to map segment from shared object",
            "temporary files lie where programs may not run (noexec): TMPDIR=... names another place",
        ),
    ],
)
def test_a_kernel_that_does_not_run(monkeypatch, code, found, hint):
    monkeypatch.setattr(doctor, "_START", code)
    got = failed(examine(), "a kernel")
    assert (got.found, got.hint) == (found, hint)
