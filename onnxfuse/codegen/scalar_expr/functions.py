"""Expressions that are one function of vecmath: computed in one piece, which is faster and no less exact."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import permutations

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit

CLOSE = 3e-7  # how far the constant of a GELU may be from the square root of 2: a rounding or two of f32


@lru_cache(maxsize=4096)
def whole_function(e: Apply) -> tuple[str, Expr] | None:
    """(name in vecmath, argument) of an expression that is that function, else None."""
    for name, argument_of in (("sigmoid", sigmoid_of), ("gelu", gelu_of)):
        x = argument_of(e)
        if x is not None:
            return name, x
    return None


def sigmoid_of(e: Apply) -> Expr | None:
    """The x of an `e` that is 1/(1 + exp(-x)); else None."""
    if e.prim.name != "div" or e.dtype not in (DType.F32, DType.F64) or not _is(e.args[0], 1.0):
        return None
    power = _less_one(e.args[1])
    if not isinstance(power, Apply) or power.prim.name != "exp":
        return None
    minus = power.args[0]
    return minus.args[0] if isinstance(minus, Apply) and minus.prim.name == "neg" else None


def gelu_of(e: Apply) -> Expr | None:
    """The x of an `e` that is x/2 (1 + erf(x/sqrt(2))), its factors in any order; else None."""
    factors = _factors(e) if e.dtype is DType.F32 else ()
    if len(factors) != 3:
        return None
    for half, x, total in permutations(factors):
        odd = _less_one(total)
        if _is(half, 0.5) and isinstance(odd, Apply) and odd.prim.name == "erf":
            return x if _over_root_of_two(odd.args[0]) is x else None
    return None


def _factors(e: Expr) -> tuple[Expr, ...]:
    """What a product of at most three factors multiplies; of more there is a part that is one of fewer."""
    if not isinstance(e, Apply) or e.prim.name != "mul":
        return (e,)
    out: list[Expr] = []
    for a in e.args:
        out.extend(a.args if isinstance(a, Apply) and a.prim.name == "mul" else (a,))
    return tuple(out)


def _over_root_of_two(e: Expr) -> Expr | None:
    """The x of x/sqrt(2)."""
    if not isinstance(e, Apply) or e.prim.name not in ("mul", "div"):
        return None
    root = math.sqrt(0.5 if e.prim.name == "mul" else 2.0)
    if _is(e.args[1], root, CLOSE):
        return e.args[0]
    return e.args[1] if e.prim.name == "mul" and _is(e.args[0], root, CLOSE) else None


def _less_one(e: Expr) -> Expr | None:
    """The x of 1 + x."""
    if not isinstance(e, Apply) or e.prim.name != "add" or not any(_is(a, 1.0) for a in e.args):
        return None
    return e.args[1] if _is(e.args[0], 1.0) else e.args[0]


def _is(e: Expr, number: float, off: float = 0.0) -> bool:
    return isinstance(e, Lit) and e.dtype.is_float and abs(e.value - number) <= off * number
