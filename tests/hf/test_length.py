"""The longest input that a config names."""

from types import SimpleNamespace

import pytest

from locant.hf.length import named_length


@pytest.mark.parametrize(("value", "length"), [(512, 512), (1, 1), (0, None), (-1, None), ("512", None), (None, None)])
def test_only_a_positive_number_is_a_length(value, length):
    assert named_length(SimpleNamespace(max_position_embeddings=value)) == length
    assert named_length(SimpleNamespace(n_positions=8)) is None
