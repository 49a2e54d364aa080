"""One matrix product in every spelling and layout: does it run as fast as plain MatMul of the same layout?

    python tools/bench_spellings.py [--size M,N,K] [--rounds N] [--layout TT|NT|TN|NN]...

The spellings are those of tests/analysis/spellings.py, a layout names how a and b are stored (T: as MatMul wants it,
N: the other way round). One thread, all spellings of a layout interleaved in one process. Printed is the median over
the rounds of each spelling's time divided by MatMul's; exit 2 when one is above 1.10.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fused import table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.plan import Plan
from onnxfuse.runtime.jit import jit
from onnxfuse.target import by_name
from onnxfuse.templates.gemm import GEMM
from tests.analysis.spellings import SPELLINGS, Spelling, model
from tests.analysis.test_spellings import kernels

LAYOUTS = {"TT": (False, False), "TN": (False, True), "NT": (True, False), "NN": (True, True)}
MOST = 1.10
CALLS = 4  # in one measurement


def runner(spelling: Spelling, m: int, n: int, k: int, ta: bool, tb: bool) -> Callable[[], object]:
    """Runs the one kernel of a spelling on data of its own."""
    ((kernel, names),) = kernels(model(spelling, m, n, k, ta, tb, False))
    target = by_name("native", host_features())
    found = GEMM.propose(kernel, target)
    assert not isinstance(found, Refusal), (spelling.__name__, found)
    run = jit(Plan(kernel, found[0], GEMM), target)
    rng = np.random.default_rng(0)
    shapes = {"a": (k, m) if ta else (m, k), "b": (n, k) if tb else (k, n)}
    given = [rng.standard_normal(shapes[x], dtype=np.float32) for x in names]
    return lambda: run(given)


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median of each run's time over that of `matmul` in the same round; and its own median under its name."""
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 2):
        times = {}
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name] = time.perf_counter() - start
        if at >= 2:  # after warming up
            for name, t in times.items():
                ratios[name].append(t / times["matmul"])
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> int:
    """Print the ratios; 2 when a spelling is slower than MatMul."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="256,256,256", metavar="M,N,K")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    args = parser.parse_args()
    m, n, k = map(int, args.size.split(","))
    columns = {}
    for name in args.layout or LAYOUTS:
        runs = {s.__name__: runner(s, m, n, k, *LAYOUTS[name]) for s in SPELLINGS}
        columns[name] = measure(runs, args.rounds)
    spellings = [s.__name__ for s in SPELLINGS]
    print(table(["spelling", *columns], [[s, *(f"{c[s]:.2f}" for c in columns.values())] for s in spellings]))
    return 2 if max(r for c in columns.values() for r in c.values()) > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
