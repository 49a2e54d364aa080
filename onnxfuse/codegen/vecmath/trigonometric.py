"""sin, cos, tan and their inverses."""

from __future__ import annotations

from onnxfuse.codegen.build import Reg
from onnxfuse.codegen.vecmath.coefficients import (
    ASIN,
    ATAN,
    COS_F32,
    COS_F64,
    INV_PIO2,
    PIO2_HI,
    PIO2_LO,
    PIO2_PARTS,
    PIO2_SHORT,
    PIO4_HI,
    PIO4_LO,
    SIN_F32,
    SIN_F64,
)
from onnxfuse.codegen.vecmath.far import far_lanes
from onnxfuse.codegen.vecmath.number import Num, bit, poly


def _trig(x: Num, short: bool) -> tuple[Num, Num, Reg]:
    """(sin r, cos r, q) with x = q*pi/2 + r, |r| <= pi/4; `short`: only an f32 result is wanted."""
    r, low, q = _reduce_trig(x, short)
    z = r * r
    if short:
        s = (r * z).fma(poly(z, SIN_F32), r)
        c = (z * z).fma(poly(z, COS_F32), z.fma(-0.5, 1.0))
        return s, c, q
    # sin(r+low) = r + (r^3 S - z/2*low + low); cos = 1 - (z/2 - (z^2 C - r*low)), the head's rounding error kept
    s = r + ((r * z) * poly(z, SIN_F64) + (low - 0.5 * z * low))
    h = 0.5 * z
    w = 1.0 - h
    c = w + (((1.0 - w) - h) + ((z * z) * poly(z, COS_F64) - r * low))
    return s, c, q


def _reduce_trig(x: Num, short: bool) -> tuple[Num, Num, Reg]:
    b, build = x.build.ir, x.build
    magic = 1.5 * 2.0**52
    limit = 2.0**19
    far = b.fcmp_unordered(">=", x.abs().reg, x.of(limit))  # also NaN and inf
    near = x.pick(far, 0.0, x)
    t = near.fma(INV_PIO2, magic)
    n = t - magic
    if short:
        r = n.fma(-PIO2_SHORT[1], near - n * PIO2_SHORT[0])
        low = r.new(r.of(0.0))
    else:
        r, low = near - n * PIO2_PARTS[0], x.new(x.of(0.0))
        for k in (1, 2):
            w = n * PIO2_PARTS[k]
            head = r - w
            # exact difference (Knuth); low collects what the head cannot hold
            v = head - r
            low = low + ((r - (head - v)) - (w + v))
            r = head
        w = n * PIO2_PARTS[3] - low
        head = r - w
        r, low = head, (r - head) - w
    q = t.bits()
    before = b.block
    slow, done = b.append_basic_block("trig.far"), b.append_basic_block("trig.done")
    b.cbranch(build.any_lane(far), slow, done)
    b.position_at_end(slow)
    far_r, far_low, far_q = far_lanes(x)
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


def sin(x: Num, short: bool) -> Num:
    s, c, q = _trig(x, short)
    y = x.pick(bit(x, q, 1), c, s)
    y = x.pick(bit(x, q, 2), -y, y)
    return x.pick(x.eq(0.0), x, y)


def cos(x: Num, short: bool) -> Num:
    s, c, q = _trig(x, short)
    y = x.pick(bit(x, q, 1), s, c)
    q1 = x.build.ir.add(q, x.build.like(q, 1))
    return x.pick(bit(x, q1, 2), -y, y)


def tan(x: Num, short: bool) -> Num:
    s, c, q = _trig(x, short)
    odd = bit(x, q, 1)
    y = x.pick(odd, -c, s) / x.pick(odd, s, c)
    return x.pick(x.eq(0.0), x, y)


def atan(x: Num) -> Num:
    a = x.abs()
    big, mid = a.gt(2.414213562373095), a.gt(0.41421356237309503)
    num = x.pick(big, -1.0, x.pick(mid, a - 1.0, a))
    den = x.pick(big, a, x.pick(mid, a + 1.0, 1.0))
    t = num / den
    z = t * t
    y = (t * z) * poly(z, ATAN)
    base = x.pick(big, PIO2_HI, x.pick(mid, PIO4_HI, 0.0))
    low = x.pick(big, PIO2_LO, x.pick(mid, PIO4_LO, 0.0))
    return (base + (t + (y + low))).sign_of(x)


def _asin_parts(x: Num) -> tuple[Reg, Num, Num]:
    """(|x| > 1/2, t, asin(t) - t): t = |x|, or sqrt((1 - |x|)/2) with asin|x| = pi/2 - 2 asin t."""
    a = x.abs()
    big = a.gt(0.5)
    z = x.pick(big, 0.5 * (1.0 - a), a * a)
    t = x.pick(big, z.sqrt(), a)
    return big, t, (t * z) * poly(z, ASIN)


def asin(x: Num) -> Num:
    big, t, y = _asin_parts(x)
    far = PIO2_HI - (2.0 * (t + y) - PIO2_LO)
    return x.pick(big, far, t + y).sign_of(x)


def acos(x: Num) -> Num:
    big, t, y = _asin_parts(x)
    twice = 2.0 * (t + y)
    positive = twice
    negative = 2.0 * PIO2_HI - (twice - 2.0 * PIO2_LO)
    far = x.pick(x.lt(0.0), negative, positive)
    near = PIO2_HI - (x - (PIO2_LO - y.sign_of(x)))
    return x.pick(big, far, near)
