"""Sums of products: matrix products and convolutions. Roles (batch, M, N, K) are found by analysis, not declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, cast, i64, lit, substitute, syms_of
from onnxfuse.ir.simplify import as_dim, bounds, dim_expr, known, simplify
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import (
    Loops,
    Tensor,
    between,
    broadcast_dims,
    broadcast_index,
    broadcast_shape,
    compute,
    declined,
    equal_extents,
    guarded,
    maximum,
)
from onnxfuse.ops.table import contract

Element = Callable[[Expr, Sequence[Expr]], Expr]  # (element, its index in the factor) -> what is multiplied


def _computed(e: Expr, _index: Sequence[Expr]) -> Expr:
    return compute(e)


@contract
def MatMul(a, b):
    """Matrix product of the last two dimensions; leading ones broadcast; vectors as numpy does."""
    return matrix_product(a, b)


def matrix_product(a: Tensor, b: Tensor, left_of: Element = _computed, right_of: Element = _computed) -> Loops:
    """The product of two tensors of matrices, as MatMul; every element goes through `left_of` or `right_of`."""
    if a.rank == 0 or b.rank == 0:
        raise Unsupported("UN_SHAPE_MISMATCH", "MatMul of a scalar")
    left, right = a.rank == 1, b.rank == 1
    batch = broadcast_shape(() if left else a.shape[:-2], () if right else b.shape[:-2])
    inner = b.shape[-1] if right else b.shape[-2]
    needs = equal_extents((a.shape[-1], inner))
    k = a.shape[-1] if isinstance(a.shape[-1], int) else inner
    shape = [*batch, *([] if left else [a.shape[-2]]), *([] if right else [b.shape[-1]])]
    nb = len(batch)

    def body(*i: Expr) -> Expr:
        outer, r = i[:nb], i[-1]
        rest = list(i[nb:-1])
        m = None if left else rest.pop(0)
        n = None if right else rest.pop(0)
        x = (r,) if m is None else (*broadcast_index(a.shape[:-2], outer, batch), m, r)
        y = (r,) if n is None else (*broadcast_index(b.shape[:-2], outer, batch), r, n)
        return left_of(a[x], x) * right_of(b[y], y)

    names = [f"b{k}" for k in range(nb)] + ([] if left else ["m"]) + ([] if right else ["n"]) + ["k"]
    return Loops(shape, body, a.dtype, [k], acc=a.dtype.compute, names=names, needs=needs)


# --- convolution ---------------------------------------------------------------------------------------------------
def _out_extent(d: Dim, span: int, stride: int, begin: int, end: int | Expr, ceil: int = 0) -> Dim:
    """Number of windows. Onnxruntime's division truncates: one a little larger than the padded input counts once."""
    room = simplify(dim_expr(d) + (end + (begin - span)))
    rounded = simplify(room + (stride - 1 if ceil else 0))
    out = simplify(rounded // stride + 1)
    if stride > 1 and not ceil and not _fits(rounded):
        missing = maximum(simplify(i64(0) - rounded), 0)
        out = simplify(maximum(rounded, 0) // stride - missing // stride + 1)
    if ceil:  # a window that starts in the padding after the end does not count
        out = simplify(out - cast((out - 1) * stride >= dim_expr(d) + begin, DType.I64))
    return as_dim(simplify(maximum(out, 0)) if known(out >= 0) is not True and isinstance(d, int) else out)


def _fits(room: Expr) -> bool:
    """Provably >= 0 for inputs whose run-time dimensions are not 0."""
    at_least_one: dict[Expr, Expr] = {s: s + 1 for s in syms_of(room)}
    low, _ = bounds(simplify(substitute(room, at_least_one)))
    return low is not None and low >= 0


@dataclass(frozen=True, slots=True)
class Windows:
    """How windows lie over the spatial dimensions. `refusal`: the padding is only known at run time, the counts are."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    begin: list[int]  # padding
    end: list[int]
    counts: list[Dim]
    refusal: Refusal | None = None


def refuse_impossible(least: int = 1, **attrs: Sequence[int]) -> None:
    """Attributes that would lead a window out of its input, or make none; onnxruntime refuses such models."""
    for name, values in attrs.items():
        if any(not least <= v < 1 << 31 for v in values):
            raise Unsupported("UN_ATTR", f"{name} = {list(values)}: every number must be in {least} ... 2147483647")


def refuse_other_kernel(kernel: Sequence[int], told: Sequence[int] | None) -> None:
    """The attribute kernel_shape only repeats the shape of the weight."""
    if told is not None and list(told) != list(kernel):
        raise Unsupported("UN_ATTR", f"kernel_shape = {list(told)}, but the weight is of {list(kernel)}")


def windows(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    auto_pad: str,
    ceil: int = 0,
    *,
    pool: bool = False,
) -> Windows:
    """The windows of a convolution or pool over `x`. Onnxruntime pads a pool for SAME as if it had no dilations."""
    n = len(kernel)
    stride, dilation = list(strides or [1] * n), list(dilations or [1] * n)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padded = list(kernel) if pool else spans
    refuse_impossible(kernel_shape=kernel, strides=stride, dilations=dilation)
    refuse_impossible(least=0, pads=pads or ())
    w = Windows(list(kernel), stride, dilation, [0] * n, [0] * n, [])
    refusal = None
    if auto_pad in ("NOTSET", ""):
        flat = list(pads) if pads is not None else [0] * (2 * n)
        w = replace(w, begin=flat[:n], end=flat[n:])
    elif auto_pad != "VALID":
        totals = [_same_total(x.shape[2 + k], padded[k], stride[k]) for k in range(n)]
        if None in totals:
            why = f"auto_pad={auto_pad} with strides {stride} on {x.type}: the padding depends on the dimensions"
            refusal = Refusal("UN_DATA_DEPENDENT", why)
        small = [(t or 0) // 2 for t in totals]
        large = [(t or 0) - s for t, s in zip(totals, small, strict=True)]
        begin, end = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
        w = replace(w, begin=begin, end=end)
    if refusal is not None:
        same = [_same_count(x.shape[2 + k], spans[k], padded[k], stride[k]) for k in range(n)]
        return replace(w, counts=same, refusal=refusal)
    counts = [_out_extent(x.shape[2 + k], spans[k], stride[k], w.begin[k], w.end[k], ceil) for k in range(n)]
    return replace(w, counts=counts)


def _same_count(d: Dim, span: int, padded: int, stride: int) -> Dim:
    """How many windows SAME makes of any dimension that is padded for windows of `padded` elements."""
    rounded = (dim_expr(d) + (stride - 1)) // stride
    if span == padded:
        return as_dim(rounded)
    return _out_extent(d, span, stride, 0, maximum((rounded - 1) * stride + padded - dim_expr(d), 0))


def _same_total(d: Dim, span: int, stride: int) -> int | None:
    """Padding of one dimension so that there are ceil(d / stride) windows; None when it depends on run-time `d`."""
    if isinstance(d, int):
        return max((-(-d // stride) - 1) * stride + span - d, 0)
    return span - 1 if stride == 1 else None


_SPACE = ("x",), ("y", "x"), ("z", "y", "x")


@contract
def Conv(x, w, b=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None):
    """Convolution over 1, 2 or 3 spatial dimensions, with groups; bias added after the sum."""
    made = convolution(
        x, w, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads, strides=strides
    )
    finish = None if b is None else (lambda acc, _n, f, *_: acc + compute(b[f]))
    return replace(made, finish=finish, needs=(*made.needs, *equal_extents(*_biased(b, made.shape[1]))))


def convolution(
    x: Tensor,
    w: Tensor,
    data_of: Element = _computed,
    weight_of: Element = _computed,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Loops:
    """The sums of a convolution; every element goes through `data_of` or `weight_of`, what lies in the padding is 0."""
    n = x.rank - 2
    kernel = [_static(d, "kernel") for d in w.shape[2:]]
    if not 1 <= n <= 3:
        raise Unsupported("UN_SHAPE_MISMATCH", f"Conv over {n} spatial dimensions")
    refuse_other_kernel(kernel, kernel_shape)
    over = windows(x, kernel, strides, dilations, pads, auto_pad)
    stride, dilation, begin = over.stride, over.dilation, over.begin
    features, per_group = _static(w.shape[0], "channels"), _static(w.shape[1], "channels")
    per_out = features // group

    def body(*i: Expr) -> Expr:
        bi, f, *rest = i
        pos, c, taps = rest[:n], rest[n], rest[n + 1 :]
        channel = c if group == 1 else (f // per_out) * per_group + c
        at = [simplify(pos[k] * stride[k] + taps[k] * dilation[k] - begin[k]) for k in range(n)]
        inside = _inside(at, x.shape[2:])
        place, tap = (bi, channel, *at), (f, c, *taps)
        data = guarded(inside, lambda: data_of(x[place], place), 0)
        return data * weight_of(w[tap], tap)

    names = ["n", "f", *_SPACE[n - 1], "c", *(f"k{s}" for s in _SPACE[n - 1])]
    reduce_ = [per_group, *kernel]
    shape = [x.shape[0], features, *over.counts]
    needs = equal_extents((x.shape[1], per_group * group))
    return Loops(shape, body, x.dtype, reduce_, names=names, refusal=over.refusal, needs=needs)


def _biased(b: Tensor | None, features: Dim) -> list[tuple[Dim, Dim]]:
    return [] if b is None else [(b.shape[0], features)]


@contract
def ConvTranspose(
    x,
    w,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    output_shape=None,
    pads=None,
    strides=None,
):
    """Transposed convolution, gathered: which inputs reach an output element."""
    n = x.rank - 2
    kernel = [_static(d, "kernel") for d in w.shape[2:]]
    stride, dilation = list(strides or [1] * n), list(dilations or [1] * n)
    refuse_impossible(kernel_shape=kernel, strides=stride, dilations=dilation)
    refuse_impossible(least=0, pads=pads or ())
    refuse_other_kernel(kernel, kernel_shape)
    extra = list(output_padding or [0] * n)
    if auto_pad not in ("NOTSET", "", "VALID") or output_shape is not None:
        begin, spatial = _transposed_auto(x, kernel, stride, dilation, extra, auto_pad, output_shape)
    else:
        flat = list(pads) if pads is not None else [0] * (2 * n)
        begin, end = (flat[:n], flat[n:]) if auto_pad != "VALID" else ([0] * n, [0] * n)
        spatial = [
            as_dim((dim_expr(x.shape[2 + k]) - 1) * stride[k]
                   + (extra[k] + dilation[k] * (kernel[k] - 1) + 1 - begin[k] - end[k]))
            for k in range(n)
        ]  # fmt: skip
    per_group = _static(w.shape[1], "channels")
    inputs = _static(w.shape[0], "channels") // group

    def body(*i: Expr) -> Expr:
        bi, f, *rest = i
        pos, c, taps = rest[:n], rest[n], rest[n + 1 :]
        channel = c if group == 1 else (f // per_group) * inputs + c
        feature = f if group == 1 else f % per_group
        numer = [simplify(pos[k] + begin[k] - taps[k] * dilation[k]) for k in range(n)]
        at = [simplify(numer[k] // stride[k]) for k in range(n)]
        inside = _inside(at, x.shape[2:])
        for k in range(n):
            if stride[k] != 1:
                inside = inside & apply("eq", simplify(numer[k] % stride[k]), i64(0))
        data = guarded(simplify(inside), lambda: compute(x[(bi, channel, *at)]), 0)
        return data * compute(w[(channel, feature, *taps)])

    names = ["n", "f", *_SPACE[n - 1], "c", *(f"k{s}" for s in _SPACE[n - 1])]
    finish = None if b is None else (lambda acc, _n, f, *_: acc + compute(b[f]))
    shape = [x.shape[0], per_group * group, *spatial]
    needs = equal_extents((x.shape[1], inputs * group), *_biased(b, per_group * group))
    return Loops(shape, body, x.dtype, [inputs, *kernel], finish=finish, names=names, needs=needs)


def _transposed_auto(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    auto_pad: str,
    output_shape: Sequence[int] | None,
) -> tuple[list[int], list[Dim]]:
    """Padding at the begin and sizes. SAME makes d * stride elements, or all there are where a stride skips more."""
    begin: list[int] = []
    spatial: list[Dim] = []
    for k in range(len(kernel)):
        d = x.shape[2 + k]
        beyond = extra[k] + dilation[k] * (kernel[k] - 1) + 1 - stride[k]
        if output_shape is None:
            total = max(beyond, 0)
            spatial.append(as_dim(simplify(dim_expr(d) * stride[k] + (beyond - total))))
        elif isinstance(d, int):
            total = max(d * stride[k] + beyond - output_shape[k], 0)
            spatial.append(output_shape[k])
        else:
            raise Unsupported("UN_DATA_DEPENDENT", "ConvTranspose with an output_shape on a run-time dimension")
        half = total // 2
        begin.append(half if auto_pad == "SAME_UPPER" else total - half)
    return begin, spatial


def _inside(at: Sequence[Expr], shape: Sequence[Dim]) -> Expr:
    inside: Expr = lit(True, DType.BOOL)
    for e, d in zip(at, shape, strict=True):
        inside = inside & between(0, e, dim_expr(d))
    return simplify(inside)


@contract(since=11)
def Det(x):
    """Determinant of small square matrices, written out."""
    if x.shape[-1] not in (1, 2, 3) or x.shape[-2] != x.shape[-1]:
        return declined(x.shape[:-2], x.dtype, "UN_OPAQUE", f"Det of {x.shape[-2]} x {x.shape[-1]} matrices")
    n = x.shape[-1]

    def body(*i: Expr) -> Expr:
        a = [[compute(x[(*i, i64(r), i64(c))]) for c in range(n)] for r in range(n)]
        if n == 1:
            return a[0][0]
        if n == 2:
            return a[0][0] * a[1][1] - a[0][1] * a[1][0]
        pairs = [(1, 2), (0, 2), (0, 1)]
        minors = [a[0][c] * (a[1][p] * a[2][q] - a[1][q] * a[2][p]) for c, (p, q) in enumerate(pairs)]
        return minors[0] - minors[1] + minors[2]

    return Loops(x.shape[:-2], body, x.dtype)


def _static(d: Dim, what: str) -> int:
    if not isinstance(d, int):
        raise Unsupported("UN_DATA_DEPENDENT", f"run-time {what} extent {d}")
    return d


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Index names of every operand and of the result; the dimensions of an ellipsis are `...1` (last), `...2` ..."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise Unsupported("UN_ATTR", f"Einsum equation {equation!r} for {len(ranks)} operands")
    extra = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]
    if any(n < 0 or (n and "..." not in t) for t, n in zip(terms, extra, strict=True)):
        raise Unsupported("UN_SHAPE_MISMATCH", f"Einsum equation {equation!r} on ranks {list(ranks)}")
    if not arrow:
        letters = "".join(terms).replace(".", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))

    def names(term: str, dims: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f"...{k}" for k in range(dims if dots else 0, 0, -1)), *after]

    return [names(t, n) for t, n in zip(terms, extra, strict=True)], names(right, max(extra))


@contract(since=12)
def Einsum(*xs, equation):
    """Sum of products by index letters."""
    terms, right = _einsum_terms(equation, [x.rank for x in xs])
    extent: dict[str, Dim] = {}
    for term, x in zip(terms, xs, strict=True):
        for name, d in zip(term, x.shape, strict=True):
            extent[name] = broadcast_dims(extent.get(name, d), d)
    shape = [extent[c] for c in right]
    if len(xs) > 2:
        return declined(shape, xs[0].dtype, "UN_ATTR", f"Einsum of {len(xs)} operands is not implemented")
    summed = sorted({c for term in terms for c in term} - set(right))

    def body(*i: Expr) -> Expr:
        at = dict(zip([*right, *summed], i, strict=True))
        factors = []
        for term, x in zip(terms, xs, strict=True):
            point = [at[c] for c in term]
            index = broadcast_index(x.shape, point, [extent[c] for c in term])
            factors.append(compute(x[index]))
        return factors[0] if len(factors) == 1 else factors[0] * factors[1]

    names = [f"b{c[3:]}" if c.startswith("...") else c for c in (*right, *summed)]
    return Loops(shape, body, xs[0].dtype, [extent[c] for c in summed], names=names)
