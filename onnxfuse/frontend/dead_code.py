"""Dead code. Graph -> Graph: every node left has a result that is used, every constant is read.

ONNX ops have no side effects, foreign ones included. Captures of subgraphs are uses; graph outputs always stay.
"""

from __future__ import annotations

from dataclasses import replace

from onnxfuse.ir.graph import Graph


def dead_code(graph: Graph) -> Graph:
    """Drop nodes without used results and constants without readers."""
    live = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if any(v in live for v in node.results):
            live.update(node.reads)
            kept.append(node)
    consts = {v: c for v, c in graph.consts.items() if v in live}
    if len(kept) == len(graph.nodes) and len(consts) == len(graph.consts):
        return graph
    return replace(graph, nodes=tuple(reversed(kept)), consts=consts)
