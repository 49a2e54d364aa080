"""What the machine code of a kernel looks like."""

from __future__ import annotations

from onnxfuse.codegen.generate import emit_module
from onnxfuse.codegen.object import compile_module
from onnxfuse.errors import Refusal
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Plan, Template
from onnxfuse.target import Target


def assembly(kernel: Kernel, template: Template, target: Target) -> str:
    """Of the template's first proposal, which must be one."""
    found = template.propose(kernel, target)
    assert not isinstance(found, Refusal), found
    return compile_module(emit_module(Plan(kernel, found[0], template), target).text, target, keep_asm=True).asm
