"""rowwise, shape `row`: lanes along a stage's own axis or its reduction, accumulators combined in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from onnxfuse.codegen.build import I1, Builder, Reg, is_vector, lanes_of, vec
from onnxfuse.codegen.prims import lower
from onnxfuse.codegen.scalar_expr import Env, emit_dim, literal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import acc, lit
from onnxfuse.ir.loops import Reduce
from onnxfuse.templates.nest import Step
from onnxfuse.templates.row_ahead import next_row
from onnxfuse.templates.row_loops import sweep
from onnxfuse.templates.row_shape import Spec, inner_axis, may_span, reduce_axis, unroll_of
from onnxfuse.templates.row_stages import nested, plain_stages, store_all, summand


def row_stage(build: Builder, env: Env, spec: Spec, stage: Step) -> Env:
    """A stage of shape `row`. Returns the env with what it bound."""
    axis = inner_axis(stage, spec.lanes)
    if axis is None:
        return plain_stages(build, [env], [stage])[0]
    reduce = stage.reduce
    if reduce is not None and axis in reduce.axes:
        if not stage.axes:
            return _reduce_row(build, env, spec, stage, reduce)

        def point(envs: list[Env], accs: list[Reg]) -> list[Reg]:
            _reduce_row(build, envs[0], spec, replace(stage, axes=()), reduce)
            return accs

        nested(build, [env], stage.axes, [], point)
        return env

    def body(envs: list[Env], _part: int, accs: list[Reg]) -> list[Reg]:
        plain_stages(build, envs, [replace(stage, axes=())])
        return accs

    def line(envs: list[Env], accs: list[Reg]) -> list[Reg]:
        extent = emit_dim(build, envs[0], axis.extent)
        unroll = min(spec.unroll, unroll_of([stage]))
        sweep(build, envs[0], spec, axis, 0, extent, unroll, [], body, may_span([stage], axis))
        return accs

    nested(build, [env], [a for a in stage.axes if a is not axis], [], line)
    return env


def _reduce_row(build: Builder, env: Env, spec: Spec, stage: Step, reduce: Reduce) -> Env:
    """Reduce with lanes along the last reduce axis, then store (one scalar)."""
    axes = reduce_axis(stage, spec.lanes)
    last = axes[-1]
    start = literal(build, lit(identity(reduce.combine.name, reduce.acc), reduce.acc))
    extent = emit_dim(build, env, last.extent)
    whole = isinstance(extent, int) and extent % spec.lanes == 0
    scalar_tail = not whole and not spec.masked and spec.lanes > 1
    unroll = min(spec.unroll, unroll_of([stage]))
    wide = unroll > 1 and spec.lanes > 1 and may_span([replace(stage, stores=())], last)
    sizes = [unroll * spec.lanes, spec.lanes] if wide else [spec.lanes] * (unroll if spec.lanes > 1 else 1)
    sizes += [1] if scalar_tail else []
    init = [build.splat(start, n) for n in sizes]
    loose = reduce.combine.name in ("min", "max") and reduce.acc in (DType.F32, DType.F64)
    flags = [build.const(vec(I1, n), 0) for n in sizes] if loose else []

    ask = next_row(build, env, spec, stage, last)

    def body(envs: list[Env], part: int, carried: list[Reg]) -> list[Reg]:
        if part == 0:
            ask(envs)
        out = list(carried)
        first = len(sizes) - 1 if part == 2 else 1 if wide and part == 1 else 0
        for k, e in enumerate(envs, first):
            v = summand(build, e, stage, reduce)
            new = _join(build, reduce, loose, carried[k], v)
            out[k] = new if e.mask is None else build.select(e.mask, new, carried[k])
            if loose:  # comparisons lose NaN: note apart from them that there was one
                bad = lower(build, "isnan", [v], reduce.acc, DType.BOOL)
                bad = bad if e.mask is None else build.ir.and_(bad, e.mask)
                out[k + len(sizes)] = build.ir.or_(carried[k + len(sizes)], bad)
        return out

    def line(envs: list[Env], carried: list[Reg]) -> list[Reg]:
        return sweep(build, envs[0], spec, last, 0, extent, unroll, carried, body, wide)

    carried = nested(build, [env], axes[:-1], [*init, *flags], line)
    total = _combine_all(build, carried[: len(sizes)], partial(_join, build, reduce, loose))
    if loose:
        bad = _combine_all(build, carried[len(sizes) :], build.ir.or_)
        total = build.select(bad, build.like(total, math.nan), total)
    if reduce.init.value != identity(reduce.combine.name, reduce.acc):
        total = _join(build, reduce, False, literal(build, reduce.init), total)
    return store_all(build, [env.at(bound={acc(reduce.acc): total})], stage)[0]


Join = Callable[[Reg, Reg], Reg]


def _join(build: Builder, reduce: Reduce, loose: bool, a: Reg, b: Reg) -> Reg:
    """Combine two partial results; `loose`: a minimum or maximum that need not keep NaN."""
    if not loose:
        return lower(build, reduce.combine.name, [a, b], reduce.acc, reduce.acc)
    before = build.ir.fcmp_ordered("<" if reduce.combine.name == "min" else ">", a, b)
    return build.ir.select(before, a, b)


def _combine_all(build: Builder, accs: list[Reg], join: Join) -> Reg:
    """Pairwise: vectors with vectors of the same width, then halves of the last vector, then the scalar accumulator."""
    vectors = [a for a in accs if is_vector(a)]
    scalars = [a for a in accs if not is_vector(a)]
    least = min(map(lanes_of, vectors), default=1)
    vectors = [_folded(build, join, v, least) for v in vectors]
    while len(vectors) > 1:
        pairs = [join(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + (vectors[-1:] if len(vectors) % 2 else [])
    scalars += [build.lane(_folded(build, join, v, 1), 0) for v in vectors]
    total = scalars[-1]
    for s in scalars[:-1]:
        total = join(total, s)
    return total


def _folded(build: Builder, join: Join, v: Reg, lanes: int) -> Reg:
    """The halves of a vector joined until so many lanes are left."""
    while (n := lanes_of(v)) > lanes:
        v = join(build.shuffle(v, v, range(n // 2)), build.shuffle(v, v, range(n // 2, n)))
    return v


def identity(combine: str, dtype: DType) -> int | float | bool:
    """The neutral element of a reduction."""
    match combine:
        case "add" | "bitor" | "bitxor" | "or" | "xor":
            return 0
        case "mul" | "and":
            return 1
        case "bitand":
            return -1
        case "max":
            return -math.inf if dtype.is_float else dtype.limits[0]
        case "min":
            return math.inf if dtype.is_float else dtype.limits[1]
    raise KeyError(combine)
