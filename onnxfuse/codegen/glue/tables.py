"""What the glue reads of each kernel: descriptors, their tables and texts, as constants of the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

from onnxfuse.codegen.build import I8, I32, I64, PTR, VOID
from onnxfuse.codegen.dims import Fault, env_words, title
from onnxfuse.codegen.glue.layout import DESCRIPTOR, GENERAL, TEXT_LIMIT, VARIANT
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted


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


class Data:
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


def _variant(data: Data, kernel: Kernel, emitted: Emitted, infix: str) -> ir.GlobalVariable:
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


def descriptor(data: Data, part: Part) -> ir.GlobalVariable:
    """The record of one kernel, as `layout.DESCRIPTOR` lists it."""
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
