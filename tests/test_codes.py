"""codes.py: the catalogue holds exactly the codes the sources give, and says the truth about them."""

import ast
import re
from pathlib import Path

import pytest

from onnxfuse.codes import CODES, OPTIONAL, STAGES, default, sentence
from onnxfuse.config import Config
from onnxfuse.fuse import group
from onnxfuse.fuse.products import FUSED_PRODUCTS
from onnxfuse.fuse.rowblocks import FUSED_ATTENTION, FUSED_ROW_TAIL
from onnxfuse.fuse.rules import RULES
from onnxfuse.fuse.siblings import SIBLINGS
from tools import genrules

ROOT = Path(__file__).parent.parent / "onnxfuse"
CODE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
# Strings that look like codes and are none.
OTHERS = {
    "ONNXFUSE_CACHE_DIR": "environment: the folder of the cache",
    "LC_ALL": "environment of the linker",
    "ZIG_GLOBAL_CACHE_DIR": "environment of the linker",
    "ZIG_LOCAL_CACHE_DIR": "environment of the linker",
    "SAME_UPPER": "ONNX: auto_pad",
    "MADV_DONTNEED": "advice to the kernel about mapped pages",
}


def given() -> dict[str, set[str]]:
    """Every string of the sources that is a code, with the files it stands in."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.name == "codes.py":
            continue
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and CODE.fullmatch(n.value):
                found.setdefault(n.value, set()).add(str(path.relative_to(ROOT)))
    return {code: files for code, files in found.items() if code not in OTHERS}


def test_every_code_is_in_the_catalogue():
    missing = {code: sorted(files) for code, files in given().items() if code not in {c.code for c in CODES}}
    assert not missing, f"add a record to onnxfuse/codes.py (and run tools/genrules.py): {missing}"


def test_the_catalogue_has_no_code_that_nobody_gives():
    unused = {c.code for c in CODES} - set(given()) - {"FUSED"}
    assert not unused, f"remove from onnxfuse/codes.py (and run tools/genrules.py): {sorted(unused)}"
    assert group.FUSED == "FUSED"


def test_codes_are_distinct_sorted_by_stage_and_say_something():
    assert len({c.code for c in CODES}) == len(CODES)
    order = [list(STAGES).index(c.stage) for c in CODES]
    assert order == sorted(order)
    for c in CODES:
        assert c.meaning.strip(". ") == c.meaning != "", c.code
        assert "|" not in c.meaning + c.origin, c.code


def test_what_can_be_skipped_is_what_the_rules_say():
    optional = {code for rule in (*RULES, *SIBLINGS) if not rule.needed for code in rule.codes}
    assert optional | {group.NF_A_DEPTH, FUSED_ATTENTION, FUSED_ROW_TAIL, FUSED_PRODUCTS} == OPTIONAL


def test_every_threshold_exists():
    numbers = {c.code: default(c) for c in CODES if c.threshold}
    assert numbers["NF_NODE_CAP"] == Config().fusion.max_nodes
    assert numbers["FOLD_GROWTH"] == Config().prepare.fold_growth
    assert all(n is not None for n in numbers.values())
    assert default(next(c for c in CODES if not c.threshold)) is None


@pytest.mark.parametrize(
    ("code", "numbers", "said"),
    [
        ("NF_NODE_CAP", (("nodes", "40+31"), ("cap", 64)), "nodes 40+31 > 64"),
        ("NF_PROLOGUE", (("why", "not a view"),), "not a view"),
        ("NF_NODE_CAP", (("other", 1),), "other=1"),
        ("NF_NOT_KNOWN", (("x", 1), ("y", 2)), "x=1 y=2"),
        ("NF_TWO_ANCHORS", (), ""),
    ],
)
def test_numbers_in_words(code, numbers, said):
    assert sentence(code, numbers) == said


def test_the_page_is_up_to_date():
    assert genrules.main(["--check"]) == 0, "run tools/genrules.py"
