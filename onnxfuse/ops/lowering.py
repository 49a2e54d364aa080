"""A node as loops: its attributes and inputs as its entry wants them, the body of the entry as Computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, acc, apply, cast, eq, i64, lit, substitute, var, where
from onnxfuse.ir.graph import Foreign, Node, Value
from onnxfuse.ir.loops import Axis, Compute, Reduce
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.simplify import as_dim, dim_expr, same, simplify
from onnxfuse.ir.types import Dim
from onnxfuse.ops.dsl import (
    Known,
    Loops,
    Tensor,
    any_of,
    axis_of,
    broadcast_load,
    broadcast_shape,
    chosen,
    compute,
    equal_extents,
    maximum,
    named_axes,
    product,
)
from onnxfuse.ops.table import REDUCE_RULES, ReduceRule, parameters


def arguments(node: Node) -> dict[str, Any]:
    """A node's attributes as keyword arguments. Raises Unsupported for one the entry does not know."""
    _, attrs = parameters(node.op)
    names = {p.name.rstrip("_"): p.name for p in attrs if p.name != "outputs"}
    out: dict[str, Any] = {}
    for key, value in node.attrs.items():
        if key not in names:
            raise Unsupported("UN_ATTR", f"{node.op} attribute {key}={_brief(value)} is not implemented")
        if isinstance(value, Foreign):
            raise Unsupported("UN_ATTR", f"{node.op} attribute {key} is not a plain value")
        out[names[key]] = value
    for p in attrs:  # ONNX attributes are f32; so must be the defaults, or f64 kernels would see another number
        if isinstance(p.default, float):
            out.setdefault(p.name, float(np.float32(p.default)))
    required = [p for p in attrs if p.default is inspect.Parameter.empty and p.name != "outputs"]
    missing = [p.name for p in required if p.name not in out]
    if missing:
        raise Unsupported("UN_ATTR", f"{node.op} lacks the required attribute {missing[0]}")
    return out


def _brief(value: object) -> str:
    return "..." if isinstance(value, Foreign | np.ndarray) else str(value)


P = ParamSpec("P")
R = TypeVar("R")
_MISFITS = (
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    ZeroDivisionError,
    OverflowError,
    AssertionError,
)


def answering(ask: Callable[P, R]) -> Callable[P, R]:
    """A body meets attributes and shapes that nobody checked (perm=[0, 5], kernel_shape of another rank).

    Whatever it stumbles over is a reason to leave the node to onnxruntime, which refuses it or knows better; the reason
    says what the node was given where it says nothing else. The samples of tests/ops fail when an entry declines what
    it should cover, so this hides no mistake of ours.
    """

    @wraps(ask)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return ask(*args, **kwargs)
        except Unsupported as error:
            if error.code != "UN_SHAPE_MISMATCH" or error.why:
                raise
            raise Unsupported(error.code, error.what, _given(args[0])) from error
        except _MISFITS as error:
            node = args[0]
            assert isinstance(node, Node)
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            what = f"{node.op} node {node.name!r}: its inputs and attributes do not go together"
            raise Unsupported("UN_MISFIT", what, f"{_given(node)} ({said})") from error

    return run


def _given(node: object) -> str:
    """Types of a node's inputs, and its attributes, briefly."""
    assert isinstance(node, Node)
    inputs = ["nothing" if v is None else str(v.type or "of unknown type") for v in node.inputs]
    attrs = [f"{name} = {value}" for name, value in node.attrs.items() if isinstance(value, int | float | tuple)]
    said = ", ".join([*inputs, *attrs])
    return said if len(said) <= 200 else f"{said[:200]}..."


Facts = Mapping[Value, Known]  # known elements of integer values (shape arithmetic) and small constants


