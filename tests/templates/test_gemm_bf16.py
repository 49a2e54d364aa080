"""With bf16 weights a product of few rows is the f32 product of the rounded weights; all others are as ever."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import sym
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Plan
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.target import Target, by_name
from onnxfuse.templates.gemm import GEMM
from tests.templates.contractions import matmul

NATIVE = replace(by_name("native", host_features()), bf16_weights=True)
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)  # LLVM splits what the CPU does not have
NARROW = replace(by_name("x86-64-v2"), bf16_weights=True)


def compiled(kernel: Kernel, target: Target) -> Jitted:
    found = GEMM.propose(kernel, target)
    assert not isinstance(found, Refusal), found
    return jit(Plan(kernel, found[0], GEMM), target)


def product(run: Jitted, m: int, n: int, k: int, fence: str = "") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    return run([a, b], fence=fence)[0], a, b


def close(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Within the error bound of a sum in f32."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert (np.abs(got - x @ y) <= (a.shape[1] + 2) * np.finfo(np.float32).eps * (np.abs(x) @ np.abs(y))).all()


@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 130, 700), (2, 64, 333), (4, 33, 80), (3, 7, 500)])
def test_weights_of_few_rows_are_rounded_to_nearest(m: int, n: int, k: int, target: Target) -> None:
    run = compiled(matmul([], m, n, k, const="B"), target)
    for fence in ("", "start", "end"):
        got, a, b = product(run, m, n, k, fence)
        close(got, a, b.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("rows", [5, 64])
def test_more_rows_are_bound_by_arithmetic_and_keep_their_weights(rows: int) -> None:
    close(*product(compiled(matmul([], rows, 40, 300, const="B"), NATIVE), rows, 40, 300))


def test_an_unknown_number_of_rows_keeps_its_weights() -> None:
    close(*product(compiled(matmul([], sym("M"), 40, 300, const="B"), NATIVE), 1, 40, 300))


def test_factors_that_are_no_constants_are_not_rounded() -> None:
    close(*product(compiled(matmul([], 2, 130, 300), NATIVE), 2, 130, 300))


def test_weights_that_are_no_numbers_stay_what_they_are() -> None:
    run = compiled(matmul([], 1, 64, 200, const="B"), NATIVE)
    a, b = np.ones((1, 200), np.float32), np.ones((200, 64), np.float32)
    b[7, :4] = np.nan, np.inf, -np.inf, 3.4e38  # the last one rounds to infinity
    got = run([a, b])[0][0]
    assert np.isnan(got[0])
    np.testing.assert_array_equal(got[1:4], [np.inf, -np.inf, np.inf])
    np.testing.assert_array_equal(got[4:], 200)
