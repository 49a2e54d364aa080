"""The record of one ONNX operator as the op table knows it. Rows live in `ops/`, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from onnxfuse.ir.dtypes import DType


class Family(StrEnum):
    """How an op is defined, and so how it is lowered and tested (DESIGN: the op table)."""

    POINTWISE = "pointwise"
    REDUCE = "reduce"
    VIEW = "view"
    CONTRACT = "contract"
    WINDOW = "window"
    COMPOSITE = "composite"
    ALIAS = "alias"  # Identity, inference Dropout: the output is an input
    CONSTANT = "constant"  # Constant, ConstantOfShape-like: value known from attributes
    SHAPE = "shape"  # Shape, Size: reads dimensions only; stays on the host
    OPAQUE = "opaque"


class Kind(StrEnum):
    """TVM's OpPatternKind; `level` gives its order (max = harder to fuse)."""

    ELEMWISE = "elemwise"
    BROADCAST = "broadcast"
    INJECTIVE = "injective"
    REDUCE = "reduce"
    ANCHOR = "anchor"
    OPAQUE = "opaque"

    @property
    def level(self) -> int:
        return _LEVEL[self]


_LEVEL = {Kind.ELEMWISE: 0, Kind.BROADCAST: 1, Kind.INJECTIVE: 2, Kind.REDUCE: 3, Kind.ANCHOR: 4, Kind.OPAQUE: 8}


@dataclass(frozen=True, slots=True)
class Tol:
    """Tolerance against onnxruntime: `exact`, `ulp` (n units in the last place) or `sum` (reassociated sums).

    For `sum` the bound is rtol/atol by dtype (verify/values.py), because the order of summation is free.
    """

    kind: str
    ulp: int = 0
    floor: float = 0.0  # `ulp` only: an absolute difference of so many epsilons passes too (saturated results)


EXACT = Tol("exact")
SUM = Tol("sum")


def ulp(n: int, floor: float = 0.0) -> Tol:
    """At most n units in the last place of the output dtype, or `floor` epsilons of 1."""
    return Tol("ulp", n, floor)


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One entry of the op table: operator `name` of `domain` from opset `since` on.

    fn       the decorated function: the meaning (None for opaque ops)
    reason   for opaque ops: why it is never fused
    dtypes   element types the entry covers; empty = every computable dtype
    types    types of the results of a node whose formula declines it, like `fn` on tensors; None: not known then
    loops    loops of a node whose formula declines it, like `fn` of a view; None: it stays with onnxruntime
    """

    name: str
    since: int
    family: Family
    fn: Callable[..., Any] | None = None
    domain: str = ""
    tol: Tol = EXACT
    dtype: str = "same"  # rule for the output: "same", "bool", "i64", ...
    dtypes: frozenset[DType] = frozenset()
    reason: str = ""
    doc: str = ""
    types: Callable[..., Any] | None = None
    loops: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name if not self.domain else f"{self.domain}::{self.name}"
