"""Elements by index: gathers, one-hot vectors, reversed prefixes.

Indices that are known (constants) are checked here, those that are data by the kernel before it reads anything:
out of range they are an error, as in onnxruntime. Where the operator itself says what such an index means, nothing is.
"""

from __future__ import annotations

from onnxfuse.errors import Refusal, Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, apply, cast, eq, i64, where
from onnxfuse.ir.given import ALL, INDICES, MOST, within
from onnxfuse.ir.simplify import as_dim, dim_expr, known, simplify
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import Loops, Tensor, axis_of, equal_extents, maximum
from onnxfuse.ops.table import view


def wrapped(index: Expr, dim: Dim) -> Expr:
    """Negative indices count from the end."""
    j = cast(index, DType.I64)
    if isinstance(j, Lit):
        return simplify(j + dim_expr(dim)) if j.value < 0 else j
    return where(j < 0, j + dim_expr(dim), j)


def checked(d: Dim, indices: Tensor, column: int = ALL) -> tuple[Refusal | None, list[Expr]]:
    """Of indices into an extent (those of a column of index tuples): why no kernel may use them, and what must hold.

    What is known here is checked here; run-time extents and run-time indices by the kernel.
    """
    if indices.known is None:
        if indices.dtype not in INDICES or column >= MOST:
            return Refusal("UN_DATA_DEPENDENT", f"{indices.type} as run-time indices"), []
        return None, list(within(indices.value, d, column))
    needs: list[Expr] = []
    for e in (indices.known if column == ALL else indices.known[..., column]).flat:
        v = as_dim(cast(e, DType.I64))
        if not isinstance(v, int):
            return Refusal("UN_DATA_DEPENDENT", f"index {v} into extent {d} cannot be checked at compile time"), []
        if isinstance(d, int):
            if not -d <= v < d:
                raise Unsupported("UN_SHAPE_MISMATCH", f"index {v} is out of range for extent {d}")
            continue
        needs.append(apply("lt", i64(v), d) if v >= 0 else apply("le", i64(-v), d))
    return None, list(dict.fromkeys(needs))


@view
def Gather(data, indices, *, axis=0):
    """Entries of an axis by index."""
    k = axis_of(axis, data.rank)
    refusal, needs = checked(data.shape[k], indices)
    q = indices.rank
    shape = [*data.shape[:k], *indices.shape, *data.shape[k + 1 :]]

    def body(*i: Expr) -> Expr:
        j = wrapped(indices[i[k : k + q]] if indices.immediate is None else indices.immediate, data.shape[k])
        return data[(*i[:k], j, *i[k + q :])]

    return Loops(shape, body, data.dtype, refusal=refusal, needs=needs)


@view(since=11)
def GatherElements(data, indices, *, axis=0):
    """Like numpy take_along_axis."""
    k = axis_of(axis, data.rank)
    refusal, needs = checked(data.shape[k], indices)

    def body(*i: Expr) -> Expr:
        return data[tuple(wrapped(indices[i], data.shape[k]) if n == k else e for n, e in enumerate(i))]

    for n in range(data.rank):
        if n != k:
            needs += at_most(indices.shape[n], data.shape[n])
    return Loops(indices.shape, body, data.dtype, refusal=refusal, needs=tuple(dict.fromkeys(needs)))


def at_most(a: Dim, b: Dim) -> list[Expr]:
    """Nothing when a <= b is known, else the comparison the kernel has to make."""
    need = apply("le", dim_expr(a), dim_expr(b))
    truth = known(need)
    if truth is None:
        return [need]
    if not truth:
        raise Unsupported("UN_SHAPE_MISMATCH", f"{a} indices along an axis of {b}")
    return []


@view(since=11)
def GatherND(data, indices, *, batch_dims=0):
    """Slices by index tuples."""
    b, depth = batch_dims, indices.shape[-1]
    if not isinstance(depth, int):
        raise Unsupported("UN_DATA_DEPENDENT", "GatherND with index tuples of run-time length", f"length {depth}")
    refusal, needs = None, list(equal_extents(*zip(indices.shape[:b], data.shape[:b], strict=True)))
    for k in range(depth):
        refused, wanted = checked(data.shape[b + k], indices, k)
        refusal, needs = refusal or refused, [*needs, *wanted]
    q = indices.rank - 1

    def body(*i: Expr) -> Expr:
        at = [wrapped(indices[(*i[:q], i64(k))], data.shape[b + k]) for k in range(depth)]
        return data[(*i[:b], *at, *i[q:])]

    shape = [*indices.shape[:-1], *data.shape[b + depth :]]
    return Loops(shape, body, data.dtype, refusal=refusal, needs=tuple(dict.fromkeys(needs)))


@view(since=9)
def OneHot(indices, depth, values, *, axis=-1):
    """A new axis with the second value at the index (negative: from the end) and the first elsewhere."""
    at = axis_of(axis, indices.rank + 1)
    (extent, *_), checks = depth.sizes()

    def body(*i: Expr) -> Expr:
        hit = eq(i[at], wrapped(indices[(*i[:at], *i[at + 1 :])], extent))
        return where(hit, values[i64(1)], values[i64(0)])

    needs = (*checks, *equal_extents((values.shape[0], 2)))
    return Loops([*indices.shape[:at], extent, *indices.shape[at:]], body, values.dtype, needs=needs)


@view(since=10)
def ReverseSequence(x, sequence_lens, *, batch_axis=1, time_axis=0):
    """Prefixes of given lengths reversed."""
    if {batch_axis, time_axis} != {0, 1}:
        raise Unsupported("UN_AXIS", f"ReverseSequence along axis {time_axis} of batches along {batch_axis}")
    refusal, needs = checked(as_dim(dim_expr(x.shape[time_axis]) + 1), sequence_lens)

    def body(*i: Expr) -> Expr:
        t, length = i[time_axis], sequence_lens[i[batch_axis]]
        mirrored = where(t < length, maximum(length - 1 - t, 0), t)
        return x[tuple(mirrored if k == time_axis else e for k, e in enumerate(i))]

    needs = [*equal_extents((sequence_lens.shape[0], x.shape[batch_axis])), *needs]
    if sequence_lens.known is None:
        needs.append(within(sequence_lens.value, 0)[1])  # none is negative
    return Loops(x.shape, body, x.dtype, refusal=refusal, needs=needs)
