"""The claims of Chi et al. 2023: their numbers, their verdicts, and a tiny reproduction from beginning to end."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest
import torch

from locant.analysis.steps import ATTENTION
from locant.analysis.variance import CORRECTED, MEASURED, PLAIN, VarianceRow, Variances
from locant.experiments.comparison import open_folder
from locant.experiments.run import load_setting
from locant.experiments.tasks import find_task
from locant.papers import bigrams, reproduction
from locant.papers.place import Place
from locant.papers.random_models import CompareWithTwin, RandomShape, compare, octaves
from locant.papers.rules import CONFIRMED, CONTRADICTED, NOT_SHOWN
from locant.papers.small_models import SINES
from locant.papers.traces import Bigrams, Probing, Windows, attention_rows, layer_of
from locant.papers.variance import PAPER, Sizes
from locant.papers.variance_steps import comparing, reading, tracing, training, twins
from locant.papers.variance_tables import difference_table, shown, skill, slopes
from locant.report.papers.variance import FIGURES
from tests.hf.test_llama2c import weights, words
from tests.hf.test_llama2c import write as write_llama

CLAIMS = {claim.id: claim for claim in PAPER.claims}
TINY = Sizes(
    models=2, random=RandomShape(2, 2, 16, 8, 500), theory=RandomShape(2, 2, 16, 8, 500),
    probing=Probing(batch=4, steps=3, tests=1, seeds=1), sequences=8, windows=16,
    seeds=2, layers=2, heads=2, width=16, length=8, batch=4, vocabulary=300, rate=1e-3,
    causal_steps=8, masked_steps=4, evaluated=256, kept=2, adapt_steps=2, adapt_length=8,
)  # fmt: skip


# ---- numbers ----


def test_bigrams_against_the_formula_written_out():
    train = np.array([0, 1, 0, 1, 0, 2, 0, 1, 3, 0])
    pairs = list(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
    kinds = set(pairs)
    n1, n2 = (sum(pairs.count(kind) == times for kind in kinds) for times in (1, 2))
    discount = n1 / (n1 + 2 * n2)

    def p(word, before, size=5):
        lower = (sum(b == word for _, b in kinds) + 1) / (len(kinds) + size)
        total = sum(a == before for a, _ in pairs)
        if not total:
            return lower
        followers = sum(a == before for a, _ in kinds)
        return (max(pairs.count((before, word)) - discount, 0) + discount * followers * lower) / total

    for before in range(5):  # token 4 was never seen
        assert sum(p(word, before) for word in range(5)) == pytest.approx(1)
        for word in range(5):
            found = bigrams.cross_entropy(train, np.array([before]), np.array([word]), 5)
            assert found == pytest.approx(-math.log(p(word, before))), (before, word)


def test_bigrams_know_that_order_matters():
    train = np.arange(1000) % 7
    forward = bigrams.cross_entropy(train, train[:50], train[1:51], 7)
    backward = bigrams.cross_entropy(train, train[1:51], train[:50], 7)
    assert forward < 0.1 < 1 < backward


def row(values, source=MEASURED, layer=1, step=ATTENTION):
    return VarianceRow(layer, step, source, tuple(values))


def test_attention_rows_have_the_slope_of_their_layer():
    falling, flat = [1 / m for m in range(1, 33)], [0.3] * 32
    table = Variances((row(flat, layer=2), row([2.0] * 32, step="residual"), row(falling)))
    found = attention_rows(table)
    assert [each["layer"] for each in found] == [2, 1]
    assert slopes(found) == pytest.approx([-1, 0])  # in the order of the layers
    kinked = [5.0, *[1.0] * 31]  # a special first token alone
    (only,) = attention_rows(Variances((row(kinked),)))
    assert only["slope"] < -0.1
    assert only["later slope"] == pytest.approx(0)


def test_errors_are_of_the_theory_relative_to_the_measurement():
    measured = Variances((row([1.0, 0.5, 99, 0.25]),))
    predicted = Variances((row([0.9, 0.45, 1, 0.225], PLAIN), row([1.1, 0.55, 1, 0.275], CORRECTED)))
    found = compare(measured, predicted, octaves(4))
    assert found["positions"] == [1, 2, 4]  # position 3, where all is different, is not one of them
    assert found["rows"][0]["plain error"] == pytest.approx(-0.1)
    assert found["rows"][0]["corrected error"] == pytest.approx(0.1)
    assert found["rows"][0]["measured"] == [1.0, 0.5, 0.25]


def test_what_a_probe_reads_is_the_share_of_the_constant_guess():
    probes = [{"layer": 0, "error": 8, "constant": 8}, {"layer": 2, "error": 6, "constant": 8}]
    assert skill(probes, 2) == 0.25
    assert skill(probes, 0) == 0
    assert skill([{"layer": 1, "error": 9, "constant": 8}], 1) == 0


@pytest.mark.parametrize(("place", "layer"), [("embeddings", 0), ("layer 12", 12), ("layer 3 attention", None)])
def test_only_whole_layers_are_probed(place, layer):
    assert layer_of(place) == layer


def test_the_variance_of_a_twin_is_flat_and_that_of_its_model_falls():
    measured = CompareWithTwin(RandomShape(2, 2, 64, 32, 5000), sequences=64, seed=3)(None)
    causal, bidirectional = ([row["slope"] for row in measured[name]] for name in ("causal", "bidirectional"))
    assert causal[0] == pytest.approx(-1, abs=0.1)
    assert causal[1] < -0.1
    assert max(map(abs, bidirectional)) < 0.03
    first, last = (measured[name][0]["values"][-1] for name in ("causal", "bidirectional"))
    assert first == pytest.approx(last, rel=0.05)  # the last token sees all tokens in both


def test_windows_of_testing_are_of_the_other_text_and_fresh():
    windows = Windows(torch.arange(100), torch.arange(1000, 1100), length=10, count=20, seed=0)
    for number in (0, 3, -1):
        found = windows(number)
        assert found.shape == (20, 10)
        assert (found.diff(dim=1) == 1).all()
        assert (found < 1000).all() == (number >= 0)
    assert torch.equal(windows(3), windows(3))
    assert not torch.equal(windows(3), windows(4))
    assert not torch.equal(windows(3), dataclasses.replace(windows, seed=1)(3))
    assert {int(first) for number in range(40) for first in windows(number)[:, 0]} == set(range(91))  # the last too


def test_differences_are_paired_by_seed():
    table = difference_table({"learned": {0: 4.0, 1: 5.0}, "nope": {1: 5.5, 0: 4.25}}, "learned")
    assert [each[:3] for each in table.rows] == [["nope", "mean", 0.375], ["nope", 0, 0.25], ["nope", 1, 0.5]]


def test_positions_of_a_figure_end_at_the_last():
    assert shown(8) == [1, 2, 3, 4, 6, 8]
    assert shown(100)[-2:] == [91, 100]


# ---- verdicts ----


@pytest.fixture
def at(tmp_path):
    """A place whose steps can be invented."""
    return Place(tmp_path, tmp_path, None, dataclasses.replace(TINY, models=5, seeds=3, adapt_steps=0))


def put(at, steps, content):
    """Writes what the steps measured; `content` gets the seed."""
    for seed, step in enumerate(steps):
        path = at.mark(step.name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"done": True, "seconds": 1.0, "numbers": content(seed)}))


def probed(share, seed=0, layers=2):
    """Errors of probes that read this share after the embeddings."""
    return [
        {"layer": layer, "error": 2 * (1 - share * (layer > 0)) + 0.001 * seed, "constant": 2.0, "shuffled": 2.01}
        for layer in range(layers + 1)
    ]


def falling(slope, seed=0, layers=2):
    """Variances with one slope in all layers, and nearly so in each seed."""
    near = slope + 0.001 * seed
    return [
        {"layer": n, "values": [m**near for m in range(1, 9)], "slope": near, "later slope": near}
        for n in range(1, layers + 1)
    ]


def verdict(claim, at):
    found = CLAIMS[claim].measure(at)
    for figure in FIGURES[claim](found):
        assert figure.title
        assert figure.note
    return CLAIMS[claim].verdict(found)


def random_models(own, twin):
    return lambda seed: {"probes": probed(own, seed), "twin": probed(twin, seed)}


def random_twins(slope):
    return lambda seed: {"causal": falling(-0.5, seed), "bidirectional": falling(slope, seed)}


@pytest.mark.parametrize(
    ("own", "twin", "expected"),
    [(0.3, 0.0, CONFIRMED), (0.3, 0.3, CONTRADICTED), (0.05, 0.0, NOT_SHOWN), (-0.2, 0.0, NOT_SHOWN)],
)
def test_b1(at, own, twin, expected):
    put(at, reading(at), random_models(own, twin))
    assert verdict("B1", at) == expected


@pytest.mark.parametrize(
    ("slope", "plain", "corrected", "expected"),
    [
        (-1.0, -0.1, 0.02, CONFIRMED),
        (-0.5, -0.1, 0.02, CONTRADICTED),
        (1.0, -0.1, 0.02, CONTRADICTED),
        (-1.0, 0.6, 0.02, CONTRADICTED),
        (-1.0, -0.1, -0.3, CONTRADICTED),
    ],
)
def test_b2(at, slope, plain, corrected, expected):
    def content(seed):
        errors = {"plain error": plain + 0.001 * seed, "corrected error": corrected + 0.001 * seed}
        values = {"measured": [1.0, 0.5], "plain": [1.0, 0.5], "corrected": [1.0, 0.5], **errors}
        made = [
            {"layer": 1, "step": "value", **values},
            {"layer": 1, "step": ATTENTION, **values, "slope": slope + 0.001 * seed, "theory slope": -1.0},
            # The paper's theory is not for the second layer: its error there decides nothing.
            {"layer": 2, "step": ATTENTION, **values, "plain error": -0.9, "slope": -0.2, "theory slope": -0.2},
        ]
        return {"positions": [1, 2], "rows": made}

    put(at, comparing(at), content)
    assert verdict("B2", at) == expected


def trained(at, monkeypatch, losses, bigram=5.0):
    """Invents the test losses: scheme -> loss; seeds differ by 0.001."""
    monkeypatch.setattr(
        type(training(at, "clm", "nope")),
        "scores",
        lambda self, at: {s: {n: losses[self.task][s] + 0.001 * n for n in range(3)} for s in self.schemes},
    )
    put(at, [type("Step", (), {"name": "variance-bigrams"})], lambda seed: {"loss": bigram})


LOSSES = {
    "clm": {"learned": 4.50, "nope": 4.52, SINES: 4.5, "alibi": 4.4, "rope": 4.4},
    "mlm": {"learned": 4.0, "nope": 6.0, SINES: 4.0, "alibi": 6.0},
}


@pytest.mark.parametrize(
    ("slope", "read", "bigram", "expected"),
    [
        (-0.3, 0.4, 5.0, CONFIRMED),
        (0.3, 0.4, 5.0, CONTRADICTED),
        (-0.3, -0.2, 5.0, NOT_SHOWN),  # a probe that was trained too little
        (-0.01, 0.4, 5.0, NOT_SHOWN),
        (-0.3, 0.4, 4.0, NOT_SHOWN),  # no better than bigrams
        (0.3, 0.4, 4.0, NOT_SHOWN),  # so nothing is contradicted either
    ],
)
def test_b3(at, monkeypatch, slope, read, bigram, expected):
    trained(at, monkeypatch, LOSSES, bigram)
    for scheme in ("nope", "rope", "learned"):
        own = scheme == "nope"  # the others, and the model before training, are of the opposite kind: they do not count

        def content(seed, own=own):
            start = {"step": 0, "theory": [[1.0] * 8] * 2, "variance": falling(-slope), "probes": probed(-read)}
            end = {"variance": falling(slope if own else -slope, seed), "probes": probed(read if own else -read, seed)}
            return {"points": [start, {"step": 4, "theory": [], **end}]}

        put(at, tracing(at, "clm", scheme), content)
    assert verdict("B3", at) == expected


@pytest.mark.parametrize(
    ("random_slope", "trained_slope", "read", "expected"),
    [
        (0.0, 0.0, 0.0, CONFIRMED),
        (-0.5, 0.0, 0.0, CONTRADICTED),
        (0.0, 0.5, 0.0, CONTRADICTED),
        (0.0, 0.0, 0.3, CONTRADICTED),
        (0.0, 0.0, -0.3, CONFIRMED),
    ],
)
def test_b4(at, random_slope, trained_slope, read, expected):
    put(at, reading(at), random_models(0.3, 0.0))
    put(at, twins(at), random_twins(random_slope))
    end = {"step": 4, "theory": []}
    put(
        at,
        tracing(at, "mlm", "nope"),
        lambda seed: {
            "points": [
                {"step": 0, "variance": falling(-0.5), "probes": probed(0.5)},
                {**end, "variance": falling(trained_slope, seed), "probes": probed(read, seed)},
            ]
        },
    )
    assert verdict("B4", at) == expected


@pytest.mark.parametrize(
    ("task", "scheme", "loss", "expected"),
    [
        ("clm", "nope", 4.52, CONFIRMED),
        ("clm", "nope", 4.2, CONFIRMED),  # better is not worse
        ("clm", "nope", 4.8, CONTRADICTED),
        ("mlm", "nope", 4.1, NOT_SHOWN),
        ("mlm", "nope", 3.0, CONTRADICTED),
    ],
)
def test_b5(at, monkeypatch, task, scheme, loss, expected):
    trained(at, monkeypatch, {**LOSSES, task: {**LOSSES[task], scheme: loss}})
    found = CLAIMS["B5"].measure(at)
    assert found.parts[0].effect.mean == pytest.approx(4.5 - (loss if task == "clm" else 4.52))
    assert verdict("B5", at) == expected


# ---- from beginning to end ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text and a model of llama2.c, in the layout of the data folder."""
    folder = tmp_path_factory.mktemp("data")
    rng, some = random.Random(0), ["one", "two", "three", "four", "five", "hell", "he"]
    text = [" ".join(rng.choices(some, k=12)) for _ in range(800)]
    for name, lines in (("train", text[:700]), ("valid", text[700:])):
        path = folder / "wikitext-2-raw" / f"wiki.{name}.raw"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    (folder / "stories").mkdir()
    write_llama(folder / "stories" / "stories15M.bin", weights(4, tied=True), 4, tied=True)
    words(folder / "stories" / "tokenizer.bin", list("abcdefghijk"), bytes_as_text=True)
    return folder


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    """A tiny reproduction of the whole paper, the names of the steps it ran, and its findings."""
    paper = dataclasses.replace(PAPER, sizes={"tiny": TINY})
    out = tmp_path_factory.mktemp("reproduction") / "out"
    place = reproduction.begin(paper, "tiny", out, data)
    ran = []

    def on_step(step, number, total):
        ran.append(step.name)
        return lambda share: None

    first = list(reproduction.run(paper.claims, place, on_step=on_step))
    return paper, place, ran, first


