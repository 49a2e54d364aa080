"""verify/bench.py: who runs when, and what the ratio means."""

import numpy as np
import pytest
from onnx import parser

from onnxfuse.errors import UsageError
from onnxfuse.verify.bench import Contestant, bench

FEEDS = {"x": np.zeros(4, np.float32)}
SHAPES = {"x": (4,)}


def model(body="y = Neg(x)", signature="(float[4] x) => (float[4] y)"):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {signature} {{ {body} }}')


def test_every_round_runs_every_contestant_and_the_order_turns_around(monkeypatch):
    order, names = [], iter("ab")

    def prepared(sess, feeds):
        name = next(names)
        return lambda: order.append(name)

    monkeypatch.setattr("onnxfuse.verify.ort.prepared", prepared)
    hour = iter(range(10_000))  # every call takes an hour: one call per slice
    report = bench(
        [Contestant("a", model()), Contestant("b", model())], FEEDS, SHAPES, rounds=4, clock=lambda: 3600.0 * next(hour)
    )
    assert "".join(order) == "aaabbb" + "abbaabba"
    assert report.rounds == 4
    assert [t.name for t in report.timings] == ["a", "b"]
    assert [t.ratio for t in report.timings] == [1, 1]


def test_time_bounds_the_rounds():
    ticks = iter(range(10_000))
    report = bench([Contestant("a", model())], FEEDS, SHAPES, seconds=50, clock=lambda: float(next(ticks)))
    assert 3 <= report.rounds <= 50


def test_refused_inputs_are_the_callers_error():
    with pytest.raises(UsageError, match="E_INPUT_REFUSED"):
        bench([Contestant("a", model())], {"x": np.zeros(5, np.float32)}, {"x": (5,)}, rounds=1)


def test_the_report_is_plain_data():
    data = bench([Contestant("a", model())], FEEDS, SHAPES, rounds=3).json()
    assert data["inputs"] == SHAPES
    assert set(data["timings"][0]) == {
        "name", "median_ms", "best_ms", "ratio", "ratio_low", "ratio_high", "load_ms",
    }  # fmt: skip
