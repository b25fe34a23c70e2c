"""A bare swap of a trained model warns that word order is gone; swaps that keep it, or belong to a fit, do not."""

import copy
import warnings

import pytest
from transformers import AutoModel, BertModel

import locant
from locant.adaptation.silencing import silenced
from locant.hf import WordOrderWarning
from tests import bert, hf_models, words
from tests.adaptations import adapted, fitted
from tests.command_line import locant_command


@pytest.fixture
def trained(tmp_path):
    """A model from a folder."""
    return AutoModel.from_pretrained(bert.save(tmp_path / "model")).eval()


def test_a_bare_swap_of_a_trained_model_warns(trained):
    for spec in ("alibi", "nope", ["tisa"], locant.scheme("alibi", n_heads=2)):
        with pytest.warns(WordOrderWarning, match="no longer knows word order") as found:
            locant.swap(trained, spec)
        assert found[0].filename == __file__
    with pytest.warns(
        WordOrderWarning, match=r"locant\.swap\(model, 'native'\), then call locant\.fit\(model, 'alibi', text\)"
    ):
        locant.swap(copy.deepcopy(trained), "alibi")
    assert issubclass(WordOrderWarning, UserWarning)


def test_a_model_without_native_positions_is_not_sent_back_to_them(tmp_path, trained):
    fitted(trained, "tisa:kernels=2", length=16, tokens=64)
    trained.save_pretrained(tmp_path / "new")
    with pytest.warns(WordOrderWarning, match="open the original model, then call locant.fit"):
        locant.swap(locant.load(tmp_path / "new"), "alibi")


def test_the_warning_can_be_filtered(trained):
    warnings.simplefilter("ignore", WordOrderWarning)
    locant.swap(trained, "alibi")


def test_the_advice_works(trained):
    with pytest.warns(WordOrderWarning):
        locant.swap(trained, "alibi:slopes=learned")
    locant.swap(trained, "native")
    locant.fit(trained, "alibi:slopes=learned", words.text(30), tokenizer=words.Tokenizer(), length=16, tokens=64)


def test_swaps_that_keep_word_order_do_not_warn(trained):
    """Warnings are errors here."""
    locant.swap(trained, locant.native(trained))
    locant.swap(trained, "native")
    locant.swap(trained, "tisa", keep_native=True)
    locant.swap(trained, "native")
    locant.swap(hf_models.make("bert"), "alibi")  # not trained
    with silenced(trained, 32):
        pass


def test_a_fit_and_an_adaptation_do_not_warn(tmp_path, trained):
    copies = [copy.deepcopy(trained) for _ in range(2)]
    fitted(copies[0], "tisa:kernels=2", length=16, tokens=64)
    copies[0].save_pretrained(tmp_path / "fitted")
    adapted(copies[1], "tisa:kernels=2", budget="1steps", out=tmp_path / "adapted")
    for name in ("fitted", "adapted"):
        assert "word order" not in (tmp_path / name / "README.md").read_text()
        locant.load(tmp_path / name).save_pretrained(tmp_path / f"{name} again")
        assert "word order" not in (tmp_path / f"{name} again" / "README.md").read_text()


def test_the_card_of_a_bare_swap_says_so_also_after_loading(tmp_path, trained):
    with pytest.warns(WordOrderWarning):
        locant.swap(trained, "tisa:kernels=2+learned:length=64").save_pretrained(tmp_path / "new")
    locant.load(tmp_path / "new", BertModel).save_pretrained(tmp_path / "again")
    for name in ("new", "again"):
        card = (tmp_path / name / "README.md").read_text()
        assert "**This model does not know word order**" in card
    card = (tmp_path / "new" / "README.md").read_text()
    assert "locant adapt MODEL tisa:kernels=2+learned:length=64 --text TEXT -o FOLDER" in card
    hf_models.make("bert").save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "README.md").exists()


def test_the_command_says_what_to_run_next(tmp_path):
    folder = bert.save(tmp_path / "model")
    done = locant_command("swap", folder, "alibi", "-o", tmp_path / "new")
    assert "does not know word order" in done.stdout
    assert f"locant adapt {folder} alibi --text TEXT -o FOLDER" in done.stdout
    kept = locant_command("swap", folder, "alibi", "--keep-native", "-o", tmp_path / "kept")
    assert kept.exit_code == 0
    assert "word order" not in kept.stdout
