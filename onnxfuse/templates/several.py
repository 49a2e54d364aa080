"""Several products of the same rows in one kernel: the query, key and value projections of an attention.

A kernel whose stages fall into parts that do not read each other is run part by part as the gemm template would, but
with the tasks of all parts in one list: one call, and what one part leaves idle another uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onnxfuse.codegen.build import I8, I64, PTR, VOID, Builder, Index, Reg
from onnxfuse.errors import Refusal
from onnxfuse.ir.kernel import Kernel, Stage
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.target import Target
from onnxfuse.templates.gemm import GEMM

LAUNCH = 2e-6  # seconds of one call, in every template's price


class Several:
    """The template: see the module docstring."""

    name = "several"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """One schedule, or why the kernel is not several products."""
        parts = split_parts(kernel)
        if len(parts) < 2:
            return Refusal("SEVERAL_FORM", f"{len(parts)} part")
        plans = _plans(parts, target)
        if isinstance(plans, Refusal):
            return plans
        cost = sum(p.cost for p in plans) - LAUNCH * (len(plans) - 1)
        return [replace(plans[0], template=self.name, unroll=len(plans), cost=cost)]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI: those of the parts, and their sums."""
        parts = split_parts(kernel)
        plans = _plans(parts, target)
        assert not isinstance(plans, Refusal), plans
        made: list[Emitted] = []
        for k, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            with build.part(f"part{k}"):
                made.append(GEMM.emit(build, part, plan, target))
        phases = max(e.phases for e in made)
        for phase in range(phases):
            # A part that lifts no factor has nothing to do in the first one.
            _emit_phase(build, made, phase, phases)
        with build.function("scratch", I64, [PTR]) as fn:
            build.ret(_sum(build, [_call(build, k, "scratch", I64, [fn.args[0]]) for k in range(len(made))]))
        if any(e.packs for e in made):
            _emit_pack(build, made)
        return Emitted(phases, any(e.packs for e in made))


SEVERAL = Several()


def split_parts(kernel: Kernel) -> list[Kernel]:
    """The kernel cut into parts that read no private buffer of each other, each with stages of its own."""
    private = {x.value for x in kernel.locals}
    parts: list[list[Stage]] = []
    for s in kernel.stages:
        reads = {ld.source for ld in s.loads} & private
        mine = [p for p in parts if any(st.target in reads for q in p for st in q.stores)]
        joined = [q for p in mine for q in p] + [s]
        parts = [p for p in parts if p not in mine] + [joined]
    return [
        replace(
            kernel,
            stages=tuple(p),
            locals=tuple(x for x in kernel.locals if any(st.target is x.value for s in p for st in s.stores)),
        )
        for p in parts
    ]


def _plans(parts: Sequence[Kernel], target: Target) -> list[Schedule] | Refusal:
    plans: list[Schedule] = []
    for p in parts:
        found = GEMM.propose(p, target)
        if isinstance(found, Refusal):
            return found
        plans += found[:1]
    return plans


def _call(build: Builder, k: int, name: str, ret: object, args: Sequence[Reg]) -> Reg:
    """Call a function of part k."""
    return build.call(f"{build.prefix}.part{k}.{name}", ret, args)


def _sum(build: Builder, terms: Sequence[Reg]) -> Index:
    total: Index = 0
    for t in terms:
        total = build.add(total, t)
    return total


def _emit_phase(build: Builder, made: Sequence[Emitted], phase: int, phases: int) -> None:
    """Tasks of a phase one part after the other; the last phases of all parts coincide."""
    own = [(k, phase - (phases - e.phases)) for k, e in enumerate(made) if phase >= phases - e.phases]
    with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
        build.ret(_sum(build, [_call(build, k, f"tasks.{p}", I64, [fn.args[0]]) for k, p in own]))
    with build.function(f"run.{phase}", VOID, [PTR, PTR, PTR, PTR, I64]) as fn:
        env, bufs, packed, scratch, task = fn.args
        places = _places(build, made, env)
        first: Index = 0
        for k, p in own:
            count = _call(build, k, f"tasks.{p}", I64, [env])
            mine = build.sub(task, first)
            low = build.ir.icmp_signed(">=", build.i64(mine), build.i64(0))
            high = build.ir.icmp_signed("<", build.i64(mine), count)
            first = build.add(first, count)
            with build.if_then(build.ir.and_(low, high)):
                data, memory = places[k](packed, scratch)
                _call(build, k, f"run.{p}", VOID, [env, bufs, data, memory, build.i64(mine)])


def _places(build: Builder, made: Sequence[Emitted], env: Reg) -> list[Callable[[Reg, Reg], tuple[Reg, Reg]]]:
    """Where the packed constants and the scratch of every part begin."""
    out: list[Callable[[Reg, Reg], tuple[Reg, Reg]]] = []
    data: Index = 0
    memory: Index = 0
    for k, e in enumerate(made):

        def place(packed: Reg, scratch: Reg, data: Index = data, memory: Index = memory) -> tuple[Reg, Reg]:
            return build.offset(packed, data, I8), build.offset(scratch, memory, I8)

        out.append(place)
        if e.packs:
            data = build.add(data, _call(build, k, "packed_bytes", I64, []))
        memory = build.add(memory, _call(build, k, "scratch", I64, [env]))
    return out


def _emit_pack(build: Builder, made: Sequence[Emitted]) -> None:
    packing = [k for k, e in enumerate(made) if e.packs]
    with build.function("packed_bytes", I64, []):
        build.ret(_sum(build, [_call(build, k, "packed_bytes", I64, []) for k in packing]))
    with build.function("pack", VOID, [PTR, PTR]) as fn:
        bufs, packed = fn.args
        at: Index = 0
        for k in packing:
            _call(build, k, "pack", VOID, [bufs, build.offset(packed, at, I8)])
            at = build.add(at, _call(build, k, "packed_bytes", I64, []))
