"""Token sequences from a text."""

import pytest

from locant.analysis import text


class Tokenizer:
    """Letters are tokens; 1 and 2 stand around a text."""

    def __call__(self, words, add_special_tokens=True, verbose=True):
        ids = [ord(letter) for letter in words]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_text_is_cut_into_sequences():
    ids = text.sequences(Tokenizer(), "abcdefghij" * 10, count=3, length=12)
    assert ids.shape == (3, 12)
    assert ids[:, 0].tolist() == [1, 1, 1]
    assert ids[:, -1].tolist() == [2, 2, 2]
    assert ids[1, 1:-1].tolist() == [ord(letter) for letter in "abcdefghij"]
    with pytest.raises(ValueError, match="the text has 10 tokens; 3 sequences of 12 need 30"):
        text.sequences(Tokenizer(), "abcdefghij", count=3, length=12)
    with pytest.raises(ValueError, match="leave 2 for the text beside the model's special tokens; 4 or more"):
        text.sequences(Tokenizer(), "abcdefghij", count=1, length=4)
    assert len(text.default_text()) > 100_000
    assert text.usable(Tokenizer())


def test_an_empty_tokenizer_is_not_used():
    class Empty(Tokenizer):
        unk_token_id = 7

        def __call__(self, words, **how):
            return {"input_ids": [7] * len(words.split())}

    assert not text.usable(Empty())
