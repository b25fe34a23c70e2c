"""The rules on cases with a known answer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import locant
from locant.analysis.attribution import attribute
from locant.analysis.attribution.rules import Linearized, whole_activations
from tests import hf_models


def by_rules(function, *inputs):
    """The value of a function, the relevance of its inputs, and that of its constants."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    mode = Linearized("a test")
    with mode:
        value = function(*[leaf.clone() for leaf in leaves])
    gradients = torch.autograd.grad(value, [*leaves, *mode.constants], allow_unused=True)
    parts = [
        0.0 if g is None else float((g * x.detach()).sum())
        for x, g in zip([*leaves, *mode.constants], gradients, strict=True)
    ]
    return float(value.detach()), parts[: len(leaves)], sum(parts[len(leaves) :])


def close(a, b):
    """Equal up to the float32 in which transformers rotates."""
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


X = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
Y = torch.tensor([0.3, 0.7, -1.1, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "constants"),
    [
        (lambda x: F.gelu(x).sum(), 0.0),
        (lambda x: F.silu(x).sum(), 0.0),
        (lambda x: (x.tanh() * 3).sum(), 0.0),
        (lambda x: x.cos().sum(), 4.0),  # cos 0 = 1 in each of four entries
        (lambda x: (x + 2).sum(), 8.0),
        (lambda x: (1 - x).sum(), 4.0),
        (lambda x: F.linear(x, torch.ones(2, 4).double(), torch.tensor([1.0, 2.0]).double()).sum(), 3.0),
        (lambda x: F.layer_norm(x, (4,), Y, Y).sum(), float(Y.sum())),
        (lambda x: F.rms_norm(x, (4,), Y).sum(), 0.0),
        (lambda x: (x / x.norm()).sum(), 0.0),
        (lambda x: (F.softmax(x, -1) * x).sum(), 0.0),
        (lambda x: (x * x * x).sum(), 0.0),
        (lambda x: x.pow(2).sum(), 0.0),
        (lambda x: (x * x.square().mean().rsqrt()).sum(), 0.0),
        (lambda x: torch.where(x > 0, x, torch.full_like(x, 5.0)).sum(), 10.0),
        (lambda x: torch.cat([x, torch.ones(3).double()]).sum(), 3.0),
        (lambda x: x.masked_fill(x < 0, 7.0).sum(), 7.0),
        (lambda x: torch.baddbmm(torch.ones(1, 1, 1).double(), x.view(1, 1, 4), x.view(1, 4, 1)).sum(), 1.0),
        (lambda x: x.mul_(2).add_(1).sum(), 4.0),
        (lambda x: x.relu_().sum(), 0.0),
    ],
)
def test_the_relevance_of_input_and_constants_is_the_value(function, constants):
    value, (of_x,), of_constants = by_rules(function, X)
    assert value == pytest.approx(float(function(X.clone())))  # the rules change no value
    assert of_constants == pytest.approx(constants)
    assert of_x + of_constants == pytest.approx(value)


def test_both_factors_of_a_gated_product_get_half():
    value, (of_gate, of_signal), rest = by_rules(lambda x, y: (F.silu(x) * y).sum(), X, Y)
    assert of_gate == pytest.approx(value / 2)
    assert of_signal == pytest.approx(value / 2)
    assert rest == 0


def test_a_sigmoid_gate_is_held():
    value, (of_gate, of_signal), _ = by_rules(lambda x, y: (torch.sigmoid(x) * y).sum(), X, Y)
    assert of_gate == 0
    assert of_signal == pytest.approx(value)


def test_a_divisor_is_held():
    value, (of_numerator, of_divisor), _ = by_rules(lambda x, y: (x / y).sum(), X, Y)
    assert (of_numerator, of_divisor) == (pytest.approx(value), 0)


def test_a_function_without_a_rule_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"a test computes with lgamma, for which relevance has no rule"):
        by_rules(lambda x: torch.lgamma(x + 5).sum(), X)


