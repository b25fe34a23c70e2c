"""A model is built within the bounds of its weights."""

import threading

import pytest
import torch
from torch import nn

from locant.hf.building import PARTS, PARTS_PER_TENSOR, _few_parts
from locant.hf.checkpoint import Weights
from locant.hf.safetensors_header import Entry


def build(count):
    """Half of the parts are modules, half are parameters."""
    whole, module, parameter = nn.Module(), nn.Module(), nn.Parameter(torch.zeros(1))
    for number in range(count):
        if number % 2:
            whole.register_parameter(f"p{number}", parameter)
        else:
            whole.add_module(f"m{number}", module)


def weights(tensors):
    return Weights(4 * tensors, {f"w{number}": Entry("F32", (1,), 4 * number, 4) for number in range(tensors)})


@pytest.mark.parametrize("tensors", [1, 3])
def test_parts_are_limited_by_the_tensors_of_the_weights(tensors):
    most = PARTS + PARTS_PER_TENSOR * tensors
    with _few_parts(weights(tensors), "folder"):
        build(most)
    message = rf"folder: config\.json .* more than {most:,} parts; the weights have {tensors} tensors"
    with pytest.raises(ValueError, match=message), _few_parts(weights(tensors), "folder"):
        build(most + 1)
    build(most + 1)  # the limit ends with the block


@pytest.mark.parametrize("known", [None, Weights(4, {})], ids=["no weights", "pickled weights"])
def test_weights_without_names_of_tensors_allow_more(known):
    with _few_parts(known, "folder"):
        build(PARTS + 2 * PARTS_PER_TENSOR)


def test_parts_that_another_thread_builds_do_not_count():
    with _few_parts(weights(1), "folder"):
        other = threading.Thread(target=build, args=(PARTS,))
        other.start()
        other.join()
        build(PARTS)
