"""Well-formedness of every level: `check(ir)` raises IRError, with the printed lines around the culprit.

A failure is a bug of ours, never the user's: what a model may get wrong is refused by the frontend. Every rule has a
stable code (`IR_...`) and an example in tests/ir/test_check.py that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from onnxfuse.errors import IRError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Acc, Apply, Expr, Load, Sym, Var, syms_of, walk
from onnxfuse.ir.given import ALL, symbols
from onnxfuse.ir.graph import Graph, Value
from onnxfuse.ir.interp import COMBINE
from onnxfuse.ir.kernel import DimBinding, Kernel, Stage
from onnxfuse.ir.loops import Axis, Compute, LoopGraph, Opaque, depends, results
from onnxfuse.ir.partition import Group, Partition
from onnxfuse.ir.plan import Kernels, Plan, Plans
from onnxfuse.ir.simplify import as_dim, same
from onnxfuse.ir.text import IR, context
from onnxfuse.ir.types import Dim, TensorType

_HALF_PRIMS = frozenset({"cast", "where", "eq", "ne", "lt", "le", "neg", "abs", "copysign", "isnan", "isinf", "bits"})


def check(ir: IR) -> None:
    """Raise IRError unless `ir` keeps every promise of its level."""
    match ir:
        case Graph():
            _graph(ir)
        case LoopGraph():
            _loops(ir)
        case Partition():
            _partition(ir)
        case Kernel():
            _kernel(ir)
        case Plan():
            _kernel(ir.kernel)
        case Kernels():
            _calls(ir, ir.kernels)
        case Plans():
            _calls(ir, tuple(plan.kernel for plan in ir.plans))
        case _:
            raise TypeError(type(ir).__name__)


@dataclass(slots=True)
class _Check:
    """What is checked, what was seen, and how to complain. On hot paths the message is made only when it is needed."""

    ir: IR
    item: object = None
    typed: set[Expr] = field(default_factory=set)  # expressions whose types were found right
    normal: set[Expr] = field(default_factory=set)  # dimensions found in normal form

    def fail(self, code: str, what: str, why: str = "") -> NoReturn:
        raise IRError(code, what, "\n".join(x for x in (why, context(self.ir, self.item)) if x))

    def need(self, ok: bool, code: str, what: str, why: str = "") -> None:
        if not ok:
            self.fail(code, what, why)


# -- shared parts ----------------------------------------------------------------------------------------------------


def _dim(c: _Check, d: Dim, where: str) -> None:
    if isinstance(d, int):
        if d < 0:
            c.fail("IR_DIM", f"{where}: dimension {d} is negative")
    elif d not in c.normal:
        c.need(d.dtype is DType.I64, "IR_DIM", f"{where}: dimension {d} is {d.dtype}, not i64")
        c.need(as_dim(d) is d, "IR_DIM", f"{where}: dimension {d} is not in normal form", f"normal form: {as_dim(d)}")
        c.normal.add(d)


def _type(c: _Check, t: TensorType | None, where: str) -> None:
    for d in t.shape if t is not None else ():
        _dim(c, d, where)


def _distinct(c: _Check, things: Iterable[object], code: str, what: str) -> None:
    seen: set[object] = set()
    for x in things:
        if x in seen:
            c.fail(code, f"{what}: {x}")
        seen.add(x)


def _dims_syms(types: Iterable[TensorType | None]) -> set[Sym]:
    return syms_of(*(d for t in types if t is not None for d in t.shape if isinstance(d, Expr)))


def _given(values: Iterable[Value]) -> set[Sym]:
    """The symbols of elements that can be read at run time."""
    return {s for v in values for _, _, s in symbols(v)}


def _extents(axes: Iterable[Axis]) -> list[Expr]:
    return [a.extent for a in axes if isinstance(a.extent, Expr)]


def _expression(
    c: _Check, root: Expr, axes: Iterable[Axis], syms: set[Sym], acc: DType | None, visible: Callable[[Value], bool]
) -> None:
    """Leaves are bound, loads fit their tensor, primitives get the dtypes of their rule."""
    bound = set(axes)
    for e in walk(root):
        match e:
            case Var():
                if e.axis not in bound:
                    c.fail("IR_AXIS", f"axis {e.axis} is used but not bound here")
            case Sym():
                if e not in syms:
                    c.fail("IR_SYM", f"dimension {e} is bound by no input")
            case Acc():
                if acc is None:
                    c.fail("IR_ACC", "the accumulator is used outside a reduction's result")
                if e.dtype is not acc:
                    c.fail("IR_ACC", f"the accumulator is {acc}, but is used as {e.dtype}")
            case Load():
                if not visible(e.source):
                    c.fail("IR_VALUE", f"{e.source} is read but not defined before")
                if e not in c.typed:
                    _load(c, e)
            case Apply():
                if e not in c.typed:
                    _apply(c, e)
        c.typed.add(e)


def _load(c: _Check, e: Load) -> None:
    t = e.source.type
    if t is None:
        c.fail("IR_LOAD", f"{e.source} is read but has no tensor type")
    if t.dtype is not e.dtype:
        c.fail("IR_DTYPE", f"{e} is typed {e.dtype}, its tensor is {t}")
    if not t.dtype.computable:
        c.fail("IR_DTYPE", f"{e.source} is {t.dtype}: no kernel computes on it")
    if len(e.index) != t.rank:
        c.fail("IR_LOAD", f"{e} has {len(e.index)} indices, its tensor is {t}")
    for i in e.index:
        if i.dtype is not DType.I64:
            c.fail("IR_LOAD", f"index {i} of {e} is {i.dtype}, not i64")


def _apply(c: _Check, e: Apply) -> None:
    prim, args = e.prim, [a.dtype for a in e.args]
    if len(args) != prim.arity:
        c.fail("IR_PRIM", f"{prim} takes {prim.arity} arguments, not {len(args)}")
    match prim.rule:
        case "where":
            right = args[0] is DType.BOOL and args[1] is args[2] is e.dtype
        case "cast":
            right = args[0] is not e.dtype
        case "bits":
            right = args[0] is not e.dtype and args[0].bytes == e.dtype.bytes and DType.BOOL not in (args[0], e.dtype)
        case "logic":
            right = e.dtype is DType.BOOL and all(a is DType.BOOL for a in args)
        case "bool":
            right = e.dtype is DType.BOOL and len(set(args)) == 1
        case _:
            right = all(a is e.dtype for a in args)
    if not right:
        c.fail("IR_DTYPE", f"{prim}({', '.join(args)}) cannot give {e.dtype}", f"in {e}")
    half = any(a.is_half for a in args) and prim.name not in _HALF_PRIMS
    if half:
        c.fail("IR_DTYPE", f"{prim} on {args[0]}: half floats are computed in f32", f"in {e}")


def _result(c: _Check, dtype: DType, wanted: DType, what: str) -> None:
    if dtype is not wanted:
        c.fail("IR_DTYPE", f"{what} is {dtype}, must be {wanted}")


# -- Graph -----------------------------------------------------------------------------------------------------------


def _graph(g: Graph) -> None:
    c = _Check(g, g)
    known: set[Value] = set()
    names: set[str] = set()

    def define(v: Value) -> None:
        c.need(v not in known, "IR_SSA", f"{v} is defined twice")
        c.need(v.name not in names, "IR_NAME", f"two values are called {v}")
        _type(c, v.type, str(v))
        known.add(v)
        names.add(v.name)

    for v in (*g.inputs, *g.consts):
        define(v)
    for v in g.defaults:
        c.need(v in g.inputs, "IR_DEFAULT", f"{v} has a default value but is no input")
    for n in g.nodes:
        c.item = n
        for v in n.reads:
            c.need(v in known, "IR_VALUE", f"node {n.name!r} reads {v}, which is not defined before")
        for v in n.results:
            define(v)
    c.item = g
    for v in g.outputs:
        c.need(v in known, "IR_VALUE", f"output {v} is never defined")


# -- LoopGraph -------------------------------------------------------------------------------------------------------


def _loops(g: LoopGraph) -> None:
    c = _Check(g, g)
    known: set[Value] = {*g.inputs, *g.consts}
    c.need(len(known) == len(g.inputs) + len(g.consts), "IR_SSA", "an input is defined twice")
    for v in known:
        _type(c, v.type, str(v))
    syms = _dims_syms(v.type for v in known) | _given(known)
    for item in g.items:
        c.item = item
        if isinstance(item, Compute):
            _compute(c, item, known, syms)
        else:
            for v in item.reads:
                c.need(v in known, "IR_VALUE", f"node {item.node.name!r} reads {v}, which is not defined before")
            syms |= _dims_syms(v.type for v in item.node.results) | _given(item.node.results)
        for v in results(item):
            c.need(v not in known, "IR_SSA", f"{v} is defined twice")
            _type(c, v.type, str(v))
            known.add(v)
    c.item = g
    for v in g.outputs:
        c.need(v in known, "IR_VALUE", f"output {v} is never defined")


def _compute(c: _Check, x: Compute, known: set[Value], syms: set[Sym]) -> None:
    t = x.out.type
    if t is None:
        c.fail("IR_TYPE", f"{x.out} is computed but has no tensor type")
    c.need(t.dtype.computable, "IR_DTYPE", f"{x.out} is {t.dtype}: no kernel computes it")
    inner = x.reduce.axes if x.reduce is not None else ()
    _distinct(c, (*x.axes, *inner), "IR_AXIS", "an axis is bound twice")
    if len(x.axes) != t.rank:
        c.fail("IR_RANK", f"{x.out} is {t} but has {len(x.axes)} axes")
    for axis, d in zip(x.axes, t.shape, strict=True):
        if axis.extent is not d and not same(axis.extent, d):
            c.fail("IR_RANK", f"axis {axis} runs over a dimension of extent {d} of {x.out}")
    for axis in (*x.axes, *inner):
        _dim(c, axis.extent, f"axis {axis.name}")
    for e in _extents((*x.axes, *inner)):
        _expression(c, e, (), syms, None, known.__contains__)
    _expression(c, x.body, (*x.axes, *inner), syms, None, known.__contains__)
    if x.reduce is None:
        _result(c, x.body.dtype, t.dtype, f"the body of {x.out}")
        return
    _reduce(c, x)
    if x.reduce.finish is not None:
        _expression(c, x.reduce.finish, x.axes, syms, x.reduce.acc, known.__contains__)
    last = x.reduce.acc if x.reduce.finish is None else x.reduce.finish.dtype
    _result(c, last, t.dtype, f"the result of {x.out}")


def _reduce(c: _Check, x: Compute | Stage) -> None:
    r = x.reduce
    assert r is not None
    c.need(r.combine.name in COMBINE, "IR_REDUCE", f"{r.combine} is not associative and commutative")
    _result(c, r.init.dtype, r.acc, "the initial value of the accumulator")
    c.need(not r.acc.is_half, "IR_REDUCE", f"accumulating in {r.acc}: half floats accumulate in f32")


# -- Partition -------------------------------------------------------------------------------------------------------


def _partition(p: Partition) -> None:
    _loops(p.loops)
    c = _Check(p, p)
    place = {item: k for k, item in enumerate(p.loops.items)}
    owner: dict[Compute, Group] = {}
    _distinct(c, (g.id for g in p.groups), "IR_GROUP", "two groups have the number")
    for g in p.groups:
        c.item = g
        c.need(bool(g.members), "IR_GROUP", f"group {g.id} is empty")
        for m in g.members:
            c.need(m in place, "IR_GROUP", f"group {g.id} has {m.out}, which the loops do not")
            c.need(m not in owner, "IR_GROUP", f"{m.out} is in group {g.id} and in another")
            owner[m] = g
        order = [place[m] for m in g.members]
        c.need(order == sorted(order), "IR_GROUP", f"the members of group {g.id} are out of order")
        c.need(g.anchor is None or g.anchor in g.members, "IR_GROUP", f"the anchor of group {g.id} is no member")
    c.item = p
    for x in p.loops.computes():
        c.need(x in owner, "IR_GROUP", f"{x.out} is in no group")
    opaque = [x for x in p.loops.items if isinstance(x, Opaque)]
    c.need(set(p.left) == set(opaque), "IR_GROUP", "the nodes left alone are not the opaque items")
    _borders(c, p)
    _acyclic(c, p, owner)


def _borders(c: _Check, p: Partition) -> None:
    """Each group's reads and writes are what its members say; what a node reads and no code loads must exist too."""
    users: dict[Value, set[int]] = {}
    for g in p.groups:
        for v in {v for m in g.members for v in depends(m)}:
            users.setdefault(v, set()).add(g.id)
    live = set(p.loops.outputs) | {v for o in p.left for v in o.reads}
    for g in p.groups:
        c.item = g
        made = {m.out for m in g.members}
        reads = {v for m in g.members for v in m.reads} - made
        c.need(set(g.reads) == reads and len(reads) == len(g.reads), "IR_GROUP", f"group {g.id} reads something else")
        writes = {v for v in made if v in live or users.get(v, set()) - {g.id}}
        c.need(set(g.writes) == writes, "IR_GROUP", f"group {g.id} writes something else")


