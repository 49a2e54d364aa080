"""Operands of a contraction at run time: blocks of a and b, packed or in place, and the panels and tiles within."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from onnxfuse.analysis.roles import Contraction
from onnxfuse.codegen.build import I64, PTR, VOID, Builder, Function, Index, Reg, mem_type, reg_type
from onnxfuse.codegen.scalar_expr import Env, emit_expr, open_kernel
from onnxfuse.codegen.scalar_expr import affine as split_affine
from onnxfuse.ir.expr import Expr, Lit, Load, var
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.templates.gemm_blocks import Split
from onnxfuse.templates.gemm_const import with_views
from onnxfuse.templates.gemm_design import Access, Design
from onnxfuse.templates.gemm_joined import Tables, rows_at
from onnxfuse.templates.gemm_lift import with_lifts
from onnxfuse.templates.packing import Line, decode, flat_of, pack_block, pack_taps, pack_transposed


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """An operand for one block: element (i, k) is at base + i*row + k*step."""

    base: Reg
    row: Index
    step: Index


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One unit at run time: where it is and where its operands come from."""

    env: Env
    split: Split
    m0: Index
    m1: Index
    n0: Index
    n1: Index
    packed_a: Reg
    packed_b: Reg
    scratch_a: Reg
    scratch_b: Reg
    scratch_c: Reg
    point: Index
    env_ptr: Reg
    bufs: Reg
    lifted: Reg
    shared: Reg | None = None  # where blocks packed beforehand begin (Design.shared)
    column: Index = 0  # batch point and block of columns
    tables: Tables = field(default_factory=dict)  # rows of joined factors


def _in_place(build: Builder, env: Env, e: Load, own: Axis | None, k: Axis) -> Matrix:
    """A bare load as a strided matrix, base at the origin of its row (or column) and k axes."""
    zero = {a: build.i64(0) for a in (own, k) if a is not None}
    here = env.at(zero)
    flat = flat_of(env, e)
    base = build.offset(env.buffers[e.source].ptr, emit_expr(build, here, flat), reg_type(e.dtype))
    steps: list[Index] = []
    for axis in (own, k):
        split = None if axis is None else split_affine(flat, var(axis))
        step = split[1] if split is not None else None
        steps.append(0 if step is None else int(step.value) if isinstance(step, Lit) else emit_expr(build, here, step))
    return Matrix(base, steps[0], steps[1])


def _shift(build: Builder, d: Design, m: Matrix, row: Index, k: Index) -> Reg:
    return build.offset(m.base, build.add(build.mul(row, m.row), build.mul(k, m.step)), d.typ)


def _own(c: Contraction, which: str) -> tuple[Axis, ...]:
    """Axes a factor is written in, on its own side."""
    side = c.rows if which == "a" else c.cols
    if side.axis is None:
        return ()
    return (side.axis,) if side.factor else side.parts


def emit_block_b(build: Builder, kernel: Kernel, d: Design) -> Function:
    """K.block(env, bufs, lifted, batch point, n0, n1, k0, kc, dst): evaluate one block of b into rows of columns."""
    c = d.c
    with build.function("block", VOID, [PTR, PTR, PTR, I64, I64, I64, I64, I64, PTR]) as fn:
        fn.linkage = "internal"
        if d.b is Access.PANEL:
            fn.attributes.add("noinline")  # its masks would take registers in the loop over tiles
        env_ptr, bufs, lifted, point, n0, n1, k0, kc, dst = fn.args
        env = with_lifts(build, with_views(open_kernel(build, kernel, env_ptr, bufs), c), c, lifted)
        place = env.at(decode(build, env, c.batch, point))
        count = build.sub(n1, n0)
        if d.b is Access.TRANSPOSE:
            assert isinstance(c.b, Load)
            m = _in_place(build, place, c.b, c.cols.axis, c.k[0])
            src = _shift(build, d, m, n0, k0)
            pack_transposed(build, src, m.row, count, kc, dst, d.b_row, c.acc, d.tile.lanes)
        else:
            columns = Line(_own(c, "b"), n0, count)
            depth = Line(c.k, k0, kc)
            if not pack_taps(build, place, c.b, depth, columns, dst, d.b_row, d.tile.lanes):
                pack_block(build, place, c.b, depth, columns, dst, d.b_row, d.tile.lanes)
    return fn


def a_block(build: Builder, u: Unit, d: Design, k0: Index, kc: Index, s0: Index, s1: Index) -> Matrix:
    """Rows s0..s1 of a over one block of K, packed where the design says so."""
    c = d.c
    if d.a is Access.CONST:
        return Matrix(u.packed_a, 1, d.tile.mr)
    if d.a is Access.DIRECT:
        assert isinstance(c.a, Load)
        return _in_place(build, u.env, c.a, c.rows.axis, c.k[0])
    rows = Line(_own(c, "a"), s0, build.sub(s1, s0))
    depth = Line(c.k, k0, kc)
    if d.a is Access.ROWS:
        pack_block(build, u.env, c.a, rows, depth, u.scratch_a, d.a_row, d.tile.lanes)
        return Matrix(u.scratch_a, d.a_row, 1)
    pack_block(build, u.env, c.a, depth, rows, u.scratch_a, d.a_row, d.tile.lanes)
    return Matrix(u.scratch_a, 1, d.a_row)


