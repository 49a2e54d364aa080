"""What an op body may say: scalar functions, tensor references, `Loops`, broadcasting.

A body never sees numpy arrays or nodes. It gets

  * scalars (`Expr`) in pointwise and reduce ops, already in the compute dtype (f16 -> f32);
  * `Tensor` references in view, contract and window ops: `x[i, j]` is one element, `x.shape` its dimensions,
    `x.known` its elements when they are known (constants, and shape arithmetic as symbolic dimensions);

and returns an Expr, or `Loops` (a list of them for several outputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Operand, apply, as_expr, cast, eq, i64, lit, load, where
from onnxfuse.ir.given import element, readable
from onnxfuse.ir.graph import Value
from onnxfuse.ir.simplify import as_dim, dim_expr, known, same, simplify
from onnxfuse.ir.types import Dim, TensorType

Index = Expr | int
Known = np.ndarray  # object array of Expr (any dtype), in the shape of the tensor


# --- scalar functions (one per primitive that has no operator) -----------------------------------------------------
def _unary(name: str) -> Callable[[Expr], Expr]:
    def call(x: Expr) -> Expr:
        return apply(name, x)

    call.__name__ = name
    return call


def _binary(name: str) -> Callable[[Operand, Operand], Expr]:
    def call(x: Operand, y: Operand) -> Expr:
        return apply(name, x, y)

    call.__name__ = name
    return call


exp, log, log1p, sqrt, erf = (_unary(n) for n in ("exp", "log", "log1p", "sqrt", "erf"))
sin, cos, tan, asin, acos, atan = (_unary(n) for n in ("sin", "cos", "tan", "asin", "acos", "atan"))
sinh, cosh, tanh, asinh, acosh, atanh = (_unary(n) for n in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"))
floor, ceil, rint, trunc, absolute = (_unary(n) for n in ("floor", "ceil", "rint", "trunc", "abs"))
isnan, isinf = _unary("isnan"), _unary("isinf")
minimum, maximum, power, fmod, copysign = (_binary(n) for n in ("min", "max", "pow", "fmod", "copysign"))
shl, shr = _binary("shl"), _binary("shr")


# --- tensors -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An input of an op as its body sees it.

    known      elements as an object array of Exprs (shape of the tensor), when they are known; small tensors only
    immediate  the one element of a constant with one element: bodies then hold the number, not a Load
    """

    value: Value
    type: TensorType
    known: Known | None = None
    immediate: Lit | None = None

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Expr:
        """One element in the memory dtype; `compute(x[i])` for arithmetic."""
        index = index if isinstance(index, tuple) else (index,)
        assert len(index) == self.rank, f"{self.value}: {len(index)} indices for rank {self.rank}"
        if self.immediate is not None:
            return self.immediate
        return load(self.value, tuple(simplify(as_expr(i, DType.I64)) for i in index), self.dtype)

    def elements(self) -> list[Expr]:
        """Known elements, flat. Raises Unsupported when they depend on data."""
        if self.known is None and self.type.size == 0:
            return []
        if self.known is None:
            raise Unsupported(
                "UN_DATA_DEPENDENT", f"{self.value} is needed at compile time", "its value depends on data"
            )
        return list(self.known.flat)

    def given(self) -> list[Expr]:
        """Elements as i64 (of floats: f32), known or read when the kernel runs; then they may be any number."""
        if self.known is None and readable(self.type):
            return [element(self.value, k) for k in range(int(str(self.type.size)))]
        return [cast(e, DType.F32 if e.dtype.is_float else DType.I64) for e in self.elements()]

    def sizes(self) -> tuple[list[Dim], tuple[Expr, ...]]:
        """Elements as dimensions, known or read when the kernel runs, and what it has to check of those."""
        given = [simplify(cast(e, DType.I64)) for e in self.given()]
        if self.known is not None:
            return [as_dim(e) for e in given], ()
        return [as_dim(maximum(e, 0)) for e in given], tuple(apply("le", i64(0), e) for e in given)

    def ints(self) -> list[int]:
        """Known integer elements that must be constants (axes, repeats, pads ...)."""
        out = []
        for e in self.elements():
            d = as_dim(e) if e.dtype is DType.I64 else (int(e.value) if isinstance(e, Lit) else e)
            if not isinstance(d, int):
                raise Unsupported("UN_DATA_DEPENDENT", f"{self.value} must be constant", f"element is {d}")
            out.append(d)
        return out

    def dims(self) -> list[Dim]:
        """Known elements as dimensions (symbolic allowed)."""
        return [as_dim(cast(e, DType.I64)) for e in self.elements()]

    def floats(self) -> list[float]:
        """Known float elements that must be constants (scales, roi ...)."""
        out = []
        for e in self.elements():
            if not isinstance(e, Lit):
                raise Unsupported("UN_DATA_DEPENDENT", f"{self.value} must be constant", f"element is {e}")
            out.append(float(e.value))
        return out


