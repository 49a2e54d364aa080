"""Check onnxfuse on the models of models/manifest.toml and on the small committed ones.

    python tools/check_models.py [NAME...] [--models-dir DIR] [--ort-python PYTHON] [--json FILE] [--keep DIR]

For each model: `onnxfuse optimize` must succeed within its limits; the result must pass onnx.checker, load and run in
stock onnxruntime without the library and with it, and agree with the original (ORT_DISABLE_ALL) at every shape of the
manifest; onnxruntime's profile must show that each of our nodes ran our kernel; and what the model's family demands
must be in compiled groups. `--ort-python` repeats the runs in another interpreter's onnxruntime. Exit 2 when a check
fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fused import CLI, Finished, fused_nodes, library_of, optimize_cli, run_child, table
from modelzoo import Model, Shapes, feeds, input_dtypes, load_manifest, models_dir, select, small_models

# Ops that must be compiled in a CNN wherever they work on activations.
CNN_OPS = frozenset({
    "Add", "AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "Div", "Elu", "Gemm",
    "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "LRN", "LeakyRelu", "MatMul", "MaxPool", "Mul",
    "PRelu", "Relu", "Sigmoid", "Softmax", "Sub", "Sum", "Tanh",
})  # fmt: skip
# Ops that ask for a shape only: what they give is not an activation any more.
SHAPE_OPS = frozenset({"Shape", "Size"})

# Reasons to leave a view of an activation outside of all kernels that are no failure: it costs nothing there.
FREE_CODES = frozenset({"NF_FREE_VIEW", "NF_TINY"})

LARGE = 20_000_000  # bytes of a model from which memory is told in multiples of its size

SMALL_CASES: dict[str, tuple[Shapes, ...]] = {
    "conv_add_relu": ({"data": (1, 3, 32, 32)},),
    "softmax": ({"x": (1, 256)}, {"x": (37, 256)}, {"x": (0, 256)}),
    "tiny_ocr": ({"x": (1, 3, 32, 32)}, {"x": (3, 3, 64, 100)}, {"x": (2, 3, 4, 4)}),
    "tiny_resnet": ({"data": (1, 3, 32, 32)}, {"data": (3, 3, 32, 32)}),
    "tiny_transformer": (
        {"hidden": (1, 1, 32), "mask": (1, 1)},
        {"hidden": (2, 17, 32), "mask": (2, 17)},
        {"hidden": (4, 200, 32), "mask": (4, 200)},
    ),
}


@dataclass
class Outcome:
    """What was found for one model. `failures` is empty when all checks passed."""

    name: str
    failures: list[str] = field(default_factory=list)
    size: int = 0
    seconds: float = 0.0
    peak_rss: int = 0
    groups: int = 0
    fused_from: int = 0
    left: dict[str, int] = field(default_factory=dict)  # "Op CODE" -> count
    worst: dict[str, float] = field(default_factory=dict)  # "with" / "without" -> largest difference / allowed
    notes: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.worker:
        return _worker(args.worker)
    outcomes: list[Outcome] = []
    for model, path in _wanted(args):
        outcome = check(model, path, args)
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        for failure in outcome.failures:
            print(f"    FAILED {failure}", flush=True)
    print()
    print(report(outcomes))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return 2 if any(o.failures for o in outcomes) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of the manifest or small models, or prefixes (default: all)")
    parser.add_argument("--models-dir", help="where the fetched models are (default: $MODELS_DIR or models/cache)")
    parser.add_argument("--ort-python", action="append", default=[], help="an interpreter with another onnxruntime")
    parser.add_argument("--flag", action="append", default=[], help="a further flag for `onnxfuse optimize`")
    parser.add_argument("--json", help="write the outcomes to this file")
    parser.add_argument("--keep", help="keep the optimized models in this directory")
    parser.add_argument("--small", action="store_true", help="only the small committed models")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _wanted(args: argparse.Namespace) -> list[tuple[Model, Path]]:
    small = {p.stem: p for p in small_models()}
    models = {n: Model(n, "cnn", {"kind": "small"}, SMALL_CASES[n], SMALL_CASES[n][-1]) for n in small}
    models["tiny_transformer"] = Model(
        "tiny_transformer", "transformer", {"kind": "small"}, SMALL_CASES["tiny_transformer"], {},
        {"mask": {"low": 0, "high": 2}},
    )  # fmt: skip
    if not args.small:
        models |= load_manifest()
    directory = models_dir(args.models_dir)
    return [(m, small.get(m.name, directory / f"{m.name}.onnx")) for m in select(args.names, models)]


def check(model: Model, path: Path, args: argparse.Namespace) -> Outcome:
    """All checks of one model; work that may crash is done in child processes."""
    outcome = Outcome(model.name)
    if not path.exists():
        outcome.failures.append(f"absent: {path} (tools/fetch_models.py obtains it)")
        return outcome
    outcome.size = path.stat().st_size
    with tempfile.TemporaryDirectory(prefix="check-") as scratch:
        folder = Path(args.keep) if args.keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"{model.name}.onnx"
        done = optimize_cli(path, out, args.flag)
        outcome.seconds, outcome.peak_rss = done.seconds, done.peak_rss
        if done.code != 0 or not out.exists():
            outcome.failures.append(f"optimize: exit {done.code}: {_tail(done.output)}")
            return outcome
        _check_limits(model, outcome)
        _check_result(model, path, out, outcome)
        _run_cases(model, path, out, Path(scratch), outcome)
        for python in args.ort_python:
            _run_elsewhere(python, model, path, out, Path(scratch), outcome)
    return outcome


def _tail(output: str) -> str:
    """What a child had to say: from its `error[CODE]` on, or its last lines."""
    lines = [line.strip() for line in output.strip().splitlines()]
    at = next((i for i, line in enumerate(lines) if line.startswith("error[")), max(0, len(lines) - 3))
    return " | ".join(lines[at : at + 6])[:700]


def _check_limits(model: Model, outcome: Outcome) -> None:
    limits = model.limits
    if "seconds" in limits and outcome.seconds > limits["seconds"]:
        outcome.failures.append(f"optimize took {outcome.seconds:.1f} s, limit {limits['seconds']} s")
    if "memory" in limits and outcome.peak_rss > limits["memory"] * outcome.size:
        ratio = outcome.peak_rss / outcome.size
        outcome.failures.append(f"optimize needed {ratio:.2f} times the model's size, limit {limits['memory']}")


def _check_result(model: Model, original: Path, path: Path, outcome: Outcome) -> None:
    """The file itself: checker, groups, what was left and why."""
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        outcome.failures.append(f"onnx.checker: {_tail(str(error))}")
    result = onnx.load(path, load_external_data=False)
    outcome.groups = len(fused_nodes(result))
    inspected = run_child([*CLI, "inspect", "--json", str(path)])
    report = _json_of(inspected)
    if report is None:
        outcome.failures.append(f"inspect --json: exit {inspected.code}: {_tail(inspected.output)}")
        report = {"groups": [], "left": []}
    outcome.fused_from = sum(len(g["members"]) for g in report["groups"])
    codes = {entry["name"]: entry["code"] for entry in report["left"]}
    outcome.left = dict(Counter(f"{e['op']} {e['code']}" for e in report["left"]).most_common())
    free = 0
    for node in violations(result, model.family):
        code = codes.get(node.name, "without a code")
        free += code in FREE_CODES
        if code not in FREE_CODES:
            outcome.failures.append(f"left: {node.op_type} {node.name!r} {code}")
    if free:
        outcome.notes.append(f"{free} views of activations left to onnxruntime, which moves no data for them")


def _json_of(done: Finished) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(done.output)
    except json.JSONDecodeError:
        return None
    return data


def violations(model: onnx.ModelProto, family: str) -> list[onnx.NodeProto]:
    """Nodes of the main graph that the family wants compiled and that were left to onnxruntime.

    An activation is a floating-point value computed from a float input or looked up in an embedding table. A CNN must
    have its usual ops compiled wherever they touch activations; a transformer all ops that do. Masks and shapes are
    computed from integers alone, so they are exempt.
    """
    graph = model.graph
    given = {t.name for t in graph.initializer}
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    active = {i.name for i in graph.input if i.name not in given and i.type.tensor_type.elem_type in floats}
    tables = {t.name for t in graph.initializer if t.data_type in floats and len(t.dims) == 2 and t.dims[0] > 1}
    found: list[onnx.NodeProto] = []
    for node in graph.node:
        touches = any(name in active for name in node.input)
        lookup = node.op_type == "Gather" and node.input[0] in tables
        ours = node.domain == "onnxfuse"
        reads_table = ours and any(name in tables for name in node.input)
        if (touches or lookup or reads_table) and node.op_type not in SHAPE_OPS:
            active.update(node.output)
        if ours or not touches or node.op_type in SHAPE_OPS:
            continue
        if family == "transformer" or (family == "cnn" and node.op_type in CNN_OPS):
            found.append(node)
    return found


def _run_cases(model: Model, original: Path, path: Path, scratch: Path, outcome: Outcome) -> None:
    job = {"original": str(original), "path": str(path), "cases": list(model.cases), "inputs": model.inputs}
    job_file, answer = scratch / "job.json", scratch / "answer.json"
    job_file.write_text(json.dumps(job | {"answer": str(answer)}))
    done = run_child([sys.executable, __file__, "--worker", str(job_file)], timeout=900)
    if done.code != 0 or not answer.exists():
        outcome.failures.append(f"run: exit {done.code}: {_tail(done.output)}")
        return
    found = json.loads(answer.read_text())
    outcome.failures.extend(found["failures"])
    outcome.worst = found["worst"]


def _worker(job_file: str) -> int:
    """Child: run the cases with this interpreter's onnxruntime, compare, look at the profile."""
    from onnxfuse.config import VerifyConfig
    from onnxfuse.errors import UsageError
    from onnxfuse.verify import ort
    from onnxfuse.verify.values import compare_results

    job = json.loads(Path(job_file).read_text())
    path, library = Path(job["path"]), library_of(Path(job["path"]))
    model = Model("", "", {}, (), {}, job["inputs"])
    dtypes = input_dtypes(Path(job["original"]))
    reference = ort.session(job["original"], threads=2)
    failures: list[str] = []
    worst: dict[str, float] = {}
    sessions = {}
    if library is None:
        failures.append("no library: nothing was compiled")
    for label, libraries in _ways(library):
        try:
            sessions[label] = ort.session(path, level=ort.Level.ALL, threads=2, libraries=libraries)
        except UsageError as error:
            failures.append(f"{label} library: {error.what}: {error.why}"[:500])
    for case in job["cases"]:
        fed = feeds(model, {k: tuple(v) for k, v in case.items()}, dtypes)
        expected = ort.run(reference, fed)
        for label, session in sessions.items():
            try:
                results = ort.run(session, fed)
            except ort.ORT_ERRORS as error:
                failures.append(f"{label} library at {case}: {error}"[:500])
                continue
            for out in compare_results(expected, results, VerifyConfig()):
                worst[label] = max(worst.get(label, 0.0), out.max_abs)
                if not out.ok:
                    failures.append(f"{label} library at {case}: {_mismatch(out)}")
    if "with" in sessions and library is not None:
        fed = feeds(model, {k: tuple(v) for k, v in job["cases"][0].items()}, dtypes)
        try:
            failures += _not_ours(path, ort.profile(path, fed, level=ort.Level.ALL, libraries=[library]))
        except ort.ORT_ERRORS as error:
            failures.append(f"profile: {error}"[:500])
    Path(job["answer"]).write_text(json.dumps({"failures": failures, "worst": worst}))
    return 0


