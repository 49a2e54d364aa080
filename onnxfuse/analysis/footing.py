"""Footing: how a whole group stands on rows, so that two groups can be joined by looking at the reads between them.

`rows` (analysis/rows.py) judges a list of members. Growing a group of n members pair by pair would judge n, n-1, ...
of them; `joined` judges only the reads from one group into the other. Whatever it accepts, `rows` accepts too, with
the same outer axes; where it cannot tell it says None and `rows` is asked.

Why that is so. Both sides alone have no problem left. A read between them by bare variables joins classes of axes,
and only classes of the two sides with each other: outer with outer (one to one), or private with private. So no class
of either side gains an outer axis it had not, and every rule of `rows` holds for the union as it held for the parts.
A side without reductions has only outer axes and reads its own values by bare variables only (nothing was inlined):
beside reductions, those of its axes that the reductions do not keep become loops inside the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from onnxfuse.analysis.kinds import same_extent
from onnxfuse.analysis.rows import RowMap
from onnxfuse.ir.expr import Load, Var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute


@dataclass(slots=True, eq=False)
class Footing:
    """A group on rows.

    outer     representative outer axes
    axis_of   outer axis of any member -> the representative it equals; absent = private, or of extent 1
    inline    values substituted into their readers
    reducing  some member is a reduction
    bytes     of one row of all members (rows of unknown length aside): no group keeps more; None: not counted yet
    """

    outer: tuple[Axis, ...]
    axis_of: Mapping[Axis, Axis]
    inline: frozenset[Value]
    reducing: bool
    bytes: int | None = None

    def row_bytes(self, members: Callable[[], Iterable[Compute]]) -> int:
        """`bytes`, counted when first asked for."""
        if self.bytes is None:
            self.bytes = sum(_row_bytes(c, self.axis_of) for c in members())
        return self.bytes


@dataclass(frozen=True, slots=True)
class Link:
    """`reader` (of the consumer's side) reads the value that `source` (of the producer's side) makes."""

    reader: Compute
    load: Load
    source: Compute


def bent(link: Link) -> bool:
    """The reader indexes some dimension by anything but a bare variable: such a link alone tells nothing."""
    for ix, axis in zip(link.load.index, link.source.axes, strict=True):
        if axis.extent != 1 and not (isinstance(ix, Var) and same_extent(ix.axis.extent, axis.extent)):
            return True
    return False


def footing(found: RowMap, members: Iterable[Compute]) -> Footing:
    """The footing of a group whose rows have been worked out."""
    return Footing(found.outer, found.axis_of, found.inline, any(c.reduce is not None for c in members))


def at_one_point(members: Sequence[Compute]) -> Footing:
    """The footing of a single member, or of pointwise members that read each other at their own point only."""
    last = members[-1]
    axis_of = {a: r for c in members for a, r in zip(c.axes, last.axes, strict=True) if a.extent != 1}
    return Footing(tuple(a for a in last.axes if a.extent != 1), axis_of, frozenset(), last.reduce is not None)


def _row_bytes(c: Compute, axis_of: Mapping[Axis, Axis]) -> int:
    inner = [a.extent for a in c.axes if a.extent != 1 and a not in axis_of]
    known = [d for d in inner if isinstance(d, int)]
    return c.out.tensor.dtype.bytes * prod(known) if len(known) == len(inner) else 0


def joined(a: Footing, b: Footing, links: Sequence[Link]) -> Footing | None:
    """The footing of both groups together; None when the links, of which none is `bent`, alone do not tell."""
    if not (a.reducing and b.reducing) and ((a.inline and not a.reducing) or (b.inline and not b.reducing)):
        return None
    same: dict[Axis, Axis] = {}  # outer of b -> outer of a
    inner: set[Axis] = set()  # outer axes of one side that are private on the other
    for link in links:
        if link.source.out in a.inline or link.reader.out in b.inline:
            return None
        for ix, axis in zip(link.load.index, link.source.axes, strict=True):
            if axis.extent == 1 or not isinstance(ix, Var):
                continue
            ra, rb = a.axis_of.get(axis), b.axis_of.get(ix.axis)
            if ra is not None and rb is not None:
                if same.setdefault(rb, ra) is not ra:
                    return None
            elif ra is not None and not a.reducing:
                inner.add(ra)
            elif rb is not None and not b.reducing:
                inner.add(rb)
            elif ra is not None or rb is not None:
                return None
    return _union(a, b, same, inner)


def _union(a: Footing, b: Footing, same: Mapping[Axis, Axis], inner: set[Axis]) -> Footing | None:
    images = set(same.values())
    if len(images) != len(same) or not inner.isdisjoint(images) or not inner.isdisjoint(same):
        return None
    if a.reducing and len(images) != len(a.outer):
        return None
    if b.reducing and len(same) != len(b.outer):
        return None
    if not (a.reducing or b.reducing) and tuple(same.get(r) for r in b.outer) != a.outer:
        return None
    # Axes of a side without reductions that the other side's reductions do not keep are private from now on.
    axis_of = {x: r for x, r in a.axis_of.items() if r in images}
    axis_of.update((x, same[r]) for x, r in b.axis_of.items() if r in same)
    outer = tuple(r for r in a.outer if r in images)
    known = None
    if a.reducing == b.reducing and a.bytes is not None and b.bytes is not None:
        known = a.bytes + b.bytes
    return Footing(outer, axis_of, a.inline | b.inline, a.reducing or b.reducing, known)
