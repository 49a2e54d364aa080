"""A model and its library are loaded together, or the user is told why not."""

from __future__ import annotations

import shutil

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper, parser

from onnxfuse import files, optimize
from onnxfuse.codegen.generate import generate
from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, sym
from onnxfuse.runtime.session import InferenceSession, library_digest, library_path, model_digest
from tests.codegen.tiny import model_of, native, plan_of, plans_of, pointwise, save, value

N = sym("N")
RELU = [helper.make_node("Relu", ["x"], ["z"])]


def made(folder, name="m", plus=0.0, digest=None):
    x, z = value("x", DType.F32, N), value("z", DType.F32, N)
    kernel = pointwise("relu", [x], z, lambda a: apply("max", a + plus, 0.0))
    lib = generate(plans_of(plan_of(kernel)), native())
    return save(folder, model_of(kernel, RELU, digest=lib.digest if digest is None else digest), lib, name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("session folder ü"))


X = np.array([-1, 0, 2], np.float32)


def test_it_is_a_real_session(model):
    s = InferenceSession(model)
    assert isinstance(s, ort.InferenceSession)
    assert s.get_providers() == ["CPUExecutionProvider"]
    np.testing.assert_array_equal(s.run(None, {"x": X})[0], [0, 0, 2])


def test_library_is_used(tmp_path):
    path = made(tmp_path, plus=1.0)  # the library computes something else than the body
    np.testing.assert_array_equal(InferenceSession(str(path)).run(None, {"x": X})[0], [0, 1, 3])


def test_options_of_the_user_are_kept_and_can_be_used_again(model):
    so = ort.SessionOptions()
    so.intra_op_num_threads = 1
    for _ in range(2):
        s = InferenceSession(model, so, ["CPUExecutionProvider"])
        assert s.get_session_options().intra_op_num_threads == 1


def test_options_that_serve_another_model(model, tmp_path):
    so = ort.SessionOptions()
    InferenceSession(model, so)
    with pytest.raises(UsageError, match="serve another onnxfuse model"):
        InferenceSession(made(tmp_path), so)


def test_digests_agree(model):
    assert library_path(model).suffix == ".so"
    assert model_digest(model) == library_digest(library_path(model))


def test_missing_files(model, tmp_path):
    with pytest.raises(UsageError, match="no such model"):
        InferenceSession(tmp_path / "none.onnx")
    alone = tmp_path / "alone.onnx"
    shutil.copy(model, alone)
    with pytest.raises(UsageError, match="no library beside"):
        InferenceSession(alone)


def test_library_of_another_model(model, tmp_path):
    path = made(tmp_path, digest="ab" * 32)
    with pytest.raises(UsageError, match="belongs to another model"):
        InferenceSession(path)


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_file_that_is_no_library(model, tmp_path, content):
    path = tmp_path / "m.onnx"
    shutil.copy(model, path)
    library_path(path).write_bytes(content)
    with pytest.raises(UsageError, match="not made by onnxfuse"):
        InferenceSession(path)


@pytest.mark.parametrize("content", [b"\xff" * 30, b"\x0a\xff\x01abc", b"hello"])
def test_file_that_is_no_model(model, tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    shutil.copy(library_path(model), library_path(path))
    with pytest.raises(UsageError, match="not an ONNX model"):
        InferenceSession(path)


def test_model_without_digest_is_taken_as_it_is(tmp_path):
    path = made(tmp_path, digest="")
    assert model_digest(path) is None
    np.testing.assert_array_equal(InferenceSession(path).run(None, {"x": X})[0], [0, 0, 2])


def test_damaged_library_is_a_usage_error(model, tmp_path):
    path = tmp_path / "m.onnx"
    shutil.copy(model, path)
    image = library_path(model).read_bytes()
    library_path(path).write_bytes(b"\0" * 64 + image[64:])
    with pytest.raises(UsageError, match="onnxruntime does not take"):
        InferenceSession(path)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_library_that_was_cut_short_is_not_loaded(tmp_path, kept):
    """The loader would take it and end the process at the first missing page."""
    path = optimized(tmp_path, 1.0)
    image = library_path(path).read_bytes()
    library_path(path).write_bytes(image[: int(len(image) * kept)])
    with pytest.raises(UsageError, match=r"is damaged|not made by onnxfuse"):
        InferenceSession(path)


def test_a_library_with_a_flipped_bit_is_not_loaded(tmp_path):
    path = optimized(tmp_path, 1.0)
    image = bytearray(library_path(path).read_bytes())
    image[len(image) // 2] ^= 1
    library_path(path).write_bytes(image)
    with pytest.raises(UsageError, match="is damaged"):
        InferenceSession(path)


def optimized(folder, plus: float):
    """out.onnx and out.so of relu(x) + plus, by the whole way."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y)
        <float c = {{{plus}}}> {{ r = Relu(x) y = Add(r, c) }}"""
    return optimize(parser.parse_model(text), verify=False).save(folder / "out.onnx").model


def test_a_killed_publication_is_completed_by_the_one_who_loads(tmp_path, monkeypatch):
    """Half of the files are the new ones: the model runs as it is, and with us it is the new pair again."""
    path = optimized(tmp_path, 1.0)
    monkeypatch.setattr(files, "_complete", half(files._complete))
    with pytest.raises(Killed):
        optimized(tmp_path, 5.0)
    monkeypatch.undo()
    so = ort.SessionOptions()
    so.register_custom_ops_library(str(library_path(path)))
    np.testing.assert_array_equal(ort.InferenceSession(path, so).run(None, {"x": X})[0], [1, 1, 3])
    np.testing.assert_array_equal(InferenceSession(path).run(None, {"x": X})[0], [5, 5, 7])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "out.so"]


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours sees it."""


def half(real):
    def complete(target, names=None):
        if names is None:
            return real(target)
        files._move(files._committed(target) / names[0], target.with_name(names[0]))
        raise Killed

    return complete
