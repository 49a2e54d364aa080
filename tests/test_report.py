"""report.py and inspection.py: tables say what the facts say, and facts survive being data."""

import json

import pytest

from onnxfuse import report
from onnxfuse.inspection import GroupFacts, Inspection, LeftNode, Member, from_json
from onnxfuse.verify.bench import BenchReport, Timing
from onnxfuse.verify.compare import Report, RunReport
from onnxfuse.verify.values import Mismatch, OutputReport

FACTS = Inspection(
    (
        GroupFacts(
            "conv_relu", "fused_conv_relu_1", "anchor", "Conv_0", "conv",
            (Member("Conv_0", "Conv", ("Conv_0",)), Member("r", "Relu", ("Relu_0",))), ("x", "w"), ("y",), 4096,
        ),
    ),
    (LeftNode("n", "NonZero", "UN_OPAQUE", "output [shape] depends on data"), LeftNode("m", "TopK", "UN_OPAQUE")),
    3000,
    1000,
)  # fmt: skip


@pytest.fixture
def shown(capsys):
    def show(*parts):
        report.show(*parts)
        return capsys.readouterr().out

    return show


def test_facts_survive_json():
    assert from_json(json.loads(json.dumps(FACTS.json()))) == FACTS


def test_fused_nodes_count_the_users_nodes_once():
    twice = Inspection((FACTS.groups[0], FACTS.groups[0]), ())
    assert FACTS.fused_nodes == twice.fused_nodes == 2


def test_the_summary_has_both_models_side_by_side(shown):
    text = shown(
        report.summary(
            {"Conv": 1, "Relu": 1, "NonZero": 1}, {"NonZero": 1, "onnxfuse::g": 1}, FACTS, report.Sizes(2048, 4096, 100)
        )
    )
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in text.splitlines()
        if line.count("│") == 4
    }
    assert rows["Conv"] == ["1", "0"]
    assert rows["Nodes"] == ["3", "2"]
    assert rows["Groups"] == ["", "1"]
    assert rows["Fused nodes"] == ["", "2 of 4"]
    assert rows["Largest group"] == ["", "2"]
    assert rows["Bytes between kernels"] == ["2.9 KiB", "1000 B"]
    assert rows["Model size"] == ["2.0 KiB", "4.0 KiB"]
    assert "onnxfuse::g" not in text


def test_left_nodes_are_grouped_by_code_and_reason_and_brackets_are_no_markup(shown):
    text = shown(report.left_nodes(FACTS.left))
    assert text.count("UN_OPAQUE") == 2
    assert "output [shape] depends on data" in text


def test_groups_have_a_row_each(shown):
    text = shown(report.groups(FACTS))
    assert "conv_relu" in text
    assert "Conv Relu" in text
    assert "4.0 KiB" in text


def test_a_comparison_names_the_first_bad_element(shown):
    bad = OutputReport(
        "y", "float32", (2, 3), False, "exact", mismatches=1, total=6, first=Mismatch((1, 2), "1.0", "nan")
    )
    odd = OutputReport("z", "float32", (2,), False, "exact", problem="reference is float32[2], candidate is float32[3]")
    failed = Report(
        "a", "b", ("b.so",), (RunReport("r", {}, (bad, odd)), RunReport("s", {}, (), "no such shape")), narrowed=("n",)
    )
    text = shown(report.comparison(failed))
    for part in (
        "y[1,2]: reference 1.0, candidate nan",
        "z: reference is float32[2]",
        "no such shape",
        "1/6",
        "DIFFERS",
    ):
        assert part in text
    assert "differs with the library: no such shape" in text


def test_timings_have_the_ratio(shown):
    timing = Timing("b", 1.5, 1.0, 2.0, 1.9, 2.1, 30.0)
    text = shown(report.timings(BenchReport({"x": (1, 4)}, 1, 9, (timing,))))
    assert "2.00x" in text
    assert "x[1,4]" in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_bytes_are_written_for_people(count, text):
    assert report.nbytes(count) == text


def test_a_result_that_is_slower_says_what_to_do():
    timing = Timing("fused.onnx", 2.0, 1.9, 0.8, 0.7, 0.9, 5.0)
    assert report.speed(timing) == (
        "runs at 0.80 times the speed of the original in onnxruntime here (quartiles 0.70-0.90); "
        "--tune gives back what onnxruntime runs faster"
    )


def test_a_busy_machine_says_nothing_about_the_speed():
    line = report.speed(Timing("fused.onnx", 2.0, 1.9, 0.17, 0.11, 5.45, 5.0))
    assert line == "speed not measured: this machine is too busy to tell (quartiles of the ratio 0.11-5.45)"
    faster_anyhow = report.speed(Timing("fused.onnx", 2.0, 1.9, 2.0, 1.62, 2.64, 5.0))
    assert faster_anyhow.startswith("runs at 2.00 times the speed of the original")


def test_a_result_that_may_be_slower_by_chance_is_not_called_slower():
    assert "--tune" not in report.speed(Timing("fused.onnx", 2.0, 1.9, 0.97, 0.9, 1.1, 5.0))
