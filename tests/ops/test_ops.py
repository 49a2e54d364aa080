"""Every entry of the op table against onnxruntime: types, shapes, values, with static and with run-time dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest

from onnxfuse.ir.op import Family, Op
from onnxfuse.ops import OPS, entries
from tests.ops.harness import NEWEST, Ours, Sample, by_onnxruntime, by_table, differing, onnx_shapes
from tests.ops.samples import samples

# onnx counts windows that start in the padding after the end (ceil_mode); onnxruntime and the later versions do not.
ONNX_SHAPES_WRONG = (
    {("AveragePool", v) for v in (10, 11, 19)} | {("MaxPool", v) for v in (10, 11, 12)} | {("LpPool", 18)}
)
CRASHES = (TypeError, ValueError, AssertionError, LookupError, ArithmeticError, AttributeError)
TESTED = [op for op in entries() if op.fn is not None]


def opsets(op: Op) -> list[int]:
    """Where the entry is tried: at each schema version it stands for, and the newest opset it is valid in."""
    later = [e.since for e in OPS[op.domain, op.name] if e.since > op.since]
    first, last = max(op.since, 7), min(later) - 1 if later else NEWEST
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op.name and s.domain == op.domain]
    last = min([last, *(s.since_version - 1 for s in schemas if s.deprecated)])
    history = [s.since_version for s in schemas]
    listed = sorted({first, *(v for v in history if first < v <= last)})
    return listed if last >= first else []


# Entries no sample of which runs in onnxruntime, and why.
NOT_IN_ONNXRUNTIME = {"Bernoulli": "no kernel; a random function"}
# Samples of compiled entries that are declined on purpose even with static shapes: part of the reason.
DECLINED = {
    "DFT": ["half the"],
    "Det": ["of 4 x 4"],
    "Einsum": ["of 3 operands"],
    "MaxPool": ["Indices output"],
    "Range": ["depends on data", "Range on f32", "Range on f64"],
    "Resize": ["antialias"],
    "Dropout": ["mask output"],
    "Gemm": ["beta=0"],
    "GlobalLpPool": ["p=3"],
    "LpNormalization": ["before opset 11"],
}


@pytest.mark.parametrize("op", TESTED, ids=lambda op: f"{op.name}-{op.since}")
def test_the_table_agrees_with_onnxruntime(op):
    problems = list(compare(op))
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems[:25])


def compare(op: Op) -> Iterator[str]:
    """What is wrong with an entry, as text. Everything at the newest opset, static shapes of one dtype before."""
    ran = 0
    versions = opsets(op)
    for opset in versions:
        newest = opset == versions[-1]
        for sample in samples(op, opset):
            if sample.may_decline and not newest:
                continue
            want = by_onnxruntime(op, sample, opset)
            if not isinstance(want, str):
                ran += 1
                wholly = newest and not sample.may_decline
                yield from (f"@{opset} {sample}: {p}" for p in check(op, sample, opset, want, wholly))
            elif not sample.may_decline:
                yield f"@{opset} {sample}: onnxruntime declines: {want[:300]}"
    if versions and not ran and op.name not in NOT_IN_ONNXRUNTIME:
        yield "onnxruntime ran no sample"


def check(op: Op, sample: Sample, opset: int, want: list[np.ndarray], wholly: bool) -> Iterator[str]:
    for dims in ("static", "shared", "fresh", "known") if wholly else ("static",):
        if dims == "known" and any(a is not None and a.dtype.kind not in "iub" for a in sample.inputs):
            continue
        try:
            ours = by_table(op, sample, opset, dims)
        except CRASHES as e:
            yield f"[{dims}] {type(e).__name__}: {e}"
            continue
        yield from (f"[{dims}] {p}" for p in disagreements(op, ours, want))
        if dims == "static" and not sample.may_decline and unexpected(op, ours):
            yield f"declined: {ours.refusal}"
        if dims == "static":
            shapes = onnx_shapes(op, sample, opset)
            if (op.name, opset) not in ONNX_SHAPES_WRONG:
                yield from (
                    f"onnx says {a}, table {b}" for a, b in zip(shapes, ours.static, strict=True) if clash(a, b)
                )


def unexpected(op: Op, ours: Ours) -> bool:
    refused = ours.refusal is not None and op.family is not Family.OPAQUE
    return refused and not any(reason in str(ours.refusal) for reason in DECLINED.get(op.name, []))


def clash(a, b) -> bool:
    if a is None or b is None:
        return False
    return len(a) != len(b) or any(x is not None and y is not None and x != y for x, y in zip(a, b, strict=True))


def disagreements(op: Op, ours: Ours, want: list[np.ndarray]):
    for k, w in enumerate(want):
        if ours.dtypes[k] is not None and ours.dtypes[k].numpy != w.dtype:
            yield f"output {k}: dtype {ours.dtypes[k]}, onnxruntime {w.dtype}"
        elif ours.shapes[k] is not None and ours.shapes[k] != w.shape:
            yield f"output {k}: shape {ours.shapes[k]}, onnxruntime {w.shape}"
        elif ours.values is not None and ours.values[k].shape != w.shape:
            yield f"output {k}: value of shape {ours.values[k].shape}, onnxruntime {w.shape}"
        elif ours.values is not None:
            yield from list(differing(w, ours.values[k], op))[:3]
