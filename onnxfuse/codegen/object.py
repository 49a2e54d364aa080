"""LLVM text -> object bytes -> one shared library.

In: the text of one module per kernel. Out: bytes of an ELF shared object with no undefined symbol and only the exports
asked for. Objects are compiled in worker processes, because llvmlite holds one lock per process and because LLVM ends
the process on an internal error; the bytes do not depend on how many workers there are.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import queue
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import llvmlite.binding as llvm

from onnxfuse.errors import CompileError
from onnxfuse.files import private_folder
from onnxfuse.target import Target

WORKER_TIMEOUT = 300.0  # seconds one module may take before its worker is ended
LINK_TIMEOUT = 120.0
WORKERS_FROM = 3  # below this many modules a worker process costs more than it saves


@dataclass(frozen=True, slots=True)
class Object:
    """One compiled module; `ir` and `asm` only when asked for."""

    data: bytes
    ir: str = ""
    asm: str = ""


X86 = "x86_64-unknown-linux-gnu"


@functools.cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(X86)
    except RuntimeError:
        pass  # this LLVM does not know the option
    else:
        # It would balance the integer sums of a tile, of which many are under way anyhow, for twice the registers.
        llvm.set_option("onnxfuse", "-x86-machine-combiner=false")
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # the CPU check is inline assembly


@functools.cache
def host_features() -> frozenset[str]:
    """LLVM names of the features this CPU has (empty where LLVM cannot tell)."""
    try:
        found = llvm.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, on in found.items() if on)


def target_machine(target: Target, opt: int = 3) -> llvm.TargetMachine:
    """A new TargetMachine (an ExecutionEngine owns the one it is given, so none is shared)."""
    _initialize()
    flags = [f"+{f}" for f in target.features]
    if target.vector_bits >= 512:
        flags.append("-prefer-256-bit")  # templates choose the width; LLVM must not halve it
    try:
        found = llvm.Target.from_triple(target.triple)
        return found.create_target_machine(
            cpu=target.cpu, features=",".join(flags), opt=opt, reloc="pic", codemodel="default"
        )
    except RuntimeError as e:
        raise CompileError(
            "E_LLVM_TARGET", f"LLVM cannot generate code for {target.name} ({target.triple})", str(e)
        ) from e


def compile_module(
    text: str,
    target: Target,
    *,
    exports: Iterable[str] = (),
    keep_ir: bool = False,
    keep_asm: bool = False,
    opt: int = 3,
) -> Object:
    """Verify, optimise and compile one module in this process. Raises CompileError with LLVM's message.

    `opt` 0 only translates: slow code, several times as fast to make (tools/fuzz.py).
    """
    machine = target_machine(target, opt)
    if " asm " in text and not _native(target):
        raise CompileError("E_LLVM_ASM", f"inline assembly for {target.triple} can only be compiled on such a machine")
    try:
        module = llvm.parse_assembly(text)
        module.triple = target.triple
        module.data_layout = str(machine.target_data)
        _hide(module, frozenset(exports))
        module.verify()
    except RuntimeError as e:
        raise CompileError("E_LLVM", "LLVM refused the generated code", str(e).strip()[:2000]) from e
    if opt:
        _optimise(module, machine)
    return Object(
        machine.emit_object(module),
        str(module) if keep_ir else "",
        machine.emit_assembly(module) if keep_asm else "",
    )


def _native(target: Target) -> bool:
    host: str = llvm.get_process_triple()
    return target.triple.split("-", 1)[0] == host.split("-", 1)[0]


def _hide(module: llvm.ModuleRef, exports: frozenset[str]) -> None:
    for symbol in [*module.functions, *module.global_variables]:
        local = symbol.linkage in (llvm.Linkage.internal, llvm.Linkage.private)
        if not local and symbol.name not in exports and not symbol.name.startswith("llvm."):
            symbol.visibility = "hidden"


def _optimise(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    # Templates write vector code themselves, so LLVM's vectorisers only cost time (and change sums: never for floats).
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An object file loaded into this process; its code lives as long as this record."""

    engine: llvm.ExecutionEngine

    def address(self, symbol: str) -> int:
        """Address of a function, 0 if there is none."""
        return int(self.engine.get_function_address(symbol))


