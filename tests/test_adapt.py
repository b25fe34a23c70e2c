"""`locant.adapt`: a model learns to be what it was, in a folder that survives."""

import copy
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
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from typer.testing import CliRunner

import locant
from locant.adaptation import adapting, distil, scores
from locant.adaptation.agreement import Agreement, Next, States, Tokens, agreement_for, pooled
from locant.adaptation.documents import Sentences, articles
from locant.adaptation.sample import Sampler, pieces
from locant.adaptation.windows import Windows
from locant.analysis.text import special_tokens
from locant.cli import app
from locant.experiments import folder
from tests import bert, hf_models, words

TOKENS = words.Tokenizer()


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """Models of a few thousand random weights are far from anything and learn at another rate."""
    for kind in (Agreement, Next):
        monkeypatch.setattr(kind, "rate", 2e-3)


def adapted(model, spec="tisa:kernels=3", budget="20steps", **options):
    options = {"tokenizer": TOKENS, "length": 32, **options}
    return locant.adapt(model, spec, words.text(), budget=budget, **options)


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
    monkeypatch.setattr(Agreement, "rate", 0.0)
    monkeypatch.setattr(distil, "SCHEME_RATE", 0.0)
    monkeypatch.setattr(distil, "PATIENCE", 3)
    monkeypatch.setattr(distil, "EVERY", 1)
    done = adapted(hf_models.make("bert"), budget="20steps")
    assert len(done.looks) == 4  # one, and three that are no better


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match="train must be one of scheme, all"):
        adapted(hf_models.make("bert"), train="some")
    with pytest.raises(ValueError, match="--budget must look like"):
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
    with pytest.raises(ValueError, match="text: "):
        locant.adapt(hf_models.make("bert"), "tisa:kernels=3", words.text()[::-1], budget="20steps", tokenizer=TOKENS,
                     length=32, out=tmp_path)  # fmt: skip
    assert adapted(hf_models.make("bert"), budget="20steps", out=tmp_path).steps == 20


def test_a_score_must_be_a_number_before_anything_is_trained():
    with pytest.raises(TypeError, match="the score mine must be a number, got None"):
        adapted(hf_models.make("bert"), scores={"mine": lambda model, tokenizer: None})
    done = adapted(hf_models.make("bert"), budget="1steps", scores={"mine": lambda model, tokenizer: torch.tensor(0.5)})
    assert [row.scores for row in done.rows] == [{"mine": 0.5}] * 4


def test_a_swapped_model_reads_long_documents_at_once(tmp_path, monkeypatch):
    ways = []
    monkeypatch.setattr(Sentences, "accuracy", lambda self, model, way: ways.append((way, self.limit)) or 0.5)
    (tmp_path / "wiki.txt").write_text("".join(f"\n = {n} = \n\n{document(n, 200)}" for n in range(30, 34)))
    task = scores.score(f"sentences:{tmp_path / 'wiki.txt'}", [], 32)
    model = hf_models.make("bert")  # of 40 positions
    task(model, TOKENS)
    task(locant.swap(model, "alibi"), TOKENS)
    assert ways == [("chunked", 40), ("whole", 40)]
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        scores.score("sentences:nowhere.txt", [], 32)


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


# ------------------------------------------------------------------------------------------------------- agreement


def test_the_loss_is_what_it_says():
    states, others = torch.randn(2, 3, 5, 4).unbind()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    batch = {"attention_mask": mask}
    vectors = [[], []]
    near = far = 0.0
    for row in range(3):
        n = int(mask[row].sum())
        means = [x[row, :n].mean(0) for x in (states, others)]
        for side in (0, 1):
            vectors[side].append(means[side] / means[side].norm())
        near += float((states[row, :n] - others[row, :n]).square().sum())
        far += float(states[row, :n].square().sum())
    apart = sum(float((a - b).square().sum()) for a, b in zip(*vectors, strict=True)) / 3
    assert float(States().loss((states,), (others,), batch)) == pytest.approx(apart + 0.5 * near / far, rel=1e-5)
    cosine = sum(float(a @ b) for a, b in zip(*vectors, strict=True))
    assert States().measure(states, others, batch) == (pytest.approx(cosine, rel=1e-5), 3)