def compute(e: Expr) -> Expr:
    """The value in the type arithmetic is done in (f16 and bf16 widen to f32)."""
    return cast(e, e.dtype.compute)


@dataclass(frozen=True, slots=True, eq=False)
class Loops:
    """The definition of one output: `out[i...] = body(*i)`, or a reduction over extra extents `reduce`.

    body gets one Expr per output dimension, then one per reduce extent; finish gets the accumulator and the output
    indices. `dtype` is the element type of the output; the body's result is cast to it (or to `acc` first).
    """

    shape: Sequence[Dim]
    body: Callable[..., Expr]
    dtype: DType
    reduce: Sequence[Dim] = ()
    combine: str = "add"
    init: float | int | bool = 0
    finish: Callable[..., Expr] | None = None
    acc: DType | None = None
    names: Sequence[str] = field(default=())  # axis names for printing, output axes then reduce axes
    refusal: Refusal | None = None  # the shape is known, but no kernel may compute it
    needs: Sequence[Expr] = ()  # comparisons of dimensions that must hold at run time; the kernel checks them


def stored(x: Expr) -> DType:
    """Element type a scalar of a pointwise body was read in, before it was widened for computing."""
    widened = isinstance(x, Apply) and x.prim.name == "cast" and x.dtype is x.args[0].dtype.compute
    return x.args[0].dtype if isinstance(x, Apply) and widened else x.dtype


def declined(shape: Sequence[Dim], dtype: DType, code: str, why: str) -> Loops:
    """An output whose type is known although no kernel may compute it: shapes behind it stay expressions."""

    def body(*_index: Expr) -> Expr:
        raise Unsupported(code, why)

    return Loops(shape, body, dtype, refusal=Refusal(code, why))


def equal_extents(*pairs: tuple[Dim, Dim]) -> tuple[Expr, ...]:
    """Comparisons a kernel has to make at run time: extents that must be equal and are not provably so.

    onnxruntime reports such inputs; a kernel would read past an end. Raises Unsupported when they always differ.
    """
    needs = []
    for a, b in pairs:
        if isinstance(a, int) and isinstance(b, int) and a != b:
            raise Unsupported("UN_SHAPE_MISMATCH", f"extents {a} and {b} must be equal")
        if not same(a, b):
            needs.append(apply("eq", dim_expr(a), dim_expr(b)))
    return tuple(needs)


# --- broadcasting --------------------------------------------------------------------------------------------------
def broadcast_dims(a: Dim, b: Dim) -> Dim:
    """Extent of two broadcast dimensions. Raises Unsupported when they can never match."""
    if same(a, b):
        return a
    if a == 1 and isinstance(a, int):
        return b
    if b == 1 and isinstance(b, int):
        return a
    if isinstance(a, int) and isinstance(b, int):
        raise Unsupported("UN_SHAPE_MISMATCH", f"dimensions {a} and {b} do not broadcast")
    for whole, part in ((a, b), (b, a)):
        if _capped(part, whole):  # min(n, c) against n: equal, or (when it is 1) n
            return whole
    if isinstance(a, int) or isinstance(b, int):
        return a if isinstance(a, int) else b  # the symbolic side is 1 or equal
    return as_dim(apply("bdim", a, b))


