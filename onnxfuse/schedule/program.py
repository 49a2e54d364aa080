"""Group -> Program: the row program of one group, still in graph-level values and axes.

Five forms (ir/kernel.py): pointwise, one reduction at the end, anchor with epilogue, rows (everything else), and rows
with products in them (attention).
Values that are neither written nor kept in a local are substituted into their readers. Raises Unsupported
NF_ONE_KERNEL when a group cannot be one kernel; the caller then splits it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.analysis.maps import MOST_NODES
from onnxfuse.analysis.placement import Placement, placement
from onnxfuse.analysis.rowblock import is_product, row_block
from onnxfuse.analysis.rows import RowMap, inline_loads, rows
from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.ir.expr import Expr, Load, acc, cast, i64, load, rebuild, substitute, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Stage, Store
from onnxfuse.ir.loops import Axis, Compute, Reduce
from onnxfuse.ir.partition import Group
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import tensor

Bodies = dict[Value, tuple[tuple[Axis, ...], Expr]]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Outer axes, stages and locals; loads refer to graph values and to the local values listed."""

    outer: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    locals: tuple[Value, ...] = ()


def program(group: Group) -> Program:
    """The row program of a group (see the module docstring)."""
    try:
        made = _form(group)
    except OverflowError as error:  # products of integers that nobody wants written out
        raise Unsupported("NF_ONE_KERNEL", "the kernel's expressions grew too large", str(error)) from error
    size = sum(1 for _ in walk(*(r for s in made.stages for r in s.roots)))
    if size > MOST_NODES:
        raise Unsupported("NF_ONE_KERNEL", "the kernel's expressions grew too large", f"{size} > {MOST_NODES}")
    return made


def _form(group: Group) -> Program:
    reductions = [c for c in group.members if c.reduce is not None]
    if group.anchor is not None and len(reductions) > 1:
        return _row_block(group)
    if group.anchor is not None:
        return _anchored(group, group.anchor)
    last = group.members[-1]
    if len(group.writes) == 1 and group.writes[0] is last.out and not (reductions and reductions != [last]):
        return _single(group, last)
    return _rowwise(group)


def _single(group: Group, last: Compute) -> Program:
    """Pointwise members substituted into the last one, which may be a reduction."""
    bodies: Bodies = {}
    for c in group.members[:-1]:
        bodies[c.out] = (c.axes, inline_loads(c.body, bodies))
    return Program(_looped(last.axes), (_stage(last, bodies, (), _store_index(last.axes)),))


