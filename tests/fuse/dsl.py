"""A tiny language for loop graphs with real index maps:  g = Build(); x = g.input("x"); r = g.E("r", x) ...

Every builder makes one Compute named like its value. Shapes broadcast as in ONNX; the default is f32[8,8].
"""

from __future__ import annotations

from onnxfuse.config import FusionConfig, FusionMode
from onnxfuse.errors import Refusal
from onnxfuse.fuse import fuse
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, acc, apply, i64, lit, load, loads, substitute, sym, var, where
from onnxfuse.ir.graph import Node, Value
from onnxfuse.ir.loops import Axis, Compute, Item, LoopGraph, Opaque, Reduce
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.simplify import simplify
from onnxfuse.ir.types import Dim, tensor

F32 = DType.F32
TEST_OP = Op("Test", 1, Family.POINTWISE)


def val(name: str, shape: tuple[Dim, ...]) -> Value:
    return Value(name, tensor(F32, shape))


def axes_for(shape: tuple[Dim, ...]) -> tuple[Axis, ...]:
    return tuple(Axis("ijklmn"[k], d) for k, d in enumerate(shape))


def at(v: Value, index: tuple[Expr, ...]) -> Expr:
    return load(v, index, v.tensor.dtype)


def read(v: Value, axes: tuple[Axis, ...]) -> Expr:
    """Load with ONNX broadcasting against `axes`."""
    shape = v.tensor.shape
    tail = axes[len(axes) - len(shape) :]
    return at(v, tuple(i64(0) if d == 1 else var(a) for d, a in zip(shape, tail, strict=True)))


def join(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((d for d in dims if d != 1), 1) for dims in zip(*padded, strict=True))


