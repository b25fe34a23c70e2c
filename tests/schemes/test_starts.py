"""Scales of parameters and starts of a fit, which schemes define themselves."""

import pytest
import torch
from torch import nn

import locant
from locant import Scheme
from locant.schemes import First, Learned, Rope, Sum, Tisa, Toeplitz
from tests import cases

OFFSETS = torch.arange(-20, 21)
BIAS = 3 * torch.exp(-0.05 * (OFFSETS - torch.tensor([[0.0], [-3.0], [4.0], [8.0]])) ** 2).double()  # [4, 41]
WEIGHT = 1.0 / (1 + OFFSETS.abs()).double()


def curve_of(scheme):
    return scheme.terms(OFFSETS).bias.detach().double()


@pytest.mark.parametrize("spec", cases.SPECS)
def test_scales_are_positive_and_broadcast_to_their_parameters(spec):
    scheme = cases.build(spec)
    for name, parameter in scheme.named_parameters():
        scale = torch.as_tensor(scheme.parameter_scale(name))
        assert bool((scale > 0).all())
        assert scale.expand(parameter.shape).shape == parameter.shape


def test_a_step_of_one_scale_changes_every_kernel_of_tisa_alike():
    """Whether a kernel is narrow or wide: a step of its scale changes the curve by a similar amount."""
    scheme = Tisa(kernels=1, n_heads=3)
    r = torch.arange(-2000, 2001)
    with torch.no_grad():
        scheme.amplitude.fill_(1.0)
        scheme.offset.zero_()
        scheme.sharpness.copy_(torch.tensor([[1e-4], [1e-2], [1.0]]))
        before = scheme.terms(r).bias
        for name in ("sharpness", "offset"):
            parameter, step = scheme.get_parameter(name), 0.1 * scheme.parameter_scale(name)
            parameter.add_(step)
            change = (scheme.terms(r).bias - before).abs().amax(-1)
            parameter.sub_(step)
            assert float(change.max() / change.min()) < 1.5
            assert float(change.min()) > 0.02


def test_a_nested_scheme_gives_the_scale_of_its_parameters():
    tisa = Tisa(kernels=2, n_heads=4)
    both = Sum(cases.build("alibi:slopes=learned"), tisa)
    assert torch.equal(both.parameter_scale("parts.1.sharpness"), tisa.parameter_scale("sharpness"))
    assert both.parameter_scale("parts.0.slope") == 1.0
    assert tisa.parameter_scale("amplitude") == 1.0
    assert cases.build("fire").parameter_scale("hidden.weight") == 1.0

    class Outer(Scheme):
        def __init__(self):
            super().__init__()
            self.inner, self.factor = tisa, nn.Parameter(torch.ones(1))

    assert torch.equal(Outer().parameter_scale("inner.offset"), tisa.parameter_scale("offset"))
    assert Outer().parameter_scale("factor") == 1.0


@pytest.mark.parametrize(
    ("spec", "starts"),
    [("tisa", True), ("tisa:kernels=0", False), ("toeplitz", True), ("alibi:slopes=learned", False), ("nope", False),
     ("tisa+rope", True), ("tisa:kernels=0+toeplitz", True), ("tisa+toeplitz", False)],
)  # fmt: skip
def test_which_schemes_start_from_a_curve(spec, starts):
    assert locant.scheme(spec, n_heads=4, head_dim=8, d_model=32).can_start_from_curve == starts


@pytest.mark.parametrize(("spec", "error"), [("toeplitz:clip=20", 1e-6), ("tisa:kernels=3", 0.1), ("rope+tisa", 0.1)])
def test_a_start_is_near_its_curve(spec, error):
    scheme = locant.scheme(spec, n_heads=4, head_dim=8, d_model=32)
    scheme.start_from_curve(OFFSETS, BIAS, WEIGHT)
    apart = curve_of(scheme) - BIAS
    assert float((apart - apart.mean(-1, keepdim=True)).abs().max()) < error * 3


