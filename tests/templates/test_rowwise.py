"""rowwise runs every kernel, with every vector axis it proposes, as the interpreter does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.codegen.generate import emit_module
from onnxfuse.codegen.object import compile_module
from onnxfuse.ir import interp
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, acc, apply, cast, i64, lit, load, loads, sym, var, walk, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.ir.plan import Plan
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import Dim, tensor
from onnxfuse.runtime.jit import jit
from onnxfuse.target import TARGETS, Target
from onnxfuse.templates.nest import in_place, stage_roots, tidy
from onnxfuse.templates.rowwise import ROWWISE
from tests.codegen.machines import MACHINES, V3, undefined
from tests.templates.assembly import assembly

F32 = DType.F32
N, M = sym("N"), sym("M")


def t(name: str, *shape: Dim, dtype: DType = F32) -> Value:
    return Value(name, tensor(dtype, shape))


def at(v: Value, *index: Expr | int) -> Expr:
    return load(v, tuple(i64(i) if isinstance(i, int) else i for i in index), v.tensor.dtype)


def axes(*extents: Dim) -> tuple[Axis, ...]:
    return tuple(Axis(f"i{k}", e) for k, e in enumerate(extents))


def fixed(dims: Sequence[tuple[Value, int]]) -> tuple[DimBinding, ...]:
    return tuple(DimBinding(v.tensor.shape[k], v, k) for v, k in dims)  # type: ignore[arg-type]


def pointwise(inputs: Sequence[Value], out: Value, ax: Sequence[Axis], body: Expr, dims=()) -> Kernel:
    store = Store(out, tuple(map(var, ax)), body)
    return Kernel("k", tuple(inputs), (out,), tuple(ax), (Stage((), (store,)),), dims=fixed(dims))


def reduction(inputs, out, kept, over, body, name="add", init=0.0, finish=None, dtype=F32) -> Kernel:
    red = Reduce(tuple(over), PRIMS[name], lit(init, dtype), dtype)
    store = Store(out, tuple(map(var, kept)), acc(dtype) if finish is None else finish)
    return Kernel("k", tuple(inputs), (out,), tuple(kept), (Stage((), (store,), red, body),))


def runs(kernel: Kernel, target: Target):
    """The kernel compiled once per proposed schedule, for tasks so small that there are several."""
    for schedule in (replace(s, grain=4096) for s in ROWWISE.propose(kernel, target)):
        yield schedule, jit(Plan(kernel, schedule, ROWWISE), target)


def agree(kernel: Kernel, target: Target, *feeds: Sequence[np.ndarray], rtol: float = 0.0) -> None:
    """All schedules on all feeds equal the interpreter, whatever the order of tasks and the alignment."""
    for schedule, run in runs(kernel, target):
        for k, feed in enumerate(feeds):
            with np.errstate(all="ignore"):
                want = interp.run_kernel(kernel, feed)
            for g, w in zip(run(feed, seed=k, shift=4 * (k % 2) if F32 in _dtypes(kernel) else 0), want, strict=True):
                assert g.dtype == w.dtype
                assert g.shape == w.shape
                np.testing.assert_allclose(
                    g.astype(np.float64), w.astype(np.float64), rtol=rtol, atol=rtol, err_msg=str(schedule)
                )


def _dtypes(kernel: Kernel) -> set[DType]:
    return {v.tensor.dtype for v in (*kernel.inputs, *kernel.outputs)} if kernel.inputs else set()


def f32(rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- elementwise ----


@pytest.mark.parametrize("target", MACHINES)
def test_every_length_up_to_two_vectors_and_one(target, rng):
    x, y = t("x", N), t("y", N)
    (i,) = axes(N)
    k = pointwise([x], y, [i], apply("max", at(x, var(i)) * 3.0, 0.0), [(x, 0)])
    agree(k, target, *([f32(rng, n)] for n in (*range(2 * target.lanes(4) + 2), 129, 20_000)))


@pytest.mark.parametrize("target", MACHINES)
def test_broadcast_on_every_axis(target, rng):
    for mask in range(8):
        shape = [1 if mask >> k & 1 else e for k, e in enumerate((3, 5, 19))]
        x, b, y = t("x", 3, 5, 19), t("b", *shape), t("y", 3, 5, 19)
        ax = axes(3, 5, 19)
        index = [i64(0) if shape[k] == 1 else var(a) for k, a in enumerate(ax)]
        k = pointwise([x, b], y, ax, at(x, *map(var, ax)) - at(b, *index))
        agree(k, target, [f32(rng, 3, 5, 19), f32(rng, *shape)])


@pytest.mark.parametrize("target", MACHINES)
def test_transposed_reversed_and_strided_reads(target, rng):
    ax = axes(4, 37)
    i, j = map(var, ax)
    for x, index in (
        (t("x", 37, 4), (j, i)),
        (t("x", 4, 37), (i, 36 - j)),
        (t("x", 4, 80), (i, j * 2 + 1)),
        (t("x", 4, 120), (i, j * 3)),
        (t("x", 4, 5, 8), (i, j // 8, j % 8)),
        (t("x", 8, 5, 4), (j % 8, j // 8, i)),
        (t("x", 41, 4), (i + j, i)),
    ):
        shape = tuple(int(d) for d in x.tensor.shape)
        agree(pointwise([x], t("y", 4, 37), ax, at(x, *index) + 1.0), target, [f32(rng, *shape)])


@pytest.mark.parametrize("target", MACHINES)
def test_transposition_in_squares(target, rng):
    """Run-time extents: squares in the middle, single vectors and masked tails at the edges."""
    x, b, y = t("x", M, 3, N), t("b", N), t("y", N, 3, M)
    ax = axes(N, 3, M)
    i, c, j = map(var, ax)
    k = pointwise([x, b], y, ax, at(x, j, c, i) * 2.0 + at(b, i), [(x, 0), (x, 2)])
    sizes = ((16, 16), (1, 40), (40, 1), (17, 33), (64, 70), (0, 16), (16, 0), (5, 5))
    agree(k, target, *([f32(rng, m, 3, n), f32(rng, n)] for n, m in sizes))


@pytest.mark.parametrize("target", MACHINES)
def test_guarded_loads_never_leave_the_tensor(target, rng):
    """Pad, Concat and a shift; the jit's buffers end at guard bytes, and an empty tensor has no element at all."""
    x, z, y = t("x", N, M), t("z", 0, M), t("y", N + 2, M + 3)
    ax = axes(simplify(N + 2), simplify(M + 3))
    i, j = map(var, ax)
    inside = (i64(0) <= i - 1) & (i - 1 < N) & (i64(0) <= j - 2) & (j - 2 < M)
    body = where(inside, at(x, i - 1, j - 2), where(i < 0, at(z, i, j), lit(7.0, F32)))
    k = pointwise([x, z], y, ax, body, [(x, 0), (x, 1)])
    agree(k, target, *([f32(rng, n, m), f32(rng, 0, m)] for n, m in ((3, 16), (1, 1), (0, 4), (5, 30))))


