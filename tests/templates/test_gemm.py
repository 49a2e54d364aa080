"""The blocked matrix product agrees with numpy for every layout, size around the tile borders, dtype and epilogue."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.analysis.roles import Contraction, roles
from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, load, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Plan
from onnxfuse.ir.types import Dim, tensor
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.target import Target, by_name
from onnxfuse.templates.gemm import GEMM, contraction
from onnxfuse.templates.gemm_design import design
from onnxfuse.templates.microkernel import tile_cost, tile_for
from tests.templates.assembly import assembly
from tests.templates.contractions import anchored, element, matmul, random

NATIVE = by_name("native", host_features())
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)  # LLVM splits what the CPU does not have
NARROW = by_name("x86-64-v2")  # no fma, no masked loads
M, N, K, B = (sym(n) for n in "MNKB")


def compiled(kernel: Kernel, target: Target = NATIVE) -> Jitted:
    found = GEMM.propose(kernel, target)
    assert not isinstance(found, Refusal), found
    return jit(Plan(kernel, found[0], GEMM), target)


def close(got: np.ndarray, a: np.ndarray, b: np.ndarray, dtype: type = np.float32) -> None:
    """Within the error bound of a sum of K products in any order."""
    k = a.shape[-1]
    x, y = a.astype(np.float64), b.astype(np.float64)
    bound = (k + 2) * np.finfo(dtype).eps * (np.abs(x) @ np.abs(y)) + 1e-30
    assert got.shape == (x @ y).shape
    assert (np.abs(got.astype(np.float64) - x @ y) <= bound).all()


def operands(m: int, n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)


SIZES = [
    *itertools.product((1, 2, 3, 5, 6, 7, 12, 13), (1, 7, 8, 9, 15, 16, 17, 33), (1, 5)),
    *itertools.product((1, 6, 13), (1, 16, 25), (0, 2, 3, 4, 255, 256, 257, 520)),
    (97, 130, 64), (98, 257, 3), (1, 400, 30), (400, 1, 30), (0, 5, 6), (5, 0, 6),
]  # fmt: skip
LAYOUTS = [(ta, tb, tout) for ta in (False, True) for tb in (False, True) for tout in (False, True)]


@pytest.mark.parametrize(("ta", "tb", "tout"), LAYOUTS)
def test_every_size_around_the_tile_borders(ta: bool, tb: bool, tout: bool) -> None:
    run = compiled(matmul([], M, N, K, ta=ta, tb=tb, tout=tout))
    rng = np.random.default_rng(1)
    for m, n, k in SIZES:
        a, b = operands(m, n, k, rng)
        got = run([a.T.copy() if ta else a, b.T.copy() if tb else b])[0]
        close(got.T if tout else got, a, b)


@pytest.mark.parametrize("target", [WIDE, NARROW], ids=["512 bits", "128 bits without fma"])
def test_other_vector_widths(target: Target) -> None:
    rng = np.random.default_rng(2)
    for tb in (False, True):
        run = compiled(matmul([], M, N, K, tb=tb), target)
        for m, n, k in [*SIZES[::5], (29, 65, 40), (14, 32, 8), (15, 33, 8)]:
            a, b = operands(m, n, k, rng)
            close(run([a, b.T.copy() if tb else b])[0], a, b)


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_sums_stay_in_registers_over_k(name: str) -> None:
    """No step of k of a whole tile goes through the stack."""
    target = by_name(name)
    kernel = matmul([], 168, 96, 64, const="B")
    text = assembly(kernel, GEMM, target)
    tile = tile_for(target, DType.F32, 168, 96)
    steps = [b for b in re.split(r"\n[.\w]+:", text) if b.count("vfmadd") >= tile.mr * tile.nv]
    assert steps
    assert not [line for b in steps for line in b.splitlines() if "mm" in line and "(%rsp)" in line]


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_lines_are_asked_for_a_few_at_a_time(name: str) -> None:
    """A core has a dozen lines under way: what asks for more at once stands still."""
    target = by_name(name)
    kernel = matmul([], 96, 96, 64, const="A")
    text = assembly(kernel, GEMM, target)
    bursts = [b.count("prefetch") for b in re.split(r"vfmadd|\n[.\w]+:", text)]
    assert 0 < max(bursts) <= 12


def test_tiles_fit_the_sizes_that_are_known() -> None:
    wide = by_name("x86-64-v4")
    shapes = {(t.mr, t.nv): None for t in (tile_for(wide, DType.F32), tile_for(wide, DType.F32, 768, 3072))}
    assert list(shapes) == [(8, 3)]
    tile = tile_for(wide, DType.F32, 6, 128)
    assert (tile.mr, tile.nv) == (6, 4)
    assert tile_cost(tile, 6, 128) < tile_cost(tile_for(wide, DType.F32), 6, 128)


@pytest.mark.parametrize(("const", "depth"), [("A", 512), ("B", 1024)])
def test_no_tile_rests_where_the_depth_fits(const: str, depth: int) -> None:
    for k in (depth, depth + 1):
        kernel = matmul([], 100, 200, k, const=const)
        c = contraction(kernel)
        assert isinstance(c, Contraction)
        assert design(c, kernel, NATIVE).single is (k == depth)


@pytest.mark.parametrize("const", ["A", "B"])
@pytest.mark.parametrize(("n", "k"), [(37, 45), (64, 300)])
def test_constant_operands_are_packed_once(const: str, n: int, k: int) -> None:
    kernel = matmul([], n if const == "A" else M, M if const == "A" else n, k, const=const)
    run = compiled(kernel)
    assert run.fast.pack is not None
    rng = np.random.default_rng(3)
    for m in (1, 4, 6, 19, 130):
        a, b = operands(n if const == "A" else m, m if const == "A" else n, k, rng)
        close(run([a, b])[0], a, b)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("const", ["", "B"])
def test_few_rows(m: int, const: str) -> None:
    run = compiled(matmul([], m, 150, 300, const=const))
    a, b = operands(m, 150, 300, np.random.default_rng(4))
    close(run([a, b])[0], a, b)


@pytest.mark.parametrize("tb", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(("m", "const"), [(40, ""), (40, "A"), (40, "B"), (3, ""), (3, "B")])
def test_rounding_does_not_grow_with_the_length_of_the_sum(m: int, const: str, tb: bool) -> None:
    """One after the other, 65536 numbers of 0.1 sum up with an error of 6e-4."""
    k = 1 << 16
    b = np.full((20, k) if tb else (k, 20), 0.1, np.float32)
    (got,) = compiled(matmul([], m, 20, k, tb=tb, const=const))([np.ones((m, k), np.float32), b])
    np.testing.assert_allclose(got, np.full((m, 20), k * float(np.float32(0.1))), rtol=1e-4)


@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits"])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_few_rows_times_a_transposed_operand(m: int, target: Target) -> None:
    rng = np.random.default_rng(14)
    for n, k in ((150, 300), (sym("N"), sym("K")), (64, 1700)):
        run = compiled(matmul([], m, n, k, tb=True), target)
        for columns, depth in (
            [(n, k)] if isinstance(n, int) and isinstance(k, int) else [(1, 9), (8, 8), (13, 0), (40, 770)]
        ):
            a, b = operands(m, columns, depth, rng)
            close(run([a, b.T.copy()])[0], a, b)


@pytest.mark.parametrize("left", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits"])
def test_few_columns_left_beside_constant_rows(left: int, target: Target) -> None:
    rng = np.random.default_rng(15)
    for m, n, k in ((50, 64 + left, 90), (13, 32 + left, 1000), (200, 128 + left, 7)):
        a, b = operands(m, n, k, rng)
        close(compiled(matmul([], m, n, k, const="A"), target)([a, b])[0], a, b)


@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits"])
@pytest.mark.parametrize("m", [1, 5, 13, 50])
def test_few_columns_beside_constant_rows_known_at_run_time(m: int, target: Target) -> None:
    rng = np.random.default_rng(16)
    run = compiled(matmul([], m, N, 70, const="A"), target)
    for n in range(1, 40):
        a, b = operands(m, n, 70, rng)
        close(run([a, b])[0], a, b)


def test_an_epilogue_after_few_columns_takes_no_lanes_that_nobody_wrote() -> None:
    run = compiled(matmul([], 13, N, 70, const="A", epilogue=lambda x, at: apply("exp", x * 0.1)))
    rng = np.random.default_rng(18)
    for n in (1, 2, 3, 5, 17, 50):
        a, b = operands(13, n, 70, rng)
        np.testing.assert_allclose(run([a, b])[0], np.exp(a.astype(np.float64) @ b * 0.1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_product_of_few_columns_streams_its_constant_rows(n: int) -> None:
    a, b = operands(130, n, 300, np.random.default_rng(17))
    close(compiled(matmul([], 130, n, 300, const="A"))([a, b])[0], a, b)


FENCED = [
    matmul([], M, N, K), matmul([], M, N, K, tb=True), matmul([], M, N, K, ta=True), matmul([3], 40, 65, 70),
    matmul([3], 2, 45, 70, tb=True), matmul([], 3, 45, 70), matmul([], 45, 65, 40, const="A"),
    matmul([], 45, N, 40, const="A"), matmul([], 130, 3, 70, const="A"),
    matmul([], 60, 65, 40, const="B"), matmul([], 60, 70, 40, tout=True), matmul([], 1, 300, 300, const="B"),
]  # fmt: skip


@pytest.mark.parametrize("side", ["start", "end"])
def test_nothing_outside_of_the_tensors_is_touched(side: str) -> None:
    sizes = {M: 13, N: 35, K: 21}
    rng = np.random.default_rng(16)
    for kernel in FENCED:
        arrays = random(kernel, rng, sizes)
        assert np.array_equal(compiled(kernel)(arrays, fence=side)[0], compiled(kernel)(arrays)[0])


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(("shared_a", "shared_b"), [(False, False), (False, True), (True, False)])
def test_batches(tb: bool, shared_a: bool, shared_b: bool) -> None:
    kernel = matmul([B, 3], M, 20, K, tb=tb, shared_a=shared_a, shared_b=shared_b)
    run = compiled(kernel)
    rng = np.random.default_rng(5)
    for batch, m, k in [(0, 4, 5), (1, 4, 5), (2, 13, 70)]:
        a = rng.standard_normal((m, k) if shared_a else (batch, 3, m, k)).astype(np.float32)
        b = rng.standard_normal((k, 20) if shared_b else (batch, 3, k, 20)).astype(np.float32)
        got = run([a, np.swapaxes(b, -1, -2).copy() if tb else b])[0]
        close(got, np.broadcast_to(a, (batch, 3, m, k)), np.broadcast_to(b, (batch, 3, k, 20)))


def test_the_order_of_tasks_does_not_change_a_bit() -> None:
    run = compiled(matmul([], 200, 300, 600))
    a, b = operands(200, 300, 600, np.random.default_rng(6))
    first = run([a, b])[0]
    for seed in (1, 2):
        assert np.array_equal(first, run([a, b], seed=seed, shift=4)[0])


def test_the_product_may_stand_in_either_order() -> None:
    run = compiled(matmul([], 30, 40, 50, flip=True))
    a, b = operands(30, 40, 50, np.random.default_rng(7))
    close(run([a, b])[0], a, b)


@pytest.mark.parametrize("tout", [False, True])
def test_epilogue_with_biases_residual_and_a_diamond(tout: bool) -> None:
    row, col = Value("row", tensor(DType.F32, [M])), Value("col", tensor(DType.F32, [N]))
    rest = Value("rest", tensor(DType.F32, [N, M] if tout else [M, N]))

    def epilogue(x: Expr, at: tuple[Expr, ...]) -> Expr:
        m, n = reversed(at) if tout else at
        y = x + element(row, m) + element(col, n)
        return y / (1.0 + apply("exp", -y)) + element(rest, *at)

    kernel = matmul([], M, N, 40, tout=tout, epilogue=epilogue, extra=[row, col, rest])
    run = compiled(kernel)
    rng = np.random.default_rng(8)
    for m, n in [(1, 1), (6, 16), (13, 35), (100, 40)]:
        a, b = operands(m, n, 40, rng)
        r, c = rng.standard_normal(m).astype(np.float32), rng.standard_normal(n).astype(np.float32)
        z = rng.standard_normal((m, n)).astype(np.float32)
        got = run([a, b, r, c, z.T.copy() if tout else z])[0]
        y = a.astype(np.float64) @ b + r[:, None] + c
        np.testing.assert_allclose(got.T if tout else got, y / (1 + np.exp(-y)) + z, rtol=1e-4, atol=1e-5)


def test_f64() -> None:
    run = compiled(matmul([], 20, 30, 50, dtype=DType.F64))
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((20, 50)), rng.standard_normal((50, 30))
    close(run([a, b])[0], a, b, np.float64)


@pytest.mark.parametrize("const", ["", "A", "B"])
@pytest.mark.parametrize("tb", [False, True])
def test_epilogue_too_long_to_be_unrolled(const: str, tb: bool) -> None:
    """Tiles rest before it, whether K is one block or several."""
    bias = Value("bias", tensor(DType.F32, [33]))

    def epilogue(x: Expr, at: tuple[Expr, ...]) -> Expr:
        y = x + element(bias, at[1])
        return y * (apply("erf", apply("tanh", y)) + 1.0)

    rng = np.random.default_rng(3)
    for k in (40, 1000):
        rows: int | Expr = 25 if const == "A" or k == 40 else M
        run = compiled(matmul([], rows, 33, k, tb=tb, const=const, epilogue=epilogue, extra=[bias]))
        for m in (25,) if isinstance(rows, int) else (1, 6, 25, 200):
            a, b = operands(m, 33, k, rng)
            a /= k**0.5
            c = rng.standard_normal(33).astype(np.float32)
            y = a.astype(np.float64) @ b + c
            want = y * (np.vectorize(math.erf)(np.tanh(y)) + 1)
            given = [a, np.ascontiguousarray(b.T) if tb else b, c]
            np.testing.assert_allclose(run(given)[0], want, rtol=1e-4, atol=1e-5)
            run(given, seed=m, fence="end")


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("const", ["", "B"])
def test_half_precision_accumulates_in_f32(dtype: DType, const: str) -> None:
    run = compiled(matmul([], M, 30, 50, dtype=dtype, acc_dtype=DType.F32, const=const))
    rng = np.random.default_rng(10)
    a, b = (x.astype(dtype.numpy) for x in operands(21, 30, 50, rng))
    got = run([a, b])[0].astype(np.float64)
    want = a.astype(np.float64) @ b.astype(np.float64)
    eps = 2.0**-10 if dtype is DType.F16 else 2.0**-7
    assert (np.abs(got - want) <= eps * np.abs(want) + 1e-4).all()


def test_integers_are_exact() -> None:
    kernel = matmul([], M, N, 50, dtype=DType.I8, acc_dtype=DType.I32)
    out = Value("C", tensor(DType.I32, [M, N]))
    store = replace(kernel.stages[0].stores[0], target=out, value=kernel.stages[0].stores[0].value.args[0])  # type: ignore[attr-defined]
    kernel = replace(kernel, outputs=(out,), stages=(replace(kernel.stages[0], stores=(store,)),))
    run = compiled(kernel)
    rng = np.random.default_rng(11)
    a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((13, 50), (50, 35)))
    assert np.array_equal(run([a, b])[0], a.astype(np.int32) @ b.astype(np.int32))


def test_a_pointwise_prologue_is_evaluated_while_packing() -> None:
    m, n, k = Axis("m", M), Axis("n", N), Axis("k", K)
    a, b = Value("A", tensor(DType.F32, [M, K])), Value("B", tensor(DType.F32, [K, N]))
    x = element(a, var(m), var(k))
    y = element(b, var(k), var(n))
    body = apply("max", x, 0.0) * (y * y + 1.0)
    kernel = anchored("mm", [a, b], [m, n], [k], body, Value("C", tensor(DType.F32, [M, N])))
    p, q = operands(33, 50, 70, np.random.default_rng(12))
    close(compiled(kernel)([p, q])[0], np.maximum(p, 0), q * q + 1)


PANELS = [(17, 16, 40), (64, 49, 64), (50, 196, 800), (200, 33, 400), (23, 15, 30), (130, 64, 385)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("side", ["start", "end"])
def test_a_panel_is_packed_by_its_first_tile(static: bool, side: str) -> None:
    for m, n, k in PANELS:
        kernel = matmul([], m, n, k, const="A") if static else matmul([], M, N, K)
        run = compiled(kernel)
        a, b = operands(m, n, k, np.random.default_rng(m))
        got = run([a, b], fence=side)[0]
        close(got, a, b)
        assert np.array_equal(got, run([a, b], seed=3, shift=4)[0])


@pytest.mark.parametrize(("m", "n", "k"), [(64, 49, 70), (50, 130, 800)])
def test_a_scaled_and_clipped_operand_is_evaluated_by_the_first_tile(m: int, n: int, k: int) -> None:
    am, an, ak = Axis("m", m), Axis("n", n), Axis("k", k)
    a, b = Value("A", tensor(DType.F32, [m, k])), Value("B", tensor(DType.F32, [k, n]))
    scale, shift = (Value(name, tensor(DType.F32, [k])) for name in ("scale", "shift"))
    y = element(b, var(ak), var(an)) * element(scale, var(ak)) + element(shift, var(ak))
    body = element(a, var(am), var(ak)) * apply("max", y, 0.0)
    out = Value("C", tensor(DType.F32, [m, n]))
    kernel = anchored("mm", [a, b], [am, an], [ak], body, out, consts=[a], extra=[scale, shift])
    p, q = operands(m, n, k, np.random.default_rng(13))
    s, t = (np.random.default_rng(i).standard_normal(k).astype(np.float32) for i in (1, 2))
    got = compiled(kernel)([p, q, s, t], fence="end")[0]
    close(got, p, np.maximum(q * s[:, None] + t[:, None], 0))


JOINED = [
    (64, 49, (37, 5, 28), DType.F32), (9, 33, (1, 69), DType.F32), (40, N, (10, 20, 30, 10), DType.F32),
    (30, 47, (3, 0, 67), DType.F64), (20, 16, (300, 500), DType.F32),
]  # fmt: skip


@pytest.mark.parametrize(("m", "n", "parts", "dtype"), JOINED)
def test_rows_of_an_operand_may_come_from_several_values(m: int, n: Dim, parts: tuple[int, ...], dtype: DType) -> None:
    k = sum(parts)
    for scaled in (False, True):
        b, am, an, ak = Axis("b", B), Axis("m", m), Axis("n", n), Axis("k", k)
        a, scale = Value("A", tensor(dtype, [m, k])), Value("scale", tensor(dtype, [k]))
        sources = [Value(f"B{i}", tensor(dtype, [B, size, n])) for i, size in enumerate(parts)]
        ends = list(itertools.accumulate(parts))
        joined = element(sources[-1], var(b), var(ak) - (k - parts[-1]), var(an))
        for v, end, size in list(zip(sources, ends, parts, strict=True))[-2::-1]:
            joined = where(var(ak) < end, element(v, var(b), var(ak) - (end - size), var(an)), joined)
        y = apply("max", joined * element(scale, var(ak)), 0.0) if scaled else joined
        body = element(a, var(am), var(ak)) * y
        out = Value("C", tensor(dtype, [B, m, n]))
        kernel = anchored("mm", [a, *sources], [b, am, an], [ak], body, out, consts=[a], extra=[scale])
        rng, real = np.random.default_rng(14), dtype.numpy
        p, s = rng.standard_normal((m, k)).astype(real), rng.standard_normal(k).astype(real)
        q = rng.standard_normal((2, k, 50 if n is N else n)).astype(real)
        pieces = [np.ascontiguousarray(x) for x in np.split(q, ends[:-1], axis=1)]
        want = np.maximum(q * s[:, None], 0) if scaled else q
        run = compiled(kernel)
        for side in ("start", "end"):
            close(run([p, *pieces, s], fence=side)[0], p, want, real)


def test_a_batch_that_broadcasts_at_run_time_is_addressed_so() -> None:
    b0, m, n, k = Axis("b", B), Axis("m", M), Axis("n", 20), Axis("k", 30)
    q = sym("Q")
    a, b = Value("A", tensor(DType.F32, [B, M, 30])), Value("B", tensor(DType.F32, [q, 30, 20]))
    at = apply("bcast", var(b0), q)
    body = element(a, var(b0), var(m), var(k)) * load(b, (at, var(k), var(n)), DType.F32)
    kernel = anchored("mm", [a, b], [b0, m, n], [k], body, Value("C", tensor(DType.F32, [B, M, 20])))
    run = compiled(kernel)
    rng = np.random.default_rng(13)
    for size in (1, 3):
        x = rng.standard_normal((3, 9, 30)).astype(np.float32)
        y = rng.standard_normal((size, 30, 20)).astype(np.float32)
        close(run([x, y])[0], x, np.broadcast_to(y, (3, 30, 20)))


def test_rows_of_several_axes_are_one_axis_where_memory_allows() -> None:
    merged = roles(matmul([B], M, 64, 32, shared_b=True))
    assert isinstance(merged, Contraction)
    assert not merged.batch
    assert len(merged.rows.parts) == 2


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        (matmul([], 4, 8, 8), "GEMM_SMALL"),
        (matmul([], 300, 2, 300), "GEMM_NARROW"),
        (matmul([], 64, 64, 64, dtype=DType.I64), "GEMM_DTYPE"),
    ],
)
def test_refusals(kernel: Kernel, code: str) -> None:
    found = GEMM.propose(kernel, NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == code


def test_a_reduction_that_is_no_product_is_refused() -> None:
    m, k = Axis("m", M), Axis("k", K)
    a = Value("A", tensor(DType.F32, [M, K]))
    kernel = anchored("sum", [a], [m], [k], element(a, var(m), var(k)), Value("C", tensor(DType.F32, [M])))
    found = GEMM.propose(kernel, NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == "GEMM_PRODUCT"
