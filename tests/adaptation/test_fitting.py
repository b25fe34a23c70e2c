"""`locant.fit`: what position did in attention is found again, and what is said about it is true."""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForTextEncoding

import locant
from locant.adaptation import fitting, start
from locant.adaptation.sample import Sampler, ladder, pieces
from locant.attention.request import prepare
from tests import hf_models, words

TOKENS = words.Tokenizer()


def fitted(model, spec, **options):
    return locant.fit(model, spec, words.text(), tokenizer=TOKENS, length=32, **options)


def t5() -> torch.nn.Module:
    model = hf_models.make("t5", AutoModelForTextEncoding)
    with torch.no_grad():  # biases as large as those of trained models
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_(std=2.0)
    return model


@pytest.mark.parametrize("spec", ["t5", "toeplitz"])
def test_a_bias_is_found_again(spec):
    model, ids = t5(), words.rows()
    with torch.no_grad():
        before = model(input_ids=ids).last_hidden_state
        found = fitted(model, spec)
        after = model(input_ids=ids).last_hidden_state
    assert found.explained > 0.999
    assert float((after - before).norm() / before.norm()) < 0.02
    with torch.no_grad():
        silent = locant.swap(model, "nope")(input_ids=ids).last_hidden_state
    assert float((silent - before).norm() / before.norm()) > 0.1  # position mattered


def test_a_free_bias_explains_more_than_tisa_and_tisa_more_than_nothing():
    shares = {spec: fitted(t5(), spec).explained for spec in ("toeplitz", "tisa:kernels=5", "tisa:kernels=1", "nope")}
    assert shares["toeplitz"] > shares["tisa:kernels=5"] > shares["tisa:kernels=1"] > 0.05
    assert shares["nope"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["bert", "roberta", "albert", "mpnet", "gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("spec", ["tisa:kernels=3", "huang4:clip=8", "shaw:clip=8"])
def test_it_is_no_worse_than_nothing_anywhere(kind, spec):
    model = hf_models.make(kind)
    found = fitted(model, spec)
    assert sum(head.fitted for head in found.heads) < sum(head.silenced for head in found.heads)
    assert found.explained > 0
    assert (kind in ("llama", "gpt_neox")) == ("first" not in str(locant.native(model)))  # only tables leave something


@pytest.mark.parametrize(
    "spec", ["toeplitz:clip=16", "kerple", "alibi:slopes=learned", "fire", "huang2:clip=8", "tisa"]
)
def test_what_is_said_of_a_head_is_true(spec):
    """The divergence of the first layer, computed once more from transformers' own attention weights."""
    plain = hf_models.make("bert", attn_implementation="eager")
    model = hf_models.make("bert")
    found = fitted(model, spec)
    rows = fitting._batches(hf_models.make("bert"), Sampler(TOKENS, words.text()), 32, fitting.TOKENS)
    total, queries = torch.zeros(4, dtype=torch.float64), 0
    with torch.no_grad():
        for ids in rows:
            p, q = (each(input_ids=ids, output_attentions=True).attentions[0].double() for each in (plain, model))
            total += (p * (p / q).log()).sum((0, 2, 3))
            queries += ids.numel()
    said = [head.fitted for head in found.heads if head.layer == 1]
    torch.testing.assert_close(torch.tensor(said).double(), total / queries, rtol=1e-3, atol=1e-5)


def test_the_first_row_and_the_mean_of_the_others_stay():
    model = hf_models.make("bert")
    table = model.embeddings.position_embeddings.weight.detach().clone()
    fitted(model, "tisa")
    left = locant.native(model).stacks[0].embed
    torch.testing.assert_close(left.first, table[0])
    torch.testing.assert_close(left.rest, table[1:32].mean(0))


@pytest.mark.parametrize("spec", ["rope", "alibi", "nope"])
def test_a_scheme_without_parameters_says_so(spec):
    found = fitted(hf_models.make("bert"), spec)
    assert f"{spec} has no parameters" in str(found)


def test_it_is_the_same_again_and_draws_no_random_numbers():
    state = torch.random.get_rng_state()
    first, second = (fitted(hf_models.make("gpt2"), "tisa").heads for _ in range(2))
    assert first == second
    hf_models.make("gpt2")
    assert not torch.equal(state, torch.random.get_rng_state())  # make itself draws: the next check can fail
    model = hf_models.make("gpt2")
    state = torch.random.get_rng_state()
    fitted(model, "tisa")
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_model_is_left_as_it_was_where_fitting_fails(monkeypatch):
    model, ids = hf_models.make("bert"), words.rows()
    before = hf_models.output(model, input_ids=ids)

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(fitting, "start", broken)
    with pytest.raises(RuntimeError, match="broken"):
        fitted(model, "tisa")
    assert torch.equal(hf_models.output(model, input_ids=ids), before)


def test_broken_weights_and_modes_without_gradients_are_refused():
    model = hf_models.make("bert")
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        fitted(model, "tisa")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layer\.0\.output\.dense\.weight has numbers that are not finite"):
        fitted(model, "tisa")


def test_what_cannot_be_fitted_is_refused():
    swapped = locant.swap(hf_models.make("bert"), "tisa")
    with pytest.raises(ValueError, match="swapped already"):
        fitted(swapped, "alibi")
    with pytest.raises(ValueError, match="AutoModelForTextEncoding"):
        fitted(hf_models.make("t5"), "tisa")
    with pytest.raises(ValueError, match="no line of 40 bytes"):
        locant.fit(hf_models.make("bert"), "tisa", "short", tokenizer=TOKENS)
    with pytest.raises(ValueError, match="tokenizer="):
        locant.fit(hf_models.make("bert"), "tisa", words.text())


def test_what_a_table_leaves_is_left_once():
    assert fitting.with_first("tisa") == "tisa+first"
    assert fitting.with_first("tisa+first") == "tisa+first"
    assert fitting.with_first("tisa:kernels=2/alibi") == "tisa:kernels=2+first/alibi+first"
    model = hf_models.make("bert")
    table = model.embeddings.position_embeddings.weight.detach().clone()
    fitted(model, "tisa:kernels=2/alibi")
    torch.testing.assert_close(locant.native(model).stacks[0].embed.first, table[0])


def test_a_sum_starts_as_its_part():
    assert fitted(t5(), "toeplitz+rope").explained < fitted(t5(), "toeplitz+nope").explained > 0.999


def test_modes_are_as_they_were_where_a_fit_is_stopped(monkeypatch):
    model = hf_models.make("bert").train()
    model.encoder.layer[1].eval()
    modes = [part.training for part in model.modules()]

    def stopped(*_):
        model.eval()
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "_fit", stopped)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, "tisa")
    assert [part.training for part in model.modules()] == modes


