"""The driver: every stage, top to bottom, and nothing else. This is the only list of passes.

model.onnx -> read -> prepare -> bodies -> atomize -> lower -> fuse -> layout -> kernelize -> plan -> generate -> emit
           -> Bundle

With --tune one more follows: kernels that lose are measured and given back, and the last two run again. With
--include-subgraph the bodies of control flow are graphs of their own up to `layout`; kernels, library and model are
made of all graphs together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TypeVar

import onnx

from onnxfuse.codegen.cache import default_cache
from onnxfuse.codegen.generate import generate
from onnxfuse.codegen.object import host_features
from onnxfuse.config import Config, FusionMode, Precision, PrepareConfig
from onnxfuse.emit.bodies import emit_bodies
from onnxfuse.emit.bundle import Staged, Written, staged
from onnxfuse.emit.model import Emission, emit
from onnxfuse.errors import CompileError
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.bodies import Scope, bodies, tightened
from onnxfuse.frontend.fold import Evaluate
from onnxfuse.frontend.load import ModelLike
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.prepare import Prepared, prepare
from onnxfuse.frontend.read import read
from onnxfuse.frontend.rewrite import Note
from onnxfuse.frontend.shapes import Hints
from onnxfuse.fuse import fuse
from onnxfuse.inspection import inspect_all
from onnxfuse.ir.graph import Graph, Value
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.plan import Library, Plans
from onnxfuse.ir.text import IR
from onnxfuse.ops.dsl import Known
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.schedule.layout import layout
from onnxfuse.schedule.plan import plan
from onnxfuse.target import Target, by_name
from onnxfuse.trace import Trace
from onnxfuse.tuning import Finished, Tuning, tune
from onnxfuse.verify.evaluate import evaluate

S = TypeVar("S")
T = TypeVar("T")
Prepare = Callable[[Graph, Hints, Mapping[Value, Known], str], Prepared]

STAGES = (
    "read", "prepare", "bodies", "atomize", "lower", "fuse", "layout", "kernelize", "plan", "generate", "emit", "tune",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """What `optimize` returns: the new model, its library, and how they came about.

    library is None when nothing was compiled; `notes` are the simplifications that were refused, with codes;
    `tuning` is what --tune measured.
    """

    emission: Emission
    library: Library | None
    partition: Partition
    plans: Plans
    notes: tuple[Note, ...]
    save_as_external_data: bool = False
    tuning: Tuning | None = None

    @property
    def model(self) -> onnx.ModelProto:
        """The optimized model as one ModelProto (copies the weights; below 2 GB only: else use `save`)."""
        return self.emission.proto()

    def save(self, path: str | PathLike[str]) -> Written:
        """Write `path` and, beside it, the library (`.so`), both or neither. Raises UsageError when it cannot."""
        with self.staged(path) as pair:
            return pair.publish()

    def staged(self, path: str | PathLike[str]) -> AbstractContextManager[Staged]:
        """The same files in a hidden directory beside `path`, to look at before `publish` puts them in place."""
        image = self.library.image if self.library is not None else None
        return staged(self.emission, image, path, external_data=self.save_as_external_data)


def optimize(
    model: ModelLike,
    config: Config,
    trace: Trace | None = None,
    progress: Callable[[str], None] | None = None,
) -> Bundle:
    """Fuse a model. `model` is never mutated; `progress` hears the name of each stage as it starts.

    Raises UsageError for a model that cannot be read, IRError for a bug of ours (with a note: which stage, how to get
    there again).
    """
    trace = trace or Trace()
    target = replace(by_name(config.target, host_features()), bf16_weights=config.precision is Precision.BF16)
    stages = _Stages(trace, progress)
    stage = stages.run

    source = stage(
        "read",
        lambda: read(
            model,
            overwrite_input_shape=config.overwrite_input_shape,
            dim_params=config.dim_params,
            include_subgraph=config.include_subgraph,
        ),
        lambda made: made.graph,
    )

    simplify = _simplifications(config, target)

    def prepared(graph: Graph, hints: Hints, known: Mapping[Value, Known], scope: str = "") -> Prepared:
        make = partial(prepare, graph, simplify, _evaluator(graph), hints, known)
        return stage("prepare", make, lambda made: made.graph, scope=scope)

    # Before atomize: a folded constant lets formulas be decided, and BatchNormalization goes into weights whole.
    main = Scope(source, prepared(source.graph, source.hints, {}))
    # Before atomize: what bodies no longer read need not be made.
    scopes = stage("bodies", lambda: _bodies(main, prepared, trace) if config.include_subgraph else (main,))
    each = stages.each
    atomized = each("atomize", scopes, lambda s: atomize(s.prepared.typed), scopes, lambda made: made.graph)
    loops = each("lower", scopes, lower, atomized)
    partitions = each("fuse", scopes, lambda graph: fuse(graph, config.fusion), loops)
    # Before kernelize: loops follow the memory order.
    partitions = each("layout", scopes, lambda p: layout(p, target), partitions)
    kernels = stage("kernelize", lambda: kernelize(partitions[0], partitions[1:]))
    plans = stage("plan", lambda: _no_slips(plan(kernels, target, _forbidden(config)), config))

    def write(plans: Plans, library: Library | None) -> Finished:
        plans = plans if library is None else library.plans  # without the kernels that did not compile, and why
        library = library if plans.plans else None
        # What `inspect` will say about the file, in the file.
        record = {"inspection": json.dumps(inspect_all(plans).json(), separators=(",", ":"))}
        inside = emit_bodies(scopes, atomized, plans)
        facts = {"mode": config.fusion.mode, "target": target.name}
        made = emit(source, atomized[0], plans, library, **facts, record=record, inside=inside)
        return Finished(plans, library, made)

    library = stage("generate", lambda: _library(plans, target, config))
    made, tuning = stage("emit", lambda: write(plans, library)), None
    if config.tune:
        made, tuning = stage("tune", lambda: tune(model, made, lambda p: write(p, _library(p, target, config)), config))
    notes = tuple(dict.fromkeys(n for s in scopes for n in s.prepared.notes))
    external = config.save_as_external_data
    return Bundle(made.emission, made.library, made.plans.partition, made.plans, notes, external, tuning)


def _bodies(main: Scope, prepared: Prepare, trace: Trace) -> tuple[Scope, ...]:
    """The main graph and every body, outer ones first."""
    scopes = [main]
    for number, scope in enumerate(scopes):  # the list grows meanwhile: bodies of bodies
        for body in bodies(scope, number):
            trace("read", body.source, body.source.graph, scope=body.name, last=False)
            scopes.append(body.scope(prepared(body.source.graph, body.source.hints, body.known, body.name)))
    return tightened(scopes)


def _evaluator(graph: Graph) -> Evaluate:
    """The judge folds the constants: what onnxruntime says they are."""
    return lambda node, arrays: evaluate(node, arrays, graph.opset, graph.imports)


def _simplifications(config: Config, target: Target) -> PrepareConfig:
    """Without those that are of no use for this target and this way of fusing."""
    spared = set(config.prepare.skip)
    if target.byte_dots:
        spared.add("integers")  # the runtime's own kernels sum products of bytes four at a time, and are faster
    if config.fusion.mode not in (FusionMode.CANFUSE, FusionMode.FULL):
        spared.add("concat_by_reader")  # nothing takes a Concat into the kernel of its reader
    return replace(config.prepare, skip=frozenset(spared))


def _forbidden(config: Config) -> frozenset[str]:
    """Templates that may not be used."""
    return frozenset({"winograd", "by_size"}) if config.exact_conv else frozenset()


def _no_slips(plans: Plans, config: Config) -> Plans:
    """Under --strict a bug of ours is an error, not a node that stays."""
    slips = [r for r in plans.refused.values() if r.code == "UN_INTERNAL"]
    if slips and config.strict:
        raise CompileError(slips[0].code, "a bug in onnxfuse, met while a kernel was made", slips[0].why)
    return plans


def _library(plans: Plans, target: Target, config: Config) -> Library | None:
    """No kernels, no library: the model then runs everywhere as it is."""
    if not plans.plans:
        return None
    cache = default_cache() if config.cache else None
    return generate(plans, target, keep_llvm=config.keep_llvm, strict=config.strict, cache=cache)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Runs one stage: announce, run (errors get the stage as a note), hand to the trace."""

    trace: Trace
    progress: Callable[[str], None] | None

    def run(
        self,
        name: str,
        make: Callable[[], T],
        view: Callable[[T], IR] | None = None,
        *,
        scope: str = "",
        last: bool = True,
    ) -> T:
        if self.progress is not None:
            self.progress(name)
        with self.trace.stage(name):
            made = make()
            return self.trace(name, made, None if view is None else view(made), scope=scope, last=last)

    def each(
        self,
        name: str,
        scopes: Sequence[Scope],
        make: Callable[[S], T],
        given: Sequence[S],
        view: Callable[[T], IR] | None = None,
    ) -> tuple[T, ...]:
        """The stage for every graph; `given` is what each of them has come to."""
        end = len(scopes) - 1
        return tuple(
            self.run(name, partial(make, x), view, scope=s.name, last=k == end)
            for k, (s, x) in enumerate(zip(scopes, given, strict=True))
        )