class ByTanh(nn.Module):
    """GELU, written out."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))


def test_an_activation_module_is_one_rule_whatever_it_is_made_of():
    module, leaf = ByTanh(), X.clone().requires_grad_()
    mode = Linearized("a test")
    with whole_activations(mode, nn.Sequential(module)), mode:
        value = module(leaf).sum()
    assert mode.constants == []
    assert float((torch.autograd.grad(value, leaf)[0] * leaf.detach()).sum()) == pytest.approx(float(value.detach()))
    assert "forward" not in module.__dict__


def test_a_module_over_all_entries_is_not_an_activation():
    module = nn.Softmax(-1)
    mode, leaf = Linearized("a test"), X.clone().requires_grad_()
    with whole_activations(mode, nn.Sequential(module)), mode:
        assert not module(leaf).requires_grad  # held, not x · c


class Oracle:
    """A Llama of one layer, run forward with the constants of the true run and one token alone: no gradients."""

    def __init__(self, model, ids):
        self.model, self.layer = model, model.layers[0]
        self.x = model.embed_tokens.weight[ids[0]].detach().double()
        self.n1 = self.rms(self.x, self.layer.input_layernorm)
        self.w = self.weights(rotate=True)
        self.after = self.x + self.attention(self.x, self.w)
        self.n2 = self.rms(self.after, self.layer.post_attention_layernorm)
        h = self.after / self.n2 * self.layer.post_attention_layernorm.weight
        mlp = self.layer.mlp
        self.gate, self.up = h @ mlp.gate_proj.weight.mT, h @ mlp.up_proj.weight.mT
        out = self.after + (F.silu(self.gate) * self.up) @ mlp.down_proj.weight.mT
        self.n3 = self.rms(out, model.norm)
        self.out = out / self.n3 * model.norm.weight

    def rms(self, x, norm):
        return (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()

    def heads(self, x, weight):
        return (x @ weight.mT).view(len(x), 4, 8).transpose(0, 1)

    def weights(self, rotate):
        h = self.x / self.n1 * self.layer.input_layernorm.weight
        q, k = (self.heads(h, getattr(self.layer.self_attn, name).weight) for name in ("q_proj", "k_proj"))
        if rotate:
            angle = torch.arange(len(h)).double()[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
            q, k = (
                torch.cat([x[..., :4] * angle.cos() - x[..., 4:] * angle.sin(),
                           x[..., 4:] * angle.cos() + x[..., :4] * angle.sin()], -1)
                for x in (q, k)
            )  # fmt: skip
        logits = q @ k.mT / 8**0.5
        return logits.masked_fill(torch.ones(logits.shape[1:]).triu(1).bool(), -torch.inf).softmax(-1)

    def attention(self, x, w):
        v = self.heads(x / self.n1 * self.layer.input_layernorm.weight, self.layer.self_attn.v_proj.weight)
        return (w @ v).transpose(0, 1).flatten(1) @ self.layer.self_attn.o_proj.weight.mT

    def token(self, at, w):
        """The output with the embedding of one token, zeros elsewhere."""
        x = torch.zeros_like(self.x)
        x[at] = self.x[at]
        after = x + self.attention(x, w)
        mlp = self.layer.mlp
        h = after / self.n2 * self.layer.post_attention_layernorm.weight
        gate = (h @ mlp.gate_proj.weight.mT) * self.gate.sigmoid()  # silu(x) = x · sigmoid(x)
        up = h @ mlp.up_proj.weight.mT
        product = 0.5 * gate * self.up + 0.5 * F.silu(self.gate) * up
        return (after + product @ mlp.down_proj.weight.mT) / self.n3 * self.model.norm.weight


@torch.no_grad()
def test_relevance_content_and_flow_are_those_of_a_run_forward():
    model = hf_models.make("llama", num_hidden_layers=1, num_key_value_heads=4).double()
    ids = torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(0))
    oracle, direction = Oracle(model, ids), torch.randn(6, 32, dtype=torch.float64)
    close(oracle.out, model(ids).last_hidden_state[0])
    found = attribute(model, ids, output=lambda out: (out.last_hidden_state[0] * direction).sum())
    bare = oracle.weights(rotate=False)
    relevance = torch.stack([(oracle.token(at, oracle.w) * direction).sum() for at in range(6)])
    content = torch.stack([(oracle.token(at, bare) * direction).sum() for at in range(6)])
    close(found.relevance, relevance)
    close(found.content, content)
    close(found.through_position, relevance - content)
    assert found.share == pytest.approx(
        float((relevance - content).abs().sum() / ((relevance - content).abs().sum() + content.abs().sum()))
    )
    assert found.biases == pytest.approx(0.0)


@torch.no_grad()
def test_the_flow_of_a_last_layer_by_offset():
    """A model whose output is the attention of its only layer at the last token: R_ij is w_ij v_j·g, by hand."""
    model = hf_models.make("llama", num_hidden_layers=1, num_key_value_heads=4).double()
    model.layers[0].mlp.down_proj.weight.zero_()
    ids = torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(0))
    oracle, direction = Oracle(model, ids), torch.randn(32, dtype=torch.float64)
    (flow,) = attribute(model, ids, output=lambda out: out.last_hidden_state[0, -1] @ direction).layers
    layer = model.layers[0]
    v = oracle.heads(oracle.x / oracle.n1 * layer.input_layernorm.weight, layer.self_attn.v_proj.weight)
    g = ((direction * model.norm.weight / oracle.n3[-1]) @ layer.self_attn.o_proj.weight).view(4, 8)
    product = torch.einsum("hjd,hd->hj", v, g)
    bare = oracle.weights(rotate=False)
    last = flow.offsets <= 0
    assert flow.offsets.tolist() == list(range(-5, 6))
    close(flow.relevance[:, last], oracle.w[:, -1] * product)
    close(flow.content[:, last], (bare[:, -1] * product).abs())
    close(flow.net[:, last], (oracle.w - bare)[:, -1] * product)
    close(flow.kinds["rotation"], ((oracle.w - bare)[:, -1] * product).abs().sum(1))
    assert not bool(flow.relevance[:, ~last].any())


@torch.no_grad()
def test_a_bias_of_zero_carries_nothing():
    model = hf_models.make("bert")
    locant.swap(model, "tisa")
    for name, parameter in model.named_parameters():
        if name.endswith("amplitude"):
            parameter.zero_()
    ids = torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(0))
    found = attribute(
        model, ids, output=lambda out: out.last_hidden_state[0, 2].sum() * 3 + out.last_hidden_state[0, 1, 0]
    )
    assert found.share == pytest.approx(0.0, abs=1e-6)
    assert found.half() is None or max(found.by_offset()[2]) < 1e-6


@pytest.mark.parametrize("gate", [torch.nn.Sigmoid(), torch.nn.Softplus()])
def test_modules_of_gates_are_constants(gate):
    mode, leaf = Linearized("a test"), X.clone().requires_grad_()
    with whole_activations(mode, gate), mode:
        found = gate(leaf)
    assert not found.requires_grad
    torch.testing.assert_close(found, gate(X))
