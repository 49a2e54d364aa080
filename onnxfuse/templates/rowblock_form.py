"""A kernel taken apart into what runs by blocks of rows: a product, stages over each row, perhaps a second product.

    first    s[i, j] = sum over d of a[i, d] * b[j, d], with the pointwise stages that follow as its epilogue
    nest     the stages between, for one row: private buffers over the columns, reductions
    last     y[i, e] = sum over j of p[i, j] * v[j, e]; what p is made of is the last stage of the nest

The row buffers that only hand elements on (raw scores -> exponentials -> shares) lie on top of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxfuse.analysis.roles import Contraction, Side
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Load, axes_of, i64, load, loads, substitute, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel, Stage, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import dim_expr, same, simplify
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.templates.nest import Nest, Step, stage_roots, stage_stores, tidy

ACCUMULATORS = frozenset({DType.F32, DType.F64})


@dataclass(frozen=True, slots=True, eq=False)
class Area:
    """Memory for row buffers that share it: `whole` = every row of the block, else one row at a time."""

    dtype: DType
    extent: Dim
    whole: bool

    @property
    def stride(self) -> Expr:
        """Elements from row to row: an odd number of cache lines, so that rows do not crowd into a few cache sets."""
        per = 64 // self.dtype.bytes
        lines = simplify((dim_expr(self.extent) + (per - 1)) // i64(per))
        return simplify((lines + 1 - lines % i64(2)) * per)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """See the module docstring.

    batch    outer axes that are looped outside; row the axis of the blocks (None: every row stands alone)
    areas    memory; `at` says which one a row buffer (as the stages see it, over columns) lies in
    block    the scores as the products see them, over (row, column), by area
    """

    batch: tuple[Axis, ...]
    row: Axis | None
    first: Contraction
    nest: Nest
    last: Contraction | None
    areas: tuple[Area, ...]
    at: dict[Value, int]
    block: dict[Value, int]

    @property
    def products(self) -> tuple[Contraction, ...]:
        return (self.first,) if self.last is None else (self.first, self.last)


def dissect(kernel: Kernel) -> Form | Refusal:
    """The form of a kernel, or why it has none."""
    private = {x.value for x in kernel.locals if x.type.rank == 1}
    stages = list(kernel.stages)
    first = next((s for s in stages if _is_product(s) and s.stores[0].target in private), None)
    if first is None or any(ld.source in private for ld in loads(*first.roots)):
        return Refusal("ROWBLOCK_FORM", "no stage is a product that fills a row")
    stages.remove(first)
    last = stages[-1] if stages and _is_product(stages[-1]) else None
    if last is not None:
        stages.pop()
    if not stages:
        return Refusal("ROWBLOCK_FORM", "nothing is done with the rows")
    products = [s for s in (first, last) if s is not None]
    sides = [_sides(s) for s in products]
    if any(x is None for x in sides):
        return Refusal("ROWBLOCK_FORM", "a product without one factor for its columns")
    if any(s.reduce is None or s.reduce.acc not in ACCUMULATORS for s in products):
        return Refusal("ROWBLOCK_DTYPE", "accumulates in no floating-point type of the products")
    (a, b), *others = [x for x in sides if x is not None]
    fixed = axes_of(b, *(v for _, v in others))
    rows = [o for o in kernel.outer if o in axes_of(a) and o not in fixed]
    if any(o in axes_of(a) and o in axes_of(b) for o in rows):
        return Refusal("ROWBLOCK_FORM", "no axis of rows")
    return _Taker(kernel, rows[-1] if rows else None, first, stages, last).form((a, b), others[0] if others else None)


def _is_product(s: Stage) -> bool:
    r, body = s.reduce, s.reduce_body
    if r is None or body is None or r.combine.name != "add" or r.init.value != 0 or body.dtype is not r.acc:
        return False
    single = len(s.axes) == 1 and len(r.axes) == 1 and len(s.stores) == 1
    return single and isinstance(body, Apply) and body.prim.name == "mul"


def _sides(s: Stage) -> tuple[Expr, Expr] | None:
    """The factor without and the one with the column axis."""
    assert isinstance(s.reduce_body, Apply)
    assert s.reduce is not None
    x, y = s.reduce_body.args
    column, depth = s.axes[0], s.reduce.axes[0]
    if depth not in axes_of(x) or depth not in axes_of(y):
        return None
    if column in axes_of(x):
        return None if column in axes_of(y) else (y, x)
    return (x, y) if column in axes_of(y) else None


class _Taker:
    """Takes one kernel apart."""

    def __init__(self, kernel: Kernel, row: Axis | None, first: Stage, stages: list[Stage], last: Stage | None) -> None:
        self.kernel = kernel
        self.row = row
        self.first, self.stages, self.last = first, stages, last
        self.batch = tuple(o for o in kernel.outer if o is not row)
        self.private = {x.value for x in kernel.locals if x.type.rank == 1}

    def form(self, ab: tuple[Expr, Expr], pv: tuple[Expr, Expr] | None) -> Form | Refusal:
        column = self.first.axes[0]
        result, scores, stores = self._epilogue(column)
        block = Value(f"{scores.name}.block", self._wide(scores))
        here = (self._row_index(), var(column))
        stores = [Store(block, here, s.value) if s.target is scores else s for s in stores]
        first = self._contraction(self.first, ab, result, tuple(stores))
        last, share = None, None
        if self.last is not None and pv is not None:
            share = self._share(pv[0])
            wide = Value(f"{share.name}.block", self._wide(share))
            assert self.last.reduce is not None
            depth = self.last.reduce.axes[0]
            p = load(wide, (self._row_index(), var(depth)), share.tensor.dtype)
            last = self._contraction(self.last, (p, pv[1]), None, self.last.stores)
        kept = tuple(x for x in self.kernel.locals if x.value is not share)  # what the product reads is never dead
        nest = tidy(replace(self.kernel, outer=(), stages=tuple(self.stages), locals=kept))
        rows = {*self.private, *([share] if share is not None else [])}
        root = _overlay(nest.stages, rows, scores)
        areas: list[Area] = []
        at: dict[Value, int] = {}
        whole = {root.get(v, v) for v in (scores, share) if v is not None}
        used = {scores, *([share] if share is not None else []), *_touched(nest, rows)}
        for v in sorted(used, key=lambda v: v.name):
            home = root.get(v, v)
            if home not in at:
                at[home] = len(areas)
                areas.append(Area(home.tensor.dtype, home.tensor.shape[0], home in whole))
            at[v] = at[home]
        blocks = {block: at[scores]}
        if share is not None:
            blocks[wide] = at[share]
        return Form(self.batch, self.row, first, nest, last, tuple(areas), at, blocks)

    def _row_index(self) -> Expr:
        return i64(0) if self.row is None else var(self.row)

    def _wide(self, v: Value) -> TensorType:
        return tensor(v.tensor.dtype, [1 if self.row is None else self.row.extent, v.tensor.shape[0]])

    def _contraction(
        self, s: Stage, ab: tuple[Expr, Expr], result: Load | None, stores: tuple[Store, ...]
    ) -> Contraction:
        assert s.reduce is not None
        column = s.axes[0]
        rows = Side(self.row, () if self.row is None else (self.row,))
        finish = s.stores[0].value
        return Contraction(
            self.batch, rows, Side(column, (column,)), s.reduce.axes, *ab, s.reduce.acc, finish, result, stores
        )

    def _epilogue(self, column: Axis) -> tuple[Load | None, Value, list[Store]]:
        """(what the epilogue reads the sum through, the row buffer it leaves, its stores); takes stages away."""
        store = self.first.stores[0]
        scores, value, result = store.target, store.value, None
        extra: list[Store] = []
        while self.stages and (nxt := self._pointwise(self.stages[0], scores)) is not None:
            raw = load(scores, (var(column),), scores.tensor.dtype)
            known: dict[Expr, Expr] = {raw: raw if result is None else value}
            result = result or raw
            turn: dict[Expr, Expr] = {var(self.stages[0].axes[0]): var(column)}
            moved = [
                Store(
                    s.target,
                    tuple(substitute(i, turn) for i in s.index),
                    substitute(substitute(s.value, turn), known),
                )
                for s in self.stages[0].stores
            ]
            extra += [s for s in moved if s.target not in self.private]
            value = next(s.value for s in moved if s.target is nxt)
            scores = nxt
            self.stages.pop(0)
        return result, scores, [Store(scores, (var(column),), value), *extra]

    def _pointwise(self, s: Stage, scores: Value) -> Value | None:
        """The row buffer that a stage makes of `scores` element by element, if nothing else reads `scores`."""
        if s.reduce is not None or len(s.axes) != 1 or not same(s.axes[0].extent, self.first.axes[0].extent):
            return None
        point = (var(s.axes[0]),)
        reads = [ld for ld in loads(*s.roots) if ld.source in self.private]
        if not reads or any(ld.source is not scores or ld.index != point for ld in reads):
            return None
        if any(ld.source is scores for later in self.stages[1:] for ld in later.loads):
            return None
        if self.last is not None and any(ld.source is scores for ld in self.last.loads):
            return None
        made = [st for st in s.stores if st.target in self.private]
        return made[0].target if len(made) == 1 and made[0].index == point else None

    def _share(self, p: Expr) -> Value:
        """The row buffer the last product reads, in its accumulator's type; adds a stage if p is more than that."""
        assert self.last is not None
        assert self.last.reduce is not None
        depth, dtype = self.last.reduce.axes[0], self.last.reduce.acc
        if isinstance(p, Load) and p.source in self.private and p.index == (var(depth),) and p.dtype is dtype:
            return p.source
        out = Value("share", tensor(dtype, [depth.extent]))
        axis = Axis(depth.name, depth.extent)
        body = substitute(p, {var(depth): var(axis)})
        self.stages.append(Stage((axis,), (Store(out, (var(axis),), body),)))
        return out


