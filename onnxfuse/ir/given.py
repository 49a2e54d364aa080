"""Elements of small tensors as dimensions: the start of a Slice, the axes of a reduction, given at run time.

A dimension is never negative, an element may be: it is the difference of two symbols, its positive and its negative
part. An f32 (a scale of Resize) is one symbol, its bits. Kernels bind these symbols from the tensor's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Sym, bits, cast, sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.types import TensorType

MOST = 16  # elements of such a tensor: as many as a tensor has axes
_HIGHEST = (1 << 63) - 1
MARK = "]"  # ends the symbols' names; no symbol of a user's does (frontend/validate.py)


class Part(StrEnum):
    """What of an element a symbol stands for."""

    WHOLE = "data"  # the element, which is never negative
    PLUS = "plus"  # max(element, 0)
    MINUS = "minus"  # max(-element, 0)
    BITS = "bits"  # of an f32

    def of(self, element: int | np.generic) -> int:
        """The symbol's number."""
        if self is Part.BITS:
            return int(np.asarray(element, np.float32).view(np.uint32))
        n = int(element)
        return n if self is Part.WHOLE else max(n if self is Part.PLUS else min(-n, _HIGHEST), 0)


_PARTS: Mapping[DType, tuple[Part, ...]] = {
    DType.I64: (Part.PLUS, Part.MINUS),
    DType.I32: (Part.PLUS, Part.MINUS),
    DType.F32: (Part.BITS,),
}


def readable(t: TensorType) -> bool:
    """The elements can be dimensions."""
    return t.dtype in _PARTS and t.rank <= 1 and isinstance(t.size, int) and t.size <= MOST


def symbols(value: Value) -> Iterator[tuple[int, Part, Sym]]:
    """Every symbol of a readable value: element, part, symbol."""
    t = value.tensor
    assert isinstance(t.size, int)
    for k in range(t.size):
        for part in _PARTS[t.dtype]:
            yield k, part, _symbol(value, k, part)


def element(value: Value, k: int) -> Expr:
    """One element of a readable value, as i64 or f32."""
    if value.tensor.dtype is DType.F32:
        return bits(cast(_symbol(value, k, Part.BITS), DType.U32), DType.F32)
    return _symbol(value, k, Part.PLUS) - _symbol(value, k, Part.MINUS)


def numbers(value: Value, array: np.ndarray) -> dict[Sym, int]:
    """The numbers of all symbols of a value."""
    if value.type is None or not readable(value.type):
        return {}
    return {s: part.of(array.flat[k]) for k, part, s in symbols(value)}


def _symbol(value: Value, k: int, part: Part) -> Sym:
    return sym(f"{value.name}[{part} {k}{MARK}")
