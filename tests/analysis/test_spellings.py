"""Every spelling of one matrix product is the same contraction: one kernel, same roles, nothing copied in between."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.roles import Contraction, affine, roles
from onnxfuse.config import FusionConfig, PrepareConfig
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.read import read
from onnxfuse.fuse import fuse
from onnxfuse.ir.expr import Expr, Load
from onnxfuse.ir.graph import Value
from onnxfuse.ir.interp import run_kernel
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.loops import Axis
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.verify.evaluate import evaluate
from tests.analysis.spellings import SPELLINGS, layouts, mean_of_products, model, split_sum

LAYOUTS = list(layouts())
IDS = ["".join("NT"[x] for x in layout) for layout in LAYOUTS]


def kernels(m: onnx.ModelProto) -> list[tuple[Kernel, list[str]]]:
    """The kernels of a model and the names of what each reads."""
    source = read(m)
    fold = lambda node, arrays: evaluate(node, arrays, source.graph.opset, source.graph.imports)  # noqa: E731
    prepared = prepare(source.graph, PrepareConfig(), fold, source.hints)
    made = kernelize(fuse(lower(atomize(prepared.typed)), FusionConfig()))
    return [(c.kernel, [v.name for v in c.inputs]) for c in made.calls.values()]


def canonical(c: Contraction) -> str:
    """Roles with extents, and for both factors and the output the step in memory along every role."""
    sides = [("m", c.rows.parts), ("n", c.cols.parts), ("k", c.k), ("batch", c.batch)]

    def steps(source: Value, index: tuple[Expr, ...]) -> str:
        view = c.views.get(source)
        shape = source.tensor.shape if view is None else view.source.tensor.shape
        kept = range(len(shape)) if view is None else view.kept
        strides = {d: int(np.prod([int(e) for e in shape[d + 1 :]])) for d in kept}

        def along(axes: tuple[Axis, ...]) -> list[tuple[int, int]]:
            found = [
                (sum(s * (affine(ix, a) or 0) for ix, s in zip(index, strides.values(), strict=True)), int(a.extent))
                for a in axes
            ]
            return merged(sorted(f for f in found if f[0]))

        used = {"m": (c.rows.axis,) if c.rows.axis else (), "n": (c.cols.axis,) if c.cols.axis else ()}
        return " ".join(f"{name}{along(axes) or along(used.get(name, ()))}" for name, axes in sides)

    (store,) = c.stores
    assert isinstance(c.a, Load)
    assert isinstance(c.b, Load)
    extents = [(name, int(np.prod([int(a.extent) for a in axes]))) for name, axes in sides]
    at = [(c.a.source, c.a.index), (c.b.source, c.b.index), (store.target, store.index)]
    return " | ".join([str(extents), *(steps(source, index) for source, index in at)])


def merged(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Axes that walk memory as one."""
    out: list[tuple[int, int]] = []
    for step, extent in steps:
        if out and step == out[-1][0] * out[-1][1]:
            out[-1] = (out[-1][0], out[-1][1] * extent)
        else:
            out.append((step, extent))
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_every_spelling_has_the_canonical_form_of_matmul(layout: tuple[bool, bool, bool]) -> None:
    forms = {}
    for spelling in SPELLINGS:
        made = kernels(model(spelling, 48, 40, 32, *layout))
        assert len(made) == 1, spelling.__name__
        found = roles(made[0][0])
        assert isinstance(found, Contraction), spelling.__name__
        forms[spelling.__name__] = canonical(found)
    assert set(forms.values()) == {forms["matmul"]}, forms


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SPELLINGS),
    st.sampled_from(LAYOUTS),
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from([4, 8, 12]),
)
def test_every_spelling_computes_the_product(spelling, layout, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m * 64 + n * 8 + k)
    ta, tb, ty = layout
    given_ = {
        "a": rng.standard_normal((k, m) if ta else (m, k), dtype=np.float32),
        "b": rng.standard_normal((n, k) if tb else (k, n), dtype=np.float32),
    }
    a, b = (given_["a"].T if ta else given_["a"]), (given_["b"].T if tb else given_["b"])
    want = a @ b / (k if spelling is mean_of_products else 1)
    made = kernels(model(spelling, m, n, k, *layout))
    if len(made) != 1:
        return  # an extent of 1 turns a view into a reshape, which stays with the runtime
    kernel, names = made[0]
    if any(x not in given_ for x in names):
        return
    (got,) = run_kernel(kernel, [given_[x] for x in names])
    np.testing.assert_allclose(np.asarray(got).reshape(-1), (want.T if ty else want).reshape(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_a_sum_that_was_cut_in_two_is_one_sum_again(layout: tuple[bool, bool, bool]) -> None:
    ((kernel, _),) = kernels(model(split_sum, 48, 40, 32, *layout))
    found = roles(kernel)
    assert isinstance(found, Contraction)
    assert [a.extent for a in found.k] == [32]
