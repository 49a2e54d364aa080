"""Seeded random valid ONNX graphs over the whole op table, with the inputs to run them on.

A graph grows node by node: a move proposes a node, onnxruntime computes it alone on every input set, and only what it
computes stays. So moves need not know when a node is valid, every value's data are known while the graph grows, and
what has no defined result (integer division by zero, conversions that do not fit) is seen before it is written.

Input sets: the first has plain numbers; the others have other sizes for the free dimensions (0 and 1 among them) and
special values. Same seed, same bytes, for the same versions of onnx, onnxruntime and the op table.
"""

from __future__ import annotations

import contextlib
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
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the samples of the op table are in tests/

from onnxfuse.errors import UsageError
from onnxfuse.ir.op import Family, Op
from onnxfuse.ops.table import OPS, lookup, parameters
from onnxfuse.verify import ort
from tests.ops.samples import samples

NEWEST = 26  # the opset up to which onnxruntime has kernels for nearly everything
OLDEST = 7
LARGEST = 6000  # elements of a value
SETS = 3

BF16 = np.dtype(ml_dtypes.bfloat16)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
INTS = tuple(np.dtype(n) for n in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"))
I32, I64, BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)
DTYPES: tuple[tuple[np.dtype, float], ...] = (
    (F32, 50), (F64, 8), (F16, 8), (BF16, 1), (I64, 8), (I32, 8), (BOOL, 4),
    *((d, 1.2) for d in INTS if d not in (I32, I64)),
)  # fmt: skip
EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 33)
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 31, 33)  # of free dimensions in the later sets
# Where in a window a NaN stands decides whether onnxruntime returns it.
NAN_BY_POSITION = frozenset({"ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "Hardmax"})
# Ops that tell +0 from -0, which onnxruntime's kernels return by the order of operands or the vector path taken.
ZERO_SIGN = {"Div": 1, "Reciprocal": 0, "Pow": 0}

Shape = tuple[int, ...]


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
        self.seed, self.opset = seed, opset
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
        if max(map(prod, shapes.values())) > LARGEST:
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
        sizes = SIZES if len(self.symbols) < 2 else [s for s in SIZES if s < 6]
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
            if a.size > LARGEST or a.ndim > 6:
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
        made = [o for n in self.nodes for o in n.output if n.op_type != "Constant"]
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


def random_graph(seed: int, opset: int | None = None, nodes: int | None = None) -> Made | None:
    """One graph of a few nodes; None when the seed gives none."""
    head = random.Random(seed)
    w = Writer(seed, opset or random_opset(head))
    wanted = nodes or w.rng.choices((1, 2, 3, 4, 5, 6, 8, 12, 20), (2, 4, 6, 6, 5, 4, 3, 2, 1))[0]
    for _ in range(w.rng.choice((1, 1, 2, 3))):
        with contextlib.suppress(Rejected):
            start(w)
    for _ in range(wanted * 6):
        if len(w.ops) >= wanted:
            break
        with contextlib.suppress(Rejected, IndexError, ValueError):
            w.rng.choices(MAKERS, WEIGHTS)[0](w)
    made = w.finish()
    return made if made is not None and runs(made) else None


def runs(made: Made) -> bool:
    """Onnxruntime takes the whole as it took the parts, and so does the specification (it does not check all types)."""
    try:
        onnx.checker.check_model(made.model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    try:
        session = ort.session(made.model)
        made.feeds[:] = [f for k, f in enumerate(made.feeds) if k == 0 or _accepts(session, f)]
        ort.run(session, made.feeds[0])
    except REFUSALS:
        return False
    return True


def _accepts(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> bool:
    try:
        ort.run(session, feeds)
    except ort.ORT_ERRORS:
        return False
    return True


def random_opset(rng: random.Random) -> int:
    """Any supported opset, the usual ones more often."""
    usual = (13, 14, 15, 16, 17, 17, 17, 18, 18, 19, 20, 21, 22)
    chosen: int = rng.choice((*range(OLDEST, NEWEST + 1), *usual))
    return chosen


def start(w: Writer) -> str:
    """A graph input of any type, rank and sizes."""
    dtype = w.rng.choices([d for d, _ in DTYPES], [p for _, p in DTYPES])[0]
    if w.dims and w.chance(0.5):  # like another one, so that they meet
        x = w.rng.choice(list(w.dims))
        dims = list(w.dims[x])
        keep = w.rng.randint(0, len(dims))
        dims = [1 if w.chance(0.15) else d for d in dims[keep:]] if w.chance(0.4) else dims
        return w.input(w.dtype(x) if w.chance(0.7) else dtype, dims)
    rank = w.rng.choices((0, 1, 2, 3, 4, 5), (1, 2, 5, 5, 5, 1))[0]
    while True:
        sizes = [w.rng.choice(EXTENTS) for _ in range(rank)]
        if prod(sizes) <= LARGEST // 4:
            break
    if sizes and w.chance(0.03):
        sizes[w.rng.randrange(rank)] = 0
    return w.input(dtype, [w.dim(s) for s in sizes])


# --- moves: each adds nodes or raises Rejected ---------------------------------------------------------------------
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
SAFE = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Exp", "Floor", "Erf", "Sqrt", "Not", "Identity", "Cast")
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
ATTRS: dict[str, dict[str, tuple[object, ...]]] = {
    "LeakyRelu": {"alpha": (0.3, -1.5, 0.0)},
    "Elu": {"alpha": (0.3, 2.0)},
    "Selu": {"alpha": (2.0,), "gamma": (3.0,)},
    "Celu": {"alpha": (2.0, 0.5)},
    "ThresholdedRelu": {"alpha": (2.0, -1.0, 0.0)},
    "HardSigmoid": {"alpha": (0.5,), "beta": (0.1,)},
    "Shrink": {"bias": (1.5,), "lambd": (1.5,)},
    "Gelu": {"approximate": ("tanh", "none")},
    "Swish": {"alpha": (0.5, 1.702)},
    "IsInf": {"detect_negative": (0, 1), "detect_positive": (0, 1)},
    "Mod": {"fmod": (0, 1)},
    "BitShift": {"direction": ("LEFT", "RIGHT")},
    "ArgMax": {"keepdims": (0, 1), "select_last_index": (0, 1)},
    "ArgMin": {"keepdims": (0, 1), "select_last_index": (0, 1)},
    "CumSum": {"exclusive": (0, 1), "reverse": (0, 1)},
}


def some(w: Writer, op: str) -> dict[str, Any]:
    """Some of an op's attributes."""
    return {k: w.rng.choice(values) for k, values in ATTRS.get(op, {}).items() if w.chance(0.6)}


def unary(w: Writer) -> None:
    op = w.rng.choice(UNARY) if w.chance(0.7) else w.rng.choice(SAFE)
    if op == "Cast":
        return cast_(w)
    w.op(op, [w.pick()], **some(w, op))
    return None


def partner(w: Writer, x: str) -> str:
    """A second operand: another value, the same, or a constant that broadcasts (sometimes making x broadcast)."""
    if w.chance(0.55):
        return w.rng.choice(w.like(x))
    shape = w.shape(x)
    choices: list[Shape] = [
        (), (1,), shape[-1:], shape, tuple(d if w.chance(0.5) else 1 for d in shape), (w.rng.choice((1, 2, 3)), *shape),
        tuple(d if d != 1 else w.rng.choice((1, 3)) for d in shape),
    ]  # fmt: skip
    return w.const(w.data(w.dtype(x), w.rng.choice(choices), plain=w.chance(0.85)))


def binary(w: Writer) -> None:
    op = w.rng.choice(BINARY) if w.chance(0.5) else w.rng.choice(ARITHMETIC)
    x = w.pick()
    y = partner(w, x)
    pair = [x, y] if w.chance(0.6) else [y, x]
    w.op(op, pair, **some(w, op))


def variadic(w: Writer) -> None:
    x = w.pick()
    w.op(w.rng.choice(("Max", "Min", "Sum", "Mean")), [x, *(partner(w, x) for _ in range(w.rng.randint(0, 3)))])


def where(w: Writer) -> None:
    x = w.pick()
    conditions = [v for v in w.pool if w.dtype(v) == BOOL]
    if conditions and w.chance(0.7):
        c = w.rng.choice(conditions)
    elif w.chance(0.5):
        c = w.const(w.data(BOOL, w.rng.choice((w.shape(x), w.shape(x)[-1:], ())), True))
    else:
        c = w.one(w.rng.choice(("Greater", "Less", "Equal")), x, partner(w, x))
    w.op("Where", [c, x, partner(w, x)])


def clip(w: Writer) -> None:
    x = w.pick()
    low, high = sorted(w.rng.sample((-3.0, -1.0, 0.0, 0.5, 1.0, 6.0), 2))
    if w.opset < 11:
        w.op("Clip", [x], min=low, max=high)
        return
    if w.dtype(x).kind in "iu":
        low, high = 1, 5
    bounds = [w.number(b, w.dtype(x)) if w.chance(0.8) else None for b in (low, high)]
    w.op("Clip", [x, *bounds])


def cast_(w: Writer) -> None:
    x = w.pick()
    targets = [code(d) for d, _ in DTYPES] + [code(F32)] * 4 + ([17, 18, 19, 20] if w.opset >= 19 else [])
    if w.opset >= 15 and w.chance(0.15):
        w.op("CastLike", [x, w.pick()])
        return
    w.op("Cast", [x], to=w.rng.choice(targets))


def reduce_(w: Writer) -> None:
    op = w.rng.choice(REDUCES)
    x = w.pick()
    rank = len(w.shape(x))
    axes: list[int] | None = sorted(w.rng.sample(range(rank), w.rng.randint(1, rank))) if rank else None
    if rank and w.chance(0.4):
        axes = [rank - 1]
    if axes is not None and w.chance(0.3):
        axes = [a - rank for a in axes]
    if w.chance(0.1):
        axes = None
    w.op(op, _with_axes(w, op, x, axes), keepdims=w.rng.choice((0, 1, 1, None)), **_axes_attr(w, op, axes))


def _axes_are_input(w: Writer, op: str) -> bool:
    try:
        return "axes" in {i.name for i in onnx.defs.get_schema(op, w.opset).inputs}
    except onnx.defs.SchemaError as error:
        raise Rejected(op) from error


def _with_axes(w: Writer, op: str, x: str, axes: Sequence[int] | None) -> list[str]:
    return [x, w.ints(*axes)] if _axes_are_input(w, op) and axes is not None else [x]


def _axes_attr(w: Writer, op: str, axes: Sequence[int] | None) -> dict[str, Any]:
    return {} if _axes_are_input(w, op) or axes is None else {"axes": list(axes)}


def ranked(w: Writer, low: int, high: int = 9) -> str:
    return w.pick(lambda v: low <= len(w.shape(v)) <= high)


def real(w: Writer, low: int = 0, high: int = 9) -> str:
    """A float value."""
    return w.pick(lambda v: is_float(w.dtype(v)) and low <= len(w.shape(v)) <= high)


def softmax(w: Writer) -> None:
    x = real(w, 1)
    rank = len(w.shape(x))
    w.op(w.rng.choice(("Softmax", "Softmax", "LogSoftmax", "Hardmax")), [x], axis=w.rng.choice((-1, 0, rank - 1, None)))


def softmax_by_hand(w: Writer) -> None:
    """The formula, perhaps with a scale and a mask before it."""
    x = real(w, 1)
    axes = [len(w.shape(x)) - 1] if w.chance(0.7) else [w.rng.randrange(len(w.shape(x)))]
    if w.chance(0.5):
        x = w.one("Mul", x, w.number(0.125, w.dtype(x)))
    m = w.op("ReduceMax", _with_axes(w, "ReduceMax", x, axes), **_axes_attr(w, "ReduceMax", axes))[0]
    e = w.one("Exp", w.one("Sub", x, m))
    s = w.op("ReduceSum", _with_axes(w, "ReduceSum", e, axes), **_axes_attr(w, "ReduceSum", axes))[0]
    w.one("Div", e, s)


def norm_by_hand(w: Writer) -> None:
    x = real(w, 1)
    axes = [len(w.shape(x)) - 1] if w.chance(0.7) else [0]
    mean = w.op("ReduceMean", _with_axes(w, "ReduceMean", x, axes), **_axes_attr(w, "ReduceMean", axes))[0]
    d = w.one("Sub", x, mean)
    square = w.one("Mul", d, d) if w.chance(0.5) else w.one("Pow", d, w.number(2, w.dtype(x)))
    var = w.op("ReduceMean", _with_axes(w, "ReduceMean", square, axes), **_axes_attr(w, "ReduceMean", axes))[0]
    root = w.one("Sqrt", w.one("Add", var, w.number(1e-3, w.dtype(x))))
    y = w.one("Div", d, root) if w.chance(0.6) else w.one("Mul", d, w.one("Reciprocal", root))
    if w.chance(0.6):
        w.one("Mul", y, w.const(w.data(w.dtype(x), w.shape(x)[-1:], True)))


def norm(w: Writer) -> None:
    x = real(w, 1)
    dtype, shape = w.dtype(x), w.shape(x)

    def row(n: Sequence[int]) -> str:
        return w.const(np.abs(w.data(dtype, tuple(n), True)) + np.array(0.1, dtype))

    op = w.rng.choice(
        ("LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization",
         "LpNormalization", "MeanVarianceNormalization", "LRN", "ReduceLogSumExp", "LayerNormalization")
    )  # fmt: skip
    eps: dict[str, Any] = {"epsilon": w.rng.choice((1e-5, 0.1))} if w.chance(0.5) else {}
    match op:
        case "LayerNormalization" | "RMSNormalization":
            axis = w.rng.choice((-1, -1, *range(len(shape))))
            extra = [row(shape[axis:])] if op[0] == "L" and w.chance(0.7) else []
            count = w.rng.choice((1, 1, 1, 2, 3)) if op[0] == "L" and w.opset >= 17 else 1
            w.op(op, [x, row(shape[axis:]), *extra], count, axis=axis, **eps)
        case "BatchNormalization":
            w.op(op, [x, *(row(shape[1:2] or (1,)) for _ in range(4))], **eps)
        case "InstanceNormalization":
            w.op(op, [x, row(shape[1:2]), row(shape[1:2])], **eps)
        case "GroupNormalization":
            groups = w.rng.choice([g for g in (1, 2, 4) if shape[1:2] and shape[1] % g == 0] or [1])
            n = [groups] if w.opset < 21 else shape[1:2]
            w.op(op, [x, row(n), row(n)], num_groups=groups, **eps)
        case "LpNormalization":
            w.op(op, [x], p=w.rng.choice((1, 2)), axis=w.rng.randrange(-1, len(shape)))
        case "MeanVarianceNormalization":
            w.op(op, [x], axes=w.rng.choice(([0, 2, 3], [0, 1, 2, 3], [2, 3])))
        case "LRN":
            w.op(op, [x], size=w.rng.choice((1, 3, 5)), alpha=0.5)
        case _:
            axes = [w.rng.randrange(len(shape))]
            w.op(op, _with_axes(w, op, x, axes), keepdims=w.rng.choice((0, 1)), **_axes_attr(w, op, axes))


def transpose(w: Writer) -> None:
    x = ranked(w, 2) if w.chance(0.9) else w.pick()
    rank = len(w.shape(x))
    w.op("Transpose", [x], perm=w.rng.sample(range(rank), rank) if w.chance(0.9) else None)


def reshape(w: Writer) -> None:
    x = w.pick()
    shape = w.shape(x)
    at = w.rng.randrange(len(shape)) if shape else 0
    options: list[list[int]] = [[-1], [0] * at + [-1], list(shape), [*shape, 1], [1, -1]]
    if len(shape) > 1:
        j = min(at, len(shape) - 2)
        options += [[*shape[:j], shape[j] * shape[j + 1], *shape[j + 2 :]], [0] * j + [-1, *shape[j + 2 :]]]
        options.append(list(shape[::-1]))
    if shape and shape[at] and shape[at] % 2 == 0:
        options += [[*shape[:at], 2, shape[at] // 2, *shape[at + 1 :]], [0] * at + [-1, 2, *shape[at + 1 :]]]
    if w.chance(0.2):
        reshape_to_like(w, x)
        return
    w.op("Reshape", [x, w.ints(*w.rng.choice(options))], allowzero=w.rng.choice((0, None)) if w.opset >= 14 else None)


def reshape_to_like(w: Writer, x: str) -> None:
    """To a shape that is computed: Shape, Slice or Gather, Concat."""
    s = w.one("Shape", x)
    rank = len(w.shape(x))
    if w.chance(0.5) and rank:
        picked = w.one("Gather", s, w.ints(*w.rng.sample(range(rank), w.rng.randint(1, rank))))
    else:
        picked = s
    parts = [picked, w.ints(-1)] if w.chance(0.6) else [picked]
    to = w.one("Concat", *parts, axis=0)
    if w.chance(0.5):
        w.one("Reshape", x, to)
    elif w.opset >= 9 and w.chance(0.5):
        w.one("ConstantOfShape", s, value=np.array([1.5], np.float32) if w.chance(0.5) else None)
    else:
        y = w.pick(lambda v: len(w.shape(v)) <= rank)
        w.one("Expand", y, s)


def flatten(w: Writer) -> None:
    x = w.pick()
    w.op("Flatten", [x], axis=w.rng.randint(0, len(w.shape(x))))


def squeeze(w: Writer) -> None:
    x = w.pick()
    units = [k for k, d in enumerate(w.shape(x)) if d == 1]
    if units and w.chance(0.6):
        axes: list[int] | None = w.rng.sample(units, w.rng.randint(1, len(units))) if w.chance(0.9) else None
        w.op("Squeeze", _with_axes(w, "Squeeze", x, axes), **_axes_attr(w, "Squeeze", axes))
        return
    axes = [w.rng.randint(0, len(w.shape(x)))]
    w.op("Unsqueeze", _with_axes(w, "Unsqueeze", x, axes), **_axes_attr(w, "Unsqueeze", axes))


def slice_(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    axes = sorted(w.rng.sample(range(len(shape)), w.rng.randint(1, min(2, len(shape)))))
    rows = [_bounds(w, shape[a]) for a in axes]
    starts, ends, steps = ([r[k] for r in rows] for k in range(3))
    if w.opset < 10:
        w.op("Slice", [x], axes=axes, starts=starts, ends=ends)
        return
    inputs = [x, w.ints(*starts), w.ints(*ends), w.ints(*axes)]
    w.op("Slice", inputs + ([w.ints(*steps)] if any(s != 1 for s in steps) else []))


def _bounds(w: Writer, n: int) -> tuple[int, int, int]:
    step = w.rng.choice((1, 1, 1, 2, 3, -1, -2))
    if step < 0:
        return w.rng.choice((-1, n - 1, 2**31 - 1)), w.rng.choice((-(2**31), 0, -n - 1)), step
    return w.rng.choice((0, 1, -2, n // 2)), w.rng.choice((n, n - 1, -1, 2**31 - 1, 2**63 - 1)), step


def concat(w: Writer) -> None:
    x = ranked(w, 1)
    rank = len(w.shape(x))
    fits = [v for v in w.like(x) if len(w.shape(v)) == rank]
    parts = [w.rng.choice(fits) for _ in range(w.rng.choice((1, 2, 3)))]
    w.op("Concat", [x, *parts], axis=w.rng.randrange(-rank, rank) if w.opset >= 11 else w.rng.randrange(rank))


def split(w: Writer) -> None:
    x = ranked(w, 1)
    axis = w.rng.randrange(len(w.shape(x)))
    n = w.shape(x)[axis]
    if w.chance(0.5) or n < 2:
        w.op("Split", [x], 2, axis=axis, num_outputs=2 if w.opset >= 18 else None)
    else:
        parts = [1, n - 1] if w.chance(0.5) else [n // 2, n - n // 2]
        if w.opset >= 13:
            w.op("Split", [x, w.ints(*parts)], 2, axis=axis)
        else:
            w.op("Split", [x], 2, axis=axis, split=parts)


def expand(w: Writer) -> None:
    x = w.pick()
    shape = w.shape(x)
    to = [w.rng.choice((d, 1, 3)) if d == 1 else w.rng.choice((d, 1)) for d in shape]
    if w.chance(0.3):
        to = [w.rng.choice((1, 2)), *to]
    if w.chance(0.3):
        w.op("Tile", [x, w.ints(*(w.rng.choice((1, 1, 2, 3)) for _ in shape))])
    else:
        w.op("Expand", [x, w.ints(*to)])


def gather(w: Writer) -> None:
    x = ranked(w, 1)
    shape = w.shape(x)
    axis = w.rng.randrange(len(shape))
    n = max(1, shape[axis])
    if w.opset >= 11 and w.chance(0.3):
        at = w.draw.integers(-n, n, tuple(max(1, d - 1) if k != axis else 2 for k, d in enumerate(shape)))
        w.op("GatherElements", [x, w.const(at.astype(np.int64))], axis=axis)
        return
    low = -n if w.opset >= 11 else 0
    at = w.draw.integers(low, n, w.rng.choice(((), (1,), (2,), (2, 2), (3,)))).astype(
        w.rng.choice((np.int64, np.int32))
    )
    index = w.const(at) if w.chance(0.7) else w.input(at.dtype, at.shape, at)
    w.op("Gather", [x, index], axis=axis)


def pad(w: Writer) -> None:
    x = ranked(w, 1)
    rank = len(w.shape(x))
    pads = [w.rng.choice((0, 0, 1, 2, -1)) for _ in range(2 * rank)]
    mode = w.rng.choice(("constant", "constant", "reflect", "edge", "wrap"))
    if w.opset < 11:
        w.op("Pad", [x], mode=mode, pads=pads, value=w.rng.choice((0.0, 1.5)))
        return
    value = [w.number(w.rng.choice((0, 1, 2.5)), w.dtype(x))] if mode == "constant" and w.chance(0.5) else []
    w.op("Pad", [x, w.ints(*pads), *value], mode=mode)


def rearrange(w: Writer) -> None:
    """Rarer views."""
    x = w.pick()
    match w.rng.choice(("DepthToSpace", "SpaceToDepth", "Trilu", "Identity", "Dropout", "EyeLike", "Resize", "Shape")):
        case "DepthToSpace":
            w.op("DepthToSpace", [x], blocksize=2, mode=w.rng.choice(("DCR", "CRD")) if w.opset >= 11 else None)
        case "SpaceToDepth":
            w.op("SpaceToDepth", [x], blocksize=w.rng.choice((1, 2, 3)))
        case "Trilu":
            extra = [w.const(np.array(w.rng.choice((-1, 0, 1, 3)), np.int64))] if w.chance(0.5) else []
            w.op("Trilu", [x, *extra], upper=w.rng.choice((0, 1)))
        case "Dropout":
            w.op("Dropout", [x], w.rng.choice((1, 1, 2)))
        case "EyeLike":
            w.op("EyeLike", [x], k=w.rng.choice((0, 1, -1)), dtype=w.rng.choice((None, 1, 7)))
        case "Resize":
            resize(w, x)
        case op:
            w.op(op, [x])


def resize(w: Writer, x: str) -> None:
    rank = len(w.shape(x))
    scales = np.array([w.rng.choice((1, 1, 2, 0.5, 1.5)) for _ in range(rank)], np.float32)
    scales[: max(0, rank - 2)] = 1
    mode = w.rng.choice(("nearest", "linear", "cubic"))
    if w.opset < 10:
        w.op(
            "Upsample",
            [x, w.const(scales)] if w.opset == 9 else [x],
            mode=mode,
            scales=None if w.opset == 9 else scales.tolist(),
        )
    elif w.opset == 10:
        w.op("Resize", [x, w.const(scales)], mode=mode)
    else:
        how = w.rng.choice(("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"))
        rounding = w.rng.choice((None, "floor", "ceil", "round_prefer_ceil")) if mode == "nearest" else None
        roi = w.const(np.zeros(0, np.float32)) if w.opset < 13 else None
        w.op(
            "Resize", [x, roi, w.const(scales)], mode=mode, coordinate_transformation_mode=how, nearest_mode=rounding
        )  # fmt: skip


def matmul(w: Writer) -> None:
    x = w.pick(lambda v: len(w.shape(v)) >= 1 and w.dtype(v) in (F32, F32, F64, F16, I32, I64))
    shape = w.shape(x)
    n = w.rng.choice((1, 2, 3, 4, 7, 8, 16, 17, 31))
    if w.chance(0.3):
        y = w.rng.choice([v for v in w.like(x) if w.shape(v)])
        if len(w.shape(y)) > 1 and w.chance(0.6):
            rank = len(w.shape(y))
            y = w.one("Transpose", y, perm=[*range(rank - 2), rank - 1, rank - 2])
        w.op("MatMul", [x, y])
        return
    weight = w.rng.choice([(shape[-1], n), (shape[-1], n), (shape[-1],), (*shape[:-2], shape[-1], n)])
    y = w.const(w.data(w.dtype(x), weight, True))
    made = w.one("MatMul", x, y)
    if w.chance(0.5):
        w.one("Add", made, w.const(w.data(w.dtype(x), w.shape(made)[-1:], True)))


def gemm(w: Writer) -> None:
    x = real(w, 2, 2)
    m, k = w.shape(x)
    n = w.rng.choice((1, 3, 5, 8, 16, 19))
    ta, tb = w.rng.choice((0, 0, 1)), w.rng.choice((0, 1))
    rows, inner = (k, m) if ta else (m, k)
    y = w.const(w.data(w.dtype(x), (n, inner) if tb else (inner, n), True))
    bias = [w.const(w.data(w.dtype(x), w.rng.choice(((n,), (1, n), (rows, n), (rows, 1), (), (1,))), True))]
    inputs = [x, y, *bias] if w.opset < 11 or w.chance(0.7) else [x, y]
    scale: dict[str, Any] = (
        {"alpha": w.rng.choice((0.5, -2.0)), "beta": w.rng.choice((0.5, 0.0))} if w.chance(0.4) else {}
    )
    w.op("Gemm", inputs, transA=ta, transB=tb, **scale)


def einsum(w: Writer) -> None:
    x = w.pick(lambda v: w.dtype(v) in (F32, F64, I32, I64) and 1 <= len(w.shape(v)) <= 4)
    letters = "abcd"[: len(w.shape(x))]
    y = w.rng.choice(w.like(x))
    other = "".join(w.rng.choice("abcdef") for _ in w.shape(y))
    seen = sorted(set(letters + other))
    out = "".join(w.rng.sample(seen, w.rng.randint(0, min(4, len(seen)))))
    w.op("Einsum", [x, y], equation=f"{letters},{other}->{out}")


def conv(w: Writer) -> None:
    x = w.pick(lambda v: 3 <= len(w.shape(v)) <= 5 and is_float(w.dtype(v)))
    shape = w.shape(x)
    c, space = shape[1], len(shape) - 2
    kernel = [w.rng.choice((1, 2, 3, 3)) for _ in range(space)]
    if w.chance(0.4):
        kernel = [3] * space
    attrs: dict[str, Any] = {}
    if w.chance(0.4):
        attrs["strides"] = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    if w.chance(0.2):
        attrs["dilations"] = [w.rng.choice((1, 2)) for _ in range(space)]
    if w.chance(0.2):
        attrs["auto_pad"] = w.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif w.chance(0.6):
        attrs["pads"] = [w.rng.choice((0, 1, 1, 2)) for _ in range(2 * space)]
    if w.chance(0.7):
        attrs["kernel_shape"] = kernel
    out = w.rng.choice((1, 2, 3, 4, 8, 16))
    group = w.rng.choice([g for g in (1, 1, 1, 2, c) if g and c % g == 0] or [1])
    if group > 1:
        out, attrs["group"] = group * w.rng.choice((1, 2)), group
    dtype = w.dtype(x)
    if w.chance(0.15):
        weight = w.data(dtype, (c, max(1, out // group), *kernel), True)
        w.op("ConvTranspose", [x, w.const(weight)], **attrs)
        return
    weight = w.data(dtype, (out, c // max(group, 1), *kernel), True)
    bias = [w.const(w.data(dtype, (out,), True))] if w.chance(0.5) else []
    made = w.op("Conv", [x, w.const(weight), *bias], **attrs)[0]
    if w.chance(0.4):
        v = [w.const(np.abs(w.data(dtype, (w.shape(made)[1],), True)) + np.array(0.1, dtype)) for _ in range(4)]
        w.one("BatchNormalization", made, *v)


def pool(w: Writer) -> None:
    x = w.pick(lambda v: 3 <= len(w.shape(v)) <= 5)
    space = len(w.shape(x)) - 2
    op = w.rng.choice(("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool", "Global"))
    if op == "Global":
        w.op(w.rng.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")), [x])
        return
    attrs: dict[str, Any] = {"kernel_shape": [w.rng.choice((1, 2, 3)) for _ in range(space)]}
    if w.chance(0.6):
        attrs["strides"] = [w.rng.choice((1, 2, 3)) for _ in range(space)]
    if w.chance(0.2):
        attrs["auto_pad"] = w.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif w.chance(0.5):
        attrs["pads"] = [w.rng.choice((0, 1)) for _ in range(2 * space)]
    if w.chance(0.25) and w.opset >= 10:
        attrs["ceil_mode"] = 1
    if w.chance(0.2) and ((op == "MaxPool" and w.opset >= 10) or w.opset >= 19):
        attrs["dilations"] = [w.rng.choice((1, 2)) for _ in range(space)]
    if op == "AveragePool" and w.chance(0.5):
        attrs["count_include_pad"] = 1
    if op == "LpPool" and w.chance(0.5):
        attrs["p"] = w.rng.choice((1, 3))
    w.op(op, [x], w.rng.choice((1, 1, 1, 2)) if op == "MaxPool" and w.opset >= 8 else 1, **attrs)


def barrier(w: Writer) -> None:
    """Ops that stay with onnxruntime, between the others."""
    x = ranked(w, 1)
    axis = w.rng.randrange(len(w.shape(x)))
    match w.rng.choice(("ArgMax", "ArgMin", "CumSum", "TopK", "NonZero", "OneHot", "Quantize", "Scatter", "Range")):
        case "ArgMax" | "ArgMin" as op:
            chosen = some(w, op)
            if w.opset < 12:
                chosen.pop("select_last_index", None)
            w.op(op, [x], axis=axis, **chosen)
        case "CumSum":
            w.op("CumSum", [x, w.const(np.array(axis, np.int64))], **some(w, "CumSum"))
        case "TopK" if w.opset >= 10:
            w.op("TopK", [x, w.ints(min(2, w.shape(x)[axis]))], 2, axis=axis)
        case "Quantize" if w.opset >= 10:
            scale, zero = w.number(0.1, F32), w.const(np.array(3, np.uint8))
            q = w.one("QuantizeLinear", x, scale, zero)
            w.one("DequantizeLinear", q, scale, zero)
        case "Scatter" if w.opset >= 11:
            at = np.zeros(w.shape(x), np.int64)
            w.op("ScatterElements", [x, w.const(at), w.rng.choice(w.like(x))], axis=axis)
        case "Range" if w.opset >= 11:
            n = w.one("Gather", w.one("Shape", x), w.const(np.array(axis, np.int64)))
            zero, one = (w.const(np.array(v, np.int64)) for v in (0, 1))
            w.one("Range", zero, n, one)
        case _:
            w.op("NonZero", [x])


def branch(w: Writer) -> None:
    """An If on a computed or given condition; the branches capture a value."""
    x = w.pick(lambda v: v not in w.consts)
    scalars = [v for v in w.pool if w.dtype(v) == BOOL and w.shape(v) in ((), (1,))]
    condition = w.rng.choice(scalars) if scalars else w.input(BOOL, [])
    out = w.name("v")
    graphs = [_body(w, x, f"{out}_{k}") for k in range(2)]
    node = helper.make_node("If", [condition], [out], then_branch=graphs[0], else_branch=graphs[1])
    w.commit(node, captures=[x])


def _body(w: Writer, x: str, prefix: str) -> onnx.GraphProto:
    """A chain of up to three pointwise nodes on a captured value."""
    nodes, last = [], x
    ops = ("Relu", "Neg", "Abs", "Exp", "Sigmoid") if is_float(w.dtype(x)) else ("Identity",)
    for k in range(w.rng.randint(1, 3)):
        nodes.append(helper.make_node(w.rng.choice(ops), [last], [f"{prefix}_{k}"]))
        last = f"{prefix}_{k}"
    info = helper.make_tensor_value_info(last, code(w.dtype(x)), [None] * len(w.shape(x)))
    return helper.make_graph(nodes, f"{prefix}_g", [], [info])


def loop(w: Writer) -> None:
    """A Loop that carries one value and reads another from outside."""
    x = real(w)
    out = w.name("v")
    rank = [None] * len(w.shape(x))
    kind = code(w.dtype(x))
    made = [f"{out}_{k}" for k in range(4)]
    nodes = [
        helper.make_node("Identity", ["cond_" + out], [made[0]]),
        helper.make_node("Mul", ["in_" + out, x], [made[1]]),
        helper.make_node("Tanh", [made[1]], [made[2]]),
    ]
    body = helper.make_graph(
        nodes,
        f"{out}_g",
        [
            helper.make_tensor_value_info("i_" + out, TensorProto.INT64, []),
            helper.make_tensor_value_info("cond_" + out, TensorProto.BOOL, []),
            helper.make_tensor_value_info("in_" + out, kind, rank),
        ],
        [
            helper.make_tensor_value_info(made[0], TensorProto.BOOL, []),
            helper.make_tensor_value_info(made[2], kind, rank),
        ],
    )
    trips = w.const(np.array(w.rng.choice((0, 1, 3)), np.int64))
    w.commit(helper.make_node("Loop", [trips, "", x], [out], body=body), captures=[x])


def local_function(w: Writer) -> None:
    """A call of a function of the model's own."""
    x = real(w)
    name = w.name("f")
    ops = w.rng.sample(("Relu", "Neg", "Abs", "Sigmoid", "Tanh", "Exp"), w.rng.randint(1, 3))
    nodes, last = [], "a"
    for k, op in enumerate(ops):
        nodes.append(helper.make_node(op, [last], [f"t{k}"]))
        last = f"t{k}"
    nodes.append(helper.make_node("Add", [last, "b"], ["y"]))
    made = helper.make_function("local", name, ["a", "b"], ["y"], nodes, [helper.make_opsetid("", w.opset)])
    w.functions.append(made)
    try:
        w.op(name, [x, partner(w, x)], domain="local")
    except Rejected:
        w.functions.pop()
        raise


def graft(w: Writer) -> None:
    """A sample of any entry of the op table, on new inputs, with pointwise nodes around it."""
    op = w.rng.choice(_applicable(w.opset))
    try:
        found = samples(op, w.opset)
    except KeyError:
        raise Rejected("no samples") from None
    s = w.rng.choice(found)
    if any(a is not None and a.size > LARGEST for a in s.inputs):
        raise Rejected("large")
    names: list[str | None] = []
    for k, array in enumerate(s.inputs):
        if array is None:
            names.append(None)
        elif k in s.const or w.chance(0.15):
            names.append(w.const(array))
        else:
            names.append(w.input(array.dtype, [w.dim(n, 0.5) for n in array.shape], array))
            if w.chance(0.35):
                ways = ("Neg", "Abs", "Relu", "Identity") if is_float(array) else ("Identity", "Abs")
                names[-1] = w.one(w.rng.choice(ways), names[-1])
    attrs: dict[str, Any] = dict(s.attrs)
    made = w.op(op.name, names, s.outputs, **attrs)
    if w.chance(0.5):
        w.op(w.rng.choice(("Relu", "Neg", "Sigmoid", "Identity", "Abs", "Sign")), [w.rng.choice(made)])


_table: dict[int, list[Op]] = {}


def _applicable(opset: int) -> list[Op]:
    """Entries that a model of this opset uses and that have a definition."""
    if opset not in _table:
        every = [o for rows in OPS.values() for o in rows if not o.domain]
        _table[opset] = [
            o
            for o in sorted(every, key=lambda o: (o.name, o.since))
            if o.since <= opset
            and lookup("", o.name, opset) is o
            and onnx.defs.has(o.name, opset)
            and "Random" not in o.name
            and o.name not in ("Bernoulli", "Multinomial")
        ]
    return _table[opset]


MOVES: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (unary, 12),
    (binary, 10),
    (variadic, 1.5),
    (where, 1.5),
    (clip, 1.2),
    (cast_, 2),
    (reduce_, 4),
    (softmax, 1.5),
    (softmax_by_hand, 0.8),
    (norm, 2.5),
    (norm_by_hand, 0.8),
    (transpose, 3),
    (reshape, 3),
    (flatten, 0.5),
    (squeeze, 1.5),
    (slice_, 2.5),
    (concat, 2),
    (split, 1.2),
    (expand, 1.5),
    (gather, 1.5),
    (pad, 1.5),
    (rearrange, 1.5),
    (matmul, 2.5),
    (gemm, 2),
    (einsum, 0.7),
    (conv, 2.5),
    (pool, 2),
    (barrier, 1),
    (branch, 0.3),
    (loop, 0.2),
    (local_function, 0.4),
    (graft, 4),
)
MAKERS = [m for m, _ in MOVES]
WEIGHTS = [p for _, p in MOVES]