@pytest.mark.parametrize("target", MACHINES)
def test_loops_are_cut_at_the_joints_of_their_parts(target, rng):
    sizes = (13, 32, 1, 20)
    parts, n = [t(f"x{k}", 3, size) for k, size in enumerate(sizes)], sum(sizes)
    i, j = axes(3, n)
    body, start = None, n
    for part, size in zip(reversed(parts), reversed(sizes), strict=True):
        start -= size
        value = at(part, var(i), var(j) - start)
        body = value if body is None else where(apply("lt", var(j), i64(start + size)), value, body)
    k = pointwise(parts, t("y", 3, n), [i, j], body)
    agree(k, target, [f32(rng, 3, size) for size in sizes])


@pytest.mark.parametrize("target", MACHINES)
def test_edges_of_every_kind_of_comparison(target, rng):
    x, (i, j) = t("x", 3, 40), axes(3, 47)
    a = var(j)
    mirrored = where(apply("lt", a - 3, i64(0)), 3 - a, a - 3)
    mirrored = where(apply("le", i64(40), mirrored), 78 - mirrored, mirrored)
    tests = [
        apply("lt", i64(5), a), apply("le", a, i64(46)), apply("lt", 30 - a, i64(4)), apply("le", i64(50), a),
        apply("and", apply("le", i64(2), a), apply("lt", a, i64(9))), apply("lt", a, var(i) * 9),
    ]  # fmt: skip
    for test in tests:
        body = where(test, at(x, var(i), mirrored), at(x, var(i), i64(0)) * 2.0)
        agree(pointwise([x], t("y", 3, 47), [i, j], body), target, [f32(rng, 3, 40)])


