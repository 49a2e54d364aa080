"""Run onnxfuse over the cases of onnx.backend.test.

    python tools/conformance.py [--suite node,simple,light,...|all] [--mode full,none,...|all] [--ort-python PYTHON]
                                [--filter TEXT] [--limit N] [--freeze] [--jobs 2] [--log FILE] [--verbose]

Each case runs in plain onnxruntime (ORT_DISABLE_ALL) first; then it is optimized in each fusion mode and run without
and with the library. A case that onnxruntime passes must still pass: agree with onnxruntime within the tolerances of
`onnxfuse compare`, and with the case's expected data within the case's own. The report counts what ran compiled and why
the rest was left, and gives the share of what could be compiled (tools/inherent.py says what could not).
Exit 2 when a case fails that onnxruntime passes.

Many cases feed axes, shapes or sizes at run time, which keeps their op uncompiled. `--freeze` turns every input but the
first into an initializer, as exporters write them. `--ort-python` names the interpreter whose onnxruntime runs the
models (with the oldest supported version, for one); optimizing stays with this one.

Cases run in child processes, many in each; a case that kills or blocks its process is reported and the rest goes on.
`--log` names a file of results, one line of JSON each, written as they come; cases that are in it already are not run
again, so a run can be cut into parts.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fused import fused_nodes, table
from inherent import apart, idle, narrow
from judges import Judge, Refused, There, judge
from onnx.backend.test.case.test_case import TestCase
from suites import SUITES, cases, data_of, freeze, loaded, model_of, op, plain

CHUNK = 40  # cases per child process
TIMEOUT = 60.0  # seconds of work without a finished case after which a child is killed
IDLE = 20.0  # as many times that, by the clock: the machine may be busy with something else
SLOW = 900.0  # the same for the suite of whole networks
MODES = ("full", "canfuse", "tvm", "none")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is done with each case."""

    modes: tuple[str, ...] = ("full",)
    python: str | None = None  # interpreter of the onnxruntime that runs the models
    frozen: bool = False


@dataclass
class Result:
    """One case. `state`: not run (onnxruntime cannot), ok, failed. Counts and codes are those of the first mode."""

    name: str
    op: str
    state: str
    ort_passes: bool = False  # onnxruntime gives the expected data
    compiled: int = 0  # nodes that ran our kernel
    failures: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # "Op CODE"
    apart: str = ""  # why the case does not count as one that could run compiled (tools/inherent.py)
    narrow: bool = False  # it has an element type that only passes through


