"""One node, twice: by the op table (types, loops, the numpy interpreter) and by onnxruntime at ORT_DISABLE_ALL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx
from onnx import helper

from onnxfuse.errors import Refusal, UsageError
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.quantised import UN_QUANTISED
from onnxfuse.frontend.shapes import Typed, infer_types
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Sym, sym, syms_of
from onnxfuse.ir.graph import ArrayConst, Graph, Node, Value
from onnxfuse.ir.interp import Env, bind, eval_expr, run_loops, shape_of
from onnxfuse.ir.loops import Compute, LoopGraph, Opaque
from onnxfuse.ir.op import Op
from onnxfuse.ir.types import tensor
from onnxfuse.verify import ort

NEWEST = onnx.defs.onnx_opset_version()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Inputs (None where absent) and attributes of one node.

    const        inputs that are initializers (shapes, axes ...); they keep their values in every variant
    outputs      how many outputs are asked for
    may_decline  onnxruntime may have no kernel for it (a dtype of a grid); otherwise that is an error of the sample
    """

    inputs: tuple[np.ndarray | None, ...]
    attrs: Mapping[str, object] = field(default_factory=dict)
    const: frozenset[int] = frozenset()
    outputs: int = 1
    may_decline: bool = False

    def __str__(self) -> str:
        shown = ", ".join(
            "-" if a is None else f"{a.dtype}{list(a.shape)}" + (f"={a.tolist()}" if k in self.const else "")
            for k, a in enumerate(self.inputs)
        )
        return f"({shown}) {dict(self.attrs)}"


@dataclass(frozen=True, slots=True, eq=False)
class Ours:
    """What the table says: shape and dtype per output (None: it does not say), and the values or why there are none."""

    dtypes: tuple[DType | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    static: tuple[tuple[int | None, ...] | None, ...]
    values: list[np.ndarray] | None
    refusal: Refusal | None


def model(op: Op, sample: Sample, opset: int) -> onnx.ModelProto:
    """The node alone; constants are initializers, outputs have no types."""
    names = ["" if a is None else f"x{k}" for k, a in enumerate(sample.inputs)]
    while names and not names[-1]:
        names.pop()
    outputs = [f"y{k}" for k in range(sample.outputs)]
    node = helper.make_node(op.name, names, outputs, name="n", domain=op.domain)
    node.attribute.extend(_attribute(k, v) for k, v in sample.attrs.items())
    values = [(k, a) for k, a in enumerate(sample.inputs) if a is not None]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(f"x{k}", _code(a), a.shape) for k, a in values if k not in sample.const],
        [onnx.ValueInfoProto(name=o) for o in outputs],
        [_initializer(a, f"x{k}") for k, a in values if k in sample.const],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(op.domain, 1)] if op.domain else [])
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _code(a: np.ndarray) -> int:
    return int(helper.np_dtype_to_tensor_dtype(a.dtype))


def _initializer(a: np.ndarray, name: str) -> onnx.TensorProto:
    if a.dtype == ml_dtypes.bfloat16:
        return helper.make_tensor(name, 16, a.shape, a.tobytes(), raw=True)
    return onnx.numpy_helper.from_array(a, name)


def _attribute(name: str, value: object) -> onnx.AttributeProto:
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, onnx.numpy_helper.from_array(value))
    if isinstance(value, (list, tuple)) and not value:
        return helper.make_attribute(name, [], attr_type=onnx.AttributeProto.INTS)
    return helper.make_attribute(name, list(value) if isinstance(value, tuple) else value)


def by_onnxruntime(op: Op, sample: Sample, opset: int) -> list[np.ndarray] | str:
    """The outputs, or what onnxruntime said."""
    try:
        sess = ort.session(model(op, sample, opset).SerializeToString())
        feeds = {f"x{k}": a for k, a in enumerate(sample.inputs) if a is not None and k not in sample.const}
        return [np.asarray(v) for v in ort.run(sess, feeds).values()]
    except UsageError as e:
        return f"{e.what}: {e.why}"
    except ort.ORT_ERRORS as e:
        return " ".join(str(e).split())


