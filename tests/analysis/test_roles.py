"""Roles of contractions: every spelling of a matrix product and of a convolution is recognised, others are refused."""

from __future__ import annotations

import pytest

from onnxfuse.analysis.roles import Contraction, affine, roles
from onnxfuse.analysis.windows import Window, window
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Load, apply, i64, lit, load, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.types import tensor
from tests.templates.contractions import anchored, conv, element, matmul, pool

N, H, W, S = (sym(n) for n in "NHWS")
ONE = [(1, 1), (1, 1)]


def found(kernel: Kernel) -> Contraction:
    c = roles(kernel)
    assert isinstance(c, Contraction), c
    return c


def names(c: Contraction) -> dict[str, list[str]]:
    return {
        "batch": [a.name for a in c.batch],
        "rows": [a.name for a in c.rows.parts],
        "cols": [a.name for a in c.cols.parts],
        "k": [a.name for a in c.k],
    }


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("flip", [False, True])
def test_matrix_products_in_any_layout_and_order(ta: bool, tb: bool, flip: bool) -> None:
    c = found(matmul([3], S, 8, 16, ta=ta, tb=tb, flip=flip))
    assert names(c) == {"batch": ["b0"], "rows": ["m"], "cols": ["n"], "k": ["k"]}
    assert c.swapped is flip


def test_the_operands_swap_when_the_output_is_contiguous_along_rows() -> None:
    c = found(matmul([], 8, 9, 16, tout=True))
    assert names(c) == {"batch": [], "rows": ["n"], "cols": ["m"], "k": ["k"]}
    assert c.swapped


def test_tokens_of_a_batch_are_rows_of_one_product() -> None:
    c = found(matmul([N], S, 8, 16, shared_b=True))
    assert names(c) == {"batch": [], "rows": ["b0", "m"], "cols": ["n"], "k": ["k"]}
    assert str(c.a) == "%A[b0m, k]"
    assert c.rows.factor


def test_rows_that_do_not_merge_in_the_epilogue_join_the_batch() -> None:
    bias = Value("bias", tensor(DType.F32, [S]))
    kernel = matmul([N], S, 8, 16, shared_b=True, epilogue=lambda x, at: x + element(bias, at[1]), extra=[bias])
    assert names(found(kernel)) == {"batch": ["b0"], "rows": ["m"], "cols": ["n"], "k": ["k"]}


def test_a_row_of_extent_one_leaves_no_row_axis() -> None:
    c = found(matmul([], 1, 8, 16))
    assert c.rows.axis is None
    assert c.rows.extent == 1


def test_convolution_has_features_as_rows_and_pixels_as_columns() -> None:
    c = found(conv(N, 6, [H, W], 10, [3, 3], pads=ONE))
    assert names(c) == {"batch": ["n"], "rows": ["f"], "cols": ["y", "x"], "k": ["c", "ky", "kx"]}
    assert not c.cols.factor  # the image is addressed in y and x
    assert str(c.stores[0].index) == "(n, f, yx)"
    assert str(c.depth) == "54"


def test_a_pointwise_convolution_is_a_plain_product() -> None:
    c = found(conv(N, 6, [H, W], 10, [1, 1]))
    assert names(c)["k"] == ["c"]
    assert c.cols.factor
    assert str(c.b) == "%X[n, c, yx]"


def test_the_groups_of_a_convolution_are_a_batch_axis() -> None:
    c = found(conv(N, 6, [H, W], 10, [3, 3], groups=2))
    assert names(c)["batch"] == ["n", "f.g"]
    assert c.batch[1].extent == 2
    assert c.rows.extent == 5
    assert str(c.a) == "%W[f + f.g * 5, c, ky, kx]"


def test_a_guard_around_the_product_goes_to_the_factor_that_has_its_axes() -> None:
    m, n, k = Axis("m", S), Axis("n", 8), Axis("k", 16)
    a, b = Value("A", tensor(DType.F32, [S, 16])), Value("B", tensor(DType.F32, [16, 8]))
    product = element(a, var(m), var(k)) * element(b, var(k), var(n))
    body = where(var(k) < var(n), product, lit(0, DType.F32))
    c = found(anchored("tri", [a, b], [m, n], [k], body, Value("C", tensor(DType.F32, [S, 8]))))
    assert str(c.b).startswith("where(k < n")
    assert isinstance(c.a, type(element(a, var(m), var(k))))


def test_multiply_then_sum_is_a_product_too() -> None:
    """Sum over the middle axis of A[i, k, 1] * B[1, k, j], the columns written first."""
    i, j, k = Axis("i", 8), Axis("j", 9), Axis("k", 16)
    a, b = Value("A", tensor(DType.F32, [8, 16, 1])), Value("B", tensor(DType.F32, [1, 16, 9]))
    body = element(a, var(i), var(k), i64(0)) * element(b, i64(0), var(k), var(j))
    c = found(anchored("einsum", [a, b], [i, j], [k], body, Value("C", tensor(DType.F32, [8, 9]))))
    assert names(c) == {"batch": [], "rows": ["i"], "cols": ["j"], "k": ["k"]}


