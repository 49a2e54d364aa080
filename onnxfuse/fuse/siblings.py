"""SIBLINGS: the conditions under which stage C joins two groups that read the same value and not each other.

What one of them loads the other need not load again: sum and sum of squares, maximum and minimum, several pointwise
chains on one input. The joined group writes several values. Its loops are found as for every row program, only that
here axes are the same when both sides index a dimension of the same value by their bare variables (analysis/rows.py).

Same form as RULES (rules.py); NF_CYCLE and NF_CYCLE_BUDGET come after these, in order.py.
"""

from __future__ import annotations

from onnxfuse.errors import Refusal
from onnxfuse.fuse.rules import Cluster, No, Pair, Rule, io_cap, local_buffer, parallel_rows, pinned, reduce_cap
from onnxfuse.ir.graph import Value


def no_anchors(p: Pair) -> No | None:
    """A contraction or window has loops of its own."""
    return No("NF_KIND", (("kind", "anchor"),)) if p.a.anchors or p.b.anchors else None


def same_map(p: Pair) -> No | None:
    """What both read must be read alike: element by element, not a part of it or at another place."""
    least = p.config.min_saved_bytes
    alike = sum(map(p.nbytes, p.common & _plain(p, p.a) & _plain(p, p.b))) if p.common else 0
    if alike >= least:
        return None
    shared = sum(p.nbytes(v) for v in p.common)
    if shared < least:
        return No("NF_NO_SHARED_DATA", (("saved", shared), ("least", least)))
    return No("NF_INDEX_MISMATCH", (("alike", alike), ("shared", shared), ("least", least)))


def _plain(p: Pair, side: Cluster) -> frozenset[Value]:
    """What some member of one side reads by bare variables."""
    if side.plain is None:
        side.plain = frozenset([v for c in p.computes(side.items) for v in p.forms.barely_read(c)])
    return side.plain


def node_cap(p: Pair) -> No | None:
    """Siblings share data, not results: fewer nodes are worth it."""
    nodes = len(p.a.items) + len(p.b.items)
    if nodes > p.config.max_sibling_nodes:
        return No("NF_NODE_CAP", (("nodes", f"{len(p.a.items)}+{len(p.b.items)}"), ("cap", p.config.max_sibling_nodes)))
    return None


def span(p: Pair) -> No | None:
    """Far apart in the order: joined, the results of one would wait long for their readers."""
    if p.span > p.config.span:
        return No("NF_SPAN", (("span", p.span), ("most", p.config.span)))
    return None


def peak_memory(p: Pair) -> No | None:
    """All outputs of both exist at once."""
    out = sum(p.nbytes(v) for v in p.a.exits | p.b.exits)
    if out > p.config.peak_memory:
        return No("NF_PEAK_MEMORY", (("bytes", out), ("most", p.config.peak_memory)))
    return None


def same_loops(p: Pair) -> No | None:
    """Executable row by row, with the same outer loops (codes of analysis/rows.py)."""
    found = p.rows
    return No(found.code, (("why", found.why),)) if isinstance(found, Refusal) else None


SIBLINGS: tuple[Rule, ...] = (
    Rule(pinned, ("NF_PINNED",), needed=True),
    Rule(no_anchors, ("NF_KIND",), needed=True),
    Rule(same_map, ("NF_NO_SHARED_DATA", "NF_INDEX_MISMATCH")),
    Rule(node_cap, ("NF_NODE_CAP",)),
    Rule(reduce_cap, ("NF_TOO_MANY_REDUCES",)),
    Rule(io_cap, ("NF_IO_CAP",)),
    Rule(span, ("NF_SPAN",)),
    Rule(peak_memory, ("NF_PEAK_MEMORY",)),
    Rule(
        same_loops,
        ("NF_GROUP_MERGE", "NF_AXES_CONFLICT", "NF_NOT_ROW_LOCAL", "NF_VIEW_LEVEL", "NF_RECOMPUTE"),
        needed=True,
    ),
    Rule(local_buffer, ("NF_LOCAL_BUFFER",)),
    Rule(parallel_rows, ("NF_COST",)),
)
