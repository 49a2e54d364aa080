"""Normal form of integer (i64) index and dimension arithmetic.

Every i64 expression is a polynomial over *atoms* (Sym, Var, Load, floordiv, mod, min, max, bcast, bdim, casts ...)
with integer coefficients; the normal form prints terms in a fixed order, so two equal polynomials are the same
object and "are these two dimensions equal?" is `simplify(a) is simplify(b)`.

Rules (all exact on integers without overflow; indices and dimensions are far below 2**63):
  * collect and cancel terms; distribute products of sums
  * floordiv(p, c): multiples of c leave the division: (c*q + r)//c = q + r//c, and r//c = 0 when 0 <= r < c
  * mod(p, c): multiples of c vanish, and r mod c = r when 0 <= r < c
  * (g*a + s)//c = a//(c/g) when 0 <= s < g and g divides c;  c*(x//c) + x%c = x
  * division by a monomial that divides every term: (N*C)//N = C (an N of 0 means no elements at all)
  * min, max, lt, le, eq decided by ranges; i64(i32(x)) = x for a dimension x >= 0; nested bdim of the same pair
Nested divisions are *not* merged: (x//2)//2 keeps its inner x//2, so that a kernel whose input dimension is x//2
can still name it (schedule/kernelize.py binds dimensions that way). Floats are never touched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import (
    FALSE,
    TRUE,
    Acc,
    Apply,
    Expr,
    Lit,
    Load,
    Sym,
    Var,
    apply,
    cast,
    children,
    i64,
    load,
    loads,
    rebuild,
    walk,
)

Monomial = tuple[Expr, ...]  # atoms, sorted by _key; () is the constant term
Poly = dict[Monomial, int]
# Larger products are refused (OverflowError): a sum of dimensions squared thirty times must not be written out.
MOST_TERMS, MOST_FACTORS = 256, 16
Range = tuple[int | None, int | None]  # inclusive; None = unbounded


def simplify(e: Expr) -> Expr:
    """Normal form of all i64 arithmetic inside `e`; same value for every assignment in range."""
    found = _cached(e)
    if found is not None:
        return found
    stack = [e]
    while stack:
        top = stack[-1]
        pending = [c for c in children(top) if _cached(c) is None]
        if pending:
            stack.extend(pending)
            continue
        stack.pop()
        if _cached(top) is None:
            _remember(top, _normal(top))
    done = _cached(e)
    assert done is not None
    return done


def _cached(e: Expr) -> Expr | None:
    """The normal form, when it has been worked out before (kept on the expression itself)."""
    found = e.normal
    if found is True:
        return e
    assert not isinstance(found, bool)
    return found


def _remember(e: Expr, normal: Expr) -> None:
    e.normal = True if normal is e else normal
    normal.normal = True


def _normal(e: Expr) -> Expr:
    """Normal form of one node whose children have theirs."""
    new = e
    if isinstance(e, Apply):
        args = tuple(simplify(a) for a in e.args)
        if any(x is not y for x, y in zip(args, e.args, strict=True)):
            new = cast(args[0], e.dtype) if e.prim.name == "cast" else apply(e.prim.name, *args, dtype=e.dtype)
    elif isinstance(e, Load):
        index = tuple(simplify(i) for i in e.index)
        if any(x is not y for x, y in zip(index, e.index, strict=True)):
            new = load(e.source, index, e.dtype)
    stepped = _step(new)
    return new if stepped is None else stepped


def same(a: Expr | int, b: Expr | int) -> bool:
    """Provably equal dimensions. False means "not provable", not "different"."""
    return as_dim(a) == as_dim(b) if isinstance(as_dim(a), int) else as_dim(a) is as_dim(b)


def as_dim(e: Expr | int) -> Expr | int:
    """A dimension in normal form: a Python int when constant."""
    if isinstance(e, int):
        return e
    s = simplify(e)
    return int(s.value) if isinstance(s, Lit) else s


def dim_expr(d: Expr | int) -> Expr:
    """A dimension as an expression."""
    return i64(d) if isinstance(d, int) else d


def known(cond: Expr) -> bool | None:
    """Truth of a condition if it can be proved, else None."""
    s = simplify(cond)
    return bool(s.value) if isinstance(s, Lit) else None


def poly(e: Expr) -> Poly:
    """The polynomial of an i64 expression whose parts are already in normal form."""
    if isinstance(e, Lit):
        return {(): int(e.value)} if e.value else {}
    if isinstance(e, Apply):
        match e.prim.name:
            case "add":
                return plus(poly(e.args[0]), poly(e.args[1]), 1)
            case "sub":
                return plus(poly(e.args[0]), poly(e.args[1]), -1)
            case "neg":
                return plus({}, poly(e.args[0]), -1)
            case "mul":
                a, b = poly(e.args[0]), poly(e.args[1])
                if len(a) * len(b) > MOST_TERMS or _degree(a) + _degree(b) > MOST_FACTORS:
                    raise OverflowError(f"a product of {len(a)} by {len(b)} terms of dimensions")
                return times(a, b)
    return {(e,): 1}


def _degree(p: Poly) -> int:
    return max(map(len, p), default=0)


def from_poly(p: Poly) -> Expr:
    """The expression of a polynomial, terms in canonical order, constant last.

    Raises OverflowError for numbers outside of i64, but where elements of tensors are multiplied: those wrap around.
    """
    total: Expr | None = None
    for mono in sorted(p, key=_mono_key):
        coeff = p[mono]
        if not coeff:
            continue
        if not -(1 << 63) <= coeff < 1 << 63 and not loads(*mono):
            raise OverflowError(f"{coeff} is out of the range of a dimension")
        if not mono:
            term: Expr = i64(abs(coeff) if total is not None else coeff)
        else:
            term = mono[0]
            for atom in mono[1:]:
                term = apply("mul", term, atom)
            scale = abs(coeff) if total is not None else coeff
            term = apply("mul", term, i64(scale)) if scale != 1 else term
        total = term if total is None else apply("add" if coeff > 0 else "sub", total, term)
    return total if total is not None else i64(0)


def bounds(e: Expr) -> Range:
    """Inclusive range of an i64 expression, from axis extents and dims >= 0."""
    if isinstance(e, Lit):
        return int(e.value), int(e.value)
    if isinstance(e, Sym):
        return 0, None
    if isinstance(e, Var):
        ext = e.axis.extent
        return 0, (ext - 1 if isinstance(ext, int) else None)
    if not isinstance(e, Apply):
        return None, None
    match e.prim.name:
        case "add" | "sub" | "mul" | "neg":
            return _poly_bounds(poly(e))
        case "floordiv":
            (lo, hi), d = bounds(e.args[0]), e.args[1]
            if isinstance(d, Lit) and d.value > 0:
                c = int(d.value)
                return (None if lo is None else lo // c), (None if hi is None else hi // c)
            dlo, _ = bounds(d)
            return (0 if lo is not None and lo >= 0 and dlo is not None and dlo >= 0 else None), None
        case "mod":
            d = e.args[1]
            if isinstance(d, Lit) and d.value > 0:
                lo, hi = bounds(e.args[0])
                top = int(d.value) - 1
                return 0, (min(top, hi) if hi is not None and lo is not None and lo >= 0 else top)
            return (0 if (bounds(d)[0] or -1) >= 0 else None), None
        case "min":
            (al, ah), (bl, bh) = bounds(e.args[0]), bounds(e.args[1])
            highs = [h for h in (ah, bh) if h is not None]
            return (None if al is None or bl is None else min(al, bl)), (min(highs) if highs else None)
        case "max":
            (al, ah), (bl, bh) = bounds(e.args[0]), bounds(e.args[1])
            lows = [x for x in (al, bl) if x is not None]
            return (max(lows) if lows else None), (None if ah is None or bh is None else max(ah, bh))
        case "bcast":
            lo, hi = bounds(e.args[0])
            return (None if lo is None else min(lo, 0)), (None if hi is None else max(hi, 0))
        case "bdim":
            (al, ah), (bl, bh) = bounds(e.args[0]), bounds(e.args[1])
            return (None if al is None or bl is None else min(al, bl)), (
                None if ah is None or bh is None else max(ah, bh)
            )
    return None, None


def plus(a: Poly, b: Poly, sign: int) -> Poly:
    """Sum: a + sign * b."""
    out = dict(a)
    for mono, coeff in b.items():
        total = out.get(mono, 0) + sign * coeff
        if total:
            out[mono] = total
        else:
            out.pop(mono, None)
    return out


def times(a: Poly, b: Poly) -> Poly:
    """Product of two polynomials."""
    out: Poly = {}
    for ma, ca in a.items():
        for mb, cb in b.items():
            mono = tuple(sorted(ma + mb, key=_key))
            total = out.get(mono, 0) + ca * cb
            if total:
                out[mono] = total
            else:
                out.pop(mono, None)
    return out


def _key(e: Expr) -> tuple[int, str, int]:
    """Order of atoms: by printed form, then (two axes of one name) by creation."""
    return (0 if isinstance(e, Sym) else 1 if isinstance(e, Var) else 2, str(e), e.serial)


def _mono_key(mono: Monomial) -> tuple[int, tuple[tuple[int, str, int], ...]]:
    return (0 if mono else 1, tuple(_key(a) for a in mono))


def _poly_bounds(p: Poly) -> Range:
    lo: int | None = 0
    hi: int | None = 0
    for mono, coeff in p.items():
        mlo, mhi = _mono_bounds(mono)
        if coeff < 0:
            mlo, mhi = mhi, mlo
        lo = None if lo is None or mlo is None else lo + coeff * mlo
        hi = None if hi is None or mhi is None else hi + coeff * mhi
    return lo, hi


def _mono_bounds(mono: Monomial) -> Range:
    lo: int | None = 1
    hi: int | None = 1
    for atom in mono:
        alo, ahi = bounds(atom)
        if alo is None or alo < 0 or lo is None:
            return (alo, ahi) if len(mono) == 1 else (None, None)
        lo = lo * alo
        hi = None if hi is None or ahi is None else hi * ahi
    return lo, hi


def _step(e: Expr) -> Expr | None:
    if not isinstance(e, Apply):
        return None
    name = e.prim.name
    if e.dtype is DType.BOOL and e.args[0].dtype is DType.I64 and name in ("lt", "le", "eq", "ne"):
        return _compare(name, e.args[0], e.args[1])
    if e.dtype is not DType.I64:
        return None
    match name:
        case "add" | "sub" | "mul" | "neg":
            return from_poly(_recombined(poly(e)))
        case "floordiv" | "idiv":
            if name == "idiv" and not ((bounds(e.args[0])[0] or -1) >= 0 or bounds(e.args[0])[0] == 0):
                return None
            return None if _wraps(e.args[0]) else _floordiv(e.args[0], e.args[1])
        case "mod":
            return None if _wraps(e.args[0]) else _mod(e.args[0], e.args[1])
        case "min" | "max":
            return _minmax(name, e.args[0], e.args[1])
        case "bcast":
            n = bounds(e.args[1])
            if n[0] is not None and n[0] > 1:
                return e.args[0]
        case "bdim":
            return _bdim(e)
        case "cast":
            return _round_trip(e.args[0])
    return None


def _recombined(p: Poly) -> Poly:
    """c*(x//c) + x%c = x, also scaled and times other atoms."""
    for mono, coeff in p.items():
        for atom in mono:
            if not (isinstance(atom, Apply) and atom.prim.name == "floordiv" and isinstance(atom.args[1], Lit)):
                continue
            x, c = atom.args
            others = _without(mono, (atom,)) or ()
            rest = tuple(sorted((*others, apply("mod", x, c)), key=_key))
            part = p.get(rest)
            if part is not None and coeff == part * int(atom.args[1].value):
                left = {m: k for m, k in p.items() if m not in (mono, rest)}
                return _recombined(plus(left, times({others: part}, poly(x)), 1))
    return p


def _bdim(e: Apply) -> Expr | None:
    """bdim(a, bdim(a, b)), bdim(bdim(a, b), a) and bdim(bdim(a, b), b) are bdim(a, b)."""
    a, b = e.args
    if isinstance(b, Apply) and b.prim is e.prim and b.args[0] is a:
        return b
    return a if isinstance(a, Apply) and a.prim is e.prim and b in a.args else None


def _round_trip(e: Expr) -> Expr | None:
    """i64(i32(x)) of a dimension is x: exporters do shape arithmetic in i32, and no dimension reaches 2**31."""
    if not isinstance(e, Apply) or e.prim.name != "cast" or e.dtype is not DType.I32:
        return None
    x = e.args[0]
    low = bounds(x)[0] if x.dtype is DType.I64 else None
    return x if low is not None and low >= 0 and not any(isinstance(y, Load) for y in walk(x)) else None


@lru_cache(maxsize=4096)
def _wraps(e: Expr) -> bool:
    """`e` computes with elements of tensors: they can be any number, and their sums and products wrap around."""
    return isinstance(e, Apply) and any(isinstance(x, Load | Acc) for x in walk(e))


def _compare(name: str, a: Expr, b: Expr) -> Expr | None:
    if a is not b and name in ("lt", "le") and (_wraps(a) or _wraps(b)):
        return None
    gap = plus(poly(b), poly(a), -1)  # b - a
    back = plus({}, gap, -1)
    match name:
        case "lt":
            return TRUE if _at_least(gap, 1) else FALSE if _at_least(back, 0) else None
        case "le":
            return TRUE if _at_least(gap, 0) else FALSE if _at_least(back, 1) else None
        case "eq" | "ne":
            if not gap:
                return TRUE if name == "eq" else FALSE
            if _at_least(gap, 1) or _at_least(back, 1):
                return FALSE if name == "eq" else TRUE
    return None


def _minmax(name: str, a: Expr, b: Expr) -> Expr | None:
    if a is not b and (_wraps(a) or _wraps(b)):
        return None
    gap = plus(poly(b), poly(a), -1)
    if _at_least(gap, 0):
        return a if name == "min" else b
    if _at_least(plus({}, gap, -1), 0):
        return b if name == "min" else a
    return None


def _at_least(p: Poly, least: int) -> bool:
    """Provably p >= least, by numbers, or with every Var that counts against it at its extent - 1."""
    lo, _ = _poly_bounds(p)
    if lo is not None and lo >= least:
        return True
    floor: Poly = {}
    for mono, coeff in p.items():
        term: Poly = {mono: coeff}
        if mono and (coeff < 0 or not _not_negative(mono)):
            if coeff > 0 or not _not_negative(mono):
                return False
            term = {(): coeff}
            for atom in mono:
                upper = None if isinstance(atom, Apply) and atom.prim.name == "mod" else _upper(atom)
                if upper is None:
                    return False
                term = times(term, upper)
        floor = plus(floor, term, 1)
    return floor.get((), 0) >= least and all(k > 0 and _not_negative(m) for m, k in floor.items() if m)


def _not_negative(mono: Monomial) -> bool:
    lows = [bounds(atom)[0] for atom in mono]
    return all(lo is not None and lo >= 0 for lo in lows)


def _split(p: Poly, c: int) -> tuple[Poly, Poly]:
    """Split p = c*q + r with r's coefficients not divisible by c; the constant is split by floor."""
    q: Poly = {}
    r: Poly = {}
    for mono, coeff in p.items():
        if not mono:
            if coeff // c:
                q[()] = coeff // c
            if coeff % c:
                r[()] = coeff % c
        elif coeff % c == 0:
            q[mono] = coeff // c
        else:
            r[mono] = coeff
    return q, r


def _floordiv(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Lit):
        c = int(b.value)
        if c <= 0:
            return None
        q, r = _split(poly(a), c)
        if not r:
            return from_poly(q)
        lo, hi = _poly_bounds(r)
        if lo is not None and hi is not None and lo // c == hi // c:
            return from_poly(plus(q, {(): lo // c} if lo // c else {}, 1))
        narrowed = _narrowed(r, c)
        if narrowed is not None:
            r, c = narrowed
            b = i64(c)
        rest = from_poly(r)
        return from_poly(plus(q, {(apply("floordiv", rest, b),): 1}, 1)) if q else apply("floordiv", rest, b)
    return _divide_out(a, b)


def _narrowed(r: Poly, c: int) -> tuple[Poly, int] | None:
    """(g*a + s)//c = a//(c/g) when 0 <= s < g and g divides c: a smaller division."""
    terms = sorted(r.items(), key=lambda item: -abs(item[1]))
    for split in range(len(terms) - 1, 0, -1):
        g = math.gcd(c, *(k for _, k in terms[:split]))
        lo, hi = _poly_bounds(dict(terms[split:]))
        if g > 1 and lo is not None and hi is not None and lo >= 0 and hi < g:
            return {m: k // g for m, k in terms[:split]}, c // g
    return None


def _divide_out(a: Expr, b: Expr) -> Expr | None:
    """Divide by a monomial m: terms divisible by m leave the division; the rest must lie in [0, m)."""
    divisor = poly(b)
    if len(divisor) != 1:
        return i64(1) if a is b else None
    ((mono, coeff),) = divisor.items()
    q: Poly = {}
    r: Poly = {}
    for m, k in poly(a).items():
        rest = _without(m, mono)
        if rest is not None and k % coeff == 0:
            q[rest] = k // coeff
        else:
            r[m] = k
    if not r:
        return from_poly(q)
    if q and _inside(r, divisor):
        return from_poly(q)
    return i64(0) if _inside(r, divisor) else None


def _inside(r: Poly, divisor: Poly) -> bool:
    """Provably 0 <= r < divisor, also for extents known only as symbols: replace each Var by extent - 1."""
    lo, _ = _poly_bounds(r)
    if lo is None or lo < 0:
        return False
    top: Poly = {}
    for mono, coeff in r.items():
        if coeff < 0:
            return False
        term: Poly = {(): coeff}
        for atom in mono:
            upper = _upper(atom)
            if upper is None:
                return False
            term = times(term, upper)
        top = plus(top, term, 1)
    gap = plus(divisor, top, -1)  # must be > 0; a dimension of 0 leaves nothing to index
    const = gap.get((), 0)
    return const > 0 and all(c > 0 for c in gap.values())


def inside(r: Poly, extent: Poly) -> bool:
    """Provably 0 <= r < extent."""
    return _inside(r, extent)


def _upper(atom: Expr) -> Poly | None:
    if isinstance(atom, Var):
        ext = atom.axis.extent
        return plus(poly(dim_expr(ext)), {(): 1}, -1)
    if isinstance(atom, Sym):
        return {(atom,): 1}
    if isinstance(atom, Apply) and atom.prim.name == "mod":
        return plus(poly(atom.args[1]), {(): 1}, -1)
    hi = bounds(atom)[1]
    return None if hi is None else ({(): hi} if hi else {})


def _without(mono: Monomial, part: Monomial) -> Monomial | None:
    rest = list(mono)
    for atom in part:
        for i, x in enumerate(rest):
            if x is atom:
                del rest[i]
                break
        else:
            return None
    return tuple(rest)


def _mod(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Lit):
        c = int(b.value)
        if c <= 0:
            return None
        _, r = _split(poly(a), c)
        reduced = from_poly({m: (k % c if k > 0 and m else k) for m, k in r.items()})
        lo, hi = _poly_bounds(poly(reduced))
        if lo is not None and hi is not None and lo >= 0 and hi < c:
            return reduced
        if lo is not None and hi is not None and lo // c == hi // c:
            return from_poly(plus(poly(reduced), {(): c * (lo // c)}, -1))
        return apply("mod", reduced, b)
    divisor = poly(b)
    if len(divisor) != 1:
        return i64(0) if a is b else None
    ((mono, coeff),) = divisor.items()
    r = {m: k for m, k in poly(a).items() if _without(m, mono) is None or k % coeff}
    if not r:
        return i64(0)
    if _inside(r, divisor):
        return from_poly(r)
    return apply("mod", from_poly(r), b) if len(r) < len(poly(a)) else None


def substitute_dims(e: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Replace sub-expressions, then bring to normal form."""
    return rebuild((e,), lambda x: mapping[x] if x in mapping else _step(x))[0]
