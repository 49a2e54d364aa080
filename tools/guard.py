"""Run every kernel of a model with its buffers against forbidden pages: it touches nothing outside of them.

    python tools/guard.py MODEL.onnx... [--target-cpu NAME] [--calls N] [--json FILE]

Each model is optimized in a child process, and every kernel runs there on the values the model really has at that place
(onnxruntime computes them from random inputs, at two sets of shapes). Inputs, outputs, scratch and packed weights each
start, then end, at a page that may not be touched; a read or write outside ends the child with SIGSEGV, which is
reported with the kernel's name, and the rest goes on in a new child. A third run has canaries around buffers that are
off 64-byte alignment; all three must give the same bits, and onnxruntime's values up to rounding. Exit 2 on a finding.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
from fused import markdown

from onnxfuse import pipeline
from onnxfuse.codegen.object import host_features
from onnxfuse.config import Config, VerifyConfig
from onnxfuse.ir.plan import Call, Plan
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.target import by_name
from onnxfuse.verify import ort
from onnxfuse.verify.compare import default_tolerance
from onnxfuse.verify.inputs import samples

SIDES = ("start", "end")


@dataclass(frozen=True, slots=True)
class Found:
    """What came out for one model."""

    model: str
    kernels: int
    runs: int
    templates: tuple[str, ...]
    findings: tuple[str, ...]


def guard(model: Path, target_cpu: str = "native", calls: int = 2) -> Found:
    """Check one model, in as many children as there are crashes, and one more."""
    done: set[str] = set()
    runs = 0
    templates: set[str] = set()
    findings: list[str] = []
    while True:
        command = [sys.executable, __file__, "--child", str(model), target_cpu, str(calls), json.dumps(sorted(done))]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        at = ""
        for line in child.stdout.splitlines():
            word, _, rest = line.partition(" ")
            match word:
                case "at":
                    at = rest
                    done.add(rest.split()[0])
                case "ran":
                    runs += 1
                    templates.add(rest)
                case "wrong":
                    findings.append(f"{at}: {rest}")
        if child.returncode >= 0:
            findings += [f"exit code {child.returncode}"] if child.returncode else []
            return Found(model.stem, len(done), runs, tuple(sorted(templates)), tuple(findings))
        findings.append(f"{at}: {signal.Signals(-child.returncode).name}")
        if not at:
            return Found(model.stem, len(done), runs, tuple(sorted(templates)), tuple(findings))


def child(model: Path, target_cpu: str, calls: int, done: frozenset[str]) -> None:
    """The work; says on standard output what it is at."""
    bundle = pipeline.optimize(model, Config(target=target_cpu))
    plans = [p for p in bundle.plans.plans if p.kernel.name not in done]
    chosen = {p: [c for c in bundle.plans.calls.values() if c.kernel is p.kernel][:calls] for p in plans}
    target = by_name(target_cpu, host_features())
    compiled: dict[Plan, Jitted] = {}
    for label, values in _values(model, bundle, [c for cs in chosen.values() for c in cs]):
        for plan, uses in chosen.items():
            if plan.kernel.name in done:
                continue
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
    for sample, _ in islice(samples(with_values, VerifyConfig(runs=1)), 2):
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


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        model, target, calls, done = sys.argv[2:]
        child(Path(model), target, int(calls), frozenset(json.loads(done)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--target-cpu", default="native")
    parser.add_argument("--calls", type=int, default=2, help="nodes tried per kernel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for model in args.models:
        found.append(guard(model, args.target_cpu, args.calls))
        f = found[-1]
        print(f"{f.model}: {f.kernels} kernels, {f.runs} runs, {len(f.findings)} findings", *f.findings, sep="\n  ")
        sys.stdout.flush()
    rows = [(f.model, f.kernels, f.runs, ", ".join(f.templates), len(f.findings)) for f in found]
    print(markdown(["model", "kernels", "runs", "templates", "findings"], rows))
    if args.json:
        args.json.write_text(json.dumps([[f.model, f.kernels, f.runs, f.templates, f.findings] for f in found]))
    return 2 if any(f.findings for f in found) else 0


if __name__ == "__main__":
    sys.exit(main())
