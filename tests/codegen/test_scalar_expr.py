"""Accesses are classified by stride, guards hold, and shared expressions are emitted once."""

from __future__ import annotations

import pytest

from onnxfuse.codegen.build import F32, PTR, VOID, Builder
from onnxfuse.codegen.scalar_expr import (
    Buffer,
    Env,
    affine,
    emit_expr,
    emit_store,
    flat_index,
    gelu_of,
    in_range,
    sigmoid_of,
)
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, cast, i64, lit, load, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import Dim, tensor
from tests.codegen.machines import V2, V3

N, M = sym("N"), sym("M")
ROW, COL = Axis("i", N), Axis("j", M)
i, j = var(ROW), var(COL)
LANES = 8


def t(*shape: Dim) -> Value:
    return Value("x", tensor(DType.F32, shape))


def at(v: Value, *index: Expr | int) -> Expr:
    return load(v, tuple(i64(k) if isinstance(k, int) else k for k in index), DType.F32)


def text(expr: Expr, v: Value, strides, lanes: int = LANES, masked: bool = False, target=V3) -> str:
    """LLVM text of `out[j] = expr`, vectorised over j."""
    build = Builder(target, "k")
    out = t(M)
    with build.function("f", VOID, [PTR, PTR, *(build.i64(0).type for _ in range(4))]) as fn:
        px, py, vi, vj, n, m = fn.args
        buffers = {v: Buffer(px, DType.F32, strides, True), out: Buffer(py, DType.F32, (1,))}
        mask = build.tail_mask(n, lanes) if masked else None
        env = Env(1, None, {ROW: vi, COL: vj}, {N: n, M: m}, buffers).vector(COL, lanes, mask)
        emit_store(build, env, out, (j,), expr)
    return str(build.module)


