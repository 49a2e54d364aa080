"""A 1x1 convolution goes before the enlarging Resize that feeds it. Graph -> Graph.

    Conv(Concat(Resize(a), Resize(b), c), W) + bias
        = Resize(Conv(a, Wa) + bias) + Resize(Conv(b, Wb)) + Conv(c, Wc)

A 1x1 convolution mixes channels at one place, Resize mixes places of one channel by weights that sum to 1: both orders
give the same sums. Before the Resize the convolution has fewer places to go to, so this pays when the Resize enlarges
and the convolution does not make many more channels than it reads (the decoders of SegFormer, U-Net, feature pyramids).
It re-associates (last-bit differences), so it is a pass with a name that can be skipped.

Only where nobody else reads what goes away, weights are constant, and the Resize is nearest or linear, over places
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from onnxfuse.frontend.rewrite import pointwise_conv, taken_names
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Lit
from onnxfuse.ir.graph import ArrayConst, Constant, Graph, Node, Value, fresh_name
from onnxfuse.ir.types import Dim, tensor
from onnxfuse.ops.dsl import Known
from onnxfuse.ops.table import lookup

ENLARGES = 2.0  # output places per input place from which it pays
CHANNELS = 2.0  # features the convolution may make per channel it reads: Resize and sum then run over those

Facts = Mapping[Value, Known]


def conv_before_resize(graph: Graph, facts: Facts) -> Graph:
    """Move every such convolution (see the module docstring)."""
    if not any(_is(n, "Resize") for n in graph.nodes):
        return graph
    consts, taken = dict(graph.consts), taken_names(graph)
    pass_ = _Pass(graph, facts, graph.producers(), graph.uses(), graph.escapes(), consts, taken)
    new = {conv: made for conv in graph.nodes if (made := pass_.moved(conv)) is not None}
    if not new:
        return graph
    nodes = [m for n in graph.nodes for m in new.get(n, [n])]
    return replace(graph, nodes=tuple(nodes), consts=consts)


@dataclass(frozen=True, slots=True)
class _Part:
    """Channels [low, high) of the convolution's input: `value`, or what `resize` makes of its own input."""

    value: Value
    low: int
    high: int
    resize: Node | None


