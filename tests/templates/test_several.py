"""Several products in one kernel agree with onnxruntime, whatever the sizes, types and operands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.plan import Plan
from onnxfuse.runtime.jit import jit
from onnxfuse.target import by_name
from onnxfuse.templates.several import SEVERAL, split_parts
from tests.templates.attentions import Compiled, Dim, Graph, fused, judge, only, planned, random

NATIVE = by_name("native", host_features())
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)


def projections(
    batch: Dim = "B", length: Dim = "S", depth: int = 24, cols: int = 20, count: int = 3, dtype: type = np.float32
) -> onnx.ModelProto:
    """x @ w + b for several w and b; the last one goes through a Relu."""
    g, rng = Graph(), np.random.default_rng(1)
    x = g.input("x", [batch, length, depth], dtype)
    outs = []
    for _ in range(count):
        w, b = (g.const(rng.standard_normal(s).astype(dtype)) for s in ((depth, cols), (cols,)))
        outs.append(g.node("Add", g.node("MatMul", x, w), b))
    outs[-1] = g.node("Relu", outs[-1])
    return g.model(outs, dtype)


@pytest.mark.parametrize("target", [NATIVE, WIDE], ids=["native", "512 bits"])
@pytest.mark.parametrize(("depth", "cols", "count"), [(24, 20, 3), (7, 33, 2), (300, 64, 4)])
def test_every_part_is_its_product(target, depth: int, cols: int, count: int) -> None:
    kernel = Compiled(projections(depth=depth, cols=cols, count=count), target, "several")
    for b, s in ((1, 1), (2, 5), (1, 12), (3, 50), (1, 200)):
        kernel.check(random(kernel.model, {"B": b, "S": s}), rtol=1e-4, atol=1e-4)


def test_static_lengths_and_half_precision() -> None:
    kernel = Compiled(projections(1, 128, 64, 48), NATIVE, "several")
    kernel.check(random(kernel.model, {}), rtol=1e-4, atol=1e-4)
    half = Compiled(projections(1, 17, 64, 48, dtype=np.float16), NATIVE, "several")
    half.check(random(half.model, {}), rtol=1e-2, atol=6e-2)


def test_operands_that_are_packed_in_every_call_share_their_phase() -> None:
    """With weights that are no constants: both phases of the gemm template, for the parts that have them."""
    model = projections(1, 500, 64, 48)
    call, _ = only(planned(model, NATIVE))
    variable = replace(call.kernel, consts=frozenset())
    found = SEVERAL.propose(variable, NATIVE)
    assert not isinstance(found, Refusal)
    assert found[0].pack == ()
    feeds = {**random(model, {}), **{t.name: numpy_helper.to_array(t) for t in model.graph.initializer}}
    got = jit(Plan(variable, found[0], SEVERAL), NATIVE)([feeds[v.name] for v in call.inputs])
    for y, ref in zip(got, judge(model).run(None, random(model, {})), strict=True):
        np.testing.assert_allclose(y, ref, 1e-4, 1e-4)


def test_a_kernel_of_one_part_is_refused() -> None:
    call, _ = only(planned(projections(count=2), NATIVE))
    part = split_parts(call.kernel)[0]
    found = SEVERAL.propose(part, NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == "SEVERAL_FORM"


def test_the_group_writes_all_results() -> None:
    (group,) = fused(projections()).groups
    assert len(group.writes) == 3
