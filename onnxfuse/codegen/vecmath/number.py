"""Arithmetic on scalars and vectors alike, exact sums and products, polynomials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from onnxfuse.codegen.build import F32, I32, I64, Builder, Reg, lanes_of, scalar_of, vec


@dataclass(frozen=True, slots=True)
class Num:
    """A float register with operators, so that formulas read like formulas. Numbers become constants."""

    build: Builder
    reg: Reg

    def of(self, other: Num | float) -> Reg:
        return other.reg if isinstance(other, Num) else self.build.like(self.reg, float(other))

    def new(self, reg: Reg) -> Num:
        return Num(self.build, reg)

    def __add__(self, o: Num | float) -> Num:
        return self.new(self.build.ir.fadd(self.reg, self.of(o)))

    def __radd__(self, o: float) -> Num:
        return self.new(self.build.ir.fadd(self.of(o), self.reg))

    def __sub__(self, o: Num | float) -> Num:
        return self.new(self.build.ir.fsub(self.reg, self.of(o)))

    def __rsub__(self, o: float) -> Num:
        return self.new(self.build.ir.fsub(self.of(o), self.reg))

    def __mul__(self, o: Num | float) -> Num:
        return self.new(self.build.ir.fmul(self.reg, self.of(o)))

    __rmul__ = __mul__

    def __truediv__(self, o: Num | float) -> Num:
        return self.new(self.build.ir.fdiv(self.reg, self.of(o)))

    def __rtruediv__(self, o: float) -> Num:
        return self.new(self.build.ir.fdiv(self.of(o), self.reg))

    def __neg__(self) -> Num:
        return self.new(self.build.ir.fneg(self.reg))

    def fma(self, b: Num | float, c: Num | float) -> Num:
        """Compute self*b + c."""
        return self.new(self.build.fma(self.reg, self.of(b), self.of(c)))

    def abs(self) -> Num:
        return self.new(self.build.intrinsic("fabs", self.reg))

    def sqrt(self) -> Num:
        return self.new(self.build.intrinsic("sqrt", self.reg))

    def sign_of(self, o: Num) -> Num:
        """This magnitude with the sign of `o`."""
        return self.new(self.build.intrinsic("copysign", self.reg, o.reg))

    def lt(self, o: Num | float) -> Reg:
        return self.build.ir.fcmp_ordered("<", self.reg, self.of(o))

    def gt(self, o: Num | float) -> Reg:
        return self.build.ir.fcmp_ordered(">", self.reg, self.of(o))

    def eq(self, o: Num | float) -> Reg:
        return self.build.ir.fcmp_ordered("==", self.reg, self.of(o))

    def isnan(self) -> Reg:
        return self.build.ir.fcmp_unordered("uno", self.reg, self.reg)

    def at_most(self, top: float) -> Num:
        """Minimum with a number; NaN stays NaN."""
        return self.pick(self.build.ir.fcmp_ordered("<", self.of(top), self.reg), top, self)

    def at_least(self, low: float) -> Num:
        """Maximum with a number; NaN stays NaN."""
        return self.pick(self.build.ir.fcmp_ordered(">", self.of(low), self.reg), low, self)

    def pick(self, cond: Reg, yes: Num | float, no: Num | float) -> Num:
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

    def from_bits(self, bits: Reg) -> Num:
        """A number of this type from its bit pattern."""
        return self.new(self.build.ir.bitcast(bits, self.reg.type))


def poly(x: Num, coefficients: Sequence[float]) -> Num:
    """Horner's rule, lowest coefficient first."""
    out = x.new(x.of(coefficients[-1]))
    for c in reversed(coefficients[:-1]):
        out = out.fma(x, c)
    return out


def two_prod(a: Num, b: Num) -> tuple[Num, Num]:
    """Product as an unevaluated sum, exactly (Dekker's splitting where there is no FMA)."""
    p = a * b
    if a.build.has_fma:
        return p, a.fma(b, -p)
    ah, al = _halves(a)
    bh, bl = _halves(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _halves(a: Num) -> tuple[Num, Num]:
    """Split a into the sum of two numbers with half the digits (f64), by clearing the low half of the bits."""
    b = a.build.ir
    high = a.from_bits(b.and_(a.bits(), a.build.const(a.int_type, -(1 << 27))))
    return high, a - high


def two_sum(a: Num, b: Num) -> tuple[Num, Num]:
    """Sum as an unevaluated sum, exact when |a| >= |b|."""
    s = a + b
    return s, b - (s - a)


def pairs(x: Num, square: Num, coefficients: Sequence[float]) -> Num:
    """Horner's rule in the square, for pairs of coefficients: as many operations, half the latency."""
    out: Num | None = None
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


def bit(x: Num, q: Reg, mask: int) -> Reg:
    build = x.build
    return build.ir.icmp_unsigned("!=", build.ir.and_(q, build.like(q, mask)), build.like(q, 0))
