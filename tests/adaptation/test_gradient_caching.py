"""Gradient caching: the gradients of a plain backward pass, at the memory of one text."""

import random
import weakref
from contextlib import contextmanager

import pytest
import torch

import locant
from locant.adaptation.contrast import Documents, info_nce, vectors
from locant.adaptation.gradient_caching import cached_backward
from locant.adaptation.running_text import RunningText
from locant.hf.pooling import Pooling
from tests import hf_models, words
from tests.adaptations import TOKENS

POOLING = Pooling()


class Setting:
    """A tiny encoder in float64, documents that it reads one at a time, and a contrastive loss."""

    def __init__(self, count: int) -> None:
        self.model = hf_models.make("bert").double().eval()
        locant.swap(self.model, "tisa:kernels=3")
        found = RunningText(TOKENS, words.text(400), 64).draw(random.Random(0), 4, 4)[:count]
        made = Documents(found, TOKENS)
        rows = [
            (ids[None, :length], mask[None, :length])
            for batch in made.documents
            for ids, mask, length in zip(
                batch["input_ids"], batch["attention_mask"], batch["attention_mask"].sum(1).tolist(), strict=True
            )
        ]
        self.documents = [{"input_ids": ids, "attention_mask": mask} for ids, mask in rows]
        self.owners = made.owners
        self.queries = torch.cat([vectors(self.model, POOLING, batch) for batch in made.queries]).detach()

    def encode(self, batch):
        return vectors(self.model, POOLING, batch)

    def loss(self, found):
        return info_nce(found, self.queries, self.owners)

    def plain(self):
        value = self.loss(torch.cat([self.encode(batch) for batch in self.documents]))
        value.backward()
        return value.detach()

    def cached(self):
        return cached_backward(self.encode, self.documents, self.loss)


def gradients(setting, backward):
    setting.model.zero_grad()
    value = backward()
    return value, {name: weight.grad.clone() for name, weight in setting.model.named_parameters()
                   if weight.grad is not None}  # fmt: skip


def test_gradients_equal_those_of_a_plain_backward_pass():
    setting = Setting(12)
    value, plain = gradients(setting, setting.plain)
    again, cached = gradients(setting, setting.cached)
    assert float(again) == pytest.approx(float(value), rel=1e-12)
    assert plain.keys() == cached.keys()
    assert max(float(each.abs().max()) for each in plain.values()) > 1e-3
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, rtol=1e-9, atol=1e-12)


@contextmanager
def graph_bytes():
    """Yields a list whose last entry is the largest number of bytes that graphs have held at once."""
    live, most = [0], [0]

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor
            live[0] += tensor.nbytes
            most[0] = max(most[0], live[0])
            weakref.finalize(self, free, tensor.nbytes)

    def free(count):
        live[0] -= count

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        yield most


def test_memory_is_that_of_one_document():
    peaks = {}
    for count in (4, 12):
        setting = Setting(count)
        setting.documents = setting.documents[-1:] * count  # of equal length
        for name in ("plain", "cached"):
            with graph_bytes() as most:
                gradients(setting, getattr(setting, name))
            peaks[name, count] = most[0]
    assert peaks["plain", 12] > 2.5 * peaks["plain", 4]
    assert peaks["cached", 12] < 1.1 * peaks["cached", 4]
    assert peaks["cached", 12] < peaks["plain", 12] / 8
