"""The transforms of Winograd convolution F(m, r) on vectors that hold one element of `lanes` tiles each.

    Y = A^T [ (G g) * (B^T d) ]        d: m + r - 1 inputs, g: r weights, Y: m outputs, down, across or both ways

Interpolation points: 0, infinity and +-PAIRS; those of 4 are the usual ones, 5/8 and 3/2 in place of 1 and 2 quarter
the error of 6 (docs/decisions/winograd.md). All constants of A and B are exact in f32; G is applied in f64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from onnxfuse.codegen.build import Builder, Reg, lanes_of

PAIRS: dict[int, tuple[float, ...]] = {1: (), 4: (1.0,), 6: (5 / 8, 3 / 2), 8: (5 / 8, 1.0, 7 / 4)}  # by points


@dataclass(frozen=True, slots=True)
class Side:
    """One direction of a tile: m outputs of windows of `taps`; 1 and 1 where nothing slides."""

    m: int
    taps: int

    @property
    def points(self) -> int:
        return self.m + self.taps - 1

    @property
    def pairs(self) -> tuple[float, ...]:
        return PAIRS[self.points]


def data(build: Builder, side: Side, d: Sequence[Reg]) -> list[Reg]:
    """B^T d: the coefficients of the products of (x - point) over all other points."""
    if side.points == 1:
        return list(d)
    out = [_along(build, _squares(side.pairs), d[0::2])]
    for point in side.pairs:
        others = _squares([p for p in side.pairs if p != point])
        even, odd = _along(build, others, d[2::2]), _along(build, others, d[1:-1:2])
        out += [_times(build, point, odd, even), _times(build, -point, odd, even)]
    return [*out, _along(build, _squares(side.pairs), d[1::2])]


def result(build: Builder, side: Side, p: Sequence[Reg]) -> list[Reg]:
    """A^T p: powers of the points."""
    if side.points == 1:
        return list(p)
    b = build.ir
    sums = [(b.fadd(x, y), b.fsub(x, y)) for x, y in zip(p[1:-1:2], p[2:-1:2], strict=True)]
    total = p[0]
    for even, _ in sums:
        total = b.fadd(total, even)
    out = [total]
    for k in range(1, side.m):
        terms = [(point**k, pair[k % 2]) for point, pair in zip(side.pairs, sums, strict=True)]
        factor, last = terms[-1]
        total = b.fmul(last, build.like(last, factor))
        for factor, term in terms[-2::-1]:
            total = _times(build, factor, term, total)
        out.append(total)
    out[-1] = b.fadd(out[-1], p[-1])
    return out


def weights(side: Side) -> list[tuple[float, ...]]:
    """The rows of G: powers of a point over the product of its distances to all others."""
    if side.points == 1:
        return [(1.0,)]
    zeros = [0.0] * (side.taps - 1)
    rows: list[tuple[float, ...]] = [(1 / prod(-p * p for p in side.pairs), *zeros)]
    for point in side.pairs:
        distance = 2 * point**2 * prod(point**2 - p**2 for p in side.pairs if p != point)
        rows += [tuple(x**k / distance for k in range(side.taps)) for x in (point, -point)]
    return [*rows, (*zeros, 1.0)]


def _squares(points: Sequence[float]) -> list[float]:
    """Coefficients of the product of (x - point^2), the lowest first, without the leading 1."""
    out = [1.0]
    for point in points:
        out = [b - point**2 * a for a, b in zip([*out, 0.0], [0.0, *out], strict=True)]
    return out[:-1]


def _along(build: Builder, factors: Sequence[float], values: Sequence[Reg]) -> Reg:
    """The last value, and the others times their factors."""
    *rest, total = values
    for factor, value in zip(factors, rest, strict=True):
        total = _times(build, factor, value, total)
    return total


def _times(build: Builder, factor: float, x: Reg, plus: Reg) -> Reg:
    if abs(factor) == 1:
        return build.ir.fadd(plus, x) if factor == 1 else build.ir.fsub(plus, x)
    return build.fma(x, build.like(x, factor), plus)


Line = Callable[[Sequence[Reg]], list[Reg]]


def both_ways(across: Line, down: Line, rows: Sequence[Sequence[Reg]]) -> list[list[Reg]]:
    """Transform the rows, then the columns: result[i][j]."""
    lines = [across(row) for row in rows]
    columns = [down([row[j] for row in lines]) for j in range(len(lines[0]))]
    return [[column[i] for column in columns] for i in range(len(columns[0]))]


def filter_transform(build: Builder, down: Side, across: Side, taps: Sequence[Sequence[Reg]]) -> list[list[Reg]]:
    """G g G^T of scalars."""

    def line(side: Side) -> Line:
        return lambda values: [_dot(build, row, values) for row in weights(side)]

    return both_ways(line(across), line(down), taps)


def _dot(build: Builder, factors: Sequence[float], values: Sequence[Reg]) -> Reg:
    b = build.ir
    terms = [b.fmul(v, build.like(v, float(f))) for f, v in zip(factors, values, strict=True) if f]
    total = terms[0]
    for t in terms[1:]:
        total = b.fadd(total, t)
    return total


# ---- contiguous pixels to tiles and back ----


def split(build: Builder, side: Side, pixels: Sequence[Reg], tail: Reg | None) -> list[Reg]:
    """Pixels of a line of tiles to their columns: result[j][t] = pixel m*t + j, 0 <= j < m + taps - 1.

    `pixels` are m vectors; `tail` holds the taps - 1 pixels behind them in its first lanes.
    """
    m, lanes = side.m, lanes_of(pixels[0])
    columns = list(pixels) if m == 1 else _split4(build, pixels) if m == 4 else _split2(build, pixels)
    for j in range(m, side.points):
        assert tail is not None
        shift, column = divmod(j, m)  # of the tile `shift` further on
        picks = [*range(shift, lanes), *(lanes + m * k + column for k in range(shift))]
        columns.append(build.shuffle(columns[column], tail, picks))
    return columns


def _split2(build: Builder, pixels: Sequence[Reg]) -> list[Reg]:
    lanes = lanes_of(pixels[0])
    return [build.shuffle(pixels[0], pixels[1], [2 * k + j for k in range(lanes)]) for j in range(2)]


def _split4(build: Builder, pixels: Sequence[Reg]) -> list[Reg]:
    """Four pixels of a tile are a block; block b of vector k becomes tile 4b + k, then blocks are transposed."""
    blocks = lanes_of(pixels[0]) // 4
    tiles = [[4 * b + k for b in range(blocks)] for k in range(4)]
    return _transpose_blocks(build, [_blocks(build, pixels, [divmod(t, blocks) for t in ts]) for ts in tiles])


def merge(build: Builder, columns: Sequence[Reg]) -> list[Reg]:
    """The inverse of `split`, without the tail: m vectors of consecutive pixels."""
    lanes = lanes_of(columns[0])
    if len(columns) == 1:
        return list(columns)
    if len(columns) == 2:
        half = lanes // 2
        return [build.shuffle(columns[0], columns[1], _zip(half * k, lanes)) for k in range(2)]
    blocks = lanes // 4
    rows = _transpose_blocks(build, columns)
    return [
        _blocks(build, rows, [((k * blocks + b) % 4, (k * blocks + b) // 4) for b in range(blocks)]) for k in range(4)
    ]


def _zip(first: int, lanes: int) -> list[int]:
    return [first + k // 2 + (lanes if k % 2 else 0) for k in range(lanes)]


def _blocks(build: Builder, vectors: Sequence[Reg], picks: Sequence[tuple[int, int]]) -> Reg:
    """A vector of blocks of four lanes: (vector, block) each."""
    if len(picks) == 1:
        return vectors[picks[0][0]]
    lanes = lanes_of(vectors[0])
    parts: list[tuple[Reg, list[int]]] = []
    for vector, block in picks:
        parts.append((vectors[vector], [4 * block + i for i in range(4)]))
    while len(parts) > 2:
        parts = [_joined(build, a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    (a, at_a), (b, at_b) = parts
    return build.shuffle(a, b, [*at_a, *(lanes + i for i in at_b)])


def _joined(build: Builder, a: tuple[Reg, list[int]], b: tuple[Reg, list[int]], lanes: int) -> tuple[Reg, list[int]]:
    picks = [*a[1], *(lanes + i for i in b[1])]
    spare = [0] * (lanes - len(picks))
    return build.shuffle(a[0], b[0], [*picks, *spare]), list(range(len(picks)))


def _transpose_blocks(build: Builder, rows: Sequence[Reg]) -> list[Reg]:
    """Transpose the 4 x 4 square in each block of four lanes of four vectors."""
    lanes = lanes_of(rows[0])

    def each(picks: Sequence[int]) -> list[int]:
        # picks count lanes of one block: 0-3 of the first vector, 4-7 of the second.
        return [p + at if p < 4 else lanes + p - 4 + at for at in range(0, lanes, 4) for p in picks]

    low, high = each([0, 4, 1, 5]), each([2, 6, 3, 7])
    a, b = build.shuffle(rows[0], rows[1], low), build.shuffle(rows[0], rows[1], high)
    c, d = build.shuffle(rows[2], rows[3], low), build.shuffle(rows[2], rows[3], high)
    first, last = each([0, 1, 4, 5]), each([2, 3, 6, 7])
    return [
        build.shuffle(a, c, first),
        build.shuffle(a, c, last),
        build.shuffle(b, d, first),
        build.shuffle(b, d, last),
    ]
