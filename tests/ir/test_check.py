"""Each rule of ir/check.py has an example here that breaks it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from onnxfuse.errors import IRError, Refusal
from onnxfuse.ir import check as module
from onnxfuse.ir.check import check
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import acc, apply, i64, lit, load, make, sym, var
from onnxfuse.ir.graph import ArrayConst, Value
from onnxfuse.ir.kernel import DimBinding, DimCheck, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.parse import parse, parse_graph, parse_kernel, parse_loops, parse_partition
from onnxfuse.ir.plan import Call, Kernels
from onnxfuse.ir.prims import PRIMS
from onnxfuse.ir.types import TensorType, tensor
from tests.ir.samples import GRAPH, KERNELS, LOOPS, PARTITION, SOFTMAX

F32, I64 = DType.F32, DType.I64
G, L, P = parse_graph(GRAPH), parse_loops(SOFTMAX), parse_partition(PARTITION)
POINT, ROWS, GEMM = (parse_kernel(t) for t in KERNELS)
M, E, S, Y = L.items
X = L.inputs[0]
STRAY = Value("stray", tensor(F32, (4,)))


def loops(*items, **changes):
    return replace(L, items=tuple(items), **changes)


def stage(kernel, k, **changes):
    stages = list(kernel.stages)
    stages[k] = replace(stages[k], **changes)
    return replace(kernel, stages=tuple(stages))


def text(line):
    return parse_loops(f'loops "g"(%x: f32[4], %h: f16[4], %k: i64[4]) -> (%y) {{\n {line}\n}}')


def bad_node(**changes):
    return replace(G, nodes=(replace(G.nodes[0], **changes), *G.nodes[1:]))


def bad_group(k, **changes):
    groups = list(P.groups)
    groups[k] = replace(groups[k], **changes)
    return replace(P, groups=tuple(groups))


PM, PE, PS, PY = P.loops.items
LEFT = parse_loops(LOOPS[1])
LOOP_LEFT = parse_partition(
    "partition {\n" + 'loops "g"(%x: f32[4]) -> (%z) {\n %a[i<4]: f32 = exp(%x[i])\n'
    ' opaque (%b: f32[4]) = Foo@1(%a) refused UN_OPAQUE "x"\n %z[i<4]: f32 = exp(%b[i]) + exp(%a[i])\n}\n'
    "group 0 elemwise (%x) -> (%a) { %a }\ngroup 1 elemwise (%b, %a) -> (%z) { %z }\nleft 1\n}"
)
A0, FOO, Z0 = LOOP_LEFT.loops.items
GROUP0 = LOOP_LEFT.groups[0]
B0, BOTH = FOO.node.outputs[0], (A0.out, Z0.out)
T0 = POINT.stages[0].stores[0]
CALL = Call(POINT, POINT.inputs, POINT.outputs, "c")
PART = replace(P, groups=P.groups[:1])


BROKEN = {
    # Graph
    "a value made twice": ("IR_SSA", lambda: replace(G, nodes=(*G.nodes, G.nodes[0]))),
    "two values of one name": ("IR_NAME", lambda: replace(G, inputs=(*G.inputs, Value("x", None)))),
    "a read before the definition": ("IR_VALUE", lambda: replace(G, nodes=G.nodes[::-1])),
    "a capture nobody makes": ("IR_VALUE", lambda: bad_node(captures=(STRAY,))),
    "an output nobody makes": ("IR_VALUE", lambda: replace(G, outputs=(STRAY,))),
    "a default that is no input": ("IR_DEFAULT", lambda: replace(G, defaults={STRAY: ArrayConst(None)})),
    "a dimension not in normal form": (
        "IR_DIM",
        lambda: replace(G, inputs=(*G.inputs, Value("q", TensorType(F32, (sym("M") + sym("N") + sym("M"),))))),
    ),
    "a dimension that is no integer": (
        "IR_DIM", lambda: replace(G, inputs=(*G.inputs, Value("q", TensorType(F32, (lit(2.0, F32),)))))
    ),
    "a negative dimension": (
        "IR_DIM", lambda: replace(G, inputs=(*G.inputs, Value("q", TensorType(F32, (-1,)))))
    ),
    # LoopGraph
    "a compute twice": ("IR_SSA", lambda: loops(M, M, E, S, Y)),
    "an input twice": ("IR_SSA", lambda: loops(M, E, S, Y, inputs=(X, X))),
    "computes out of order": ("IR_VALUE", lambda: loops(E, M, S, Y)),
    "an opaque node out of order": ("IR_VALUE", lambda: replace(LEFT, inputs=LEFT.inputs[:1])),
    "a loop output nobody makes": ("IR_VALUE", lambda: loops(M, E, outputs=(STRAY,))),
    "an axis nobody binds": ("IR_AXIS", lambda: loops(M, replace(E, body=load(X, (var(Axis("i", 4)), i64(0)), F32)))),
    "a reduce axis in the finish": (
        "IR_AXIS",
        lambda: loops(replace(M, reduce=replace(M.reduce, finish=load(X, (i64(0), var(M.reduce.axes[0])), F32)))),
    ),
    "an axis bound twice": ("IR_AXIS", lambda: loops(replace(M, reduce=replace(M.reduce, axes=M.axes)))),
    "an axis too many": ("IR_RANK", lambda: loops(M, replace(E, axes=E.axes[:1]))),
    "an axis of another extent": ("IR_RANK", lambda: loops(M, replace(E, axes=(E.axes[1], E.axes[0])))),
    "a dimension nobody binds": ("IR_SYM", lambda: loops(M, replace(E, body=load(X, (sym("Q"), i64(0)), F32)))),
    "an accumulator in a body": ("IR_ACC", lambda: loops(M, replace(E, body=acc(F32)))),
    "an accumulator of another type": (
        "IR_ACC", lambda: text("%y[]: f32 = add[r<4] init 0.0 acc f32: %x[r] -> acc")
        and loops(replace(M, reduce=replace(M.reduce, finish=make(PRIMS["cast"], (acc(DType.F64),), F32)))),
    ),
    "a body of another type": ("IR_DTYPE", lambda: text("%y[i<4]: f64 = %x[i]")),
    "a result of another type": ("IR_DTYPE", lambda: text("%y[]: f16 = add[r<4] init 0.0 acc f32: %x[r]")),
    "an initial value of another type": ("IR_DTYPE", lambda: text("%y[]: f32 = add[r<4] init 0 acc f32: %x[r]")),
    "a load typed differently": ("IR_DTYPE", lambda: loops(M, replace(E, body=load(X, (i64(0), i64(1)), I64)))),
    "a primitive of mixed types": (
        "IR_DTYPE", lambda: loops(M, replace(E, body=make(PRIMS["add"], (E.body, i64(1)), F32)))
    ),
    "a half float computed with": ("IR_DTYPE", lambda: text("%y[i<4]: f16 = exp(%h[i])")),
    "a where that mixes types": ("IR_DTYPE", lambda: text("%y[i<4]: f32 = where(i < 2, %x[i], i)")),
    "a cast to the same type": ("IR_DTYPE", lambda: text("%y[i<4]: f32 = f32(%x[i])")),
    "a logic on numbers": ("IR_DTYPE", lambda: text("%y[i<4]: bool = not(%k[i])")),
    "a type no kernel computes": ("IR_DTYPE", lambda: loops(M, replace(E, out=Value("e", TensorType(DType.C64, ()))))),
    "a primitive with too few arguments": (
        "IR_PRIM", lambda: loops(M, replace(E, body=make(PRIMS["add"], (E.body,), F32)))
    ),
    "an index too few": ("IR_LOAD", lambda: text("%y[i<4]: f32 = %x[]")),
    "an index that is no integer": ("IR_LOAD", lambda: text("%y[i<4]: f32 = %x[%x[i]]")),
    "a load from what is no tensor": (
        "IR_LOAD",
        lambda: (lambda v: loops(M, replace(E, body=load(v, (), F32)), inputs=(X, v)))(Value("seq", None)),
    ),
    "a compute without a type": ("IR_TYPE", lambda: loops(replace(M, out=Value("m", None)))),
    "a reduction that is not associative": ("IR_REDUCE", lambda: text("%y[]: f32 = sub[r<4] init 0.0 acc f32: %x[r]")),
    "an accumulator of half precision": (
        "IR_REDUCE", lambda: text("%y[]: f16 = add[r<4] init 0.0:f16 acc f16: %h[r]")
    ),
    # Partition
    "two groups of one number": ("IR_GROUP", lambda: bad_group(1, id=0)),
    "an empty group": ("IR_GROUP", lambda: bad_group(1, members=())),
    "a compute in two groups": ("IR_GROUP", lambda: bad_group(1, members=(PM, PE, PS, PY))),
    "a compute in no group": ("IR_GROUP", lambda: replace(P, groups=P.groups[:1])),
    "a compute from elsewhere": ("IR_GROUP", lambda: bad_group(0, members=(M,))),
    "members out of order": ("IR_GROUP", lambda: bad_group(1, members=(PY, PE, PS))),
    "an anchor from elsewhere": ("IR_GROUP", lambda: bad_group(1, anchor=PM)),
    "other reads": ("IR_GROUP", lambda: bad_group(1, reads=P.groups[1].reads[:1])),
    "other writes": ("IR_GROUP", lambda: bad_group(1, writes=())),
    "an opaque node that is not left": ("IR_GROUP", lambda: replace(LOOP_LEFT, left=())),
    "groups out of order": ("IR_ORDER", lambda: replace(P, groups=P.groups[::-1])),
    "a circle through a node left alone": (
        "IR_ORDER",
        lambda: replace(LOOP_LEFT, groups=(replace(GROUP0, members=(A0, Z0), reads=(X0, B0), writes=BOTH),)),
    ),
    # Kernel
    "a parameter twice": ("IR_SSA", lambda: replace(POINT, outputs=(POINT.outputs[0],) * 2)),
    "a parameter without a type": ("IR_TYPE", lambda: replace(POINT, inputs=(*POINT.inputs, Value("q", None)))),
    "a constant that is no input": ("IR_CONST", lambda: replace(POINT, consts=frozenset({STRAY}))),
    "no stage": ("IR_KERNEL", lambda: replace(POINT, stages=())),
    "an unbound dimension": ("IR_SYM", lambda: replace(POINT, dims=())),
    "a dimension bound twice": ("IR_SYM", lambda: replace(POINT, dims=POINT.dims * 2)),
    "a dimension bound to no input": ("IR_SYM", lambda: replace(POINT, dims=(DimBinding(sym("N"), STRAY, 0),))),
    "a dimension bound with scale 0": (
        "IR_SYM", lambda: replace(POINT, dims=(replace(POINT.dims[0], scale=0),))
    ),
    "a check of no axis": ("IR_SYM", lambda: replace(POINT, checks=(DimCheck(POINT.inputs[0], 2, sym("N")),))),
    "an outer axis bound again": ("IR_AXIS", lambda: stage(ROWS, 1, axes=ROWS.outer)),
    "a reduction without a body": ("IR_REDUCE", lambda: stage(ROWS, 0, reduce_body=None)),
    "a finish in a kernel": (
        "IR_REDUCE", lambda: stage(ROWS, 0, reduce=replace(ROWS.stages[0].reduce, finish=acc(F32)))
    ),
    "an accumulator without a reduction": ("IR_ACC", lambda: stage(POINT, 0, stores=(replace(T0, value=acc(F32)),))),
    "a local read before it is stored": ("IR_VALUE", lambda: replace(ROWS, stages=ROWS.stages[1:])),
    "an output that is read": (
        "IR_VALUE",
        lambda: stage(POINT, 0, stores=(replace(T0, value=load(POINT.outputs[0], T0.index, F32)),)),
    ),
    "a stage without a store": ("IR_STORE", lambda: stage(POINT, 0, stores=())),
    "a store to an input": ("IR_STORE", lambda: stage(POINT, 0, stores=(replace(T0, target=POINT.inputs[0]),))),
    "two stores to one target": ("IR_STORE", lambda: stage(POINT, 0, stores=(T0, T0))),
    "a store with an index too few": ("IR_STORE", lambda: stage(POINT, 0, stores=(replace(T0, index=()),))),
    "a store at an index that is no integer": (
        "IR_STORE", lambda: stage(POINT, 0, stores=(replace(T0, index=(T0.index[0], lit(0.0, F32))),))
    ),
    "a store of another type": (
        "IR_DTYPE", lambda: stage(POINT, 0, stores=(replace(T0, value=apply("lt", T0.value, T0.value + 1.0)),))
    ),
    "a local indexed by an outer axis": (
        "IR_AXIS",
        lambda: stage(ROWS, 1, stores=(Store(ROWS.locals[1].value, (var(ROWS.outer[0]),), lit(0.0, F32)),)),
    ),
    "an output that is never stored": ("IR_STORE", lambda: replace(ROWS, stages=ROWS.stages[:3])),
    # Kernels
    "a call of a kernel that is not there": ("IR_PLAN", lambda: Kernels(PART, (), {0: CALL}, {})),
    "a group without a verdict": ("IR_PLAN", lambda: Kernels(PART, (POINT,), {}, {})),
    "a group with two verdicts": ("IR_PLAN", lambda: Kernels(PART, (POINT,), {0: CALL}, {0: Refusal("X")})),
    "a call with a value too few": (
        "IR_PLAN", lambda: Kernels(PART, (POINT,), {0: replace(CALL, inputs=POINT.inputs[:1])}, {})
    ),
    "a call with a value of another rank": (
        "IR_PLAN", lambda: Kernels(PART, (POINT,), {0: replace(CALL, inputs=(STRAY, STRAY))}, {})
    ),
    "two kernels of one name": ("IR_PLAN", lambda: Kernels(PART, (POINT, POINT), {0: CALL}, {})),
}  # fmt: skip
X0 = LOOP_LEFT.loops.inputs[0]


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name):
    code, make_ir = BROKEN[name]
    with pytest.raises(IRError) as error:
        check(make_ir())
    assert error.value.code == code, error.value
    assert error.value.why, "the context is missing"


def test_every_code_has_an_example():
    codes = set(re.findall(r'"(IR_[A-Z]+)"', Path(module.__file__).read_text(encoding="utf-8")))
    assert codes == {code for code, _ in BROKEN.values()}


def test_sound_values_pass():
    for ir in (G, L, P, POINT, ROWS, GEMM, LEFT, LOOP_LEFT, Kernels(PART, (POINT,), {0: CALL}, {})):
        check(ir)


def test_the_message_shows_five_lines_around_the_culprit(golden):
    lines = [f"  %v{k + 1}[i<4]: f32 = exp(%v{k}[i])" for k in range(20)]
    lines[10] = "  %v11[i<4]: f16 = exp(%v10[i])"
    broken = parse('loops "chain"(%v0: f32[4]) -> () {\n' + "\n".join(lines[:11]) + "\n}")
    with pytest.raises(IRError) as error:
        check(broken)
    assert str(error.value) + "\n" == golden
