"""Loop nests of the rowwise template, before code is emitted: tidied, and cut where comparisons turn.

`tidy` drops axes and dimensions of extent 1, merges axes that walk memory together, lets a reduction do the work of
the stage before it, and turns the division of a softmax into a product. `segments` cuts a vector loop at the joints of
a Concat or Pad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from onnxfuse.codegen.build import Index
from onnxfuse.codegen.scalar_expr import affine
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import (
    Apply,
    Expr,
    Lit,
    Load,
    acc,
    apply,
    axes_of,
    i64,
    lit,
    load,
    loads,
    rebuild,
    substitute,
    var,
    walk,
    where,
)
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel, Stage, Store
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.ir.simplify import as_dim, dim_expr, same, simplify
from onnxfuse.ir.types import Dim, tensor

MAX_SEGMENTS = 6  # pieces of code for one vector loop


# ---- tidying the nest ----


@dataclass(frozen=True, slots=True)
class Step(Stage):
    """A stage that also stores, in every turn of its reduction loop, what the stage before it would have stored."""

    side: tuple[Store, ...] = ()


@dataclass(frozen=True, slots=True)
class Nest:
    """A kernel's loops after tidying. `views` maps a reshaped stand-in to the value whose memory it is."""

    outer: tuple[Axis, ...]
    stages: tuple[Step, ...]
    views: Mapping[Value, Value]


def tidy(kernel: Kernel) -> Nest:
    """Drop axes and dimensions of extent 1, merge axes that walk memory together, then neighbouring stages."""
    stages = tuple(Step(s.axes, s.stores, s.reduce, s.reduce_body) for s in kernel.stages)
    private = {v.value for v in kernel.locals}
    nest = _squeeze(_drop_axes(Nest(kernel.outer, stages, {})), private)
    while (merged := _merge_any(nest)) is not None:
        nest = merged
    while (fused := _fuse_any(nest, private)) is not None:
        nest = fused
    return _share_division(nest)


def _map_stage(stage: Step, fn: Callable[[Expr], Expr], keep: Callable[[Axis], bool]) -> Step:
    stores, side = (
        tuple(Store(s.target, tuple(fn(i) for i in s.index), fn(s.value)) for s in part)
        for part in (stage.stores, stage.side)
    )
    reduce = stage.reduce
    if reduce is not None:
        reduce = replace(reduce, axes=tuple(a for a in reduce.axes if keep(a)))
    body = None if stage.reduce_body is None else fn(stage.reduce_body)
    return Step(tuple(a for a in stage.axes if keep(a)), stores, reduce, body, side)


def _drop_axes(nest: Nest) -> Nest:
    axes = [*nest.outer, *(a for s in nest.stages for a in (*s.axes, *(s.reduce.axes if s.reduce else ())))]
    unit: dict[Expr, Expr] = {var(a): i64(0) for a in axes if a.extent == 1}
    if not unit:
        return nest
    stages = tuple(_map_stage(s, lambda e: simplify(substitute(e, unit)), lambda a: a.extent != 1) for s in nest.stages)
    return Nest(tuple(a for a in nest.outer if a.extent != 1), stages, nest.views)


def _squeeze(nest: Nest, private: set[Value]) -> Nest:
    """Take dimensions of extent 1 out of every access (their index can only be 0).

    A private buffer of one element becomes one of rank 0, which lives in a register.
    """
    views = dict(nest.views)
    cache: dict[Value, Value] = {}

    def access(source: Value, index: tuple[Expr, ...]) -> tuple[Value, tuple[Expr, ...]]:
        shape = source.tensor.shape
        if all(d != 1 for d in shape):
            return source, index
        if source not in cache:
            cache[source] = _view(source, [d for d in shape if d != 1], views)
            if source in private and not cache[source].tensor.rank:
                del views[cache[source]]
        return cache[source], tuple(i for i, d in zip(index, shape, strict=True) if d != 1)

    return _rewrite(nest, nest.outer, {}, access, views)


def _view(source: Value, shape: Sequence[Dim], views: dict[Value, Value]) -> Value:
    out = Value(source.name, tensor(source.tensor.dtype, shape))
    views[out] = views.get(source, source)
    return out


Access = Callable[[Value, tuple[Expr, ...]], tuple[Value, tuple[Expr, ...]]]


