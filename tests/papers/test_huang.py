"""Huang et al. 2020: numbers with known answers, verdicts in both directions, and all claims on made-up data."""

import json
from dataclasses import replace

import pytest
import torch

from locant.experiments import workers
from locant.experiments.comparison import Comparison, check_here
from locant.experiments.presets import ANSWERS, find_preset
from locant.experiments.run import execute
from locant.experiments.tasks import find_task
from locant.experiments.work import Work
from locant.papers import absolute, glue, huang, reproduction
from locant.papers.claim import Paper
from locant.papers.glue import GlueSizes
from locant.papers.huang_numbers import (
    Kept,
    against_original,
    kept_of_original,
    kept_past_training,
    method_four_against_others,
    pictures,
    small_tables,
)
from locant.papers.huang_sizes import ABSOLUTE, BEST, SIZES, WORDS, Sizes
from locant.papers.offsets import contrast, nearness
from locant.papers.rules import CONFIRMED, CONTRADICTED, NOT_SHOWN
from locant.papers.squad import SquadSizes
from locant.report.figures import Grid, Heat, Intervals, Lines, Small
from locant.report.papers import write_paper_page
from locant.report.papers.huang import FIGURES, _pairs
from tests import bert
from tests.experiments.tasks import test_squad


def seeds(*values):
    return dict(enumerate(values))


def claim(name):
    return PAPER[name]


PAPER = {each.id: each for each in huang.PAPER.claims}
NOISE = (-0.1, 0.0, 0.1)


def around(mean):
    """Three seeds with this mean."""
    return seeds(*(mean + x for x in NOISE))


# ---- C1 to C3: SQuAD ------------------------------------------------------------------------------


def on_squad(best, absolute_, shaw):
    warm = {BEST: best, ABSOLUTE: absolute_, "shaw": shaw}
    cold = {BEST: around(3.0), "shaw": around(5.0)}
    both = {"f1": warm, "exact_match": warm}, {"f1": cold, "exact_match": cold}
    asks = {ABSOLUTE: claim("C1").over_absolute, "shaw": claim("C1").over_shaw}
    return method_four_against_others(*both, asks)


def test_c1_is_paired_by_seed_and_positive_if_method_4_is_better():
    found = on_squad(seeds(30.0, 50.0, 41.0), seeds(28.0, 48.5, 39.0), around(35.0))
    assert found.parts[0].effect.mean == pytest.approx(5.5 / 3)  # 2, 1.5, 2
    assert found.parts[0].effect.low > 0  # though the scores of the seeds differ by 20
    cold = found.tables["gains"].where(start="cold", metric="f1")
    # A cold arm is compared with the original too: 3 − 38.5, and with the cold arm of Shaw: 3 − 5.
    assert dict(zip(cold.column("over"), cold.column("mean"), strict=True)) == pytest.approx(
        {WORDS[ABSOLUTE]: 3 - 38.5, "Shaw": -2.0}
    )


@pytest.mark.parametrize(
    ("over_absolute", "over_shaw", "verdict"),
    [(2.0, 1.0, CONFIRMED), (2.0, 0.3, NOT_SHOWN), (-2.0, 1.0, CONTRADICTED), (2.0, -1.0, CONTRADICTED)],
)
def test_c1_needs_both_comparisons(over_absolute, over_shaw, verdict):
    found = on_squad(around(40.0), seeds(*(40 - over_absolute,) * 3), seeds(*(40 - over_shaw,) * 3))
    assert claim("C1").verdict(found) == verdict


def test_c1_without_shaw_shows_nothing():
    warm = {BEST: around(40.0), ABSOLUTE: around(30.0)}
    cold = {BEST: around(3.0)}
    asks = {ABSOLUTE: claim("C1").over_absolute, "shaw": claim("C1").over_shaw}
    found = method_four_against_others({"f1": warm}, {"f1": cold}, asks)
    assert claim("C1").verdict(found) == NOT_SHOWN


def past_training(best, absolute_):
    """F1 of both arms at 1, 2, 3 and 4 times the trained length, by length."""
    found = {BEST: dict(zip((128, 256, 384, 512), map(around, best), strict=True)),
             ABSOLUTE: dict(zip((128, 256, 384, 512), map(around, absolute_), strict=True))}  # fmt: skip
    return kept_past_training(found, against=claim("C2").against, alone=claim("C2").alone)


