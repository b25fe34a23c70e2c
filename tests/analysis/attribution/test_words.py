"""Tokens as words."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from locant.analysis.attribution.words import words_of
from tests import bert


def of_bytes():
    """A byte-level BPE, which also has a token ##."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|end▁of▁text|>"], show_progress=False)  # fmt: skip
    made.train_from_iterator(["## the café sat", "## the cat sat the cat sat"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end▁of▁text|>")


@pytest.mark.parametrize("text", ["## the cat sat", "the café sat\n", "the cat<|end▁of▁text|>"])
def test_words_of_bytes(text):
    tokenizer = of_bytes()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert "".join(words_of([ids], tokenizer)) == text


def test_words_of_parts():
    tokenizer = bert.tokenizer()
    ids = tokenizer("on a # day", return_tensors="pt")["input_ids"]
    assert words_of([ids], tokenizer) == ("[CLS]", " o", "n", " a", " #", " d", "a", "y", "[SEP]")
    assert words_of([torch.tensor([[7, 8]]), torch.tensor([[9]])], None) == ("7", "8", "9")
