"""The effect of an adaptation on the heads in which position matters most, as an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from locant.adaptation import Adapted

SHOWN, REACH = 6, 24
STATES = {
    "original": ("black", 1.8, "-"),
    "silenced": ("0.65", 1.2, "-"),
    "fitted": ("#d55e00", 1.4, "-"),
    "adapted": ("#0072b2", 1.4, "--"),
}
"""Colour, line width and line style of each state."""


def draw_adaptation(done: Adapted, path: Path) -> None:
    """Writes an image: mean logit by offset, one panel for each of the SHOWN heads that need positions most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heads = sorted(done.fit.heads, key=lambda head: -head.silenced)[:SHOWN]
    heads.sort(key=lambda head: (head.layer, head.head))
    columns = min(3, len(heads))
    rows = -(-len(heads) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 2.7 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(heads) :]:
        axis.set_visible(False)
    for axis, head in zip(axes.flat, heads, strict=False):
        for state, (colour, width, dash) in STATES.items():
            layers = done.curves.get(state)
            if layers is None:
                continue
            layer = layers[head.layer - 1]
            near = layer.offsets.abs() <= REACH
            line = layer.logit[head.head - 1][near].cpu()
            axis.plot(layer.offsets[near].cpu(), line, color=colour, linewidth=width, linestyle=dash, label=state)
        axis.axvline(0, color="0.85", linewidth=0.8, zorder=0)
        axis.set_title(f"layer {head.layer}, head {head.head}", fontsize=9, loc="left")
        axis.set_title(f"{head.explained:.0%} explained", fontsize=8, color="0.4", loc="right")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("offset r = key position − query position", fontsize=9)
    figure.supylabel("mean logit, centred in each row", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