class Log:
    """Results by name, those of an earlier run first; new ones are written at once."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lock = threading.Lock()
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.results = {r.name: r for r in (Result(**json.loads(line)) for line in lines)}

    def add(self, result: Result) -> None:
        """One more result (from any thread)."""
        with self.lock:
            self.results[result.name] = result
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")


Add = Callable[[Result], object]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    found = cases(_listed(args.suite, SUITES), args.filter, args.limit)
    setting = Setting(_listed(args.mode, MODES), args.ort_python, args.freeze)
    start = time.perf_counter()
    log = Log(None if args.log is None else Path(args.log))
    run_all([c for c in found if c.name not in log.results], args.jobs, setting, log.add)
    results = [log.results[c.name] for c in found]
    print(report(results, args.verbose))
    print(f"{time.perf_counter() - start:.0f} s")
    return 2 if any(r.state == "failed" and r.ort_passes for r in results) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="node", help=f"of {', '.join(SUITES)}; several with commas; all")
    parser.add_argument("--mode", default="full", help=f"fusion modes of {', '.join(MODES)}; several with commas; all")
    parser.add_argument("--ort-python", metavar="PYTHON", help="the interpreter whose onnxruntime runs the models")
    parser.add_argument("--filter", default="", help="only cases whose name contains this text")
    parser.add_argument("--limit", type=int, default=0, help="only the first N of them")
    parser.add_argument("--freeze", action="store_true", help="inputs but the first become initializers")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--log", help="file of results: written as they come, and what is in it is not run again")
    parser.add_argument(
        "--verbose", action="store_true", help="name every failure, and the cases onnxruntime cannot run"
    )
    return parser.parse_args(argv)


def _listed(text: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """A comma separated option. Exits with a message for a name that is none of `names`."""
    wanted = names if text == "all" else tuple(text.split(","))
    wrong = [w for w in wanted if w not in names]
    if wrong:
        raise SystemExit(f"no {wrong[0]!r}: one of {', '.join(names)}, or all")
    return wanted


# ---- children


def run_all(
    found: Sequence[TestCase], jobs: int, setting: Setting = Setting(), add: Add = lambda _: None
) -> list[Result]:
    """Every case, in order, however many children it takes; `add` hears of each as it ends."""
    chunks = [list(found[i : i + CHUNK]) for i in range(0, len(found), CHUNK)]
    with ThreadPoolExecutor(jobs) as pool:
        return [r for results in pool.map(lambda chunk: _run_chunk(chunk, setting, add), chunks) for r in results]


_fork_lock = threading.Lock()  # the children inherit the loaded cases; no other thread may be inside fork


def _run_chunk(chunk: list[TestCase], setting: Setting, add: Add) -> list[Result]:
    """One chunk; a new child takes over behind a case that killed its child."""
    results: list[Result] = []
    while len(results) < len(chunk):
        results += _run_child(chunk[len(results) :], setting, add)
    return results


def _run_child(chunk: list[TestCase], setting: Setting, add: Add) -> list[Result]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with _fork_lock:
        child = context.Process(target=_child, args=(chunk, setting, sender), daemon=True)
        child.start()
        sender.close()
    results: list[Result] = []
    problem = ""
    with contextlib.suppress(EOFError):
        while len(results) < len(chunk):
            patience = SLOW if chunk[len(results)].kind == "real" else TIMEOUT * len(setting.modes)
            if not _answers(receiver, child, patience):
                problem = f"no answer for {patience:.0f} s"
                child.kill()
                break
            results.append(Result(**receiver.recv()))
            add(results[-1])
    child.join()
    receiver.close()
    if len(results) < len(chunk):
        case, why = chunk[len(results)], problem or f"process died: exit {child.exitcode}"
        results.append(Result(case.name, op(case), "failed", True, failures=[why]))
        add(results[-1])
    return results


def _answers(receiver: Any, child: Any, seconds: float) -> bool:
    """A result came before the child had worked for that long."""
    begun, start = _worked(child.pid), time.monotonic()
    while not receiver.poll(min(seconds, 5.0)):
        if _worked(child.pid) - begun > seconds or time.monotonic() - start > IDLE * seconds:
            return False
    return True


def _worked(pid: int) -> float:
    """CPU seconds of a process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _child(chunk: list[TestCase], setting: Setting, sender: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # onnxruntime logs to stderr whatever it is told
    who = judge(setting.python)
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, case in enumerate(chunk):
            try:
                result = run_case(case, Path(folder) / str(i), setting, who)
            except Exception as error:  # a traceback is a finding about one case, not the end of the run
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
                result = Result(case.name, op(case), "failed", True, failures=[" ".join(text.split())[:500]])
            sender.send(asdict(result))
    if isinstance(who, There):
        who.close()
    sender.close()


# ---- one case


@dataclass(frozen=True, slots=True)
class _Known:
    """A case that onnxruntime runs: what it gave, and whether that is what was expected."""

    case: TestCase
    feeds: list[dict[str, object]]
    reference: list[dict[str, Any]]
    passes: bool


def run_case(case: TestCase, folder: Path, setting: Setting, who: Judge) -> Result:
    """Plain onnxruntime, then the optimized model of each mode without and with the library."""
    case = freeze(loaded(case)) if setting.frozen else loaded(case)
    result = Result(case.name, op(case), "not run", apart=apart(model_of(case)), narrow=narrow(model_of(case)))
    folder.mkdir()
    source = folder / "source.onnx"
    onnx.save(model_of(case), source)
    feeds = [_feeds(model_of(case), given) for given, _ in data_of(case)]
    try:
        reference = who.results(source, None, feeds, optimized=False)
        again = who.results(source, None, feeds, optimized=False)
    except Refused as error:
        result.failures = [str(error)[:200]]
        return result
    expected = [want for _, want in data_of(case)]
    bad = [p for got, want in zip(reference, expected, strict=True) for p in _against_expected(case, got, want)]
    result.ort_passes = not bad
    if any(_differences(a, b) for a, b in zip(reference, again, strict=True)):
        result.failures = ["onnxruntime does not agree with itself: random"]
        return result
    known = _Known(case, feeds, reference, result.ort_passes)
    seen: dict[tuple[bytes, bytes], str] = {}
    for k, mode in enumerate(setting.modes):
        found = _run_mode(known, folder / f"{mode}.onnx", mode, who, seen)
        result.failures += [f if mode == "full" else f"{mode}: {f}" for f in found.failures]
        if k == 0:
            result.compiled, result.left = found.compiled, found.left
    result.state = "failed" if result.failures else "ok"
    return result


def _run_mode(known: _Known, path: Path, mode: str, who: Judge, seen: dict[tuple[bytes, bytes], str]) -> Result:
    """One fusion mode; a result equal to that of an earlier mode is not run again."""
    from onnxfuse.config import Config, FusionConfig, FusionMode
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.inspection import inspect
    from onnxfuse.pipeline import optimize

    result = Result(known.case.name, op(known.case), "ok")
    try:
        bundle = optimize(model_of(known.case), Config(fusion=FusionConfig(mode=FusionMode(mode))))
        bundle.save(path)
    except OnnxfuseError as error:
        result.failures = ["optimize: " + " ".join(str(error).split())[:500]]
        return result
    library = path.with_suffix(".so")
    made = _content(path), library.read_bytes() if library.exists() else b""
    result.left = [f"{entry.op} {entry.code}" for entry in inspect(bundle.partition, bundle.plans).left]
    if made in seen:
        return result
    seen[made] = mode
    for label, given in (("without library", None), ("with library", library)):
        if given is not None and not library.exists():
            continue
        try:
            outputs = who.results(path, given, known.feeds, optimized=True)
        except Refused as error:
            if not error.loaded and given is None and _refused_as_it_was(known, path, who):
                return result
            result.failures.append(f"{label}: {'' if error.loaded else 'does not load: '}{error}"[:500])
            continue
        for got, want, (_, expected) in zip(outputs, known.reference, data_of(known.case), strict=True):
            bad = _differences(want, got)
            if not bad and known.passes:
                bad = _against_expected(known.case, got, expected)
            result.failures += [f"{label}: {b}" for b in bad]
    ours = fused_nodes(onnx.load(path, load_external_data=False)).keys()
    if ours and library.exists() and not result.failures:
        result.compiled = len(ours & who.ran(path, library, known.feeds[0]))
        if result.compiled < len(ours):
            result.failures.append(f"profile: only {result.compiled} of {len(ours)} nodes ran our kernel")
    return result


def _refused_as_it_was(known: _Known, path: Path, who: Judge) -> bool:
    """The original does not load either where onnxruntime optimizes it: its own constants lead it astray."""
    source = path.with_name("source.onnx")
    try:
        who.results(source, None, known.feeds, optimized=True)
    except Refused as error:
        return not error.loaded
    return False


def _content(path: Path) -> bytes:
    """The model without what it says about itself (the mode is among it)."""
    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _feeds(model: onnx.ModelProto, given: Sequence[object]) -> dict[str, object]:
    """Inputs by name; absent optional ones are left out."""
    weights = {t.name for t in model.graph.initializer}
    names = [i.name for i in model.graph.input if i.name not in weights or len(given) == len(model.graph.input)]
    return {name: plain(v) for name, v in zip(names, given, strict=False) if v is not None}


def _differences(want: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Where two results of onnxruntime disagree."""
    from onnxfuse.config import VerifyConfig
    from onnxfuse.verify.values import compare_results

    bad = [o for o in compare_results(want, got, VerifyConfig()) if not o.ok]
    return [f"{o.name}: {o.problem or _numbers(o)}" for o in bad]


def _numbers(out: Any) -> str:
    first = f"first at {out.first.index}: {out.first.reference} became {out.first.candidate}" if out.first else ""
    return f"{out.mismatches}/{out.total} differ, max abs {out.max_abs:.3g} ({out.tolerance}); {first}"


def _against_expected(case: TestCase, got: Mapping[str, Any], expected: Sequence[Any]) -> list[str]:
    """Against the case's own data, as onnx's runner does it: shapes, dtypes, rtol and atol of the case."""
    problems: list[str] = []
    for (name, value), want in zip(got.items(), expected, strict=False):
        for a, b in _pairs(plain(want), value):
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
    lines = [_totals(results), _share(results), "", _by_op(results), "", "not compiled though they could be, by op:"]
    lines += _not_compiled(results, verbose)
    lines += ["", "left to onnxruntime, by op and code:"]
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


def _share(results: Sequence[Result]) -> str:
    """Of what onnxruntime runs and could be compiled, how much is; the element types that only pass through apart."""
    counted = _counted(results)
    dense = [r for r in counted if not r.narrow]
    why = Counter(w for r in results if r.state != "not run" and (w := _apart(r)))
    lines = [f"  not counted: {n:4d}  {reason}" for reason, n in why.most_common()]
    for title, some in (("of the others", counted), ("  with element types kernels compute on", dense)):
        done = sum(r.compiled > 0 for r in some)
        lines.append(f"{title:38s} {done} of {len(some)} = {100 * done / max(1, len(some)):.1f} %")
    return "\n".join(lines)


def _apart(r: Result) -> str:
    return r.apart or ("nothing to compute" if not r.compiled and r.state == "ok" and idle(r.left) else "")


def _counted(results: Sequence[Result]) -> list[Result]:
    """The cases that could run compiled."""
    return [r for r in results if r.state != "not run" and not _apart(r)]


def _not_compiled(results: Sequence[Result], verbose: bool) -> list[str]:
    missing: dict[str, list[str]] = {}
    for r in _counted(results):
        if not r.compiled:
            missing.setdefault(r.op, []).append(r.name)
    ranked = sorted(missing.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"  {len(names):5d}  {op}{': ' + ', '.join(names) if verbose else ''}" for op, names in ranked]


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
