"""The claims of a paper as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from locant.papers.claim import Paper
from locant.papers.reproduction import Finding
from locant.report.papers.effect import interval


def markdown(paper: Paper, preset: str, found: Mapping[str, Finding]) -> str:
    """Returns a table with a row per claim: what the paper says, verdict, effect, interval, minutes."""
    lines = [
        f"# {paper.title}",
        "",
        f"{paper.authors}. Preset `{preset}`.",
        "",
        "| claim | what the paper says | verdict | effect | 95 % interval | values | minutes |",
        "|---|---|---|---|---|---:|---:|",
    ]
    for claim in paper.claims:
        finding = found[claim.id]
        cells = [claim.id, claim.says, f"**{finding.verdict}**", "", "", "", ""]
        if finding.found is not None and finding.found.parts:
            part = finding.found.parts[0]
            number = f"{part.effect.mean:.3g}".replace("-", "−")
            cells[3:] = [f"{number} ({part.asks}: {part.name})", interval(part.effect), str(part.effect.count),
                         f"{finding.seconds / 60:.0f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    return "\n".join([*lines, ""])
