"""`locant.compare` in a script, as users write one: without `if __name__ == "__main__"`."""

import json
import subprocess
import sys

import pytest

import locant
from locant.verbs.comparing import ComparisonResult

SCHEME = """
import locant

class Mine(locant.Scheme):
    def __init__(self, *, slope: float = 1.0) -> None:
        super().__init__()
        self.slope = slope

    def terms(self, r):
        return locant.Terms(bias=-self.slope * r.abs()[None].float())

    def parameter_count(self):
        return 0
"""
SCRIPT = """
import json
import locant

print("begin")  # a process that imported this script would print it again
steps, runs, stages = [], [], []
found = locant.compare(
    "clm", ["nope", "mine:slope=2"], imports="my_schemes.py", out="out", data="words.txt", seeds=[3], budget="4steps",
    preset="quick:length=16,longest=2,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=256",
    on_stage=stages.append, on_begin=lambda comparison: stages.append(comparison.schemes),
    on_steps=lambda done, total, left: steps.append((done, total, left)), on_run=runs.append,
)
print(json.dumps([found.table, steps[0], steps[-1], [(each.run.scheme, each.state) for each in runs], stages]))
"""


@pytest.mark.slow
def test_a_script_compares_own_schemes_with_callbacks(tmp_path):
    (tmp_path / "words.txt").write_text("one two three four five, once I caught a fish alive\n" * 300)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "my_schemes.py").write_text(SCHEME)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "begin"
    table, begun, ended, runs, stages = json.loads(last)
    assert {row["scheme"] for row in table} == {"nope", "mine:slope=2"}
    assert all(row["finished"] == 1 and row["score"] > 0 and row["low"] is None for row in table)
    assert (begun, ended) == ([0, 8, 2], [8, 8, 0])
    assert sorted(runs) == [["mine:slope=2", "done"], ["nope", "done"]]
    assert stages == ["preparing the data", ["nope", "mine:slope=2"]]
    assert (tmp_path / "out" / "report.html").exists()
    again = ComparisonResult(tmp_path / "out")
    assert again.table == table
    assert "--import out/imports/my_schemes.py" in str(again.rows("Settings"))
    with pytest.raises(ValueError, match="runs no code of a folder by itself"):
        locant.load(tmp_path / "out/runs/mine-slope=2.s3")
