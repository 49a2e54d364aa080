"""Compare two models in onnxruntime, output by output. The reference runs at ORT_DISABLE_ALL; values.py judges."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort, steps
from onnxfuse.verify.bench import Timing
from onnxfuse.verify.inputs import InputSpec, Sample
from onnxfuse.verify.running import How, Interface, Model, Results, opened, samples
from onnxfuse.verify.values import OutputReport, compare_results, compare_values

Pair = tuple[Sample, Mapping[str, ort.Result]]  # inputs, and what the reference makes of them


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
    parts     sessions, one after another, that a run of the candidate took: 1, unless its weights are too many for one
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
    parts: int = 1

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
            parts = f", in {self.parts} parts" if self.parts > 1 else ""
            return f"agrees {with_what}: {len(self.runs)} run(s), {len(self.runs[0].outputs)} output(s){parts}{nodes}"
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
    custom_op_libraries: ort.Libraries = (),
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
    custom_op_libraries: ort.Libraries = (),
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

    def load(k: int, interface: Interface) -> _Contender:
        how = How(sets[k], level, threads, _called(libraries[k]), step)
        return _load(candidate, how, config, interface, lean and libraries[k] is not None)

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
        runs, error = [], c.error
        try:
            for pair, outcome in zip(pairs, _outcomes(c, pairs), strict=False):
                run = _judge(*pair, outcome, config)
                if library is not None and c.model is not None and not run.ok and not run.error:
                    step(f"running every node of {_called(library)} on the original's values")
                    found = c.model.node_by_node(pair[0].feeds, library, custom_op_libraries)
                    run = _by_nodes(run, found, pair[1], outcome, config) if found else run
                runs.append(run)
        except UsageError as exc:  # a part of it does not load
            c, error = _Contender(None), f"{exc.what}: {exc.why}"
        narrowed = _narrowed(interface.specs, c.specs)
        ours = (str(library),) if library is not None else ()
        parts = c.model.parts if c.model is not None else 1
        return Report(*names, ours, tuple(runs), error, narrowed, c.model is not None, parts=parts)

    return tuple(report(k, library) for k, library in enumerate(libraries))


def original(
    reference: ort.Source,
    *,
    config: VerifyConfig,
    custom_op_libraries: ort.Libraries = (),
    threads: int = 0,
    step: Callable[[str], None] | None = None,
    given: Sequence[Sample] = (),
    narrower: Callable[[Interface], tuple[InputSpec, ...]] | None = None,
) -> Original:
    """Run the reference on `given`, or on the inputs that `config` asks for.

    `narrower` gives the candidate's inputs: where the reference has free dimensions, those are respected.
    """
    step = step or _silent
    how = How(custom_op_libraries, threads=threads, called="the original model", step=step)
    expected = opened(reference, how, config)
    interface = expected.interface
    wanted = interface.specs
    if narrower is not None and any(s.symbols for s in wanted):
        wanted = _narrower(wanted, narrower(interface))
    step("running the original model")
    pairs = [(s, expected.run(s.feeds)) for s in given] or list(samples(expected, config, wanted))
    return Original(interface, wanted, pairs)


def _silent(step: str) -> None:
    """Nobody wants to know."""


def _called(library: str | os.PathLike[str] | None) -> str:
    return f"the optimized model {'without' if library is None else 'with'} its library"


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


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """What the reference says: its interface, the inputs asked for (`wanted`), the samples and their results."""

    interface: Interface
    wanted: tuple[InputSpec, ...]
    pairs: Sequence[Pair]


@dataclass(frozen=True, slots=True)
class _Contender:
    """A candidate that can be run, or why there is none."""

    model: Model | None
    specs: tuple[InputSpec, ...] = ()
    error: str = ""


def _load(candidate: ort.Source, how: How, config: VerifyConfig, expected: Interface, lean: bool) -> _Contender:
    try:
        model = opened(candidate, how, config, lean=lean)
    except UsageError as exc:
        return _Contender(None, error=f"{exc.what}: {exc.why}")
    return _Contender(model, model.interface.specs, _interface_difference(expected, model.interface))


def _outcomes(c: _Contender, pairs: Sequence[Pair]) -> Iterator[Results | Exception]:
    """What the candidate makes of the samples; nothing where it cannot be compared."""
    if c.model is not None and not c.error:
        yield from c.model.run_each([sample for sample, _ in pairs])


def _interface_difference(a: Interface, b: Interface) -> str:
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
    sample: Sample, expected: Mapping[str, ort.Result], outcome: Results | Exception, config: VerifyConfig
) -> RunReport:
    if isinstance(outcome, Exception):
        return RunReport(sample.label, sample.shapes, (), " ".join(str(outcome).split()))
    return RunReport(sample.label, sample.shapes, compare_results(expected, outcome, config))


def _by_nodes(
    run: RunReport,
    found: Sequence[steps.NodeResult],
    expected: Mapping[str, ort.Result],
    results: Results | Exception,
    config: VerifyConfig,
) -> RunReport:
    """The run judged by what every node makes of the original's values (see steps.py)."""
    assert not isinstance(results, Exception)
    problems = []
    for r in found:
        plain = None if r.most else compare_values(r.node, r.reference, r.candidate, config)
        problems.append(
            r.problem() if plain is None else "" if plain.ok else f"node {r.node}: {plain.problem or 'differs'}"
        )
    problem = next(filter(None, problems), "")
    moved, total = sum(r.moved for r in found if r.most), sum(r.reference.size for r in found if r.most)
    told = f"{len(found)} results one by one on the original's values: {moved} of {total} elements a step off"
    outputs = []
    for out in run.outputs:
        value, mine = expected.get(out.name), results.get(out.name)
        if out.ok or out.problem or not isinstance(value, np.ndarray) or not isinstance(mine, np.ndarray):
            outputs.append(out)
            continue
        why = problem or steps.end_problem(value, mine)
        outputs.append(replace(out, ok=not why, problem=why, tolerance="node by node"))
    return replace(run, outputs=tuple(outputs), nodes=told)
