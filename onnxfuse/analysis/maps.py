"""Index maps: how a load's index depends on the loop variables.  Facts only (FUSION.md 3.3).

    digit form    every dimension is  const + sum of scale * ((axis // low) mod extent)
    level         0 identity, 1 affine (permute, broadcast, slice, reverse), 2 atoms (a split of the loops makes it
                  affine), 3 div and mod remain, 4 depends on data
    sections      a reshape cut into independent parts; a part whose suffix products form a chain of divisors is a
                  list of atoms (a pure split and join of loops), any other part has to be flattened

Views are composed by substitution (`inline_loads`) and brought to normal form by ir/simplify.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onnxfuse.analysis.kinds import map_kind
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Sym, Var, i64, loads, rebuild, substitute, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.op import Kind
from onnxfuse.ir.simplify import as_dim, dim_expr, poly, simplify
from onnxfuse.ir.types import Dim

MOST_NODES = 6000  # distinct sub-expressions of one kernel; above that substitution has exploded
MOST_WRITTEN = 2000  # sub-expressions that may be substituted into one expression
IDENTITY, AFFINE, ATOMS, DIV_MOD, DATA = range(5)

Product = tuple[int, tuple[Expr, ...]]  # an integer times symbols, in a fixed order


@dataclass(frozen=True, slots=True)
class Digit:
    """scale * ((axis // low) mod extent); extent 0 = no mod."""

    axis: Axis
    scale: Dim
    low: int = 1
    extent: int = 0


@dataclass(frozen=True, slots=True)
class Section:
    """Dimensions `source` of one shape and `target` of the other with equal products; `atoms` outer to inner.

    atoms is None where the two cut the elements at places that do not nest ([4,9] -> [6,6]).
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    atoms: tuple[Dim, ...] | None


class WrittenOutError(OverflowError):
    """A value would be substituted too often."""

    def __init__(self, written: int, source: Value) -> None:
        self.what = f"{written} > {MOST_WRITTEN} sub-expressions are written out for "
        self.source = source
        super().__init__(self.what + source.name)


def inline_loads(root: Expr, bodies: Mapping[Value, tuple[tuple[Axis, ...], Expr]]) -> Expr:
    """`root` with loads of the given values replaced by their (already inlined) bodies, indices in normal form.

    Raises OverflowError when that writes out too much: a value joined to itself ten times is there a thousand times.
    """
    sizes: dict[Value, int] = {}
    written = 0

    def leaf(e: Expr) -> Expr | None:
        nonlocal written
        if not isinstance(e, Load) or e.source not in bodies:
            return None
        axes, body = bodies[e.source]
        if e.source not in sizes:
            sizes[e.source] = sum(1 for _ in walk(body))
        written += sizes[e.source]
        if written > MOST_WRITTEN:
            raise WrittenOutError(written, e.source)
        return substitute(body, {var(a): ix for a, ix in zip(axes, e.index, strict=True)})

    return simplify(rebuild((root,), leaf)[0])


def offset(index: Sequence[Expr], shape: Sequence[Dim]) -> Expr:
    """Which element of a contiguous value an index names."""
    total: Expr = i64(0)
    for i, d in zip(index, shape, strict=True):
        total = total * d + i
    return simplify(total)


def digits(index: Expr) -> tuple[Dim, tuple[Digit, ...]] | None:
    """Constant part (over symbols) and digits of one index; None if it is not a sum of digits."""
    constant: Expr = i64(0)
    found: list[Digit] = []
    for mono, coeff in poly(simplify(index)).items():
        moving = [atom for atom in mono if not isinstance(atom, Sym)]
        scale: Expr = i64(coeff)
        for atom in mono:
            if isinstance(atom, Sym):
                scale = scale * atom
        if not moving:
            constant = constant + scale
            continue
        one = _digit(moving[0], as_dim(scale)) if len(moving) == 1 else None
        if one is None:
            return None
        found.append(one)
    return as_dim(constant), tuple(found)


def level(ld: Load, axes: tuple[Axis, ...]) -> int:
    """Absorption level of a load in a loop nest over `axes`."""
    if loads(*ld.index):
        return DATA
    if map_kind(ld, axes) is Kind.ELEMWISE:
        return IDENTITY
    forms = [digits(_without_bcast(ix)) for ix in ld.index]
    cuts: dict[Axis, set[int]] = {}
    for form in forms:
        if form is None:
            return DIV_MOD
        for d in form[1]:
            if d.low != 1 or d.extent:
                cuts.setdefault(d.axis, set()).update({d.low, d.low * d.extent} - {0})
    if not cuts:
        return AFFINE
    return ATOMS if all(_nest(a, points) for a, points in cuts.items()) else DIV_MOD


def sections(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[Section, ...] | None:
    """Cut a reshape into its smallest independent parts, outer to inner; None if the sizes differ (provably not equal).

    Dimensions of 1 belong to no section. Symbols count as equal only when they are the same symbol.
    """
    inner_s, inner_t = _suffixes(source), _suffixes(target)
    if inner_s[0][1] != inner_t[0][1]:
        return None
    at_t = {p: d for d, p in inner_t}
    cut = [(ds, at_t[p]) for ds, p in inner_s if p in at_t]  # outer to inner, ends with the two ranks
    out: list[Section] = []
    for (s0, t0), (s1, t1) in pairwise(cut):
        ds = tuple(d for d in range(s0, s1) if source[d] != 1)
        dt = tuple(d for d in range(t0, t1) if target[d] != 1)
        out.append(Section(ds, dt, _atoms([source[d] for d in ds], [target[d] for d in dt])))
    return tuple(out)


def reshape_index(source: Sequence[Dim], target: Sequence[Dim], index: Sequence[Expr]) -> tuple[Expr, ...] | None:
    """Where in `source` the element at `index` of `target` stands: div and mod inside a section only."""
    parts = sections(source, target)
    if parts is None:
        return None
    out: list[Expr] = [i64(0)] * len(source)
    for part in parts:
        flat: Expr = i64(0)
        for d in part.target:
            flat = flat * dim_expr(target[d]) + index[d]
        for k, d in enumerate(reversed(part.source)):
            outermost = k == len(part.source) - 1
            out[d] = simplify(flat if outermost else flat % dim_expr(source[d]))
            flat = flat // dim_expr(source[d])
    return tuple(out)


def _digit(atom: Expr, scale: Dim) -> Digit | None:
    if isinstance(atom, Var):
        return Digit(atom.axis, scale)
    if not isinstance(atom, Apply) or not isinstance(atom.args[-1], Lit):
        return None
    by = int(atom.args[1].value) if len(atom.args) == 2 and isinstance(atom.args[1], Lit) else 0
    if by <= 0 or atom.prim.name not in ("floordiv", "mod"):
        return None
    inner = _digit(atom.args[0], 1)
    if inner is None:
        return None
    if atom.prim.name == "mod":
        extent = by if not inner.extent or inner.extent % by == 0 else 0
        return Digit(inner.axis, scale, inner.low, extent) if extent else None
    if not inner.extent:
        return Digit(inner.axis, scale, inner.low * by)
    return Digit(inner.axis, scale, inner.low * by, inner.extent // by) if inner.extent % by == 0 else None


def _without_bcast(ix: Expr) -> Expr:
    return ix.args[0] if isinstance(ix, Apply) and ix.prim.name == "bcast" else ix


def _nest(axis: Axis, points: set[int]) -> bool:
    """The cut points of an axis divide one another and its extent."""
    if not isinstance(axis.extent, int):
        chain = sorted(points)
    else:
        chain = [*sorted(p for p in points if p < axis.extent), axis.extent]
    return all(b % a == 0 for a, b in pairwise(chain))


def _product(d: Dim) -> Product:
    """A dimension as integer times symbols; a sum counts as one symbol."""
    if isinstance(d, int):
        return d, ()
    terms = poly(d)
    if len(terms) == 1:
        ((mono, coeff),) = terms.items()
        return coeff, _ordered(mono)
    return 1, (d,)


def _ordered(symbols: Sequence[Expr]) -> tuple[Expr, ...]:
    return tuple(sorted(symbols, key=lambda e: (str(e), id(e))))


def _times(a: Product, b: Product) -> Product:
    return a[0] * b[0], _ordered((*a[1], *b[1]))


def _over(a: Product, b: Product) -> Product | None:
    """A / b if b divides a."""
    rest = list(a[1])
    for s in b[1]:
        if s not in rest:
            return None
        rest.remove(s)
    return (a[0] // b[0], tuple(rest)) if b[0] and a[0] % b[0] == 0 else None


def _dim(p: Product) -> Dim:
    total: Expr = i64(p[0])
    for s in p[1]:
        total = total * s
    return as_dim(total)


def _suffixes(shape: Sequence[Dim]) -> list[tuple[int, Product]]:
    """(d, product of the dimensions from d on), outer to inner, the empty product last."""
    total: Product = (1, ())
    out = [(len(shape), total)]
    for d in range(len(shape) - 1, -1, -1):
        if shape[d] == 1:
            continue
        total = _times(total, _product(shape[d]))
        out.append((d, total))
    return out[::-1]


def _atoms(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Quotients of the merged suffix products, if they form a chain."""
    left = [p for _, p in _suffixes(source)][::-1]  # inner to outer, from the empty product
    right = [p for _, p in _suffixes(target)][::-1]
    chain: list[Product] = []
    while left or right:
        if not left or not right:
            chain.append((left or right).pop(0))
        elif left[0] == right[0]:
            chain.append(left.pop(0))
            right.pop(0)
        elif _over(right[0], left[0]) is not None:
            chain.append(left.pop(0))
        elif _over(left[0], right[0]) is not None:
            chain.append(right.pop(0))
        else:
            return None
    steps = [_over(b, a) for a, b in pairwise(chain)]
    if any(s is None for s in steps):
        return None
    return tuple(_dim(s) for s in reversed(steps) if s is not None)
