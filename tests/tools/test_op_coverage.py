"""docs/coverage.md: a row for every operator, and rows that are made anew agree with it."""

import op_coverage
import pytest
from onnx import TensorProto, helper

from onnxfuse.ir.dtypes import DType

SAMPLE = ["Attention", "DFT", "Mod", "Relu", "ReduceMax", "SequenceAt"]  # of each kind; all by `--check`


def lines() -> dict[str, str]:
    page = op_coverage.PATH.read_text(encoding="utf-8")
    return {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}


def test_every_operator_has_its_row() -> None:
    assert list(lines()) == op_coverage.names()
    assert op_coverage.PATH.read_text(encoding="utf-8").startswith(op_coverage.HEADER)


def test_rows_are_up_to_date() -> None:
    """Stale? Run python tools/op_coverage.py."""
    made = op_coverage.text(op_coverage.rows(SAMPLE, op_coverage.models(SAMPLE)))
    written = lines()
    assert [line for line in made.splitlines() if line.startswith("| `")] == [written[name] for name in SAMPLE]


@pytest.mark.parametrize(("op", "want"), [("Relu", "yes"), ("NonZero", "UN_OPAQUE")])
def test_verdicts(op: str, want: str) -> None:
    kinds = [TensorProto.FLOAT, TensorProto.FLOAT if op == "Relu" else TensorProto.INT64]
    infos = [helper.make_tensor_value_info(n, k, None) for n, k in zip("xy", kinds, strict=True)]
    infos[0] = helper.make_tensor_value_info("x", kinds[0], [2, 3])
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert op_coverage.status(op, DType.F16, [model]) == want
    assert op_coverage.status(op, DType.F32, []) == ""
