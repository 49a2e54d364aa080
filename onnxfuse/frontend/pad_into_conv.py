"""Zero padding becomes the pads of the convolution that reads it. Graph -> Graph.

    Conv(Pad(x, p), pads=q) = Conv(x, pads=p + q)        p >= 0, spatial dimensions only, constant mode, value 0

The padded copy is only a copy: the convolution skips what lies outside. Applies to every reader separately; the Pad
goes when no reader is left. Values stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxfuse.ir.expr import Expr, Lit
from onnxfuse.ir.graph import AttrValue, Graph, Node, Value
from onnxfuse.ops.dsl import Known

Facts = Mapping[Value, Known]


def pad_into_conv(graph: Graph, facts: Facts) -> Graph:
    """Move every such padding (see the module docstring)."""
    makers = graph.producers()
    new: dict[Node, Node] = {}
    for conv in graph.nodes:
        if conv.op.domain or conv.op.name != "Conv" or conv.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
            continue
        x = conv.inputs[0]
        pad = None if x is None else makers.get(x)
        amounts = None if pad is None else _amounts(pad, facts)
        if pad is None or amounts is None:
            continue
        own = conv.attrs.get("pads") or (0,) * len(amounts)
        if not isinstance(own, tuple) or len(own) != len(amounts):
            continue
        pads = tuple(a + b for a, b in zip(_whole(own), amounts, strict=True))
        origin = tuple(dict.fromkeys((*pad.origin, *conv.origin)))
        inputs = (pad.inputs[0], *conv.inputs[1:])
        new[conv] = replace(conv, inputs=inputs, attrs={**conv.attrs, "pads": pads}, origin=origin, source=None)
    if not new:
        return graph
    return replace(graph, nodes=tuple(new.get(n, n) for n in graph.nodes))


def _amounts(pad: Node, facts: Facts) -> tuple[int, ...] | None:
    """Spatial padding of a Pad node as Conv spells it; None when it is anything but zeros around the image."""
    x = pad.inputs[0] if pad.inputs else None
    if pad.op.domain or pad.op.name != "Pad" or x is None or x.type is None or x.type.rank < 3:
        return None
    if pad.attrs.get("mode", "constant") != "constant" or len(pad.inputs) > 3:
        return None
    pads = pad.attrs.get("pads") if len(pad.inputs) == 1 else _ints(pad.inputs[1], facts)
    value = pad.attrs.get("value", 0.0) if len(pad.inputs) < 3 else _zero(pad.inputs[2], facts)
    if not isinstance(pads, tuple) or value != 0 or len(pads) != 2 * x.type.rank:
        return None
    amounts = _whole(pads)
    rank = x.type.rank
    if min(amounts) < 0 or any(amounts[k] or amounts[rank + k] for k in (0, 1)):
        return None
    return (*amounts[2:rank], *amounts[rank + 2 :])


def _whole(numbers: AttrValue) -> tuple[int, ...]:
    return tuple(n for n in numbers if isinstance(n, int)) if isinstance(numbers, tuple) else ()


def _ints(v: Value | None, facts: Facts) -> tuple[int, ...] | None:
    known = None if v is None else facts.get(v)
    if known is None or not all(isinstance(e, Lit) for e in known.flat):
        return None
    return tuple(int(e.value) for e in known.flat)


def _zero(v: Value | None, facts: Facts) -> float | None:
    """The padding value: 0 when absent, None when it is not known."""
    if v is None:
        return 0.0
    known = facts.get(v)
    first: Expr | None = None if known is None or known.size != 1 else known.flat[0]
    return float(first.value) if isinstance(first, Lit) else None
