"""Language modelling from a text, causal (clm) and masked (mlm): trained at one length, tested at longer ones.

The test cuts the same tokens into windows of each length and scores the same tokens. So from length to length only the
available context differs. A scheme that generalises to longer inputs has a lower loss in longer windows; one that does
not has a higher one.

datasets, tokenizers and transformers are optional and take seconds to import: the functions that need them import them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from locant.experiments.presets import SCRATCH, Preset
from locant.experiments.tasks.rows import spread
from locant.experiments.tasks.task import TOKENS_AT_ONCE, Evaluation, Setting, Task, order, too_long
from locant.runs import text_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_TEXT = 2_000_000
"""Characters to train the tokenizer on: more take longer and improve it little."""
PIECE, PIECES = 20_000, 64
"""Maximum characters of a piece of text, and the number of pieces of a shorter text."""
BINS = 8
"""Parts per training length, for the loss by position."""


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a stream of tokens, in a given order."""

    def __init__(self, tokens: Any, length: int, starts: Tensor) -> None:
        # The Arrow column itself: reading single rows through datasets is slow next to the step of a small model.
        self.tokens, self.length, self.starts = tokens.data.column("token"), length, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        start = int(self.starts[number])
        return {"input_ids": torch.tensor(self.tokens.slice(start, self.length).to_numpy(), dtype=torch.long)}


class _Language(Task):
    metric = "loss"
    higher_is_better = False
    presets = SCRATCH

    def tokenizer(self, data: str | None, preset: Preset) -> PreTrainedTokenizerBase:
        """Returns a byte-level BPE tokenizer, trained on the text."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        text = text_source.text(data).train
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = {"eos_token": "<end>", "mask_token": "<mask>", "pad_token": "<pad>"}
        trainer = trainers.BpeTrainer(
            vocab_size=preset.vocabulary,
            special_tokens=list(special.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        # Evenly spaced pieces: the vocabulary fits the whole text.
        pieces = [text[at : at + 2000] for at in range(0, len(text), 2000)]
        step = max(1, len(text) // TOKENIZER_TEXT)
        tokenizer.train_from_iterator(pieces[::step], trainer)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)

    def prepare(self, data: str | None, setting: Setting, count: int) -> str:
        text, preset = text_source.text(data), setting.preset
        most = {"train": (text.train, count * preset.length), "test": (text.test, preset.evaluated)}
        counts = {
            part: _write_tokens(words, limit, setting.tokenizer, setting.folder / part)
            for part, (words, limit) in most.items()
        }
        needed = {"train": setting.preset.length, "test": setting.preset.length * setting.preset.longest}
        for part, least in needed.items():
            if counts[part] < least:
                sizes = f"length={preset.length}, longest={preset.longest}"
                if part == "test" and preset.evaluated < least:
                    raise ValueError(
                        f"the preset tests on {preset.evaluated:,} tokens (evaluated); one sequence of the longest "
                        f"test has {least:,} ({sizes}). Use evaluated={least} or more"
                    )
                raise ValueError(
                    f"{text.name} has {counts[part]:,} tokens to {part} on; it needs {least:,} for one sequence. Use a "
                    f"longer text, or change the preset: {sizes}"
                )
        some = " from all over" if counts["train"] >= count * preset.length else " of"  # a part, or all of it
        return f"{counts['train']:,} tokens{some} {text.name}, tested on {_tested(setting, counts['test']):,} others"

    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        tokens, length = _tokens(setting.folder / "train"), setting.preset.length
        return Windows(tokens, length, order(count, len(tokens) // length, seed) * length)

    @torch.no_grad()
    def evaluate(self, model: PreTrainedModel, setting: Setting) -> Iterator[Evaluation]:
        tokens, trained = _tokens(setting.folder / "test"), setting.preset.length
        longest = trained * setting.preset.longest
        # A multiple of the longest length: every length has the same tokens.
        tested = max(longest, _tested(setting, len(tokens)) // longest * longest)
        stream = torch.as_tensor(tokens[:tested]["token"], dtype=torch.long)
        length = trained
        while length <= longest:
            reason = too_long(model, length)
            if reason:
                yield Evaluation(length, refused=reason)
            else:
                yield self._at(model, setting, stream.view(-1, length))
            length *= 2

    def _at(self, model: PreTrainedModel, setting: Setting, windows: Tensor) -> Evaluation:
        length, device = windows.shape[1], next(model.parameters()).device
        total, count = (torch.zeros(length, dtype=torch.float64) for _ in range(2))
        for start, rows in _batches(windows):
            inputs, labels = self.inputs(setting, rows, start)
            logits = model(input_ids=inputs.to(device)).logits
            losses = F.cross_entropy(
                logits.float().flatten(0, 1), labels.to(device).flatten(), reduction="none", ignore_index=-100
            )
            total += losses.view(labels.shape).double().sum(0).cpu()
            count += (labels != -100).sum(0)
        step = max(1, setting.preset.length // BINS)
        bins = [(at, total[at : at + step].sum(), count[at : at + step].sum()) for at in range(0, length, step)]
        return Evaluation(
            length,
            {"loss": float(total.sum() / count.sum())},
            tuple((at, float(losses / number)) for at, losses, number in bins if number),
        )

    @abstractmethod
    def inputs(self, setting: Setting, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Returns test inputs [B, L] and the target of each position, −100 for none; `first` is the number of row 0."""