def _needs(unit: Group | Opaque) -> set[Value]:
    return set(unit.reads) if isinstance(unit, Opaque) else {v for m in unit.members for v in depends(m)}


def _acyclic(c: _Check, p: Partition, owner: Mapping[Compute, Group]) -> None:
    """Groups stand in a topological order, also through the nodes that were left alone."""
    made: dict[Value, Group | Opaque] = {m.out: g for m, g in owner.items()}
    made |= {v: o for o in p.left for v in o.node.results}
    units: list[Group | Opaque] = [*p.groups, *p.left]
    waits = {u: {made[v] for v in _needs(u) if v in made and made[v] is not u} for u in units}
    rank = {g: k for k, g in enumerate(p.groups)}
    for g in p.groups:
        c.item = g
        for other in waits[g]:
            late = isinstance(other, Group) and rank[other] > rank[g]
            c.need(not late, "IR_ORDER", f"group {g.id} stands before a group it reads from")
    readers: dict[Group | Opaque, list[Group | Opaque]] = {}
    for u, needs in waits.items():
        for other in needs:
            readers.setdefault(other, []).append(u)
    ready = [u for u in units if not waits[u]]
    missing = {u: len(needs) for u, needs in waits.items()}
    done = 0
    while ready:
        u = ready.pop()
        done += 1
        for reader in readers.get(u, ()):
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    stuck = [u for u in units if missing[u]]
    c.item = stuck[0] if stuck else p
    c.need(done == len(units), "IR_ORDER", "groups read from each other in a circle")


