"""GLUE (Wang et al. 2018, arXiv 1804.07461): nine tasks on sentences and pairs of them, for any trained encoder.

    CoLA     is it a sentence of English?             Matthews correlation
    SST-2    is it praise?                            accuracy
    MRPC     do they say the same?                    mean of F1 and accuracy
    QQP      do they ask the same?                    mean of F1 and accuracy
    STS-B    how alike are they, 0 to 5?              mean of Pearson and Spearman correlation
    MNLI     does the second follow from the first?   mean of the accuracies on matched and mismatched genres
    QNLI     is the answer in it?                     accuracy
    RTE      does the second follow from the first?   accuracy
    WNLI     is that what the pronoun is?             accuracy

The scores are those of the benchmark, which takes the mean of the two where a task has two, times 100; on `dev`, since
the labels of `test` are not public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.preset import FINETUNE
from locant.experiments.tasks.rows import Rows, batches, fit, open_rows, pad, small, spread, write_rows
from locant.experiments.tasks.task import Evaluation, Setting, Task, order
from locant.runs import text_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HUB = "nyu-mll/glue"
MALFORMED = 0.01
"""The share of lines that QQP may have with too few or too many fields: the official file has a few."""

Scores = Callable[[Any, Any], dict[str, float]]
"""Predictions and labels -> scores by name."""


def _accuracy(said: Any, right: Any) -> dict[str, float]:
    from sklearn.metrics import accuracy_score

    return {"accuracy": 100 * float(accuracy_score(right, said))}


def _matthews(said: Any, right: Any) -> dict[str, float]:
    from sklearn.metrics import matthews_corrcoef

    return {"matthews": 100 * float(matthews_corrcoef(right, said))}


def _f1_and_accuracy(said: Any, right: Any) -> dict[str, float]:
    from sklearn.metrics import f1_score

    found = {"f1": 100 * float(f1_score(right, said, zero_division=0.0)), **_accuracy(said, right)}
    return {"mean of F1 and accuracy": math.fsum(found.values()) / 2, **found}


def _correlations(said: Any, right: Any) -> dict[str, float]:
    from scipy.stats import pearsonr, spearmanr

    if len({*said}) < 2 or len({*right}) < 2:
        raise Undefined("it says the same of every pair: there is no correlation")
    found = {
        "pearson": 100 * float(pearsonr(said, right).statistic),
        "spearman": 100 * float(spearmanr(said, right).statistic),
    }
    return {"mean of Pearson and Spearman": math.fsum(found.values()) / 2, **found}


class Undefined(ValueError):
    """There is no such score for these predictions."""


BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class Kind:
    """One of the tasks: how its files and its columns are called, and what it is judged by."""

    texts: tuple[str, ...]  # columns of the files
    label: str
    labels: tuple[str, ...]  # in the order of the hub; none for a number from 0 to 5
    metric: str
    scores: Scores
    header: bool = True  # CoLA has none: its columns are found by their number
    fields: int = 0  # of a line without a header
    hub_texts: tuple[str, ...] = ()  # columns of the hub, where they have other names
    tests: Mapping[str, str] | None = None  # file -> part of the hub, where there are two
    forgiving: bool = False  # whether a few malformed lines are left out


KINDS: dict[str, Kind] = {
    "CoLA": Kind(("3",), "1", BINARY, "matthews", _matthews, header=False, fields=4, hub_texts=("sentence",)),
    "SST-2": Kind(("sentence",), "label", BINARY, "accuracy", _accuracy),
    "MRPC": Kind(
        ("#1 String", "#2 String"), "Quality", BINARY, "mean of F1 and accuracy", _f1_and_accuracy,
        hub_texts=("sentence1", "sentence2"),
    ),
    "STS-B": Kind(("sentence1", "sentence2"), "score", (), "mean of Pearson and Spearman", _correlations),
    "RTE": Kind(("sentence1", "sentence2"), "label", ENTAILMENT, "accuracy", _accuracy),
    "QNLI": Kind(("question", "sentence"), "label", ENTAILMENT, "accuracy", _accuracy),
    "WNLI": Kind(("sentence1", "sentence2"), "label", BINARY, "accuracy", _accuracy),
    "MNLI": Kind(
        ("sentence1", "sentence2"), "gold_label", INFERENCE, "mean of matched and mismatched", _accuracy,
        hub_texts=("premise", "hypothesis"),
        tests={"dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"},
    ),
    "QQP": Kind(
        ("question1", "question2"), "is_duplicate", BINARY, "mean of F1 and accuracy", _f1_and_accuracy, forgiving=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Lines of one file: their texts, one list for each column, and their labels."""

    texts: tuple[list[str], ...]
    labels: list[float]
    left_out: int = 0

    def take(self, most: int) -> Part:
        """At most so many lines, from all over; 0 for all."""
        numbers = spread(len(self.labels), most)
        texts = tuple([column[at] for at in numbers] for column in self.texts)
        return Part(texts, [self.labels[at] for at in numbers], self.left_out)


