"""docs/ops.md is what the op table says."""

import gendocs

from onnxfuse.ops import entries


def test_the_table_of_operators_is_fresh():
    assert gendocs.PATH.read_text(encoding="utf-8") == gendocs.text(), "run python tools/gendocs.py"
    assert gendocs.main(["--check"]) == 0


def test_every_entry_has_a_row():
    rows = [line for line in gendocs.text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(list(entries()))
