"""The roofline is a limit: more work never takes less time, and what is measured is positive."""

import roofline


def test_the_slower_of_both_limits_counts() -> None:
    m = roofline.Machine(threads=1, peak=100.0, bandwidth=10.0)
    assert m.seconds(operations=1000, nbytes=10) == 10.0
    assert m.seconds(operations=10, nbytes=1000) == 100.0


def test_the_loop_of_multiply_adds_computes_and_is_timed(monkeypatch) -> None:
    monkeypatch.setattr(roofline, "ROUNDS", 1000)
    monkeypatch.setattr(roofline, "COPY_BYTES", 1 << 16)
    found = roofline.machine(2)
    assert found.threads == 2
    assert found.peak > 0
    assert found.bandwidth > 0
