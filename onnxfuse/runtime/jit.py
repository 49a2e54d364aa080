"""Run one compiled kernel on numpy arrays, without onnxruntime: for tests and tuning.

The code that runs is the very object file that would be linked into the library. By default every output, the scratch
and the packed buffer are surrounded by canary bytes, checked after the run, and tasks run one after another.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.codegen.dims import Fault, env_words
from onnxfuse.codegen.generate import Module, emit_module
from onnxfuse.codegen.glue.layout import GENERAL
from onnxfuse.codegen.object import Loaded, check_object, compile_module, load_object
from onnxfuse.errors import IRError, UsageError
from onnxfuse.ir.graph import Value
from onnxfuse.ir.plan import Emitted, Plan
from onnxfuse.runtime.float_state import DENORMAL, denormals, fill, float_state, soil
from onnxfuse.target import Target

GUARD = 256  # canary bytes on each side of a buffer
CANARY = 0xA5
ALIGN = 64

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class _Buffer:
    """Memory with canaries around it; `data` is 64-byte aligned plus `shift`."""

    def __init__(self, what: str, nbytes: int, shift: int = 0) -> None:
        self.what = what
        self.nbytes = nbytes
        self.block = np.full(nbytes + 2 * GUARD + ALIGN, CANARY, np.uint8)
        base = self.block.ctypes.data + GUARD
        self.start = (base + ALIGN - 1) // ALIGN * ALIGN + shift - self.block.ctypes.data
        self.address = self.block.ctypes.data + self.start

    @property
    def data(self) -> np.ndarray:
        return self.block[self.start : self.start + self.nbytes]

    def check(self) -> None:
        before, after = self.block[: self.start], self.block[self.start + self.nbytes :]
        for name, part in (("before", before), ("behind", after)):
            bad = np.flatnonzero(part != CANARY)
            if bad.size:
                at = int(bad[0]) - (len(part) if name == "before" else 0)
                raise IRError("IR_OVERRUN", f"the kernel wrote {bad.size} bytes {name} the {self.what}", f"offset {at}")


class _Fenced:
    """Memory that ends (or starts) at a page nobody may touch: reading past it ends the process with SIGSEGV."""

    def __init__(self, what: str, nbytes: int, side: str, align: int) -> None:
        self.what = what
        self.nbytes = nbytes
        page = mmap.PAGESIZE
        room = -(-nbytes // page) * page
        self.block = np.frombuffer(mmap.mmap(-1, room + 2 * page), np.uint8)
        base = self.block.ctypes.data
        for fence in (base, base + page + room):
            if _libc().mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        gap = 0 if side == "start" else (room - nbytes) // align * align
        self.start = page + gap
        self.address = base + self.start

    @property
    def data(self) -> np.ndarray:
        return self.block[self.start : self.start + self.nbytes]

    def check(self) -> None:
        """The fence has already done it."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


Memory = _Buffer | _Fenced


@dataclass(frozen=True, slots=True, eq=False)
class _Variant:
    """Entry points of the fast or the general variant."""

    tasks: tuple[Callable[[int], int], ...]
    run: tuple[Callable[[int, int, int | None, int | None, int], None], ...]
    scratch: Callable[[int], int]
    packed_bytes: Callable[[], int] | None
    pack: Callable[[int, int], None] | None


