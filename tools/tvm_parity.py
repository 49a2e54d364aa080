"""Does `--fusion-mode tvm` give TVM's partition? Compare the two on the same atomic graphs.

    python tools/tvm_parity.py --python PYTHON [--random N] [--large N] [--seed FIRST] [MODEL.onnx...]
                               [--models-dir DIR] [--json FILE] [--keep DIR] [--verbose]

PYTHON is an interpreter that has apache-tvm 0.27 and onnx:

    python -m venv ENV && ENV/bin/pip install apache-tvm==0.27.0.post1 onnx

Compared are N seeded random models (tools/random_onnx.py; default 200), some large ones that reach the cap of 256 nodes
a group, the small models in models/, and the models of models/manifest.toml that are in --models-dir; or just the
models named. Each is written as its atomic graph (what `onnxfuse trace --export-stage atomize` writes; input shapes
fixed, weights as inputs, Sum of two as Add), which both sides then read. Where TVM refuses the whole model, the nodes
that stay with onnxruntime are cut out ("cut"). tools/tvm_relax.py says what TVM does with a model, tools/tvm_compare.py
what a difference is and what explains one.

Exit 2 when a difference is unexplained, 1 when TVM cannot be asked at all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import onnx
from fused import table
from modelzoo import SMALL, load_manifest, models_dir
from random_onnx import pointwise_model, random_model
from tvm_compare import Comparison, Theirs, compare, ours, tally

from onnxfuse.config import Config
from onnxfuse.emit.model import initializer
from onnxfuse.emit.plain import plain
from onnxfuse.errors import UsageError
from onnxfuse.frontend.atomize import Atomized, atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.read import Source, read
from onnxfuse.frontend.shapes import infer_types
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import LoopGraph, Opaque
from onnxfuse.pipeline import optimize
from onnxfuse.trace import Stopped, Trace

THERE = Path(__file__).with_name("tvm_relax.py")
WEIGHT = 64  # elements from which a floating-point constant becomes an input: its values cannot matter to a partition
SECONDS = 300.0  # for one model in TVM

# Shapes the small models are compared at (those of models/manifest.toml have them there).
SMALL_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "softmax": {"x": (37, 256)},
    "tiny_ocr": {"x": (1, 3, 64, 64)},
    "tiny_resnet": {"data": (2, 3, 32, 32)},
    "tiny_transformer": {"hidden": (2, 17, 32), "mask": (2, 17)},
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.keep or temporary)
        work.mkdir(parents=True, exist_ok=True)
        done: list[Comparison] = []
        paths: list[Path] = []
        for name, model, shapes in wanted(args):
            path = work / f"{name}.onnx"
            try:
                path.write_bytes(atomic(model, shapes).SerializeToString())
            except UsageError as error:
                done.append(Comparison(name, left_out=f"onnxfuse: {error}"))
                continue
            paths.append(path)
        answers = dict(zip(paths, ask(args.python, paths), strict=True))
        refused = [p for p in paths if not any(isinstance(k, int) for k in answers[p].get("values", {}).values())]
        cuts = {p: made for p in refused if (made := cut(p)) is not None}
        again = dict(zip(cuts, ask(args.python, list(cuts.values())), strict=True))
        for path in paths:
            if "error" in again.get(path, {"error": ""}):
                done.append(compare(path.stem, ours(loops(path)), answers[path]))
            else:
                done.append(compare(f"{path.stem} (cut)", ours(loops(cuts[path])), again[path]))
            if args.verbose or not path.stem.startswith("random_"):
                print(line(done[-1]), flush=True)
    print(report(done, args.verbose))
    print(f"{time.perf_counter() - start:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(c) for c in done], indent=1))
    if done and all(c.left_out for c in done):
        return 1
    return 2 if any(c.failed for c in done) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="models to compare instead of all")
    parser.add_argument("--python", required=True, help="interpreter with apache-tvm and onnx")
    parser.add_argument("--random", type=int, help="random models (default 200, or 0 when models are named)")
    parser.add_argument(
        "--large", type=int, help="pointwise models of 300 to 750 nodes (default one for 20 random ones)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first of them")
    parser.add_argument("--models-dir", help="where fetched models lie")
    parser.add_argument("--json", help="write everything to this file")
    parser.add_argument("--keep", help="write the atomic models to this directory")
    parser.add_argument("--verbose", action="store_true", help="every model, every difference")
    return parser.parse_args(argv)


Shapes = Mapping[str, tuple[int, ...]]


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, Path | onnx.ModelProto, Shapes]]:
    """Name, model and input shapes of everything to compare."""
    count = args.random if args.random is not None else 0 if args.models else 200
    for seed in range(args.seed, args.seed + count):
        yield f"random_{seed}", random_model(seed), {}
    for seed in range(args.seed, args.seed + (args.large if args.large is not None else count // 20)):
        yield f"random_large_{seed}", pointwise_model(seed, 300 + 50 * (seed % 10)), {}
    manifest = load_manifest()
    shapes: dict[str, Shapes] = {**SMALL_SHAPES, **{name: m.bench for name, m in manifest.items()}}
    files = [Path(m) for m in args.models]
    if not files:
        there = models_dir(args.models_dir)
        files = [*sorted(SMALL.glob("*.onnx")), *(p for n in manifest if (p := there / f"{n}.onnx").exists())]
    for path in files:
        yield path.stem, path, shapes.get(path.stem, {})


# --- One graph for both -----------------------------------------------------------------------------------------------


def atomic(model: Path | onnx.ModelProto, shapes: Shapes) -> onnx.ModelProto:
    """The model after atomize, with fixed shapes, and floating-point weights as inputs."""
    hook = Trace(stop_after="atomize")
    with contextlib.suppress(Stopped):
        optimize(fixed(model, shapes) if shapes else model, Config(), hook)
    source, atomized = hook.result("read"), hook.result("atomize")
    assert isinstance(source, Source)
    assert isinstance(atomized, Atomized)
    emission = plain(source, atomized.graph)
    for node in emission.model.graph.node:
        if node.op_type == "Sum" and len(node.input) == 2:
            node.op_type = "Add"  # the same; TVM's frontend makes stack and sum of any Sum
    out = onnx.ModelProto()
    out.CopyFrom(emission.model)
    inputs = {i.name for i in out.graph.input}
    for name, t in emission.tensors.items():
        if name not in inputs and t.dtype.is_floating_point() and t.size >= WEIGHT:
            dims = [int(d) for d in t.shape.numpy()]
            out.graph.input.append(onnx.helper.make_tensor_value_info(name, int(t.dtype), dims))
        else:
            out.graph.initializer.append(initializer(name, t))
    return out


def fixed(model: Path | onnx.ModelProto, shapes: Shapes) -> onnx.ModelProto:
    """A copy with the shapes of its inputs written in (also where one symbol stands for two sizes)."""
    out = onnx.ModelProto()
    out.CopyFrom(onnx.load(model) if isinstance(model, Path) else model)
    for info in out.graph.input:
        dims = info.type.tensor_type.shape.dim
        for dim, size in zip(dims, shapes.get(info.name, ()), strict=False):
            dim.dim_value = size
    return out


def loops(path: Path) -> LoopGraph:
    """Our loops of a model that is atomic already: nothing is simplified."""
    source = read(path)
    return lower(atomize(infer_types(source.graph, source.hints)))


def cut(path: Path) -> Path | None:
    """The model without the nodes that stay with onnxruntime: what they read is an output, what they make an input.

    No partition changes by that: nothing starts a fusion over a path that meets an opaque node, nor one that ends at an
    output. None when there is no such node, nothing else, or a type is not known.
    """
    model, graph = onnx.load(path), loops(path)
    gone = [item.node for item in graph.items if isinstance(item, Opaque)]
    made = {v.name: v for n in gone for v in n.results}
    left = [n for n in model.graph.node if not made.keys() & set(n.output)]
    if not gone or not left:
        return None
    own = {o for n in left for o in n.output}
    read = {i for n in left for i in n.input}
    outs = {v.name: v for v in graph.outputs} | {v.name: v for n in gone for v in n.reads}
    new_in = [v for name, v in made.items() if name in read]
    new_out = [v for name, v in outs.items() if name in own]
    if any(v.type is None for v in (*new_in, *new_out)):
        return None
    model.graph.ClearField("node")
    model.graph.node.extend(left)
    model.graph.input.extend(_info(v) for v in new_in)
    model.graph.ClearField("output")
    model.graph.output.extend(_info(v) for v in new_out)
    unused = [i for i in model.graph.input if i.name not in read]
    for info in unused:
        model.graph.input.remove(info)
    out = path.with_name(f"{path.stem}_cut.onnx")
    out.write_bytes(model.SerializeToString())
    return out


def _info(v: Value) -> onnx.ValueInfoProto:
    """Sizes that are not numbers get a name each."""
    shape = [d if isinstance(d, int) else f"{v.name}_{k}" for k, d in enumerate(v.tensor.shape)]
    return onnx.helper.make_tensor_value_info(v.name, v.tensor.dtype.onnx, shape)


# --- TVM --------------------------------------------------------------------------------------------------------------


def ask(python: str, paths: Sequence[Path]) -> Iterator[Theirs]:
    """TVM's answer for every model, in order. A process that dies is the answer for the model it died with."""
    left = list(paths)
    while left:
        before = len(left)
        with subprocess.Popen(
            [python, str(THERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stderr is not None
            while left:
                try:
                    child.stdin.write(f"{left[0]}\n")
                    child.stdin.flush()
                    answer = child.stdout.readline()
                except BrokenPipeError:
                    answer = ""
                if not answer:
                    break
                left.pop(0)
                yield json.loads(answer)
            child.stdin.close()
            said = child.stderr.read().strip().splitlines() if left else []
        if left and len(left) <= before:
            yield {"error": f"TVM died: {said[-1] if said else 'no message'}"}
            left.pop(0)


# --- Report -----------------------------------------------------------------------------------------------------------


def verdict(c: Comparison) -> str:
    if c.left_out:
        return "not compared"
    if c.failed:
        return "DIFFERENT"
    return "equal" if c.equal else "explained"


def line(c: Comparison) -> str:
    if c.left_out:
        return f"{c.name}: not compared: {c.left_out}"
    explained, open_ = len(c.explained), len(c.unexplained)
    return (
        f"{c.name}: {c.nodes} nodes, {c.compared} compared, groups {c.ours}/{c.theirs}, {verdict(c)}, "
        f"{explained} explained, {open_} unexplained"
    )


def report(done: Sequence[Comparison], verbose: bool) -> str:
    """Table of the models (random ones as one row, those that fail on their own), causes, differences."""
    lone = [c for c in done if not c.name.startswith("random_") or c.failed or c.left_out or verbose]
    rows = [row(c) for c in lone]
    drawn = [c for c in done if c.name.startswith("random_")]
    if drawn:
        rows.append(total(f"{len(drawn)} random", drawn))
    head = ("model", "nodes", "compared", "ours", "TVM", "verdict", "replay", "explained", "unexplained")
    text = [table(head, rows)]
    for c in done:
        if c.left_out:
            text.append(f"{c.name}: not compared: {c.left_out}")
        text += [f"{c.name}: FAULT {f}" for f in c.faults]
        shown = c.differences if verbose else c.unexplained
        for d in shown:
            text.append(f"{c.name}: {'explained' if d.explained else 'UNEXPLAINED'}: {d}")
            text += [f"    {cause}" for cause in d.causes]
    reasons = tally(cause for c in done for d in c.differences for cause in d.causes)
    text += ["", "Reasons of differences:", *(f"{n:6}  {t}" for t, n in reasons.most_common())] if reasons else []
    others = tally(cause for c in done for cause in c.causes) - reasons
    text += ["", "Beside no difference:", *(f"{n:6}  {t}" for t, n in others.most_common())] if others else []
    return "\n".join(text)


def row(c: Comparison) -> tuple[str, ...]:
    numbers = (c.nodes, c.compared, c.ours, c.theirs)
    replayed = "-" if c.left_out else "yes" if c.replayed else "NO"
    counts = (str(len(c.explained)), str(len(c.unexplained)))
    return (c.name, *(str(n) for n in numbers), verdict(c), replayed, *counts)


def total(name: str, some: Sequence[Comparison]) -> tuple[str, ...]:
    sums = (sum(c.nodes for c in some), sum(c.compared for c in some), sum(c.ours for c in some))
    verdicts = [verdict(c) for c in some]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    asked = [c for c in some if not c.left_out]
    return (
        name,
        *(str(n) for n in sums),
        str(sum(c.theirs for c in some)),
        counted,
        f"{sum(c.replayed for c in asked)} of {len(asked)}",
        str(sum(len(c.explained) for c in some)),
        str(sum(len(c.unexplained) for c in some)),
    )


if __name__ == "__main__":
    sys.exit(main())
