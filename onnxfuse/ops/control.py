"""What the inputs of control flow bodies are: ops whose subgraphs are optimized with `--include-subgraph`.

A body is a function of its formal inputs and of the outer values it captures. Where a formal input comes from depends
on the op; ops that are not in `BODIES` keep their subgraphs word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxfuse.ir.bodies import Formal, Role
from onnxfuse.ir.graph import AttrValue, Node
from onnxfuse.ir.op import Family


def formals(node: Node, count: int, opset: int) -> tuple[Formal, ...] | None:
    """The formal inputs of a body of `node` with `count` of them; None where this is not understood."""
    rule = BODIES.get(node.op.name) if not node.op.domain and node.op.family is Family.OPAQUE else None
    found = None if rule is None else rule(node, opset)
    return found if found is not None and len(found) == count else None


def _branch(node: Node, opset: int) -> tuple[Formal, ...] | None:
    return ()


def _loop(node: Node, opset: int) -> tuple[Formal, ...] | None:
    states = node.inputs[2:]
    return (
        Formal(Role.COUNTER),
        Formal(Role.GOES_ON),
        *(Formal(Role.STATE, v, after=1 + k) for k, v in enumerate(states)),
    )


def _scan(node: Node, opset: int) -> tuple[Formal, ...] | None:
    count = node.attrs.get("num_scan_inputs")
    if opset < 9 or not isinstance(count, int):
        return None  # the first version has a batch axis and an input for lengths
    split = len(node.inputs) - count
    axes = _numbers(node.attrs.get("scan_input_axes"), count)
    directions = _numbers(node.attrs.get("scan_input_directions"), count)
    slices = zip(node.inputs[split:], axes, directions, strict=True)
    return (
        *(Formal(Role.STATE, v, after=k) for k, v in enumerate(node.inputs[:split])),
        *(Formal(Role.SLICE, v, axis, backwards=direction == 1) for v, axis, direction in slices),
    )


def _numbers(value: AttrValue | None, count: int) -> Sequence[int]:
    return [int(v) for v in value] if isinstance(value, tuple) and len(value) == count else [0] * count


BODIES: dict[str, Callable[[Node, int], tuple[Formal, ...] | None]] = {"If": _branch, "Loop": _loop, "Scan": _scan}
