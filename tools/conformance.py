"""Run onnxfuse over all onnx.backend.test node cases.

    python tools/conformance.py [--filter TEXT] [--limit N] [--freeze] [--jobs 2] [--json FILE] [--verbose]

Each case runs in plain onnxruntime (ORT_DISABLE_ALL) first; then it is optimized and run without and with the library.
A case that onnxruntime passes must still pass: agree with onnxruntime within the tolerances of `onnxfuse compare`, and
with the case's expected data within the case's own. The report counts what ran compiled and why the rest was left.
Exit 2 when a case fails that onnxruntime passes.

Many cases feed axes, shapes or sizes at run time, which keeps their op uncompiled. `--freeze` turns every input but the
first into an initializer, as exporters write them.

Cases run in child processes, many in each; a case that kills or blocks its process is reported and the rest goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fused import DOMAIN, table
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

CHUNK = 40  # cases per child process
TIMEOUT = 60.0  # seconds without a finished case after which a child is killed


@dataclass
class Result:
    """One case. `state`: not run (onnxruntime cannot), ok, failed."""

    name: str
    op: str
    state: str
    ort_passes: bool = False  # onnxruntime gives the expected data
    compiled: int = 0  # nodes that ran our kernel
    failures: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # "Op CODE"


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    cases = _cases(args.filter, args.limit)
    if args.freeze:
        cases = [freeze(c) for c in cases]
    start = time.perf_counter()
    results = run_all(cases, args.jobs)
    print(report(results, args.verbose))
    print(f"{time.perf_counter() - start:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(r) for r in results], indent=1))
    return 2 if any(r.state == "failed" and r.ort_passes for r in results) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="only cases whose name contains this text")
    parser.add_argument("--limit", type=int, default=0, help="only the first N of them")
    parser.add_argument("--freeze", action="store_true", help="inputs but the first become initializers")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--json", help="write every case's result to this file")
    parser.add_argument(
        "--verbose", action="store_true", help="name every failure, and the cases onnxruntime cannot run"
    )
    return parser.parse_args(argv)


def _cases(text: str, limit: int) -> list[TestCase]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the cases overflow on purpose
        found = [c for c in load_model_tests(kind="node") if text in c.name]
    return found[:limit] if limit else found


def freeze(case: TestCase) -> TestCase:
    """The case with every input but the first as an initializer; as it is where that cannot be said."""
    if len(case.data_sets) != 1 or case.model.ir_version < 4:
        return case
    given, expected = case.data_sets[0]
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    fed: list[Any] = []
    kept: list[onnx.ValueInfoProto] = []
    for info, value in zip(model.graph.input, given, strict=False):
        array = _value(value)
        if kept and isinstance(array, np.ndarray) and info.type.HasField("tensor_type"):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
            continue
        kept.append(onnx.ValueInfoProto.FromString(info.SerializeToString()))
        fed.append(value)
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return dataclasses.replace(case, model=model, data_sets=[(fed, expected)])


# ---- children


def run_all(cases: Sequence[TestCase], jobs: int) -> list[Result]:
    """Every case, in order, however many children it takes."""
    chunks = [list(cases[i : i + CHUNK]) for i in range(0, len(cases), CHUNK)]
    with ThreadPoolExecutor(jobs) as pool:
        return [r for results in pool.map(_run_chunk, chunks) for r in results]


_fork_lock = threading.Lock()  # the children inherit the loaded cases; no other thread may be inside fork


def _run_chunk(cases: list[TestCase]) -> list[Result]:
    """One chunk; a new child takes over behind a case that killed its child."""
    results: list[Result] = []
    while len(results) < len(cases):
        rest = cases[len(results) :]
        results += _run_child(rest)
    return results


def _run_child(cases: list[TestCase]) -> list[Result]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with _fork_lock:
        child = context.Process(target=_child, args=(cases, sender), daemon=True)
        child.start()
        sender.close()
    results: list[Result] = []
    problem = ""
    with contextlib.suppress(EOFError):
        while len(results) < len(cases):
            if not receiver.poll(TIMEOUT):
                problem = f"no answer for {TIMEOUT:.0f} s"
                child.kill()
                break
            results.append(Result(**receiver.recv()))
    child.join()
    if len(results) < len(cases):
        case = cases[len(results)]
        results.append(
            Result(case.name, _op(case), "failed", True, failures=[problem or f"process died: exit {child.exitcode}"])
        )
    return results


def _child(cases: list[TestCase], sender: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # onnxruntime logs to stderr whatever it is told
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, case in enumerate(cases):
            try:
                result = run_case(case, Path(folder) / f"{i}.onnx")
            except Exception as error:  # a traceback is a finding about one case, not the end of the run
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                result = Result(case.name, _op(case), "failed", True, failures=[" ".join(text.split())[:500]])
            sender.send(asdict(result))
    sender.close()


def _op(case: TestCase) -> str:
    """The op a case is about: its only node's, or of an expanded function the name in the case."""
    nodes = case.model.graph.node
    if len(nodes) == 1:
        return str(nodes[0].op_type)
    return "expanded functions" if "expanded" in case.name else "graphs of several nodes"


