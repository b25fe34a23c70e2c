"""The report page: what is in the file, and what a real browser makes of it. All numbers are synthetic."""

import base64
import csv
import io
import json
import math
import re
import zlib
from html import unescape
from pathlib import Path

import pytest

import locant
from locant.report.figures import Grid, Heat, Lines, Series, SideBySide, Small
from locant.report.page import Report, Section, csv_name, figures_of, write_page
from locant.report.side_by_side import side_by_side
from locant.report.tables import csv_text, records, write_csv

HOSTILE = """</script><img src=x onerror="alert(1)"> & 'me' <!--"""
NAN = float("nan")
OFFSETS = list(range(-64, 65))


def kernel(head: int, r: int) -> float:
    return math.exp(-((r - head + 4) ** 2) / (20 + 30 * head)) - 0.1 * head * (r > 0)


def attention(length: int, head: int) -> list[list[float | None]]:
    rows: list[list[float | None]] = []
    for i in range(length):
        weights = [math.exp(-abs(j - i) / (2 + 3 * head)) if j <= i else None for j in range(length)]
        total = sum(weight for weight in weights if weight is not None)
        rows.append([None if weight is None else weight / total for weight in weights])
    return rows


def synthetic(title: str = "a synthetic model", factor: float = 1.0) -> Report:
    lengths = [128, 256, 512, 1024, 2048, 4096]
    loss = [factor * value for value in (3.2, 3.0, 2.9, 2.95, 4.1, 6.3)]
    by_length = Lines(
        "Loss by length",
        "Loss on synthetic text. Flat is normal; a rise beyond the trained length: positions do not carry over.",
        "length in tokens",
        "loss in nats per token",
        (
            Series("as trained", lengths, loss, [v - 0.2 for v in loss], [v + 0.25 for v in loss]),
            Series("positions shuffled", lengths, [7.1, 7.0, NAN, 7.2, 7.4, 7.9]),
            Series("uniform", lengths, [8.0] * 6, dashed=True),
        ),
        log_x=True,
    )
    decay = Lines(
        "Decay with distance",
        "Mean weight at a distance.",
        "distance",
        "weight",
        (Series("mean", [0, 1, 10, 100, 1000], [0.0, 0.5 * factor, 0.05, 0.004, 1e-7]),),
        log_x=True,
        log_y=True,
    )
    per_head = Lines(
        "Bias by offset, twelve heads",
        "Dark is the first head, light the last. The gap is where there is no key.",
        "offset r = key − query",
        "bias",
        tuple(
            Series(f"head {h}", OFFSETS, [NAN if 20 < r < 24 else factor * kernel(h, r) for r in OFFSETS])
            for h in range(12)
        ),
    )
    heads = Heat(
        "Heads by offset",
        "Each row is a head. A bright column away from 0 is a head that looks at a fixed distance.",
        "offset",
        "head",
        [f"0.{h}" for h in range(12)],
        OFFSETS,
        [[None if (h, r) == (3, 5) else factor * kernel(h, r) for r in OFFSETS] for h in range(12)],
        diverging=True,
    )
    matrix = Heat("Attention, head 0.4", "Rows sum to 1.", "key", "query", range(128), range(128), attention(128, 4))
    curves = Small(
        "Every head",
        "One panel per head. Click a panel to enlarge it.",
        tuple(
            Lines(
                f"L{layer} H{h}",
                "",
                "offset",
                "bias",
                (Series("bias", OFFSETS, [factor * kernel(h, r) / (layer + 1) for r in OFFSETS]),),
            )
            for layer in range(6)
            for h in range(12)
        ),
        columns=12,
    )
    maps = Small(
        "Attention of six heads",
        "",
        tuple(Heat(f"head {h}", "", "key", "query", range(24), range(24), attention(24, h)) for h in range(6)),
    )
    table = Grid(
        "Head labels",
        "Shares are of the attention mass.",
        ["head", "label", "share", "count"],
        [[f"0.{h}", "previous token" if h % 3 else HOSTILE, -0.125 if h == 2 else h / 7, h] for h in range(12)]
        + [["–", "none", NAN, None]],
    )
    return Report(
        title=title,
        subtitle="synthetic numbers, to look at the page",
        verdict=(
            "Position reaches this model through a relative bias; six of its heads look at a fixed distance.",
            "Beyond 1024 tokens it loses track: the loss doubles by 4096.",
        ),
        facts={"scheme": "tisa:kernels=5", "layers": "6", "heads": "12", "trained length": "512", HOSTILE: HOSTILE},
        sections=(
            Section("By length", "How the model does as texts get longer.", (by_length, decay)),
            Section("By offset", "What heads do with the offset.", (per_head, heads, curves)),
            Section(f"Attention {HOSTILE}", "", (matrix, maps)),
            Section("Labels", "What each head does.", (table,)),
        ),
        notices=(f"Probing was left out: {HOSTILE}",),
    )


