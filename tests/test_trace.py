import pytest

from onnxfuse.errors import IRError, UsageError
from onnxfuse.ir.parse import parse_kernel, parse_loops
from onnxfuse.trace import Stopped, Trace, add_note
from tests.ir.samples import KERNELS, LOOPS

A, B = parse_loops(LOOPS[0]), parse_kernel(KERNELS[0])
BAD = 'loops "g"(%x: f32[4]) -> () {\n %y[i<4]: f16 = %x[i]\n}'


def test_a_stage_hands_on_what_it_got_and_remembers_it():
    seen = []
    trace = Trace(progress=lambda stage, seconds: seen.append(stage))
    assert trace("lower", A) is A
    assert trace("layout", A) is A
    assert trace("generate", b"image") == b"image"
    assert trace("kernelize", B) is B
    assert [r.unchanged for r in trace.records] == [False, True, False, False]
    assert seen == ["lower", "layout", "generate", "kernelize"]
    assert trace.result("lower") is A
    with pytest.raises(KeyError):
        trace.result("fuse")
    assert [line.split()[0] for line in trace.table().splitlines()] == [*seen, "total"]


def test_a_broken_result_is_caught_where_it_was_made():
    with pytest.raises(IRError, match="IR_DTYPE"):
        Trace()("lower", parse_loops(BAD))
    Trace(checking=False)("lower", parse_loops(BAD))


def test_print_after_prints_the_named_stages():
    out = []
    trace = Trace(print_after=frozenset({"layout", "kernelize"}), write=out.append)
    trace("lower", A)
    trace("layout", A)
    trace("kernelize", B)
    assert out == ["; after layout (unchanged)", f"; after kernelize\n{B}"]
    trace = Trace(print_after=frozenset({"all"}), write=out.append)
    trace("lower", A)
    assert out[-1] == f"; after lower\n{A}"


def test_dump_writes_numbered_files_and_differences(tmp_path):
    trace = Trace(dump=tmp_path / "d", diff=True)
    trace("lower", A)
    trace("layout", A)
    trace("kernelize", B)
    names = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert names == ["01_lower.txt", "02_layout.txt", "03_kernelize.diff", "03_kernelize.txt"]
    assert (tmp_path / "d" / "01_lower.txt").read_text() == str(A)
    assert (tmp_path / "d" / "02_layout.txt").read_text() == "(unchanged)\n"
    assert "--- layout" in (tmp_path / "d" / "03_kernelize.diff").read_text()


def test_stop_after_carries_the_result():
    trace = Trace(stop_after="layout")
    trace("lower", A)
    with pytest.raises(Stopped) as stopped:
        trace("layout", A)
    assert (stopped.value.stage, stopped.value.result) == ("layout", A)


def test_a_view_is_shown_when_the_result_is_no_level():
    out = []
    trace = Trace(print_after=frozenset({"all"}), write=out.append)
    result = object()
    assert trace("atomize", result, view=A) is result
    assert out == [f"; after atomize\n{A}"]


def test_errors_say_the_stage_and_the_way_back():
    trace = Trace(reproduce="onnxfuse trace model.onnx")
    with pytest.raises(UsageError) as error, trace.stage("read"), trace.stage("inner"):
        raise UsageError("E_X", "what")
    assert error.value.__notes__ == ["  stage: inner", "  again: onnxfuse trace model.onnx --stop-after inner"]
    with pytest.raises(Stopped) as stopped, trace.stage("read"):
        raise Stopped("read", None)
    assert not hasattr(stopped.value, "__notes__")
    plain = ValueError("x")
    add_note(plain, "fuse")
    assert plain.__notes__ == ["  stage: fuse"]