def a_tile(build: Builder, d: Design, a: Matrix, i: Index, s0: Index, k0: Index, depth: Index) -> Matrix:
    """The rows of one tile."""
    if d.a is Access.CONST:  # panels of MR rows; i is a multiple of MR
        return replace(a, base=build.offset(a.base, build.add(build.mul(i, depth), build.mul(k0, d.tile.mr)), d.typ))
    if d.a is Access.DIRECT:
        return replace(a, base=_shift(build, d, a, i, k0))
    return replace(a, base=_shift(build, d, a, build.sub(i, s0), 0))


def b_block(build: Builder, u: Unit, d: Design, kb: Index, k0: Index, kc: Index, block: Function | None) -> Matrix:
    """The columns of the unit over one block of K, packed by `block` where the design says so."""
    c = d.c
    if d.b is Access.CONST:
        return Matrix(u.packed_b, 1, d.tile.nr)
    if d.b is Access.PANEL:
        return Matrix(u.scratch_b, 1, d.tile.nr)
    if block is None:
        assert isinstance(c.b, Load)
        return _in_place(build, u.env, c.b, c.cols.axis, c.k[0])
    if d.shared:
        number = build.add(build.mul(u.column, u.split.kblocks), kb)
        return Matrix(build.offset(u.shared, build.mul(number, d.block_size), d.typ), 1, d.b_row)
    args = [u.env_ptr, u.bufs, u.lifted, *(build.i64(x) for x in (u.point, u.n0, u.n1, k0, kc)), u.scratch_b]
    build.ir.call(block, args)
    return Matrix(u.scratch_b, 1, d.b_row)


def b_panel(
    build: Builder, u: Unit, d: Design, b: Matrix, col: tuple[Index, Index], depth: tuple[Index, Index], first: Reg
) -> Matrix:
    """The columns of one panel. Read in place along columns, the last one is copied: no load may pass a tensor's end.

    first: this is the first tile of the panel.
    """
    (j, cols), (k0, kc) = col, depth
    if d.b is Access.CONST:
        at = build.add(build.mul(j, u.split.k), build.mul(k0, d.tile.nr))
        return replace(b, base=build.offset(b.base, at, d.tile.b_typ))
    if d.b is Access.PANEL:
        return replace(b, base=panel_home(build, u, d, j))
    if d.b not in (Access.DIRECT, Access.DOT):
        return replace(b, base=build.offset(b.base, build.sub(j, u.n0), d.typ))
    at = _shift(build, d, b, j, k0)
    if d.b is Access.DOT or (isinstance(d.c.cols.extent, int) and d.c.cols.extent % d.tile.nr == 0):
        return replace(b, base=at)
    partial = build.ir.icmp_signed("<", build.i64(cols), build.i64(d.tile.nr))
    with build.if_then(build.ir.and_(partial, first)):
        line, depth_line = Line(_own(d.c, "b"), j, cols), Line(d.c.k, k0, kc)
        pack_block(build, u.env, d.c.b, depth_line, line, u.scratch_b, d.tile.nr, d.tile.lanes)
    base = build.ir.select(partial, u.scratch_b, at)
    return replace(b, base=base, step=build.ir.select(partial, build.i64(d.tile.nr), build.i64(b.step)))


def panel_home(build: Builder, u: Unit, d: Design, j: Index) -> Reg:
    """Where the panel that begins at column j is packed."""
    if not d.kept:
        return u.scratch_b
    return build.offset(u.scratch_b, build.mul(build.sub(j, u.n0), d.kc + d.tile.lanes), d.typ)


def pack_panel(
    build: Builder, u: Unit, d: Design, block: Function, col: tuple[Index, Index], depth: tuple[Index, Index]
) -> None:
    """One panel of b into scratch, of any width."""
    j, cols = col
    place = (u.point, j, build.add(j, cols), *depth)
    build.ir.call(block, [u.env_ptr, u.bufs, u.lifted, *(build.i64(x) for x in place), panel_home(build, u, d, j)])


def panel_reader(build: Builder, u: Unit, d: Design, j: Index, k0: Index) -> Callable[[Index], list[Reg]]:
    """Reads the columns of a full panel at a step of k, and packs them."""
    c, lanes = d.c, d.tile.lanes
    x = c.cols.axis
    assert x is not None
    home = panel_home(build, u, d, j)

    def read(k: Index) -> list[Reg]:
        row = build.add(k0, k)
        env = u.env.at({c.k[0]: build.i64(row)})
        joined = rows_at(build, u.tables, row, j)
        out = []
        for v in range(0, d.tile.nr, lanes):
            here = env.at({x: build.i64(build.add(j, v))}, bound=_vectors(build, joined, v, lanes)).vector(x, lanes)
            out.append(build.widen(emit_expr(build, here, c.b), lanes))
            build.store(out[-1], build.offset(home, build.add(build.mul(k, d.tile.nr), v), d.typ))
        return out

    return read


def _vectors(build: Builder, rows: Mapping[Expr, Reg], first: int, lanes: int) -> dict[Expr, Reg]:
    """Elements of rows from `first` on."""
    types = {e: mem_type(e.dtype) for e in rows}
    return {e: build.load(build.offset(at, first, types[e]), types[e], lanes) for e, at in rows.items()}
