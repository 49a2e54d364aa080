"""Sliding windows over planes: depthwise convolution and pooling.

In: a kernel that reduces, over at most two static tap axes, one load whose last index slides along the output's unit
stride axis (`sx*x + dx*kx + cx`) and, in two dimensions, whose last but one slides along another output axis. A
pointwise expression of it that does not depend on the place in the window may stand for it (a prologue). A factor that
does not vary along the output line (the weight of a depthwise convolution) may multiply it. Out: a `Window` with
the strides, dilations and offsets as numbers, or a Refusal. Guards, if any, must say exactly that the element lies in
the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.analysis.roles import Parts, affine, pieces, unit_axis
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Var, acc, axes_of, i64, lit, loads, substitute
from onnxfuse.ir.kernel import Kernel, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.prims import Prim
from onnxfuse.ir.simplify import dim_expr, poly, simplify
from onnxfuse.ir.types import Dim

MAX_MULTIPLIER = 4  # output channels per input channel up to which planes are still computed one by one


@dataclass(frozen=True, slots=True)
class Slide:
    """One dimension of a window: source index = stride * out + dilation * tap + offset, source extent `size`.

    `out` and `tap` are None where they have extent 1.
    """

    out: Axis | None
    tap: Axis | None
    stride: int
    dilation: int
    offset: int
    size: Dim

    @property
    def taps(self) -> int:
        if self.tap is None:
            return 1
        assert isinstance(self.tap.extent, int)
        return self.tap.extent

    @property
    def reach(self) -> int:
        """Source elements one output needs, first to last."""
        return self.dilation * (self.taps - 1) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """out[planes, y, x] = combine over taps of source[.., y', x'] (times weight), then the epilogue.

    x, y     the line of unit stride, and the axis across lines (y.out None: a single line)
    value    what is combined: `source` itself or an expression of it and of loads that depend on planes only
    weight   depends on planes and taps only; None = 1
    pad      value of elements outside the source
    """

    planes: tuple[Axis, ...]
    y: Slide
    x: Slide
    source: Load
    value: Expr
    weight: Expr | None
    pad: Lit
    combine: Prim
    init: Lit
    acc: DType
    finish: Expr
    result: Load | None
    stores: tuple[Store, ...]

    @property
    def taps(self) -> int:
        return self.x.taps * self.y.taps


def window(kernel: Kernel) -> Window | Refusal:
    """The window of a kernel, or why it has none."""
    parts = pieces(kernel)
    if isinstance(parts, Refusal):
        return parts
    x_axis = unit_axis(parts.stores[0])
    if x_axis is None:
        return Refusal("WINDOW_FORM", "the output has no unit stride axis")
    weight, guarded = _weight(parts, x_axis)
    conds, value, pad = _guarded(guarded)
    source = _source(value, x_axis)
    if source is None or value.dtype is not parts.acc:
        return Refusal("WINDOW_FORM", "the operand is not a pointwise expression of one load along the line")
    x = _slide(parts, source, len(source.index) - 1, x_axis)
    y = _across(parts, source, x)
    if x is None or y is None:
        return Refusal("WINDOW_FORM", "the indices do not slide with constant steps")
    taps = {a for a in (x.tap, y.tap) if a is not None}
    if set(parts.k) != taps or not all(isinstance(a.extent, int) for a in taps):
        return Refusal("WINDOW_TAPS", "taps are not one static axis per dimension")
    lead = source.index[: len(source.index) - (1 if y.out is None and y.tap is None else 2)]
    sliding = taps | {a for a in (x.out, y.out) if a is not None}
    rest = substitute(value, {source: acc(source.dtype)})  # no number in its place: conditions on it could fold away
    if axes_of(*lead, rest) & sliding or (weight is not None and axes_of(weight) & (sliding - taps)):
        return Refusal("WINDOW_FORM", "another index slides, or the weight varies along the output")
    alone = set() if weight is None else axes_of(weight) - taps - axes_of(value)
    if any(not isinstance(a.extent, int) or a.extent > MAX_MULTIPLIER for a in alone):
        return Refusal("WINDOW_ROWS", "the weight has output axes of its own: a matrix product")
    if not _exact(conds, source, sliding):
        return Refusal("WINDOW_GUARD", "the guard is not the extent of the source")
    if weight is not None and pad.value != 0:
        return Refusal("WINDOW_GUARD", f"padding {pad.value} under a product")
    planes = tuple(a for a in parts.outer if a not in sliding)
    return Window(
        planes, y, x, source, value, weight, pad, parts.combine, parts.init, parts.acc, parts.finish,
        parts.result, parts.stores,
    )  # fmt: skip


def _source(value: Expr, x: Axis) -> Load | None:
    """The one load of `value` that varies along the output line."""
    found = [ld for ld in loads(value) if ld.index and x in axes_of(ld)]
    return found[0] if len(found) == 1 else None


def _weight(parts: Parts, x: Axis) -> tuple[Expr | None, Expr]:
    """(weight, the rest) of a product; a body that is no product has no weight."""
    body = parts.body
    if isinstance(body, Apply) and body.prim.name == "mul" and parts.combine.name == "add":
        a, b = body.args
        if x not in axes_of(a) and x in axes_of(b):
            return a, b
        if x not in axes_of(b) and x in axes_of(a):
            return b, a
    return None, body


def _guarded(e: Expr) -> tuple[list[Expr], Expr, Lit]:
    """(conditions, value, value outside)."""
    conds: list[Expr] = []
    pad: Lit | None = None
    while isinstance(e, Apply) and e.prim.name == "where" and isinstance(e.args[2], Lit):
        if pad is not None and pad is not e.args[2]:
            break
        conds.append(e.args[0])
        pad = e.args[2]
        e = e.args[1]
    flat: list[Expr] = []
    while conds:
        c = conds.pop()
        if isinstance(c, Apply) and c.prim.name == "and":
            conds.extend(c.args)
        else:
            flat.append(c)
    return flat, e, pad if pad is not None else lit(0, e.dtype)


def _slide(parts: Parts, source: Load, d: int, out: Axis | None) -> Slide | None:
    """Dimension d of the source as a slide along `out`."""
    e = simplify(source.index[d])
    used = axes_of(e)
    if out is not None and out not in used:
        return None
    taps = [a for a in parts.k if a in used]
    if len(taps) > 1 or used - {*taps, out}:
        return None
    tap = taps[0] if taps else None
    stride = 1 if out is None else affine(e, out)
    dilation = 1 if tap is None else affine(e, tap)
    if stride is None or dilation is None or stride < 1 or dilation < 1:
        return None
    rest = {m: c for m, c in poly(e).items() if not any(isinstance(a, Var) for a in m)}
    if any(m for m in rest):
        return None
    return Slide(out, tap, stride, dilation, rest.get((), 0), source.source.tensor.shape[d])


def _across(parts: Parts, source: Load, x: Slide | None) -> Slide | None:
    """The slide of the last dimension but one; a trivial one when no tap is left for it."""
    if x is None:
        return None
    rest = [a for a in parts.k if a is not x.tap]
    if not rest:
        return Slide(None, None, 1, 1, 0, 1)
    d = len(source.index) - 2
    if d < 0 or rest[0] not in axes_of(source.index[d]):
        return None
    outs = [a for a in parts.outer if a in axes_of(source.index[d])]
    return _slide(parts, source, d, outs[0] if outs else None)


def _exact(conds: list[Expr], source: Load, sliding: set[Axis]) -> bool:
    """Every condition is a bound of the source's extent on a sliding index."""
    allowed: set[Expr] = set()
    for e, d in zip(source.index, source.source.tensor.shape, strict=True):
        if axes_of(e) & sliding:
            allowed |= {simplify(i64(0) <= e), simplify(e < dim_expr(d)), i64(0) <= e, e < dim_expr(d)}
    return all(c in allowed for c in conds)
