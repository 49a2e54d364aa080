"""Every primitive computes what its numpy meaning says, for every dtype, scalar and vector, without library calls."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from onnxfuse.codegen.prims import LOWER, lower
from onnxfuse.codegen.vecmath.table import UNARY
from onnxfuse.ir import interp
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.prims import PRIMS
from onnxfuse.target import TARGETS, Target
from tests.codegen.machines import MACHINES, Scrap, lower_all

FLOATS = (DType.F32, DType.F64)
HALVES = (DType.F16, DType.BF16)
INTS = (DType.I8, DType.I16, DType.I32, DType.I64, DType.U8, DType.U16, DType.U32, DType.U64)
ALL = (*FLOATS, *HALVES, *INTS, DType.BOOL)

COMPARE = {"eq", "ne", "lt", "le"}
FLOAT_ONLY = {"div", "sqrt", "floor", "ceil", "rint", "trunc", "copysign", "isnan", "isinf", "decay", *UNARY}
INT_ONLY = {"idiv", "floordiv", "mod", "bitand", "bitor", "bitxor", "bitnot", "shl", "shr", "bcast", "bdim"}
HALF_TOO = {"neg", "abs", "copysign", "min", "max", "isnan", "isinf", "where", *COMPARE}
LOGIC = {"and", "or", "xor", "not"}
APART = {"cast", "bits", "pow", "where", "decay", *UNARY}  # tested on their own


def dtypes_of(name: str) -> tuple[DType, ...]:
    if name in LOGIC:
        return (DType.BOOL,)
    if name in FLOAT_ONLY:
        return (*FLOATS, *(HALVES if name in HALF_TOO else ()))
    if name in INT_ONLY:
        return INTS
    return (*FLOATS, *(HALVES if name in HALF_TOO else ()), *INTS, *((DType.BOOL,) if name in ("eq", "ne") else ()))


def values(dtype: DType, rng: np.random.Generator, n: int) -> np.ndarray:
    """Edge values in all pairs, then random ones."""
    if dtype is DType.BOOL:
        return rng.integers(0, 2, n).astype(np.bool_)
    if dtype.is_float:
        info = 6e4 if dtype is DType.F16 else 3e38
        edge = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, 2.5, -2.5, info, -info, 1e-7, 7.0]
        with np.errstate(all="ignore"):
            x = np.concatenate([np.tile(edge, 16), rng.standard_normal(n) * np.exp2(rng.integers(-8, 8, n))])
            return x[:n].astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    edge = np.array([0, 1, 2, 3, 7, info.max, info.min, info.max - 1, 5, 10, 100, 0, 1, 2, 4, 8], dtype.numpy)
    if dtype.is_signed:
        edge[11:] = [-1, -2, -7, -8, -100]
    x = np.concatenate([np.tile(edge, 16), rng.integers(info.min, info.max, n, dtype=dtype.numpy, endpoint=True)])
    x[300:400] = rng.integers(0, 12, 100)
    return x[:n]


def pairs(dtype: DType, arity: int, rng: np.random.Generator, n: int = 512) -> list[np.ndarray]:
    args = [values(dtype, rng, n) for _ in range(arity)]
    if arity == 2:
        args[1][:256] = np.repeat(args[1][:16], 16)
    return args


@functools.cache
def compiled(target: Target) -> Scrap:
    pieces = {}
    for name in PRIMS:
        if name in APART:
            continue
        for dtype in dtypes_of(name):
            dst = DType.BOOL if PRIMS[name].rule in ("bool", "logic") else dtype
            for lanes in (1, max(4, target.lanes(dtype.compute.bytes))):
                pieces[f"{name}.{dtype}.{'s' if lanes == 1 else 'v'}"] = (
                    [dtype] * PRIMS[name].arity, dst, lanes,
                    lambda b, regs, name=name, dtype=dtype, dst=dst: lower(b, name, regs, dtype, dst),
                )  # fmt: skip
    return lower_all(target, pieces)


def same_bits(got: np.ndarray, want: np.ndarray, zeros: bool = True) -> None:
    """Equal, NaN as NaN, zeros with their sign unless `zeros` is False."""
    assert got.dtype == want.dtype
    if got.dtype.kind not in "fV" and got.dtype.name != "bfloat16":
        np.testing.assert_array_equal(got, want)
        return
    g, w = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(g, w)
    if zeros:
        number = ~np.isnan(w)
        np.testing.assert_array_equal(np.signbit(g[number]), np.signbit(w[number]))


def test_same_keys_as_the_prim_table():
    assert set(LOWER) | {"cast", "bits"} == set(PRIMS)


@pytest.mark.parametrize("name", [n for n in PRIMS if n not in APART])
@pytest.mark.parametrize("target", MACHINES)
def test_primitive_equals_its_numpy_meaning(target, name, rng):
    prim = PRIMS[name]
    for dtype in dtypes_of(name):
        args = pairs(dtype, prim.arity, rng)
        if name in ("shl", "shr"):
            args[1] = (args[1].astype(np.int64) % 70).astype(dtype.numpy) if dtype.bytes > 1 else abs(args[1] % 12)
        dst = DType.BOOL if prim.rule in ("bool", "logic") else dtype
        with np.errstate(all="ignore"):
            want = np.asarray(prim.numpy(*args)).astype(dst.numpy)
        for kind in "sv":
            got = compiled(target)(f"{name}.{dtype}.{kind}", args, dst)
            same_bits(got, want, zeros=name not in ("min", "max"))


@pytest.mark.parametrize("target", MACHINES)
def test_of_equal_zeros_min_and_max_take_the_second(target):
    """What onnxruntime's vector loops do (1.32, x86)."""
    x, y = np.tile(np.array([0.0, -0.0], np.float32), 8), np.tile(np.array([-0.0, 0.0], np.float32), 8)
    for name in ("min", "max"):
        for kind in "sv":
            same_bits(compiled(target)(f"{name}.f32.{kind}", [x, y], DType.F32), y)