class Glue(Task):
    """One task of GLUE, by its name there."""

    higher_is_better = True
    presets = FINETUNE
    auto = "AutoModelForSequenceClassification"
    shape = "bert"

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"glue:{kind}", KINDS[kind]
        self.metric = self.kind.metric

    def head(self, setting: Setting) -> dict[str, Any]:
        if not self.kind.labels:
            return {"num_labels": 1, "problem_type": "regression"}
        return {"num_labels": len(self.kind.labels), "problem_type": "single_label_classification"}

    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        preset = setting.preset
        if preset.longest != 1:
            raise ValueError(f"{self.name} is tested at the length it is trained at, and no other: longest must be 1, "
                             f"got {preset.longest}")  # fmt: skip
        parts, where = self._read(data)
        fit(setting.tokenizer)
        counts = {}
        for name, part in parts.items():
            some = part.take(count if name == "train" else preset.evaluated)
            counts[name] = self._write(setting, setting.folder / f"{name}.arrow", some)
        tested = sum(number for name, number in counts.items() if name != "train")
        said = f"{len(parts['train'].labels):,} examples of {where}, tested on {tested:,} others"
        left_out = sum(part.left_out for part in parts.values())
        return said + (f"; {left_out:,} malformed lines are left out" if left_out else "")

    def _write(self, setting: Setting, path: Path, part: Part) -> int:
        columns = {f"text{number}": column for number, column in enumerate(part.texts)}

        def encode(some: dict[str, list[Any]]) -> dict[str, Any]:
            found = setting.tokenizer(
                *(some[name] for name in columns), truncation=True, max_length=setting.preset.length,
                return_attention_mask=False, verbose=False,
            )  # fmt: skip
            return {**{name: small(found[name]) for name in found}, "labels": some["labels"]}

        kept: list[Any] = [int(label) for label in part.labels] if self.kind.labels else part.labels
        return write_rows(path, {**columns, "labels": kept}, encode)

    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        table = open_rows(setting.folder / "train.arrow")
        return Rows(table, order(count, len(table), seed))

    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        labels = torch.stack([example["labels"] for example in examples])
        return {**pad(setting.tokenizer, examples), "labels": labels if self.kind.labels else labels.float()}

    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        length = setting.preset.length
        try:
            found = {test: self._test(model, setting, test) for test in self._tests()}
        except Undefined as problem:
            yield Evaluation(length, refused=str(problem))
            return
        if self.kind.tests is None:
            (values,) = found.values()
        else:
            values = {test.removeprefix("dev_"): scores["accuracy"] for test, scores in found.items()}
            values = {self.metric: math.fsum(values.values()) / len(values), **values}
        yield Evaluation(length, values)

    @torch.no_grad()
    def _test(self, model: PreTrainedModel, setting: Setting, test: str) -> dict[str, float]:
        table = open_rows(setting.folder / f"{test}.arrow")
        here, said = next(model.parameters()).device, torch.zeros(len(table), dtype=torch.float64)
        for numbers, rows in batches(table):
            inputs = pad(setting.tokenizer, rows)
            logits = model(**{name: value.to(here) for name, value in inputs.items()}).logits.double().cpu()
            if not bool(logits.isfinite().all()):
                raise ValueError("the outputs of the model hold NaN or infinity: there is nothing to score")
            said[numbers] = logits.argmax(-1).double() if self.kind.labels else logits[:, 0]
        kind = int if self.kind.labels else float
        return self.kind.scores([kind(x) for x in said.tolist()], [kind(x) for x in table["labels"]])

    def dev(self, data: str) -> Part:
        """What the task is tested on, for those who have a way of their own to answer."""
        path = Path(data)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no folder {data}")
        return self._file(_find(self._folder(path), next(iter(self._tests()))))

    # ---- files ------------------------------------------------------------------------------------

    def _tests(self) -> Mapping[str, str]:
        return self.kind.tests or {"dev": "validation"}

    def _read(self, data: str | None) -> tuple[dict[str, Part], str]:
        """Lines to train on and to test on, and where they are from."""
        path = None if data is None else Path(data)
        if path is not None and path.is_file():
            raise ValueError(f"{path} is a file; {self.name} needs a folder with train.tsv and dev.tsv")
        if path is not None and path.is_dir():
            folder = self._folder(path)
            return {name: self._file(_find(folder, name)) for name in ("train", *self._tests())}, str(folder)
        if path is not None and (str(data).startswith((".", "/", "~")) or path.suffix):
            raise FileNotFoundError(f"there is no folder {data}")
        return self._hub(data or HUB)

    def _folder(self, path: Path) -> Path:
        """The folder of the task: in the folder of all of GLUE, or the one that is named."""
        name = self.name.partition(":")[2]
        inside = [each for each in path.iterdir() if each.is_dir() and each.name.lower() == name.lower()]
        if not inside and not list(path.glob("*.tsv*")):
            there = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
            raise FileNotFoundError(
                f"{path} has neither a folder {name} nor files such as train.tsv; there is: {there}"
            )
        return inside[0] if inside else path

    def _file(self, path: Path) -> Part:
        """One file in the format of the official download: fields between tabs, and quotes mean nothing."""
        kind, lines = self.kind, text_source.read(path).removeprefix("\ufeff").split("\n")
        while lines and not lines[-1].strip():
            lines.pop()
        header = lines[0].split("\t") if kind.header and lines else [str(number) for number in range(kind.fields)]
        first = 2 if kind.header else 1
        if len(lines) < first:
            raise ValueError(f"{path} is empty: it has no line of {self.name}")
        missing = [name for name in (*kind.texts, kind.label) if name not in header]
        if missing:
            raise ValueError(f"{path} has no column {_listed(missing)}: its first line has {_listed(header)}")
        rows = [(number, line.split("\t")) for number, line in enumerate(lines[first - 1 :], first)]
        at, texts = header.index(kind.label), [header.index(name) for name in kind.texts]
        malformed = [(number, row) for number, row in rows if len(row) != len(header)]
        if malformed and not (kind.forgiving and len(malformed) <= max(1, MALFORMED * len(rows))):
            number, row = malformed[0]
            raise ValueError(
                f"{path}: {len(malformed):,} of {len(rows):,} lines do not have {len(header)} fields between tabs; the "
                f"first is line {number}, with {len(row)}: {_shortened(chr(9).join(row))}"
            )
        rows = [(number, row) for number, row in rows if len(row) == len(header)]
        labels = [self._label(row[at], f"{path}, line {number}") for number, row in rows]
        return Part(tuple([row[column] for _, row in rows] for column in texts), labels, len(malformed))

    def _label(self, text: str, where: str) -> float:
        if self.kind.labels:
            if text not in self.kind.labels:
                raise ValueError(f"{where}: the label is {text!r}; {self.name} has {', '.join(self.kind.labels)}")
            return self.kind.labels.index(text)
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not 0 <= score <= 5:
            raise ValueError(f"{where}: the score is {text!r}; {self.name} has numbers from 0 to 5")
        return score

    # ---- the hub ----------------------------------------------------------------------------------

    def _hub(self, name: str) -> tuple[dict[str, Part], str]:
        from datasets import load_dataset

        config = self.name.partition(":")[2].lower().replace("-", "")
        try:
            parts = load_dataset(name, config)
        except Exception as problem:  # offline, unknown, gated: datasets has an exception for each
            raise ValueError(
                f"{name} ({config}) is no folder here, and the hub does not give it: {problem}. Name a folder with "
                f"GLUE's own files with --data"
            ) from None
        files = {"train": "train", **self._tests()}
        wanted = self.kind.hub_texts or self.kind.texts
        for part in files.values():
            columns = parts[part].column_names if part in parts else []
            if not {*wanted, "label"} <= {*columns}:
                raise ValueError(f"{name} ({config}) must have a part {part!r} with {_listed((*wanted, 'label'))}; "
                                 f"got {parts}")  # fmt: skip
        read = {file: self._hub_part(parts[part], wanted, f"{name} ({config}), {part}") for file, part in files.items()}
        return read, f"{name} ({config})"

    def _hub_part(self, table: Any, texts: tuple[str, ...], where: str) -> Part:
        labels = [float(label) for label in table["label"]]
        known = range(len(self.kind.labels))
        for number, label in enumerate(labels):
            if (label not in known) if known else not 0 <= label <= 5:
                allowed = f"0 to {len(known) - 1}" if known else "numbers from 0 to 5"
                raise ValueError(f"{where}, row {number}: the label is {label:g}; {self.name} has {allowed}")
        if not labels:
            raise ValueError(f"{where} is empty")
        return Part(tuple(list(table[name]) for name in texts), labels)


def _find(folder: Path, name: str) -> Path:
    for suffix in ("", *text_source.OPENERS):
        path = folder / f"{name}.tsv{suffix}"
        if path.is_file():
            return path
    there = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
    raise FileNotFoundError(f"{folder} has no {name}.tsv (nor {name}.tsv.xz, {name}.tsv.gz); there is: {there}")


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