class Causal(_Language):
    """Predicts each token from those before it."""

    name = "clm"
    auto = "AutoModelForCausalLM"
    shape = "gpt2"

    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = torch.stack([example["input_ids"] for example in examples])
        return {"input_ids": ids, "labels": ids}  # the model shifts the labels itself

    def inputs(self, setting: Setting, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        # The first token of a window has no context. Longer windows leave out the same tokens as the shortest, so that
        # every length scores the same tokens.
        labels = F.pad(rows[:, 1:], (0, 1), value=-100).clone()
        labels[:, setting.preset.length - 1 :: setting.preset.length] = -100
        return rows, labels


class Masked(_Language):
    """Predicts masked tokens, 15 % of all, from those around them."""

    name = "mlm"
    auto = "AutoModelForMaskedLM"
    shape = "bert"

    def examples(self, setting: Setting, seed: int, count: int) -> Dataset[dict[str, Tensor]]:
        return MaskedWindows(super().examples(setting, seed, count), setting.tokenizer, seed)

    def collate(self, setting: Setting, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}

    def inputs(self, setting: Setting, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        # The seed depends on the place in the text, so every length masks the same tokens.
        mask = _Mask(setting.tokenizer)
        length, piece = rows.shape[1], setting.preset.length
        parts = rows.reshape(-1, piece)
        masked = [mask(part[None], seed=first * length // piece + number) for number, part in enumerate(parts)]
        inputs, labels = (torch.cat(each).view(rows.shape) for each in zip(*masked, strict=True))
        return inputs, labels


class MaskedWindows(Dataset[dict[str, Tensor]]):
    """Windows with masked tokens. The mask depends on the seed and the number of the example."""

    def __init__(self, windows: Dataset[dict[str, Tensor]], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.windows, self.mask, self.seed = windows, _Mask(tokenizer), seed

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        inputs, labels = self.mask(self.windows[number]["input_ids"][None], seed=self.seed * 1_000_003 + number)
        return {"input_ids": inputs[0], "labels": labels[0]}


class _Mask:
    """The masking of transformers, with a seed for each call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import DataCollatorForLanguageModeling

        if tokenizer.mask_token is None:
            raise ValueError("mlm needs a tokenizer with a mask token, and the model's has none; is it a causal model?")
        self.collator = DataCollatorForLanguageModeling(tokenizer)
        self.special = torch.tensor(tokenizer.all_special_ids)

    def __call__(self, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        self.collator.generator = torch.Generator().manual_seed(seed)
        return self.collator.torch_mask_tokens(ids.clone(), special_tokens_mask=torch.isin(ids, self.special))


def _batches(windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = max(1, TOKENS_AT_ONCE // windows.shape[1])
    for start in range(0, len(windows), step):
        yield start, windows[start : start + step]


def _tested(setting: Setting, there: int) -> int:
    return min(there, setting.preset.evaluated or there)


def _write_tokens(words: str, limit: int, tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """Tokenises a text, or evenly spaced pieces with about `limit` tokens or more (0: all); returns the count."""
    from datasets import Dataset as Table

    def encode(some: list[str]) -> list[list[int]]:
        return tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"] if some else []

    # Pieces end at the end of a line if possible. The tokenizer processes them in parallel.
    pieces, at, size = [], 0, min(PIECE, len(words) // PIECES + 1)
    while at < len(words):
        end = words.find("\n", at + size, at + 2 * size) + 1 or min(at + size, len(words))
        pieces.append(words[at:end])
        at = end
    sample = encode(pieces[:: max(1, len(pieces) // 8)])
    per_letter = sum(map(len, sample)) / max(1, sum(map(len, pieces[:: max(1, len(pieces) // 8)])))
    if limit and limit * 1.2 < per_letter * len(words):
        pieces = [pieces[at] for at in spread(len(pieces), int(1.2 * limit / per_letter / size) + 1)]
    rows = encode(pieces)
    tokens = numpy.concatenate([numpy.asarray(row, dtype=numpy.int32) for row in rows] or [numpy.zeros(0, "int32")])
    Table.from_dict({"token": tokens}).save_to_disk(str(folder))
    return len(tokens)


def _tokens(folder: Path) -> Any:
    from datasets import load_from_disk

    return load_from_disk(str(folder)).with_format("numpy")
