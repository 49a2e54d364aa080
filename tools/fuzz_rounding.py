"""Is a difference rounding? onnxruntime is asked: with noise on the original, and with every f16 value rounded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from fuzz_graph import limits
from fuzz_parts import alone, single

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.frontend.protos import captured_names
from onnxfuse.ir.op import Family
from onnxfuse.ops.table import lookup
from onnxfuse.verify import ort
from onnxfuse.verify.values import compare_results

Feeds = Mapping[str, np.ndarray]
NOISE, RUNS, REACH = 6.0, 10, 6.0  # eps per inexact op; noisy runs; times their spread that is forgiven
EXTREMES = frozenset({"ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "ArgMax", "ArgMin", "Hardmax"})
# Between this and 0 onnxruntime's result may be 0.
SATURATES = {"Sigmoid": 2e-8, "Tanh": 1e-37, "Softplus": 1e-16, "Mish": -4e-15}


def excused(
    model: onnx.ModelProto,
    feeds: Feeds,
    output: str,
    expected: Mapping[str, ort.Result],
    got: Mapping[str, ort.Result],
    level: str,
) -> bool:
    """Noise on the original moves this output as far as ours is away (or onnxruntime disagrees with itself)."""
    name = next((n for n in expected if output == n or output.startswith((f"{n}[", f"{n}{{"))), output)
    want, ours = expected[name], got[name]
    if not isinstance(want, np.ndarray) or not isinstance(ours, np.ndarray) or want.dtype != ours.dtype:
        return False
    part = alone(model, [name])
    fed = {i.name: feeds[i.name] for i in part.graph.input if i.name in feeds}
    others: list[np.ndarray] = []
    if level != "disable":
        with contextlib.suppress(UsageError, *ort.ORT_ERRORS):
            others += [np.asarray(ort.run(ort.session(part, level=ort.Level(level)), fed)[name])]
    with contextlib.suppress(UsageError, *ort.ORT_ERRORS, KeyError):
        others += list(rounded_run(part, fed, name))
        others += list(noisy_runs(part, fed, name))
    if want.shape != ours.shape:  # of indices of what is not 0, for example
        return any(o.shape != want.shape for o in others)
    return bool(others) and explained(want, ours, others)


def explained(want: np.ndarray, ours: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    """Every element of `ours` is where the others are, or within REACH times their spread."""
    report = compare_results({"o": want}, {"o": ours}, VerifyConfig())[0]
    if report.ok:
        return True
    fitting = [np.asarray(o) for o in others if np.asarray(o).shape == want.shape]
    if len(fitting) < len(others):
        return True  # rounding decides even the shape
    every = np.stack([want.astype(np.float64), *(o.astype(np.float64) for o in fitting)])
    a, b = want.astype(np.float64), ours.astype(np.float64)
    with np.errstate(all="ignore"):
        unsettled = (np.isfinite(every).any(axis=0) & ~np.isfinite(every).all(axis=0)) | (
            np.isnan(every).any(axis=0) & ~np.isnan(every).all(axis=0)
        )
        spread = np.max(every, axis=0) - np.min(every, axis=0)
        if want.dtype.kind in "iub":
            near = spread > 0
        else:
            scale = 1e-5 * float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0))
            near = np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= REACH * spread + 1e-4 * np.abs(a) + scale)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
    return bool((same | unsettled | near).all())


def rounded_run(model: onnx.ModelProto, feeds: Feeds, output: str) -> Iterator[np.ndarray]:
    """What the output becomes node by node: in a whole graph onnxruntime keeps f16 values in f32 between two nodes."""
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer} | dict(feeds)
    pending = list(model.graph.node)
    while pending:
        ready = [n for n in pending if _reads(n) <= values.keys()]
        for node in ready:
            fed = {v: values[v] for v in sorted(_reads(node))}
            made = ort.run(ort.session(single(model, node, fed)), fed)
            values |= {v: a for v, a in made.items() if isinstance(a, np.ndarray)}
        pending = [n for n in pending if n not in ready] if ready else []
    if any(_is_half(a) for a in values.values()):
        yield values[output]


def _reads(node: onnx.NodeProto) -> set[str]:
    return {i for i in node.input if i} | set(captured_names(node))


def noisy_runs(model: onnx.ModelProto, feeds: Feeds, output: str) -> Iterator[np.ndarray]:
    """What the output becomes with noise on the results of inexact ops and on the operands of sums."""
    opset = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 0)
    spots = _spots(model, opset)
    arrays = _intermediate(model, feeds, {v for v, _ in spots})
    noisy = onnx.ModelProto()
    noisy.CopyFrom(model)
    drawn: dict[str, np.ndarray] = {}
    shifts: dict[str, tuple[np.ndarray, float]] = {}
    nodes: list[onnx.NodeProto] = []
    shaken: dict[str, str] = {}  # values that are read through noise
    made_noisy = {v for v, kind in spots if kind == "made" or (kind == "half" and _is_half(arrays.get(v)))}
    operands = {v for v, kind in spots if kind == "read"} - made_noisy

    def shake(value: str, to: str, shift: float = 0.0) -> None:
        drawn[f"{to}.noise"] = arrays[value]
        moved = f"{to}.moved" if shift else to
        nodes.append(onnx.helper.make_node("Mul", [value, f"{to}.noise"], [moved]))
        if shift:
            shifts[f"{to}.shift"] = (arrays[value], shift)
            nodes.append(onnx.helper.make_node("Add", [moved, f"{to}.shift"], [to]))

    for value in sorted(operands):
        if value in arrays and _shakes(arrays[value]) and value not in {o for n in model.graph.node for o in n.output}:
            shaken[value] = f"{value}.shaken"
            shake(value, shaken[value])
    for node in noisy.graph.node:
        sums = _is_sum(node, opset)
        node.input[:] = [shaken.get(i, i) if sums else i for i in node.input]
        raw = {o: f"{o}.raw" for o in node.output if o in made_noisy and o in arrays and _shakes(arrays[o])}
        extra = [o for o in node.output if o in operands and o in arrays and _shakes(arrays[o])]
        for o, r in raw.items():
            arrays[r] = arrays[o]
        node.output[:] = [raw.get(o, o) for o in node.output]
        nodes.append(node)
        for o, r in raw.items():
            shake(r, o, SATURATES.get(node.op_type, 0.0))
        for o in extra:
            shaken[o] = f"{o}.shaken"
            shake(o, shaken[o])
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del noisy.graph.node[:]
    noisy.graph.node.extend(copies)
    for name, a in (*drawn.items(), *((n, like) for n, (like, _) in shifts.items())):
        kind = onnx.helper.np_dtype_to_tensor_dtype(a.dtype)
        noisy.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [None] * a.ndim))
    session = ort.session(noisy)
    rng = np.random.default_rng(0)
    for _ in range(RUNS):
        noise = {n: _noise(a, rng) for n, a in drawn.items()}
        noise |= {n: (size * rng.uniform(0, 1, a.shape) * (a == 0)).astype(a.dtype) for n, (a, size) in shifts.items()}
        yield np.asarray(ort.run(session, {**feeds, **noise})[output])


def _is_half(a: np.ndarray | None) -> bool:
    """Between two nodes onnxruntime may keep such a value in f32."""
    return a is not None and a.dtype == np.float16


def _shakes(a: np.ndarray) -> bool:
    return a.dtype in (np.float32, np.float64, np.float16)


def _noise(a: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some eps, and subnormal numbers become 0 or not. What is 0 may be another number by other noise: it stays."""
    info = limits(a.dtype)
    noise = 1 + NOISE * float(info.eps) * rng.uniform(-1, 1, a.shape)
    flushed = (a != 0) & (np.abs(a) < float(info.smallest_normal)) & (rng.random() < 0.5)
    return np.asarray(np.where(flushed, 0, noise)).astype(a.dtype)


