"""A Concat of channels that several nodes read becomes one for each of them, right before it. Graph -> Graph.

    c = Concat(a, b)      y = Conv(c, W)      z = Conv(Relu(BN(c)), V)      d = Concat(c, e)
        ->  y = Conv(Concat(a, b), W)         z = Conv(Relu(BN(Concat(a, b))), V)        d = Concat(a, b, e)

A 1x1 convolution reads its channels from where they are (templates/gemm_joined.py), and so needs no Concat in memory,
but only a view with a single reader can be part of its kernel. Done where every reader is such a convolution, one with
a few steps on its input, or another Concat of channels; a Concat of more than MOST_PARTS values is cut: the inner one
is made once. Exact: values are only moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from onnxfuse.frontend.rewrite import pointwise_conv, taken_names
from onnxfuse.ir.graph import Constant, Graph, Node, Value, fresh_name

MOST_PARTS = 8  # values a Concat may read in the end: all of them are inputs of one kernel
LEAST_FEATURES = 8  # of a convolution: fewer rows do not share what is read
STEPS = frozenset({"Mul", "Add", "Sub", "Relu", "Clip", "LeakyRelu"})
MOST_STEPS = 4  # before a convolution


def concat_by_reader(graph: Graph) -> Graph:
    """Split every such Concat (see the module docstring)."""
    joins = [n for n in graph.nodes if _joins_channels(n)]
    if not joins:
        return graph
    pass_ = _Pass(graph.uses(), graph.escapes(), graph.consts, taken_names(graph))
    for n in joins:
        pass_.decide(n)
    if not pass_.parts:
        return graph
    gone = set(pass_.makers.values())
    nodes = [m for n in graph.nodes if n not in gone for m in pass_.rewritten(n)]
    return replace(graph, nodes=tuple(nodes))


@dataclass(slots=True)
class _Pass:
    """`parts`: what the results of the Concats that go away are made of; `makers`: those Concats."""

    uses: Mapping[Value, list[Node]]
    escapes: set[Value]
    consts: Mapping[Value, Constant]
    taken: set[str]
    parts: dict[Value, tuple[Value, ...]] = field(default_factory=dict)
    makers: dict[Value, Node] = field(default_factory=dict)

    def decide(self, join: Node) -> None:
        """Whether a Concat goes away; those before it are decided, and stay if it would read too many values."""
        (out,) = join.results
        inputs = [v for v in join.inputs if v is not None]
        while len(flat := [p for v in inputs for p in self.parts.get(v, (v,))]) > MOST_PARTS:
            inner = max((v for v in inputs if v in self.parts), key=lambda v: len(self.parts[v]), default=None)
            if inner is None:
                return
            del self.parts[inner], self.makers[inner]
        readers = self.uses.get(out, [])
        if out not in self.escapes and readers and all(self._takes(r, out) for r in readers):
            self.parts[out], self.makers[out] = tuple(flat), join

    def _takes(self, reader: Node, v: Value) -> bool:
        """The reader can do with the parts of `v`."""
        if reader.reads.count(v) != 1 or reader.captures:
            return False
        if _joins_channels(reader):
            return True
        for _ in range(MOST_STEPS):
            if reader.op.name not in STEPS or reader.op.domain or reader.inputs[0] is not v:
                break
            (out,) = reader.results
            readers = self.uses.get(out, [])
            if (
                len(readers) != 1
                or out in self.escapes
                or any(x not in self.consts for x in reader.reads if x is not v)
            ):
                return False
            reader, v = readers[0], out
        return self._reads_channels(reader, v)

    def _reads_channels(self, conv: Node, v: Value) -> bool:
        if not pointwise_conv(conv, self.consts) or conv.inputs[0] is not v:
            return False
        features = conv.inputs[1].tensor.shape[0] if conv.inputs[1] is not None else 0
        return isinstance(features, int) and features >= LEAST_FEATURES

    def rewritten(self, node: Node) -> list[Node]:
        """The node, reading parts: a Concat all at once, any other through a Concat of its own."""
        if not any(v in self.parts for v in node.inputs if v is not None):
            return [node]
        if _joins_channels(node):
            parts = tuple(p for v in node.inputs if v is not None for p in self.parts.get(v, (v,)))
            inner = (o for v in node.inputs if v in self.makers for o in self.makers[v].origin)
            return [replace(node, inputs=parts, origin=tuple(dict.fromkeys((*inner, *node.origin))), source=None)]
        made: list[Node] = []
        inputs = [self._own(v, made) if v is not None and v in self.parts else v for v in node.inputs]
        return [*made, replace(node, inputs=tuple(inputs))]

    def _own(self, v: Value, made: list[Node]) -> Value:
        own, join = Value(fresh_name(v.name, self.taken), v.type), self.makers[v]
        name = fresh_name(join.name, self.taken)
        made.append(replace(join, inputs=self.parts[v], outputs=(own,), name=name, source=None))
        return own


def _joins_channels(node: Node) -> bool:
    """A Concat along axis 1 of a value with places, all channels known."""
    if node.op.name != "Concat" or node.op.domain or len(node.results) != 1:
        return False
    out, axis = node.results[0], node.attrs.get("axis")
    if out.type is None or out.type.rank < 3 or not isinstance(axis, int) or axis % out.type.rank != 1:
        return False
    return all(v is not None and v.type is not None and isinstance(v.type.shape[1], int) for v in node.inputs)
