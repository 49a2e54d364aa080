"""Write docs/coverage.md: which operator is compiled for which element type, and otherwise the code of the reason.

python tools/op_coverage.py            write it
python tools/op_coverage.py --check    exit 1 when it is stale

Each operator of the newest opset is tried on the cases onnx.backend.test has for it, with axes, shapes and the like
frozen into initializers, once per element type its schema allows for the first input: read, prepared, atomized and
lowered, not run.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import defs, numpy_helper
from suites import cases, freeze, model_of

from onnxfuse.config import PrepareConfig
from onnxfuse.errors import OnnxfuseError
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.read import read
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.loops import Compute, Opaque
from onnxfuse.ir.op import Family
from onnxfuse.ops import lookup
from onnxfuse.verify.evaluate import evaluate

PATH = Path(__file__).parent.parent / "docs" / "coverage.md"
TRIES = 8  # cases per operator and type: compiled if one is
COLUMNS = ("f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool")
YES = "yes"
PLAIN = 13  # opset of operators whose newest version is older
_NAMES = {
    "f32": "float", "f16": "float16", "bf16": "bfloat16", "f64": "double", "bool": "bool",
    **{f"{s}{n}": f"{k}int{n}" for s, k in (("i", ""), ("u", "u")) for n in (8, 16, 32, 64)},
}  # fmt: skip

HEADER = """\
# What is compiled, by operator and element type

Written by `tools/op_coverage.py` from the cases of onnx.backend.test; do not edit. Newest opset; axes, shapes and other
settings constant, as exporters write them.

* **yes**: at least one case runs in a kernel of ours. Others may be left for an attribute: `explain` says which.
* a code: the node stays with onnxruntime, unchanged, for this reason (`onnxfuse rules`, docs/rules.md).
* empty: the operator does not have this element type as its first input.

Strings, complex numbers, 8-bit and 4-bit floats and 2-bit and 4-bit integers always pass through.

## How much of onnx.backend.test runs compiled

`python tools/conformance.py --suite node --mode all`: the cases as they are, with axes, starts, pads and sizes fed at
run time, in all four fusion modes, without and with the library. Onnxruntime 1.32 runs 1698 of 1884 and passes 1676;
none fails or differs after optimizing, in any mode. Of those that could run compiled 1409 of 1546 do in mode full
(91.1 %); without element types that only pass through (8-bit floats) 1409 of 1474 (95.6 %). Not counted are 37 cases
whose shape depends on data, 29 about strings, 23 about sequences and optionals, 6 random, 6 of control flow, and 51
that leave nothing to compute (tools/inherent.py). Onnxruntime 1.17.3 (`--ort-python PYTHON`) runs 785 of the same 1884
(newer operator sets are beyond it) and passes 773; none fails or differs in any mode, 684 of 707 run compiled (96.7 %).
The suites simple, light, pytorch-converted and pytorch-operator (149 cases, of which 1.32 runs 109
and 1.17.3 107) pass in all modes with both versions.

The other 65 stay with onnxruntime: quantised operators whose bits are onnxruntime's (17); several steps of GRU, LSTM
and RNN (11); transforms along an axis or of frames given at run time (7); the rest are sorting, deformed,
antialiased and training forms without a loop definition (TopK, DeformConv, MaxUnpool, TensorScatter ...).