# -- Kernel and Plans ------------------------------------------------------------------------------------------------


def _kernel(k: Kernel) -> None:
    c = _Check(k, k)
    private = {x.value for x in k.locals}
    params = (*k.inputs, *k.outputs, *(x.value for x in k.locals))
    _distinct(c, params, "IR_SSA", "a value is declared twice")
    for v in params:
        c.need(v.type is not None and v.type.dtype.computable, "IR_TYPE", f"{v} has no type a kernel can hold")
        _type(c, v.type, str(v))
    c.need(k.consts <= set(k.inputs), "IR_CONST", "a constant is not an input")
    c.need(bool(k.stages) and bool(k.outputs), "IR_KERNEL", "a kernel needs a stage and an output")
    syms = _kernel_dims(c, k)
    shapes = [d for v in (*k.outputs, *private) for d in v.tensor.shape if isinstance(d, Expr)]
    for e in (*shapes, *_extents(k.outer), *(x for pair in k.maybe for x in pair), *k.needs):
        _expression(c, e, (), syms, None, lambda v: False)
    _distinct(c, k.outer, "IR_AXIS", "an axis is bound twice")
    stored: set[Value] = set()
    for s in k.stages:
        c.item = s
        _stage(c, k, s, syms, stored, private)
        stored |= {x.target for x in s.stores}
    c.item = k
    for v in (*k.outputs, *private):
        c.need(v in stored, "IR_STORE", f"{v} is never stored")


