"""Reader of the textual form; the grammar is in `ir/text.py`.

Operators are looked up with `ops(domain, name, since)`, or stand-ins without meaning when it is not given. Constants
printed as a hash become `HashConst`, or take their data from `arrays` by hash. The node of a parsed Compute is a
stand-in that reads and writes the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr
from onnxfuse.ir.graph import Graph, Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis, LoopGraph
from onnxfuse.ir.parse.expressions import read_body
from onnxfuse.ir.parse.graphs import read_graph
from onnxfuse.ir.parse.kernels import read_kernel
from onnxfuse.ir.parse.loops import read_loops, read_partition
from onnxfuse.ir.parse.reader import OpLookup, Reader, T, tokens
from onnxfuse.ir.partition import Partition


def parse(
    text: str, *, ops: OpLookup | None = None, arrays: Mapping[str, np.ndarray] | None = None
) -> Graph | LoopGraph | Partition | Kernel:
    """Read what `show` printed. UsageError with the line number when it cannot be read."""
    r = Reader(tokens(text), ops, arrays or {})
    match r.text:
        case "graph":
            ir: Graph | LoopGraph | Partition | Kernel = read_graph(r)
        case "loops":
            ir = read_loops(r)
        case "partition":
            ir = read_partition(r)
        case "kernel":
            ir = read_kernel(r)
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
    r = Reader(tokens(text), None, {}, acc=acc_dtype)
    r.axes = {a.name: a for a in axes}
    r.values = {v.name: v for v in values}
    e = read_body(r)
    if r.kind != "end":
        r.fail("end of text")
    return e