def _looped(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Axes that need a loop (lower writes 0 for an extent of 1)."""
    return tuple(a for a in axes if not _unit(a))


def _unit(a: Axis) -> bool:
    return isinstance(a.extent, int) and a.extent == 1


def _store_index(axes: tuple[Axis, ...]) -> tuple[Expr, ...]:
    return tuple(i64(0) if _unit(a) else var(a) for a in axes)


def _stage(
    c: Compute, bodies: Bodies, axes: tuple[Axis, ...], index: tuple[Expr, ...], target: Value | None = None
) -> Stage:
    out = target or c.out
    body = inline_loads(c.body, bodies)
    if c.reduce is None:
        return Stage(axes, (Store(out, index, body),))
    rule = c.reduce
    value = inline_loads(rule.finish, bodies) if rule.finish is not None else acc(rule.acc)
    plain = Reduce(_looped(rule.axes), rule.combine, rule.init, rule.acc)
    return Stage(axes, (Store(out, index, value),), plain, body)


# --- anchor with epilogue ------------------------------------------------------------------------------------------
def _anchored(group: Group, anchor: Compute) -> Program:
    if len(group.writes) != 1 or group.writes[0] is not group.members[-1].out:
        raise Unsupported("NF_ONE_KERNEL", "an anchor group writes one value, its last")
    core, views = behind(group.members, anchor)
    if views:
        inner = replace(group, members=tuple(c for c in group.members if c not in views), writes=(core.out,))
        return _placed(_anchored(inner, anchor), anchor, core, views)
    outer = _looped(anchor.axes)
    root = group.members[-1]
    bodies: Bodies = {}
    for c in group.members[:-1]:
        if c is not anchor:
            bodies[c.out] = (c.axes, inline_loads(c.body, bodies))
    before = {v: b for v, b in bodies.items() if not _reads(b[1], anchor.out)}
    if root is anchor:
        return Program(outer, (_stage(anchor, before, (), _store_index(anchor.axes)),))
    if root.reduce is not None or [a.extent for a in root.axes] != [a.extent for a in anchor.axes]:
        raise Unsupported("NF_ONE_KERNEL", "the epilogue does not have the anchor's axes")
    local = Value(f"{anchor.out.name}.acc", tensor(anchor.out.tensor.dtype, ()))
    same_point: Mapping[Expr, Expr] = {var(a): var(b) for a, b in zip(root.axes, anchor.axes, strict=True)}
    epilogue = substitute(inline_loads(root.body, bodies), same_point)
    epilogue = _from_local(epilogue, anchor.out, local, _store_index(anchor.axes))
    first = _stage(anchor, before, (), (), local)
    second = Stage((), (Store(root.out, _store_index(anchor.axes), epilogue),))
    return Program(outer, (first, second), (local,))


def behind(members: Sequence[Compute], anchor: Compute) -> tuple[Compute, list[Compute]]:
    """The member whose values the group writes, and the views of it (in order) that only say where."""
    made = {c.out: c for c in members}
    core, views = members[-1], list[Compute]()
    while core is not anchor and core.reduce is None and isinstance(core.body, Load) and core.body.source in made:
        views.insert(0, core)
        core = made[core.body.source]
    return core, views


def place(core: Compute, views: Sequence[Compute]) -> Placement | None:
    """How the views place the points of `core`."""
    bodies: Bodies = {}
    for c in views:
        bodies[c.out] = (c.axes, inline_loads(c.body, bodies))
    read = bodies[views[-1].out][1]
    return placement(read.index, views[-1].axes, core.axes) if isinstance(read, Load) else None


def _placed(made: Program, anchor: Compute, core: Compute, views: list[Compute]) -> Program:
    """The program with its loops in the order of the views, storing where they would copy to."""
    how = place(core, views)
    if how is None:
        raise Unsupported("NF_ONE_KERNEL", "the views behind the anchor are no other order of its loops")
    at: Mapping[Expr, Expr] = {var(a): how.at[var(b)] for a, b in zip(anchor.axes, core.axes, strict=True)}
    target = views[-1].out

    def there(e: Expr) -> Expr:
        return simplify(substitute(e, at))

    stages = []
    for s in made.stages:
        stores = tuple(
            Store(target, how.index, there(t.value)) if t.target is core.out else replace(t, value=there(t.value))
            for t in s.stores
        )
        body = None if s.reduce_body is None else there(s.reduce_body)
        stages.append(Stage(s.axes, stores, s.reduce, body))
    return Program(how.loops, tuple(stages), made.locals)


def _reads(e: Expr, v: Value) -> bool:
    return any(isinstance(x, Load) and x.source is v for x in walk(e))


def _from_local(e: Expr, source: Value, local: Value, here: tuple[Expr, ...]) -> Expr:
    def leaf(x: Expr) -> Expr | None:
        if not isinstance(x, Load) or x.source is not source:
            return None
        if any(a is not b for a, b in zip(x.index, here, strict=True)):
            raise Unsupported("NF_ONE_KERNEL", "the epilogue reads the anchor at another point")
        return load(local, (), x.dtype)

    return rebuild((e,), leaf)[0]


# --- rows ----------------------------------------------------------------------------------------------------------
def _rowwise(group: Group) -> Program:
    found = rows(group.members, group.writes)
    if isinstance(found, Refusal):
        raise Unsupported("NF_ONE_KERNEL", "the members do not stand on common rows", str(found))
    return _Rows(group, found).build()


def _row_block(group: Group) -> Program:
    """A row program whose first stage is a product, and perhaps its last one too."""
    if all(is_product(c) for c in group.members if c.reduce is not None):
        return _siblings(group)
    found = row_block(group.members, group.writes)
    if isinstance(found, Refusal):
        raise Unsupported("NF_ONE_KERNEL", "the members are no row block", str(found))
    core = replace(group, members=found.core)
    if found.last is None or found.written is None:
        return _Rows(core, found.rows).build()
    core = replace(core, writes=(found.last.out,))
    return _Rows(core, found.rows, {found.last.out: (found.written, found.index)}).build()


def _siblings(group: Group) -> Program:
    """Products over the same axes, none of which needs another: one after the other."""
    made: list[Program] = []
    for product in (c for c in group.members if c.reduce is not None):
        after = {product.out}
        for c in group.members:
            if any(v in after for v in c.reads):
                after.add(c.out)
        needed = set(after)
        for c in reversed(group.members):
            if c.out in needed:
                needed.update(c.reads)
        members = tuple(c for c in group.members if c.out in needed)
        if any(c.reduce is not None and c is not product for c in members):
            raise Unsupported("NF_ONE_KERNEL", "a product needs another")
        writes = tuple(v for v in group.writes if v in after)
        made.append(_anchored(replace(group, members=members, writes=writes), product))
    first = made[0]
    if any([a.extent for a in p.outer] != [a.extent for a in first.outer] for p in made):
        raise Unsupported("NF_ONE_KERNEL", "the products have different axes")
    stages = tuple(s for p in made for s in _over(p, first.outer))
    return Program(first.outer, stages, tuple(v for p in made for v in p.locals))


def _over(p: Program, outer: tuple[Axis, ...]) -> tuple[Stage, ...]:
    """The stages of a program over other outer axes of the same extents."""
    mapping: Mapping[Expr, Expr] = {var(a): var(b) for a, b in zip(p.outer, outer, strict=True)}

    def stores(s: Stage) -> tuple[Store, ...]:
        return tuple(
            Store(t.target, tuple(substitute(i, mapping) for i in t.index), substitute(t.value, mapping))
            for t in s.stores
        )

    def body(s: Stage) -> Expr | None:
        return None if s.reduce_body is None else substitute(s.reduce_body, mapping)

    return tuple(replace(s, stores=stores(s), reduce_body=body(s)) for s in p.stages)


Place = tuple[Value, tuple[Expr, ...]]


class _Rows:
    """Builds the stages of a row program, member by member; `placed`: values that are stored as another one."""

    def __init__(self, group: Group, found: RowMap, placed: Mapping[Value, Place] | None = None) -> None:
        self.group = group
        self.map = found
        self.placed = placed or {}
        self.kept = {v for v, _ in found.buffers}
        self.locals: dict[Value, Value] = {}
        self.bodies: Bodies = {}
        self.axes = {c.out: c.axes for c in group.members}
        self.stages: list[Stage] = []

    def build(self) -> Program:
        for c in sorted(self.group.members, key=lambda c: self.map.level.get(c.out, 0)):
            self._member(c)
        return Program(self.map.outer, tuple(self.stages), tuple(self.locals.values()))

    def _member(self, c: Compute) -> None:
        written = c.out in self.group.writes
        if c.reduce is None and not written and c.out not in self.kept:
            self.bodies[c.out] = (c.axes, self._own(c.body))
            return
        private = tuple(a for a in c.axes if a not in self.map.axis_of and not _unit(a))
        targets: list[tuple[Value, tuple[Expr, ...]]] = []
        if c.out in self.kept or (c.reduce is not None and not written):
            local = Value(f"{c.out.name}.row", tensor(c.out.tensor.dtype, [a.extent for a in private]))
            targets.append((local, tuple(var(a) for a in private)))
        if written:
            target, index = self.placed.get(c.out, (c.out, _store_index(c.axes)))
            targets.append((target, tuple(self._outer(e) for e in index)))
        self.stages.append(self._emit(c, private, targets))
        if c.out in self.kept or (c.reduce is not None and not written):
            self.locals[c.out] = targets[0][0]
        elif c.reduce is None:
            self.bodies[c.out] = (c.axes, self._own(c.body))

    def _emit(self, c: Compute, private: tuple[Axis, ...], targets: list[tuple[Value, tuple[Expr, ...]]]) -> Stage:
        body = self._outer(self._own(c.body))
        if c.reduce is None:
            return Stage(private, tuple(Store(t, i, body) for t, i in targets))
        rule = c.reduce
        value = acc(rule.acc) if rule.finish is None else self._outer(self._own(rule.finish))
        plain = Reduce(_looped(rule.axes), rule.combine, rule.init, rule.acc)
        stores = tuple(Store(t, i, cast(value, t.tensor.dtype)) for t, i in targets)
        return Stage(private, stores, plain, body)

    def _own(self, e: Expr) -> Expr:
        """Substitute what is substituted, read what is kept from its local."""
        return rebuild((inline_loads(e, self.bodies),), self._local)[0]

    def _local(self, x: Expr) -> Expr | None:
        local = self.locals.get(x.source) if isinstance(x, Load) else None
        if local is None or not isinstance(x, Load):
            return None
        axes = self.axes[x.source]
        index = [i for a, i in zip(axes, x.index, strict=True) if a not in self.map.axis_of and not _unit(a)]
        return load(local, tuple(index), x.dtype)

    def _outer(self, e: Expr) -> Expr:
        """Outer axes by their representative."""
        mapping: Mapping[Expr, Expr] = {var(a): var(b) for a, b in self.map.axis_of.items()}
        return substitute(e, mapping)
