"""Windows over planes agree with numpy: depthwise convolution and pooling, at every border."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Load, apply, cast, load, loads, substitute, sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.parse import parse_kernel
from onnxfuse.ir.plan import Plan
from onnxfuse.ir.types import tensor
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.target import Target, by_name
from onnxfuse.templates.window import WINDOW
from tests.templates.contractions import Setting, convolve, element, matmul, pool, within

NATIVE = by_name("native", host_features())
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)
NARROW = by_name("x86-64-v2")
N, C, H, W = (sym(n) for n in "NCHW")
ONE = [(1, 1), (1, 1)]
SHAPES = [(2, 14, 15), (1, 1, 1), (3, 2, 70), (1, 37, 33), (0, 5, 5), (1, 5, 1000)]


def compiled(kernel: Kernel, target: Target = NATIVE) -> Jitted:
    found = WINDOW.propose(kernel, target)
    assert not isinstance(found, Refusal), found
    return jit(Plan(kernel, found[0], WINDOW), target)


def check_depthwise(s: Setting, target: Target = NATIVE, const: bool = True) -> None:
    run = compiled(s.kernel(N, s.groups, [H, W], s.groups, const=const), target)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((s.groups, 1, *s.window)).astype(np.float32)
    for n, h, width in SHAPES:
        reach = [d * (k - 1) + 1 - sum(p) for d, k, p in zip(s.dilations, s.window, s.pads, strict=True)]
        if h < reach[0] or width < reach[1]:
            continue
        x = rng.standard_normal((n, s.groups, h, width)).astype(np.float32)
        within(run([x, w])[0], x, w, s)


@pytest.mark.parametrize(
    ("window", "strides", "dilations", "pads"),
    [
        ([3, 3], [1, 1], [1, 1], ONE),
        ([3, 3], [2, 2], [1, 1], ONE),
        ([3, 3], [1, 1], [1, 1], [(0, 0), (0, 0)]),
        ([3, 3], [2, 2], [1, 1], [(0, 1), (0, 1)]),
        ([3, 3], [3, 3], [1, 1], ONE),
        ([5, 3], [1, 2], [1, 2], [(2, 1), (0, 3)]),
        ([3, 5], [2, 1], [3, 2], [(3, 3), (4, 4)]),
        ([7, 7], [1, 1], [1, 1], [(3, 3), (3, 3)]),
        ([1, 3], [1, 1], [1, 1], [(0, 0), (1, 1)]),
        ([3, 1], [1, 1], [1, 1], [(1, 1), (0, 0)]),
    ],
)
def test_depthwise(window: list[int], strides: list[int], dilations: list[int], pads: list[tuple[int, int]]) -> None:
    check_depthwise(Setting(window, strides, dilations, pads, 3))


@pytest.mark.parametrize("target", [WIDE, NARROW], ids=["512 bits", "128 bits"])
@pytest.mark.parametrize("stride", [1, 2])
def test_other_vector_widths(target: Target, stride: int) -> None:
    check_depthwise(Setting([3, 3], [stride] * 2, [1, 1], ONE, 2), target)


def test_weights_that_are_no_constant() -> None:
    check_depthwise(Setting([3, 3], [1, 1], [1, 1], ONE, 2), const=False)


def test_static_sizes() -> None:
    s = Setting([3, 3], [2, 2], [1, 1], ONE, 4)
    x, w = (np.random.default_rng(1).standard_normal(d).astype(np.float32) for d in ((1, 4, 20, 22), (4, 1, 3, 3)))
    within(compiled(s.kernel(1, 4, [20, 22], 4))([x, w])[0], x, w, s)


@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits"])
@pytest.mark.parametrize("stride", [1, 2])
def test_lines_of_every_static_width(stride: int, target: Target) -> None:
    rng = np.random.default_rng(4)
    for width in (4, 5, 7, 9, 14, 16, 23, 31, 33):
        s = Setting([3, 3], [stride] * 2, [1, 1], ONE, 2)
        kernel = s.kernel(1, 2, [9, width * stride], 2)
        x, w = (rng.standard_normal(d).astype(np.float32) for d in ((1, 2, 9, width * stride), (2, 1, 3, 3)))
        within(compiled(kernel, target)([x, w])[0], x, w, s)


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_outside_of_the_image_is_touched(stride: int, side: str) -> None:
    rng = np.random.default_rng(5)
    s = Setting([3, 3], [stride] * 2, [1, 1], ONE, 3)
    for height, width in ((5, 6), (9, 33), (20, 16), (40, 200)):
        for n, size in ((2, [height, width]), (N, [H, W])):
            x, w = (rng.standard_normal(d).astype(np.float32) for d in ((2, 3, height, width), (3, 1, 3, 3)))
            within(compiled(s.kernel(n, 3, size, 3))([x, w], fence=side)[0], x, w, s)


@pytest.mark.parametrize("fence", ["start", "end"])
@pytest.mark.parametrize("stride", [1, 2])
def test_prologue_under_the_guard(stride: int, fence: str) -> None:
    """Batch normalisation and relu before a depthwise convolution: padding stays zero."""
    scale = Value("scale", tensor(DType.F32, [4]))

    def prologue(x: Expr) -> Expr:
        assert isinstance(x, Load)
        return apply("max", x * element(scale, x.index[1]) + 0.5, 0.0)

    s = Setting([3, 3], [stride] * 2, [1, 1], ONE, 4)
    run = compiled(s.kernel(N, 4, [H, W], 4, prologue=prologue, extra=[scale]))
    rng = np.random.default_rng(6)
    w, f = rng.standard_normal((4, 1, 3, 3)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    for shape in ((2, 4, 9, 30), (1, 4, 3, 5), (1, 4, 17, 64)):
        x = rng.standard_normal(shape).astype(np.float32)
        got = run([x, w, f], fence=fence)[0]
        within(got, np.maximum(x * f[:, None, None] + np.float32(0.5), 0), w, s)


@pytest.mark.parametrize("stride", [1, 2])
def test_half_precision_accumulates_in_f32(stride: int) -> None:
    s = Setting([3, 3], [stride] * 2, [1, 1], ONE, 3)
    kernel = s.kernel(N, 3, [H, W], 3)
    x16 = Value("X", tensor(DType.F16, kernel.inputs[0].tensor.shape))
    kernel = retyped(kernel, kernel.inputs[0], x16)
    rng = np.random.default_rng(7)
    w = rng.standard_normal((3, 1, 3, 3)).astype(np.float32)
    x = rng.standard_normal((2, 3, 11, 37)).astype(np.float16)
    within(compiled(kernel)([x, w], fence="end")[0], x.astype(np.float32), w, s)


def retyped(kernel: Kernel, old: Value, new: Value) -> Kernel:
    """The kernel with an input of another dtype, converted where it is read."""
    stage = kernel.stages[0]
    assert stage.reduce_body is not None
    reads = [ld for ld in loads(stage.reduce_body) if ld.source is old]
    mapping: dict[Expr, Expr] = {ld: cast(load(new, ld.index, new.tensor.dtype), old.tensor.dtype) for ld in reads}
    inputs = tuple(new if v is old else v for v in kernel.inputs)
    stages = (replace(stage, reduce_body=substitute(stage.reduce_body, mapping)), *kernel.stages[1:])
    symbols = tuple(replace(d, value=new) if d.value is old else d for d in kernel.dims)
    return replace(kernel, inputs=inputs, stages=stages, dims=symbols)


def test_one_dimension() -> None:
    s = Setting([4], [1], [2], [(6, 0)], 3)
    run = compiled(s.kernel(N, 3, [W], 3))
    rng = np.random.default_rng(2)
    w = rng.standard_normal((3, 1, 4)).astype(np.float32)
    for n, length in [(1, 1), (2, 19), (1, 400)]:
        x = rng.standard_normal((n, 3, length)).astype(np.float32)
        within(run([x, w])[0], x, w, s)


@pytest.mark.parametrize("expensive", [False, True])
def test_epilogue(expensive: bool) -> None:
    bias, rest = Value("bias", tensor(DType.F32, [3])), Value("rest", tensor(DType.F32, [N, 3, H, W]))

    def epilogue(x: Expr, at: tuple[Expr, ...]) -> Expr:
        y = x + element(bias, at[1])
        act = y / (1.0 + apply("exp", -y)) if expensive else apply("max", y, 0.0)
        return act + element(rest, *at)

    s = Setting([3, 3], [1, 1], [1, 1], ONE, 3)
    run = compiled(s.kernel(N, 3, [H, W], 3, epilogue=epilogue, extra=[bias, rest]))
    rng = np.random.default_rng(3)
    w, b = rng.standard_normal((3, 1, 3, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    for n, h, width in [(2, 9, 21), (1, 1, 3)]:
        x, r = (rng.standard_normal((n, 3, h, width)).astype(np.float32) for _ in range(2))
        y = convolve(x, w, s) + b[:, None, None]
        want = (y / (1 + np.exp(-y)) if expensive else np.maximum(y, 0)) + r
        np.testing.assert_allclose(run([x, w, b, r])[0], want, rtol=1e-4, atol=1e-5)


def pooled(x: np.ndarray, s: Setting, combine: str) -> np.ndarray:
    pad = -np.inf if combine == "max" else 0.0
    x = np.pad(x, [(0, 0), (0, 0), *s.pads], constant_values=pad)
    outs = [(x.shape[2 + i] - s.dilations[i] * (s.window[i] - 1) - 1) // s.strides[i] + 1 for i in range(2)]
    parts = []
    for ky, kx in np.ndindex(*s.window):
        y0, x0 = ky * s.dilations[0], kx * s.dilations[1]
        parts.append(
            x[:, :, y0 : y0 + (outs[0] - 1) * s.strides[0] + 1 : s.strides[0],
              x0 : x0 + (outs[1] - 1) * s.strides[1] + 1 : s.strides[1]]
        )  # fmt: skip
    return np.max(parts, axis=0) if combine == "max" else np.sum(parts, axis=0, dtype=np.float64)


@pytest.mark.parametrize("combine", ["max", "add"])
@pytest.mark.parametrize(
    ("window", "strides", "pads"),
    [
        ([3, 3], [2, 2], ONE),
        ([2, 2], [2, 2], [(0, 0), (0, 0)]),
        ([3, 3], [1, 1], ONE),
        ([3, 2], [1, 3], [(1, 1), (0, 1)]),
    ],
)
def test_pools(combine: str, window: list[int], strides: list[int], pads: list[tuple[int, int]]) -> None:
    s = Setting(window, strides, [1, 1], pads)
    run = compiled(pool(N, C, [H, W], window, combine=combine, strides=strides, pads=pads))
    rng = np.random.default_rng(4)
    for n, h, width in [(2, 14, 15), (1, 3, 3), (1, 40, 70)]:
        x = rng.standard_normal((n, 3, h, width)).astype(np.float32)
        want = pooled(x, s, combine)
        np.testing.assert_allclose(run([x])[0], want, rtol=0 if combine == "max" else 1e-5, atol=1e-6)


def test_nan_wins_in_a_max_pool() -> None:
    x = np.zeros((1, 1, 8, 20), np.float32)
    x[0, 0, 3, 7] = np.nan
    got = compiled(pool(1, 1, [8, 20], [3, 3], pads=ONE))([x])[0]
    assert np.isnan(got).sum() == 9


def test_a_matrix_product_is_no_window() -> None:
    found = WINDOW.propose(matmul([], 64, 64, 64), NATIVE)
    assert isinstance(found, Refusal)


GUARDED_SQUARE = """kernel "lppool"(%x: f32[1,3,28,28]) -> (%y: f32[1,3,28,28]) outer [c<3, y<28, x<28] {
  stage [] add[r<2, s<2] init 0.0 acc f32: where(y + r < 28 & x + s < 28, %x[0, c, y + r, x + s], 0.0) * where(y + r < 28 & x + s < 28, %x[0, c, y + r, x + s], 0.0) {
    %y[0, c, y, x] = sqrt(acc)
  }
}"""  # noqa: E501


def test_a_condition_on_the_tap_inside_the_value_is_refused() -> None:
    """Taps are unrolled over copied lines: nothing but the guard may ask where the tap lies."""
    found = WINDOW.propose(parse_kernel(GUARDED_SQUARE), NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == "WINDOW_FORM"
