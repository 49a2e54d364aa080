"""The op table: decorators that register an op, lookup by opset, and what the table can do with an entry.

    @pointwise        fn(x, y, ..., *, attrs) -> Expr        scalars in the compute dtype; the family broadcasts
    @reduce           fn(x, axes, *, ...) -> Expr                the mapped element; the family loops and combines
    @view @contract @window   fn(X, Y, ..., *, attrs) -> Loops   tensors; a list of Loops for several outputs
    @composite        fn(X, Y, ..., *, attrs) -> tensor(s)       a formula over other entries, in graph values
    @opaque           known, never fused: the reason

The signature is the ONNX schema: inputs are positional (optional ones default to None), attributes keyword-only with
the specification's defaults. `since` is the first opset with that meaning; the newest entry <= the model's opset wins.
A call of an entry with scalars runs the body; with graph values (`GraphTensor`) it builds a node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onnxfuse.errors import Unsupported
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Lit, acc, apply, cast, i64, lit, rebuild, var
from onnxfuse.ir.expr import Load as LoadExpr
from onnxfuse.ir.graph import ArrayConst, Attrs, AttrValue, Foreign, Node, Value, fresh_name
from onnxfuse.ir.loops import Axis, Compute, Reduce
from onnxfuse.ir.op import EXACT, SUM, Family, Op, Tol
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.simplify import as_dim, dim_expr, poly, simplify
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.ops.dsl import Known, Loops, Tensor, axis_of, broadcast_load, broadcast_shape, compute, maximum, product

OPS: dict[tuple[str, str], list[Op]] = {}  # (domain, name) -> entries, oldest first
MOST_AXES = 16  # of a tensor: index arithmetic grows with the square
LARGEST_BYTES = 1 << 60  # of a tensor; kernels refuse more at run time too (codegen/dims.py)
KNOWN_LIMIT = 1024  # elements: larger integer tensors are data, not shape arithmetic


def lookup(domain: str, name: str, opset: int) -> Op | None:
    """The entry that applies to an operator in a model of this opset; None when the table has none."""
    best = None
    for op in OPS.get(("" if domain == "ai.onnx" else domain, name), ()):
        if op.since <= opset:
            best = op
    return best


def entries() -> Iterable[Op]:
    """Every entry, by name and opset."""
    for key in sorted(OPS):
        yield from OPS[key]


# --- registration --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class OpFn:
    """A registered op function. Scalars in: scalar out. Graph values in: a node is built."""

    op: Op

    @property
    def __name__(self) -> str:
        return self.op.name

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        graph = next((a for a in args if isinstance(a, GraphTensor)), None)
        if graph is not None:
            return graph.builder.call(self.op.name, args, attrs)
        assert self.op.fn is not None, self.op.name
        return self.op.fn(*args, **attrs)


def _register(fn: Callable[..., Any] | None, family: Family, name: str, since: int, **fields: Any) -> OpFn:
    doc = inspect.getdoc(fn) if fn is not None else None
    op = Op(name, since, family, fn, doc=doc or "", **fields)
    rows = OPS.setdefault((op.domain, name), [])
    if any(r.since == since for r in rows):
        raise ValueError(f"duplicate op table entry {name}@{since}")
    rows.append(op)
    rows.sort(key=lambda r: r.since)
    return OpFn(op)


def _family(family: Family, tol: Tol) -> Callable[..., Any]:
    default_tol = tol

    def decorator(
        fn: Callable[..., Any] | None = None,
        *,
        since: int = 1,
        tol: Tol = default_tol,
        dtype: str = "same",
        dtypes: Iterable[DType] = (),
        domain: str = "",
        name: str | None = None,
        types: Callable[..., Any] | None = None,
    ) -> Any:
        def wrap(f: Callable[..., Any]) -> OpFn:
            fields = {"tol": tol, "dtype": dtype, "dtypes": frozenset(dtypes), "domain": domain, "types": types}
            return _register(f, family, name or f.__name__, since, **fields)

        return wrap if fn is None else wrap(fn)

    return decorator


pointwise = _family(Family.POINTWISE, EXACT)
view = _family(Family.VIEW, EXACT)
contract = _family(Family.CONTRACT, SUM)
window = _family(Family.WINDOW, SUM)
composite = _family(Family.COMPOSITE, SUM)
alias = _family(Family.ALIAS, EXACT)
shape_op = _family(Family.SHAPE, EXACT)


@dataclass(frozen=True, slots=True, eq=False)
class ReduceRule:
    """How a reduce entry combines: primitive, init by dtype, finish(acc, count)."""

    combine: str
    init: Callable[[DType], float | int | bool]
    finish: Callable[[Expr, Expr], Expr] | None


REDUCE_RULES: dict[Op, ReduceRule] = {}


def reduce(
    combine: str,
    init: float | int | Callable[[DType], float | int | bool],
    *,
    finish: Callable[[Expr, Expr], Expr] | None = None,
    since: int = 1,
    tol: Tol = SUM,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], OpFn]:
    """Register a reduction over `axes` (attribute or input, by signature)."""

    def wrap(f: Callable[..., Any]) -> OpFn:
        fn = _register(f, Family.REDUCE, name or f.__name__, since, tol=tol)
        rule_init = init if callable(init) else (lambda _dtype: init)
        REDUCE_RULES[fn.op] = ReduceRule(combine, rule_init, finish)
        return fn

    return wrap


def opaque(name: str, reason: str, *, since: int = 1, domain: str = "") -> None:
    """Register an op that is known and never fused."""
    _register(None, Family.OPAQUE, name, since, reason=reason, domain=domain)


def shaped(
    reason: str, *, since: int = 1, name: str | None = None, domain: str = ""
) -> Callable[[Callable[..., Any]], OpFn]:
    """Register an op that is never fused, but whose result types are known: fn(X, ..., *, attrs) -> TensorType(s).

    Shapes behind it then stay expressions over the inputs' dimensions. `fn` raises Unsupported where it cannot tell.
    """

    def wrap(f: Callable[..., Any]) -> OpFn:
        return _register(f, Family.OPAQUE, name or f.__name__, since, reason=reason, domain=domain)

    return wrap


@cache
def parameters(op: Op) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """(inputs, attributes) of an entry's signature; a `*xs` parameter is variadic."""
    assert op.fn is not None, op.name
    params = list(inspect.signature(op.fn).parameters.values())
    inputs = [p for p in params if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return inputs, [p for p in params if p.kind is inspect.Parameter.KEYWORD_ONLY]


def arguments(node: Node) -> dict[str, Any]:
    """A node's attributes as keyword arguments. Raises Unsupported for one the entry does not know."""
    _, attrs = parameters(node.op)
    names = {p.name.rstrip("_"): p.name for p in attrs if p.name != "outputs"}
    out: dict[str, Any] = {}
    for key, value in node.attrs.items():
        if key not in names:
            raise Unsupported("UN_ATTR", f"{node.op} attribute {key}={_brief(value)} is not implemented")
        if isinstance(value, Foreign):
            raise Unsupported("UN_ATTR", f"{node.op} attribute {key} is not a plain value")
        out[names[key]] = value
    for p in attrs:  # ONNX attributes are f32; so must be the defaults, or f64 kernels would see another number
        if isinstance(p.default, float):
            out.setdefault(p.name, float(np.float32(p.default)))
    required = [p for p in attrs if p.default is inspect.Parameter.empty and p.name != "outputs"]
    missing = [p.name for p in required if p.name not in out]
    if missing:
        raise Unsupported("UN_ATTR", f"{node.op} lacks the required attribute {missing[0]}")
    return out


def _brief(value: object) -> str:
    return "..." if isinstance(value, Foreign | np.ndarray) else str(value)


# --- nodes that do not fit their entry ---
P = ParamSpec("P")
R = TypeVar("R")
_MISFITS = (
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    ZeroDivisionError,
    OverflowError,
    AssertionError,
)


def _answering(ask: Callable[P, R]) -> Callable[P, R]:
    """A body meets attributes and shapes that nobody checked (perm=[0, 5], kernel_shape of another rank).

    Whatever it stumbles over is a reason to leave the node to onnxruntime, which refuses it or knows better. The
    samples of tests/ops fail when an entry declines what it should cover, so this hides no mistake of ours.
    """

    @wraps(ask)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return ask(*args, **kwargs)
        except _MISFITS as error:
            node = args[0]
            assert isinstance(node, Node)
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Unsupported("UN_MISFIT", f"{node.op} node {node.name!r} does not fit its entry", what) from error

    return run


# --- types and definitions -----------------------------------------------------------------------------------------
Facts = Mapping[Value, Known]  # known elements of integer values (shape arithmetic) and small constants


def reference(value: Value | None, facts: Facts) -> Tensor | None:
    """The Tensor a body sees for an input. Raises Unsupported for values that are no computable tensor."""
    if value is None:
        return None
    if value.type is None:
        raise Unsupported("UN_TYPE", f"{value} has no known element type or rank")
    if not value.type.dtype.computable:
        raise Unsupported("UN_DTYPE", f"element type {value.type.dtype} of {value} only passes through")
    known = facts.get(value)
    immediate = known.flat[0] if known is not None and known.size == 1 else None
    return Tensor(value, value.type, known, immediate if isinstance(immediate, Lit) else None)


def definitions(node: Node, facts: Facts) -> list[Loops]:
    """The loops of every output of an atomic node. Raises Unsupported with a code when the entry does not cover it."""
    op = node.op
    if op.family in (Family.OPAQUE, Family.CONSTANT) or op.fn is None:
        raise Unsupported("UN_OPAQUE", f"{op} is never fused", op.reason)
    refs = [reference(v, facts) for v in node.inputs]
    if op.dtypes and refs and refs[0] is not None and refs[0].dtype not in op.dtypes:
        raise Unsupported("UN_DTYPE", f"{op} on {refs[0].dtype} is not implemented")
    attrs = arguments(node)
    _check_arity(op, refs)
    if op.family is Family.POINTWISE:
        return [_pointwise(op, refs, attrs)]
    if op.family is Family.REDUCE:
        return [_reduce(op, refs, attrs)]
    if op.family is Family.ALIAS:
        x = refs[0]
        assert x is not None
        return [Loops(x.shape, lambda *i: x[i], x.dtype)]
    made = op.fn(*refs, **attrs, **({"outputs": len(node.outputs)} if _wants_outputs(op) else {}))
    return list(made) if isinstance(made, list | tuple) else [made]


def _wants_outputs(op: Op) -> bool:
    return any(p.name == "outputs" for p in parameters(op)[1])


def _check_arity(op: Op, refs: Sequence[Tensor | None]) -> None:
    inputs, _ = parameters(op)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in inputs):
        return
    if len(refs) > len(inputs):
        raise Unsupported("UN_ARITY", f"{op} has {len(refs)} inputs, the entry knows {len(inputs)}")
    for k, p in enumerate(inputs):
        if p.default is inspect.Parameter.empty and (k >= len(refs) or refs[k] is None):
            raise Unsupported("UN_ARITY", f"{op} lacks its input {p.name}")


