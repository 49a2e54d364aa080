"""A kernel under assumptions: every `maybe` pair equal, or dimensions of these sizes. Kernel -> Kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Sym, Var, i64, load, rebuild, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import as_dim, dim_expr, simplify
from onnxfuse.ir.types import Dim, tensor


def equal_extents(kernel: Kernel) -> Kernel:
    """bcast(i, n) becomes i and equal extents become one symbol; the ABI (dims, checks, order) stays."""
    if not kernel.maybe:
        return kernel
    return _Rewriter(kernel, _equalities(kernel)).run()


def at_sizes(kernel: Kernel, sizes: Mapping[Sym, int]) -> Kernel:
    """The kernel for these run-time dimensions: what a template would say of it, not for emission."""
    return _Rewriter(kernel, {s: i64(n) for s, n in sizes.items()}).run()


def _equalities(kernel: Kernel) -> dict[Expr, Expr]:
    """What to replace so that every pair is equal on the page as well (where that can be said).

    A broadcast extent bdim(a, b) makes a and b one symbol only if both are held against it: of a `Where` that reads
    one branch the other may be 1, and the extent is then that of the branch which is read.
    """
    known: dict[Expr, Expr] = {}

    def now(e: Expr) -> Expr:
        return simplify(rebuild((e,), known.get)[0])

    for n, extent in kernel.maybe:
        a, b = now(n), now(extent)
        if isinstance(b, Apply) and b.prim.name == "bdim" and all(isinstance(x, Sym) for x in b.args):
            if {(x, b) for x in b.args} <= {(now(x), now(y)) for x, y in kernel.maybe}:
                _learn(known, b.args[1], b.args[0])
        elif isinstance(a, Sym) and isinstance(b, Lit | Sym) and a is not b:
            _learn(known, a, b)
    for n, extent in kernel.maybe:
        a, b = now(n), now(extent)
        if isinstance(b, Apply) and a is not b:
            _learn(known, b, a)
    return known


def _learn(known: dict[Expr, Expr], old: Expr, new: Expr) -> None:
    for k, v in known.items():
        if v is old:
            known[k] = new
    if old is not new:
        known[old] = new


class _Rewriter:
    """Rewrites one kernel under equalities of symbols."""

    def __init__(self, kernel: Kernel, known: Mapping[Expr, Expr]) -> None:
        self.kernel = kernel
        self.known = known
        values = (*kernel.inputs, *kernel.outputs, *(x.value for x in kernel.locals))
        self.values = {v: self._value(v) for v in values}
        loops = [a for s in kernel.stages for a in (*s.axes, *(s.reduce.axes if s.reduce is not None else ()))]
        self.axes = {a: Axis(a.name, self._dim(a.extent)) for a in (*kernel.outer, *loops)}

    def run(self) -> Kernel:
        k = self.kernel
        return replace(
            k,
            inputs=tuple(self.values[v] for v in k.inputs),
            outputs=tuple(self.values[v] for v in k.outputs),
            outer=tuple(self.axes[a] for a in k.outer),
            stages=tuple(self._stage(s) for s in k.stages),
            locals=tuple(Local(self.values[x.value]) for x in k.locals),
            consts=frozenset(self.values[v] for v in k.consts),
            dims=tuple(replace(b, value=self.values[b.value]) for b in k.dims),
            checks=tuple(replace(c, value=self.values[c.value]) for c in k.checks),
            maybe=(),
            needs=(),  # the library checks those of the kernel itself
        )

    def _dim(self, d: Dim) -> Dim:
        return as_dim(rebuild((dim_expr(d),), self.known.get)[0])

    def _value(self, v: Value) -> Value:
        return Value(v.name, tensor(v.tensor.dtype, [self._dim(d) for d in v.tensor.shape]))

    def _expr(self, e: Expr) -> Expr:
        return simplify(rebuild((e,), self._leaf)[0])

    def _leaf(self, e: Expr) -> Expr | None:
        if isinstance(e, Var):
            return var(self.axes.get(e.axis, e.axis))  # folding may hand over one that is rewritten already
        if isinstance(e, Load):
            return load(self.values[e.source], e.index, e.dtype)
        if isinstance(e, Apply) and e.prim.name == "bcast":
            return e.args[0]
        return self.known.get(e)

    def _stage(self, s: Stage) -> Stage:
        stores = tuple(
            Store(self.values[t.target], tuple(self._expr(i) for i in t.index), self._expr(t.value)) for t in s.stores
        )
        rule = s.reduce
        if rule is not None:
            rule = replace(rule, axes=tuple(self.axes[a] for a in rule.axes))
        body = None if s.reduce_body is None else self._expr(s.reduce_body)
        return Stage(tuple(self.axes[a] for a in s.axes), stores, rule, body)
