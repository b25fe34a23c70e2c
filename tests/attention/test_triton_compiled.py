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
FAST = [("bias", "forward", 64, 90)]
WITHOUT_SPILLS = [
    (name, kernel, 64, capability)
    for capability in (90,)
    for name in (
        "plain",
        "bias",
        "gain",
        "query and value (shaw)",
        "query and key (huang4)",
        "side vectors of 16 (inkling)",
        "levels (fox)",
    )
    for kernel in ("forward", "backward_queries", "backward_keys")
]


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
    assert found["spills"] == 0
    assert 0 < found["registers"] <= 255
    assert found["shared"] <= {80: 163, 90: 227}[capability] * 1024  # of one program on these GPUs
    assert found["tensor_core"] > 0


@pytest.mark.skipif(not RESULTS.exists(), reason="make gpu-compiled writes it")
def test_the_table_holds_what_the_test_holds():
    """A row that spills is not one that the test above promises."""
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    promised = {(name, kernel, str(width), str(capability)) for name, kernel, width, capability in WITHOUT_SPILLS}
    for row in rows:
        if (row["terms"], row["kernel"], row["head size"], row["capability"]) in promised:
            assert row["spilled bytes"] == "0", row
