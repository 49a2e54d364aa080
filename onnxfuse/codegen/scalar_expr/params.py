"""The parameters of a kernel, as laid down in ir/plan.py."""

from __future__ import annotations

from collections.abc import Mapping

from llvmlite import ir

from onnxfuse.codegen.build import I64, PTR, Builder
from onnxfuse.codegen.scalar_expr.env import Buffer, Env, Stride
from onnxfuse.ir.expr import Expr, Sym, sym, syms_of
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.simplify import dim_expr, simplify
from onnxfuse.ir.types import Dim


def open_kernel(build: Builder, kernel: Kernel, env_ptr: ir.Value, bufs_ptr: ir.Value | None) -> Env:
    """Read dimensions and pointers as laid down in ir/plan.py; every buffer is contiguous.

    Without `bufs_ptr` (K.tasks, K.scratch) the env has dimensions only.
    """
    syms: dict[Sym, ir.Value] = {}
    for k, d in enumerate(kernel.dims):
        syms[d.sym] = build.load(build.offset(env_ptr, k, I64), I64, invariant=True)
    buffers: dict[Value, Buffer] = {}
    at = len(kernel.dims)
    for k, v in enumerate((*kernel.inputs, *kernel.outputs)):
        if v.type is None:
            continue
        shape = v.type.shape
        if bufs_ptr is not None and v.type.dtype.computable and v not in buffers:
            ptr = build.load(build.offset(bufs_ptr, k, PTR), PTR, invariant=True)
            strides = contiguous(build, [_actual(build, d, syms, env_ptr, at + j) for j, d in enumerate(shape)])
            buffers[v] = Buffer(ptr, v.type.dtype, strides, invariant=k < len(kernel.inputs))
        at += len(shape)
    return Env(1, None, {}, syms, buffers)


def contiguous(build: Builder, shape: list[Stride]) -> tuple[Stride, ...]:
    """Row-major strides of a shape."""
    out: list[Stride] = []
    step: Stride = 1
    for d in reversed(shape):
        out.append(step)
        if isinstance(d, ir.Value) or isinstance(step, ir.Value):
            # mixed: an expression cannot name a plain value, so give up the symbolic form from here on
            step = _opaque_product(build, step, d)
        elif isinstance(d, int) and isinstance(step, int):
            step = step * d
        else:
            step = simplify(dim_expr(step) * dim_expr(d))
    return tuple(reversed(out))


def _opaque_product(build: Builder, a: Stride, b: Stride) -> Stride:
    if isinstance(a, Expr) or isinstance(b, Expr):
        raise TypeError("a shape mixes symbolic and opaque dimensions")
    return build.mul(a, b)


def _actual(build: Builder, dim: Dim, syms: Mapping[Sym, ir.Value], env_ptr: ir.Value, slot: int) -> Stride:
    """A dimension symbolically if the kernel's symbols give it, else a symbol for the run-time extent."""
    if isinstance(dim, int) or syms_of(dim) <= set(syms):
        return dim
    name = sym(f"env.{slot}")
    if name not in syms:
        assert isinstance(syms, dict)
        syms[name] = build.load(build.offset(env_ptr, slot, I64), I64, invariant=True)
    return name
