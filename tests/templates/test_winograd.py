"""Winograd convolution agrees with numpy: every border, tile remainder, vector width, epilogue and order of tasks.

Run as a module, prints the table of errors in docs/decisions/winograd.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, apply, lit, sym, where
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Plan, Schedule
from onnxfuse.ir.types import tensor
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.target import Target, by_name, with_cores
from onnxfuse.templates.gemm import GEMM
from onnxfuse.templates.winograd import WINOGRAD
from tests.templates.contractions import Setting, convolve, element

NATIVE = by_name("native", host_features())
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)
NARROW = by_name("x86-64-v2")
N, H, W = (sym(n) for n in "NHW")
ONE = [(1, 1), (1, 1)]
Pads = list[tuple[int, int]]
# Documented in docs/decisions/winograd.md: share of the outputs' magnitude.
ERROR = {4: 8e-6, 2: 1e-6}
SMALL = [(1, 1), (2, 7), (3, 4), (4, 3), (5, 11), (6, 8), (7, 2), (8, 9), (9, 5), (10, 10), (11, 6)]


LINES = [(1, 3), (3, 1), (1, 5), (5, 1)]


def setting(pads: Pads = ONE, window: tuple[int, ...] = (3, 3)) -> Setting:
    ones = [1] * len(window)
    return Setting(list(window), ones, ones, pads)


def halves(window: tuple[int, ...]) -> Pads:
    """The padding that keeps sizes."""
    return [(k // 2, k // 2) for k in window]


def proposed(kernel: Kernel, m: int, target: Target = NATIVE) -> Schedule:
    found = WINOGRAD.propose(kernel, target)
    assert not isinstance(found, Refusal), found
    return next(s for s in found if max(s.tile[:2]) == m)


def compiled(kernel: Kernel, m: int, target: Target = NATIVE) -> Jitted:
    return jit(Plan(kernel, proposed(kernel, m, target), WINOGRAD), target)


def near(got: np.ndarray, want: np.ndarray, terms: int, m: int) -> None:
    """Within the promised error; inputs and weights are of size one, so sums are of size sqrt(terms)."""
    assert got.shape == want.shape
    if got.size:
        size = max(float(np.abs(want).max()), terms**0.5)
        assert float(np.abs(got.astype(np.float64) - want).max()) <= ERROR[m] * size


def check(
    channels: int, features: int, m: int, shapes: Sequence[tuple[int, int, int]], pads: Pads = ONE,
    target: Target = NATIVE, kernel: Kernel | None = None, window: tuple[int, int] = (3, 3),
) -> None:  # fmt: skip
    """One kernel for all sizes, against numpy; also in another order of tasks, which must change nothing."""
    s = setting(pads, window)
    run = compiled(kernel or s.kernel(N, channels, [H, W], features), m, target)
    rng = np.random.default_rng(channels)
    w = rng.standard_normal((features, channels, *window)).astype(np.float32)
    for n, h, width in shapes:
        if h + sum(pads[0]) < window[0] or width + sum(pads[1]) < window[1]:
            continue
        x = rng.standard_normal((n, channels, h, width)).astype(np.float32)
        got = run([x, w])[0]
        near(got, convolve(x, w, s), channels * window[0] * window[1], m)
        np.testing.assert_array_equal(run([x, w], seed=n, shift=4)[0], got)


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize(("channels", "features"), [(1, 1), (3, 16), (16, 3), (65, 64)])
def test_every_remainder_of_tiles_and_features(channels: int, features: int, m: int) -> None:
    check(channels, features, m, [(1 + h % 3, h, w) for h, w in SMALL] + [(0, 8, 8), (1, 28, 28)])


@pytest.mark.parametrize("m", [4, 2])
def test_images_of_usual_nets(m: int) -> None:
    check(64, 65, m, [(1, 56, 56), (3, 14, 14), (2, 7, 7), (1, 3, 301)])


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize(
    "pads", [[(0, 0), (0, 0)], [(2, 1), (0, 2)], [(1, 2), (2, 0)], [(0, 1), (1, 0)], [(2, 2), (2, 2)], [(1, 5), (1, 7)]]
)
def test_padding(pads: Pads, m: int) -> None:
    check(4, 5, m, [(1, h + 1, w + 1) for h, w in SMALL] + [(2, 40, 43)], pads)


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("size", [(14, 14), (9, 37), (2, 2)])
def test_static_sizes(size: tuple[int, int], m: int) -> None:
    kernel = setting().kernel(2, 16, list(size), 24)
    check(16, 24, m, [(2, *size)], kernel=kernel)


@pytest.mark.parametrize("window", LINES)
@pytest.mark.parametrize("m", [4, 2])
def test_windows_along_one_direction(window: tuple[int, int], m: int) -> None:
    shapes = [(1 + h % 2, h, w) for h, w in SMALL] + [(0, 8, 8), (2, 20, 37), (1, 1, 130), (1, 70, 1)]
    check(6, 13, m, shapes, halves(window), window=window)
    check(70, 65, m, [(1, 9, 40)], [(0, 0), (0, 0)], window=window)


def test_windows_of_five_both_ways() -> None:
    check(7, 13, 2, [(1 + h % 2, h, w) for h, w in SMALL] + [(2, 20, 37)], [(2, 2), (2, 2)], window=(5, 5))
    check(64, 20, 2, [(1, 14, 17)], [(4, 0), (1, 3)], window=(5, 5))


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("spare", [0, 1])
def test_signals(taps: int, m: int, spare: int) -> None:
    """Convolutions of rank one, and of rank two with a dimension of one: tiles lie in the lanes all the same."""
    pads = [(taps // 2, taps // 2), (0, 0)][: 1 + spare]
    s = setting(pads, (taps, 1)[: 1 + spare])
    run = compiled(s.kernel(N, 65, [W, 1][: 1 + spare], 40), m)
    rng = np.random.default_rng(taps)
    w = rng.standard_normal((40, 65, taps, *[1] * spare)).astype(np.float32)
    for n, length in [(1, taps), (2, 31), (1, 1), (3, 130), (1, 1000)]:
        x = rng.standard_normal((n, 65, length, *[1] * spare)).astype(np.float32)
        near(run([x, w])[0], convolve(x, w, s), 65 * taps, m)


def test_one_block_of_tiles_and_few_features_are_shared_by_two_tasks() -> None:
    kernel = setting().kernel(1, 64, [28, 28], 32)
    run = compiled(kernel, 4)
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(v.tensor.shape).astype(np.float32) for v in kernel.inputs]  # type: ignore[arg-type]
    call = run.prepare(arrays)
    assert call.variant.tasks[1](call.env.ctypes.data) >= 2
    assert np.array_equal(run(arrays)[0], run(arrays, seed=1)[0])


@pytest.mark.parametrize(("size", "channels", "features"), [(14, 16, 160), (28, 96, 96), (14, 24, 100)])
def test_features_are_shared_out_evenly(size: int, channels: int, features: int) -> None:
    """Whole groups go to two cores: their size follows the number of features where it is known beforehand."""
    two = with_cores(by_name("x86-64-v3"), 2)  # wider targets have larger panels: other sizes come out even there
    s = setting()
    kernel = s.kernel(1, channels, [size, size], features)
    *_, mr, _, _, group = proposed(kernel, 4, two).tile
    groups = -(-features // group)
    assert groups % 2 == 0
    assert groups * group < features + group // 2 + mr
    assert proposed(s.kernel(N, channels, [H, W], features), 4, two).tile[-1] == 32
    run = compiled(kernel, 4, with_cores(NATIVE, 2))
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(v.tensor.shape).astype(np.float32) for v in kernel.inputs)  # type: ignore[arg-type]
    near(run([x, w])[0], convolve(x, w, s), channels * 9, 4)


def test_one_image_one_channel_one_feature() -> None:
    check(1, 1, 4, [(1, 9, 10)], kernel=setting().kernel(1, 1, [9, 10], 1))


def test_many_channels_take_several_calls() -> None:
    check(300, 40, 4, [(1, 14, 14), (1, 5, 6)])


def test_error_stays_small_for_many_channels() -> None:
    check(512, 32, 4, [(1, 28, 28)])


@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("target", [WIDE, NARROW], ids=["512 bits", "128 bits"])
def test_other_vector_widths(target: Target, m: int) -> None:
    for window in LINES:
        check(3, 10, m, [(1, h, w) for h, w in SMALL[:6]] + [(2, 9, 70)], halves(window), target, window=window)
    check(5, 18, m, [(1, h, w) for h, w in SMALL] + [(2, 30, 70), (1, 14, 150)], target=target)


@pytest.mark.parametrize("fence", ["start", "end"])
@pytest.mark.parametrize("m", [4, 2])
def test_nothing_outside_of_the_tensors_is_touched(m: int, fence: str) -> None:
    for pads in (ONE, [(0, 0), (0, 0)]):
        s = setting(pads)
        run = compiled(s.kernel(N, 6, [H, W], 9), m)
        rng = np.random.default_rng(0)
        w = rng.standard_normal((9, 6, 3, 3)).astype(np.float32)
        for h, width in [(3, 3), (6, 34), (11, 35), (16, 16), (18, 66)]:
            x = rng.standard_normal((2, 6, h, width)).astype(np.float32)
            near(run([x, w], fence=fence)[0], convolve(x, w, s), 6 * 9, m)


@pytest.mark.parametrize("fence", ["start", "end"])
@pytest.mark.parametrize("m", [4, 2])
@pytest.mark.parametrize("window", LINES)
def test_nothing_outside_of_the_tensors_is_touched_by_lines(window: tuple[int, int], m: int, fence: str) -> None:
    s = setting(halves(window), window)
    run = compiled(s.kernel(N, 6, [H, W], 9), m)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((9, 6, *window)).astype(np.float32)
    for h, width in [(5, 5), (6, 34), (11, 35), (16, 16)]:
        x = rng.standard_normal((2, 6, h, width)).astype(np.float32)
        near(run([x, w], fence=fence)[0], convolve(x, w, s), 6 * 5, m)


@pytest.mark.parametrize("expensive", [False, True])
def test_epilogue(expensive: bool) -> None:
    bias, rest = Value("bias", tensor(DType.F32, [20])), Value("rest", tensor(DType.F32, [N, 20, H, W]))

    def epilogue(x: Expr, at: tuple[Expr, ...]) -> Expr:
        y = x + element(bias, at[1]) + element(rest, *at)
        return y / (1.0 + apply("exp", -y)) if expensive else where(y > 0, y, lit(0, DType.F32))

    s = setting()
    run = compiled(s.kernel(N, 8, [H, W], 20, epilogue=epilogue, extra=[bias, rest]), 4)
    rng = np.random.default_rng(1)
    w, b = rng.standard_normal((20, 8, 3, 3)).astype(np.float32), rng.standard_normal(20).astype(np.float32)
    for n, h, width in [(1, 5, 5), (2, 9, 30), (1, 33, 41)]:
        x = rng.standard_normal((n, 8, h, width)).astype(np.float32)
        r = rng.standard_normal((n, 20, h, width)).astype(np.float32)
        y = convolve(x, w, s) + b[:, None, None] + r
        want = y / (1 + np.exp(-y)) if expensive else np.maximum(y, 0)
        near(run([x, w, b, r])[0], want, 8 * 9, 4)


def test_a_pixel_reaches_the_tiles_around_it_only() -> None:
    """What lies beyond the pixels of a tile, even an infinity, does not change it."""
    run = compiled(setting().kernel(N, 2, [H, W], 3), 4)
    rng = np.random.default_rng(2)
    w, x = (rng.standard_normal(d).astype(np.float32) for d in ((3, 2, 3, 3), (1, 2, 24, 40)))
    before = run([x, w])[0]
    x[0, 1, 12, 22] = np.inf
    changed = ~np.isfinite(run([x, w])[0])
    assert changed[:, :, 11:14, 21:24].all()
    changed[:, :, 8:16, 20:24] = False
    assert not changed.any()
    assert np.isfinite(before).all()


@pytest.mark.parametrize(
    ("code", "kernel"),
    [
        ("WINOGRAD_STEPS", Setting([3, 3], [2, 1], [1, 1], ONE).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_STEPS", Setting([3, 3], [1, 1], [1, 2], ONE).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_STEPS", Setting([3, 3], [1, 1], [1, 1], [(3, 3), (1, 1)]).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_WINDOW", Setting([7, 7], [1, 1], [1, 1], ONE).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_WINDOW", Setting([3, 5], [1, 1], [1, 1], ONE).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_WINDOW", Setting([1, 1], [1, 1], [1, 1], [(0, 0), (0, 0)]).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_FORM", Setting([3, 3], [1, 1], [1, 1], ONE, 2).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_FORM", Setting([3, 3], [1, 1], [1, 1], ONE, 8).kernel(N, 8, [H, W], 8)),
        ("WINOGRAD_FORM", Setting([3] * 3, [1] * 3, [1] * 3, [(1, 1)] * 3).kernel(N, 8, [H, H, W], 8)),
        ("WINOGRAD_MEMORY", setting().kernel(N, 2048, [H, W], 2048)),
        ("WINOGRAD_WEIGHT", setting().kernel(N, 8, [H, W], 8, const=False)),
        ("WINOGRAD_FORM", setting().kernel(N, 8, [H, W], 8, prologue=lambda x: apply("max", x, 0.0))),
    ],
)
def test_other_convolutions_are_refused(code: str, kernel: Kernel) -> None:
    found = WINOGRAD.propose(kernel, NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == code


@pytest.mark.parametrize(
    ("channels", "features", "size", "wins"),
    [(64, 64, 56, True), (256, 256, 14, True), (128, 128, H, True), (3, 64, 224, False), (3, 8, 9, False)],
)
def test_it_is_the_cheaper_proposal_where_channels_are_many(
    channels: int, features: int, size: int, wins: bool
) -> None:
    kernel = setting().kernel(1, channels, [size, W if size is H else size], features)
    mine, other = WINOGRAD.propose(kernel, NATIVE), GEMM.propose(kernel, NATIVE)
    assert not isinstance(mine, Refusal)
    assert not isinstance(other, Refusal)
    assert (mine[0].cost < other[0].cost) is wins


def test_small_images_take_small_tiles() -> None:
    large, small = (WINOGRAD.propose(setting().kernel(1, 512, [n, n], 512), NATIVE) for n in (56, 7))
    assert not isinstance(large, Refusal)
    assert not isinstance(small, Refusal)
    assert (large[0].tile[0], small[0].tile[0]) == (4, 2)


def print_errors() -> None:
    """Largest and root mean square error against f64, as shares of the outputs' own."""
    rng = np.random.default_rng(0)
    for window, size in (((3, 3), (28, 28)), ((1, 3), (1, 784)), ((1, 5), (1, 784)), ((5, 5), (28, 28))):
        s = setting(halves(window), window)
        for channels in (16, 64, 256, 512):
            kernel = s.kernel(1, channels, list(size), 64)
            mine, gemm = WINOGRAD.propose(kernel, NATIVE), GEMM.propose(kernel, NATIVE)
            assert not isinstance(mine, Refusal)
            assert not isinstance(gemm, Refusal)
            runs = {f"F({max(p.tile[:2])},{window[1]})": jit(Plan(kernel, p, WINOGRAD), NATIVE) for p in mine}
            runs["direct"] = jit(Plan(kernel, gemm[0], GEMM), NATIVE)
            x, w = (rng.standard_normal(d).astype(np.float32) for d in ((1, channels, *size), (64, channels, *window)))
            want = convolve(x, w, s)
            for name, run in runs.items():
                gap = np.abs(run([x, w])[0] - want)
                worst, mean = gap.max() / np.abs(want).max(), np.sqrt((gap**2).mean() / (want**2).mean())
                print(f"{window[0]}x{window[1]}  C={channels:4d}  {name:7s} max {worst:.1e}  rms {mean:.1e}")


if __name__ == "__main__":
    print_errors()
