"""verify/bundle.py and verify/child.py: the check in a process of its own."""

import pickle
import signal
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxfuse.config import Config, VerifyConfig
from onnxfuse.errors import UsageError, VerifyError
from onnxfuse.verify.bundle import MismatchError, verify_pair
from onnxfuse.verify.child import Ahead, Begin, Job, apart
from onnxfuse.verify.compare import compare_many

TEXT = '<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float[2,3] y) { y = Exp(x) }'


@pytest.fixture
def file(tmp_path):
    def write(name, text=TEXT):
        onnx.save(parser.parse_model(text), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def crash(monkeypatch):
    """Let the child do something else than compare."""

    def instead(statement):
        start = f"import sys, os, signal; from onnxfuse.verify import child; {statement}"
        monkeypatch.setattr("onnxfuse.verify.child._START", start)

    return instead


def test_reports_are_those_of_this_process(file):
    a, b = file("a.onnx"), file("b.onnx", TEXT.replace("Exp", "Neg"))
    assert apart(Job(a, b, (None,))) == compare_many(a, b, [None])


FREE = TEXT.replace("[2,3] x", "[n,3] x").replace("[2,3] y", "[n,3] y")


@pytest.mark.parametrize("text", [TEXT, FREE, TEXT.replace("Exp", "NoSuchOp")], ids=["fixed", "free", "does not load"])
def test_an_original_that_ran_ahead_changes_nothing(file, text):
    a, b = file("a.onnx", text), file("b.onnx", text.replace("Exp", "Neg"))

    def outcome(run):
        try:
            return run()
        except UsageError as error:
            return error.args

    with Ahead(Begin(a)) as ahead:
        job = Job(a, b, (None, None))
        assert outcome(lambda: apart(job, ahead)) == outcome(lambda: compare_many(a, b, [None, None]))


def test_dimensions_that_the_candidate_fixes_are_asked_for_again(file):
    a, b = file("a.onnx", FREE), file("b.onnx", TEXT)
    with Ahead(Begin(a)) as ahead:
        (report,) = apart(Job(a, b, (None,)), ahead)
    assert [r.inputs["x"] for r in report.runs] == [(2, 3)]
    assert len(report.narrowed) == 1


def test_a_crash_ahead_is_told_when_the_job_comes(file, crash):
    crash(
        "pickle = child.pickle; pickle.dump('running the original model', sys.stdout.buffer); "
        "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    a = file("a.onnx")
    with Ahead(Begin(a)) as ahead, pytest.raises(VerifyError, match="SIGSEGV while running the original model"):
        verify_pair(a, a, None, Config(), begun=ahead)


def test_a_child_that_nobody_needs_ends_quietly(file, capfd):
    for path in (file("a.onnx"), file("a.onnx").with_name("missing.onnx")):
        with Ahead(Begin(path)) as ahead:
            process, log = ahead.take()
            for stream in (process.stdin, log) if process is not None else ():
                stream.close()
            if process is not None:
                assert process.wait() == 0
                process.stdout.close()
    assert capfd.readouterr().err == ""


def test_large_models_and_weights_in_other_files_are_not_loaded_ahead(tmp_path, file, monkeypatch):
    small = file("a.onnx")
    assert Begin(small).run(lambda _: None) is not None
    weighty = onnx.load(small)
    weighty.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(9, np.float32), "w"))
    onnx.save(weighty, tmp_path / "b.onnx", save_as_external_data=True, location="b.data", size_threshold=0)
    assert Begin(tmp_path / "b.onnx").run(lambda _: None) is None
    monkeypatch.setattr("onnxfuse.verify.child._AHEAD_LIMIT", 10)
    assert Begin(small).run(lambda _: None) is None


def test_a_mismatch_is_reported_in_full(file):
    a, b = file("a.onnx"), file("b.onnx", TEXT.replace("Exp", "Neg"))
    with pytest.raises(MismatchError, match="outputs y") as error:
        verify_pair(a, b, None, Config(), called="the model")
    (report,) = error.value.reports
    assert report.reference == "the model"
    assert report.worst()[0].first is not None
    assert report.worst()[0].mismatches == 6


def test_a_usage_error_comes_back_as_it_is(file):
    a = file("a.onnx")
    config = VerifyConfig(test_shapes={"z": (1,)})
    with pytest.raises(UsageError) as here:
        compare_many(a, a, [None], config=config)
    with pytest.raises(UsageError) as there:
        apart(Job(a, a, (None,), config))
    assert there.value.args == here.value.args


def test_a_crash_names_the_signal_and_the_step(file, crash):
    crash(
        "pickle = child.pickle; pickle.dump('running the optimized model with its library on x', sys.stdout.buffer); "
        "sys.stdout.flush(); print('that was it', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    with pytest.raises(VerifyError, match="E_VERIFY_CRASH") as error:
        verify_pair(file("a.onnx"), file("b.onnx"), None, Config())
    assert "SIGSEGV while running the optimized model with its library on x" in error.value.what
    assert error.value.why == "that was it"
    assert "bug in onnxfuse" in error.value.hint


def test_a_kill_speaks_of_memory(file, crash):
    crash("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(VerifyError, match="SIGKILL while starting") as error:
        apart(Job(file("a.onnx"), file("b.onnx"), (None,)))
    assert "memory" in error.value.hint


def test_a_bug_in_the_child_shows_its_message(file, crash):
    crash("raise ZeroDivisionError('ouch')")
    with pytest.raises(VerifyError, match="exit code 1 while starting") as error:
        apart(Job(file("a.onnx"), file("b.onnx"), (None,)))
    assert "ZeroDivisionError: ouch" in error.value.why


def test_half_an_answer_is_none(file, crash):
    crash("sys.stdin.buffer.read(); sys.stdout.buffer.write(child.pickle.dumps('running')[:-3]); sys.stdout.flush()")
    with pytest.raises(VerifyError, match="exit code 0 while starting"):
        apart(Job(file("a.onnx"), file("b.onnx"), (None,)))


def test_an_interrupt_ends_the_child_too(file, crash, monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            started.append(self)
            super().__init__(*args, **kwargs)

    def interrupted(stream):
        raise KeyboardInterrupt

    crash("import time; time.sleep(600)")
    monkeypatch.setattr("onnxfuse.verify.child.subprocess.Popen", Popen)
    monkeypatch.setattr("onnxfuse.verify.child.pickle.load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apart(Job(file("a.onnx"), file("b.onnx"), (None,)))
    assert [p.returncode for p in started] == [-signal.SIGKILL]


def test_without_a_new_process_the_comparison_is_made_here(file, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr("onnxfuse.verify.child.subprocess.Popen", refuse)
    (report,) = apart(Job(file("a.onnx"), file("b.onnx"), (None,)))
    assert report.ok


def test_the_child_imports_no_compiler_and_no_model_library():
    code = (
        "import sys, onnxfuse.verify.child; "
        "print([m for m in ('onnx', 'onnx_ir', 'llvmlite', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_steps_tell_what_is_done(file):
    a, steps = file("a.onnx"), []
    compare_many(a, a, [None], step=steps.append)
    assert steps == [
        "loading the original model",
        "running the original model",
        "loading the optimized model without its library",
        "running the optimized model without its library on random seed 0 (x:2,3)",
    ]
    assert pickle.loads(pickle.dumps(Job(a, a, (None,)))) == Job(a, a, (None,))
