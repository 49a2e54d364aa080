"""Give the onnx package's light models weights: their ConstantOfShape nodes become seeded random initializers.

A light model is a well-known CNN whose large weights were replaced by `ConstantOfShape`. Weights are drawn by the role
they have (He-scaled kernels, positive variances), so that activations neither die nor overflow; the small weights
left in the file belong to the lost large ones and are drawn anew too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

PASS_THROUGH = ("Unsqueeze", "Reshape", "Squeeze")  # a weight behind these keeps the role of the result


def with_weights(model: onnx.ModelProto, seed: int = 0, gain: float = 1.0) -> onnx.ModelProto:
    """A copy of the light model with random weights instead of ConstantOfShape nodes.

    `gain` scales the kernels of a model whose activations would grow from layer to layer (many max pools).
    """
    graph = model.graph
    shapes = dict(_weight_shapes(graph))
    roles = _roles(graph)
    shape_inputs = {n.input[0] for n in graph.node if n.op_type == "ConstantOfShape"}
    out = onnx.ModelProto()
    out.CopyFrom(model)
    del out.graph.node[:], out.graph.initializer[:], out.graph.input[:]
    out.graph.node.extend(n for n in graph.node if n.op_type != "ConstantOfShape")
    for tensor in graph.initializer:
        if tensor.name not in shapes and tensor.name not in shape_inputs:
            out.graph.initializer.append(tensor)
    for name, shape in shapes.items():
        # A stream of its own for each weight: adding or reordering nodes leaves the others as they were.
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        role = roles.get(name, "bias")
        array = draw(rng, role, shape).astype(np.float32) * np.float32(gain if role == "kernel" else 1.0)
        out.graph.initializer.append(numpy_helper.from_array(array, name))
    given = {t.name for t in graph.initializer}
    out.graph.input.extend(i for i in graph.input if i.name not in given)
    # IR 3 demands that every initializer is a graph input too, as in the original files.
    for tensor in out.graph.initializer:
        out.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return out


def _weight_shapes(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    arrays = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            yield node.output[0], tuple(int(d) for d in numpy_helper.to_array(arrays[node.input[0]]))
    used = {name for node in graph.node if node.op_type != "ConstantOfShape" for name in node.input}
    for tensor in graph.initializer:
        if tensor.name in used and tensor.data_type == onnx.TensorProto.FLOAT:
            yield tensor.name, tuple(tensor.dims)


def _roles(graph: onnx.GraphProto) -> dict[str, str]:
    """What each weight is: kernel, matrix (Gemm; `matrix_t` if transposed), bias, scale, mean, variance."""
    consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in graph.node:
        for slot, name in enumerate(node.input):
            consumers.setdefault(name, []).append((node, slot))
    roles: dict[str, str] = {}
    for name in [n for node in graph.node for n in node.input]:
        use = consumers[name][0]
        while use[0].op_type in PASS_THROUGH and use[0].output[0] in consumers:
            use = consumers[use[0].output[0]][0]
        roles[name] = _role(use[0], use[1], consumers)
    return roles


def _role(node: onnx.NodeProto, slot: int, consumers: dict[str, list[tuple[onnx.NodeProto, int]]]) -> str:
    if node.op_type == "Conv":
        return ("data", "kernel", "bias")[slot]
    if node.op_type == "Gemm":
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        return ("data", "matrix_t" if transposed else "matrix", "bias")[slot]
    if node.op_type == "BatchNormalization":
        # The last norm of a residual branch gets a small scale, or the sum would double its variance in each block.
        residual = any(use.op_type == "Sum" for use, _ in consumers.get(node.output[0], []))
        return ("data", "scale_small" if residual else "scale", "bias", "mean", "variance")[slot]
    return "scale" if node.op_type == "Mul" else "bias"


def draw(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values for one weight of this role."""
    if role == "kernel":
        return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / math.prod(shape[1:])))
    if role in ("matrix", "matrix_t"):
        fan_in = shape[0] if role == "matrix" else shape[1]
        return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / fan_in))
    if role == "variance":
        return rng.uniform(0.6, 1.4, shape)
    if role in ("scale", "scale_small"):
        return rng.uniform(0.8, 1.2, shape) * (0.3 if role == "scale_small" else 1.0)
    return rng.standard_normal(shape) * 0.1  # bias, mean
