"""The command that writes a changed model for users without locant: `locant export`."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table
from transformers.utils import logging

from locant.cli.terminal import console
from locant.exporting import exporting
from locant.verbs import inspecting


def export(
    model: str, out: Path, to: str, length: int | None, text: Path | None, original: str | None, budget: str
) -> None:  # fmt: skip
    """Exports a model, and prints how near it is to the model."""
    inspecting.check_model(model)
    if text is not None and not text.exists():
        raise FileNotFoundError(f"there is no file or folder {text}")
    if text is not None and to != "original":
        raise ValueError("--text fits a table of absolute positions; use it with --to original")
    logging.disable_progress_bar()

    def on_stage(stage: str) -> None:
        console.print(escape(stage), highlight=False)

    done = exporting.export(
        model, out, to, length=length, text=text, original=original, budget=budget, on_stage=on_stage
    )  # fmt: skip
    if done.exact:
        console.print(
            f"{done.to}: computes the same; the outputs differ by at most {done.difference:.1e} of their size",
            markup=False, highlight=False,
        )  # fmt: skip
    else:
        table = Table(title=f"an approximation: agreement with the changed model ({done.measure})")
        for name in ("tokens", "start", "fitted"):
            table.add_column(name, justify="right")
        for row in done.agreement:
            table.add_row(f"{row.length:,}", f"{row.start:.4f}", f"{row.fitted:.4f}")
        console.print(table)
    for notice in done.notices:
        console.print(f"[yellow]note[/] {escape(notice)}", highlight=False)
    console.print(f"saved: {out}    it opens without locant", markup=False, highlight=False)
