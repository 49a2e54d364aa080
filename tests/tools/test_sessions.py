"""tools/sessions.py: the cost of a session, against the original's."""

from sessions import Cost, report


def test_ratios_are_ours_over_the_original():
    text = report({"net": (Cost(0.1, 100 << 20, 200 << 20), Cost(0.15, 110 << 20, 220 << 20))})
    *_, row = text.splitlines()
    assert row.split() == ["net", "100", "150", "1.50", "100", "110", "1.10", "200", "220", "1.10"]
