"""Inference BatchNormalization that stays, and the affine steps behind it, as one Mul and one Add. Graph -> Graph.

    (BN(x) * a + b) - c  ...  =  x * s + t         a, b, c: constants per channel, or narrower

Runs of BatchNormalization, Mul, Div, Add and Sub by constants of which each has one reader, if that makes them
shorter; a BatchNormalization always. The factor and the shift are worked out in f64 and rounded once. This
re-associates (last-bit differences), so it is a pass with a name that can be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxfuse.frontend.noop import in_training
from onnxfuse.frontend.rewrite import taken_names
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import ArrayConst, Constant, Graph, Node, Value, fresh_name
from onnxfuse.ir.types import tensor
from onnxfuse.ops.table import lookup

LARGEST = 1 << 16  # elements of a factor or shift: per channel, not per pixel
FLOATS = (DType.F32, DType.F64)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a node does to its input `x`: x * factor + shift, in f64; a shift of None is none at all."""

    x: Value
    factor: np.ndarray | None
    shift: np.ndarray | None


def affine(graph: Graph) -> Graph:
    """Replace every such run (see the module docstring)."""
    uses, escapes = graph.uses(), graph.escapes()
    consts, taken = dict(graph.consts), taken_names(graph)
    new: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        first = None if node in new else _step(node, graph.consts)
        if first is None:
            continue
        run, steps = _run(node, first, graph, uses, escapes)
        made = _rewritten(run, steps, graph, consts, taken)
        if made is not None:
            new |= {n: [] for n in run}
            new[run[-1]] = made
    if not new:
        return graph
    nodes = tuple(m for n in graph.nodes for m in new.get(n, [n]))
    return replace(graph, nodes=nodes, consts=consts)


def _run(
    node: Node, step: _Step | None, graph: Graph, uses: Mapping[Value, list[Node]], escapes: set[Value]
) -> tuple[list[Node], list[_Step]]:
    """The node and those behind it that go on with its result, while nobody else reads that, and what each does."""
    run, steps = list[Node](), list[_Step]()
    while step is not None:
        run.append(node)
        steps.append(step)
        y = run[-1].outputs[0]
        assert y is not None
        readers = uses.get(y, [])
        if len(readers) != 1 or y in escapes:
            break
        node = readers[0]
        step = _step(node, graph.consts)
        if step is not None and step.x is not y:
            break
    return run, steps


def _step(node: Node, consts: Mapping[Value, Constant]) -> _Step | None:
    rule = STEPS.get(node.op.name)
    if rule is None or node.op.domain or node.captures or any(v is None for v in (*node.inputs, *node.outputs)):
        return None
    y = node.outputs[0]
    if y is None or y.type is None or y.type.dtype not in FLOATS:
        return None
    step = rule(node, consts)
    if step is None or step.x.type is None or step.x.type != y.type:
        return None
    narrow = all(_narrow(c, y) for c in (step.factor, step.shift) if c is not None)
    return step if narrow else None


def _narrow(c: np.ndarray, y: Value) -> bool:
    """The constant broadcasts to `y` and does not make it larger."""
    shape = y.tensor.shape
    return c.ndim <= len(shape) and all(n in (1, d) for n, d in zip(c.shape[::-1], shape[::-1], strict=False))


def _batch_normalization(node: Node, consts: Mapping[Value, Constant]) -> _Step | None:
    params = [consts.get(v) for v in node.inputs[1:] if v is not None]
    x = node.inputs[0]
    if len(params) != 4 or None in params or x is None or x.type is None or in_training(node, consts):
        return None
    if int(node.attrs.get("spatial", 1)) != 1 or x.type.rank < 2:  # type: ignore[arg-type]
        return None
    scale, beta, mean, var = (_f64(p).reshape(-1, *[1] * (x.type.rank - 2)) for p in params if p is not None)
    epsilon = float(node.attrs.get("epsilon", 1e-5))  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(var + epsilon)
        return _Step(x, factor, beta - mean * factor)


