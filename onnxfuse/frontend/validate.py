"""Is this a valid model? Checks of our own that name the culprit, then onnx.checker on a skeleton without weights.

What onnxruntime loads is let through even where the checker is stricter: graph outputs without a type, an empty graph
name, its own ops in the default domain, deprecated ops, unsorted nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir
from onnx import checker, defs, shape_inference

from onnxfuse.errors import UsageError
from onnxfuse.frontend.inline import too_large
from onnxfuse.frontend.protos import all_graphs, domain_of, dtype_of, imports_of, raw_bytes, subgraphs, told
from onnxfuse.ir.expr import sym
from onnxfuse.ir.given import MARK
from onnxfuse.ir.graph import fresh_name
from onnxfuse.ir.types import Dim, TensorType, tensor

Tensors = Mapping[str, onnx_ir.TensorProtocol]
KEPT_BYTES = 4096  # initializers up to this size stay in the skeleton: shapes, axes, bounds
NEWEST_OPSET = defs.onnx_opset_version()
ELSEWHERE = "onnxfuse.elsewhere"

# Ops onnxruntime has in the default domain in every opset, with no ONNX schema there.
RUNTIME_OPS = frozenset(
    {
        "Affine", "Crop", "DynamicSlice", "ImageScaler", "LayerNormalization", "MeanVarianceNormalization",
        "ParametricSoftplus", "ScaledTanh", "SimplifiedLayerNormalization", "ThresholdedRelu", "GroupNorm",
    }
)  # fmt: skip


def skeleton(proto: onnx.ModelProto, tensors: Tensors) -> onnx.ModelProto:
    """A small stand-in: large initializers become typed inputs; what users wrote about types in between is dropped."""
    small = onnx.ModelProto()
    small.CopyFrom(proto)
    graph = small.graph
    del graph.value_info[:]
    listed = {i.name for i in graph.input}
    for name, t in tensors.items():
        shape = list(t.shape.numpy())
        is_small = t.dtype != onnx_ir.DataType.STRING and t.nbytes <= KEPT_BYTES
        if is_small:
            copy = graph.initializer.add()
            copy.CopyFrom(onnx_ir.serde.serialize_tensor(t) if not isinstance(t, onnx_ir.ExternalTensor) else _raw(t))
            copy.name = name
        elif name not in listed:
            graph.input.append(onnx.helper.make_tensor_value_info(name, int(t.dtype), shape))
    small.ir_version = min(max(small.ir_version, 8), onnx.IR_VERSION)
    graph.name = graph.name or "graph"
    return small


def _raw(t: onnx_ir.ExternalTensor) -> onnx.TensorProto:
    return onnx.TensorProto(data_type=int(t.dtype), dims=list(t.shape.numpy()), raw_data=raw_bytes(t))


def check(small: onnx.ModelProto) -> None:
    """Run onnx.checker on a skeleton whose nodes are sorted."""
    opset = {domain_of(e.domain): e.version for e in small.opset_import}.get("", 0)
    if opset > NEWEST_OPSET:
        return  # newer than the checker: the runtime judges
    lenient = onnx.ModelProto()
    lenient.CopyFrom(small)
    _forgive(lenient)
    try:
        checker.check_model(lenient)
    except checker.ValidationError as error:
        why = " ".join(line.strip() for line in str(error).splitlines() if line.strip() and "Context" not in line)
        hint = "onnx.checker.check_model says it as well"
        imports = imports_of(lenient.opset_import)
        culprit = _culprit(lenient.graph, imports)
        if culprit is not None:
            why = f"{told(culprit)}: {why}"
            hint = _other_opset(culprit, imports) or hint
        raise UsageError("E_INVALID_MODEL", "the model is not valid ONNX", why, hint) from error


def _culprit(graph: onnx.GraphProto, imports: Mapping[str, int]) -> onnx.NodeProto | None:
    """The innermost node that is not valid by itself."""
    found, pending = None, [graph]
    while pending:
        bad = next((n for g in pending for n in g.node if not _valid(n, imports)), None)
        found, pending = bad or found, [] if bad is None else list(subgraphs(bad))
    return found


def _valid(node: onnx.NodeProto, imports: Mapping[str, int]) -> bool:
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = onnx.IR_VERSION, dict(imports)
    try:
        checker.check_node(node, context)
    except checker.ValidationError:
        return False
    return True


def _other_opset(node: onnx.NodeProto, imports: Mapping[str, int]) -> str:
    """What to do about a node that is written as another opset wants it."""
    mine = imports.get("", 0)
    if domain_of(node.domain) or not mine:
        return ""
    others = sorted(range(1, NEWEST_OPSET + 1), key=lambda v: abs(v - mine))
    fits = next((v for v in others if defs.has(node.op_type, v) and _valid(node, {**imports, "": v})), None)
    if fits is None:
        return ""
    return f"the node is written as in opset {fits}, the model imports opset {mine}: one of the two is wrong"


def _forgive(model: onnx.ModelProto) -> None:
    imports = imports_of(model.opset_import)
    fitting = [f for f in model.functions if all(imports.get(d, v) == v for d, v in imports_of(f.opset_import).items())]
    if len(fitting) < len(model.functions):  # bodies of another opset: the runtime reads them in the model's
        kept = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in fitting]
        del model.functions[:]
        model.functions.extend(kept)
    moved = False
    for graph in all_graphs(model.graph):
        for out in graph.output:
            if not out.HasField("type"):
                out.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for info in (*graph.input, *graph.output):
            if info.type.HasField("tensor_type"):
                info.type.tensor_type.shape.SetInParent()  # an unknown rank is fine
        for node in graph.node:
            if is_runtime_op(node, model) or _deprecated(node, imports):
                node.domain, moved = ELSEWHERE, True
    if moved:
        model.opset_import.add(domain=ELSEWHERE, version=1)


def _deprecated(node: onnx.NodeProto, imports: Mapping[str, int]) -> bool:
    """An op the specification took back in the model's opset, while onnxruntime still has it (GroupNormalization)."""
    opset = imports.get("", 0)
    known = domain_of(node.domain) == "" and defs.has(node.op_type, opset)
    return known and bool(defs.get_schema(node.op_type, opset).deprecated)


