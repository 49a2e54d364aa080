"""Is an optimized model the same as the original? Everything `tools/fuzz.py` asks of one model.

    judge(question, step)   optimize at a mode, run without and with the library, compare every output; the findings

Compiled kernels are remembered, so that modes which make the same kernels compile them once. At `opt` 0
LLVM only translates: the code of our templates runs as it was written, several times as many models per minute.

A difference is a finding when rounding does not explain it. Whether it does is asked of onnxruntime itself: the
original runs again with noise of a few eps on what inexact ops compute. An output that moves as far under noise is
forgiven (and counted), one that does not is a finding.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
from fuzz_graph import REFUSALS, limits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxfuse import pipeline
from onnxfuse.codegen import generate as generating
from onnxfuse.codegen import object as objects
from onnxfuse.codegen.cache import Cache, Entry
from onnxfuse.config import Config, FusionConfig, FusionMode, VerifyConfig
from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.frontend.protos import all_graphs, captured_names
from onnxfuse.ir.op import Family
from onnxfuse.ops.table import lookup
from onnxfuse.pipeline import Bundle, optimize
from onnxfuse.verify import ort
from onnxfuse.verify.compare import OutputReport, compare_results

Feeds = Mapping[str, np.ndarray]
NOISE, RUNS, REACH = 6.0, 10, 6.0  # eps per inexact op; noisy runs; times their spread that is forgiven
EXTREMES = frozenset({"ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "ArgMax", "ArgMin", "Hardmax"})
SATURATES = {"Sigmoid": 2e-8, "Tanh": 1e-37}  # below this onnxruntime's result may be 0
REMEMBERED = 3000  # compiled kernels


@dataclass(frozen=True, slots=True)
class Question:
    """One model, its input sets and how to treat it."""

    model: bytes
    feeds: tuple[Feeds, ...]
    modes: tuple[str, ...] = ("full", "none", "tvm", "canfuse")
    bodies: tuple[str, ...] = ()  # modes at which no kernel is compiled
    opt: int = 3
    level: str = "disable"
    threads: int = 1
    target: str = "native"
    subgraphs: bool = False  # bodies of control flow are optimized too

    def config(self, mode: str) -> Config:
        """How `optimize` is called."""
        fusion = FusionConfig(mode=FusionMode(mode))
        return Config(fusion=fusion, target=self.target, include_subgraph=self.subgraphs)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong. kind: exception, refused, load, run, mismatch (from here), crash, hang (from outside)."""

    kind: str
    mode: str
    where: str  # without / with the library, or the stage
    text: str
    output: str = ""
    feed: int = -1

    def __str__(self) -> str:
        at = f", input set {self.feed}" if self.feed >= 0 else ""
        return f"{self.kind} (mode {self.mode}, {self.where}{at}): {self.text}"


@dataclass(slots=True)
class Answer:
    """What judging a model gave."""

    findings: list[Finding] = field(default_factory=list)
    forgiven: int = 0  # differing outputs that rounding explains
    runs: int = 0  # optimized models run (a mode, without or with the library, on one input set)
    kernels: int = 0
    templates: Counter[str] = field(default_factory=Counter)
    unusable: str = ""  # onnxruntime does not run the original


Step = Callable[[str], None]


def judge(question: Question, step: Step = lambda _text: None) -> Answer:
    """Everything about one model; `step` hears what is about to be done, in case it is the last thing."""
    answer = Answer()
    model = onnx.ModelProto.FromString(question.model)
    step("original")
    try:
        plain = ort.session(question.model)
        expected = [ort.run(plain, feeds) for feeds in question.feeds]
    except REFUSALS as error:
        answer.unusable = " ".join(str(error).split())[:300]
        return answer
    seen: set[bytes] = set()
    with compiling(question.opt), tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for mode in question.modes:
            step(f"optimize {mode}")
            with without_kernels() if mode in question.bodies else contextlib.nullcontext():
                bundle = _optimized(model, mode, question, answer)
            if bundle is None or (key := _content(bundle)) in seen:
                continue
            seen.add(key)
            _check_bundle(question, model, bundle, mode, Path(folder) / mode, expected, answer, step)
    return answer


