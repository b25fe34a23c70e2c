"""Inkling, whose queries mix learned curves over the distance: sliding and global layers of different sizes."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.inkling.configuration_inkling import InklingTextConfig

import locant

TEMPERATURE = {"log_scaling_n_floor": 4, "log_scaling_alpha": 0.3}


def make(**more):
    torch.manual_seed(0)
    config = InklingTextConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        swa_num_attention_heads=6, swa_num_key_value_heads=3, swa_head_dim=4, sliding_window_size=5, d_rel=3,
        rel_extent=6, local_layer_ids=[0, 2], intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, max_position_embeddings=64, pad_token_id=0, **more,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens():
    return torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("more", [{}, TEMPERATURE], ids=["plain", "temperature"])
@torch.no_grad()
def test_its_own_scheme_changes_nothing(more):
    model, ids = make(**more), tokens()
    own = locant.native(model)
    assert own.kind == "relative logits"
    warm = ",alpha=0.3,n0=4" if more else ""
    assert [str(scheme) for scheme in own.stacks[0].layers] == [
        "inkling:extent=5,width=3", f"inkling:extent=6,width=3{warm}", "inkling:extent=5,width=3",
    ]  # fmt: skip
    swapped = locant.swap(copy.deepcopy(model), own)
    torch.testing.assert_close(swapped(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    got, want = (each(input_ids=ids, attention_mask=mask).logits[mask.bool()] for each in (swapped, model))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for how in ({}, {"num_beams": 3}):
        kept = [each.generate(ids, max_new_tokens=10, do_sample=False, **how) for each in (model, swapped)]
        assert torch.equal(*kept)
    locant.swap(swapped, "native")
    assert torch.equal(swapped(input_ids=ids).logits, model(input_ids=ids).logits)


def test_no_bias_for_every_pair_reaches_the_attention():
    from locant.hf.listening import observing

    model, seen = locant.swap(make(**TEMPERATURE), "nope"), []
    with observing(before=lambda call: seen.append(call.position_bias)):
        model(input_ids=tokens())
    assert seen == [None] * 3


@pytest.mark.parametrize("spec", ["tisa", "rope", "shaw:clip=4", "inkling:extent=8,width=2", "learned:length=64"])
@torch.no_grad()
def test_other_schemes_with_and_without_a_cache(spec):
    model, ids = make(**TEMPERATURE), tokens()
    before = model(input_ids=ids).logits
    locant.swap(model, spec)
    whole = model(input_ids=ids, use_cache=False).logits
    assert float((whole - before).abs().max()) > 1e-3
    first = model(input_ids=ids[:, :12], use_cache=True)
    last = model(input_ids=ids[:, 12:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(last, whole[:, 12:], atol=1e-5, rtol=1e-5)


def test_a_folder_opens_with_the_same_logits(tmp_path):
    model, ids = make(**TEMPERATURE), tokens()
    locant.swap(model, locant.native(model)).save_pretrained(tmp_path / "model")
    again = locant.load(tmp_path / "model").eval()
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.slow
def test_its_bank_of_curves_is_drawn_and_its_temperature_seen():
    """It takes position_ids and ignores them: positions are moved by padding, which its temperature counts."""
    found = locant.inspect(make(**TEMPERATURE))
    (inspection,) = found.inspections
    assert [where for where, _ in inspection.banks] == ["layer 1", "layer 2", "layer 3"]
    assert [(len(bank.curves), bank.r[0], bank.r[-1]) for _, bank in inspection.banks] == [
        (3, -4, 0), (3, -5, 0), (3, -4, 0),
    ]  # fmt: skip
    assert {row.how for row in inspection.shifts} == {"left padding"}
    assert max(row.relative for row in inspection.shifts if row.relative == row.relative) > 1e-3
    titles = [figure.title for section in found.report.sections for figure in section.figures]
    assert "Bank of curves" in titles
