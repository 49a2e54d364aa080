"""Level 1: nodes with attributes."""

from __future__ import annotations

import json

from onnxfuse.ir.graph import AttrValue, Constant, Foreign, Graph, Node, Value
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.parse.reader import (
    Reader,
    define,
    read_int,
    read_string,
    read_strings,
    read_value,
    read_value_name,
    read_word,
)
from onnxfuse.ir.parse.values import (
    read_array,
    read_const,
    read_data,
    read_head,
    read_scalar,
    read_type,
    read_values,
    resolve,
)
from onnxfuse.ir.types import TensorType


def read_graph(r: Reader) -> Graph:
    name, inputs, outputs = read_head(r, "graph")
    r.need("opset")
    opset = read_int(r)
    imports: dict[str, int] = {}
    if r.eat("imports"):
        r.need("{")
        imports = dict(r.many(lambda: _read_import(r), "}"))
    consts: dict[Value, Constant] = {}
    defaults: dict[Value, Constant] = {}
    nodes: list[Node] = []
    r.need("{")
    while not r.eat("}"):
        if r.eat("const"):
            read_const(r, consts)
        elif r.eat("default"):
            v = read_value(r)
            r.need("=")
            defaults[v] = read_data(r, v.type)
        else:
            nodes.append(read_node(r))
    return Graph(name, inputs, tuple(nodes), resolve(r, outputs), consts, opset, imports, defaults)


def _read_import(r: Reader) -> tuple[str, int]:
    domain = read_string(r)
    r.need(":")
    return domain, read_int(r)


def read_node(r: Reader) -> Node:
    """Outputs are defined after the inputs are read, as in the graph."""
    r.need("(")
    outs = r.many(lambda: None if r.eat("-") else _read_untyped(r), ")")
    r.need("=")
    domain, name = "", read_word(r)
    if r.eat("::"):
        domain, name = name, read_word(r)
    r.need("@")
    op = (r.ops or stand_in)(domain, name, read_int(r))
    r.need("(")
    inputs = r.many(lambda: None if r.eat("-") else read_value(r), ")")
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    if r.eat("{"):
        attrs = r.many(lambda: _read_attr_entry(r), "}")
    captures = read_values(r) if r.eat("captures") else ()
    title = read_string(r) if r.eat("name") else ""
    origin = read_strings(r, "from")
    outputs = tuple(None if o is None else define(r, *o) for o in outs)
    return Node(op, inputs, outputs, dict(attrs), title, origin, captures)


def _read_untyped(r: Reader) -> tuple[str, TensorType | None]:
    name = read_value_name(r)
    r.need(":")
    return name, read_type(r)


def stand_in(domain: str, name: str, since: int) -> Op:
    return Op(name, since, Family.OPAQUE, domain=domain, reason="read from text")


def _read_attr_entry(r: Reader) -> tuple[str, AttrValue]:
    name = read_word(r)
    r.need("=")
    return name, _read_attr(r)


def _read_attr(r: Reader) -> AttrValue:
    if r.eat("foreign"):
        return Foreign(None)
    if r.eat("tensor"):
        start, string = r.at, r.eat("string")
        t = read_type(r) if not string else None
        if string:
            r.need("[")
            r.many(lambda: read_int(r), "]")
        if r.kind == "hash":
            digest = r.take("hash")[1:]
            text = "".join(x[1] for x in r.tokens[start : r.at - 1])
            return r.arrays[digest] if digest in r.arrays else Foreign(f"tensor {text} #{digest}")
        return read_array(r, t)
    if r.eat("["):
        items = r.many(lambda: _read_attr(r), "]")
        return tuple(items)  # type: ignore[return-value]  # one element type per attribute
    if r.kind == "string":
        text = r.take("string")
        return str(json.loads(text[1:])).encode("latin-1") if text.startswith("b") else str(json.loads(text))
    return read_scalar(r)