## By operator and element type
"""

Models = Mapping[str, list[onnx.ModelProto]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args(argv)
    made = text(rows(names(), models()))
    if not args.check:
        PATH.write_text(made, encoding="utf-8")
        return 0
    fresh = PATH.exists() and PATH.read_text(encoding="utf-8") == made
    if not fresh:
        print(f"{PATH} is stale: run python tools/op_coverage.py", file=sys.stderr)
    return 0 if fresh else 1


def names() -> list[str]:
    """Every operator of the default domain that is not deprecated; Constant is none."""
    found = (s for s in defs.get_all_schemas() if s.domain == "" and not s.deprecated)
    return sorted(s.name for s in found if s.name != "Constant")


def models(wanted: Iterable[str] = ()) -> Models:
    """Frozen single-node cases by operator."""
    found: dict[str, list[onnx.ModelProto]] = {}
    only = set(wanted)
    for case in cases(("node",)):
        nodes = model_of(case).graph.node
        if len(nodes) != 1 or nodes[0].domain or (only and nodes[0].op_type not in only):
            continue
        found.setdefault(nodes[0].op_type, []).append(model_of(freeze(case)))
    return found


def rows(wanted: Iterable[str], found: Models) -> Iterator[tuple[str, ...]]:
    """One row of the table per operator."""
    for name in wanted:
        schema = defs.get_schema(name)
        allowed = schema.inputs[0].types if schema.inputs else ()
        tried = found.get(name, [])
        cells = [status(name, DType(c), tried) if f"tensor({_NAMES[c]})" in allowed else "" for c in COLUMNS]
        yield (f"`{name}`", *cells, "" if any(cells) else _reason(name))


def text(table: Iterable[tuple[str, ...]]) -> str:
    """The page."""
    lines = ["| " + " | ".join(("operator", *COLUMNS, "otherwise")) + " |", "|" + "---|" * (len(COLUMNS) + 2)]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    return HEADER + "\n" + "\n".join(lines) + "\n"


def _reason(name: str) -> str:
    op = lookup("", name, defs.onnx_opset_version())
    if op is not None and op.family is not Family.OPAQUE:
        return "compiled; onnx has no case of the node alone"
    return "UN_OPAQUE" if op is None or not op.reason else f"UN_OPAQUE: {op.reason}"


def status(name: str, dtype: DType, tried: list[onnx.ModelProto]) -> str:
    """`yes`, a code, or nothing where no case can be written with the type."""
    code = ""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # casts of samples overflow
        for model in tried[:TRIES]:
            made = retyped(model, dtype)
            found = "" if made is None else verdict(made)
            if found == YES:
                return YES
            code = code or found
    return code


def retyped(model: onnx.ModelProto, dtype: DType) -> onnx.ModelProto | None:
    """The model with the first input, and what must have its type, of another element type; None: that is invalid."""
    node = model.graph.node[0]
    formals = defs.get_schema(node.op_type).inputs
    kind = formals[0].type_str
    of = {n: formals[min(k, len(formals) - 1)].type_str for k, n in enumerate(node.input) if n}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for info in made.graph.input:
        if of.get(info.name) == kind:
            if not info.type.HasField("tensor_type"):
                return None
            info.type.tensor_type.elem_type = dtype.onnx
    for k, weight in enumerate(made.graph.initializer):
        if of.get(weight.name) == kind:
            array = numpy_helper.to_array(weight)
            made.graph.initializer[k].CopyFrom(numpy_helper.from_array(array.astype(dtype.numpy), weight.name))
    for info in made.graph.output:
        info.ClearField("type")
    for entry in made.opset_import:  # cases name the version of the schema, which may be older than what we compile
        entry.version = max(entry.version, PLAIN)
    try:
        made = onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True)
        onnx.checker.check_model(made)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
        return None
    return made


def verdict(model: onnx.ModelProto) -> str:
    """What becomes of the node."""
    try:
        source = read(model)
        graph = source.graph
        evaluated = prepare(
            graph, PrepareConfig(), lambda n, arrays: evaluate(n, arrays, graph.opset, graph.imports), source.hints
        )
        items = lower(atomize(evaluated.typed)).items
    except OnnxfuseError as error:
        return error.code
    codes = [i.refusal.code for i in items if isinstance(i, Opaque)]
    if any(isinstance(i, Compute) for i in items):
        return YES
    return codes[0] if codes else YES  # nothing is left of the node: it was simplified away


if __name__ == "__main__":
    sys.exit(main())
