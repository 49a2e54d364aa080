"""Vector math: exp, log, erf ... for f32 and f64, scalars and vectors through the same code, without library calls.

Method: range reduction, then a polynomial. exp, log, log1p, tanh and erf run in the type of the argument; the others
run in f64 (an f32 result is then correctly rounded but for rare near-ties). Large arguments of sin, cos and
tan are reduced with 2/pi to 1280 bits (Payne and Hanek) in one scalar helper function per module, called only when some
lane needs it. Special values follow C: NaN in NaN out, signed zeros kept, poles give signed infinities.

`MAX_ULP` states the largest error found in units in the last place; tests/codegen/test_vecmath.py samples it.

Coefficients: interpolation at Chebyshev nodes, in 60 digits (mpmath), of the functions given beside each table, on the
interval given there; then rounded to double. Interpolants are within a few per cent of minimax at these degrees.
ERF_F32 is a minimax fit (Lawson's iteration) of the error of erf itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from onnxfuse.codegen.build import F32, F64, I32, I64, I128, Builder, Reg, lanes_of, scalar_of, vec

UNARY = (
    "exp", "log", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
)  # fmt: skip

# Largest error in ULP of the result: (f32, f64). With FMA; targets without it may add half an ULP.
MAX_ULP: dict[str, tuple[float, float]] = {
    "exp": (1.5, 2.0), "log": (1.5, 2.0), "log1p": (2.0, 3.0), "sin": (1.0, 2.0), "cos": (1.0, 2.0), "tan": (1.0, 4.0),
    "asin": (1.0, 3.0), "acos": (1.0, 3.0), "atan": (1.0, 2.0), "sinh": (1.0, 4.0), "cosh": (1.0, 3.0),
    "tanh": (3.0, 4.0), "asinh": (1.0, 4.0), "acosh": (1.0, 4.0), "atanh": (1.0, 4.0), "erf": (2.5, 3.0),
    "pow": (1.0, 4.0), "sigmoid": (2.5, 3.0),
}  # fmt: skip

# (exp(r) - 1 - r)/r^2 on +-0.3475
EXP_F32 = (
    0.5, 0.16666576062275124, 0.04166655345865175, 0.008363333082182943, 0.001392637599580353,
)  # fmt: skip
EXP_F64 = (
    0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333325985, 0.0013888888888883642, 0.00019841269875342141,
    2.4801587325920163e-05, 2.7557254740405416e-06, 2.7557273171941026e-07, 2.5105490906986696e-08,
    2.091488256348507e-09,
)  # fmt: skip
# (log(1+f) - f + f^2/2)/f^3 on [sqrt(1/2)-1, sqrt(2)-1]
LOG_F32 = (
    0.33333333281199246, -0.24999990275042186, 0.20000010039684973, -0.16668001523071926, 0.14286524547786641,
    -0.12450743320911725, 0.1103778335905502, -0.10646191638199634, 0.10530864738938345, -0.06201500119018334,
)  # fmt: skip
# (log((1+s)/(1-s))/s - 2)/z, z = s^2 on [0, 0.0295]
LOG_F64 = (
    0.666666666666667, 0.3999999999989819, 0.28571428626570206, 0.2222221103781659, 0.18182896183483085,
    0.15331487235865734, 0.14619343453512615,
)  # fmt: skip
# ((log((1+s)/(1-s))/s - 2)/z - 2/3)/z, z = s^2 on [0, 0.0295]
POW_LOG = (
    0.4000000000000003, 0.2857142857133739, 0.2222222227161022, 0.18181808164729227, 0.15385580823628317,
    0.1328575731452747, 0.12916088513173332,
)  # fmt: skip
# (tanh(x) - x)/x^3 of z = x^2 on [0, 0.3907]
TANH_F64 = (
    -0.3333333333333333, 0.13333333333333042, -0.05396825396789636, 0.02186948851898143, -0.008863235102653483,
    0.0035921217436959856, -0.0014557753532096296, 0.0005896603606552671, -0.0002375896885211701,
    9.256923588512033e-05, -3.119892666773488e-05, 6.484104982405479e-06,
)  # fmt: skip
# log(erfc(a))/a on [0, 3.93]
ERF_F32 = (
    -0.1283791716112748, -0.6366193819680726, -0.10277783049629952, 0.01915306387369417, 0.00016039609968324098,
    -0.0016670274803127771, 0.0006328368600799772, -0.00011764127156105308, 9.256265087964621e-06,
)  # fmt: skip
# erf(x)/x - 1 of z = x^2 on [0, 1]
ERF_F64 = (
    0.1283791670955126, -0.3761263890318375, 0.11283791670954879, -0.026866170645076792, 0.0052239776248180145,
    -0.000854832698083379, 0.0001205533111164271, -1.4925595266831182e-05, 1.6461000484121368e-06,
    -1.6350312701054695e-07, 1.4659775274047436e-08, -1.1372848856791674e-09, 5.957176147748911e-11,
)  # fmt: skip
# exp(x^2) erfc(x) of u = (x-2)/(x+2) on [-1/3, 1/2]
ERF_TAIL_F64 = (
    0.25539567631050575, -0.4271858474139584, 0.24165819424246635, -0.07897858101573307, 0.003732892404344617,
    0.006997461739289359, -0.0008471432519791012, -0.0009819770300382499, 4.355563625422083e-05,
    0.0001743612301523324, 2.7524858073592343e-05, -2.758040999497952e-05, -1.3961435485530436e-05,
    1.3933694614170019e-06, 3.749252793129386e-06, 1.1954890930098656e-06, -4.114710965297881e-07,
    -5.143808653845284e-07, -1.363330829462481e-07, 9.610629801816115e-08, 5.5122843241217635e-08,
)  # fmt: skip
# (sin(r) - r)/r^3 of z = r^2 on [0, 0.6169]
SIN_F32 = (
    -0.16666666663854385, 0.008333331874358352, -0.0001984008654531293, 2.724990115829391e-06,
)  # fmt: skip
# (cos(r) - 1 + z/2)/z^2 of z = r^2 on [0, 0.6169]
COS_F32 = (
    0.04166666666432045, -0.0013888887671723142, 2.4800600218521467e-05, -2.730093863463587e-07,
)  # fmt: skip
SIN_F64 = (
    -0.16666666666666666, 0.008333333333333331, -0.00019841269841265063, 2.7557319219337672e-06,
    -2.5052106231927857e-08, 1.6058531536611833e-10, -7.586692262094344e-13,
)  # fmt: skip
COS_F64 = (
    0.041666666666666664, -0.0013888888888888887, 2.4801587301584645e-05, -2.7557319221401993e-07,
    2.087675579079147e-09, -1.1470460841811526e-11, 4.7458692024108734e-14,
)  # fmt: skip
# (atan(t) - t)/t^3 of z = t^2 on [0, 0.17158]
ATAN = (
    -0.3333333333333333, 0.19999999999999804, -0.14285714285659806, 0.11111111105153429, -0.09090908753400499,
    0.07692296372129964, -0.06666424833613552, 0.05878928398517232, -0.052304498567092406, 0.04551573086664191,
    -0.034570044186095536, 0.016285183029865667,
)  # fmt: skip
# (asin(t) - t)/t^3 of z = t^2 on [0, 0.25]
ASIN = (
    0.16666666666666669, 0.07499999999998433, 0.04464285714635543, 0.030381944138531247, 0.02237217294214989,
    0.017352392720869973, 0.013971212973552933, 0.011479177415184906, 0.01032281435018578, 0.005457506718640358,
    0.01740087944269402, -0.014851887071247204, 0.028757851367421566,
)  # fmt: skip
# (sinh(x) - x)/x^3 of z = x^2 on [0, 1]
SINH = (
    0.16666666666666666, 0.008333333333333333, 0.00019841269841269773, 2.755731922404034e-06, 2.505210836405804e-08,
    1.6059048396350562e-10, 7.646625361656657e-13, 2.8445264169895285e-15,
)  # fmt: skip
# 2/pi, 1280 bits after the binary point
TWO_OVER_PI = (
    0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0,
    0x6492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4,
    0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D,
    0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB, 0xF0CFBC209AF4361D,
)  # fmt: skip

_LOG2E = 1.4426950408889634
_TWO_OVER_PI = 0.6366197723675814
_PIO2_HI, _PIO2_LO = 1.5707963267948966, 6.123233995736766e-17
_PIO4_HI, _PIO4_LO = 0.7853981633974483, 3.061616997868383e-17
# pi/2 and ln 2 in pieces whose leading ones have zeros at the end, so that small multiples of them are exact
_PIO2_PARTS = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487111665e-21, 8.4784276603689e-32)
_PIO2_SHORT = (1.5707963267341256, 6.077100506506192e-11)
_LN2 = 0.6931471805599453
_LN2_F64 = (0.6931471803691238, 1.9082149292705877e-10)
_LN2_F32 = (0.693145751953125, 1.4286068203094173e-06)
_TWO_THIRDS = (0.6666666666666666, 3.700743415417188e-17)


@dataclass(frozen=True, slots=True)
class _Num:
    """A float register with operators, so that formulas read like formulas. Numbers become constants."""

    build: Builder
    reg: Reg

    def of(self, other: _Num | float) -> Reg:
        return other.reg if isinstance(other, _Num) else self.build.like(self.reg, float(other))

    def new(self, reg: Reg) -> _Num:
        return _Num(self.build, reg)

    def __add__(self, o: _Num | float) -> _Num:
        return self.new(self.build.ir.fadd(self.reg, self.of(o)))

    def __radd__(self, o: float) -> _Num:
        return self.new(self.build.ir.fadd(self.of(o), self.reg))

    def __sub__(self, o: _Num | float) -> _Num:
        return self.new(self.build.ir.fsub(self.reg, self.of(o)))

    def __rsub__(self, o: float) -> _Num:
        return self.new(self.build.ir.fsub(self.of(o), self.reg))

    def __mul__(self, o: _Num | float) -> _Num:
        return self.new(self.build.ir.fmul(self.reg, self.of(o)))

    __rmul__ = __mul__

    def __truediv__(self, o: _Num | float) -> _Num:
        return self.new(self.build.ir.fdiv(self.reg, self.of(o)))

    def __rtruediv__(self, o: float) -> _Num:
        return self.new(self.build.ir.fdiv(self.of(o), self.reg))

    def __neg__(self) -> _Num:
        return self.new(self.build.ir.fneg(self.reg))

    def fma(self, b: _Num | float, c: _Num | float) -> _Num:
        """Compute self*b + c."""
        return self.new(self.build.fma(self.reg, self.of(b), self.of(c)))

    def abs(self) -> _Num:
        return self.new(self.build.intrinsic("fabs", self.reg))

    def sqrt(self) -> _Num:
        return self.new(self.build.intrinsic("sqrt", self.reg))

    def sign_of(self, o: _Num) -> _Num:
        """This magnitude with the sign of `o`."""
        return self.new(self.build.intrinsic("copysign", self.reg, o.reg))

    def lt(self, o: _Num | float) -> Reg:
        return self.build.ir.fcmp_ordered("<", self.reg, self.of(o))

    def gt(self, o: _Num | float) -> Reg:
        return self.build.ir.fcmp_ordered(">", self.reg, self.of(o))

    def eq(self, o: _Num | float) -> Reg:
        return self.build.ir.fcmp_ordered("==", self.reg, self.of(o))

    def isnan(self) -> Reg:
        return self.build.ir.fcmp_unordered("uno", self.reg, self.reg)

    def at_most(self, top: float) -> _Num:
        """Minimum with a number; NaN stays NaN."""
        return self.pick(self.build.ir.fcmp_ordered("<", self.of(top), self.reg), top, self)

    def at_least(self, low: float) -> _Num:
        """Maximum with a number; NaN stays NaN."""
        return self.pick(self.build.ir.fcmp_ordered(">", self.of(low), self.reg), low, self)

    def pick(self, cond: Reg, yes: _Num | float, no: _Num | float) -> _Num:
        """Select, in the type of this number."""
        return self.new(self.build.ir.select(cond, self.of(yes), self.of(no)))

    @property
    def single(self) -> bool:
        return bool(scalar_of(self.reg.type) == F32)

    @property
    def int_type(self) -> ir.Type:
        return vec(I32 if self.single else I64, lanes_of(self.reg))

    def bits(self) -> Reg:
        return self.build.ir.bitcast(self.reg, self.int_type)

    def from_bits(self, bits: Reg) -> _Num:
        """A number of this type from its bit pattern."""
        return self.new(self.build.ir.bitcast(bits, self.reg.type))


def _poly(x: _Num, coefficients: Sequence[float]) -> _Num:
    """Horner's rule, lowest coefficient first."""
    out = x.new(x.of(coefficients[-1]))
    for c in reversed(coefficients[:-1]):
        out = out.fma(x, c)
    return out


