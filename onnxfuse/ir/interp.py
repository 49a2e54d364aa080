"""The oracle: numpy evaluation of expressions, Computes, LoopGraphs and Kernels. Slow, plain, and always right.

Everything is evaluated over whole iteration spaces by broadcasting: axis number k of a space is dimension k of every
array. Spaces above `LIMIT` points are cut into blocks so that memory stays small. Loads outside a tensor are clipped
to it (their value is discarded by a `where`). Sums run in `Reduce.acc`, in numpy's (pairwise) order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from onnxfuse.errors import IRError, UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Acc, Apply, Expr, Lit, Load, Sym, Var, syms_of, walk
from onnxfuse.ir.given import numbers
from onnxfuse.ir.graph import Constant, Node, Value
from onnxfuse.ir.kernel import Kernel, Stage, Store
from onnxfuse.ir.loops import Axis, Compute, LoopGraph, Reduce
from onnxfuse.ir.simplify import poly
from onnxfuse.ir.types import Dim, TensorType

Array = npt.NDArray[np.generic]
Syms = Mapping[Sym, int]
OpaqueFn = Callable[[Node, Sequence[Array | None]], Sequence[Array]]

LIMIT = 1 << 22  # points of an iteration space evaluated at once

_REDUCE: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """Part of an iteration space: its axes in order and the half-open range of each."""

    axes: tuple[Axis, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.ranges)

    def values(self, k: int) -> Array:
        """The loop variable of axis k, shaped to broadcast."""
        lo, hi = self.ranges[k]
        return self.spread(np.arange(lo, hi, dtype=np.int64), k)

    def spread(self, line: Array, k: int) -> Array:
        """A one-dimensional array laid along axis k."""
        return line.reshape([-1 if i == k else 1 for i in range(len(self.axes))])

    def plus(self, other: Block) -> Block:
        """The product of two spaces, `self` outside."""
        return Block(self.axes + other.axes, self.ranges + other.ranges)


@dataclass(frozen=True, slots=True)
class Env:
    """What the leaves of an expression mean. `private` values carry the outer block as leading dimensions."""

    block: Block = Block()
    syms: Syms = field(default_factory=dict)
    arrays: Mapping[Value, Array] = field(default_factory=dict)
    acc: Array | None = None
    private: frozenset[Value] = frozenset()
    outer: Block = Block()  # the leading axes that `private` values carry


def convert(x: Array, src: DType, dst: DType) -> Array:
    """Cast as onnxruntime does on x86.

    Float to integer truncates; NaN and what does not fit gives the "integer indefinite" of the machine conversion
    (INT_MIN of i32, or of i64 for the 64-bit types), cut to the width. Integers wrap. To bool: != 0. To f16 and bf16:
    through f32, round to nearest even.
    """
    x = np.asarray(x)
    if src is dst:
        return x
    with np.errstate(all="ignore"):
        if dst is DType.BOOL:
            return np.asarray(x != 0)
        if src.is_float and dst.is_int:
            return _float_to_int(x, dst)
        if dst.is_half:
            x = x.astype(np.float32)
        return x.astype(dst.numpy)


def _float_to_int(x: Array, dst: DType) -> Array:
    t = np.trunc(x.astype(np.float64))
    bits = 64 if dst in (DType.I64, DType.U64) else 32
    if dst not in (DType.U32, DType.U64):
        return np.asarray(_indefinite(t, bits).astype(dst.numpy))
    half = 2.0 ** (bits - 1)  # the machine converts x - half and flips the top bit
    low = _indefinite(np.where(t >= half, t - half, t), bits)
    return np.asarray(np.where(t >= half, low ^ low.dtype.type(-int(half)), low).astype(dst.numpy))


def _indefinite(t: npt.NDArray[np.float64], bits: int) -> npt.NDArray[np.signedinteger]:
    half = 2.0 ** (bits - 1)
    fits = (t >= -half) & (t < half)
    wide = np.int32 if bits == 32 else np.int64
    return np.where(fits, np.where(fits, t, 0.0).astype(wide), wide(-int(half)))


def eval_expr(e: Expr, env: Env) -> Array:
    """Value of `e` at every point of `env.block`, broadcastable to `env.block.shape`."""
    position = {axis: k for k, axis in enumerate(env.block.axes)}
    done: dict[int, Array] = {}
    for x in walk(e):
        match x:
            case Lit():
                value = np.asarray(x.value, dtype=x.dtype.numpy)
            case Var():
                if x.axis not in position:
                    raise IRError("IR_AXIS", f"axis {x.axis} is not bound")
                value = env.block.values(position[x.axis])
            case Sym():
                if x not in env.syms:
                    raise IRError("IR_SYM", f"dimension {x} is not bound")
                value = np.asarray(env.syms[x], dtype=np.int64)
            case Acc():
                if env.acc is None:
                    raise IRError("IR_ACC", "accumulator outside a reduction")
                value = env.acc
            case Load():
                value = _load(x, [done[id(i)] for i in x.index], env, position)
            case Apply():
                args = [done[id(a)] for a in x.args]
                if x.prim.name == "cast":
                    value = convert(args[0], x.args[0].dtype, x.dtype)
                elif x.prim.name == "bits":
                    value = np.ascontiguousarray(args[0]).view(x.dtype.numpy).reshape(args[0].shape)
                else:
                    value = np.asarray(x.prim.numpy(*args)).astype(x.dtype.numpy, copy=False)
            case _:
                raise TypeError(type(x).__name__)
        done[id(x)] = value
    return done[id(e)]


def _load(e: Load, index: list[Array], env: Env, position: Mapping[Axis, int]) -> Array:
    if e.source not in env.arrays:
        raise IRError("IR_VALUE", f"value {e.source} has no data here")
    source = env.arrays[e.source]
    lead = _lead(e.source, env)
    view = _plain(e, source, env, position) if not lead else None
    if view is not None:
        return view
    index = lead + index
    if 0 in source.shape:  # nothing there: every load is discarded
        return np.zeros(np.broadcast_shapes(*(i.shape for i in index)), source.dtype)
    clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, source.shape, strict=True))
    return np.asarray(source[clipped])


def _lead(v: Value, env: Env) -> list[Array]:
    """Index of the current outer iterations in a private buffer."""
    if v not in env.private:
        return []
    return [np.asarray(env.block.values(k) - lo) for k, (lo, _) in enumerate(env.outer.ranges)]


def _plain(e: Load, source: Array, env: Env, position: Mapping[Axis, int]) -> Array | None:
    """A view, when every index is an axis of its own or a constant."""
    axes = [i.axis for i in e.index if isinstance(i, Var)]
    if len(set(axes)) < len(axes) or not all(isinstance(i, Var | Lit) for i in e.index):
        return None
    cut: list[slice | int] = []
    for i, n in zip(e.index, source.shape, strict=True):
        lo, hi = env.block.ranges[position[i.axis]] if isinstance(i, Var) else (int(i.value), int(i.value) + 1)  # type: ignore[attr-defined]
        if lo < 0 or hi > n:
            return None
        cut.append(slice(lo, hi) if isinstance(i, Var) else lo)
    view = source[tuple(cut)]
    order = sorted(range(len(axes)), key=lambda k: position[axes[k]])
    rank = len(env.block.axes)
    shape = [1] * rank
    for k in order:
        shape[position[axes[k]]] = view.shape[k]
    return np.asarray(view.transpose(order).reshape(shape)) if rank else np.asarray(view)


def extent(d: Dim, syms: Syms) -> int:
    """A dimension as a number."""
    return d if isinstance(d, int) else int(eval_expr(d, Env(syms=syms)))


def shape_of(t: TensorType, syms: Syms) -> tuple[int, ...]:
    """A shape as numbers."""
    return tuple(extent(d, syms) for d in t.shape)


def _whole(axes: Iterable[Axis], syms: Syms) -> Block:
    axes = tuple(axes)
    return Block(axes, tuple((0, max(0, extent(a.extent, syms))) for a in axes))


def _blocks(block: Block, limit: int) -> Iterator[Block]:
    """Cut a space into pieces of at most `limit` points (at least one), halving the largest axis."""
    steps = list(block.shape)
    while math.prod(steps) > max(1, limit):
        k = max(range(len(steps)), key=lambda i: steps[i])
        steps[k] = -(-steps[k] // 2)
    cuts = [
        [(lo, min(lo + step, hi)) for lo in range(start, hi, step)] if hi > start else [(start, start)]
        for (start, hi), step in zip(block.ranges, steps, strict=True)
    ]
    for ranges in itertools.product(*cuts):
        yield Block(block.axes, ranges)


def _within(block: Block, piece: Block) -> tuple[slice, ...]:
    """Where a piece lies in an array that covers `block`."""
    pairs = zip(block.ranges, piece.ranges, strict=True)
    return tuple(slice(lo - base, hi - base) for (base, _), (lo, hi) in pairs)


def _reduce(reduce: Reduce, body: Expr, block: Block, env: Env) -> Array:
    """The accumulators at every point of `block`, in `reduce.acc`."""
    dtype = reduce.acc.numpy
    total = np.full(block.shape, reduce.init.value, dtype=dtype)
    rank = len(block.axes)
    whole = block.plus(_whole(reduce.axes, env.syms))
    if 0 in whole.shape:
        return total
    step = _REDUCE[reduce.combine.name]
    for piece in _blocks(whole, LIMIT):
        values = convert(eval_expr(body, replace(env, block=piece)), body.dtype, reduce.acc)
        values = np.broadcast_to(values, piece.shape)
        over = tuple(range(rank, len(piece.axes)))
        with np.errstate(all="ignore"):
            part = step.reduce(values, axis=over, dtype=dtype) if over else values
            at = _within(block, Block(piece.axes[:rank], piece.ranges[:rank]))
            total[at] = step(total[at], part)
    return total


def run_compute(compute: Compute, arrays: Mapping[Value, Array], syms: Syms) -> Array:
    """The array of `compute.out`."""
    whole = _whole(compute.axes, syms)
    out = np.empty(whole.shape, compute.out.tensor.dtype.numpy)
    env = Env(whole, syms, arrays)
    root = compute.body
    total: Array | None = None
    if compute.reduce is not None:
        total = _reduce(compute.reduce, compute.body, whole, env)
        if compute.reduce.finish is None:
            return convert(total, compute.reduce.acc, compute.out.tensor.dtype)
        root = compute.reduce.finish
    for piece in _blocks(whole, LIMIT) if 0 not in whole.shape else ():
        at = _within(whole, piece)
        value = eval_expr(root, replace(env, block=piece, acc=None if total is None else total[at]))
        out[at] = convert(value, root.dtype, compute.out.tensor.dtype)
    return out


def bind(t: TensorType | None, shape: Sequence[int], syms: dict[Sym, int]) -> None:
    """Learn run-time dimensions from a shape: dims of the form `scale * S + offset` with S not yet known."""
    for d, n in zip(t.shape if t is not None else (), shape, strict=t is not None):
        if isinstance(d, int):
            continue
        unknown = [s for s in syms_of(d) if s not in syms]
        terms = poly(d)
        if len(unknown) != 1 or set(terms) - {(), (unknown[0],)}:
            continue
        scale, offset = terms.get((unknown[0],), 0), terms.get((), 0)
        if scale and (n - offset) % scale == 0:
            syms[unknown[0]] = (n - offset) // scale


def run_loops(
    loops: LoopGraph,
    inputs: Mapping[str, Array],
    consts: Mapping[Value, Constant] | None = None,
    opaque: OpaqueFn | None = None,
    keep: Iterable[Value] = (),
) -> dict[str, Array]:
    """Outputs (and `keep`) by name. `consts` adds to the graph's; `opaque` runs what stays with onnxruntime."""
    arrays: dict[Value, Array] = {}
    syms: dict[Sym, int] = {}
    for v in loops.inputs:
        if v.name in inputs:
            arrays[v] = np.asarray(inputs[v.name])
            bind(v.type, arrays[v].shape, syms)
            syms |= numbers(v, arrays[v])
    for v, const in {**loops.consts, **(consts or {})}.items():
        arrays.setdefault(v, const.numpy())
    for item in loops.items:
        if isinstance(item, Compute):
            arrays[item.out] = run_compute(item, arrays, syms)
            continue
        if opaque is None:
            raise IRError("IR_OPAQUE", f"nothing to run {item.node.name} ({item.node.op}) with", item.refusal.why)
        got = opaque(item.node, [None if v is None else arrays[v] for v in item.node.inputs])
        for out, array in zip(item.node.outputs, got, strict=True):
            if out is not None:
                arrays[out] = np.asarray(array)
                bind(out.type, arrays[out].shape, syms)
                syms |= numbers(out, arrays[out])
    return {v.name: arrays[v] for v in (*loops.outputs, *keep)}


