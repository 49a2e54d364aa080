"""Long runs that nobody wants in a test suite: sizes, kills, memory. The results stand in docs/trust.md.

    python tools/soak.py long [--sizes 12500,25000,50000]     CPU seconds per stage of one long model
    python tools/soak.py groups [--sizes 250,500,1000]        groups of distinct structure: optimize, library, sessions
    python tools/soak.py big [--gib 3]                        memory against the largest tensor
    python tools/soak.py kill [--count 100]                   SIGKILL at random moments of `onnxfuse optimize`
    python tools/soak.py memory [--runs 10000 --sessions 1500]    resident memory over runs and over sessions

Every command prints a markdown table and ends with exit code 2 when a promise is broken. Times are CPU times of the
process and its children, so that they hold on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
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
    """Memory of `optimize`, without and with the comparison, held against the promise; all its processes together."""
    rows, fine = [], True
    for kind, make in (("three tensors", largemodels.big), ("tensors of 16 MiB", largemodels.many)):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            path = Path(scratch) / "big.onnx"
            largest = make(path, gib)
            limit = 1.3 * largest + (1 << 30)
            for flags in (("--no-verify",), ()):
                command = [*CLI, "optimize", str(path), str(path.with_name("out.onnx")), *flags]
                with Together() as seen:
                    done = run_child(command, timeout=3000)
                print(done.output if done.code else done.output.splitlines()[-1])
                peaks = (done.peak_rss, seen.most)
                kept = max(peaks) <= limit and done.code == 0
                fine &= kept
                sizes = (f"{n / MIB:.0f}" for n in (largest, *peaks, limit))
                rows.append((kind, " ".join(flags) or "verified", *sizes, f"{done.seconds:.0f}", kept))
    head = [
        "weights",
        "optimize",
        "largest tensor MiB",
        "peak of a process MiB",
        "together MiB",
        "limit MiB",
        "s",
        "kept",
    ]
    print(markdown(head, rows))
    return fine


class Together:
    """The most memory that the children of this process, and theirs, were seen to hold; shared pages count once."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Together:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.2):  # to ask takes as long as there are pages
            self.most = max(self.most, sum(map(_proportional, _descendants(os.getpid()))))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        for task in Path(f"/proc/{pending.pop()}/task").glob("*"):
            with contextlib.suppress(OSError):  # it has ended
                children = [int(word) for word in (task / "children").read_text().split()]
                found += children
                pending += children
    return found


def _proportional(pid: int) -> int:
    """Resident bytes of a process; of pages shared with others its part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


# --- kill ------------------------------------------------------------------------------------------------------------
ANY_MOMENT, WRITING, RENAMING = "at any moment", "from the first write on", "from the first rename on"
COMMITTED = ".onnxfuse-commit-"  # a folder whose files are on their way: the next run completes that
SOON = {WRITING: 0.03, RENAMING: 0.003}  # seconds within which a kill falls
KILLED = 0.8  # of the tries must end so, or the moments were badly chosen


def kill(count: int) -> bool:
    """After every kill the pair is the old one or the new one; what is left behind does not grow.

    Every other kill falls at any moment of a run, by how long the last ones took; the others while it writes its files
    or puts them in place.
    """
    rng = random.Random(0)
    ends = {
        (place, end): 0
        for place in (ANY_MOMENT, WRITING, RENAMING)
        for end in ("killed, old pair", "killed, new pair", "finished")
    }
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sources = [folder / "in_a.onnx", folder / "in_b.onnx"]
        for source, model in zip(sources, (largemodels.groups(n) for n in (4, 6)), strict=True):
            onnx.save(model, source)
        out = folder / "out" / "out.onnx"
        out.parent.mkdir()
        last = [_run_alone(source, out) for source in (*sources, *sources)][len(sources) :]  # the first ones compile
        for k in range(count):
            place = (ANY_MOMENT, WRITING, ANY_MOMENT, RENAMING)[k % 4]
            before = out.read_bytes()
            begin = time.perf_counter()
            child = subprocess.Popen([*CLI, "optimize", sources[k // 4 % 2], out], stdout=subprocess.DEVNULL)
            for _ in range({ANY_MOMENT: 0, WRITING: 2, RENAMING: 3}[place]):
                _wait_for_a_name(child, out.parent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0.0, SOON.get(place, sum(last) / len(last))))
            child.kill()
            finished = child.wait() == 0
            if finished:
                last = [*last[1:], time.perf_counter() - begin]
            wrong += _wrong(k, out)
            pair = "old" if out.read_bytes() == before else "new"
            ends[place, "finished" if finished else f"killed, {pair} pair"] += 1
        _run_alone(sources[0], out)
        left = sorted(p.name for p in out.parent.iterdir())
    table = [(place, end, times) for (place, end), times in ends.items()]
    print(markdown(["kill", "how it ended", "times"], [*table, ("", "mixed, damaged or litter", wrong)]))
    print(f"files at the end: {', '.join(left)}")
    killed = sum(times for (_, end), times in ends.items() if end != "finished")
    return not wrong and left == ["out.onnx", "out.so"] and killed >= KILLED * count


def _run_alone(source: Path, out: Path) -> float:
    """Seconds of a run that nobody kills."""
    begin = time.perf_counter()
    subprocess.run([*CLI, "optimize", source, out], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _wait_for_a_name(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Till a new name appears: of a trial, of the folder written to, of the one it becomes before the renames."""
    before = _names(folder)
    while child.poll() is None and _names(folder) <= before:
        time.sleep(0.0002)