def _rewrite(
    nest: Nest, outer: tuple[Axis, ...], axes: Mapping[Axis, Axis | None], access: Access, views: Mapping[Value, Value]
) -> Nest:
    """Apply `access` to every load and store; `axes` replaces axes (None: dropped)."""

    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load):
            return None
        source, index = access(e.source, e.index)
        return None if source is e.source else load(source, index, e.dtype)

    def swap(group: tuple[Axis, ...]) -> tuple[Axis, ...]:
        new = (axes.get(a, a) for a in group)
        return tuple(a for a in new if a is not None)

    stages = []
    for s in nest.stages:
        stores = []
        for st in s.stores:
            target, index = access(st.target, tuple(rebuild(st.index, leaf)))
            stores.append(Store(target, index, rebuild((st.value,), leaf)[0]))
        body = None if s.reduce_body is None else rebuild((s.reduce_body,), leaf)[0]
        reduce = None if s.reduce is None else replace(s.reduce, axes=swap(s.reduce.axes))
        side = []
        for st in s.side:
            target, index = access(st.target, tuple(rebuild(st.index, leaf)))
            side.append(Store(target, index, rebuild((st.value,), leaf)[0]))
        stages.append(Step(swap(s.axes), tuple(stores), reduce, body, tuple(side)))
    return Nest(swap(outer), tuple(stages), views)


def spread(nest: Nest, axis: Axis, private: Set[Value]) -> Nest:
    """Every private buffer with one more dimension: an element for each point of an outer axis."""
    views = dict(nest.views)
    cache: dict[Value, Value] = {}

    def access(source: Value, index: tuple[Expr, ...]) -> tuple[Value, tuple[Expr, ...]]:
        if views.get(source, source) not in private or not index:
            return source, index
        if source not in cache:
            cache[source] = _view(source, [*source.tensor.shape, axis.extent], views)
        return cache[source], (*index, var(axis))

    return _rewrite(nest, nest.outer, {}, access, views)


def in_place(nest: Nest, private: Set[Value]) -> Nest:
    """Private rows kept in the output they become: a long row is then in the cache twice instead of three times."""
    homes: dict[Value, tuple[Value, tuple[Expr, ...], tuple[Axis, ...]]] = {}  # by the buffer itself
    for stage in nest.stages:
        for source in dict.fromkeys(ld.source for ld in loads(*stage_roots(stage))):
            root = nest.views.get(source, source)
            if root in private and source.tensor.rank:
                store = _becomes(nest, stage, source)
                if store is not None:
                    homes[root] = (store.target, store.index, stage.axes)
    if len({h[0] for h in homes.values()}) < len(homes):
        return nest

    def access(source: Value, index: tuple[Expr, ...]) -> tuple[Value, tuple[Expr, ...]]:
        root = nest.views.get(source, source)
        if root not in homes:
            return source, index
        target, place, axes = homes[root]
        turn: dict[Expr, Expr] = {var(a): i for a, i in zip(axes, index, strict=True)}
        return target, tuple(substitute(i, turn) for i in place)

    return _rewrite(nest, nest.outer, {}, access, nest.views) if homes else nest


def _becomes(nest: Nest, stage: Step, source: Value) -> Store | None:
    """The store of the stage that may take the private row's place: element for element, and nobody reads it after."""
    own = tuple(var(a) for a in stage.axes)
    if stage.reduce is not None or len(stage.stores) != 1 or stage is not nest.stages[-1]:
        return None
    (store,) = stage.stores
    root = nest.views.get(source, source)
    touched = {ld.source for s in nest.stages for ld in loads(*stage_roots(s))}
    touched |= {st.target for s in nest.stages for st in stage_stores(s)}
    aliases = [v for v in touched if nest.views.get(v, v) is root]
    if any(not _alike(v, source) for v in aliases) or source.tensor.dtype is not store.target.tensor.dtype:
        return None
    if any(ld.index != own for ld in loads(*stage_roots(stage)) if ld.source in aliases):
        return None
    extents = [a.extent for a in stage.axes]
    return store if all(same(d, e) for d, e in zip(source.tensor.shape, extents, strict=True)) else None


def _alike(a: Value, b: Value) -> bool:
    """Two views of a buffer, made where the axes of different stages were joined, have one shape."""
    shapes = a.tensor.shape, b.tensor.shape
    return len(shapes[0]) == len(shapes[1]) and all(same(d, e) for d, e in zip(*shapes, strict=True))


