"""RULES: the conditions under which stage B joins two groups, in order; the first refusal is the recorded one.

Each rule looks at a `Pair` (producer group a, consumer group b) and returns None or a `No` with a stable code and
numbers. They stand cheap before dear. A rule whose code is in `config.skip` is not asked; rules marked `needed` decide
whether the joined group can be executed at all and are always asked.

What RULES accepts is pointwise with one or several outputs, a row program (analysis/rows.py), or an anchor group with
views of its operands, or a few steps on one of them, in front; what PLACED accepts, an anchor group with views behind
it that become its order of storing. The acyclicity test (NF_CYCLE, NF_CYCLE_BUDGET) comes after all of these
(order.py), because it needs the order of all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from onnxfuse.analysis.footing import Footing, Link, at_one_point, bent, joined
from onnxfuse.analysis.kinds import factors
from onnxfuse.analysis.maps import AFFINE, inline_loads, level, offset
from onnxfuse.analysis.placement import placement
from onnxfuse.analysis.row_forms import RowForms
from onnxfuse.analysis.rows import RowMap
from onnxfuse.analysis.traffic import sample, stream_cost
from onnxfuse.config import FusionConfig
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Apply, Expr, Lit, Load, Var, axes_of, i64, loads, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.partition import Number

# One kernel launch less, as bytes of memory traffic: about 1 us (dispatch of a custom node) at 16 GB/s. So a direct
# link always saves something, however small the tensor; FUSION.md 4.D.
LAUNCH_BYTES = 16 * 1024
# Pointwise work in a group without any parallel row (a full reduction joined to its consumers): above this many
# elements the loss of parallelism costs more than the traffic. Starting value.
SERIAL_POINTS = 64 * 1024


T = TypeVar("T")
Owner = TypeVar("Owner")


class once(Generic[Owner, T]):  # noqa: N801
    """A property that is worked out when first asked for (functools.cached_property takes a lock for that)."""

    def __init__(self, make: Callable[[Owner], T]) -> None:
        self.make = make

    def __get__(self, owner: Owner, kind: type[Owner]) -> T:
        found = owner.__dict__[self.make.__name__] = self.make(owner)
        return found


@dataclass(frozen=True, slots=True)
class No:
    """A refusal with its numbers."""

    code: str
    numbers: tuple[tuple[str, Number], ...] = ()


@dataclass(slots=True, eq=False)
class Cluster:
    """A group under construction.

    items    item numbers, in order
    reads    values from outside
    makes    values of the members; `exits` those needed outside
    flat     every member reads members at its own point: joining needs no look at axes
    version  rises with every change
    """

    id: int
    items: list[int]
    reads: set[Value]
    makes: set[Value]
    exits: set[Value]
    reduces: int
    anchors: int
    opaque: bool
    pinned: bool
    flat: bool
    version: int = 0
    plain: frozenset[Value] | None = None  # values from outside read by bare variables; None: not asked yet
    siblings: bool = False  # some members do not depend on each other (stage C)
    footing: Footing | Refusal | None = None  # how it stands on rows alone; None: not asked yet


@dataclass(eq=False)
class Pair:
    """Two groups, `b` reading `shared` of `a` (stage C: nothing), and what rules ask about them (computed once)."""

    a: Cluster
    b: Cluster
    config: FusionConfig
    computes: Callable[[list[int]], list[Compute]]
    leaves: Callable[[Value, Cluster, Cluster], bool]  # still read outside both
    nbytes: Callable[[Value], int]
    loads: Callable[[Compute], list[Load]]
    forms: RowForms
    shared: tuple[Value, ...] = ()
    span: int = 0  # how far apart they stand in the order of groups

    @once
    def members(self) -> list[Compute]:
        return self.computes(sorted(self.a.items + self.b.items))

    @once
    def writes(self) -> list[Value]:
        a, b = self.a, self.b
        return [v for v in (*a.exits, *b.exits) if self.leaves(v, a, b)]

    @once
    def saved(self) -> int:
        """Bytes of traffic saved: the read of every shared value, its write if nobody else needs it, a launch."""
        links = sum(self.nbytes(v) * (1 if self.leaves(v, self.a, self.b) else 2) for v in self.shared)
        return LAUNCH_BYTES + links + sum(self.nbytes(v) for v in self.common)

    @once
    def common(self) -> set[Value]:
        """Values from outside that both read."""
        return self.a.reads & self.b.reads

    @once
    def rows(self) -> RowMap | Refusal:
        """The row map of both together, from all members."""
        return self.forms.rows(self.members, self.writes)

    @once
    def footing(self) -> Footing | Refusal:
        """How both together stand on rows: from the reads between them, or else from all members."""
        return self.forms.footing(self.members, self.writes, self._found)

    def _found(self) -> Footing | None:
        """By the reads between the two; None when those do not tell."""
        if not self.shared or self.a.siblings or self.b.siblings:
            return None  # what ties siblings depends on all of them
        if any(map(bent, self.links)):
            return None
        a, b = self._alone(self.a), self._alone(self.b)
        return None if isinstance(a, Refusal) or isinstance(b, Refusal) else joined(a, b, self.links)

    def _alone(self, c: Cluster) -> Footing | Refusal:
        if c.footing is None:
            members = self.computes(c.items)
            if c.flat or len(members) == 1:
                c.footing = at_one_point(members)
                c.footing.row_bytes(lambda: members)
            else:
                c.footing = self.forms.footing(members, c.exits)
        return c.footing

    @once
    def links(self) -> list[Link]:
        """Reads from `a` into `b`."""
        made = {c.out: c for c in self.computes(self.a.items)}
        wanted = set(self.shared)
        readers = self.computes(self.b.items)
        return [Link(c, ld, made[ld.source]) for c in readers for ld in self.loads(c) if ld.source in wanted]


def pinned(p: Pair) -> No | None:
    """The user keeps one of the nodes alone."""
    return No("NF_PINNED") if p.a.pinned or p.b.pinned else None


def opaque(p: Pair) -> No | None:
    """One side stays with onnxruntime."""
    return No("NF_OPAQUE") if p.a.opaque or p.b.opaque else None


def shared_data(p: Pair) -> No | None:
    """Joining must save memory traffic."""
    if p.config.min_saved_bytes > LAUNCH_BYTES and p.saved < p.config.min_saved_bytes:
        return No("NF_NO_SHARED_DATA", (("saved", p.saved), ("least", p.config.min_saved_bytes)))
    return None


def node_cap(p: Pair) -> No | None:
    """Too many atomic nodes in one kernel."""
    nodes = len(p.a.items) + len(p.b.items)
    cap = p.config.max_nodes + (p.a.anchors or p.b.anchors)
    if nodes > cap:
        return No("NF_NODE_CAP", (("nodes", f"{len(p.a.items)}+{len(p.b.items)}"), ("cap", cap)))
    return None


def reduce_cap(p: Pair) -> No | None:
    """Too many reductions in one kernel."""
    count = p.a.reduces + p.b.reduces
    if count > p.config.max_reduces:
        return No("NF_TOO_MANY_REDUCES", (("reduces", count), ("cap", p.config.max_reduces)))
    return None


def kinds(p: Pair) -> No | None:
    """An anchor takes its epilogue in stage A, and nothing that reduces comes before it."""
    if p.a.anchors:
        return No("NF_TWO_ANCHORS") if p.b.anchors else No("NF_KIND", (("producer", "anchor"),))
    return No("NF_PROLOGUE", (("why", "not a view"),)) if p.b.anchors and p.a.reduces else None


def prologue(p: Pair) -> No | None:
    """Before an anchor only views of a contraction's operand, or cheap steps on it."""
    why = no_prologue(p) if p.b.anchors else None
    return None if why is None else No("NF_PROLOGUE", (("why", why),))


