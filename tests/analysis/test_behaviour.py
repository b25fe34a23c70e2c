"""Behaviour under shifts, shuffles and lengths: models of which the answer is known."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

import locant
from locant.analysis.behaviour import decompose, length, share, shift, shuffle
from tests.hf_models import make


def texts(batch=12, tokens=20, seed=3):
    return torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(seed))


# ---- shift ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["nope", "alibi"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_shift_invariant_models_do_not_see_a_shift(kind, spec):
    model = locant.swap(make(kind), spec)
    for row in shift(model, texts(), [1, 5, 100]):
        assert row.relative < 1e-6
        assert row.cosine == pytest.approx(1.0)
        assert row.how == "position_ids"
    assert row.note.startswith("past the ")


def test_native_rotary_and_t5():
    for kind, how in (("llama", "position_ids"), ("t5", "left padding")):
        for row in shift(make(kind), texts(), [1, 16]):
            assert row.relative < 2e-6
            assert row.how == how


@pytest.mark.parametrize(("kind", "last"), [("bert", 39), ("roberta", 37), ("opt", 39), ("gpt2", 39)])
def test_a_table_sees_a_shift(kind, last):
    """Up to its last row; beyond it, a row has a note."""
    rows = shift(make(kind), texts(), [1, 5, last + 1 - 20, last + 2 - 20])
    assert all(row.relative > 0.3 and row.cosine < 0.95 for row in rows[:3])
    assert rows[3].relative != rows[3].relative
    assert rows[3].note == f"not run: position {last + 1} is past the last one, {last}"


def test_shift_by_its_definition():
    """RoBERTa's first token stands at 2: s = 3 is position_ids from 5 on, against no position_ids at all."""
    model, ids = make("roberta"), texts()
    with torch.no_grad():
        plain = model(input_ids=ids).last_hidden_state
        moved = model(input_ids=ids, position_ids=torch.arange(5, 25).expand_as(ids)).last_hidden_state
    (row,) = shift(model, ids, [3])
    assert row.relative == pytest.approx(float((moved - plain).norm() / plain.norm()), rel=1e-4)
    assert row.cosine == pytest.approx(float(F.cosine_similarity(moved, plain, dim=-1).mean()), rel=1e-4)
    with torch.no_grad():
        begun = model(input_ids=ids, position_ids=torch.arange(3, 23).expand_as(ids)).last_hidden_state
    (row,) = shift(model, ids, [2], start=1)
    assert row.relative == pytest.approx(float((moved - begun).norm() / begun.norm()), rel=1e-4)
    assert shift(model, ids, [17, 18], start=1)[1].note == "not run: position 38 is past the last one, 37"


def test_shift_of_a_swapped_table_and_of_a_kept_one():
    rows = shift(locant.swap(make("llama"), "learned:length=30"), texts(), [1, 10, 11])
    assert rows[0].relative > 0.1
    assert [row.note != "" for row in rows] == [False, False, True]
    rows = shift(locant.swap(make("bert"), "sinusoidal", keep_native=True), texts(), [20, 21])
    assert [row.note != "" for row in rows] == [False, True]


# ---- shuffle --------------------------------------------------------------------------------------


def test_shuffling_a_set_changes_nothing():
    found = shuffle(locant.swap(make("bert"), "nope"), texts())
    assert found.kind == "embedding"
    assert found.change < 1e-6
    assert found.scale > 0.3  # another text does
    for model in (make("bert"), locant.swap(make("bert"), "alibi"), make("roberta", AutoModelForMaskedLM)):
        found = shuffle(model, texts())
        assert found.kind == "embedding"
        assert 1e-3 < found.change < found.scale


def test_shuffling_a_prefix():
    """A model that has learned to copy the token before the last one: its loss rises when the prefix is shuffled."""
    model, ids = copying(), texts(16, 12)
    ids[:, -1] = ids[:, -2]
    found = shuffle(model, ids, draws=2)
    assert found.kind == "loss"
    assert found.plain < 0.5
    assert found.change > 1.0
    assert found.change == pytest.approx(found.shuffled - found.plain)
    with torch.no_grad():
        loss = F.cross_entropy(model(input_ids=ids).logits[:, -2], ids[:, -1])
    assert found.plain == pytest.approx(float(loss), rel=1e-4)


def copying():
    """A GPT-2 whose logits are its last token's embedding: layers add nothing, and embeddings are one-hot."""
    model = make("gpt2", AutoModelForCausalLM, n_embd=64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attn." in name or ".mlp." in name or "wpe" in name:
                parameter.zero_()
        model.transformer.wte.weight.copy_(torch.eye(60, 64))
    return model


def test_shuffle_of_a_causal_model_without_a_head():
    found = shuffle(make("gpt2"), texts())
    assert found.kind == "embedding"
    assert "without a head" in found.note


# ---- length ---------------------------------------------------------------------------------------


def test_loss_by_length_is_of_the_same_tokens():
    """A model without attention has the same loss after any context."""
    model, ids = copying(), texts(6, 60)
    rows = length(model, ids, [10, 20, 40, 41])
    assert [row.tokens for row in rows] == [5] * 4
    with torch.no_grad():
        logits = model(input_ids=ids[:, -10:]).logits[:, -6:-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, -5:].flatten())
    for row in rows[:3]:
        assert row.kind == "loss"
        assert row.value == pytest.approx(float(expected), rel=1e-5)
    assert rows[3].value != rows[3].value
    assert rows[3].note == "not run: the model has 40 positions"
    with torch.no_grad():  # a model with attention does not
        rows = length(make("gpt2", AutoModelForCausalLM), ids, [10, 40])
    assert abs(rows[0].value - rows[1].value) > 1e-3