@pytest.mark.parametrize("target", MACHINES)
def test_integer_power_wraps(target):
    pieces = {}
    for dtype in (DType.I32, DType.I64, DType.U8):
        for lanes in (1, 4):
            emit = lambda b, regs, dtype=dtype: lower(b, "pow", regs, dtype, dtype)  # noqa: E731
            pieces[f"{dtype}.{lanes}"] = ([dtype, dtype], dtype, lanes, emit)
    scrap = lower_all(target, pieces)
    for dtype in (DType.I32, DType.I64, DType.U8):
        x, y = (
            np.array([2, 3, 10, 0, 1, 7, 5, 0] * 2, dtype.numpy),
            np.array([10, 5, 3, 0, 9, 1, 2, 4] * 2, dtype.numpy),
        )
        for lanes in (1, 4):
            np.testing.assert_array_equal(scrap(f"{dtype}.{lanes}", [x, y], dtype), np.power(x, y))
    x, y = np.array([2, 1, -1, -1] * 4, np.int32), np.array([-1, -5, -3, -2] * 4, np.int32)
    np.testing.assert_array_equal(scrap("i32.4", [x, y], DType.I32), np.array([0, 1, -1, 1] * 4))


@pytest.mark.parametrize("target", MACHINES)
def test_bits_are_read_as_another_type(target, rng):
    same = [(s, d) for s in ALL for d in ALL if s is not d and s.bytes == d.bytes and DType.BOOL not in (s, d)]
    pieces = {
        f"{s}.{d}.{lanes}": ([s], d, lanes, lambda b, regs, s=s, d=d: lower(b, "bits", regs, s, d))
        for s, d in same
        for lanes in (1, 8)
    }
    scrap = lower_all(target, pieces)
    for s, d in same:
        x = rng.integers(0, 256, 64 * s.bytes).astype(np.uint8).view(s.numpy)
        for lanes in (1, 8):
            got = scrap(f"{s}.{d}.{lanes}", [x], d)
            np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


@functools.cache
def casts(target: Target) -> Scrap:
    pieces = {}
    for src in ALL:
        for dst in ALL:
            for lanes in (1, 8):
                emit = lambda b, regs, src=src, dst=dst: lower(b, "cast", regs, src, dst)  # noqa: E731
                pieces[f"{src}.{dst}.{lanes}"] = ([src], dst, lanes, emit)
    return lower_all(target, pieces)


@pytest.mark.parametrize("src", ALL)
@pytest.mark.parametrize("target", MACHINES[:2])
def test_cast_equals_the_interpreter(target, src, rng):
    x = values(src, rng, 512)
    if src in FLOATS:
        x[256:300] = rng.uniform(-300, 300, 44)
        x[300:320] = rng.uniform(-(2.0**34), 2.0**34, 20)
        x[320:340] = rng.uniform(2.0**63, 2.0**64, 20)
    for dst in ALL:
        with np.errstate(all="ignore"):
            want = np.asarray(interp.convert(x, src, dst))
        for lanes in (1, 8):
            same_bits(casts(target)(f"{src}.{dst}.{lanes}", [x], dst), want.astype(dst.numpy))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("target", MACHINES[:2])
def test_every_half_value_survives_the_round_trip(target, half):
    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(half.numpy)
    with np.errstate(all="ignore"):
        wide = casts(target)(f"{half}.f32.8", [x], DType.F32)
        np.testing.assert_array_equal(wide, x.astype(np.float32))
        back = casts(target)(f"f32.{half}.8", [wide], half)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back.view(np.uint16)[number], x.view(np.uint16)[number])
    assert np.isnan(back[~number].astype(np.float32)).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("target", MACHINES[:2])
def test_rounding_to_half_is_to_nearest_even(target, half):
    step = 997
    x = np.arange(0, 1 << 32, step, dtype=np.uint64)[: (1 << 32) // step // 8 * 8].astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        same_bits(casts(target)(f"f32.{half}.8", [x], half), x.astype(half.numpy))


@pytest.mark.parametrize("target", [t for t in TARGETS if t.name != "x86-64-v2"], ids=lambda t: t.name)
def test_no_target_needs_a_library_call(target):
    """Compile only: this host need not run it. `lower_all` refuses undefined symbols."""
    pieces = {}
    for name in PRIMS:
        for dtype in (DType.F32, DType.F64) if name in UNARY or name in ("decay", "pow") else dtypes_of(name):
            if name in ("cast", "where"):
                continue
            dst = DType.BOOL if PRIMS[name].rule in ("bool", "logic") else dtype
            emit = lambda b, regs, name=name, dtype=dtype, dst=dst: lower(b, name, regs, dtype, dst)  # noqa: E731
            pieces[f"{name}.{dtype}"] = ([dtype] * PRIMS[name].arity, dst, target.lanes(dtype.compute.bytes), emit)
    for src in ALL:
        for dst in ALL:
            emit = lambda b, regs, src=src, dst=dst: lower(b, "cast", regs, src, dst)  # noqa: E731
            pieces[f"{src}.{dst}"] = ([src], dst, 8, emit)
    assert lower_all(target, pieces, run=False) is None
