"""Element types: the ones kernels compute on, and the ones that only pass through."""

from __future__ import annotations

from enum import StrEnum

import ml_dtypes
import numpy as np


class DType(StrEnum):
    """Element type of a tensor or scalar expression; prints as its short name (`f32`)."""

    F32 = "f32"
    F64 = "f64"
    F16 = "f16"
    BF16 = "bf16"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    BOOL = "bool"
    # Pass-through only: never inside a kernel.
    STRING = "string"
    C64 = "c64"
    C128 = "c128"
    F8E4M3FN = "f8e4m3fn"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2 = "f8e5m2"
    F8E5M2FNUZ = "f8e5m2fnuz"
    U4 = "u4"
    I4 = "i4"
    F4E2M1 = "f4e2m1"
    F8E8M0 = "f8e8m0"
    U2 = "u2"
    I2 = "i2"

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_int(self) -> bool:
        return self in _SIGNED or self in _UNSIGNED

    @property
    def is_signed(self) -> bool:
        """Signed integer (floats are not `is_signed`)."""
        return self in _SIGNED

    @property
    def computable(self) -> bool:
        """Can occur inside a kernel."""
        return self in _NUMPY

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype (bf16 from ml_dtypes); only for computable types."""
        return _NUMPY[self]

    @property
    def bytes(self) -> int:
        """Size of one element in memory (bool is one byte)."""
        return _NUMPY[self].itemsize

    @property
    def onnx(self) -> int:
        """Value of onnx.TensorProto.DataType."""
        return _ONNX[self]

    @property
    def compute(self) -> DType:
        """Type the arithmetic is done in: f16 and bf16 compute in f32 and round at the end of each op."""
        return DType.F32 if self.is_half else self

    @property
    def is_half(self) -> bool:
        """A float of 16 bits."""
        return self in (DType.F16, DType.BF16)

    @property
    def limits(self) -> tuple[int, int]:
        """Least and largest value of an integer type; bool counts as 0 and 1."""
        if self is DType.BOOL:
            return 0, 1
        bits = 8 * self.bytes
        return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if self.is_signed else (0, (1 << bits) - 1)

    @staticmethod
    def from_onnx(code: int) -> DType | None:
        """Inverse of `onnx`; None for codes this version does not know."""
        return _FROM_ONNX.get(code)

    @staticmethod
    def from_numpy(dtype: np.dtype) -> DType | None:
        """Inverse of `numpy`; None for anything a kernel cannot hold."""
        return _FROM_NUMPY.get(np.dtype(dtype))


_FLOATS = frozenset({DType.F32, DType.F64, DType.F16, DType.BF16})
_SIGNED = frozenset({DType.I8, DType.I16, DType.I32, DType.I64})
_UNSIGNED = frozenset({DType.U8, DType.U16, DType.U32, DType.U64})
_NUMPY: dict[DType, np.dtype] = {
    DType.F32: np.dtype(np.float32),
    DType.F64: np.dtype(np.float64),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I8: np.dtype(np.int8),
    DType.I16: np.dtype(np.int16),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.U8: np.dtype(np.uint8),
    DType.U16: np.dtype(np.uint16),
    DType.U32: np.dtype(np.uint32),
    DType.U64: np.dtype(np.uint64),
    DType.BOOL: np.dtype(np.bool_),
}
_FROM_NUMPY = {v: k for k, v in _NUMPY.items()}
_ONNX = {
    DType.F32: 1, DType.U8: 2, DType.I8: 3, DType.U16: 4, DType.I16: 5, DType.I32: 6, DType.I64: 7,
    DType.STRING: 8, DType.BOOL: 9, DType.F16: 10, DType.F64: 11, DType.U32: 12, DType.U64: 13,
    DType.C64: 14, DType.C128: 15, DType.BF16: 16, DType.F8E4M3FN: 17, DType.F8E4M3FNUZ: 18,
    DType.F8E5M2: 19, DType.F8E5M2FNUZ: 20, DType.U4: 21, DType.I4: 22, DType.F4E2M1: 23,
    DType.F8E8M0: 24, DType.U2: 25, DType.I2: 26,
}  # fmt: skip
_FROM_ONNX = {v: k for k, v in _ONNX.items()}