def load_object(data: bytes, target: Target) -> Loaded:
    """Load an object file of this machine's kind, to call its functions by address."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(target))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return Loaded(engine)


# ---- worker processes ----


@dataclass(frozen=True, slots=True)
class _Job:
    text: str
    target: Target
    exports: tuple[str, ...] = ()
    keep_ir: bool = False
    keep_asm: bool = False

    def run(self) -> Object:
        return compile_module(
            self.text, self.target, exports=self.exports, keep_ir=self.keep_ir, keep_asm=self.keep_asm
        )


def _send(stream: BinaryIO, payload: object) -> None:
    data = pickle.dumps(payload, protocol=5)
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def _receive(stream: BinaryIO) -> object:
    head = stream.read(8)
    if len(head) != 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    data = stream.read(size)
    if len(data) != size:
        raise EOFError
    return pickle.loads(data)


def worker_main() -> None:
    """Loop of a worker process: jobs come on stdin, objects go out on stdout."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever LLVM prints must not get into the protocol
    sink.write(_HELLO)
    sink.flush()
    while True:
        try:
            job = _receive(source)
        except EOFError:
            return
        assert isinstance(job, _Job)
        try:
            reply: object = job.run()
        except CompileError as e:
            reply = e.args
        _send(sink, reply)


_HELLO = b"onnxfuse worker\n"

# The worker imports what its parent imported: the same sys.path, whatever made it so.
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from onnxfuse.codegen.object import worker_main; worker_main()"
)


class _Worker:
    """One worker process; used by one thread at a time. Raises OSError if it does not come up."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        command = [sys.executable, "-c", _START, json.dumps([p or os.getcwd() for p in sys.path])]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log)
        except OSError:
            self.log.close()
            raise
        assert self.process.stdout is not None
        if self.process.stdout.read(len(_HELLO)) != _HELLO:
            self.close()
            raise OSError("the compiler process did not start")

    def run(self, job: _Job) -> Object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(WORKER_TIMEOUT, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            _send(self.process.stdin, job)  # type: ignore[arg-type]
            reply = _receive(self.process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError) as e:
            raise _WorkerError(self._epitaph()) from e
        finally:
            timer.cancel()
        if isinstance(reply, Object):
            return reply
        assert isinstance(reply, tuple)
        raise CompileError(*reply)

    def _epitaph(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        tail = self.log.read().decode("utf-8", "replace").strip()[-2000:]
        return f"the compiler process ended with code {code}" + (f": {tail}" if tail else "")

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


class _WorkerError(Exception):
    pass


@dataclass(slots=True)
class Compiler:
    """Compiles modules in the background: `with Compiler(target) as c: f = c.submit(text); f.result()`.

    `workers` is the number of processes; 0 compiles in this process, when the result is asked for or at the end.
    """

    target: Target
    workers: int = 1
    keep_ir: bool = False
    keep_asm: bool = False
    _pool: ThreadPoolExecutor | None = None
    _idle: queue.SimpleQueue[_Worker] = field(default_factory=queue.SimpleQueue)
    _all: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> Compiler:
        if self.workers > 0 and _is_python():
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="onnxfuse-compile")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.close()

    def submit(self, text: str, exports: Sequence[str] = ()) -> Future[Object]:
        """Start compiling one module; the Future raises CompileError."""
        job = _Job(text, self.target, tuple(exports), self.keep_ir, self.keep_asm)
        if self._pool is not None:
            return self._pool.submit(self._run, job)
        done: Future[Object] = Future()
        try:
            done.set_result(job.run())
        except CompileError as e:
            done.set_exception(e)
        return done

    def _run(self, job: _Job) -> Object:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            try:
                worker = _Worker()
            except OSError:
                return job.run()  # no process can be started here (sandbox, limits): do it ourselves
            self._all.append(worker)
        try:
            result = worker.run(job)
        except _WorkerError as e:
            raise CompileError("E_LLVM_CRASH", "LLVM gave up on the generated code", str(e)) from e
        except CompileError:
            self._idle.put(worker)
            raise
        self._idle.put(worker)
        return result


def _is_python() -> bool:
    """`sys.executable` is an interpreter, not a program with one inside."""
    return "python" in Path(sys.executable or "").name.lower() and not getattr(sys, "frozen", False)


def compile_all(
    modules: Mapping[str, str], target: Target, *, workers: int | None = None, keep_ir: bool = False
) -> dict[str, Object | CompileError]:
    """Compile several modules; a module that fails maps to its error."""
    count = default_workers(len(modules)) if workers is None else workers
    with Compiler(target, count, keep_ir) as compiler:
        futures = {name: compiler.submit(text) for name, text in modules.items()}
        return {name: outcome(f) for name, f in futures.items()}


def outcome(future: Future[Object]) -> Object | CompileError:
    """The object, or the error as a value."""
    try:
        return future.result()
    except CompileError as e:
        return e


def default_workers(modules: int) -> int:
    """How many worker processes pay for this many modules."""
    if modules < WORKERS_FROM:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, modules // 2, 16))


# ---- linking ----

_EMULATION = {"x86_64": "elf_x86_64", "aarch64": "aarch64linux", "riscv64": "elf64lriscv"}


def link(objects: Sequence[bytes], target: Target, exports: Sequence[str]) -> bytes:
    """Link objects into a shared library that exports only `exports` and has nothing undefined.

    Raises CompileError with the linker's message. Files live in a private temporary directory.
    """
    arch = target.triple.split("-", 1)[0]
    emulation = _EMULATION.get(arch)
    if emulation is None:
        raise CompileError("E_LINK_TARGET", f"no linker for {target.triple}", hint="; ".join(_EMULATION))
    try:
        return _linked(objects, emulation, exports)
    except OSError as e:
        raise CompileError("E_LINK", "no room for the linker's files", str(e), "TMPDIR=... names another place") from e


def _linked(objects: Sequence[bytes], emulation: str, exports: Sequence[str]) -> bytes:
    with private_folder() as folder:
        names = [f"{i:05d}.o" for i in range(len(objects))]
        for name, data in zip(names, objects, strict=True):
            (folder / name).write_bytes(data)
        script = f"{{ global: {'; '.join(exports)}; local: *; }};\n"
        (folder / "exports.map").write_text(script, encoding="ascii")
        (folder / "inputs.rsp").write_text("\n".join(names), encoding="ascii")
        command = [
            *linker(), "-m", emulation, "-shared", "-o", "out.so", "--version-script=exports.map",
            "--no-undefined", "--no-allow-shlib-undefined", "--gc-sections", "--hash-style=gnu", "--build-id=none",
            "--strip-all", "-z", "noexecstack", "-z", "relro", "-z", "now", "-z", "separate-code", "@inputs.rsp",
        ]  # fmt: skip
        _run_linker(command, str(folder))
        return (folder / "out.so").read_bytes()


def linker() -> list[str]:
    """The command that links. Raises CompileError when the package that brings it is not in order."""
    try:
        import ziglang
    except ImportError as e:
        raise CompileError("E_LINKER", "the package ziglang is missing", str(e), "pip install ziglang") from e
    folder = Path(ziglang.__file__).parent
    for name in ("zig", "zig.exe"):
        if (folder / name).is_file():
            return [str(folder / name), "ld.lld"]
    raise CompileError("E_LINKER", f"no zig program in {folder}", hint="pip install --force-reinstall ziglang")


def _run_linker(command: list[str], folder: str) -> None:
    # Relative names and a private cwd: no path of ours gets into the output or onto the linker's command line.
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LINK_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CompileError("E_LINK", "the linker did not run", str(e)) from e
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip()[:2000]
        raise CompileError("E_LINK", f"the linker failed with code {done.returncode}", message)


# ---- reading ELF files back ----

_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
# What LLVM may ask for by itself and the glue defines; the last is a name of the linker's own.
PROVIDED = frozenset({"memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_"})


def dynamic_symbols(image: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(defined, undefined) names of the dynamic symbol table of a shared object."""
    return _symbols(image, _SHT_DYNSYM)


