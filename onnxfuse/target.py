"""Target: what the code is generated for. One row per target; code asks for properties, never for a name."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from onnxfuse.errors import UsageError

KIB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to generate code for.

    features      LLVM feature strings that must be on; the library checks them at load
    vector_bits   widest useful vector; vector_regs how many such registers
    l1, l2        bytes of data cache per core
    cores         how many are to be kept busy: work is split for them, results do not depend on it
    asks_ahead    packed constants are asked for before their turn: the CPU's own prefetcher is late
    byte_dots     there are instructions that sum products of signed bytes four at a time, and onnxruntime uses them
    bf16_weights  constant factors of products that are bound by reading them are kept as bf16 (--precision bf16)
    peak, bw      FLOP/s (f32, one core) and bytes/s (memory, one core): for the cost model, rough
    """

    name: str
    triple: str
    cpu: str
    features: tuple[str, ...]
    vector_bits: int
    vector_regs: int
    l1: int = 32 * KIB
    l2: int = 512 * KIB
    cores: int = 8
    asks_ahead: bool = True
    byte_dots: bool = False
    bf16_weights: bool = False
    peak: float = 1.0e11
    bw: float = 1.5e10

    def lanes(self, element_bytes: int) -> int:
        """Elements of a vector register."""
        return max(1, self.vector_bits // 8 // element_bytes)

    def lanes_along(self, element_bytes: int, extent: object) -> int:
        """Elements of the narrowest vector, of four at least, that holds a line; the widest for an unknown extent."""
        lanes = self.lanes(element_bytes)
        while isinstance(extent, int) and extent <= lanes // 2 and lanes > 4:
            lanes //= 2
        return lanes


_V2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_LINUX = "x86_64-unknown-linux-gnu"

# Narrow to wide; `--target-cpu native` takes the widest row the host has.
TARGETS: tuple[Target, ...] = (
    Target("x86-64-v2", _LINUX, "x86-64-v2", _V2, 128, 16, peak=2.5e10),
    Target("x86-64-v3", _LINUX, "x86-64-v3", _V3, 256, 16, peak=1.0e11),
    Target("x86-64-v4", _LINUX, "x86-64-v4", _V4, 512, 32, l2=1024 * KIB, asks_ahead=False, peak=1.2e11),
    Target("aarch64", "aarch64-unknown-linux-gnu", "generic", ("neon",), 128, 32, byte_dots=True, peak=5.0e10),
)


def by_name(name: str, host_features: frozenset[str] = frozenset()) -> Target:
    """The row called `name`, or for "native" the widest row whose features the host has.

    `host_features` comes from `codegen.object.host_features()`. Raises UsageError for an unknown name.
    """
    if name in ("native", "host"):
        fitting = [t for t in TARGETS if t.triple == _LINUX and set(t.features) <= host_features]
        if not fitting:
            raise UsageError("E_TARGET", "this CPU is older than x86-64-v2", hint="use --target-cpu with another name")
        row = replace(fitting[-1], byte_dots="avxvnniint8" in host_features)
        return with_cores(row, os.cpu_count() or row.cores)
    for t in TARGETS:
        if t.name == name:
            return t
    names = ", ".join(["native", *(t.name for t in TARGETS)])
    raise UsageError("E_TARGET", f"unknown target CPU {name!r}", hint=f"one of: {names}")


def with_cores(target: Target, cores: int) -> Target:
    """The same target with another number of cores."""
    return replace(target, cores=cores)
