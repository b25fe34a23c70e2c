"""A swapped model hands its hidden states to schemes that read them, those of cached tokens included."""

import copy

import pytest
import torch
import torch.nn.functional as F

import locant
from locant import Scheme
from locant.attention.sides import NotCausal, Remembered
from locant.hf import states
from locant.terms import Sides, Terms
from tests import hf_models


class Forgetting(Scheme):
    """logit += Σ of ln σ(w·x + b) over the tokens after the key, up to the query."""

    reads_queries = reads_keys = has_levels = causal_only = True
    pairwise, read_width = False, 1

    def __init__(self, *, n_heads: int, d_model: int) -> None:
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.weight = torch.nn.Parameter(0.3 * torch.randn(n_heads, d_model))

    def read(self, x):
        return F.logsigmoid(x.float() @ self.weight.float().mT).mT[..., None]

    def sides(self, tokens):
        total = tokens.read_k[..., 0].double().cumsum(-1)
        return Sides(query_level=total[..., total.shape[-1] - tokens.q.shape[2] :], key_level=-total)

    def parameter_count(self):
        return self.weight.numel()


class Mixing(Scheme):
    """logit += scale · (W x_i)·profile_r, for the last eight tokens."""

    reads_queries, read_width, reach = True, 3, 8

    def __init__(self, *, n_heads: int, d_model: int) -> None:
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.weight = torch.nn.Parameter(0.3 * torch.randn(n_heads, 3, d_model))
        self.profiles = torch.nn.Parameter(torch.randn(1, 8, 3))

    def read(self, x):
        return torch.einsum("hwd,bld->bhlw", self.weight.float(), x.float())

    def terms(self, r):
        near = ((r <= 0) & (r > -8))[:, None]
        return Terms(query_side=self.profiles.float()[:, (-r).clamp(0, 7)] * near)

    def sides(self, tokens):
        return Sides(query=tokens.read_q)

    def parameter_count(self):
        return self.weight.numel() + 24


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for scheme in (Forgetting, Mixing):
        monkeypatch.setitem(locant.SCHEMES, scheme.name(), scheme)


