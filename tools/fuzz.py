"""Random models against onnxruntime: is what `optimize` makes of them the same?

    python tools/fuzz.py [--seed FIRST] [--count N] [--time MINUTES] [--jobs 1] [--batch 16] [--opset N]
                         [--every-mode] [--cli-every 250] [--out DIR] [--json FILE]

Seeded random graphs over the whole op table (tools/fuzz_graph.py) are optimized, run without and with the library on
several input sets (sizes 0 and 1, special values among them), and compared with onnxruntime at ORT_DISABLE_ALL
(tools/fuzz_judge.py). Many graphs go into one model, because making a library costs more than compiling a kernel. All
batches run at mode `full`, every second at another one in turn as well; of every four batches one has only its function
bodies run, because compiling kernels is where the time goes; every sixteenth is compiled and run at all four modes.
Every eighth batch is compiled as users get it, the others without LLVM's optimisation; every third runs at two threads,
every fifth at ORT_ENABLE_ALL; every fourth is compiled for the narrower x86-64-v2; every second has the bodies of its
control flow optimized too; every seventh has its sizes frozen, every sixth goes without Winograd's algorithm, every
eleventh without simplification. One graph in --cli-every goes through the command line.

Batches run in child processes: a kernel that crashes or hangs ends one of those and is a finding. Each finding is
reduced to its graph, shrunk (tools/fuzz_shrink.py) and written to --out: model.onnx, feeds.npz, report.txt, test.py.

Same seed, same graphs. Exit 2 when there is a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from fused import CLI, run_child
from fuzz_graph import Made
from fuzz_judge import Answer, Finding, Question, judge
from fuzz_make import random_graph, random_opset
from fuzz_parts import merged
from fuzz_shrink import as_test, shrink

from onnxfuse.verify.inputs import save_npz

MODES = ("full", "none", "tvm", "canfuse")
SILENCE = 60.0  # CPU seconds without a word after which a child is ended: on a busy machine it may wait for long
DEADLOCK = 3600.0  # seconds after which a child that does not even compute is ended (and the command line)
BATCHES_PER_CHILD = 40  # libraries stay loaded: a fresh process now and then
SHRINKS = 4  # of findings that look alike


@dataclass(frozen=True, slots=True)
class Batch:
    """Seeds that go into one model."""

    number: int
    seeds: tuple[int, ...]
    opset: int
    modes: tuple[str, ...]
    bodies: tuple[str, ...]
    opt: int
    level: str
    threads: int
    target: str = "native"
    subgraphs: bool = False
    frozen: bool = False
    exact: bool = False
    bare: bool = False


HOW = ("modes", "bodies", "opt", "level", "threads", "target", "subgraphs", "frozen", "exact", "bare")


@dataclass(slots=True)
class Outcome:
    """What became of a batch (or of one question)."""

    answer: Answer = field(default_factory=Answer)
    graphs: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    dead: str = ""  # how the child ended
    step: str = ""  # at which step


# --- the child's side ----------------------------------------------------------------------------------------------
def child_main() -> None:
    """Answers pickled batches and questions on stdin, one after another; every step is said before it is taken."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # onnxruntime logs to stderr whatever it is told

    def say(message: object) -> None:
        pickle.dump(message, sink)
        sink.flush()

    gc.freeze()  # what was imported is never looked through again, and graphs are large: a sixth of the time
    gc.set_threshold(50_000, 20, 100)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        say(judge(job, say) if isinstance(job, Question) else run_batch(job, say))


def run_batch(batch: Batch, step: Callable[[str], None]) -> Outcome:
    """Make the graphs, put them into one model, judge it."""
    out = Outcome()
    made: list[Made] = []
    for seed in batch.seeds:
        step(f"making {seed}")
        graph = random_graph(seed, batch.opset)
        if graph is not None:
            made.append(graph)
            out.graphs += 1
            out.ops.update("local function" if re.fullmatch(r"f\d+", o) else o for o in graph.ops)
    if made:
        out.answer = judge(question_of(made, batch), step)
        if out.answer.unusable:  # onnxruntime takes each but not all together
            out.answer = Answer()
            for graph in made:
                one = judge(question_of([graph], batch), step)
                _add(out.answer, one)
    return out


def _add(total: Answer, one: Answer) -> None:
    total.findings += one.findings
    total.forgiven += one.forgiven
    total.runs += one.runs
    total.kernels += one.kernels
    total.templates.update(one.templates)


