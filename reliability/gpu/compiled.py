"""The kernels compiled for GPUs that are not there: registers, spills, shared memory and tensor-core instructions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from locant.attention.triton import resources

WIDTHS = (64, 128)


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
            "stages": 1 if form.scratch else blocks.stages, "registers": found.registers,
            "spilled bytes": found.spills, "shared bytes": found.shared,
            "tensor-core instructions": found.tensor_core,
        }  # fmt: skip
