"""One file per way to run a kernel: propose schedules, emit code."""

from __future__ import annotations

from onnxfuse.ir.plan import Template
from onnxfuse.templates.by_size import BY_SIZE
from onnxfuse.templates.gemm import GEMM
from onnxfuse.templates.rowblock import ROWBLOCK
from onnxfuse.templates.rowwise import ROWWISE
from onnxfuse.templates.several import SEVERAL
from onnxfuse.templates.window import WINDOW
from onnxfuse.templates.winograd import WINOGRAD

# In order of priority among equal costs; the general one last.
GENERAL = ROWWISE  # takes every kernel; runs what others cannot

TEMPLATES: tuple[Template, ...] = (WINDOW, BY_SIZE, WINOGRAD, GEMM, ROWBLOCK, SEVERAL, ROWWISE)