def question_of(made: Sequence[Made], batch: Batch) -> Question:
    """Several graphs as one model; a graph with fewer input sets repeats its last."""
    how = {f: getattr(batch, f) for f in HOW}
    if len(made) == 1:
        return Question(made[0].model.SerializeToString(), tuple(made[0].feeds), **how)
    count = max(len(m.feeds) for m in made)
    feeds = tuple(
        {f"g{k}_{name}": a for k, m in enumerate(made) for name, a in m.feeds[min(s, len(m.feeds) - 1)].items()}
        for s in range(count)
    )
    model = merged([m.model for m in made])
    return Question(model.SerializeToString(), feeds, **how)


# --- the parent's side ---------------------------------------------------------------------------------------------
class Child:
    """One child process; a new one after a death or after many jobs."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.jobs = 0

    def ask(self, job: Batch | Question) -> Outcome:
        """What the child answers, or how it died."""
        if self.process is None or self.jobs >= BATCHES_PER_CHILD * (1 if isinstance(job, Batch) else 10):
            self.close()
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self.jobs = 0
        self.jobs += 1
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        step = "starting"
        try:
            pickle.dump(job, self.process.stdin)
            self.process.stdin.flush()
            while True:
                message = _receive(self.process)
                if not isinstance(message, str):
                    assert isinstance(message, Outcome | Answer)
                    return message if isinstance(message, Outcome) else Outcome(message)
                step = message
        except TimeoutError:
            self.close()
            return Outcome(dead=f"silent for {SILENCE:.0f} CPU s", step=step)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
            self.close()
            return Outcome(dead=f"exit {code}", step=step)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self.process = None


def _receive(process: subprocess.Popen[bytes]) -> object:
    """The child's next message. Raises TimeoutError when it stays silent."""
    assert process.stdout is not None
    over = threading.Event()
    watch = threading.Thread(target=_end_the_silent, args=(process, over), daemon=True)
    watch.start()
    try:
        return pickle.load(process.stdout)
    except EOFError:
        if process.wait() == -signal.SIGKILL and not over.is_set() and not watch.is_alive():
            raise TimeoutError from None
        raise
    finally:
        over.set()


def _end_the_silent(process: subprocess.Popen[bytes], over: threading.Event) -> None:
    """Kill a process that computes or waits for too long before `over` is set."""
    begin, spent = time.monotonic(), _cpu(process.pid)
    while not over.wait(2):
        if _cpu(process.pid) - spent > SILENCE or time.monotonic() - begin > DEADLOCK:
            process.kill()
            return


