"""How many kernels a model becomes, of which kinds, and how many bytes move between them: counted, not timed.

    python tools/kernel_counts.py [MODEL.onnx...] [--models-dir DIR] [--json FILE]

Each model is planned as `onnxfuse inspect --no-compile` does; default are the models of models/manifest.toml that are
in --models-dir. Per model: nodes in kernels, kernels, kernels around a product or window, row programs without one,
kernels of views alone (a copy between two others), operators torn over several kernels (a Softmax or LayerNorm whose
steps do not run together), halves of attention (a softmax with one product, or none between two), activations (GELU,
hard-swish, clip) without a product before them, nodes that stay, and MiB moved between kernels before and after.
LAYERS, NO_COPIES and EPILOGUES say what the models must keep to; exit 2 when one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fused import CLI, run_child, table
from modelzoo import load_manifest, models_dir

VIEWS = frozenset({
    "Concat", "Expand", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
SOFTMAX = frozenset({"ReduceMax", "Sub", "Exp", "ReduceSum", "Div"})

# Layers, kernels a layer at most, and what the model has before and behind its layers. BERT: one layer norm a layer
# runs with a product before it; ViT: both stand before a product. ResNet: four shortcuts have a convolution.
LAYERS: dict[str, tuple[int, int, int]] = {
    "bert_base": (12, 6, 4),
    "bert_base_dynamic": (12, 6, 7),
    "vit_small": (12, 7, 3),
    "resnet50": (16, 3, 9),
}
# The activations of these run where their product or window stores.
EPILOGUES = frozenset({
    "bert_base", "bert_base_dynamic", "ch_PP-OCRv4_det", "ch_PP-OCRv4_rec", "ch_ppocr_mobile_v2.0_cls", "convnext_tiny",
    "mobilenet_v2", "vit_small",
})  # fmt: skip
ACTIVATIONS = frozenset({"Clip", "Erf", "Gelu", "HardSigmoid", "HardSwish"})
NO_COPIES = frozenset({"segformer_b0", "convnext_tiny", "bert_base", "vit_small"})


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted for one model."""

    name: str
    nodes: int
    kernels: int
    products: int
    rows: int
    views: int
    torn: int
    halves: int
    bare: int
    left: int
    before: int
    after: int


def count(name: str, found: dict[str, Any]) -> Counts:
    """Counts from `inspect --json`."""
    groups = found["groups"]
    where: dict[str, set[str]] = {}
    ops: list[Counter[str]] = []
    for g in groups:
        ops.append(Counter(m["op"] for m in g["members"]))
        for m in g["members"]:
            for origin in m["origin"]:
                where.setdefault(origin, set()).add(g["name"])
    softmax = [o for o in ops if o.keys() >= SOFTMAX and sum(o[p] for p in PRODUCTS) == 1]
    return Counts(
        name,
        len(where),
        len(groups),
        sum(g["kind"] == "anchor" for g in groups),
        sum(g["kind"] == "reduce" for g in groups),
        sum(o.keys() <= VIEWS for o in ops),
        sum(len(at) > 1 for at in where.values()),
        len(softmax),
        sum(bool(o.keys() & ACTIVATIONS) and not o.keys() & PRODUCTS for o in ops),
        len(found["left"]),
        found["bytes"]["before"],
        found["bytes"]["after"],
    )


def faults(c: Counts) -> list[str]:
    """What a model does not keep to."""
    out = []
    if c.name in LAYERS:
        layers, each, others = LAYERS[c.name]
        if c.kernels > layers * each + others:
            out.append(f"{c.kernels} kernels > {layers} layers of {each} and {others}")
    if c.name in NO_COPIES and c.views:
        out.append(f"{c.views} kernels of views alone")
    if c.name in LAYERS and c.torn:
        out.append(f"{c.torn} operators torn over several kernels")
    if c.name in EPILOGUES and c.bare:
        out.append(f"{c.bare} activations that are no epilogue")
    return out


def inspect(path: Path) -> dict[str, Any]:
    """`onnxfuse inspect --no-compile --json`."""
    done = run_child([*CLI, "inspect", str(path), "--no-compile", "--json"])
    if done.code != 0:
        raise SystemExit(f"{path}: {done.output}")
    found: dict[str, Any] = json.loads(done.output[done.output.index("{") :])
    return found


def main() -> int:
    """Print the table; 2 when a model does not keep to its limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--models-dir")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    there = models_dir(args.models_dir)
    paths = args.models or [p for n in load_manifest() if (p := there / f"{n}.onnx").exists()]
    counts = [count(p.stem, inspect(p)) for p in paths]
    heads = [
        "model",
        "nodes",
        "kernels",
        "product",
        "rows",
        "views",
        "torn",
        "halves",
        "bare",
        "left",
        "MiB before",
        "after",
    ]
    lines = []
    for c in counts:
        numbers = (c.nodes, c.kernels, c.products, c.rows, c.views, c.torn, c.halves, c.bare, c.left)
        lines.append([c.name, *map(str, numbers), f"{c.before / 2**20:.1f}", f"{c.after / 2**20:.1f}"])
    print(table(heads, lines))
    if args.json:
        args.json.write_text(json.dumps([asdict(c) for c in counts], indent=2))
    wrong = {c.name: f for c in counts if (f := faults(c))}
    for name, why in wrong.items():
        print(f"{name}: {'; '.join(why)}")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
