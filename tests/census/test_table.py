"""The committed table of the census, and a sample of it run again."""

from pathlib import Path

import pytest
import transformers

from census import page, table
from census.campaign import RIGHT, Result, run
from census.checks import CHECKS
from census.names import ADDED, BOTH, DECODER, ENCODER, NOT_TEXT, Architecture, architectures
from census.outcome import ERROR, OK, Outcome, wrong

MODELS = Path(transformers.__file__).parent / "models"
EVERY = 45
"""Run every ninth architecture that is right again; `make census-check` runs them all."""

needs_same_version = pytest.mark.skipif(
    not table.read() or next(iter(table.read().values()))["transformers"] != transformers.__version__,
    reason="the table is of another version of transformers; run make census",
)


@needs_same_version
def test_every_text_architecture_is_in_the_table_and_was_built():
    lines = table.read()
    assert set(lines) == {each.name for each in architectures()}
    assert not [name for name, line in lines.items() if "not built" in line["reason"]]


@needs_same_version
def test_the_page_has_the_numbers_of_the_table():
    text = (Path(__file__).parents[2] / "docs" / "census.md").read_text(encoding="utf-8")
    lines = table.read().values()
    assert f"| all | {len(lines)} |" in text
    for title, verdict in (("right in every check", RIGHT), ("Stopped by an accidental error", ERROR)):
        assert f"{title}: {sum(line['verdict'] == verdict for line in lines)}\n" in text


def test_what_counts_as_text_is_up_to_date():
    """A correction of a list that is not needed any more would hide what nobody decided."""
    assert not ADDED.keys() & NOT_TEXT.keys()
    parts = {"blip_text": "blip", "data2vec_text": "data2vec", "esmfold": "esm"}
    for name in [*ADDED, *NOT_TEXT]:
        assert (MODELS / parts.get(name, name)).is_dir(), name
    kinds = {each.name: each.kind for each in architectures()}
    assert {"bert": ENCODER, "llama": DECODER, "bart": BOTH, "t5": BOTH}.items() <= kinds.items()


@pytest.mark.slow
@needs_same_version
def test_no_architecture_of_a_sample_went_from_right_to_anything_else():
    lines = table.read()
    right = [each for each in architectures() if lines[each.name]["verdict"] == RIGHT]
    assert not table.lost(list(run(right[::EVERY])), lines)


def test_what_is_lost_is_listed(tmp_path):
    good = Result(Architecture("bert", ENCODER, "BertModel"), dict.fromkeys(CHECKS, Outcome(OK)))
    table.write([good], tmp_path / "census.csv")
    lines = table.read(tmp_path / "census.csv")
    assert not table.lost([good], lines)
    worse = Result(good.architecture, {**good.outcomes, "law": wrong("off by 1")})
    assert table.lost([worse], lines) == [
        "bert was right and is wrong: law: off by 1",
        "bert: law was ok and is wrong: off by 1",
    ]
    page.write([good, worse], tmp_path / "census.md")
    assert "- bert: law: off by 1" in (tmp_path / "census.md").read_text()
