"""The schemes of 2025–26 against loops over (i, j) that share no code with them, in float64, and facts about each."""

import math

import pytest
import torch

import locant
from locant.attention import BACKENDS, eager
from locant.attention.request import prepare
from locant.attention.sides import Remembered
from locant.schemes import Sum
from locant.schemes.decay_lengths import decay_lengths
from locant.schemes.fox import cumulated
from tests import cases, frontier_cases, frontier_oracles

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SCALE = 0.37


def compare(scheme, q, k, v, x, q_pos, k_pos, *, causal, mask=None):
    """Logits of the visible pairs, and the output, by `eager`."""
    q_pos, k_pos = (p if p.ndim == 2 else p[None] for p in (q_pos, k_pos))
    expected = frontier_cases.logits(scheme, q, k, x, q_pos, k_pos, SCALE)
    how = {"q_pos": q_pos, "k_pos": k_pos, "causal": causal, "mask": mask, "scale": SCALE, "x": x}
    visible = torch.ones_like(expected, dtype=torch.bool)
    if causal:
        visible &= (k_pos[:, None, :] <= q_pos[:, :, None])[:, None]
    if mask is not None:
        visible &= mask
    for grad in (True, False, False):
        with torch.set_grad_enabled(grad):
            got = eager.logits(prepare(q, k, v, scheme, **how)).expand_as(expected)
            torch.testing.assert_close(got[visible], expected[visible], **EXACT)
    out = locant.attend(q, k, v, scheme, **how, impl="eager")
    weights = expected.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num()
    torch.testing.assert_close(out, weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), **EXACT)
    for name in ("sdpa", "fused"):
        if BACKENDS[name].unsupported(prepare(q, k, v, scheme, **how)) is None:
            torch.testing.assert_close(locant.attend(q, k, v, scheme, **how, impl=name), out, **EXACT)


def modes(spec):
    return [True] if spec in frontier_cases.CAUSAL else [False, True]


BOTH = [(spec, causal) for spec in frontier_cases.SPECS for causal in modes(spec)]


@pytest.mark.parametrize(("spec", "causal"), BOTH)
def test_consecutive_positions(spec, causal):
    pos = torch.arange(9)
    compare(cases.build(spec), *cases.tensors(), frontier_cases.states(), pos, pos, causal=causal)


@pytest.mark.parametrize("spec", frontier_cases.GROUPED)
def test_grouped_heads_and_rows_with_positions_of_their_own(spec):
    pos = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [3, 4, 9, 10, 11, 12, 40]])
    mask = torch.rand(2, 1, 7, 7) < 0.8
    x = frontier_cases.states(length=7)
    compare(cases.build(spec), *cases.tensors(kv=2, lq=7, lk=7), x, pos, pos, causal=True, mask=mask)


@pytest.mark.parametrize(("spec", "causal"), BOTH)
def test_positions_in_any_order_with_gaps(spec, causal):
    pos = torch.tensor([[5, 0, 700, 3, 2], [0, 1, 2, 3, 4]])
    x = frontier_cases.states(length=5)
    compare(cases.build(spec), *cases.tensors(lq=5, lk=5), x, pos, pos, causal=causal)
    if causal:
        x, q_pos = frontier_cases.states(length=5), torch.tensor([40, 41])
        compare(cases.build(spec), *cases.tensors(lq=2, lk=5), x, q_pos, torch.tensor([0, 17, 39, 40, 41]), causal=True)


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_one_query_with_what_was_read_before(spec):
    """Decoding: a model caches what `read` returned, and reads the new token alone."""
    scheme, (q, k, v), x = cases.build(spec), cases.tensors(), frontier_cases.states()
    full = locant.attend(q, k, v, scheme, causal=True, x=x, impl="eager")
    for i in (0, 4, 8):
        one = q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
        kept = None
        if scheme.reads:
            parts = [scheme.read(x[:, t : t + 1]) for t in range(i + 1)]
            kept = Remembered(parts[-1], torch.cat(parts, dim=2))
        torch.testing.assert_close(locant.attend(*one, scheme, x=kept), full[:, :, i : i + 1], **EXACT)
        alone = locant.attend(*one, scheme, x=x[:, : i + 1])
        torch.testing.assert_close(alone, full[:, :, i : i + 1], **EXACT)


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_gradients(spec):
    scheme, (q, k, v), x = cases.build(spec), cases.tensors(b=1, lq=4, lk=4), frontier_cases.states(1, 4)
    inputs = [t.requires_grad_() for t in (q, k, v, x)]
    names = [name for name, _ in scheme.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in scheme.parameters()]

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scheme = scheme

        def forward(self, q, k, v, x):
            return locant.attend(q, k, v, self.scheme, causal=True, x=x, impl="eager")

    whole = Whole()

    def run(q, k, v, x, *parameters):
        named = {f"scheme.{name}": value for name, value in zip(names, parameters, strict=True)}
        return torch.func.functional_call(whole, named, (q, k, v, x))

    assert torch.autograd.gradcheck(run, (*inputs, *values), fast_mode=True)


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_spec_round_trip(spec):
    scheme = cases.build(spec)
    assert str(scheme) == spec
    again = locant.scheme(str(scheme), n_heads=4, head_dim=8, d_model=32).double()
    again.load_state_dict(scheme.state_dict())
    assert str(again) == spec


