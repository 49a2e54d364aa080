"""The conformance run: dead and silent children are findings; causes are grouped; onnxruntime's own failures apart."""

import os
import sys
import time
from pathlib import Path

import conformance
import inherent
import judges
import numpy as np
import onnx
import pytest
import suites
from onnx import TensorProto, helper
from onnx.backend.test.case.test_case import TestCase


def case(name: str, op: str) -> TestCase:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    model = helper.make_model(helper.make_graph([helper.make_node(op, ["x"], ["y"])], name, info[:1], info[1:]))
    return TestCase(name, name, None, None, model, [], "node", 1e-3, 1e-7)


@pytest.fixture
def cases() -> list[TestCase]:
    return [case("test_relu", "Relu"), case("test_abs", "Abs"), case("test_neg", "Neg")]


def ok(case: TestCase, *_rest: object) -> conformance.Result:
    return conformance.Result(case.name, suites.op(case), "ok", ort_passes=True, compiled=1)


def test_a_case_that_kills_its_process_does_not_end_the_run(
    cases: list[TestCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(case: TestCase, *_rest: object) -> conformance.Result:
        if case.name == "test_relu":
            os._exit(9)
        return ok(case)

    monkeypatch.setattr(conformance, "run_case", run)
    results = conformance.run_all(cases, jobs=1)
    assert [r.name for r in results] == [c.name for c in cases]
    assert {r.name: r.state for r in results}["test_relu"] == "failed"
    assert sum(r.state == "failed" for r in results) == 1


def test_a_case_that_hangs_is_given_up(cases: list[TestCase], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: TestCase, *_rest: object) -> conformance.Result:
        if case.name == "test_abs":
            time.sleep(60)
        return ok(case)

    monkeypatch.setattr(conformance, "run_case", run)
    monkeypatch.setattr(conformance, "TIMEOUT", 1.0)
    monkeypatch.setattr(conformance, "IDLE", 1.0)
    failed = [r for r in conformance.run_all(cases, jobs=1) if r.state == "failed"]
    assert [(r.name, r.failures) for r in failed] == [("test_abs", ["no answer for 1 s"])]


def test_an_exception_in_a_case_is_its_failure(cases: list[TestCase], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: TestCase, *_rest: object) -> conformance.Result:
        raise KeyError(case.name)

    monkeypatch.setattr(conformance, "run_case", run)
    results = conformance.run_all(cases[:2], jobs=1)
    assert all(r.state == "failed" and "KeyError" in r.failures[0] for r in results)


def test_totals_set_onnxruntimes_own_failures_apart() -> None:
    results = [
        conformance.Result("a", "Abs", "ok", ort_passes=True, compiled=1),
        conformance.Result("b", "Abs", "failed", ort_passes=True, failures=["with library: y: 1/2 differ"]),
        conformance.Result("c", "DFT", "failed", ort_passes=False, failures=["with library: y: 3/4 differ"]),
        conformance.Result("d", "Adam", "not run", failures=["NOT_IMPLEMENTED"]),
        conformance.Result("e", "LSTM", "ok", ort_passes=True, left=["LSTM UN_OP"]),
    ]
    text = conformance.report(results)
    numbers = [int(line.split()[-1]) for line in text.splitlines()[:7]]
    assert numbers == [5, 4, 3, 1, 1, 1, 1]
    assert "1  LSTM UN_OP" in text
    assert "failures (2):" in text


def test_causes_are_grouped_without_numbers() -> None:
    a = conformance.cause("optimize: error[IR_CHECK] value v12 has no type", "Abs")
    b = conformance.cause("optimize: error[IR_CHECK] value v7 has no type", "Add")
    assert a == b
    wrong = conformance.cause("with library: y: 3/8 differ, max abs 1", "Abs")
    assert wrong == "with library: wrong values or shapes, Abs"


def test_freezing_turns_all_inputs_but_the_first_into_initializers() -> None:
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]),
        helper.make_tensor_value_info("axes", 7, [1]),
    ]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", infos, out))
    x, axes = np.ones((2, 3), np.float32), np.asarray([1], np.int64)
    before = TestCase("r", "r", None, None, model, [([x, axes], [x.sum(1, keepdims=True)])], "node", 1e-3, 1e-7)
    after = suites.freeze(before)
    assert [i.name for i in after.model.graph.input] == ["x"]
    assert [t.name for t in after.model.graph.initializer] == ["axes"]
    assert len(after.data_sets[0][0]) == 1
    assert len(before.model.graph.input) == 2


