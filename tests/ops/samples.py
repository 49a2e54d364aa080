"""Sample inputs of every entry of the op table: a default per family, and rows for what the default cannot know.

`samples(op, opset)` gives the samples of an entry in a model of that opset. Everything is seeded by text. Values that
are undefined in ONNX or kill onnxruntime (integer division by zero, MIN / -1) are left out here and tested by hand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.op import Family, Op
from tests.ops.harness import Sample

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
I8, I16, I32, I64 = (np.dtype(f"i{n}") for n in (1, 2, 4, 8))
U8, U16, U32, U64 = (np.dtype(f"u{n}") for n in (1, 2, 4, 8))
BOOL = np.dtype(np.bool_)
FLOATS = (F32, F64, F16, BF16)
INTS = (I8, I16, I32, I64, U8, U16, U32, U64)
DTYPES = (*FLOATS, *INTS, BOOL)

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (17,), (2, 3), (2, 0, 3), (2, 1, 3, 4))
PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), ()), ((3,), ()), ((), (3,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((3,), (2, 3)), ((2, 1), (1, 3)),
    ((2, 3), (2, 1)), ((1, 3), (2, 3)), ((0, 3), (1, 3)), ((2, 0), (2, 1)), ((1,), (0,)), ((2, 3, 4), (3, 1)),
    ((4, 1, 3), (2, 1)), ((1, 1), (3,)),
)  # fmt: skip


# --- values --------------------------------------------------------------------------------------------------------
def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == BF16


def specials(dtype: np.dtype) -> np.ndarray:
    """One vector of everything awkward in a dtype."""
    dtype = np.dtype(dtype)
    if dtype == BOOL:
        return np.array([True, False, True])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = [0, 1, 2, 3, 7, 100, info.max, info.max - 1]
        if dtype.kind == "i":
            values += [-1, -2, -3, -7, -100, info.min, info.min + 1]
        return np.array(values, dtype)
    info = ml_dtypes.finfo(dtype)
    tiny, small, big = float(info.smallest_subnormal), float(info.smallest_normal), float(info.max)
    values = [
        np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.5, 0.25, -0.75, tiny, -tiny,
        small, -small, big, -big, 1e-3, -1e-3, 3.7, -7.3, 8.5, -8.5, 19.0, -19.0, 88.0, -88.0, 120.0, -120.0, 1e4, -1e4,
        0.999, -0.999, 2.9999, 5.0,
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        return np.array(values, np.float64).astype(dtype)


def rand(shape: Sequence[int], dtype: np.dtype = F32, seed: str = "", lo: float = -3, hi: float = 3) -> np.ndarray:
    """Seeded uniform values; integers are small, unsigned ones not negative."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(zlib.crc32(f"{seed}{list(shape)}".encode()))
    if dtype == BOOL:
        return rng.integers(0, 2, tuple(shape)).astype(np.bool_)
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else int(lo), int(hi) + 1, tuple(shape)).astype(dtype)
    return rng.uniform(lo, hi, tuple(shape)).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def sample(
    *inputs: np.ndarray | None, const: Iterable[int] = (), outputs: int = 1, may: bool = False, **attrs
) -> Sample:
    """`may`: onnxruntime need not have a kernel for it."""
    arrays = tuple(None if a is None else np.asarray(a) for a in inputs)
    return Sample(arrays, attrs, frozenset(const), outputs, may)


Rows = Callable[[Op, int], Iterable[Sample]]
ROWS: dict[str, Rows] = {}


def rows(*names: str) -> Callable[[Rows], Rows]:
    def put(f: Rows) -> Rows:
        for n in names:
            assert n not in ROWS, n
            ROWS[n] = f
        return f

    return put


def samples(op: Op, opset: int) -> list[Sample]:
    """All samples of an entry. Raises KeyError when nobody wrote any (the family has no default either)."""
    if op.name in ROWS:
        return list(ROWS[op.name](op, opset))
    if op.family is Family.POINTWISE:
        return list(_pointwise(op, opset))
    if op.family is Family.REDUCE:
        return list(_reduce(op, opset))
    raise KeyError(f"no samples for {op}@{op.since}")


# --- pointwise -----------------------------------------------------------------------------------------------------
_TWO = "Add Sub Mul Equal Less Greater LessOrEqual GreaterOrEqual And Or Xor BitwiseAnd BitwiseOr BitwiseXor"
ARITY = dict.fromkeys(_TWO.split(), 2)
MAIN = dict.fromkeys(("And", "Or", "Xor", "Not"), BOOL) | dict.fromkeys(
    ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"), I32
)
ATTRS: dict[str, list[dict[str, object]]] = {
    "LeakyRelu": [{"alpha": 0.3}, {"alpha": -1.5}, {"alpha": 0.0}],
    "Elu": [{"alpha": 0.3}, {"alpha": 2.0}],
    "Selu": [{"alpha": 2.0, "gamma": 3.0}],
    "Celu": [{"alpha": 2.0}, {"alpha": 0.5}],
    "ThresholdedRelu": [{"alpha": 2.0}, {"alpha": -1.0}, {"alpha": 0.0}],
    "HardSigmoid": [{"alpha": 0.5, "beta": 0.1}],
    "Shrink": [{"bias": 1.5}, {"lambd": 1.5}, {"bias": 0.5, "lambd": 1.0}],
    "Gelu": [{"approximate": "tanh"}],
    "Swish": [{"alpha": 0.5}, {"alpha": 1.702}],
    "IsInf": [{"detect_negative": 0}, {"detect_positive": 0}, {"detect_negative": 0, "detect_positive": 0}],
}


def _pointwise(op: Op, opset: int) -> Iterator[Sample]:
    main = I32 if op.name == "Equal" and opset < 11 else MAIN.get(op.name, F32)
    yield from _unary(op, main) if ARITY.get(op.name, 1) == 1 else _binary(main)


def _unary(op: Op, main: np.dtype) -> Iterator[Sample]:
    for dtype in DTYPES:
        yield sample(specials(dtype), may=dtype != main)
    for shape in SHAPES:
        yield sample(rand(shape, main))
    for attrs in ATTRS.get(op.name, []):
        for dtype in (main, F64, F16):
            yield sample(specials(dtype), may=dtype != main, **attrs)


def _binary(
    main: np.dtype, pick: Callable[[np.dtype], tuple[np.ndarray, np.ndarray]] | None = None
) -> Iterator[Sample]:
    for dtype in DTYPES:
        a, b = (specials(dtype)[:, None], specials(dtype)[None, :]) if pick is None else pick(dtype)
        yield sample(a, b, may=dtype != main)
    for left, right in PAIRS:
        yield sample(rand(left, main, "a"), rand(right, main, "b", 1))


