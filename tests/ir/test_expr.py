import gc
import math

import numpy as np
import pytest

from onnxfuse.ir import expr
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import FALSE, TRUE, apply, cast, eq, i64, lit, load, substitute, sym, var, walk, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.types import tensor

F32, F64, I32, I64, BOOL = DType.F32, DType.F64, DType.I32, DType.I64, DType.BOOL
A, B = Axis("i", 4), Axis("i", 4)
XV = Value("x", tensor(F32, (4, 4)))


def at(*index):
    return load(XV, index, F32)


def test_equal_expressions_are_one_object():
    assert at(var(A), i64(0)) + 1.0 is at(var(A), i64(0)) + 1.0
    assert sym("N") * 2 is sym("N") * 2
    assert var(A) is not var(B)
    assert load(Value("x", XV.type), (var(A), var(A)), F32) is not at(var(A), var(A))


def test_literals_are_told_apart_by_bits_and_dtype():
    assert lit(0.0, F32) is not lit(-0.0, F32)
    assert lit(math.nan, F32) is lit(math.nan, F32)
    assert lit(1, I64) is not lit(1, I32)
    assert lit(1, I64) is not lit(True, BOOL)
    assert lit(1.0, F32) is not lit(1.0, F64)
    assert lit(True, BOOL) is TRUE
    assert type(lit(1, BOOL).value) is bool


def test_literals_take_the_precision_of_their_dtype():
    assert lit(0.1, F32).value == float(np.float32(0.1))
    assert lit(65520.0, DType.F16).value == math.inf
    assert lit(300, DType.U8).value == 44
    assert lit(200, DType.I8).value == -56
    assert lit(2**63, I64).value == -(2**63)
    assert math.copysign(1, lit(-0.0, DType.BF16).value) == -1


def test_the_table_forgets_what_nobody_uses():
    gc.collect()
    before = len(expr._TABLE)
    kept = [sym(f"gone{k}") + k for k in range(100)]
    assert len(expr._TABLE) > before
    del kept
    gc.collect()
    assert len(expr._TABLE) <= before + 1


def test_mixed_dtypes_are_refused():
    with pytest.raises(TypeError, match="dtypes differ"):
        apply("add", at(i64(0), i64(0)), lit(1.0, F64))
    with pytest.raises(TypeError, match="where"):
        where(TRUE & (var(A) < 2), at(i64(0), i64(0)), lit(1.0, F64))
    with pytest.raises(TypeError, match="truth"):
        bool(var(A) < 2)


def test_integers_fold_and_floats_do_not():
    assert i64(7) // 2 is i64(3)
    assert i64(-7) // 2 is i64(-4)
    assert i64(-7) % 4 is i64(1)
    assert i64(-7) / 2 is i64(-3)
    assert i64(5) // 0 is i64(0)
    assert lit(200, DType.U8) + lit(100, DType.U8) is lit(44, DType.U8)
    x = at(i64(0), i64(0))
    for e in (x + 0.0, x * 1.0, x - x, x * 0.0, lit(1.0, F32) + lit(2.0, F32)):
        assert isinstance(e, expr.Apply)


def test_identities():
    v = var(A)
    assert v + 0 is v
    assert v * 0 is i64(0)
    assert v * 1 is v
    assert v - v is i64(0)
    assert v % 1 is i64(0)
    assert (v < v) is FALSE
    assert eq(v, v) is TRUE
    assert apply("bdim", i64(1), sym("N")) is sym("N")
    assert apply("bdim", i64(5), sym("N")) is i64(5)
    assert apply("bcast", v, i64(1)) is i64(0)
    assert apply("bcast", v, i64(3)) is v
    assert where(TRUE, v, i64(0)) is v
    assert where(v < 2, v, v) is v


def test_casts():
    assert cast(at(i64(0), i64(0)), F32) is at(i64(0), i64(0))
    assert cast(i64(300), DType.U8) is lit(44, DType.U8)
    assert cast(i64(2), BOOL) is TRUE
    assert cast(lit(0.1, F64), F32) is lit(0.1, F32)
    assert isinstance(cast(lit(math.nan, F32), I32), expr.Apply), "what NaN becomes is the machine's business"


def test_substitute_is_simultaneous_and_keeps_what_it_does_not_touch():
    i, j = var(A), var(B)
    e = at(i, j) + at(i, i)
    assert substitute(e, {i: j, j: i}) is at(j, i) + at(j, j)
    assert substitute(e, {sym("N"): i}) is e
    assert substitute(at(i + 1, j), {i: i64(2)}) is at(i64(3), j)


def test_deep_expressions_do_not_recurse():
    e = at(i64(0), i64(0))
    for _ in range(20_000):
        e = apply("exp", e)
    assert sum(1 for _ in walk(e)) == 20_002
    assert substitute(e, {at(i64(0), i64(0)): at(i64(1), i64(0))}) is not e
    assert len(str(e)) < 200_000


def test_walk_gives_children_first_and_each_once():
    x = at(var(A), i64(0))
    order = list(walk((x + x) * (x + x)))
    assert len(order) == len(set(order)) == 5
    assert order.index(x) < order.index(x + x)
