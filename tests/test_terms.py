"""The algebra of `Terms`, field by field."""

import pytest
import torch

from locant.terms import TABLES, Sides, Terms, Tokens

JOINED = ("query_side", "key_side")
"""Tables of vectors that meet those of `Sides`: longer in a sum."""


def table(name, *, vector=True):
    return torch.randn(2, 5, 3) if name not in ("bias", "score", "level") and vector else torch.randn(2, 5)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in (*JOINED, "level")])
def test_a_sum_adds_each_table_and_multiplies_gains(name):
    a, b = table(name), table(name)
    both = Terms(**{name: a}) + Terms(**{name: b})
    assert both.used() == (name,)
    torch.testing.assert_close(getattr(both, name), a * b if name == "gain" else a + b)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_one_part_is_that_of_the_sum(name):
    a = table(name)
    for both in (Terms(**{name: a}) + Terms(), Terms() + Terms(**{name: a})):
        assert both.used() == (name,)
        assert getattr(both, name) is a


@pytest.mark.parametrize("name", JOINED)
def test_side_vectors_and_their_tables_join_in_the_same_order(name):
    a, b = table(name), torch.randn(1, 5, 2)
    both = Terms(**{name: a}) + Terms(**{name: b})
    torch.testing.assert_close(getattr(both, name), torch.cat([a, b.expand(2, -1, -1)], dim=-1))
    side = name.removesuffix("_side")
    p, t = torch.randn(1, 2, 4, 3), torch.randn(3, 1, 4, 2)
    joined = getattr(Sides(**{side: p}) + Sides(**{side: t}), side)
    torch.testing.assert_close(joined, torch.cat([p.expand(3, -1, -1, -1), t.expand(-1, 2, -1, -1)], dim=-1))


def test_temperatures_multiply_and_levels_of_two_schemes_are_refused():
    one, other = torch.rand(1, 2, 4), torch.rand(1, 2, 4)
    both = Sides(temperature=one, query_level=one) + Sides(temperature=other)
    torch.testing.assert_close(both.temperature, one * other)
    assert both.query_level is one
    with pytest.raises(ValueError, match="one scheme with levels"):
        Sides(query_level=one) + Sides(key_level=other)
    with pytest.raises(ValueError, match="one scheme with levels"):
        Terms(level=table("level")) + Terms(level=table("level"))


def test_a_scalar_gain_multiplies_every_coordinate_of_a_vector_gain():
    scalar, vector = table("gain", vector=False), table("gain")
    for both in (Terms(gain=scalar) + Terms(gain=vector), Terms(gain=vector) + Terms(gain=scalar)):
        torch.testing.assert_close(both.gain, scalar[:, :, None] * vector)


def pair(factor, seen):
    """A pair whose value depends on each of its arguments."""

    def call(q, k, q_pos, k_pos, *, scale, visible):
        seen.append((q, k, q_pos, k_pos, scale, visible))
        return factor * (scale * q @ k.mT + q_pos[:, None, :, None] - k_pos[:, None, None, :]) * visible

    return call


def test_pairs_add_and_receive_the_same_arguments():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    q_pos, k_pos, visible = torch.arange(3)[None], torch.arange(5)[None], torch.rand(1, 1, 3, 5) > 0.5
    seen = []
    first, second = pair(1.0, seen), pair(0.5, seen)
    both = Terms(pair=first) + Terms(pair=second)
    assert both.used() == ("pair",)
    arguments, named = (q, k, q_pos, k_pos), {"scale": 0.7, "visible": visible}
    found = both.pair(*arguments, **named)
    assert all(all(a is b for a, b in zip(each, (*arguments, 0.7, visible), strict=True)) for each in seen)
    torch.testing.assert_close(found, first(*arguments, **named) + second(*arguments, **named))
    for one in (Terms(pair=first) + Terms(), Terms() + Terms(pair=first)):
        assert one.pair is first
    assert (Terms() + Terms()).used() == ()


def test_fields_in_use():
    assert Terms().used() == ()
    everything = Terms(**{name: table(name) for name in TABLES}, pair=pair(1.0, []))
    assert everything.used() == (*TABLES, "pair")
    assert tuple(everything.tables()) == TABLES


def test_columns_and_consecutive_columns():
    terms = Terms(bias=table("bias"), key=table("key"), pair=pair(1.0, []))
    index = torch.tensor([3, 0, 3])
    chosen, narrow = terms.columns(index), terms.narrow(1, 3)
    for name in ("bias", "key"):
        torch.testing.assert_close(getattr(chosen, name), getattr(terms, name)[:, [3, 0, 3]])
        torch.testing.assert_close(getattr(narrow, name), getattr(terms, name)[:, 1:4])
        assert getattr(narrow, name)._base is getattr(terms, name)
    assert chosen.pair is narrow.pair is terms.pair
    assert terms.narrow(0, 5) is terms  # all columns: a step with a cache makes no views


def test_positions_of_tokens():
    """A scheme gets the positions of the call; without them, keys count from 0 and queries are the last ones."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 5, 4)
    given = torch.tensor([[7, 8, 9]]), torch.tensor([[1, 2, 4, 8, 16]])
    tokens = Tokens(q, k, given, None, None, 0.5)
    assert tokens.q_pos is given[0]
    assert tokens.k_pos is given[1]
    assert tokens.hidden is None
    counted = Tokens(q, k, None, None, None, 0.5)
    assert counted.q_pos.tolist() == [[2, 3, 4]]
    assert counted.k_pos.tolist() == [[0, 1, 2, 3, 4]]


def test_dtypes():
    terms = Terms(bias=table("bias"), key=table("key").double())
    assert {x.dtype for x in terms.to(torch.float64).tables().values()} == {torch.float64}
    same = Terms(bias=table("bias"))
    assert same.to(torch.float32) is same
