"""`K.dims`: from the shapes a kernel is given to its env, with every check of the inputs.

In: a kernel (bindings, checks, pairs that may differ). Out: one function in the kernel's own module, and the list of
faults it can report, each with the text a user sees. Nothing else in a kernel looks at shapes before this has agreed.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from onnxfuse.codegen.build import I64, PTR, Builder
from onnxfuse.codegen.reach import emit_reach
from onnxfuse.codegen.scalar_expr import Env, emit_expr
from onnxfuse.errors import CompileError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Apply, Expr, Lit, Sym, syms_of, walk
from onnxfuse.ir.given import Part
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, Kernel

ENV_MIN = 2  # K.dims leaves (expected, got) in env[0:2] when it fails
MAX_BYTES = 1 << 60  # an output with more bytes than this is refused, long before addresses overflow


@dataclass(frozen=True, slots=True)
class Fault:
    """Why `K.dims` can refuse: the start of the message; `show_expected`: a number known at run time follows."""

    text: str
    show_expected: bool = True

    def message(self, expected: int, got: int) -> str:
        """The text a user sees."""
        return f"{self.text}{expected if self.show_expected else ''}, got {got}"


def env_words(kernel: Kernel) -> int:
    """Length of a kernel's env."""
    ranks = sum(v.tensor.rank for v in kernel.inputs) + sum(t.rank for t in kernel.made)
    return max(ENV_MIN, len(kernel.dims) + ranks)


def emit_dims(build: Builder, kernel: Kernel) -> tuple[Fault, ...]:
    """Write `i64 K.dims(ptr in_shapes, ptr env, ptr bufs)`; returns the faults its negative results stand for.

    in_shapes holds the dims of all inputs, one after another (ranks are the static ones; checked by the caller), and
    may be the very place in env where they belong. Result: 0 = all `maybe` pairs equal, 1 = some pair differs (general
    variant), -1-k = fault k, with (expected, got) in env[0:2].
    """
    return _Dims(build, kernel).emit()


