"""The costs of schemes (`locant.analysis.speed`) as text, csv file and image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from locant.analysis.speed import Cost
from locant.runs import files
from locant.runs.csv_text import csv_lines


def cost_line(cost: Cost) -> str:
    """Returns one measurement as a line of text."""
    return (
        f"{cost.spec:24} L={cost.length:5} B={cost.batch:2} {cost.what:18} {cost.ratio:6.2f}  "
        f"({cost.low:.2f} … {cost.high:.2f}; plain {cost.plain_ms:.1f} ms)"
    )


def write_costs(costs: Iterable[Cost], path: Path) -> None:
    """Writes a csv file: one row per measurement."""
    rows = [asdict(cost) for cost in costs]
    files.write(path, csv_lines(rows[0], rows))


def draw_costs(costs: Iterable[Cost], path: Path) -> None:
    """Writes an image: ratio against length, one line per scheme, one panel per kind of work."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(costs)
    kinds = list(dict.fromkeys(row.what for row in rows))
    specs = list(dict.fromkeys(row.spec for row in rows))
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(4.2 * len(kinds) + 2.2, 4.2), layout="constrained", sharey=True, squeeze=False
    )
    colors = plt.get_cmap("tab20" if len(specs) > 10 else "tab10").colors  # type: ignore[attr-defined]
    for axis, what in zip(axes[0], kinds, strict=True):
        for spec, color in zip(specs, colors, strict=False):
            chosen = [row for row in rows if row.spec == spec and row.what == what]
            if not chosen:
                continue
            lengths = [row.length for row in chosen]
            axis.plot(lengths, [row.ratio for row in chosen], marker="o", markersize=3.5, color=color, label=spec)
            axis.fill_between(lengths, [r.low for r in chosen], [r.high for r in chosen], color=color, alpha=0.15, lw=0)
        axis.axhline(1, color="0.4", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(what, loc="left", fontsize=10)
        axis.set_xlabel("length")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time / time of plain attention")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
