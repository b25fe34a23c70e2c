"""The options of every scheme: defaults, the values that are refused, and where the parameters start."""

import math

import pytest

import locant
from locant.schemes import SCHEMES
from locant.schemes.base import DIMS

DEFAULTS = {
    "nope": {},
    "learned": {"length": 512},
    "sinusoidal": {"theta": 10000, "amplitude": 1},
    "first": {},
    "shaw": {"clip": 64, "heads": "shared", "values": True},
    "xl": {"theta": 10000},
    "huang1": {"clip": 64, "heads": "own"},
    "huang2": {"clip": 64, "heads": "own"},
    "huang3": {"clip": 64, "heads": "shared"},
    "huang4": {"clip": 64, "heads": "shared"},
    "tisa": {"kernels": 5},
    "tisa2": {"kernels": 21, "min_field": 16, "max_field": 1024, "free": 0},
    "t5": {"buckets": 32, "max_distance": 128, "bidirectional": True},
    "toeplitz": {"clip": 128},
    "alibi": {"slopes": "fixed", "scaled": False, "rounding": "none"},
    "rope": {
        "theta": 10000, "layout": "half", "partial": 1, "scaling": "none", "factor": 1, "original": 2048,
        "beta_fast": 32, "beta_slow": 1, "low": 1, "high": 4, "first": 0, "attention_factor": None, "truncate": True,
    },
    "xpos": {"theta": 10000, "base": 512, "gamma": 0.4, "layout": "interleaved"},
    "kerple": {"kind": "log"},
    "sandwich": {"width": 128, "theta": 10000},
    "fire": {"width": 32, "length": 512},
    "cope": {"positions": 64, "heads": "shared"},
    "deberta": {"buckets": 256, "max_distance": 512, "spacing": "log", "products": "both"},
    "inkling": {"extent": 1024, "width": 16, "alpha": 0, "n0": 0},
    "fox": {"two_sided": False},
    "grape": {"two_sided": False},
    "pope": {"theta": 10000},
    "fade": {},
    "logn": {"n0": 512, "learned": False},
    "local": {"window": 128, "first": True},
    "fope": {"theta": 10000, "length": 512, "spread": 0.3, "seed": 0, "heads": "own", "rest": "still"},
    "dape": {"bias": "alibi", "width": 32},
}  # fmt: skip
SIZES = {"n_heads": 4, "head_dim": 8, "d_model": 32}


def make(name, **options):
    sizes = {dim: size for dim, size in SIZES.items() if dim in SCHEMES[name].arguments()}
    return SCHEMES[name](**{**sizes, **options})


@pytest.mark.parametrize("name", SCHEMES)
def test_defaults(name):
    """A saved spec leaves defaults out, so a change of one changes every saved model."""
    found = {option: parameter.default for option, parameter in SCHEMES[name].arguments().items() if option not in DIMS}
    assert {option: value for option, value in found.items() if option not in ("args", "kwargs")} == DEFAULTS[name]


LEAST = [
    *((name, "n_heads", 1) for name in SCHEMES if "n_heads" in SCHEMES[name].arguments()),
    *((name, "head_dim", 1) for name in ("shaw", "xl", "huang3", "huang4", "cope", "deberta", "grape", "pope")),
    *((name, "head_dim", 2) for name in ("rope", "xpos", "fope")),
    *((name, "d_model", 1) for name in ("learned", "first", "inkling", "fox")),
    *((name, "d_model", 2) for name in ("sinusoidal", "xl")),
    *((name, "clip", 1) for name in ("shaw", "huang1", "huang2", "huang3", "huang4")),
    ("toeplitz", "clip", 0),
    ("learned", "length", 1),
    ("tisa", "kernels", 0),
    ("tisa2", "kernels", 0),
    ("tisa2", "free", 0),
    ("sandwich", "width", 2),
    ("fire", "width", 1),
    ("fire", "length", 1),
    ("cope", "positions", 2),
    ("deberta", "buckets", 4),
    ("deberta", "max_distance", 130),  # buckets // 2 + 2
    ("t5", "buckets", 4),
    ("t5", "max_distance", 9),  # buckets // 4 + 1
    ("rope", "original", 1),
    ("inkling", "extent", 1),
    ("inkling", "width", 1),
    ("inkling", "n0", 0),
    ("logn", "n0", 2),
    ("local", "window", 0),
    ("fope", "length", 7),
    ("fope", "seed", 0),
    ("dape", "width", 1),
]


