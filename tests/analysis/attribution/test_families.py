"""Conservation in every family, and with every scheme: relevance sums to the output."""

import pytest
import torch

import locant
from locant.analysis.attribution import attribute
from tests import cases, hf_models, seam_models

FAMILIES = {
    **{kind: (hf_models.make, kind) for kind in [*hf_models.CONFIGS, *hf_models.FOUND] if kind != "vit"},
    **{f"seam: {kind}": (seam_models.make, kind) for kind in seam_models.CONFIGS},
    **{f"more: {kind}": (seam_models.make_more, kind) for kind in seam_models.MORE},
}
NARROW = 1e-4


def inputs(model, length=9):
    generator = torch.Generator().manual_seed(1)
    given = {"input_ids": torch.randint(3, 60, (1, length), generator=generator)}
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(model.base_model, "decoder"):
        given["decoder_input_ids"] = torch.randint(3, 60, (1, 6), generator=generator)
    return given


def reading(model, given):
    """A number that all tokens of the output have a part in: a product with other numbers, that does not cancel."""

    def states(out):
        return out.logits[0] if "logits" in out else out.last_hidden_state[0]

    with torch.no_grad():
        plain = states(model(**given))
    direction = plain + plain.std() * torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    return lambda out: (states(out) * direction).sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_relevance_sums_to_the_output(name):
    make, kind = FAMILIES[name]
    model = make(kind)
    given = inputs(model)
    read = reading(model, given)
    with torch.no_grad():
        before = model(**given)
    found = attribute(model, given, output=read)
    total = float(found.relevance.sum() + found.position.sum()) + found.values + found.biases
    assert abs(total - found.value) <= NARROW * abs(found.value)
    assert found.value == pytest.approx(float(read(before)), rel=1e-6)
    assert found.layers
    assert float(found.relevance.abs().min()) > 0  # every token has a part in it
    with torch.no_grad():
        torch.testing.assert_close(read(model(**given)), read(before), rtol=0, atol=0)  # left as it was
    assert all(parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point()) or (
        kind in ("m2m_100", "marian", "xglm", "fsmt", "roformer", "roformer decoder", "nllb-moe", "ctrl")
    )  # sinusoids are not trained


ATTENTION = [spec for spec in cases.SPECS if not spec.startswith(("learned", "sinusoidal", "first", "nope"))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spec", ATTENTION)
def test_relevance_is_conserved_with_every_scheme(spec):
    model = hf_models.make("gpt2")
    locant.swap(model, spec)
    hf_models.spread(model)
    given = inputs(model)
    found = attribute(model, given, output=reading(model, given))
    assert found.error <= NARROW
    assert found.parts
    assert not bool(found.position.any())
    for flow in found.layers:  # GPT-2 is causal: relevance comes from earlier keys, r < 0, and never from later ones
        assert bool(flow.relevance[:, flow.offsets < 0].any())
        assert not bool(flow.relevance[:, flow.offsets > 0].any())
        assert not bool(flow.net[:, flow.offsets > 0].any())
    assert 0 < found.share < 1


@pytest.mark.parametrize("spec", ["learned:length=64", "sinusoidal", "sinusoidal+tisa"])
@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
@pytest.mark.filterwarnings("ignore")
def test_absolute_positions_have_relevance_of_their_own(spec, kind):
    model = hf_models.make(kind)
    locant.swap(model, spec)
    given = inputs(model)
    found = attribute(model, given, output=reading(model, given))
    assert float(found.position.abs().min()) > 0
    assert found.parts["table"] == pytest.approx(float(found.position.abs().sum()))
    assert ("bias" in found.parts) == ("tisa" in spec)
