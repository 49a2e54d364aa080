"""The manifest is complete and consistent; inputs are seeded and obey their rules."""

import modelzoo
import numpy as np
import pytest

MODELS = modelzoo.load_manifest()


def test_every_model_says_where_it_comes_from() -> None:
    needs = {"wheel": {"requirement", "member", "sha256"}, "light": {"file"}, "export": {"entry"}}
    for model in MODELS.values():
        assert needs[model.source["kind"]] <= set(model.source), model.name
        assert model.family in ("cnn", "transformer", "mixed"), model.name


def test_wheels_are_pinned() -> None:
    for model in MODELS.values():
        if model.source["kind"] == "wheel":
            assert "==" in model.source["requirement"], model.name
            assert len(model.source["sha256"]) == 64, model.name


def test_dynamic_models_are_run_at_many_shapes() -> None:
    det = {case["x"] for case in MODELS["ch_PP-OCRv4_det"].cases}
    assert {(1, 3, 32, 32), (1, 3, 320, 320), (1, 3, 640, 480), (1, 3, 736, 1280)} <= det
    assert {shape[0] for shape in det} == {1, 2, 3}
    widths = [case["x"][3] for case in MODELS["ch_PP-OCRv4_rec"].cases]
    assert (min(widths), max(widths)) == (32, 1000)
    bert = [case["input_ids"] for case in MODELS["bert_base_dynamic"].cases]
    assert {b for b, _ in bert} == {1, 2, 3, 4}
    assert (min(s for _, s in bert), max(s for _, s in bert)) == (1, 200)


def test_inputs_are_the_same_for_the_same_seed_and_differ_between_cases() -> None:
    model = MODELS["ch_PP-OCRv4_det"]
    dtypes = {"x": np.dtype(np.float32)}
    first, again = (modelzoo.feeds(model, model.cases[0], dtypes)["x"] for _ in range(2))
    assert np.array_equal(first, again)
    assert first.dtype == np.float32
    other = modelzoo.feeds(model, model.cases[1], dtypes)["x"]
    assert not np.array_equal(first[0, 0], other[0, 0, :32, :32])


def test_values_obey_their_rule() -> None:
    rng = np.random.default_rng(0)
    ids = modelzoo.sample(rng, [100], np.dtype(np.int64), {"low": 3, "high": 7})
    assert set(ids.tolist()) == {3, 4, 5, 6}
    rate = modelzoo.sample(rng, [], np.dtype(np.int64), {"value": 16000})
    assert rate.shape == ()
    assert rate == 16000
    wave = modelzoo.sample(rng, [1000], np.dtype(np.float32), {"uniform": [-1.0, 1.0]})
    assert -1 <= wave.min() < -0.9 < 0.9 < wave.max() <= 1


def test_a_prefix_selects_models_and_a_wrong_name_is_refused() -> None:
    assert [m.name for m in modelzoo.select(["ch_"], MODELS)] == [n for n in MODELS if n.startswith("ch_")]
    with pytest.raises(SystemExit, match="no such model: nope"):
        modelzoo.select(["resnet50", "nope"], MODELS)
