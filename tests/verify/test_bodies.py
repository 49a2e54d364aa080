"""Bodies compared one by one: the branch a run does not take is compared too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxfuse
from onnxfuse.config import Config, VerifyConfig
from onnxfuse.emit.bundle import staged
from onnxfuse.ir.bodies import BodyFiles, FormalInput
from onnxfuse.verify import child
from onnxfuse.verify.bodies import BodiesJob
from onnxfuse.verify.bundle import MismatchError, verify_pair
from onnxfuse.verify.child import bodies_apart
from onnxfuse.verify.compare import Report

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
OUTER = """g (float[N,4] x, bool c) => (float[N,4] y) {
    h = Exp(x)
    never = Constant<value_int=0>()
    zero = Cast<to=9>(never)
    d = And(c, zero)
    y = If (d) <then_branch = t () => (a) { p = Neg(h) a = Tanh(p) }, else_branch = e () => (b) { b = Identity(x) }>
}"""


def write(path: Path, text: str) -> Path:
    onnx.save(parser.parse_model(HEAD + text), path)
    return path


def body(tmp_path: Path, after: str, formals: tuple[FormalInput, ...] = (), free: bool = True) -> BodyFiles:
    before = write(tmp_path / "before.onnx", "b (float[N,4] h) => (float[N,4] a) { p = Neg(h) a = Tanh(p) }")
    return BodyFiles("If_3.then_branch", 1, 0, formals, free, before, write(tmp_path / "after.onnx", after))


@pytest.mark.parametrize(("op", "ok"), [("Neg", True), ("Abs", False)])
def test_a_branch_no_run_takes_is_compared_on_the_values_around_it(tmp_path: Path, op: str, ok: bool) -> None:
    whole = write(tmp_path / "model.onnx", OUTER)
    case = body(tmp_path, f"b (float[N,4] h) => (float[N,4] a) {{ p = {op}(h) a = Tanh(p) }}", free=False)
    (report,) = bodies_apart(BodiesJob(whole, (case,), (None,)))
    assert report.ok is ok
    assert not report.skipped
    assert [r.label for r in report.runs] == ["values of the model around it"]


@pytest.mark.parametrize(("op", "ok"), [("Neg", True), ("Abs", False)])
def test_a_captured_value_of_unknown_type_is_compared_by_its_values(tmp_path: Path, op: str, ok: bool) -> None:
    whole = write(tmp_path / "model.onnx", OUTER)
    case = body(tmp_path, f"b (float[N,4] h) => (float[N,4] a) {{ p = {op}(h) a = Tanh(p) }}", free=False)
    for path in (case.before, case.after):
        model = onnx.load(path)
        model.graph.input[0].ClearField("type")
        onnx.save(model, path)
    (report,) = bodies_apart(BodiesJob(whole, (case,), (None,)))
    assert report.ok is ok
    assert not report.skipped


def test_a_wrong_branch_stops_the_whole_optimize(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.onnx", OUTER)
    case = body(tmp_path, "b (float[N,4] h) => (float[N,4] a) { p = Abs(h) a = Tanh(p) }")
    with pytest.raises(MismatchError, match="outputs a"):
        verify_pair(whole, whole, None, Config(), bodies=(case,))


def test_inputs_nothing_is_known_about_are_random_where_the_model_gives_none(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.onnx", "g (float[N,4] x) => (float[N,4] y) { y = Exp(x) }")  # has no h
    same = "b (float[N,4] h) => (float[N,4] a) { p = Neg(h) a = Tanh(p) }"
    (report,) = bodies_apart(BodiesJob(whole, (body(tmp_path, same),), (None,)))
    assert report.ok
    assert report.runs
    (report,) = bodies_apart(BodiesJob(whole, (body(tmp_path, same, free=False),), (None,)))
    assert report.skipped == "no values for its inputs could be had"


def test_a_branch_that_relies_on_its_condition_is_compared_on_other_inputs(tmp_path: Path) -> None:
    """It divides by what is zero whenever it is not taken."""
    m = parser.parse_model(
        HEAD
        + """g (int64[N] x, int64[N] y) => (int64[N] z) {
            none = Constant<value_int=0>()
            small = ReduceMin<keepdims=0>(y)
            c = Greater(small, none)
            z = If (c) <
                then_branch = t () => (a) { p = Div(x, y) a = Neg(p) },
                else_branch = e () => (b) { q = Abs(x) b = Neg(q) }>
        }"""
    )
    data = tmp_path / "zeros.npz"
    np.savez(data, x=np.arange(4), y=np.zeros(4, np.int64))
    path = tmp_path / "m.onnx"
    onnx.save(m, path)
    bundle = onnxfuse.optimize(m, include_subgraph=True, verify=False)
    config = Config(include_subgraph=True, verify=VerifyConfig(input_data=str(data)))
    with staged(bundle.emission, bundle.library and bundle.library.image, tmp_path / "out.onnx") as pair:
        reports = verify_pair(path, pair.model, pair.library, config, bodies=pair.bodies)
    labels = {r.reference: r.runs[0].label for r in reports if r.ok}
    assert labels["body If_3.then_branch"].startswith("random")
    assert labels["body If_3.else_branch"] == "values of the model around it"


def test_an_original_that_ends_the_process_is_left_out_with_a_reason(tmp_path: Path, monkeypatch) -> None:
    whole = write(tmp_path / "model.onnx", OUTER)
    case = body(tmp_path, "b (float[N,4] h) => (float[N,4] a) { p = Neg(h) a = Tanh(p) }")

    def dies(job: BodiesJob, crashed) -> tuple[Report, ...]:
        if not job.skip:
            crashed("body 1 (If_3.then_branch): running the original model")
        return job.run()

    monkeypatch.setattr(child, "_apart", dies)
    (report,) = bodies_apart(BodiesJob(whole, (case,), (None,)))
    assert report.summary() == "not compared: the original ends the process on these inputs"


def test_values_of_loops_and_scans_are_those_of_the_first_iteration(tmp_path: Path) -> None:
    m = parser.parse_model(
        HEAD
        + """g (float[3] h, float[T,3] x) => (float[3] last, float[T,3] y) {
            last, y = Scan <num_scan_inputs=1, body = b (float[3] s, float[3] xi) => (float[3] s2, float[3] yi) {
                p = Add(s, xi) s2 = Tanh(p) q = Mul(s2, h) yi = Neg(q)
            }> (h, x)
        }"""
    )
    path = tmp_path / "m.onnx"
    onnx.save(m, path)
    bundle = onnxfuse.optimize(m, include_subgraph=True, verify=False)
    with staged(bundle.emission, None, tmp_path / "out.onnx") as pair:
        reports = verify_pair(path, pair.model, None, Config(include_subgraph=True), bodies=pair.bodies)
    (report,) = [r for r in reports if r.reference == "body Scan_0.body"]
    assert report.ok
    assert report.runs[0].label == "values of the model around it"
