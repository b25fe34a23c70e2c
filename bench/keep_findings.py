"""Copies what a run of `locant reproduce all --preset small -o OUT` has found into docs/results and docs/papers.md.

    python bench/keep_findings.py OUT

Pages, csv files and findings go to docs/results/PAPER, the numbers of finished steps of unfinished claims to
docs/results/steps, and verdicts to the table of docs/papers.md. A csv file of more than 400 kB is left out: its numbers
are in the finding. The notes below the table are written by hand.
"""

import re
import shutil
from pathlib import Path

from measuring import command_line

from locant.papers import NAMES, find_paper, reproduction
from locant.papers.claim import Paper
from locant.papers.place import FINDINGS, STEPS, Place
from locant.report.papers import write_paper_page

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
LARGEST = 400_000


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.absolute()
    steps: set[str] = set()
    for paper in map(find_paper, NAMES):
        at = Place(out / paper.name, out, None, paper.sizes["small"])
        for claim in paper.claims:
            if not reproduction.has_finding(claim, at):
                steps |= {step.name for step in claim.steps(at) if reproduction.is_done(step, at)}
        if (at.folder / FINDINGS).exists():
            keep(paper, at)
    replace(RESULTS / STEPS, [out / STEPS / f"{name}.json" for name in sorted(steps)])
    print(f"{len(steps)} steps of unfinished claims in {RESULTS / STEPS}")


def keep(paper: Paper, at: Place) -> None:
    """Writes the page of a paper anew, copies it, and enters the verdicts into the table."""
    page, kept = write_paper_page(paper, "small", at), RESULTS / paper.name
    shutil.copy(page, kept / page.name)
    replace(kept / "csv", [path for path in (at.folder / "csv").glob("*.csv") if path.stat().st_size <= LARGEST])
    replace(kept / FINDINGS, list((at.folder / FINDINGS).glob("*.json")))
    table = DOCS / "papers.md"
    words = table.read_text(encoding="utf-8")
    for name, finding in reproduction.findings(paper, at).items():
        if finding.found is not None:
            effect = finding.found.parts[0].effect
            mean, low, high = (f"{value:.3g}".replace("-", "−") for value in (effect.mean, effect.low, effect.high))
            numbers = f"{mean} | {low} … {high} |"
            words = re.sub(
                rf"(\| {name} \| .*? \|) not run yet \| \| \|", rf"\1 **{finding.verdict}** | {numbers}", words
            )
    table.write_text(words, encoding="utf-8")


def replace(folder: Path, files: list[Path]) -> None:
    """Makes these files the content of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for path in files:
        shutil.copy(path, folder / path.name)


if __name__ == "__main__":
    main()
