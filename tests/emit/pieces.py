"""The way to an Emission without code generation: function bodies stand in for the kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

from onnxfuse.config import FusionConfig
from onnxfuse.emit import Emission, emit
from onnxfuse.errors import Refusal
from onnxfuse.frontend.atomize import Atomized, atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.read import Source, read
from onnxfuse.fuse import fuse
from onnxfuse.ir.loops import LoopGraph, Opaque
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.plan import Plans
from onnxfuse.schedule.kernelize import kernelize
from tests.frontend.onnx_text import prepared


def emptied(model, **options) -> Emission:
    """Read and written, nothing in between (P67)."""
    source = read(model, **options)
    graph = source.graph
    items = tuple(Opaque(n, Refusal("TEST")) for n in graph.nodes)
    loops = LoopGraph(graph.name, graph.inputs, items, graph.outputs, graph.consts)
    return emit(source, Atomized(graph, {}, {}, {}), Plans(Partition(loops, (), items, ()), ()))


def planned(model, fusion: FusionConfig | None = None) -> tuple[Source, Atomized, Plans]:
    source = read(model)
    atomized = atomize(prepared(source).typed)
    kernels = kernelize(fuse(lower(atomized), fusion or FusionConfig()))
    return source, atomized, Plans(kernels.partition, (), kernels.calls, kernels.refused)


def fused(model, fusion: FusionConfig | None = None, refuse: int = 0, **names) -> Emission:
    """Every group a custom node, but the first `refuse` of them."""
    source, atomized, plans = planned(model, fusion)
    refused = dict.fromkeys(list(plans.calls)[:refuse], Refusal("TEST")) | dict(plans.refused)
    return emit(source, atomized, Plans(plans.partition, (), plans.calls, refused), **names)


def session(model: onnx.ModelProto | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    given = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options)


def run(model: onnx.ModelProto | str, feeds: dict[str, np.ndarray]) -> list:
    return session(model).run(None, feeds)


def assert_same(a, b, feeds: dict[str, np.ndarray], exact: bool = True) -> None:
    first, second = session(a), session(b)
    assert [(i.name, i.type, i.shape) for i in first.get_inputs()] == [
        (i.name, i.type, i.shape) for i in second.get_inputs()
    ]
    assert [o.name for o in first.get_outputs()] == [o.name for o in second.get_outputs()]
    for x, y in zip(first.run(None, feeds), second.run(None, feeds), strict=True):
        if exact or not isinstance(x, np.ndarray) or x.dtype.kind != "f":
            np.testing.assert_array_equal(y, x, strict=True)
        else:
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)
