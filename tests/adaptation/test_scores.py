"""Tasks that measure a model before and after."""

import pytest
import torch

from locant.adaptation import scores
from tests import hf_models
from tests.adaptations import adapted


def test_a_score_must_be_a_number_before_anything_is_trained():
    with pytest.raises(TypeError, match="the score mine must be a number, got None"):
        adapted(hf_models.make("bert"), scores={"mine": lambda model, tokenizer: None})
    done = adapted(hf_models.make("bert"), budget="1steps", scores={"mine": lambda model, tokenizer: torch.tensor(0.5)})
    assert [row.scores for row in done.rows] == [{"mine": 0.5}] * 4


def test_a_correlation_needs_pairs(tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\tscore\nOne.\tTwo.\t1.0\n")
    with pytest.raises(ValueError, match="at least 3"):
        scores.score(f"stsb:{tmp_path}", [], 32)
