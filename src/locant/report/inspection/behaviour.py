"""Behaviour: what changes when positions or words move, or the input grows."""

from __future__ import annotations

from locant.analysis.behaviour import Length, Share, Shift, Shuffle
from locant.analysis.inspection import Inspection
from locant.report.figures import Figure, Grid, Lines, Series
from locant.report.page import Section


def behaviour_section(found: Inspection) -> Section:
    """Returns the section on moved positions, shuffled words and longer inputs."""
    figures: list[Figure] = []
    if found.shifts:
        figures.append(_shifts(found.shifts))
    if found.shares:
        figures.append(_shares(found.shares))
    if found.lengths:
        figures.append(_lengths(found.lengths))
    if found.shuffle is not None:
        figures.append(_shuffle(found.shuffle))
    return Section("Behaviour", "The effect of moving positions or words.", tuple(figures))


def _shifts(rows: list[Shift]) -> Lines:
    return Lines(
        "Moving every position",
        "Relative change of the last hidden states when all positions move by the same amount. 0 is "
        "translation-invariant; models that add vectors to their tokens by position are not.",
        "moved by",
        "relative change",
        (Series("change", [row.by for row in rows], [round(row.relative, 6) for row in rows]),),
        log_x=True,
    )


def _shares(rows: list[Share]) -> Lines:
    layers = [row.layer for row in rows]
    return Lines(
        "Share of position in the hidden states",
        "Share of the variance of the hidden states that position alone explains, layer by layer; the band is ± 2 "
        "standard errors. Dashed: the same with the tokens of every text in random order. The share that remains "
        "there is due to position; the share that vanishes was due to word order.",
        "layer",
        "share",
        (
            Series(
                "position",
                layers,
                [round(row.position, 5) for row in rows],
                [round(row.interval[0], 5) for row in rows],
                [round(row.interval[1], 5) for row in rows],
            ),
            Series("shuffled tokens", layers, [round(row.shuffled, 5) for row in rows], dashed=True),
        ),
    )


def _lengths(rows: list[Length]) -> Lines:
    kind = rows[0].kind
    lengths = [row.length for row in rows]
    return Lines(
        "Longer inputs",
        "Loss by length: it should fall, and not rise beyond the trained length."
        if kind == "loss"
        else "Cosine between the embedding of the shortest input and those of longer inputs that contain it. Dashed: "
        "another text.",
        "length",
        kind,
        (
            Series("this text", lengths, [round(row.value, 5) for row in rows]),
            Series("scale", lengths, [round(row.scale, 5) for row in rows], dashed=True),
        ),
        log_x=True,
    )


def _shuffle(row: Shuffle) -> Grid:
    return Grid(
        "Shuffled words",
        "The value of word order: the change when words are shuffled, and as a scale a different text or a uniform "
        "guess. Near 0, the model treats a text as a bag of words.",
        ("what", "in order", "shuffled", "change", "± error", "scale"),
        [
            (
                row.kind,
                round(row.plain, 4),
                round(row.shuffled, 4),
                round(row.change, 4),
                round(row.error, 4),
                round(row.scale, 4),
            )
        ],
    )
