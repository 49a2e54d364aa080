"""Text of every level, printed and parsed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Acc, Apply, Expr, Lit, Load, Sym, Var, children, walk

# -- expressions -----------------------------------------------------------------------------------------------------

_BARE_LIMIT = 600  # characters of one operand list printed without let-lines
_LET_TREE = 60  # nodes of an expanded body from which shared parts get a let-line
_LET_SIZE = 120  # nodes of one line
_LET_DEPTH = 40  # nesting of one line: keeps the parser's recursion bounded
_INFIX = {
    "or": ("|", 1), "and": ("&", 2), "lt": ("<", 3), "le": ("<=", 3), "eq": ("==", 3), "ne": ("!=", 3),
    "add": ("+", 4), "sub": ("-", 4), "mul": ("*", 5), "div": ("/", 5), "floordiv": ("//", 5), "mod": ("%", 5),
}  # fmt: skip
_UNARY = 6
_ATOM = 7
_IDENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_VALUE = re.compile(r"[A-Za-z0-9_./]+(?::+[A-Za-z0-9_./]+)*")
_LET_NAME = re.compile(r"_[0-9]+")
_RESERVED = frozenset({"inf", "nan", "true", "false", "acc", "let", "in", "init", "from", "stage", "refused"})


def print_expr(e: Expr) -> str:
    """Infix text of one expression; axes and values by their own names.

    Memoised on the expression. A body too large for one line is printed as `let _0 = ... in ...`, linear in the
    number of distinct sub-expressions.
    """
    stack = [e]
    while stack:
        top = stack[-1]
        parts = children(top)
        missing = [] if top.text else [c for c in parts if not c.text]
        if missing:
            stack.extend(missing)
            continue
        if not top.text:
            if sum(len(c.text) for c in parts) > _BARE_LIMIT:
                e.text = _flat(e)
                return e.text
            top.text = _node_text(top, [c.text for c in parts], [_prec(c) for c in parts], None)
        stack.pop()
    return e.text


def _flat(e: Expr) -> str:
    lets, text = _body_text(e, None)
    return " ".join([f"let {name} = {line} in" for name, line in lets] + [text])


def quote(name: str) -> str:
    """A string in double quotes, escapes as in JSON."""
    import json  # start-up time: text is imported by expr

    return json.dumps(name)


def _sym_text(name: str) -> str:
    plain = _IDENT.fullmatch(name) and name not in _RESERVED and not _LET_NAME.fullmatch(name)
    return name if plain else "$" + quote(name)


def _value_text(name: str) -> str:
    return f"%{name}" if _VALUE.fullmatch(name) else "%" + quote(name)


class Names:
    """Printed names of values and axes; made per printed object, so that clashes get `.1`."""

    __slots__ = ("axes", "values")

    def __init__(self) -> None:
        self.values: dict[object, str] = {}
        self.axes: dict[object, str] = {}


def lit_text(e: Lit) -> str:
    """`3` is i64, `1.5` is f32, `true` bool; any other dtype is written `3:i32`."""
    if e.dtype is DType.BOOL:
        return "true" if e.value else "false"
    if not e.dtype.is_float:
        return f"{e.value}" if e.dtype is DType.I64 else f"{e.value}:{e.dtype}"
    value = float(e.value)
    if math.isnan(value):
        text = "-nan" if math.copysign(1.0, value) < 0 else "nan"
    elif e.dtype is DType.F32 and math.isfinite(value):
        text = str(np.float32(value))
    else:
        text = repr(value)
    return text if e.dtype is DType.F32 else f"{text}:{e.dtype}"


def _prec(e: Expr) -> int:
    if isinstance(e, Apply):
        if e.prim.name in _INFIX:
            return _INFIX[e.prim.name][1]
        if e.prim.name == "neg":
            return _ATOM if isinstance(e.args[0], Lit) else _UNARY
    return _ATOM


def _node_text(e: Expr, parts: Sequence[str], precs: Sequence[int], names: Names | None) -> str:
    """Text of one node from the texts of its children; `precs` are the binding strengths of those texts."""
    match e:
        case Lit():
            return lit_text(e)
        case Var():
            return (names.axes.get(e.axis) if names else None) or e.axis.name
        case Sym():
            return _sym_text(e.name)
        case Acc():
            return "acc"
        case Load():
            source = (names.values.get(e.source) if names else None) or _value_text(e.source.name)
            return f"{source}[{', '.join(parts)}]"
        case Apply():
            return _apply_text(e, parts, precs)
    raise TypeError(type(e).__name__)


def _apply_text(e: Apply, parts: Sequence[str], precs: Sequence[int]) -> str:
    name = e.prim.name
    precs = [0 if p.startswith("let ") else q for p, q in zip(parts, precs, strict=True)]
    if name in _INFIX:
        sign, prec = _INFIX[name]
        strict_left = prec == 3  # comparisons do not chain
        left = f"({parts[0]})" if precs[0] < prec or (strict_left and precs[0] == prec) else parts[0]
        right = f"({parts[1]})" if precs[1] <= prec else parts[1]
        return f"{left} {sign} {right}"
    if name == "neg" and not isinstance(e.args[0], Lit):
        return f"-({parts[0]})" if precs[0] <= _UNARY else f"-{parts[0]}"
    return f"{e.dtype if name == 'cast' else name}({', '.join(parts)})"


def _body_text(root: Expr, names: Names | None, first: int = 0) -> tuple[list[tuple[str, str]], str]:
    """Let-lines and the final expression. Small bodies have no lets; shared and oversized parts get one each."""
    order = list(walk(root))
    tree: dict[int, int] = {}
    uses: dict[int, int] = {}
    for e in order:
        tree[id(e)] = min(1 + sum(tree[id(c)] for c in children(e)), 1 << 60)
        for c in dict.fromkeys(children(e)):
            uses[id(c)] = uses.get(id(c), 0) + 1
    big = tree[id(root)] > _LET_TREE
    size: dict[int, int] = {}
    depth: dict[int, int] = {}
    text: dict[int, tuple[str, int]] = {}
    lets: list[tuple[str, str]] = []
    for e in order:
        parts = children(e)
        size[id(e)] = 1 + sum(size[id(c)] for c in parts)
        depth[id(e)] = 1 + max((depth[id(c)] for c in parts), default=0)
        got = [text[id(c)] for c in parts]
        line = _node_text(e, [t for t, _ in got], [p for _, p in got], names)
        shared = big and uses.get(id(e), 0) > 1 and size[id(e)] > 3
        if e is not root and (shared or size[id(e)] > _LET_SIZE or depth[id(e)] > _LET_DEPTH):
            name = f"_{first + len(lets)}"
            lets.append((name, line))
            text[id(e)], size[id(e)], depth[id(e)] = (name, _ATOM), 1, 1
        else:
            text[id(e)] = (line, _prec(e))
    return lets, text[id(root)][0]
