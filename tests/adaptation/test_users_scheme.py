"""The scheme of docs/new-scheme.md is fitted and adapted as well as ours."""

import pytest
import torch
from transformers import AutoModelForTextEncoding

import locant
from locant.adaptation import fitting, training
from tests import hf_models
from tests.adaptations import adapted, fitted
from tests.test_project import ROOT, python_blocks

WIDTHS = torch.tensor([0.5, 2.0, 6.0, 15.0])


@pytest.fixture(scope="module")
def document():
    """The names that the document defines; its schemes are registered for these tests only."""
    before, maps, names = dict(locant.SCHEMES), dict(locant.schemes.MAPS), {}
    for block in python_blocks(ROOT / "docs" / "new-scheme.md"):
        exec(compile(block, "new-scheme.md", "exec"), names)
    yield names
    locant.SCHEMES.clear()
    locant.SCHEMES.update(before)
    locant.schemes.MAPS.clear()
    locant.schemes.MAPS.update(maps)


def cauchy_model(noise=0.0):
    """A T5 encoder whose bias is −ln(1 + (r/width)²), with a width for each head, plus noise."""
    sizes = {"relative_attention_num_buckets": 128, "relative_attention_max_distance": 256}
    model = hf_models.make("t5", AutoModelForTextEncoding, **sizes)
    own, r = locant.native(model).stacks[0].layers[0], torch.arange(-300, 301)
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # [buckets, H]
    with torch.no_grad():
        table[own.bucket(r)] = -torch.log1p((r[:, None] / WIDTHS) ** 2)
        table += noise * torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    return model


def test_it_is_fitted(document):
    found = fitted(cauchy_model(), "cauchy")
    assert found.explained > 0.95
    assert all(head.explained > 0.5 for head in found.heads)


def test_it_is_adapted(document):
    done = adapted(cauchy_model(noise=0.5), "cauchy", budget="40steps")
    original, silenced, after_fit, after = (row.agreement for row in done.rows)
    assert original > after > after_fit > silenced
    assert done.fit.explained > 0.6
    assert 1 - after < 0.3 * (1 - silenced)


def test_its_own_scale_and_start_make_the_fit_better(document):
    """With the methods that the document adds, the fit finds the widths themselves."""
    model = cauchy_model()
    assert fitted(model, "fittedcauchy").explained > 0.999 > fitted(cauchy_model(), "cauchy").explained
    for scheme in locant.native(model).stacks[0].layers:
        torch.testing.assert_close(scheme.width, WIDTHS, rtol=1e-2, atol=0)


class Coarse(locant.Scheme):
    """The document's scheme with its width in units of a millionth: a badly scaled parameter."""

    UNIT = 1e-6

    def __init__(self, *, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.width = torch.nn.Parameter(torch.full((n_heads,), 8.0 / self.UNIT))

    def terms(self, r):
        return locant.Terms(bias=-torch.log1p((r / (self.UNIT * self.width[:, None])) ** 2))

    def parameter_count(self):
        return self.n_heads


class Scaled(Coarse):
    def parameter_scale(self, name):
        return self.width.detach().abs()


@pytest.fixture
def registered():
    locant.SCHEMES.update(coarse=Coarse, scaled=Scaled)
    yield
    del locant.SCHEMES["coarse"], locant.SCHEMES["scaled"]


@pytest.mark.usefixtures("registered")
def test_a_badly_scaled_parameter_is_fitted_by_its_own_scale():
    coarse, scaled = (fitted(cauchy_model(), spec).explained for spec in ("coarse", "scaled"))
    assert coarse < 0.3
    assert scaled > 0.95


@pytest.mark.usefixtures("registered")
def test_a_badly_scaled_parameter_is_trained_by_its_own_scale(monkeypatch):
    monkeypatch.setattr(fitting, "ITERATIONS", 0)  # training alone
    monkeypatch.setattr(training, "SCHEME_RATE", 0.1)
    gains = {}
    for spec in ("coarse", "scaled"):
        rows = adapted(cauchy_model(), spec, budget="40steps", train="scheme").rows
        gains[spec] = rows[3].agreement - rows[2].agreement
    assert gains["coarse"] < 0.1 * gains["scaled"]
    assert gains["scaled"] > 0.003
