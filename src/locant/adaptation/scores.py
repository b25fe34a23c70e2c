"""Tasks to measure a model by before and after: `stsb:FOLDER`, `sentences:FILE`, `clm`, `mlm`.

stsb        Spearman correlation of the cosine of pooled vectors with the judgements of STS-B's dev.tsv
sentences   how often a sentence finds its document among long ones (documents.py), which are read at once by a model
            that can, else in pieces whose vectors are averaged
clm         loss of the next token, on lines of the text that are not trained on, or clm:FILE
mlm         loss of masked tokens, likewise
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from locant.adaptation.agreement import Tokens, agreement_for, pooled, says_tokens
from locant.adaptation.distil import to
from locant.adaptation.sample import Sampler, is_causal, longest, padded, pieces
from locant.runs.glue_files import read_dev
from locant.runs.text_source import read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from locant.adaptation.adapting import Score
    from locant.adaptation.documents import Sentences

NAMES = ("stsb", "sentences", "clm", "mlm")
ROWS, AT_ONCE, LONG = 64, 64, 2048


def score(wanted: str, held_out: list[str], length: int) -> Score:
    """The task of `--eval`."""
    name, _, where = wanted.partition(":")
    if name not in NAMES:
        raise ValueError(f"--eval must be one of {', '.join(NAMES)}, got {wanted!r}")
    if name in ("stsb", "sentences") and not where:
        raise ValueError(f"--eval {name} needs its data: {name}:PATH")
    if name == "stsb":
        return Stsb(where)
    if name == "sentences":
        return Documents(Path(where))
    if where and not Path(where).is_file():
        raise FileNotFoundError(f"there is no file {where}")
    return Loss(pieces(read(Path(where))) if where else held_out, length, masked=name == "mlm")


class Stsb:
    """STS-B without training: the cosine of two sentences against what people said."""

    def __init__(self, where: str) -> None:
        self.part = read_dev("STS-B", where)
        if len(self.part.labels) < 3:
            raise ValueError(f"STS-B in {where} has {len(self.part.labels)} pairs: a correlation needs at least 3")

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        from scipy.stats import spearmanr

        first, second = (_vectors(model, tokenizer, column) for column in self.part.texts)
        return float(spearmanr((first * second).sum(-1).cpu(), self.part.labels).statistic)


def _vectors(model: PreTrainedModel, tokenizer: Any, sentences: list[str]) -> Tensor:
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    found: dict[int, Tensor] = {}
    for at in range(0, len(order), AT_ONCE):
        numbers = order[at : at + AT_ONCE]
        rows = tokenizer([sentences[n] for n in numbers], truncation=True, max_length=longest(model, 256),
                         verbose=False)["input_ids"]  # fmt: skip
        batch = to(padded(rows, tokenizer), model)
        states = model.base_model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"][..., None].to(states.dtype)
        found.update(zip(numbers, pooled(states, mask), strict=True))
    return torch.stack([found[number] for number in range(len(sentences))])


class Documents:
    """Sentences and the long documents they are from; a model that cannot read so far reads pieces."""

    def __init__(self, path: Path) -> None:
        from locant.adaptation.documents import articles

        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        self.documents = [article for file in files if file.is_file() for article in articles(read(file))]
        self.task: Sentences | None = None

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        from locant.adaptation.documents import Sentences

        if self.task is None:  # by the first model, the original: all answer the same questions
            self.task = Sentences(tokenizer, self.documents, length=LONG, limit=longest(model, 512))
        return self.task.accuracy(model, "whole" if longest(model, LONG) == LONG else "chunked")


class Loss:
    """Mean loss of a language model on sequences of one length."""

    def __init__(self, lines: list[str], length: int, *, masked: bool) -> None:
        self.lines, self.length, self.masked = lines, length, masked

    def __call__(self, model: PreTrainedModel, tokenizer: Any) -> float:
        name, other = type(model).__name__, "clm" if self.masked else "mlm"
        if not says_tokens(model):
            raise ValueError(f"{name} foretells no tokens; --eval clm and mlm need a language model")
        if is_causal(model, tokenizer, self.lines) == self.masked:
            raise ValueError(f"{name} is {'' if self.masked else 'not '}causal; use --eval {other}")
        rows = Sampler(tokenizer, self.lines).rows(ROWS, self.length).to(model.device)
        kind = agreement_for(model, tokenizer, causal=not self.masked)
        assert isinstance(kind, Tokens)
        total, count = 0.0, 0
        for part in rows.split(8):
            batch = kind.prepare({"input_ids": part, "attention_mask": torch.ones_like(part)}, seed=0)
            logits = kind.outputs(model, batch).float()
            if self.masked:
                kept = kind.counted(batch)
                losses = F.cross_entropy(logits[kept], part[kept], reduction="none")
            else:
                losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="none")
            total, count = total + float(losses.sum()), count + len(losses)
        return total / count
