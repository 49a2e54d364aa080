"""Vector math: exp, log, erf ... on scalars and vectors of f32 and f64, without any library call."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

UNARY = (
    "exp", "log", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
)  # fmt: skip
MATH: dict[str, Callable[..., ir.Value]] = {}
