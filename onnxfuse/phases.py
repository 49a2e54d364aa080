"""The life of a model in five prints, and what each phase changed, as unified diffs.  Stage results -> Story.

    original  the user's nodes
    legalized one loop function per value, with kind and kinds of its edges            (prepare, atomize, lower)
    grouped   the functions that run together, in a private one                        (fuse)
    merged    each group as one function: its loops one after another, buffers between (before kernelize)
    scheduled the loops that are compiled, and how                                     (kernelize, plan)

Every diff applies as a patch to the print before it (tests/cli/test_phases.py). Lines that begin with `;` or `==` are
remarks. Free dimensions count as `traffic.SAMPLE_DIM` in all byte numbers, which then begin with `~`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.analysis.kinds import kinds
from onnxfuse.analysis.traffic import alone, nbytes
from onnxfuse.errors import UsageError
from onnxfuse.ir.expr import Expr, Load, Sym, load, rebuild, substitute, var
from onnxfuse.ir.graph import Graph, Node, Value, topological
from onnxfuse.ir.kernel import Stage
from onnxfuse.ir.loops import Axis, Compute, Item, LoopGraph, Opaque, Reduce, results
from onnxfuse.ir.op import Family, Kind, Op
from onnxfuse.ir.partition import Decision, Group, Partition, Verdict
from onnxfuse.ir.plan import Plan, Plans, Schedule
from onnxfuse.ir.text import attributes, lines, print_expr, value_text
from onnxfuse.ir.types import Dim
from onnxfuse.schedule.program import Program, program

Names = Mapping[Compute, str]


@dataclass(frozen=True, slots=True)
class Phase:
    """One step: the whole print before and after, and remarks."""

    number: int
    title: str
    before: str
    after: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def diff(self) -> list[str]:
        """A unified diff; every hunk names the function it begins in."""
        if self.old == self.new:
            return []
        out: list[str] = []
        for line in difflib.unified_diff(self.old, self.new, self.before, self.after, lineterm=""):
            found = _HUNK.match(line) if line.startswith("@@") else None
            where = _function(self.old, int(found[1])) if found is not None else ""
            out.append(f"{line} {where}".rstrip())
        return out

    def json(self) -> dict[str, object]:
        """Both prints' text, the diff and the remarks."""
        return {
            "phase": self.number,
            "title": self.title,
            "before": self.before,
            "after": self.after,
            "diff": self.diff(),
            "text": list(self.new),
            "remarks": list(self.remarks),
        }


_HUNK = re.compile(r"@@ -(\d+)")


