"""Rows: can these Computes run one after another inside common outer loops, and which axes are those?  Facts only.

A row program is `for every point of the outer axes: stage, stage, ...`; a stage may read of another stage only what
the same iteration made. So an axis of one member *is* an axis of another exactly when the reader indexes that
dimension with the bare variable; such axes form a class (union-find). Extents never decide. Members that do not
depend on each other (siblings: sum and sum of squares) are tied by what both read from outside: axes that index the
same dimension of the same value by bare variables are equal.

    outer      with reductions: the axes every reduction keeps (all reductions must keep the same);
               without: the axes of the written values (all must have the same, in the same order)
    private    all other axes: loops inside a stage; axes of extent 1 are always private
    inline     a pointwise member that does not stand on rows (a reshaped weight, an unsqueezed scale) and is not
               written: it must be substituted into its readers; the rest is judged as if that had been done

Refusals: NF_GROUP_MERGE (reductions keep different axes; outputs have different axes),
NF_AXES_CONFLICT (a member has one outer axis twice), NF_NOT_ROW_LOCAL (a read crosses rows, or a member lacks an
outer axis), NF_VIEW_LEVEL (a read inside the row that is not provably in range; outputs permuted against each other),
NF_RECOMPUTE (substituting would repeat an expensive primitive).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from onnxfuse.analysis.inlined import inlined_loads
from onnxfuse.analysis.kinds import same_extent
from onnxfuse.analysis.maps import WrittenOutError, inline_loads
from onnxfuse.analysis.traffic import dearest, point_cost
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Expr, Load, Var, axes_of
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.simplify import as_dim, bounds
from onnxfuse.ir.types import Dim

__all__ = ["EXPENSIVE", "RowMap", "inline_loads", "rows"]

T = TypeVar("T")
EXPENSIVE = 8  # Prim.cost from which a value is never computed twice (ir/prims.py)


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """How members stand on rows.

    outer    representative outer axes in loop order (axes of the last member on rows)
    axis_of  every member's outer axis -> the representative it equals; absent = private
    inline   values to substitute into their readers (never written)
    level    stage of every member: one more than the deepest reduction it needs
    buffers  values that must be kept for a later stage (written or not), with the bytes of one row of each
    """

    outer: tuple[Axis, ...]
    axis_of: Mapping[Axis, Axis]
    inline: frozenset[Value]
    level: Mapping[Value, int]
    buffers: tuple[tuple[Value, Dim], ...]


Words = tuple[str | Value | Load, ...]  # of a message: values stand for their names, loads for their text


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why members do not stand on rows."""

    code: str
    words: Words

    @property
    def refusal(self) -> Refusal:
        return Refusal(self.code, "".join(w.name if isinstance(w, Value) else str(w) for w in self.words))


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why `culprit` cannot stand on rows as it is."""

    culprit: Compute
    code: str
    words: Words


@dataclass(frozen=True, slots=True)
class _Read:
    """One load of a member's value by another member, after inlining."""

    reader: Compute
    load: Load
    source: Compute


def rows(
    members: Sequence[Compute],
    writes: Collection[Value] | None = None,
    loads_of: Callable[[Compute], list[Load]] = lambda c: c.loads,
    deciding: Sequence[Compute] = (),
) -> RowMap | Refusal:
    """The row map of `members`, in topological order.

    Args:
        members: Computes of one group.
        writes: Values that leave the group; by default those that no member reads.
        loads_of: Loads of a Compute, for callers that ask again and again.
        deciding: The reductions whose kept axes are the outer ones; by default all of them.
    """
    found = on_rows(members, writes, loads_of, deciding)
    return found.refusal if isinstance(found, Unfit) else found


