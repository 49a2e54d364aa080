"""Expressions to LLVM: one `Expr` becomes straight-line scalar or vector code.

A Load's flat offset is analysed symbolically in the variable of the vector axis: independent of it -> one scalar load;
stride 1 -> one vector load (masked when the env or a `where` guard asks); stride -1 and 2 -> vector loads and a
shuffle; any other constant stride -> one scalar load per lane; not affine -> gather. Loads on the side of a `where`
that is not taken never touch memory, unless their index is provably in range: then no guard is needed.

Every expression is emitted once per guard scope, so DAG-shaped bodies stay small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

from llvmlite import ir

from onnxfuse.codegen.build import (
    F64,
    I8,
    I64,
    NOWHERE,
    PTR,
    Builder,
    Index,
    is_vector,
    lanes_of,
    mem_type,
    reg_type,
    vec,
)
from onnxfuse.codegen.prims import lower
from onnxfuse.codegen.vecmath.table import MATH
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import (
    Acc,
    Apply,
    Expr,
    Lit,
    Load,
    Sym,
    Var,
    apply,
    children,
    i64,
    sym,
    syms_of,
    unknown,
    var,
    walk,
)
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import Poly, bounds, dim_expr, from_poly, inside, poly, simplify, times
from onnxfuse.ir.types import Dim

Stride: TypeAlias = int | Expr | ir.Value


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory of a value. Strides in elements: ints, expressions, or i64 values.

    `invariant`: nothing writes it while the kernel runs (inputs), so loads may be hoisted.
    """

    ptr: ir.Value
    dtype: DType
    strides: tuple[Stride, ...]
    invariant: bool = False


@dataclass(slots=True, eq=False)
class _Scope:
    """Values that may be used where `cond` holds (None: everywhere in the env)."""

    cond: ir.Value | None
    parent: _Scope | None
    values: dict[Expr, ir.Value] = field(default_factory=dict)
    inner: dict[tuple[Expr, bool], _Scope] = field(default_factory=dict)

    def find(self, e: Expr) -> ir.Value | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.values.get(e)
            if found is not None:
                return found
            scope = scope.parent
        return None


