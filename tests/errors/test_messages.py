"""Every error code appears for its reason, and its message says what, why (with numbers) and what to do.

A scenario is the smallest way to make a message appear (about_*.py); the whole text is compared. A new code of these
stages fails here until it has one.
"""

from __future__ import annotations

import pytest

from onnxfuse.codes import CODES
from tests.errors import about_data, about_machines, about_models, about_refusals
from tests.errors.world import HERE, SCENARIOS, Scenario, World, pattern

PLACES = (about_models, about_data, about_machines, about_refusals)


@pytest.fixture
def world(tmp_path, monkeypatch, capsys) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return World(tmp_path, monkeypatch, capsys.readouterr)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[f"{s.code}-{s.run.__name__}" for s in SCENARIOS])
def test_message(world: World, scenario: Scenario):
    said = scenario.run(world).replace(str(world.here), HERE).replace(str(world.here.parent), f"{HERE}/..")
    said = said[max(said.find("error["), 0) :]
    said = said.partition("\n  stage:")[0].strip()  # and how to get there again: tests/test_trace.py
    assert pattern(scenario.text).fullmatch(said), f"expected:\n{scenario.text}\ngot:\n{said}"


def test_every_error_code_has_a_scenario():
    codes = {c.code for c in CODES if c.code.startswith(("E_", "W_", "UN_"))}
    shown = {s.code for s in SCENARIOS}
    assert not codes - shown, f"add a scenario to one of {[p.__name__ for p in PLACES]}"
    assert not shown - codes
