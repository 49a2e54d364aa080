"""`onnxfuse optimize`: what it writes, and that it writes nothing when something is wrong."""

import json
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import onnxfuse as package
from onnxfuse.cli import measuring
from onnxfuse.codegen.generate import emit_module
from onnxfuse.verify import child
from onnxfuse.verify.bench import Timing
from tests.cli.conftest import is_one_error

CHAIN = "a = Exp(x) \n b = Add(a, x) \n y = Relu(b)"
DYNAMIC = "(float[N,4] x) => (float[N,4] y)"


def snapshot(folder):
    """Names, sizes and times of everything in a folder."""
    return {p.relative_to(folder): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


# ---- what it does


def test_it_writes_a_model_and_a_library_that_agree(onnxfuse, model, tmp_path):
    source, out = model("a.onnx", CHAIN, DYNAMIC), tmp_path / "out.onnx"
    result = onnxfuse("optimize", source, out)
    assert result.code == 0, result.err
    assert result.err == ""
    assert "Original Model" in result.out
    assert "agrees with the library" in result.out
    assert "agrees without the library" in result.out
    assert {p.name for p in tmp_path.iterdir()} == {"a.onnx", "out.onnx", "out.so"}
    x = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    (y,) = package.InferenceSession(out).run(None, {"x": x})
    assert np.allclose(y, np.maximum(np.exp(x) + x, 0), rtol=1e-5)
    assert onnxfuse("compare", source, out).code == 0


def test_bf16_rounds_the_weights_of_a_single_row(onnxfuse, tmp_path):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((300, 40), np.float32), rng.standard_normal((1, 300), np.float32)
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[1,300] x) => (float[1,40] y) { y = MatMul(x, w) }'
    source = parser.parse_model(text)
    source.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(source, tmp_path / "a.onnx")
    results = {}
    for name in ("f32", "bf16"):
        run = onnxfuse("optimize", tmp_path / "a.onnx", tmp_path / f"{name}.onnx", "--precision", name)
        assert run.code == 0, run.err
        (results[name],) = package.InferenceSession(tmp_path / f"{name}.onnx").run(None, {"x": x})
    rounded = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.allclose(results["f32"], x @ w, rtol=1e-5, atol=1e-5)
    assert np.allclose(results["bf16"], x @ rounded, rtol=1e-5, atol=1e-5)
    assert not np.allclose(results["bf16"], x @ w, rtol=1e-5, atol=1e-5)
    assert is_one_error(onnxfuse("optimize", tmp_path / "a.onnx", "--dry-run", "--precision", "f8"), "E_FLAG")


