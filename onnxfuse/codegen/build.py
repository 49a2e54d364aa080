"""Builder: one llvmlite module for one kernel, with structured control flow and vector memory access.

Values are plain `llvmlite.ir` values; scalars and `<lanes x T>` vectors go through the same methods. Nothing here
knows about expressions or tensors: that is `scalar_expr`.

Register types: f32/f64 are float/double, integers of every sign are iN, bool is i1, f16 and bf16 are i16 bit patterns
(they are memory types: `prims.py` converts). In memory a bool is an i8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from llvmlite import ir as ll

from onnxfuse.ir.dtypes import DType
from onnxfuse.target import Target

I1, I8, I16, I32, I64, I128 = (ll.IntType(n) for n in (1, 8, 16, 32, 64, 128))
F32, F64, HALF = ll.FloatType(), ll.DoubleType(), ll.HalfType()
PTR = ll.PointerType()
VOID = ll.VoidType()

Index: TypeAlias = int | ll.Value
NOWHERE = 128  # bytes: sixteen lanes of eight bytes
# For annotations in templates, which never import llvmlite themselves.
Reg: TypeAlias = ll.Value
Type: TypeAlias = ll.Type
Function: TypeAlias = ll.Function
Part: TypeAlias = AbstractContextManager[None]

_REGISTER: dict[DType, ll.Type] = {
    DType.F32: F32, DType.F64: F64, DType.F16: I16, DType.BF16: I16,
    DType.I8: I8, DType.I16: I16, DType.I32: I32, DType.I64: I64,
    DType.U8: I8, DType.U16: I16, DType.U32: I32, DType.U64: I64, DType.BOOL: I1,
}  # fmt: skip


def reg_type(dtype: DType) -> ll.Type:
    """LLVM type of a scalar of `dtype` in a register."""
    return _REGISTER[dtype]


def mem_type(dtype: DType) -> ll.Type:
    """LLVM type of one element of `dtype` in memory."""
    return I8 if dtype is DType.BOOL else _REGISTER[dtype]


def is_vector(value: ll.Value) -> bool:
    """The register is a vector."""
    return isinstance(value.type, ll.VectorType)


def lanes_of(value: ll.Value) -> int:
    """Number of lanes; 1 for a scalar."""
    return int(value.type.count) if is_vector(value) else 1


def vec(typ: ll.Type, lanes: int) -> ll.Type:
    """`<lanes x typ>`, or `typ` itself when lanes is 1."""
    return typ if lanes == 1 else ll.VectorType(typ, lanes)


def scalar_of(typ: ll.Type) -> ll.Type:
    """Element type of a vector type; a scalar type is itself."""
    return typ.element if isinstance(typ, ll.VectorType) else typ


@dataclass(slots=True)
class Loop:
    """A loop with carried values: set `next` before the body ends; `results` are valid after the loop."""

    index: ll.Value
    values: list[ll.Value]
    next: list[ll.Value] = field(default_factory=list)
    results: list[ll.Value] = field(default_factory=list)


# Products of pairs: elements of the result, feature, intrinsic; narrow to wide.
_PAIR_PRODUCTS = (
    (4, "sse4.1", "llvm.x86.sse2.pmadd.wd"),
    (8, "avx2", "llvm.x86.avx2.pmadd.wd"),
    (16, "avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
)
# f32 to i32, truncated, the minimum where it does not fit; likewise.
_TRUNCATIONS = (
    (4, "sse4.1", "llvm.x86.sse2.cvttps2dq"),
    (8, "avx", "llvm.x86.avx.cvtt.ps2dq.256"),
    (16, "avx512f", "llvm.x86.avx512.mask.cvttps2dq.512"),
)
# x * 2**n for whole n in f32, rounded once; likewise.
_SCALINGS = ((16, "avx512f", "llvm.x86.avx512.mask.scalef.ps.512"),)
_CURRENT_ROUNDING = 4


class Builder:
    """Writes one module. `ir` is the llvmlite IRBuilder of the current function, for anything not wrapped here."""

    def __init__(self, target: Target, prefix: str) -> None:
        self.target = target
        self.prefix = prefix
        self.module = ll.Module(name=prefix)
        self.module.triple = target.triple
        self._invariant = self.module.add_metadata([])
        self._builder: ll.IRBuilder | None = None
        self._nowhere: ll.Value | None = None

    # ---- target ----

    def has(self, feature: str) -> bool:
        """The target has this LLVM feature."""
        return feature in self.target.features

    @property
    def has_fma(self) -> bool:
        return self.has("fma") or self.has("neon")

    @property
    def has_half(self) -> bool:
        """Conversions half <-> float are instructions."""
        return self.has("f16c") or self.has("neon")

    # ---- functions and control flow ----

    @property
    def ir(self) -> ll.IRBuilder:
        assert self._builder is not None, "no function is open"
        return self._builder

    @contextmanager
    def function(self, name: str, ret: ll.Type, args: Sequence[ll.Type]) -> Iterator[ll.Function]:
        """Define `<prefix>.<name>`; code goes into it inside the `with`. A void function returns by itself."""
        assert self._builder is None, "functions do not nest"
        fn = ll.Function(self.module, ll.FunctionType(ret, list(args)), f"{self.prefix}.{name}")
        fn.attributes.add("nounwind")
        # Keeps LLVM from turning copy loops into calls of memcpy and memset; llvmlite's own list lacks it.
        set.add(fn.attributes, '"no-builtins"')
        self._builder = ll.IRBuilder(fn.append_basic_block("entry"))
        try:
            yield fn
            if ret == VOID and not self._builder.block.is_terminated:
                self._builder.ret_void()
        finally:
            self._builder = None
            self._nowhere = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Functions defined inside are named `<prefix>.<name>.*`: for another template's code, emitted twice."""
        before, self.prefix = self.prefix, f"{self.prefix}.{name}"
        try:
            yield
        finally:
            self.prefix = before

    def ret(self, value: Index) -> None:
        """Return an i64 (or any value)."""
        self.ir.ret(self.i64(value))

    @contextmanager
    def loop(self, start: Index, stop: Index, step: Index = 1, name: str = "i") -> Iterator[ll.Value]:
        """`for i in range(start, stop, step)` (step > 0), yields i."""
        with self.carry(start, stop, step, (), name) as it:
            yield it.index

    @contextmanager
    def carry(
        self, start: Index, stop: Index, step: Index, init: Sequence[ll.Value], name: str = "i"
    ) -> Iterator[Loop]:
        """A loop with carried values: `it.next = [...]` in the body, `it.results` afterwards."""
        b = self.ir
        first, last, by = self.i64(start), self.i64(stop), self.i64(step)
        before = b.block
        head, body = b.append_basic_block(f"{name}.head"), b.append_basic_block(f"{name}.body")
        done = b.append_basic_block(f"{name}.done")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64, name)
        index.add_incoming(first, before)
        phis = []
        for v in init:
            p = b.phi(v.type)
            p.add_incoming(v, before)
            phis.append(p)
        b.cbranch(b.icmp_signed("<", index, last), body, done)
        b.position_at_end(body)
        it = Loop(index, list(phis))
        yield it
        assert len(it.next) == len(phis), "carried values not set"
        index.add_incoming(b.add(index, by, flags=("nsw",)), b.block)
        for p, v in zip(phis, it.next, strict=True):
            p.add_incoming(v, b.block)
        b.branch(head)
        b.position_at_end(done)
        it.results = list(phis)

    @contextmanager
    def if_then(self, cond: ll.Value, likely: bool | None = None) -> Iterator[None]:
        """Code inside runs when `cond`."""
        with self.ir.if_then(cond, likely=likely):
            yield

    @contextmanager
    def if_else(self, cond: ll.Value, likely: bool | None = None) -> Iterator[tuple[Part, Part]]:
        """Two branches: `with build.if_else(c) as (then, other)`, then `with then:` and `with other:`."""
        with self.ir.if_else(cond, likely=likely) as parts:
            yield parts

    def alloca(self, typ: ll.Type, count: int = 1, align: int = 64) -> ll.Value:
        """Stack storage, made in the entry block."""
        with self.ir.goto_entry_block():
            slot = self.ir.alloca(typ, size=ll.Constant(I64, count))
            slot.align = align
            # llvmlite types an alloca's pointer and would not cast it to an equal opaque one.
            opaque = ll.instructions.CastInstr(self.ir.block, "bitcast", slot, PTR)
            self.ir._insert(opaque)
            return opaque

    def nowhere(self) -> ll.Value:
        """Address of NOWHERE readable zero bytes: where loads that must not happen are sent."""
        if self._nowhere is None:
            with self.ir.goto_entry_block():
                self._nowhere = self.ir.alloca(I64, size=ll.Constant(I64, NOWHERE // 8))
                self._nowhere.align = 64
                for k in range(NOWHERE // 8):
                    at = self.ir.gep(self._nowhere, [ll.Constant(I64, k)], source_etype=I64)
                    self.ir.store(ll.Constant(I64, 0), at)
        return self._nowhere

    # ---- integers for addresses; Python ints fold ----

    def i64(self, value: Index) -> ll.Value:
        """An i64 value."""
        return ll.Constant(I64, value) if isinstance(value, int) else value

    def add(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if isinstance(a, int) and a == 0:
            return b
        if isinstance(b, int) and b == 0:
            return a
        return self.ir.add(self.i64(a), self.i64(b), flags=("nsw",))

    def sub(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        if isinstance(b, int) and b == 0:
            return a
        return self.ir.sub(self.i64(a), self.i64(b), flags=("nsw",))

    def mul(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if (isinstance(a, int) and a == 0) or (isinstance(b, int) and b == 0):
            return 0
        if isinstance(a, int) and a == 1:
            return b
        if isinstance(b, int) and b == 1:
            return a
        return self.ir.mul(self.i64(a), self.i64(b), flags=("nsw",))

    def udiv(self, a: Index, b: Index) -> Index:
        """Quotient of two non-negative integers, b > 0."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        if isinstance(b, int) and b == 1:
            return a
        return self.ir.udiv(self.i64(a), self.i64(b))

    def umod(self, a: Index, b: Index) -> Index:
        """Remainder of two non-negative integers, b > 0."""
        if isinstance(a, int) and isinstance(b, int):
            return a % b
        if isinstance(b, int) and b == 1:
            return 0
        return self.ir.urem(self.i64(a), self.i64(b))

    def ceildiv(self, a: Index, b: Index) -> Index:
        """Quotient rounded up of two non-negative integers, b > 0."""
        return self.udiv(self.add(a, self.sub(b, 1)), b)

    def imin(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        x, y = self.i64(a), self.i64(b)
        return self.ir.select(self.ir.icmp_signed("<", x, y), x, y)

    def imax(self, a: Index, b: Index) -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        x, y = self.i64(a), self.i64(b)
        return self.ir.select(self.ir.icmp_signed(">", x, y), x, y)

    # ---- constants and vectors ----

    def const(self, typ: ll.Type, value: int | float) -> ll.Value:
        """A constant of a scalar or vector type (the same in every lane)."""
        if isinstance(typ, ll.VectorType):
            return ll.Constant(typ, [ll.Constant(typ.element, value)] * typ.count)
        return ll.Constant(typ, value)

    def like(self, value: ll.Value, number: int | float) -> ll.Value:
        """`number` in the type of `value`."""
        return self.const(value.type, number)

    def splat(self, value: ll.Value, lanes: int) -> ll.Value:
        """A scalar in every lane."""
        if lanes == 1:
            return value
        typ = ll.VectorType(value.type, lanes)
        if isinstance(value, ll.Constant):
            return ll.Constant(typ, [value] * lanes)
        one = self.ir.insert_element(ll.Constant(typ, ll.Undefined), value, ll.Constant(I32, 0))
        zeros = ll.Constant(ll.VectorType(I32, lanes), [0] * lanes)
        return self.ir.shuffle_vector(one, ll.Constant(typ, ll.Undefined), zeros)

    def widen(self, value: ll.Value, lanes: int) -> ll.Value:
        """A vector of `lanes`: a scalar is splatted, a vector stays."""
        return value if is_vector(value) else self.splat(value, lanes)

    def shuffle(self, a: ll.Value, b: ll.Value, picks: Sequence[int]) -> ll.Value:
        """Lanes of a and b (numbered through) in the order of `picks`."""
        mask = ll.Constant(ll.VectorType(I32, len(picks)), list(picks))
        return self.ir.shuffle_vector(a, b, mask)

    def reverse(self, value: ll.Value) -> ll.Value:
        """Lanes in opposite order."""
        n = lanes_of(value)
        return self.shuffle(value, value, range(n - 1, -1, -1))

    def transpose(self, rows: Sequence[ll.Value]) -> list[ll.Value]:
        """A square of n vectors of n lanes (n a power of two), transposed in log2(n) rounds of shuffles."""
        out, n = list(rows), len(rows)
        s = n // 2
        while s:
            low = [j if not j & s else n + j - s for j in range(n)]
            high = [j + s if not j & s else n + j for j in range(n)]
            for i in range(n):
                if not i & s:
                    a, b = out[i], out[i + s]
                    out[i], out[i + s] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            s //= 2
        return out

    def lane(self, value: ll.Value, k: int) -> ll.Value:
        """One lane of a vector; a scalar is itself."""
        return self.ir.extract_element(value, ll.Constant(I32, k)) if is_vector(value) else value

    def gather_lanes(self, values: Sequence[ll.Value]) -> ll.Value:
        """A vector from scalars."""
        out: ll.Value = ll.Constant(ll.VectorType(values[0].type, len(values)), ll.Undefined)
        for k, v in enumerate(values):
            out = self.ir.insert_element(out, v, ll.Constant(I32, k))
        return out

    def iota(self, lanes: int, typ: ll.Type = I64) -> ll.Value:
        """0, 1, 2 ..."""
        return ll.Constant(ll.VectorType(typ, lanes), list(range(lanes))) if lanes > 1 else ll.Constant(typ, 0)

    def tail_mask(self, count: Index, lanes: int) -> ll.Value:
        """`<lanes x i1>`: lane k is on when k < count (count >= 0)."""
        n = self.ir.trunc(self.i64(self.imin(count, lanes)), I32)
        return self.ir.icmp_signed("<", self.iota(lanes, I32), self.splat(n, lanes))

    def any_lane(self, mask: ll.Value) -> ll.Value:
        """True when any lane of the mask is on."""
        if not is_vector(mask):
            return mask
        word = self.ir.bitcast(mask, ll.IntType(lanes_of(mask)))
        return self.ir.icmp_unsigned("!=", word, ll.Constant(word.type, 0))

    # ---- memory ----

    def offset(self, ptr: ll.Value, index: Index, typ: ll.Type) -> ll.Value:
        """Address of element `index` (elements of `typ`)."""
        if isinstance(index, int) and index == 0:
            return ptr
        return self.ir.gep(ptr, [self.i64(index)], source_etype=typ)

    def load(self, ptr: ll.Value, typ: ll.Type, lanes: int = 1, invariant: bool = False) -> ll.Value:
        """Load a scalar or `lanes` consecutive elements; no alignment beyond the element's is assumed.

        `invariant`: the memory is never written while the kernel runs, so the load may be hoisted out of loops.
        """
        out = self.ir.load(ptr, typ=vec(typ, lanes), align=_align(typ))
        if invariant:
            out.set_metadata("invariant.load", self._invariant)
        return out

    def store(self, value: ll.Value, ptr: ll.Value) -> None:
        """Store a scalar or vector without assuming alignment beyond the element's."""
        self.ir.store(value, ptr, align=_align(scalar_of(value.type)))

    def prefetch(self, ptr: ll.Value, locality: int = 3) -> None:
        """A hint that the line at `ptr` will be read; any address will do. locality: 3 = all caches, 2 = from L2 on."""
        self.call("llvm.prefetch.p0", VOID, [ptr, *(ll.Constant(I32, n) for n in (0, locality, 1))])

    def masked_load(self, ptr: ll.Value, typ: ll.Type, mask: ll.Value) -> ll.Value:
        """Consecutive elements where the mask is on, zero elsewhere; memory under off lanes is not touched."""
        t = ll.VectorType(typ, lanes_of(mask))
        args = [ptr, ll.Constant(I32, _align(typ)), mask, self.const(t, 0)]
        return self.call(f"llvm.masked.load.{mangle(t)}.p0", t, args)

    def masked_store(self, value: ll.Value, ptr: ll.Value, mask: ll.Value) -> None:
        """Store the lanes that are on."""
        t = value.type
        args = [value, ptr, ll.Constant(I32, _align(t.element)), mask]
        self.call(f"llvm.masked.store.{mangle(t)}.p0", VOID, args)

    def gather(self, ptr: ll.Value, index: ll.Value, typ: ll.Type, mask: ll.Value) -> ll.Value:
        """`ptr[index[k]]` in each lane that is on, zero elsewhere."""
        n = lanes_of(index)
        t = ll.VectorType(typ, n)
        ptrs = self.ir.gep(self.splat(ptr, n), [index], source_etype=typ)
        args = [ptrs, ll.Constant(I32, _align(typ)), mask, self.const(t, 0)]
        return self.call(f"llvm.masked.gather.{mangle(t)}.v{n}p0", t, args)

    def scatter(self, value: ll.Value, ptr: ll.Value, index: ll.Value, typ: ll.Type, mask: ll.Value) -> None:
        """`ptr[index[k]] = value[k]` in each lane that is on."""
        n = lanes_of(index)
        ptrs = self.ir.gep(self.splat(ptr, n), [index], source_etype=typ)
        args = [value, ptrs, ll.Constant(I32, _align(typ)), mask]
        self.call(f"llvm.masked.scatter.{mangle(value.type)}.v{n}p0", VOID, args)

    # ---- arithmetic that needs care ----

    def call(self, name: str, ret: ll.Type, args: Iterable[ll.Value]) -> ll.Value:
        """Call an intrinsic (or a function of this module) by its full name."""
        args = list(args)
        fn = self.module.globals.get(name)
        if fn is None:
            fn = ll.Function(self.module, ll.FunctionType(ret, [a.type for a in args]), name)
        return self.ir.call(fn, args)

    def intrinsic(self, name: str, *args: ll.Value) -> ll.Value:
        """An intrinsic overloaded on, and returning, the type of its first argument."""
        typ = args[0].type
        return self.call(f"llvm.{name}.{mangle(typ)}", typ, args)

    def fma(self, a: ll.Value, b: ll.Value, c: ll.Value) -> ll.Value:
        """a*b + c: fused where the target has it, two roundings elsewhere (a fused one would be a libm call)."""
        if self.has_fma:
            return self.intrinsic("fma", a, b, c)
        return self.ir.fadd(self.ir.fmul(a, b), c)

    def pair_products(self, a: ll.Value, b: ll.Value) -> ll.Value:
        """a.low * b.low + a.high * b.high of i32 vectors whose elements are two signed 16-bit halves.

        One instruction on x86, which LLVM joins with the addition of a sum where the target can (vpdpwssd).
        """
        made = self._by_parts(_PAIR_PRODUCTS, (a, b), lambda name, x: self.call(name, x[0].type, map(self._halves, x)))
        return self._products_of_halves(a, b) if made is None else made

    def truncated(self, x: ll.Value) -> ll.Value | None:
        """An f32 vector truncated to i32, the minimum where it does not fit; None where no instruction does that."""

        def one(name: str, xs: Sequence[ll.Value]) -> ll.Value:
            n = lanes_of(xs[0])
            typ = vec(I32, n)
            masked = [self.const(typ, 0), self.const(I16, -1), self.const(I32, _CURRENT_ROUNDING)] if n == 16 else []
            return self.call(name, typ, [*xs, *masked])

        return self._by_parts(_TRUNCATIONS, (x,), one)

    def scaled(self, x: ll.Value, n: ll.Value) -> ll.Value | None:
        """F32 vectors times 2**n for whole n; None where no instruction does that."""

        def one(name: str, args: Sequence[ll.Value]) -> ll.Value:
            masked = [self.like(args[0], 0.0), self.const(I16, -1), self.const(I32, _CURRENT_ROUNDING)]
            return self.call(name, args[0].type, [*args, *masked])

        return self._by_parts(_SCALINGS, (x, n), one) if scalar_of(x.type) == F32 else None

    def _by_parts(
        self,
        table: Sequence[tuple[int, str, str]],
        args: Sequence[ll.Value],
        one: Callable[[str, Sequence[ll.Value]], ll.Value],
    ) -> ll.Value | None:
        """An intrinsic of (lanes, feature, name) applied to parts of vectors, the widest that fit."""
        n = lanes_of(args[0])
        fitting = [(size, name) for size, feature, name in table if self.has(feature) and n % size == 0]
        if not fitting:
            return None
        size, name = fitting[-1]
        parts = [one(name, [self.shuffle(x, x, range(k, k + size)) for x in args]) for k in range(0, n, size)]
        while len(parts) > 1:
            size = lanes_of(parts[0])
            parts = [self.shuffle(x, y, range(2 * size)) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _halves(self, x: ll.Value) -> ll.Value:
        return self.ir.bitcast(x, vec(I16, 2 * lanes_of(x)))

    def _products_of_halves(self, a: ll.Value, b: ll.Value) -> ll.Value:
        sixteen, down = self.like(a, 16), self.ir.ashr
        low = self.ir.mul(*(down(self.ir.shl(x, sixteen), sixteen) for x in (a, b)))
        return self.ir.add(low, self.ir.mul(*(down(x, sixteen) for x in (a, b))))

    def select(self, cond: ll.Value, a: ll.Value, b: ll.Value) -> ll.Value:
        """Lane-wise select; scalars among the operands are splatted as needed."""
        n = max(lanes_of(a), lanes_of(b), lanes_of(cond))
        if n > 1:
            a, b = self.widen(a, n), self.widen(b, n)
        return self.ir.select(cond, a, b)


def _align(typ: ll.Type) -> int:
    if isinstance(typ, ll.IntType):
        return max(1, int(typ.width) // 8)
    return 4 if typ == F32 else 2 if typ == HALF else 8


def mangle(typ: ll.Type) -> str:
    """Suffix of an overloaded intrinsic: f32, v8f32, i64 ..."""
    if isinstance(typ, ll.VectorType):
        return f"v{typ.count}{mangle(typ.element)}"
    if isinstance(typ, ll.IntType):
        return f"i{typ.width}"
    if isinstance(typ, ll.PointerType):
        return "p0"
    return "f32" if typ == F32 else "f64" if typ == F64 else "f16"
