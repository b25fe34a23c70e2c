"""`locant.adapt`: a model learns to be what it was, in a folder that survives."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
)

import locant
from locant.adaptation import adapting, distil, scores
from tests import bert, hf_models, words
from tests.adaptations import TOKENS, adapted


@pytest.mark.parametrize(
    ("kind", "auto"),
    [("bert", None), ("gpt2", AutoModelForCausalLM), ("llama", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)],
)
def test_training_brings_a_model_nearer_to_the_original(kind, auto):
    model = hf_models.make(kind, *([auto] if auto else []))
    done = adapted(model, budget="60steps")
    original, silenced, fitted, after = (row.agreement for row in done.rows)
    assert [row.state for row in done.rows] == ["original", "silenced", "fitted", "adapted"]
    assert original == pytest.approx(1.0)
    assert after > fitted
    assert after > silenced
    assert done.model is model
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_scheme_alone_leaves_every_other_weight_as_it_was():
    model = hf_models.make("bert")
    before = {name: weight.clone() for name, weight in model.named_parameters() if "position" not in name}
    done = adapted(model, train="scheme", budget="60steps")
    after = dict(model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert done.rows[3].agreement > done.rows[2].agreement


def test_the_original_shares_its_weights_where_they_do_not_change():
    model = hf_models.make("bert")
    shared, apart = distil.frozen(model, shared=True), distil.frozen(model, shared=False)
    places = {weight.data_ptr() for weight in model.parameters()}
    assert all(weight.data_ptr() in places for weight in shared.parameters())
    assert not any(weight.data_ptr() in places for weight in apart.parameters())
    locant.swap(model, "alibi")
    ids = words.rows()
    torch.testing.assert_close(hf_models.output(shared, input_ids=ids), hf_models.output(apart, input_ids=ids))


def test_the_folder_opens_as_the_model_it_is(tmp_path):
    torch.manual_seed(0)
    path = bert.save(tmp_path / "model")
    model, ids = locant.load(path), torch.randint(5, 60, (2, 100))
    done = locant.adapt(model, "alibi:slopes=learned", words.text(), budget="4steps", length=32, out=tmp_path / "out")
    with torch.no_grad():  # longer than the 64 positions it had
        torch.testing.assert_close(
            locant.load(tmp_path / "out")(input_ids=ids).last_hidden_state, model(input_ids=ids).last_hidden_state
        )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length > 10_000
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(done) in card
    assert f"| adapted | {done.rows[3].agreement:.4f} |" in card
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    kept = json.loads((tmp_path / "out" / "adapt.json").read_text())
    assert kept["steps"] == 4
    assert [row["state"] for row in kept["table"]] == ["original", "silenced", "fitted", "adapted"]
    with pytest.raises(ValueError, match="is done"):
        locant.adapt(locant.load(path), "alibi", words.text(), out=tmp_path / "out")


def test_another_adaptation_does_not_go_into_the_same_folder(tmp_path):
    (tmp_path / "adapt.json").write_text('{"spec": "alibi", "steps": 3}')
    with pytest.raises(ValueError, match=r"spec: 'alibi' there, 'tisa' now"):
        adapted(hf_models.make("bert"), "tisa", out=tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        adapted(hf_models.make("bert"), "tisa", out=tmp_path / "full")


SCRIPT = """
    import sys, torch, locant
    from pathlib import Path
    from tests import hf_models, words
    torch.set_num_threads(1)
    found = locant.adapt(
        hf_models.make("bert"), "tisa:kernels=3", words.text(), budget="40steps", tokenizer=words.Tokenizer(),
        length=32, out=Path(sys.argv[1]),
    )
    print(repr(found.rows[3].agreement))
