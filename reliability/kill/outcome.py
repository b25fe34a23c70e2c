"""The result of each case, and the tables made of them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SAME, LEFT_OUT = "same bits", "left out"


@dataclass(frozen=True)
class Case:
    """One kill, or one case of another scenario."""

    scenario: str
    command: str
    detail: str
    """What was done to it: signal and victim, free space, …"""
    moment: str
    reached: str
    """The last of the command's files that existed then."""
    starts: int
    """How many more times the command was started until it was done."""
    outcome: str
    """SAME, LEFT_OUT with the reason, or what is wrong."""


def judged(expected: dict[str, str], found: dict[str, str]) -> str:
    """Returns SAME if two commands have left the same files with the same bits, else the names that differ."""
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not differing:
        return SAME
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"differ: {', '.join(differing[:3])}{more}"


def write_csv(cases: Sequence[Case], path: Path) -> None:
    """Writes one line per case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Case)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(case) for case in cases)


def summary(cases: Sequence[Case]) -> str:
    """Returns a table in Markdown: cases and equal ones, by scenario, command and detail."""
    groups: dict[tuple[str, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.scenario, case.command, case.detail), []).append(case)
    lines = ["| scenario | command | what was done | cases | same bits |", "|---|---|---|---:|---:|"]
    for (scenario, command, detail), group in sorted(groups.items()):
        left_out = group[0].outcome.startswith(LEFT_OUT)
        equal = group[0].outcome if left_out else str(sum(case.outcome == SAME for case in group))
        lines.append(f"| {scenario} | {command} | {detail} | {len(group)} | {equal} |")
    kills = [case for case in cases if case.scenario == "kill"]
    others = [case for case in cases if case.scenario != "kill" and not case.outcome.startswith(LEFT_OUT)]
    for name, group in (("kills", kills), ("other cases", others)):
        lines.append(f"| **all {name}** | | | {len(group)} | {sum(case.outcome == SAME for case in group)} |")
    return "\n".join(lines)
