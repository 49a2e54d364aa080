"""Half-precision values that never leave a kernel are not rounded.

onnxruntime's CPU provider has next to no arithmetic on f16: it puts a Cast before and behind every such node, and drops
a pair of Casts that meets, so a chain of them runs in f32 and is rounded once, at its end. A kernel does the same with
its own values, and a value that only kernels read crosses from one to the next in f32 (`edges`): it is no end of the
chain. What the model itself casts to half is rounded: somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Load, cast, children, load, rebuild, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, depends
from onnxfuse.ir.partition import Group, Partition
from onnxfuse.ir.types import tensor


def unrounded(group: Group, edges: Mapping[Value, Value] | None = None) -> Group:
    """The group with its inner half values in f32, where every reader widens them anyway (or only moves them).

    `edges` are half values that cross the group's border in f32, and what stands for them there.
    """
    edges = edges or {}
    wide = _wide(group, edges)
    if not wide:
        return group
    members = tuple(_widened(c, wide) for c in group.members)
    anchor = next((new for c, new in zip(group.members, members, strict=True) if c is group.anchor), None)
    reads, writes = (tuple(edges.get(v, v) for v in side) for side in (group.reads, group.writes))
    return replace(group, members=members, anchor=anchor, reads=reads, writes=writes)


def wide_edges(partition: Partition, apart: Iterable[Group]) -> dict[Value, Value]:
    """Half values that kernels hand to kernels in f32, and what stands for them: the ends of no chain.

    Those of groups in `apart`, which become no kernel, are none; nor are values somebody reads as they are.
    """
    left = set(apart)
    kernels = [g for g in partition.groups if g not in left]
    fixed = set(partition.loops.outputs)
    fixed.update(v for o in partition.left for v in depends(o))
    fixed.update(v for g in left for c in g.members for v in (*depends(c), c.out))
    made = [v for g in kernels for v in g.writes if v.tensor.dtype.is_half and v not in fixed]
    edges = {v: Value(f"{v.name}.f32", tensor(DType.F32, v.tensor.shape)) for v in made}
    while edges:
        bad = {v for g in kernels for v in _rounded(g, edges)}
        if not bad:
            break
        edges = {v: w for v, w in edges.items() if v not in bad}
    return edges


def _rounded(group: Group, edges: Mapping[Value, Value]) -> set[Value]:
    """The edges that the group reads or makes as half values."""
    wide = _wide(group, edges)
    made = {c.out for c in group.members if c.out in group.writes and not (_rounds(c) or _moved(c) in wide)}
    read = {v for c in group.members if not (_moved(c) in wide and c.out in wide) for v in _unwidened(c)}
    return (made | read) & edges.keys()


def _wide(group: Group, edges: Mapping[Value, Value]) -> dict[Value, Value]:
    """For every value that is in f32: what stands for it."""
    held = set(group.writes)
    for c in reversed(group.members):
        moved = _moved(c)
        if moved is None or (c.out in held and c.out not in edges):
            held.update(_unwidened(c))
    wide = {v: edges[v] for v in (*group.reads, *group.writes) if v in edges}
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
    moves = c.out in wide and _moved(c) in wide
    narrow = set() if moves else _unwidened(c)

    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.source not in wide:
            return None
        value = load(wide[e.source], e.index, DType.F32)
        return cast(value, e.dtype) if e.source in narrow else value

    # A cast of what is f32 by now folds away in `rebuild`.
    *first, result = rebuild(c.roots, leaf)
    if c.out in wide:
        result = result.args[0] if _rounds(c) and isinstance(result, Apply) else cast(result, DType.F32)
    out = wide.get(c.out, c.out)
    if not first:
        return replace(c, out=out, body=result)
    assert c.reduce is not None
    return replace(c, out=out, body=first[0], reduce=replace(c.reduce, finish=result))
