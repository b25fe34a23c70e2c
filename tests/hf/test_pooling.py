"""Adaptations of sentence-transformers models: their own pooling is distilled, measured and kept."""

import json
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sentence_transformers.sentence_transformer import modules

import locant
from locant.adaptation import scores
from locant.adaptation.agreement import StateAgreement
from locant.adaptation.card import name_of
from locant.adaptation.distillation import Teacher
from locant.adaptation.windows import Windows
from locant.cli.commands import POOLING
from locant.hf.pooling import MODES, Pooling, pooling_of
from locant.hf.sentence_folder import SentenceFolder, sentence_folder
from tests import bert, hf_models, sentence_models, words
from tests.adaptations import TOKENS, adapted
from tests.command_line import locant_command
from tests.sentence_models import TEXTS, kinds, opened


@pytest.mark.parametrize("modes", [(mode,) for mode in MODES] + list(combinations(MODES, 2)) + [MODES], ids="+".join)
def test_vectors_are_those_of_sentence_transformers(modes):
    states = torch.randn(3, 7, 4, dtype=torch.float64)
    right = torch.tensor([[1] * n + [0] * (7 - n) for n in (7, 4, 1)])
    for mask in (right, right.flip(1)):
        features = {"token_embeddings": states, "attention_mask": mask}
        wanted = modules.Pooling(4, modes)(features)["sentence_embedding"]
        torch.testing.assert_close(Pooling(modes)(states, mask), F.normalize(wanted, dim=-1))


