"""What callers ask for, what they get wrong, and what it costs."""

import numpy
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import locant
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


def test_two_equal_texts_are_told_apart():
    model = hf_models.make("t5", AutoModelForSeq2SeqLM)
    with torch.no_grad():  # other tokens with the same embeddings
        model.shared.weight[IDS[0] + 1] = model.shared.weight[IDS[0]]
    found, apart = (
        attribute(model, {"input_ids": IDS, "decoder_input_ids": ids}, output=2) for ids in (IDS, IDS + 1)
    )  # fmt: skip
    assert float(found.relevance.abs().min()) > 0
    torch.testing.assert_close(found.relevance, apart.relevance)
    torch.testing.assert_close(found.content, apart.content)


@pytest.mark.parametrize("ids", [torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 0]])])
def test_token_types_are_constants_even_if_they_equal_the_text(ids):
    model = hf_models.make("bert", AutoModelForSequenceClassification)
    found = attribute(model, {"input_ids": ids, "token_type_ids": ids.clone()}, output=0)
    with torch.no_grad():  # the same model, whose token types are a part of its positions
        embeddings = model.bert.embeddings
        model.bert.embeddings.position_embeddings.weight[:4] += embeddings.token_type_embeddings.weight[ids[0]]
        embeddings.token_type_embeddings.weight.zero_()
    torch.testing.assert_close(
        attribute(model, {"input_ids": ids}, output=0).relevance, found.relevance, rtol=1e-4, atol=1e-5
    )


def test_a_function_may_have_parameters_of_its_own():
    model = hf_models.make("gpt2", AutoModelForCausalLM)
    probe, vector = torch.nn.Linear(60, 1), torch.nn.Parameter(torch.randn(60))
    with torch.no_grad():
        frozen = [probe.weight[0].clone(), vector.clone()]
    twice = vector * 2
    for function, same in [
        (
            lambda out: probe(out.logits[0, -1])[0],
            lambda out: (out.logits[0, -1] * frozen[0]).sum() + probe.bias.item(),
        ),
        (lambda out: (out.logits[0, -1] * vector).sum(), lambda out: (out.logits[0, -1] * frozen[1]).sum()),
        (lambda out: out.logits[0, -1] @ twice, lambda out: (out.logits[0, -1] * frozen[1]).sum() * 2),
        (lambda out: sum(x * 2 for x in out.logits[0, -1]), lambda out: out.logits[0, -1].sum() * 2),
    ]:
        found, expected = (attribute(model, IDS, output=each) for each in (function, same))
        torch.testing.assert_close(found.relevance, expected.relevance)
        assert found.value == pytest.approx(expected.value, rel=1e-5)
    assert probe.weight.requires_grad


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore")
def test_fox_can_be_explained(kind):
    model = locant.swap(hf_models.make(kind, AutoModelForCausalLM), "fox")
    assert attribute(model, IDS, output=5).error <= 1e-4


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("deepseek_v2", {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                         "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                         "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
        ("llama4_text", {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 16,
                         "interleave_moe_layer_step": 2}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_rotations_by_complex_numbers(kind, sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, **sizes,
    )  # fmt: skip
    found = attribute(AutoModelForCausalLM.from_config(config).eval(), IDS, output=5)
    assert found.error <= 1e-4
    assert float(found.relevance.abs().min()) > 0


def test_any_integers_are_ids_and_numbers_of_numpy_are_numbers():
    model = hf_models.make("gpt2", AutoModelForCausalLM)
    expected = attribute(model, IDS, output=3).relevance
    for ids in (IDS.to(torch.uint8), IDS.to(torch.int16), IDS.int()):
        torch.testing.assert_close(attribute(model, ids, output=numpy.int64(3), at=numpy.int64(5)).relevance, expected)


def test_every_token_may_have_a_class():
    model = hf_models.make("bert", AutoModelForTokenClassification, num_labels=3)
    assert attribute(model, IDS, output=1, at=2).output == "logit of class 1 (LABEL_1) at position 2"


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


def hooked_in_place(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out.mul_(2) is None or None)
    return model


def hooked_by_name(model):
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "use_cache": None}), with_kwargs=True
    )
    return model


def of_dicts(model):
    model.config.return_dict = False
    return model


def without_weights(model):
    return model.to("meta")


SEQ = {"kind": "t5", "auto": AutoModelForSeq2SeqLM}
QA = {"kind": "bert", "auto": AutoModelForQuestionAnswering}