def _kernel_dims(c: _Check, k: Kernel) -> set[Sym]:
    syms: set[Sym] = set()
    for b in k.dims:
        c.item = b
        c.need(b.value in k.inputs and _is_place(b), "IR_SYM", f"{b.sym} is bound to no input axis or element")
        c.need(b.scale >= 1, "IR_SYM", f"{b.sym} is bound with scale {b.scale}")
        c.need(b.sym not in syms, "IR_SYM", f"{b.sym} is bound twice")
        syms.add(b.sym)
    for x in k.checks:
        c.item = x
        c.need(x.value in k.inputs and 0 <= x.axis < x.value.tensor.rank, "IR_SYM", f"{x.value} has no axis {x.axis}")
        _expression(c, x.expr, (), syms, None, lambda v: False)
    c.item = k
    return syms


def _is_place(b: DimBinding) -> bool:
    """There is such an axis, element or column."""
    t = b.value.tensor
    if b.part is None:
        return 0 <= b.axis < t.rank
    if b.part.of_all and b.axis == ALL:
        return True
    places = t.size if not b.part.of_all else t.shape[-1] if t.rank else 0
    return isinstance(places, int) and 0 <= b.axis < places


def _stage(c: _Check, k: Kernel, s: Stage, syms: set[Sym], stored: set[Value], private: set[Value]) -> None:
    inner = s.reduce.axes if s.reduce is not None else ()
    _distinct(c, (*k.outer, *s.axes, *inner), "IR_AXIS", "an axis is bound twice")
    for e in _extents((*s.axes, *inner)):
        _expression(c, e, (), syms, None, lambda v: False)

    def visible(v: Value) -> bool:
        return v in k.inputs or (v in private and v in stored)

    axes = (*k.outer, *s.axes)
    dtype: DType | None = None
    c.need((s.reduce is None) == (s.reduce_body is None), "IR_REDUCE", "a reduction without a body, or the reverse")
    if s.reduce is not None and s.reduce_body is not None:
        _reduce(c, s)
        c.need(s.reduce.finish is None, "IR_REDUCE", "in a kernel the finish belongs into the value that is stored")
        _expression(c, s.reduce_body, (*axes, *inner), syms, None, visible)
        dtype = s.reduce.acc
    c.need(bool(s.stores), "IR_STORE", "a stage that stores nothing")
    _distinct(c, (x.target for x in s.stores), "IR_STORE", "a stage stores twice to")
    for x in s.stores:
        t = x.target
        c.need(t in private or t in k.outputs, "IR_STORE", f"{t} is neither an output nor a local")
        c.need(len(x.index) == t.tensor.rank, "IR_STORE", f"{t} is {t.tensor}, stored with {len(x.index)} indices")
        for i in x.index:
            c.need(i.dtype is DType.I64, "IR_STORE", f"index {i} of {t} is {i.dtype}, not i64")
            _expression(c, i, s.axes if t in private else axes, syms, None, visible)
        _expression(c, x.value, axes, syms, dtype, visible)
        _result(c, x.value.dtype, t.tensor.dtype, f"the value stored to {t}")


