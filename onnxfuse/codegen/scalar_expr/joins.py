"""Joins: every lane reads the same one of several values, each at consecutive places. One load, from a chosen address.

A Concat is a chain of `where` over loads; along any other axis than the joined one all lanes take the same side.
"""

from __future__ import annotations

from llvmlite import ir

from onnxfuse.codegen.build import Builder, mem_type
from onnxfuse.codegen.scalar_expr.access import lane0, load_lanes
from onnxfuse.codegen.scalar_expr.env import Env, Path, Scope
from onnxfuse.codegen.scalar_expr.offsets import constant_step, path_of_load, varying
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load


def join_parts(e: Expr) -> list[tuple[Expr | None, Expr]]:
    """A chain of `where` as (test, what is chosen where it is the first to hold); the last one is what is left."""
    out: list[tuple[Expr | None, Expr]] = []
    while isinstance(e, Apply) and e.prim.name == "where":
        test, yes, e = e.args
        inner = join_parts(yes)
        if not all(t is None or _implies(t, test) for t, _ in inner):
            inner = [(None, yes)]  # a choice of its own
        out += [(test if t is None else t, part) for t, part in inner]
    return [*out, (None, e)]


def is_join(env: Env, e: Expr) -> bool:
    """`e` is a join of several loads for the lanes of this env."""
    if env.lanes == 1 or e in env.bound:
        return False
    found = env.memo.joins.get(e)
    if found is None:
        found = env.memo.joins[e] = e.dtype is not DType.BOOL and _joins(env, e)
    return found


def join_operands(env: Env, e: Expr) -> list[Expr]:
    """What the address of a join, or of a load, is made of."""
    parts = join_parts(e)
    rests = [path_of_load(env, part).rest for _, part in parts if isinstance(part, Load)]
    return [test for test, _ in parts if test is not None] + rests


def load_joined(build: Builder, env: Env, e: Apply, scope: Scope) -> ir.Value:
    """Consecutive elements of the part that is chosen."""
    at = joined_address(build, env, e, scope)
    return load_lanes(build, env, at, mem_type(e.dtype), scope.cond, 1, invariant=False)


def joined_address(build: Builder, env: Env, e: Expr, scope: Scope) -> ir.Value:
    """Of lane 0. From the last part to the first: each takes over where its test holds."""
    typ = mem_type(e.dtype)
    at: ir.Value | None = None
    for test, part in reversed(join_parts(e)):
        assert isinstance(part, Load)
        rest = scope.find(path_of_load(env, part).rest)
        assert rest is not None
        here = build.offset(env.buffers[part.source].ptr, lane0(build, env, rest, 1), typ)
        at = here if at is None or test is None else build.ir.select(scope.find(test), here, at)
    assert at is not None
    return at


def runs(env: Env, e: Expr) -> list[Expr]:
    """The parts of `e` that read consecutive elements: loads, and joins of loads."""
    out: list[Expr] = []
    stack = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Load):
            if _is_run(path_of_load(env, x)):
                out.append(x)
        elif is_join(env, x):
            out.append(x)
        elif isinstance(x, Apply):
            stack.extend(x.args)
    return out


def _joins(env: Env, e: Expr) -> bool:
    for test, part in join_parts(e):
        if not isinstance(part, Load) or part in env.bound or (test is not None and varying(env, test)):
            return False
        if not _is_run(path_of_load(env, part)):
            return False
    return True


def _is_run(path: Path) -> bool:
    """Neighbouring lanes read neighbouring elements."""
    return path.every == 1 and path.step is not None and constant_step(path.step) == 1


def _implies(a: Expr, b: Expr) -> bool:
    """Both are bounds `x < n` of the same x, and that of `a` is the lower one."""
    if not all(isinstance(t, Apply) and t.prim.name == "lt" and isinstance(t.args[1], Lit) for t in (a, b)):
        return False
    assert isinstance(a, Apply)
    assert isinstance(b, Apply)
    low, high = a.args[1], b.args[1]
    return a.args[0] is b.args[0] and isinstance(low, Lit) and isinstance(high, Lit) and low.value <= high.value
