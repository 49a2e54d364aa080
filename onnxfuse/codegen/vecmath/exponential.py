"""exp (and exp of what is never above 0), log, log1p, pow, the logistic function."""

from __future__ import annotations

import math

from onnxfuse.codegen.build import Reg
from onnxfuse.codegen.vecmath.coefficients import (
    EXP2_F32,
    EXP_F32,
    EXP_F64,
    LN2,
    LN2_F32,
    LN2_F64,
    LOG2E,
    LOG_F32,
    LOG_F64,
    POW_LOG,
    TWO_THIRDS,
)
from onnxfuse.codegen.vecmath.number import Num, pairs, poly, two_prod, two_sum


def _power(x: Num, bias: int) -> tuple[Num, Reg]:
    """(n, bits): n = x/ln 2 rounded to an integer; n + bias where a float has its exponent."""
    return _rounded(x, LOG2E, bias)


def _rounded(x: Num, scale: float, bias: int) -> tuple[Num, Reg]:
    mant = 23 if x.single else 52
    magic = 1.5 * 2.0**mant + bias
    t = x + magic if scale == 1.0 else x.fma(scale, magic)
    # Of the bits of t, the shift leaves n + bias alone.
    return t - magic, x.build.ir.shl(t.bits(), x.build.const(x.int_type, mant))


def _exp_fraction(r: Num) -> Num:
    """exp(r) - 1 for |r| <= 0.3475."""
    z = r * r
    return z.fma(pairs(r, z, EXP_F32 if r.single else EXP_F64), r)


def exp_core(x: Num, low: Num | None = None, bias: int = 0) -> Num:
    """2**bias * exp(x + low), |low| tiny; saturates to 0 and inf, NaN stays.

    The power of two is applied in two steps, so that subnormal results round once: 2**(n -+ half), then 2**+-half.
    """
    b, build = x.build.ir, x.build
    exp0, half = (127, 64) if x.single else (1023, 512)
    # Past these the result is 0 or inf even with the bias.
    c = x.at_most(90.0 if x.single else 712.0).at_least(-105.0 if x.single else -748.0)
    n, power = _power(c, 2 * exp0 + bias)
    r = _rest(c, n)
    if low is not None:
        r = r + low
    made = None if bias else build.scaled((_exp_fraction(r) + 1.0).reg, n.reg)
    if made is not None:
        return x.new(made)
    large = b.icmp_signed("<", power, build.const(x.int_type, 0))  # n >= 2 - bias reaches the sign bit
    step = x.pick(large, 2.0**half, 2.0**-half)
    s = x.from_bits(b.sub(power, step.bits()))
    return s.fma(_exp_fraction(r), s) * step


def _rest(x: Num, n: Num) -> Num:
    """X - n ln 2, of which the larger part is exact."""
    hi, lo = LN2_F32 if x.single else LN2_F64
    return n.fma(-lo, n.fma(-hi, x))


def tame_expm1(x: Num) -> Num:
    """exp(x) - 1, accurate near 0 too: f32, |x| < 30; NaN stays."""
    n, power = _power(x, 127)
    s = x.from_bits(power)
    # ln 2 in one piece: n times its error vanishes beside 1 where n is large.
    return s.fma(_exp_fraction(n.fma(-LN2, x)), s - 1.0)


def exp(x: Num) -> Num:
    return exp_core(x)


def decay(x: Num) -> Num:
    """exp(x) for x that is never above 0 (or is NaN): the same bits for less, since one bound and one scaling do."""
    exp0, half = (127, 64) if x.single else (1023, 512)
    c = x.at_least(-105.0 if x.single else -748.0)
    n, power = _power(c, exp0 + half)
    s = x.from_bits(power)
    return s.fma(_exp_fraction(_rest(c, n)), s) * 2.0**-half


def sigmoid(x: Num) -> Num:
    """1/(1 + exp(-x)) as one function: 1 + e forgives a tiny e, so one scaling does, and it merges with the sum.

    Where exp(-x) overflows the result is 0, as that of the single operations is.
    """
    exp0, half = (127, 64) if x.single else (1023, 512)
    # Below these the sum is 1, above them infinite.
    c = (-x).at_most(105.0 if x.single else 748.0).at_least(-30.0 if x.single else -50.0)
    n, power = _power(c, exp0 - half)
    s = x.from_bits(power)
    e = s.fma(_exp_fraction(_rest(c, n)), s)
    return 1.0 / e.fma(2.0**half, 1.0)


def small_exp2(x: Num) -> Num:
    """2**x for x <= -1, 0 from -127 on, off by 1e-7 of it: f32; NaN stays."""
    c = x.at_least(-127.0)
    n, power = _rounded(c, 1.0, 127)
    r = c - n
    return x.from_bits(power) * r.fma(poly(r, EXP2_F32), 1.0)


def decompose(x: Num) -> tuple[Num, Num]:
    """Split: x = m * 2**e with m in [sqrt(1/2), sqrt(2)); x > 0, subnormals included."""
    b, build, typ = x.build.ir, x.build, x.int_type
    mant, lift = (23, 25) if x.single else (52, 54)
    tiny = x.lt(2.0 ** (-126 if x.single else -1022))
    y = x.pick(tiny, x * 2.0**lift, x)
    i = y.bits()
    root = 0x3F3504F3 if x.single else 0x3FE6A09E667F3BCD  # sqrt(1/2)
    k = b.sub(i, build.const(typ, root))
    e = b.ashr(k, build.const(typ, mant))
    m = x.from_bits(b.sub(i, b.shl(e, build.const(typ, mant))))
    return m, _small_to_float(x, e) - x.pick(tiny, float(lift), 0.0)


