"""Targets that run on this host, and a way to run a scrap of generated code over arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from onnxfuse.codegen.build import I64, PTR, VOID, Builder, mem_type, vec
from onnxfuse.codegen.object import Loaded, compile_module, host_features, load_object
from onnxfuse.ir.dtypes import DType
from onnxfuse.target import Target, by_name

V2, V3 = by_name("x86-64-v2"), by_name("x86-64-v3")
WIDE = replace(V3, name="wide", vector_bits=512, vector_regs=32)  # 16-lane code on 8-lane hardware


def _runs(t: Target) -> bool:
    return set(t.features) <= host_features()


MACHINES = [
    pytest.param(t, id=t.name, marks=() if _runs(t) else pytest.mark.skip(reason=f"this CPU is older than {t.name}"))
    for t in (V2, V3, WIDE)
]

Emit = Callable[[Builder, Sequence[object]], object]


@dataclass(frozen=True)
class Scrap:
    """Functions `fn(inputs..., out, n)` of one module; `sources` must outlive the calls."""

    code: Loaded

    def __call__(self, name: str, inputs: Sequence[np.ndarray], dtype: DType) -> np.ndarray:
        out = np.zeros(len(inputs[0]), dtype.numpy)
        kinds = [ctypes.c_void_p] * (len(inputs) + 1)
        fn = ctypes.CFUNCTYPE(None, *kinds, ctypes.c_int64)(self.code.address(f"scrap.{name}"))
        fn(*(a.ctypes.data for a in inputs), out.ctypes.data, len(out))
        return out


Pieces = dict[str, tuple[Sequence[DType], DType, int, Emit]]


def lower_all(target: Target, pieces: Pieces, run: bool = True) -> Scrap | None:
    """Compile pieces {name: (argument dtypes, result dtype, lanes, emit)}; lengths must be multiples of lanes.

    Compiling refuses objects with undefined symbols: no libm, no compiler runtime.
    """
    build = Builder(target, "scrap")
    for name, (srcs, dst, lanes, emit) in pieces.items():
        with build.function(name, VOID, [PTR] * (len(srcs) + 1) + [I64]) as fn, build.loop(0, fn.args[-1], lanes) as i:
            regs = []
            for k, src in enumerate(srcs):
                reg = build.load(build.offset(fn.args[k], i, mem_type(src)), mem_type(src), lanes)
                regs.append(build.ir.icmp_unsigned("!=", reg, build.like(reg, 0)) if src is DType.BOOL else reg)
            out = emit(build, regs)
            if dst is DType.BOOL:
                out = build.ir.zext(out, vec(mem_type(dst), lanes))
            build.store(out, build.offset(fn.args[len(srcs)], i, mem_type(dst)))
    data = compile_module(str(build.module), target).data
    assert undefined(data) == []
    return Scrap(load_object(data, target)) if run else None


def undefined(data: bytes) -> list[str]:
    """Names of undefined symbols of an ELF object."""
    import struct

    (table,) = struct.unpack_from("<Q", data, 0x28)
    (count,) = struct.unpack_from("<H", data, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * k) for k in range(count)]
    out = []
    for s in sections:
        if s[1] != 2:  # SHT_SYMTAB
            continue
        names = sections[s[6]][4]
        for k in range(s[5] // 24):
            name, _info, _other, section = struct.unpack_from("<IBBH", data, s[4] + 24 * k)
            if section == 0 and name:
                out.append(data[names + name : data.index(b"\0", names + name)].decode())
    return out
