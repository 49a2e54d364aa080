# ruff: noqa: E501 - a row is a line
"""Public bugs of neighbouring tools, one row each: the thread, the kind of fault, and where it is tested here.

`where` is "values" for models in models.py, else a test (file::name), else the reason why the row does not apply
(begins with "-"). docs/cases.md is this table; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    number: str
    thread: str
    kind: str
    where: str


VALUES = "values"
ROWS: tuple[Row, ...] = (
    Row("P01", "apache/tvm#19572", "value", VALUES),
    Row("P02", "apache/tvm#19579", "value", VALUES),
    Row("P04", "microsoft/onnxruntime#21455", "value", VALUES),
    Row("P05", "onnx/onnx#6003", "value", VALUES),
    Row("P07", "pytorch/pytorch#186018", "value", VALUES),
    Row("P08", "pytorch/pytorch#126848", "value", VALUES),
    Row("P10", "pytorch/pytorch#159154", "crash", VALUES),
    Row("P11", "apache/tvm#12380", "value", VALUES),
    Row("P12", "microsoft/onnxruntime#17689", "value", VALUES),
    Row("P14", "microsoft/onnxconverter-common#323", "value", VALUES),
    Row("P15", "microsoft/onnxruntime#23211", "value", "verify/test_compare.py::test_flips_can_be_allowed_per_output"),
    Row("P16", "onnx/optimizer#255", "value", VALUES),
    Row("P17", "iree-org/iree#9493", "value", VALUES),
    Row("P18", "apache/tvm#19541", "crash", VALUES),
    Row("P18", "onnx/onnx-mlir#2862", "crash", "frontend/test_prepare.py::test_integer_division_that_traps_is_left_alone"),
    Row("P20", "apache/tvm#20170", "value", VALUES),
    Row("P21", "openvinotoolkit/openvino#20898", "crash", "frontend/test_prepare.py::test_integer_division_that_traps_is_left_alone"),
    Row("P23", "microsoft/onnxruntime#28089", "value", VALUES),
    Row("P25", "microsoft/onnxruntime#9753", "crash", VALUES),
    Row("P26", "microsoft/onnxruntime#26537", "crash", VALUES),
    Row("P29", "openvinotoolkit/openvino#30666", "value", VALUES),
    Row("P30", "apache/tvm#19420", "value", VALUES),
    Row("P31", "microsoft/onnxruntime#19147", "crash", VALUES),
    Row("P33", "microsoft/onnxruntime#18338", "crash", VALUES),
    Row("P34", "microsoft/onnxscript#2969", "value", VALUES),
    Row("P37", "microsoft/onnxruntime#11024", "crash", VALUES),
    Row("P38", "microsoft/onnxruntime#4559", "crash", VALUES),
    Row("P40", "microsoft/onnxruntime#3208", "crash", VALUES),
    Row("P42", "microsoft/onnxruntime#4898", "value", VALUES),
    Row("P43", "onnxsim/onnxsim#101", "naming", "frontend/test_read.py::test_impossible_sizes_are_refused"),
    Row("P46", "onnx/onnx-mlir#2599", "crash", VALUES),
    Row("P48", "microsoft/onnxruntime#4110", "crash", VALUES),
    Row("P49", "onnxsim/onnxsim#79", "naming", VALUES),
    Row("P51", "microsoft/onnxruntime#7312", "naming", VALUES),
    Row("P52", "inisis/OnnxSlim#321", "crash", VALUES),
    Row("P54", "apache/tvm#17341", "crash", VALUES),
    Row("P56", "apache/tvm#17835", "value", VALUES),
    Row("P57", "microsoft/onnxruntime#2776", "crash", VALUES),
    Row("P59", "microsoft/onnxruntime#14500", "value", VALUES),
    Row("P61", "microsoft/onnxruntime#32105", "crash", VALUES),
    Row("P62", "microsoft/onnxruntime#28959", "crash", VALUES),
    Row("P65", "onnx/optimizer#174", "value", VALUES),
    Row("P67", "onnx/optimizer#252", "value", "emit/test_model.py::test_the_empty_pipeline_changes_no_number"),
    Row("P68", "onnx/optimizer#275", "value", VALUES),
    Row("P70", "onnxsim/onnxsim#174", "size", "cases/test_kinds.py::test_a_folded_weight_does_not_stay_beside_its_image"),
    Row("P71", "onnxsim/onnxsim#197", "size", "frontend/test_prepare.py::test_equal_constants_make_equal_nodes_and_stay_apart"),
    Row("P72", "inisis/OnnxSlim#15", "crash", "cli/test_optimize.py::test_a_mismatch_writes_nothing_and_exits_with_2"),
    Row("P73", "onnx/sklearn-onnx#854", "crash", VALUES),
    Row("P75", "microsoft/onnxruntime#8825", "crash", VALUES),
    Row("P77", "onnxsim/onnxsim#154", "crash", "test_subgraphs.py::test_without_the_flag_bodies_stay_byte_for_byte"),
    Row("P78", "microsoft/onnxruntime#10075", "crash", "emit/test_model.py::test_a_model_with_local_functions_runs"),
    Row("P80", "microsoft/onnxruntime#22687", "crash", "cases/test_kinds.py::test_function_bodies_refer_to_no_attribute"),
    Row("P81", "microsoft/onnxruntime#20354", "speed", "emit/test_model.py::test_a_thousand_groups_share_their_functions"),
    Row("P83", "quic/efficient-transformers#536", "value", "frontend/test_read.py::test_local_functions_are_inlined_with_attributes_and_defaults"),
    Row("P84", "onnx/optimizer#134", "crash", VALUES),
    Row("P85", "onnx/onnx#2198", "crash", VALUES),
    Row("P87", "onnxsim/onnxsim#272", "size", "frontend/test_prepare.py::test_huge_results_are_never_evaluated"),
    Row("P88", "microsoft/onnxscript#2466", "naming", "frontend/test_prepare.py::test_growth_is_measured_against_what_is_freed"),
    Row("P89", "onnxsim/onnxsim#158", "size", "emit/test_bundle.py::test_past_the_limit_weights_go_beside_the_model_by_themselves"),
    Row("P90", "onnx/optimizer#50", "value", "frontend/test_read.py::test_external_data_is_mapped_and_not_loaded"),
    Row("P91", "microsoft/onnxruntime#16716", "naming", "emit/test_bundle.py::test_weights_move_to_a_data_file_of_their_own"),
    Row("P92", "microsoft/onnxruntime#3802", "speed", "cli/test_optimize.py::test_verbose_times_every_stage_on_standard_error"),
    Row("P93", "onnxsim/onnxsim#651", "speed", "frontend/test_prepare.py::test_a_long_chain_goes_through"),
    Row("P94", "onnxsim/onnxsim#428", "metadata", "cases/test_kinds.py::test_documents_and_metadata_stay"),
    Row("P95", "inisis/OnnxSlim#38", "metadata", "cases/test_kinds.py::test_documents_and_metadata_stay"),
    Row("P96", "onnxsim/onnxsim#269", "naming", "cases/test_kinds.py::test_custom_nodes_say_what_they_are_made_of"),
    Row("P97", "onnxsim/onnxsim#650", "metadata", "emit/test_model.py::test_an_optimized_model_can_be_optimized_again"),
    Row("P98", "onnxsim/onnxsim#210", "crash", "frontend/test_read.py::test_foreign_domains_pass_through_and_keep_their_word"),
    Row("P98", "onnx/optimizer#61", "crash", "- an unknown op in the default domain is an error with the op's name: onnxruntime, which has to run the result, refuses such a model too"),
    Row("P100", "microsoft/onnxruntime#8730", "crash", "codegen/test_object.py::test_library_exports_what_it_is_told_and_needs_nothing"),
    Row("P101", "microsoft/onnxruntime-extensions#642", "crash", "codegen/test_glue.py::test_too_old_onnxruntime_gets_a_status_with_both_versions"),
    Row("P102", "microsoft/onnxruntime#14065", "crash", "codegen/test_glue.py::test_library_is_self_contained"),
    Row("P103", "microsoft/onnxruntime#11167", "value", "codegen/test_glue.py::test_the_kernel_runs_and_agrees_with_the_body"),
    Row("P104", "onnxsim/onnxsim#440", "value", "frontend/test_prepare.py::test_random_ops_are_never_folded"),
    Row("P105", "microsoft/onnxruntime#23143", "value", VALUES),
    Row("P106", "microsoft/onnxruntime#28448", "value", VALUES),
    Row("P108", "microsoft/onnxruntime#21176", "value", VALUES),
    Row("P109", "microsoft/onnxruntime#32132", "value", VALUES),
    Row("P111", "apache/tvm#6327", "speed", VALUES),
    Row("P112", "apache/tvm#15137", "crash", VALUES),
    Row("P113", "iree-org/iree#5152", "speed", "fuse/test_invariants.py::test_groups_are_within_the_caps"),
    Row("P115", "apache/tvm#2932", "speed", VALUES),
    Row("P116", "iree-org/iree#24725", "crash", VALUES),
    Row("P117", "microsoft/onnxruntime#15743", "speed", "cli/test_cli.py::test_bench_prints_a_ratio_for_both"),
    Row("P118", "microsoft/onnxruntime#4421", "speed", "codegen/test_glue.py::test_every_number_of_threads"),
    Row("P119", "wasm-micro-runtime/wasm-micro-runtime#4997", "crash", "codegen/test_glue.py::test_missing_cpu_feature_is_a_status_that_names_it"),
    Row("P120", "openvinotoolkit/openvino#25744", "value", "- groups write what is read outside and nothing else, so there is no debug output that could change the fusion; `--keep` and `--skip-fusion-patterns` switch groups off one by one"),
)  # fmt: skip


def table() -> str:
    """docs/cases.md."""
    lines = [
        "# Public bugs of neighbouring tools, as tests",
        "",
        "Each row is a public thread about a simplifier, optimizer, fuser or compiler: the kind of fault, and the test",
        "that shows the right behaviour here with its variants. `tests/cases/models.py` holds the smallest models; the",
        "table is made from `tests/cases/rows.py`.",
        "",
        "| row | thread | kind | test, or why there is none |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        where = f"cases/test_values.py -k {row.number}" if row.where == VALUES else row.where.removeprefix("- ")
        text = where if row.where.startswith("-") else f"`{where}`"
        lines.append(f"| {row.number} | {row.thread} | {row.kind} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parents[2] / "docs" / "cases.md").write_text(table(), encoding="utf-8")
