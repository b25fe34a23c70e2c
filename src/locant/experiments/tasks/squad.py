"""SQuAD v1.1 (Rajpurkar et al. 2016, arXiv 1606.05250): find the part of a paragraph that answers a question.

Question and paragraph are one input. A longer paragraph is cut into windows that overlap by up to 128 tokens. In a
window without the answer, the target is the first token. The model is trained with windows of one length and tested
with longer ones, up to whole paragraphs: the inductive test of Huang et al. 2020 (arXiv 2009.13658).

The answer is the span with the highest sum of its start and end logits over all windows of a question: among the 20
best starts and the 20 best ends, inside the paragraph, at most 30 tokens long. Exact match and F1 are those of the
official script: without case, punctuation, articles and spaces, best over the answers of several people. torchmetrics
computes them. It differs in one case: if nothing is left of both texts, its F1 is 100, not 0. Three of the 10,570 test
questions have such an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.bootstrap import test_noise
from locant.experiments.presets import ANSWERS
from locant.experiments.tasks.rows import batches, fit, open_rows, pad, small, spread, training_rows, write_rows
from locant.experiments.tasks.task import Evaluation, Setting, Task, too_long
from locant.runs import text_source, untrusted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB = "rajpurkar/squad"
STRIDE, QUESTION = 128, 64
"""Maximum overlap of two windows and maximum length of a question, in tokens; both at most a third of the length."""
SHORTEST = 16
"""Minimum length: a window holds the question (a third), separators, and more of the paragraph than the overlap."""
BEST, ANSWER = 20, 30
"""Candidates for the start and for the end, and maximum tokens of an answer."""


@dataclass(frozen=True)
class Question:
    """A question, its paragraph and its answers."""

    id: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]  # text, and index of its first character in the paragraph

    def is_consistent(self) -> bool:
        """Whether the first answer, the training target, is at its index in the paragraph."""
        text, start = self.answers[0]
        return start >= 0 and self.context[start : start + len(text)] == text


class Squad(Task):
    """SQuAD v1.1."""

    name = "squad"
    metric = "f1"
    higher_is_better = True
    presets = ANSWERS
    auto = "AutoModelForQuestionAnswering"
    shape = "bert"

    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        preset = setting.preset
        if preset.length < SHORTEST:
            raise ValueError(
                f"squad needs a length of at least {SHORTEST} for a question and a part of its paragraph; got "
                f"{preset.length}"
            )
        if 0 < preset.also < preset.length:
            raise ValueError(f"also is a test length of at least the trained {preset.length} tokens; got {preset.also}")
        train, test, where = _read(data)
        there = [question for question in train if question.is_consistent()]
        if not there:
            raise ValueError(f"{where}: none of {len(train):,} answers is at its answer_start in the paragraph")
        trained = [there[at] for at in spread(len(there), count)]
        tested = [test[at] for at in spread(len(test), preset.evaluated)]
        fit(setting.tokenizer)
        windows = Windows(setting.tokenizer, preset.length)
        features = write_rows(setting.folder / "train.arrow", _columns(trained), windows.to_train)
        for length in self._lengths(setting):
            windows = Windows(setting.tokenizer, length)
            write_rows(setting.folder / f"test-{length}.arrow", _columns(tested), windows.to_test)
        _write_questions(setting.folder / "questions.arrow", tested)
        about = f"{len(there):,} questions of {where}, tested on {len(tested):,} others"
        if features > len(trained):
            about += f"; training uses {features:,} windows of {len(trained):,} of them"
        if len(there) < len(train):
            about += f"; {len(train) - len(there):,} are left out: their answer is not at its answer_start"
        return about

    def _lengths(self, setting: Setting) -> list[int]:
        """Returns the test lengths, the trained one first: its doublings, and `also` of the preset."""
        preset = setting.preset
        found = [preset.length << doublings for doublings in range(preset.longest.bit_length())]
        return sorted({*found, *([preset.also] if preset.also > preset.length else [])})

    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        return training_rows(open_rows(setting.folder / "train.arrow"), count, setting.preset.batch, seed)

    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ends = {
            name: torch.stack([example[name] for example in examples]) for name in ("start_positions", "end_positions")
        }
        return {**pad(setting.tokenizer, examples), **ends}

    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        for length in self._lengths(setting):
            reason = too_long(model, length)
            if reason:
                yield Evaluation(length, refused=reason)
            else:
                values, noise = self._test(model, setting, length)
                yield Evaluation(length, values, noise=noise)

    @torch.no_grad()
    def _test(self, model: PreTrainedModel, setting: Setting, length: int) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the scores on inputs of one length, and their noise."""
        questions, device = open_rows(setting.folder / "questions.arrow"), next(model.parameters()).device
        best = [Span(-torch.inf, 0, 0)] * len(questions)
        for _, rows in batches(open_rows(setting.folder / f"test-{length}.arrow")):
            inputs = {name: value.to(device) for name, value in pad(setting.tokenizer, rows).items()}
            found = model(**inputs)
            for row, span in zip(rows, spans(found.start_logits, found.end_logits, rows), strict=True):
                best[row["question"]] = max(best[row["question"]], span, key=lambda span: span.score)
        each = score_each(questions, best)
        return mean_scores(each), test_noise(lambda at: mean_scores([each[number] for number in at]), len(each))


