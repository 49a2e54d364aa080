"""Simplification before fusion. Graph -> Prepared: fewer nodes, the same numbers, the same inputs and outputs.

In: a graph as read. Out: typed; no dead code, nothing foldable left, no duplicate work, no node that changes nothing,
no view that leads back to what it is a view of, inference BatchNormalization inside the weights before it or a Mul and
an Add, 1x1 convolutions before the Resize that enlarges their input, products of dequantised bytes as products of
integers, a Concat of channels for each convolution that reads it. Each pass can be skipped by name
(PrepareConfig.skip). What was not done, and could have been expected, is in the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnxfuse.config import PrepareConfig
from onnxfuse.errors import IRError
from onnxfuse.frontend.affine import affine
from onnxfuse.frontend.bn_into_conv import bn_into_conv
from onnxfuse.frontend.concat_by_reader import concat_by_reader
from onnxfuse.frontend.conv_before_resize import conv_before_resize
from onnxfuse.frontend.cse import cse
from onnxfuse.frontend.dead_code import dead_code
from onnxfuse.frontend.fold import Evaluate, fold
from onnxfuse.frontend.integers import integers
from onnxfuse.frontend.noop import noop
from onnxfuse.frontend.pad_into_conv import pad_into_conv
from onnxfuse.frontend.quantised import quantises
from onnxfuse.frontend.rewrite import Note
from onnxfuse.frontend.shapes import Hints, Typed, infer_types
from onnxfuse.frontend.view_chains import view_chains
from onnxfuse.ir.graph import Graph, Value, topological
from onnxfuse.ops.dsl import Known

ROUNDS = 6  # folding a shape can type what comes after it, which can make more foldable; three rounds are usual
# Rounds otherwise than the model: not where a quantiser could notice.
INEXACT = frozenset({"bn_into_conv", "affine", "conv_before_resize"})


@dataclass(frozen=True, slots=True)
class Prepared:
    """The simplified graph with its types and known elements, and what was refused."""

    typed: Typed
    notes: tuple[Note, ...]

    @property
    def graph(self) -> Graph:
        return self.typed.graph


def prepare(
    graph: Graph,
    config: PrepareConfig,
    evaluate: Evaluate,
    hints: Hints | None = None,
    known: Mapping[Value, Known] | None = None,
) -> Prepared:
    """Simplify until nothing changes (see the module docstring). `known` are elements of inputs."""
    notes: list[Note] = []
    typed = infer_types(graph, hints, known)
    allowed = _const_bytes(graph) + config.fold_total
    for _ in range(ROUNDS):
        before, notes = typed.graph, []
        after = _round(typed, config, evaluate, notes, allowed)
        if after is before:
            break
        typed = infer_types(after, hints, known)
    # After everything else: a BatchNormalization may find its way into weights in any round.
    after = _run("affine", typed.graph, affine, config)

    def in_integers(g: Graph) -> Graph:
        g, more = integers(g)
        notes.extend(more)
        return g

    # Last: `cse` would merge again what it takes apart.
    after = _run("dead_code", _run("integers", after, in_integers, config), dead_code, config)
    after = _run("concat_by_reader", after, concat_by_reader, config)  # after cse, likewise
    typed = typed if after is typed.graph else infer_types(after, hints, known)
    return Prepared(typed, tuple(dict.fromkeys(notes)))


def _const_bytes(graph: Graph) -> int:
    return sum(c.nbytes for c in graph.consts.values())


def _run(name: str, graph: Graph, step: Callable[[Graph], Graph], config: PrepareConfig) -> Graph:
    if name in config.skip or (name in INEXACT and any(quantises(n) for n in graph.nodes)):
        return graph
    return _checked(name, graph, step(graph))


def _round(typed: Typed, config: PrepareConfig, evaluate: Evaluate, notes: list[Note], allowed: int) -> Graph:
    """All simplifications once; the constants may come to `allowed` bytes."""
    graph = typed.graph

    def run(name: str, step: Callable[[Graph], Graph]) -> None:
        nonlocal graph
        graph = _run(name, graph, step, config)

    def folded(g: Graph) -> Graph:
        g, more = fold(g, typed.facts, config.fold_growth, evaluate, allowed - _const_bytes(g))
        notes.extend(more)
        return g

    def normalised(g: Graph) -> Graph:
        g, more = bn_into_conv(g)
        notes.extend(more)
        return g

    run("dead_code", dead_code)  # first: nothing is computed for values nobody reads
    run("fold", folded)
    run("identity", noop)  # after fold: parameters of Pad, Slice are constants by now
    run("view_chains", lambda g: view_chains(g, typed.facts))
    run("pad_into_conv", lambda g: pad_into_conv(g, typed.facts))  # after identity: a Pad of nothing is gone
    run("bn_into_conv", normalised)  # after identity: a Dropout between them is gone
    run("conv_before_resize", lambda g: conv_before_resize(g, typed.facts))  # after bn_into_conv: all weights are final
    run("cse", cse)  # after fold: folded constants compare equal
    run("dead_code", dead_code)
    return graph


def _checked(name: str, before: Graph, after: Graph) -> Graph:
    """No pass may make a cycle, lose a definition or touch the interface."""
    if after is before:
        return after
    if [v.name for v in after.outputs] != [v.name for v in before.outputs] or after.inputs != before.inputs:
        raise IRError("IR_PREPARE", f"pass {name} changed the inputs or outputs of the graph")
    ordered = topological(after.nodes, [*after.inputs, *after.consts])
    made = {v for n in after.nodes for v in n.results} | set(after.inputs) | set(after.consts)
    missing: list[Value] = [v for v in after.outputs if v not in made]
    if ordered is None or missing:
        why = f"no definition of {missing[0].name!r}" if missing else "a cycle, or a value without definition"
        raise IRError("IR_PREPARE", f"pass {name} broke the graph", why)
    if ordered == after.nodes:
        return after
    return replace(after, nodes=ordered)
