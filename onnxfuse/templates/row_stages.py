"""rowwise: stages that run once per vector, their reductions as plain loops with one accumulator per lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxfuse.codegen.build import Builder, Reg, reg_type, vec
from onnxfuse.codegen.prims import lower
from onnxfuse.codegen.scalar_expr import Env, emit_dim, emit_expr, emit_store, literal
from onnxfuse.ir.expr import Expr, acc, load
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.templates.nest import Step

# ---- stages ----


def plain_stages(build: Builder, envs: list[Env], stages: Sequence[Step]) -> list[Env]:
    """Stages without axes, for several vectors (or scalars) at once; reductions are loops around all of them."""
    for stage in stages:
        assert not stage.axes
        if stage.reduce is not None:
            accs = _plain_reduce(build, envs, stage, stage.reduce)
            name = acc(stage.reduce.acc)
            envs = [e.at(bound={name: a}) for e, a in zip(envs, accs, strict=True)]
        envs = store_all(build, envs, stage)
    return envs


def store_all(build: Builder, envs: list[Env], stage: Step) -> list[Env]:
    """Evaluate all values, then store them; a rank-0 local becomes a bound expression."""
    values = [[emit_expr(build, e, s.value) for s in stage.stores] for e in envs]
    out = []
    for e, row in zip(envs, values, strict=True):
        bound: dict[Expr, Reg] = {}
        for s, v in zip(stage.stores, row, strict=True):
            if not s.index and s.target not in e.buffers:
                bound[load(s.target, (), s.value.dtype)] = v
            else:
                emit_store(build, e, s.target, s.index, v)
        out.append(e.at(bound=bound) if bound else e)
    return out


def _plain_reduce(build: Builder, envs: list[Env], stage: Step, reduce: Reduce) -> list[Reg]:
    """One accumulator per lane and env; plain loops over the reduce axes."""
    typ = reg_type(reduce.acc)
    init = [build.splat(literal(build, reduce.init), e.lanes) for e in envs]
    assert all(v.type == vec(typ, e.lanes) for v, e in zip(init, envs, strict=True))
    return nested(build, envs, reduce.axes, init, lambda es, accs: _accumulate(build, es, stage, reduce, accs))


def nested(
    build: Builder,
    envs: list[Env],
    axes: Sequence[Axis],
    accs: list[Reg],
    body: Callable[[list[Env], list[Reg]], list[Reg]],
) -> list[Reg]:
    """Nested scalar loops with carried values around `body`."""
    if not axes:
        return body(envs, accs)
    extent = emit_dim(build, envs[0], axes[0].extent)
    with build.carry(0, extent, 1, accs, axes[0].name) as it:
        inner = [e.at({axes[0]: it.index}) for e in envs]
        it.next = nested(build, inner, axes[1:], it.values, body)
    return it.results


def _accumulate(build: Builder, envs: list[Env], stage: Step, reduce: Reduce, accs: list[Reg]) -> list[Reg]:
    """Combine body into the accumulator, for each env; lanes that are off keep their value."""
    out = []
    for e, a in zip(envs, accs, strict=True):
        new = lower(build, reduce.combine.name, [a, summand(build, e, stage, reduce)], reduce.acc, reduce.acc)
        out.append(new if e.mask is None else build.select(e.mask, new, a))
    return out


def summand(build: Builder, env: Env, stage: Step, reduce: Reduce) -> Reg:
    """What one turn of a reduction combines; stores on the side are made."""
    assert stage.reduce_body is not None
    v = emit_expr(build, env, stage.reduce_body)
    for st in stage.side:
        emit_store(build, env, st.target, st.index, st.value)
    if stage.reduce_body.dtype is not reduce.acc:
        v = lower(build, "cast", [v], stage.reduce_body.dtype, reduce.acc)
    return build.widen(v, env.lanes)