class _Dims:
    """State of writing one `K.dims`: known symbols and the faults so far."""

    def __init__(self, build: Builder, kernel: Kernel) -> None:
        self.build = build
        self.kernel = kernel
        self.faults: list[Fault] = []
        self.syms: dict[Sym, ir.Value] = {}
        self.env = Env(1, None, {}, self.syms, {})
        self.wrapping: dict[Expr, ir.Value | None] = {}
        self.bounded: set[Expr] = set()
        self.reached: dict[tuple[Value, int], tuple[ir.Value, ir.Value]] = {}
        self.start: dict[Value, int] = {}
        at = 0
        for v in kernel.inputs:
            self.start.setdefault(v, at)
            at += v.tensor.rank
        self.input_words = at
        self.env_ptr: ir.Value
        self.bufs_ptr: ir.Value

    def emit(self) -> tuple[Fault, ...]:
        build, kernel = self.build, self.kernel
        with build.function("dims", I64, [PTR, PTR, PTR]) as fn:
            shapes, self.env_ptr, self.bufs_ptr = fn.args
            raw = [build.load(build.offset(shapes, k, I64), I64) for k in range(self.input_words)]
            self.static_dims(raw)
            self.bind(raw)
            self.checks(raw)
            different = self.maybe()
            self.needs()
            outputs = self.outputs()
            # Everything is read and checked: env may now be written (in_shapes can be a part of it).
            words = [self.syms[b.sym] for b in kernel.dims] + raw + outputs
            for k, word in enumerate(words):
                build.store(word, build.offset(self.env_ptr, k, I64))
            build.ret(different)
        return tuple(self.faults)

    def static_dims(self, raw: list[ir.Value]) -> None:
        at = 0
        for i, v in enumerate(self.kernel.inputs):
            for axis, dim in enumerate(v.tensor.shape):
                if isinstance(dim, int):
                    self.require_equal(self.place(i, axis) + "expected ", self.build.i64(dim), raw[at])
                at += 1

    def bind(self, raw: list[ir.Value]) -> None:
        b = self.build.ir
        for binding in self.kernel.dims:
            at = self.kernel.inputs.index(binding.value)
            if binding.part is None:
                got = raw[self.start[binding.value] + binding.axis]
            elif binding.part.of_all:
                got = self.reach(binding, raw)[0 if binding.part is Part.REACH else 1]
            else:
                got = self.element(binding, binding.part)
            where = self.place(at, binding.axis, binding.part is not None)
            value = b.sub(got, self.build.i64(binding.offset)) if binding.offset else got
            if binding.scale != 1:
                text = f"{where}expected a multiple of {binding.scale}"
                text += f" plus {binding.offset}" if binding.offset else ""
                rest = b.srem(value, self.build.i64(binding.scale))
                self.require(Fault(text, False), b.icmp_signed("==", rest, self.build.i64(0)), got, got)
                value = b.sdiv(value, self.build.i64(binding.scale))
            enough = b.icmp_signed(">=", value, self.build.i64(0))
            self.require(Fault(f"{where}expected at least "), enough, self.build.i64(binding.offset), got)
            before = self.syms.setdefault(binding.sym, value)
            if before is not value:
                self.require_equal(f"{where}expected {binding.sym} = ", before, value)

    def reach(self, binding: DimBinding, raw: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """How far indices reach, from the start and from the end; both in one reading."""
        value, column = binding.value, binding.axis
        if (value, column) not in self.reached:
            shape = raw[self.start[value] :][: value.tensor.rank]
            dtype, data = value.tensor.dtype, self.data(value)
            self.reached[value, column] = emit_reach(self.build, data, dtype, shape, column)
        return self.reached[value, column]

    def data(self, value: Value) -> ir.Value:
        """Address of an input's elements."""
        build = self.build
        return build.load(build.offset(self.bufs_ptr, self.kernel.inputs.index(value), PTR), PTR)

    def element(self, binding: DimBinding, part: Part) -> ir.Value:
        """What a symbol stands for of an element (the input's static shape has been checked before)."""
        build, b = self.build, self.build.ir
        typ = ir.IntType(8 * binding.value.tensor.dtype.bytes)
        data = self.data(binding.value)
        raw = build.load(build.offset(data, binding.axis, typ), typ)
        if part is Part.BITS:
            return b.zext(raw, I64)
        value = raw if typ == I64 else b.sext(raw, I64)
        if part is Part.WHOLE:
            return value
        zero, negative = build.i64(0), b.icmp_signed("<", value, build.i64(0))
        if part is Part.PLUS:
            return b.select(negative, zero, value)
        # The lowest number has no opposite: for a start or an end the number beside it says the same.
        lowest = b.icmp_signed("==", value, build.i64(-(1 << 63)))
        opposite = b.select(lowest, build.i64((1 << 63) - 1), b.sub(zero, value))
        return b.select(negative, opposite, zero)

    def checks(self, raw: list[ir.Value]) -> None:
        for check in self.kernel.checks:
            where = self.place(self.kernel.inputs.index(check.value), check.axis)
            text = f"{where}expected " + ("" if isinstance(check.expr, Lit) else f"{check.expr} = ")
            self.require_equal(text, self.value(check.expr), raw[self.start[check.value] + check.axis])

    def maybe(self) -> ir.Value:
        """1 if some pair differs; a pair in which neither side is 1 does not broadcast."""
        b, one = self.build.ir, self.build.i64(1)
        differs: ir.Value = ir.Constant(ir.IntType(1), 0)
        for left, right in self.kernel.maybe:
            x, y = self.value(left), self.value(right)
            unequal = b.icmp_signed("!=", x, y)
            fits = b.or_(b.or_(b.icmp_signed("==", x, one), b.icmp_signed("==", y, one)), b.not_(unequal))
            self.require(Fault(f"{self.title()}: {left} and {right} do not broadcast: expected 1 or "), fits, x, y)
            differs = b.or_(differs, unequal)
        return b.zext(differs, I64)

    def needs(self) -> None:
        """Comparisons of dimensions, with both sides in the message."""
        indices = {b.sym: b.value for b in self.kernel.dims if b.part is not None and b.part.of_all}
        for need in self.kernel.needs:
            assert isinstance(need, Apply), need
            left, right = need.args
            text = f"{self.title()}: needs {need}: the right side is "
            if left in indices:
                i = self.kernel.inputs.index(indices[left])
                text = f"{self.title()}: input {i}: an index is out of range: the extent is "
            self.require(Fault(text), self.value(need), self.value(right), self.value(left))

    def outputs(self) -> list[ir.Value]:
        b = self.build.ir
        out: list[ir.Value] = []
        for j, (v, made) in enumerate(zip(self.kernel.outputs, self.kernel.made, strict=True)):
            total: ir.Value = self.build.i64(made.dtype.bytes)
            where = f"{self.title()}: output {j} ({v.name})"
            for axis, dim in enumerate(made.shape):
                n = self.build.i64(dim) if isinstance(dim, int) else self.value(dim)
                good = b.icmp_signed(">=", n, self.build.i64(0))
                self.require(Fault(f"{where} axis {axis}: expected at least "), good, self.build.i64(0), n)
                pair = b.smul_with_overflow(total, n)
                total = b.extract_value(pair, 0)
                small = b.icmp_unsigned("<=", total, self.build.i64(MAX_BYTES))
                fits = b.and_(b.not_(b.extract_value(pair, 1)), small)
                self.require(Fault(f"{where} is too large at axis {axis}", False), fits, n, n)
                out.append(n)
        return out

    def require_equal(self, text: str, expected: ir.Value, got: ir.Value) -> None:
        self.require(Fault(text), self.build.ir.icmp_signed("==", expected, got), expected, got)

    def require(self, fault: Fault, holds: ir.Value, expected: ir.Value, got: ir.Value) -> None:
        build = self.build
        with build.if_then(build.ir.not_(holds), likely=False):
            build.store(expected, self.env_ptr)
            build.store(got, build.offset(self.env_ptr, 1, I64))
            build.ret(build.i64(-1 - len(self.faults)))
        self.faults.append(fault)

    def title(self) -> str:
        return title(self.kernel)

    def place(self, i: int, axis: int, data: bool = False) -> str:
        return f"{self.title()}: input {i} ({self.kernel.inputs[i].name}) {'element' if data else 'axis'} {axis}: "

    def value(self, expr: Expr) -> ir.Value:
        """A dimension expression over bound symbols."""
        unbound = sorted(s.name for s in syms_of(expr) - set(self.env.syms))
        if unbound:
            raise CompileError("E_DIM", f"kernel {self.kernel.name}: no input binds dimension {', '.join(unbound)}")
        made = emit_expr(self.build, self.env, expr)
        wraps = self.wraps(expr)
        if wraps is not None and expr not in self.bounded:
            self.bounded.add(expr)
            fault = Fault(f"{self.title()}: {expr} leaves the range of a dimension", False)
            self.require(fault, self.build.ir.not_(wraps), made, made)
        return made

    def wraps(self, expr: Expr) -> ir.Value | None:
        """Whether a sum or product on the way to the value leaves i64; None: there is none."""
        b = self.build.ir
        steps = {"add": b.sadd_with_overflow, "sub": b.ssub_with_overflow, "mul": b.smul_with_overflow}
        for e in walk(expr):
            if e in self.wrapping:
                continue
            self.wrapping[e] = None
            if not isinstance(e, Apply):
                continue
            parts = [self.wrapping[a] for a in e.args]
            if e.prim.name == "where":  # what is not chosen may be anything
                chosen = emit_expr(self.build, self.env, e.args[0])
                parts[1:] = [
                    p if p is None else b.and_(p, c) for p, c in zip(parts[1:], (chosen, b.not_(chosen)), strict=True)
                ]
            if e.prim.name in steps and e.dtype is DType.I64:
                pair = steps[e.prim.name](*(emit_expr(self.build, self.env, a) for a in e.args))
                parts.append(b.extract_value(pair, 1))
            for part in parts:
                so_far = self.wrapping[e]
                self.wrapping[e] = so_far if part is None else part if so_far is None else b.or_(so_far, part)
        return self.wrapping[expr]


def title(kernel: Kernel) -> str:
    """How messages name a kernel: its name and the user's nodes it computes."""
    nodes = ", ".join(kernel.origin)
    if len(nodes) > 400:
        nodes = f"{nodes[:400]} ... {len(kernel.origin)} nodes"
    return f"onnxfuse kernel {kernel.name}" + (f" (nodes {nodes})" if nodes else "")
