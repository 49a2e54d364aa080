"""Compare two models in onnxruntime, output by output. The reference runs at ORT_DISABLE_ALL; values.py judges."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort, steps
from onnxfuse.verify.bench import Timing
from onnxfuse.verify.inputs import InputSpec, Sample, samples, specs
from onnxfuse.verify.mapped import Mapped, mapped_session
from onnxfuse.verify.values import OutputReport, compare_results, compare_values

Libraries = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class RunReport:
    """One set of inputs. `error` is what onnxruntime said when the candidate refused them.

    nodes     what was found node by node, where the run was judged so (steps.py)
    """

    label: str
    inputs: Mapping[str, tuple[int, ...]]
    outputs: tuple[OutputReport, ...]
    error: str = ""
    nodes: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and all(o.ok for o in self.outputs)


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison of two models.

    error     set when the candidate does not load or its inputs and outputs have other names or types
    narrowed  inputs with dimensions that are free in the reference and fixed in the candidate (allowed: the samples
              respect them)
    loaded    False when onnxruntime refused to load the candidate or a library
    skipped   why there was nothing to compare (a body of control flow that does not run alone)
    speed     the candidate's time beside the reference's, when VerifyConfig.speed asks for it
    """

    reference: str
    candidate: str
    libraries: tuple[str, ...]
    runs: tuple[RunReport, ...]
    error: str = ""
    narrowed: tuple[str, ...] = ()
    loaded: bool = True
    skipped: str = ""
    speed: Timing | None = None

    @property
    def ok(self) -> bool:
        return bool(self.skipped) or (not self.error and bool(self.runs) and all(r.ok for r in self.runs))

    @property
    def failed_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that disagree, each once."""
        return tuple(dict.fromkeys(o.name for r in self.runs for o in r.outputs if not o.ok))

    def worst(self) -> tuple[OutputReport, ...]:
        """Per output the run that is worst: a failing one before a passing one, then by absolute difference."""
        found: dict[str, OutputReport] = {}
        for out in (o for r in self.runs for o in r.outputs):
            old = found.get(out.name)
            if old is None or _badness(out) > _badness(old):
                found[out.name] = out
        return tuple(found.values())

    def json(self) -> dict[str, object]:
        """Plain data with the fields of the dataclasses, and `ok` on each level."""
        runs = [{"ok": r.ok, **asdict(r)} for r in self.runs]
        return {"ok": self.ok, **asdict(replace(self, runs=())), "runs": runs}

    def summary(self) -> str:
        """One line for people."""
        with_what = "with the library" if self.libraries else "without the library"
        if self.skipped:
            return f"not compared: {self.skipped}"
        if self.ok:
            nodes = next((f"; {r.nodes}" for r in self.runs if r.nodes), "")
            return f"agrees {with_what}: {len(self.runs)} run(s), {len(self.runs[0].outputs)} output(s){nodes}"
        reason = self.error or next((r.error for r in self.runs if r.error), "")
        return f"differs {with_what}: {reason or 'outputs ' + ', '.join(self.failed_outputs)}"


def _badness(out: OutputReport) -> tuple[bool, bool, int, float]:
    return (not out.ok, bool(out.problem), out.mismatches, out.max_abs)


# ---- two models


def compare(
    reference: ort.Source,
    candidate: ort.Source,
    *,
    library: str | os.PathLike[str] | None = None,
    config: VerifyConfig | None = None,
    custom_op_libraries: Sequence[str | os.PathLike[str]] = (),
    level: ort.Level = ort.Level.DISABLE,
    threads: int = 0,
) -> Report:
    """Run both on the same inputs and compare all outputs.

    Args:
        reference: the original model; runs at ORT_DISABLE_ALL.
        candidate: the model to judge; runs at `level`.
        library: our compiled library, registered for the candidate only.
        config: inputs, seeds and tolerances.
        custom_op_libraries: libraries the user's own custom ops need, registered for both.
        level: graph optimisation level of the candidate.
        threads: of each session; 0 = onnxruntime's choice.

    Raises:
        UsageError: the reference does not load, or no input for it was found.
    """
    return compare_many(
        reference,
        candidate,
        [library],
        config=config,
        custom_op_libraries=custom_op_libraries,
        level=level,
        threads=threads,
    )[0]


def compare_many(
    reference: ort.Source,
    candidate: ort.Source,
    libraries: Sequence[str | os.PathLike[str] | None],
    *,
    config: VerifyConfig | None = None,
    custom_op_libraries: Sequence[str | os.PathLike[str]] = (),
    level: ort.Level = ort.Level.DISABLE,
    threads: int = 0,
    step: Callable[[str], None] | None = None,
    lean: bool = False,
    given: Sequence[Sample] = (),
    known: Original | None = None,
) -> tuple[Report, ...]:
    """`compare` once per entry of `libraries` (None = without ours), running the reference once for all.

    One session lives at a time (two for a moment when the reference has free dimensions), because models are large.
    `step` hears what is about to be done; `lean` leaves weights in the candidate's file where it can (see mapped.py);
    `given` are inputs to use instead of those `config` asks for; `known` is what `original` has found out before.
    """
    config = config or VerifyConfig()
    step = step or _silent
    sets = [[*custom_op_libraries, *([lib] if lib is not None else [])] for lib in libraries]
    names = ort.describe(reference).strip("'"), ort.describe(candidate).strip("'")

    def load(k: int, interface: _Interface) -> _Contender:
        step(f"loading {_called(libraries[k])}")
        return _load(candidate, sets[k], interface, level, threads, lean and libraries[k] is not None)

    loaded: list[_Contender] = []  # the first candidate, when it was asked for its dimensions
    if known is not None and sets and any(s.symbols for s in known.wanted):
        loaded.append(load(0, known.interface))
        if _narrower(known.wanted, loaded[0].specs) != known.wanted:
            known = None
            loaded.clear()
    if known is None:
        known = original(
            reference,
            config=config,
            custom_op_libraries=custom_op_libraries,
            threads=threads,
            step=step,
            given=given,
            narrower=(lambda found: load(0, found).specs) if sets else None,
        )
    interface, pairs = known.interface, known.pairs

    def report(k: int, library: str | os.PathLike[str] | None) -> Report:
        """In a function, so that its session is gone before the next one is made."""
        c = loaded.pop() if loaded else load(k, interface)
        runs = []
        for sample, results in pairs if c.session and not c.error else ():
            step(f"running {_called(library)} on {_inputs(sample)}")
            run = _judge(c.session, sample, results, config)
            if library is not None and not run.ok and not run.error:
                given = (library, custom_op_libraries)
                run = _by_nodes(run, c.session, (sample, results), candidate, given, config, step)
            runs.append(run)
        narrowed = _narrowed(interface.specs, c.specs)
        ours = (str(library),) if library is not None else ()
        return Report(*names, ours, tuple(runs), c.error, narrowed, c.session is not None)

    return tuple(report(k, library) for k, library in enumerate(libraries))


def original(
    reference: ort.Source,
    *,
    config: VerifyConfig,
    custom_op_libraries: Sequence[str | os.PathLike[str]] = (),
    threads: int = 0,
    step: Callable[[str], None] | None = None,
    given: Sequence[Sample] = (),
    narrower: Callable[[_Interface], tuple[InputSpec, ...]] | None = None,
) -> Original:
    """Run the reference on `given`, or on the inputs that `config` asks for.

    `narrower` gives the candidate's inputs: where the reference has free dimensions, those are respected.
    """
    step = step or _silent
    step("loading the original model")
    expected = ort.session(reference, threads=threads, libraries=custom_op_libraries)
    interface, wanted = _interface(expected), specs(expected)
    if narrower is not None and any(s.symbols for s in wanted):
        wanted = _narrower(wanted, narrower(interface))
    step("running the original model")
    pairs = [(s, ort.run(expected, s.feeds)) for s in given] or list(samples(expected, config, wanted))
    return Original(interface, wanted, pairs)


def _silent(step: str) -> None:
    """Nobody wants to know."""


def _called(library: str | os.PathLike[str] | None) -> str:
    return f"the optimized model {'without' if library is None else 'with'} its library"


def _inputs(sample: Sample) -> str:
    shapes = ", ".join(f"{name}:{','.join(map(str, dims))}" for name, dims in sample.shapes.items())
    return f"{sample.label} ({shapes})" if shapes else sample.label


def _narrower(reference: tuple[InputSpec, ...], candidate: tuple[InputSpec, ...]) -> tuple[InputSpec, ...]:
    """The candidate's shapes, when it has the reference's inputs."""
    return candidate if [s.name for s in reference] == [s.name for s in candidate] else reference


def _narrowed(reference: Sequence[InputSpec], candidate: Sequence[InputSpec]) -> tuple[str, ...]:
    theirs = {s.name: s for s in candidate}
    return tuple(
        f"{spec} became {theirs[spec.name]}"
        for spec in reference
        if spec.name in theirs
        and any(
            isinstance(d, str) and isinstance(n, int) for d, n in zip(spec.shape, theirs[spec.name].shape, strict=False)
        )
    )


Names = list[tuple[str, str]]  # (name, type)


@dataclass(frozen=True, slots=True)
class _Interface:
    """What callers of a model see."""

    specs: tuple[InputSpec, ...]
    outputs: Names
    overridable: Names

    @property
    def inputs(self) -> Names:
        return [(s.name, s.type) for s in self.specs]


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """What the reference says: its interface, the inputs asked for (`wanted`), the samples and their results."""

    interface: _Interface
    wanted: tuple[InputSpec, ...]
    pairs: Sequence[tuple[Sample, Mapping[str, ort.Result]]]


@dataclass(frozen=True, slots=True)
class _Contender:
    """A candidate's session, or why there is none."""

    session: onnxruntime.InferenceSession | None
    specs: tuple[InputSpec, ...] = ()
    error: str = ""
    mapped: Mapped | None = None


