"""Seeded random valid ONNX graphs over the whole op table, with the inputs to run them on.

A graph grows node by node: a move proposes a node, onnxruntime computes it alone on every input set, and only what it
computes stays. So moves need not know when a node is valid, every value's data are known while the graph grows, and
what has no defined result (integer division by zero, conversions that do not fit) is seen before it is written.

Input sets: the first has plain numbers; the others have other sizes for the free dimensions (0 and 1 among them) and
special values. Same seed, same bytes, for the same versions of onnx, onnxruntime and the op table.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the samples of the op table are in tests/

from onnxfuse.errors import UsageError
from onnxfuse.ir.op import Family
from onnxfuse.ops.table import OPS, lookup, parameters
from onnxfuse.verify import ort

NEWEST = 26  # the opset up to which onnxruntime has kernels for nearly everything
OLDEST = 7
SETS = 3

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
INTS = tuple(np.dtype(n) for n in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))
I32, I64, BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)
DTYPES: tuple[tuple[np.dtype, float], ...] = (
    (F32, 50), (F64, 8), (F16, 8), (BF16, 1), (I64, 8), (I32, 8), (BOOL, 4),
    *((d, 1.2) for d in INTS if d not in (I32, I64)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Range:
    """Of which size things are."""

    extents: tuple[int, ...]  # of inputs
    sizes: tuple[int, ...]  # of free dimensions in the later sets
    columns: tuple[int, ...]  # of products, features of convolutions
    taps: tuple[int, ...]  # of windows
    largest: int  # elements of a value


SMALL = Range(
    extents=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33),
    sizes=(0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 31, 33),
    columns=(1, 2, 3, 4, 7, 8, 16, 17, 31),
    taps=(1, 2, 3, 3),
    largest=6000,
)
# Around the widths of vectors and tiles, and beyond the blocks the templates cut long axes into.
WIDE = Range(
    extents=(
        1,
        1,
        2,
        2,
        3,
        4,
        7,
        14,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        47,
        48,
        49,
        63,
        64,
        65,
        96,
        127,
        129,
        255,
        300,
        513,
        1025,
        3000,
    ),
    sizes=(0, 1, 2, 3, 6, 8, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 100, 129, 257),
    columns=(1, 2, 6, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 129, 260),
    taps=(1, 2, 3, 3, 4, 5, 7),
    largest=60_000,
)
# Where in a window a NaN stands decides whether onnxruntime returns it.
NAN_BY_POSITION = frozenset({"ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "Hardmax"})
# Ops that tell +0 from -0, which onnxruntime's kernels return by the order of operands or the vector path taken.
ZERO_SIGN = {"Div": 1, "Reciprocal": 0, "Pow": 0}

Shape = tuple[int, ...]


def _entries(family: Family, arity: int | None) -> list[str]:
    """Names of the table's ops of a family (with that many inputs, all required)."""
    found = []
    for (domain, name), rows in sorted(OPS.items()):
        if domain or rows[-1].family is not family:
            continue
        inputs, _ = parameters(rows[-1])
        plain = all(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in inputs)
        if arity is None or (plain and len(inputs) == arity):
            found.append(name)
    return found


UNARY = _entries(Family.POINTWISE, 1)
BINARY = _entries(Family.POINTWISE, 2)
REDUCES = _entries(Family.REDUCE, None)


# What onnxruntime says no with, and its Python side.
REFUSALS: tuple[type[Exception], ...] = (UsageError, *ort.ORT_ERRORS)
NOT_COMPUTED: tuple[type[Exception], ...] = (*REFUSALS, NotImplementedError, ValueError, TypeError)


class Rejected(Exception):  # noqa: N818 - a proposal that came to nothing
    """onnxruntime does not compute it, or its result is of no use."""


@dataclass
class Made:
    """A finished graph. `feeds` are the input sets; `ops` the operators in it."""

    seed: int
    model: onnx.ModelProto
    feeds: list[dict[str, np.ndarray]]
    ops: list[str] = field(default_factory=list)


