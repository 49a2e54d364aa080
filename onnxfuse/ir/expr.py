"""Scalar expressions, hash-consed: structural equality *is* identity (`is`).

    Expr = Lit(value, dtype)            a constant; interned by bit pattern (0.0 is not -0.0, nan is nan)
         | Var(axis)                    loop variable of an Axis, i64, 0 <= v < axis.extent
         | Sym(name)                    run-time dimension, i64, >= 0
         | Acc(dtype)                   in Reduce.finish only: the finished accumulator
         | Load(source, index)          one element of a Value; index are i64 expressions, one per dimension
         | Apply(prim, args, dtype)     a primitive of PRIMS

A Load whose index is out of range has no defined value but never traps; it may stand only under a `where` that
discards it (that is how Pad, Concat and convolution padding are written).

Operators are overloaded (`+ - * // % < <= > >= & | ~`), Python numbers become literals of the other side's dtype.
`==` stays identity: use `eq(a, b)`. Integer index arithmetic is brought to a normal form by `ir/simplify.py`;
the constructors here only fold constants and identities that are exact for every dtype.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Union

import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.prims import PRIMS, Prim

if TYPE_CHECKING:
    from onnxfuse.ir.graph import Value
    from onnxfuse.ir.loops import Axis

Number = int | float | bool
Operand = Union["Expr", int, float, bool]
_SERIAL = itertools.count()


class Expr:
    """Base of all expressions; immutable, interned, compared by identity.

    serial  order of creation: breaks ties between atoms that print alike (two axes of one name)
    text    the printed form, kept by `ir/text.py`; empty until asked for
    """

    __slots__ = ("__weakref__", "dtype", "normal", "serial", "text")
    dtype: DType
    normal: Expr | bool | None  # cache of ir/simplify.py: the normal form, True when that is the expression itself

    def __init__(self) -> None:
        self.serial = next(_SERIAL)
        self.text = ""
        self.normal = None

    def __add__(self, other: Operand) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return apply("div" if self.dtype.is_float else "idiv", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return apply("div" if self.dtype.is_float else "idiv", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return apply("floordiv", self, other)

    def __rfloordiv__(self, other: Operand) -> Expr:
        return apply("floordiv", other, self)

    def __mod__(self, other: Operand) -> Expr:
        return apply("mod", self, other)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __lt__(self, other: Operand) -> Expr:
        return apply("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return apply("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return apply("lt", other, self)

    def __ge__(self, other: Operand) -> Expr:
        return apply("le", other, self)

    def __and__(self, other: Operand) -> Expr:
        return apply("and" if self.dtype is DType.BOOL else "bitand", self, other)

    def __or__(self, other: Operand) -> Expr:
        return apply("or" if self.dtype is DType.BOOL else "bitor", self, other)

    def __xor__(self, other: Operand) -> Expr:
        return apply("xor" if self.dtype is DType.BOOL else "bitxor", self, other)

    def __invert__(self) -> Expr:
        return apply("not" if self.dtype is DType.BOOL else "bitnot", self)

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value; use where(), eq() or simplify.known()")

    def __str__(self) -> str:
        from onnxfuse.ir.text import print_expr  # text imports expr

        return print_expr(self)

    __repr__ = __str__


class Lit(Expr):
    """A constant. `value` is a Python int, float or bool that is exactly representable in `dtype`."""

    __slots__ = ("value",)
    value: Number


class Var(Expr):
    """The loop variable of an axis."""

    __slots__ = ("axis",)
    axis: Axis


class Sym(Expr):
    """A run-time dimension, by name."""

    __slots__ = ("name",)
    name: str


class Acc(Expr):
    """The accumulator of the enclosing Reduce, after the loop (only inside Reduce.finish)."""

    __slots__ = ()


class Load(Expr):
    """One element of `source`."""

    __slots__ = ("index", "source")
    source: Value
    index: tuple[Expr, ...]


class Apply(Expr):
    """A primitive applied to arguments."""

    __slots__ = ("args", "prim")
    prim: Prim
    args: tuple[Expr, ...]


_TABLE: weakref.WeakValueDictionary[tuple[object, ...], Expr] = weakref.WeakValueDictionary()


def _bits(value: Number, dtype: DType) -> object:
    return struct.pack("<d", value) if dtype.is_float else int(value)


def lit(value: Number, dtype: DType) -> Lit:
    """A literal, rounded to `dtype` (f32 literals hold the f32-rounded value; ints wrap)."""
    if dtype is DType.BOOL:
        value = bool(value)
    elif dtype.is_float:
        with np.errstate(all="ignore"):
            value = float(np.asarray(value, dtype=np.float64).astype(dtype.numpy).astype(np.float64))
    else:
        bits = dtype.bytes * 8
        value = int(value) & ((1 << bits) - 1)
        if dtype.is_signed and value >= 1 << (bits - 1):
            value -= 1 << bits
    key = (Lit, dtype, _bits(value, dtype))
    found = _TABLE.get(key)
    if found is None:
        found = Lit()
        found.dtype, found.value = dtype, value
        _TABLE[key] = found
    assert isinstance(found, Lit)
    return found


def i64(value: int) -> Lit:
    """An index literal."""
    return lit(value, DType.I64)


def var(axis: Axis) -> Var:
    """The loop variable of `axis` (i64)."""
    key = (Var, axis)
    found = _TABLE.get(key)
    if found is None:
        found = Var()
        found.dtype, found.axis = DType.I64, axis
        _TABLE[key] = found
    assert isinstance(found, Var)
    return found


def sym(name: str) -> Sym:
    """A run-time dimension (i64, >= 0)."""
    key = (Sym, name)
    found = _TABLE.get(key)
    if found is None:
        found = Sym()
        found.dtype, found.name = DType.I64, name
        _TABLE[key] = found
    assert isinstance(found, Sym)
    return found


def acc(dtype: DType) -> Acc:
    """The accumulator, for Reduce.finish."""
    key = (Acc, dtype)
    found = _TABLE.get(key)
    if found is None:
        found = Acc()
        found.dtype = dtype
        _TABLE[key] = found
    assert isinstance(found, Acc)
    return found


def load(source: Value, index: tuple[Expr, ...], dtype: DType) -> Load:
    """`source[index]`; dtype is the element type of the source."""
    key = (Load, source, *index)
    found = _TABLE.get(key)
    if found is None:
        found = Load()
        found.dtype, found.source, found.index = dtype, source, index
        _TABLE[key] = found
    assert isinstance(found, Load)
    return found


def make(prim: Prim, args: tuple[Expr, ...], dtype: DType) -> Apply:
    """Intern an Apply as it is: no folding (used by parse, substitute and simplify)."""
    key = (Apply, prim, dtype, *args)
    found = _TABLE.get(key)
    if found is None:
        found = Apply()
        found.dtype, found.prim, found.args = dtype, prim, args
        _TABLE[key] = found
    assert isinstance(found, Apply)
    return found


def as_expr(value: Operand, dtype: DType) -> Expr:
    """A Python number becomes a literal of `dtype`; an Expr stays."""
    return value if isinstance(value, Expr) else lit(value, dtype)


def apply(name: str, *operands: Operand, dtype: DType | None = None) -> Expr:
    """Build `prim(operands)` with dtype checks and exact folding.

    Raises TypeError when the operands' dtypes disagree: op bodies are checked when they are first run.
    """
    prim = PRIMS[name]
    if prim.rule == "where":
        return where(*operands)
    typed = next((o for o in operands if isinstance(o, Expr)), None)
    operand_dtype = typed.dtype if typed is not None else (DType.I64 if dtype is None else dtype)
    args = tuple(as_expr(o, operand_dtype) for o in operands)
    if any(a.dtype is not operand_dtype for a in args):
        raise TypeError(f"{name}: operand dtypes differ: {[str(a.dtype) for a in args]}")
    result = {"bool": DType.BOOL, "logic": DType.BOOL, "same": operand_dtype}.get(prim.rule) or dtype
    assert result is not None, "cast needs dtype="
    folded = _fold(prim, args, result)
    return make(prim, args, result) if folded is None else folded


def cast(value: Expr, dtype: DType) -> Expr:
    """Convert as onnxruntime's Cast does; a cast to the same dtype is the value itself."""
    if value.dtype is dtype:
        return value
    if isinstance(value, Lit) and not value.dtype.is_float:
        return lit(value.value, dtype) if dtype is not DType.BOOL else lit(value.value != 0, dtype)
    if isinstance(value, Lit) and value.dtype.is_float and dtype.is_float:
        return lit(value.value, dtype)
    return make(PRIMS["cast"], (value,), dtype)


