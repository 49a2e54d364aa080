"""Row blocks: a matrix product whose columns a row program reads, and perhaps a second product of its results.

    attention     s = q @ k.T;  p = softmax(s) over the columns;  y = p @ v
    row tail      y = norm(x @ w + residual) over the columns

The members run as one row program (analysis/rows.py) over the axes the row reductions keep: the first product fills a
row, the stages work on it, the last product consumes it. A template runs blocks of rows, so that the products are
matrix products and the rows stay in cache. Views behind the last product (its transpose, then a reshape) are turned
into the index of its store, a Cast into its type. Facts only; structure decides, not names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from onnxfuse.analysis.kinds import factors
from onnxfuse.analysis.maps import inline_loads
from onnxfuse.analysis.rows import EXPENSIVE, RowMap, rows
from onnxfuse.analysis.traffic import dearest
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Apply, Expr, Load, Var, axes_of, i64, loads, substitute, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.simplify import dim_expr, same, simplify

CODE = "NF_ROW_BLOCK"
Loads = Callable[[Compute], list[Load]]


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """How members run by blocks of rows.

    core    the members without the views behind the last product
    rows    how the core stands on rows
    first   the product that fills a row
    last    the product that consumes it; None: the row program's results are what is written
    written the value `last` is stored as, and `index` where: over the axes of `last` (None: as itself)
    """

    core: tuple[Compute, ...]
    rows: RowMap
    first: Compute
    last: Compute | None
    written: Value | None = None
    index: tuple[Expr, ...] = ()


def is_product(c: Compute) -> bool:
    """A sum of products of two factors."""
    r = c.reduce
    return r is not None and r.combine.name == "add" and len(factors(c.body)) == 2


def row_block(
    members: Sequence[Compute], writes: Collection[Value], loads_of: Loads = lambda c: c.loads
) -> RowBlock | Refusal:
    """The row block of `members` (in topological order) of which `writes` leave the group, or why it is none."""
    products = [c for c in members if is_product(c)]
    deciding = [c for c in members if c.reduce is not None and c not in products]
    if not deciding or not 1 <= len(products) <= 2:
        return Refusal(CODE, f"{len(products)} products and {len(deciding)} row reductions")
    first, last = products[0], products[1] if len(products) == 2 else None
    core: tuple[Compute, ...] = tuple(members)
    written: Value | None = None
    index: tuple[Expr, ...] = ()
    if last is not None:
        tail = _after(members, last, loads_of)
        core = tuple(c for c in members if c not in tail)
        if set(writes) != {tail[-1].out if tail else last.out}:
            return Refusal(CODE, "more than the last product is needed outside")
        if tail:
            where = _store_index(last, tail)
            if where is None:
                return Refusal(CODE, f"{tail[-1].out.name} is no rearrangement of {last.out.name}")
            written, index = tail[-1].out, where
        writes = [last.out]
    found = rows(core, writes, loads_of, deciding)
    if isinstance(found, Refusal):
        return found
    early = {c.out: c for c in core if c.reduce is None and found.level[c.out] == 0}
    kept = [v for v, _ in found.buffers if v in early]
    why = _unfit(core, found, first, last) or next(
        (f"{v.name} is too dear to be made again" for v in kept if dearest(early[v].body) >= EXPENSIVE), ""
    )
    if why:
        return Refusal(CODE, why)
    # What prepares an operand of the last product is not kept in the row: packing does it on the way.
    found = replace(found, buffers=tuple((v, n) for v, n in found.buffers if v not in early))
    return RowBlock(core, found, first, last, written, index)


def _after(members: Sequence[Compute], c: Compute, loads_of: Loads) -> list[Compute]:
    """Members that need `c`."""
    made = {c.out}
    out = []
    for m in members:
        if any(ld.source in made for ld in loads_of(m)):
            made.add(m.out)
            out.append(m)
    return out


def _store_index(last: Compute, tail: Sequence[Compute]) -> tuple[Expr, ...] | None:
    """Where a point of `last` goes in the value at the end of `tail`; None if that is not a bijection we can write."""
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    types = [c.out.tensor.dtype for c in (last, *tail)]
    if sum(a is not b for a, b in pairwise(types)) > 1:
        return None  # rounded, then something else
    for c in tail:
        read = _uncast(c.body)
        if c.reduce is not None or not isinstance(read, Load):
            return None
        bodies[c.out] = (c.axes, inline_loads(read, bodies))
    axes, body = bodies[tail[-1].out]
    if not isinstance(body, Load) or body.source is not last.out:
        return None
    at: dict[Axis, Expr] = {}
    for own, ix in zip(last.axes, body.index, strict=True):
        if _unit(own):
            continue
        digit = _digit(simplify(ix))
        if digit is None:
            return None
        axis, low = digit
        at[axis] = at.get(axis, i64(0)) + var(own) * low
    mapping: dict[Expr, Expr] = {var(a): simplify(e) for a, e in at.items()}
    back = [simplify(substitute(ix, mapping)) for ix in body.index]
    if any(b is not var(own) for own, b in zip(last.axes, back, strict=True) if not _unit(own)):
        return None
    if not same(dim_expr(last.out.tensor.size), dim_expr(tail[-1].out.tensor.size)):
        return None
    return tuple(mapping.get(var(a), i64(0)) for a in axes)


def _uncast(e: Expr) -> Expr:
    """What a Cast to a narrower or wider type reads: the store does that."""
    return e.args[0] if isinstance(e, Apply) and e.prim.name == "cast" else e


def _digit(ix: Expr) -> tuple[Axis, Expr] | None:
    """(axis, low) of `axis`, `axis // low` and either of them modulo something."""
    if isinstance(ix, Apply) and ix.prim.name == "mod":
        ix = ix.args[0]
    if isinstance(ix, Var):
        return ix.axis, i64(1)
    if isinstance(ix, Apply) and ix.prim.name == "floordiv" and isinstance(ix.args[0], Var):
        return ix.args[0].axis, ix.args[1]
    return None


# ---- the products ----


def _unfit(core: Sequence[Compute], found: RowMap, first: Compute, last: Compute | None) -> str:
    """Why a product is none of blocks of rows; empty if both are."""
    if any(c.reduce is not None and found.level[c.out] == 0 and c is not first for c in core):
        return "a row reduction does not depend on the first product"
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    for c in core:
        if c.reduce is None:
            bodies[c.out] = (c.axes, inline_loads(c.body, bodies))
    made = {c.out for c in core}
    for c in (first, *(() if last is None else (last,))):
        parts = _sides(c, found.axis_of, bodies)
        if isinstance(parts, str):
            return parts
        a, b = parts
        if any(ld.source in made for ld in (loads(b) if c is last else loads(a, b))):
            return f"an operand of {c.out.name} is made in the rows"
    return ""


def _sides(
    c: Compute, axis_of: Mapping[Axis, Axis], bodies: Mapping[Value, tuple[tuple[Axis, ...], Expr]]
) -> tuple[Expr, Expr] | str:
    """The factors (rows, columns) of a product with one column axis and one summed axis, or why it has none."""
    assert c.reduce is not None
    columns = [a for a in c.axes if not _unit(a) and a not in axis_of]
    depth = [a for a in c.reduce.axes if not _unit(a)]
    if len(columns) != 1 or len(depth) != 1:
        return f"{c.out.name} has {len(columns)} column axes and sums over {len(depth)}"
    body = inline_loads(c.body, bodies)
    if not (isinstance(body, Apply) and body.prim.name == "mul"):
        return f"{c.out.name} is not a plain product"
    with_column = [columns[0] in axes_of(f) for f in body.args]
    if with_column.count(True) != 1:
        return f"the columns of {c.out.name} are not those of one factor"
    b, a = (body.args[0], body.args[1]) if with_column[0] else (body.args[1], body.args[0])
    if any(depth[0] not in axes_of(f) for f in (a, b)):
        return f"a factor of {c.out.name} is not summed over"
    return a, b


def _unit(a: Axis) -> bool:
    return isinstance(a.extent, int) and a.extent == 1


__all__ = ["CODE", "RowBlock", "is_product", "row_block"]
