"""Contractions as blocked matrix products: MatMul, Gemm, Einsum, convolution of any rank, their groups and transposes.

[Note: the loops]

    task: a range of units; unit = (batch point, block of columns, block of rows)
      for each block of K (KC deep):
        pack the block of b      (columns of a convolution are evaluated here; constants were packed at creation)
        for each sub-block of rows (stays in L2 while the columns pass by):
          pack the block of a, unless it is read in place
          for each panel of NR columns, for each tile of MR rows (the other way round where b is read in place):
            micro-kernel: tile += a * b      (the first tile of a panel may read b in place and leave it packed)
            after the last block of K: epilogue on the tile, stores

A full tile goes from registers through the epilogue to its stores; tiles rest in scratch between blocks of K. What
the tiles after this one read from memory is fetched meanwhile. How an operand is read is its `Access`; everything but
the tile sizes may be a run-time value. The order of summation depends on K and the place in the output alone, so
results do not depend on the number of threads.

Files: gemm_design (decisions), gemm_cut (blocks of known sizes), gemm_blocks (sizes at run time, tasks), gemm_const
(constants), gemm_operands (blocks of a and b), gemm_loops, gemm_fetch (what tiles ask memory for), gemm_epilogue,
microkernel, packing. Reasons and numbers:
docs/decisions/panels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.analysis.pairs import in_pairs
from onnxfuse.analysis.roles import Contraction, roles
from onnxfuse.codegen.build import Builder
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, axes_of, walk
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.target import Target
from onnxfuse.templates.estimate import epilogue_cost, expected, points, pointwise_seconds
from onnxfuse.templates.gemm_blocks import TASK_WORK, emit_tasks, lifted_area, split
from onnxfuse.templates.gemm_const import pack_constants
from onnxfuse.templates.gemm_design import Access, Design, design
from onnxfuse.templates.gemm_lift import emit_lift
from onnxfuse.templates.gemm_loops import emit_run, emit_tiles
from onnxfuse.templates.gemm_operands import emit_block_b

MIN_WORK = 8 * 1024  # products below which plain loops win (FUSION.md 3.4.7)
PACK_SECONDS = 2e-10  # per element: measured, 8 lanes
ACCUMULATORS = frozenset({DType.F32, DType.F64, DType.I32, DType.U32})


class Gemm:
    """The template: see the note above."""

    name = "gemm"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule, or why the kernel is not a matrix product worth blocking."""
        c = contraction(kernel)
        if isinstance(c, Refusal):
            return c
        refusal = _unfit(c)
        if refusal is not None:
            return refusal
        d = design(c, kernel, target)
        columns = c.cols.extent
        if isinstance(columns, int) and columns < 4 and not d.is_thin(columns):
            return Refusal("GEMM_NARROW", f"{columns} columns")
        packed = tuple(n for n, how in (("a", d.a), ("b", d.b)) if how is Access.CONST)
        return [
            Schedule(
                self.name,
                lanes=d.tile.lanes,
                vector="" if c.cols.axis is None else c.cols.axis.name,
                tile=(d.tile.mr, d.tile.nv, d.kc, d.nc),
                pack=packed,
                grain=TASK_WORK,
                cost=_cost(d, target),
            )
        ]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI."""
        c = contraction(kernel)
        assert isinstance(c, Contraction), c
        d = design(c, kernel, target)
        if schedule.tile:
            mr, nv, kc, nc = schedule.tile
            d = replace(d, tile=replace(d.tile, mr=mr, nv=nv), kc=max(1, kc // d.taps) * d.taps, nc=nc)
        packs = Access.CONST in (d.a, d.b)
        tiles = emit_tiles(build, d)
        block = emit_block_b(build, kernel, d) if d.packs_b or d.b is Access.PANEL else None
        if packs:
            pack_constants(build, kernel, [d])
        main = 0
        if c.pairs:
            emit_lift(build, kernel, c, main, lambda env, at: lifted_area(build, split(build, env, d), d, at))
            main += 1
        emit_tasks(build, kernel, d, main)
        emit_run(build, kernel, d, main, tiles, block)
        return Emitted(phases=main + 1, packs=packs)


GEMM = Gemm()


def contraction(kernel: Kernel) -> Contraction | Refusal:
    """The roles of the kernel's axes; products of small integers in pairs."""
    c = roles(kernel)
    return c if isinstance(c, Refusal) else in_pairs(c, kernel.consts) or c


def _unfit(c: Contraction) -> Refusal | None:
    if c.acc not in ACCUMULATORS:
        return Refusal("GEMM_DTYPE", f"accumulates in {c.acc}")
    sizes = [c.rows.extent, c.cols.extent, c.depth, *(a.extent for a in c.batch)]
    if all(isinstance(s, int) for s in sizes):
        work = 1
        for s in sizes:
            work *= s if isinstance(s, int) else 1
        if work < MIN_WORK:
            return Refusal("GEMM_SMALL", f"{work} products, {MIN_WORK} are worth a blocked product")
    inner = {c.rows.axis, *c.rows.parts, c.cols.axis, *c.cols.parts, *c.k}
    for e in walk(c.a, c.b):
        if isinstance(e, Apply) and e.prim.name == "bcast" and axes_of(e) & inner:
            return Refusal("GEMM_BCAST", f"{e} broadcasts at run time")
    return None


def _cost(d: Design, target: Target) -> float:
    """Seconds on one core: arithmetic at 80 % of peak, packing and epilogue, or the traffic of the operands."""
    c = d.c
    m, n, k = expected(c.rows.extent), expected(c.cols.extent), expected(c.depth)
    batch = points(c.batch)
    rate = target.peak * 0.8 * (4 / c.acc.bytes if c.acc.is_float or c.pairs is not None else 0.5)
    efficiency = min(1.0, (m + 1) / 4) * min(1.0, n / 16) if not d.is_thin(int(n)) else 0.5
    arithmetic = 2 * batch * m * n * k / (rate * efficiency)
    packed = (m * k if d.a in (Access.ROWS, Access.COLUMNS) else 0) + (k * n if d.packs_b else 0)
    epilogue = pointwise_seconds(batch * m * n * epilogue_cost(c.finish, c.stores), target, c.acc.bytes)
    traffic = batch * ((m * k + m * n) * c.acc.bytes + k * n * d.b_bytes)
    return max(arithmetic + batch * packed * PACK_SECONDS + epilogue, traffic / (4 * target.bw)) + 2e-6
