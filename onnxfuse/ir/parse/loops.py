"""Level 2: loops, and the partition of them."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Expr, Lit
from onnxfuse.ir.graph import Constant, Node, Value
from onnxfuse.ir.loops import Axis, Compute, Item, LoopGraph, Opaque, Reduce
from onnxfuse.ir.op import Kind
from onnxfuse.ir.parse.expressions import read_body, read_unary
from onnxfuse.ir.parse.graphs import read_node, stand_in
from onnxfuse.ir.parse.reader import (
    Reader,
    define,
    read_dtype,
    read_int,
    read_string,
    read_strings,
    read_value,
    read_value_name,
    read_word,
)
from onnxfuse.ir.parse.values import (
    read_const,
    read_dim,
    read_head,
    read_scalar,
    read_type,
    read_values,
    resolve,
)
from onnxfuse.ir.partition import Decision, Group, Partition, Relation, Verdict
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import TensorType


def read_axes(r: Reader) -> tuple[Axis, ...]:
    r.need("[")
    found = r.many(lambda: _read_axis(r), "]")
    r.axes = {**r.axes, **dict(found)}
    return tuple(a for _, a in found)


def _read_axis(r: Reader) -> tuple[str, Axis]:
    name = r.take("word")
    r.need("<")
    outer, r.axes = r.axes, {}
    extent = read_dim(r)
    r.axes = outer
    return name, Axis(name, extent)


def _is_reduce(r: Reader) -> bool:
    return r.kind == "word" and r.text in PRIMS and r.tokens[r.at + 1][1] == "["


def read_reduce(r: Reader) -> tuple[Reduce, Expr]:
    combine = PRIMS[r.take("word")]
    axes = read_axes(r)
    r.need("init")
    init = read_unary(r)
    if not isinstance(init, Lit):
        r.fail("a literal")
    r.need("acc")
    dtype = read_dtype(r)
    r.need(":")
    body = read_body(r)
    r.acc = dtype
    finish = read_body(r) if r.eat("->") else None
    if finish is not None:
        r.acc = finish.dtype
    return Reduce(axes, combine, init, dtype, finish), body


def _read_compute(r: Reader) -> Compute:
    name = read_value_name(r)
    r.axes, r.acc = {}, None
    axes = read_axes(r)
    r.need(":")
    whole = r.tokens[r.at + 1][1] == "[" or r.text == "?"
    t = read_type(r) if whole else TensorType(read_dtype(r), tuple(a.extent for a in axes))
    r.need("=")
    reduce: Reduce | None = None
    if _is_reduce(r):
        reduce, body = read_reduce(r)
    else:
        body = read_body(r)
    origin = read_strings(r, "from")
    r.axes, r.acc = {}, None
    out = define(r, name, t)
    node = Node(stand_in("", "text", 1), (), (out,), {}, origin[0] if origin else name, origin)
    made = Compute(out, axes, body, node, reduce)
    return Compute(out, axes, body, Node(node.op, made.reads, (out,), {}, node.name, origin), reduce)


def read_loops(r: Reader) -> LoopGraph:
    name, inputs, outputs = read_head(r, "loops")
    consts: dict[Value, Constant] = {}
    items: list[Item] = []
    r.need("{")
    while not r.eat("}"):
        if r.eat("const"):
            read_const(r, consts)
        elif r.eat("opaque"):
            node = read_node(r)
            r.need("refused")
            items.append(Opaque(node, Refusal(r.take("word"), read_string(r))))
        else:
            items.append(_read_compute(r))
    return LoopGraph(name, inputs, tuple(items), resolve(r, outputs), consts)


def read_partition(r: Reader) -> Partition:
    r.need("partition", "{")
    loops = read_loops(r)
    made = {c.out: c for c in loops.computes()}
    groups: list[Group] = []
    left: list[Opaque] = []
    layouts: dict[Value, str] = {}
    decisions: list[Decision] = []
    while not r.eat("}"):
        if r.eat("group"):
            groups.append(_read_group(r, made))
        elif r.eat("left"):
            left.append(_read_left(r, loops))
            while r.eat(","):
                left.append(_read_left(r, loops))
        elif r.eat("layout"):
            v = read_value(r)
            layouts[v] = read_string(r)
        else:
            r.need("decision")
            decisions.append(_read_decision(r))
    return Partition(loops, tuple(groups), tuple(left), tuple(decisions), layouts)


def _read_left(r: Reader, loops: LoopGraph) -> Opaque:
    item = loops.items[read_int(r)]
    if not isinstance(item, Opaque):
        r.fail("the number of an opaque item")
    return item


def _read_group(r: Reader, made: Mapping[Value, Compute]) -> Group:
    gid = read_int(r)
    kind = Kind(r.take("word"))
    anchor = made[read_value(r)] if r.eat("anchor") else None
    reads = read_values(r)
    r.need("->")
    writes = read_values(r)
    r.need("{")
    members = tuple(made[v] for v in r.many(lambda: read_value(r), "}"))
    return Group(gid, members, kind, anchor, reads, writes)


def _read_decision(r: Reader) -> Decision:
    stage = r.take("word")
    a, b = read_string(r), read_string(r)
    relation, verdict = Relation(r.take("word")), Verdict(r.take("word"))
    code = r.take("word")
    facts: list[tuple[str, int | float | str]] = []
    while r.kind in ("word", "string") and r.tokens[r.at + 1][1] == "=":
        name = read_word(r)
        r.need("=")
        facts.append((name, read_string(r) if r.kind == "string" else read_scalar(r)))
    return Decision(stage, a, b, relation, verdict, code, tuple(facts))
