# ruff: noqa: E501 - a model is read as a line
"""The smallest model of every public bug that is a wrong value or a crash, with its variants, by row of docs/cases.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper, parser

Feed = Mapping[str, np.ndarray]
NAN, INF = np.nan, np.inf
F16, F32, F64, I32, I64 = np.float16, np.float32, np.float64, np.int32, np.int64


@dataclass(frozen=True)
class Case:
    """`tensors` become initializers; `bits`: floats agree bit for bit."""

    row: str
    name: str
    text: str
    feeds: Sequence[Feed] = ({},)
    opset: int = 17
    tensors: Mapping[str, np.ndarray] | None = None
    bits: bool = False
    subgraphs: bool = False

    @property
    def id(self) -> str:
        return f"{self.row} {self.name}"

    def model(self) -> onnx.ModelProto:
        head = f'<ir_version: 8, opset_import: ["" : {self.opset}, "my.dom" : 1]>\n'
        made = parser.parse_model(head + self.text)
        made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (self.tensors or {}).items())
        return made


def f(*values: float, dtype: type = F32) -> np.ndarray:
    return np.array(values, dtype)


def data(*shape: int, dtype: type = F32, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(dtype)


def one(op: str, kind: str = "float[N]", attrs: str = "", out: str = "") -> str:
    return f"g ({kind} x) => ({out or kind} y) {{ y = {op}{attrs}(x) }}"


def long(n: int, at: int) -> np.ndarray:
    x = data(n)
    x[at] = NAN
    return x


def _unary(row: str, op: str) -> Case:
    feeds = [{"x": f(NAN, 1, NAN, -2)}, *({"x": long(n, k)} for n in (17, 33) for k in (3, n - 1))]
    return Case(row, op, one(op), feeds)


def _soft(op: str, opset: int, shape: tuple[int, ...], axis: int | None) -> Case:
    attrs = "" if axis is None else f"<axis={axis}>"
    dims = ",".join(map(str, shape))
    name = f"{op}-{opset} {shape} axis {axis}"
    return Case("P30", name, one(op, f"float[{dims}]", attrs), [{"x": data(*shape)}], opset)


def _reduce(op: str, axes: str, keepdims: int) -> Case:
    """axes: left out, empty or given; with and without noop."""
    given = {"none": "x", "absent": 'x, ""', "empty": "x, axes"}[axes]
    text = f"g (float[1,3,4,5] x) => (y) {{ y = {op}<noop_with_empty_axes=1, keepdims={keepdims}>({given}) }}"
    tensors = {"axes": np.zeros(0, I64)} if axes == "empty" else None
    return Case("P31", f"{op} axes {axes} keepdims {keepdims}", text, [{"x": data(1, 3, 4, 5)}], 18, tensors)


A, B = f(8, -8, 7, 0, dtype=I32), f(2, 3, 5, 7, dtype=I32)
CASES: tuple[Case, ...] = (
    # -- floats
    *(_unary("P01", op) for op in ("Relu", "Sign", "Abs", "Neg")),
    *(Case("P01", op, one(op, "float[1,N]", "<axes=[1],keepdims=0>", "float[1]"),
           [{"x": x[None]} for x in (f(NAN, 1), long(17, 0), long(33, 0))])
      for op in ("ReduceMax", "ReduceMin")),
    *(Case("P02", op, f"g (float[N] a, float[N] b) => (float[N] y) {{ y = {op}(a, b) }}",
           [{"a": f(NAN, 1, NAN, 0), "b": f(1, NAN, NAN, 0)}, {"a": long(33, 2), "b": data(33)}])
      for op in ("Max", "Min")),
    *(Case("P02", f"{op} of zeros", f"g (float[N] a, float[N] b) => (float[N] y) {{ y = {op}(a, b) }}",
           [{"a": f(0.0, -0.0, 0.0, -0.0), "b": f(-0.0, 0.0, 0.0, -0.0)}], bits=True) for op in ("Max", "Min")),
    *(Case("P04", op, f"g (float[N,1] x) => (float[N,1] y) {{ c = Constant<value=float[1] {{10.0}}>() y = {op}(x, c) }}",
           [{"x": f(NAN, 1, 2)[:, None]}]) for op in ("Max", "Min")),
    Case("P05", "IsNaN behind a clip", """g (float[16,10] x) => (float[16,10] y) {
        a = Max(x, lo) b = Min(a, hi) m = IsNaN(b) y = Where(m, zero, b) }""",
         [{"x": np.concatenate([np.full((1, 10), NAN, F32), data(15, 10, scale=9)])}],
         tensors={"lo": np.full(10, -10, F32), "hi": np.full(10, 10, F32), "zero": np.array(0, F32)}),
    Case("P07", "sin of atan", "g (float[N] x) => (float[N] y) { a = Atan(x) y = Sin(a) }",
         [{"x": long(17, 3)}, {"x": long(17, 16)}]),
    Case("P08", "a denormal result", "g (float[N] x) => (float[N] y) { n = Neg(x) y = Mul(n, s) }", [{"x": f(0.1875)}],
         tensors={"s": np.array(2.0**-124, F32)}, bits=True),
    Case("P10", "a reduction and its broadcast back", """g (float[5,1,32,32] x, float[5] l) => (float[5,1,32,32] y) {
        k = Reshape(l, shape) p = Mul(x, k) n = Neg(p) t = Exp(n) q = ReduceSum<keepdims=1>(t, axes) y = Div(t, q) }""",
         [{"x": data(5, 1, 32, 32), "l": data(5)}],
         tensors={"shape": f(5, 1, 1, 1, dtype=I64), "axes": f(1, 2, 3, dtype=I64)}),
    *(Case("P11", f"{op} in f16", f"g (float16[3,3,3] a, float16[3,3,3] b) => (float16[3,3,3] y) {{ s = {op}(b) y = Mul(a, s) }}",
           [{"a": data(3, 3, 3, dtype=F16), "b": np.abs(data(3, 3, 3, dtype=F16))}]) for op in ("Sqrt", "Cos")),
    Case("P12", "residual and layer norm in f16", """g (float16[2,8,64] x, float16[2,8,64] r) => (float16[2,8,64] y, float16[2,8,64] s) {
        s = Add(x, r) y = LayerNormalization<axis=-1>(s, w, b) }""",
         [{"x": data(2, 8, 64, dtype=F16, scale=100), "r": data(2, 8, 64, dtype=F16, scale=100)}],
         tensors={"w": np.ones(64, F16), "b": np.zeros(64, F16)}),
    Case("P14", "mean of many in f16", one("ReduceMean", "float16[1,3,512,512]", "<axes=[2,3],keepdims=1>", "float16[1,3,1,1]"),
         [{"x": np.full((1, 3, 512, 512), 0.5, F16)}]),
    Case("P14", "a sum that is larger than the type", one("ReduceSum", "float16[1,70000]", "", "float16[1,1]"),
         [{"x": np.ones((1, 70000), F16)}]),
    Case("P16", "a normalisation behind a convolution", """g (float[1,3,8,8] x) => (y) {
        c = Conv(x, w) y = BatchNormalization<epsilon=0.00001>(c, s, b, m, v) }""", [{"x": data(1, 3, 8, 8)}],
         tensors={"w": data(4, 3, 3, 3), "s": data(4), "b": data(4), "m": data(4), "v": np.abs(data(4)) + 1}),
    Case("P17", "bias and maximum behind a reshaped product", """g (float[256,128] a, float[128,256] b, float[8,32,256] c) => (float[8,32,256] y) {
        m = MatMul(a, b) r = Reshape(m, shape) s = Add(r, c) y = Max(s, zero) }""",
         [{"a": np.full((256, 128), 2.2, F32), "b": np.full((128, 256), 0.7813, F32), "c": np.full((8, 32, 256), 0.7813, F32)}],
         tensors={"shape": f(8, 32, 256, dtype=I64), "zero": np.array(0, F32)}),
    # -- integers, casts
    Case("P18", "Div", "g (int32[N] a, int32[N] b) => (int32[N] y) { y = Div(a, b) }", [{"a": A, "b": B}]),
    Case("P18", "Div i64", "g (int64[N] a, int64[N] b) => (int64[N] y) { y = Div(a, b) }", [{"a": A.astype(I64), "b": B.astype(I64)}]),
    Case("P20", "Mod of integers", "g (int64[N] a, int64[N] b) => (int64[N] y, int64[1] z) { y = Mod(a, b) z = Mod(p, q) }",
         [{"a": f(-5, dtype=I64), "b": f(3, dtype=I64)}], tensors={"p": f(-5, dtype=I64), "q": f(3, dtype=I64)}),
    Case("P20", "fmod", "g (float[N] a, float[N] b) => (float[N] y, float[1] z) { y = Mod<fmod=1>(a, b) z = Mod<fmod=1>(p, q) }",
         [{"a": f(-5.5), "b": f(3)}], tensors={"p": f(-5.5), "q": f(3)}),
    Case("P23", "float to int to bool", "g (float[N] x) => (bool[N] y) { t = Cast<to=6>(x) y = Cast<to=9>(t) }",
         [{"x": f(-0.2, -0.1, 0, 0.1, 0.2)}], 13),
    Case("P23", "float to int to float", "g (float[N] x) => (float[N] y) { t = Cast<to=7>(x) y = Cast<to=1>(t) }", [{"x": f(1.5, -1.5)}]),
    Case("P23", "int to uint to int", "g (int32[N] x) => (int32[N] y) { t = Cast<to=12>(x) y = Cast<to=6>(t) }", [{"x": f(-1, 5, dtype=I32)}]),
    Case("P23", "float to half to float", "g (float[N] x) => (float[N] y) { t = Cast<to=10>(x) y = Cast<to=1>(t) }", [{"x": data(9)}], bits=True),
    Case("P25", "Relu and Clip", "g (float[1,1,1,1] x) => (y) { r = Relu(x) y = Clip(r, lo, hi) }", [{"x": data(1, 1, 1, 1)}], 11,
         {"lo": np.array(-1, F32), "hi": np.array(1, F32)}),
    Case("P25", "in f64", "g (double[3] x) => (double[3] y) { r = Relu(x) y = Clip(r, lo, hi) }", [{"x": data(3, dtype=F64)}], 14,
         {"lo": np.array(-1, F64), "hi": np.array(1, F64)}),
    Case("P25", "no lower bound", 'g (float[3] x) => (float[3] y) { r = Relu(x) y = Clip(r, "", hi) }', [{"x": data(3)}], 11,
         {"hi": np.array(1, F32)}),
    Case("P25", "no bounds", "g (float[3] x) => (float[3] y) { r = Relu(x) y = Clip(r) }", [{"x": data(3)}], 11),
    Case("P25", "bounds as attributes", "g (float[3] x) => (float[3] y) { r = Relu(x) y = Clip<min=-1.0,max=1.0>(r) }", [{"x": data(3)}], 10),
    Case("P26", "i64 indices", "g (int64[1,4] i) => (float[1,4,16] y) { e = Gather(table, i) y = Relu(e) }",
         [{"i": f(0, 99, 7, 3, dtype=I64)[None]}], tensors={"table": data(100, 16)}),
    Case("P29", "i64 chains", """g (int64[3,1] x, int64[3,1] z) => (int64[3,1] y) {
        a = Add(x, z) m = Mul(a, x) k = ArgMax<axis=0>(m) g = Greater(m, a) y = Where(g, k, a) }""",
         [{"x": f(1, -2, 3, dtype=I64)[:, None], "z": f(5, 0, -9, dtype=I64)[:, None]}]),
    # -- opsets, optional inputs
    *(_soft(op, opset, (2, 3, 4), axis) for op in ("Softmax", "LogSoftmax", "Hardmax") for opset in (11, 13) for axis in (None, 0, 2, -1)),
    *(_soft("Softmax", opset, shape, 0) for opset in (11, 13) for shape in ((5,), (2, 3))),
    *(_reduce(op, axes, keep) for op in ("ReduceMean", "ReduceSumSquare") for axes in ("none", "absent", "empty") for keep in (0, 1)),
    Case("P33", "an absent bound in a group", 'g (float[N] x) => (float[N] y) { e = Exp(x) c = Clip(e, "", hi) y = Neg(c) }',
         [{"x": data(7)}], tensors={"hi": np.array(1, F32)}),
    *(Case("P34", f"training, outputs {outs}", f"g (float[2,3,4,4] x) => ({outs}) {{ c = Relu(x) y, rm, rv = BatchNormalization<training_mode=1>(c, s, b, m, v) }}",
           [{"x": data(2, 3, 4, 4)}], 15, {"s": data(3), "b": data(3), "m": data(3), "v": np.abs(data(3)) + 1})
      for outs in ("y", "y, rm", "y, rm, rv")),
    # -- shapes
    *(Case("P37", f"{n} rows", "g (float[N,4] x, float[1,4] z) => (float[N,4] y) { a = Mul(x, z) y = Relu(a) }",
           [{"x": data(n, 4), "z": data(1, 4)}]) for n in (0, 1, 5)),
    Case("P38", "an empty batch", "g (float[1,B,30] x) => (float[1,B,8] y) { m = MatMul(x, w) y = Add(m, b) }",
         [{"x": data(1, n, 30)} for n in (0, 1, 5)], tensors={"w": data(30, 8), "b": data(8)}),
    Case("P38", "an empty sum", "g (float[2,K] a, float[K,3] b) => (float[2,3] y) { m = MatMul(a, b) y = Add(m, c) }",
         [{"a": data(2, k), "b": data(k, 3)} for k in (0, 1, 5)], tensors={"c": data(3)}),
    Case("P40", "reducing a scalar", "g (float x) => (float y, float z) { y = ReduceMin(x) z = ReduceL1(x) }", [{"x": np.array(-2.5, F32)}]),
    Case("P42", "a shape that depends on the input", "g (float[N,3] x) => (float[N,3] y) { s = Shape(x) o = ConstantOfShape<value=float[1] {1.0}>(s) y = Add(x, o) }",
         [{"x": data(n, 3)} for n in (1, 7)]),
    Case("P46", "a compare and a cast in a group", "g (float[N,4] x) => (float[N,4] y) { a = Exp(x) m = Greater(a, one) k = Cast<to=1>(m) y = Mul(a, k) }",
         [{"x": data(n, 4)} for n in (1, 5)], tensors={"one": np.array(1, F32)}),
    # -- structure
    *(Case("P48", outs, f"g (float[4] x) => ({', '.join(f'float[4] {o}' for o in outs)}) {{ a = Exp(x) b = Mul(a, x) y = Relu(b) }}", [{"x": data(4)}])
      for outs in ("ya", "ay", "aby", "bya", "yab")),
    Case("P49", "nothing but no-ops", "g (float[2,3] x) => (float[2,3] y) { a = Identity(x) y = Transpose<perm=[0,1]>(a) }", [{"x": data(2, 3)}]),
    Case("P51", "one value under two names", "g (int64[4,4] p, int64[4,4] q) => (int64[4,4] o1, int64[4,4] o2) { a = Add(p, q) b = Add(p, q) o1 = Identity(a) o2 = Identity(b) }",
         [{"p": np.arange(16, dtype=I64).reshape(4, 4), "q": np.ones((4, 4), I64)}]),
    Case("P51", "the output is the input", "g (float[4] x) => (float[4] x) { }", [{"x": data(4)}]),
    Case("P51", "the output is an initializer", "g (float[4] x) => (float[4] y, float[4] w) { y = Exp(x) }", [{"x": data(4)}], tensors={"w": data(4)}),
    Case("P52", "equal constants at three scales", """g (float[1,8,4,4] x) => (float[1,8,24] y) {
        a0 = Reshape(x, s1) a1 = Softmax<axis=1>(a0) a2 = Reshape(a1, t)
        b = Mul(x, x) b0 = Reshape(b, s2) b1 = Softmax<axis=1>(b0) b2 = Reshape(b1, t)
        c = Exp(x) c0 = Reshape(c, s3) c1 = Softmax<axis=1>(c0) c2 = Reshape(c1, t)
        d = Concat<axis=2>(a2, b2, c2) i = Constant<value_ints=[0]>() e = Constant<value_ints=[24]>() ax = Constant<value_ints=[2]>()
        y = Slice(d, i, e, ax) }""", [{"x": data(1, 8, 4, 4)}],
         tensors={**{f"s{k}": f(0, 2, -1, 4, dtype=I64) for k in (1, 2, 3)}, "t": f(1, 8, 16, dtype=I64)}),
    Case("P54", "one tensor twice", "g (float[4] x) => (float[4] y) { a = Add(x, x) y = Mul(a, x) }", [{"x": data(4)}]),
    Case("P54", "one weight twice", "g (float[4,4] x) => (float[4,4] y) { y = LayerNormalization(x, w, w) }", [{"x": data(4, 4)}], tensors={"w": data(4)}),
    Case("P56", "integers down to rank 0", "g (int64[24] x) => (int64 y) { m = ReduceMax<keepdims=0>(x) c = Cast<to=9>(m) n = Not(c) y = Cast<to=7>(n) }",
         [{"x": np.arange(24, dtype=I64) - 30}, {"x": np.zeros(24, I64)}]),
    *(Case("P57", tail.split("<")[0], f"g (float[2,3] a) => (float[2,4] y) {{ p = Gemm<alpha=1.0,beta=1.0>(a, b, c) y = {tail}(p) }}",
           [{"a": data(2, 3)}], 11, {"b": data(3, 4), "c": data(4)}) for tail in ("LeakyRelu<alpha=0.3>", "Elu<alpha=0.3>", "HardSigmoid<alpha=0.3,beta=0.4>")),
    Case("P59", "a transposed residual", "g (float[1,4,8,8] x, float[1,8,8,4] t) => (float[1,4,8,8] y) { c = Conv<pads=[1,1,1,1]>(x, w) r = Transpose<perm=[0,3,1,2]>(t) y = Add(c, r) }",
         [{"x": data(1, 4, 8, 8), "t": data(1, 8, 8, 4)}], tensors={"w": data(4, 4, 3, 3)}),
    *(Case("P59", f"residual {shape}", f"g (float[1,4,8,8] x, float[{','.join(map(str, shape))}] t) => (float[1,4,8,8] y) {{ c = Conv<pads=[1,1,1,1]>(x, w) y = Add(c, t) }}",
           [{"x": data(1, 4, 8, 8), "t": data(*shape)}], tensors={"w": data(4, 4, 3, 3)}) for shape in ((4, 1, 1), (1, 1, 1, 8))),
    Case("P59", "itself", "g (float[1,4,8,8] x) => (float[1,4,8,8] y) { c = Conv<pads=[1,1,1,1]>(x, w) y = Add(c, c) }", [{"x": data(1, 4, 8, 8)}], tensors={"w": data(4, 4, 3, 3)}),
    Case("P61", "a reshape that makes a shape", "g (int64[1,1] s, float[2,2] x) => (float[4] y) { k = Reshape(s, m) y = Reshape(x, k) }",
         [{"s": f(4, dtype=I64)[None], "x": f(10, 20, 30, 40).reshape(2, 2)}], 21, {"m": f(-1, dtype=I64)}),
    Case("P62", "an exponent made by a cast", """g (float16[2,8] x) => (float16[2,8] y) { two = Cast<to=10>(t) p = Pow(x, two) m = ReduceMean<axes=[-1]>(p)
        e = Add(m, eps) q = Sqrt(e) n = Div(x, q) y = Mul(n, w) }""", [{"x": data(2, 8, dtype=F16)}],
         tensors={"t": np.array(2, F32), "eps": np.array(1e-3, F16), "w": data(8, dtype=F16)}),
    Case("P65", "one weight, two normalisations", """g (float[1,3,4,4] x, float[1,3,4,4] z) => (y1, y2) { a = Conv(x, w) b = Conv(z, w)
        y1 = BatchNormalization(a, s1, b1, m, v) y2 = BatchNormalization(b, s2, b2, m, v) }""", [{"x": data(1, 3, 4, 4), "z": data(1, 3, 4, 4)}],
         tensors={"w": data(4, 3, 1, 1), "s1": data(4), "s2": data(4) + 2, "b1": data(4), "b2": data(4) - 1, "m": data(4), "v": np.abs(data(4)) + 1}),
    Case("P68", "adding a zero of higher rank", "g (float[3] x) => (float[1,3] y) { y = Add(x, z) }", [{"x": data(3)}], tensors={"z": np.zeros((1, 1), F32)}),
    Case("P68", "expanding", "g (float[1] p, float[2,1] q) => (float[1] y, float[2,2] z) { y = Expand(p, s) z = Expand(q, t) }",
         [{"p": data(1), "q": data(2, 1)}], tensors={"s": f(1, dtype=I64), "t": f(1, 2, dtype=I64)}),
    Case("P68", "zero minus x", "g (float[3] x) => (float[3] y) { y = Sub(z, x) }", [{"x": data(3)}], tensors={"z": np.array(0, F32)}),
    Case("P68", "minus zero plus zero", "g (float[2] x) => (float[2] y) { y = Add(x, z) }", [{"x": f(-0.0, 0.0)}], tensors={"z": f(0)}, bits=True),
    # -- control flow, functions, types
    *(Case("P73", f"an identity a branch reads, bodies {'too' if sub else 'kept'}", """g (bool[1] x) => (float[1] y) { i1 = Identity(one) i0 = Identity(zero)
        y = If (x) <then_branch = t () => (float[1] a) { a = Identity(i1) }, else_branch = e () => (float[1] b) { b = Identity(i0) }> }""",
           [{"x": np.array([c])} for c in (True, False)], tensors={"one": f(1), "zero": f(0)}, subgraphs=sub) for sub in (False, True)),
    *(Case("P75", f"a constant as the condition, bodies {'too' if sub else 'kept'}", """g (int64 n, bool go, float[2] x) => (float[2] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool co, float[2] s2) { k = Constant<value_int=1>() co = Cast<to=9>(k) p = Exp(s) s2 = Neg(p) }> }""",
           [{"n": np.array(n), "go": np.array(True), "x": data(2)} for n in (0, 3)], subgraphs=sub) for sub in (False, True)),
    *(Case("P75", f"a branch that is a constant, bodies {'too' if sub else 'kept'}", """g (bool c, float[1] x) => (float[1] y) {
        y = If (c) <then_branch = t () => (float[1] a) { a = Constant<value_floats=[3.0]>() }, else_branch = e () => (float[1] b) { p = Exp(x) b = Neg(p) }> }""",
           [{"c": np.array(c), "x": data(1)} for c in (True, False)], subgraphs=sub) for sub in (False, True)),
    Case("P84", "sequences", "g (float[2] x) => (float[2] y) { s = SequenceConstruct(x, x) k = Constant<value_int=0>() e = SequenceAt(s, k) p = Exp(e) y = Neg(p) }", [{"x": data(2)}]),
    Case("P84", "a split to a sequence", """g (float[1,1,400] x) => (float[1,1,N] y) { q = SplitToSequence<axis=2>(x, n)
        z = Constant<value_int=0>() o = Constant<value_int=1>() a = SequenceAt(q, z) b = SequenceAt(q, o) s = Add(a, b) y = Relu(s) }""", [{"x": data(1, 1, 400)}],
         tensors={"n": np.array(100, I64)}),
    Case("P84", "an optional", "g (float[2] x) => (bool y, float[2] z) { e = Exp(x) o = Optional(e) y = OptionalHasElement(o) z = OptionalGetElement(o) }", [{"x": data(2)}]),
    Case("P84", "strings", "g (string[2] x) => (string[2] y) { y = Identity(x) }", [{"x": np.array(["a", "b"], object)}]),
    Case("P85", "initializers that are no inputs", "g (float[1] a) => (float[1] y) { y = Add(a, b) }", [{"a": f(1)}], tensors={"b": f(42)}),
    Case("P85", "initializers that are inputs", "g (float[1] a, float[1] b) => (float[1] y) { y = Add(a, b) }", [{"a": f(1)}, {"a": f(1), "b": f(2)}], tensors={"b": f(42)}),
    Case("P87", "a generated constant", "g (float[64,64] x) => (float[64,64] y) { o = ConstantOfShape<value=float[1] {1.0}>(s) y = Add(x, o) }",
         [{"x": data(64, 64)}], tensors={"s": f(64, 64, dtype=I64)}),
    # -- quantised
    Case("P106", "a resize between quantisers", """g (float[1,1,1,3] x) => (float[1,1,1,6] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        r = Resize<mode="linear",coordinate_transformation_mode="half_pixel">(d, "", "", sizes) p = QuantizeLinear(r, s, z) y = DequantizeLinear(p, s, z) }""",
         [{"x": f(2, 7, 4).reshape(1, 1, 1, 3)}], tensors={"s": np.array(1, F32), "z": np.array(0, np.int8), "sizes": f(1, 1, 1, 6, dtype=I64)}),
    Case("P108", "a negative scale around a pool", """g (int8[1,1,4,4] x) => (int8[1,1,3,3] y) { d = DequantizeLinear(x, s)
        m = MaxPool<kernel_shape=[2,2]>(d) y = QuantizeLinear(m, s, z) }""", [{"x": np.arange(-8, 8, dtype=np.int8).reshape(1, 1, 4, 4)}],
         tensors={"s": np.array(-0.1, F32), "z": np.array(0, np.int8)}),
    Case("P109", "ties", """g (int8[N] a, int8[N] b) => (float[N] y) { da = DequantizeLinear(a, s, z) db = DequantizeLinear(b, s, z) c = Add(da, db)
        q = QuantizeLinear(c, t, z) y = DequantizeLinear(q, t, z) }""", [{"a": np.arange(-40, 40, dtype=np.int8), "b": np.arange(-40, 40, dtype=np.int8)}],
         tensors={"s": np.array(0.04, F32), "t": np.array(0.16, F32), "z": np.array(0, np.int8)}),
    # -- limits
    Case("P105", "outputs written completely", "g (double[5] x) => (double[5] y, double[5] z) { a = Exp(x) y = Neg(a) z = Sqrt(a) }", [{"x": data(5, dtype=F64)}]),
    Case("P111", "a ladder of diamonds", "g (float[8] v0) => (float[8] y) {"
         + "".join(f" a{k} = Tanh(v{k}) b{k} = Sigmoid(v{k}) v{k + 1} = Add(a{k}, b{k})" for k in range(80)) + " y = Neg(v80) }", [{"v0": data(8)}]),
    Case("P112", "a sum of 100 inputs", "g (" + ", ".join(f"float[4] x{k}" for k in range(100)) + ") => (float[4] y) {"
         + "".join(f" r{k} = Relu(x{k})" for k in range(100)) + " y = Sum(" + ", ".join(f"r{k}" for k in range(100)) + ") }",
         [{f"x{k}": data(4) * k for k in range(100)}]),
    Case("P112", "a concat of 200 inputs", "g (" + ", ".join(f"float[2] x{k}" for k in range(200)) + ") => (float[400] y) {"
         + "c = Concat<axis=0>(" + ", ".join(f"x{k}" for k in range(200)) + ") y = Exp(c) }", [{f"x{k}": data(2) * k for k in range(200)}]),
    Case("P115", "a logarithm and a squeeze", "g (float[1,32,32,3] x) => (float[32,32,3] y) { l = Log(x) y = Squeeze(l, a) }",
         [{"x": np.abs(data(1, 32, 32, 3)) + 1}], tensors={"a": f(0, dtype=I64)}),
    Case("P116", "a large intermediate", "g (float[4,50000] x) => (float[4,50000] y) { s = Softmax<axis=-1>(x) y = Mul(s, x) }", [{"x": data(4, 50000)}]),
)  # fmt: skip