def _divisors(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    a, b = specials(dtype)[:, None], specials(dtype)[None, :]
    if dtype.kind in "iu":
        b = b[:, b[0] != 0]
        if dtype.kind == "i":
            a = a[a[:, 0] != np.iinfo(dtype).min]
    return a, b


@rows("Div")
def _div(op, opset):
    return _binary(F32, _divisors)


@rows("Mod")
def _mod(op, opset):
    for dtype in (*INTS, *FLOATS):
        a, b = _divisors(dtype)
        if not is_float(dtype):
            yield sample(a, b, may=dtype != I32)
        elif opset >= 28:
            yield sample(a, b, may=dtype == BF16)
        yield sample(a, b, may=dtype not in (I32, F32), fmod=1)
    yield sample(rand((2, 1), I64), rand((3,), I64, lo=1))


@rows("Pow")
def _pow(op, opset):
    for dtype in FLOATS:
        yield sample(specials(dtype)[:, None], specials(dtype)[None, :], may=dtype not in (F32, F64))
    for e in (0.0, 0.5, 1.0, 2.0, 3.0, -1.0, -2.0, 4.0):
        yield sample(specials(F32), np.float32(e), const=[1])
        yield sample(specials(F32), np.array([e], F32), const=[1])
    for left, right in PAIRS:
        yield sample(rand(left, F32, "a", 0), rand(right, F32, "b", 1))
    if opset >= 12:
        small = np.array([[0, 1, 2, 3, 5]])
        base = np.array([[0], [1], [2], [-1], [-2], [7]])
        for dtype in (I32, I64):
            for power in (I32, I64, F32, F64):
                yield sample(base.astype(dtype), small.astype(power), may=power not in (I32, I64))
        for power in (I32, I64, F64, F16):
            yield sample(specials(F32)[:, None], small.astype(power), may=True)
            yield sample(specials(F64)[:, None], small.astype(power), may=True)
            yield sample(specials(F16)[:, None], small.astype(power), may=True)
        for e in (2, 3, 0, 1):
            yield sample(specials(F32), np.array(e, I64), const=[1])
            yield sample(base.astype(I64), np.array(e, I64), const=[1])


@rows("Sum", "Mean", "Max", "Min")
def _variadic(op, opset):
    for dtype in DTYPES if op.name in ("Max", "Min") else FLOATS:
        if opset >= 8:
            yield sample(specials(dtype)[:, None], specials(dtype)[None, :], may=dtype != F32)
        yield sample(specials(dtype), specials(dtype)[::-1].copy(), may=dtype != F32)
        yield sample(specials(dtype), may=dtype != F32)
    for shape in SHAPES:
        yield sample(*(rand(shape, F32, s) for s in "abc"))
    if opset >= 8:
        for left, right in PAIRS:
            yield sample(rand(left, F32, "a"), rand(right, F32, "b"))
        yield sample(rand((2, 1), seed="a"), rand((3,), seed="b"), rand((4, 1, 1), seed="c"))
        nans = np.array([np.nan, 1, np.nan, 0], F32)
        yield sample(nans[:, None], np.array([[10]], F32))
        yield sample(nans, np.array(10, F32))
        yield sample(np.array(10, F32), nans)


@rows("PRelu")
def _prelu(op, opset):
    for dtype in DTYPES:
        yield sample(specials(dtype)[:, None], specials(dtype)[None, :][:, :1], may=dtype != F32)
    for left, right in (
        ((2, 3), (3,)),
        ((2, 3, 4), (3, 1)),
        ((2, 3), ()),
        ((2, 3), (2, 3)),
        ((0, 3), (3,)),
        ((3,), (1,)),
    ):
        yield sample(rand(left, seed="a"), rand(right, seed="b"))


@rows("Clip")
def _clip(op, opset):
    if op.since < 11:
        for attrs in ({}, {"min": -1.0}, {"max": 2.5}, {"min": -1.0, "max": 1.0}, {"min": 0.0}):
            yield sample(specials(F32), **attrs)
        for shape in SHAPES:
            yield sample(rand(shape), min=-1.0, max=1.0)
        return
    for dtype in (*FLOATS, *INTS):
        lo, hi = np.array(1 if dtype.kind == "u" else -1, dtype), np.array(5, dtype)
        for args in ((lo, hi), (None, hi), (lo,), ()):
            yield sample(specials(dtype), *args, may=dtype != F32 or opset < 12)
            yield sample(specials(dtype), *args, const=[1, 2], may=dtype != F32 or opset < 12)
    for lo, hi in ((0.0, 6.0), (-0.0, 0.0), (0.0, -0.0), (2.0, 1.0), (np.nan, 1.0), (0.0, np.nan), (-np.inf, np.inf)):
        yield sample(specials(F32), np.float32(lo), np.float32(hi))
        yield sample(specials(F64), np.float64(lo), np.float64(hi), may=opset < 12)
    for shape in SHAPES:
        yield sample(rand(shape), np.float32(-1), np.float32(1))


@rows("Where")
def _where(op, opset):
    for dtype in DTYPES:
        a = specials(dtype)
        yield sample(rand(a.shape, BOOL), a, a[::-1].copy(), may=dtype not in (F32, I64))
    for c, a, b in (((), (3,), (3,)), ((3,), (), ()), ((2, 1), (3,), ()), ((2, 3), (1,), (2, 1)), ((0, 3), (1, 3),
    (3,)),
                    ((4, 1, 1), (3, 1), (2,)), ((1,), (2, 2), (1, 2))):  # fmt: skip
        yield sample(rand(c, BOOL), rand(a, F32, "a"), rand(b, F32, "b"))


@rows("BitShift")
def _bitshift(op, opset):
    for direction in ("LEFT", "RIGHT"):
        for dtype in INTS:
            if dtype.kind == "i" and opset < 28:
                continue
            bits = dtype.itemsize * 8
            by = np.array([[0, 1, 3, bits - 1] + ([bits, 100, -1] if dtype.kind == "i" else [])], dtype)
            yield sample(specials(dtype)[:, None], by, may=dtype == U16, direction=direction)
        for left, right in PAIRS:
            yield sample(rand(left, U8, "a"), rand(right, U8, "b"), direction=direction)


@rows("Not")
def _not(op, opset):
    for shape in SHAPES:
        yield sample(rand(shape, BOOL))


def _castable(src: np.dtype, dst: np.dtype) -> np.ndarray:
    """Values whose conversion is defined: it must fit (C leaves the rest open, and compilers differ)."""
    x = specials(src)
    if is_float(src) and dst.kind in "iu":
        wide = x.astype(np.float64)
        info = np.iinfo(dst)
        with np.errstate(all="ignore"):
            fits = np.isfinite(wide) & (np.trunc(wide) >= float(info.min)) & (np.trunc(wide) < float(info.max))
        x = x[fits]
    return x


@rows("Cast")
def _cast(op, opset):
    for src in DTYPES:
        for dst in DTYPES:
            yield sample(_castable(src, dst), may=True, to=DType.from_numpy(dst).onnx)
    for shape in SHAPES:
        yield sample(rand(shape), to=DType.I64.onnx)


@rows("BitCast")
def _bitcast(op, opset):
    for src in DTYPES:
        for dst in DTYPES:
            if src.itemsize == dst.itemsize and BOOL not in (src, dst):
                yield sample(specials(src), may=True, to=DType.from_numpy(dst).onnx)
    for shape in SHAPES:
        yield sample(rand(shape), to=DType.I32.onnx)


@rows("CastLike")
def _castlike(op, opset):
    for src, dst in ((F32, I64), (I64, F32), (F32, F16), (F64, F32), (F32, BOOL), (BOOL, F32), (I32, I8)):
        yield sample(_castable(src, dst), np.zeros(1, dst))
    for like in ((), (5,), (2, 3, 4), (0,)):  # its shape does not matter
        yield sample(rand((2, 3)), np.zeros(like, np.int64))


# --- reductions ----------------------------------------------------------------------------------------------------
POSITIVE = {"ReduceLogSum"}  # of others the logarithm is NaN, and so is the comparison


def _reduction(op: Op, x: np.ndarray, axes: Sequence[int] | None, may: bool = False, **attrs: object) -> Sample:
    if "axes" in (p for p in _inputs(op)):
        return sample(x, None if axes is None else np.array(axes, np.int64), const=[1], may=may, **attrs)
    return sample(x, may=may, **({} if axes is None else {"axes": list(axes)}), **attrs)


def _inputs(op: Op) -> list[str]:
    from onnxfuse.ops.table import parameters

    return [p.name for p in parameters(op)[0]]


def _reduce(op: Op, opset: int) -> Iterator[Sample]:
    low = 0.1 if op.name in POSITIVE else -3
    for dtype in DTYPES:
        yield _reduction(op, rand((2, 5), dtype, lo=low if dtype.kind == "f" else 1), [1], may=dtype != F32)
    for shape, axes in (
        ((3,), [0]), ((2, 3, 4), [1]), ((2, 3, 4), [0, 2]), ((2, 3, 4), [-1]), ((2, 3, 4), [2, 0]), ((2, 3, 4), None),
        ((4,), None), ((2, 3, 4, 5), [2, 3]), ((1, 1), [0]), ((2, 37), [1]), ((37, 2), [0]),
    ):  # fmt: skip
        for keepdims in (0, 1):
            yield _reduction(op, rand(shape, lo=low), axes, keepdims=keepdims)
    yield _reduction(op, rand((), lo=low), None, keepdims=0)
    yield _reduction(op, rand((), lo=low), None, keepdims=1)
    for shape, axes in (((0, 3), [1]), ((2, 0), [1]), ((0,), None)):
        yield _reduction(op, rand(shape), axes, may=True)
    for at in (0, 1, 16, 32):
        for n in (2, 17, 33):
            if at < n:
                x = rand((1, n), lo=low)
                x[0, at] = np.nan
                yield _reduction(op, x, [1], keepdims=0)
                yield _reduction(op, x.T.copy(), [0], keepdims=0)
    for value in (np.inf, -np.inf):
        x = rand((2, 5), lo=low)
        x[1, 2] = value
        yield _reduction(op, x, [1])
    if "axes" in _inputs(op):
        for shape in ((2, 3), (3,)):
            for noop in (0, 1):
                for keepdims in (0, 1):
                    for axes in (None, []):
                        yield _reduction(
                            op, rand(shape, lo=low), axes, may=True, noop_with_empty_axes=noop, keepdims=keepdims
                        )


@rows("ReduceLogSumExp")
def _logsumexp(op, opset):
    yield from _reduce(op, opset)
    if opset < 28:  # there onnxruntime has no kernel yet, and the function of the specification overflows
        yield _reduction(op, np.array([[1000.0, 1000.0], [-1000.0, -1001.0]], F32), [1])


# --- shapes --------------------------------------------------------------------------------------------------------
@rows("Identity")
def _identity(op, opset):
    for dtype in DTYPES:
        yield sample(specials(dtype), may=dtype == BF16)
    for shape in SHAPES:
        yield sample(rand(shape))


@rows("Dropout")
def _dropout(op, opset):
    for shape in SHAPES:
        if opset < 12:
            yield sample(rand(shape), ratio=0.3)
            continue
        yield sample(rand(shape))
        yield sample(rand(shape), np.float32(0.3))
        yield sample(rand(shape), np.float32(0.3), np.bool_(False), const=[1, 2])
    yield sample(rand((2, 3), F64))


@rows("Shape")
def _shape(op, opset):
    for shape in SHAPES:
        yield sample(rand(shape))
        if opset >= 15:
            for start, end in ((0, 2), (1, None), (-1, None), (-9, 9), (2, 1), (0, -1)):
                yield sample(rand(shape), start=start, **({} if end is None else {"end": end}))


@rows("Size")
def _size(op, opset):
    for shape in SHAPES:
        yield sample(rand(shape))


@rows("Reshape")
def _reshape(op, opset):
    for shape, to in (
        ((2, 3, 4), (6, 4)), ((2, 3, 4), (24,)), ((2, 3, 4), (4, 3, 2)), ((2, 3, 4), (0, -1)), ((2, 3, 4), (-1, 0)),
        ((2, 3, 4), (0, 0, 2, 2)), ((2, 3, 4), (2, -1, 2)), ((), (1, 1)), ((1, 1), ()), ((0, 3), (3, 0)), ((0, 3),
        (0, -1)),
        ((5,), (5,)), ((2, 3), (1, 2, 1, 3)), ((6, 4), (2, 3, 2, 2)), ((0, 4), (-1, 2)), ((2, 6), (0, 2, 3)),
    ):  # fmt: skip
        yield sample(rand(shape), ints(*to), const=[1], may=(to == (0, -1) and 0 in shape) or shape == (0, 3))
    if opset >= 14:
        yield sample(rand((0, 3)), ints(3, 0), const=[1], allowzero=1)
        yield sample(rand((0, 10)), ints(0, 10), const=[1], allowzero=1)
    for dtype in DTYPES:
        yield sample(specials(dtype)[:2], ints(2, 1), const=[1], may=dtype == BF16)


@rows("Flatten")
def _flatten(op, opset):
    for axis in (0, 1, 2, 3) + ((-1, -2, -3) if opset >= 11 else ()):
        yield sample(rand((2, 3, 4)), axis=axis)
    yield sample(rand((2, 3)))
    yield sample(rand(()), axis=0)
    yield sample(rand((0, 3)))
    yield sample(rand((2, 0, 3)), axis=2)
    yield sample(rand((4,)), axis=1)


def _axes(op: Op, x: np.ndarray, axes: Sequence[int] | None) -> Sample:
    if "axes" in _inputs(op):
        return sample(x, None if axes is None else np.array(axes, np.int64), const=[1])
    return sample(x, **({} if axes is None else {"axes": list(axes)}))


@rows("Squeeze")
def _squeeze(op, opset):
    for shape, axes in (
        ((1, 3, 1), [0]),
        ((1, 3, 1), [0, 2]),
        ((1, 3, 1), None),
        ((3, 1), [1]),
        ((1,), [0]),
        ((2, 3), None),
        ((1, 0), [0]),
    ):
        yield _axes(op, rand(shape), axes)
    if opset >= 11:
        yield _axes(op, rand((1, 3, 1)), [-1])


@rows("Unsqueeze")
def _unsqueeze(op, opset):
    for shape, axes in (
        ((3,), [0]),
        ((3,), [1]),
        ((2, 3), [0, 3]),
        ((2, 3), [1, 2]),
        ((), [0]),
        ((0, 2), [1]),
        ((2, 3), [2, 0]),
    ):
        yield _axes(op, rand(shape), axes)
    if opset >= 11:
        yield _axes(op, rand((2, 3)), [-1])
        yield _axes(op, rand((2, 3)), [-1, 0])


@rows("Transpose")
def _transpose(op, opset):
    for shape, perm in (
        ((2, 3), None),
        ((2, 3, 4), [0, 2, 1]),
        ((2, 3, 4), [1, 2, 0]),
        ((2, 3, 4, 5), [3, 0, 2, 1]),
        ((), None),
        ((0, 3), None),
        ((4,), [0]),
        ((2, 3, 4), [2, 0, 1]),
    ):
        yield sample(rand(shape), **({} if perm is None else {"perm": perm}))
    for dtype in DTYPES:
        yield sample(rand((2, 3), dtype), may=dtype == BF16)


@rows("Expand")
def _expand(op, opset):
    for shape, to in (
        ((3, 1), (3, 4)),
        ((3, 1), (2, 3, 4)),
        ((3, 4), (1, 1)),
        ((), (2, 3)),
        ((1,), (0,)),
        ((2, 1, 3), (4, 1)),
        ((3,), (3,)),
        ((1, 3), (2, 1)),
        ((0, 1), (1, 5)),
    ):
        yield sample(rand(shape), ints(*to), const=[1])
    for dtype in DTYPES:
        yield sample(rand((1, 2), dtype), ints(2, 2), const=[1], may=True)


@rows("Tile")
def _tile(op, opset):
    for shape, times in (
        ((2, 3), (2, 2)),
        ((2, 3), (1, 3)),
        ((3,), (4,)),
        ((2, 3), (0, 1)),
        ((2, 0), (2, 2)),
        ((2, 1, 3), (1, 5, 2)),
        ((1, 1), (3, 4)),
        ((2, 3), (1, 1)),
    ):
        yield sample(rand(shape), ints(*times), const=[1])
    for dtype in DTYPES:
        yield sample(rand((1, 2), dtype), ints(2, 2), const=[1], may=True)


@rows("ConstantOfShape")
def _constantofshape(op, opset):
    for shape in ((), (3,), (2, 3), (0, 2)):
        yield sample(ints(*shape), const=[0])
    for dtype in DTYPES:
        if dtype != BF16:
            yield sample(ints(2), const=[0], value=specials(dtype)[1:2])
    yield sample(ints(2, 70), const=[0], value=np.array([7], np.int64))


@rows("Range")
def _range(op, opset):
    for dtype in (I64, I32, I16, F32, F64):
        for a, b, c in ((0, 5, 1), (0, 5, 2), (5, 0, -1), (5, 0, -2), (0, 0, 1), (3, 1, 1), (-3, 4, 3), (0, 1, 5)):
            yield sample(*(np.array(v, dtype) for v in (a, b, c)), const=[0, 1, 2])
            if c == 1:
                yield sample(*(np.array(v, dtype) for v in (a, b, c)), const=[0, 2])
    yield sample(*(np.array(v, F32) for v in (0.1, 1.0, 0.3)), const=[0, 1, 2])
    yield sample(*(np.array(v, I64) for v in (0, 200, 1)), const=[0, 1, 2])


@rows("Slice")
def _slice(op, opset):
    big = 2**63 - 1
    for shape, starts, ends, axes in (
        ((10,), [2], [7], None), ((10,), [-4], [-1], None), ((10,), [0], [big], [0]), ((5, 6), [1, 2], [4, 5], [0, 1]),
        ((5, 6), [1], [3], [1]), ((5, 6), [7], [9], [0]), ((5, 6), [3], [2], [0]), ((5, 6), [-100], [3], [1]),
        ((0, 3), [0], [2], [1]), ((5, 6), [0], [0], [0]), ((2, 3, 4), [1, 1], [2, 3], [2, 0]), ((5,), [0], [5], [0]),
        ((5,), [1], [2**31 - 1], [0]),
    ):  # fmt: skip
        if op.since < 10:
            yield sample(rand(shape), starts=starts, ends=ends, **({} if axes is None else {"axes": axes}))
        else:
            yield sample(
                rand(shape), ints(*starts), ints(*ends), None if axes is None else ints(*axes), const=[1, 2, 3]
            )
    if op.since < 10:
        return
    for shape, starts, ends, axes, steps in (
        ((10,), [0], [10], [0], [3]), ((10,), [1], [9], [0], [2]), ((10,), [9], [0], [0], [-2]),
        ((10,), [-1], [-100], [0], [-1]),
        ((10,), [big], [-big], [0], [-1]), ((10,), [-1], [-big - 1], [0], [-3]),
        ((5, 6), [4, 0], [0, 6], [0, 1], [-1, 2]), ((5, 6), [0], [5], [-1], [1]),
        ((10,), [3], [7], [0], [-1]), ((0,), [0], [5], [0], [-1]), ((10,), [20], [3], [0], [-2]),
        ((5,), [0], [5], [0], [7]),
        ((5,), [-6], [-7], [0], [-1]), ((1,), [-1], [-100], [0], [-1]),
    ):  # fmt: skip
        yield sample(rand(shape), ints(*starts), ints(*ends), ints(*axes), ints(*steps), const=[1, 2, 3, 4])
    yield sample(rand((5, 6)), *(np.array(v, I32) for v in ([1], [3], [1])), const=[1, 2, 3])
    for dtype in DTYPES:
        yield sample(rand((5,), dtype), ints(1), ints(3), const=[1, 2], may=True)


@rows("Concat")
def _concat(op, opset):
    for shapes, axis in (
        (((2,), (3,)), 0), (((2, 3), (2, 1), (2, 4)), 1), (((1, 3), (2, 3)), 0), (((2, 3),), 0), (((2, 0), (2, 3)), 1),
        (((2, 0), (2, 0)), 1), (((2, 3), (2, 3), (2, 3)), 0), (((0, 3), (0, 3)), 1), (((2, 2, 3), (2, 1, 3)), 1),
    ):  # fmt: skip
        yield sample(*(rand(s, F32, str(k)) for k, s in enumerate(shapes)), axis=axis)
    if opset >= 11:
        yield sample(rand((2, 3)), rand((2, 2)), axis=-1)
    for dtype in DTYPES:
        yield sample(rand((2,), dtype, "a"), rand((3,), dtype, "b"), may=dtype == BF16, axis=0)


@rows("Split")
def _split(op, opset):
    x = rand((6, 4))
    for axis in (0, 1) + ((-1,) if opset >= 11 else ()):
        if opset >= 18:
            yield sample(x, outputs=2, axis=axis, num_outputs=2)
        else:
            yield sample(x, outputs=2, axis=axis)
        sizes = [2, 4] if axis == 0 else [1, 3]
        if op.since < 13:
            yield sample(x, outputs=2, axis=axis, split=sizes)
        else:
            yield sample(x, ints(*sizes), const=[1], outputs=2, axis=axis)
    if op.since >= 13:
        yield sample(x, ints(0, 6), const=[1], outputs=2)
        yield sample(x, ints(1, 2, 3), const=[1], outputs=3)
        yield sample(rand((0, 4)), ints(0, 0), const=[1], outputs=2)
    if opset >= 18:
        yield sample(rand((7, 2)), outputs=3, num_outputs=3)
        yield sample(rand((7, 2)), outputs=2, num_outputs=2)
        yield sample(rand((5,)), outputs=4, num_outputs=4, may=True)
    else:
        yield sample(rand((6,)), outputs=3)
        yield sample(rand((6,)), outputs=1)
    for dtype in DTYPES:
        extra = {"num_outputs": 2} if opset >= 18 else {}
        yield sample(rand((4,), dtype), may=True, outputs=2, **extra)


@rows("Pad")
def _pad(op, opset):
    cases = [
        ((3,), [1, 2]), ((2, 3), [1, 0, 0, 2]), ((2, 3), [0, 1, 0, 1]), ((2, 3), [0, 0, 0, 0]),
        ((2, 3, 4), [0, 1, 2, 0, 1, 1]),
        ((4, 5), [-1, 0, 0, 1]), ((4, 5), [-1, -2, -1, 0]), ((0, 3), [1, 0, 1, 0]),
        ((1, 3, 5, 5), [0, 0, 1, 1, 0, 0, 1, 1]),
    ]  # fmt: skip
    for shape, pads in cases:
        for mode in ("constant", "edge", "reflect") + (("wrap",) if opset >= 19 else ()):
            odd = mode != "constant" and (0 in shape or min(pads) < 0)
            if mode in ("reflect", "wrap") and any(p >= n for p, n in zip(pads, shape * 2, strict=True)):
                continue
            if op.since < 11:
                yield sample(rand(shape), mode=mode, pads=pads, value=1.5, may=odd)
                continue
            yield sample(rand(shape), ints(*pads), mode=mode, const=[1], may=odd)
            if mode == "constant":
                yield sample(rand(shape), ints(*pads), np.float32(1.5), const=[1, 2])
                yield sample(rand(shape), ints(*pads), np.float32(1.5), const=[1])
    if op.since >= 11:
        for dtype in DTYPES:
            yield sample(rand((2, 3), dtype), ints(1, 0, 0, 1), np.array(1, dtype), const=[1, 2], may=True)
    if opset >= 18:
        yield sample(rand((2, 3)), ints(1, 2), None, ints(1), const=[1, 3])
        yield sample(rand((2, 3, 4)), ints(1, 0, 0, 2), np.float32(3), ints(2, 0), const=[1, 2, 3])
        yield sample(rand((2, 3)), ints(1, 2), None, ints(-1), const=[1, 3], mode="edge")


@rows("Gather")
def _gather(op, opset):
    data = rand((4, 5))
    for at in ((0,), (3, 0, 3), (1, 2)):
        for axis in (0, 1):
            yield sample(data, ints(*at), const=[1], axis=axis)
            yield sample(data, ints(*at), axis=axis)
    yield sample(data, np.array(2, np.int64), const=[1])
    yield sample(data, np.array(2, np.int64))
    yield sample(data, np.array([[0, 1], [2, 3]], np.int32), const=[1])
    if opset >= 11:
        yield sample(data, ints(-1, -4), const=[1])
        yield sample(data, ints(-1, 2), const=[1], axis=-1)
    yield sample(rand((2, 3, 4)), ints(1, 0), const=[1], axis=1)
    yield sample(rand((0, 3)), ints(1), const=[1], axis=1)
    yield sample(data, ints(), const=[1])
    for dtype in DTYPES:
        yield sample(rand((3,), dtype), ints(1, 0), const=[1], may=dtype == BF16)


@rows("GatherElements")
def _gatherelements(op, opset):
    data = rand((3, 4))
    yield sample(data, np.array([[0, 1, 2, 0]], np.int64), const=[1])
    yield sample(data, np.array([[0, -1], [3, 2]], np.int64), const=[1], axis=1)
    yield sample(data, np.array([[0, 1], [1, 2], [2, 2]], np.int32), const=[1], axis=-1)
    yield sample(data, np.array([[0, 1, 2, 0]], np.int64))


@rows("DepthToSpace")
def _depthtospace(op, opset):
    for shape in ((1, 8, 2, 3), (2, 4, 1, 2), (2, 18, 2, 2)):
        b = 3 if shape[1] == 18 else 2
        yield sample(rand(shape), blocksize=b)
        if opset >= 11:
            yield sample(rand(shape), blocksize=b, mode="CRD")
            yield sample(rand(shape), blocksize=b, mode="DCR")
    yield sample(rand((1, 8, 2, 3), F64), blocksize=2, may=True)
    yield sample(rand((1, 8, 2, 3), U8), blocksize=2, may=True)


@rows("SpaceToDepth")
def _spacetodepth(op, opset):
    yield sample(rand((1, 2, 4, 6)), blocksize=2)
    yield sample(rand((2, 3, 6, 3)), blocksize=3)
    yield sample(rand((1, 2, 4, 6), F64), blocksize=2, may=True)


@rows("Trilu")
def _trilu(op, opset):
    for shape in ((3, 4), (4, 3), (2, 3, 3), (0, 3), (3, 0)):
        for upper in (0, 1):
            yield sample(rand(shape), upper=upper)
            for k in (-1, 0, 2, 9):
                yield sample(rand(shape), np.array(k, np.int64), const=[1], upper=upper)
    yield sample(rand((3, 3)), np.array(1, np.int64))
    yield sample(specials(F32).reshape(5, 8))
    for dtype in DTYPES:
        yield sample(rand((3, 3), dtype), may=True)


@rows("EyeLike")
def _eyelike(op, opset):
    for shape in ((3, 4), (4, 3), (1, 1), (0, 3)):
        for k in (0, 1, -1):
            yield sample(rand(shape), k=k)
    for dtype in (F32, I64, F64, I32, BOOL, F16):
        yield sample(rand((2, 2)), dtype=DType.from_numpy(dtype).onnx, may=dtype in (BOOL, F16))


MODES = (
    "half_pixel",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "half_pixel_symmetric",
    "tf_crop_and_resize",
)


def floats(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


@rows("Resize")
def _resize(op, opset):
    shape = (1, 2, 4, 5)
    if op.since == 10:
        for mode in ("nearest", "linear"):
            for scales in ((1, 1, 2, 2), (1, 1, 0.5, 0.6), (1, 1, 1.5, 2.3), (1, 1, 3, 1)):
                yield sample(rand(shape), floats(*scales), const=[1], mode=mode)
        return
    empty = floats()
    for mode in ("nearest", "linear", "cubic"):
        for coordinates in MODES[: 6 if opset >= 19 else 4]:
            if coordinates == "tf_crop_and_resize":
                yield from _crops(shape, mode, opset)
                continue
            attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
            for scales in ((1, 1, 2, 2), (1, 1, 0.5, 0.6), (1, 1, 1.5, 2.3), (1, 1, 3, 1)):
                yield sample(rand(shape), empty, floats(*scales), const=[1, 2], **attrs)
            for sizes in ((1, 2, 8, 10), (1, 2, 3, 7), (1, 2, 1, 1), (1, 2, 9, 5)):
                yield sample(rand(shape), empty, empty, ints(*sizes), const=[1, 2, 3], **attrs)
                if opset >= 13:
                    yield sample(rand(shape), None, None, ints(*sizes), const=[3], **attrs)
    for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        for coordinates in ("half_pixel", "asymmetric", "align_corners"):
            for scales in ((1, 1, 2, 2), (1, 1, 0.5, 0.6), (1, 1, 1.5, 2.3), (1, 1, 0.75, 3)):
                yield sample(
                    rand(shape),
                    empty,
                    floats(*scales),
                    const=[1, 2],
                    nearest_mode=nearest,
                    coordinate_transformation_mode=coordinates,
                )
    for a in (-0.5, -0.75, 0.3):
        for exclude in (0, 1):
            attrs = {"mode": "cubic", "cubic_coeff_a": a, "exclude_outside": exclude}
            for scales in ((1, 1, 2, 2), (1, 1, 0.5, 0.6), (1, 1, 0.8, 2.3)):
                yield sample(rand(shape), empty, floats(*scales), const=[1, 2], **attrs)
    for dtype in (F64, F16, U8, I8, I32):
        yield sample(rand(shape, dtype), empty, floats(1, 1, 1.5, 2.3), const=[1, 2], may=True, mode="cubic")
        yield sample(rand(shape, dtype), empty, floats(1, 1, 2, 2), const=[1, 2], may=True)
        yield sample(rand(shape, dtype), empty, floats(1, 1, 1.5, 2.3), const=[1, 2], may=True, mode="linear")
    yield sample(rand((2, 6)), empty, floats(1, 1.5), const=[1, 2], may=True)
    yield sample(rand((2, 6)), empty, floats(2, 1.5), const=[1, 2], may=True, mode="linear")
    yield sample(rand((1, 2, 3, 4, 4)), empty, floats(1, 1, 2, 2, 1.5), const=[1, 2], may=True, mode="linear")
    yield sample(rand((1, 2, 6)), empty, floats(1, 1, 2), const=[1, 2], may=True, mode="linear")
    if opset >= 18:
        yield sample(rand(shape), None, floats(2, 2), const=[2], axes=[2, 3])
        yield sample(rand(shape), None, None, ints(7, 9), const=[3], axes=[2, 3])
        for policy in ("not_larger", "not_smaller"):
            yield sample(rand(shape), None, None, ints(7, 9), const=[3], axes=[2, 3], keep_aspect_ratio_policy=policy)
        yield sample(rand(shape), None, floats(1, 1, 0.6, 0.6), const=[2], mode="linear", antialias=1)


def _crops(shape, mode, opset):
    attrs = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize"}
    for y0, x0, y1, x1 in ((0.4, 0.6, 0.6, 0.8), (0, 0, 1, 1), (0.4, 0.6, 1.2, 1.7), (0.9, 0.8, 0.1, -0.5)):
        roi = floats(0, 0, y0, x0, 1, 1, y1, x1)
        for sizes in ((1, 2, 3, 3), (1, 2, 4, 5), (1, 2, 1, 9)):
            yield sample(rand(shape), roi, floats(), ints(*sizes), const=[1, 2, 3], **attrs)
            yield sample(rand(shape), roi, floats(), ints(*sizes), const=[1, 2, 3], extrapolation_value=7.5, **attrs)
        if opset >= 18:
            for axes, size in (([2, 3], (3, 4)), ([3, 2], (4, 3))):
                part = floats(y0, x0, y1, x1) if axes[0] == 2 else floats(x0, y0, x1, y1)
                yield sample(rand(shape), part, None, ints(*size), const=[1, 3], axes=axes, **attrs)


@rows("Upsample")
def _upsample(op, opset):
    for mode in ("nearest", "linear"):
        for scales in ((1, 1, 2, 2), (1, 1, 1.5, 2.3), (1, 1, 3, 1)):
            if op.since < 9:
                yield sample(rand((1, 2, 4, 5)), mode=mode, scales=[float(s) for s in scales])
            else:
                yield sample(rand((1, 2, 4, 5)), floats(*scales), const=[1], mode=mode)


# --- products ------------------------------------------------------------------------------------------------------
@rows("MatMul")
def _matmul(op, opset):
    for a, b in (
        ((2, 3), (3, 4)), ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)),
        ((2, 3), (5, 3, 4)), ((1, 2, 3), (5, 3, 4)), ((5, 1, 2, 3), (6, 3, 4)), ((2, 0), (0, 3)), ((0, 3), (3, 4)),
        ((2, 3), (3, 0)), ((5, 2, 3), (3,)), ((3,), (5, 3, 4)), ((2, 70), (70, 3)), ((0, 2, 3), (3, 4)),
    ):  # fmt: skip
        yield sample(rand(a, F32, "a"), rand(b, F32, "b"), may=a == (2, 0))
    for dtype in DTYPES:
        yield sample(rand((2, 3), dtype, "a"), rand((3, 4), dtype, "b"), may=dtype != F32)


