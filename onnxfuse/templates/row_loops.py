"""rowwise: loops over one axis by vectors, with carried values."""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.codegen.build import Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import Env
from onnxfuse.ir.loops import Axis
from onnxfuse.templates.row_shape import Spec

# ---- vector loops ----

# body(envs, part, accs): one env per vector; part 0 = the unrolled loop, 1 = single vectors and masked tail,
# 2 = scalar tail. Returns the new carried values.
Body = Callable[[list[Env], int, list[Reg]], list[Reg]]


def sweep(
    build: Builder,
    env: Env,
    spec: Spec,
    axis: Axis,
    low: Index,
    high: Index,
    unroll: int,
    init: list[Reg],
    body: Body,
    wide: bool = False,
    blocks: bool = False,
) -> list[Reg]:
    """Run `axis` from low to high by vectors, `unroll` of them a turn (`wide`: as one); returns the carried values.

    `blocks`: low is a multiple of every vector width, and so is high unless it is the end of the axis.
    """
    n, u = spec.lanes, unroll
    size = build.sub(high, low)
    # Blocks are multiples of every vector width.
    known = axis.extent if blocks and not isinstance(size, int) else size
    whole = isinstance(known, int) and known % n == 0
    accs = init
    at: Index = low

    def aligned(lanes: int) -> bool:
        return low % lanes == 0 if isinstance(low, int) else blocks

    def part(stop: Index, step: int, count: int, lanes: int, which: int) -> None:
        nonlocal at, accs
        if isinstance(at, int) and isinstance(stop, int) and at >= stop:
            return
        with build.carry(at, stop, step, accs, axis.name) as it:
            places = [build.i64(build.add(it.index, k * lanes)) for k in range(count)]
            envs = [env.at({axis: place}).vector(axis, lanes, aligned=aligned(lanes)) for place in places]
            it.next = body(envs, which, it.values)
        accs = it.results
        at = stop

    if u > 1 and n > 1:
        stop = build.add(low, build.mul(build.udiv(size, u * n), u * n))
        part(stop, u * n, *((1, u * n) if wide else (u, n)), 0)
    part(build.add(low, build.mul(build.udiv(size, n), n)), n, 1, n, 1)
    if whole or n == 1:
        return accs
    if not spec.masked:
        part(high, 1, 1, 1, 2)
        return accs
    if isinstance(at, int) and isinstance(high, int) and at >= high:
        return accs
    with build.carry(at, high, n, accs, f"{axis.name}.tail") as it:  # at most one turn
        mask = build.tail_mask(build.sub(high, it.index), n)
        it.next = body([env.at({axis: it.index}).vector(axis, n, mask, aligned(n))], 1, it.values)
    return it.results