@dataclass(slots=True, eq=False)
class Jitted:
    """A loaded kernel. Call it with one array per input; gives one array per output."""

    plan: Plan
    module: Module
    code: Loaded  # keeps the code alive
    dims: Callable[[int, int, int], int]
    fast: _Variant
    general: _Variant
    last_variant: str = ""  # which variant the last call took

    def __call__(
        self, arrays: Sequence[np.ndarray], *, seed: int | None = None, shift: int = 0, fence: str = ""
    ) -> list[np.ndarray]:
        """Run all phases.

        Args:
            arrays: the inputs, in the kernel's order; dtypes and ranks must be the kernel's.
            seed: shuffle the tasks of each phase with this seed (None: in order).
            shift: bytes by which inputs and outputs are off 64-byte alignment.
            fence: "start" or "end": every buffer starts or ends at a forbidden page instead of at canaries, so that
                reads out of bounds are found as well. They end the process.

        Raises:
            UsageError: the kernel refuses these shapes (with the message a user of the library would see).
            IRError: the kernel wrote outside of its buffers, changed an input, or calculated with what nobody wrote.
        """
        made = self._run_over(DENORMAL, arrays, seed, shift, fence)
        if denormals():
            self._run_over(0, arrays, seed, shift, fence)
            if not denormals():
                raise IRError("IR_UNWRITTEN", "the kernel calculates with memory that nobody wrote")
        return made

    def _run_over(
        self, number: int, arrays: Sequence[np.ndarray], seed: int | None, shift: int, fence: str
    ) -> list[np.ndarray]:
        """Run all phases in memory full of this number."""
        soil(number)
        call = self.prepare(arrays, shift, fence, number)
        soil(number)
        call.run(None if seed is None else random.Random(seed))
        return call.finish()

    def prepare(self, arrays: Sequence[np.ndarray], shift: int = 0, fence: str = "", number: int = DENORMAL) -> Call:
        """Everything up to running: for timing `call.run()` alone. `number`: what memory holds that nobody wrote."""
        kernel = self.plan.kernel
        checked = [_input(v, a) for v, a in zip(kernel.inputs, arrays, strict=True)]
        env = np.zeros(env_words(kernel), np.int64)
        shapes = np.array([d for a in checked for d in a.shape], np.int64)
        places = np.array([a.ctypes.data for a in checked], np.uint64)
        code = self.dims(shapes.ctypes.data, env.ctypes.data, places.ctypes.data)
        if code < 0:
            raise UsageError("E_SHAPE", _fault(self.module.part.faults, code).message(int(env[0]), int(env[1])))
        self.last_variant = GENERAL if code else "fast"
        variant = self.general if code else self.fast

        def memory(what: str, nbytes: int, off: int = 0, align: int = ALIGN) -> Memory:
            return _Fenced(what, nbytes, fence, align) if fence else _Buffer(what, nbytes, off)

        sizes = [(v, v.tensor.dtype.bytes, a.nbytes) for v, a in zip(kernel.inputs, checked, strict=True)]
        inputs = [memory(f"input {v.name}", nbytes, shift, width) for v, width, nbytes in sizes]
        for buffer, a in zip(inputs, checked, strict=True):
            buffer.data[:] = np.frombuffer(a.tobytes(), np.uint8)
        at = len(kernel.dims) + len(shapes)
        outputs, out_shapes = [], []
        for v, made in zip(kernel.outputs, kernel.made, strict=True):
            shape = tuple(int(d) for d in env[at : at + made.rank])
            at += made.rank
            width = v.tensor.dtype.bytes
            outputs.append(memory(f"output {v.name}", math.prod(shape) * width, shift, width))
            out_shapes.append(shape)
        bufs = np.array([b.address for b in (*inputs, *outputs)], np.uint64)
        packed = self._pack(variant, inputs, memory, number)
        scratch = memory("scratch", variant.scratch(env.ctypes.data))
        fill(scratch.data, number)
        return Call(self.plan, variant, checked, env, bufs, inputs, outputs, out_shapes, packed, scratch)

    def _pack(
        self, variant: _Variant, inputs: list[Memory], memory: Callable[[str, int], Memory], number: int
    ) -> Memory | None:
        if variant.packed_bytes is None or variant.pack is None:
            return None
        packed = memory("packed buffer", variant.packed_bytes())
        fill(packed.data, number)
        kernel = self.plan.kernel
        consts = [b.address if v in kernel.consts else 0 for v, b in zip(kernel.inputs, inputs, strict=True)]
        table = np.array([*consts, *(0 for _ in kernel.outputs)], np.uint64)
        variant.pack(table.ctypes.data, packed.address)
        packed.check()
        return packed


