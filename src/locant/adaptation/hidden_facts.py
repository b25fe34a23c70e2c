"""Retrieval of generated documents of any length, in the manner of LongEmbed (Zhu et al. 2024, arXiv 2404.12096).

    passkey   filler text with one sentence: "The pass key of … is 48213". The query asks for the pass key of a name.
    needle    prose of the user's with one sentence about a person. The query is a question about that person.

All documents of a length have the same number of tokens, and the sentence stands at a random place. The documents of a
collection differ in nothing else that helps a query, so a model that does not read the sentence scores by chance.
LongEmbed has 50 queries and 100 documents for each length from 256 to 32,768 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from locant.adaptation.retrieval import Collection
from locant.analysis.text import special_tokens

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Tokens of the documents in LongEmbed."""
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
FIRST = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Katya", "Leo", "Mira",
         "Nadia", "Oscar", "Petra", "Quentin", "Rosa", "Samir", "Tara", "Uma", "Viktor", "Wanda", "Yusuf",
         "Zoe")  # fmt: skip
LAST = ("Abbott", "Berger", "Castillo", "Dufour", "Eriksen", "Fontaine", "Grimaldi", "Haddad", "Ivanov", "Jensen",
        "Kowalski", "Lindqvist", "Moreau", "Nakamura", "Okafor", "Petrov", "Quinn", "Rossi", "Sato",
        "Tanaka")  # fmt: skip
FACTS = ("{} keeps bees on the roof of an old {} mill.", "{} won a {} medal for crossing a desert by bicycle.",
         "{} painted the {} ceiling of a railway station.", "{} repairs {} clocks that run backwards.",
         "{} wrote a dictionary of {} bird songs.", "{} sails a {} boat made of reeds.")  # fmt: skip
QUESTIONS = ("Where does {} keep bees?", "What medal did {} win?", "Which ceiling did {} paint?",
             "What clocks does {} repair?", "What did {} write a dictionary of?",
             "What boat does {} sail?")  # fmt: skip
WORDS = ("copper", "marble", "silver", "velvet", "cedar", "granite", "amber", "walnut", "crystal", "ivory")


def passkeys(tokenizer: Any, length: int, *, documents: int = 100, queries: int = 50, seed: int = 0) -> Collection:
    """Returns documents of `length` tokens, special tokens included, each with the pass key of one person."""
    draw, names = _people(documents, queries, seed)
    keys = [f"The pass key of {name} is {draw.randrange(10_000, 100_000)}. Remember it." for name in names]
    asked = tuple((f"What is the pass key of {name}?", number) for number, name in enumerate(names[:queries]))
    return Collection(tuple(_hidden(tokenizer, key, FILLER, length, draw) for key in keys), asked)


def needles(
    tokenizer: Any, text: str, length: int, *, documents: int = 100, queries: int = 50, seed: int = 0
) -> Collection:
    """Returns documents of `length` tokens of a text, special tokens included, each with a fact about one person."""
    if not text.strip():
        raise ValueError("the text around the needles is empty; pass some prose")
    draw, names = _people(documents, queries, seed)
    kinds = [draw.randrange(len(FACTS)) for _ in names]
    facts = [FACTS[kind].format(name, draw.choice(WORDS)) for kind, name in zip(kinds, names, strict=True)]
    asked = tuple((QUESTIONS[kinds[number]].format(names[number]), number) for number in range(queries))
    return Collection(tuple(_hidden(tokenizer, fact, text, length, draw) for fact in facts), asked)


def _people(documents: int, queries: int, seed: int) -> tuple[random.Random, Sequence[str]]:
    """Random numbers, and a name for each document; no two have the same."""
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    if not 2 <= documents <= len(names):
        raise ValueError(f"documents must be from 2 to {len(names)}, got {documents}")
    if not 1 <= queries <= documents:
        raise ValueError(f"queries must be from 1 to the {documents} documents, got {queries}")
    draw = random.Random(seed)
    draw.shuffle(names)
    return draw, names[:documents]


def _hidden(tokenizer: Any, sentence: str, filler: str, length: int, draw: random.Random) -> str:
    """A text of `length` tokens that starts at a random place of the filler and has the sentence at a random place."""
    before, after = special_tokens(tokenizer)
    room = length - len(before) - len(after) - _count(tokenizer, sentence)
    if room < 1:
        raise ValueError(f"documents of {length} tokens have no room for the sentence {sentence!r}; use more")
    words = filler.split()
    start = draw.randrange(len(words))
    around = [words[(start + at) % len(words)] for at in range(room)]  # a word has at least one token
    low, high = 0, len(around)
    while low < high:  # as many words as fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _count(tokenizer, " ".join(around[:middle])) <= room else (low, middle - 1)
    at = draw.randint(0, low)
    return " ".join([*around[:at], sentence, *around[at:low]])


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
