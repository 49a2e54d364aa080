"""tools/tvm_parity.py and its helpers: what counts as equal, as explained, as a fault. TVM itself is not needed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest
import tvm_parity
from random_onnx import OPSET, pointwise_model, random_model
from tvm_compare import Binding, Ours, Theirs, compare, ours, replay, same_groups, stage_a, steps, value_reads

E, B, I, R, A, O = 0, 1, 2, 3, 4, 8  # noqa: E741
OPS = {E: "relu", B: "broadcast_to", I: "transpose", R: "sum", A: "conv2d", O: "Tuple"}


def onnx_model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {OPSET}]> {text}')


def mine(tmp_path: Path, text: str) -> Ours:
    path = tmp_path / "m.onnx"
    path.write_bytes(tvm_parity.atomic(onnx_model(text), {}).SerializeToString())
    return ours(tvm_parity.loops(path))


def theirs(*rows: tuple[str, int, list[str]], groups: str, functions: dict[str, str] | None = None) -> Theirs:
    """TVM's answer: a row is (value, kind, reads); the last one leaves. A name with _ in front is a step."""
    at = {name: k for k, (name, _, _) in enumerate(rows)}
    bindings: list[Binding] = [
        {
            "name": name,
            "function": (functions or {}).get(name, OPS[kind]),
            "kind": kind,
            "reads": [at[r] for r in reads],
            "value": "" if name.startswith("_") else name,
        }
        for name, kind, reads in rows
    ]
    made: list[list[int]] = [[at[v] for v in g.split("+")] for g in groups.split(" | ")]
    values: dict[str, int | str] = {b["value"]: k for k, b in enumerate(bindings) if b["value"]}
    return {
        "path": "m.onnx",
        "bindings": bindings,
        "values": values,
        "exits": [len(rows) - 1],
        "groups": made,
        "moved": [],
    }


CHAIN = "g (float[4,6] x) => (float[6,4] c) { a = Exp(x)  b = Transpose(a)  c = Relu(b) }"
MEAN = "g (float[4,6] x) => (float[4,1] c) { a = Exp(x)  b = ReduceMax<axes=[1]>(a)  c = Relu(b) }"


def test_equal_partitions_are_equal(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("b", I, ["a"]), ("c", E, ["b"]), ("_out", O, ["c"]), groups="a+b+c | _out")
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert result.equal
    assert result.replayed
    assert (result.nodes, result.compared, result.ours, result.theirs) == (3, 3, 1, 1)
    assert result.causes == []


def test_groups_that_our_stage_a_does_not_find_in_tvms_graph_are_a_fault(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("b", I, ["a"]), ("c", E, ["b"]), ("_out", O, ["c"]), groups="a | b+c | _out")
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert result.failed
    assert not result.replayed
    assert [str(d) for d in result.unexplained] == ["ours a+b+c; TVM a | b+c"]


def test_a_kind_without_a_known_reason_is_a_fault(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("b", O, ["a"]), ("c", E, ["b"]), ("_out", O, ["c"]), groups="a | b | c | _out")
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert result.replayed
    assert result.faults == ["no reason known: b: Transpose injective, TVM's Tuple opaque"]
    assert [d.explained for d in result.differences] == [False]


def test_a_kind_that_differs_by_an_axis_of_one_element_explains(tmp_path: Path) -> None:
    text = "g (float[4,1,6] x) => (float[1,4,6] c) { a = Abs(x)  b = Transpose<perm=[1,0,2]>(a)  c = Relu(b) }"
    tvm = theirs(("a", E, []), ("b", I, ["a"]), ("c", E, ["b"]), ("_out", O, ["c"]), groups="a+b+c | _out")
    result = compare("m", mine(tmp_path, text), tvm)
    assert result.equal
    assert [c.why for c in result.causes] == ["an axis of one element has no loop variable here"]


def test_several_steps_for_one_value_explain(tmp_path: Path) -> None:
    tvm = theirs(
        ("a", E, []), ("_s", O, ["a"]), ("b", I, ["_s"]), ("c", E, ["b"]), ("_out", O, ["c"]),
        groups="a | _s | b+c | _out",
    )  # fmt: skip
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert not result.failed
    assert not result.equal
    (difference,) = result.explained
    assert [str(c) for c in difference.causes] == ["b: Transpose (TVM: Tuple, transpose)"]


