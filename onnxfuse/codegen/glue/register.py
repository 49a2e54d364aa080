"""`RegisterCustomOps`: the CPU is checked, one domain is made and kept until the library is unloaded."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from onnxfuse.codegen.build import I8, I32, I64, PTR, VOID
from onnxfuse.codegen.cpu import CPU_FEATURES
from onnxfuse.codegen.glue.layout import API_VERSION, DIGEST, DIGEST_MARK, DOMAIN, ENTRY, NOT_IMPLEMENTED
from onnxfuse.codegen.glue.writer import Glue
from onnxfuse.errors import CompileError
from onnxfuse.target import Target


def cpu_check(g: Glue, features: Sequence[str]) -> None:
    """missing_feature() returns the name of the first required feature the machine lacks, or null."""
    build = g.build
    unknown = [f for f in features if f not in CPU_FEATURES]
    if unknown:
        raise CompileError("E_CPU_FEATURE", f"no CPU test is known for {', '.join(unknown)}")
    if features:
        _cpuid(g)
    with build.function("missing_feature", PTR, []):
        b = build.ir
        for feature in features:
            leaf, sub, register, bit, state = CPU_FEATURES[feature]
            numbers = [ir.Constant(I32, n) for n in (leaf, sub, register)]
            on = b.and_(g.call("cpuid", *numbers), ir.Constant(I32, 1 << bit))
            lacks = b.icmp_unsigned("==", on, ir.Constant(I32, 0))
            if state:
                enabled = b.and_(g.call("enabled_state"), ir.Constant(I32, state))
                lacks = b.or_(lacks, b.icmp_unsigned("!=", enabled, ir.Constant(I32, state)))
            with build.if_then(lacks, likely=False):
                build.ret(g.data.text(feature))
        build.ret(g.null())


def _cpuid(g: Glue) -> None:
    build = g.build
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
        osxsave = b.and_(g.call("cpuid", *numbers), ir.Constant(I32, 1 << 27))
        with build.if_then(b.icmp_unsigned("==", osxsave, ir.Constant(I32, 0))):
            build.ret(ir.Constant(I32, 0))
        pair = ir.LiteralStructType([I32, I32])
        got = b.asm(ir.FunctionType(pair, [I32]), "xgetbv", "={ax},={dx},{cx}", [ir.Constant(I32, 0)], True)
        build.ret(b.extract_value(got, 0))


def registration(g: Glue, ops: Sequence[ir.GlobalVariable], target: Target) -> None:
    """RegisterCustomOps(options, base), and the domain it hands out."""
    build = g.build
    owner, cached = (_variable(g, name) for name in ("owner", "domain"))
    with build.function("new_domain", PTR, [PTR, PTR]) as fn:
        api, out = fn.args
        g.attempt(g.api(api, "CreateCustomOpDomain", g.data.text(DOMAIN), out))
        table = g.data.words(PTR, ops)
        with build.loop(0, len(ops)) as k:
            status = g.api(api, "CustomOpDomain_Add", g.got(out), g.item(table, k, PTR))
            with build.if_then(build.ir.not_(g.is_null(status)), likely=False):
                g.api(api, "ReleaseCustomOpDomain", g.got(out), ret=VOID)
                build.ret(status)
        build.ret(g.null())

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
                build.ret(g.null())
        g.attempt(g.call("new_domain", api, out))
        with build.if_then(ours):
            made = b.ptrtoint(g.got(out), I64)
            before = b.extract_value(b.cmpxchg(cached, zero, made, "seq_cst", "seq_cst"), 0)
            with build.if_then(b.icmp_unsigned("!=", before, zero), likely=False):
                g.api(api, "ReleaseCustomOpDomain", g.got(out), ret=VOID)  # another thread was faster
                build.store(b.inttoptr(before, PTR), out)
        build.ret(g.null())

    with build.function("unload", VOID, []):
        b = build.ir
        have = build.load(cached, I64)
        with build.if_then(b.icmp_unsigned("!=", have, build.i64(0))):
            api = b.inttoptr(build.load(owner, I64), PTR)
            g.api(api, "ReleaseCustomOpDomain", b.inttoptr(have, PTR), ret=VOID)
    _at_unload(g, build.module.globals[f"{build.prefix}.unload"])
    _entry(g, target)


def _variable(g: Glue, name: str) -> ir.GlobalVariable:
    out = ir.GlobalVariable(g.build.module, I64, f"{g.build.prefix}.{name}")
    out.linkage, out.initializer, out.align = "internal", ir.Constant(I64, 0), 8
    return out


def _at_unload(g: Glue, fn: ir.GlobalValue) -> None:
    # By section name: llvm.global_dtors would become .dtors, which nothing runs any more.
    entry = ir.GlobalVariable(g.build.module, PTR, f"{g.build.prefix}.at_unload")
    entry.linkage, entry.initializer, entry.section, entry.align = "internal", fn, ".fini_array", 8
    table = ir.Constant(ir.ArrayType(PTR, 1), [entry])
    used = ir.GlobalVariable(g.build.module, table.type, "llvm.used")
    used.linkage, used.initializer, used.section = "appending", table, "llvm.metadata"


def _entry(g: Glue, target: Target) -> None:
    build = g.build
    with build.function("register", PTR, [PTR, PTR]) as fn:
        options, base = fn.args
        get_api, get_version = base, build.offset(base, 1, PTR)
        api = g.indirect(get_api, PTR, [ir.Constant(I32, API_VERSION)])
        with build.if_then(g.is_null(api), likely=False):
            oldest = g.indirect(get_api, PTR, [ir.Constant(I32, 1)])
            with build.if_then(g.is_null(oldest), likely=False):
                # No way to report: going on would silently run without the kernels, so stop here.
                build.call("llvm.trap", VOID, [])
            version = g.indirect(get_version, PTR, [])
            need = f"onnxfuse: this library needs onnxruntime 1.{API_VERSION} or newer (API {API_VERSION}); this is "
            build.ret(g.status(oldest, NOT_IMPLEMENTED, need, version))
        missing = g.call("missing_feature")
        with build.if_then(build.ir.not_(g.is_null(missing)), likely=False):
            start = f"onnxfuse: this library was compiled for {target.name} and needs the CPU feature "
            end = ", which this machine lacks; compile the model again with a smaller --target-cpu"
            build.ret(g.status(api, NOT_IMPLEMENTED, start, missing, end))
        domain = g.slot()
        g.attempt(g.call("domain_for", api, domain))
        build.ret(g.api(api, "AddCustomOpDomain", options, g.got(domain)))
    entry = ir.Function(build.module, ir.FunctionType(PTR, [PTR, PTR]), ENTRY)
    entry.attributes.add("nounwind")
    outer = ir.IRBuilder(entry.append_basic_block("entry"))
    outer.ret(outer.call(build.module.globals[f"{build.prefix}.register"], list(entry.args)))


def digest_symbol(g: Glue, digest: str) -> None:
    """The content hash, exported and greppable: a model and its library carry the same."""
    raw = f"{DIGEST_MARK}{digest}\0".encode("ascii")
    out = ir.GlobalVariable(g.build.module, ir.ArrayType(I8, len(raw)), DIGEST)
    out.global_constant, out.initializer = True, ir.Constant(out.value_type, bytearray(raw))