# ---- windows --------------------------------------------------------------------------------------


class Windows:
    """Cuts questions with their paragraphs into inputs of at most `length` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                "squad needs a fast tokenizer, which returns the place of each token in the text; the model's is slow"
            )
        self.tokenizer, self.length = tokenizer, length

    def to_train(self, some: dict[str, list[Any]]) -> dict[str, Any]:
        """Returns inputs, and the first and last token of the answer."""
        found, offsets = self._cut(some)
        starts, ends = [], []
        for ids, source_row, places in zip(
            found["input_ids"], found["overflow_to_sample_mapping"], offsets, strict=True
        ):
            first, text = some["start"][source_row], some["answer"][source_row]
            start, end = _tokens_of(places, first, first + len(text))
            nowhere = ids.index(self.tokenizer.cls_token_id) if self.tokenizer.cls_token_id in ids else 0
            starts.append(nowhere if start is None else start)
            ends.append(nowhere if end is None else end)
        return {**self._inputs(found), "start_positions": starts, "end_positions": ends}

    def to_test(self, some: dict[str, list[Any]]) -> dict[str, Any]:
        """Returns inputs, the number of their question, and the place of each token in the paragraph, −1 outside."""
        found, offsets = self._cut(some)
        rows = [some["number"][row] for row in found["overflow_to_sample_mapping"]]
        starts, ends = ([[place[side] for place in places] for places in offsets] for side in (0, 1))
        return {**self._inputs(found), "question": rows, "starts": small(starts), "ends": small(ends)}

    def _cut(self, some: dict[str, list[Any]]) -> tuple[Any, list[list[tuple[int, int]]]]:
        part = self.length // 3
        found = self.tokenizer(
            self._shortened(some["question"], min(QUESTION, part)), some["context"], truncation="only_second",
            max_length=self.length, stride=min(STRIDE, part), return_overflowing_tokens=True,
            return_offsets_mapping=True, return_attention_mask=False, verbose=False,
        )  # fmt: skip
        offsets = [
            [place if of == 1 else (-1, -1) for place, of in zip(places, found.sequence_ids(row), strict=True)]
            for row, places in enumerate(found["offset_mapping"])
        ]
        return found, offsets

    def _shortened(self, questions: list[str], most: int) -> list[str]:
        """Cuts questions to `most` tokens: the paragraph needs the rest."""
        stripped = [question.strip() for question in questions]  # some begin with spaces
        places = self.tokenizer(
            stripped, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        return [
            text[: place[most - 1][1]] if len(place) > most else text
            for text, place in zip(stripped, places, strict=True)
        ]

    @staticmethod
    def _inputs(found: Any) -> dict[str, Any]:
        return {name: small(found[name]) for name in ("input_ids", "token_type_ids") if name in found}


def _tokens_of(places: list[tuple[int, int]], first: int, end: int) -> tuple[int | None, int | None]:
    """Returns the first and last token of the characters [first, end); None where the window lacks some of them."""
    inside = [at for at, (start, _) in enumerate(places) if start >= 0]
    if not inside or places[inside[0]][0] > first or places[inside[-1]][1] < end:
        return None, None
    touched = [at for at in inside if places[at][0] < end and places[at][1] > first]
    return (touched[0], touched[-1]) if touched else (None, None)


# ---- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A part of a paragraph: its characters [start, end)."""

    score: float
    start: int
    end: int


