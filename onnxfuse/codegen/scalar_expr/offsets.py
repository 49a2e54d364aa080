"""Where an access goes, symbolically: the flat offset of an index, and what of it varies over the lanes."""

from __future__ import annotations

from functools import lru_cache

from onnxfuse.codegen.build import is_vector
from onnxfuse.codegen.scalar_expr.env import Buffer, Env, Path, Stride
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Var, apply, children, i64, sym, unknown, var, walk
from onnxfuse.ir.simplify import Poly, bounds, dim_expr, from_poly, inside, poly, simplify, times
from onnxfuse.ir.types import Dim


def varying(env: Env, e: Expr) -> bool:
    """The value of `e` differs between lanes."""
    if env.lanes == 1:
        return False
    memo = env.memo.varying
    found = memo.get(e)
    if found is not None:
        return found
    for x in unknown(e, memo):
        value = env.bound.get(x)
        if value is not None:
            memo[x] = is_vector(value)
        elif isinstance(x, Var):
            memo[x] = x.axis is env.vector_axis
        else:
            memo[x] = any(memo[c] for c in children(x))
    return memo[e]


def guarded(env: Env, e: Expr) -> bool:
    """`e` reads memory at an index that is not provably in range: its value belongs to the guard it stands under."""
    memo = env.memo.guarded
    found = memo.get(e)
    if found is not None:
        return found
    for x in unknown(e, memo):
        if x in env.bound:
            memo[x] = False
            continue
        memo[x] = any(memo[c] for c in children(x)) or (isinstance(x, Load) and not in_range(x))
    return memo[e]


@lru_cache(maxsize=4096)
def in_range(e: Load) -> bool:
    """Every index of the load is provably within the shape of its source."""
    shape = e.source.tensor.shape
    return all(_within(i, d) for i, d in zip(e.index, shape, strict=True))


def _within(index: Expr, dim: Dim) -> bool:
    if isinstance(index, Var) and (index.axis.extent is dim or index.axis.extent == dim):
        return True
    s = simplify(index)
    lo, hi = bounds(s)
    if lo is not None and lo >= 0 and hi is not None and isinstance(dim, int):
        return hi < dim
    return inside(poly(s), poly(dim_expr(dim)))


def strides_of(env: Env, buffer: Buffer) -> tuple[Expr, ...]:
    """Strides of a buffer as expressions; plain values get a name in the memo."""
    return tuple(_stride_expr(env, s) for s in buffer.strides)


def _stride_expr(env: Env, s: Stride) -> Expr:
    if isinstance(s, Expr):
        return s
    if isinstance(s, int):
        return i64(s)
    for name, value in env.memo.opaque.items():
        if value is s:
            return name
    name = sym(f"stride.{len(env.memo.opaque)}")
    env.memo.opaque[name] = s
    return name


@lru_cache(maxsize=4096)
def flat_index(index: tuple[Expr, ...], strides: tuple[Expr, ...]) -> Expr:
    """Offset in elements, in normal form, with (x//c)*c + x%c put together again."""
    total: Expr = i64(0)
    for i, s in zip(index, strides, strict=True):
        total = total + i * s
    return from_poly(_recombine(poly(simplify(total))))


def _recombine(p: Poly) -> Poly:
    changed = True
    while changed:
        changed = False
        for mono, coeff in list(p.items()):
            better = _join(p, mono, coeff)
            if better is not None:
                p, changed = poly(simplify(from_poly(better))), True
                break
    return p


def _join(p: Poly, mono: tuple[Expr, ...], coeff: int) -> Poly | None:
    """If `mono` holds x % c and p also has the matching (x//c)*c, p with both replaced by x."""
    for k, atom in enumerate(mono):
        if not (isinstance(atom, Apply) and atom.prim.name == "mod"):
            continue
        x, c = atom.args
        rest: Poly = {(*mono[:k], *mono[k + 1 :]): coeff}
        partner = times(times(rest, {(apply("floordiv", x, c),): 1}), poly(c))
        if len(partner) != 1:
            continue
        ((other, want),) = partner.items()
        if p.get(other) != want:
            continue
        out = {m: v for m, v in p.items() if m is not mono and m != mono and m != other}
        for m, v in times(rest, poly(x)).items():
            out[m] = out.get(m, 0) + v
        return {m: v for m, v in out.items() if v}
    return None


@lru_cache(maxsize=4096)
def affine(flat: Expr, v: Var) -> tuple[Expr, Expr] | None:
    """`flat` as (rest, step) with flat = rest + step * v and neither depending on v; None if it is not affine."""
    rest: Poly = {}
    step: Poly = {}
    for mono, coeff in poly(flat).items():
        count = sum(a is v for a in mono)
        others = tuple(a for a in mono if a is not v)
        if count > 1 or any(x is v for a in others for x in walk(a)):
            return None
        (step if count else rest)[others] = coeff
    return from_poly(rest), from_poly(step)


def path_of(env: Env, index: tuple[Expr, ...], strides: tuple[Expr, ...]) -> Path:
    """How the offset of an index moves along the vector axis."""
    flat = flat_index(index, strides)
    if env.vector_axis is None or not varying(env, flat):
        return Path(flat, i64(0))
    split = affine(flat, var(env.vector_axis))
    if split is None or varying(env, split[0]) or varying(env, split[1]):
        return Path(flat, None)
    return Path(*split)


def path_of_load(env: Env, e: Load) -> Path:
    """The path of a Load, worked out once per env."""
    found = env.memo.paths.get(e)
    if found is None:
        found = path_of(env, e.index, strides_of(env, env.buffers[e.source]))
        if found.step is None and env.aligned:
            found = _repeating(env, found.rest) or found
        env.memo.paths[e] = found
    return found


def _repeating(env: Env, flat: Expr) -> Path | None:
    """The path of an access whose neighbouring lanes share an element: flat = rest + v // k, k a divisor of lanes."""
    assert env.vector_axis is not None
    v, every = var(env.vector_axis), 1
    rest: Poly = {}
    for mono, coeff in poly(flat).items():
        if not any(varying(env, a) for a in mono):
            rest[mono] = coeff
            continue
        quotient = mono[0]
        if len(mono) != 1 or coeff != 1 or every != 1 or not isinstance(quotient, Apply):
            return None
        if quotient.prim.name != "floordiv" or quotient.args[0] is not v or not isinstance(quotient.args[1], Lit):
            return None
        every = int(quotient.args[1].value)
        if not 1 < every < env.lanes or env.lanes % every:
            return None
    return Path(from_poly(rest), i64(1), every) if every > 1 else None


def constant_step(step: Expr) -> int | None:
    """The step as a number, if it is one."""
    return int(step.value) if isinstance(step, Lit) else None