def test_every_recent_scheme_has_an_oracle_and_a_case():
    assert set(frontier_cases.ORACLES) == {spec.partition(":")[0] for spec in frontier_cases.SPECS}


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ("inkling", 16 * 12 * 768 + 16 * 1024),
        ("fox", 769 * 12),
        ("grape", 129 * 12),
        ("pope", 768),
        ("fade", 24),
        ("logn", 0),
        ("local", 0),
        ("logn:learned=true", 12),
        ("fope", 0),
        ("dape", 24 * 32 + 32 + 32 * 12 + 12),
        ("dape:bias=kerple", 24 * 32 + 32 + 32 * 12 + 12 + 24),
    ],
)
def test_parameter_counts(spec, count):
    scheme = locant.scheme(spec, n_heads=12, head_dim=64, d_model=768)
    assert sum(p.numel() for p in scheme.parameters()) == scheme.parameter_count() == count


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_scales_are_positive_and_broadcast_to_their_parameters(spec):
    scheme = cases.build(spec)
    for name, parameter in scheme.named_parameters():
        scale = torch.as_tensor(scheme.parameter_scale(name))
        assert bool((scale > 0).all())
        assert scale.expand(parameter.shape).shape == parameter.shape


@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_bfloat16_models(spec):
    scheme, tensors, x = cases.build(spec), cases.tensors(), frontier_cases.states()
    expected = locant.attend(*tensors, scheme, causal=True, x=x)
    narrow = cases.build(spec)
    narrow.load_state_dict(scheme.state_dict())
    half = locant.attend(*(t.bfloat16() for t in tensors), narrow.bfloat16(), causal=True, x=x.bfloat16())
    torch.testing.assert_close(half.double(), expected, rtol=0.1, atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("spec", frontier_cases.SPECS)
def test_compiled_code_of_several_lengths(spec):
    """While a graph is traced, positions cannot be read: fox sums in the order given."""
    scheme = cases.build(spec)
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v, x: locant.attend(q, k, v, scheme, causal=True, x=x), backend="eager",
                        fullgraph=True, dynamic=True)  # fmt: skip
    for n in (9, 12):
        tensors, x = cases.tensors(lq=n, lk=n), frontier_cases.states(length=n)
        torch.testing.assert_close(run(*tensors, x), locant.attend(*tensors, scheme, causal=True, x=x), **EXACT)


# ---- inkling ------------------------------------------------------------------------------------


def test_the_curves_of_inkling_are_its_basis():
    scheme = cases.build("inkling:extent=4,width=3")
    found = scheme.basis(torch.tensor([-4, -3, 0, 1]))
    assert found.shape == (1, 4, 3)
    assert not found[:, [0, 3]].any()
    torch.testing.assert_close(found[0, 1:3], scheme.profiles[:, [3, 0]].mT)
    assert cases.build("tisa").basis(torch.arange(3)) is None


