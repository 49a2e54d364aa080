"""Why is it like this: every decision about a node, an edge, or all of them.  Stage results -> Explanation or Summary.

`Explanation.json()` and `Summary.json()` are stable schemas that other tools read (docs/inspect.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxfuse.codes import BY_CODE, advice, meaning, sentence
from onnxfuse.config import FusionConfig
from onnxfuse.errors import Refusal, UsageError
from onnxfuse.frontend.rewrite import Note
from onnxfuse.fuse import Judge
from onnxfuse.ir.graph import Graph, Node
from onnxfuse.ir.loops import Opaque, results
from onnxfuse.ir.partition import Decision, Partition, Relation, Verdict
from onnxfuse.ir.plan import Plans

EXAMPLES = 3  # of a code in the summary
NEAREST = 5  # names offered for an unknown one


@dataclass(frozen=True, slots=True)
class Subject:
    """A value of the loop level, or a node that stays, and where it ended up.

    name     as in decisions: the value, or the first output of a node that stays
    scope    the body it is in, "" for the main graph
    group    name of the custom node it runs in; None = it stays with onnxruntime, for `refusal`
    """

    name: str
    node: str
    op: str
    origin: tuple[str, ...]
    group: str | None
    refusal: Refusal | None = None
    reads: tuple[str, ...] = ()
    scope: str = ""

    @property
    def fate(self) -> str:
        """Where it runs, in words."""
        if self.group is not None:
            return f"in group {self.group}" + (f" of body {self.scope}" if self.scope else "")
        return f"stays with onnxruntime: {self.refusal}" if self.refusal is not None else "is not computed"

    def json(self) -> dict[str, object]:
        """A row of `subjects`."""
        return {
            "name": self.name,
            "node": self.node,
            "op": self.op,
            "origin": list(self.origin),
            "group": self.group,
            "code": self.refusal.code if self.refusal is not None else None,
            "why": self.refusal.why if self.refusal is not None else "",
            "scope": self.scope,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """What there is to say about one node or edge.

    asked     the selection as it was given
    subjects  what it stands for; empty when the simplifications removed it, or it is an input or constant
    blocking  the refusal that decided it, if the two sides did not come together: that of the last stage
    together  which of the decisions are about two that run in one kernel in the end
    """

    asked: str
    verdict: str
    subjects: tuple[Subject, ...]
    decisions: tuple[Decision, ...]
    blocking: Decision | None
    notes: tuple[Note, ...]
    together: tuple[bool, ...] = ()

    def json(self) -> dict[str, object]:
        """The schema in docs/inspect.md."""
        ends = zip(self.decisions, self.together, strict=True)
        return {
            "asked": self.asked,
            "verdict": self.verdict,
            "subjects": [s.json() for s in self.subjects],
            "decisions": [decision_json(d) | {"together": together} for d, together in ends],
            "blocking": decision_json(self.blocking) if self.blocking is not None else None,
            "notes": [note_json(n) for n in self.notes],
        }


@dataclass(frozen=True, slots=True)
class Row:
    """How often a code was given, with a few of the pairs or nodes."""

    stage: str
    verdict: str  # fused, refused, left (a node that stays), kept (a simplification not done)
    code: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one kernel writes and another reads, and the decision that keeps the two apart."""

    value: str
    before: str  # group
    after: str
    nbytes: int
    decision: Decision

    def json(self) -> dict[str, object]:
        """A row of `crossings`."""
        ends = {"value": self.value, "from": self.before, "to": self.after, "bytes": self.nbytes}
        return ends | {"decision": decision_json(self.decision)}


@dataclass(frozen=True, slots=True)
class Summary:
    """Every decision of a model, the same by code, and what keeps its kernels apart in the end."""

    crossings: tuple[Crossing, ...]
    rows: tuple[Row, ...]
    decisions: tuple[Decision, ...]
    subjects: tuple[Subject, ...]
    notes: tuple[Note, ...]

    def json(self) -> dict[str, object]:
        """The schema in docs/inspect.md."""
        return {
            "crossings": [c.json() for c in self.crossings],
            "codes": [
                {
                    "stage": r.stage,
                    "verdict": r.verdict,
                    "code": r.code,
                    "meaning": meaning(r.code),
                    "count": r.count,
                    "examples": list(r.examples),
                }
                for r in self.rows
            ],
            "decisions": [decision_json(d) for d in self.decisions],
            "left": [s.json() for s in self.subjects if s.group is None],
            "notes": [note_json(n) for n in self.notes],
        }


