"""A convolution of unknown size takes the better way for the size that comes: the direct sum or Winograd's tiles."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import sym
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Plan, Template
from onnxfuse.runtime.jit import Jitted, jit
from onnxfuse.schedule.plan import plan_kernel
from onnxfuse.target import by_name
from onnxfuse.templates.by_size import BY_SIZE
from onnxfuse.templates.gemm import GEMM
from onnxfuse.templates.winograd import WINOGRAD
from tests.templates.contractions import Setting, convolve

NATIVE = by_name("native", host_features())
N, H, W = (sym(n) for n in "NHW")
SQUARE = Setting([3, 3], [1, 1], [1, 1], [(1, 1)] * 2)
LINE = Setting([3], [1], [1], [(1, 1)])


def compiled(template: Template, kernel: Kernel) -> Jitted:
    found = template.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal), found
    return jit(Plan(kernel, found[0], template), NATIVE)


def limit(kernel: Kernel) -> int:
    found = BY_SIZE.propose(kernel, NATIVE)
    assert not isinstance(found, Refusal), found
    return found[0].tile[0]


@pytest.mark.parametrize(
    ("setting", "size", "shapes"),
    [
        (LINE, [W], [(1, 1), (1, 4), (3, 2), (2, 50), (1, 300), (0, 9)]),
        (SQUARE, [H, W], [(1, 1, 1), (1, 3, 2), (2, 2, 2), (1, 14, 14), (2, 9, 30), (1, 0, 8)]),
        (SQUARE, [3, W], [(1, 3, 1), (1, 3, 90)]),
    ],
)
def test_each_side_of_the_limit_runs_its_own_way(setting: Setting, size: list, shapes: list) -> None:
    channels, features = 40, 37
    kernel = setting.kernel(N, channels, size, features)
    both, few, many = (compiled(t, kernel) for t in (BY_SIZE, GEMM, WINOGRAD))
    rng, most = np.random.default_rng(0), limit(kernel)
    w = rng.standard_normal((features, channels, *setting.window)).astype(np.float32)
    sides = set()
    for n, *dims in shapes:
        x = rng.standard_normal((n, channels, *dims)).astype(np.float32)
        is_few = n * int(np.prod(dims)) <= most
        sides.add(is_few)
        got = both([x, w])[0]
        np.testing.assert_array_equal(got, (few if is_few else many)([x, w])[0])
        np.testing.assert_allclose(got, convolve(x, w, setting), rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(both([x, w], seed=1, shift=4)[0], got)
    assert sides == {True, False}


def test_a_signal_of_a_few_steps_is_no_tile() -> None:
    """The encoder of a voice detector: four steps of 129 channels, or one of 64."""
    assert limit(LINE.kernel(N, 129, [W], 128)) >= 4
    assert limit(LINE.kernel(N, 64, [W], 128)) >= 4


def test_the_planner_takes_it_and_leaves_it_where_sizes_are_known() -> None:
    chosen = plan_kernel(LINE.kernel(N, 129, [W], 128), NATIVE)
    assert not isinstance(chosen, Refusal)
    assert chosen.schedule.template == "by_size"
    without = plan_kernel(LINE.kernel(N, 129, [W], 128), NATIVE, {"winograd", "by_size"})
    assert not isinstance(without, Refusal)
    assert without.schedule.template == "gemm"


@pytest.mark.parametrize(
    ("code", "kernel"),
    [
        ("BY_SIZE_KNOWN", SQUARE.kernel(1, 64, [56, 56], 64)),
        ("BY_SIZE_ONE", SQUARE.kernel(N, 3, [H, W], 64)),  # few channels: the direct sum
        ("BY_SIZE_ONE", SQUARE.kernel(N, 64, [112, 112], 64)),  # a single image is large: tiles
        ("WINOGRAD_FORM", Setting([3, 3], [1, 1], [1, 1], [(1, 1)] * 2, 8).kernel(N, 8, [H, W], 8)),
    ],
)
def test_other_convolutions_are_refused(code: str, kernel: Kernel) -> None:
    found = BY_SIZE.propose(kernel, NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == code