def test_inkling_starts_near_no_effect():
    torch.manual_seed(0)
    scheme, (q, k, v) = locant.scheme("inkling", n_heads=4, d_model=32), cases.tensors(dtype=torch.float32)
    x = frontier_cases.states(dtype=torch.float32)
    plain = eager.logits(prepare(q, k, v, None))
    assert 0 < (eager.logits(prepare(q, k, v, scheme, x=x)) - plain).abs().max() < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("alpha=0.1", "needs alpha and n0, both above 0; got alpha=0.1, n0=0"),
        ("n0=4", "needs alpha and n0"),
        ("alpha=-1,n0=4", "alpha must be a finite number > 0"),
    ],
)
def test_the_temperature_of_inkling_needs_both_options(options, message):
    with pytest.raises(ValueError, match=message):
        locant.scheme(f"inkling:{options}", n_heads=4, d_model=32)


def test_inkling_has_no_scale_of_0():
    with pytest.raises(ValueError, match="it divides by the scale of the logits, which must not be 0"):
        locant.attend(*cases.tensors(), cases.build("inkling"), x=frontier_cases.states(), scale=0.0)


# ---- fox ----------------------------------------------------------------------------------------


def packed_and_padded(scheme, tensors, x):
    """Row 0 is left-padded, row 1 packs two sequences; a mask keeps them apart."""
    pos = torch.tensor([[1, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 0, 1, 2]])
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    mask[0, :, :, :2] = False
    mask[1, :, 4:, :4] = False
    return locant.attend(*tensors, scheme, q_pos=pos, k_pos=pos, mask=mask, x=x, impl="eager")


@pytest.mark.parametrize("spec", ["fox", "fox:two_sided=true"])
def test_fox_of_packed_and_left_padded_rows_equals_the_sequences_alone(spec):
    scheme, tensors, x = cases.build(spec), cases.tensors(lq=7, lk=7), frontier_cases.states(length=7)
    together = packed_and_padded(scheme, tensors, x)
    for row, part in ((0, slice(2, 7)), (1, slice(0, 4)), (1, slice(4, 7))):
        alone = [t[row : row + 1, :, part] for t in tensors]
        expected = locant.attend(*alone, scheme, causal=True, x=x[row : row + 1, part], impl="eager")
        torch.testing.assert_close(together[row : row + 1, :, part], expected, **EXACT)


def test_fox_sums_each_row_in_its_own_order():
    """One row repeats positions and is summed as given, the other is sorted."""
    gates = -torch.rand(2, 3, 5, dtype=torch.float64)
    k_pos = torch.tensor([[0, 1, 2, 0, 1], [3, 0, 4, 1, 2]])
    of_queries, of_keys = cumulated(gates, k_pos, k_pos, "fox")
    torch.testing.assert_close(of_queries, of_keys)
    torch.testing.assert_close(of_keys[0], gates[0].cumsum(-1))
    sorted_row = gates[1][:, [1, 3, 4, 0, 2]].cumsum(-1)
    torch.testing.assert_close(of_keys[1][:, [1, 3, 4, 0, 2]], sorted_row)


@pytest.mark.parametrize(
    ("q_pos", "k_pos", "message"),
    [
        ([0, 1, 2, 1, 3], [0, 1, 2, 1, 3], "not defined for the positions 0, 1, 2, 1, 3: some repeat"),
        ([1, 2], [0, 1, 0, 1, 3], "2 queries at other positions than the last of 5 keys"),
    ],
)
def test_fox_refuses_an_order_it_cannot_know(q_pos, k_pos, message):
    q, k, v = cases.tensors(lq=len(q_pos), lk=5)
    where = {"q_pos": torch.tensor(q_pos), "k_pos": torch.tensor(k_pos)}
    with pytest.raises(ValueError, match=message):
        locant.attend(q, k, v, cases.build("fox"), causal=True, x=frontier_cases.states(length=5), **where)


def test_fox_knows_the_smallest_position_of_each_row():
    """The first row restarts at 0; the second begins lower, and does not repeat."""
    k_pos = torch.tensor([[0, 1, 2, 0, 1], [-3, -2, -1, 0, 1]])
    gates = -torch.rand(2, 1, 5, dtype=torch.float64)
    _, of_keys = cumulated(gates, k_pos, k_pos, "fox")
    torch.testing.assert_close(of_keys, gates.cumsum(-1))


def test_a_sum_has_one_scheme_with_levels():
    with pytest.raises(ValueError, match=r"one such part, not 2: fox, grape"):
        cases.build("fox+grape")


