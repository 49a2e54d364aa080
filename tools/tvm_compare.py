"""Compare our partition of a model with TVM's: same groups, or differences with their reasons.

Both sides see the same atomic ONNX nodes. Values are compared, by ONNX name: each side says which values are made in
one group. TVM may make a value in several steps, or not at all.

    replay      our stage A on TVM's own graph (its kinds, its edges) must give exactly TVM's groups. No excuses.
    causes      what differs between the two graphs before any fusion:
                  kind       a node whose kind is another one; only what `kind_reason` knows has a reason
                  steps      TVM makes the value in several loop functions, or several values in one
                  unmade     TVM has no such binding (folded, or the value is its input)
                  reads      TVM's node reads other values, or the value is an output on one side only: never explained
    difference  values that are grouped differently, as the smallest sets that both sides keep to themselves. It is
                explained when a cause lies in the set or right beside it, and, if all causes are kinds, our stage A
                with TVM's kinds in place of ours gives TVM's groups.

Without causes the two graphs are the same graph: same nodes in the same order, same kinds, same edges, same outputs.
Both partitions then are stage A of it (ours by construction, TVM's by the replay), and so equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypedDict

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.fuse import fuse
from onnxfuse.fuse.dominators import post_dominators
from onnxfuse.fuse.facts import Facts, facts
from onnxfuse.fuse.group import grow
from onnxfuse.ir.loops import Compute, LoopGraph, results
from onnxfuse.ir.op import Family

NAMES = {0: "elemwise", 1: "broadcast", 2: "injective", 3: "reduce", 4: "anchor", 7: "tuple", 8: "opaque"}
CONFIG = FusionConfig(mode=FusionMode.TVM)


class Binding(TypedDict):
    """One binding of TVM's graph, as tvm_relax.py reports it."""

    name: str
    function: str
    kind: int
    reads: list[int]
    value: str


class Theirs(TypedDict, total=False):
    """One line of tvm_relax.py."""

    path: str
    error: str
    bindings: list[Binding]
    values: dict[str, int | str]
    exits: list[int]
    groups: list[list[int]]
    moved: list[int]


@dataclass(frozen=True, slots=True)
class Ours:
    """Our graph and partition, by value name: op, kind and reads of every value, and the groups."""

    op: Mapping[str, str]
    kind: Mapping[str, int]
    reads: Mapping[str, frozenset[str]]
    compute: Mapping[str, Compute]
    outputs: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    known: Facts | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """Something the two graphs differ in before fusion; `why` is empty when there is no known reason."""

    sort: str  # kind, steps, unmade, reads
    value: str
    text: str
    why: str

    def __str__(self) -> str:
        return f"{self.value}: {self.text}" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class Difference:
    """Values that are grouped differently, and the causes in or beside them."""

    ours: tuple[tuple[str, ...], ...]
    theirs: tuple[tuple[str, ...], ...]
    causes: tuple[Cause, ...]

    @property
    def explained(self) -> bool:
        return any(c.why for c in self.causes)

    def __str__(self) -> str:
        def show(groups: Iterable[Sequence[str]]) -> str:
            return " | ".join("+".join(g) for g in groups)

        return f"ours {show(self.ours)}; TVM {show(self.theirs)}"


@dataclass(slots=True)
class Comparison:
    """The result for one model; nothing in `faults` and no unexplained difference: parity."""

    name: str
    nodes: int = 0  # values on our side
    compared: int = 0  # of them, those that TVM makes as well
    ours: int = 0  # groups
    theirs: int = 0
    replayed: bool = False
    causes: list[Cause] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: str = ""  # why there is no comparison

    @property
    def equal(self) -> bool:
        return not self.left_out and not self.differences and not self.faults

    @property
    def explained(self) -> list[Difference]:
        return [d for d in self.differences if d.explained]

    @property
    def unexplained(self) -> list[Difference]:
        return [d for d in self.differences if not d.explained]

    @property
    def failed(self) -> bool:
        return bool(self.unexplained or self.faults)


# --- Our side ---------------------------------------------------------------------------------------------------------


def ours(loops: LoopGraph) -> Ours:
    """Our tvm mode's partition of `loops`."""
    known = facts(loops, CONFIG)
    made = {v for item in known.items for v in results(item)}
    op, kind, reads, compute = {}, {}, {}, {}
    for i, item in enumerate(known.items):
        for v in results(item):
            op[v.name] = item.node.op.name
            if isinstance(item, Compute):
                compute[v.name] = item
            kind[v.name] = known.kind[i]
            reads[v.name] = frozenset(r.name for r in item.reads if r in made)
    outputs = frozenset(v.name for i, item in enumerate(known.items) if known.extern[i] for v in results(item))
    partition = fuse(loops, CONFIG)
    groups = [tuple(c.out.name for c in g.members) for g in partition.groups]
    groups += [(v.name,) for o in partition.left for v in o.node.results]
    return Ours(op, kind, reads, compute, outputs, tuple(groups), known)


