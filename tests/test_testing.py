"""The laws hold for every scheme, and each of them catches a scheme that breaks it."""

import re
from functools import cache

import pytest
import torch
from torch import nn

import locant
from locant import Terms
from locant.schemes.base import wide
from locant.terms import Sides
from locant.testing import LAWS, check_scheme, run_laws
from tests import cases, frontier_cases

SUMS = [
    "rope+rope:theta=50",
    "rope:layout=interleaved+rope",
    "xpos+rope",
    "learned:length=5",
    "fire:length=1000000",
    "tisa:kernels=5+learned:length=64",
    "huang3:clip=3+huang1:clip=2+rope",
    "fire+cope",
    "deberta+xl",
    "xpos+alibi",
    "fox+inkling:extent=4,width=3",
    "rope+logn:n0=5",
    "inkling+inkling:extent=3,width=2,alpha=0.2,n0=4+shaw:clip=3",
    "grape:two_sided=true+pope",
]


@pytest.mark.parametrize("spec", [*locant.SCHEMES, *cases.SPECS, *frontier_cases.SPECS, *SUMS, "tisa:kernels=0"])
def test_laws_hold(spec):
    outcomes = check_scheme(locant.scheme(spec, n_heads=4, head_dim=8, d_model=32))
    assert [outcome.law for outcome in outcomes] == list(LAWS)
    assert sum(outcome.passed is True for outcome in outcomes) >= 9


def test_laws_hold_at_the_size_of_bert():
    check_scheme(locant.scheme("huang4", n_heads=12, head_dim=64, d_model=768))


class Good(locant.Scheme):
    def __init__(self, *, slope: float = 0.1, n_heads: int = 2):
        super().__init__()
        self.slope, self.n_heads = slope, n_heads
        self.table = nn.Parameter(torch.linspace(1.0, 2.0, n_heads))

    def terms(self, r):
        return Terms(bias=-self.table[:, None] * self.slope * (r[None] + 0.3).abs())

    def parameter_count(self):
        return self.n_heads


class NotLocal(Good):
    def terms(self, r):
        return Terms(bias=super().terms(r).bias + len(r) * torch.arange(len(r)))


class OddOneOut(Good):
    """Wrong for the last offset of a range, as an off-by-one mistake at an edge would be."""

    def terms(self, r):
        shift = torch.zeros_like(r)
        shift[-1] = 1
        return Terms(bias=super().terms(r + shift).bias)


class NotInvariant(Good):
    def rotate(self, q, k, q_pos, k_pos):
        return q * (1 + q_pos[:, None, :, None]), k


class InvariantAfterAll(Good):
    shift_invariant = False


class NoGradient(Good):
    def terms(self, r):
        return Terms(bias=-self.table.detach()[:, None] * (r[None] + 0.3).abs())


class WrongGradient(Good):
    def terms(self, r):
        bias = super().terms(r).bias
        return Terms(bias=bias + (bias - bias.detach()))


class Overflows(Good):
    def terms(self, r):
        return Terms(bias=super().terms(r).bias - torch.exp(r.abs().float() / 100)[None])


class MoreParameters(Good):
    def parameter_count(self):
        return 7


class ForgetsOptions(Good):
    def __str__(self):
        return self.name()


class HiddenState(Good):
    def __init__(self, *, slope: float = 0.1, n_heads: int = 2):
        super().__init__(slope=slope, n_heads=n_heads)
        self.secret = torch.randn(()).double()

    def terms(self, r):
        return Terms(bias=super().terms(r).bias * self.secret)


class HalfTables(Good):
    def terms(self, r):
        return Terms(bias=super().terms(r).bias.to(self.table.dtype))


class SumsInHalfPrecision(Good):
    """Takes columns of a half-precision table, so that autograd sums their gradients in half precision."""

    def __init__(self, *, slope: float = 0.1, n_heads: int = 2):
        super().__init__(slope=slope, n_heads=n_heads)
        self.table = nn.Parameter(torch.zeros(n_heads, 3))

    def terms(self, r):
        return Terms(bias=wide(self.table[:, r.clamp(-1, 1) + 1]))


