"""TVM's partition of ONNX models. Runs in an interpreter with apache-tvm and onnx; knows nothing of onnxfuse.

    PYTHON tools/tvm_relax.py < list of .onnx paths > one line of JSON for each

The model goes through TVM's ONNX frontend, LegalizeOps, DeadCodeElimination, AnnotateTIROpPattern and FuseOps
(FoldConstant before it, where the frontend left work on constants alone). Reported are TVM's own graph just before
FuseOps and which of its bindings FuseOps put together:

    path      the model
    bindings  [{name, function, kind, reads, value}] in program order. kind: TVM's OpPatternKind; reads: positions of
              bindings, one for each use; value: the ONNX value it makes, "" for a step on the way to one. Reads
              of parameters and constants are left out.
    values    {ONNX value: position, or what it became instead ("constant", "input", "shape")}
    exits     positions of the bindings that leave the dataflow block
    groups    [[positions]], every binding in one; moved: positions whose group the result of FuseOps does not tell
    error     "stage: reason" when there is no result

Every binding's loop function is given a name of its own before FuseOps, so that the calls inside the fused functions
tell which binding they were.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types
import warnings
from pathlib import Path

import onnx
from tvm import IRModule, relax, tirx
from tvm.ir.expr import Constant
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.frontend.onnx import onnx_frontend

ID = "parity_id"
OPAQUE, INJECTIVE = 8, 2


def main() -> int:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        path = line.strip()
        noise = io.StringIO()  # the frontend prints
        with contextlib.redirect_stdout(noise):
            result = partition(Path(path))
        print(json.dumps({"path": path, **result}), flush=True)
    return 0


def partition(path: Path) -> dict[str, object]:
    """What the module docstring says, for one model."""
    stage = "load"
    try:
        model = onnx.load(path)
        stage = "frontend"
        module, values = import_named(model)
        stage = "LegalizeOps"
        module = legalize(module)
        stage = "AnnotateTIROpPattern"
        module = relax.transform.AnnotateTIROpPattern()(module)
        stage = "graph"
        module = tag(module)
        graph = Graph(module, values)
        stage = "FuseOps"
        fused = relax.transform.FuseOps()(module)
        stage = "groups"
        groups, moved = graph.groups(fused)
    except Exception as error:  # whatever TVM raises is the answer
        text = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": f"{stage}: {type(error).__name__}: {text[-1][:300]}"}
    return {
        "bindings": graph.bindings,
        "values": graph.values,
        "exits": graph.exits,
        "groups": groups,
        "moved": moved,
    }


# --- ONNX -> Relax ----------------------------------------------------------------------------------------------------


class Importer(onnx_frontend.ONNXGraphImporter):
    """TVM's importer; what each ONNX node returns is bound to a variable at once, and its name is remembered."""

    def __init__(self) -> None:
        super().__init__({}, "float32", keep_params_in_input=False)
        self.made: dict[str, str] = {}

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            super()._construct_nodes(types.SimpleNamespace(node=[node]))
            for name in node.output:
                if name:
                    self.made[name] = self._bound(name)

    def _bound(self, name: str) -> str:
        expr = self._nodes[name]
        if isinstance(expr, (relax.Call, relax.TupleGetItem)):
            expr = self._nodes[name] = self.bb.emit(expr, name_hint=f"value_{len(self.made)}")
        if isinstance(expr, relax.DataflowVar):
            return f"%{expr.name}"
        if isinstance(expr, relax.Var):
            return "input"
        return "constant" if isinstance(expr, Constant) else "shape"