def test_tokens_that_are_padded_or_not_masked_do_not_count():
    kind = Tokens(mask_token=4)
    batch = {"input_ids": torch.tensor([[7, 4, 8, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    first, second = torch.randn(2, 1, 4, 9).unbind()
    wanted = torch.nn.functional.kl_div(
        second[0, 1].log_softmax(-1), first[0, 1].log_softmax(-1), log_target=True, reduction="sum"
    )
    torch.testing.assert_close(kind.loss((first,), (second,), batch), wanted)
    assert kind.measure(kind.keep(first), first, batch) == (1.0, 1)
    ids = torch.full((40, 50), 7)
    ids[:, 0] = 2
    hidden = Tokens(4, {2, 3}).prepare({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, seed=0)["input_ids"]
    assert float((hidden[:, 1:] == 4).double().mean()) == pytest.approx(0.15, abs=0.02)
    assert bool((hidden[:, 0] == 2).all())  # special tokens stay


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_causal_model_is_held_to_some_of_what_it_says_and_all_of_its_states(kind):
    model, other = (hf_models.make(kind, AutoModelForCausalLM) for _ in range(2))
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    ids = words.rows(3, 19)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    batch, next_ = {"input_ids": ids, "attention_mask": mask}, Next()
    places = next_.places(batch)
    assert places.tolist() == list(range(int(ids.sum()) % 4, 19, 4))
    with torch.no_grad():
        lessons = [next_.lesson(each, batch, places) for each in (model, other)]
        full = [each(**batch, output_hidden_states=True) for each in (model, other)]
    wanted, count = 0.0, 0
    for row in range(3):
        for place in places.tolist():
            if mask[row, place]:
                first, second = (x.logits[row, place].double().log_softmax(-1) for x in full)
                wanted, count = wanted + float((first.exp() * (first - second)).sum()), count + 1
    states = 0.0
    layers = len(full[0].hidden_states) - 1
    for layer in range(1, layers + 1):
        first, second = (x.hidden_states[layer][mask.bool()].double() for x in full)
        states += float((first - second).square().sum() / first.square().sum()) / layers
    assert float(next_.loss(*lessons, batch)) == pytest.approx(wanted / count + states, rel=1e-4)


def test_every_place_has_its_turn():
    seen = {int(Next().places({"input_ids": torch.tensor([[n, 1, 1, 1, 1]])})[0]) for n in range(4)}
    assert seen == {0, 1, 2, 3}
    assert Next().places({"input_ids": torch.tensor([[7]])}).tolist() == [0]


def test_a_lesson_in_windows_has_what_is_asked_for():
    model = hf_models.make("gpt2", AutoModelForCausalLM)
    ids = torch.cat([torch.tensor([0]), words.rows(1, 33)[0], torch.tensor([2])])[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    original = distil.Original(model, Next(), Windows(TOKENS, 16, causal=True))
    said, states = original.lesson(batch)
    torch.testing.assert_close(said, original.outputs(batch)[:, Next().places(batch)])
    assert states.shape[:3] == (1, 35, model.config.num_hidden_layers)


def test_models_that_say_tokens_are_held_to_what_they_say():
    assert isinstance(agreement_for(hf_models.make("bert"), TOKENS, causal=False), States)
    assert isinstance(agreement_for(hf_models.make("gpt2", AutoModelForCausalLM), TOKENS, causal=True), Next)
    masked = agreement_for(hf_models.make("bert", AutoModelForMaskedLM), TOKENS, causal=False)
    assert masked.mask_token == 4


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


# -------------------------------------------------------------------------------------------------- long documents


class Bag(torch.nn.Module):
    """States that say which token it is, and nothing else."""

    device = torch.device("cpu")

    @property
    def base_model(self):
        return self

    def forward(self, input_ids):
        states = torch.nn.functional.one_hot(input_ids, 60).float()
        states[..., :5] = 0  # special tokens say nothing
        return type("Output", (), {"last_hidden_state": states})


def document(word: int, sentences: int = 40) -> str:
    """Its own word comes only after the beginning."""
    common = "w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20 w21. "
    own = f"w{word} w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16 w17 w18 w19 w20 w{word}. "
    return common * 4 + own * sentences


def test_a_sentence_from_the_end_is_found_by_who_reads_to_the_end():
    task = Sentences(TOKENS, [document(word) for word in range(30, 40)], length=512, limit=64, each=3)
    assert len(task.documents) == 10
    assert len(task.queries) == 30
    assert all(len(query) == 17 for query, _ in task.queries)
    assert all(len(ids) == 510 for ids in task.documents)
    assert task.accuracy(Bag(), "whole") == 1.0
    assert task.accuracy(Bag(), "chunked") == 1.0
    assert task.accuracy(Bag(), "truncated") == pytest.approx(0.1)  # all documents begin alike


def test_sentences_that_are_looked_for_are_not_in_the_document():
    task = Sentences(TOKENS, [document(word, 20) for word in (30, 31)], length=2048, limit=64, each=3)
    assert [sum(token == word for token in ids) for ids, word in zip(task.documents, (30, 31), strict=True)] == [34, 34]


def test_documents_must_be_long():
    with pytest.raises(ValueError, match="at least 2 documents"):
        Sentences(TOKENS, ["w5 w6. " * 20] * 5)


def test_articles_of_wikitext():
    text = "\n = One = \n\n Some words . \n = = Part = = \n More . \n = Two = \n\n Others . \n"
    assert [article.split() for article in articles(text)] == [
        ["Some", "words", ".", "=", "=", "Part", "=", "=", "More", "."],
        ["Others", "."],
    ]


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_says_that_another_process_is_at_work(tmp_path):
    path = bert.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    command = ["adapt", path, "alibi", "--text", str(tmp_path / "text.txt"), "-o", str(tmp_path / "out")]
    with folder.held(tmp_path / "out"):
        found = CliRunner().invoke(app, command)
    assert found.exit_code == 2
    assert "another process works in" in found.output


def test_the_command_ends_with_a_table(tmp_path):
    path = bert.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    rows = ["index\tsentence1\tsentence2\tscore", *(f"{n}\tw{n} w6 w7\tw{2 * n} w9\t{n % 5}" for n in range(8, 20))]
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B" / "dev.tsv").write_text("\n".join(rows) + "\n")
    command = ["adapt", path, "tisa:kernels=2", "--text", str(tmp_path / "text.txt"), "-o", str(tmp_path / "out"),
               "--budget", "3steps", "--eval", f"stsb:{tmp_path / 'STS-B'}"]  # fmt: skip
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    for state in ("original", "silenced", "fitted", "adapted"):
        assert state in found.output
    assert locant.load(tmp_path / "out") is not None
    assert (tmp_path / "out" / "heads.png").stat().st_size > 10_000
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "is done" in again.output


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        ({"--eval": "glue"}, "--eval must be one of stsb, sentences, clm, mlm"),
        ({"--eval": "stsb"}, "stsb:PATH"),
        ({"--eval": "clm"}, "foretells no tokens"),
        ({"--text": "nowhere.txt"}, "no file or folder nowhere.txt"),
        ({"--train": "none"}, "train must be one of"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, change, words_):
    path = bert.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text()))
    options = {"--text": str(tmp_path / "text.txt"), "-o": str(tmp_path / "out"), "--budget": "1steps", **change}
    found = CliRunner().invoke(app, ["adapt", path, "alibi", *(x for pair in options.items() for x in pair)])
    assert found.exit_code == 2
    assert words_ in " ".join(found.output.split())


def test_pooled_vectors_have_length_1():
    states, mask = torch.randn(3, 5, 4), torch.tensor([[1, 1, 1, 0, 0]] * 3)[..., None]
    torch.testing.assert_close(pooled(states, mask).norm(dim=-1), torch.ones(3))


# ------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [1, 13, 14, 15, 20, 21, 22, 27, 28, 29, 100, 333])
def test_windows_keep_every_token_once_and_with_what_is_around_it(causal, count):
    windows = Windows(TOKENS, 16, causal=causal)
    pieces = windows.pieces(count)
    kept = [token for start, end, first, last in pieces for token in range(first, last)]
    assert kept == list(range(count))
    for start, end, first, last in pieces:
        assert 0 <= start <= first <= last <= end <= count
        assert end - start == min(count, 14)
        for token in range(first, last):
            assert token - start >= min(token, 3)  # something before it, or the beginning of the text
            assert causal or end - 1 - token >= min(count - 1 - token, 3)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_long_text_is_read_in_windows(kind):
    model = hf_models.make(kind)
    windows = Windows(TOKENS, 16, causal=kind == "gpt2")
    ids = torch.cat([torch.tensor([0]), words.rows(1, 33)[0], torch.tensor([2])])[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def outputs(short):
        assert short["input_ids"].shape[1] <= 16
        return (hf_models.output(model, **short), short["input_ids"])

    found, tokens = windows.read(outputs, batch)
    assert torch.equal(tokens, ids)
    wider = {name: torch.cat([value, torch.zeros(1, 5, dtype=value.dtype)], 1) for name, value in batch.items()}
    assert windows.read(outputs, wider)[0].shape[:2] == (1, 40)
    assert found.shape[:2] == (1, 35)
    for start, end, first, last in windows.pieces(33):
        alone = hf_models.output(model, input_ids=torch.cat([ids[:, :1], ids[:, 1 + start : 1 + end], ids[:, -1:]], 1))
        torch.testing.assert_close(
            found[0, 1 + first : 1 + last], alone[0, 1 + first - start : 1 + last - start], rtol=1e-4, atol=1e-5
        )
    short = {"input_ids": ids[:, :16], "attention_mask": torch.ones_like(ids[:, :16])}
    torch.testing.assert_close(windows.read(outputs, short), outputs(short))
    whole = Windows(TOKENS, 16, causal=kind == "gpt2", whole=35)
    torch.testing.assert_close(whole.read(lambda x: (hf_models.output(model, **x),), batch)[0],
                               hf_models.output(model, **batch))  # fmt: skip


def test_a_model_is_adapted_past_its_length():
    done = adapted(hf_models.make("bert"), "alibi", length=128, budget="20steps")  # it had 40 positions
    assert done.model(input_ids=words.rows(1, 128)).last_hidden_state.isfinite().all()
    assert done.rows[3].agreement > done.rows[2].agreement


# ------------------------------------------------------------------------------------- what an attacker found


def test_one_that_stopped_by_itself_and_was_killed_then_trains_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(Agreement, "rate", 0.0)
    monkeypatch.setattr(distil, "SCHEME_RATE", 0.0)
    monkeypatch.setattr(distil, "EVERY", 1)
    calls = []

    def score(model, tokenizer):
        calls.append(model)
        if len(calls) == 4:  # the adapted model is measured
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), budget="30steps", out=tmp_path, scores={"it": score})
    stopped = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert stopped < 30
    steps, real = [], distil._loss
    monkeypatch.setattr(distil, "_loss", lambda *args: steps.append(1) or real(*args))
    assert adapted(hf_models.make("bert"), budget="30steps", out=tmp_path, scores={"it": score}).steps == stopped
    assert steps == []


@pytest.mark.parametrize("spec", ["tisa:kernels=3 + first", "tisa:kernels=3+First", "tisa:kernels=3+first"])
def test_what_a_table_leaves_is_added_once(spec):
    models = [hf_models.make("bert"), hf_models.make("bert")]
    for model, each in zip(models, (spec, "tisa:kernels=3"), strict=True):
        locant.fit(model, each, words.text(), tokenizer=TOKENS, length=16, tokens=64)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(*(model(input_ids=ids).last_hidden_state for model in models))


def test_text_without_full_stops_is_read_all_over():
    lines = [" ".join(f"w{5 + (n * (m + 1) + m) % 53}" for n in range(300)) for m in range(20)]
    sampler = Sampler(TOKENS, lines)
    starts = {tuple(row[:8].tolist()) for row in sampler.rows(400, 32)}
    assert len(starts) > 60  # 300 words are at least five sentences; by lines alone there would be 20


def test_chinese_sentences_are_sentences():
    line = "這是第一句話，不長也不短。這是第二句話，也差不多。第三句話在這裡！"
    assert len(pieces([line])) == 1  # 34 letters, a hundred bytes
    assert len(Sampler(words.Letters(), [line])._split(line)) == 3


@pytest.mark.parametrize(
    "text", ["/home/somebody/data/wikitext-2-raw/wiki.train.tokns", "some/where/that/is/not/there/at/all.txt"]
)
def test_a_path_that_is_not_there_is_not_prose(text):
    with pytest.raises(ValueError, match=r"pathlib\.Path"):
        pieces(text)


def test_a_file_is_read_to_its_end(tmp_path):
    (tmp_path / "text.txt").write_text("A line that is long enough to be taken for prose.\n" * 3)
    assert len(pieces(tmp_path / "text.txt")) == 3


def test_states_of_another_size_are_left_to_the_logits():
    model = hf_models.make("opt", AutoModelForCausalLM, word_embed_proj_dim=16, do_layer_norm_before=False)
    assert adapted(model, "alibi", budget="2steps").steps == 2


def test_special_tokens_of_a_tokenizer_that_knows_no_latin_letters():
    class Tokenizer:
        def __call__(self, text, add_special_tokens=True, **options):
            ids = [5] * text.count("中")
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    assert special_tokens(Tokenizer()) == ([1], [2])
    with pytest.raises(ValueError, match="makes no tokens"):
        special_tokens(lambda text, **options: {"input_ids": []})


def test_heads_that_want_something_else_do_not_disturb():
    done = adapted(hf_models.make("bert", AutoModelForMultipleChoice), "alibi", budget="2steps")
    assert (done.steps, done.measure) == (2, States.name)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_keeps_its_labels(auto):
    before, done = classified("bert", auto, "60steps")
    assert done.rows[3].agreement > done.rows[1].agreement
    assert done.rows[3].agreement == pytest.approx(same_labels(before, done.model))


def test_padding_is_what_a_causal_classifier_takes_for_it():
    before, done = classified("llama", AutoModelForSequenceClassification, "2steps", pad_token_id=7)
    assert done.rows[3].agreement == pytest.approx(same_labels(before, done.model, 7))  # and the tokenizer pads with 1


def classified(kind, auto, budget, **options):
    torch.manual_seed(0)
    model = hf_models.make(kind, auto, num_labels=4, **options)
    model.get_submodule("score" if kind == "llama" else "classifier").weight.data.normal_()
    before, done = copy.deepcopy(model).eval(), adapted(model, "alibi", budget=budget)
    assert done.measure == "same label"
    return before, done


def same_labels(before, after, pad=None):
    """How often both say the same of what agreement is measured on, one sequence at a time, without padding."""
    same = total = 0
    for batch in measured(before, pad):
        for row, real in zip(batch["input_ids"], batch["attention_mask"].sum(1), strict=True):
            with torch.no_grad():
                first, second = (each.eval()(input_ids=row[None, :real]).logits.argmax(-1) for each in (before, after))
            same, total = same + int((first == second).sum()), total + first.numel()
    return same / total


def measured(model, pad):
    """The batches that agreement is measured on."""
    kind = agreement_for(model, TOKENS, causal=pad is not None)
    original = distil.Original(model, kind, Windows(TOKENS, 32, causal=pad is not None))
    rungs = adapting.sample.ladder(32, 256 if pad is not None else 16)
    return adapting._measure(
        original, Sampler(TOKENS, adapting.held_out(words.text()), seed=0), rungs, TOKENS, {}
    ).batches


def test_a_label_of_many_and_of_one_are_left_to_the_states():
    for options in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        model = hf_models.make("bert", AutoModelForSequenceClassification, **options)
        assert type(agreement_for(model, TOKENS, causal=False)) is States
    model = hf_models.make("gpt2", AutoModelForSequenceClassification)
    with pytest.raises(ValueError, match="pad_token_id"):
        agreement_for(model, TOKENS, causal=True)


def test_a_classifier_reads_past_its_length():
    model = hf_models.make("bert", AutoModelForSequenceClassification, num_labels=3)
    assert adapted(model, "alibi", length=128, budget="10steps").rows[3].agreement >= 0  # it had 40 positions


def test_another_tokenizer_does_not_go_on(tmp_path):
    def stop(found, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapted(hf_models.make("bert"), out=tmp_path, look=stop)
    with pytest.raises(ValueError, match="tokens: "):
        adapted(hf_models.make("bert"), out=tmp_path, tokenizer=words.Letters())


def test_models_in_double_precision_can_be_turned():
    model = hf_models.make("llama", AutoModelForCausalLM).double()
    found = locant.fit(model, "alibi", words.text(), tokenizer=TOKENS, length=16, tokens=64, queries=True)
    assert found.explained > 0


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


def test_a_config_that_names_no_class_is_not_opened_quietly(tmp_path):
    hf_models.make("bert", AutoModelForMaskedLM).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="opened as BertModel, without a head"):
        locant.load(tmp_path)


def test_return_dict_false_is_refused():
    model = hf_models.make("bert")
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict"):
        locant.swap(model, "alibi")
