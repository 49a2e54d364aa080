"""Make the small committed models. Seeded and deterministic: a second run writes the same bytes.

    python models/make_small.py [DIR]          (default: the directory of this script)

Each function here is one model; models/README.md says what each is for.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dim = int | str


class Net:
    """Collects nodes and initializers of one graph; every method returns the name of the value it made."""

    def __init__(self, name: str, opset: int, ir_version: int) -> None:
        self.name, self.opset, self.ir_version = name, opset, ir_version
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[Dim], dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, shape: Sequence[Dim], dtype: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def op(self, op: str, *inputs: str, out: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [out], name=f"{op}_{len(self.nodes)}", **attributes))
        return out

    def const(self, name: str, value: np.ndarray) -> str:
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def scalar(self, name: str, value: float) -> str:
        return self.const(name, np.asarray(value, np.float32))

    def shape(self, name: str, *dims: int) -> str:
        return self.const(name, np.asarray(dims, np.int64))

    def weight(self, name: str, *shape: int, std: float) -> str:
        return self.const(name, (self.rng.standard_normal(shape) * std).astype(np.float32))

    def vector(self, name: str, size: int, low: float, high: float) -> str:
        return self.const(name, self.rng.uniform(low, high, size).astype(np.float32))

    def conv(self, x: str, name: str, channels: tuple[int, int], kernel: int, stride: int = 1, group: int = 1) -> str:
        """Conv with "same" padding and no bias."""
        fan_in = channels[0] // group * kernel * kernel
        w = self.weight(f"{name}.w", channels[1], channels[0] // group, kernel, kernel, std=math.sqrt(2 / fan_in))
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": group}
        return self.op("Conv", x, w, out=name, **attributes)

    def norm(self, x: str, name: str, channels: int) -> str:
        """BatchNormalization with statistics that are not 0 and 1."""
        scale, bias = self.vector(f"{name}.scale", channels, 0.8, 1.2), self.vector(f"{name}.bias", channels, -0.1, 0.1)
        mean, var = self.vector(f"{name}.mean", channels, -0.1, 0.1), self.vector(f"{name}.var", channels, 0.6, 1.4)
        return self.op("BatchNormalization", x, scale, bias, mean, var, out=name, epsilon=1e-5)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.tensors)
        model = helper.make_model(graph, producer_name="onnxfuse", opset_imports=[helper.make_opsetid("", self.opset)])
        model.ir_version = self.ir_version
        onnx.checker.check_model(model, full_check=True)
        return model


def conv_add_relu() -> onnx.ModelProto:
    """A convolution, its bias as an Add, and a Relu: the smallest anchor with an epilogue."""
    net = Net("conv_add_relu", opset=17, ir_version=8)
    data = net.input("data", [1, 3, 32, 32])
    weight = net.weight("weight", 16, 3, 3, 3, std=math.sqrt(2 / 27))
    bias = net.weight("bias", 1, 16, 1, 1, std=0.1)
    net.nodes.append(helper.make_node("Conv", [data, weight], ["conv"], name="conv", pads=[1, 1, 1, 1]))
    net.nodes.append(helper.make_node("Add", ["conv", bias], ["out"], name="out"))
    net.nodes.append(helper.make_node("Relu", ["out"], ["relu"], name="relu"))
    net.output("relu", [1, 16, 32, 32])
    return net.model()


def softmax() -> onnx.ModelProto:
    """A scaled row softmax: five atomic operators over rows."""
    net = Net("softmax", opset=17, ir_version=8)
    x = net.input("x", ["rows", 256])
    net.op("Mul", x, net.scalar("scale", 0.125), out="scaled")
    net.op("Softmax", "scaled", out="y", axis=-1)
    net.output("y", ["rows", 256])
    return net.model()


def tiny_resnet() -> onnx.ModelProto:
    """Stem, two residual blocks (one with a strided projection), pools, classifier."""
    net = Net("tiny_resnet", opset=13, ir_version=7)
    x = net.input("data", ["batch", 3, 32, 32])
    x = net.op("Relu", net.norm(net.conv(x, "stem", (3, 16), 3), "stem.norm", 16), out="stem.relu")
    x = net.op("MaxPool", x, out="stem.pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = _residual(net, x, "block1", 16, 16, stride=1)
    x = _residual(net, x, "block2", 16, 32, stride=2)
    x = net.op("Flatten", net.op("GlobalAveragePool", x, out="pool"), out="flat", axis=1)
    w, b = net.weight("fc.w", 10, 32, std=math.sqrt(1 / 32)), net.vector("fc.b", 10, -0.1, 0.1)
    net.op("Softmax", net.op("Gemm", x, w, b, out="logits", transB=1), out="prob", axis=-1)
    net.output("prob", ["batch", 10])
    return net.model()


def _residual(net: Net, x: str, name: str, cin: int, cout: int, stride: int) -> str:
    y = net.norm(net.conv(x, f"{name}.conv1", (cin, cout), 3, stride), f"{name}.norm1", cout)
    y = net.op("Relu", y, out=f"{name}.relu1")
    y = net.norm(net.conv(y, f"{name}.conv2", (cout, cout), 3), f"{name}.norm2", cout)
    if stride != 1 or cin != cout:
        x = net.norm(net.conv(x, f"{name}.proj", (cin, cout), 1, stride), f"{name}.norm3", cout)
    return net.op("Relu", net.op("Add", y, x, out=f"{name}.sum"), out=f"{name}.relu2")


HIDDEN, HEADS, INNER = 32, 2, 64


def tiny_transformer() -> onnx.ModelProto:
    """Two encoder layers with masked attention and erf-GELU, as exporters write them; dynamic batch and sequence."""
    net = Net("tiny_transformer", opset=17, ir_version=8)
    x = net.input("hidden", ["batch", "sequence", HIDDEN])
    mask = net.input("mask", ["batch", "sequence"], TensorProto.INT64)
    mask = net.op("Unsqueeze", mask, net.shape("mask.axes", 1, 2), out="mask.4d")
    mask = net.op("Cast", mask, out="mask.f32", to=TensorProto.FLOAT)
    mask = net.op("Sub", net.scalar("one", 1.0), mask, out="mask.inverse")
    mask = net.op("Mul", mask, net.scalar("lowest", -1e9), out="mask.bias")
    net.shape("heads.shape", 0, 0, HEADS, HIDDEN // HEADS)
    net.shape("merge.shape", 0, 0, HIDDEN)
    net.scalar("root", math.sqrt(HIDDEN // HEADS))
    net.scalar("sqrt2", math.sqrt(2))
    net.scalar("half", 0.5)
    for layer in range(2):
        x = _encoder_layer(net, x, mask, f"layer{layer}")
    net.op("LayerNormalization", x, *_norm_weights(net, "final"), out="encoded", axis=-1, epsilon=1e-12)
    net.output("encoded", ["batch", "sequence", HIDDEN])
    return net.model()


def _encoder_layer(net: Net, x: str, mask: str, name: str) -> str:
    y = net.op(
        "LayerNormalization", x, *_norm_weights(net, f"{name}.norm1"), out=f"{name}.norm1", axis=-1, epsilon=1e-12
    )
    q, k, v = (_heads(net, y, f"{name}.{role}", transposed=role == "k") for role in ("q", "k", "v"))
    scores = net.op("Div", net.op("MatMul", q, k, out=f"{name}.qk"), "root", out=f"{name}.scaled")
    scores = net.op("Add", scores, mask, out=f"{name}.masked")
    probs = net.op("Softmax", scores, out=f"{name}.probs", axis=-1)
    y = net.op("Transpose", net.op("MatMul", probs, v, out=f"{name}.pv"), out=f"{name}.pv.t", perm=[0, 2, 1, 3])
    y = net.op("Reshape", y, "merge.shape", out=f"{name}.merged")
    x = net.op("Add", _linear(net, y, f"{name}.attn", HIDDEN, HIDDEN), x, out=f"{name}.sum1")
    y = net.op(
        "LayerNormalization", x, *_norm_weights(net, f"{name}.norm2"), out=f"{name}.norm2", axis=-1, epsilon=1e-12
    )
    y = _gelu(net, _linear(net, y, f"{name}.up", HIDDEN, INNER), f"{name}.gelu")
    return net.op("Add", _linear(net, y, f"{name}.down", INNER, HIDDEN), x, out=f"{name}.sum2")


def _heads(net: Net, x: str, name: str, transposed: bool) -> str:
    y = net.op("Reshape", _linear(net, x, name, HIDDEN, HIDDEN), "heads.shape", out=f"{name}.heads")
    return net.op("Transpose", y, out=f"{name}.t", perm=[0, 2, 3, 1] if transposed else [0, 2, 1, 3])


def _linear(net: Net, x: str, name: str, fan_in: int, fan_out: int) -> str:
    w = net.weight(f"{name}.w", fan_in, fan_out, std=math.sqrt(1 / fan_in))
    y = net.op("MatMul", x, w, out=f"{name}.matmul")
    return net.op("Add", net.vector(f"{name}.b", fan_out, -0.1, 0.1), y, out=name)


def _norm_weights(net: Net, name: str) -> tuple[str, str]:
    return net.vector(f"{name}.scale", HIDDEN, 0.8, 1.2), net.vector(f"{name}.bias", HIDDEN, -0.1, 0.1)


def _gelu(net: Net, x: str, name: str) -> str:
    y = net.op("Erf", net.op("Div", x, "sqrt2", out=f"{name}.div"), out=f"{name}.erf")
    y = net.op("Mul", x, net.op("Add", y, "one", out=f"{name}.add"), out=f"{name}.mul")
    return net.op("Mul", y, "half", out=name)


def tiny_ocr() -> onnx.ModelProto:
    """A text detector in small, written as paddle exports are at opset 11; batch, height and width are dynamic."""
    net = Net("tiny_ocr", opset=11, ir_version=6)
    x = net.input("x", ["batch", 3, "height", "width"])
    net.scalar("three", 3.0)
    net.scalar("six", 6.0)
    net.scalar("zero", 0.0)
    net.const("roi", np.zeros(0, np.float32))
    net.const("twice", np.asarray([1, 1, 2, 2], np.float32))
    stem = _hard_swish(net, net.norm(net.conv(x, "stem", (3, 16), 3, stride=2), "stem.norm", 16), "stem.act")
    y = _hard_swish(net, net.norm(net.conv(stem, "dw", (16, 16), 3, stride=2, group=16), "dw.norm", 16), "dw.act")
    y = _squeeze_excite(net, y, "se", 16, 4)
    y = net.norm(net.conv(y, "pw", (16, 16), 1), "pw.norm", 16)
    attributes = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": "floor"}
    y = net.op("Resize", y, "roi", "twice", out="up", **attributes)
    y = net.op("Add", y, stem, out="fpn")
    w, b = net.weight("head.w", 16, 1, 2, 2, std=0.25), net.vector("head.b", 1, -0.1, 0.1)
    y = net.op("ConvTranspose", y, w, b, out="head", kernel_shape=[2, 2], strides=[2, 2])
    net.op("Sigmoid", y, out="maps")
    net.output("maps", ["batch", 1, "out_height", "out_width"])
    return net.model()


def _hard_swish(net: Net, x: str, name: str) -> str:
    y = net.op("Clip", net.op("Add", x, "three", out=f"{name}.add"), "zero", "six", out=f"{name}.clip")
    return net.op("Div", net.op("Mul", x, y, out=f"{name}.mul"), "six", out=name)


def _squeeze_excite(net: Net, x: str, name: str, channels: int, squeezed: int) -> str:
    y = net.op("GlobalAveragePool", x, out=f"{name}.pool")
    y = net.op("Relu", net.conv(y, f"{name}.down", (channels, squeezed), 1), out=f"{name}.relu")
    y = net.op(
        "HardSigmoid", net.conv(y, f"{name}.up", (squeezed, channels), 1), out=f"{name}.gate", alpha=0.2, beta=0.5
    )
    return net.op("Mul", x, y, out=name)


MODELS: tuple[Callable[[], onnx.ModelProto], ...] = (conv_add_relu, softmax, tiny_ocr, tiny_resnet, tiny_transformer)


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for make in MODELS:
        data = make().SerializeToString(deterministic=True)
        (directory / f"{make.__name__}.onnx").write_bytes(data)
        print(f"{make.__name__}.onnx  {len(data)} bytes")


if __name__ == "__main__":
    main()