# --- computing one node --------------------------------------------------------------------------------------------
_sessions: OrderedDict[bytes, onnxruntime.InferenceSession] = OrderedDict()


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    key = model.SerializeToString(deterministic=True)
    if key not in _sessions:
        _sessions[key] = ort.session(key)
        if len(_sessions) > 256:
            _sessions.popitem(last=False)
    _sessions.move_to_end(key)
    return _sessions[key]


def code(dtype: np.dtype) -> int:
    """TensorProto's code of an element type."""
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def tensor(a: np.ndarray, name: str) -> onnx.TensorProto:
    """An initializer."""
    if a.dtype == BF16:
        return helper.make_tensor(name, code(a.dtype), a.shape, a.tobytes(), raw=True)
    return numpy_helper.from_array(a, name)


def attribute(name: str, value: object) -> onnx.AttributeProto:
    """An attribute; an empty list is one of integers."""
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, numpy_helper.from_array(value))
    if isinstance(value, (list, tuple)) and not value:
        return helper.make_attribute(name, [], attr_type=onnx.AttributeProto.INTS)
    return helper.make_attribute(name, list(value) if isinstance(value, tuple) else value)


def limits(dtype: np.dtype) -> Any:
    """Largest, smallest, eps of any float type."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def is_float(a: np.ndarray | np.dtype) -> bool:
    """A float type the kernels compute with."""
    dtype = a.dtype if isinstance(a, np.ndarray) else a
    return dtype.kind == "f" or dtype == BF16


def has_nan(a: np.ndarray) -> bool:
    """Any NaN in it."""
    return is_float(a) and bool(np.isnan(a.astype(np.float64)).any())


def _finite(x: np.ndarray | None) -> bool:
    return x is None or bool(np.isfinite(x.astype(np.float64)).all())


def undefined(node: onnx.NodeProto, given: Sequence[np.ndarray | None]) -> str:
    """Why a node has no defined result on these arrays; "" if it has."""
    x = given[0] if given else None
    if x is None:
        return ""
    y = given[1] if len(given) > 1 else None
    op = node.op_type
    if y is not None and op in BINARY and not _broadcast(x.shape, y.shape):
        return "no common shape"
    if op in ("Div", "Mod") and y is not None and y.dtype.kind in "iu":
        if bool((y == 0).any()):
            return "integer division by zero"
        if y.dtype.kind == "i" and bool((x == np.iinfo(x.dtype).min).any()) and bool((y == -1).any()):
            return "MIN / -1"
    if op == "Pow" and y is not None and (x.dtype.kind in "iu" or y.dtype.kind in "iu"):
        with np.errstate(all="ignore"):
            big = np.power(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))
        if x.dtype.kind in "iu" and (not bool((big < 2.0**24).all()) or bool((y < 0).any()) or has_nan(y)):
            return "integer power out of range"
    if op == "BitShift" and y is not None and bool((y >= x.dtype.itemsize * 8).any()):
        return "shift by the width"
    if op == "Reshape" and y is not None and node.input[1][0] != "c" and bool((y == 0).any()):
        return "a computed 0 copies a dimension"
    if op == "Concat" and not _joins(node, given):
        return "empty inputs of other shapes"
    if op in REDUCES and x.dtype.kind in "iu" and _wraps(op, x):
        return "an integer reduction that leaves its type"
    if op in ("Einsum", "Det") and not all(map(_finite, given)):
        return "infinities meet in an order of the runtime's choice"
    if op == "Einsum" and x.dtype.kind in "iu" and _sums_wrap(given):
        return "an integer sum that leaves what onnxruntime sums exactly"
    if op in ("Cast", "CastLike") and is_float(x):
        to = _target(node, y)
        if to is None or (to.kind in "iu" and not _fits(x, to)):
            return "conversion does not fit"
    return ""


def elements(node: onnx.NodeProto, given: Sequence[np.ndarray | None]) -> float:
    """How many a result has whose size its operands say; 0 for all others."""
    arrays = [a for a in given if a is not None]
    numbers = [a.astype(np.float64) for a in arrays if a.dtype.kind in "iuf"]
    with np.errstate(all="ignore"):
        match node.op_type:
            case "Range" if len(numbers) == 3 and all(a.size == 1 for a in numbers):
                start, end, step = (float(a.item()) for a in numbers)
                return (end - start) / step if step else 0.0
            case "ConstantOfShape" | "Expand" | "AffineGrid" if numbers:
                return float(np.prod(np.maximum(numbers[-1], 1)))
            case "Tile" if len(numbers) > 1:
                return float(arrays[0].size * np.prod(numbers[-1]))
            case "OneHot" if len(numbers) > 1 and numbers[1].size:
                return float(arrays[0].size * numbers[1].max())
    return 0.0


def _leaves_half(given: Sequence[np.ndarray | None], made: Sequence[np.ndarray]) -> bool:
    """Infinite f16 results that may come of overflow."""
    if not any(a.dtype == F16 and bool(np.isinf(a).any()) for a in made):
        return False
    infinite = any(is_float(a) and bool(np.isinf(a.astype(np.float64)).any()) for a in given if a is not None)
    largest = max(
        (
            float(np.max(np.abs(a.astype(np.float64)), initial=0.0, where=np.isfinite(a.astype(np.float64))))
            for a in given
            if a is not None and is_float(a)
        ),
        default=0.0,
    )
    return not infinite or largest > 30000


def _barely_varies(x: np.ndarray, axes: tuple[int, ...]) -> bool:
    """Something that is normalised over these axes varies by less than a hundredth of its size."""
    if not x.size or any(not -x.ndim <= a < x.ndim for a in axes):
        return True
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        return not bool((wide.std(axis=axes) > 0.01 * np.abs(wide.mean(axis=axes))).all())


def _flat(x: np.ndarray | None) -> bool:
    """Some plane varies by less than a hundredth of its size."""
    if x is None or x.ndim < 3 or not x.size:
        return True
    rows = x.astype(np.float64).reshape(x.shape[0], x.shape[1], -1)
    with np.errstate(all="ignore"):
        return not bool((rows.std(axis=-1) > 0.01 * np.abs(rows.mean(axis=-1))).all())


def _broadcast(*shapes: Shape) -> bool:
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        return False
    return True


def _wraps(op: str, x: np.ndarray) -> bool:
    """A result, or what leads to it, may be too large for the type (onnxruntime's kernels wrap, saturate or round)."""
    if not x.size or op in ("ReduceMax", "ReduceMin"):
        return False
    wide = np.abs(x.astype(np.float64))
    if x.dtype == I32:  # in f64, up to the end of the type: only a product may leave even that
        return op == "ReduceProd" and float(np.log2(np.maximum(wide, 1)).sum()) > 1000
    top = min(float(np.iinfo(x.dtype).max), 2.0**53)
    match op:
        case "ReduceProd":
            most = float(np.prod(np.maximum(wide, 1)))
        case "ReduceSumSquare" | "ReduceL2":
            most = float((wide * wide).sum())
        case "ReduceLogSum":
            most = float(wide.sum()) if bool((x > 0).all()) else np.inf
        case _:
            most = float(wide.sum())
    return most > top


def _sums_wrap(given: Sequence[np.ndarray | None]) -> bool:
    """Sums of products may need more than the 53 bits that go through a double."""
    most = 1.0
    for a in given:
        if a is not None and a.size:
            most *= max(1.0, float(np.abs(a.astype(np.float64)).sum()))
    return most > min(2.0**53, float(np.iinfo(given[0].dtype).max) if given[0] is not None else np.inf)


def _joins(node: onnx.NodeProto, given: Sequence[np.ndarray | None]) -> bool:
    """Shapes agree but along the axis (onnxruntime looks at those of inputs that are not empty only)."""
    axis = next(a.i for a in node.attribute if a.name == "axis")
    shapes = [list(a.shape) for a in given if a is not None]
    for shape in shapes:
        if not -len(shape) <= axis < len(shape):
            return False
        shape[axis] = 0
    return all(s == shapes[0] for s in shapes)


def _target(node: onnx.NodeProto, like: np.ndarray | None) -> np.dtype | None:
    if node.op_type == "CastLike":
        return None if like is None else like.dtype
    to = next((a.i for a in node.attribute if a.name == "to"), 0)
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(to))
    except (KeyError, TypeError, ValueError):
        return None