def _small_to_float(x: Num, e: Reg) -> Num:
    """A small integer to float without i64 conversion (which vectors lack before AVX-512)."""
    b, build = x.build.ir, x.build
    if x.single:
        return x.new(b.sitofp(e, x.reg.type))
    magic = build.const(x.int_type, 0x4338000000000000)
    return x.from_bits(b.add(e, magic)) - 1.5 * 2.0**52


def log_core(m: Num, e: Num, low: Num | None = None) -> Num:
    """Compute log(m * 2**e) + low."""
    f = m - 1.0
    hi, lo = LN2_F32 if m.single else LN2_F64
    if m.single:
        z = f * f
        y = f * z * poly(f, LOG_F32)
        y = e.fma(lo, y)
        if low is not None:
            y = y + low
        y = z.fma(-0.5, y)
        return e.fma(hi, f + y)
    s = f / (f + 2.0)
    z = s * s
    half = 0.5 * f * f
    tail = s * (z * poly(z, LOG_F64) + half)
    tail = e.fma(lo, tail)
    if low is not None:
        tail = tail + low
    return e * hi + (f - (half - tail))


def _log_specials(x: Num, y: Num) -> Num:
    y = x.pick(x.eq(math.inf), math.inf, y)
    y = x.pick(x.eq(0.0), -math.inf, y)
    y = x.pick(x.lt(0.0), math.nan, y)
    return x.pick(x.isnan(), x, y)


def log(x: Num) -> Num:
    m, e = decompose(x)
    return _log_specials(x, log_core(m, e))


def log1p(x: Num) -> Num:
    w = x + 1.0
    # The rounding error of w, exactly, whichever of 1 and x is larger; not for infinite w.
    big = x.abs().gt(1.0)
    c = x.pick(big, 1.0 - (w - x), x - (w - 1.0))
    m, e = decompose(w)
    y = _log_specials(w, log_core(m, e, x.pick(w.eq(math.inf), 0.0, c / w)))
    tiny = x.abs().lt(2.0 ** (-26 if x.single else -55))  # keeps -0 and subnormals
    return x.pick(tiny, x, y)


def _log_pair(a: Num) -> tuple[Num, Num]:
    """Log of a as an unevaluated sum with about 68 good bits; 0 < a < inf."""
    m, e = decompose(a)
    f = m - 1.0
    w, wl = two_sum(a.new(a.of(2.0)), f)
    s = f / w
    p, pl = two_prod(s, w)
    sl = (((f - p) - pl) - s * wl) / w
    z, zl = two_prod(s, s)
    zl = zl + 2.0 * s * sl
    # log m = 2 s + s z (2/3 + z Q)
    c, cl = two_sum(a.new(a.of(TWO_THIRDS[0])), z * poly(z, POW_LOG))
    cl = cl + TWO_THIRDS[1]
    g, gl = two_prod(z, c)
    gl = gl + (z * cl + zl * c)
    h, hl = two_sum(a.new(a.of(2.0)), g)
    hl = hl + gl
    y, yl = two_prod(s, h)
    yl = yl + (s * hl + sl * h)
    big = e * LN2_F64[0]  # exact
    total = big + y
    v = total - big
    low = (big - (total - v)) + (y - v)  # Knuth: either may be larger
    low = low + (yl + e * LN2_F64[1])
    return two_sum(total, low)


def pow(x: Num, y: Num, short: bool) -> Num:
    b, build = x.build.ir, x.build
    a = x.abs()
    regular = b.and_(a.gt(0.0), a.lt(math.inf))
    base = x.pick(regular, a, 1.0)
    # Past 2**80 the power of anything but 1 is 0 or inf; keeps the products finite.
    top = 2.0**80
    power = y.at_most(top).at_least(-top)
    if short:
        m, e = decompose(base)
        value = exp_core(log_core(m, e) * power)
    else:
        hi, lo = _log_pair(base)
        ph, pl = two_prod(hi, power)
        pl = pl + lo * power
        ph, pl = two_sum(ph, pl)
        over = ph.abs().gt(800.0)
        value = exp_core(ph, x.pick(over, 0.0, pl))
    grows = b.icmp_unsigned("==", a.gt(1.0), y.gt(0.0))
    value = x.pick(regular, value, x.pick(grows, math.inf, 0.0))
    whole = y.eq(y.new(build.intrinsic("trunc", y.reg)))
    half = 0.5 * y
    odd = b.and_(b.and_(whole, b.not_(half.eq(half.new(build.intrinsic("trunc", half.reg))))), y.abs().lt(math.inf))
    negative = b.icmp_signed("<", x.bits(), build.const(x.int_type, 0))
    value = x.pick(b.and_(negative, odd), -value, value)
    undefined = b.and_(b.and_(x.lt(0.0), regular), b.not_(whole))
    value = x.pick(undefined, math.nan, value)
    value = x.pick(b.or_(x.isnan(), y.isnan()), x + y, value)
    minus_one = b.and_(x.eq(-1.0), y.abs().eq(math.inf))
    one = b.or_(b.or_(y.eq(0.0), x.eq(1.0)), minus_one)
    return x.pick(one, 1.0, value)
