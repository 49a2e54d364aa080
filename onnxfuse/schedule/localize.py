"""Dimensions of a kernel: graph-level dimension expressions become symbols the kernel reads from its inputs' shapes.

A graph dimension is a polynomial over atoms (input symbols, `(H+1)//2`, ...). A kernel sees only its inputs, so it
must name what it needs from their shapes: an input dimension that is linear in one atom binds that atom; a product of
several (`N*S`) binds the whole monomial. Everything else is rewritten in terms of what was bound, or refused
(UN_UNBOUND_DIM). The symbols are canonical (`d0`, `d1` ...), so kernels of equal structure are equal text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Sym, Var, apply, cast, load, sym, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, DimCheck
from onnxfuse.ir.simplify import Monomial, Poly, dim_expr, from_poly, poly, simplify
from onnxfuse.ir.types import Dim

_LINEAR = ("add", "sub", "mul", "neg")


@dataclass(slots=True, eq=False)
class Localizer:
    """Bindings found so far, and the rewriting of expressions in terms of them.

    variables   loop variables of the graph level -> the kernel's own
    values      graph values -> the kernel's own (inputs and locals)
    """

    variables: Mapping[Expr, Expr]
    values: Mapping[Value, Value]
    bound: dict[Monomial, Sym] = field(default_factory=dict)
    bindings: list[DimBinding] = field(default_factory=list)
    _memo: dict[Expr, Expr | Unsupported] = field(default_factory=dict)

    def bind(self, inputs: Sequence[tuple[Value, Value]]) -> None:
        """Bind what the shapes of (graph value, kernel value) pairs offer: single atoms first, then products."""
        dims = [
            (mine, k, poly(dim_expr(d)))
            for theirs, mine in inputs
            for k, d in enumerate(theirs.tensor.shape)
            if not isinstance(d, int)
        ]
        for products in (False, True):
            changed = True
            while changed:
                changed = sum(self._offer(mine, k, p, products) for mine, k, p in dims) > 0

    def _offer(self, value: Value, axis: int, p: Poly, products: bool) -> bool:
        """Use one input dimension to bind one unknown monomial. True when something new was bound."""
        unknown = [m for m in p if m and not self._covers(m)]
        if len(unknown) != 1 or (len(unknown[0]) > 1 and not products):
            return False
        if any(m for m in p if m and m is not unknown[0]):
            return False  # other run-time terms: would need a run-time offset
        name = sym(f"d{len(self.bindings)}")
        self.bindings.append(DimBinding(name, value, axis, p[unknown[0]], p.get((), 0)))
        self.bound[unknown[0]] = name
        self._memo.clear()
        return True

    def _covers(self, m: Monomial) -> bool:
        try:
            self._monomial(m)
        except Unsupported:
            return False
        return True

    def dim(self, d: Dim) -> Dim:
        """A graph dimension in the kernel's symbols. Raises Unsupported UN_UNBOUND_DIM."""
        if isinstance(d, int):
            return d
        made = simplify(self.expr(d))
        return int(made.value) if isinstance(made, Lit) else made

    def expr(self, root: Expr) -> Expr:
        """An expression in the kernel's symbols, axes and values. Raises Unsupported UN_UNBOUND_DIM."""
        for e in walk(root):
            if e not in self._memo:
                try:
                    self._memo[e] = self._one(e)
                except Unsupported as error:
                    self._memo[e] = error  # a parent may still be nameable as a whole
        done = self._memo[root]
        if isinstance(done, Unsupported):
            raise done
        return done

    def _one(self, e: Expr) -> Expr:
        if isinstance(e, Var):
            return self.variables.get(e, e)
        if isinstance(e, Sym):
            return self._atom(e)
        if isinstance(e, Apply) and e.dtype is DType.I64 and e.prim.name in _LINEAR:
            return self._polynomial(e)
        if e.dtype is DType.I64 and (e,) in self.bound:
            return self.bound[(e,)]
        if isinstance(e, Apply):
            args = [self._done(a) for a in e.args]
            return cast(args[0], e.dtype) if e.prim.name == "cast" else apply(e.prim.name, *args, dtype=e.dtype)
        if isinstance(e, Load):
            return load(self.values[e.source], tuple(self._done(i) for i in e.index), e.dtype)
        return e

    def _done(self, e: Expr) -> Expr:
        made = self._memo.get(e)
        if made is None:
            made = self.expr(e)
        if isinstance(made, Unsupported):
            raise made
        return made

    def _polynomial(self, e: Expr) -> Expr:
        total: Expr = dim_expr(0)
        for m, coeff in poly(e).items():
            total = total + self._monomial(m) * coeff
        return from_poly(poly(total))

    def _monomial(self, m: Monomial) -> Expr:
        out: Expr = dim_expr(1)
        rest = list(m)
        for known in sorted(self.bound, key=len, reverse=True):
            if len(known) < 2:
                break
            while _contains(rest, known):
                for atom in known:
                    rest.remove(atom)
                out = out * self.bound[known]
        for atom in rest:
            out = out * self._atom(atom)
        return out

    def _atom(self, atom: Expr) -> Expr:
        found = self.bound.get((atom,))
        if found is not None:
            return found
        if isinstance(atom, Sym):
            raise Unsupported("UN_UNBOUND_DIM", f"run-time dimension {atom} cannot be read from the group's inputs")
        return self._done(atom) if atom in self._memo else self._one(atom)


def _contains(rest: list[Expr], known: Monomial) -> bool:
    left = list(rest)
    for atom in known:
        if not any(atom is x for x in left):
            return False
        left.remove(atom)
    return True


def input_checks(loc: Localizer, inputs: Iterable[tuple[Value, Value]]) -> tuple[DimCheck, ...]:
    """Equalities of run-time input dimensions beyond the bindings (where they can be expressed)."""
    sources = {(b.value, b.axis) for b in loc.bindings}
    out = []
    for theirs, mine in inputs:
        for k, d in enumerate(theirs.tensor.shape):
            if isinstance(d, int) or (mine, k) in sources:
                continue
            try:
                out.append(DimCheck(mine, k, dim_expr(loc.dim(d))))
            except Unsupported:
                continue  # a dimension nothing depends on
    return tuple(out)


def maybe_pairs(roots: Iterable[Expr], extents: Mapping[Expr, Dim]) -> tuple[tuple[Expr, Expr], ...]:
    """(n, extent) of every run-time broadcast `bcast(i, n)`: the fast variant needs n == extent for all of them."""
    pairs: dict[tuple[Expr, Expr], None] = {}
    for e in walk(*roots):
        if isinstance(e, Apply) and e.prim.name == "bcast":
            i, n = e.args
            extent = extents.get(i)
            full = dim_expr(extent) if extent is not None else simplify(apply("max", n, dim_expr(2)))
            pairs[(n, full)] = None
    return tuple(pairs)