def on_rows(
    members: Sequence[Compute],
    writes: Collection[Value] | None,
    loads_of: Callable[[Compute], list[Load]],
    deciding: Sequence[Compute] = (),
) -> RowMap | Unfit:
    """`rows`, with the words of a refusal apart."""
    made = {c.out: c for c in members}
    level = _levels(members, loads_of)
    if writes is None:
        read = {v for c in members for v in c.reads}
        writes = [v for v in made if v not in read]
    written = set(writes)
    inline: set[Value] = set()
    while True:
        try:
            changed = inlined_loads(members, inline, loads_of)
        except WrittenOutError as error:
            return Unfit("NF_RECOMPUTE", (error.what, error.source))
        except OverflowError as error:  # of dimensions
            return Unfit("NF_RECOMPUTE", (str(error),))
        solid = [(c, changed[c.out] if c.out in changed else loads_of(c)) for c in members if c.out not in inline]
        reads = [_Read(c, ld, made[ld.source]) for c, found in solid for ld in found if ld.source in made]
        bridges = _bridges(solid, made)
        answer = _solve([c for c, _ in solid], reads, written, level, bridges, deciding)
        if isinstance(answer, Unfit):
            return answer
        if isinstance(answer, RowMap):
            return replace(answer, inline=frozenset(inline))
        for v, problem in answer.items():
            if _too_dear(made[v], members):
                cost = f" (cost {dearest(made[v].body)}) must not be computed twice"
                return Unfit("NF_RECOMPUTE", (*problem.words, ", and ", v, cost))
        inline |= answer.keys()


def _too_dear(c: Compute, members: Sequence[Compute]) -> bool:
    """Substituting would repeat an expensive primitive: per row, or for a second reader."""
    if dearest(c.body) < EXPENSIVE or all(_unit(a) for a in c.axes):
        return False
    reads = [ld for m in members for ld in m.loads if ld.source is c.out]
    return len(reads) > 1 or _repeats(c, members)


def _repeats(c: Compute, members: Sequence[Compute]) -> bool:
    """Some reader runs over more points than `c` has."""
    for m in members:
        over = () if m.reduce is None else m.reduce.axes
        axes = {a for a in (*m.axes, *over) if not _unit(a)}
        if any(not axes <= axes_of(*ld.index) for ld in m.loads if ld.source is c.out):
            return True
    return False


def _unit(a: Axis) -> bool:
    return a.extent == 1  # an expression is never equal to a number


class _Classes(Generic[T]):
    """Union-find."""

    __slots__ = ("_parent",)

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def find(self, a: T) -> T:
        parent = self._parent
        while (up := parent.get(a, a)) is not a:
            parent[a] = parent.get(up, up)
            a = up
        return a

    def join(self, a: T, b: T) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            self._parent[a] = b


def bare(ld: Load) -> bool:
    """Reads every element of its source once, each dimension by one variable."""
    return all(
        d == 1 or (isinstance(ix, Var) and same_extent(ix.axis.extent, d))
        for ix, d in zip(ld.index, ld.source.tensor.shape, strict=True)
    )


def _bridges(members: list[tuple[Compute, list[Load]]], made: Collection[Value]) -> list[tuple[Axis, Axis]]:
    """Axes of members that do not depend on each other, equal because they index the same value from outside."""
    part = _Classes[Value]()
    for c, found in members:
        for ld in found:
            if ld.source in made:
                part.join(ld.source, c.out)
    if len({part.find(c.out) for c, _ in members}) < 2:
        return []
    first: dict[Value, dict[Value, Load]] = {}  # value from outside -> part -> how it is read there
    for c, found in members:
        for ld in found:
            if ld.source not in made and bare(ld):
                first.setdefault(ld.source, {}).setdefault(part.find(c.out), ld)
    out: list[tuple[Axis, Axis]] = []
    for by_part in first.values():
        one, *others = by_part.values()
        for other in others:
            out += [
                (x.axis, y.axis)
                for x, y in zip(one.index, other.index, strict=True)
                if isinstance(x, Var) and isinstance(y, Var)
            ]
    return out