def tokens(batch=2, length=9):
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", ["forgetting", "mixing", "forgetting+tisa:kernels=2", "mixing+forgetting"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "jamba", "opt"])
@torch.no_grad()
def test_a_cache_changes_nothing(kind, spec):
    model = locant.swap(hf_models.make(kind).eval(), spec)
    ids = tokens()
    whole = model(input_ids=ids, use_cache=False).last_hidden_state
    cache, parts = None, []
    ends = (4, 5, 6, 7, 8, 9) if kind == "jamba" else (4, 5, 8, 9)  # after its first pass Mamba takes single tokens
    for first, end in zip((0, *ends), ends, strict=False):
        found = model(input_ids=ids[:, first:end], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        parts.append(found.last_hidden_state)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_of_a_cache_that_are_rearranged_or_cropped():
    model = locant.swap(hf_models.make("llama").eval(), "forgetting")
    ids = tokens(batch=3)
    rows = torch.tensor([2, 0, 0])
    cache = model(input_ids=ids[:, :7], use_cache=True).past_key_values
    cache.reorder_cache(rows)
    cache.crop(-1)
    got = model(input_ids=ids[:, 6:], past_key_values=cache).last_hidden_state
    mixed = torch.cat([ids[rows, :6], ids[:, 6:]], dim=1)
    want = model(input_ids=mixed, use_cache=False).last_hidden_state[:, 6:]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def evicted(cache, kept):
    """The cache with some of its keys alone, as eviction methods do it."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    return cache


@pytest.mark.parametrize(("spec", "given"), [("forgetting", False), ("fox", True), ("alibi", True)])
@torch.no_grad()
def test_keys_dropped_from_the_middle_of_a_cache_are_noticed(spec, given):
    model = locant.swap(hf_models.make("llama").eval(), spec)
    ids, where = tokens(), torch.arange(9).expand(2, -1)
    how = [{"position_ids": where[:, part]} if given else {} for part in (slice(0, 7), slice(7, 9))]
    cache = model(input_ids=ids[:, :7], use_cache=True, **how[0]).past_key_values
    with pytest.raises(RuntimeError, match="cache has 5 keys, and locant knows of 7: keys were dropped"):
        model(input_ids=ids[:, 7:], past_key_values=evicted(cache, [0, 1, 4, 5, 6]), **how[1])


@torch.no_grad()
def test_a_gap_after_keys_without_positions_warns():
    model = locant.swap(hf_models.make("llama").eval(), "alibi")
    ids = tokens()
    cache = evicted(model(input_ids=ids[:, :7], use_cache=True).past_key_values, [0, 1, 4, 5, 6])
    with pytest.warns(UserWarning, match=r"5 cached keys had no position_ids.*the next token is at 7"):
        model(input_ids=ids[:, 7:], past_key_values=cache, position_ids=torch.tensor([[7, 8]]))


@pytest.mark.parametrize("spec", ["fox", "alibi"])
@torch.no_grad()
def test_a_cache_that_was_cropped_or_reset_goes_on(spec):
    model = locant.swap(hf_models.make("llama").eval(), spec)
    ids, where = tokens(batch=1), torch.arange(9)[None] + 3
    whole = model(input_ids=ids, position_ids=where, use_cache=False).last_hidden_state
    cache = model(input_ids=ids[:, :7], position_ids=where[:, :7], use_cache=True).past_key_values
    cache.crop(-3)
    got = model(input_ids=ids[:, 4:], position_ids=where[:, 4:], past_key_values=cache).last_hidden_state
    torch.testing.assert_close(got, whole[:, 4:], atol=1e-5, rtol=1e-5)


def test_what_is_remembered_must_have_a_row_for_every_key():
    scheme = Forgetting(n_heads=2, d_model=4)
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    read = scheme.read(torch.randn(1, 5, 4))
    for wrong in (Remembered(read[:, :, :3], read), Remembered(read[:, :, :2], read[:, :, :3]), Remembered(read, None)):
        with pytest.raises(ValueError, match=r"needs what it read of the (keys|queries)"):
            locant.attend(q, k, v, scheme, causal=True, x=wrong)
    locant.attend(q, k, v, scheme, causal=True, x=Remembered(read[:, :, :3], read[:, :, :3]))


@torch.no_grad()
def test_left_padding_changes_nothing():
    model = locant.swap(hf_models.make("llama").eval(), "forgetting")
    ids = tokens()
    padded = torch.cat([torch.ones(2, 3, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    got = model(input_ids=padded, attention_mask=mask).last_hidden_state[:, 3:]
    torch.testing.assert_close(got, model(input_ids=ids).last_hidden_state, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_static_cache_and_one_of_another_model_are_refused():
    plain = hf_models.make("llama").eval()
    model = locant.swap(copy.deepcopy(plain), "forgetting")
    ids = tokens()
    foreign = plain(input_ids=ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match="holds 5 keys of 2 sequences, and forgetting has read 0 keys"):
        model(input_ids=ids[:, 5:], past_key_values=foreign)
    from transformers import StaticCache

    static = StaticCache(config=plain.config, max_cache_len=20)
    with pytest.raises(NotImplementedError, match="needs a dynamic cache"):
        model(input_ids=ids, past_key_values=static)


@pytest.mark.parametrize("kind", ["bert", "electra", "mpnet", "t5", "bart", "modernbert"])
def test_models_that_see_both_sides(kind):
    model = hf_models.make(kind).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotCausal, match="tokens see later ones"):
        locant.swap(model, "forgetting")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    locant.swap(model, "mixing")
    attention = next(module for module in model.modules() if isinstance(getattr(module, "locant", None), Mixing))
    given = {"decoder_input_ids": tokens()} if model.config.is_encoder_decoder else {}
    model(input_ids=tokens(), **given)[0].sum().backward()
    assert all(x.grad is not None and bool(x.grad.abs().sum() > 0) for x in attention.locant.parameters())
    locant.swap(model, "native")
    assert "forward" not in vars(attention)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradient_checkpointing_reads_the_same_states():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = locant.swap(hf_models.make("llama"), "forgetting").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=tokens(), use_cache=False)[0].pow(2).sum().backward()
        gradients.append([x.grad.clone() for name, x in model.named_parameters() if "locant" in name])
    assert len(gradients[0]) == 2
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_saved_model_reads_as_before(tmp_path):
    model = locant.swap(hf_models.make("llama").eval(), "forgetting")
    ids = tokens()
    want = model(input_ids=ids)[0]
    model.save_pretrained(tmp_path / "model")
    torch.testing.assert_close(locant.load(tmp_path / "model").eval()(input_ids=ids)[0], want)


def test_a_temperature_alone_is_proved_far_away():
    model = locant.swap(hf_models.make("llama").eval(), "logn:n0=512")
    assert str(locant.native(model).stacks[0].layers[0]) == "logn:n0=512"


class Reading(torch.nn.Module):
    """As an attention module: what it computes from is held while it runs."""

    def __init__(self, scheme):
        super().__init__()
        self.scheme = scheme

    def forward(self, hidden_states):
        x, _ = states.held(self, self.scheme, hidden_states.shape[1], hidden_states.shape[1])
        return 2 * x


def test_compiled_code_reads_the_states_of_its_own_call():
    module = Reading(Mixing(n_heads=1, d_model=4))
    with pytest.raises(RuntimeError, match="Reading holds no hidden states for mixing; swap the model again"):
        module(torch.ones(1, 3, 4))
    states.hold(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for value in (1.0, 2.0):
        x = torch.full((1, 3, 4), value)
        assert torch.equal(compiled(x), 2 * x)
        assert torch.equal(module(x), 2 * x)
    with pytest.raises(RuntimeError, match="mixing reads hidden states, and Reading received none"):
        type(module).forward(module, x)
    states.release(module)
    assert "forward" not in vars(module)
