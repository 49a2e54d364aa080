"""verify/compare.py, verify/values.py: what counts as equal, and what the report says when it is not."""

import json

import ml_dtypes
import numpy as np
import pytest
from onnx import parser

from onnxfuse.config import Precision, VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort
from onnxfuse.verify.compare import compare, compare_many
from onnxfuse.verify.values import compare_results, compare_values

F32 = np.float32
DEFAULT = VerifyConfig()


def model(body: str, signature: str = "(float[4] x) => (float[4] y)", opset: int = 17):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {signature} {{ {body} }}')


def verdict(a, b, config=DEFAULT):
    return compare_values("y", np.asarray(a), np.asarray(b), config)


def test_a_model_agrees_with_itself():
    report = compare(model("y = Exp(x)"), model("y = Exp(x)"))
    assert report.ok
    assert report.summary() == "agrees without the library: 1 run(s), 1 output(s)"


def test_a_wrong_output_is_named_with_its_first_bad_element():
    report = compare(
        model("y = Relu(x) \n z = Neg(x)", "(float[2,3] x) => (float[2,3] y, float[2,3] z)"),
        model("y = Relu(x) \n one = Constant<value = float {1.0}>() \n n = Neg(x) \n z = Add(n, one)",
              "(float[2,3] x) => (float[2,3] y, float[2,3] z)"),
    )  # fmt: skip
    assert not report.ok
    assert report.failed_outputs == ("z",)
    worst = {o.name: o for o in report.worst()}
    assert worst["z"].mismatches == worst["z"].total == 6
    assert worst["z"].first is not None
    assert worst["z"].first.index == (0, 0)
    assert worst["z"].max_abs == pytest.approx(1.0, rel=1e-5)


def test_nan_agrees_only_with_nan_in_the_same_place():
    assert verdict(F32([np.nan, 1]), F32([np.nan, 1])).ok
    assert not verdict(F32([np.nan, 1]), F32([1, np.nan])).ok
    assert not verdict(F32([np.nan, 1]), F32([0, 1])).ok
    assert verdict(F32([np.nan, 1]), F32([np.nan, 1])).nans == 1


def test_an_infinity_agrees_only_with_the_same_infinity():
    assert verdict(F32([np.inf, -np.inf]), F32([np.inf, -np.inf])).ok
    assert not verdict(F32([np.inf, 1]), F32([-np.inf, 1])).ok
    assert not verdict(F32([np.inf, 1]), F32([3e38, 1])).ok
    assert not verdict(F32([3e38, 1]), F32([np.inf, 1])).ok


def test_signed_zeros_agree_and_are_counted():
    report = verdict(F32([0.0, -0.0, 1]), F32([-0.0, -0.0, 1]))
    assert report.ok
    assert report.signed_zeros == 1


def test_weights_in_bf16_widen_the_tolerance_of_f32_alone():
    half = VerifyConfig(precision=Precision.BF16)
    a, b = np.array([1.0, -0.25], F32), np.array([1.004, -0.25], F32)
    assert verdict(a, b, half).ok
    assert not verdict(a, b).ok
    assert not verdict(a, np.array([1.02, -0.25], F32), half).ok
    assert not verdict(a.astype(np.float64), b.astype(np.float64), half).ok
    assert not verdict(np.array([1]), np.array([2]), half).ok


def test_tiny_outputs_are_checked_with_an_absolute_tolerance_of_zero():
    strict = VerifyConfig(atol=0.0)
    assert not verdict(F32([1e-30, 2e-30]), F32([0, 2e-30]), strict).ok
    assert not verdict(F32([8.8162e-39]), F32([0]), strict).ok
    assert verdict(F32([1e-30]), F32([1.00001e-30]), strict).ok


def test_saturated_outputs_agree_within_an_eps_of_one():
    assert verdict(F32([1.5e-8]), F32([1e-22])).ok
    assert not verdict(F32([1.5e-5]), F32([1e-22])).ok


def test_tolerance_scales_with_the_largest_value():
    assert verdict(F32([1000, 0]), F32([1000, 0.009])).ok
    assert not verdict(F32([1000, 0]), F32([1000, 0.011])).ok


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7), (np.float32, 2.0**-23), (np.float64, 2.0**-52)],
)
def test_one_step_of_every_float_type_agrees_and_ulp_is_counted(dtype, eps):
    report = verdict(np.array([1, -1], dtype), np.array([1 + eps, -1 - 2 * eps], dtype))
    assert report.ok
    assert report.max_ulp == 2


def test_ulp_distance_crosses_zero_and_covers_the_whole_f64_range():
    tiny = np.nextafter(F32(0), F32(1))
    assert verdict(F32([tiny]), F32([-tiny])).max_ulp == 2
    top = np.finfo(np.float64).max
    assert verdict(np.float64([top]), np.float64([-top])).max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, np.bool_])
def test_integers_and_bools_must_be_equal(dtype):
    a = np.array([0, 1, 1], dtype)
    assert verdict(a, a).ok
    report = verdict(a, np.array([0, 1, 0], dtype))
    assert not report.ok
    assert report.mismatches == 1


def test_large_i64_that_differ_by_one_are_different():
    assert not verdict(np.int64([2**60]), np.int64([2**60 + 1])).ok


