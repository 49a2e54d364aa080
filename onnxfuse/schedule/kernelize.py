"""Groups become kernels with canonical names. Partition -> Kernels.

In: a partition. Out: distinct kernels and, for every group, the call that ties its values to a kernel's. A group that
cannot be one kernel is split into its members (recorded as NF_ONE_KERNEL); one that only renames memory (a reshape on
its own) stays with the runtime, which does that for free (NF_FREE_VIEW), and so does an operator on single numbers
(NF_TINY).

Kernels have their own values (x0.. inputs, y0.. outputs, t0.. locals), axes and symbols, so two groups of equal
structure print the same text and share one kernel. The text, together with how the group's nodes are wired (the
function body must be shareable too), is the key; its hash is in the kernel's name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxfuse.analysis.maps import offset
from onnxfuse.errors import SLIPS, Refusal, Unsupported, slip
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import FALSE, TRUE, Apply, Expr, Lit, Load, i64, substitute, sym, var
from onnxfuse.ir.graph import Constant, Value, fresh_name
from onnxfuse.ir.kernel import Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Axis, Compute, LoopGraph, depends, symbols_of
from onnxfuse.ir.partition import Decision, Group, Partition, Relation, Verdict, make_group
from onnxfuse.ir.plan import Call, Kernels
from onnxfuse.ir.simplify import as_dim, dim_expr, same, simplify
from onnxfuse.ir.text import show
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.schedule.halves import unrounded, wide_edges
from onnxfuse.schedule.localize import Localizer, broadcasts, input_checks, maybe_pairs
from onnxfuse.schedule.program import Program, program

NAME_OPS = 6  # op names that go into a kernel's name
# Hexadecimal digits of the hash in it. A library may meet nodes of any model: equal names have to mean equal kernels.
NAME_DIGITS = 16


def kernelize(partition: Partition, bodies: Sequence[Partition] = ()) -> Kernels:
    """A kernel for every group of all partitions, which are renumbered (see the module docstring)."""
    made = _Kernelizer({item.node.name for p in (partition, *bodies) for item in p.loops.items})
    main, *inner = [made.add(p) for p in (partition, *bodies)]
    return Kernels(main, tuple(made.kernels.values()), made.calls, made.refused, tuple(inner))


@dataclass(slots=True)
class _Kernelizer:
    """Kernels so far. `names` are those of nodes, `next_id` is the first number no group has."""

    names: set[str]
    kernels: dict[str, Kernel] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    next_id: int = 0

    def add(self, partition: Partition) -> Partition:
        """Kernels for one partition. Returns it with the groups there are now."""
        partition, tails = _absorbed(_numbered(partition, self.next_id))
        edges = _wide_edges(partition)
        groups: list[Group] = []
        decisions: list[Decision] = []
        self.next_id = 1 + max((g.id for g in partition.groups), default=self.next_id - 1)
        for group in partition.groups:
            parts, why = _buildable(group, self.next_id, partition.loops, edges, tails.get(group.id))
            self.next_id += len(parts)
            if why is not None:
                decisions.append(_split_record(group, why))
            for part, made in parts:
                groups.append(part)
                self._call(part, made, edges)
        if not decisions:
            return partition
        return replace(partition, groups=tuple(groups), decisions=partition.decisions + tuple(decisions))

    def _call(self, part: Group, made: Built | Refusal, edges: Edges) -> None:
        if isinstance(made, Refusal):
            self.refused[part.id] = made
            return
        key, kernel, read = made
        shared = self.kernels.setdefault(key, kernel)
        inputs, outputs = _crossing(read, edges), _crossing(part.writes, edges)
        halves = {edges[v]: v for v in (*read, *part.writes) if v in edges}
        self.calls[part.id] = Call(shared, inputs, outputs, fresh_name(_label(part), self.names), halves)


def _wide_edges(partition: Partition) -> Edges:
    """The half values that cross from kernel to kernel in f32."""
    half = any(v.tensor.dtype.is_half for g in partition.groups for v in g.writes)
    return wide_edges(partition, [g for g in partition.groups if _renames(g)]) if half else {}


def _renames(group: Group) -> bool:
    """A reshape on its own."""
    return len(group.members) == 1 and group.members[0].reduce is None and _is_free_view(program(group), _ones(group))


def _crossing(values: Iterable[Value], edges: Edges) -> tuple[Value, ...]:
    return tuple(edges.get(v, v) for v in values)


def _numbered(partition: Partition, first: int) -> Partition:
    """The partition with its groups numbered from `first` on."""
    if first == 0:
        return partition
    groups = tuple(replace(g, id=first + k) for k, g in enumerate(partition.groups))
    return replace(partition, groups=groups)


Built = tuple[str, Kernel, tuple[Value, ...]]
Consts = Mapping[Value, Constant]
Edges = Mapping[Value, Value]  # half values that cross from kernel to kernel in f32, and what stands for them


def _buildable(
    group: Group, next_id: int, loops: LoopGraph, edges: Edges, tail: Compute | None
) -> tuple[list[tuple[Group, Built | Refusal]], Unsupported | None]:
    """The group with its kernel, or its members one by one."""
    try:
        return [(group, _build(group, loops, edges, tail))], None
    except Unsupported as error:
        if len(group.members) == 1 or error.code not in ("NF_ONE_KERNEL", "UN_INTERNAL"):
            return [(group, error.refusal())], None
        why = error
    parts: list[tuple[Group, Built | Refusal]] = []
    for k, c in enumerate(group.members):
        anchor = c if c is group.anchor else None
        single = make_group(next_id + k, (c,), group.kind, anchor, {c.out})
        try:
            parts.append((single, _build(single, loops, edges)))
        except Unsupported as error:
            parts.append((single, error.refusal()))
    return parts, why


def _split_record(group: Group, why: Unsupported) -> Decision:
    first, last = group.members[0].out.name, group.members[-1].out.name
    facts = (("why", why.why or why.what), ("members", len(group.members)))
    return Decision("K", first, last, Relation.VERTICAL, Verdict.REFUSED, why.code, facts)


def _build(group: Group, loops: LoopGraph, edges: Edges, tail: Compute | None = None) -> Built:
    """The group's kernel. Raises Unsupported."""
    try:
        return _kernel(group, loops, edges, tail)
    except SLIPS as error:
        raise slip(error) from error