def bits(value: Expr, dtype: DType) -> Expr:
    """The bits of a value as another type of the same width."""
    return value if value.dtype is dtype else make(PRIMS["bits"], (value,), dtype)


def where(*operands: Operand) -> Expr:
    """`where(cond, a, b)`: a if cond else b; the side not taken is not evaluated."""
    cond, a, b = operands
    typed = a if isinstance(a, Expr) else b
    assert isinstance(cond, Expr), "where() needs an Expr as condition"
    assert isinstance(typed, Expr), "where() of two Python numbers has no dtype"
    yes, no = as_expr(a, typed.dtype), as_expr(b, typed.dtype)
    if yes.dtype is not no.dtype or cond.dtype is not DType.BOOL:
        raise TypeError(f"where: {cond.dtype}, {yes.dtype}, {no.dtype}")
    if isinstance(cond, Lit):
        return yes if cond.value else no
    return yes if yes is no else make(PRIMS["where"], (cond, yes, no), yes.dtype)


def eq(a: Operand, b: Operand) -> Expr:
    """Element equality as an expression (`==` is identity)."""
    return apply("eq", a, b)


TRUE = lit(True, DType.BOOL)
FALSE = lit(False, DType.BOOL)


def _fold(prim: Prim, args: tuple[Expr, ...], dtype: DType) -> Expr | None:
    """Exact folding: integer and bool constants, and identities that hold bit for bit. Floats are left alone."""
    first = args[0].dtype
    if prim.name == "bits":
        return None
    if first.is_int or first is DType.BOOL:
        if all(isinstance(a, Lit) for a in args):
            if _leaves_i64(prim.name, args):
                return None  # of data it wraps around when it runs; of dimensions simplify refuses it
            values = [np.asarray(a.value, dtype=first.numpy) for a in args if isinstance(a, Lit)]
            return lit(prim.numpy(*values).item(), dtype)
        return _identity(prim.name, args)
    return None


