"""A table of absolute positions for a scheme that is not one: an approximation that is measured."""

import pytest
import torch
from transformers import BertModel

import locant
from locant.exporting.fitted_table import repeated, stretched
from locant.exporting.refusal import CannotExport
from tests.adaptations import TEXT, TOKENS, fitted
from tests.hf_models import make, output

LENGTH = 64  # the tables of these models have 40 rows


def test_a_fitted_table_comes_nearer(tmp_path):
    model = make("bert")
    fitted(model, "tisa")
    done = locant.export(
        model, tmp_path / "out", "original", tokenizer=TOKENS, text=TEXT, length=LENGTH, budget="40steps"
    )
    assert not done.exact
    assert done.difference is None
    assert [row.length for row in done.agreement] == [32, 64]
    assert sum(row.fitted for row in done.agreement) > sum(row.start for row in done.agreement)
    assert done.agreement[-1].fitted > done.agreement[-1].start
    opened = BertModel.from_pretrained(tmp_path / "out").eval()
    assert len(opened.embeddings.position_embeddings.weight) == LENGTH
    for name, weight in opened.state_dict().items():  # nothing else was trained
        if name in model.state_dict() and "position" not in name:
            assert torch.equal(weight, model.state_dict()[name]), name
    assert output(opened, input_ids=torch.randint(3, 60, (1, LENGTH))).shape == (1, LENGTH, 32)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "approximation" in card
    assert f"{done.agreement[0].fitted:.4f}" in card


def test_a_scheme_that_is_a_table_stays_exact(tmp_path):
    model = make("bert")
    fitted(model, "learned:length=64")
    assert locant.export(model, tmp_path / "out", "original", text=TEXT, length=LENGTH).exact


def test_a_folder_needs_the_original(tmp_path):
    plain, changed = make("bert"), make("bert")
    plain.save_pretrained(tmp_path / "plain")
    fitted(changed, "tisa")
    changed.save_pretrained(tmp_path / "changed")
    options = {"tokenizer": TOKENS, "text": TEXT, "length": LENGTH, "budget": "1steps"}
    again = locant.load(tmp_path / "changed").eval()
    with pytest.raises(CannotExport, match="name the original"):
        locant.export(again, tmp_path / "out", "original", **options)
    done = locant.export(again, tmp_path / "out", "original", original=tmp_path / "plain", **options)
    assert sum(row.fitted for row in done.agreement) >= sum(row.start for row in done.agreement)
    assert done.length == LENGTH


def test_what_is_missing_is_named(tmp_path):
    model = make("bert")
    fitted(model, "tisa")
    with pytest.raises(CannotExport, match="text="):
        locant.export(model, tmp_path / "out", "original")
    with pytest.raises(ValueError, match="how many rows"):
        locant.export(model, tmp_path / "out", "original", tokenizer=TOKENS, text=TEXT)
    llama = make("llama")
    fitted(llama, "tisa")
    with pytest.raises(CannotExport, match="no table of absolute positions"):
        locant.export(llama, tmp_path / "out", "original", tokenizer=TOKENS, text=TEXT, length=LENGTH)


def test_two_continuations_of_a_table():
    table = torch.arange(4.0)[:, None]
    assert repeated(table, 8).flatten().tolist() == [0, 1, 2, 3, 1, 2, 3, 1]
    assert stretched(table, 6).flatten().tolist() == [0, 1, 1.5, 2, 2.5, 3]
    for continued in (repeated, stretched):
        assert continued(table, 3).flatten().tolist() == [0, 1, 2]
