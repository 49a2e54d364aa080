"""Constant folding's calculator: one node on known arrays, computed by onnxruntime at ORT_DISABLE_ALL.

`evaluate(node, arrays, opset)` returns the outputs, or None when onnxruntime does not say (no kernel, refusal) or when
it would not survive the question (integer division by zero traps). None means: leave the node as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime

from onnxfuse.errors import UsageError
from onnxfuse.ir.graph import AttrValue, Foreign, Node
from onnxfuse.verify import ort

_IR_VERSION = 8  # loads in every supported onnxruntime
_CACHE_SIZE = 64  # sessions; a folded model repeats few distinct questions
# Ops whose integer form divides. onnxruntime executes the machine's division: zero and MIN / -1 kill the process.
_DIVIDES = frozenset({"Div", "Mod"})

_DECLINES: tuple[type[Exception], ...] = (UsageError, *ort.ORT_ERRORS)

_cache: OrderedDict[bytes, onnxruntime.InferenceSession] = OrderedDict()


def evaluate(
    node: Node, arrays: Sequence[np.ndarray | None], opset: int, imports: Mapping[str, int] | None = None
) -> list[np.ndarray] | None:
    """Outputs of `node` (absent ones left out) for `arrays`, one per input, None where the input is absent.

    `opset` is the model's version of the default domain, `imports` the versions of other domains.
    """
    if node.captures or len(arrays) != len(node.inputs) or any(map(_unanswerable, node.attrs.values())):
        return None
    if node.op.name in _DIVIDES and _traps(arrays):
        return None
    try:
        model = _one_node_model(node, arrays, opset, imports or {})
        sess = _session(model)
        feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None}
        results = ort.run(sess, feeds)
    except _DECLINES:
        return None
    out = [r for r in results.values() if isinstance(r, np.ndarray)]
    return out if len(out) == len(results) else None


def _traps(arrays: Sequence[np.ndarray | None]) -> bool:
    divisor = arrays[1] if len(arrays) > 1 else None
    if divisor is None or divisor.dtype.kind not in "iu":
        return False
    if bool(np.any(divisor == 0)):
        return True
    # MIN / -1 overflows, and the x86 instruction traps on it.
    dividend = arrays[0]
    if divisor.dtype.kind == "u" or dividend is None or dividend.dtype != divisor.dtype:
        return False
    return bool(np.any(divisor == -1)) and bool(np.any(dividend == np.iinfo(divisor.dtype).min))


def _unanswerable(value: AttrValue) -> bool:
    """Subgraphs and other carried attributes need more than one node."""
    return isinstance(value, Foreign)


def _one_node_model(
    node: Node, arrays: Sequence[np.ndarray | None], opset: int, imports: Mapping[str, int]
) -> onnx.ModelProto:
    proto = onnx.NodeProto(op_type=node.op.name, domain=node.op.domain, name="n")
    proto.input.extend("" if a is None else f"i{k}" for k, a in enumerate(arrays))
    while proto.input and not proto.input[-1]:
        proto.input.pop()
    proto.output.extend("" if v is None else f"o{k}" for k, v in enumerate(node.outputs))
    proto.attribute.extend(_attributes(node))
    inputs = [
        onnx.helper.make_tensor_value_info(f"i{k}", _element(a), a.shape) for k, a in enumerate(arrays) if a is not None
    ]
    # Outputs without a type: onnxruntime infers it.
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "g", inputs, outputs)
    domains = {"": opset} | ({node.op.domain: imports.get(node.op.domain, 1)} if node.op.domain else {})
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in domains.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)


def _element(array: np.ndarray) -> int:
    if array.dtype.kind in "OUS":
        return int(onnx.TensorProto.STRING)
    return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))


def _attributes(node: Node) -> list[onnx.AttributeProto]:
    """The user's own attributes word for word where the node is still the one that was read."""
    if isinstance(node.source, onnx.NodeProto):
        return list(node.source.attribute)
    return [_attribute(name, value) for name, value in node.attrs.items()]


def _attribute(name: str, value: AttrValue) -> onnx.AttributeProto:
    if isinstance(value, np.ndarray):
        return onnx.helper.make_attribute(name, onnx.numpy_helper.from_array(value))
    if isinstance(value, tuple) and not value:  # nothing tells ints from floats; ints are what ONNX's empty lists are
        return onnx.helper.make_attribute(name, [], attr_type=onnx.AttributeProto.INTS)
    return onnx.helper.make_attribute(name, list(value) if isinstance(value, tuple) else value)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    key = model.SerializeToString(deterministic=True)
    if key in _cache:
        _cache.move_to_end(key)
        return _cache[key]
    sess = ort.session(key)
    _cache[key] = sess
    if len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return sess