def test_worse_than_nothing_is_said_in_words():
    heads = [fitting.HeadFit(1, 1, silenced=1.0, fitted=2.5)]
    assert "%" not in fitting.Fit(None, "alibi", heads).summary
    assert "farther" in fitting.Fit(None, "alibi", heads).summary


def test_lengths_must_be_possible():
    for options, said in (({"length": 0}, "at least 8"), ({"tokens": 0}, "tokens must be at least 1")):
        with pytest.raises(ValueError, match=said):
            locant.fit(hf_models.make("bert"), "tisa", words.text(), tokenizer=TOKENS, **options)


# ---------------------------------------------------------------------------------------------- where a fit starts


def planted(bias: torch.Tensor, *, causal: bool = False):
    """Content and weights of an attention that had this bias [H, 2L − 1]."""
    h, n = bias.shape[0], (bias.shape[1] + 1) // 2
    q, k = torch.randn(6, h, n, 8), torch.randn(6, h, n, 8)
    r = torch.arange(n) - torch.arange(n)[:, None] + n - 1
    logit = q @ k.mT / math.sqrt(8) + bias[:, r]
    if causal:
        logit = logit.masked_fill(r > n - 1, -torch.inf)
    return [prepare(q, k, k, None, causal=causal)], [logit.softmax(-1)]


@pytest.mark.parametrize("causal", [False, True])
def test_least_squares_finds_the_curve_up_to_a_constant(causal):
    bias = torch.randn(3, 39) * 0.5
    offsets, found, counts = start.curve(*planted(bias, causal=causal))
    wanted = bias[:, offsets + 19].double()
    near = counts > 12  # a softmax says little about offsets that few pairs have
    apart = (found - wanted)[:, near]
    assert float((apart - apart.mean(-1, keepdim=True)).abs().max()) < 0.05
    assert bool((offsets <= 0).all()) == causal


def test_planted_bumps_are_found():
    offsets = torch.arange(-63, 64)
    wanted = 3 * torch.exp(-0.5 * (offsets + 1.0) ** 2) - 2 * torch.exp(-0.01 * (offsets - 4.0) ** 2)
    counts = (64 - offsets.abs()).double()
    amplitude, sharpness, centre = start.kernels(offsets, wanted[None].double(), counts, 4)
    found = (amplitude[..., None] * torch.exp(-sharpness[..., None] * (offsets - centre[..., None]) ** 2)).sum(1)[0]
    apart = found - wanted
    assert float((apart - apart.mean()).abs().max()) < 0.3  # of 3: on the grid, not yet between its points


# --------------------------------------------------------------------------------------------------------- the text


def test_rows_are_full_and_lines_come_in_an_order_of_the_seed():
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


def test_a_line_is_tokenised_as_a_whole():
    """What follows a space is another token in byte-level vocabularies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    line = "One thing is said. Another thing is said! And a third? Yes."
    made.train_from_iterator([line] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    sentences = Sampler(tokenizer, [line])._split(line)
    assert [token for sentence in sentences for token in sentence] == tokenizer(line)["input_ids"]
    assert [tokenizer.decode(sentence).strip() for sentence in sentences] == [
        "One thing is said.", "Another thing is said!", "And a third?", "Yes.",
    ]  # fmt: skip


def test_a_sequence_goes_on_as_the_text_does():
    lines = ["w5 w6 w7 w8 w9 w10 w11 w12. w13 w14 w15.", "w16 w17 w18 w19 w20 w21 w22 w23 w24 w25.",
             "w26 w27 w28 w29 w30 w31 w32 w33 w34 w35."]  # fmt: skip
    for seed in range(6):
        ids = Sampler(TOKENS, lines, seed=seed).rows(1, 42)[0, 1:-1].tolist()
        assert ids[0] in (5, 13, 16, 26)
        assert all(after == (before - 4) % 31 + 5 for before, after in itertools.pairwise(ids))


def test_every_line_is_started_in_before_one_comes_again():
    lines = [f"w{n} " * 20 for n in range(5, 25)]
    assert sorted(Sampler(TOKENS, lines).rows(20, 8)[:, 1].tolist()) == list(range(5, 25))


def test_a_text_begins_again():
    assert Sampler(TOKENS, ["w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16."]).rows(50, 16).shape == (50, 16)


def test_ladder_and_pieces(tmp_path):
    with pytest.raises(ValueError, match="give it as pathlib"):
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


def test_images_are_not_text():
    with pytest.raises(ValueError, match="does not read tokens"):
        locant.fit(hf_models.make("vit"), "alibi", words.text(), tokenizer=TOKENS)
