"""Integers at the ends of their types: what onnxruntime defines is the same here.

Sums of i32 are those of onnxruntime 1.32, which computes them in f64 and stops at the ends of the type (1.17 wraps).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.agreeing import agrees, by_kernels, model

MOST, LEAST = 2**31 - 1, -(2**31)
ROWS = np.array(
    [[MOST, MOST, MOST], [LEAST, -1, 0], [MOST, LEAST, 1], [46341, 46341, 7], [-7, 2, 2], [65536, 65536, 65536]],
    np.int32,
)
IN_F64 = {
    "ReduceSum": lambda x: x.sum(1),
    "ReduceMean": lambda x: x.mean(1),
    "ReduceProd": lambda x: x.prod(1),
    "ReduceSumSquare": lambda x: (x * x).sum(1),
    "ReduceL1": lambda x: np.abs(x).sum(1),
    "ReduceL2": lambda x: np.sqrt((x * x).sum(1)),
}
EDGES = {
    np.dtype(t): np.array([i.min, i.min + 1, i.max - 1, i.max, i.max // 2, i.max // 2 + 1, 0, 1, 3, *rest], t)
    for t, rest in {
        np.int8: (-1,),
        np.int32: (-1, 2**24 + 1),
        np.int64: (-1, 2**53 + 1, -(2**53) - 1),
        np.uint32: (2**24 + 1,),
        np.uint64: (2**53 + 1, 2**63),
    }.items()
    for i in [np.iinfo(t)]
}
TYPES = sorted(EDGES, key=str)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("axes", ["constant", "given"])
@pytest.mark.parametrize("op", IN_F64)
def test_reductions_of_i32_stop_at_the_ends_of_the_type(tmp_path: Path, op: str, axes: str, axis: int) -> None:
    wanted = f"<int64[1] axes = {{{axis}}}>" if axes == "constant" else ""
    also = "" if axes == "constant" else ", int64[1] axes"
    m = model(f"(int32[N,M] x{also}) => (int32[a] y) {wanted} {{ y = {op}<keepdims = 0>(x, axes) }}", opset=18)
    x = ROWS if axis else np.ascontiguousarray(ROWS.T)
    got = by_kernels(tmp_path, m, {"x": x} | ({"axes": np.array([axis])} if axes == "given" else {}))
    exact = np.trunc(IN_F64[op](ROWS.astype(np.float64)))
    assert got["y"].tolist() == np.clip(exact, LEAST, MOST).astype(np.int64).tolist()


def test_sums_of_i64_are_exact_and_wrap(tmp_path: Path) -> None:
    m = model("(int64[N,M] x) => (int64[a] y) <int64[1] axes = {1}> { y = ReduceSum<keepdims = 0>(x, axes) }")
    x = np.array([[2**53 + 1, 1], [2**62 + 1, -4], [2**63 - 1, 1]])
    assert by_kernels(tmp_path, m, {"x": x})["y"].tolist() == [2**53 + 2, 2**62 - 3, -(2**63)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("op", ["Div", "Mod", "Mod<fmod = 1>", "Max", "Min", "Add", "Sub", "Mul", "Less", "Equal"])
def test_two_operands_at_the_ends(tmp_path: Path, op: str, dtype: np.dtype) -> None:
    edges = EDGES[dtype]
    x, y = (a.ravel() for a in np.meshgrid(edges, edges))
    if op[:3] in ("Div", "Mod"):
        fine = (y != 0) & ~((x == np.iinfo(dtype).min) & (y == np.array(-1).astype(dtype)) & (dtype.kind == "i"))
        x, y = x[fine], y[fine]
    made = "bool" if op in ("Less", "Equal") else dtype
    agrees(tmp_path, model(f"({dtype}[N] x, {dtype}[N] y) => ({made}[a] z) {{ z = {op}(x, y) }}"), {"x": x, "y": y})


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("by", [-(2**31), -7, -1, 3, 10, 64, 2**31 - 1])
@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_a_constant_divisor(tmp_path: Path, op: str, by: int, dtype: np.dtype) -> None:
    i = np.iinfo(dtype)
    if not i.min <= by <= i.max:
        by = max(int(i.min), min(by, int(i.max))) or 5
    x = EDGES[dtype]
    x = x[x != i.min] if by == -1 else x
    agrees(tmp_path, model(f"({dtype}[N] x) => ({dtype}[a] y) <{dtype} by = {{{by}}}> {{ y = {op}(x, by) }}"), {"x": x})


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bounds", ["constant", "given", "crossed"])
def test_clip_to_bounds_that_no_f64_holds(tmp_path: Path, bounds: str, dtype: np.dtype) -> None:
    i = np.iinfo(dtype)
    low, high = (i.max - 1, i.min + 1) if bounds == "crossed" else (i.min + 1, i.max - 1)
    head = f"{dtype} low = {{{low}}}, {dtype} high = {{{high}}}"
    text = f"({dtype}[N] x) => ({dtype}[a] y) <{head}>"
    feeds = {"x": EDGES[dtype]}
    if bounds == "given":
        text = f"({dtype}[N] x, {dtype} low, {dtype} high) => ({dtype}[a] y)"
        feeds |= {"low": np.array(low, dtype), "high": np.array(high, dtype)}
    agrees(tmp_path, model(f"{text} {{ y = Clip(x, low, high) }}", 13), feeds)


@pytest.mark.parametrize(
    ("start", "limit", "delta"),
    [
        (2**63 - 6, 2**63 - 1, 3),
        (-(2**63), -(2**63) + 7, 3),
        (-(2**63) + 7, -(2**63), -3),
        (-(2**63), 2**63 - 1, 2**62 + 1),
        (2**63 - 1, -(2**63), -(2**63)),
        (5, 4, 1),
    ],
)
def test_ranges_between_the_ends(tmp_path: Path, start: int, limit: int, delta: int) -> None:
    m = model(
        f"(int64 start, int64[N] x) => (int64[a] y) <int64 limit = {{{limit}}}, int64 delta = {{{delta}}}> "
        "{ r = Range(start, limit, delta)  y = Neg(r) }"
    )
    agrees(tmp_path, m, {"start": np.array(start), "x": np.array([1])})