@pytest.mark.parametrize(
    ("match", "given"),
    [
        (r"decoder_input_ids must be integers \[1, tokens\]; got torch.int64 \[2, 6\]",
         {**SEQ, "text": {"input_ids": IDS, "decoder_input_ids": IDS.repeat(2, 1)}}),
        (r"decoder_input_ids must be integers \[1, tokens\]; got torch.float32",
         {**SEQ, "text": {"input_ids": IDS, "decoder_input_ids": IDS.float()}}),
        (r"the text has no tokens \(decoder_input_ids\)",
         {**SEQ, "text": {"input_ids": IDS, "decoder_input_ids": IDS[:, :0]}}),
        (r"token ids must be in 0 … 59; got 5 … 70 in decoder_input_ids",
         {**SEQ, "text": {"input_ids": IDS, "decoder_input_ids": torch.tensor([[5, 70]])}}),
        (r"the text has 41 tokens in decoder_input_ids, and the model reads at most 40",
         {"kind": "bart", "auto": AutoModelForSeq2SeqLM,
          "text": {"input_ids": IDS, "decoder_input_ids": IDS.repeat(1, 7)[:, :41]}}),
        (r"padding \(decoder_attention_mask has a 0\)",
         {**SEQ, "text": {"input_ids": IDS, "decoder_input_ids": IDS, "decoder_attention_mask": IDS % 2}}),
        (r"got past_key_values; leave past_key_values out", {"text": {"input_ids": IDS, "past_key_values": object()}}),
        (r"got labels; leave labels out", {"text": {"input_ids": IDS, "labels": IDS}}),
        (r"got return_dict=False", {"text": {"input_ids": IDS, "return_dict": False}}),
        (r"attention_mask must be a tensor, got list; .* return_tensors='pt'",
         {"text": {"input_ids": IDS, "attention_mask": [[1] * 6]}, "error": TypeError}),
        (r"integers \[1, tokens\]; got torch.bool", {"text": IDS > 0}),
        (r"config has return_dict=False; set model.config.return_dict = True", {"change": of_dicts}),
        (r"has no weights yet", {"change": without_weights}),
        (r"at is for models with logits at every token; choose a span", {**QA, "at": 99}),
        (r"a span is two numbers: pass output=\(start, end\); got \(1, 2, 3\)", {**QA, "output": (1, 2, 3)}),
        (r"a span is two numbers", {**QA, "output": (1,)}),
        (r"output must be a whole number, a span .* got float 1.5", {**QA, "output": 1.5}),
        (r"at is for logits, and output is a function", {"output": lambda out: out.logits.sum(), "at": 1}),
        (r"through softmax, which the rules hold constant.*return what softmax is computed from: a logit",
         {"output": lambda out: out.logits[0, -1].softmax(-1)[3]}),
        (r"through log_softmax", {"output": lambda out: out.logits[0, -1].log_softmax(-1)[3]}),
        (r"through norm", {"output": lambda out: out.logits[0, -1].norm()}),
        (r"the function passed as output computes with lgamma.*return another number",
         {"output": lambda out: torch.lgamma(out.logits[0, -1, 3] + 50), "error": NotImplementedError}),
        (r"a hook of LlamaMLP", {"change": hooked_in_place}),
        (r"a hook of LlamaDecoderLayer", {"change": hooked_by_name}),
        (r"compares several texts at once", {"kind": "bert", "auto": AutoModelForMultipleChoice}),
        (r"returns prediction_logits and seq_relationship_logits; choose one number of them with output=",
         {"kind": "bert", "auto": AutoModelForPreTraining}),
    ],
)  # fmt: skip
def test_arguments_and_models_that_were_misread(match, given):
    refused(match, **given)


def test_hooks_of_all_modules():
    def doubled(module, args, out):
        return out * 2 if isinstance(module, torch.nn.Linear) else None

    handle = torch.nn.modules.module.register_module_forward_hook(doubled)
    try:
        refused(r"a hook of Linear .*doubled.* changes what the module computes")
    finally:
        handle.remove()


def test_modes_and_models_without_gradients():
    with torch.autocast("cpu"):
        refused(r"torch.autocast is on for cpu.*outside autocast")
    with torch.inference_mode():
        model = hf_models.make("llama", AutoModelForCausalLM)
    with pytest.raises(ValueError, match=r"the model was made inside torch.inference_mode\(\)"):
        attribute(model, IDS)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_pooling_that_is_none():
    model = hf_models.make("bert")
    with pytest.raises(TypeError, match=r"pooling must be a function .*Pooling\(\('cls',\)\); got 'cls'"):
        similarity(model, IDS, IDS, pooling="cls")
    with pytest.raises(ValueError, match=r"one vector for each text, \[1, size\]; got \[32\]"):
        similarity(model, IDS, IDS, pooling=lambda states, mask: states[0, 0])


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
    model.model.layers[1].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: args[0])
    expected = attribute(hf_models.make("llama", AutoModelForCausalLM), IDS)
    torch.testing.assert_close(attribute(model, IDS).relevance, expected.relevance)
    assert seen
