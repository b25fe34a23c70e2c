"""`export`: a changed model in a form that everyone opens without locant."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoTokenizer, PreTrainedModel

from locant.exporting import traced
from locant.exporting.card import card
from locant.exporting.jinabert import jinabert
from locant.exporting.mpnet import mpnet
from locant.exporting.original import original as own_architecture
from locant.exporting.proof import prove
from locant.exporting.refusal import CannotExport, of_all
from locant.exporting.smollm3 import smollm3
from locant.exporting.source import Source, source_of
from locant.exporting.stock import Stock
from locant.hf.facts import maximum_length
from locant.hf.saving import in_words
from locant.runs import files
from locant.runs.new_folder import new_folder

if TYPE_CHECKING:
    from locant.adaptation.sample import Text
    from locant.exporting.fitted_table import TableAgreement

STOCK: dict[str, Callable[[Source, int | None], Stock]] = {
    "original": own_architecture,
    "mpnet": mpnet,
    "smollm3": smollm3,
    "jinabert": jinabert,
}
"""Target -> the function that makes a model of that architecture, in the order in which `auto` tries them."""
TARGETS = ("auto", *STOCK, *traced.FILES)
BUDGET = "5min"
"""Time for fitting a table of absolute positions."""


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and how near it is to the model."""

    path: Path
    to: str
    length: int | None  # tokens that it reads; None: any number
    difference: float | None  # largest difference of outputs by their size; None for an approximation
    measure: str = ""  # of an approximation: what `agreement` is
    agreement: list[TableAgreement] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether it computes what the model does, up to rounding."""
        return self.difference is not None


def export(
    model: PreTrainedModel | str | Path,
    out: str | Path,
    to: str = "auto",
    *,
    tokenizer: Any = None,
    length: int | None = None,
    text: Text | None = None,
    original: str | Path | None = None,
    budget: str = BUDGET,
    seed: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Exported:
    """Writes a swapped model as a folder that needs no locant, and returns how near it is to the model.

    model     a swapped or adapted model, or its folder.
    out       a new folder.
    to        original   its own architecture: a longer position table, or RoPE
              mpnet      BERT and its kin with `t5:shared=layers`
              smollm3    Llama and its kin with `nope` in some layers
              jinabert   refused: its code is not a part of transformers
              onnx       model.onnx, checked with onnxruntime
              torch      model.pt2, a program of torch.export
              auto       the first of original, mpnet and smollm3 that computes the same.
    tokenizer by default that in the folder of the model.
    length    rows of a position table, or the longest input of a program. By default all that the model reads, at most
              4,096 rows.
    text      unlabelled prose. With to="original", it fits a table of absolute positions to a model whose scheme is not
              a table, which is an approximation: see `Exported.agreement`. It also needs `length`.
    original  for this, the original model, if the swapped one comes from a folder, which has the table no more.
    budget    for this, the time or steps of the fit.

    A stock model is opened with transformers again and compared on random tokens with padding on either side: outputs
    may differ by 1e-5 of their size (programs: 1e-5, ONNX 1e-4). If they do not agree, or the target cannot hold the
    model, it raises ValueError and writes nothing. Modules of sentence-transformers are copied.
    """
    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(TARGETS)}; got {to!r}")
    if length is not None and length < 2:
        raise ValueError(f"length must be at least 2 tokens, got {length}")
    source, path = source_of(model, tokenizer), Path(out)
    with new_folder(path) as folder:
        if to in traced.FILES:
            done = _program(source, folder, to, length, on_stage)
        elif to == "original" and text is not None and _reason(own_architecture, source, length):
            if length is None:
                raise ValueError("how many rows shall the table have? pass length=…, such as 2048")
            from locant.exporting.fitted_table import fitted_table

            fitted = fitted_table(
                source, text, length, original=original, budget=budget, seed=seed, on_stage=on_stage
            )  # fmt: skip
            _write(source, fitted.stock, folder)
            done = Exported(folder, to, length, None, fitted.measure, fitted.rows, fitted.stock.notices)
        else:
            done = _stock(source, folder, to, length, on_stage)
        files.write(folder / "README.md", card(done, source))
    return replace(done, path=path)


def _program(source: Source, folder: Path, to: str, length: int | None, on_stage: Callable[[str], None]) -> Exported:
    on_stage(f"tracing {type(source.model).__name__} and comparing the program with it")
    difference, longest = traced.write(source, folder, to, length)
    _save_tokenizer(source.tokenizer, longest, folder)
    kinds = source.folder.kinds[1:] if source.folder is not None else []
    left = f"the program returns hidden states; {', '.join(kinds)} of sentence-transformers are not part of it"
    return Exported(folder, to, longest, difference, notices=[left] if kinds else [])


def _stock(source: Source, folder: Path, to: str, length: int | None, on_stage: Callable[[str], None]) -> Exported:
    target, stock = _chosen(source, to, length)
    on_stage(f"writing {type(stock.model).__name__} and comparing it")
    _write(source, stock, folder)
    difference = prove(source.model, _opened(stock, folder))
    return Exported(folder, target, stock.length, difference, notices=stock.notices)


def _reason(make: Callable[[Source, int | None], Stock], source: Source, length: int | None) -> str | None:
    """Why a target cannot hold a model; None if it computes the same."""
    try:
        prove(source.model, make(source, length))
    except CannotExport as problem:
        return str(problem)
    return None


def _chosen(source: Source, to: str, length: int | None) -> tuple[str, Stock]:
    """The target, and the model in its architecture. For auto: the first one that computes the same."""
    if to != "auto":
        return to, STOCK[to](source, length)
    reasons: dict[str, str] = {}
    for target, make in STOCK.items():
        reason = _reason(make, source, length)
        if reason is None:
            return target, make(source, length)
        reasons[target] = reason
    raise of_all(reasons)


def _write(source: Source, stock: Stock, folder: Path) -> None:
    with in_words(folder):
        stock.model.save_pretrained(folder)
        longest = maximum_length(source.model) if stock.length is None else stock.length
        _save_tokenizer(stock.tokenizer, longest, folder)
    if source.folder is not None:
        source.folder.copy_modules(folder, lambda before: before if stock.length is None else stock.length)


def _save_tokenizer(tokenizer: Any | None, longest: int, folder: Path) -> None:
    if tokenizer is not None:
        written = copy.deepcopy(tokenizer)
        written.model_max_length = longest
        written.save_pretrained(folder)


def _opened(stock: Stock, folder: Path) -> Stock:
    """The model as transformers opens it from the folder."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # a pooler that the model does not have is made anew
    try:
        model: Any = type(stock.model).from_pretrained(folder, dtype=stock.model.dtype, trust_remote_code=False)
    finally:
        transformers.logging.set_verbosity(before)
    if stock.tokenizer is not None:
        again = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        for text in ("A cat sat on the mat.", "words, numbers 1024"):
            if again(text)["input_ids"] != stock.tokenizer(text)["input_ids"]:
                raise CannotExport(
                    f"{folder.name}: transformers reads other tokens with the tokenizer that was written"
                )
    return replace(stock, model=model.to(stock.model.device))