def _capped(part: Dim, whole: Dim) -> bool:
    """Part is min(whole, c) with c > 1: a slice of a table of c rows, as position embeddings are."""
    if not isinstance(part, Apply) or part.prim.name != "min":
        return False
    return any(isinstance(c, Lit) and c.value > 1 and same(n, whole) for c, n in (part.args, part.args[::-1]))


def broadcast_shape(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Numpy-style (multidirectional) broadcasting of shapes."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = [1] * rank
    for shape in shapes:
        for k, d in enumerate(reversed(shape)):
            out[rank - 1 - k] = broadcast_dims(out[rank - 1 - k], d)
    return tuple(out)


def broadcast_index(shape: Sequence[Dim], index: Sequence[Expr], out: Sequence[Dim]) -> tuple[Expr, ...]:
    """Index into a tensor of `shape` for the output point `index` of shape `out` (aligned at the right)."""
    result = []
    for k, d in enumerate(shape):
        pos = len(out) - len(shape) + k
        if isinstance(d, int):
            result.append(i64(0) if d == 1 else index[pos])
        else:
            result.append(index[pos] if same(d, out[pos]) else apply("bcast", index[pos], d))
    return tuple(result)


def broadcast_load(x: Tensor, index: Sequence[Expr], out: Sequence[Dim]) -> Expr:
    """Element of `x` for an output point under broadcasting."""
    return x[broadcast_index(x.shape, index, out)]


# --- small helpers for bodies --------------------------------------------------------------------------------------
def axis_of(axis: int, rank: int) -> int:
    """A possibly negative axis as 0..rank-1. Raises Unsupported when out of range."""
    if not -rank <= axis < max(rank, 1):
        raise Unsupported("UN_AXIS", f"axis {axis} is out of range", f"rank is {rank}")
    return axis % rank if rank else 0


def named_axes(axes: Sequence[Expr], rank: int) -> tuple[list[list[Expr]], tuple[Expr, ...]]:
    """For every dimension, whether each of `axes` means it; and what must hold of axes that are not known here."""
    hits: list[list[Expr]] = []
    for k in range(rank):
        hits.append([simplify(eq(a, i64(k)) | eq(a, i64(k - rank))) for a in axes])
    needs = [n for a in axes for n in (apply("le", i64(-rank), a), apply("lt", a, i64(rank)))]
    return hits, tuple(dict.fromkeys(n for n in needs if not known(n)))


def any_of(conditions: Sequence[Expr]) -> Expr:
    """One of them holds."""
    found: Expr = lit(False, DType.BOOL)
    for c in conditions:
        found = found | c
    return simplify(found)


def chosen(cases: Sequence[tuple[Expr, Expr]], other: Expr) -> Expr:
    """The value of the first condition that holds."""
    for cond, value in reversed(cases):
        truth = known(cond)
        other = value if truth else other if truth is False else where(cond, value, other)
    return simplify(other)


def product(dims: Sequence[Dim]) -> Dim:
    """Number of elements of a shape."""
    total: Expr = i64(1)
    for d in dims:
        total = total * d
    return as_dim(total)


def flatten(index: Sequence[Expr], shape: Sequence[Dim]) -> Expr:
    """Row-major offset."""
    offset: Expr = i64(0)
    for i, d in zip(index, shape, strict=True):
        offset = offset * d + i
    return simplify(offset)


def unflatten(offset: Expr, shape: Sequence[Dim]) -> tuple[Expr, ...]:
    """Inverse of `flatten`."""
    out: list[Expr] = []
    stride: Expr = i64(1)
    for k in range(len(shape) - 1, -1, -1):
        d = dim_expr(shape[k])
        part = simplify(offset // stride)
        out.append(simplify(part % d) if k else part)
        stride = simplify(stride * d)
    return tuple(reversed(out))


def between(lo: Operand, x: Expr, hi: Operand) -> Expr:
    """Lo <= x < hi; provable halves vanish."""
    return simplify((x >= lo) & (x < hi))


def guarded(cond: Expr, value: Callable[[], Expr], other: float | int) -> Expr:
    """`where(cond, value, other)` without the guard when the condition is provable."""
    truth = known(cond)
    if truth is True:
        return value()
    inside = value()
    return lit(other, inside.dtype) if truth is False else where(cond, inside, other)
