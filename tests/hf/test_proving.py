"""The proof of a swap."""

import pytest

import locant
from tests.hf_models import make


@pytest.mark.parametrize("spec", ["fox:two_sided=true", "fox:two_sided=true+alibi", "grape:two_sided=true"])
def test_a_scheme_for_both_directions_that_goes_by_the_order_of_tokens_is_proved(spec):
    """fox reads keys and has no use for the numbers of positions; moving the tokens would show nothing."""
    assert str(locant.native(locant.swap(make("bert"), spec))) == f"swapped: {spec}"


@pytest.mark.parametrize("spec", ["fox", "grape"])
def test_a_scheme_for_causal_models_alone_is_proved(spec):
    assert str(locant.native(locant.swap(make("llama"), spec))) == f"swapped: {spec}"