def test_past_the_trained_length():
    rows = length(make("llama", AutoModelForCausalLM), texts(4, 60), [40, 60])
    assert [row.note for row in rows] == ["", "past the 40 positions of the config"]
    assert all(row.value > 0 for row in rows)


def test_embedding_by_length():
    """The length of the input changes the embedding of a token through attention alone."""
    model = locant.swap(make("bert"), "alibi")
    rows = length(model, texts(6, 60), [8, 30, 60])
    assert rows[0].value == pytest.approx(1.0)
    assert rows[0].scale < rows[1].value < 0.999
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.output.dense.weight.zero_()
    assert all(row.value == pytest.approx(1.0, abs=1e-9) for row in length(model, texts(6, 60), [8, 30, 60]))


# ---- share ----------------------------------------------------------------------------------------


def planted(position, sequence, rest, batch=16, tokens=30, width=50):
    noise = torch.randn(batch, tokens, width)
    return (
        position**0.5 * torch.randn(1, tokens, width)
        + sequence**0.5 * torch.randn(batch, 1, width)
        + rest**0.5 * (noise + 0.7 * noise.roll(1, 1)) / (1 + 0.49) ** 0.5  # neighbours are correlated
    )


@pytest.mark.parametrize(("position", "sequence", "rest"), [(0.3, 0.2, 0.5), (0.05, 0.6, 0.35), (0.9, 0.0, 0.1)])
def test_planted_shares(position, sequence, rest):
    found = [decompose(planted(position, sequence, rest)) for _ in range(8)]
    for name, expected in (("position", position), ("sequence", sequence), ("rest", rest)):
        assert sum(getattr(x, name) for x in found) / 8 == pytest.approx(expected, abs=0.03), name
    for x in found:
        assert x.position + x.sequence + x.rest == pytest.approx(1.0)
        assert x.variance == pytest.approx(50, rel=0.2)


def test_noise_has_no_share():
    """Without the correction it would be 1/B: 0.25 here."""
    found = [decompose(planted(0.0, 0.0, 1.0, batch=4)) for _ in range(40)]
    shares = torch.tensor([x.position for x in found])
    assert float(shares.mean().abs()) < 3 * float(shares.std()) / 40**0.5
    assert float(shares.std()) < 0.02
    errors = torch.tensor([x.error for x in found])
    assert 0.5 < float(errors.mean() / shares.std()) < 3


def test_jackknife_by_leaving_out():
    hidden = planted(0.2, 0.2, 0.6, batch=5)
    left_out = [decompose(torch.cat([hidden[:i], hidden[i + 1 :]])).position for i in range(5)]
    expected = (4 / 5 * 4 * float(torch.tensor(left_out, dtype=torch.float64).var())) ** 0.5
    assert decompose(hidden).error == pytest.approx(expected, rel=1e-6)


def test_share_of_models():
    ids = texts(40, 16)
    for row in share(locant.swap(make("bert"), "nope"), ids):
        assert abs(row.position) < 4 * row.error
    rows = share(make("bert"), ids)
    assert [row.layer for row in rows] == [0, 1, 2]
    assert rows[0].position > 0.4  # tables of tokens and of positions with the same spread
    assert rows[0].position == pytest.approx(rows[0].shuffled, abs=5 * rows[0].error)
    assert rows[0].sequence == pytest.approx(0.0, abs=0.02)


def test_a_token_that_always_stands_first():
    """It counts as position, but not in the control."""
    ids = texts(40, 8)
    ids[:, 0] = 2
    rows = share(locant.swap(make("bert"), "nope"), ids)
    assert rows[0].position > 0.05
    assert abs(rows[0].shuffled) < 4 * rows[0].shuffled_error


# ---- what is refused ------------------------------------------------------------------------------


def test_refused():
    bert, gpt2 = make("bert"), make("gpt2", AutoModelForCausalLM)
    for call, words in (
        (lambda: share(bert, texts(2)), "too few sequences: got 2"),
        (lambda: shuffle(bert, texts(1)), "too few sequences"),
        (lambda: shuffle(bert, texts(4, 4)), "too short"),
        (lambda: length(gpt2, texts(4, 20), [8, 30]), "too short: got sequences of 20 tokens, need 30"),
        (lambda: length(gpt2, texts(), [2]), "4 tokens or more"),
        (lambda: share(bert, texts(4, 50)), "too long: got 50 tokens, the model has 40 positions"),
        (lambda: shift(bert, texts(), [0]), "1 or more"),
        (lambda: shift(bert, texts() + 10), "0 … 59"),
        (lambda: shift(bert, texts().float()), "integers"),
        (lambda: shift(bert, texts() * 0), "padding"),
        (lambda: shuffle(bert, torch.full((4, 10), 5)), "all the same"),
        (lambda: shift(make("vit"), texts()), "does not take token ids"),
        (lambda: decompose(torch.zeros(4, 5, 6)), "no variance"),
        (lambda: decompose(torch.zeros(2, 5, 6)), "B ≥ 3"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("measure", [shift, shuffle, share, lambda model, ids: length(model, ids, [8])])
def test_nan_is_refused(measure):
    model = make("bert", AutoModel)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = torch.nan  # some CPU kernels hide a NaN in a query
    with pytest.raises(ValueError, match="NaN or infinity"):
        measure(model, texts())


def test_the_mode_is_put_back():
    model = make("bert").train()
    model.embeddings.eval()
    shift(model, texts(), [1])
    assert model.training
    assert not model.embeddings.training