def _two_prod(a: _Num, b: _Num) -> tuple[_Num, _Num]:
    """Product as an unevaluated sum, exactly (Dekker's splitting where there is no FMA)."""
    p = a * b
    if a.build.has_fma:
        return p, a.fma(b, -p)
    ah, al = _halves(a)
    bh, bl = _halves(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _halves(a: _Num) -> tuple[_Num, _Num]:
    """Split a into the sum of two numbers with half the digits (f64), by clearing the low half of the bits."""
    b = a.build.ir
    high = a.from_bits(b.and_(a.bits(), a.build.const(a.int_type, -(1 << 27))))
    return high, a - high


def _two_sum(a: _Num, b: _Num) -> tuple[_Num, _Num]:
    """Sum as an unevaluated sum, exact when |a| >= |b|."""
    s = a + b
    return s, b - (s - a)


# ---- exp ----


def _power(x: _Num, bias: int) -> tuple[_Num, Reg]:
    """(n, bits): n = x/ln 2 rounded to an integer; n + bias where a float has its exponent."""
    mant = 23 if x.single else 52
    magic = 1.5 * 2.0**mant + bias
    t = x.fma(_LOG2E, magic)
    # Of the bits of t, the shift leaves n + bias alone.
    return t - magic, x.build.ir.shl(t.bits(), x.build.const(x.int_type, mant))


def _exp_fraction(r: _Num) -> _Num:
    """exp(r) - 1 for |r| <= 0.3475."""
    z = r * r
    return z.fma(_pairs(r, z, EXP_F32 if r.single else EXP_F64), r)


def _pairs(x: _Num, square: _Num, coefficients: Sequence[float]) -> _Num:
    """Horner's rule in the square, for pairs of coefficients: as many operations, half the latency."""
    out: _Num | None = None
    for k in reversed(range(0, len(coefficients), 2)):
        pair = coefficients[k : k + 2]
        low = x.fma(pair[1], pair[0]) if len(pair) == 2 else None
        if out is None:
            out = x.new(x.of(pair[0])) if low is None else low
        else:
            assert low is not None
            out = out.fma(square, low)
    assert out is not None
    return out


def _exp_core(x: _Num, low: _Num | None = None, bias: int = 0) -> _Num:
    """2**bias * exp(x + low), |low| tiny; saturates to 0 and inf, NaN stays.

    The power of two is applied in two steps, so that subnormal results round once: 2**(n -+ half), then 2**+-half.
    """
    b, build = x.build.ir, x.build
    exp0, half = (127, 64) if x.single else (1023, 512)
    # Past these the result is 0 or inf even with the bias.
    c = x.at_most(90.0 if x.single else 712.0).at_least(-105.0 if x.single else -748.0)
    n, power = _power(c, 2 * exp0 + bias)
    hi, lo = _LN2_F32 if x.single else _LN2_F64
    r = n.fma(-lo, n.fma(-hi, c))
    if low is not None:
        r = r + low
    large = b.icmp_signed("<", power, build.const(x.int_type, 0))  # n >= 2 - bias reaches the sign bit
    step = x.pick(large, 2.0**half, 2.0**-half)
    s = x.from_bits(b.sub(power, step.bits()))
    return s.fma(_exp_fraction(r), s) * step


def _tame_expm1(x: _Num) -> _Num:
    """exp(x) - 1, accurate near 0 too: f32, |x| < 30; NaN stays."""
    n, power = _power(x, 127)
    s = x.from_bits(power)
    # ln 2 in one piece: n times its error vanishes beside 1 where n is large.
    return s.fma(_exp_fraction(n.fma(-_LN2, x)), s - 1.0)


def _exp(x: _Num) -> _Num:
    return _exp_core(x)


def _sigmoid(x: _Num) -> _Num:
    """1/(1 + exp(-x)) as one function: 1 + e forgives a tiny e, so one scaling does, and it merges with the sum.

    Where exp(-x) overflows the result is 0, as that of the single operations is.
    """
    exp0, half = (127, 64) if x.single else (1023, 512)
    # Below these the sum is 1, above them infinite.
    c = (-x).at_most(105.0 if x.single else 748.0).at_least(-30.0 if x.single else -50.0)
    n, power = _power(c, exp0 - half)
    hi, lo = _LN2_F32 if x.single else _LN2_F64
    s = x.from_bits(power)
    e = s.fma(_exp_fraction(n.fma(-lo, n.fma(-hi, c))), s)
    return 1.0 / e.fma(2.0**half, 1.0)


# ---- log ----


def _decompose(x: _Num) -> tuple[_Num, _Num]:
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


def _small_to_float(x: _Num, e: Reg) -> _Num:
    """A small integer to float without i64 conversion (which vectors lack before AVX-512)."""
    b, build = x.build.ir, x.build
    if x.single:
        return x.new(b.sitofp(e, x.reg.type))
    magic = build.const(x.int_type, 0x4338000000000000)
    return x.from_bits(b.add(e, magic)) - 1.5 * 2.0**52


def _log_core(m: _Num, e: _Num, low: _Num | None = None) -> _Num:
    """Compute log(m * 2**e) + low."""
    f = m - 1.0
    hi, lo = _LN2_F32 if m.single else _LN2_F64
    if m.single:
        z = f * f
        y = f * z * _poly(f, LOG_F32)
        y = e.fma(lo, y)
        if low is not None:
            y = y + low
        y = z.fma(-0.5, y)
        return e.fma(hi, f + y)
    s = f / (f + 2.0)
    z = s * s
    half = 0.5 * f * f
    tail = s * (z * _poly(z, LOG_F64) + half)
    tail = e.fma(lo, tail)
    if low is not None:
        tail = tail + low
    return e * hi + (f - (half - tail))


def _log_specials(x: _Num, y: _Num) -> _Num:
    y = x.pick(x.eq(math.inf), math.inf, y)
    y = x.pick(x.eq(0.0), -math.inf, y)
    y = x.pick(x.lt(0.0), math.nan, y)
    return x.pick(x.isnan(), x, y)


def _log(x: _Num) -> _Num:
    m, e = _decompose(x)
    return _log_specials(x, _log_core(m, e))


def _log1p(x: _Num) -> _Num:
    w = x + 1.0
    # The rounding error of w, exactly, whichever of 1 and x is larger; not for infinite w.
    big = x.abs().gt(1.0)
    c = x.pick(big, 1.0 - (w - x), x - (w - 1.0))
    m, e = _decompose(w)
    y = _log_specials(w, _log_core(m, e, x.pick(w.eq(math.inf), 0.0, c / w)))
    tiny = x.abs().lt(2.0 ** (-26 if x.single else -55))  # keeps -0 and subnormals
    return x.pick(tiny, x, y)


# ---- tanh, erf ----


def _tanh(x: _Num) -> _Num:
    a = x.abs()
    if x.single:
        e = _tame_expm1((a + a).at_most(20.0))
        return (e / (e + 2.0)).sign_of(x)
    z = x * x
    small = (x * z).fma(_poly(z, TANH_F64), x)
    big = 1.0 - 2.0 / (_exp_core(a.at_most(22.0) * 2.0) + 1.0)
    return x.pick(a.lt(0.625), small, big).sign_of(x)


def _erf(x: _Num) -> _Num:
    a = x.abs()
    if x.single:
        t = a.at_most(3.93)
        z = t * t
        return _tame_expm1(t.fma(_pairs(t, z, ERF_F32), -t)).sign_of(x)
    z = x * x
    small = x.fma(_poly(z, ERF_F64), x)
    t = a.at_most(6.0)
    u = (t - 2.0) / (t + 2.0)
    big = 1.0 - _exp_core(-(t * t)) * _poly(u, ERF_TAIL_F64)
    return x.pick(a.lt(1.0), small, big.sign_of(x))


# ---- sin, cos, tan (f64) ----


def _trig(x: _Num, short: bool) -> tuple[_Num, _Num, Reg]:
    """(sin r, cos r, q) with x = q*pi/2 + r, |r| <= pi/4; `short`: only an f32 result is wanted."""
    r, low, q = _reduce_trig(x, short)
    z = r * r
    if short:
        s = (r * z).fma(_poly(z, SIN_F32), r)
        c = (z * z).fma(_poly(z, COS_F32), z.fma(-0.5, 1.0))
        return s, c, q
    # sin(r+low) = r + (r^3 S - z/2*low + low); cos = 1 - (z/2 - (z^2 C - r*low)), the head's rounding error kept
    s = r + ((r * z) * _poly(z, SIN_F64) + (low - 0.5 * z * low))
    h = 0.5 * z
    w = 1.0 - h
    c = w + (((1.0 - w) - h) + ((z * z) * _poly(z, COS_F64) - r * low))
    return s, c, q


def _reduce_trig(x: _Num, short: bool) -> tuple[_Num, _Num, Reg]:
    b, build = x.build.ir, x.build
    magic = 1.5 * 2.0**52
    limit = 2.0**19
    far = b.fcmp_unordered(">=", x.abs().reg, x.of(limit))  # also NaN and inf
    near = x.pick(far, 0.0, x)
    t = near.fma(_TWO_OVER_PI, magic)
    n = t - magic
    if short:
        r = n.fma(-_PIO2_SHORT[1], near - n * _PIO2_SHORT[0])
        low = r.new(r.of(0.0))
    else:
        r, low = near - n * _PIO2_PARTS[0], x.new(x.of(0.0))
        for k in (1, 2):
            w = n * _PIO2_PARTS[k]
            head = r - w
            # exact difference (Knuth); low collects what the head cannot hold
            v = head - r
            low = low + ((r - (head - v)) - (w + v))
            r = head
        w = n * _PIO2_PARTS[3] - low
        head = r - w
        r, low = head, (r - head) - w
    q = t.bits()
    before = b.block
    slow, done = b.append_basic_block("trig.far"), b.append_basic_block("trig.done")
    b.cbranch(build.any_lane(far), slow, done)
    b.position_at_end(slow)
    far_r, far_low, far_q = _far_lanes(x)
    far_r, far_low = x.pick(far, far_r, r), x.pick(far, far_low, low)
    far_q = b.select(far, far_q, q)
    slow_end = b.block
    b.branch(done)
    b.position_at_end(done)
    out = []
    for fast, other in ((r.reg, far_r.reg), (low.reg, far_low.reg), (q, far_q)):
        phi = b.phi(fast.type)
        phi.add_incoming(fast, before)
        phi.add_incoming(other, slow_end)
        out.append(phi)
    return x.new(out[0]), x.new(out[1]), out[2]


def _far_lanes(x: _Num) -> tuple[_Num, _Num, Reg]:
    """The reduction of large arguments, lane by lane, through the helper."""
    b, build = x.build.ir, x.build
    n = lanes_of(x.reg)
    fn = _far_function(build)
    results = [b.call(fn, [build.lane(x.reg, k)]) for k in range(n)]
    parts = [[b.extract_value(r, k) for r in results] for k in range(3)]
    regs = [p[0] if n == 1 else build.gather_lanes(p) for p in parts]
    return x.new(regs[0]), x.new(regs[1]), regs[2]


def _far_function(build: Builder) -> ir.Function:
    """{r, low, q} = reduce(x): Payne and Hanek's reduction for |x| >= 2**19; NaN for NaN and inf."""
    name = f"{build.prefix}.reduce_pio2"
    if name in build.module.globals:
        return build.module.globals[name]
    table = ir.GlobalVariable(build.module, ir.ArrayType(I64, len(TWO_OVER_PI) + 1), f"{name}.table")
    table.linkage, table.global_constant = "internal", True
    table.initializer = ir.Constant(table.value_type, [*TWO_OVER_PI, 0])
    ret = ir.LiteralStructType([F64, F64, I64])
    fn = ir.Function(build.module, ir.FunctionType(ret, [F64]), name)
    fn.linkage = "internal"
    fn.attributes.add("nounwind")
    fn.attributes.add("noinline")
    outer, build._builder = build._builder, ir.IRBuilder(fn.append_basic_block("entry"))
    try:
        _far_body(build, fn.args[0], table)
    finally:
        build._builder = outer
    return fn


def _far_body(build: Builder, arg: Reg, table: Reg) -> None:
    b = build.ir
    x = _Num(build, arg)

    def c64(v: int) -> Reg:
        return ir.Constant(I64, v)

    bits = x.abs().bits()
    biased = b.lshr(bits, c64(52))
    finite = b.icmp_unsigned("<", biased, c64(2047))
    m = b.or_(b.and_(bits, c64((1 << 52) - 1)), c64(1 << 52))
    # |x| = m * 2**e. Bits of 2/pi above position e - 2 give multiples of 4 and are left out.
    e = b.sub(b.select(finite, biased, c64(1075)), c64(1075))
    # e - 2 >= -35 here; with e < 2 the window starts before the first bit: take m shifted instead.
    start = b.sub(e, c64(2))
    early = b.icmp_signed("<", start, c64(0))
    first = b.select(early, c64(0), start)
    word, shift = b.lshr(first, c64(6)), b.and_(first, c64(63))
    raw = []
    for k in range(4):
        at = b.gep(table, [c64(0), b.add(word, c64(k))], source_etype=table.value_type)
        raw.append(b.load(at, typ=I64, align=8))
    window = []
    back = b.and_(b.sub(c64(64), shift), c64(63))
    none = b.icmp_unsigned("==", shift, c64(0))
    for k in range(3):
        low = b.select(none, c64(0), b.lshr(raw[k + 1], back))
        window.append(b.or_(b.shl(raw[k], shift), low))
    # Early: the product m * window has its binary point -start places further left; shift it there below.
    wide = [b.zext(w, I128) for w in window]
    mm = b.zext(m, I128)
    sixty4 = ir.Constant(I128, 64)
    p0 = b.mul(mm, wide[2])
    p1 = b.add(b.mul(mm, wide[1]), b.lshr(p0, sixty4))
    p2 = b.add(b.mul(mm, wide[0]), b.lshr(p1, sixty4))
    w0, w1, w2, w3 = (
        b.trunc(p0, I64), b.trunc(p1, I64), b.trunc(p2, I64), b.trunc(b.lshr(p2, sixty4), I64),
    )  # fmt: skip
    # Value = (w3 w2 w1 w0) * 2**(e - 192), or * 2**(2 - 192) when not early (mod 4: w3 does not matter).
    # Early: start in [-35, -1]; shift the 256 bits right by -start to the same scale 2**-190.
    right = b.select(early, b.sub(c64(0), start), c64(0))
    left = b.and_(b.sub(c64(64), right), c64(63))
    keep = b.icmp_unsigned("==", right, c64(0))

    def down(high: Reg, low: Reg) -> Reg:
        return b.select(keep, low, b.or_(b.lshr(low, right), b.shl(high, left)))

    f2, f1, f0 = down(w3, w2), down(w2, w1), down(w1, w0)
    q = b.lshr(f2, c64(62))

    # fraction = remaining 190 bits, as a signed number in [-1/2, 1/2): shift left by two
    def up(high: Reg, low: Reg) -> Reg:
        return b.or_(b.shl(high, c64(2)), b.lshr(low, c64(62)))

    g2, g1 = up(f2, f1), up(f1, f0)
    q = b.add(q, b.lshr(g2, c64(63)))
    top = b.sitofp(b.ashr(g2, c64(32)), F64)
    mask = c64(0xFFFFFFFF)
    pieces = [b.uitofp(b.and_(g2, mask), F64), b.uitofp(b.lshr(g1, c64(32)), F64), b.uitofp(b.and_(g1, mask), F64)]
    hi = x.new(top) * 2.0**-32
    lo = x.new(x.of(0.0))
    for k, piece in enumerate(pieces):
        hi, rest = _two_sum(hi, x.new(piece) * 2.0 ** (-64 - 32 * k))
        lo = lo + rest
    hi, lo = _two_sum(hi, lo)
    r, tail = _two_prod(hi, x.new(x.of(_PIO2_HI)))
    tail = tail + (hi * _PIO2_LO + lo * _PIO2_HI)
    r, tail = _two_sum(r, tail)
    negative = x.lt(0.0)
    r, tail = x.pick(negative, -r, r), x.pick(negative, -tail, tail)
    q = b.select(negative, b.sub(c64(0), q), q)
    r = x.pick(finite, r, math.nan)
    out = ir.Constant(ir.LiteralStructType([F64, F64, I64]), ir.Undefined)
    for k, v in enumerate((r.reg, tail.reg, q)):
        out = b.insert_value(out, v, k)
    b.ret(out)


def _bit(x: _Num, q: Reg, mask: int) -> Reg:
    build = x.build
    return build.ir.icmp_unsigned("!=", build.ir.and_(q, build.like(q, mask)), build.like(q, 0))


def _sin(x: _Num, short: bool) -> _Num:
    s, c, q = _trig(x, short)
    y = x.pick(_bit(x, q, 1), c, s)
    y = x.pick(_bit(x, q, 2), -y, y)
    return x.pick(x.eq(0.0), x, y)


def _cos(x: _Num, short: bool) -> _Num:
    s, c, q = _trig(x, short)
    y = x.pick(_bit(x, q, 1), s, c)
    q1 = x.build.ir.add(q, x.build.like(q, 1))
    return x.pick(_bit(x, q1, 2), -y, y)


def _tan(x: _Num, short: bool) -> _Num:
    s, c, q = _trig(x, short)
    odd = _bit(x, q, 1)
    y = x.pick(odd, -c, s) / x.pick(odd, s, c)
    return x.pick(x.eq(0.0), x, y)


# ---- inverse trigonometric (f64) ----


def _atan(x: _Num) -> _Num:
    a = x.abs()
    big, mid = a.gt(2.414213562373095), a.gt(0.41421356237309503)
    num = x.pick(big, -1.0, x.pick(mid, a - 1.0, a))
    den = x.pick(big, a, x.pick(mid, a + 1.0, 1.0))
    t = num / den
    z = t * t
    y = (t * z) * _poly(z, ATAN)
    base = x.pick(big, _PIO2_HI, x.pick(mid, _PIO4_HI, 0.0))
    low = x.pick(big, _PIO2_LO, x.pick(mid, _PIO4_LO, 0.0))
    return (base + (t + (y + low))).sign_of(x)


def _asin_parts(x: _Num) -> tuple[Reg, _Num, _Num]:
    """(|x| > 1/2, t, asin(t) - t): t = |x|, or sqrt((1 - |x|)/2) with asin|x| = pi/2 - 2 asin t."""
    a = x.abs()
    big = a.gt(0.5)
    z = x.pick(big, 0.5 * (1.0 - a), a * a)
    t = x.pick(big, z.sqrt(), a)
    return big, t, (t * z) * _poly(z, ASIN)


def _asin(x: _Num) -> _Num:
    big, t, y = _asin_parts(x)
    far = _PIO2_HI - (2.0 * (t + y) - _PIO2_LO)
    return x.pick(big, far, t + y).sign_of(x)


def _acos(x: _Num) -> _Num:
    big, t, y = _asin_parts(x)
    twice = 2.0 * (t + y)
    positive = twice
    negative = 2.0 * _PIO2_HI - (twice - 2.0 * _PIO2_LO)
    far = x.pick(x.lt(0.0), negative, positive)
    near = _PIO2_HI - (x - (_PIO2_LO - y.sign_of(x)))
    return x.pick(big, far, near)


# ---- hyperbolic (f64) ----


def _sinh(x: _Num) -> _Num:
    a = x.abs()
    z = x * x
    small = (x * z).fma(_poly(z, SINH), x)
    e = _exp_core(a, bias=-1)
    big = e - 0.25 / e
    return x.pick(a.lt(1.0), small, big.sign_of(x))


def _cosh(x: _Num) -> _Num:
    e = _exp_core(x.abs(), bias=-1)
    return e + 0.25 / e


def _asinh(x: _Num) -> _Num:
    a = x.abs()
    big = a.gt(2.0**28)
    t = x.pick(big, 1.0, a)
    z = t * t
    near = _log1p(t + z / (1.0 + (z + 1.0).sqrt()))
    m, e = _decompose(a)
    far = x.pick(a.eq(math.inf), a, _log_core(m, e + 1.0))
    y = x.pick(big, far, near)
    y = x.pick(x.isnan(), x, y)
    return x.pick(a.lt(2.0**-28), x, y.sign_of(x))


def _acosh(x: _Num) -> _Num:
    big = x.gt(2.0**28)
    t = x.pick(big, 1.0, x - 1.0)
    near = _log1p(t + (2.0 * t + t * t).sqrt())
    m, e = _decompose(x)
    far = x.pick(x.eq(math.inf), x, _log_core(m, e + 1.0))
    y = x.pick(big, far, near)
    return x.pick(x.lt(1.0), math.nan, y)


def _atanh(x: _Num) -> _Num:
    a = x.abs()
    y = 0.5 * _log1p(2.0 * a + (2.0 * a * a) / (1.0 - a))
    y = x.pick(a.eq(1.0), math.inf, y)
    y = x.pick(a.gt(1.0), math.nan, y)
    return x.pick(a.lt(2.0**-28), x, y.sign_of(x))


# ---- pow (f64) ----


def _log_pair(a: _Num) -> tuple[_Num, _Num]:
    """Log of a as an unevaluated sum with about 68 good bits; 0 < a < inf."""
    m, e = _decompose(a)
    f = m - 1.0
    w, wl = _two_sum(a.new(a.of(2.0)), f)
    s = f / w
    p, pl = _two_prod(s, w)
    sl = (((f - p) - pl) - s * wl) / w
    z, zl = _two_prod(s, s)
    zl = zl + 2.0 * s * sl
    # log m = 2 s + s z (2/3 + z Q)
    c, cl = _two_sum(a.new(a.of(_TWO_THIRDS[0])), z * _poly(z, POW_LOG))
    cl = cl + _TWO_THIRDS[1]
    g, gl = _two_prod(z, c)
    gl = gl + (z * cl + zl * c)
    h, hl = _two_sum(a.new(a.of(2.0)), g)
    hl = hl + gl
    y, yl = _two_prod(s, h)
    yl = yl + (s * hl + sl * h)
    big = e * _LN2_F64[0]  # exact
    total = big + y
    v = total - big
    low = (big - (total - v)) + (y - v)  # Knuth: either may be larger
    low = low + (yl + e * _LN2_F64[1])
    return _two_sum(total, low)


def _pow(x: _Num, y: _Num, short: bool) -> _Num:
    b, build = x.build.ir, x.build
    a = x.abs()
    regular = b.and_(a.gt(0.0), a.lt(math.inf))
    base = x.pick(regular, a, 1.0)
    # Past 2**80 the power of anything but 1 is 0 or inf; keeps the products finite.
    top = 2.0**80
    power = y.at_most(top).at_least(-top)
    if short:
        m, e = _decompose(base)
        value = _exp_core(_log_core(m, e) * power)
    else:
        hi, lo = _log_pair(base)
        ph, pl = _two_prod(hi, power)
        pl = pl + lo * power
        ph, pl = _two_sum(ph, pl)
        over = ph.abs().gt(800.0)
        value = _exp_core(ph, x.pick(over, 0.0, pl))
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


# ---- entry points ----

MathFn = Callable[..., Reg]


def _native(fn: Callable[[_Num], _Num]) -> MathFn:
    """In the type of the argument."""

    def run(build: Builder, x: Reg) -> Reg:
        return fn(_Num(build, x)).reg

    return run


def _widened(fn: Callable[..., _Num], aware: bool = False) -> MathFn:
    """In f64; `aware`: the function takes `short`, whether the result is rounded to f32 afterwards."""

    def run(build: Builder, *args: Reg) -> Reg:
        single = scalar_of(args[0].type) == F32
        wide = [build.ir.fpext(a, vec(F64, lanes_of(a))) if single else a for a in args]
        nums = [_Num(build, w) for w in wide]
        y = fn(*nums, single).reg if aware else fn(*nums).reg
        return build.ir.fptrunc(y, args[0].type) if single else y

    return run


MATH: dict[str, MathFn] = {
    "exp": _native(_exp),
    "log": _native(_log),
    "log1p": _native(_log1p),
    "sin": _widened(_sin, aware=True),
    "cos": _widened(_cos, aware=True),
    "tan": _widened(_tan, aware=True),
    "asin": _widened(_asin),
    "acos": _widened(_acos),
    "atan": _widened(_atan),
    "sinh": _widened(_sinh),
    "cosh": _widened(_cosh),
    "tanh": _native(_tanh),
    "asinh": _widened(_asinh),
    "acosh": _widened(_acosh),
    "atanh": _widened(_atanh),
    "erf": _native(_erf),
    "pow": _widened(_pow, aware=True),
    "sigmoid": _native(_sigmoid),  # no primitive: 1/(1 + exp(-x))
}
