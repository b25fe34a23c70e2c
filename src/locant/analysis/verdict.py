"""The tables of an inspection in a few sentences."""

from __future__ import annotations

import math

from locant.analysis.behaviour import Shift, Shuffle
from locant.analysis.distance import Head
from locant.analysis.inspection import Inspection
from locant.analysis.invariance import InvarianceRow, Structure
from locant.analysis.probe import Probed


def verdict(found: Inspection) -> list[str]:
    """Returns the findings on one model, a sentence each; parts that could not be measured have none."""
    return [
        *([f"Its positions: {found.facts['positions']}."] if "positions" in found.facts else []),
        *_on_invariance(found.invariances),
        *([] if found.structure is None else [_on_structure(found.structure)]),
        *_on_heads([head for layer in found.layers for head in layer.heads]),
        *_on_probes(found.probes),
        *([] if found.shuffle is None else [_on_word_order(found.shuffle)]),
        *_on_shifts([row for row in found.shifts if math.isfinite(row.relative)]),
    ]


def _on_invariance(rows: list[InvarianceRow]) -> list[str]:
    sentences = []
    gram = next((row for row in rows if row.quantity == "E Eᵀ"), None)
    beside = next((row for row in rows if row.quantity == "E Eᵀ, i ≠ j"), None)
    if gram is not None and gram.control is not None and beside is not None and beside.control is not None:
        whose = f" of the {gram.stack}" if gram.stack else ""
        sentences.append(
            f"The position table{whose} is {gram.r2:.2f} translation-invariant (Toeplitz R² of E Eᵀ over positions "
            f"{gram.first}–{gram.last}; a random table of the same norms scores {gram.control.mean:.2f}). A random "
            f"table scores high only because of the diagonal. Without it, R² is {beside.r2:.2f} (random table: "
            f"{beside.control.mean:.2f})."
        )
    if any(row.exact == 1 for row in rows):
        sentences.append("Its scheme is translation-invariant by construction.")
    return sentences


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
    for head in heads:
        kind = "local" if head.label.startswith("local") else head.label
        kinds[kind] = kinds.get(kind, 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
    return [f"Of {len(heads)} heads: {counts}. In {positional or 'none'} of them position decides most of the logit."]


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


def _on_shifts(rows: list[Shift]) -> list[str]:
    if not rows:
        return []
    worst = max(rows, key=lambda row: row.relative)
    if worst.relative < 1e-4:
        return ["Moving every position changes nothing."]
    return [f"Moving every position by {worst.by} changes the hidden states by {worst.relative:.0%}."]
