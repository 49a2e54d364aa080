"""Tools every function of the glue is written with: fields of records, calls of OrtApi, statuses."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from onnxfuse.codegen.build import I8, I32, I64, PTR, VOID, Builder
from onnxfuse.codegen.glue.layout import ALIGN, FAIL, MESSAGE_BYTES, SLOT
from onnxfuse.codegen.glue.tables import Data


class Glue:
    """The module being written and the small tools its functions are made of."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self.data = Data(build.module)

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

    def out_of_memory(self, api: ir.Value, out: ir.Value, size: ir.Value) -> None:
        with self.build.if_then(self.is_null(self.got(out)), likely=False):
            self.build.ret(self.status(api, FAIL, "onnxfuse: no memory for a buffer of ", size, " bytes"))

    def drop(self, api: ir.Value, status: ir.Value) -> None:
        """Ignore a status in a place that cannot report it (kernel destruction)."""
        with self.build.if_then(self.build.ir.not_(self.is_null(status)), likely=False):
            self.api(api, "ReleaseStatus", status, ret=VOID)
