"""Rough prices shared by the templates' cost models: what run-time extents are taken for, what an epilogue costs."""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.ir.expr import Apply, Expr, Lit, substitute, syms_of, walk
from onnxfuse.ir.expr import i64 as index
from onnxfuse.ir.kernel import Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target

GUESS = 64  # extent taken for a run-time dimension; the same in every template, or their prices do not compare
POINTWISE_RATE = 0.25  # share of peak that pointwise code reaches


def expected(d: Dim) -> float:
    """An extent for the cost model: every symbol stands for GUESS.

    Where that leaves nothing (a window longer than GUESS), the guess was too small, and the extent itself is guessed.
    """
    if isinstance(d, int):
        return float(d)
    e = simplify(substitute(d, {s: index(GUESS) for s in syms_of(d)}))
    return float(e.value) if isinstance(e, Lit) and e.value > 0 else float(GUESS)


def points(axes: Iterable[Axis | None]) -> float:
    """Expected number of iterations."""
    total = 1.0
    for axis in axes:
        total *= 1.0 if axis is None else expected(axis.extent)
    return total


def epilogue_cost(finish: Expr, stores: Iterable[Store]) -> int:
    """Cost of one element of an epilogue, in operations."""
    return sum(e.prim.cost for e in walk(finish, *(s.value for s in stores)) if isinstance(e, Apply))


def pointwise_seconds(operations: float, target: Target, element_bytes: int) -> float:
    """Seconds for so many pointwise operations on one core."""
    return operations * element_bytes / 4 / (target.peak * POINTWISE_RATE)