def reference(value: Value | None, facts: Facts) -> Tensor | None:
    """The Tensor a body sees for an input. Raises Unsupported for values that are no computable tensor."""
    if value is None:
        return None
    if value.type is None:
        raise Unsupported("UN_TYPE", f"{value} has no known element type or rank")
    if not value.type.dtype.computable:
        raise Unsupported("UN_DTYPE", f"element type {value.type.dtype} of {value} only passes through")
    known = facts.get(value)
    immediate = known.flat[0] if known is not None and known.size == 1 else None
    return Tensor(value, value.type, known, immediate if isinstance(immediate, Lit) else None)


def definitions(node: Node, facts: Facts) -> list[Loops]:
    """The loops of every output of an atomic node. Raises Unsupported with a code when the entry does not cover it."""
    op = node.op
    if op.family in (Family.OPAQUE, Family.CONSTANT) or op.fn is None:
        raise Unsupported("UN_OPAQUE", f"{op} is never fused", op.reason)
    refs = [reference(v, facts) for v in node.inputs]
    if op.dtypes and refs and refs[0] is not None and refs[0].dtype not in op.dtypes:
        raise Unsupported("UN_DTYPE", f"{op} on {refs[0].dtype} is not implemented")
    if op.family is Family.POINTWISE:
        return [_pointwise(op, refs, _fitting(node, refs))]
    if op.family is Family.REDUCE:
        return [_reduce(op, refs, _fitting(node, refs))]
    if op.family is Family.ALIAS:
        _fitting(node, refs)
        x = refs[0]
        assert x is not None
        return [Loops(x.shape, lambda *i: x[i], x.dtype)]
    made = call(node, op.fn if op.family is not Family.COMPOSITE else op.loops or op.fn, refs)
    return list(made) if isinstance(made, list | tuple) else [made]


def call(node: Node, fn: Callable[..., Any], operands: Sequence[object]) -> Any:
    """Call a function of the entry's signature with a node's attributes. Raises Unsupported when they do not fit."""
    attrs = _fitting(node, operands)
    wants = any(p.name == "outputs" for p in parameters(node.op)[1])
    return fn(*operands, **attrs, **({"outputs": len(node.outputs)} if wants else {}))


def _fitting(node: Node, operands: Sequence[object]) -> dict[str, Any]:
    """The attributes, once it is certain that the operands are those of the entry."""
    attrs = arguments(node)
    _check_arity(node.op, operands)
    return attrs


def _check_arity(op: Op, refs: Sequence[object]) -> None:
    inputs, _ = parameters(op)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in inputs):
        return
    if len(refs) > len(inputs):
        raise Unsupported("UN_ARITY", f"{op} has {len(refs)} inputs, the entry knows {len(inputs)}")
    for k, p in enumerate(inputs):
        if p.default is inspect.Parameter.empty and (k >= len(refs) or refs[k] is None):
            raise Unsupported("UN_ARITY", f"{op} lacks its input {p.name}")


