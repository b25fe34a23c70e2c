"""What a plain `pip install locant` brings."""

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import locant
locant.attend
"""


def test_numpy_is_installed_because_torch_warns_without_it():
    """`sys.modules` without numpy shows the warning that users of a plain install got."""
    required = re.search(r"^dependencies = \[(.*)\]", PROJECT.read_text(), re.MULTILINE)[1]
    assert "numpy" in {re.match(r"[\w-]+", each.strip(' "'))[0] for each in required.split(",")}
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, timeout=100)
    assert "Failed to initialize NumPy" in done.stderr