def import_named(model: onnx.ModelProto) -> tuple[IRModule, dict[str, str]]:
    """The Relax module, and for every ONNX value `%variable` or what else it became."""
    plain_emit = relax.BlockBuilder.emit
    count = iter(range(1 << 30))

    def emit(self: relax.BlockBuilder, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        return plain_emit(self, expr, name_hint or f"step_{next(count)}")

    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    importer = Importer()
    relax.BlockBuilder.emit = emit  # names that no later pass gives to anything else
    try:
        module = importer.from_onnx(model.graph, opset)
    finally:
        relax.BlockBuilder.emit = plain_emit
    return module, importer.made


def legalize(module: IRModule) -> IRModule:
    """Only loop functions, no work on constants alone, no dead code."""
    clean = relax.transform.DeadCodeElimination()
    module = clean(relax.transform.LegalizeOps()(module))
    if constant_work(module):
        module = clean(relax.transform.LegalizeOps()(relax.transform.FoldConstant()(module)))
    return module


def constant_work(module: IRModule) -> bool:
    """A call whose operands are all constant (at least one)."""
    for binding in bindings_of(module["main"]):
        args = operands(binding.value)
        if args and all(isinstance(a, Constant) for a in args):
            return True
    return False


# --- Relax -> numbers -------------------------------------------------------------------------------------------------


def bindings_of(function: relax.Function) -> list[relax.Binding]:
    return [b for block in function.body.blocks for b in block.bindings]


def operands(expr: relax.Expr) -> list[relax.Expr]:
    """Variables, constants and get-items an expression reads; tuples flattened."""
    pending, out = [expr], []
    first = True
    while pending:
        e = pending.pop(0)
        if isinstance(e, relax.Call):
            pending = [*e.args, *pending] if first else pending
        elif isinstance(e, relax.Tuple):
            pending = [*e.fields, *pending]
        elif isinstance(e, relax.TupleGetItem):
            pending = [e.tuple_value, *pending]
        elif isinstance(e, (relax.Var, Constant)):
            out.append(e)
        first = False
    return out


def callee(module: IRModule, expr: relax.Expr) -> tirx.PrimFunc | relax.Function | None:
    """The function of a call_tir, or of a call of another function of the module."""
    if not isinstance(expr, relax.Call):
        return None
    name = expr.op
    if not isinstance(name, relax.GlobalVar):
        in_tir = getattr(expr.op, "name", "") in ("relax.call_tir", "relax.call_tir_inplace")
        if not in_tir or not isinstance(expr.args[0], relax.GlobalVar):
            return None
        name = expr.args[0]
    return module[name]


def tag(module: IRModule) -> IRModule:
    """A copy of its loop function for every binding of main, with the binding's position as an attribute."""
    position = {b.var: k for k, b in enumerate(bindings_of(module["main"]))}

    @mutator
    class Tag(PyExprMutator):
        def visit_var_binding_(self, binding: relax.VarBinding) -> None:
            function = callee(module, binding.value)
            at = position.get(binding.var)
            if at is None or not isinstance(function, tirx.PrimFunc):
                super().visit_var_binding_(binding)
                return
            call = self.visit_expr(binding.value)
            own = self.builder_.add_func(function.with_attr(ID, at), f"b{at}_{call.args[0].name_hint}")
            made = relax.Call(call.op, [own, *call.args[1:]], call.attrs, call.ty_args)
            self.set_var_remap(binding.var, self.builder_.emit(made, binding.var.name))

    work = Tag(module)
    changed = work.visit_expr(module["main"])
    work.builder_.update_func(module.get_global_var("main"), changed)
    return work.builder_.get()


class Graph:
    """TVM's indexed forward graph of main, without parameters and constants (which only are opaque leaves)."""

    def __init__(self, module: IRModule, made: dict[str, str]) -> None:
        self.module = module
        main = module["main"]
        found = bindings_of(main)
        self.at = {b.var: k for k, b in enumerate(found)}
        self.item = {}  # (position of a tuple, index) -> position of the get-item
        named = {b.var.name: k for k, b in enumerate(found)}
        self.values = {v: named.get(w[1:], "dead") if w[0] == "%" else w for v, w in made.items()}
        onnx_value: dict[int, str] = {}
        for value, k in self.values.items():
            if isinstance(k, int):
                onnx_value.setdefault(k, value)
        self.bindings: list[dict[str, object]] = []
        for k, b in enumerate(found):
            reads = [self.at[e] for e in operands(b.value) if e in self.at] if not_shape(b) else []
            if isinstance(b.value, relax.TupleGetItem) and reads:
                self.item[reads[0], b.value.index] = k
            name, kind = self._kind(b.value)
            self.bindings.append(
                {"name": b.var.name, "function": name, "kind": kind, "reads": reads, "value": onnx_value.get(k, "")}
            )
        self.exits = [k for k, b in enumerate(found) if not isinstance(b.var, relax.DataflowVar)]

    def _kind(self, expr: relax.Expr) -> tuple[str, int]:
        if isinstance(expr, relax.TupleGetItem):
            return "get", INJECTIVE
        function = callee(self.module, expr)
        if not isinstance(function, tirx.PrimFunc):
            return type(expr).__name__, OPAQUE
        kind = function.attrs.get("op_pattern") if function.attrs else None
        name = expr.args[0].name_hint.split("_", 1)[1]
        return name, OPAQUE if kind is None else int(kind)

    def groups(self, fused: IRModule) -> tuple[list[list[int]], list[int]]:
        """Members of every function FuseOps made, then the bindings it left alone; and the get-items not found.

        A function that only uses fields of a tuple gets these: its get-items are before the call then, under a new
        name.
        """
        made: list[list[int]] = []
        known: dict[relax.Var, int] = {}  # variables of main and of fused functions -> position
        moved: set[int] = set()
        for b in bindings_of(fused["main"]):
            function = callee(fused, b.value)
            if not isinstance(function, relax.Function):
                at = self._know(fused, b, known)
                if at is not None and b.var.name != self.bindings[at]["name"]:
                    moved.add(at)
                continue
            inside: list[int | None] = []
            for param, arg in zip(function.params, b.value.args, strict=True):
                at = self._position(arg, known)
                if at is not None:
                    known[param] = at
                if at in moved:
                    inside.append(at)
                    moved.remove(at)
            inside += [self._know(fused, inner, known) for inner in bindings_of(function)]
            made.append([k for k in inside if k is not None])
            last = self._position(function.body.body, known)
            if last is not None:
                known[b.var] = last
        together = {k for g in made for k in g}
        alone = [k for k in range(len(self.bindings)) if k not in together]
        seen = set(known.values()) | together
        lost = [k for k in alone if self.bindings[k]["function"] == "get" and (k in moved or k not in seen)]
        return [*made, *([k] for k in alone)], lost

    def _know(self, module: IRModule, b: relax.Binding, known: dict[relax.Var, int]) -> int | None:
        function = callee(module, b.value)
        at = self._position(b.value, known) if not isinstance(function, tirx.PrimFunc) else int(function.attrs[ID])
        if at is not None:
            known[b.var] = at
        return at

    def _position(self, expr: relax.Expr, known: dict[relax.Var, int]) -> int | None:
        if isinstance(expr, relax.TupleGetItem):
            of = self._position(expr.tuple_value, known)
            return None if of is None else self.item.get((of, expr.index))
        return known.get(expr) if isinstance(expr, relax.Var) else None


def not_shape(b: relax.Binding) -> bool:
    return not isinstance(b.value, relax.ShapeExpr)


if __name__ == "__main__":
    sys.exit(main())