def _optimized(model: onnx.ModelProto, mode: str, question: Question, answer: Answer) -> Bundle | None:
    try:
        bundle = optimize(model, question.config(mode))
    except OnnxfuseError as error:
        stage = next((n.strip() for n in getattr(error, "__notes__", ()) if "stage:" in n), "")
        answer.findings.append(Finding("exception", mode, stage, f"{type(error).__name__} {_brief(str(error))}"))
        return None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        at = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
        text = f"{type(error).__name__}: {_brief(str(error))} at {at}"
        answer.findings.append(Finding("exception", mode, "traceback", text))
        return None
    for refusal in bundle.plans.refused.values():
        # Untouched, LLVM calls conversions that it otherwise writes out: such a kernel is left out at opt 0.
        uncompiled = refusal.code == generating.UN_COMPILE and (question.opt or "E_SYMBOLS" not in refusal.why)
        if uncompiled or refusal.code == "UN_INTERNAL":
            answer.findings.append(Finding("refused", mode, "generate", _brief(str(refusal))))
    answer.kernels += len(bundle.plans.plans)
    answer.templates.update(p.schedule.template for p in bundle.plans.plans)
    return bundle


def _brief(text: str) -> str:
    return " ".join(text.split())[:600]


def _content(bundle: Bundle) -> bytes:
    """What distinguishes two results: the graph, its functions and the library."""
    model = bundle.emission.model
    parts = [model.graph.SerializeToString(), *(f.SerializeToString() for f in model.functions)]
    return b"".join([*parts, (bundle.library.digest if bundle.library else "").encode()])


def _check_bundle(
    question: Question,
    model: onnx.ModelProto,
    bundle: Bundle,
    mode: str,
    folder: Path,
    expected: Sequence[dict[str, ort.Result]],
    answer: Answer,
    step: Step,
) -> None:
    folder.mkdir()
    written = bundle.save(folder / "out.onnx")
    for library in (None, written.library) if written.library else (None,):
        where = "with the library" if library else "without the library"
        step(f"load {mode} {where}")
        try:
            session = ort.session(
                written.model,
                level=ort.Level(question.level),
                threads=question.threads,
                libraries=[library] if library else [],
            )
        except UsageError as error:
            answer.findings.append(Finding("load", mode, where, _brief(f"{error.what}: {error.why}")))
            continue
        for k, feeds in enumerate(question.feeds):
            step(f"run {mode} {where} input set {k}")
            answer.runs += 1
            try:
                got = ort.run(session, feeds)
            except ort.ORT_ERRORS as error:
                answer.findings.append(Finding("run", mode, where, _brief(str(error)), feed=k))
                continue
            for report in compare_results(expected[k], got, VerifyConfig()):
                if report.ok:
                    continue
                step(f"noise {mode} {where} input set {k}")
                output = report.name
                if excused(model, feeds, output, expected[k], got, question.level):
                    answer.forgiven += 1
                    continue
                answer.findings.append(Finding("mismatch", mode, where, _numbers(report), output, k))


def _numbers(r: OutputReport) -> str:
    first = f"; first at {list(r.first.index)}: {r.first.reference} became {r.first.candidate}" if r.first else ""
    counts = f"{r.mismatches} of {r.total} differ, max abs {r.max_abs:.3g}, rel {r.max_rel:.3g}"
    return f"{r.name} {r.dtype}{list(r.shape)}: {r.problem or counts + first}"


# --- compiling -----------------------------------------------------------------------------------------------------
class Memory(Cache):
    """What was compiled, kept in this process: as the cache on disk, whose keys are put to the test with it."""

    def __init__(self) -> None:
        object.__setattr__(self, "kept", OrderedDict())

    kept: OrderedDict[str, Entry]

    def get(self, key: str) -> Entry | None:
        if key in self.kept:
            self.kept.move_to_end(key)
        return self.kept.get(key)

    def put(self, key: str, entry: Entry) -> None:
        self.kept[key] = entry
        if len(self.kept) > REMEMBERED:
            self.kept.popitem(last=False)


_memories: dict[int, Memory] = {}


