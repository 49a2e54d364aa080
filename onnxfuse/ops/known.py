"""Elements of integer values that are known without running anything: shape arithmetic, done symbolically."""

from __future__ import annotations

import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, cast, i64, lit, rebuild
from onnxfuse.ir.expr import Load as LoadExpr
from onnxfuse.ir.graph import Node
from onnxfuse.ir.op import Family
from onnxfuse.ir.simplify import as_dim, simplify
from onnxfuse.ops.dsl import Known, Loops
from onnxfuse.ops.lowering import Facts, answering, definitions

KNOWN_LIMIT = 1024  # elements: larger integer tensors are data, not shape arithmetic


@answering
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


def known_constant(array: np.ndarray, dtype: DType) -> Known:
    """The object array of literals of a constant."""
    out = np.empty(array.shape, dtype=object)
    flat = out.reshape(-1)
    for k, v in enumerate(np.asarray(array).reshape(-1).tolist()):
        flat[k] = lit(v, dtype)
    return out
