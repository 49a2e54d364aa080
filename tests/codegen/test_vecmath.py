"""Vector math keeps the promised error, over the whole range, and C's special values; scalar and vector code agree."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from onnxfuse.codegen.vecmath.table import GELU_ERROR, MATH, MAX_ULP, UNARY
from onnxfuse.ir.dtypes import DType
from onnxfuse.target import Target
from tests.codegen.machines import MACHINES, Scrap, lower_all

NUMPY = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
}  # fmt: skip
SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.0, 5e-324, -5e-324, 1e-310, 1e-45, -1e-45,
    1e-38, 3e38, 1e308, 6381956970095103 * 2.0**797,  # the double closest to a multiple of pi/2
]  # fmt: skip
STEP = 1 << 13  # every STEP-th f32 bit pattern; 1 for all of them (slow test)


@functools.cache
def compiled(target: Target, dtype: DType) -> tuple[Scrap, int]:
    lanes = target.lanes(dtype.bytes)
    pieces = {}
    for name in MATH:
        for n in (lanes, 1):
            args = [dtype] * (2 if name == "pow" else 1)
            pieces[f"{name}.{n}"] = (args, dtype, n, lambda b, regs, f=MATH[name]: f(b, *regs))
    return lower_all(target, pieces), lanes


def reference(name: str, x: np.ndarray) -> np.ndarray:
    """In f64 for f32 arguments, in 80 bits for f64 arguments."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    with np.errstate(all="ignore"):
        if name == "sigmoid":
            e = np.exp(-x.astype(wide))
            return 1 / (1 + np.where(e > np.finfo(x.dtype).max, np.inf, e))
        if name == "erf":
            return np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64))
        return getattr(np, NUMPY.get(name, name))(x.astype(wide))


def check(name: str, got: np.ndarray, exact: np.ndarray, limit: float, x: np.ndarray) -> None:
    dtype = got.dtype
    with np.errstate(all="ignore"):
        want = exact.astype(dtype)
    assert np.array_equal(np.isnan(got), np.isnan(want)), (name, x[np.isnan(got) != np.isnan(want)][:4])
    infinite = np.isinf(want) | np.isinf(got)
    assert np.array_equal(got[infinite], want[infinite]), (name, x[infinite][got[infinite] != want[infinite]][:4])
    zero = (got == 0) & (want == 0)
    assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero])), name
    plain = ~infinite & ~np.isnan(want)
    info = np.finfo(dtype)
    r = exact[plain].astype(np.longdouble)
    with np.errstate(all="ignore"):
        e = np.where(r == 0, info.minexp, np.floor(np.log2(np.abs(np.where(r == 0, 1, r)))))
    ulp = np.ldexp(np.longdouble(1), (np.maximum(e, info.minexp) - info.nmant).astype(int))
    error = np.abs(got[plain].astype(np.longdouble) - r) / ulp
    worst = int(error.argmax())
    assert error[worst] <= limit, f"{name}({x[plain][worst]!r}) is off by {float(error[worst]):.2f} ulp"


def both_widths(target: Target, name: str, args: list[np.ndarray], dtype: DType) -> np.ndarray:
    scrap, lanes = compiled(target, dtype)
    wide, single = scrap(f"{name}.{lanes}", args, dtype), scrap(f"{name}.1", args, dtype)
    assert np.array_equal(wide, single, equal_nan=True), f"{name}: lanes change the result"
    return wide


