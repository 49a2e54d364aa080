"""Constant operands of a contraction: packed into panels once, when the kernel is created."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.analysis.roles import Contraction
from onnxfuse.codegen.build import I8, I64, PTR, VOID, Builder, Index, Reg
from onnxfuse.codegen.prims import float_to_half
from onnxfuse.codegen.scalar_expr import Buffer, Env, emit_expr
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import axes_of
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.templates.gemm_design import Access, Design
from onnxfuse.templates.packing import decode


def _panel(d: Design, which: str) -> int:
    return d.tile.mr if which == "a" else d.tile.nr


def _const_axes(c: Contraction, which: str) -> tuple[Axis, ...]:
    """Batch axes a constant factor depends on."""
    used = axes_of(c.a if which == "a" else c.b)
    return tuple(x for x in c.batch if x in used)


def _static(axes: Sequence[Axis]) -> int:
    total = 1
    for axis in axes:
        assert isinstance(axis.extent, int)
        total *= axis.extent
    return total


def _packed_elements(d: Design, which: str) -> int:
    """Elements of the packed copy of a constant factor, one batch point."""
    side = d.c.rows if which == "a" else d.c.cols
    extent, depth = side.extent, d.c.depth
    assert isinstance(extent, int)
    assert isinstance(depth, int)
    return -(-extent // _panel(d, which)) * _panel(d, which) * depth


def _element_bytes(d: Design, which: str) -> int:
    return d.b_bytes if which == "b" else d.c.acc.bytes


def packed_bytes(d: Design, which: str) -> int:
    """Bytes of the packed copy of operand `which` (a or b); 0 when it is not constant."""
    if (d.a if which == "a" else d.b) is not Access.CONST:
        return 0
    return (-(-_own_bytes(d, which) // 64) + 2) * 64  # a vector of rows may read past the end


def _own_bytes(d: Design, which: str) -> int:
    return _static(_const_axes(d.c, which)) * _packed_elements(d, which) * _element_bytes(d, which)


def pack_constants(build: Builder, kernel: Kernel, designs: Sequence[Design]) -> None:
    """Write K.packed_bytes and K.pack: of every design a, then b."""
    with build.function("packed_bytes", I64, []):
        build.ret(sum(packed_bytes(d, which) for d in designs for which in ("a", "b")))
    with build.function("pack", VOID, [PTR, PTR]) as fn:
        bufs, packed = fn.args
        start = 0
        for d in designs:
            env = _const_env(build, kernel, d, bufs)
            for which, how in (("a", d.a), ("b", d.b)):
                if how is Access.CONST:
                    _pack_const(build, env, d, which, build.offset(packed, start // d.c.acc.bytes, d.typ))
                    with build.loop(start + _own_bytes(d, which), start + packed_bytes(d, which), name="end") as at:
                        build.store(build.const(I8, 0), build.offset(packed, at, I8))
                start += packed_bytes(d, which)


def _const_env(build: Builder, kernel: Kernel, d: Design, bufs: Reg) -> Env:
    buffers: dict[Value, Buffer] = {}
    for i, v in enumerate(kernel.inputs):
        if v not in kernel.consts or not v.tensor.static or not v.tensor.dtype.computable:
            continue
        strides: list[int] = []
        step = 1
        for extent in reversed(v.tensor.shape):
            strides.insert(0, step)
            step *= extent if isinstance(extent, int) else 1
        ptr = build.load(build.offset(bufs, i, PTR), PTR)
        buffers[v] = Buffer(ptr, v.tensor.dtype, tuple(strides))
    return with_views(Env(1, None, {}, {}, buffers), d.c)


def _pack_const(build: Builder, env: Env, d: Design, which: str, dst: Reg) -> None:
    """Panels of MR rows or NR columns: [batch][panel][k][lane]; lanes past the end repeat the last."""
    c = d.c
    side, expr = (c.rows, c.a) if which == "a" else (c.cols, c.b)
    width, extent = _panel(d, which), side.extent
    assert isinstance(extent, int)
    axes = _const_axes(c, which)
    own = (side.axis,) if side.factor and side.axis is not None else side.parts
    depth = _static(c.k)
    panels = -(-extent // width)
    with build.loop(0, _static(axes), name="batch") as z, build.loop(0, panels, name="panel") as p:
        place = env.at(decode(build, env, axes, z))
        panel = build.mul(build.add(build.mul(z, panels), p), depth * width)
        with build.loop(0, depth, name="k") as k, build.loop(0, width, name="lane") as i:
            at = build.imin(build.add(build.mul(p, width), i), extent - 1)
            here = place.at({**decode(build, env, c.k, k), **decode(build, env, own, at)})
            spot = build.add(panel, build.add(build.mul(k, width), i))
            value = emit_expr(build, here, expr)
            if which == "b" and d.tile.half:
                value = float_to_half(build, value, DType.BF16)
            build.store(value, build.offset(dst, spot, d.tile.b_typ if which == "b" else d.typ))


def const_base(build: Builder, env: Env, d: Design, which: str, packed: Reg) -> Reg:
    """Start of the panels of a constant operand at the batch point of `env`."""
    if (d.a if which == "a" else d.b) is not Access.CONST:
        return packed
    flat: Index = 0
    for axis in _const_axes(d.c, which):
        assert isinstance(axis.extent, int)
        flat = build.add(build.mul(flat, axis.extent), env.axes[axis])
    return build.offset(packed, build.mul(flat, _packed_elements(d, which)), d.tile.b_typ if which == "b" else d.typ)


def with_views(env: Env, c: Contraction) -> Env:
    """Buffers for values seen with merged dimensions."""
    extra: dict[Value, Buffer] = {}
    for view, seen in c.views.items():
        source = env.buffers.get(seen.source)
        if source is not None:
            strides = tuple(source.strides[j] for j in seen.kept)
            extra[view] = Buffer(source.ptr, source.dtype, strides, source.invariant)
    return env.at(buffers=extra)
