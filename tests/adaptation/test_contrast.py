"""The contrastive stage: its loss, its batches, and which state it keeps."""

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from locant.adaptation import adapting, contrast, schedule, training
from locant.adaptation.agreement import StateAgreement
from locant.adaptation.contrast import Contrast, ContrastBatches, held_out_documents, info_nce
from locant.adaptation.distillation import TrainingBatches
from locant.adaptation.running_text import RunningText
from locant.adaptation.sample import Sampler
from tests import hf_models, words
from tests.adaptations import TOKENS, adapted

LINES = words.text(800)


def contrasted(model=None, *, steps=10, **options):
    """A small adaptation with a contrastive stage. The original has 40 positions."""
    options = {"budget": "2steps", "contrast": f"{steps}steps", "length": 96, "text": LINES, **options}
    return adapted(hf_models.make("bert") if model is None else model, **options)


def test_the_loss_is_info_nce_in_both_directions():
    generator = torch.Generator().manual_seed(0)
    documents = torch.nn.functional.normalize(torch.randn(3, 4, generator=generator, dtype=torch.float64), dim=-1)
    queries = torch.nn.functional.normalize(torch.randn(4, 4, generator=generator, dtype=torch.float64), dim=-1)
    owners = [0, 0, 2, 1]
    total = 0.0
    for number, owner in enumerate(owners):

        def similar(query, document):
            return math.exp(float(queries[query] @ documents[document]) / 0.05)

        among_documents = sum(similar(number, document) for document in range(3))
        others = [query for query in range(4) if query == number or owners[query] != owner]
        among_queries = sum(similar(query, owner) for query in others)
        total -= math.log(similar(number, owner) / among_documents) + math.log(similar(number, owner) / among_queries)
    assert float(info_nce(documents, queries, torch.tensor(owners))) == pytest.approx(total / 8)


def batches(seed=0, steps=6):
    sequences = TrainingBatches(Sampler(TOKENS, LINES), StateAgreement(), [16], steps, seed)
    return ContrastBatches(RunningText(TOKENS, LINES, 96), sequences, seed)


def flat(batch):
    return [each["input_ids"].tolist() for part in ("documents", "queries") for each in batch[part]]


def test_seed_and_step_alone_decide_a_batch():
    first, again = batches(), batches()
    later = flat(first[4])
    assert [flat(again[step]) for step in range(5)][4] == later
    assert flat(first[3]) != later
    assert flat(batches(seed=1)[4]) != later


def twenty_words(rows):
    """Every twenty tokens that follow one another in a row."""
    return {tuple(row[at : at + 20]) for row in rows for at in range(len(row) - 19)}


def test_held_out_lines_are_never_trained_on(monkeypatch):
    seen, real = [], Contrast.loss

    def loss(self, student, batch):
        parts = [*batch["documents"], *batch["queries"], batch["sequences"]]
        seen.extend(row for part in parts for row in part["input_ids"].tolist())
        return real(self, student, batch)

    monkeypatch.setattr(Contrast, "loss", loss)
    contrasted(steps=20)
    held_out, trained = (
        twenty_words(TOKENS(lines, add_special_tokens=False)["input_ids"])
        for lines in (adapting.held_out(LINES), adapting.trained_on(LINES))
    )
    assert len(twenty_words(seen) & trained) > 100
    assert not twenty_words(seen) & (held_out - trained)


def test_held_out_documents_are_made_of_held_out_lines():
    found = held_out_documents(TOKENS, adapting.held_out(LINES), 96, 0)
    lines = adapting.held_out(LINES)
    whole = " ".join(str(token) for line in TOKENS(lines, add_special_tokens=False)["input_ids"] for token in line)
    for batch in found.queries:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            assert " ".join(map(str, ids[: int(mask.sum())][1:-1].tolist())) in whole
    assert found.count >= 10
    with pytest.raises(ValueError, match="Pass a longer text, or a smaller length"):
        held_out_documents(TOKENS, adapting.held_out(LINES), 10_000, 0)


