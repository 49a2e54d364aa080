"""What every level shares: types, typed values, constants."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from onnxfuse.errors import IRError
from onnxfuse.ir.expr import Lit
from onnxfuse.ir.graph import ArrayConst, Constant, Value
from onnxfuse.ir.parse.expressions import read_expr
from onnxfuse.ir.parse.reader import Reader, define, read_dtype, read_int, read_string, read_value, read_value_name
from onnxfuse.ir.types import Dim, TensorType


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HashConst:
    """A constant of which only the hash is known."""

    digest: str

    @property
    def nbytes(self) -> int:
        return 0

    def numpy(self) -> np.ndarray:
        raise IRError("IR_CONST", f"the data of constant #{self.digest} is not known", hint="parse(text, arrays=...)")


def read_typed(r: Reader) -> Value:
    name = read_value_name(r)
    r.need(":")
    return define(r, name, read_type(r))


def read_dim(r: Reader) -> Dim:
    e = read_expr(r, 4)
    return int(e.value) if isinstance(e, Lit) else e


def read_type(r: Reader) -> TensorType | None:
    if r.eat("?"):
        return None
    dtype = read_dtype(r)
    r.need("[")
    outer, r.axes = r.axes, {}
    shape = r.many(lambda: read_dim(r), "]")
    r.axes = outer
    return TensorType(dtype, shape)


def read_values_named(r: Reader) -> tuple[str, ...]:
    r.need("(")
    return r.many(lambda: read_value_name(r), ")")


def read_head(r: Reader, word: str) -> tuple[str, tuple[Value, ...], tuple[str, ...]]:
    """Name, inputs, and names of the outputs."""
    r.need(word)
    name = read_string(r)
    r.need("(")
    inputs = r.many(lambda: read_typed(r), ")")
    r.need("->")
    return name, inputs, read_values_named(r)


def read_values(r: Reader) -> tuple[Value, ...]:
    r.need("(")
    return r.many(lambda: read_value(r), ")")


def resolve(r: Reader, names: Iterable[str]) -> tuple[Value, ...]:
    missing = [n for n in names if n not in r.values]
    if missing:
        r.fail(f"outputs that are defined, not %{missing[0]}")
    return tuple(r.values[n] for n in names)


def read_data(r: Reader, t: TensorType | None) -> Constant:
    if r.kind == "hash":
        digest = r.take("hash")[1:]
        return ArrayConst(r.arrays[digest]) if digest in r.arrays else HashConst(digest)
    return ArrayConst(read_array(r, t))


def read_array(r: Reader, t: TensorType | None) -> np.ndarray:
    r.need("{")
    if t is None or not t.static:
        r.fail("data of a known shape")
    items = r.many(lambda: read_scalar(r), "}")
    shape = tuple(d for d in t.shape if isinstance(d, int))
    return np.array(items, dtype=np.float64 if t.dtype.is_float else t.dtype.numpy).astype(t.dtype.numpy).reshape(shape)


def read_scalar(r: Reader) -> int | float | bool:
    if r.text in ("true", "false"):
        return r.take("word") == "true"
    sign = "-" if r.eat("-") else ""
    if r.kind != "number" and r.text not in ("inf", "nan"):
        r.fail("a number")
    text = sign + r.text
    r.at += 1
    return float(text) if re.search(r"[.eEn]", text) else int(text)


def read_const(r: Reader, consts: dict[Value, Constant]) -> None:
    v = read_typed(r)
    r.need("=")
    consts[v] = read_data(r, v.type)


def read_shape(r: Reader) -> tuple[Value, int]:
    r.need("shape")
    return read_place(r)


def read_place(r: Reader) -> tuple[Value, int]:
    r.need("(")
    v = read_value(r)
    r.need(",")
    axis = read_int(r)
    r.need(")")
    return v, axis