@rows("Gemm")
def _gemm(op, opset):
    c = [(), (1,), (4,), (1, 4), (2, 1), (2, 4)]
    for ta in (0, 1):
        for tb in (0, 1):
            a, b = rand((3, 2) if ta else (2, 3), F32, "a"), rand((4, 3) if tb else (3, 4), F32, "b")
            for shape in c:
                yield sample(a, b, rand(shape, F32, "c"), transA=ta, transB=tb, alpha=0.5, beta=2.0)
            if opset >= 11:
                yield sample(a, b, transA=ta, transB=tb)
    yield sample(rand((2, 3)), rand((3, 4)), rand((4,)), beta=0.0)
    yield sample(rand((0, 3)), rand((3, 4)), rand((4,)))
    yield sample(rand((2, 0)), rand((0, 4)), rand((4,)))
    for dtype in (F64, F16, BF16, I32, I64, U32):
        yield sample(rand((2, 3), dtype, "a"), rand((3, 4), dtype, "b"), rand((4,), dtype, "c"), may=True)
        yield sample(
            rand((2, 3), dtype, "a"), rand((3, 4), dtype, "b"), rand((4,), dtype, "c"), may=True, alpha=0.3, beta=0.7
        )


@rows("Conv")
def _conv(op, opset):
    def one(x, w, bias=True, **attrs):
        b = (rand((w[0],), F32, "b"),) if bias else ()
        return sample(rand(x, F32, "x"), rand(w, F32, "w"), *b, const=[1, 2], **attrs)

    yield one((1, 3, 7), (4, 3, 3))
    yield one((2, 3, 7, 8), (4, 3, 3, 3))
    yield one((2, 3, 7, 8), (4, 3, 3, 3), bias=False)
    yield one((1, 2, 5, 6, 7), (3, 2, 2, 3, 3))
    yield one((1, 2, 5, 6, 7), (3, 2, 3, 3, 3), pads=[1, 0, 1, 1, 2, 1], strides=[2, 1, 2])
    yield one((1, 4, 7, 7), (6, 2, 3, 3), group=2, kernel_shape=[3, 3])
    yield one((1, 4, 7, 7), (4, 1, 3, 3), group=4, pads=[1, 1, 1, 1])
    yield one((1, 4, 7, 7), (8, 1, 3, 3), group=4, pads=[1, 1, 1, 1])
    yield one((1, 2, 9, 9), (3, 2, 3, 3), strides=[2, 3], pads=[1, 2, 0, 1])
    yield one((1, 2, 9, 9), (3, 2, 3, 2), dilations=[2, 3], pads=[2, 0, 2, 3])
    yield one((1, 2, 5, 5), (3, 2, 1, 1))
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield one((1, 2, 8, 9), (3, 2, 3, 2), auto_pad=auto)
        yield one((1, 2, 8, 9), (3, 2, 3, 2), auto_pad=auto, strides=[2, 2])
        yield one((1, 2, 8, 9), (3, 2, 4, 4), auto_pad=auto, strides=[3, 3])
        yield one((1, 2, 8), (3, 2, 3), auto_pad=auto, strides=[2])
    yield one((0, 2, 5, 5), (3, 2, 3, 3))
    yield sample(rand((1, 2, 5, 5)), rand((3, 2, 3, 3)), rand((3,)))
    for dtype in (F64, F16, BF16):
        yield sample(rand((1, 3, 7, 7), dtype), rand((4, 3, 3, 3), dtype), rand((4,), dtype), may=True)


