"""Inference BatchNormalization folded into the weights of the op before it. Graph -> Graph.

    BN(conv(x, W) + b) = conv(x, W * s) + ((b - mean) * s + beta),   s = scale / sqrt(var + epsilon)

Only when the op's result has this one reader, and weights, bias and statistics are constants. The new weights are
computed in f64 and rounded once, whenever they are read, so that they cost no memory; their name is new: shared weights
stay as they are for their other readers. This re-associates (last-bit differences), so it is a pass with a name that
can be skipped. Refusals leave a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.frontend.noop import in_training
from onnxfuse.frontend.protos import ScaledConst
from onnxfuse.frontend.rewrite import Note, taken_names
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import ArrayConst, Attrs, Constant, Graph, Node, Value, fresh_name
from onnxfuse.ir.types import Dim, tensor


@dataclass(frozen=True, slots=True)
class _Fold:
    """Factors of the weights (they broadcast) and the new bias, in f64, and the attributes the op then has."""

    factor: np.ndarray
    bias: np.ndarray
    attrs: Attrs


def bn_into_conv(graph: Graph) -> tuple[Graph, list[Note]]:
    """Fold every BatchNormalization that follows a foldable op."""
    uses, escapes, makers = graph.uses(), graph.escapes(), graph.producers()
    consts: dict[Value, Constant] = dict(graph.consts)
    taken = taken_names(graph)
    new: dict[Node, Node | None] = {}
    notes: list[Note] = []
    for bn in graph.nodes:
        if bn.op.name != "BatchNormalization" or bn.op.domain:
            continue
        y = bn.inputs[0]
        conv = None if y is None else makers.get(y)
        if y is None or conv is None or conv.op.domain or conv.op.name not in SCALE or conv in new:
            continue
        why = _obstacle(bn, conv, graph, len(uses.get(y, ())) == 1 and y not in escapes)
        folded = None if why else _fold(bn, conv, graph)
        if folded is None:
            notes.append(Note(bn.name, "BN_KEPT", why or "the scaled weights are not finite"))
            continue
        new[conv] = _rebuilt(conv, bn, folded, consts, taken)
        new[bn] = None
    if not new:
        return graph, notes
    nodes = tuple(m for n in graph.nodes if (m := new.get(n, n)) is not None)
    return replace(graph, nodes=nodes, consts=consts), notes


def _obstacle(bn: Node, conv: Node, graph: Graph, alone: bool) -> str:
    """Why the fold is not possible; empty if it is."""
    if not alone:
        return f"the result of {conv.name!r} has other readers or is an output"
    if in_training(bn, graph.consts):
        return "training mode"
    if int(bn.attrs.get("spatial", 1)) != 1:  # type: ignore[arg-type]
        return "statistics per element (spatial=0)"
    params = [*conv.inputs[1:], *bn.inputs[1:]]
    missing = [v for v in params if v is not None and v not in graph.consts]
    if missing or len(bn.inputs) != 5 or None in bn.inputs or len(conv.inputs) < 2 or conv.inputs[1] is None:
        return f"{missing[0].name!r} is not a constant" if missing else "an input is absent"
    weight = conv.inputs[1].type
    if weight is None or weight.dtype not in (DType.F32, DType.F64, DType.F16):
        return f"weights of type {weight}"
    return ""


def _array(v: Value, consts: Mapping[Value, Constant]) -> np.ndarray:
    return np.asarray(consts[v].numpy(), dtype=np.float64)


def _fold(bn: Node, conv: Node, graph: Graph) -> _Fold | None:
    scale, beta, mean, var = (_array(v, graph.consts) for v in bn.inputs[1:] if v is not None)
    epsilon = float(bn.attrs.get("epsilon", 1e-5))  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(var + epsilon)
        shift = beta - mean * factor
        found = SCALE[conv.op.name](conv, graph.consts, factor, shift)
    weight = conv.inputs[1]
    assert weight is not None
    if found is None:
        return None
    dtype = weight.tensor.dtype.numpy
    with np.errstate(all="ignore"):
        largest = _largest(graph.consts[weight].numpy(), found.factor) * np.abs(found.factor)
        finite = all(bool(np.isfinite(a.astype(dtype)).all()) for a in (largest, found.bias))
    return found if finite else None


def _largest(weight: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Largest magnitude among the weights of each factor: rounding is monotone, so the others are finite with it."""
    axes = tuple(k for k, n in enumerate(factor.shape) if n == 1)
    above = np.max(weight, axis=axes, keepdims=True, initial=0).astype(np.float64)
    below = np.min(weight, axis=axes, keepdims=True, initial=0).astype(np.float64)
    return np.asarray(np.maximum(above, -below))


