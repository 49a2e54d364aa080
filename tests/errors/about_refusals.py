"""Why nodes stay with onnxruntime: the smallest model for every code, and what `inspect` says of the node."""

from __future__ import annotations

from collections.abc import Callable

import onnxfuse
from onnxfuse.errors import CompileError
from onnxfuse.frontend import atomize as atomizing
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.read import read as read_model
from onnxfuse.inspection import inspect_all
from onnxfuse.ir.expr import sym
from onnxfuse.ir.loops import Opaque
from onnxfuse.pipeline import Bundle
from onnxfuse.schedule import kernelize as kernelizing
from onnxfuse.schedule import plan as planning
from tests.errors.world import SCENARIOS, Scenario, World
from tests.frontend.onnx_text import prepared
from tests.fuse.dsl import FULL, Build, fuse


def left(bundle: Bundle) -> str:
    """The nodes that are left, as `inspect` prints them."""
    return "\n".join(f"{n.code} {n.name} ({n.op}): {n.why}" for n in inspect_all(bundle.plans).left)


def stays(code: str, node: str, why: str) -> Callable[[Callable[[World], str]], None]:
    """The decorated function makes a node stay for this reason."""

    def register(run: Callable[[World], str]) -> None:
        SCENARIOS.append(Scenario(code, run, f"{code} {node}: {why}"))

    return register


def model(code: str, node: str, why: str, text: str, opset: int = 17) -> None:
    """The same of one model, written as `(inputs) => (outputs) { nodes }`."""

    def a_model(w: World) -> str:
        signature, _, body = text.partition(" { ")
        return left(onnxfuse.optimize(w.model(body.rstrip(" }"), signature, opset=opset), verify=False))

    stays(code, node, why)(a_model)


model(
    "UN_OPAQUE",
    "NonZero_0 (NonZero)",
    "NonZero is never fused: the output shape or order depends on data",
    "(float[2,2] x) => (int64[a,b] y) { y = NonZero(x) }",
)
model(
    "UN_QUANTISED",
    "Relu_0 (Relu)",
    "its result is quantised later: one rounding more or less could become a whole step\n"
    "UN_QUANTISED QuantizeLinear_1 (QuantizeLinear): "
    "onnxruntime joins it with the quantisers around it into an integer kernel",
    "(float[4] x, float s, uint8 z) => (uint8[4] y) { r = Relu(x) y = QuantizeLinear(r, s, z) }",
)
model(
    "UN_SHAPE",
    "Shape_0 (Shape)",
    "reads dimensions only; costs nothing in the runtime\nUN_SHAPE Add_1 (Add): shape arithmetic stays on the host",
    "(float[N] x) => (int64[1] y) { s = Shape(x) y = Add(s, s) }",
)
model(
    "UN_DTYPE",
    "Equal_0 (Equal)",
    "element type string of %x only passes through",
    "(string[2] x, string[2] z) => (bool[2] y) { y = Equal(x, z) }",
)
model(
    "UN_DTYPE",
    "Sign_0 (Sign)",
    "Sign on f16 is not implemented",
    "(float16[4] x) => (float16[4] y) { y = Sign(x) }",
)
model(
    "UN_ATTR",
    "Resize_1 (Resize)",
    "Resize node 'Resize_1': Resize with antialias is not implemented",
    "(float[1,1,4,4] x) => (float[a,b,c,d] y) { s = Constant<value_floats = [1.0, 1.0, 0.5, 0.5]>() "
    'y = Resize<mode = "linear", antialias = 1>(x, , s) }',
    opset=18,
)
model(
    "UN_AXIS",
    "Softmax_0 (Softmax)",
    "axis 7 is out of range: rank is 2",
    "(float[2,2] x) => (float[a,b] y) { y = Softmax<axis = 7>(x) }",
)
model(
    "UN_ARITY",
    "MaxPool_0 (MaxPool)",
    "MaxPool node 'MaxPool_0': MaxPool with the Indices output is not implemented",
    "(float[1,1,4,4] x) => (float[a,b,c,d] y, int64[e,f,g,h] i) { y, i = MaxPool<kernel_shape = [2, 2]>(x) }",
)
model(
    "UN_ARITY",
    "Split_0 (Split)",
    "Split node 'Split_0': Split into 65 parts, more than 64",
    f"(float[65] x) => ({', '.join(f'float[1] y{k}' for k in range(65))}) "
    f"{{ {', '.join(f'y{k}' for k in range(65))} = Split(x) }}",
)
model(
    "UN_OPSET",
    "LpNormalization_0 (LpNormalization)",
    "LpNormalization before opset 11: its zero norm needs Equal on floats",
    "(float[2,2] x) => (float[2,2] y) { y = LpNormalization(x) }",
    opset=7,
)
model(
    "UN_DATA_DEPENDENT",
    "Range_0 (Range)",
    "%k is needed at compile time: its value depends on data",
    "(int64 k) => (int64[n] y) { y = Range(k, k, k) }",
)
model(
    "UN_MISFIT",
    "Transpose_0 (Transpose)",
    "Transpose node 'Transpose_0': its inputs and attributes do not go together: f32[2,2], perm = (0, 5) "
    "(IndexError: tuple index out of range)",
    "(float[2,2] x) => (float[a,b] y) { y = Transpose<perm = [0, 5]>(x) }",
)
model(
    "UN_SHAPE_MISMATCH",
    "Add_0 (Add)",
    "dimensions 3 and 4 do not broadcast: f32[3], f32[4]",
    "(float[3] x, float[4] z) => (float[a] y) { y = Add(x, z) }",
)