@pytest.mark.parametrize(
    ("best", "absolute_", "verdict"),
    [
        ((40, 41, 41, 41), (50, 45, 40, 35), CONFIRMED),
        ((40, 39, 30, 39), (50, 49, 49, 49), CONFIRMED),  # 3 times the length does not decide
        ((40, 30, 25, 20), (50, 25, 20, 10), CONTRADICTED),  # better than absolute, but half is lost
        ((40, 41, 41, 41), (50, 60, 60, 60), CONTRADICTED),  # longer windows help, and help the other more
    ],
)
def test_c2_compares_shares_of_f1(best, absolute_, verdict):
    assert claim("C2").verdict(past_training(best, absolute_)) == verdict


def test_c2_divides_by_the_same_seed_and_judges_twice_and_four_times_the_length():
    found = {arm: {128: seeds(40.0, 20.0, 10.0), 256: seeds(20.0, 10.0, 5.0)} for arm in (BEST, ABSOLUTE)}
    measured = kept_past_training(found, against=claim("C2").against, alone=claim("C2").alone)
    assert [(part.name, part.effect.mean) for part in measured.parts] == [("256 tokens", 0.0), ("256 tokens", -0.5)]
    assert [part.name for part in past_training((1, 1, 1, 1), (1, 1, 1, 1)).parts] == ["512 tokens", "256 tokens"] * 2


def test_c2_with_a_seed_that_did_not_learn_shows_nothing():
    found = {arm: {128: around(20.0), 256: around(20.0)} for arm in (BEST, ABSOLUTE)}
    found[BEST][128] = seeds(0.0, 20.0, 20.0)  # one seed did not learn
    measured = kept_past_training(found, against=claim("C2").against, alone=claim("C2").alone)
    assert claim("C2").verdict(measured) == NOT_SHOWN
    assert measured.tables["lengths"].where(arm="method 4", length=256).column("share") == [None]


@pytest.mark.parametrize(
    ("short", "shared", "verdict"), [(0.5, 0.0, CONFIRMED), (-5.0, 0.0, CONTRADICTED), (0.0, -5.0, CONTRADICTED)]
)
def test_c3_asks_whether_small_tables_are_worse(short, shared, verdict):
    found = {"clip 64": around(40.0), "clip 8": around(41 + short), "clip 128": around(41.0),
             "own tables": around(40 - shared)}  # fmt: skip
    measured = small_tables(found, dict.fromkeys(found, 7), 64, short=claim("C3").short, shared=claim("C3").shared)
    assert [part.effect.mean for part in measured.parts] == pytest.approx([short, shared])
    assert claim("C3").verdict(measured) == verdict
    assert measured.tables["clips"].where(tables="own").column("clip") == [64]


def test_c3_at_the_floor_shows_nothing():
    found = {name: around(6.0) for name in ("clip 64", "clip 8", "own tables")}
    measured = small_tables(found, dict.fromkeys(found, 7), 64, short=claim("C3").short, shared=claim("C3").shared)
    assert claim("C3").verdict(measured) == NOT_SHOWN
    assert measured.tables["clips"].column("mean") == [6.0] * 3


# ---- C4 and C5: GLUE and the pretrained model ------------------------------------------------------


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, CONFIRMED), (3.0, CONFIRMED), (-3.0, CONTRADICTED)])
def test_c4_averages_the_tasks_of_each_seed(gain, verdict):
    original = {"MRPC": {seed: 80 + seed for seed in range(6)}, "RTE": {seed: 60 - seed for seed in range(6)}}
    method = {task: {seed: of[seed] + gain + (seed - 1) / 10 for seed in range(3)} for task, of in original.items()}
    worse = {task: {seed: value - 9 for seed, value in of.items()} for task, of in method.items()}
    original["CoLA"] = dict.fromkeys(range(6), 0.0)
    method["CoLA"] = dict.fromkeys(range(3), 50.0)  # the original did not learn it
    found = against_original({"huang1": worse, BEST: method}, original, ("MRPC", "RTE"), over=claim("C4").over)
    assert found.parts[0].effect.mean == pytest.approx(gain)
    assert found.parts[0].effect.count == 3
    for tasks, wanted in ((("MRPC", "RTE"), verdict), (("MRPC",), NOT_SHOWN), ((), NOT_SHOWN)):
        parts = [*found.parts, glue.learned_part(claim("C4").learned, tasks)]
        assert claim("C4").verdict(replace(found, parts=parts)) == wanted
    assert found.tables["gains"].where(method="method 1", task="RTE").column("mean") == pytest.approx([gain - 9])


