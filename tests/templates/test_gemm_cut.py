"""A product of known size is cut into blocks that keep the cores busy and stay within their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxfuse.ir.dtypes import DType
from onnxfuse.templates.gemm_cut import Product, cut, tasks_of
from onnxfuse.templates.microkernel import Tile

TILE = Tile(6, 2, 8, DType.F32)
LAYER = Product(1, 256, 196, 1024, TILE, 256, 252, 1.2, 0.0, 2, 16)


def blocks(p: Product) -> tuple[int, int]:
    """Blocks across and down."""
    nc, mc = cut(p)
    return -(-p.n // nc), -(-p.m // mc)


@pytest.mark.parametrize("m", [1, 5, 6, 97, 1000])
@pytest.mark.parametrize("n", [1, 16, 49, 3136])
@pytest.mark.parametrize("cores", [1, 2, 7])
def test_blocks_are_multiples_of_the_tile_within_their_limits(m: int, n: int, cores: int) -> None:
    nc, mc = cut(replace(LAYER, m=m, n=n, cores=cores))
    assert nc % TILE.nr == 0
    assert mc % TILE.mr == 0
    assert 0 < nc <= LAYER.nc
    assert 0 < mc <= LAYER.mc


def test_a_product_without_elements_has_blocks_too() -> None:
    assert cut(replace(LAYER, m=0, n=0, k=0)) == (16, 6)


def test_two_cores_get_two_halves_of_the_longer_side() -> None:
    assert blocks(LAYER) == (1, 2)
    assert blocks(replace(LAYER, m=64, n=3136, nc=2048)) == (2, 1)


def test_more_cores_get_more_blocks() -> None:
    across, down = blocks(replace(LAYER, cores=8))
    assert 8 <= across * down <= LAYER.most


def test_a_small_product_is_not_cut() -> None:
    assert blocks(replace(LAYER, m=24, n=32, k=16, most=1)) == (1, 1)


def test_rows_are_not_cut_where_every_unit_would_pack_for_itself() -> None:
    assert blocks(replace(LAYER, n=1600, nc=128, mc=256 * 6, pack=4.0, cores=1))[1] == 1


@pytest.mark.parametrize(("units", "most", "cores", "tasks"), [(8, 6, 2, 5), (8, 16, 2, 8), (9, 4, 2, 4), (7, 7, 1, 7)])
def test_equal_units_are_divided_so_that_no_core_waits_long(units: int, most: int, cores: int, tasks: int) -> None:
    assert tasks_of(units, most, cores) == tasks


def test_there_is_a_task_even_for_nothing() -> None:
    assert tasks_of(0, 3, 2) == 1
