"""emit/bundle.py: files on disk, all or nothing (numbers of cases are those of CASES.md)."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest

from onnxfuse import files
from onnxfuse.emit import bundle
from onnxfuse.emit.bundle import check_output, staged, write
from onnxfuse.errors import UsageError
from tests.emit.pieces import assert_same, emptied, fused, run
from tests.frontend.onnx_text import initializer, model

SIGNATURE = "(float[N,1024] x) => (float[N,1024] y)"
X = {"x": np.random.default_rng(0).standard_normal((2, 1024)).astype(np.float32)}
LIBRARY = b"\x7fELF not really"


def weighted(seed: int = 0) -> onnx.ModelProto:
    made = model("a = Add(x, w) b = Mul(a, v) y = Exp(b)", SIGNATURE)
    rng = np.random.default_rng(seed)
    made.graph.initializer.append(initializer("w", rng.uniform(-1, 1, 1024).astype(np.float32)))
    made.graph.initializer.append(initializer("v", rng.uniform(-1, 1, (1, 1024)).astype(np.float32)))
    return made


def saved_with_data(directory: Path, name: str = "m.onnx", location: str = "m.data", seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    onnx.save(weighted(seed), path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def listing(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def content(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


# --- what is written -------------------------------------------------------------------------------------------------
def test_a_bundle_is_a_model_and_a_library_beside_it(tmp_path):
    written = write(fused(weighted()), LIBRARY, tmp_path / "out.onnx")
    assert listing(tmp_path) == ["out.onnx", "out.so"]
    assert (written.model, written.library, written.data) == (tmp_path / "out.onnx", tmp_path / "out.so", None)
    assert written.library.read_bytes() == LIBRARY
    onnx.checker.check_model(str(written.model))
    assert_same(weighted(), str(written.model), X)


def test_without_a_library_there_is_only_the_model(tmp_path):
    assert write(fused(weighted()), None, tmp_path / "out.onnx").library is None
    assert listing(tmp_path) == ["out.onnx"]


def test_pieces_make_the_same_message_as_protobuf(tmp_path):
    emission = fused(weighted())
    raw = b"".join(bundle.model_bytes(emission, {}, ""))
    assert onnx.ModelProto.FromString(raw) == emission.proto()


@pytest.mark.parametrize("name", ["with space.onnx", "ünï-模型.onnx", "no_suffix", "two.dots.onnx"])
def test_any_name_works(name, tmp_path):
    written = write(fused(weighted()), LIBRARY, tmp_path / name, external_data=True)
    assert written.data.name == f"{name}.data"
    assert_same(weighted(), str(written.model), X)


def test_a_bare_file_name_is_written_to_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(fused(weighted()), LIBRARY, "out.onnx", external_data=True)
    assert listing(tmp_path) == ["out.onnx", "out.onnx.data", "out.so"]
    assert_same(weighted(), "out.onnx", X)


def test_running_again_changes_nothing(tmp_path):
    write(fused(weighted()), LIBRARY, tmp_path / "out.onnx", external_data=True)
    before = content(tmp_path)
    write(fused(weighted()), LIBRARY, tmp_path / "out.onnx", external_data=True)
    assert content(tmp_path) == before


def test_permissions_are_the_usual_ones_and_stay(tmp_path):
    written = write(fused(weighted()), LIBRARY, tmp_path / "out.onnx")
    mask = os.umask(0)
    os.umask(mask)
    assert written.model.stat().st_mode & 0o777 == 0o666 & ~mask
    written.model.chmod(0o640)
    write(fused(weighted()), LIBRARY, tmp_path / "out.onnx")
    assert written.model.stat().st_mode & 0o777 == 0o640


# --- external data ---------------------------------------------------------------------------------------------------
def test_weights_beside_the_model(tmp_path):
    written = write(fused(weighted()), None, tmp_path / "out.onnx", external_data=True)
    found = onnx.load(written.model, load_external_data=False)
    assert [{e.key: e.value for e in t.external_data} for t in found.graph.initializer] == [
        {"location": "out.onnx.data", "offset": "0", "length": "4096"},
        {"location": "out.onnx.data", "offset": "4096", "length": "4096"},
    ]
    onnx.checker.check_model(str(written.model))
    assert_same(weighted(), str(written.model), X)


def test_small_tensors_stay_in_the_model(tmp_path):
    made = model("r = Reshape(x, s) y = Add(r, w)", "(float[N,1024] x) => (float[N,1024] y)")
    made.graph.initializer.extend([initializer("s", np.array([-1, 1024])), initializer("w", np.ones(1024, np.float32))])
    write(emptied(made), None, tmp_path / "out.onnx", external_data=True)
    found = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert {t.name: bool(t.external_data) for t in found.graph.initializer} == {"s": False, "w": True}


def test_large_tensors_are_aligned(tmp_path):
    made = model("a = Add(x, u) y = Add(a, w)", "(float[N,1024] x) => (float[A,1024] y)")
    made.graph.initializer.extend([
        initializer("u", np.ones(1024, np.float32)), initializer("w", np.ones((300, 1024), np.float32)),
    ])  # fmt: skip
    write(emptied(made), None, tmp_path / "out.onnx", external_data=True)
    found = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert [e.value for t in found.graph.initializer for e in t.external_data if e.key == "offset"] == ["0", "65536"]
    assert_same(made, str(tmp_path / "out.onnx"), {"x": np.ones((1, 1024), np.float32)})


def test_weights_move_into_the_model_from_any_directory(tmp_path):
    """P90, P91: the data is never lost, and never referred to where it was."""
    source = saved_with_data(tmp_path / "in")
    for out in (tmp_path / "in" / "out.onnx", tmp_path / "out.onnx"):
        write(fused(source), None, out)
        assert not any(t.external_data for t in onnx.load(out, load_external_data=False).graph.initializer)
        assert_same(weighted(), str(out), X)


def test_weights_move_to_a_data_file_of_their_own(tmp_path):
    source = saved_with_data(tmp_path / "in")
    before = content(tmp_path / "in")
    out = tmp_path / "in" / "out.onnx"
    write(fused(source), None, out, external_data=True)
    assert {k: v for k, v in content(tmp_path / "in").items() if k in before} == before
    assert_same(weighted(), str(out), X)


def test_the_inputs_data_file_is_never_written_over(tmp_path):
    """The input keeps its weights in the very file we would like to write."""
    source = saved_with_data(tmp_path, location="out.onnx.data")
    written = write(fused(source), None, tmp_path / "out.onnx", external_data=True)
    assert written.data.name != "out.onnx.data"
    assert_same(weighted(), str(tmp_path / "out.onnx"), X)
    assert_same(weighted(), str(source), X)


def test_old_weights_go_when_the_new_model_is_in_place(tmp_path):
    out = tmp_path / "out.onnx"
    write(fused(weighted(0)), None, out, external_data=True)
    second = write(fused(weighted(1)), None, out, external_data=True)
    assert listing(tmp_path) == sorted(["out.onnx", second.data.name])
    assert_same(weighted(1), str(out), X)
    write(fused(weighted(1)), None, out)
    assert listing(tmp_path) == ["out.onnx"]


def test_a_strangers_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "out.onnx.data").write_bytes(b"precious")
    write(fused(weighted()), None, tmp_path / "out.onnx", external_data=True)
    assert (tmp_path / "out.onnx.data").read_bytes() == b"precious"
    assert_same(weighted(), str(tmp_path / "out.onnx"), X)


def test_past_the_limit_weights_go_beside_the_model_by_themselves(tmp_path, monkeypatch):
    """P89, with a small limit."""
    monkeypatch.setattr(bundle, "INLINE_LIMIT", 4096)
    assert write(fused(weighted()), None, tmp_path / "out.onnx").data is not None
    assert_same(weighted(), str(tmp_path / "out.onnx"), X)


def test_three_gigabytes_are_recognised_without_reading_them(tmp_path):
    """P89: the size alone decides; nothing is serialised to find out."""
    big = tmp_path / "big.bin"
    with big.open("wb") as f:
        f.truncate(3 << 30)
    emission = fused(weighted())
    tensors = {
        "w": onnx_ir.ExternalTensor(
            str(big), 0, 3 << 30, onnx_ir.DataType.FLOAT, shape=onnx_ir.Shape([3 << 28]), name="w"
        )
    }
    slots = bundle._slots(type(emission)(emission.model, tensors))
    assert slots["w"].length == 3 << 30


# --- all or nothing --------------------------------------------------------------------------------------------------
def test_what_is_staged_can_be_run_and_leaves_nothing_when_refused(tmp_path):
    with staged(fused(weighted()), LIBRARY, tmp_path / "out.onnx", external_data=True) as it:
        assert it.model.name == "out.onnx"
        assert it.library.with_suffix(".onnx") == it.model
        assert_same(weighted(), str(it.model), X)
        assert not (tmp_path / "out.onnx").exists()
    assert listing(tmp_path) == []


def test_a_failure_touches_nothing(tmp_path, monkeypatch):
    out = tmp_path / "out.onnx"
    write(fused(weighted(0)), LIBRARY, out, external_data=True)
    before = content(tmp_path)

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "model_bytes", full)
    with pytest.raises(UsageError) as caught:
        write(fused(weighted(1)), b"new", out, external_data=True)
    assert caught.value.code == "E_OUTPUT"
    assert "No space left on device" in caught.value.why
    assert content(tmp_path) == before


# --- refusals before any work ----------------------------------------------------------------------------------------
def refusal(out, source=None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_output(out, source)
    return caught.value


def test_out_must_not_be_in(tmp_path, monkeypatch):
    path = saved_with_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.onnx").symlink_to(path)
    for out in (path, "m.onnx", "./m.onnx", "link.onnx"):
        assert refusal(out, path).code == "E_SAME_FILE"
    assert check_output("other.onnx", path) == Path("other.onnx")


def test_the_library_must_not_be_in_either(tmp_path):
    source = tmp_path / "m.so"
    source.touch()
    assert refusal(tmp_path / "m.onnx", source).code == "E_SAME_FILE"


def test_a_directory_is_no_output(tmp_path):
    assert refusal(tmp_path).code == "E_IS_DIRECTORY"
    (tmp_path / "m.so").mkdir()
    assert refusal(tmp_path / "m.onnx").code == "E_IS_DIRECTORY"


def test_the_directory_must_exist(tmp_path):
    error = refusal(tmp_path / "no" / "m.onnx")
    assert error.code == "E_OUTPUT"
    assert error.why == f"no directory {tmp_path / 'no'}"


def test_a_name_like_the_librarys_is_refused(tmp_path):
    assert refusal(tmp_path / "m.so").code == "E_OUTPUT"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def denied(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "mkdtemp", denied)
    error = refusal(tmp_path / "m.onnx")
    assert str(error) == (
        f"error[E_OUTPUT] output {tmp_path / 'm.onnx'} cannot be written\n  why:  {tmp_path}: Permission denied"
    )


def test_checking_leaves_no_trace(tmp_path):
    check_output(tmp_path / "m.onnx")
    assert listing(tmp_path) == []


def test_external_tensors_run_from_the_optimized_model(tmp_path):
    source = saved_with_data(tmp_path)
    assert run(fused(source).proto(), X)[0].shape == (2, 1024)
