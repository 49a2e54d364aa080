"""What a session of an optimized model costs before it runs: seconds to create it, and memory, against the original's.

    python tools/sessions.py [NAME...] [--models-dir DIR] [--rounds 3] [--threads 2] [--flag FLAG] [--json FILE]

Every session is made in a process of its own, originals and optimized models in turns. `create` is the least time over
the rounds (both at ORT_ENABLE_ALL), `held` what the process holds more once the session exists and has run once (the
first shapes of `bench`), `peak` the most it held in between. Ratio = optimized / original.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fused import library_of, optimize_cli, own_peak_rss, run_child, table
from modelzoo import Model, feeds, input_dtypes, load_manifest, models_dir, select

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """One session: seconds to create it; bytes held after a run, and at most."""

    create: float
    held: int
    peak: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of the manifest, or prefixes (default: all)")
    parser.add_argument("--models-dir", help="where the fetched models are (default: $MODELS_DIR or models/cache)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flag", action="append", default=[], help="a further flag for `onnxfuse optimize`")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return worker(json.loads(args.worker))
    found: dict[str, tuple[Cost, Cost]] = {}
    for model in select(args.names, load_manifest()):
        original = models_dir(args.models_dir) / f"{model.name}.onnx"
        if not original.exists():
            print(f"{model.name}: absent (tools/fetch_models.py obtains it)", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="sessions-") as folder:
            fused = Path(folder) / "fused.onnx"
            done = optimize_cli(original, fused, ["--no-verify", *args.flag])
            if done.code != 0:
                raise SystemExit(f"{model.name}: {done.output.strip()[-400:]}")
            found[model.name] = measure(model, original, fused, args)
        print(f"{model.name} done", file=sys.stderr)
    print(report(found))
    if args.json:
        numbers = {name: [asdict(c) for c in pair] for name, pair in found.items()}
        Path(args.json).write_text(json.dumps(numbers, indent=1))
    return 0


def measure(model: Model, original: Path, fused: Path, args: argparse.Namespace) -> tuple[Cost, Cost]:
    """The original's cost, the optimized model's."""
    costs: tuple[list[Cost], list[Cost]] = ([], [])
    for _ in range(args.rounds):
        for path, into in zip((original, fused), costs, strict=True):
            library = library_of(path) if path is fused else None
            job = {
                "model": str(path), "library": str(library or ""), "original": str(original), "threads": args.threads,
                "case": {k: list(v) for k, v in (model.bench or model.cases[0]).items()}, "inputs": model.inputs,
            }  # fmt: skip
            done = run_child([sys.executable, __file__, "--worker", json.dumps(job)])
            if done.code != 0:
                raise SystemExit(f"{model.name}: {done.output.strip()[-400:]}")
            into.append(Cost(**json.loads(done.output.strip().splitlines()[-1])))
    first, second = (Cost(*(min(getattr(c, f) for c in side) for f in ("create", "held", "peak"))) for side in costs)
    return first, second


def worker(job: dict[str, object]) -> int:
    """In the child: one session, one run."""
    import onnxruntime

    case = {name: tuple(shape) for name, shape in dict(job["case"]).items()}  # type: ignore[call-overload]
    inputs = job["inputs"]
    assert isinstance(inputs, dict)
    fed = feeds(Model("", "", {}, (), {}, inputs), case, input_dtypes(Path(str(job["original"]))))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(str(job["threads"]))
    options.log_severity_level = 4
    if job["library"]:
        options.register_custom_ops_library(str(job["library"]))
    before, start = held(), time.perf_counter()
    session = onnxruntime.InferenceSession(str(job["model"]), options, providers=["CPUExecutionProvider"])
    create = time.perf_counter() - start
    session.run(None, fed)
    print(json.dumps(asdict(Cost(create, held() - before, own_peak_rss() - before))))
    return 0


def held() -> int:
    """Memory of this process now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def report(found: dict[str, tuple[Cost, Cost]]) -> str:
    """The table."""
    rows = []
    for name, (a, b) in found.items():
        row = [name, f"{a.create * 1e3:.0f}", f"{b.create * 1e3:.0f}", f"{b.create / a.create:.2f}"]
        for x, y in ((a.held, b.held), (a.peak, b.peak)):
            row += [f"{x / MIB:.0f}", f"{y / MIB:.0f}", f"{y / max(1, x):.2f}"]
        rows.append(row)
    header = ["model", "create ms", "ours", "ratio", "held MiB", "ours", "ratio", "peak MiB", "ours", "ratio"]
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
