"""Sums of products of bytes that onnxruntime runs faster than a kernel of ours would. Kernel -> why it is left.

Ours multiply 16-bit pairs (analysis/pairs.py). onnxruntime does the same or better where a factor is unsigned, or where
the processor sums products of signed bytes; and a kernel that is no window over planes and cannot be paired has only
slow multiplications left.
"""

from __future__ import annotations

from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import axes_of, loads
from onnxfuse.ir.kernel import Kernel, Stage
from onnxfuse.target import Target
from onnxfuse.templates.gemm import GEMM, contraction
from onnxfuse.templates.several import split_parts
from onnxfuse.templates.window import WINDOW

INT_RUNTIME = "INT_RUNTIME"
_BYTES = frozenset({DType.I8, DType.U8})


def left_to_runtime(kernel: Kernel, target: Target) -> Refusal | None:
    """A refusal for sums of products of bytes of which one is not worth compiling for this target."""
    if not any(_factors(s) for s in kernel.stages):
        return None
    return next((r for part in split_parts(kernel) if (r := _left(part, target)) is not None), None)


def _left(kernel: Kernel, target: Target) -> Refusal | None:
    types = _factors(kernel.stages[0])
    if not types:
        return None
    if target.byte_dots or types != {DType.I8}:
        return Refusal(INT_RUNTIME, f"sums of products of {' and '.join(sorted(types))} on {target.name}")
    if not isinstance(WINDOW.propose(kernel, target), Refusal):
        return None
    c = contraction(kernel)
    found = c if isinstance(c, Refusal) else GEMM.propose(kernel, target)
    if isinstance(found, Refusal):
        return Refusal(INT_RUNTIME, f"no product of matrices: {found.why}")
    assert not isinstance(c, Refusal)
    return None if c.pairs is not None else Refusal(INT_RUNTIME, "no axis along which numbers could be paired")


def _factors(stage: Stage) -> set[DType]:
    """Element types of the factors, when the stage sums products of bytes in i32; else nothing."""
    if stage.reduce is None or stage.reduce_body is None:
        return set()
    if stage.reduce.acc is not DType.I32 or stage.reduce.combine.name != "add":
        return set()
    types = {ld.dtype for ld in loads(stage.reduce_body) if axes_of(ld)}
    return types if types <= _BYTES else set()
