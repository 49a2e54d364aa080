"""Half-precision values that never leave a kernel are not rounded.

onnxruntime's CPU provider has next to no arithmetic on f16: it puts a Cast before and behind every such node, and drops
a pair of Casts that meets, so a chain of them runs in f32 and is rounded once, at its end. A kernel does the same with
its own values. What the model itself casts to half is rounded: somebody asked for it.
"""

from __future__ import annotations

from dataclasses import replace

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Load, children, load, rebuild, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute
from onnxfuse.ir.partition import Group
from onnxfuse.ir.types import tensor


def unrounded(group: Group) -> Group:
    """The group with its inner half values in f32, where every reader widens them anyway (or only moves them)."""
    wide = _wide(group)
    if not wide:
        return group
    members = tuple(_widened(c, wide) for c in group.members)
    anchor = next((new for c, new in zip(group.members, members, strict=True) if c is group.anchor), None)
    return replace(group, members=members, anchor=anchor)


def _wide(group: Group) -> dict[Value, Value]:
    """For every value that is kept in f32: what stands for it."""
    held = set(group.writes)
    for c in reversed(group.members):
        moved = _moved(c)
        if moved is None or c.out in held:
            held.update(_unwidened(c))
    wide: dict[Value, Value] = {}
    for c in group.members:
        if c.out not in held and (_rounds(c) or _moved(c) in wide):
            wide[c.out] = Value(c.out.name, tensor(DType.F32, c.out.tensor.shape))
    return wide


def _result(c: Compute) -> Expr:
    return c.roots[-1]


def _moved(c: Compute) -> Value | None:
    """The half value that a view moves."""
    result = _result(c)
    return result.source if c.reduce is None and isinstance(result, Load) and result.dtype.is_half else None


def _is_cast(e: Expr, source: DType) -> bool:
    return isinstance(e, Apply) and e.prim.name == "cast" and e.args[0].dtype is source


def _rounds(c: Compute) -> bool:
    """Computed in f32 and rounded for the value's type alone."""
    return c.out.tensor.dtype.is_half and _is_cast(_result(c), DType.F32) and not _is_asked(c)


def _is_asked(c: Compute) -> bool:
    """A node of the model (not a part of a composite) that does nothing but round."""
    result = _result(c)
    return isinstance(result, Apply) and isinstance(result.args[0], Load) and c.node.source is not None


def _unwidened(c: Compute) -> set[Value]:
    """Half values the member reads as they are."""
    found = {r.source for r in c.roots if isinstance(r, Load) and r.dtype.is_half}
    for e in walk(*c.roots):
        widens = isinstance(e, Apply) and e.prim.name == "cast" and e.dtype is DType.F32
        if not widens:
            found.update(k.source for k in children(e) if isinstance(k, Load) and k.dtype.is_half)
    return found


def _widened(c: Compute, wide: dict[Value, Value]) -> Compute:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.source in wide:
            return load(wide[e.source], e.index, DType.F32)
        return None

    # A cast of what is f32 by now folds away in `rebuild`.
    *first, result = rebuild(c.roots, leaf)
    if c.out in wide and isinstance(result, Apply) and _is_cast(result, DType.F32):
        (result,) = result.args
    out = wide.get(c.out, c.out)
    if not first:
        return replace(c, out=out, body=result)
    assert c.reduce is not None
    return replace(c, out=out, body=first[0], reduce=replace(c.reduce, finish=result))
