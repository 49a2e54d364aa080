"""One stage before code generation as a model that runs everywhere, without a library.  Stage results -> Emission.

read, prepare, atomize   the stage's nodes; nothing of domain `onnxfuse`, no metadata of ours
fuse .. plan             a custom node with its function body for every group (what kernelize could not build stays)
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.emit.bodies import emit_bodies
from onnxfuse.emit.model import Emission, emit
from onnxfuse.emit.plain import no_plans, plain
from onnxfuse.frontend.atomize import Atomized
from onnxfuse.frontend.bodies import Scope
from onnxfuse.frontend.validate import check, skeleton
from onnxfuse.ir.plan import Plans

EXPORTS = ("read", "prepare", "atomize", "fuse", "layout", "kernelize", "plan")


def export(stage: str, scopes: Sequence[Scope], atomized: Sequence[Atomized], plans: Plans) -> Emission:
    """The model after `stage`, one of EXPORTS; `plans` as they are after it (fuse and layout: after kernelize)."""
    emission = _export(stage, scopes, atomized, plans)
    check(skeleton(emission.model, emission.tensors))
    return emission


def _export(stage: str, scopes: Sequence[Scope], atomized: Sequence[Atomized], plans: Plans) -> Emission:
    source = scopes[0].source
    if stage == "read":
        return plain(source, source.graph)
    if stage in ("prepare", "atomize"):
        graphs = [s.graph for s in scopes] if stage == "prepare" else [a.graph for a in atomized]
        inside = emit_bodies(scopes, [Atomized(g, {}, {}, {}) for g in graphs], no_plans(graphs))
        return plain(source, graphs[0], inside)
    return emit(source, atomized[0], plans, None, record={"stage": stage}, inside=emit_bodies(scopes, atomized, plans))