def _ways(library: Path | None) -> list[tuple[str, list[Path]]]:
    return [("without", []), *([("with", [library])] if library is not None else [])]


def _mismatch(out: Any) -> str:
    if out.problem:
        return f"{out.name}: {out.problem}"
    first = f"first at {out.first.index}: {out.first.reference} became {out.first.candidate}" if out.first else ""
    return f"{out.name}: {out.mismatches}/{out.total} differ, max abs {out.max_abs:.3g} ({out.tolerance}); {first}"


def _not_ours(path: Path, ran: Sequence[tuple[str, str]]) -> list[str]:
    """Our nodes that onnxruntime did not run as our kernel (it inlined the body, say)."""
    kernels = set(ran)
    wanted = fused_nodes(onnx.load(path, load_external_data=False))
    missing = [f"{name} ({op})" for name, op in wanted.items() if (name, op) not in kernels]
    return [f"profile: {len(missing)} of {len(wanted)} nodes did not run our kernel: {missing[:5]}"] if missing else []


def _run_elsewhere(python: str, model: Model, original: Path, path: Path, scratch: Path, outcome: Outcome) -> None:
    """The first and the last case in another interpreter's onnxruntime, against the original there."""
    from onnxfuse.config import VerifyConfig
    from onnxfuse.verify.values import compare_results

    dtypes = input_dtypes(original)
    cases = model.cases if len(model.cases) < 2 else (model.cases[0], model.cases[-1])
    for case in cases:
        fed = feeds(model, case, dtypes)
        expected = _ortrun(python, original, None, fed, scratch)
        if isinstance(expected, str):
            outcome.notes.append(f"{python} refuses the original: {expected}")
            return
        for label, library in (("without", None), ("with", library_of(path))):
            results = _ortrun(python, path, library, fed, scratch)
            where = f"{python} {label} library at {dict(case)}"
            if isinstance(results, str):
                outcome.failures.append(f"{where}: {results}")
                continue
            bad = [o for o in compare_results(expected, results, VerifyConfig()) if not o.ok]
            outcome.failures.extend(f"{where}: {_mismatch(o)}" for o in bad)


