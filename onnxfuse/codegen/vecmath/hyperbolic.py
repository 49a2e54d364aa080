"""sinh, cosh, tanh and their inverses; erf and what is made of it."""

from __future__ import annotations

import math

from onnxfuse.codegen.vecmath.coefficients import ERF_F32, ERF_F64, ERF_TAIL_F64, NORMAL_F32, SINH, TANH_F64
from onnxfuse.codegen.vecmath.exponential import decompose, exp_core, log1p, log_core, small_exp2, tame_expm1
from onnxfuse.codegen.vecmath.number import Num, pairs, poly


def tanh(x: Num) -> Num:
    a = x.abs()
    if x.single:
        e = tame_expm1((a + a).at_most(20.0))
        return (e / (e + 2.0)).sign_of(x)
    z = x * x
    small = (x * z).fma(poly(z, TANH_F64), x)
    big = 1.0 - 2.0 / (exp_core(a.at_most(22.0) * 2.0) + 1.0)
    return x.pick(a.lt(0.625), small, big).sign_of(x)


def erf(x: Num) -> Num:
    a = x.abs()
    if x.single:
        t = a.at_most(3.93)
        z = t * t
        return tame_expm1(t.fma(pairs(t, z, ERF_F32), -t)).sign_of(x)
    z = x * x
    small = x.fma(poly(z, ERF_F64), x)
    t = a.at_most(6.0)
    u = (t - 2.0) / (t + 2.0)
    big = 1.0 - exp_core(-(t * t)) * poly(u, ERF_TAIL_F64)
    return x.pick(a.lt(1.0), small, big.sign_of(x))


def gelu(x: Num) -> Num:
    """X Phi(x), Phi(x) = (1 + erf(x / sqrt(2)))/2, as one function: one power of two, and no cancellation below 0."""
    if not x.single:
        return (0.5 * x) * (erf(x * math.sqrt(0.5)) + 1.0)
    a = x.abs()
    below = small_exp2(a.fma(poly(a, NORMAL_F32), -1.0))  # Phi(-a)
    return x * x.pick(x.lt(0.0), below, 1.0 - below)


def sinh(x: Num) -> Num:
    a = x.abs()
    z = x * x
    small = (x * z).fma(poly(z, SINH), x)
    e = exp_core(a, bias=-1)
    big = e - 0.25 / e
    return x.pick(a.lt(1.0), small, big.sign_of(x))


def cosh(x: Num) -> Num:
    e = exp_core(x.abs(), bias=-1)
    return e + 0.25 / e


def asinh(x: Num) -> Num:
    a = x.abs()
    big = a.gt(2.0**28)
    t = x.pick(big, 1.0, a)
    z = t * t
    near = log1p(t + z / (1.0 + (z + 1.0).sqrt()))
    m, e = decompose(a)
    far = x.pick(a.eq(math.inf), a, log_core(m, e + 1.0))
    y = x.pick(big, far, near)
    y = x.pick(x.isnan(), x, y)
    return x.pick(a.lt(2.0**-28), x, y.sign_of(x))


def acosh(x: Num) -> Num:
    big = x.gt(2.0**28)
    t = x.pick(big, 1.0, x - 1.0)
    near = log1p(t + (2.0 * t + t * t).sqrt())
    m, e = decompose(x)
    far = x.pick(x.eq(math.inf), x, log_core(m, e + 1.0))
    y = x.pick(big, far, near)
    return x.pick(x.lt(1.0), math.nan, y)


def atanh(x: Num) -> Num:
    a = x.abs()
    y = 0.5 * log1p(2.0 * a + (2.0 * a * a) / (1.0 - a))
    y = x.pick(a.eq(1.0), math.inf, y)
    y = x.pick(a.gt(1.0), math.nan, y)
    return x.pick(a.lt(2.0**-28), x, y.sign_of(x))
