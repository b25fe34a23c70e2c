"""The offsets of a call: which there are, and the column of each pair."""

import pytest
import torch

from locant.attention.offsets import find_offsets

CPU = torch.device("cpu")


def offsets(q_pos, k_pos, reach=None):
    q_pos, k_pos = torch.tensor(q_pos), torch.tensor(k_pos)
    return find_offsets((q_pos, k_pos), q_pos.shape[1], k_pos.shape[1], CPU, reach), q_pos, k_pos


def check_columns(found, q_pos, k_pos, reach=None):
    """Every pair has the column of its offset; beyond the reach, that of the reach."""
    r = k_pos[:, None, :] - q_pos[:, :, None]
    r = r if reach is None else r.clamp(-reach, reach)
    assert torch.equal(found.r[found.columns(q_pos, k_pos, slice(None))], r)
    assert torch.equal(found.columns(q_pos, k_pos, slice(1, 2)), found.columns(q_pos, k_pos, slice(None))[:, 1:2])
    assert found.count == len(found.r)


def test_default_positions():
    found = find_offsets(None, 3, 7, CPU, None)
    assert (found.lo, found.count, found.inverse) == (-6, 9, None)
    assert found.r.tolist() == list(range(-6, 3))
    within = find_offsets(None, 3, 7, CPU, 1)
    assert within.r.tolist() == [-1, 0, 1]
    assert find_offsets(None, 0, 7, CPU, None).r.tolist() == [-6]


def test_rows_of_a_batch_share_a_range_but_not_their_distances():
    """Rows that are far from each other, each of them dense: the range is that of the offsets within a row."""
    found, q_pos, k_pos = offsets([[3, 5], [100_003, 100_004]], [[0, 1, 2, 3], [100_001, 100_002, 100_003, 100_009]])
    assert (found.lo, found.count) == (-5, 12)
    assert found.inverse is None
    check_columns(found, q_pos, k_pos)


def test_offsets_beyond_the_reach_have_no_column():
    for q_pos, k_pos, expected in (
        ([[0, 50]], [[0, 100]], range(-4, 5)),
        ([[0, 1]], [[2, 300]], range(1, 5)),
        ([[9, 300]], [[0, 8]], range(-4, 0)),
        ([[0, 1]], [[200, 300]], range(4, 5)),
    ):
        found, *pos = offsets(q_pos, k_pos, reach=4)
        assert found.r.tolist() == list(expected)
        check_columns(found, *pos, reach=4)


def test_large_gaps_have_a_list():
    """A range of 4 (Lq + Lk) offsets or more is not dense."""
    dense, *_ = offsets([[0, 1]], [[0, 14]])  # −1 … 14
    assert (dense.lo, dense.count, dense.listed, dense.inverse) == (-1, 16, None, None)
    found, q_pos, k_pos = offsets([[0, 1]], [[0, 15]])
    assert found.r.tolist() == [-1, 0, 14, 15]
    assert found.lo == -1
    assert found.inverse.tolist() == [[[1, 3], [0, 2]]]
    check_columns(found, q_pos, k_pos)


@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize(("query", "key"), [(0, 2**62 + 1), (2**62 + 1, 0), (-(2**62), 2**62), (2**63 - 1, -(2**63))])
def test_positions_that_are_too_far_apart(query, key, reach):
    """Differences beyond int64 have another sign, and back ends add to offsets."""
    for q_pos in ([[query]], [[query, 0]]):
        with pytest.raises(ValueError, match=r"more than 2\*\*62 apart"):
            offsets(q_pos, [[key, 0]], reach)
    offsets([[0]], [[2**62, -(2**62)]], reach)
