"""What is decided about a contraction before any code is emitted: tile, block sizes, and how each operand is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from onnxfuse.analysis.roles import Contraction, affine
from onnxfuse.analysis.traffic import stream_cost
from onnxfuse.codegen.build import Type, reg_type
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Load, axes_of, loads, syms_of
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.types import Dim
from onnxfuse.target import Target
from onnxfuse.templates.microkernel import Tile, tile_for

FEW_ROWS = 4  # products bound by reading b
SHALLOW = 128  # depth up to which a product may be bound by what it writes
STREAM_COST = 8  # cost of operations on b up to which a tile evaluates it while it multiplies


class Access(StrEnum):
    """How the micro-kernel comes to an operand.

    CONST      packed into panels at kernel creation
    DIRECT     read in place
    ROWS       a: packed per block, rows of k (k is the vector axis); b: packed per block, rows of columns
    COLUMNS    a: packed per block, rows of m (m is the vector axis)
    TRANSPOSE  b: packed per block by transposing registers (k has unit stride)
    DOT        b: read in place along k, for few rows (k has unit stride in a as well)
    PANEL      b: evaluated in place by the first tile of each panel, which leaves it packed for the tiles below
    """

    CONST = "const"
    DIRECT = "direct"
    ROWS = "rows"
    COLUMNS = "columns"
    TRANSPOSE = "transpose"
    DOT = "dot"
    PANEL = "panel"


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """Everything decided before emission. Sizes in elements; KC, NC, MC, MS are upper limits."""

    c: Contraction
    tile: Tile
    a: Access
    b: Access
    kc: int
    nc: int
    mc: int
    ms: int
    taps: int = 1  # blocks of K hold whole channels of so many taps
    shared: bool = False  # blocks of b are packed beforehand, for all units
    cores: int = 8  # to keep busy
    asks_ahead: bool = True  # for packed constants
    kept: bool = False  # PANEL: all panels of a block stay packed, and tiles follow each other along the rows
    pieces: bool = False  # rows come in pieces of any length, not in whole tiles and what the extent leaves of one

    @property
    def cuts(self) -> bool:
        """The blocks may follow the sizes of the product: nothing is packed again in every block."""
        return self.a in (Access.CONST, Access.DIRECT) and self.b in (Access.PANEL, Access.ROWS, Access.CONST)

    @property
    def packs_b(self) -> bool:
        """Blocks of b are packed in every call."""
        return self.b in (Access.ROWS, Access.TRANSPOSE)

    @property
    def rows_outer(self) -> bool:
        """Tiles follow each other along the rows of the output, the order in which b lies in memory."""
        return self.kept or self.b in (Access.DIRECT, Access.DOT)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the micro-kernels that can occur, the widest first; see `is_thin`."""
        t, n = self.tile, self.c.cols.extent
        partial = range(t.nr - t.lanes, 0, -t.lanes)
        if not isinstance(n, int):
            return (t.nr, *partial, *(w for w in (8, 4, 2, 1) if self.is_thin(w)))
        full, rest = divmod(n, t.nr)
        narrow = rest if self.is_thin(rest) else -(-rest // t.lanes) * t.lanes
        return tuple(dict.fromkeys((*([t.nr] if full else []), *([narrow] if rest else []))))

    def is_thin(self, width: int) -> bool:
        """So few columns that a tile costs less with the rows of packed panels of a in the lanes."""
        t = self.tile
        packed = self.a is Access.CONST and self.c.acc.is_float and self.b is not Access.DOT
        return packed and width <= max(2, t.lanes // 2) and width * -(-t.mr // t.lanes) < t.mr

    @property
    def block_size(self) -> int:
        """Elements of one packed block of b."""
        return (self.kc + self.tile.lanes) * self.b_row

    @property
    def b_bytes(self) -> int:
        """Size of an element of a constant b as it is packed."""
        return 2 if self.tile.half else self.c.acc.bytes

    @property
    def typ(self) -> Type:
        return reg_type(self.c.acc)

    @property
    def b_row(self) -> int:
        """Row length of a packed block of b: an odd number of cache lines, so that a panel fills all sets of L1."""
        if self.b is Access.PANEL:
            return self.tile.nr
        lines = -(-self.nc * self.c.acc.bytes // 64)
        return (lines + 1 + lines % 2) * 64 // self.c.acc.bytes

    @property
    def a_row(self) -> int:
        """Row length of a packed block of a: likewise."""
        lines = -(-(self.kc if self.a is Access.ROWS else self.ms) * self.c.acc.bytes // 64)
        return (lines + 1 + lines % 2) * 64 // self.c.acc.bytes

    @property
    def single(self) -> bool:
        """K is known to fit into one block."""
        depth = self.c.depth
        return isinstance(depth, int) and depth <= self.kc

    @property
    def b_size(self) -> int:
        """Elements of scratch for b: the block, or the last panel of an operand read in place."""
        if self.b in (Access.CONST, Access.DOT) or (self.packs_b and self.shared):
            return 0
        if self.packs_b:
            return self.block_size
        return (self.kc + self.tile.lanes) * (self.nc if self.kept else self.tile.nr)

    @property
    def a_size(self) -> int:
        """Elements of scratch for a."""
        if self.a is Access.ROWS:
            return self.ms * self.a_row + self.tile.lanes
        return self.kc * self.a_row + self.tile.lanes if self.a is Access.COLUMNS else 0

    @property
    def c_size(self) -> int:
        """Elements of scratch for resting tiles."""
        return 0 if self.single else self.mc * self.nc

    @property
    def slice_bytes(self) -> int:
        """Scratch of one task."""
        total = sum(-(-n // 16) * 16 for n in (self.a_size, self.b_size, self.c_size))
        return -(-total * self.c.acc.bytes // 64) * 64


def design(c: Contraction, kernel: Kernel, target: Target) -> Design:
    """The design for a contraction; sizes follow from the target and how the operands are read."""
    tile = replace(tile_for(target, c.acc, c.rows.extent, c.cols.extent), pairs=c.pairs is not None)
    a, b = _access_a(c, kernel), _access_b(c, kernel)
    if target.bf16_weights and b is Access.CONST and c.acc is DType.F32 and _few(c.rows.extent):
        tile = replace(tile, half=True)
    if b is Access.TRANSPOSE and a is Access.DIRECT and _few(c.rows.extent) and tile.lanes > 1:
        b, tile = Access.DOT, replace(tile, nv=1)
    kc, nc, mc, ms = _limits(a, b, c.rows.extent, c.depth)
    kept = False
    if b is Access.PANEL:
        if isinstance(c.depth, int) and c.depth <= kc:
            kc, nc, mc = c.depth, 4 * nc, 2 * mc
            kept = a is Access.CONST and _writes_most(c, target)
            nc = min(nc, target.l2 // 2 // 4 // max(1, kc)) if kept else nc
        elif isinstance(c.cols.extent, int):  # tiles at rest: the fewer columns, the more rows
            mc = max(mc, min(1024, mc * nc // max(tile.nr, c.cols.extent)))
        ms = mc if kept else min(mc, target.l2 // 2 // 4 // max(1, kc))
    scale = 4 / c.acc.bytes
    kc = int(kc * scale)
    nc = -(-int(nc * scale) // tile.nr) * tile.nr
    ms, mc = (max(tile.mr, x // tile.mr * tile.mr) for x in (ms, mc))
    if isinstance(c.rows.extent, int):
        mc = min(mc, -(-max(1, c.rows.extent) // tile.mr) * tile.mr)
    taps = _taps(c) if b is Access.ROWS else 1
    kc = max(1, kc // taps) * taps
    if isinstance(c.depth, int):
        blocks = max(1, -(-c.depth // kc))
        kc = max(1, -(-c.depth // taps // blocks)) * taps
    return Design(c, tile, a, b, kc, nc, mc, ms, taps, cores=target.cores, asks_ahead=target.asks_ahead, kept=kept)


def _writes_most(c: Contraction, target: Target) -> bool:
    """Bound by what it writes, more than L2 holds: whole lines of it are worth reading the panels of b from L2 for."""
    rows, depth, cols = c.rows.extent, c.depth, c.cols.extent
    if not (isinstance(rows, int) and isinstance(depth, int) and depth <= SHALLOW and rows >= 2 * depth):
        return False
    return not isinstance(cols, int) or rows * cols * c.acc.bytes > target.l2


def _few(rows: Dim) -> bool:
    return isinstance(rows, int) and rows <= FEW_ROWS


def _limits(a: Access, b: Access, rows: Dim, depth: Dim) -> tuple[int, int, int, int]:
    """(KC, NC, MC, MS) in elements of four bytes.

    A packed element of a is used NC times, one of b MC times; tiles at rest take MC * NC. A packed block of b and MS
    rows of a share L2; panels are streamed from L2 without loss, so a panel need not fit into L1.
    """
    if b is Access.DIRECT and _few(rows):
        return 8, 4096, 96, 96  # bound by reading b: few rows of it at a time, along their whole length
    if b is Access.PANEL:
        # One block of 512 is 0.99 to 1.15 times as fast as two, whose tiles rest; one of 1024 is slower than three.
        return 512 if isinstance(depth, int) and depth <= 512 else 384, 256, 192, 192
    if b in (Access.CONST, Access.DIRECT, Access.DOT):
        if isinstance(depth, int) and a not in (Access.ROWS, Access.COLUMNS):
            return (1024 if depth <= 1024 else 384), 384, 192, 96
        return (512 if a in (Access.ROWS, Access.COLUMNS) else 768), 384, 192, 96
    if a is Access.CONST:
        return 384, 128, 1024, 96
    return 256, 256, 384, 96


def _taps(c: Contraction) -> int:
    """Number of summed products per value of the first k axis, where it is known."""
    inner = [a.extent for a in c.k[1:]]
    total = 1
    for extent in inner:
        total *= extent if isinstance(extent, int) else 0
    return max(1, total)


def _is_const(e: Expr, c: Contraction, kernel: Kernel) -> bool:
    """The factor depends on constants alone, and its axes have known extents."""
    reads = loads(e)
    sources = {c.views[ld.source].source if ld.source in c.views else ld.source for ld in reads}
    static = all(isinstance(a.extent, int) for a in axes_of(e))
    return bool(reads) and sources <= kernel.consts and static and not syms_of(e)


def _plain(e: Expr, c: Contraction, whole: bool) -> Load | None:
    """The factor as a bare load that is affine in its row or column axis and in one k axis."""
    return e if isinstance(e, Load) and whole and len(c.k) == 1 else None


def _unit(e: Load, axis: Axis | None) -> bool:
    """The load is contiguous along `axis`."""
    if axis is None:
        return False
    return affine(e.index[-1], axis) == 1 and all(affine(i, axis) == 0 for i in e.index[:-1])


def _linear(e: Load, *axes: Axis | None) -> bool:
    return all(affine(i, a) is not None for i in e.index for a in axes if a is not None)


def _access_a(c: Contraction, kernel: Kernel) -> Access:
    if _is_const(c.a, c, kernel):
        return Access.CONST
    ld = _plain(c.a, c, c.rows.factor)
    narrow = isinstance(c.cols.extent, int) and c.cols.extent <= 32
    if ld is not None and _linear(ld, c.rows.axis, c.k[0]):
        if narrow or c.rows.axis is None or _unit(ld, c.k[0]):
            return Access.DIRECT
        return Access.COLUMNS if _unit(ld, c.rows.axis) else Access.ROWS
    reads = loads(c.a)
    m = c.rows.axis
    return Access.COLUMNS if m is not None and any(_unit(r, m) for r in reads) else Access.ROWS


def _access_b(c: Contraction, kernel: Kernel) -> Access:
    if _is_const(c.b, c, kernel):
        return Access.CONST
    rows = c.rows.extent
    few = isinstance(rows, int) and rows <= 16
    ld = _plain(c.b, c, c.cols.factor)
    if ld is None or not _linear(ld, c.cols.axis, c.k[0]):
        joined = isinstance(c.b, Apply) and c.b.prim.name == "where"
        return Access.PANEL if _streams(c) and (joined or not few) else Access.ROWS
    if _unit(ld, c.cols.axis):
        return Access.DIRECT if few else Access.PANEL
    return Access.TRANSPOSE if _unit(ld, c.k[0]) else Access.ROWS


def _streams(c: Contraction) -> bool:
    """The factor b is a few operations on loads that have unit stride along the columns, or do not depend on them."""
    if len(c.k) != 1 or not c.cols.factor or c.cols.axis is None:
        return False
    cost = stream_cost(c.b, c.cols.axis)
    if cost is None or cost > STREAM_COST:
        return False
    reads = loads(c.b)
    return any(_unit(r, c.cols.axis) for r in reads) and all(
        _linear(r, c.cols.axis, c.k[0]) and (_unit(r, c.cols.axis) or c.cols.axis not in axes_of(r)) for r in reads
    )
