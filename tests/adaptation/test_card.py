"""The name in the title of a model card."""

import json

import pytest

from locant.adaptation.card import name_of


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("my-encoder", "my-encoder"),
        ("my-encoder/model", "my-encoder"),
        ("my-encoder/runs-a/../checkpoint-500", "my-encoder"),
        ("models--owner--encoder/snapshots/1110a243fdf4706b3f48f1d95db1a4f5529b4d41", "owner/encoder"),
    ],
)
def test_a_folder_that_names_no_model_gets_the_name_of_one_above(tmp_path, path, name):
    (tmp_path / path).resolve().mkdir(parents=True)
    assert name_of(str(tmp_path / path)) == name


def test_the_name_in_the_config_comes_first_unless_the_folder_has_one(tmp_path):
    for folder in ("model", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps({"_name_or_path": "owner/encoder"}))
    assert name_of(str(tmp_path / "model")) == "owner/encoder"
    assert name_of(str(tmp_path / "mine")) == "mine"
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": "a\n# title"}))
    assert name_of(str(tmp_path / "model")) == tmp_path.name
    assert name_of(None) == ""
