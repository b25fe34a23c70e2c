"""Losses and agreement of a changed model with its original."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from locant.adaptation import adapting, sample
from locant.adaptation.agreement import NextTokenAgreement, StateAgreement, TokenAgreement, agreement_for
from locant.adaptation.distillation import Teacher
from locant.adaptation.sample import Sampler
from locant.adaptation.windows import Windows
from tests import hf_models, words
from tests.adaptations import TOKENS, adapted


def test_the_loss_of_encoders_is_the_documented_formula():
    states, others = torch.randn(2, 3, 5, 4).unbind()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    batch = {"attention_mask": mask}
    vectors = [[], []]
    near = far = 0.0
    for row in range(3):
        n = int(mask[row].sum())
        means = [x[row, :n].mean(0) for x in (states, others)]
        for side in (0, 1):
            vectors[side].append(means[side] / means[side].norm())
        near += float((states[row, :n] - others[row, :n]).square().sum())
        far += float(states[row, :n].square().sum())
    apart = sum(float((a - b).square().sum()) for a, b in zip(*vectors, strict=True)) / 3
    assert float(StateAgreement().loss((states, states), (others, others), batch)) == pytest.approx(
        apart + 0.5 * near / far, rel=1e-5
    )
    cosine = sum(float(a @ b) for a, b in zip(*vectors, strict=True))
    assert StateAgreement().measure(states, others, batch) == (pytest.approx(cosine, rel=1e-5), 3)


def test_tokens_that_are_padded_or_not_masked_do_not_count():
    kind = TokenAgreement(mask_token=4)
    batch = {"input_ids": torch.tensor([[7, 4, 8, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    first, second = torch.randn(2, 1, 4, 9).unbind()
    wanted = torch.nn.functional.kl_div(
        second[0, 1].log_softmax(-1), first[0, 1].log_softmax(-1), log_target=True, reduction="sum"
    )
    torch.testing.assert_close(kind.loss((first,), (second,), batch), wanted)
    assert kind.measure(kind.reduced(first), first, batch) == (1.0, 1)
    ids = torch.full((40, 50), 7)
    ids[:, 0] = 2
    hidden = TokenAgreement(4, {2, 3}).prepare({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, seed=0)[
        "input_ids"
    ]
    assert float((hidden[:, 1:] == 4).double().mean()) == pytest.approx(0.15, abs=0.02)
    assert bool((hidden[:, 0] == 2).all())  # special tokens stay


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_loss_of_causal_models_compares_some_predictions_and_all_states(kind):
    model, other = (hf_models.make(kind, AutoModelForCausalLM) for _ in range(2))
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    ids = words.rows(3, 19)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    batch, next_ = {"input_ids": ids, "attention_mask": mask}, NextTokenAgreement()
    places = next_.kl_positions(batch)
    assert places.tolist() == list(range(int(ids.sum()) % 4, 19, 4))
    with torch.no_grad():
        inputs = [next_.loss_inputs(each, batch, places) for each in (model, other)]
        full = [each(**batch, output_hidden_states=True) for each in (model, other)]
    wanted, count = 0.0, 0
    for row in range(3):
        for place in places.tolist():
            if mask[row, place]:
                first, second = (x.logits[row, place].double().log_softmax(-1) for x in full)
                wanted, count = wanted + float((first.exp() * (first - second)).sum()), count + 1
    states = 0.0
    layers = len(full[0].hidden_states) - 1
    for layer in range(1, layers + 1):
        first, second = (x.hidden_states[layer][mask.bool()].double() for x in full)
        states += float((first - second).square().sum() / first.square().sum()) / layers
    assert float(next_.loss(*inputs, batch)) == pytest.approx(wanted / count + states, rel=1e-4)


def test_every_position_is_compared_in_some_batch():
    seen = {int(NextTokenAgreement().kl_positions({"input_ids": torch.tensor([[n, 1, 1, 1, 1]])})[0]) for n in range(4)}
    assert seen == {0, 1, 2, 3}
    assert NextTokenAgreement().kl_positions({"input_ids": torch.tensor([[7]])}).tolist() == [0]


def test_loss_inputs_from_windows_have_the_positions_of_the_loss():
    model = hf_models.make("gpt2", AutoModelForCausalLM)
    ids = torch.cat([torch.tensor([0]), words.rows(1, 33)[0], torch.tensor([2])])[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    original = Teacher(model, NextTokenAgreement(), Windows(TOKENS, 16, causal=True))
    logits, states = original.loss_inputs(batch)
    torch.testing.assert_close(logits, original.outputs(batch)[:, NextTokenAgreement().kl_positions(batch)])
    assert states.shape[:3] == (1, 35, model.config.num_hidden_layers)


def test_models_that_predict_tokens_are_compared_by_tokens():
    assert isinstance(agreement_for(hf_models.make("bert"), TOKENS, causal=False), StateAgreement)
    assert isinstance(
        agreement_for(hf_models.make("gpt2", AutoModelForCausalLM), TOKENS, causal=True), NextTokenAgreement
    )
    masked = agreement_for(hf_models.make("bert", AutoModelForMaskedLM), TOKENS, causal=False)
    assert masked.mask_token == 4


def test_states_of_another_size_are_left_out_of_the_loss():
    model = hf_models.make("opt", AutoModelForCausalLM, word_embed_proj_dim=16, do_layer_norm_before=False)
    assert adapted(model, "alibi", budget="2steps").steps == 2


def test_models_with_other_heads_are_compared_by_states():
    done = adapted(hf_models.make("bert", AutoModelForMultipleChoice), "alibi", budget="2steps")
    assert (done.steps, done.measure) == (2, StateAgreement().name)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_keeps_its_labels(auto):
    before, done = classified("bert", auto, "60steps")
    assert done.rows[3].agreement > done.rows[1].agreement
    assert done.rows[3].agreement == pytest.approx(same_labels(before, done.model))


def test_batches_are_padded_with_the_token_of_a_causal_classifier():
    before, done = classified("llama", AutoModelForSequenceClassification, "2steps", pad_token_id=7)
    assert done.rows[3].agreement == pytest.approx(same_labels(before, done.model, 7))  # and the tokenizer pads with 1


def classified(kind, auto, budget, **options):
    torch.manual_seed(0)
    model = hf_models.make(kind, auto, num_labels=4, **options)
    model.get_submodule("score" if kind == "llama" else "classifier").weight.data.normal_()
    before, done = copy.deepcopy(model).eval(), adapted(model, "alibi", budget=budget)
    assert done.measure == "same label"
    return before, done


def same_labels(before, after, pad=None):
    """The share of equal labels on the held-out sequences, one sequence at a time, without padding."""
    same = total = 0
    for batch in measured(before, pad):
        for row, real in zip(batch["input_ids"], batch["attention_mask"].sum(1), strict=True):
            with torch.no_grad():
                first, second = (each.eval()(input_ids=row[None, :real]).logits.argmax(-1) for each in (before, after))
            same, total = same + int((first == second).sum()), total + first.numel()
    return same / total


def measured(model, pad):
    """The held-out batches."""
    kind = agreement_for(model, TOKENS, causal=pad is not None)
    original = Teacher(model, kind, Windows(TOKENS, 32, causal=pad is not None))
    rungs = sample.ladder(32, 256 if pad is not None else 16)
    sampler = Sampler(TOKENS, adapting.held_out(words.text()), seed=0)
    return adapting.Evaluator.create(original, sampler, rungs, {}).batches


def test_multi_label_models_and_regression_are_compared_by_states():
    for options in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        model = hf_models.make("bert", AutoModelForSequenceClassification, **options)
        assert type(agreement_for(model, TOKENS, causal=False)) is StateAgreement
    model = hf_models.make("gpt2", AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match="pad_token_id"):
        agreement_for(model, TOKENS, causal=True)


def test_every_window_of_a_long_text_has_its_label():
    torch.manual_seed(0)
    model = hf_models.make("bert", AutoModelForSequenceClassification, num_labels=3)
    model.bert.pooler.dense.weight.data.normal_(std=3.0)  # so that windows differ
    model.classifier.weight.data.normal_()
    kind, windows = agreement_for(model, TOKENS, causal=False), Windows(TOKENS, 20, causal=False, whole=40)
    ids = torch.cat([torch.tensor([[0]]), words.rows(1, 60), torch.tensor([[2]])], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    logits = Teacher(model, kind, windows).outputs(batch)[0, 1:-1]
    for start, end, first, last in windows.pieces(60):
        with torch.no_grad():
            alone = model(input_ids=torch.cat([ids[:, :1], ids[:, 1 + start : 1 + end], ids[:, -1:]], 1)).logits
        torch.testing.assert_close(logits[first:last], alone.expand(last - first, -1))
    assert len(set(logits.argmax(-1).tolist())) > 1
    mean = int(logits.softmax(-1).mean(0).argmax())
    for label in range(3):
        one = torch.nn.functional.one_hot(torch.tensor(label), 3).float().expand(1, 62, -1)
        whole = torch.cat([logits[:1], logits, logits[-1:]])[None]
        whole[:, 0] = whole[:, -1] = 0.0  # equal shares for what stands around
        assert kind.measure(whole, 9 * one, batch) == (float(label == mean), 1)
