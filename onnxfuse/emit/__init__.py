"""ONNX out: custom nodes, FunctionProto bodies, the bundle of two files.

In: what was read (Source), the atomic graph, the plans and the library. Out: `emit` makes the model in memory
(Emission), `staged` and `write` put model, weights and library on disk, all or nothing. Always: the same interface,
user nodes outside groups word for word, a model that runs without the library.
"""

import onnxfuse.frontend.late  # noqa: F401 - before anything else imports onnx_ir

# isort: split
from onnxfuse.emit.bundle import Staged, Written, check_output, staged, write
from onnxfuse.emit.functions import DOMAIN, node_proto
from onnxfuse.emit.model import Emission, emit

__all__ = ["DOMAIN", "Emission", "Staged", "Written", "check_output", "emit", "node_proto", "staged", "write"]
