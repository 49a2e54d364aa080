"""The table of public bugs is complete and true: every row has a test that is there, or a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .models import CASES
from .rows import ROWS, VALUES, Row, table

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.number} {r.thread}")
def test_the_row_has_a_test_or_a_reason(row: Row) -> None:
    if row.where == VALUES:
        assert any(case.row == row.number for case in CASES)
    elif row.where.startswith("- "):
        assert len(row.where) > 40
    else:
        file, name = row.where.split("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert any(isinstance(n, ast.FunctionDef) and n.name == name for n in ast.walk(tree)), row.where


def test_every_model_belongs_to_a_row() -> None:
    assert {case.row for case in CASES} <= {row.number for row in ROWS}


def test_names_of_models_differ() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


def test_the_page_is_fresh() -> None:
    assert (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8") == table(), "run python -m tests.cases.rows"
