"""The OrtCustomOp of a kernel: getters that read the descriptor behind it."""

from __future__ import annotations

from llvmlite import ir

from onnxfuse.codegen.build import I32, I64, PTR
from onnxfuse.codegen.glue.layout import API_VERSION, DESCRIPTOR, DESCRIPTOR_WORD, OP_FUNCTIONS
from onnxfuse.codegen.glue.tables import Part, descriptor
from onnxfuse.codegen.glue.writer import Glue


def operator(g: Glue, part: Part) -> ir.GlobalVariable:
    """The OrtCustomOp of a kernel, with its descriptor behind it."""
    functions = _functions(g)
    words: list[ir.Constant | ir.GlobalValue] = [ir.Constant(I32, API_VERSION)]
    words += [functions.get(name, g.null()) for name in OP_FUNCTIONS]
    words.append(descriptor(g.data, part))
    return g.data.constant(ir.Constant.literal_struct(words))


def _functions(g: Glue) -> dict[str, ir.GlobalValue]:
    build = g.build
    if f"{build.prefix}.get_name" not in build.module.globals:
        _getters(g)
    names = {
        "CreateKernelV2": "create", "KernelComputeV2": "compute", "KernelDestroy": "destroy", "GetName": "get_name",
        "GetExecutionProviderType": "get_null", "GetInputType": "get_input_types",
        "GetOutputType": "get_output_types", "GetInputTypeCount": "get_inputs", "GetOutputTypeCount": "get_outputs",
        "GetInputCharacteristic": "get_zero_of", "GetOutputCharacteristic": "get_zero_of",
        "GetInputMemoryType": "get_zero_of", "GetVariadicInputMinArity": "get_zero",
        "GetVariadicInputHomogeneity": "get_zero", "GetVariadicOutputMinArity": "get_zero",
        "GetVariadicOutputHomogeneity": "get_zero", "GetStartVersion": "get_one", "GetEndVersion": "get_last",
    }  # fmt: skip
    return {slot: build.module.globals[f"{build.prefix}.{name}"] for slot, name in names.items()}


def _getters(g: Glue) -> None:
    build = g.build

    def behind(op: ir.Value) -> ir.Value:
        return build.load(build.offset(op, DESCRIPTOR_WORD, I64), PTR)

    with build.function("get_name", PTR, [PTR]) as fn:
        build.ret(g.field(behind(fn.args[0]), DESCRIPTOR, "name", PTR))
    with build.function("get_null", PTR, [PTR]):
        build.ret(g.null())  # any provider: the CPU
    for name in ("inputs", "outputs"):
        with build.function(f"get_{name}", I64, [PTR]) as fn:
            build.ret(g.field(behind(fn.args[0]), DESCRIPTOR, name, I64))
    for name in ("input_types", "output_types"):
        with build.function(f"get_{name}", I32, [PTR, I64]) as fn:
            build.ret(g.item(g.field(behind(fn.args[0]), DESCRIPTOR, name, PTR), fn.args[1], I32))
    with build.function("get_zero_of", I32, [PTR, I64]):
        build.ret(ir.Constant(I32, 0))  # INPUT_OUTPUT_REQUIRED, OrtMemTypeDefault
    for name, value in (("get_zero", 0), ("get_one", 1), ("get_last", 2**31 - 1)):
        with build.function(name, I32, [PTR]):
            build.ret(ir.Constant(I32, value))
