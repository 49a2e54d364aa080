"""One call of a kernel: read the inputs, check the dims, make the outputs, run the phases."""

from __future__ import annotations

from onnxfuse.codegen.build import I8, I64, PTR, VOID
from onnxfuse.codegen.glue.layout import ALIGN, CALL, DESCRIPTOR, FAULT, INVALID_ARGUMENT, STATE, VARIANT
from onnxfuse.codegen.glue.life import known_data
from onnxfuse.codegen.glue.writer import Glue


def compute(g: Glue) -> None:
    """What onnxruntime calls for every run of a node: `compute(state, context)`."""
    _task(g)
    _run(g)
    _inputs(g)
    _outputs(g)
    build = g.build
    with build.function("compute", PTR, [PTR, PTR]) as fn:
        state, context = fn.args
        b = build.ir
        descriptor = g.field(state, STATE, "descriptor", PTR)
        api = g.field(state, STATE, "api", PTR)
        inputs = g.field(descriptor, DESCRIPTOR, "inputs", I64)
        outputs = g.field(descriptor, DESCRIPTOR, "outputs", I64)
        env = g.array(I64, g.field(descriptor, DESCRIPTOR, "env_words", I64))
        bufs = g.array(PTR, build.add(inputs, outputs))
        shapes = build.offset(env, g.field(descriptor, DESCRIPTOR, "first_dim", I64), I64)
        end = g.slot()
        g.attempt(g.call("inputs", state, context, shapes, bufs, end))
        code = g.indirect(g.address(descriptor, DESCRIPTOR, "dims"), I64, [shapes, env, bufs])
        with build.if_then(b.icmp_signed("<", code, build.i64(0)), likely=False):
            build.ret(g.call("fault", api, descriptor, code, env))
        out_bufs = build.offset(bufs, inputs, PTR)
        g.attempt(g.call("outputs", state, context, g.got(end), out_bufs))

        fast = b.icmp_signed("==", code, build.i64(0))
        variant = b.select(
            fast,
            g.field(descriptor, DESCRIPTOR, "fast", PTR),
            g.field(descriptor, DESCRIPTOR, "general", PTR),
        )
        same = b.icmp_unsigned("==", variant, g.field(descriptor, DESCRIPTOR, "fast", PTR))
        packed = b.select(same, g.field(state, STATE, "packed", PTR), g.null())
        packs = b.icmp_signed("!=", g.field(variant, VARIANT, "packs", I64), build.i64(0))
        pack_now = b.and_(packs, g.is_null(packed))
        build.ret(g.call("run", api, context, variant, env, bufs, packed, b.zext(pack_now, I64)))


def _task(g: Glue) -> None:
    """The function onnxruntime's pool calls: one task of one phase."""
    build = g.build
    with build.function("task", VOID, [PTR, I64]) as fn:
        call, index = fn.args
        args = [g.field(call, CALL, name, PTR) for name in ("env", "bufs", "packed", "scratch")]
        g.indirect(g.address(call, CALL, "run"), VOID, [*args, index])


