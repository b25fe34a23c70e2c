"""torch.compile: one graph for all lengths, one for decoding with a growing cache."""

import pytest
import torch

import locant
from locant.attention import eager
from tests import cases

LENGTHS = (7, 12, 40, 33)  # below and above the number of queries that counts as decoding
MASKS = {
    "none": lambda b, n: None,
    "keys": lambda b, n: torch.rand(b, n) > 0.3,
    "queries": lambda b, n: torch.rand(n, n) > 0.3,
    "pairs": lambda b, n: torch.rand(b, 1, n, n) > 0.3,
}


class Counting:
    """A function compiled as one graph per call, and the number of graphs."""

    def __init__(self, function, dynamic=True):
        torch.compiler.reset()
        self.graphs = 0
        self.run = torch.compile(function, backend=self.backend, fullgraph=True, dynamic=dynamic)

    def backend(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


def sizes(lq, lk=None):
    return cases.tensors(b=3, lq=lq, lk=lk or lq, dtype=torch.float32)


def scheme_of(spec):
    return cases.build(spec).float().requires_grad_()


@pytest.mark.parametrize(
    ("spec", "mask", "causal"),
    [
        ("tisa", "keys", False),
        ("tisa", "none", True),
        ("tisa", "queries", False),
        ("tisa", "pairs", True),
        ("nope", "none", True),
        ("rope", "keys", False),
        ("t5", "keys", True),
        ("huang4:clip=3", "pairs", False),
        ("cope", "keys", True),
    ],
)
def test_one_graph_for_all_lengths(spec, mask, causal):
    scheme = scheme_of(spec)

    def run(q, k, v, mask):
        return locant.attend(q, k, v, scheme, mask=mask, causal=causal)

    compiled = Counting(run)
    for length in LENGTHS:
        given = (*sizes(length), MASKS[mask](3, length))
        torch.testing.assert_close(compiled.run(*given), run(*given))
    assert compiled.graphs == 1


def test_one_more_graph_without_dynamic():
    """torch compiles the first size by itself, and the second one for all sizes."""
    scheme = scheme_of("tisa")

    def run(q, k, v, mask):
        return locant.attend(q, k, v, scheme, mask=mask)

    compiled = Counting(run, dynamic=None)
    for length in LENGTHS:
        given = (*sizes(length), MASKS["keys"](3, length))
        torch.testing.assert_close(compiled.run(*given), run(*given))
    assert compiled.graphs == 2


@pytest.mark.parametrize(
    ("spec", "grad"),
    [
        *zip(["nope", "rope", "tisa", "t5"], [False, True] * 2, strict=True),
        *(
            pytest.param(spec, grad, marks=pytest.mark.slow)
            for spec, grad in zip(["nope", "rope", "tisa", "t5"], [True, False] * 2, strict=True)
        ),
    ],
)
def test_one_graph_for_a_growing_cache(spec, grad):
    scheme = scheme_of(spec)

    def run(q, k, v, mask):
        return locant.attend(q, k, v, scheme, mask=mask, causal=True)

    compiled = Counting(run)
    with torch.set_grad_enabled(grad):
        for keys in (5, 6, 7, 40, 200):  # 200: beyond the reach of t5
            given = (*sizes(1, keys), MASKS["keys"](3, keys))
            torch.testing.assert_close(compiled.run(*given), run(*given))
    assert compiled.graphs == 1


def test_a_wrong_mask_is_named_while_compiling():
    compiled = Counting(lambda q, k, v, mask: locant.attend(q, k, v, mask=mask))
    with pytest.raises(Exception, match="mask must be"):
        compiled.run(*sizes(9), torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(Exception, match=r"could be .batch, keys. or .queries, keys."):
        compiled.run(*cases.tensors(b=9, lq=9, lk=9, dtype=torch.float32), torch.ones(9, 9, dtype=torch.bool))


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 2)])
def test_eager_of_large_calls(dynamic, graphs, monkeypatch):
    """One graph for all lengths. A graph for one length computes slices of the queries, as without the compiler."""
    scheme, given = scheme_of("tisa"), [sizes(length) for length in (7, 12)]

    def run(q, k, v):
        return locant.attend(q, k, v, scheme, causal=True, impl="eager")

    plain = [run(*each) for each in given]
    monkeypatch.setattr(eager, "CHUNK", 3 * 4 * 12 * 5)  # batch · heads · 12 keys · 5 queries
    compiled = Counting(run, dynamic)
    for each, expected in zip(given, plain, strict=True):
        torch.testing.assert_close(compiled.run(*each), expected)
    assert compiled.graphs == graphs
