"""Time optimized models against onnxruntime's own best (ORT_ENABLE_ALL), interleaved in one process per model.

    python tools/bench.py [NAME...] [--models-dir DIR] [--threads 1,2] [--seconds 4] [--profile]
                          [--json FILE] [--assert RATIO] [--update-readme]

Ratio = onnxruntime's time / ours: above 1 we are faster. Rounds alternate between the contenders; in a round each runs
a burst, whose first run is dropped (it pays for the other's caches; threads of either stop spinning when a run ends);
a round's value is the burst's median. Printed are the medians over the rounds, the ratio of the rounds' pairs and its
quartiles. OpenVINO is measured too if it is installed and reads the model.

--profile: the nodes that take most time, and how near each is to what the machine can do for the work its group states
(`inspect`; static shapes only): the least time by the peak and the bandwidth measured on the spot (tools/roofline.py),
over its own time. Winograd kernels do fewer operations than they state and may exceed 100 %.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fused import library_of, markdown, optimize_cli, run_child, table
from modelzoo import ROOT, Model, feeds, input_dtypes, load_manifest, models_dir, select
from roofline import machine

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
WARM_UP = 0.5  # seconds of runs thrown away, per contender
BURST = 0.08  # seconds of runs in a burst, at least MIN_BURST of them
MIN_BURST = 3
MIN_ROUNDS = 7


# Node, op type, median ms, percent of all nodes, percent of the roofline (None: its work is not known).
Profiled = tuple[str, str, float, float, float | None]


@dataclass
class Timing:
    """One model at one thread count. Times in milliseconds: name of the contender -> median."""

    name: str
    threads: int
    times: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # other -> quartiles of other / ours
    rounds: int = 0
    groups: list[Profiled] = field(default_factory=list)
    error: str = ""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.worker:
        return _worker(json.loads(Path(args.worker).read_text()))
    timings: list[Timing] = []
    for model in select(args.names, load_manifest()):
        for timing in measure(model, args):
            timings.append(timing)
            print(f"{timing.name}: {timing.error}" if timing.error else _line(timing), flush=True)
    print()
    print(table(*columns(timings)))
    for timing in timings if args.profile else ():
        print(f"\n{timing.name}, {timing.threads} thread(s): time by node")
        rows = [[n, o, f"{ms:.3f}", f"{p:.1f}", "" if r is None else f"{r:.0f}"] for n, o, ms, p, r in timing.groups]
        print(table(["node", "op", "ms", "%", "% of roofline"], rows))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(t) for t in timings], indent=1))
    if args.update_readme:
        update_readme(ROOT / "README.md", timings)
    return verdict(timings, args.at_least)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of the manifest, or prefixes (default: all)")
    parser.add_argument("--models-dir", help="where the fetched models are (default: $MODELS_DIR or models/cache)")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="time to measure each model and thread count")
    parser.add_argument("--flag", action="append", default=[], help="a further flag for `onnxfuse optimize`")
    parser.add_argument("--profile", action="store_true", help="also time every node of the optimized model")
    parser.add_argument("--json", help="write the timings to this file")
    parser.add_argument("--assert", dest="at_least", type=float, help="exit 2 if a ratio is below this")
    parser.add_argument("--update-readme", action="store_true", help=f"put the table between {BEGIN} and {END}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(model: Model, args: argparse.Namespace) -> list[Timing]:
    """Optimize once, then one child process per thread count."""
    counts = [int(t) for t in args.threads.split(",")]
    original = models_dir(args.models_dir) / f"{model.name}.onnx"
    if not original.exists():
        return [Timing(model.name, counts[0], error=f"absent: {original} (tools/fetch_models.py obtains it)")]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        fused = Path(folder) / "fused.onnx"
        done = optimize_cli(original, fused, ["--no-verify", *args.flag])
        if done.code != 0:
            return [Timing(model.name, counts[0], error=f"optimize: exit {done.code}: {done.output.strip()[-400:]}")]
        return [_measure_in_child(model, original, fused, threads, args) for threads in counts]


def _measure_in_child(model: Model, original: Path, fused: Path, threads: int, args: argparse.Namespace) -> Timing:
    job, answer = fused.with_suffix(".job"), fused.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    what = {"name": model.name, "case": model.bench, "inputs": model.inputs, "original": str(original)}
    how = {"seconds": args.seconds, "profile": args.profile, "threads": threads}
    job.write_text(json.dumps(what | how | {"fused": str(fused), "answer": str(answer)}))
    done = run_child([sys.executable, __file__, "--worker", str(job)], timeout=args.seconds * 10 + 300)
    if done.code != 0 or not answer.exists():
        return Timing(model.name, threads, error=f"exit {done.code}: {done.output.strip()[-400:]}")
    return Timing(**json.loads(answer.read_text()))


# ---- in the child


def _worker(job: dict[str, Any]) -> int:
    original, fused = Path(job["original"]), Path(job["fused"])
    case = {name: tuple(shape) for name, shape in job["case"].items()}
    fed = feeds(Model("", "", {}, (), {}, job["inputs"]), case, input_dtypes(original))
    threads = int(job["threads"])
    library = library_of(fused)
    contenders = {
        "onnxfuse": _onnxruntime(fused, threads, library, fed),
        "onnxruntime": _onnxruntime(original, threads, None, fed),
    }
    other = _openvino(original, threads, fed) if importlib.util.find_spec("openvino") else None
    if other is not None:
        contenders["openvino"] = other
    timing = Timing(job["name"], threads)
    rounds = interleave(contenders, job["seconds"])
    timing.rounds = len(rounds["onnxfuse"])
    timing.times = {name: statistics.median(values) * 1e3 for name, values in rounds.items()}
    for name, values in rounds.items():
        if name != "onnxfuse":
            timing.ratios[name] = quartiles([a / b for a, b in zip(values, rounds["onnxfuse"], strict=True)])
    if job["profile"]:
        timing.groups = profile(fused, threads, library, fed)
    Path(job["answer"]).write_text(json.dumps(asdict(timing)))
    return 0


def _onnxruntime(path: Path, threads: int, library: Path | None, fed: dict[str, Any]) -> Callable[[], object]:
    session = _session(path, threads, library)
    return lambda: session.run(None, fed)


def _session(path: Path, threads: int, library: Path | None, prefix: str = "") -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Between runs no thread spins: the next contender needs the core.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if library is not None:
        options.register_custom_ops_library(str(library))
    if prefix:
        options.enable_profiling = True
        options.profile_file_prefix = prefix
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _openvino(path: Path, threads: int, fed: dict[str, Any]) -> Callable[[], object] | None:
    """None for a model that it does not read (silero VAD: a branch whose rank is known at run time only)."""
    import openvino

    core = openvino.Core()
    try:
        model = core.read_model(str(path))
    except RuntimeError as error:
        print(f"openvino does not read {path.name}: {str(error).splitlines()[-1]}", file=sys.stderr)
        return None
    model.reshape({name: list(value.shape) for name, value in fed.items()})
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", options).create_infer_request()
    return lambda: request.infer(fed)


def interleave(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each contender in each round."""
    for run in contenders.values():
        _burst(run, WARM_UP)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    start, count = time.perf_counter(), 0
    while count < MIN_ROUNDS or time.perf_counter() - start < seconds:
        order = list(contenders) if count % 2 == 0 else list(reversed(contenders))
        for name in order:
            rounds[name].append(_burst(contenders[name], BURST))
        count += 1
    return rounds