def _pointwise(op: Op, refs: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> Loops:
    assert op.fn is not None
    present = [r for r in refs if r is not None]
    shape = broadcast_shape(*(r.shape for r in present))

    def scalars(index: Sequence[Expr]) -> list[Expr | None]:
        return [None if r is None else compute(broadcast_load(r, index, shape)) for r in refs]

    def body(*index: Expr) -> Expr:
        return op.fn(*scalars(index), **attrs)  # type: ignore[misc,no-any-return]

    first = present[0]
    probe = body(*(i64(0) for _ in shape))
    match op.dtype:
        case "same":
            dtype = first.dtype
        case "result":  # the body says it (Cast)
            dtype = probe.dtype
        case "second":  # Where: type of the second input
            dtype = present[1].dtype
        case _:
            dtype = DType(op.dtype)
    return Loops(shape, body, dtype)


def reduce_axes(
    rank: int, axes: Tensor | Sequence[int] | int | None, noop_with_empty_axes: int = 0
) -> list[int] | None:
    """Reduced axes, sorted; None = nothing is reduced (noop). Absent or empty axes reduce everything."""
    if isinstance(axes, Tensor):
        axes = axes.ints()
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return None if noop_with_empty_axes else list(range(rank))
    listed = [axes] if isinstance(axes, int) else list(axes)
    return sorted({axis_of(a, rank) for a in listed})


def _reduce(op: Op, refs: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> Loops:
    assert op.fn is not None
    rule = REDUCE_RULES[op]
    x = refs[0]
    assert x is not None
    axes_arg = refs[1] if len(refs) > 1 else attrs.get("axes")
    axes = reduce_axes(x.rank, axes_arg, attrs.get("noop_with_empty_axes", 0))
    keepdims = bool(attrs.get("keepdims", 1))
    extra = {k: v for k, v in attrs.items() if k not in ("axes", "keepdims", "noop_with_empty_axes")}
    work = x.dtype.compute
    map_one: Callable[[Expr], Expr] = lambda e: op.fn(e, **extra)  # type: ignore[misc]  # noqa: E731
    if axes is None or not axes:
        count = i64(1)

        def one(*i: Expr) -> Expr:
            v = map_one(compute(x[i]))
            return rule.finish(v, cast(count, work)) if rule.finish is not None else v

        return Loops(x.shape, one, x.dtype)
    kept = [k for k in range(x.rank) if k not in axes]
    shape = [1 if k in axes else d for k, d in enumerate(x.shape)] if keepdims else [x.shape[k] for k in kept]
    position = {k: (k if keepdims else n) for n, k in enumerate(kept)}
    extents = [x.shape[k] for k in axes]

    def body(*index: Expr) -> Expr:
        outer, inner = index[: len(shape)], index[len(shape) :]
        full = [inner[axes.index(k)] if k in axes else outer[position[k]] for k in range(x.rank)]
        return map_one(compute(x[tuple(full)]))

    finish = None
    if rule.finish is not None:
        total = product(extents)
        counted = cast(simplify(maximum(dim_expr(total), 1)), work)  # the mean of nothing is 0
        final = rule.finish

        def finish(a: Expr, *_index: Expr) -> Expr:
            return final(a, counted)

    return Loops(shape, body, x.dtype, extents, rule.combine, rule.init(x.dtype), finish, work)


@_answering
def lower_node(node: Node, facts: Facts) -> list[Compute]:
    """One Compute per present output of an atomic node (see ir/loops.py for what a Compute means)."""
    found = definitions(node, facts)
    declined = next((d.refusal for d in found if d.refusal is not None), None)
    if declined is not None:
        raise Unsupported(declined.code, f"{node.op} node {node.name!r}", declined.why)
    return [_compute(node, out, loops) for out, loops in zip(node.outputs, found, strict=False) if out is not None]


_AXES = "ijklmnopq"
_REDUCED = "rstuvw"


def _compute(node: Node, out: Value, loops: Loops) -> Compute:
    names = list(loops.names) or [
        *(_AXES[k] if k < len(_AXES) else f"i{k}" for k in range(len(loops.shape))),
        *(_REDUCED[k] if k < len(_REDUCED) else f"r{k}" for k in range(len(loops.reduce))),
    ]
    axes = tuple(Axis(names[k], d) for k, d in enumerate(loops.shape))
    index = [i64(0) if isinstance(a.extent, int) and a.extent == 1 else var(a) for a in axes]
    if not loops.reduce:
        return Compute(out, axes, cast(simplify(loops.body(*index)), loops.dtype), node, needs=tuple(loops.needs))
    inner = tuple(Axis(names[len(axes) + k], d) for k, d in enumerate(loops.reduce))
    point = [i64(0) if isinstance(a.extent, int) and a.extent == 1 else var(a) for a in inner]
    kind = loops.acc or loops.dtype.compute
    body = cast(simplify(loops.body(*index, *point)), kind)
    raw = acc(kind)
    final = raw if loops.finish is None else simplify(loops.finish(raw, *index))
    final = cast(final, loops.dtype)
    rule = Reduce(inner, PRIMS[loops.combine], lit(loops.init, kind), kind, None if final is raw else final)
    return Compute(out, axes, body, node, rule, tuple(loops.needs))


@_answering
def infer(node: Node, facts: Facts, opset: int) -> list[TensorType]:
    """Types of a node's outputs. Raises Unsupported when the table cannot tell."""
    if node.op.family is Family.COMPOSITE:
        types = _of_formula(node, facts, opset)
    elif node.op.family is Family.OPAQUE and node.op in OPS.get((node.op.domain, node.op.name), ()):
        types = _call(node, facts, node.op.fn)  # not for an op of another family that a node's attributes made opaque
    else:
        types = [tensor(d.dtype, d.shape) for d in definitions(node, facts)]
    for t in types:
        _refuse_impossible(node, t)
    return types


def _refuse_impossible(node: Node, t: TensorType) -> None:
    """No tensor has negative dimensions, or more bytes than can be addressed."""
    if t.rank > MOST_AXES:
        raise Unsupported(
            "UN_MISFIT", f"{node.op} node {node.name!r} makes a tensor of {t.rank} axes, at most {MOST_AXES}"
        )
    known = [d for d in t.shape if isinstance(d, int)]
    known += [abs(c) for d in t.shape if not isinstance(d, int) for c in poly(d).values()]
    total = t.dtype.bytes if t.dtype.computable else 1
    for d in known:
        total *= max(d, 1)
    if any(d < 0 for d in known) or total > LARGEST_BYTES:
        raise Unsupported("UN_MISFIT", f"{node.op} node {node.name!r} makes {t}, which no memory holds")


def _of_formula(node: Node, facts: Facts, opset: int) -> list[TensorType]:
    """Types of a composite's outputs: its formula's, or what the entry says where the formula declines the node."""
    try:
        return [g.type for g in expand(node, facts, opset).results]
    except Unsupported:
        if node.op.types is None:
            raise
    return _call(node, facts, node.op.types)


def _call(node: Node, facts: Facts, fn: Callable[..., Any] | None) -> list[TensorType]:
    """Types that a function of the entry's signature gives for tensor references."""
    op = node.op
    if fn is None:
        raise Unsupported("UN_OPAQUE", f"{op} is never fused", op.reason)
    refs = [reference(v, facts) for v in node.inputs]
    attrs = arguments(node)
    _check_arity(op, refs)
    made = fn(*refs, **attrs, **({"outputs": len(node.outputs)} if _wants_outputs(op) else {}))
    return list(made) if isinstance(made, list) else [made]


@_answering
def known_elements(node: Node, facts: Facts) -> list[Known | None]:
    """Elements of the outputs, where every input element is known: shape arithmetic, evaluated symbolically.

    The body of the entry is run at each concrete output index, so nothing here knows op names.
    """
    if node.op.family in (Family.OPAQUE, Family.COMPOSITE, Family.CONSTANT):
        return [None] * len(node.outputs)
    out: list[Known | None] = []
    for d in definitions(node, facts):
        out.append(_evaluate(d, facts))
    return out


def _evaluate(d: Loops, facts: Facts) -> Known | None:
    shape = tuple(as_dim(s) for s in d.shape)
    if d.refusal is not None or not all(isinstance(s, int) for s in (*shape, *d.reduce)):
        return None
    sizes = [int(s) for s in shape]  # type: ignore[arg-type]
    spans = [int(r) for r in d.reduce]  # type: ignore[arg-type]
    if int(np.prod(sizes, dtype=np.int64)) * int(np.prod(spans, dtype=np.int64)) > KNOWN_LIMIT:
        return None
    out = np.empty(sizes, dtype=object)
    for point in np.ndindex(*sizes):
        index = [i64(p) for p in point]
        if not d.reduce:
            element: Expr | None = _resolve(d.body(*index), facts)
        else:
            kind = d.acc or d.dtype.compute
            total: Expr = lit(d.init, kind)
            for inner in np.ndindex(*spans):
                total = apply(d.combine, total, cast(d.body(*index, *(i64(p) for p in inner)), kind))
            element = _resolve(total if d.finish is None else d.finish(total, *index), facts)
        if element is None:
            return None
        out[point] = simplify(cast(element, d.dtype))
    return out


class _Unknown(Exception):  # noqa: N818 - control flow of one function
    pass


def _resolve(e: Expr, facts: Facts) -> Expr | None:
    """Replace Loads of known values by their elements; None when one is not known."""

    def leaf(x: Expr) -> Expr | None:
        if not isinstance(x, LoadExpr):
            return None
        table = facts.get(x.source)
        index = [as_dim(i) for i in x.index]
        if table is None or not all(isinstance(i, int) for i in index):
            raise _Unknown
        point = tuple(int(i) for i in index)  # type: ignore[arg-type]
        if any(not 0 <= p < n for p, n in zip(point, table.shape, strict=True)):
            return lit(0, x.dtype)  # out of range only under a `where` that discards it
        element = table[point]
        assert isinstance(element, Expr)
        return element

    try:
        return simplify(rebuild((e,), leaf)[0])
    except _Unknown:
        return None


# --- composites ----------------------------------------------------------------------------------------------------
class GraphTensor:
    """A graph value inside a composite body. Operators build nodes; Python numbers become constants."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: Builder, value: Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def type(self) -> TensorType:
        return self.value.tensor

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def known(self) -> Known | None:
        return self.builder.facts.get(self.value)

    def ints(self) -> list[int]:
        """Known constant integers (axes ...)."""
        ref = reference(self.value, self.builder.facts)
        assert ref is not None
        return ref.ints()

    def _bin(self, name: str, other: Any, swap: bool = False) -> GraphTensor:
        rhs = other if isinstance(other, GraphTensor) else self.builder.constant(other, self.dtype)
        made = self.builder.call(name, (rhs, self) if swap else (self, rhs), {})
        assert isinstance(made, GraphTensor)
        return made

    def __add__(self, other: Any) -> GraphTensor:
        return self._bin("Add", other)

    def __radd__(self, other: Any) -> GraphTensor:
        return self._bin("Add", other, swap=True)

    def __sub__(self, other: Any) -> GraphTensor:
        return self._bin("Sub", other)

    def __rsub__(self, other: Any) -> GraphTensor:
        return self._bin("Sub", other, swap=True)

    def __mul__(self, other: Any) -> GraphTensor:
        return self._bin("Mul", other)

    def __rmul__(self, other: Any) -> GraphTensor:
        return self._bin("Mul", other, swap=True)

    def __truediv__(self, other: Any) -> GraphTensor:
        return self._bin("Div", other)

    def __rtruediv__(self, other: Any) -> GraphTensor:
        return self._bin("Div", other, swap=True)


@dataclass(slots=True, eq=False)
class Builder:
    """Collects the nodes a composite expands to. `prefix` names the new values."""

    opset: int
    prefix: str
    origin: tuple[str, ...]
    facts: dict[Value, Known]
    taken: set[str]
    nodes: list[Node] = field(default_factory=list)
    consts: dict[Value, ArrayConst] = field(default_factory=dict)
    _interned: dict[tuple[object, ...], GraphTensor] = field(default_factory=dict)

    def constant(self, data: Any, dtype: DType, rank: int | None = None) -> GraphTensor:
        """A constant tensor (scalars are rank 0)."""
        array = np.asarray(data, dtype=dtype.numpy)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._interned:
            value = Value(fresh_name(f"{self.prefix}.const", self.taken), tensor(dtype, array.shape))
            self.consts[value] = ArrayConst(array)
            self.facts[value] = known_constant(array, dtype)
            self._interned[key] = GraphTensor(self, value)
        return self._interned[key]

    def call(self, name: str, args: Sequence[Any], attrs: Mapping[str, Any]) -> GraphTensor | tuple[GraphTensor, ...]:
        """Build a node of op `name` in the spelling of the model's opset; keyword values go where its schema wants."""
        op = lookup("", name, self.opset)
        if op is None or op.fn is None:
            raise Unsupported("UN_OPSET", f"{name} does not exist at opset {self.opset}")
        names = [p.name for p in parameters(op)[0]]
        inputs = [self._operand(a, args) for a in args]
        rest: dict[str, AttrValue] = {}
        for key, value in attrs.items():
            if value is None:
                continue
            if key in names:
                while len(inputs) < names.index(key):
                    inputs.append(None)
                inputs.append(value if isinstance(value, GraphTensor) else self.constant(value, DType.I64))
            else:
                rest[key] = tuple(value) if isinstance(value, list) else value
        return self.node(op, inputs, rest)

    def _operand(self, a: Any, args: Sequence[Any]) -> GraphTensor | None:
        if a is None or isinstance(a, GraphTensor):
            return a
        like = next(x for x in reversed(args) if isinstance(x, GraphTensor))  # the last: of Where not the condition
        return self.constant(a, like.dtype)

    def node(
        self, op: Op, inputs: Sequence[GraphTensor | None], attrs: Attrs, outputs: int = 1
    ) -> GraphTensor | tuple[GraphTensor, ...]:
        """Append a node and infer its outputs' types."""
        label = fresh_name(f"{self.prefix}.{op.name}", self.taken)
        values = tuple(x.value if x is not None else None for x in inputs)
        draft = Node(op, values, tuple(Value(f"{label}.{k}", None) for k in range(outputs)), attrs, label, self.origin)
        types = infer(draft, self.facts, self.opset)
        made = tuple(Value(label if k == 0 else f"{label}.{k}", t) for k, t in enumerate(types[:outputs]))
        node = Node(op, values, made, attrs, label, self.origin)
        self.nodes.append(node)
        if op.family is Family.SHAPE or all(v is None or v in self.facts for v in values):
            for v, elements in zip(made, known_elements(node, self.facts), strict=False):
                if elements is not None:
                    self.facts[v] = elements
        out = tuple(GraphTensor(self, v) for v in made)
        return out[0] if outputs == 1 else out


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """Atomic nodes of one composite, with its outputs as graph tensors in order."""

    nodes: tuple[Node, ...]
    consts: Mapping[Value, ArrayConst]
    results: tuple[GraphTensor, ...]


@_answering
def expand(node: Node, facts: Facts, opset: int, taken: set[str] | None = None) -> Expansion:
    """One level of a composite's formula. Raises Unsupported when the entry does not cover the node."""
    op = node.op
    assert op.fn is not None, op.name
    base = node.name or op.name
    b = Builder(opset, base, node.origin, dict(facts), set() if taken is None else taken)
    for v in node.inputs:
        reference(v, facts)
    args = [None if v is None else GraphTensor(b, v) for v in node.inputs]
    attrs = arguments(node)
    _check_arity(op, [reference(v, facts) for v in node.inputs])
    made = op.fn(*args, **attrs, **({"outputs": len(node.outputs)} if _wants_outputs(op) else {}))
    results = made if isinstance(made, tuple) else (made,)
    return Expansion(tuple(b.nodes), b.consts, results)


def known_constant(array: np.ndarray, dtype: DType) -> Known:
    """The object array of literals of a constant."""
    out = np.empty(array.shape, dtype=object)
    flat = out.reshape(-1)
    for k, v in enumerate(np.asarray(array).reshape(-1).tolist()):
        flat[k] = lit(v, dtype)
    return out