# ---- one case


def run_case(case: TestCase, path: Path) -> Result:
    """Plain onnxruntime, then the optimized model without and with the library."""
    from onnxfuse.config import Config
    from onnxfuse.errors import OnnxfuseError, UsageError
    from onnxfuse.inspection import inspect
    from onnxfuse.pipeline import optimize
    from onnxfuse.verify import ort

    result = Result(case.name, _op(case), "not run")
    try:
        plain = ort.session(case.model, threads=1)
        data = [(_feeds(case.model, given), expected) for given, expected in case.data_sets]
        reference = [ort.run(plain, fed) for fed, _ in data]
        again = [ort.run(plain, fed) for fed, _ in data]
    except (UsageError, *ort.ORT_ERRORS, NotImplementedError, TypeError, ValueError) as error:
        result.failures = [" ".join(str(error).split())[:200]]
        return result
    result.ort_passes = not any(
        _against_expected(case, got, expected) for got, (_, expected) in zip(reference, data, strict=True)
    )
    if any(_differences(a, b) for a, b in zip(reference, again, strict=True)):
        result.failures = ["onnxruntime does not agree with itself: random"]
        return result
    result.state = "ok"
    try:
        bundle = optimize(case.model, Config())
        bundle.save(path)
    except OnnxfuseError as error:
        result.state, result.failures = "failed", ["optimize: " + " ".join(str(error).split())[:500]]
        return result
    model = onnx.load(path)
    result.left = [f"{entry.op} {entry.code}" for entry in inspect(bundle.partition, bundle.plans).left]
    ours = sum(node.domain == DOMAIN for node in model.graph.node)
    library = path.with_suffix(".so")
    for label, libraries in (("without library", []), ("with library", [library])):
        if libraries and not library.exists():
            continue
        try:
            session = ort.session(path, level=ort.Level.ALL, threads=2, libraries=libraries)
        except UsageError as error:
            result.failures.append(f"{label}: {error.what}: {error.why}"[:500])
            continue
        for (fed, expected), want in zip(data, reference, strict=True):
            try:
                got = ort.run(session, fed)
            except ort.ORT_ERRORS as error:
                result.failures.append(f"{label}: " + " ".join(str(error).split())[:500])
                continue
            bad = _differences(want, got)
            if not bad and result.ort_passes:
                bad = _against_expected(case, got, expected)
            result.failures += [f"{label}: {b}" for b in bad]
    if ours and library.exists() and not result.failures:
        ran = ort.profile(path, data[0][0], level=ort.Level.ALL, libraries=[library])
        names = {(n.name, n.op_type) for n in model.graph.node if n.domain == DOMAIN}
        result.compiled = len(names & set(ran))
        if result.compiled < ours:
            result.failures.append(f"profile: only {result.compiled} of {ours} nodes ran our kernel")
    if result.failures:
        result.state = "failed"
    return result


def _feeds(model: onnx.ModelProto, given: Sequence[object]) -> dict[str, object]:
    """Inputs by name; absent optional ones are left out."""
    names = [i.name for i in model.graph.input]
    return {name: _value(v) for name, v in zip(names, given, strict=False) if v is not None}


def _value(value: object) -> object:
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, list):
        return [_value(v) for v in value]
    return np.asarray(value) if isinstance(value, np.generic) else value


