"""The page of `locant inspect` in a real browser."""

import pytest

import locant
from locant.analysis import inspection
from locant.report.inspection import inspection_page
from locant.report.page import write_page
from locant.report.side_by_side import side_by_side
from tests import hf_models
from tests.inspections import inspected

pytestmark = pytest.mark.usefixtures("quick_inspection")


def test_the_page_works_in_a_browser(visit, tmp_path):
    made = inspection_page(inspected(locant.swap(hf_models.make("gpt2"), "huang4:clip=8")))
    opened = visit(write_page(made, tmp_path / "page.html"))
    opened.evaluate("window.dispatchEvent(new Event('beforeprint'))")  # draws what is still out of sight
    assert opened.locator("svg, canvas").count() > 20
    assert "Vectors of layer 1" in opened.content()
    assert "layer 1 feed-forward" in opened.locator("svg text").all_text_contents()  # a hyphen, and no minus sign


def test_kernels_are_thinner_than_their_sum(visit, tmp_path):
    made = inspection_page(inspected(locant.swap(hf_models.make("gpt2"), "tisa:kernels=3")))
    opened = visit(write_page(made, tmp_path / "page.html"))
    opened.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    panel = opened.locator("figure:has(h3:text-is('Kernels')) .panel").first
    widths = panel.locator("path.line").evaluate_all("x => x.map(e => parseFloat(getComputedStyle(e).strokeWidth))")
    assert len(widths) == 4
    assert max(widths[1:]) < widths[0]


def test_side_by_side():
    left, right = (inspection_page(inspected(hf_models.make(kind), kind)) for kind in ("bert", "gpt2"))
    both = side_by_side(left, right)
    assert len(both.sections) >= len(left.sections)


def test_bands_of_the_learned_curves():
    model = locant.swap(hf_models.make("bert", num_hidden_layers=1), "tisa:kernels=1")
    tokens = inspection.Tokens(None, "", 60)
    *_, (_, found) = inspection.inspect(model, tokens, "tiny", more=inspection.CERTAINTY)
    assert list(found.seconds)[-1] in inspection.CERTAINTY
    assert found.notices == []
    made = inspection_page(found)
    section = next(each for each in made.sections if each.title == "How sure the curves are")
    assert [each.title for each in section.figures] == [
        "Curves with intervals",
        "Certainty of each head",
        "Are the kernels there?",
    ]
    assert "one key drawn for each query" in section.intro
    assert "right up to one factor" in section.intro
    curves, heads, bumps = section.figures
    assert [panel.title for panel in curves.panels] == [f"layer 1, head {head}" for head in (1, 2, 3, 4)]
    (series,) = curves.panels[1].series
    assert all(low < y < high for low, y, high in zip(series.low, series.y, series.high, strict=True))
    assert series.y == pytest.approx(found.certainty.bands[1].value, rel=1e-3)
    assert len(heads.rows) == len(bumps.rows) == 4
    assert any(sentence.startswith("Of its 4 learned curves") for sentence in made.verdict)
    *_, (_, plain) = inspection.inspect(model, tokens, "tiny")
    assert "How sure the curves are" not in [each.title for each in inspection_page(plain).sections]


def test_a_model_without_learned_curves_has_a_notice():
    tokens = inspection.Tokens(None, "", 60)
    *_, (_, found) = inspection.inspect(hf_models.make("bert"), tokens, "tiny", more=inspection.CERTAINTY)
    assert found.certainty is None
    assert any("no parameters in attention" in notice for notice in found.notices)
