"""Puzzles with one right answer, generated on demand: trained at small sizes, tested at larger ones.

    copy       b c a =              b c a
    reverse    b c a =              a c b
    sort       b c a =              a b c
    addition   2 9 + 1 8 =          3 7 1       92 + 81 = 173, two numbers of `size` digits, the lowest first
    parity     1 0 1 1 =            1           whether the number of ones is odd
    passkey    x y key 4 0 7 1 3 z =  4 0 7 1 3   five digits hidden in `size` letters (Mohtashami and Jaggi 2023)

Training uses sizes 1 to L. Tests use L, 2L, 4L, …, with examples of exactly that size; `length` in the results is a
size.

The digits of `addition` begin with the lowest. A digit of the sum then needs two digits of the question and the carry
of the digit before. With the highest digit first, the first digit of the sum would need all digits (Lee et al. 2023,
arXiv 2307.03381). We compare positions, not carries.

The loss covers the answer only. The length of the answer follows from the size, so the model does not have to learn
where to stop, which is a problem of its own (Newman et al. 2020, arXiv 2010.07174).

`exact` is the share of answers in which every token is the model's first choice, given the correct tokens before it.
Greedy decoding gets the same share right: as long as all tokens so far are correct, both have the same input. It takes
one forward pass, and decoding takes one per token. `token` is the share of correct tokens, given correct tokens before.

There are few puzzles of the smallest sizes, and they repeat often. At size 16 almost none repeats, except for `parity`,
which has 65,536.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from locant.experiments.bootstrap import test_noise
from locant.experiments.presets import PUZZLE, Preset
from locant.experiments.tasks.task import TOKENS_AT_ONCE, Evaluation, Setting, Task, too_long

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, ASK, PLUS, KEY = "<pad>", "=", "+", "key"
DIGITS, LETTERS = string.digits, string.ascii_lowercase
VOCABULARY = {token: number for number, token in enumerate((PAD, ASK, PLUS, KEY, *DIGITS, *LETTERS))}
KEY_DIGITS = 5
TRAINING, TESTING = 0, 1
"""First number of the random seed: test examples differ from the training examples of every seed."""

Made = tuple[list[str], list[str]]
"""The tokens of a question, up to and including its `=`, and of its answer."""


def _pick(random: Any, symbols: str, count: int) -> list[str]:
    return [symbols[at] for at in random.integers(len(symbols), size=count)]


def _copy(random: Any, size: int) -> Made:
    letters = _pick(random, LETTERS, size)
    return [*letters, ASK], letters


def _reverse(random: Any, size: int) -> Made:
    letters = _pick(random, LETTERS, size)
    return [*letters, ASK], letters[::-1]


def _sort(random: Any, size: int) -> Made:
    letters = _pick(random, LETTERS, size)
    return [*letters, ASK], sorted(letters)


def _addition(random: Any, size: int) -> Made:
    one, other = (_pick(random, DIGITS, size) for _ in range(2))
    total = sum(int("".join(reversed(digits))) for digits in (one, other))
    return [*one, PLUS, *other, ASK], list(reversed(f"{total:0{size + 1}d}"))


def _parity(random: Any, size: int) -> Made:
    bits = _pick(random, "01", size)
    return [*bits, ASK], [str(bits.count("1") % 2)]


def _passkey(random: Any, size: int) -> Made:
    letters, key = _pick(random, LETTERS, size), _pick(random, DIGITS, KEY_DIGITS)
    at = int(random.integers(size + 1))
    return [*letters[:at], KEY, *key, *letters[at:], ASK], key


@dataclass(frozen=True)
class Puzzle:
    """How to generate a puzzle of one size, and how long it is."""

    make: Callable[[Any, int], Made]
    tokens: Callable[[int], int]  # size -> tokens of question and answer


PUZZLES: dict[str, Puzzle] = {
    "copy": Puzzle(_copy, lambda size: 2 * size + 1),
    "reverse": Puzzle(_reverse, lambda size: 2 * size + 1),
    "sort": Puzzle(_sort, lambda size: 2 * size + 1),
    "addition": Puzzle(_addition, lambda size: 3 * size + 3),
    "parity": Puzzle(_parity, lambda size: size + 2),
    "passkey": Puzzle(_passkey, lambda size: size + 2 * KEY_DIGITS + 2),
}


def problem(puzzle: str, *numbers: int, size: int | None = None, largest: int = 0) -> Made:
    """Returns the puzzle for a random seed of several numbers; without a size, of a random size up to `largest`."""
    random = numpy.random.default_rng(numbers)
    return PUZZLES[puzzle].make(random, int(random.integers(1, largest + 1)) if size is None else size)


def encoded(made: Made) -> dict[str, Tensor]:
    """Returns token numbers, and labels that are −100 outside of the answer."""
    question, answer = ([VOCABULARY[token] for token in tokens] for tokens in made)
    return {
        "input_ids": torch.tensor(question + answer),
        "labels": torch.tensor([-100] * len(question) + answer),
    }


class Problems(Dataset[dict[str, Tensor]]):
    """Training puzzles."""

    def __init__(self, puzzle: str, seed: int, largest: int, count: int) -> None:
        self.puzzle, self.seed, self.largest, self.count = puzzle, seed, largest, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        return encoded(problem(self.puzzle, TRAINING, self.seed, number, largest=self.largest))


class Algo(Task):
    """One of the puzzles, by its name."""

    metric = "exact"
    higher_is_better = True
    presets = PUZZLE
    auto = "AutoModelForCausalLM"
    shape = "gpt2"

    def __init__(self, puzzle: str) -> None:
        self.name, self.puzzle = f"algo:{puzzle}", puzzle

    def positions(self, preset: Preset) -> int:
        return PUZZLES[self.puzzle].tokens(preset.length)

    def tokenizer(self, data: str | None, preset: Preset) -> PreTrainedTokenizerBase:
        """Returns a tokenizer with one token per symbol; symbols stand between spaces."""
        # optional, and take seconds
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        self._no(data)
        tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, model_input_names=["input_ids", "attention_mask"]
        )

    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        self._no(data)
        if setting.tokenizer.get_vocab() != VOCABULARY:
            raise ValueError(
                f"{self.name} has a vocabulary of its own, and the tokenizer of the model has another: name no model, "
                f"a shape (gpt2, llama), or a model that was trained on a puzzle"
            )
        if setting.preset.evaluated < 1:
            raise ValueError(f"{self.name} generates any number of examples: evaluated must be at least 1")
        sizes = [str(size) for size in self._sizes(setting)]
        return f"{self.puzzle}, generated on demand: sizes 1 to {sizes[0]}, tested at {', '.join(sizes)}"

    def _no(self, data: str | None) -> None:
        if data is not None:
            raise ValueError(f"{self.name} generates its examples and reads no data; got {data}")

    def _sizes(self, setting: Setting) -> Iterator[int]:
        size = setting.preset.length
        while size <= setting.preset.length * setting.preset.longest:
            yield size
            size *= 2

    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        return Problems(self.puzzle, seed, setting.preset.length, count)

    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        def padded(name: str, value: int) -> Tensor:
            return pad_sequence([example[name] for example in examples], batch_first=True, padding_value=value)

        # No puzzle contains the padding token, so it marks padding.
        ids = padded("input_ids", VOCABULARY[PAD])
        return {
            "input_ids": ids,
            "attention_mask": (ids != VOCABULARY[PAD]).long(),
            "labels": padded("labels", -100),
        }

    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        for size in self._sizes(setting):
            tokens = PUZZLES[self.puzzle].tokens(size)
            reason = too_long(model, tokens)
            if reason:
                yield Evaluation(size, refused=f"{reason}, and this has {tokens} tokens")
            else:
                values, noise = self._test(model, size, setting.preset.evaluated)
                yield Evaluation(size, values, noise=noise)

    @torch.no_grad()
    def _test(self, model: PreTrainedModel, size: int, count: int) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the scores on puzzles of one size, and their noise."""
        # optional, and takes a second
        from torchmetrics.functional.classification import multiclass_accuracy, multiclass_exact_match

        device, predicted, answers = next(model.parameters()).device, [], []
        step = max(1, TOKENS_AT_ONCE // PUZZLES[self.puzzle].tokens(size))
        for start in range(0, count, step):
            made = [problem(self.puzzle, TESTING, size, at, size=size) for at in range(start, min(start + step, count))]
            # Puzzles of one size have one length: there is no padding.
            ids = torch.stack([encoded(each)["input_ids"] for each in made])
            answer = len(made[0][1])
            logits = model(input_ids=ids.to(device)).logits[:, -answer - 1 : -1].float().cpu()
            if not bool(logits.isfinite().all()):
                raise ValueError("the outputs of the model contain NaN or infinity, so they have no score")
            predicted.append(logits.argmax(-1))
            answers.append(ids[:, -answer:])
        found, wanted, classes = torch.cat(predicted), torch.cat(answers), len(VOCABULARY)
        values = {
            "exact": float(multiclass_exact_match(found, wanted, classes)),
            "token": float(multiclass_accuracy(found, wanted, classes, average="micro")),
        }
        right = (found == wanted).double()
        each = {"exact": right.amin(1), "token": right.mean(1)}
        return values, test_noise(lambda at: {name: float(of[at].mean()) for name, of in each.items()}, len(right))
