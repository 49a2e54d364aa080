"""The command line where the machine or the paths are difficult: it works, or says in one message why not."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import onnxfuse as package
from onnxfuse import pipeline
from tests.cli.conftest import is_one_error

CHAIN = "a = Exp(x) \n b = Add(a, x) \n y = Relu(b)"
X = np.linspace(-2, 2, 4, dtype=np.float32)


def agrees(path) -> bool:
    return np.allclose(package.InferenceSession(path).run(None, {"x": X})[0], np.maximum(np.exp(X) + X, 0), rtol=1e-5)


# ---- paths


@pytest.mark.parametrize("place", ["-ünï 模型", "quo'te\"s $(x); &"])
def test_any_folder_and_any_working_directory(onnxfuse, model, tmp_path, monkeypatch, place):
    source = model("a.onnx", CHAIN)
    (tmp_path / place).mkdir()
    shutil.copy(source, tmp_path / place / "in.onnx")
    monkeypatch.chdir(tmp_path / place)
    assert onnxfuse("optimize", "in.onnx", "out.onnx").code == 0
    monkeypatch.chdir(tmp_path)
    assert onnxfuse("optimize", tmp_path / place / "in.onnx", tmp_path / place / "again.onnx").code == 0
    assert agrees(tmp_path / place / "out.onnx")
    assert agrees(tmp_path / place / "again.onnx")
    assert sorted(os.listdir(place)) == ["again.onnx", "again.so", "in.onnx", "out.onnx", "out.so"]


def test_input_and_output_behind_links(onnxfuse, model, tmp_path):
    source = model("a.onnx", CHAIN)
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "link.onnx").symlink_to(source)
    assert onnxfuse("optimize", tmp_path / "link.onnx", tmp_path / "folder" / "out.onnx").code == 0
    assert agrees(tmp_path / "folder" / "out.onnx")
    (tmp_path / "loop.onnx").symlink_to(tmp_path / "real" / "out.onnx")
    with pytest.raises(package.UsageError, match="no library beside"):  # it is looked for where the path says
        package.InferenceSession(tmp_path / "loop.onnx")


@pytest.mark.parametrize("out", ["a.onnx", "./a.onnx", "link.onnx", "hard.onnx"])
def test_the_input_is_never_the_output(onnxfuse, model, tmp_path, monkeypatch, out):
    source = model("a.onnx", CHAIN)
    (tmp_path / "link.onnx").symlink_to(source)
    os.link(source, tmp_path / "hard.onnx")
    monkeypatch.chdir(tmp_path)
    before = source.read_bytes()
    result = onnxfuse("optimize", source, out)
    assert result.code == 1
    assert is_one_error(result, "E_SAME_FILE")
    assert source.read_bytes() == before
    assert sorted(os.listdir()) == ["a.onnx", "hard.onnx", "link.onnx"]


# ---- the machine


def run(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "onnxfuse", *map(str, arguments)], capture_output=True, **options)


def test_no_room_for_temporary_files(model, tmp_path):
    source = model("a.onnx", CHAIN)
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))}
    done = run("optimize", source, tmp_path / "out.onnx", text=True, **limits)
    assert done.returncode == 1
    assert done.stderr.startswith("error[E_LINK] no room for the linker's files")
    assert "File too large" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx"]


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/some/file"), "No space left on device: '/some/file'"),
        (MemoryError("12 GiB"), "not enough memory"),
    ],
)
def test_what_the_machine_refuses_is_no_bug(onnxfuse, model, tmp_path, monkeypatch, raised, text):
    def refuse(*_args, **_options):
        raise raised

    monkeypatch.setattr(pipeline, "generate", refuse)
    result = onnxfuse("optimize", model("a.onnx", CHAIN), tmp_path / "out.onnx")
    assert result.code == 1
    assert is_one_error(result, "E_SYSTEM")
    assert text in result.err


@pytest.mark.parametrize(("number", "delay"), [(signal.SIGTERM, 0.7), (signal.SIGINT, 0.7), (signal.SIGKILL, 0.9)])
def test_a_signal_leaves_the_old_files(onnxfuse, model, tmp_path, number, delay):
    source = model("a.onnx", CHAIN)
    assert onnxfuse("optimize", source, tmp_path / "out.onnx", "--no-verify").code == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    process = subprocess.Popen([sys.executable, "-m", "onnxfuse", "optimize", source, tmp_path / "out.onnx"])
    time.sleep(delay)
    process.send_signal(number)
    process.wait()
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert after == before
    assert onnxfuse("optimize", source, tmp_path / "out.onnx", "--no-verify").code == 0
    assert {p.name for p in tmp_path.iterdir()} == set(before)