@rows("ConvTranspose")
def _convtranspose(op, opset):
    def one(x, w, bias=True, **attrs):
        n = w[1] * attrs.get("group", 1)
        b = (rand((n,), F32, "b"),) if bias else ()
        return sample(rand(x, F32, "x"), rand(w, F32, "w"), *b, const=[1, 2], **attrs)

    yield one((1, 3, 5), (3, 4, 3))
    yield one((2, 3, 4, 5), (3, 4, 3, 3))
    yield one((2, 3, 4, 5), (3, 4, 3, 3), bias=False, strides=[2, 2])
    yield one((1, 3, 4, 5), (3, 2, 3, 2), strides=[2, 3], pads=[1, 0, 1, 1], output_padding=[1, 0])
    yield one((1, 4, 4, 5), (4, 3, 3, 3), group=2, strides=[2, 2])
    yield one((1, 4, 4, 5), (4, 1, 2, 2), group=4, strides=[2, 2])
    yield one((1, 2, 4, 5), (2, 3, 3, 3), dilations=[2, 2])
    yield one((1, 2, 3, 4, 4), (2, 2, 2, 3, 3), strides=[1, 2, 2])
    yield one((1, 2, 4, 4), (2, 3, 2, 2), strides=[2, 2])
    yield one((1, 2, 4, 4), (2, 3, 1, 1), strides=[2, 2], output_padding=[1, 1])
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield one((1, 2, 4, 5), (2, 3, 3, 3), auto_pad=auto, strides=[2, 2])
        yield one((1, 2, 4, 5), (2, 3, 3, 3), auto_pad=auto)
        yield one((1, 2, 4, 5), (2, 3, 4, 2), auto_pad=auto, strides=[3, 2])
    yield one((1, 2, 4, 5), (2, 3, 3, 3), output_shape=[8, 10], strides=[2, 2])
    yield one((1, 2, 4, 5), (2, 3, 3, 3), output_shape=[9, 9], strides=[2, 2])
    yield one((1, 2, 4, 5), (2, 3, 3, 3), output_shape=[8, 10], strides=[2, 2], auto_pad="SAME_UPPER")
    yield sample(rand((1, 3, 5, 5), F64), rand((3, 4, 3, 3), F64), may=True)