def test_a_second_run_writes_the_same_bytes(onnxfuse, model, tmp_path):
    source = model("a.onnx", CHAIN)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    for folder in ("1", "2"):
        assert onnxfuse("optimize", source, tmp_path / folder / "o.onnx", "--no-verify").code == 0
    for name in ("o.onnx", "o.so"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_the_data_has_the_schema_of_inspect(onnxfuse, model, tmp_path):
    result = onnxfuse("optimize", model("a.onnx", CHAIN), tmp_path / "o.onnx", "--json")
    data = json.loads(result.out)
    (group,) = data["groups"]
    fields = {"name", "op_type", "kind", "anchor", "template", "members", "reads", "writes", "bytes", "operations"}
    assert set(group) == fields | {"scope"}
    assert [m["op"] for m in group["members"]] == ["Exp", "Add", "Relu"]
    assert (group["reads"], group["writes"], group["bytes"]) == (["x"], ["y"], 32)
    assert data["left"] == []
    assert data["bytes"] == {"before": 4 * 4 * (2 + 3 + 2), "after": 32}
    assert [r["ok"] for r in data["verified"]] == [True, True]
    assert data["ops"]["before"] == {"Exp": 1, "Add": 1, "Relu": 1}


def test_inspect_gives_the_same_groups_before_and_after(onnxfuse, model, tmp_path):
    source, out = model("a.onnx", CHAIN), tmp_path / "o.onnx"
    before = json.loads(onnxfuse("inspect", source, "--json").out)
    assert onnxfuse("optimize", source, out, "--no-verify").code == 0
    after = json.loads(onnxfuse("inspect", out, "--json").out)
    names = [[m["op"] for m in g["members"]] for g in before["groups"]]
    assert names == [["Exp", "Add", "Relu"]]
    assert after == before
    assert onnxfuse("inspect", source, "--compile").code == 0


def test_what_is_left_is_listed_with_a_code(onnxfuse, model):
    source = model("a.onnx", "n = NonZero(x) \n y = Cast<to = 1>(n)", "(float[4] x) => (float[1,K] y)")
    data = json.loads(onnxfuse("inspect", source, "--json").out)
    left = {n["op"]: n["code"] for n in data["left"]}
    assert "NonZero" in left
    assert all(left.values())


def test_a_dry_run_writes_nothing(onnxfuse, model, tmp_path):
    source = model("a.onnx", CHAIN)
    before = snapshot(tmp_path)
    result = onnxfuse("optimize", source, "--dry-run")
    assert result.code == 0
    assert "nothing written" in result.out
    assert onnxfuse("optimize", source, tmp_path / "o.onnx", "--dry-run", "--no-verify").code == 0
    assert snapshot(tmp_path) == before


@pytest.fixture
def timed(monkeypatch):
    """What the timing finds, one after the other: quartiles of the ratio, around 1.5."""

    def set_to(*spreads):
        found = iter(spreads)

        def speeds(*_args, **_options):
            low, high = next(found)
            return (Timing("o.onnx", 2.0, 1.9, 1.5, low, high, 5.0),)

        monkeypatch.setattr(child, "speeds", speeds)
        monkeypatch.setattr(child, "_start", refuse)  # no process of its own: the comparison runs here

    def refuse(*_):
        raise OSError

    return set_to


def lows(onnxfuse, source, *flags):
    """The lower quartile of each comparison: without the library, and with it."""
    result = onnxfuse("optimize", source, "--dry-run", "--json", *flags)
    return [r["speed"] and r["speed"]["ratio_low"] for r in json.loads(result.out)["verified"]]


def test_the_speed_is_measured_once_and_remembered(onnxfuse, model, tmp_path, monkeypatch, timed):
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    timed((1.4, 1.6), (1.3, 1.7), (1.2, 1.8))
    source = model("a.onnx", CHAIN)
    assert lows(onnxfuse, source) == [None, 1.4]
    assert lows(onnxfuse, source) == [None, 1.4]
    assert lows(onnxfuse, source, "--no-measure") == [None, None]
    assert lows(onnxfuse, source, "--no-cache") == [None, 1.3]
    assert "runs at 1.50 times the speed of the original" in onnxfuse("optimize", source, "--dry-run").out


def test_a_large_model_is_timed_when_asked_to(onnxfuse, model, monkeypatch, timed):
    monkeypatch.setattr(measuring, "LIMIT", 10)
    timed((1.4, 1.6))
    source = model("a.onnx", CHAIN)
    assert lows(onnxfuse, source, "--no-cache") == [None, None]
    assert lows(onnxfuse, source, "--no-cache", "--measure") == [None, 1.4]


def test_a_speed_that_means_nothing_is_not_remembered(onnxfuse, model, tmp_path, monkeypatch, timed):
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    timed((0.5, 4.0), (1.4, 1.6))
    source = model("a.onnx", CHAIN)
    assert lows(onnxfuse, source) == [None, 0.5]
    assert lows(onnxfuse, source) == [None, 1.4]


def test_the_speed_of_a_model_that_changed_is_measured_again(onnxfuse, model, tmp_path, monkeypatch, timed):
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    timed((1.4, 1.6), (1.3, 1.7))
    found = []
    for weight in (1.0, 2.0):  # the same kernel: weights are no part of it
        source = model("a.onnx", "t = Mul(x, w) \n y = Relu(t)", weights={"w": np.full(4, weight, np.float32)})
        found += lows(onnxfuse, source)
    assert found == [None, 1.4, None, 1.3]


def test_the_speed_is_that_of_the_shapes_that_were_fixed(onnxfuse, model):
    source = model("a.onnx", CHAIN, DYNAMIC)
    result = onnxfuse("optimize", source, "--dry-run", "--overwrite-input-shape", "x:3,4", "--json")
    assert json.loads(result.out)["verified"][1]["speed"]["ratio"] > 0


def test_verbose_times_every_stage_on_standard_error(onnxfuse, model):
    result = onnxfuse("optimize", model("a.onnx", CHAIN), "--dry-run", "-v")
    stages = [line.split()[0] for line in result.err.splitlines()]
    assert stages[:4] == ["read", "prepare", "bodies", "atomize"]
    assert stages[-1] == "verify"


def test_fusion_flags_reach_the_fusion(onnxfuse, model):
    source = model("a.onnx", CHAIN)

    def sizes(*flags):
        found = json.loads(onnxfuse("inspect", source, "--json", *flags).out)["groups"]
        return [len(g["members"]) for g in found]

    assert sizes() == [3]
    assert sizes("--fusion-mode", "none") == [1, 1, 1]
    assert max(sizes("--max-fusion-size", 2)) == 2


def test_shapes_can_be_fixed(onnxfuse, model, tmp_path):
    source, out = model("a.onnx", CHAIN, DYNAMIC), tmp_path / "o.onnx"
    for flags in (("--overwrite-input-shape", "x:3,4"), ("--dim-param", "N=3")):
        assert onnxfuse("optimize", source, out, *flags).code == 0
        assert onnxruntime.InferenceSession(out).get_inputs()[0].shape == [3, 4]


def test_weights_can_lie_beside_the_model(onnxfuse, model, tmp_path):
    weights = {"w": np.ones((64, 64), np.float32)}
    source = model("a.onnx", "m = MatMul(x, w) \n y = Relu(m)", "(float[N,64] x) => (float[N,64] y)", weights)
    result = onnxfuse("optimize", source, tmp_path / "o.onnx", "--save-as-external-data")
    assert result.code == 0, result.err
    assert (tmp_path / "o.onnx.data").stat().st_size >= 64 * 64 * 4


def test_the_users_data_is_used_for_the_check(onnxfuse, model, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros((7, 4), np.float32))
    result = onnxfuse(
        "optimize", model("a.onnx", CHAIN, DYNAMIC), "--dry-run", "--json", "--input-data", tmp_path / "x.npz"
    )
    (run,) = json.loads(result.out)["verified"][1]["runs"]
    assert run["inputs"] == {"x": [7, 4]}


def test_trace_prints_a_stage_and_stops(onnxfuse, model, tmp_path):
    source = model("a.onnx", CHAIN)
    result = onnxfuse("trace", source, "--print-after", "lower", "--stop-after", "lower", "--dump", tmp_path / "stages")
    assert result.code == 0
    assert result.out.startswith("; after lower")
    assert "total" in result.err
    assert (tmp_path / "stages" / "05_lower.txt").is_file()
    assert is_one_error(onnxfuse("trace", source, "--stop-after", "frobnicate"), "E_FLAG")


# ---- bad input: one message, exit 1, no file touched


def graph(text, opset=17):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')


def garbage(folder):
    (folder / "in.onnx").write_bytes(b"this is no model at all, just words" * 10)


def truncated(folder):
    proto = graph("(float[64] x) => (float[64] y) { y = Add(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(64, dtype=np.float32), "w"))
    data = proto.SerializeToString()
    (folder / "in.onnx").write_bytes(data[: len(data) // 2])


def empty(folder):
    (folder / "in.onnx").write_bytes(b"")


def directory(folder):
    (folder / "in.onnx").mkdir()


def missing(folder):
    pass


def invalid(folder):
    onnx.save(graph("(float[4] x) => (float[4] y) { y = Add(x) }"), folder / "in.onnx")


def undefined(folder):
    onnx.save(graph("(float[4] x) => (float[4] y) { y = Add(x, nowhere) }"), folder / "in.onnx")


def unknown_op(folder):
    onnx.save(graph("(float[4] x) => (float[4] y) { y = Frobnicate(x) }"), folder / "in.onnx")


def cyclic(folder):
    onnx.save(graph("(float[4] x) => (float[4] y) { a = Add(x, b) \n b = Relu(a) \n y = Exp(b) }"), folder / "in.onnx")


def no_external_data(folder):
    proto = graph("(float[64] x) => (float[64] y) { y = Add(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(64, np.float32), "w"))
    onnx.save(proto, folder / "in.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    (folder / "w.data").unlink()


def no_shape_found(folder):
    text = "(float[N,M] x) => (float[1009,1009] y) { s = Constant<value_ints = [1009, 1009]>() \n y = Reshape(x, s) }"
    onnx.save(graph(text), folder / "in.onnx")


def fine(folder):
    onnx.save(graph("(float[N,4] x) => (float[N,4] y) { y = Exp(x) }"), folder / "in.onnx")


BAD = {
    "not a model": (garbage, (), "out.onnx"),
    "truncated": (truncated, (), "out.onnx"),
    "empty": (empty, (), "out.onnx"),
    "a directory": (directory, (), "out.onnx"),
    "missing": (missing, (), "out.onnx"),
    "invalid graph": (invalid, (), "out.onnx"),
    "undefined value": (undefined, (), "out.onnx"),
    "unknown op": (unknown_op, (), "out.onnx"),
    "cyclic graph": (cyclic, (), "out.onnx"),
    "missing external data": (no_external_data, (), "out.onnx"),
    "missing dynamic shape": (no_shape_found, (), "out.onnx"),
    "output folder missing": (fine, (), "nowhere/out.onnx"),
    "output is a folder": (fine, (), "."),
    "output is the input": (fine, (), "in.onnx"),
    "output named like the library": (fine, (), "out.so"),
    "wrong input name": (fine, ("--overwrite-input-shape", "z:1,4"), "out.onnx"),
    "wrong input name in a test shape": (fine, ("--test-input-shape", "z:1,4"), "out.onnx"),
    "wrong dimension": (fine, ("--overwrite-input-shape", "x:1,5"), "out.onnx"),
    "wrong rank": (fine, ("--overwrite-input-shape", "x:1,4,1"), "out.onnx"),
    "unknown symbol": (fine, ("--dim-param", "Q=3"), "out.onnx"),
    "unknown target": (fine, ("--target-cpu", "z80"), "out.onnx"),
    "missing input data": (fine, ("--input-data", "none.npz"), "out.onnx"),
    "missing custom-op library": (fine, ("--custom-op-library", "none.so"), "out.onnx"),
    "no output": (fine, (), None),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_one_message_and_touches_nothing(onnxfuse, tmp_path, monkeypatch, case):
    make, flags, out = BAD[case]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    result = onnxfuse("optimize", "in.onnx", *([out] if out is not None else []), *flags)
    assert result.code == 1, result.err
    assert result.out == ""
    assert result.err.startswith("error[E_")
    assert result.err.count("error[") == 1
    assert "E_BUG" not in result.err
    assert "Traceback" not in result.err
    assert snapshot(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_refused(onnxfuse, model):
    assert is_one_error(onnxfuse("optimize", model("a.onnx", CHAIN), "/proc/out.onnx"), "E_OUTPUT")  # not even by root


# ---- the check


def test_a_mismatch_writes_nothing_and_exits_with_2(onnxfuse, model, tmp_path, monkeypatch):
    source, out = model("a.onnx", CHAIN), tmp_path / "o.onnx"
    wrong = model("wrong.onnx", "y = Neg(x)").read_bytes()
    out.write_bytes(b"what was there")
    before = snapshot(tmp_path)
    monkeypatch.setattr("onnxfuse.emit.bundle.model_bytes", lambda *args: [wrong])
    result = onnxfuse("optimize", source, out)
    assert result.code == 2
    assert "error[E_MISMATCH]" in result.err
    assert "outputs y" in result.err
    assert "Traceback" not in result.err
    assert snapshot(tmp_path) == before


def test_a_kernel_that_crashes_writes_nothing_and_exits_with_2(onnxfuse, model, tmp_path, monkeypatch):
    source, out = model("a.onnx", CHAIN), tmp_path / "o.onnx"
    out.write_bytes(b"what was there")
    before = snapshot(tmp_path)

    def emit_broken(plan, target):
        """The kernel writes to address 0 first."""
        made = emit_module(plan, target)
        bad = "store volatile i32 0, ptr null"
        text, found = re.subn(r"(define [^\n]*\.run\.0[^{]*\{\s*\w+:\n)", rf"\1  {bad}\n", made.text)
        assert found == 1
        return replace(made, text=text)

    monkeypatch.setattr("onnxfuse.codegen.generate.emit_module", emit_broken)
    result = onnxfuse("optimize", source, out)
    assert result.code == 2
    assert is_one_error(result, "E_VERIFY_CRASH")
    assert "SIGSEGV while running the optimized model with its library" in result.err
    assert snapshot(tmp_path) == before


def test_an_interrupt_leaves_no_file(onnxfuse, model, tmp_path, monkeypatch):
    source = model("a.onnx", CHAIN)
    before = snapshot(tmp_path)

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxfuse.emit.bundle.Staged.publish", interrupt)
    assert onnxfuse("optimize", source, tmp_path / "o.onnx").code == 130
    assert snapshot(tmp_path) == before
