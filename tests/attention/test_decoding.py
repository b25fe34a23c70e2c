"""Steps with a growing cache, one query each, equal the rows of one causal pass by `eager` in float64.

The pass computes its tables with gradients enabled, where nothing is cached.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import locant
from locant.attention import sdpa, tables
from tests import cases

LENGTH = 48
BIASES = ["tisa", "tisa2:kernels=4", "t5:buckets=8,max_distance=12", "toeplitz:clip=5", "alibi:slopes=learned",
          "kerple", "kerple:kind=power", "sandwich:width=16"]  # fmt: skip
SIDES = ["inkling:extent=9,width=3", "inkling:extent=200,width=3", "inkling:extent=9,width=3,alpha=0.1,n0=4", "fox",
         "fox:two_sided=true", "grape", "logn", "inkling:extent=9,width=3+fox", "inkling:extent=9,width=3+tisa",
         "huang4:clip=3+inkling:extent=9,width=3", "fox+t5:buckets=8,max_distance=12"]  # fmt: skip
OTHERS = ["nope", "alibi:scaled=true", "tisa@grouped:size=3", "t5:buckets=8,max_distance=12+kerple", "rope+alibi",
          "toeplitz:clip=5+huang1:clip=3"]  # fmt: skip
SPECS = list(dict.fromkeys([*cases.SPECS, *BIASES, *SIDES, *OTHERS]))


class Tokens:
    """Queries, keys, values and hidden states of LENGTH tokens, in float64."""

    def __init__(self):
        torch.manual_seed(0)
        self.q, self.k, self.v = cases.tensors(lq=LENGTH, lk=LENGTH)
        self.x = torch.randn(2, LENGTH, cases.D_MODEL, dtype=torch.float64)

    def truth(self, scheme):
        """[B, H, LENGTH, D] by one causal pass in float64."""
        scheme, x = copy.deepcopy(scheme).double(), self.x if scheme.reads else None
        assert torch.is_grad_enabled()
        return locant.attend(self.q, self.k, self.v, scheme, causal=True, x=x, impl="eager").detach()

    def step(self, scheme, n, *, causal=True, impl="auto", **how):
        """The output of token n − 1 against the first n keys, [B, H, 1, D], in float32."""
        q, k, v, x = (each.float() for each in (self.q, self.k, self.v, self.x))
        x = x[:, :n] if scheme.reads else None
        with torch.no_grad():
            return locant.attend(
                q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], scheme, x=x, causal=causal, impl=impl, **how
            )


@pytest.fixture(scope="module")
def tokens():
    return Tokens()


def assert_close(ours, truth, n):
    torch.testing.assert_close(ours, truth[:, :, n - 1 : n].float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "dynamic" not in spec and "longrope" not in spec])
def test_a_growing_cache(spec, tokens):
    scheme = cases.build(spec)
    truth, scheme = tokens.truth(scheme), scheme.float()
    for n in (1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 30, 31, 48, 17, 5, 47):
        assert_close(tokens.step(scheme, n), truth, n)
        assert_close(tokens.step(scheme, n, causal=False), truth, n)  # no key is after the last


@pytest.mark.parametrize("impl", ["sdpa", "fused", "eager"])
@pytest.mark.parametrize("spec", [*BIASES, "inkling:extent=9,width=3", "fox", "alibi:scaled=true"])
def test_every_back_end_takes_a_table_with_room(spec, impl, tokens):
    scheme = cases.build(spec)
    truth, scheme = tokens.truth(scheme), scheme.float()
    for n in (20, 21, 40, 8):
        assert_close(tokens.step(scheme, n, impl=impl), truth, n)


def _in_place(scheme):
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.mul_(1.5)


def _data(scheme):
    for parameter in scheme.parameters():
        parameter.data.view(-1)[0] += 2.0  # one number of each; no version counter counts it


def _optimizer(scheme):
    for parameter in scheme.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(scheme.parameters(), lr=0.5).step()


def _load(scheme):
    scheme.load_state_dict({name: x + 0.5 * torch.randn_like(x) for name, x in scheme.state_dict().items()})


def _replaced(scheme):
    for name, parameter in list(scheme.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(scheme.get_submodule(owner), last, nn.Parameter(parameter.detach() * 0.5))


@pytest.mark.parametrize("change", [_in_place, _data, _optimizer, _load, _replaced])
@pytest.mark.parametrize(
    "spec", [*(spec for spec in BIASES if "sandwich" not in spec), *SIDES[:6], *SIDES[7:], "tisa@grouped:size=3"]
)
def test_parameters_that_change_between_steps(spec, change, tokens):
    scheme = cases.build(spec).float()
    before = tokens.truth(scheme)
    assert_close(tokens.step(scheme, 30), before, 30)
    change(scheme)
    after = tokens.truth(scheme)
    assert not torch.allclose(before[:, :, 30], after[:, :, 30])
    for n in (31, 12, 45):
        assert_close(tokens.step(scheme, n), after, n)


def test_interleaved_lengths_of_two_schemes(tokens):
    schemes = [cases.build(spec).float() for spec in ("tisa", "tisa", "t5:buckets=8,max_distance=12", "fox")]
    truths = [tokens.truth(scheme) for scheme in schemes]
    for n in (40, 7, 41, 8, 42, 48, 1, 43):
        for scheme, truth in zip(schemes, truths, strict=True):
            assert_close(tokens.step(scheme, n), truth, n)


@pytest.mark.parametrize("spec", ["t5:buckets=8,max_distance=12", "toeplitz:clip=5", "inkling:extent=9,width=3"])
def test_steps_and_whole_sequences_share_tables_with_a_reach(spec, tokens):
    scheme = cases.build(spec).float()
    truth, x = tokens.truth(scheme), tokens.x.float() if scheme.reads else None
    q, k, v = (each.float() for each in (tokens.q, tokens.k, tokens.v))
    for n in (30, 31, 8):
        assert_close(tokens.step(scheme, n), truth, n)
        with torch.no_grad():
            whole = locant.attend(
                *(each[:, :, :n] for each in (q, k, v)), scheme, causal=True, x=None if x is None else x[:, :n]
            )
        torch.testing.assert_close(whole, truth[:, :, :n].float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "spec", ["tisa", "t5:buckets=8,max_distance=12", "toeplitz:clip=5", "inkling:extent=9,width=3"]
)
def test_steps_compute_tables_a_few_times_in_all(spec, tokens, monkeypatch):
    scheme = cases.build(spec).float()
    calls, original = [], type(scheme).terms
    monkeypatch.setattr(type(scheme), "terms", lambda self, r: calls.append(len(r)) or original(self, r))
    for n in range(2, LENGTH):
        tokens.step(scheme, n)
    assert len(calls) < 16


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_padding_takes_its_part_of_a_table_with_room(padded, tokens):
    scheme = cases.build("t5:buckets=8,max_distance=12")
    truth, scheme = tokens.truth(scheme), scheme.float()
    mask = torch.ones(2, 30, dtype=torch.bool)
    expected = tokens.step(copy.deepcopy(scheme), 30, impl="eager")
    if padded:
        mask[0, 25:], mask[1, 20:] = False, False
        expected = tokens.step(copy.deepcopy(scheme), 30, impl="eager", mask=mask)
    else:
        assert_close(expected, truth, 30)
    tokens.step(scheme, 20)
    torch.testing.assert_close(tokens.step(scheme, 30, mask=mask), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("spec", ["tisa", "t5:buckets=8,max_distance=12"])
def test_the_mask_of_a_step_is_one_view_of_the_cached_table(spec, tokens, monkeypatch):
    masks, original = [], sdpa._kernel
    monkeypatch.setattr(sdpa, "_kernel", lambda *args, **how: masks.append(args[4]) or original(*args, **how))
    scheme = cases.build(spec).float()
    tokens.step(scheme, 30, impl="sdpa")
    tokens.step(scheme, 31, impl="sdpa")
    assert len(masks) == 2
    table = tables._cache[scheme].terms.bias
    assert all(mask.untyped_storage().data_ptr() == table.untyped_storage().data_ptr() for mask in masks)


def test_parameters_that_only_read_uses_are_not_compared(tokens):
    """The tables of inkling do not depend on its projection, which may be too large to compare."""
    scheme = cases.build("inkling:extent=9,width=3").float()
    tokens.step(scheme, 30)
    first = tables._cache[scheme]
    scheme.project.data.mul_(1.5)
    assert_close(tokens.step(scheme, 31), tokens.truth(scheme), 31)
    assert tables._cache[scheme] is first
    scheme.profiles.data.mul_(2)
    assert_close(tokens.step(scheme, 31), tokens.truth(scheme), 31)
    assert tables._cache[scheme] is not first


def test_a_subclass_with_terms_of_its_own_has_all_its_parameters_compared():
    class Louder(locant.schemes.Inkling):
        cacheable = True

        def terms(self, r):
            return locant.Terms(query_side=self.basis(r) * self.project.sum())

    assert locant.schemes.Inkling.read_parameters == ("project",)
    assert Louder.read_parameters == ()


def test_a_scheme_with_cached_tables_is_freed():
    scheme = cases.build("tisa+t5").float()
    tokens = Tokens()
    tokens.step(scheme, 30)
    assert scheme in tables._cache
    gone = weakref.ref(scheme)
    del scheme
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("spec", ["tisa", "t5", "kerple@grouped", "toeplitz:clip=4"])
def test_a_query_far_from_all_keys_makes_no_long_tables(spec):
    """Room for the next steps is twice the columns. It once was twice the distance: 8 GB for half a billion."""
    scheme = locant.scheme(spec, n_heads=2, head_dim=4, d_model=8).double()
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for length in (1, 3, 3))
    q_pos, k_pos = torch.tensor([500_000_000]), torch.arange(3)
    with torch.no_grad():
        found = locant.attend(q, k, v, scheme, q_pos=q_pos, k_pos=k_pos)
        wanted = locant.attend(q, k, v, scheme, q_pos=q_pos, k_pos=k_pos, impl="eager")
    torch.testing.assert_close(found, wanted)
    assert sum(x.numel() for each in tables._cache.values() for x in each.terms.tables().values()) < 10**6
