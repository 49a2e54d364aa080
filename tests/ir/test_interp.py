import numpy as np
import pytest

from onnxfuse.errors import IRError, UsageError
from onnxfuse.ir import interp
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, eq, i64, load, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.interp import Block, Env, convert, eval_expr, run_kernel, run_loops
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.parse import parse_kernel, parse_loops
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import tensor
from tests.ir.samples import KERNELS, LOOPS

F32 = DType.F32
LIMITS = (interp.LIMIT, 1000, 17)


@pytest.fixture(params=LIMITS, ids=lambda n: f"blocks_of_{n}")
def limit(request, monkeypatch):
    """The block size must not matter."""
    monkeypatch.setattr(interp, "LIMIT", request.param)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("n", [0, 1, 5])
def test_loops_mean_what_they_say(rng, n):
    x = rng.standard_normal((n, 256)).astype(np.float32)
    got = run_loops(parse_loops(LOOPS[0]), {"x": x})
    np.testing.assert_allclose(got["y"], softmax(x), rtol=2e-6)
    assert got["y"].dtype == np.float32


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("n", [0, 1, 4])
def test_kernels_mean_the_same_as_loops(rng, n):
    x = rng.standard_normal((2 * n + 1, 256)).astype(np.float32)
    (got,) = run_kernel(parse_kernel(KERNELS[1]), [x])
    np.testing.assert_allclose(got, softmax(x), rtol=2e-6)


@pytest.mark.usefixtures("limit")
def test_padding_casting_and_opaque_nodes(rng):
    x = rng.standard_normal((4, 3, 8)).astype(np.float16)
    k = np.array([5, 0, 7, 9], np.int64)
    w = np.array([1.0, 0.5, -0.0], np.float32)
    loops = parse_loops(LOOPS[1])
    got = run_loops(loops, {"x": x, "k": k}, opaque=lambda node, ins: [np.array(np.nonzero(ins[0])).repeat(2, 0), None])
    mean = (x.astype(np.float32).sum(-1) * np.float32(0.125) * w).astype(np.float16)
    np.testing.assert_array_equal(got["m"], mean)
    np.testing.assert_array_equal(got["p"], np.pad(x[:, 0], ((0, 0), (1, 1))))
    np.testing.assert_array_equal(got["g"], [5 * (0 + 1), 7 * (0 + 1), 9 * (1 + 1)])
    with pytest.raises(IRError, match="IR_OPAQUE"):
        run_loops(loops, {"x": x, "k": k})


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("m", [1, 3])
def test_run_time_broadcast(rng, m):
    a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((3, 64), (64, 32), (m, 32)))
    (got,) = run_kernel(parse_kernel(KERNELS[2]), [a, b, c])
    np.testing.assert_allclose(got, a @ b + c, rtol=1e-4, atol=1e-4)


def test_kernels_refuse_shapes_they_were_not_made_for():
    gemm, rows = parse_kernel(KERNELS[2]), parse_kernel(KERNELS[1])
    good = [np.zeros(s, np.float32) for s in ((3, 64), (64, 32), (3, 32))]
    with pytest.raises(UsageError, match="%b axis 1 is 31"):
        run_kernel(gemm, [good[0], np.zeros((64, 31), np.float32), good[2]])
    with pytest.raises(UsageError, match="axis 0: 4 is not"):
        run_kernel(rows, [np.zeros((4, 256), np.float32)])


def test_a_store_outside_its_tensor_is_an_error():
    text = 'kernel "k"(%x: f32[4]) -> (%y: f32[4]) outer [i<4] {\n stage [] {\n %y[i + 1] = %x[i]\n }\n}'
    with pytest.raises(IRError, match="IR_STORE"):
        run_kernel(parse_kernel(text), [np.zeros(4, np.float32)])


def test_a_load_outside_its_tensor_never_traps():
    x, empty = Value("x", tensor(F32, (4,))), Value("e", tensor(F32, (0,)))
    axis = Axis("i", 8)
    i = var(axis)
    arrays = {x: np.arange(4, dtype=np.float32), empty: np.zeros(0, np.float32)}
    env = Env(Block((axis,), ((0, 8),)), arrays=arrays)
    e = where((i >= 2) & (i < 6), load(x, (i - 2,), F32), where(eq(i, 7), 9.0, load(empty, (i,), F32)))
    np.testing.assert_array_equal(eval_expr(e, env), [0, 0, 0, 1, 2, 3, 0, 9])


def test_what_is_not_bound_is_named():
    x = Value("x", tensor(F32, (4,)))
    for e, code in ((var(Axis("i", 4)), "IR_AXIS"), (sym("N") + 1, "IR_SYM"), (load(x, (i64(0),), F32), "IR_VALUE")):
        with pytest.raises(IRError, match=code):
            eval_expr(e, Env())