class Build:
    """Collects items; `outputs` makes the LoopGraph."""

    def __init__(self, shape: tuple[Dim, ...] = (8, 8)) -> None:
        self.shape = shape
        self.inputs: list[Value] = []
        self.items: list[Item] = []

    def input(self, name: str, shape: tuple[Dim, ...] | None = None) -> Value:
        v = val(name, self.shape if shape is None else shape)
        self.inputs.append(v)
        return v

    def node(
        self, name: str, reads: tuple[Value, ...], outs: tuple[Value, ...], captures: tuple[Value, ...] = ()
    ) -> Node:
        return Node(TEST_OP, reads, outs, {}, f"n_{name}", (f"n_{name}",), captures)

    def add(self, name: str, axes: tuple[Axis, ...], body: Expr, reduce: Reduce | None = None) -> Value:
        over = () if reduce is None else reduce.axes
        units = {var(a): i64(0) for a in (*axes, *over) if a.extent == 1}
        body = substitute(body, units)  # as lower does: an axis of one element has no variable
        out = val(name, tuple(a.extent for a in axes))
        roots = (body,) if reduce is None or reduce.finish is None else (body, reduce.finish)
        reads = tuple(dict.fromkeys(ld.source for ld in loads(*roots)))
        c = Compute(out, axes, body, self.node(name, reads, (out,)), reduce)
        self.items.append(c)
        return out

    def pointwise(self, name: str, prim: str, *xs: Value) -> Value:
        """`prim` of all operands, broadcast."""
        axes = axes_for(join(*(x.tensor.shape for x in xs)))
        body = read(xs[0], axes)
        for x in xs[1:]:
            body = apply(prim, body, read(x, axes))
        return self.add(name, axes, apply(prim, body) if len(xs) == 1 else body)

    def E(self, name: str, *xs: Value, prim: str = "neg") -> Value:
        """Elementwise in its largest operands; smaller ones are broadcast."""
        return self.pointwise(name, prim if len(xs) == 1 else "add", *xs)

    def B(self, name: str, x: Value, shape: tuple[Dim, ...] | None = None) -> Value:
        """Expand."""
        axes = axes_for(self.shape if shape is None else shape)
        return self.add(name, axes, read(x, axes))

    def I(self, name: str, *xs: Value, perm: tuple[int, ...] | None = None) -> Value:  # noqa: E743
        """Transpose (one operand) or the sum of transposes."""
        perm = tuple(reversed(range(xs[0].tensor.rank))) if perm is None else perm
        axes = axes_for(tuple(xs[0].tensor.shape[p] for p in perm))
        inverse = [perm.index(d) for d in range(len(perm))]
        body: Expr | None = None
        for x in xs:
            one = at(x, tuple(var(axes[k]) for k in inverse))
            body = one if body is None else body + one
        assert body is not None
        return self.add(name, axes, body)

    def concat(self, name: str, a: Value, b: Value) -> Value:
        """Along axis 0."""
        n, m = a.tensor.shape[0], b.tensor.shape[0]
        assert isinstance(n, int)
        assert isinstance(m, int)
        axes = axes_for((n + m, *a.tensor.shape[1:]))
        rest = tuple(var(x) for x in axes[1:])
        i = var(axes[0])
        return self.add(name, axes, where(i < n, at(a, (i, *rest)), at(b, (simplify(i - n), *rest))))

    def reshape(self, name: str, x: Value, shape: tuple[int, ...]) -> Value:
        """Row-major reshape, naive div and mod, simplified."""
        axes = axes_for(shape)
        flat: Expr = i64(0)
        for a in axes:
            flat = flat * a.extent + var(a)
        index: list[Expr] = []
        for d in reversed(x.tensor.shape):
            index.append(simplify(flat % d))
            flat = flat // d
        return self.add(name, axes, at(x, tuple(reversed(index))))

    def R(self, name: str, *xs: Value, over: int | tuple[int, ...] = -1, op: str = "add", mean: bool = False) -> Value:
        """Reduce with keepdims over one or several axes (of the sum of the operands)."""
        shape = join(*(x.tensor.shape for x in xs))
        dims = {d % len(shape) for d in ((over,) if isinstance(over, int) else over)}
        axes = axes_for(tuple(1 if d in dims else e for d, e in enumerate(shape)))
        inner = tuple(Axis(f"r{d}", e) if d in dims else axes[d] for d, e in enumerate(shape))
        body = read(xs[0], inner)
        for x in xs[1:]:
            body = body + read(x, inner)
        init = lit(0.0, F32) if op == "add" else lit(float("-inf"), F32)
        finish = acc(F32) / 8.0 if mean else None
        over_axes = tuple(a for d, a in enumerate(inner) if d in dims)
        return self.add(name, axes, body, Reduce(over_axes, PRIMS[op], init, F32, finish))

    def C(self, name: str, x: Value, w: Value | None = None) -> Value:
        """Matmul x[i,k] * w[k,j]."""
        k = x.tensor.shape[-1]
        if w is None:
            w = self.input(f"w_{name}", (k, k))
        i, j, r = Axis("i", x.tensor.shape[-2]), Axis("j", w.tensor.shape[-1]), Axis("r", k)
        body = at(x, (var(i), var(r))) * at(w, (var(r), var(j)))
        return self.add(name, (i, j), body, Reduce((r,), PRIMS["add"], lit(0.0, F32), F32))

    def pool(self, name: str, x: Value) -> Value:
        """Window of 2 over the last axis, same shape (guarded)."""
        axes = axes_for(x.tensor.shape)
        r = Axis("r", 2)
        ix = var(axes[-1]) + var(r)
        extent = x.tensor.shape[-1]
        body = where(ix < extent, at(x, (*(var(a) for a in axes[:-1]), ix)), lit(float("-inf"), F32))
        return self.add(name, axes, body, Reduce((r,), PRIMS["max"], lit(float("-inf"), F32), F32))

    def O(self, name: str, *xs: Value, captures: tuple[Value, ...] = ()) -> Value:  # noqa: E743
        """A node that stays with onnxruntime."""
        out = val(name, self.shape)
        self.items.append(Opaque(self.node(name, xs, (out,), captures), Refusal("UN_TEST", "test")))
        return out

    def outputs(self, *outs: Value) -> LoopGraph:
        return LoopGraph("test", tuple(self.inputs), tuple(self.items), outs)


def N() -> Dim:
    return sym("N")


FULL = FusionConfig()
TVM = FusionConfig(mode=FusionMode.TVM)
EDGES = FusionConfig(mode=FusionMode.CANFUSE, rounds=0)  # stage A alone, per-edge kinds


def names(p: Partition) -> str:
    """Groups as `a+b | c`, members in order, groups in order of their first member."""
    place = {c.out: k for k, c in enumerate(p.loops.computes())}
    groups = sorted(p.groups, key=lambda g: place[g.members[0].out])
    return " | ".join("+".join(c.out.name for c in g.members) for g in groups)


def split(loops: LoopGraph, config: FusionConfig = EDGES) -> str:
    return names(fuse(loops, config))
