"""Roles of the axes of a contraction: which are batch, rows, columns and summed (FUSION.md 3.4).

In: a kernel in the normal form anchor+epilogue whose reduction sums a product of two factors. Out: a `Contraction`

    C[batch, m, n] = sum over k of a[batch, m, k] * b[batch, n, k]        then the epilogue, stores with n innermost

or a Refusal. Nothing here knows op names: MatMul, Gemm, Einsum, convolution of any rank (grouped and transposed too)
and any spelling of them in Mul and ReduceSum look alike. What is decided here:

  * axes of extent 1 vanish; an output axis that is only used through `f // c` is split into (f // c, f % c): so the
    group of a grouped convolution becomes a batch axis;
  * the role of an axis is the set of {a, b, out} it occurs in; which factor is `a` follows from the output: its unit
    stride axis is to be a column (the swap rule);
  * rows are merged into one axis where every access allows it, columns likewise; the rest joins the batch.

A factor may be any expression: `where` guards, sums of axes in an index (a convolution's y*s + ky), casts, a pointwise
prologue. How it is read (in place, packed) is the templates' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import TRUE, Apply, Expr, Lit, Load, Var, axes_of, i64, lit, load, substitute, var, walk, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.prims import Prim
from onnxfuse.ir.simplify import as_dim, dim_expr, poly, same, simplify
from onnxfuse.ir.types import Dim, TensorType


@dataclass(frozen=True, slots=True)
class View:
    """A value seen with some neighbouring dimensions merged: `kept` are the dimensions whose strides remain."""

    source: Value
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """Rows or columns: one merged axis (None: extent 1) and the axes it stands for, outermost first.

    `factor` says whether the operand's own factor is written in the merged axis (else in the parts).
    """

    axis: Axis | None
    parts: tuple[Axis, ...]
    factor: bool = True

    @property
    def extent(self) -> Dim:
        return 1 if self.axis is None else self.axis.extent


@dataclass(frozen=True, slots=True, eq=False)
class Lift:
    """A factor that is written to memory before the product runs, as pairs of `element`s (pairs.py).

    value     32-bit pairs: the shape of the source of `read` with dimension `dim`, along which they lie, halved
    element   what a half holds; an expression over `read` and over scalars
    """

    value: Value
    read: Load
    element: Expr
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """A sum of products with known roles. `stores` are the epilogue; `result` is what it reads the sum through.

    batch    axes looped outside (also rows and columns that do not merge)
    a, b     the factors, in dtype `acc`; a uses batch, rows and k axes, b uses batch, columns and k axes
    finish   expression over Acc that `result` stands for
    result   the Load of the Local, or None when `stores` use Acc themselves
    views    values that occur in the expressions and are another value with dimensions merged
    swapped  a was the second factor of the product
    pairs    every element of a and b holds two neighbours in k (pairs.py), of which these factors must be lifted
    """

    batch: tuple[Axis, ...]
    rows: Side
    cols: Side
    k: tuple[Axis, ...]
    a: Expr
    b: Expr
    acc: DType
    finish: Expr
    result: Load | None
    stores: tuple[Store, ...]
    views: Mapping[Value, View] = field(default_factory=dict)
    swapped: bool = False
    pairs: tuple[Lift, ...] | None = None

    @property
    def depth(self) -> Dim:
        """Number of summed products."""
        return _product(a.extent for a in self.k)


def roles(kernel: Kernel) -> Contraction | Refusal:
    """The roles of a kernel's axes, or why it is not a contraction."""
    parts = pieces(kernel)
    if isinstance(parts, Refusal):
        return parts
    if parts.combine.name != "add" or parts.init.value != 0:
        return Refusal("GEMM_COMBINE", f"reduces with {parts.combine} from {parts.init}")
    parts = _one_sum(_split_phases(parts))
    factors = _factors(parts.body)
    return factors if isinstance(factors, Refusal) else _assign(parts, *factors)


def affine(e: Expr, axis: Axis) -> int | None:
    """Coefficient of `axis` in an index that is affine in it (0 when absent); None when it is not affine."""
    total = 0
    for mono, coeff in poly(simplify(e)).items():
        used = [axis in axes_of(atom) for atom in mono]
        if not any(used):
            continue
        if len(mono) != 1 or not isinstance(mono[0], Var):
            return None
        total += coeff
    return total


