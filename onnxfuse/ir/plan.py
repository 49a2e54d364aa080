"""Plans: how a kernel runs (data), the template protocol, and the kernel ABI every template emits.

The kernel ABI (all symbols private to the library, `K` = the kernel's symbol name). `env` is an i64 array that
`codegen/glue` fills before anything else runs; `bufs` is an array of pointers: inputs, then outputs.

    env layout:  [dims of kernel.dims in order][for each input: its dims][for each output: its dims]
    i64  K.tasks.P(ptr env)                                  number of independent tasks of phase P (0 is fine)
    void K.run.P(ptr env, ptr bufs, ptr packed, ptr scratch, i64 task)
    i64  K.scratch(ptr env)                                  bytes of scratch for the whole call (64-byte aligned)
    i64  K.packed_bytes()  and  void K.pack(ptr bufs, ptr packed)    only when `Emitted.packs`
                                                             bufs holds const inputs only (others are null)

Phases run one after another with a barrier between; tasks of a phase run in any order on any thread, so the split
into tasks must depend on `env` only (results do not depend on the number of threads). Every task that needs private
scratch takes its own slice: `scratch + offset(phase) + task * bytes_per_task`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from onnxfuse.errors import Refusal
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.partition import Partition
from onnxfuse.target import Target

if TYPE_CHECKING:
    from onnxfuse.codegen.build import Builder


@dataclass(frozen=True, slots=True)
class Schedule:
    """Parameters of one way to run a kernel: data, printable, overridable. Units: elements, unless said otherwise."""

    template: str
    lanes: int = 1  # vector width of the main type
    vector: str = ""  # name of the vectorised axis; "" = scalar
    tile: tuple[int, ...] = ()  # template-specific: (MR, NV, KC, NC) for gemm
    unroll: int = 1
    grain: int = 1  # smallest number of innermost-parallel iterations worth a task
    pack: tuple[str, ...] = ()  # operands packed at kernel creation
    cost: float = 0.0  # predicted seconds on one core; the planner takes the cheapest proposal

    def __str__(self) -> str:
        tile = "x".join(map(str, self.tile))
        parts = [f"template={self.template}", f"vector={self.vector or 'none'}x{self.lanes}"]
        parts += [f"tile={tile}"] if tile else []
        parts += [f"unroll={self.unroll}"] if self.unroll != 1 else []
        parts += [f"pack={','.join(self.pack)}"] if self.pack else []
        return " ".join([*parts, f"grain={self.grain}"])


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a template's `emit` reports back: number of phases, whether it packs constants."""

    phases: int = 1
    packs: bool = False


class Template(Protocol):
    """One way to run a kernel; one file in templates/. `templates.TEMPLATES` lists them in order of priority."""

    name: str

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        """Schedules for this kernel, best first; a Refusal with a code if the template does not fit."""
        ...

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        """Write the functions of the kernel ABI into the builder's module."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A kernel with the schedule chosen for it.

    general   the plan that runs when a `maybe` pair differs (same kernel, full broadcasting)
    variant   what the template emits when it is not `kernel` itself: the kernel with all `maybe` pairs equal
    """

    kernel: Kernel
    schedule: Schedule
    template: Template
    general: Plan | None = None
    variant: Kernel | None = None

    @property
    def code(self) -> Kernel:
        """The kernel to emit: same ABI as `kernel` (inputs, outputs and dims at the same places)."""
        return self.kernel if self.variant is None else self.variant

    def __str__(self) -> str:
        return f"plan @{self.kernel.name} {self.schedule}"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One group's use of a kernel: the graph values behind the kernel's inputs and outputs, in order.

    Kernels have values, axes and symbols of their own (canonical names), so that groups of equal structure share one.
    `halves` are the f32 values among inputs and outputs that stand for half values of the graph, with those.
    """

    kernel: Kernel
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name: str  # readable unique name of the custom node
    halves: Mapping[Value, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """What kernelize returns. `partition` may be finer than what came in (a group that cannot be one kernel).

    bodies   partitions of control flow bodies, outer ones first; numbers of groups are unique over all partitions
    """

    partition: Partition
    kernels: tuple[Kernel, ...]  # distinct ones
    calls: Mapping[int, Call]  # by group id
    refused: Mapping[int, Refusal]  # group id -> why its nodes stay with onnxruntime
    bodies: tuple[Partition, ...] = ()

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The main graph's, then the bodies'."""
        return (self.partition, *self.bodies)


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """One plan per distinct kernel; `calls`, `refused` and `bodies` as in Kernels, after the planner had its say."""

    partition: Partition
    plans: tuple[Plan, ...]
    calls: Mapping[int, Call] = field(default_factory=dict)
    refused: Mapping[int, Refusal] = field(default_factory=dict)
    bodies: tuple[Partition, ...] = ()

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The main graph's, then the bodies'."""
        return (self.partition, *self.bodies)

    def scope(self, k: int) -> Plans:
        """The same plans seen from partition `k` alone."""
        return replace(self, partition=self.partitions[k], bodies=())


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """A compiled custom-op library: the bytes of a shared object for `target`."""

    image: bytes
    target: Target
    plans: Plans
    digest: str  # content hash shared by the library and the nodes of the model
    llvm: str = ""  # text, only when asked for