def decision_json(d: Decision) -> dict[str, object]:
    """One record; `numbers` by name."""
    return {
        "stage": d.stage,
        "a": d.a,
        "b": d.b,
        "relation": str(d.relation),
        "verdict": str(d.verdict),
        "code": d.code,
        "meaning": meaning(d.code),
        "numbers": dict(d.numbers),
        "advice": advice(d.code) if d.verdict is Verdict.REFUSED else "",
    }


def note_json(n: Note) -> dict[str, object]:
    """One note of the simplifications."""
    return {"node": n.node, "code": n.code, "why": n.why}


@dataclass(frozen=True, eq=False)
class Answers:
    """What a run of the stages has to say; made by `answers`.

    originals  the graphs as they were read (main, then bodies): names the user knows
    whole      the partitions before kernelize, which may have split groups
    fusion     the configuration they were made with: pairs without a record are judged by it
    """

    originals: tuple[Graph, ...]
    whole: tuple[Partition, ...]
    plans: Plans
    notes: tuple[Note, ...]
    subjects: Mapping[str, Subject]
    decisions: tuple[Decision, ...]
    fusion: FusionConfig
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # any accepted name -> subjects

    @cached_property
    def judges(self) -> dict[str, Judge]:
        """By scope."""
        scopes = ["", *(p.loops.name for p in self.plans.bodies)]
        return {s: Judge(p, self.fusion) for s, p in zip(scopes, self.whole, strict=True)}

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """Subjects that read a value."""
        out: dict[str, list[str]] = {}
        for s in self.subjects.values():
            for v in s.reads:
                out.setdefault(v, []).append(s.name)
        return out

    @cached_property
    def judged(self) -> set[tuple[str, str]]:
        """Pairs with a record of a stage that has the last word; stage A's is the first word, but in mode tvm."""
        return {(d.a, d.b) for d in self.decisions if d.stage != "A"}

    def summary(self) -> Summary:
        """Every code with its count."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for d in self.decisions:
            found.setdefault((d.stage, str(d.verdict), d.code), []).append(f"{d.a}->{d.b}")
        for s in self.subjects.values():
            if s.group is None and s.refusal is not None:
                found.setdefault((_stage(s.refusal.code), "left", s.refusal.code), []).append(s.node)
        for n in self.notes:
            found.setdefault(("prepare", "kept", n.code), []).append(n.node)
        rows = tuple(
            Row(stage, verdict, code, len(names), tuple(dict.fromkeys(names))[:EXAMPLES])
            for (stage, verdict, code), names in sorted(found.items(), key=lambda kv: (_place(kv[0]), -len(kv[1])))
        )
        return Summary(tuple(self._crossings()), rows, self.decisions, tuple(self.subjects.values()), self.notes)

    def _crossings(self) -> Iterator[Crossing]:
        """Between kernels; what a node that stays reads or makes has that node's refusal."""
        for judge in self.judges.values():
            for border in judge.borders():
                a, b = self.subjects[border.value.name].group, self.subjects[border.reader].group
                if a is not None and b is not None:
                    yield Crossing(border.value.name, a, b, border.nbytes, border.decision)

    def node(self, name: str) -> Explanation:
        """Every decision about a node, value or operator. Raises UsageError for an unknown name."""
        picked = self._named(name)
        if not picked:
            return Explanation(name, self._absent(name), (), (), None, self._notes({name}))
        names = {s.name for s in picked}
        around = [(v, s.name) for s in picked for v in s.reads] + [
            (n, r) for n in names for r in self.readers.get(n, ())
        ]
        found = (*(d for d in self.decisions if self._concerns(d, names)), *self._judge(sorted(set(around))))
        fates = dict.fromkeys(s.fate for s in picked)
        verdict = f"{name} {'; '.join(fates)}" if len(fates) <= EXAMPLES else f"{name}: {len(picked)} values"
        said = self._explanation(name, verdict, picked, found, self._notes({name, *_origins(picked)}))
        one = len({s.origin for s in picked}) == 1  # of an operator no refusal is the first
        return said if one else replace(said, blocking=None)

    def edge(self, a: str, b: str) -> Explanation:
        """Every decision about two nodes. Raises UsageError for an unknown name."""
        left, right = self._named(a), self._named(b)
        asked = f"{a},{b}"
        for name, picked in ((a, left), (b, right)):
            if not picked:
                return Explanation(asked, self._absent(name), (), (), None, self._notes({name}))
        first, second = {s.name for s in left}, {s.name for s in right}
        pairs = [(v, s.name) for s in right for v in s.reads if v in first]
        pairs += [(v, s.name) for s in left for v in s.reads if v in second]
        every = self.decisions
        found = tuple(d for d in every if (d.a in first and d.b in second) or (d.a in second and d.b in first))
        found += tuple(d for d in every if d.stage == "K" and d not in found and self._split(d, first, second))
        found += tuple(self._judge(pairs or [(left[-1].name, right[0].name)]))
        if not found:  # stage A judges a value and its post-dominator, which may be neither
            found = tuple(d for d in every if d.a in first)
        notes = self._notes({a, b, *_origins((*left, *right))})
        said = self._explanation(asked, self._edge_verdict(a, b, left, right), (*left, *right), found, notes)
        return replace(said, blocking=None) if _meet(left, right) else said

    def _edge_verdict(self, a: str, b: str, left: tuple[Subject, ...], right: tuple[Subject, ...]) -> str:
        if shared := _meet(left, right):
            return f"{a} and {b} run in one kernel: group {', '.join(shared)}"
        for name, side in ((a, left), (b, right)):
            stays = next((s for s in side if s.group is None), None)
            if stays is not None:
                return f"{name} {stays.fate}"
        groups = " and ".join(dict.fromkeys(s.group for s in (left[-1], right[0]) if s.group is not None))
        made, read = {s.name for s in left}, {v for s in right for v in s.reads}
        if not made & read and not {s.name for s in right} & {v for s in left for v in s.reads}:
            common = {v for s in left for v in s.reads} & read
            how = f"both read {min(common)}" if common else "they share no value"
            return f"neither {a} nor {b} reads the other, {how}; they run in separate kernels: {groups}"
        return f"{a} and {b} run in separate kernels: {groups}"

    def _explanation(
        self,
        asked: str,
        verdict: str,
        picked: tuple[Subject, ...],
        found: tuple[Decision, ...],
        notes: tuple[Note, ...],
    ) -> Explanation:
        found = tuple(dict.fromkeys(found))
        together = tuple(self._together(d.a, d.b) for d in found)
        apart = [d for d, one in zip(found, together, strict=True) if d.verdict is Verdict.REFUSED and not one]
        last = max(apart, key=_weight, default=None)
        return Explanation(asked, verdict, picked, found, last, notes, together)

    def _judge(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Decision]:
        """Decisions about pairs that run apart and of which the last stage left no record."""
        told = set()
        for a, b in pairs:
            x, y = self.subjects.get(a), self.subjects.get(b)
            if x is None or y is None or x.scope != y.scope or self._together(a, b) or {(a, b), (b, a)} & self.judged:
                continue
            said = self.judges[x.scope].pair(a, b)
            if said is not None and said.verdict is Verdict.REFUSED and said not in told:
                told.add(said)
                yield said

    def _named(self, name: str) -> tuple[Subject, ...]:
        """Subjects behind a name; empty for a name of the original model that is not computed."""
        if name in self.aliases:
            return tuple(self.subjects[s] for s in self.aliases[name])
        known = {name for graph in self.originals for name in _known_names(graph)}
        if name in known:
            return ()
        near = difflib.get_close_matches(name, sorted({*self.aliases, *known}), NEAREST, 0.5)
        hint = f"did you mean: {', '.join(near)}" if near else "names: onnxfuse inspect MODEL"
        raise UsageError("E_NO_NAME", f"the model has no node, value or operator {name!r}", hint=hint)

    def _absent(self, name: str) -> str:
        if any(v.name == name for v in self.originals[0].inputs):
            return f"{name} is an input of the model: nothing to decide"
        if any(v.name == name for graph in self.originals for v in graph.consts):
            return f"{name} is a constant: nothing to decide"
        return f"{name} is gone: the simplifications before fusion removed it (onnxfuse trace --phase 1)"

    def _notes(self, names: set[str]) -> tuple[Note, ...]:
        return tuple(n for n in self.notes if n.node in names)

    def _concerns(self, d: Decision, names: set[str]) -> bool:
        if d.a in names or d.b in names:
            return True
        if d.stage != "K":
            return False
        return self._split(d, names)

    def _split(self, d: Decision, *sides: set[str]) -> bool:
        """`d` is about a group that kernelize split, with something of every side; it names first and last member."""
        ends = ((g.members[0].out.name, g.members[-1].out.name, g) for p in self.whole for g in p.groups)
        members = next(({c.out.name for c in g.members} for a, b, g in ends if (d.a, d.b) == (a, b)), set())
        return all(members & side for side in sides)

    def _together(self, a: str, b: str) -> bool:
        x, y = self.subjects.get(a), self.subjects.get(b)
        return x is not None and y is not None and x.group is not None and x.group == y.group


