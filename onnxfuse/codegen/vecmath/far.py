"""Large arguments of sin, cos and tan: reduced with 2/pi to 1280 bits (Payne and Hanek), one lane at a time."""

from __future__ import annotations

import math

from llvmlite import ir

from onnxfuse.codegen.build import F64, I64, I128, Builder, Reg, lanes_of
from onnxfuse.codegen.vecmath.coefficients import PIO2_HI, PIO2_LO, TWO_OVER_PI
from onnxfuse.codegen.vecmath.number import Num, two_prod, two_sum


def far_lanes(x: Num) -> tuple[Num, Num, Reg]:
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
    x = Num(build, arg)

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
        hi, rest = two_sum(hi, x.new(piece) * 2.0 ** (-64 - 32 * k))
        lo = lo + rest
    hi, lo = two_sum(hi, lo)
    r, tail = two_prod(hi, x.new(x.of(PIO2_HI)))
    tail = tail + (hi * PIO2_LO + lo * PIO2_HI)
    r, tail = two_sum(r, tail)
    negative = x.lt(0.0)
    r, tail = x.pick(negative, -r, r), x.pick(negative, -tail, tail)
    q = b.select(negative, b.sub(c64(0), q), q)
    r = x.pick(finite, r, math.nan)
    out = ir.Constant(ir.LiteralStructType([F64, F64, I64]), ir.Undefined)
    for k, v in enumerate((r.reg, tail.reg, q)):
        out = b.insert_value(out, v, k)
    b.ret(out)
