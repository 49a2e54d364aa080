"""The benchmark pairs rounds, reports quartiles, asserts ratios and rewrites only its part of the README."""

from pathlib import Path

import bench
import pytest


def timing(name: str, ratio: float, threads: int = 1) -> bench.Timing:
    times = {"onnxfuse": 2.0, "onnxruntime": 2.0 * ratio}
    return bench.Timing(name, threads, times, {"onnxruntime": (ratio - 0.1, ratio, ratio + 0.1)}, 9)


def test_rounds_are_paired_and_every_contender_runs_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP", 0.0)
    monkeypatch.setattr(bench, "BURST", 0.0)
    order: list[str] = []
    rounds = bench.interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0)
    assert len(rounds["a"]) == len(rounds["b"]) == bench.MIN_ROUNDS
    burst = 1 + bench.MIN_BURST
    assert order[: 4 * burst] == ["a"] * burst + ["b"] * burst + ["a"] * burst + ["b"] * burst
    assert order[4 * burst : 6 * burst] == ["b"] * burst + ["a"] * burst


def test_quartiles() -> None:
    assert bench.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_a_ratio_below_the_bound_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.verdict([timing("fast", 1.5), timing("slow", 0.9)], None) == 0
    assert bench.verdict([timing("fast", 1.5), timing("slow", 0.9)], 1.0) == 2
    assert "slow" in capsys.readouterr().err
    assert bench.verdict([timing("fast", 1.5), bench.Timing("gone", 1, error="absent")], 1.0) == 1


def test_only_the_part_between_the_markers_is_rewritten(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n")
    bench.update_readme(readme, [timing("net", 1.25), timing("net", 1.5, threads=2)])
    text = readme.read_text()
    assert text.startswith(f"before\n{bench.BEGIN}\n")
    assert text.endswith(f"{bench.END}\nafter\n")
    assert "old" not in text
    assert "| net | 1 | 1.25 | 1.15-1.35 |" in text  # ratios, no absolute times


def test_a_readme_without_markers_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here\n")
    with pytest.raises(SystemExit, match="bench:begin"):
        bench.update_readme(readme, [timing("net", 1.25)])
