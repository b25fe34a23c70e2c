"""The tables of an inspection in a few sentences.

Whether a model is translation-invariant is stated once, from the measurement with moved positions. What its parts are
by construction, and R² of its table, are stated of these parts alone: a model may have a table beside a scheme that
depends on the offset.
"""

from __future__ import annotations

import math

from locant.analysis.attribution import Similarity
from locant.analysis.behaviour import Shift, Shuffle
from locant.analysis.certainty import Certainty
from locant.analysis.distance import Head
from locant.analysis.inspection import Inspection
from locant.analysis.invariance import InvarianceRow, Structure
from locant.analysis.probe import Probed

QUOTED = (1, 16)
"""Shifts that are quoted where they were measured: the same for every model, so that two can be compared."""
SHOWN = 10
"""Heads that are named as the most positional."""
CERTAIN = 0.5
"""Signal from which on a learned curve counts as certain."""
NOTHING = 1e-4
"""Relative change of the hidden states that counts as none."""
ROUNDING = 1e-3
"""The same for a scheme that is translation-invariant by construction: angles of far positions are rounded."""


def verdict(found: Inspection) -> list[str]:
    """Returns the findings on one model, a sentence each; parts that could not be measured have none."""
    return [
        *_on_explanation(found),
        *([f"Its positions: {found.facts['positions']}."] if "positions" in found.facts else []),
        *_on_table(found),
        *_on_attention(found.invariances),
        *_on_heads([head for layer in found.layers for head in layer.heads]),
        *_on_certainty(found.certainty),
        *_on_probes(found.probes),
        *([] if found.shuffle is None else [_on_word_order(found.shuffle)]),
        *_on_shifts([row for row in found.shifts if math.isfinite(row.relative)], found.invariances),
    ]


def _on_explanation(found: Inspection) -> list[str]:
    if found.explained is None:
        return []
    one = found.explained.first if isinstance(found.explained, Similarity) else found.explained
    return one.sentences()


def _on_table(found: Inspection) -> list[str]:
    if found.marks_the_first:  # R² of a constant would be 1
        return ["Its position table has two vectors: one for position 0, and one for all others."]
    sentences = []
    gram = next((row for row in found.invariances if row.quantity == "E Eᵀ"), None)
    beside = next((row for row in found.invariances if row.quantity == "E Eᵀ, i ≠ j"), None)
    if gram is not None and gram.control is not None and beside is not None and beside.control is not None:
        whose = f" of the {gram.stack}" if gram.stack in ("encoder", "decoder") else f" {gram.stack}".rstrip()
        sentences.append(
            f"In the position table{whose}, inner products depend on the offset with a Toeplitz R² of {gram.r2:.2f} "
            f"(E Eᵀ over positions {gram.first}–{gram.last}; a random table of the same norms scores "
            f"{gram.control.mean:.2f}). A random table scores high only because of the diagonal. Without it, R² is "
            f"{beside.r2:.2f} (random table: {beside.control.mean:.2f})."
        )
    return [*sentences, *([] if found.structure is None else [_on_structure(found.structure)])]


def _on_attention(rows: list[InvarianceRow]) -> list[str]:
    """What the schemes inside attention are by construction."""
    inside = [row for row in rows if row.quantity == "logits" and row.layer is not None]
    if inside and all(row.exact == 1 for row in inside):
        return ["In attention, positions enter through the offset alone, by construction."]
    if any(row.exact == 1 for row in inside):
        return ["In the attention of some layers, positions enter through the offset alone, by construction."]
    return []


def _on_structure(structure: Structure) -> str:
    few = structure.dimensions[90] < structure.width / 4
    use = "uses few of its dimensions" if few else "spreads over its dimensions"
    return (
        f"The table {use}: {structure.dimensions[90]} of {structure.width} hold 90 % of its variance, with "
        f"{len(structure.pairs)} sine/cosine {'pair' if len(structure.pairs) == 1 else 'pairs'} among the leading "
        "components."
    )


def _on_heads(heads: list[Head]) -> list[str]:
    if not heads:
        return []
    positional = sum(head.positional > 0.5 for head in heads)
    if len(heads) == 1:
        most = "position" if positional else "content"
        return [f"Its one head is {heads[0].label}; {most} decides most of its logit."]
    kinds: dict[str, int] = {}
    for kind in (kind for head in heads for kind in head.labels):
        kinds[kind] = kinds.get(kind, 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
    twice = " (some have two labels)" if sum(kinds.values()) > len(heads) else ""
    most = ", ".join(f"{head.layer}.{head.head}" for head in most_positional(heads))
    return [
        f"Of {len(heads)} heads: {counts}{twice}. In {positional or 'none'} of them position decides most of the "
        "logit.",
        f"The most positional heads (layer.head): {most}.",
    ]


def _on_certainty(found: Certainty | None) -> list[str]:
    if found is None or not found.bands:
        return []
    certain = sum(band.signal >= CERTAIN for band in found.bands)
    nothing = sum(band.signal == 0 for band in found.bands)
    return [
        f"Of its {len(found.bands)} learned curves {certain} are certain (noise is less than half of the curve), and "
        f"{nothing} cannot be told from noise, by {found.tokens:,} tokens of text."
    ]


def most_positional(heads: list[Head]) -> list[Head]:
    """Returns the SHOWN heads in whose logits position has the largest share, largest first."""
    return sorted(heads, key=lambda head: -head.positional)[:SHOWN]


def _on_probes(rows: list[Probed]) -> list[str]:
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    best = min(rows, key=lambda row: row.error)
    if best.error > 0.95 * first.constant:
        return [
            f"Probes cannot predict position from its hidden states: the best error is {best.error:.1f} tokens; a "
            f"constant guess has an error of {first.constant:.0f}."
        ]
    return [
        f"Probes predict a token's position from its hidden state with an error of {best.error:.1f} tokens at best "
        f"({best.place}) and {last.error:.1f} after the last layer; a constant guess has an error of "
        f"{first.constant:.0f}."
    ]


def _on_word_order(shuffle: Shuffle) -> str:
    if shuffle.kind == "loss":
        return f"Shuffling the prefix changes the loss from {shuffle.plain:.2f} to {shuffle.shuffled:.2f}."
    return (
        f"Shuffling the words moves the embedding by {shuffle.shuffled:.2f} of its length; "
        f"another text moves it by {shuffle.scale:.2f}."
    )


def _on_shifts(rows: list[Shift], invariances: list[InvarianceRow]) -> list[str]:
    """Whether the model as a whole is translation-invariant, as it was measured."""
    if not rows:
        return []
    exact = bool(invariances) and all(row.exact == 1 for row in invariances)
    worst = max(rows, key=lambda row: row.relative)
    if worst.relative < (ROUNDING if exact else NOTHING):
        return ["The model is translation-invariant: moving every position changes nothing."]
    quoted = [row for row in rows if row.by in QUOTED]
    if not any(row.relative >= NOTHING for row in quoted):  # they do not show it
        quoted.append(worst)
    first, *more = quoted
    return [
        f"The model is not translation-invariant: moving every position by {first.by} changes the hidden states by "
        f"{_percent(first.relative)}{''.join(f', by {row.by} by {_percent(row.relative)}' for row in more)}."
    ]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
