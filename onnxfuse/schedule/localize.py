"""Dimensions of a kernel: graph-level dimension expressions become symbols the kernel reads from its inputs' shapes.

A graph dimension is a polynomial over atoms (input symbols, `(H+1)//2`, ...). A kernel sees only its inputs, so it
must name what it needs from their shapes. An input dimension that is linear in one atom binds that atom; any other is
bound as a whole: its leading monomial is eliminated (`A*B = d - A - B - 1` for a dimension `A*B + A + B + 1`), so that
every polynomial built from it comes out in terms of `d`. What cannot be expressed is refused (UN_UNBOUND_DIM). The
symbols are canonical (`d0`, `d1` ...), so kernels of equal structure are equal text.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Sym, Var, apply, cast, load, sym, var, walk
from onnxfuse.ir.given import Part, symbols
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, DimCheck
from onnxfuse.ir.loops import Compute
from onnxfuse.ir.simplify import Monomial, Poly, bounds, dim_expr, from_poly, plus, poly, simplify, times
from onnxfuse.ir.types import Dim

_NONE = sym("unbound")
_LINEAR = ("add", "sub", "mul", "neg")


@dataclass(frozen=True, slots=True)
class Rule:
    """`lead` equals the polynomial `value` (in the kernel's symbols and smaller graph monomials)."""

    lead: Monomial
    value: tuple[tuple[Monomial, int], ...]


@dataclass(slots=True, eq=False)
class Localizer:
    """Bindings found so far, and the rewriting of expressions in terms of them.

    variables   loop variables of the graph level -> the kernel's own
    values      graph values -> the kernel's own (inputs and locals)
    """

    variables: Mapping[Expr, Expr]
    values: Mapping[Value, Value]
    rules: list[Rule] = field(default_factory=list)
    bindings: list[DimBinding] = field(default_factory=list)
    own: set[Expr] = field(default_factory=set)  # the kernel's symbols
    _memo: dict[Expr, Expr | Unsupported] = field(default_factory=dict)

    def bind(self, inputs: Sequence[tuple[Value, Value]]) -> None:
        """Bind what the shapes of (graph, kernel) values offer: single atoms first, then whole dimensions."""
        offers = [
            (DimBinding(_NONE, mine, k), poly(d))
            for theirs, mine in inputs
            for k, d in enumerate(theirs.tensor.shape)
            if not isinstance(d, int)
        ]
        self._bind(offers)

    def bind_data(
        self, inputs: Sequence[tuple[Value, Value]], facts: Mapping[Value, np.ndarray], used: Container[Sym]
    ) -> None:
        """Bind what the elements of inputs offer: shape arithmetic done by the runtime, and symbols in `used`."""
        offers = [
            (DimBinding(_NONE, mine, k, part=part), poly(s))
            for theirs, mine in inputs
            for k, part, s in symbols(theirs)
            if s in used
        ]
        offers += [
            (DimBinding(_NONE, mine, k, part=Part.WHOLE), poly(e))
            for theirs, mine in inputs
            if theirs in facts and theirs.tensor.dtype in (DType.I64, DType.I32) and theirs.tensor.static
            for k, e in enumerate(facts[theirs].flat)
            if e.dtype is DType.I64 and not isinstance(e, Lit) and (bounds(e)[0] or 0) >= 0
        ]
        self._bind(offers)

    def _bind(self, offers: Sequence[tuple[DimBinding, Poly]]) -> None:
        for whole in (False, True):
            changed = True
            while changed:
                changed = sum(self._offer(draft, p, whole) for draft, p in offers) > 0

    def _offer(self, draft: DimBinding, p: Poly, whole: bool) -> bool:
        """Use one input dimension to bind a new symbol. True when something was bound."""
        rest = self._reduced(p)
        unknown = [m for m in rest if m and not self._covers(m)]
        single = len(unknown) == 1 and len(unknown[0]) == 1
        if not unknown or not (whole or (single and len([m for m in rest if m]) == 1)):
            return False
        offset = rest.get((), 0)
        scale = gcd(*(k for m, k in rest.items() if m))
        # `N = d + (N + 1) // 2` would never come to an end: what stands inside another atom is no lead.
        inner = {e for m in rest for atom in m for e in walk(atom) if e is not atom}
        lead = max((m for m in unknown if abs(rest[m]) == scale and not inner & set(m)), key=len, default=None)
        if lead is None:
            return False
        # A symbol is never negative. The part without the constant may be (H - 1 of an empty H): then the symbol takes
        # the constant in, for a dimension as a whole is not.
        taken = 0 if _never_negative(rest) else offset // scale
        name = sym(f"d{len(self.bindings)}")
        self.bindings.append(replace(draft, sym=name, scale=scale, offset=offset - taken * scale))
        sign = 1 if rest[lead] > 0 else -1
        rule = {m: -sign * k // scale for m, k in rest.items() if m and m is not lead}
        if taken:
            rule[()] = -sign * taken
        self.rules.append(Rule(lead, (((name,), sign), *rule.items())))
        self.own.add(name)
        self._memo.clear()
        return True

    def _reduced(self, p: Poly) -> Poly:
        """Apply the rules until no leading monomial is left."""
        for _ in range(8 * (len(self.rules) + 1)):
            hit = next(((m, r) for m in p for r in self.rules if _divides(r.lead, m)), None)
            if hit is None:
                return p
            m, rule = hit
            others = _quotient(m, rule.lead)
            p = plus({n: k for n, k in p.items() if n is not m}, times({others: p[m]}, dict(rule.value)), 1)
        return p

    def _covers(self, m: Monomial) -> bool:
        try:
            for atom in m:
                self._atom(atom)
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
        if e.dtype is DType.I64 and not isinstance(e, Lit) and (isinstance(e, Sym) or self._arithmetic(e)):
            return self._polynomial(e)
        return self._rebuilt(e)

    def _arithmetic(self, e: Expr) -> bool:
        if isinstance(e, Apply) and e.prim.name in _LINEAR:
            return True
        return any(e in r.lead for r in self.rules)

    def _rebuilt(self, e: Expr) -> Expr:
        """The same node over localized children."""
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
        for m, coeff in self._reduced(poly(e)).items():
            term: Expr = dim_expr(coeff)
            for atom in m:
                term = term * self._atom(atom)
            total = total + term
        return from_poly(poly(total))

    def _atom(self, atom: Expr) -> Expr:
        if atom in self.own:
            return atom
        if isinstance(atom, Sym):
            raise Unsupported("UN_UNBOUND_DIM", f"run-time dimension {atom} cannot be read from the group's inputs")
        if isinstance(atom, Var):
            return self.variables.get(atom, atom)
        return self._rebuilt(atom)


def _never_negative(p: Poly) -> bool:
    """The polynomial without its constant."""
    low = bounds(from_poly({m: k for m, k in p.items() if m}))[0]
    return low is not None and low >= 0


def _divides(part: Monomial, whole: Monomial) -> bool:
    left = list(whole)
    for atom in part:
        at = next((k for k, x in enumerate(left) if x is atom), None)
        if at is None:
            return False
        del left[at]
    return True


def _quotient(whole: Monomial, part: Monomial) -> Monomial:
    left = list(whole)
    for atom in part:
        del left[next(k for k, x in enumerate(left) if x is atom)]
    return tuple(left)


def input_checks(loc: Localizer, inputs: Iterable[tuple[Value, Value]]) -> tuple[DimCheck, ...]:
    """Equalities of run-time input dimensions beyond the bindings (where they can be expressed)."""
    sources = {(b.value, b.axis) for b in loc.bindings if b.part is None}
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


def maybe_pairs(roots: Iterable[Expr], broadcast: Mapping[Expr, Iterable[Expr]]) -> tuple[tuple[Expr, Expr], ...]:
    """(n, extent) of every run-time broadcast `bcast(i, n)`: the fast variant needs n == extent for all of them.

    `broadcast` tells the extents every n was broadcast to where the members say so. A loop may be shorter (a Slice of a
    sum), so its own extent says nothing. Where nobody knows, an n that is not 1 counts as equal.
    """
    pairs: dict[tuple[Expr, Expr], None] = {}
    for e in walk(*roots):
        if isinstance(e, Apply) and e.prim.name == "bcast":
            n = e.args[1]
            for full in broadcast.get(n, ()) or (simplify(apply("max", n, dim_expr(2))),):
                pairs[(n, full)] = None
    return tuple(pairs)


def broadcasts(loc: Localizer, members: Iterable[Compute]) -> dict[Expr, dict[Expr, None]]:
    """N -> the extents it is broadcast to, by the axes of the members, in the kernel's symbols."""
    found: dict[Expr, dict[Expr, None]] = {}
    for c in members:
        extents = {var(a): a.extent for a in (*c.axes, *(c.reduce.axes if c.reduce is not None else ()))}
        for e in walk(*c.roots):
            if not isinstance(e, Apply) or e.prim.name != "bcast" or e.args[0] not in extents:
                continue
            try:
                full = dim_expr(loc.dim(extents[e.args[0]]))
                found.setdefault(simplify(loc.expr(e.args[1])), {})[full] = None
            except Unsupported:
                continue
    return found
