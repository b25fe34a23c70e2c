"""The command `locant`. Commands print, and draw; the work is in the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import locant
from locant import testing
from locant.analysis import curve as curve_analysis
from locant.analysis import properties

app = typer.Typer(
    help="How does a transformer know where its tokens are?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
if not console.is_terminal:  # in a pipe or a log there is no edge to wrap at
    console = Console(width=132)

SHORT = {
    "inductive": "any",
    "data-driven": "data",
    "parameter-efficient": "few",
    "translation-invariant": "inv",
    "parallelizable": "par",
    "interpretable": "read",
}
"""Column heads of the schemes table, explained below it."""

Heads = Annotated[int, typer.Option(help="Attention heads of the model.", min=1)]
Width = Annotated[int, typer.Option(help="Width of the model (d_model).", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of the random parameters.")]
Spec = Annotated[str, typer.Argument(help="A scheme, such as tisa:kernels=5 or alibi+learned.")]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(f"locant {locant.__version__}, torch {torch.__version__}")
        raise typer.Exit()


@app.command()
def schemes(
    length: Annotated[int, typer.Option(help="Length of the model.", min=2)] = 512,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 12,
    heads: Heads = 12,
    width: Width = 768,
) -> None:
    """The table of schemes: parameters for a model of this size (default BERT-base), and six properties."""
    with _plain_errors():
        rows = properties.table(length=length, layers=layers, n_heads=heads, d_model=width)
    table = Table(title=f"Position schemes for {layers} layers, {heads} heads, width {width}, length {length}")
    table.add_column("scheme", style="bold", no_wrap=True)
    table.add_column("what it is")
    table.add_column("shared by\nall layers", justify="right")
    table.add_column("own in\neach layer", justify="right")
    for name in properties.PROPERTIES:
        table.add_column(SHORT[name], justify="center", no_wrap=True)
    for row in rows:
        ticks = ("[green]✓[/]" if has else "[dim]·[/]" for has in row.properties.values())
        table.add_row(row.spec, row.what, f"{row.shared:,}", f"{row.own:,}", *ticks)
    console.print(table)
    console.print("Parameters: tables cover the whole length; an absolute table is there once, whatever the layers.")
    for name, meaning in properties.PROPERTIES.items():
        console.print(f"  [bold]{SHORT[name]:4}[/] {name}: {meaning}", highlight=False)


@app.command()
def curve(
    specs: Annotated[list[str], typer.Argument(help="Schemes, such as tisa:kernels=5 alibi rope.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Picture file; its numbers go beside it as csv.")] = Path(
        "curve.png"
    ),
    reach: Annotated[int, typer.Option(help="Largest offset drawn.", min=1)] = 64,
    heads: Heads = 12,
    width: Width = 768,
    seed: Seed = 0,
) -> None:
    """Draws what schemes do as a function of the offset, into a picture file and in the terminal."""
    found = []
    with _plain_errors():
        _check_plotting()
        for spec in specs:
            scheme = _build(spec, heads, width, seed)
            new = curve_analysis.curves(scheme, reach)
            if not new:
                console.print(f"{scheme} does nothing with the offset; there is no curve to draw")
            found += new
    if not found:
        raise typer.Exit()
    from locant.report import curve as curve_report

    with _plain_errors():
        out.parent.mkdir(parents=True, exist_ok=True)
        curve_report.draw(found, out)
        curve_report.write_csv(found, out.with_suffix(".csv"))
    for line in found:
        console.print(curve_report.in_terminal(line, width=min(console.width, 76)), highlight=False, markup=False)
    console.print(f"picture: {out}\nnumbers: {out.with_suffix('.csv')}")


@app.command()
def check(spec: Spec, heads: Heads = 4, width: Width = 32, seed: Seed = 0) -> None:
    """Runs the laws every scheme must obey on one scheme; exit code 1 if it breaks any."""
    with _plain_errors():
        scheme = _build(spec, heads, width, seed)
    console.print(f"[bold]{scheme}[/]: {heads} heads, width {width}")
    broken = 0
    for outcome in testing.run_laws(scheme, seed=seed):
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}[outcome.passed]
        console.print(f"  {mark} {outcome.law:11}", end="")
        console.print(outcome.detail, markup=False, highlight=False)
        broken += outcome.passed is False
    if broken:
        console.print(f"[red]{broken} laws broken[/]")
        raise typer.Exit(1)


def _build(spec: str, heads: int, width: int, seed: int) -> locant.Scheme:
    if width % heads:
        raise ValueError(f"--width must be a multiple of --heads; got {width} and {heads}")
    torch.manual_seed(seed)
    return locant.scheme(spec, n_heads=heads, head_dim=width // heads, d_model=width)


def _check_plotting() -> None:
    try:
        import matplotlib  # noqa: F401
        import plotext  # noqa: F401
    except ImportError as missing:
        raise ValueError(f"drawing needs {missing.name}; install it with: pip install 'locant[plot]'") from None


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a user did wrong is said in one line, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as problem:
        Console(stderr=True, width=console.width).print(f"[red]error:[/] {problem}", highlight=False)
        raise typer.Exit(2) from None