def _fits(x: np.ndarray, to: np.dtype) -> bool:
    wide = x.astype(np.float64)
    info = np.iinfo(to)
    with np.errstate(all="ignore"):
        whole = np.trunc(wide)
        return bool((np.isfinite(wide) & (whole >= float(info.min)) & (whole < float(info.max))).all())


# --- the writer ----------------------------------------------------------------------------------------------------
class Writer:
    """The graph so far: values with their arrays, one per live input set."""

    def __init__(self, seed: int, opset: int) -> None:
        self.seed, self.opset, self.range = seed, opset, SMALL
        self.rng = random.Random(seed)
        self.draw = np.random.default_rng(seed)
        self.sets = list(range(SETS))
        self.dynamic = self.rng.random() < 0.65
        self.special = self.rng.random() < 0.5
        self.symbols: dict[str, list[int]] = {}
        self.dims: dict[str, list[int | str]] = {}  # of the graph inputs
        self.arrays: dict[str, list[np.ndarray]] = {}
        self.consts: dict[str, np.ndarray] = {}
        self.pool: list[str] = []
        self.nodes: list[onnx.NodeProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.ops: list[str] = []
        self.count = 0

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # values
    def a(self, name: str) -> np.ndarray:
        """A value's array in the first set."""
        return self.arrays[name][0]

    def shape(self, name: str) -> Shape:
        return tuple(self.a(name).shape)

    def dtype(self, name: str) -> np.dtype:
        return self.a(name).dtype

    def input(self, dtype: np.dtype, dims: Sequence[int | str], first: np.ndarray | None = None) -> str:
        """A graph input; `first` is its array in the first set."""
        name = self.name("x")
        shapes = {k: tuple(self.symbols[d][k] if isinstance(d, str) else d for d in dims) for k in self.sets}
        if max(map(prod, shapes.values())) > self.range.largest:
            raise Rejected("large")
        self.dims[name] = list(dims)
        out = []
        for k, shape in shapes.items():
            plain = k == 0 or not self.special
            out.append(first if k == 0 and first is not None else self.data(dtype, shape, plain))
        self.arrays[name] = out
        self.pool.append(name)
        return name

    def symbol(self, size: int) -> str:
        """A symbol that has this size in the first set."""
        fitting = [s for s, sizes in self.symbols.items() if sizes[0] == size]
        if fitting and self.chance(0.75):
            return self.rng.choice(fitting)
        name = self.rng.choice(("N", "batch", "seq", "H", "W", "n")) + str(len(self.symbols))
        sizes = self.range.sizes if len(self.symbols) < 2 else [s for s in SMALL.sizes if s < 6]
        self.symbols[name] = [size, *(self.rng.choice(sizes) for _ in range(SETS - 1))]
        return name

    def dim(self, size: int, p: float = 0.6) -> int | str:
        return self.symbol(size) if self.dynamic and self.chance(p) else size

    def data(self, dtype: np.dtype, shape: Shape, plain: bool) -> np.ndarray:
        """Random numbers; not plain: with special values in between."""
        if dtype == BOOL:
            return self.draw.integers(0, 2, shape).astype(np.bool_)
        if dtype.kind in "iu":
            low = 0 if dtype.kind == "u" else -9
            out = self.draw.integers(low, 10, shape).astype(dtype)
            extremes: list[float] = [np.iinfo(dtype).max, np.iinfo(dtype).min, 0, 1]
        else:
            out = (self.draw.standard_normal(shape) * self.rng.choice((0.5, 1, 1, 3))).astype(dtype)
            least, most = float(limits(dtype).smallest_subnormal), float(limits(dtype).max)
            extremes = [np.inf, -np.inf, np.nan, -0.0, 0.0, least, most, 1, -88.5]
        out = np.asarray(out)
        if plain or not out.size:
            return out
        some = self.draw.random(shape) < self.rng.choice((0.05, 0.2, 0.5))
        with np.errstate(all="ignore"):
            values = np.array(extremes, np.float64 if is_float(dtype) else dtype).astype(dtype)
        return np.asarray(np.where(some, values[self.draw.integers(0, len(extremes), shape)], out), dtype)

    def const(self, array: np.ndarray) -> str:
        """An initializer, sometimes a Constant node."""
        name, array = self.name("c"), np.asarray(array)
        if self.chance(0.15) and array.dtype != BF16:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        self.consts[name] = array
        self.arrays[name] = [array] * len(self.sets)
        return name

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def number(self, value: float, dtype: np.dtype) -> str:
        return self.const(np.array(value, np.float64).astype(dtype))

    def pick(self, fits: Callable[[str], bool] = lambda _name: True) -> str:
        """Mostly one of the last values, so that chains come about; sometimes any."""
        found = [v for v in self.pool if fits(v)]
        if not found:
            raise Rejected("nothing fits")
        near = self.rng.choice((1, 1, 2, 4, len(found)))
        return self.rng.choice(found[-near:])

    def like(self, x: str) -> list[str]:
        return [v for v in self.pool if self.dtype(v) == self.dtype(x)]

    # nodes
    def op(self, op: str, inputs: Sequence[str | None], count: int = 1, domain: str = "", **attrs: Any) -> list[str]:
        """Add a node that onnxruntime computes on every live set; its outputs. Raises Rejected."""
        if domain == "" and not onnx.defs.has(op, self.opset):
            raise Rejected("not in this opset")
        names = ["" if v is None else v for v in inputs]
        while names and not names[-1]:
            names.pop()
        outputs = [self.name("v") for _ in range(count)]
        title = self.rng.choice(("", op, f"{op}_{len(self.nodes)}"))
        node = helper.make_node(op, names, outputs, title, domain=domain)
        node.attribute.extend(attribute(k, v) for k, v in attrs.items() if v is not None)
        return self.commit(node)

    def one(self, op: str, *inputs: str | None, **attrs: Any) -> str:
        return self.op(op, inputs, **attrs)[0]

    def commit(self, node: onnx.NodeProto, captures: Sequence[str] = ()) -> list[str]:
        """Compute the node on every set and keep it."""
        reads = list(dict.fromkeys([n for n in node.input if n] + list(captures)))
        results: dict[int, list[np.ndarray]] = {}
        for at, k in enumerate(self.sets):
            given = [self.arrays[n][at] if n else None for n in node.input]
            why = undefined(node, given) or self._unclear(node, given)
            why = why or ("large" if elements(node, given) > self.range.largest else "")
            made = None if why else self._compute(node, reads, at)
            if made is not None and _leaves_half(given, made):
                made, why = None, "f16 overflows, or not where onnxruntime keeps f32 between two nodes"
            if made is not None and self._useful(made, k):
                results[k] = made
            elif k == 0 or self.chance(0.8):
                raise Rejected(why or "not computed")
        if len(results) < len(self.sets):
            alive = [at for at, k in enumerate(self.sets) if k in results]
            self.sets = [k for k in self.sets if k in results]
            self.arrays = {n: [arrays[at] for at in alive] for n, arrays in self.arrays.items()}
        self.nodes.append(node)
        self.ops.append(node.op_type)
        names = [n for n in node.output if n]
        for n, arrays in zip(names, zip(*(results[k] for k in self.sets), strict=True), strict=True):
            self.arrays[n] = list(arrays)
            self.pool.append(n)
        return names

    def _unclear(self, node: onnx.NodeProto, given: Sequence[np.ndarray | None]) -> str:
        """What onnxruntime itself does not decide: NaN in a window, the sign of a computed zero."""
        if node.op_type in ("MaxPool", "GlobalMaxPool") and given[0] is not None and bool((given[0] == -np.inf).any()):
            return "-inf is the smallest finite number in some of onnxruntime's kernels"
        if node.op_type == "LayerNormalization" and len(node.output) > 1 and not _finite(given[0]):
            return "the running mean of infinities is NaN for some lengths"
        if node.op_type == "LRN" and not _finite(given[0]):
            return "a sum that slides over the channels keeps NaN behind infinities and NaN"
        if (
            node.op_type == "Softplus"
            and given[0] is not None
            and given[0].dtype == F64
            and bool((given[0] > 700).any())
        ):
            return "Softplus of f64 overflows where its result does not"
        if node.op_type == "InstanceNormalization" and _flat(given[0]):
            return "a constant row, of which onnxruntime makes its rounding errors"
        if node.op_type == "MeanVarianceNormalization" and given[0] is not None:
            axes = next((tuple(a.ints) for a in node.attribute if a.name == "axes"), (0, 2, 3))
            if _barely_varies(given[0], axes):
                return "the root of a variance that rounding makes negative"
        if node.op_type in ("Resize", "Upsample") and given[0] is not None and not np.isfinite(given[0]).all():
            return "infinities and NaN times a weight of 0"
        if node.op_type == "Sign" and given[0] is not None and given[0].dtype == F16 and has_nan(given[0]):
            return "the sign of NaN is that of f16 or of f32"
        if node.op_type in NAN_BY_POSITION and given[0] is not None and has_nan(given[0]):
            return "NaN in a window"
        at = ZERO_SIGN.get(node.op_type, -1)
        x = given[at] if 0 <= at < len(given) else None
        first = given[0] if given else None
        if node.op_type == "LogSoftmax" and first is not None and first.dtype == F64 and not np.isfinite(first).all():
            return "LogSoftmax of f64 makes numbers of NaN"
        if self._overflows(node, given):
            return "a sum that may overflow"
        made = at >= 0 and node.input[at] not in self.consts and node.input[at] not in self.dims
        if made and x is not None and is_float(x) and bool((x == 0).any()):
            return "the sign of a zero"
        return ""

    def _overflows(self, node: onnx.NodeProto, given: Sequence[np.ndarray | None]) -> bool:
        """Sums of huge numbers and products of many are finite or not by their order."""
        op = lookup(node.domain, node.op_type, self.opset)
        if node.op_type == "ReduceProd" and given[0] is not None and is_float(given[0]):
            return float(np.log2(np.maximum(np.abs(np.nan_to_num(given[0].astype(np.float64))), 1)).sum()) > 15
        if op is not None and op.tol.kind != "sum":
            return False
        for a in given:
            if a is not None and is_float(a) and a.size:
                wide = np.abs(a.astype(np.float64))
                top = float(limits(a.dtype).max) ** (0.45 if a.dtype.itemsize > 2 else 0.7)
                if float(np.max(wide, where=np.isfinite(wide), initial=0.0)) > top:
                    return True
        return False

    def _compute(self, node: onnx.NodeProto, reads: Sequence[str], at: int) -> list[np.ndarray] | None:
        try:
            session = _session(self._alone(node, reads))
            feeds = {n: self.arrays[n][at] for n in reads if n not in self.consts}
            results = list(ort.run(session, feeds).values())
        except NOT_COMPUTED:
            return None
        arrays = [r for r in results if isinstance(r, np.ndarray) and r.dtype.kind != "O"]
        return arrays if len(arrays) == len(results) else None

    def _alone(self, node: onnx.NodeProto, reads: Sequence[str]) -> onnx.ModelProto:
        fed = [n for n in reads if n not in self.consts]
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info(n, code(self.dtype(n)), [None] * self.a(n).ndim) for n in fed],
            [onnx.ValueInfoProto(name=n) for n in node.output if n],
            [tensor(self.consts[n], n) for n in reads if n in self.consts],
        )
        return helper.make_model(graph, opset_imports=self.imports(), functions=self.functions, ir_version=10)

    def imports(self) -> list[onnx.OperatorSetIdProto]:
        local = [helper.make_opsetid("local", 1)] if self.functions else []
        return [helper.make_opsetid("", self.opset), *local]

    def _useful(self, made: Sequence[np.ndarray], k: int) -> bool:
        for a in made:
            if a.size > self.range.largest or a.ndim > 6:
                return False
            if k or not is_float(a) or not a.size:
                continue
            wide = np.abs(a.astype(np.float64))
            finite = np.isfinite(wide)
            lost = float((~finite).mean())
            large = float(np.max(wide, where=finite, initial=0.0)) > (1e3 if a.dtype.itemsize == 2 else 1e7)
            if (lost > 0.4 or large) and self.chance(0.9):
                return False
        return True

    # the end
    def finish(self) -> Made | None:
        """The model; None when it has no node."""
        if not self.nodes:
            return None
        used = {i for n in self.nodes for i in n.input} | captured(self.nodes)
        made = [o for n in self.nodes for o in n.output if o and n.op_type != "Constant"]
        outs = [v for v in made if v not in used or self.chance(0.12)]
        if not outs:
            return None
        outs += [v for v in self.dims if self.chance(0.02)]
        fixed = not self.symbols and self.chance(0.7)
        inputs = [v for v in self.dims if v in used or v in outs or self.chance(0.2)]
        held = {o for n in self.nodes if n.op_type == "Constant" for o in n.output}
        consts = [c for c in self.consts if c in used and c not in held]
        outs += [c for c in consts if self.chance(0.01)]
        infos = [helper.make_tensor_value_info(v, code(self.dtype(v)), self.dims[v]) for v in inputs]
        graph = helper.make_graph(
            self.nodes,
            f"fuzz_{self.seed}",
            infos,
            [self._info(v, fixed) for v in outs],
            [tensor(self.consts[c], c) for c in consts],
        )
        if self.chance(0.05):
            self.rng.shuffle(nodes := list(graph.node))
            del graph.node[:]
            graph.node.extend(nodes)
        feeds = [{v: self.arrays[v][at] for v in inputs} for at in range(len(self.sets))]
        model = helper.make_model(graph, opset_imports=self.imports(), functions=self.functions, ir_version=8)
        if self.opset > 20 or any(a.dtype.itemsize < 1 for a in self.consts.values()):
            model.ir_version = 10
        return Made(self.seed, model, feeds, self.ops)

    def _info(self, v: str, fixed: bool) -> onnx.ValueInfoProto:
        fixed = fixed and len({a.shape for a in self.arrays.get(v, ())}) < 2  # of some ops the data decide
        shape: list[int | str] = list(self.shape(v)) if fixed else [f"{v}_{k}" for k in range(self.a(v).ndim)]
        return helper.make_tensor_value_info(v, code(self.dtype(v)), self.dims.get(v, shape))


def captured(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Names that bodies of nodes read."""
    found: set[str] = set()
    pending = [a.g for n in nodes for a in n.attribute if a.HasField("g")]
    while pending:
        g = pending.pop()
        found |= {i for n in g.node for i in n.input} | {o.name for o in g.output}
        pending += [a.g for n in g.node for a in n.attribute if a.HasField("g")]
    return found
