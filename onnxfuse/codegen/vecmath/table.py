"""The functions by name, and how far each may be off."""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.codegen.build import F32, F64, Builder, Reg, lanes_of, scalar_of, vec
from onnxfuse.codegen.vecmath.exponential import decay, exp, log, log1p, pow, sigmoid
from onnxfuse.codegen.vecmath.hyperbolic import acosh, asinh, atanh, cosh, erf, gelu, sinh, tanh
from onnxfuse.codegen.vecmath.number import Num
from onnxfuse.codegen.vecmath.trigonometric import acos, asin, atan, cos, sin, tan

UNARY = (
    "exp", "log", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
)  # fmt: skip
# Largest error in ULP of the result: (f32, f64). With FMA; targets without it may add half an ULP.
MAX_ULP: dict[str, tuple[float, float]] = {
    "exp": (1.5, 2.0), "decay": (1.5, 2.0), "log": (1.5, 2.0), "log1p": (2.0, 3.0), "sin": (1.0, 2.0),
    "cos": (1.0, 2.0), "tan": (1.0, 4.0), "asin": (1.0, 3.0), "acos": (1.0, 3.0), "atan": (1.0, 2.0),
    "sinh": (1.0, 4.0), "cosh": (1.0, 3.0), "tanh": (3.0, 4.0), "asinh": (1.0, 4.0), "acosh": (1.0, 4.0),
    "atanh": (1.0, 4.0), "erf": (2.5, 3.0), "pow": (1.0, 4.0), "sigmoid": (2.5, 3.0),
}  # fmt: skip

GELU_ERROR = 2.5 * 2.0**-24  # of gelu in f32, relative to its argument

MathFn = Callable[..., Reg]


def _native(fn: Callable[[Num], Num]) -> MathFn:
    """In the type of the argument."""

    def run(build: Builder, x: Reg) -> Reg:
        return fn(Num(build, x)).reg

    return run


def _widened(fn: Callable[..., Num], aware: bool = False) -> MathFn:
    """In f64; `aware`: the function takes `short`, whether the result is rounded to f32 afterwards."""

    def run(build: Builder, *args: Reg) -> Reg:
        single = scalar_of(args[0].type) == F32
        wide = [build.ir.fpext(a, vec(F64, lanes_of(a))) if single else a for a in args]
        nums = [Num(build, w) for w in wide]
        y = fn(*nums, single).reg if aware else fn(*nums).reg
        return build.ir.fptrunc(y, args[0].type) if single else y

    return run


MATH: dict[str, MathFn] = {
    "exp": _native(exp),
    "decay": _native(decay),
    "log": _native(log),
    "log1p": _native(log1p),
    "sin": _widened(sin, aware=True),
    "cos": _widened(cos, aware=True),
    "tan": _widened(tan, aware=True),
    "asin": _widened(asin),
    "acos": _widened(acos),
    "atan": _widened(atan),
    "sinh": _widened(sinh),
    "cosh": _widened(cosh),
    "tanh": _native(tanh),
    "asinh": _widened(asinh),
    "acosh": _widened(acosh),
    "atanh": _widened(atanh),
    "erf": _native(erf),
    "pow": _widened(pow, aware=True),
    "sigmoid": _native(sigmoid),  # no primitive: 1/(1 + exp(-x))
    "gelu": _native(gelu),  # no primitive: x/2 (1 + erf(x/sqrt(2)))
}