"""


def test_one_that_is_killed_ends_as_an_undisturbed_one(tmp_path):
    def run(out):
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})

    first = run(tmp_path / "whole").communicate()[0]
    (tmp_path / "killed").mkdir()
    killed = run(tmp_path / "killed")
    while not any((tmp_path / "killed").glob("checkpoint-*/WHOLE")):
        assert killed.poll() is None
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed" / "DONE").exists()
    again = run(tmp_path / "killed")
    assert first
    assert first == again.communicate()[0]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_a_budget_of_time_becomes_steps_once(tmp_path):
    what, budget = {}, adapting.Budget.parse("10s")
    assert adapting._steps(tmp_path, what, budget, took=3.0, pace=lambda: (0.5, 0.05)) == 13  # and a look
    assert adapting._steps(tmp_path, what, budget, took=1.0, pace=lambda: (0.1, 0.0)) == 13  # as it was written down
    assert json.loads((tmp_path / "adapt.json").read_text())["steps"] == 13
    much = adapting.Budget.parse("1000s")  # 10 looks, and not 199
    assert adapting._steps(tmp_path, {}, much, took=0.0, pace=lambda: (0.5, 1.0)) == 1980


def test_it_stops_where_nothing_gets_better(monkeypatch):
    monkeypatch.setattr(distil, "SCHEME_RATE", 0.0)
    monkeypatch.setattr(distil, "PATIENCE", 3)
    monkeypatch.setattr(distil, "EVERY", 1)
    done = adapted(hf_models.make("bert"), rate=0.0)
    assert len(done.looks) == 4  # one, and three that are no better


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match="train must be one of scheme, all"):
        adapted(hf_models.make("bert"), train="some")
    with pytest.raises(ValueError, match="a budget must look like"):
        adapted(hf_models.make("bert"), budget="soon")
    with pytest.raises(ValueError, match="AutoModelForTextEncoding"):
        adapted(hf_models.make("t5"))


def test_a_scheme_without_parameters_is_adapted_by_the_other_weights():
    done = adapted(hf_models.make("llama", AutoModelForCausalLM), "nope", train="scheme", budget="4steps")
    assert done.looks == []  # there is nothing to train
    done = adapted(hf_models.make("llama", AutoModelForCausalLM), "nope", budget="60steps")
    assert done.rows[3].agreement > done.rows[1].agreement


def test_a_model_that_was_swapped_is_not_taken_for_an_original():
    with pytest.raises(ValueError, match="swapped already"):
        adapted(locant.swap(hf_models.make("bert"), "alibi"))


@pytest.mark.parametrize("train", ["all", "scheme"])
def test_a_model_is_as_it_was_where_it_is_stopped(train):
    model, ids = hf_models.make("bert"), words.rows()
    before = hf_models.output(model, input_ids=ids)

    def stop(found, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(model, train=train, look=stop)
    assert torch.equal(hf_models.output(model, input_ids=ids), before)
    assert str(locant.native(model)).startswith("absolute")


def test_what_was_wrong_with_one_call_is_not_kept_for_the_next(tmp_path):
    (tmp_path / ".lock").touch()
    for spec, budget in (("tsia", "2steps"), ("tisa", "soon")):
        with pytest.raises(ValueError, match=r"tsia|soon"):
            adapted(hf_models.make("bert"), spec, budget=budget, out=tmp_path)
    assert adapted(hf_models.make("bert"), "tisa", budget="2steps", out=tmp_path).steps == 2


def test_nothing_decays():
    model = locant.swap(hf_models.make("bert"), "tisa+first")
    groups, sizes = distil._groups(model, 1e-3)
    optimizer = distil.InUnits(groups, sizes)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}
    assert len(optimizer.param_groups[0]["params"]) == 2 * 3 + 2  # all of the schemes, and no more
    fire = locant.swap(hf_models.make("bert"), "fire")
    assert len(distil._groups(fire, 1e-3)[1]) == len([name for name, _ in fire.named_parameters() if "locant" in name])


@pytest.mark.parametrize(("kind", "turned"), [("bert", False), ("gpt2", False), ("llama", True), ("gpt_neox", True)])
def test_queries_are_turned_where_positions_were_inside_the_product(kind, turned):
    assert adapting._rotates(hf_models.make(kind)) == turned


def test_what_the_caller_had_is_as_it_was():
    import random

    import numpy as np
    import transformers

    def everything(model):
        drawn = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        return drawn, model.training, model.config.use_cache, transformers.utils.logging.get_verbosity()

    def stop(found, steps):
        raise KeyboardInterrupt

    model = hf_models.make("gpt2", AutoModelForCausalLM).train()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        adapted(model, budget="2steps", look=stop)
    assert everything(model) == before
    adapted(model, budget="2steps")
    assert everything(model) == before


def test_another_model_or_text_does_not_go_on_from_a_checkpoint(tmp_path):
    def stop(found, steps):
        if found.step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), budget="20steps", out=tmp_path, look=stop)
    with pytest.raises(ValueError, match="weights: "):
        adapted(hf_models.make("bert", seed=1), budget="20steps", out=tmp_path)
    other = hf_models.make("bert")
    with torch.no_grad():
        other.encoder.layer[0].output.dense.weight[3, 5] *= -1  # one number will do
    with pytest.raises(ValueError, match="weights: "):
        adapted(other, budget="20steps", out=tmp_path)
    with pytest.raises(ValueError, match="text: "):
        locant.adapt(hf_models.make("bert"), "tisa:kernels=3", words.text()[::-1], budget="20steps", tokenizer=TOKENS,
                     length=32, out=tmp_path)  # fmt: skip
    assert adapted(hf_models.make("bert"), budget="20steps", out=tmp_path).steps == 20


def test_a_score_must_be_a_number_before_anything_is_trained():
    with pytest.raises(TypeError, match="the score mine must be a number, got None"):
        adapted(hf_models.make("bert"), scores={"mine": lambda model, tokenizer: None})
    done = adapted(hf_models.make("bert"), budget="1steps", scores={"mine": lambda model, tokenizer: torch.tensor(0.5)})
    assert [row.scores for row in done.rows] == [{"mine": 0.5}] * 4


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match=r"call model\.float\(\)"):
        adapted(hf_models.make("bert").bfloat16())


def test_lines_that_are_measured_on_are_not_trained_on():
    for count in (2, 5, 19, 20, 21, 100, 639, 640, 5000):
        lines = [str(number) for number in range(count)]
        held, rest = adapting.held_out(lines), adapting.trained_on(lines)
        assert held
        assert sorted([*held, *rest]) == sorted(lines)
    assert held[:16] == [str(number) for number in range(304, 320)]  # a text, not lines of many


def test_steps_in_units_are_those_of_a_rate_for_each_number():
    start, unit = torch.randn(6), torch.tensor([1.0, 0.1, 10, 1, 2, 0.5])
    ours = torch.nn.Parameter(start.clone())
    optimizer = distil.InUnits([{"params": [ours], "lr": 0.01}], {ours: unit})
    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    plain = torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 * float(u)} for p, u in zip(theirs, unit, strict=True)], weight_decay=0.0
    )
    for number in range(5):
        gradient = torch.randn(6)
        ours.grad = gradient.clone()
        for p, g in zip(theirs, gradient, strict=True):
            p.grad = g.clone()
        optimizer.step()
        plain.step()
        torch.testing.assert_close(ours.data, torch.stack([p.data for p in theirs]), msg=f"step {number}")


def test_a_model_is_adapted_past_its_length():
    done = adapted(hf_models.make("bert"), "alibi", length=128, budget="20steps")  # it had 40 positions
    assert done.model(input_ids=words.rows(1, 128)).last_hidden_state.isfinite().all()
    assert done.rows[3].agreement > done.rows[2].agreement


def test_one_that_stopped_by_itself_and_was_killed_then_trains_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(distil, "SCHEME_RATE", 0.0)
    monkeypatch.setattr(distil, "EVERY", 1)
    calls = []

    def score(model, tokenizer):
        calls.append(model)
        if len(calls) == 4:  # the adapted model is measured
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), budget="30steps", rate=0.0, out=tmp_path, scores={"it": score})
    stopped = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert stopped < 30
    steps, real = [], distil._loss
    monkeypatch.setattr(distil, "_loss", lambda *args: steps.append(1) or real(*args))
    assert (
        adapted(hf_models.make("bert"), budget="30steps", rate=0.0, out=tmp_path, scores={"it": score}).steps == stopped
    )
    assert steps == []


@pytest.mark.parametrize("spec", ["tisa:kernels=3 + first", "tisa:kernels=3+First", "tisa:kernels=3+first"])
def test_what_a_table_leaves_is_added_once(spec):
    models = [hf_models.make("bert"), hf_models.make("bert")]
    for model, each in zip(models, (spec, "tisa:kernels=3"), strict=True):
        locant.fit(model, each, words.text(), tokenizer=TOKENS, length=16, tokens=64)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(*(model(input_ids=ids).last_hidden_state for model in models))


def test_another_tokenizer_does_not_go_on(tmp_path):
    def stop(found, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), out=tmp_path, look=stop)
    with pytest.raises(ValueError, match="tokens: "):
        adapted(hf_models.make("bert"), out=tmp_path, tokenizer=words.Letters())


def test_tokens_the_model_does_not_know_are_refused():
    model = hf_models.make("bert", vocab_size=10)
    for run in (adapted, lambda model: locant.fit(model, "tisa", words.text(), tokenizer=TOKENS)):
        with pytest.raises(ValueError, match="and BertModel has 10; give the tokenizer"):
            run(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"seed": -1}, "seed must be"), ({"length": "32"}, "length must be"), ({"budget": 4}, "budget must look like")],
)
def test_numbers_are_checked_before_anything_is_done(options, said):
    with pytest.raises(ValueError, match=said):
        adapted(hf_models.make("bert"), **options)


def test_parts_keep_their_modes_and_configs_their_entries():
    model = hf_models.make("distilbert").train()
    model.embeddings.eval()
    adapted(model, budget="2steps")
    assert model.training
    assert not model.embeddings.training
    assert "use_cache" not in vars(model.config)


def test_a_correlation_needs_pairs(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\nOne.\tTwo.\t1.0\n")
    with pytest.raises(ValueError, match="at least 3"):
        scores.score(f"stsb:{tmp_path}", [], 32)
