"""The page of `locant inspect` in a real browser."""

import pytest

import locant
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
