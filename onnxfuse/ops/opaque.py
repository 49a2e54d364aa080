"""Known and never fused: name and reason."""

from __future__ import annotations

from onnxfuse.ops.table import opaque

_DATA = "the output shape or order depends on data"
_SEQUENTIAL = "every element depends on the one before"
_CONTROL = "control flow; bodies are kept as they are"
_RANDOM = "random; must not be moved or merged"
_CONTAINER = "not a dense tensor"
_STRING = "strings stay with the runtime"
_SCATTER = "writes through run-time indices"
_QUANT = "integer kernels are not implemented yet; kept bit-exact by the runtime"
_SIGNAL = "transforms stay with the runtime"
_TODO = "no loop definition yet"
_GATHER = "run-time indices are checked by the runtime"

_ROWS: tuple[tuple[str, str], ...] = (
    *((n, _DATA) for n in ("NonZero", "Unique", "Compress", "NonMaxSuppression", "TopK", "OneHot", "Multinomial")),
    *((n, _SEQUENTIAL) for n in ("CumSum", "CumProd", "LSTM", "GRU", "RNN")),
    *((n, _CONTROL) for n in ("If", "Loop", "Scan", "SequenceMap")),
    *((n, _RANDOM) for n in ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli")),
    *((n, _CONTAINER) for n in (
        "SequenceConstruct", "SequenceAt", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceLength",
        "SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement",
    )),
    *((n, _STRING) for n in (
        "StringNormalizer", "TfIdfVectorizer", "RegexFullMatch", "StringConcat", "StringSplit", "LabelEncoder",
    )),
    *((n, _SCATTER) for n in ("Scatter", "ScatterElements", "ScatterND", "TensorScatter", "MaxUnpool")),
    *((n, _QUANT) for n in (
        "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger",
        "MatMulInteger",
    )),
    *((n, _SIGNAL) for n in (
        "DFT", "STFT", "MelWeightMatrix", "HannWindow", "HammingWindow", "BlackmanWindow", "Det", "ImageDecoder",
    )),
    *((n, _GATHER) for n in ("GatherND",)),
    *((n, _TODO) for n in (
        "ArgMax", "ArgMin", "Hardmax", "MaxRoiPool", "RoiAlign", "GridSample", "AffineGrid", "Col2Im", "CenterCropPad",
        "DeformConv", "LpPool", "GlobalLpPool", "GroupNormalization", "ReverseSequence", "BitCast",
        "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "Attention", "RotaryEmbedding", "Dropout",
    )),
)  # fmt: skip

for _name, _reason in _ROWS:
    opaque(_name, _reason)
