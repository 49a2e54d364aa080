"""How a product of known size is cut into units: few and large ones that keep every core busy until the end.

All costs are in steps of k of a full tile. The cut changes where sums are computed, never a sum.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

from onnxfuse.templates.microkernel import Tile

REREAD = 0.4  # reading a row of tiles of a again, for another block of columns: measured
STEP_SECONDS = 1.8e-9  # one step of k of a full tile: measured, 6 x 16
TASK_SECONDS = 3e-6  # handing a task to a thread
NARROW = 0.5  # vectors that a narrower tile costs beside its own: measured, one of two is 0.6 of both
MOST = 64  # blocks in one direction that are looked at


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes of a product, and what limits its blocks.

    nc, mc  columns and rows of a block, at most
    fetch   what the first tile of a panel costs above the others
    pack    what packing a panel costs, in every unit
    most    tasks, at most
    """

    batch: int
    m: int
    n: int
    k: int
    tile: Tile
    nc: int
    mc: int
    fetch: float
    pack: float
    cores: int
    most: int


@functools.lru_cache(maxsize=4096)
def cut(p: Product) -> tuple[int, int]:
    """(columns, rows) of a block, multiples of the tile, at most `nc` and `mc`."""
    if min(p.batch, p.m, p.n) < 1:
        return p.tile.nr, p.tile.mr
    panels, tiles = -(-p.n // p.tile.nr), -(-p.m // p.tile.mr)
    widths = _sizes(panels, p.nc // p.tile.nr)
    heights = _sizes(tiles, p.mc // p.tile.mr)
    best = min(((_makespan(p, w, h), w, h) for w in widths for h in heights), key=lambda c: (c[0], -c[1], -c[2]))
    return best[1] * p.tile.nr, best[2] * p.tile.mr


def _sizes(total: int, most: int) -> list[int]:
    """Sizes of the evened-out blocks of `total` things, at most `most` each, for every number of blocks."""
    most = max(1, min(most, total))
    first = -(-total // most)
    return sorted({-(-total // count) for count in range(first, min(total, first + MOST) + 1)})


def _makespan(p: Product, width: int, height: int) -> float:
    """Time until the last core is done, cores taking one task after another."""
    columns = [_panels(p, j, width) for j in range(0, -(-p.n // p.tile.nr), width)]
    rows = [_tiles(p, i, height) for i in range(0, -(-p.m // p.tile.mr), height)]
    units = [c * (r + p.fetch + p.pack) + REREAD * r for c in columns for r in rows] * p.batch
    tasks = tasks_of(len(units), p.most, p.cores)
    start = TASK_SECONDS / STEP_SECONDS / max(1, p.k)
    loads = [sum(units[t * len(units) // tasks : (t + 1) * len(units) // tasks]) + start for t in range(tasks)]
    if tasks == 1 or p.cores == 1:
        return sum(loads)
    return _last(loads, p.cores) + start


def _last(loads: list[float], cores: int) -> float:
    """When the last core is done."""
    busy = [0.0] * cores
    for load in loads:
        heapq.heapreplace(busy, busy[0] + load)
    return max(busy)


@functools.lru_cache(maxsize=4096)
def tasks_of(units: int, most: int, cores: int) -> int:
    """Into how many tasks equal units are best divided: the largest number of those after which all are done first."""

    def done(tasks: int) -> float:
        return _last([float((t + 1) * units // tasks - t * units // tasks) for t in range(tasks)], cores)

    return min(range(max(1, min(units, most)), 0, -1), key=done)


def _panels(p: Product, first: int, count: int) -> float:
    """Panels `first` .. of a block; a last one that is not full counts less (Design.widths, Design.is_thin)."""
    cols = min(p.n - first * p.tile.nr, count * p.tile.nr)
    whole, rest = divmod(cols, p.tile.nr)
    if rest <= max(2, p.tile.lanes // 2):
        return whole + 0.1 * rest
    vectors = -(-rest // p.tile.lanes)
    return whole + (vectors + NARROW) / (p.tile.nv + NARROW)


def _tiles(p: Product, first: int, count: int) -> float:
    """Tiles `first` .. of a block; a last one of few rows counts less."""
    rows = min(p.m - first * p.tile.mr, count * p.tile.mr)
    whole, rest = divmod(rows, p.tile.mr)
    return whole + (rest + 1) / (p.tile.mr + 1) * (rest > 0)