def spans(start_logits: Tensor, end_logits: Tensor, rows: Sequence[dict[str, Any]]) -> Iterator[Span]:
    """Yields the best span of each window; an empty one with score −∞ where there is none."""
    starts, ends = start_logits.float().cpu(), end_logits.float().cpu()
    if not bool(starts.isfinite().all() & ends.isfinite().all()):
        raise ValueError("the outputs of the model contain NaN or infinity, so they have no score")
    outside = torch.ones(starts.shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        outside[number, : len(row["starts"])] = torch.tensor(row["starts"]) < 0
    count = min(BEST, starts.shape[1])
    start, first = starts.masked_fill(outside, -torch.inf).topk(count)
    end, last = ends.masked_fill(outside, -torch.inf).topk(count)
    sums = start[:, :, None] + end[:, None, :]
    tokens = last[:, None, :] - first[:, :, None] + 1
    best, at = sums.masked_fill((tokens < 1) | (tokens > ANSWER), -torch.inf).flatten(1).max(1)
    for number, row in enumerate(rows):
        if best[number] == -torch.inf:
            yield Span(-torch.inf, 0, 0)
            continue
        one, other = divmod(int(at[number]), count)
        yield Span(float(best[number]), row["starts"][first[number, one]], row["ends"][last[number, other]])


def score(questions: Any, best: Sequence[Span]) -> dict[str, float]:
    """Returns exact match and F1 of the answers, in per cent."""
    return mean_scores(score_each(questions, best))


def mean_scores(each: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean over questions of each score."""
    return {name: math.fsum(scores[name] for scores in each) / len(each) for name in ("exact_match", "f1")}


def score_each(questions: Any, best: Sequence[Span]) -> list[dict[str, float]]:
    """Returns exact match and F1 of each answer, in per cent."""
    from torchmetrics.functional.text.squad import squad  # optional, and takes a second

    # torchmetrics adds the scores of several questions in single precision: over the 10,570 test questions F1 is then
    # off by 0.002. So it gets one question at a time.
    found = []
    for question, span in zip(questions, best, strict=True):
        predicted = {"id": question["id"], "prediction_text": question["context"][span.start : span.end]}
        answers = {"id": question["id"], "answers": {"text": question["answers"], "answer_start": []}}
        found.append({name: float(value) for name, value in squad(predicted, answers).items()})
    return found


# ---- files ----------------------------------------------------------------------------------------


def _read(data: str | None) -> tuple[list[Question], list[Question], str]:
    """Returns training questions, test questions and their source."""
    path = None if data is None else Path(data)
    if path is not None and path.is_dir():
        train, test = (_questions(file := _find(path, name), _articles(file)) for name in ("train", "dev"))
    elif path is not None and path.is_file():
        train, test = _held_out(path)
    elif path is not None and (str(data).startswith((".", "/", "~")) or path.suffix):
        raise FileNotFoundError(f"there is no file or folder {data}")
    else:
        train, test = _hub(data or HUB)
    return train, test, data or HUB


def _find(folder: Path, name: str) -> Path:
    """Returns the file of a part, such as train-v1.1.json; of several, that of v1.1."""
    endings = tuple(f".json{suffix}" for suffix in ("", *text_source.OPENERS))
    found = sorted(file for file in folder.glob(f"{name}*") if file.is_file() and file.name.endswith(endings))
    chosen = [file for file in found if "v1.1" in file.name] if len(found) > 1 else found
    if len(chosen) != 1:
        there = ", ".join(file.name for file in chosen or found) or "none"
        raise FileNotFoundError(
            f"{folder} must have one file {name}*.json (or .json.xz, .json.gz), for instance {name}-v1.1.json; it has: "
            f"{there}"
        )
    return chosen[0]


def _articles(path: Path) -> list[Any]:
    articles = untrusted.parse_object(text_source.read_bytes(path), str(path)).get("data")
    if not isinstance(articles, list):
        raise ValueError(f"{path} is not in the format of SQuAD: it has no list 'data' of articles")
    if not articles:
        raise ValueError(f"{path} is empty: it has no articles")
    return articles


def _held_out(path: Path) -> tuple[list[Question], list[Question]]:
    """Splits one file: every 20th article is held out for testing; of few articles, every 20th paragraph."""
    pieces = _articles(path)
    if len(pieces) < text_source.HELD_OUT:
        _questions(path, pieces)  # raises if they are malformed
        pieces = [{"paragraphs": [paragraph]} for article in pieces for paragraph in article["paragraphs"]]
    if len(pieces) < text_source.HELD_OUT:
        raise ValueError(
            f"{path} has {len(pieces)} paragraphs; it needs at least {text_source.HELD_OUT} to hold some out for "
            f"testing. Name a folder with train-v1.1.json and dev-v1.1.json"
        )
    kept = [piece for number, piece in enumerate(pieces, 1) if number % text_source.HELD_OUT]
    return _questions(path, kept), _questions(path, pieces[text_source.HELD_OUT - 1 :: text_source.HELD_OUT])


def _questions(path: Path, articles: list[Any]) -> list[Question]:
    found: list[Question] = []
    try:
        for paragraph in chain.from_iterable(article["paragraphs"] for article in articles):
            for each in paragraph["qas"]:
                answers = tuple((str(answer["text"]), int(answer["answer_start"])) for answer in each["answers"])
                found.append(Question(str(each["id"]), str(each["question"]), str(paragraph["context"]), answers))
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        after = f"after question {found[-1].id}" if found else "at the first question"
        raise ValueError(f"{path} is not in the format of SQuAD v1.1: {problem!r} {after}") from None
    return _checked(found, str(path))


def _hub(name: str) -> tuple[list[Question], list[Question]]:
    from datasets import load_dataset  # optional, and takes seconds

    try:
        parts = load_dataset(name)
    except Exception as problem:  # datasets raises a different class for offline, unknown and gated data sets
        raise ValueError(
            f"{name} is not a file or folder, and it cannot be loaded from the Hugging Face hub: {problem}. Name a "
            f"folder with train-v1.1.json and dev-v1.1.json"
        ) from None
    columns = {"id", "question", "context", "answers"}
    for part in ("train", "validation"):
        if part not in parts or not columns <= {*parts[part].column_names}:
            raise ValueError(f"{name} must have a part {part!r} with {', '.join(sorted(columns))}; got {parts}")

    def read(part: str) -> list[Question]:
        return _checked(
            [
                Question(
                    row["id"], row["question"], row["context"],
                    tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
                )
                for row in parts[part]
            ],
            f"{name}, {part}",
        )  # fmt: skip

    return read("train"), read("validation")


def _checked(questions: list[Question], where: str) -> list[Question]:
    if not questions:
        raise ValueError(f"{where} has no questions")
    without = [question.id for question in questions if not question.answers]
    if without:
        raise ValueError(
            f"{where}: {len(without):,} of {len(questions):,} questions have no answer, such as {without[0]}. In SQuAD "
            f"v1.1 all have one; is it a file of v2.0?"
        )
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(f"{where} has question {question.id} twice")
        seen.add(question.id)
    return questions


def _columns(questions: list[Question]) -> dict[str, list[Any]]:
    read: dict[str, Callable[[Question], Any]] = {
        "question": lambda question: question.text,
        "context": lambda question: question.context,
        "answer": lambda question: question.answers[0][0],
        "start": lambda question: question.answers[0][1],
    }
    columns = {name: [of(question) for question in questions] for name, of in read.items()}
    return {**columns, "number": list(range(len(questions)))}


def _write_questions(path: Path, questions: list[Question]) -> None:
    columns: dict[str, list[Any]] = {
        "id": [question.id for question in questions],
        "context": [question.context for question in questions],
        "answers": [[text for text, _ in question.answers] for question in questions],
    }
    write_rows(path, columns, lambda some: dict(some))
