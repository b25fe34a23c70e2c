"""The commands about this machine: `locant bench`, `locant doctor`."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.table import Table

from locant.analysis import speed
from locant.attention.diagnosis import SITUATIONS, choices, diagnose
from locant.cli.extras import HF, PLOT
from locant.cli.schemes import build
from locant.cli.terminal import MARKS, console
from locant.report.speed import cost_line, draw_costs, write_costs
from locant.runs.new_folder import check_writable, undone_on_failure
from locant.version import __version__


def bench(
    specs: list[str], lengths: list[int], heads: int, width: int, tokens: int, repeats: int, out: Path | None
) -> None:
    """Measures the time of schemes as a ratio to plain attention, prints it, and draws it if there is a file."""
    if out is not None:
        PLOT.check("a picture")
        check_writable(out)
    built = {spec: build(spec, heads, width, seed=0) for spec in specs}
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {heads} heads of {width // heads}, fp32"
    )
    rows = []
    for cost in speed.compare(built, lengths, tokens=tokens, heads=heads, size=width // heads, repeats=repeats):
        console.print(cost_line(cost), markup=False, highlight=False)
        rows.append(cost)
    if out is not None:
        out = out if out.suffix else out.with_suffix(".png")
        with undone_on_failure(out, out.with_suffix(".csv")):
            draw_costs(rows, out)
            write_costs(rows, out.with_suffix(".csv"))
        console.print(f"picture: {out}\nnumbers: {out.with_suffix('.csv')}", markup=False, highlight=False)


def doctor(model: str | None) -> None:
    """Prints which back ends work on this machine and why, and which one is chosen when; or what works for a model."""
    if model is not None:
        HF.check("locant doctor MODEL")
        from locant.cli.models import diagnose_model

        diagnose_model(model)
        return
    console.print(f"[bold]locant {__version__}[/]")
    for finding in diagnose():
        console.print(f"  {MARKS[finding.active]} {finding.name:13}", end="")
        console.print(finding.detail, markup=False, highlight=False, soft_wrap=True)
    table = Table(title="What impl='auto' takes here")
    table.add_column("scheme", style="bold")
    for situation in SITUATIONS:
        table.add_column(situation)
    for spec, row in choices().items():
        table.add_row(spec, *row.values())
    console.print(table)
