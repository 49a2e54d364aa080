"""Write docs/ops.md from the op table.

python tools/gendocs.py            write it
python tools/gendocs.py --check    exit 1 when it is stale
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onnx import defs

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.op import Family, Op
from onnxfuse.ops import OPS, entries

PATH = Path(__file__).parent.parent / "docs" / "ops.md"
GROUPS = {
    "floats": (DType.F32, DType.F64, DType.F16, DType.BF16),
    "ints": (DType.I8, DType.I16, DType.I32, DType.I64, DType.U8, DType.U16, DType.U32, DType.U64),
    "bool": (DType.BOOL,),
}

HEADER = """\
# Operators

Written by `tools/gendocs.py` from the op table (`onnxfuse/ops/`); do not edit. `onnxfuse ops` prints the same table,
`onnxfuse ops NAME` one operator.

What is not in the table, operators of other domains, and opsets below 7 stay with onnxruntime, unchanged; only
operators that are loops by themselves (pointwise, reductions, views, products, windows) and have not changed since are
compiled there, too.

* **opsets**: the versions of the default domain the entry stands for.
* **element types**: of the first input, as far as kernels compute them; other types pass through.
* **agrees**: with onnxruntime at `ORT_DISABLE_ALL`, tested on generated samples (`tests/ops`). *exact*: bit for bit (of
  +0 and -0 some operators of onnxruntime return either). *n ulp*: units in the last place, or the given share of an
  epsilon of 1 where results saturate. *sums*: the order of summation is free; the tolerances of `docs/numerics.md`.
* NaN: `Relu`, `Sign`, `Abs`, `Neg`, `Max`, `Min` and `Clip` keep it. `ReduceMax`, `ReduceMin`, `MaxPool` and
  `GlobalMaxPool` always return it; onnxruntime's kernels do so or not by its place in the window.
* Integer division by zero gives 0 and MIN / -1 gives MIN, where onnxruntime kills the process.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args(argv)
    if not args.check:
        PATH.write_text(text(), encoding="utf-8")
        return 0
    fresh = PATH.exists() and PATH.read_text(encoding="utf-8") == text()
    if not fresh:
        print(f"{PATH} is stale: run python tools/gendocs.py", file=sys.stderr)
    return 0 if fresh else 1


def text() -> str:
    compiled = [op for op in entries() if op.family is not Family.OPAQUE]
    kept = [op for op in entries() if op.family is Family.OPAQUE]
    lines = [HEADER, f"## Compiled ({len({op.name for op in compiled})})\n"]
    lines += _table(("operator", "opsets", "family", "element types", "agrees", "meaning"), map(_compiled, compiled))
    lines += [f"\n## Left to onnxruntime ({len({op.name for op in kept})})\n"]
    lines += ["*shape known*: shapes behind the operator stay expressions over the inputs' dimensions.\n"]
    lines += _table(("operator", "opsets", "why", ""), map(_kept, kept))
    return "\n".join(lines) + "\n"


def _table(columns: tuple[str, ...], rows: Iterable[Sequence[str]]) -> list[str]:
    out = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return out + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _compiled(op: Op) -> tuple[str, ...]:
    return f"`{op}`", _opsets(op), str(op.family), _types(op), _agrees(op), op.doc.partition("\n")[0]


def _kept(op: Op) -> tuple[str, ...]:
    return f"`{op}`", _opsets(op), op.reason, "" if op.fn is None else "shape known"


def _opsets(op: Op) -> str:
    later = [e.since for e in OPS[op.domain, op.name] if e.since > op.since]
    if op.domain:
        return f"of {op.domain}"
    first = max(op.since, 7, _schemas(op)[0].since_version)
    if not later:
        return f"{first}+"
    return f"{first}-{min(later) - 1}" if min(later) - 1 > first else str(first)


def _schemas(op: Op) -> list[defs.OpSchema]:
    found = [s for s in defs.get_all_schemas_with_history() if (s.domain, s.name) == (op.domain, op.name)]
    return sorted(found, key=lambda s: s.since_version)


def _types(op: Op) -> str:
    """Types the schema allows for the first input, of those the entry covers."""
    schema = _schemas(op)[-1]
    first = schema.inputs[0].types
    names = {DType.from_onnx(k): f"tensor({defs_name})" for k, defs_name in _NAMES.items()}
    allowed = {d for d, name in names.items() if d is not None and d.computable and name in first}
    allowed &= op.dtypes or allowed
    parts = []
    for group, members in GROUPS.items():
        if set(members) <= allowed:
            parts.append(group)
        else:
            parts += [str(d) for d in members if d in allowed]
    return ", ".join(parts)


_NAMES = {
    1: "float", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "double", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip


def _agrees(op: Op) -> str:
    if op.tol.kind == "ulp":
        return f"{op.tol.ulp} ulp" + (f" or {op.tol.floor:g} eps" if op.tol.floor else "")
    return "sums" if op.tol.kind == "sum" else "exact"


if __name__ == "__main__":
    sys.exit(main())
