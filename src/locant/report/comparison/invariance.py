"""Translation invariance of position tables, during training."""

from __future__ import annotations

from locant.experiments.averages import average, averaged_runs, by_step
from locant.experiments.comparison import Comparison
from locant.experiments.results import RunResult
from locant.report.comparison.lines import lines, seeds_note
from locant.report.figures import Cell, Figure, Grid, Lines, Number, Series
from locant.report.page import Section

QUANTITIES = {"gram": "E Eᵀ", "off_diagonal": "E Eᵀ, i ≠ j", "cosine": "cosine"}


def invariance_section(comparison: Comparison, found: list[RunResult]) -> Section:
    """Returns the section on schemes that have a table of absolute positions."""
    figures: list[Figure] = []
    cells: list[list[Cell]] = []
    seeds = seeds_note(comparison, found)
    for scheme in comparison.schemes:
        drawn = _lines(averaged_runs(found, scheme))
        if drawn:
            figures.append(_figure(scheme, drawn, seeds))
            cells += _ends(scheme, drawn)
    if cells:
        header = ("scheme", "what", "first step", "R² there", "last step", "R² at the end")
        note = (
            "The first and last points of the lines above. Ignore changes smaller than the spread between seeds, "
            "which is the band above."
        )
        figures.append(Grid("Translation invariance at both ends", note, header, cells))
    intro = (
        "Whether schemes with a table of absolute positions learn to use it as if it were relative. Schemes that "
        "depend on the offset alone are translation-invariant by construction and have no line here."
    )
    return Section("Translation invariance", intro, tuple(figures))


def _lines(runs: list[RunResult]) -> tuple[Series, ...]:
    keys = dict.fromkeys(key for run in runs for row in run.steps for key in row if key.startswith("invariance/"))
    return lines((_quantity(key), at, average([by_step(run, key) for run in runs])) for at, key in enumerate(keys))


def _quantity(key: str) -> str:
    """`invariance/encoder/head_3` as `encoder, head 3`."""
    *place, last = key.split("/")[1:]
    return ", ".join([part.replace("_", " ") for part in place] + [QUANTITIES.get(last, last.replace("_", " "))])


def _figure(scheme: str, drawn: tuple[Series, ...], seeds: str) -> Lines:
    return Lines(
        f"Translation invariance of {scheme} during training",
        f"R² of the best fit by a function of the offset alone (Toeplitz){seeds}. 1 is translation-invariant. A fresh "
        "table is noise: its vectors are nearly orthogonal, so the diagonal alone gives E Eᵀ and the cosine a good "
        "R², and without the diagonal (i ≠ j) R² is near 0. A slow rise of the latter is normal: the model learns "
        "that distances matter more than absolute positions. In a short training it stays low. Heads are those of the "
        "first layer.",
        "step",
        "R²",
        drawn,
    )


def _ends(scheme: str, drawn: tuple[Series, ...]) -> list[list[Cell]]:
    cells: list[list[Cell]] = []
    for line in drawn:
        known: list[Number] = [value for value in line.y if value is not None]
        if known:
            cells.append([scheme, line.name, line.x[0], known[0], line.x[-1], known[-1]])
    return cells