def regrouped(known: Facts, kinds: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Our stage A on our graph with other kinds for the values named in `kinds`."""
    kind = list(known.kind)
    for i, item in enumerate(known.items):
        if isinstance(item, Compute):
            kind[i] = kinds.get(item.out.name, kind[i])
    label = [
        [kind[c] if kind[c] != known.kind[c] else level for c, level in zip(out, levels, strict=True)]
        for out, levels in zip(known.succ, known.label, strict=True)
    ]
    root = stage_a(kind, known.succ, label, known.extern)
    groups: dict[int, list[str]] = {}
    for i, item in enumerate(known.items):
        for v in results(item):
            groups.setdefault(root[i], []).append(v.name)
    return [tuple(g) for g in groups.values()]


def stage_a(
    kind: Sequence[int], succ: Sequence[Sequence[int]], label: Sequence[Sequence[int]], extern: Sequence[bool]
) -> list[int]:
    """The group of every node, in the way of the tvm mode."""
    tree = post_dominators(kind, succ, label, extern)
    return grow(kind, succ, extern, tree, CONFIG.max_nodes_tvm).root


# --- TVM's side -------------------------------------------------------------------------------------------------------


def replay(theirs: Theirs) -> list[list[int]]:
    """Our stage A on TVM's graph."""
    found = theirs["bindings"]
    succ: list[list[int]] = [[] for _ in found]
    for k, b in enumerate(found):
        for r in dict.fromkeys(b["reads"]):
            succ[r].append(k)
    kind = [b["kind"] for b in found]
    label = [[kind[c] for c in out] for out in succ]
    exits = set(theirs["exits"])
    root = stage_a(kind, succ, label, [k in exits for k in range(len(found))])
    groups: dict[int, list[int]] = {}
    for k in range(len(found)):
        groups.setdefault(root[k], []).append(k)
    return list(groups.values())


def steps(theirs: Theirs) -> dict[int, list[int]]:
    """The bindings that lead up to each binding with an ONNX value: those before it that make no value, and itself."""
    out: dict[int, list[int]] = {}
    before: list[int] = []
    for k, b in enumerate(theirs["bindings"]):
        before.append(k)
        if b["value"]:
            out[k], before = before, []
    return out


def value_reads(theirs: Theirs) -> dict[str, frozenset[str]]:
    """The ONNX values each ONNX value is made from, looking through the steps in between."""
    found = theirs["bindings"]
    out: dict[str, frozenset[str]] = {}
    for b in found:
        if not b["value"]:
            continue
        reads: set[str] = set()
        pending, seen = list(b["reads"]), set[int]()
        while pending:
            r = pending.pop()
            if r in seen:
                continue
            seen.add(r)
            if found[r]["value"]:
                reads.add(found[r]["value"])
            else:
                pending.extend(found[r]["reads"])
        out[b["value"]] = frozenset(reads)
    return out


# --- Comparison -------------------------------------------------------------------------------------------------------


def compare(name: str, mine: Ours, theirs: Theirs) -> Comparison:
    """What the module docstring says, for one model."""
    result = Comparison(name, nodes=len(mine.kind), ours=len(mine.groups))
    if "error" in theirs:
        result.left_out = theirs["error"]
        return result
    found = theirs["bindings"]
    result.theirs = sum(any(found[k]["value"] for k in g) for g in theirs["groups"])
    hidden = set(theirs["moved"])
    result.replayed = same_groups(replay(theirs), theirs["groups"], set(range(len(found))) - hidden)
    if not result.replayed:
        result.faults.append("our stage A on TVM's graph does not give TVM's groups")
    common = {b["value"] for k, b in enumerate(found) if b["value"] in mine.kind and k not in hidden}
    result.compared = len(common)
    if not common:
        result.left_out = "TVM makes none of the values as a binding"
    result.causes = causes(mine, theirs, common)
    result.faults += [f"no reason known: {c}" for c in result.causes if not c.why]
    groups = [[found[k]["value"] for k in g] for g in theirs["groups"]]
    result.differences = differences(mine, groups, common, result.causes)
    if result.differences and mine.known is not None and all(c.sort == "kind" for c in result.causes):
        kinds = {b["value"]: b["kind"] for b in found if b["value"] in common}
        if not same_groups(regrouped(mine.known, kinds), groups, common):
            result.faults.append("TVM's kinds on our graph do not give TVM's groups")
    return result


def causes(mine: Ours, theirs: Theirs, common: set[str]) -> list[Cause]:
    """Everything the graphs differ in, in our order."""
    found, at = theirs["bindings"], {b["value"]: k for k, b in enumerate(theirs["bindings"]) if b["value"]}
    lead, reads = steps(theirs), value_reads(theirs)
    out: list[Cause] = []
    for v, kind in mine.kind.items():
        op = mine.op[v]
        if v not in common:
            out.append(Cause("unmade", v, op, unmade(v, theirs, found)))
            continue
        functions = [found[k]["function"].rstrip("0123456789") for k in lead[at[v]]]
        if len(functions) > 1 or functions == ["get"]:
            out.append(Cause("steps", v, op, "TVM: " + ", ".join(functions)))
        elif kind != found[at[v]]["kind"]:
            a, b = NAMES[kind], NAMES[found[at[v]]["kind"]]
            out.append(Cause("kind", v, f"{op} {a}, TVM's {functions[0]} {b}", kind_reason(mine.compute.get(v), a, b)))
        here, there = seen_through(mine.reads, v, common), seen_through(reads, v, common)
        if here != there:
            more, less = sorted(here - there), sorted(there - here)
            out.append(Cause("reads", v, f"{op} reads {more} here, {less} in TVM", ""))
    leaves = {found[r]["value"] for k in theirs["exits"] for r in (k, *found[k]["reads"])}
    for v in sorted((leaves ^ mine.outputs) & common):
        out.append(Cause("reads", v, f"{mine.op[v]} is an output on one side only", ""))
    return out


def seen_through(reads: Mapping[str, frozenset[str]], value: str, common: set[str]) -> set[str]:
    """What `value` reads, looking through values that only one side makes."""
    out: set[str] = set()
    pending, seen = list(reads[value]), set[str]()
    while pending:
        r = pending.pop()
        if r in seen:
            continue
        seen.add(r)
        if r in common:
            out.add(r)
        else:
            pending.extend(reads[r])
    return out


def kind_reason(c: Compute | None, mine: str, theirs: str) -> str:
    """Why TVM gives the loops of `c` another kind; "" if that is not known. Checked on the loops, not on the op."""
    if c is None:
        return "left to the runtime here" if mine == "opaque" else ""
    if (mine, theirs) in (("broadcast", "injective"), ("elemwise", "injective"), ("reduce", "anchor")):
        shapes = [c.out.tensor.shape, *(v.tensor.shape for v in c.reads)]
        if any(d == 1 for shape in shapes for d in shape):
            return "an axis of one element has no loop variable here"
        if c.node.op.family is Family.VIEW and len(c.loads) == 1 and mine == "elemwise":
            return "its index is the plain loop variable here"
    if theirs == "opaque" and c.node.op.family is Family.VIEW and len(set(c.node.reads)) > len(c.reads):
        return "its index is a known constant here, and read from a tensor in TVM"
    return ""


def unmade(value: str, theirs: Theirs, found: list[Binding]) -> str:
    """Why TVM has no binding of its own for this value."""
    at = theirs["values"].get(value)
    if isinstance(at, int):
        return (
            f"TVM: the same as {found[at]['value']}" if found[at]["value"] != value else "TVM: moved out of its group"
        )
    return f"TVM: {at}" if at else "not in TVM's graph"


def differences(
    mine: Ours, groups: Sequence[Sequence[str]], common: set[str], causes: Sequence[Cause]
) -> list[Difference]:
    """Sets of values that are whole groups on both sides but grouped differently inside."""
    here, there = restricted(mine.groups, common), restricted(groups, common)
    parent = {v: v for v in common}

    def find(v: str) -> str:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for g in (*here, *there):
        for v in g[1:]:
            parent[find(v)] = find(g[0])
    blocks: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, ...]]]] = {}
    for side, all_groups in enumerate((here, there)):
        for g in all_groups:
            blocks.setdefault(find(g[0]), ([], []))[side].append(g)
    near = neighbours(mine)
    out: list[Difference] = []
    for a, b in blocks.values():
        if len(a) == len(b) == 1:
            continue
        inside = {v for g in a for v in g}
        reach = inside.union(*(near[v] for v in inside))
        out.append(Difference(tuple(a), tuple(b), tuple(c for c in causes if c.value in reach)))
    return out


def neighbours(mine: Ours) -> dict[str, set[str]]:
    """Producers and consumers of every value."""
    out: dict[str, set[str]] = {v: set(r) for v, r in mine.reads.items()}
    for v, reads in mine.reads.items():
        for r in reads:
            out[r].add(v)
    return out


def restricted(groups: Iterable[Sequence[str]], common: set[str]) -> list[tuple[str, ...]]:
    """The groups without values that only one side has."""
    kept = (tuple(v for v in g if v in common) for g in groups)
    return [g for g in kept if g]


def same_groups(a: Iterable[Sequence[object]], b: Iterable[Sequence[object]], members: Set[object]) -> bool:
    """Equal as partitions of `members`."""

    def normal(groups: Iterable[Sequence[object]]) -> set[frozenset[object]]:
        return {kept for g in groups if (kept := frozenset(g) & members)}

    return normal(a) == normal(b)


def tally(causes: Iterable[Cause]) -> Counter[str]:
    """How often each cause occurs, without the values."""
    return Counter(f"{c.sort}: {c.text}" + (f" ({c.why})" if c.why else "") for c in causes)
