"""The op table: decorators that register an op, and lookup by opset.

    @pointwise        fn(x, y, ..., *, attrs) -> Expr        scalars in the compute dtype; the family broadcasts
    @reduce           fn(x, axes, *, ...) -> Expr                the mapped element; the family loops and combines
    @view @contract @window   fn(X, Y, ..., *, attrs) -> Loops   tensors; a list of Loops for several outputs
    @composite        fn(X, Y, ..., *, attrs) -> tensor(s)       a formula over other entries, in graph values
    @opaque           known, never fused: the reason

The signature is the ONNX schema: inputs are positional (optional ones default to None), attributes keyword-only with
the specification's defaults. `since` is the first opset with that meaning; the newest entry <= the model's opset wins.
A call of an entry with scalars runs the body; with graph values (`expansion.GraphTensor`) it builds a node. What the
entries are asked: `lowering` (loops), `expansion` (types; composites), `known` (elements).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr
from onnxfuse.ir.op import EXACT, SUM, Family, Op, Tol

OPS: dict[tuple[str, str], list[Op]] = {}  # (domain, name) -> entries, oldest first


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


@dataclass(frozen=True, slots=True, eq=False)
class OpFn:
    """A registered op function. Scalars in: scalar out. Graph values in: a node is built."""

    op: Op

    @property
    def __name__(self) -> str:
        return self.op.name

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        builders = (getattr(a, "builder", None) for a in args)  # of GraphTensors: expressions have none
        builder = next((b for b in builders if b is not None), None)
        if builder is not None:
            return builder.call(self.op.name, args, attrs)
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
        loops: Callable[..., Any] | None = None,
    ) -> Any:
        def wrap(f: Callable[..., Any]) -> OpFn:
            fields = {"tol": tol, "dtype": dtype, "dtypes": frozenset(dtypes), "domain": domain}
            return _register(f, family, name or f.__name__, since, types=types, loops=loops, **fields)

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
