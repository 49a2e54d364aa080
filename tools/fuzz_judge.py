"""Is an optimized model the same as the original? Everything `tools/fuzz.py` asks of one model.

    judge(question, step)   optimize at a mode, run without and with the library, compare every output; the findings

Compiled kernels are remembered, so that modes which make the same kernels compile them once. At `opt` 0
LLVM only translates: the code of our templates runs as it was written, several times as many models per minute.

A difference is a finding when rounding does not explain it. Whether it does is asked of onnxruntime itself
(tools/fuzz_rounding.py): the original runs again with noise of a few eps on what inexact ops compute, and node by node,
which rounds every f16 value. An output that moves as far is forgiven (and counted), one that does not is a finding.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
from fuzz_graph import REFUSALS
from fuzz_rounding import excused

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxfuse import pipeline
from onnxfuse.codegen import generate as generating
from onnxfuse.codegen import object as objects
from onnxfuse.codegen.cache import Cache, Entry
from onnxfuse.config import PASSES, Config, FusionConfig, FusionMode, PrepareConfig, VerifyConfig
from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.pipeline import Bundle, optimize
from onnxfuse.verify import ort
from onnxfuse.verify.values import OutputReport, compare_results

Feeds = Mapping[str, np.ndarray]
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
    frozen: bool = False  # the sizes of the first input set are fixed
    exact: bool = False  # no Winograd
    bare: bool = False  # no simplification before fusion

    def config(self, mode: str) -> Config:
        """How `optimize` is called."""
        fusion = FusionConfig(mode=FusionMode(mode))
        return Config(
            fusion=fusion,
            prepare=PrepareConfig(skip=frozenset(PASSES) if self.bare else frozenset()),
            target=self.target,
            include_subgraph=self.subgraphs,
            overwrite_input_shape={n: a.shape for n, a in self.feeds[0].items() if a.size} if self.frozen else {},
            exact_conv=self.exact,
        )

    def asked(self) -> list[int]:
        """Numbers of the input sets the result must take."""
        shapes = [{n: a.shape for n, a in f.items()} for f in self.feeds]
        return [k for k, of in enumerate(shapes) if not self.frozen or of == shapes[0]]


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
        for k in question.asked():
            feeds = question.feeds[k]
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
