"""Objects and linking: same bytes every time, nothing undefined, errors as CompileError."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest

from onnxfuse.codegen import object as obj
from onnxfuse.codegen.object import (
    Compiler,
    Object,
    compile_all,
    compile_module,
    dynamic_symbols,
    host_features,
    link,
    load_object,
)
from onnxfuse.errors import CompileError
from onnxfuse.target import TARGETS, by_name

NATIVE = by_name("native", host_features())
ANSWER = """
define i64 @answer(i64 %x) {
  %y = add i64 %x, 42
  ret i64 %y
}
"""
CALLS_OUT = """
declare double @exp(double)
define double @f(double %x) {
  %y = call double @exp(double %x)
  ret double %y
}
"""


def numbered(k: int) -> str:
    return ANSWER.replace("42", str(k)).replace("@answer", f"@answer.{k}")


def test_host_features_name_what_the_targets_ask_for():
    assert set(NATIVE.features) <= host_features()


def test_an_object_runs():
    code = load_object(compile_module(ANSWER, NATIVE).data, NATIVE)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("answer"))(1) == 43
    assert code.address("question") == 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_target_compiles(target):
    out = compile_module(ANSWER, target, keep_ir=True, keep_asm=True)
    assert out.data[:4] == b"\x7fELF"
    assert "answer" in out.ir
    assert "answer" in out.asm


def test_broken_text_is_a_compile_error():
    with pytest.raises(CompileError, match="E_LLVM"):
        compile_module("define i64 @f() { ret i32 0 }", NATIVE)


def test_unknown_triple_is_a_compile_error():
    with pytest.raises(CompileError, match="E_LLVM_TARGET"):
        compile_module(ANSWER, replace(NATIVE, triple="pdp11-unknown-unix"))


def test_workers_give_the_bytes_of_this_process():
    texts = {str(k): numbered(k) for k in range(5)}
    here = compile_all(texts, NATIVE, workers=0)
    there = compile_all(texts, NATIVE, workers=2)
    assert list(here) == list(there) == list(texts)
    for name, one in here.items():
        other = there[name]
        assert isinstance(one, Object)
        assert isinstance(other, Object)
        assert one.data == other.data


def test_one_bad_module_does_not_sink_the_others():
    out = compile_all({"a": numbered(1), "bad": "nonsense", "b": numbered(2)}, NATIVE, workers=1)
    assert isinstance(out["a"], Object)
    assert isinstance(out["b"], Object)
    assert isinstance(out["bad"], CompileError)
    assert "expected top-level entity" in out["bad"].why


def test_a_crash_of_llvm_is_a_compile_error():
    # Assembly that does not assemble ends the process LLVM runs in.
    crash = 'define void @f() { call void asm sideeffect "nonsense $0", "r"(i64 1)\n ret void }'
    with Compiler(NATIVE, workers=1) as c:
        bad, good = c.submit(crash), c.submit(ANSWER)
        error = bad.exception()
        assert isinstance(error, CompileError)
        assert isinstance(good.result(), Object)


def test_worker_that_cannot_start_falls_back(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no processes here")

    monkeypatch.setattr(obj.subprocess, "Popen", refuse)
    with Compiler(NATIVE, workers=2) as c:
        assert isinstance(c.submit(ANSWER).result(), Object)


@pytest.mark.parametrize("command", ["raise SystemExit(3)", "print('something else entirely')"])
def test_worker_that_does_not_come_up_falls_back(command, monkeypatch):
    monkeypatch.setattr(obj, "_START", command)
    with Compiler(NATIVE, workers=1) as c:
        assert isinstance(c.submit(ANSWER).result(), Object)


def test_program_with_python_inside_is_not_started_again(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/app/renderer")
    monkeypatch.setattr(obj.subprocess, "Popen", None)
    with Compiler(NATIVE, workers=1) as c:
        assert isinstance(c.submit(ANSWER).result(), Object)


def test_workers_start_from_a_script_without_main_guard(tmp_path):
    script = tmp_path / "user script.py"
    script.write_text(
        "from onnxfuse.codegen.object import compile_all, host_features\n"
        "from onnxfuse.target import by_name\n"
        f"text = {ANSWER!r}\n"
        "out = compile_all({'a': text, 'b': text}, by_name('native', host_features()), workers=2)\n"
        "print(len(out), out['a'].data == out['b'].data)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["2", "True"], done.stderr


def test_library_exports_what_it_is_told_and_needs_nothing():
    image = link([compile_module(ANSWER, NATIVE, exports=["answer"]).data], NATIVE, ["answer"])
    assert dynamic_symbols(image) == (("answer",), ())
    obj.check_symbols(image, ["answer"])
    with pytest.raises(CompileError, match="self-contained"):
        obj.check_symbols(image, ["other"])


def test_undefined_symbol_is_a_compile_error_with_the_linkers_words():
    with pytest.raises(CompileError, match=r"undefined (hidden )?symbol: exp"):
        link([compile_module(CALLS_OUT, NATIVE, exports=["f"]).data], NATIVE, ["f"])


def test_linking_is_deterministic():
    data = [compile_module(numbered(k), NATIVE, exports=[f"answer.{k}"]).data for k in (1, 2)]
    assert link(data, NATIVE, ["answer.1"]) == link(data, NATIVE, ["answer.1"])


def test_linking_in_awkward_places(tmp_path, monkeypatch):
    place = tmp_path / "a b ünï ' $x"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", "/nonexistent")
    image = link([compile_module(ANSWER, NATIVE, exports=["answer"]).data], NATIVE, ["answer"])
    assert image[:4] == b"\x7fELF"
    assert os.listdir(place) == []


def test_stack_is_not_executable_and_nothing_is_writable_and_executable():
    image = link([compile_module(ANSWER, NATIVE, exports=["answer"]).data], NATIVE, ["answer"])
    segments = list(program_headers(image))
    flags = dict(segments)
    assert flags[0x6474E551] & 1 == 0  # PT_GNU_STACK
    assert all(f & 3 != 3 for kind, f in segments if kind == 1)


def program_headers(image: bytes):
    at = int.from_bytes(image[32:40], "little")
    size, count = (int.from_bytes(image[k : k + 2], "little") for k in (54, 56))
    for k in range(count):
        head = image[at + k * size :]
        yield int.from_bytes(head[:4], "little"), int.from_bytes(head[4:8], "little")


@pytest.mark.parametrize("name", ["aarch64", "x86-64-v2"])
def test_other_targets_link(name):
    target = by_name(name)
    image = link([compile_module(ANSWER, target, exports=["answer"]).data], target, ["answer"])
    assert dynamic_symbols(image) == (("answer",), ())


def test_target_without_linker_is_a_compile_error():
    with pytest.raises(CompileError, match="no linker"):
        link([], replace(NATIVE, triple="wasm32-unknown-unknown"), [])