def _ortrun(
    python: str, model: Path, library: Path | None, fed: Mapping[str, np.ndarray], scratch: Path
) -> dict[str, np.ndarray] | str:
    """Results by name, or what went wrong."""
    inputs, outputs = scratch / "feeds.npz", scratch / "results.npz"
    outputs.unlink(missing_ok=True)
    arrays: dict[str, Any] = {str(i): v for i, v in enumerate(fed.values())}
    np.savez(inputs, names=np.array(list(fed)), **arrays)
    script = Path(__file__).with_name("ortrun.py")
    done = run_child([python, str(script), str(model), str(library or "-"), str(inputs), str(outputs)])
    if done.code != 0:
        return f"exit {done.code}: {_tail(done.output)}"
    with np.load(outputs) as data:
        return {str(name): data[str(i)] for i, name in enumerate(data["names"])}


def _line(outcome: Outcome) -> str:
    state = "FAILED" if outcome.failures else "ok"
    return f"{outcome.name}: {state}, {outcome.groups} groups, {outcome.seconds:.1f} s"


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of all models and what was left in them."""
    header = ["model", "result", "groups", "fused ops", "left", "optimize s", "peak/size", "diff", "diff no lib"]
    rows = [
        [
            o.name,
            f"{len(o.failures)} failed" if o.failures else "ok",
            o.groups,
            o.fused_from,
            sum(o.left.values()),
            f"{o.seconds:.1f}",
            f"{o.peak_rss / o.size:.1f}" if o.size > LARGE else "-",
            f"{o.worst.get('with', float('nan')):.1e}",
            f"{o.worst.get('without', float('nan')):.1e}",
        ]
        for o in outcomes
    ]
    lines = [table(header, rows), "", "left to onnxruntime:"]
    lines += [f"  {o.name}: {', '.join(f'{k} x{n}' for k, n in o.left.items())}" for o in outcomes if o.left]
    lines += [f"  {o.name}: {note}" for o in outcomes for note in o.notes]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
