"""A factor whose rows of k come from several values (a Concat in front of a 1 x 1 convolution), read in place.

Where each row begins is written down once per unit: a tile then reads a row like that of a single value. Chosen in the
tile, addresses would take registers from its sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.codegen.build import PTR, Builder, Index, Reg, mem_type
from onnxfuse.codegen.scalar_expr import Env, address, join_parts
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, var
from onnxfuse.ir.loops import Axis
from onnxfuse.templates.gemm_design import Access, Design

MOST_ROWS = 4096  # of a table: it lies on the stack

Tables = Mapping[Expr, Reg]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows first .. last of a factor, which are those of `part`."""

    first: int
    last: int
    part: Load


def tables(build: Builder, d: Design) -> dict[Expr, Reg]:
    """Memory for the addresses of the rows of every join in factor b that is read in place."""
    depth = d.c.depth
    if d.b is not Access.PANEL or not isinstance(depth, int) or depth > MOST_ROWS:
        return {}
    found = (e for e in _joins(d.c.b) if spans(e, d.c.k[0], depth) is not None)
    return {e: build.alloca(PTR, depth) for e in found}


def fill(build: Builder, env: Env, d: Design, made: Tables) -> None:
    """Write down where the rows begin at this point of the batch."""
    k, x, depth = d.c.k[0], d.c.cols.axis, d.c.depth
    for join, table in made.items():
        assert isinstance(depth, int)
        assert x is not None
        for s in spans(join, k, depth) or ():
            with build.loop(s.first, s.last, name="row") as r:
                here = env.at({k: build.i64(r), x: build.i64(0)}).vector(x, d.tile.lanes)
                build.store(address(build, here, s.part), build.offset(table, r, PTR))


def rows_at(build: Builder, made: Tables, k: Index, column: Index) -> dict[Expr, Reg]:
    """Where row k of every join continues at a column."""
    starts = {e: build.load(build.offset(table, k, PTR), PTR) for e, table in made.items()}
    return {e: build.offset(start, column, mem_type(e.dtype)) for e, start in starts.items()}


def spans(join: Expr, k: Axis, depth: int) -> list[Span] | None:
    """The parts of a join along k in the order of their rows; None if its tests are not bounds of k."""
    out: list[Span] = []
    first = 0
    for test, part in join_parts(join):
        last = depth if test is None else _bound(test, k)
        if last is None or not isinstance(part, Load):
            return None
        last = min(max(last, first), depth)
        out.append(Span(first, last, part))
        first = last
    return out


def _bound(test: Expr, k: Axis) -> int | None:
    """The n of a test `k < n`."""
    if not isinstance(test, Apply) or test.prim.name != "lt" or test.args[0] is not var(k):
        return None
    return int(test.args[1].value) if isinstance(test.args[1], Lit) else None


def _joins(e: Expr) -> list[Expr]:
    """The outermost choices in an expression."""
    out, stack = [], [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Apply) and x.prim.name == "where":
            out.append(x)
        elif isinstance(x, Apply):
            stack.extend(x.args)
    return list(dict.fromkeys(out))
