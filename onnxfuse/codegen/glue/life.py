"""Creation and destruction of a kernel: its state, and constants looked up and packed once."""

from __future__ import annotations

from llvmlite import ir

from onnxfuse.codegen.build import I32, I64, PTR, VOID
from onnxfuse.codegen.glue.layout import ALIGN, DESCRIPTOR, DESCRIPTOR_WORD, STATE, VARIANT
from onnxfuse.codegen.glue.writer import Glue


def allocation(g: Glue) -> None:
    """allocate, free: memory of a kernel; scratch: memory of a call. All of it is onnxruntime's."""
    build = g.build
    # Memory that lives as long as a kernel, from the default allocator (malloc).
    with build.function("allocate", PTR, [PTR, I64, PTR]) as fn:
        api, size, out = fn.args
        allocator = g.slot()
        g.attempt(g.api(api, "GetAllocatorWithDefaultOptions", allocator))
        g.attempt(g.api(api, "AllocatorAlloc", g.got(allocator), size, out))
        g.out_of_memory(api, out, size)
        build.ret(g.null())

    with build.function("free", VOID, [PTR, PTR]) as fn:
        api, memory = fn.args
        with build.if_then(build.ir.not_(g.is_null(memory))):
            allocator = g.slot()
            found = g.api(api, "GetAllocatorWithDefaultOptions", allocator)
            with build.if_then(g.is_null(found), likely=True):
                g.drop(api, g.api(api, "AllocatorFree", g.got(allocator), memory))
            g.drop(api, found)

    # Memory of one call, from the session's own allocator (the arena).
    with build.function("scratch", PTR, [PTR, PTR, I64, PTR, PTR]) as fn:
        api, context, size, allocator_out, out = fn.args
        default, info = g.slot(), g.slot()
        g.attempt(g.api(api, "GetAllocatorWithDefaultOptions", default))
        g.attempt(g.api(api, "AllocatorGetInfo", g.got(default), info))
        g.attempt(g.api(api, "KernelContext_GetAllocator", context, g.got(info), allocator_out))
        result = g.slot()
        build.store(g.api(api, "AllocatorAlloc", g.got(allocator_out), size, out), result)
        with build.if_then(build.ir.not_(g.is_null(g.got(result))), likely=False):
            g.api(api, "ReleaseAllocator", g.got(allocator_out), ret=VOID)
            build.ret(g.got(result))
        with build.if_then(g.is_null(g.got(out)), likely=False):
            g.api(api, "ReleaseAllocator", g.got(allocator_out), ret=VOID)
            g.out_of_memory(api, out, size)
        build.ret(g.null())


def kernel_life(g: Glue) -> None:
    """create(op, api, info, out) and destroy(state)."""
    build = g.build
    _take_consts(g)
    _pack_inputs(g)
    with build.function("destroy", VOID, [PTR]) as fn:
        state = fn.args[0]
        api = g.field(state, STATE, "api", PTR)
        g.call("free", api, g.field(state, STATE, "packed_raw", PTR))
        g.call("free", api, state)

    with build.function("create", PTR, [PTR, PTR, PTR, PTR]) as fn:
        op, api, info, out = fn.args
        descriptor = build.load(build.offset(op, DESCRIPTOR_WORD, I64), PTR)
        state_slot = g.slot()
        words = build.add(g.field(descriptor, DESCRIPTOR, "inputs", I64), len(STATE))
        g.attempt(g.call("allocate", api, build.i64(build.mul(words, 8)), state_slot))
        state = g.got(state_slot)
        for name, value in (("descriptor", descriptor), ("api", api), ("packed", g.null())):
            build.store(value, g.address(state, STATE, name))
        build.store(g.null(), g.address(state, STATE, "packed_raw"))
        for step, args in (("take_consts", [descriptor, info, state]), ("pack_inputs", [descriptor, state])):
            status = g.call(step, *args)
            with build.if_then(build.ir.not_(g.is_null(status)), likely=False):
                g.call("destroy", state)
                build.ret(status)
        build.store(state, out)
        build.ret(g.null())


