"""What callers ask for, what they get wrong, and what it costs."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from locant.analysis.attribution import attribute, similarity
from tests import bert, hf_models

IDS = torch.tensor([[5, 17, 42, 8, 30, 11]])


def whole(found):
    return float(found.relevance.sum() + found.position.sum()) + found.values + found.biases


def test_the_next_token_of_a_language_model():
    model = hf_models.make("llama", AutoModelForCausalLM)
    with torch.no_grad():
        logits = model(IDS).logits[0]
    found = attribute(model, IDS)
    assert found.value == pytest.approx(float(logits[-1].max()))
    assert found.output == f"logit of token {int(logits[-1].argmax())} at position 5"
    assert whole(found) == pytest.approx(found.value, rel=1e-4)
    earlier = attribute(model, IDS, output=7, at=2)
    assert earlier.value == pytest.approx(float(logits[2, 7]))
    assert not bool(earlier.relevance[3:].any())  # a causal model does not see what follows
    assert attribute(model, IDS, output=-53, at=-4).value == pytest.approx(float(logits[2, 7]))


def test_the_class_of_a_text_and_the_words_of_its_tokens():
    tokenizer = bert.tokenizer()
    model = hf_models.make("bert", AutoModelForSequenceClassification, vocab_size=len(tokenizer), num_labels=3)
    found = attribute(model, "It was GOOD", tokenizer=tokenizer)
    assert "".join(found.tokens) == "[CLS] it was good[SEP]"
    assert whole(found) == pytest.approx(found.value, rel=1e-4)
    assert found.output.startswith("logit of class ")
    with torch.no_grad():
        logits = model(**tokenizer("It was GOOD", return_tensors="pt")).logits
    assert found.value == pytest.approx(float(logits.max()))
    assert [line for line in found.sentences() if "passes through position (table 100 %)" in line]


def test_the_span_of_an_answer():
    model = hf_models.make("bert", AutoModelForQuestionAnswering)
    with torch.no_grad():
        out = model(IDS)
    starts, ends = out.start_logits[0], out.end_logits[0]
    best = max(float(starts[i] + ends[j]) for i in range(6) for j in range(i, 6))
    assert attribute(model, IDS).value == pytest.approx(best)
    found = attribute(model, IDS, output=(1, 3))
    assert found.value == pytest.approx(float(starts[1] + ends[3]))
    assert whole(found) == pytest.approx(found.value, rel=1e-4)


def test_the_only_mask_is_explained():
    tokenizer = bert.tokenizer()
    model = hf_models.make("bert", AutoModelForMaskedLM, vocab_size=len(tokenizer))
    found = attribute(model, "a [MASK] c", tokenizer=tokenizer)
    assert found.output.endswith("at position 2")


def test_pairs_of_tokens_sum_to_the_similarity_and_to_the_relevance_of_each_token():
    model = hf_models.make("bert")
    other = torch.tensor([[9, 42, 3, 17]])
    found = similarity(model, IDS, other)
    with torch.no_grad():
        a, b = (model(ids).last_hidden_state.mean(1)[0] for ids in (IDS, other))
    assert found.value == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=1e-6)
    assert list(found.pairs.shape) == [7, 5]
    assert float(found.pairs.sum()) == pytest.approx(found.value, abs=1e-6)
    torch.testing.assert_close(found.pairs[:-1].sum(1), found.first.relevance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.pairs[:, :-1].sum(0), found.second.relevance, rtol=1e-4, atol=1e-6)
    for side in (found.first, found.second):
        assert whole(side) == pytest.approx(found.value, rel=1e-4)
    assert float((found.pairs[0] - found.pairs[1]).abs().max()) > 1e-4


def test_a_text_takes_at_most_five_passes(monkeypatch):
    model, passes = hf_models.make("llama", AutoModelForCausalLM), []
    tokens = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append("forward"), with_kwargs=True
    )  # runs on a few tokens call the base model
    grad = torch.autograd.grad

    def counted(*args, **kwargs):
        passes.append("backward")
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    attribute(model, tokens)
    assert passes.count("forward") == 2
    assert passes.count("backward") == 2


def test_gradients_switched_off_by_the_caller_make_no_difference():
    model = hf_models.make("gpt2", AutoModelForCausalLM)
    expected = attribute(model, IDS).relevance
    with torch.no_grad():
        torch.testing.assert_close(attribute(model, IDS).relevance, expected)
    model.train()
    torch.testing.assert_close(attribute(model, IDS).relevance, expected)  # without dropout
    assert model.training


def test_a_sum_that_differs_from_the_output_raises():
    model = hf_models.make("gpt2", AutoModelForCausalLM)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient  # should be doubled

    head = model.lm_head.forward
    model.lm_head.forward = lambda x: head(Broken.apply(x))
    with pytest.raises(NotImplementedError, match=r"relevance is not conserved in this model: it sums to .* output is"):
        attribute(model, IDS)


def refused(match, kind="llama", auto=AutoModelForCausalLM, text=IDS, error=ValueError, change=None, **given):
    model = hf_models.make(kind, auto)
    model = model if change is None else change(model)
    with pytest.raises(error, match=match):
        attribute(model, text, **given)


def compiled_inside(model):
    model.compile()
    return model


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    return model


def hooked_before(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


@pytest.mark.parametrize(
    ("match", "given"),
    [
        (r"the model is compiled.*explain the model before compile", {"change": torch.compile, "error": TypeError}),
        (r"the model is compiled", {"change": compiled_inside, "error": TypeError}),
        (r"the model is in torch.bfloat16, .* use model.float\(\) first", {"change": lambda m: m.bfloat16()}),
        (r"a hook of LlamaMLP .* changes what the module computes.*remove the hook first", {"change": hooked}),
        (r"a hook of LlamaMLP", {"change": hooked_before}),
        (r"output must be from -60 to 59: the model has 60 logits; got 60", {"output": 60}),
        (r"at must be from -6 to 5: the model has 6 tokens; got 6", {"at": 6}),
        (r"output must be from -60 to 59.*got True", {"output": True}),
        (r"a span needs a model that answers questions", {"output": (1, 2)}),
        (r"output must be a function that returns one number", {"output": lambda out: out.logits}),
        (r"does not depend on the tokens", {"output": lambda out: torch.ones(())}),
        (r"a text needs a tokenizer", {"text": "a text"}),
        (r"the text is empty", {"text": " ", "tokenizer": object()}),
        (r"integers \[1, tokens\]; got torch.int64 \[2, 6\]", {"text": IDS.repeat(2, 1)}),
        (r"token ids must be in 0 … 59; got 5 … 70", {"text": torch.tensor([[5, 70]])}),
        (r"the text has no tokens", {"text": torch.zeros(1, 0, dtype=torch.long)}),
        (r"has padding", {"text": {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}}),
        (r"text must be a string, token ids, or a dict with input_ids; got int", {"text": 3, "error": TypeError}),
        (r"the text has 41 tokens, and the model reads at most 40", {"kind": "gpt2", "text": IDS.repeat(1, 7)[:, :41]}),
        (r"output must be from -2 to 1: the model has 2 classes; got 2",
         {"kind": "bert", "auto": AutoModelForSequenceClassification, "output": 2}),
        (r"at is for models with logits at every token",
         {"kind": "bert", "auto": AutoModelForSequenceClassification, "at": 0}),
        (r"output must be from -6 to 5: the model has 6 tokens; got 6",
         {"kind": "bert", "auto": AutoModelForQuestionAnswering, "output": (2, 6)}),
        (r"a span ends at or after its start",
         {"kind": "bert", "auto": AutoModelForQuestionAnswering, "output": (3, 2)}),
        (r"pass output=\(start, end\)", {"kind": "bert", "auto": AutoModelForQuestionAnswering, "output": 1}),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(match, given):
    refused(match, **given)


def test_models_that_cannot_be_explained():
    with pytest.raises(ValueError, match=r"BertModel has no logits to explain; use similarity"):
        attribute(hf_models.make("bert"), IDS)
    with pytest.raises(ValueError, match=r"ViTModel does not read tokens"):
        attribute(hf_models.make("vit"), IDS)
    with pytest.raises(ValueError, match=r"pass a dict with input_ids and decoder_input_ids"):
        attribute(hf_models.make("t5"), IDS)
    with pytest.raises(TypeError, match=r"takes a model of transformers, got Linear"):
        attribute(torch.nn.Linear(2, 2), IDS)
    with pytest.raises(ValueError, match=r"encoder-decoder; pass its encoder"):
        similarity(hf_models.make("t5"), IDS, IDS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_weights_are_refused():
    model = hf_models.make("bert", AutoModelForSequenceClassification)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"the weights of the model are quantised.*load the model in floating point"):
        attribute(quantised, IDS)


def test_a_hook_that_only_looks_is_no_obstacle():
    model, seen = hf_models.make("llama", AutoModelForCausalLM), []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model.model.layers[1].register_forward_hook(lambda module, args, out: out)
    expected = attribute(hf_models.make("llama", AutoModelForCausalLM), IDS)
    torch.testing.assert_close(attribute(model, IDS).relevance, expected.relevance)
    assert seen
