import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from onnxfuse.errors import IRError, UsageError
from onnxfuse.ir.check import check
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, cast, i64, lit, load, make, sym, var, where
from onnxfuse.ir.graph import ArrayConst, Foreign, Graph, Node, Value
from onnxfuse.ir.loops import Axis, Compute, LoopGraph
from onnxfuse.ir.op import Family, Op
from onnxfuse.ir.parse import parse, parse_expr, parse_graph, parse_kernel, parse_loops, parse_partition
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.text import context, same, show
from onnxfuse.ir.types import tensor
from tests.ir.samples import GRAPH, KERNELS, LOOPS, PARTITION

F32 = DType.F32
A, B = Axis("i", 4), Axis("j", 5)
XV = Value("x", tensor(F32, (4, 5)))
BV = Value("b", tensor(DType.BOOL, (4,)))
X = load(XV, (var(A), var(B)), F32)
BX = load(BV, (var(A),), DType.BOOL)
ALL = [GRAPH, PARTITION, *LOOPS, *KERNELS]


@pytest.mark.parametrize("text", ALL, ids=lambda t: t.strip().split("(")[0].replace('"', ""))
def test_text_reads_back_as_it_was_written(text):
    ir = parse(text)
    check(ir)
    assert same(parse(show(ir)), ir)
    assert show(parse(show(ir))) == show(ir)
    body = [line.rstrip() for line in text.strip().splitlines() if not line.strip().startswith(";")]
    assert show(ir).strip().splitlines() == body


def leaves():
    numbers = st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e-8, 3.4e38, math.inf, -math.inf, math.nan, 0.1])
    return st.one_of(st.just(X), st.builds(lambda v: lit(v, F32), numbers), st.just(cast(var(A), F32)))


def grow(inner):
    return st.one_of(
        st.builds(lambda op, a, b: apply(op, a, b), st.sampled_from(["add", "sub", "mul", "div", "min"]), inner, inner),
        st.builds(lambda op, a: apply(op, a), st.sampled_from(["neg", "exp", "abs"]), inner),
        st.builds(lambda op, a, b, c: where(apply(op, a, b), c, b), st.sampled_from(["lt", "le", "eq", "ne"]),
                  inner, inner, inner),
        st.builds(lambda a, b, c, d: where(~((a < b) & (BX | (b <= c))), d, a), inner, inner, inner, inner),
        st.builds(lambda a: cast(cast(a, DType.F16), F32), inner),
    )  # fmt: skip


@settings(max_examples=300)
@given(st.recursive(leaves(), grow, max_leaves=30))
def test_expressions_read_back_as_the_same_object(e):
    assert parse_expr(str(e), (A, B), (XV, BV)) is e