def answers(
    originals: Sequence[Graph],
    whole: Sequence[Partition],
    plans: Plans,
    fusion: FusionConfig,
    notes: Iterable[Note] = (),
) -> Answers:
    """Look up where everything ended up (see `Answers`)."""
    group_of = {c.out: g.id for p in plans.partitions for g in p.groups for c in g.members}
    scopes = ["", *(p.loops.name for p in plans.bodies)]
    subjects: dict[str, Subject] = {}
    named: dict[str, dict[str, None]] = {}  # nodes and values
    typed: dict[str, dict[str, None]] = {}  # operators; a node or value of the same name wins
    ops = {n.name: n.op.name for graph in originals for n in graph.nodes}
    for scope, item in ((s, i) for s, p in zip(scopes, plans.partitions, strict=True) for i in p.loops.items):
        made = results(item)
        name = made[0].name if made else item.node.name
        group, refusal = None, None
        if isinstance(item, Opaque):
            refusal = item.refusal
        elif item.out in group_of:
            gid = group_of[item.out]
            refusal = plans.refused.get(gid)
            call = plans.calls.get(gid)
            group = call.name if call is not None and refusal is None else None
        reads = tuple(v.name for v in item.reads)
        told = (name, item.node.name, str(item.node.op), item.node.origin, group, refusal, reads, scope)
        subjects[name] = Subject(*told)
        origin = item.node.origin
        for alias in (item.node.name, *origin, *(v.name for v in made)):
            named.setdefault(alias, {})[name] = None
        for op in (item.node.op.name, *(ops[o] for o in origin if o in ops)):
            typed.setdefault(op, {})[name] = None
    aliases = {k: tuple(v) for k, v in {**typed, **named}.items()}
    decisions = tuple(d for p in plans.partitions for d in p.decisions)
    return Answers(tuple(originals), tuple(whole), plans, tuple(notes), subjects, decisions, fusion, aliases)