def _run(g: Glue) -> None:
    """run(api, context, variant, env, bufs, packed, pack_now): scratch memory, then all phases."""
    build = g.build
    with build.function("phases", PTR, [PTR, PTR, PTR, PTR, PTR, PTR, PTR]) as fn:
        api, context, variant, env, bufs, packed, scratch = fn.args
        b = build.ir
        call = build.alloca(PTR, len(CALL), align=8)
        for name, value in (("env", env), ("bufs", bufs), ("packed", packed), ("scratch", scratch)):
            build.store(value, g.address(call, CALL, name))
        run_table = g.field(variant, VARIANT, "run", PTR)
        task_table = g.field(variant, VARIANT, "tasks", PTR)
        task = build.module.globals[f"{build.prefix}.task"]
        with build.loop(0, g.field(variant, VARIANT, "phases", I64)) as phase:
            tasks = g.indirect(build.offset(task_table, phase, PTR), I64, [env])
            build.store(g.item(run_table, phase, PTR), g.address(call, CALL, "run"))
            with build.if_then(b.icmp_signed("==", tasks, build.i64(1))):
                b.call(task, [call, build.i64(0)])
            with build.if_then(b.icmp_signed(">", tasks, build.i64(1))):
                # num_batch 0: threads take tasks one at a time, so uneven tasks and busy cores even out.
                handle = b.bitcast(task, PTR)
                g.attempt(g.api(api, "KernelContext_ParallelFor", context, handle, tasks, build.i64(0), call))
        build.ret(g.null())

    with build.function("run", PTR, [PTR, PTR, PTR, PTR, PTR, PTR, I64]) as fn:
        api, context, variant, env, bufs, packed, pack_now = fn.args
        b = build.ir
        scratch_bytes = g.indirect(g.address(variant, VARIANT, "scratch"), I64, [env])
        start = b.and_(b.add(scratch_bytes, build.i64(ALIGN - 1)), build.i64(-ALIGN))
        pack_slot = g.slot(I64)
        wants_pack = b.icmp_signed("!=", pack_now, build.i64(0))
        with build.if_then(wants_pack, likely=False):
            build.store(g.indirect(g.address(variant, VARIANT, "packed_bytes"), I64, []), pack_slot)
        total = b.add(start, g.got(pack_slot, I64))
        with build.if_then(b.icmp_signed("<=", total, build.i64(0))):
            build.ret(g.call("phases", api, context, variant, env, bufs, packed, g.null()))
        allocator, raw = g.slot(), g.slot()
        g.attempt(g.call("scratch", api, context, b.add(total, build.i64(ALIGN)), allocator, raw))
        scratch = g.aligned(g.got(raw))
        packed_slot = g.slot()
        build.store(packed, packed_slot)
        with build.if_then(wants_pack, likely=False):
            build.store(build.offset(scratch, start, I8), packed_slot)
            g.indirect(g.address(variant, VARIANT, "pack"), VOID, [bufs, g.got(packed_slot)])
        status = g.call("phases", api, context, variant, env, bufs, g.got(packed_slot), scratch)
        freed = g.api(api, "AllocatorFree", g.got(allocator), g.got(raw))
        g.api(api, "ReleaseAllocator", g.got(allocator), ret=VOID)
        with build.if_then(g.is_null(status), likely=True):
            build.ret(freed)
        g.drop(api, freed)
        build.ret(status)


def shapes(g: Glue) -> None:
    """shape(...) reads the dims of a tensor, fault(...) says which of a kernel's checks of dims failed."""
    build = g.build
    # Dims of a tensor of known rank; *rank_got tells the rank, and dims are written only if it is the wanted one.
    with build.function("shape", PTR, [PTR, PTR, I64, PTR, PTR]) as fn:
        api, value, rank, rank_got, dims = fn.args
        info = g.slot()
        g.attempt(g.api(api, "GetTensorTypeAndShape", value, info))
        result = g.slot()
        build.store(g.api(api, "GetDimensionsCount", g.got(info), rank_got), result)
        fine = g.is_null(g.got(result))
        same = build.ir.icmp_signed("==", g.got(rank_got, I64), rank)
        with build.if_then(build.ir.and_(fine, same)):
            build.store(g.api(api, "GetDimensions", g.got(info), dims, rank), result)
        g.api(api, "ReleaseTensorTypeAndShapeInfo", g.got(info), ret=VOID)
        build.ret(g.got(result))

    with build.function("fault", PTR, [PTR, PTR, I64, PTR]) as fn:
        api, descriptor, code, env = fn.args
        errors = g.field(descriptor, DESCRIPTOR, "errors", PTR)
        index = build.ir.sub(build.i64(-1), code)
        fault = build.offset(errors, build.mul(index, len(FAULT)), I64)
        text = g.field(fault, FAULT, "text", PTR)
        expected, got = build.load(env, I64), build.load(build.offset(env, 1, I64), I64)
        show = build.ir.icmp_signed("!=", g.field(fault, FAULT, "show_expected", I64), build.i64(0))
        with build.if_then(show):
            build.ret(g.status(api, INVALID_ARGUMENT, text, expected, ", got ", got))
        build.ret(g.status(api, INVALID_ARGUMENT, text, ", got ", got))