def _interface(sess: onnxruntime.InferenceSession) -> _Interface:
    outputs, overridable = sess.get_outputs(), sess.get_overridable_initializers()
    return _Interface(specs(sess), [(v.name, v.type) for v in outputs], sorted((v.name, v.type) for v in overridable))


def _load(
    candidate: ort.Source,
    libraries: Libraries,
    expected: _Interface,
    level: ort.Level,
    threads: int,
    lean: bool = False,
) -> _Contender:
    mapped = None
    try:
        if lean and isinstance(candidate, Path):
            mapped = mapped_session(candidate, level=level, threads=threads, libraries=libraries)
        if mapped is not None:
            sess = mapped.session
        else:
            sess = ort.session(candidate, level=level, threads=threads, libraries=libraries)
    except UsageError as exc:
        return _Contender(None, error=f"{exc.what}: {exc.why}")
    found = _interface(sess)
    return _Contender(sess, found.specs, _interface_difference(expected, found), mapped)


def _interface_difference(a: _Interface, b: _Interface) -> str:
    """What is different about inputs and outputs: names, order, element types; "" when nothing is."""
    for kind, ours, theirs in (
        ("inputs", a.inputs, b.inputs),
        ("outputs", a.outputs, b.outputs),
        ("overridable initializers", a.overridable, b.overridable),
    ):
        if ours != theirs:
            return f"the {kind} differ: {_signature(ours)} against {_signature(theirs)}"
    return ""


