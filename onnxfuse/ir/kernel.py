"""Kernel: a row program. What one group computes, as shared outer loops around a sequence of stages.

    parallel for outer axes:                 (every iteration independent; may be empty = one iteration)
        for each stage in order:
            for stage.axes:
                acc = reduce(...)            (if stage.reduce: loop over reduce.axes, then finish)
                for each store: target[index] = value

A Store goes to an output of the kernel (index over outer and stage axes) or to a Local (a buffer private to one
iteration of the outer loops; its index uses stage axes only). Loads from a Local read what earlier stages stored.

Normal forms every template may rely on:
  pointwise         outer = all output axes, one stage, no stage axes, no locals
  reduce            outer = kept axes, one stage with `reduce`, no stage axes; its one store's value is Acc-based
  anchor+epilogue   outer = all output axes; stage 0: reduce, stores Acc/finish to a rank-0 Local; stage 1: no axes,
                    the epilogue, loading that Local with index (); (stage 1 missing when there is no epilogue: then
                    stage 0 stores to the output)
  row program       anything else: softmax, layer norm ... outer = kept axes, stages over the row

In a stage with reduce, Store.value is an expression over Acc (the accumulator), Vars, Loads; without: plain.

Dimensions. Every run-time dimension of a kernel is a Sym bound in `dims` from the shape of an input; all extents and
index expressions use only these Syms. `checks` are equalities the inputs must satisfy, else the kernel reports an
error; `maybe` are pairs that may differ at run time because one side is 1 (run-time broadcast, prim `bcast`): when all
are equal the fast variant runs (bcast(i,n) = i), else the general one.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.expr import Expr, Load, Sym, loads
from onnxfuse.ir.given import Part
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.ir.types import TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A private buffer of one outer iteration: `value.type` has its private shape. Rank 0 = one scalar."""

    value: Value

    @property
    def type(self) -> TensorType:
        return self.value.tensor


@dataclass(frozen=True, slots=True)
class Store:
    """target[index] = value."""

    target: Value
    index: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Stage:
    """One loop nest inside the outer loops. With `reduce`: `reduce_body` is accumulated, stores use Acc."""

    axes: tuple[Axis, ...]
    stores: tuple[Store, ...]
    reduce: Reduce | None = None
    reduce_body: Expr | None = None

    @property
    def roots(self) -> tuple[Expr, ...]:
        body = () if self.reduce_body is None else (self.reduce_body,)
        return body + tuple(s.value for s in self.stores) + tuple(i for s in self.stores for i in s.index)

    @property
    def loads(self) -> list[Load]:
        return loads(*self.roots)


@dataclass(frozen=True, slots=True)
class DimBinding:
    """`sym` = shape of `value` at `axis`, minus `offset`, divided by `scale` (exact; else the input is refused).

    With `part`: of element `axis` of `value` itself (flat), a tensor of static shape: the target of an Expand,
    the end of a Slice ... names a dimension that no input has. Or of all its elements, which are indices (ir/given.py).
    """

    sym: Sym
    value: Value
    axis: int
    scale: int = 1
    offset: int = 0
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class DimCheck:
    """Shape of `value` at `axis` must equal `expr`."""

    value: Value
    axis: int
    expr: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One compiled unit. Inputs and outputs are in the order of the custom node's inputs and outputs.

    inputs   every tensor the custom node reads, in order; some may be unused by the code (shape tensors)
    consts   those inputs that are initializers: their data is there at kernel creation (packing)
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    outer: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    locals: tuple[Local, ...] = ()
    consts: frozenset[Value] = frozenset()
    dims: tuple[DimBinding, ...] = ()
    checks: tuple[DimCheck, ...] = ()
    maybe: tuple[tuple[Expr, Expr], ...] = ()
    origin: tuple[str, ...] = ()
    needs: tuple[Expr, ...] = ()  # comparisons of dimensions that must hold, else the kernel reports an error
    renamed: tuple[TensorType | None, ...] = ()  # outputs the runtime sees under another shape (same memory order)

    @property
    def made(self) -> tuple[TensorType, ...]:
        """Types of the outputs as the runtime sees them; the code stores by the types of `outputs`."""
        new = self.renamed or (None,) * len(self.outputs)
        return tuple(v.tensor if t is None else t for v, t in zip(self.outputs, new, strict=True))

    @property
    def loads(self) -> list[Load]:
        return list(dict.fromkeys(ld for s in self.stages for ld in s.loads))

    def __str__(self) -> str:
        from onnxfuse.ir.text import show  # text imports this module

        return show(self)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"
