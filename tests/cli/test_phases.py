"""phases.py and `trace`: the phases as diffs, their numbers, and any stage before code generation as a model."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings

from onnxfuse.ir.interp import run_kernel, run_loops
from onnxfuse.ir.loops import LoopGraph
from onnxfuse.ir.parse import parse
from onnxfuse.phases import story as tell
from tests.cli.conftest import is_one_error
from tests.cli.random_models import models, planned

MODELS = ("conv_add_relu", "softmax", "tiny_ocr", "tiny_transformer")
MIXED = "a = Exp(x) c = NonZero(x) d = Abs(a) y = Neg(d)"
MIXED_SIGNATURE = "(float[4, n] x) => (float[4, n] y, int64[2, k] c)"


def path(name):
    return f"models/{name}.onnx"


def story(onnxfuse, *arguments):
    result = onnxfuse("trace", *arguments, "--format", "json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def patched(old, diff):
    """Apply a unified diff to a list of lines; every context line and every removed line must be there."""
    out, at = [], 0
    for line in diff:
        if line.startswith(("--- ", "+++ ")) and not out and at == 0:
            continue
        if line.startswith("@@"):
            start, count = re.match(r"@@ -(\d+)(?:,(\d+))?", line).groups(default="1")
            begin = int(start) - (int(count) > 0)
            out += old[at:begin]
            at = begin
        elif line[0] == "+":
            out.append(line[1:])
        else:
            assert old[at] == line[1:]
            out += [line[1:]] if line[0] == " " else []
            at += 1
    return out + old[at:]


def test_the_trace_of_conv_add_relu(onnxfuse, golden):
    """FUSION.md 5. Tile sizes are the planner's business, and left out."""
    out = onnxfuse("trace", path("conv_add_relu"), "--fusion-mode", "canfuse", "--target-cpu", "x86-64-v3").out
    assert re.sub(r"(; schedule template=\w+).*", r"\1 ...", out) == golden


def test_the_numbers_of_conv_add_relu(onnxfuse):
    total = story(onnxfuse, path("conv_add_relu"))["summary"]
    assert total["kernels"] == {"before": 3, "after": 1}
    before = (12288 + 1728 + 65536) + (65536 + 64 + 65536) + (65536 + 65536)
    assert total["traffic"] == {"before": before, "after": 12288 + 1728 + 64 + 65536}
    assert total["traffic"] == {"before": 341760, "after": 79616}
    assert total["local_bytes"] == {"before": 131072, "after": 0}


@pytest.mark.parametrize("name", MODELS)
def test_every_diff_applies_to_the_print_before_it(onnxfuse, name):
    phases = story(onnxfuse, path(name))["phases"]
    full = onnxfuse("trace", path(name), "--format", "full").out.splitlines()
    start = full.index("== original ==") + 1
    text = full[start : full.index("== phase 1: legalize ==")]
    for p in phases:
        text = patched(text, p["diff"])
        assert text == p["text"]
    assert onnxfuse("trace", path(name), "--format", "full", "--phase", "4").out.splitlines()[2:][: len(text)] == text


@settings(max_examples=25)
@given(models())
def test_the_diffs_of_any_model_apply_and_traffic_never_grows(drawn):
    source, plans, _ = planned(*drawn)
    told = tell(source, plans)
    text = list(told.phases[0].old)
    for p in told.phases:
        text = patched(text, p.diff())
        assert text == list(p.new)
    assert told.totals.traffic[1] <= told.totals.traffic[0]
    assert told.totals.kernels[1] == len(plans.calls)
    for call in plans.calls.values():
        alone = tell(source, plans, call.name)
        assert alone.totals.kernels[1] == 1
        text = list(alone.phases[0].old)
        for p in alone.phases:
            text = patched(text, p.diff())
            assert text == list(p.new)


@pytest.mark.parametrize("name", MODELS)
def test_the_trace_is_deterministic_and_tells_nothing_of_the_run(onnxfuse, name):
    first, second = onnxfuse("trace", path(name)), onnxfuse("trace", path(name))
    assert first == second
    assert not re.search(r"0x[0-9a-f]{6}", first.out)
    assert first.out.startswith(f"# onnxfuse trace  model={name}.onnx  mode=full  cap=64\n")


def test_the_cap_is_that_of_the_mode(onnxfuse):
    arguments = ("trace", path("conv_add_relu"), "--phase", "1", "--fusion-mode", "tvm")
    assert onnxfuse(*arguments).out.startswith("# onnxfuse trace  model=conv_add_relu.onnx  mode=tvm  cap=256\n")
    assert "cap=8\n" in onnxfuse(*arguments, "--max-fusion-size", "8").out


