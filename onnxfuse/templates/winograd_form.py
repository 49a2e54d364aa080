"""Which kernels are convolutions that Winograd's algorithm takes: stride 1, constant weights, one or two windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxfuse.analysis.roles import Parts, pieces, unit_axis
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import FALSE, Apply, Expr, Lit, Load, i64, var
from onnxfuse.ir.kernel import Kernel, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.simplify import dim_expr, poly, simplify
from onnxfuse.ir.types import Dim

WINDOWS = frozenset({(3, 3), (1, 3), (3, 1), (5, 5), (1, 5), (5, 1)})  # taps down and across


@dataclass(frozen=True, slots=True, eq=False)
class Conv:
    """out[n, f, y, x] = sum over c, ky, kx of source[n, c, y + ky - top, x + kx - left] * weight[f, c, ky, kx].

    n, f and c are None where they have extent 1; y is None where the source has no lines.
    """

    n: Axis | None
    f: Axis | None
    y: Axis | None
    x: Axis
    source: Load
    weight: Load
    taps: tuple[int, int]  # down, across
    size: tuple[Dim, Dim]  # of the source
    top: int
    left: int
    finish: Expr
    result: Load | None
    stores: tuple[Store, ...]

    @property
    def channels(self) -> int:
        found = self.weight.source.tensor.shape[1]
        assert isinstance(found, int)
        return found

    @property
    def features(self) -> int:
        found = self.weight.source.tensor.shape[0]
        assert isinstance(found, int)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Slide:
    """A dimension that windows slide along: its extent, the indices of source and weights, the axis of the taps."""

    extent: Dim
    index: Expr
    tap: Axis | None
    taps: int


def conv(kernel: Kernel) -> Conv | Refusal:
    """The convolution of a kernel, or why it is none that this template takes."""
    parts = pieces(kernel)
    if isinstance(parts, Refusal):
        return parts
    if parts.combine.name != "add" or parts.init.value != 0 or parts.acc is not DType.F32:
        return Refusal("WINOGRAD_FORM", f"accumulates with {parts.combine} in {parts.acc}")
    guards, factors = _product(parts.body)
    if factors is None:
        return Refusal("WINOGRAD_FORM", "the summed expression is not a product of two bare loads")
    x = unit_axis(parts.stores[0])
    if x is None:
        return Refusal("WINOGRAD_FORM", "the output has no unit stride axis")
    for source, weight in (factors, factors[::-1]):
        if weight.source in kernel.consts and source.source not in kernel.consts:
            return _assign(parts, source, weight, guards, x)
    return Refusal("WINOGRAD_WEIGHT", "the weights are no constant")


def _product(body: Expr) -> tuple[list[Expr], tuple[Load, Load] | None]:
    """Conditions and factors of a product of loads; outside of the conditions it is zero."""
    conds: list[Expr] = []
    body = _peeled(body, conds)
    if not (isinstance(body, Apply) and body.prim.name == "mul"):
        return conds, None
    a, b = (_peeled(e, conds) for e in body.args)
    return conds, (a, b) if isinstance(a, Load) and isinstance(b, Load) else None


def _peeled(e: Expr, conds: list[Expr]) -> Expr:
    """`e` without its guards, which go to `conds`, conjunctions taken apart."""
    while isinstance(e, Apply) and e.prim.name == "where" and isinstance(e.args[2], Lit) and e.args[2].value == 0:
        todo = [e.args[0]]
        while todo:
            cond = todo.pop()
            if isinstance(cond, Apply) and cond.prim.name == "and":
                todo.extend(cond.args)
            else:
                conds.append(cond)
        e = e.args[1]
    return e


def _assign(parts: Parts, source: Load, weight: Load, guards: list[Expr], x: Axis) -> Conv | Refusal:
    form = Refusal("WINOGRAD_FORM", "not a plain convolution of one group")
    if source.dtype is not DType.F32 or len(source.index) != len(weight.index) or len(source.index) < 3:
        return form
    f, c, *inner = (_axis(i) for i in weight.index)
    shape = weight.source.tensor.shape
    static = [d for d in shape if isinstance(d, int)]
    if len(static) != len(shape):
        return Refusal("WINOGRAD_WINDOW", f"weights {list(shape)}")
    if not all(t is not None or d == 1 for t, d in zip((f, c, *inner), shape, strict=True)):
        return form
    if set(parts.k) != {a for a in (c, *inner) if a is not None} or f in parts.k or (f is None and shape[0] != 1):
        return form
    n = _axis(source.index[0])
    if n is not None and (n is f or n not in parts.outer):
        return form
    dims = source.source.tensor.shape
    if not _is(source.index[0], n) or not _is(source.index[1], c) or (n is None and dims[0] != 1):
        return form
    if dims[1] != shape[1]:
        return form
    slides = [_Slide(*s) for s in zip(dims[2:], source.index[2:], inner, static[2:], strict=True)]
    slides = [s for s in slides if not (s.extent == 1 and s.taps == 1 and _is(s.index, None))]
    rest = [a for a in parts.outer if a not in (n, f, x)]
    if len(slides) not in (1, 2) or len(rest) != len(slides) - 1:
        return Refusal("WINOGRAD_FORM", "the output has not one or two axes that slide")
    down, across = ([_Slide(1, i64(0), None, 1)] * (2 - len(slides)) + slides)[:2]
    taps = (down.taps, across.taps)
    if taps not in WINDOWS:
        return Refusal("WINOGRAD_WINDOW", f"weights {list(shape)}")
    y = rest[0] if rest else None
    top, left = _pad(down, y), _pad(across, x)
    if top is None or left is None:
        return Refusal("WINOGRAD_STEPS", "strides or dilations are not 1, or the padding is as long as the window")
    if not _exact(guards, slides):
        return Refusal("WINOGRAD_GUARD", "the guard is not the extent of the source")
    size = (down.extent, across.extent)
    return Conv(n, f, y, x, source, weight, taps, size, top, left, parts.finish, parts.result, parts.stores)


def _axis(e: Expr) -> Axis | None:
    """The axis an index is the variable of."""
    return getattr(e, "axis", None)


def _is(e: Expr, axis: Axis | None) -> bool:
    return (isinstance(e, Lit) and e.value == 0) if axis is None else e is var(axis)


def _pad(s: _Slide, out: Axis | None) -> int | None:
    """The padding: p where the index is out + tap - p."""
    rest = dict(poly(simplify(s.index)))
    for axis in (out, s.tap):
        if axis is not None and rest.pop((var(axis),), 0) != 1:
            return None
    pad = -rest.pop((), 0)
    return pad if not rest and 0 <= pad < s.taps else None


def _exact(guards: Sequence[Expr], slides: Sequence[_Slide]) -> bool:
    """Every condition is a bound of the source's extent on one of its sliding indices."""
    allowed: set[Expr] = set()
    for s in slides:
        e, d = s.index, dim_expr(s.extent)
        allowed |= {simplify(i64(0) <= e), simplify(e < d), i64(0) <= e, e < d}
    return FALSE not in guards and all(g in allowed for g in guards)
