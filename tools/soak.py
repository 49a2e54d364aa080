"""Long runs that nobody wants in a test suite: sizes, kills, memory. The results stand in docs/trust.md.

    python tools/soak.py long [--sizes 12500,25000,50000]     CPU seconds per stage of one long model
    python tools/soak.py groups [--sizes 250,500,1000]        groups of distinct structure: optimize, library, sessions
    python tools/soak.py big [--gib 3]                        peak memory against the largest tensor
    python tools/soak.py kill [--count 100]                   SIGKILL at random moments of `onnxfuse optimize`
    python tools/soak.py memory [--runs 10000]                resident memory over runs and over sessions

Every command prints a markdown table and ends with exit code 2 when a promise is broken. Times are CPU times of the
process and its children, so that they hold on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import largemodels
import numpy as np
import onnx
import onnxruntime
from fused import CLI, markdown, run_child

from onnxfuse import InferenceSession, pipeline
from onnxfuse.config import Config
from onnxfuse.runtime.session import check_pair, library_path
from onnxfuse.trace import Trace

MIB = 1 << 20
GROWTH = 2.6  # of the time when the size doubles: more is not linear any more (half of it overhead, caches)


def cpu() -> float:
    """CPU seconds of this process and the children it waited for."""
    return sum(
        u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def rss() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_child(*arguments: str) -> list[str]:
    """One measurement in a process of its own; the words of its last line."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().splitlines()[-1].split()


def linear(sizes: Sequence[int], seconds: Sequence[float]) -> bool:
    """No doubling of the size costs more than GROWTH times the time."""
    pairs = zip(sizes, seconds, strict=True)
    steps = list(pairs)
    return all(t2 / max(t1, 0.2) <= GROWTH ** np.log2(n2 / n1) for (n1, t1), (n2, t2) in itertools.pairwise(steps))


# --- long ------------------------------------------------------------------------------------------------------------
def long(sizes: Sequence[int]) -> bool:
    rows = [[float(w) for w in in_child("_long", str(n))] for n in sizes]
    stages = [*pipeline.STAGES, "other", "all"]
    table = [(stage, *(f"{row[k]:.1f}" for row in rows)) for k, stage in enumerate(stages)]
    print(markdown(["CPU seconds", *(f"{n} nodes" for n in sizes)], table))
    return linear(sizes, [row[-1] for row in rows])


def _long(nodes: int) -> None:
    model = largemodels.long(nodes)
    spent = dict.fromkeys(pipeline.STAGES, 0.0)
    begin = last = cpu()

    def ends(stage: str, _seconds: float) -> None:
        nonlocal last
        now = cpu()
        spent[stage] = spent.get(stage, 0.0) + now - last
        last = now

    bundle = pipeline.optimize(model, Config(), Trace(progress=ends))
    assert bundle.library is not None
    named = [spent[stage] for stage in pipeline.STAGES]
    total = cpu() - begin
    print(*named, total - sum(named), total)


# --- groups ----------------------------------------------------------------------------------------------------------
def groups(sizes: Sequence[int]) -> bool:
    rows = [[float(w) for w in in_child("_groups", str(n))] for n in sizes]
    table = [(n, *(f"{v:.2f}" for v in row)) for n, row in zip(sizes, rows, strict=True)]
    head = [
        "groups",
        "optimize s",
        "library MiB",
        "session with it s",
        "session without s",
        "run with it ms",
        "run without ms",
    ]
    print(markdown(head, table))
    return all(linear(sizes, [row[k] for row in rows]) for k in (0, 2, 3))


def _groups(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "g.onnx"
        begin = cpu()
        bundle = pipeline.optimize(largemodels.groups(count), Config())
        bundle.save(path)
        optimize = cpu() - begin
        assert len(bundle.plans.plans) >= count, len(bundle.plans.plans)
        x = {"x": np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)}
        out: list[float] = []
        runs: list[float] = []
        results = []
        makers: tuple[Callable[[], Any], ...] = (
            lambda: InferenceSession(path),
            lambda: onnxruntime.InferenceSession(path),
        )
        for make in makers:
            begin = cpu()
            session = make()
            out.append(cpu() - begin)
            results.append(session.run(None, x)[0])
            begin = cpu()
            for _ in range(20):
                session.run(None, x)
            runs.append((cpu() - begin) / 20 * 1000)
        with_library, without = results
        assert np.allclose(with_library, without, rtol=1e-4, atol=1e-5, equal_nan=True)
        print(optimize, library_path(path).stat().st_size / MIB, *out, *runs)


