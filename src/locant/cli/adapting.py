"""The command that adapts a model to another position scheme: `locant adapt`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from locant.adaptation import adapting, sample, scores
from locant.adaptation.result import CONTRAST_HEAD, READING_HEAD, contrast_cells, reading_cells
from locant.cli.terminal import console
from locant.experiments.run import quiet
from locant.hf import load
from locant.hf.pooling import pooling_of
from locant.hf.sentence_folder import sentence_folder
from locant.report.adaptation import draw_adaptation
from locant.runs.new_folder import check_writable

PICTURE = "heads.png"
"""The heads before and after, drawn where matplotlib is installed."""


def adapt(
    model: str, spec: str, text: Path, out: Path, budget: str, contrast: str | None, train: str,
    evaluate: list[str] | None, length: int, pooling: str | None, seed: int, report_to: list[str] | None,
) -> None:  # fmt: skip
    """Gives a trained model another position scheme, trains it to agree with the original, and saves it."""
    quiet()
    if not text.exists():
        raise FileNotFoundError(f"there is no file or folder {text}")
    check_writable(out)
    lines = sample.pieces(text)
    source = sentence_folder(model)
    loaded: Any = load(model if source is None else source.transformer)
    if source is not None and "Pooling" in source.kinds:
        loaded = loaded.base_model  # SentenceTransformer opens no head either
    if loaded.dtype in (torch.bfloat16, torch.float16):
        loaded.float()  # small steps are lost in half precision
    readable = sample.longest(loaded, length)
    held_out, vectors = adapting.held_out(lines), partial(pooling_of, source, pooling)
    tasks = {each: scores.score(each, held_out, readable, vectors) for each in evaluate or []}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[near]}"),
                   TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)  # fmt: skip
    with bar:
        job = bar.add_task("opening", total=None, near="")

        def on_stage(stage: str) -> None:
            bar.update(job, description=stage)
            if not console.is_terminal:  # a log has no bar
                console.print(escape(stage), highlight=False)

        def on_evaluation(found: Any, steps: int) -> None:
            near = f"agreement {found.agreement:.4f}"
            if found.retrieval is not None:
                near = f"retrieval {found.retrieval:.4f}, {near}"
            bar.update(job, completed=found.step, total=steps, near=near)

        def on_result(done: Any) -> None:
            if find_spec("matplotlib") is not None:
                draw_adaptation(done, out / PICTURE)

        try:
            done = adapting.adapt(
                loaded, spec, lines, budget=budget, contrast=contrast, train=train,
                tokenizer=sample.tokenizer_of(loaded), out=out, scores=tasks, length=length, seed=seed, pooling=pooling,
                report_to=report_to or (), on_stage=on_stage, on_evaluation=on_evaluation, on_result=on_result,
            )  # fmt: skip
        except KeyboardInterrupt:
            console.print(
                "stopped; the same command continues from the last checkpoint, or begins again if there is none"
            )
            raise SystemExit(130) from None
    _conclude(done, out)


def _conclude(done: Any, out: Path) -> None:
    """Prints the scores, and where the picture and the model are."""
    console.print(done.fit.summary, highlight=False)
    for notice in (*done.fit.notices, *done.notices):
        console.print(escape(notice), highlight=False)
    console.print(_table(done))
    console.print(done.measured_on, markup=False, highlight=False)
    console.print(_by_length(done))
    if done.readings:
        console.print(_readings(done))
    if done.contrast is not None:
        console.print(done.contrast.measured_on, markup=False, highlight=False)
        console.print(_contrast(done))
    if (out / PICTURE).exists():
        console.print(f"heads before and after: {out / PICTURE}", markup=False, highlight=False)
    console.print(f"saved: {out}    open it with locant.load({str(out)!r})", markup=False, highlight=False)


def _table(done: Any) -> Table:
    only = "" if done.trained else ", fitted only"
    table = Table(title=f"{type(done.model).__name__} with {done.spec}{only}")
    table.add_column("")
    for name in (f"agreement\n({done.measure})", *done.rows[0].scores, "parameters of\nits positions"):
        table.add_column(name, justify="right")
    for row in done.rows:
        numbers = [row.agreement, *row.scores.values()]
        table.add_row(row.state, *(f"{number:.4f}" for number in numbers), f"{row.parameters:,}")
    return table


def _by_length(done: Any) -> Table:
    """The adapted model at each length, beside the original that reads the first tokens, or windows."""
    table = Table(title=f"agreement ({done.measure}) by length")
    for name in done.length_head:
        table.add_column(name.replace(", ", ",\n"), justify="right")
    for row in done.lengths:
        numbers = (row.adapted, row.truncated, row.chunked)
        table.add_row(f"{row.length:,}", *(f"{number:.4f}" for number in numbers))
    return table


def _readings(done: Any) -> Table:
    """The ways in which the original can read long documents."""
    table = Table(title="the original, reading the same documents")
    for name in READING_HEAD:
        table.add_column(name, justify="left" if name == READING_HEAD[0] else "right")
    for reading in done.readings:
        table.add_row(*reading_cells(reading))
    return table


def _contrast(done: Any) -> Table:
    """Retrieval of held-out documents before and after the contrastive stage."""
    table = Table(title="the contrastive stage")
    for name in CONTRAST_HEAD:
        table.add_column(name, justify="left" if name == CONTRAST_HEAD[0] else "right")
    for cells in contrast_cells(done.contrast):
        table.add_row(*cells)
    return table
