"""verify/facts.py: counting without weights, and what an optimized model says about itself."""

import json

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import numpy_helper, parser

from onnxfuse.errors import UsageError
from onnxfuse.verify.facts import facts, recorded

WITH_BODY = """
<ir_version: 8, opset_import: ["": 17, "onnxfuse": 1]>
g (bool c, float[4] x) => (float[4] y) {
   a = onnxfuse.fused_neg_exp(x)
   y = If(c) <then_branch = t () => (float[4] p) { p = Relu(a) }, else_branch = e () => (float[4] q) { q = Exp(a) }>
}
<domain: "onnxfuse", opset_import: ["": 17]>
fused_neg_exp (v) => (w) { n = Neg(v) \n w = Exp(n) }
"""


def test_nodes_of_subgraphs_count_and_functions_count_apart():
    proto = parser.parse_model(WITH_BODY)
    found = facts(proto)
    assert found.ops == {"onnxfuse::fused_neg_exp": 1, "If": 1, "Relu": 1, "Exp": 1}
    assert found.function_ops == {"Neg": 1, "Exp": 1}
    assert found.nodes == 4
    assert facts(proto.SerializeToString()) == found == facts(onnx_ir.from_proto(proto))


def test_size_includes_external_data(tmp_path):
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[64] x) => (float[64] y) { y = Add(x, w) }'
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(64, np.float32), "w"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert facts(tmp_path / "m.onnx").bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_unreadable_files_are_the_callers_error(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x07\x3a\xff\xff")
    with pytest.raises(UsageError, match="E_PARSE"):
        facts(tmp_path / "bad.onnx")
    with pytest.raises(UsageError, match="E_NO_FILE"):
        facts(tmp_path / "none.onnx")


def test_the_record_of_an_optimized_model(tmp_path):
    proto = parser.parse_model(WITH_BODY)
    proto.graph.node[0].name = "neg_exp"
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    assert recorded(path) == {
        "groups": [
            {
                "name": "neg_exp",
                "op_type": "fused_neg_exp",
                "members": [{"name": "", "op": "Neg", "origin": []}, {"name": "", "op": "Exp", "origin": []}],
                "reads": ["x"],
                "writes": ["a"],
            }
        ],
        "left": [],
    }
    proto.metadata_props.add(key="onnxfuse.inspection", value=json.dumps({"groups": [], "left": []}))
    onnx.save(proto, path)
    assert recorded(path) == {"groups": [], "left": []}


def test_any_other_model_has_no_record(tmp_path):
    proto = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { y = Neg(x) }')
    onnx.save(proto, tmp_path / "m.onnx")
    assert recorded(tmp_path / "m.onnx") is None
