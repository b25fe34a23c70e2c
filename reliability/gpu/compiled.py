"""The kernels compiled for GPUs that are not there: registers, spills, shared memory and tensor-core instructions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from locant.attention.triton import resources

WIDTHS = (64, 128)
TITLE = ("capability", "D", "terms", "registers: forward, by queries, by keys", "spilled bytes", "shared KB",
         "tensor-core instructions")  # fmt: skip


def plan() -> list[tuple[int, int, str, str]]:
    """Every compilation: capability, head size, configuration, kernel."""
    return [
        (capability, width, name, kernel)
        for width in WIDTHS
        for capability in resources.CAPABILITIES
        for name in resources.CONFIGURATIONS
        for kernel in resources.KERNELS
    ]


def rows(done: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """A row for each compilation that is not in `done`."""
    for capability, width, name, kernel in plan():
        if (str(capability), str(width), name, kernel) in done:
            continue
        configuration = resources.CONFIGURATIONS[name]
        blocks = resources.blocks_of(configuration, width, capability, kernel)
        form = resources.form_of(configuration, width, blocks, kernel)
        found = resources.compile_kernel(kernel, form, blocks, capability)
        yield {
            "capability": capability, "head size": width, "terms": name, "kernel": kernel,
            "queries": blocks.queries, "keys": blocks.keys, "warps": blocks.warps,
            "stages": 1 if form.scratch else blocks.stages, "loads again": "yes" if blocks.again else "no",
            "registers": found.registers,
            "spilled bytes": found.spills, "shared bytes": found.shared,
            "tensor-core instructions": found.tensor_core,
        }  # fmt: skip


def table(found: list[dict[str, str]]) -> str:
    """The rows of the csv as a table in Markdown: one line for the three kernels of a configuration.

    A kernel that was not compiled is a dash.
    """
    by_key = {(row["capability"], row["head size"], row["terms"], row["kernel"]): row for row in found}
    lines = ["| " + " | ".join(TITLE) + " |", "|" + "---|" * len(TITLE)]
    for width in WIDTHS:
        for capability in resources.CAPABILITIES:
            for name in resources.CONFIGURATIONS:
                three = [by_key.get((str(capability), str(width), name, kernel)) for kernel in resources.KERNELS]
                if not any(three):
                    continue
                cells = [f"{capability / 10:.1f}", str(width), name]
                for field in ("registers", "spilled bytes", "shared bytes", "tensor-core instructions"):
                    numbers = ["–" if row is None else int(row[field]) for row in three]
                    if field == "shared bytes":
                        numbers = [x if isinstance(x, str) else round(x / 1024) for x in numbers]
                    cells.append(", ".join(str(x) for x in numbers))
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
