"""How long a reproduction takes, by a formula: floating-point operations over the speed of a machine.

    operations of training   6 · parameters · tokens + 12 · layers · width · length · tokens      (Kaplan et al. 2020)
    operations of testing    a third of that

Parameters are those that multiply a token: 12 · layers · width², and width · vocabulary for a language model. The
estimate is of the order of the truth and no better.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from locant.runs.float32_products import fast_products

GPU = 312e12 * 0.3
"""Operations per second of one A100 in bfloat16 at 30 % of its peak, for the estimate of the preset `paper`."""
EFFICIENCY = 0.5
"""Share of the speed of a matrix product that the training of a small model reaches on a CPU. Measured with batches of
1,000 to 2,000 tokens: 0.38 (3 layers of 96), 0.42 (4 of 128), 0.6 (4 of 256), 0.76 (6 of 384); with oneDNN 0.49 (4 of
192), 0.58 (6 of 384)."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide the cost of a token."""

    layers: int
    width: int
    vocabulary: int = 0  # of a language model's output; 0 for other heads

    @property
    def parameters(self) -> int:
        """Parameters that multiply a token."""
        return 12 * self.layers * self.width**2 + self.width * self.vocabulary

    def training(self, tokens: float, length: int) -> float:
        """Returns the operations of training on `tokens` tokens in sequences of `length`."""
        return 6 * self.parameters * tokens + 12 * self.layers * self.width * length * tokens

    def reading(self, tokens: float, length: int) -> float:
        """Returns the operations of a forward pass over `tokens` tokens."""
        return self.training(tokens, length) / 3

    def memory(self, tokens: int, length: int) -> int:
        """Returns the bytes of training: weights, gradients, two moments, and the activations of a batch."""
        parameters = self.parameters + self.width * self.vocabulary
        kept = self.layers * tokens * 34 * self.width + tokens * self.vocabulary * 3
        return 4 * (4 * parameters + kept)


def shape_of(folder: Path) -> Shape:
    """Returns the shape of a pretrained model, from its config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("locant", config)
    return Shape(
        int(config.get("num_hidden_layers") or config.get("n_layer") or 12),
        int(config.get("hidden_size") or config.get("n_embd") or 768),
    )


@cache
@fast_products()
def machine_speed() -> float:
    """Returns the operations per second of one core in training, from a matrix product of 0.2 s."""
    if torch.cuda.is_available():
        return GPU
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = torch.randn(512, 512)
        one @ one
        start, count = time.process_time(), 0  # of this process: other work on the machine does not count
        while time.process_time() - start < 0.2:
            one @ one
            count += 1
        return EFFICIENCY * count * 2 * 512**3 / (time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