def test_many_held_out_documents_are_thinned_in_groups_of_neighbours(monkeypatch):
    monkeypatch.setattr(contrast, "HELD_OUT_DOCUMENTS", 8)
    assert held_out_documents(TOKENS, LINES, 96, 0).count == 8


def topics(lines=1600, each=8):
    """A text whose topic, a third of the words, changes every few lines."""
    rng, found = random.Random(0), []
    for at in range(lines):
        if at % each == 0:
            known = rng.sample(words.WORDS, 18)
        found.append(" ".join(" ".join(rng.choices(known, k=rng.randrange(8, 14))) + "." for _ in range(3)))
    return found


def test_training_raises_retrieval_on_held_out_text(monkeypatch):
    monkeypatch.setattr(contrast, "MOST_LOST", 1.0)  # random weights have no short texts worth keeping
    done = contrasted(steps=30, text=topics())
    found = done.contrast
    assert found.kept.retrieval > found.start.retrieval + 0.02
    assert [row.state for row in done.rows] == ["original", "silenced", "fitted", "adapted", "contrasted"]


def scripted(monkeypatch, *values):
    """Replaces evaluations by (retrieval, agreement); returns the weights that the model had at each."""
    left, weights = iter(values), []

    def evaluate(self, student):
        weights.append(training.trained_weights(student))
        retrieval, agreement = next(left)
        return {"retrieval": retrieval, "agreement": agreement}

    monkeypatch.setattr(Contrast, "evaluate", evaluate)
    return weights


def equal(model, weights):
    parameters = dict(model.named_parameters())
    return all(torch.equal(weight, parameters[name]) for name, weight in weights.items())


def test_a_tie_keeps_the_start(monkeypatch, tmp_path):
    weights = scripted(monkeypatch, *[(0.5, 0.9)] * 3)
    model = hf_models.make("bert")
    done = contrasted(model, out=tmp_path)
    assert done.contrast.kept.step == 0
    assert not equal(model, weights[2])  # training did change them
    assert equal(model, weights[0])
    assert equal(contrasted(contrast=None).model, weights[0])  # as distillation left it
    assert "the contrastive stage changed nothing" in done.notices[-1]
    assert [row.state for row in done.rows][-1] == "adapted"
    assert "No state of it was kept" in (tmp_path / "README.md").read_text()


def test_the_best_state_that_kept_its_agreement_is_kept(monkeypatch):
    lost = 0.9 - contrast.MOST_LOST - 0.001
    weights = scripted(monkeypatch, (0.5, 0.9), (0.6, 0.9), (0.7, 0.9 - contrast.MOST_LOST), (0.9, lost), (0.65, 0.9))
    model = hf_models.make("bert")
    done = contrasted(model, steps=20)
    assert done.contrast.kept.step == 10
    assert equal(model, weights[2])
    assert not equal(model, weights[4])
    assert not [notice for notice in done.notices if "contrast" in notice]


def test_training_stops_if_no_state_may_be_kept(monkeypatch):
    scripted(monkeypatch, (0.5, 0.9), *[(0.8, 0.5)] * 8)
    done = contrasted(steps=40)
    assert done.contrast.evaluations[-1].step == 5 * (1 + training.PATIENCE)
    assert done.contrast.kept.step == 0


def test_the_result_is_shown_and_the_curve_is_written(tmp_path, monkeypatch):
    scripted(monkeypatch, (0.5, 0.9), (0.6, 0.9), (0.7, 0.9))
    done = contrasted(out=tmp_path)
    table = str(done)
    assert "| before contrast | 0.5000 | 0.9000 |" in table
    assert "| after step 10 | 0.7000 | 0.9000 |" in table
    assert "| contrasted |" in table
    card = (tmp_path / "README.md").read_text()
    assert table in card
    assert "for 10 steps (budget 10steps). The state after step 10 was kept." in card
    lines = (tmp_path / "contrast.csv").read_text().splitlines()
    assert lines[0] == "step,retrieval,agreement,seconds"
    assert [line.split(",")[:3] for line in lines[1:]] == [
        ["0", "0.5", "0.9"], ["5", "0.6", "0.9"], ["10", "0.7", "0.9"]]  # fmt: skip
    assert not (tmp_path / "contrast").exists()
    kept = json.loads((tmp_path / "adapt.json").read_text())
    assert (kept["contrast"], kept["contrast_steps"], kept["contrast_kept"]) == ("10steps", 10, 10)