def kept(sts, retrieval):
    asks = {"STS-B": (claim("C5").sts, 0.97), "retrieval": (claim("C5").retrieval, 0.9)}
    rows = [Kept(BEST, 0, 0, test, 0.1, 0.8) for test in asks]  # the fitted model does not decide
    rows += [Kept("huang1", 20, 0, test, 0.1, 0.8) for test in asks]
    for seed, noise in enumerate(NOISE):
        rows.append(Kept(BEST, 20, seed, "STS-B", 0.8 * (sts + noise / 100), 0.8))
        rows.append(Kept(BEST, 20, seed, "retrieval", 0.5 * (retrieval + noise / 100), 0.5))
    return kept_of_original(rows, 20, asks)


@pytest.mark.parametrize(
    ("sts", "retrieval", "verdict"),
    [(0.99, 0.95, CONFIRMED), (0.99, 0.8, CONTRADICTED), (0.96, 0.95, CONTRADICTED), (0.9705, 0.95, NOT_SHOWN)],
)
def test_c5_needs_both_tests(sts, retrieval, verdict):
    found = kept(sts, retrieval)
    assert [part.effect.mean for part in found.parts] == pytest.approx([sts - 0.97, retrieval - 0.9])
    assert claim("C5").verdict(found) == verdict


def meetings(path, count=6):
    lines = []
    for number in range(count):
        words = " ".join(f"{chr(97 + number)}{at}" for at in range(30))
        lines.append({"kind": "doc", "id": f"m{number}", "text": words})
        lines += [
            {"kind": "query", "question": "?", "summary": words[at : at + 12], "doc": f"m{number}"} for at in (0, 9)
        ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


# ---- C6 and C7: method 4 itself --------------------------------------------------------------------


def test_c6_holds_and_its_controls_do_not(tmp_path):
    found = claim("C6").measure(None)
    assert claim("C6").verdict(found) == CONFIRMED
    values = [part.effect.mean for part in found.parts]
    assert max(values[:3]) < 1e-12
    assert min(values[3:]) > 0.1


def test_c6_fails_if_the_offset_is_mirrored(monkeypatch):
    real = absolute.method_4
    monkeypatch.setattr(absolute, "method_4", lambda table: real(table.flip(0)))
    assert claim("C6").verdict(claim("C6").measure(None)) == CONTRADICTED


def test_c6_does_not_hold_for_one_table_over_offsets_of_any_query():
    x = absolute.Inputs.random(seed=1)
    assert min(absolute.by_query(x, table_of=query) for query in range(absolute.LENGTH)) > 0.1


def test_contrast_of_near_and_far_vectors():
    torch.manual_seed(0)
    table = torch.randn(129, 200)
    assert contrast(table) == pytest.approx(1, abs=0.05)
    assert contrast(table + 7) == pytest.approx(contrast(table), abs=1e-4)  # what all offsets share is no position
    near = table.clone()
    near[64 - 8 : 64 + 9] *= 3
    assert contrast(near) == pytest.approx(3, abs=0.15)
    far = table.clone()
    far[:5] *= 100  # beyond 50: not in the figure
    assert contrast(far) == pytest.approx(contrast(table))
    with pytest.raises(ValueError, match="larger clip"):
        contrast(torch.randn(17, 4))


def test_nearness_is_the_share_above_equal_weights():
    assert nearness(torch.full((40, 40), 1 / 40, dtype=torch.float64)) == pytest.approx(0)
    equal = sum(min(39, i + 8) - max(0, i - 8) + 1 for i in range(40)) / 40 / 40
    assert nearness(torch.eye(40).double()) == pytest.approx(1 - equal)
    first = torch.zeros(40, 40).double()
    first[:, 0] = 1
    assert nearness(first) == pytest.approx(9 / 40 - equal)  # the queries 0 … 8 have it near


def seen(trained, near, tmp_path, monkeypatch):
    """C7 over three models with this contrast and nearness."""
    vectors = [[float(r), 1.0] for r in range(-12, 13)]
    numbers = {"contrast": {"trained": trained, "initial": 1.0}, "nearness": near, "vectors": vectors,
               "initial": [[0.0, 0.0]] * 25, "weights": [[0.5, 0.5], [0.25, 0.75]]}  # fmt: skip
    tables = {"rows": [0, 2], "columns": [0, 3], "table": [[1.0, 2.0], [3.0, 4.0]],
              "scalars": [[float(r) for r in range(-2, 3)]]}  # fmt: skip
    at = reproduction.Place(tmp_path, tmp_path, None, SIZES["small"])

    def measured(self, name):
        noise = 0.01 * int(name[-1]) if "offsets" in name else 0
        return (
            {**numbers, "nearness": near + noise, "contrast": {"trained": trained + noise, "initial": 1.0}}
            if noise or "offsets" in name
            else tables
        )

    monkeypatch.setattr(reproduction.Place, "measured", measured)
    return claim("C7").measure(at)


@pytest.mark.parametrize(
    ("trained", "near", "verdict"), [(3.0, 0.2, CONFIRMED), (1.2, 0.2, NOT_SHOWN), (3.0, -0.2, CONTRADICTED)]
)
def test_c7_needs_contrast_and_nearness(trained, near, verdict, tmp_path, monkeypatch):
    assert claim("C7").verdict(seen(trained, near, tmp_path, monkeypatch)) == verdict


def test_pictures_have_the_right_offsets():
    vectors = [[float(r), 0.0] for r in range(-3, 4)]
    found = pictures(
        {"vectors": vectors, "initial": vectors, "weights": [[1.0]]},
        {"rows": [0], "columns": [0], "table": [[5.0]], "scalars": [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0]]},
    )
    assert found["vectors"].column("offset") == found["vectors"].column("0") == [-3, -2, -1, 0, 1, 2, 3]
    assert found["sizes"].column("trained") == [3, 2, 1, 0, 1, 2, 3]
    assert found["scalars"].rows == [(-1, -1.0, -2.0), (0, 0.0, 0.0), (1, 1.0, 2.0)]