def _cpu(pid: int) -> float:
    """CPU seconds of a process so far; wall seconds where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Totals:
    """Of a whole run."""

    graphs: int = 0
    batches: int = 0
    cli: int = 0
    runs: int = 0
    kernels: int = 0
    forgiven: int = 0
    skipped: int = 0  # graphs onnxruntime itself dies of
    ops: Counter[str] = field(default_factory=Counter)
    templates: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)  # by signature


class Fuzzer:
    """One run of the tool."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.totals = Totals()
        self.lock = threading.Lock()
        self.next = args.seed
        self.number = 0
        self.start = time.monotonic()

    def take(self) -> Batch | None:
        """The next batch; None when the run is over."""
        with self.lock:
            made = self.next - self.args.seed
            minutes = (time.monotonic() - self.start) / 60
            if (self.args.count and made >= self.args.count) or (self.args.time and minutes >= self.args.time):
                return None
            size = min(self.args.batch, self.args.count - made) if self.args.count else self.args.batch
            batch = batch_of(self.next, size, self.number, self.args.opset, self.args.every_mode)
            self.next += size
            self.number += 1
            return batch

    def work(self) -> None:
        """One worker: batches until there are none."""
        child = Child()
        try:
            while (batch := self.take()) is not None:
                self.batch(batch, child)
                self.say()
        finally:
            child.close()

    def batch(self, batch: Batch, child: Child) -> None:
        """Run a batch and look into what it found."""
        outcome = child.ask(batch)
        while outcome.dead and outcome.step.startswith("making "):  # onnxruntime died of a node it was asked about
            bad = int(outcome.step.split()[1])
            self.totals.skipped += 1
            batch = replace(batch, seeds=tuple(s for s in batch.seeds if s != bad))
            outcome = child.ask(batch)
        self.count(batch, outcome)
        if outcome.dead or outcome.answer.findings:
            self.investigate(batch, outcome, child)
        every = self.args.cli_every
        if every and any(s % every == 0 for s in batch.seeds):
            self.command_line(batch, next(s for s in batch.seeds if s % every == 0))

    def count(self, batch: Batch, outcome: Outcome) -> None:
        with self.lock:
            t = self.totals
            t.graphs += outcome.graphs
            t.batches += 1
            t.ops.update(outcome.ops)
            t.modes.update({f"{m} (bodies only)" if m in batch.bodies else m: outcome.graphs for m in batch.modes})
            t.runs += outcome.answer.runs
            t.kernels += outcome.answer.kernels
            t.forgiven += outcome.answer.forgiven
            t.templates.update(outcome.answer.templates)

    def investigate(self, batch: Batch, outcome: Outcome, child: Child) -> None:
        """Which graph is it? Each graph of the batch alone, then the batch as a whole."""
        suspects = _suspects(outcome) if not outcome.dead else None
        found = False
        made: list[Made] = []
        for k, seed in enumerate(batch.seeds):
            graph = random_graph(seed, batch.opset)
            if graph is None:
                continue
            made.append(graph)
            if suspects is not None and len(made) - 1 not in suspects:
                continue
            found |= self.examine(f"seed {seed} opset {batch.opset}", question_of([graph], batch), child)
            _ = k
        if not found:
            self.examine(
                f"batch {batch.seeds[0]}+{len(batch.seeds)} opset {batch.opset}", question_of(made, batch), child
            )

    def examine(self, title: str, question: Question, child: Child) -> bool:
        """Judge one question; shrink and write what it finds."""
        outcome = child.ask(question)
        findings = list(outcome.answer.findings)
        if outcome.dead and outcome.step not in ("original", "starting"):
            kind = "hang" if outcome.dead.startswith("silent") else "crash"
            findings.append(_from_death(kind, outcome))
        if not findings:
            return False
        first = findings[0]
        signature = signature_of(first)
        with self.lock:
            self.totals.findings[signature] += 1
            number = sum(self.totals.findings.values())
            often = self.totals.findings[signature]
        model = onnx.ModelProto.FromString(question.model)
        feeds = question.feeds[first.feed if first.feed >= 0 else 0]
        if often <= SHRINKS:
            narrow = replace(question, modes=(first.mode,) if first.mode else question.modes)
            model, feeds = shrink(model, feeds, lambda m, f: _same(child, narrow, m, f, first, signature), 120)
        if often <= SHRINKS * 2:
            self.write(number, title, findings, model, feeds, first)
        print(f"FINDING {number} ({title}): {first}"[:400], flush=True)
        return True

    def write(
        self,
        number: int,
        title: str,
        findings: Sequence[Finding],
        model: onnx.ModelProto,
        feeds: Mapping[str, np.ndarray],
        first: Finding,
    ) -> None:
        folder = self.out / f"{number:04d}"
        folder.mkdir(exist_ok=True)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        save_npz(folder / "feeds.npz", {k: v for k, v in feeds.items() if v.dtype.kind != "V"})
        (folder / "report.txt").write_text(f"{title}\n" + "\n".join(map(str, findings)) + "\n")
        name = "_".join([first.kind, *(n.op_type.lower() for n in model.graph.node)][:5])
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            (folder / "test.py").write_text(as_test(model, feeds, name, first.mode, str(first)[:150]))

    def command_line(self, batch: Batch, seed: int) -> None:
        """One graph as a user would do it, in a process of its own."""
        graph = random_graph(seed, batch.opset)
        if graph is None:
            return
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            source, target = Path(folder) / "in.onnx", Path(folder) / "out.onnx"
            source.write_bytes(graph.model.SerializeToString())
            done = run_child([*CLI, "optimize", str(source), str(target), "--fusion-mode", batch.modes[-1]], DEADLOCK)
            with self.lock:
                self.totals.cli += 1
            # E_MISMATCH may be rounding, and E_NO_INPUT sizes nobody guesses: the judge knows better.
            if done.code == 0 or "E_MISMATCH" in done.output or "E_NO_INPUT" in done.output:
                return
            text = " ".join(done.output.split())[:500]
            finding = Finding("cli", batch.modes[-1], f"exit {done.code}", text)
            with self.lock:
                self.totals.findings[signature_of(finding)] += 1
                number = sum(self.totals.findings.values())
            self.write(number, f"seed {seed} opset {batch.opset}", [finding], graph.model, graph.feeds[0], finding)
            print(f"FINDING {number} (seed {seed}): {finding}"[:400], flush=True)

    def say(self) -> None:
        t = self.totals
        if t.batches % 10 == 0:
            minutes = (time.monotonic() - self.start) / 60
            print(
                f"{t.graphs} graphs, {minutes:.1f} min, findings {sum(t.findings.values())}, next seed {self.next}",
                flush=True,
            )

    def summary(self) -> dict[str, object]:
        """Plain data about the run."""
        t = self.totals
        return {
            "seed": self.args.seed,
            "next": self.next,
            "graphs": t.graphs,
            "minutes": round((time.monotonic() - self.start) / 60, 1),
            "by mode": dict(t.modes),
            "optimized models run": t.runs,
            "kernels compiled": t.kernels,
            "by template": dict(t.templates.most_common()),
            "through the command line": t.cli,
            "differences that are rounding": t.forgiven,
            "graphs onnxruntime dies of": t.skipped,
            "operators": len(t.ops),
            "nodes by operator": dict(t.ops.most_common()),
            "findings": dict(t.findings.most_common()),
        }


