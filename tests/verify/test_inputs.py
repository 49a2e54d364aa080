"""verify/inputs.py: data files, random data, and shapes the model accepts."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort
from onnxfuse.verify.inputs import load, parse_ranges, parse_shapes, samples, save_npz, specs

F32 = np.float32
ADD = "(float[2] a, float[2] b) => (float[2] y)"


def session(body, signature):
    return ort.session(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {signature} {{ {body} }}'))


def shapes_of(sess, **config):
    return [s.shapes for s, _ in samples(sess, VerifyConfig(**config))]


def error_of(sess, **config):
    with pytest.raises(UsageError) as info:
        list(samples(sess, VerifyConfig(**config)))
    return info.value


def test_the_same_seed_gives_the_same_data():
    sess = session("y = Add(a, b)", ADD)
    first, again, other = (next(iter(samples(sess, VerifyConfig(seed=s))))[0].feeds for s in (3, 3, 4))
    assert np.array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], other["a"])
    assert not np.array_equal(first["a"], first["b"])


def test_a_static_model_gets_one_shape_and_as_many_runs_as_asked():
    sess = session("y = Add(a, b)", ADD)
    assert shapes_of(sess) == [{"a": (2,), "b": (2,)}]
    assert len(shapes_of(sess, runs=4)) == 4


def test_a_symbol_has_one_size_in_a_sample_and_several_over_samples():
    sess = session("y = Add(a, b)", "(float[batch,N] a, float[batch,N] b) => (float[batch,N] y)")
    found = shapes_of(sess)
    assert [s["a"][0] for s in found] == [1, 2, 3]
    assert all(s["a"] == s["b"] for s in found)
    assert len({s["a"][1] for s in found}) == 3


def test_nameless_dimensions_of_one_axis_are_tried_equal():
    sess = session("y = Add(a, b)", "(float[?,4] a, float[?,4] b) => (float[?,4] y)")
    assert all(s["a"] == s["b"] for s in shapes_of(sess))


def test_images_get_image_sizes():
    sess = session("y = Relu(x)", "(float[batch,3,H,W] x) => (float[batch,3,H,W] y)")
    assert shapes_of(sess) == [{"x": (1, 3, 64, 64)}, {"x": (2, 3, 96, 96)}, {"x": (3, 3, 32, 32)}]


def test_formulas_in_dimensions_are_worked_out():
    text = "g (float[past] p, float[next] x) => (float[T] y) { y = Concat<axis=0>(p, x) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "past + 1"
    assert len(shapes_of(sess := ort.session(model))) == 3
    assert all(s["x"] == (s["p"][0] + 1,) for s in shapes_of(sess))


def test_shapes_the_original_refuses_are_replaced_by_others():
    body = "s = Constant<value_ints = [-1, 512]>() \n y = Reshape(x, s)"
    sess = session(body, "(float[batch,samples] x) => (float[R,512] y)")
    assert all(s["x"][0] * s["x"][1] % 512 == 0 for s in shapes_of(sess))
    assert shapes_of(sess)


def test_indices_stay_in_range():
    sess = session("y = Gather(x, ids)", "(float[3] x, int64[K] ids) => (float[K] y)")
    assert len(shapes_of(sess)) == 3


def test_a_given_shape_is_used_and_fixes_its_symbols():
    sess = session("y = Add(a, b)", "(float[N,M] a, float[N,M] b) => (float[N,M] y)")
    assert shapes_of(sess, test_shapes={"a": (5, 9)}) == [{"a": (5, 9), "b": (5, 9)}]


def test_ranges_bound_floats_and_integers():
    sess = session("c = Cast<to=1>(b) \n y = Add(a, c)", "(float[50] a, int64[50] b) => (float[50] y)")
    sample, _ = next(iter(samples(sess, VerifyConfig(val_ranges={"a": (5, 6), "b": (7, 9)}))))
    assert sample.feeds["a"].min() >= 5
    assert sample.feeds["a"].max() <= 6
    assert set(np.unique(sample.feeds["b"])) == {7, 8, 9}


def test_strings_bools_and_sequences_are_made():
    sess = session("y = Identity(s) \n n = Not(b) \n l = SequenceLength(q)",
                   "(string[2] s, bool[2] b, seq(float[A,B]) q) => (string[2] y, bool[2] n, int64 l)")  # fmt: skip
    _, results = next(iter(samples(sess, VerifyConfig())))
    assert results["l"] == 2


def test_no_accepted_input_names_the_free_dimensions():
    body = "s = Constant<value_ints = [1009, 1009]>() \n y = Reshape(x, s)"
    sess = session(body, "(float[N,M] x) => (float[1009,1009] y)")
    error = error_of(sess)
    assert error.code == "E_NO_INPUT"
    assert "--test-input-shape x:?,?" in error.hint
    assert error.why


def test_wrong_names_in_flags_are_named_with_a_suggestion():
    sess = session("y = Relu(pixel_values)", "(float[N] pixel_values) => (float[N] y)")
    error = error_of(sess, test_shapes={"pixel_value": (3,)})
    assert (error.code, error.hint) == ("E_INPUT_NAME", "did you mean 'pixel_values'?")
    assert error_of(sess, val_ranges={"z": (0, 1)}).code == "E_INPUT_NAME"


def test_a_given_shape_must_fit_the_fixed_dimensions():
    sess = session("y = Relu(x)", "(float[N,3] x) => (float[N,3] y)")
    assert error_of(sess, test_shapes={"x": (2, 4)}).code == "E_INPUT_SHAPE"
    assert error_of(sess, test_shapes={"x": (2,)}).code == "E_INPUT_SHAPE"


# ---- files


def test_npz_npy_and_folders_are_read(tmp_path):
    wanted = specs(session("y = Add(a, b)", ADD))
    a, b = F32([1, 2]), F32([3, 4])
    np.savez(tmp_path / "x.npz", a=a, b=b)
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "a.npy", a)
    np.save(tmp_path / "arrays" / "b.npy", b)
    named = (f"a:{tmp_path}/arrays/a.npy", f"b:{tmp_path}/arrays/b.npy")
    for source in (str(tmp_path / "x.npz"), str(tmp_path / "arrays"), named):
        (sample,) = load(source, wanted)
        assert np.array_equal(sample.feeds["b"], b)


def test_test_data_sets_are_read_in_order(tmp_path):
    wanted = specs(session("y = Add(a, b)", ADD))
    for k in (0, 1, 10, 2):
        folder = tmp_path / f"test_data_set_{k}"
        folder.mkdir()
        for i in range(2):
            (folder / f"input_{i}.pb").write_bytes(numpy_helper.from_array(F32([k, i])).SerializeToString())
    found = load(str(tmp_path), wanted)
    assert [s.label for s in found] == [f"test_data_set_{k}" for k in (0, 1, 2, 10)]
    assert found[3].feeds["b"].tolist() == [10, 1]
    (single,) = load(str(tmp_path / "test_data_set_2"), wanted)
    assert single.feeds["a"].tolist() == [2, 0]


def test_sequences_and_strings_in_protobuf_are_read(tmp_path):
    sess = session(
        "l = SequenceLength(q) \n y = Identity(s)", "(seq(float[A]) q, string[2] s) => (int64 l, string[2] y)"
    )
    sequence = numpy_helper.from_list([F32([1]), F32([2])])
    (tmp_path / "input_0.pb").write_bytes(sequence.SerializeToString())
    strings = onnx.helper.make_tensor("s", onnx.TensorProto.STRING, [2], [b"x", b"y"])
    (tmp_path / "input_1.pb").write_bytes(strings.SerializeToString())
    _, results = next(iter(samples(sess, VerifyConfig(input_data=str(tmp_path)))))
    assert results["l"] == 2
    assert results["y"].tolist() == ["x", "y"]


@pytest.mark.parametrize(
    ("arrays", "code"),
    [
        ({"a": F32([1, 2])}, "E_INPUT_MISSING"),
        ({"a": F32([1, 2]), "c": F32([1, 2])}, "E_INPUT_NAME"),
        ({"a": F32([1, 2]), "b": np.float64([1, 2])}, "E_INPUT_TYPE"),
        ({"a": F32([1, 2]), "b": F32([1, 2, 3])}, "E_INPUT_SHAPE"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_name(tmp_path, arrays, code):
    np.savez(tmp_path / "x.npz", **arrays)
    assert error_of(session("y = Add(a, b)", ADD), input_data=str(tmp_path / "x.npz")).code == code


def test_unreadable_data_is_the_callers_error(tmp_path):
    sess = session("y = Add(a, b)", ADD)
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pb").mkdir()
    (tmp_path / "pb" / "input_0.pb").write_bytes(b"\xff\xff\xff")
    for path in ("bad.npz", "missing.npz", "empty", "pb"):
        assert error_of(sess, input_data=str(tmp_path / path)).code == "E_INPUT_DATA"
    assert error_of(sess, input_data=f"{tmp_path}/x.npy").code == "E_INPUT_DATA"


def test_texts_of_the_command_line():
    assert parse_shapes(["x:1,3,320,320", "a:b:4", "s:"]) == {"x": (1, 3, 320, 320), "a:b": (4,), "s": ()}
    assert parse_ranges(["x:0,1", "-1,1"]) == {"x": (0, 1), "": (-1, 1)}
    for bad in ("x", "x:a", "x:1,", ":3"):
        with pytest.raises(UsageError, match="E_FLAG"):
            parse_shapes([bad])
    for bad in ("x", "x:1", "x:2,1", "x:a,b"):
        with pytest.raises(UsageError, match="E_FLAG"):
            parse_ranges([bad])


def test_outputs_round_trip_through_npz(tmp_path):
    save_npz(tmp_path / "o.npz", {"file": F32([1]), "a/b": np.array(["x"], object)})
    with np.load(tmp_path / "o.npz") as data:
        assert data["file"].tolist() == [1]
        assert data["a/b"].tolist() == ["x"]
    with pytest.raises(UsageError, match="E_OUTPUT_DATA"):
        save_npz(tmp_path / "o.npz", {"s": [{"a": 1}]})


def test_nameless_dimensions_may_differ_where_equal_ones_are_refused():
    # as silero-vad has it: input [?, ?] is batch and samples, state [2, ?, 4] is the batch
    sess = session(
        "p = Constant<value_ints = [0]>() \n w = Constant<value_ints = [-1, 224]>() \n r = Reshape(x, w) \n"
        "z = Unsqueeze(r, p) \n m = ReduceMean<axes = [2]>(q) \n"
        "c = ReduceMean<axes = [2]>(z) \n y = Concat<axis = 0>(c, m)",
        "(float[?,?] x, float[2,?,4] q) => (float[3,A,1] y)",
    )
    found = shapes_of(sess)
    assert len(found) == 3
    assert all(s["x"][0] * s["x"][1] == 224 * s["q"][1] for s in found)
