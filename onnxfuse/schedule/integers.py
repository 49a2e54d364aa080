"""Sums of products of bytes that onnxruntime runs faster than a kernel of ours would. Kernel -> why it is left.

Ours multiply 16-bit pairs (analysis/pairs.py). onnxruntime does the same or better where a factor is unsigned, or where
the processor sums products of signed bytes; and a kernel that cannot be paired has only slow multiplications left.
"""

from __future__ import annotations

from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import axes_of, loads
from onnxfuse.ir.kernel import Kernel
from onnxfuse.target import Target
from onnxfuse.templates.gemm import GEMM, contraction

INT_RUNTIME = "INT_RUNTIME"
_BYTES = frozenset({DType.I8, DType.U8})


def left_to_runtime(kernel: Kernel, target: Target) -> Refusal | None:
    """A refusal for a sum of products of bytes that is not worth compiling for this target."""
    types = _factors(kernel)
    if not types:
        return None
    if target.byte_dots or types != {DType.I8}:
        return Refusal(INT_RUNTIME, f"sums of products of {' and '.join(sorted(types))} on {target.name}")
    c = contraction(kernel)
    found = c if isinstance(c, Refusal) else GEMM.propose(kernel, target)
    if isinstance(found, Refusal):
        return Refusal(INT_RUNTIME, f"no product of matrices: {found.why}")
    assert not isinstance(c, Refusal)
    return None if c.pairs is not None else Refusal(INT_RUNTIME, "no axis along which numbers could be paired")


def _factors(kernel: Kernel) -> set[DType]:
    """Element types of the factors, when the kernel sums products of bytes in i32; else nothing."""
    first = kernel.stages[0] if kernel.stages else None
    if first is None or first.reduce is None or first.reduce_body is None:
        return set()
    if first.reduce.acc is not DType.I32 or first.reduce.combine.name != "add":
        return set()
    types = {ld.dtype for ld in loads(first.reduce_body) if axes_of(ld)}
    return types if types <= _BYTES else set()
