"""Windows in which an original reads texts that are too long for it."""

import pytest
import torch
from transformers import AutoTokenizer

from locant.adaptation import adapting
from locant.adaptation.windows import Windows
from locant.hf.sentence_folder import sentence_folder
from tests import hf_models, sentence_models, words
from tests.adaptations import TOKENS


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 13, 14, 15, 20, 21, 22, 27, 28, 29, 100, 333])
def test_every_token_is_taken_once_and_with_context(causal, count):
    windows = Windows(TOKENS, 16, causal=causal)
    pieces = windows.pieces(count)
    kept = [token for start, end, first, last in pieces for token in range(first, last)]
    assert kept == list(range(count))
    for start, end, first, last in pieces:
        assert 0 <= start <= first <= last <= end <= count
        assert end - start == min(count, 14)
        for token in range(first, last):
            assert token - start >= min(token, 3)  # context before it, or the beginning of the text
            assert causal or end - 1 - token >= min(count - 1 - token, 3)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_long_text_is_read_in_windows(kind):
    model = hf_models.make(kind)
    windows = Windows(TOKENS, 16, causal=kind == "gpt2")
    ids = torch.cat([torch.tensor([0]), words.rows(1, 33)[0], torch.tensor([2])])[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def outputs(short):
        assert short["input_ids"].shape[1] <= 16
        return (hf_models.output(model, **short), short["input_ids"])

    found, tokens = windows.read(outputs, batch)
    assert torch.equal(tokens, ids)
    wider = {name: torch.cat([value, torch.zeros(1, 5, dtype=value.dtype)], 1) for name, value in batch.items()}
    assert windows.read(outputs, wider)[0].shape[:2] == (1, 40)
    assert found.shape[:2] == (1, 35)
    for start, end, first, last in windows.pieces(33):
        alone = hf_models.output(model, input_ids=torch.cat([ids[:, :1], ids[:, 1 + start : 1 + end], ids[:, -1:]], 1))
        torch.testing.assert_close(
            found[0, 1 + first : 1 + last], alone[0, 1 + first - start : 1 + last - start], rtol=1e-4, atol=1e-5
        )
    short = {"input_ids": ids[:, :16], "attention_mask": torch.ones_like(ids[:, :16])}
    torch.testing.assert_close(windows.read(outputs, short), outputs(short))
    whole = Windows(TOKENS, 16, causal=kind == "gpt2", whole=35)
    torch.testing.assert_close(whole.read(lambda x: (hf_models.output(model, **x),), batch)[0],
                               hf_models.output(model, **batch))  # fmt: skip


@pytest.mark.parametrize(
    ("written", "window"), [("{}", 24), ('{"max_seq_length": null}', 24), ('{"max_seq_length": 30}', 30)]
)
def test_the_folder_of_a_sentence_encoder_says_how_long_its_windows_are(tmp_path, written, window):
    """New folders leave the length to their tokenizer; without such a folder windows have 128 tokens."""
    folder = sentence_models.save(tmp_path / "model", max_seq_length=24)
    next(tmp_path.glob("model/sentence_*_config.json")).write_text(written)
    source, tokenizer = sentence_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert adapting._windows(tokenizer, 64, source, causal=False).size == window
    assert adapting._windows(tokenizer, 20, source, causal=False).size == 20  # no more than it can read
    assert adapting._windows(tokenizer, 64, source, causal=True).size == 64
    assert adapting._windows(tokenizer, 512, None, causal=False).size == adapting.WINDOW == 128
