"""Who may import whom, which third parties stay behind which border, and op names only in ops/."""

import ast
from pathlib import Path

import onnx.defs
import pytest

ROOT = Path(__file__).parent.parent / "onnxfuse"
BASE = {"errors", "config", "target", "files"}  # anyone may import these
ALL = {"ir", "ops", "frontend", "analysis", "fuse", "codegen", "templates", "schedule", "emit", "trace"}
MAY = {
    "codes": set(),
    "errors": set(),
    "config": set(),
    "target": set(),
    "files": set(),
    "ir": set(),
    "ops": {"ir"},
    "analysis": {"ir"},
    "codegen": {"ir"},
    "frontend": {"ir", "ops"},
    "fuse": {"ir", "analysis"},
    "templates": {"ir", "analysis", "codegen"},
    "schedule": {"ir", "analysis", "templates"},
    "emit": {"ir", "frontend"},  # Source and Atomized: what was read, and how composites were cut
    "runtime": {"ir", "codegen"},
    "trace": {"ir"},
    "tuning": {"ir", "frontend", "emit", "verify"},
    "pipeline": ALL | {"inspection", "verify", "tuning"},
    "api": ALL | {"pipeline", "verify"},
    "backend": ALL | {"api", "verify"},
    "verify": {"ir", "frontend"},
    "report": {"doctor", "codes", "ir", "inspection", "explain", "verify", "tuning"},
    "inspection": {"ir", "analysis"},
    "explain": {"codes", "ir", "frontend", "fuse"},  # Note: what the simplifications did not do
    "phases": {"ir", "analysis", "schedule"},
    "doctor": {"codegen", "api", "runtime", "verify"},
    "cli": ALL
    | {"doctor", "codes", "pipeline", "tuning", "verify", "report", "runtime", "inspection", "explain", "phases"},
    "__init__": ALL | {"api", "pipeline", "verify", "report", "runtime", "inspection"},
    "__main__": {"cli"},
}
FENCES = {
    "onnx": {"frontend", "emit", "verify", "pipeline", "backend"},
    "onnx_ir": {"frontend", "emit", "verify"},
    "llvmlite": {"codegen"},
    "ziglang": {"codegen"},
    "onnxruntime": {"verify", "runtime", "backend"},
    "typer": {"cli"},
    "rich": {"report"},
}
# Type-only imports (under `if TYPE_CHECKING`) that close a circle on purpose, each with its reason.
TYPE_ONLY = {
    ("ir", "codegen"): "plan.Template names the Builder its emit() gets",
}
NAMELESS = ("fuse", "schedule", "templates", "codegen", "analysis")
FILES = sorted(ROOT.rglob("*.py"))


def part(path: Path) -> str:
    """The layer of a file: its folder, or its own name at the top."""
    inside = path.relative_to(ROOT)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(tree: ast.AST):
    """(module, statement) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node
            if node.module == "onnxfuse":
                yield from ((f"onnxfuse.{alias.name}", node) for alias in node.names)


def typing_only(tree: ast.AST) -> set[ast.AST]:
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {x for block in blocks for x in ast.walk(block)}


def strings(tree: ast.AST):
    """String literals that are not docstrings, other bare text, or the identifiers of __all__."""
    bare = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    exports = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    bare |= {id(x) for n in exports for x in ast.walk(n)}
    for n in ast.walk(tree):
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in bare:
            yield n


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_stay_within_their_layer(path):
    here = part(path)
    assert here in MAY, f"{here} is not in the table of layers"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hints = typing_only(tree)
    wrong = []
    for module, node in imports(tree):
        top, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if top == "":
            wrong.append(f"line {node.lineno}: relative import {module}")
        elif top == "onnxfuse" and other and other not in {here} | MAY[here] | BASE:
            if not (node in hints and (here, other) in TYPE_ONLY):
                wrong.append(f"line {node.lineno}: {here} must not import {other}")
        elif top in FENCES and here not in FENCES[top]:
            wrong.append(f"line {node.lineno}: {top} only in {', '.join(sorted(FENCES[top]))}")
        elif isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names):
            wrong.append(f"line {node.lineno}: import *")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_no_circle():
    left = {k: set(v) for k, v in MAY.items()}
    while left:
        free = {k for k, v in left.items() if not v}
        assert free, f"circle among {sorted(left)}"
        left = {k: v - free for k, v in left.items() if k not in free}


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in NAMELESS], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_op_name_outside_ops(path):
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [f"line {n.lineno}: {n.value!r}" for n in strings(tree) if n.value in names]
    assert not found, "op names belong to ops/:\n" + "\n".join(found)
