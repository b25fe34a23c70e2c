"""The Triton kernels compiled for GPUs that are not there: no registers are spilled, and tensor cores are used.

Compiling needs a process in which triton does not interpret.
"""

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "reliability" / "results" / "gpu-compiled.csv"
CODE = """
import json, sys
from dataclasses import asdict
from locant.attention.triton import resources
name, kernel, width, capability = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
configuration = resources.CONFIGURATIONS[name]
blocks = resources.blocks_of(configuration, width, capability, kernel)
form = resources.form_of(configuration, width, blocks, kernel)
print(json.dumps(asdict(resources.compile_kernel(kernel, form, blocks, capability))))
"""
KERNELS = ("forward", "backward_queries", "backward_keys")
CAPABILITIES, WIDTHS = (80, 90, 100), (64, 128)
FAST = [("bias", "forward", 64, 90)]
SPILLING: dict[tuple[str, str, int, int], int] = {
    ("query and value (shaw)", "backward_queries", 128, 90): 48,
    ("query and key (huang4)", "backward_queries", 128, 90): 64,
    ("query and value (shaw)", "backward_queries", 128, 80): 48,
    ("query and key (huang4)", "backward_queries", 128, 80): 48,
    ("query and key (huang4)", "backward_keys", 128, 80): 64,
    ("query and key (huang4)", "backward_queries", 128, 100): 40,
    ("softcap and sinks", "backward_queries", 128, 100): 8,
}
"""What spills all the same, in bytes per thread; docs/gpu.md has the reason."""
HARDEST = ("gain", "query and key (huang4)", "bias with positions and a mask")
"""The configuration of each kind of call in `blocks.KINDS` that needs the most registers. The csv has the others."""


def results():
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


COMPILED = {(row["terms"], row["kernel"], int(row["head size"]), int(row["capability"])) for row in results()}
WITHOUT_SPILLS = [
    each
    for each in (
        *((name, kernel, width, capability)
          for capability in CAPABILITIES for width in WIDTHS for name in HARDEST for kernel in KERNELS),
        *((name, kernel, 64, 90)
          for name in ("plain", "bias", "query and value (shaw)", "side vectors of 16 (inkling)", "levels (fox)")
          for kernel in KERNELS),
    )
    if each in COMPILED
]  # fmt: skip


def compiled(name, kernel, width, capability):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, kernel, str(width), str(capability)], capture_output=True, text=True,
        timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "kernel", "width", "capability"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in WITHOUT_SPILLS if each not in FAST)],
)
def test_nothing_is_spilled(name, kernel, width, capability):
    found = compiled(name, kernel, width, capability)
    assert found["spills"] <= SPILLING.get((name, kernel, width, capability), 0)
    assert 0 < found["registers"] <= 255
    assert found["shared"] <= {80: 163, 90: 227, 100: 227}[capability] * 1024  # of one program on these GPUs
    assert found["tensor_core"] > 0


def test_the_csv_has_no_other_spills():
    """Every configuration, not the hardest alone."""
    for row in results():
        key = (row["terms"], row["kernel"], int(row["head size"]), int(row["capability"]))
        assert int(row["spilled bytes"]) == SPILLING.get(key, 0), row


def test_the_csv_has_the_sizes_that_a_call_takes():
    from locant.attention.triton import resources

    for row in results():
        configuration = resources.CONFIGURATIONS[row["terms"]]
        found = resources.blocks_of(configuration, int(row["head size"]), int(row["capability"]), row["kernel"])
        assert (str(found.queries), str(found.keys), str(found.warps)) == (row["queries"], row["keys"], row["warps"]), (
            row
        )
        assert row["loads again"] == ("yes" if found.again else "no"), row


def test_the_page_has_the_table_of_the_csv():
    from reliability.gpu.compiled import table

    assert table(results()) in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