@dataclass(slots=True, eq=False)
class Call:
    """One prepared run of a kernel."""

    plan: Plan
    variant: _Variant
    arrays: list[np.ndarray]
    env: np.ndarray
    bufs: np.ndarray
    inputs: list[Memory]
    outputs: list[Memory]
    shapes: list[tuple[int, ...]]
    packed: Memory | None
    scratch: Memory

    def run(self, shuffle: random.Random | None = None) -> None:
        """All tasks of all phases. Raises IRError if they leave floating point set up in another way."""
        before = float_state()
        env, bufs = self.env.ctypes.data, self.bufs.ctypes.data
        packed = None if self.packed is None else self.packed.address
        for tasks, run in zip(self.variant.tasks, self.variant.run, strict=True):
            order = list(range(tasks(env)))
            if shuffle is not None:
                shuffle.shuffle(order)
            for task in order:
                run(env, bufs, packed, self.scratch.address, task)
        after = float_state()
        if before != after:
            raise IRError("IR_FLOAT_STATE", "the kernel changed how floating point works", f"{before:#x} {after:#x}")

    def finish(self) -> list[np.ndarray]:
        """Check the canaries, then the outputs as arrays."""
        guarded = [*self.inputs, *self.outputs, self.scratch, *([self.packed] if self.packed else [])]
        for buffer in guarded:
            buffer.check()
        for v, a, b in zip(self.plan.kernel.inputs, self.arrays, self.inputs, strict=True):
            if b.data.tobytes() != a.tobytes():
                raise IRError("IR_OVERRUN", f"the kernel changed its input {v.name}")
        outs = zip(self.plan.kernel.outputs, self.outputs, self.shapes, strict=True)
        return [b.data.copy().view(v.tensor.dtype.numpy).reshape(shape) for v, b, shape in outs]


def jit(plan: Plan, target: Target) -> Jitted:
    """Compile a kernel for this machine and load it. Raises CompileError."""
    module = emit_module(plan, target)
    obj = compile_module(module.text, target)
    check_object(obj.data)  # here the functions of this process would do, in a library they are not there
    code = load_object(obj.data, target)
    name = plan.kernel.name
    dims = _entry(code, f"{name}.dims", _I64, _PTR, _PTR, _PTR)
    fast = _variant(code, f"{name}.", module.part.fast)
    emitted = module.part.general
    general = fast if emitted is None else _variant(code, f"{name}.{GENERAL}.", emitted)
    return Jitted(plan, module, code, dims, fast, general)


def run_kernel(
    plan: Plan,
    arrays: Sequence[np.ndarray],
    target: Target,
    *,
    seed: int | None = None,
    shift: int = 0,
    fence: str = "",
) -> list[np.ndarray]:
    """Compile and run a kernel once; see `Jitted.__call__`."""
    return jit(plan, target)(arrays, seed=seed, shift=shift, fence=fence)


def _entry(code: Loaded, symbol: str, ret: object, *args: object) -> Callable[..., int]:
    address = code.address(symbol)
    if not address:
        raise IRError("IR_SYMBOL", f"the template did not write {symbol}")
    return ctypes.CFUNCTYPE(ret, *args)(address)  # type: ignore[arg-type]


def _variant(code: Loaded, prefix: str, emitted: Emitted) -> _Variant:
    phases = range(emitted.phases)
    return _Variant(
        tuple(_entry(code, f"{prefix}tasks.{p}", _I64, _PTR) for p in phases),
        tuple(_entry(code, f"{prefix}run.{p}", None, _PTR, _PTR, _PTR, _PTR, _I64) for p in phases),  # type: ignore[misc]
        _entry(code, f"{prefix}scratch", _I64, _PTR),
        _entry(code, f"{prefix}packed_bytes", _I64) if emitted.packs else None,
        _entry(code, f"{prefix}pack", None, _PTR, _PTR) if emitted.packs else None,  # type: ignore[arg-type]
    )


def _input(v: Value, a: np.ndarray) -> np.ndarray:
    if a.dtype != v.tensor.dtype.numpy or a.ndim != v.tensor.rank:
        raise UsageError("E_INPUT", f"{v.name} is {v.tensor}, got {a.dtype} of rank {a.ndim}")
    return np.ascontiguousarray(a).reshape(a.shape)


def _fault(faults: Sequence[Fault], code: int) -> Fault:
    return faults[-1 - code]