def _solve(
    members: list[Compute],
    reads: list[_Read],
    written: set[Value],
    level: Mapping[Value, int],
    bridges: Sequence[tuple[Axis, Axis]],
    deciding: Sequence[Compute],
) -> RowMap | Unfit | dict[Value, _Problem]:
    """A row map, a refusal, or values that have to be inlined first and why."""
    classes, bent = _link(reads)
    for one, other in bridges:
        classes.join(one, other)
    find = classes.find
    klass: dict[Axis, Axis] = {}  # class of every axis with more than one point
    kept: dict[Value, list[Axis]] = {}  # classes of a member's axes
    for c in members:
        over = () if c.reduce is None else c.reduce.axes
        klass.update((a, find(a)) for a in (*c.axes, *over) if a.extent != 1)
        kept[c.out] = [klass[a] for a in c.axes if a in klass]
    want = _outer_classes(deciding or members, kept, written)
    if isinstance(want, Unfit):
        return want
    reducing = any(c.reduce is not None for c in members)
    problems = [_across(r) for r, d in bent if klass[r.source.axes[d]] in want]
    problems += [p for c in members if (p := _stands(c, kept[c.out], klass, want, reducing)) is not None]
    if any(k not in want for ks in kept.values() for k in ks):  # some member has loops inside the row
        problems += [p for r in reads if (p := _within_row(r, klass, want)) is not None]
    inline: dict[Value, _Problem] = {}
    for p in problems:
        if p.culprit.reduce is None and p.culprit.out not in written:
            inline.setdefault(p.culprit.out, p)
    if inline:
        return inline
    if problems:
        return Unfit(problems[0].code, problems[0].words)

    last = members[-1]
    outer = tuple(a for a in last.axes if a in klass and klass[a] in want)
    place = {klass[a]: a for a in outer}
    axis_of = {a: place[k] for c in members for a in c.axes if (k := klass.get(a)) in place}
    if not reducing:
        for c in members:
            if c.out in written and tuple(axis_of[a] for a in c.axes if a in axis_of) != outer:
                return Unfit("NF_VIEW_LEVEL", (c.out, " and ", last.out, " have their axes in another order"))
    return RowMap(outer, axis_of, frozenset(), level, _buffers(members, reads, axis_of, level))


def _link(reads: list[_Read]) -> tuple[_Classes[Axis], list[tuple[_Read, int]]]:
    """Join axes that are read by their bare variable; return the dimensions that are read in any other way."""
    classes = _Classes[Axis]()
    bent: list[tuple[_Read, int]] = []
    for r in reads:
        for d, (ix, axis) in enumerate(zip(r.load.index, r.source.axes, strict=True)):
            if axis.extent == 1:
                continue
            if isinstance(ix, Var) and same_extent(ix.axis.extent, axis.extent):
                classes.join(axis, ix.axis)
            else:
                bent.append((r, d))
    return classes, bent


def _outer_classes(
    members: Sequence[Compute], kept: Mapping[Value, list[Axis]], written: set[Value]
) -> set[Axis] | Unfit:
    """Axes kept by all reductions; without reductions those of the written values."""
    deciding = [c for c in members if c.reduce is not None] or [c for c in members if c.out in written]
    want: set[Axis] | None = None
    for c in deciding:
        mine = set(kept[c.out])
        if len(mine) != len(kept[c.out]):
            return Unfit("NF_AXES_CONFLICT", (c.out, " has one axis twice"))
        if want is not None and want != mine:
            return Unfit("NF_GROUP_MERGE", (deciding[0].out, " and ", c.out, " keep different axes"))
        want = mine
    return set() if want is None else want


def _across(r: _Read) -> _Problem:
    """A read at anything but the bare variable, on an outer axis of the source."""
    return _Problem(r.source, "NF_NOT_ROW_LOCAL", (r.reader.out, " reads ", r.load, " across rows"))