class MixesRows(Good):
    def rotate(self, q, k, q_pos, k_pos):
        return q * (1 + 0.1 * q_pos[:1, None, :, None]), k


class IgnoresAParameter(Good):
    def __init__(self, *, slope: float = 0.1, n_heads: int = 2):
        super().__init__(slope=slope, n_heads=n_heads)
        self.idle = nn.Parameter(torch.zeros(3))

    def parameter_count(self):
        return self.n_heads + 3


class Caches(Good):
    """Returns the first table it computed in every call: training has no effect."""

    def terms(self, r):
        if not hasattr(self, "kept"):
            self.kept = {}
        key = tuple(r.tolist())
        self.kept.setdefault(key, super().terms(r).bias.detach().clone())
        return Terms(bias=self.kept[key])


class EmbedsTheIndex(locant.Scheme):
    shift_invariant = False

    def embed(self, pos):
        return torch.stack([pos * 1.0, torch.arange(pos.shape[-1]).expand_as(pos) * 1.0], dim=-1)


class EmbedsTheFirstRow(locant.Scheme):
    shift_invariant = False

    def embed(self, pos):
        return (pos if pos.ndim == 1 else pos[:1].expand_as(pos))[..., None] * torch.ones(2)


class ChangesOffsets(Good):
    def terms(self, r):
        return Terms(bias=-self.table.double()[:, None] * self.slope * r.clamp_(-5, 5).abs())


class ReadsParametersLate(Good):
    def terms(self, r):
        return Terms(
            pair=lambda q, k, q_pos, k_pos, scale, visible: (
                self.table[None, :, None, None] * (k_pos[:, None, None, :] - q_pos[:, None, :, None]).abs()
            )
        )


class TurnsHeadsApart(Good):
    """Depends on the number of a key's head, which is not that of the query head with fewer key heads."""

    shift_invariant = False

    def rotate(self, q, k, q_pos, k_pos):
        speed = 0.1 * torch.arange(1, k.shape[1] + 1)[:, None, None]
        return q, k * (1 + speed * k_pos[:, None, :, None])


class SeesTheLength(Good):
    """Depends on the number of queries, so that decoding differs."""

    def rotate(self, q, k, q_pos, k_pos):
        return q * q.shape[2], k


class Reader(locant.Scheme):
    """A logit per key, from its hidden state."""

    reads_keys, read_width, has_levels = True, 1, True

    def __init__(self, *, n_heads: int = 2, d_model: int = 6):
        super().__init__()
        self.n_heads, self.d_model = n_heads, d_model
        self.weight = nn.Parameter(torch.randn(n_heads, d_model))

    def read(self, x):
        return (wide(x) @ wide(self.weight).to(wide(x).dtype).mT).mT[..., None]

    def sides(self, tokens):
        return Sides(key_level=tokens.read_k[..., 0])

    def parameter_count(self):
        return self.n_heads * self.d_model


class ReadsNeighbours(Reader):
    def read(self, x):
        return super().read(x).cumsum(2)


class ReadsInHalf(Reader):
    def read(self, x):
        return super().read(x).to(x.dtype)


class ReadsAnotherShape(Reader):
    def read(self, x):
        return super().read(x)[..., 0]


class ReadsAnyWidth(Reader):
    def __init__(self, *, n_heads: int = 2):
        super().__init__(n_heads=n_heads, d_model=16)
        del self.d_model

    def parameter_count(self):
        return self.n_heads * 16


class ReadsForNothing(Good):
    reads_keys, read_width = True, 1

    def read(self, x):
        return x[..., :1, None].transpose(1, 2).expand(-1, self.n_heads, -1, -1)