@contextlib.contextmanager
def compiling(opt: int) -> Iterator[None]:
    """Kernels are compiled in this process, at this level, and remembered."""
    memory = _memories.setdefault(opt, Memory())
    translate = functools.partial(objects.compile_module, opt=opt)
    with (
        patch.object(objects, "compile_module", translate),
        patch.object(generating, "compile_module", translate),
        patch.object(generating, "default_workers", lambda _modules: 0),
        patch.object(pipeline, "default_cache", lambda: memory),
    ):
        yield


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """What is planned is not compiled: a model whose function bodies run."""
    with patch.object(pipeline, "generate", lambda *_args, **_options: None):
        yield


# --- is it rounding? -----------------------------------------------------------------------------------------------
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
        noise |= {n: (rng.uniform(0, size, a.shape) * (a == 0)).astype(a.dtype) for n, (a, size) in shifts.items()}
        yield np.asarray(ort.run(session, {**feeds, **noise})[output])


def _is_half(a: np.ndarray | None) -> bool:
    """Between two nodes onnxruntime may keep such a value in f32."""
    return a is not None and a.dtype == np.float16


def _shakes(a: np.ndarray) -> bool:
    return a.dtype in (np.float32, np.float64, np.float16)


def _noise(a: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some eps, and subnormal numbers become 0 or not."""
    info = limits(a.dtype)
    noise = 1 + NOISE * float(info.eps) * rng.uniform(-1, 1, a.shape)
    flushed = (np.abs(a) < float(info.smallest_normal)) & (rng.random() < 0.5)
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


# --- graphs --------------------------------------------------------------------------------------------------------
def alone(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """The part of a model that computes these outputs."""
    made = {o: k for k, n in enumerate(model.graph.node) for o in n.output if o}
    needed: set[str] = set()
    keep: set[int] = set()
    pending = list(outputs)
    while pending:
        v = pending.pop()
        if v in needed:
            continue
        needed.add(v)
        if (at := made.get(v, -1)) >= 0 and at not in keep:
            keep.add(at)
            pending += [i for i in model.graph.node[at].input if i]
            pending += captured_names(model.graph.node[at])
    small = onnx.ModelProto()
    small.CopyFrom(model)
    g = small.graph
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for k, n in enumerate(model.graph.node) if k in keep]
    for repeated, kept in (
        (g.node, nodes),
        (g.input, [i for i in model.graph.input if i.name in needed]),
        (g.output, [o for o in model.graph.output if o.name in set(outputs)]),
        (g.initializer, [t for t in model.graph.initializer if t.name in needed]),
        (g.value_info, []),
    ):
        copies = [type(item).FromString(item.SerializeToString()) for item in kept]
        del repeated[:]
        repeated.extend(copies)
    called = {n.op_type for n in nodes if n.domain == "local"}
    functions = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in model.functions if f.name in called]
    del small.functions[:]
    small.functions.extend(functions)
    return small


def merged(models: Sequence[onnx.ModelProto]) -> onnx.ModelProto:
    """Several models of one opset as one; what is in number k is called gk_..."""
    whole = onnx.ModelProto()
    for k, model in enumerate(models):
        part = renamed(model, f"g{k}_")
        whole.graph.name = "batch"
        whole.ir_version = max(whole.ir_version, part.ir_version)
        for entry in part.opset_import:
            if entry.domain not in {e.domain for e in whole.opset_import}:
                whole.opset_import.add(domain=entry.domain, version=entry.version)
        whole.functions.extend(part.functions)
        for name in ("node", "input", "output", "initializer"):
            getattr(whole.graph, name).extend(getattr(part.graph, name))
    return whole


def renamed(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """The same model with all its names behind a prefix."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for f in out.functions:
        f.name = prefix + f.name
    for g in all_graphs(out.graph):
        for info in (*g.input, *g.output, *g.value_info):
            info.name = prefix + info.name
            for d in info.type.tensor_type.shape.dim:
                if d.dim_param:
                    d.dim_param = prefix + d.dim_param
        for t in g.initializer:
            t.name = prefix + t.name
        for n in g.node:
            n.input[:] = [prefix + i if i else "" for i in n.input]
            n.output[:] = [prefix + o if o else "" for o in n.output]
            n.name = prefix + n.name if n.name else ""
            if n.domain == "local":
                n.op_type = prefix + n.op_type
    return out


__all__ = ["Answer", "Finding", "Question", "alone", "judge", "merged", "onnxruntime"]
