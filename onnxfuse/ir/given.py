"""Elements of small tensors as dimensions: the start of a Slice, the axes of a reduction, given at run time.

A dimension is never negative, an element may be: it is the difference of two symbols, its positive and its negative
part. An f32 (a scale of Resize) is one symbol, its bits. Kernels bind these symbols from the tensor's memory.

Of indices, however many, two symbols say how far they reach: a kernel compares these with the extent they go into
before it reads anything there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Sym, apply, bits, cast, sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.types import Dim, TensorType

MOST = 16  # elements of such a tensor: as many as a tensor has axes
_HIGHEST = (1 << 63) - 1
ALL = -1  # the place of REACH and DEPTH of a whole tensor
MARK = "]"  # ends the symbols' names; no symbol of a user's does (frontend/validate.py)


class Part(StrEnum):
    """What of an element a symbol stands for."""

    WHOLE = "data"  # the element, which is never negative
    PLUS = "plus"  # max(element, 0)
    MINUS = "minus"  # max(-element, 0)
    BITS = "bits"  # of an f32
    REACH = "reach"  # the smallest extent in which all indices that are not negative lie: 1 + the largest, or 0
    DEPTH = "depth"  # the smallest extent in which all negative indices lie, which count from its end

    @property
    def of_all(self) -> bool:
        """It is about all elements, or all of a column."""
        return self in (Part.REACH, Part.DEPTH)

    def read(self, array: np.ndarray, place: int) -> int:
        """The symbol's number: of an element (flat), or for REACH and DEPTH of a column (or ALL)."""
        if not self.of_all:
            return self._of(array.flat[place])
        indices = array if place == ALL else array[..., place]
        if not indices.size:
            return 0
        return min(max(int(indices.max()) + 1 if self is Part.REACH else -int(indices.min()), 0), _HIGHEST)

    def _of(self, element: int | np.generic) -> int:
        if self is Part.BITS:
            return int(np.asarray(element, np.float32).view(np.uint32))
        n = int(element)
        return n if self is Part.WHOLE else max(n if self is Part.PLUS else min(-n, _HIGHEST), 0)


INDICES = (DType.I64, DType.I32)
_PARTS: Mapping[DType, tuple[Part, ...]] = {
    DType.I64: (Part.PLUS, Part.MINUS),
    DType.I32: (Part.PLUS, Part.MINUS),
    DType.F32: (Part.BITS,),
}


def readable(t: TensorType) -> bool:
    """The elements can be dimensions."""
    return t.dtype in _PARTS and t.rank <= 1 and isinstance(t.size, int) and t.size <= MOST


def symbols(value: Value) -> Iterator[tuple[int, Part, Sym]]:
    """Every symbol of a value: element (or column), part, symbol."""
    if value.type is None:
        return
    if readable(value.type):
        for k in range(int(str(value.type.size))):
            for part in _PARTS[value.type.dtype]:
                yield k, part, _symbol(value, k, part)
    if value.type.dtype in INDICES:
        for k in (ALL, *range(_columns(value.type))):
            for part in (Part.REACH, Part.DEPTH):
                yield k, part, _symbol(value, k, part)


def _columns(t: TensorType) -> int:
    """Columns of a table of index tuples; 0: it is none."""
    width = t.shape[-1] if t.rank else 0
    return width if isinstance(width, int) and width <= MOST else 0


def within(value: Value, extent: Dim, column: int = ALL) -> tuple[Expr, Expr]:
    """What must hold of run-time indices (a column of index tuples) into an extent; negative ones count from its end.

    `value` is a tensor of INDICES, of at most MOST columns where one of them is meant.
    """
    reach, depth = (_symbol(value, column, part) for part in (Part.REACH, Part.DEPTH))
    return apply("le", reach, extent), apply("le", depth, extent)


def element(value: Value, k: int) -> Expr:
    """One element of a readable value, as i64 or f32."""
    if value.tensor.dtype is DType.F32:
        return bits(cast(_symbol(value, k, Part.BITS), DType.U32), DType.F32)
    return _symbol(value, k, Part.PLUS) - _symbol(value, k, Part.MINUS)


def numbers(value: Value, array: np.ndarray) -> dict[Sym, int]:
    """The numbers of all symbols of a value."""
    return {s: part.read(array, k) for k, part, s in symbols(value)}


def _symbol(value: Value, k: int, part: Part) -> Sym:
    return sym(f"{value.name}[{part} {k}{MARK}")
