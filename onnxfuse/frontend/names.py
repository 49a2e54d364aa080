"""Names of nodes and values: every one of its own. Protos are changed in place.

The names of a body are nobody's interface (its inputs and outputs are taken by position); where all names are unique
already nothing changes. A value made later for one graph then never hides one of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx

from onnxfuse.frontend.protos import local_names, subgraphs
from onnxfuse.ir.graph import fresh_name


def name_nodes(graph: onnx.GraphProto) -> None:
    """Every node of the main graph gets a name of its own."""
    taken = {n.name for n in graph.node if n.name}
    seen: set[str] = set()
    for k, node in enumerate(graph.node):
        if not node.name:
            node.name = fresh_name(f"{node.op_type}_{k}", taken)
        elif node.name in seen:
            node.name = fresh_name(node.name, taken)
        seen.add(node.name)


def unique_names(proto: onnx.ModelProto, tensors: Collection[str]) -> frozenset[str]:
    """Rename what bodies define until every value and node of the model has a name of its own. Returns all names."""
    main = proto.graph
    taken = local_names(main) | set(tensors) | {o.name for o in main.output}
    nodes = {n.name for n in main.node}
    pending: list[tuple[onnx.GraphProto, dict[str, str]]] = [(g, {}) for n in main.node for g in subgraphs(n)]
    for graph, outer in pending:  # the list grows meanwhile
        own = local_names(graph)
        names = {name: fresh_name(name, taken) for name in sorted(own)}
        rename = {k: v for k, v in outer.items() if k not in own} | {k: v for k, v in names.items() if k != v}
        _rename(graph, rename)
        for k, node in enumerate(graph.node):
            node.name = fresh_name(node.name or f"{node.op_type}_{k}", nodes)
            pending.extend((g, rename) for g in subgraphs(node))
    return frozenset(taken | nodes)


def _rename(graph: onnx.GraphProto, rename: Mapping[str, str]) -> None:
    if not rename:
        return
    for item in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        item.name = rename.get(item.name, item.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = rename.get(sparse.values.name, sparse.values.name)
    for note in graph.quantization_annotation:
        note.tensor_name = rename.get(note.tensor_name, note.tensor_name)
    for node in graph.node:
        node.input[:] = [rename.get(name, name) for name in node.input]
        node.output[:] = [rename.get(name, name) for name in node.output]
