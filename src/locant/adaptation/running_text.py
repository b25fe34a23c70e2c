"""Documents and queries from running text without labels.

A document is a run of consecutive lines. Spans of it, a sentence or two to four consecutive ones, are removed and
become its queries. Runs that follow one another in the text are alike, and so are hard negatives for each other's
queries.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from locant.adaptation.sample import Sampler, Text

SHORTEST_SHARE = 4
"""The shortest documents have 1/4 of the tokens of the longest."""
QUERIES = 3
"""Most queries of a document."""
REMOVED_SHARE = 0.5
"""Most tokens that are removed from a document."""
SHORTEST_QUERY = 8
"""Tokens of the shortest queries: "Yes, he said." could be from anywhere."""
SPANS = (1, 1, 1, 2, 3, 4)
"""Numbers of sentences of a query, equally probable."""
TRIES = 4
"""How often a span or a place is drawn for each that is wanted. Some do not fit."""

Sentence = list[int]


@dataclass(frozen=True)
class Document:
    """A document without its queries, and the queries; all as tokens, with the special tokens of the model."""

    tokens: list[int]
    queries: tuple[list[int], ...]
    lines: tuple[int, int]  # the first line, and the one after the last


class RunningText:
    """Draws documents of up to `length` tokens from the lines of a text."""

    def __init__(self, tokenizer: Any, text: Text, length: int) -> None:
        self.sampler = Sampler(tokenizer, text)
        self.room = length - len(self.sampler.before) - len(self.sampler.after)

    def draw(self, rng: random.Random, places: int, neighbours: int) -> list[Document]:
        """Returns documents from random places of the text, several that follow one another from each place.

        No two have a line in common; a small text may have room for fewer.
        """
        lines = len(self.sampler.lines)
        used: set[int] = set()
        found: list[Document] = []
        for _ in range(places * TRIES):
            group = self._neighbours(rng, rng.randrange(lines), neighbours)
            read = range(group[0].lines[0], group[-1].lines[1])
            if len(group) == neighbours and used.isdisjoint(read):
                found += group
                used.update(read)
            if len(found) == places * neighbours:
                break
        return found

    def partition(self, rng: random.Random) -> list[Document]:
        """Returns the whole text as documents, in order, without overlap."""
        return self._neighbours(rng, 0, len(self.sampler.lines))

    def _neighbours(self, rng: random.Random, start: int, count: int) -> list[Document]:
        """Documents that follow one another; fewer at the end of the text."""
        found: list[Document] = []
        while len(found) < count and start < len(self.sampler.lines):
            found.append(self._document(rng, start))
            start = found[-1].lines[1]
        return found

    def _document(self, rng: random.Random, start: int) -> Document:
        room = rng.randint(max(1, self.room // SHORTEST_SHARE), max(1, self.room))
        sentences, end = self._run(start, room)
        spans = _spans(rng, sentences)
        removed = {number for span in spans for number in span}
        again = {tuple(sentences[number]) for number in removed}
        # A sentence that the text repeats would still show which document a query is from.
        rest = [token for number, sentence in enumerate(sentences)
                if number not in removed and tuple(sentence) not in again for token in sentence]  # fmt: skip
        queries = [[token for number in span for token in sentences[number]] for span in spans] if rest else []
        if not rest:
            rest = [token for sentence in sentences for token in sentence]
        return Document(self._whole(rest), tuple(map(self._whole, queries)), (start, end))

    def _whole(self, tokens: list[int]) -> list[int]:
        return [*self.sampler.before, *tokens, *self.sampler.after]

    def _run(self, start: int, room: int) -> tuple[list[Sentence], int]:
        """Returns the sentences from a line on that fit into `room` tokens, and the line after the last of them."""
        found: list[Sentence] = []
        used, end = 0, start + 1
        for line, sentence in self._sentences(start):
            if found and used + len(sentence) > room:
                break
            found.append(sentence[:room])
            used, end = used + len(sentence), line + 1  # the rest of a line that was begun belongs to no document
        return found, end

    def _sentences(self, start: int) -> Iterator[tuple[int, Sentence]]:
        """Yields the sentences from a line on, with the number of their line."""
        for line in range(start, len(self.sampler.lines)):
            for sentence in self.sampler.split(self.sampler.lines[line]):
                yield line, sentence


def _spans(rng: random.Random, sentences: list[Sentence]) -> list[range]:
    """Draws spans of sentences that do not overlap, which may be removed from a document."""
    tokens = sum(map(len, sentences))
    spans: list[range] = []
    removed = 0
    for _ in range(QUERIES * TRIES):
        size = rng.choice(SPANS)
        first = rng.randrange(max(1, len(sentences) - size + 1))
        span = range(first, min(first + size, len(sentences)))
        more = sum(len(sentences[number]) for number in span)
        free = all(span.stop <= other.start or other.stop <= span.start for other in spans)
        if free and more >= SHORTEST_QUERY and removed + more <= REMOVED_SHARE * tokens:
            spans.append(span)
            removed += more
        if len(spans) == QUERIES:
            break
    return spans
