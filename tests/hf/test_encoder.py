"""The encoder of an encoder-decoder, taken alone."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import locant
from locant.hf.encoder import encoder_of
from locant.hf.facts import limits
from locant.hf.plan import plan_of
from tests.hf_models import inputs, make, output


def test_other_models_are_taken_as_they_are():
    model = locant.swap(make("bert"), "alibi")
    with encoder_of(model) as part:
        assert part is model
    assert plan_of(model) is not None
    encoder = make("bart").encoder  # whose config is still that of an encoder-decoder
    with encoder_of(encoder) as part:
        assert part is encoder


def test_without_a_swap_it_is_the_plain_encoder():
    model = make("t5", AutoModelForSeq2SeqLM)
    with encoder_of(model) as part:
        assert part is model.encoder
        assert plan_of(part) is None


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_it_computes_what_the_encoder_does_in_the_whole_model(kind):
    model, given = locant.swap(make(kind), "tisa+learned:length=40"), inputs(kind)
    with torch.no_grad():
        whole = model(**given).encoder_last_hidden_state
    with encoder_of(model) as part:
        assert torch.equal(output(part, input_ids=given["input_ids"]), whole)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_it_has_the_encoders_part_of_the_plan(kind):
    model = locant.swap(make(kind), "tisa+learned:length=20")
    whole = plan_of(model)
    with encoder_of(model) as part:
        plan = plan_of(part)
        (stack,) = plan.stacks
        assert stack.path == ""
        assert [part.get_submodule(each.name).locant for each in stack.attentions] == whole.stacks[0].schemes
        assert (stack.embed, stack.width) == (whole.stacks[0].embed, 32)
        assert (plan.impl, plan.keep_native, plan.before) == (whole.impl, whole.keep_native, whole.before)
        inside = set(part.modules())
        assert plan.replaced == [each for each in whole.replaced if each.parent in inside]
        assert 0 < len(plan.replaced) < len(whole.replaced)
        assert str(locant.native(part)) == "swapped: learned:length=20+tisa"
        assert limits(part).positions == 20


def test_the_plan_of_the_whole_is_as_before_and_the_encoder_has_none():
    model = locant.swap(make("t5"), "tisa")
    paths = [(stack.path, stack.attentions[0].name) for stack in plan_of(model).stacks]
    with pytest.raises(KeyError), encoder_of(model):
        raise KeyError
    assert plan_of(model.encoder) is None
    assert [(stack.path, stack.attentions[0].name) for stack in plan_of(model).stacks] == paths
    locant.swap(model, "native")
