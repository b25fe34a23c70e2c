"""GLUE (Wang et al. 2018, arXiv 1804.07461): nine tasks on sentences and pairs of sentences, for a trained encoder.

    CoLA     is it a sentence of English?             Matthews correlation
    SST-2    is it praise?                            accuracy
    MRPC     do they mean the same?                   mean of F1 and accuracy
    QQP      are they the same question?              mean of F1 and accuracy
    STS-B    how alike are they, 0 to 5?              mean of Pearson and Spearman correlation
    MNLI     does the second follow from the first?   mean of the accuracies on matched and mismatched genres
    QNLI     is the answer in it?                     accuracy
    RTE      does the second follow from the first?   accuracy
    WNLI     does the pronoun refer to that?          accuracy

The scores are those of the benchmark, times 100: the mean of the two where a task has two. They are computed on `dev`,
because the labels of `test` are not public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.bootstrap import test_noise
from locant.experiments.presets import FINETUNE
from locant.experiments.tasks.rows import batches, fit, open_rows, pad, small, spread, training_rows, write_rows
from locant.experiments.tasks.task import Evaluation, Setting, Task
from locant.runs.glue_files import FORMATS, Part, listed, read_folder, tests_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HUB = "nyu-mll/glue"

Scores = Callable[[Any, Any], dict[str, float]]
"""Predictions and labels -> scores by name."""


# scikit-learn and scipy are optional, and each takes half a second to import: the functions that need them import them.


def _accuracy(predicted: Any, labels: Any) -> dict[str, float]:
    from sklearn.metrics import accuracy_score

    return {"accuracy": 100 * float(accuracy_score(labels, predicted))}


def _matthews(predicted: Any, labels: Any) -> dict[str, float]:
    from sklearn.metrics import matthews_corrcoef

    return {"matthews": 100 * float(matthews_corrcoef(labels, predicted))}


def _f1_and_accuracy(predicted: Any, labels: Any) -> dict[str, float]:
    from sklearn.metrics import f1_score

    found = {"f1": 100 * float(f1_score(labels, predicted, zero_division=0.0)), **_accuracy(predicted, labels)}
    return {"mean of F1 and accuracy": math.fsum(found.values()) / 2, **found}


def _correlations(predicted: Any, labels: Any) -> dict[str, float]:
    from scipy.stats import pearsonr, spearmanr

    if len({*predicted}) < 2 or len({*labels}) < 2:
        raise Undefined("the output is the same for every pair, so there is no correlation")
    found = {
        "pearson": 100 * float(pearsonr(predicted, labels).statistic),
        "spearman": 100 * float(spearmanr(predicted, labels).statistic),
    }
    return {"mean of Pearson and Spearman": math.fsum(found.values()) / 2, **found}


class Undefined(ValueError):
    """The score is not defined for these predictions."""


@dataclass(frozen=True)
class Kind:
    """The score of one of the tasks, and its columns on the hub; its files are in `FORMATS`."""

    metric: str
    scores: Scores
    hub_texts: tuple[str, ...] = ()  # where they are not called as in the files


KINDS: dict[str, Kind] = {
    "CoLA": Kind("matthews", _matthews, hub_texts=("sentence",)),
    "SST-2": Kind("accuracy", _accuracy),
    "MRPC": Kind("mean of F1 and accuracy", _f1_and_accuracy, hub_texts=("sentence1", "sentence2")),
    "STS-B": Kind("mean of Pearson and Spearman", _correlations),
    "RTE": Kind("accuracy", _accuracy),
    "QNLI": Kind("accuracy", _accuracy),
    "WNLI": Kind("accuracy", _accuracy),
    "MNLI": Kind("mean of matched and mismatched", _accuracy, hub_texts=("premise", "hypothesis")),
    "QQP": Kind("mean of F1 and accuracy", _f1_and_accuracy),
}


class Glue(Task):
    """One task of GLUE, by its name there."""

    higher_is_better = True
    presets = FINETUNE
    auto = "AutoModelForSequenceClassification"
    shape = "bert"

    def __init__(self, detail: str) -> None:
        self.name, self.detail, self.kind, self.format = f"glue:{detail}", detail, KINDS[detail], FORMATS[detail]
        self.metric = self.kind.metric

    def head(self, setting: Setting) -> dict[str, Any]:
        if not self.format.labels:
            return {"num_labels": 1, "problem_type": "regression"}
        return {"num_labels": len(self.format.labels), "problem_type": "single_label_classification"}

    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        preset = setting.preset
        if preset.longest != 1:
            raise ValueError(
                f"{self.name} is tested at its training length only: longest must be 1, got {preset.longest}"
            )
        parts, where = self._read(data)
        fit(setting.tokenizer)
        counts = {}
        for name, part in parts.items():
            some = _spread(part, count if name == "train" else preset.evaluated)
            counts[name] = self._write(setting, setting.folder / f"{name}.arrow", some)
        tested = sum(number for name, number in counts.items() if name != "train")
        about = f"{len(parts['train'].labels):,} examples of {where}, tested on {tested:,} others"
        left_out = sum(part.left_out for part in parts.values())
        return about + (f"; {left_out:,} malformed lines are left out" if left_out else "")

    def _write(self, setting: Setting, path: Path, part: Part) -> int:
        columns = {f"text{number}": column for number, column in enumerate(part.texts)}

        def encode(some: dict[str, list[Any]]) -> dict[str, Any]:
            found = setting.tokenizer(
                *(some[name] for name in columns), truncation=True, max_length=setting.preset.length,
                return_attention_mask=False, verbose=False,
            )  # fmt: skip
            return {**{name: small(found[name]) for name in found}, "labels": some["labels"]}

        kept: list[Any] = [int(label) for label in part.labels] if self.format.labels else part.labels
        return write_rows(path, {**columns, "labels": kept}, encode)

    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        return training_rows(open_rows(setting.folder / "train.arrow"), count, setting.preset.batch, seed)

    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        labels = torch.stack([example["labels"] for example in examples])
        return {**pad(setting.tokenizer, examples), "labels": labels if self.format.labels else labels.float()}

    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        length = setting.preset.length
        try:
            found = {test: self._test(model, setting, test) for test in tests_of(self.detail)}
        except Undefined as problem:
            yield Evaluation(length, refused=str(problem))
            return
        if self.format.tests is None:
            ((values, noise),) = found.values()
        else:
            values = {test.removeprefix("dev_"): scores["accuracy"] for test, (scores, _) in found.items()}
            values = {self.metric: math.fsum(values.values()) / len(values), **values}
            noise = {}
        yield Evaluation(length, values, noise=noise)

    @torch.no_grad()
    def _test(self, model: PreTrainedModel, setting: Setting, test: str) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the scores on a part, and their noise."""
        table = open_rows(setting.folder / f"{test}.arrow")
        device, predicted = next(model.parameters()).device, torch.zeros(len(table), dtype=torch.float64)
        for numbers, rows in batches(table):
            inputs = pad(setting.tokenizer, rows)
            logits = model(**{name: value.to(device) for name, value in inputs.items()}).logits.double().cpu()
            if not bool(logits.isfinite().all()):
                raise ValueError("the outputs of the model contain NaN or infinity, so they have no score")
            predicted[numbers] = logits.argmax(-1).double() if self.format.labels else logits[:, 0]
        kind = int if self.format.labels else float
        found, labels = [kind(x) for x in predicted.tolist()], [kind(x) for x in table["labels"]]

        def of(numbers: list[int]) -> dict[str, float]:
            return self.kind.scores([found[at] for at in numbers], [labels[at] for at in numbers])

        return self.kind.scores(found, labels), test_noise(of, len(found))

    def _read(self, data: str | None) -> tuple[dict[str, Part], str]:
        """Returns the parts by file name, `train` first, and their source."""
        path = None if data is None else Path(data)
        if path is not None and path.is_file():
            raise ValueError(f"{path} is a file; {self.name} needs a folder with train.tsv and dev.tsv")
        if path is not None and path.is_dir():
            parts, folder = read_folder(self.detail, path)
            return parts, str(folder)
        if path is not None and (str(data).startswith((".", "/", "~")) or path.suffix):
            raise FileNotFoundError(f"there is no folder {data}")
        return self._hub(data or HUB)

    def _hub(self, name: str) -> tuple[dict[str, Part], str]:
        from datasets import load_dataset  # optional, and takes seconds

        config = self.detail.lower().replace("-", "")
        try:
            parts = load_dataset(name, config)
        except Exception as problem:  # datasets raises a different class for offline, unknown and gated data sets
            raise ValueError(
                f"{name} ({config}) is not a folder, and it cannot be loaded from the Hugging Face hub: {problem}. "
                f"Name a folder with GLUE's own files"
            ) from None
        files = {"train": "train", **tests_of(self.detail)}
        wanted = self.kind.hub_texts or self.format.texts
        for part in files.values():
            columns = parts[part].column_names if part in parts else []
            if not {*wanted, "label"} <= {*columns}:
                raise ValueError(
                    f"{name} ({config}) must have a part {part!r} with {listed((*wanted, 'label'))}; got {parts}"
                )
        read = {file: self._hub_part(parts[part], wanted, f"{name} ({config}), {part}") for file, part in files.items()}
        return read, f"{name} ({config})"

    def _hub_part(self, table: Any, texts: tuple[str, ...], where: str) -> Part:
        labels = [float(label) for label in table["label"]]
        known = range(len(self.format.labels))
        for number, label in enumerate(labels):
            if (label not in known) if known else not 0 <= label <= 5:
                allowed = f"0 to {len(known) - 1}" if known else "numbers from 0 to 5"
                raise ValueError(f"{where}, row {number}: the label is {label:g}; {self.name} has {allowed}")
        if not labels:
            raise ValueError(f"{where} is empty")
        return Part(tuple(list(table[name]) for name in texts), labels)


def _spread(part: Part, most: int) -> Part:
    """Returns at most `most` lines, evenly spaced; 0 for all."""
    numbers = spread(len(part.labels), most)
    texts = tuple([column[at] for at in numbers] for column in part.texts)
    return Part(texts, [part.labels[at] for at in numbers], part.left_out)
