"""One matrix product in many spellings: models in ONNX text, from a and b as they are stored, to y.

a  [M, K], or [K, M] when `ta`        b  [K, N], or [N, K] when `tb`        y  [M, N], or [N, M] when `ty`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
import onnx.parser

Spelling = Callable[[int, int, int, bool, bool, bool], str]


def _t(out: str, x: str, perm: tuple[int, ...]) -> str:
    return f"{out} = Transpose<perm = [{', '.join(map(str, perm))}]>({x}) "


def _ints(name: str, *values: int) -> str:
    return f"{name} = Constant<value_ints = [{', '.join(map(str, values))}]>() "


def _straight(ta: bool, tb: bool) -> str:
    """a1 [M, K] and b1 [K, N]."""
    a = _t("a1", "a", (1, 0)) if ta else "a1 = Identity(a) "
    return a + (_t("b1", "b", (1, 0)) if tb else "b1 = Identity(b) ")


def _end(ty: bool) -> str:
    return _t("y", "c", (1, 0)) if ty else "y = Identity(c) "


def matmul(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    return _straight(ta, tb) + "c = MatMul(a1, b1) " + _end(ty)


def matmul_swapped(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    """y^T = b^T a^T."""
    swapped = _t("bt", "b1", (1, 0)) + _t("at", "a1", (1, 0)) + "ct = MatMul(bt, at) "
    return _straight(ta, tb) + swapped + _t("c", "ct", (1, 0)) + _end(ty)


def gemm(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    return f"c = Gemm<transA = {int(ta)}, transB = {int(tb)}>(a, b) " + _end(ty)


def einsum(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    equation = f"{'km' if ta else 'mk'},{'nk' if tb else 'kn'}->{'nm' if ty else 'mn'}"
    return f'y = Einsum<equation = "{equation}">(a, b) '


def multiply_then_sum(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    """[M, K, 1] * [1, K, N], summed in the middle."""
    views = _ints("two", 2) + _ints("zero", 0) + _ints("one", 1) + "a2 = Unsqueeze(a1, two) b2 = Unsqueeze(b1, zero) "
    return _straight(ta, tb) + views + "p = Mul(a2, b2) c = ReduceSum<keepdims = 0>(p, one) " + _end(ty)


def expand_then_sum(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    """Both expanded to [N, M, K], summed last, then squeezed."""
    a = _t("at", "a", (1, 0)) if ta else "at = Identity(a) "
    b = "bt = Identity(b) " if tb else _t("bt", "b", (1, 0))
    views = _ints("sa", 1, m, k) + _ints("sb", n, 1, k) + _ints("all", n, m, k) + _ints("last", 2)
    views += "a2 = Reshape(at, sa) b2 = Reshape(bt, sb) a3 = Expand(a2, all) b3 = Expand(b2, all) "
    body = "p = Mul(b3, a3) s = ReduceSum(p, last) ct = Squeeze(s, last) "
    return a + b + views + body + ("y = Identity(ct) " if ty else _t("y", "ct", (1, 0)))


def split_sum(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    """K cut in two axes by reshapes, summed over both."""
    views = _ints("sa", m, 4, k // 4, 1) + _ints("sb", 1, 4, k // 4, n) + _ints("axes", 1, 2)
    views += "a2 = Reshape(a1, sa) b2 = Reshape(b1, sb) "
    return _straight(ta, tb) + views + "p = Mul(a2, b2) c = ReduceSum<keepdims = 0>(p, axes) " + _end(ty)


def convolution(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    """Rows as pixels of an image of one line: [1, K, M] with weights [N, K, 1]."""
    a = "at = Identity(a) " if ta else _t("at", "a", (1, 0))
    b = "bt = Identity(b) " if tb else _t("bt", "b", (1, 0))
    views = _ints("zero", 0) + _ints("two", 2) + "x = Unsqueeze(at, zero) w = Unsqueeze(bt, two) "
    return (
        a + b + views + "z = Conv(x, w) ct = Squeeze(z, zero) " + ("y = Identity(ct) " if ty else _t("y", "ct", (1, 0)))
    )


def mean_of_products(m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> str:
    """The sum divided by K."""
    views = _ints("two", 2) + _ints("zero", 0) + "a2 = Unsqueeze(a1, two) b2 = Unsqueeze(b1, zero) "
    return _straight(ta, tb) + views + "p = Mul(a2, b2) c = ReduceMean<axes = [1], keepdims = 0>(p) " + _end(ty)


SPELLINGS: tuple[Spelling, ...] = (
    matmul,
    matmul_swapped,
    gemm,
    einsum,
    multiply_then_sum,
    expand_then_sum,
    split_sum,
    convolution,
    mean_of_products,
)


def model(spelling: Spelling, m: int, n: int, k: int, ta: bool, tb: bool, ty: bool) -> onnx.ModelProto:
    """The model of one spelling."""
    a, b = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    y = (n, m) if ty else (m, n)
    args = f"float[{a[0]}, {a[1]}] a, float[{b[0]}, {b[1]}] b"
    body = spelling(m, n, k, ta, tb, ty)
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({args}) => (float[{y[0]}, {y[1]}] y) {{ {body} }}'
    return onnx.parser.parse_model(text)


def layouts() -> Iterator[tuple[bool, bool, bool]]:
    """Every way to store a, b and y."""
    for code in range(8):
        yield bool(code & 4), bool(code & 2), bool(code & 1)
