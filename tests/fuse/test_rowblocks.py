"""Attention becomes one group, in full mode alone; what keeps it from that is said by code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxfuse.config import FusionMode
from onnxfuse.ir.partition import Decision, Partition, Verdict
from tests.templates.attentions import Dim, Graph, attention, fused, softmax


def groups(p: Partition) -> list[list[str]]:
    return [[c.node.op.name for c in g.members] for g in p.groups]


def verdicts(p: Partition, code: str) -> list[Decision]:
    return [d for d in p.decisions if d.code == code]


SPELLINGS = [
    {},
    {"flat": True},
    {"composite": False},
    {"scale": "q", "flat": True},
    {"scale": "both", "flat": True, "mask": ["B", 1, 1, "S"]},
    {"causal": True, "sk": "T", "flat": True},
    {"batch": 1, "heads": 12, "sq": 128, "sk": 128, "d": 64, "flat": True, "mask": [1, 1, 128, 128]},
    {"sq": 1, "sk": "T"},
    {"dtype": np.float16},
]


@pytest.mark.parametrize("how", SPELLINGS, ids=str)
def test_every_spelling_is_one_group(how: dict[str, object]) -> None:
    p = fused(attention(**how))  # type: ignore[arg-type]
    assert len(p.groups) == 1
    assert len(verdicts(p, "FUSED_ATTENTION")) >= 2  # scores -> softmax (maximum, difference), softmax -> product


@pytest.mark.parametrize("mode", [FusionMode.NONE, FusionMode.TVM, FusionMode.CANFUSE])
def test_other_modes_keep_one_anchor_a_group(mode: FusionMode) -> None:
    p = fused(attention(flat=True), mode)
    assert all(sum(c.node.op.name == "MatMul" for c in g.members) <= 1 for g in p.groups)
    assert not verdicts(p, "FUSED_ATTENTION")


def test_every_pair_has_one_decision() -> None:
    p = fused(attention(flat=True, mask=["S", "S"]))
    pairs = [(d.stage, d.a, d.b) for d in p.decisions]
    assert len(pairs) == len(set(pairs))
    assert all(d.verdict is Verdict.FUSED for d in p.decisions if d.stage == "B")


def test_the_group_as_text() -> None:
    p = fused(attention(1, 2, 8, 8, 4))
    (group,) = p.groups
    assert [c.node.op.name for c in group.members] == [
        "Transpose", "MatMul", "Mul", "ReduceMax", "Sub", "Exp", "ReduceSum", "Div", "MatMul",
    ]  # fmt: skip
    assert {v.name for v in group.reads if v not in p.loops.consts} == {"q", "k", "v"}
    assert str(p).count("group") == 1


# ---- one on each side of every limit ----


def blocked(model: onnx.ModelProto, **thresholds: object) -> str:
    """Code of the pair scores -> softmax, and that the products are apart if it is a refusal."""
    p = fused(model, **thresholds)
    found = [d for d in p.decisions if d.stage == "B" and (d.code.startswith(("FUSED_A", "NF_")))]
    together = any(o.count("MatMul") == 2 for o in groups(p))
    codes = {d.code for d in found}
    assert together == ("FUSED_ATTENTION" in codes)
    return "FUSED_ATTENTION" if together else next(iter(sorted(codes - {"NF_KIND", "NF_PROLOGUE"})), "")


def test_the_softmax_is_an_output_as_well() -> None:
    assert blocked(attention()) == "FUSED_ATTENTION"
    assert blocked(attention(weights_too=True)) == "NF_ROW_BLOCK"


def test_node_cap() -> None:
    nodes = 9
    assert blocked(attention(1, 2, 8, 8, 4), max_nodes=nodes - 1) == "FUSED_ATTENTION"
    assert blocked(attention(1, 2, 8, 8, 4), max_nodes=nodes - 2) == "NF_NODE_CAP"


def test_input_cap() -> None:
    model = attention(1, 2, 8, 8, 4, scale="none", mask=[8, 8])
    assert blocked(model, max_inputs=4) == "FUSED_ATTENTION"
    assert blocked(model, max_inputs=3) == "NF_IO_CAP"


def test_row_budget() -> None:
    model = attention(1, 2, 8, 64, 4)
    row = 2 * 64 * 4  # scores and exponentials
    assert blocked(model, local_budget=row + 2 * 64 * 4) == "FUSED_ATTENTION"
    assert blocked(model, local_budget=row) == "NF_LOCAL_BUFFER"


def test_left_out_by_code() -> None:
    assert len(fused(attention(), skip=frozenset({"FUSED_ATTENTION"})).groups) == 3


def test_kept_nodes_stay_alone() -> None:
    p = fused(attention(composite=False), keep=frozenset({"exp5"}))
    assert ["Exp"] in groups(p)
    assert not verdicts(p, "FUSED_ATTENTION")


def two_readers(g: Graph, q: str, k: str, v: str) -> list[str]:
    s = g.node("MatMul", q, k)
    return [g.node("MatMul", softmax(g, s), v), g.node("Relu", s)]


def values_from_scores(g: Graph, q: str, k: str, v: str) -> list[str]:
    p = softmax(g, g.node("MatMul", q, k))
    return [g.node("MatMul", p, g.node("MatMul", p, v))]


def loop_through_another_node(g: Graph, q: str, k: str, v: str) -> list[str]:
    s = g.node("MatMul", q, k)
    top = g.node("ReduceMax", g.node("NonZero", s), axes=[0, 1], keepdims=0)  # NonZero stays with onnxruntime
    p = softmax(g, s)
    return [g.node("MatMul", g.node("Mul", p, g.node("Cast", top, to=1)), v)]


@pytest.mark.parametrize("body", [two_readers, values_from_scores, loop_through_another_node])
def test_other_shapes_of_graph_stay_apart_and_acyclic(body: Callable[..., list[str]]) -> None:
    g = Graph()
    q, k, v = (g.input(n, [2, 8, 8]) for n in "qkv")
    p = fused(g.model(body(g, q, k, v)))
    seen = set(p.loops.inputs) | set(p.loops.consts)
    waiting: list[object] = [*p.groups, *p.left]
    while waiting:  # the quotient graph has an order
        ready = [x for x in waiting if set(x.reads) <= seen]  # type: ignore[attr-defined]
        assert ready
        for x in ready:
            seen |= set(getattr(x, "writes", ())) or set(x.node.results)  # type: ignore[attr-defined]
        waiting = [x for x in waiting if x not in ready]


# ---- row tails ----


def tail(columns: Dim = 512, depth: int = 64, variable: bool = False, softmaxed: bool = False) -> onnx.ModelProto:
    """A product with constant weights, a residual, and LayerNorm (or softmax) over the columns."""
    g, rng = Graph(), np.random.default_rng(0)
    x, r = g.input("x", ["B", "S", depth]), g.input("r", ["B", "S", columns])
    constant = not variable and isinstance(columns, int)
    w = (
        g.const(rng.standard_normal((depth, columns)).astype(np.float32))
        if constant
        else g.input("w", [depth, columns])
    )
    y = g.node("Add", g.node("MatMul", x, w), r)
    if softmaxed:
        return g.model([softmax(g, y)])
    s, t = (g.const(rng.standard_normal(columns).astype(np.float32)) for _ in range(2))
    return g.model([g.node("LayerNormalization", y, s, t, axis=-1), y])


def tail_code(model: onnx.ModelProto, **thresholds: object) -> str:
    p = fused(model, **thresholds)
    codes = {d.code for d in p.decisions if d.stage == "B"} & {
        "FUSED_ROW_TAIL",
        "NF_ROW_TAIL",
        "NF_ROW_BLOCK",
        "NF_KIND",
    }
    (code,) = codes
    assert (len(p.groups) == 1) == (code == "FUSED_ROW_TAIL")
    return code


def test_layer_norm_and_softmax_join_the_product_before_them() -> None:
    assert tail_code(tail()) == "FUSED_ROW_TAIL"
    assert tail_code(tail(softmaxed=True)) == "FUSED_ROW_TAIL"


def test_columns_of_a_row_tail() -> None:
    assert tail_code(tail(64), tail_least=64) == "FUSED_ROW_TAIL"
    assert tail_code(tail(64), tail_least=65) == "NF_ROW_TAIL"
    assert tail_code(tail(600), tail_columns=600) == "FUSED_ROW_TAIL"
    assert tail_code(tail(600), tail_columns=599) == "NF_ROW_TAIL"


def test_depth_of_a_row_tail() -> None:
    assert tail_code(tail(depth=64), tail_depth=64) == "FUSED_ROW_TAIL"
    assert tail_code(tail(depth=64), tail_depth=63) == "NF_ROW_TAIL"


def test_weights_that_are_no_constant_have_no_row_tail() -> None:
    assert tail_code(tail(variable=True)) == "NF_KIND"


def test_row_tails_left_out_by_code_or_mode() -> None:
    assert tail_code(tail(), skip=frozenset({"FUSED_ROW_TAIL"})) == "NF_KIND"
    assert len(fused(tail(), FusionMode.CANFUSE).groups) == 2


def vocabulary(columns: int, depth: int = 64) -> onnx.ModelProto:
    """A product, LayerNorm over its columns, and the product of that with constant weights."""
    g, rng = Graph(), np.random.default_rng(0)
    w, u = (g.const(rng.standard_normal(s).astype(np.float32)) for s in ((depth, 512), (512, columns)))
    s, t = (g.const(rng.standard_normal(512).astype(np.float32)) for _ in range(2))
    y = g.node("LayerNormalization", g.node("MatMul", g.input("x", ["B", depth]), w), s, t, axis=-1)
    return g.model([g.node("MatMul", y, u)])


def test_weights_that_every_block_of_rows_would_read_from_memory_stay_apart() -> None:
    assert len(fused(vocabulary(64)).groups) == 1
    large = fused(vocabulary(2048, 1024))
    assert all(names.count("MatMul") < 2 for names in groups(large))
    assert any("weights" in dict(d.numbers).values() for d in verdicts(large, "NF_ROW_TAIL"))
