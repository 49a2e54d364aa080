"""Where code is emitted: variables, dimensions, buffers, and what is emitted already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from llvmlite import ir

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Load, Sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis

Stride: TypeAlias = int | Expr | ir.Value


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory of a value. Strides in elements: ints, expressions, or i64 values.

    `invariant`: nothing writes it while the kernel runs (inputs), so loads may be hoisted.
    """

    ptr: ir.Value
    dtype: DType
    strides: tuple[Stride, ...]
    invariant: bool = False


@dataclass(slots=True, eq=False)
class Scope:
    """Values that may be used where `cond` holds (None: everywhere in the env)."""

    cond: ir.Value | None
    parent: Scope | None
    values: dict[Expr, ir.Value] = field(default_factory=dict)
    inner: dict[tuple[Expr, bool], Scope] = field(default_factory=dict)

    def find(self, e: Expr) -> ir.Value | None:
        scope: Scope | None = self
        while scope is not None:
            found = scope.values.get(e)
            if found is not None:
                return found
            scope = scope.parent
        return None


@dataclass(slots=True, eq=False)
class _Memo:
    root: Scope = field(default_factory=lambda: Scope(None, None))
    varying: dict[Expr, bool] = field(default_factory=dict)
    guarded: dict[Expr, bool] = field(default_factory=dict)
    paths: dict[Load, Path] = field(default_factory=dict)
    joins: dict[Expr, bool] = field(default_factory=dict)
    opaque: dict[Sym, ir.Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Env:
    """Where code is emitted: what variables, dimensions, buffers and known expressions stand for.

    lanes, vector_axis  lane k works on iteration `axes[vector_axis] + k`; lanes 1 = scalar code
    axes                i64 value of each loop variable in scope (the vector axis: of lane 0)
    bound               values of expressions already computed: Acc, loads of rank-0 locals, hoisted parts
    mask                lanes that are on (tail), or None
    aligned             lane 0 works on a multiple of `lanes`

    An env remembers what it has emitted: use one env per straight-line region (`at` makes the next one).
    """

    lanes: int
    vector_axis: Axis | None
    axes: Mapping[Axis, ir.Value]
    syms: Mapping[Sym, ir.Value]
    buffers: Mapping[Value, Buffer]
    bound: Mapping[Expr, ir.Value] = field(default_factory=dict)
    mask: ir.Value | None = None
    aligned: bool = False
    memo: _Memo = field(default_factory=_Memo)

    def at(
        self,
        axes: Mapping[Axis, ir.Value] | None = None,
        bound: Mapping[Expr, ir.Value] | None = None,
        buffers: Mapping[Value, Buffer] | None = None,
    ) -> Env:
        """The env of an inner region: more loop variables, bound expressions or buffers."""
        return replace(
            self,
            axes={**self.axes, **(axes or {})},
            bound={**self.bound, **(bound or {})},
            buffers={**self.buffers, **(buffers or {})},
            memo=_Memo(),
        )

    def vector(self, axis: Axis | None, lanes: int, mask: ir.Value | None = None, aligned: bool = False) -> Env:
        """The same place, vectorised over `axis`."""
        along = axis if lanes > 1 else None
        return replace(self, vector_axis=along, lanes=lanes, mask=mask, aligned=aligned, memo=_Memo())


@dataclass(frozen=True, slots=True)
class Path:
    """Offset of an access: `rest + step * (v // every)` with v the vector variable; step None: rest is all."""

    rest: Expr
    step: Expr | None
    every: int = 1
