"""The Python face: names like the flags, the argument untouched, the same checks."""

import inspect

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import parser

import onnxfuse
from onnxfuse.api import optimize
from onnxfuse.cli.optimizing import optimize as command

CHAIN = '<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,4] y) { a = Exp(x) \n y = Add(a, x) }'
# Flags of the command line that make no sense in Python, and the other way round.
# skip_constant_folding is skip_optimization={"fold"}, no_cache is cache=False.
CLI_ONLY = {"output", "dry_run", "json", "measure", "verbose", "skip_constant_folding"}
PYTHON_ONLY = {"trace", "progress"}


def test_keywords_are_the_flags():
    flags = set(inspect.signature(command).parameters) - CLI_ONLY
    assert flags == set(inspect.signature(optimize).parameters) - PYTHON_ONLY


def test_everything_but_the_model_is_keyword_only():
    first, *rest = inspect.signature(optimize).parameters.values()
    assert first.name == "model"
    assert all(p.kind is p.KEYWORD_ONLY for p in rest)


def test_every_public_name_is_there():
    assert all(getattr(onnxfuse, name) is not None for name in onnxfuse.__all__)
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        onnxfuse.optimise  # noqa: B018


@pytest.mark.parametrize("form", ["proto", "bytes", "bytearray", "ir", "path"])
def test_every_form_of_a_model_is_taken_and_none_is_changed(tmp_path, form):
    proto = parser.parse_model(CHAIN)
    data = proto.SerializeToString(deterministic=True)
    (tmp_path / "m.onnx").write_bytes(data)
    forms = {
        "proto": lambda: proto,
        "bytes": lambda: data,
        "bytearray": lambda: bytearray(data),
        "ir": lambda: onnx_ir.from_proto(proto),
        "path": lambda: tmp_path / "m.onnx",
    }
    bundle = onnxfuse.optimize(forms[form]())
    assert proto.SerializeToString(deterministic=True) == data
    written = bundle.save(tmp_path / "out.onnx")
    x = np.ones((3, 4), np.float32)
    (y,) = onnxfuse.InferenceSession(written.model).run(None, {"x": x})
    assert np.allclose(y, np.e + 1)
    onnx.checker.check_model(bundle.model)


def test_tolerances_by_output_reach_the_check(monkeypatch):
    seen = []
    monkeypatch.setattr("onnxfuse.api.verify_bundle", lambda *args: seen.append(args[3].verify))
    onnxfuse.optimize(
        parser.parse_model(CHAIN), rtol={"y": 0.5}, atol=0.25, allow_mismatches={"y": 3}, val_range={"x": (0, 1)}
    )
    (config,) = seen
    assert (config.output_rtol, config.rtol, config.atol) == ({"y": 0.5}, None, 0.25)
    assert (config.allow_mismatches, config.val_ranges) == ({"y": 3}, {"x": (0, 1)})


def test_errors_are_ours():
    with pytest.raises(onnxfuse.UsageError, match="E_"):
        onnxfuse.optimize("nowhere.onnx")
    with pytest.raises(onnxfuse.OnnxfuseError, match="E_TARGET"):
        onnxfuse.optimize(parser.parse_model(CHAIN), target_cpu="z80")


@pytest.mark.parametrize("wrong", [{"fusion_mode": "most"}, {"precision": "f8"}])
def test_a_word_that_is_no_choice_is_a_usage_error_that_names_the_choices(wrong):
    with pytest.raises(onnxfuse.UsageError, match=f"E_FLAG.*{next(iter(wrong)).replace('_', ' ')}") as error:
        onnxfuse.optimize(parser.parse_model(CHAIN), **wrong)
    assert error.value.hint.startswith("one of: ")