def test_rtol_and_atol_given_for_everything_do_not_loosen_integers():
    assert not verdict(np.int64([100]), np.int64([101]), VerifyConfig(rtol=1.0, atol=10.0)).ok


def test_flips_can_be_allowed_per_output():
    a, b = np.zeros(100, np.bool_), np.zeros(100, np.bool_)
    b[:16] = True
    assert not verdict(a, b).ok
    assert verdict(a, b, VerifyConfig(allow_mismatches={"y": 16})).ok
    assert not verdict(a, b, VerifyConfig(allow_mismatches={"y": 15})).ok
    assert verdict(a, b, VerifyConfig(allow_mismatches={"": 16})).ok


def test_quantised_outputs_can_be_given_one_step():
    assert verdict(np.int8([3, 4]), np.int8([4, 4]), VerifyConfig(output_atol={"y": 1})).ok


def test_tolerances_per_output_win():
    config = VerifyConfig(rtol=0.0, atol=0.0, output_atol={"y": 1.0})
    assert verdict(F32([1]), F32([1.5]), config).ok
    assert not compare_values("z", F32([1]), F32([1.5]), config).ok


def test_shape_and_dtype_must_be_equal():
    assert verdict(F32([1, 2]), F32([[1, 2]])).problem == "reference is float32[2], candidate is float32[1,2]"
    assert verdict(F32([1]), np.float64([1])).problem == "reference is float32[1], candidate is float64[1]"


def test_empty_outputs_agree():
    assert verdict(np.zeros((0, 4), F32), np.zeros((0, 4), F32)).ok


def test_sequences_maps_and_absent_values_are_compared_by_leaf():
    a = {"s": [F32([1]), F32([2])], "m": [{"k": 1.0}], "o": None}
    assert all(r.ok for r in compare_results(a, a, DEFAULT))
    b = {"s": [F32([1]), F32([3])], "m": [{"k": 1.0}], "o": None}
    assert [r.name for r in compare_results(a, b, DEFAULT) if not r.ok] == ["s[1]"]
    b = {"s": [F32([1])], "m": [{}], "o": F32([1])}
    assert [r.name for r in compare_results(a, b, DEFAULT) if not r.ok] == ["s[]", "s[1]", "m[0]{k}", "o"]


def test_strings_are_compared():
    assert verdict(np.array(["a", "b"], object), np.array(["a", "b"], object)).ok
    assert verdict(np.array(["a", "b"], object), np.array(["a", "c"], object)).first.candidate == "c"


def test_the_report_is_plain_data():
    report = compare(model("y = Exp(x)"), model("y = Neg(x)"))
    data = json.loads(json.dumps(report.json()))
    assert data["ok"] is False
    assert data["runs"][0]["outputs"][0]["name"] == "y"
    assert data["runs"][0]["inputs"] == {"x": [4]}


def test_a_candidate_that_does_not_load_is_a_failed_report():
    broken = model("y = Foo(x)")
    report = compare(model("y = Exp(x)"), broken)
    assert not report.ok
    assert "refuses to load" in report.error


def test_a_reference_that_does_not_load_is_the_callers_error():
    with pytest.raises(UsageError, match="E_ORT_LOAD"):
        compare(model("y = Foo(x)"), model("y = Exp(x)"))


def test_a_candidate_with_other_names_is_a_failed_report():
    other = model("y = Exp(a)", "(float[4] a) => (float[4] y)")
    assert (
        compare(model("y = Exp(x)"), other).error == "the inputs differ: (x: tensor(float)) against (a: tensor(float))"
    )


def test_a_candidate_that_refuses_the_inputs_is_a_failed_run():
    only_16 = "s = Constant<value_ints = [2, 8]>() \n r = Reshape(x, s) \n f = Constant<value_ints = [16]>() \n "
    signature = "(float[K] x) => (float[K] y)"
    report = compare(model("y = Exp(x)", signature), model(only_16 + "e = Exp(r) \n y = Reshape(e, f)", signature))
    assert not report.ok
    assert [bool(r.error) for r in report.runs] == [False, True, True]


def test_a_candidate_with_fixed_dimensions_is_compared_in_those_and_reported():
    report = compare(
        model("y = Exp(x)", "(float[N,5] x) => (float[N,5] y)"), model("y = Exp(x)", "(float[7,5] x) => (float[7,5] y)")
    )
    assert report.ok
    assert [r.inputs["x"] for r in report.runs] == [(7, 5)]
    assert report.narrowed == ("x: float[N,5] became x: float[7,5]",)


def test_the_reference_runs_once_for_several_libraries(monkeypatch):
    loads = []
    real = ort.session

    def session(source, **flags):
        loads.append(source)
        return real(source, **flags)

    monkeypatch.setattr(ort, "session", session)
    a, b = model("y = Exp(x)"), model("y = Exp(x)")
    reports = compare_many(a, b, [None, None])
    assert [r.ok for r in reports] == [True, True]
    assert [source is a for source in loads] == [True, False, False]


def test_bfloat16_models_are_compared():
    body = model("y = Identity(x)", "(bfloat16[4] x) => (bfloat16[4] y)")
    report = compare(body, body)
    assert report.ok
    assert report.runs[0].outputs[0].dtype == "bfloat16"