def is_runtime_op(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    """An op of onnxruntime's own in the default domain."""
    opset = {domain_of(e.domain): e.version for e in model.opset_import}.get("", 0)
    return domain_of(node.domain) == "" and node.op_type in RUNTIME_OPS and not defs.has(node.op_type, opset)


def refuse_unknown_ops(model: onnx.ModelProto, imports: Mapping[str, int]) -> None:
    """Every domain must be imported, and the default domain's ops must exist in the model's opset."""
    unknown: list[str] = []
    for graph in all_graphs(model.graph):
        for node in graph.node:
            domain = domain_of(node.domain)
            if domain not in imports:
                raise UsageError(
                    "E_OPSET_IMPORT",
                    f"{told(node)} is of domain {domain or 'ai.onnx'!r}, which is not imported",
                    f"opset_import has {sorted(imports) or 'nothing'}",
                    "add the domain to opset_import",
                )
            if domain == "" and not _known(node, imports[""]) and not is_runtime_op(node, model):
                unknown.append(f"{node.op_type} (node {node.name!r}{_since(node.op_type)})")
    if unknown and imports[""] <= NEWEST_OPSET:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise UsageError(
            "E_UNKNOWN_OP",
            f"ops that do not exist in the default domain: {', '.join(unknown[:5])}{more}",
            f"the model imports opset {imports['']}",
            "custom ops need a domain of their own; standard ones an opset_import that has them",
        )


def _known(node: onnx.NodeProto, opset: int) -> bool:
    return bool(defs.has(node.op_type, opset) or opset > NEWEST_OPSET)


def _since(op: str) -> str:
    return f", new in opset {defs.get_schema(op).since_version}" if defs.has(op) else ""


def refuse_unsound_names(proto: onnx.ModelProto, tensors: Tensors) -> None:
    """Single assignment, and everything read is defined, subgraphs included."""
    graph = proto.graph
    made: dict[str, str] = {}
    for what, names in (
        ("graph input", [i.name for i in graph.input]),
        ("sparse initializer", [s.values.name for s in graph.sparse_initializer]),
    ):
        for name in names:
            _define(made, name, what)
    for name in tensors:
        made.setdefault(name, "initializer")
    for node in graph.node:
        for name in node.output:
            if name:
                _define(made, name, f"node {node.name!r} ({node.op_type})")
    _refuse_undefined(graph, made)


def _define(made: dict[str, str], name: str, what: str) -> None:
    if name in made:
        raise UsageError(
            "E_DUPLICATE_VALUE", f"value {name!r} is defined twice", f"by {made[name]} and by {what}", "rename one"
        )
    made[name] = what


def _refuse_undefined(graph: onnx.GraphProto, made: Iterable[str]) -> None:
    stack: list[tuple[onnx.GraphProto, frozenset[str]]] = [(graph, frozenset(made))]
    while stack:
        g, outer = stack.pop()
        names = (
            {i.name for i in g.input} | {t.name for t in g.initializer} | {t.values.name for t in g.sparse_initializer}
        )
        scope = (outer | names | {n for node in g.node for n in node.output}) - {""}
        for node in g.node:
            missing = [n for n in node.input if n and n not in scope]
            if missing:
                raise UsageError(
                    "E_UNDEFINED_VALUE",
                    f"{told(node)} reads {missing[0]!r}, which nothing defines",
                    f"input {list(node.input).index(missing[0])} of {len(node.input)}",
                    "a node, an initializer or a graph input of this name is missing",
                )
            stack.extend((sub, scope) for sub in subgraphs(node))
        for out in g.output:
            if out.name not in scope:
                hint = "a node, an initializer or a graph input of this name is missing"
                raise UsageError("E_UNDEFINED_VALUE", f"graph output {out.name!r} is not made by any node", hint=hint)


def hints(small: onnx.ModelProto) -> dict[str, TensorType | None]:
    """What onnx's shape inference finds out, by value name; a failure of it is no error of the model.

    Of the outputs only type and rank are believed: onnxruntime does not hold a model to the sizes it declares for them.
    `small` is changed.
    """
    if too_large(small.functions):
        return {}  # the inference expands every call of every function
    for info in small.graph.output:
        for dim in info.type.tensor_type.shape.dim if info.type.HasField("tensor_type") else ():
            dim.Clear()
    try:
        inferred = shape_inference.infer_shapes(small, check_type=False, strict_mode=False, data_prop=False)
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError, ValueError, TypeError):
        return {}
    out: dict[str, TensorType | None] = {}
    for info in inferred.graph.value_info:
        out[info.name] = type_of(info)
    for info in inferred.graph.output:
        out.setdefault(info.name, type_of(info))
    return out


def type_of(info: onnx.ValueInfoProto, symbols: set[str] | None = None) -> TensorType | None:
    """Type of a value as a ValueInfoProto tells it; every unnamed dimension gets a symbol that is not in `symbols`."""
    if info.type.WhichOneof("value") != "tensor_type":
        return None
    t = info.type.tensor_type
    dtype = dtype_of(t.elem_type)
    if dtype is None or not t.HasField("shape"):
        return None
    taken = set() if symbols is None else symbols
    return tensor(dtype, [_dim(d, f"{info.name}_d{k}", taken) for k, d in enumerate(t.shape.dim)])


def _dim(dim: onnx.TensorShapeProto.Dimension, fresh: str, taken: set[str]) -> Dim:
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
        return int(dim.dim_value)
    name = dim.dim_param
    # "?" is a placeholder (Paddle writes it for every unknown), not one symbol.
    if name in ("", "?"):
        return sym(fresh_name(fresh, taken))
    return sym(f"{name}'" if name.endswith(MARK) else name)  # those names are the symbols of elements'