def no_prologue(p: Pair) -> str | None:
    """Why packing an operand of `b` cannot do `a` on the way: a transpose, a slice, a few pointwise steps."""
    members = p.computes(p.a.items)
    if any(p.leaves(v, p.a, p.b) for v in p.a.makes):
        return "used elsewhere"
    both = [*members, *p.computes(p.b.items)]
    return p.forms.forms.once((no_prologue, len(members)), both, (), lambda: _no_prologue(p, members))


def _no_prologue(p: Pair, members: Sequence[Compute]) -> str | None:
    if p.b.reduces != 1:
        return "not a plain contraction"
    (anchor,) = (c for c in p.computes(p.b.items) if c.reduce is not None)
    assert anchor.reduce is not None
    if any(v in p.a.makes for c in p.computes(p.b.items) if c is not anchor for v in c.reads):
        return "read by the epilogue"
    operands = factors(anchor.body) if anchor.reduce.combine.name == "add" else ()
    window = not all(isinstance(e, Load) and _bare(e) for e in operands)
    if len(operands) != 2 or (window and not _strided(anchor, operands)):
        return "not a plain contraction"
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    for c in members:
        bodies[c.out] = (c.axes, inline_loads(c.body, bodies))
    axes = (*anchor.axes, *anchor.reduce.axes)
    composed = [inline_loads(_within(e), bodies) for e in operands]
    if window and not all(isinstance(e, Load) for e in composed):
        return "not a view, and the product sums over a window"
    if not all(level(e, axes) <= AFFINE for operand in composed for e in loads(operand)):
        return "the composed index is not affine"
    return next((why for e in composed if not isinstance(e, Load) and (why := _no_stream(e, anchor, p.config))), None)


