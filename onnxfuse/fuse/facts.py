"""The LoopGraph as numbers: what both stages of the fusion need to know about items, read off once.

Items are numbered in topological order; item i makes the values of `results(items[i])`. Dead Computes (no way to an
output or to a node that stays) are left out before, so that every item has a reason to exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from onnxfuse.analysis.forms import Formed, Forms
from onnxfuse.analysis.kinds import kind_in_tvm, kinds
from onnxfuse.analysis.rows import EXPENSIVE
from onnxfuse.analysis.traffic import dearest, points, sample, size
from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse.group import INJECTIVE, OPAQUE, RECOMPUTE
from onnxfuse.ir.expr import Apply, Load, axes_of, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Compute, Item, LoopGraph, Opaque, results
from onnxfuse.ir.op import Kind

# Extra evaluations of an expensive primitive from which a separate kernel is cheaper: a launch is about 1 us, some
# thousand vectorised exponentials. Starting value.
REPEATS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Parallel lists over items.

    node     kind of every Compute, None for a node that stays
    kind     its level (in tvm mode: what TVM would say); a node that stays, or a pinned Compute (user's --keep),
             counts as opaque
    succ     consumers, each once, in order; `label` the level of the edge to each
    extern   makes a graph output or a value captured by a subgraph
    flat     no reduction, and reads every value made here at its own point (or reads none)
    readers  of every value made here: the items that read it, in order
    loads    loads of every Compute, by its value
    inputs   numbers of the values every Compute loads: of its item if a Compute makes it, else beyond all items
    needed   values that must exist under their own name whatever is fused: graph outputs, captured values
    forms    has met every Compute
    """

    items: tuple[Item, ...]
    node: list[Kind | None]
    kind: list[int]
    succ: list[list[int]]
    label: list[list[int]]
    extern: list[bool]
    pinned: list[bool]
    flat: list[bool]
    producer: dict[Value, int]
    readers: dict[Value, list[int]]
    loads: dict[Value, list[Load]]
    inputs: list[tuple[int, ...]]
    needed: frozenset[Value]
    forms: Forms

    def reads(self, c: Compute) -> Iterable[Value]:
        """Values a Compute reads, in order of first use."""
        return [ld.source for ld in self.loads[c.out]]

    def name(self, i: int) -> str:
        """Value name of a Compute, node name (or first output) of a node that stays."""
        item = self.items[i]
        if isinstance(item, Compute):
            return item.out.name
        made = item.node.results
        return made[0].name if made else item.node.name


class _OfForm:
    """What is the same for every Compute of a form."""

    def __init__(self, c: Compute, formed: Formed, in_tvm: bool) -> None:
        found = kinds(c, formed.loads)
        self.node = found.node
        self.edges = [found.edges[v] for v in formed.sources]
        self.level = (kind_in_tvm(c, found.node, formed.loads) if in_tvm else found.node).level
        self.levels = [e.level for e in self.edges]
        self.pointwise = c.reduce is None
        self.plain = self.pointwise and all(e is Kind.ELEMWISE for e in self.edges)
        self.dear = self.pointwise and dearest(c.body) >= EXPENSIVE
        self._repeats: dict[int, bool] = {}

    def repeats(self, c: Compute, k: int, formed: Formed) -> bool:
        """`repeats` of the source with this number."""
        if k not in self._repeats:
            self._repeats[k] = repeats(c, formed.sources[k], formed.loads)
        return self._repeats[k]