def _stands(
    c: Compute, kept: list[Axis], klass: Mapping[Axis, Axis], want: set[Axis], reducing: bool
) -> _Problem | None:
    """A member has every outer axis once, as a loop of its own."""
    on = [k for k in kept if k in want]
    if c.reduce is not None and any(klass.get(a) in want for a in c.reduce.axes):
        return _Problem(c, "NF_GROUP_MERGE", (c.out, " reduces an outer axis"))
    if len(set(on)) != len(on):
        return _Problem(c, "NF_AXES_CONFLICT", (c.out, " has one outer axis twice"))
    if len(on) != len(want):
        return _Problem(c, "NF_NOT_ROW_LOCAL", (c.out, " lacks an outer axis"))
    if not reducing and len(kept) != len(want):
        return _Problem(c, "NF_GROUP_MERGE", (c.out, " has an axis the outputs have not"))
    return None


def _within_row(r: _Read, klass: Mapping[Axis, Axis], want: set[Axis]) -> _Problem | None:
    """Inside the row a read uses inner variables only and is in range."""
    for ix, axis in zip(r.load.index, r.source.axes, strict=True):
        if axis not in klass or klass[axis] in want:
            continue
        used = (ix.axis,) if isinstance(ix, Var) else axes_of(ix)
        if any(klass.get(a) in want and a in r.reader.axes for a in used):
            return _Problem(r.source, "NF_NOT_ROW_LOCAL", (r.reader.out, " reads ", r.load, " by an outer axis"))
        if not _in_range(ix, axis):
            return _Problem(r.source, "NF_VIEW_LEVEL", (r.reader.out, " reads ", r.load, ": not provably in range"))
    return None


def _in_range(ix: Expr, axis: Axis) -> bool:
    if isinstance(ix, Var) and same_extent(ix.axis.extent, axis.extent):
        return True
    low, high = bounds(ix)
    return low is not None and low >= 0 and high is not None and isinstance(axis.extent, int) and high < axis.extent


def _levels(members: Sequence[Compute], loads_of: Callable[[Compute], list[Load]]) -> dict[Value, int]:
    """Of all members, inlined ones included: inlining does not change what is needed first."""
    level: dict[Value, int] = {}
    reduced = {c.out for c in members if c.reduce is not None}
    for c in members:
        before = [ld.source for ld in loads_of(c) if ld.source in level]
        level[c.out] = max((level[v] + (v in reduced) for v in before), default=0)
    return level


def _buffers(
    members: list[Compute],
    reads: list[_Read],
    axis_of: Mapping[Axis, Axis],
    level: Mapping[Value, int],
) -> tuple[tuple[Value, Dim], ...]:
    """What a later stage reads: results of reductions, and row values unless cheap to compute again from outside."""
    later = {r.source.out for r in reads if level[r.reader.out] > level[r.source.out]}
    wide = {c.out for c in members if _private(c, axis_of)}
    from_row = {r.reader.out for r in reads if r.source.out in wide}
    out: list[tuple[Value, Dim]] = []
    for c in members:
        if c.out not in later or (c.reduce is None and c.out not in wide):
            continue
        if c.reduce is None and c.out not in from_row and point_cost(c.body) < EXPENSIVE:
            continue
        out.append((c.out, _row_bytes(c, axis_of)))
    return tuple(out)


def _row_bytes(c: Compute, axis_of: Mapping[Axis, Axis]) -> Dim:
    known, unknown = c.out.tensor.dtype.bytes, None
    for a in _private(c, axis_of):
        if isinstance(a.extent, int):
            known *= a.extent
        else:
            unknown = a.extent if unknown is None else unknown * a.extent
    return known if unknown is None else as_dim(unknown * known)


def _private(c: Compute, axis_of: Mapping[Axis, Axis]) -> list[Axis]:
    """Loops of a member inside the row."""
    return [a for a in c.axes if not _unit(a) and a not in axis_of]
