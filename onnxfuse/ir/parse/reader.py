"""Tokens of the textual form, and the names in scope."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import numpy as np

from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.op import Op
from onnxfuse.ir.types import TensorType

OpLookup = Callable[[str, str, int], Op]


T = TypeVar("T")


_VALUE = r"[A-Za-z0-9_./]+(?::+[A-Za-z0-9_./]+)*"


_STRING = r'"(?:\\.|[^"\\])*"'


_TOKEN = re.compile(
    rf"""(?P<space>\s+|;[^\n]*)
    |(?P<value>%(?:{_STRING}|{_VALUE}))
    |(?P<string>b?{_STRING})
    |(?P<sym>\${_STRING})
    |(?P<hash>\#[0-9a-f]+)
    |(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<sign>->|//|<=|==|!=|::|[-+*/%<>&|()\[\]{{}},:=@?])""",
    re.VERBOSE,
)


DTYPES = {str(d): d for d in DType}


@dataclass(slots=True)
class Reader:
    """The tokens, a position, and what names mean here."""

    tokens: list[tuple[str, str, int]]
    ops: OpLookup | None
    arrays: Mapping[str, np.ndarray]
    at: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    lets: dict[str, Expr] = field(default_factory=dict)
    acc: DType | None = None

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def text(self) -> str:
        return self.tokens[self.at][1]

    def fail(self, wanted: str) -> NoReturn:
        got = self.text or "end of text"
        raise UsageError("E_TEXT", f"line {self.tokens[self.at][2]}: expected {wanted}, got {got!r}")

    def take(self, kind: str) -> str:
        if self.kind != kind:
            self.fail(kind)
        text = self.text
        self.at += 1
        return text

    def eat(self, text: str) -> bool:
        """Step over `text` if it is next (never over a string)."""
        if self.kind in ("string", "value") or self.text != text:
            return False
        self.at += 1
        return True

    def need(self, *texts: str) -> None:
        for text in texts:
            if not self.eat(text):
                self.fail(repr(text))

    def many(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """`item , item ... close`; the opening sign is already read."""
        out: list[T] = []
        while not self.eat(close):
            out.append(item())
            if not self.eat(","):
                self.need(close)
                break
        return tuple(out)


def tokens(text: str) -> list[tuple[str, str, int]]:
    out: list[tuple[str, str, int]] = []
    at, line = 0, 1
    while at < len(text):
        m = _TOKEN.match(text, at)
        if m is None:
            raise UsageError("E_TEXT", f"line {line}: cannot read {text[at : at + 20]!r}")
        if m.lastgroup != "space":
            out.append((str(m.lastgroup), m.group(), line))
        line += m.group().count("\n")
        at = m.end()
    return [*out, ("end", "", line)]


def read_dtype(r: Reader) -> DType:
    if r.text not in DTYPES:
        r.fail("an element type")
    return DTYPES[r.take("word")]


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def read_value_name(r: Reader) -> str:
    return _unquote(r.take("value")[1:])


def read_value(r: Reader) -> Value:
    name = read_value_name(r)
    if name not in r.values:
        r.at -= 1
        r.fail("a value defined before")
    return r.values[name]


def define(r: Reader, name: str, t: TensorType | None) -> Value:
    if name in r.values:
        r.at -= 1
        r.fail(f"a new name; %{name} is defined twice")
    v = Value(name, t)
    r.values[name] = v
    return v


def read_strings(r: Reader, word: str) -> tuple[str, ...]:
    if not r.eat(word):
        return ()
    out = [read_string(r)]
    while r.eat(","):
        out.append(read_string(r))
    return tuple(out)


def read_string(r: Reader) -> str:
    return str(json.loads(r.take("string")))


def read_int(r: Reader) -> int:
    return int(r.take("number")) if not r.eat("-") else -int(r.take("number"))


def read_word(r: Reader) -> str:
    return read_string(r) if r.kind == "string" else r.take("word")