def _signature(values: Sequence[tuple[str, str]]) -> str:
    return "(" + ", ".join(f"{n}: {t}" for n, t in values) + ")"


def _judge(
    sess: onnxruntime.InferenceSession, sample: Sample, expected: Mapping[str, ort.Result], config: VerifyConfig
) -> RunReport:
    try:
        results = ort.run(sess, sample.feeds)
    except ort.ORT_ERRORS as exc:
        return RunReport(sample.label, sample.shapes, (), " ".join(str(exc).split()))
    return RunReport(sample.label, sample.shapes, compare_results(expected, results, config))


def _by_nodes(
    run: RunReport,
    sess: onnxruntime.InferenceSession,
    pair: tuple[Sample, Mapping[str, ort.Result]],
    candidate: ort.Source,
    libraries: tuple[str | os.PathLike[str], Libraries],
    config: VerifyConfig,
    step: Callable[[str], None],
) -> RunReport:
    """The run judged node by node, if the candidate has products of dequantised numbers in integers (see steps.py)."""
    model = steps.load(candidate)
    if not steps.stepped(model):
        return run
    step(f"running every node of {_called(libraries[0])} on the original's values")
    sample, expected = pair
    found = steps.node_by_node(model, sample.feeds, *libraries)
    problems = []
    for r in found:
        plain = None if r.most else compare_values(r.node, r.reference, r.candidate, config)
        problems.append(
            r.problem() if plain is None else "" if plain.ok else f"node {r.node}: {plain.problem or 'differs'}"
        )
    problem = next(filter(None, problems), "")
    moved, total = sum(r.moved for r in found if r.most), sum(r.reference.size for r in found if r.most)
    told = f"{len(found)} results one by one on the original's values: {moved} of {total} elements a step off"
    results = ort.run(sess, sample.feeds)
    outputs = []
    for out in run.outputs:
        value, mine = expected.get(out.name), results.get(out.name)
        if out.ok or out.problem or not isinstance(value, np.ndarray) or not isinstance(mine, np.ndarray):
            outputs.append(out)
            continue
        why = problem or steps.end_problem(value, mine)
        outputs.append(replace(out, ok=not why, problem=why, tolerance="node by node"))
    return replace(run, outputs=tuple(outputs), nodes=told)
