"""The oracles of recent schemes agree with hand-computed cases, with each other and with published code."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests import frontier_oracles as oracles
from tests import oracles as older

B, H, L, D, W = 2, 3, 9, 6, 5
SCALE = D**-0.5
HERE = list(range(L))


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def qkv(length=L, width=D, heads=H):
    return [drawn(B, heads, length, width, seed=s) for s in (1, 2, 3)]


def close(x, y, tolerance=1e-12):
    assert np.shape(x) == np.shape(y)
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def differ(x, y):
    assert np.abs(np.asarray(x) - np.asarray(y)).max() > 1e-3


def plain(q, k, scale=SCALE):
    return scale * np.einsum("bhid,bhjd->bhij", q, k)


def moved(by):
    return [p + by for p in HERE]


def alibi(h, r):
    return -abs(r) / 2**h


# --- building blocks and attention -----------------------------------------------------------------------------------


def test_softplus_and_log_sigmoid_by_hand_and_far_out():
    assert oracles.softplus(0.0) == pytest.approx(math.log(2), abs=1e-15)
    assert oracles.softplus(math.log(3)) == pytest.approx(math.log(4), abs=1e-15)
    assert oracles.softplus(1000.0) == 1000.0
    assert oracles.log_sigmoid(-1000.0) == -1000.0
    assert oracles.log_sigmoid(-math.log(3)) == pytest.approx(math.log(0.25), abs=1e-15)


def test_attention_is_softmax_over_the_visible_keys():
    q, k, v = qkv()
    out, weights = oracles.attention(plain(q, k), v, oracles.causal(HERE, HERE))
    masked = torch.tensor(plain(q, k)).masked_fill(~torch.ones(L, L).tril().bool(), -math.inf)
    close(weights, masked.softmax(-1).numpy())
    close(out, (masked.softmax(-1) @ torch.tensor(v)).numpy())


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v = qkv()
    out, weights = oracles.attention(plain(q, k), v, np.zeros((L, L), dtype=bool))
    assert not weights.any()
    assert not out.any()


def test_attention_survives_logits_beyond_the_range_of_exp():
    far = np.array([80000.0, 80000.0 + math.log(3), -80000.0]).reshape(1, 1, 1, 3)
    _, weights = oracles.attention(far, np.zeros((1, 1, 3, 1)))
    close(weights[0, 0, 0], [0.25, 0.75, 0], 1e-10)


def test_projected_is_a_matrix_product_per_head():
    x, weight = drawn(B, L, W), drawn(H, 4, W)
    close(oracles.projected(x, weight), np.einsum("hpw,blw->bhlp", weight, x))


def test_rotations_are_those_of_the_older_oracles():
    x, freqs = drawn(D), oracles.frequencies(D)
    assert freqs == older.frequencies(10000.0, D)
    for position in (-3, 0, 7):
        close(oracles.rotated(x, position, freqs), older.rotated(x, position, freqs, "half"))


@pytest.mark.parametrize(("q_pos", "k_pos"), [(HERE[:-1], HERE), (HERE, HERE[:-1])])
def test_a_wrong_number_of_positions_is_refused(q_pos, k_pos):
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="pass one for each"):
        oracles.logits(q, k, q_pos, k_pos, SCALE)


# --- 1. the general form ---------------------------------------------------------------------------------------------


def test_the_general_form_by_hand():
    one = np.ones((1, 1, 1, 1))
    parts = {
        "rotate": lambda h, x, position: x * position,  # 2 and 5
        "gain": lambda h, r: r,  # 3, so the content is 30
        "p": 7 * one,
        "a": lambda h, r: np.array([10 * r]),  # 210
        "t": 11 * one,
        "c": lambda h, r: np.array([100.0 + r]),  # 1133
        "s": lambda h, r: 1000 * r,  # 3000
        "b": lambda h, r: 0.5 * r,  # 1.5
        "d": 0.25 * one[0],
        "tau": lambda i: 1 + i,  # 3
    }
    expected = 3 * (0.1 * (30 + 210 + 1133 + 3000) + 1.5 + 0.25)
    assert oracles.logits(one, one, [2], [5], 0.1, **parts)[0, 0, 0, 0] == pytest.approx(expected, abs=1e-9)


def test_the_general_form_without_parts_is_plain_attention():
    q, k, _ = qkv()
    close(oracles.logits(q, k, HERE, HERE, SCALE), plain(q, k))


def test_a_gain_may_be_a_number_a_diagonal_or_a_matrix():
    q, k, _ = qkv()
    diagonal, matrix = drawn(D), drawn(D, D)
    form = partial(oracles.logits, q, k, HERE, HERE, SCALE)
    close(form(gain=lambda h, r: 2.0), 2 * plain(q, k))
    close(form(gain=lambda h, r: np.full(D, 2.0)), 2 * plain(q, k))
    close(form(gain=lambda h, r: diagonal), plain(q * diagonal, k))
    close(form(gain=lambda h, r: matrix), plain(q, np.einsum("de,bhje->bhjd", matrix, k)))


def test_rope_is_the_general_form_and_the_older_oracle():
    q, k, v = qkv()
    freqs = oracles.frequencies(D)
    close(
        oracles.rope(q, k, HERE, HERE, SCALE),
        oracles.logits(q, k, HERE, HERE, SCALE, rotate=lambda h, x, i: oracles.rotated(x, i, freqs)),
    )
    options = {"theta": 10000.0, "scaling": "none", "factor": 1.0, "attention_factor": None}
    options |= {"partial": 1.0, "first": 0, "layout": "half"}
    positions, everything = np.array([HERE] * B), np.ones((B, H, L, L), dtype=bool)
    out, weights = older.attention("rope", q, k, v, positions, positions, everything, SCALE, {}, options)
    for mine, other in zip(oracles.attention(oracles.rope(q, k, HERE, HERE, SCALE), v), (out, weights), strict=True):
        close(mine, other)


@pytest.mark.parametrize("part", [{"p": np.ones((B, H, L, 2))}, {"c": lambda h, r: np.ones(2)}])
def test_half_of_a_side_product_is_refused(part):
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="pass both or neither"):
        oracles.logits(q, k, HERE, HERE, SCALE, **part)


# --- temperatures ----------------------------------------------------------------------------------------------------


def test_temperatures_by_hand():
    assert oracles.logn_tau(0, 512) == 1
    assert oracles.logn_tau(511, 512) == 1
    assert oracles.logn_tau(512**2 - 1, 512) == pytest.approx(2, abs=1e-12)
    assert oracles.length_tau(512, 512) == 1
    assert oracles.length_tau(512**2, 512) == pytest.approx(2, abs=1e-12)
    assert oracles.yarn_tau(1.0) == 1
    assert oracles.yarn_tau(math.exp(10)) == pytest.approx(4, abs=1e-12)
    assert oracles.inkling_tau(127, 0.1, 128) == 1
    assert oracles.inkling_tau(255, 0.1, 128) == pytest.approx(1 + 0.1 * math.log(2), abs=1e-12)


def test_logn_is_qwens_list():
    """ln(n) / ln(n0) above n0 tokens and 1 up to there, n counted from 1."""
    published = [math.log(n, 8) if n > 8 else 1 for n in range(1, 100)]
    close([oracles.logn_tau(i, 8) for i in range(99)], published)


def test_logn_multiplies_the_whole_logit():
    q, k, _ = qkv()
    tau = np.array([oracles.logn_tau(i, 4) for i in HERE])
    close(oracles.logn(q, k, HERE, HERE, SCALE, n0=4), tau[:, None] * plain(q, k))
    close(
        oracles.logn(q, k, HERE, HERE, SCALE, n0=4),
        oracles.logits(q, k, HERE, HERE, SCALE, tau=lambda i: oracles.logn_tau(i, 4)),
    )
    close(oracles.logn(q, k, HERE, HERE, SCALE, n0=L), plain(q, k))


# --- 2. Inkling ------------------------------------------------------------------------------------------------------


def test_inkling_by_hand():
    q, k = np.array([2.0, 3.0, 1.0]).reshape(1, 1, 3, 1), np.array([1.0, -1.0, 4.0]).reshape(1, 1, 3, 1)
    x = np.array([10.0, 20.0, 30.0]).reshape(1, 3, 1)
    form = partial(
        oracles.inkling, q, k, x, [0, 1, 2], [0, 1, 2], relative=np.ones((1, 1, 1)), profiles=np.array([[0.5, 0.25]])
    )
    rows = np.array([[2 + 5, -2, 8], [3 + 5, -3 + 10, 12], [1 + 0, -1 + 7.5, 4 + 15]])
    close(form()[0, 0], rows)
    close(form(scale=0.0)[0, 0], rows - np.array([[2, -2, 8], [3, -3, 12], [1, -1, 4]]))
    tau = np.array([1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)])
    close(form(alpha=0.5, n0=1)[0, 0], tau[:, None] * rows)


def inkling_parameters(extent=4, width=2):
    return {"relative": drawn(H, width, W, seed=5), "profiles": drawn(width, extent, seed=6)}


def test_inkling_is_the_general_form_with_profiles_divided_by_the_scale():
    q, k, _ = qkv()
    x, parameters = drawn(B, L, W), inkling_parameters()
    profiles = parameters["profiles"]

    def a(h, r):
        return profiles[:, -r] * D if 0 <= -r < 4 else np.zeros(2)

    close(
        oracles.inkling(q, k, x, HERE, HERE, **parameters, alpha=0.3, n0=2),
        oracles.logits(
            q,
            k,
            HERE,
            HERE,
            1 / D,
            p=oracles.projected(x, parameters["relative"]),
            a=a,
            tau=lambda i: oracles.inkling_tau(i, 0.3, 2),
        ),
    )


def test_inkling_depends_on_positions_only_through_the_distance_and_tau():
    q, k, _ = qkv()
    form = partial(oracles.inkling, q, k, drawn(B, L, W), **inkling_parameters())
    close(form(HERE, HERE), form(moved(5), moved(5)))
    differ(form(HERE, HERE), form(moved(1), HERE))
    differ(form(HERE, HERE, alpha=0.3, n0=2), form(moved(5), moved(5), alpha=0.3, n0=2))


def test_inkling_is_transformers_relative_logits():
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

    extent, width = 4, 2
    parameters = inkling_parameters(extent, width)
    module = InklingRelativeLogits(width, extent).double()
    x, zero = drawn(B, L, W), np.zeros((B, H, L, D))
    states = torch.tensor(oracles.projected(x, parameters["relative"])).transpose(1, 2)
    with torch.no_grad():
        module.proj.copy_(torch.tensor(parameters["profiles"]))
        for q_pos, k_pos in ((HERE, HERE), (moved(3), HERE), (moved(-2), HERE)):
            theirs = module(states, torch.tensor(q_pos), torch.tensor(k_pos)).numpy()
            close(oracles.inkling(zero, zero, x, q_pos, k_pos, **parameters), theirs)


def inkling_layer(n_floor):
    """Tiny global attention layer of transformers' Inkling, in float32 as its norms and temperature are."""
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingAttention

    config = InklingTextConfig(
        hidden_size=W,
        num_hidden_layers=1,
        num_attention_heads=H,
        num_key_value_heads=H,
        head_dim=D,
        d_rel=2,
        rel_extent=4,
        layer_types=["hybrid"],
        mlp_layer_types=["dense"],
        log_scaling_n_floor=n_floor,
        log_scaling_alpha=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = InklingAttention(config, 0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("n_floor", [None, 2])
@torch.no_grad()
def test_inkling_is_transformers_attention_with_its_norms_scale_and_temperature(n_floor):
    layer = inkling_layer(n_floor)
    x = torch.tensor(drawn(B, L, W), dtype=torch.float32)
    mask = torch.full((L, L), -math.inf).triu(1)[None, None]
    theirs_out, theirs_weights = layer(x, mask)

    def heads(y):
        return y.view(B, L, H, D).transpose(1, 2).double().numpy()

    def number(tensor):
        return tensor.double().numpy()

    eps = layer.config.rms_norm_eps
    q = oracles.rms_normed(heads(layer.q_proj(x)), number(layer.q_norm.weight), eps)
    k = oracles.rms_normed(heads(layer.k_sconv(layer.k_proj(x))), number(layer.k_norm.weight), eps)
    v = heads(layer.v_sconv(layer.v_proj(x)))
    mine = oracles.inkling(
        q,
        k,
        number(x),
        HERE,
        HERE,
        relative=number(layer.r_proj.weight).reshape(H, 2, W),
        profiles=number(layer.rel_logits_proj.proj),
        alpha=None if n_floor is None else 0.3,
        n0=n_floor,
    )
    out, weights = oracles.attention(mine, v, oracles.causal(HERE, HERE))
    close(weights, theirs_weights.numpy(), 1e-5)
    out = out.transpose(0, 2, 1, 3).reshape(B, L, H * D) @ number(layer.o_proj.weight).T
    close(out, theirs_out.numpy(), 1e-4)


def test_inkling_needs_both_numbers_of_its_temperature():
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="pass both or neither"):
        oracles.inkling(q, k, drawn(B, L, W), HERE, HERE, **inkling_parameters(), alpha=0.1)


# --- 3. the forgetting transformer -----------------------------------------------------------------------------------


def gates():
    return oracles.fox_log_gates(drawn(B, L, W), drawn(H, W), drawn(H))


def three_gates():
    """ln of 0.5, 0.25, 0.8, so that exp(c) is 0.5, 0.125, 0.1."""
    return np.log([0.5, 0.25, 0.8]).reshape(1, 1, 3), np.zeros((1, 1, 3, 1))


def test_fox_gates_by_hand():
    x, weight, bias = np.full((1, 1, 1), 2.0), np.ones((1, 1)), np.array([-2 - math.log(3)])
    close(oracles.fox_log_gates(x, weight, bias), [[[math.log(0.25)]]])


def test_fox_by_hand():
    log_gates, zero = three_gates()
    here = [0, 1, 2]
    form = oracles.fox(zero, zero, log_gates, here, here, 1.0)
    _, weights = oracles.attention(form, zero, oracles.causal(here, here))
    close(weights[0, 0], [[1, 0, 0], [0.2, 0.8, 0], [0.1, 0.4, 0.5]])


def test_fox_two_sided_by_hand():
    log_gates, zero = three_gates()
    form = oracles.fox_two_sided(zero, zero, log_gates, [0, 1, 2], [0, 1, 2], 1.0)
    close(np.exp(form[0, 0]), [[1, 0.25, 0.2], [0.25, 1, 0.8], [0.2, 0.8, 1]])


def test_both_forms_of_fox_have_the_same_weights():
    q, k, v = qkv()
    visible = oracles.causal(HERE, HERE)
    difference = oracles.fox(q, k, gates(), HERE, HERE, SCALE)
    by_key = oracles.fox_by_key(q, k, gates(), HERE, HERE, SCALE)
    differ(difference, by_key)
    for x, y in zip(oracles.attention(difference, v, visible), oracles.attention(by_key, v, visible), strict=True):
        close(x, y)


def test_fox_by_key_is_the_general_form():
    q, k, _ = qkv()
    d = -np.cumsum(gates(), axis=2)
    close(
        oracles.fox_by_key(q, k, gates(), HERE, HERE, SCALE),
        oracles.logits(q, k, HERE, HERE, SCALE, d=d),
    )


def test_fox_with_open_gates_is_plain_attention():
    q, k, _ = qkv()
    open_gates = np.zeros((B, H, L))
    for form in (oracles.fox, oracles.fox_by_key, oracles.fox_two_sided):
        close(form(q, k, open_gates, HERE, HERE, SCALE), plain(q, k))


def test_fox_with_constant_gates_is_alibi():
    q, k, _ = qkv()
    slope = 0.3
    constant = np.full((B, H, L), -slope)
    distance = np.abs(np.subtract.outer(HERE, HERE))
    close(oracles.fox_two_sided(q, k, constant, HERE, HERE, SCALE), plain(q, k) - slope * distance)


def test_fox_decays_by_the_gates_between_and_that_of_the_later_token():
    log_gates, zero = gates(), np.zeros((B, H, L, D))
    one_sided = oracles.fox(zero, zero, log_gates, HERE, HERE, SCALE)
    two_sided = oracles.fox_two_sided(zero, zero, log_gates, HERE, HERE, SCALE)
    for i in HERE:
        for j in HERE:
            expected = log_gates[:, :, min(i, j) + 1 : max(i, j) + 1].sum(2)
            close(two_sided[:, :, i, j], expected)
            if j <= i:
                close(one_sided[:, :, i, j], expected)


def test_two_sided_fox_under_the_causal_mask_is_fox_and_is_symmetric():
    q, k, v = qkv()
    visible = oracles.causal(HERE, HERE)
    one_sided = oracles.fox(q, k, gates(), HERE, HERE, SCALE)
    two_sided = oracles.fox_two_sided(q, k, gates(), HERE, HERE, SCALE)
    for x, y in zip(oracles.attention(one_sided, v, visible), oracles.attention(two_sided, v, visible), strict=True):
        close(x, y)
    decay = two_sided - plain(q, k)
    close(decay, decay.swapaxes(2, 3))
    assert (decay <= 1e-12).all()


def test_two_sided_fox_changes_when_the_text_is_reversed():
    log_gates, zero = gates(), np.zeros((B, H, L, D))
    forward = oracles.fox_two_sided(zero, zero, log_gates, HERE, HERE, SCALE)
    backward = oracles.fox_two_sided(zero, zero, log_gates[:, :, ::-1], HERE, HERE, SCALE)
    differ(forward, backward[:, :, ::-1, ::-1])


def test_two_sided_fox_is_the_general_form_with_side_vectors_of_width_one():
    q, k, _ = qkv()
    c = np.cumsum(gates(), axis=2)[..., None]
    close(
        oracles.fox_two_sided(q, k, gates(), HERE, HERE, SCALE),
        oracles.logits(
            q,
            k,
            HERE,
            HERE,
            SCALE,
            p=c,
            a=lambda h, r: np.array([-oracles.sign(r) / SCALE]),
            t=c,
            c=lambda h, r: np.array([oracles.sign(r) / SCALE]),
        ),
    )


def test_fox_of_the_last_queries_is_the_last_rows():
    q, k, _ = qkv()
    for form in (oracles.fox, oracles.fox_by_key, oracles.fox_two_sided):
        whole = form(q, k, gates(), HERE, HERE, SCALE)
        close(form(q[:, :, -2:], k, gates(), HERE[-2:], HERE, SCALE), whole[:, :, -2:])


# --- 4. GRAPE, PoPE, gains, FoPE, DAPE -------------------------------------------------------------------------------


def grape_parameters():
    return {
        "omega": np.abs(drawn(H, seed=7)),
        "query_gate": drawn(H, D, seed=8),
        "key_gate": drawn(H, D, seed=9),
    }


def test_grape_by_hand():
    zero, gate = np.zeros((1, 1, 3, 4)), np.ones((1, 4))
    form = partial(oracles.grape_a_qk, zero, zero, [0, 1, 2], [0, 1, 2], 1.0)
    parameters = {"omega": np.array([0.5]), "query_gate": gate, "key_gate": gate}
    r = np.array([[0, 1, 2], [-1, 0, 1], [-2, -1, 0]])
    close(form(**parameters)[0, 0], r * math.log(2))
    close(form(**parameters, two_sided=True)[0, 0], -np.abs(r) * math.log(2))


def test_the_gates_of_grape_read_the_query_and_the_key():
    """v.q = 2 ln 3 and u.k = 2 ln 7 at D = 4: softplus of ln 3 and ln 7 is ln 4 and ln 8."""
    q, k = np.zeros((1, 1, 1, 4)), np.zeros((1, 1, 1, 4))
    q[..., 0], k[..., 1] = 2 * math.log(3), 2 * math.log(7)
    parameters = {"omega": np.array([3.0]), "query_gate": np.eye(4)[:1], "key_gate": np.eye(4)[1:2]}
    close(oracles.grape_a_qk(q, k, [6], [4], 1.0, **parameters), [[[[-2 * 3 * math.log(32)]]]])


def test_grape_is_the_general_form_with_side_vectors_of_width_one():
    q, k, _ = qkv()
    parameters = grape_parameters()
    softplus, omega = np.vectorize(oracles.softplus), parameters["omega"]

    def line(h, r):
        return np.array([r * omega[h] / SCALE])

    close(
        oracles.grape_a_qk(q, k, HERE, HERE, SCALE, **parameters),
        oracles.logits(
            q,
            k,
            HERE,
            HERE,
            SCALE,
            p=softplus(np.einsum("hd,bhld->bhl", parameters["query_gate"], q) / math.sqrt(D))[..., None],
            a=line,
            t=softplus(np.einsum("hd,bhld->bhl", parameters["key_gate"], k) / math.sqrt(D))[..., None],
            c=line,
        ),
    )


def test_grape_is_shift_invariant_and_both_forms_agree_to_the_left():
    q, k, _ = qkv()
    form = partial(oracles.grape_a_qk, q, k, scale=SCALE, **grape_parameters())
    close(form(q_pos=HERE, k_pos=HERE), form(q_pos=moved(7), k_pos=moved(7)))
    left = np.tril(np.ones((L, L), dtype=bool))
    signed, two_sided = form(q_pos=HERE, k_pos=HERE), form(q_pos=HERE, k_pos=HERE, two_sided=True)
    close(signed[:, :, left], two_sided[:, :, left])
    differ(signed, two_sided)


def test_pope_by_hand():
    zero = np.zeros((1, 1, 3, 1))
    form = oracles.pope(zero, zero, [0, 1, 2], [0, 1, 2], 0.5, delta=np.array([[-0.25]]))
    r = np.array([[0, 1, 2], [-1, 0, 1], [-2, -1, 0]])
    close(form[0, 0], 0.5 * math.log(2) ** 2 * np.cos(r - 0.25))


def test_pope_is_a_product_of_polar_vectors():
    """As published: q has the phase i theta_c, k the phase j theta_c + delta_c, and cos and sin are stacked."""
    q, k, _ = qkv()
    delta = -np.abs(drawn(H, D))
    softplus, theta = np.vectorize(oracles.softplus), 10000.0 ** (-np.arange(D) / D)
    angle = np.outer(HERE, theta)
    key_angle = angle + delta[:, None]
    polar_q = softplus(q)[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    polar_k = softplus(k)[..., None] * np.stack([np.cos(key_angle), np.sin(key_angle)], -1)
    expected = SCALE * np.einsum("bhidc,bhjdc->bhij", polar_q, polar_k)
    close(oracles.pope(q, k, HERE, HERE, SCALE, delta=delta), expected)


def test_pope_is_shift_invariant():
    q, k, _ = qkv()
    form = partial(oracles.pope, q, k, scale=SCALE, delta=-np.abs(drawn(H, D)))
    close(form(q_pos=HERE, k_pos=HERE), form(q_pos=moved(100), k_pos=moved(100)), 1e-11)
    differ(form(q_pos=HERE, k_pos=HERE), form(q_pos=moved(1), k_pos=HERE))


def test_pope_clamps_its_phase():
    q, k, _ = qkv()
    form = partial(oracles.pope, q, k, HERE, HERE, SCALE)
    close(form(delta=np.full((H, D), 0.7)), form(delta=np.zeros((H, D))))
    close(form(delta=np.full((H, D), -9.0)), form(delta=np.full((H, D), -2 * math.pi)))
    differ(form(delta=np.full((H, D), -1.0)), form(delta=np.zeros((H, D))))


def test_parametric_gain_by_hand():
    q, k = np.full((1, 1, 1, 1), 2.0), np.ones((1, 1, 4, 1))
    form = oracles.parametric_gain(q, k, [0], [0, -1, 2, 3], 0.5, a=np.array([math.log(2)]), p=np.array([1.0]))
    close(form[0, 0, 0], [1, 1 / 2, 1 / 4, 1 / 8])
    form = oracles.parametric_gain(q, k, [0], [0, -1, 2, 3], 0.5, a=np.array([math.log(2)]), p=np.array([2.0]))
    close(form[0, 0, 0], [1, 1 / 2, 1 / 16, 1 / 512])


def test_parametric_gain_is_the_general_form_and_plain_for_a_0():
    q, k, _ = qkv()
    a, p = np.abs(drawn(H)), 0.5 + np.abs(drawn(H, 1))[:, 0]
    close(
        oracles.parametric_gain(q, k, HERE, HERE, SCALE, a=a, p=p),
        oracles.logits(q, k, HERE, HERE, SCALE, gain=lambda h, r: math.exp(-a[h] * abs(r) ** p[h])),
    )
    close(oracles.parametric_gain(q, k, HERE, HERE, SCALE, a=np.zeros(H), p=p), plain(q, k))


def test_a_gain_that_grows_is_refused():
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="expected a >= 0 and p > 0"):
        oracles.parametric_gain(q, k, HERE, HERE, SCALE, a=np.full(H, -0.1), p=np.ones(H))


def identity(n_freqs, n_pairs):
    return np.array([np.eye(n_freqs)[:, :n_pairs]] * H)


def test_fope_with_identity_coefficients_is_rope():
    q, k, _ = qkv()
    one = identity(D // 2, D // 2)
    close(
        oracles.fope(q, k, HERE, HERE, SCALE, freqs=oracles.frequencies(D), cos_coef=one, sin_coef=one),
        oracles.rope(q, k, HERE, HERE, SCALE),
    )


def test_fope_by_hand():
    """One pair: cos' = 2 cos p + 3 cos 2p and sin' = 5 sin p + 7 sin 2p, at x = (1, 0) and (0, 1)."""
    cos_coef, sin_coef = np.array([[2.0], [3.0]]), np.array([[5.0], [7.0]])
    cos, sin = 2 * math.cos(0.4) + 3 * math.cos(0.8), 5 * math.sin(0.4) + 7 * math.sin(0.8)
    for x, expected in (((1, 0), (cos, sin)), ((0, 1), (-sin, cos))):
        close(oracles.fope_turned(np.array(x), 0.4, [1.0, 2.0], cos_coef, sin_coef), expected)


def test_fope_is_transformers_style_rotation_with_mixed_cosines():
    """As published: cosines and sines are mixed per head, padded with 1, repeated, and applied by rotate_half."""
    q, k, _ = qkv()
    freqs, kept = [1.0, 0.3, 0.2], 2
    cos_coef, sin_coef = drawn(H, 3, kept, seed=1), drawn(H, 3, kept, seed=2)

    def turned(x):
        angle = np.outer(HERE, freqs)
        cos = np.einsum("lf,hft->hlt", np.cos(angle), cos_coef)
        sin = np.einsum("lf,hft->hlt", np.sin(angle), sin_coef)
        pad = ((0, 0), (0, 0), (0, D // 2 - kept))
        cos, sin = (np.tile(np.pad(y, pad, constant_values=1), 2) for y in (cos, sin))
        return x * cos + np.concatenate([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    close(
        oracles.fope(q, k, HERE, HERE, SCALE, freqs=freqs, cos_coef=cos_coef, sin_coef=sin_coef),
        plain(turned(q), turned(k)),
    )


def test_the_pairs_that_fope_leaves_out_count_twice_as_published_and_once_at_rest():
    q, k, _ = qkv()
    none = np.zeros((H, 0, 0))
    form = partial(oracles.fope, q, k, HERE, HERE, SCALE, freqs=[], cos_coef=none, sin_coef=none)
    close(form(), 2 * plain(q, k))
    close(form(rest=(1.0, 0.0)), plain(q, k))


def test_fope_is_not_shift_invariant():
    q, k, _ = qkv()
    coef = identity(D // 2, D // 2) + 0.3 * drawn(H, D // 2, D // 2)
    form = partial(oracles.fope, q, k, scale=SCALE, freqs=oracles.frequencies(D), cos_coef=coef, sin_coef=coef)
    differ(form(q_pos=HERE, k_pos=HERE), form(q_pos=moved(3), k_pos=moved(3)))


def test_dape_by_hand():
    """Two heads with s = (1, -2) and b = (-1, -3); hidden unit 0 sums s, unit 1 sums b."""
    q, k = np.ones((1, 2, 1, 1)), np.array([1.0, -2.0]).reshape(1, 2, 1, 1)
    form = oracles.dape(
        q,
        k,
        [5],
        [4],
        1.0,
        bias=lambda h, r: r if h == 0 else 3 * r,
        hidden_weight=np.array([[1.0, 1, 0, 0], [0, 0, 1, 1]]),
        hidden_bias=np.array([2.0, 0.0]),  # 1 and -4, which becomes -0.04
        out_weight=np.array([[10.0, 0], [0, 100]]),
        out_bias=np.array([0.5, 0.25]),
    )
    close(form[0, :, 0, 0], [1 - 1 + 10 + 0.5, -2 - 3 - 4 + 0.25])


def dape_parameters(width=4):
    return {
        "hidden_weight": drawn(width, 2 * H, seed=1),
        "hidden_bias": drawn(width, seed=2),
        "out_weight": drawn(H, width, seed=3),
        "out_bias": drawn(H, seed=4),
    }


def test_dape_is_torch_layers_over_the_heads():
    q, k, _ = qkv()
    parameters = dape_parameters()
    s = torch.tensor(plain(q, k))
    b = torch.tensor([[[alibi(h, j - i) for j in HERE] for i in HERE] for h in range(H)], dtype=torch.float64)
    z = torch.cat([s, b.expand(B, -1, -1, -1)], 1).permute(0, 2, 3, 1)
    weights = {key: torch.tensor(value) for key, value in parameters.items()}
    hidden = torch.nn.LeakyReLU()(z @ weights["hidden_weight"].T + weights["hidden_bias"])
    added = (hidden @ weights["out_weight"].T + weights["out_bias"]).permute(0, 3, 1, 2)
    close(oracles.dape(q, k, HERE, HERE, SCALE, bias=alibi, **parameters), (s + b + added).numpy())


def test_dape_with_a_silent_second_layer_is_its_bias():
    q, k, _ = qkv()
    silent = dape_parameters() | {"out_weight": np.zeros((H, 4)), "out_bias": np.zeros(H)}
    close(
        oracles.dape(q, k, HERE, HERE, SCALE, bias=alibi, **silent),
        oracles.logits(q, k, HERE, HERE, SCALE, b=alibi),
    )


# --- 5. maps of positions and of offsets -----------------------------------------------------------------------------


def test_maps_by_hand():
    assert oracles.interpolated([0, 1, 2, 3], 2) == [0, 0.5, 1, 1.5]
    assert oracles.grouped([-1, 0, 1, 2, 3, 4], 2) == [-1, 0, 0, 1, 1, 2]
    assert oracles.recurrent([0, 1, 2, 3, 4, 5], 4) == [0, 1, 2, 3, 0, 1]


def test_interpolated_rope_is_rope_with_slower_frequencies():
    q, k, _ = qkv()
    slow = [freq / 4 for freq in oracles.frequencies(D)]
    there = oracles.interpolated(HERE, 4)
    close(
        oracles.rope(q, k, there, there, SCALE),
        oracles.logits(q, k, HERE, HERE, SCALE, rotate=lambda h, x, i: oracles.rotated(x, i, slow)),
    )


def test_interpolation_keeps_even_steps_and_grouping_by_one_keeps_everything():
    q, k, _ = qkv()
    there = oracles.interpolated([2 * i for i in HERE], 2)
    close(oracles.rope(q, k, there, there, SCALE), oracles.rope(q, k, HERE, HERE, SCALE))
    assert oracles.grouped(HERE, 1) == HERE
    assert oracles.recurrent(HERE, L) == HERE


def test_self_extended_offsets_by_hand():
    """Window 4, groups of 2: the shift is 2. From query 9 in group 4, key 4 in group 2 is at 4 + 2 - 2 = 4."""
    offsets = [oracles.self_extended(9, j, 4, 2) for j in range(10)]
    assert offsets == [-6, -6, -5, -5, -4, -4, -3, -2, -1, 0]
    assert [oracles.self_extended(0, j, 4, 2) for j in range(10)] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]


def test_self_extended_positions_by_hand():
    assert oracles.self_extended_positions(9, 5, 4, 2) == (9, 5)
    assert oracles.self_extended_positions(9, 4, 4, 2) == (4 + 2, 2)
    assert oracles.self_extended_positions(4, 9, 4, 2) == (2, 4 + 2)
    assert oracles.self_extended_positions(9, 4, 4, 3) == (3 + 3, 1)


@pytest.mark.parametrize(("window", "size"), [(0, 1), (0, 3), (4, 1), (4, 2), (5, 3), (3, 8)])
def test_self_extended_offsets_grow_with_the_distance_and_join_the_window(window, size):
    for i in range(30):
        row = [oracles.self_extended(i, j, window, size) for j in range(30)]
        assert all(row[j] <= row[j + 1] for j in range(29))
        for j in range(30):
            i_there, j_there = oracles.self_extended_positions(i, j, window, size)
            assert row[j] == j_there - i_there
            assert row[j] == -oracles.self_extended(j, i, window, size)
            if abs(j - i) > window:
                assert window <= abs(row[j]) <= abs(j - i)


@pytest.mark.parametrize(("window", "size", "same"), [(4, 2, True), (6, 3, True), (5, 2, False)])
def test_whether_the_window_includes_its_end_matters_only_if_groups_do_not_divide_it(window, size, same):
    """The published code takes |r| < window as near. At |r| = window the far offset is then the window itself."""
    shift = window - window // size
    far = {i // size + shift - (i - window) // size for i in range(window, 40)}
    assert (far == {window}) == same


def test_self_extend_with_a_window_over_the_row_or_groups_of_one_is_exact():
    q, k, _ = qkv()
    for window, size in ((L - 1, 4), (L + 5, 2), (3, 1)):
        close(
            oracles.self_extend_rope(q, k, HERE, HERE, SCALE, window=window, size=size),
            oracles.rope(q, k, HERE, HERE, SCALE),
        )
        close(
            oracles.self_extend_bias(q, k, HERE, HERE, SCALE, bias=alibi, window=window, size=size),
            oracles.logits(q, k, HERE, HERE, SCALE, b=alibi),
        )


def test_self_extend_without_a_window_is_grouping():
    q, k, _ = qkv()
    there = oracles.grouped(HERE, 3)
    close(
        oracles.self_extend_rope(q, k, HERE, HERE, SCALE, window=0, size=3),
        oracles.rope(q, k, there, there, SCALE),
    )


def test_self_extended_rope_is_a_gain_of_the_mapped_offset():
    """R_i^T R_j = R_(j - i), so the rotary scheme too is a function of the mapped offset alone."""
    q, k, _ = qkv()
    freqs = oracles.frequencies(D)
    expected = np.zeros((B, H, L, L))
    for b, h, i, j in np.ndindex(expected.shape):
        r = oracles.self_extended(i, j, 2, 3)
        expected[b, h, i, j] = SCALE * oracles.dot(q[b, h, i], oracles.rotated(k[b, h, j], r, freqs))
    close(oracles.self_extend_rope(q, k, HERE, HERE, SCALE, window=2, size=3), expected)
    differ(expected, oracles.rope(q, k, HERE, HERE, SCALE))


def test_self_extended_bias_reads_the_bias_at_the_mapped_offset():
    zero = np.zeros((1, 1, 1, 1))
    form = partial(oracles.self_extend_bias, zero, zero, scale=1.0, bias=lambda h, r: r, window=4, size=2)
    assert form(q_pos=[9], k_pos=[2])[0, 0, 0, 0] == -5
    assert form(q_pos=[2], k_pos=[9])[0, 0, 0, 0] == 5
    assert form(q_pos=[9], k_pos=[6])[0, 0, 0, 0] == -3