@pytest.mark.parametrize(
    "e",
    [
        (sym("N") + 2 - 3) // 2 + 1,
        apply("neg", apply("neg", sym("N"))),
        make(PRIMS["neg"], (i64(3),), DType.I64),
        sym("N") - (sym("M") - 1),
        sym("N") * (sym("M") * 2),
        sym("N") % (sym("M") // 3),
        sym("batch size") + sym("inf") + sym("_1") + sym("f32") + sym('a"b') + sym("acc"),
        apply("idiv", sym("N"), 3),
        cast(lit(3, DType.I32), DType.F64) * 1.5,
        lit(2**64 - 1, DType.U64),
        lit(0.1, DType.F64),
        lit(-1.5, DType.BF16),
        lit(math.nan, DType.F16),
        lit(-7, DType.I8),
        (var(A) < 2) & ~(var(B) < 3) | apply("xor", var(A) < 2, var(B) <= 3),
        apply("eq", var(A) < 2, apply("ne", var(A), var(B))),
    ],
    ids=str,
)
def test_corners_of_expressions_read_back(e):
    assert parse_expr(str(e), (A, B), (XV, BV)) is e


def test_a_body_with_shared_parts_prints_in_lines_linear_in_its_size():
    e = X
    for _ in range(200):
        e = e * e + 1.0
    text = str(e)
    assert len(text) < 10_000
    assert parse_expr(text, (A, B), (XV,)) is e


def test_a_deep_body_reads_back():
    e = X
    for _ in range(3000):
        e = apply("exp", e)
    assert parse_expr(str(e), (A, B), (XV,)) is e


def test_names_that_clash_get_a_number():
    x, y = (Value("x", tensor(F32, (4,))) for _ in range(2))
    i, j = Axis("i", sym("i")), Axis("i", 4)
    node = Node(Op("Foo", 1, Family.OPAQUE), (), (), {}, "", ())
    z = Value("z", tensor(F32, (sym("i"), 4)))
    body = load(x, (var(j),), F32) + load(y, (var(j),), F32) * cast(var(i), F32)
    loops = LoopGraph("g", (x, y), (Compute(z, (i, j), body, node),), (z,))
    assert "%z[i.1<i, i.2<4]: f32 = %x[i.2] + %x.1[i.2] * f32(i.1)" in str(loops)
    assert same(parse(str(loops)), loops)


@pytest.mark.parametrize("name", ["", "a b", "a-b", "x:0", "x::y", "a/b.c", 'q"', "%", "ü", "x:", "1"])
def test_any_value_name_reads_back(name):
    x, y = Value(name, tensor(F32, (2,))), Value("out", tensor(F32, (2,)))
    g = Graph("g", (x,), (Node(Op("Foo", 7, Family.OPAQUE), (x, None), (y,), {}, "n", ("m",)),), (y,), {}, 17)
    assert parse_graph(str(g)).inputs[0].name == name
    assert str(parse(str(g))) == str(g)


def test_attributes_read_back():
    attrs = {
        "f": 0.1, "i": -3, "s": 'a"\n', "b": b"\x00\xff", "ints": (1, 2), "floats": (1.0, math.inf), "none": (),
        "strings": ("a", ""), "t": np.array([1, 2], np.int64), "big": np.zeros((3, 4), np.float32),
        "sub": Foreign(object()), "odd name": 1,
    }  # fmt: skip
    y = Value("y", None)
    g = Graph("g", (), (Node(Op("F-oo", 1, Family.OPAQUE, domain="my.dom"), (), (y,), attrs, "", ()),), (y,), {}, 17)
    got = parse_graph(str(g))
    assert same(got, g)
    read = got.nodes[0].attrs
    assert read["f"] == 0.1
    assert type(read["floats"][0]) is float
    assert read["b"] == b"\x00\xff"
    assert read["s"] == 'a"\n'
    assert (got.nodes[0].op.domain, got.nodes[0].op.name) == ("my.dom", "F-oo")


def test_constants_are_known_by_hash_or_by_value():
    data = np.arange(12, dtype=np.float32)
    w = Value("w", tensor(F32, (12,)))
    small = Value("s", tensor(DType.BF16, (2,)))
    values = np.array([1.5, -0.0], dtype=DType.BF16.numpy)
    g = Graph("g", (), (), (w,), {w: ArrayConst(data), small: ArrayConst(values)}, 17)
    text = str(g)
    digest = re.search(r"#([0-9a-f]+)", text).group(1)
    got = parse_graph(text)
    assert same(got, g)
    assert got.consts[got.outputs[0]].digest == digest
    with pytest.raises(IRError, match="IR_CONST"):
        got.consts[got.outputs[0]].numpy()
    full = parse_graph(text, arrays={digest: data})
    assert full.consts[full.outputs[0]].numpy() is data
    read = list(full.consts.values())[1].numpy()
    assert read.dtype == values.dtype
    assert read.tobytes() == values.tobytes()


def test_same_ignores_names_but_not_structure():
    a = parse_loops('loops "g"(%x: f32[4]) -> (%y) {\n %y[i<4]: f32 = exp(%x[i])\n}')
    b = parse_loops('loops "h"(%u: f32[4]) -> (%v) {\n %v[k<4]: f32 = exp(%u[k]) from "n"\n}')
    c = parse_loops('loops "g"(%x: f32[4]) -> (%y) {\n %y[i<4]: f32 = exp(%x[3 - i])\n}')
    assert same(a, b)
    assert not same(a, c)
    assert not same(a, parse_kernel(KERNELS[0]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('loops "g"(%x: f32[4]) -> (%y) {\n %y[i<4]: f32 = exp(%z[i])\n}', "line 2: expected a value defined before"),
        ('loops "g"(%x: f32[4]) -> (%y) {\n}', "outputs that are defined"),
        ('loops "g"(%x: f32[4]) -> () {\n %x[i<4]: f32 = 1.0\n}', "defined twice"),
        ('loops "g"(%x: f33[4]) -> () {}', "an element type"),
        ('loops "g"() -> () {} extra', "end of text"),
        ('loops "g"() -> (', "value"),
        ("nothing", "graph, loops, partition or kernel"),
        ('loops "g"(%x: f32[4]) -> () {\n %y[i<4]: f32 = foo(%x[i])\n}', "a primitive"),
        ('loops "g"() -> () {\n ~\n}', "line 2: cannot read"),
        ('loops "g"() -> () {\n %y[]: f32 = acc\n}', "no acc outside"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text, message):
    with pytest.raises(UsageError, match="E_TEXT") as error:
        parse(text)
    assert message in error.value.what


def test_parse_asks_for_the_level():
    with pytest.raises(UsageError, match="expected a Kernel, got a LoopGraph"):
        parse_kernel(LOOPS[0])


def test_context_marks_the_item():
    loops = parse_loops(LOOPS[0])
    shown = context(loops, loops.items[1], around=1).splitlines()
    assert [line[0] for line in shown] == [" ", ">", " "]


def test_printing_the_levels(golden):
    parts = [show(parse_partition(PARTITION)), *(show(parse(t)) for t in KERNELS)]
    assert "\n".join(parts) == golden