@rows("Einsum")
def _einsum(op, opset):
    sizes = dict(zip("abcdijk", (2, 3, 4, 5, 2, 3, 4), strict=True))

    def one(equation, *shapes):
        terms = equation.partition("->")[0].replace(" ", "").split(",")
        shapes = shapes or tuple(tuple(sizes[c] for c in t) for t in terms)
        return sample(*(rand(s, F32, str(k)) for k, s in enumerate(shapes)), equation=equation)

    for equation in (
        "ij,jk->ik", "ij,jk", "ij->ji", "ij->", "ij->i", "abc,abd->acd", "ab,cd->abcd", "a,a->", "abc->cab", "abc->ac",
        "abc,cd->abd", "ij , jk -> ik", "abcd,abd->acb", "ab,ab->ab", "ba,b->a", "ab,bc->ca",
    ):  # fmt: skip
        yield one(equation)
    yield one("...ij,...jk->...ik", (5, 2, 3), (5, 3, 4))
    yield one("...ij,jk->...ik", (2, 5, 2, 3), (3, 4))
    yield one("i...->...", (2, 3, 4))
    yield one("...i->...", (2, 3, 4))
    yield one("ii->i", (3, 3))
    yield one("ii->", (3, 3))
    yield one("ij,jk,kl->il", (2, 3), (3, 4), (4, 5))
    yield one("bii->bi", (2, 3, 3))
    yield one("...ij,...ij->...", (4, 2, 3), (1, 2, 3))
    yield sample(rand((2, 3), F64, "a"), rand((3, 4), F64, "b"), equation="ij,jk->ik")
    yield sample(rand((2, 3), I64, "a"), rand((3, 4), I64, "b"), equation="ij,jk->ik", may=True)


