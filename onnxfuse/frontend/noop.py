"""Nodes whose result is their first input. Graph -> Graph without them.

A node goes only when the result is equal bit for bit for every input: `x + 0` stays (-0.0), Clip without bounds stays
(it clamps infinities). A graph output or a captured value keeps its name: its producer takes the name over if the
input's own name is free to go, else the node stays.

Each rule is one small predicate; NOOPS at the bottom lists them by op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.frontend.rewrite import renamed, resolve, with_origin
from onnxfuse.ir.graph import Constant, Graph, Node, Value
from onnxfuse.ir.op import Family

SMALL = 4096  # bytes: parameters (pads, steps) larger than this are data


@dataclass(frozen=True, slots=True)
class _Context:
    consts: Mapping[Value, Constant]
    used: frozenset[Value] | set[Value]

    def array(self, node: Node, k: int) -> np.ndarray | None:
        """Input `k` if it is a small constant."""
        v = node.inputs[k] if k < len(node.inputs) else None
        const = None if v is None else self.consts.get(v)
        return None if const is None or const.nbytes > SMALL else const.numpy()

    def param(self, node: Node, name: str, k: int) -> np.ndarray | None:
        """A parameter that is an attribute in old opsets and input `k` in newer ones; None if absent or unknown."""
        value = node.attrs.get(name)
        return np.asarray(value) if value is not None else self.array(node, k)


def noop(graph: Graph) -> Graph:
    """Remove nodes that change nothing (see the module docstring)."""
    used = {v for n in graph.nodes for v in n.reads} | set(graph.outputs)
    context = _Context(graph.consts, used)
    escapes = graph.escapes()
    makers = graph.producers()
    subst: dict[Value, Value] = {}
    origins: dict[Node, tuple[str, ...]] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        x = node.inputs[0] if node.inputs else None
        y = node.outputs[0] if node.outputs else None
        if x is None or y is None or not is_noop(node, context):
            kept.append(node)
            continue
        x = resolve(x, subst)
        maker = makers.get(x)
        if y not in escapes:
            subst[y] = x
        elif maker is not None and x not in escapes:
            subst[x], makers[y] = y, maker
        else:
            kept.append(node)
            continue
        if maker is not None:
            origins[maker] = origins.get(maker, ()) + node.origin
    if not subst:
        return graph
    nodes = tuple(renamed(with_origin(n, origins.get(n, ())), subst) for n in kept)
    return replace(graph, nodes=nodes)


def is_noop(node: Node, context: _Context) -> bool:
    """The first output is the first input, and the others are not used."""
    if node.op.domain or node.captures or any(v in context.used for v in node.results[1:]):
        return False
    if node.op.family is Family.ALIAS:
        return True
    rule = NOOPS.get(node.op.name)
    return rule is not None and rule(node, context)


def in_training(node: Node, consts: Mapping[Value, Constant]) -> bool:
    """The node behaves as in training (or might): random masks, running statistics."""
    if node.op.name == "BatchNormalization":
        return bool(node.attrs.get("training_mode", 0)) or len(node.results) > 1
    if node.op.name == "Dropout" and len(node.inputs) > 2:
        flag = node.inputs[2]
        known = None if flag is None else consts.get(flag)
        return flag is not None and (known is None or bool(known.numpy().any()))
    return False


def _same_shape(node: Node) -> bool:
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y is None or x.type is None or y.type is None:
        return False
    a, b = x.type, y.type
    return (
        a.dtype is b.dtype and a.rank == b.rank and all(p is q or p == q for p, q in zip(a.shape, b.shape, strict=True))
    )


def _inference(node: Node, context: _Context) -> bool:
    return not in_training(node, context.consts)


def _reshapes(node: Node, _context: _Context) -> bool:
    return _same_shape(node)


def _same_dtype(node: Node, _context: _Context) -> bool:
    x = node.inputs[0]
    return x is not None and x.type is not None and node.attrs.get("to") == x.type.dtype.onnx


def _same_dtype_as(node: Node, _context: _Context) -> bool:
    x, like = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    return x is not None and like is not None and x.type is not None and like.type is not None and (
        x.type.dtype is like.type.dtype
    )  # fmt: skip


def _identity_permutation(node: Node, _context: _Context) -> bool:
    perm = node.attrs.get("perm")
    if perm is None:
        x = node.inputs[0]
        return x is not None and x.type is not None and x.type.rank < 2
    return isinstance(perm, tuple) and perm == tuple(range(len(perm)))


def _one_input(node: Node, _context: _Context) -> bool:
    return len(node.inputs) == 1


def _no_padding(node: Node, context: _Context) -> bool:
    pads = context.param(node, "pads", 1)
    return pads is not None and not pads.any()


def _whole_slice(node: Node, context: _Context) -> bool:
    steps = context.array(node, 4) if len(node.inputs) > 4 and node.inputs[4] is not None else np.ones(1)
    return _same_shape(node) and steps is not None and bool((steps == 1).all())


def _one_part(node: Node, _context: _Context) -> bool:
    return len(node.outputs) == 1 and _same_shape(node)


Rule = Callable[[Node, _Context], bool]

NOOPS: Mapping[str, Rule] = {
    "Identity": _one_input,
    "Dropout": _inference,
    "Cast": _same_dtype,
    "CastLike": _same_dtype_as,
    "Transpose": _identity_permutation,
    "Reshape": _reshapes,
    "Flatten": _reshapes,
    "Squeeze": _reshapes,
    "Unsqueeze": _reshapes,
    "Expand": _reshapes,
    "Tile": _reshapes,
    "Concat": _one_input,
    "Sum": _one_input,
    "Max": _one_input,
    "Min": _one_input,
    "Pad": _no_padding,
    "Slice": _whole_slice,
    "Split": _one_part,
}
