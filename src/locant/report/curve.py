"""Curves over the offset, as an image file, a csv file and a small plot in the terminal."""

from __future__ import annotations

import textwrap
from pathlib import Path

from locant.analysis.curve import Curve
from locant.runs import files
from locant.runs.csv_text import csv_lines


def draw_curves(curves: list[Curve], path: Path) -> None:
    """Writes an image: one panel per curve, one line per head, from dark (first) to light (last)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.1 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, curve in zip(axes.flat, curves, strict=False):
        heads = len(curve.values)
        for head, line in enumerate(curve.values):
            colour = plt.get_cmap("viridis")(0.9 * head / max(heads - 1, 1))
            axis.plot(curve.r, line, color=colour, linewidth=1.3, label=f"head {head + 1}")
        if curve.axis == "offset":
            axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        else:
            axis.set_xlabel(f"{curve.axis} of the query", fontsize=8)
        axis.set_title(textwrap.fill(curve.spec, 34, break_on_hyphens=False), fontsize=9, loc="left")
        axis.set_title(
            f"{heads} heads, dark to light" if heads > 1 else "all heads", fontsize=7, color="0.45", loc="right"
        )
        axis.set_ylabel(curve.what, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("offset r = key position − query position", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_curves(curves: list[Curve], path: Path) -> None:
    """Writes a csv file: one row per curve, head and offset."""
    rows = [row for curve in curves for row in curve.rows()]
    files.write(path, csv_lines(["scheme", "field", "head", "r", "value"], rows))


def plot_curve(curve: Curve, *, width: int = 76, height: int = 12) -> str:
    """Returns a plot in characters, of at most four heads: more could not be told apart."""
    import plotext

    heads = len(curve.values)
    shown = sorted({round(step * (heads - 1) / 3) for step in range(4)})
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    for marker, head in zip("•x+o", shown, strict=False):
        name = f"head {head + 1} of {heads}" if heads > 1 else "all heads"
        plotext.plot(curve.r, curve.values[head], marker=marker, label=name)
    return str(plotext.uncolorize(plotext.build()))
