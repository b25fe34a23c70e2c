"""Variance: position in the size of the hidden states."""

from __future__ import annotations

from locant.analysis import variance
from locant.analysis.inspection import Inspection
from locant.analysis.variance import VarianceRow, Variances
from locant.report.figures import Figure, Grid, Lines, Series, shortened
from locant.report.page import Section


def variance_section(found: Inspection) -> Section:
    """Returns the section on the variance of the hidden states by position."""
    if found.variances is None:
        return Section("Variance", "", ())
    figures: list[Figure] = []
    for step in (variance.ATTENTION, variance.OUTPUT):
        figures += _by_position(found.variances, step)
    if found.slopes:
        figures.append(
            Grid(
                "Slopes",
                "Slope of log variance against log position. −1 is the theory for the first layer of a random causal "
                "model without positions; 0 means that the variance carries no trace of position.",
                ("layer", "step", "slope"),
                [(layer, step, round(slope, 4)) for layer, step, slope in found.slopes],
            )
        )
    return Section("Variance", "Position in the variance of the hidden states (Chi et al. 2023).", tuple(figures))


def _by_position(variances: Variances, step: str) -> list[Figure]:
    rows = [row for row in variances.rows if row.step == step]
    series = (
        *(_line(row, f"layer {row.layer}") for row in rows if row.source == variance.MEASURED),
        *(_line(row, f"layer {row.layer}, theory", dashed=True) for row in rows if row.source == variance.CORRECTED),
    )
    if not series:
        return []
    return [
        Lines(
            f"Variance of the {step}",
            "Variance over texts and coordinates, by position. In a causal model without positions the attention "
            "output falls as 1/m, because token m averages m values: a straight line of slope −1, which later layers "
            "keep in weaker form. In a bidirectional model the line is flat.",
            "position m",
            "variance",
            series,
            log_x=True,
            log_y=True,
        )
    ]


def _line(row: VarianceRow, name: str, *, dashed: bool = False) -> Series:
    values = [shortened(value) for value in row.values]
    return Series(name, list(range(1, len(values) + 1)), values, dashed=dashed)
