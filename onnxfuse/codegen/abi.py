"""The custom-op library around the kernels: entry point, glue and descriptors in LLVM IR.

`glue_module` writes the module that onnxruntime talks to: `RegisterCustomOps` and one OrtCustomOp per kernel, all
served by the same few functions, which read a constant descriptor that follows the OrtCustomOp in memory.

The kernel ABI is described in `ir/plan.py`. Facts about onnxruntime: the C API is append-only, so slots are constants;
everything used here exists since 1.17 (API 17) and was called on 1.17 and on 1.32. The glue is compiled for the
baseline of the architecture: it must run on a CPU that lacks what the kernels need, to say so.

Rules of the glue: a function that can fail returns an OrtStatus* (null = fine) and has released what it took; nothing
is kept between calls but the State of a kernel (constant after creation: any number of threads may compute at once).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from onnxfuse.codegen.build import I8, I32, I64, PTR, VOID, Builder
from onnxfuse.codegen.cpu import CPU_FEATURES
from onnxfuse.codegen.dims import Fault, env_words, title
from onnxfuse.errors import CompileError
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted
from onnxfuse.target import Target

ENTRY = "RegisterCustomOps"
DIGEST = "onnxfuse_digest"
DIGEST_MARK = "onnxfuse-digest:"
EXPORTS = (ENTRY, DIGEST)
DOMAIN = "onnxfuse"
API_VERSION = 17
GENERAL = "general"  # part of the symbol names of the general variant
MESSAGE_BYTES = 1536  # buffer for the text of a status
TEXT_LIMIT = 1000  # constant parts of a message are cut to this at compile time
ALIGN = 64  # of scratch and packed buffers

# OrtErrorCode
FAIL, INVALID_ARGUMENT, NOT_IMPLEMENTED = 1, 2, 9

# Slots of OrtApi, in pointer-sized words.
SLOT = {
    "CreateStatus": 0,
    "CreateCustomOpDomain": 26,
    "CustomOpDomain_Add": 27,
    "AddCustomOpDomain": 28,
    "GetTensorMutableData": 51,
    "GetDimensionsCount": 61,
    "GetDimensions": 62,
    "GetTensorTypeAndShape": 65,
    "AllocatorAlloc": 75,
    "AllocatorFree": 76,
    "AllocatorGetInfo": 77,
    "GetAllocatorWithDefaultOptions": 78,
    "KernelContext_GetInput": 90,
    "KernelContext_GetOutput": 91,
    "ReleaseStatus": 93,
    "ReleaseTensorTypeAndShapeInfo": 99,
    "ReleaseCustomOpDomain": 101,
    "ReleaseAllocator": 132,
    "KernelInfoGetConstantInput_tensor": 249,
    "KernelContext_GetAllocator": 253,
    "KernelContext_ParallelFor": 274,
}

# OrtCustomOp: a version word, then these function pointers.
OP_FUNCTIONS = (
    "CreateKernel", "GetName", "GetExecutionProviderType", "GetInputType", "GetInputTypeCount", "GetOutputType",
    "GetOutputTypeCount", "KernelCompute", "KernelDestroy", "GetInputCharacteristic", "GetOutputCharacteristic",
    "GetInputMemoryType", "GetVariadicInputMinArity", "GetVariadicInputHomogeneity", "GetVariadicOutputMinArity",
    "GetVariadicOutputHomogeneity", "CreateKernelV2", "KernelComputeV2", "InferOutputShapeFn", "GetStartVersion",
    "GetEndVersion", "GetMayInplace", "ReleaseMayInplace", "GetAliasMap", "ReleaseAliasMap",
)  # fmt: skip
DESCRIPTOR_WORD = 1 + len(OP_FUNCTIONS)  # our pointer follows the OrtCustomOp

# Records of the glue: words of 8 bytes each, pointers or i64.
DESCRIPTOR = (
    "name", "title", "inputs", "outputs", "input_types", "output_types", "input_ranks", "output_ranks", "static_dims",
    "const_flags", "first_dim", "env_words", "dims", "errors", "fast", "general",
)  # fmt: skip
VARIANT = ("phases", "tasks", "run", "scratch", "packs", "packed_bytes", "pack")
FAULT = ("text", "show_expected")
STATE = ("descriptor", "api", "packed", "packed_raw")
CALL = ("run", "env", "bufs", "packed", "scratch")


@dataclass(frozen=True, slots=True)
class Part:
    """What the glue must know about one compiled kernel."""

    kernel: Kernel
    fast: Emitted
    general: Emitted | None
    faults: tuple[Fault, ...]

    def symbols(self) -> Iterator[str]:
        """Every function the glue calls."""
        name = self.kernel.name
        yield f"{name}.dims"
        variants = [(f"{name}.", self.fast)]
        variants += [] if self.general is None else [(f"{name}.{GENERAL}.", self.general)]
        for prefix, emitted in variants:
            yield f"{prefix}scratch"
            yield from (f"{prefix}{part}.{p}" for p in range(emitted.phases) for part in ("tasks", "run"))
            yield from (f"{prefix}{part}" for part in ("packed_bytes", "pack") if emitted.packs)


# ---------------------------------------------------------------------------------------------------------------------
# Constants of the glue module


class _Data:
    """Writes constant tables into a module."""

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.count = 0
        self.texts: dict[bytes, ir.GlobalVariable] = {}

    def text(self, text: str) -> ir.GlobalVariable:
        """A zero-terminated string (zero bytes inside are dropped, long text is cut)."""
        raw = text.encode("utf-8").replace(b"\0", b"")[:TEXT_LIMIT].decode("utf-8", "ignore").encode("utf-8") + b"\0"
        found = self.texts.get(raw)
        if found is None:
            found = self.constant(ir.Constant(ir.ArrayType(I8, len(raw)), bytearray(raw)))
            self.texts[raw] = found
        return found

    def words(self, typ: ir.Type, values: Sequence[int | ir.Constant | ir.GlobalValue]) -> ir.GlobalVariable:
        """An array; never empty, so that it has an address."""
        items = [ir.Constant(typ, v) if isinstance(v, int) else v for v in values] or [ir.Constant(typ, None)]
        return self.constant(ir.Constant(ir.ArrayType(typ, len(items)), items))

    def record(self, names: tuple[str, ...], fields: Mapping[str, int | ir.GlobalValue]) -> ir.GlobalVariable:
        assert tuple(fields) == names, (tuple(fields), names)
        items = [ir.Constant(I64, v) if isinstance(v, int) else v for v in fields.values()]
        return self.constant(ir.Constant.literal_struct(items))

    def constant(self, value: ir.Constant) -> ir.GlobalVariable:
        out = ir.GlobalVariable(self.module, value.type, f"onnxfuse.data.{self.count}")
        self.count += 1
        out.linkage, out.global_constant, out.initializer = "private", True, value
        return out

    def function(self, name: str, ret: ir.Type, args: Sequence[ir.Type]) -> ir.GlobalValue:
        """A function of another module."""
        found = self.module.globals.get(name)
        return found if found is not None else ir.Function(self.module, ir.FunctionType(ret, list(args)), name)


def _variant(data: _Data, kernel: Kernel, emitted: Emitted, infix: str) -> ir.GlobalVariable:
    def fn(name: str, ret: ir.Type, args: Sequence[ir.Type]) -> ir.GlobalValue:
        return data.function(f"{kernel.name}.{infix}{name}", ret, args)

    phases = range(emitted.phases)
    null = ir.Constant(PTR, None)
    return data.record(
        VARIANT,
        {
            "phases": emitted.phases,
            "tasks": data.words(PTR, [fn(f"tasks.{p}", I64, [PTR]) for p in phases]),
            "run": data.words(PTR, [fn(f"run.{p}", VOID, [PTR, PTR, PTR, PTR, I64]) for p in phases]),
            "scratch": fn("scratch", I64, [PTR]),
            "packs": int(emitted.packs),
            "packed_bytes": fn("packed_bytes", I64, []) if emitted.packs else null,
            "pack": fn("pack", VOID, [PTR, PTR]) if emitted.packs else null,
        },
    )


def _descriptor(data: _Data, part: Part) -> ir.GlobalVariable:
    kernel = part.kernel
    fast = _variant(data, kernel, part.fast, "")
    general = fast if part.general is None else _variant(data, kernel, part.general, f"{GENERAL}.")
    types_in = [v.tensor for v in kernel.inputs]
    types_out = kernel.made
    errors = [
        ir.Constant.literal_struct([data.text(f.text), ir.Constant(I64, int(f.show_expected))]) for f in part.faults
    ]
    table = errors or [ir.Constant.literal_struct([ir.Constant(PTR, None), ir.Constant(I64, 0)])]
    return data.record(
        DESCRIPTOR,
        {
            "name": data.text(kernel.name),
            "title": data.text(title(kernel)),
            "inputs": len(kernel.inputs),
            "outputs": len(kernel.outputs),
            "input_types": data.words(I32, [t.dtype.onnx for t in types_in]),
            "output_types": data.words(I32, [t.dtype.onnx for t in types_out]),
            "input_ranks": data.words(I64, [t.rank for t in types_in]),
            "output_ranks": data.words(I64, [t.rank for t in types_out]),
            "static_dims": data.words(I64, [d if isinstance(d, int) else -1 for t in types_in for d in t.shape]),
            "const_flags": data.words(I64, [int(v in kernel.consts) for v in kernel.inputs]),
            "first_dim": len(kernel.dims),
            "env_words": env_words(kernel),
            "dims": data.function(f"{kernel.name}.dims", I64, [PTR, PTR, PTR]),
            "errors": data.constant(ir.Constant(ir.ArrayType(table[0].type, len(table)), table)),
            "fast": fast,
            "general": general,
        },
    )


# ---------------------------------------------------------------------------------------------------------------------
# The glue


def glue_module(parts: Sequence[Part], target: Target, digest: str, required: Sequence[str] | None = None) -> str:
    """Text of the module with `RegisterCustomOps`.

    required: CPU features to ask for at load; None means those of the target.
    """
    glue = _Glue(Builder(target, "onnxfuse"))
    glue.memory_functions()
    glue.texts()
    glue.shapes()
    glue.allocation()
    glue.kernel_life()
    glue.compute()
    ops = [glue.operator(part) for part in parts]
    features = tuple(target.features if required is None else required)
    glue.cpu_check(features if target.triple.startswith("x86_64") else ())
    glue.registration(ops, target)
    glue.digest(digest)
    for fn in glue.build.module.functions:
        if fn.blocks:
            fn.attributes.add("noinline")  # nothing here is hot, and inlining made the glue slow to compile
    return str(glue.build.module)


class _Glue:
    """Writes the glue functions; each method defines a few and may call those of earlier methods."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.data = _Data(build.module)

    # ---- small tools ----

    def null(self) -> ir.Constant:
        return ir.Constant(PTR, None)

    def is_null(self, value: ir.Value) -> ir.Value:
        return self.build.ir.icmp_unsigned("==", value, self.null())

    def field(self, record: ir.Value, names: tuple[str, ...], name: str, typ: ir.Type) -> ir.Value:
        """Read a word of a record."""
        return self.build.load(self.address(record, names, name), typ)

    def address(self, record: ir.Value, names: tuple[str, ...], name: str) -> ir.Value:
        return self.build.offset(record, names.index(name), I64)

    def item(self, table: ir.Value, index: ir.Value, typ: ir.Type) -> ir.Value:
        return self.build.load(self.build.offset(table, index, typ), typ)

    def call(self, name: str, *args: ir.Value) -> ir.Value:
        """Call a function of the glue."""
        return self.build.ir.call(self.build.module.globals[f"{self.build.prefix}.{name}"], list(args))

    def indirect(self, pointer_at: ir.Value, ret: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
        """Call through the function pointer stored at an address."""
        signature = ir.FunctionType(ret, [a.type for a in args])
        callee = self.build.ir.load(pointer_at, typ=ir.PointerType(signature), align=8)
        return self.build.ir.call(callee, list(args))

    def api(self, api: ir.Value, name: str, *args: ir.Value, ret: ir.Type = PTR) -> ir.Value:
        """Call a function of OrtApi."""
        return self.indirect(self.build.offset(api, SLOT[name], PTR), ret, args)

    def attempt(self, status: ir.Value) -> None:
        """Return the status to the caller unless it is null."""
        with self.build.if_then(self.build.ir.not_(self.is_null(status)), likely=False):
            self.build.ret(status)

    def slot(self, typ: ir.Type = PTR) -> ir.Value:
        """A local variable, zero at first."""
        out = self.build.alloca(typ, align=8)
        self.build.store(ir.Constant(typ, None if typ == PTR else 0), out)
        return out

    def got(self, slot: ir.Value, typ: ir.Type = PTR) -> ir.Value:
        return self.build.load(slot, typ)

    def array(self, typ: ir.Type, count: ir.Value) -> ir.Value:
        """Storage of run-time size; call it outside of loops."""
        at_least_one = self.build.imax(count, 1)
        out = self.build.ir.alloca(typ, size=at_least_one)
        out.align = 16
        return out

    def aligned(self, pointer: ir.Value) -> ir.Value:
        """The next multiple of ALIGN."""
        b = self.build.ir
        word = b.ptrtoint(pointer, I64)
        up = b.and_(b.add(word, self.build.i64(ALIGN - 1)), self.build.i64(-ALIGN))
        return b.gep(pointer, [b.sub(up, word)], source_etype=I8)

    # ---- memcpy and friends: LLVM may ask for them, and the library takes nothing from outside ----

    def memory_functions(self) -> None:
        for name, args in (("memcpy", [PTR, PTR, I64]), ("memmove", [PTR, PTR, I64]), ("memset", [PTR, I32, I64])):
            fn = ir.Function(self.build.module, ir.FunctionType(PTR, args), name)
            self.define_memory_function(fn)

    def define_memory_function(self, fn: ir.Function) -> None:
        build = self.build
        body = f"{fn.name}.body"
        with build.function(body, VOID, [a.type for a in fn.args]) as inner:
            to, source, size = inner.args
            if fn.name == "memset":
                self.fill(to, source, size)
            elif fn.name == "memcpy":
                self.copy_up(to, source, size)
            else:
                b = build.ir
                distance = b.sub(b.ptrtoint(to, I64), b.ptrtoint(source, I64))
                with build.if_else(b.icmp_unsigned(">=", distance, size)) as (up, down):
                    with up:
                        self.copy_up(to, source, size)
                    with down:
                        self.copy_down(to, source, size)
        # The name that LLVM calls; "no-builtins" keeps the loops from becoming calls of this very function.
        set.add(fn.attributes, '"no-builtins"')
        fn.attributes.add("nounwind")
        outer = ir.IRBuilder(fn.append_basic_block("entry"))
        outer.call(inner, list(fn.args))
        outer.ret(fn.args[0])

    def copy_up(self, to: ir.Value, source: ir.Value, size: ir.Value) -> None:
        build = self.build
        bulk = build.ir.and_(size, build.i64(-16))
        with build.loop(0, bulk, 16) as k:
            build.store(build.load(build.offset(source, k, I8), I8, 16), build.offset(to, k, I8))
        with build.loop(bulk, size) as k:
            build.store(build.load(build.offset(source, k, I8), I8), build.offset(to, k, I8))

    def copy_down(self, to: ir.Value, source: ir.Value, size: ir.Value) -> None:
        build = self.build
        with build.loop(0, size) as k:
            at = build.sub(build.sub(size, 1), k)
            build.store(build.load(build.offset(source, at, I8), I8), build.offset(to, at, I8))

    def fill(self, to: ir.Value, value: ir.Value, size: ir.Value) -> None:
        build = self.build
        byte = build.ir.trunc(value, I8)
        bulk = build.ir.and_(size, build.i64(-16))
        with build.loop(0, bulk, 16) as k:
            build.store(build.splat(byte, 16), build.offset(to, k, I8))
        with build.loop(bulk, size) as k:
            build.store(byte, build.offset(to, k, I8))

    # ---- text of messages ----

    def texts(self) -> None:
        """append(buffer, at, text) and append_number(buffer, at, number) return the new end; status(...) makes one."""
        build = self.build
        with build.function("append", I64, [PTR, I64, PTR]) as fn:
            buffer, at, text = fn.args
            room = build.sub(MESSAGE_BYTES - 1, at)
            with build.loop(0, room) as k:
                byte = build.load(build.offset(text, k, I8), I8)
                end = build.add(at, k)
                build.store(byte, build.offset(buffer, end, I8))
                with build.if_then(build.ir.icmp_unsigned("==", byte, ir.Constant(I8, 0))):
                    build.ret(end)
            build.store(ir.Constant(I8, 0), build.offset(buffer, MESSAGE_BYTES - 1, I8))
            build.ret(MESSAGE_BYTES - 1)
        with build.function("append_number", I64, [PTR, I64, I64]) as fn:
            buffer, at, number = fn.args
            b = build.ir
            digits = build.alloca(I8, 24, align=8)
            negative = b.icmp_signed("<", number, build.i64(0))
            size = b.select(negative, b.neg(number), number)
            with build.carry(0, 22, 1, [build.i64(23), size]) as it:
                place, left = it.values
                more = b.or_(b.icmp_signed("==", it.index, build.i64(0)), b.icmp_unsigned("!=", left, build.i64(0)))
                here = b.select(more, b.sub(place, build.i64(1)), place)
                digit = b.add(b.trunc(b.urem(left, build.i64(10)), I8), ir.Constant(I8, ord("0")))
                with build.if_then(more):
                    build.store(digit, build.offset(digits, here, I8))
                it.next = [here, b.udiv(left, build.i64(10))]
            start = it.results[0]
            with build.if_then(negative):
                build.store(ir.Constant(I8, ord("-")), build.offset(digits, b.sub(start, build.i64(1)), I8))
            first = b.select(negative, b.sub(start, build.i64(1)), start)
            build.store(ir.Constant(I8, 0), build.offset(digits, 23, I8))
            build.ret(self.call("append", buffer, at, build.offset(digits, first, I8)))

    def status(self, api: ir.Value, code: int, *pieces: str | ir.Value) -> ir.Value:
        """A new OrtStatus; pieces are constant texts, pointers to texts and numbers."""
        build = self.build
        buffer = build.alloca(I8, MESSAGE_BYTES, align=16)
        at: ir.Value = build.i64(0)
        for piece in pieces:
            if isinstance(piece, str):
                at = self.call("append", buffer, at, self.data.text(piece))
            elif piece.type == I64:
                at = self.call("append_number", buffer, at, piece)
            else:
                at = self.call("append", buffer, at, piece)
        return self.api(api, "CreateStatus", ir.Constant(I32, code), buffer)

    # ---- shapes ----

    def shapes(self) -> None:
        build = self.build
        # Dims of a tensor of known rank; *rank_got tells the rank, and dims are written only if it is the wanted one.
        with build.function("shape", PTR, [PTR, PTR, I64, PTR, PTR]) as fn:
            api, value, rank, rank_got, dims = fn.args
            info = self.slot()
            self.attempt(self.api(api, "GetTensorTypeAndShape", value, info))
            result = self.slot()
            build.store(self.api(api, "GetDimensionsCount", self.got(info), rank_got), result)
            fine = self.is_null(self.got(result))
            same = build.ir.icmp_signed("==", self.got(rank_got, I64), rank)
            with build.if_then(build.ir.and_(fine, same)):
                build.store(self.api(api, "GetDimensions", self.got(info), dims, rank), result)
            self.api(api, "ReleaseTensorTypeAndShapeInfo", self.got(info), ret=VOID)
            build.ret(self.got(result))

        with build.function("fault", PTR, [PTR, PTR, I64, PTR]) as fn:
            api, descriptor, code, env = fn.args
            errors = self.field(descriptor, DESCRIPTOR, "errors", PTR)
            index = build.ir.sub(build.i64(-1), code)
            fault = build.offset(errors, build.mul(index, len(FAULT)), I64)
            text = self.field(fault, FAULT, "text", PTR)
            expected, got = build.load(env, I64), build.load(build.offset(env, 1, I64), I64)
            show = build.ir.icmp_signed("!=", self.field(fault, FAULT, "show_expected", I64), build.i64(0))
            with build.if_then(show):
                build.ret(self.status(api, INVALID_ARGUMENT, text, expected, ", got ", got))
            build.ret(self.status(api, INVALID_ARGUMENT, text, ", got ", got))

    # ---- memory from onnxruntime ----

    def allocation(self) -> None:
        build = self.build
        # Memory that lives as long as a kernel, from the default allocator (malloc).
        with build.function("allocate", PTR, [PTR, I64, PTR]) as fn:
            api, size, out = fn.args
            allocator = self.slot()
            self.attempt(self.api(api, "GetAllocatorWithDefaultOptions", allocator))
            self.attempt(self.api(api, "AllocatorAlloc", self.got(allocator), size, out))
            self.out_of_memory(api, out, size)
            build.ret(self.null())

        with build.function("free", VOID, [PTR, PTR]) as fn:
            api, memory = fn.args
            with build.if_then(build.ir.not_(self.is_null(memory))):
                allocator = self.slot()
                found = self.api(api, "GetAllocatorWithDefaultOptions", allocator)
                with build.if_then(self.is_null(found), likely=True):
                    self.drop(api, self.api(api, "AllocatorFree", self.got(allocator), memory))
                self.drop(api, found)

        # Memory of one call, from the session's own allocator (the arena).
        with build.function("scratch", PTR, [PTR, PTR, I64, PTR, PTR]) as fn:
            api, context, size, allocator_out, out = fn.args
            default, info = self.slot(), self.slot()
            self.attempt(self.api(api, "GetAllocatorWithDefaultOptions", default))
            self.attempt(self.api(api, "AllocatorGetInfo", self.got(default), info))
            self.attempt(self.api(api, "KernelContext_GetAllocator", context, self.got(info), allocator_out))
            result = self.slot()
            build.store(self.api(api, "AllocatorAlloc", self.got(allocator_out), size, out), result)
            with build.if_then(build.ir.not_(self.is_null(self.got(result))), likely=False):
                self.api(api, "ReleaseAllocator", self.got(allocator_out), ret=VOID)
                build.ret(self.got(result))
            with build.if_then(self.is_null(self.got(out)), likely=False):
                self.api(api, "ReleaseAllocator", self.got(allocator_out), ret=VOID)
                self.out_of_memory(api, out, size)
            build.ret(self.null())

    def out_of_memory(self, api: ir.Value, out: ir.Value, size: ir.Value) -> None:
        with self.build.if_then(self.is_null(self.got(out)), likely=False):
            self.build.ret(self.status(api, FAIL, "onnxfuse: no memory for a buffer of ", size, " bytes"))

    def drop(self, api: ir.Value, status: ir.Value) -> None:
        """Ignore a status in a place that cannot report it (kernel destruction)."""
        with self.build.if_then(self.build.ir.not_(self.is_null(status)), likely=False):
            self.api(api, "ReleaseStatus", status, ret=VOID)

    # ---- creation and destruction ----

    def kernel_life(self) -> None:
        build = self.build
        self.define_pack_inputs()
        with build.function("destroy", VOID, [PTR]) as fn:
            state = fn.args[0]
            api = self.field(state, STATE, "api", PTR)
            self.call("free", api, self.field(state, STATE, "packed_raw", PTR))
            self.call("free", api, state)

        with build.function("create", PTR, [PTR, PTR, PTR, PTR]) as fn:
            op, api, info, out = fn.args
            descriptor = build.load(build.offset(op, DESCRIPTOR_WORD, I64), PTR)
            state_slot = self.slot()
            self.attempt(self.call("allocate", api, build.i64(8 * len(STATE)), state_slot))
            state = self.got(state_slot)
            for name, value in (("descriptor", descriptor), ("api", api), ("packed", self.null())):
                build.store(value, self.address(state, STATE, name))
            build.store(self.null(), self.address(state, STATE, "packed_raw"))
            status = self.call("pack_inputs", descriptor, info, state)
            with build.if_then(build.ir.not_(self.is_null(status)), likely=False):
                self.call("destroy", state)
                build.ret(status)
            build.store(state, out)
            build.ret(self.null())

    def define_pack_inputs(self) -> None:
        """pack_inputs(descriptor, info, state): pack now if all constants are there, else leave `packed` null."""
        build = self.build
        with build.function("pack_inputs", PTR, [PTR, PTR, PTR]) as fn:
            descriptor, info, state = fn.args
            b = build.ir
            api = self.field(state, STATE, "api", PTR)
            variant = self.field(descriptor, DESCRIPTOR, "fast", PTR)
            packs = self.field(variant, VARIANT, "packs", I64)
            with build.if_then(b.icmp_signed("==", packs, build.i64(0))):
                build.ret(self.null())
            count = self.field(descriptor, DESCRIPTOR, "inputs", I64)
            bufs = self.array(PTR, count)
            words = self.field(descriptor, DESCRIPTOR, "env_words", I64)
            dims = self.array(I64, words)
            at, rank_got, is_const, value, data = (self.slot(t) for t in (I64, I64, I32, PTR, PTR))
            with build.loop(0, count) as i:
                build.store(self.null(), build.offset(bufs, i, PTR))
                rank = self.item(self.field(descriptor, DESCRIPTOR, "input_ranks", PTR), i, I64)
                static = build.offset(self.field(descriptor, DESCRIPTOR, "static_dims", PTR), self.got(at, I64), I64)
                build.store(build.add(self.got(at, I64), rank), at)
                flag = self.item(self.field(descriptor, DESCRIPTOR, "const_flags", PTR), i, I64)
                with build.if_then(b.icmp_signed("!=", flag, build.i64(0))):
                    self.attempt(self.api(api, "KernelInfoGetConstantInput_tensor", info, i, is_const, value))
                    absent = b.icmp_signed("==", self.got(is_const, I32), ir.Constant(I32, 0))
                    with build.if_then(b.or_(absent, self.is_null(self.got(value)))):
                        build.ret(self.null())
                    self.attempt(self.call("shape", api, self.got(value), rank, rank_got, dims))
                    with build.if_then(b.icmp_signed("!=", self.got(rank_got, I64), rank)):
                        build.ret(self.null())  # Compute will refuse it with a message
                    with build.loop(0, rank) as k:
                        differs = b.icmp_signed("!=", self.item(dims, k, I64), self.item(static, k, I64))
                        with build.if_then(differs):
                            build.ret(self.null())
                    self.attempt(self.api(api, "GetTensorMutableData", self.got(value), data))
                    build.store(self.got(data), build.offset(bufs, i, PTR))
            size = self.indirect(self.address(variant, VARIANT, "packed_bytes"), I64, [])
            raw = self.slot()
            self.attempt(self.call("allocate", api, build.add(size, ALIGN), raw))
            packed = self.aligned(self.got(raw))
            self.indirect(self.address(variant, VARIANT, "pack"), VOID, [bufs, packed])
            build.store(packed, self.address(state, STATE, "packed"))
            build.store(self.got(raw), self.address(state, STATE, "packed_raw"))
            build.ret(self.null())

    # ---- compute ----

    def compute(self) -> None:
        self.define_task()
        self.define_run()
        self.define_inputs()
        self.define_outputs()
        build = self.build
        with build.function("compute", PTR, [PTR, PTR]) as fn:
            state, context = fn.args
            b = build.ir
            descriptor = self.field(state, STATE, "descriptor", PTR)
            api = self.field(state, STATE, "api", PTR)
            inputs = self.field(descriptor, DESCRIPTOR, "inputs", I64)
            outputs = self.field(descriptor, DESCRIPTOR, "outputs", I64)
            env = self.array(I64, self.field(descriptor, DESCRIPTOR, "env_words", I64))
            bufs = self.array(PTR, build.add(inputs, outputs))
            shapes = build.offset(env, self.field(descriptor, DESCRIPTOR, "first_dim", I64), I64)
            end = self.slot()
            self.attempt(self.call("inputs", state, context, shapes, bufs, end))
            code = self.indirect(self.address(descriptor, DESCRIPTOR, "dims"), I64, [shapes, env, bufs])
            with build.if_then(b.icmp_signed("<", code, build.i64(0)), likely=False):
                build.ret(self.call("fault", api, descriptor, code, env))
            out_bufs = build.offset(bufs, inputs, PTR)
            self.attempt(self.call("outputs", state, context, self.got(end), out_bufs))

            fast = b.icmp_signed("==", code, build.i64(0))
            variant = b.select(
                fast,
                self.field(descriptor, DESCRIPTOR, "fast", PTR),
                self.field(descriptor, DESCRIPTOR, "general", PTR),
            )
            same = b.icmp_unsigned("==", variant, self.field(descriptor, DESCRIPTOR, "fast", PTR))
            packed = b.select(same, self.field(state, STATE, "packed", PTR), self.null())
            packs = b.icmp_signed("!=", self.field(variant, VARIANT, "packs", I64), build.i64(0))
            pack_now = b.and_(packs, self.is_null(packed))
            build.ret(self.call("run", api, context, variant, env, bufs, packed, b.zext(pack_now, I64)))

    def define_task(self) -> None:
        """The function onnxruntime's pool calls: one task of one phase."""
        build = self.build
        with build.function("task", VOID, [PTR, I64]) as fn:
            call, index = fn.args
            args = [self.field(call, CALL, name, PTR) for name in ("env", "bufs", "packed", "scratch")]
            self.indirect(self.address(call, CALL, "run"), VOID, [*args, index])

    def define_run(self) -> None:
        """run(api, context, variant, env, bufs, packed, pack_now): scratch memory, then all phases."""
        build = self.build
        with build.function("phases", PTR, [PTR, PTR, PTR, PTR, PTR, PTR, PTR]) as fn:
            api, context, variant, env, bufs, packed, scratch = fn.args
            b = build.ir
            call = build.alloca(PTR, len(CALL), align=8)
            for name, value in (("env", env), ("bufs", bufs), ("packed", packed), ("scratch", scratch)):
                build.store(value, self.address(call, CALL, name))
            run_table = self.field(variant, VARIANT, "run", PTR)
            task_table = self.field(variant, VARIANT, "tasks", PTR)
            task = build.module.globals[f"{build.prefix}.task"]
            with build.loop(0, self.field(variant, VARIANT, "phases", I64)) as phase:
                tasks = self.indirect(build.offset(task_table, phase, PTR), I64, [env])
                build.store(self.item(run_table, phase, PTR), self.address(call, CALL, "run"))
                with build.if_then(b.icmp_signed("==", tasks, build.i64(1))):
                    b.call(task, [call, build.i64(0)])
                with build.if_then(b.icmp_signed(">", tasks, build.i64(1))):
                    # num_batch 0: threads take tasks one at a time, so uneven tasks and busy cores even out.
                    handle = b.bitcast(task, PTR)
                    self.attempt(self.api(api, "KernelContext_ParallelFor", context, handle, tasks, build.i64(0), call))
            build.ret(self.null())

        with build.function("run", PTR, [PTR, PTR, PTR, PTR, PTR, PTR, I64]) as fn:
            api, context, variant, env, bufs, packed, pack_now = fn.args
            b = build.ir
            scratch_bytes = self.indirect(self.address(variant, VARIANT, "scratch"), I64, [env])
            start = b.and_(b.add(scratch_bytes, build.i64(ALIGN - 1)), build.i64(-ALIGN))
            pack_slot = self.slot(I64)
            wants_pack = b.icmp_signed("!=", pack_now, build.i64(0))
            with build.if_then(wants_pack, likely=False):
                build.store(self.indirect(self.address(variant, VARIANT, "packed_bytes"), I64, []), pack_slot)
            total = b.add(start, self.got(pack_slot, I64))
            with build.if_then(b.icmp_signed("<=", total, build.i64(0))):
                build.ret(self.call("phases", api, context, variant, env, bufs, packed, self.null()))
            allocator, raw = self.slot(), self.slot()
            self.attempt(self.call("scratch", api, context, b.add(total, build.i64(ALIGN)), allocator, raw))
            scratch = self.aligned(self.got(raw))
            packed_slot = self.slot()
            build.store(packed, packed_slot)
            with build.if_then(wants_pack, likely=False):
                build.store(build.offset(scratch, start, I8), packed_slot)
                self.indirect(self.address(variant, VARIANT, "pack"), VOID, [bufs, self.got(packed_slot)])
            status = self.call("phases", api, context, variant, env, bufs, self.got(packed_slot), scratch)
            freed = self.api(api, "AllocatorFree", self.got(allocator), self.got(raw))
            self.api(api, "ReleaseAllocator", self.got(allocator), ret=VOID)
            with build.if_then(self.is_null(status), likely=True):
                build.ret(freed)
            self.drop(api, freed)
            build.ret(status)

    def define_inputs(self) -> None:
        """inputs(state, context, shapes, bufs, end): data and dims of all inputs; *end = behind the last dim."""
        build = self.build
        with build.function("inputs", PTR, [PTR, PTR, PTR, PTR, PTR]) as fn:
            state, context, shapes, bufs, end = fn.args
            b = build.ir
            descriptor = self.field(state, STATE, "descriptor", PTR)
            api = self.field(state, STATE, "api", PTR)
            ranks = self.field(descriptor, DESCRIPTOR, "input_ranks", PTR)
            title_text = self.field(descriptor, DESCRIPTOR, "title", PTR)
            value, rank_got = self.slot(), self.slot(I64)
            build.store(shapes, end)
            with build.loop(0, self.field(descriptor, DESCRIPTOR, "inputs", I64)) as i:
                self.attempt(self.api(api, "KernelContext_GetInput", context, i, value))
                with build.if_then(self.is_null(self.got(value)), likely=False):
                    build.ret(self.status(api, INVALID_ARGUMENT, title_text, ": input ", i, " is missing"))
                rank, dims = self.item(ranks, i, I64), self.got(end)
                self.attempt(self.call("shape", api, self.got(value), rank, rank_got, dims))
                found = self.got(rank_got, I64)
                with build.if_then(b.icmp_signed("!=", found, rank), likely=False):
                    pieces = (title_text, ": input ", i, ": expected rank ", rank, ", got rank ", found)
                    build.ret(self.status(api, INVALID_ARGUMENT, *pieces))
                build.store(build.offset(dims, rank, I64), end)
                self.attempt(self.api(api, "GetTensorMutableData", self.got(value), build.offset(bufs, i, PTR)))
            build.ret(self.null())

    def define_outputs(self) -> None:
        """outputs(state, context, shapes, bufs): make all outputs."""
        build = self.build
        with build.function("outputs", PTR, [PTR, PTR, PTR, PTR]) as fn:
            state, context, shapes, bufs = fn.args
            descriptor = self.field(state, STATE, "descriptor", PTR)
            api = self.field(state, STATE, "api", PTR)
            ranks = self.field(descriptor, DESCRIPTOR, "output_ranks", PTR)
            value, end = self.slot(), self.slot()
            build.store(shapes, end)
            with build.loop(0, self.field(descriptor, DESCRIPTOR, "outputs", I64)) as j:
                rank = self.item(ranks, j, I64)
                self.attempt(self.api(api, "KernelContext_GetOutput", context, j, self.got(end), rank, value))
                with build.if_then(self.is_null(self.got(value)), likely=False):
                    name = self.field(descriptor, DESCRIPTOR, "title", PTR)
                    build.ret(self.status(api, INVALID_ARGUMENT, name, ": output ", j, " is missing"))
                build.store(build.offset(self.got(end), rank, I64), end)
                self.attempt(self.api(api, "GetTensorMutableData", self.got(value), build.offset(bufs, j, PTR)))
            build.ret(self.null())

    # ---- OrtCustomOp ----

    def operator(self, part: Part) -> ir.GlobalVariable:
        """The OrtCustomOp of a kernel, with its descriptor behind it."""
        functions = self.getters()
        words: list[ir.Constant | ir.GlobalValue] = [ir.Constant(I32, API_VERSION)]
        words += [functions.get(name, self.null()) for name in OP_FUNCTIONS]
        words.append(_descriptor(self.data, part))
        return self.data.constant(ir.Constant.literal_struct(words))

    def getters(self) -> dict[str, ir.GlobalValue]:
        build = self.build
        if f"{build.prefix}.get_name" not in build.module.globals:
            self.define_getters()
        names = {
            "CreateKernelV2": "create", "KernelComputeV2": "compute", "KernelDestroy": "destroy", "GetName": "get_name",
            "GetExecutionProviderType": "get_null", "GetInputType": "get_input_types",
            "GetOutputType": "get_output_types", "GetInputTypeCount": "get_inputs", "GetOutputTypeCount": "get_outputs",
            "GetInputCharacteristic": "get_zero_of", "GetOutputCharacteristic": "get_zero_of",
            "GetInputMemoryType": "get_zero_of", "GetVariadicInputMinArity": "get_zero",
            "GetVariadicInputHomogeneity": "get_zero", "GetVariadicOutputMinArity": "get_zero",
            "GetVariadicOutputHomogeneity": "get_zero", "GetStartVersion": "get_one", "GetEndVersion": "get_last",
        }  # fmt: skip
        return {slot: build.module.globals[f"{build.prefix}.{name}"] for slot, name in names.items()}

    def define_getters(self) -> None:
        build = self.build

        def descriptor(op: ir.Value) -> ir.Value:
            return build.load(build.offset(op, DESCRIPTOR_WORD, I64), PTR)

        with build.function("get_name", PTR, [PTR]) as fn:
            build.ret(self.field(descriptor(fn.args[0]), DESCRIPTOR, "name", PTR))
        with build.function("get_null", PTR, [PTR]):
            build.ret(self.null())  # any provider: the CPU
        for name in ("inputs", "outputs"):
            with build.function(f"get_{name}", I64, [PTR]) as fn:
                build.ret(self.field(descriptor(fn.args[0]), DESCRIPTOR, name, I64))
        for name in ("input_types", "output_types"):
            with build.function(f"get_{name}", I32, [PTR, I64]) as fn:
                build.ret(self.item(self.field(descriptor(fn.args[0]), DESCRIPTOR, name, PTR), fn.args[1], I32))
        with build.function("get_zero_of", I32, [PTR, I64]):
            build.ret(ir.Constant(I32, 0))  # INPUT_OUTPUT_REQUIRED, OrtMemTypeDefault
        for name, value in (("get_zero", 0), ("get_one", 1), ("get_last", 2**31 - 1)):
            with build.function(name, I32, [PTR]):
                build.ret(ir.Constant(I32, value))

    # ---- registration ----

    def cpu_check(self, features: Sequence[str]) -> None:
        """missing_feature() returns the name of the first required feature the machine lacks, or null."""
        build = self.build
        unknown = [f for f in features if f not in CPU_FEATURES]
        if unknown:
            raise CompileError("E_CPU_FEATURE", f"no CPU test is known for {', '.join(unknown)}")
        if features:
            self.define_cpuid()
        with build.function("missing_feature", PTR, []):
            b = build.ir
            for feature in features:
                leaf, sub, register, bit, state = CPU_FEATURES[feature]
                numbers = [ir.Constant(I32, n) for n in (leaf, sub, register)]
                on = b.and_(self.call("cpuid", *numbers), ir.Constant(I32, 1 << bit))
                lacks = b.icmp_unsigned("==", on, ir.Constant(I32, 0))
                if state:
                    enabled = b.and_(self.call("enabled_state"), ir.Constant(I32, state))
                    lacks = b.or_(lacks, b.icmp_unsigned("!=", enabled, ir.Constant(I32, state)))
                with build.if_then(lacks, likely=False):
                    build.ret(self.data.text(feature))
            build.ret(self.null())

    def define_cpuid(self) -> None:
        build = self.build
        quad = ir.LiteralStructType([I32, I32, I32, I32])
        with build.function("cpuid", I32, [I32, I32, I32]) as fn:
            leaf, sub, register = fn.args
            b = build.ir
            signature = ir.FunctionType(quad, [I32, I32])
            constraint = "={ax},={bx},={cx},={dx},{ax},{cx},~{dirflag},~{fpsr},~{flags}"

            def cpuid(a: ir.Value, c: ir.Value) -> ir.Value:
                return b.asm(signature, "cpuid", constraint, [a, c], True)

            # Leaves beyond the last return something else: ask for the last one of this range first.
            base = b.and_(leaf, ir.Constant(I32, 0x80000000))
            last = b.extract_value(cpuid(base, ir.Constant(I32, 0)), 0)
            with build.if_then(b.icmp_unsigned("<", last, leaf)):
                build.ret(ir.Constant(I32, 0))
            found = cpuid(leaf, sub)
            out: ir.Value = b.extract_value(found, 0)
            for k in range(1, 4):
                out = b.select(b.icmp_unsigned("==", register, ir.Constant(I32, k)), b.extract_value(found, k), out)
            build.ret(out)
        with build.function("enabled_state", I32, []):
            b = build.ir
            numbers = [ir.Constant(I32, n) for n in (1, 0, 2)]
            osxsave = b.and_(self.call("cpuid", *numbers), ir.Constant(I32, 1 << 27))
            with build.if_then(b.icmp_unsigned("==", osxsave, ir.Constant(I32, 0))):
                build.ret(ir.Constant(I32, 0))
            pair = ir.LiteralStructType([I32, I32])
            got = b.asm(ir.FunctionType(pair, [I32]), "xgetbv", "={ax},={dx},{cx}", [ir.Constant(I32, 0)], True)
            build.ret(b.extract_value(got, 0))

    def registration(self, ops: Sequence[ir.GlobalVariable], target: Target) -> None:
        build = self.build
        owner, cached = (self.variable(name) for name in ("owner", "domain"))
        with build.function("new_domain", PTR, [PTR, PTR]) as fn:
            api, out = fn.args
            self.attempt(self.api(api, "CreateCustomOpDomain", self.data.text(DOMAIN), out))
            table = self.data.words(PTR, ops)
            with build.loop(0, len(ops)) as k:
                status = self.api(api, "CustomOpDomain_Add", self.got(out), self.item(table, k, PTR))
                with build.if_then(build.ir.not_(self.is_null(status)), likely=False):
                    self.api(api, "ReleaseCustomOpDomain", self.got(out), ret=VOID)
                    build.ret(status)
            build.ret(self.null())

        # A domain must outlive every SessionOptions it was added to, so one domain serves them all until the library is
        # unloaded. A second onnxruntime in the same process gets domains of its own, which are never released.
        with build.function("domain_for", PTR, [PTR, PTR]) as fn:
            api, out = fn.args
            b = build.ir
            zero = build.i64(0)
            me = b.ptrtoint(api, I64)
            first = b.extract_value(b.cmpxchg(owner, zero, me, "seq_cst", "seq_cst"), 0)
            ours = b.or_(b.icmp_unsigned("==", first, zero), b.icmp_unsigned("==", first, me))
            with build.if_then(ours):
                have = b.load_atomic(cached, "seq_cst", 8, typ=I64)
                with build.if_then(b.icmp_unsigned("!=", have, zero)):
                    build.store(b.inttoptr(have, PTR), out)
                    build.ret(self.null())
            self.attempt(self.call("new_domain", api, out))
            with build.if_then(ours):
                made = b.ptrtoint(self.got(out), I64)
                before = b.extract_value(b.cmpxchg(cached, zero, made, "seq_cst", "seq_cst"), 0)
                with build.if_then(b.icmp_unsigned("!=", before, zero), likely=False):
                    self.api(api, "ReleaseCustomOpDomain", self.got(out), ret=VOID)  # another thread was faster
                    build.store(b.inttoptr(before, PTR), out)
            build.ret(self.null())

        with build.function("unload", VOID, []):
            b = build.ir
            have = build.load(cached, I64)
            with build.if_then(b.icmp_unsigned("!=", have, build.i64(0))):
                api = b.inttoptr(build.load(owner, I64), PTR)
                self.api(api, "ReleaseCustomOpDomain", b.inttoptr(have, PTR), ret=VOID)
        self.at_unload(build.module.globals[f"{build.prefix}.unload"])
        self.define_entry(target)

    def variable(self, name: str) -> ir.GlobalVariable:
        out = ir.GlobalVariable(self.build.module, I64, f"{self.build.prefix}.{name}")
        out.linkage, out.initializer, out.align = "internal", ir.Constant(I64, 0), 8
        return out

    def at_unload(self, fn: ir.GlobalValue) -> None:
        # By section name: llvm.global_dtors would become .dtors, which nothing runs any more.
        entry = ir.GlobalVariable(self.build.module, PTR, f"{self.build.prefix}.at_unload")
        entry.linkage, entry.initializer, entry.section, entry.align = "internal", fn, ".fini_array", 8
        table = ir.Constant(ir.ArrayType(PTR, 1), [entry])
        used = ir.GlobalVariable(self.build.module, table.type, "llvm.used")
        used.linkage, used.initializer, used.section = "appending", table, "llvm.metadata"

    def define_entry(self, target: Target) -> None:
        build = self.build
        with build.function("register", PTR, [PTR, PTR]) as fn:
            options, base = fn.args
            get_api, get_version = base, build.offset(base, 1, PTR)
            api = self.indirect(get_api, PTR, [ir.Constant(I32, API_VERSION)])
            with build.if_then(self.is_null(api), likely=False):
                oldest = self.indirect(get_api, PTR, [ir.Constant(I32, 1)])
                with build.if_then(self.is_null(oldest), likely=False):
                    # No way to report: going on would silently run without the kernels, so stop here.
                    build.call("llvm.trap", VOID, [])
                version = self.indirect(get_version, PTR, [])
                need = (
                    f"onnxfuse: this library needs onnxruntime 1.{API_VERSION} or newer (API {API_VERSION}); this is "
                )
                build.ret(self.status(oldest, NOT_IMPLEMENTED, need, version))
            missing = self.call("missing_feature")
            with build.if_then(build.ir.not_(self.is_null(missing)), likely=False):
                start = f"onnxfuse: this library was compiled for {target.name} and needs the CPU feature "
                end = ", which this machine lacks; compile the model again with a smaller --target-cpu"
                build.ret(self.status(api, NOT_IMPLEMENTED, start, missing, end))
            domain = self.slot()
            self.attempt(self.call("domain_for", api, domain))
            build.ret(self.api(api, "AddCustomOpDomain", options, self.got(domain)))
        entry = ir.Function(build.module, ir.FunctionType(PTR, [PTR, PTR]), ENTRY)
        entry.attributes.add("nounwind")
        outer = ir.IRBuilder(entry.append_basic_block("entry"))
        outer.ret(outer.call(build.module.globals[f"{build.prefix}.register"], list(entry.args)))

    def digest(self, digest: str) -> None:
        raw = f"{DIGEST_MARK}{digest}\0".encode("ascii")
        out = ir.GlobalVariable(self.build.module, ir.ArrayType(I8, len(raw)), DIGEST)
        out.global_constant, out.initializer = True, ir.Constant(out.value_type, bytearray(raw))
