"""Models of unusual size, made by a formula: for tools/soak.py and tests.

big        weights of several GiB as external data; the largest tensor is a third of them
many       as much in tensors of 16 MiB
long       many nodes: residual blocks of products and pointwise nodes, in one line
groups     many groups of distinct structure, kept apart by nodes that are never fused
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

GIB = 1 << 30
POINTWISE = ("Relu", "Tanh", "Sigmoid", "Exp", "Softplus", "Abs", "Neg", "Sin", "Atan", "Erf")
F32 = TensorProto.FLOAT
Shape = list[int | str]


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, Shape], outputs: dict[str, Shape], weights: list[TensorProto]
) -> onnx.ModelProto:
    given, made = ([helper.make_tensor_value_info(k, F32, s) for k, s in side.items()] for side in (inputs, outputs))
    graph = helper.make_graph(nodes, "large", given, made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def big(path: Path, gib: float = 3.0) -> int:
    """x[N, K] through two products and a table of a third of the weights; returns the largest tensor's bytes."""
    width = 4096
    rows = int(gib * GIB / 3 / 4 / width)
    shapes = {"w0": (width, rows), "w1": (rows, width), "table": (rows, width)}
    tensors = external(path, shapes, 1 / 64)
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["c"]),
        helper.make_node("Gather", ["table", "i"], ["e"], axis=0),
        helper.make_node("Add", ["c", "e"], ["d"]),
        helper.make_node("Tanh", ["d"], ["y"]),
    ]
    made = model(nodes, {"x": ["N", width]}, {"y": ["N", width]}, tensors)
    made.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, ["N"]))
    onnx.save(made, path)
    return max(a * b * 4 for a, b in shapes.values())


def many(path: Path, gib: float = 3.0) -> int:
    """x[N, K] through blocks of a product, a Tanh and a residual; returns the largest tensor's bytes."""
    width = 2048
    size = width * width * 4
    shapes = {f"w{k}": (width, width) for k in range(int(gib * GIB / size))}
    tensors = external(path, shapes, 1 / 512)  # blocks that amplify would make a difference of one bit into any
    nodes, last = [], "x"
    for k, name in enumerate(shapes):
        nodes.append(helper.make_node("MatMul", [last, name], [f"a{k}"], f"product_{k}"))
        nodes.append(helper.make_node("Tanh", [f"a{k}"], [f"b{k}"], f"tanh_{k}"))
        nodes.append(helper.make_node("Add", [f"b{k}", last], [f"c{k}"], f"add_{k}"))
        last = f"c{k}"
    nodes.append(helper.make_node("Identity", [last], ["y"], "last"))
    onnx.save(model(nodes, {"x": ["N", width]}, {"y": ["N", width]}, tensors), path)
    return size


def external(path: Path, shapes: dict[str, tuple[int, int]], scale: float) -> list[TensorProto]:
    """Normal weights of this deviation and these shapes, written to a file beside the model."""
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32) * np.float32(scale)
    tensors, offset = [], 0
    data = path.with_name(path.name + ".data")
    with data.open("wb") as f:
        for name, shape in shapes.items():
            t = TensorProto(name=name, data_type=F32, dims=shape, data_location=TensorProto.EXTERNAL)
            size = shape[0] * shape[1] * 4
            for key, value in (("location", data.name), ("offset", offset), ("length", size)):
                t.external_data.add(key=key, value=str(value))
            tensors.append(t)
            for _ in range(size // block.nbytes):
                f.write(block.data)
            f.write(block.data.cast("B")[: size % block.nbytes])
            offset += size
    return tensors


def long(nodes: int, prefix: str = "") -> onnx.ModelProto:
    """Blocks of ten nodes: a product, a bias, a norm by hand, an activation, a residual."""
    width = 8
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((width, width)).astype(np.float32) / 4, "w")]
    weights += [numpy_helper.from_array(rng.standard_normal(width).astype(np.float32), "b")]
    made, last = [], "x"
    for k in range(nodes // 10):
        names = [f"{prefix}block_{k}/{j}" for j in range(10)]
        m, a, mean, c, s, act, p, h, r, out = names
        made += [
            helper.make_node("MatMul", [last, "w"], [m], m),
            helper.make_node("Add", [m, "b"], [a], a),
            helper.make_node("ReduceMean", [a], [mean], mean, axes=[-1]),
            helper.make_node("Sub", [a, mean], [c], c),
            helper.make_node("Sigmoid", [c], [s], s),
            helper.make_node("Mul", [c, s], [act], act),
            helper.make_node("Transpose", [act], [p], p, perm=[1, 0]),
            helper.make_node("Transpose", [p], [h], h, perm=[1, 0]),
            helper.make_node("Tanh", [h], [r], r),
            helper.make_node("Add", [r, last], [out], out),
        ]
        last = out
    made.append(helper.make_node("Identity", [last], ["y"], "last"))
    return model(made, {"x": ["N", width]}, {"y": ["N", width]}, weights)


def groups(count: int) -> onnx.ModelProto:
    """`count` groups of four pointwise nodes, no two alike; a CumSum between each two."""
    axis = numpy_helper.from_array(np.array(1), "axis")
    made, last = [], "x"
    for k, ops in zip(range(count), itertools.product(POINTWISE, repeat=4), strict=False):
        for j, op in enumerate(ops):
            made.append(helper.make_node(op, [last], [f"v{k}_{j}"], f"{op}_{k}_{j}"))
            last = f"v{k}_{j}"
        made.append(helper.make_node("CumSum", [last, "axis"], [f"c{k}"], f"apart_{k}"))
        last = f"c{k}"
    made.append(helper.make_node("Tanh", [last], ["y"], "last"))
    return model(made, {"x": ["N", 8]}, {"y": ["N", 8]}, [axis])
