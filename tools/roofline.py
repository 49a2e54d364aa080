"""What this machine can do, measured on the spot: multiply-adds per second and bytes per second.

    python tools/roofline.py [--threads 1,2]

peak        f32 FLOP/s of fused multiply-adds on registers only: as many independent chains of the target's vectors as
            hide the latency, one such loop per thread
bandwidth   bytes/s of copying between two buffers far larger than the caches; each byte read and each byte written
            counts once
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from onnxfuse.codegen.object import Loaded, compile_module, host_features, load_object
from onnxfuse.target import Target, by_name

CHAINS = 12  # independent accumulators: latency 4 x 2 units, and some to spare
ROUNDS = 1 << 22  # iterations of the loop
COPY_BYTES = 64 << 20  # per thread
REPEATS = 5  # the best one counts: what disturbs only takes away


@dataclass(frozen=True, slots=True)
class Machine:
    """Both limits for a number of threads."""

    threads: int
    peak: float
    bandwidth: float

    def seconds(self, operations: float, nbytes: float) -> float:
        """The least time for this much work: whichever limit is hit first."""
        return max(operations / self.peak, nbytes / self.bandwidth)


def machine(threads: int) -> Machine:
    """Measure both."""
    return Machine(threads, _peak(threads), _bandwidth(threads))


def _peak(threads: int) -> float:
    target = by_name("native", host_features())
    code = _fma_loop(target)
    fn = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64)(code.address("fma_loop"))
    seconds = _best(lambda: fn(ROUNDS), threads)
    return threads * 2.0 * CHAINS * target.lanes(4) * ROUNDS / seconds


def _fma_loop(target: Target) -> Loaded:
    """Float fma_loop(i64 n): n rounds of CHAINS vector multiply-adds; returns a value that depends on all of them."""
    module = ir.Module("roofline")
    lanes, i64 = target.lanes(4), ir.IntType(64)
    vec = ir.VectorType(ir.FloatType(), lanes)
    fn = ir.Function(module, ir.FunctionType(ir.FloatType(), [i64]), "fma_loop")
    entry, loop, done = (fn.append_basic_block(name) for name in ("entry", "loop", "done"))
    b = ir.IRBuilder(entry)
    b.branch(loop)
    b.position_at_end(loop)
    count = b.phi(i64)
    count.add_incoming(i64(0), entry)
    sums = [b.phi(vec) for _ in range(CHAINS)]
    factor, term = (ir.Constant(vec, [x] * lanes) for x in (0.999, 0.001))
    fma = ir.Function(module, ir.FunctionType(vec, [vec] * 3), f"llvm.fma.v{lanes}f32")
    again = [b.call(fma, [s, factor, term]) for s in sums]
    for k, (s, value) in enumerate(zip(sums, again, strict=True)):
        s.add_incoming(ir.Constant(vec, [float(k)] * lanes), entry)
        s.add_incoming(value, loop)
    following = b.add(count, i64(1))
    count.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, fn.args[0]), loop, done)
    b.position_at_end(done)
    total = again[0]
    for value in again[1:]:
        total = b.fadd(total, value)
    b.ret(b.extract_element(total, ir.IntType(32)(0)))
    return load_object(compile_module(str(module), target, exports=["fma_loop"]).data, target)


def _bandwidth(threads: int) -> float:
    buffers = [(np.zeros(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)) for _ in range(threads)]
    pending = iter(buffers * (REPEATS + 1))
    lock = threading.Lock()

    def copy() -> None:
        with lock:
            to, source = next(pending)
        np.copyto(to, source)

    seconds = _best(copy, threads)
    return threads * 2.0 * COPY_BYTES / seconds


def _best(work: Callable[[], object], threads: int) -> float:
    """Seconds of the fastest of several times that `threads` threads do this work at once."""
    return min(_together(work, threads) for _ in range(REPEATS))


def _together(work: Callable[[], object], threads: int) -> float:
    workers = [threading.Thread(target=work) for _ in range(threads)]
    start = time.perf_counter()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    for threads in map(int, parser.parse_args(argv).threads.split(",")):
        m = machine(threads)
        print(f"{threads} thread(s): {m.peak / 1e9:.1f} GFLOP/s, copying {m.bandwidth / 1e9:.1f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
