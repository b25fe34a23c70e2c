"""The command `locant`. Commands print, and draw; the work is in the library."""

from __future__ import annotations

import inspect as signatures
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

import locant
from locant import cli_adapt, cli_experiments, testing
from locant.analysis import curve as curve_analysis
from locant.analysis import properties
from locant.schemes.base import DIMS
from locant.terminal import console, plain_errors

app = typer.Typer(
    help="How does a transformer know where its tokens are?",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

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
    name: Annotated[str | None, typer.Argument(help="One scheme, to read what it is and which options it has.")] = None,
) -> None:
    """The table of schemes: parameters for a model of this size (default BERT-base), and six properties."""
    if name is not None:
        with plain_errors():
            _describe(name)
        return
    with plain_errors():
        rows = properties.table(length=length, layers=layers, n_heads=heads, d_model=width)
    roomy = console.width >= 110
    title = f"Position schemes for {layers} layers, {heads} heads, width {width}, length {length}"
    table = Table(title=title, padding=(0, 1) if roomy else 0)
    table.add_column("scheme", style="bold", no_wrap=True)
    if roomy:
        table.add_column("what it is")
    table.add_column("shared by\nall layers", justify="right", no_wrap=True)
    table.add_column("own in\neach layer", justify="right", no_wrap=True)
    for name in properties.PROPERTIES:
        table.add_column(SHORT[name], justify="center", no_wrap=True)
    for row in rows:
        ticks = ("[green]✓[/]" if has else "[dim]·[/]" for has in row.properties.values())
        what = [escape(row.what)] if roomy else []
        table.add_row(row.spec, *what, f"{row.shared:,}", f"{row.own:,}", *ticks)
    console.print(table)
    console.print("Parameters: clipped and absolute tables cover the whole length; an absolute one is there once.")
    console.print("The options of a scheme: locant schemes NAME")
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
    with plain_errors():
        _check_plotting()
        for spec in specs:
            scheme = _build(spec, heads, width, seed)
            new = curve_analysis.curves(scheme, reach)
            if not new:
                console.print(f"{scheme} does nothing with the offset; there is no curve to draw", markup=False)
            found += new
    if not found:
        raise typer.Exit()
    from locant.report.curve import draw_curves, plot_curve, write_curves

    with plain_errors():
        out = out if out.suffix else out.with_suffix(".png")
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_curves(found, out)
        write_curves(found, out.with_suffix(".csv"))
    for line in found:
        console.print(f"{line.spec}: {line.what}", markup=False, highlight=False)
        console.print(plot_curve(line, width=min(console.width, 76)), highlight=False, markup=False)
    console.print(f"picture: {out}\nnumbers: {out.with_suffix('.csv')}", markup=False, highlight=False)


@app.command()
def check(spec: Spec, heads: Heads = 4, width: Width = 32, seed: Seed = 0) -> None:
    """Runs the laws every scheme must obey on one scheme; exit code 1 if it breaks any."""
    with plain_errors():
        scheme = _build(spec, heads, width, seed)
    console.print(f"[bold]{scheme}[/]: {heads} heads, width {width}")
    broken = 0
    for outcome in testing.run_laws(scheme, seed=seed):
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}[outcome.passed]
        console.print(f"  {mark} {outcome.law:11}", end="")
        console.print(outcome.detail, markup=False, highlight=False)
        broken += outcome.passed is False
    if broken:
        console.print(f"[red]{broken} {'law' if broken == 1 else 'laws'} broken[/]")
        raise typer.Exit(1)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A folder or hub name of a Hugging Face model, swapped or not.")],
    text: Annotated[Path | None, typer.Option(help="Text to look at it with; by default, Python's own manual.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page; tables go beside it as csv.")] = Path(
        "report.html"
    ),
    compare: Annotated[str | None, typer.Option(help="Another model, side by side.")] = None,
) -> None:
    """How does this model know where its tokens are? A page of figures, and a short verdict here."""
    with plain_errors():
        from locant.report.inspection import inspection_page
        from locant.report.page import write_page
        from locant.report.side_by_side import side_by_side

        # Whatever can go wrong at the end of minutes of work is found at their beginning.
        words = None if text is None else _read(text)
        out = out / "report.html" if out.is_dir() else out
        out = out if out.suffix in (".html", ".htm") else out.with_name(f"{out.name}.html")
        tables = out.parent / f"{out.stem}-csv"
        _check_writable(out, tables)
        names = [model] if compare is None else [model, compare]
        for name in names:
            _check_model(name)
        reports = [inspection_page(_inspect(name, words)) for name in names]
        whole = reports[0] if len(reports) == 1 else side_by_side(reports[0], reports[1])
        write_page(whole, out, csv_folder=tables)
    for each in reports:
        console.print(f"\n[bold]{escape(each.title)}[/]")
        for sentence in each.verdict:
            console.print(f"  • {sentence}", markup=False, highlight=False)
        for notice in each.notices:
            console.print(f"  [yellow]note[/] {escape(notice)}", highlight=False)
    console.print(f"page: {out}\ntables: {tables}", markup=False, highlight=False)