def test_a_cause_elsewhere_does_not_explain(tmp_path: Path) -> None:
    """b is made in two steps, but what is grouped differently is four nodes away."""
    text = """g (float[4,6] x) => (float[6,6] h) {
        a = Exp(x)  b = Transpose(a)  c = MatMul(b, a)  d = MatMul(c, c)  e = Relu(d)  f = Abs(e)  h = Neg(f) }"""
    rows = [("a", E, []), ("_s", I, ["a"]), ("b", I, ["_s"]), ("c", A, ["b", "a"]), ("d", A, ["c"])]
    rows += [("e", E, ["d"]), ("f", E, ["e"]), ("h", E, ["f"]), ("_out", O, ["h"])]
    tvm = theirs(*rows, groups="a | _s+b | c | d+e | f+h | _out")
    result = compare("m", mine(tmp_path, text), tvm)
    assert [str(d) for d in result.unexplained] == ["ours d+e+f+h; TVM d+e | f+h"]


def test_other_reads_are_never_explained(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("b", I, ["a"]), ("c", E, ["a", "b"]), ("_out", O, ["c"]), groups="a+b+c | _out")
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert result.faults == ["no reason known: c: Relu reads [] here, ['a'] in TVM"]


def test_an_output_on_one_side_only_is_never_explained(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("b", I, ["a"]), ("c", E, ["b"]), ("_out", O, ["b", "c"]), groups="a+b | c | _out")
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert "no reason known: b: Transpose is an output on one side only" in result.faults


def test_values_tvm_does_not_make_are_named_and_left_out(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("c", E, ["a"]), ("_out", O, ["c"]), groups="a+c | _out")
    tvm["values"]["b"] = 0
    result = compare("m", mine(tmp_path, CHAIN), tvm)
    assert result.compared == 2
    assert result.equal
    assert [str(c) for c in result.causes] == ["b: Transpose (TVM: the same as a)"]


def test_a_model_tvm_cannot_read_is_left_out(tmp_path: Path) -> None:
    result = compare("m", mine(tmp_path, CHAIN), {"path": "m.onnx", "error": "frontend: no such op"})
    assert not result.equal
    assert not result.failed
    assert tvm_parity.verdict(result) == "not compared"


def test_a_model_without_a_common_value_is_not_called_equal(tmp_path: Path) -> None:
    result = compare("m", mine(tmp_path, CHAIN), theirs(("_out", O, []), groups="_out"))
    assert tvm_parity.verdict(result) == "not compared"


def test_a_reduction_never_starts_a_group(tmp_path: Path) -> None:
    tvm = theirs(("a", E, []), ("b", R, ["a"]), ("c", E, ["b"]), ("_out", O, ["c"]), groups="a+b | c | _out")
    assert compare("m", mine(tmp_path, MEAN), tvm).equal


# --- The parts --------------------------------------------------------------------------------------------------------


def test_replay_groups_a_residual_block_as_tvm_does() -> None:
    tvm = theirs(
        ("r0", E, []), ("c1", A, ["r0"]), ("b1", E, ["c1"]), ("r1", E, ["b1"]), ("c2", A, ["r1"]), ("b2", E, ["c2"]),
        ("add", E, ["b2", "r0"]), ("r2", E, ["add"]), ("_out", O, ["r2"]),
        groups="r0 | c1+b1+r1 | c2+b2+add+r2 | _out",
    )  # fmt: skip
    assert same_groups(replay(tvm), tvm["groups"], set(range(9)))


def test_stage_a_is_capped_at_256_nodes() -> None:
    n = 300
    succ = [[k + 1] for k in range(n - 1)] + [[]]
    root = stage_a([E] * n, succ, [[E] * len(s) for s in succ], [k == n - 1 for k in range(n)])
    assert sorted(root.count(r) for r in set(root)) == [44, 256]


def test_steps_belong_to_the_value_they_lead_to() -> None:
    tvm = theirs(("a", E, []), ("_s", I, ["a"]), ("_t", I, ["_s"]), ("b", E, ["_t", "a"]), groups="a+_s+_t+b")
    assert steps(tvm) == {0: [0], 3: [1, 2, 3]}
    assert value_reads(tvm) == {"a": frozenset(), "b": frozenset({"a"})}


# --- The graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_models_are_valid_and_the_same_again(seed: int) -> None:
    model = random_model(seed)
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == random_model(seed).SerializeToString()


def test_random_models_have_the_size_asked_for() -> None:
    assert len(random_model(3, nodes=50).graph.node) == 50