@dataclass(slots=True, eq=False)
class _Memo:
    root: _Scope = field(default_factory=lambda: _Scope(None, None))
    varying: dict[Expr, bool] = field(default_factory=dict)
    guarded: dict[Expr, bool] = field(default_factory=dict)
    paths: dict[Load, _Path] = field(default_factory=dict)
    opaque: dict[Sym, ir.Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Env:
    """Where code is emitted: what variables, dimensions, buffers and known expressions stand for.

    lanes, vector_axis  lane k works on iteration `axes[vector_axis] + k`; lanes 1 = scalar code
    axes                i64 value of each loop variable in scope (the vector axis: of lane 0)
    bound               values of expressions already computed: Acc, loads of rank-0 locals, hoisted parts
    mask                lanes that are on (tail), or None
    aligned             lane 0 works on a multiple of `lanes`

    An env remembers what it has emitted: use one env per straight-line region (`at` makes the next one).
    """

    lanes: int
    vector_axis: Axis | None
    axes: Mapping[Axis, ir.Value]
    syms: Mapping[Sym, ir.Value]
    buffers: Mapping[Value, Buffer]
    bound: Mapping[Expr, ir.Value] = field(default_factory=dict)
    mask: ir.Value | None = None
    aligned: bool = False
    memo: _Memo = field(default_factory=_Memo)

    def at(
        self,
        axes: Mapping[Axis, ir.Value] | None = None,
        bound: Mapping[Expr, ir.Value] | None = None,
        buffers: Mapping[Value, Buffer] | None = None,
    ) -> Env:
        """The env of an inner region: more loop variables, bound expressions or buffers."""
        return replace(
            self,
            axes={**self.axes, **(axes or {})},
            bound={**self.bound, **(bound or {})},
            buffers={**self.buffers, **(buffers or {})},
            memo=_Memo(),
        )

    def vector(self, axis: Axis | None, lanes: int, mask: ir.Value | None = None, aligned: bool = False) -> Env:
        """The same place, vectorised over `axis`."""
        along = axis if lanes > 1 else None
        return replace(self, vector_axis=along, lanes=lanes, mask=mask, aligned=aligned, memo=_Memo())


@dataclass(frozen=True, slots=True)
class _Path:
    """Offset of an access: `rest + step * (v // every)` with v the vector variable; step None: rest is all."""

    rest: Expr
    step: Expr | None
    every: int = 1


def emit_expr(build: Builder, env: Env, expr: Expr) -> ir.Value:
    """The value of `expr`: a vector when it varies over the lanes, else a scalar."""
    stack: list[tuple[Expr, _Scope]] = [(expr, env.memo.root)]
    while stack:
        e, scope = stack[-1]
        if scope.find(e) is not None:
            stack.pop()
            continue
        missing = _missing(build, env, e, scope)
        if missing:
            stack.extend(reversed(missing))
            continue
        stack.pop()
        value = _emit(build, env, e, scope)
        home = scope if _guarded(env, e) else env.memo.root
        home.values[e] = value
    found = env.memo.root.find(expr)
    assert found is not None
    return found


def emit_dim(build: Builder, env: Env, dim: Dim) -> Index:
    """A dimension: a Python int when constant, else an i64 value."""
    if isinstance(dim, int):
        return dim
    return dim.value if isinstance(dim, Lit) else emit_expr(build, env, dim)


def emit_store(build: Builder, env: Env, target: Value, index: tuple[Expr, ...], value: Expr | ir.Value) -> None:
    """target[index] = value, in the memory type of the target (bool is i8)."""
    buffer = env.buffers[target]
    reg = emit_expr(build, env, value) if isinstance(value, Expr) else value
    typ = mem_type(buffer.dtype)
    if buffer.dtype is DType.BOOL:
        reg = build.ir.zext(reg, vec(I8, lanes_of(reg)))
    path = _path(env, index, _strides(env, buffer))
    rest = emit_expr(build, env, path.rest)
    if path.step is None:
        _scatter(build, env, build.widen(reg, env.lanes), buffer.ptr, rest, typ)
        return
    step = _known_step(path.step)
    if step == 0:
        build.store(build.lane(reg, 0), build.offset(buffer.ptr, rest, typ))
        return
    if step != 1:
        index_v = _lane_offsets(build, env, rest, emit_expr(build, env, path.step))
        _scatter(build, env, build.widen(reg, env.lanes), buffer.ptr, index_v, typ)
        return
    at = build.offset(buffer.ptr, _lane0(build, env, rest, 1), typ)
    if env.mask is not None:
        build.masked_store(build.widen(reg, env.lanes), at, env.mask)
        return
    build.store(build.widen(reg, env.lanes), at)


def open_kernel(build: Builder, kernel: Kernel, env_ptr: ir.Value, bufs_ptr: ir.Value | None) -> Env:
    """Read dimensions and pointers as laid down in ir/plan.py; every buffer is contiguous.

    Without `bufs_ptr` (K.tasks, K.scratch) the env has dimensions only.
    """
    syms: dict[Sym, ir.Value] = {}
    for k, d in enumerate(kernel.dims):
        syms[d.sym] = build.load(build.offset(env_ptr, k, I64), I64, invariant=True)
    buffers: dict[Value, Buffer] = {}
    at = len(kernel.dims)
    for k, v in enumerate((*kernel.inputs, *kernel.outputs)):
        if v.type is None:
            continue
        shape = v.type.shape
        if bufs_ptr is not None and v.type.dtype.computable and v not in buffers:
            ptr = build.load(build.offset(bufs_ptr, k, PTR), PTR, invariant=True)
            strides = contiguous(build, [_actual(build, d, syms, env_ptr, at + j) for j, d in enumerate(shape)])
            buffers[v] = Buffer(ptr, v.type.dtype, strides, invariant=k < len(kernel.inputs))
        at += len(shape)
    return Env(1, None, {}, syms, buffers)


def contiguous(build: Builder, shape: list[Stride]) -> tuple[Stride, ...]:
    """Row-major strides of a shape."""
    out: list[Stride] = []
    step: Stride = 1
    for d in reversed(shape):
        out.append(step)
        if isinstance(d, ir.Value) or isinstance(step, ir.Value):
            # mixed: an expression cannot name a plain value, so give up the symbolic form from here on
            step = _opaque_product(build, step, d)
        elif isinstance(d, int) and isinstance(step, int):
            step = step * d
        else:
            step = simplify(dim_expr(step) * dim_expr(d))
    return tuple(reversed(out))


def _opaque_product(build: Builder, a: Stride, b: Stride) -> Stride:
    if isinstance(a, Expr) or isinstance(b, Expr):
        raise TypeError("a shape mixes symbolic and opaque dimensions")
    return build.mul(a, b)


def _actual(build: Builder, dim: Dim, syms: Mapping[Sym, ir.Value], env_ptr: ir.Value, slot: int) -> Stride:
    """A dimension symbolically if the kernel's symbols give it, else a symbol for the run-time extent."""
    if isinstance(dim, int) or syms_of(dim) <= set(syms):
        return dim
    name = sym(f"env.{slot}")
    if name not in syms:
        assert isinstance(syms, dict)
        syms[name] = build.load(build.offset(env_ptr, slot, I64), I64, invariant=True)
    return name


# ---- analysis ----


def _varying(env: Env, e: Expr) -> bool:
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


def _guarded(env: Env, e: Expr) -> bool:
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


def _strides(env: Env, buffer: Buffer) -> tuple[Expr, ...]:
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


def _path(env: Env, index: tuple[Expr, ...], strides: tuple[Expr, ...]) -> _Path:
    flat = flat_index(index, strides)
    if env.vector_axis is None or not _varying(env, flat):
        return _Path(flat, i64(0))
    split = affine(flat, var(env.vector_axis))
    if split is None or _varying(env, split[0]) or _varying(env, split[1]):
        return _Path(flat, None)
    return _Path(*split)


def _load_path(env: Env, e: Load) -> _Path:
    found = env.memo.paths.get(e)
    if found is None:
        found = _path(env, e.index, _strides(env, env.buffers[e.source]))
        if found.step is None and env.aligned:
            found = _repeating(env, found.rest) or found
        env.memo.paths[e] = found
    return found


def _repeating(env: Env, flat: Expr) -> _Path | None:
    """The path of an access whose neighbouring lanes share an element: flat = rest + v // k, k a divisor of lanes."""
    assert env.vector_axis is not None
    v, every = var(env.vector_axis), 1
    rest: Poly = {}
    for mono, coeff in poly(flat).items():
        if not any(_varying(env, a) for a in mono):
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
    return _Path(from_poly(rest), i64(1), every) if every > 1 else None


def _known_step(step: Expr) -> int | None:
    return int(step.value) if isinstance(step, Lit) else None


# ---- emission ----


def _missing(build: Builder, env: Env, e: Expr, scope: _Scope) -> list[tuple[Expr, _Scope]]:
    """What must be emitted before `e`, and under which guard."""
    if e in env.bound:
        return []
    if isinstance(e, Load):
        path = _load_path(env, e)
        wanted = [path.rest] if path.step is None else [path.rest, path.step]
        return [(x, scope) for x in wanted if scope.find(x) is None]
    if not isinstance(e, Apply):
        return []
    inner = sigmoid_of(e)
    if inner is not None:
        return [(inner, scope)] if scope.find(inner) is None else []
    if e.prim.name != "where":
        return [(a, scope) for a in e.args if scope.find(a) is None]
    test, yes, no = e.args
    cond = scope.find(test)
    if cond is None:
        return [(test, scope)]
    sides = ((yes, _enter(build, env, scope, test, cond, True)), (no, _enter(build, env, scope, test, cond, False)))
    return [(x, s) for x, s in sides if s.find(x) is None]


def _enter(build: Builder, env: Env, scope: _Scope, test: Expr, cond: ir.Value, taken: bool) -> _Scope:
    """The scope of one side of a `where`."""
    key = (test, taken)
    found = scope.inner.get(key)
    if found is None:
        held = cond if taken else build.ir.not_(cond)
        found = _Scope(_both(build, scope.cond, held), scope)
        scope.inner[key] = found
    return found


def _both(build: Builder, a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    """Conjunction of two guards, widened when only one of them varies."""
    if a is None or b is None:
        return b if a is None else a
    n = max(lanes_of(a), lanes_of(b))
    return build.ir.and_(build.widen(a, n), build.widen(b, n)) if n > 1 else build.ir.and_(a, b)


def _emit(build: Builder, env: Env, e: Expr, scope: _Scope) -> ir.Value:
    bound = env.bound.get(e)
    if bound is not None:
        return bound
    if isinstance(e, Lit):
        return literal(build, e)
    if isinstance(e, Sym):
        return env.memo.opaque[e] if e in env.memo.opaque else env.syms[e]
    if isinstance(e, Var):
        return _variable(build, env, e)
    if isinstance(e, Load):
        return _load(build, env, e, scope)
    if isinstance(e, Acc):
        raise KeyError("Acc is not bound in this env")
    assert isinstance(e, Apply)
    return _apply(build, env, e, scope)


def literal(build: Builder, e: Lit) -> ir.Value:
    """A literal as a scalar register (f16 and bf16 as bit patterns)."""
    if e.dtype.is_half:
        import numpy as np

        bits = int(np.asarray(e.value).astype(e.dtype.numpy).view(np.uint16))
        return build.const(reg_type(e.dtype), bits)
    return build.const(reg_type(e.dtype), int(e.value) if not e.dtype.is_float else float(e.value))


def _variable(build: Builder, env: Env, e: Var) -> ir.Value:
    base = env.axes[e.axis]
    if e.axis is not env.vector_axis:
        return base
    return build.ir.add(build.splat(base, env.lanes), build.iota(env.lanes))


@lru_cache(maxsize=4096)
def sigmoid_of(e: Apply) -> Expr | None:
    """The x of an `e` that is 1/(1 + exp(-x)), which vecmath has in one piece; else None."""
    if e.prim.name != "div" or e.dtype not in (DType.F32, DType.F64) or not _is_one(e.args[0]):
        return None
    total = e.args[1]
    if not isinstance(total, Apply) or total.prim.name != "add" or not any(map(_is_one, total.args)):
        return None
    power = total.args[1] if _is_one(total.args[0]) else total.args[0]
    if not isinstance(power, Apply) or power.prim.name != "exp":
        return None
    minus = power.args[0]
    return minus.args[0] if isinstance(minus, Apply) and minus.prim.name == "neg" else None


def _is_one(e: Expr) -> bool:
    return isinstance(e, Lit) and e.value == 1


def _apply(build: Builder, env: Env, e: Apply, scope: _Scope) -> ir.Value:
    inner = sigmoid_of(e)
    if inner is not None:
        x = scope.find(inner)
        assert x is not None
        return MATH["sigmoid"](build, x)
    if e.prim.name == "where":
        test, yes, no = e.args
        cond = scope.find(test)
        assert cond is not None
        a = scope.inner[(test, True)].find(yes)
        b = scope.inner[(test, False)].find(no)
        assert a is not None
        assert b is not None
        return build.select(cond, a, b)
    args = [scope.find(a) for a in e.args]
    values = [a for a in args if a is not None]
    n = max(lanes_of(a) for a in values)
    if n > 1:
        values = [build.widen(a, n) for a in values]
    src = e.args[0].dtype
    if src is DType.I64 and e.prim.name in ("floordiv", "idiv", "mod", "fmod") and _non_negative(*e.args):
        src = DType.U64  # same result, cheaper
    return lower(build, e.prim.name, values, src, e.dtype)


def _non_negative(*args: Expr) -> bool:
    lows = [bounds(a)[0] for a in args]
    return all(lo is not None and lo >= 0 for lo in lows)


def _load(build: Builder, env: Env, e: Load, scope: _Scope) -> ir.Value:
    raw = _load_memory(build, env, e, scope)
    if e.dtype is not DType.BOOL:
        return raw
    return build.ir.icmp_unsigned("!=", raw, build.like(raw, 0))


def _load_memory(build: Builder, env: Env, e: Load, scope: _Scope) -> ir.Value:
    buffer = env.buffers[e.source]
    typ = mem_type(buffer.dtype)
    path = _load_path(env, e)
    guard = None if scope.cond is None or in_range(e) else scope.cond
    rest = scope.find(path.rest)
    assert rest is not None
    if path.step is None:
        return _gather(build, env, buffer, rest, typ, guard)
    if path.every > 1:
        return _load_repeated(build, env, buffer, rest, typ, guard, path.every)
    step = _known_step(path.step)
    if step == 0:
        return _load_uniform(build, env, buffer, rest, typ, guard)
    if step is not None and abs(step) == 1:
        return _load_run(build, env, buffer, rest, typ, guard, step)
    mask = _both(build, guard, env.mask)
    stride = scope.find(path.step)
    assert stride is not None
    if mask is not None:
        return _gather(build, env, buffer, _lane_offsets(build, env, rest, stride), typ, guard)
    if step == 2 and env.lanes % 2 == 0:
        return _load_even(build, env, buffer, rest, typ)
    base = _lane0(build, env, rest, stride if step is None else step)
    known = stride if step is None else step
    at = [build.add(base, build.mul(known, k)) for k in range(env.lanes)]
    loads = [build.load(build.offset(buffer.ptr, x, typ), typ, invariant=buffer.invariant) for x in at]
    return build.gather_lanes(loads)


def _load_uniform(
    build: Builder, env: Env, buffer: Buffer, offset: ir.Value, typ: ir.Type, guard: ir.Value | None
) -> ir.Value:
    at = build.offset(buffer.ptr, offset, typ)
    if guard is None:
        return build.load(at, typ, invariant=buffer.invariant)
    if is_vector(guard):
        on = _both(build, guard, env.mask)
        assert on is not None
        guard = build.any_lane(on)
    return build.load(build.ir.select(guard, at, build.nowhere()), typ)


def _load_run(
    build: Builder, env: Env, buffer: Buffer, rest: ir.Value, typ: ir.Type, guard: ir.Value | None, step: int
) -> ir.Value:
    """Consecutive elements, forwards or backwards."""
    first = _lane0(build, env, rest, step)
    at = build.offset(buffer.ptr, first if step == 1 else build.sub(first, env.lanes - 1), typ)
    if guard is not None and not is_vector(guard) and env.mask is None and env.lanes * _width(typ) <= NOWHERE:
        # All lanes or none: cheaper than a mask.
        out = build.load(build.ir.select(guard, at, build.nowhere()), typ, env.lanes)
        return out if step == 1 else build.reverse(out)
    mask = _both(build, guard, env.mask)
    if mask is None:
        out = build.load(at, typ, env.lanes, invariant=buffer.invariant)
        return out if step == 1 else build.reverse(out)
    mask = build.widen(mask, env.lanes)
    if step == 1:
        return build.masked_load(at, typ, mask)
    return build.reverse(build.masked_load(at, typ, build.reverse(mask)))


def _load_repeated(
    build: Builder, env: Env, buffer: Buffer, rest: ir.Value, typ: ir.Type, guard: ir.Value | None, every: int
) -> ir.Value:
    """Each of a few consecutive elements in `every` lanes."""
    assert env.vector_axis is not None
    few = env.lanes // every
    first = build.add(rest, build.udiv(env.axes[env.vector_axis], every))
    at = build.offset(buffer.ptr, first, typ)
    mask = _both(build, guard, env.mask)
    if mask is None:
        out = build.load(at, typ, few, invariant=buffer.invariant)
    else:
        mask = build.widen(mask, env.lanes)
        wanted = [build.shuffle(mask, mask, range(k, env.lanes, every)) for k in range(every)]
        on = wanted[0]
        for other in wanted[1:]:
            on = build.ir.or_(on, other)
        out = build.masked_load(at, typ, on)
    return build.shuffle(out, out, [k // every for k in range(env.lanes)])


def _width(typ: ir.Type) -> int:
    """Bytes of an element."""
    return int(typ.width) // 8 if isinstance(typ, ir.IntType) else 8 if typ == F64 else 4


def _load_even(build: Builder, env: Env, buffer: Buffer, rest: ir.Value, typ: ir.Type) -> ir.Value:
    """Every second element, from two vectors that overlap by one so that nothing past the last is read."""
    n = env.lanes
    base = _lane0(build, env, rest, 2)
    low = build.load(build.offset(buffer.ptr, base, typ), typ, n, invariant=buffer.invariant)
    high = build.load(build.offset(buffer.ptr, build.add(base, n - 1), typ), typ, n, invariant=buffer.invariant)
    return build.shuffle(low, high, [2 * k if 2 * k < n else n + 2 * k - (n - 1) for k in range(n)])


def _gather(
    build: Builder, env: Env, buffer: Buffer, offsets: ir.Value, typ: ir.Type, guard: ir.Value | None
) -> ir.Value:
    mask = _both(build, guard, env.mask)
    if mask is not None:
        return build.gather(buffer.ptr, build.widen(offsets, env.lanes), typ, build.widen(mask, env.lanes))
    at = [build.lane(offsets, k) for k in range(env.lanes)]
    loads = [build.load(build.offset(buffer.ptr, x, typ), typ, invariant=buffer.invariant) for x in at]
    return build.gather_lanes(loads)


def _scatter(build: Builder, env: Env, value: ir.Value, ptr: ir.Value, offsets: ir.Value, typ: ir.Type) -> None:
    """Store lane by lane; lanes that are off are skipped."""
    if env.mask is not None:
        build.scatter(value, ptr, build.widen(offsets, env.lanes), typ, env.mask)
        return
    for k in range(env.lanes):
        build.store(build.lane(value, k), build.offset(ptr, build.lane(offsets, k), typ))


def _lane0(build: Builder, env: Env, rest: ir.Value, step: Index) -> ir.Value:
    """Offset of lane 0."""
    assert env.vector_axis is not None
    return build.i64(build.add(rest, build.mul(env.axes[env.vector_axis], step)))


def _lane_offsets(build: Builder, env: Env, rest: ir.Value, step: ir.Value) -> ir.Value:
    """Offsets of all lanes of an affine access."""
    base = _lane0(build, env, rest, step)
    n = env.lanes
    lanes = build.ir.mul(build.iota(n), build.splat(step, n))
    return build.ir.add(build.splat(base, n), lanes)


__all__ = [
    "Buffer", "Env", "affine", "contiguous", "emit_dim", "emit_expr", "emit_store", "flat_index", "in_range",
    "literal", "open_kernel", "sigmoid_of",
]  # fmt: skip
