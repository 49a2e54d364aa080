"""README.md: what it tells people to type works, and what it names exists."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def in_a_copy(folder):
    """A folder that looks like the repository to a snippet, with an `out` of its own."""
    (folder / "models").symlink_to(ROOT / "models")
    (folder / "out").mkdir()
    return folder


def test_the_first_command_optimizes_a_committed_model(tmp_path):
    line = snippets("bash")[0].strip()
    *install, command = line.split(" && ")
    assert install[2].startswith("pip install .")
    program, *arguments = shlex.split(command)
    assert program == "onnxfuse"
    where = in_a_copy(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", *arguments], cwd=where, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Original Model" in done.stdout
    assert {p.name for p in (where / "out").iterdir()} == {"tiny_resnet.onnx", "tiny_resnet.so"}


def test_the_second_command_runs_the_tests():
    line = snippets("bash")[1].strip()
    assert line.endswith("python -m pytest -n auto")
    assert "pip install '.[test]'" in line


def test_the_python_snippet_runs(tmp_path):
    (code,) = snippets("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=in_a_copy(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_cpp_snippet_registers_the_library_the_python_way_does():
    (code,) = snippets("cpp")
    assert "RegisterCustomOpsLibrary" in code
    assert hasattr(onnxruntime.SessionOptions, "register_custom_ops_library")
    assert set(re.findall(r'"(out/[^"]+)"', code)) == {"out/tiny_resnet.so", "out/tiny_resnet.onnx"}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT))))
def test_links_lead_somewhere(path):
    assert path.startswith("http") or (ROOT / path).exists()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`onnxfuse (\w+)", TEXT))))
def test_named_commands_exist(command):
    from onnxfuse import cli

    assert cli.run_arguments([command, "--help"]) == 0


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:onnxfuse|tests|tools|models)/[\w./]+)`", TEXT))))
def test_named_files_exist(path):
    assert (ROOT / path).exists()


def test_it_stays_short():
    assert len(TEXT.splitlines()) <= 200