def known_data(g: Glue, state: ir.Value) -> ir.Value:
    """The table behind a State: data of each input that is constant and known since creation, else null."""
    return g.build.offset(state, len(STATE), PTR)


def _take_consts(g: Glue) -> None:
    """take_consts(descriptor, info, state): look up the constants; for a session they stay where they are.

    One that is not there, or of another shape, is left out: Compute gets it, or refuses it with a message.
    """
    build = g.build
    with build.function("take_consts", PTR, [PTR, PTR, PTR]) as fn:
        descriptor, info, state = fn.args
        b = build.ir
        api, table = g.field(state, STATE, "api", PTR), known_data(g, state)
        dims = g.array(I64, g.field(descriptor, DESCRIPTOR, "env_words", I64))
        at, rank_got, same, is_const, value = (g.slot(t) for t in (I64, I64, I64, I32, PTR))
        with build.loop(0, g.field(descriptor, DESCRIPTOR, "inputs", I64)) as i:
            build.store(g.null(), build.offset(table, i, PTR))
            rank = g.item(g.field(descriptor, DESCRIPTOR, "input_ranks", PTR), i, I64)
            static = build.offset(g.field(descriptor, DESCRIPTOR, "static_dims", PTR), g.got(at, I64), I64)
            build.store(build.add(g.got(at, I64), rank), at)
            flag = g.item(g.field(descriptor, DESCRIPTOR, "const_flags", PTR), i, I64)
            with build.if_then(b.icmp_signed("!=", flag, build.i64(0))):
                build.store(g.null(), value)
                g.attempt(g.api(api, "KernelInfoGetConstantInput_tensor", info, i, is_const, value))
                there = b.icmp_signed("!=", g.got(is_const, I32), ir.Constant(I32, 0))
                with build.if_then(b.and_(there, b.not_(g.is_null(g.got(value))))):
                    g.attempt(g.call("shape", api, g.got(value), rank, rank_got, dims))
                    build.store(b.zext(b.icmp_signed("==", g.got(rank_got, I64), rank), I64), same)
                    with build.loop(0, build.mul(rank, g.got(same, I64))) as k:
                        equal = b.icmp_signed("==", g.item(dims, k, I64), g.item(static, k, I64))
                        build.store(b.and_(g.got(same, I64), b.zext(equal, I64)), same)
                    with build.if_then(b.icmp_signed("!=", g.got(same, I64), build.i64(0))):
                        g.attempt(g.api(api, "GetTensorMutableData", g.got(value), build.offset(table, i, PTR)))
        build.ret(g.null())


def _pack_inputs(g: Glue) -> None:
    """pack_inputs(descriptor, state): pack now if all constants are there, else leave `packed` null."""
    build = g.build
    with build.function("pack_inputs", PTR, [PTR, PTR]) as fn:
        descriptor, state = fn.args
        b = build.ir
        api, table = g.field(state, STATE, "api", PTR), known_data(g, state)
        variant = g.field(descriptor, DESCRIPTOR, "fast", PTR)
        with build.if_then(b.icmp_signed("==", g.field(variant, VARIANT, "packs", I64), build.i64(0))):
            build.ret(g.null())
        with build.loop(0, g.field(descriptor, DESCRIPTOR, "inputs", I64)) as i:
            flag = g.item(g.field(descriptor, DESCRIPTOR, "const_flags", PTR), i, I64)
            absent = g.is_null(g.item(table, i, PTR))
            with build.if_then(b.and_(absent, b.icmp_signed("!=", flag, build.i64(0)))):
                build.ret(g.null())
        size = g.indirect(g.address(variant, VARIANT, "packed_bytes"), I64, [])
        raw = g.slot()
        g.attempt(g.call("allocate", api, build.add(size, ALIGN), raw))
        packed = g.aligned(g.got(raw))
        g.indirect(g.address(variant, VARIANT, "pack"), VOID, [table, packed])
        build.store(packed, g.address(state, STATE, "packed"))
        build.store(g.got(raw), g.address(state, STATE, "packed_raw"))
        build.ret(g.null())
