"""The page of a comparison: what it says at any moment, and what a real browser makes of it."""

import ast
import csv
import io
import json
import math
import re
import shutil
from html import unescape
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import locant
import locant.report
from locant.experiments.comparison import open_folder
from locant.experiments.learned import store_curves, stored_curves
from locant.experiments.presets import SCRATCH, find_preset
from locant.experiments.results import outcomes, sentences
from locant.report.comparison import comparison_page, write_comparison_page
from locant.report.comparison.terminal import terminal_table
from locant.report.comparison.what_was_run import command
from locant.report.figures import Grid, Interval, Intervals, Lines, Small
from locant.report.page import Report, Section, csv_name, figures_of, write_page
from locant.report.tables import records
from tests.comparisons import begin, begun, fail, finish, rows_of, whole
from tests.hf_models import make
from tests.report.test_page import DRAWN, embedded, point_at, read, same, scrolled, unpacked

HOSTILE = """</script><img src=x onerror="alert(1)">&[red]'"""


def figure(made, title):
    found = [each for each in figures_of(made) if each.title == title]
    assert len(found) == 1, [each.title for each in figures_of(made)]
    return found[0]


def titles(made) -> list[str]:
    return [section.title for section in made.sections]


def table(out, name: str) -> list[dict[str, str]]:
    (path,) = (out / "csv").glob(f"*{name}.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def save(here, scheme: str) -> None:
    """A trained model for a run, of four heads and two layers."""
    locant.swap(make("gpt2", AutoModelForCausalLM), scheme).save_pretrained(here)


# What it says


def test_the_ranked_table(tmp_path):
    whole(tmp_path)
    write_comparison_page(tmp_path)
    rows = table(tmp_path, "ranked")
    assert [row["scheme"] for row in rows] == ["tisa", "alibi", "learned", "nope"]
    tisa, alibi, learned, nope = rows
    assert float(tisa["loss"]) == pytest.approx(3.65)
    assert tisa["95 % interval"] == "3.277 … 4.023"
    assert float(tisa["minus learned"]) == pytest.approx(-0.45)
    assert tisa["its interval"] == "−0.574 … −0.326"
    assert tisa["in words"] == alibi["in words"] == "better"
    assert (learned["in words"], learned["minus learned"], learned["its interval"]) == ("baseline", "", "")
    assert (nope["in words"], nope["its interval"]) == ("no difference shown", "−0.323 … +0.423")
    assert (learned["parameters"], learned["s/step"], learned["MB"]) == ("16384", "0.25", "700")
    assert {row["runs"] for row in rows} == {"3 of 3"}


def test_the_table_by_length(tmp_path):
    whole(tmp_path)
    write_comparison_page(tmp_path)
    rows = {row["scheme"]: row for row in table(tmp_path, "mean-loss-at-each-length")}
    assert [rows["learned"][length] for length in ("256", "512", "1,024")] == ["cannot: its positions end at 128"] * 3
    assert float(rows["learned"]["128"]) == pytest.approx(4.1)
    assert float(rows["nope"]["1,024"]) == pytest.approx(4.15 + 3 * 0.5)
    text = unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert text.count("cannot: its positions end at 128") == 3
    (data,) = (figure["csv"] for figure in embedded(text) if figure["title"] == "Mean loss at each length")
    assert unpacked(data).count("cannot: its positions end at 128") == 3


def test_differences_with_intervals(tmp_path):
    whole(tmp_path)
    rows = {row.name: row for row in figure(comparison_page(tmp_path), "Difference to learned").rows}
    assert list(rows) == ["tisa", "alibi", "nope"]
    assert rows["tisa"].points == pytest.approx([-0.5, -0.4, -0.45])
    assert (rows["tisa"].low, rows["tisa"].high) == pytest.approx((-0.57421, -0.32579), abs=1e-5)
    assert rows["nope"].word == "no difference shown"


def test_lines_over_seeds(tmp_path):
    whole(tmp_path)
    made = comparison_page(tmp_path)
    loss = {series.name: series for series in figure(made, "Training loss").series}
    at = loss["learned"].x.index(8)
    falling = math.exp(-1)
    expected = [score + (8 - score) * falling for score in (4.0, 4.1, 4.2)]
    found = (loss["learned"].low[at], loss["learned"].y[at], loss["learned"].high[at])
    assert found == pytest.approx(expected, abs=1e-4)
    gap = figure(made, "Training loss minus that of learned")
    assert [series.name for series in gap.series] == ["nope", "tisa", "alibi"]
    assert gap.series[1].y[at] == pytest.approx(-0.45 * (1 - falling), abs=1e-4)
    # a scheme has its colour in every figure
    assert {series.name: series.colour for series in gap.series} == {"nope": 1, "tisa": 2, "alibi": 3}

    length = figure(made, "Loss by length")
    lines = {series.name: series for series in length.series}
    assert (length.log_x, length.marks) == (True, ((128.0, "trained length"),))
    assert lines["learned"].x == [128]
    assert lines["tisa"].y == pytest.approx([3.65, 3.775, 3.9, 4.025])
    assert lines["tisa"].high[0] == pytest.approx(3.65 + 0.37262, abs=1e-4)
    change = {series.name: series for series in figure(made, "Loss by length, minus that at 128").series}
    assert change["nope"].y == pytest.approx([0, 0.5, 1.0, 1.5])
    assert change["nope"].high == pytest.approx(change["nope"].low)  # seeds change alike


def test_parts_of_the_longest_input(tmp_path):
    whole(tmp_path)
    by_position = figure(comparison_page(tmp_path), "Loss by position")
    lines = {series.name: series for series in by_position.series}
    assert lines["learned"].x == [8.5 + 16 * part for part in range(8)]  # positions 1 to 16, and on
    # eight parts of every doubling: 16, 32, 64 tokens long from 128, 256, 512 on
    assert len(lines["nope"].x) == 8 * 4
    assert lines["nope"].x[8:10] == [128 + 8.5, 144 + 8.5]
    assert lines["nope"].x[-1] == 1024 - 64 + 32.5
    last = [4.15 + 0.5 * (start - 112) / 112 for start in range(960, 1024, 16)]
    assert lines["nope"].y[-1] == pytest.approx(sum(last) / 4, rel=1e-4)


def test_one_seed(tmp_path):
    comparison = whole(tmp_path, seeds=1)
    made = comparison_page(tmp_path)
    assert made.verdict[0].startswith("One seed: no interval, and no winner.")
    ranked = figure(made, "Ranked")
    words = ranked.header.index("in words")
    assert {row[words] for row in ranked.rows} == {"baseline", "one seed"}
    assert {row[ranked.header.index("95 % interval")] for row in ranked.rows} == {""}
    assert "no interval" in figure(made, "Difference to learned").note
    assert all(row.low is None for row in figure(made, "Difference to learned").rows)
    lines = [series for each in figures_of(made) if isinstance(each, Lines) for series in each.series]
    assert all(series.low is None for series in lines)
    shown = printed(terminal_table(comparison, rows_of(tmp_path, comparison), list(made.verdict), 200), 200)
    assert "95 % interval" not in shown
    assert "no winner" in shown


def test_failed_runs(tmp_path):
    comparison = begin(tmp_path, ["learned", "rope"])
    for seed in range(3):
        finish(tmp_path, comparison, "learned", seed, 4.0 + seed / 10)
    fail(tmp_path, comparison, "rope", 0, "the loss was nan at step 10")
    finish(tmp_path, comparison, "rope", 1, 3.0)
    made = comparison_page(tmp_path)
    failed = figure(made, "Runs that failed")
    assert failed.rows == [["rope", 0, "the loss was nan at step 10", 10, "runs/rope.s0/log.txt"]]
    ranked = figure(made, "Ranked")
    by_scheme = {row[0]: dict(zip(ranked.header, row, strict=True)) for row in ranked.rows}
    assert by_scheme["rope"]["runs"] == "1 of 3, 1 failed"
    assert by_scheme["rope"]["loss"] == 3.0  # the failed one counts in no mean
    assert by_scheme["rope"]["in words"] == "one seed"
    assert made.facts["runs"] == "4 finished, 1 failed, 1 to come"
    for seed in (1, 2):
        shutil.rmtree(tmp_path / "runs" / f"rope.s{seed}", ignore_errors=True)
        fail(tmp_path, comparison, "rope", seed, "killed", final=False)
    ranked = figure(comparison_page(tmp_path), "Ranked")
    assert ranked.rows[-1][0] == "rope"
    assert ranked.rows[-1][ranked.header.index("in words")] == "failed"


def test_at_any_moment(tmp_path):
    with pytest.raises(ValueError, match=r"holds no comparison: there is no comparison\.json"):
        comparison_page(tmp_path)
    comparison = begin(tmp_path, ["learned", "tisa"], seeds=2)
    write_comparison_page(tmp_path)
    nothing = comparison_page(tmp_path)
    assert nothing.verdict[0] == "No run has finished yet."
    assert titles(nothing) == ["Which is best", "What was run"]
    begun(tmp_path, comparison, "learned", 0, upto=6)
    some = comparison_page(tmp_path)
    assert titles(some) == ["Which is best", "Training", "Translation invariance", "What was run"]
    assert figure(some, "Training loss").series[0].x == [2, 4, 6]
    shutil.rmtree(tmp_path / "runs")
    finish(tmp_path, comparison, "learned", 0, 4.0, last=128)
    begun(tmp_path, comparison, "learned", 1, upto=6)
    write_comparison_page(tmp_path)
    made = comparison_page(tmp_path)
    assert figure(made, "Training loss").series[0].x[-1] == 40  # finished ones alone: the other would end at 6
    assert figure(made, "Training loss").series[0].low is None
    # nothing of an earlier page is left
    names = [csv_name(at, each) for at, each in enumerate(figures_of(made))]
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == names
    assert not list(tmp_path.glob(".report*"))


def test_invariance_during_training(tmp_path):
    whole(tmp_path)
    made = comparison_page(tmp_path)
    lines = {series.name: series for series in figure(made, "Translation invariance of learned during training").series}
    assert list(lines) == ["E Eᵀ", "E Eᵀ, i ≠ j", "head 1"]
    assert lines["E Eᵀ, i ≠ j"].y == pytest.approx([step / 100 for step in range(2, 41, 2)])
    assert (lines["head 1"].low[0], lines["head 1"].y[0], lines["head 1"].high[0]) == (0.125, 0.25, 0.375)
    ends = figure(made, "Translation invariance at both ends")
    assert ["learned", "E Eᵀ, i ≠ j", 2, 0.02, 40, 0.4] in ends.rows


def test_every_figure_says_what_is_normal(tmp_path):
    whole(tmp_path)
    for each in figures_of(comparison_page(tmp_path)):
        assert len(each.note) > 60, each.title


def test_what_was_run(tmp_path):
    comparison = whole(tmp_path / "out")
    settings = dict(figure(comparison_page(tmp_path / "out"), "Settings").rows)
    assert settings["command"] == (
        "locant compare clm --schemes learned,nope,tisa,alibi --seeds 3 --budget 40steps "
        "--preset quick:length=128 -o out"
    )
    assert (settings["torch"], settings["first run began"]) == ("2.9.0", "2026-01-01T12:00:00+00:00")
    assert settings["data"] == "the default text"
    every = figure(comparison_page(tmp_path / "out"), "Every run")
    assert len(every.rows) == 12
    assert every.rows[0][:4] == ["learned", 0, "finished", 40]
    assert len(outcomes(tmp_path / "out", comparison)) == 12


def test_the_command_names_what_was_changed_in_the_preset(tmp_path):
    data = whole(tmp_path).to_dict()
    data["work"] |= {"data": "/some where/text.txt", "model": "llama"}
    data["work"]["preset"] |= {"length": 32, "rate": 0.0005}
    (tmp_path / "comparison.json").write_text(json.dumps(data))
    made = command(open_folder(tmp_path), "x")
    assert "--data '/some where/text.txt' --model llama" in made
    (text,) = re.findall(r"--preset (\S+)", made)
    assert text == "quick:length=32,rate=0.0005"
    assert find_preset(text, SCRATCH) == open_folder(tmp_path).work.preset


def test_strange_names_stay_text(tmp_path):
    comparison = begin(tmp_path, ["learned", HOSTILE], seeds=1)
    finish(tmp_path, comparison, "learned", 0, 4.0, last=128)
    finish(tmp_path, comparison, HOSTILE, 0, 3.0)
    text = write_comparison_page(tmp_path).read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text
    shown = printed(terminal_table(comparison, rows_of(tmp_path, comparison), [HOSTILE], 200), 200)
    assert shown.count(HOSTILE) == 2  # square brackets are not markup


# What was learned


def test_learned_curves(tmp_path):
    comparison = whole(tmp_path, seeds=1)
    for scheme in comparison.schemes:
        full = "learned:length=40" if scheme == "learned" else scheme
        save(tmp_path / "runs" / f"{scheme}.s0", full)
    made = comparison_page(tmp_path)
    section = next(each for each in made.sections if each.title == "What each scheme learned")
    assert [each.title for each in section.figures] == [
        "learned: cosine of two embeddings, token embedding",
        "tisa: added to the logit",
        "alibi: added to the logit, all layers",
    ]
    assert made.notices == ()
    assert "Nothing to draw for nope" in section.intro
    cosine, tisa, alibi = section.figures
    # ALiBi of four heads: slopes 1/4, 1/16, 1/64, 1/256; a causal model has no keys after its query
    assert [series.x for series in alibi.series] == [list(range(-64, 1))] * 4
    assert [series.y[-5] for series in alibi.series] == pytest.approx([-4 / 4, -4 / 16, -4 / 64, -4 / 256], rel=1e-3)
    assert "nothing to learn" in alibi.note
    assert isinstance(tisa, Small)
    assert [panel.title for panel in tisa.panels] == ["layer 1", "layer 2"]
    model = locant.load(str(tmp_path / "runs" / "tisa.s0"))
    with torch.no_grad():
        bias = locant.native(model).stacks[0].layers[1].terms(torch.tensor([-3])).bias
    assert [series.y[-4] for series in tisa.panels[1].series] == pytest.approx(bias[:, 0].tolist(), rel=1e-3, abs=1e-6)
    assert cosine.series[0].y[-1] == 1.0


def test_curves_over_seeds(tmp_path):
    comparison = whole(tmp_path, seeds=2, schemes=("nope", "tisa", "alibi"))
    for scheme in comparison.schemes:
        for seed in (0, 1):
            torch.manual_seed(seed)
            save(tmp_path / "runs" / f"{scheme}.s{seed}", scheme)
    made = comparison_page(tmp_path)
    section = next(each for each in made.sections if each.title == "What each scheme learned")
    titles_of = [each.title for each in section.figures]
    assert titles_of[:2] == ["tisa: added to the logit", "tisa: added to the logit, over seeds"]
    assert not any("alibi" in title and "over seeds" in title for title in titles_of)  # it has nothing to learn
    (series,) = section.figures[1].panels[0].series
    assert series.x == list(range(-64, 1))
    assert all(low <= y <= high for low, y, high in zip(series.low, series.y, series.high, strict=True))


def test_a_model_that_cannot_be_opened_is_a_notice(tmp_path):
    whole(tmp_path, seeds=1)
    made = comparison_page(tmp_path)
    assert "What each scheme learned" not in titles(made)
    assert [notice.partition(":")[0] for notice in made.notices] == [
        f"What {scheme} learned is not shown" for scheme in ("learned", "nope", "tisa", "alibi")
    ]


def test_curves_that_a_run_could_not_compute_are_a_notice(tmp_path):
    comparison = whole(tmp_path, seeds=1, schemes=("learned", "tisa"))
    save(tmp_path / "runs" / "tisa.s0", "tisa")
    here = tmp_path / "runs" / "learned.s0"
    store_curves(torch.nn.Linear(2, 2), here, comparison.work.preset.length)
    stored = stored_curves(here)
    assert stored.problem
    assert stored.curves == ()
    made = comparison_page(tmp_path)
    assert made.notices == (f"What learned learned is not shown: {stored.problem}",)
    assert figure(made, "tisa: added to the logit")


def test_a_page_computes_nothing():
    """No module of report imports what opens models, does mathematics on tensors, or estimates."""
    heavy = (
        "torch",
        "numpy",
        "scipy",
        "locant.hf",
        "locant.schemes",
        "locant.attention",
        "locant.experiments.statistics",
    )
    folder = Path(locant.report.__file__).parent
    imported = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        only_types = [
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in node.body
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {(path.name, name.name) for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node not in only_types:
                imported.add((path.name, node.module))
    assert len(imported) > 50
    assert [each for each in sorted(imported) if each[1] == "locant" or each[1].startswith(heavy)] == []


# In the terminal


def printed(what, width: int) -> str:
    console = Console(width=width, color_system=None, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "there", "left_out"),
    [
        (44, ["loss", "in words"], ["at 1,024", "runs", "s/step"]),
        (80, ["loss", "− learned", "in words", "at 1,024", "95 % interval"], ["MB", "at 256"]),
        (200, ["its interval", "at 256", "at 512", "runs", "s/step", "MB", "parameters"], []),
    ],
)
def test_the_table_fits_the_terminal(tmp_path, width, there, left_out):
    comparison = whole(tmp_path)
    rows = rows_of(tmp_path, comparison)
    shown = printed(terminal_table(comparison, rows, sentences(comparison, rows), width), width)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if "scheme" in line)
    assert all(name in head for name in there)
    assert not [name for name in left_out if name in head]
    ranked = [line.split()[0] for line in lines[lines.index(head) + 2 :] if line][:4]
    assert ranked == ["tisa", "alibi", "learned", "nope"]
    assert "no difference shown" in shown
    assert "its positions end at 128" in " ".join(shown.split())
    if "at 1,024" in there:
        assert any(line.split()[0] == "learned" and line.endswith("cannot") for line in lines if line)


# In a browser


def test_in_a_browser(visit, tmp_path):
    comparison = whole(tmp_path)
    save(tmp_path / "runs" / "tisa.s0", "tisa")
    fail_at = begin(tmp_path, [*comparison.schemes, HOSTILE])
    fail(tmp_path, fail_at, HOSTILE, 0, HOSTILE)
    page = visit(write_comparison_page(tmp_path))
    figures = figures_of(comparison_page(tmp_path))
    number = {each.title: at for at, each in enumerate(figures)}
    scrolled(page)
    assert page.evaluate(DRAWN) == page.locator(".stage").count()
    drawn = sum(len(each.panels) if isinstance(each, Small) else isinstance(each, Lines) for each in figures)
    assert page.locator(".stage").count() == drawn
    tables = sum(isinstance(each, Grid) for each in figures)
    assert page.locator("table").count() == tables

    tip = point_at(page, number["Training loss"], 0.99, 0.9)
    assert "step\n40" in tip
    assert f"{4.1 + 3.9 * math.exp(-5):.5g} (" in tip
    length = page.locator(f"#f{number['Loss by length']}")
    assert length.locator("line.mark").count() == 1
    assert length.locator("text.mark").text_content() == "trained length"
    assert length.locator("path.whisker").count() == 1 + 3 * 4
    colour = "el => el.style.stroke"
    lines = [page.locator(f"#f{number[title]} g[data-series=nope] path.line").first for title in
             ("Training loss", "Training loss minus that of learned", "Loss by position")]  # fmt: skip
    assert {line.evaluate(colour) for line in lines} == {"var(--c1)"}


def test_intervals_stand_where_they_belong(visit, tmp_path):
    rows = (
        Interval("all", -1.0, -2.0, 0.0, points=(-1.5, -0.5), word="no difference shown", colour=1),
        Interval("one", 2.0, points=(2.0,), word="one seed", colour=9),
        Interval("none", None, word="no number"),
    )
    figure = Intervals("Difference", "a note", "difference in loss", rows)
    path = write_page(Report("r", "", (), {}, (Section("s", "", (figure,)),)), tmp_path / "r.html", csv_folder=tmp_path)
    page = visit(path)

    def middle(selector: str) -> float:
        box = page.locator(selector).bounding_box()
        return box["x"] + box["width"] / 2

    track = "#f0 .track >> nth="
    zero = middle(f"{track}0 >> b")
    unit = (middle(f"{track}1 >> s") - zero) / 2
    assert unit > 50
    assert middle(f"{track}0 >> s") == pytest.approx(zero - unit, abs=1)
    assert middle(f"{track}0 >> u >> nth=0") == pytest.approx(zero - 1.5 * unit, abs=1)
    bar = page.locator(f"{track}0 >> i").bounding_box()
    assert (bar["x"], bar["x"] + bar["width"]) == pytest.approx((zero - 2 * unit, zero), abs=2)
    assert page.locator(f"{track}1 >> i").count() == page.locator(f"{track}2 >> s").count() == 0
    said = page.locator("#f0 .comment").all_inner_texts()
    assert said == ["−1 (−2 … 0)\nno difference shown", "+2\none seed", "–\nno number"]
    ticks = page.locator("#f0 .ticks span").all_inner_texts()
    assert ticks == ["−2", "−1", "0", "+1", "+2"]
    with page.expect_download() as download:
        page.locator("#f0 .csv").click()
    for path in (download.value.path(), tmp_path / "01-difference.csv"):
        assert all(same(row, expected) for row, expected in zip(read(path), records(figure), strict=True))


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_sticks_out(visit, tmp_path, width):
    comparison = begin(tmp_path, ["learned", "native+tisa:kernels=5,init=uniform,heads=shared", HOSTILE], seeds=2)
    for at, scheme in enumerate(comparison.schemes):
        for seed in range(2):
            finish(tmp_path, comparison, scheme, seed, 4.0 + at / 10 + seed / 7, last=None if at else 128)
    page = scrolled(visit(write_comparison_page(tmp_path), width=width))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(DRAWN) == page.locator(".stage").count()
    right = "[...document.querySelectorAll('.means *')].map(s => s.getBoundingClientRect().right)"
    assert max(page.evaluate(right)) <= width
