"""Makes kernels that are contractions, in the normal form anchor+epilogue, as the op table writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import FALSE, TRUE, Expr, Lit, Sym, acc, cast, i64, lit, load, substitute, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.simplify import as_dim, dim_expr, simplify
from onnxfuse.ir.types import Dim, tensor

Epilogue = Callable[[Expr, tuple[Expr, ...]], Expr]


@dataclass(frozen=True)
class Case:
    """A kernel with the values to feed it."""

    kernel: Kernel


def dims(*names: str) -> tuple[Sym, ...]:
    return tuple(sym(n) for n in names)


def bindings(values: Sequence[Value]) -> tuple[DimBinding, ...]:
    """Bind every Sym from the first input dimension that is just that Sym."""
    found: dict[Sym, DimBinding] = {}
    for v in values:
        for d, extent in enumerate(v.tensor.shape):
            if isinstance(extent, Sym) and extent not in found:
                found[extent] = DimBinding(extent, v, d)
    return tuple(found.values())


def anchored(
    name: str,
    inputs: Sequence[Value],
    outer: Sequence[Axis],
    k: Sequence[Axis],
    body: Expr,
    out: Value,
    epilogue: Epilogue | None = None,
    consts: Sequence[Value] = (),
    index: tuple[Expr, ...] | None = None,
    extra: Sequence[Value] = (),
    combine: str = "add",
    init: Lit | None = None,
) -> Kernel:
    """sum over k of body, then the epilogue (value, output index) -> value."""
    red = Reduce(tuple(k), PRIMS[combine], lit(0, body.dtype) if init is None else init, body.dtype)
    at = tuple(var(a) for a in outer) if index is None else index
    every = (*inputs, *extra)
    final: Expr = acc(body.dtype)
    if epilogue is None:
        value = cast(final, out.tensor.dtype)
        stages: tuple[Stage, ...] = (Stage((), (Store(out, at, value),), red, body),)
        locals_: tuple[Local, ...] = ()
    else:
        local = Value(f"{name}.sum", tensor(out.tensor.dtype, ()))
        locals_ = (Local(local),)
        first = Stage((), (Store(local, (), cast(final, out.tensor.dtype)),), red, body)
        value = epilogue(load(local, (), out.tensor.dtype), at)
        stages = (first, Stage((), (Store(out, at, value),)))
    return Kernel(
        name, tuple(every), (out,), tuple(outer), stages, locals_, frozenset(consts), bindings(every), (), (), (name,)
    )


def element(v: Value, *index: Expr) -> Expr:
    return load(v, tuple(simplify(i) for i in index), v.tensor.dtype)


def matmul(
    batch: Sequence[Dim], m: Dim, n: Dim, k: Dim, *, ta: bool = False, tb: bool = False, tout: bool = False,
    const: str = "", dtype: DType = DType.F32, acc_dtype: DType | None = None, epilogue: Epilogue | None = None,
    extra: Sequence[Value] = (), shared_b: bool = False, shared_a: bool = False, flip: bool = False,
) -> Kernel:  # fmt: skip
    """C[batch, m, n] = sum A * B, with operands transposed, shared over the batch, in either order."""
    work = acc_dtype or dtype
    bs = [Axis(f"b{i}", d) for i, d in enumerate(batch)]
    am, an, ak = Axis("m", m), Axis("n", n), Axis("k", k)
    lead_a, lead_b = ([] if shared_a else bs), ([] if shared_b else bs)
    a = Value("A", tensor(dtype, [*(x.extent for x in lead_a), *((k, m) if ta else (m, k))]))
    b = Value("B", tensor(dtype, [*(x.extent for x in lead_b), *((n, k) if tb else (k, n))]))
    out = Value("C", tensor(dtype, [*batch, *((n, m) if tout else (m, n))]))
    la = cast(element(a, *map(var, lead_a), *((var(ak), var(am)) if ta else (var(am), var(ak)))), work)
    lb = cast(element(b, *map(var, lead_b), *((var(an), var(ak)) if tb else (var(ak), var(an)))), work)
    body = lb * la if flip else la * lb
    outer = [*bs, *((an, am) if tout else (am, an))]
    consts = [v for v in (a, b) if v.name in const]
    return anchored("matmul", [a, b], outer, [ak], body, out, epilogue, consts, extra=extra)


def conv_out(size: Dim, kernel: int, stride: int, dilation: int, pads: tuple[int, int]) -> Dim:
    return as_dim((dim_expr(size) + pads[0] + pads[1] - dilation * (kernel - 1) - 1) // i64(stride) + 1)


def conv(
    n: Dim, channels: int, size: Sequence[Dim], features: int, window: Sequence[int], *,
    strides: Sequence[int] | None = None, dilations: Sequence[int] | None = None,
    pads: Sequence[tuple[int, int]] | None = None, groups: int = 1, const: bool = True, dtype: DType = DType.F32,
    epilogue: Epilogue | None = None, extra: Sequence[Value] = (), prologue: Callable[[Expr], Expr] | None = None,
) -> Kernel:  # fmt: skip
    """Convolution of any rank."""
    rank = len(size)
    s, d = list(strides or [1] * rank), list(dilations or [1] * rank)
    p = list(pads or [(0, 0)] * rank)
    outs = [conv_out(size[i], window[i], s[i], d[i], p[i]) for i in range(rank)]
    cg, fg = channels // groups, features // groups
    x = Value("X", tensor(dtype, [n, channels, *size]))
    w = Value("W", tensor(dtype, [features, cg, *window]))
    out = Value("Y", tensor(dtype, [n, features, *outs]))
    an, af = Axis("n", n), Axis("f", features)
    sp = [Axis("zyx"[3 - rank + i], outs[i]) for i in range(rank)]
    c, ks = Axis("c", cg), [Axis("k" + "zyx"[3 - rank + i], window[i]) for i in range(rank)]
    at = [simplify(var(sp[i]) * s[i] + var(ks[i]) * d[i] - p[i][0]) for i in range(rank)]
    channel = var(c) if groups == 1 else (var(af) // i64(fg)) * cg + var(c)
    value = element(x, var(an), channel, *at)
    if prologue is not None:
        value = prologue(value)
    ok: Expr = TRUE
    for i in range(rank):
        if p[i] != (0, 0):
            ok = ok & simplify(i64(0) <= at[i]) & simplify(at[i] < dim_expr(size[i]))
    assert ok is not FALSE
    value = where(ok, value, lit(0, dtype))
    body = value * element(w, var(af), var(c), *map(var, ks))
    return anchored(
        "conv", [x, w], [an, af, *sp], [c, *ks], body, out, epilogue, [w] if const else [], extra=extra
    )  # fmt: skip


def pool(
    n: Dim, channels: Dim, size: Sequence[Dim], window: Sequence[int], *, combine: str = "max",
    strides: Sequence[int] | None = None, dilations: Sequence[int] | None = None,
    pads: Sequence[tuple[int, int]] | None = None, epilogue: Epilogue | None = None,
) -> Kernel:  # fmt: skip
    """Max pooling, or (combine="add") the sum over each window."""
    rank = len(size)
    s, d = list(strides or [1] * rank), list(dilations or [1] * rank)
    p = list(pads or [(0, 0)] * rank)
    outs = [conv_out(size[i], window[i], s[i], d[i], p[i]) for i in range(rank)]
    init = lit(float("-inf") if combine == "max" else 0.0, DType.F32)
    x = Value("X", tensor(DType.F32, [n, channels, *size]))
    out = Value("Y", tensor(DType.F32, [n, channels, *outs]))
    an, ac = Axis("n", n), Axis("c", channels)
    sp = [Axis("zyx"[3 - rank + i], outs[i]) for i in range(rank)]
    ks = [Axis("k" + "zyx"[3 - rank + i], window[i]) for i in range(rank)]
    at = [simplify(var(sp[i]) * s[i] + var(ks[i]) * d[i] - p[i][0]) for i in range(rank)]
    ok: Expr = TRUE
    for i in range(rank):
        if p[i] != (0, 0):
            ok = ok & simplify(i64(0) <= at[i]) & simplify(at[i] < dim_expr(size[i]))
    body = where(ok, element(x, var(an), var(ac), *at), init)
    return anchored("pool", [x], [an, ac, *sp], ks, body, out, epilogue, combine=combine, init=init)


def random(kernel: Kernel, rng: np.random.Generator, sizes: dict[Sym, int] | None = None) -> list[np.ndarray]:
    """An array for each input."""
    out = []
    for v in kernel.inputs:
        shape = tuple(concrete(d, sizes or {}) for d in v.tensor.shape)
        if v.tensor.dtype.is_int:
            out.append(rng.integers(-8, 8, shape).astype(v.tensor.dtype.numpy))
        else:
            out.append(rng.standard_normal(shape).astype(v.tensor.dtype.numpy))
    return out


def concrete(d: Dim, sizes: dict[Sym, int]) -> int:
    """A dimension for given run-time sizes."""
    if isinstance(d, int):
        return d
    e = simplify(substitute(d, {s: i64(n) for s, n in sizes.items()}))
    assert isinstance(e, Lit), e
    return int(e.value)


@dataclass(frozen=True)
class Setting:
    """What a convolution does; makes its kernel."""

    window: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[tuple[int, int]]
    groups: int = 1

    def kernel(
        self, n: Dim, channels: int, size: Sequence[Dim], features: int, *, const: bool = True,
        epilogue: Epilogue | None = None, extra: Sequence[Value] = (),
        prologue: Callable[[Expr], Expr] | None = None,
    ) -> Kernel:  # fmt: skip
        return conv(
            n, channels, size, features, self.window, strides=self.strides, dilations=self.dilations, pads=self.pads,
            groups=self.groups, const=const, epilogue=epilogue, extra=extra, prologue=prologue,
        )  # fmt: skip


def convolve(x: np.ndarray, w: np.ndarray, s: Setting) -> np.ndarray:
    """The convolution in f64 by explicit loops over taps."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    rank = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *s.pads])
    features, cg = w.shape[:2]
    fg = features // s.groups
    outs = [(x.shape[2 + i] - s.dilations[i] * (w.shape[2 + i] - 1) - 1) // s.strides[i] + 1 for i in range(rank)]
    y = np.zeros([x.shape[0], features, *outs])
    for tap in np.ndindex(*w.shape[2:]):
        first = [tap[i] * s.dilations[i] for i in range(rank)]
        cut = tuple(slice(first[i], first[i] + (outs[i] - 1) * s.strides[i] + 1, s.strides[i]) for i in range(rank))
        part = x[(slice(None), slice(None), *cut)]
        for g in range(s.groups):
            here = w[(slice(g * fg, (g + 1) * fg), slice(None), *tap)]
            y[:, g * fg : (g + 1) * fg] += np.einsum("nc...,fc->nf...", part[:, g * cg : (g + 1) * cg], here)
    return y


def within(got: np.ndarray, x: np.ndarray, w: np.ndarray, s: Setting) -> None:
    """`got` is the convolution within the error bound of its sums in any order."""
    want = convolve(x, w, s)
    depth = int(np.prod(w.shape[1:]))
    bound = (depth + 2) * np.finfo(np.float32).eps * convolve(np.abs(x), np.abs(w), s) + 1e-30
    assert got.shape == want.shape
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()
