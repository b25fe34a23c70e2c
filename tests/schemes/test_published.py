"""Schemes against published implementations: transformers 5, transformers 4.57 and the TISA code."""

import math

import pytest
import torch
from transformers import DebertaV2Config, LlamaConfig, XLNetConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotary_gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotary_llama
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import locant
from locant.schemes import Rope, Tisa
from locant.schemes.alibi import alibi_slopes
from tests import cases


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (64, 256), (8, 20), (320, 800)])
def test_t5_buckets(buckets, max_distance, bidirectional):
    r = torch.arange(-2000, 2001)
    scheme = locant.schemes.T5(buckets=buckets, max_distance=max_distance, bidirectional=bidirectional, n_heads=1)
    theirs = T5Attention._relative_position_bucket(r, bidirectional, buckets, max_distance)
    assert torch.equal(scheme.bucket(r), theirs)


@pytest.mark.parametrize("n_heads", range(1, 65))
def test_alibi_slopes(n_heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)[:, 0, 1]  # slope · 1
    torch.testing.assert_close(torch.tensor(alibi_slopes(n_heads)), theirs, rtol=1e-6, atol=0)


def test_alibi_in_causal_attention_equals_bloom():
    """Bloom adds slope · j; −slope · (i − j) differs from it by a constant per row, which softmax ignores."""
    q, k, v = cases.tensors(b=1)
    bloom = build_alibi_tensor(torch.ones(1, 9), 4, torch.float64)[None]
    causal = torch.ones(9, 9).tril().bool()
    weights = (q @ k.mT / math.sqrt(8) + bloom).masked_fill(~causal, -math.inf).softmax(-1)
    ours = locant.attend(q, k, v, locant.scheme("alibi", n_heads=4), causal=True)
    torch.testing.assert_close(ours, weights @ v, rtol=1e-6, atol=1e-6)  # their slopes are float32


ROPE = {
    "none": ({"rope_type": "default"}, "rope"),
    "linear": ({"rope_type": "linear", "factor": 4.0}, "rope:scaling=linear,factor=4"),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, "rope:scaling=dynamic,factor=3,original=64"),
    "yarn": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
        "rope:scaling=yarn,factor=8,original=256",
    ),
    "yarn, other ramp": (
        {
            "rope_type": "yarn",
            "factor": 2.5,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
        "rope:scaling=yarn,factor=2.5,original=4096,beta_fast=16,beta_slow=2",
    ),
    "yarn, long ramp": (  # with a theta of 10, it would end beyond the last coordinate
        {
            "rope_type": "yarn",
            "factor": 2.5,
            "original_max_position_embeddings": 4096,
            "beta_fast": 200.0,
            "beta_slow": 2.0,
        },
        "rope:scaling=yarn,factor=2.5,original=4096,beta_fast=200,beta_slow=2",
    ),
    "yarn, no ramp": (  # it begins where it ends
        {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 6},
        "rope:scaling=yarn,factor=2.5,original=6",
    ),
    "yarn, ramp between pairs": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "truncate": False},
        "rope:scaling=yarn,factor=8,original=256,truncate=false",
    ),
    "yarn, other attention factor": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
        "rope:scaling=yarn,factor=8,original=256,attention_factor=1.5",
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "rope:scaling=llama3,factor=8,original=128",
    ),
}


@pytest.mark.parametrize("length", [50, 64, 200])
@pytest.mark.parametrize("theta", [10.0, 10000.0, 500000.0])  # with 10, the ramp of YaRN ends at the last pair
@pytest.mark.parametrize("kind", ROPE)
def test_rope_scalings(kind, theta, length):
    parameters, spec = ROPE[kind]
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    if kind == "none":
        theirs, magnitude = theta ** -(torch.arange(0, 32, 2) / 32), 1.0
    else:
        theirs, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    separator = "," if ":" in spec else ":"
    scheme = locant.scheme(f"{spec}{separator}theta={theta}", head_dim=32)
    assert isinstance(scheme, Rope)
    ours = scheme.frequencies(torch.tensor([length])).flatten().float()
    torch.testing.assert_close(ours, theirs.float(), rtol=2e-6, atol=0)
    assert scheme.magnitude() == pytest.approx(magnitude)


def test_rope_half_layout_is_llama():
    q, k, _ = cases.tensors(lq=5, lk=5)
    pos = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 100, 2, 9]])
    angle = pos[..., None] * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle = torch.cat([angle, angle], dim=-1)
    theirs = rotary_llama(q, k, angle.cos(), angle.sin())
    for ours, their in zip(locant.scheme("rope", head_dim=8).rotate(q, k, pos, pos), theirs, strict=True):
        torch.testing.assert_close(ours, their)


def test_rope_interleaved_layout_is_gptj():
    q, k, _ = cases.tensors(lq=5, lk=5)
    pos = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 100, 2, 9]])
    angle = pos[..., None] * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    ours = locant.scheme("rope:layout=interleaved", head_dim=8).rotate(q, k, pos, pos)
    for x, our in zip((q, k), ours, strict=True):
        their = rotary_gptj(x.transpose(1, 2), angle.sin(), angle.cos()).transpose(1, 2)  # they keep heads last
        torch.testing.assert_close(our, their)


