"""Row blocks: a matrix product, the row program over its columns, and the product of its results (attention).

After stage B, in `full` mode. The one exception to the rule of one anchor: the scores between the two products never
leave the cache, because both work on the same rows (analysis/rowblock.py says when). For every group with row
reductions: the group of the product it reads, the group of the product that reads it, the views behind that, and what
only prepares operands (a split of heads, a scale) are joined if their union is a row block.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxfuse.analysis.rowblock import RowBlock, row_block
from onnxfuse.fuse.merge import Merger, Said
from onnxfuse.fuse.rules import Cluster, No
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute
from onnxfuse.ir.partition import Verdict

FUSED_ATTENTION = "FUSED_ATTENTION"
FUSED_ROW_TAIL = "FUSED_ROW_TAIL"
NF_ROW_BLOCK = "NF_ROW_BLOCK"
NF_ROW_TAIL = "NF_ROW_TAIL"


def join_row_blocks(m: Merger) -> None:
    """Join what runs by blocks of rows; `m` has finished its rounds."""
    if FUSED_ATTENTION not in m.config.skip:
        for rows in _row_programs(m):
            any(_attention(m, before, rows, after) for before, after in _neighbours(m, rows))
    if FUSED_ROW_TAIL not in m.config.skip:
        for rows in _row_programs(m):
            any(_tail_of(m, before, rows) for before in _before(m, rows))


def _row_programs(m: Merger) -> Iterator[Cluster]:
    for o in m.order.sorted():
        rows = m.clusters.get(o)
        if rows is not None and _row_program(rows):
            yield rows


def _neighbours(m: Merger, rows: Cluster) -> Iterator[tuple[Cluster, Cluster]]:
    """(group of a product that `rows` reads, group of a product that reads `rows`)."""
    after = _after(m, rows)
    for a in _before(m, rows):
        for b in after:
            if a is not b:
                yield a, b


def _before(m: Merger, rows: Cluster) -> list[Cluster]:
    """Groups of a product that `rows` reads."""
    makers = {m.home[p] for v in rows.reads if (p := m.known.producer.get(v)) is not None}
    return [c for o in m.order.sorted(makers) if _product(c := m.clusters[o])]


def _after(m: Merger, rows: Cluster) -> list[Cluster]:
    """Groups of a product that read `rows`."""
    readers = {m.home[r] for v in rows.makes for r in m.known.readers.get(v, ())}
    return [c for o in m.order.sorted(readers - {rows.id}) if _product(c := m.clusters[o])]


def _row_program(c: Cluster) -> bool:
    return c.reduces > 0 and not (c.opaque or c.pinned or c.anchors)


def _product(c: Cluster) -> bool:
    return c.anchors == 1 and c.reduces == 1 and not c.pinned and not c.opaque


def why_not(m: Merger, a: Cluster, b: Cluster) -> No | None:
    """Why `a` and `b`, which reads it, are not part of one row block; None if they are no part of any."""
    triples: list[list[Cluster]] = []
    tail = None
    if _product(a) and _row_program(b):
        triples = [[a, b, after] for after in _after(m, b) if after is not a]
        if FUSED_ROW_TAIL not in m.config.skip and _constant(m, a):
            tail = _no_tail(m, a, b)
    elif _row_program(a) and _product(b):
        triples = [[before, a, b] for before in _before(m, a) if before is not b]
    if tail is not None or FUSED_ATTENTION in m.config.skip:
        return tail
    found = [_no_attention(m, parts) for parts in triples]
    return found[-1] if found else None


def _attention(m: Merger, before: Cluster, rows: Cluster, after: Cluster) -> bool:
    """Join the three groups and what belongs to them, if they are a row block."""
    parts = [before, rows, after]
    if _no_attention(m, parts) is not None:
        return False
    links = _links(m, (before, rows), (rows, after))
    _join(m, _with_neighbours(m, parts))
    _record(m, links, FUSED_ATTENTION)
    return True


def _tail_of(m: Merger, before: Cluster, rows: Cluster) -> bool:
    """Join a product with constant weights and the row program over its columns, if the row is short enough."""
    if not _constant(m, before) or _no_tail(m, before, rows) is not None:
        return False
    links = _links(m, (before, rows))
    _join(m, [before, rows])
    _record(m, links, FUSED_ROW_TAIL)
    return True


def _no_tail(m: Merger, before: Cluster, rows: Cluster) -> No | None:
    """Why the row program over the columns of a product does not run with it."""
    return _long_row(m, _the_product(m, before)) or _judge(m, [before, rows])


def _constant(m: Merger, c: Cluster) -> bool:
    """The product of `c` has constant weights."""
    return any(v in m.consts for v in _the_product(m, c).reads)


def _the_product(m: Merger, c: Cluster) -> Compute:
    return next(x for x in m.computes(c.items) if x.reduce is not None)


def _long_row(m: Merger, product: Compute) -> No | None:
    """The columns of a block of rows must stay in cache, the weights are read once a block."""
    assert product.reduce is not None
    columns = product.out.tensor.shape[-1] if product.out.tensor.rank else 1
    depth = product.reduce.axes[-1].extent
    c = m.config
    for name, n, least, most in (("columns", columns, c.tail_least, c.tail_columns), ("depth", depth, 0, c.tail_depth)):
        if not isinstance(n, int) or not least <= n <= most:
            return No(NF_ROW_TAIL, (("what", name), ("size", str(n)), ("least", least), ("most", most)))
    return None


def _no_attention(m: Merger, parts: list[Cluster]) -> No | None:
    """Why the products and the row program between them are not one kernel."""
    heavy = (_many_weights(m, _the_product(m, c)) for c in parts if _product(c) and _constant(m, c))
    return next((no for no in heavy if no is not None), None) or _judge(m, parts)


def _many_weights(m: Merger, product: Compute) -> No | None:
    """Every block of rows reads all the weights: of a vocabulary, say, from memory, and every core for itself."""
    most = m.config.tail_columns * m.config.tail_depth
    for v in product.reads:
        if v in m.consts and isinstance(v.tensor.size, int) and v.tensor.size > most:
            return No(NF_ROW_TAIL, (("what", "weights"), ("size", str(v.tensor.size)), ("least", 0), ("most", most)))
    return None


def _join(m: Merger, parts: list[Cluster]) -> None:
    m.unite(c.id for c in parts)


def _with_neighbours(m: Merger, parts: list[Cluster]) -> list[Cluster]:
    """`parts` with the views behind them, and with groups that only prepare what they read."""
    tail = _tail(m, parts)
    if tail is not None and _judge(m, [*parts, tail]) is None:
        parts = [*parts, tail]
    grown = True
    while grown:
        grown = False
        for extra in _feeders(m, parts):
            if _judge(m, [*parts, extra]) is None:
                parts, grown = [*parts, extra], True
    return parts


def _tail(m: Merger, parts: list[Cluster]) -> Cluster | None:
    """The group that alone reads what `parts` write."""
    written = [v for c in parts for v in c.makes if _needed(m, v, parts)]
    homes = {m.home[r] for v in written for r in m.known.readers.get(v, ())} - {c.id for c in parts}
    if len(written) != 1 or written[0] in m.known.needed or len(homes) != 1:
        return None
    tail = m.clusters[homes.pop()]
    return None if tail.opaque or tail.pinned or tail.anchors or tail.reduces else tail


def _feeders(m: Merger, parts: list[Cluster]) -> list[Cluster]:
    """Groups without reductions whose results only `parts` read."""
    makes = {v for c in parts for v in c.makes}
    reads = {v for c in parts for v in c.reads} - makes
    homes = {m.home[p] for v in reads if (p := m.known.producer.get(v)) is not None}
    found = [m.clusters[o] for o in sorted(homes, key=m.order.place.__getitem__, reverse=True)]
    plain = [c for c in found if not (c.opaque or c.pinned or c.anchors or c.reduces)]
    return [c for c in plain if not any(_needed(m, v, [*parts, c]) for v in c.makes)]


def _needed(m: Merger, v: Value, parts: list[Cluster]) -> bool:
    """`v` is needed outside of `parts`."""
    inside = {c.id for c in parts}
    return v in m.known.needed or any(m.home[r] not in inside for r in m.known.readers.get(v, ()))


def _judge(m: Merger, parts: list[Cluster]) -> No | None:
    """Why the union of `parts` is not one kernel."""
    skip = m.config.skip
    items = sorted(i for c in parts for i in c.items)
    cap = m.config.max_nodes + 1
    if len(items) > cap and "NF_NODE_CAP" not in skip:
        return No("NF_NODE_CAP", (("nodes", "+".join(str(len(c.items)) for c in parts)), ("cap", cap)))
    members = m.computes(items)
    made = {c.out for c in members}
    inputs = len({v for c in parts for v in c.reads} - made)
    if inputs > m.config.max_inputs and "NF_IO_CAP" not in skip:
        return No("NF_IO_CAP", (("inputs", inputs), ("cap", m.config.max_inputs)))
    writes = [c.out for c in members if _needed(m, c.out, parts)]
    found = row_block(members, writes, m.loads)
    if not isinstance(found, RowBlock):
        return No(NF_ROW_BLOCK, (("why", found.why),))
    known = sum(n for _, n in found.rows.buffers if isinstance(n, int))
    if known > m.config.local_budget and "NF_LOCAL_BUFFER" not in skip:
        return No("NF_LOCAL_BUFFER", (("bytes", known), ("budget", m.config.local_budget)))
    back = m.order.between({c.id for c in parts}, m.config.cycle_window)
    return None if back is None else m.cyclic(back)


def _links(m: Merger, *pairs: tuple[Cluster, Cluster]) -> list[tuple[Value, int]]:
    """(value, reader) over which each pair of groups meets: those that have been judged before, or else the first."""
    out: list[tuple[Value, int]] = []
    for a, b in pairs:
        inside = set(b.items)
        shared = sorted(a.exits & b.reads, key=m.known.producer.__getitem__)
        every = [(v, r) for v in shared for r in m.known.readers[v] if r in inside]
        out += [link for link in every if link in m.records] or every[:1]
    return out


def _record(m: Merger, links: list[tuple[Value, int]], code: str) -> None:
    for v, reader in links:
        m.records[v, reader] = Said(Verdict.FUSED, code)