@dataclass(slots=True)
class _Pass:
    graph: Graph
    facts: Facts
    makers: Mapping[Value, Node]
    uses: Mapping[Value, list[Node]]
    escapes: set[Value]
    consts: dict[Value, Constant]
    taken: set[str]

    def moved(self, conv: Node) -> list[Node] | None:
        """The nodes that replace a convolution; None when it stays."""
        if not pointwise_conv(conv, self.consts):
            return None
        parts = self._parts(conv)
        if parts is None or not any(p.resize for p in parts):
            return None
        weight, out = conv.inputs[1], conv.outputs[0]
        assert weight is not None
        assert out is not None
        array = self.consts[weight].numpy()
        bias = conv.inputs[2] if len(conv.inputs) > 2 else None
        nodes: list[Node] = []
        terms: list[Value] = []
        for k, p in enumerate(self._grouped(parts, conv, nodes)):
            source = p.value if p.resize is None else p.resize.inputs[0]
            assert source is not None
            inputs = (source, self._weight(weight, array, p), *([bias] if bias is not None and k == 0 else []))
            shape = (*source.tensor.shape[:1], array.shape[0], *source.tensor.shape[2:])
            small = self._value(out, shape)
            name = fresh_name(conv.name, self.taken)
            nodes.append(replace(conv, inputs=inputs, outputs=(small,), name=name, source=None))
            terms.append(small if p.resize is None else self._enlarged(p.resize, small, out, conv, nodes))
        if len(terms) == 1:
            return [*nodes[:-1], replace(nodes[-1], outputs=(out,))]
        return [*nodes, *self._sum(terms, out, conv)]

    def _parts(self, conv: Node) -> list[_Part] | None:
        """The channels the convolution reads, by where they come from."""
        x = conv.inputs[0]
        assert x is not None
        maker = self.makers.get(x)
        if maker is None or not self._alone(x):
            return None
        features = conv.inputs[1].tensor.shape[0] if conv.inputs[1] is not None else 0
        values = maker.inputs if _is(maker, "Concat") and _channel_axis(maker, x) else (x,)
        parts: list[_Part] = []
        at = 0
        for v in values:
            channels = v.tensor.shape[1] if v is not None and v.type is not None and v.type.rank > 2 else None
            if v is None or not isinstance(channels, int) or not isinstance(features, int):
                return None
            resize = self.makers.get(v)
            movable = resize is not None and features <= CHANNELS * channels and self._movable(resize, v)
            parts.append(_Part(v, at, at + channels, resize if movable else None))
            at += channels
        return parts

    def _movable(self, resize: Node, v: Value) -> bool:
        """A Resize over places alone whose weights sum to 1, that enlarges, and nobody else reads."""
        x = resize.inputs[0] if resize.inputs else None
        if not _is(resize, "Resize") or x is None or x.type is None or v.type is None or not self._alone(v):
            return False
        mode = resize.attrs.get("mode", "nearest")
        place = resize.attrs.get("coordinate_transformation_mode", "half_pixel")
        if mode not in ("nearest", "linear") or place == "tf_crop_and_resize" or resize.attrs.get("antialias", 0):
            return False
        if resize.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
            return False
        if x.type.rank != v.type.rank or x.type.shape[1] != v.type.shape[1]:
            return False
        if resize.attrs.get("axes") is not None or not _same(x.type.shape[0], v.type.shape[0]):
            return False
        growth = self._growth(resize, x.type.shape, v.type.shape)
        return growth is not None and growth >= ENLARGES and self._target(resize, v, 1) is not None

    def _growth(self, resize: Node, before: tuple[Dim, ...], after: tuple[Dim, ...]) -> float | None:
        """Output places per input place, by the scales or by the shapes; None when not known."""
        at = 1 if len(resize.inputs) == 2 else 2  # opset 10: Resize(x, scales)
        scales = resize.inputs[at] if len(resize.inputs) > at else None
        numbers = self._numbers(scales)
        if len(numbers) == len(before):
            return prod(numbers[2:]) if numbers[:2] == [1.0, 1.0] and min(numbers) >= 1.0 else None
        pairs = list(zip(before[2:], after[2:], strict=True))
        if not all(isinstance(a, int) and isinstance(b, int) and 0 < a <= b for a, b in pairs):
            return None
        return prod(b / a for a, b in pairs if isinstance(a, int) and isinstance(b, int))

    def _numbers(self, v: Value | None) -> list[float]:
        """The elements of a value that are known; none when they are not."""
        known = self.facts.get(v) if v is not None else None
        if known is not None and all(isinstance(e, Lit) for e in known.flat):
            return [float(e.value) for e in known.flat]
        const = self.consts.get(v) if v is not None else None
        return [] if const is None else [float(n) for n in const.numpy().ravel()]

    def _alone(self, v: Value) -> bool:
        """One node reads the value, once, and nothing outside the graph does."""
        readers = self.uses.get(v, [])
        return len(readers) == 1 and readers[0].reads.count(v) == 1 and v not in self.escapes

    def _grouped(self, parts: list[_Part], conv: Node, nodes: list[Node]) -> list[_Part]:
        """Neighbours that stay as they are share one convolution: they are concatenated again."""
        out: list[_Part] = []
        run: list[_Part] = []

        def close() -> None:
            if len(run) == 1:
                out.append(run[0])
            elif run:
                out.append(_Part(self._joined(run, conv, nodes), run[0].low, run[-1].high, None))
            run.clear()

        for p in parts:
            if p.resize is None:
                run.append(p)
                continue
            close()
            out.append(p)
        close()
        return out

    def _joined(self, run: list[_Part], conv: Node, nodes: list[Node]) -> Value:
        x = conv.inputs[0]
        assert x is not None
        concat = self.makers[x]
        channels = run[-1].high - run[0].low
        joined = self._value(x, (x.tensor.shape[0], channels, *x.tensor.shape[2:]))
        inputs = tuple(p.value for p in run)
        name = fresh_name(concat.name, self.taken)
        nodes.append(replace(concat, inputs=inputs, outputs=(joined,), name=name, source=None))
        return joined

    def _enlarged(self, resize: Node, small: Value, out: Value, conv: Node, nodes: list[Node]) -> Value:
        """The Resize of the small result."""
        big = self._value(out, out.tensor.shape)
        features = small.tensor.shape[1]
        old = resize.outputs[0]
        assert isinstance(features, int)
        assert old is not None
        target = self._target(resize, old, features)
        assert target is not None
        inputs = (small, *(self._constant(resize, x) if isinstance(x, np.ndarray) else x for x in target))
        origin = tuple(dict.fromkeys((*resize.origin, *conv.origin)))
        name = fresh_name(resize.name, self.taken)
        nodes.append(replace(resize, inputs=inputs, outputs=(big,), name=name, origin=origin, source=None))
        return big

    def _target(self, resize: Node, v: Value, features: int) -> list[Value | np.ndarray | None] | None:
        """The Resize's inputs after the first, for so many channels; None when they cannot be written down."""
        rest: list[Value | np.ndarray | None] = list(resize.inputs[1:])
        sizes = resize.inputs[3] if len(resize.inputs) > 3 else None
        if sizes is None:
            return rest  # scales name no channels
        known = self.facts.get(sizes)
        if known is not None and known.size == v.tensor.rank and all(isinstance(e, Lit) for e in known.flat):
            numbers = [int(e.value) for e in known.flat]
            rest[2] = np.array([numbers[0], features, *numbers[2:]], np.int64)
            return rest
        x = resize.inputs[0]
        assert x is not None
        pairs = zip(x.tensor.shape[2:], v.tensor.shape[2:], strict=True)
        scales = [b // a for a, b in pairs if isinstance(a, int) and isinstance(b, int) and a > 0 and b % a == 0]
        if len(scales) != v.tensor.rank - 2:
            return None
        return [rest[0], np.array([1, 1, *scales], np.float32)]  # the same sizes, by whole factors

    def _constant(self, resize: Node, array: np.ndarray) -> Value:
        kind = DType.I64 if array.dtype == np.int64 else DType.F32
        v = Value(fresh_name(f"{resize.name}.target", self.taken), tensor(kind, array.shape))
        self.consts[v] = ArrayConst(array)
        return v

    def _weight(self, weight: Value, array: np.ndarray, p: _Part) -> Value:
        piece = np.ascontiguousarray(array[:, p.low : p.high])
        v = Value(fresh_name(f"{weight.name}.part", self.taken), tensor(weight.tensor.dtype, piece.shape))
        self.consts[v] = ArrayConst(piece)
        return v

    def _value(self, like: Value, shape: tuple[Dim, ...]) -> Value:
        return Value(fresh_name(f"{like.name}.part", self.taken), tensor(like.tensor.dtype, shape))

    def _sum(self, terms: list[Value], out: Value, conv: Node) -> list[Node]:
        """Additions of the terms, left to right, the last of which makes the convolution's result."""
        add = lookup("", "Add", self.graph.opset)
        assert add is not None
        nodes: list[Node] = []
        total = terms[0]
        for k, term in enumerate(terms[1:], start=2):
            made = out if k == len(terms) else self._value(out, out.tensor.shape)
            name = fresh_name(f"{conv.name}.sum", self.taken)
            nodes.append(Node(add, (total, term), (made,), {}, name, conv.origin))
            total = made
        return nodes


def _is(node: Node, name: str) -> bool:
    return node.op.name == name and not node.op.domain


def _same(a: Dim, b: Dim) -> bool:
    return a is b or a == b


def _channel_axis(concat: Node, x: Value) -> bool:
    axis = concat.attrs.get("axis", 1)
    return isinstance(axis, int) and axis % x.tensor.rank == 1 if x.type is not None and x.type.rank else False
