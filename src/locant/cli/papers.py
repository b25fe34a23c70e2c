"""The command that tests the claims of the three papers: `locant reproduce`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from locant.cli.terminal import console
from locant.experiments.run import quiet
from locant.papers import NAMES, find_paper, reproduction
from locant.papers.claim import Claim, Paper
from locant.papers.place import Place
from locant.papers.reproduction import Finding
from locant.papers.rules import CONFIRMED, CONTRADICTED
from locant.papers.steps import Step
from locant.report.papers import write_paper_page
from locant.report.papers.effect import interval
from locant.runs import run_folder
from locant.runs.budget import spell_time

COLOURS = {CONFIRMED: "green", CONTRADICTED: "red"}


def reproduce(
    paper: str, claim: list[str] | None, preset: str, data: Path | None, out: Path, plan: bool, long: bool
) -> None:
    """Tests claims of a paper, prints the verdicts and writes a page; with `plan`, prints what it would do."""
    papers = [find_paper(name) for name in (NAMES if paper == "all" else (paper,))]
    chosen = _chosen(papers, claim or [])
    data = None if data is None else data.absolute()
    if plan:
        for each, claims in chosen:
            _print_plan(each, claims, Place(out, out, data, each.sizes[preset]))
        return
    for each, claims in chosen:  # before anything takes time
        reproduction.check_data(claims, each.sizes[preset], data)
    planned = []
    for each, claims in chosen:  # a reproduction that is refused writes nothing
        at = Place(out / each.name if paper == "all" else out, out, data, each.sizes[preset])
        planned.append(reproduction.plan(claims, at))
        reproduction.check_machine(planned[-1], at, long=long)
    places = [
        (each, claims, reproduction.begin(each, preset, out / each.name if paper == "all" else out, data, out))
        for each, claims in chosen
    ]
    for (each, claims, _), needed in zip(places, planned, strict=True):
        console.print(
            f"{each.name}, preset {preset}: {len(claims)} claims, {len(needed.left)} of {len(needed.steps)} steps to "
            f"do, about {spell_time(needed.seconds)} (by a formula)", markup=False, highlight=False,
        )  # fmt: skip
    quiet()
    for each, claims, at in places:
        _run(each, claims, preset, at)


def _chosen(papers: list[Paper], wanted: list[str]) -> list[tuple[Paper, tuple[Claim, ...]]]:
    """Returns each paper with those of its claims that are wanted; all of them by default."""
    if len(papers) == 1 or not wanted:
        return [(paper, paper.chosen(wanted)) for paper in papers]
    known = {claim.id.lower() for paper in papers for claim in paper.claims}
    for each in wanted:
        if each.lower() not in known:
            raise ValueError(f"no paper has the claim {each!r}; there are: {', '.join(sorted(known)).upper()}")
    found = [
        (paper, [x for x in wanted if x.lower() in {claim.id.lower() for claim in paper.claims}]) for paper in papers
    ]
    return [(paper, paper.chosen(ids)) for paper, ids in found if ids]


def _print_plan(paper: Paper, claims: tuple[Claim, ...], at: Place) -> None:
    planned = reproduction.plan(claims, at)
    console.print(f"\n[bold]{escape(paper.title)}[/] ({escape(paper.authors)})", highlight=False)
    table = Table("claim", "what the paper says", "rule")
    for claim in claims:
        table.add_row(claim.id, claim.says, "\n".join(criterion.words for criterion in claim.criteria))
    console.print(table)
    console.print(
        f"{len(planned.left)} of {len(planned.steps)} steps to do, about {spell_time(planned.seconds)} here; all of "
        f"them {planned.gpu_hours:.2g} hours of one A100. Both by a formula.", markup=False, highlight=False,
    )  # fmt: skip


def _run(paper: Paper, claims: tuple[Claim, ...], preset: str, at: Place) -> None:
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn(), console=console, transient=True)  # fmt: skip
    complete = True
    with bar:
        job = bar.add_task("", total=1.0)

        def on_step(step: Step, number: int, total: int) -> Callable[[float], None]:
            words = f"step {number} of {total}: {step.name}"
            bar.reset(job, total=1.0, description=words)
            if not console.is_terminal:  # a log has no bar
                console.print(words, markup=False, highlight=False)
            return lambda share: bar.update(job, completed=share)

        def on_wait(steps: list[Step]) -> None:
            bar.update(job, description=f"waiting for another command: {steps[0].name}")

        try:
            for finding in reproduction.run(claims, at, on_step=on_step, on_wait=on_wait):
                complete = complete and not finding.problem
                bar.console.print(_line(finding), highlight=False)
                with run_folder.held(at.folder, wait=True):  # another command may write the same page
                    path = write_paper_page(paper, preset, at)
        except KeyboardInterrupt:
            console.print("stopped; the same command continues")
            raise SystemExit(130) from None
    console.print(f"page: {path}\ntables: {path.parent / 'csv'}", markup=False, highlight=False)
    if not complete:
        raise SystemExit(1)


def _line(finding: Finding) -> str:
    """Returns the line about a claim that was tested."""
    if finding.found is None:
        return f"{finding.id}  [yellow]{finding.verdict}[/]  {escape(finding.problem)}"
    colour = COLOURS.get(finding.verdict, "yellow")
    part = finding.found.parts[0]
    effect = f"{part.effect.mean:.3g} ({interval(part.effect)})"
    return f"{finding.id}  [{colour}]{finding.verdict}[/]  {escape(part.asks)}, {escape(part.name)}: {effect}"