# ---- the pieces of a kernel, rewritten step by step ----


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A reducing kernel taken apart: what is summed, over which axes, and the epilogue.

    `finish` is an expression over Acc, `result` the load through which `stores` read it (None: they use Acc).
    """

    outer: tuple[Axis, ...]
    k: tuple[Axis, ...]
    body: Expr
    combine: Prim
    init: Lit
    acc: DType
    finish: Expr
    result: Load | None
    stores: tuple[Store, ...]
    loops: frozenset[Axis] = frozenset()  # output axes that are always looped outside

    def substitute(self, mapping: Mapping[Expr, Expr], outer: tuple[Axis, ...], k: tuple[Axis, ...]) -> Parts:
        """Replace variables everywhere and bring the indices to normal form."""

        def new(e: Expr) -> Expr:
            return simplify(substitute(e, mapping))

        return replace(
            self,
            outer=outer,
            k=k,
            body=new(self.body),
            finish=new(self.finish),
            stores=tuple(Store(s.target, tuple(new(i) for i in s.index), new(s.value)) for s in self.stores),
        )


def pieces(kernel: Kernel) -> Parts | Refusal:
    """The parts of a kernel in the normal form anchor+epilogue (or reduce), axes of extent 1 dropped."""
    parts = _parts(kernel)
    return parts if isinstance(parts, Refusal) else _split_groups(_drop_ones(parts))


def _parts(kernel: Kernel) -> Parts | Refusal:
    if not kernel.stages or len(kernel.stages) > 2:
        return Refusal("GEMM_FORM", f"{len(kernel.stages)} stages")
    first = kernel.stages[0]
    red, body = first.reduce, first.reduce_body
    if red is None or body is None:
        return Refusal("GEMM_FORM", "the first stage does not reduce")
    if any(s.axes or (s.reduce is not None and i) for i, s in enumerate(kernel.stages)):
        return Refusal("GEMM_FORM", "stages have axes of their own")
    if body.dtype is not red.acc:
        return Refusal("GEMM_DTYPE", f"terms in {body.dtype}, accumulated in {red.acc}")
    rest = (red.combine, red.init, red.acc, first.stores[0].value)
    if len(kernel.stages) == 1:
        return Parts(kernel.outer, red.axes, body, *rest, None, first.stores)
    if len(first.stores) != 1 or first.stores[0].index:
        return Refusal("GEMM_FORM", "the sum is stored more than once")
    target = first.stores[0].target
    reads = [ld for ld in kernel.stages[1].loads if ld.source is target]
    result = reads[0] if reads else load(target, (), target.tensor.dtype)
    return Parts(kernel.outer, red.axes, body, *rest, result, kernel.stages[1].stores)


def _factors(body: Expr) -> tuple[Expr, Expr] | Refusal:
    """The two factors of a product; a guard around the product goes to the factor that has its axes."""
    if isinstance(body, Apply) and body.prim.name == "where":
        cond, yes, no = body.args
        inner = _factors(yes)
        if isinstance(inner, Refusal) or not (isinstance(no, Lit) and no.value == 0):
            return Refusal("GEMM_PRODUCT", "the guarded value is not a product")
        x, y = inner
        wanted = axes_of(cond)
        if wanted <= axes_of(x):
            return where(cond, x, no), y
        return (x, where(cond, y, no)) if wanted <= axes_of(y) else Refusal("GEMM_PRODUCT", "guard over both factors")
    if isinstance(body, Apply) and body.prim.name == "mul":
        return body.args[0], body.args[1]
    return Refusal("GEMM_PRODUCT", "the summed expression is not a product")


def _drop_ones(parts: Parts) -> Parts:
    """Axes of extent 1 are the constant 0."""
    ones: dict[Expr, Expr] = {var(a): i64(0) for a in (*parts.outer, *parts.k) if a.extent == 1}
    if not ones:
        return parts.substitute({}, parts.outer, parts.k)
    keep = tuple(a for a in parts.outer if a.extent != 1)
    return parts.substitute(ones, keep, tuple(a for a in parts.k if a.extent != 1))


def _split_groups(parts: Parts) -> Parts:
    """Split an output axis f that occurs as f // c into (f // c, f % c)."""
    for axis in parts.outer:
        size = _group_size(parts.body, axis)
        if size is None or not isinstance(axis.extent, int) or axis.extent % size:
            continue
        group, inner = Axis(f"{axis.name}.g", axis.extent // size), Axis(axis.name, size)
        at = parts.outer.index(axis)
        outer = (*parts.outer[:at], group, inner, *parts.outer[at + 1 :])
        parts = parts.substitute({var(axis): var(group) * size + var(inner)}, outer, parts.k)
        parts = _drop_ones(parts)
    return parts


def _group_size(body: Expr, axis: Axis) -> int | None:
    """The divisor of the first `axis // c` (alone) in an index."""
    for e in walk(body):
        if isinstance(e, Apply) and e.prim.name == "floordiv" and e.args[0] is var(axis):
            divisor = e.args[1]
            if isinstance(divisor, Lit) and divisor.value > 1:
                return int(divisor.value)
    return None


def _one_sum(parts: Parts) -> Parts:
    """Summed axes j, k that occur as j * extent(k) + k only are one axis: a sum that was cut by a reshape."""
    for outer, inner in permutations(parts.k, 2):
        if not isinstance(outer.extent, int) or not isinstance(inner.extent, int):
            continue
        whole = Axis(f"{outer.name}{inner.name}", outer.extent * inner.extent)
        body = substitute(parts.body, {simplify(var(outer) * inner.extent + var(inner)): var(whole)})
        if not axes_of(body) & {outer, inner}:
            k = tuple(whole if a is inner else a for a in parts.k if a is not outer)
            return _one_sum(replace(parts, body=body, k=k))
    return parts


# ---- phases of a transposed convolution ----


@dataclass(frozen=True, slots=True, eq=False)
class _Phase:
    """A guard (out - tap + offset) % step == 0."""

    guard: Expr
    out: Axis
    tap: Axis
    step: int
    offset: int


def _split_phases(parts: Parts) -> Parts:
    """Split output and tap axes of a strided transposed convolution by the phase of the output.

    With out = q*s + r only the taps t*s + (r + offset) % s contribute, and the source index (out - tap + offset) // s
    is q - t + (r + offset) // s: no remainder is left to test, no tap multiplied by zero, and q is a plain column axis.
    """
    seen: list[Expr] = []
    while True:
        phase = next((p for p in _phases(parts) if p.guard not in seen), None)
        if phase is None:
            return parts
        seen.append(phase.guard)
        parts = _split_phase(parts, phase) or parts


def _phases(parts: Parts) -> list[_Phase]:
    out = []
    for e in walk(parts.body):
        if not (isinstance(e, Apply) and e.prim.name == "eq" and e.args[1] is i64(0)):
            continue
        mod = e.args[0]
        if not (isinstance(mod, Apply) and mod.prim.name == "mod" and isinstance(mod.args[1], Lit)):
            continue
        found = _difference(parts, mod.args[0])
        if found is not None:
            out.append(_Phase(e, found[0], found[1], int(mod.args[1].value), found[2]))
    return out


def _difference(parts: Parts, e: Expr) -> tuple[Axis, Axis, int] | None:
    """(out, tap, offset) of `out - tap + offset`."""
    terms = poly(e)
    offset = terms.get((), 0)
    plus = [m[0] for m, c in terms.items() if m and c == 1 and len(m) == 1 and isinstance(m[0], Var)]
    minus = [m[0] for m, c in terms.items() if m and c == -1 and len(m) == 1 and isinstance(m[0], Var)]
    if len(plus) != 1 or len(minus) != 1 or len([m for m in terms if m]) != 2:
        return None
    out, tap = plus[0], minus[0]
    assert isinstance(out, Var)
    assert isinstance(tap, Var)
    return (out.axis, tap.axis, offset) if out.axis in parts.outer and tap.axis in parts.k else None


def _split_phase(parts: Parts, p: _Phase) -> Parts | None:
    s = p.step
    taps = p.tap.extent
    count = as_dim(dim_expr(p.out.extent) // i64(s))
    if not isinstance(taps, int) or not same(as_dim(dim_expr(count) * s), p.out.extent):
        return None
    q, r = Axis(p.out.name, count), Axis(f"{p.out.name}.r", s)
    t = Axis(p.tap.name, -(-taps // s))
    mapping: dict[Expr, Expr] = {p.guard: TRUE}
    for e in walk(parts.body):
        if not (isinstance(e, Apply) and e.prim.name == "floordiv" and e.args[1] is i64(s)):
            continue
        found = _difference(parts, e.args[0])
        if found is not None and found[:2] == (p.out, p.tap) and (found[2] - p.offset) % s == 0:
            mapping[e] = var(q) - var(t) + (var(r) + found[2]) // i64(s)
    tap = var(t) * s + (var(r) + p.offset) % i64(s)
    body = substitute(parts.body, mapping)
    if taps % s:
        factors = _factors(body)
        if isinstance(factors, Refusal):
            return None
        inside = tap < taps
        x, y = (where(inside, f, lit(0, f.dtype)) for f in factors)
        body = x * y
    at = parts.outer.index(p.out)
    split = replace(parts, body=body, loops=parts.loops | {r}).substitute(
        {var(p.out): var(q) * s + var(r), var(p.tap): tap},
        (*parts.outer[:at], r, q, *parts.outer[at + 1 :]),
        tuple(t if a is p.tap else a for a in parts.k),
    )
    return _drop_ones(split)


# ---- roles ----


def _assign(parts: Parts, x: Expr, y: Expr) -> Contraction | Refusal:
    in_x, in_y = axes_of(x), axes_of(y)
    lost = [a for a in parts.k if a not in in_x or a not in in_y]
    if lost:
        return Refusal("GEMM_K", f"{lost[0]} is summed but not in both factors")
    if not parts.k:
        return Refusal("GEMM_K", "nothing is summed")
    only_x = [a for a in parts.outer if a in in_x and a not in in_y and a not in parts.loops]
    only_y = [a for a in parts.outer if a in in_y and a not in in_x and a not in parts.loops]
    batch = [a for a in parts.outer if a not in only_x and a not in only_y]
    if not only_x and not only_y:
        return Refusal("GEMM_ROLES", "no axis belongs to one factor alone")
    unit = _inner_axis(parts.stores[0], [*only_x, *only_y])
    swapped = unit in only_x or (unit not in only_y and not only_y)
    a, b, rows, cols = (y, x, only_y, only_x) if swapped else (x, y, only_x, only_y)
    c = Contraction(
        batch=tuple(batch),
        rows=Side(rows[-1] if rows else None, tuple(rows[-1:])),
        cols=Side(cols[-1] if cols else None, tuple(cols[-1:])),
        k=parts.k,
        a=a,
        b=b,
        acc=parts.acc,
        finish=parts.finish,
        result=parts.result,
        stores=parts.stores,
        swapped=swapped,
    )
    if unit in cols and cols[-1] is not unit:
        cols = [*[n for n in cols if n is not unit], unit]
        c = replace(c, cols=Side(unit, (unit,)))
    c, left_rows = _merge_side(c, rows, is_rows=True)
    c, left_cols = _merge_side(c, cols, is_rows=False)
    outer = [o for o in parts.outer if o in batch or o in left_rows or o in left_cols]
    return replace(c, batch=tuple(outer))


def unit_axis(store: Store) -> Axis | None:
    """The axis along which the first output is contiguous."""
    for e in reversed(store.index):
        if isinstance(e, Lit):
            continue
        found = [a for a in axes_of(e) if affine(e, a) == 1]
        return found[0] if len(found) == 1 else None
    return None


def _inner_axis(store: Store, candidates: list[Axis]) -> Axis | None:
    """The candidate along which the output's elements lie closest."""
    for e in reversed(store.index):
        steps = {a: affine(e, a) for a in candidates}
        found = [(step, k) for k, step in enumerate(steps.values()) if step]
        if found:
            return candidates[min(found)[1]]
    return None


def _merge_side(c: Contraction, axes: list[Axis], is_rows: bool) -> tuple[Contraction, list[Axis]]:
    """Merge as many of `axes` (innermost last) as the epilogue allows; what is left goes to the batch."""
    left = axes[:-1]
    while left:
        merged = _merge(c, left[-1], is_rows)
        if merged is None:
            break
        c = merged
        left = left[:-1]
    return c, left


def _merge(c: Contraction, outer: Axis, is_rows: bool) -> Contraction | None:
    """Merge `outer` with the side's axis: in the epilogue always, in the factor if it allows."""
    side = c.rows if is_rows else c.cols
    inner = side.axis
    assert inner is not None
    extent = as_dim(dim_expr(outer.extent) * dim_expr(inner.extent))
    both = _Merger(outer, inner, Axis(f"{outer.name}{inner.name}", extent), dict(c.views))
    stores = [Store(s.target, s.index, s.value) for s in c.stores]
    new_stores = []
    for s in stores:
        target, index = both.access(s.target, s.index)
        value = both.expr(s.value)
        if index is None or value is None:
            return None
        new_stores.append(Store(target, index, value))
    finish = both.expr(c.finish)
    if finish is None:
        return None
    factor = both.expr(c.a if is_rows else c.b) if side.factor else None
    new = Side(both.axis, (outer, *side.parts), factor is not None)
    if factor is None and side.factor and len(side.parts) > 1:
        return None  # the factor is already written in a merged axis: parts are no longer there
    out = replace(c, stores=tuple(new_stores), finish=finish, views=both.views)
    if is_rows:
        return replace(out, rows=new, a=c.a if factor is None else factor)
    return replace(out, cols=new, b=c.b if factor is None else factor)


@dataclass(slots=True, eq=False)
class _Merger:
    """Rewrites accesses v[.., outer, inner, ..] into v'[.., axis, ..], v' being v with two dimensions merged."""

    outer: Axis
    inner: Axis
    axis: Axis
    views: dict[Value, View]
    made: dict[tuple[Value, int], Value] = field(default_factory=dict)

    def access(self, source: Value, index: tuple[Expr, ...]) -> tuple[Value, tuple[Expr, ...] | None]:
        """The access in the merged axis; index None when the access does not merge."""
        used = axes_of(*index)
        if self.outer not in used and self.inner not in used:
            return source, index
        for d in range(len(index) - 1):
            if index[d] is not var(self.outer) or index[d + 1] is not var(self.inner):
                continue
            rest = index[:d] + index[d + 2 :]
            if axes_of(*rest) & {self.outer, self.inner}:
                return source, None
            if not same(source.tensor.shape[d + 1], self.inner.extent):
                return source, None
            return self._merged(source, d), (*index[:d], var(self.axis), *index[d + 2 :])
        return source, None

    def expr(self, e: Expr) -> Expr | None:
        """The expression in the merged axis; None when it does not merge."""
        mapping: dict[Expr, Expr] = {}
        for ld in [x for x in walk(e) if isinstance(x, Load)]:
            source, index = self.access(ld.source, ld.index)
            if index is None:
                return None
            if source is not ld.source:
                mapping[ld] = load(source, index, ld.dtype)
        out = substitute(e, mapping) if mapping else e
        return None if axes_of(out) & {self.outer, self.inner} else out

    def _merged(self, source: Value, d: int) -> Value:
        made = self.made.get((source, d))
        if made is not None:
            return made
        shape = source.tensor.shape
        dims = (*shape[:d], as_dim(dim_expr(shape[d]) * dim_expr(shape[d + 1])), *shape[d + 2 :])
        new = Value(source.name, TensorType(source.tensor.dtype, dims))
        seen = self.views.get(source, View(source, tuple(range(len(shape)))))
        self.views[new] = View(seen.source, seen.kept[:d] + seen.kept[d + 1 :])
        self.made[source, d] = new
        return new


def _product(dims: Iterable[Dim]) -> Dim:
    total: Expr = i64(1)
    for d in dims:
        total = total * dim_expr(d)
    return as_dim(total)