def _check_writable(file: Path, folder: Path) -> None:
    """A page and its tables can be written; nothing is, yet."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the tables belong into a folder {folder}, and there is a file of that name")
    for path in (file, folder):
        there = next(x for x in (path, *path.absolute().parents) if x.exists())
        if there != path and not there.is_dir():
            raise ValueError(f"{path} cannot be written: {there} is not a folder")
        if not os.access(there, os.W_OK):
            raise ValueError(f"{path} cannot be written: no right to change {there}")


def _check_model(name: str) -> None:
    """A model of this name can be found; only its config is read."""
    from transformers import PreTrainedConfig

    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{name} has no config.json: it is not the folder of a Hugging Face model")
    elif folder.exists():
        raise ValueError(f"{name} is a file; name the folder of a Hugging Face model")
    elif folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no folder {name}")
    try:
        PreTrainedConfig.get_config_dict(name)
    except OSError:
        raise ValueError(
            f"there is no folder {name}, and no model of that name could be fetched from the Hugging Face hub"
            if not folder.is_dir()
            else f"{name}: its config.json is not JSON"
        ) from None


def _read(path: Path) -> str:
    from locant.analysis.text import read_text

    words = read_text(path)
    if not words.strip():
        raise ValueError(f"{path} is empty")
    return words


def _inspect(name: str, words: str | None) -> Any:
    """One model through all stages, with a bar."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import AutoTokenizer

    from locant.analysis import inspection
    from locant.analysis.text import default_text, usable
    from locant.hf import memory

    part = memory.part_that_fits(name)
    loaded = locant.load(name, layers=None if part is None else part.layers)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError):
        tokenizer = None
    if tokenizer is not None and not usable(tokenizer):
        tokenizer = None
    embeddings: Any = loaded.get_input_embeddings()
    if not hasattr(embeddings, "weight"):
        raise ValueError(f"{type(loaded).__name__} does not read tokens; inspect is for models of text")
    if words is not None and tokenizer is None:
        raise ValueError(f"{name} has no tokenizer to read the text with; leave out --text to use random tokens")
    tokens = inspection.Tokens(tokenizer, default_text() if words is None else words, embeddings.weight.shape[0])
    label = "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name
    columns = (TextColumn("{task.description:26}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=len(inspection.STAGES))
        steps = inspection.inspect(loaded, tokens, label, of=None if part is None else part.of)
        for done, (stage, so_far) in enumerate(steps):
            progress.update(task, description=stage, completed=done)
            found = so_far
    return found


@app.command()
def bench(
    specs: Annotated[list[str], typer.Argument(help="Schemes, such as tisa huang4:clip=64.")],
    lengths: Annotated[str, typer.Option(help="Lengths to measure at, with commas.")] = "256,512,1024,2048",
    heads: Heads = 12,
    width: Width = 768,
    tokens: Annotated[int, typer.Option(help="Tokens in a batch.", min=1)] = 4096,
    repeats: Annotated[int, typer.Option(help="Times that everything is run in turn.", min=3)] = 5,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Picture file; numbers go beside it as csv.")] = None,
) -> None:
    """What schemes cost on this machine, as a ratio to plain attention, forward and with backward."""
    from locant.analysis import speed
    from locant.report.speed import cost_line, draw_costs, write_costs

    with plain_errors():
        built = {spec: _build(spec, heads, width, 0) for spec in specs}
        at = [int(word) for word in lengths.split(",") if word.strip()]
        if not at or min(at) < 1:
            raise ValueError(f"--lengths must be whole numbers with commas between them, got {lengths!r}")
        if out is not None:
            _check_plotting()
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {heads} heads of {width // heads}, fp32"
    )
    rows = []
    for cost in speed.compare(built, at, tokens=tokens, heads=heads, size=width // heads, repeats=repeats):
        console.print(cost_line(cost), markup=False, highlight=False)
        rows.append(cost)
    if out is not None:
        with plain_errors():
            out = out if out.suffix else out.with_suffix(".png")
            draw_costs(rows, out)
            write_costs(rows, out.with_suffix(".csv"))
        console.print(f"picture: {out}\nnumbers: {out.with_suffix('.csv')}", markup=False, highlight=False)


@app.command()
def doctor() -> None:
    """What is active on this machine and why, and which back end attention takes for what."""
    from locant.attention.diagnosis import SITUATIONS, choices, diagnose

    console.print(f"[bold]locant {locant.__version__}[/]")
    for finding in diagnose():
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}[finding.active]
        console.print(f"  {mark} {finding.name:13}", end="")
        console.print(finding.detail, markup=False, highlight=False, soft_wrap=True)
    table = Table(title="What impl='auto' takes here")
    table.add_column("scheme", style="bold")
    for situation in SITUATIONS:
        table.add_column(situation)
    for spec, row in choices().items():
        table.add_row(spec, *row.values())
    console.print(table)


@app.command()
def swap(
    model: Annotated[str, typer.Argument(help="A folder or hub name of a Hugging Face model.")],
    spec: Spec,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write; must be new or empty.")],
    keep_native: Annotated[bool, typer.Option(help="Add the scheme to the model's own positions.")] = False,
    impl: Annotated[str, typer.Option(help="Back end of the attention.")] = "auto",
) -> None:
    """Gives a model another position scheme and saves it, tokenizer included; open it with locant.load."""
    with plain_errors():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is there already and not empty; name another folder")
        loaded = locant.load(model)
        before = (
            locant.native(loaded),
            loaded.num_parameters(),
            getattr(loaded.config, "max_position_embeddings", None),
        )
        locant.swap(loaded, spec, keep_native=keep_native, impl=impl)
        loaded.save_pretrained(out)
        _save_tokenizer(model, loaded, out)
    plan: Any = loaded.locant_plan
    layers = sum(len(stack.attentions) for stack in plan.stacks)
    table = Table(title=f"{type(loaded).__name__}, {layers} attention modules")
    for column in ("", "before", "after"):
        table.add_column(column)
    kept = f"{before[0]} + {spec}" if keep_native else spec
    table.add_row("positions", escape(str(before[0])), escape(kept))
    table.add_row("parameters", f"{before[1]:,}", f"{loaded.num_parameters():,}")
    native_limit = before[2] if keep_native and not plan.replaced else plan.max_length()
    table.add_row("maximum length", str(before[2] or "none"), str(native_limit or "none"))
    console.print(table)
    console.print(f"saved: {out}    open it with locant.load({str(out)!r})", markup=False, highlight=False)


def _save_tokenizer(model: str, loaded: Any, out: Path) -> None:
    from transformers import AutoTokenizer

    from locant.hf.plan import ANY_LENGTH

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        console.print("no tokenizer there; none was saved")
        return
    tokenizer.model_max_length = getattr(loaded.config, "max_position_embeddings", ANY_LENGTH)
    tokenizer.save_pretrained(out)


def _describe(name: str) -> None:
    """What a scheme is, in the words of its file, and its options with their defaults."""
    if name not in locant.SCHEMES:
        locant.scheme(name)  # says what exists
    cls = locant.SCHEMES[name]
    console.print(signatures.getdoc(signatures.getmodule(cls)), markup=False, highlight=False)
    console.print()
    console.print(signatures.getdoc(cls), markup=False, highlight=False)
    for option, parameter in cls.arguments().items():
        if option not in DIMS and parameter.default is not signatures.Parameter.empty:
            console.print(f"  {option}={parameter.default}", markup=False, highlight=False)


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
        raise ValueError(f"drawing needs {missing.name}; install it with: pip install matplotlib 'plotext<6'") from None


for command in (cli_experiments.compare, cli_experiments.train, cli_experiments.finetune, cli_adapt.adapt):
    app.command()(command)
