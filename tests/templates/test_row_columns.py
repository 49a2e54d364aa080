"""rowwise with the lanes along an outer axis while stages have loops of their own, and squares that are transposed."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import acc, apply, cast, i64, lit, load, sym, var, where
from onnxfuse.ir.kernel import Kernel, Local, Stage, Store
from onnxfuse.ir.loops import Axis, Reduce
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import Dim
from onnxfuse.templates.nest import tidy
from onnxfuse.templates.row_shape import sunk
from onnxfuse.templates.rowwise import ROWWISE
from tests.codegen.machines import MACHINES, V3
from tests.templates.test_rowwise import agree, at, axes, f32, fixed, pointwise, t

F32 = DType.F32
C, N = sym("C"), sym("N")


def norm(c: Dim, n: Dim, dynamic: bool = False) -> Kernel:
    """Channels-first normalisation of x[c, n], with a residual and outputs in both orders."""
    x, r, gain = t("x", 2, c, n), t("r", 2, n, c), t("g", c)
    y, z, kept = t("y", 2, n, c), t("z", 2, c, n), t("kept", c)
    total, square = t("total"), t("square")
    (b, i), loops = axes(2, n), [Axis(name, c) for name in ("j", "k", "l", "m")]
    j, k, m, q = map(var, loops)

    def sum_of(axis: Axis) -> Reduce:
        return Reduce((axis,), PRIMS["add"], lit(0.0, F32), F32)

    scale = at(gain, q) / apply("sqrt", at(square) + 1e-5)
    stages = (
        Stage((loops[0],), (Store(kept, (j,), at(x, var(b), j, var(i)) + at(r, var(b), var(i), j)),)),
        Stage((), (Store(total, (), acc(F32)),), sum_of(loops[1]), at(kept, k)),
        Stage((), (Store(square, (), acc(F32)),), sum_of(loops[2]), at(kept, m) * at(kept, m)),
        Stage(
            (loops[3],),
            (
                Store(y, (var(b), var(i), q), (at(kept, q) - at(total) * 0.125) * scale),
                Store(z, (var(b), q, var(i)), at(kept, q) * 2.0),
            ),
        ),
    )
    names = (Local(kept), Local(total), Local(square))
    return Kernel(
        "k", (x, r, gain), (y, z), (b, i), stages, locals=names, dims=fixed([(x, 1), (x, 2)]) if dynamic else ()
    )


def feed(rng, c: int, n: int) -> list[np.ndarray]:
    return [f32(rng, 2, c, n), f32(rng, 2, n, c), f32(rng, c)]


@pytest.mark.parametrize(("c", "n"), [(8, 16), (13, 21), (32, 70), (3, 100), (64, 1), (24, 5), (1, 40)])
@pytest.mark.parametrize("target", MACHINES)
def test_a_norm_over_a_strided_axis(target, c, n, rng):
    agree(norm(c, n), target, feed(rng, c, n), rtol=2e-5)


@pytest.mark.parametrize("target", MACHINES)
def test_a_norm_over_a_strided_axis_with_run_time_extents(target, rng):
    sizes = ((1, 1), (8, 8), (16, 33), (33, 16), (5, 7), (0, 9), (9, 0), (40, 200))
    agree(norm(C, N, dynamic=True), target, *(feed(rng, c, n) for c, n in sizes), rtol=2e-5)


@pytest.mark.parametrize("target", MACHINES)
def test_columns_too_long_for_the_stack_use_scratch(target, rng):
    agree(norm(3000, 20), target, feed(rng, 3000, 20), rtol=1e-4)


def test_lanes_lie_along_the_contiguous_axis():
    assert ROWWISE.propose(norm(64, 4096), V3)[0].vector == "i1"


@pytest.mark.parametrize("target", MACHINES)
def test_softmax_over_a_strided_axis(target, rng):
    x, y, kept, top, total = t("x", C, N), t("y", C, N), t("kept", C), t("top"), t("total")
    (i,), (a, b, c, d) = axes(N), (Axis(name, C) for name in "abcd")
    most = Reduce((a,), PRIMS["max"], lit(float("-inf"), F32), F32)
    add = Reduce((c,), PRIMS["add"], lit(0.0, F32), F32)
    stages = (
        Stage((), (Store(top, (), acc(F32)),), most, at(x, var(a), var(i))),
        Stage((b,), (Store(kept, (var(b),), apply("exp", at(x, var(b), var(i)) - at(top))),)),
        Stage((), (Store(total, (), acc(F32)),), add, at(kept, var(c))),
        Stage((d,), (Store(y, (var(d), var(i)), at(kept, var(d)) / at(total)),)),
    )
    names = (Local(kept), Local(top), Local(total))
    k = Kernel("k", (x,), (y,), (i,), stages, locals=names, dims=fixed([(x, 0), (x, 1)]))
    agree(k, target, *([f32(rng, c, n)] for c, n in ((1, 1), (7, 9), (30, 64), (12, 65), (100, 3))), rtol=1e-6)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.F16, DType.I32, DType.U8, DType.BOOL])
@pytest.mark.parametrize("target", MACHINES)
def test_stores_across_the_lanes(target, dtype, rng):
    """Rows gathered by an index leave only their own axis contiguous: squares of it are transposed at the store."""
    x, places, y = t("x", 9, N, dtype=dtype), t("p", C, dtype=DType.I64), t("y", N, C, dtype=dtype)
    n, c = axes(N, C)
    row = at(places, var(c))
    k = pointwise([x, places], y, [n, c], load(x, (row, var(n)), dtype), [(x, 1), (places, 0)])
    for sizes in ((16, 16), (1, 1), (17, 35), (70, 9), (5, 40), (40, 0)):
        width, count = sizes
        values = (rng.standard_normal((9, width)) * 50).astype(dtype.numpy)
        agree(k, target, [values, rng.integers(0, 9, count)])


@pytest.mark.parametrize("sizes", [(16, 16, 16), (13, 27, 24), (8, 3, 21)])
@pytest.mark.parametrize("target", MACHINES)
def test_squares_are_cut_at_the_joints_of_a_concat(target, sizes, rng):
    """Transposed parts, concatenated along the axis that was last."""
    parts, n = [t(f"x{k}", 37, size) for k, size in enumerate(sizes)], sum(sizes)
    i, j = axes(n, 37)
    body, start = None, n
    for part, size in zip(reversed(parts), reversed(sizes), strict=True):
        start -= size
        value = at(part, var(j), var(i) - start)
        body = value if body is None else where(apply("lt", var(i), i64(start + size)), value, body)
    k = pointwise(parts, t("y", n, 37), [i, j], body)
    agree(k, target, [f32(rng, 37, size) for size in sizes])


@pytest.mark.parametrize("target", MACHINES)
def test_several_values_leave_a_square_in_different_orders(target, rng):
    x, y, z = t("x", 19, 40), t("y", 40, 19), t("z", 19, 40)
    i, j = axes(40, 19)
    local = t("half")
    stages = (
        Stage((), (Store(local, (), at(x, var(j), var(i)) * 0.5),)),
        Stage((), (Store(y, (var(i), var(j)), at(local) + 1.0), Store(z, (var(j), var(i)), at(local) - 1.0))),
    )
    agree(Kernel("k", (x,), (y, z), (i, j), stages, locals=(Local(local),)), target, [f32(rng, 19, 40)])


@pytest.mark.parametrize(("channels", "width"), [(64, 40), (5, 21), (4, 3), (3, 50)])
@pytest.mark.parametrize("target", MACHINES)
def test_computed_places_are_found_once_for_all_channels(target, channels, width, rng):
    """A linear Resize of the last axis: the loop over all that is before it goes innermost."""
    x, y = t("x", channels, 7, width), t("y", channels, 7, 2 * width + 1)
    c, i, j = axes(channels, 7, 2 * width + 1)
    place = apply("min", apply("max", cast(var(j), F32) * 0.49 - 0.25, 0.0), float(width - 1))
    left = cast(place, DType.I64)
    right = apply("min", left + 1, i64(width - 1))
    share = place - cast(left, F32)
    body = at(x, var(c), var(i), left) * (lit(1.0, F32) - share) + at(x, var(c), var(i), right) * share
    k = pointwise([x], y, [c, i, j], body)
    moved = sunk(tidy(k), next(a for a in tidy(k).outer if a.name == "i2")).stages[0].axes
    assert [a.extent for a in moved] == [channels * 7]
    agree(k, target, [f32(rng, channels, 7, width)], rtol=1e-6)


@pytest.mark.parametrize("target", MACHINES)
def test_computed_places_with_run_time_extents(target, rng):
    x, y = t("x", C, N), t("y", C, N)
    c, j = axes(C, N)
    place = apply("min", apply("max", cast(var(j), F32) * 0.7 - 0.25, 0.0), 3.0)
    body = at(x, var(c), apply("min", cast(place, DType.I64), N - 1)) * 2.0
    k = pointwise([x], y, [c, j], body, [(x, 0), (x, 1)])
    agree(k, target, *([f32(rng, c, n)] for c, n in ((1, 1), (9, 40), (3, 130), (0, 5), (5, 0), (70, 33))))
