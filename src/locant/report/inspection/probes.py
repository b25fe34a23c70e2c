"""Probes: how well a small network reads position off hidden states."""

from __future__ import annotations

from locant.analysis.inspection import Inspection
from locant.analysis.probe import Probed
from locant.report.figures import Grid, Heat, Lines, Series
from locant.report.inspection.tensors import numbers
from locant.report.page import Section

AFTER = "after the layer"


def probes_section(found: Inspection) -> Section:
    """Returns the section on the errors of the probes."""
    rows = found.probes
    if not rows:
        return Section("Probes", "", ())
    by_position = Heat(
        "Error by position",
        "The same errors by the position of the token. Where position is lost, a probe guesses the middle and errs "
        "most at the edges.",
        "position",
        "place",
        [row.place for row in rows],
        list(range(rows[0].by_position.shape[0])),
        [numbers(row.by_position) for row in rows],
    )
    intro = "How well a small network can predict a token's position from its hidden state."
    return Section("Probes", intro, (_by_layer(rows, found.twin), by_position, _table(rows, found.twin)))


def _by_layer(rows: list[Probed], twin: list[Probed]) -> Lines:
    kinds = _by_kind(rows)
    after = kinds[AFTER]
    series = [
        Series(
            kind,
            list(at),
            [round(row.error, 3) for row in at.values()],
            [round(row.low, 3) for row in at.values()],
            [round(row.high, 3) for row in at.values()],
        )
        for kind, at in kinds.items()
    ]
    shuffled = [round(row.shuffled, 3) for row in after.values()]
    series += [
        Series("constant guess", list(after), [row.constant for row in after.values()], dashed=True),
        Series("shuffled positions", list(after), shuffled, dashed=True),
    ]
    series += [
        Series(f"twin: {kind}", list(at), [round(row.error, 3) for row in at.values()], dashed=True)
        for kind, at in _by_kind(twin).items()
    ]
    note = (
        "Mean absolute error in tokens, with the range over seeds. Probes read the hidden states after each layer (0: "
        "the embeddings), and the outputs of attention and feed-forward before they are added to the hidden states. "
        "Near 0, position is easy to read; at the dashed lines of the constant guess and of probes trained on "
        "shuffled positions, it is lost. Models that compute one vector for a whole text often lose position in the "
        "last layers."
    )
    if twin:
        note += (
            " The dashed line called twin is the same model with a mask that hides nothing, so it cannot count the "
            "tokens before it."
        )
    return Lines("Error of the probe, layer by layer", note, "layer", "error in tokens", tuple(series))


def _by_kind(rows: list[Probed]) -> dict[str, dict[int, Probed]]:
    """The rows of hidden states, of attention and of feed-forward, each by layer."""
    kinds: dict[str, dict[int, Probed]] = {}
    for row in rows:
        words = row.place.split(maxsplit=2)  # "embeddings", "layer 2", "layer 2 attention"
        kinds.setdefault(words[2] if len(words) == 3 else AFTER, {})[int(words[1]) if len(words) > 1 else 0] = row
    return kinds


def _table(rows: list[Probed], twin: list[Probed]) -> Grid:
    twins = {row.place: row for row in twin}
    return Grid(
        "Errors of the probes",
        "Mean, lowest and highest error over seeds, and the errors to compare them with.",
        ("place", "error", "least", "greatest", "constant guess", "shuffled positions", "twin"),
        [
            (
                row.place,
                round(row.error, 3),
                round(row.low, 3),
                round(row.high, 3),
                row.constant,
                round(row.shuffled, 3),
                round(twins[row.place].error, 3) if row.place in twins else None,
            )
            for row in rows
        ],
    )