def _kernel(group: Group, loops: LoopGraph, edges: Edges, tail: Compute | None) -> Built:
    if tail is not None and tail.out in edges:  # what the view renames is stored in f32, too
        source = tail.reads[0]
        edges = {**edges, source: Value(source.name, tensor(DType.F32, source.tensor.shape))}
    stored = group if tail is None else _without(group, tail)
    wide = unrounded(stored, edges)
    made = program(wide)
    # A Cast between half and f32 may be a copy by now; the runtime would round after all.
    if _is_free_view(made, _ones(group)) and (wide is stored or _is_free_view(program(stored), _ones(group))):
        raise Unsupported("NF_FREE_VIEW", "only renames memory; the runtime does that without a copy")
    if _is_one_number(group):
        raise Unsupported("NF_TINY", "one operator on single numbers; calling a kernel costs what it saves")
    try:
        return _Canon(group, made, loops, edges, tail).build()
    except Unsupported as error:
        if error.code != "UN_UNBOUND_DIM":
            raise
    return _Canon(group, made, loops, edges, tail).build(with_data=True)


def _is_one_number(group: Group) -> bool:
    """A node of the model on its own that makes one number of single numbers."""
    if len(group.members) > 1:
        return False
    (c,) = group.members
    sizes = [c.out.tensor.size, *(v.tensor.size for v in c.reads)]
    return c.reduce is None and c.node.name in c.node.origin and all(n == 1 for n in sizes)


def _ones(group: Group) -> dict[Expr, Expr]:
    """Dimensions the members need to be 1 (a squeeze of what is not known before)."""
    needs = [n for c in group.members for n in c.needs if isinstance(n, Apply) and n.prim.name == "eq"]
    pairs = [(n.args[k], n.args[1 - k]) for n in needs for k in (0, 1)]
    return {d: one for d, one in pairs if one is i64(1) and not isinstance(d, Lit)}


def _is_free_view(made: Program, ones: Mapping[Expr, Expr] | None = None) -> bool:
    """One value, read element by element in memory order, where the dimensions in `ones` are 1: a reshape."""
    if len(made.stages) != 1 or made.stages[0].reduce is not None:
        return False
    (store,) = made.stages[0].stores[:1]
    value = store.value
    if len(made.stages[0].stores) != 1 or not isinstance(value, Load) or value.source in made.locals:
        return False
    source, target = value.source.tensor, store.target.tensor
    ours, theirs = ([as_dim(substitute(dim_expr(d), ones or {})) for d in t.shape] for t in (source, target))
    if source.dtype is not target.dtype or not same(_size(ours), _size(theirs)):
        return False
    return offset(value.index, ours) is offset(store.index, theirs)


def _size(shape: Sequence[Dim]) -> Dim:
    out: Expr = i64(1)
    for d in shape:
        out = out * dim_expr(d)
    return as_dim(out)


