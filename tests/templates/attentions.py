"""Attention in the spellings of exporters, and a way to run it: the one kernel it becomes against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.config import Config, FusionConfig, FusionMode
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.read import read
from onnxfuse.fuse import fuse
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.plan import Call, Plan, Plans
from onnxfuse.runtime.jit import jit
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.schedule.plan import plan
from onnxfuse.target import Target
from onnxfuse.verify.evaluate import evaluate

Dim = int | str
ONNX = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE, np.float16: TensorProto.FLOAT16}


@dataclass
class Graph:
    """An ONNX graph under construction; every `node` returns its output's name."""

    opset: int = 17
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    consts: list[onnx.TensorProto] = field(default_factory=list)

    def input(self, name: str, shape: Sequence[Dim], dtype: type = np.float32) -> str:
        kind = TensorProto.BOOL if dtype is bool else ONNX[dtype]
        self.inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def const(self, array: np.ndarray) -> str:
        name = f"c{len(self.consts)}"
        self.consts.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op: str, *inputs: str, out: str = "", **attrs: object) -> str:
        name = out or f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attrs))
        return name

    def model(self, outputs: Sequence[str], dtype: type = np.float32) -> onnx.ModelProto:
        infos = [helper.make_tensor_value_info(o, ONNX[dtype], None) for o in outputs]
        graph = helper.make_graph(self.nodes, "g", self.inputs, infos, self.consts)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def softmax(g: Graph, x: str, composite: bool = True) -> str:
    if composite:
        return g.node("Softmax", x, axis=-1)
    e = g.node("Exp", g.node("Sub", x, g.node("ReduceMax", x, axes=[-1], keepdims=1)))
    return g.node("Div", e, g.node("ReduceSum", e, g.const(np.array([-1])), keepdims=1))


def attention(
    batch: Dim = "B",
    heads: int = 3,
    sq: Dim = "S",
    sk: Dim = "S",
    d: int = 8,
    dv: int = 0,
    *,
    flat: bool = False,
    scale: str = "after",
    mask: Sequence[Dim] | None = None,
    causal: bool = False,
    composite: bool = True,
    dtype: type = np.float32,
    weights_too: bool = False,
) -> onnx.ModelProto:
    """softmax(q @ k.T * scale + mask) @ v.

    flat     q, k and v are [batch, length, heads * size], split by Reshape and Transpose, as is the result
    scale    after, q, both (its root on q and k), or none
    mask     added to the scores; causal: a boolean mask, -inf by Where
    weights_too  the softmax is an output as well
    """
    g, dv = Graph(), dv or d

    def heads_of(name: str, length: Dim, size: int, perm: Sequence[int]) -> str:
        if not flat:
            x = g.input(name, [batch, heads, length, size], dtype)
            return x if perm == [0, 2, 1, 3] else g.node("Transpose", x, perm=[0, 1, 3, 2])
        x = g.input(name, [batch, length, heads * size], dtype)
        split = g.node("Reshape", x, g.const(np.array([0, 0, heads, size])))
        return g.node("Transpose", split, perm=perm)

    def times(x: str, power: float) -> str:
        return g.node("Mul", x, g.const(np.array(d**power, dtype)))

    q, k = heads_of("q", sq, d, [0, 2, 1, 3]), heads_of("k", sk, d, [0, 2, 3, 1])
    v = heads_of("v", sk, dv, [0, 2, 1, 3])
    if scale == "q":
        q = times(q, -0.5)
    if scale == "both":
        q, k = times(q, -0.25), times(k, -0.25)
    s = g.node("MatMul", q, k)
    if scale == "after":
        s = times(s, -0.5)
    if mask is not None:
        s = g.node("Add", s, g.input("mask", mask, dtype))
    if causal:
        s = g.node("Where", g.input("keep", [sq, sk], bool), s, g.const(np.array(-np.inf, dtype)))
    p = softmax(g, s, composite)
    y = g.node("MatMul", p, v)
    if flat:
        y = g.node("Transpose", y, perm=[0, 2, 1, 3])
        y = g.node("Reshape", y, g.const(np.array([0, 0, heads * dv])))
    return g.model([y, p] if weights_too else [y], dtype)


# ---- running ----


def fused(model: onnx.ModelProto, mode: FusionMode = FusionMode.FULL, **thresholds: object) -> Partition:
    """The partition of a model."""
    config = Config(fusion=FusionConfig(mode=mode, **thresholds))  # type: ignore[arg-type]
    source = read(model)
    graph = source.graph
    prepared = prepare(graph, config.prepare, lambda n, a: evaluate(n, a, graph.opset, graph.imports), source.hints)
    return fuse(lower(atomize(prepared.typed)), config.fusion)


def planned(model: onnx.ModelProto, target: Target) -> Plans:
    return plan(kernelize(fused(model)), target, frozenset())


def only(plans: Plans) -> tuple[Call, Plan]:
    """The one kernel of a model that becomes one."""
    assert len(plans.calls) == 1, [c.name for c in plans.calls.values()]
    (call,) = plans.calls.values()
    return call, next(p for p in plans.plans if p.kernel is call.kernel)


def judge(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Compiled:
    """The one kernel of a model, called by the names of the model's inputs."""

    def __init__(self, model: onnx.ModelProto, target: Target, template: str = "rowblock") -> None:
        self.model = model
        call, plan_ = only(planned(model, target))
        assert plan_.template.name == template, plan_
        consts = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self.names, self.consts = [v.name for v in call.inputs], consts
        made = [v.name for v in call.outputs]
        self.order = [made.index(o.name) for o in model.graph.output]
        self.run, self.judge = jit(plan_, target), judge(model)

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        known = {**self.consts, **feeds}
        made = self.run([known[n] for n in self.names])
        return [made[k] for k in self.order]

    def check(self, feeds: Mapping[str, np.ndarray], rtol: float = 2e-5, atol: float = 2e-6) -> None:
        """Agrees with onnxruntime, NaN and infinities included."""
        with np.errstate(all="ignore"):
            want = self.judge.run(None, dict(feeds))
        for got, ref in zip(self(feeds), want, strict=True):
            assert got.shape == ref.shape
            np.testing.assert_allclose(got.astype(np.float64), ref.astype(np.float64), rtol, atol, equal_nan=True)


def random(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of the model for the given dimensions."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for i in model.graph.input:
        t = i.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else sizes[d.dim_param] for d in t.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(t.elem_type)
        feeds[i.name] = rng.standard_normal(shape).astype(dtype) if dtype != np.bool_ else rng.random(shape) < 0.7
    return feeds
