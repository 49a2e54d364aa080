"""One value of two models: do they agree, and where not.

An element agrees when

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from onnxfuse.config import Precision, VerifyConfig
from onnxfuse.verify import ort

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