def _merge_any(nest: Nest) -> Nest | None:
    groups = [nest.outer]
    for s in nest.stages:
        groups += [s.axes, s.reduce.axes if s.reduce else ()]
    for group in groups:
        for a, b in pairwise(group):
            if _mergeable(nest, a, b):
                return _merge(nest, a, b)
    return None


def _pairs(index: tuple[Expr, ...], shape: tuple[Dim, ...], a: Axis, b: Axis) -> int | None:
    """Position of a, b as neighbouring indices that walk memory as one axis; -1 when neither occurs; None: no."""
    va, vb = var(a), var(b)
    uses = [k for k, i in enumerate(index) if any(x is va or x is vb for x in walk(i))]
    if not uses:
        return -1
    if len(uses) != 2 or uses[1] != uses[0] + 1:
        return None
    k = uses[0]
    return k if index[k] is va and index[k + 1] is vb and same(shape[k + 1], b.extent) else None


def _mergeable(nest: Nest, a: Axis, b: Axis) -> bool:
    va, vb = var(a), var(b)
    for s in nest.stages:
        for st in s.stores:
            if _pairs(st.index, st.target.tensor.shape, a, b) is None:
                return False
        roots = [st.value for st in s.stores] + ([s.reduce_body] if s.reduce_body is not None else [])
        if any(r is va or r is vb for r in roots):
            return False
        for e in walk(*roots):
            if isinstance(e, Apply) and any(x is va or x is vb for x in e.args):
                return False
            if isinstance(e, Load) and _pairs(e.index, e.source.tensor.shape, a, b) is None:
                return False
    return True


def _merge(nest: Nest, a: Axis, b: Axis) -> Nest:
    both = Axis(f"{a.name}.{b.name}", as_dim(dim_expr(a.extent) * b.extent))
    views = dict(nest.views)
    cache: dict[tuple[Value, int], Value] = {}

    def access(source: Value, index: tuple[Expr, ...]) -> tuple[Value, tuple[Expr, ...]]:
        shape = source.tensor.shape
        k = _pairs(index, shape, a, b)
        if k is None or k < 0:
            return source, index
        if (source, k) not in cache:
            joined = as_dim(dim_expr(shape[k]) * shape[k + 1])
            cache[source, k] = _view(source, [*shape[:k], joined, *shape[k + 2 :]], views)
        return cache[source, k], (*index[:k], var(both), *index[k + 2 :])

    return _rewrite(nest, nest.outer, {a: both, b: None}, access, views)


def _fuse_any(nest: Nest, private: set[Value]) -> Nest | None:
    """Let a reduction over what the stage before it stored do that stage's work on the way (softmax: exp and sum)."""
    for k in range(len(nest.stages) - 1):
        fused = _fuse(nest.stages[k], nest.stages[k + 1])
        if fused is None:
            continue
        later = {ld.source for s in nest.stages[k + 2 :] for ld in loads(*stage_roots(s))}
        dead = {st.target for st in fused.side if nest.views.get(st.target, st.target) in private}
        alias = {nest.views.get(v, v) for v in later}
        side = tuple(st for st in fused.side if st.target not in dead or nest.views.get(st.target, st.target) in alias)
        return Nest(nest.outer, (*nest.stages[:k], replace(fused, side=side), *nest.stages[k + 2 :]), nest.views)
    return None


def _fuse(first: Step, second: Step) -> Step | None:
    """Both as one step, if the second only reads, in each turn, the elements the first would have stored in it."""
    reduce = second.reduce
    if first.reduce is not None or len(first.axes) != 1 or first.side or second.side or second.axes:
        return None
    if reduce is None or second.reduce_body is None or len(reduce.axes) != 1:
        return None
    if not same(first.axes[0].extent, reduce.axes[0].extent):
        return None
    turn: dict[Expr, Expr] = {var(first.axes[0]): var(reduce.axes[0])}
    side = tuple(
        Store(st.target, tuple(substitute(i, turn) for i in st.index), substitute(st.value, turn))
        for st in first.stores
    )
    known: dict[Expr, Expr] = {load(st.target, st.index, st.value.dtype): st.value for st in side}
    stored = {st.target for st in side}
    body_loads = loads(second.reduce_body)
    if not any(ld in known for ld in body_loads) or any(ld.source in stored and ld not in known for ld in body_loads):
        return None
    if any(ld.source in stored for st in second.stores for ld in loads(st.value, *st.index)):
        return None
    if any(ld.source in stored for st in side for ld in loads(st.value)):
        return None
    return Step((), second.stores, reduce, substitute(second.reduce_body, known), side)


