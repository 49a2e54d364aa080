"""Graph: the ONNX level. Single assignment, topologically ordered, immutable; the use map is computed, not stored."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Union

import numpy as np

from onnxfuse.ir.op import Op
from onnxfuse.ir.types import TensorType

AttrValue = Union[int, float, str, bytes, tuple[int, ...], tuple[float, ...], tuple[str, ...], "np.ndarray", "Foreign"]
Attrs = Mapping[str, AttrValue]


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """An attribute value we carry but never look into (subgraphs, sparse tensors, types): an onnx.AttributeProto."""

    attr: object


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A named value. `name` is the ONNX name and is never parsed for meaning; identity is equality.

    `type` is None when element type or rank is unknown or the value is not a dense tensor (sequence, optional, map).
    """

    name: str
    type: TensorType | None

    @property
    def tensor(self) -> TensorType:
        """The type of a value that must be a tensor by now (compiled nodes only)."""
        assert self.type is not None, self.name
        return self.type

    def __str__(self) -> str:
        return f"%{self.name}"

    __repr__ = __str__


class Constant(Protocol):
    """What `Graph.consts` holds: an array read lazily, so that a model larger than memory can pass through."""

    @property
    def nbytes(self) -> int: ...

    def numpy(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ArrayConst:
    """A constant made by us (folded, or a transformed weight)."""

    array: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def numpy(self) -> np.ndarray:
        return self.array


@dataclass(frozen=True, slots=True, eq=False)
class Spelling:
    """The user's nodes that a node of ours stands for: they make `output` from (some of) `inputs`.

    inputs    stand for the node's inputs, one for one, output for its first: what becomes of these is of no concern
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value | None, ...]
    output: Value


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator application.

    inputs    None where an optional input is absent
    origin    names of the user's ONNX nodes this comes from; survives every rewrite
    captures  outer values that subgraphs in the attributes use (an extra read; never renamed)
    source    the onnx.NodeProto it was read from: attributes, doc string and metadata are emitted from it verbatim
              (names of inputs and outputs are not); None once op or attributes change, and for nodes we made
    spelled   what is written in its place; None: itself
    """

    op: Op
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    attrs: Attrs
    name: str
    origin: tuple[str, ...]
    captures: tuple[Value, ...] = ()
    source: object | None = None
    spelled: Spelling | None = None

    @property
    def reads(self) -> tuple[Value, ...]:
        """All values read, captured ones included, duplicates kept."""
        return tuple(v for v in self.inputs if v is not None) + self.captures

    @property
    def results(self) -> tuple[Value, ...]:
        """Outputs that are present."""
        return tuple(v for v in self.outputs if v is not None)

    def __str__(self) -> str:
        from onnxfuse.ir.text import show_item  # text imports this module

        return show_item(self)

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A model's main graph, or a body of control flow as a graph of its own.

    inputs    true inputs and overridable initializers, in the model's order
    consts    values with fixed data (initializers that are not overridable, folded constants)
    defaults  overridable initializers: both an input and a default value; never folded
    opset     default-domain opset of the model; imports has every domain
    reserved  names other graphs of the model use: no new value or node may take one
    """

    name: str
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    consts: Mapping[Value, Constant]
    opset: int
    imports: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[Value, Constant] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()

    def values(self) -> Iterator[Value]:
        """Every value once: inputs, constants, then node outputs in order."""
        yield from self.inputs
        yield from self.consts
        for node in self.nodes:
            yield from node.results

    def producers(self) -> dict[Value, Node]:
        """Which node makes a value."""
        return {v: n for n in self.nodes for v in n.results}

    def uses(self) -> dict[Value, list[Node]]:
        """Which nodes read a value, in order, once per reading node."""
        out: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for v in dict.fromkeys(node.reads):
                out.setdefault(v, []).append(node)
        return out

    def escapes(self) -> set[Value]:
        """Values that must exist under their own name: graph outputs and captures of subgraphs."""
        return set(self.outputs) | {v for n in self.nodes for v in n.captures}

    def __str__(self) -> str:
        from onnxfuse.ir.text import show  # text imports this module

        return show(self)

    def __repr__(self) -> str:
        return f"<Graph {self.name}>"


def fresh_name(base: str, taken: set[str]) -> str:
    """`base`, or `base.1`, `base.2` ... on clash; adds it to `taken`."""
    name, k = base, 0
    while name in taken:
        k += 1
        name = f"{base}.{k}"
    taken.add(name)
    return name


def topological(nodes: Iterable[Node], available: Iterable[Value]) -> tuple[Node, ...] | None:
    """The nodes in dependency order, keeping the given order where possible; None if there is a cycle or a hole."""
    pending = list(nodes)
    made_by = {v: i for i, n in enumerate(pending) for v in n.results}
    ready_values = set(available)
    if not all(v in made_by or v in ready_values for n in pending for v in n.reads):
        return None
    missing = [sum(v not in ready_values for v in dict.fromkeys(n.reads)) for n in pending]
    readers: dict[Value, list[int]] = {}
    for i, n in enumerate(pending):
        for v in dict.fromkeys(n.reads):
            if v not in ready_values:
                readers.setdefault(v, []).append(i)
    heap = [i for i, m in enumerate(missing) if m == 0]
    heapq.heapify(heap)
    out: list[Node] = []
    while heap:
        node = pending[heapq.heappop(heap)]
        out.append(node)
        for v in node.results:
            for j in readers.get(v, ()):
                missing[j] -= 1
                if missing[j] == 0:
                    heapq.heappush(heap, j)
    return tuple(out) if len(out) == len(pending) else None
