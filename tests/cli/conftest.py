"""Running the command line inside the test process."""

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxfuse import cli


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def onnxfuse(capsys, monkeypatch):
    """`onnxfuse("compare", "a.onnx", ...)` -> exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "120")  # tables and messages wrap at the width of the terminal

    def run(*arguments):
        code = cli.run_arguments([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def model(tmp_path):
    """Write a small model from its text and weights; returns the path."""

    def write(name, body, signature="(float[4] x) => (float[4] y)", weights=None, opset=17):
        proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {signature} {{ {body} }}')
        for key, value in (weights or {}).items():
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), key))
        path = tmp_path / name
        onnx.save(proto, path)
        return path

    return write


def is_one_error(result, code):
    """One message of ours, no traceback."""
    return result.err.startswith(f"error[{code}]") and result.err.count("error[") == 1 and "Traceback" not in result.err
