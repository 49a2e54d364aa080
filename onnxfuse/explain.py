"""Why is it like this: every decision about a node, an edge, or all of them.  Stage results -> Explanation or Summary.

`Explanation.json()` and `Summary.json()` are stable schemas that other tools read (docs/inspect.md).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxfuse.codes import BY_CODE, meaning, sentence
from onnxfuse.errors import Refusal, UsageError
from onnxfuse.frontend.rewrite import Note
from onnxfuse.ir.graph import Graph, Node
from onnxfuse.ir.loops import Opaque, results
from onnxfuse.ir.partition import Decision, Partition, Verdict
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
    blocking  the refusal that decided it, if the two sides did not come together
    """

    asked: str
    verdict: str
    subjects: tuple[Subject, ...]
    decisions: tuple[Decision, ...]
    blocking: Decision | None
    notes: tuple[Note, ...]

    def json(self) -> dict[str, object]:
        """The schema in docs/inspect.md."""
        return {
            "asked": self.asked,
            "verdict": self.verdict,
            "subjects": [s.json() for s in self.subjects],
            "decisions": [decision_json(d) for d in self.decisions],
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
class Summary:
    """Every decision of a model, and the same by code."""

    rows: tuple[Row, ...]
    decisions: tuple[Decision, ...]
    subjects: tuple[Subject, ...]
    notes: tuple[Note, ...]

    def json(self) -> dict[str, object]:
        """The schema in docs/inspect.md."""
        return {
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
    }


def note_json(n: Note) -> dict[str, object]:
    """One note of the simplifications."""
    return {"node": n.node, "code": n.code, "why": n.why}


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a run of the stages has to say; made by `answers`.

    originals  the graphs as they were read (main, then bodies): names the user knows
    whole      the partitions before kernelize, which may have split groups
    """

    originals: tuple[Graph, ...]
    whole: tuple[Partition, ...]
    plans: Plans
    notes: tuple[Note, ...]
    subjects: Mapping[str, Subject]
    decisions: tuple[Decision, ...]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # any accepted name -> subjects

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
        return Summary(rows, self.decisions, tuple(self.subjects.values()), self.notes)

    def node(self, name: str) -> Explanation:
        """Every decision about a node, value or operator. Raises UsageError for an unknown name."""
        picked = self._named(name)
        if not picked:
            return Explanation(name, self._absent(name), (), (), None, self._notes({name}))
        names = {s.name for s in picked}
        found = tuple(d for d in self.decisions if self._concerns(d, names))
        fates = dict.fromkeys(s.fate for s in picked)
        blocking = next((d for d in found if d.verdict is Verdict.REFUSED and not self._together(d.a, d.b)), None)
        verdict = f"{name} {'; '.join(fates)}" if len(fates) <= EXAMPLES else f"{name}: {len(picked)} values"
        return Explanation(name, verdict, picked, found, blocking, self._notes({name, *_origins(picked)}))

    def edge(self, a: str, b: str) -> Explanation:
        """Every decision about two nodes. Raises UsageError for an unknown name."""
        left, right = self._named(a), self._named(b)
        asked = f"{a},{b}"
        for name, picked in ((a, left), (b, right)):
            if not picked:
                return Explanation(asked, self._absent(name), (), (), None, self._notes({name}))
        first, second = {s.name for s in left}, {s.name for s in right}
        every = self.decisions
        found = tuple(d for d in every if (d.a in first and d.b in second) or (d.a in second and d.b in first))
        if not found:  # stage A judges a value and its post-dominator, which may be neither
            found = tuple(d for d in every if d.a in first)
        picked = (*left, *right)
        verdict, blocking = self._edge_verdict(a, b, left, right, found)
        return Explanation(asked, verdict, picked, found, blocking, self._notes({a, b, *_origins(picked)}))

    def _edge_verdict(
        self, a: str, b: str, left: tuple[Subject, ...], right: tuple[Subject, ...], found: tuple[Decision, ...]
    ) -> tuple[str, Decision | None]:
        shared = {s.group for s in left} & {s.group for s in right} - {None}
        if shared:
            return f"{a} and {b} run in one kernel: group {', '.join(sorted(filter(None, shared)))}", None
        for name, side in ((a, left), (b, right)):
            stays = next((s for s in side if s.group is None), None)
            if stays is not None:
                return f"{name} {stays.fate}", _first_refusal(found)
        made, read = {s.name for s in left}, {v for s in right for v in s.reads}
        if not made & read and not {s.name for s in right} & {v for s in left for v in s.reads}:
            common = {v for s in left for v in s.reads} & read
            how = f"both read {min(common)}" if common else "they share no value"
            return f"neither {a} nor {b} reads the other; {how}", _first_refusal(found)
        groups = " and ".join(dict.fromkeys(s.group for s in (left[-1], right[0]) if s.group is not None))
        blocking = _first_refusal(found)
        why = "" if blocking is not None else "; no decision was taken (see --fusion-mode)"
        return f"{a} and {b} run in separate kernels: {groups}{why}", blocking

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
        # A group that was split is recorded by its first and last member.
        ends = ((g.members[0].out.name, g.members[-1].out.name, g) for p in self.whole for g in p.groups)
        return any((d.a, d.b) == (a, b) and names & {c.out.name for c in g.members} for a, b, g in ends)

    def _together(self, a: str, b: str) -> bool:
        x, y = self.subjects.get(a), self.subjects.get(b)
        return x is not None and y is not None and x.group is not None and x.group == y.group


def answers(
    originals: Sequence[Graph], whole: Sequence[Partition], plans: Plans, notes: Iterable[Note] = ()
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
    return Answers(tuple(originals), tuple(whole), plans, tuple(notes), subjects, decisions, aliases)


def _known_names(graph: Graph) -> set[str]:
    nodes: Iterable[Node] = graph.nodes
    return {v.name for v in graph.values()} | {x for n in nodes for x in (n.name, n.op.name)}


def _origins(subjects: Iterable[Subject]) -> set[str]:
    return {o for s in subjects for o in (s.node, *s.origin)}


def _first_refusal(found: Iterable[Decision]) -> Decision | None:
    return next((d for d in found if d.verdict is Verdict.REFUSED), None)


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
