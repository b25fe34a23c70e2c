"""Attention by distance: planted heads get their labels, numbers are those of the model's own attention."""

import pytest
import torch

import locant
from locant.analysis import distance
from tests import hf_models

L = 64


def planted(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean weights [L, L] of a head that does one thing, and which pairs are seen."""
    r = torch.arange(L) - torch.arange(L)[:, None]
    causal = kind in ("causal diffuse",)
    seen = r <= 0 if causal else torch.ones(L, L, dtype=torch.bool)
    score = {
        "previous token": 8.0 * (r == -1),
        "next token": 8.0 * (r == 1),
        "itself": 8.0 * (r == 0),
        "first-token sink": 8.0 * (torch.arange(L) == 0).expand(L, L),
        "local": -0.15 * r.abs().float(),
        "diffuse": torch.zeros(L, L),
        "causal diffuse": torch.zeros(L, L),
        "mixed": 4.0 * torch.randn(L, L),
    }[kind]
    return score.float().masked_fill(~seen, -torch.inf).softmax(-1).double(), seen


def entropy(weight, seen):
    rows = seen.sum(-1) >= 4
    return float((-torch.xlogy(weight, weight).sum(-1)[rows] / seen.sum(-1)[rows].double().log()).mean())


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("previous token", "previous token"),
        ("next token", "next token"),
        ("itself", "itself"),
        ("first-token sink", "first-token sink"),
        ("local", "local of width"),
        ("diffuse", "diffuse"),
        ("causal diffuse", "diffuse"),
        ("mixed", "mixed"),
    ],
)
def test_planted_heads_get_their_labels(kind, label):
    weight, seen = planted(kind)
    r = torch.arange(L) - torch.arange(L)[:, None]
    head = distance.describe(weight, seen, r, layer=1, head=0, entropy=entropy(weight, seen), positional=0.0)
    assert head.label.startswith(label)
    if kind == "local":
        assert 3 <= head.width <= 6  # half of exp(−0.15·|r|) lies within ln 2 / 0.15 = 4.6


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "roberta", "modernbert", "mpnet"])
def test_weights_are_the_model_s_own(kind):
    model = hf_models.make(kind).eval()
    ids = torch.randint(3, 60, (3, 20))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    layers = distance.by_distance(model, ids)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())  # left as it was
    if kind != "mpnet":  # it has no other attention
        model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    assert len(layers) == len(attentions)
    for layer, weights in zip(layers, attentions, strict=True):
        torch.testing.assert_close(layer.weights, weights.mean(0), rtol=1e-3, atol=1e-5)


def test_a_swapped_model_is_observed_as_it_is():
    model = locant.swap(hf_models.make("bert").eval(), "alibi")
    layers = distance.by_distance(model, torch.randint(3, 60, (4, 30)))
    assert str(locant.native(model)).startswith("swapped")
    for layer in layers:
        steepest = layer.logit[0]  # its slope is 1/4: 20 tokens are worth 5
        fall = float(steepest[layer.offsets == -1] - steepest[layer.offsets == -21])
        assert 3 < fall < 7


def test_the_positional_share_is_what_was_planted():
    """q = k = 0 leaves the bias alone: everything is position. With no scheme, nothing is."""
    shares = {}
    for spec in ("alibi", "nope"):
        torch.manual_seed(0)
        model = locant.swap(hf_models.make("bert").eval(), spec)
        for name, parameter in model.named_parameters():
            if "query" in name and spec == "alibi":
                parameter.data.zero_()
            elif "query" in name:
                parameter.data.mul_(20)
        layers = distance.by_distance(model, torch.randint(3, 60, (40, 24)))
        shares[spec] = torch.tensor([[head.positional for head in layer.heads] for layer in layers])
    assert shares["alibi"].min() > 0.999
    assert shares["nope"].max() < 0.1


def test_bad_input_is_named():
    model = hf_models.make("bert").eval()
    with pytest.raises(ValueError, match="at least 2 sequences"):
        distance.by_distance(model, torch.randint(3, 60, (1, 20)))
    next(model.encoder.layer[1].attention.self.query.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="contain NaN or infinity"):
        distance.by_distance(model, torch.randint(3, 60, (2, 20)))
    assert locant.hf.plan.plan_of(model) is None  # put back all the same


def test_a_model_in_training_is_left_in_training():
    model = hf_models.make("bert").train()
    model.encoder.layer[0].eval()
    before = torch.random.get_rng_state()
    distance.by_distance(model, torch.randint(3, 60, (2, 20), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert not model.encoder.layer[0].training
    assert model.encoder.layer[1].training


def test_a_head_has_two_labels_where_two_apply():
    """Half of the weight on the first token and half on the one before: a sink, and local beside it."""
    length = 32
    r = torch.arange(length)[None] - torch.arange(length)[:, None]
    visible = r <= 0

    def labels(weight, entropy=0.1):
        head = distance.describe(weight * visible, visible, r, layer=1, head=1, entropy=entropy, positional=0.5)
        return head.label, head.labels

    first = torch.zeros(length, length)
    first[:, 0] = 0.5
    both = ["first-token sink", "previous token"]
    assert labels(first + 0.45 * (r == -1)) == (", ".join(both), both)
    near = (r == -1) / 4 + (r == -2) / 4
    assert labels(first + near) == ("first-token sink, local of width 1", ["first-token sink", "local"])
    assert labels((r == -1).float()) == ("previous token", ["previous token"])  # which implies that it is local
    assert labels(torch.full((length, length), 1 / length), entropy=1.0) == ("diffuse", ["diffuse"])
