"""Rotary settings of a config, as options of RoPE."""

from types import SimpleNamespace

import pytest

from locant.hf.rope_settings import closed_forms, lengths_of, options_of

OPTIONS = {"theta": 10000.0, "layout": "half", "partial": 1.0, "head_dim": 8}


def config(parameters, **rest):
    return SimpleNamespace(rope_parameters=parameters, **rest)


def test_options_of_a_measurement():
    turn = SimpleNamespace(layout="half", pairs=2, first=0)
    assert options_of(turn, 1.0, 8) == {**OPTIONS, "partial": 0.5}
    assert options_of(turn, 1 + 1e-7, 8) == {**OPTIONS, "partial": 0.5}
    turn = SimpleNamespace(layout="pairs", pairs=4, first=3)
    wanted = {**OPTIONS, "layout": "pairs", "first": 3, "attention_factor": 1.25}
    assert options_of(turn, 1.25, 8) == wanted


@pytest.mark.parametrize(
    ("parameters", "rest", "theta"),
    [
        ({"rope_theta": 500.0}, {"rope_theta": 7.0}, 500.0),
        ({}, {"rope_theta": 700}, 700.0),
        ({"rope_theta": None}, {}, 10000.0),
        (None, {}, 10000.0),
    ],
)
def test_theta_is_that_of_the_settings_or_else_of_the_config(parameters, rest, theta):
    (found,) = closed_forms(config(parameters, **rest), "", OPTIONS, 1.0)
    assert (found.theta, found.scaling, found.head_dim) == (theta, "none", 8)


@pytest.mark.parametrize(
    ("parameters", "rest", "expected"),
    [
        ({"rope_type": "default", "factor": 3.0}, {}, {"scaling": "none"}),
        ({"rope_type": "linear", "factor": 4.0}, {}, {"scaling": "linear", "factor": 4.0}),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9},
            {"max_position_embeddings": 64},
            {"scaling": "dynamic", "factor": 2.0, "original": 64},
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.5,
             "original_max_position_embeddings": 32},
            {},
            {"scaling": "llama3", "factor": 8.0, "low": 1.5, "high": 4.5, "original": 32},
        ),
    ],
)  # fmt: skip
def test_scalings(parameters, rest, expected):
    (found,) = closed_forms(config(parameters, **rest), "", OPTIONS, 1.0)
    assert {name: getattr(found, name) for name in expected} == expected


def test_yarn():
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0}
    (found,) = closed_forms(config(parameters, max_position_embeddings=128), "", OPTIONS, 1.0)
    assert (found.scaling, found.factor, found.original) == ("yarn", 4.0, 32)
    assert (found.beta_fast, found.beta_slow, found.truncate) == (16.0, 2.0, True)
    assert found.magnitude() == pytest.approx(1.0)  # as measured; its own would be 0.1 · log 4 + 1
    own = 1.138629436
    (found,) = closed_forms(config({**parameters, "factor": 4.0, "truncate": False}), "", OPTIONS, own)
    assert found.truncate is False
    assert found.magnitude() == pytest.approx(own)
    (same,) = closed_forms(config({**parameters, "factor": 4.0}), "", {**OPTIONS, "attention_factor": own}, own)
    assert "attention_factor" not in str(same)  # it follows from the other options
    (found,) = closed_forms(config({**parameters, "factor": 4.0}), "", {**OPTIONS, "attention_factor": 0.5}, 0.5)
    assert found.magnitude() == pytest.approx(0.5)


def test_settings_of_a_layer_type_or_of_all():
    parameters = {"full": {"rope_theta": 100.0}, "sliding": {"rope_theta": 200.0}}
    assert [rope.theta for rope in closed_forms(config(parameters), "sliding", OPTIONS, 1.0)] == [200.0]
    assert [rope.theta for rope in closed_forms(config(parameters), "other", OPTIONS, 1.0)] == [100.0, 200.0]


def test_what_has_no_closed_form_is_left_out():
    parameters = {
        "a": {"rope_type": "longrope", "factor": 2.0},
        "b": {"rope_type": "unheard-of", "factor": 2.0},
        "c": {"rope_type": "linear", "factor": -1.0},
        "d": {"rope_theta": 300.0},
    }
    assert [rope.theta for rope in closed_forms(config(parameters), "", OPTIONS, 1.0)] == [300.0]


def test_lengths_at_which_a_scaling_begins():
    inner = {"full": {"original_max_position_embeddings": 64}, "sliding": {"original_max_position_embeddings": 32}}
    assert lengths_of(config(inner, max_position_embeddings=128), "full") == [64, 128]
    assert lengths_of(config(inner), "") == [32, 64]
    assert lengths_of(config({}, max_position_embeddings=1, original_max_position_embeddings=16), "") == [16]
    assert lengths_of(config(None, max_position_embeddings=2), "") == [2]
    assert lengths_of(config(None), "") == lengths_of(config(None, max_position_embeddings="8"), "") == [4096]
