"""The text that models are fitted and adapted on."""

import itertools

import pytest
import torch

from locant.adaptation.sample import Sampler, ladder, pieces
from locant.analysis.text import special_tokens
from tests import words
from tests.adaptations import TOKENS


def test_sequences_start_everywhere_in_text_without_full_stops():
    lines = [" ".join(f"w{5 + (n * (m + 1) + m) % 53}" for n in range(300)) for m in range(20)]
    sampler = Sampler(TOKENS, lines)
    starts = {tuple(row[:8].tolist()) for row in sampler.rows(400, 32)}
    assert len(starts) > 60  # 300 words are at least five sentences; by lines alone there would be 20


def test_chinese_sentences_are_sentences():
    line = "這是第一句話，不長也不短。這是第二句話，也差不多。第三句話在這裡！"
    assert len(pieces([line])) == 1  # 34 letters, a hundred bytes
    assert len(Sampler(words.Letters(), [line]).split(line)) == 3


@pytest.mark.parametrize(
    "text", ["/home/somebody/data/wikitext-2-raw/wiki.train.tokns", "some/where/that/is/not/there/at/all.txt"]
)
def test_a_missing_path_is_not_prose(text):
    with pytest.raises(ValueError, match=r"pathlib\.Path"):
        pieces(text)


def test_a_file_is_read_to_its_end(tmp_path):
    (tmp_path / "text.txt").write_text("A line that is long enough to be taken for prose.\n" * 3)
    assert len(pieces(tmp_path / "text.txt")) == 3


def test_special_tokens_of_a_tokenizer_without_latin_letters():
    class Tokenizer:
        def __call__(self, text, add_special_tokens=True, **options):
            ids = [5] * text.count("中")
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    assert special_tokens(Tokenizer()) == ([1], [2])
    with pytest.raises(ValueError, match="makes no tokens"):
        special_tokens(lambda text, **options: {"input_ids": []})


def test_rows_are_full_and_the_seed_decides_the_order():
    first, again, other = (Sampler(TOKENS, words.text(), seed=seed).rows(8, 16) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (8, 16)
    assert bool((first[:, 0] == 0).all())
    assert bool((first[:, -1] == 2).all())
    assert bool((first[:, 1:-1] >= 5).all())


def test_a_batch_has_whole_sentences_that_fit():
    sampler = Sampler(TOKENS, ["w5 w6 w7. w8 w9. " * 8])
    batch = sampler.batch(2, 9)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(*batch.values(), strict=True)]
    assert all(row in ([0, 5, 6, 7, 8, 9, 2], [0, 8, 9, 5, 6, 7, 8, 9, 2]) for row in rows)
    long = Sampler(TOKENS, ["w5 " * 60]).batch(1, 9)  # a sentence that does not fit is cut
    assert long["input_ids"].shape == (1, 9)


def test_a_line_is_tokenized_as_a_whole():
    """A word after a space is another token in byte-level vocabularies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    line = "One thing is said. Another thing is said! And a third? Yes."
    made.train_from_iterator([line] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    sentences = Sampler(tokenizer, [line]).split(line)
    assert [token for sentence in sentences for token in sentence] == tokenizer(line)["input_ids"]
    assert [tokenizer.decode(sentence).strip() for sentence in sentences] == [
        "One thing is said.", "Another thing is said!", "And a third?", "Yes.",
    ]  # fmt: skip


def test_a_sequence_continues_as_the_text_does():
    lines = ["w5 w6 w7 w8 w9 w10 w11 w12. w13 w14 w15.", "w16 w17 w18 w19 w20 w21 w22 w23 w24 w25.",
             "w26 w27 w28 w29 w30 w31 w32 w33 w34 w35."]  # fmt: skip
    for seed in range(6):
        ids = Sampler(TOKENS, lines, seed=seed).rows(1, 42)[0, 1:-1].tolist()
        assert ids[0] in (5, 13, 16, 26)
        assert all(after == (before - 4) % 31 + 5 for before, after in itertools.pairwise(ids))


def test_sequences_start_in_every_line_before_one_is_used_again():
    lines = [f"w{n} " * 20 for n in range(5, 25)]
    assert sorted(Sampler(TOKENS, lines).rows(20, 8)[:, 1].tolist()) == list(range(5, 25))


def test_the_first_line_follows_the_last():
    assert Sampler(TOKENS, ["w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16."]).rows(50, 16).shape == (50, 16)


def test_ladder_and_pieces(tmp_path):
    with pytest.raises(ValueError, match="pass it as pathlib"):
        pieces(str(tmp_path))
    with pytest.raises(TypeError, match="text must be"):
        pieces(["a line of text that is long enough, is it not", None])
    book = "It is a long story. " * 2000
    assert max(map(len, pieces(book))) <= 10_000
    assert " ".join(pieces(book)) == book.strip()
    assert ladder(128) == [16, 32, 64, 128]
    assert ladder(100) == [25, 50, 100]
    assert ladder(7) == [7]
    assert ladder(1024, 256) == [256, 512, 1024]
    (tmp_path / "a.txt").write_text("short\n" + "long enough to be a line of prose, is it not?\n" * 40)
    assert set(pieces(tmp_path / "a.txt")) == {"long enough to be a line of prose, is it not?"}