def _calls(x: Kernels | Plans, kernels: tuple[Kernel, ...]) -> None:
    """Every group has a kernel or a refusal, and every call fits its kernel."""
    for k in kernels:
        _kernel(k)
    c = _Check(x, x)
    _distinct(c, (k.name for k in kernels), "IR_PLAN", "two kernels are called")
    _distinct(c, (call.name for call in x.calls.values()), "IR_PLAN", "two custom nodes are called")
    for gid, call in x.calls.items():
        c.item = call
        c.need(call.kernel in kernels, "IR_PLAN", f"group {gid} calls {call.kernel.name}, which is not there")
        c.need(gid not in x.refused, "IR_PLAN", f"group {gid} has a kernel and is refused")
        pairs = [(call.inputs, [v.tensor for v in call.kernel.inputs]), (call.outputs, list(call.kernel.made))]
        for have, want in pairs:
            c.need(len(have) == len(want), "IR_PLAN", f"group {gid} passes {len(have)} values for {len(want)}")
            for v, t in zip(have, want, strict=True):
                fits = v.type is not None and (v.type.dtype, v.type.rank) == (t.dtype, t.rank)
                c.need(fits, "IR_PLAN", f"group {gid} passes {v}: {v.type} as {t}")
    known = {g.id for p in x.partitions for g in p.groups}
    have_verdict = set(x.calls) | set(x.refused)
    c.item = x
    c.need(have_verdict == known, "IR_PLAN", f"groups without a verdict, or unknown: {sorted(have_verdict ^ known)}")


__all__ = ["check"]