def test_the_matrix_of_pairs_has_the_offset_key_minus_query():
    scalars = pictures(
        {"vectors": [[0.0]], "initial": [[0.0]], "weights": [[1.0]]},
        {"rows": [0], "columns": [0], "table": [[5.0]], "scalars": [[-2.0, -1.0, 0.0, 1.0, 2.0]]},
    )["scalars"]
    values = _pairs(scalars).values
    assert (values[0][1], values[1][0], values[0][40], values[40][0]) == (1.0, -1.0, 2.0, -2.0)


# ---- the further length of squad -------------------------------------------------------------------


def test_squad_tests_one_more_length(tmp_path):
    squad = find_task("squad")
    here, _ = test_squad.prepared(tmp_path, length=32, longest=2, also=48)
    assert squad._lengths(here) == [32, 48, 64]
    assert (here.folder / "test-48.arrow").exists()
    plain = replace(here, preset=replace(here.preset, also=0, longest=3))
    assert squad._lengths(plain) == [32, 64]
    with pytest.raises(ValueError, match="at least the trained 32 tokens"):
        test_squad.prepared(tmp_path / "other", length=32, also=20)


def test_a_comparison_from_before_the_further_length_is_the_same():
    now = Comparison(Work("squad", "bert", None, ANSWERS["quick"], 5), ("nope",), (0,), "")
    before = json.loads(json.dumps(now.to_dict()))
    del before["work"]["preset"]["also"]
    assert Comparison.from_dict(before) == now
    assert find_preset("quick:also=384", ANSWERS).also == 384


# ---- all claims on made-up data --------------------------------------------------------------------

TINY = Sizes(
    squad=SquadSizes(seeds=2, cold_seeds=1, steps=2, batch=2, rate=1e-3, length=16, longest=4, also=48, questions=3),
    glue=GlueSizes(("MRPC",), seeds=2, steps=2, batch=2, length=16, rate=1e-3, evaluated=8), glue_seeds=2,
    arms=("shaw", BEST), clip=12, clips=(4,), budget=1, longer=(), adapted_seeds=2, meetings=4, chunks=2, chunk=24,
)  # fmt: skip


