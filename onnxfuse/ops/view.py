"""Ops that only move elements: an output shape and an index map. Naive on purpose: simplification is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import TRUE, Expr, Lit, apply, cast, eq, i64, lit, where
from onnxfuse.ir.simplify import as_dim, dim_expr, known, poly, same, simplify
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import (
    Loops,
    Tensor,
    axis_of,
    between,
    broadcast_load,
    broadcast_shape,
    chosen,
    declined,
    equal_extents,
    flatten,
    guarded,
    maximum,
    minimum,
    named_axes,
    product,
    unflatten,
)
from onnxfuse.ops.table import alias, shape_op, view


@alias
def Identity(x):
    """The value itself."""


def _dropped(x: Tensor, mask: DType, value: bool | None, outputs: int) -> list[Loops]:
    """Inference: the input, and a mask of one value (None: what onnxruntime puts there is not specified)."""
    same_ = Loops(x.shape, lambda *i: x[i], x.dtype)
    if outputs == 1:
        return [same_]
    if value is None:
        return [same_, declined(x.shape, mask, "UN_ARITY", "Dropout with its mask output is not implemented")]
    return [same_, Loops(x.shape, lambda *_: lit(value, mask), mask)]


@view(name="Dropout")
def Dropout_1(x, *, ratio=0.5, outputs):
    """Inference: the input; the mask is of its type."""
    return _dropped(x, x.dtype, None, outputs)


@view(name="Dropout", since=10)
def Dropout_10(x, *, ratio=0.5, outputs):
    """Inference: the input; the mask is bool."""
    return _dropped(x, DType.BOOL, None, outputs)


@view(since=12)
def Dropout(x, ratio=None, training_mode=None, *, seed=0, outputs):
    """The input, unless training_mode may be true."""
    flag = None if training_mode is None else training_mode.immediate
    if training_mode is not None and (flag is None or flag.value):
        raise Unsupported("UN_ATTR", "Dropout in training mode (or maybe so)")
    return _dropped(x, DType.BOOL, True, outputs)


# --- shape only ----------------------------------------------------------------------------------------------------
@shape_op
def Shape(x, *, start=0, end=None):
    """Dimensions start..end as an i64 vector."""
    rank = x.rank
    lo = min(max(start + rank if start < 0 else start, 0), rank)
    stop = rank if end is None else end
    hi = min(max(stop + rank if stop < 0 else stop, 0), rank)
    dims = list(x.shape[lo:hi])
    return Loops([len(dims)], lambda i: dim_expr(dims[int(str(as_dim(i)))]), DType.I64)


@shape_op
def Size(x):
    """Number of elements."""
    return Loops([], lambda: dim_expr(product(x.shape)), DType.I64)


# --- reshapes ------------------------------------------------------------------------------------------------------
def reshaped(x: Tensor, shape: Sequence[Dim]) -> Loops:
    """The same elements in row-major order under another shape."""
    dims = tuple(shape)
    needs = equal_extents((product(dims), product(x.shape)))
    return Loops(dims, lambda *i: x[unflatten(flatten(i, dims), x.shape)], x.dtype, needs=needs)


def _is_known(shape: Tensor) -> None:
    """Another shape of the same memory costs the runtime nothing; a kernel that learns it late would copy."""
    if shape.known is None and shape.type.size != 0:
        raise Unsupported("NF_FREE_VIEW", "only renames memory, to a shape known at run time; costs nothing there")


def reshape_dims(x: Tensor, wanted: Sequence[Dim], allowzero: int = 0) -> list[Dim]:
    """Resolve 0 (copy) and -1 (infer) of a Reshape target. Raises Unsupported when it cannot be resolved."""
    dims: list[Dim] = []
    infer_at = None
    for k, d in enumerate(wanted):
        if isinstance(d, int) and d == -1:
            infer_at = k
            dims.append(1)
        elif isinstance(d, int) and d == 0 and not allowzero:
            if k >= x.rank:
                raise Unsupported("UN_SHAPE_MISMATCH", f"Reshape copies dimension {k} of a rank-{x.rank} tensor")
            dims.append(x.shape[k])
        else:
            dims.append(d)
    if infer_at is not None:
        rest = product(dims)
        if isinstance(rest, int) and rest == 0:
            dims[infer_at] = 0
        else:
            dims[infer_at] = as_dim(dim_expr(product(x.shape)) // dim_expr(rest))
    return dims


@view(since=5)
def Reshape(x, shape, *, allowzero=0):
    """Another shape, same row-major order; 0 copies a dimension (unless allowzero), -1 is inferred."""
    _is_known(shape)
    return reshaped(x, reshape_dims(x, shape.dims(), allowzero))


@view
def Flatten(x, *, axis=1):
    """Two dimensions: everything before `axis`, everything from it on."""
    k = axis + x.rank if axis < 0 else axis
    return reshaped(x, [product(x.shape[:k]), product(x.shape[k:])])


def _squeeze(x: Tensor, axes: Sequence[int] | None) -> Loops:
    if axes is None:
        unknown = [d for d in x.shape if not isinstance(d, int)]
        if unknown:
            raise Unsupported(
                "UN_DATA_DEPENDENT", "Squeeze without axes on run-time dimensions", f"dimension {unknown[0]}"
            )
        drop = [k for k, d in enumerate(x.shape) if d == 1]
    else:
        drop = [axis_of(a, x.rank) for a in axes]
    keep = [k for k in range(x.rank) if k not in drop]

    def body(*i: Expr) -> Expr:
        at = dict(zip(keep, i, strict=True))
        return x[tuple(at.get(k, i64(0)) for k in range(x.rank))]

    needs = equal_extents(*((x.shape[k], 1) for k in drop))
    return Loops([x.shape[k] for k in keep], body, x.dtype, needs=needs)


@view(name="Squeeze")
def Squeeze_1(x, *, axes=None):
    """Drop dimensions of extent 1, axes as attribute."""
    return _squeeze(x, axes)


@view(since=13)
def Squeeze(x, axes=None):
    """Drop dimensions of extent 1."""
    if axes is not None:
        _is_known(axes)
    return _squeeze(x, None if axes is None else axes.ints())


def _unsqueeze(x: Tensor, axes: Sequence[int]) -> Loops:
    rank = x.rank + len(axes)
    new = {axis_of(a, rank) for a in axes}
    old = [k for k in range(rank) if k not in new]
    shape: list[Dim] = [1] * rank
    for k, d in zip(old, x.shape, strict=True):
        shape[k] = d
    return Loops(shape, lambda *i: x[tuple(i[k] for k in old)], x.dtype)


@view(name="Unsqueeze")
def Unsqueeze_1(x, *, axes):
    """Insert dimensions of extent 1, axes as attribute."""
    return _unsqueeze(x, axes)


@view(since=13)
def Unsqueeze(x, axes):
    """Insert dimensions of extent 1."""
    _is_known(axes)
    return _unsqueeze(x, axes.ints())


@view
def Transpose(x, *, perm=None):
    """Permute dimensions; reverses them by default."""
    order = list(perm) if perm is not None else list(reversed(range(x.rank)))

    def body(*i: Expr) -> Expr:
        return x[tuple(i[order.index(k)] for k in range(x.rank))]

    return Loops([x.shape[p] for p in order], body, x.dtype)


# --- broadcasting and repetition -----------------------------------------------------------------------------------
@view(since=8)
def Expand(x, shape):
    """Broadcast to a shape (multidirectional: a dimension of 1 in `shape` keeps the input's)."""
    wanted, needs = shape.sizes()
    out = broadcast_shape(x.shape, wanted)
    return Loops(out, lambda *i: broadcast_load(x, i, out), x.dtype, needs=needs)


@view(since=6)
def Tile(x, repeats):
    """Repeat along every dimension."""
    times, needs = repeats.sizes()
    shape = [as_dim(dim_expr(d) * dim_expr(t)) for d, t in zip(x.shape, times, strict=True)]

    def body(*i: Expr) -> Expr:
        return x[tuple(e if same(d, s) else e % dim_expr(d) for e, d, s in zip(i, x.shape, shape, strict=True))]

    return Loops(shape, body, x.dtype, needs=needs)


@view(since=9)
def ConstantOfShape(shape, *, value=None):
    """A tensor of one repeated value."""
    data = 0.0 if value is None else value.reshape(-1)[0].item()
    dtype = DType.F32 if value is None else DType.from_numpy(value.dtype)
    if dtype is None:
        raise Unsupported("UN_DTYPE", "ConstantOfShape of this element type only passes through")
    return Loops(shape.dims(), lambda *_: lit(data, dtype), dtype)


@view(since=11)
def Range(start, limit, delta, *, stash_type=1):
    """start, start + delta, ... below limit."""
    a, b, step = (t.elements()[0] for t in (start, limit, delta))
    if not a.dtype.is_int:
        raise Unsupported("UN_DTYPE", f"Range on {a.dtype} is not implemented")
    lo, hi, d = (cast(e, DType.I64) for e in (a, b, step))
    span = as_dim(step_count(lo, hi, d))
    kind = start.dtype
    return Loops([span], lambda i: cast(simplify(lo + i * d), kind), kind)


def step_count(lo: Expr, hi: Expr, step: Expr) -> Expr:
    """ceil((hi - lo) / step), at least 0."""
    if not isinstance(step, Lit) or not step.value:
        raise Unsupported("UN_DATA_DEPENDENT", "the step of Range or Slice must be a constant other than 0")
    width = hi - lo if step.value > 0 else lo - hi
    size = abs(int(step.value))
    return simplify(maximum((width + (size - 1)) // size, 0))


# --- slicing and joining -------------------------------------------------------------------------------------------
_FAR = 1 << 31  # "to the end" in the exports of every framework is at least this


def _bound(v: Expr, dim: Dim, low: Expr, high: Expr) -> Expr:
    """A start or end as Slice reads it: negative counts from the end, then clamped to [low, high]."""
    d = dim_expr(dim)
    if isinstance(v, Lit):
        if v.value >= _FAR:
            return high
        if v.value <= -_FAR:
            return low
        moved = v + d if v.value < 0 else v
    else:
        negative = known(v < 0)
        moved = v if negative is False else v + d if negative else where(v < 0, v + d, v)
    return simplify(minimum(maximum(moved, low), high))


_NONE = ((1 << 31) - 1, (1 << 63) - 1)  # ends that onnxruntime takes for none at all, in both directions


def _end(v: Expr, dim: Dim, low: Expr, high: Expr, down: Expr) -> Expr:
    """Where a Slice stops; `down`: its step is negative."""
    bound, backward = _bound(v, dim, low, high), known(down)
    if backward is False:
        return bound
    none = apply("or", eq(v, i64(_NONE[0])), eq(v, i64(_NONE[1])))
    return simplify(where(none if backward else apply("and", down, none), low, bound))


LONGEST = 1 << 31  # no dimension has more elements: any step beyond takes one


def _box(x: Tensor, starts: Sequence[Expr], ends: Sequence[Expr], axes: Sequence[Expr], steps: Sequence[Expr]) -> Loops:
    """A box whose axes or steps are known when the kernel runs: any dimension may be cut, in any direction."""
    hits, needs = named_axes(axes, x.rank)
    needs = (*needs, *(n for s in steps if not known(n := apply("lt", i64(0), maximum(s, -s)))))
    shape: list[Dim] = []
    first: list[tuple[Expr, Expr]] = []
    for d, hit in zip(x.shape, hits, strict=True):
        step = chosen(list(zip(hit, (minimum(maximum(s, -LONGEST), LONGEST) for s in steps), strict=True)), i64(1))
        down, top = simplify(step < 0), dim_expr(d)
        low, high = where(down, i64(-1), i64(0)), where(down, top - 1, top)
        lo = _bound(chosen(list(zip(hit, starts, strict=True)), i64(0)), d, i64(0), high)
        hi = _end(chosen(list(zip(hit, ends, strict=True)), i64(_FAR)), d, low, high, down)
        size = maximum(where(down, -step, step), 1)
        span = where(down, lo - hi, hi - lo)
        shape.append(as_dim(maximum((span + size - 1) // size, 0)))
        first.append((lo, step))

    def body(*i: Expr) -> Expr:
        return x[tuple(lo + e * step for e, (lo, step) in zip(i, first, strict=True))]

    return Loops(shape, body, x.dtype, needs=needs)


def _slice(x: Tensor, starts: Sequence[Expr], ends: Sequence[Expr], axes: Sequence[int], steps: Sequence[int]) -> Loops:
    shape = list(x.shape)
    first: dict[int, tuple[Expr, int]] = {}
    for s, e, axis, far in zip(starts, ends, axes, steps, strict=True):
        step = min(max(far, -LONGEST), LONGEST)
        k = axis_of(axis, x.rank)
        d = x.shape[k]
        top = dim_expr(d)
        if step > 0:
            lo, hi = _bound(s, d, i64(0), top), _bound(e, d, i64(0), top)
        else:
            last = simplify(top - 1)
            lo, hi = _bound(s, d, i64(0), last), _end(e, d, i64(-1), last, TRUE)
        shape[k] = as_dim(step_count(lo, hi, i64(step)))
        first[k] = (lo, step)

    def body(*i: Expr) -> Expr:
        return x[tuple(first[k][0] + e * first[k][1] if k in first else e for k, e in enumerate(i))]

    return Loops(shape, body, x.dtype)


@view(name="Slice")
def Slice_1(x, *, axes=None, starts, ends):
    """A box, bounds as attributes."""
    where_ = range(len(starts)) if axes is None else axes
    return _slice(x, [i64(s) for s in starts], [i64(e) for e in ends], list(where_), [1] * len(starts))


@view(since=10)
def Slice(x, starts, ends, axes=None, steps=None):
    """A box with steps."""
    lo, hi = starts.given(), ends.given()
    where_ = [i64(k) for k in range(len(lo))] if axes is None else axes.given()
    by = [i64(1)] * len(lo) if steps is None else steps.given()
    fixed_axes, fixed_steps = ([int(e.value) for e in given if isinstance(e, Lit)] for given in (where_, by))
    if len(fixed_axes) < len(where_) or len(fixed_steps) < len(by):
        return _box(x, lo, hi, where_, by)
    return _slice(x, lo, hi, fixed_axes, fixed_steps)


@view(since=4)
def Concat(*xs, axis):
    """Join along an axis."""
    k = axis_of(axis, xs[0].rank)
    starts: list[Expr] = [i64(0)]
    for x in xs:
        starts.append(simplify(starts[-1] + dim_expr(x.shape[k])))
    shape: list[Dim] = list(xs[0].shape)
    for x in xs[1:]:
        shape = [_joined(a, b) if n != k else a for n, (a, b) in enumerate(zip(shape, x.shape, strict=True))]
    shape[k] = as_dim(starts[-1])

    def part(x: Tensor, start: Expr, i: Sequence[Expr]) -> Expr:
        return x[tuple(simplify(e - start) if n == k else e for n, e in enumerate(i))]

    def body(*i: Expr) -> Expr:
        present = [
            (x, s) for x, s in zip(xs, starts, strict=False) if x.shape[k] != 0 or not isinstance(x.shape[k], int)
        ]
        if not present:
            return lit(0, xs[0].dtype)
        out = part(*present[-1], i)
        for n in range(len(present) - 2, -1, -1):
            x, s = present[n]
            end = simplify(s + dim_expr(x.shape[k]))
            truth = known(i[k] < end)
            out = part(x, s, i) if truth else out if truth is False else where(i[k] < end, part(x, s, i), out)
        return out

    needs = equal_extents(*((x.shape[n], d) for x in xs for n, d in enumerate(shape) if n != k))
    return Loops(shape, body, xs[0].dtype, needs=tuple(dict.fromkeys(needs)))


def _joined(a: Dim, b: Dim) -> Dim:
    """A dimension that all inputs of Concat share; a static one anywhere is the truth."""
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise Unsupported("UN_SHAPE_MISMATCH", f"Concat of extents {a} and {b}")
    return b if isinstance(b, int) else a


MOST_PARTS = 64  # of a Split that is compiled: every part is a kernel, or in one


def _split(x: Tensor, axis: int, sizes: Sequence[Dim]) -> list[Loops]:
    k = axis_of(axis, x.rank)
    total: Expr = i64(0)
    for size in sizes:
        total = total + size
    needs = equal_extents((as_dim(total), x.shape[k]))
    out = []
    start: Expr = i64(0)
    for size in sizes:
        offset = start

        def body(*i: Expr, offset: Expr = offset) -> Expr:
            return x[tuple(e + offset if n == k else e for n, e in enumerate(i))]

        shape = list(x.shape)
        shape[k] = size
        out.append(Loops(shape, body, x.dtype, needs=needs))
        start = simplify(start + dim_expr(size))
    if len(out) <= MOST_PARTS:
        return out
    why = f"Split into {len(out)} parts, more than {MOST_PARTS}"
    return [declined(p.shape, p.dtype, "UN_ARITY", why) for p in out]


def _evenly(x: Tensor, axis: int, parts: int) -> list[Loops]:
    """Parts of ceil(n / parts) elements, the last one smaller; the runtime checks what is not known here."""
    d = x.shape[axis_of(axis, x.rank)]
    if isinstance(d, int):
        chunk = -(-d // parts)
        return _split(x, axis, [max(0, min(chunk, d - chunk * n)) for n in range(parts)])
    size = as_dim(dim_expr(d) // parts)
    if same(dim_expr(size) * parts, d):
        return _split(x, axis, [size] * parts)
    size = as_dim((dim_expr(d) + (parts - 1)) // parts)
    sizes = [*([size] * (parts - 1)), as_dim(dim_expr(d) - dim_expr(size) * (parts - 1))]
    why = f"Split of a run-time dimension {d} into {parts} parts"
    return [declined(p.shape, p.dtype, "UN_DATA_DEPENDENT", why) for p in _split(x, axis, sizes)]


@view(name="Split", since=2)
def Split_2(x, *, axis=0, split=None, outputs):
    """Parts along an axis, sizes as attribute."""
    return _evenly(x, axis, outputs) if split is None else _split(x, axis, list(split))


@view(since=13)
def Split(x, split=None, *, axis=0, num_outputs=None, outputs):
    """Parts along an axis."""
    if split is None:
        return _evenly(x, axis, num_outputs or outputs)
    sizes, needs = split.sizes()
    return [replace(p, needs=(*p.needs, *needs)) for p in _split(x, axis, sizes)]


# --- padding -------------------------------------------------------------------------------------------------------
def _pad(x: Tensor, begin: Sequence[Dim], end: Sequence[Dim], mode: str, value: Expr) -> Loops:
    """Negative pads crop; what is repeated, mirrored or wrapped around is what the crop leaves."""
    shape, needs = [], []
    places = []
    for k, (d, b, e) in enumerate(zip(x.shape, begin, end, strict=True)):
        size = simplify(dim_expr(d) + b + e)
        shape.append(as_dim(size if _is_small(size) else maximum(size, 0)))
        places.append((d, dim_expr(b), dim_expr(e)))
        others = [dim_expr(other) for other in (*x.shape[:k], *x.shape[k + 1 :])]
        needs += _pad_needs(dim_expr(d), dim_expr(b), dim_expr(e), mode, others)

    def body(*i: Expr) -> Expr:
        at = [_padded(e, *place, mode) for e, place in zip(i, places, strict=True)]
        inside = None
        for _, cond in at:
            if cond is not None:
                inside = cond if inside is None else inside & cond
        element = x[tuple(j for j, _ in at)]
        if inside is None:
            return element
        truth = known(inside)
        return element if truth else value if truth is False else where(inside, element, value)

    return Loops(shape, body, x.dtype, needs=tuple(dict.fromkeys(needs)))


def _is_small(size: Expr) -> bool:
    """Nothing is gained by an atom in place of its terms."""
    return len(poly(size)) <= 3


def _padded(i: Expr, d: Dim, b: Expr, e: Expr, mode: str) -> tuple[Expr, Expr | None]:
    """(index into a dimension, condition under which it is inside)."""
    if b is i64(0) and e is i64(0):
        return i, None
    if mode == "constant":
        j = simplify(i - b)
        return j, between(0, j, dim_expr(d))
    cropped, left = _cropped(dim_expr(d), b, e)
    j = simplify(i - maximum(b, 0))
    match mode:
        case "edge":
            at = minimum(maximum(j, 0), left - 1)
        case "wrap":
            at = j % left
        case "reflect":  # without repeating the edge
            up = where(j < 0, -j, j)
            at = where(up >= left, (left - 1) * 2 - up, up)
        case _:
            raise Unsupported("UN_ATTR", f"Pad mode={mode} is not implemented")
    return simplify(cropped + at), None


def _cropped(d: Expr, b: Expr, e: Expr) -> tuple[Expr, Expr]:
    """Where what is left of a dimension starts, and its length."""
    start = simplify(maximum(-b, 0))
    return start, simplify(d - start - maximum(-e, 0))


def _pad_needs(d: Expr, b: Expr, e: Expr, mode: str, others: Sequence[Expr]) -> list[Expr]:
    """What the runtime checks, of a dimension: something is left to repeat, and long enough to be mirrored once.

    Unless no element has to be made: an empty dimension stays empty, or one of the `others` is.
    """
    if b is i64(0) and e is i64(0):
        return []
    needs = [apply("le", i64(0), simplify(d + b + e))]
    if mode != "constant":
        _, left = _cropped(d, b, e)
        idle = eq(d, i64(0)) & eq(b + e, i64(0))
        for other in others:
            idle = idle | (apply("lt", i64(0), d) & eq(other, i64(0)))
        needs += _unless(idle, i64(0), left)
        if mode == "reflect":
            needs += _unless(idle, maximum(b, e), maximum(left, 1))
    truths = [(simplify(n), known(n)) for n in needs]
    if any(t is False for _, t in truths):
        raise Unsupported("UN_SHAPE_MISMATCH", f"Pad mode={mode} of {b} and {e} on an extent of {d}")
    return [n for n, t in truths if t is None]


def _unless(idle: Expr, low: Expr, high: Expr) -> list[Expr]:
    """`low < high`, unless `idle`; never asked where numbers tell."""
    need = apply("lt", low, high)
    return [need if known(need) is not None else apply("lt", where(idle, simplify(high - 1), low), high)]


def _pads(x: Tensor, pads: Sequence[Dim], axes: Sequence[int] | None) -> tuple[list[Dim], list[Dim]]:
    n = len(pads) // 2
    begin: list[Dim] = [0] * x.rank
    end: list[Dim] = [0] * x.rank
    for k, axis in enumerate(range(x.rank) if axes is None else axes):
        begin[axis_of(axis, x.rank)] = pads[k]
        end[axis_of(axis, x.rank)] = pads[n + k]
    return begin, end


def _pad_given(x: Tensor, pads: Sequence[Expr], axes: Sequence[Expr], mode: str, value: Expr) -> Loops:
    """Padding of axes that are known when the kernel runs."""
    hits, needs = named_axes(axes, x.rank)
    n = len(axes)
    begin, end = (
        [as_dim(chosen(list(zip(hit, side, strict=True)), i64(0))) for hit in hits] for side in (pads[:n], pads[n:])
    )
    made = _pad(x, begin, end, mode, value)
    return replace(made, needs=(*needs, *made.needs))


@view(name="Pad", since=2)
def Pad_2(x, *, mode="constant", pads, value=0.0):
    """Pad with attributes."""
    begin, end = _pads(x, pads, None)
    return _pad(x, begin, end, mode, lit(value, x.dtype))


@view(since=11)
def Pad(x, pads, constant_value=None, axes=None, *, mode="constant"):
    """Pad by constant, edge, reflect or wrap; negative pads crop."""
    if constant_value is None:
        value: Expr = lit(0, x.dtype)
    elif constant_value.immediate is not None:
        value = constant_value.immediate
    else:
        value = constant_value[tuple(0 for _ in constant_value.shape)]
    sides = pads.given()
    if axes is not None and axes.known is None:
        return _pad_given(x, sides, axes.given(), mode, value)
    begin, end = _pads(x, [as_dim(p) for p in sides], None if axes is None else axes.ints())
    return _pad(x, begin, end, mode, value)


@view(since=18)
def CenterCropPad(x, shape, *, axes=None):
    """Cropped or padded with zeros to a size, around the centre."""
    cut = range(x.rank) if axes is None else [axis_of(a, x.rank) for a in axes]
    sizes, needs = shape.sizes()
    wanted = dict(zip(cut, sizes, strict=True))
    out = [wanted.get(k, d) for k, d in enumerate(x.shape)]

    def body(*i: Expr) -> Expr:
        at = list(i)
        inside: Expr = lit(True, DType.BOOL)
        for k, size in wanted.items():
            d, s = dim_expr(x.shape[k]), dim_expr(size)
            cropped, padded = maximum(d - s, 0) // 2, maximum(s - d, 0) // 2
            at[k] = simplify(i[k] + cropped - padded)
            inside = inside & between(0, at[k], d)
        return guarded(simplify(inside), lambda: x[tuple(at)], 0)

    return Loops(out, body, x.dtype, needs=needs)


# --- space and depth -----------------------------------------------------------------------------------------------
@view
def DepthToSpace(x, *, blocksize, mode="DCR"):
    """Channels become space."""
    n, c, h, w = x.shape
    b = blocksize
    out = as_dim(dim_expr(c) // (b * b))

    def body(bi: Expr, ci: Expr, y: Expr, z: Expr) -> Expr:
        dy, dx = y % b, z % b
        channel = (dy * b + dx) * out + ci if mode == "DCR" else ci * (b * b) + dy * b + dx
        return x[bi, channel, y // b, z // b]

    shape = [n, out, as_dim(dim_expr(h) * b), as_dim(dim_expr(w) * b)]
    return Loops(shape, body, x.dtype, needs=equal_extents((as_dim(dim_expr(out) * (b * b)), c)))


@view
def SpaceToDepth(x, *, blocksize, mode="DCR"):
    """Space becomes channels: all of them per place in a block (DCR), or all places per channel (CRD)."""
    n, c, h, w = x.shape
    b = blocksize

    def body(bi: Expr, ci: Expr, y: Expr, z: Expr) -> Expr:
        block, channel = (ci // dim_expr(c), ci % dim_expr(c)) if mode == "DCR" else (ci % (b * b), ci // (b * b))
        return x[bi, channel, y * b + block // b, z * b + block % b]

    tall, wide = as_dim(dim_expr(h) // b), as_dim(dim_expr(w) // b)
    needs = equal_extents((as_dim(dim_expr(tall) * b), h), (as_dim(dim_expr(wide) * b), w))
    return Loops([n, as_dim(dim_expr(c) * (b * b)), tall, wide], body, x.dtype, needs=needs)


@view(since=14)
def Trilu(x, k=None, *, upper=1):
    """Upper or lower triangle of the last two dimensions; the rest becomes 0."""
    at = 0 if k is None else k[tuple(0 for _ in k.shape)]
    shift = at if isinstance(at, int) else cast(at, DType.I64)

    def body(*i: Expr) -> Expr:
        row, col = i[-2], i[-1]
        keep = col >= row + shift if upper else col <= row + shift
        return guarded(keep, lambda: x[i], 0)

    return Loops(x.shape, body, x.dtype)


@view(since=9)
def EyeLike(x, *, dtype=None, k=0):
    """Ones on a diagonal."""
    kind = x.dtype if dtype is None else DType.from_onnx(dtype)
    if kind is None or not kind.computable:
        raise Unsupported("UN_DTYPE", "EyeLike of this element type only passes through")
    return Loops(x.shape, lambda i, j: where(apply("eq", j, i + k), lit(1, kind), lit(0, kind)), kind)
