"""memcpy and friends: LLVM may ask for them, and the library takes nothing from outside."""

from __future__ import annotations

from llvmlite import ir

from onnxfuse.codegen.build import I8, I32, I64, PTR, VOID
from onnxfuse.codegen.glue.writer import Glue


def memory_functions(g: Glue) -> None:
    """Define memcpy, memmove and memset."""
    for name, args in (("memcpy", [PTR, PTR, I64]), ("memmove", [PTR, PTR, I64]), ("memset", [PTR, I32, I64])):
        fn = ir.Function(g.build.module, ir.FunctionType(PTR, args), name)
        _memory_function(g, fn)


def _memory_function(g: Glue, fn: ir.Function) -> None:
    build = g.build
    body = f"{fn.name}.body"
    with build.function(body, VOID, [a.type for a in fn.args]) as inner:
        to, source, size = inner.args
        if fn.name == "memset":
            _fill(g, to, source, size)
        elif fn.name == "memcpy":
            _copy_up(g, to, source, size)
        else:
            b = build.ir
            distance = b.sub(b.ptrtoint(to, I64), b.ptrtoint(source, I64))
            with build.if_else(b.icmp_unsigned(">=", distance, size)) as (up, down):
                with up:
                    _copy_up(g, to, source, size)
                with down:
                    _copy_down(g, to, source, size)
    # The name that LLVM calls; "no-builtins" keeps the loops from becoming calls of this very function.
    set.add(fn.attributes, '"no-builtins"')
    fn.attributes.add("nounwind")
    outer = ir.IRBuilder(fn.append_basic_block("entry"))
    outer.call(inner, list(fn.args))
    outer.ret(fn.args[0])


def _copy_up(g: Glue, to: ir.Value, source: ir.Value, size: ir.Value) -> None:
    build = g.build
    bulk = build.ir.and_(size, build.i64(-16))
    with build.loop(0, bulk, 16) as k:
        build.store(build.load(build.offset(source, k, I8), I8, 16), build.offset(to, k, I8))
    with build.loop(bulk, size) as k:
        build.store(build.load(build.offset(source, k, I8), I8), build.offset(to, k, I8))


def _copy_down(g: Glue, to: ir.Value, source: ir.Value, size: ir.Value) -> None:
    build = g.build
    with build.loop(0, size) as k:
        at = build.sub(build.sub(size, 1), k)
        build.store(build.load(build.offset(source, at, I8), I8), build.offset(to, at, I8))


def _fill(g: Glue, to: ir.Value, value: ir.Value, size: ir.Value) -> None:
    build = g.build
    byte = build.ir.trunc(value, I8)
    bulk = build.ir.and_(size, build.i64(-16))
    with build.loop(0, bulk, 16) as k:
        build.store(build.splat(byte, 16), build.offset(to, k, I8))
    with build.loop(bulk, size) as k:
        build.store(byte, build.offset(to, k, I8))