def _leaves_i64(name: str, args: tuple[Expr, ...]) -> bool:
    """A sum or product of two i64 literals that is none."""
    if args[0].dtype is not DType.I64 or name not in ("add", "sub", "mul"):
        return False
    a, b = (int(x.value) for x in args if isinstance(x, Lit))
    result = a + b if name == "add" else a - b if name == "sub" else a * b
    return not -(1 << 63) <= result < 1 << 63


def _identity(name: str, args: tuple[Expr, ...]) -> Expr | None:
    if len(args) != 2:
        return None
    a, b = args
    left = a.value if isinstance(a, Lit) else None
    right = b.value if isinstance(b, Lit) else None
    match name:
        case "add":
            return b if left == 0 else a if right == 0 else None
        case "sub":
            return a if right == 0 else lit(0, a.dtype) if a is b else None
        case "mul":
            if left == 0 or right == 0:
                return lit(0, a.dtype)
            return b if left == 1 else a if right == 1 else None
        case "floordiv" | "idiv":
            return a if right == 1 else None
        case "mod":
            return lit(0, a.dtype) if right == 1 else None
        case "and":
            if left is False or right is False:
                return FALSE
            return b if left is True else a if right is True or a is b else None
        case "or":
            if left is True or right is True:
                return TRUE
            return b if left is False else a if right is False or a is b else None
        case "min" | "max" | "bdim":
            if name == "bdim" and left is not None:
                return b if left == 1 else a
            if name == "bdim" and right == 1:
                return a
            return a if a is b else None
        case "bcast":
            return (lit(0, a.dtype) if right == 1 else a) if right is not None else None
        case "eq" | "le":
            return TRUE if a is b else None
        case "ne" | "lt":
            return FALSE if a is b else None
    return None


