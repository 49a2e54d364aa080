"""Optimized bodies go back to where they came from. Scopes + Atomized + Plans -> Inside, inner bodies first.

A body is emitted like a model (its captured values are inputs of that), and then loses what the outer graph gives it.
What has no group inside and lost no node stays as it was, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from onnxfuse.emit.model import BodyModel, Emission, Inside, assemble, initializer
from onnxfuse.emit.plain import plain
from onnxfuse.frontend.atomize import Atomized
from onnxfuse.frontend.bodies import Place, Scope
from onnxfuse.frontend.load import copy_fields
from onnxfuse.ir.plan import Plans


@dataclass(slots=True, eq=False)
class _Collected:
    """What is known so far about the bodies right inside one graph."""

    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    functions: dict[str, onnx.FunctionProto] = field(default_factory=dict)

    def inside(self, models: Sequence[BodyModel] = ()) -> Inside:
        return Inside(self.nodes, self.functions, tuple(models))


def emit_bodies(scopes: Sequence[Scope], atomized: Sequence[Atomized], plans: Plans) -> Inside:
    """All bodies of all scopes but the first, as the first one's nodes hold them."""
    collected = [_Collected() for _ in scopes]
    models: list[BodyModel] = []
    for number in reversed(range(1, len(scopes))):
        scope, inside = scopes[number], collected[number]
        assert scope.place is not None
        outer = collected[scope.place.parent]
        node = _holder(scopes[scope.place.parent], scope.place, outer)
        if node is None:
            continue  # the outer graph does without this node
        seen = plans.scope(number)
        after = assemble(scope.source, atomized[number], seen, inside.inside())
        if not _is_new(scope, seen, inside):
            continue
        before = plain(scope.source, scope.source.graph)
        original = _graphs(node, scope.place.attribute)[scope.place.index]
        names = [i.name for i in original.input]
        given = tuple(zip(names, scope.formals, strict=True))
        models.append(BodyModel(scope.name, number, scope.place.parent, given, not scope.known, before, after))
        original.CopyFrom(_spliced(after, original, scope.captured))
        outer.nodes[node.name] = node
        outer.functions.update({f.name: f for f in after.model.functions[len(scope.source.model.functions) :]})
    return collected[0].inside(tuple(reversed(models)))


def _holder(outer: Scope, place: Place, collected: _Collected) -> onnx.NodeProto | None:
    """A copy of the node that holds a body, with what has been put back so far."""
    if place.node in collected.nodes:
        return collected.nodes[place.node]
    found = next((n.source for n in outer.graph.nodes if n.name == place.node), None)
    if not isinstance(found, onnx.NodeProto):
        return None
    copy = onnx.NodeProto()
    copy.CopyFrom(found)
    return copy


def _graphs(node: onnx.NodeProto, attribute: str) -> Sequence[onnx.GraphProto]:
    found = next(a for a in node.attribute if a.name == attribute)
    return [found.g] if found.HasField("g") else found.graphs


def _is_new(scope: Scope, plans: Plans, inside: _Collected) -> bool:
    grouped = any(g.id in plans.calls and g.id not in plans.refused for g in plans.partition.groups)
    read, now = ([id(n.source) for n in graph.nodes] for graph in (scope.source.graph, scope.graph))
    return grouped or bool(inside.nodes) or read != now


def _spliced(after: Emission, original: onnx.GraphProto, captured: frozenset[str]) -> onnx.GraphProto:
    """The emitted graph with the body's own interface, and its own constants inside."""
    graph = onnx.GraphProto()
    copy_fields(after.model.graph, graph, skip=("name", "input", "output", "sparse_initializer"))
    graph.name = original.name
    graph.input.extend(original.input)
    graph.output.extend(original.output)
    graph.initializer.extend(initializer(n, t) for n, t in after.tensors.items() if n not in captured)
    own = [s for s in after.model.graph.sparse_initializer if s.values.name not in captured]
    graph.sparse_initializer.extend(own)
    return graph
