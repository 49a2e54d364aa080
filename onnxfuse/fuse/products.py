"""Stage C: products of one value with different constant weights run in one kernel (query, key and value of attention).

After stage B and the row blocks, in `full` mode. Each keeps its own weights and result; together they are one call
whose tasks fill every core. Joined are groups of one product each, of equal shape, that read the same value, each with
a constant other factor; neither may need the other, and neither is a window (a convolution larger than 1x1).
"""

from __future__ import annotations

from onnxfuse.analysis.kinds import same_extent
from onnxfuse.analysis.maps import inline_loads
from onnxfuse.analysis.rowblock import is_product
from onnxfuse.fuse.merge import NF_CYCLE, Merger, Said
from onnxfuse.fuse.rules import Cluster, No
from onnxfuse.ir.expr import Expr, loads
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.partition import Verdict
from onnxfuse.ir.types import Dim

FUSED_PRODUCTS = "FUSED_PRODUCTS"
NF_SPAN = "NF_SPAN"


def join_products(m: Merger) -> None:
    """Join products of the same value; `m` has finished everything vertical."""
    if FUSED_PRODUCTS in m.config.skip:
        return
    found: dict[Value, list[tuple[Cluster, Compute]]] = {}
    for o in m.order.sorted():
        c = m.clusters[o]
        read = _read_value(m, c.items) if c.anchors == 1 and c.reduces == 1 and not c.pinned else None
        if read is not None:
            found.setdefault(read[0], []).append((c, read[1]))
    for readers in found.values():
        _join_readers(m, readers)


def why_not(m: Merger, a: Cluster, b: Cluster) -> No | None:
    """Why two groups of products of one value are not one group; None if they are none such."""
    if FUSED_PRODUCTS in m.config.skip or not (a.anchors and b.anchors) or a.pinned or b.pinned:
        return None
    one, two = _products(m, a), _products(m, b)
    if not one or not two or len({v for v, _ in one + two}) > 1:
        return None
    shapes = [c.out.tensor.shape for _, c in one + two]
    return _judge(m, a, b) if all(_alike(shapes[0], s) for s in shapes) else None


def _products(m: Merger, c: Cluster) -> list[tuple[Value, Compute]]:
    """`_read_value` of every part of a group, by parts that do not read each other; [] if one is no such product."""
    part: dict[int, list[int]] = {}
    for i in c.items:
        made = (m.known.producer.get(v) for v in m.computes([i])[0].reads)
        mine = [i]
        for other in {id(part[p]): part[p] for p in made if p in part}.values():
            mine = sorted(mine + other)
        part.update(dict.fromkeys(mine, mine))
    try:
        found = [_read_value(m, items) for items in {id(p): p for p in part.values()}.values()]
    except OverflowError:  # operands that would be written out too often
        return []
    return [f for f in found if f is not None] if None not in found else []


def _join_readers(m: Merger, readers: list[tuple[Cluster, Compute]]) -> None:
    """The first reader with every later one that fits, then the same with those that are left."""
    while len(readers) > 1:
        (first, product), *others = readers
        left = []
        for other, another in others:
            if not _alike(product.out.tensor.shape, another.out.tensor.shape):
                left.append((other, another))
                continue
            no = _judge(m, first, other)
            a, b = m.known.producer[product.out], m.known.producer[another.out]
            if no is None:
                m.sibling_records[a, b] = Said(Verdict.FUSED, FUSED_PRODUCTS)
                first = m.clusters[m.unite((first.id, other.id))]
            else:
                m.sibling_records[a, b] = Said(Verdict.REFUSED, no.code, no.numbers)
                left.append((other, another))
        readers = left


def _alike(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    return len(a) == len(b) and all(map(same_extent, a, b))


def _read_value(m: Merger, items: list[int]) -> tuple[Value, Compute] | None:
    """(the one value that is no constant among the product's factors, the product) of members with one product."""
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    members = m.computes(items)
    reduces = [x for x in members if x.reduce is not None]
    last = members[-1]
    if len(reduces) != 1:
        return None
    (product,) = reduces
    if not is_product(product) or _window(product) or not _alike(last.out.tensor.shape, product.out.tensor.shape):
        return None
    inner = (x.out for x in members if x is not last)
    if any(v in m.known.needed or any(r not in items for r in m.known.readers.get(v, ())) for v in inner):
        return None
    for x in members:
        if x is product:
            break
        bodies[x.out] = (x.axes, inline_loads(x.body, bodies))
    sources = {ld.source for ld in loads(inline_loads(product.body, bodies))}
    free = [v for v in sources if v not in m.consts]
    return (free[0], product) if len(free) == 1 and len(sources) == 2 else None


def _window(product: Compute) -> bool:
    """It sums over taps of a window: alone it may have a kernel of another kind (Winograd), together it has not."""
    return product.reduce is not None and sum(a.extent != 1 for a in product.reduce.axes) > 1


def _judge(m: Merger, a: Cluster, b: Cluster) -> No | None:
    """Why two products do not run together."""
    skip = m.config.skip
    span = m.order.span(a.id, b.id)
    if span > m.config.span and NF_SPAN not in skip:
        return No(NF_SPAN, (("span", span), ("most", m.config.span)))
    nodes, cap = len(a.items) + len(b.items), m.config.max_nodes + 1
    if nodes > cap and "NF_NODE_CAP" not in skip:
        return No("NF_NODE_CAP", (("nodes", f"{len(a.items)}+{len(b.items)}"), ("cap", cap)))
    inputs, outputs = len((a.reads | b.reads) - a.makes - b.makes), a.anchors + b.anchors
    if inputs > m.config.max_inputs and "NF_IO_CAP" not in skip:
        return No("NF_IO_CAP", (("inputs", inputs), ("cap", m.config.max_inputs)))
    if outputs > m.config.max_outputs and "NF_IO_CAP" not in skip:
        return No("NF_IO_CAP", (("outputs", outputs), ("cap", m.config.max_outputs)))
    first, second = sorted((a, b), key=lambda c: m.order.place[c.id])
    reached = m.reach(first.id, second.id)
    if isinstance(reached, No):
        return reached
    if second.id in m.order.succ[first.id]:
        return No(NF_CYCLE, (("through", m.known.name(second.items[-1])),))
    return None
