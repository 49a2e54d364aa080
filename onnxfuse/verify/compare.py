"""Compare two models in onnxruntime, output by output.

The reference runs at ORT_DISABLE_ALL. An element agrees when

    |candidate - reference| <= rtol * |reference| + max(scale * max |reference| over the output, atol)

Sums are reassociated (blocked, vectorised, fused multiply-add), so what a deep net loses is relative to the size of its
values, not to each value: hence the part that scales with the output (with 1 where the whole reference is zero). The
floor `atol` is a few eps of 1. Defaults by dtype:

    dtype             rtol     scale    atol
    f32               1e-4     1e-5     1e-6
    f64               1e-10    1e-12    2e-15
    f16, bf16, f8     8 eps    8 eps    0
    f32 with weights in bf16 (--precision bf16): 2**-7, 2**-7, 0
    integers, bool, strings: equal

NaN agrees with NaN in the same place only, an infinity with the same infinity only. +0 and -0 agree and are counted.
Models whose products of dequantised numbers run in integers are judged node by node where the above fails (steps.py).
Integers and bools that hang on a float comparison can flip by one rounding: every flip is counted, and fails unless
`allow_mismatches` (or `atol`, for integers) says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime

from onnxfuse.config import Precision, VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort, steps
from onnxfuse.verify.bench import Timing
from onnxfuse.verify.inputs import InputSpec, Sample, samples, specs
from onnxfuse.verify.mapped import Mapped, mapped_session

Libraries = Sequence[str | os.PathLike[str]]

_BF16_EPS = 2.0**-7  # of weights rounded to bf16: twice the largest relative error of one
_HALF_EPS = 8  # units of eps for the types that are rounded after each op


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference: rtol * |reference| + max(atol, scale * max |reference|)."""

    rtol: float = 0.0
    scale: float = 0.0
    atol: float = 0.0

    def absolute(self, largest: float) -> float:
        """The part that does not depend on the element."""
        return max(self.atol, self.scale * (largest if largest > 0 else 1.0))

    def __str__(self) -> str:
        parts = [f"rtol {self.rtol:g}"] if self.rtol else []
        parts += [f"{self.scale:g} of max"] if self.scale else []
        parts += [f"{'at least ' if self.scale else 'atol '}{self.atol:g}"] if self.atol else []
        return ", ".join(parts) or "exact"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One element that differs."""

    index: tuple[int, ...]
    reference: str
    candidate: str


@dataclass(frozen=True, slots=True)
class OutputReport:
    """One output of one run. `problem` is set when the values could not be compared element by element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ok: bool
    tolerance: str
    problem: str = ""
    mismatches: int = 0
    allowed: int = 0
    total: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    nans: int = 0  # in the reference
    signed_zeros: int = 0  # +0 against -0
    first: Mismatch | None = None


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


# ---- tolerances


def default_tolerance(dtype: np.dtype, precision: Precision = Precision.F32) -> Tolerance:
    """What two correct implementations may differ by.

    The absolute floor (8 eps) is for outputs that are saturated: onnxruntime's own sigmoid and tanh clamp their
    argument, so the tail of a function with values around 1 is only good to an eps of 1.
    """
    if dtype == np.float32 and precision is Precision.BF16:
        return Tolerance(_BF16_EPS, _BF16_EPS)
    if dtype == np.float32:
        return Tolerance(1e-4, 1e-5, 1e-6)
    if dtype == np.float64:
        return Tolerance(1e-10, 1e-12, 2e-15)
    if dtype.kind == "c":
        return Tolerance(1e-4, 1e-5)
    if dtype == np.float16 or is_small_float(dtype):
        eps = _HALF_EPS * float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
        return Tolerance(eps, eps)
    return Tolerance()


def is_small_float(dtype: np.dtype) -> bool:
    """A float type that comes from ml_dtypes (numpy calls its kind V)."""
    return dtype.kind in "Vf" and "float" in dtype.name and dtype not in (np.float16, np.float32, np.float64)


def tolerance_for(name: str, dtype: np.dtype, config: VerifyConfig) -> Tolerance:
    """The default for the dtype, overridden by the flags; an explicit atol replaces the part that scales."""
    tol = default_tolerance(dtype, config.precision)
    exact = tol == Tolerance()
    rtol = config.output_rtol.get(name, None if exact else config.rtol)
    atol = config.output_atol.get(name, None if exact else config.atol)
    if rtol is not None:
        tol = replace(tol, rtol=rtol)
    if atol is not None:
        tol = replace(tol, atol=atol, scale=0.0)
    return tol


# ---- one output


def leaves(name: str, value: ort.Result) -> Iterator[tuple[str, ort.Result]]:
    """Arrays inside a result: `out`, `out[0]` of a sequence, `out{key}` of a map."""
    if isinstance(value, list):
        yield f"{name}[]", np.asarray(len(value))
        for k, item in enumerate(value):
            yield from leaves(f"{name}[{k}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{name}{{{key}}}", item)
    else:
        yield name, value


