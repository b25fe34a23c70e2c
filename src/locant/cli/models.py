"""The commands about Hugging Face models: `locant inspect`, `locant swap`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoTokenizer

from locant.cli.terminal import MARKS, console
from locant.hf import load, memory, native, swapping
from locant.hf.layers import other_layers
from locant.hf.plan import plan_of
from locant.hf.saving import in_words, save_tokenizer
from locant.hf.sentence_folder import sentence_folder
from locant.hf.support import Layers, support_of
from locant.hf.word_order import WordOrderWarning, is_native
from locant.runs import new_folder
from locant.verbs import inspecting


def inspect(
    model: str, text: Path | None, out: Path, compare: str | None, heads: int | None, explain: list[str] | None,
    certainty: bool,
) -> None:  # fmt: skip
    """Writes a page of figures about one model or table, or two side by side, and prints a short verdict."""
    out = out / "report.html" if out.is_dir() else out
    out = out if out.suffix in (".html", ".htm") else out.with_name(f"{out.name}.html")
    tables = out.parent / f"{out.stem}-csv"
    _check_writable(out, tables)  # before minutes of work
    columns = (TextColumn("{task.description:26}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def on_stage(name: str, stage: str, number: int, total: int) -> None:
            if number == 0:  # two models may have one name
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], description=stage, completed=number)

        found = inspecting.inspect(
            model,
            text=text,
            compare=compare,
            explain=explain or (),
            heads=heads,
            certainty=certainty,
            on_stage=on_stage,
        )
    with new_folder.undone_on_failure(out, tables):
        found.page(out, tables=tables)
    for each in found.reports:
        console.print(f"\n[bold]{escape(each.title)}[/]")
        for sentence in each.verdict:
            console.print(f"  • {sentence}", markup=False, highlight=False)
        for notice in each.notices:
            console.print(f"  [yellow]note[/] {escape(notice)}", highlight=False)
    console.print(f"page: {out}\ntables: {tables}", markup=False, highlight=False)


def _check_writable(file: Path, folder: Path) -> None:
    """Raises a ValueError or OSError if a page or the folder of its tables cannot be written. Leaves nothing there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the tables are written to the folder {folder}, and a file has that name; name another page")
    for path in (file, folder):
        new_folder.check_writable(path)


def swap(model: str, spec: str, out: Path, keep_native: bool, impl: str) -> None:
    """Gives a model another position scheme, saves it with its tokenizer, and prints what changed."""
    with new_folder.new_folder(out) as folder:
        source = sentence_folder(model)
        name = model if source is None else source.transformer
        inspecting.check_model(name)
        loaded = load(name)
        _check_native(loaded, spec, keep_native=keep_native)
        before = _summary(loaded)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WordOrderWarning)  # printed below, as a command
            swapping.swap(loaded, spec, keep_native=keep_native, impl=impl)
        with in_words(folder):
            loaded.save_pretrained(folder)
            _save_tokenizer(name, loaded, folder)
        if source is not None:
            source.copy_to(folder, loaded)
    plan = plan_of(loaded)
    after = _summary(loaded)
    if plan is not None:
        after["positions"] = f"{before['positions']} + {spec}" if keep_native else spec
        if not keep_native or plan.replaced:
            after["maximum length"] = str(plan.max_length() or "none")
    table = Table(title=_title(loaded, plan))
    for column in ("", "before", "after"):
        table.add_column(column)
    for row in before:
        table.add_row(row, escape(before[row]), escape(after[row]))
    console.print(table)
    if source is not None:
        console.print(f"modules of sentence-transformers: {', '.join(source.kinds)}", markup=False, highlight=False)
    if plan is not None and plan.unlearned:
        console.print(
            "[yellow]note[/] This model does not know word order: it was trained with other positions, and the swap "
            "taught it nothing about the new ones. Train it before you use it. To keep what the original knows, adapt "
            f"it instead:\n  locant adapt {escape(model)} {escape(spec)} --text TEXT -o FOLDER",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    console.print(f"saved: {out}    open it with locant.load({str(out)!r})", markup=False, highlight=False)


def _check_native(model: Any, spec: str, *, keep_native: bool) -> None:
    """Raises a ValueError where `native` has no meaning: it restores positions that a scheme was added to."""
    if is_native(spec) and keep_native:
        raise ValueError("native restores the model's own positions, and --keep-native keeps them; leave out one")
    if is_native(spec) and plan_of(model) is None:
        raise ValueError(
            f"{model.name_or_path} has its own positions already: there is nothing to restore; name a scheme"
        )


def _summary(model: Any) -> dict[str, str]:
    """The rows of the table that `locant swap` prints, for one model."""
    length = getattr(model.config, "max_position_embeddings", None)
    return {
        "positions": _own_positions(model),
        "parameters": f"{model.num_parameters():,}",
        "maximum length": str(length or "none"),
    }


def _title(model: Any, plan: Any) -> str:
    if plan is None:
        return type(model).__name__
    base = model.base_model
    layers = [
        Layers(each.path, len(each.attentions), other_layers(base, each.path, each.attentions)) for each in plan.stacks
    ]
    return f"{type(model).__name__}, {'; '.join(map(spell_layers, layers))}"


def _own_positions(model: Any) -> str:
    """The positions of a model in words. Some models can be swapped whose positions cannot be read."""
    try:
        return str(native(model))
    except NotImplementedError as problem:
        return f"not read: {problem}"


def diagnose_model(name: str) -> None:
    """Prints what locant can do with a model, how it was found, and why not."""
    inspecting.check_model(name)
    part = memory.part_that_fits(name)
    loaded = load(name, layers=None if part is None else part.layers)
    found = support_of(loaded)
    console.print(f"[bold]{escape(type(loaded).__name__)}[/], family {escape(found.support.family)}", highlight=False)
    for works, what in (
        (found.support.how != "refused", f"family    {found.support.how}: {found.support.note}"),
        *((True, f"layers    {spell_layers(each)}") for each in found.layers),
        (not found.not_read, f"read      {found.positions or found.not_read}"),
        (not found.not_swapped, f"swap      {found.not_swapped or 'a swap and back again leaves the model as it was'}"),
        (not found.not_fitted, f"fit       {found.not_fitted or 'locant.fit and locant.adapt'}"),
    ):
        console.print(f"  {MARKS[works]} ", end="")
        console.print(what, markup=False, highlight=False, soft_wrap=True)


def spell_layers(layers: Layers) -> str:
    """Returns the layers of a stack in words."""
    where = f" in {layers.stack}" if layers.stack else ""
    attention = "1 attention module" if layers.attention == 1 else f"{layers.attention} attention modules"
    others = "1 other layer" if layers.others == 1 else f"{layers.others} other layers"
    return f"{attention}{where}" + (f", {others} left alone" if layers.others else "")


def _save_tokenizer(model: str, loaded: Any, out: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        console.print("the model has no tokenizer; none was saved")
        return
    save_tokenizer(tokenizer, loaded, out)
