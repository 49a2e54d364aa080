"""The transforms of Winograd convolution F(m x m, 3 x 3) on vectors that hold one element of `lanes` tiles each.

    Y = A^T [ (G g G^T) * (B^T d B) ] A        d: (m+2) x (m+2) inputs, g: 3 x 3 weights, Y: m x m outputs

Interpolation points: 0, 1, -1 and infinity for m = 2; 0, 5/8, -5/8, 3/2, -3/2 and infinity for m = 4. The usual 1 and 2
in place of 5/8 and 3/2 quadruple the error (docs/decisions/winograd.md). All constants of A and B are exact in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxfuse.codegen.build import Builder, Reg, lanes_of

TAPS = 3
NEAR, FAR = 5 / 8, 3 / 2


def _filter_row(point: float, other: float) -> tuple[float, float, float]:
    """Row of G of one of the points +-point: powers over the product of the distances to all others."""
    distance = 2 * point**2 * (point**2 - other**2)
    return (1 / distance, point / distance, point**2 / distance)


# Rows of G, one for each point.
FILTER: dict[int, tuple[tuple[float, float, float], ...]] = {
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / (NEAR * FAR) ** 2, 0, 0),
        _filter_row(NEAR, FAR),
        _filter_row(-NEAR, FAR),
        _filter_row(FAR, NEAR),
        _filter_row(-FAR, NEAR),
        (0, 0, 1),
    ),
}

Line = Callable[[Builder, Sequence[Reg]], list[Reg]]


def _times(build: Builder, factor: float, x: Reg, plus: Reg) -> Reg:
    return build.fma(x, build.like(x, factor), plus)


def _data2(build: Builder, d: Sequence[Reg]) -> list[Reg]:
    b = build.ir
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def _data4(build: Builder, d: Sequence[Reg]) -> list[Reg]:
    out = [_ends(build, d[0], d[2], d[4])]
    for point, other in ((NEAR, FAR), (FAR, NEAR)):
        even, odd = _times(build, -(other**2), d[2], d[4]), _times(build, -(other**2), d[1], d[3])
        out += [_times(build, point, odd, even), _times(build, -point, odd, even)]
    return [*out, _ends(build, d[1], d[3], d[5])]


def _ends(build: Builder, a: Reg, b: Reg, c: Reg) -> Reg:
    """The rows of 0 and infinity: the coefficients of (x^2 - NEAR^2) (x^2 - FAR^2)."""
    return _times(build, -(NEAR**2 + FAR**2), b, _times(build, (NEAR * FAR) ** 2, a, c))


def _result2(build: Builder, p: Sequence[Reg]) -> list[Reg]:
    b = build.ir
    return [b.fadd(b.fadd(p[0], p[1]), p[2]), b.fsub(b.fsub(p[1], p[2]), p[3])]


def _result4(build: Builder, p: Sequence[Reg]) -> list[Reg]:
    b = build.ir
    near, step = b.fadd(p[1], p[2]), b.fsub(p[1], p[2])
    far, leap = b.fadd(p[3], p[4]), b.fsub(p[3], p[4])

    def power(k: int, x: Reg, y: Reg) -> Reg:
        return _times(build, NEAR**k, x, b.fmul(y, build.like(y, FAR**k)))

    return [
        b.fadd(b.fadd(p[0], near), far),
        power(1, step, leap),
        power(2, near, far),
        b.fadd(power(3, step, leap), p[5]),
    ]


DATA: dict[int, Line] = {2: _data2, 4: _data4}
RESULT: dict[int, Line] = {2: _result2, 4: _result4}


def both_ways(build: Builder, line: Line, rows: Sequence[Sequence[Reg]]) -> list[list[Reg]]:
    """Transform the rows, then the columns: result[i][j]."""
    across = [line(build, row) for row in rows]
    columns = [line(build, [row[j] for row in across]) for j in range(len(across[0]))]
    return [[column[i] for column in columns] for i in range(len(columns[0]))]


def filter_transform(build: Builder, m: int, taps: Sequence[Sequence[Reg]]) -> list[list[Reg]]:
    """G g G^T of scalars."""
    rows = FILTER[m]
    half = [[_dot(build, row, [taps[k][j] for k in range(TAPS)]) for j in range(TAPS)] for row in rows]
    return [[_dot(build, row, half[i]) for row in rows] for i in range(len(rows))]


def _dot(build: Builder, factors: Sequence[float], values: Sequence[Reg]) -> Reg:
    b = build.ir
    terms = [b.fmul(v, build.like(v, float(f))) for f, v in zip(factors, values, strict=True) if f]
    total = terms[0]
    for t in terms[1:]:
        total = b.fadd(total, t)
    return total


# ---- contiguous pixels to tiles and back ----


def split(build: Builder, pixels: Sequence[Reg], tail: Reg) -> list[Reg]:
    """Pixels of a line of tiles to their columns: result[j][t] = pixel m*t + j, 0 <= j < m + 2.

    `pixels` are m vectors; `tail` holds the two pixels behind them in its first lanes.
    """
    m, lanes = len(pixels), lanes_of(pixels[0])
    columns = _split4(build, pixels) if m == 4 else _split2(build, pixels)
    shift = list(range(1, lanes))
    return [*columns, *(build.shuffle(columns[j], tail, [*shift, lanes + j]) for j in range(TAPS - 1))]


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