def compare_results(
    reference: Mapping[str, ort.Result], candidate: Mapping[str, ort.Result], config: VerifyConfig
) -> tuple[OutputReport, ...]:
    """Every output of the reference against the candidate's of the same name."""
    out: list[OutputReport] = []
    for name, value in reference.items():
        theirs = dict(leaves(name, candidate.get(name)))
        for leaf, expected in leaves(name, value):
            out.append(compare_values(leaf, expected, theirs.get(leaf), config, of=name))
    return tuple(out)


def compare_values(
    name: str, reference: ort.Result, candidate: ort.Result, config: VerifyConfig, of: str = ""
) -> OutputReport:
    """One value. `of` is the model output it belongs to, for tolerances given per output."""
    if reference is None and candidate is None:
        return OutputReport(name, "none", (), True, "exact")
    if reference is None or candidate is None:
        here, there = _shape_text(reference), _shape_text(candidate)
        return OutputReport(name, "none", (), False, "exact", f"reference is {here}, candidate is {there}")
    a, b = np.asarray(reference), np.asarray(candidate)
    tol = tolerance_for(of or name, a.dtype, config)
    if a.dtype != b.dtype or a.shape != b.shape:
        problem = f"reference is {_shape_text(a)}, candidate is {_shape_text(b)}"
        return OutputReport(name, a.dtype.name, a.shape, False, str(tol), problem, total=a.size)
    allowed = config.allow_mismatches.get(of or name, config.allow_mismatches.get("", 0))
    report = _exact(name, a, b) if a.dtype.kind in "OUSb" else _numeric(name, a, b, tol)
    return replace(report, tolerance=str(tol), allowed=allowed, ok=report.mismatches <= allowed)


def _shape_text(value: ort.Result) -> str:
    if value is None:
        return "absent"
    array = np.asarray(value)
    return f"{array.dtype.name}[{','.join(map(str, array.shape))}]"


def _exact(name: str, a: np.ndarray, b: np.ndarray) -> OutputReport:
    bad = np.asarray(a != b, dtype=np.bool_)
    return OutputReport(
        name, a.dtype.name, a.shape, True, "", mismatches=int(bad.sum()), total=a.size, first=_first(a, b, bad)
    )


def _numeric(name: str, a: np.ndarray, b: np.ndarray, tol: Tolerance) -> OutputReport:
    """Differences in f64 (exact for every type but 64-bit integers, whose equality is asked of the integers)."""
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    largest = float(np.max(np.abs(x), where=np.isfinite(x), initial=0.0))
    with np.errstate(all="ignore"):  # infinities and NaN are judged by `same`
        diff = np.where(finite, np.abs(x - y), 0.0)
        same = (a == b) | (np.isnan(x) & np.isnan(y))
        close = finite & (diff <= tol.rtol * np.abs(x) + tol.absolute(largest))
        rel = np.where(diff > 0, diff / np.abs(x), 0.0)
    bad = ~(same | close) if tol != Tolerance() else ~np.asarray(same)
    return OutputReport(
        name,
        a.dtype.name,
        a.shape,
        True,
        "",
        mismatches=int(bad.sum()),
        total=a.size,
        max_abs=float(diff.max(initial=0.0)),
        max_rel=float(np.max(rel, where=np.isfinite(rel), initial=0.0)),
        max_ulp=_max_ulp(a, b, finite),
        nans=int(np.isnan(x).sum()),
        signed_zeros=int(((x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))).sum()) if wide is np.float64 else 0,
        first=_first(a, b, np.asarray(bad)),
    )


_ULP_INTS: dict[int, type[np.signedinteger]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _max_ulp(a: np.ndarray, b: np.ndarray, finite: np.ndarray) -> int:
    """Largest distance in representable numbers; 0 for types that are not floats."""
    if not (a.dtype.kind == "f" or is_small_float(a.dtype)) or not bool(finite.any()):
        return 0
    steps = _ULP_INTS[a.dtype.itemsize]
    lowest = int(np.iinfo(steps).min)

    def ordered(v: np.ndarray) -> np.ndarray:
        """Integers in the order of the floats, -0 and +0 both 0."""
        raw = np.ascontiguousarray(v).reshape(v.shape).view(steps).astype(np.int64)
        return np.where(raw < 0, lowest - raw, raw)

    x, y = ordered(a)[finite], ordered(b)[finite]
    if a.dtype.itemsize < 8:
        return int(np.abs(x - y).max())
    # The distance of two f64 may not fit i64: subtract as unsigned, which wraps to the right answer.
    far = np.where(x > y, x.astype(np.uint64) - y.astype(np.uint64), y.astype(np.uint64) - x.astype(np.uint64))
    return int(far.max())


def _first(a: np.ndarray, b: np.ndarray, bad: np.ndarray) -> Mismatch | None:
    if not bool(bad.any()):
        return None
    flat = int(np.argmax(bad.ravel()))
    index = tuple(int(i) for i in np.unravel_index(flat, a.shape))
    return Mismatch(index, _element(a, index), _element(b, index))


def _element(array: np.ndarray, index: tuple[int, ...]) -> str:
    """The shortest text that reads back as the same element."""
    return str(array[index])


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
