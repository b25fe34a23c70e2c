"""The terminal the commands print to, and how they say what a user did wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
if not console.is_terminal:  # in a pipe or a log there is no edge to wrap at
    console = Console(width=132)


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user did wrong is said in one line, without a traceback."""
    try:
        yield
    except typer.Exit:  # a RuntimeError, but no problem
        raise
    except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError, ImportError) as problem:
        Console(stderr=True, width=console.width).print(f"[red]error:[/] {escape(str(problem))}", highlight=False)
        raise typer.Exit(2) from None
