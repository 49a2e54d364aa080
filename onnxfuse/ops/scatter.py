"""Elements replaced or combined at indices. A place that several updates meet takes them one after another, in order.

Where indices and shapes are known it is a formula: a table says which update each place takes. Otherwise every element
looks at every update that may be its own, which is worth it for a few of them only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, cast, eq, i64, where
from onnxfuse.ir.simplify import dim_expr, known
from onnxfuse.ir.types import Dim, TensorType
from onnxfuse.ops.composite import back
from onnxfuse.ops.dsl import (
    Loops,
    Tensor,
    axis_of,
    between,
    compute,
    equal_extents,
    maximum,
    minimum,
    unflatten,
)
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.gather import Gather, at_most, checked, wrapped
from onnxfuse.ops.known import KNOWN_LIMIT
from onnxfuse.ops.pointwise import Add, Max, Min, Mul, Where
from onnxfuse.ops.table import composite
from onnxfuse.ops.view import Identity, Reshape

MOST_ROUNDS = 4  # updates that one place may meet, or has to look at; onnxruntime copies all and writes those few
_COMBINE = {"add": Add, "mul": Mul, "max": Max, "min": Min}
# onnxruntime has no Where and not all arithmetic on these: there they go through a type that holds all their values
# (u64 wraps around and back, which no comparison may see).
_CARRIERS = {
    DType.BOOL: DType.I32, DType.I8: DType.I32, DType.I16: DType.I32, DType.U16: DType.I32, DType.U32: DType.I64,
    DType.U64: DType.I64, DType.BF16: DType.F32,
}  # fmt: skip


def _fixed(shape: Sequence[Dim], what: str) -> tuple[int, ...]:
    """A static shape with few enough places for a table."""
    sizes = [d for d in shape if isinstance(d, int)]
    if len(sizes) < len(shape):
        raise Unsupported("UN_DATA_DEPENDENT", f"{what} with run-time dimensions")
    if math.prod(sizes) > KNOWN_LIMIT:
        raise Unsupported("UN_OPAQUE", f"{what} of {math.prod(sizes)} places (at most {KNOWN_LIMIT})")
    return tuple(sizes)


def _indices(indices: GraphTensor) -> np.ndarray:
    if indices.known is None:
        raise Unsupported("UN_DATA_DEPENDENT", "run-time indices are checked by the runtime")
    return np.array(indices.ints(), np.int64).reshape(indices.known.shape)


def _wrapped(index: np.ndarray, extent: int) -> np.ndarray:
    if index.size and (index.min() < -extent or index.max() >= extent):
        raise Unsupported("UN_SHAPE_MISMATCH", f"an index is out of range for extent {extent}")
    return np.where(index < 0, index + extent, index)


def _rounds(places: Iterable[int], count: int, reduction: str) -> list[np.ndarray]:
    """Tables of the update (or -1) each of `count` places takes, in turn; without reduction only the last counts."""
    tables: list[np.ndarray] = []
    taken = np.zeros(count, np.int64)
    for number, place in enumerate(places):
        turn = 0 if reduction == "none" else int(taken[place])
        taken[place] += 1
        if turn == len(tables):
            tables.append(np.full(count, -1, np.int64))
        tables[turn][place] = number
    if len(tables) > MOST_ROUNDS:
        raise Unsupported("UN_OPAQUE", f"{len(tables)} updates meet at one place (at most {MOST_ROUNDS})")
    return tables


def _written(
    data: GraphTensor, updates: GraphTensor, places: Iterable[int], lead: tuple[int, ...], reduction: str
) -> GraphTensor:
    """The data with rows of `updates` at `places`, which count the points of `lead`, its first dimensions."""
    if reduction != "none" and reduction not in _COMBINE:
        raise Unsupported("UN_ATTR", f"a scatter with reduction={reduction}")
    made = data
    for table in _rounds(places, math.prod(lead), reduction):
        hit = data.builder.constant((table >= 0).reshape(lead + (1,) * (data.rank - len(lead))), DType.BOOL)
        row = data.builder.constant(np.maximum(table, 0).reshape(lead), DType.I64)
        new = Gather(updates, row, axis=0)
        made = _chosen(hit, new if reduction == "none" else _combined(reduction, made, new), made)
    return Identity(data) if made is data else made


def _chosen(hit: GraphTensor, yes: GraphTensor, no: GraphTensor) -> GraphTensor:
    carrier = _CARRIERS.get(no.dtype, no.dtype)
    return back(Where(hit, back(yes, carrier), back(no, carrier)), no.dtype)


def _combined(reduction: str, made: GraphTensor, new: GraphTensor) -> GraphTensor:
    compares = reduction in ("max", "min")
    carrier = made.dtype if compares and made.dtype is DType.U64 else _CARRIERS.get(made.dtype, made.dtype)
    return back(_COMBINE[reduction](back(made, carrier), back(new, carrier)), made.dtype)


# --- indices given at run time ---------------------------------------------------------------------------------------
def _few(n: Dim) -> int:
    if not isinstance(n, int) or n > MOST_ROUNDS:
        raise Unsupported("UN_OPAQUE", f"every element would look at {n} updates (at most {MOST_ROUNDS})")
    return n


def _met(reduction: str, old: Expr, new: Expr, ordered: bool = False) -> Expr:
    """What becomes of an element that an update meets; `ordered`: a NaN is larger or smaller than nothing."""
    if reduction == "none":
        return new
    a, b = (cast(e, DType.I32) if e.dtype is DType.BOOL else compute(e) for e in (old, new))
    made = {
        "add": lambda: a + b,
        "mul": lambda: a * b,
        "max": lambda: where(b < a, a, b) if ordered else maximum(a, b),
        "min": lambda: where(a < b, a, b) if ordered else minimum(a, b),
    }
    if reduction not in made:
        raise Unsupported("UN_ATTR", f"a scatter with reduction={reduction}")
    return cast(made[reduction](), old.dtype)


def _elements_given(data, indices, updates, *, axis=0, reduction="none"):
    k = axis_of(axis, data.rank)
    refusal, needs = checked(data.shape[k], indices)
    needs = [*needs, *equal_extents(*zip(indices.shape, updates.shape, strict=True))]
    for n, (few, all_) in enumerate(zip(indices.shape, data.shape, strict=True)):
        needs += at_most(few, all_) if n != k else []
    rounds = range(_few(indices.shape[k]))

    def body(*i: Expr) -> Expr:
        beside = [between(0, e, dim_expr(d)) for n, (e, d) in enumerate(zip(i, indices.shape, strict=True)) if n != k]
        value = data[i]
        for r in rounds:
            at = (*i[:k], i64(r), *i[k + 1 :])
            hit = eq(wrapped(indices[at], data.shape[k]), i[k])
            value = where(hit, _met(reduction, value, updates[at]), value)
        for inside in beside:
            value = value if known(inside) else where(inside, value, data[i])
        return value

    return Loops(data.shape, body, data.dtype, refusal=refusal, needs=tuple(dict.fromkeys(needs)))


def _slices_given(data, indices, updates, *, reduction="none"):
    depth, lead = indices.shape[-1], indices.shape[:-1]
    if not isinstance(depth, int):
        raise Unsupported("UN_DATA_DEPENDENT", "ScatterND with index tuples of run-time length", f"length {depth}")
    places = list(np.ndindex(*(_few(d) for d in lead)))
    _few(len(places))
    refusal, needs = None, list(equal_extents(*zip([*lead, *data.shape[depth:]], updates.shape, strict=True)))
    for k in range(depth):
        refused, wanted = checked(data.shape[k], indices, k)
        refusal, needs = refusal or refused, [*needs, *wanted]

    def hits(place: tuple[int, ...], i: Sequence[Expr]) -> Expr:
        at = [wrapped(indices[(*place, k)], data.shape[k]) for k in range(depth)]
        return reduce(lambda a, b: a & b, [eq(a, e) for a, e in zip(at, i[:depth], strict=True)])

    def body(*i: Expr) -> Expr:
        value = data[i]
        if reduction != "none":
            for place in places:
                value = where(
                    hits(place, i), _met(reduction, value, updates[(*place, *i[depth:])], ordered=True), value
                )
            return value
        taken: Expr = i64(-1)  # the last update that meets the element: the rest of its slice takes the same
        for number, place in enumerate(places):
            taken = where(hits(place, i), i64(number), taken)
        row = unflatten(maximum(taken, 0), lead)
        return where(taken >= 0, updates[(*row, *i[depth:])], value)

    return Loops(data.shape, body, data.dtype, refusal=refusal, needs=tuple(dict.fromkeys(needs)))


# --- known indices ---------------------------------------------------------------------------------------------------
def _elements(data: GraphTensor, indices: GraphTensor, updates: GraphTensor, axis: int, reduction: str) -> GraphTensor:
    k, index = axis_of(axis, data.rank), _indices(indices)
    shape = _fixed(data.shape, "a scatter")
    if not index.size:
        return Identity(data)
    wrapped = _wrapped(index, shape[k])
    at = [wrapped if n == k else place for n, place in enumerate(np.indices(index.shape))]
    places = np.ravel_multi_index(at, shape).reshape(-1)
    return _written(data, Reshape(updates, shape=[-1]), places.tolist(), shape, reduction)


def _as_data(data: Tensor, *_inputs: object, **_attrs: object) -> TensorType:
    return data.type


@composite(since=11, types=_as_data, loops=_elements_given)
def ScatterElements(data, indices, updates, *, axis=0, reduction="none"):
    """The data with some elements replaced or combined."""
    return _elements(data, indices, updates, axis, reduction)


@composite(since=9, types=_as_data, loops=_elements_given)
def Scatter(data, indices, updates, *, axis=0):
    """The data with some elements replaced."""
    return _elements(data, indices, updates, axis, "none")


@composite(since=11, types=_as_data, loops=_slices_given)
def ScatterND(data, indices, updates, *, reduction="none"):
    """The data with some slices replaced or combined."""
    index = _indices(indices)
    depth = index.shape[-1]
    lead, rest = _fixed(data.shape[:depth], "a scatter"), data.shape[depth:]
    if not index.size:
        return Identity(data)
    columns = [_wrapped(index[..., k].reshape(-1), lead[k]) for k in range(depth)]
    if index.ndim != 2:
        wanted = [d if isinstance(d, int) else -1 for d in rest]
        if wanted.count(-1) > 1 or 0 in wanted:
            raise Unsupported("UN_DATA_DEPENDENT", f"ScatterND of slices of {data.type}")
        updates = Reshape(updates, shape=[len(columns[0]), *wanted])
    return _written(data, updates, np.ravel_multi_index(columns, lead).tolist(), lead, reduction)
