"""`fit` and `adapt` of an encoder-decoder: the encoder changes, and the decoder keeps its own positions."""

import pytest
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForTextEncoding
from transformers.modeling_outputs import BaseModelOutput

import locant
from locant.adaptation import adapting, part, scores, training
from locant.adaptation.part import part_of
from locant.hf.facts import maximum_length
from tests import hf_models, words
from tests.adaptations import TOKENS, adapted, fitted

MODELS = [  # biases, a table, and a family that is found by running; with and without a head
    ("t5", AutoModel), ("t5", AutoModelForSeq2SeqLM), ("bart", AutoModel), ("m2m_100", AutoModelForSeq2SeqLM)
]  # fmt: skip
IDS, TARGETS = words.rows(2, 24), words.rows(2, 9, seed=6)


def make(kind, auto=AutoModelForSeq2SeqLM):
    model = hf_models.make(kind, auto)
    if kind == "t5":  # biases as large as those of trained models
        with torch.no_grad():
            for stack in (model.encoder, model.decoder):
                stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_(std=2.0)
    return model


def encoded(model, ids=IDS):
    with torch.no_grad():
        return model.get_encoder()(input_ids=ids).last_hidden_state


def decoded(model, states):
    """The outputs of the decoder for given states of an encoder."""
    return hf_models.output(model, encoder_outputs=BaseModelOutput(states), decoder_input_ids=TARGETS)


def written(model, *, use_cache, beams):
    return model.generate(
        IDS, decoder_start_token_id=2, max_new_tokens=8, min_new_tokens=8, use_cache=use_cache, num_beams=beams
    ).tolist()


@pytest.mark.parametrize(("kind", "auto"), MODELS)
def test_a_fit_changes_the_encoder_alone(kind, auto, tmp_path):
    model = make(kind, auto)
    states, own = encoded(model), locant.native(model)
    outputs, whole = decoded(model, states), hf_models.output(model, input_ids=IDS, decoder_input_ids=TARGETS)
    found = fitted(model, "toeplitz:clip=16", length=16, tokens=256)
    assert found.model is model
    assert sum(head.fitted for head in found.heads) < 0.99 * sum(head.silenced for head in found.heads)
    assert len(found.heads) == 2 * 4  # layers and heads of the encoder
    assert found.notices[0].startswith(f"only the encoder of {type(model).__name__} was changed; the decoder keeps its")
    assert found.notices[0] in str(found)
    encoder, decoder = locant.native(model).stacks
    assert {str(scheme) for scheme in encoder.layers} == {"toeplitz:clip=16"}
    assert str(decoder.embed) == str(own.stacks[1].embed)
    assert own.stacks[1].layers is None or [*map(str, decoder.layers)] == [*map(str, own.stacks[1].layers)]
    assert not torch.allclose(encoded(model), states)
    torch.testing.assert_close(decoded(model, states), outputs, rtol=0, atol=2e-5)
    model.save_pretrained(tmp_path)
    again = locant.load(tmp_path).eval()
    given = {"input_ids": IDS, "decoder_input_ids": TARGETS}
    assert type(again) is type(model)
    assert torch.equal(hf_models.output(again, **given), hf_models.output(model, **given))
    assert torch.equal(hf_models.output(locant.swap(model, "native"), **given), whole)


def test_the_encoder_inside_a_model_is_fitted_as_it_is_alone():
    model, other = make("bart"), make("bart")
    found, alone = (
        fitted(model, "tisa:kernels=3", length=16, tokens=256),
        fitted(other.get_encoder(), "tisa:kernels=3", length=16, tokens=256),
    )
    assert found.heads == alone.heads
    assert torch.equal(encoded(model), encoded(other))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_fitted_model_generates_with_and_without_a_cache(kind):
    model = make(kind)
    fitted(model, "alibi:slopes=learned", length=16, tokens=128)
    for beams in (1, 2):
        assert written(model, use_cache=True, beams=beams) == written(model, use_cache=False, beams=beams)


def test_the_encoder_reads_any_length_and_the_decoder_as_many_tokens_as_before():
    model = make("bart")
    fitted(model, "tisa:kernels=3", length=16, tokens=128)
    long = words.rows(1, 90)
    assert hf_models.output(model, input_ids=long, decoder_input_ids=TARGETS[:1]).isfinite().all()
    assert maximum_length(model) > 10_000  # what a saved tokenizer truncates at
    assert model.config.max_position_embeddings == 40
    with pytest.raises(ValueError, match="outside the table"):
        hf_models.output(model, input_ids=long, decoder_input_ids=long)


