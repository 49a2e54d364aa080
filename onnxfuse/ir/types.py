"""Tensor types. A dimension is a Python int or an i64 expression over run-time symbols, in normal form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, i64
from onnxfuse.ir.simplify import as_dim

Dim = int | Expr


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape, printed `f32[1,N,256]`. Dims are normalised (`as_dim`) on construction by `tensor`."""

    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def static(self) -> bool:
        """Every dimension is known."""
        return all(isinstance(d, int) for d in self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        total: Expr = i64(1)
        for d in self.shape:
            total = total * d
        return as_dim(total)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(d) for d in self.shape)}]"


def tensor(dtype: DType, shape: Iterable[Dim]) -> TensorType:
    """A type with its dimensions brought to normal form."""
    return TensorType(dtype, tuple(as_dim(d) for d in shape))
