"""Sums of products of bytes, taken in pairs: exact for every layout, size, zero point and target."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, cast, i64, lit, load, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Plan
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import Dim, tensor
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.schedule.integers import left_to_runtime
from onnxfuse.target import Target, by_name
from onnxfuse.templates.gemm import GEMM, contraction
from tests.templates.assembly import assembly
from tests.templates.contractions import anchored, conv_out, element

NATIVE = replace(by_name("native", host_features()), byte_dots=False)
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)  # LLVM splits what the CPU does not have
NARROW = by_name("x86-64-v2")
PLAIN = replace(NARROW, features=())  # no instruction for pairs
M, N, K = (sym(n) for n in "MNK")
I8, U8, I32 = DType.I8, DType.U8, DType.I32
SIZES = [
    *itertools.product((1, 6, 13), (4, 8, 15, 33), (1, 2, 7, 64)),
    (20, 40, 769), (97, 130, 64), (3, 300, 31), (0, 5, 6), (5, 0, 6), (5, 6, 0),
]  # fmt: skip


def steps(e: Expr, zero: Value | None) -> Expr:
    """The element in i32, less a zero point."""
    return cast(e, I32) if zero is None else cast(e, I32) - cast(load(zero, (), zero.tensor.dtype), I32)


def product(m: Dim, n: Dim, k: Dim, *, ta=False, tb=False, dtypes=(I8, I8), const="", zero=True) -> Kernel:
    """C[m, n] = sum of (A - za) * (B - zb), in i32."""
    am, an, ak = Axis("m", m), Axis("n", n), Axis("k", k)
    a = Value("A", tensor(dtypes[0], (k, m) if ta else (m, k)))
    b = Value("B", tensor(dtypes[1], (n, k) if tb else (k, n)))
    za, zb = (Value(f"Z{v.name}", tensor(v.tensor.dtype, ())) for v in (a, b))
    x = element(a, *((var(ak), var(am)) if ta else (var(am), var(ak))))
    y = element(b, *((var(an), var(ak)) if tb else (var(ak), var(an))))
    body = steps(x, za if zero else None) * steps(y, zb if zero else None)
    out = Value("C", tensor(I32, (m, n)))
    inputs = [a, b, *((za, zb) if zero else ())]
    consts = [v for v in (*inputs,) if v.name[-1] in const]
    return anchored("product", inputs, [am, an], [ak], body, out, consts=consts)


def compiled(kernel: Kernel, target: Target = NATIVE) -> Jitted:
    c = contraction(kernel)
    assert not isinstance(c, Refusal), c
    assert c.pairs is not None
    found = GEMM.propose(kernel, target)
    assert not isinstance(found, Refusal), found
    return jit(Plan(kernel, found[0], GEMM), target)


def numbers(shape: tuple[int, ...], dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """Bytes of the whole range, with many of the extreme ones."""
    info = np.iinfo(dtype.numpy)
    x = rng.integers(info.min, info.max + 1, shape).astype(dtype.numpy)
    return np.where(rng.random(shape) < 0.2, dtype.numpy.type(info.min), x)


def check(run: Jitted, sizes, dtypes=(I8, I8), ta=False, tb=False, zeros=(-5, 7), fence="") -> None:
    rng = np.random.default_rng(0)
    za, zb = (d.numpy.type(z % 128) if d is U8 else d.numpy.type(z) for z, d in zip(zeros, dtypes, strict=True))
    for m, n, k in sizes:
        a, b = numbers((m, k), dtypes[0], rng), numbers((k, n), dtypes[1], rng)
        inputs = [a.T.copy() if ta else a, b.T.copy() if tb else b, np.array(za), np.array(zb)]
        got = run(inputs[: len(run.plan.kernel.inputs)], seed=m, fence=fence)[0]
        x, y = a.astype(np.int32), b.astype(np.int32)
        if len(run.plan.kernel.inputs) > 2:
            x, y = x - int(za), y - int(zb)
        np.testing.assert_array_equal(got, x @ y, err_msg=f"{m} x {n} x {k}")


@pytest.mark.parametrize(("ta", "tb"), [*itertools.product((False, True), repeat=2)])
def test_every_size_around_the_tile_borders(ta: bool, tb: bool) -> None:
    check(compiled(product(M, N, K, ta=ta, tb=tb)), SIZES, ta=ta, tb=tb)


@pytest.mark.parametrize("target", [WIDE, NARROW, PLAIN], ids=["512 bits", "128 bits", "without pairs"])
def test_other_targets(target: Target) -> None:
    check(compiled(product(M, N, K), target), SIZES[::7])
    check(compiled(product(M, N, K, tb=True), target), SIZES[::9], tb=True)


@pytest.mark.parametrize("dtypes", [(U8, I8), (I8, U8), (U8, U8)], ids=str)
def test_unsigned_bytes(dtypes: tuple[DType, DType]) -> None:
    check(compiled(product(M, N, K, dtypes=dtypes)), SIZES[::5], dtypes)


@pytest.mark.parametrize(("n", "k"), [(37, 45), (64, 300), (16, 2)])
def test_constants_are_packed_at_creation(n: int, k: int) -> None:
    for zero in (False, True):
        check(compiled(product(M, n, k, const="B", zero=zero)), [(m, n, k) for m in (1, 4, 6, 29)])
        check(compiled(product(n, N, k, const="A", zero=zero)), [(n, m, k) for m in (4, 16, 61)])


def test_no_load_leaves_its_tensor() -> None:
    for ta, tb in itertools.product((False, True), repeat=2):
        run = compiled(product(M, N, K, ta=ta, tb=tb))
        for side in ("start", "end"):
            check(run, [(7, 19, 33), (6, 16, 8), (1, 5, 3), (13, 8, 2)], ta=ta, tb=tb, fence=side)


def convolution(channels: int, size: int, features: int, taps: int, step: int, pad: int, groups: int = 1) -> Kernel:
    """A convolution of bytes less a zero point, with constant weights, in i32."""
    per, out = channels // groups, conv_out(size, taps, step, 1, (pad, pad))
    x, w = Value("X", tensor(I8, (2, channels, size, size))), Value("W", tensor(I8, (features, per, taps, taps)))
    zero = Value("Z", tensor(I8, ()))
    an, af, ay, ax = (Axis(n, e) for n, e in zip("nfyx", (2, features, out, out), strict=True))
    c, ky, kx = Axis("c", per), Axis("ky", taps), Axis("kx", taps)
    at = [simplify(var(o) * step + var(t) - pad) for o, t in ((ay, ky), (ax, kx))]
    channel = (var(af) // i64(features // groups)) * per + var(c) if groups > 1 else var(c)
    value = steps(element(x, var(an), channel, *at), zero)
    for e in at if pad else ():
        value = where(simplify((i64(0) <= e) & (e < size)), value, lit(0, I32))
    body = value * cast(element(w, var(af), var(c), var(ky), var(kx)), I32)
    target = Value("Y", tensor(I32, (2, features, out, out)))
    return anchored("conv", [x, w, zero], [an, af, ay, ax], [c, ky, kx], body, target, consts=[w])


@pytest.mark.parametrize(
    ("channels", "size", "features", "taps", "step", "pad", "groups"),
    [
        (8, 9, 7, 3, 1, 1, 1), (3, 23, 20, 7, 2, 3, 1), (9, 9, 16, 1, 1, 0, 1), (64, 7, 32, 1, 2, 0, 1),
        (8, 12, 12, 3, 1, 1, 2), (12, 12, 12, 3, 2, 1, 3), (6, 30, 40, 5, 1, 0, 1),
    ],
)  # fmt: skip
def test_convolutions(channels: int, size: int, features: int, taps: int, step: int, pad: int, groups: int) -> None:
    run = compiled(convolution(channels, size, features, taps, step, pad, groups))
    rng = np.random.default_rng(1)
    x = numbers((2, channels, size, size), I8, rng)
    w = numbers((features, channels // groups, taps, taps), I8, rng)
    padded = np.pad(x.astype(np.int32) + 9, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    out = (size + 2 * pad - taps) // step + 1
    want = np.zeros((2, features, out, out), np.int32)
    for g, (r, s) in itertools.product(range(groups), np.ndindex(taps, taps)):
        rows, cols = (slice(o, o + (out - 1) * step + 1, step) for o in (r, s))
        of, to = (slice(g * n // groups, (g + 1) * n // groups) for n in (channels, features))
        want[:, to] += np.einsum("ncyx,fc->nfyx", padded[:, of, rows, cols], w[to, :, r, s].astype(np.int32))
    for fence in ("", "start", "end"):
        np.testing.assert_array_equal(run([x, w, np.array(-9, np.int8)], fence=fence)[0], want)


def test_instructions_for_signed_bytes_leave_them_to_onnxruntime() -> None:
    kernel = product(64, 64, 64)
    assert left_to_runtime(kernel, NATIVE) is None
    refused = left_to_runtime(kernel, replace(NATIVE, byte_dots=True))
    assert refused is not None
    assert refused.code == "INT_RUNTIME"


def test_rows_of_odd_groups_do_not_pair() -> None:
    """The pairs of the second group would begin in the middle of those of the first."""
    c = contraction(convolution(6, 9, 4, 3, 1, 1, groups=2))
    assert not isinstance(c, Refusal)
    assert c.pairs is None


def test_wide_integers_do_not_pair() -> None:
    c = contraction(product(64, 64, 64, dtypes=(I32, I8), zero=False))
    assert not isinstance(c, Refusal)
    assert c.pairs is None


def test_the_sum_wraps_as_the_sum_of_single_products_does() -> None:
    """-32768 * -32768 twice is one too many for i32."""
    rng = np.random.default_rng(2)
    a = np.where(rng.random((6, 64)) < 0.9, np.int16(-(1 << 15)), np.int16(3))
    run = compiled(product(M, N, K, dtypes=(DType.I16, DType.I16), zero=False))
    got = run([a, a.T.copy()])[0]
    np.testing.assert_array_equal(got, (a.astype(np.int64) @ a.T.astype(np.int64)).astype(np.int32))


@pytest.mark.parametrize(
    ("target", "added", "instruction"),
    [
        ("x86-64-v2", (), "pmaddwd"),
        ("x86-64-v3", (), "vpmaddwd"),
        ("x86-64-v3", ("avxvnni",), "vpdpwssd"),
        ("x86-64-v4", (), "vpmaddwd"),
        ("x86-64-v4", ("avx512vnni",), "vpdpwssd"),
        ("aarch64", (), "mla"),
    ],
)
def test_the_products_of_pairs_are_one_instruction(target: str, added: tuple[str, ...], instruction: str) -> None:
    row = by_name(target)
    row = replace(row, features=(*row.features, *added))
    kernel = product(96, 96, 96, const="B")
    assert instruction in assembly(kernel, GEMM, row)


def test_the_sums_of_a_tile_stay_in_registers() -> None:
    """LLVM would add the products of several steps first, and has no registers for them."""
    row = by_name("x86-64-v3")
    kernel = product(96, 96, 96, const="B")
    lines = assembly(kernel, GEMM, row).splitlines()
    products = [k for k, line in enumerate(lines) if "vpmaddwd" in line]
    near = [(a, b) for a, b in pairwise(products) if b - a < 8]  # within a loop over k
    assert near
    assert not [line for a, b in near for line in lines[a:b] if "(%rsp)" in line]
