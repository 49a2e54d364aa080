"""Which cases of onnx.backend.test are left out when the share of compiled ones is counted, and why.

A case is apart when what it is about is no loop over dense numbers, whatever is implemented. Cases that could be
compiled and are not count against us; so do those of an element type that only passes through, in a share of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import numpy_helper

# The one definition: reason -> operators that stay with onnxruntime for it.
INHERENT: dict[str, tuple[str, ...]] = {
    "strings": (
        "LabelEncoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
    ),
    "sequences and optionals": (
        "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt",
        "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
        "SplitToSequence",
    ),
    "random": ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    "control flow": ("If", "Loop", "Scan"),
    "the shape depends on data": (
        "BlackmanWindow", "Compress", "ConstantOfShape", "HammingWindow", "HannWindow", "ImageDecoder",
        "MelWeightMatrix", "NonMaxSuppression", "NonZero", "Range", "Unique",
    ),
}  # fmt: skip

# Codes of nodes without a computation: the runtime only gives memory another name, or reads dimensions.
NO_WORK = frozenset({"NF_FREE_VIEW", "NF_TINY", "UN_SHAPE"})

_OF = {op: why for why, ops in INHERENT.items() for op in ops}
_NARROW = frozenset({
    onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E4M3FNUZ, onnx.TensorProto.FLOAT8E5M2,
    onnx.TensorProto.FLOAT8E5M2FNUZ, onnx.TensorProto.FLOAT8E8M0, onnx.TensorProto.FLOAT4E2M1,
    onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.INT2, onnx.TensorProto.UINT2,
    onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128,
})  # fmt: skip


def apart(model: onnx.ModelProto) -> str:
    """Why a case does not count, or nothing."""
    graph = model.graph
    values = [*graph.input, *graph.output]
    if any(not v.type.HasField("tensor_type") for v in values):
        return "sequences and optionals"
    if any(v.type.tensor_type.elem_type == onnx.TensorProto.STRING for v in values):
        return "strings"
    if len(graph.node) != 1 or graph.node[0].domain not in ("", "ai.onnx", "ai.onnx.ml"):
        return ""
    if graph.node[0].op_type == "Dropout" and _trains(model):
        return "random"
    return _OF.get(graph.node[0].op_type, "")


def idle(left: Iterable[str]) -> bool:
    """Nothing is left to compute, of a case without a kernel: entries are "Op CODE"."""
    return all(entry.rpartition(" ")[2] in NO_WORK for entry in left)


def narrow(model: onnx.ModelProto) -> bool:
    """Some value of the case has an element type that only passes through."""
    values = [*model.graph.input, *model.graph.output]
    return any(v.type.tensor_type.elem_type in _NARROW for v in values) or any(
        t.data_type in _NARROW for t in model.graph.initializer
    )


def _trains(model: onnx.ModelProto) -> bool:
    """The node's third input, training_mode, is not known to be false."""
    inputs = model.graph.node[0].input
    name = inputs[2] if len(inputs) > 2 else ""
    known = {t.name: bool(numpy_helper.to_array(t).any()) for t in model.graph.initializer}
    return bool(name) and known.get(name, True)