def test_the_loss_and_the_agreement_compare_the_vectors_of_the_model():
    kind, mask = StateAgreement(Pooling(("cls",))), torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch, (first, second) = {"attention_mask": mask}, torch.randn(2, 2, 3, 4).unbind()
    a, b = (F.normalize(x[:, 0], dim=-1) for x in (first, second))
    tokens, others = (kind.of_states(x, batch) for x in (first, second))
    assert kind.measure(tokens[0], others[0], batch) == (pytest.approx(float((a * b).sum())), 2)
    real = mask.bool()
    states = 0.5 * (first - second)[real].square().sum() / first[real].square().sum()
    torch.testing.assert_close(kind.loss(tokens, others, batch), (a - b).square().sum(-1).mean() + states)


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "mean"])
def test_a_text_read_in_windows_gets_the_mean_of_their_vectors(mode):
    """The first token of a long text is that of its first window alone: it says nothing about the others."""
    model = hf_models.make("bert")
    ids = torch.cat([torch.tensor([0]), words.rows(1, 60)[0], torch.tensor([2])])[None]
    batch, windows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, Windows(TOKENS, 22, causal=False)
    kind = StateAgreement(Pooling((mode,)))
    with torch.no_grad():
        tokens = Teacher(model, kind, windows).outputs(batch)
        pieces = windows.pieces(60)
        parts = [torch.cat([ids[:, :1], ids[:, 1 + a : 1 + b], ids[:, -1:]], dim=1) for a, b, _, _ in pieces]
        states = [model(input_ids=part).last_hidden_state[0] for part in parts]
    taken = [last - first for _, _, first, last in pieces]
    taken[0], taken[-1] = taken[0] + 1, taken[-1] + 1  # the special tokens
    if mode == "mean":
        inner = [x[first - a + 1 : last - a + 1].sum(0) for x, (a, _, first, last) in zip(states, pieces, strict=True)]
        total = sum(inner) + states[0][0] + states[-1][-1]
    else:
        picked = 0 if mode == "cls" else -1
        total = sum(n * x[picked] for n, x in zip(taken, states, strict=True))
    found = kind.pooling.of_text(tokens, batch["attention_mask"])[0]
    torch.testing.assert_close(found, F.normalize(total, dim=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_an_adapted_model_keeps_its_pooling(tmp_path, mode):
    causal = mode == "lasttoken"
    make = sentence_models.save_causal if causal else partial(sentence_models.save, pooling=mode)
    folder = make(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(words.text(60)))
    pairs = [(n, f"w{n} w6 w7", f"w{2 * n} w9", n % 5) for n in range(8, 20)]
    (tmp_path / "dev.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "".join(
        "\t".join(map(str, pair)) + "\n" for pair in pairs))  # fmt: skip
    out = tmp_path / "out"
    command = ["adapt", folder, "tisa:kernels=2", "--text", tmp_path / "text.txt", "--budget", "3steps",
               "--length", "32", "--eval", f"stsb:{tmp_path}", "-o", out]  # fmt: skip
    done = locant_command(*command)
    assert done.exit_code == 0, done.output
    before, after = opened(folder), opened(out)
    assert kinds(after) == kinds(before)
    assert after[1].pooling_mode == mode
    assert after.max_seq_length > 10_000
    assert abs((after.encode(TEXTS) ** 2).sum(1) - 1).max() < 1e-5
    assert f"pooling: {mode} (as in modules.json of {folder})" in " ".join(done.stdout.split())
    card = " ".join((out / "README.md").read_text().split())
    assert f"pooled by {mode} (as in modules.json of {name_of(str(folder))})" in card
    kept = json.loads((out / "adapt.json").read_text())["table"]
    for model, row in ((before, kept[0]), (after, kept[3])):  # the scores are those of the vectors that users get
        one, two = (model.encode([pair[column] for pair in pairs]) for column in (1, 2))
        wanted = spearmanr((one * two).sum(1), [pair[3] for pair in pairs]).statistic
        assert row["scores"][f"stsb:{tmp_path}"] == pytest.approx(wanted, abs=1e-3)


def test_a_model_in_memory_is_pooled_as_the_caller_says():
    said = []
    done = adapted(hf_models.make("bert"), "alibi", budget="40steps", pooling="cls", on_stage=said.append)
    assert done.measure == "cosine of cls-pooled vectors"
    assert done.rows[3].agreement > done.rows[2].agreement
    assert "pooling: cls (chosen by the caller)" in said
    adapted(hf_models.make("bert"), "alibi", budget="1steps", on_stage=said.append)
    assert "pooling: mean (assumed: the model has no modules.json)" in said


def test_poolings_that_are_not_known_are_refused(tmp_path):
    folder = sentence_folder(sentence_models.save(tmp_path / "model", "cls"))
    assert pooling_of(folder).modes == ("cls",)
    assert pooling_of(folder, "cls").modes == ("cls",)
    with pytest.raises(ValueError, match="pools by cls, got pooling='mean'"):
        pooling_of(folder, "mean")
    with pytest.raises(ValueError, match="pooling must be one of cls, max"):
        pooling_of(None, "average")
    config = folder.root / "1_Pooling" / "config.json"
    for written in ({"pooling_mode": "median"}, {"pooling_mode_median": True, "pooling_mode_cls_token": True}):
        config.write_text(json.dumps(written))
        with pytest.raises(ValueError, match="median"):
            pooling_of(folder)
    config.write_text(json.dumps({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}))
    assert pooling_of(folder).modes == ("lasttoken",)
    entries = [{"path": "", "type": "x.Transformer"}, {"path": "1_LSTM", "type": "x.LSTM"}]
    other = SentenceFolder(Path("there"), "there", tuple(entries))
    with pytest.raises(ValueError, match="makes its vectors with Transformer, LSTM"):
        pooling_of(other)
    assert pooling_of(other, "max").modes == ("max",)


def test_pooling_is_for_models_without_a_head():
    from transformers import AutoModelForMaskedLM

    with pytest.raises(ValueError, match="compared by same first token; pooling is for models without one"):
        adapted(hf_models.make("bert", AutoModelForMaskedLM), pooling="cls")


def test_the_command_offers_every_mode():
    assert POOLING == MODES


def test_scores_of_language_models_need_no_pooling(tmp_path):
    def never():
        raise AssertionError

    assert isinstance(scores.score("clm", ["w5 w6"], 32, never), scores.Loss)


def test_a_plain_model_is_adapted_as_before(tmp_path):
    model = locant.load(bert.save(tmp_path / "model"))
    locant.adapt(model, "alibi", words.text(60), budget="1steps", length=32, out=tmp_path / "out")
    assert not (tmp_path / "out" / "modules.json").exists()
    assert "pooled by mean (assumed" in " ".join((tmp_path / "out" / "README.md").read_text().split())
