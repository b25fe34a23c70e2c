"""Attention by distance: where each head attends."""

from __future__ import annotations

from locant.analysis.distance import SEPARATOR, Head
from locant.analysis.inspection import Inspection
from locant.analysis.verdict import SHOWN, most_positional
from locant.report.figures import Figure, Grid, Heat, Lines, Number, Series, Small
from locant.report.inspection.tensors import matrix, numbers, thinned
from locant.report.page import Section

TITLE = "Attention by distance"
REACH = 24
"""Largest offset in the panels."""
COLUMNS = 6
"""Most panels side by side: twelve would be too small to read."""


def distance_section(found: Inspection) -> Section:
    """Returns the section on attention weights and logits by offset."""
    if not found.layers:
        return Section(TITLE, "", ())
    most = max(len(layer.heads) for layer in found.layers)  # sliding layers may have more heads than others
    share: list[list[Number]] = [
        [*(round(head.positional, 4) for head in layer.heads), *[None] * (most - len(layer.heads))]
        for layer in found.layers
    ]
    every = [head for layer in found.layers for head in layer.heads]
    figures: list[Figure] = [
        _most_positional(every),
        *_panels(found),
        Heat(
            "How much of the logit is position",
            "Share of the variance of the attention logits that remains after averaging over tokens. 1: the head "
            "attends by position; 0: it attends by content. Early layers are usually the positional ones.",
            "head",
            "layer",
            list(range(1, len(share) + 1)),
            list(range(1, most + 1)),
            share,
        ),
    ]
    if found.first_layer is not None:
        places = thinned(found.first_layer.shape[0])
        figures.append(
            Heat(
                "First layer, mean over heads",
                "Attention weights of the first layer, averaged over its heads and over texts. Rows are queries.",
                "key",
                "query",
                places,
                places,
                matrix(found.first_layer[places][:, places]),
            )
        )
    figures.append(_table(every))
    intro = "Where each head attends on a text, and how much of that is due to position."
    return Section(TITLE, intro, tuple(figures))


def _panels(found: Inspection) -> list[Figure]:
    weights: list[Lines | Heat] = []
    logits: list[Lines | Heat] = []
    for number, layer in enumerate(found.layers, 1):
        near = (layer.offsets.abs() <= REACH).nonzero().flatten()
        r = layer.offsets[near].tolist()
        for at, head in enumerate(layer.heads):
            title = f"{number}.{at + 1} {_short(head.label)}"
            for panels, name, values in ((weights, "weight", layer.weight), (logits, "logit", layer.logit)):
                panels.append(Lines(title, "", "offset", name, (Series(name, r, numbers(values[at, near])),)))
    columns = min(COLUMNS, len(found.layers[0].heads))
    return [
        Small(
            "What each head does with distance",
            "Mean attention weight by offset (key − query), one panel per head. Titles are layer.head and a short "
            "label; the table of heads below has the full label. A spike at −1 is a previous-token head, and a hump "
            "is a local head. In a sink, most weight goes to the first token. A flat line means that the head attends "
            "by content, or to everything alike. Two or three layers with sharp positional heads, mostly early ones, "
            "are normal. Each panel has its own scale, because one sharp head would flatten all others; a button puts "
            "all on the same scale.",
            tuple(weights),
            columns=columns,
            own=True,
        ),
        Small(
            "The positional part of the logit",
            "Mean logit by offset, centred over the keys that each query can attend to, in the same order: the "
            "preference of the head before the softmax, whatever the words are. A straight slope is a decay like "
            "ALiBi's; a bump is a preferred offset.",
            tuple(logits),
            columns=columns,
            own=True,
        ),
    ]


def _most_positional(heads: list[Head]) -> Grid:
    few = most_positional(heads)
    return Grid(
        "The ten most positional heads" if len(few) == SHOWN else "The most positional heads",
        "The heads in whose logits position has the largest share, largest first. Look at their panels below first.",
        ("layer.head", "label", "position", "previous", "itself", "next", "first"),
        [
            (f"{head.layer}.{head.head}", head.label,
             *(round(x, 3) for x in (head.positional, head.previous, head.itself, head.next, head.first)))
            for head in few
        ],
    )  # fmt: skip


def _short(label: str) -> str:
    """A label that fits above one of several panels in a row."""
    for long, short in (("local of width", "local"), ("first-token sink", "sink"), (" token", ""), (SEPARATOR, "+")):
        label = label.replace(long, short)
    return label


def _table(heads: list[Head]) -> Grid:
    return Grid(
        "Heads",
        "The numbers behind the labels: attention weight on the previous token, the token itself, the next and the "
        "first; the distance that holds half of the weight outside the first token; entropy relative to that of equal "
        "weights; share of position in the logit.",
        ("layer", "head", "label", "previous", "itself", "next", "first", "width", "entropy", "position"),
        [
            (
                head.layer,
                head.head,
                head.label,
                round(head.previous, 3),
                round(head.itself, 3),
                round(head.next, 3),
                round(head.first, 3),
                head.width,
                round(head.entropy, 3),
                round(head.positional, 3),
            )
            for head in heads
        ],
    )