def _burst(run: Callable[[], object], seconds: float) -> float:
    """Median of a burst of runs, the first one dropped."""
    run()
    times: list[float] = []
    while len(times) < MIN_BURST or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def profile(path: Path, threads: int, library: Path | None, fed: dict[str, Any], top: int = 25) -> list[Profiled]:
    """The nodes that take most time, by onnxruntime's own clock."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        session = _session(path, threads, library, str(Path(folder) / "profile"))
        for _ in range(20):
            session.run(None, fed)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            key = (event["name"].removesuffix("_kernel_time"), event["args"]["op_name"])
            times.setdefault(key, []).append(event["dur"] / 1e3)
    medians = {key: statistics.median(values) for key, values in times.items()}
    total = sum(medians.values()) or 1.0
    ranked = sorted(medians.items(), key=lambda item: -item[1])[:top]
    least = _least_ms(session, threads)
    return [
        (node, op, ms, 100 * ms / total, 100 * least[node] / ms if node in least and ms else None)
        for (node, op), ms in ranked
    ]


def _least_ms(session: Any, threads: int) -> dict[str, float]:
    """What the machine needs at least for the work of each group, by name; empty for a model with free dimensions."""
    if any(not isinstance(d, int) for i in session.get_inputs() for d in i.shape):
        return {}
    limits = machine(threads)
    record = json.loads(session.get_modelmeta().custom_metadata_map.get("onnxfuse.inspection", "{}"))
    return {g["name"]: limits.seconds(g["operations"], g["bytes"]) * 1e3 for g in record.get("groups", ())}


# ---- report


def columns(timings: Sequence[Timing]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    others = list(dict.fromkeys(name for t in timings for name in t.ratios)) or ["onnxruntime"]
    header = ["model", "threads", "onnxfuse ms"]
    header += [c for name in others for c in (f"{name} ms", f"ratio to {name}", "quartiles")]
    rows: list[list[str]] = []
    for t in timings:
        row = [t.name, str(t.threads), f"{t.times['onnxfuse']:.2f}" if t.times else "failed"]
        for name in others:
            low, middle, high = t.ratios.get(name, (float("nan"),) * 3)
            row += [f"{t.times.get(name, float('nan')):.2f}", f"{middle:.2f}", f"{low:.2f}-{high:.2f}"]
        rows.append(row)
    return header, rows


def ratios_only(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without absolute times: those say more about the machine than about us."""
    keep = [k for k, title in enumerate(header) if not title.endswith(" ms")]
    return [header[k] for k in keep], [[row[k] for k in keep] for row in rows]