def test_large_models_reach_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(tvm_parity.atomic(pointwise_model(0, 300), {}).SerializeToString())
    assert max(len(g) for g in ours(tvm_parity.loops(path)).groups) == 256


def test_nodes_that_stay_are_cut_out(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    text = """g (float[4,6] x) => (float[4,6] e)
        { a = Exp(x)  b = Abs(a)  c = RandomNormalLike(b)  d = Neg(c)  e = Add(d, a) }"""
    path.write_bytes(tvm_parity.atomic(onnx_model(text), {}).SerializeToString())
    made = tvm_parity.cut(path)
    assert made is not None
    graph = onnx.load(made).graph
    assert [n.op_type for n in graph.node] == ["Exp", "Abs", "Neg", "Add"]
    assert [i.name for i in graph.input] == ["x", "c"]
    assert [o.name for o in graph.output] == ["e", "b"]
    assert set(ours(tvm_parity.loops(path)).groups) == {*ours(tvm_parity.loops(made)).groups, ("c",)}


def test_the_atomic_graph_has_atoms_weights_as_inputs_and_fixed_shapes(tmp_path: Path) -> None:
    text = """g (float[N,16] x) => (float[N,16] y)
        <float[16,16] w = {%s}, float[1] c = {2.0}> { m = MatMul(x, w)  s = Softmax(m)  y = Mul(s, c) }"""
    made = tvm_parity.atomic(onnx_model(text % ", ".join(["1.0"] * 256)), {"x": (3, 16)})
    assert [i.name for i in made.graph.input] == ["x", "w"]
    assert [t.name for t in made.graph.initializer if t.data_type == onnx.TensorProto.FLOAT] == ["c"]
    assert "Softmax" not in {n.op_type for n in made.graph.node}
    assert [d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim] == [3, 16]


def test_a_sum_of_two_is_written_as_an_add() -> None:
    made = tvm_parity.atomic(onnx_model("g (float[4] x, float[4] z) => (float[4] y) { y = Sum(x, z) }"), {})
    assert [n.op_type for n in made.graph.node] == ["Add"]


# --- The process ------------------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_the_answer_for_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    if 'bad' in line: sys.exit('out of luck')\n"
        "    print(json.dumps({'path': line.strip()}), flush=True)\n"
    )
    monkeypatch.setattr(tvm_parity, "THERE", fake)
    paths = [Path("a.onnx"), Path("bad.onnx"), Path("b.onnx"), Path("c.onnx")]
    answers = list(tvm_parity.ask(sys.executable, paths))
    assert answers == [
        {"path": "a.onnx"},
        {"error": "TVM died: out of luck"},
        {"path": "b.onnx"},
        {"path": "c.onnx"},
    ]


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Theirs) -> tuple[int, list[dict[str, object]]]:
    model, report = tmp_path / "chain.onnx", tmp_path / "report.json"
    onnx.save(onnx_model(CHAIN), model)
    monkeypatch.setattr(tvm_parity, "ask", lambda _python, paths: [answer for _ in paths])
    code = tvm_parity.main(["--python", "none", str(model), "--json", str(report)])
    return code, json.loads(report.read_text())


CHAIN_ROWS: list[tuple[str, int, list[str]]] = [("a", E, []), ("b", I, ["a"]), ("c", E, ["b"]), ("_out", O, ["c"])]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (theirs(*CHAIN_ROWS, groups="a+b+c | _out"), 0),
        (theirs(*CHAIN_ROWS, groups="a | b+c | _out"), 2),
        ({"error": "load: no tvm"}, 1),
    ],
    ids=["equal", "different", "no TVM"],
)
def test_the_exit_code_says_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Theirs, code: int
) -> None:
    got, report = run(monkeypatch, tmp_path, answer)
    assert got == code
    assert [r["name"] for r in report] == ["chain"]
    assert ("UNEXPLAINED: ours a+b+c; TVM a | b+c" in capsys.readouterr().out) == (code == 2)


@pytest.mark.skipif("TVM_PYTHON" not in os.environ, reason="set TVM_PYTHON to an interpreter with apache-tvm and onnx")
def test_tvm_itself_agrees(tmp_path: Path) -> None:
    model = tmp_path / "chain.onnx"
    onnx.save(onnx_model(CHAIN), model)
    assert tvm_parity.main(["--python", os.environ["TVM_PYTHON"], "--random", "5", str(model)]) == 0
