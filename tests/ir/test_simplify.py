import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import FALSE, TRUE, apply, eq, i64, load, sym, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.interp import Block, Env, eval_expr
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import as_dim, bounds, known, same, simplify, substitute_dims
from onnxfuse.ir.types import tensor

N, M, C = sym("N"), sym("M"), sym("C")
I5, J7, K3 = Axis("i", 5), Axis("j", 7), Axis("k", 3)
RN = Axis("n", N)  # an axis as long as a run-time dimension
RNM = Axis("m", simplify(N * M))
AXES = (I5, J7, K3, RN, RNM)
SIZES = (0, 1, 2, 3, 5)


def leaves():
    return st.sampled_from([N, M, *(var(a) for a in AXES), *(i64(k) for k in (-7, -3, -1, 0, 1, 2, 3, 4, 6, 7, 12))])


def grow(inner):
    pair = st.tuples(inner, inner)
    const = st.sampled_from([1, 2, 3, 4, 6, 7, 12])
    return st.one_of(
        st.builds(lambda op, ab: apply(op, *ab), st.sampled_from(["add", "sub", "mul", "min", "max"]), pair),
        st.builds(lambda op, a, c: apply(op, a, c), st.sampled_from(["floordiv", "mod", "idiv"]), inner, const),
        st.builds(
            lambda op, a, d: apply(op, a, d),
            st.sampled_from(["floordiv", "mod", "bcast", "bdim", "idiv"]),
            inner,
            st.sampled_from([N, M, N * M, N * 2, M * 3, N + 1]),
        ),
        st.builds(lambda a: -a, inner),
        st.builds(lambda op, a, b, c: apply("where", apply(op, a, b), c, a), st.sampled_from(["lt", "le", "eq", "ne"]),
                  inner, inner, inner),
    )  # fmt: skip


EXPRS = st.recursive(leaves(), grow, max_leaves=8)


def values(e, n, m):
    """Values at every point of all axes for N=n, M=m (empty when an axis is)."""
    syms = {N: n, M: m}
    block = Block(AXES, tuple((0, int(eval_expr(i64(0) + a.extent, Env(syms=syms)))) for a in AXES))
    return np.broadcast_to(eval_expr(e, Env(block, syms)), block.shape)


@settings(max_examples=200)
@given(EXPRS)
def test_simplify_keeps_the_value(e):
    s = simplify(e)
    for n, m in itertools.product(SIZES, (0, 1, 2, 4)):
        np.testing.assert_array_equal(values(s, n, m), values(e, n, m), err_msg=f"{e}  =>  {s}  at N={n} M={m}")


@settings(max_examples=400)
@given(EXPRS)
def test_simplify_is_idempotent(e):
    s = simplify(e)
    assert simplify(s) is s, f"{e} => {s} => {simplify(s)}"


@settings(max_examples=200)
@given(EXPRS)
def test_bounds_hold(e):
    for x in (e, simplify(e)):
        lo, hi = bounds(x)
        for n, m in itertools.product(SIZES, (0, 1, 3)):
            got = values(x, n, m)
            assert lo is None or got.size == 0 or lo <= got.min(), f"{x} in {lo}..{hi}"
            assert hi is None or got.size == 0 or got.max() <= hi, f"{x} in {lo}..{hi}"


@settings(max_examples=200)
@given(EXPRS, EXPRS, st.sampled_from(["lt", "le", "eq", "ne"]))
def test_a_known_condition_is_true_everywhere(a, b, op):
    cond = apply(op, a, b)
    verdict = known(cond)
    if verdict is None:
        return
    for n, m in itertools.product(SIZES, (0, 1, 3)):
        assert (values(cond, n, m) == verdict).all(), f"{cond} said {verdict}"


@settings(max_examples=100)
@given(st.permutations([N * M, N * 4, i64(7), var(I5) * N, var(J7)]))
def test_the_order_of_terms_does_not_matter(terms):
    total = sum(terms[1:], terms[0])
    assert simplify(total) is simplify(N * M + N * 4 + 7 + var(I5) * N + var(J7))


@settings(max_examples=100)
@given(EXPRS, EXPRS)
def test_sums_commute(a, b):
    assert simplify(a + b) is simplify(b + a)
    assert simplify(a - b) is simplify(-(b - a))


H = sym("H")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((H + 2 - 3) // 2 + 1, (H - 1) // 2 + 1),
        ((H + 2 - 3) // 2 + 1, (H + 1) // 2),
        ((H + 2 * 1 - 1 * (3 - 1) - 1) // 1 + 1, H),
        (N * C // C, N),
        (N * (C + 1) - N, N * C),
        ((N * 4 + 3) // 4, N),
        ((N * 4 + 5) % 4, i64(1)),
        ((var(I5) * 7 + var(J7)) // 7, var(I5)),
        ((var(I5) * 7 + var(J7)) % 7, var(J7)),
        ((var(I5) * N + var(RN)) // N, var(I5)),
        ((var(I5) * N + var(RN)) % N, var(RN)),
        (apply("min", var(I5), 4), var(I5)),
        (apply("max", var(I5) - 9, 0), i64(0)),
    ],
    ids=str,
)
def test_dimensions_that_are_equal_are_the_same_object(a, b):
    assert simplify(a) is simplify(b)
    assert same(a, b)


def test_nested_divisions_stay_apart():
    half = H // 2
    assert simplify(half // 2) is apply("floordiv", half, 2)


def test_different_dimensions_are_not_the_same():
    assert not same(N, M)
    assert not same(N, 4)
    assert not same(3, 4)
    assert same(N - N + 4, 4)
    assert as_dim(N * 0 + 3) == 3


def test_axes_of_one_name_get_one_normal_form():
    a, b = Axis("i", 4), Axis("i", 4)
    assert simplify(var(a) * var(b)) is simplify(var(b) * var(a))
    assert simplify(var(a) + var(b)) is simplify(var(b) + var(a))
    assert simplify(var(a) - var(b)) is not simplify(var(b) - var(a))


def test_conditions_by_range():
    assert known(var(I5) < 5) is True
    assert known(var(I5) >= 5) is False
    assert known(var(RN) < N) is True
    assert known(N < 0) is False
    assert known(eq(N, 3)) is None
    assert simplify(apply("and", var(I5) < 5, var(J7) < 3)) is simplify(var(J7) < 3)
    assert simplify(var(I5) < 9) is TRUE
    assert simplify(var(I5) < 0) is FALSE


def test_indices_inside_loads_are_simplified():
    x = Value("x", tensor(DType.F32, (35,)))
    e = apply("exp", load(x, ((var(I5) * 7 + var(J7)) // 7,), DType.F32))
    assert str(simplify(e)) == "exp(%x[i])"


def test_floats_are_never_touched():
    x = Value("x", tensor(DType.F32, (5,)))
    ld = load(x, (var(I5),), DType.F32)
    for e in (ld + 0.0, ld - ld, ld * 1.0, ld * 0.0, ld / ld):
        assert simplify(e) is e


def test_substitute_dims_gives_normal_forms():
    assert substitute_dims((H - 1) // 2 + 1, {H: N * 2}) is simplify((N * 2 - 1) // 2 + 1)
    assert substitute_dims(N * C, {C: i64(4)}) is simplify(N * 4)
