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

from reliability.gpu.launched import CASES, SHARED

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
    ("query and value (shaw)", "backward_queries", 128, 90): 56,
    ("query and key (huang4)", "backward_queries", 128, 90): 64,
    ("query and value (shaw)", "backward_queries", 128, 80): 48,
    ("query and key (huang4)", "backward_queries", 128, 80): 48,
    ("query and key (huang4)", "backward_keys", 128, 80): 64,
    ("query and key (huang4)", "backward_queries", 128, 100): 48,
}
"""What spills all the same, in bytes per thread; docs/gpu.md has the reason."""
HARDEST = ("gain", "query and key (huang4)", "bias with positions and a mask")
"""The configuration of each kind of call in `blocks.KINDS` that needs the most registers. The csv has the others."""


def results():
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


WITHOUT_SPILLS = [
    *((name, kernel, width, capability)
      for capability in CAPABILITIES for width in WIDTHS for name in HARDEST for kernel in KERNELS),
    *((name, kernel, 64, 90)
      for name in ("plain", "bias", "query and value (shaw)", "side vectors of 16 (inkling)", "levels (fox)")
      for kernel in KERNELS),
]  # fmt: skip


def run(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compiled(name, kernel, width, capability):
    return run(CODE, name, kernel, width, capability)


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


def test_the_csv_has_every_kernel_and_no_other_spills():
    """Every configuration, not the hardest alone."""
    from locant.attention.triton import resources

    assert len(results()) == len(resources.CONFIGURATIONS) * len(KERNELS) * len(WIDTHS) * len(CAPABILITIES)
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


# ------------------------------------------------------------------------------------------------- launches

LAUNCH = """
import json, sys
from dataclasses import asdict
from reliability.gpu.launched import CASES, launch
print(json.dumps([asdict(each) for each in launch(CASES[sys.argv[1]], int(sys.argv[2]))]))
"""
SMALL = 86
"""A GPU with the least shared memory of all that the kernels run on."""
FIRST = "one of everything"


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in CASES if each != FIRST)]
)
def test_what_a_call_launches_compiles_and_fits(name):
    """Triton finds the types of a real call's arguments. Sizes of 1 are constants, which the interpreter never has."""
    found = run(LAUNCH, name, SMALL)
    assert [each["kernel"] for each in found][:3] == list(KERNELS)
    assert all(each["shared"] <= SHARED[SMALL] for each in found)
    if CASES[name].twice:
        assert [each["kernel"] for each in found][3] == "kept_weights"  # then the gradients of the first ones' inputs


@pytest.mark.slow
def test_a_small_gpu_takes_smaller_tiles():
    """The first backward kernel needs 128 KB with the sizes of the table."""
    large, small = (run(LAUNCH, "plain, 256 numbers in float32", each)[1] for each in (80, SMALL))
    assert (large["queries"], small["queries"]) == (32, 16)
    assert SHARED[SMALL] < large["shared"] <= SHARED[80]