def _function(text: Sequence[str], line: int) -> str:
    """The head of the function around a line (counted from 1), up to its parameters."""
    heads = [t for t in text[: max(line, 1)] if t and not t.startswith((" ", "}"))]
    return heads[-1].partition("(")[0] if heads else ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Before and after: kernels, bytes they read and write (weights included), bytes of buffers between loops."""

    kernels: tuple[int, int]
    traffic: tuple[int, int]
    local: tuple[int, int]
    left: int
    estimated: bool

    def __str__(self) -> str:
        mark = "~" if self.estimated else ""
        (k0, k1), (t0, t1), (b0, b1) = self.kernels, self.traffic, self.local
        parts = [
            f"kernels {k0} -> {k1}",
            f"traffic {mark}{t0} -> {mark}{t1} B (saved {mark}{t0 - t1})",
            f"local bytes {mark}{b0} -> {mark}{b1} after schedule",
        ]
        parts += [f"left with onnxruntime {self.left}"] if self.left else []
        return "   ".join(parts)

    def json(self) -> dict[str, object]:
        """The same as data."""
        pairs = {"kernels": self.kernels, "traffic": self.traffic, "local_bytes": self.local}
        both: dict[str, object] = {k: {"before": a, "after": b} for k, (a, b) in pairs.items()}
        return {**both, "left": self.left, "estimated": self.estimated}


@dataclass(frozen=True, slots=True)
class Story:
    """All phases and their sum."""

    phases: tuple[Phase, ...]
    totals: Totals

    def text(self, form: str = "diff", only: int = 0) -> list[str]:
        """Lines of `--format diff` or `full`, of all phases (0) or one."""
        out: list[str] = []
        if form == "full" and only == 0:
            out += ["== original ==", *self.phases[0].old]
        for p in self.phases:
            if only not in (0, p.number):
                continue
            out.append(f"== phase {p.number}: {p.title} ==")
            out += p.diff() if form == "diff" else p.new
            out += p.remarks
        return [*out, "== summary ==", f"  {self.totals}"] if only == 0 else out

    def json(self, only: int = 0) -> dict[str, object]:
        """All phases (0) or one, and the sum."""
        return {
            "phases": [p.json() for p in self.phases if only in (0, p.number)],
            "summary": self.totals.json(),
        }


def story(original: Graph, plans: Plans, only: str = "") -> Story:
    """The phases of a whole model, or of one group. Raises UsageError for an unknown group."""
    view = _view(original, plans, only)
    first, second, third = view.original(), view.legalized(), view.grouped()
    fourth, fifth = view.merged(), view.scheduled()
    return Story(
        (
            Phase(1, "legalize", "original", "legalized", first, second),
            Phase(2, "group", "legalized", "grouped", second, third, view.decisions()),
            Phase(3, "merge loops into one kernel", "grouped", "merged", third, fourth),
            Phase(4, "schedule", "merged", "scheduled", fourth, fifth, view.fates()),
        ),
        view.totals(),
    )


def stories(originals: Sequence[Graph], plans: Plans, only: str = "") -> dict[str, Story]:
    """The phases of the main graph (under "") and of every body; `only` names one group of one of them."""
    names = ["", *(p.loops.name for p in plans.bodies)]
    told: dict[str, Story] = {}
    for k, name in enumerate(names):
        try:
            told[name] = story(originals[k], plans.scope(k), only)
        except UsageError:
            if name == names[-1] and not told:
                raise
        else:
            if only:
                break
    return told


# -- what is shown -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """The part of the model that is shown, and the names of its functions.

    groups   compiled ones, in topological order
    items    Computes and nodes that stay; dead Computes are not among them
    """

    graph: Graph
    partition: Partition
    plans: Plans
    nodes: tuple[Node, ...]
    items: tuple[Item, ...]
    groups: tuple[Group, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    names: Names
    plan_of: Mapping[int, Plan]
    programs: Mapping[int, Program]

    def original(self) -> tuple[str, ...]:
        calls = (f"  {_results(n.results)}onnx.{n.op}({_operands(n)}){attributes(n)}" for n in self.nodes)
        return tuple(self._main((v for n in self.nodes for v in n.reads), self.graph.consts, calls))

    def legalized(self) -> tuple[str, ...]:
        calls = (self._call(item) for item in self.items)
        return tuple(self._main(self._read(), self.partition.loops.consts, calls))

    def grouped(self) -> tuple[str, ...]:
        blocks = (line for g in self.groups for line in self._group(g))
        return (*self._calls(), *blocks)

    def merged(self) -> tuple[str, ...]:
        blocks = (line for g in self.groups for line in self._merged(g))
        return (*self._calls(), *blocks)

    def scheduled(self) -> tuple[str, ...]:
        blocks = (line for g in self.groups for line in self._scheduled(g))
        return (*self._calls(), *blocks)

    def decisions(self) -> tuple[str, ...]:
        """The log, one remark per decision about what is shown."""
        made = {c.out.name: c for c in self.items if isinstance(c, Compute)}
        shown = {v.name for item in self.items for v in results(item)}
        found = (d for d in self.partition.decisions if d.a in shown or d.b in shown)
        return tuple(f"; {_decision(d, made)}" for d in found)

    def fates(self) -> tuple[str, ...]:
        """What became of the buffers and loops of every group."""
        return tuple(line for g in self.groups for line in self._fates(g))

    def totals(self) -> Totals:
        members = [c for g in self.groups for c in g.members]
        values = {v for c in members for v in (*c.reads, c.out)}
        return Totals(
            (len(members), len(self.groups)),
            (sum(alone(c).bytes for c in members), sum(nbytes(v) for g in self.groups for v in (*g.reads, *g.writes))),
            (
                sum(nbytes(v) for g in self.groups for v in _between(g)),
                sum(nbytes(v) for g in self.groups for v in self.programs[g.id].locals if v.tensor.rank),
            ),
            len(self.items) - len(members),
            any(not isinstance(d, int) for v in values for d in v.tensor.shape),
        )

    # -- main function

    def _main(self, read: Iterable[Value], consts: Mapping[Value, object], body: Iterable[str]) -> Iterator[str]:
        yield f"graph {_function_name(self.graph.name)}({', '.join(_typed(v) for v in self.inputs)}) {{"
        yield from (f"  const {_typed(v)}" for v in dict.fromkeys(read) if v in consts)
        yield from body
        yield f"  return {_list(self.outputs)}"
        yield "}"

    def _read(self) -> Iterator[Value]:
        return (v for item in self.items for v in item.reads)

    def _call(self, item: Item) -> str:
        if isinstance(item, Opaque):
            return f"{_stays(item.node)}   ; stays: {item.refusal}"
        found = kinds(item)
        note = f"kind={found.node}"
        edges = [found.edges[v] for v in item.reads]
        if found.node.level <= Kind.INJECTIVE.level and any(e is not found.node for e in edges):
            note += f" edges=[{', '.join(edges)}]"
        return f"  {self._bare(item)} : {item.out.tensor}   ; {note}"

    def _bare(self, c: Compute) -> str:
        return f"{value_text(c.out.name)} = call @{self.names[c]}({_list(c.reads)})"

    def _calls(self) -> Iterator[str]:
        """Calls of groups, nodes that stay and Computes that are not compiled, in an order that runs."""
        inside = {c for g in self.groups for c in g.members}
        refused = {c: why for g in self.partition.groups if (why := self.plans.refused.get(g.id)) for c in g.members}
        place = {v: k for k, item in enumerate(self.items) for v in results(item)}
        units: dict[Node, str] = {}
        for g in self.groups:
            text = f"  {_results(g.writes)}call @{self._name(g)}({_list(g.reads)})"
            units[_unit(g.reads, g.writes)] = text
        for item in self.items:
            if isinstance(item, Opaque):
                units[_unit(item.reads, results(item))] = f"{_stays(item.node)}   ; stays: {item.refusal}"
            elif item not in inside:
                units[_unit(item.reads, (item.out,))] = f"{_stays(item.node)}   ; stays: {refused.get(item, 'dead')}"
        sorted_units = sorted(units, key=lambda n: max((place.get(v, -1) for v in n.results), default=-1))
        made = {v for n in sorted_units for v in n.results}
        outside = {v for n in sorted_units for v in n.reads} - made
        ordered = topological(sorted_units, outside) or sorted_units
        yield from self._main(self._read(), self.partition.loops.consts, (units[n] for n in ordered))

    def _name(self, g: Group) -> str:
        return f"fused_{self.plans.calls[g.id].name}"

    # -- groups

    def _group(self, g: Group) -> Iterator[str]:
        yield f"group @{self._name(g)}({_list(g.reads)}) primitive {{"
        yield from (f"  {self._bare(c)}" for c in g.members)
        yield f"  return {_list(g.writes)}"
        yield "}"

    def _kernel_head(self, g: Group) -> str:
        outs = "".join(f", out {value_text(v.name)}" for v in g.writes)
        return f"kernel @{self._name(g)}({_list(g.reads)}{outs}) noalias {{"

    def _merged(self, g: Group) -> Iterator[str]:
        yield self._kernel_head(g)
        between = {v: Value(f"{v.name}.tmp", v.type) for v in _between(g)}
        yield from (f"  alloc {_typed(t)}   ; {_bytes(v)}, local" for v, t in between.items())
        for c in g.members:
            yield from _nest(c, between)
        yield "}"

    def _scheduled(self, g: Group) -> Iterator[str]:
        made = self.programs[g.id]
        plan = self.plan_of.get(g.id)
        yield self._kernel_head(g)
        if plan is not None:
            yield f"  ; schedule {_schedule(plan.schedule, _axis_names(made))}"
        for v in made.locals:
            yield f"  local {_typed(v)}   ; " + (f"{_bytes(v)} of every row" if v.tensor.rank else "register")
        yield f"  parallel for {_loops(made.outer)} {{" if made.outer else "  once {"
        for stage in made.stages:
            yield from _stage(stage)
        yield "  }"
        yield "}"

    def _fates(self, g: Group) -> Iterator[str]:
        made = self.programs[g.id]
        kept = {v.name: v for v in made.locals}
        for v in _between(g):
            # program() calls the local of a value after it
            local = kept.get(f"{v.name}.acc") or kept.get(f"{v.name}.row")
            fate = "removed (inlined)"
            if local is not None:
                fate = f"-> {_bytes(local)} of every row" if local.tensor.rank else "-> register"
            yield f"; {value_text(v.name)}.tmp {_bytes(v)} {fate}"
        stages = f"{len(made.stages)} stage" + ("s" if len(made.stages) != 1 else "")
        parallel = " ".join(a.name for a in made.outer) or "nothing"
        yield f"; @{self._name(g)}: loops {len(g.members)} -> 1 nest of {stages} (parallel {parallel})"


def _view(original: Graph, plans: Plans, only: str) -> _View:
    partition = plans.partition
    loops = partition.loops
    compiled = tuple(g for g in partition.groups if g.id in plans.calls and g.id not in plans.refused)
    live = {c for g in partition.groups for c in g.members}
    items = tuple(i for i in loops.items if isinstance(i, Opaque) or i in live)
    nodes, inputs, outputs = original.nodes, loops.inputs, loops.outputs
    if only:
        picked = _pick(compiled, plans, only)
        compiled = (picked,)
        items = tuple(picked.members)
        origins = {o for c in picked.members for o in c.origin}
        nodes = tuple(n for n in original.nodes if n.name in origins)
        inputs = tuple(v for v in picked.reads if v not in loops.consts)
        outputs = picked.writes
    schedules = {p.kernel: p for p in plans.plans}
    plan_of = {g.id: schedules[k] for g in compiled if (k := plans.calls[g.id].kernel) in schedules}
    names, programs = _function_names(items), {g.id: program(g) for g in compiled}
    return _View(original, partition, plans, nodes, items, compiled, inputs, outputs, names, plan_of, programs)


def _pick(groups: Sequence[Group], plans: Plans, name: str) -> Group:
    """The group of this name (as `inspect` prints it, or its kernel), number, or with this node or value inside."""
    wanted = name.removeprefix("fused_")
    for g in groups:
        call = plans.calls[g.id]
        if wanted in (call.name, call.kernel.name) or wanted == str(g.id):
            return g
    for g in groups:
        if any(name in (c.out.name, c.node.name, *c.origin) for c in g.members):
            return g
    known = [plans.calls[g.id].name for g in groups]
    near = difflib.get_close_matches(wanted, known, 5, 0.4) or known[:5]
    raise UsageError("E_NO_NAME", f"no group {name!r}", hint=f"groups: {', '.join(near)}" if near else "")


def _function_names(items: Iterable[Item]) -> dict[Compute, str]:
    """One name per distinct loop function: equal loops share it."""
    by_text: dict[str, str] = {}
    taken: set[str] = set()
    out: dict[Compute, str] = {}
    for c in items:
        if not isinstance(c, Compute):
            continue
        alone_graph = LoopGraph("", c.reads, (c,), (c.out,))
        text = "\n".join(line for _, line in lines(alone_graph, canonical=True))
        base = re.sub(r"\W", "_", c.node.op.name.lower())
        if text not in by_text:
            name, k = base, 0
            while name in taken:
                k += 1
                name = f"{base}_{k}"
            taken.add(name)
            by_text[text] = name
        out[c] = by_text[text]
    return out


# -- lines -------------------------------------------------------------------------------------------------------------

_UNIT = Op("unit", 1, Family.OPAQUE)


def _unit(reads: Iterable[Value], makes: Iterable[Value]) -> Node:
    return Node(_UNIT, tuple(reads), tuple(makes), {}, "", ())


def _function_name(name: str) -> str:
    return re.sub(r"[^\w.]", "_", name) or "main"


def _list(values: Iterable[Value]) -> str:
    return ", ".join(value_text(v.name) for v in values)


def _typed(v: Value) -> str:
    return f"{value_text(v.name)}: {v.type if v.type is not None else '?'}"


def _results(values: Sequence[Value]) -> str:
    return f"{_list(values)} = " if values else ""


def _operands(n: Node) -> str:
    ins = ["-" if v is None else value_text(v.name) for v in n.inputs]
    return ", ".join([*ins, *(f"captured {value_text(v.name)}" for v in n.captures)])


def _stays(n: Node) -> str:
    return f"  {_results(n.results)}onnx.{n.op}({_operands(n)}){attributes(n)}"


def _bytes(v: Value) -> str:
    free = any(not isinstance(d, int) for d in v.tensor.shape)
    return f"{'~' if free else ''}{nbytes(v)} B"


def _between(g: Group) -> list[Value]:
    """Values that stay inside the group."""
    return [c.out for c in g.members if c.out not in g.writes]


def _decision(d: Decision, made: Mapping[str, Compute]) -> str:
    numbers = dict(d.numbers)
    kind = numbers.pop("kind", None)
    code = "" if d.verdict is Verdict.FUSED else f" {d.code}" + (f"({kind})" if kind is not None else "")
    if d.verdict is Verdict.FUSED and d.stage == "A":
        numbers["postdom"] = value_text(d.b)[1:]
        reader = made.get(d.b)
        edge = {v.name: e for v, e in kinds(reader).edges.items()}.get(d.a) if reader is not None else None
        numbers["edge"] = str(edge) if edge is not None else "path"
    facts = "".join(f" {k}={v}" for k, v in numbers.items())
    return f"{d.stage} {d.a}->{d.b} {d.verdict.upper()}{code}{facts}"


def _loops(axes: Iterable[Axis]) -> str:
    return " ".join(f"{a.name}<{_extent(a.extent)}" for a in axes)


def _extent(d: Dim) -> str:
    return str(d) if isinstance(d, int | Sym) else f"({d})"


def _apart(axes: Sequence[Axis]) -> dict[Axis, Axis]:
    """Axes of one nest under different names."""
    taken: set[str] = set()
    out: dict[Axis, Axis] = {}
    for a in axes:
        name, k = a.name, 0
        while name in taken:
            k += 1
            name = f"{a.name}.{k}"
        taken.add(name)
        out[a] = a if name == a.name else Axis(name, a.extent)
    return out


def _nest(c: Compute, between: Mapping[Value, Value]) -> Iterator[str]:
    """The loops of one member, reading and writing the buffers."""
    over = c.reduce.axes if c.reduce is not None else ()
    axes = _apart((*c.axes, *over))
    swap: Mapping[Expr, Expr] = {var(a): var(b) for a, b in axes.items() if a is not b}

    def text(e: Expr) -> str:
        return print_expr(substitute(rebuild((e,), buffered)[0], swap))

    def buffered(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.source not in between:
            return None
        return load(between[e.source], e.index, e.dtype)

    target = f"{value_text(between.get(c.out, c.out).name)}[{', '.join(axes[a].name for a in c.axes)}]"
    head = f"  for {_loops(axes[a] for a in c.axes)}" if c.axes else "  once"
    if c.reduce is None:
        yield f"{head} {{ {target} = {text(c.body)} }}"
        return
    yield f"{head} | reduce {_loops(axes[a] for a in over)} {{"
    if c.reduce.finish is None:
        yield f"    {target} {_combine(c.reduce)} {text(c.body)} }}"
        return
    yield f"    acc {_combine(c.reduce)} {text(c.body)}"
    yield f"    {target} = {text(c.reduce.finish)} }}"


def _combine(r: Reduce) -> str:
    return {"add": "+=", "mul": "*="}.get(r.combine.name, f"{r.combine.name}=")


def _stage(s: Stage) -> Iterator[str]:
    indent = "    "
    if s.axes:
        yield f"{indent}for {_loops(s.axes)} {{"
        indent += "  "
    if s.reduce is not None and s.reduce_body is not None:
        yield f"{indent}reduce {_loops(s.reduce.axes)} {{ acc {_combine(s.reduce)} {print_expr(s.reduce_body)} }}"
    for store in s.stores:
        index = ", ".join(print_expr(i) for i in store.index)
        yield f"{indent}{value_text(store.target.name)}[{index}] = {print_expr(store.value)}"
    if s.axes:
        yield "    }"


def _axis_names(made: Program) -> dict[str, str]:
    """Names of a kernel's axes (kernelize: i0.. outer, j0.. inner, in order) -> those of the program it came from."""
    inner: dict[Axis, None] = {}
    for s in made.stages:
        inner.update(dict.fromkeys((*s.axes, *(s.reduce.axes if s.reduce is not None else ()))))
    own = [a for a in inner if a not in made.outer]
    return {f"i{k}": a.name for k, a in enumerate(made.outer)} | {f"j{k}": a.name for k, a in enumerate(own)}


def _schedule(s: Schedule, names: Mapping[str, str]) -> str:
    axes = ".".join(names.get(part, part) for part in re.findall(r"[a-z]+\d*", s.vector)) or "none"
    return str(s).replace(f"vector={s.vector or 'none'}x{s.lanes}", f"vector={axes} lanes={s.lanes}")
