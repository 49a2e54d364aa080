"""Index maps: reshape sections and atoms, digits, levels; always against numpy on iota."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.maps import AFFINE, ATOMS, DATA, DIV_MOD, IDENTITY, Digit, digits, level, reshape_index, sections
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, Load, i64, load, sym, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.types import tensor
from tests.fuse.brute import number
from tests.fuse.dsl import F32, val

ATOM_CASES = [
    ((6, 4), (4, 6), [None]),
    ((2, 6, 4), (12, 4), [(2, 6), (4,)]),
    ((32, 768), (32, 12, 64), [(32,), (12, 64)]),
    ((8, 6), (16, 3), [(8, 2, 3)]),
    ((4, 9), (6, 6), [None]),
    ((2, 1, 3), (2, 3, 1), [(2,), (3,)]),
    ((1, 1), (1,), []),
    ((5,), (5,), [(5,)]),
    ((7, 4, 9), (7, 6, 6), [(7,), None]),
]


@pytest.mark.parametrize(("source", "target", "atoms"), ATOM_CASES)
def test_atoms_of_a_reshape(source, target, atoms) -> None:
    found = sections(source, target)
    assert found is not None
    assert [s.atoms for s in found] == atoms


def test_symbols_are_equal_when_they_are_the_same_symbol() -> None:
    n, s = sym("N"), sym("S")
    found = sections((n, s, 768), (n, s, 12, 64))
    assert found is not None
    assert [p.atoms for p in found] == [(n,), (s,), (12, 64)]
    flat = sections((n, s, 768), (n * s, 768))
    assert flat is not None
    assert [p.atoms for p in flat] == [(n, s), (768,)]
    assert sections((n, 4), (s, 4)) is None


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    source = draw(SHAPES)
    left, target = prod(source), []
    while left > 1:
        d = draw(st.sampled_from([k for k in range(2, left + 1) if left % k == 0]))
        target.append(d)
        left //= d
    for _ in range(draw(st.integers(0, 2))):
        target.insert(draw(st.integers(0, len(target))), 1)
    return source, target


@settings(max_examples=120, deadline=None)
@given(reshapes())
def test_reshape_index_is_numpy_reshape(shapes: tuple[list[int], list[int]]) -> None:
    source, target = shapes
    axes = tuple(Axis(f"a{k}", d) for k, d in enumerate(target))
    index = reshape_index(source, target, [var(a) for a in axes])
    assert index is not None
    iota = np.arange(prod(source)).reshape(source)
    for point in np.ndindex(*target):
        where = dict(zip(axes, (int(p) for p in point), strict=True))
        assert iota[tuple(number(ix, where) for ix in index)] == iota.reshape(target)[point]


@settings(max_examples=60, deadline=None)
@given(reshapes())
def test_atoms_divide_both_shapes(shapes: tuple[list[int], list[int]]) -> None:
    source, target = shapes
    for part in sections(source, target) or ():
        whole = prod(source[d] for d in part.source)
        assert whole == prod(target[d] for d in part.target)
        assert part.atoms is None or prod(a for a in part.atoms if isinstance(a, int)) == whole


I, J, F = Axis("i", 6), Axis("j", 8), Axis("f", 48)  # noqa: E741
i, j, f = var(I), var(J), var(F)

DIGITS = [
    (i, (0, (Digit(I, 1),))),
    (i * 3 + 2, (2, (Digit(I, 3),))),
    (f // 8, (0, (Digit(F, 1, 8),))),
    (f % 8, (0, (Digit(F, 1, 1, 8),))),
    ((f // 4) % 3, (0, (Digit(F, 1, 4, 3),))),
    (i64(5) - i, (5, (Digit(I, -1),))),
    (i * sym("S") + j, (0, (Digit(I, sym("S")), Digit(J, 1)))),
    (i * j, None),
    ((i + j) // 4, None),
]


@pytest.mark.parametrize(("index", "expected"), DIGITS, ids=[str(d[0]) for d in DIGITS])
def test_digits(index: Expr, expected: object) -> None:
    found = digits(index)
    if found is None or not isinstance(expected, tuple):
        assert found is expected
        return
    assert found[0] == expected[0]
    assert set(found[1]) == set(expected[1])


def at(shape: tuple[int, ...], *index: Expr) -> Load:
    e = load(val("x", shape), index, F32)
    assert isinstance(e, Load)
    return e


def test_levels() -> None:
    ids = Value("ids", tensor(DType.I64, (6,)))
    assert level(at((6, 8), i, j), (I, J)) == IDENTITY
    assert level(at((8, 6), j, i), (I, J)) == AFFINE
    assert level(at((9, 8), i + 2, i64(7) - j), (I, J)) == AFFINE
    assert level(at((8,), j), (I, J)) == AFFINE
    assert level(at((6, 8), f // 8, f % 8), (F,)) == ATOMS
    assert level(at((6, 8), f // 8, f % 9), (F,)) == DIV_MOD
    assert level(at((9,), (i + j) // 2), (I, J)) == DIV_MOD
    assert level(at((6, 8), load(ids, (i,), DType.I64), j), (I, J)) == DATA