def _touched(nest: Nest, rows: set[Value]) -> set[Value]:
    seen = {ld.source for s in nest.stages for ld in loads(*stage_roots(s))}
    seen |= {st.target for s in nest.stages for st in stage_stores(s)}
    return seen & rows


def _overlay(steps: Sequence[Step], rows: set[Value], scores: Value) -> dict[Value, Value]:
    """Row buffer -> the one whose memory it takes over: each element is read for the last time where it is replaced."""
    root: dict[Value, Value] = {}
    for k, step in enumerate(steps):
        stores = [st for st in stage_stores(step) if st.target in rows]
        inner = step.axes if step.reduce is None else step.reduce.axes if step.side else ()
        if len(stores) != 1 or len(inner) != 1 or stores[0].index != (var(inner[0]),):
            continue
        made = stores[0].target
        reads = loads(*stage_roots(step))
        later = {ld.source for s in steps[k + 1 :] for ld in loads(*stage_roots(s))}
        for v in dict.fromkeys(ld.source for ld in reads if ld.source in rows and ld.source is not made):
            alike = v.tensor.dtype is made.tensor.dtype and same(v.tensor.shape[0], made.tensor.shape[0])
            if alike and v not in later and all(ld.index == stores[0].index for ld in reads if ld.source is v):
                root[made] = root.get(v, v)
                break
    return root


__all__ = ["Area", "Form", "dissect"]