@pytest.mark.parametrize(("name", "option", "least"), LEAST)
def test_whole_numbers_from_the_least_on(name, option, least):
    assert make(name, **{option: least}) is not None
    for value in (least - 1, float(least), True, None, str(least)):
        with pytest.raises(ValueError, match=f"{name}: {option} must be a whole number ≥ {least}, got"):
            make(name, **{option: value})


POSITIVE = [
    *((name, "theta") for name in ("sinusoidal", "xl", "rope", "xpos", "sandwich", "pope", "fope")),
    *(("rope", option) for option in ("partial", "factor", "beta_fast", "beta_slow", "low", "high")),
    ("sinusoidal", "amplitude"),
    ("xpos", "base"),
    ("xpos", "gamma"),
    ("tisa2", "min_field"),
    ("tisa2", "max_field"),
    ("fope", "spread"),
]


@pytest.mark.parametrize(("name", "option"), POSITIVE)
def test_numbers_above_zero(name, option):
    for value in (0, -1.0, math.inf, math.nan, True, "1", None):
        with pytest.raises(ValueError, match=f"{name}: {option} must be a finite number > 0, got"):
            make(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "option", "choices"),
    [
        *((name, "heads", ("shared", "own")) for name in ("shaw", "huang1", "huang2", "huang3", "huang4", "cope")),
        ("alibi", "slopes", ("fixed", "learned")),
        ("alibi", "scaled", (True, False)),
        ("alibi", "rounding", ("none", "bfloat16")),
        ("deberta", "spacing", ("log", "linear")),
        ("deberta", "products", ("both", "c2p", "p2c")),
        ("kerple", "kind", ("log", "power")),
        ("rope", "layout", ("half", "interleaved")),
        ("xpos", "layout", ("half", "interleaved")),
        ("rope", "scaling", ("none", "linear", "ntk", "dynamic", "yarn", "llama3", "table", "longrope")),
        ("rope", "truncate", (True, False)),
        ("t5", "bidirectional", (True, False)),
        ("shaw", "values", (True, False)),
        *((name, "two_sided", (True, False)) for name in ("fox", "grape")),
        ("logn", "learned", (True, False)),
        ("local", "first", (True, False)),
        ("fope", "heads", ("own", "shared")),
        ("fope", "rest", ("still", "turned")),
        ("dape", "bias", ("alibi", "kerple")),
    ],
)
def test_choices(name, option, choices):
    assert all(getattr(make(name, **{option: choice}), option) == choice for choice in choices)
    for value in ("XX", None, 1):
        with pytest.raises(ValueError, match=f"{name}: {option} must be "):
            make(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sinusoidal", {"d_model": 7}, "d_model must be even"),
        ("xl", {"d_model": 7}, "d_model must be even"),
        ("sandwich", {"width": 7}, "width must be even"),
        ("xpos", {"head_dim": 7}, "head_dim must be even"),
        ("rope", {"head_dim": 7}, "must be even"),
        ("fope", {"head_dim": 7}, "head_dim must be even"),
        ("inkling", {"alpha": 0.1}, "needs alpha and n0"),
        ("rope", {"partial": 1.01}, "must be at most 1"),
        ("rope", {"partial": 0.1}, "nothing to rotate"),
        ("rope", {"low": 4.0}, "high must be above low"),
        ("rope", {"factor": 2.0}, "does nothing without scaling"),
        ("rope", {"first": 1}, "8 rotated coordinates from coordinate 1 on do not fit into head_dim = 8"),
        ("rope", {"first": -1}, "first must be a whole number ≥ 0"),
        ("rope", {"attention_factor": 0.0}, "attention_factor must be a finite number > 0"),
        ("rope", {"scaling": "ntk", "factor": 2.0, "head_dim": 2}, "at least 4 rotated"),
        ("rope", {"scaling": "dynamic", "factor": 2.0, "head_dim": 2}, "at least 4 rotated"),
        ("t5", {"buckets": 7}, "must be even, half of them for r > 0; got 7"),
        ("t5", {"buckets": 2}, "buckets must be a whole number ≥ 4, got 2"),
        ("t5", {"buckets": 1, "bidirectional": False}, "≥ 2, got 1"),
        ("t5", {"max_distance": 16, "bidirectional": False}, "≥ 17, got 16"),
        ("tisa2", {"free": 5}, "at most n_heads = 4"),
        ("alibi", {"slopes": "learned", "rounding": "bfloat16"}, "cannot be trained through rounding"),
        ("deberta", {"spacing": "linear", "max_distance": 9}, "does nothing with spacing=linear"),
        ("deberta", {"spacing": "linear", "buckets": 0}, "≥ 1, got 0"),
        ("tisa2", {"min_field": 1025.0}, "at most max_field = 1024"),
    ],
)
def test_options_that_do_not_go_together(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("t5", {"buckets": 2, "max_distance": 2, "bidirectional": False}),
        ("t5", {"buckets": 8, "max_distance": 3}),
        ("tisa2", {"free": 4}),
        ("tisa2", {"min_field": 1024.0}),
        ("rope", {"head_dim": 2, "scaling": "linear", "factor": 2.0}),
        ("rope", {"head_dim": 4, "scaling": "ntk", "factor": 2.0}),
        ("rope", {"low": 3.0}),
        ("rope", {"partial": 0.25}),
        ("rope", {"partial": 0.25, "first": 6}),
    ],
)
def test_options_at_the_edge_of_what_goes_together(name, options):
    assert make(name, **options) is not None


