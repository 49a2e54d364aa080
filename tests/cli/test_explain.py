"""explain.py, `explain` and `rules`: one node, one edge, all; names people know; the first blocking rule."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings

from onnxfuse.codes import BY_CODE, CODES
from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.explain import answers
from onnxfuse.ir.loops import Compute
from onnxfuse.ir.partition import Verdict
from tests.cli.conftest import is_one_error
from tests.cli.random_models import models, planned

BRANCHES = "a = Exp(x) b = Cast<to=11>(a) c = NonZero(x) d = Abs(a) y = Neg(d)"
SIGNATURE = "(float[4, 8] x) => (float[4, 8] y, double[4, 8] b, int64[2, k] c)"


@pytest.fixture
def conv(tmp_path):
    return "models/conv_add_relu.onnx"


def test_the_summary_counts_every_decision_once(onnxfuse, conv):
    said = json.loads(onnxfuse("explain", "models/tiny_transformer.onnx", "--json").out)
    counted = sum(row["count"] for row in said["codes"] if row["verdict"] in ("fused", "refused"))
    assert counted == len(said["decisions"])
    assert all(d["code"] in BY_CODE and d["meaning"] for d in said["decisions"])
    table = onnxfuse("explain", "models/tiny_transformer.onnx").out
    assert all(row["code"] in table for row in said["codes"])


@pytest.mark.parametrize("names", ["conv,out", "Conv,Add", "conv,Add"])
def test_a_fused_edge_says_where_and_in_which_phase(onnxfuse, conv, names):
    said = json.loads(onnxfuse("explain", conv, "--edge", names, "--json").out)
    assert said["verdict"].endswith("run in one kernel: group conv_add_relu")
    assert said["blocking"] is None
    assert [(d["stage"], d["code"], d["numbers"]) for d in said["decisions"]] == [("A", "FUSED", {"phase": 0})]


def test_a_refused_edge_names_the_first_blocking_rule_with_its_numbers(onnxfuse, conv):
    result = onnxfuse(
        "explain", conv, "--edge", "out,relu", "--max-fusion-size", "1", "--skip-fusion-patterns", "NF_A_DEPTH"
    )
    assert result.code == 0
    result = onnxfuse("explain", conv, "--edge", "out,relu", "--max-fusion-size", "1")
    assert result.out.startswith("out and relu run in separate kernels: conv_add and ")
    text = " ".join(result.out.split())
    assert re.search(r"first blocking rule: A out->relu NF_A_DEPTH: .*\(nodes 3 > \d\)", text)
    assert "what to do: raise --max-fusion-size, or leave the rule out: --skip-fusion-patterns NF_A_DEPTH" in text


def test_the_recorded_refusal_is_the_one_of_another_mode_too(onnxfuse):
    said = json.loads(
        onnxfuse("explain", "models/softmax.onnx", "--node", "Softmax", "--fusion-mode", "tvm", "--json").out
    )
    assert said["blocking"]["code"].startswith("NF_A_")
    assert len(said["subjects"]) == 5  # the atoms of a composite answer to its name and to its operator
    alone = json.loads(
        onnxfuse("explain", "models/softmax.onnx", "--edge", "scaled,y", "--fusion-mode", "none", "--json").out
    )
    assert (alone["blocking"]["code"], alone["blocking"]["numbers"]) == ("NF_MODE", {"mode": "none"})


def test_nodes_that_stay_are_explained_by_their_refusal(onnxfuse, model):
    source = model("m.onnx", BRANCHES, SIGNATURE)
    for name in ("NonZero", "c"):
        said = json.loads(onnxfuse("explain", source, "--node", name, "--json").out)
        assert [s["code"] for s in said["subjects"]] == ["UN_OPAQUE"]
        assert "stays with onnxruntime: UN_OPAQUE" in said["verdict"]
    edge = onnxfuse("explain", source, "--edge", "x,c").out
    assert edge == "x is an input of the model: nothing to decide\n"
    summary = json.loads(onnxfuse("explain", source, "--json").out)
    assert {"verdict": "left", "code": "UN_OPAQUE", "count": 1} in [
        {k: row[k] for k in ("verdict", "code", "count")} for row in summary["codes"]
    ]


def test_what_was_simplified_away_and_what_is_unrelated_is_said(onnxfuse, model):
    source = model("m.onnx", "a = Identity(x) b = Abs(a) c = Exp(x) y = Add(b, c)")
    assert "simplifications before fusion removed it" in onnxfuse("explain", source, "--node", "a").out
    alone = onnxfuse("explain", source, "--edge", "b,c", "--fusion-mode", "none").out
    assert alone.startswith("neither b nor c reads the other, both read x")
    assert "NF_MODE" in alone


def test_two_that_have_nothing_to_do_with_each_other_are_judged_all_the_same(onnxfuse, model):
    weights = {"w": np.ones((8, 8), np.float32)}
    body = "a = Exp(x) p = MatMul(a, w) m = Transpose<perm=[1, 0]>(p) q = MatMul(m, p) y = Abs(q)"
    source = model("m.onnx", body, "(float[4, 8] x) => (float[8, 8] y)", weights)
    said = json.loads(onnxfuse("explain", source, "--edge", "a,q", "--json").out)
    assert said["verdict"].startswith("neither a nor q reads the other, they share no value")
    assert (said["blocking"]["stage"], said["blocking"]["code"]) == ("C", "NF_KIND")


def test_the_summary_says_what_keeps_the_kernels_apart_and_how_many_bytes_move(onnxfuse, model):
    source = model("m.onnx", "a = Exp(x) y = Neg(a) z = Abs(a)", "(float[4, 8] x) => (float[4, 8] y, float[4, 8] z)")
    said = json.loads(onnxfuse("explain", source, "--fusion-mode", "tvm", "--json").out)
    assert [(c["value"], c["bytes"], c["decision"]["code"]) for c in said["crossings"]] == [
        ("a", 128, "NF_A_NO_POSTDOM"), ("a", 128, "NF_A_NO_POSTDOM"),
    ]  # fmt: skip
    assert json.loads(onnxfuse("explain", source, "--json").out)["crossings"] == []


def test_an_unknown_name_is_one_message_with_the_nearest_names(onnxfuse, conv):
    for flag, value in (("--node", "rel"), ("--edge", "conv,rel")):
        result = onnxfuse("explain", conv, flag, value)
        assert result.code == 1
        assert is_one_error(result, "E_NO_NAME")
        assert "relu" in result.err
    assert is_one_error(onnxfuse("explain", conv, "--edge", "conv"), "E_FLAG")
    assert is_one_error(onnxfuse("explain", conv, "--edge", "conv,out", "--node", "out"), "E_FLAG")


def test_names_may_hold_commas(onnxfuse, model):
    import onnx

    source = model("m.onnx", "a = Exp(x) y = Neg(a)")
    proto = onnx.load(source)
    proto.graph.node[0].name, proto.graph.node[1].name = "first,one", "second"
    onnx.save(proto, source)
    said = json.loads(onnxfuse("explain", source, "--edge", "first,one,second", "--json").out)
    assert "run in one kernel" in said["verdict"]


def test_every_decision_reproduces_when_the_edge_is_asked_for(onnxfuse):
    source = "models/tiny_ocr.onnx"
    every = json.loads(onnxfuse("explain", source, "--json").out)["decisions"]
    for d in every[:: max(1, len(every) // 4)]:
        again = json.loads(onnxfuse("explain", source, "--edge", f"{d['a']},{d['b']}", "--json").out)
        assert any(d.items() <= other.items() for other in again["decisions"])


@settings(max_examples=25)
@given(models())
def test_the_answer_about_any_edge_is_what_the_partition_says(drawn):
    source, plans, layout = planned(*drawn)
    fusion = FusionConfig(mode=drawn[1])
    found = answers([source], [layout], plans, fusion)
    pairs = [(d.stage, d.a, d.b) for d in plans.partition.decisions]
    assert len(pairs) == len(set(pairs))  # one record per pair and stage
    home = {c.out.name: g.id for g in plans.partition.groups for c in g.members}
    for item in plans.partition.loops.items:
        if not isinstance(item, Compute) or item.out.name not in home:
            continue
        for v in item.reads:
            if v.name not in home:
                continue
            said = found.edge(v.name, item.out.name)
            if home[v.name] == home[item.out.name] and home[v.name] in plans.calls:
                assert "run in one kernel" in said.verdict
                assert said.blocking is None
            else:
                assert "run in one kernel" not in said.verdict
                if home[v.name] not in plans.calls or home[item.out.name] not in plans.calls:
                    assert "stays with onnxruntime" in said.verdict
                    continue
                assert said.blocking in said.decisions
                assert said.blocking.verdict is Verdict.REFUSED


# ---- rules


def test_rules_lists_the_catalogue(onnxfuse):
    listed = json.loads(onnxfuse("rules", "--json").out)
    assert [row["code"] for row in listed] == [c.code for c in CODES]
    cap = next(row for row in listed if row["code"] == "NF_NODE_CAP")
    assert (cap["stage"], cap["threshold"], cap["default"], cap["optional"]) == ("B", "fusion.max_nodes", 64, True)
    table = onnxfuse("rules").out
    assert all(c.code in table for c in CODES)


def test_rules_takes_a_code_or_its_beginning(onnxfuse):
    assert [r["code"] for r in json.loads(onnxfuse("rules", "NF_CYCLE", "--json").out)] == ["NF_CYCLE"]
    assert len(json.loads(onnxfuse("rules", "NF_A_", "--json").out)) > 5
    result = onnxfuse("rules", "NF_CYCLES")
    assert is_one_error(result, "E_NO_CODE")
    assert "NF_CYCLE" in result.err


@pytest.mark.parametrize("code", ["NF_FROBNICATE", "NF_GROUP_MERGE"])
def test_a_rule_that_does_not_exist_or_is_needed_cannot_be_skipped(onnxfuse, conv, code):
    result = onnxfuse("inspect", conv, "--skip-fusion-patterns", code)
    assert is_one_error(result, "E_FLAG")
    assert "NF_NODE_CAP" in result.err


# ---- inspect in every mode


@pytest.mark.parametrize("mode", list(FusionMode))
@pytest.mark.parametrize("name", ["conv_add_relu", "softmax"])
def test_inspect_gives_the_partition_of_every_mode_without_generating_code(onnxfuse, monkeypatch, name, mode):
    monkeypatch.setattr("onnxfuse.pipeline.generate", None)
    result = onnxfuse("inspect", f"models/{name}.onnx", "--no-compile", "--json", "--fusion-mode", mode)
    assert result.code == 0
    groups = json.loads(result.out)["groups"]
    members = [m["name"] for g in groups for m in g["members"]]
    assert len(members) == len(set(members)) == {"conv_add_relu": 3, "softmax": 6}[name]
    expected = {"none": len(members), "tvm": 1 if name == "conv_add_relu" else None, "canfuse": 1, "full": 1}[mode]
    assert expected in (None, len(groups))
