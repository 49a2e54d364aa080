"""onnxfuse: fuses ONNX models for the CPU, with LLVM kernels as an onnxruntime custom-op library, and says why.

    bundle = onnxfuse.optimize("model.onnx")        # fuse, compile, compare with onnxruntime
    bundle.save("fused.onnx")                       # writes fused.onnx and fused.so
    session = onnxfuse.InferenceSession("fused.onnx")

Names are loaded on first use: LLVM and onnxruntime take a second to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxfuse.api import optimize
    from onnxfuse.config import Config, FusionConfig, FusionMode, PrepareConfig, VerifyConfig
    from onnxfuse.errors import CompileError, IRError, OnnxfuseError, Unsupported, UsageError, VerifyError
    from onnxfuse.pipeline import Bundle
    from onnxfuse.runtime.session import InferenceSession, library_path
    from onnxfuse.target import TARGETS, Target
    from onnxfuse.verify.compare import compare

__version__ = "0.1.0"

_HOME = {
    "optimize": "onnxfuse.api",
    "Bundle": "onnxfuse.pipeline",
    "InferenceSession": "onnxfuse.runtime.session",
    "library_path": "onnxfuse.runtime.session",
    "compare": "onnxfuse.verify.compare",
    "Config": "onnxfuse.config",
    "FusionConfig": "onnxfuse.config",
    "FusionMode": "onnxfuse.config",
    "PrepareConfig": "onnxfuse.config",
    "VerifyConfig": "onnxfuse.config",
    "Target": "onnxfuse.target",
    "TARGETS": "onnxfuse.target",
    "OnnxfuseError": "onnxfuse.errors",
    "UsageError": "onnxfuse.errors",
    "Unsupported": "onnxfuse.errors",
    "IRError": "onnxfuse.errors",
    "CompileError": "onnxfuse.errors",
    "VerifyError": "onnxfuse.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxfuse' has no attribute {name!r}")
    return getattr(import_module(home), name)


__all__ = [
    "TARGETS",
    "Bundle",
    "CompileError",
    "Config",
    "FusionConfig",
    "FusionMode",
    "IRError",
    "InferenceSession",
    "OnnxfuseError",
    "PrepareConfig",
    "Target",
    "Unsupported",
    "UsageError",
    "VerifyConfig",
    "VerifyError",
    "compare",
    "library_path",
    "optimize",
]
