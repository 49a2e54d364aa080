"""Elements replaced or combined at known indices, as formulas: a table says which update each place takes.

A place that several updates meet takes them one after another, in their order. Indices that are data stay with
onnxruntime: a kernel would have to look at every update for every element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.types import Dim, TensorType
from onnxfuse.ops.composite import back
from onnxfuse.ops.dsl import Tensor, axis_of
from onnxfuse.ops.expansion import GraphTensor
from onnxfuse.ops.gather import Gather
from onnxfuse.ops.known import KNOWN_LIMIT
from onnxfuse.ops.pointwise import Add, Max, Min, Mul, Where
from onnxfuse.ops.table import composite
from onnxfuse.ops.view import Identity, Reshape

MOST_ROUNDS = 4  # updates that one place may meet
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


@composite(since=11, types=_as_data)
def ScatterElements(data, indices, updates, *, axis=0, reduction="none"):
    """The data with some elements replaced or combined."""
    return _elements(data, indices, updates, axis, reduction)


@composite(since=9, types=_as_data)
def Scatter(data, indices, updates, *, axis=0):
    """The data with some elements replaced."""
    return _elements(data, indices, updates, axis, "none")


@composite(since=11, types=_as_data)
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