def _rebuilt(conv: Node, bn: Node, f: _Fold, consts: dict[Value, Constant], taken: set[str]) -> Node:
    """The op with the new weights, making the normalisation's result."""
    old = conv.inputs[1]
    assert old is not None
    dtype = old.tensor.dtype
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    names = (f"{old.name}.bn", f"{old.name}.bn_bias" if bias is None else f"{bias.name}.bn")
    new: tuple[tuple[Constant, tuple[Dim, ...]], ...] = (
        (ScaledConst(consts[old], f.factor, dtype.numpy), old.tensor.shape),
        (ArrayConst(f.bias.astype(dtype.numpy)), f.bias.shape),
    )
    made = []
    for name, (const, shape) in zip(names, new, strict=True):
        value = Value(fresh_name(name, taken), tensor(dtype, shape))
        consts[value] = const
        made.append(value)
    same = f.attrs is conv.attrs
    return replace(
        conv,
        inputs=(conv.inputs[0], *made),
        outputs=bn.outputs[:1],
        attrs=f.attrs,
        origin=tuple(dict.fromkeys((*conv.origin, *bn.origin))),
        source=conv.source if same else None,
    )


def _shape(weight: Value) -> tuple[int, ...]:
    """Dimensions of a constant, which are all known."""
    return tuple(int(d) for d in weight.tensor.shape if isinstance(d, int))


def _bias(conv: Node, consts: Mapping[Value, Constant], channels: int) -> np.ndarray:
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    return np.zeros(channels) if bias is None else _array(bias, consts)


def _conv(conv: Node, consts: Mapping[Value, Constant], factor: np.ndarray, shift: np.ndarray) -> _Fold | None:
    """Weights [M, C/g, ...]: scale the first axis."""
    assert conv.inputs[1] is not None
    shape = _shape(conv.inputs[1])
    if shape[0] != factor.size:
        return None
    scale = factor.reshape(-1, *[1] * (len(shape) - 1))
    return _Fold(scale, _bias(conv, consts, factor.size) * factor + shift, conv.attrs)


def _conv_transpose(
    conv: Node, consts: Mapping[Value, Constant], factor: np.ndarray, shift: np.ndarray
) -> _Fold | None:
    """Weights [C, M/g, ...]: output channel g*(M/g)+j belongs to the g-th share of the input channels."""
    assert conv.inputs[1] is not None
    shape = _shape(conv.inputs[1])
    group = int(conv.attrs.get("group", 1))  # type: ignore[arg-type]
    if shape[1] * group != factor.size or shape[0] % group:
        return None
    per_input = np.repeat(factor.reshape(group, shape[1]), shape[0] // group, axis=0)
    scale = per_input.reshape(*per_input.shape, *[1] * (len(shape) - 2))
    return _Fold(scale, _bias(conv, consts, factor.size) * factor + shift, conv.attrs)


def _gemm(gemm: Node, consts: Mapping[Value, Constant], factor: np.ndarray, shift: np.ndarray) -> _Fold | None:
    """B is [K, N], or [N, K] when transposed; alpha stays outside, beta moves into the bias."""
    assert gemm.inputs[1] is not None
    shape = _shape(gemm.inputs[1])
    transposed = bool(gemm.attrs.get("transB", 0))
    beta = float(gemm.attrs.get("beta", 1.0))  # type: ignore[arg-type]
    if len(shape) != 2 or shape[0 if transposed else 1] != factor.size:
        return None
    bias = _bias(gemm, consts, factor.size)
    if bias.ndim > 2 or (bias.ndim == 2 and bias.shape[0] != 1):
        return None  # a bias per row
    row = np.broadcast_to(bias.reshape(-1), factor.shape)
    attrs = gemm.attrs if beta == 1.0 else {**gemm.attrs, "beta": 1.0}
    scale = factor[:, None] if transposed else factor[None, :]
    return _Fold(scale, row * beta * factor + shift, attrs)


SCALE: Mapping[str, Callable[[Node, Mapping[Value, Constant], np.ndarray, np.ndarray], _Fold | None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
}
