"""What nobody uses is not loaded: the start of the command is a good part of its time."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import onnxfuse.pipeline
assert "sympy.core" not in sys.modules
import onnx_ir
assert str(onnx_ir.SymbolicDim("N") + 1) == "N + 1"
assert "sympy.core" in sys.modules
assert not [f for f in sys.meta_path if type(f).__module__.startswith("onnxfuse")]
"""


def test_sympy_is_loaded_when_a_symbolic_dimension_is_computed_with():
    pytest.importorskip("sympy")  # which onnx_ir asks for
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
