"""The custom-op library around the kernels: entry point, glue and descriptors in LLVM IR.

`glue_module` writes the module that onnxruntime talks to: `RegisterCustomOps` and one OrtCustomOp per kernel, all
served by the same few functions, which read a constant descriptor that follows the OrtCustomOp in memory.

The kernel ABI is described in `ir/plan.py`. Facts about onnxruntime: the C API is append-only, so slots are constants;
everything used here exists since 1.17 (API 17) and was called on 1.17 and on 1.32. The glue is compiled for the
baseline of the architecture: it must run on a CPU that lacks what the kernels need, to say so.

Rules of the glue: a function that can fail returns an OrtStatus* (null = fine) and has released what it took; nothing
is kept between calls but the State of a kernel (constant after creation: any number of threads may compute at once).
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.codegen.build import Builder
from onnxfuse.codegen.glue.compute import compute, shapes
from onnxfuse.codegen.glue.custom_op import operator
from onnxfuse.codegen.glue.life import allocation, kernel_life
from onnxfuse.codegen.glue.memory import memory_functions
from onnxfuse.codegen.glue.register import cpu_check, digest_symbol, registration
from onnxfuse.codegen.glue.tables import Part
from onnxfuse.codegen.glue.texts import texts
from onnxfuse.codegen.glue.writer import Glue
from onnxfuse.target import Target


def glue_module(parts: Sequence[Part], target: Target, digest: str, required: Sequence[str] | None = None) -> str:
    """Text of the module with `RegisterCustomOps`.

    required: CPU features to ask for at load; None means those of the target.
    """
    glue = Glue(Builder(target, "onnxfuse"))
    memory_functions(glue)
    texts(glue)
    shapes(glue)
    allocation(glue)
    kernel_life(glue)
    compute(glue)
    ops = [operator(glue, part) for part in parts]
    features = tuple(target.features if required is None else required)
    cpu_check(glue, features if target.triple.startswith("x86_64") else ())
    registration(glue, ops, target)
    digest_symbol(glue, digest)
    for fn in glue.build.module.functions:
        if fn.blocks:
            fn.attributes.add("noinline")  # nothing here is hot, and inlining made the glue slow to compile
    return str(glue.build.module)
