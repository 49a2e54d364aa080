"""Kinds come out of the index maps (the expectations of FUSION.md 1.1)."""

from __future__ import annotations

import pytest

from onnxfuse.analysis.kinds import Kinds, kind_in_tvm, kinds
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, acc, apply, cast, i64, lit, load, sym, var, where
from onnxfuse.ir.graph import Node, Value
from onnxfuse.ir.loops import Axis, Compute, Reduce
from onnxfuse.ir.op import Kind
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import Dim, tensor
from tests.fuse.dsl import F32, TEST_OP, val

I, J, K, L = Axis("i", 6), Axis("j", 8), Axis("k", 4), Axis("l", 5)  # noqa: E741
R = Axis("r", 4)
i, j, k, l, r = var(I), var(J), var(K), var(L), var(R)  # noqa: E741


def at(name: str, shape: tuple[Dim, ...], *index: Expr) -> Expr:
    return load(val(name, shape), index, F32)


def of(
    axes: tuple[Axis, ...], body: Expr, over: tuple[Axis, ...] = (), op: str = "add", finish: Expr | None = None
) -> Kinds:
    out = Value("out", tensor(F32, tuple(a.extent for a in axes)))
    reduce = Reduce(over, PRIMS[op], lit(0.0, F32), F32, finish) if over else None
    return kinds(Compute(out, axes, body, Node(TEST_OP, (), (out,), {}, "n", ("n",)), reduce))


def edges(found: Kinds) -> dict[str, Kind]:
    return {v.name: k for v, k in found.edges.items()}


one = Axis("u", 1)