# --- windows -------------------------------------------------------------------------------------------------------
def _pools(op: Op, opset: int, **more: object) -> Iterator[Sample]:
    def one(shape, **attrs):
        return sample(rand(shape), **attrs, **more)

    yield one((1, 2, 9), kernel_shape=[3])
    yield one((1, 2, 9, 8), kernel_shape=[3, 2])
    yield one((2, 2, 5, 6, 7), kernel_shape=[2, 3, 2], strides=[1, 2, 2])
    yield one((1, 2, 9, 8), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    yield one((1, 2, 9, 8), kernel_shape=[3, 3], strides=[2, 3], pads=[0, 1, 2, 1])
    yield one((0, 2, 9, 8), kernel_shape=[3, 3])
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield one((1, 2, 9, 8), kernel_shape=[3, 2], auto_pad=auto)
        yield one((1, 2, 9, 8), kernel_shape=[3, 3], auto_pad=auto, strides=[2, 2])
        yield one((1, 2, 5, 5), kernel_shape=[2, 2], auto_pad=auto, strides=[3, 3])
    if opset >= 10:
        for shape, kernel, strides, pads in (
            ((1, 1, 4, 4), [3, 3], [2, 2], [0, 0, 0, 0]), ((1, 1, 9, 8), [3, 3], [2, 2], [1, 1, 1, 1]),
            ((1, 1, 5, 5), [3, 3], [3, 3], [1, 1, 1, 1]), ((1, 1, 2, 2), [3, 3], [2, 2], [1, 1, 1, 1]),
            ((1, 1, 10, 7), [2, 3], [3, 2], [0, 1, 1, 0]), ((1, 1, 3, 3), [1, 1], [2, 2], [0, 0, 0, 0]),
        ):  # fmt: skip
            yield one(shape, kernel_shape=kernel, strides=strides, pads=pads, ceil_mode=1)
        yield one((1, 2, 9, 8), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER", ceil_mode=1)
    if opset >= 10 and (op.name == "MaxPool" or opset >= 19):
        yield one((1, 2, 9, 8), kernel_shape=[2, 3], dilations=[2, 2])
        yield one((1, 2, 9, 8), kernel_shape=[2, 2], dilations=[3, 2], pads=[1, 1, 1, 0], strides=[2, 2])
        yield one((1, 2, 9, 8), kernel_shape=[2, 2], dilations=[3, 2], strides=[2, 2], ceil_mode=1)


@rows("MaxPool")
def _maxpool(op, opset):
    yield from _pools(op, opset)
    for dtype in (F64, F16, I8, U8):
        yield sample(rand((1, 2, 6, 6), dtype), kernel_shape=[2, 2], may=True)
        yield sample(rand((1, 2, 6, 6), dtype), kernel_shape=[3, 3], pads=[1, 1, 1, 1], may=True)
    if opset >= 8:
        yield sample(rand((1, 2, 6, 6)), kernel_shape=[2, 2], outputs=2)
    for at in (0, 3, 8):
        x = rand((1, 1, 3, 3))
        x.flat[at] = np.nan
        yield sample(x, kernel_shape=[3, 3])
        yield sample(x, kernel_shape=[2, 2])
    yield sample(np.full((1, 1, 3, 3), -np.inf, F32), kernel_shape=[2, 2])


@rows("AveragePool")
def _averagepool(op, opset):
    yield from _pools(op, opset)
    yield from _pools(op, opset, count_include_pad=1)
    yield sample(rand((1, 2, 1, 2)), kernel_shape=[3, 3], strides=[3, 3], pads=[0, 1, 0, 0], count_include_pad=1)
    for dtype in (F64, F16):
        yield sample(rand((1, 2, 6, 6), dtype), kernel_shape=[2, 2], may=True)


@rows("LpPool")
def _lppool(op, opset):
    yield from _pools(op, min(opset, 9) if opset < 18 else opset, p=2)
    yield sample(rand((1, 2, 6, 6)), kernel_shape=[2, 2], p=1)
    yield sample(rand((1, 2, 6, 6)), kernel_shape=[2, 2], p=3)
    for p in (1, 2, 3):
        yield sample(rand((1, 2, 6, 9)), kernel_shape=[3, 2], p=p, pads=[1, 0, 2, 1])


@rows("GlobalLpPool")
def _globallppool(op, opset):
    for p in (1, 2, 3):
        yield sample(rand((2, 3, 4, 5)), p=p, may=opset >= 22)
    yield sample(rand((2, 3, 7)), may=opset >= 22)


@rows("GlobalAveragePool", "GlobalMaxPool")
def _global(op, opset):
    for shape in ((2, 3, 5), (2, 3, 4, 5), (1, 2, 3, 4, 5), (0, 3, 4, 4), (1, 2, 1, 1)):
        yield sample(rand(shape))
    for dtype in (F64, F16):
        yield sample(rand((1, 2, 3, 3), dtype), may=True)


@rows("LRN")
def _lrn(op, opset):
    for size in (1, 3, 5):
        yield sample(rand((2, 7, 3, 4)), size=size)
        yield sample(rand((2, 7, 3, 4)), size=size, alpha=0.9, beta=0.5, bias=2.0)
    yield sample(rand((2, 7, 3, 4)), size=4, may=True)
    yield sample(rand((2, 3, 3, 4)), size=9)
    yield sample(rand((1, 2, 2, 2), F64), size=3, may=True)


# --- formulas ------------------------------------------------------------------------------------------------------
@rows("Softmax", "LogSoftmax", "Hardmax")
def _softmax(op, opset):
    if op.name == "Hardmax":
        yield sample(rand((2, 3, 4), I32, "ties", 0, 2).astype(F32), axis=1)
    for shape in ((5,), (2, 3), (2, 3, 4)):
        for axis in range(-len(shape) if opset >= 11 else 0, len(shape)):
            yield sample(rand(shape), axis=axis)
        if len(shape) > 1 or opset >= 13:
            yield sample(rand(shape))
    yield sample(rand((0, 3)), axis=1)
    yield sample(rand((3, 0)), axis=1, may=True)
    yield sample(np.array([[1000.0, 1000.0, -1000.0]], F32), axis=1)
    yield sample(
        np.array([[np.nan, 1, 2], [-np.inf, 1, 2], [np.inf, 1, 2], [-np.inf, -np.inf, -np.inf]], F32),
        axis=1,
        may=op.name == "Hardmax",
    )
    for dtype in (F64, F16, BF16):
        yield sample(rand((2, 5), dtype), axis=1, may=True)


@rows("BatchNormalization")
def _batchnorm(op, opset):
    for shape in ((2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 3, 2, 3, 2), (0, 3, 2)):
        v = [rand((3,), F32, s, 0.5 if s == "v" else -1, 2) for s in "sbmv"]
        yield sample(rand(shape), *v)
        yield sample(rand(shape), *v, epsilon=0.1, momentum=0.5)
    for dtype in (F64, F16):
        yield sample(rand((2, 3, 4), dtype), *(rand((3,), dtype, s, 0.5, 2) for s in "sbmv"), may=True)
    if opset >= 15:
        yield sample(rand((2, 3, 4), F16), *(rand((3,), F32, s, 0.5, 2) for s in "sbmv"), may=True)


@rows("InstanceNormalization")
def _instancenorm(op, opset):
    for shape in ((2, 3, 5), (2, 3, 4, 5)):
        yield sample(rand(shape), rand((3,), F32, "s"), rand((3,), F32, "b"))
        yield sample(rand(shape), rand((3,), F32, "s"), rand((3,), F32, "b"), epsilon=0.1)
    yield sample(rand((2, 3, 5), F16), rand((3,), F16, "s"), rand((3,), F16, "b"), may=True)


@rows("GroupNormalization")
def _groupnorm(op, opset):
    for groups in (1, 2, 4):
        n = groups if opset < 21 else 4
        yield sample(rand((2, 4, 3, 3)), rand((n,), F32, "s"), rand((n,), F32, "b"), num_groups=groups)
        yield sample(rand((2, 4, 5)), rand((n,), F32, "s"), rand((n,), F32, "b"), num_groups=groups, epsilon=0.1)
    yield sample(
        rand((2, 4, 5), F16),
        rand((2 if opset < 21 else 4,), F16, "s"),
        rand((2 if opset < 21 else 4,), F16, "b"),
        num_groups=2,
        may=True,
    )


@rows("LayerNormalization")
def _layernorm(op, opset):
    for shape, axis in (((2, 5), -1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((2, 3, 4), 0), ((2, 3, 4), -2), ((0, 4), -1)):
        tail = shape[axis:]
        yield sample(rand(shape), rand(tail, F32, "s"), rand(tail, F32, "b"), axis=axis)
        yield sample(rand(shape), rand(tail, F32, "s"), axis=axis, epsilon=0.1)
    yield sample(rand((2, 5)), rand((5,), F32, "s"), rand((5,), F32, "b"), outputs=2)
    yield sample(rand((2, 5)), rand((5,), F32, "s"), rand((5,), F32, "b"), outputs=3)
    for dtype in (F64, F16, BF16):
        yield sample(rand((2, 5), dtype), rand((5,), dtype, "s"), rand((5,), dtype, "b"), may=True)


@rows("RMSNormalization")
def _rmsnorm(op, opset):
    for shape, axis in (((2, 5), -1), ((2, 3, 4), 1), ((2, 3, 4), -1)):
        yield sample(rand(shape), rand(shape[axis:], F32, "s"), axis=axis)
        yield sample(rand(shape), rand(shape[axis:], F32, "s"), axis=axis, epsilon=0.1)
    for dtype in (F64, F16):
        yield sample(rand((2, 5), dtype), rand((5,), dtype, "s"), may=True)


def _qkv(heads: int, shared: int, dtype: np.dtype = F32, sizes: tuple[int, int] = (4, 6), flat: bool = False):
    """Queries, keys and values: 2 samples, 4 queries, 5 keys, of rank 4 or 3."""
    shapes = (2, heads, 4, sizes[0]), (2, shared, 5, sizes[0]), (2, shared, 5, sizes[1])
    made = [rand(s, dtype, seed, -1, 1) for s, seed in zip(shapes, "qkv", strict=True)]
    return [a.transpose(0, 2, 1, 3).reshape(2, a.shape[2], -1) for a in made] if flat else made


@rows("Attention")
def _attention(op, opset):
    mask = rand((4, 5), F32, "mask")
    empty = np.array([[True] * 5, [False] * 5, [True, False] * 2 + [True], [False] * 4 + [True]])
    q, k, v = _qkv(2, 2)
    past = rand((2, 2, 3, 4), F32, "pk"), rand((2, 2, 3, 6), F32, "pv")
    for attrs in ({}, {"is_causal": 1}, {"scale": 0.3}, {"softcap": 2.0}):
        yield sample(q, k, v, **attrs)
        yield sample(*_qkv(4, 2), **attrs)
        yield sample(*_qkv(4, 2, flat=True), q_num_heads=4, kv_num_heads=2, **attrs)
        yield sample(q, k, v, mask, **attrs)
        yield sample(q, k, v, None, *past, outputs=3, **attrs)
    yield sample(q, k, v, empty)
    yield sample(q, k, v, rand((2, 1, 4, 5), F32, "mask"), is_causal=1)
    yield sample(*_qkv(4, 2), rand((4, 4, 5), F32, "mask"))
    yield sample(q, k, v, rand((4, 8), F32, "mask"), *past, outputs=3)
    for mode in range(4):
        yield sample(q, k, v, mask, *past, outputs=4, qk_matmul_output_mode=mode, softcap=2.0, may=True)
        yield sample(q, k, v, rand((4, 8), F32, "mask"), *past, outputs=4, qk_matmul_output_mode=mode, softcap=2.0)
        wide = rand((4, 8), F32, "mask")
        yield sample(q, k, v, wide, *past, outputs=4, qk_matmul_output_mode=mode, is_causal=1, may=True)
    for dtype in (F64, F16, BF16):
        yield sample(*_qkv(2, 2, dtype), may=True)
        yield sample(*_qkv(2, 1, dtype), rand((4, 5), dtype, "mask"), may=True, is_causal=1)
    if opset >= 24:
        for seen in (ints(5, 3), ints(4, 5)):
            yield sample(q, k, v, None, None, None, seen)
            yield sample(q, k, v, mask, None, None, seen, is_causal=1)
    if opset >= 25:
        for left, right in ((1, 0), (0, 1), (-1, 1), (2, -1)):
            yield sample(q, k, v, left_window_size=left, right_window_size=right, may=True)
            yield sample(q, k, v, mask, left_window_size=left, right_window_size=right, is_causal=1, may=True)


@rows("RotaryEmbedding")
def _rotary(op, opset):
    x, flat = rand((2, 3, 4, 6)), rand((2, 4, 18))
    cos, sin = rand((2, 4, 3), F32, "cos"), rand((2, 4, 3), F32, "sin")
    for interleaved in (0, 1):
        yield sample(x, cos, sin, interleaved=interleaved)
        yield sample(flat, cos, sin, interleaved=interleaved, num_heads=3)
        part = cos[:, :, :2], sin[:, :, :2]
        yield sample(x, *part, interleaved=interleaved, rotary_embedding_dim=4, num_heads=3)
    yield sample(x.astype(F16), cos.astype(F16), sin.astype(F16), may=True)
    table = rand((9, 3), F32, "cos"), rand((9, 3), F32, "sin")
    yield sample(x, *table, np.arange(8).reshape(2, 4))
    yield sample(x, *table, np.arange(8).reshape(2, 4), const=[3])
    yield sample(flat, *table, np.arange(8).reshape(2, 4), const=[3], num_heads=3, interleaved=1)


@rows("LpNormalization")
def _lpnorm(op, opset):
    for p in (1, 2):
        yield sample(rand((2, 5)), p=p)
        for axis in (0, 1, 2, -1):
            yield sample(rand((2, 3, 4)), p=p, axis=axis)
    yield sample(np.zeros((2, 3), F32), may=True)
    yield sample(rand((2, 5), F64), may=True)


@rows("MeanVarianceNormalization")
def _mvn(op, opset):
    yield sample(rand((2, 3, 4, 5)))
    yield sample(rand((2, 3, 4, 5)), axes=[0, 1, 2, 3])
    yield sample(rand((2, 3, 4, 5)), axes=[2, 3])


# --- never fused, but of known shape ---------------------------------------------------------------------------------
@rows("ArgMax", "ArgMin")
def _arg(op, opset):
    more = [{}, {"select_last_index": 1}] if opset >= 12 else [{}]
    for attrs in more:
        for axis in (0, 1, 2, *([-1] if opset >= 11 else [])):
            for keepdims in (0, 1):
                yield sample(rand((2, 3, 4)), axis=axis, keepdims=keepdims, **attrs)
        ties = rand((3, 7, 5), I32, "ties", 0, 2)
        for dtype in (F32, F64, F16, I8, U8, I32, I64):
            yield sample(ties.astype(dtype), axis=1, may=dtype != F32, **attrs)
        odd = np.array([[1, np.nan, 2, -np.inf], [np.nan, 1, 2, 3], [-np.inf] * 4, [np.inf, 1, np.inf, 0]], np.float32)
        yield sample(odd, axis=1, **attrs)
        yield sample(np.array([[0.0, -0.0], [-0.0, 0.0], [np.nan, np.nan]], np.float32), axis=1, **attrs)


@rows("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _losses(op, opset):
    for shape in ((3, 5), (2, 4, 3), (2, 3, 2, 4)):
        x, classes = rand(shape), shape[1]
        target = rand((shape[0], *shape[2:]), I64, "t", 0, classes - 1)
        weight = rand((classes,), F32, "w", 0.1, 1)
        for reduction in ("none", "sum", "mean"):
            yield sample(x, target, reduction=reduction)
            yield sample(x, target, weight, reduction=reduction)
            yield sample(x, target.astype(I32), weight, reduction=reduction, ignore_index=1)
            yield sample(x, target, reduction=reduction, ignore_index=0)
    if op.name == "SoftmaxCrossEntropyLoss":
        yield sample(rand((3, 5)), ints(0, 4, 2), outputs=2)
    yield sample(rand((3, 5), F64), ints(0, 4, 2), may=True)
    yield sample(rand((3, 5), F16), ints(0, 4, 2), may=True)


@rows("TopK")
def _topk(op, opset):
    yield sample(rand((2, 5)), ints(2), const=[1], outputs=2)
    yield sample(rand((2, 5)), ints(1), const=[1], outputs=2, axis=0)


@rows("GridSample")
def _gridsample(op, opset):
    linear = "linear" if opset >= 20 else "bilinear"
    x, grid = rand((2, 3, 4, 5)), rand((2, 3, 6, 2), F32, "grid", -1.6, 1.6)
    grid[0, 0, :3] = [[-1, 1], [0, 0], [1, -1]]
    for mode in (linear, "nearest", "cubic" if opset >= 20 else "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            for aligned in (0, 1):
                attrs = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
                yield sample(x, grid, **attrs)
                if opset >= 20 and mode != "cubic":  # cubic is for planes alone
                    yield sample(rand((1, 2, 3, 4, 5)), rand((1, 2, 3, 4, 3), F32, "g3", -1.6, 1.6), **attrs)
        # Beyond the range of i64 onnxruntime's conversion is undefined.
        far = np.array([[-1e9, 1e9], [7.0, -9.0], [-5.3, 4.1], [0.0, 50.0]], np.float32).reshape(1, 2, 2, 2)
        yield sample(x[:1], far, mode=mode, padding_mode="border")
        yield sample(x.astype(F64), grid.astype(F64), mode=mode, may=True)
    yield sample(x, grid, mode="cubic" if opset >= 20 else "bicubic")


@rows("RoiAlign")
def _roialign(op, opset):
    yield sample(
        rand((1, 2, 8, 8)),
        floats([0, 0, 4, 4], [1, 1, 5, 6]),
        ints(0, 0),
        may=opset >= 22,
        output_height=2,
        output_width=3,
    )


@rows("Bernoulli")
def _bernoulli(op, opset):
    yield sample(rand((2, 3), lo=0, hi=1), may=True)
    yield sample(rand((2, 3), lo=0, hi=1), may=True, dtype=DType.F64.onnx)


@rows("RandomNormalLike", "RandomUniformLike")
def _randomlike(op, opset):
    yield sample(rand((2, 3)), may=opset >= 22)
    yield sample(rand((2, 3)), may=opset >= 22, dtype=DType.F64.onnx)


def _steps(seed: str, shape=(3, 4), dtype: np.dtype = F32) -> np.ndarray:
    """Values of which many lie exactly between two steps of 0.25, and some beyond the last step."""
    return (rand(shape, I32, seed, -500, 500) * np.float32(0.125)).astype(dtype)


@rows("QuantizeLinear")
def _quantize(op, opset):
    may = opset >= 28
    yield sample(rand((2, 3)), np.float32(0.1), may=may)
    awkward = np.array([np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, 0.125, 0.375, -0.125, -0.375], np.float32)
    for dtype in (U8, I8, U16, I16):
        wide = dtype.itemsize > 1
        if wide and opset < 21:
            continue
        yield sample(_steps("x"), np.float32(0.25), np.array(3, dtype), may=may)
        yield sample(awkward, np.float32(0.25), np.array(5, dtype), may=may)
        if opset >= 13:
            yield sample(_steps("a"), rand((4,), F32, "s", 0.1, 2), rand((4,), dtype, "z"), may=may)
            yield sample(_steps("a"), rand((3,), F32, "s", 0.1, 2), rand((3,), dtype, "z"), may=may, axis=0)
        if opset >= 21:
            parts = rand((2, 4), F32, "s", 0.1, 2), rand((2, 4), dtype, "z")
            yield sample(_steps("b"), *parts, may=may, axis=0, block_size=2)
    if opset >= 21:
        yield sample(_steps("x"), np.float32(0.25), may=may, output_dtype=DType.I8.onnx)
    for dtype in (F64, F16, BF16, I32):
        yield sample(rand((2, 3), dtype), np.array(1, dtype if opset >= 19 else F32), np.int8(3), may=True)


@rows("DequantizeLinear")
def _dequantize(op, opset):
    may = opset >= 28
    yield sample(rand((2, 3), I8), np.float32(0.1), may=may)
    for dtype in (U8, I8, U16, I16, I32):
        if dtype in (U16, I16) and opset < 21:
            continue
        x = rand((3, 4), dtype, "x", -100, 100)
        zero = np.array(0 if dtype == I32 else 3, dtype)
        yield sample(x, np.float32(0.1), zero, may=may)
        if opset < 13:
            continue
        zeros = rand((12,), dtype, "z") * (dtype != I32)  # i32 has none
        yield sample(x, rand((4,), F32, "s", 0.1, 2), zeros[:4], may=may)
        yield sample(x, rand((3,), F32, "s", 0.1, 2), zeros[:3], may=may, axis=-2)
        if opset >= 21:
            yield sample(x, rand((3, 2), F32, "s", 0.1, 2), zeros[:6].reshape(3, 2), may=may, axis=1, block_size=2)
    yield sample(np.array([2**31 - 1, -(2**31), 2**24 + 1], I32), np.float32(0.3), may=may)
    for dtype in (F64, F16, BF16):
        yield sample(rand((2, 3), I8), np.array(1, dtype), np.int8(3), may=True)


@rows("DynamicQuantizeLinear")
def _dynamicquantize(op, opset):
    yield sample(rand((2, 3)), outputs=3)
    for lo, hi in ((0, 5), (-5, 0), (2, 5), (-5, -2), (-1e-3, 7), (0, 0)):
        yield sample(rand((5, 7), F32, "x", lo, hi), outputs=3)
    yield sample(rand((), F32), outputs=3)
    yield sample(_steps("x", (17,)), outputs=3)


def _eight_bits() -> Iterator[tuple[np.dtype, np.dtype]]:
    """Types of data and weights. u8 x s8 stays small: onnxruntime's sums of large ones saturate on some processors."""
    yield from ((U8, U8), (I8, I8), (U8, I8))


@rows("MatMulInteger")
def _matmulinteger(op, opset):
    yield sample(rand((2, 3), U8), rand((3, 4), U8))
    yield sample(rand((5, 2, 3), U8), rand((3, 4), U8), np.uint8(1), np.uint8(2))
    for a, b in _eight_bits():
        most = 120 if b == U8 or a == I8 else 60
        left, right = rand((5, 2, 9), a, "a", -most, most), rand((9, 4), b, "b", -most, most)
        yield sample(left, right, rand((), a, "z"), rand((), b, "z"))
        yield sample(left, right, rand((1,), a, "z"), rand((4,), b, "z", -9, 9))
    yield sample(rand((5, 2, 3), U8), rand((5, 3, 4), U8), np.uint8(1), rand((5, 1, 4), U8, "z"))


@rows("QLinearMatMul")
def _qlinearmatmul(op, opset):
    s, z = np.float32(0.1), np.uint8(3)
    yield sample(rand((2, 3), U8), s, z, rand((3, 4), U8), s, z, s, z)
    for a, b in _eight_bits():
        left, right = rand((5, 2, 9), a, "a", -60, 60), rand((9, 4), b, "b", -60, 60)
        za, zb = rand((), a, "z"), rand((4,), b, "z", -9, 9)
        yield sample(left, s, za, right, np.float32(0.03), b.type(1), np.float32(0.7), za)
        yield sample(left, s, za, right, rand((4,), F32, "s", 0.01, 0.3), zb, np.float32(0.7), za)


@rows("ConvInteger")
def _convinteger(op, opset):
    yield sample(rand((1, 2, 5, 6), U8), rand((3, 2, 3, 3), U8), const=[1])
    yield sample(rand((1, 2, 5, 6), U8), rand((3, 2, 3, 3), U8), const=[1], strides=[2, 2], pads=[1, 1, 1, 1])
    x, w = rand((2, 4, 5, 6), U8, "x", 0, 90), rand((6, 2, 3, 3), U8, "w", 0, 90)
    yield sample(x, w, np.uint8(7), np.uint8(9), const=[1], group=2, pads=[1, 0, 1, 2])


@rows("QLinearConv")
def _qlinearconv(op, opset):
    s, z = np.float32(0.1), np.uint8(3)
    yield sample(rand((1, 2, 5, 6), U8), s, z, rand((3, 2, 3, 3), U8), s, z, s, z, const=[3])
    for a, b in _eight_bits():
        x, w = rand((2, 4, 5, 6), a, "x", -60, 60), rand((6, 4, 3, 3), b, "w", -60, 60)
        za, zb, to = rand((), a, "z"), b.type(2), np.float32(0.7)
        bias = rand((6,), I32, "bias", -900, 900)
        yield sample(x, s, za, w, s, zb, to, za, bias, const=[3, 8], pads=[1, 1, 1, 1])
        scales = rand((6,), F32, "s", 0.01, 0.2)
        zeros = np.full(6, 0 if b == I8 else 2, b)
        yield sample(x, s, za, w, scales, zeros, to, za, const=[3], strides=[2, 1], auto_pad="SAME_UPPER")
        w = rand((6, 2, 3, 3), b, "w", -60, 60)
        yield sample(x, s, za, w, scales, zeros, to, za, bias, const=[3, 8], group=2, dilations=[1, 2])
    x, w = rand((1, 4, 7), U8, "x"), rand((4, 1, 3), U8, "w")
    yield sample(x, s, z, w, s, z, s, z, const=[3], group=4, pads=[1, 1])


@rows("QLinearAdd", "QLinearMul")
def _qlinearadd(op, opset):
    s, z = np.float32(0.1), np.uint8(3)
    yield sample(rand((2, 3), U8), s, z, rand((3,), U8), s, z, s, z)


@rows("QLinearSigmoid", "QLinearLeakyRelu", "QLinearGlobalAveragePool")
def _qlinearunary(op, opset):
    s, z = np.float32(0.1), np.uint8(3)
    yield sample(rand((1, 2, 5, 6), U8), s, z, s, z, const=[1, 2, 3, 4])


@rows("QGemm")
def _qgemm(op, opset):
    s, z = np.float32(0.1), np.uint8(3)
    yield sample(rand((2, 3), U8), s, z, rand((3, 4), U8), s, z, None, s, z)
    yield sample(rand((2, 3), U8), s, z, rand((4, 3), U8), s, z, transB=1)
