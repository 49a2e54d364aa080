"""Packing of small integers that are worked on as they are read (a zero point taken off a byte, say).

There are no masked loads of bytes: padding is written first, then every vector that lies inside, the last one shifted
back over elements that are written already; what is shorter than a vector goes one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.codegen.build import Builder, Index, Reg, mem_type, reg_type
from onnxfuse.codegen.scalar_expr import Env, emit_expr, literal
from onnxfuse.ir.expr import Expr, Lit, Load
from onnxfuse.ir.loops import Axis

SHORT = 4  # lanes of the vectors for lines shorter than a whole one
_LANES = Axis("lane", 1)


def fill(build: Builder, pad: Lit | None, inside: tuple[Index, Index], length: Index, dst: Reg, lanes: int) -> None:
    """Padding before and behind the elements `inside`, as whole vectors: what is inside is written later."""
    if pad is None:
        return
    typ = reg_type(pad.dtype)
    value = build.splat(literal(build, pad), lanes)
    low, high = inside
    for first, last in ((0, low), (build.mul(build.udiv(high, lanes), lanes), length)):
        with build.loop(first, last, lanes, name="pad") as v:
            build.store(value, build.offset(dst, v, typ))


def steps_run(
    build: Builder,
    env: Env,
    element: tuple[Load, Expr],
    step: int,
    src: Reg,
    inside: tuple[Index, Index],
    length: Index,
    dst: Reg,
    lanes: int,
) -> None:
    """dst[v] for the elements v inside: the expression of what is read at src[v * step]."""
    load, expr = element
    source, typ = mem_type(load.dtype), reg_type(expr.dtype)
    low, high = (build.i64(x) for x in inside)
    # A vector of every second element reads one more than it keeps: that one must be inside as well.
    safe = build.i64(build.sub(high, step - 1))

    def some(v: Index, n: int) -> None:
        raw = build.load(build.offset(src, build.mul(v, step), source), source, n * step if n > 1 else 1)
        if step > 1 and n > 1:
            raw = build.shuffle(raw, raw, range(0, n * step, step))
        here = env.at(bound={load: raw})
        value = emit_expr(build, here.vector(_LANES, n) if n > 1 else here, expr)
        build.store(build.widen(value, n) if n > 1 else value, build.offset(dst, v, typ))

    short = isinstance(length, int) and length < 2 * lanes and lanes > SHORT
    widths = (lanes, SHORT) if short else (lanes,)
    rest = _vectors(build, low, safe, widths, some)
    with build.loop(rest, high, name="v") as v:
        some(v, 1)


def _vectors(build: Builder, low: Reg, high: Reg, widths: tuple[int, ...], some: Callable[[Index, int], None]) -> Reg:
    """Vectors of the first width that fits; returns up to where they came."""
    b = build.ir
    lanes, *narrower = widths
    fits = b.icmp_signed("<=", b.add(low, build.i64(lanes)), high)
    with build.if_else(fits, likely=True) as (then, other):
        with then:
            last = b.sub(high, build.i64(lanes))
            with build.loop(low, last, lanes, name="v") as v:
                some(v, lanes)
            some(last, lanes)
            one = b.block
        with other:
            left = _vectors(build, low, high, tuple(narrower), some) if narrower else low
            two = b.block
    reached = b.phi(low.type)
    reached.add_incoming(high, one)
    reached.add_incoming(left, two)
    return reached