def _known_names(graph: Graph) -> set[str]:
    nodes: Iterable[Node] = graph.nodes
    return {v.name for v in graph.values()} | {x for n in nodes for x in (n.name, n.op.name)}


def _weight(d: Decision) -> bool:
    """A stage after A has the last word, but on what an anchor takes behind it: that is stage A's to decide."""
    return d.stage != "A" and (d.code != "NF_KIND" or d.relation is Relation.HORIZONTAL)


def _meet(left: Iterable[Subject], right: Iterable[Subject]) -> list[str]:
    """Groups that both sides have something in."""
    return sorted({s.group for s in left if s.group is not None} & {s.group for s in right if s.group is not None})


def _origins(subjects: Iterable[Subject]) -> set[str]:
    return {o for s in subjects for o in (s.node, *s.origin)}


def _stage(code: str) -> str:
    known = BY_CODE.get(code)
    return known.stage if known is not None else ""


_ORDER = ("prepare", "lower", "A", "B", "C", "D", "K", "kernelize", "plan", "generate")


def _place(key: tuple[str, str, str]) -> tuple[int, str]:
    stage, verdict, _ = key
    return (_ORDER.index(stage) if stage in _ORDER else len(_ORDER), verdict)


def blocking_line(d: Decision) -> str:
    """The refusal with its numbers: `B s->y NF_NODE_CAP: nodes 40+31 > 64`."""
    numbers = sentence(d.code, d.numbers)
    return f"{d.stage} {d.a}->{d.b} {d.code}: {meaning(d.code)}" + (f" ({numbers})" if numbers else "")