def bind_kernel(kernel: Kernel, arrays: Mapping[Value, Array]) -> dict[Sym, int]:
    """The kernel's run-time dimensions from the shapes of its inputs; UsageError when a shape does not fit."""
    syms: dict[Sym, int] = {}
    for b in kernel.dims:
        array = arrays[b.value]
        got = array.shape[b.axis] if b.part is None else b.part.read(array, b.axis)
        n = got - b.offset
        if n % b.scale or n < 0:
            raise UsageError("E_SHAPE", f"{b.value} axis {b.axis}: {n + b.offset} is not {b.scale}*{b.sym}+{b.offset}")
        syms[b.sym] = n // b.scale
    for v in kernel.inputs:
        for axis, (d, n) in enumerate(zip(v.tensor.shape, arrays[v].shape, strict=True)):
            if isinstance(d, int) and d != n:
                raise UsageError("E_SHAPE", f"{v} axis {axis} is {n}, the kernel was made for {d}")
    for c in kernel.checks:
        want, n = extent(c.expr, syms), arrays[c.value].shape[c.axis]
        if n != want:
            raise UsageError("E_SHAPE", f"{c.value} axis {c.axis} is {n}, but {c.expr} = {want}")
    for need in kernel.needs:
        if not bool(extent(need, syms)):
            raise UsageError("E_SHAPE", f"kernel {kernel.name} needs {need}")
    return syms


