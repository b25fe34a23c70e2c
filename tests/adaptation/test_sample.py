"""The text that models are fitted and adapted on."""

import pytest

from locant.adaptation.sample import Sampler, pieces
from locant.analysis.text import special_tokens
from tests import words
from tests.adaptations import TOKENS


def test_text_without_full_stops_is_read_all_over():
    lines = [" ".join(f"w{5 + (n * (m + 1) + m) % 53}" for n in range(300)) for m in range(20)]
    sampler = Sampler(TOKENS, lines)
    starts = {tuple(row[:8].tolist()) for row in sampler.rows(400, 32)}
    assert len(starts) > 60  # 300 words are at least five sentences; by lines alone there would be 20


def test_chinese_sentences_are_sentences():
    line = "這是第一句話，不長也不短。這是第二句話，也差不多。第三句話在這裡！"
    assert len(pieces([line])) == 1  # 34 letters, a hundred bytes
    assert len(Sampler(words.Letters(), [line])._split(line)) == 3


@pytest.mark.parametrize(
    "text", ["/home/somebody/data/wikitext-2-raw/wiki.train.tokns", "some/where/that/is/not/there/at/all.txt"]
)
def test_a_path_that_is_not_there_is_not_prose(text):
    with pytest.raises(ValueError, match=r"pathlib\.Path"):
        pieces(text)


def test_a_file_is_read_to_its_end(tmp_path):
    (tmp_path / "text.txt").write_text("A line that is long enough to be taken for prose.\n" * 3)
    assert len(pieces(tmp_path / "text.txt")) == 3


def test_special_tokens_of_a_tokenizer_that_knows_no_latin_letters():
    class Tokenizer:
        def __call__(self, text, add_special_tokens=True, **options):
            ids = [5] * text.count("中")
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    assert special_tokens(Tokenizer()) == ([1], [2])
    with pytest.raises(ValueError, match="makes no tokens"):
        special_tokens(lambda text, **options: {"input_ids": []})