def test_every_line_of_the_grouped_graph_reads_what_is_there(onnxfuse, model):
    source = model("m.onnx", MIXED, MIXED_SIGNATURE)
    for name in (source, path("tiny_ocr"), path("tiny_transformer")):
        text = story(onnxfuse, name)["phases"][1]["text"]
        known = set(re.findall(r"(%[^\s:,]+): ", text[0]))
        for line in text[1 : text.index("}")]:
            line = line.partition("   ;")[0]
            head, equals, body = line.partition(" = ")
            reads = re.findall(r"%[\w./]+", re.sub(r"\{.*", "", body if equals else head))
            if line.startswith("  const"):
                reads = []
            assert set(reads) <= known, line
            known |= set(re.findall(r"%[\w./]+", head))


def test_nodes_that_stay_are_in_the_trace_with_the_reason(onnxfuse, model):
    source = model("m.onnx", MIXED, MIXED_SIGNATURE)
    out = onnxfuse("trace", source).out
    assert re.search(r"^\+  %c = onnx\.NonZero\(%x\)   ; stays: UN_OPAQUE", out, re.M)
    assert "left with onnxruntime 1" in out
    assert re.search(r"traffic ~\d+ -> ~\d+ B", out)  # free dimensions are an assumption


def test_a_refused_pair_prints_its_code(onnxfuse, model):
    weights = {"w": np.ones((2, 2, 1, 1), np.float32)}
    signature = "(float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y)"
    source = model("m.onnx", "r = Relu(x) y = Conv(r, w)", signature, weights)
    assert "; A r->y REFUSED NF_A_EDGE_KIND(anchor)" in onnxfuse("trace", source, "--phase", "2").out


def test_one_phase_and_one_group(onnxfuse):
    out = onnxfuse("trace", path("conv_add_relu"), "--phase", "2").out
    assert out.count("== phase") == 1
    assert "== phase 2: group ==" in out
    names = ("fused_conv_relu", "conv_relu", "se.relu", "Relu_4")
    told = [story(onnxfuse, path("tiny_ocr"), "--only", "se.relu")]
    group = re.search(r"^group @(\S+)\(", "\n".join(told[0]["phases"][1]["text"]), re.M)[1]
    told += [story(onnxfuse, path("tiny_ocr"), "--only", name) for name in (group, group.removeprefix("fused_"))]
    assert told[0] == told[1] == told[2], names
    assert told[0]["summary"]["kernels"]["after"] == 1
    assert is_one_error(onnxfuse("trace", path("tiny_ocr"), "--only", "frobnicate"), "E_NO_NAME")
    assert is_one_error(onnxfuse("trace", path("tiny_ocr"), "--phase", "5"), "E_FLAG")


# ---- what the prints say is what is computed

INIT = {"+=": ("add", "0.0"), "max=": ("max", "-inf")}
NEST = re.compile(r"  for (.*?)(?: \| reduce (.*?))? \{(?: (%\S+)\[.*?\] = (.*) \})?$")


def merged_as_loops(kernel, types):
    """The loops of a merged function, in the text of the IR."""
    head = re.match(r"kernel @\S+\((.*), out (%\S+)\) noalias", kernel[0])
    known = types | dict(re.findall(r"alloc (\S+): (\S+)", "\n".join(kernel)))
    ins = ", ".join(f"{v}: {types[v]}" for v in head[1].split(", "))
    lines, body = [], [line for line in kernel[1:-1] if not line.startswith("  alloc")]
    while body:
        axes, over, target, value = NEST.match(body.pop(0)).groups()
        axes = axes.replace(" ", ", ")
        if over is None:
            lines.append(f"  {target}[{axes}]: f32 = {value}")
            continue
        target, sign, value = re.match(r"    (\S+?)(?:\[.*?\])? (\S+=) (.*?)(?: \})?$", body.pop(0)).groups()
        combine, init = INIT[sign]
        if target == "acc":
            target, finish = re.match(r"    (\S+?)\[.*?\] = (.*) \}", body.pop(0)).groups()
            value += f" -> {finish}"
        assert target in known
        over = over.replace(" ", ", ")
        lines.append(f"  {target}[{axes}]: f32 = {combine}[{over}] init {init} acc f32: {value}")
    return f'loops "g"({ins}) -> ({head[2]}) {{\n' + "\n".join(lines) + "\n}\n"