def batch_of(seed: int, size: int, number: int, opset: int, every_mode: bool) -> Batch:
    """How a batch is run depends on its number and its first seed only."""
    import random

    chosen = opset or random_opset(random.Random(seed))
    other = MODES[1 + number // 4 % 3]
    modes, bodies = {
        0: (("full",), ()),
        1: (("full", other), ()),
        2: (("full",), ()),
        3: (("full", other), ("full", other)),
    }[number % 4]
    if every_mode or number % 16 == 15:
        modes, bodies = MODES, ()
    return Batch(
        number,
        tuple(range(seed, seed + size)),
        chosen,
        modes,
        bodies,
        opt=3 if number % 8 == 4 else 0,
        level="all" if number % 5 == 4 else "disable",
        threads=2 if number % 3 == 2 else 1,
        target="x86-64-v2" if number % 4 == 2 and native_x86() else "native",
        subgraphs=number // 2 % 2 == 1,
        frozen=number % 7 == 3,
        exact=number % 6 == 4,
        bare=number % 11 == 7,
    )


def native_x86() -> bool:
    """This machine runs what is compiled for an older x86."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _suspects(outcome: Outcome) -> set[int] | None:
    """Numbers of the graphs whose outputs differ; None when a finding does not say."""
    found: set[int] = set()
    for f in outcome.answer.findings:
        match = re.match(r"g(\d+)_", f.output)
        if match is None:
            return None
        found.add(int(match[1]))
    return found


def _from_death(kind: str, outcome: Outcome) -> Finding:
    words = outcome.step.split(" ", 2)
    mode = next((w for w in words if w in MODES), "full")
    feed = re.search(r"input set (\d+)", outcome.step)
    where = re.sub(r" input set \d+", "", outcome.step)
    return Finding(kind, mode, where, outcome.dead, feed=int(feed[1]) if feed else -1)


def signature_of(f: Finding) -> str:
    """What is alike in findings: the message without names and numbers."""
    text = "" if f.kind == "mismatch" and "reference is" not in f.text else f.text
    text = re.sub(r"'[^']*'|\b\w*\d\w*\b", "#", text)
    where = f.where if f.kind != "mismatch" else ("with" if f.where.startswith("with the") else "without")
    return f"{f.kind} {where} {text}"[:160]


def _same(
    child: Child,
    question: Question,
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    first: Finding,
    signature: str,
) -> bool:
    """Does this smaller case fail in the same way?"""
    try:
        data = model.SerializeToString()
    except ValueError:
        return False
    outcome = child.ask(replace(question, model=data, feeds=(dict(feeds),)))
    if outcome.dead:
        died = _from_death("hang" if outcome.dead.startswith("silent") else "crash", outcome)
        return (
            first.kind in ("crash", "hang")
            and outcome.step not in ("original", "starting")
            and died.where == first.where
        )
    return any(f.kind == first.kind and signature_of(f) == signature for f in outcome.answer.findings)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--count", type=int, default=0, help="graphs (0: until --time is over)")
    parser.add_argument("--time", type=float, default=0, help="minutes (0: until --count is reached)")
    parser.add_argument("--jobs", type=int, default=1, help="child processes at a time")
    parser.add_argument("--batch", type=int, default=16, help="graphs in one model")
    parser.add_argument("--opset", type=int, default=0, help="of all graphs (0: any)")
    parser.add_argument("--every-mode", action="store_true", help="all four fusion modes for every batch")
    parser.add_argument("--cli-every", type=int, default=250, help="one graph in so many through the command line")
    parser.add_argument("--out", default="fuzz-findings", help="folder for findings")
    parser.add_argument("--json", help="write the summary to this file")
    args = parser.parse_args(argv)
    if not args.count and not args.time:
        args.count = 200
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    fuzzer = Fuzzer(args)
    threads = [threading.Thread(target=fuzzer.work) for _ in range(args.jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    summary = fuzzer.summary()
    print("\n".join(_lines(summary)))
    if args.json:
        Path(args.json).write_text(json.dumps(summary, indent=1))
    return 2 if fuzzer.totals.findings else 0


def _lines(summary: Mapping[str, object]) -> Iterable[str]:
    for key, value in summary.items():
        if isinstance(value, dict):
            yield f"{key}:"
            yield from (f"  {n:6d}  {k}" for k, n in value.items())
        else:
            yield f"{key}: {value}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child_main()
    else:
        sys.exit(main())
