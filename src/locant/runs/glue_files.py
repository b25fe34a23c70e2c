"""Reads the files of the GLUE download: a folder per task with train.tsv and dev.tsv, plain or compressed.

Fields stand between tabs, and quotation marks have no meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from locant.runs import text_source

MALFORMED = 0.01
"""QQP may have this fraction of lines with too few or too many fields: the official file has a few."""
BINARY, ENTAILMENT = ("0", "1"), ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class Format:
    """The files and columns of one task."""

    texts: tuple[str, ...]  # columns with texts
    label: str  # column with the label
    labels: tuple[str, ...]  # in the order of the hub; none for a number from 0 to 5
    header: bool = True  # CoLA has none: its columns are named by their number
    fields: int = 0  # of a line without a header
    tests: Mapping[str, str] | None = None  # file -> part of the hub, where there are two
    forgiving: bool = False  # leave out a few malformed lines


FORMATS: dict[str, Format] = {
    "CoLA": Format(("3",), "1", BINARY, header=False, fields=4),
    "SST-2": Format(("sentence",), "label", BINARY),
    "MRPC": Format(("#1 String", "#2 String"), "Quality", BINARY),
    "STS-B": Format(("sentence1", "sentence2"), "score", ()),
    "RTE": Format(("sentence1", "sentence2"), "label", ENTAILMENT),
    "QNLI": Format(("question", "sentence"), "label", ENTAILMENT),
    "WNLI": Format(("sentence1", "sentence2"), "label", BINARY),
    "MNLI": Format(
        ("sentence1", "sentence2"),
        "gold_label",
        INFERENCE,
        tests={"dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"},
    ),
    "QQP": Format(("question1", "question2"), "is_duplicate", BINARY, forgiving=True),
}


@dataclass(frozen=True)
class Part:
    """The lines of one file: one list of texts per column, and the labels."""

    texts: tuple[list[str], ...]
    labels: list[float]
    left_out: int = 0  # malformed lines


def tests_of(task: str) -> Mapping[str, str]:
    """Returns the test files of a task -> their part of the hub data set."""
    return FORMATS[task].tests or {"dev": "validation"}


def read_folder(task: str, path: Path) -> tuple[dict[str, Part], Path]:
    """Returns the parts of a task by file name, `train` first, and the folder they are in."""
    folder = _folder(task, path)
    return {name: read_file(task, _find(folder, name)) for name in ("train", *tests_of(task))}, folder


def read_dev(task: str, data: str) -> Part:
    """Returns the test part of a task, from its folder or the folder of all of GLUE."""
    path = Path(data)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {data}")
    return read_file(task, _find(_folder(task, path), next(iter(tests_of(task)))))


def read_file(task: str, path: Path) -> Part:
    """Returns the lines of one file; ValueError names the first line that is wrong."""
    layout, lines = FORMATS[task], text_source.read(path).removeprefix("\ufeff").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    header = lines[0].split("\t") if layout.header and lines else [str(number) for number in range(layout.fields)]
    first = 2 if layout.header else 1
    if len(lines) < first:
        raise ValueError(f"{path} is empty: it has no line of glue:{task}")
    missing = [name for name in (*layout.texts, layout.label) if name not in header]
    if missing:
        raise ValueError(f"{path} has no column {listed(missing)}: its first line has {listed(header)}")
    rows = [(number, line.split("\t")) for number, line in enumerate(lines[first - 1 :], first)]
    at, texts = header.index(layout.label), [header.index(name) for name in layout.texts]
    malformed = [(number, row) for number, row in rows if len(row) != len(header)]
    if malformed and not (layout.forgiving and len(malformed) <= max(1, MALFORMED * len(rows))):
        number, row = malformed[0]
        raise ValueError(
            f"{path}: {len(malformed):,} of {len(rows):,} lines do not have {len(header)} fields between tabs; the "
            f"first is line {number}, with {len(row)}: {_shortened(chr(9).join(row))}"
        )
    rows = [(number, row) for number, row in rows if len(row) == len(header)]
    labels = [_label(task, row[at], f"{path}, line {number}") for number, row in rows]
    return Part(tuple([row[column] for _, row in rows] for column in texts), labels, len(malformed))


def listed(names: Iterable[str]) -> str:
    """Returns names in quotation marks, with commas."""
    return ", ".join(repr(name) for name in names)


def _folder(task: str, path: Path) -> Path:
    """Returns the folder of a task, given it or the folder of all of GLUE."""
    inside = [each for each in path.iterdir() if each.is_dir() and each.name.lower() == task.lower()]
    if not inside and not list(path.glob("*.tsv*")):
        there = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"{path} has neither a folder {task} nor files such as train.tsv; there is: {there}")
    return inside[0] if inside else path


def _find(folder: Path, name: str) -> Path:
    for suffix in ("", *text_source.OPENERS):
        path = folder / f"{name}.tsv{suffix}"
        if path.is_file():
            return path
    there = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
    raise FileNotFoundError(f"{folder} has no {name}.tsv (nor {name}.tsv.xz, {name}.tsv.gz); there is: {there}")


def _label(task: str, text: str, where: str) -> float:
    labels = FORMATS[task].labels
    if labels:
        if text not in labels:
            raise ValueError(f"{where}: the label is {text!r}; glue:{task} has {', '.join(labels)}")
        return labels.index(text)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 5:
        raise ValueError(f"{where}: the score is {text!r}; glue:{task} has numbers from 0 to 5")
    return score


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
