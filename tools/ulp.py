"""Measure the error of every maths function over f32 bit patterns: what docs/numerics.md holds.

    python tools/ulp.py [NAME...] [--step N] [--update]

Every N-th of the 2**32 bit patterns, in lanes of the widest target this machine runs; `--step 1` is exhaustive (a
minute or two a function). The truth is the same function in f64. Exits 1 if a function is worse than it states
(codegen/vecmath/table.py, MAX_ULP). `--update` writes the table into docs/numerics.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onnxfuse.codegen.object import host_features
from onnxfuse.codegen.vecmath.table import MAX_ULP, UNARY
from onnxfuse.ir.dtypes import DType
from onnxfuse.target import by_name
from tests.codegen.test_vecmath import compiled, reference

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- ulp:begin -->", "<!-- ulp:end -->"
CHUNK = 1 << 22  # patterns at once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="functions (default: all of one argument)")
    parser.add_argument("--step", type=int, default=1021, help="every so many bit patterns (default 1021; 1: all)")
    parser.add_argument("--update", action="store_true", help="write the table into docs/numerics.md")
    args = parser.parse_args()
    rows = []
    for name in args.names or [*UNARY, "sigmoid"]:
        error, at = worst(name, args.step)
        rows.append((name, MAX_ULP[name][0], error, at))
        print(f"{name:8} stated {MAX_ULP[name][0]:4.1f}  measured {error:5.3f} at {at!r}", flush=True)
    if args.update:
        update(rows, args.step)
    return int(any(error > stated for _, stated, error, _ in rows))


def worst(name: str, step: int) -> tuple[float, float]:
    """Largest error in units in the last place, and where."""
    scrap, lanes = compiled(by_name("native", host_features()), DType.F32)
    most, place = 0.0, 0.0
    for start in range(0, 1 << 32, CHUNK * step):
        bits = np.arange(start, min(start + CHUNK * step, 1 << 32), step, dtype=np.uint64)
        x = np.resize(bits.astype(np.uint32).view(np.float32), -(-len(bits) // 16) * 16)
        with np.errstate(all="ignore"):  # signalling NaNs among the patterns
            got = scrap(f"{name}.{lanes}", [x], DType.F32)
            error = errors(got, reference(name, x), name)
        k = int(error.argmax())
        if error[k] > most:
            most, place = float(error[k]), float(x[k])
    return most, place


def errors(got: np.ndarray, exact: np.ndarray, name: str) -> np.ndarray:
    """In units in the last place of the true value; where that is no finite f32, the result has to be it exactly."""
    want = exact.astype(np.float32)
    special = ~np.isfinite(want) | ~np.isfinite(got)
    wrong = special & ~((np.isnan(got) & np.isnan(want)) | (got == want))
    if wrong.any():
        raise SystemExit(f"{name}: {got[wrong][0]} instead of {want[wrong][0]}")
    low = np.abs(exact)
    unit = np.ldexp(1.0, np.maximum(np.frexp(low)[1] - 1, -126) - 23)
    return np.where(special, 0.0, np.abs(got.astype(np.float64) - exact) / unit)


def update(rows: list[tuple[str, float, float, float]], step: int) -> None:
    path = ROOT / "docs" / "numerics.md"
    what = "all bit patterns" if step == 1 else f"every {step}th bit pattern ({(1 << 32) // step:,})"
    lines = ["| function | stated | measured | at |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {stated} | {error:.2f} | {at:.9g} |" for name, stated, error, at in rows]
    body = f"{BEGIN}\n`python tools/ulp.py --step {step} --update`: f32, {what}.\n\n" + "\n".join(lines) + f"\n{END}"
    text = path.read_text()
    if BEGIN not in text:
        raise SystemExit(f"{path} has no {BEGIN} ... {END}")
    path.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: body, text, flags=re.DOTALL))


if __name__ == "__main__":
    sys.exit(main())