@pytest.mark.parametrize(
    ("channels", "dtype"), [(2, F32), (3, F32), (4, F32), (2, DType.F64), (3, DType.U8), (4, DType.F16)]
)
@pytest.mark.parametrize("target", MACHINES)
def test_few_channels_are_woven_into_the_last_dimension(target, channels, dtype, rng):
    x, y, z = t("x", 2, channels, 45, dtype=dtype), t("y", 2, 45, channels, dtype=dtype), t("z", 2, 45, channels)
    ax = axes(2, 45, channels)
    b, s, c = map(var, ax)
    copied, mean = Store(y, (b, s, c), at(x, b, c, s)), Store(z, (b, s, c), cast(at(x, b, c, s), F32) * cast(c, F32))
    for stores in ((copied,), (copied, mean)):
        k = Kernel("k", (x,), tuple(st.target for st in stores), ax, (Stage((), stores),))
        agree(k, target, [(rng.random((2, channels, 45)) * 100).astype(dtype.numpy)])


@pytest.mark.parametrize("target", MACHINES)
def test_elements_repeated_along_the_row(target, rng):
    for k, n in ((2, 37), (2, 64), (4, 83), (3, 40), (2, 9000)):
        x, (i, j) = t("x", 3, -(-n // k) + 2), axes(3, n)
        a = var(j)
        plain = at(x, var(i), a // k + 1)
        joined = where(apply("lt", a, i64(n // 3)), plain, at(x, var(i), a // k))
        guarded = where(apply("lt", var(i), a), at(x, var(i), a // k + i64(1)), lit(1.0, F32))
        for body, rtol in ((plain, 0.0), (joined, 0.0), (guarded, 0.0), (apply("exp", joined), 1e-6)):
            agree(pointwise([x], t("y", 3, n), [i, j], body), target, [f32(rng, *x.tensor.shape)], rtol=rtol)


@pytest.mark.parametrize("target", MACHINES)
def test_gathered_rows_with_index_tensor(target, rng):
    x, ids, y = t("x", 9, 21), t("ids", 6, dtype=DType.I64), t("y", 6, 21)
    ax = axes(6, 21)
    k = pointwise([x, ids], y, ax, at(x, at(ids, var(ax[0])), var(ax[1])))
    agree(k, target, [f32(rng, 9, 21), rng.integers(0, 9, 6)])


@pytest.mark.parametrize("target", MACHINES)
def test_runtime_broadcast(target, rng):
    x, b, y = t("x", N, M), t("b", sym("P"), M), t("y", N, M)
    ax = axes(N, M)
    row = apply("bcast", var(ax[0]), sym("P"))
    k = pointwise([x, b], y, ax, at(x, *map(var, ax)) * at(b, row, var(ax[1])), [(x, 0), (x, 1), (b, 0)])
    agree(k, target, [f32(rng, 3, 20), f32(rng, 1, 20)], [f32(rng, 3, 20), f32(rng, 3, 20)])


@pytest.mark.parametrize("dtype", [d for d in DType if d.computable])
@pytest.mark.parametrize("target", MACHINES)
def test_every_dtype_moves_and_computes(target, dtype, rng):
    x, c, y = t("x", 3, 37, dtype=dtype), t("c", 37, dtype=DType.BOOL), t("y", 37, 3, dtype=dtype)
    ax = axes(37, 3)
    i, j = map(var, ax)
    v = at(x, j, i)
    wide = cast(cast(v, F32) * 2.0, dtype) if dtype.is_float else v
    k = pointwise([x, c], y, ax, where(at(c, i), wide, v))
    a = rng.integers(0, 2 if dtype is DType.BOOL else 100, (3, 37)).astype(dtype.numpy)
    agree(k, target, [a, rng.integers(0, 2, 37).astype(np.bool_)])


@pytest.mark.parametrize("target", MACHINES)
def test_rank_zero_size_zero_and_unit_dimensions(target, rng):
    agree(pointwise([x := t("x")], t("y"), [], at(x) + 1.0), target, [np.array(2.0, np.float32)])
    ax = axes(1, 1)
    x = t("x", 1, 1)
    agree(pointwise([x], t("y", 1, 1), ax, at(x, *map(var, ax)) + 1.0), target, [f32(rng, 1, 1)])
    ax, x = axes(4, 0), t("x", 4, 0)
    agree(pointwise([x], t("y", 4, 0), ax, at(x, *map(var, ax)) + 1.0), target, [f32(rng, 4, 0)])
    agree(pointwise([], t("y", 3), ax := axes(3), cast(var(ax[0]), F32)), target, [])


@pytest.mark.parametrize("target", MACHINES)
def test_several_outputs_of_different_shape_and_dtype(target, rng):
    x, y, z, w = t("x", 4, 40), t("y", 4, 40), t("z", 40, 4, dtype=DType.I32), t("w", 4, 40, dtype=DType.BOOL)
    ax = axes(4, 40)
    i, j = map(var, ax)
    v = at(x, i, j)
    stores = (Store(y, (i, j), v * v), Store(z, (j, i), cast(v * 9.0, DType.I32)), Store(w, (i, j), v < 0.0))
    agree(Kernel("k", (x,), (y, z, w), ax, (Stage((), stores),)), target, [f32(rng, 4, 40)])


# ---- reductions ----


@pytest.mark.parametrize("over", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("target", MACHINES)
def test_reduce_over_every_choice_of_axes(target, over, rng):
    x, ax = t("x", 4, 19, 37), axes(4, 19, 37)
    kept = [a for k, a in enumerate(ax) if k not in over]
    y = t("y", *(a.extent for a in kept))
    k = reduction([x], y, kept, [ax[o] for o in over], at(x, *map(var, ax)), finish=acc(F32) * 0.25 + 1.0)
    agree(k, target, [f32(rng, 4, 19, 37)], rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "init"),
    [
        ("max", F32, -np.inf), ("min", DType.F64, np.inf), ("mul", F32, 1.0), ("add", DType.I64, 5),
        ("max", DType.U8, 0),
        ("min", DType.I32, 2**31 - 1), ("and", DType.BOOL, True), ("or", DType.BOOL, False), ("bitxor", DType.U16, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", MACHINES)
def test_every_combine_over_rows_and_columns(target, name, dtype, init, rng):
    for kept_axis, over_axis in ((0, 1), (1, 0)):
        x, ax = t("x", 11, 45, dtype=dtype), axes(11, 45)
        y = t("y", ax[kept_axis].extent, dtype=dtype)
        k = reduction([x], y, [ax[kept_axis]], [ax[over_axis]], at(x, *map(var, ax)), name, init, acc(dtype), dtype)
        a = f32(rng, 11, 45) if dtype.is_float else rng.integers(0, 2 if dtype is DType.BOOL else 99, (11, 45))
        agree(k, target, [a.astype(dtype.numpy)], rtol=1e-5 if dtype.is_float else 0)


@pytest.mark.parametrize("length", [2, 17, 33])
@pytest.mark.parametrize("target", MACHINES)
def test_a_nan_anywhere_reaches_the_maximum(target, length, rng):
    x, y, ax = t("x", length, length), t("y", length), axes(length, length)
    a = f32(rng, length, length)
    np.fill_diagonal(a, np.nan)
    k = reduction([x], y, [ax[0]], [ax[1]], at(x, *map(var, ax)), "max", -np.inf)
    for _, run in runs(k, target):
        assert np.isnan(run([a])[0]).all()


@pytest.mark.parametrize("target", MACHINES)
def test_an_empty_reduction_gives_the_initial_value(target, rng):
    x, ax = t("x", N, M), axes(N, M)
    red = Reduce((ax[1],), PRIMS["add"], lit(3.0, F32), F32)
    stage = Stage((), (Store(t("y", N), (var(ax[0]),), acc(F32)),), red, at(x, *map(var, ax)))
    k = Kernel("k", (x,), (stage.stores[0].target,), (ax[0],), (stage,), dims=fixed([(x, 0), (x, 1)]))
    agree(k, target, [f32(rng, 4, 0)], [f32(rng, 0, 4)], [f32(rng, 3, 70)], rtol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("target", MACHINES)
def test_pools_with_padding(target, stride, rng):
    size = 29
    out = (size + 2 - 3) // stride + 1
    x, y = t("x", 2, size, size), t("y", 2, out, out)
    c, oy, ox = axes(2, out, out)
    p, q = Axis("p", 3), Axis("q", 3)
    iy, ix = var(oy) * stride + var(p) - 1, var(ox) * stride + var(q) - 1
    inside = (i64(0) <= iy) & (iy < size) & (i64(0) <= ix) & (ix < size)
    body = where(inside, at(x, var(c), iy, ix), lit(-np.inf, F32))
    agree(reduction([x], y, (c, oy, ox), (p, q), body, "max", -np.inf), target, [f32(rng, 2, size, size)])


@pytest.mark.parametrize("target", MACHINES)
def test_a_contraction_with_an_epilogue(target, rng):
    a, b, s, y = t("a", 7, 20), t("b", 20, 30), t("s"), t("y", 7, 30)
    i, j, k = axes(7, 30, 20)
    red = Reduce((k,), PRIMS["add"], lit(0.0, F32), F32)
    first = Stage((), (Store(s, (), acc(F32)),), red, at(a, var(i), var(k)) * at(b, var(k), var(j)))
    last = Stage((), (Store(y, (var(i), var(j)), apply("max", at(s), 0.0)),))
    kernel = Kernel("k", (a, b), (y,), (i, j), (first, last), locals=(Local(s),))
    agree(kernel, target, [f32(rng, 7, 20), f32(rng, 20, 30)], rtol=1e-5)


# ---- row programs ----


def softmax(rows: Dim, cols: Dim, dims=()) -> Kernel:
    x, y, e, top, total = t("x", rows, cols), t("y", rows, cols), t("e", cols), t("top"), t("total")
    i, a, b, c, d = (Axis(n, rows if n == "i" else cols) for n in "iabcd")
    maximum, total_of = (
        Reduce((ax,), PRIMS[p], lit(v, F32), F32) for ax, p, v in ((a, "max", -np.inf), (c, "add", 0.0))
    )
    return Kernel(
        "k", (x,), (y,), (i,),
        (
            Stage((), (Store(top, (), acc(F32)),), maximum, at(x, var(i), var(a))),
            Stage((b,), (Store(e, (var(b),), apply("exp", at(x, var(i), var(b)) - at(top))),)),
            Stage((), (Store(total, (), acc(F32)),), total_of, at(e, var(c))),
            Stage((d,), (Store(y, (var(i), var(d)), at(e, var(d)) / at(total)),)),
        ),
        locals=(Local(e), Local(top), Local(total)),
        dims=fixed([(x, 0), (x, 1)]) if dims is None else (),
    )  # fmt: skip


@pytest.mark.parametrize("target", MACHINES)
def test_softmax_of_any_length(target, rng):
    k = softmax(N, M, None)
    agree(k, target, *([f32(rng, 3, n)] for n in (1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 65, 100)), rtol=1e-6)
    agree(k, target, [f32(rng, 300, 70)], rtol=1e-6)


@pytest.mark.parametrize("target", MACHINES)
def test_private_rows_too_long_for_the_stack_use_scratch(target, rng):
    k = softmax(3, 40_000)
    assert ROWWISE.propose(k, target)
    agree(k, target, [f32(rng, 3, 40_000)], rtol=2e-5)


def test_exp_and_sum_of_a_softmax_are_one_pass():
    stages = tidy(softmax(3, 40)).stages
    assert [len(s.side) for s in stages] == [0, 1, 0, 0]  # the third finds the reciprocal


def test_exponentials_of_a_softmax_are_known_not_to_grow():
    roots = [r for s in tidy(softmax(N, M, None)).stages for r in stage_roots(s)]
    used = {e.prim.name for e in walk(*roots) if isinstance(e, Apply)}
    assert "decay" in used
    assert "exp" not in used


def test_a_long_softmax_keeps_its_exponentials_in_the_output():
    k = softmax(3, 4000)
    e = k.locals[0].value
    used = lambda nest: {ld.source for s in nest.stages for ld in loads(*stage_roots(s))}  # noqa: E731
    assert e in used(tidy(k))
    assert k.outputs[0] in used(in_place(tidy(k), {v.value for v in k.locals}))
    assert e not in used(in_place(tidy(k), {v.value for v in k.locals}))


@pytest.mark.parametrize("target", MACHINES)
def test_softmax_of_infinities_nan_and_masked_rows(target, rng):
    x = f32(rng, 6, 160)
    x[0, 70] = np.nan
    x[1, 3] = np.inf
    x[2, ::2] = -np.inf
    x[3] = -np.inf
    x[4, 5:] = -1e30
    x[5] *= 40  # some results are subnormal
    agree(softmax(6, 160), target, [x], rtol=1e-6)


@pytest.mark.parametrize("target", MACHINES)
def test_shares_of_a_sum_of_exponentials_that_is_tiny_or_huge(target, rng):
    n = 72
    x, y, e, total = t("x", 5, n), t("y", 5, n), t("e", n), t("total")
    i, b, c, d = (Axis(name, 5 if name == "i" else n) for name in "ibcd")
    add = Reduce((c,), PRIMS["add"], lit(0.0, F32), F32)
    stages = (
        Stage((b,), (Store(e, (var(b),), apply("exp", at(x, var(i), var(b)))),)),
        Stage((), (Store(total, (), acc(F32)),), add, at(e, var(c))),
        Stage((d,), (Store(y, (var(i), var(d)), at(e, var(d)) / at(total)),)),
    )
    k = Kernel("k", (x,), (y,), (i,), stages, locals=(Local(e), Local(total)))
    assert len(tidy(k).stages) == 4
    shift = np.array([[-98], [-60], [0], [80], [88]], np.float32)  # sums from subnormal numbers to infinity
    agree(k, target, [(rng.uniform(-1, 1, (5, n)) + shift).astype(np.float32)], rtol=1e-3)
    agree(k, target, [(rng.uniform(-1, 1, (5, n)) + shift * 0.9).astype(np.float32)], rtol=1e-6)


def test_quotients_that_may_be_exact_stay_divisions():
    x, y, total = t("x", 5, 64), t("y", 5, 64), t("total")
    i, c, d = Axis("i", 5), Axis("c", 64), Axis("d", 64)
    add = Reduce((c,), PRIMS["add"], lit(0.0, F32), F32)
    stages = (
        Stage((), (Store(total, (), acc(F32)),), add, at(x, var(i), var(c))),
        Stage((d,), (Store(y, (var(i), var(d)), at(x, var(i), var(d)) / at(total)),)),
    )
    assert len(tidy(Kernel("k", (x,), (y,), (i,), stages, locals=(Local(total),))).stages) == 2


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("columns", [64, 75])
def test_a_row_over_the_root_of_its_squares_is_a_product(target, columns, rng):
    """Also where the root is 0, subnormal squares', infinite or NaN."""
    x, y, total = t("x", 7, columns), t("y", 7, columns), t("total")
    i, c, d = Axis("i", 7), Axis("c", columns), Axis("d", columns)
    add = Reduce((c,), PRIMS["add"], lit(0.0, F32), F32)
    square = at(x, var(i), var(c)) * at(x, var(i), var(c))
    stages = (
        Stage((), (Store(total, (), acc(F32)),), add, square),
        Stage((d,), (Store(y, (var(i), var(d)), at(x, var(i), var(d)) / apply("sqrt", at(total))),)),
    )
    k = Kernel("k", (x,), (y,), (i,), stages, locals=(Local(total),))
    assert len(tidy(k).stages) == 3  # the second finds the reciprocal
    values = f32(rng, 7, columns)
    values[1] = 0.0
    values[2] *= 1e-22
    values[3] *= 1e19
    values[4, 5] = np.inf
    values[5, 6] = np.nan
    values[6] = np.copysign(0.0, values[6])
    agree(k, target, [values], rtol=1e-6)


def test_more_than_a_core_caches_is_fetched_a_row_ahead(rng):
    def by_rows(kernel: Kernel) -> Plan:
        return Plan(kernel, next(s for s in ROWWISE.propose(kernel, V3) if s.vector == "(row)"), ROWWISE)

    plans = [by_rows(k) for k in (softmax(1400, 501), softmax(7, 501), softmax(N, M, None))]
    assert ["llvm.prefetch" in emit_module(p, V3).text for p in plans] == [True, False, False]
    x = f32(rng, 1400, 501)
    want = np.exp(x - x.max(axis=1, keepdims=True))
    run = jit(plans[0], V3)
    np.testing.assert_allclose(run([x], seed=1)[0], want / want.sum(axis=1, keepdims=True), rtol=2e-6)
    np.testing.assert_array_equal(run([x], fence="end")[0], run([x], shift=4)[0])


@pytest.mark.parametrize(("columns", "cache"), [(501, 3), (4096, 2)])
def test_the_next_row_is_asked_for_to_read_and_to_write_and_goes_where_there_is_room(columns, cache):
    kernel = softmax(1400, columns)
    choice = next(s for s in ROWWISE.propose(kernel, V3) if s.vector == "(row)")
    text = emit_module(Plan(kernel, choice, ROWWISE), V3).text
    asked = [line for line in text.splitlines() if 'call void @"llvm.prefetch' in line]
    assert len(asked) == 2 * choice.unroll * choice.lanes * 4 // 64  # a line read, a line written
    assert all(f", i32 0, i32 {cache}, i32 1)" in line for line in asked)


def test_more_than_a_core_caches_is_asked_for_before_it_is_written(rng):
    def relu(*shape: Dim) -> Plan:
        x, y, ax = t("x", *shape), t("y", *shape), axes(*shape)
        kernel = pointwise([x], y, ax, apply("max", at(x, *map(var, ax)), lit(0.0, F32)))
        return Plan(kernel, ROWWISE.propose(kernel, V3)[0], ROWWISE)

    large, small = relu(700, 1001), relu(7, 1001)
    assert "llvm.prefetch" not in emit_module(small, V3).text
    text = emit_module(large, V3).text
    assert text.count('call void @"llvm.prefetch') == large.schedule.unroll * large.schedule.lanes * 4 // 64
    x = rng.standard_normal((700, 1001), np.float32)
    np.testing.assert_array_equal(jit(large, V3)([x], seed=1, fence="end")[0], np.maximum(x, 0))


@pytest.mark.parametrize("target", MACHINES)
def test_layer_norm_over_two_axes(target, rng):
    x, g, y, mu, r = t("x", 5, 6, 7), t("g", 6, 7), t("y", 5, 6, 7), t("mu"), t("r")
    i = Axis("i", 5)
    (p, q), (p1, q1), (p2, q2) = axes(6, 7), axes(6, 7), axes(6, 7)
    total = lambda ax: Reduce(ax, PRIMS["add"], lit(0.0, F32), F32)  # noqa: E731
    d = at(x, var(i), var(p1), var(q1)) - at(mu)
    rsqrt = lit(1.0, F32) / apply("sqrt", acc(F32) * (1 / 42) + 1e-5)
    scaled = (at(x, var(i), var(p2), var(q2)) - at(mu)) * at(r) * at(g, var(p2), var(q2))
    k = Kernel(
        "k", (x, g), (y,), (i,),
        (
            Stage((), (Store(mu, (), acc(F32) * (1 / 42)),), total((p, q)), at(x, var(i), var(p), var(q))),
            Stage((), (Store(r, (), rsqrt),), total((p1, q1)), d * d),
            Stage((p2, q2), (Store(y, (var(i), var(p2), var(q2)), scaled),)),
        ),
        locals=(Local(mu), Local(r)),
    )  # fmt: skip
    assert [len(s.reduce.axes) for s in tidy(k).stages[:2]] == [1, 1]
    agree(k, target, [f32(rng, 5, 6, 7), f32(rng, 6, 7)], rtol=2e-5)


@pytest.mark.parametrize("target", MACHINES)
def test_a_matrix_vector_product_inside_a_row(target, rng):
    """A stage with axes of its own and a reduction, into a private row that the next stage reads."""
    x, w, y, h = t("x", 3, 20), t("w", 20, 33), t("y", 3, 33), t("h", 33)
    i, j, k, m = Axis("i", 3), Axis("j", 33), Axis("k", 20), Axis("m", 33)
    red = Reduce((k,), PRIMS["add"], lit(0.0, F32), F32)
    for body, weights in (
        (at(x, var(i), var(k)) * at(w, var(k), var(j)), (20, 33)),
        (at(x, var(i), var(k)) * at(wt := t("w", 33, 20), var(j), var(k)), (33, 20)),
    ):
        source = w if weights == (20, 33) else wt
        stages = (
            Stage((j,), (Store(h, (var(j),), acc(F32)),), red, body),
            Stage((m,), (Store(y, (var(i), var(m)), at(h, var(m)) - at(h, 32 - var(m))),)),
        )
        kernel = Kernel("k", (x, source), (y,), (i,), stages, locals=(Local(h),))
        agree(kernel, target, [f32(rng, 3, 20), f32(rng, *weights)], rtol=1e-5)


# ---- what the code looks like ----


@pytest.mark.isa("avx2")
def test_elementwise_code_is_whole_vectors_without_calls():
    x, b, y, ax = t("x", N, 64), t("b", 64), t("y", N, 64), axes(N, 64)
    kernel = pointwise([x, b], y, ax, apply("max", at(x, *map(var, ax)) + at(b, var(ax[1])), 0.0), [(x, 0)])
    text = assembly(kernel, ROWWISE, V3)
    assert "vaddps" in text
    assert "vmaxps" in text
    assert "addss" not in text
    assert "call" not in text


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_code_for_every_target_is_self_contained(target):
    x, y, ax = t("x", 37, 60), t("y", 60, 37), axes(60, 37)
    turned = pointwise([x], y, ax, apply("erf", at(x, var(ax[1]), var(ax[0]))))
    for kernel in (softmax(N, M, None), turned):
        for schedule in ROWWISE.propose(kernel, target):
            data = compile_module(emit_module(Plan(kernel, schedule, ROWWISE), target).text, target).data
            assert undefined(data) == []


def test_contiguous_axes_become_one():
    x, y, ax = t("x", N, 3, M), t("y", N, 3, M), axes(N, 3, M)
    nest = tidy(pointwise([x], y, ax, at(x, *map(var, ax)) * 2.0))
    assert [str(a.extent) for a in nest.outer] == [str(simplify(N * 3 * M))]


def test_work_is_cut_the_same_way_whatever_the_machine_does():
    """Tasks depend on dimensions only, and there are few of them."""
    x, y, ax = t("x", N, M), t("y", N, M), axes(N, M)
    k = pointwise([x], y, ax, at(x, *map(var, ax)) * 2.0, [(x, 0), (x, 1)])
    run = jit(Plan(k, ROWWISE.propose(k, V3)[0], ROWWISE), V3)
    for shape, most in (((10, 10), 1), ((1000, 1000), 64), ((0, 5), 0)):
        call = run.prepare([np.zeros(shape, np.float32)])
        assert call.variant.tasks[0](call.env.ctypes.data) <= most