def scheduled_as_kernel(kernel, types):
    """The loops of a scheduled function, in the text of the IR."""
    head = re.match(r"kernel @\S+\((.*), out (%\S+)\) noalias", kernel[0])
    ins = ", ".join(f"{v}: {types[v]}" for v in head[1].split(", "))
    lines, stage, rows = [], "stage []", ""
    for v in head[1].split(", "):
        for k, d in enumerate(types[v].partition("[")[2].removesuffix("]").split(",")):
            lines += [f"  dim {d} = shape({v}, {k})"] if d.isidentifier() else []
    for line in (line.strip() for line in kernel[1:-1]):
        if line.startswith("local"):
            lines.append(f"  {line.partition('   ;')[0]}")
        elif line.startswith("parallel for"):
            rows = line.removeprefix("parallel for ").removesuffix(" {").replace(" ", ", ")
        elif line.startswith("for "):
            stage = f"stage [{line[4:-2].replace(' ', ', ')}]"
        elif line.startswith("reduce"):
            over, sign, value = re.match(r"reduce (.*?) \{ acc (\S+=) (.*) \}", line).groups()
            combine, init = INIT[sign]
            stage += f" {combine}[{over.replace(' ', ', ')}] init {init} acc f32: {value}"
        elif line.startswith("%"):
            lines.append(f"  {stage} {{\n    {line}\n  }}")
            stage = "stage []"
    return f'kernel "k"({ins}) -> ({head[2]}: {types[head[2]]}) outer [{rows}] {{\n' + "\n".join(lines) + "\n}\n"


@pytest.mark.parametrize("name", ["conv_add_relu", "softmax", "norm"])
def test_the_last_two_prints_compute_what_the_model_does(onnxfuse, model, rng, name):
    weights, signature = {"s": rng.standard_normal(16).astype(np.float32)}, "(float[4, 16] x) => (float[4, 16] y)"
    file = path(name) if name != "norm" else model("norm.onnx", "y = LayerNormalization(x, s)", signature, weights)
    phases, source = story(onnxfuse, file)["phases"], onnx.load(file)
    types = dict(re.findall(r"(%[^\s:(]+): (\w+\[[\w,]*\])", "\n".join(phases[1]["text"])))
    for line in phases[0]["text"]:
        types |= dict(re.findall(r"  (%\S+) = call .* : (\w+\[[\w,]*\])", line))
    shapes = {i.name: [d.dim_value or 3 for d in i.type.tensor_type.shape.dim] for i in source.graph.input}
    feeds = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in source.graph.initializer}
    (want,) = run(file, feeds)
    for p, read in ((phases[2], merged_as_loops), (phases[3], scheduled_as_kernel)):
        start = next(k for k, line in enumerate(p["text"]) if line.startswith("kernel"))
        ir = parse(read(p["text"][start:], types))
        values = {v.name: {**feeds, **weights}[v.name] for v in ir.inputs}
        got = (
            next(iter(run_loops(ir, values).values()))
            if isinstance(ir, LoopGraph)
            else run_kernel(ir, list(values.values()))[0]
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# ---- --export-stage


def run(model, feeds):
    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize("stage", ["read", "prepare", "atomize", "fuse", "layout", "kernelize", "plan"])
@pytest.mark.parametrize("name", ["softmax", "tiny_ocr"])
def test_an_exported_stage_computes_the_same(onnxfuse, tmp_path, rng, name, stage):
    out = tmp_path / "out.onnx"
    result = onnxfuse("trace", path(name), "--export-stage", stage, out)
    assert result.code == 0, result.err
    assert result.out == f"wrote {out}\n"
    assert not out.with_suffix(".so").exists()
    graph = onnx.load(path(name)).graph
    shapes = {i.name: [d.dim_value or 2 for d in i.type.tensor_type.shape.dim] for i in graph.input}
    if name == "tiny_ocr":
        shapes = {k: [2, 3, 32, 64] for k in shapes}
    feeds = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    for want, got in zip(run(path(name), feeds), run(out, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    exported = onnx.load(out)
    custom = {n.op_type for n in exported.graph.node if n.domain == "onnxfuse"}
    assert custom == (
        {f.name for f in exported.functions} if stage in ("fuse", "layout", "kernelize", "plan") else set()
    )
    if not custom:  # just another model
        assert not exported.metadata_props
        assert "groups" in onnxfuse("inspect", out).out


def test_atomize_exports_atoms(onnxfuse, tmp_path):
    ops = {}
    for stage in ("prepare", "atomize"):
        onnxfuse("trace", path("softmax"), "--export-stage", stage, tmp_path / f"{stage}.onnx")
        ops[stage] = [n.op_type for n in onnx.load(tmp_path / f"{stage}.onnx").graph.node]
    assert ops["prepare"] == ["Mul", "Softmax"]
    assert ops["atomize"] == ["Mul", "ReduceMax", "Sub", "Exp", "ReduceSum", "Div"]


def test_a_stage_that_is_no_model_and_a_bad_output_are_one_message(onnxfuse, tmp_path):
    source = path("softmax")
    assert is_one_error(onnxfuse("trace", source, "--export-stage", "lower", tmp_path / "o.onnx"), "E_STAGE")
    assert is_one_error(onnxfuse("trace", source, "--export-stage", "read", tmp_path / "no" / "o.onnx"), "E_OUTPUT")
    assert list(Path(tmp_path).iterdir()) == []