def relu_case() -> TestCase:
    made = case("test_relu", "Relu")
    x = np.asarray([-1, 2], np.float32)
    made.model.ir_version = 8
    made.model.opset_import[0].version = 14
    made.data_sets.append(([x], [np.maximum(x, 0)]))
    return made


def test_every_mode_is_tried_and_equal_results_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    results = judges.Here.results

    def counted(self: judges.Here, model: Path, *rest: object, **named: object) -> object:
        asked.append(model.name)
        return results(self, model, *rest, **named)

    monkeypatch.setattr(judges.Here, "results", counted)
    setting = conformance.Setting(conformance.MODES)
    made = conformance.run_case(relu_case(), tmp_path / "0", setting, judges.Here())
    assert (made.state, made.ort_passes, made.compiled) == ("ok", True, 1)
    assert asked == ["source.onnx"] * 2 + ["full.onnx"] * 2


def test_another_interpreter_can_run_the_models(tmp_path: Path) -> None:
    """Here the same one, as if it were another."""
    who = judges.There(sys.executable)
    made = conformance.run_case(relu_case(), tmp_path / "0", conformance.Setting(), who)
    assert (made.state, made.ort_passes, made.compiled) == ("ok", True, 1)
    with pytest.raises(judges.Refused, match="Load"):
        who.results(tmp_path / "none.onnx", None, [{}], optimized=False)
    who.close()


def test_models_of_files_come_with_their_data() -> None:
    found = suites.loaded(suites.cases(("pytorch-operator",), "test_operator_maxpool")[0])
    assert [n.op_type for n in found.model.graph.node] == ["MaxPool"]
    ((given, expected),) = found.data_sets
    assert (given[0].ndim, expected[0].ndim) == (3, 3)


def test_a_run_goes_on_where_its_log_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run_all(found: list[TestCase], jobs: int, setting: object, add: conformance.Add) -> None:
        for c in found:
            tried.append(c.name)
            add(conformance.Result(c.name, "Abs", "ok", ort_passes=True))

    monkeypatch.setattr(conformance, "cases", lambda *_: [case("test_abs", "Abs"), case("test_neg", "Neg")])
    monkeypatch.setattr(conformance, "run_all", run_all)
    path = tmp_path / "log"
    path.write_text('{"name": "test_abs", "op": "Abs", "state": "failed", "ort_passes": true, "failures": ["x"]}\n')
    assert conformance.main(["--log", str(path)]) == 2
    assert tried == ["test_neg"]
    assert len(path.read_text().splitlines()) == 2


def test_the_share_leaves_out_what_no_kernel_can_be(cases: list[TestCase]) -> None:
    relu, absolute, negative = (ok(c) for c in cases)
    absolute.compiled, absolute.left = 0, ["Abs UN_OPAQUE"]
    negative.apart, negative.compiled = "strings", 0
    view = ok(cases[0])
    view.compiled, view.left = 0, ["Reshape NF_FREE_VIEW"]
    lines = conformance.report([relu, absolute, negative, view]).splitlines()
    assert {"  not counted:    1  strings", "  not counted:    1  nothing to compute"} <= set(lines)
    assert any(line.startswith("of the others") and line.endswith("1 of 2 = 50.0 %") for line in lines)
    assert lines[lines.index("not compiled though they could be, by op:") + 1] == "      1  Abs"


def test_what_no_kernel_can_be_is_told_by_op_type_and_mode() -> None:
    floats, text, flag = TensorProto.FLOAT, TensorProto.STRING, TensorProto.BOOL

    def one(op: str, kind: int, inputs: int = 1) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(f"x{k}", flag if k == 2 else kind, [2]) for k in range(inputs)]
        node = helper.make_node(op, [i.name for i in infos], ["y"])
        return helper.make_model(helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", kind, [2])]))

    found = [inherent.apart(one(op, floats)) for op in ("Relu", "Loop", "NonZero", "Dropout")]
    assert found == ["", "control flow", "the shape depends on data", ""]
    assert inherent.apart(one("Equal", text)) == "strings"
    assert inherent.apart(one("Dropout", floats, 3)) == "random"
    assert inherent.narrow(one("Cast", TensorProto.FLOAT8E5M2))
    assert not inherent.narrow(one("Cast", floats))