def test_xl_is_xlnet():
    """Their attention core, with their relative embedding and shift, on the same q, k, v; unequal lengths included."""
    config = XLNetConfig(d_model=32, n_head=4, d_inner=16, n_layer=1, vocab_size=7)
    layer = XLNetRelativeAttention(config).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    scheme = locant.scheme("xl", n_heads=4, head_dim=8, d_model=32).double()
    with torch.no_grad():
        scheme.project.copy_(layer.r.permute(1, 2, 0))
        scheme.content_bias.copy_(layer.r_w_bias)
        scheme.position_bias.copy_(layer.r_r_bias)
    model = XLNetModel(config)
    for lq, lk in ((9, 9), (4, 9)):
        q, k, v = cases.tensors(lq=lq, lk=lk)
        r = model.relative_positional_encoding(lq, lk, bsz=2).double()
        k_head_r = torch.einsum("ibh,hnd->ibnd", r, layer.r)
        q_, k_, v_ = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # [L, B, H, D]
        theirs = layer.rel_attn_core(q_, k_, v_, k_head_r).permute(1, 2, 0, 3)
        torch.testing.assert_close(locant.attend(q, k, v, scheme), theirs, rtol=1e-5, atol=1e-5)  # r is float32 there


@pytest.mark.parametrize("length", [9, 40])
def test_deberta_is_deberta_v2(length):
    config = DebertaV2Config(
        hidden_size=32,
        num_attention_heads=4,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        max_relative_positions=20,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    layer = DisentangledSelfAttention(config).double().eval()
    positions = torch.randn(16, 32, dtype=torch.float64)
    hidden = torch.randn(2, length, 32, dtype=torch.float64)
    theirs, _ = layer(hidden, torch.ones(2, 1, length, length, dtype=torch.bool), rel_embeddings=positions)

    def heads(x):
        return x.unflatten(-1, (4, 8)).transpose(-2, -3)

    scheme = locant.scheme("deberta:buckets=8,max_distance=20", n_heads=4, head_dim=8, d_model=32).double()
    with torch.no_grad():
        scheme.key_table.copy_(heads(layer.pos_key_proj(positions)))
        scheme.query_table.copy_(heads(layer.pos_query_proj(positions)))
    q, k, v = (heads(project(hidden)) for project in (layer.query_proj, layer.key_proj, layer.value_proj))
    ours = locant.attend(q, k, v, scheme).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # their scale is float32


@pytest.mark.parametrize(("kind", "spec"), [("relative_key", "shaw:values=false"), ("relative_key_query", "huang4")])
def test_relative_key_and_method_4_as_in_transformers_4(kind, spec):
    """A table of 2·max − 1 rows shared by the heads, row query − key + max − 1, inside 1/√D, no value term."""
    q, k, v = cases.tensors()
    largest = 9
    table = torch.randn(2 * largest - 1, 8, dtype=torch.float64)
    place = torch.arange(9)
    vectors = table[place.view(-1, 1) - place.view(1, -1) + largest - 1]  # [L, L, D]
    scores = q @ k.transpose(-1, -2) + torch.einsum("bhld,lrd->bhlr", q, vectors)
    if kind == "relative_key_query":
        scores = scores + torch.einsum("bhrd,lrd->bhlr", k, vectors)
    theirs = (scores / math.sqrt(8)).softmax(-1) @ v

    separator = "," if ":" in spec else ":"
    scheme = locant.scheme(f"{spec}{separator}clip={largest - 1}", n_heads=4, head_dim=8).double()
    with torch.no_grad():
        scheme.table.copy_(table.flip(0)[None])  # their rows are ordered by i − j, ours by j − i
    torch.testing.assert_close(locant.attend(q, k, v, scheme), theirs)


def test_tisa_conversion_from_and_to_the_published_code():
    """The published module evaluates its kernels at i − j − 1."""
    torch.manual_seed(3)
    state = {
        "kernel_offsets": 5 * torch.randn(3, 4, dtype=torch.float64),
        "kernel_amplitudes": torch.randn(3, 4, dtype=torch.float64),
        "kernel_sharpness": torch.randn(3, 4, dtype=torch.float64),
    }
    scheme = Tisa.from_published(state)
    bias = scheme.terms(torch.arange(-8, 9)).bias.detach()
    for h in range(4):
        for i in range(9):
            for j in range(9):
                theirs = sum(
                    a * math.exp(-abs(b) * (i - j - 1 - c) ** 2)
                    for a, b, c in zip(
                        state["kernel_amplitudes"][:, h].tolist(),
                        state["kernel_sharpness"][:, h].tolist(),
                        state["kernel_offsets"][:, h].tolist(),
                        strict=True,
                    )
                )
                assert float(bias[h, j - i + 8]) == pytest.approx(theirs, abs=1e-12)
    for name, value in scheme.to_published().items():
        torch.testing.assert_close(value, state[name])


def test_tisa_starts_as_the_authors_do():
    scheme = Tisa(kernels=2000, n_heads=12)
    means = {"amplitude": (0.1, 0.01), "sharpness": (0.1, 0.01), "offset": (0.0, 5.0)}
    for name, (mean, std) in means.items():
        value = getattr(scheme, name).detach()
        assert float(value.mean()) == pytest.approx(mean, abs=5 * std / math.sqrt(24000))
        assert float(value.std()) == pytest.approx(std, rel=0.03)