def test_views_and_gathers_agree(rng):
    x = Value("x", tensor(F32, (3, 4, 5)))
    data = rng.standard_normal((3, 4, 5)).astype(np.float32)
    a, b = Axis("a", 5), Axis("b", 3)
    env = Env(Block((a, b), ((1, 4), (0, 3))), arrays={x: data})
    plain = eval_expr(load(x, (var(b), i64(2), var(a)), F32), env)
    gather = eval_expr(load(x, (var(b), apply("min", var(b) * 0 + 2, 3), var(a) + var(b) * 0), F32), env)
    np.testing.assert_array_equal(plain, data[:, 2, 1:4].T)
    np.testing.assert_array_equal(gather, plain)


NAN, INF = float("nan"), float("inf")
I32_MIN, I64_MIN = -(2**31), -(2**63)


@pytest.mark.parametrize(
    ("dst", "values", "expected"),
    [
        (DType.I32, [1.9, -1.9, NAN, INF, -INF, 3e9], [1, -1, I32_MIN, I32_MIN, I32_MIN, I32_MIN]),
        (DType.I64, [1.9, -1.9, NAN, INF, -INF, 1e19], [1, -1, I64_MIN, I64_MIN, I64_MIN, I64_MIN]),
        (DType.I8, [127.9, 128.0, -129.0, 300.0, NAN, 3e9], [127, -128, 127, 44, 0, 0]),
        (DType.U8, [255.9, 256.0, -1.0, 300.0, NAN, 3e9], [255, 0, 255, 44, 0, 0]),
        (DType.U32, [3e9, -1.0, 5e9, NAN], [3_000_000_000, 2**32 - 1, 0, 2**31]),
        (DType.U64, [2.0**63, -1.0, 3.0], [2**63, 2**64 - 1, 3]),
        (DType.BOOL, [0.0, -0.0, 1e-30, NAN], [False, False, True, True]),
    ],
    ids=str,
)
def test_casts_of_floats_are_those_of_the_machine(dst, values, expected):
    got = convert(np.array(values, np.float32), F32, dst)
    assert got.dtype == dst.numpy
    assert got.tolist() == expected


def test_casts_round_to_nearest_even_and_integers_wrap():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2**-25, -0.0], np.float32)
    half = convert(x, F32, DType.F16)
    np.testing.assert_array_equal(half.astype(np.float64), [1.0, 1 + 2**-9, 65504.0, np.inf, 0.0, -0.0])
    brain = convert(np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32), F32, DType.BF16)
    np.testing.assert_array_equal(brain.astype(np.float64), [1.0, 1 + 2**-6])
    ints = np.array([300, -1, 2**40 + 5], np.int64)
    assert convert(ints, DType.I64, DType.U8).tolist() == [44, 255, 5]
    assert convert(ints, DType.I64, DType.BOOL).tolist() == [True] * 3


def test_integer_arithmetic_never_traps():
    a, b = np.array([7, -7, 7, -7, 0], np.int32), np.array([2, 2, -2, 0, 0], np.int32)
    low = np.array([I32_MIN], np.int32)

    def run(name, x, y):
        return PRIMS[name].numpy(x, y).tolist()

    assert run("idiv", a, b) == [3, -3, -3, 0, 0]
    assert run("floordiv", a, b) == [3, -4, -4, 0, 0]
    assert run("mod", a, b) == [1, 1, -1, 0, 0]
    assert run("fmod", a, b) == [1, -1, 1, 0, 0]
    assert run("idiv", low, np.array([-1], np.int32)) == [I32_MIN]
    assert run("pow", np.array([2, 2, -1, -1, 1, 0], np.int32), np.array([10, -1, -3, -2, -5, 0], np.int32)) == [
        1024, 0, -1, 1, 1, 1,
    ]  # fmt: skip
    assert run("shl", np.array([1, 1], np.uint8), np.array([7, 8], np.uint8)) == [128, 0]
    assert run("shr", np.array([255, 255], np.uint8), np.array([7, 9], np.uint8)) == [1, 0]


def test_half_sums_accumulate_in_f32():
    text = 'loops "s"(%x: f16[4096]) -> (%y) {\n %y[]: f16 = add[r<4096] init 0.0 acc f32: f32(%x[r]) -> f16(acc)\n}'
    got = run_loops(parse_loops(text), {"x": np.ones(4096, np.float16)})
    assert got["y"] == 4096.0


def test_reductions_over_nothing_give_the_initial_value():
    text = (
        'loops "s"(%x: f32[N]) -> (%y, %b) {\n %y[]: f32 = max[r<N] init -inf acc f32: %x[r]\n'
        " %b[]: bool = and[r<N] init true acc bool: 0.0 < %x[r]\n}"
    )
    got = run_loops(parse_loops(text), {"x": np.zeros(0, np.float32)})
    assert got["y"] == -np.inf
    assert got["b"]


def test_max_keeps_nan():
    text = 'loops "s"(%x: f32[N]) -> (%y) {\n %y[]: f32 = max[r<N] init -inf acc f32: %x[r]\n}'
    got = run_loops(parse_loops(text), {"x": np.array([1, np.nan, 3], np.float32)})
    assert np.isnan(got["y"])
