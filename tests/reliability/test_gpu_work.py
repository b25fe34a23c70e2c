"""The work of the Triton kernels, counted: `reliability.gpu.work`."""

import pytest

from reliability.gpu import work
from reliability.gpu.work import Kind, Shape


def test_plain_attention_has_the_products_of_the_kernels():
    assert work.products(Kind(), Shape()) == (2, 7)


@pytest.mark.parametrize(("reach", "share"), [(None, 1.0), (1, 0.4), (2, 0.7), (65, 0.7), (66, 0.9), (10**6, 1.0)])
def test_band_tiles_of_four_blocks(reach, share):
    """Ten tiles: four on the diagonal, three whose offsets begin at −1, two at −65, one at −129."""
    assert work.band_share(Kind(reach=reach), Shape(length=256, block=64)) == pytest.approx(share)


def test_every_term_adds_its_products():
    """In band tiles alone: 2 for each, forward. Backward 8 for a query or key table, 6 for values."""
    assert work.products(Kind(query=1, key=1), Shape()) == (6, 23)
    assert work.products(Kind(value=0.5), Shape()) == (3, 10)


def test_bytes_of_one_head():
    """16 tokens of 8 numbers: three tensors of 2 bytes, the output of 4, two sums of 4 each."""
    assert work.memory_bytes(Shape(length=16, width=8)) == 16 * (3 * 8 * 2 + 8 * 4 + 8)
    assert work.scratch_bytes(Kind(query=1), Shape()) == 4 * 64 * 128 + 4 * 64 * 64
    assert work.scratch_bytes(Kind(), Shape()) == 0


def test_a_row_for_each_scheme():
    rows = work.table()
    assert [row["scheme"] for row in rows] == list(work.SCHEMES)
    assert all(list(row) == list(rows[0]) for row in rows)
