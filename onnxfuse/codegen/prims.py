"""LLVM lowering of every row of `ir/prims.PRIMS`, for scalars and vectors alike.

`lower(build, name, args, src, dst)`: `args` are registers of dtype `src` (for `where`: condition first), all scalar
or all with the same number of lanes; the result is a register of dtype `dst`. Nothing here may end in a library call
or a trap, and no fast-math flag is ever set: results follow onnxruntime bit by bit where it is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from onnxfuse.codegen.build import (
    F32,
    F64,
    HALF,
    I1,
    I16,
    I32,
    I64,
    Builder,
    is_vector,
    lanes_of,
    reg_type,
    scalar_of,
    vec,
)  # fmt: skip
from onnxfuse.codegen.vecmath.table import MATH, UNARY
from onnxfuse.ir.dtypes import DType

Lower = Callable[[Builder, Sequence[ir.Value], DType], ir.Value]


def lower(build: Builder, name: str, args: Sequence[ir.Value], src: DType, dst: DType) -> ir.Value:
    """Emit one primitive."""
    if name == "cast":
        return convert(build, args[0], src, dst)
    if name == "bits":
        return build.ir.bitcast(args[0], vec(reg_type(dst), lanes_of(args[0])))
    return LOWER[name](build, args, src)


# ---- conversions ----


def convert(build: Builder, x: ir.Value, src: DType, dst: DType) -> ir.Value:
    """Cast as onnxruntime does on x86: C conversions, out-of-range floats give the "integer indefinite" value."""
    if src is dst:
        return x
    if src.is_half:
        return convert(build, half_to_float(build, x, src), DType.F32, dst)
    if dst.is_half:
        return float_to_half(build, convert(build, x, src, DType.F32), dst)
    b, to = build.ir, vec(reg_type(dst), lanes_of(x))
    if dst is DType.BOOL:
        zero = build.like(x, 0)
        return b.fcmp_unordered("!=", x, zero) if src.is_float else b.icmp_unsigned("!=", x, zero)
    if src.is_float and dst.is_float:
        return b.fpext(x, to) if dst is DType.F64 else b.fptrunc(x, to)
    if dst.is_float:
        return b.sitofp(x, to) if src.is_signed else b.uitofp(x, to)
    if src.is_float:
        return _float_to_int(build, x, dst)
    have, want = scalar_of(x.type).width, reg_type(dst).width
    if have == want:
        return x
    if have > want:
        return b.trunc(x, to)
    return b.sext(x, to) if src.is_signed else b.zext(x, to)


def _float_to_int(build: Builder, x: ir.Value, dst: DType) -> ir.Value:
    """Truncate; NaN and out of range become the minimum of i32 (or i64), then wrap to narrower types."""
    b, n = build.ir, lanes_of(x)
    if dst in (DType.U32, DType.U64):
        return _float_to_unsigned(build, x, reg_type(dst))
    wide = I64 if dst is DType.I64 else I32
    r = _truncate(build, x, wide)
    return b.trunc(r, vec(reg_type(dst), n)) if reg_type(dst).width < wide.width else r


def _truncate(build: Builder, x: ir.Value, typ: ir.IntType) -> ir.Value:
    """cvttss2si: truncation to i32 or i64, the minimum where it does not fit."""
    b = build.ir
    if typ.width == 32 and scalar_of(x.type) == F32 and lanes_of(x) > 1:
        made = build.truncated(x)
        if made is not None:
            return made
    low = -(2.0 ** (typ.width - 1))
    below = low - 1.0 if (typ.width == 32 and scalar_of(x.type) == F64) else None
    over = b.fcmp_ordered("<", x, build.like(x, -low))
    under = (
        b.fcmp_ordered(">=", x, build.like(x, low)) if below is None else b.fcmp_ordered(">", x, build.like(x, below))
    )
    fits = b.and_(over, under)
    r = b.fptosi(b.select(fits, x, build.like(x, 0.0)), vec(typ, lanes_of(x)))
    return b.select(fits, r, build.like(r, -(1 << (typ.width - 1))))


def _float_to_unsigned(build: Builder, x: ir.Value, typ: ir.IntType) -> ir.Value:
    """As compilers do it: x >= 2**(bits-1) goes through x - 2**(bits-1)."""
    b = build.ir
    top = 1 << (typ.width - 1)
    half = build.like(x, float(top))
    big = b.fcmp_ordered(">=", x, half)
    low = _truncate(build, x, typ)
    high = _truncate(build, b.fsub(x, half), typ)
    return b.select(big, b.xor(high, build.like(high, -top)), low)


def half_to_float(build: Builder, x: ir.Value, src: DType) -> ir.Value:
    """f16 or bf16 bits to f32, exactly."""
    b, n = build.ir, lanes_of(x)
    i, f = vec(I32, n), vec(F32, n)
    if src is DType.BF16:
        return b.bitcast(b.shl(b.zext(x, i), build.const(i, 16)), f)
    if build.has_half:
        return b.fpext(b.bitcast(x, vec(HALF, n)), f)
    h = b.zext(x, i)
    sign = b.shl(b.and_(h, build.const(i, 0x8000)), build.const(i, 16))
    mag = b.shl(b.and_(h, build.const(i, 0x7FFF)), build.const(i, 13))
    exp = b.and_(mag, build.const(i, 0x0F800000))
    normal = b.add(mag, build.const(i, 112 << 23))
    special = b.add(normal, build.const(i, 112 << 23))
    is_nan = b.icmp_unsigned(">", mag, build.const(i, 0x0F800000))
    special = b.select(is_nan, b.or_(special, build.const(i, 0x400000)), special)
    tiny = b.fsub(b.bitcast(b.add(normal, build.const(i, 1 << 23)), f), build.const(f, 2.0**-14))
    out = b.select(b.icmp_unsigned("==", exp, build.const(i, 0x0F800000)), special, normal)
    out = b.select(b.icmp_unsigned("==", exp, build.const(i, 0)), b.bitcast(tiny, i), out)
    return b.bitcast(b.or_(out, sign), f)


def float_to_half(build: Builder, x: ir.Value, dst: DType) -> ir.Value:
    """f32 to f16 or bf16 bits, round to nearest even, NaN quiet."""
    b, n = build.ir, lanes_of(x)
    i, f, h = vec(I32, n), vec(F32, n), vec(I16, n)
    bits = b.bitcast(x, i)
    if dst is DType.BF16:
        odd = b.and_(b.lshr(bits, build.const(i, 16)), build.const(i, 1))
        rounded = b.lshr(b.add(b.add(bits, build.const(i, 0x7FFF)), odd), build.const(i, 16))
        quiet = b.or_(b.lshr(bits, build.const(i, 16)), build.const(i, 0x40))
        return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, rounded), h)
    if build.has_half:
        return b.bitcast(b.fptrunc(x, vec(HALF, n)), h)
    sign = b.and_(bits, build.const(i, 0x80000000))
    mag = b.xor(bits, sign)
    odd = b.and_(b.lshr(mag, build.const(i, 13)), build.const(i, 1))
    normal = b.lshr(b.add(b.add(mag, build.const(i, (0xFFF - (112 << 23)) & 0xFFFFFFFF)), odd), build.const(i, 13))
    magic = build.const(i, (112 + 14) << 23)
    tiny = b.sub(b.bitcast(b.fadd(b.bitcast(mag, f), b.bitcast(magic, f)), i), magic)
    nan = b.or_(b.and_(b.lshr(mag, build.const(i, 13)), build.const(i, 0x3FF)), build.const(i, 0x7E00))
    special = b.select(b.icmp_unsigned(">", mag, build.const(i, 0x7F800000)), nan, build.const(i, 0x7C00))
    out = b.select(b.icmp_unsigned("<", mag, build.const(i, 113 << 23)), tiny, normal)
    out = b.select(b.icmp_unsigned(">=", mag, build.const(i, 143 << 23)), special, out)
    return b.trunc(b.or_(out, b.lshr(sign, build.const(i, 16))), h)


# ---- arithmetic ----


def _arith(float_op: str, int_op: str) -> Lower:
    def run(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
        out: ir.Value = getattr(build.ir, float_op if dtype.is_float else int_op)(*args)
        return out

    return run


def _div(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    return build.ir.fdiv(*args) if dtype.is_float else _idiv(build, args, dtype)


def _literal(x: ir.Value) -> int | None:
    """The number of a constant (or of a constant that is the same in all lanes), else None."""
    if not isinstance(x, ir.Constant):
        return None
    c = x.constant
    if is_vector(x):
        if not isinstance(c, (list, tuple)) or not c:
            return None
        values = [v.constant if isinstance(v, ir.Constant) else v for v in c]
        return values[0] if all(isinstance(v, int) and v == values[0] for v in values) else None
    return c if isinstance(c, int) else None


def _divmod(build: Builder, a: ir.Value, d: ir.Value, dtype: DType) -> tuple[ir.Value, ir.Value]:
    """Truncated quotient and remainder by a divisor made safe: 0 gives (0, 0), -1 gives (-a, 0)."""
    b = build.ir
    zero, one = build.like(d, 0), build.like(d, 1)
    known = _literal(d)
    if known is not None and known not in (0, -1):
        q = b.sdiv(a, d) if dtype.is_signed else b.udiv(a, d)
        return q, b.sub(a, b.mul(q, d))
    none = b.icmp_unsigned("==", d, zero)
    if not dtype.is_signed:
        q = b.udiv(a, b.select(none, one, d))
        return b.select(none, zero, q), b.select(none, zero, b.sub(a, b.mul(q, d)))
    minus = b.icmp_unsigned("==", d, build.like(d, -1))
    q = b.sdiv(a, b.select(b.or_(none, minus), one, d))
    q = b.select(minus, b.sub(zero, a), q)
    q = b.select(none, zero, q)
    return q, b.select(none, zero, b.sub(a, b.mul(q, d)))


def _idiv(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    return _divmod(build, args[0], args[1], dtype)[0]


def _floordiv(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    b, (a, d) = build.ir, args
    known = _literal(d)
    if known is not None and known > 0 and known & (known - 1) == 0:
        shift = build.like(d, known.bit_length() - 1)
        return b.ashr(a, shift) if dtype.is_signed else b.lshr(a, shift)
    q, r = _divmod(build, a, d, dtype)
    if not dtype.is_signed:
        return q
    return b.sub(q, b.zext(_floors(build, r, d), q.type))


def _mod(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    b, (a, d) = build.ir, args
    known = _literal(d)
    if known is not None and known > 0 and known & (known - 1) == 0:
        return b.and_(a, build.like(d, known - 1))
    _, r = _divmod(build, a, d, dtype)
    if not dtype.is_signed:
        return r
    return b.select(_floors(build, r, d), b.add(r, d), r)


def _floors(build: Builder, r: ir.Value, d: ir.Value) -> ir.Value:
    """The remainder is not zero and differs in sign from the divisor."""
    b = build.ir
    zero = build.like(r, 0)
    return b.and_(b.icmp_unsigned("!=", r, zero), b.icmp_signed("<", b.xor(r, d), zero))


def _fmod(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    if not dtype.is_float:
        return _divmod(build, args[0], args[1], dtype)[1]
    b, (x, y) = build.ir, args
    if dtype is DType.F32:  # in f64 nothing under- or overflows on the way
        wide = vec(F64, lanes_of(x))
        return b.fptrunc(_long_division(build, b.fpext(x, wide), b.fpext(y, wide)), x.type)
    return _long_division(build, x, y)


def _long_division(build: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    """C fmod by shift and subtract: every step is exact, so is the result."""
    b = build.ir
    rest, unit = build.intrinsic("fabs", x), build.intrinsic("fabs", y)
    inf, zero = build.like(x, float("inf")), build.like(x, 0.0)
    bad = b.or_(b.fcmp_unordered("==", rest, inf), b.fcmp_unordered("==", unit, zero))
    # fcmp ueq is also true for NaN. Lanes without work get 0 mod 1.
    idle = b.or_(bad, b.fcmp_ordered("==", unit, inf))
    r0 = b.select(idle, zero, rest)
    u = b.select(idle, build.like(x, 1.0), unit)
    s = _while(
        build,
        [u],
        lambda v: b.fcmp_ordered("<=", b.fadd(v[0], v[0]), r0),
        lambda v, on: [b.select(on, b.fadd(v[0], v[0]), v[0])],
    )[0]
    half = build.like(x, 0.5)

    def step(v: list[ir.Value], on: ir.Value) -> list[ir.Value]:
        r, t = v
        take = b.and_(on, b.fcmp_ordered(">=", r, t))
        return [b.select(take, b.fsub(r, t), r), b.select(on, b.fmul(t, half), t)]

    r = _while(build, [r0, s], lambda v: b.fcmp_ordered(">=", v[0], u), step)[0]
    r = b.select(b.fcmp_ordered("==", unit, inf), rest, r)
    r = build.intrinsic("copysign", r, x)
    nan = build.like(x, float("nan"))
    unordered = b.fcmp_unordered("uno", x, y)
    return b.select(b.or_(bad, unordered), nan, r)


def _while(
    build: Builder,
    init: list[ir.Value],
    test: Callable[[list[ir.Value]], ir.Value],
    step: Callable[[list[ir.Value], ir.Value], list[ir.Value]],
) -> list[ir.Value]:
    """Iterate while the test holds in any lane; `step` gets the mask of lanes still on."""
    b = build.ir
    before, head = b.block, b.append_basic_block("while.head")
    body, done = b.append_basic_block("while.body"), b.append_basic_block("while.done")
    b.branch(head)
    b.position_at_end(head)
    phis = [b.phi(v.type) for v in init]
    for p, v in zip(phis, init, strict=True):
        p.add_incoming(v, before)
    on = test(list(phis))
    b.cbranch(build.any_lane(on), body, done)
    b.position_at_end(body)
    for p, v in zip(phis, step(list(phis), on), strict=True):
        p.add_incoming(v, b.block)
    b.branch(head)
    b.position_at_end(done)
    return list(phis)


def _neg(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    (x,) = args
    if dtype.is_half:
        return build.ir.xor(x, build.like(x, 0x8000))
    return build.ir.fneg(x) if dtype.is_float else build.ir.sub(build.like(x, 0), x)


def _abs(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    (x,) = args
    if dtype.is_half:
        return build.ir.and_(x, build.like(x, 0x7FFF))
    if dtype.is_float:
        return build.intrinsic("fabs", x)
    if not dtype.is_signed:
        return x
    b, zero = build.ir, build.like(x, 0)
    return b.select(b.icmp_signed("<", x, zero), b.sub(zero, x), x)


def _copysign(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    if not dtype.is_half:
        return build.intrinsic("copysign", *args)
    b, (x, y) = build.ir, args
    return b.or_(b.and_(x, build.like(x, 0x7FFF)), b.and_(y, build.like(x, 0x8000)))


def _extreme(op: str) -> Lower:
    """Min or max: NaN if either side is; of two equal zeros the second operand, as onnxruntime's vector loops do."""

    def run(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
        b, (x, y) = build.ir, args
        if dtype.is_half:
            wide = [half_to_float(build, v, dtype) for v in args]
            return float_to_half(build, run(build, wide, DType.F32), dtype)
        if not dtype.is_float:
            less = b.icmp_signed(op, x, y) if dtype.is_signed else b.icmp_unsigned(op, x, y)
            return b.select(less, x, y)
        for c, v in ((x, y), (y, x)):  # a bound that is a number: one instruction, which hands NaN (and -0) through
            if _is_number(c):
                return b.select(b.fcmp_ordered(op, c, v), c, v)
        return b.select(b.fcmp_unordered("uno", x, x), x, b.select(b.fcmp_ordered(op, x, y), x, y))

    return run


def _is_number(x: ir.Value) -> bool:
    """A constant, the same in all lanes, that is not NaN."""
    if not isinstance(x, ir.Constant):
        return False
    c = x.constant
    if is_vector(x):
        c = c[0].constant if isinstance(c, (list, tuple)) and isinstance(c[0], ir.Constant) else None
    return isinstance(c, float) and c == c


def _compare(op: str, unordered: bool = False) -> Lower:
    def run(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
        b, (x, y) = build.ir, args
        if dtype.is_half:
            x, y = half_to_float(build, x, dtype), half_to_float(build, y, dtype)
        if dtype.is_float:
            return b.fcmp_unordered(op, x, y) if unordered else b.fcmp_ordered(op, x, y)
        return b.icmp_signed(op, x, y) if dtype.is_signed else b.icmp_unsigned(op, x, y)

    return run


def _isnan(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    x = half_to_float(build, args[0], dtype) if dtype.is_half else args[0]
    return build.ir.fcmp_unordered("uno", x, x)


def _isinf(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    x = half_to_float(build, args[0], dtype) if dtype.is_half else args[0]
    return build.ir.fcmp_ordered("==", build.intrinsic("fabs", x), build.like(x, float("inf")))


def _bits(op: str) -> Lower:
    def run(build: Builder, args: Sequence[ir.Value], _dtype: DType) -> ir.Value:
        out: ir.Value = getattr(build.ir, op)(*args)
        return out

    return run


def _not(build: Builder, args: Sequence[ir.Value], _dtype: DType) -> ir.Value:
    return build.ir.xor(args[0], build.like(args[0], -1 if scalar_of(args[0].type) != I1 else 1))


def _shift(left: bool) -> Lower:
    def run(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
        b, (x, k) = build.ir, args
        width = build.like(k, scalar_of(k.type).width)
        fits = b.icmp_unsigned("<", k, width)
        if not left and dtype.is_signed:  # what is shifted out leaves copies of the sign
            return b.ashr(x, b.select(fits, k, build.like(k, scalar_of(k.type).width - 1)))
        k = b.select(fits, k, build.like(k, 0))
        return b.select(fits, b.shl(x, k) if left else b.lshr(x, k), build.like(x, 0))

    return run


def _ipow(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    """Integer power by squaring, wrapping; a negative exponent gives the truncated fraction (0, or +-1 for +-1)."""
    b, (x, y) = build.ir, args
    zero, one = build.like(x, 0), build.like(x, 1)
    negative = b.icmp_signed("<", y, zero) if dtype.is_signed else None
    k = y if negative is None else b.select(negative, b.sub(zero, y), y)

    def step(v: list[ir.Value], _on: ir.Value) -> list[ir.Value]:
        r, base, e = v
        odd = b.icmp_unsigned("!=", b.and_(e, one), zero)
        return [b.select(odd, b.mul(r, base), r), b.mul(base, base), b.lshr(e, one)]

    r = _while(build, [build.like(x, 1), x, k], lambda v: b.icmp_unsigned("!=", v[2], zero), step)[0]
    if negative is None:
        return r
    unit = b.or_(b.icmp_signed("==", x, one), b.icmp_signed("==", x, build.like(x, -1)))
    return b.select(negative, b.select(unit, r, zero), r)


def _pow(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
    return MATH["pow"](build, *args) if dtype.is_float else _ipow(build, args, dtype)


def _of_reals(compute: Callable[..., ir.Value]) -> Lower:
    """A function of real numbers; of integers in f64 and truncated, as onnxruntime has it (ReduceL2, ReduceLogSum)."""

    def run(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
        if dtype.is_float:
            return compute(build, *args)
        wide = compute(build, *(convert(build, a, dtype, DType.F64) for a in args))
        return convert(build, wide, DType.F64, dtype)

    return run


def _sqrt(build: Builder, x: ir.Value) -> ir.Value:
    return build.intrinsic("sqrt", x)


def _rounding(name: str) -> Lower:
    """Integers are whole already."""

    def run(build: Builder, args: Sequence[ir.Value], dtype: DType) -> ir.Value:
        return build.intrinsic(name, *args) if dtype.is_float else args[0]

    return run


def _where(build: Builder, args: Sequence[ir.Value], _dtype: DType) -> ir.Value:
    return build.select(*args)


def _bcast(build: Builder, args: Sequence[ir.Value], _dtype: DType) -> ir.Value:
    b, (i, n) = build.ir, args
    return b.select(b.icmp_unsigned("==", n, build.like(n, 1)), build.like(i, 0), i)


def _bdim(build: Builder, args: Sequence[ir.Value], _dtype: DType) -> ir.Value:
    b, (n, m) = build.ir, args
    return b.select(b.icmp_unsigned("==", n, build.like(n, 1)), m, n)


# Same keys as ir/prims.PRIMS, except `cast` and `bits`, which need both dtypes.
LOWER: dict[str, Lower] = {
    "add": _arith("fadd", "add"),
    "sub": _arith("fsub", "sub"),
    "mul": _arith("fmul", "mul"),
    "div": _div,
    "idiv": _idiv,
    "floordiv": _floordiv,
    "mod": _mod,
    "fmod": _fmod,
    "neg": _neg,
    "abs": _abs,
    "min": _extreme("<"),
    "max": _extreme(">"),
    "pow": _pow,
    "sqrt": _of_reals(_sqrt),
    **{name: _of_reals(MATH[name]) for name in (*UNARY, "decay")},
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "rint": _rounding("roundeven"),
    "trunc": _rounding("trunc"),
    "copysign": _copysign,
    "eq": _compare("=="),
    "ne": _compare("!=", unordered=True),
    "lt": _compare("<"),
    "le": _compare("<="),
    "isnan": _isnan,
    "isinf": _isinf,
    "and": _bits("and_"),
    "or": _bits("or_"),
    "xor": _bits("xor"),
    "not": _not,
    "bitand": _bits("and_"),
    "bitor": _bits("or_"),
    "bitxor": _bits("xor"),
    "bitnot": _not,
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "where": _where,
    "bcast": _bcast,
    "bdim": _bdim,
}
