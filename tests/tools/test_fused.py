"""What the tools share: children are measured and cannot hang, tables line up."""

import sys

import fused


def test_a_child_is_measured() -> None:
    done = fused.run_child(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    )
    assert done.code == 3
    assert sorted(done.output.split()) == ["err", "out"]
    assert done.seconds > 0
    assert done.peak_rss > 1 << 20


def test_a_child_that_hangs_is_killed() -> None:
    done = fused.run_child([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)
    assert done.code != 0
    assert done.seconds < 30


def test_tables_line_up() -> None:
    assert fused.table(["name", "n"], [["a", 1], ["long", 200]]).splitlines() == [
        "name    n",
        "----  ---",
        "a       1",
        "long  200",
    ]
    assert fused.markdown(["name", "n"], [["a", 1]]) == "| name | n |\n| --- | --: |\n| a | 1 |"
