"""Text of every level: the grammar and the printer (the reader is `ir/parse`).

Printing is deterministic and `same(parse(str(x)), x)` holds.

Layout is free; `;` starts a comment. A name that is not plain is quoted: %"a b", $"batch size".

    graph     = "graph" STR "(" [typed {"," typed}] ")" "->" "(" [value {"," value}] ")" "opset" INT
                ["imports" "{" STR ":" INT {"," ...} "}"] "{" {const | default | node} "}"
    loops     = "loops" STR "(" typed... ")" "->" "(" value... ")" "{" {const | compute | "opaque" node refused} "}"
    partition = "partition" "{" loops {group} ["left" INT {"," INT}] {layout} {decision} "}"
    kernel    = "kernel" STR "(" {["const"] typed} ")" "->" "(" {typed ["as" type]} ")" "outer" axes
                ["from" STR {"," STR}] "{" {dim | check | maybe | need | local | stage} "}"

    typed     = value ":" type                          type = DTYPE "[" [expr {"," expr}] "]" | "?"
    const     = "const" typed "=" data                  data = "{" scalar {"," scalar} "}" | "#" HASH
    default   = "default" value "=" data
    node      = "(" [typed | "-"] ... ")" "=" [DOMAIN "::"] OP "@" INT "(" [value | "-"] ... ")"
                ["{" NAME "=" attr {"," ...} "}"] ["captures" "(" value... ")"] ["name" STR] ["from" STR {"," STR}]
    attr      = scalar | STR | b STR | "[" ... "]" | "tensor" type data | "foreign"
    compute   = value axes ":" (DTYPE | type) "=" [reduce ":"] body ["->" body] ["from" STR {"," STR}]
    reduce    = PRIM axes "init" literal "acc" DTYPE    (after "->": the finish, over `acc`)
    refused   = "refused" CODE STR
    group     = "group" INT KIND ["anchor" value] "(" value... ")" "->" "(" value... ")" "{" value... "}"
    layout    = "layout" value STR
    decision  = "decision" STAGE STR STR RELATION VERDICT CODE {NAME "=" (scalar | STR)}
    dim       = "dim" sym "=" ("shape" | "data") "(" value "," INT ")" ["-" OFFSET] ["/" SCALE]
    check     = "check" "shape" "(" value "," INT ")" "==" expr
    maybe     = "maybe" expr "==" expr
    need      = "need" expr                             (a comparison of dimensions)
    local     = "local" typed
    stage     = "stage" axes [reduce ":" body ["->" body]] "{" {value "[" expr... "]" "=" body} "}"
    axes      = "[" [NAME "<" expr {"," ...}] "]"

    body      = {"let" NAME "=" expr "in"} expr         shared parts of large bodies
    expr      = | & (< <= == !=) (+ -) (* / // %) in Python's order, unary -, PRIM(...), DTYPE(x) = cast, bits_DTYPE(x),
                value[index], axis or dimension name, acc, literal, "(" body ")"
    literal   = 3 (i64) | 1.5 (f32) | true | inf | nan | 3:i32, 1.5:f64 (any other dtype)

Kernels and Plans are printed (who calls what, then each kernel after its schedule) but not parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Acc, Apply, Expr, Lit, Load, Sym, Var, children, syms_of, walk
from onnxfuse.ir.graph import ArrayConst, AttrValue, Constant, Foreign, Graph, Node, Value
from onnxfuse.ir.kernel import Kernel, Stage
from onnxfuse.ir.loops import Axis, Compute, LoopGraph, Opaque, Reduce
from onnxfuse.ir.partition import Group, Partition
from onnxfuse.ir.plan import Call, Kernels, Plan, Plans
from onnxfuse.ir.types import Dim, TensorType

IR = Graph | LoopGraph | Partition | Kernel | Kernels | Plan | Plans
Line = tuple[object, str]  # what a line is about (an item, or None), and the line

# -- expressions -----------------------------------------------------------------------------------------------------

_BARE_LIMIT = 600  # characters of one operand list printed without let-lines
_LET_TREE = 60  # nodes of an expanded body from which shared parts get a let-line
_LET_SIZE = 120  # nodes of one line
_LET_DEPTH = 40  # nesting of one line: keeps the parser's recursion bounded
_INFIX = {
    "or": ("|", 1), "and": ("&", 2), "lt": ("<", 3), "le": ("<=", 3), "eq": ("==", 3), "ne": ("!=", 3),
    "add": ("+", 4), "sub": ("-", 4), "mul": ("*", 5), "div": ("/", 5), "floordiv": ("//", 5), "mod": ("%", 5),
}  # fmt: skip
_UNARY = 6
_ATOM = 7
_IDENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_VALUE = re.compile(r"[A-Za-z0-9_./]+(?::+[A-Za-z0-9_./]+)*")
_LET_NAME = re.compile(r"_[0-9]+")
_RESERVED = frozenset({"inf", "nan", "true", "false", "acc", "let", "in", "init", "from", "stage", "refused"})


def print_expr(e: Expr) -> str:
    """Infix text of one expression; axes and values by their own names.

    Memoised on the expression. A body too large for one line is printed as `let _0 = ... in ...`, linear in the
    number of distinct sub-expressions.
    """
    stack = [e]
    while stack:
        top = stack[-1]
        parts = children(top)
        missing = [] if top.text else [c for c in parts if not c.text]
        if missing:
            stack.extend(missing)
            continue
        if not top.text:
            if sum(len(c.text) for c in parts) > _BARE_LIMIT:
                e.text = _flat(e)
                return e.text
            top.text = _node_text(top, [c.text for c in parts], [_prec(c) for c in parts], None)
        stack.pop()
    return e.text


def _flat(e: Expr) -> str:
    lets, text = _body_text(e, None)
    return " ".join([f"let {name} = {line} in" for name, line in lets] + [text])


def quote(name: str) -> str:
    """A string in double quotes, escapes as in JSON."""
    return json.dumps(name)


def _sym_text(name: str) -> str:
    plain = _IDENT.fullmatch(name) and name not in _RESERVED and not _LET_NAME.fullmatch(name)
    return name if plain else "$" + quote(name)


def value_text(name: str) -> str:
    """How a value of this name is written."""
    return f"%{name}" if _VALUE.fullmatch(name) else "%" + quote(name)


class Names:
    """Printed names of values and axes; made per printed object, so that clashes get `.1`.

    With `canonical`, names are numbers in order of appearance: the form `same` compares. Without `data`, constants
    print as `#0` and are not read.
    """

    __slots__ = ("axes", "canonical", "data", "taken", "values")

    def __init__(self, canonical: bool = False, data: bool = True) -> None:
        self.canonical = canonical
        self.data = data
        self.values: dict[Value, str] = {}
        self.axes: dict[Axis, str] = {}
        self.taken: set[str] = set()

    def value(self, v: Value) -> str:
        """The name of a value, chosen at its first mention."""
        found = self.values.get(v)
        if found is None:
            name, k = (f"{len(self.values)}" if self.canonical else v.name), 0
            found = value_text(name)
            while found in self.taken:
                k += 1
                found = value_text(f"{name}.{k}")
            self.taken.add(found)
            self.values[v] = found
        return found

    def scope(self, axes: Iterable[Axis], roots: Iterable[Expr]) -> None:
        """Name the axes of one statement: apart from each other and from the dimensions it uses."""
        roots = list(roots)
        axes = [a for a in dict.fromkeys(axes) if a not in self.axes]
        taken = {_sym_text(x.name) for x in syms_of(*roots, *(a.extent for a in axes if isinstance(a.extent, Expr)))}
        taken |= set(self.axes.values())
        for axis in axes:
            base = f"i{len(self.axes)}" if self.canonical else re.sub(r"[^A-Za-z0-9_.]", "_", axis.name)
            if not _IDENT.fullmatch(base) or base in _RESERVED or _LET_NAME.fullmatch(base):
                base = f"i_{base}"
            name, k = base, 0
            while name in taken:
                k += 1
                name = f"{base}.{k}"
            taken.add(name)
            self.axes[axis] = name


def lit_text(e: Lit) -> str:
    """`3` is i64, `1.5` is f32, `true` bool; any other dtype is written `3:i32`."""
    if e.dtype is DType.BOOL:
        return "true" if e.value else "false"
    if not e.dtype.is_float:
        return f"{e.value}" if e.dtype is DType.I64 else f"{e.value}:{e.dtype}"
    text = _float(float(e.value), e.dtype)
    return text if e.dtype is DType.F32 else f"{text}:{e.dtype}"


def _float(value: float, dtype: DType) -> str:
    """The shortest text that reads back as the same value of `dtype`."""
    if math.isnan(value):
        return "-nan" if math.copysign(1.0, value) < 0 else "nan"
    return str(np.float32(value)) if dtype is DType.F32 and math.isfinite(value) else repr(value)


def _prec(e: Expr) -> int:
    if isinstance(e, Apply):
        if e.prim.name in _INFIX:
            return _INFIX[e.prim.name][1]
        if e.prim.name == "neg":
            return _ATOM if isinstance(e.args[0], Lit) else _UNARY
    return _ATOM


def _node_text(e: Expr, parts: Sequence[str], precs: Sequence[int], names: Names | None) -> str:
    """Text of one node from the texts of its children; `precs` are the binding strengths of those texts."""
    match e:
        case Lit():
            return lit_text(e)
        case Var():
            return names.axes.get(e.axis, e.axis.name) if names else e.axis.name
        case Sym():
            return _sym_text(e.name)
        case Acc():
            return "acc"
        case Load():
            source = names.value(e.source) if names else value_text(e.source.name)
            return f"{source}[{', '.join(parts)}]"
        case Apply():
            return _apply_text(e, parts, precs)
    raise TypeError(type(e).__name__)


def _apply_text(e: Apply, parts: Sequence[str], precs: Sequence[int]) -> str:
    name = e.prim.name
    precs = [0 if p.startswith("let ") else q for p, q in zip(parts, precs, strict=True)]
    if name in _INFIX and len(parts) == 2:
        sign, prec = _INFIX[name]
        strict_left = prec == 3  # comparisons do not chain
        left = f"({parts[0]})" if precs[0] < prec or (strict_left and precs[0] == prec) else parts[0]
        right = f"({parts[1]})" if precs[1] <= prec else parts[1]
        return f"{left} {sign} {right}"
    if name == "neg" and len(parts) == 1 and not isinstance(e.args[0], Lit):
        return f"-({parts[0]})" if precs[0] <= _UNARY else f"-{parts[0]}"
    word = {"cast": f"{e.dtype}", "bits": f"bits_{e.dtype}"}.get(name, name)
    return f"{word}({', '.join(parts)})"


def _body_text(root: Expr, names: Names | None, first: int = 0) -> tuple[list[tuple[str, str]], str]:
    """Let-lines and the final expression. Small bodies have no lets; shared and oversized parts get one each."""
    order = list(walk(root))
    tree: dict[int, int] = {}
    uses: dict[int, int] = {}
    for e in order:
        tree[id(e)] = min(1 + sum(tree[id(c)] for c in children(e)), 1 << 60)
        for c in children(e):
            uses[id(c)] = uses.get(id(c), 0) + 1
    big = tree[id(root)] > _LET_TREE
    size: dict[int, int] = {}
    depth: dict[int, int] = {}
    text: dict[int, tuple[str, int]] = {}
    lets: list[tuple[str, str]] = []
    for e in order:
        parts = children(e)
        size[id(e)] = 1 + sum(size[id(c)] for c in parts)
        depth[id(e)] = 1 + max((depth[id(c)] for c in parts), default=0)
        got = [text[id(c)] for c in parts]
        line = _node_text(e, [t for t, _ in got], [p for _, p in got], names)
        shared = big and uses.get(id(e), 0) > 1 and size[id(e)] > 3
        if e is not root and (shared or size[id(e)] > _LET_SIZE or depth[id(e)] > _LET_DEPTH):
            name = f"_{first + len(lets)}"
            lets.append((name, line))
            text[id(e)], size[id(e)], depth[id(e)] = (name, _ATOM), 1, 1
        else:
            text[id(e)] = (line, _prec(e))
    return lets, text[id(root)][0]


def _body_lines(root: Expr, names: Names, indent: str) -> list[str]:
    """The lines of a body: one when there are no lets, else each on its own line below."""
    lets, text = _body_text(root, names)
    if not lets:
        return [text]
    return ["", *(f"{indent}let {name} = {line} in" for name, line in lets), f"{indent}{text}"]


# -- shared parts ----------------------------------------------------------------------------------------------------


def _dim(d: Dim) -> str:
    return str(d)


def _type(t: TensorType | None) -> str:
    return "?" if t is None else str(t)


def _typed(v: Value, names: Names) -> str:
    return f"{names.value(v)}: {_type(v.type)}"


def _list(values: Iterable[Value], names: Names) -> str:
    return ", ".join(names.value(v) for v in values)


def _axes(axes: Sequence[Axis], names: Names) -> str:
    return "[" + ", ".join(f"{names.axes[a]}<{_dim(a.extent)}" for a in axes) + "]"


def _strings(word: str, strings: Sequence[str], names: Names) -> str:
    return f" {word} " + ", ".join(quote(x) for x in strings) if strings and not names.canonical else ""


_HASHES: weakref.WeakKeyDictionary[Constant, str] = weakref.WeakKeyDictionary()
SHORT = 8  # constants of at most so many elements print in full


def digest(array: np.ndarray) -> str:
    """Short content hash of an array: dtype, shape and bytes."""
    h = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=6)
    h.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    return h.hexdigest()


def _data(const: Constant, names: Names) -> str:
    if not names.data:
        return "#0"
    known = getattr(const, "digest", None)
    if isinstance(known, str):
        return f"#{known}"
    try:
        found = _HASHES.get(const)
        if found is None:
            _HASHES[const] = found = _array(const.numpy())
    except TypeError:  # a constant that cannot be weakly referenced is hashed every time
        found = _array(const.numpy())
    return found


def _array(array: np.ndarray) -> str:
    dtype = None if array.dtype.hasobject else DType.from_numpy(array.dtype)
    if array.size > SHORT or dtype is None:
        return f"#{digest(array)}"
    return "{" + ", ".join(_scalar(x, dtype) for x in array.reshape(-1).tolist()) + "}"


def _scalar(x: float | int | bool, dtype: DType) -> str:
    if dtype is DType.BOOL:
        return "true" if x else "false"
    if not dtype.is_float:
        return str(x)
    return _float(float(x), dtype)


def _consts(consts: Mapping[Value, Constant], names: Names) -> Iterator[Line]:
    for v, c in consts.items():
        yield v, f"  const {_typed(v, names)} = {_data(c, names)}"


# -- Graph -----------------------------------------------------------------------------------------------------------


def _attr(a: AttrValue) -> str:
    match a:
        case bool() | int():
            return str(int(a))
        case float():
            return _float(a, DType.F64)
        case str():
            return quote(a)
        case bytes():
            return "b" + quote(a.decode("latin-1"))
        case tuple():
            return "[" + ", ".join(_attr(x) for x in a) + "]"
        case np.ndarray():
            dtype = None if a.dtype.hasobject else DType.from_numpy(a.dtype)
            shape = ",".join(str(n) for n in a.shape)
            return f"tensor {dtype or 'string'}[{shape}] {_array(a)}"
        case Foreign():
            return a.attr if isinstance(a.attr, str) else "foreign"  # text: a tensor known by hash only
    raise TypeError(type(a).__name__)


def _word(name: str) -> str:
    return name if _IDENT.fullmatch(name) else quote(name)


def attributes(n: Node) -> str:
    """` {pads=[1, 1, 1, 1]}`, or nothing."""
    return " {" + ", ".join(f"{_word(k)}={_attr(n.attrs[k])}" for k in sorted(n.attrs)) + "}" if n.attrs else ""


def _node(n: Node, names: Names) -> str:
    ins = ", ".join("-" if v is None else names.value(v) for v in n.inputs)
    outs = ", ".join("-" if v is None else _typed(v, names) for v in n.outputs)
    op = (f"{_word(n.op.domain)}::" if n.op.domain else "") + f"{_word(n.op.name)}@{n.op.since}"
    text = f"({outs}) = {op}({ins})" + attributes(n)
    if n.captures:
        text += f" captures({_list(n.captures, names)})"
    return text + _strings("name", [n.name] if n.name else [], names) + _strings("from", n.origin, names)


def _graph(g: Graph, names: Names) -> Iterator[Line]:
    ins = ", ".join(_typed(v, names) for v in g.inputs)
    imports = ", ".join(f"{quote(k)}: {n}" for k, n in sorted(g.imports.items()))
    tail = f" imports {{{imports}}}" if imports else ""
    body: list[Line] = list(_consts(g.consts, names))
    body += [(v, f"  default {names.value(v)} = {_data(c, names)}") for v, c in g.defaults.items()]
    body += [(n, f"  {_node(n, names)}") for n in g.nodes]
    outs = _list(g.outputs, names)
    yield g, f"graph {_title(g.name, names)}({ins}) -> ({outs}) opset {g.opset}{tail} {{"
    yield from body
    yield None, "}"


def _title(name: str, names: Names) -> str:
    return quote("" if names.canonical else name)


# -- LoopGraph -------------------------------------------------------------------------------------------------------


def _reduce(r: Reduce, names: Names) -> str:
    return f"{r.combine}{_axes(r.axes, names)} init {lit_text(r.init)} acc {r.acc}"


def _reduction(r: Reduce, body: Expr, names: Names, indent: str) -> list[str]:
    """Lines of `reduce: body [-> finish]`, the first to be appended to the line before."""
    lines = _glue(f"{_reduce(r, names)}:", _body_lines(body, names, indent))
    if r.finish is not None:
        lines[-1:] = _glue(f"{lines[-1]} ->", _body_lines(r.finish, names, indent))
    return lines


def _glue(prefix: str, lines: list[str]) -> list[str]:
    return [f"{prefix} {lines[0]}".rstrip(), *lines[1:]]


def _compute(c: Compute, names: Names) -> list[str]:
    axes = c.axes + (c.reduce.axes if c.reduce else ())
    names.axes = {}
    names.scope(axes, c.roots)
    t = c.out.type
    kind = t.dtype if t is not None and t.shape == tuple(a.extent for a in c.axes) else _type(t)
    indent = "    "
    right = _reduction(c.reduce, c.body, names, indent) if c.reduce else _body_lines(c.body, names, indent)
    lines = _glue(f"  {names.value(c.out)}{_axes(c.axes, names)}: {kind} =", right)
    lines[-1] += _strings("from", c.origin, names)
    return lines


def _loops(g: LoopGraph, names: Names) -> Iterator[Line]:
    ins = ", ".join(_typed(v, names) for v in g.inputs)
    body = list(_consts(g.consts, names))
    for item in g.items:
        if isinstance(item, Compute):
            body += [(item, line) for line in _compute(item, names)]
        else:
            refusal = "" if names.canonical else f" refused {item.refusal.code} {quote(item.refusal.why)}"
            body.append((item, f"  opaque {_node(item.node, names)}{refusal}"))
    yield g, f"loops {_title(g.name, names)}({ins}) -> ({_list(g.outputs, names)}) {{"
    yield from body
    yield None, "}"


# -- Partition -------------------------------------------------------------------------------------------------------


def _group(g: Group, names: Names) -> str:
    anchor = f" anchor {names.value(g.anchor.out)}" if g.anchor is not None else ""
    members = _list((c.out for c in g.members), names)
    return f"group {g.id} {g.kind}{anchor} ({_list(g.reads, names)}) -> ({_list(g.writes, names)}) {{ {members} }}"


def _partition(p: Partition, names: Names) -> Iterator[Line]:
    yield p, "partition {"
    yield from _loops(p.loops, names)
    for g in p.groups:
        yield g, _group(g, names)
    place = {id(item): k for k, item in enumerate(p.loops.items)}
    if p.left:
        yield None, "left " + ", ".join(str(place.get(id(o), -1)) for o in p.left)
    for v, order in p.layouts.items():
        yield v, f"layout {names.value(v)} {quote(order)}"
    for d in p.decisions if not names.canonical else ():
        facts = "".join(f" {_word(k)}={_fact(v)}" for k, v in d.numbers)
        yield d, f"decision {d.stage} {quote(d.a)} {quote(d.b)} {d.relation} {d.verdict} {d.code}{facts}"
    yield None, "}"


def _fact(x: int | float | str) -> str:
    return quote(x) if isinstance(x, str) else _attr(x)


# -- Kernel and Plan -------------------------------------------------------------------------------------------------


def _stage(s: Stage, names: Names) -> Iterator[str]:
    axes = s.axes + (s.reduce.axes if s.reduce else ())
    finish = (s.reduce.finish,) if s.reduce is not None and s.reduce.finish is not None else ()
    outer = names.axes
    names.axes = dict(outer)
    names.scope(axes, s.roots + finish)
    head = [f"  stage {_axes(s.axes, names)}"]
    if s.reduce is not None and s.reduce_body is not None:
        head = _glue(head[0], _reduction(s.reduce, s.reduce_body, names, "      "))
    head[-1] += " {"
    yield from head
    for store in s.stores:
        index = ", ".join(_body_lines_flat(i, names) for i in store.index)
        yield from _glue(f"    {names.value(store.target)}[{index}] =", _body_lines(store.value, names, "      "))
    yield "  }"
    names.axes = outer


def _body_lines_flat(e: Expr, names: Names) -> str:
    lets, text = _body_text(e, names)
    return " ".join([f"let {name} = {line} in" for name, line in lets] + [text])


def _seen(k: Kernel) -> tuple[TensorType | None, ...]:
    return k.renamed or (None,) * len(k.outputs)


def _kernel(k: Kernel, names: Names) -> Iterator[Line]:
    ins = ", ".join(("const " if v in k.consts else "") + _typed(v, names) for v in k.inputs)
    outs = ", ".join(_typed(v, names) + (f" as {t}" if t else "") for v, t in zip(k.outputs, _seen(k), strict=True))
    names.axes = {}
    names.scope(k.outer, [r for s in k.stages for r in s.roots])
    origin = _strings("from", k.origin, names)
    yield k, f"kernel {_title(k.name, names)}({ins}) -> ({outs}) outer {_axes(k.outer, names)}{origin} {{"
    for b in k.dims:
        rule = (f" - {b.offset}" if b.offset else "") + (f" / {b.scale}" if b.scale != 1 else "")
        source = b.part or "shape"
        yield b, f"  dim {b.sym} = {source}({names.value(b.value)}, {b.axis}){rule}"
    for c in k.checks:
        yield c, f"  check shape({names.value(c.value)}, {c.axis}) == {c.expr}"
    for x, y in k.maybe:
        yield None, f"  maybe ({x}) == ({y})"
    for need in k.needs:
        yield None, f"  need {need}"
    for buffer in k.locals:
        yield buffer, f"  local {_typed(buffer.value, names)}"
    for s in k.stages:
        for line in _stage(s, names):
            yield s, line
    yield None, "}"


def _plan(p: Plan, names: Names) -> Iterator[Line]:
    yield p, str(p)
    if p.general is not None:
        yield p, f"general {p.general.schedule}"
    yield from _kernel(p.kernel, names)


def _calls(calls: Mapping[int, Call], refused: Mapping[int, Refusal]) -> Iterator[Line]:
    for gid, call in calls.items():
        ins = ", ".join(value_text(v.name) for v in call.inputs)
        outs = ", ".join(value_text(v.name) for v in call.outputs)
        yield call, f"group {gid} calls {quote(call.name)}: @{call.kernel.name}({ins}) -> ({outs})"
    for gid, why in refused.items():
        yield None, f"group {gid} refused {why}"


def _kernels(x: Kernels | Plans, canonical: bool) -> Iterator[Line]:
    yield from _calls(x.calls, x.refused)
    for k in x.kernels if isinstance(x, Kernels) else ():
        yield from _kernel(k, Names(canonical))
    for plan in x.plans if isinstance(x, Plans) else ():
        yield from _plan(plan, Names(canonical))


# -- the public part -------------------------------------------------------------------------------------------------


def lines(ir: IR, canonical: bool = False, data: bool = True) -> Iterator[Line]:
    """The printed form, line by line, each with the item it shows."""
    names = Names(canonical, data)
    match ir:
        case Graph():
            return _graph(ir, names)
        case LoopGraph():
            return _loops(ir, names)
        case Partition():
            return _partition(ir, names)
        case Kernel():
            return _kernel(ir, names)
        case Plan():
            return _plan(ir, names)
        case Kernels() | Plans():
            return _kernels(ir, canonical)
    raise TypeError(type(ir).__name__)


def show(ir: IR) -> str:
    """Print any level."""
    return "\n".join(line for _, line in lines(ir)) + "\n"


def show_item(item: Node | Compute | Opaque | Stage) -> str:
    """One item alone, for messages."""
    names = Names()
    match item:
        case Node():
            return _node(item, names)
        case Opaque():
            return _node(item.node, names)
        case Compute():
            return "\n".join(_compute(item, names)).strip()
        case Stage():
            return "\n".join(_stage(item, names)).strip()
    raise TypeError(type(item).__name__)


def same(a: IR, b: IR) -> bool:
    """Equal up to the names of values, axes, nodes and the origin; decisions are not compared."""
    return [t for _, t in lines(a, canonical=True)] == [t for _, t in lines(b, canonical=True)]


def context(ir: IR, item: object, around: int = 5) -> str:
    """The printed lines around an item, the item's own marked with `>`."""
    printed = list(lines(ir, data=False))
    at = next((k for k, (x, _) in enumerate(printed) if x is item), 0)
    window = range(max(0, at - around), min(len(printed), at + around + 1))
    return "\n".join(f"{'>' if printed[k][0] is item else ' '} {printed[k][1]}" for k in window)


__all__ = [
    "IR",
    "ArrayConst",
    "attributes",
    "context",
    "digest",
    "lines",
    "print_expr",
    "same",
    "show",
    "show_item",
    "value_text",
]
