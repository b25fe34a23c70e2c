"""The terminal that the commands print to."""

from __future__ import annotations

from rich.console import Console

console = Console()
if not console.is_terminal:  # in a pipe or a log there is no edge to wrap at
    console = Console(width=132)

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}
"""Passed, failed, does not apply."""
