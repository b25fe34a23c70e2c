"""`inspect`: how does a model know where its tokens are?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from locant import imports as own
from locant.analysis import inspection
from locant.analysis.inspection import Explain, Inspection
from locant.analysis.table_inspection import inspect_tables
from locant.analysis.text import default_text, usable
from locant.hf import bare_tables, checkpoint, load, memory
from locant.hf.pooling import pooling_of
from locant.hf.sentence_folder import sentence_folder
from locant.report.figures import Cell
from locant.report.inspection import inspection_page
from locant.report.page import Report
from locant.report.side_by_side import side_by_side
from locant.runs import text_source
from locant.verbs.result import Result

OnStage = Callable[[str, str, int, int], None]
"""Called with the name of the model, the name of a stage, its number from 0, and the number of stages."""
Stages = Mapping[str, inspection.Stage]


class InspectionResult(Result):
    """The measurements of one model or position table, or of two side by side."""

    def __init__(self, inspections: list[Inspection]) -> None:
        self.inspections = inspections

    @cached_property
    def reports(self) -> list[Report]:
        """The page of each model alone."""
        return [inspection_page(each) for each in self.inspections]

    @cached_property
    def report(self) -> Report:
        """The content of the page."""
        return self.reports[0] if len(self.reports) == 1 else side_by_side(self.reports[0], self.reports[1])

    @property
    def table(self) -> list[dict[str, Cell]]:
        """One row per attention head; for a position table, one row per R²."""
        several = len(self.inspections) > 1
        return [
            {**({"model": found.name} if several else {}), **row} for found in self.inspections for row in _rows(found)
        ]


def _rows(found: Inspection) -> list[dict[str, Cell]]:
    if found.layers:
        return [dataclasses.asdict(head) for layer in found.layers for head in layer.heads]
    shown = ("stack", "layer", "head", "scheme", "quantity", "first", "last", "r2")
    return [{name: getattr(row, name) for name in shown} for row in found.invariances]


def inspect(
    model: str | Path | PreTrainedModel,
    *,
    text: str | Path | None = None,
    compare: str | Path | PreTrainedModel | None = None,
    explain: str | Sequence[str] = (),
    heads: int | None = None,
    tokenizer: Any = None,
    certainty: bool = False,
    imports: str | Path | Sequence[str | Path] = (),
    on_stage: OnStage = lambda model, stage, number, total: None,
) -> InspectionResult:
    """Measures how a model knows where its tokens are: what `locant inspect` writes to a page.

    model      a model, the folder or hub name of one, or a position table in a file of weights: `FILE::KEY`.
    text       what the model reads: a string, or a pathlib.Path of a file. By default Python's own manual.
    compare    another model or table, shown side by side.
    explain    a text: why does the model give the output that it gives? Two texts for a model of sentences: why are
               their embeddings similar? The page gets a section with the relevance of tokens, offsets and positions.
    heads      for a position table: attention heads of its model.
    tokenizer  of a model that was passed as an object; without one it reads random tokens.
    certainty  whether to compute 95 % intervals of the learned curves too. The text should be one that the model was
               not trained on.
    imports    files or modules with the schemes of the model, if they are not of locant.
    on_stage   called before each stage with the name of the model, the stage, its number and the number of stages.

    A part that does not apply to the model leaves a notice in `report.notices`.
    """
    own.load(imports)
    words = _read(text) if isinstance(text, Path) else text  # errors that would end minutes of work come first
    wanted = [model] if compare is None else [model, compare]
    bare = [None if isinstance(each, PreTrainedModel) else _tables(str(each)) for each in wanted]
    texts = (explain,) if isinstance(explain, str) else tuple(explain)
    _check_arguments(bare, words, heads, certainty=certainty)
    _check_texts(bare, texts)
    more: Stages = inspection.CERTAINTY if certainty else {}
    for each, its in zip(wanted, bare, strict=True):
        if its is None and not isinstance(each, PreTrainedModel):
            check_model(str(each))
    found = []
    for each, its in zip(wanted, bare, strict=True):
        if isinstance(each, PreTrainedModel):
            name = each.name_or_path or type(each).__name__
            found.append(_stages(each, tokenizer, words, _label(name), None, on_stage, more, Explain(texts)))
        elif its is not None:
            found.append(inspect_tables(its, _label(str(each)), heads=heads))
        else:
            found.append(_opened(str(each), words, on_stage, more, texts))
    return InspectionResult(found)


def _tables(name: str) -> Any:
    return bare_tables.bare_tables(name, of_one_model=True) if bare_tables.is_bare(name) else None


def _check_arguments(bare: list[Any], words: str | None, heads: int | None, *, certainty: bool) -> None:
    """Raises a ValueError for an argument that neither model nor table uses."""
    if words is not None and None not in bare:
        raise ValueError("a position table reads no text; leave out the text")
    if certainty and None not in bare:
        raise ValueError(
            "a position table reads no text, by which its certainty could be measured; leave out certainty"
        )
    if heads is not None and not any(bare):
        raise ValueError(
            "the number of heads is for position tables; a model has its number of heads in its config.json"
        )


def _check_texts(bare: list[Any], texts: tuple[str, ...]) -> None:
    """Raises a ValueError unless there are texts that can be explained, or none."""
    if texts and any(bare):
        raise ValueError("a position table has no output to explain; leave out the text to explain")
    if any(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError("the text to explain is empty; pass one with words")
    if len(texts) > 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"explain takes one text, or two whose embeddings are compared; got {list(texts)!r}")


def _read(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}; name a file with text")
    words = text_source.read(path)
    if not words.strip():
        raise ValueError(f"{path} is empty; name a file with text")
    return words


def check_model(name: str) -> None:
    """Raises a ValueError if there is no model of this name. Reads only its config."""
    checkpoint.check_name(name)
    try:
        checkpoint.config_of(name)
    except OSError as problem:
        raise ValueError(str(problem)) from None


def _opened(name: str, words: str | None, on_stage: OnStage, more: Stages, texts: tuple[str, ...]) -> Inspection:
    """Opens a model, or as many of its layers as fit into memory, and runs all stages."""
    part = memory.part_that_fits(name)
    loaded = load(name, layers=None if part is None else part.layers)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError):
        tokenizer = None
    if words is not None and (tokenizer is None or not usable(tokenizer)):
        raise ValueError(f"{name} has no tokenizer to read the text with; leave out the text to use random tokens")
    pooling = pooling_of(sentence_folder(name)) if len(texts) == 2 else None
    of = None if part is None else part.of
    return _stages(loaded, tokenizer, words, _label(name), of, on_stage, more, Explain(texts, pooling))


def _stages(
    model: PreTrainedModel, tokenizer: Any, words: str | None, label: str, of: int | None, on_stage: OnStage,
    more: Stages, explain: Explain,
) -> Inspection:  # fmt: skip
    embeddings: Any = model.get_input_embeddings()
    if not hasattr(embeddings, "weight"):
        raise ValueError(f"{type(model).__name__} does not read tokens; inspect is for models of text")
    if tokenizer is not None and not usable(tokenizer):
        tokenizer = None
    if words is not None and tokenizer is None:
        raise ValueError(f"{label} needs a tokenizer to read the text with; pass tokenizer, or leave out the text")
    if explain.texts and tokenizer is None:
        raise ValueError(f"{label} needs a tokenizer to read the text to explain; pass tokenizer, or leave out explain")
    tokens = inspection.Tokens(tokenizer, default_text() if words is None else words, embeddings.weight.shape[0])
    more = {**more, "explanation": explain.run} if explain.texts else more
    total = len(inspection.STAGES) + len(more)
    for number, (stage, so_far) in enumerate(inspection.inspect(model, tokens, label, of=of, more=more)):
        on_stage(label, stage, number, total)
        found = so_far
    return found


def _label(name: str) -> str:
    """The title of a page: the last two parts of a path, and the key of a table; hub names as they are."""
    path, key = bare_tables.split(name)
    if not path.exists():
        return name
    short = path.name if path.is_file() else "/".join(path.resolve().parts[-2:])
    return short if key is None else f"{short}{bare_tables.SEPARATOR}{key}"