# --- views at the end of a group ---
def _absorbed(partition: Partition) -> tuple[Partition, dict[int, Compute]]:
    """Groups take over the reshape that is the only reader of what they write: the kernel stores the same memory.

    Returns the partition and, for every such group, the view (its last member).
    """
    groups = {g.id: g for g in partition.groups}
    owner = {v: g.id for g in partition.groups for v in g.writes}
    readers = Counter(v for g in partition.groups for c in g.members for v in dict.fromkeys(depends(c)))
    held = {v for o in partition.left for v in depends(o)} | set(partition.loops.outputs)
    tails: dict[int, Compute] = {}
    for g in partition.groups:
        home = owner.get(g.reads[0]) if len(g.members) == 1 and g.reads else None
        if home is None or home in tails:
            continue
        (view,), source = g.members, g.reads[0]
        fixed = all(v is source or v in partition.loops.consts for v in depends(view))
        if not fixed or readers[source] != 1 or source in held or not _is_free_view(program(g)):
            continue
        host = groups[home]
        writes = tuple(view.out if v is source else v for v in host.writes)
        groups[home] = replace(host, members=(*host.members, view), writes=writes)
        del groups[g.id]
        owner[view.out] = home
        tails[home] = view
    if not tails:
        return partition, {}
    return replace(partition, groups=tuple(g for g in groups.values())), tails


def _without(group: Group, tail: Compute) -> Group:
    """The group before it took over the view."""
    return replace(group, members=group.members[:-1], writes=_stored(group, tail))


def _stored(group: Group, tail: Compute | None) -> tuple[Value, ...]:
    """The values the code writes: what a view at the end renames stands for the view."""
    return group.writes if tail is None else tuple(tail.reads[0] if v is tail.out else v for v in group.writes)


# --- canonical kernels ---------------------------------------------------------------------------------------------
class _Canon:
    """One kernel in canonical names."""

    def __init__(self, group: Group, made: Program, loops: LoopGraph, edges: Edges, tail: Compute | None) -> None:
        self.group = group
        self.stored = _crossing(_stored(group, tail), edges)
        self.writes = _crossing(group.writes, edges)
        self.made = made
        self.consts = loops.consts
        self.facts = loops.facts
        self.read = _call_inputs(group, made, loops.consts)
        self.inputs = _crossing(self.read, edges)
        # Untyped stand-ins first: dimensions can only be written once they are bound.
        self.mine = {v: Value(f"x{k}", v.type) for k, v in enumerate(self.inputs)}
        self.loc = Localizer({}, {})

    def build(self, with_data: bool = False) -> Built:
        """The kernel; `with_data` also reads run-time dimensions from the elements of shape tensors."""
        pairs = [(v, self.mine[v]) for v in self.inputs]
        self.loc.bind(pairs)
        if with_data:
            self.loc.bind_data(pairs, self.facts, symbols_of(self.group.members))
        typed = {v: self._typed(f"x{k}", v, strict=self._is_read(v)) for k, v in enumerate(self.inputs)}
        outputs = {v: self._typed(f"y{k}", v, strict=True) for k, v in enumerate(self.stored)}
        local = {v: self._typed(f"t{k}", v, strict=True) for k, v in enumerate(self.made.locals)}
        axes = self._axes()
        loc = Localizer({var(a): var(b) for a, b in axes.items()}, {**typed, **local}, self.loc.rules, own=self.loc.own)
        targets = {**outputs, **local}
        stages = tuple(self._stage(s, loc, axes, targets) for s in self.made.stages)
        renamed = {self.mine[v]: typed[v] for v in self.inputs}
        bindings = tuple(replace(b, value=renamed[b.value]) for b in self.loc.bindings)
        checks = tuple(replace(c, value=renamed[c.value]) for c in input_checks(self.loc, pairs))
        roots = [r for s in stages for r in s.roots]
        kernel = Kernel(
            name="",
            inputs=tuple(typed[v] for v in self.inputs),
            outputs=tuple(outputs.values()),
            outer=tuple(axes[a] for a in self.made.outer),
            stages=stages,
            locals=tuple(Local(v) for v in local.values()),
            consts=frozenset(typed[v] for v in self.inputs if v in self.consts),
            dims=bindings,
            checks=checks,
            maybe=maybe_pairs(roots, broadcasts(self.loc, self.group.members)),
            needs=tuple(self._needs()),
            renamed=self._renamed(),
        )
        key = show(kernel) + _wiring(self.group, self.read, self.consts)
        digest = hashlib.sha256(key.encode()).hexdigest()[:NAME_DIGITS]
        origin = tuple(dict.fromkeys(o for c in self.group.members for o in c.origin))
        return key, replace(kernel, name=f"{_label(self.group)}_{digest}", origin=origin), self.read

    def _renamed(self) -> tuple[TensorType | None, ...]:
        """Shapes under which the runtime sees outputs that end in a view."""
        if self.stored == self.writes:
            return ()
        pairs = zip(self.writes, self.stored, strict=True)
        seen = [None if w is v else w.tensor for w, v in pairs]
        return tuple(None if t is None else tensor(t.dtype, [self.loc.dim(d) for d in t.shape]) for t in seen)

    def _needs(self) -> Iterator[Expr]:
        """What the members' dimensions must satisfy, each once, in the kernel's symbols."""
        for need in dict.fromkeys(n for c in self.group.members for n in c.needs):
            mine = simplify(self.loc.expr(need))
            if mine is FALSE:
                raise Unsupported("UN_SHAPE_MISMATCH", f"{need} cannot hold")
            if mine is not TRUE:
                yield mine

    def _is_read(self, v: Value) -> bool:
        return any(ld.source is v for s in self.made.stages for ld in s.loads)

    def _typed(self, name: str, v: Value, *, strict: bool) -> Value:
        """The kernel's own value; dimensions of unread inputs may stay unknown (as fresh names)."""
        t = v.tensor
        dims: list[Dim] = []
        for k, d in enumerate(t.shape):
            try:
                dims.append(self.loc.dim(d))
            except Unsupported:
                if strict:
                    raise
                dims.append(sym(f"{name}.{k}"))
        return Value(name, tensor(t.dtype, dims))

    def _axes(self) -> dict[Axis, Axis]:
        out: dict[Axis, Axis] = {}
        for a in self.made.outer:
            out[a] = Axis(f"i{len(out)}", self.loc.dim(a.extent))
        inner = 0
        for s in self.made.stages:
            for a in (*s.axes, *(s.reduce.axes if s.reduce is not None else ())):
                if a not in out:
                    out[a] = Axis(f"j{inner}", self.loc.dim(a.extent))
                    inner += 1
        return out

    def _stage(self, s: Stage, loc: Localizer, axes: dict[Axis, Axis], targets: dict[Value, Value]) -> Stage:
        stores = tuple(
            Store(targets[t.target], tuple(simplify(loc.expr(i)) for i in t.index), simplify(loc.expr(t.value)))
            for t in s.stores
        )
        rule = s.reduce
        if rule is not None:
            rule = replace(rule, axes=tuple(axes[a] for a in rule.axes))
        body = None if s.reduce_body is None else simplify(loc.expr(s.reduce_body))
        return Stage(tuple(axes[a] for a in s.axes), stores, rule, body)


