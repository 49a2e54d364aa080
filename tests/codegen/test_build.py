"""Builder: loops carry values, masks count lanes, and integer helpers fold."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from onnxfuse.codegen.build import F32, I64, PTR, Builder, lanes_of, vec
from onnxfuse.codegen.object import compile_module, load_object
from onnxfuse.target import by_name
from tests.codegen.machines import MACHINES, V2, V3, undefined


def call(build: Builder, name: str, *args: int) -> int:
    data = compile_module(str(build.module), V2).data
    assert undefined(data) == []
    code = load_object(data, V2)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(args))(code.address(f"{build.prefix}.{name}"))(
        *args
    )


def test_nested_loops_carry_values():
    build = Builder(V2, "k")
    with build.function("sum", I64, [I64, I64]) as fn:
        with build.carry(0, fn.args[0], 1, [build.i64(0)]) as outer:
            with build.carry(outer.index, fn.args[1], 3, outer.values) as inner:
                inner.next = [build.i64(build.add(inner.values[0], inner.index))]
            outer.next = inner.results
        build.ret(outer.results[0])
    for n, m in ((0, 5), (4, 10), (3, 2)):
        assert call(build, "sum", n, m) == sum(j for i in range(n) for j in range(i, m, 3))


def test_a_loop_without_its_carried_values_is_refused():
    build = Builder(V2, "k")
    with (
        build.function("f", I64, [I64]) as fn,
        pytest.raises(AssertionError, match="carried"),
        build.carry(0, fn.args[0], 1, [build.i64(0)]),
    ):
        pass


@pytest.mark.parametrize("count", [0, 1, 5, 7, 8, 9, 100])
def test_tail_masks_count_lanes(count):
    build = Builder(V2, "k")
    with build.function("mask", I64, [I64]) as fn:
        mask = build.tail_mask(fn.args[0], 8)
        build.ret(build.ir.zext(build.ir.bitcast(mask, vec(I64, 1).__class__(8)), I64))
    assert call(build, "mask", count) == (1 << min(count, 8)) - 1


def test_integers_known_now_are_python_ints():
    build = Builder(V2, "k")
    assert build.add(2, 3) == 5
    assert build.mul(build.sub(7, 3), 2) == 8
    assert build.ceildiv(17, 8) == 3
    assert (build.imin(2, 3), build.imax(2, 3), build.udiv(9, 2), build.umod(9, 2)) == (2, 3, 4, 1)
    assert build.mul(build.i64(4), 0) == 0


def test_branches():
    build = Builder(V2, "k")
    with build.function("f", I64, [I64]) as fn:
        slot = build.alloca(I64)
        build.store(build.i64(1), slot)
        odd = build.ir.icmp_signed("==", build.i64(build.umod(fn.args[0], 2)), build.i64(1))
        with build.if_else(odd) as (then, other):
            with then:
                build.store(build.i64(10), slot)
            with other, build.if_then(build.ir.icmp_signed(">", fn.args[0], build.i64(5))):
                build.store(build.i64(20), slot)
        build.ret(build.load(slot, I64))
    assert [call(build, "f", n) for n in (3, 4, 8)] == [10, 1, 20]


def test_names_carry_the_prefix_and_nothing_calls_the_c_library():
    build = Builder(V3, "kernel7")
    with build.function("f", I64, [PTR, PTR, I64]) as fn:
        with build.loop(0, fn.args[2]) as i:  # a copy loop, which LLVM would make a memcpy
            build.store(build.load(build.offset(fn.args[0], i, F32), F32), build.offset(fn.args[1], i, F32))
        build.ret(0)
    assert "kernel7.f" in str(build.module)
    assert undefined(compile_module(str(build.module), V3).data) == []


@pytest.mark.parametrize("target", MACHINES)
def test_fma_is_never_a_library_call(target):
    build = Builder(target, "k")
    n = target.lanes(4)
    with build.function("f", I64, [PTR]) as fn:
        x = build.load(fn.args[0], F32, n)
        assert lanes_of(build.fma(x, x, x)) == n
        build.store(build.fma(x, x, x), fn.args[0])
        build.ret(0)
    assert undefined(compile_module(str(build.module), target).data) == []


def test_features_are_asked_by_name():
    assert Builder(V3, "k").has_fma
    assert not Builder(V2, "k").has_fma
    assert Builder(by_name("aarch64"), "k").has_half


@pytest.mark.isa("avx2")
def test_a_square_is_transposed():
    build = Builder(V3, "k")
    with build.function("f", I64, [PTR]) as fn:
        rows = [build.load(build.offset(fn.args[0], 8 * k, F32), F32, 8) for k in range(8)]
        for k, column in enumerate(build.transpose(rows)):
            build.store(column, build.offset(fn.args[0], 8 * k, F32))
        build.ret(0)
    code = load_object(compile_module(str(build.module), V3).data, V3)
    a = np.arange(64, dtype=np.float32).reshape(8, 8)
    ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.address("k.f"))(a.ctypes.data)
    np.testing.assert_array_equal(a, np.arange(64).reshape(8, 8).T)
