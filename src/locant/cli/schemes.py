"""The commands about schemes alone: `locant schemes`, `locant curve`, `locant check`."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from locant import testing
from locant.analysis import properties
from locant.analysis.curve import curves
from locant.cli.terminal import MARKS, console
from locant.report.curve import draw_curves, plot_curve, write_curves
from locant.runs.new_folder import undone_on_failure
from locant.schemes import Scheme, class_of, map_names
from locant.schemes.base import DIMS
from locant.spec import scheme

SHORT = {
    "inductive": "any",
    "data-driven": "data",
    "parameter-efficient": "few",
    "translation-invariant": "inv",
    "parallelizable": "par",
    "interpretable": "read",
}
"""Property -> its column head in the table of schemes; a legend below the table explains them."""


def table(length: int, layers: int, heads: int, width: int, name: str | None) -> None:
    """Prints the table of schemes for a model of this size, or the description of one scheme."""
    if name is not None:
        _describe(name)
        return
    rows = properties.table(length=length, layers=layers, n_heads=heads, d_model=width)
    roomy = console.width >= 110
    title = f"Position schemes for {layers} layers, {heads} heads, width {width}, length {length}"
    found = Table(title=title, padding=(0, 1) if roomy else 0)
    found.add_column("scheme", style="bold", no_wrap=True)
    if roomy:
        found.add_column("what it is")
    found.add_column("shared by\nall layers", justify="right", no_wrap=True)
    found.add_column("own in\neach layer", justify="right", no_wrap=True)
    for name in properties.PROPERTIES:
        found.add_column(SHORT[name], justify="center", no_wrap=True)
    for row in rows:
        ticks = ("[green]✓[/]" if has else "[dim]·[/]" for has in row.properties.values())
        what = [escape(row.what)] if roomy else []
        found.add_row(row.spec, *what, f"{row.shared:,}", f"{row.own:,}", *ticks)
    console.print(found)
    console.print("Parameters: clipped and absolute tables cover the whole length; a model has one absolute table.")
    reading, causal = [row.spec for row in rows if row.reads], [row.spec for row in rows if row.causal_only]
    console.print(f"Need the hidden states of tokens (attend's x): {', '.join(reading)}", highlight=False)
    console.print(f"For causal attention: {', '.join(causal)}", highlight=False)
    console.print("The options of a scheme: locant schemes NAME")
    maps = ", ".join(map_names())
    console.print(f"Maps of positions, written SCHEME@MAP, such as rope@grouped:size=4: {maps}", highlight=False)
    for name, meaning in properties.PROPERTIES.items():
        console.print(f"  [bold]{SHORT[name]:4}[/] {name}: {meaning}", highlight=False)


def _describe(name: str) -> None:
    """Prints the docstrings of a scheme's file and class, and its options with their defaults."""
    cls = class_of(name)
    texts = (inspect.getdoc(inspect.getmodule(cls)), inspect.getdoc(cls))
    console.print("\n\n".join(text for text in texts if text), markup=False, highlight=False)
    for option, parameter in cls.arguments().items():
        if option not in DIMS and parameter.default is not inspect.Parameter.empty:
            console.print(f"  {option}={parameter.default}", markup=False, highlight=False)


def curve(specs: list[str], out: Path, reach: int, heads: int, width: int, seed: int) -> None:
    """Draws schemes as functions of the offset, into a picture file and in the terminal."""
    found = []
    for spec in specs:
        built = build(spec, heads, width, seed)
        lines = curves(built, reach)
        if not lines:
            console.print(f"{built} does not depend on the offset; there is no curve to draw", markup=False)
        found += lines
    if not found:
        return
    out = out if out.suffix else out.with_suffix(".png")
    with undone_on_failure(out, out.with_suffix(".csv")):
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_curves(found, out)
        write_curves(found, out.with_suffix(".csv"))
    for line in found:
        console.print(f"{line.spec}: {line.what}", markup=False, highlight=False)
        console.print(plot_curve(line, width=min(console.width, 76)), highlight=False, markup=False)
    console.print(f"picture: {out}\nnumbers: {out.with_suffix('.csv')}", markup=False, highlight=False)


def check(spec: str, heads: int, width: int, seed: int) -> None:
    """Tests a scheme against the laws that every scheme obeys; exits with code 1 if it breaks one."""
    built = build(spec, heads, width, seed)
    console.print(f"[bold]{built}[/]: {heads} heads, width {width}")
    broken = 0
    for outcome in testing.run_laws(built, seed=seed):
        console.print(f"  {MARKS[outcome.passed]} {outcome.law:11}", end="")
        console.print(outcome.detail, markup=False, highlight=False)
        broken += outcome.passed is False
    if broken:
        console.print(f"[red]{broken} {'law' if broken == 1 else 'laws'} broken[/]")
        raise SystemExit(1)


def build(spec: str, heads: int, width: int, seed: int) -> Scheme:
    """Returns a scheme for a model of this size, with random parameters of this seed."""
    torch.manual_seed(seed)
    return scheme(spec, n_heads=heads, head_dim=width // heads, d_model=width)