def _call_inputs(group: Group, made: Program, consts: Consts) -> tuple[Value, ...]:
    """What the custom node reads: everything the members' nodes read from outside, except constants no code loads.

    Those (shapes, axes, scalar bounds) are in the kernel as numbers, and in the function body as Constant nodes.
    """
    inside = {c.out for c in group.members}
    loaded = {ld.source for s in made.stages for ld in s.loads}
    out: dict[Value, None] = {}
    for c in group.members:
        for v in c.node.inputs:
            if v is None or v in inside or (v in consts and v not in loaded):
                continue
            out[v] = None
    return tuple(out)


def _label(group: Group) -> str:
    """`conv_add_relu`: the members' ops in order."""
    ops = [c.node.op.name.lower() for c in group.members]
    return "_".join(ops[:NAME_OPS]) + (f"_and_{len(ops) - NAME_OPS}" if len(ops) > NAME_OPS else "")


def _wiring(group: Group, inputs: tuple[Value, ...], consts: Consts) -> str:
    """How the group's nodes are connected, in canonical numbers: equal text, shareable function body."""
    ids = {v: f"x{k}" for k, v in enumerate(inputs)}
    lines = []
    for node in dict.fromkeys(c.node for c in group.members):
        reads = ", ".join(_operand(v, ids, consts) for v in node.inputs)
        for v in node.results:
            ids[v] = f"v{len(ids)}"
        makes = ", ".join(ids[v] if v is not None else "-" for v in node.outputs)
        attrs = ", ".join(f"{k}={_attr(v)}" for k, v in sorted(node.attrs.items()))
        lines.append(f"{makes} = {node.op}@{node.op.since}({reads}) {{{attrs}}}")
    lines.append("return " + ", ".join(ids[v] for v in group.writes))
    return "\n".join(lines)


def _operand(v: Value | None, ids: Mapping[Value, str], consts: Consts) -> str:
    if v is None:
        return "-"
    if v in ids:
        return ids[v]
    array = consts[v].numpy()
    return f"{array.dtype}{list(array.shape)}#{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _attr(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}#{hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return repr(value)