def patterns(step: int, start: int = 0, count: int = 1 << 32) -> np.ndarray:
    bits = np.arange(start, start + count, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        extra = np.array(SPECIAL).astype(np.float32)
    x = np.concatenate([extra, bits])
    return np.resize(x, -(-len(x) // 16) * 16)


@pytest.mark.parametrize("name", [*UNARY, "sigmoid"])
@pytest.mark.parametrize("target", MACHINES)
def test_f32_error_over_sampled_bit_patterns(target, name):
    x = patterns(STEP + 3)
    with np.errstate(all="ignore"):  # signalling NaNs among the patterns
        check(name, both_widths(target, name, [x], DType.F32), reference(name, x), MAX_ULP[name][0], x)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNARY, "sigmoid"])
def test_f32_error_over_all_bit_patterns(name):
    target = MACHINES[1].values[0]
    for start in range(0, 1 << 32, 1 << 24):
        x = patterns(1, start, 1 << 24)
        with np.errstate(all="ignore"):
            check(name, both_widths(target, name, [x], DType.F32), reference(name, x), MAX_ULP[name][0], x)


def f64_samples(rng: np.random.Generator, n: int) -> np.ndarray:
    parts = [
        np.array(SPECIAL),
        rng.integers(0, 1 << 64, n, dtype=np.uint64).view(np.float64),
        rng.standard_normal(n) * np.exp2(rng.integers(-6, 7, n)),
        1 + rng.standard_normal(n) * np.exp2(rng.integers(-40, 0, n).astype(float)),
        rng.uniform(-1, 1, n),
        rng.integers(1, 1 << 20, n) * (math.pi / 2),
        rng.uniform(-746, 711, n),
    ]
    x = np.concatenate(parts)
    return np.resize(x, -(-len(x) // 16) * 16)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="the oracle is 80-bit long double")
@pytest.mark.parametrize("name", [*UNARY, "sigmoid"])
@pytest.mark.parametrize("target", MACHINES)
def test_f64_error_over_samples(target, name, rng):
    x = f64_samples(rng, 16_000)
    exact = reference(name, x)
    slack = 1.0 if name == "erf" else 0.1  # error of the oracle itself
    with np.errstate(all="ignore"):
        check(name, both_widths(target, name, [x], DType.F64), exact, MAX_ULP[name][1] + slack, x)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
@pytest.mark.parametrize("target", MACHINES)
def test_pow_error_and_special_cases(target, dtype, rng):
    points = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 4.0, 0.999, 1.0001, math.inf, -math.inf, math.nan,
              5e-324, 1e300, -1e300, 1e16, 9007199254740991.0, -9007199254740991.0]  # fmt: skip
    px, py = (a.ravel() for a in np.meshgrid(points, points))
    n = 4000
    x = np.concatenate([np.abs(rng.standard_normal(n)), np.exp2(rng.uniform(-100, 100, n)), rng.uniform(0.99, 1.01, n)])
    top = 709 if dtype is DType.F64 else 88
    with np.errstate(all="ignore"):
        y = np.where(rng.random(3 * n) < 0.3, rng.uniform(-4, 4, 3 * n), rng.uniform(-top, top, 3 * n) / np.log(x))
        x = np.resize(np.concatenate([px, x]), 12_800).astype(dtype.numpy)
        y = np.resize(np.concatenate([py, y]), 12_800).astype(dtype.numpy)
        wide = np.longdouble if dtype is DType.F64 else np.float64
        exact = np.power(x.astype(wide), y.astype(wide))
        got = both_widths(target, "pow", [x, y], dtype)
        limit = MAX_ULP["pow"][dtype is DType.F64] + 0.5  # long double powers are off by a fraction of a double's ulp
        check("pow", got, exact, limit, x)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64])
@pytest.mark.parametrize("target", MACHINES)
def test_decay_has_the_bits_of_exp_wherever_it_may_be_used(target, dtype, rng):
    x = patterns(STEP + 5) if dtype is DType.F32 else f64_samples(rng, 16_000)
    x = np.where(x > 0, -x, x)
    with np.errstate(all="ignore"):
        got, want = (both_widths(target, name, [x], dtype) for name in ("decay", "exp"))
    assert np.array_equal(got, want, equal_nan=True)
    assert (got[x == -math.inf] == 0).all()
    assert np.isnan(got[np.isnan(x)]).all()


@pytest.mark.parametrize("target", MACHINES)
def test_gelu_keeps_its_error_and_the_special_values_of_its_parts(target):
    x = patterns(STEP + 3)
    with np.errstate(all="ignore"):
        got = both_widths(target, "gelu", [x], DType.F32)
        wide = np.where(np.isnan(x), 0, x).astype(np.float64)
        exact = wide * (0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-wide / math.sqrt(2)))
    nan = np.isnan(x) | (x == -math.inf)  # -inf * (1 - 1)
    assert np.array_equal(np.isnan(got), nan)
    assert (got[x == math.inf] == math.inf).all()
    assert np.array_equal(np.signbit(got[~nan]), np.signbit(x[~nan]))
    plain = np.isfinite(x)
    error, room = np.abs(got[plain] - exact[plain]), GELU_ERROR * np.abs(wide[plain]) + 2.0**-149
    assert (error <= room).all(), x[plain][(error / room).argmax()]
    near = plain & (x < 0) & (x > -3)
    assert np.allclose(got[near], exact[near], rtol=4e-6, atol=2.0**-149)  # 1 + erf is off by ten times that


def test_every_function_states_its_error():
    assert set(MATH) == set(MAX_ULP) | {"gelu"} == {*UNARY, "decay", "pow", "sigmoid", "gelu"}
