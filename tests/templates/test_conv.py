"""Convolutions by the blocked matrix product agree with numpy: every rank, stride, padding and run-time size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, i64, lit, sym, var, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Plan
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import tensor
from onnxfuse.runtime.jit import jit
from onnxfuse.target import by_name
from onnxfuse.templates.gemm import GEMM
from tests.templates.contractions import Setting, anchored, convolve, element, within

NATIVE = by_name("native", host_features())
N, H, W = (sym(n) for n in "NHW")
Ints = list[int]
ONE = [(1, 1), (1, 1)]


def check(kernel: Kernel, s: Setting, shapes: Sequence[tuple[int, ...]], seed: int = 0) -> None:
    """Run the kernel for each input shape and compare with numpy."""
    found = GEMM.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal), found
    run = jit(Plan(kernel, found[0], GEMM), NATIVE)
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(kernel.inputs[1].tensor.shape).astype(np.float32)
    for shape in shapes:
        x = rng.standard_normal(shape).astype(np.float32)
        within(run([x, w])[0], x, w, s)


@pytest.mark.parametrize(
    ("window", "strides", "dilations", "pads"),
    [
        ([3, 3], [1, 1], [1, 1], [(0, 0), (0, 0)]),
        ([3, 3], [1, 1], [1, 1], ONE),
        ([3, 3], [2, 2], [1, 1], ONE),
        ([3, 3], [3, 2], [1, 1], [(2, 0), (0, 2)]),
        ([5, 3], [1, 2], [2, 3], [(1, 0), (2, 1)]),
        ([1, 1], [1, 1], [1, 1], [(0, 0), (0, 0)]),
        ([1, 1], [2, 2], [1, 1], [(0, 0), (0, 0)]),
        ([1, 7], [1, 1], [1, 1], [(0, 0), (3, 3)]),
        ([7, 7], [2, 2], [1, 1], [(3, 3), (3, 3)]),
    ],
)
def test_two_dimensions(
    window: list[int], strides: list[int], dilations: list[int], pads: list[tuple[int, int]]
) -> None:
    s = Setting(window, strides, dilations, pads)
    check(s.kernel(N, 5, [H, W], 13), s, [(2, 5, 14, 15), (1, 5, 12, 45), (0, 5, 12, 13)])


@pytest.mark.parametrize("stride", [1, 2])
def test_tiny_and_long_images(stride: int) -> None:
    s = Setting([3, 3], [stride] * 2, [1, 1], ONE)
    check(s.kernel(N, 7, [H, W], 20), s, [(1, 7, 1, 1), (3, 7, 2, 1), (1, 7, 1, 200), (1, 7, 150, 2), (2, 7, 3, 8)])


@pytest.mark.parametrize("pad", [0, 32])
def test_a_window_longer_than_a_run_time_line_is_taken_to_be(pad: int) -> None:
    s = Setting([256], [128], [1], [(pad, pad)])
    kernel = s.kernel(N, 1, [W], 258)
    found = GEMM.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal)
    assert found[0].cost > 0
    check(kernel, s, [(1, 1, 640), (2, 1, 256)])


def test_static_sizes_and_weights_that_are_no_constant() -> None:
    s = Setting([3, 3], [1, 1], [1, 1], ONE)
    check(s.kernel(2, 6, [10, 11], 16, const=False), s, [(2, 6, 10, 11)])


@pytest.mark.parametrize(("channels", "features", "size"), [(8, 96, (61, 53)), (24, 61, (75, 69)), (30, 96, (1, 4099))])
def test_outputs_larger_than_the_cache_are_written_line_after_line(
    channels: int, features: int, size: tuple[int, int]
) -> None:
    """Of few channels: every panel of the input is packed once and serves all rows."""
    s = Setting([1, 1], [1, 1], [1, 1], [(0, 0), (0, 0)])
    check(s.kernel(1, channels, list(size), features), s, [(1, channels, *size)])


def test_many_channels_take_several_blocks_of_k() -> None:
    s = Setting([3, 3], [1, 1], [1, 1], ONE)
    check(s.kernel(1, 70, [14, 14], 300), s, [(1, 70, 14, 14)])


@pytest.mark.parametrize("side", ["start", "end"])
@pytest.mark.parametrize(
    ("window", "stride", "pad", "shape"),
    [
        (1, 1, 0, (2, 12, 9, 11)),
        (1, 2, 0, (1, 12, 9, 12)),
        (3, 1, 1, (2, 12, 9, 11)),
        (3, 2, 1, (1, 12, 14, 27)),
        (3, 1, 0, (1, 12, 7, 7)),
        (7, 2, 3, (1, 3, 30, 33)),
    ],
)
def test_nothing_outside_of_the_image_is_touched(
    window: int, stride: int, pad: int, shape: tuple[int, ...], side: str
) -> None:
    s = Setting([window] * 2, [stride] * 2, [1, 1], [(pad, pad)] * 2)
    rng = np.random.default_rng(3)
    for n, size in ((shape[0], shape[2:]), (N, (H, W))):
        kernel = s.kernel(n, shape[1], size, 40)
        found = GEMM.propose(kernel, NATIVE)
        assert not isinstance(found, Refusal), found
        run = jit(Plan(kernel, found[0], GEMM), NATIVE)
        x = rng.standard_normal(shape).astype(np.float32)
        w = rng.standard_normal(kernel.inputs[1].tensor.shape).astype(np.float32)
        within(run([x, w], fence=side)[0], x, w, s)


@pytest.mark.parametrize("features", [16, 40, 300])
def test_pointwise_convolutions_of_static_size(features: int) -> None:
    s = Setting([1, 1], [1, 1], [1, 1], [(0, 0)] * 2)
    for size in ((7, 7), (16, 16), (14, 14), (32, 32)):
        check(s.kernel(2, 70, size, features), s, [(2, 70, *size)])
    check(s.kernel(1, 300, [9, 9], features), s, [(1, 300, 9, 9)])


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    s = Setting([3, 2, 3][:rank], [1, 2, 1][:rank], [1] * rank, [(1, 1), (0, 1), (1, 2)][:rank])
    size = [H, 7, 8][:rank]
    check(s.kernel(N, 5, size, 12), s, [(2, 5, 15, 7, 8)[: rank + 2], (1, 5, 70, 7, 8)[: rank + 2]])


@pytest.mark.parametrize(("channels", "features", "groups"), [(24, 32, 4), (8, 4, 2), (6, 6, 3), (4, 12, 4)])
def test_groups(channels: int, features: int, groups: int) -> None:
    s = Setting([3, 3], [1, 1], [1, 1], ONE, groups)
    check(s.kernel(N, channels, [H, W], features), s, [(2, channels, 14, 15)])


def test_epilogue_bias_residual_relu() -> None:
    bias = Value("bias", tensor(DType.F32, [20]))
    rest = Value("rest", tensor(DType.F32, [N, 20, H, W]))

    def epilogue(x: Expr, at: tuple[Expr, ...]) -> Expr:
        y = x + element(bias, at[1]) + element(rest, *at)
        return where(y > 0, y, lit(0, DType.F32))

    s = Setting([3, 3], [1, 1], [1, 1], ONE)
    kernel = s.kernel(N, 8, [H, W], 20, epilogue=epilogue, extra=[bias, rest])
    found = GEMM.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal)
    run = jit(Plan(kernel, found[0], GEMM), NATIVE)
    rng = np.random.default_rng(1)
    w, b = rng.standard_normal((20, 8, 3, 3)).astype(np.float32), rng.standard_normal(20).astype(np.float32)
    for shape in [(1, 8, 5, 5), (2, 8, 9, 30)]:
        x = rng.standard_normal(shape).astype(np.float32)
        r = rng.standard_normal((shape[0], 20, *shape[2:])).astype(np.float32)
        want = np.maximum(convolve(x, w, s) + b[:, None, None] + r, 0)
        np.testing.assert_allclose(run([x, w, b, r])[0], want, rtol=1e-4, atol=1e-4)


def test_prologue_under_the_guard() -> None:
    """Batch normalisation and relu before a convolution: padding stays zero."""
    scale = Value("scale", tensor(DType.F32, [8]))
    s = Setting([3, 3], [1, 1], [1, 1], ONE)

    def prologue(x: Expr) -> Expr:
        return apply("max", x * 2.0 + 0.5, 0.0)

    kernel = s.kernel(N, 8, [H, W], 20, prologue=prologue, extra=[scale])
    found = GEMM.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal)
    rng = np.random.default_rng(2)
    x, w = (rng.standard_normal(d).astype(np.float32) for d in ((2, 8, 9, 30), (20, 8, 3, 3)))
    got = jit(Plan(kernel, found[0], GEMM), NATIVE)([x, w, np.ones(8, np.float32)])[0]
    within(got, np.maximum(x * 2 + np.float32(0.5), 0), w, s)


@pytest.mark.parametrize(
    ("k", "stride", "pad", "groups", "extra"),
    [
        (3, 1, 1, 1, 0), (3, 2, 1, 1, 0), (3, 2, 0, 1, 0), (3, 3, 1, 1, 0), (3, 2, 1, 2, 0),
        (2, 2, 0, 1, 0), (4, 2, 1, 1, 0), (3, 2, 1, 1, 1), (5, 2, 2, 2, 1), (6, 3, 2, 1, 2),
        (8, 4, 2, 1, 0), (4, 2, 2, 1, 0),
    ],
)  # fmt: skip
def test_transposed(k: int, stride: int, pad: int, groups: int, extra: int) -> None:
    """Where the stride divides the output, axes are split by phase; else the general packing runs."""
    c, f = 6, 10
    fg, cg = f // groups, c // groups
    x, w = Value("X", tensor(DType.F32, [N, c, H, W])), Value("W", tensor(DType.F32, [c, fg, k, k]))
    outs = [simplify((d - 1) * stride + (k - 2 * pad + extra)) for d in (H, W)]
    an, af, ay, ax = Axis("n", N), Axis("f", f), Axis("y", outs[0]), Axis("x", outs[1])
    ac, ky, kx = Axis("c", cg), Axis("ky", k), Axis("kx", k)
    channel: Expr = var(ac) if groups == 1 else (var(af) // i64(fg)) * cg + var(ac)
    feature: Expr = var(af) if groups == 1 else var(af) % i64(fg)
    numer = [simplify(var(o) + pad - var(t)) for o, t in ((ay, ky), (ax, kx))]
    at = [simplify(n // i64(stride)) for n in numer]
    inside = (i64(0) <= at[0]) & (at[0] < H) & (i64(0) <= at[1]) & (at[1] < W)
    for n in numer:
        inside = inside & apply("eq", simplify(n % i64(stride)), i64(0))
    data = where(simplify(inside), element(x, var(an), channel, *at), lit(0, DType.F32))
    body = data * element(w, channel, feature, var(ky), var(kx))
    out = Value("Y", tensor(DType.F32, [N, f, *outs]))
    kernel = anchored("convt", [x, w], [an, af, ay, ax], [ac, ky, kx], body, out, None, [w])
    found = GEMM.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal), found
    rng = np.random.default_rng(3)
    xs, ws = (rng.standard_normal(d).astype(np.float32) for d in ((2, c, 7, 9), (c, fg, k, k)))
    got = jit(Plan(kernel, found[0], GEMM), NATIVE)([xs, ws])[0]
    full = np.zeros((2, f, 6 * stride + k + extra, 8 * stride + k + extra))
    for g in range(groups):
        part = np.einsum(
            "nchw,cfyx->nfhwyx", xs[:, g * cg : (g + 1) * cg].astype(np.float64), ws[g * cg : (g + 1) * cg]
        )
        for i, j in np.ndindex(k, k):
            full[:, g * fg : (g + 1) * fg, i : i + 6 * stride + 1 : stride, j : j + 8 * stride + 1 : stride] += part[
                ..., i, j
            ]
    want = full[:, :, pad : full.shape[2] - pad, pad : full.shape[3] - pad]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_blocks_are_shared_or_not_by_the_run_time_size() -> None:
    """Few pixels: phase 0 packs for all blocks of features; many pixels: each task packs its own."""
    s = Setting([3, 3], [1, 1], [1, 1], ONE)
    check(s.kernel(N, 70, [H, W], 300), s, [(1, 70, 14, 14), (1, 70, 9, 100), (0, 70, 14, 14), (2, 70, 3, 3)])
