"""Expressions to LLVM: one `Expr` becomes straight-line scalar or vector code.

A Load's flat offset is analysed symbolically in the variable of the vector axis: independent of it -> one scalar load;
stride 1 -> one vector load (masked when the env or a `where` guard asks); stride -1 and 2 -> vector loads and a
shuffle; any other constant stride -> one scalar load per lane; not affine -> gather. Loads on the side of a `where`
that is not taken never touch memory, unless their index is provably in range: then no guard is needed.

Every expression is emitted once per guard scope, so DAG-shaped bodies stay small.
"""

from onnxfuse.codegen.scalar_expr.emit import address, emit_dim, emit_expr, emit_store, literal
from onnxfuse.codegen.scalar_expr.env import Buffer, Env
from onnxfuse.codegen.scalar_expr.functions import gelu_of, sigmoid_of
from onnxfuse.codegen.scalar_expr.joins import join_parts, runs
from onnxfuse.codegen.scalar_expr.offsets import affine, flat_index, in_range
from onnxfuse.codegen.scalar_expr.params import contiguous, open_kernel

__all__ = [
    "Buffer", "Env", "address", "affine", "contiguous", "emit_dim", "emit_expr", "emit_store", "flat_index",
    "gelu_of", "in_range", "join_parts", "literal", "open_kernel", "runs", "sigmoid_of",
]  # fmt: skip