def graph(op: Op, sample: Sample, opset: int, dims: str) -> Graph:
    """The node alone. dims: static, shared (a symbol per extent), fresh (a symbol per dimension), known (all const)."""
    inputs: list[Value] = []
    consts: dict[Value, ArrayConst] = {}
    values: list[Value | None] = []
    for k, a in enumerate(sample.inputs):
        if a is None:
            values.append(None)
            continue
        dtype = DType.from_numpy(a.dtype)
        assert dtype is not None
        fixed = k in sample.const or dims == "known"
        shape = a.shape if fixed else [_dim(n, k, d, dims) for d, n in enumerate(a.shape)]
        value = Value(f"x{k}", tensor(dtype, shape))
        values.append(value)
        if fixed:
            consts[value] = ArrayConst(a)
        else:
            inputs.append(value)
    while values and values[-1] is None:
        values.pop()
    outputs = tuple(Value(f"y{k}", None) for k in range(sample.outputs))
    attrs = {k: _as_read(v) for k, v in sample.attrs.items()}
    node = Node(op, tuple(values), outputs, attrs, "n", ("n",))
    return Graph("g", tuple(inputs), (node,), outputs, consts, opset, {"": opset})


def _as_read(v: object):
    """An attribute value as `frontend/read.py` gives it: lists are tuples, floats are f32."""
    if isinstance(v, float):
        return float(np.float32(v))
    return tuple(_as_read(x) for x in v) if isinstance(v, list) else v


def _dim(n: int, k: int, d: int, dims: str):
    if dims == "fresh":
        return sym(f"x{k}.{d}")
    return sym(f"D{n}") if dims == "shared" and n > 1 else n


def by_table(op: Op, sample: Sample, opset: int, dims: str = "static") -> Ours:
    """Types and values of the outputs as the table gives them."""
    typed = infer_types(graph(op, sample, opset, dims))
    arrays = {f"x{k}": a for k, a in enumerate(sample.inputs) if a is not None}
    syms: dict[Sym, int] = {}
    for v in typed.graph.inputs:
        bind(v.type, arrays[v.name].shape, syms)
    types = [v.type for v in typed.graph.nodes[0].outputs]
    shapes = tuple(None if t is None or _open(t.shape, syms) else shape_of(t, syms) for t in types)
    static = tuple(None if t is None else tuple(d if isinstance(d, int) else None for d in t.shape) for t in types)
    dtypes = tuple(None if t is None else t.dtype for t in types)
    known = _known(typed, syms)
    if known is not None:
        return Ours(dtypes, shapes, static, known, None)
    loops = lower(replace(made := atomize(typed), refusals=_of_the_table(made.refusals)))
    opaque = [i for i in loops.items if isinstance(i, Opaque) and i.refusal.code != "UN_SHAPE"]
    if opaque:
        return Ours(dtypes, shapes, static, None, opaque[0].refusal)
    host = {v: ArrayConst(_elements(loops.facts[v], v, syms)) for v in _on_host(loops)}
    loops = replace(loops, items=tuple(i for i in loops.items if isinstance(i, Compute)))
    results = run_loops(loops, {k: a for k, a in arrays.items() if k in {v.name for v in loops.inputs}}, host)
    return Ours(dtypes, shapes, static, [results[v.name] for v in loops.outputs], None)


def _of_the_table(refusals: Mapping[Node, Refusal]) -> dict[Node, Refusal]:
    """What the table refuses, without what onnxruntime does better."""
    return {n: r for n, r in refusals.items() if r.code != UN_QUANTISED}


def _open(shape: tuple, syms: Mapping[Sym, int]) -> bool:
    return any(not isinstance(d, int) and not syms_of(d) <= set(syms) for d in shape)


def _known(typed: Typed, syms: Mapping[Sym, int]) -> list[np.ndarray] | None:
    """Outputs whose elements the type inference worked out."""
    out = []
    for v in typed.graph.outputs:
        table = typed.facts.get(v)
        if table is None:
            return None
        out.append(_elements(table, v, syms))
    return out


