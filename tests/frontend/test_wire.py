"""frontend/wire.py: weights that stay in the file are the same weights."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper

from onnxfuse.emit import write
from onnxfuse.errors import UsageError
from onnxfuse.frontend.read import read
from onnxfuse.frontend.wire import LARGE, scan, varint
from tests.emit.pieces import assert_same, emptied
from tests.frontend.onnx_text import initializer, model

COUNT = LARGE // 4


def big(name: str, seed: int, dtype=np.float32) -> TensorProto:
    return initializer(name, np.random.default_rng(seed).standard_normal(COUNT * 2).astype(dtype))


def mixed() -> onnx.ModelProto:
    """Large and small initializers in turn, one of them with typed fields, and nodes before and after."""
    made = model(
        "a = Add(x, w0) b = Add(a, s0) c = Add(b, w1) d = Add(c, t) y = Add(d, s1)", "(float[N] x) => (float[N] y)"
    )
    made.graph.initializer.extend([
        big("w0", 0), initializer("s0", np.array([1], np.float32)), big("w1", 1),
        helper.make_tensor("t", TensorProto.FLOAT, [COUNT * 2], np.ones(COUNT * 2, np.float32)),
        initializer("s1", np.array([2], np.float32)),
    ])  # fmt: skip
    return made


def saved(made: onnx.ModelProto, directory: Path) -> Path:
    path = directory / "m.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def test_large_weights_stay_in_the_file(tmp_path):
    source = read(saved(mixed(), tmp_path))
    kinds = {name: type(t).__name__ for name, t in source.tensors.items()}
    assert kinds == {
        "w0": "ExternalTensor", "s0": "TensorProtoTensor", "w1": "ExternalTensor", "t": "TensorProtoTensor",
        "s1": "TensorProtoTensor",
    }  # fmt: skip
    for t in mixed().graph.initializer:
        np.testing.assert_array_equal(source.tensors[t.name].numpy(), onnx.numpy_helper.to_array(t))


def test_looking_at_weights_holds_no_file_open(tmp_path):
    """A model has more weights than a process may have files open."""
    source = read(saved(mixed(), tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [c.numpy() for c in source.graph.consts.values()]
    emptied(tmp_path / "m.onnx").proto()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert len(held) == 5


def test_a_path_and_its_bytes_give_the_same_model(tmp_path):
    path = saved(mixed(), tmp_path)
    assert emptied(path).proto() == emptied(path.read_bytes()).proto()


def test_the_written_model_is_the_same(tmp_path):
    path = saved(mixed(), tmp_path)
    for external in (False, True):
        out = write(emptied(path), None, tmp_path / "out.onnx", external_data=external).model
        onnx.checker.check_model(str(out))
        assert_same(mixed(), str(out), {"x": np.ones(COUNT * 2, np.float32)})
        assert [t.name for t in onnx.load(out).graph.initializer] == ["w0", "s0", "w1", "t", "s1"]


def test_the_skeleton_is_the_model_without_them(tmp_path):
    data, found = scan(saved(mixed(), tmp_path))
    assert [(f.header.name, f.place) for f in found] == [("w0", 0), ("w1", 2)]
    expected = mixed()
    del expected.graph.initializer[2], expected.graph.initializer[0]
    assert onnx.ModelProto.FromString(data) == expected


def test_small_files_are_not_scanned(tmp_path):
    assert scan(saved(model("y = Relu(x)"), tmp_path)) is None


@pytest.mark.parametrize("cut", [1, 100, LARGE, 2 * LARGE, 3 * LARGE])
def test_truncated_files_are_refused(cut, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(mixed().SerializeToString()[:-cut])
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.code == "E_PARSE"


def test_data_that_does_not_fit_its_dimensions_is_refused(tmp_path):
    made = mixed()
    made.graph.initializer[0].dims[0] = 7
    with pytest.raises(UsageError) as caught:
        read(saved(made, tmp_path))
    assert caught.value.why == f"dims [7] FLOAT need 28 bytes, found {COUNT * 8}"


def test_a_file_that_is_no_protobuf_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 4 * LARGE, np.uint8).tobytes())
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.code in ("E_PARSE", "E_NOT_MODEL")


def test_damage_anywhere_is_noticed_or_harmless(tmp_path):
    whole = mixed().SerializeToString()
    rng = np.random.default_rng(5)
    path = tmp_path / "m.onnx"
    outside = [k for k in range(len(whole)) if k < 400 or k > len(whole) - 200]
    for _ in range(150):
        data = bytearray(whole)
        data[int(rng.choice(outside))] = int(rng.integers(256))
        path.write_bytes(data)
        try:
            read(path)
        except UsageError:
            continue


def test_tensors_with_more_fields_are_left_to_protobuf(tmp_path):
    made = mixed()
    made.graph.initializer[0].metadata_props.add(key="a", value="b")
    source = read(saved(made, tmp_path))
    assert not isinstance(source.tensors["w0"], onnx_ir.ExternalTensor)
    assert emptied(saved(made, tmp_path)).proto().graph.initializer[0].metadata_props[0].value == "b"


def test_half_precision_and_bytes(tmp_path):
    made = model("y = Relu(x)")
    for name, dtype in (("h", np.float16), ("q", np.int8), ("d", np.float64)):
        made.graph.initializer.append(initializer(name, (np.arange(LARGE * 2) % 100).astype(dtype)))
        made.graph.output.append(helper.make_tensor_value_info(name, made.graph.initializer[-1].data_type, [LARGE * 2]))
    source = read(saved(made, tmp_path))
    for t in made.graph.initializer:
        np.testing.assert_array_equal(source.tensors[t.name].numpy(), onnx.numpy_helper.to_array(t), strict=True)


def test_writing_over_the_file_the_weights_lie_in_is_refused(tmp_path):
    path = saved(mixed(), tmp_path)
    with pytest.raises(UsageError) as caught:
        write(emptied(path), None, path)
    assert caught.value.code == "E_SAME_FILE"


@pytest.mark.parametrize(("n", "expected"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")])
def test_numbers_are_written_as_protobuf_does(n, expected):
    assert varint(n) == expected