def embedded(text: str):
    found = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text, flags=re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def unpacked(packed: str) -> str:
    """The csv text that a page holds for one figure."""
    return zlib.decompress(base64.b64decode(packed)).decode()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return write_page(synthetic(HOSTILE), folder / "new" / "report.html", csv_folder=folder / "csv")


@pytest.fixture(scope="module")
def both_file(tmp_path_factory):
    both = side_by_side(synthetic("one"), synthetic("two", 2.0))
    return write_page(both, tmp_path_factory.mktemp("both") / "both.html")


@pytest.fixture(scope="module")
def both_hostile_file(tmp_path_factory):
    both = side_by_side(synthetic(HOSTILE), synthetic("m" * 120, 2.0))
    return write_page(both, tmp_path_factory.mktemp("both") / "both.html")


# The file


def test_nothing_is_fetched(page_file):
    text = page_file.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<>]*", text)) == {"http://www.w3.org/2000/svg"}
    outside_data = text.split('<script type="application/json"')[0]
    assert all(target.startswith("#") for target in re.findall(r'\bhref="([^"]*)"', outside_data))
    assert not re.search(r"<(link|iframe|object|embed|img)\b|<script[^>]+\bsrc|@import|url\(", text)
    assert "default-src 'none'" in text


def test_hostile_names_stay_text(page_file):
    text = page_file.read_text(encoding="utf-8")
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text
    assert unescape(re.search(r"<h1>(.*?)</h1>", text).group(1)) == HOSTILE


def test_the_data_in_the_page_are_the_figures(page_file):
    data = embedded(page_file.read_text(encoding="utf-8"))
    figures = figures_of(synthetic(HOSTILE))
    assert [part["kind"] for part in data] == [type(figure).__name__ for figure in figures]
    assert data[0]["series"][0]["y"] == list(figures[0].series[0].y)
    assert data[0]["series"][1]["y"][2] is None
    assert data[3]["values"][3][OFFSETS.index(5)] is None
    assert len(data[4]["panels"]) == 72
    assert [unpacked(part["csv"]) for part in data] == [csv_text(figure) for figure in figures]


def test_csvs_hold_the_data(page_file):
    folder = page_file.parent.parent / "csv"
    figures = figures_of(synthetic(HOSTILE))
    assert sorted(path.name for path in folder.iterdir()) == [csv_name(at, f) for at, f in enumerate(figures)]
    for at, figure in enumerate(figures):
        rows = read(folder / csv_name(at, figure))
        wanted = records(figure)
        assert len(rows) == len(wanted)
        assert all(same(row, expected) for row, expected in zip(rows, wanted, strict=True))
    first = (folder / csv_name(0, figures[0])).read_text(encoding="utf-8").splitlines()
    assert first[:2] == ["series,x,y,low,high", "as trained,128,3.2,3.0,3.45"]
    assert "positions shuffled,512,,," in first


def read(path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def same(row: dict, expected: dict) -> bool:
    """A row read from a csv says what the record says; what the record does not have is empty."""
    for name, text in row.items():
        value = expected.get(name)
        if value is None or isinstance(value, str):
            if text != (value or ""):
                return False
        elif float(text) != value:
            return False
    return set(expected) <= set(row)


def test_csv_of_two_models_names_them(tmp_path):
    heat = Heat("h", "", "x", "y", ["a"], [0, 0.5], [[1.0, float("inf")]])
    write_csv(SideBySide("h", "", "one", "two", heat, None), tmp_path / "pair.csv")
    assert (tmp_path / "pair.csv").read_text().splitlines() == ["model,row,column,value", "one,a,0,1.0", "one,a,0.5,"]


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "\n=1", "\0=1", "＝1", "-", '=cmd|"/c calc"!A1', "-1\n=2"],
)
def test_a_spreadsheet_executes_no_text_of_a_csv(tmp_path, text):
    grid = Grid("g", "", [text, "number"], [[text, -1.5]])
    path = write_page(Report("r", "", (), {}, (Section("s", "", (grid,)),)), tmp_path / "r.html", csv_folder=tmp_path)
    (file,) = tmp_path.glob("*.csv")
    wanted = io.StringIO(newline="")
    csv.writer(wanted).writerows([[f"'{text}", "number"], [f"'{text}", -1.5]])
    assert file.read_bytes().decode() == wanted.getvalue()
    (data,) = embedded(path.read_text(encoding="utf-8"))
    assert unpacked(data["csv"]).encode() == file.read_bytes()


