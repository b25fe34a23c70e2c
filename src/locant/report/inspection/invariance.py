"""Translation invariance: does only the offset matter?"""

from __future__ import annotations

from locant.analysis.inspection import Inspection
from locant.analysis.invariance import InvarianceRow, Structure
from locant.report.figures import Cell, Figure, Grid, Heat, Lines, Series
from locant.report.inspection.tensors import matrix
from locant.report.page import Section

SHOWN = 40
"""Principal components in the figure of dimensions."""


def invariance_section(found: Inspection) -> Section:
    """Returns the section on the position table and on the Toeplitz fits."""
    figures: list[Figure] = []
    if found.gram is not None:
        figures.append(
            Heat(
                "Position table, E Eᵀ",
                "Inner products of the vectors of any two positions. Stripes along the diagonal mean that only the "
                "offset matters; blocks and edges mean that absolute positions matter. Trained tables mostly show "
                "stripes that fade with distance, and a first position that differs from all others.",
                "position",
                "position",
                found.gram_positions,
                found.gram_positions,
                matrix(found.gram),
                diverging=True,
            )
        )
    if found.invariances:
        figures.append(_scores(found.invariances))
    if found.structure is not None:
        figures += [_dimensions(found.structure), _components(found.structure)]
    intro = "Is the contribution of position to this model a function of the offset alone?"
    return Section("Translation invariance", intro, tuple(figures))


def _scores(rows: list[InvarianceRow]) -> Grid:
    stacks = any(row.stack for row in rows)
    header = (*(["stack"] if stacks else []), "what", "layer", "head", "positions", "R²", "interval", "control",
              "exactly")  # fmt: skip
    cells: list[list[Cell]] = [
        [
            *([row.stack] if stacks else []),
            row.quantity,
            row.layer,
            row.head,
            f"{row.first}–{row.last}",
            round(row.r2, 4),
            "" if row.interval is None else f"{row.interval[0]:.3f} … {row.interval[1]:.3f}",
            "" if row.control is None else f"{row.control.mean:.3f}",
            row.exact,
        ]
        for row in rows
    ]
    note = (
        "R² of the best Toeplitz fit: 1 means that the matrix is a function of the offset alone. The control of a "
        "table is random vectors of the same norms, whose R² comes from the diagonal alone. The control of logits is "
        "the same numbers in random order."
    )
    return Grid("Translation invariance", note, header, cells)


def _dimensions(structure: Structure) -> Lines:
    running = structure.cumulative[:SHOWN]
    return Lines(
        "Dimensions of the position table",
        f"Share of the table's variance in its first principal components: 90 % in {structure.dimensions[90]}, 95 % in "
        f"{structure.dimensions[95]}, 99 % in {structure.dimensions[99]} of {structure.width}. Trained tables need a "
        "small part of their dimensions; a random table needs most of them.",
        "components",
        "cumulative share",
        (Series("table", list(range(1, len(running) + 1)), [round(share, 5) for share in running]),),
    )


def _components(structure: Structure) -> Grid:
    partners = {number: f"with {other}" for pair in structure.pairs for number, other in (pair, pair[::-1])}
    return Grid(
        "Principal components",
        "For each leading component, the wave along the positions that is closest to it. Two components of one "
        "frequency, a quarter turn apart, are a sine and a cosine: together they give each position a place on a "
        "circle.",
        ("component", "share", "cycles", "of it a wave", "phase", "pair"),
        [
            (c.number, round(c.share, 4), c.frequency, round(c.power, 3), round(c.phase), partners.get(c.number, ""))
            for c in structure.components
        ],
    )
