"""The claims of TISA: what they compute, which verdicts follow, and a whole reproduction of tiny size."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from locant.experiments import comparison, workers
from locant.experiments.results import RunResult
from locant.experiments.timing import seconds_of_a_step
from locant.experiments.work import Run
from locant.experiments.workers import do_run
from locant.papers import glue, reproduction, table_training, tisa
from locant.papers.albert_glue import AlbertSizes, glue_gains
from locant.papers.claim import Measured, Paper, Table
from locant.papers.glue import Arm, GlueSizes, gains, guessing, mean_gain
from locant.papers.head_kinds import BETWEEN, GLOBAL, LOCAL, HeadCurve, head_labels, initial_heads, rarer, shares
from locant.papers.longer_inputs import by_length
from locant.papers.place import Place
from locant.papers.position_tables import find_tables, heads_found, measure_tables, table_effect, tables_found
from locant.papers.rules import CONFIRMED, CONTRADICTED, NOT_SHOWN
from locant.papers.steps import unique
from locant.papers.table_training import TrainedTable, along, over_models, performance, rise, start_and_end, trend
from locant.report.papers.tisa import FIGURES
from tests import bert

CLAIMS = {claim.id: claim for claim in tisa.PAPER.claims}


def asks(claim: str) -> list[str]:
    return [criterion.asks for criterion in CLAIMS[claim].criteria]


def waves(positions: int, width: int) -> torch.Tensor:
    """A table whose E Eᵀ is exactly Toeplitz."""
    angle = torch.arange(positions)[:, None] * (0.5 ** torch.arange(width // 2))
    return torch.cat([angle.sin(), angle.cos()], -1)


def place(folder: Path, data: Path | None = None, **size) -> Place:
    return Place(folder, folder, data, SimpleNamespace(samples=3, **size))


class TestTables:
    @pytest.fixture
    def data(self, tmp_path):
        (tmp_path / "tables").mkdir()
        torch.manual_seed(0)
        q, k = torch.randn(12, 8), torch.randn(12, 8)
        tensors = {
            "good.position_embeddings": waves(64, 8),
            "bad.decoder.position_embeddings.fp16": torch.randn(48, 8).half(),
            "roberta.position_embeddings": torch.cat([100 * torch.randn(1, 8), torch.zeros(1, 8), waves(64, 8)]),
            "gpt2.wpe.weight": torch.randn(32, 8),
            "whisper.encoder.sinusoidal": waves(600, 8),
            "t5.relative_attention_bias": torch.randn(32, 4),
            "good.layer.0.attention.self.query.weight": q,
            "good.layer.0.attention.self.key.weight": k,
            "good.embeddings.LayerNorm.weight": torch.ones(8),
            "good.embeddings.LayerNorm.bias": torch.zeros(8),
        }
        save_file(tensors, tmp_path / "tables" / "all.safetensors")
        return tmp_path

    def test_tables_are_found_by_their_names(self, data):
        found, left_out = find_tables(place(data, data))
        assert {(each.name, each.kind, each.table.shape[0]) for each in found} == {
            ("good", "learned", 64), ("bad.decoder", "learned", 48), ("roberta", "learned", 64),
            ("gpt2", "learned", 32),
            ("whisper.encoder.sinusoidal", "sinusoidal", 512),
        }  # fmt: skip
        assert list(left_out) == ["t5.relative_attention_bias"]
        with_weights = [each for each in found if each.w_q is not None]
        assert [each.name for each in with_weights] == ["good"]
        assert with_weights[0].heads == 1, "heads of size 64, but at least one"

    def test_the_rows_of_the_padding_are_no_positions(self, data):
        found = {each.name: each.table for each in find_tables(place(data, data))[0]}
        torch.testing.assert_close(found["roberta"], waves(64, 8))

    def test_albert_maps_its_table_to_the_hidden_size_first(self, tmp_path):
        (tmp_path / "tables").mkdir()
        torch.manual_seed(0)
        q, k, project = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 8)
        save_file(
            {"a.position_embeddings": waves(32, 8), "a.layers.0.attention.query.weight": q,
             "a.layers.0.attention.key.weight": k, "a.encoder.embedding_hidden_mapping_in.weight": project},
            tmp_path / "tables" / "a.safetensors",
        )  # fmt: skip
        (one,) = find_tables(place(tmp_path, tmp_path))[0]
        torch.testing.assert_close(one.w_q.float(), q @ project)
        torch.testing.assert_close(one.w_k.float(), k @ project)

    def test_r2_tells_waves_from_noise(self, data):
        found = measure_tables(place(data, data))
        r2 = {row["name"]: row["off_diagonal"] for row in found["tables"]}
        assert r2["good"] == pytest.approx(1, abs=1e-6)
        assert r2["whisper.encoder.sinusoidal"] == pytest.approx(1, abs=1e-6)
        assert r2["bad.decoder"] < 0.3
        assert {row["name"] for row in found["heads"]} == {"good"}
        assert all(row["normed"] is not None for row in found["heads"])
        (map_of,) = [row for row in found["tables"] if row["name"] == "whisper.encoder.sinusoidal"]
        assert len(map_of["map"]) == len(map_of["shown"]) == 64
        rows = waves(600, 8)[1:512]
        expected = rows[8] @ rows[24] / rows.norm(dim=-1).median() ** 2
        assert map_of["map"][1][3] == pytest.approx(float(expected), rel=1e-3)
        assert map_of["shown"][:2] == [1, 9]

    def test_the_bounds_of_an_effect_take_the_worse_control(self):
        row = {"off_diagonal": 0.6, "interval": [0.5, 0.7], "control": [0.1, 0.05, 0.2], "positions": 101}
        effect = table_effect(row)
        assert effect.mean == pytest.approx(0.5)
        assert (effect.low, effect.high) == (pytest.approx(0.3), pytest.approx(0.65))
        assert effect.count == 10

    @pytest.mark.parametrize(
        ("values", "verdict"),
        [
            ([0.5, 0.6, 0.7, 0.8], CONFIRMED),
            ([0.02, 0.01, 0.03, 0.02], NOT_SHOWN),
            ([-0.3, -0.3, -0.31, -0.3], CONTRADICTED),
        ],
    )
    def test_verdict_of_tables(self, values, verdict):
        rows = [{"name": f"t{at}", "kind": "learned", "positions": 65, "width": 8, "off_diagonal": value, "shown": [0],
                 "interval": [value - 0.05, value + 0.05], "control": [0.0, -0.01, 0.01], "gram": value,
                 "gram_control": 0.3, "map": [[1.0]]} for at, value in enumerate(values)]  # fmt: skip
        fixed = {**rows[0], "name": "fixed", "kind": "sinusoidal", "off_diagonal": 1.0}
        found = tables_found({"tables": [*rows, fixed], "left_out": [], "heads": []}, *asks("A1"))
        assert CLAIMS["A1"].verdict(found) == verdict
        assert found.parts[0].effect.mean == pytest.approx(np.mean(values)), "the positive control is not a result"

    @pytest.mark.parametrize(("above", "verdict"), [(0.5, CONFIRMED), (0.0, NOT_SHOWN), (-0.2, CONTRADICTED)])
    def test_verdict_of_heads(self, above, verdict):
        rows = [{"name": name, "head": head, "r2": 0.3 + above + 0.01 * head, "control": 0.3 + 0.02, "normed": None}
                for name in "abc" for head in (1, 2, 3)]  # fmt: skip
        found = heads_found({"heads": rows}, *asks("A2"))
        assert CLAIMS["A2"].verdict(found) == verdict
        assert [part.name for part in found.parts] == ["all heads", "a", "b", "c"]


def run_of(r2: list[float], losses: list[float] | None = None, seed: int = 0) -> RunResult:
    losses = losses or [5 - at / 10 for at in range(len(r2))]
    rows = [{"step": 10 * at, "loss": loss, table_training.R2: value}
            for at, (value, loss) in enumerate(zip(r2, losses, strict=True), 1)]  # fmt: skip
    return RunResult(Run(None, "native", seed), "done", "", rows, [{"length": 8, "values": {"loss": losses[-1]}}], {})


class TestTraining:
    def test_start_and_end_are_means_over_tenths(self):
        values = [0.0, 0.2, *[0.5] * 16, 0.8, 1.0]
        assert start_and_end(run_of(values)) == (pytest.approx(0.1), pytest.approx(0.9))
        assert start_and_end(run_of([0.1, 0.9])) == (0.1, 0.9)

    def test_a_run_without_a_table_has_no_r2(self):
        with pytest.raises(ValueError, match="no logged R²"):
            start_and_end(RunResult(Run(None, "nope", 0), "done", "", [{"step": 1, "loss": 1.0}], [], {}))

    def test_signs(self):
        assert trend(run_of([0.1, 0.2, 0.3, 0.4])) == pytest.approx(1)
        assert trend(run_of([0.4, 0.3, 0.2, 0.1])) == pytest.approx(-1)
        assert along(run_of([0.1, 0.2, 0.3], [3.0, 2.0, 1.0])) == pytest.approx(1), "a lower loss is better"
        assert along(run_of([0.1, 0.2, 0.3], [1.0, 2.0, 3.0])) == pytest.approx(-1)
        assert trend(run_of([0.1, 0.1, 0.1])) == 0

    @pytest.mark.parametrize(("slope", "verdict"), [(0.02, CONFIRMED), (-0.02, CONTRADICTED), (0.0002, NOT_SHOWN)])
    def test_verdict_of_the_rise(self, slope, verdict):
        runs = [("2x16", run_of([0.5 + slope * (at + 0.1 * seed) for at in range(20)], seed=seed)) for seed in range(4)]
        found = rise(runs, [("masked", run_of([0.5, 0.0]))], *asks("A3"))
        assert CLAIMS["A3"].verdict(found) == verdict
        assert len(found.tables["by step"].rows) == 80 + 2, "runs beside the others are shown and do not decide"

    @staticmethod
    def models(sign: int) -> list[TrainedTable]:
        """Loss falls with R² from group to group as `sign` has it; inside a group it is the other way round."""
        return [
            TrainedTable(shape, steps, seed, 0.1 * group + 0.01 * seed, 5 - sign * (group - 0.1 * seed))
            for group, (shape, steps) in enumerate((shape, steps) for shape in "abc" for steps in (10, 20, 30))
            for seed in range(3)
        ]

    @pytest.mark.parametrize(("sign", "verdict"), [(1, CONFIRMED), (-1, CONTRADICTED)])
    def test_verdict_of_the_correlation(self, sign, verdict):
        longest = [("a", run_of([0.1, 0.2, 0.3], seed=seed)) for seed in range(3)]
        found = performance(self.models(sign), longest, *asks("A4"))
        assert CLAIMS["A4"].verdict(found) == verdict
        by_name = {row[0]: row[1] for row in found.tables["correlations"].rows}
        assert by_name["all models"] * sign > 0.8
        assert by_name["models of one size and one budget"] * sign < -0.8, "what size and budget explain is removed"
        assert by_name["steps of each of the longest runs"] == pytest.approx(1)

    def test_groups_are_what_is_drawn(self):
        assert over_models(self.models(1)).count == 9


class TestGlue:
    def test_a_fitted_arm_starts_from_its_fit_and_keeps_its_positions(self):
        sizes = GlueSizes(("CoLA",), seeds=2, steps=3, batch=4, length=16, rate=1e-4)
        arms = (glue.NATIVE, Arm("tisa:kernels=5"), Arm("tisa:kernels=5", fitted=True))
        guess, fit, *runs = glue.steps_of(sizes, arms)
        assert [run.name for run in runs] == [
            "glue-CoLA-native", "glue-CoLA-tisa-kernels=5", "glue-CoLA-tisa-kernels=5-fitted",
        ]  # fmt: skip
        assert guess.name == "glue-CoLA-constant"
        assert runs[2].model.name == fit.name
        assert runs[2].schemes == ("native",)
        assert runs[1].schemes == ("tisa:kernels=5",)
        with pytest.raises(ValueError, match="takes the place"):
            Arm("native+tisa", fitted=True)

    def test_gains_are_paired_and_have_the_sign_of_the_better_arm(self):
        better = {"CoLA": {0: 12.0, 1: 23.0, 7: 99.0}, "RTE": {0: 52.0, 1: 52.0}}
        than = {"CoLA": {1: 20.0, 0: 10.0}, "RTE": {0: 51.0, 1: 50.0}}
        found = gains(better, than)
        assert (found["CoLA"].mean, found["CoLA"].count) == (2.5, 2)
        assert mean_gain(better, than).mean == pytest.approx((1.5 + 2.5) / 2)
        assert mean_gain(than, better).mean == pytest.approx(-2)

    @pytest.mark.parametrize(
        ("with_table", "alone", "verdict"),
        [(1.0, 0.2, CONFIRMED), (1.0, -3.0, CONTRADICTED), (-1.0, 0.2, CONTRADICTED), (0.1, 0.2, NOT_SHOWN)],
    )
    def test_verdict(self, with_table, alone, verdict):
        def scores(gain):
            return {
                task: {seed: 50 + gain + 0.01 * seed * (gain != 0) for seed in range(3)} for task in ("MRPC", "RTE")
            }

        arms = {"native": scores(0), "native+tisa:kernels=5": scores(with_table), "tisa:kernels=5": scores(alone)}
        encoder, both, one = {arm.label: arms["native"] for arm in tisa.ARMS} | arms, ("MRPC", "RTE"), ("RTE",)
        found = glue_gains(encoder, arms, (both, both), asks("A5"))
        assert CLAIMS["A5"].verdict(found) == verdict
        for learned in ((both, one), (one, both), (both, ())):
            assert CLAIMS["A5"].verdict(glue_gains(encoder, arms, learned, asks("A5"))) == NOT_SHOWN
        assert found.parts[0].effect.mean == pytest.approx(with_table, abs=0.02)

    def test_a_constant_guess(self, tmp_path):
        tables = {
            "CoLA": ([f"x\t{n % 3 > 0:d}\t\ta" for n in range(9)], [f"x\t{n > 0:d}\t\ta" for n in range(4)]),
            "MRPC": (
                ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *(f"{n > 2:d}\t1\t2\ta\tb" for n in range(9))],
                ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *(f"{n > 0:d}\t1\t2\ta\tb" for n in range(4))],
            ),
            "STS-B": (
                ["index\tsentence1\tsentence2\tscore", *(f"{n}\ta\tb\t{n % 5}" for n in range(9))],
                ["index\tsentence1\tsentence2\tscore", *(f"{n}\ta\tb\t{n}" for n in range(4))],
            ),
        }
        for task, parts in tables.items():
            (tmp_path / "glue" / task).mkdir(parents=True)
            for name, lines in zip(("train", "dev"), parts, strict=True):
                (tmp_path / "glue" / task / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        at = Place(tmp_path, tmp_path, tmp_path, None)
        sizes = GlueSizes(tuple(tables), seeds=3, steps=1, batch=1, length=8, rate=1.0)
        scores = {task: glue.guessing(task, sizes).run(at, lambda share: None)["score"] for task in tables}
        assert scores == pytest.approx({"CoLA": 0.0, "MRPC": (75 + 100 * 6 / 7) / 2, "STS-B": 0.0})
        for task in tables:
            at.mark(guessing(task, sizes).name).parent.mkdir(exist_ok=True)
            at.mark(guessing(task, sizes).name).write_text(json.dumps({"numbers": {"score": scores[task]}}))
        original = {"CoLA": dict.fromkeys(range(3), 0.0), "MRPC": {0: 90, 1: 91, 2: 92}, "STS-B": {0: 9, 1: -5, 2: 7}}
        assert glue.learned_tasks(at, sizes, original) == ("MRPC",)
        two = replace(sizes, evaluated=2)  # the first and the third example
        assert glue.guessing("MRPC", two).run(at, lambda share: None)["score"] == pytest.approx((50 + 200 / 3) / 2)


class TestCounts:
    def test_verdict(self, tmp_path, monkeypatch):
        rows = [{"model": "m", "kernels": 5, "table": 65_536, "tisa": 180}]
        monkeypatch.setattr(Place, "measured", lambda self, name: {"rows": rows})
        found = CLAIMS["A6"].measure(place(tmp_path))
        assert found.parts[0].effect.mean == pytest.approx(2.561, abs=1e-3)
        assert CLAIMS["A6"].verdict(found) == CONFIRMED
        rows[0]["tisa"] = 10_000
        assert CLAIMS["A6"].verdict(CLAIMS["A6"].measure(place(tmp_path))) == NOT_SHOWN
        rows[0]["tisa"] = 100_000
        assert CLAIMS["A6"].verdict(CLAIMS["A6"].measure(place(tmp_path))) == CONTRADICTED


class TestLengths:
    @pytest.mark.parametrize(
        ("change", "without", "verdict"),
        [
            (-0.1, 3.0, CONFIRMED),
            (0.01, 3.0, CONFIRMED),
            (0.5, 3.0, CONTRADICTED),
            (0.0, 2.0, NOT_SHOWN),
            (0.0, 1.0, CONTRADICTED),
        ],
    )
    def test_verdict(self, change, without, verdict):
        scores = {
            length: {
                "tisa:kernels=5": {seed: 2.0 + seed + change * at + 1e-3 * seed for seed in range(3)},
                "nope": {seed: without + seed for seed in range(3)},
                "native": dict.fromkeys(range(3), 2.0) if at == 0 else {},
            }
            for at, length in enumerate((16, 32, 64))
        }
        found = by_length(scores, asks("A7"))
        assert CLAIMS["A7"].verdict(found) == verdict
        assert found.parts[0].name == "4 × the trained length"
        assert found.parts[0].effect.mean == pytest.approx(-2 * change), "a higher loss is a loss"
        assert found.tables["lengths"].where(scheme="native").column("length") == [16]


def curve(values, reach=16) -> HeadCurve:
    r = list(range(-reach, reach + 1))
    return HeadCurve("layer 1", 1, r, [values(x) for x in r])


NEAR, FLAT = curve(lambda r: 8.0 if abs(r) <= 1 else 0.0), curve(lambda r: 1.0)


class TestHeadKinds:
    def test_labels(self):
        assert (NEAR.kind, FLAT.kind) == (LOCAL, GLOBAL)
        assert FLAT.near == pytest.approx(7 / 33)
        assert curve(lambda r: 8.0 if r == -10 else 0.0).kind == GLOBAL, "a peak far away is not local"
        assert curve(lambda r: 8.0 if r == 3 else 0.0).kind == LOCAL
        assert curve(lambda r: 8.0 if r == 4 else 0.0).kind != LOCAL
        assert curve(lambda r: 2.5 if abs(r) <= 1 else 0.0, reach=60).kind == BETWEEN

    def test_shares(self):
        assert shares([NEAR, FLAT, FLAT, FLAT]) == {LOCAL: 0.25, BETWEEN: 0, GLOBAL: 0.75}
        assert rarer([NEAR, FLAT, FLAT, FLAT]) == 0.25
        assert rarer([FLAT, FLAT]) == rarer([NEAR]) == 0

    @pytest.mark.parametrize(
        ("trained", "initial", "verdict"),
        [
            ([NEAR, FLAT], [FLAT, FLAT], CONFIRMED),
            ([FLAT, FLAT], [FLAT, FLAT], NOT_SHOWN),
            ([FLAT, FLAT], [NEAR, FLAT], CONTRADICTED),
        ],
    )
    def test_verdict(self, trained, initial, verdict):
        found = head_labels(dict.fromkeys(range(3), trained), dict.fromkeys(range(3), initial), *asks("A8"))
        assert CLAIMS["A8"].verdict(found) == verdict
        assert len(found.tables["curves"].rows) == 2 * 33

    def test_fresh_curves_are_global_and_repeatable(self):
        heads = initial_heads("tisa:kernels=5", layers=2, heads=3, reach=32, seed=0, causal=False)
        assert len(heads) == 6
        assert shares(heads)[GLOBAL] == 1
        assert heads[0].values == initial_heads("tisa:kernels=5", 2, 3, 32, 0, causal=False)[0].values
        assert heads[0].values != initial_heads("tisa:kernels=5", 2, 3, 32, 1, causal=False)[0].values

    def test_a_causal_head_has_no_offsets_above_0(self):
        both, past = (initial_heads("tisa:kernels=5", 1, 1, 8, 0, causal=causal)[0] for causal in (False, True))
        assert past.r == list(range(-8, 1))
        assert past.values == both.values[:9]
        assert HeadCurve("layer 1", 1, past.r, [0.0] * 9).near == pytest.approx(4 / 9)


def test_every_claim_has_figures_and_sizes_agree():
    assert FIGURES.keys() == CLAIMS.keys()
    at = place(Path())
    for size in tisa.PAPER.sizes.values():
        here = Place(at.folder, at.work, None, size)
        names = [step.name for step in unique(step for claim in tisa.PAPER.claims for step in claim.steps(here))]
        assert all(name.startswith(("tisa-", "glue-", "fitted-")) for name in names)
    small = tisa.PAPER.sizes["small"]
    assert len(small.shapes) * len(small.budgets) * small.seeds >= 24
    assert small.albert.tokens >= 4_000_000


TINY_GLUE = GlueSizes(("SST-2",), seeds=1, steps=2, batch=4, length=12, rate=1e-3)
TINY = tisa.Sizes(
    samples=2, task="clm", masked_seeds=1, shapes=(tisa.Shape(1, 2, 16),), budgets=(4, 8),
    seeds=2, length=16, batch=4, vocabulary=300, rate=1e-3,
    evaluated=256, extrapolating=tisa.Shape(1, 2, 16), extrapolating_steps=2, longest=2, glue=TINY_GLUE,
    albert=AlbertSizes(layers=1, heads=2, width=16, vocabulary=300, length=16, batch=4, steps=2,
                       rate=1e-3, scheme_rate=1e-2, seeds=2,
                       glue=TINY_GLUE),
)  # fmt: skip
WHOLE = Paper("tisa", "title", "authors", tisa.PAPER.claims, {"tiny": TINY})


class OneProcess:
    """Executes runs in this process: starting one for each takes longer than a tiny run."""

    def __init__(self, threads: int) -> None:
        self.check, self.seconds_of_a_step = comparison.check_here, seconds_of_a_step

    def work(self, runs, data):
        for run, here in runs:
            here.mkdir(parents=True, exist_ok=True)
            do_run(run, here, data)
            yield


def write_data(folder: Path) -> Path:
    """Invented data in the layout of sources.py."""
    rng = random.Random(0)
    lines = [
        " ".join(rng.choice(["the cat", "a dog", "sat on", "ran to", "my mat"]) for _ in range(8)) for _ in range(200)
    ]
    text = ".\n".join(lines)
    for name in ("wikitext-2-raw/wiki.train.raw", "wikitext-2-raw/wiki.valid.raw", "books/one.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    pair = "sentence1\tsentence2\tscore\n" + "".join(f"{lines[at]}\t{lines[at + 1]}\t{at % 6}\n" for at in range(24))
    one = "sentence\tlabel\n" + "".join(f"{lines[at]}\t{at % 2}\n" for at in range(24))
    texts = {"SST-2": one, "STS-B": pair, "CoLA": one, "MRPC": one, "RTE": one}  # of the last three the names suffice
    for task, content in texts.items():
        (folder / "glue" / task).mkdir(parents=True)
        for part in ("train", "dev"):
            (folder / "glue" / task / f"{part}.tsv").write_text(content)
    bert.save(folder / "models" / "all-MiniLM-L6-v2")
    (folder / "tables").mkdir()
    torch.manual_seed(0)
    weights = {f"good.layer.0.{name}.weight": torch.randn(4, 8) for name in ("query", "key")}
    tables = {
        f"{name}.position_embeddings": waves(64, 8) + shift for shift, name in enumerate(("good", "fine", "third"))
    }
    save_file({**tables, **weights}, folder / "tables" / "all.safetensors")
    return folder


@pytest.mark.slow
def test_a_tiny_reproduction_runs_once(tmp_path, monkeypatch):
    """All claims, end to end. Run again, no step is repeated, and the findings are the same."""
    monkeypatch.setattr(workers, "LocalWorkers", OneProcess)
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    begun: list[str] = []

    def on_step(step, number, total):
        begun.append(step.name)
        return lambda share: None

    at = reproduction.begin(WHOLE, "tiny", out, data)
    reproduction.check_data(WHOLE.claims, at.size, at.data)
    first = list(reproduction.run(WHOLE.claims, at, on_step=on_step))
    assert [(finding.id, finding.problem) for finding in first] == [(claim, "") for claim in CLAIMS]
    steps = unique(step for claim in WHOLE.claims for step in claim.steps(at))
    assert sorted(begun) == sorted(step.name for step in steps), "each step once, also if claims share it"

    begun.clear()
    again = reproduction.begin(WHOLE, "tiny", out, data)
    second = list(reproduction.run(WHOLE.claims, again, on_step=on_step))
    assert begun == []
    assert [finding.verdict for finding in second] == [finding.verdict for finding in first]
    stored = reproduction.findings(WHOLE, again)

    verdicts = {finding.id: finding.verdict for finding in first}
    assert verdicts["A6"] == CONFIRMED
    measured = {finding.id: finding.found for finding in first}
    assert len(measured["A3"].parts) == 2
    assert measured["A4"].tables["models"].column("steps") == [4, 4, 8, 8]
    assert {row[1] for row in measured["A5"].tables["gains"].where(model="pretrained encoder").rows} == {
        arm.label for arm in tisa.ARMS[1:]
    }
    assert len(measured["A5"].tables["scores"].where(model="ALBERT shape").rows) == 3 * 2
    longer = measured["A7"].tables["lengths"]
    assert longer.where(scheme="native").column("length") == [16], "a table cannot read longer inputs"
    assert longer.where(scheme="tisa:kernels=5").column("length") == [16, 32]
    assert measured["A8"].tables["heads"].where(when="trained").column("head") == [1, 2, 1, 2]
    assert [row["tisa"] for row in at.measured("tisa-counts")["rows"]] == [36, 108, 180, 432, 1296, 2160]
    for claim in CLAIMS:
        assert FIGURES[claim](stored[claim].found) == FIGURES[claim](json_of(measured[claim]))


def json_of(found):
    """What is read back from a file: tuples have become lists."""
    tables = {name: Table(*json.loads(json.dumps([table.header, table.rows]))) for name, table in found.tables.items()}
    return Measured(found.parts, tables, found.sentences)