@pytest.mark.parametrize("spec", ["fox", "grape"])
def test_causal_schemes_refuse_later_keys(spec):
    q, k, v = cases.tensors()
    with pytest.raises(ValueError, match=rf"{spec} is for causal attention, and a query sees a key after it"):
        locant.attend(q, k, v, cases.build(spec), x=frontier_cases.states())


def test_fox_starts_as_alibi_with_slopes_of_its_decay_lengths():
    scheme, (q, k, v) = locant.scheme("fox", n_heads=4, d_model=32).double(), cases.tensors()
    logits = eager.logits(prepare(q, k, v, scheme, causal=True, x=frontier_cases.states()))
    bias = logits - eager.logits(prepare(q, k, v, None))
    slopes = 1 / torch.tensor(decay_lengths(4), dtype=torch.float64)
    torch.testing.assert_close(slopes[[0, 3]], torch.tensor([1 / 16, 1 / 1024], dtype=torch.float64))
    torch.testing.assert_close(bias[0, :, 8, 3], -5 * slopes, rtol=1e-4, atol=0)


def test_steps_of_both_parameters_of_fox_change_gates_as_much():
    """A step of its scale in every weight, or in the bias, for hidden states as a norm returns them."""
    scheme = locant.scheme("fox", n_heads=2, d_model=256).double()
    x = torch.randn(1, 500, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changes = {}
    with torch.no_grad():
        scheme.bias.fill_(-30.0)  # ln σ is linear there
        before = scheme.read(x)
        for name, parameter in scheme.named_parameters():
            parameter.add_(scheme.parameter_scale(name))
            changes[name] = float((scheme.read(x) - before).square().mean().sqrt())
            parameter.sub_(scheme.parameter_scale(name))
    assert changes["gate"] == pytest.approx(changes["bias"], rel=0.2)


@pytest.mark.parametrize("spec", ["fox", "fox:two_sided=true"])
def test_fox_over_100_000_tokens_loses_nothing(spec):
    """The bias of near tokens after 100,000 gates in float32, against exact sums of the same gates."""
    n, last = 100_000, 50
    torch.manual_seed(0)
    scheme = locant.scheme(spec, n_heads=2, d_model=4)
    with torch.no_grad():
        scheme.gate.normal_()
        scheme.bias.fill_(0.5)  # log-gates of −0.6 on average: c ends at −60,000
    x = torch.randn(1, n, 4)
    k = torch.zeros(1, 2, n, 8)
    with torch.no_grad():
        bias = eager.logits(prepare(k[:, :, -last:], k, k, scheme, causal=True, x=x))[0, :, :, -last:]
        gates = scheme.read(x[:, -last:])[0, :, :, 0].double()
        assert float(scheme.read(x).sum()) < -100_000
    for i in range(0, last, 7):
        for j in range(i + 1):
            exact = torch.tensor([math.fsum(gates[h, j + 1 : i + 1].tolist()) for h in range(2)])
            torch.testing.assert_close(bias[:, i, j], exact, rtol=2e-7, atol=1e-8)


# ---- the others ---------------------------------------------------------------------------------


def test_grape_starts_as_alibi():
    scheme, (q, k, v) = locant.scheme("grape", n_heads=4, head_dim=8).double(), cases.tensors()
    logits = eager.logits(prepare(q, k, v, scheme, causal=True))
    alibi = eager.logits(prepare(q, k, v, cases.build("alibi")))
    torch.testing.assert_close(logits.tril(), alibi.tril(), rtol=1e-6, atol=1e-6)


def test_the_power_of_fade_is_reflected_into_its_range():
    scheme, r = locant.scheme("fade", n_heads=7), torch.arange(-3, 4)
    with torch.no_grad():
        scheme.p.copy_(torch.tensor([0.5, -0.5, 3.5, 4.5, 1.0, 2.0, 6.0]))
        scheme.a.fill_(-0.3)
    gain = scheme.terms(r).gain
    expected = [torch.exp(-0.3 * r.abs() ** p) for p in (0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 2.0)]
    torch.testing.assert_close(gain, torch.stack(expected))


def test_a_phase_of_pope_may_leave_its_range():
    scheme, (q, k, v) = cases.build("pope"), cases.tensors()
    before = locant.attend(q, k, v, scheme)
    with torch.no_grad():
        scheme.phase.add_(4 * math.pi)
    torch.testing.assert_close(locant.attend(q, k, v, scheme), before, **EXACT)


@pytest.mark.parametrize("other", ["rope", "xpos", "fope", "pope"])
def test_pope_is_added_to_no_other_rotation(other):
    with pytest.raises(ValueError, match="pope cannot be added to another scheme that rotates"):
        cases.build(f"pope+{other}")


def test_pope_is_added_to_no_gain_per_coordinate():
    with pytest.raises(ValueError, match="pope cannot be added to a scheme with a gain per coordinate"):
        cases.build("pope+huang3")


@pytest.mark.parametrize("spec", ["pope+alibi", "pope+shaw:clip=3", "pope+fade"])
def test_wide_products_in_every_back_end(spec):
    scheme, (q, k, v) = cases.build(spec).float(), cases.tensors(kv=2, dtype=torch.float32)
    expected = locant.attend(q.double(), k.double(), v.double(), scheme.double(), causal=True, impl="eager")
    scheme = scheme.float()
    tried = 0
    for name in ("fused", "sdpa", "eager"):
        if BACKENDS[name].unsupported(prepare(q, k, v, scheme, causal=True)) is None:
            out = locant.attend(q, k, v, scheme, causal=True, impl=name)
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
            tried += 1
    assert tried >= 2


def test_logn_leaves_early_and_negative_positions_alone():
    scheme = locant.scheme("logn:n0=8", n_heads=4)
    pos = torch.tensor([[-5, -1, 0, 7, 8, 63]])
    expected = [1, 1, 1, 1, math.log(9) / math.log(8), 2]
    torch.testing.assert_close(scheme.temperature(pos)[0, 0], torch.tensor(expected, dtype=torch.float64))


def test_logn_multiplies_all_of_a_sum():
    both, plain, (q, k, v) = cases.build("logn:n0=3+alibi"), cases.build("alibi"), cases.tensors()
    assert isinstance(both, Sum)
    assert not both.shift_invariant
    tau = torch.tensor([frontier_oracles.logn_tau(i, 3) for i in range(9)], dtype=torch.float64)[:, None]
    expected = tau * eager.logits(prepare(q, k, v, plain))
    torch.testing.assert_close(eager.logits(prepare(q, k, v, both)), expected, **EXACT)


def test_fope_keeps_its_coefficients_in_half_precision_and_depends_on_its_seed():
    one, other = (locant.scheme(f"fope:seed={seed}", n_heads=4, head_dim=8) for seed in (0, 1))
    assert not torch.equal(one.mixtures()[0], other.mixtures()[0])
    again = locant.scheme("fope", n_heads=4, head_dim=8)
    assert torch.equal(one.half().mixtures()[0], again.mixtures()[0])
    assert set(one.state_dict()) == {"coefficients"}
    near = torch.eye(one.coefficients.shape[-1], dtype=torch.float64)
    wide = locant.scheme("fope:length=2000000", n_heads=400, head_dim=16).mixtures()[0]
    spread = (wide - torch.eye(8, dtype=torch.float64)).std()
    assert float(spread) == pytest.approx(0.3 / math.sqrt(8), rel=0.02)
    assert float((one.mixtures()[0] - near).abs().max()) < 1.5


def test_fope_with_coefficients_of_every_head_refuses_grouped_heads():
    with pytest.raises(ValueError, match="4 query heads share 2 key heads; use fope:heads=shared"):
        locant.attend(*cases.tensors(kv=2), cases.build("fope"))


def test_dape_starts_as_its_bias():
    q, k, v = cases.tensors()
    dape = locant.scheme("dape", n_heads=4).double()
    ours = eager.logits(prepare(q, k, v, dape))
    torch.testing.assert_close(ours, eager.logits(prepare(q, k, v, cases.build("alibi"))), **EXACT)


def test_hidden_states_are_missing_or_do_not_fit():
    q, k, v = cases.tensors()
    fox = cases.build("fox")
    with pytest.raises(ValueError, match=r"fox reads hidden states: pass x=…"):
        locant.attend(q, k, v, fox, causal=True)
    for x in (frontier_cases.states(length=8), frontier_cases.states()[..., :31], frontier_cases.states(b=1)):
        with pytest.raises(ValueError, match=r"x must be \[2, 9, 32\], the hidden states of the tokens; got"):
            locant.attend(q, k, v, fox, causal=True, x=x)
