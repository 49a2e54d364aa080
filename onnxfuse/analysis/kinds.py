"""Kinds of a Compute: what TVM calls the operator pattern, for the node and for every value it reads.  Facts only.

Derived from index maps and body, never from an op name (FUSION.md 1.1):

    elemwise < broadcast < injective < reduce < anchor < opaque        (max = harder to fuse)

Without a reduction the kind of an edge is the kind of that load's index map against the store; the node takes the
hardest of them, but a `broadcast` node with one elemwise load is elemwise (bias add). With a reduction the node is

    anchor   a sum of products of two factors that each miss an output axis (data reuse: matmul, conv), or a reduction
             that reads at anything but the bare reduction variable (pool, depthwise conv, LRN)
    reduce   everything else

and all its edges carry the node's kind: whatever is read there feeds the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Var, axes_of, loads
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute, Reduce
from onnxfuse.ir.op import Kind
from onnxfuse.ir.simplify import same


@dataclass(frozen=True, slots=True)
class Kinds:
    """`node`: how hard the Compute is to fuse; `edges`: the same for every value it reads."""

    node: Kind
    edges: Mapping[Value, Kind]


def kinds(c: Compute, found: list[Load] | None = None) -> Kinds:
    """Node kind and edge kinds of one Compute; `found` are its loads, for callers that have them."""
    if found is None:
        found = c.loads
    if c.reduce is not None:
        node = _reduction_kind(c, c.reduce)
        return Kinds(node, {ld.source: node for ld in found})
    edges: dict[Value, Kind] = {}
    hardest, plain = Kind.ELEMWISE, False
    for ld in found:
        kind = map_kind(ld, c.axes)
        before = edges.get(ld.source)
        edges[ld.source] = kind if before is None else _harder(before, kind)
        if kind is Kind.ELEMWISE:
            plain = True
        else:
            hardest = _harder(hardest, kind)
    if hardest is Kind.BROADCAST and plain:
        hardest = Kind.ELEMWISE
    return Kinds(hardest, edges)


def kind_in_tvm(c: Compute, node: Kind, found: list[Load]) -> Kind:
    """What TVM calls a Compute of kind `node`, where it decides otherwise; only its own partition wants that.

    A sum with a step after it (mean) is a reduction and an injective block in one function, which makes an anchor; an
    index that is read from a tensor is opaque; extents do not count, so a slice from 0 is elemwise.
    """
    if c.reduce is not None:
        return Kind.ANCHOR if node is Kind.REDUCE and c.reduce.finish is not None else node
    if any(loads(*ld.index) for ld in found):
        return Kind.OPAQUE
    if node is not Kind.INJECTIVE:
        return node
    each = [map_kind(ld, c.axes, whole=False) for ld in found]
    hardest = max(each, key=lambda k: k.level)
    return Kind.ELEMWISE if hardest is Kind.BROADCAST and Kind.ELEMWISE in each else hardest


def map_kind(ld: Load, store: tuple[Axis, ...], whole: bool = True) -> Kind:
    """Kind of the index map of one load, against a store at the bare variables of `store`.

    Reading a part of the source (a slice from 0, where index and variable look alike) is injective, not elemwise,
    unless `whole` is False.
    """
    shape = ld.source.tensor.shape
    if len(shape) == len(store):
        for ix, d, a in zip(ld.index, shape, store, strict=True):
            if isinstance(ix, Var) and ix.axis is a and (not whole or d == a.extent or same_extent(d, a.extent)):
                continue
            if a.extent == 1 and (d == 1 or (not whole and isinstance(ix, Lit) and ix.value == 0)):
                continue
            break
        else:
            return Kind.ELEMWISE
    at = 0
    for ix, dim in zip(ld.index, shape, strict=True):
        if isinstance(dim, int) and dim == 1:
            continue
        axis = _bare(ix)
        if axis is None or (whole and isinstance(ix, Var) and not same_extent(dim, axis.extent)):
            return _beyond_broadcast(ld)
        while at < len(store) and store[at] is not axis:
            at += 1
        if at == len(store):
            return _beyond_broadcast(ld)
        at += 1
    return Kind.BROADCAST


def same_extent(a: int | Expr, b: int | Expr) -> bool:
    """Provably equal extents; identity first, because dimensions are in normal form nearly always."""
    return a is b or a == b or (not (isinstance(a, int) and isinstance(b, int)) and same(a, b))


def factors(body: Expr) -> tuple[Expr, ...]:
    """Factors of a product that read memory; casts and guards with a constant other side are looked through."""
    out: list[Expr] = []
    stack = [body]
    while stack:
        e = stack.pop()
        if isinstance(e, Apply) and e.prim.name == "cast":
            stack.append(e.args[0])
        elif isinstance(e, Apply) and e.prim.name == "mul":
            stack.extend(reversed(e.args))
        elif isinstance(e, Apply) and e.prim.name == "where" and isinstance(e.args[2], Lit):
            stack.append(e.args[1])
        elif loads(e):
            out.append(e)
    return tuple(out)


def _harder(a: Kind, b: Kind) -> Kind:
    return a if a.level >= b.level else b


def _bare(ix: Expr) -> Axis | None:
    """The axis of `v` or of `bcast(v, n)`."""
    if isinstance(ix, Var):
        return ix.axis
    if isinstance(ix, Apply) and ix.prim.name == "bcast" and isinstance(ix.args[0], Var):
        return ix.args[0].axis
    return None


def _beyond_broadcast(ld: Load) -> Kind:
    """A gather whose index tensor is itself gathered is opaque; every other map is injective."""
    for inner in loads(*ld.index):
        if loads(*inner.index):
            return Kind.OPAQUE
    return Kind.INJECTIVE


def _reduction_kind(c: Compute, r: Reduce) -> Kind:
    if _is_contraction(c, r):
        return Kind.ANCHOR
    over = set(r.axes)
    for ld in loads(c.body):
        for ix in ld.index:
            if _bare(ix) is None and axes_of(ix) & over:
                return Kind.ANCHOR
    return Kind.REDUCE


def _is_contraction(c: Compute, r: Reduce) -> bool:
    """A sum of products of two factors, each missing at least one store variable (so each is read again and again)."""
    if r.combine.name != "add":
        return False
    parts = factors(c.body)
    if len(parts) != 2:
        return False
    store = set(c.axes)
    return all(store - axes_of(*(ix for ld in loads(p) for ix in ld.index)) for p in parts)
