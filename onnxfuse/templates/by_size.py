"""A convolution whose sizes are known at run time only: the direct sum for few outputs, Winograd's algorithm for many.

Winograd's weights are several times as many, and a tile is paid for whole: for a handful of outputs it takes up to four
times as long as the direct sum, for many less than half. Where the sizes are not known and the cost models say that
either may win, the kernel holds both and chooses in every call, by the number of outputs of a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.analysis.variants import at_sizes
from onnxfuse.codegen.build import I8, I64, PTR, VOID, Builder, Index, Reg
from onnxfuse.codegen.scalar_expr import emit_dim, open_kernel
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Lit, Sym, substitute, syms_of
from onnxfuse.ir.expr import i64 as index
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Schedule, Template
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target
from onnxfuse.templates.gemm import GEMM
from onnxfuse.templates.winograd import WINOGRAD
from onnxfuse.templates.winograd_form import Conv, conv

TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # extents at which the two are compared
FEW, MANY = "few", "many"  # parts of the symbol names


class BySize:
    """The template: see the module docstring."""

    name = "by_size"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule, or why one of the two is enough."""
        c = conv(kernel)
        if isinstance(c, Refusal):
            return c
        if all(isinstance(d, int) for d in _extents(c)):
            return Refusal("BY_SIZE_KNOWN", "the sizes are known")
        many, few = (_best(t, kernel, target) for t in (WINOGRAD, GEMM))
        if many is None or few is None or few.cost <= many.cost:
            return Refusal("BY_SIZE_ONE", "one way is the better one for many outputs, and so for few")
        limit = _limit(kernel, c, target)
        if limit == 0:
            return Refusal("BY_SIZE_ONE", "one way is the better one at any size")
        return [replace(many, template=self.name, tile=(limit, *many.tile))]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI: those of both ways, and the choice."""
        c, few = conv(kernel), _best(GEMM, kernel, target)
        assert isinstance(c, Conv), c
        assert few is not None
        limit, *tile = schedule.tile
        with build.part(FEW):
            direct = GEMM.emit(build, kernel, few, target)
        with build.part(MANY):
            tiled = WINOGRAD.emit(build, kernel, replace(schedule, tile=tuple(tile)), target)
        made = {FEW: direct, MANY: tiled}
        assert all(e.packs for e in made.values()), made
        phases = max(e.phases for e in made.values())
        for phase in range(phases):
            parts = [part for part, e in made.items() if phase < e.phases]
            _emit_count(build, kernel, c, limit, f"tasks.{phase}", parts)
            _emit_run(build, kernel, c, limit, phase, parts)
        _emit_count(build, kernel, c, limit, "scratch", (FEW, MANY))
        _emit_pack(build)
        return Emitted(phases, packs=True)


BY_SIZE = BySize()


def _extents(c: Conv) -> list[Dim]:
    """Images, lines and columns of the output."""
    return [a.extent for a in (c.n, c.y, c.x) if a is not None]


def _best(template: Template, kernel: Kernel, target: Target) -> Schedule | None:
    found = template.propose(kernel, target)
    return None if isinstance(found, Refusal) else min(found, key=lambda s: s.cost)


def _limit(kernel: Kernel, c: Conv, target: Target) -> int:
    """Outputs of a feature up to which the direct sum is predicted to be faster, for a single image."""
    syms = [b.sym for b in kernel.dims]
    images = set() if c.n is None or isinstance(c.n.extent, int) else syms_of(c.n.extent)
    limit = 0
    for size in TRIED:
        sizes = {s: 1 if s in images else size for s in syms}
        here = at_sizes(kernel, sizes)
        many, few = (_best(t, here, target) for t in (WINOGRAD, GEMM))
        # So little that it is no blocked product, or no more a convolution: few outputs.
        if many is None or few is None or few.cost < many.cost:
            limit = max(limit, _outputs(c, sizes))
    return limit


def _outputs(c: Conv, sizes: dict[Sym, int]) -> int:
    """Outputs of a feature for these sizes."""
    total = 1
    for d in _extents(c):
        e = index(d) if isinstance(d, int) else simplify(substitute(d, {s: index(n) for s, n in sizes.items()}))
        total *= max(0, e.value) if isinstance(e, Lit) and isinstance(e.value, int) else 1
    return total


def _few(build: Builder, kernel: Kernel, c: Conv, limit: int, env: Reg) -> Reg:
    """Whether this call makes so few outputs that the direct sum runs."""
    sizes = open_kernel(build, kernel, env, None)
    total: Index = 1
    for d in _extents(c):
        total = build.mul(total, emit_dim(build, sizes, d))
    return build.ir.icmp_signed("<=", build.i64(total), build.i64(limit))


def _call(build: Builder, part: str, name: str, ret: object, args: Sequence[Reg]) -> Reg:
    """Call a function of one of the two."""
    return build.call(f"{build.prefix}.{part}.{name}", ret, args)


def _emit_count(build: Builder, kernel: Kernel, c: Conv, limit: int, name: str, parts: Sequence[str]) -> None:
    """A function of `env` that gives a number: that of the part which runs, or none if it has no such function."""
    with build.function(name, I64, [PTR]) as fn:
        env = fn.args[0]
        few, many = (_call(build, p, name, I64, [env]) if p in parts else build.i64(0) for p in (FEW, MANY))
        build.ret(build.ir.select(_few(build, kernel, c, limit, env), few, many))


def _emit_run(build: Builder, kernel: Kernel, c: Conv, limit: int, phase: int, parts: Sequence[str]) -> None:
    """One task of a phase; what Winograd's algorithm packs lies behind what the direct sum does."""
    with build.function(f"run.{phase}", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env, bufs, packed, scratch, task = fn.args
        behind = build.offset(packed, _call(build, FEW, "packed_bytes", I64, []), I8)
        with build.if_else(_few(build, kernel, c, limit, env)) as branches:
            for part, branch, data in zip((FEW, MANY), branches, (packed, behind), strict=True):
                with branch:
                    if part in parts:
                        _call(build, part, f"run.{phase}", VOID, [env, bufs, data, scratch, task])


def _emit_pack(build: Builder) -> None:
    with build.function("packed_bytes", I64, []):
        build.ret(build.add(*(_call(build, part, "packed_bytes", I64, []) for part in (FEW, MANY))))
    with build.function("pack", VOID, [PTR, PTR]) as fn:
        bufs, packed = fn.args
        _call(build, FEW, "pack", VOID, [bufs, packed])
        behind = build.offset(packed, _call(build, FEW, "packed_bytes", I64, []), I8)
        _call(build, MANY, "pack", VOID, [bufs, behind])