def test_a_toeplitz_start_continues_the_curve_and_clips_it():
    wide, narrow = Toeplitz(clip=30, n_heads=4), Toeplitz(clip=5, n_heads=4)
    for scheme in (wide, narrow):
        scheme.start_from_curve(OFFSETS, BIAS, WEIGHT)
    torch.testing.assert_close(wide.table[:, :10].double(), BIAS[:, :1].expand(-1, 10))
    torch.testing.assert_close(wide.table[:, -10:].double(), BIAS[:, -1:].expand(-1, 10))
    torch.testing.assert_close(narrow.table.double(), BIAS[:, 15:26])
    causal = Toeplitz(clip=20, n_heads=4)
    causal.start_from_curve(OFFSETS[:21], BIAS[:, :21], WEIGHT[:21])
    torch.testing.assert_close(causal.table[:, 20:].double(), BIAS[:, 20:21].expand(-1, 21))


def test_values_are_cleared_where_there_are_some():
    both = Sum(cases.build("shaw:clip=3"), cases.build("tisa"))
    before = both.parts[0].table.clone()
    both.clear_values()
    assert not both.parts[0].value_table.any()
    assert torch.equal(both.parts[0].table, before)
    cases.build("shaw:clip=3,values=false").clear_values()


def test_first_starts_from_a_table_and_learned_has_one():
    table = torch.randn(9, 32)
    both = Sum(First(d_model=32), cases.build("sinusoidal"))
    both.start_from_table(table[0], table[1:].mean(0))
    assert torch.equal(both.parts[0].first, table[0])
    assert torch.equal(both.parts[0].rest, table[1:].mean(0))
    learned = Learned(length=9, d_model=32)
    assert learned.position_table is learned.table
    assert Rope(head_dim=8).position_table is None


@pytest.mark.parametrize("spec", ["tisa:kernels=3", "tisa2:kernels=3,free=1"])
def test_the_kernels_of_a_scheme_add_up(spec):
    scheme = locant.scheme(spec, n_heads=4)
    found = scheme.components(OFFSETS)
    assert found.kernels.shape == (4, 41, 3)
    assert found.amplitude.shape == found.sharpness.shape == found.offset.shape == (4, 3)
    rest = found.total - found.kernels.sum(-1)
    if spec.startswith("tisa2"):
        torch.testing.assert_close(rest, (1e-8 + scheme.bias.abs())[:, None].expand(-1, 41))
    else:
        torch.testing.assert_close(rest, torch.zeros(4, 41), atol=1e-6, rtol=0)
        torch.testing.assert_close(found.total, scheme.terms(OFFSETS).bias)
    assert locant.scheme("alibi", n_heads=4).components(OFFSETS) is None
    name = spec.partition(":")[0]
    assert locant.scheme(f"{name}:kernels=0", n_heads=4).components(OFFSETS) is None
    assert locant.scheme("tisa:kernels=1", n_heads=4).can_start_from_curve
    assert not locant.scheme("tisa:kernels=0", n_heads=4).can_start_from_curve
    assert locant.scheme(f"{name}:kernels=1", n_heads=4).components(OFFSETS).kernels.shape[-1] == 1
    assert found.meaning == ("inside the logarithm" if name == "tisa2" else "added to the logit")


def test_only_our_own_classes_are_cached_unless_they_declare_it():
    class Mine(Tisa):
        pass

    class Declared(Tisa):
        cacheable = True

    class Child(Declared):
        pass

    assert Tisa.cacheable
    assert Sum.cacheable
    assert not Mine.cacheable
    assert Declared.cacheable
    assert not Child.cacheable


@pytest.mark.parametrize("declared", [False, True])
def test_attention_caches_the_tables_of_a_scheme_that_declares_it(declared):
    calls = []

    class Counting(Tisa):
        cacheable = declared

        def terms(self, r):
            calls.append(r)
            return super().terms(r)

    scheme, (q, k, v) = Counting(n_heads=4), cases.tensors(dtype=torch.float32)
    with torch.no_grad():
        first, second = (locant.attend(q, k, v, scheme) for _ in range(2))
        assert len(calls) == (1 if declared else 2)
        scheme.amplitude.data += 1.0
        changed = locant.attend(q, k, v, scheme)
    assert torch.equal(first, second)
    assert not torch.allclose(first, changed)