def _line(timing: Timing) -> str:
    parts = [f"{name} {ms:.2f} ms" for name, ms in timing.times.items()]
    parts += [f"ratio to {name} {r[1]:.2f} ({r[0]:.2f}-{r[2]:.2f})" for name, r in timing.ratios.items()]
    return f"{timing.name}, {timing.threads} thread(s): {', '.join(parts)}, {timing.rounds} rounds"


def update_readme(path: Path, timings: Sequence[Timing]) -> None:
    """Rewrite what is between the markers."""
    import onnxruntime

    text = path.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{path} has no {BEGIN} ... {END}")
    note = f"onnxruntime {onnxruntime.__version__} at ENABLE_ALL, {cpu_name()}. Ratio above 1: onnxfuse is faster."
    rows = markdown(*ratios_only(*columns(timings)))
    body = f"{BEGIN}\n`python tools/bench.py --update-readme`: {note}\n\n{rows}\n{END}"
    path.write_text(pattern.sub(lambda _: body, text))


def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else []
    return names[0].strip() if names else "unknown CPU"


def verdict(timings: Sequence[Timing], at_least: float | None) -> int:
    """Exit code: 1 if a model could not be measured, 2 if a ratio to onnxruntime is below `at_least`."""
    if any(t.error for t in timings):
        return 1
    slow = [t for t in timings if at_least is not None and t.ratios["onnxruntime"][1] < at_least]
    for t in slow:
        print(f"below {at_least}: {t.name}, {t.threads} thread(s): {t.ratios['onnxruntime'][1]:.2f}", file=sys.stderr)
    return 2 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