@stays("UN_TYPE", "Exp_0 (Exp)", "%x has no known element type or rank")
def an_input_of_unknown_rank(w: World) -> str:
    proto = w.model()
    for info in (proto.graph.input[0], proto.graph.output[0]):
        info.type.tensor_type.ClearField("shape")
    return left(onnxfuse.optimize(proto, verify=False))


@stays("UN_FORMULA", "Softmax_0 (Softmax)", "Softmax could not be decomposed")
def a_formula_nobody_asked_for(w: World) -> str:
    w.patch.setattr(atomizing, "expand", None)  # not called: the typed graph goes on as it is
    typed = prepared(read_model(w.model("y = Softmax(x)"))).typed
    (item,) = lower(atomizing.Atomized(typed.graph, typed.facts, {}, {})).items
    assert isinstance(item, Opaque)
    return f"{item.refusal.code} {item.node.name} ({item.node.op}): {item.refusal.why}"


@stays("UN_UNBOUND_DIM", "y", "run-time dimension N cannot be read from the group's inputs")
def a_dimension_that_is_in_no_shape(w: World) -> str:
    g = Build()
    y = g.B("y", g.input("x", (1,)), (sym("N"),))
    kernels = kernelizing.kernelize(fuse(g.outputs(y), FULL))
    (refusal,) = kernels.refused.values()
    return f"{refusal.code} y: {refusal.why}"


@stays("UN_INTERNAL", "Exp_0 (Exp)", "a bug in onnxfuse: KeyError: 'i0'")
def a_bug_in_one_kernel(w: World) -> str:
    def fail(*_: object) -> None:
        raise KeyError("i0")

    w.patch.setattr(kernelizing, "program", fail)
    return left(onnxfuse.optimize(w.model(), verify=False))


@stays("UN_TEMPLATE", "Exp_0 (Exp)", "no template")
def no_template(w: World) -> str:
    w.patch.setattr(planning, "TEMPLATES", ())
    return left(onnxfuse.optimize(w.model(), verify=False))


@stays("UN_COMPILE", "Exp_0 (Exp)", "E_LLVM kernel exp_...: LLVM refused the generated code: expected type")
def llvm_fails(w: World) -> str:
    def fail(*_: object) -> None:
        raise CompileError("E_LLVM", "LLVM refused the generated code", "expected type")

    w.patch.setattr("onnxfuse.codegen.generate.emit_module", fail)
    return left(onnxfuse.optimize(w.model(), verify=False, cache=False))
