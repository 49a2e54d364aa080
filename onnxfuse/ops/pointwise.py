"""Element by element: one output element from the elements at the same (broadcast) position.

Bodies run in the compute dtype (f16 and bf16 arrive as f32). The NaN case of every branch is stated on purpose:
the generated tests compare it with onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce as fold

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, apply, bits, cast, eq, lit, where
from onnxfuse.ir.op import ulp
from onnxfuse.ops import dsl
from onnxfuse.ops.dsl import Loops, erf, exp, isinf, isnan, log, log1p, maximum, minimum, power, sqrt
from onnxfuse.ops.table import pointwise, view


def _float_only(x: Expr, name: str) -> None:
    if not x.dtype.is_float:
        raise Unsupported("UN_DTYPE", f"{name} on {x.dtype} is not implemented")


# --- arithmetic ----------------------------------------------------------------------------------------------------
@pointwise
def Add(x, y):
    """X + y; integers wrap."""
    return x + y


@pointwise
def Sub(x, y):
    """X - y; integers wrap."""
    return x - y


@pointwise
def Mul(x, y):
    """X * y; integers wrap."""
    return x * y


@pointwise
def Div(x, y):
    """X / y; integers truncate towards zero, and a zero divisor gives 0 instead of a trap."""
    return x / y


@pointwise(since=10)
def Mod(x, y, *, fmod=0):
    """Remainder: sign of the divisor (fmod=0; floats from opset 28) or of the dividend (fmod=1)."""
    if fmod or not x.dtype.is_float:
        return dsl.fmod(x, y) if fmod else x % y
    rest = dsl.fmod(x, y)
    opposite = apply("ne", rest < 0, y < 0)
    return where(eq(rest, lit(0, x.dtype)), dsl.copysign(rest, y), where(opposite, rest + y, rest))


@pointwise(tol=ulp(4))
def Pow(x, y):
    """X ** y in the type of x; mixed types through f64 when f64 or integers with a fraction take part."""
    if x.dtype is not y.dtype and (y.dtype is DType.F64 or (x.dtype.is_int and y.dtype.is_float)):
        return cast(power(cast(x, DType.F64), cast(y, DType.F64)), x.dtype)
    exponent = cast(y, x.dtype)
    square = exponent is lit(2, x.dtype)
    cube = exponent is lit(3, x.dtype)
    return x * x if square else x * x * x if cube else power(x, exponent)


@pointwise
def Neg(x):
    """-x; flips the sign of zero and NaN, INT_MIN stays."""
    return -x


@pointwise
def Abs(x):
    """|x|; NaN stays NaN."""
    return dsl.absolute(x)


_NOT_HALF = tuple(d for d in DType if d.computable and not d.is_half)


@pointwise(since=9, dtypes=_NOT_HALF)
def Sign(x):
    """-1, 0 or 1; NaN stays NaN (not in onnxruntime's f16 and bf16 kernels: those types are declined)."""
    one, zero = lit(1, x.dtype), lit(0, x.dtype)
    if not x.dtype.is_float:
        return where(x > 0, one, where(x < 0, zero - one, zero)) if x.dtype.is_signed else where(x > 0, one, zero)
    return where(x > 0, 1.0, where(x < 0, -1.0, where(isnan(x), x, zero)))


@pointwise
def Sum(*xs):
    """Sum of all inputs, left to right."""
    return fold(lambda a, b: a + b, xs)


@pointwise(tol=ulp(1))
def Mean(*xs):
    """Arithmetic mean of all inputs."""
    return fold(lambda a, b: a + b, xs) / float(len(xs))


@pointwise
def Max(*xs):
    """Largest input; NaN if any is NaN."""
    return fold(maximum, xs)


@pointwise
def Min(*xs):
    """Smallest input; NaN if any is NaN."""
    return fold(minimum, xs)


@pointwise
def Reciprocal(x):
    """1 / x."""
    return lit(1, x.dtype) / x


@pointwise
def Sqrt(x):
    """Square root; NaN below zero."""
    return sqrt(x)


# --- rounding ------------------------------------------------------------------------------------------------------
@pointwise
def Floor(x):
    """Largest integer <= x."""
    return dsl.floor(x)


@pointwise
def Ceil(x):
    """Smallest integer >= x."""
    return dsl.ceil(x)


@pointwise(since=11)
def Round(x):
    """Nearest integer, halves to even."""
    return dsl.rint(x)


# --- exponentials and trigonometry ---------------------------------------------------------------------------------
@pointwise(tol=ulp(4))
def Exp(x):
    """E ** x."""
    return exp(x)


@pointwise(tol=ulp(4))
def Log(x):
    """Natural logarithm."""
    return log(x)


@pointwise(tol=ulp(8))
def Sin(x):
    """Sine."""
    return dsl.sin(x)


@pointwise(tol=ulp(8))
def Cos(x):
    """Cosine."""
    return dsl.cos(x)


@pointwise(tol=ulp(8))
def Tan(x):
    """Tangent."""
    return dsl.tan(x)


@pointwise(tol=ulp(8))
def Asin(x):
    """Arc sine."""
    return dsl.asin(x)


@pointwise(tol=ulp(8))
def Acos(x):
    """Arc cosine."""
    return dsl.acos(x)


@pointwise(tol=ulp(8))
def Atan(x):
    """Arc tangent."""
    return dsl.atan(x)


@pointwise(since=9, tol=ulp(8))
def Sinh(x):
    """Hyperbolic sine."""
    return dsl.sinh(x)


@pointwise(since=9, tol=ulp(8))
def Cosh(x):
    """Hyperbolic cosine."""
    return dsl.cosh(x)


@pointwise(tol=ulp(32))
def Tanh(x):
    """Hyperbolic tangent. onnxruntime's polynomial is 28 ulp off where denormals begin."""
    return dsl.tanh(x)


@pointwise(since=9, tol=ulp(8))
def Asinh(x):
    """Inverse hyperbolic sine."""
    return dsl.asinh(x)


@pointwise(since=9, tol=ulp(8))
def Acosh(x):
    """Inverse hyperbolic cosine."""
    return dsl.acosh(x)


@pointwise(since=9, tol=ulp(8))
def Atanh(x):
    """Inverse hyperbolic tangent."""
    return dsl.atanh(x)


@pointwise(since=9, tol=ulp(8, floor=1))
def Erf(x):
    """Error function."""
    return erf(x)


# --- activations ---------------------------------------------------------------------------------------------------
@pointwise
def Relu(x):
    """max(x, 0); NaN stays NaN."""
    return maximum(x, 0)


@pointwise(since=6)
def LeakyRelu(x, *, alpha=0.01):
    """x, or alpha * x below zero."""
    return where(x >= 0, x, x * alpha)


@pointwise
def PRelu(x, slope):
    """x, or slope * x below zero."""
    return where(x >= 0, x, x * slope)


@pointwise(tol=ulp(8, floor=1))
def Elu(x, *, alpha=1.0):
    """x, or alpha * (e**x - 1) below zero."""
    return where(x >= 0, x, (exp(x) - 1) * alpha)


@pointwise(tol=ulp(8, floor=1))
def Selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    """Gamma * (x, or alpha * (e**x - 1) at and below zero)."""
    return where(x > 0, x * gamma, (exp(x) * alpha - alpha) * gamma)


@pointwise(since=12, tol=ulp(8, floor=1))
def Celu(x, *, alpha=1.0):
    """max(0, x) + min(0, alpha * (e**(x / alpha) - 1))."""
    return maximum(x, 0) + minimum((exp(x / alpha) - 1) * alpha, 0)


@pointwise(since=10)
def ThresholdedRelu(x, *, alpha=1.0):
    """X above alpha, else 0."""
    return where(x > alpha, x, lit(0, x.dtype))


@pointwise(tol=ulp(8, floor=1))
def Sigmoid(x):
    """1 / (1 + e**-x)."""
    return lit(1, x.dtype) / (lit(1, x.dtype) + exp(-x))


@pointwise(tol=ulp(2))
def HardSigmoid(x, *, alpha=0.2, beta=0.5):
    """max(0, min(1, alpha * x + beta))."""
    return maximum(minimum(x * alpha + beta, 1), 0)


@pointwise(since=14, tol=ulp(2))
def HardSwish(x):
    """X * max(0, min(1, x / 6 + 1/2))."""
    return x * maximum(minimum(x * (1.0 / 6.0) + 0.5, 1), 0)


@pointwise(tol=ulp(8))
def Softplus(x):
    """log(1 + e**x), without overflow."""
    return maximum(x, 0) + log1p(exp(-dsl.absolute(x)))


@pointwise
def Softsign(x):
    """X / (1 + |x|), by the reciprocal as onnxruntime computes it."""
    return x * (lit(1, x.dtype) / (dsl.absolute(x) + 1))


@pointwise(since=9)
def Shrink(x, *, bias=0.0, lambd=0.5):
    """X + bias below -lambd, x - bias above lambd, else 0."""
    if x.dtype is DType.F64:
        raise Unsupported("UN_DTYPE", "Shrink on f64 is not implemented", "onnxruntime computes it in f32")
    _float_only(x, "Shrink")
    return where(x < -lambd, x + bias, where(x > lambd, x - bias, lit(0, x.dtype)))


@pointwise(since=18, tol=ulp(16, floor=1))
def Mish(x):
    """X * tanh(softplus(x))."""
    return x * dsl.tanh(maximum(x, 0) + log1p(exp(-dsl.absolute(x))))


@pointwise(since=20, tol=ulp(16, floor=1))
def Gelu(x, *, approximate="none"):
    """X * Phi(x), by erf or (approximate="tanh") by tanh."""
    if approximate == "tanh":
        if x.dtype is DType.F64:
            raise Unsupported("UN_ATTR", "Gelu(tanh) on f64 is not implemented", "onnxruntime's constants are not f64")
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (dsl.tanh(inner) + 1)
    return x * 0.5 * (erf(x * (1 / math.sqrt(2))) + 1)


@pointwise(since=24, tol=ulp(8, floor=16))
def Swish(x, *, alpha=1.0):
    """X * sigmoid(alpha * x). onnxruntime's sigmoid is good to an epsilon of 1, which x then scales."""
    return x / (lit(1, x.dtype) + exp(-(x * alpha)))


# --- clip ----------------------------------------------------------------------------------------------------------
def _bounded(x: Expr, bound: Expr | None, pick: Callable[[Expr, Expr], Expr], absent: float) -> Expr:
    """Onnxruntime ignores a NaN bound, lets NaN elements through, and an absent bound is the largest finite number.

    (Infinity in bf16.)
    """
    if bound is None:
        return pick(x, lit(absent, x.dtype)) if x.dtype.is_float else x
    if isinstance(bound, Lit):
        return x if bound.value != bound.value else pick(x, bound)
    return where(isnan(bound), x, pick(x, bound)) if bound.dtype.is_float else pick(x, bound)


def _largest(x: Expr) -> float:
    kind = dsl.stored(x)
    return math.inf if kind is DType.BF16 else float(np.finfo(kind.numpy).max) if kind.is_float else 0.0


@pointwise(since=6, name="Clip")
def Clip_6(x, *, min=-3.4028234663852886e38, max=3.4028234663852886e38):
    """Clip with bounds as attributes."""
    return _bounded(_bounded(x, lit(min, x.dtype), maximum, 0), lit(max, x.dtype), minimum, 0)


@pointwise(since=11)
def Clip(x, min=None, max=None):
    """Clip with optional scalar bounds."""
    return _bounded(_bounded(x, min, maximum, -_largest(x)), max, minimum, _largest(x))


# --- comparison and logic ------------------------------------------------------------------------------------------
@pointwise(dtype="bool")
def Equal(x, y):
    """X == y."""
    return eq(x, y)


@pointwise(dtype="bool")
def Less(x, y):
    """X < y."""
    return x < y


@pointwise(dtype="bool")
def Greater(x, y):
    """X > y."""
    return x > y


@pointwise(since=12, dtype="bool")
def LessOrEqual(x, y):
    """X <= y."""
    return x <= y


@pointwise(since=12, dtype="bool")
def GreaterOrEqual(x, y):
    """X >= y."""
    return x >= y


@pointwise(dtype="bool")
def And(x, y):
    """X and y."""
    return x & y


@pointwise(dtype="bool")
def Or(x, y):
    """X or y."""
    return x | y


@pointwise(dtype="bool")
def Xor(x, y):
    """X xor y."""
    return x ^ y


@pointwise
def Not(x):
    """Logical negation."""
    return ~x


@pointwise(since=9, dtype="bool")
def IsNaN(x):
    """Is x NaN?"""
    return isnan(x)


@pointwise(since=10, dtype="bool")
def IsInf(x, *, detect_negative=1, detect_positive=1):
    """Is x infinite (of a wanted sign)?"""
    found = isinf(x)
    if detect_negative and detect_positive:
        return found
    if detect_positive:
        return found & (x > 0)
    return found & (x < 0) if detect_negative else found & ~found


@pointwise(since=9, dtype="second")
def Where(condition, x, y):
    """X where condition, else y."""
    return where(condition, x, y)


# --- bits ----------------------------------------------------------------------------------------------------------
@pointwise(since=18)
def BitwiseAnd(x, y):
    """Bits of both."""
    return apply("bitand", x, y)


@pointwise(since=18)
def BitwiseOr(x, y):
    """Bits of either."""
    return apply("bitor", x, y)


@pointwise(since=18)
def BitwiseXor(x, y):
    """Bits of exactly one."""
    return apply("bitxor", x, y)


@pointwise(since=18)
def BitwiseNot(x):
    """All bits flipped."""
    return apply("bitnot", x)


@pointwise(since=11)
def BitShift(x, y, *, direction):
    """X shifted by y bits; a right shift keeps the sign; what is shifted by the width or more leaves nothing else."""
    return dsl.shl(x, y) if direction == "LEFT" else dsl.shr(x, y)


# --- types ---------------------------------------------------------------------------------------------------------
@pointwise(since=6, dtype="result")
def Cast(x, *, to, saturate=1, round_mode="up"):
    """Element type conversion as C does it; to bool is `!= 0`."""
    target = DType.from_onnx(to)
    if target is None or not target.computable:
        raise Unsupported("UN_DTYPE", f"Cast to {target or to} only passes through")
    return cast(x, target)


@view(since=26)
def BitCast(x, *, to):
    """The same bits as another element type of that width."""
    target = DType.from_onnx(to)
    if target is None or not target.computable or DType.BOOL in (x.dtype, target):
        raise Unsupported("UN_DTYPE", f"BitCast of {x.dtype} to {target or to} only passes through")
    if target.bytes != x.dtype.bytes:
        raise Unsupported("UN_SHAPE_MISMATCH", f"BitCast of {x.dtype} to {target}: the widths differ")
    return Loops(x.shape, lambda *i: bits(x[i], target), target)


@view(since=15)
def CastLike(x, like, *, saturate=1, round_mode="up"):
    """Cast to the element type of the second input, whose shape does not matter."""
    return Loops(x.shape, lambda *i: cast(x[i], like.dtype), like.dtype)