def run_kernel(kernel: Kernel, inputs: Sequence[Array]) -> list[Array]:
    """Run the row program on arrays in the order of `kernel.inputs`; outputs in the order of `kernel.outputs`."""
    arrays: dict[Value, Array] = {v: np.asarray(a) for v, a in zip(kernel.inputs, inputs, strict=True)}
    syms = bind_kernel(kernel, arrays)
    outs = {v: np.zeros(shape_of(v.tensor, syms), v.tensor.dtype.numpy) for v in kernel.outputs}
    whole = _whole(kernel.outer, syms)
    if 0 in whole.shape:
        return _as_seen(kernel, outs, syms)
    row = max(
        [math.prod(shape_of(x.type, syms)) for x in kernel.locals]
        + [math.prod(_whole(s.axes, syms).shape) for s in kernel.stages]
    )
    private = frozenset(x.value for x in kernel.locals)
    for outer in _blocks(whole, LIMIT // max(1, row)):
        buffers = {x.value: np.zeros(outer.shape + shape_of(x.type, syms), x.type.dtype.numpy) for x in kernel.locals}
        env = Env(outer, syms, {**arrays, **outs, **buffers}, private=private, outer=outer)
        for stage in kernel.stages:
            _run_stage(stage, env)
    return _as_seen(kernel, outs, syms)


def _as_seen(kernel: Kernel, outs: Mapping[Value, Array], syms: Syms) -> list[Array]:
    """Outputs under the shapes the runtime sees."""
    return [outs[v].reshape(shape_of(t, syms)) for v, t in zip(kernel.outputs, kernel.made, strict=True)]


def _run_stage(stage: Stage, env: Env) -> None:
    whole = env.block.plus(_whole(stage.axes, env.syms))
    if 0 in whole.shape:
        return
    total: Array | None = None
    if stage.reduce is not None:
        assert stage.reduce_body is not None
        total = _reduce(stage.reduce, stage.reduce_body, whole, env)
    inner = _whole(stage.axes, env.syms)
    for part in _blocks(inner, LIMIT // math.prod(env.block.shape)):
        piece = env.block.plus(part)
        here = replace(env, block=piece, acc=None if total is None else total[_within(whole, piece)])
        if stage.reduce is not None and stage.reduce.finish is not None:
            here = replace(here, acc=eval_expr(stage.reduce.finish, here))
        values = [eval_expr(s.value, here) for s in stage.stores]  # a stage reads nothing it stores
        for s, value in zip(stage.stores, values, strict=True):
            _store(s, value, here)


def _store(store: Store, value: Array, env: Env) -> None:
    target = env.arrays[store.target]
    shape = env.block.shape
    dtype = store.target.tensor.dtype
    value = np.broadcast_to(convert(value, store.value.dtype, dtype), shape)
    index = _lead(store.target, env)
    index += [eval_expr(i, env) for i in store.index]
    if not index:
        target[()] = value.reshape(-1)[-1]
        return
    for i, n in zip(index, target.shape, strict=True):
        if i.size and (i.min() < 0 or i.max() >= n):
            raise IRError("IR_STORE", f"store to {store.target} out of range", f"index {i.min()}..{i.max()}, size {n}")
    target[tuple(np.broadcast_to(i, shape) for i in index)] = value


COMBINE = frozenset(_REDUCE)
__all__ = ["COMBINE", "Block", "Env", "bind", "convert", "eval_expr", "run_compute", "run_kernel", "run_loops"]
