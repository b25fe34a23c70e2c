"""How models number their tokens."""

from types import SimpleNamespace

import pytest
import torch

from locant.hf import counting


def stack(**config):
    return SimpleNamespace(config=SimpleNamespace(**config))


def test_padding_tokens_are_not_counted():
    ids = torch.tensor([[1, 1, 7, 8, 1, 9], [7, 8, 9, 7, 8, 9]])
    given, roberta = {"input_ids": ids}, stack(pad_token_id=1)
    assert counting.by_token(roberta, given, 0).tolist() == [[-1, -1, 0, 1, -1, 2], [0, 1, 2, 3, 4, 5]]
    assert counting.by_token(roberta, given, 10).tolist()[0] == [-1, -1, 10, 11, -1, 12]
    assert counting.by_token(roberta, {}, 0) is None
    assert counting.by_index(roberta, given, 0) is None


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_masked_tokens_are_not_counted(dtype):
    mask = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).to(dtype)
    assert counting.by_mask(None, {"attention_mask": mask}, 0).tolist() == [[-1, -1, 0, 1, -1, 2], [0, 1, 2, 3, 4, 5]]
    assert counting.by_mask(None, {"attention_mask": mask}, 4).tolist() == [[-1, 2], [4, 5]]
    assert counting.by_mask(None, {}, 0) is None
    assert counting.by_mask(None, {"attention_mask": mask[:, None, None]}, 0) is None


def test_the_mask_of_a_static_cache_is_longer_than_the_input():
    given = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]]), "input_ids": torch.zeros(1, 2)}
    assert counting.by_mask_of_keys(None, given, 3).tolist() == [[2, 3]]
    embedded = {**given, "input_ids": None, "inputs_embeds": torch.zeros(1, 2, 5)}
    assert counting.by_mask_of_keys(None, embedded, 3).tolist() == [[2, 3]]
    assert counting.by_mask_of_keys(None, {**given, "attention_mask": None}, 3) is None


def test_tokens_are_counted_from_the_first_of_their_cell():
    columns, rows = [0, 0, 1, 1, 1, 2, 1, 0], [0, 0, 1, 1, 2, 1, 1, 0]
    types = torch.tensor([[[0, column, row] for column, row in zip(columns, rows, strict=True)]])
    config = {"type_vocab_sizes": [3, 256, 256], "max_position_embeddings": 100, "reset_position_index_per_cell": True}
    given = {"token_type_ids": types}
    assert counting.by_cell(stack(**config), given, 0).tolist() == [[0, 1, 0, 1, 0, 0, 4, 7]]
    short = stack(**{**config, "max_position_embeddings": 5})
    assert counting.by_cell(short, given, 0).tolist() == [[0, 1, 0, 1, 0, 0, 4, 4]]
    assert counting.by_cell(stack(**{**config, "reset_position_index_per_cell": False}), given, 0) is None
    assert counting.by_cell(stack(**config), {}, 0) is None


def test_in_attention_every_token_has_a_position():
    counted = torch.tensor([[-1, -1, 0, 1, -1, 2], [0, 1, 2, 3, 4, 5]])
    assert counting.in_attention(counted, 0).tolist() == [[-2, -1, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]
    assert counting.in_attention(torch.tensor([[-1, 7, 8, -1]]), 7).tolist() == [[6, 7, 8, 9]]


def test_the_rules_by_name():
    assert {name: rule.__name__ for name, rule in counting.COUNTS.items()} == {
        name: name for name in ("by_index", "by_token", "by_mask")
    }