def _differences(want: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Where two results of onnxruntime disagree."""
    from onnxfuse.config import VerifyConfig
    from onnxfuse.verify.compare import compare_results

    bad = [o for o in compare_results(want, got, VerifyConfig()) if not o.ok]
    return [f"{o.name}: {o.problem or _numbers(o)}" for o in bad]


def _numbers(out: Any) -> str:
    first = f"first at {out.first.index}: {out.first.reference} became {out.first.candidate}" if out.first else ""
    return f"{out.mismatches}/{out.total} differ, max abs {out.max_abs:.3g} ({out.tolerance}); {first}"


def _against_expected(case: TestCase, got: dict[str, Any], expected: Sequence[Any]) -> list[str]:
    """Against the case's own data, as onnx's runner does it: shapes, dtypes, rtol and atol of the case."""
    problems: list[str] = []
    for (name, value), want in zip(got.items(), expected, strict=False):
        for a, b in _pairs(_value(want), value):
            problem = _expected_problem(np.asarray(a), np.asarray(b), case.rtol, case.atol)
            if problem:
                problems.append(f"{name} against the expected data: {problem}")
    return problems


def _pairs(want: Any, got: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        yield from ((a, b) for w, g in zip(want, got, strict=True) for a, b in _pairs(w, g))
    elif want is not None or got is not None:
        yield want, got


def _expected_problem(want: np.ndarray, got: np.ndarray, rtol: float, atol: float) -> str:
    if want.shape != got.shape:
        return f"shape {want.shape} became {got.shape}"
    if want.dtype.kind in "OUSb" or got.dtype.kind in "OUSb":
        return "" if np.array_equal(want.astype(str), got.astype(str)) else "values differ"
    if want.dtype != got.dtype:
        return f"dtype {want.dtype} became {got.dtype}"
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    close = np.isclose(got.astype(wide), want.astype(wide), rtol=rtol, atol=atol, equal_nan=True)
    return "" if bool(close.all()) else f"{int((~close).sum())}/{close.size} differ"


# ---- report


def report(results: Sequence[Result], verbose: bool = False) -> str:
    """Totals, a table by op, the codes of what was left, the failures."""
    lines = [_totals(results), "", _by_op(results), "", "left to onnxruntime, by op and code:"]
    left = Counter(entry for r in results for entry in r.left)
    lines += [f"  {n:5d}  {entry}" for entry, n in left.most_common()]
    failed = [r for r in results if r.state == "failed"]
    lines += ["", f"failures ({len(failed)}):"] if failed else ["", "failures: none"]
    for kind, group in _by_cause(failed):
        lines.append(f"  {len(group):4d}  {kind}")
        shown = group if verbose else group[:4]
        lines += [
            f"          {r.name}{'' if r.ort_passes else ' (onnxruntime fails it)'}: {r.failures[0]}" for r in shown
        ]
        lines += [f"          ... {', '.join(r.name for r in group[4:12])}"] if len(group) > len(shown) else []
    if verbose:
        lines += ["", "not run:"] + [f"  {r.name}: {r.failures[0]}" for r in results if r.state == "not run"]
    return "\n".join(lines)


def _totals(results: Sequence[Result]) -> str:
    ran = [r for r in results if r.state != "not run"]
    passed = [r for r in ran if r.ort_passes]
    failed = [r for r in ran if r.state == "failed"]
    return "\n".join(
        [
            f"cases                                {len(results):5d}",
            f"onnxruntime runs                     {len(ran):5d}",
            f"onnxruntime passes                   {len(passed):5d}",
            f"  fail after optimize                {sum(r.ort_passes for r in failed):5d}",
            f"onnxruntime runs but does not pass   {len(ran) - len(passed):5d}",
            f"  differ from it after optimize      {sum(not r.ort_passes for r in failed):5d}",
            f"ran compiled (at least one kernel)   {sum(r.compiled > 0 for r in results):5d}",
        ]
    )


def _by_op(results: Sequence[Result]) -> str:
    rows: dict[str, list[int]] = {}
    for r in results:
        row = rows.setdefault(r.op, [0, 0, 0, 0])
        row[0] += 1
        row[1] += r.state != "not run"
        row[2] += r.compiled > 0
        row[3] += r.state == "failed"
    return table(["op", "cases", "ort runs", "compiled", "failed"], [[op, *row] for op, row in sorted(rows.items())])


def _by_cause(failed: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Failures grouped by what is alike in their first message."""
    groups: dict[str, list[Result]] = {}
    for r in failed:
        groups.setdefault(cause(r.failures[0], r.op), []).append(r)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def cause(message: str, op: str) -> str:
    """The message without names and numbers; differing values are grouped by op."""
    if "differ" in message or "became" in message:
        return f"{message.split(':')[0]}: wrong values or shapes, {op}"
    return " ".join("#" if any(c.isdigit() for c in w) else w for w in message.split()[:14])


if __name__ == "__main__":
    sys.exit(main())
