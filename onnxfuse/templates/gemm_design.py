"""What is decided about a contraction before any code is emitted: tile, block sizes, and how each operand is read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from onnxfuse.analysis.roles import Contraction, affine
from onnxfuse.codegen.build import Type, reg_type
from onnxfuse.ir.expr import Expr, Load, axes_of, loads, syms_of
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.target import Target
from onnxfuse.templates.microkernel import Tile, tile_for


class Access(StrEnum):
    """How the micro-kernel comes to an operand.

    CONST      packed into panels at kernel creation
    DIRECT     read in place
    ROWS       a: packed per block, rows of k (k is the vector axis); b: packed per block, rows of columns
    COLUMNS    a: packed per block, rows of m (m is the vector axis)
    TRANSPOSE  b: packed per block by transposing registers (k has unit stride)
    """

    CONST = "const"
    DIRECT = "direct"
    ROWS = "rows"
    COLUMNS = "columns"
    TRANSPOSE = "transpose"


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
    shared: bool | None = False  # blocks of b are packed once, by phase 0 (None: known at run time)

    @property
    def packs_b(self) -> bool:
        """Blocks of b are packed in every call."""
        return self.b in (Access.ROWS, Access.TRANSPOSE)

    @property
    def block_size(self) -> int:
        """Elements of one packed block of b."""
        return (self.kc + self.tile.lanes) * self.b_row

    @property
    def typ(self) -> Type:
        return reg_type(self.c.acc)

    @property
    def b_row(self) -> int:
        """Row length of a packed block of b: an odd number of cache lines, so that a panel fills all sets of L1."""
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
        if self.b is Access.CONST or (self.packs_b and self.shared):
            return 0
        return (self.kc + self.tile.lanes) * self.tile.nr if self.b is Access.DIRECT else self.block_size

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
    tile = tile_for(target, c.acc, c.rows.extent, c.cols.extent)
    a, b = _access_a(c, kernel), _access_b(c, kernel)
    kc = 256 * 4 // c.acc.bytes
    in_place = b in (Access.CONST, Access.DIRECT)
    # A packed element of a is used nc times, one of b mc times; tiles at rest take mc * nc.
    nc = 384 if in_place else 96 if a is Access.CONST else 256
    nc = -(-nc * 4 // c.acc.bytes // tile.nr) * tile.nr
    ms = 96 // tile.mr * tile.mr
    mc = ms * (1 if in_place else 3 if a is Access.CONST else 4)
    taps = _taps(c) if b is Access.ROWS else 1
    kc = max(1, kc // taps) * taps
    if isinstance(c.depth, int):
        blocks = max(1, -(-c.depth // kc))
        kc = max(1, -(-c.depth // taps // blocks)) * taps
    return Design(c, tile, a, b, kc, nc, mc, ms, taps)


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
        if narrow or c.rows.axis is None:
            return Access.DIRECT
        return Access.COLUMNS if _unit(ld, c.rows.axis) else Access.ROWS
    reads = loads(c.a)
    m = c.rows.axis
    return Access.COLUMNS if m is not None and any(_unit(r, m) for r in reads) else Access.ROWS


def _access_b(c: Contraction, kernel: Kernel) -> Access:
    if _is_const(c.b, c, kernel):
        return Access.CONST
    ld = _plain(c.b, c, c.cols.factor)
    if ld is None or not _linear(ld, c.cols.axis, c.k[0]):
        return Access.ROWS
    if _unit(ld, c.cols.axis):
        few = isinstance(c.rows.extent, int) and c.rows.extent <= 16
        return Access.DIRECT if few else Access.ROWS
    return Access.TRANSPOSE if _unit(ld, c.k[0]) else Access.ROWS