@pytest.mark.slow
def test_a_tiny_reproduction(done):
    paper, place, ran, first = done
    assert [each.problem for each in first] == [""] * 5
    assert len(ran) == len(set(ran)) == len(reproduction.plan(paper.claims, place).steps)
    for finding in first:
        assert finding.verdict in (CONFIRMED, NOT_SHOWN, CONTRADICTED)
        assert FIGURES[finding.id](finding.found)
    points = place.measured("variance-trace-clm-nope-s0")["points"]
    assert [point["step"] for point in points] == [0, 2, 4, 8]
    assert len({json.dumps(point["variance"]) for point in points}) == 4  # four different models
    assert points[0]["theory"]


@pytest.mark.slow
def test_the_second_run_does_nothing_again(done):
    paper, place, _, first = done
    again = reproduction.run(paper.claims, place, on_step=lambda step, *_: pytest.fail(f"{step.name} ran again"))
    assert [each.verdict for each in again] == [each.verdict for each in first]
    assert reproduction.plan(paper.claims, place).left == ()


@pytest.mark.slow
def test_the_loss_of_bigrams_is_on_the_tokens_of_the_test(done):
    """A model with the probabilities of the bigrams has their loss in the test of the task."""
    _, place, _, _ = done
    out = place.runs("variance-clm-nope")
    setting = load_setting(open_folder(out).work, out / "data")
    from locant.papers.traces import tokens_of

    train = tokens_of(out / "data", "train").numpy()
    size = 300
    table = np.array(
        [
            [-bigrams.cross_entropy(train, np.array([before]), np.array([after]), size) for after in range(size)]
            for before in sorted(set(tokens_of(out / "data", "test").tolist()))
        ]
    )
    at = {token: n for n, token in enumerate(sorted(set(tokens_of(out / "data", "test").tolist())))}

    class Model(torch.nn.Module):
        config = type("Config", (), {"max_position_embeddings": 1000})

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids):
            rows = [[table[at[int(token)]] for token in row] for row in input_ids]
            return type("Output", (), {"logits": torch.tensor(np.array(rows))})

    windows = tokens_of(out / "data", "test")[:256].view(-1, 8)
    found = find_task("clm")._at(Model(), setting, windows)
    vocabulary = 1 + max(int(train.max()), int(tokens_of(out / "data", "test").max()))
    assert vocabulary <= size
    measured = Bigrams(training(place, "clm", "nope").model_of("nope", 0))(place)
    assert measured["test tokens"] == 256 // 8 * 7
    assert found.values["loss"] == pytest.approx(measured["loss"], abs=0.01)  # the vocabulary is a few tokens smaller
