"""Bytes moved and work done by Computes.  Facts for decisions, `inspect` and the cost model; no thresholds here.

Run-time dimensions are numbers only when the program runs: `env` gives sample values, every other symbol counts as
`SAMPLE_DIM`. So a number from here is exact for static shapes and an estimate otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from onnxfuse.ir.expr import Acc, Apply, Expr, Lit, Load, Sym, axes_of, children, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.types import Dim

SAMPLE_DIM = 64


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one kernel moves and computes: bytes from and to memory, and operations (Prim.cost: one add = 1)."""

    read: int
    written: int
    ops: int

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.read + other.read, self.written + other.written, self.ops + other.ops)


def sample(dim: Dim, env: Mapping[str, int] | None = None) -> int:
    """A dimension as a number."""
    if isinstance(dim, int):
        return dim
    known: dict[int, int] = {}
    for e in walk(dim):
        if isinstance(e, Lit):
            known[id(e)] = int(e.value)
        elif isinstance(e, Sym):
            known[id(e)] = (env or {}).get(e.name, SAMPLE_DIM)
        elif isinstance(e, Apply):
            known[id(e)] = int(e.prim.numpy(*(known[id(a)] for a in e.args)))
        else:
            known[id(e)] = SAMPLE_DIM  # a dimension read from a tensor
    return known[id(dim)]


def size(value: Value, env: Mapping[str, int] | None = None) -> int:
    """Number of elements."""
    return prod(sample(d, env) for d in value.tensor.shape)


def nbytes(value: Value, env: Mapping[str, int] | None = None) -> int:
    """Bytes in memory; 0 for a value that no kernel can hold."""
    if value.type is None or not value.type.dtype.computable:
        return 0
    return size(value, env) * value.type.dtype.bytes


def point_cost(*roots: Expr) -> int:
    """Cost of evaluating expressions once: arithmetic on values; index arithmetic (of guards, too) is not counted."""
    over = _of_values(roots)
    return sum(e.prim.cost for e in _value_level(roots) if isinstance(e, Apply) and id(e) in over)


def dearest(*roots: Expr) -> int:
    """Cost of the dearest primitive applied to values: 8 and more means "never recompute"."""
    return max((e.prim.cost for e in _value_level(roots) if isinstance(e, Apply)), default=0)


def stream_cost(e: Expr, axis: Axis) -> int | None:
    """Cost of evaluating `e` once while lanes pass along `axis`; None where they might go different ways.

    Lanes that all take the same side of a `where` (the parts of a join along another axis) stay together, and the
    choice costs them nothing.
    """
    choices = 0
    for x in _value_level((e,)):
        if isinstance(x, Apply) and x.prim.name == "bcast":
            return None
        if isinstance(x, Apply) and x.prim.name == "where":
            if axis in axes_of(x.args[0]):
                return None
            choices += x.prim.cost
    return point_cost(e) - choices


def points(c: Compute, env: Mapping[str, int] | None = None) -> int:
    """How often the body runs."""
    over = () if c.reduce is None else c.reduce.axes
    return prod(sample(a.extent, env) for a in (*c.axes, *over))


def ops(c: Compute, env: Mapping[str, int] | None = None) -> int:
    """Operations of one Compute."""
    if c.reduce is None:
        return points(c, env) * point_cost(c.body)
    finish = 0 if c.reduce.finish is None else point_cost(c.reduce.finish)
    kept = prod(sample(a.extent, env) for a in c.axes)
    return points(c, env) * (point_cost(c.body) + c.reduce.combine.cost) + kept * finish


def traffic(
    members: Iterable[Compute],
    reads: Iterable[Value],
    writes: Iterable[Value],
    env: Mapping[str, int] | None = None,
) -> Traffic:
    """One kernel over `members` that reads and writes these values once each."""
    return Traffic(
        sum(nbytes(v, env) for v in reads), sum(nbytes(v, env) for v in writes), sum(ops(c, env) for c in members)
    )


def alone(c: Compute, env: Mapping[str, int] | None = None) -> Traffic:
    """Traffic of a Compute that is a kernel of its own."""
    return traffic((c,), c.reads, (c.out,), env)


def _of_values(roots: tuple[Expr, ...]) -> set[int]:
    """Ids of the expressions that depend on an element of a tensor or on what was accumulated."""
    found: set[int] = set()
    for e in walk(*roots):
        if isinstance(e, Load | Acc) or any(id(c) in found for c in children(e)):
            found.add(id(e))
    return found


def _value_level(roots: tuple[Expr, ...]) -> list[Expr]:
    """Distinct expressions outside of load indices."""
    seen: dict[Expr, None] = {}
    stack = list(roots)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen[e] = None
        if isinstance(e, Apply):
            stack.extend(e.args)
    return list(seen)
