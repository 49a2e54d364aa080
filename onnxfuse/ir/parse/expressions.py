"""Expressions, by precedence."""

from __future__ import annotations

import json
import re

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, acc, lit, load, make, sym, var
from onnxfuse.ir.parse.reader import DTYPES, Reader, read_dtype, read_value
from onnxfuse.ir.prims import PRIMS

_INFIX = {
    "|": ("or", 1), "&": ("and", 2), "<": ("lt", 3), "<=": ("le", 3), "==": ("eq", 3), "!=": ("ne", 3),
    "+": ("add", 4), "-": ("sub", 4), "*": ("mul", 5), "/": ("div", 5), "//": ("floordiv", 5), "%": ("mod", 5),
}  # fmt: skip


def read_body(r: Reader) -> Expr:
    before = dict(r.lets)
    while r.eat("let"):
        name = r.take("word")
        r.need("=")
        value = read_expr(r, 1)
        r.need("in")
        r.lets[name] = value
    e = read_expr(r, 1)
    r.lets = before
    return e


def read_expr(r: Reader, prec: int) -> Expr:
    left = read_unary(r)
    while r.kind == "sign" and r.text in _INFIX and _INFIX[r.text][1] >= prec:
        name, strength = _INFIX[r.text]
        r.at += 1
        left = _read_prim(r, name, (left, read_expr(r, strength + 1)))
    return left


def _read_prim(r: Reader, name: str, args: tuple[Expr, ...]) -> Expr:
    prim = PRIMS[name]
    if len(args) != prim.arity:
        r.fail(f"{prim.arity} arguments of {name}")
    dtype = DType.BOOL if prim.rule in ("bool", "logic") else args[1 if prim.rule == "where" else 0].dtype
    return make(prim, args, dtype)


def read_unary(r: Reader) -> Expr:
    if not r.eat("-"):
        return read_atom(r)
    if r.kind == "number" or r.text in ("inf", "nan"):
        return _read_literal(r, "-")
    return make(PRIMS["neg"], (arg := read_unary(r),), arg.dtype)


def _read_literal(r: Reader, sign: str = "") -> Lit:
    text = sign + r.text
    whole = r.kind == "number" and not re.search(r"[.eE]", text)
    r.at += 1
    dtype = DType.I64 if whole else DType.F32
    if r.kind == "sign" and r.text == ":" and r.tokens[r.at + 1][1] in DTYPES:
        r.at += 1
        dtype = read_dtype(r)
    return lit(int(text) if whole else float(text), dtype)


def read_atom(r: Reader) -> Expr:
    if r.eat("("):
        e = read_body(r)
        r.need(")")
        return e
    if r.kind == "number" or r.text in ("inf", "nan"):
        return _read_literal(r)
    if r.kind == "value":
        source = read_value(r)
        r.need("[")
        return load(source, r.many(lambda: read_body(r), "]"), source.tensor.dtype)
    if r.kind == "sym":
        return sym(json.loads(r.take("sym")[1:]))
    return _read_named(r, r.take("word"))


def _read_named(r: Reader, word: str) -> Expr:
    if r.eat("("):
        args = r.many(lambda: read_body(r), ")")
        if word in DTYPES and len(args) == 1:
            return make(PRIMS["cast"], args, DTYPES[word])
        if word.startswith("bits_") and word[5:] in DTYPES and len(args) == 1:
            return make(PRIMS["bits"], args, DTYPES[word[5:]])
        if word not in PRIMS:
            r.fail(f"a primitive, not {word}")
        return _read_prim(r, word, args)
    if word in ("true", "false"):
        return lit(word == "true", DType.BOOL)
    if word == "acc":
        if r.acc is None:
            r.fail("no acc outside a reduction")
        return acc(r.acc)
    if word in r.lets:
        return r.lets[word]
    return var(r.axes[word]) if word in r.axes else sym(word)
