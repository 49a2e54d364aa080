"""PRIMS: the scalar primitives every meaning is made of. One row each: name, arity, dtype rule, numpy meaning.

`codegen/prims.py` has the same keys (a test compares them). f16 and bf16 never reach a primitive other than
`cast`, `where`, comparisons and bit-exact sign operations: op bodies compute in f32 and cast back.

dtype rules: `same` result = dtype of the arguments (which must agree); `bool` result bool, arguments agree;
`where` (bool, t, t) -> t; `cast` and `bits` result given by the caller; `logic` bool -> bool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True, slots=True, eq=False)
class Prim:
    """A scalar primitive. `numpy` takes and returns broadcastable arrays of the dtypes the rule gives."""

    name: str
    arity: int
    rule: str
    numpy: Callable[..., Array]
    cost: int = 1  # relative to one add on a vector unit; >= 8 is "expensive" (never recomputed)
    commutative: bool = False

    def __str__(self) -> str:
        return self.name


def _silent(fn: Callable[..., Array]) -> Callable[..., Array]:
    def run(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return fn(*args)

    return run


def _idiv(a: Array, b: Array) -> Array:
    """Truncating integer division; x/0 = 0 and INT_MIN/-1 = INT_MIN, so that nothing ever traps."""
    a, b = np.asarray(a), np.asarray(b)
    safe = np.where(b == 0, np.ones_like(b), b)
    if a.dtype.kind == "u":
        q = a // safe
    else:
        q = np.where(safe == -1, (np.zeros_like(a) - a), np.zeros_like(a))
        div = np.where(safe == -1, np.ones_like(safe), safe)
        floor = a // div
        trunc = floor + ((a % div != 0) & ((a < 0) != (div < 0))).astype(a.dtype)
        q = np.where(safe == -1, q, trunc)
    return np.where(b == 0, np.zeros_like(q), q).astype(a.dtype)


def _floordiv(a: Array, b: Array) -> Array:
    """Integer division towards -inf; x//0 = 0."""
    a, b = np.asarray(a), np.asarray(b)
    safe = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, np.zeros_like(a), a // safe)


def _mod(a: Array, b: Array) -> Array:
    """Integer remainder with the sign of the divisor; x%0 = 0."""
    a, b = np.asarray(a), np.asarray(b)
    safe = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, np.zeros_like(a), a % safe)


def _fmod(a: Array, b: Array) -> Array:
    """C fmod: remainder with the sign of the dividend; integer x fmod 0 = 0."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    safe = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, np.zeros_like(a), np.fmod(a, safe))


def _erf(x: Array) -> Array:
    from math import erf  # numpy has no erf; this is the oracle, speed does not matter

    x = np.asarray(x)
    return np.vectorize(erf, otypes=[np.float64])(x.astype(np.float64)).astype(x.dtype)


def _f64(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Evaluate in f64 and round once: the oracle of a transcendental is the correctly rounded value (nearly)."""

    def run(*args: Array) -> Array:
        dtype = np.asarray(args[0]).dtype
        return fn(*(np.asarray(a).astype(np.float64) for a in args)).astype(dtype)

    return run


def _pow(a: Array, b: Array) -> Array:
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind not in "iu":
        return _f64(np.float_power)(a, b)  # np.power turns an exponent of 0.5 into a square root
    negative = b < 0
    unit = np.where(b % 2 == 0, np.ones_like(a), a)  # of +-1
    fraction = np.where((a == 1) | (a + 1 == 0), unit, np.zeros_like(a))
    return np.where(negative, fraction, np.power(a, np.where(negative, np.zeros_like(b), b))).astype(a.dtype)


def _shl(a: Array, b: Array) -> Array:
    a, b = np.asarray(a), np.asarray(b)
    bits = a.dtype.itemsize * 8
    fits = (b >= 0) & (b < bits)
    return np.where(fits, np.left_shift(a, np.where(fits, b, np.zeros_like(b))), np.zeros_like(a))


def _shr(a: Array, b: Array) -> Array:
    a, b = np.asarray(a), np.asarray(b)
    bits = a.dtype.itemsize * 8
    fits = (b >= 0) & (b < bits)
    rest = np.zeros_like(a) if a.dtype.kind == "u" else np.right_shift(a, np.full_like(a, bits - 1))
    return np.where(fits, np.right_shift(a, np.where(fits, b, np.zeros_like(b))), rest)


def _row(name: str, arity: int, rule: str, fn: Callable[..., Array], cost: int = 1, commutative: bool = False) -> Prim:
    return Prim(name, arity, rule, _silent(fn), cost, commutative)