def check_object(data: bytes) -> None:
    """Raise CompileError if an object needs a function that no library of ours has (`expf`, say)."""
    missing = sorted(set(_symbols(data, _SHT_SYMTAB)[1]) - PROVIDED)
    if missing:
        why = f"it needs {', '.join(missing)}"
        raise CompileError("E_SYMBOLS", "the generated code calls functions from outside", why)


def _symbols(image: bytes, kind: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(defined, undefined) names in the symbol table of this kind, of a 64-bit little-endian ELF image."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise CompileError("E_LINK", "not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * size) for i in range(count)]
    defined: list[str] = []
    undefined: list[str] = []
    for header in headers:
        if header[1] != kind:
            continue
        strings = headers[header[6]][4]
        for at in range(header[4] + 24, header[4] + header[5], 24):
            offset, _, _, section = struct.unpack_from("<IBBH", image, at)
            end = image.index(b"\0", strings + offset)
            name = image[strings + offset : end].decode()
            if name:
                (defined if section else undefined).append(name)
    return tuple(defined), tuple(undefined)


def check_symbols(image: bytes, exports: Sequence[str]) -> None:
    """Raise CompileError unless the library exports exactly `exports` and needs nothing from outside."""
    defined, undefined = dynamic_symbols(image)
    if undefined or set(defined) != set(exports):
        why = f"undefined: {', '.join(undefined) or 'none'}; exported: {', '.join(defined) or 'none'}"
        raise CompileError("E_SYMBOLS", "the library must be self-contained", why)
