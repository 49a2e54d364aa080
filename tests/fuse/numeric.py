"""Run a partition kernel by kernel in the interpreter; the loops themselves are the oracle."""

from __future__ import annotations

import numpy as np

from onnxfuse.config import FusionConfig
from onnxfuse.fuse import fuse
from onnxfuse.ir.expr import Sym, sym
from onnxfuse.ir.graph import Node, Value
from onnxfuse.ir.interp import run_compute, run_kernel, run_loops, shape_of
from onnxfuse.ir.loops import LoopGraph, Opaque
from onnxfuse.ir.partition import Decision, Group
from onnxfuse.schedule.kernelize import kernelize

Array = np.ndarray
SYMS: dict[Sym, int] = {sym("N"): 3, sym("M"): 2}


def stays(node: Node, inputs: list[Array | None]) -> list[Array]:
    """What a node that stays computes in tests."""
    return [np.asarray(inputs[0]) * np.float32(0.5) for _ in node.outputs]


def feeds(loops: LoopGraph, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {v.name: rng.uniform(-1, 1, shape_of(v.tensor, SYMS)).astype(np.float32) for v in loops.inputs}


def run_partition(
    loops: LoopGraph, config: FusionConfig, given: dict[str, Array]
) -> tuple[dict[str, Array], list[Decision]]:
    """Graph outputs by name, and the decisions of kernelize."""
    before = fuse(loops, config)
    made = kernelize(before)
    arrays: dict[Value, Array] = {v: given[v.name] for v in loops.inputs}
    arrays |= {v: c.numpy() for v, c in loops.consts.items()}
    todo: list[Group | Opaque] = [*made.partition.groups, *before.left]
    while todo:
        waiting: list[Group | Opaque] = []
        for one in todo:
            if not all(v in arrays for v in one.reads):
                waiting.append(one)
            elif isinstance(one, Opaque):
                outs = stays(one.node, [arrays[v] for v in one.node.reads])
                arrays.update(zip(one.node.results, outs, strict=True))
            elif (call := made.calls.get(one.id)) is not None:
                outs = run_kernel(call.kernel, [arrays[v] for v in call.inputs])
                arrays.update(zip(call.outputs, outs, strict=True))
            else:
                for c in one.members:
                    arrays[c.out] = run_compute(c, arrays, SYMS)
        assert len(waiting) < len(todo), "not executable"
        todo = waiting
    new = list(made.partition.decisions)[len(before.decisions) :]
    return {v.name: arrays[v] for v in loops.outputs}, new


def expected(loops: LoopGraph, given: dict[str, Array]) -> dict[str, Array]:
    return run_loops(loops, given, opaque=stays)
