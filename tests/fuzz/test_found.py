"""What tools/fuzz.py found, each as the smallest model that showed it, grouped by kind.

`agrees` optimizes at every mode and runs what comes out without and with its library against onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfuse
from onnxfuse.verify import ort
from tests.fuzz.agreeing import agrees, floats, model


# --- an operand that no code loads -----------------------------------------------------------------------------------
def test_a_mask_of_dropout_reads_nothing_and_still_waits_for_its_operand(tmp_path: Path) -> None:
    m = model("(float[1,4] x) => (bool[a,b] mask, float[c,d] y) { v = Mul(x, x)  y, mask = Dropout(v) }")
    agrees(tmp_path, m, {"x": floats(1, 4)})


def test_a_comparison_with_itself_reads_nothing(tmp_path: Path) -> None:
    m = model(
        """(uint64[N] x, int64[1] end) => (bool[k] y) <int64[1] start = {-2}, int64[1] axis = {0}> {
        c = Sub(x, x)  t = LessOrEqual(c, c)  s = Slice(t, start, end, axis)  y = And(s, s) }"""
    )
    agrees(tmp_path, m, {"x": np.arange(5, dtype=np.uint64), "end": np.array([9])})


def test_where_with_equal_branches_does_not_read_its_condition(tmp_path: Path) -> None:
    m = model(
        """(float[9] x) => (float[a,b] y) <float one = {1}, int64[2] to = {9, 1}> {
        r = Relu(x)  e = Equal(r, one)  w = Where(e, r, r)  v = Reshape(w, to)
        c = Ceil(v)  g = Greater(c, one)  y = Where(g, c, w) }"""
    )
    agrees(tmp_path, m, {"x": floats(9)})


# --- joints of a Concat in the lanes ----------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["Softmax<axis = 0>", "LogSoftmax<axis = 0>", "LpNormalization<axis = 0, p = 2>"])
def test_rows_down_the_columns_of_a_concat(tmp_path: Path, op: str) -> None:
    # The reduction also keeps the row it sums; cut at the joint of the Concat it has to do so in every part.
    m = model(f"(float[2,2,1] x, float[2,2,2] v) => (float[a,b,c] y) {{ s = Concat<axis = 2>(v, x)  y = {op}(s) }}", 18)
    agrees(tmp_path, m, {"x": floats(2, 2, 1), "v": floats(2, 2, 2)})


# --- dimensions ------------------------------------------------------------------------------------------------------
def test_a_dimension_whose_variable_part_may_be_negative(tmp_path: Path) -> None:
    # min(max(N - 1, 0), N - 1) + 1 of an empty N: the part before the constant is -1.
    m = model(
        """(float[1,N] x) => (int32[a,b] y)
        <int64[1] start = {-1}, int64[1] end = {-2147483648}, int64[1] axis = {1}, int64[1] step = {-1}> {
        v = Slice(x, start, end, axis, step)  y = Cast<to = 6>(v) }"""
    )
    agrees(tmp_path, m, {"x": floats(1, 0)}, {"x": floats(1, 5)})


@pytest.mark.parametrize("rest", ["x", "Neg(x)", "Add(x, v)"])
def test_a_broadcast_of_a_branch_that_alone_is_read(tmp_path: Path, rest: str) -> None:
    # The extent of B and E is that of x even where v, which nothing reads, has 1 there.
    m = model(
        f"""(float[1,B,1] x, float[D,E,F] v) => (float[a,b,c] y)
        <bool no = {{0}}> {{ r = {rest if "(" in rest else f"Identity({rest})"}  y = Where(no, v, r) }}"""
    )
    agrees(
        tmp_path,
        m,
        {"x": floats(1, 2, 1), "v": floats(1, 1, 1)},
        {"x": floats(1, 2, 1), "v": floats(3, 2, 4)},
        {"x": floats(1, 1, 1), "v": floats(3, 2, 4)},
    )


def test_sizes_that_an_output_declares_are_not_believed(tmp_path: Path) -> None:
    # onnxruntime only warns of such outputs; a kernel that reads one must take any size.
    m = model("(bool[2,7] x) => (int64[2,5] places, int64[2,5] y) { places = NonZero(x)  y = Mul(places, places) }")
    few, many = np.eye(2, 7, dtype=np.bool_), np.ones((2, 7), np.bool_)
    agrees(tmp_path, m, {"x": few}, {"x": many})


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(0, 2**63 - 1, 2**63 - 1), (3, -(2**63), -(2**63)), (-1, -(2**63) + 1, -(2**63) + 1), (1, 2**63 - 1, 2**31)],
)
def test_a_step_beyond_the_end_takes_one_element(tmp_path: Path, start: int, end: int, step: int) -> None:
    m = model(
        f"""(float[4] x) => (float[a] y)
        <int64[1] b = {{{start}}}, int64[1] e = {{{end}}}, int64[1] axis = {{0}}, int64[1] step = {{{step}}}> {{
        s = Slice(x, b, e, axis, step)  y = Exp(s) }}"""
    )
    agrees(tmp_path, m, {"x": floats(4)})


def test_a_dimension_minus_a_part_of_itself(tmp_path: Path) -> None:
    # N - (N + 1) // 2 must not be solved for N.
    m = model(
        """(float[H,W,N] x) => (float[a,b,c] y) { p, q = Split<axis = 2, num_outputs = 2>(x)
        s = Abs(q)  y = Mul(q, s) }""",
        opset=18,
    )
    agrees(tmp_path, m, {"x": floats(2, 3, 7)}, {"x": floats(1, 1, 4)})


def test_fewer_indices_than_entries_along_the_other_axes_of_gather_elements(tmp_path: Path) -> None:
    m = model(
        "(float[N,3] x) => (float[a,b] y) <int64[2,3] at = {0,1,0, 1,0,1}> { y = GatherElements<axis = 1>(x, at) }"
    )
    agrees(tmp_path, m, {"x": floats(2, 3)}, {"x": floats(5, 3)})


def test_more_indices_than_entries_are_refused_by_the_kernel_too(tmp_path: Path) -> None:
    m = model(
        "(float[N,3] x) => (float[a,b] y) <int64[2,3] at = {0,1,0, 1,0,1}> { y = GatherElements<axis = 1>(x, at) }"
    )
    written = onnxfuse.optimize(m, verify=False).save(tmp_path / "out.onnx")
    assert written.library is not None
    session = ort.session(written.model, libraries=[written.library])
    with pytest.raises(ort.ORT_ERRORS, match="needs 2 <= d0"):
        ort.run(session, {"x": floats(1, 3)})


@pytest.mark.parametrize("shape", [(2, 1), (1, 4), (2, 4), (1, 1)])
def test_broadcasting_at_run_time_along_a_static_and_a_dynamic_axis(tmp_path: Path, shape: tuple[int, int]) -> None:
    m = model("(int8[2,S] x, int8[a,b] c) => (bool[o,p] y) { y = Equal(x, c) }")
    x = np.arange(8, dtype=np.int8).reshape(2, 4)
    agrees(tmp_path, m, {"x": x, "c": np.ones(shape, np.int8)})


# --- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("op", ["ReduceL2", "ReduceLogSum"])
def test_roots_and_logarithms_of_integers(tmp_path: Path, op: str, dtype: type) -> None:
    kind = np.dtype(dtype).name
    m = model(f"({kind}[N,3] x) => ({kind}[a,b] y) <int64[1] axes = {{1}}> {{ y = {op}(x, axes) }}", opset=18)
    agrees(tmp_path, m, {"x": np.arange(1, 28).reshape(9, 3).astype(dtype)})


def test_lp_pool_over_padded_lines_of_any_length(tmp_path: Path) -> None:
    # x * x of a guarded x: the guard stands inside the product.
    m = model('(float[3,N,H] x) => (float[a,b,c] y) { y = LpPool<kernel_shape = [2], auto_pad = "SAME_UPPER">(x) }', 9)
    agrees(tmp_path, m, {"x": floats(3, 2, 9)}, {"x": floats(3, 1, 1)})


# --- the model that is written ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("opset", [7, 8])
def test_bodies_of_old_opsets_make_integers_from_floats(tmp_path: Path, opset: int) -> None:
    m = model(
        """(int64[1,N] x) => (int64[a] y) <int64[1] to = {-1}, int64 big = {9007199254740993}> {
        r = Reshape(x, to)  y = Add(r, big) }""",
        opset,
    )
    agrees(tmp_path, m, {"x": np.arange(7).reshape(1, 7)})


def test_an_op_that_the_specification_took_back_goes_through(tmp_path: Path) -> None:
    # GroupNormalization is deprecated in opset 18; onnxruntime runs it.
    m = model(
        """(float[2,4,3] x) => (float[2,4,3] z) <float[2] s = {1, 2}, float[2] b = {3, 4}> {
        y = GroupNormalization<num_groups = 2>(x, s, b)  z = Relu(y) }""",
        opset=18,
    )
    agrees(tmp_path, m, {"x": floats(2, 4, 3)})


# --- more dimensions -------------------------------------------------------------------------------------------------
def test_an_output_of_several_that_is_read_for_its_shape_only(tmp_path: Path) -> None:
    m = model(
        """(float[2] x) => (float[k] y, int64[n] z) <int64[1] start = {-2}, int64[1] end = {-1}, int64[1] axis = {0},
        int64[2] parts = {1, 5}> { c = Concat<axis = -1>(x, x, x)  a, b = Split(c, parts)  s = Shape(a)  y = Sin(b)
        z = Slice(s, start, end, axis) }"""
    )
    agrees(tmp_path, m, {"x": floats(2)})


@pytest.mark.parametrize("dim", ["N", "1"])
@pytest.mark.parametrize("attrs", ["kernel_shape = [2], dilations = [2]", "kernel_shape = [3]", "kernel_shape = [2]"])
@pytest.mark.parametrize("ceil", ["", ", ceil_mode = 1"])
def test_pools_over_less_than_a_window(tmp_path: Path, dim: str, attrs: str, ceil: str) -> None:
    # The division that counts windows truncates towards zero: one missing element still gives a window, two do not.
    m = model(f"(float[1,1,{dim}] x) => (float[a,b,c] y) {{ y = MaxPool<strides = [2], {attrs}{ceil}>(x) }}")
    agrees(tmp_path, m, {"x": floats(1, 1, 1)})


# --- broadcasting before a view that takes a part --------------------------------------------------------------------
@pytest.mark.parametrize(("n", "m"), [(5, 5), (1, 5), (5, 1), (2, 2)])
def test_a_slice_of_a_sum_that_broadcasts_at_run_time(tmp_path: Path, n: int, m: int) -> None:
    # The loop has two steps, the sum five elements: whether x broadcasts is told by the sum.
    proto = model(
        """(float[N] x, float[M] z) => (float[a] y) <int64[1] start = {0}, int64[1] end = {2}, int64[1] axis = {0}> {
        v = Add(x, z)  y = Slice(v, start, end, axis) }"""
    )
    agrees(tmp_path, proto, {"x": floats(n), "z": floats(m)})


@pytest.mark.parametrize("op", ["ReduceMin", "ReduceMax"])
def test_rows_kept_for_a_second_look_when_lanes_are_rows(tmp_path: Path, op: str) -> None:
    # Every lane is another row: the private row of exponentials needs one column a lane.
    m = model(
        f"""(float[7,9] x, float[9] k) => (float[a,b] y) <float big = {{1000}}> {{
        s = Exp(x)  m = {op}<axes = [1]>(s)  e = Equal(s, m)  w = Where(e, k, big)  y = ReduceMin<axes = [1]>(w) }}""",
        opset=13,
    )
    agrees(tmp_path, m, {"x": floats(7, 9), "k": np.arange(9, dtype=np.float32)})


# --- models that explode ---------------------------------------------------------------------------------------------
def test_functions_that_call_each_other_twice_forty_times_stay_functions() -> None:
    calls = "".join(
        f'<domain: "l", opset_import: ["": 17, "l": 1]> f{k} (a) => (b) {{ t = l.f{k - 1}(a)  b = l.f{k - 1}(t) }}\n'
        for k in range(1, 40)
    )
    text = f"""<ir_version: 8, opset_import: ["": 17, "l": 1]> g (float[N] x) => (float[N] y) {{ y = l.f39(x) }}
    <domain: "l", opset_import: ["": 17]> f0 (a) => (b) {{ b = Neg(a) }}
    {calls}"""
    bundle = onnxfuse.optimize(onnx.parser.parse_model(text), verify=False)
    assert [n.op_type for n in bundle.model.graph.node] == ["f39"]


def test_a_dimension_squared_thirty_times() -> None:
    squares = "  ".join(f"s{k + 1} = Mul(s{k}, s{k})" for k in range(30))
    m = model(f"(float[N] x, float[1] o) => (float[M] y) {{ s0 = Shape(x)  {squares}  y = Expand(o, s30) }}")
    assert onnxfuse.optimize(m, verify=False).model.graph.node


def test_a_tensor_of_a_hundred_axes_is_left_to_the_runtime() -> None:
    dims = ",".join(f"d{k}" for k in range(100))
    m = model(f"(float[{dims}] x) => (float[{dims}] y) {{ y = Relu(x) }}")
    assert [n.op_type for n in onnxfuse.optimize(m, verify=False).model.graph.node] == ["Relu"]


@pytest.mark.parametrize("target", ["{-5, 2}", "{4611686018427387904, 4}"])
def test_shapes_that_no_tensor_has_are_left_to_the_runtime(target: str) -> None:
    m = model(f"(float[N] x) => (float[a,b] y) <int64[2] to = {target}> {{ v = Reshape(x, to)  y = Relu(v) }}")
    assert "Reshape" in [n.op_type for n in onnxfuse.optimize(m, verify=False).model.graph.node]


@pytest.mark.parametrize("version", [-1, 1 << 40])
def test_an_opset_that_cannot_be_is_refused(version: int) -> None:
    m = model("(float[N] x) => (float[N] y) { y = Relu(x) }")
    m.opset_import[0].version = version
    with pytest.raises(onnxfuse.UsageError, match="E_OPSET_IMPORT"):
        onnxfuse.optimize(m, verify=False)


@pytest.mark.parametrize("name", ["a\nb", "\u202eevil", "\x1b[31mred", "n" * 20_000, "nul\0"])
def test_messages_hold_no_control_characters_of_the_model(name: str) -> None:
    m = model("(float[N] x) => (float[N] y) { y = Relu(x) }")
    m.graph.node[0].op_type = name
    with pytest.raises(onnxfuse.UsageError) as caught:
        onnxfuse.optimize(m, verify=False)
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    assert len(str(caught.value)) < 20_000
    assert "\n" not in caught.value.what


# --- formulas in types and at targets that are rare ------------------------------------------------------------------
@pytest.mark.parametrize("op", ["ArgMin", "ArgMax"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_extremes_of_bytes_before_reductions_took_them(tmp_path: Path, op: str, dtype: type[np.generic]) -> None:
    m = model(f"({np.dtype(dtype)}[N,4] x) => (int64[a,b] y) {{ y = {op}<axis = 1>(x) }}", opset=11)
    agrees(tmp_path, m, {"x": np.arange(12).astype(dtype).reshape(3, 4) % 5})


@pytest.mark.parametrize("options", ["", "ignore_index = -3", "ignore_index = 1"])
@pytest.mark.parametrize("op", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
@pytest.mark.parametrize("classes", ["4", "C"])
def test_negative_targets_count_from_the_last_class(tmp_path: Path, op: str, options: str, classes: str) -> None:
    m = model(f"(float[N,{classes}] x, int64[N] t) => (float y) {{ y = {op}<{options}>(x, t) }}".replace("<>", ""))
    x = floats(5, 4)
    x[1, 1] = -np.inf
    agrees(tmp_path, m, {"x": x, "t": np.array([0, 1, -3, 3, -4])}, {"x": x, "t": np.array([0, 0, -3, 3, -1])})


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int16, np.uint16, np.uint32, np.uint64])
def test_a_scatter_of_types_where_is_not_made_for(tmp_path: Path, dtype: type[np.generic]) -> None:
    name = np.dtype(dtype).name
    m = model(
        f"({name}[4,3] x, {name}[2,3] u) => ({name}[a,b] y) <int64[2,3] i = {{1,1,0,2,0,2}}> "
        "{ d = Identity(x)  y = ScatterElements(d, i, u) }"
    )
    x, u = (
        np.arange(n, n + 12).astype(dtype) * np.array(np.iinfo(dtype).max // 20 if name != "bool" else 1, dtype)
        for n in (0, 5)
    )
    agrees(tmp_path, m, {"x": x.reshape(4, 3), "u": u[:6].reshape(2, 3)})


# --- private rows kept in the output they become ---------------------------------------------------------------------
@pytest.mark.parametrize("sizes", ["A,B", "60,80"])
def test_a_private_row_of_two_axes_is_written_where_it_is_read(tmp_path: Path, sizes: str) -> None:
    """The stages that write and read it join its axes each by itself."""
    m = model(
        f"(float[7,2,1,N] x, float[{sizes}] z) => (float[a,b] v, float[c,d,e,f] y) {{ s = ReduceSum(x)  "
        "v = Identity(z)  q = Abs(v)  y = Mul(q, s) }"
    )
    agrees(tmp_path, m, {"x": floats(7, 2, 1, 17), "z": floats(60, 80)})


# --- windows that onnxruntime pads in a way of its own ---------------------------------------------------------------
@pytest.mark.parametrize("pad", ["SAME_LOWER", "SAME_UPPER"])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize("dim", ["7", "N"])
def test_dilations_do_not_count_in_the_padding_of_a_pool(tmp_path: Path, op: str, pad: str, dim: str) -> None:
    attrs = f'kernel_shape = [3], dilations = [2], auto_pad = "{pad}"'
    m = model(
        f"""(float[1,1,{dim}] x) => (float[a,b,c] y, float[d,e,f] z) {{
        y = {op}<{attrs}>(x)  p = {op}<{attrs}, strides = [2]>(x)  z = Exp(p) }}""",
        opset=19,
    )
    agrees(tmp_path, m, {"x": floats(1, 1, 7)})


def test_indices_of_a_dilated_pool_have_the_size_of_its_windows(tmp_path: Path) -> None:
    m = model(
        """(int8[1,1,1] x) => (int64[a,b,c] y) <int64[0] none = {}> {
        v, w = MaxPool<kernel_shape = [2], auto_pad = "SAME_LOWER", dilations = [2]>(x)  y = Div(w, none) }""",
        opset=14,
    )
    agrees(tmp_path, m, {"x": np.ones((1, 1, 1), np.int8)})


@pytest.mark.parametrize("pad", ["SAME_LOWER", "SAME_UPPER"])
@pytest.mark.parametrize("dim", ["3", "N"])
@pytest.mark.parametrize(
    ("taps", "stride", "dilation", "extra"),
    [(1, 3, 1, 0), (1, 2, 1, 1), (2, 4, 1, 2), (2, 5, 2, 1), (3, 2, 2, 1), (2, 1, 3, 0)],
)
def test_a_transposed_convolution_of_large_strides_makes_no_more_than_there_is(
    tmp_path: Path, pad: str, dim: str, taps: int, stride: int, dilation: int, extra: int
) -> None:
    """SAME promises stride * size elements; onnxruntime adds none where the windows end before."""
    m = model(
        f"(float[1,1,{dim}] x, float[1,1,{taps}] w) => (float[a,b,c] y) {{ y = ConvTranspose<strides = [{stride}], "
        f'dilations = [{dilation}], output_padding = [{extra}], auto_pad = "{pad}">(x, w) }}'
    )
    agrees(tmp_path, m, {"x": floats(1, 1, 3), "w": floats(1, 1, taps)})


# --- nothing to compute ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(("sizes", "kernel"), [((2, 2, 4), [1, 3, 1]), ((1, 9), [2, 2]), ((9, 1), [2, 2]), ((2,), [3])])
def test_windows_larger_than_their_input_make_an_empty_kernel(
    tmp_path: Path, op: str, sizes: tuple[int, ...], kernel: list[int]
) -> None:
    dims, out = ",".join(map(str, sizes)), ",".join("abc"[: len(sizes)])
    m = model(f"(float[N,8,{dims}] x) => (float[n,f,{out}] y) {{ y = {op}<kernel_shape = {kernel}>(x) }}")
    agrees(tmp_path, m, {"x": floats(1, 8, *sizes)})


def test_a_chain_of_products_with_no_columns_is_an_empty_kernel(tmp_path: Path) -> None:
    m = model(
        """(float[N,4,8] x, float[N,8,6] k, float[N,6,0] v) => (float[a,b,c] y) {
        q = MatMul(x, k)  s = Softmax<axis = 2>(q)  y = MatMul(s, v) }"""
    )
    agrees(tmp_path, m, {"x": floats(2, 4, 8), "k": floats(2, 8, 6), "v": floats(2, 6, 0)})


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_padding_an_empty_tensor_needs_no_element_to_repeat(tmp_path: Path, mode: str, known: bool) -> None:
    """An empty dimension stays empty, one beside it takes any size."""
    given, fixed = ("", "<int64[4] p = {-1,2,1,-1}>") if known else (", int64[4] p", "")
    m = model(f'(float[N,M] x{given}) => (float[a,b] y) {fixed} {{ v = Pad<mode = "{mode}">(x, p)  y = Exp(v) }}')
    p = {} if known else {"p": np.array([-1, 2, 1, -1])}
    agrees(tmp_path, m, *({"x": floats(*shape), **p} for shape in [(0, 1), (0, 5), (3, 5)]))


@pytest.mark.parametrize("shape", [(0, 2), (1, 0), (3, 4)])
def test_padding_an_empty_dimension_with_elements_stays_an_error(tmp_path: Path, shape: tuple[int, int]) -> None:
    m = model('(float[N,M] x) => (float[a,b] y) <int64[4] p = {1,0,0,-1}> { y = Pad<mode = "edge">(x, p) }')
    written = onnxfuse.optimize(m, verify=False).save(tmp_path / "out.onnx")
    assert written.library is not None
    session = ort.session(written.model, libraries=[written.library])
    if 0 not in shape:
        assert ort.run(session, {"x": floats(*shape)})["y"].shape == (4, 3)
        return
    with pytest.raises(ort.ORT_ERRORS):
        ort.run(session, {"x": floats(*shape)})


@pytest.mark.parametrize("dims", ["N,N", "2,2", "5,2"])
@pytest.mark.parametrize(
    ("op", "name"),
    [("MaxPool", "float"), ("MaxPool", "double"), ("MaxPool", "int8"), ("AveragePool", "float"), ("LpPool", "float")],
)
def test_a_dilated_window_that_steps_over_its_input(tmp_path: Path, op: str, name: str, dims: str) -> None:
    """The mean of no element is 0 in onnxruntime, the maximum the smallest finite number."""
    attrs = "kernel_shape = [2, 2], dilations = [3, 3], pads = [1, 1, 1, 1]"
    m = model(f"({name}[1,2,{dims}] x) => ({name}[a,b,c,d] y) {{ y = {op}<{attrs}>(x) }}", opset=19)
    sizes = [(2, 2), (3, 3), (7, 7)] if "N" in dims else [(int(dims[0]), int(dims[2]))]
    kind = {"float": np.float32, "double": np.float64, "int8": np.int8}[name]
    agrees(tmp_path, m, *({"x": np.arange(2 * h * w).astype(kind).reshape(1, 2, h, w)} for h, w in sizes))


# --- steps backwards -------------------------------------------------------------------------------------------------
BACKWARDS = {
    "known": ("", "int64[1] e = {END}, int64[1] s = {-2}"),
    "end of a run": (", int64[1] e", "int64[1] s = {-2}"),
    "step of a run": (", int64[1] e, int64[1] s", ""),
}


@pytest.mark.parametrize("known", BACKWARDS)
@pytest.mark.parametrize("dim", ["5", "N"])
def test_the_largest_end_is_no_end_also_backwards(tmp_path: Path, dim: str, known: str) -> None:
    """Onnxruntime takes the largest number of either width for no end; any other stops at the last element."""
    inputs, fixed = BACKWARDS[known]
    ends = [2**31 - 1, 2**63 - 1, 2**31 - 2, 2**31, -1, -(2**63)]
    for end in ends if not inputs else [ends[0]]:
        given = f"int64[1] b = {{3}}, int64[1] a = {{0}}, {fixed}".replace("END", str(end)).rstrip(", ")
        m = model(f"(float[{dim}] x{inputs}) => (float[k] y) <{given}> {{ v = Slice(x, b, e, a, s)  y = Neg(v) }}")
        runs = [(x, n) for x in (1, 5) if dim == "N" or x == 5 for n in (ends if inputs else [end])]
        feeds = [{"x": floats(x), "e": np.array([n]), "s": np.array([-2])} for x, n in runs]
        agrees(tmp_path, m, *({i.name: f[i.name] for i in m.graph.input} for f in feeds))


# --- names left out --------------------------------------------------------------------------------------------------
def test_a_loop_that_carries_nothing_keeps_its_empty_condition(tmp_path: Path) -> None:
    # Its two first inputs may be empty and have to be there.
    m = model(
        """(float[N] x) => (float[a,b] y) <int64 trips = {3}> { y = Loop(trips, "") <body = inner
        (int64 i, bool c) => (bool again, float[n] e) { again = Identity(c)  e = Exp(x) }> }"""
    )
    agrees(tmp_path, m, {"x": floats(4)})
