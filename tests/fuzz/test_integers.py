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
def test_two_operands_at_the_ends(tmp_path: Path, dtype: np.dtype) -> None:
    x, y = (a.ravel() for a in np.meshgrid(EDGES[dtype], EDGES[dtype]))
    trap = (y == 0) | ((x == np.iinfo(dtype).min) & (y == np.array(-1).astype(dtype)) & (dtype.kind == "i"))
    ops = ("Div", "Mod", "Mod<fmod = 1>", "Max", "Min", "Add", "Sub", "Mul")
    outputs = ", ".join(f"{dtype}[a] z{k}" for k in range(len(ops)))
    nodes = "  ".join(f"z{k} = {op}(x, y)" for k, op in enumerate(ops))
    m = model(f"({dtype}[N] x, {dtype}[N] y) => ({outputs}, bool[a] less) {{ {nodes}  less = Less(x, y) }}")
    agrees(tmp_path, m, {"x": x[~trap], "y": y[~trap]})


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_constant_divisors(tmp_path: Path, dtype: np.dtype) -> None:
    i = np.iinfo(dtype)
    by = [d for d in (-7, -1, 3, 10, 64, i.max, i.min) if d and i.min <= d <= i.max]
    consts = ", ".join(f"{dtype} d{k} = {{{d}}}" for k, d in enumerate(by))
    outputs = ", ".join(f"{dtype}[a] q{k}, {dtype}[a] r{k}" for k in range(len(by)))
    nodes = "  ".join(f"q{k} = Div(x, d{k})  r{k} = Mod(x, d{k})" for k in range(len(by)))
    x = EDGES[dtype]
    agrees(tmp_path, model(f"({dtype}[N] x) => ({outputs}) <{consts}> {{ {nodes} }}"), {"x": x[x != i.min]})


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_clip_to_bounds_that_no_f64_holds(tmp_path: Path, dtype: np.dtype) -> None:
    i = np.iinfo(dtype)
    m = model(
        f"""({dtype}[N] x, {dtype} l, {dtype} h) => ({dtype}[a] inside, {dtype}[a] crossed, {dtype}[a] given)
        <{dtype} low = {{{i.min + 1}}}, {dtype} high = {{{i.max - 1}}}> {{
        inside = Clip(x, low, high)  crossed = Clip(x, high, low)  given = Clip(x, l, h) }}""",
        13,
    )
    agrees(tmp_path, m, {"x": EDGES[dtype], "l": np.array(i.min + 1, dtype), "h": np.array(i.max - 1, dtype)})


RANGES = (
    (2**63 - 6, 2**63 - 1, 3),
    (-(2**63), -(2**63) + 7, 3),
    (-(2**63) + 7, -(2**63), -3),
    (5, 4, 1),
    (-(2**63), 2**63 - 1, 2**62 + 1),
    (2**63 - 1, -(2**63), -(2**63)),
)


@pytest.mark.parametrize("given", [False, True])
def test_ranges_between_the_ends(tmp_path: Path, given: bool) -> None:
    ranges = RANGES if given else RANGES[:-2]  # onnxruntime plans constant ones by a difference that wraps
    names = [f"{what}{k}" for k in range(len(ranges)) for what in "sld"]
    numbers = [n for r in ranges for n in r]
    consts = ", ".join(f"int64 {v} = {{{n}}}" for v, n in zip(names, numbers, strict=True))
    inputs = ", ".join(f"int64 {v}" for v in names)
    outputs = ", ".join(f"int64[a{k}] y{k}" for k in range(len(ranges)))
    nodes = "  ".join(f"r{k} = Range(s{k}, l{k}, d{k})  y{k} = Neg(r{k})" for k in range(len(ranges)))
    feeds = {v: np.array(n) for v, n in zip(names, numbers, strict=True)}
    if given:
        agrees(tmp_path, model(f"({inputs}) => ({outputs}) {{ {nodes} }}"), feeds)
    else:
        agrees(tmp_path, model(f"() => ({outputs}) <{consts}> {{ {nodes} }}"), {})