def _f64(c: Constant) -> np.ndarray:
    return np.asarray(c.numpy(), dtype=np.float64)


def _binary(combine: Callable[[Value, np.ndarray], _Step], swaps: bool) -> Callable[..., _Step | None]:
    """A step of a node with two inputs, of which one is a constant: the second, or either where it `swaps`."""

    def rule(node: Node, consts: Mapping[Value, Constant]) -> _Step | None:
        x, c = node.inputs
        assert x is not None
        assert c is not None
        if swaps and x in consts:
            x, c = c, x
        if x in consts or c not in consts or c.tensor.dtype not in FLOATS or _elements(c) > LARGEST:
            return None
        with np.errstate(all="ignore"):
            return combine(x, _f64(consts[c]))

    return rule


def _elements(v: Value) -> int:
    return int(np.prod([d for d in v.tensor.shape if isinstance(d, int)], dtype=np.int64))


STEPS: Mapping[str, Callable[[Node, Mapping[Value, Constant]], _Step | None]] = {
    "BatchNormalization": _batch_normalization,
    "Mul": _binary(lambda x, c: _Step(x, c, None), swaps=True),
    "Div": _binary(lambda x, c: _Step(x, 1.0 / c, None), swaps=False),
    "Add": _binary(lambda x, c: _Step(x, None, c), swaps=True),
    "Sub": _binary(lambda x, c: _Step(x, None, -c), swaps=False),
}


def _rewritten(
    run: list[Node], steps: list[_Step], graph: Graph, consts: dict[Value, Constant], taken: set[str]
) -> list[Node] | None:
    """The Mul and the Add that replace a run; None when it stays."""
    parts = [c for s in steps for c in (s.factor, s.shift) if c is not None]
    factor, shift = np.ones(()), None
    with np.errstate(all="ignore"):
        for s in steps:
            if s.factor is not None:
                factor = factor * s.factor
                shift = None if shift is None else shift * s.factor
            if s.shift is not None:
                shift = s.shift if shift is None else shift + s.shift
    multiplies = any(s.factor is not None for s in steps)
    fewer = multiplies + (shift is not None) < len(run) or run[0].op.name == "BatchNormalization"
    if not fewer or any(c is not None and c.size > max(p.size for p in parts) for c in (factor, shift)):
        return None
    dtype = steps[0].x.tensor.dtype
    with np.errstate(all="ignore"):
        rounded = [None if c is None else c.astype(dtype.numpy) for c in (factor if multiplies else None, shift)]
    if not all(np.isfinite(c).all() for c in rounded if c is not None):
        return None
    return _nodes(run, steps[0].x, rounded[0], rounded[1], graph, consts, taken)


def _nodes(
    run: list[Node],
    x: Value,
    factor: np.ndarray | None,
    shift: np.ndarray | None,
    graph: Graph,
    consts: dict[Value, Constant],
    taken: set[str],
) -> list[Node]:
    """Mul by `factor`, then Add of `shift`, making the result of the run."""
    out = run[-1].outputs[0]
    assert out is not None
    origin = tuple(dict.fromkeys(o for n in run for o in n.origin))
    made: list[Node] = []
    pairs = [(name, c) for name, c in (("Mul", factor), ("Add", shift)) if c is not None]
    for name, array in pairs:
        c = Value(fresh_name(f"{out.name}.{name.lower()}", taken), tensor(x.tensor.dtype, array.shape))
        consts[c] = ArrayConst(array)
        last = name == pairs[-1][0]
        y = out if last else Value(fresh_name(f"{out.name}.scaled", taken), out.tensor)
        op = lookup("", name, graph.opset)
        assert op is not None
        made.append(Node(op, (x, c), (y,), {}, run[-1].name if last else fresh_name(run[-1].name, taken), origin))
        x = y
    return made
