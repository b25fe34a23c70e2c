"""The command that adapts a model to another position scheme: locant adapt."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from locant.report.adaptation import draw_adaptation
from locant.terminal import console, plain_errors


def adapt(
    model: Annotated[str, typer.Argument(help="A folder or hub name of a Hugging Face model.")],
    spec: Annotated[str, typer.Argument(help="A scheme, such as tisa:kernels=5.")],
    text: Annotated[Path, typer.Option(help="Prose without labels to learn from: a file or a folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the new model; give it again to go on.")],
    budget: Annotated[str, typer.Option(help="10min, 90s, 500steps.")] = "10min",
    train: Annotated[str, typer.Option(help="all: every weight; scheme: the parameters of the scheme alone.")] = "all",
    evaluate: Annotated[
        list[str] | None,
        typer.Option("--eval", help="stsb:FOLDER, sentences:FILE, clm or mlm; may be given several times."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the longest sequences; may be more than it reads now.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the text's order and of the scheme.")] = 0,
) -> None:
    """Another position scheme for a trained model, which keeps its quality and reads past its old length."""
    from locant.cli_experiments import need

    with plain_errors():
        need()
        import locant
        from locant.adaptation import sample, scores
        from locant.adaptation.adapting import adapt as run
        from locant.adaptation.adapting import held_out
        from locant.experiments.run import quiet

        quiet()
        if not text.exists():
            raise FileNotFoundError(f"there is no file or folder {text}")
        lines = sample.pieces(text)
        loaded = locant.load(model)
        if loaded.dtype in (torch.bfloat16, torch.float16):
            loaded.float()  # small steps are lost in half precision
        readable = sample.longest(loaded, length)
        tasks = {each: scores.score(each, held_out(lines), readable) for each in evaluate or []}
        bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[near]}"),
                       TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)  # fmt: skip
        with bar:
            job = bar.add_task("opening", total=None, near="")

            def say(stage: str) -> None:
                bar.update(job, description=stage)
                if not console.is_terminal:  # a log has no bar
                    console.print(escape(stage), highlight=False)

            def look(found: Any, steps: int) -> None:
                bar.update(job, completed=found.step, total=steps, near=f"agreement {found.agreement:.4f}")

            try:
                done = run(
                    loaded, spec, lines, budget=budget, train=train, tokenizer=sample.tokenizer_of(loaded), out=out,
                    scores=tasks, length=length, seed=seed, say=say, look=look,
                )  # fmt: skip
            except KeyboardInterrupt:
                console.print("stopped; the same command goes on from its last checkpoint, if it had come to one")
                raise typer.Exit(130) from None
    console.print(done.fit.summary, highlight=False)
    for notice in done.fit.notices:
        console.print(escape(notice), highlight=False)
    console.print(_table(done))
    if find_spec("matplotlib") is not None:
        draw_adaptation(done, out / "heads.png")
        console.print(f"heads before and after: {out / 'heads.png'}", markup=False, highlight=False)
    console.print(f"saved: {out}    open it with locant.load({str(out)!r})", markup=False, highlight=False)


def _table(done: Any) -> Table:
    table = Table(title=f"{type(done.model).__name__} with {done.spec}")
    table.add_column("")
    for name in (f"agreement\n({done.measure})", *done.rows[0].scores, "parameters of\nits positions"):
        table.add_column(name, justify="right")
    for row in done.rows:
        numbers = [row.agreement, *row.scores.values()]
        table.add_row(row.state, *(f"{number:.4f}" for number in numbers), f"{row.parameters:,}")
    return table
