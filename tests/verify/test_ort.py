"""verify/ort.py: sessions from every form of a model, results of every type."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import numpy_helper, parser

from onnxfuse.errors import UsageError
from onnxfuse.verify import ort

F32 = np.float32
TEXT = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }'


def test_every_form_of_a_model_gives_a_session(tmp_path):
    proto = parser.parse_model(TEXT)
    onnx.save(proto, tmp_path / "m.onnx")
    for source in (
        tmp_path / "m.onnx",
        str(tmp_path / "m.onnx"),
        proto,
        proto.SerializeToString(),
        onnx_ir.from_proto(proto),
    ):
        assert ort.run(ort.session(source), {"x": F32([1, 2])})["y"].tolist() == [-1, -2]


def test_external_data_of_an_ir_model_is_found(tmp_path):
    proto = parser.parse_model(TEXT.replace("Neg(x)", "Add(x, w)"))
    proto.graph.initializer.append(numpy_helper.from_array(F32([10, 20]), "w"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    model = onnx_ir.load(tmp_path / "m.onnx")
    assert ort.run(ort.session(model), {"x": F32([1, 2])})["y"].tolist() == [11, 22]


def test_a_refused_model_or_library_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="E_ORT_LOAD"):
        ort.session(b"no model")
    with pytest.raises(UsageError, match="E_LIBRARY"):
        ort.session(parser.parse_model(TEXT), libraries=[tmp_path / "missing.so"])


def test_raw_float_types_go_in_and_out():
    model = parser.parse_model(TEXT.replace("float[2]", "bfloat16[2]").replace("Neg", "Identity"))
    x = np.array([1.5, -2], ml_dtypes.bfloat16)
    out = ort.run(ort.session(model), {"x": x})["y"]
    assert out.dtype == x.dtype
    assert out.tolist() == x.tolist()


def test_the_profile_lists_what_ran():
    model = parser.parse_model(TEXT.replace("y = Neg(x)", "a = Neg(x) \n y = Exp(a)"))
    assert [op for _, op in ort.profile(model, {"x": F32([1, 2])})] == ["Neg", "Exp"]
