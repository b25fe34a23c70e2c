"""Documents and queries from running text."""

import itertools
import random

import pytest

from locant.adaptation.running_text import QUERIES, SHORTEST_QUERY, RunningText
from tests import words

TOKENS = words.Tokenizer()
SENTENCES, WORDS = 3, 9
"""Per line, and per sentence."""


def unique_lines(count: int) -> list[str]:
    """A text in which every word occurs once, so that a token shows its place."""
    word = iter(range(10, 10**6))
    return [" ".join(" ".join(f"w{next(word)}" for _ in range(WORDS)) + "." for _ in range(SENTENCES))
            for _ in range(count)]  # fmt: skip


def inside(tokens: list[int]) -> list[int]:
    assert (tokens[0], tokens[-1]) == (0, 2)
    return tokens[1:-1]


@pytest.mark.parametrize("seed", range(5))
def test_queries_are_spans_of_their_document_and_no_longer_in_it(seed):
    found = RunningText(TOKENS, unique_lines(300), 256).draw(random.Random(seed), 4, 4)
    assert len(found) == 16
    sizes = set()
    for document in found:
        queries = [inside(query) for query in document.queries]
        rest = inside(document.tokens)
        assert 1 <= len(queries) <= QUERIES
        for query in queries:
            assert query == list(range(query[0], query[0] + len(query)))  # consecutive sentences
            assert len(query) % WORDS == 0
            assert not set(query) & set(rest)
            sizes.add(len(query) // WORDS)
        run = sorted([*rest, *(token for query in queries for token in query)])
        start = 10 + document.lines[0] * SENTENCES * WORDS
        assert run == list(range(start, start + len(run)))
    assert {1, 2} <= sizes <= {1, 2, 3, 4}


def test_a_sentence_that_the_text_repeats_is_removed_everywhere():
    lines = [f"{line} w7 w7 w7 w7 w7 w7 w7 w7 w7." for line in unique_lines(100)]
    text = RunningText(TOKENS, lines, 256)
    documents = [document for seed in range(10) for document in text.draw(random.Random(seed), 4, 4)]
    asked = [document for document in documents if any(7 in query for query in document.queries)]
    assert asked
    assert not any(7 in document.tokens for document in asked)


def test_documents_have_random_lengths_up_to_the_longest():
    text = RunningText(TOKENS, unique_lines(500), 256)
    found = [document for seed in range(20) for document in text.draw(random.Random(seed), 4, 4)]
    whole = [len(document.tokens) + sum(len(query) - 2 for query in document.queries) for document in found]
    assert 200 < max(whole) <= 256
    assert 40 < min(whole) < 100
    assert all(sum(len(query) - 2 for query in document.queries) <= size / 2
               for document, size in zip(found, whole, strict=True))  # fmt: skip


def test_hard_negatives_follow_one_another_and_places_are_apart():
    lines = 400
    found = RunningText(TOKENS, unique_lines(lines), 256).draw(random.Random(1), 4, 4)
    groups = [found[at : at + 4] for at in range(0, 16, 4)]
    for group in groups:
        for one, next_one in itertools.pairwise(group):
            assert next_one.lines[0] == one.lines[1]
    read = [line for document in found for line in range(*document.lines)]
    assert len(set(read)) == len(read)  # no line is in two documents
    assert max(read) < lines


def test_a_small_text_gives_fewer_documents_rather_than_the_same_lines_twice():
    text = RunningText(TOKENS, unique_lines(60), 256)
    counts = set()
    for seed in range(10):
        found = text.draw(random.Random(seed), 4, 4)
        read = [line for document in found for line in range(*document.lines)]
        assert len(set(read)) == len(read)
        counts.add(len(found))
    assert counts <= {0, 4, 8, 12}
    assert 4 in counts


def test_the_partition_covers_the_text_in_order():
    found = RunningText(TOKENS, unique_lines(100), 128).partition(random.Random(0))
    assert found[0].lines[0] == 0
    assert all(one.lines[1] == following.lines[0] for one, following in itertools.pairwise(found))
    assert found[-1].lines[1] == 100


def test_short_sentences_are_no_queries():
    lines = ["w10 w11 w12. w13 w14 w15 w16 w17 w18 w19 w20. w21 w22. w23 w24 w25 w26 w27." for _ in range(100)]
    found = RunningText(TOKENS, lines, 128).draw(random.Random(0), 4, 4)
    queries = [query for document in found for query in document.queries]
    assert queries
    assert min(len(query) - 2 for query in queries) >= SHORTEST_QUERY
