"""Explanation: which tokens, offsets and positions make one output of the model."""

from __future__ import annotations

from torch import Tensor

from locant.analysis.attribution import Attribution, Similarity
from locant.analysis.inspection import Inspection
from locant.report.figures import Figure, Grid, Heat, Words, shortened
from locant.report.page import Section

FARTHEST = 32
"""Offsets on either side that are shown."""
NOTHING = 1e-9
"""A share of position that counts as none."""


def explanation_section(found: Inspection) -> Section:
    """Returns the section on one output, or on the similarity of two texts."""
    explained = found.explained
    if explained is None:
        return Section("Explanation", "", ())
    if isinstance(explained, Similarity):
        intro = (
            "Why two texts are similar: their cosine similarity as a sum over tokens, pairs of tokens and positions."
        )
        figures: tuple[Figure, ...] = (
            _words(explained.first, "First text"), _words(explained.second, "Second text"), _pairs(explained),
            _sums(explained.first, "first text: "), *_layers(explained.first, ", first text"),
        )  # fmt: skip
        return Section("Explanation", intro, figures)
    intro = f"The {explained.output}, distributed over tokens, offsets and positions so that the parts sum to it."
    return Section("Explanation", intro, (_words(explained, "The text"), _sums(explained, ""), *_layers(explained, "")))


def _words(found: Attribution, title: str) -> Words:
    return Words(
        f"{title}, by relevance",
        f"Relevance of each token for the {found.output} ({found.value:.4g}). Orange tokens raise it; blue tokens, "
        f"which are also underlined, lower it.",
        found.tokens,
        [float(shortened(value) or 0.0) for value in found.relevance.tolist()],
    )


def _sums(found: Attribution, whose: str) -> Grid:
    position = float(found.position.sum()) + found.values
    rows = [
        ("tokens, through content alone", float(found.content.sum())),
        ("tokens, through positions in attention", float(found.through_position.sum())),
        ("position table and value vectors", position),
        ("biases and other constants", found.biases),
        ("sum: the output", float(found.relevance.sum()) + position + found.biases),
    ]
    whole = found.value or 1.0
    return Grid(
        "Where the relevance is",
        f"{whose}{found.sentences()[1]} The share takes absolute values by token; the table has signed sums.",
        ("part", "relevance", "% of the output"),
        [(name, shortened(value, 4), shortened(100 * value / whole, 3)) for name, value in rows],
    )


def _layers(found: Attribution, whose: str) -> list[Figure]:
    if not found.layers:
        return []
    figures: list[Figure] = [_by_offset(found, f"Relevance by offset{whose}", "gross",
                                        "How relevance flows through attention: the share of Σ |R_ij| of a layer at "
                                        "each offset r = key − query.")]  # fmt: skip
    if float(sum(flow.position.sum() for flow in found.layers)) > NOTHING:
        figures.append(
            _by_offset(
                found, f"Relevance through position by offset{whose}", "position",
                "The same for what positions change: the share of Σ |P_ij| of a layer at each offset.",
            )
        )  # fmt: skip
        heads = max(flow.share.shape[0] for flow in found.layers)
        shares = [[*map(_percent, flow.share.tolist())] + [None] * (heads - len(flow.share)) for flow in found.layers]
        figures.append(
            Heat(
                f"Share of position by layer and head{whose}",
                "Share of the relevance in a head that is due to position: Σ |P_ij| / (Σ |C_ij| + Σ |P_ij|), in "
                "percent. P is what changes when the head's weights lose their positional terms.",
                "head", "layer", list(range(1, len(found.layers) + 1)), list(range(1, heads + 1)), shares,
            )
        )  # fmt: skip
    return figures


def _by_offset(found: Attribution, title: str, what: str, note: str) -> Heat:
    offsets = sorted({r for flow in found.layers for r in flow.offsets.tolist() if abs(r) <= FARTHEST})
    used = [r for r in offsets if any(_at(flow.offsets, getattr(flow, what).sum(0), r) for flow in found.layers)]
    shown = [r for r in offsets if used and used[0] <= r <= used[-1]]
    rows = []
    for flow in found.layers:
        values: Tensor = getattr(flow, what).sum(0)
        total = float(values.sum()) or 1.0
        rows.append([_percent(_at(flow.offsets, values, r) / total) for r in shown])
    return Heat(f"{title}", f"{note} In percent; offsets up to {FARTHEST}.", "offset", "layer",
                list(range(1, len(found.layers) + 1)), shown, rows)  # fmt: skip


def _at(offsets: Tensor, values: Tensor, r: int) -> float:
    return float(values[offsets == r].sum())


def _percent(share: float) -> float | None:
    return shortened(100 * share, 4)


def _pairs(found: Similarity) -> Heat:
    rows, columns = ([*_numbered(side), "positions, constants"] for side in (found.first, found.second))
    return Heat(
        "Which pairs of tokens make the texts similar",
        f"Parts of the cosine similarity {found.value:.3f}: the sum over all cells is the similarity. Rows are the "
        f"tokens of the first text, columns those of the second. Positions and constants have the last row and column.",
        "second text", "first text", rows, columns,
        [[shortened(value, 4) for value in row] for row in found.pairs.tolist()], diverging=True,
    )  # fmt: skip


def _numbered(side: Attribution) -> list[str]:
    return [f"{at} {word.strip()}" for at, word in enumerate(side.tokens)]
