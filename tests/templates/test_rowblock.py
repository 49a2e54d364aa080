"""Attention in one kernel agrees with onnxruntime: every size around the tiles, mask, layout, type and vector width."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from onnxfuse.codegen.object import host_features
from onnxfuse.errors import Refusal
from onnxfuse.ir.kernel import Kernel
from onnxfuse.target import Target, by_name
from onnxfuse.templates.rowblock import ROWBLOCK
from onnxfuse.templates.rowblock_form import Form, dissect
from tests.fuse.test_rowblocks import tail
from tests.templates.attentions import Compiled, attention, only, planned, random

NATIVE = by_name("native", host_features())
WIDE = replace(NATIVE, vector_bits=512, vector_regs=32)  # LLVM splits what the CPU does not have
NARROW = by_name("x86-64-v2")  # no fma, no masked loads
SMALL_CACHE = replace(NATIVE, l2=8 * 1024)  # blocks of a single tile
SIZES = [(1, 1, 1), (2, 5, 7), (1, 6, 8), (2, 13, 33), (1, 50, 17), (1, 97, 257), (2, 7, 64)]


def check(kernel: Compiled, sizes: tuple[int, int, int], **tolerance: float) -> None:
    b, s, t = sizes
    kernel.check(random(kernel.model, {"B": b, "S": s, "T": t}, seed=s), **tolerance)


@pytest.mark.parametrize("flat", [False, True], ids=["heads outside", "heads inside the rows"])
@pytest.mark.parametrize("scale", ["after", "q", "both", "none"])
def test_scales_and_layouts(flat: bool, scale: str) -> None:
    kernel = Compiled(attention(sk="T", flat=flat, scale=scale), NATIVE)
    for sizes in SIZES:
        check(kernel, sizes)


@pytest.mark.parametrize(
    "mask",
    [["B", 1, "S", "T"], ["B", 1, 1, "T"], ["S", "T"], ["T"], ["B", 3, "S", "T"], [1, 3, "S", 1], []],
    ids=str,
)
def test_masks_of_every_shape(mask: list[int | str]) -> None:
    kernel = Compiled(attention(sk="T", mask=mask), NATIVE)
    for sizes in SIZES[1:5]:
        check(kernel, sizes)


@pytest.mark.parametrize(("d", "dv"), [(1 + 1, 4), (7, 13), (8, 16), (33, 5), (64, 64), (80, 128)])
def test_head_sizes_that_are_no_multiple_of_a_vector(d: int, dv: int) -> None:
    kernel = Compiled(attention(d=d, dv=dv, sk="T", flat=True, composite=False), NATIVE)
    for sizes in SIZES[1:5]:
        check(kernel, sizes)


@pytest.mark.parametrize("target", [WIDE, NARROW, SMALL_CACHE], ids=["512 bits", "128 bits without fma", "small L2"])
def test_other_targets(target: Target) -> None:
    kernel = Compiled(attention(sk="T", d=20, flat=True, mask=["B", 1, "S", "T"]), target)
    for sizes in SIZES:
        check(kernel, sizes)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float16, 4e-3)], ids=["f64", "f16"])
def test_element_types(dtype: type, tolerance: float) -> None:
    kernel = Compiled(attention(sk="T", d=16, flat=True, mask=["S", "T"], dtype=dtype), NATIVE)
    for sizes in SIZES[:5]:
        check(kernel, sizes, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("sq", "sk"), [(1, 40), (4, 9), (3, 300), (48, 48), (197, 197), (130, 2), (40, 1000)])
def test_static_lengths(sq: int, sk: int) -> None:
    kernel = Compiled(attention(2, 3, sq, sk, 32, flat=True), NATIVE)
    kernel.check(random(kernel.model, {}))


@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits without fma"])
@pytest.mark.parametrize(("s", "d"), [(49, 12), (50, 32), (65, 16), (197, 16), (100, 300)])
def test_static_lengths_whose_products_have_tiles_of_different_heights(s: int, d: int, target: Target) -> None:
    kernel = Compiled(attention(1, 2, s, s, d, flat=True), target)
    kernel.check(random(kernel.model, {}))


def test_many_rows_of_one_head_are_chunks_of_several_tasks() -> None:
    kernel = Compiled(attention(1, 1, "S", 64, 32, flat=True), NATIVE)
    for s in (63, 64, 65, 500, 1031):
        check(kernel, (1, s, 0))


def test_a_causal_mask_of_infinities() -> None:
    kernel = Compiled(attention(sk="T", causal=True, flat=True), NATIVE)
    for b, s, t in SIZES[1:]:
        feeds = random(kernel.model, {"B": b, "S": s, "T": t})
        feeds["keep"] = np.tril(np.ones((s, t), bool), t - s)
        kernel.check(feeds)


def test_masked_rows_and_values_that_are_no_numbers() -> None:
    """A row of -inf is NaN, NaN and infinity spread exactly as far as in onnxruntime."""
    kernel = Compiled(attention(sk="T", mask=["B", 1, "S", "T"], flat=True), NATIVE)
    rng = np.random.default_rng(5)
    for where, bad in itertools.product(("mask", "q", "k", "v"), (np.nan, np.inf, -np.inf)):
        feeds = random(kernel.model, {"B": 2, "S": 9, "T": 21}, seed=3)
        flat = feeds[where].reshape(-1)
        flat[rng.integers(0, flat.size, 2)] = bad
        kernel.check(feeds)
    feeds = random(kernel.model, {"B": 2, "S": 9, "T": 21})
    feeds["mask"][:, :, 4] = -np.inf
    feeds["mask"][1, :, :, 7:] = -np.inf
    kernel.check(feeds)


def test_large_scores_do_not_overflow() -> None:
    kernel = Compiled(attention(sk="T", scale="none"), NATIVE)
    feeds = random(kernel.model, {"B": 1, "S": 8, "T": 40})
    kernel.check({**feeds, "q": feeds["q"] * 1e4})


def test_results_do_not_depend_on_how_rows_are_cut() -> None:
    model = attention(1, 2, "S", "T", 16, flat=True)
    feeds = random(model, {"S": 150, "T": 70})
    results = [Compiled(model, t)(feeds)[0] for t in (NATIVE, SMALL_CACHE)]
    np.testing.assert_array_equal(*results)


def kernel_of(**how: object) -> Kernel:
    call, _ = only(planned(attention(**how), NATIVE))  # type: ignore[arg-type]
    return call.kernel


def test_scores_shares_and_exponentials_lie_on_top_of_each_other() -> None:
    form = dissect(kernel_of(mask=["S", "S"]))
    assert isinstance(form, Form)
    assert [a.whole for a in form.areas] == [True]
    assert len(form.first.stores) == 1  # scale and mask are in the first product's epilogue


def test_half_precision_scores_are_rounded_in_registers() -> None:
    form = dissect(kernel_of(dtype=np.float16))
    assert isinstance(form, Form)
    assert [(a.dtype.bytes, a.whole) for a in form.areas] == [(4, True)]


def test_a_kernel_of_another_form_is_refused() -> None:
    k = kernel_of()
    without = replace(k, stages=k.stages[1:])
    found = ROWBLOCK.propose(without, NATIVE)
    assert isinstance(found, Refusal)
    assert found.code == "ROWBLOCK_FORM"


# ---- row tails ----


@pytest.mark.parametrize("target", [NATIVE, WIDE, NARROW], ids=["native", "512 bits", "128 bits without fma"])
@pytest.mark.parametrize("softmaxed", [False, True], ids=["layer norm", "softmax"])
def test_a_product_and_the_norm_of_its_rows(target: Target, softmaxed: bool) -> None:
    kernel = Compiled(tail(515, 70, softmaxed=softmaxed), target)
    for b, s in ((1, 1), (2, 5), (1, 6), (1, 97), (3, 40)):
        kernel.check(random(kernel.model, {"B": b, "S": s}), rtol=1e-4, atol=2e-5)
