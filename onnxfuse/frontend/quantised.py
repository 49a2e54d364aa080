"""What a quantised model keeps as it is. Graph -> the nodes that stay with onnxruntime, with UN_QUANTISED.

Two facts ask for it. A quantiser is a step function: a float that differs in its last bit, as any other order of
summation makes it, can land on the next step, and layers of quantisers amplify that step into results nobody
recognises. And onnxruntime finds its integer kernels by the quantisers and dequantisers around an operator; with one of
them inside a kernel of ours, the operator runs in float again.

So these stay: every node whose result reaches a quantiser, every operator that reads what a dequantiser made (views
between them are looked through), and quantisers and dequantisers that have neighbours. What comes after, up to the
outputs, is fused as in any other model.

Not so the sums of products of signed bytes (MatMulInteger, QLinearConv ...; frontend/integers.py makes them of what is
dequantised before and quantised behind): they are exact in any order, so ours have onnxruntime's bits, and what is
computed exactly from them keeps these bits. They are compiled. Where a factor is unsigned onnxruntime has kernels that
are as fast or faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import Foreign, Graph, Node, Value
from onnxfuse.ir.op import EXACT, Family

UN_QUANTISED = "UN_QUANTISED"
QUANTISERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
DEQUANTISERS = frozenset({"DequantizeLinear"})
_EXACT = frozenset({Family.POINTWISE, Family.VIEW, Family.WINDOW})  # where a tolerance of EXACT says so
_INT8_COMPUTE = 4  # accuracy_level of com.microsoft::MatMulNBits: the activations are quantised inside
# Sums of products of 8-bit integers, and the places of their two factors.
PRODUCTS = {"MatMulInteger": (0, 1), "ConvInteger": (0, 1), "QLinearMatMul": (0, 3), "QLinearConv": (0, 3)}
_UNSIGNED = Refusal(UN_QUANTISED, "a factor is unsigned: onnxruntime's integer kernel is as fast or faster")
_BEFORE = Refusal(UN_QUANTISED, "its result is quantised later: one rounding more or less could become a whole step")
_BESIDE = Refusal(UN_QUANTISED, "onnxruntime joins it with the quantisers around it into an integer kernel")


def quantises(node: Node) -> bool:
    """The node, or one in its bodies, rounds floats to steps."""
    if node.op.name == "MatMulNBits":
        return node.attrs.get("accuracy_level") == _INT8_COMPUTE
    return node.op.name in QUANTISERS or _any_in_bodies(node)


def quantised(graph: Graph) -> Mapping[Node, Refusal]:
    """See the module docstring."""
    unsigned = {n: _UNSIGNED for n in graph.nodes if n.op.name in PRODUCTS and not _signed(n)}
    if not any(quantises(n) or n.op.name in DEQUANTISERS for n in graph.nodes):
        return unsigned
    kept = dict.fromkeys(_before_quantisers(graph), _BEFORE)
    kept.update(dict.fromkeys(_with_neighbours(graph), _BESIDE))
    kept.update(dict.fromkeys(_after_dequantisers(graph), _BESIDE))
    ours = _ours(graph, set(kept))
    return {**{n: why for n, why in kept.items() if n not in ours}, **unsigned}


def _signed(node: Node) -> bool:
    """Both factors are signed bytes."""
    factors = [node.inputs[k] for k in PRODUCTS[node.op.name] if k < len(node.inputs)]
    return all(v is not None and v.type is not None and v.type.dtype is DType.I8 for v in factors)


def _ours(graph: Graph, theirs: set[Node]) -> set[Node]:
    """What is computed exactly from sums of products of signed bytes, but not what dequantises for a node of theirs."""
    found = dict.fromkeys(_exact(graph))
    uses = graph.uses()
    for n in reversed(tuple(found)):
        if n.op.name in DEQUANTISERS or (n.op.family is Family.VIEW and n.op.name not in QUANTISERS):
            readers = [r for v in n.results for r in uses.get(v, ())]
            if any(r in theirs and r not in found for r in readers):
                theirs.add(n)
                del found[n]
    return set(found)


def _exact(graph: Graph) -> Iterable[Node]:
    """Sums of products of signed bytes, and what is computed from them without a rounding that is not onnxruntime's."""
    made: set[Value] = set()
    for n in graph.nodes:
        if n.op.name in PRODUCTS:
            exact = _signed(n)
        else:
            exact = n.op.family in _EXACT and n.op.tol == EXACT and any(v in made for v in n.reads)
            # onnxruntime drops some roundings of halves.
            exact = exact and not any(v.type is None or v.type.dtype.is_half for v in (*n.reads, *n.results))
        if exact:
            made.update(n.results)
            yield n


def _with_neighbours(graph: Graph) -> Iterable[Node]:
    """Quantisers and dequantisers that some node comes before or after."""
    made = {v for n in graph.nodes for v in n.results}
    uses = graph.uses()
    for n in graph.nodes:
        if not quantises(n) and n.op.name not in DEQUANTISERS:
            continue
        if any(v in made for v in n.reads) or any(uses.get(v) for v in n.results):
            yield n


def _after_dequantisers(graph: Graph) -> Iterable[Node]:
    """Readers of dequantised values; nodes are in topological order."""
    floats: set[Value] = set()
    for n in graph.nodes:
        if n.op.name in DEQUANTISERS:
            floats.update(n.results)
        elif any(v in floats for v in n.reads):
            yield n
            if n.op.family is Family.VIEW:
                floats.update(n.results)


def _before_quantisers(graph: Graph) -> Iterable[Node]:
    """Nodes from which a quantiser is reached."""
    wanted: set[Value] = set()
    for n in reversed(graph.nodes):
        if quantises(n):
            wanted.update(n.reads)
        elif any(v in wanted for v in n.results):
            wanted.update(n.reads)
            yield n


def _any_in_bodies(node: Node) -> bool:
    pending = [a.attr for a in node.attrs.values() if isinstance(a, Foreign)]
    while pending:
        attr = pending.pop()
        if not isinstance(attr, onnx.AttributeProto):
            continue
        bodies = [*([attr.g] if attr.HasField("g") else []), *attr.graphs]
        inner = [n for body in bodies for n in body.node]
        if any(n.op_type in QUANTISERS for n in inner):
            return True
        pending += [a for n in inner for a in n.attribute]
    return False
