"""The values of expressions: every one once per guard scope, without recursion."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from onnxfuse.codegen.build import Builder, Index, lanes_of, reg_type
from onnxfuse.codegen.prims import lower
from onnxfuse.codegen.scalar_expr.access import both, load_at, store_at
from onnxfuse.codegen.scalar_expr.env import Env, Scope
from onnxfuse.codegen.scalar_expr.functions import whole_function
from onnxfuse.codegen.scalar_expr.joins import is_join, join_operands, joined_address, load_joined
from onnxfuse.codegen.scalar_expr.offsets import constant_step, guarded, path_of, path_of_load, strides_of
from onnxfuse.codegen.vecmath.table import MATH
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Acc, Apply, Expr, Lit, Load, Sym, Var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.simplify import bounds
from onnxfuse.ir.types import Dim


def emit_expr(build: Builder, env: Env, expr: Expr) -> ir.Value:
    """The value of `expr`: a vector when it varies over the lanes, else a scalar."""
    stack: list[tuple[Expr, Scope]] = [(expr, env.memo.root)]
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
        home = scope if guarded(env, e) else env.memo.root
        home.values[e] = value
    found = env.memo.root.find(expr)
    assert found is not None
    return found


def address(build: Builder, env: Env, run: Expr) -> ir.Value:
    """Where one of `runs` begins."""
    for x in join_operands(env, run):
        emit_expr(build, env, x)
    return joined_address(build, env, run, env.memo.root)


def emit_dim(build: Builder, env: Env, dim: Dim) -> Index:
    """A dimension: a Python int when constant, else an i64 value."""
    if isinstance(dim, int):
        return dim
    return dim.value if isinstance(dim, Lit) else emit_expr(build, env, dim)


def emit_store(build: Builder, env: Env, target: Value, index: tuple[Expr, ...], value: Expr | ir.Value) -> None:
    """target[index] = value, in the memory type of the target (bool is i8)."""
    buffer = env.buffers[target]
    reg = emit_expr(build, env, value) if isinstance(value, Expr) else value
    path = path_of(env, index, strides_of(env, buffer))
    rest = emit_expr(build, env, path.rest)
    stride = None if path.step is None or constant_step(path.step) in (0, 1) else emit_expr(build, env, path.step)
    store_at(build, env, buffer, path, rest, stride, reg)


def _missing(build: Builder, env: Env, e: Expr, scope: Scope) -> list[tuple[Expr, Scope]]:
    """What must be emitted before `e`, and under which guard."""
    if e in env.bound:
        return []
    if isinstance(e, Load):
        path = path_of_load(env, e)
        wanted = [path.rest] if path.step is None else [path.rest, path.step]
        return [(x, scope) for x in wanted if scope.find(x) is None]
    if not isinstance(e, Apply):
        return []
    whole = whole_function(e)
    if whole is not None:
        return [(whole[1], scope)] if scope.find(whole[1]) is None else []
    if e.prim.name != "where":
        return [(a, scope) for a in e.args if scope.find(a) is None]
    if is_join(env, e):
        return [(x, scope) for x in join_operands(env, e) if scope.find(x) is None]
    test, yes, no = e.args
    cond = scope.find(test)
    if cond is None:
        return [(test, scope)]
    sides = ((yes, _enter(build, env, scope, test, cond, True)), (no, _enter(build, env, scope, test, cond, False)))
    return [(x, s) for x, s in sides if s.find(x) is None]


def _enter(build: Builder, env: Env, scope: Scope, test: Expr, cond: ir.Value, taken: bool) -> Scope:
    """The scope of one side of a `where`."""
    key = (test, taken)
    found = scope.inner.get(key)
    if found is None:
        held = cond if taken else build.ir.not_(cond)
        found = Scope(both(build, scope.cond, held), scope)
        scope.inner[key] = found
    return found


def _emit(build: Builder, env: Env, e: Expr, scope: Scope) -> ir.Value:
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
        return load_at(build, env, e, scope)
    if isinstance(e, Acc):
        raise KeyError("Acc is not bound in this env")
    assert isinstance(e, Apply)
    return _apply(build, env, e, scope)


def literal(build: Builder, e: Lit) -> ir.Value:
    """A literal as a scalar register (f16 and bf16 as bit patterns)."""
    if e.dtype.is_half:
        bits = int(np.asarray(e.value).astype(e.dtype.numpy).view(np.uint16))
        return build.const(reg_type(e.dtype), bits)
    return build.const(reg_type(e.dtype), int(e.value) if not e.dtype.is_float else float(e.value))


def _variable(build: Builder, env: Env, e: Var) -> ir.Value:
    base = env.axes[e.axis]
    if e.axis is not env.vector_axis:
        return base
    return build.ir.add(build.splat(base, env.lanes), build.iota(env.lanes))


def _apply(build: Builder, env: Env, e: Apply, scope: Scope) -> ir.Value:
    whole = whole_function(e)
    if whole is not None:
        x = scope.find(whole[1])
        assert x is not None
        return MATH[whole[0]](build, x)
    if e.prim.name == "where":
        if is_join(env, e):
            return load_joined(build, env, e, scope)
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
