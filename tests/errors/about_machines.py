"""Messages about compilers, linkers, kernels, the machine and ourselves."""

from __future__ import annotations

import errno
import os
import re
import sys
from dataclasses import replace

import numpy as np

from onnxfuse import pipeline
from onnxfuse.codegen import generate as generating
from onnxfuse.codegen.generate import emit_module, generate, glue_object
from onnxfuse.codegen.object import Compiler, check_object, compile_module, link
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, sym
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Plan
from onnxfuse.runtime.jit import run_kernel
from onnxfuse.target import by_name
from onnxfuse.verify import child
from tests.codegen.tiny import Broken, native, plan_of, plans_of, pointwise, value
from tests.errors.world import World, shows

N = sym("N")
TARGET = by_name("x86-64-v2")
ANSWER = "define i64 @answer() { ret i64 42 }"


def _kernel() -> Kernel:
    x, z = value("x", DType.F32, N, 4), value("z", DType.F32, N, 4)
    return pointwise("relu", [x], z, lambda a: apply("max", a, 0.0))


# ---- kernels


@shows("E_DIM", "kernel relu: no input binds dimension N")
def a_dimension_no_input_binds(w: World) -> str:
    kernel = replace(_kernel(), dims=())
    return w.error(lambda: emit_module(plan_of(kernel), TARGET))


@shows("E_TEMPLATE", "the template did not write relu.tasks.1, relu.run.1")
def a_template_that_writes_too_little(w: World) -> str:
    return w.error(lambda: emit_module(plan_of(_kernel(), template=Broken("phase")), TARGET))


@shows("E_EMIT", "kernel relu: template scalar failed", "KeyError: '%x'")
def a_template_that_fails(w: World) -> str:
    def fail(_plan: Plan, _target: object) -> None:
        raise KeyError("%x")

    w.patch.setattr(generating, "emit_module", fail)
    return w.error(lambda: generate(plans_of(plan_of(_kernel())), TARGET, workers=0, strict=True))


@shows("E_CPU_FEATURE", "no CPU test is known for telepathy")
def a_feature_without_a_test(w: World) -> str:
    target = replace(TARGET, features=(*TARGET.features, "telepathy"))
    return w.error(lambda: glue_object([emit_module(plan_of(_kernel()), TARGET)], target))


@shows("E_INPUT", "x is f32[N,4], got float64 of rank 2")
def an_array_of_another_type(w: World) -> str:
    return w.error(lambda: run_kernel(plan_of(_kernel()), [np.zeros((2, 4))], native()))


@shows("E_SHAPE", "onnxfuse kernel relu (nodes relu_node): input 0 (x) axis 1: expected 4, got 5")
def an_array_of_another_shape(w: World) -> str:
    return w.error(lambda: run_kernel(plan_of(_kernel()), [np.zeros((2, 5), np.float32)], native()))


# ---- LLVM and the linker


@shows(
    "E_LLVM",
    "LLVM refused the generated code",
    "LLVM IR parsing error...doesn't match function result type 'i64'...",
)
def code_that_is_none(w: World) -> str:
    return w.error(lambda: compile_module("define i64 @f() { ret i32 0 }", TARGET))


@shows("E_LLVM_ASM", "inline assembly for aarch64-unknown-linux-gnu can only be compiled on such a machine")
def assembly_of_another_machine(w: World) -> str:
    text = 'define void @f() { call void asm sideeffect "nop", ""() ret void }'
    return w.error(lambda: compile_module(text, by_name("aarch64")))


@shows(
    "E_LLVM_CRASH",
    "LLVM gave up on the generated code",
    "the compiler process ended with code 1: error: <inline asm>:1:2: invalid instruction mnemonic 'nonsense'...",
)
def code_that_ends_the_compiler(w: World) -> str:
    crash = 'define void @f() { call void asm sideeffect "nonsense $0", "r"(i64 1)\n ret void }'
    with Compiler(TARGET, workers=1) as compiler:
        return w.error(lambda: compiler.submit(crash).result())


@shows(
    "E_LLVM_TARGET",
    "LLVM cannot generate code for x86-64-v2 (pdp11-unknown-unix)",
    'No available targets are compatible with triple "pdp11-unknown-unix"',
)
def a_machine_llvm_does_not_know(w: World) -> str:
    return w.error(lambda: compile_module(ANSWER, replace(TARGET, triple="pdp11-unknown-unix")))


@shows("E_LINK", "the linker failed with code 1", "ld.lld: error: 00000.o:1: unknown directive: no...")
def objects_that_are_none(w: World) -> str:
    return w.error(lambda: link([b"no object"], TARGET, ["answer"]))


@shows("E_LINK_TARGET", "no linker for pdp11-unknown-unix", "", "x86_64; aarch64; riscv64")
def a_machine_there_is_no_linker_for(w: World) -> str:
    return w.error(lambda: link([], replace(TARGET, triple="pdp11-unknown-unix"), []))


@shows(
    "E_LINKER",
    "the package ziglang is missing",
    "import of ziglang halted; None in sys.modules",
    "pip install ziglang",
)
def no_linker(w: World) -> str:
    w.patch.setitem(sys.modules, "ziglang", None)
    return w.error(lambda: link([], TARGET, []))


@shows("E_SYMBOLS", "the generated code calls functions from outside", "it needs expf")
def a_function_from_outside(w: World) -> str:
    text = "declare float @expf(float) define float @f(float %x) { %y = call float @expf(float %x) ret float %y }"
    return w.error(lambda: check_object(compile_module(text, TARGET, exports=["f"]).data))


# ---- the check of the result


@shows(
    "E_MISMATCH",
    "the optimized 'in.onnx' does not agree with the original; nothing was written",
    "differs without the library: outputs y; differs with the library: outputs y",
    "this is a bug in onnxfuse, or tolerances too tight for this model: see --rtol, --atol, --allow-mismatches",
)
def numbers_that_differ(w: World) -> str:
    wrong = w.model("y = Neg(x)").SerializeToString()
    w.model("y = Exp(x)")
    w.patch.setattr("onnxfuse.emit.bundle.model_bytes", lambda *_: [wrong])
    return w.optimize()


@shows(
    "E_VERIFY_CRASH",
    "onnxruntime was ended by SIGSEGV while starting; nothing was written",
    "",
    "this is a bug in onnxfuse",
)
def a_comparison_that_dies(w: World) -> str:
    w.model()
    w.patch.setattr(child, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    return w.optimize()


# ---- the machine and ourselves


@shows(
    "E_SYSTEM",
    "the system refused an operation on a file",
    "[Errno 28] No space left on device: '/some/file'",
    "temporary files go to <there>: TMPDIR=... names another place",
)
def a_disk_that_is_full(w: World) -> str:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

    w.patch.setattr(pipeline, "generate", refuse)
    w.model()
    return re.sub("temporary files go to [^:]+:", "temporary files go to <there>:", w.optimize())


@shows("E_SYSTEM", "not enough memory", "12 GiB", "--no-verify needs less")
def no_memory(w: World) -> str:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("12 GiB")

    w.patch.setattr(pipeline, "generate", refuse)
    w.model()
    return w.optimize()


@shows(
    "E_BUG",
    "onnxfuse failed: ZeroDivisionError: division by zero",
    "this is a bug in onnxfuse",
    "see it whole with: onnxfuse --debug optimize in.onnx out.onnx",
)
def a_bug(w: World) -> str:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    w.patch.setattr(pipeline, "emit", fail)
    w.model()
    return w.optimize()