def _names(folder: Path) -> set[tuple[str, int]]:
    """What is there; a folder that takes the name of another is another one."""
    return {(entry.name, entry.inode()) for entry in os.scandir(folder)}


def _wrong(k: int, out: Path) -> int:
    """Findings after kill `k`: a pair that does not belong together, more than one folder of a kind left behind."""
    wrong = 0
    try:
        check_pair(out, library_path(out))
    except Exception as error:  # any is a finding
        print(f"kill {k}: {error}")
        wrong += 1
    hidden = [p.name for p in out.parent.iterdir() if p.name.startswith(".")]
    committed = [name for name in hidden if name.startswith(COMMITTED)]
    if len(committed) > 1 or len(hidden) - len(committed) > 1:
        print(f"kill {k}: {', '.join(hidden)}")
        wrong += 1
    return wrong


# --- memory ----------------------------------------------------------------------------------------------------------
MARKS = 10
LEAK = {"runs": 64, "sessions": 1024}  # bytes each that are a leak


def memory(runs: int, sessions: int) -> bool:
    """Resident memory at the marks: in the last half, neither runs nor sessions leave bytes behind."""
    rows, fine = [], True
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tiny_transformer", "tiny_resnet", "tiny_ocr"):
            path = Path(folder) / f"{name}.onnx"
            source = Path(__file__).parents[1] / "models" / f"{name}.onnx"
            pipeline.optimize(source, Config()).save(path)
            for what, count in (("runs", runs), ("sessions", sessions)):
                marks = [int(w) for w in in_child(f"_{what}", str(count), str(path))]
                leak = growth(marks, count / MARKS)
                fine &= leak <= LEAK[what]
                rows.append((name, f"{count} {what}", *(f"{m / MIB:.1f}" for m in marks[1::2]), f"{leak:.0f}"))
    print(markdown(["model", "", "MiB after 1/5", "2/5", "3/5", "4/5", "5/5", "bytes each"], rows))
    return fine


def growth(marks: Sequence[int], between: float) -> float:
    """Bytes that every run leaves behind in the last half, without the largest step: allocators take one at times."""
    half = marks[len(marks) // 2 - 1 :]
    steps = sorted(b - a for a, b in itertools.pairwise(half))[:-1]
    return sum(steps) / (len(steps) * between)


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
        if (k + 1) % (count // MARKS) == 0:
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
    many = commands.add_parser("memory")
    many.add_argument("--runs", type=int, default=10_000)
    many.add_argument("--sessions", type=int, default=1500)
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
            fine = memory(args.runs, args.sessions)
    return 0 if fine else 2


if __name__ == "__main__":
    sys.exit(main())