class ReadsWithoutGradient(Reader):
    def sides(self, tokens):
        return Sides(key_level=tokens.read_k[..., 0].detach())


class WidensInSecret(Good):
    def rotate(self, q, k, q_pos, k_pos):
        return (torch.cat([x, x], dim=-1) for x in (q, k))


class WidensInWordsAlone(Good):
    widens = True


class RewardsTheFuture(Reader):
    """Not causal, but finite at every distance: only the declaration is tried."""

    causal_only = True


def broken_laws(scheme):
    return {outcome.law for outcome in run_laws(scheme) if outcome.passed is False}


@cache
def failure(cls):
    """The name of a scheme, and the error of check_scheme for it."""
    scheme = cls()
    with pytest.raises(AssertionError) as caught:
        check_scheme(scheme)
    return str(scheme), str(caught.value)


def test_a_scheme_without_mistakes_passes():
    class Wide(Good):
        def terms(self, r):
            return Terms(bias=-self.table.double()[:, None] * self.slope * (r[None] + 0.3).abs())

    assert broken_laws(Wide(slope=0.2)) == set()


def test_a_scheme_that_reads_passes_also_if_it_is_causal():
    assert broken_laws(Reader()) == set()
    assert broken_laws(RewardsTheFuture()) == set()


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (ReadsNeighbours, "what is read of a token differs by .* sum over tokens in sides, not in read"),
        (ReadsInHalf, r"read returns torch.bfloat16 in a torch.bfloat16 model; it must be float32 or wider"),
        (ReadsAnotherShape, r"read returns \[2, 2, 11\]; it must be \[2, 2, 11, 1\]: batch, heads, tokens, read_width"),
        (ReadsAnyWidth, "has no attribute d_model, so attention cannot refuse"),
        (ReadsForNothing, "defines no sides, which would use them"),
    ],
)
def test_the_law_of_reading_explains_itself(cls, words):
    found = {outcome.law: outcome.detail for outcome in run_laws(cls())}
    assert re.search(words, found["reading"])


@pytest.mark.parametrize(
    ("cls", "law"),
    [
        (ReadsNeighbours, "reading"),
        (ReadsInHalf, "tables"),
        (ReadsWithoutGradient, "gradient"),
        (WidensInSecret, "tables"),
        (WidensInWordsAlone, "tables"),
        (NotLocal, "locality"),
        (OddOneOut, "locality"),
        (OddOneOut, "decode"),
        (OddOneOut, "irregular"),
        (NotInvariant, "shift"),
        (InvariantAfterAll, "shift"),
        (WrongGradient, "gradient"),
        (Overflows, "far away"),
        (MoreParameters, "parameters"),
        (HiddenState, "state"),
        (HalfTables, "tables"),
        (SumsInHalfPrecision, "precision"),
        (SeesTheLength, "decode"),
        (MixesRows, "rows"),
        (IgnoresAParameter, "parameters"),
        (Caches, "parameters"),
        (EmbedsTheIndex, "locality"),
        (EmbedsTheFirstRow, "rows"),
        (ChangesOffsets, "locality"),
        (ReadsParametersLate, "gradient"),
        (TurnsHeadsApart, "back ends"),
    ],
)
def test_a_law_catches_what_breaks_it(cls, law):
    name, message = failure(cls)
    assert law in re.findall(r"^  (.+?): ", message, re.MULTILINE)
    assert re.match(rf"{name} breaks \d+ of {len(LAWS)} laws:(.|\n)*  {law}: ", message)


def test_options_missing_from_str_are_caught():
    class Sized(ForgetsOptions):
        def __init__(self, *, size: int = 3, n_heads: int = 2):
            super().__init__(n_heads=n_heads)
            self.extra = nn.Parameter(torch.zeros(size))

    assert "spec" in broken_laws(Sized(size=4))


def test_only_schemes_are_checked():
    with pytest.raises(TypeError, match="check_scheme takes a Scheme, got str"):
        check_scheme("tisa")
