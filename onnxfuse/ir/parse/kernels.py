"""Level 3: one kernel."""

from __future__ import annotations

from onnxfuse.ir.expr import Expr, Sym
from onnxfuse.ir.given import Part
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, DimCheck, Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Reduce
from onnxfuse.ir.parse.expressions import read_atom, read_body, read_expr
from onnxfuse.ir.parse.loops import read_axes, read_reduce
from onnxfuse.ir.parse.reader import Reader, read_int, read_string, read_strings, read_value
from onnxfuse.ir.parse.values import read_place, read_shape, read_type, read_typed
from onnxfuse.ir.types import TensorType


def read_kernel(r: Reader) -> Kernel:
    r.need("kernel")
    name = read_string(r)
    consts: list[Value] = []

    def param() -> Value:
        const = r.eat("const")
        v = read_typed(r)
        consts.extend([v] if const else [])
        return v

    r.need("(")
    inputs = r.many(param, ")")
    r.need("->", "(")
    renamed: list[TensorType | None] = []

    def result() -> Value:
        v = read_typed(r)
        renamed.append(read_type(r) if r.eat("as") else None)
        return v

    outputs = r.many(result, ")")
    r.need("outer")
    outer = read_axes(r)
    shared = r.axes
    origin = read_strings(r, "from")
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
            dims.append(_read_binding(r))
        elif r.eat("check"):
            v, axis = read_shape(r)
            r.need("==")
            checks.append(DimCheck(v, axis, read_expr(r, 1)))
        elif r.eat("maybe"):
            pair = read_expr(r, 4)
            r.need("==")
            maybe.append((pair, read_expr(r, 4)))
        elif r.eat("need"):
            needs.append(read_expr(r, 1))
        elif r.eat("local"):
            buffers.append(Local(read_typed(r)))
        else:
            r.axes = shared
            stages.append(_read_stage(r))
    return Kernel(
        name, inputs, outputs, outer, tuple(stages), tuple(buffers), frozenset(consts), tuple(dims), tuple(checks),
        tuple(maybe), origin, tuple(needs), tuple(renamed) if any(renamed) else (),
    )  # fmt: skip


def _read_binding(r: Reader) -> DimBinding:
    name = read_atom(r)
    if not isinstance(name, Sym):
        r.fail("a dimension name")
    r.need("=")
    part = next((p for p in Part if r.eat(p)), None)
    v, axis = read_shape(r) if part is None else read_place(r)
    offset = read_int(r) if r.eat("-") else 0
    scale = read_int(r) if r.eat("/") else 1
    return DimBinding(name, v, axis, scale, offset, part)


def _read_stage(r: Reader) -> Stage:
    r.need("stage")
    axes = read_axes(r)
    reduce: Reduce | None = None
    body: Expr | None = None
    if not r.eat("{"):
        reduce, body = read_reduce(r)
        r.need("{")
    stores: list[Store] = []
    while not r.eat("}"):
        target = read_value(r)
        r.need("[")
        index = r.many(lambda: read_body(r), "]")
        r.need("=")
        stores.append(Store(target, index, read_body(r)))
    return Stage(axes, tuple(stores), reduce, body)
