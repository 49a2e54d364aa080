"""How every kernel runs. Kernels -> Plans.

In: distinct kernels. Out: one plan each: every template of `TEMPLATES` (in order of priority) is asked for proposals,
the cheapest predicted one wins; ties go to the earlier template. A kernel with an empty output takes the general one.
One with run-time broadcasts also gets a general schedule, which the library runs when extents differ. A kernel that no
template takes is refused with the last reason.
"""

from __future__ import annotations

from collections.abc import Collection

from onnxfuse.analysis.variants import equal_extents
from onnxfuse.errors import SLIPS, Refusal, slip
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Kernels, Plan, Plans, Schedule, Template
from onnxfuse.schedule.integers import left_to_runtime
from onnxfuse.target import Target
from onnxfuse.templates import GENERAL, TEMPLATES


def plan(kernels: Kernels, target: Target, skip: Collection[str] = ()) -> Plans:
    """Choose a template and a schedule for every kernel; templates named in `skip` are not asked."""
    chosen: dict[Kernel, Plan] = {}
    failed: dict[Kernel, Refusal] = {}
    for kernel in kernels.kernels:
        found = _planned(kernel, target, skip)
        if isinstance(found, Refusal):
            failed[kernel] = found
        else:
            chosen[kernel] = found
    calls = {g: c for g, c in kernels.calls.items() if c.kernel in chosen}
    refused = {**kernels.refused, **{g: failed[c.kernel] for g, c in kernels.calls.items() if c.kernel in failed}}
    return Plans(kernels.partition, tuple(chosen.values()), calls, refused, kernels.bodies)


def _planned(kernel: Kernel, target: Target, skip: Collection[str]) -> Plan | Refusal:
    try:
        return plan_kernel(kernel, target, skip)
    except SLIPS as error:
        return slip(error).refusal()


def plan_kernel(kernel: Kernel, target: Target, skip: Collection[str] = ()) -> Plan | Refusal:
    """The cheapest proposal for one kernel."""
    best: tuple[Schedule, Template] | None = None
    reason = Refusal("UN_TEMPLATE", "no template")
    variant = equal_extents(kernel)
    left = left_to_runtime(variant, target)
    if left is not None:
        return left
    templates = (GENERAL,) if _is_empty(kernel) else TEMPLATES
    for template in (t for t in templates if t.name not in skip):
        found = template.propose(variant, target)
        if isinstance(found, Refusal):
            reason = found
            continue
        for schedule in found:
            if best is None or schedule.cost < best[0].cost:
                best = (schedule, template)
    if best is None:
        return reason
    general = None
    if kernel.maybe:
        fallback = GENERAL.propose(kernel, target)
        if isinstance(fallback, Refusal):
            return fallback
        general = Plan(kernel, fallback[0], GENERAL)
    return Plan(kernel, best[0], best[1], general, None if variant is kernel else variant)


def _is_empty(kernel: Kernel) -> bool:
    """An output has no elements, whatever comes in: there is nothing to gain, and the others divide by extents."""
    return any(d == 0 for v in kernel.outputs for d in v.tensor.shape)