def product(body: Expr, outer: list[Axis], k: list[Axis], inputs: list[Value]) -> Kernel:
    out = Value("C", tensor(DType.F32, [a.extent for a in outer]))
    return anchored("k", inputs, outer, k, body, out)


def test_refusals() -> None:
    m, n, k = Axis("m", 8), Axis("n", 9), Axis("k", 16)
    a, b = Value("A", tensor(DType.F32, [8, 16])), Value("B", tensor(DType.F32, [16, 9]))
    x, y = element(a, var(m), var(k)), element(b, var(k), var(n))
    both = Value("D", tensor(DType.F32, [8, 16]))
    z = element(both, var(m), var(k))
    row = Value("R", tensor(DType.F32, [8]))
    cases = [
        (product(x + y, [m, n], [k], [a, b]), "GEMM_PRODUCT"),
        (product(x * z, [m], [k], [a, both]), "GEMM_ROLES"),
        (product(element(row, var(m)) * y, [m, n], [k], [row, b]), "GEMM_K"),
        (anchored("max", [a, b], [m, n], [k], x * y, Value("C", tensor(DType.F32, [8, 9])), combine="max"),
         "GEMM_COMBINE"),
    ]  # fmt: skip
    for kernel, code in cases:
        got = roles(kernel)
        assert isinstance(got, Refusal)
        assert got.code == code


def test_affine_coefficients() -> None:
    x, y = Axis("x", 8), Axis("y", 8)
    e = var(x) * 3 + var(y) - 2
    assert (affine(e, x), affine(e, y)) == (3, 1)
    assert affine(var(y) + 1, x) == 0
    assert affine(var(x) // i64(2), x) is None
    assert affine(var(x) * var(y), x) is None


def slid(kernel: Kernel) -> Window:
    w = window(kernel)
    assert isinstance(w, Window), w
    return w


def test_depthwise_convolution_is_a_window() -> None:
    w = slid(conv(N, 6, [H, W], 6, [3, 5], groups=6, strides=[1, 2], dilations=[2, 1], pads=[(1, 0), (2, 2)]))
    assert (w.y.stride, w.y.dilation, w.y.offset, w.y.taps, w.y.reach) == (1, 2, -1, 3, 5)
    assert (w.x.stride, w.x.dilation, w.x.offset, w.x.taps, w.x.reach) == (2, 1, -2, 5, 5)
    assert [a.name for a in w.planes] == ["n", "f"]
    assert w.weight is not None


def test_max_pooling_is_a_window_padded_with_its_initial_value() -> None:
    w = slid(pool(N, S, [H, W], [3, 3], strides=[2, 2], pads=ONE))
    assert w.weight is None
    assert w.pad is w.init
    assert w.combine.name == "max"


def test_a_window_of_one_dimension_has_no_lines_to_cross() -> None:
    w = slid(conv(N, 6, [W], 6, [3], groups=6, pads=[(1, 1)]))
    assert w.y.out is None
    assert w.y.taps == 1


def _beside(x: Expr) -> Expr:
    """The element after the one that `x` loads."""
    assert isinstance(x, Load)
    return load(x.source, (*x.index[:-1], x.index[-1] + 1), x.dtype)


def test_a_window_may_have_a_pointwise_prologue() -> None:
    got = window(conv(N, 6, [H, W], 6, [3, 3], groups=6, prologue=lambda x: apply("max", x, 0.0)))
    assert isinstance(got, Window)
    assert got.value is not got.source


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        (matmul([], S, 8, 16), "WINDOW_ROWS"),
        (conv(N, 6, [H, W], 10, [3, 3], pads=ONE), "WINDOW_FORM"),
        (conv(N, 6, [H, W], 6, [3, 3], groups=6, prologue=lambda x: x + _beside(x)), "WINDOW_FORM"),
    ],
)
def test_windows_are_refused(kernel: Kernel, code: str) -> None:
    got = window(kernel)
    assert isinstance(got, Refusal)
    assert got.code == code


def test_a_strided_transposed_convolution_is_split_by_phase() -> None:
    """No tap is multiplied by zero and nothing is left to test but the range."""
    n, f, x, c, kx = Axis("n", N), Axis("f", 8), Axis("x", W * 2), Axis("c", 6), Axis("kx", 4)
    image, weight = Value("X", tensor(DType.F32, [N, 6, W])), Value("W", tensor(DType.F32, [6, 8, 4]))
    numer = var(x) + 1 - var(kx)
    at = numer // i64(2)
    inside = (i64(0) <= at) & (at < W) & apply("eq", numer % i64(2), i64(0))
    data = where(inside, element(image, var(n), var(c), at), lit(0, DType.F32))
    body = data * element(weight, var(c), var(f), var(kx))
    out = Value("Y", tensor(DType.F32, [N, 8, W * 2]))
    got = found(anchored("t", [image, weight], [n, f, x], [c, kx], body, out, None, [weight]))
    assert names(got) == {"batch": ["n", "x.r"], "rows": ["f"], "cols": ["x"], "k": ["c", "kx"]}
    assert str(got.depth) == "12"
    assert "%" not in str(got.b).replace("%X", "")
