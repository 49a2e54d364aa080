"""What members of a group load once some of their values are substituted into the readers.

The loads are all that `rows` asks for. Where only floats are computed with, no body need be written out for them:
substitution changes nothing but the indices of what it brings along. Anything else (guards that may turn out true,
indices that are read) goes through `inline_loads`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from onnxfuse.analysis.maps import MOST_WRITTEN, inline_loads
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Var, load, loads, substitute, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.simplify import simplify

Loads = Callable[[Compute], list[Load]]


def inlined_loads(members: Sequence[Compute], inline: Collection[Value], loads_of: Loads) -> dict[Value, list[Load]]:
    """Loads of the members that change when the values of `inline` are substituted.

    Raises OverflowError when that writes out too much (see `inline_loads`).
    """
    if not inline:
        return {}
    found = _composed(members, inline, loads_of)
    return _written(members, inline) if found is None else found


def _written(members: Sequence[Compute], inline: Collection[Value]) -> dict[Value, list[Load]]:
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    out: dict[Value, tuple[Expr, ...]] = {}
    for c in members:
        if bodies and any(v in bodies for v in c.reads):
            out[c.out] = tuple(inline_loads(r, bodies) for r in c.roots)
        if c.out in inline:
            bodies[c.out] = (c.axes, out.get(c.out, c.roots)[0])
    return {v: loads(*roots) for v, roots in out.items()}


def _composed(members: Sequence[Compute], inline: Collection[Value], loads_of: Loads) -> dict[Value, list[Load]] | None:
    """The same from the loads alone; None where that might not be the same, or too much be written out."""
    bodies: dict[Value, tuple[Compute, list[Load], int]] = {}  # with the most sub-expressions the body has
    out: dict[Value, list[Load]] = {}
    for c in members:
        mine = loads_of(c)
        reads = any(ld.source in bodies for ld in mine)
        if not reads and c.out not in inline:
            continue
        size = _float_size(c)
        if size is None:
            return None
        if reads:
            brought: dict[Load, None] = {}
            for ld in mine:
                if ld.source not in bodies:
                    brought[_normal(ld)] = None
                    continue
                inner, its, most = bodies[ld.source]
                size += most
                at: dict[Expr, Expr] = {var(a): ix for a, ix in zip(inner.axes, ld.index, strict=True)}
                brought.update((_moved(x, at), None) for x in its)
            mine = out[c.out] = list(brought)
        if any(isinstance(x, Load) for ld in mine for ix in ld.index for x in walk(ix)):
            return None
        size += sum(1 for _ in walk(*mine))
        if size > MOST_WRITTEN:
            return None
        if c.out in inline:
            bodies[c.out] = c, mine, size
    return out


def _moved(ld: Load, at: dict[Expr, Expr]) -> Load:
    """The load at other indices."""
    if all(isinstance(ix, (Var, Lit)) for ix in ld.index):
        return _normal(load(ld.source, tuple([at.get(ix, ix) for ix in ld.index]), ld.dtype))
    found = simplify(substitute(ld, at))
    assert isinstance(found, Load)
    return found


def _normal(ld: Load) -> Load:
    found = ld if all(isinstance(ix, (Var, Lit)) for ix in ld.index) else simplify(ld)
    assert isinstance(found, Load)
    return found


def _float_size(c: Compute) -> int | None:
    """Number of expressions outside of indices; None if any of them computes with anything but floats."""
    seen: set[Expr] = set()
    stack = list(c.roots)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        if not e.dtype.is_float:
            return None
        if isinstance(e, Apply):
            stack.extend(e.args)
    return len(seen)