def children(e: Expr) -> tuple[Expr, ...]:
    """Direct sub-expressions (a Load's are its indices)."""
    if isinstance(e, Apply):
        return e.args
    return e.index if isinstance(e, Load) else ()


def unknown(root: Expr, known: Container[Expr]) -> Iterator[Expr]:
    """As `walk`, but nothing that is known or below it; the caller makes known what it is given."""
    stack = [root]
    while stack:
        e = stack[-1]
        missing = [] if e in known else [c for c in children(e) if c not in known]
        if missing:
            stack.extend(reversed(missing))
            continue
        stack.pop()
        if e not in known:
            yield e


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every distinct sub-expression once, children before parents. Iterative: bodies may be deep."""
    seen: set[Expr] = set()
    stack: list[Expr | None] = list(reversed(roots))
    while stack:
        e = stack.pop()
        if e is None:  # the children of what lies below are done
            e = stack.pop()
            assert e is not None
            yield e
            continue
        if e in seen:
            continue
        seen.add(e)
        below = e.args if isinstance(e, Apply) else e.index if isinstance(e, Load) else ()
        if below:
            stack += (e, None, *reversed(below))
        else:
            yield e


def loads(*roots: Expr) -> list[Load]:
    """All distinct Loads, in evaluation order: those an index needs come before the Load with that index."""
    out: list[Load] = []
    seen: set[Expr] = set()
    stack: list[Expr | None] = list(reversed(roots))
    while stack:
        e = stack.pop()
        if e is None:
            e = stack.pop()
            assert isinstance(e, Load)
            out.append(e)
        elif isinstance(e, Apply):
            if e not in seen:
                seen.add(e)
                stack.extend(reversed(e.args))
        elif isinstance(e, Load) and e not in seen:
            seen.add(e)
            if all(isinstance(i, (Var, Lit)) for i in e.index):
                out.append(e)
            else:
                stack += (e, None, *reversed(e.index))
    return out


def axes_of(*roots: Expr) -> set[Axis]:
    """Axes whose variable occurs."""
    return {e.axis for e in walk(*roots) if isinstance(e, Var)}


def syms_of(*roots: Expr) -> set[Sym]:
    """Run-time dimensions that occur directly (not those in extents of axes)."""
    return {e for e in walk(*roots) if isinstance(e, Sym)}


def rebuild(roots: tuple[Expr, ...], leaf: Callable[[Expr], Expr | None]) -> tuple[Expr, ...]:
    """Rewrite bottom-up: `leaf(e)` may replace any node (seen with children already rewritten).

    Children are rebuilt through `apply`, so exact folding runs; unchanged nodes keep their identity.
    """
    done: dict[int, Expr] = {}
    for e in walk(*roots):
        new = e
        if isinstance(e, Apply):
            args = tuple(done[id(a)] for a in e.args)
            if any(x is not y for x, y in zip(args, e.args, strict=True)):
                new = cast(args[0], e.dtype) if e.prim.name == "cast" else apply(e.prim.name, *args, dtype=e.dtype)
        elif isinstance(e, Load):
            index = tuple(done[id(i)] for i in e.index)
            if any(x is not y for x, y in zip(index, e.index, strict=True)):
                new = load(e.source, index, e.dtype)
        replaced = leaf(new)
        done[id(e)] = new if replaced is None else replaced
    return tuple(done[id(r)] for r in roots)


def substitute(e: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Replace sub-expressions (usually Vars, Syms, Acc or Loads) simultaneously."""
    return rebuild((e,), mapping.get)[0]
