"""What `locant.compare` and `locant.inspect` return: rows, frames, figures, the page, and the page in a notebook."""

import builtins

import pytest
from matplotlib.figure import Figure

import locant
from locant.report.page import page_html
from locant.verbs.comparing import ComparisonResult
from tests import comparisons, hf_models


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    comparisons.whole(out)
    return ComparisonResult(out)


@pytest.fixture
def inspected(quick_inspection):
    stages = []
    model = hf_models.make("bert")
    found = locant.inspect(model, compare=locant.swap(hf_models.make("bert"), "tisa"),
                           on_stage=lambda *what: stages.append(what))  # fmt: skip
    return found, stages


def test_the_rows_of_a_comparison(compared):
    best, second, *_ = compared.table
    assert [row["scheme"] for row in compared.table] == ["tisa", "alibi", "learned", "nope"]
    assert best["score"] == pytest.approx(3.65)
    assert (best["low"], best["high"]) == pytest.approx((3.65 - 0.37262, 3.65 + 0.37262), abs=1e-4)
    assert best["difference"] == pytest.approx(-0.45)
    assert best["score_at_1024"] == pytest.approx(3.65 + 3 * 0.125)
    assert (best["verdict"], second["verdict"], best["finished"], best["failed"]) == ("better", "better", 3, 0)
    learned = compared.table[2]
    assert (learned["verdict"], learned["difference"], learned["score_at_256"]) == ("baseline", None, None)
    frame = compared.frame()
    assert list(frame.columns) == list(best)
    assert frame.scheme.tolist() == ["tisa", "alibi", "learned", "nope"]
    assert compared.sentences[0] in str(compared)


def test_the_numbers_and_the_drawing_of_every_figure(compared, tmp_path):
    for title in compared.figures:
        drawn = compared.figure(title)
        assert isinstance(drawn, Figure)
        assert drawn.get_suptitle() == title
        assert drawn._repr_png_()[:4] == b"\x89PNG"
        assert len(compared.frame(title)) == len(compared.rows(title)) > 0
    (axis,) = compared.figure("Training loss").axes
    drawn = {line.get_label(): line.get_ydata()[-1] for line in axis.get_lines()}
    rows = {row["series"]: row["y"] for row in compared.rows("Training loss")}
    assert drawn == rows  # the last point of each line
    with pytest.raises(ValueError, match=r"no figure is called 'loss of nothing'; name one of: 'Ranked'"):
        compared.figure("loss of nothing")
    with pytest.raises(ValueError, match=r"figures have 'training loss' in their title; name one of"):
        compared.figure("training loss")


def test_the_page_is_that_of_the_command(compared, tmp_path):
    path = compared.page(tmp_path / "mine.html")
    assert path.read_text() == page_html(compared.report)
    assert len(list((tmp_path / "mine-csv").glob("*.csv"))) == len(compared.figures)


def test_two_models_side_by_side(inspected):
    found, stages = inspected
    assert len(found.table) == 2 * 2 * 4
    assert {row["model"] for row in found.table} == {each.name for each in found.inspections}
    assert 0 <= found.table[0]["positional"] <= 1
    assert [stage for _, stage, _, _ in stages].count("probes") == 2
    assert {total for *_, total in stages} == {6}
    for title in ("How much of the logit is position", "What each head does with distance", "Heads"):
        assert found.figure(title)._repr_png_()
    assert len(found.frame("Heads")) == 16


def test_what_is_missing_is_named(compared, monkeypatch):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("pandas", "matplotlib") or name == "locant.report.drawing":
            raise ImportError(f"no {name}")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="needs pandas; install it with: pip install pandas"):
        compared.frame()
    with pytest.raises(ImportError, match=r"needs matplotlib; install it with: pip install 'locant\[plot\]'"):
        compared.figure("Ranked")


def test_a_notebook_shows_the_page_and_nothing_leaks(compared, visit, tmp_path):
    """The page of a notebook has a heading and a style of its own; the frame changes neither, and works."""
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        "<!doctype html><style>h1 { color: rgb(1, 2, 3) }</style><h1>Mine</h1><p id='figures'>text</p>"
        f"<div>{compared._repr_html_()}</div><script>window.own = 1</script>"
    )
    page = visit(notebook, width=1200)
    inside = page.frame_locator("iframe")
    inside.locator("h1").wait_for()
    assert "position schemes compared" in inside.locator("h1").inner_text()
    assert page.locator("h1").count() == 1
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(1, 2, 3)"
    assert inside.locator("h1").evaluate("e => getComputedStyle(e).color") != "rgb(1, 2, 3)"
    assert inside.locator("svg, canvas").count() > 3  # its script draws
    assert inside.locator("h1").evaluate("() => { try { return parent.own } catch { return 'apart' } }") == "apart"
    before = inside.locator("main").evaluate("() => scrollY")
    inside.locator("nav a", has_text="What was run").click()
    page.wait_for_timeout(600)
    assert inside.locator("main").evaluate("() => scrollY") > before  # links within the page stay within it
    assert "position schemes compared" in inside.locator("h1").inner_text()
    with page.expect_download() as download:
        inside.locator("a.csv").first.click()
    assert download.value.suggested_filename.startswith("01-")