class Here:
    """Executes runs in this process."""

    def __init__(self, threads):
        pass

    check, seconds_of_a_step = staticmethod(check_here), None

    def work(self, runs, data):
        for run, folder in runs:
            execute(run, folder, data)
            yield


@pytest.fixture
def data(tmp_path):
    """A folder of data in the layout of sources.py."""
    here = tmp_path / "data"
    bert.save(here / "models" / "all-MiniLM-L6-v2")
    sentences = [f"{a} {b} sat on the {c}." for a in ("a", "the", "my") for b in ("cat", "dog") for c in ("mat", "log")]
    for part, count in (("train", 60), ("valid", 30)):
        (here / "wikitext-2-raw").mkdir(exist_ok=True)
        (here / "wikitext-2-raw" / f"wiki.{part}.raw").write_text("\n".join(" ".join(sentences) for _ in range(count)))
    test_squad.write(here / "squad")
    for task, head, label in (("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{0}\t1\t2\t{1}\t{2}"),
                              ("STS-B", "score\tsentence1\tsentence2", "{0}\t{1}\t{2}")):  # fmt: skip
        (here / "glue" / task).mkdir(parents=True)
        lines = [label.format(n % 2, one, sentences[n - 1]) for n, one in enumerate(sentences)]
        for part in ("train", "dev"):
            (here / "glue" / task / f"{part}.tsv").write_text("\n".join([head, *lines]))
    for task in ("CoLA", "SST-2", "RTE"):
        (here / "glue" / task).mkdir()
        for part in ("train", "dev"):
            (here / "glue" / task / f"{part}.tsv").write_text("not read\n")
    meetings(here / "qmsum.jsonl")
    return here


@pytest.mark.slow
def test_all_claims_run_once(tmp_path, data, monkeypatch):
    monkeypatch.setattr(workers, "LocalWorkers", Here)
    paper = Paper("huang", "t", "a", huang.PAPER.claims, {"tiny": TINY, "paper": SIZES["paper"]})
    done = []

    def note(step, number, total):
        done.append(step.name)
        return lambda share: None

    def once():
        at = reproduction.begin(paper, "tiny", tmp_path / "out", data)
        reproduction.check_data(paper.claims, at.size, data)
        return at, list(reproduction.run(paper.claims, at, on_step=note))

    at, findings = once()
    found = {each.id: each for each in findings}  # C6 has no steps and comes first
    assert {each.id: each.problem for each in findings} == dict.fromkeys(PAPER, "")
    assert len(done) == len(set(done)) == len(reproduction.plan(paper.claims, at).steps)
    assert found["C6"].verdict == CONFIRMED  # C6 needs no data
    assert found["C1"].verdict == found["C5"].verdict == NOT_SHOWN  # two seeds are too few
    by_length = found["C2"].found.tables["lengths"]
    assert by_length.where(arm="method 4").column("length") == [16, 32, 48, 64]
    parameters = found["C3"].found.tables["clips"]
    head_dim = 8
    assert parameters.where(clip=4).column("parameters") == [9 * head_dim + 2 * 16]  # and the two vectors of `first`
    assert parameters.where(tables="own").column("parameters") == [2 * 25 * head_dim + 2 * 16]
    assert {row[3] for row in found["C5"].found.tables["kept"].rows} == {"STS-B", "retrieval"}
    for each in findings:
        drawn = FIGURES[each.id](each.found)
        assert drawn
        assert all(isinstance(figure, Lines | Heat | Grid | Intervals | Small) for figure in drawn)
        assert all(figure.note for figure in drawn)
    page = write_paper_page(paper, "tiny", at).read_text(encoding="utf-8")
    assert all(each.says in page for each in paper.claims)
    done.clear()
    _, again = once()
    assert done == []
    assert [(each.id, each.verdict) for each in again] == [(id, found[id].verdict) for id in PAPER]
    stored = reproduction.findings(paper, at)
    assert {name: stored[name].verdict for name in PAPER} == {name: found[name].verdict for name in PAPER}
