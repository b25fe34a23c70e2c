"""A tokenizer for models of 60 tokens, and a text in which order matters."""

import random

import torch

WORDS = [f"w{number}" for number in range(5, 60)]


class Tokenizer:
    """One token per word. Models of every family of `hf_models` know them."""

    pad_token_id, mask_token_id, eos_token_id = 1, 4, 2

    def __call__(self, text, add_special_tokens=True, **_):
        if isinstance(text, list):
            return {"input_ids": [self(each, add_special_tokens)["input_ids"] for each in text]}
        ids = [int(word[1:]) if word[:1] == "w" else 3 for word in text.replace(".", "").split()]
        return {"input_ids": [0, *ids, 2] if add_special_tokens else ids}

    def save_pretrained(self, folder):
        pass


class Letters(Tokenizer):
    """One token per letter."""

    def __call__(self, text, add_special_tokens=True, **_):
        if isinstance(text, list):
            return {"input_ids": [self(each, add_special_tokens)["input_ids"] for each in text]}
        ids = [5 + ord(letter) % 55 for letter in text if not letter.isspace()]
        return {"input_ids": [0, *ids, 2] if add_special_tokens else ids}


def text(lines: int = 300, seed: int = 0) -> list[str]:
    """Lines of sentences in which a word is followed by those near to it."""
    rng, found = random.Random(seed), []
    for _ in range(lines):
        at, words = rng.randrange(55), []
        for _ in range(rng.randrange(20, 40)):
            at = (at + rng.choice([1, 1, 2, 7])) % 55
            words.append(WORDS[at] + ("." if rng.random() < 0.15 else ""))
        found.append(" ".join(words))
    return found


def rows(count: int = 4, length: int = 24, seed: int = 5) -> torch.Tensor:
    return torch.randint(5, 60, (count, length), generator=torch.Generator().manual_seed(seed))
