"""The page of a paper: a table of its claims with their verdicts, then a section for each claim."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from locant.papers import reproduction
from locant.papers.claim import Claim, Measured, Paper
from locant.papers.place import Place
from locant.papers.reproduction import NOT_RUN, Finding
from locant.papers.rules import VERDICTS
from locant.report.figures import Cell, Figure, Grid, Interval, Intervals
from locant.report.page import Report, Section, write_page
from locant.report.papers.effect import interval
from locant.report.papers.summary import markdown
from locant.runs import files
from locant.runs.budget import spell_time
from locant.version import __version__

PAGE, SUMMARY, CSV = "report.html", "claims.md", "csv"
Draw = Callable[[Measured], tuple[Figure, ...]]
LARGEST = 40
"""Effects that one figure shows; a claim with more has them in its csv file."""


def write_paper_page(paper: Paper, preset: str, at: Place) -> Path:
    """Writes the page, its csv files and claims.md into the folder of a reproduction; returns the path of the page."""
    found = reproduction.findings(paper, at)
    report = paper_report(paper, preset, found, gpu_hours(paper))
    files.write(at.folder / SUMMARY, markdown(paper, preset, found))
    return write_page(report, at.folder / PAGE, csv_folder=at.folder / CSV)


def gpu_hours(paper: Paper) -> dict[str, float]:
    """Returns claim -> hours of one A100 at the preset `paper`, by the formula of `locant.papers.cost`."""
    at = Place(Path(), Path(), Path(), paper.sizes["paper"])
    return {claim.id: reproduction.hours_on_a_gpu(claim, at) for claim in paper.claims}


def paper_report(paper: Paper, preset: str, found: Mapping[str, Finding], hours: Mapping[str, float]) -> Report:
    """Returns the page of a paper."""
    figures: Mapping[str, Draw] = import_module(f"locant.report.papers.{paper.name}").FIGURES
    sections = [Section("Claims", _INTRO, (_claims(paper, preset, found, hours),))]
    for claim in paper.claims:
        draw = figures.get(claim.id)
        sections.append(_section(paper, preset, claim, found[claim.id], hours[claim.id], draw))
    return Report(
        f"{paper.title}: its claims, tested",
        paper.authors,
        verdicts(paper, found),
        {"preset": preset, "locant": __version__, "claims": str(len(paper.claims))},
        tuple(sections),
        tuple(f"{id}: {each.problem}" for id, each in found.items() if each.problem),
    )


_INTRO = (
    "Each claim has criteria that were recorded before the run. Where some of the numbers had been seen before a "
    "criterion was written, the limits of the claim say so. An effect is positive if it points the way the paper says. "
    "Confirmed and contradicted refer to this experiment at this size, not to the paper's own."
)


def verdicts(paper: Paper, found: Mapping[str, Finding]) -> tuple[str, ...]:
    """Returns one sentence for each verdict that occurs: which claims have it."""
    lines = []
    for verdict in (*VERDICTS, NOT_RUN):
        ids = [claim.id for claim in paper.claims if found[claim.id].verdict == verdict]
        if ids:
            lines.append(f"{verdict.capitalize()}: {', '.join(ids)}.")
    return tuple(lines)


def command(paper: Paper, claim: Claim, preset: str) -> str:
    """Returns the command that tests a claim again."""
    data = " --data DATA" if claim.sources else ""
    return f"locant reproduce {paper.name} --claim {claim.id} --preset {preset}{data} -o DIR"


def claim_rows(
    paper: Paper, preset: str, found: Mapping[str, Finding], hours: Mapping[str, float]
) -> tuple[list[str], list[list[Cell]]]:
    """Returns header and rows of the table of claims."""
    header = ["claim", "what the paper says", "verdict", "effect", "95 % interval", "values", "what the effect is",
              "minutes", "A100 h", "command"]  # fmt: skip
    rows: list[list[Cell]] = []
    for claim in paper.claims:
        finding = found[claim.id]
        part = finding.found.parts[0] if finding.found is not None and finding.found.parts else None
        effect = None if part is None else part.effect
        rows.append(
            [
                claim.id, claim.says, finding.verdict, None if effect is None else effect.mean, interval(effect),
                None if effect is None else effect.count, "" if part is None else f"{part.asks}: {part.name}",
                round(finding.seconds / 60, 1) if finding.found is not None else None, float(f"{hours[claim.id]:.2g}"),
                f"reproduce {paper.name} --claim {claim.id}",
            ]
        )  # fmt: skip
    return header, rows


def _claims(paper: Paper, preset: str, found: Mapping[str, Finding], hours: Mapping[str, float]) -> Grid:
    header, rows = claim_rows(paper, preset, found, hours)
    note = (  # the whole command would make the table wider than the page
        "The effect is the first of the claim's effects; its section has all. Minutes are those of the steps that the "
        "claim needs, and of other work on the machine meanwhile; a step that several claims share counts for each. "
        "A100 h are the hours that the preset paper would take, estimated by a formula. The section of a claim has its "
        "whole command."
    )
    return Grid("Claims and verdicts", note, header, rows)


def _section(paper: Paper, preset: str, claim: Claim, finding: Finding, hours: float, draw: Draw | None) -> Section:
    figures: list[Figure] = [_test(paper, preset, claim, finding, hours)]
    if finding.found is not None:
        figures += _effects(claim, finding.found)
        if draw is not None:
            figures += [_named(claim, figure) for figure in draw(finding.found)]
    return Section(f"{claim.id}: {finding.verdict}", claim.says, tuple(figures))


def _named(claim: Claim, figure: Figure) -> Figure:
    """The figure with the claim in its title: csv files are named after it."""
    return dataclasses.replace(figure, title=f"{claim.id}: {figure.title}")


def _test(paper: Paper, preset: str, claim: Claim, finding: Finding, hours: float) -> Grid:
    sentences = finding.found.sentences if finding.found is not None else ()
    rows: list[tuple[Cell, Cell]] = [
        ("in the paper", claim.place),
        ("experiment", " ".join((inspect.getdoc(claim) or "").split())),
        ("quantity", claim.quantity),
        *(("rule", criterion.words) for criterion in claim.criteria),
        *(("result", sentence) for sentence in sentences),
        ("what limits it", claim.limits),
        ("command", command(paper, claim, preset)),
        ("at the preset paper", f"about {hours:.2g} hours of one A100, estimated by a formula"),
    ]
    if finding.found is not None:
        rows.append(("took", spell_time(finding.seconds)))
    return Grid(f"{claim.id}: the test", "", ("", "what"), rows)


def _effects(claim: Claim, found: Measured) -> list[Figure]:
    figures: list[Figure] = []
    for number, criterion in enumerate(claim.criteria):
        parts = [part for part in found.parts if part.asks == criterion.asks]
        rows = [
            Interval(part.name, part.effect.mean, part.effect.low, part.effect.high,
                     word=criterion.rule.judge(part.effect), colour=number)
            for part in parts
        ]  # fmt: skip
        if rows:
            title = f"{claim.id}: {criterion.asks}"
            figures.append(Intervals(title, criterion.rule.words, criterion.asks, tuple(rows[:LARGEST])))
    return figures