STARTS = {
    "learned": {"table": (0, 0.02)},
    "first": {"first": (0, 0.02), "rest": (0, 0.02)},
    "shaw": {"table": (0, 0.02), "value_table": (0, 0.02)},
    "xl": {"project": (0, 0.02), "content_bias": (0, 0), "position_bias": (0, 0)},
    "huang1": {"table": (1, 0)},
    "huang2": {"table": (1, 0)},
    "huang3": {"table": (1, 0)},
    "huang4": {"table": (0, 0.02)},
    "tisa": {"amplitude": (0.1, 0.01), "sharpness": (0.1, 0.01), "offset": (0, 5)},
    "tisa2": {"amplitude": (0, 0.01), "sharpness": (5, 0), "offset": (0, 15), "bias": (1, 0)},
    "t5": {"table": (0, 0.02)},
    "toeplitz": {"table": (0, 0.02)},
    "kerple": {"p": (1, 2 / math.sqrt(12)), "a": (0.5, 1 / math.sqrt(12))},
    "cope": {"table": (0, 0)},
    "deberta": {"key_table": (0, 0.02), "query_table": (0, 0.02)},
    "inkling": {"project": (0, 0.02), "profiles": (0, 0.02)},
    "pope": {"phase": (0, 0)},
}
"""Scheme -> parameter -> mean and standard deviation."""


@pytest.mark.parametrize("name", STARTS)
def test_where_parameters_start(name):
    scheme = locant.scheme(name, n_heads=400, head_dim=4, d_model=400)
    found = dict(scheme.named_parameters())
    assert found.keys() == STARTS[name].keys()
    for parameter, (mean, spread) in STARTS[name].items():
        values = found[parameter].detach().flatten()
        n = values.numel()  # 5 standard errors are allowed
        assert values.mean().item() == pytest.approx(mean, abs=5 * spread / math.sqrt(n) + 1e-6)
        assert (values - mean).square().mean().sqrt().item() == pytest.approx(
            spread, rel=5 / math.sqrt(2 * n), abs=1e-6
        )


def test_fire_starts_at_its_paper_s_values():
    scheme = make("fire")
    assert scheme.c.item() == pytest.approx(0.1)
    assert scheme.threshold.item() == 1.0