def test_an_interrupted_stage_resumes_and_ends_with_the_same_bits(tmp_path):
    def stop(found, steps):
        if found.retrieval is not None and found.step == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contrasted(steps=20, out=tmp_path / "stopped", on_evaluation=stop)
    assert (tmp_path / "stopped" / "contrast" / "checkpoint-10").exists()
    seen = []
    again, whole = (
        contrasted(steps=20, out=tmp_path / name, on_evaluation=lambda found, steps: seen.append(found.step))
        for name in ("stopped", "whole")
    )
    assert seen == [15, 20, 2, 5, 10, 15, 20]  # the first went on; the second has a distillation too
    for one, other in zip(again.contrast.evaluations, whole.contrast.evaluations, strict=True):
        assert (one.step, one.retrieval, one.agreement) == (other.step, other.retrieval, other.agreement)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert weights[0] == weights[1]


def test_another_contrast_does_not_resume(tmp_path):
    def stop(found, steps):
        if found.retrieval is not None and found.step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contrasted(out=tmp_path, on_evaluation=stop)
    with pytest.raises(ValueError, match="contrast: '10steps' there, None now"):
        contrasted(out=tmp_path, contrast=None)


@pytest.mark.parametrize(
    ("kind", "auto", "words"),
    [
        ("gpt2", AutoModelForCausalLM, "has a head, and is compared by same first token"),
        ("bert", AutoModelForMaskedLM, "has a head, and is compared by same first token"),
        ("bert", AutoModelForSequenceClassification, "has a head, and is compared by same label"),
        ("gpt2", None, "GPT2Model is causal: its tokens do not see the tokens after them"),
    ],
)
def test_other_models_are_refused_before_anything_happens(kind, auto, words, tmp_path):
    stages = []
    with pytest.raises(ValueError, match=words):
        contrasted(hf_models.make(kind, *([auto] if auto else [])), out=tmp_path / "out", on_stage=stages.append)
    assert stages == []
    assert not (tmp_path / "out").exists()


def test_wrong_budgets_and_small_texts_are_refused_before_anything_happens():
    stages = []
    with pytest.raises(ValueError, match="a budget must look like"):
        contrasted(contrast="soon", on_stage=stages.append)
    with pytest.raises(ValueError, match="Pass a longer text"):
        contrasted(text=words.text(20), on_stage=stages.append)
    assert stages == []


def test_a_time_becomes_steps_once(monkeypatch):
    monkeypatch.setattr(contrast, "seconds_of_step", lambda *_: 1.0)
    stages = []
    done = contrasted(contrast="25s", on_stage=stages.append)
    assert 5 <= done.contrast.evaluations[-1].step < 25  # evaluations and the timing itself take real time
    assert [stage for stage in stages if stage.startswith("contrast: 25s have room for")]
    done = contrasted(contrast="3s")
    assert done.contrast is None
    assert "there was no contrastive stage: fewer than 5 steps of 1 s fit into 3s" in done.notices[-1]


def test_evaluations_are_part_of_the_time():
    pace = schedule.Pace(1.0, 2.0, every=5)
    assert pace.seconds(10) == 14.0
    assert pace.steps(14.0) == 10


def test_the_scheme_alone_can_be_trained():
    model = hf_models.make("bert")
    before = {name: weight.clone() for name, weight in model.named_parameters() if "position" not in name}
    done = contrasted(model, train="scheme", steps=5)
    after = dict(model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert done.contrast is not None
