"""How sure the learned curves are: bands around the curve of each head, and what is left of them without the noise."""

from __future__ import annotations

from locant.analysis.certainty import Band, Certainty
from locant.analysis.inspection import Inspection
from locant.report.figures import Cell, Figure, Grid, Heat, Lines, Series, Small, shortened
from locant.report.page import Section

TITLE = "How sure the curves are"
MEANING = {
    "tokens": "the tokens that the model predicts",
    "attention": "its attention weights: one key drawn for each query",
    "vectors": "the sentence vectors of the original",
}
"""What the parameters were judged by."""


def certainty_section(found: Inspection) -> Section:
    """Returns the section with the intervals of the learned curves; without figures if they were not computed."""
    its = found.certainty
    if its is None or not its.bands:
        return Section(TITLE, "", ())
    figures: list[Figure] = [_curves(its), _heads(its)]
    if its.bumps:
        figures.append(_bumps(its))
    if its.buckets:
        figures.append(_buckets(its))
    intro = (
        f"{its.level:.0%} intervals of a Laplace posterior over the parameters of each layer, with all other weights "
        f"held constant, by {MEANING[its.likelihood]}. They are the intervals that {its.tokens:,} tokens of text "
        f"leave; a scheme that was trained on 100 times as much has them 10 times narrower."
        + (" No original was given, so the widths of a head's intervals are right up to one factor."
           if its.likelihood == "attention" and not its.tempered else "")
    )  # fmt: skip
    return Section(TITLE, intro, tuple(figures))


def _curves(its: Certainty) -> Small:
    panels: list[Lines | Heat] = [
        Lines(f"{band.place}, head {band.head}", "", "offset", band.what, (_series(band),)) for band in its.bands
    ]
    note = (
        "The learned curve of each head with its interval. A curve that is added to the logits is shown without its "
        "mean, because a constant has no effect. Where the band contains 0, the text does not show that the head uses "
        "this offset."
    )
    return Small("Curves with intervals", note, tuple(panels), 6, own=True)


def _series(band: Band) -> Series:
    value, low, high = ([shortened(x, 4) for x in line] for line in (band.value, band.low, band.high))
    return Series("learned", list(band.r), value, low, high)


def _heads(its: Certainty) -> Grid:
    rows: list[list[Cell]] = [
        [band.place, band.head or 0, band.what, round(band.signal, 3), round(band.excluded, 3),
         "yes" if band.doubtful else ""]
        for band in its.bands
    ]  # fmt: skip
    return Grid(
        "Certainty of each head",
        "signal: the share of the mean square of a curve that is not noise; 0: it cannot be told from noise. excluded: "
        "the share of pairs of tokens at offsets whose interval excludes no effect. doubtful: the curve bends so much "
        "within the uncertainty of its parameters that the delta method misjudges the width of the band.",
        ("where", "head", "quantity", "signal", "excluded", "doubtful"),
        rows,
    )


def _bumps(its: Certainty) -> Grid:
    rows: list[list[Cell]] = [
        [bump.place, bump.head, bump.kernel, shortened(bump.amplitude, 4), shortened(bump.low, 4),
         shortened(bump.high, 4), "yes" if bump.there else "", shortened(bump.nats, 3), shortened(bump.offset, 4),
         shortened(bump.sharpness, 4)]
        for bump in its.bumps
    ]  # fmt: skip
    return Grid(
        "Are the kernels there?",
        "The height of every kernel with its interval; there: the interval excludes 0. Of two kernels with the same "
        "centre and width only the sum is determined, so neither counts as there. nats: the increase of the loss per "
        "observation if the kernel alone is removed.",
        ("where", "head", "kernel", "a", "low", "high", "there", "nats", "c", "|b|"),
        rows,
    )


def _buckets(its: Certainty) -> Grid:
    rows: list[list[Cell]] = [
        [each.place, each.head, each.bucket, each.first, each.last, shortened(each.value, 4), shortened(each.low, 4),
         shortened(each.high, 4)]
        for each in its.buckets
    ]  # fmt: skip
    return Grid(
        "Buckets with intervals",
        "The bias of every bucket of offsets, without the mean of its head.",
        ("where", "head", "bucket", "first offset", "last offset", "bias", "low", "high"),
        rows,
    )