def _pointwise(op: Op, refs: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> Loops:
    assert op.fn is not None
    present = [r for r in refs if r is not None]
    shape = broadcast_shape(*(r.shape for r in present))

    def scalars(index: Sequence[Expr]) -> list[Expr | None]:
        return [None if r is None else compute(broadcast_load(r, index, shape)) for r in refs]

    def body(*index: Expr) -> Expr:
        return op.fn(*scalars(index), **attrs)  # type: ignore[misc,no-any-return]

    first = present[0]
    probe = body(*(i64(0) for _ in shape))
    match op.dtype:
        case "same":
            dtype = first.dtype
        case "result":  # the body says it (Cast)
            dtype = probe.dtype
        case "second":  # Where: type of the second input
            dtype = present[1].dtype
        case _:
            dtype = DType(op.dtype)
    return Loops(shape, body, dtype)


def reduce_axes(
    rank: int, axes: Tensor | Sequence[int] | int | None, noop_with_empty_axes: int = 0
) -> list[int] | None:
    """Reduced axes, sorted; None = nothing is reduced (noop). Absent or empty axes reduce everything."""
    if isinstance(axes, Tensor):
        axes = axes.ints()
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return None if noop_with_empty_axes else list(range(rank))
    listed = [axes] if isinstance(axes, int) else list(axes)
    return sorted({axis_of(a, rank) for a in listed})


def _reduce(op: Op, refs: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> Loops:
    assert op.fn is not None
    rule = REDUCE_RULES[op]
    x = refs[0]
    assert x is not None
    axes_arg = refs[1] if len(refs) > 1 else attrs.get("axes")
    keepdims = bool(attrs.get("keepdims", 1))
    extra = {k: v for k, v in attrs.items() if k not in ("axes", "keepdims", "noop_with_empty_axes")}
    work = _accumulator(x.dtype, rule)
    map_one: Callable[[Expr], Expr] = lambda e: op.fn(cast(compute(e), work), **extra)  # type: ignore[misc]  # noqa: E731
    if isinstance(axes_arg, Tensor) and axes_arg.known is None and axes_arg.type.size != 0:
        return _reduce_given(x, axes_arg.given(), keepdims, rule, map_one)
    axes = reduce_axes(x.rank, axes_arg, attrs.get("noop_with_empty_axes", 0))
    if axes is None or not axes:
        count = i64(1)

        def one(*i: Expr) -> Expr:
            v = map_one(x[i])
            return _whole(rule.finish(v, cast(count, work)) if rule.finish is not None else v, x.dtype)

        return Loops(x.shape, one, x.dtype)
    kept = [k for k in range(x.rank) if k not in axes]
    shape = [1 if k in axes else d for k, d in enumerate(x.shape)] if keepdims else [x.shape[k] for k in kept]
    position = {k: (k if keepdims else n) for n, k in enumerate(kept)}
    extents = [x.shape[k] for k in axes]

    def body(*index: Expr) -> Expr:
        outer, inner = index[: len(shape)], index[len(shape) :]
        full = [inner[axes.index(k)] if k in axes else outer[position[k]] for k in range(x.rank)]
        return map_one(x[tuple(full)])

    finish = _finish(rule, extents, work, x.dtype)
    return Loops(shape, body, x.dtype, extents, rule.combine, rule.init(x.dtype), finish, work)


def _accumulator(dtype: DType, rule: ReduceRule) -> DType:
    """What is reduced in: onnxruntime adds and multiplies i32 in f64 (and i64, where we stay exact)."""
    return DType.F64 if dtype is DType.I32 and rule.combine in ("add", "mul") else dtype.compute


def _whole(x: Expr, dtype: DType) -> Expr:
    """A result in f64 as an integer: truncated; beyond the end of the type it is the end."""
    if x.dtype is not DType.F64 or not dtype.is_int:
        return x
    low, high = dtype.limits
    inside = cast(x, dtype)
    return where(x >= float(high), lit(high, dtype), where(x < float(low), lit(low, dtype), inside))


def _finish(rule: ReduceRule, extents: Sequence[Dim], work: DType, dtype: DType) -> Callable[..., Expr] | None:
    """What becomes of the accumulator: the entry's own last step, then an integer again."""
    final = rule.finish
    if final is None and work is dtype.compute:
        return None
    counted = cast(simplify(maximum(dim_expr(product(extents)), 1)), work)  # the mean of nothing is 0

    def finish(a: Expr, *_index: Expr) -> Expr:
        return _whole(a if final is None else final(a, counted), dtype)

    return finish


def _reduce_given(
    x: Tensor, axes: Sequence[Expr], keepdims: bool, rule: ReduceRule, map_one: Callable[[Expr], Expr]
) -> Loops:
    """Axes that are known when the kernel runs: each dimension has two loops, of which one has a single step."""
    work = _accumulator(x.dtype, rule)
    hits, needs = named_axes(axes, x.rank)
    gone = [any_of(h) for h in hits]
    place = [sum((where(g, i64(0), i64(1)) for g in gone[:k]), i64(0)) for k in range(x.rank)]
    rank = x.rank if keepdims else x.rank - len(axes)
    extents = [as_dim(where(g, d, i64(1))) for g, d in zip(gone, x.shape, strict=True)]
    if keepdims:
        shape = [as_dim(where(g, i64(1), d)) for g, d in zip(gone, x.shape, strict=True)]
    else:
        kept = [
            [(~g & eq(p, i64(m)), dim_expr(d)) for g, p, d in zip(gone, place, x.shape, strict=True)]
            for m in range(rank)
        ]
        shape = [as_dim(chosen(cases, i64(0))) for cases in kept]
        total = sum((where(g, i64(1), i64(0)) for g in gone), i64(0))
        needs = (*needs, eq(total, i64(len(axes))))  # no axis twice

    def body(*index: Expr) -> Expr:
        outer, inner = index[:rank], index[rank:]
        if keepdims:
            at = [o + r for o, r in zip(outer, inner, strict=True)]  # one of them is 0
        else:
            at = [
                r + where(g, i64(0), chosen([(eq(p, i64(m)), o) for m, o in enumerate(outer)], i64(0)))
                for g, p, r in zip(gone, place, inner, strict=True)
            ]
        return map_one(x[tuple(at)])

    finish = _finish(rule, extents, work, x.dtype)
    return Loops(shape, body, x.dtype, extents, rule.combine, rule.init(x.dtype), finish, work, needs=needs)


@answering
def lower_node(node: Node, facts: Facts) -> list[Compute]:
    """One Compute per present output of an atomic node (see ir/loops.py for what a Compute means)."""
    found = definitions(node, facts)
    declined = next((d.refusal for d in found if d.refusal is not None), None)
    if declined is not None:
        raise Unsupported(declined.code, f"{node.op} node {node.name!r}", declined.why)
    return [_compute(node, out, loops) for out, loops in zip(node.outputs, found, strict=False) if out is not None]


_AXES = "ijklmnopq"
_REDUCED = "rstuvw"


def _as_typed(out: Value, loops: Loops) -> Loops:
    """The loops over the value's own extents, which must be those the node computes (see frontend/shapes.py)."""
    shape = out.tensor.shape
    pairs = [(a, b) for a, b in zip(loops.shape, shape, strict=True) if not same(a, b)]
    if not pairs:
        return loops

    def body(*index: Expr) -> Expr:
        inside = {
            apply("bcast", i, dim_expr(d)): i for i, d in zip(index, shape, strict=False) if not isinstance(i, Lit)
        }
        return substitute(loops.body(*index), inside)

    return replace(loops, shape=shape, body=body, needs=(*loops.needs, *equal_extents(*pairs)))


def _compute(node: Node, out: Value, loops: Loops) -> Compute:
    loops = _as_typed(out, loops)
    names = list(loops.names) or [
        *(_AXES[k] if k < len(_AXES) else f"i{k}" for k in range(len(loops.shape))),
        *(_REDUCED[k] if k < len(_REDUCED) else f"r{k}" for k in range(len(loops.reduce))),
    ]
    axes = tuple(Axis(names[k], d) for k, d in enumerate(loops.shape))
    index = [i64(0) if isinstance(a.extent, int) and a.extent == 1 else var(a) for a in axes]
    if not loops.reduce:
        return Compute(out, axes, cast(simplify(loops.body(*index)), loops.dtype), node, needs=tuple(loops.needs))
    inner = tuple(Axis(names[len(axes) + k], d) for k, d in enumerate(loops.reduce))
    point = [i64(0) if isinstance(a.extent, int) and a.extent == 1 else var(a) for a in inner]
    kind = loops.acc or loops.dtype.compute
    body = cast(simplify(loops.body(*index, *point)), kind)
    raw = acc(kind)
    final = raw if loops.finish is None else simplify(loops.finish(raw, *index))
    final = cast(final, loops.dtype)
    rule = Reduce(inner, PRIMS[loops.combine], lit(loops.init, kind), kind, None if final is raw else final)
    return Compute(out, axes, body, node, rule, tuple(loops.needs))