def _is_sum(node: onnx.NodeProto, opset: int) -> bool:
    op = lookup(node.domain, node.op_type, opset)
    return op is None or (op.tol.kind == "sum" and node.op_type not in EXTREMES)


def _spots(model: onnx.ModelProto, opset: int) -> list[tuple[str, str]]:
    """(value, made, half or read): results of inexact ops, those exact but for their rounding, operands of sums."""
    out: list[tuple[str, str]] = []
    for node in model.graph.node:
        op = lookup(node.domain, node.op_type, opset)
        exact = op is not None and (op.tol.kind == "exact" or op.family is Family.OPAQUE or op.name in EXTREMES)
        if exact and not _has_body(node):
            out += [(o, "half") for o in node.output if o and op is not None and op.family is Family.POINTWISE]
            continue
        out += [(o, "made") for o in node.output if o]
        out += [(i, "read") for i in node.input if i] if _is_sum(node, opset) else []
    return out


def _has_body(node: onnx.NodeProto) -> bool:
    return any(a.HasField("g") for a in node.attribute)


def _intermediate(model: onnx.ModelProto, feeds: Feeds, wanted: Iterable[str]) -> dict[str, np.ndarray]:
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    there = {o.name for o in whole.graph.output}
    made = {o for n in whole.graph.node for o in n.output if o}
    for value in sorted(set(wanted) & made - there):
        whole.graph.output.append(onnx.ValueInfoProto(name=value))
    found: dict[str, np.ndarray] = {k: np.asarray(v) for k, v in feeds.items()}
    found |= {t.name: onnx.numpy_helper.to_array(t) for t in whole.graph.initializer}
    for k, v in ort.run(ort.session(whole), feeds).items():
        if isinstance(v, np.ndarray):
            found[k] = v
    return found
