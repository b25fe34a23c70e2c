"""One HTML page from figures. Style, script and numbers are in the file: it fetches nothing and computes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from locant.report.data import page_data
from locant.report.figures import Figure
from locant.report.markup import figure_markup
from locant.report.tables import write_csv
from locant.runs import files

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Section:
    """Figures under one heading, with an introduction."""

    title: str
    intro: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Report:
    """The content of a page. `verdict` is its findings, one sentence each; `notices` name missing parts and why."""

    title: str
    subtitle: str
    verdict: tuple[str, ...]
    facts: dict[str, str]
    sections: tuple[Section, ...]
    notices: tuple[str, ...] = ()


def write_page(report: Report, path: Path, *, csv_folder: Path | None = None) -> Path:
    """Writes the page, and the numbers of each figure into `csv_folder`. Returns the path of the page."""
    path = Path(path)
    files.write(path, page_html(report))
    if csv_folder is not None:
        named = {csv_name(index, figure): figure for index, figure in enumerate(figures_of(report))}
        for name, figure in named.items():
            write_csv(figure, Path(csv_folder) / name)
        for earlier in Path(csv_folder).glob("[0-9][0-9]-*.csv"):
            if earlier.name not in named:  # from an earlier page with other figures
                earlier.unlink(missing_ok=True)
    return path


def csv_name(index: int, figure: Figure) -> str:
    """Returns the csv file name of a figure; `index` is its place on the page, from 0."""
    words = re.findall(r"[a-z0-9]+", figure.title.lower())
    return "-".join([f"{index + 1:02}", *words])[:60] + ".csv"


def figures_of(report: Report) -> list[Figure]:
    """Returns all figures of a report, in the order of the page."""
    return [figure for section in report.sections for figure in section.figures]


def page_html(report: Report) -> str:
    """Returns the page as text."""
    here = resources.files("locant.report")
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    contents = "".join(
        f'<li><a href="#s{index}">{escape(section.title)}</a></li>' for index, section in enumerate(report.sections)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<nav aria-label="Contents"><a class="top" href="#top">{escape(report.title)}</a><ol>{contents}</ol></nav>
<main id="top">
{_head(report)}
{_body(report)}
</main>
<div id="tip" role="status" hidden></div>
<dialog id="large" aria-label="Enlarged panel"></dialog>
<script type="application/json" id="figures">{page_data(figures_of(report))}</script>
<script>
{script}</script>
</body>
</html>
"""


def _head(report: Report) -> str:
    verdict = "".join(f"<li>{escape(line)}</li>" for line in report.verdict)
    facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>" for key, text in report.facts.items())
    notices = "".join(f"<li>{escape(line)}</li>" for line in report.notices)
    return "".join(
        [
            f'<header><h1>{escape(report.title)}</h1><p class="subtitle">{escape(report.subtitle)}</p>',
            f'<ul class="verdict">{verdict}</ul>' if verdict else "",
            f'<dl class="facts">{facts}</dl>' if facts else "",
            f'<aside class="notices"><h2>Notes</h2><ul>{notices}</ul></aside>' if notices else "",
            "<noscript><p>A script in this file draws the figures. Scripts are switched off here.</p></noscript>",
            "</header>",
        ]
    )


def _body(report: Report) -> str:
    parts, index = [], 0
    for number, section in enumerate(report.sections):
        intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
        parts.append(f'<section id="s{number}"><h2>{escape(section.title)}</h2>{intro}')
        for figure in section.figures:
            parts.append(figure_markup(index, figure, csv_name(index, figure)))
            index += 1
        parts.append("</section>")
    return "".join(parts)