def _elements(table: np.ndarray, v: Value, syms: Mapping[Sym, int]) -> np.ndarray:
    flat = [eval_expr(e, Env(syms=syms)) for e in table.flat]
    return np.array([np.asarray(x).item() for x in flat], v.tensor.dtype.numpy).reshape(table.shape)


def _on_host(loops: LoopGraph) -> Iterator[Value]:
    """Values of shape arithmetic, which the runtime works out."""
    for i in loops.items:
        if isinstance(i, Opaque):
            yield from i.node.results


def onnx_shapes(op: Op, sample: Sample, opset: int) -> list[tuple[int | None, ...] | None]:
    """What onnx's own shape inference says of the outputs."""
    inferred = onnx.shape_inference.infer_shapes(model(op, sample, opset), data_prop=True)
    out: list[tuple[int | None, ...] | None] = []
    for o in inferred.graph.output:
        t = o.type.tensor_type
        has = o.type.HasField("tensor_type") and t.HasField("shape")
        out.append(tuple(d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim) if has else None)
    return out


# Of +0 and -0 onnxruntime's kernels return either, by the order of operands or by the vector path taken; the comparator
# counts them as equal too (docs/numerics.md).
ZERO_SIGN_FREE = frozenset({"Relu", "Max", "Min", "Clip", "Where", "LeakyRelu"})
# Where in a window a NaN stands decides whether onnxruntime's kernels return it; the table always returns it.
NAN_BY_POSITION = frozenset({"ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool"})


# --- comparing -----------------------------------------------------------------------------------------------------
_INTS = {2: np.int16, 4: np.int32, 8: np.int64}


def _ordered(v: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats, -0 and +0 both 0."""
    steps = _INTS[v.dtype.itemsize]
    raw = np.ascontiguousarray(v).reshape(v.shape).view(steps)
    wide = raw.astype(object) if v.dtype.itemsize == 8 else raw.astype(np.int64)
    lowest = int(np.iinfo(steps).min)
    return np.where(raw < 0, lowest - wide, wide)


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance in representable numbers (finite elements; 0 elsewhere)."""
    finite = np.isfinite(a.astype(np.float64)) & np.isfinite(b.astype(np.float64))
    zero = np.zeros_like(a)
    return np.abs(_ordered(np.where(finite, a, zero)) - _ordered(np.where(finite, b, zero))).astype(np.float64)


def is_float(a: np.ndarray) -> bool:
    return a.dtype.kind == "f" or a.dtype == ml_dtypes.bfloat16


def differing(want: np.ndarray, got: np.ndarray, op: Op) -> Iterator[str]:
    """Elements that differ by more than the entry allows, as text."""
    if not is_float(want):
        bad = np.asarray(want != got)
    else:
        with np.errstate(all="ignore"):
            w, g = want.astype(np.float64), got.astype(np.float64)
            same = (w == g) | (np.isnan(w) & np.isnan(g))
            if op.tol.kind == "exact" and op.name not in ZERO_SIGN_FREE:
                same &= (w != 0) | (g != 0) | (np.signbit(w) == np.signbit(g))
            if op.name in NAN_BY_POSITION:
                same |= np.isnan(g)
            diff = np.abs(w - g)
        finite = np.isfinite(w) & np.isfinite(g)
        match op.tol.kind:
            case "exact":
                bad = ~same
            case "ulp":
                bad = ~(same | (finite & ((ulps(want, got) <= op.tol.ulp) | (diff <= op.tol.floor * eps(want)))))
            case _:
                from onnxfuse.verify.values import default_tolerance

                tol = default_tolerance(want.dtype)
                largest = float(np.max(np.abs(w), where=np.isfinite(w), initial=0.0))
                bad = ~(same | (finite & (diff <= tol.rtol * np.abs(w) + tol.absolute(largest))))
    for index in zip(*np.nonzero(np.atleast_1d(bad)), strict=True):
        at = tuple(int(i) for i in index) if want.shape else ()
        far = f" ({ulps(want[at], got[at]):.0f} ulp)" if is_float(want) else ""
        yield f"at {list(at)} onnxruntime {want[at]!r}, table {got[at]!r}{far}"


def eps(a: np.ndarray) -> float:
    return float(ml_dtypes.finfo(a.dtype).eps)