@dataclass(slots=True)
class _Known:
    """What earlier stages left in rank-0 values."""

    tops: dict[Expr, Reduce] = field(default_factory=dict)  # a maximum: its loop ...
    bodies: dict[Expr, Expr] = field(default_factory=dict)  # ... and of what
    sums: dict[Expr, set[Value]] = field(default_factory=dict)  # a sum of exponentials: where they are
    ordinary: set[Expr] = field(default_factory=set)  # sums known to be at least 1 (or NaN)


def _share_division(nest: Nest) -> Nest:
    """Softmax, exp(x)/sum(exp(x)), and norms, x/sqrt(y), as products with a reciprocal that is found once per row.

    The product is off by at most 1.5 units in the last place, a division by half of one. Other quotients stay as they
    are, because they may be expected to be exact.
    """
    known = _Known()
    stages: list[Step] = []
    for stage in nest.stages:
        products: dict[Expr, Expr] = {}
        factors: dict[Expr, list[Store]] = {}
        for e in walk(*stage_roots(stage)) if stage.axes else ():
            if isinstance(e, Apply) and (_is_share(e, known) or _is_normed(e, stage)):
                part, total = e.args
                if total not in factors:
                    # A root is 0, infinite, or far from where its reciprocal would over- or underflow.
                    ordinary = total in known.ordinary or not isinstance(total, Load)
                    factors[total] = _factors(len(stages) + len(factors), total, ordinary)
                for st in factors[total]:
                    part = part * load(st.target, (), DType.F32)
                products[e] = part
        stages += [Step((), (st,)) for stores in factors.values() for st in stores]
        shared = _turned(stage, products)
        stages.append(_turned(shared, _decays(shared, known)))
        _learn(known, stage)
    return replace(nest, stages=tuple(stages))


def _turned(stage: Step, mapping: Mapping[Expr, Expr]) -> Step:
    return _map_stage(stage, partial(substitute, mapping=mapping), lambda _: True) if mapping else stage


def _decays(stage: Step, known: _Known) -> dict[Expr, Expr]:
    """Every exponential of something less the maximum over all of it, as the function that may count on that."""
    axes = stage.axes if stage.reduce is None else stage.reduce.axes
    return {
        e: apply("decay", e.args[0])
        for e in walk(*stage_roots(stage))
        if isinstance(e, Apply) and e.prim.name == "exp" and _below_zero(known, axes, e.args[0])
    }


def _learn(known: _Known, stage: Step) -> None:
    """Note what a reduction leaves behind."""
    reduce, body = stage.reduce, stage.reduce_body
    if reduce is None or body is None or reduce.acc is not DType.F32:
        return
    left = [load(st.target, (), DType.F32) for st in stage.stores if not st.index and st.value == acc(DType.F32)]
    if reduce.combine.name == "max":
        known.tops |= dict.fromkeys(left, reduce)
        known.bodies |= dict.fromkeys(left, body)
    if reduce.combine.name == "add" and isinstance(body, Apply) and body.prim.name == "exp":
        places = {st.target for st in stage.side if st.value == body}
        known.sums |= dict.fromkeys(left, places)
        if _below_zero(known, reduce.axes, body.args[0]):
            known.ordinary |= set(left)


def _below_zero(known: _Known, axes: tuple[Axis, ...], e: Expr) -> bool:
    """`e` is x - max(x): never above 0, and 0 somewhere in the loop over the axes (or NaN)."""
    if not isinstance(e, Apply) or e.prim.name != "sub" or e.args[1] not in known.tops or len(axes) != 1:
        return False
    x, top = e.args
    loop = known.tops[top]
    if len(loop.axes) != 1 or not same(loop.axes[0].extent, axes[0].extent):
        return False
    return substitute(known.bodies[top], {var(loop.axes[0]): var(axes[0])}) == x


def _is_share(e: Apply, known: _Known) -> bool:
    """A quotient of an exponential and a sum of them."""
    if e.prim.name != "div" or e.args[1] not in known.sums:
        return False
    part, total = e.args
    if isinstance(part, Load):
        return part.source in known.sums[total]
    return isinstance(part, Apply) and part.prim.name == "exp"