def facts(loops: LoopGraph, config: FusionConfig) -> Facts:
    """Number the live items of `loops` and classify their edges."""
    forms = Forms()
    items, loads = live_items(loops, forms)
    needed = frozenset(loops.outputs) | captured(items)
    producer = {v: i for i, item in enumerate(items) for v in results(item)}
    n = len(items)
    number = {v: i for v, i in producer.items() if isinstance(items[i], Compute)}
    inputs: list[tuple[int, ...]] = [()] * n
    node: list[Kind | None] = [None] * n
    kind, pinned, flat = [OPAQUE] * n, [False] * n, [False] * n
    dear = [False] * n  # expensive to evaluate once, if fused with what is before
    succ: list[list[int]] = [[] for _ in range(n)]
    label: list[list[int]] = [[] for _ in range(n)]
    readers: dict[Value, list[int]] = {}
    of_form: dict[int, _OfForm] = {}
    node_edges = config.mode is FusionMode.TVM
    for i, item in enumerate(items):
        levels: dict[int, int] = {}
        if isinstance(item, Opaque):
            reads = item.reads
            levels = {producer[v]: OPAQUE for v in reads if v in producer}
        else:
            formed = forms.meet(item)
            k = of_form.get(formed.number)
            if k is None:
                k = of_form[formed.number] = _OfForm(item, formed, node_edges)
            node[i], reads = k.node, formed.sources
            inputs[i] = tuple([number.setdefault(v, n + len(number)) for v in reads])
            pinned[i] = is_pinned(item, config.keep)
            kind[i] = OPAQUE if pinned[i] else k.level
            flat[i] = k.plain or (
                k.pointwise and all(e is Kind.ELEMWISE for v, e in zip(reads, k.edges, strict=True) if v in producer)
            )
            dear[i] = k.dear
            for at, v in enumerate(reads):
                p = producer.get(v)
                if p is not None:
                    level = kind[i] if node_edges or pinned[i] else k.levels[at]
                    if dear[p] and level <= INJECTIVE and k.repeats(item, at, formed):
                        level = level if node_edges else RECOMPUTE
                    elif dear[p] and k.pointwise:
                        dear[i] = True
                    levels[p] = max(levels.get(p, 0), level)
            # Operands no code loads only order the two; nothing fuses across such an edge.
            operands = [v for v in dict.fromkeys(item.node.reads) if v not in reads]
            levels.update({producer[v]: OPAQUE for v in operands if v in producer})
            reads = (*reads, *operands)
        for v in reads:
            if v in producer:
                readers.setdefault(v, []).append(i)
        for p, level in levels.items():
            succ[p].append(i)
            label[p].append(level)
    extern = [any(v in needed for v in results(item)) for item in items]
    return Facts(items, node, kind, succ, label, extern, pinned, flat, producer, readers, loads, inputs, needed, forms)


def repeats(c: Compute, v: Value, loads: list[Load]) -> bool:
    """Fusing the producer of `v` into `c` would evaluate it REPEATS times more than once per element.

    Loops inside the last one its index depends on do not count: the value is the same there, and moves out of them.
    """
    for ld in loads:
        if ld.source is not v:
            continue
        used = axes_of(*ld.index)
        grows = any(isinstance(e, Apply) and e.prim.name == "floordiv" for e in walk(*ld.index))
        last = max((k for k, a in enumerate(c.axes) if a in used), default=-1)
        times = points(c) if grows else prod(sample(a.extent) for a in c.axes[: last + 1])
        if times - size(v) >= REPEATS:
            return True
    return False


def is_pinned(c: Compute, keep: frozenset[str]) -> bool:
    """The user wants this node to stay alone."""
    return bool(keep) and (c.node.name in keep or any(o in keep for o in c.origin))


def captured(items: tuple[Item, ...]) -> frozenset[Value]:
    """Values that subgraphs of nodes that stay use by name."""
    return frozenset(v for item in items if isinstance(item, Opaque) for v in item.node.captures)


def live_items(loops: LoopGraph, forms: Forms) -> tuple[tuple[Item, ...], dict[Value, list[Load]]]:
    """All nodes that stay and the Computes something needs; loads of the latter."""
    wanted = set(loops.outputs)
    out: list[Item] = []
    loads: dict[Value, list[Load]] = {}
    for item in reversed(loops.items):
        if isinstance(item, Opaque):
            wanted.update(item.reads)
        elif item.out in wanted:
            formed = forms.meet(item)
            loads[item.out] = formed.loads
            wanted.update(formed.sources)
            wanted.update(item.node.reads)
        else:
            continue
        out.append(item)
    return tuple(reversed(out)), loads