# The order is the order of `onnxfuse ops --prims`; names are stable (they occur in the textual IR).
_ROWS = (
    _row("add", 2, "same", np.add, commutative=True),
    _row("sub", 2, "same", np.subtract),
    _row("mul", 2, "same", np.multiply, commutative=True),
    _row("div", 2, "same", np.divide, 8),  # floats only
    _row("idiv", 2, "same", _idiv, 16),  # integers: truncates (ONNX Div)
    _row("floordiv", 2, "same", _floordiv, 16),  # integers: floors (index arithmetic)
    _row("mod", 2, "same", _mod, 16),  # integers: sign of the divisor
    _row("fmod", 2, "same", _fmod, 16),  # sign of the dividend
    _row("neg", 1, "same", np.negative),  # floats: flips the sign bit
    _row("abs", 1, "same", np.abs),
    _row("min", 2, "same", np.minimum, commutative=True),  # NaN if either is NaN
    _row("max", 2, "same", np.maximum, commutative=True),
    _row("pow", 2, "same", _pow, 40),  # integers wrap; a negative exponent truncates (0, or +-1 for +-1)
    _row("sqrt", 1, "same", np.sqrt, 8),
    _row("exp", 1, "same", _f64(np.exp), 12),
    _row("decay", 1, "same", _f64(np.exp), 12),  # exp of what is never above 0 (or is NaN): templates put it in
    _row("log", 1, "same", _f64(np.log), 12),
    _row("log1p", 1, "same", _f64(np.log1p), 14),
    _row("sin", 1, "same", _f64(np.sin), 16),
    _row("cos", 1, "same", _f64(np.cos), 16),
    _row("tan", 1, "same", _f64(np.tan), 20),
    _row("asin", 1, "same", _f64(np.arcsin), 20),
    _row("acos", 1, "same", _f64(np.arccos), 20),
    _row("atan", 1, "same", _f64(np.arctan), 20),
    _row("sinh", 1, "same", _f64(np.sinh), 20),
    _row("cosh", 1, "same", _f64(np.cosh), 20),
    _row("tanh", 1, "same", _f64(np.tanh), 14),
    _row("asinh", 1, "same", _f64(np.arcsinh), 24),
    _row("acosh", 1, "same", _f64(np.arccosh), 24),
    _row("atanh", 1, "same", _f64(np.arctanh), 24),
    _row("erf", 1, "same", _erf, 14),
    _row("floor", 1, "same", np.floor),
    _row("ceil", 1, "same", np.ceil),
    _row("rint", 1, "same", np.rint),  # half to even
    _row("trunc", 1, "same", np.trunc),
    _row("copysign", 2, "same", np.copysign),
    _row("eq", 2, "bool", np.equal, commutative=True),
    _row("ne", 2, "bool", np.not_equal, commutative=True),
    _row("lt", 2, "bool", np.less),
    _row("le", 2, "bool", np.less_equal),
    _row("isnan", 1, "bool", np.isnan),
    _row("isinf", 1, "bool", np.isinf),
    _row("and", 2, "logic", np.logical_and, commutative=True),
    _row("or", 2, "logic", np.logical_or, commutative=True),
    _row("xor", 2, "logic", np.logical_xor, commutative=True),
    _row("not", 1, "logic", np.logical_not),
    _row("bitand", 2, "same", np.bitwise_and, commutative=True),
    _row("bitor", 2, "same", np.bitwise_or, commutative=True),
    _row("bitxor", 2, "same", np.bitwise_xor, commutative=True),
    _row("bitnot", 1, "same", np.bitwise_not),
    _row("shl", 2, "same", _shl),  # by >= width (read as unsigned) gives 0
    _row("shr", 2, "same", _shr),  # unsigned: zeros come in; signed: the sign; by >= width there is nothing else
    _row("where", 3, "where", np.where),
    _row("cast", 1, "cast", lambda x: x),  # interpreter handles dtype and saturation: ir/interp.py
    _row("bits", 1, "bits", lambda x: x),  # the same bits as another type of that width: ir/interp.py as well
    # Broadcasting of a dimension whose extent is only known at run time:
    # bcast(i, n) = 0 if n == 1 else i (an index);  bdim(n, m) = m if n == 1 else n (an extent).
    _row("bcast", 2, "same", lambda i, n: np.where(np.equal(n, 1), 0, i)),
    _row("bdim", 2, "same", lambda n, m: np.where(np.equal(n, 1), m, n)),
)
PRIMS: dict[str, Prim] = {p.name: p for p in _ROWS}