def _is_normed(e: Apply, stage: Step) -> bool:
    """A quotient by a square root that is the same for all of a row."""
    if e.prim.name != "div" or e.dtype is not DType.F32:
        return False
    root = e.args[1]
    return isinstance(root, Apply) and root.prim.name == "sqrt" and not axes_of(root) & set(stage.axes)


def _factors(k: int, total: Expr, ordinary: bool) -> list[Store]:
    """1/total as one factor, or as two where the reciprocal alone might over- or underflow."""
    scale, rest = (Value(f"(share {k} {what})", tensor(DType.F32, ())) for what in ("scale", "rest"))
    one = lit(1.0, DType.F32)
    if ordinary:
        return [Store(rest, (), one / total)]
    big, small = lit(2.0**64, DType.F32), lit(2.0**-64, DType.F32)
    factor = where(apply("lt", total, small), big, where(apply("lt", big, total), small, one))
    return [Store(scale, (), factor), Store(rest, (), one / (total * load(scale, (), DType.F32)))]


# ---- what a stage evaluates ----


def stage_roots(stage: Step) -> list[Expr]:
    """Everything a stage evaluates."""
    return [s.value for s in stage.stores] + turn_roots(stage)


def turn_roots(stage: Step) -> list[Expr]:
    """What is evaluated in every turn of the reduction."""
    return [s.value for s in stage.side] + ([stage.reduce_body] if stage.reduce_body is not None else [])


def stage_stores(stage: Step) -> list[Store]:
    """Everything a stage stores."""
    return [*stage.stores, *stage.side]


# ---- joints ----


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the vector axis and the stages with what its comparisons come to there."""

    low: Index
    high: Index
    stages: tuple[Step, ...]


def segments(stages: tuple[Step, ...], axis: Axis) -> list[Segment]:
    """The vector axis cut where a comparison with a constant changes: the parts of a Concat, the edges of a Pad.

    No lane is then evaluated for parts it does not lie in. Too many cuts would make much code: then there are none.
    """
    assert isinstance(axis.extent, int)
    todo = [(0, axis.extent, stages)]
    out: list[tuple[int, int, tuple[Step, ...]]] = []
    while todo and len(todo) + len(out) <= MAX_SEGMENTS:
        start, stop, here = todo.pop()
        turn = _turning_point(here, axis)
        if turn is None:
            out.append((start, stop, here))
            continue
        test, point = turn
        point = min(max(point, start), stop)
        for low, high in ((start, point), (point, stop)):
            if low < high:
                todo.append((low, high, tuple(_decided(s, test, axis, low) for s in here)))
    cuts = [(0, axis.extent, stages)] if todo else sorted(out, key=lambda g: g[0])
    return [Segment(*g) for g in cuts]


def _turning_point(stages: tuple[Step, ...], axis: Axis) -> tuple[Apply, int] | None:
    """A comparison that depends on the vector axis alone, and where it turns."""
    v = var(axis)
    for e in walk(*(r for s in stages for r in stage_roots(s))):
        if not isinstance(e, Apply) or e.prim.name not in ("lt", "le") or e.args[0].dtype is not DType.I64:
            continue
        split = affine(simplify(e.args[1] - e.args[0]), v)  # lt: turns where rest + step * v passes 0
        rest, step = (None, None) if split is None else (as_dim(split[0]), as_dim(split[1]))
        if not isinstance(rest, int) or step not in (1, -1):
            continue
        # The first point where it holds (step 1) or no longer does (step -1); lt is b - a > 0, le is b - a >= 0.
        above = 1 if e.prim.name == "lt" else 0
        point = above - rest if step == 1 else rest - above + 1
        return e, point
    return None


def _decided(stage: Step, test: Apply, axis: Axis, at: int) -> Step:
    """The stage where `test` has the value it has at one point."""
    v = var(axis)
    difference = simplify(substitute(test.args[1] - test.args[0], {v: i64(at)}))
    assert isinstance(difference, Lit)
    holds = difference.value > 0 if test.prim.name == "lt" else difference.value >= 0
    return _map_stage(stage, partial(substitute, mapping={test: lit(bool(holds), DType.BOOL)}), lambda _: True)


__all__ = [
    "Nest",
    "Segment",
    "Step",
    "in_place",
    "segments",
    "spread",
    "stage_roots",
    "stage_stores",
    "tidy",
    "turn_roots",
]