def _no_stream(operand: Expr, anchor: Compute, config: FusionConfig) -> str | None:
    """Why a tile of the product cannot work out this operand as it reads it: cheap, and along contiguous columns."""
    assert anchor.reduce is not None
    outer = [a for a in anchor.axes if a.extent != 1]
    if sum(a.extent != 1 for a in anchor.reduce.axes) != 1 or not outer:
        return "not a view, and the product sums over a window"
    columns = outer[-1]
    cost = stream_cost(operand, columns)
    if cost is None or cost > config.prologue_cost:
        return "not a view, nor cheap"
    rows = prod(a.extent for a in set(outer) - axes_of(operand) if isinstance(a.extent, int))
    along = [ld for ld in loads(operand) if columns in axes_of(ld)]
    if not along or any(columns in axes_of(ix) for ld in along for ix in ld.index[:-1]):
        return "not a view, and not along the columns of the product"
    if any(ld.index[-1] is not var(columns) for ld in along):
        return "not a view, and not along the columns of the product"
    least = config.prologue_rows if cost else config.join_rows
    return None if rows >= least else "not a view, for few rows of the product"


def placed(p: Pair) -> No | None:
    """Views behind a plain contraction: it may store where they would copy to."""
    why = no_view_epilogue(p)
    return None if why is None else No("NF_KIND", (("producer", "anchor"), ("why", why)))


def no_view_epilogue(p: Pair) -> str | None:
    """Why `b` is not a transpose, split or join of dimensions that `a` can do as it stores."""
    views = p.computes(p.b.items)
    if p.b.anchors or any(c.reduce is not None or not isinstance(c.body, Load) for c in views):
        return "not a view"
    if p.writes != [views[-1].out] or len(p.shared) != 1:
        return "used elsewhere"
    if p.a.reduces != 1:
        return "not a plain contraction"
    made = {c.out: c for c in p.computes(p.a.items)}
    anchor = next(c for c in made.values() if c.reduce is not None)
    assert anchor.reduce is not None
    operands = factors(anchor.body) if anchor.reduce.combine.name == "add" else ()
    if len(operands) != 2 or not all(isinstance(e, Load) and _bare(e) for e in operands):
        return "not a plain contraction"
    chain = [p.shared[0], *(c.out for c in views)]
    if any(c.body.source is not v for c, v in zip(views, chain, strict=False) if isinstance(c.body, Load)):
        return "not one view after another"
    bodies: dict[Value, tuple[tuple[Axis, ...], Expr]] = {}
    for c in views:
        bodies[c.out] = (c.axes, inline_loads(c.body, bodies))
    last, read = views[-1], bodies[views[-1].out][1]
    if not isinstance(read, Load) or placement(read.index, last.axes, made[p.shared[0]].axes) is None:
        return "not another order of the same points"
    here = tuple(var(a) if a.extent != 1 else i64(0) for a in last.axes)
    if offset(read.index, p.shared[0].tensor.shape) is offset(here, last.out.tensor.shape):
        return "only renames memory"
    return None


def _within(e: Expr) -> Expr:
    """The load under the guard of a padded window."""
    guarded = isinstance(e, Apply) and e.prim.name == "where" and isinstance(e.args[2], Lit)
    return e.args[1] if isinstance(e, Apply) and guarded else e


def _strided(anchor: Compute, operands: Sequence[Expr]) -> bool:
    """A strided convolution of several features: whatever the order of its operand, it is packed as a product.

    Others may have a kernel of another kind (Winograd, depthwise) that reads planes.
    """
    read = [e for e in map(_within, operands) if isinstance(e, Load)]
    moving = [e for e in read if not _bare(e)]
    if len(read) != 2 or len(moving) != 1:
        return False
    features = any(a.extent != 1 and a not in axes_of(moving[0]) for a in anchor.axes)
    scaled = (e for e in walk(*moving[0].index) if isinstance(e, Apply) and e.prim.name == "mul")
    return features and any(a in axes_of(e) for e in scaled for a in anchor.axes)


