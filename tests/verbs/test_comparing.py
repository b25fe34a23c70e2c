"""`locant.compare` in a script, as users write one: without `if __name__ == "__main__"`."""

import json
import subprocess
import sys

from locant.verbs.comparing import ComparisonResult

SCRIPT = """
import json
import locant

print("begin")  # a process that imported this script would print it again
steps, runs, stages = [], [], []
found = locant.compare(
    "clm", ["nope", "alibi"], out="out", data="words.txt", seeds=[3], budget="4steps",
    preset="quick:length=16,longest=2,batch=4,layers=1,width=16,heads=2,vocabulary=300,evaluated=256",
    on_stage=stages.append, on_begin=lambda comparison: stages.append(comparison.schemes),
    on_steps=lambda done, total, left: steps.append((done, total, left)), on_run=runs.append,
)
print(json.dumps([found.table, steps[0], steps[-1], [(each.run.scheme, each.state) for each in runs], stages]))
"""


def test_a_script_compares_with_callbacks(tmp_path):
    (tmp_path / "words.txt").write_text("one two three four five, once I caught a fish alive\n" * 300)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "begin"
    table, begun, ended, runs, stages = json.loads(last)
    assert {row["scheme"] for row in table} == {"nope", "alibi"}
    assert all(row["finished"] == 1 and row["score"] > 0 and row["low"] is None for row in table)
    assert (begun, ended) == ([0, 8, 2], [8, 8, 0])
    assert sorted(runs) == [["alibi", "done"], ["nope", "done"]]
    assert stages == ["preparing the data", ["nope", "alibi"]]
    assert (tmp_path / "out" / "report.html").exists()
    assert ComparisonResult(tmp_path / "out").table == table