@pytest.mark.parametrize(
    ("index", "has", "lacks"),
    [
        ((i, i64(3)), ["load float"], ["load <8", "gather"]),
        ((i, j), ["load <8 x float>"], ["load float", "gather"]),
        ((i, j + 1), ["load <8 x float>"], ["load float"]),
        ((i, M - 1 - j), ["load <8 x float>", "i32 7, i32 6"], ["load float"]),
        ((i, j * 2), ["load <8 x float>", "i32 0, i32 2"], ["load float"]),
        ((i, j * 3), ["load float"], ["gather"]),
        ((j, i), ["load float"], ["load <8 x float>"]),
        ((i, j // 3), ["load float"], ["load <8 x float>"]),
    ],
)
def test_access_by_stride(index, has, lacks):
    x = t(N, M)
    out = text(at(x, *index), x, (M, 1))
    assert all(h in out for h in has), out
    assert not any(k in out for k in lacks), out


def test_masked_tails_use_masked_loads_and_stores():
    x = t(N, M)
    out = text(at(x, i, j), x, (M, 1), masked=True)
    assert '@"llvm.masked.load.v8f32.p0"(ptr' in out
    assert '@"llvm.masked.store.v8f32.p0"(<8' in out
    assert "llvm.masked.gather" in text(at(x, j, i), x, (M, 1), masked=True)


def test_a_guard_masks_only_what_could_be_out_of_range():
    x = t(N, M)
    sure = where(apply("lt", at(x, i, 0), 0.0), at(x, i, j), lit(0.0, DType.F32))
    assert "masked.load" not in text(sure, x, (M, 1))
    unsure = where(j + 1 < M, at(x, i, j + 1), lit(0.0, DType.F32))
    assert "masked.load" in text(unsure, x, (M, 1))
    assert "masked.load" not in text(
        where(j + 1 < M, at(x, i, j + 1), at(x, i, j)) + at(x, i, j + 1) * 0.0, x, (M, 1), 1
    )


def test_a_value_from_under_a_guard_is_not_used_outside_of_it():
    x = t(N, M)
    ahead = at(x, i, j + 1)
    out = text(where(j + 1 < M, ahead, lit(0.0, DType.F32)) + ahead, x, (M, 1))
    assert out.count("= load <8 x float>") == 1  # the one without guard
    assert out.count('call <8 x float> @"llvm.masked.load') == 1


def test_a_shared_part_is_emitted_once():
    x = t(N, M)
    body: Expr = at(x, i, j)
    for _ in range(40):  # 2**40 paths
        body = body * body
    assert text(body, x, (M, 1)).count("fmul") == 40


def test_deep_expressions_need_no_recursion():
    x = t(N, M)
    body: Expr = at(x, i, j)
    for k in range(5000):
        body = body + float(k)
    assert text(body, x, (M, 1)).count("fadd") == 5000


def test_division_and_remainder_join_to_the_whole_again():
    flat = flat_index((j // 8, j % 8), (i64(8), i64(1)))
    assert flat is j
    flat = flat_index((apply("floordiv", j, N), apply("mod", j, N)), (simplify(N * 3), i64(3)))
    assert str(flat) == str(simplify(j * 3))


def test_affine_steps_may_be_symbolic():
    rest, step = affine(simplify(i * M + j * N + 4), j)
    assert step is N
    assert str(rest) == str(simplify(i * M + 4))
    assert affine(simplify(j * j), j) is None
    assert affine(apply("floordiv", j, i64(3)), j) is None


def test_indices_in_range_are_recognised():
    x = t(N, M)
    assert in_range(at(x, i, j))
    assert not in_range(at(x, i, j + 1))
    assert not in_range(at(x, j, i))
    k = Axis("k", 4)
    assert in_range(at(t(2, 5), 1, var(k) + 1))
    assert not in_range(at(t(2, 4), 1, var(k) + 1))


def test_opaque_strides_and_bound_expressions():
    x = t(N, M)
    build = Builder(V2, "k")
    with build.function("f", VOID, [PTR, build.i64(0).type]) as fn:
        env = Env(1, None, {ROW: fn.args[1], COL: fn.args[1]}, {}, {x: Buffer(fn.args[0], DType.F32, (fn.args[1], 1))})
        here = env.at(bound={at(x, i, j): build.const(F32, 2.0)})
        assert emit_expr(build, here, at(x, i, j) + 1.0).type == F32
        assert "load float" not in str(build.module)
        emit_expr(build, env, at(x, i, j))
        assert "load float" in str(build.module)


def test_the_sigmoid_is_recognised_and_nothing_else():
    x = sym("x")
    a = cast(x, DType.F32)
    one, e = lit(1.0, DType.F32), apply("exp", apply("neg", a))
    assert sigmoid_of(one / (one + e)) is a
    assert sigmoid_of(one / (e + one)) is a
    for other in (
        one / (one + apply("exp", a)),
        a / (one + e),
        one / (one - e),
        one / (lit(2.0, DType.F32) + e),
        one + e,
    ):
        assert sigmoid_of(other) is None


def test_the_gelu_is_recognised_in_every_order_and_nothing_else():
    x, y = (cast(sym(n), DType.F32) for n in "xy")
    x = x + y  # itself a sum
    f = lambda v: lit(v, DType.F32)  # noqa: E731
    half, part = f(0.5), x / f(1.4142135)
    total = apply("erf", part) + f(1.0)
    spellings = [x * half * total, half * (x * total), x * (total * half), total * x * half]
    spellings += [x * (f(1.0) + apply("erf", x * f(0.70710677))) * half]
    assert all(gelu_of(e) is x for e in spellings)
    for other in (
        y * half * total,
        x * f(0.25) * total,
        x * half * (apply("erf", x / f(1.41)) + f(1.0)),
        x * half * (apply("erf", f(1.4142135) / x) + f(1.0)),
        x * half * (apply("tanh", part) + f(1.0)),
        x * total,
    ):
        assert gelu_of(other) is None
