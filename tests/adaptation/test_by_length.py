"""The table by length: the adapted model beside the original, truncated and chunked."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from locant.adaptation.agreement import agreement_for
from locant.adaptation.by_length import rows_by_length, truncated
from locant.adaptation.distillation import Teacher
from locant.adaptation.windows import Windows
from tests.adaptations import TOKENS, adapted
from tests.hf_models import make


def prepared(model, whole, *, causal, length=24, **options):
    kind = agreement_for(model, TOKENS, causal=causal, **options)
    teacher = Teacher(model.eval(), kind, Windows(TOKENS, whole, causal=causal))
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (3, length))
    for at, token in enumerate(teacher.windows.before):
        ids[:, at] = token
    for at, token in enumerate(reversed(teacher.windows.after), 1):
        ids[:, -at] = token
    batch = kind.prepare({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 0)
    return teacher, batch, kind.reduced(teacher.outputs(batch))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "weightedmean"])
def test_a_truncated_encoder_has_the_vector_of_its_first_tokens(pooling):
    model = make("bert", AutoModel)
    teacher, batch, reference = prepared(model, 12, causal=False, pooling=pooling)
    (row,) = rows_by_length(model, teacher, [batch], [reference])
    short = truncated(batch, teacher.windows)
    assert short["input_ids"].shape == (3, 12)
    assert torch.equal(short["input_ids"][:, -1], batch["input_ids"][:, -1])  # ends as a text does
    with torch.no_grad():
        first = teacher.kind.pooling.of_text(reference, batch["attention_mask"])
        second = teacher.kind.pooling(model(**short).last_hidden_state, short["attention_mask"])
    assert row.truncated == pytest.approx(float((first * second).sum(-1).mean()), abs=1e-6)
    assert row.chunked == pytest.approx(1, abs=1e-6)  # it is the reference
    assert row.truncated < 1 - 1e-4
    assert row.length == 24


@pytest.mark.parametrize(("kind", "auto"), [("bert", AutoModelForMaskedLM), ("gpt2", AutoModelForCausalLM)])
def test_a_truncated_model_says_nothing_about_tokens_it_did_not_read(kind, auto):
    model = make(kind, auto)
    teacher, batch, reference = prepared(model, 12, causal=kind == "gpt2")
    (row,) = rows_by_length(model, teacher, [batch], [reference])
    counted = teacher.kind.counted(batch)
    read = int(counted[:, : 12 - len(teacher.windows.after)].sum())
    assert row.truncated <= read / int(counted.sum())
    assert row.chunked == 1


def test_a_text_that_fits_is_not_truncated_and_chunks_are_worse_than_the_whole():
    model = make("bert", AutoModel)
    teacher, batch, reference = prepared(model, 12, causal=False)
    teacher.windows.whole = 24
    reference = teacher.kind.reduced(teacher.outputs(batch))
    (row,) = rows_by_length(model, teacher, [batch], [reference])
    assert (row.adapted, row.truncated) == pytest.approx((1, 1), abs=1e-6)
    assert row.chunked < 1 - 1e-6


def test_an_adaptation_has_a_row_per_length():
    done = adapted(make("bert", AutoModel), budget="2steps", length=64)
    assert [row.length for row in done.lengths][-1] == 64
    mean = sum(row.adapted for row in done.lengths) / len(done.lengths)
    assert 0.5 < mean <= 1
    assert "| tokens, up to | adapted | original, truncated | original, chunked |" in str(done)
    texts = [row.texts for row in done.lengths]
    assert texts == [32, 32, 32]
    assert "these held-out texts: 32 of up to 1" in done.measured_on
    assert done.measured_on.endswith("32 of up to 64 tokens.")
    assert done.measured_on in str(done)
    assert f"| 64 | {done.lengths[-1].adapted:.4f} |" in str(done)