def _inputs(g: Glue) -> None:
    """inputs(state, context, shapes, bufs, end): data and dims of all inputs; *end = behind the last dim."""
    build = g.build
    _input(g)
    with build.function("inputs", PTR, [PTR, PTR, PTR, PTR, PTR]) as fn:
        state, context, shapes, bufs, end = fn.args
        b = build.ir
        descriptor = g.field(state, STATE, "descriptor", PTR)
        ranks = g.field(descriptor, DESCRIPTOR, "input_ranks", PTR)
        static = g.field(descriptor, DESCRIPTOR, "static_dims", PTR)
        before = g.slot(I64)  # dims of the inputs before this one
        with build.loop(0, g.field(descriptor, DESCRIPTOR, "inputs", I64)) as i:
            rank, first = g.item(ranks, i, I64), g.got(before, I64)
            dims, data = build.offset(shapes, first, I64), build.offset(bufs, i, PTR)
            known = g.item(known_data(g, state), i, PTR)
            with build.if_else(g.is_null(known)) as (ask, constant):
                with ask:
                    g.attempt(g.call("input", state, context, i, dims, data))
                with constant:
                    build.store(known, data)
                    with build.loop(0, rank) as k:
                        build.store(g.item(static, build.add(first, k), I64), build.offset(dims, k, I64))
            build.store(b.add(first, rank), before)
        build.store(build.offset(shapes, g.got(before, I64), I64), end)
        build.ret(g.null())


def _input(g: Glue) -> None:
    """input(state, context, i, dims, data): dims and data of one input that onnxruntime hands over."""
    build = g.build
    with build.function("input", PTR, [PTR, PTR, I64, PTR, PTR]) as fn:
        state, context, i, dims, data = fn.args
        descriptor = g.field(state, STATE, "descriptor", PTR)
        api = g.field(state, STATE, "api", PTR)
        title_text = g.field(descriptor, DESCRIPTOR, "title", PTR)
        rank = g.item(g.field(descriptor, DESCRIPTOR, "input_ranks", PTR), i, I64)
        value, rank_got = g.slot(), g.slot(I64)
        g.attempt(g.api(api, "KernelContext_GetInput", context, i, value))
        with build.if_then(g.is_null(g.got(value)), likely=False):
            build.ret(g.status(api, INVALID_ARGUMENT, title_text, ": input ", i, " is missing"))
        g.attempt(g.call("shape", api, g.got(value), rank, rank_got, dims))
        found = g.got(rank_got, I64)
        with build.if_then(build.ir.icmp_signed("!=", found, rank), likely=False):
            pieces = (title_text, ": input ", i, ": expected rank ", rank, ", got rank ", found)
            build.ret(g.status(api, INVALID_ARGUMENT, *pieces))
        build.ret(g.api(api, "GetTensorMutableData", g.got(value), data))


def _outputs(g: Glue) -> None:
    """outputs(state, context, shapes, bufs): make all outputs."""
    build = g.build
    with build.function("outputs", PTR, [PTR, PTR, PTR, PTR]) as fn:
        state, context, shapes, bufs = fn.args
        descriptor = g.field(state, STATE, "descriptor", PTR)
        api = g.field(state, STATE, "api", PTR)
        ranks = g.field(descriptor, DESCRIPTOR, "output_ranks", PTR)
        value, end = g.slot(), g.slot()
        build.store(shapes, end)
        with build.loop(0, g.field(descriptor, DESCRIPTOR, "outputs", I64)) as j:
            rank = g.item(ranks, j, I64)
            g.attempt(g.api(api, "KernelContext_GetOutput", context, j, g.got(end), rank, value))
            with build.if_then(g.is_null(g.got(value)), likely=False):
                name = g.field(descriptor, DESCRIPTOR, "title", PTR)
                build.ret(g.status(api, INVALID_ARGUMENT, name, ": output ", j, " is missing"))
            build.store(build.offset(g.got(end), rank, I64), end)
            g.attempt(g.api(api, "GetTensorMutableData", g.got(value), build.offset(bufs, j, PTR)))
        build.ret(g.null())
