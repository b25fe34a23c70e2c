"""Exports of sentence-transformers models open there by name, with pooling, normalization and the new length."""

import numpy as np
import pytest

import locant
from locant.hf.swapping import exchange
from tests import sentence_models
from tests.command_line import locant_command
from tests.sentence_models import TEXTS, kinds, opened

TEXT = "\n".join(f"the cat sat on the mat number {number}, and then the dog sat there too" for number in range(30))


def test_an_export_opens_with_all_modules(tmp_path):
    folder = sentence_models.save(tmp_path / "model", "mean", dense=True)
    model = locant.load(folder).eval()
    locant.fit(model, "t5:shared=layers", TEXT, length=16, tokens=256)
    encoder = opened(folder)
    exchange(encoder[0].auto_model, locant.native(model))
    encoder[0].auto_model.load_state_dict(model.state_dict())
    done = locant.export(model, tmp_path / "out", length=100)
    assert done.to == "mpnet"
    after = opened(tmp_path / "out")
    assert kinds(after) == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert type(after[0].auto_model).__name__ == "MPNetModel"
    assert after.max_seq_length == 100
    np.testing.assert_allclose(after.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)


def test_the_command(tmp_path):
    folder = sentence_models.save(tmp_path / "model")
    swapped = locant_command("swap", folder, "t5:shared=layers", "-o", tmp_path / "swapped")
    assert swapped.exit_code == 0, swapped.output
    done = locant_command("export", tmp_path / "swapped", "-o", tmp_path / "out", "--length", 50)
    assert done.exit_code == 0, done.output
    assert "mpnet: computes the same" in done.stdout
    assert "token types" in done.stdout
    np.testing.assert_allclose(
        opened(tmp_path / "out").encode(TEXTS), opened(tmp_path / "swapped").encode(TEXTS), atol=1e-5
    )


def test_the_command_fits_a_table(tmp_path):
    folder = sentence_models.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    locant_command("swap", folder, "tisa", "-o", tmp_path / "swapped")
    words = ("export", tmp_path / "swapped", "-o", tmp_path / "out", "--to", "original", "--length", 96)
    done = locant_command(*words, "--text", tmp_path / "text.txt", "--original", folder, "--budget", "5steps")
    assert done.exit_code == 0, done.output
    assert "an approximation" in done.stdout
    assert opened(tmp_path / "out").max_seq_length == 96


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "jinabert"), "not in transformers"),
        (("--to", "gguf"), "expected one of"),
        (("--to", "mpnet"), "t5:shared=layers"),
        (("--text", "nowhere.txt", "--to", "original"), "no file or folder"),
        ((), "no stock architecture"),
    ],
)
def test_what_the_command_refuses(tmp_path, words, message):
    folder = sentence_models.save(tmp_path / "model")
    locant_command("swap", folder, "tisa", "-o", tmp_path / "swapped")
    done = locant_command("export", tmp_path / "swapped", "-o", tmp_path / "out", *words)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_a_program_says_what_is_not_part_of_it(tmp_path):
    folder = sentence_models.save(tmp_path / "model", dense=True)
    done = locant_command("export", folder, "-o", tmp_path / "out", "--to", "torch", "--length", 24)
    assert done.exit_code == 0, done.output
    assert "Pooling, Dense, Normalize of sentence-transformers are not part of it" in " ".join(done.output.split())