POINTWISE = [
    ("unary", (I, J), apply("neg", at("a", (6, 8), i, j)), Kind.ELEMWISE),
    ("fill", (I, J), lit(1.0, F32), Kind.ELEMWISE),
    ("rank 0", (), apply("neg", at("a", ())), Kind.ELEMWISE),
    ("expand in front", (K, L, I, J), at("a", (6, 8), i, j), Kind.BROADCAST),
    ("scalar", (I, J), at("a", ()), Kind.BROADCAST),
    ("unsqueeze", (I, one, J), at("a", (6, 8), i, j), Kind.BROADCAST),
    ("bias add", (I, J), at("a", (6, 8), i, j) + at("b", (8,), j), Kind.ELEMWISE),
    ("channel", (I, J), at("a", (6, 8), i, j) + at("b", (6, 1), i, i64(0)), Kind.ELEMWISE),
    ("two broadcasts", (I, J), at("a", (6, 1), i, i64(0)) + at("b", (8,), j), Kind.BROADCAST),
    ("transpose", (I, J), at("a", (8, 6), j, i), Kind.INJECTIVE),
    ("reshape", (I, J), at("a", (3, 16), (i * 8 + j) // 16, (i * 8 + j) % 16), Kind.INJECTIVE),
    ("slice from 0", (I, J), at("a", (9, 8), i, j), Kind.INJECTIVE),
    ("reverse", (I, J), at("a", (6, 8), i64(5) - i, j), Kind.INJECTIVE),
    ("diagonal", (I, J), at("a", (6, 6), i, i), Kind.INJECTIVE),
    ("squeeze", (I,), at("a", (6, 1), i, i64(0)), Kind.BROADCAST),
    ("extent 1 on both sides", (one, J), at("a", (1, 8), i64(0), j), Kind.ELEMWISE),
    ("pad at the end", (I, J), where(i < 4, at("a", (4, 8), i, j), lit(0.0, F32)), Kind.INJECTIVE),
]


@pytest.mark.parametrize(("axes", "body", "kind"), [p[1:] for p in POINTWISE], ids=[p[0] for p in POINTWISE])
def test_pointwise(axes: tuple[Axis, ...], body: Expr, kind: Kind) -> None:
    assert of(axes, body).node is kind


def test_each_edge_has_its_own_kind() -> None:
    found = of((I, J), at("a", (6, 8), i, j) + at("b", (8,), j) + at("c", (8, 6), j, i))
    assert edges(found) == {"a": Kind.ELEMWISE, "b": Kind.BROADCAST, "c": Kind.INJECTIVE}
    assert found.node is Kind.INJECTIVE


def test_an_edge_read_twice_is_as_hard_as_its_hardest_read() -> None:
    a = val("a", (6, 6))
    square = Axis("j", 6)
    found = of((I, square), load(a, (i, var(square)), F32) + load(a, (var(square), i), F32))
    assert edges(found) == {"a": Kind.INJECTIVE}


def test_run_time_broadcast_is_a_broadcast() -> None:
    n = sym("n")
    axis = Axis("i", apply("bdim", n, sym("m")))
    v = var(axis)
    found = of((axis,), at("a", (n,), apply("bcast", v, n)) + at("b", (sym("m"),), apply("bcast", v, sym("m"))))
    assert edges(found) == {"a": Kind.BROADCAST, "b": Kind.BROADCAST}


def test_gather_is_injective_in_its_data_and_plain_in_its_index() -> None:
    index = Value("ids", tensor(DType.I64, (6,)))
    inner = load(index, (i,), DType.I64)
    found = of((I, J), at("table", (100, 8), inner, j))
    assert edges(found) == {"table": Kind.INJECTIVE, "ids": Kind.BROADCAST}
    nested = load(index, (inner,), DType.I64)
    assert of((I, J), at("table", (100, 8), nested, j)).node is Kind.OPAQUE


def test_symbolic_extents_are_compared_by_identity_of_dimensions() -> None:
    n, m = Axis("n", sym("N")), Axis("m", sym("M"))
    assert of((n, m), at("a", (sym("N"), sym("M")), var(n), var(m))).node is Kind.ELEMWISE
    assert of((n, m), at("a", (sym("M"), sym("N")), var(n), var(m))).node is Kind.INJECTIVE


def x(*index: Expr) -> Expr:
    return at("x", (6,) * len(index), *index)


def w(*index: Expr) -> Expr:
    return at("w", (6,) * len(index), *index)


padded = where(i + r < 6, x(k, i + r), lit(0.0, F32))

REDUCTIONS = [
    ("sum", (I,), x(i, r), "add", Kind.REDUCE),
    ("max over the leading axis", (I,), x(r, i), "max", Kind.REDUCE),
    ("sum of squares", (I,), x(i, r) * x(i, r), "add", Kind.REDUCE),
    ("full", (), x(r), "add", Kind.REDUCE),
    ("matmul", (I, J), x(i, r) * w(r, j), "add", Kind.ANCHOR),
    ("matmul with casts", (I, J), cast(cast(x(i, r), DType.F64) * cast(w(r, j), DType.F64), F32), "add", Kind.ANCHOR),
    ("batched matmul", (K, I, J), x(k, i, r) * w(k, r, j), "add", Kind.ANCHOR),
    ("matmul with a zero point", (I, J), (x(i, r) - at("z", ())) * w(r, j), "add", Kind.ANCHOR),
    ("one row", (one, J), at("x", (1, 4), i64(0), r) * w(r, j), "add", Kind.ANCHOR),
    ("matrix times vector", (I,), x(i, r) * w(r), "add", Kind.REDUCE),
    ("max of products", (I, J), x(i, r) * w(r, j), "max", Kind.REDUCE),
    ("guarded convolution", (J, K, I), padded * w(j, r), "add", Kind.ANCHOR),
    ("depthwise convolution", (K, I), padded * w(k, r), "add", Kind.ANCHOR),
    ("pool", (K, I), padded, "max", Kind.ANCHOR),
    ("strided window", (I,), x(i * 2 + r), "max", Kind.ANCHOR),
]


@pytest.mark.parametrize(("axes", "body", "op", "kind"), [p[1:] for p in REDUCTIONS], ids=[p[0] for p in REDUCTIONS])
def test_reductions(axes: tuple[Axis, ...], body: Expr, op: str, kind: Kind) -> None:
    found = of(axes, body, (R,), op)
    assert found.node is kind
    assert set(found.edges.values()) == {kind}


def test_a_finish_does_not_change_the_kind_but_its_reads_are_edges() -> None:
    found = of((I,), x(i, r), (R,), "add", acc(F32) / 4.0 + at("b", (6,), i))
    assert found.node is Kind.REDUCE
    assert edges(found) == {"x": Kind.REDUCE, "b": Kind.REDUCE}


IDS = Value("ids", tensor(DType.I64, (6,)))
IN_TVM = [
    ("mean", (I,), x(i, r), (R,), acc(F32) / 4.0, Kind.ANCHOR),
    ("sum", (I,), x(i, r), (R,), None, Kind.REDUCE),
    ("gather", (I, J), at("table", (100, 8), load(IDS, (i,), DType.I64), j), (), None, Kind.OPAQUE),
    ("slice from 0", (I, J), at("a", (9, 8), i, j), (), None, Kind.ELEMWISE),
    ("first row", (one, J), at("a", (9, 8), i64(0), j), (), None, Kind.ELEMWISE),
    ("second row", (one, J), at("a", (9, 8), i64(1), j), (), None, Kind.INJECTIVE),
    ("slice from 1", (I, J), at("a", (9, 8), i + 1, j), (), None, Kind.INJECTIVE),
    ("pad at the end", (I, J), where(i < 4, at("a", (4, 8), i, j), lit(0.0, F32)), (), None, Kind.ELEMWISE),
    ("transpose", (I, J), at("a", (8, 6), j, i), (), None, Kind.INJECTIVE),
    ("bias add", (I, J), at("a", (6, 8), i, j) + at("b", (8,), j), (), None, Kind.ELEMWISE),
    ("two broadcasts", (I, J), at("a", (6, 1), i, i64(0)) + at("b", (8,), j), (), None, Kind.BROADCAST),
]


@pytest.mark.parametrize(
    ("axes", "body", "over", "finish", "kind"), [row[1:] for row in IN_TVM], ids=[row[0] for row in IN_TVM]
)
def test_what_tvm_says(
    axes: tuple[Axis, ...], body: Expr, over: tuple[Axis, ...], finish: Expr | None, kind: Kind
) -> None:
    out = Value("out", tensor(F32, tuple(a.extent for a in axes)))
    reduce = Reduce(over, PRIMS["add"], lit(0.0, F32), F32, finish) if over else None
    c = Compute(out, axes, body, Node(TEST_OP, (), (out,), {}, "n", ("n",)), reduce)
    assert kind_in_tvm(c, kinds(c).node, c.loads) is kind
