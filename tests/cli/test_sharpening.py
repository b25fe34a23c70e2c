"""`locant sharpen`."""

import json
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from tests import sentence_models
from tests.adaptation.test_sharpening import TEXTS
from tests.command_line import locant_command


def collection(path):
    rows = [{"kind": "doc", "id": str(n), "text": text} for n, text in enumerate(TEXTS)]
    rows += [{"kind": "query", "doc": str(n), "text": text[:8]} for n, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_the_command_measures_before_and_after(tmp_path):
    folder, file, out = sentence_models.save(tmp_path / "encoder"), collection(tmp_path / "c.jsonl"), tmp_path / "out"
    rows = ["index\tsentence1\tsentence2\tscore", *(f"{n}\tw{n} w6 w7\tw{2 * n} w9\t{n % 5}" for n in range(8, 20))]
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B" / "dev.tsv").write_text("\n".join(rows) + "\n")
    found = locant_command("sharpen", folder, "--documents", file, "-o", str(out), "--piece", "12", "--eval",
                           f"stsb:{tmp_path / 'STS-B'}", "--eval", f"longembed:{file}")  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "reading 8 documents in" in found.output
    for row in (
        "STS-B dev",
        "nDCG@10, first 24 tokens",
        "nDCG@10, pieces of 12, averaged",
        "the best one (many vectors)",
    ):
        assert row in found.output
    assert "pieces that find the rest of their document" in found.output
    assert len(SentenceTransformer(str(out), device="cpu")) == 5


def test_bad_scores_and_folders_are_refused_before_anything_is_read(tmp_path):
    folder, file = sentence_models.save(tmp_path / "encoder"), collection(tmp_path / "c.jsonl")
    found = locant_command("sharpen", folder, "--documents", file, "-o", str(tmp_path / "out"), "--eval", "clm")
    assert found.exit_code == 2
    assert "a score must be stsb:FOLDER or longembed:FILE, got 'clm'" in found.output
    found = locant_command("sharpen", folder, "--documents", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert found.exit_code == 2
    assert "there is no file" in found.output
    found = locant_command("sharpen", folder, "--documents", file, "-o", folder, "--eval", f"longembed:{file}")
    assert found.exit_code == 2
    assert "is not empty" in found.output
    assert "reading" not in found.output
    found = locant_command("sharpen", folder, "--documents", file, "-o", str(tmp_path / "out"), "--eval",
                           f"longembed:{file}", "--piece", "65")  # fmt: skip
    assert found.exit_code == 2
    assert "piece must be from 3 to 24" in found.output
    assert "reading" not in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::locant.hf.WordOrderWarning")
def test_a_folder_that_needs_locant_is_named_as_such(tmp_path):
    folder, file = sentence_models.save(tmp_path / "encoder"), collection(tmp_path / "c.jsonl")
    for model, words in (
        (folder, "open it with SentenceTransformer"),
        (tmp_path / "own", "open it with import locant"),
    ):
        if model != folder:
            spec = "native@recurrent:length=24+local:window=23"
            assert locant_command("swap", folder, spec, "-o", str(model)).exit_code == 0
        out = tmp_path / f"out-{Path(model).name}"
        found = locant_command("sharpen", str(model), "--documents", file, "-o", str(out), "--piece", "12")
        assert found.exit_code == 0, found.output
        assert words in found.output.replace("\n", " ").replace("  ", " ")
