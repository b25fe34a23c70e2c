"""The page of a census: docs/census.md, written from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import transformers

from census.campaign import ACCIDENT, NOT_SWAPPED, PARTLY, RIGHT, Result
from census.checks import CANNOT_WRITE
from census.names import BOTH
from census.outcome import LIKE_ORIGINAL, NOT_RUN, OK, REFUSED, WRONG
from census.table import positions

GROUPS = (
    ("no generic rule fits", "no rule finds their positions"),
    ("layers called the attention", "not every layer calls transformers' attention interface"),
    ("does not go through", "their attention does not go through transformers' attention interface"),
    ("no attribute is_causal", "their attention modules have no attribute `is_causal`"),
    ("uses s_aux", "attention sinks (`s_aux`)"),
    ("uses softcap", "logits with a soft cap"),
    ("has no inv_freq", "a rotary embedding without `inv_freq`, mostly one for each type of layer"),
    ("kept but not replaced", "positions are counted inside the table; a scheme can be added with `keep_native=True`"),
)
"""Part of a refusal -> the group it belongs to."""

HEAD = """# Which architectures can be swapped

This page is written by `make census`. It covers every text architecture of transformers {version}: encoders, decoders,
encoder-decoders, and the text parts of models that read images or sound. Each one is built tiny, with random weights
that make positions matter, and checked. Names are the model folders of transformers. One line for each, with every
check, is in [census/results/census.csv](../census/results/census.csv).

    make census                      # all of them, about {minutes} minutes on one core
    python -m census bert llama t5   # some of them

| | architectures |
|---|---:|
"""

CHECKED = """
## What is checked

| check | what must hold |
|---|---|
| swap | `swap(model, "alibi")` changes the output, and taking the scheme out of any one layer changes it again |
| padding | padding on either side, in either stack, leaves the outputs of real tokens alone |
| by_hand | the original without its positions, with ALiBi in its attention mask, has the same outputs |
| back | `swap(model, "native")` restores outputs, weights and settings bit for bit |
| cache | text written with a cache has the tokens and logits of text written without, also after padding on the left |
| read | `native(model)` reads the positions |
| law | `swap(model, native(model))` keeps the outputs: plain, padded, and with a visible padding token |
| saved | `save_pretrained`, then `locant.load`: the same outputs |
| fit | `fit` runs and leaves finite outputs; `native` undoes it bit for bit |

Outputs are the same if they differ by at most 2 · 10⁻⁵ of the largest. A refusal is an error in locant's own words,
after which the model is bit for bit what it was. Every other exception counts as an accident. Where a swapped model
fails a check, the original takes it too; if it fails as well, the check passes with a note. Sliding windows are
shorter than the inputs, and sparse attention chooses fewer keys than there are, so the checks see both.
"""


def write(results: list[Result], path: Path) -> None:
    """Writes the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    minutes = max(1, round(sum(result.seconds for result in results) / 60))
    parts = [HEAD.format(version=transformers.__version__, minutes=minutes) + _counts(results), CHECKED.strip()]
    for title, verdict, listed in (
        ("Swapped, and right in every check", RIGHT, _right),
        ("Wrong", WRONG, _one_by_one),
        ("Swapped, but something else is refused", PARTLY, _one_by_one),
        ("Stopped by an accidental error", ACCIDENT, _one_by_one),
        ("Refused, by reason", NOT_SWAPPED, _by_reason),
    ):
        chosen = [result for result in results if result.verdict == verdict]
        parts.append(f"## {title}: {len(chosen)}" + (f"\n\n{listed(chosen)}" if chosen else ""))
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _counts(results: list[Result]) -> str:
    def line(words: str, chosen: Callable[[Result], bool]) -> str:
        return f"| {words} | {sum(map(chosen, results))} |"

    def swapped(result: Result) -> bool:
        return result.verdict in (RIGHT, PARTLY, WRONG) and result.outcomes["swap"].state == OK

    return "\n".join(
        [
            line("all", lambda each: True),
            line("swapped, right in every check", lambda each: each.verdict == RIGHT),
            line("of these, also compared with ALiBi by hand",
                 lambda each: each.verdict == RIGHT and each.outcomes["by_hand"].state == OK),
            line("of these, native positions can be read, so `fit`, `adapt` and `inspect` work",
                 lambda each: each.verdict == RIGHT and each.outcomes["read"].state == OK),
            line("of these, encoder-decoders",
                 lambda each: each.verdict == RIGHT and each.architecture.kind == BOTH),
            line("swapped, but something else is refused", lambda each: each.verdict == PARTLY),
            line("wrong in a check", lambda each: each.verdict == WRONG),
            line("stopped by an accidental error", lambda each: each.verdict == ACCIDENT),
            line("refused with a reason", lambda each: each.verdict == NOT_SWAPPED),
            line("of these, encoder-decoders",
                 lambda each: each.verdict == NOT_SWAPPED and each.architecture.kind == BOTH),
        ]
    )  # fmt: skip


def _names(results: Iterable[Result]) -> str:
    return " ".join(result.architecture.name for result in results) or "none"


def _right(results: list[Result]) -> str:
    kinds = sorted({positions(result) for result in results} - {""})
    lines = [f"**Read as {kind}**: {_names(each for each in results if positions(each) == kind)}" for kind in kinds]
    lines.append(f"**Not read**: {_names(each for each in results if not positions(each))}")
    by_hand = [each for each in results if each.outcomes["by_hand"].state == NOT_RUN]
    lines.append(
        f"**Not compared with ALiBi by hand**, because the original does not take such a mask: {_names(by_hand)}"
    )
    no_fit = [each for each in results if positions(each) and each.outcomes["fit"].state == REFUSED]
    lines.append(f"**`fit` refuses them**: {_names(no_fit)}")
    for check in ("padding", "cache", "saved"):
        like = [each for each in results if each.outcomes[check].reason == LIKE_ORIGINAL]
        if like:
            lines.append(f"**{check} changes outputs, as in the original**: {_names(like)}")
    mute = [each for each in results if each.outcomes["cache"].reason == CANNOT_WRITE]
    if mute:
        lines.append(f"**Not asked to write**, because `generate` of the original needs more: {_names(mute)}")
    return "\n\n".join(lines)


def _one_by_one(results: list[Result]) -> str:
    return "\n".join(f"- {result.architecture.name}: {result.reason}" for result in results)


def _by_reason(results: list[Result]) -> str:
    groups: dict[str, list[Result]] = {}
    for result in results:
        words = next((words for part, words in GROUPS if part in result.reason), result.reason)
        groups.setdefault(words, []).append(result)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "\n".join(f"- {words} ({len(chosen)}): {_names(chosen)}" for words, chosen in ordered)
