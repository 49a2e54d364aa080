"""The command line: what each command prints, and its exit code."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest

from tests.cli.conftest import is_one_error

COMMANDS = ("optimize", "compare", "bench", "inspect", "run", "trace", "ops", "targets", "explain", "rules")


def test_help_lists_every_command_and_answers_without_the_heavy_modules():
    script = (
        "import sys\nfrom onnxfuse import cli\ncode = cli.run_arguments(['--help'])\n"
        "heavy = {'onnx', 'onnxruntime', 'llvmlite', 'onnx_ir', 'numpy'} & set(sys.modules)\n"
        "sys.exit(code or (f'loaded {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f" {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(onnxfuse, command):
    result = onnxfuse(command, "--help")
    assert result.code == 0
    assert "Usage" in result.out
    assert command in ("ops", "targets") or "Examples" in result.out


def test_the_module_runs_like_the_command():
    done = subprocess.run([sys.executable, "-m", "onnxfuse", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("onnxfuse ")
    assert "onnxruntime " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare",),
        ("compare", "a", "b", "--no-such-flag"),
        ("no-such-command",),
        ("optimize", "a", "b", "--fusion-mode", "greedy"),
        ("optimize", "a", "b", "--max-fusion-size", "0"),
        ("optimize", "a", "b", "--dim-param", "N"),
        ("optimize", "a", "b", "--overwrite-input-shape", "1,2"),
        ("optimize", "a", "b", "--overwrite-input-shape", "x:-1,2"),
        ("optimize", "a", "b", "--test-input-shape", "x:a"),
        ("optimize", "a", "b", "--val-range", "x:3"),
        ("optimize", "a", "b", "--rtol", "much"),
        ("optimize", "a", "b", "--atol", "-1"),
        ("optimize", "a", "b", "--skip-optimization", "everything"),
    ],
)
def test_a_wrong_flag_is_one_message_and_exit_1(onnxfuse, arguments):
    result = onnxfuse(*arguments)
    assert result.code == 1
    assert is_one_error(result, "E_FLAG")


# ---- compare


def test_compare_says_yes(onnxfuse, model):
    a = model("a.onnx", "y = Exp(x)")
    result = onnxfuse("compare", a, a)
    assert result.code == 0
    assert "agrees without the library" in result.out


def test_compare_says_no_with_the_output_and_exit_2(onnxfuse, model):
    result = onnxfuse("compare", model("a.onnx", "y = Exp(x)"), model("b.onnx", "y = Neg(x)"))
    assert result.code == 2
    assert "differs without the library: outputs y" in result.out
    assert "y[0]: reference" in result.out


def test_compare_prints_data(onnxfuse, model):
    result = onnxfuse("compare", model("a.onnx", "y = Exp(x)"), model("b.onnx", "y = Neg(x)"), "--json", "--check", 2)
    data = json.loads(result.out)
    assert data["ok"] is False
    assert len(data["reports"][0]["runs"]) == 2
    assert data["reports"][0]["runs"][0]["outputs"][0]["mismatches"] == 4


def test_tolerances_are_taken_per_output(onnxfuse, model):
    both = "(float[4] x) => (float[4] y, float[4] z)"
    tenth = "t = Constant<value = float {0.1}>() \n"
    a = model("a.onnx", "y = Exp(x) \n z = Neg(x)", both)
    b = model("b.onnx", tenth + "e = Exp(x) \n y = Add(e, t) \n z = Neg(x)", both)
    assert onnxfuse("compare", a, b).code == 2
    assert onnxfuse("compare", a, b, "--atol", "y:0.2").code == 0
    assert onnxfuse("compare", a, b, "--atol", "z:0.2").code == 2
    assert onnxfuse("compare", a, b, "--atol", "0.2", "--atol", "y:0.01").code == 2
    assert onnxfuse("compare", a, b, "--allow-mismatches", "y:4").code == 0


@pytest.mark.parametrize("command", ["compare", "bench", "run", "inspect", "trace", "explain"])
def test_a_missing_model_is_one_message(onnxfuse, tmp_path, command):
    arguments = [tmp_path / "a.onnx"] * (2 if command == "compare" else 1)
    result = onnxfuse(command, *arguments)
    assert result.code == 1
    assert is_one_error(result, "E_NO_FILE")


@pytest.mark.parametrize("command", ["bench", "run", "inspect"])
def test_a_damaged_model_is_one_message(onnxfuse, tmp_path, command):
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"\x08\x07\x3a\xff\xff")
    result = onnxfuse(command, bad)
    assert result.code == 1
    assert result.err.count("error[") == 1
    assert "Traceback" not in result.err


def test_a_damaged_candidate_is_exit_1(onnxfuse, model, tmp_path):
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"\x08\x07\x3a\xff\xff")
    assert onnxfuse("compare", model("a.onnx", "y = Exp(x)"), bad).code == 1
    assert onnxfuse("compare", bad, bad).code == 1


# ---- run


def test_run_saves_what_it_used_and_what_came_out(onnxfuse, model, tmp_path):
    path = model("a.onnx", "y = Neg(x)")
    result = onnxfuse(
        "run", path, "--save-inputs", tmp_path / "x.npz", "--save-outputs", tmp_path / "y.npz", "--seed", 5
    )
    assert result.code == 0
    assert "float32[4]" in result.out
    x, y = np.load(tmp_path / "x.npz")["x"], np.load(tmp_path / "y.npz")["y"]
    assert np.array_equal(y, -x)
    again = onnxfuse("run", path, "--input-data", tmp_path / "x.npz", "--save-outputs", tmp_path / "z.npz", "--json")
    assert set(json.loads(again.out)["y"]) == {"type", "min", "max", "mean"}
    assert np.array_equal(np.load(tmp_path / "z.npz")["y"], y)


def test_run_refuses_data_that_does_not_fit(onnxfuse, model, tmp_path):
    path = model("a.onnx", "y = Neg(x)")
    np.savez(tmp_path / "x.npz", z=np.zeros(4, np.float32))
    assert is_one_error(onnxfuse("run", path, "--input-data", tmp_path / "x.npz"), "E_INPUT_NAME")
    assert is_one_error(onnxfuse("run", path, "--input-data", tmp_path / "none.npz"), "E_INPUT_DATA")
    assert is_one_error(onnxfuse("run", path, "--test-input-shape", "x:5"), "E_INPUT_SHAPE")
    assert is_one_error(onnxfuse("run", path, "--library", tmp_path / "no.so"), "E_NO_FILE")


# ---- bench


def test_bench_prints_a_ratio_for_both(onnxfuse, model):
    a, b = model("a.onnx", "y = Exp(x)"), model("b.onnx", "t = Neg(x) \n y = Exp(t)")
    data = json.loads(onnxfuse("bench", a, b, "--rounds", 3, "--json").out)
    assert [t["name"] for t in data["timings"]] == [str(a), str(b)]
    assert data["rounds"] == 3
    assert data["timings"][0]["ratio"] == 1
    table = onnxfuse("bench", a, b, "--rounds", 3)
    assert table.code == 0
    assert "speed-up" in table.out


# ---- lists


def test_ops_and_targets_list_their_tables(onnxfuse):
    rows = json.loads(onnxfuse("ops", "--json").out)
    assert {"op", "since", "family", "meaning"} == set(rows[0])
    assert len(rows) > 50
    assert "pointwise" in onnxfuse("ops", "Relu").out
    assert is_one_error(onnxfuse("ops", "Relux"), "E_NO_OP")
    names = [row["name"] for row in json.loads(onnxfuse("targets", "--json").out)]
    assert "x86-64-v3" in names


# ---- inspect an optimized model


def test_inspect_reads_the_record_of_an_optimized_model(onnxfuse, model):
    path = model("a.onnx", "y = Exp(x)")
    proto = onnx.load(path)
    member = {"name": "n0", "op": "Exp", "origin": ["n0"]}
    group = {
        "name": "g0", "op_type": "fused_exp", "kind": "elemwise", "anchor": None, "template": "rowwise",
        "members": [member], "reads": ["x"], "writes": ["y"], "bytes": 32, "operations": 4, "scope": "",
    }  # fmt: skip
    record = {"groups": [group], "left": [{"name": "n1", "op": "NonZero", "code": "UN_OPAQUE", "why": "because"}]}
    record["left"][0]["scope"] = ""
    proto.metadata_props.add(key="onnxfuse.inspection", value=json.dumps(record))
    onnx.save(proto, path)
    data = json.loads(onnxfuse("inspect", path, "--json").out)
    assert data["groups"] == [group]
    assert data["left"] == record["left"]
    table = onnxfuse("inspect", path).out
    assert "rowwise" in table
    assert "UN_OPAQUE" in table


# ---- when things go wrong


def test_a_bug_is_a_short_report_and_a_traceback_only_on_demand(onnxfuse, model, monkeypatch):
    path = model("a.onnx", "y = Exp(x)")

    def fail(*args, **kwargs):
        raise ZeroDivisionError("ouch")

    monkeypatch.setattr("onnxfuse.verify.compare.compare_many", fail)
    result = onnxfuse("compare", path, path)
    assert result.code == 1
    assert is_one_error(result, "E_BUG")
    assert f"onnxfuse --debug compare {path} {path}" in result.err
    with pytest.raises(ZeroDivisionError):
        onnxfuse("compare", path, path, "--debug")


def test_an_interrupt_is_clean(onnxfuse, model, monkeypatch):
    path = model("a.onnx", "y = Exp(x)")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxfuse.verify.compare.compare_many", interrupt)
    result = onnxfuse("compare", path, path)
    assert result.code == 130
    assert "Traceback" not in result.err


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m onnxfuse ops --json | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
