"""`locant.fit`: reproduces the effect of position on attention, and reports it truthfully."""

import pytest
import torch

import locant
from locant.adaptation import fitting
from locant.adaptation.sample import Sampler
from tests import hf_models, words
from tests.adaptations import TOKENS, fitted, t5


@pytest.mark.parametrize("spec", ["t5", "toeplitz"])
def test_a_fit_recovers_a_bias(spec):
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
def test_a_fit_is_better_than_no_positions_in_every_family(kind, spec):
    model = hf_models.make(kind)
    found = fitted(model, spec)
    assert sum(head.fitted for head in found.heads) < sum(head.silenced for head in found.heads)
    assert found.explained > 0
    assert (kind in ("llama", "gpt_neox")) == ("first" not in str(locant.native(model)))  # only tables leave rows


@pytest.mark.parametrize(
    "spec", ["toeplitz:clip=16", "kerple", "alibi:slopes=learned", "fire", "huang2:clip=8", "tisa"]
)
def test_the_reported_divergence_of_a_head_is_true(spec):
    """The divergence of the first layer, computed again from transformers' own attention weights."""
    plain = hf_models.make("bert", attn_implementation="eager")
    model = hf_models.make("bert")
    found = fitted(model, spec, tokens=1024)
    rows = fitting._batches(hf_models.make("bert"), Sampler(TOKENS, words.text()), 32, 1024)
    total, queries = torch.zeros(4, dtype=torch.float64), 0
    with torch.no_grad():
        for ids in rows:
            p, q = (each(input_ids=ids, output_attentions=True).attentions[0].double() for each in (plain, model))
            total += (p * (p / q).log()).sum((0, 2, 3))
            queries += ids.numel()
    reported = [head.fitted for head in found.heads if head.layer == 1]
    torch.testing.assert_close(torch.tensor(reported).double(), total / queries, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spec", ["rope", "alibi", "nope"])
def test_a_scheme_without_parameters_gets_a_notice(spec):
    found = fitted(hf_models.make("bert"), spec)
    assert f"{spec} has no parameters" in str(found)


def test_a_fit_is_reproducible_and_draws_no_random_numbers():
    state = torch.random.get_rng_state()
    first, second = (fitted(hf_models.make("gpt2"), "tisa").heads for _ in range(2))
    assert first == second
    hf_models.make("gpt2")
    assert not torch.equal(state, torch.random.get_rng_state())  # make itself draws: the next check can fail
    model = hf_models.make("gpt2")
    state = torch.random.get_rng_state()
    fitted(model, "tisa")
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_model_is_restored_if_its_fit_fails(monkeypatch):
    model, ids = hf_models.make("bert"), words.rows()
    before = hf_models.output(model, input_ids=ids)

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(fitting, "set_initial_values", broken)
    with pytest.raises(RuntimeError, match="broken"):
        fitted(model, "tisa")
    assert torch.equal(hf_models.output(model, input_ids=ids), before)


def test_a_sum_starts_from_the_curve_of_its_part():
    assert fitted(t5(), "toeplitz+rope").explained < fitted(t5(), "toeplitz+nope").explained > 0.999


def test_modes_are_restored_if_a_fit_is_interrupted(monkeypatch):
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


def test_a_fit_worse_than_no_positions_is_reported_in_words():
    heads = [fitting.HeadFit(1, 1, silenced=1.0, fitted=2.5)]
    assert "%" not in fitting.Fit(None, "alibi", heads).summary
    assert "worse than using no positions" in fitting.Fit(None, "alibi", heads).summary


def test_layers_that_share_a_scheme_are_fitted_together():
    """Against an optimization of all layers by hand: no single table is better for the layers together."""
    model = hf_models.make("bert", num_hidden_layers=3)
    found = fitted(model, "t5:shared=layers")
    schemes = [scheme for stack in locant.native(model).stacks for scheme in stack.layers]
    assert len({id(scheme) for scheme in schemes}) == 1
    assert sum("locant.table" in name for name in model.state_dict()) == 1
    assert found.explained > 0
    shared = sum(head.fitted for head in found.heads)
    own = sum(head.fitted for head in fitted(hf_models.make("bert", num_hidden_layers=3), "t5").heads)
    assert own < shared  # three tables hold more than one
    best, table = _total_divergence(model), schemes[0].table
    for seed in range(4):  # a step in any direction from the minimum is worse
        step = torch.randn(table.shape, generator=torch.Generator().manual_seed(seed)) * 0.5
        for sign in (1, -1):
            with torch.no_grad():
                table += sign * step
            assert _total_divergence(model) > best
            with torch.no_grad():
                table -= sign * step


def _total_divergence(model):
    """KL of all layers and heads from the original, each layer on what it gets in the changed model."""
    plain = hf_models.make("bert", num_hidden_layers=3, attn_implementation="eager")
    rows, total = fitting._batches(plain, Sampler(TOKENS, words.text()), 32, 1024), 0.0
    with torch.no_grad():
        for ids in rows:
            both = (each(input_ids=ids, output_attentions=True).attentions for each in (plain, model))
            total += sum(float((p * (p / q).log()).sum()) for p, q in zip(*both, strict=True))
    return total


def test_layers_between_shared_ones_are_fitted_on_their_own():
    model = hf_models.make("bert", num_hidden_layers=4)
    found = fitted(model, "t5:shared=layers/tisa")
    first, second, third, fourth = locant.native(model).stacks[0].layers
    assert first is third
    assert second is not fourth
    assert [head.layer for head in found.heads[::4]] == [1, 2, 3, 4]
    assert found.explained > 0


def test_queries_are_fitted_beside_a_shared_scheme():
    model = hf_models.make("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    alone = fitted(hf_models.make("llama"), "t5:bidirectional=false,shared=layers").explained
    found = fitted(model, "t5:bidirectional=false,shared=layers", queries=True)
    assert found.explained > alone
    changed = {name for name, weight in model.state_dict().items() if name in before
               and not torch.equal(weight, before[name])}  # fmt: skip
    assert changed == {f"layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}
