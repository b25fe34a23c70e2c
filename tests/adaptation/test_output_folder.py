"""The folder of an adaptation: it resumes, rejects another adaptation, and opens as a model."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import locant
from locant.adaptation import distillation, training
from locant.adaptation.adapting import CAUSAL_LENGTH, trained_on
from locant.adaptation.fit_record import kept_fit
from locant.adaptation.output_folder import OutputFolder
from locant.adaptation.schedule import Pace
from locant.runs.budget import Budget
from tests import bert, hf_models, words
from tests.adaptations import FIT_TOKENS, TEXT, TOKENS, adapted


def test_the_folder_opens_as_the_adapted_model(tmp_path):
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
    (tmp_path / "out" / "checkpoint-4").mkdir()  # a process that is killed at the end leaves one
    with pytest.raises(ValueError, match="is done"):
        locant.adapt(locant.load(path), "alibi", words.text(), out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_an_adaptation_that_resumes_does_not_fit_again(tmp_path, monkeypatch):
    """A second fit under a time limit may end elsewhere."""
    monkeypatch.setattr(training.Stage, "every", 2)

    def stop(found, steps):
        if found.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), budget="4steps", out=tmp_path / "stopped", on_evaluation=stop)
    whole = adapted(hf_models.make("bert"), budget="4steps", out=tmp_path / "whole")
    said = []
    again = adapted(hf_models.make("bert"), budget="4steps", out=tmp_path / "stopped", on_stage=said.append)
    assert "training" in said
    assert not [stage for stage in said if stage.startswith("fitting")]
    assert again.fit.heads == whole.fit.heads
    assert again.fit.notices == whole.fit.notices
    assert again.rows == whole.rows
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "stopped" / "fitted.safetensors").exists()


def test_the_kept_fit_of_a_rotary_model_has_its_queries(tmp_path, monkeypatch):
    monkeypatch.setattr(training.Stage, "every", 1)

    def stop(found, steps):
        if found.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("llama"), budget="2steps", out=tmp_path, on_evaluation=stop)
    changed = load_file(tmp_path / "fitted.safetensors")
    assert [name for name in changed if "q_proj" in name]
    model = hf_models.make("llama")
    found = kept_fit(tmp_path, model, "tisa:kernels=3")
    fresh = hf_models.make("llama")
    fitted = locant.fit(fresh, "tisa:kernels=3", trained_on(TEXT), tokenizer=TOKENS, length=CAUSAL_LENGTH, queries=True,
                        tokens=FIT_TOKENS)  # fmt: skip
    assert found.heads == fitted.heads
    ids = torch.randint(5, 60, (2, 30))
    assert torch.equal(hf_models.output(model, input_ids=ids), hf_models.output(fresh, input_ids=ids))


def test_a_damaged_fit_is_refused_in_words(tmp_path):
    (tmp_path / "fitted.safetensors").write_bytes(b"no fit")
    with pytest.raises(ValueError, match=r"fitted\.safetensors is damaged"):
        kept_fit(tmp_path, hf_models.make("bert"), "tisa")


def test_a_folder_rejects_another_adaptation(tmp_path):
    (tmp_path / "adapt.json").write_text('{"spec": "alibi", "steps": 3}')
    with pytest.raises(ValueError, match=r"spec: 'alibi' there, 'tisa' now"):
        adapted(hf_models.make("bert"), "tisa", out=tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ValueError, match="contains files that locant did not write"):
        adapted(hf_models.make("bert"), "tisa", out=tmp_path / "full")


SCRIPT = """
    import sys, torch
    from pathlib import Path
    from tests import hf_models
    from tests.adaptations import adapted
    torch.set_num_threads(1)
    adapted(hf_models.make("bert"), budget="40steps", out=Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_killed_adaptation_resumes_and_ends_with_the_same_bits(tmp_path):
    """Another process is killed, and this one resumes."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "killed")]
    (tmp_path / "killed").mkdir()
    killed = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    while not any((tmp_path / "killed").glob("checkpoint-*/WHOLE")):
        assert killed.poll() is None
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "DONE").exists()
    again, undisturbed = (
        adapted(hf_models.make("bert"), budget="40steps", out=tmp_path / name) for name in ("killed", "whole")
    )
    assert again.rows[3].agreement == undisturbed.rows[3].agreement
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


def test_a_budget_of_time_becomes_steps_once(tmp_path):
    folder, budget = OutputFolder(tmp_path, {}), Budget.parse("10s")
    assert not folder.resumed
    assert folder.steps(budget, Pace(0.5, 0.05, timing=1.0), fit_seconds=2.0) == 13  # and two evaluations
    assert folder.resumed
    assert folder.steps(budget, None, fit_seconds=1.0) == 13  # as written to the folder
    assert json.loads((tmp_path / "adapt.json").read_text())["steps"] == 13
    much = Budget.parse("1000s")  # 10 evaluations, not 199
    assert OutputFolder(tmp_path, {}).steps(much, Pace(0.5, 1.0), fit_seconds=0.0) == 1980
    assert OutputFolder(tmp_path, {}).steps(budget, Pace(1.0, 0.0), fit_seconds=6.0) == 0  # four would be too few
    assert OutputFolder(tmp_path, {}).steps(budget, Pace(1.0, 0.0), fit_seconds=5.0) == 5


def test_a_call_that_raised_leaves_nothing_in_the_folder(tmp_path):
    (tmp_path / ".lock").touch()
    for spec, budget in (("tsia", "2steps"), ("tisa", "soon")):
        with pytest.raises(ValueError, match=r"tsia|soon"):
            adapted(hf_models.make("bert"), spec, budget=budget, out=tmp_path)
    assert adapted(hf_models.make("bert"), "tisa", budget="2steps", out=tmp_path).steps == 2


def test_an_adaptation_that_stops_before_its_first_checkpoint_leaves_nothing(tmp_path):
    def stop(found, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), out=tmp_path / "a" / "out", on_evaluation=stop)
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_text_does_not_resume(tmp_path):
    def stop(found, steps):
        if found.step == 20:  # after the first checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), budget="20steps", out=tmp_path, on_evaluation=stop)
    with pytest.raises(ValueError, match="weights: "):
        adapted(hf_models.make("bert", seed=1), budget="20steps", out=tmp_path)
    other = hf_models.make("bert")
    with torch.no_grad():
        other.encoder.layer[0].output.dense.weight[3, 5] *= -1  # one number will do
    with pytest.raises(ValueError, match="weights: "):
        adapted(other, budget="20steps", out=tmp_path)
    with pytest.raises(ValueError, match="text: "):
        adapted(hf_models.make("bert"), text=words.text()[::-1], budget="20steps", out=tmp_path)
    assert adapted(hf_models.make("bert"), budget="20steps", out=tmp_path).steps == 20


def test_a_training_that_stopped_early_and_was_killed_does_no_more_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SCHEME_RATE", 0.0)
    monkeypatch.setattr(training.Stage, "every", 1)
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
    steps, real = [], distillation.distillation_loss
    monkeypatch.setattr(distillation, "distillation_loss", lambda *args: steps.append(1) or real(*args))
    assert (
        adapted(hf_models.make("bert"), budget="30steps", rate=0.0, out=tmp_path, scores={"it": score}).steps == stopped
    )
    assert steps == []


def test_another_tokenizer_does_not_resume(tmp_path):
    def stop(found, steps):
        if found.step == 20:  # after the first checkpoint
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), out=tmp_path, on_evaluation=stop)
    with pytest.raises(ValueError, match="tokens: "):
        adapted(hf_models.make("bert"), out=tmp_path, tokenizer=words.Letters())
