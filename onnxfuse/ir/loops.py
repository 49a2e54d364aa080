"""LoopGraph: one Compute per value. The level the fusion works on: no op names, only index maps and scalar bodies.

A Compute means

    for every point of `axes`:                               (axes = one per dimension of `out`, in order)
        out[axes] = body                                     when reduce is None
        out[axes] = finish(acc), acc = combine over reduce.axes of cast(body, reduce.acc), starting at init

`finish` is an expression over Acc, Vars of `axes`, Loads and Syms (ReduceMean: acc / count). Bodies are in the dtype
of `out`, or of `reduce.acc` before `finish`. A view is just a Compute whose body is one Load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, Load, Sym, loads, syms_of
from onnxfuse.ir.graph import Constant, Node, Value
from onnxfuse.ir.prims import Prim
from onnxfuse.ir.types import Dim


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Axis:
    """A loop axis: 0 <= v < extent. The same object is the same loop; axes are never matched by equal extent."""

    name: str
    extent: Dim

    def __str__(self) -> str:
        return f"{self.name}<{self.extent}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction over `axes` with an associative, commutative primitive, accumulated in `acc`."""

    axes: tuple[Axis, ...]
    combine: Prim
    init: Lit
    acc: DType
    finish: Expr | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """The loops that produce one value. `node` is the graph node it was lowered from (for names and emission)."""

    out: Value
    axes: tuple[Axis, ...]
    body: Expr
    node: Node
    reduce: Reduce | None = None
    needs: tuple[Expr, ...] = ()  # comparisons of dimensions that must hold at run time (onnxruntime checks them too)

    @property
    def roots(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated: body, and finish if any."""
        if self.reduce is None or self.reduce.finish is None:
            return (self.body,)
        return (self.body, self.reduce.finish)

    @property
    def loads(self) -> list[Load]:
        return loads(*self.roots)

    @property
    def reads(self) -> tuple[Value, ...]:
        """Values read, each once, in order of first use."""
        return tuple(dict.fromkeys(ld.source for ld in self.loads))

    @property
    def origin(self) -> tuple[str, ...]:
        return self.node.origin

    def __str__(self) -> str:
        from onnxfuse.ir.text import show_item  # text imports this module

        return show_item(self)

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A node that stays with onnxruntime, and why."""

    node: Node
    refusal: Refusal

    @property
    def reads(self) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(self.node.reads))


Item = Compute | Opaque


@dataclass(frozen=True, slots=True, eq=False)
class LoopGraph:
    """All items in topological order. A node with several outputs has several Computes (all with that `node`)."""

    name: str
    inputs: tuple[Value, ...]
    items: tuple[Item, ...]
    outputs: tuple[Value, ...]
    consts: Mapping[Value, Constant] = field(default_factory=dict)
    facts: Mapping[Value, np.ndarray] = field(default_factory=dict)  # known elements of shape arithmetic (of Expr)

    def computes(self) -> Iterator[Compute]:
        for item in self.items:
            if isinstance(item, Compute):
                yield item

    def producers(self) -> dict[Value, Item]:
        out: dict[Value, Item] = {}
        for item in self.items:
            for v in results(item):
                out[v] = item
        return out

    def __str__(self) -> str:
        from onnxfuse.ir.text import show  # text imports this module

        return show(self)

    def __repr__(self) -> str:
        return f"<LoopGraph {self.name}>"


def symbols_of(computes: Iterable[Compute]) -> set[Sym]:
    """The run-time dimensions that computes name."""
    found: set[Sym] = set()
    for c in computes:
        loops = (*c.axes, *(c.reduce.axes if c.reduce is not None else ()))
        found |= syms_of(*c.roots, *c.needs, *(a.extent for a in loops if isinstance(a.extent, Expr)))
    return found


def results(item: Item) -> tuple[Value, ...]:
    """Values an item makes."""
    return (item.out,) if isinstance(item, Compute) else item.node.results


def depends(item: Item) -> tuple[Value, ...]:
    """Values that must exist before an item can run, each once.

    For a Compute also what its node reads but no code loads (the target of a Reshape whose elements are known as
    dimensions): the function body needs it, so the group that holds the node takes it as an input.
    """
    if isinstance(item, Opaque):
        return item.reads
    return tuple(dict.fromkeys((*item.reads, *item.node.reads)))
