"""Run every kernel of a model with its buffers against forbidden pages: it touches nothing outside of them.

    python tools/guard.py [MODEL.onnx...] [--onnx-nodes STEP] [--target-cpu NAME] [--calls N] [--json FILE]

Models are optimized in a child process, and every kernel runs there on the values the model really has at that place
(onnxruntime computes them from random inputs, at two sets of shapes; from MODEL.npz where that lies beside the model).
Inputs, outputs, scratch and packed weights each start, then end, at a page that may not be touched; a read or write
outside ends the child with SIGSEGV, which is reported with the kernel's name, and the rest goes on in a new child. A
third run has canaries around buffers that are off 64-byte alignment; all three must give the same bits, and
onnxruntime's values up to rounding. Exit 2 on a finding.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
from fused import markdown
from suites import cases, data_of, model_of, plain

from onnxfuse import pipeline
from onnxfuse.codegen.object import host_features
from onnxfuse.config import Config, VerifyConfig
from onnxfuse.errors import OnnxfuseError
from onnxfuse.ir.plan import Call, Plan
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.target import by_name
from onnxfuse.verify import ort
from onnxfuse.verify.inputs import samples
from onnxfuse.verify.values import default_tolerance

SIDES = ("start", "end")


@dataclass(frozen=True, slots=True)
class Found:
    """What came out for one model."""

    model: str
    kernels: int
    runs: int
    templates: tuple[str, ...]
    findings: tuple[str, ...]


def guard(models: Sequence[Path], target_cpu: str = "native", calls: int = 2) -> list[Found]:
    """Check models, in as many children as there are crashes, and one more."""
    log = [_Log(m) for m in models]
    done: list[str] = []  # "model kernel" of what has been tried, models that are finished without a kernel
    left = list(models)
    while left:
        job = json.dumps({"models": [str(m) for m in left], "target": target_cpu, "calls": calls, "done": done})
        child = subprocess.run([sys.executable, __file__, "--child"], input=job, stdout=subprocess.PIPE, text=True)
        current: _Log | None = None
        for line in child.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word == "model":
                current = next(x for x in log if str(x.model) == rest)
                left = left[left.index(current.model) :]
            elif current is not None:
                current.hear(word, rest)
                if word == "at":
                    done.append(f"{current.model} {rest.split()[0]}")
        if child.returncode == 0:
            break
        how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
        if current is None:
            raise SystemExit(f"the child does not start: {how}")
        current.findings.append(f"{current.at}: {how}")
        if not current.at or child.returncode > 0:
            left = left[1:]
        current.at = ""
    return [x.found() for x in log]


@dataclass(slots=True)
class _Log:
    """What a child says about one model."""

    model: Path
    at: str = ""
    runs: int = 0
    kernels: set[str] = field(default_factory=set)
    templates: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)

    def hear(self, word: str, rest: str) -> None:
        match word:
            case "at":
                self.at = rest
                self.kernels.add(rest.split()[0])
            case "ran":
                self.runs += 1
                self.templates.add(rest)
            case "wrong":
                self.findings.append(f"{self.at}: {rest}")

    def found(self) -> Found:
        name = self.model.stem if self.model.stem != "model" else self.model.parent.name
        return Found(name, len(self.kernels), self.runs, tuple(sorted(self.templates)), tuple(self.findings))


def child() -> None:
    """The work; the job is on standard input, what it is at goes to standard output."""
    job = json.load(sys.stdin)
    for name in job["models"]:
        print(f"model {name}", flush=True)
        done = {d.rpartition(" ")[2] for d in job["done"] if d.rpartition(" ")[0] == name}
        try:
            _check_model(Path(name), job["target"], job["calls"], done)
        except OnnxfuseError as error:
            print(f"declined {error.what}", flush=True)  # the reader, or onnxruntime, does not take it


def _check_model(model: Path, target_cpu: str, calls: int, done: Collection[str]) -> None:
    bundle = pipeline.optimize(model, Config(target=target_cpu))
    plans = [p for p in bundle.plans.plans if p.kernel.name not in done]
    chosen = {p: [c for c in bundle.plans.calls.values() if c.kernel is p.kernel][:calls] for p in plans}
    if not chosen:
        return
    target = by_name(target_cpu, host_features())
    compiled: dict[Plan, Jitted] = {}
    for label, values in _values(model, bundle, [c for cs in chosen.values() for c in cs]):
        for plan, uses in chosen.items():
            print(f"at {plan.kernel.name} ({plan.schedule}; {label})", flush=True)
            if plan not in compiled:
                compiled[plan] = jit(plan, target)
            for call in uses:
                for problem in _check(compiled[plan], call, values):
                    print(f"wrong {problem}", flush=True)
                print(f"ran {plan.schedule.template}", flush=True)


def _values(model: Path, bundle: pipeline.Bundle, calls: Sequence[Call]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """What every value the calls read or write is, at up to two sets of input shapes."""
    proto = bundle.model
    names = {v.name for c in calls for v in (*c.inputs, *c.outputs)}
    weights = {k: t.numpy() for k, t in bundle.emission.tensors.items() if k in names}
    known = {o.name for o in proto.graph.output}
    inputs = {i.name for i in proto.graph.input}
    asked = sorted(names - set(weights) - inputs)
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in asked if n not in known)
    sess = ort.session(proto)
    with_values = ort.session(model)
    given = model.with_suffix(".npz")
    config = VerifyConfig(runs=1, input_data=str(given) if given.exists() else None)
    for sample, _ in islice(samples(with_values, config), 2):
        feeds = {k: v for k, v in sample.feeds.items() if isinstance(v, np.ndarray)}
        results = ort.run(sess, sample.feeds)
        yield sample.label, weights | feeds | {n: np.asarray(results[n]) for n in asked}


def _check(code: Jitted, call: Call, values: dict[str, np.ndarray]) -> Iterator[str]:
    arrays = [np.asarray(values[v.name]) for v in call.inputs]
    width = max((a.dtype.itemsize for a in arrays), default=4)
    first = code(arrays, shift=width)
    for side in SIDES:
        again = code(arrays, fence=side)
        if any(a.tobytes() != b.tobytes() for a, b in zip(first, again, strict=True)):
            yield f"other bits with a fence at the {side}"
    for v, got in zip(call.outputs, first, strict=True):
        yield from _far(v.name, got, values[v.name])


def _far(name: str, got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    if got.size != want.size:
        yield f"{name}: shape {got.shape}, onnxruntime {want.shape}"
        return
    got = got.reshape(want.shape)
    if want.dtype.kind in "iub":
        if not np.array_equal(got, want):
            yield f"{name}: integers differ"
        return
    tol = default_tolerance(want.dtype)
    a, b = got.astype(np.float64), want.astype(np.float64)
    largest = float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0))
    with np.errstate(invalid="ignore"):
        bad = ~(
            (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tol.rtol * np.abs(b) + tol.absolute(largest))
        )
    if bad.any():
        yield f"{name}: {int(bad.sum())} of {bad.size} elements differ"


def node_models(folder: Path, step: int) -> list[Path]:
    """Every `step`-th case of the suite `node`, written to the folder; beside it its inputs, if .npz has such."""
    written = []
    for case in cases(("node",))[::step]:
        path = folder / case.name / "model.onnx"
        path.parent.mkdir()
        onnx.save(model_of(case), path)
        names = [i.name for i in model_of(case).graph.input]
        fed = [plain(v) for v in data_of(case)[0][0]]
        if len(names) == len(fed) and all(isinstance(v, np.ndarray) and v.dtype.kind in "fiub" for v in fed):
            np.savez(path.with_suffix(".npz"), **dict(zip(names, fed, strict=True)))
        written.append(path)
    return written


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child()
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--onnx-nodes", type=int, metavar="STEP", help="every STEP-th case of onnx's operators")
    parser.add_argument("--target-cpu", default="native")
    parser.add_argument("--calls", type=int, default=2, help="nodes tried per kernel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[Found] = []
    for model in args.models:
        found += guard([model], args.target_cpu, args.calls)
        print(f"{found[-1].model}: {found[-1].kernels} kernels, {found[-1].runs} runs", flush=True)
    if args.onnx_nodes:
        with tempfile.TemporaryDirectory() as folder:
            every = guard(node_models(Path(folder), args.onnx_nodes), args.target_cpu, args.calls)
        templates = sorted({t for f in every for t in f.templates})
        findings = [f"{f.model} {x}" for f in every for x in f.findings]
        kernels, runs = sum(f.kernels for f in every), sum(f.runs for f in every)
        found.append(Found(f"{len(every)} node models of onnx", kernels, runs, tuple(templates), tuple(findings)))
    rows = [(f.model, f.kernels, f.runs, ", ".join(f.templates), len(f.findings)) for f in found]
    print(markdown(["model", "kernels", "runs", "templates", "findings"], rows))
    print(*(f"{f.model}: {x}" for f in found for x in f.findings), sep="\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(f) for f in found]))
    return 2 if any(f.findings for f in found) else 0


if __name__ == "__main__":
    sys.exit(main())