@pytest.mark.parametrize("kind", ["t5", "m2m_100"])  # the tests below adapt BART
def test_adapting_trains_the_encoder_alone(kind, tmp_path):
    model = make(kind)
    states = encoded(model)
    outputs = decoded(model, states)
    before = {name: weight.clone() for name, weight in model.state_dict().items() if ".encoder." not in f".{name}"}
    scored = []
    tasks = {"none": lambda each, _: scored.append(each) or 0.0}
    done = adapted(model, budget="10steps", rate=5e-4, length=16, out=tmp_path / "out", scores=tasks)
    assert {type(each) for each in scored} == {type(model.get_encoder())}  # the original is a copy
    assert done.model is model
    assert done.measure == "cosine of mean-pooled vectors, encoder alone"
    assert done.rows[3].agreement > done.rows[2].agreement > 0
    after = model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items() if name in after)
    assert "decoder" in " ".join(name for name in before if name in after)  # so the line above compares something
    torch.testing.assert_close(decoded(model, states), outputs, rtol=0, atol=2e-5)
    assert all(weight.requires_grad for weight in model.parameters())
    given = {"input_ids": IDS, "decoder_input_ids": TARGETS}
    again = locant.load(tmp_path / "out").eval()
    assert torch.equal(hf_models.output(again, **given), hf_models.output(model, **given))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "only the encoder" in card
    assert "every weight of the encoder that the decoder does not use was" in card


def test_an_interrupted_adaptation_resumes_and_ends_with_the_same_bits(monkeypatch, tmp_path):
    monkeypatch.setattr(training.Stage, "every", 2)
    options = {"budget": "4steps", "length": 16}

    def stop(found, steps):
        if found.step == 4:
            raise KeyboardInterrupt

    model, given = make("bart"), {"input_ids": IDS, "decoder_input_ids": TARGETS}
    before = hf_models.output(model, **given)
    with pytest.raises(KeyboardInterrupt):
        adapted(model, out=tmp_path / "stopped", on_evaluation=stop, **options)
    assert torch.equal(hf_models.output(model, **given), before)
    assert model.config is model.model.encoder.config
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]
    again, undisturbed = (adapted(make("bart"), out=tmp_path / name, **options) for name in ("stopped", "whole"))
    assert torch.equal(hf_models.output(again.model, **given), hf_models.output(undisturbed.model, **given))


def test_a_model_is_restored_if_joining_or_saving_fails(monkeypatch):
    model, given = make("bart"), {"input_ids": IDS, "decoder_input_ids": TARGETS}
    before, weights = hf_models.output(model, **given), {k: v.clone() for k, v in model.state_dict().items()}

    def broken(*_):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        adapted(model, budget="2steps", length=16, on_result=broken)
    same = iter([True, False])
    monkeypatch.setattr(part, "_same", lambda *_: next(same))  # the trial, and the encoder after the fit
    with pytest.raises(RuntimeError, match="other outputs inside the model than alone"):
        fitted(model, "tisa", queries=True, length=16, tokens=128)
    assert torch.equal(hf_models.output(model, **given), before)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert model.config is model.model.encoder.config
    assert str(locant.native(model)).startswith("absolute")


def test_a_decoder_that_its_own_schemes_would_change_is_refused(monkeypatch):
    model, given = make("t5"), {"input_ids": IDS, "decoder_input_ids": TARGETS}
    before = hf_models.output(model, **given)
    real = part.native

    def wrong(model):
        found = real(model)
        with torch.no_grad():
            for scheme in found.stacks[-1].layers:
                for weight in scheme.parameters():
                    weight += torch.linspace(0, 9, weight.numel()).view_as(weight)
        return found

    monkeypatch.setattr(part, "native", wrong)
    with pytest.raises(NotImplementedError, match="its decoder has other outputs; load the encoder alone"):
        fitted(model, "tisa")
    assert torch.equal(hf_models.output(model, **given), before)


def test_weights_that_the_decoder_uses_are_not_trained():
    model = make("bart", AutoModel)
    embeddings = model.shared.weight
    assert embeddings in set(model.encoder.parameters())
    model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared  # one module for all, as in other families
    own = part_of(model).own()
    assert embeddings not in own
    assert model.encoder.layers[0].fc1.weight in own
    alone = hf_models.make("t5", AutoModelForTextEncoding)
    assert part_of(alone).own() == set(alone.parameters())


def test_scores_that_need_a_head_raise_before_anything_changes():
    model = make("t5")
    tasks = {"clm": scores.score("clm", words.text(), 16)}
    with pytest.raises(ValueError, match="encoder alone, which predicts no tokens, so it cannot be scored by clm; use"):
        adapted(model, scores=tasks)


def test_a_folder_of_sentence_transformers_needs_the_encoder_alone(monkeypatch):
    monkeypatch.setattr(adapting, "sentence_folder", lambda name: object())
    with pytest.raises(ValueError, match="opens an encoder alone, but T5ForConditionalGeneration has a decoder"):
        adapted(make("t5"))


def test_an_encoder_that_runs_no_layers_itself_is_refused():
    model = make("t5", AutoModel)
    model.get_encoder = lambda: model
    with pytest.raises(NotImplementedError, match=r"in encoder, decoder alone, and not in its encoder \(T5Model\)"):
        locant.fit(model, "tisa", words.text(), tokenizer=TOKENS)