def _bare(ld: Load) -> bool:
    return all(isinstance(ix, (Var, Lit)) for ix in ld.index)


def io_cap(p: Pair) -> No | None:
    """Too many tensors go in or out; a group that already was beyond the cap may still grow inwards."""
    a, b, config = p.a, p.b, p.config
    if len(a.reads) + len(b.reads) > config.max_inputs:
        inputs = len(a.reads) + len(b.reads - a.reads - a.makes)  # what comes first reads nothing of the other
        if inputs > config.max_inputs and inputs > max(len(a.reads), len(b.reads)):
            return No("NF_IO_CAP", (("inputs", inputs), ("cap", config.max_inputs)))
    if len(a.exits) + len(b.exits) > config.max_outputs and len(p.writes) > config.max_outputs:
        return No("NF_IO_CAP", (("outputs", len(p.writes)), ("cap", config.max_outputs)))
    return None


def row_program(p: Pair) -> No | None:
    """Without an anchor the joined group must be executable row by row (codes of analysis/rows.py)."""
    if p.b.anchors or (p.a.flat and p.b.flat):
        return None
    found = p.footing
    return No(found.code, (("why", found.why),)) if isinstance(found, Refusal) else None


def local_buffer(p: Pair) -> No | None:
    """What later stages need of one row must stay in cache. A row of unknown length is let through."""
    if p.b.anchors or (p.a.flat and p.b.flat):
        return None
    assert isinstance(p.footing, Footing)
    if p.footing.row_bytes(lambda: p.members) <= p.config.local_budget:
        return None
    assert isinstance(p.rows, RowMap), "what is joined by its footing stands on rows"
    known = sum(n for _, n in p.rows.buffers if isinstance(n, int))
    if known > p.config.local_budget:
        return No("NF_LOCAL_BUFFER", (("bytes", known), ("budget", p.config.local_budget)))
    return None


def parallel_rows(p: Pair) -> No | None:
    """Large pointwise work must not be pulled into a group that has a single row."""
    if p.b.anchors or (p.a.flat and p.b.flat):
        return None
    assert isinstance(p.footing, Footing)
    if p.footing.outer:
        return None
    wide = max((_points(c, p.footing.axis_of) for c in p.members if c.reduce is None), default=0)
    if wide > SERIAL_POINTS:
        return No("NF_COST", (("rows", 1), ("elements", wide), ("most", SERIAL_POINTS)))
    return None


def _points(c: Compute, axis_of: Mapping[Axis, Axis]) -> int:
    return prod(sample(a.extent) for a in c.axes if a not in axis_of)


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition, the codes it can give, and whether it may be switched off."""

    check: Callable[[Pair], No | None]
    codes: tuple[str, ...]
    needed: bool = False


RULES: tuple[Rule, ...] = (
    Rule(opaque, ("NF_OPAQUE",), needed=True),
    Rule(pinned, ("NF_PINNED",), needed=True),
    Rule(kinds, ("NF_TWO_ANCHORS", "NF_KIND", "NF_PROLOGUE"), needed=True),
    Rule(shared_data, ("NF_NO_SHARED_DATA",)),
    Rule(node_cap, ("NF_NODE_CAP",)),
    Rule(reduce_cap, ("NF_TOO_MANY_REDUCES",)),
    Rule(prologue, ("NF_PROLOGUE",), needed=True),
    Rule(io_cap, ("NF_IO_CAP",)),
    Rule(
        row_program,
        ("NF_GROUP_MERGE", "NF_AXES_CONFLICT", "NF_NOT_ROW_LOCAL", "NF_VIEW_LEVEL", "NF_RECOMPUTE"),
        needed=True,
    ),
    Rule(local_buffer, ("NF_LOCAL_BUFFER",)),
    Rule(parallel_rows, ("NF_COST",)),
)


# Asked of an anchor's group and a group of views behind it, once nothing else wants the views.
PLACED: tuple[Rule, ...] = (
    Rule(pinned, ("NF_PINNED",), needed=True),
    Rule(node_cap, ("NF_NODE_CAP",)),
    Rule(placed, ("NF_KIND",), needed=True),
)


def first_refusal(p: Pair, rules: tuple[Rule, ...] = RULES) -> No | None:
    """The first rule that says no."""
    for rule in rules:
        try:
            no = rule.check(p)
        except OverflowError as error:  # what the two compute would be written out too often
            no = No("NF_RECOMPUTE", (("why", str(error)),))
        if no is not None and (rule.needed or no.code not in p.config.skip):
            return no
    return None