@pytest.mark.parametrize("cell", [-1.5, -0.0, "-1.5", "+2", "-1.5 -0.25", "a=b", "−1", " =1", "", None])
def test_numbers_and_harmless_texts_of_a_csv_stay_as_they_are(cell):
    text = csv_text(Grid("g", "", ["a", "b"], [[cell, "x"]]))
    assert text == f"a,b\r\n{'' if cell is None else cell},x\r\n"


def test_one_module_writes_csv():
    source = Path(locant.__file__).parent
    assert {path.name for path in source.rglob("*.py") if "\nimport csv\n" in path.read_text()} == {"csv_text.py"}


def test_figures_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 x but 2 y"):
        Series("s", [1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="only one of low and high"):
        Series("s", [1], [1], low=[0])
    with pytest.raises(ValueError, match="2 row and 1 column labels, but 1 rows of 1 values"):
        Heat("h", "", "x", "y", [0, 1], [0], [[1.0]])
    with pytest.raises(ValueError, match="2 columns, but row 1 has 1 cells"):
        Grid("g", "", ["a", "b"], [["only"]])
    with pytest.raises(ValueError, match="columns of the same name"):
        Grid("g", "", ["a", "a"], [])


# Two models


def test_side_by_side_overlays_lines_and_pairs_the_rest():
    both = side_by_side(synthetic("one"), synthetic("two", factor=2.0))
    kinds = [type(figure) for figure in figures_of(both)]
    assert kinds == [Lines, Lines, Lines, *[SideBySide] * 5]
    loss = both.sections[0].figures[0]
    assert [(series.name, series.group) for series in loss.series] == [
        ("as trained", "one"),
        ("positions shuffled", ""),  # the same in both, gap and all
        ("uniform", ""),
        ("as trained", "two"),
    ]
    assert both.sections[1].figures[1].right.values[0][0] == 2 * both.sections[1].figures[1].left.values[0][0]
    assert len(both.verdict) == 4
    assert both.verdict[2].startswith("two: Position reaches")
    assert both.facts["layers"] == "6"
    assert len(both.notices) == 2


def test_side_by_side_keeps_what_only_one_has():
    heat = Heat("h", "", "x", "y", [0], [0], [[1.0]])
    lines = Lines("l", "n", "x", "y", (Series("s", [0], [0]),))
    other_axes = Lines("l", "n", "x", "y", (Series("s", [1], [1]),), log_y=True)
    left = Report("m", "", (), {"a": "1", "b": "2"}, (Section("s", "i", (lines,)),))
    right = Report("m", "", (), {"a": "3"}, (Section("s", "i", (other_axes, heat)), Section("t", "", (heat,))))
    both = side_by_side(left, right)
    assert both.title == "m (1) and m (2)"
    assert both.facts == {"a": "1 | 3", "b": "2 | –"}
    assert [section.title for section in both.sections] == ["s", "t"]
    assert both.sections[0].figures == (
        SideBySide("l", "n", "m (1)", "m (2)", lines, other_axes),
        SideBySide("h", "", "m (1)", "m (2)", None, heat),
    )
    with pytest.raises(ValueError, match="third"):
        side_by_side(both, right)


# In a browser


DRAWN = """() => [...document.querySelectorAll('.stage')].filter(s =>
    s.querySelector('g.series path.line, g.series circle, image')).length"""


SCROLL = """async () => {
  document.documentElement.style.scrollBehavior = 'auto';
  const frame = () => new Promise(requestAnimationFrame);
  for (let at = 0; at < document.documentElement.scrollHeight; at += 700) {
    scrollTo(0, at);
    await frame();
    await frame();
  }
  await new Promise(done => setTimeout(done, 100));
}"""


def scrolled(page):
    """The page after every part has been in view."""
    page.evaluate(SCROLL)
    return page


def point_at(page, figure: int, x: float, y: float) -> str:
    """What the tip says at a place in the figure's plotting area, given in shares of the stage's box."""
    stage = page.locator(f"#f{figure} .stage").first
    stage.scroll_into_view_if_needed()
    page.wait_for_selector(f"#f{figure} .stage svg")
    box = stage.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    return page.locator("#tip").inner_text()


def test_figures_are_drawn_when_they_come_into_view(visit, page_file):
    page = visit(page_file)
    page.wait_for_selector("#f0 .stage svg")
    height = page.evaluate("document.documentElement.scrollHeight")
    assert page.evaluate(DRAWN) < 20
    scrolled(page)
    assert page.locator(".stage").count() == page.evaluate(DRAWN) == 3 + 1 + 72 + 1 + 6
    assert page.evaluate("document.documentElement.scrollHeight") == height  # nothing moved


def test_everything_is_drawn_for_printing(visit, page_file):
    page = visit(page_file, scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(DRAWN) == page.locator(".stage").count()
    assert len(page.pdf()) > 50_000


def test_a_line_tells_its_values(visit, page_file):
    page = visit(page_file)
    page.wait_for_selector("#f0 .stage svg")
    circle = page.locator('#f0 g.series[data-series="as trained"] circle').nth(4)
    circle.scroll_into_view_if_needed()
    box = circle.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert tip.locator("div").first.inner_text().split("\n") == ["length in tokens", "2048"]
    assert tip.locator("div.on").inner_text().split("\n") == ["as trained", "4.1 (3.9 … 4.35)"]
    assert "positions shuffled\n7.4" in tip.inner_text()
    assert page.locator("#f0 svg.lit g.series.on").get_attribute("data-series") == "as trained"
    assert page.locator("#f0 .hair").count() == 2
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    assert page.locator("#f0 svg.lit").count() == 0


def test_a_heat_map_tells_its_values(visit, page_file):
    page = visit(page_file)
    point_at(page, 3, 0.5, 0.5)
    image = page.locator("#f3 image").bounding_box()

    def at(row: int, r: int) -> list[str]:
        column = OFFSETS.index(r)
        page.mouse.move(
            image["x"] + (column + 0.5) * image["width"] / 129, image["y"] + (row + 0.5) * image["height"] / 12
        )
        return page.locator("#tip").inner_text().split("\n")

    assert at(0, -4) == ["head", "0.0", "offset", "−4", "value", "1"]
    assert at(7, 60) == ["head", "0.7", "offset", "60", "value", f"−{abs(float(f'{kernel(7, 60):.6g}'))}"]
    assert at(3, 5)[-1] == "no value"


def test_keys_tell_values(visit, page_file):
    page = visit(page_file)
    page.wait_for_selector("#f0 .stage svg")
    page.locator("#f0 .stage").focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "as trained\n2.9 " in page.locator("#tip div.on").inner_text()
    page.keyboard.press("ArrowDown")
    assert "positions shuffled" in page.locator("#tip div.on").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    assert "Loss by length" in page.locator("#f0 .stage").get_attribute("aria-label")


def test_gaps_are_gaps(visit, page_file):
    page = visit(page_file)
    page.wait_for_selector("#f0 .stage svg")
    line = page.locator('#f0 g[data-series="positions shuffled"] path.line').get_attribute("d")
    assert line.count("M") == 2
    point_at(page, 1, 0.5, 0.5)
    assert page.locator("#f1 g.series circle").count() == 4  # 0 has no logarithm
    point_at(page, 3, 0.5, 0.5)
    assert page.locator("#f3 .hatched").count() == 1


def test_the_legend_hides_lines(visit, page_file):
    page = visit(page_file)
    page.wait_for_selector("#f0 .stage svg")
    chosen = page.locator('#f0 g[data-series="positions shuffled"] path')
    button = page.locator("#f0 .legend button", has_text="positions shuffled")
    assert chosen.count() == 1
    button.click()
    assert chosen.count() == 0
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert chosen.count() == 1


def test_small_panels_change_scale_and_enlarge(visit, page_file):
    page = visit(page_file)
    point_at(page, 4, 0.5, 0.5)
    line = page.locator("#f4 .panel").nth(13).locator("path.line")
    before = line.get_attribute("d")
    page.locator("#f4 .scales").click()
    assert line.get_attribute("d") != before
    page.locator("#f4 .panel").nth(13).click()
    assert page.locator("#large h3").inner_text() == "L1 H1"
    assert page.locator("#large path.line").count() == 1
    box = page.locator("#large .stage").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.locator("#large #tip").is_visible()
    page.locator("#large button", has_text="close").click()
    assert not page.locator("#large").is_visible()


def test_the_csv_link_gives_what_is_in_the_folder(visit, page_file):
    page = visit(page_file)
    for at, figure in enumerate(figures_of(synthetic(HOSTILE))):
        with page.expect_download() as download:
            page.locator(f"#f{at} .csv").click()
        assert download.value.suggested_filename == csv_name(at, figure)
        file = page_file.parent.parent / "csv" / csv_name(at, figure)
        assert download.value.path().read_bytes() == file.read_bytes()
        written = read(file)
        rows = read(download.value.path())
        assert list(rows[0]) == list(written[0])
        assert all(same(row, expected) for row, expected in zip(rows, records(figure), strict=True))


def test_tables_sort(visit, page_file):
    page = visit(page_file)
    shares = page.locator("#f7 tbody td:nth-child(3)")
    page.locator("#f7 th button", has_text="share").click()
    assert [shares.nth(at).inner_text() for at in (0, 1, 12)] == ["−0.125", "0.000", "–"]
    page.locator("#f7 th button", has_text="share").click()
    assert [shares.nth(at).inner_text() for at in (0, 12)] == ["1.571", "–"]


@pytest.mark.parametrize("width", [360, 768, 1400, 2200])
def test_nothing_sticks_out(visit, page_file, both_hostile_file, width):
    for path in (page_file, both_hostile_file):
        page = scrolled(visit(path, width=width))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        stages = page.evaluate("[...document.querySelectorAll('.stage')].map(s => s.getBoundingClientRect().right)")
        assert max(stages) <= width
        assert page.evaluate(DRAWN) == page.locator(".stage").count()


CONTRAST = """() => {
  const light = c => { const p = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126*p[0] + .7152*p[1] + .0722*p[2]; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$|transparent/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  const ratio = (a, b) => { const [l, h] = [light(a), light(b)].sort((x, y) => x - y); return (h + .05) / (l + .05); };
  const text = [...document.querySelectorAll('h1, h2, h3, p, li, dt, dd, td, th, a, .note, .axis, .legend span')]
    .map(e => ratio(getComputedStyle(e).color, behind(e)));
  const marks = [...document.querySelectorAll('.stage text')].map(e => ratio(getComputedStyle(e).fill, behind(e)));
  const lines = [...document.querySelectorAll('#f0 path.line')].map(e => ratio(getComputedStyle(e).stroke, behind(e)));
  return [Math.min(...text, ...marks), Math.min(...lines), light(getComputedStyle(document.body).backgroundColor)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_can_be_read(visit, page_file, scheme):
    page = scrolled(visit(page_file, scheme=scheme))
    text, lines, paper = page.evaluate(CONTRAST)
    assert text >= 4.5  # WCAG AA
    assert lines >= 3
    assert (paper < 0.05) == (scheme == "dark")


def test_two_models_share_colours_and_scales(visit, both_file):
    page = visit(both_file)
    page.wait_for_selector("#f0 .stage svg")
    names = page.locator("#f0 .legend button").all_inner_texts()
    assert names == ["as trained · one", "positions shuffled", "uniform", "as trained · two"]
    point_at(page, 3, 0.5, 0.5)
    keys = page.locator("#f3 .key")
    assert keys.nth(0).inner_text() == keys.nth(1).inner_text()
    pictures = page.locator("#f3 image")
    assert pictures.nth(0).get_attribute("href") != pictures.nth(1).get_attribute("href")
    page.locator("#f3 .scales").click()  # one is twice the other, so each on its own scale they are the same
    assert pictures.nth(0).get_attribute("href") == pictures.nth(1).get_attribute("href")
    left, right = (page.locator("#f3 .stage").nth(side).bounding_box() for side in (0, 1))
    assert left["y"] == right["y"]
    assert left["width"] == pytest.approx(right["width"], abs=1)
    assert left["width"] > 0.45 * page.locator("#f3").bounding_box()["width"]


def test_two_models_with_many_lines_are_hidden_by_name_or_by_model(visit, both_file):
    page = visit(both_file)
    point_at(page, 2, 0.5, 0.5)
    lines = page.locator("#f2 path.line")
    buttons = page.locator("#f2 .legend button")
    assert buttons.all_inner_texts() == ["one", "two", *(f"head {h}" for h in range(12))]
    assert lines.count() == 24
    buttons.nth(1).click()
    assert lines.count() == 12
    buttons.nth(5).click()
    assert lines.count() == 11
    buttons.nth(1).click()
    assert lines.count() == 22