# --- big -------------------------------------------------------------------------------------------------------------
def big(gib: float, folder: Path | None) -> bool:
    """Peak memory of `optimize`, with and without the comparison, held against the promise."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "big.onnx"
        largest = largemodels.big(path, gib)
        limit = 1.3 * largest + (1 << 30)
        rows, fine = [], True
        for flags in (("--no-verify",), ()):
            done = run_child([*CLI, "optimize", str(path), str(path.with_name("out.onnx")), *flags], timeout=3000)
            if done.code:
                print(done.output)
            kept = done.peak_rss <= limit and done.code == 0
            fine &= kept
            rows.append(
                (" ".join(flags) or "verified", *(f"{b / MIB:.0f}" for b in (largest, done.peak_rss, limit)), kept)
            )
        print(markdown(["optimize", "largest tensor MiB", "peak MiB", "limit MiB", "kept"], rows))
        return fine


# --- kill ------------------------------------------------------------------------------------------------------------
def kill(count: int) -> bool:
    """After every kill the pair is the old one or the new one; what is left behind does not grow."""
    rng = random.Random(0)
    models = [largemodels.groups(n) for n in (4, 6)]
    ends = {"finished": 0, "killed, old pair": 0, "killed, new pair": 0}
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sources = [folder / "in_a.onnx", folder / "in_b.onnx"]
        for source, model in zip(sources, models, strict=True):
            onnx.save(model, source)
        out = folder / "out" / "out.onnx"
        out.parent.mkdir()
        begin = time.perf_counter()
        subprocess.run([*CLI, "optimize", sources[0], out], check=True, stdout=subprocess.DEVNULL)
        longest = time.perf_counter() - begin
        for k in range(count):
            before = out.read_bytes()
            child = subprocess.Popen([*CLI, "optimize", sources[(k + 1) % 2], out], stdout=subprocess.DEVNULL)
            try:
                child.wait(longest * rng.uniform(0.3, 1.2))
            except subprocess.TimeoutExpired:
                child.kill()
            killed = child.wait() < 0
            try:
                check_pair(out, library_path(out))
            except Exception as error:  # any is a finding
                print(f"kill {k}: {error}")
                wrong += 1
            hidden = [p for p in out.parent.iterdir() if p.name.startswith(".")]
            wrong += len(hidden) > 1
            ends["finished" if not killed else f"killed, {'old' if out.read_bytes() == before else 'new'} pair"] += 1
        subprocess.run([*CLI, "optimize", sources[0], out], check=True, stdout=subprocess.DEVNULL)
        left = sorted(p.name for p in out.parent.iterdir())
    print(markdown(["how it ended", "times"], [*ends.items(), ("mixed, damaged or litter", wrong)]))
    print(f"files at the end: {', '.join(left)}")
    return not wrong and left == ["out.onnx", "out.so"]


# --- memory ----------------------------------------------------------------------------------------------------------
def memory(runs: int) -> bool:
    """Resident memory at the marks; the last half may not grow by more than 1 MiB."""
    rows, fine = [], True
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tiny_transformer", "tiny_resnet", "tiny_ocr"):
            path = Path(folder) / f"{name}.onnx"
            source = Path(__file__).parents[1] / "models" / f"{name}.onnx"
            pipeline.optimize(source, Config()).save(path)
            for what, words in (("runs", ("_runs", str(runs))), ("sessions", ("_sessions", "200"))):
                marks = [int(w) for w in in_child(*words, str(path))]
                grown = marks[-1] - marks[len(marks) // 2]
                fine &= grown <= MIB
                rows.append((name, f"{words[1]} {what}", *(f"{m / MIB:.1f}" for m in marks), f"{grown / 1024:.0f}"))
    print(markdown(["model", "", "MiB after 1/5", "2/5", "3/5", "4/5", "5/5", "KiB grown from 3/5 on"], rows))
    return fine


def _feeds(session: onnxruntime.InferenceSession, k: int) -> dict[str, np.ndarray]:
    """Inputs of changing shapes."""
    sizes = {"batch": 1 + k % 3, "sequence": 1 + k % 7, "height": 32 + 4 * (k % 4), "width": 32 + 4 * (k % 3)}
    rng = np.random.default_rng(k % 11)
    out = {}
    for i in session.get_inputs():
        shape = [sizes.get(d, d) for d in i.shape]
        floats = i.type == "tensor(float)"
        out[i.name] = rng.standard_normal(shape).astype(np.float32) if floats else np.ones(shape, np.int64)
    return out


def _marks(count: int, step: Callable[[int], None]) -> None:
    marks = []
    for k in range(count):
        step(k)
        if (k + 1) % (count // 5) == 0:
            gc.collect()
            marks.append(rss())
    print(*marks)


def _runs(count: int, path: str) -> None:
    session = InferenceSession(path)
    feeds = [_feeds(session, k) for k in range(33)]
    _marks(count, lambda k: session.run(None, feeds[k % 33]) and None)


def _sessions(count: int, path: str) -> None:
    def step(k: int) -> None:
        session = InferenceSession(path)
        session.run(None, _feeds(session, k))

    _marks(count, step)


def main() -> int:
    if sys.argv[1:2] and sys.argv[1].startswith("_"):
        word, count, *rest = sys.argv[1:]
        steps: dict[str, Callable[..., None]] = {
            "_long": _long,
            "_groups": _groups,
            "_runs": _runs,
            "_sessions": _sessions,
        }
        steps[word](int(count), *rest)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("long").add_argument("--sizes", default="12500,25000,50000")
    commands.add_parser("groups").add_argument("--sizes", default="250,500,1000")
    one = commands.add_parser("big")
    one.add_argument("--gib", type=float, default=3.0)
    one.add_argument("--folder", type=Path, help="where there is room for three times as much")
    commands.add_parser("kill").add_argument("--count", type=int, default=100)
    commands.add_parser("memory").add_argument("--runs", type=int, default=10_000)
    args = parser.parse_args()
    match args.command:
        case "long" | "groups":
            sizes = [int(n) for n in args.sizes.split(",")]
            fine = (long if args.command == "long" else groups)(sizes)
        case "big":
            fine = big(args.gib, args.folder)
        case "kill":
            fine = kill(args.count)
        case _:
            fine = memory(args.runs)
    return 0 if fine else 2


if __name__ == "__main__":
    sys.exit(main())
