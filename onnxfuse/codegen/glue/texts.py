"""The text of messages: joined from constant pieces and numbers without the C library."""

from __future__ import annotations

from llvmlite import ir

from onnxfuse.codegen.build import I8, I64, PTR
from onnxfuse.codegen.glue.layout import MESSAGE_BYTES
from onnxfuse.codegen.glue.writer import Glue


def texts(g: Glue) -> None:
    """append(buffer, at, text) and append_number(buffer, at, number) return the new end; status(...) makes one."""
    build = g.build
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
        build.ret(g.call("append", buffer, at, build.offset(digits, first, I8)))
