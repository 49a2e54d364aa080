"""Reader of the textual form; the grammar is in `ir/text.py`.

Operators are looked up with `ops(domain, name, since)`, or stand-ins without meaning when it is not given. Constants
printed as a hash become `HashConst`, or take their data from `arrays` by hash. The node of a parsed Compute is a
stand-in that reads and writes the same values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import numpy as np

from onnxfuse.errors import IRError, Refusal, UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, Sym, acc, lit, load, make, sym, var
from onnxfuse.ir.graph import ArrayConst, AttrValue, Constant, Foreign, Graph, Node, Value
from onnxfuse.ir.kernel import DimBinding, DimCheck, Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Axis, Compute, Item, LoopGraph, Opaque, Reduce
from onnxfuse.ir.op import Family, Kind, Op
from onnxfuse.ir.partition import Decision, Group, Partition, Relation, Verdict
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import Dim, TensorType

OpLookup = Callable[[str, str, int], Op]
T = TypeVar("T")

_VALUE = r"[A-Za-z0-9_./]+(?::+[A-Za-z0-9_./]+)*"
_STRING = r'"(?:\\.|[^"\\])*"'
_TOKEN = re.compile(
    rf"""(?P<space>\s+|;[^\n]*)
    |(?P<value>%(?:{_STRING}|{_VALUE}))
    |(?P<string>b?{_STRING})
    |(?P<sym>\${_STRING})
    |(?P<hash>\#[0-9a-f]+)
    |(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<sign>->|//|<=|==|!=|::|[-+*/%<>&|()\[\]{{}},:=@?])""",
    re.VERBOSE,
)
_INFIX = {
    "|": ("or", 1), "&": ("and", 2), "<": ("lt", 3), "<=": ("le", 3), "==": ("eq", 3), "!=": ("ne", 3),
    "+": ("add", 4), "-": ("sub", 4), "*": ("mul", 5), "/": ("div", 5), "//": ("floordiv", 5), "%": ("mod", 5),
}  # fmt: skip
_DTYPES = {str(d): d for d in DType}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HashConst:
    """A constant of which only the hash is known."""

    digest: str

    @property
    def nbytes(self) -> int:
        return 0

    def numpy(self) -> np.ndarray:
        raise IRError("IR_CONST", f"the data of constant #{self.digest} is not known", hint="parse(text, arrays=...)")


@dataclass(slots=True)
class _Reader:
    """The tokens, a position, and what names mean here."""

    tokens: list[tuple[str, str, int]]
    ops: OpLookup | None
    arrays: Mapping[str, np.ndarray]
    at: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    lets: dict[str, Expr] = field(default_factory=dict)
    acc: DType | None = None

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def text(self) -> str:
        return self.tokens[self.at][1]

    def fail(self, wanted: str) -> NoReturn:
        got = self.text or "end of text"
        raise UsageError("E_TEXT", f"line {self.tokens[self.at][2]}: expected {wanted}, got {got!r}")

    def take(self, kind: str) -> str:
        if self.kind != kind:
            self.fail(kind)
        text = self.text
        self.at += 1
        return text

    def eat(self, text: str) -> bool:
        """Step over `text` if it is next (never over a string)."""
        if self.kind in ("string", "value") or self.text != text:
            return False
        self.at += 1
        return True

    def need(self, *texts: str) -> None:
        for text in texts:
            if not self.eat(text):
                self.fail(repr(text))

    def many(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """`item , item ... close`; the opening sign is already read."""
        out: list[T] = []
        while not self.eat(close):
            out.append(item())
            if not self.eat(","):
                self.need(close)
                break
        return tuple(out)


def _tokens(text: str) -> list[tuple[str, str, int]]:
    out: list[tuple[str, str, int]] = []
    at, line = 0, 1
    while at < len(text):
        m = _TOKEN.match(text, at)
        if m is None:
            raise UsageError("E_TEXT", f"line {line}: cannot read {text[at : at + 20]!r}")
        if m.lastgroup != "space":
            out.append((str(m.lastgroup), m.group(), line))
        line += m.group().count("\n")
        at = m.end()
    return [*out, ("end", "", line)]


def parse(
    text: str, *, ops: OpLookup | None = None, arrays: Mapping[str, np.ndarray] | None = None
) -> Graph | LoopGraph | Partition | Kernel:
    """Read what `show` printed. UsageError with the line number when it cannot be read."""
    r = _Reader(_tokens(text), ops, arrays or {})
    match r.text:
        case "graph":
            ir: Graph | LoopGraph | Partition | Kernel = _graph(r)
        case "loops":
            ir = _loops(r)
        case "partition":
            ir = _partition(r)
        case "kernel":
            ir = _kernel(r)
        case _:
            r.fail("graph, loops, partition or kernel")
    if r.kind != "end":
        r.fail("end of text")
    return ir


def _as(kind: type[T], ir: object) -> T:
    if not isinstance(ir, kind):
        raise UsageError("E_TEXT", f"expected a {kind.__name__}, got a {type(ir).__name__}")
    return ir


def parse_graph(text: str, ops: OpLookup | None = None, arrays: Mapping[str, np.ndarray] | None = None) -> Graph:
    """`parse` for a Graph."""
    return _as(Graph, parse(text, ops=ops, arrays=arrays))


def parse_loops(text: str, arrays: Mapping[str, np.ndarray] | None = None) -> LoopGraph:
    """`parse` for a LoopGraph."""
    return _as(LoopGraph, parse(text, arrays=arrays))


def parse_partition(text: str) -> Partition:
    """`parse` for a Partition."""
    return _as(Partition, parse(text))


def parse_kernel(text: str) -> Kernel:
    """`parse` for a Kernel."""
    return _as(Kernel, parse(text))


def parse_expr(
    text: str, axes: Iterable[Axis] = (), values: Iterable[Value] = (), acc_dtype: DType | None = None
) -> Expr:
    """One expression over the given axes and values (by name); other names are dimensions."""
    r = _Reader(_tokens(text), None, {}, acc=acc_dtype)
    r.axes = {a.name: a for a in axes}
    r.values = {v.name: v for v in values}
    e = _body(r)
    if r.kind != "end":
        r.fail("end of text")
    return e


# -- expressions -----------------------------------------------------------------------------------------------------


def _body(r: _Reader) -> Expr:
    before = dict(r.lets)
    while r.eat("let"):
        name = r.take("word")
        r.need("=")
        value = _expr(r, 1)
        r.need("in")
        r.lets[name] = value
    e = _expr(r, 1)
    r.lets = before
    return e


def _expr(r: _Reader, prec: int) -> Expr:
    left = _unary(r)
    while r.kind == "sign" and r.text in _INFIX and _INFIX[r.text][1] >= prec:
        name, strength = _INFIX[r.text]
        r.at += 1
        left = _prim(r, name, (left, _expr(r, strength + 1)))
    return left


def _prim(r: _Reader, name: str, args: tuple[Expr, ...]) -> Expr:
    prim = PRIMS[name]
    if len(args) != prim.arity:
        r.fail(f"{prim.arity} arguments of {name}")
    dtype = DType.BOOL if prim.rule in ("bool", "logic") else args[1 if prim.rule == "where" else 0].dtype
    return make(prim, args, dtype)


def _unary(r: _Reader) -> Expr:
    if not r.eat("-"):
        return _atom(r)
    if r.kind == "number" or r.text in ("inf", "nan"):
        return _literal(r, "-")
    return make(PRIMS["neg"], (arg := _unary(r),), arg.dtype)


def _literal(r: _Reader, sign: str = "") -> Lit:
    text = sign + r.text
    whole = r.kind == "number" and not re.search(r"[.eE]", text)
    r.at += 1
    dtype = DType.I64 if whole else DType.F32
    if r.kind == "sign" and r.text == ":" and r.tokens[r.at + 1][1] in _DTYPES:
        r.at += 1
        dtype = _dtype(r)
    return lit(int(text) if whole else float(text), dtype)


def _dtype(r: _Reader) -> DType:
    if r.text not in _DTYPES:
        r.fail("an element type")
    return _DTYPES[r.take("word")]


def _atom(r: _Reader) -> Expr:
    if r.eat("("):
        e = _body(r)
        r.need(")")
        return e
    if r.kind == "number" or r.text in ("inf", "nan"):
        return _literal(r)
    if r.kind == "value":
        source = _value(r)
        r.need("[")
        return load(source, r.many(lambda: _body(r), "]"), source.tensor.dtype)
    if r.kind == "sym":
        return sym(json.loads(r.take("sym")[1:]))
    return _named(r, r.take("word"))


def _named(r: _Reader, word: str) -> Expr:
    if r.eat("("):
        args = r.many(lambda: _body(r), ")")
        if word in _DTYPES and len(args) == 1:
            return make(PRIMS["cast"], args, _DTYPES[word])
        if word.startswith("bits_") and word[5:] in _DTYPES and len(args) == 1:
            return make(PRIMS["bits"], args, _DTYPES[word[5:]])
        if word not in PRIMS:
            r.fail(f"a primitive, not {word}")
        return _prim(r, word, args)
    if word in ("true", "false"):
        return lit(word == "true", DType.BOOL)
    if word == "acc":
        if r.acc is None:
            r.fail("no acc outside a reduction")
        return acc(r.acc)
    if word in r.lets:
        return r.lets[word]
    return var(r.axes[word]) if word in r.axes else sym(word)


# -- values, types, data ---------------------------------------------------------------------------------------------


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _value_name(r: _Reader) -> str:
    return _unquote(r.take("value")[1:])


def _value(r: _Reader) -> Value:
    name = _value_name(r)
    if name not in r.values:
        r.at -= 1
        r.fail("a value defined before")
    return r.values[name]


def _define(r: _Reader, name: str, t: TensorType | None) -> Value:
    if name in r.values:
        r.at -= 1
        r.fail(f"a new name; %{name} is defined twice")
    v = Value(name, t)
    r.values[name] = v
    return v


def _typed(r: _Reader) -> Value:
    name = _value_name(r)
    r.need(":")
    return _define(r, name, _type(r))


def _dim(r: _Reader) -> Dim:
    e = _expr(r, 4)
    return int(e.value) if isinstance(e, Lit) else e


def _type(r: _Reader) -> TensorType | None:
    if r.eat("?"):
        return None
    dtype = _dtype(r)
    r.need("[")
    outer, r.axes = r.axes, {}
    shape = r.many(lambda: _dim(r), "]")
    r.axes = outer
    return TensorType(dtype, shape)


def _values_named(r: _Reader) -> tuple[str, ...]:
    r.need("(")
    return r.many(lambda: _value_name(r), ")")


def _values(r: _Reader) -> tuple[Value, ...]:
    r.need("(")
    return r.many(lambda: _value(r), ")")


def _resolve(r: _Reader, names: Iterable[str]) -> tuple[Value, ...]:
    missing = [n for n in names if n not in r.values]
    if missing:
        r.fail(f"outputs that are defined, not %{missing[0]}")
    return tuple(r.values[n] for n in names)


def _data(r: _Reader, t: TensorType | None) -> Constant:
    if r.kind == "hash":
        digest = r.take("hash")[1:]
        return ArrayConst(r.arrays[digest]) if digest in r.arrays else HashConst(digest)
    return ArrayConst(_array(r, t))


def _array(r: _Reader, t: TensorType | None) -> np.ndarray:
    r.need("{")
    if t is None or not t.static:
        r.fail("data of a known shape")
    items = r.many(lambda: _scalar(r), "}")
    shape = tuple(d for d in t.shape if isinstance(d, int))
    return np.array(items, dtype=np.float64 if t.dtype.is_float else t.dtype.numpy).astype(t.dtype.numpy).reshape(shape)


def _scalar(r: _Reader) -> int | float | bool:
    if r.text in ("true", "false"):
        return r.take("word") == "true"
    sign = "-" if r.eat("-") else ""
    if r.kind != "number" and r.text not in ("inf", "nan"):
        r.fail("a number")
    text = sign + r.text
    r.at += 1
    return float(text) if re.search(r"[.eEn]", text) else int(text)


def _const(r: _Reader, consts: dict[Value, Constant]) -> None:
    v = _typed(r)
    r.need("=")
    consts[v] = _data(r, v.type)


def _strings(r: _Reader, word: str) -> tuple[str, ...]:
    if not r.eat(word):
        return ()
    out = [_string(r)]
    while r.eat(","):
        out.append(_string(r))
    return tuple(out)


def _string(r: _Reader) -> str:
    return str(json.loads(r.take("string")))


def _int(r: _Reader) -> int:
    return int(r.take("number")) if not r.eat("-") else -int(r.take("number"))


def _word(r: _Reader) -> str:
    return _string(r) if r.kind == "string" else r.take("word")


# -- Graph -----------------------------------------------------------------------------------------------------------


def _graph(r: _Reader) -> Graph:
    r.need("graph")
    name = _string(r)
    r.need("(")
    inputs = r.many(lambda: _typed(r), ")")
    r.need("->")
    outputs = _values_named(r)
    r.need("opset")
    opset = _int(r)
    imports: dict[str, int] = {}
    if r.eat("imports"):
        r.need("{")
        imports = dict(r.many(lambda: _import(r), "}"))
    consts: dict[Value, Constant] = {}
    defaults: dict[Value, Constant] = {}
    nodes: list[Node] = []
    r.need("{")
    while not r.eat("}"):
        if r.eat("const"):
            _const(r, consts)
        elif r.eat("default"):
            v = _value(r)
            r.need("=")
            defaults[v] = _data(r, v.type)
        else:
            nodes.append(_node(r))
    return Graph(name, inputs, tuple(nodes), _resolve(r, outputs), consts, opset, imports, defaults)


def _import(r: _Reader) -> tuple[str, int]:
    domain = _string(r)
    r.need(":")
    return domain, _int(r)


def _node(r: _Reader) -> Node:
    """Outputs are defined after the inputs are read, as in the graph."""
    r.need("(")
    outs = r.many(lambda: None if r.eat("-") else _untyped(r), ")")
    r.need("=")
    domain, name = "", _word(r)
    if r.eat("::"):
        domain, name = name, _word(r)
    r.need("@")
    op = (r.ops or _stand_in)(domain, name, _int(r))
    r.need("(")
    inputs = r.many(lambda: None if r.eat("-") else _value(r), ")")
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    if r.eat("{"):
        attrs = r.many(lambda: _attr_entry(r), "}")
    captures = _values(r) if r.eat("captures") else ()
    title = _string(r) if r.eat("name") else ""
    origin = _strings(r, "from")
    outputs = tuple(None if o is None else _define(r, *o) for o in outs)
    return Node(op, inputs, outputs, dict(attrs), title, origin, captures)


def _untyped(r: _Reader) -> tuple[str, TensorType | None]:
    name = _value_name(r)
    r.need(":")
    return name, _type(r)


def _stand_in(domain: str, name: str, since: int) -> Op:
    return Op(name, since, Family.OPAQUE, domain=domain, reason="read from text")


def _attr_entry(r: _Reader) -> tuple[str, AttrValue]:
    name = _word(r)
    r.need("=")
    return name, _attr(r)


def _attr(r: _Reader) -> AttrValue:
    if r.eat("foreign"):
        return Foreign(None)
    if r.eat("tensor"):
        start, string = r.at, r.eat("string")
        t = _type(r) if not string else None
        if string:
            r.need("[")
            r.many(lambda: _int(r), "]")
        if r.kind == "hash":
            digest = r.take("hash")[1:]
            text = "".join(x[1] for x in r.tokens[start : r.at - 1])
            return r.arrays[digest] if digest in r.arrays else Foreign(f"tensor {text} #{digest}")
        return _array(r, t)
    if r.eat("["):
        items = r.many(lambda: _attr(r), "]")
        return tuple(items)  # type: ignore[return-value]  # one element type per attribute
    if r.kind == "string":
        text = r.take("string")
        return str(json.loads(text[1:])).encode("latin-1") if text.startswith("b") else str(json.loads(text))
    return _scalar(r)


# -- LoopGraph -------------------------------------------------------------------------------------------------------


def _axes(r: _Reader) -> tuple[Axis, ...]:
    r.need("[")
    found = r.many(lambda: _axis(r), "]")
    r.axes = {**r.axes, **dict(found)}
    return tuple(a for _, a in found)


def _axis(r: _Reader) -> tuple[str, Axis]:
    name = r.take("word")
    r.need("<")
    outer, r.axes = r.axes, {}
    extent = _dim(r)
    r.axes = outer
    return name, Axis(name, extent)


def _is_reduce(r: _Reader) -> bool:
    return r.kind == "word" and r.text in PRIMS and r.tokens[r.at + 1][1] == "["


def _reduce(r: _Reader) -> tuple[Reduce, Expr]:
    combine = PRIMS[r.take("word")]
    axes = _axes(r)
    r.need("init")
    init = _unary(r)
    if not isinstance(init, Lit):
        r.fail("a literal")
    r.need("acc")
    dtype = _dtype(r)
    r.need(":")
    body = _body(r)
    r.acc = dtype
    finish = _body(r) if r.eat("->") else None
    if finish is not None:
        r.acc = finish.dtype
    return Reduce(axes, combine, init, dtype, finish), body


def _compute(r: _Reader) -> Compute:
    name = _value_name(r)
    r.axes, r.acc = {}, None
    axes = _axes(r)
    r.need(":")
    whole = r.tokens[r.at + 1][1] == "[" or r.text == "?"
    t = _type(r) if whole else TensorType(_dtype(r), tuple(a.extent for a in axes))
    r.need("=")
    reduce: Reduce | None = None
    if _is_reduce(r):
        reduce, body = _reduce(r)
    else:
        body = _body(r)
    origin = _strings(r, "from")
    r.axes, r.acc = {}, None
    out = _define(r, name, t)
    node = Node(_stand_in("", "text", 1), (), (out,), {}, origin[0] if origin else name, origin)
    made = Compute(out, axes, body, node, reduce)
    return Compute(out, axes, body, Node(node.op, made.reads, (out,), {}, node.name, origin), reduce)


def _loops(r: _Reader) -> LoopGraph:
    r.need("loops")
    name = _string(r)
    r.need("(")
    inputs = r.many(lambda: _typed(r), ")")
    r.need("->")
    outputs = _values_named(r)
    consts: dict[Value, Constant] = {}
    items: list[Item] = []
    r.need("{")
    while not r.eat("}"):
        if r.eat("const"):
            _const(r, consts)
        elif r.eat("opaque"):
            node = _node(r)
            r.need("refused")
            items.append(Opaque(node, Refusal(r.take("word"), _string(r))))
        else:
            items.append(_compute(r))
    return LoopGraph(name, inputs, tuple(items), _resolve(r, outputs), consts)


# -- Partition -------------------------------------------------------------------------------------------------------


def _partition(r: _Reader) -> Partition:
    r.need("partition", "{")
    loops = _loops(r)
    made = {c.out: c for c in loops.computes()}
    groups: list[Group] = []
    left: list[Opaque] = []
    layouts: dict[Value, str] = {}
    decisions: list[Decision] = []
    while not r.eat("}"):
        if r.eat("group"):
            groups.append(_group(r, made))
        elif r.eat("left"):
            left.append(_left(r, loops))
            while r.eat(","):
                left.append(_left(r, loops))
        elif r.eat("layout"):
            v = _value(r)
            layouts[v] = _string(r)
        else:
            r.need("decision")
            decisions.append(_decision(r))
    return Partition(loops, tuple(groups), tuple(left), tuple(decisions), layouts)


def _left(r: _Reader, loops: LoopGraph) -> Opaque:
    item = loops.items[_int(r)]
    if not isinstance(item, Opaque):
        r.fail("the number of an opaque item")
    return item


def _group(r: _Reader, made: Mapping[Value, Compute]) -> Group:
    gid = _int(r)
    kind = Kind(r.take("word"))
    anchor = made[_value(r)] if r.eat("anchor") else None
    reads = _values(r)
    r.need("->")
    writes = _values(r)
    r.need("{")
    members = tuple(made[v] for v in r.many(lambda: _value(r), "}"))
    return Group(gid, members, kind, anchor, reads, writes)


def _decision(r: _Reader) -> Decision:
    stage = r.take("word")
    a, b = _string(r), _string(r)
    relation, verdict = Relation(r.take("word")), Verdict(r.take("word"))
    code = r.take("word")
    facts: list[tuple[str, int | float | str]] = []
    while r.kind in ("word", "string") and r.tokens[r.at + 1][1] == "=":
        name = _word(r)
        r.need("=")
        facts.append((name, _string(r) if r.kind == "string" else _scalar(r)))
    return Decision(stage, a, b, relation, verdict, code, tuple(facts))


# -- Kernel ----------------------------------------------------------------------------------------------------------


def _kernel(r: _Reader) -> Kernel:
    r.need("kernel")
    name = _string(r)
    consts: list[Value] = []

    def param() -> Value:
        const = r.eat("const")
        v = _typed(r)
        consts.extend([v] if const else [])
        return v

    r.need("(")
    inputs = r.many(param, ")")
    r.need("->", "(")
    renamed: list[TensorType | None] = []

    def result() -> Value:
        v = _typed(r)
        renamed.append(_type(r) if r.eat("as") else None)
        return v

    outputs = r.many(result, ")")
    r.need("outer")
    outer = _axes(r)
    shared = r.axes
    origin = _strings(r, "from")
    dims: list[DimBinding] = []
    checks: list[DimCheck] = []
    maybe: list[tuple[Expr, Expr]] = []
    needs: list[Expr] = []
    buffers: list[Local] = []
    stages: list[Stage] = []
    r.need("{")
    while not r.eat("}"):
        r.axes, r.acc = {}, None
        if r.eat("dim"):
            dims.append(_binding(r))
        elif r.eat("check"):
            v, axis = _shape(r)
            r.need("==")
            checks.append(DimCheck(v, axis, _expr(r, 1)))
        elif r.eat("maybe"):
            pair = _expr(r, 4)
            r.need("==")
            maybe.append((pair, _expr(r, 4)))
        elif r.eat("need"):
            needs.append(_expr(r, 1))
        elif r.eat("local"):
            buffers.append(Local(_typed(r)))
        else:
            r.axes = shared
            stages.append(_stage(r))
    return Kernel(
        name, inputs, outputs, outer, tuple(stages), tuple(buffers), frozenset(consts), tuple(dims), tuple(checks),
        tuple(maybe), origin, tuple(needs), tuple(renamed) if any(renamed) else (),
    )  # fmt: skip


def _shape(r: _Reader) -> tuple[Value, int]:
    r.need("shape")
    return _place(r)


def _place(r: _Reader) -> tuple[Value, int]:
    r.need("(")
    v = _value(r)
    r.need(",")
    axis = _int(r)
    r.need(")")
    return v, axis


def _binding(r: _Reader) -> DimBinding:
    name = _atom(r)
    if not isinstance(name, Sym):
        r.fail("a dimension name")
    r.need("=")
    data = r.eat("data")
    v, axis = _place(r) if data else _shape(r)
    offset = _int(r) if r.eat("-") else 0
    scale = _int(r) if r.eat("/") else 1
    return DimBinding(name, v, axis, scale, offset, bool(data))


def _stage(r: _Reader) -> Stage:
    r.need("stage")
    axes = _axes(r)
    reduce: Reduce | None = None
    body: Expr | None = None
    if not r.eat("{"):
        reduce, body = _reduce(r)
        r.need("{")
    stores: list[Store] = []
    while not r.eat("}"):
        target = _value(r)
        r.need("[")
        index = r.many(lambda: _body(r), "]")
        r.need("=")
        stores.append(Store(target, index, _body(r)))
    return Stage(axes, tuple(stores), reduce, body)
